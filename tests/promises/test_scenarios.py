"""What happens to a task while it trains, wherever and under whichever setting, leaves what is promised for it."""

from itertools import cycle

import pytest

from tests.covering import cover
from tests.scenarios import HAPPENINGS, PLACES, Scenario, check

SETTINGS = {
    "step": (0, 5),
    "num_devices": (1, 2),
    "accumulation_steps": (1, 3),
    "company": (True, False),
    "double_buffer": (True, False),
    "chaos": (None, 5),
    "kept": (False, True),
}
TRIED_AGAIN = {
    "event": ("tries again",),
    "place": PLACES,
    "update": ("clipped", "whole task"),
    "saves": (False, True),
    **SETTINGS,
}
# What is tried again ends with all of its bits and so shows most; for what is not, a place of each kind is enough.
RAISED = TRIED_AGAIN | {
    "event": ("raises",),
    "place": ("forward of the middle shard", "backward of the lowest shard", "load_slab", "store_gradients", "loader"),
}
# Where a whole run, or a device, is struck matters less: in a unit, in the loader, on the host, between two steps.
WHOLE_RUN = {
    "event": tuple(HAPPENINGS),
    "place": ("backward of the lowest shard", "loader", "update", "callback"),
    "update": ("clipped", "early release"),
    **SETTINGS,
}
MEMORY = [
    Scenario(event, place)
    for event, place in (("host memory", "loss"), ("host memory", "loader"), ("torch's memory", "commit"))
]


def scenarios(factors):
    """For the net every pair of settings, with one place after the other; for the rest every pair with a place, too."""
    settings = cover({name: values for name, values in factors.items() if name != "place"})
    number = max(len(settings), len(factors["place"]))
    taken = zip(range(number), cycle(settings), cycle(factors["place"]))
    net = dict.fromkeys(as_possible(Scenario(**case, place=place)) for _, case, place in taken)
    more = dict.fromkeys(as_possible(Scenario(**case)) for case in cover(factors, seed=1))
    return [*net, *(pytest.param(each, marks=pytest.mark.rest) for each in more if each not in net)]


def as_possible(scenario):
    """What fails in an update for good has shards of two steps: `test_retries.py` has that.

    A run that finished has nothing to resume.
    """
    if (scenario.event, scenario.place) == ("raises", "update"):
        scenario = scenario._replace(event="tries again")
    return scenario._replace(saves=scenario.saves and scenario.event == "raises")


@pytest.mark.parametrize(
    "scenario", [*scenarios(TRIED_AGAIN), *scenarios(RAISED), *scenarios(WHOLE_RUN), *MEMORY], ids=str
)
def test_every_promise_holds(scenario, tmp_path):
    check(scenario, tmp_path)
