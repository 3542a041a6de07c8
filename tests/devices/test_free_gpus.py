"""Which GPUs are free, and which join and leave: decisions over made-up looks, with a clock of their own."""

import random
from functools import partial

import pytest

from hydra_engine import FreeGpus
from hydra_engine.devices.watcher import UNSEEN_BYTES, GiveUp, SeenGpu, Take, Watch
from tests.refused import refused

OWN, GIB = 77, 2**30
seen = partial(SeenGpu, total_bytes=80 * GIB)


def occupant(gpu, **settings):
    return FreeGpus(**settings).occupant(gpu, OWN)


# --- one GPU at one time ---


def test_a_gpu_without_processes_is_free():
    assert occupant(seen(free_bytes=80 * GIB)) is None


def test_another_process_occupies_a_gpu_and_the_own_one_does_not():
    assert occupant(seen(free_bytes=79 * GIB, pids=frozenset({5}))) == "process 5"
    assert occupant(seen(free_bytes=79 * GIB, pids=frozenset({OWN}))) is None
    held = seen(free_bytes=9 * GIB, held_bytes=70 * GIB, pids=frozenset({OWN, 9, 5}))
    assert occupant(held) == "process 5 and 1 more"


def test_a_driver_that_numbers_processes_as_the_host_does_shows_this_one_under_another_number():
    held = partial(seen, free_bytes=30 * GIB, held_bytes=50 * GIB)
    assert occupant(held(pids=frozenset({4711}))) is None
    assert occupant(held(pids=frozenset({4711, 4712}))) == "1 more processes than this one"
    assert occupant(held(pids=frozenset())) is None
    assert occupant(seen(free_bytes=80 * GIB, pids=frozenset({4711}))) == "process 4711"  # nothing here is ours


@pytest.mark.parametrize("pids", [None, frozenset()], ids=["not told", "none shown"])
def test_memory_that_no_process_is_shown_for_occupies_a_gpu(pids):
    assert occupant(seen(free_bytes=80 * GIB - UNSEEN_BYTES, pids=pids)) is None
    unseen = occupant(seen(free_bytes=80 * GIB - UNSEEN_BYTES - 1, pids=pids))
    assert unseen == "2 GiB held by processes that NVML does not show"
    assert occupant(seen(free_bytes=10 * GIB, held_bytes=69 * GIB, pids=pids)) is None


def test_with_memory_asked_for_other_processes_do_not_matter():
    asked = partial(occupant, memory="20GiB")
    assert asked(seen(free_bytes=20 * GIB, pids=frozenset({5, 6}))) is None
    assert asked(seen(free_bytes=20 * GIB - 1, pids=frozenset())) == "20 GiB free, 20 GiB asked for"
    assert asked(seen(free_bytes=2 * GIB, held_bytes=18 * GIB, pids=None)) is None  # its own memory counts


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("memory", "20G"),
        ("memory", 0),
        ("poll_s", 0),
        ("poll_s", 86401),
        ("poll_s", "5"),
        ("poll_s", True),
        ("free_s", -1),
        ("free_s", "1"),
        ("grace_s", float("nan")),
    ],
)
def test_bad_settings_are_refused(setting, value):
    with refused(says=f"{setting}: {value!r}") as error:
        FreeGpus(**{setting: value})
    assert "\n" not in str(error.value)


# --- over time ---

FREE, BUSY = None, "process 5"


@pytest.fixture
def watch():
    return Watch(FreeGpus(free_s=60))


def test_a_gpu_is_given_up_at_the_first_look_that_shows_it_in_use(watch):
    assert watch.decide(0, {"a": FREE, "b": BUSY}, {"a": "in", "b": "in"}) == [GiveUp("b", BUSY)]
    assert watch.decide(5, {"a": FREE, "b": BUSY}, {"a": "in", "b": "leaving"}) == []
    assert watch.decide(10, {"a": FREE, "b": BUSY}, {"a": "in", "b": "out"}) == []


def test_it_is_taken_back_once_it_was_free_for_a_while(watch):
    watch.decide(0, {"b": BUSY}, {"b": "in"})
    assert watch.decide(5, {"b": FREE}, {"b": "out"}) == []
    assert watch.decide(64, {"b": FREE}, {"b": "out"}) == []
    assert watch.decide(65, {"b": FREE}, {"b": "out"}) == [Take("b")]
    assert watch.decide(70, {"b": FREE}, {"b": "in"}) == []


def test_any_use_begins_the_while_again(watch):
    watch.decide(0, {"b": BUSY}, {"b": "in"})
    watch.decide(5, {"b": FREE}, {"b": "out"})
    watch.decide(60, {"b": BUSY}, {"b": "out"})
    assert watch.decide(65, {"b": FREE}, {"b": "out"}) == []
    assert watch.decide(124, {"b": FREE}, {"b": "out"}) == []
    assert watch.decide(125, {"b": FREE}, {"b": "out"}) == [Take("b")]


def test_a_gpu_that_was_in_use_at_the_beginning_is_taken_later(watch):
    assert watch.decide(0, {"a": FREE, "b": BUSY}, {"a": "in"}) == []
    watch.decide(5, {"a": FREE, "b": FREE}, {"a": "in"})
    assert watch.decide(65, {"a": FREE, "b": FREE}, {"a": "in"}) == [Take("b")]


def test_a_gpu_that_was_not_seen_stays_as_it_is(watch):
    assert watch.decide(0, {}, {"a": "in"}) == []
    watch.decide(5, {"b": FREE}, {"a": "in"})
    watch.decide(30, {}, {"a": "in"})
    assert watch.decide(70, {"b": FREE}, {"a": "in"}) == []  # somebody may have used it meanwhile
    assert watch.decide(130, {"b": FREE}, {"a": "in"}) == [Take("b")]


@pytest.mark.parametrize(
    ("was_given_up", "is_seen_in"),
    [(False, True), (True, True), (True, False)],
    ids=["in from the beginning", "back", "out again before the next look"],
)
def test_one_that_somebody_else_removed_or_that_failed_stays_out(watch, was_given_up, is_seen_in):
    if was_given_up:  # and came back
        watch.decide(0, {"b": BUSY}, {"b": "in"})
        watch.decide(0, {"b": FREE}, {"b": "out"})
        assert watch.decide(60, {"b": FREE}, {"b": "out"}) == [Take("b")]
    if is_seen_in:
        watch.decide(65, {"b": FREE}, {"b": "in"})
    assert [watch.decide(now_s, {"b": FREE}, {"b": "out"}) for now_s in (70, 700, 7000)] == [[], [], []]


def test_no_more_are_taken_than_the_pool_may_have():
    watch = Watch(FreeGpus(free_s=0), max_devices=2)
    free = dict.fromkeys("abcd")
    assert watch.decide(0, free, {"a": "in"}) == [Take("b")]
    assert watch.decide(5, free, {"a": "in", "b": "in"}) == []
    assert watch.decide(10, free, {"a": "leaving", "b": "in"}) == []
    assert watch.decide(15, free | {"b": BUSY}, {"a": "out", "b": "in"}) == [GiveUp("b", BUSY), Take("c")]
    assert watch.decide(20, free | {"b": BUSY}, {"a": "out", "b": "out", "c": "in"}) == [Take("d")]


def test_one_that_could_not_join_is_tried_again_after_a_while(watch):
    watch.decide(0, {"b": FREE}, {})
    assert watch.decide(60, {"b": FREE}, {}) == [Take("b")]
    watch.refused("b")
    assert watch.decide(65, {"b": FREE}, {}) == []
    assert watch.decide(124, {"b": FREE}, {}) == []
    assert watch.decide(125, {"b": FREE}, {}) == [Take("b")]


def test_looks_of_an_earlier_run_do_not_count(watch):
    watch.decide(0, {"b": FREE}, {})
    watch.begin()
    assert watch.decide(6000, {"b": FREE}, {}) == []
    assert watch.decide(6060, {"b": FREE}, {}) == [Take("b")]


@pytest.mark.parametrize("seed", range(5))
def test_no_gpu_flaps_whatever_others_do(seed):
    """At each of 500 looks: a GPU in use is not kept, and none is taken that was not free at all looks for 60 s."""
    draw, watch = random.Random(seed), Watch(FreeGpus(free_s=60))
    pool, taken, last_busy = {"a": "in"}, [], {}
    for look in range(500):
        now_s = 5.0 * look
        occupants = {name: draw.choice([FREE] * 15 + [BUSY]) for name in "abc" if draw.random() > 0.02}
        for name in "abc":
            if occupants.get(name, BUSY) is not FREE:
                last_busy[name] = now_s
        for change in watch.decide(now_s, occupants, dict(pool)):
            if isinstance(change, GiveUp):
                assert (pool[change.name], occupants[change.name]) == ("in", BUSY)
                pool[change.name] = "out"
            else:
                assert pool.get(change.name, "out") == "out"
                assert now_s - last_busy.get(change.name, -5.0) >= 60
                pool[change.name] = "in"
                taken.append(change.name)
        assert not [name for name, place in pool.items() if place == "in" and occupants.get(name) == BUSY]
    assert {*taken} == {"a", "b", "c"}
