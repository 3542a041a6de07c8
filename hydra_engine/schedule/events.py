"""Events for the scheduler and instructions from it: plain values, so that a simulator can speak them too."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from hydra_engine.schedule.units import Unit


class Spread(NamedTuple):
    """A step spread over so many devices."""

    speedup: float = 1.0  # predicted: how many times shorter it is than on one
    ordered: frozenset[tuple[str, int]] = frozenset()  # units whose parts run one after the other
    in_sums: bool = True  # a part adds its gradients to those of the part before; False: each is sent down by itself


class TaskUnits(NamedTuple):
    """The units of a task as it is cut now."""

    training: tuple[tuple[str, int], ...]  # chain of a training batch: (kind, shard) in order
    evaluation: tuple[tuple[str, int], ...]  # that of an evaluation batch
    needs: tuple[tuple[int, ...], ...]  # by shard: whose update its load waits for
    updates: tuple[int, ...]  # shards with something to update, lowest first
    unit_s: dict[tuple[str, int], float]  # estimates, by (kind, shard)
    spreads: tuple[Spread, ...] = (Spread(),)  # of a step over 1, 2, ... devices


class TaskAdded(NamedTuple):
    """A task is ready to train."""

    task: str
    units: TaskUnits
    num_steps: int | None  # None: the loader does not say
    reads_ahead: bool  # a batch may be read before the forward of the one before it is through
    early_release: bool = False  # a shard is updated once its backward is stored, not after the commit
    priority: int = 0  # units of higher ones go first, under any policy
    weight: float = 1.0  # share of compute time, under "fair-share"
    reads_last: bool = False  # a batch may be read only once the step before it is in all weights
    group: str | None = None  # of tasks that share a quota; None: of those that have none
    quota: int | None = None  # devices of the group, which the first task of it brings
    min_devices: int = 1  # with fewer in, it begins no step; with as many, a step is spread over no fewer
    max_devices: int | None = None  # a step is spread over no more
    adapts: bool = False  # its batches are chosen for the devices that a step is spread over: `Read` tells how many


class BatchReady(NamedTuple):
    """The reader has the next batch."""

    task: str
    step: int
    training: bool
    has_to_fit: bool = False  # before it begins: where a device that runs out would be too late
    num_micro_batches: int = 1  # it can be spread over as many devices
    num_left: int | None = None  # steps of the task from this one on, where that is known better than before


class EpochAhead(NamedTuple):
    """The reader is about to open an epoch's iterator, and does so when it is asked again: callbacks come before."""

    task: str
    epoch: int


class EvaluationOver(NamedTuple):
    """The reader has given an evaluation's last batch, and reads on when it is asked again: callbacks come before."""

    task: str
    epoch: int  # that the schedule has reached


class DataEnded(NamedTuple):
    """The reader has seen the last epoch to its end."""

    task: str


class Computed(NamedTuple):
    """A device is through with a unit and can run another; its output may still be on the way to DRAM."""

    device: int
    unit: Unit
    seconds: float
    failed: bool = False  # its `Failed` or `DidNotFit` comes: nothing may go on from it
    stored: bool = False  # what it left is in DRAM already: no `Stored` comes


class Stored(NamedTuple):
    """Everything later units need from a unit is in DRAM."""

    unit: Unit


class StepCommitted(NamedTuple):
    """A batch's results are part of the task's state; for a training batch, updates may start."""

    task: str
    training: bool


class ShardUpdated(NamedTuple):
    """A shard's optimizer step is through."""

    task: str
    shard: int


class Failed(NamedTuple):
    """Something of a task raised, and it begins nothing more: a unit (after its `Computed`), its commit, an update."""

    task: str
    error: BaseException
    where: str
    unit: Unit | None = None
    commit: bool = False  # its commit, or its fit
    device: int | None = None  # of the unit
    is_torn: bool = False  # part of what the unit leaves is in DRAM, where what it began with was


class DidNotFit(NamedTuple):
    """A unit raised (after its `Computed`), and the step in progress starts again: cut finer where memory ran short."""

    unit: Unit


class UnitLost(NamedTuple):
    """A unit's device has failed under it (after its `Computed`): it is offered again, to any device."""

    unit: Unit


class SpreadsKnown(NamedTuple):
    """Steps of a task that begin from now on may be spread like this, over more devices than before or over fewer."""

    task: str
    spreads: tuple[Spread, ...]  # over 1, 2, ... devices; at least one


class Fitted(NamedTuple):
    """The batch in hand fits, cut into these units from now on, and is begun from its first unit."""

    task: str
    units: TaskUnits
    is_retried: bool = False  # nothing has changed: a batch that was read before this fits as it did


class DataFailed(NamedTuple):
    """The reader raised. What was read before is still trained on, as the plain loop would have."""

    task: str
    error: BaseException
    where: str


class DeviceAdded(NamedTuple):
    """A device may be used."""

    device: int


class DeviceRemoved(NamedTuple):
    """A device is to go: begin nothing more on it, and say `Release` once its unit is computed."""

    device: int


class DeviceWanted(NamedTuple):
    """Somebody else wants a device for a while, for a rehearsal: say `Lend` once its unit is through."""

    device: int


class DeviceReturned(NamedTuple):
    """A device that was lent, or wanted, may be used again."""

    device: int


class MoveWanted(NamedTuple):
    """Homes of shards are to move: say `Move` for each once nothing uses it.

    leaves: from a device, so that no unit of these shards begins before; else a shard is loaded to its home before its
    next forward.
    """

    task: str
    shards: tuple[int, ...]
    leaves: bool = False


class HomesMoved(NamedTuple):
    """Homes of shards have moved, or have found no room."""

    task: str
    shards: tuple[int, ...]
    homes: dict[int, int]  # by shard, of all that are on a device: which one


class CaptureWanted(NamedTuple):
    """A task is to be saved: say `Capture` at once where it is settled, else when it is."""

    task: str


class TaskStopped(NamedTuple):
    """One task shall begin nothing new."""

    task: str
    uncommitted: bool = False  # said instead of `StepCommitted`
    is_paused: bool = False  # a step that has updated shards already is committed, and then it ends


class StopRequested(NamedTuple):
    """Nothing new shall begin; what was committed is finished."""


Event: TypeAlias = (
    "TaskAdded | BatchReady | DataEnded | DataFailed | Computed | Stored | StepCommitted | ShardUpdated | Failed"
    " | DidNotFit | UnitLost | Fitted | SpreadsKnown | DeviceAdded | DeviceRemoved | DeviceWanted | DeviceReturned"
    " | MoveWanted | HomesMoved | CaptureWanted | TaskStopped | StopRequested"
)


class Load(NamedTuple):
    """Begin to bring a unit's shard to a device: the device's claim."""

    device: int
    unit: Unit


class Drop(NamedTuple):
    """Revoke a claim."""

    device: int
    unit: Unit


class Run(NamedTuple):
    """Compute the device's claim."""

    device: int
    unit: Unit


class Lend(NamedTuple):
    """Give a device to who wants it: no unit computes there, and none is claimed."""

    device: int


class Release(NamedTuple):
    """Let a device go that was removed: no unit computes there, none is claimed, and none will be."""

    device: int


class Read(NamedTuple):
    """Get the next batch."""

    task: str
    num_devices: int = 1  # that its step would be spread over as things stand, if it has as many micro-batches


class Begin(NamedTuple):
    """Make the batch that was read the step in progress, in so many parts."""

    task: str
    step: int
    num_parts: int = 1
    in_sums: bool = True  # as in the `Spread` over so many devices, which stays while the step is in progress


class Fit(NamedTuple):
    """See that the batch in hand fits, cut finer where it does not, and begin it: the one read, or the one in progress.

    `unit`: where a device ran out of memory, or that is tried again.
    """

    task: str
    unit: Unit | None


class Commit(NamedTuple):
    """Take the step in progress over into the task's state."""

    task: str
    training: bool

    @property
    def host_order(self) -> int:
        """Its place among the jobs of its task that wait for a thread of the host: before all updates."""
        return -1


class Update(NamedTuple):
    """Step the optimizer on one shard."""

    task: str
    shard: int

    @property
    def host_order(self) -> int:
        """Its place among the jobs of its task that wait for a thread of the host: the lowest shard's is first."""
        return self.shard


class Move(NamedTuple):
    """Move the homes of these shards: no unit uses them and no update, until it is said that they have moved."""

    task: str
    shards: tuple[int, ...]


class Discard(NamedTuple):
    """Drop the gradients of one shard: its task is over, so no update takes them."""

    task: str
    shard: int


class Capture(NamedTuple):
    """The task is settled: all of its state is of one step, until its next commit or early release.

    Show that step to its callbacks, and save it where that is wanted. Said after each commit, once its updates are
    through.
    """

    task: str


class Finish(NamedTuple):
    """Nothing of the task is under way any more: give its weights back."""

    task: str
    is_settled: bool = True  # False: it ends in a step that has updated shards already


Instruction: TypeAlias = (
    "Load | Drop | Run | Lend | Release | Read | Begin | Fit | Commit | Update | Move | Discard | Capture | Finish"
)
