"""Random walks of the scheduler through the world of tests, which checks every rule after each event."""

from collections import Counter

import pytest

from hydra_engine.schedule.events import (
    Begin,
    Computed,
    DeviceAdded,
    Finish,
    Read,
    Run,
    SpreadsKnown,
    Stored,
    TaskAdded,
    UnitLost,
)
from tests.world import MOST_DEVICES, assert_trained, walk

# What happens in a walk, by its seed. `make test` walks the first seeds of each kind.
WALKS = {
    "with nothing amiss": (range(150), lambda seed: {}),
    "with failures": (range(1000, 1200), lambda seed: {"failures": True}),
    "with stop requests": (range(2000, 2150), lambda seed: {"failures": seed % 2 == 0, "stops": True}),
    "with batches that do not fit": (
        range(3000, 3200),
        lambda seed: {"failures": seed % 3 == 0, "stops": seed % 5 == 0, "misfits": True},
    ),
    "with devices that come, go and fail": (range(4000, 4200), lambda seed: {"changes": True}),
    "with changes of devices and failures of tasks": (
        range(5000, 5300),
        lambda seed: {"failures": seed % 2 == 0, "stops": seed % 3 == 0, "misfits": seed % 5 < 2, "changes": True},
    ),
    "in groups": (range(6000, 6100), lambda seed: {"groups": True}),
    "in groups with devices that come and go": (range(7000, 7150), lambda seed: {"groups": True, "changes": True}),
    "in groups with failures": (
        range(8000, 8200),
        lambda seed: {"groups": True, "changes": seed % 2 == 0, "failures": seed % 3 > 0, "misfits": seed % 5 < 2},
    ),
    "in groups with stop requests": (
        range(9000, 9100),
        lambda seed: {"groups": True, "changes": seed % 2 == 0, "stops": True},
    ),
}
NUM_IN_NET, NUM_AT_ONCE = 12, 50


def cases():
    for name, (seeds, _) in WALKS.items():
        yield pytest.param(name, seeds[:NUM_IN_NET], id=name)
        for first in range(NUM_IN_NET, len(seeds), NUM_AT_ONCE):
            some = seeds[first : first + NUM_AT_ONCE]
            yield pytest.param(name, some, marks=pytest.mark.rest, id=f"{name} from {some[0]}")


@pytest.mark.parametrize(("what_happens", "seeds"), list(cases()))
def test_walk_ends_and_trains_every_batch_of_every_task_that_goes_on(what_happens, seeds):
    for seed in seeds:
        options = WALKS[what_happens][1](seed)
        assert_trained(walk(seed, **options), whole=not any(options.get(what) for what in ("failures", "stops")))


def seen_in(world):
    """What came of a walk, also what is rare: how often."""
    story, seen, num_known = world.story, Counter(), {}
    lost = {each.unit for each in story if isinstance(each, UnitLost)}
    stored = Counter(each.unit for each in story if isinstance(each, Stored))
    stored.update(each.unit for each in story if isinstance(each, Computed) and each.stored)
    seen["twice"] = sum(number > 1 for number in stored.values())
    seen["run again"] = len(lost & set(stored))
    added = Counter(each.device for each in story if isinstance(each, DeviceAdded))
    seen["back again"] = max(added.values(), default=0) > 1
    for each in story:
        seen[type(each).__name__] += 1
        match each:
            case Finish(is_settled=False):
                seen["undone"] += 1
            case Read(num_devices=number) if number > 1:
                seen["told"] += 1
            case Begin(num_parts=number):
                seen["parts", number] += 1
            case Run(unit=unit):
                task = world.tasks[unit.task].added
                seen["in a group", task.group is not None] += 1
            case TaskAdded(units=units):
                num_known[each.task] = len(units.spreads)
            case SpreadsKnown(spreads=spreads):
                seen["fewer"] += len(spreads) < num_known[each.task]
                seen["more"] += len(spreads) > num_known[each.task]
                num_known[each.task] = len(spreads)
    return seen


# Events and instructions by their type, and the rare things that `seen_in` tells.
EVENTS = ["TaskAdded", "BatchReady", "DataEnded", "DataFailed", "Computed", "Stored", "StepCommitted", "ShardUpdated"]
EVENTS += ["Failed", "DeviceAdded", "StopRequested", "Load", "Drop", "Run", "Read", "Begin", "Commit", "Update"]
EVENTS += ["Finish", "DidNotFit", "Fit", "Fitted", "CaptureWanted", "Capture"]
CHANGES = ["DeviceRemoved", "Release", "UnitLost", "SpreadsKnown", "TaskStopped", "Lend", "DidNotFit", "Capture"]
CHANGES += ["twice", "run again", "undone", "back again", "fewer", "more", "told"]
IN_GROUPS = ["DeviceRemoved", "Release", "Drop", ("parts", 2), ("parts", 3)]
IN_GROUPS += [("in a group", is_so) for is_so in (False, True)]


@pytest.mark.rest
@pytest.mark.parametrize(
    ("seeds", "options", "names"),
    [
        pytest.param(range(1000, 1020), {"failures": True, "stops": True, "misfits": True}, EVENTS, id="events"),
        pytest.param(range(5000, 5030), {"stops": True, "misfits": True, "changes": True}, CHANGES, id="changes"),
        pytest.param(range(7030, 7050), {"groups": True, "changes": True}, IN_GROUPS, id="groups"),
        pytest.param(
            (165, *range(205, 230)), {}, {("parts", number) for number in range(1, MOST_DEVICES + 1)}, id="spreads"
        ),
    ],
)
def test_walks_reach_what_they_are_for(seeds, options, names):
    """Also what is rare: units that go on from a lost one and come through, and steps that a stop leaves undone."""
    seen = sum((seen_in(walk(seed, **options)) for seed in seeds), Counter())
    assert all(seen[name] > 0 for name in names), [name for name in names if not seen[name]]
