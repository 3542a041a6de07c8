"""Units print and parse back, chains have the drawn order, a schedule's graph knows its critical path."""

import networkx as nx
import pytest

from hydra_engine.schedule.graph import critical_path, schedule_graph, validate
from hydra_engine.schedule.units import (
    KINDS,
    Placed,
    Unit,
    evaluation_chain,
    format_schedule,
    parse_schedule,
    training_chain,
)
from tests.refused import refused


def drawn(text):
    """A chain as it is drawn: "f0 fb1 b0"."""
    units = [Unit.parse(f"task.{word}@0") for word in text.split()]
    return tuple((unit.kind, unit.shard) for unit in units)


@pytest.mark.parametrize("kind", KINDS)
def test_unit_parses_back_from_what_it_prints(kind):
    for task in ("bert", "task-0", "a.b", "two words", "x.f1@2", "übung", "e", "f0", "a\nb"):
        for shard, step, part in ((0, 0, 0), (7, 0, 1), (0, 12, 0), (123, 456789, 31)):
            unit = Unit(task, kind, shard, step, part)
            assert Unit.parse(str(unit)) == unit


def test_unit_prints_task_kind_shard_and_step():
    assert str(Unit("bert", "f", 2, 5)) == "bert.f2@5"
    assert str(Unit("bert", "fb", 11, 0)) == "bert.fb11@0"
    assert Unit.parse("bert.b3@40") == ("bert", "b", 3, 40, 0)
    assert str(Unit("bert", "b", 3, 40, 2)) == "bert.b3@40+2"


MALFORMED = ("", "bert", "bert.f2", "bert.f@5", "bert.2@5", "bert.x2@5", "bert.bf2@5", "bert.F2@5", "bertf2@5", ".f2@5")
MALFORMED += ("f2@5", "bert.f-2@5", "bert.f2@-5", "bert.f2@5.0", "bert.f2@5 ", "bert.f2@5\n", "bert.f2@", "bert.f2@5@6")


@pytest.mark.parametrize("text", MALFORMED)
def test_malformed_unit_is_refused(text):
    with refused(ValueError, says="unit") as refusal:
        Unit.parse(text)
    assert repr(text) in str(refusal.value)


@pytest.mark.parametrize(
    ("num_shards", "lowest_backward", "expected"),
    [
        (1, 0, "fb0"),
        (2, 0, "f0 fb1 b0"),
        (2, 1, "f0 fb1"),
        (3, 0, "f0 f1 fb2 b1 b0"),
        (5, 0, "f0 f1 f2 f3 fb4 b3 b2 b1 b0"),
        (5, 2, "f0 f1 f2 f3 fb4 b3 b2"),  # shards 0 and 1 are frozen: no gradient flows below 2
        (5, 3, "f0 f1 f2 f3 fb4 b3"),
        (5, 4, "f0 f1 f2 f3 fb4"),
    ],
)
def test_training_chain_is_the_drawing(num_shards, lowest_backward, expected):
    assert training_chain(num_shards, lowest_backward) == drawn(expected)


@pytest.mark.parametrize(("num_shards", "expected"), [(1, "e0"), (2, "e0 e1"), (5, "e0 e1 e2 e3 e4")])
def test_evaluation_chain_is_the_drawing(num_shards, expected):
    assert evaluation_chain(num_shards) == drawn(expected)


# -- schedules


def placed(unit, device, start_s, end_s):
    return Placed(Unit.parse(unit), device, start_s, end_s)


#     device 0   |a.f0  |a.fb1   |a.b0 |
#     device 1   |b.fb0    |c.fb0|
SCHEDULE = [
    placed("a.f0@0", 0, 0.0, 2.0),
    placed("b.fb0@0", 1, 0.0, 3.0),
    placed("a.fb1@0", 0, 2.0, 5.0),
    placed("c.fb0@0", 1, 3.0, 5.0),
    placed("a.b0@0", 0, 5.0, 7.0),
]
CHAINS = {"a": training_chain(2, 0), "b": training_chain(1, 0)}


def test_schedule_parses_back_from_what_it_prints():
    assert str(SCHEDULE[0]) == "a.f0@0 on 0 from 0.0 to 2.0"
    assert parse_schedule(format_schedule(SCHEDULE)) == SCHEDULE
    odd = [placed("on 3 from.f0@0", 12, 1 / 3, 1e-30), placed("b.e2@7", 0, 1e9, 1e9 + 1 / 7)]
    assert parse_schedule(format_schedule(odd)) == odd
    assert parse_schedule("\n") == []


@pytest.mark.parametrize(
    "text", ["a.f0@0", "a.f0@0 on 0", "a.f0@0 on x from 0 to 1", "a.f0 on 0 from 0 to 1", "a.f0@0 on 0 from a to 1"]
)
def test_malformed_schedule_is_refused(text):
    with refused(ValueError):
        parse_schedule(text)


def test_graph_says_what_waited_for_what():
    graph = schedule_graph(SCHEDULE)
    assert graph.nodes[Unit("a", "fb", 1, 0)] == {"seconds": 3.0, "device": 0, "start_s": 2.0, "end_s": 5.0}
    edges = {(str(u), str(v)): data["of"] for u, v, data in graph.edges(data=True)}
    assert edges == {("a.f0@0", "a.fb1@0"): "both", ("a.fb1@0", "a.b0@0"): "both", ("b.fb0@0", "c.fb0@0"): "device"}
    assert nx.dag_longest_path_length(graph) == 2.0 + 3.0


def test_graph_has_tasks_that_change_their_device():
    graph = schedule_graph([placed("a.f0@0", 0, 0.0, 1.0), placed("a.fb1@0", 1, 1.5, 2.0)])
    assert [data for *_, data in graph.edges(data=True)] == [{"of": "task", "weight": 1.0}]


#     device 0   |a.f0  |a.fb1   |      |a.f0@1
#     device 1   |a.f0+1   |a.fb1+1|
SPREAD = [
    placed("a.f0@0", 0, 0.0, 2.0),
    placed("a.f0@0+1", 1, 0.0, 3.0),
    placed("a.fb1@0", 0, 2.0, 5.0),
    placed("a.fb1@0+1", 1, 3.0, 5.5),
    placed("a.f0@1", 0, 6.0, 8.0),
    placed("a.fb1@1", 0, 8.0, 9.0),
]


def test_parts_of_a_step_are_chains_and_the_next_step_waits_for_all():
    graph = schedule_graph(SPREAD)
    edges = {(str(u), str(v)): data["of"] for u, v, data in graph.edges(data=True)}
    assert edges == {
        ("a.f0@0", "a.fb1@0"): "both",
        ("a.f0@0+1", "a.fb1@0+1"): "both",
        ("a.fb1@0", "a.f0@1"): "both",
        ("a.fb1@0+1", "a.f0@1"): "task",
        ("a.f0@1", "a.fb1@1"): "both",
    }
    validate(SPREAD, {"a": training_chain(2, 1)})
    assert [str(unit) for unit in critical_path(SPREAD)] == ["a.f0@0+1", "a.fb1@0+1", "a.f0@1", "a.fb1@1"]
    with refused(ValueError, says="task a.f0@1"):
        validate([*SPREAD[:4], placed("a.f0@1", 0, 5.2, 8.0)])
    with refused(ValueError, task="a", says="a.f0@0+1"):
        validate([*SPREAD[:3], *SPREAD[4:]], {"a": training_chain(2, 1)})


def test_valid_schedule_passes():
    validate(SCHEDULE, CHAINS)
    validate(SCHEDULE[::-1], CHAINS)
    validate([])


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ([placed("a.f0@0", 0, 2.0, 1.0)], "a.f0@0 2.0 1.0"),
        ([placed("a.f0@0", 0, -1.0, 1.0)], "a.f0@0 -1.0"),
        ([*SCHEDULE, placed("b.fb0@0", 1, 8.0, 9.0)], "b.fb0@0"),
        ([*SCHEDULE, placed("d.fb0@0", 1, 2.5, 2.7)], "device d.fb0@0"),
        ([*SCHEDULE, placed("b.fb0@1", 2, 2.5, 3.7)], "task b.fb0@1"),
        (SCHEDULE[:3], "a.fb1@0"),
        ([*SCHEDULE[:2], *SCHEDULE[3:]], "a.b0@0 a.fb1@0"),
    ],
)
def test_schedule_that_could_not_have_been_is_refused(schedule, words):
    with refused(ValueError, says=words):
        validate(schedule, CHAINS)


def test_critical_path_is_what_the_last_unit_waited_for():
    assert [str(unit) for unit in critical_path(SCHEDULE)] == ["a.f0@0", "a.fb1@0", "a.b0@0"]
    waits = [placed("b.fb0@0", 0, 0.0, 4.0), placed("a.f0@0", 1, 0.0, 1.0), placed("a.fb1@0", 0, 4.0, 5.0)]
    assert [str(unit) for unit in critical_path(waits)] == ["b.fb0@0", "a.fb1@0"]
    assert critical_path([]) == []
