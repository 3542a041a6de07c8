"""Tasks, devices and what they share in simulated time: carries out what a scheduler says."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import Any, NamedTuple, TypeAlias

from hydra_engine.devices import SLABS, Ledger, Residents
from hydra_engine.host import NUM_LOANS, Wanted, share_out
from hydra_engine.planning.costs import DeviceChange, DeviceCost, HostCost, TaskCost
from hydra_engine.schedule import (
    BACKWARD,
    FORWARD,
    BatchReady,
    Begin,
    Capture,
    Commit,
    Computed,
    DataEnded,
    DeviceAdded,
    DeviceRemoved,
    Discard,
    Drop,
    Event,
    Finish,
    Flow,
    HomesMoved,
    Instruction,
    Load,
    Move,
    MoveWanted,
    Placed,
    Read,
    Release,
    Run,
    Scheduler,
    ShardUpdated,
    Spread,
    StepCommitted,
    Stored,
    TaskAdded,
    TaskUnits,
    Unit,
    Update,
    part_ranges,
)

# What of a boundary is kept on a device.
VALUE, GRADIENT = "value", "gradient"

Done: TypeAlias = "Callable[[], None]"


class _Clock:
    """A clock that goes from one end of a job to the next."""

    def __init__(self, cores: float | None) -> None:
        """`cores`: shared by all that computes; None: enough."""
        self.now_s = 0.0
        self._cores = _Cores(cores)
        self._dram = _Cores(1.0)
        self._timers: list[tuple[float, int, Done]] = []
        self._serial = count()

    def wait(self, seconds: float, done: Done) -> None:
        """Begin a job that takes no core."""
        heappush(self._timers, (self.now_s + seconds, next(self._serial), done))

    def compute(self, seconds: float, done: Done) -> None:
        """Begin a job that takes a core."""
        self._cores.start(self.now_s, seconds, done)

    def update(self, seconds: float, done: Done) -> None:
        """Begin a job that alone keeps DRAM busy, and takes no core."""
        self._dram.start(self.now_s, seconds, done)

    @property
    def is_going(self) -> bool:
        """True if a job is under way."""
        return bool(self._timers) or min(self._cores.next_s, self._dram.next_s) < math.inf

    def go_on(self) -> None:
        """To the end of the job that ends next; what was to be done then is done."""
        timer_s = self._timers[0][0] if self._timers else math.inf
        shared = min(self._cores, self._dram, key=lambda each: each.next_s)
        self.now_s = max(self.now_s, min(timer_s, shared.next_s))
        (heappop(self._timers)[2] if timer_s <= shared.next_s else shared.pop())()


class _Cores:
    """Jobs that share cores evenly: with n of them on c cores each goes at min(1, c / n) of its speed.

    In virtual time, which goes at that speed, every job takes its own seconds; so jobs end in the order in which they
    would, and nothing is reckoned anew when one comes or goes.
    """

    def __init__(self, cores: float | None) -> None:
        self._cores = math.inf if cores is None else cores
        self._jobs: list[tuple[float, int, Done]] = []
        self._serial = count()
        self._virtual_s = 0.0
        self._now_s = 0.0

    @property
    def _rate(self) -> float:
        return min(1.0, self._cores / len(self._jobs)) if self._jobs else 1.0

    def _advance(self, now_s: float) -> None:
        self._virtual_s += (now_s - self._now_s) * self._rate
        self._now_s = now_s

    def start(self, now_s: float, seconds: float, done: Done) -> None:
        self._advance(now_s)
        heappush(self._jobs, (self._virtual_s + seconds, next(self._serial), done))

    @property
    def next_s(self) -> float:
        """When the next job ends, if nothing changes."""
        if not self._jobs:
            return math.inf
        return self._now_s + max(0.0, self._jobs[0][0] - self._virtual_s) / self._rate

    def pop(self) -> Done:
        self._advance(self.next_s)
        end_s, _, done = heappop(self._jobs)
        self._virtual_s = end_s  # not what adding up made of it
        return done


class _Queue:
    """Jobs that so many servers take in order."""

    def __init__(self, start: Callable[[float, Done], None], num_servers: int, *, skips: bool = True) -> None:
        """skips: what takes no time is done at once, without an event of its own."""
        self._start = start  # (seconds, what to call then)
        self._skips = skips
        self._num_free = num_servers
        self._waiting: deque[Callable[[], tuple[float, Done]]] = deque()

    def submit(self, take: Callable[[], tuple[float, Done]]) -> None:
        """Queue a job that `take` chooses once it is its turn."""
        self._waiting.append(take)
        self._pump()

    def _pump(self) -> None:
        while self._num_free and self._waiting:
            seconds, done = self._waiting.popleft()()
            if seconds == 0 and self._skips:
                done()
                continue
            self._num_free -= 1
            self._start(seconds, partial(self._end, done))

    def _end(self, done: Done) -> None:
        self._num_free += 1
        done()
        self._pump()


class _SimulatedLink:
    """Copies in one direction, one at a time: urgent ones first, which others stop for in the middle."""

    def __init__(self, time: _Clock, bytes_per_s: float | None, *, computes: bool) -> None:
        self._time = time
        self._bytes_per_s = bytes_per_s  # None: copies take no time
        self._computes = computes  # copies keep a core busy; what has begun is then finished
        self._waiting: tuple[deque[tuple[float, Done]], deque[tuple[float, Done]]] = (deque(), deque())
        self._current: tuple[float, Done, bool] | None = None  # (end, what to call then, whether it stops for others)
        self.busy_s = 0.0

    def submit(self, num_bytes: float, done: Done, *, urgent: bool = False) -> None:
        """Queue a copy; one without bytes takes no turn."""
        seconds = num_bytes / self._bytes_per_s if self._bytes_per_s else 0.0
        if seconds == 0:
            done()
            return
        self.busy_s += seconds
        if urgent and self._current is not None and self._current[2]:
            end_s, stopped, _ = self._current
            self._waiting[False].appendleft((end_s - self._time.now_s, stopped))
            self._current = None
        self._waiting[urgent].append((seconds, done))
        self._pump()

    def _pump(self) -> None:
        if self._current is None and any(self._waiting):
            urgent = bool(self._waiting[True])
            seconds, done = self._waiting[urgent].popleft()
            current = self._current = (self._time.now_s + seconds, done, not (urgent or self._computes))
            start = self._time.compute if self._computes else self._time.wait
            start(seconds, partial(self._end, current))

    def _end(self, copy: tuple[float, Done, bool]) -> None:
        if self._current is not copy:
            return  # it was stopped since
        self._current = None
        copy[1]()
        self._pump()


class SimulatedDevice(NamedTuple):
    """What came of a device."""

    num_units: int
    busy: dict[str, float]  # by lane: share of the makespan
    loaded_bytes: float
    stored_bytes: float
    in_s: float  # seconds in which it was in, with the end of the unit that it had when it was to go


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """What came of a simulated run."""

    makespan_s: float
    bound_s: float  # no schedule is faster, of units that take their seconds
    devices: tuple[SimulatedDevice, ...]
    finished_s: dict[str, float]  # by task
    num_units: int
    schedule: tuple[Placed, ...] = ()  # with `record=True`: units in the order of their ends

    @property
    def busy_share(self) -> float:
        """Of the time that devices were in, the share that they computed."""
        in_s = sum(device.in_s for device in self.devices)
        return self.makespan_s * sum(device.busy["compute"] for device in self.devices) / in_s if in_s else 0.0


class _Gate:
    """Jobs that wait while something is on its way."""

    def __init__(self, *, is_open: bool = False) -> None:
        self.is_open = is_open
        self._waiting: list[Done] = []

    def when_open(self, done: Done) -> None:
        if self.is_open:
            done()
        else:
            self._waiting.append(done)

    def open(self) -> None:
        self.is_open = True
        waiting, self._waiting = self._waiting, []
        for done in waiting:
            done()


@dataclass(eq=False)
class _UnitOnDevice:
    """A unit whose shard is on its way to a device, or there."""

    unit: Unit
    num_missing: int = 2  # its shard, and what it starts from
    is_dropped: bool = False
    slab: Hashable = None  # what is pinned of a device's residents
    graph: Hashable = None
    work_bytes: int = 0  # taken of its memory


@dataclass(eq=False)
class _StepPart:
    """Some of a step's micro-batches."""

    passed: _Gate = field(default_factory=partial(_Gate, is_open=True))  # to DRAM: what the next unit starts from
    leaving: dict[Unit, bool] = field(default_factory=dict)  # on its way to DRAM, in order; whether it is there
    position: int = 0  # in the chain, of the first unit not begun


class _Home(NamedTuple):
    """Where a shard is at home."""

    device: int
    ledger: Ledger  # which has its bytes


@dataclass(eq=False)
class _Task:
    cost: TaskCost
    spreads: tuple[Spread, ...]
    unit_s: dict[tuple[str, int], float]
    flow: Flow
    num_read: int = 0
    num_begun: int = 0
    num_commits: int = 0
    host_jobs: list[tuple[int, float, Done]] = field(default_factory=list)  # a heap, as that of `HostWork`
    lent: set[int] = field(default_factory=set)  # shards whose gradients have a place in DRAM, with early release
    lending: deque[tuple[int, Done]] = field(default_factory=deque)  # that wait for one
    parts: list[_StepPart] = field(default_factory=list)  # of the step in progress
    sizes: list[int] = field(default_factory=list)  # micro-batches of each
    in_sums: bool = True
    homes: dict[int, _Home] = field(default_factory=dict)  # by shard, of those on devices
    targets: dict[int, int] = field(default_factory=dict)  # by shard, of those that are to be on devices

    @property
    def devices(self) -> dict[int, int]:
        """By shard, the device of its home."""
        return {shard: home.device for shard, home in self.homes.items()}

    def begin(self, num_parts: int, in_sums: bool) -> None:
        """Cut the next step. in_sums: gradients of a part go on from those of the part before."""
        self.num_begun, self.in_sums = self.num_begun + 1, in_sums
        self.parts = [_StepPart() for _ in range(num_parts)]
        self.sizes = [end - first for first, end in part_ranges(self.cost.num_micro_batches, num_parts)]

    def lend(self, shard: int, done: Done) -> None:
        """Wait for a place for a shard's gradients, of which there are few with `early_release=True`."""
        if self.cost.early_release is True and shard not in self.lent:
            if len(self.lent) == NUM_LOANS:
                self.lending.append((shard, done))
                return
            self.lent.add(shard)
        done()

    def take_back(self, shard: int) -> None:
        """A shard is updated: its gradients' place is another's."""
        self.lent.discard(shard)
        if self.lending:
            self.lend(*self.lending.popleft())

    def share(self, unit: Unit) -> float:
        """Of the step's micro-batches, those of a unit."""
        return self.sizes[unit.part] / self.cost.num_micro_batches

    def so_far_bytes(self, unit: Unit) -> float:
        """Gradients of the parts before that a unit goes on from."""
        so_far = unit.part > 0 and self.in_sums and unit.kind != FORWARD and unit.shard not in self.homes
        return self.cost.of_shard("gradient_bytes", unit.shard) if so_far else 0.0

    def next_use_s(self, shard: int, *, beyond_step: bool = False, with_last: bool = False) -> float:
        """Seconds until a shard is used again; infinite: not any more."""
        positions = (max(0, part.position - with_last) for part in self.parts)
        return min((self.flow.next_use_s(shard, k, beyond_step=beyond_step) for k in positions), default=math.inf)

    def gradient_bytes(self, unit: Unit) -> float:
        """Gradients of parameters that it sends down: none of a shard at home."""
        if unit.kind == FORWARD or unit.shard in self.homes:
            return 0.0
        times = 1 if unit.part == 0 or self.in_sums else self.sizes[unit.part]
        return times * self.cost.of_shard("gradient_bytes", unit.shard)

    def missing_bytes(self, claim: _UnitOnDevice, memory: _Memory | None) -> float:
        """What a unit starts from, as far as the device has not kept it; what it takes of memory is taken."""
        unit, cost = claim.unit, self.cost
        value, gradient = cost.of_shard("boundary_bytes", unit.shard), 0.0
        if unit.kind == BACKWARD:
            gradient = cost.of_shard("boundary_bytes", unit.shard + 1)
        if memory is not None:
            residents = memory.residents
            if unit.kind == BACKWARD:
                graph = ("graph", unit.task, unit.step, unit.shard, unit.part)
                claim.graph = graph if residents.pin(graph, unit.task, lambda: math.inf) else None
            if residents.take(_boundary(VALUE, unit, unit.shard)) or claim.graph is not None:
                value = 0.0
            if unit.kind == BACKWARD and residents.take(_boundary(GRADIENT, unit, unit.shard + 1)):
                gradient = 0.0
        return self.so_far_bytes(unit) + self.share(unit) * (value + gradient)

    def keep(self, claim: _UnitOnDevice, memory: _Memory) -> None:
        """What stays on a device of a unit that was computed: shard, graph and boundaries, as far as there is room."""
        unit, residents, slab = claim.unit, memory.residents, claim.slab
        if claim.graph is not None:
            residents.unpin(claim.graph, is_whole=False)
        begun, j, cost = self.num_begun, unit.shard, self.cost

        def next_use_of(shard: int) -> Callable[[], float]:
            return lambda: self.next_use_s(shard, with_last=True) if self.num_begun == begun else math.inf

        def offer(what: str, entered: int, shard: int) -> None:
            num_bytes = int(self.share(unit) * cost.of_shard("boundary_bytes", entered))
            residents.offer(_boundary(what, unit, entered), True, num_bytes, unit.task, next_use_of(shard))

        def let_go() -> None:
            if slab is not None:
                residents.unpin(slab)

        goes_on = unit.kind == FORWARD and j >= cost.lowest_backward  # a backward will
        graph_bytes = int(self.share(unit) * cost.of_shard("graph_bytes", j)) if goes_on else 0
        if graph_bytes and (slab is not None or j in self.homes) and memory.ledger.take(graph_bytes):
            key = ("graph", unit.task, unit.step, j, unit.part)
            residents.keep(key, True, graph_bytes, unit.task, next_use_of(j), let_go)
        else:
            let_go()
            if unit.kind == FORWARD:
                offer(VALUE, j, j)
        if unit.kind == FORWARD:
            offer(VALUE, j + 1, j + 1)
        elif j > cost.lowest_backward:
            offer(GRADIENT, j, j - 1)


class _Memory:
    """A device's memory, as long as the device is in: what units leave there, and jobs that ask for some of it."""

    def __init__(self, num_bytes: int) -> None:
        self.ledger = Ledger("", num_bytes)
        self.residents = Residents(self.ledger)
        self.num_active = 0  # units that have memory to work with, and will give it back
        self._asking: deque[Callable[[], bool]] = deque()  # in order: each returns if it got it

    def ask(self, take: Callable[[], bool]) -> None:
        """Ask for memory: `take` is called until it returns True, which it does once it has got it, or needs none."""
        self._asking.append(take)
        self.grant()

    def grant(self) -> None:
        """Give memory to those who ask, as far as there is any, and each in its turn."""
        while self._asking and self._asking[0]():
            self._asking.popleft()

    def take_work(self, claim: _UnitOnDevice, num_bytes: float) -> bool:
        """Take what a unit works in, or nothing where no unit will give any back; False: one will."""
        if self.ledger.take(int(num_bytes)):
            claim.work_bytes = int(num_bytes)
        elif self.num_active:
            return False
        self.num_active += 1
        return True

    def end(self, num_bytes: int) -> None:
        """Take back what a unit has held until all of it was in DRAM."""
        self.ledger.release(num_bytes)
        self.num_active -= 1
        self.grant()


class _Device:
    def __init__(self, cost: DeviceCost, time: _Clock) -> None:
        self.cost = cost
        rates = (cost.load_bytes_per_s, cost.store_bytes_per_s)
        self.load, self.store = (_SimulatedLink(time, rate, computes=cost.copies_compute) for rate in rates)
        self.compute = _Queue(time.compute, 1, skips=False)  # units, and updates of shards at home
        self.clear()
        self.is_in = True  # by what the changes say
        self.is_leaving = False  # the scheduler was told so
        self.since_s: float | None = 0.0  # when the scheduler was told of it; None: it is released
        self.in_s = 0.0
        self.claims: dict[Unit, _UnitOnDevice] = {}
        self.num_units, self.compute_s = 0, 0.0
        self.loaded_bytes = self.stored_bytes = 0.0

    def clear(self) -> None:
        """Keep nothing of what units have left in its memory."""
        num_bytes = self.cost.memory_bytes
        self.memory = None if num_bytes is None else _Memory(int(num_bytes))

    def copy_in(self, num_bytes: float, done: Done, *, urgent: bool = False) -> None:
        self.loaded_bytes += num_bytes
        self.load.submit(num_bytes, done, urgent=urgent)

    def result(self, makespan_s: float) -> SimulatedDevice:
        """Return what came of it until the end of the run."""
        whole_s = makespan_s or 1.0
        return SimulatedDevice(
            num_units=self.num_units,
            busy={
                "load": self.load.busy_s / whole_s,
                "compute": self.compute_s / whole_s,
                "store": self.store.busy_s / whole_s,
            },
            loaded_bytes=self.loaded_bytes,
            stored_bytes=self.stored_bytes,
            in_s=self.in_s + (0.0 if self.since_s is None else makespan_s - self.since_s),
        )


class _Homes:
    """Homes of shards on devices: has them move as tasks begin and end, and as devices come and go."""

    def __init__(self, devices: Sequence[_Device], events: deque[Event]) -> None:
        self.training: list[_Task] = []
        self._devices, self._events = devices, events

    def share_out(self) -> None:
        """Have homes move as the engine shares devices' memory out."""
        if not any(task.cost.homes for task in self.training):
            return
        memory = {
            index: device.memory.ledger.memory_bytes
            for index, device in enumerate(self._devices)
            if device.memory is not None and device.since_s is not None and not device.is_leaving
        }
        wanted = [
            wanted_homes(task.cost, next((home.device for home in task.homes.values()), None)) for task in self.training
        ]
        found = share_out(wanted, memory)
        for task in self.training:
            task.targets = found[task.cost.name]
            changed = sorted({shard for shard, _ in task.targets.items() ^ task.devices.items()})
            for leaves in (True, False):
                if shards := tuple(shard for shard in changed if (shard in task.homes) == leaves):
                    self._events.append(MoveWanted(task.cost.name, shards, leaves))

    def move(self, task: _Task, shards: tuple[int, ...]) -> None:
        """Move homes, one after the other."""
        name = task.cost.name

        def moved() -> None:
            self._events.append(HomesMoved(name, shards, task.devices))
            gone = tuple(j for j in shards if j in task.homes and task.devices[j] != task.targets.get(j))
            if gone:  # a device was to go while its home came there
                self._events.append(MoveWanted(name, gone, leaves=True))

        _one_by_one([partial(self._move, task, shard) for shard in shards], moved)

    def _move(self, task: _Task, shard: int, done: Done) -> None:
        self.close(task, shard, partial(self._open, task, shard, done))

    def _open(self, task: _Task, shard: int, done: Done) -> None:
        """Bring a shard home to its device, if there is room."""
        target = task.targets.get(shard)
        memory = None if target is None else self._devices[target].memory
        num_bytes = int(task.cost.of_shard("home_bytes", shard))
        if target is None or memory is None or not memory.ledger.take(num_bytes, SLABS):
            done()
            return
        home = _Home(target, memory.ledger)

        def is_there() -> None:
            task.homes[shard] = home
            done()

        self._devices[target].copy_in(task.cost.of_shard("move_bytes", shard), is_there)

    def close(self, task: _Task, shard: int, done: Done) -> None:
        """Bring a shard back to DRAM, if it is at home elsewhere."""
        if (home := task.homes.get(shard)) is None:
            done()
            return
        device, num_bytes = self._devices[home.device], task.cost.of_shard("move_bytes", shard)
        device.stored_bytes += num_bytes

        def is_in_dram() -> None:
            del task.homes[shard]
            home.ledger.release(int(task.cost.of_shard("home_bytes", shard)), kind=SLABS)
            assert device.memory is not None
            device.memory.grant()
            done()

        device.store.submit(num_bytes, is_in_dram)


class World:
    """Carries out instructions in simulated time."""

    def __init__(
        self,
        tasks: Sequence[TaskCost],
        spreads: Sequence[tuple[Spread, ...]],  # by task
        devices: Sequence[DeviceCost],
        host: HostCost,
        *,
        changes: Sequence[DeviceChange] = (),
        record: bool,
        seed: int = 0,
    ) -> None:
        self.time = _Clock(host.cores)
        self._random = random.Random(seed)
        self._events: deque[Event] = deque()
        self._tasks = {
            task.name: _Task(task, spread, unit_s, Flow.of(task.chain, unit_s, task.num_shards))
            for task, spread in zip(tasks, spreads, strict=True)
            for unit_s in [dict(zip(task.chain, task.unit_s, strict=True))]
        }
        self._devices = [_Device(cost, self.time) for cost in devices]
        self._changes = changes
        start = self.time.update if host.shares_dram else self.time.compute
        self._host = _Queue(start, host.optimizer_threads)
        self._placed: list[Placed] | None = [] if record else None
        self._homes = _Homes(self._devices, self._events)
        self._finished_s: dict[str, float] = {}
        self._actions: dict[type, Callable[[Any], None]] = {
            Load: self._load,
            Drop: self._drop,
            Run: self._run,
            Release: self._release,
            Read: self._read,
            Begin: lambda begin: self._tasks[begin.task].begin(begin.num_parts, begin.in_sums),
            Commit: self._commit,
            Update: self._update,
            Move: lambda move: self._homes.move(self._tasks[move.task], move.shards),
            Discard: lambda _: None,
            Capture: lambda _: None,  # nothing is saved
            Finish: self._finish,
        }

    def run(self, scheduler: Scheduler) -> None:
        self._events.extend(DeviceAdded(index) for index in range(len(self._devices)))
        for change in self._changes:
            self.time.wait(change.at_s, partial(self._change, change))
        setup_s = sum(task.cost.setup_s for task in self._tasks.values())
        self.time.wait(setup_s, self._begin)
        while True:
            while self._events:
                self._act(scheduler.take(self._events.popleft()))
                if not self._events:  # of what comes at one time, all is known before a device is given anything
                    self._act(scheduler.dispatch())
            if scheduler.finished and len(self._finished_s) == len(self._tasks):
                return
            if not self.time.is_going:
                assert self._changes, "nothing is under way"
                left = ", ".join(name for name in self._tasks if name not in self._finished_s)
                raise ValueError(
                    f"changes: too few devices are in after {self.time.now_s:g} s, so {left} would never end; let one "
                    f"come back"
                )
            self.time.go_on()

    def _begin(self) -> None:
        self._homes.training = list(self._tasks.values())
        self._events.extend(map(_added, self._homes.training))
        self._homes.share_out()

    def result(self, bound: float) -> Simulation:
        makespan_s = self.time.now_s
        devices = tuple(device.result(makespan_s) for device in self._devices)
        return Simulation(
            makespan_s=makespan_s,
            bound_s=bound,
            devices=devices,
            finished_s=self._finished_s,
            num_units=sum(device.num_units for device in devices),
            schedule=tuple(self._placed or ()),
        )

    def _act(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            self._actions[type(instruction)](instruction)

    def _change(self, change: DeviceChange) -> None:
        device = self._devices[change.device]
        device.is_in = change.is_in
        if not change.is_in and not device.is_leaving:
            device.is_leaving = True
            self._events.append(DeviceRemoved(change.device))
            self._homes.share_out()
        elif change.is_in and device.since_s is None:
            self._add(change.device)

    def _add(self, index: int) -> None:
        self._devices[index].since_s = self.time.now_s
        self._events.append(DeviceAdded(index))
        self._homes.share_out()

    # -- instructions

    def _release(self, instruction: Release) -> None:
        [index] = instruction
        device = self._devices[index]
        assert device.since_s is not None
        device.in_s += self.time.now_s - device.since_s
        device.since_s, device.is_leaving = None, False
        device.clear()
        if device.is_in:  # since it was to go
            self._add(index)

    def _load(self, instruction: Load) -> None:
        index, unit = instruction
        device, task = self._devices[index], self._tasks[unit.task]
        claim = device.claims[unit] = _UnitOnDevice(unit)
        num_bytes = task.cost.of_shard("frozen_bytes" if unit.shard in task.homes else "load_bytes", unit.shard)
        if (memory := device.memory) is None or not num_bytes:
            device.copy_in(num_bytes, partial(self._start, index, claim))
        else:
            memory.ask(partial(self._take_slab, index, memory, claim, num_bytes))

    def _take_slab(self, index: int, memory: _Memory, claim: _UnitOnDevice, num_bytes: float) -> bool:
        """Bring a claim's shard into memory, if it is not there; False: there is no room before a unit ends."""
        device, unit, loaded = self._devices[index], claim.unit, partial(self._start, index, claim)
        task, residents = self._tasks[unit.task], memory.residents
        if not claim.is_dropped:
            trains = unit.shard >= task.cost.lowest_backward and unit.shard not in task.homes
            version = task.num_commits if trains else -1
            key = (unit.task, unit.shard, version)

            def next_use_s() -> float:
                is_new = version in (-1, task.num_commits)
                return task.next_use_s(unit.shard, beyond_step=not trains) if is_new else math.inf

            slab: _Gate | None = residents.pin(key, unit.task, next_use_s)
            if slab is None and memory.ledger.take(int(num_bytes), SLABS):
                slab = _Gate()
                residents.add(key, slab, int(num_bytes), unit.task, next_use_s, lambda: None)
                device.copy_in(num_bytes, slab.open)
            if slab is not None:
                claim.slab = key
                slab.when_open(loaded)
            elif memory.num_active:
                return False
            else:  # nobody will give any back
                device.copy_in(num_bytes, loaded)
        return True

    def _drop(self, instruction: Drop) -> None:
        index, unit = instruction
        device = self._devices[index]
        claim = device.claims.pop(unit)
        claim.is_dropped = True
        if claim.slab is not None and device.memory is not None:
            device.memory.residents.unpin(claim.slab)

    def _run(self, instruction: Run) -> None:
        index, unit = instruction
        device, task = self._devices[index], self._tasks[unit.task]
        claim = device.claims[unit]
        part = task.parts[unit.part]
        part.position = 1 + task.flow.order[unit.kind, unit.shard]

        def bring() -> None:
            device.copy_in(task.missing_bytes(claim, memory), partial(self._start, index, claim), urgent=True)

        def take() -> bool:
            if memory is not None and not memory.take_work(claim, task.cost.unit_work_bytes(unit.kind, unit.shard)):
                return False
            part.passed.when_open(bring)
            return True

        if (memory := device.memory) is None:
            take()
        else:
            memory.ask(take)

    def _start(self, index: int, claim: _UnitOnDevice) -> None:
        """Something of a unit is there: once all is, compute it."""
        claim.num_missing -= 1
        if claim.is_dropped or claim.num_missing:
            return
        device, unit = self._devices[index], claim.unit
        del device.claims[unit]
        task = self._tasks[unit.task]
        seconds = task.unit_s[unit.kind, unit.shard]
        if claim.graph is not None:
            seconds = max(0.0, seconds - task.unit_s[FORWARD, unit.shard])
        if unit.step == 0:
            seconds *= task.cost.first_step_times
        if device.cost.variation:
            seconds *= self._random.lognormvariate(0.0, device.cost.variation)
        seconds = task.share(unit) * seconds / device.cost.speed + device.cost.unit_s
        device.compute.submit(lambda: (seconds, partial(self._computed, index, claim, seconds, self.time.now_s)))

    def _computed(self, index: int, claim: _UnitOnDevice, seconds: float, start_s: float) -> None:
        unit = claim.unit
        device, task = self._devices[index], self._tasks[unit.task]
        left_bytes = task.gradient_bytes(unit)
        left: Done | None = None
        if (memory := device.memory) is not None:
            held_bytes = min(claim.work_bytes, int(left_bytes))  # until they are in DRAM
            memory.ledger.release(claim.work_bytes - held_bytes)
            left = partial(memory.end, held_bytes)
            task.keep(claim, memory)
            memory.grant()
        device.num_units += 1
        device.compute_s += self.time.now_s - start_s
        if self._placed is not None:
            self._placed.append(Placed(unit, index, start_s, self.time.now_s))
        part = task.parts[unit.part]
        part.passed.is_open, part.leaving[unit] = False, False
        self._events.append(Computed(index, unit, seconds))
        passed_bytes = task.share(unit) * task.cost.output_bytes(unit.kind, unit.shard)
        device.stored_bytes += passed_bytes + left_bytes

        def stored() -> None:
            if left is not None:
                left()
            self._stored(part, unit)

        send_gradients = partial(device.store.submit, left_bytes, stored)

        def passed() -> None:
            part.passed.open()
            if left_bytes:
                task.lend(unit.shard, send_gradients)
            else:
                send_gradients()

        device.store.submit(passed_bytes, passed)

    def _stored(self, part: _StepPart, unit: Unit) -> None:
        part.leaving[unit] = True
        while part.leaving and part.leaving[first := next(iter(part.leaving))]:  # in their order
            del part.leaving[first]
            self._events.append(Stored(first))

    def _read(self, instruction: Read) -> None:
        name, task = instruction.task, self._tasks[instruction.task]
        if task.num_read == task.cost.num_steps:
            self._events.append(DataEnded(name))
            return
        event = BatchReady(name, task.num_read, True, num_micro_batches=task.cost.num_micro_batches)
        task.num_read += 1
        if task.cost.read_s == 0:
            self._events.append(event)
        else:
            self.time.compute(task.cost.read_s, partial(self._events.append, event))

    def _commit(self, instruction: Commit) -> None:
        task = self._tasks[instruction.task]
        task.num_commits += 1
        event = StepCommitted(instruction.task, instruction.training)
        self._on_host(instruction, task.cost.commit_s, partial(self._events.append, event))

    def _update(self, instruction: Update) -> None:
        task, shard = self._tasks[instruction.task], instruction.shard
        if shard in task.homes:
            device = self._devices[task.homes[shard].device]
            seconds = task.cost.of_shard("home_update_s", shard) / device.cost.speed
            device.compute.submit(
                lambda: (seconds, partial(self._updated_at_home, device, task, shard, self.time.now_s))
            )
            return
        self._on_host(instruction, task.cost.of_shard("update_s", shard), partial(self._updated, task, shard))

    def _on_host(self, instruction: Commit | Update, seconds: float, done: Done) -> None:
        """Queue a job of a task. Tasks take turns; of a task's jobs the first in their own order goes first."""
        jobs = self._tasks[instruction.task].host_jobs
        heappush(jobs, (instruction.host_order, seconds, done))
        self._host.submit(lambda: heappop(jobs)[1:])

    def _updated(self, task: _Task, shard: int) -> None:
        task.take_back(shard)
        self._events.append(ShardUpdated(task.cost.name, shard))

    def _updated_at_home(self, device: _Device, task: _Task, shard: int, start_s: float) -> None:
        device.compute_s += self.time.now_s - start_s
        self._updated(task, shard)

    def _finish(self, instruction: Finish) -> None:
        task = self._tasks[instruction.task]
        self._homes.training.remove(task)

        def finished() -> None:
            self._finished_s[instruction.task] = self.time.now_s

        def is_in_dram() -> None:
            self._homes.share_out()
            self._host.submit(lambda: (task.cost.end_s, finished))

        _one_by_one([partial(self._homes.close, task, shard) for shard in task.homes], is_in_dram)


def _one_by_one(jobs: Sequence[Callable[[Done], None]], done: Done) -> None:
    """Begin each job as the one before it is done."""
    for job in reversed(jobs):
        done = partial(job, done)
    done()


def _added(task: _Task) -> TaskAdded:
    cost, lowest = task.cost, task.cost.lowest_backward
    units = TaskUnits(
        training=cost.chain,
        evaluation=(),
        needs=tuple((shard,) if shard >= lowest else () for shard in range(cost.num_shards)),
        updates=tuple(range(lowest, cost.num_shards)),
        unit_s=task.unit_s,
        spreads=task.spreads,
    )
    return TaskAdded(
        cost.name,
        units,
        num_steps=cost.num_steps,
        reads_ahead=True,
        early_release=bool(cost.early_release),
        priority=cost.priority,
        weight=cost.weight,
    )


def wanted_homes(cost: TaskCost, device: int | None = None) -> Wanted:
    """Return what a task asks for as devices' memory is shared out; `device`: that has homes of it already."""
    shards, lowest = range(cost.num_shards), cost.lowest_backward
    homed = [j for j in shards[lowest : cost.homes] if cost.of_shard("home_bytes", j)]
    return Wanted(
        task=cost.name,
        shards=tuple(homed),
        home_bytes=tuple(int(cost.of_shard("home_bytes", j)) for j in homed),
        slab_bytes=tuple(int(cost.of_shard("load_bytes", j)) for j in shards),
        frozen_bytes=tuple(int(cost.of_shard("load_bytes" if j < lowest else "frozen_bytes", j)) for j in shards),
        work_bytes=int(max(cost.of_shard("work_bytes", j) for j in shards)),
        device=device,
    )


def _boundary(what: str, unit: Unit, shard: int) -> Hashable:
    return what, unit.task, unit.step, shard, unit.part
