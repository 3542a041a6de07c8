"""A schedule as text: a line for each device."""

from hydra_engine import TaskCost, simulate
from hydra_engine.pictures import draw_text
from hydra_engine.pictures.text import LETTERS
from hydra_engine.schedule.units import Placed, Unit
from tests.refused import refused


def placed(unit, device, start_s, end_s):
    return Placed(Unit.parse(unit), device, start_s, end_s)


SCHEDULE = [
    placed("long.f0@0", 0, 0.0, 2.0),
    placed("short.fb0@0", 1, 1.0, 4.0),
    placed("long.fb1@0", 0, 3.0, 4.0),
    placed("long.b0@0", 1, 4.0, 8.0),
]


def test_text_is_a_line_for_each_device_and_a_legend():
    assert draw_text(SCHEDULE, 8).splitlines() == [
        "device 0   |aa.a....|",
        "device 1   |.bbbaaaa|",
        "           0     8 s",
        "a long",
        "b short",
    ]
    assert draw_text([]) == "nothing was computed\n"


def test_character_is_the_task_that_computes_most_of_its_time():
    schedule = [placed("a.f0@0", 0, 0.0, 0.7), placed("b.f0@0", 0, 0.7, 1.0), placed("b.fb1@0", 0, 1.6, 2.0)]
    assert draw_text(schedule, 2).splitlines()[0] == "device 0   |a.|"


def test_every_task_has_a_letter():
    schedule = [placed(f"{k}.fb0@0", 0, k, k + 1) for k in range(len(LETTERS) + 3)]
    lines = draw_text(schedule, 200).splitlines()
    assert len(lines) == 2 + len(schedule)
    assert lines[-1] == f"c {len(LETTERS) + 2}"


def test_simulated_schedule_is_drawn_without_gaps():
    found = simulate([TaskCost(name="a", unit_s=(1.0, 2.0, 3.0), num_steps=2)], 1, record=True)
    assert draw_text(found.schedule, 40).splitlines()[0] == f"device 0   |{'a' * 40}|"


def test_width_is_positive():
    with refused(says="width: 0"):
        draw_text(SCHEDULE, 0)
