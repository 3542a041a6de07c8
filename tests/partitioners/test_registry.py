"""Partitioners are made by name, and what the registry does not know is refused with what it does."""

import pytest

from partitioners import (
    Balanced,
    Budget,
    Optimal,
    Pilot,
    Presharded,
    make_partitioner,
    partitioner,
    register_partitioner,
)
from tests.partitions import layers


@pytest.fixture
def own_names(monkeypatch):
    """Names that a test registers are forgotten after it."""
    monkeypatch.setattr(partitioner, "_KNOWN", dict(partitioner._KNOWN))


@pytest.mark.parametrize(
    ("name", "settings", "kind", "representation"),
    [
        ("pilot", {}, Pilot, "Pilot()"),
        ("optimal", {}, Optimal, "Optimal()"),
        ("balanced", {"num_shards": 4}, Balanced, "Balanced(4, by='time')"),
        ("balanced", {"num_shards": 2, "by": "bytes"}, Balanced, "Balanced(2, by='bytes')"),
        ("presharded", {"boundaries": [3, 6, 8]}, Presharded, "Presharded([3, 6, 8])"),
    ],
)
def test_each_is_known_by_name_and_takes_its_settings(name, settings, kind, representation):
    partitioner = make_partitioner(name, **settings)
    assert type(partitioner) is kind
    assert repr(partitioner) == representation


def test_each_call_makes_its_own():
    assert make_partitioner("pilot") is not make_partitioner("pilot")


@pytest.mark.parametrize("name", ["Pilot", "best", ""])
def test_an_unknown_name_lists_the_known_ones(name):
    with pytest.raises(
        ValueError, match=f"partitioner: {name!r}, known: 'balanced', 'optimal', 'pilot', 'presharded'$"
    ):
        make_partitioner(name)


@pytest.mark.parametrize(
    ("name", "settings", "example"),
    [
        ("pilot", {"num_shards": 2}, r"Pilot\(\)"),
        ("optimal", {"num_shards": 2}, ""),
        ("balanced", {}, r"Balanced\(4\)"),
        ("balanced", {"num_shards": 2, "boundaries": [2]}, r"Balanced\(4\)"),
        ("presharded", {}, r"Presharded\(\[3, 6, 8\]\)"),
    ],
)
def test_settings_that_it_does_not_take_are_named_with_an_example(name, settings, example):
    rule = rf"partitioner: '{name}' does not take the settings {{.*}} \(.*\); pass an object with the right ones, such "
    with pytest.raises(ValueError, match=f"{rule}as {example}"):
        make_partitioner(name, **settings)


def test_a_setting_of_a_bad_value_is_refused_in_the_partitioners_words():
    with pytest.raises(ValueError, match=r"^num_shards: 0, limit: a whole number >= 1"):
        make_partitioner("balanced", num_shards=0)
    with pytest.raises(ValueError, match=r"^boundaries: "):
        make_partitioner("presharded", boundaries=[3, 3])


class Halves:
    def __init__(self, *, at=1):
        self.at = at

    def partition(self, costs, budget):
        return [self.at, len(costs)]

    def revise(self, boundaries, shard, costs=()):
        return None


@pytest.mark.usefixtures("own_names")
def test_a_users_partitioner_is_made_by_the_name_it_registers():
    register_partitioner("halves", Halves)
    made = make_partitioner("halves", at=2)
    assert made.partition(layers({}, {}, {}), Budget(memory_bytes=1)) == [2, 3]
    with pytest.raises(ValueError, match="known: 'balanced', 'halves', 'optimal', 'pilot', 'presharded'"):
        make_partitioner("thirds")


@pytest.mark.usefixtures("own_names")
def test_a_users_partitioner_names_the_settings_that_it_does_not_take():
    register_partitioner("halves", Halves)
    with pytest.raises(ValueError, match=r"partitioner: 'halves' does not take the settings {'where': 2} \(") as caught:
        make_partitioner("halves", where=2)
    assert isinstance(caught.value.__cause__, TypeError)


@pytest.mark.usefixtures("own_names")
def test_a_name_is_taken_once():
    register_partitioner("halves", Halves)
    for name in ("halves", "pilot"):
        with pytest.raises(ValueError, match=rf"partitioner: '{name}' is taken, by .*; choose another name"):
            register_partitioner(name, Pilot)
    assert isinstance(make_partitioner("halves"), Halves)
