"""Predicts a run: discrete events through the very scheduler that decides in a real one.

    simulate([TaskCost(name="a", unit_s=(0.1, 0.2, 0.3), num_steps=50)], devices=8).makespan_s

What a device, its links and the host take time for is modelled as the engine does it:

    Load     the shard's parameters, over the link to the device, one copy after the other
    Run      what the unit starts from, once the unit before it is stored, over the same link and before any shard
             that is on its way there; then its seconds
    Computed -> its output and gradients, over the link to DRAM -> Stored
    Commit, Update                      a pool of threads of the host
    all that computes, where asked      shares the host's cores evenly
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heappop, heappush
from itertools import accumulate, count
from typing import Any, NamedTuple, TypeAlias

from hydra_engine.events import (
    BatchReady,
    Begin,
    Commit,
    Computed,
    DataEnded,
    DeviceAdded,
    Drop,
    Event,
    Finish,
    Instruction,
    Load,
    Read,
    Run,
    ShardUpdated,
    Spread,
    StepCommitted,
    Stored,
    TaskAdded,
    Update,
)
from hydra_engine.ledger import Ledger
from hydra_engine.policies import Policy, resolve_policy
from hydra_engine.residency import Residents
from hydra_engine.schedule import BACKWARD, FORWARD, FUSED, Flow, Placed, Unit, part_ranges, training_chain
from hydra_engine.scheduler import Scheduler

Done: TypeAlias = "Callable[[], None]"

# A prediction's steps: in the first nothing is loaded ahead.
PREDICTED_STEPS = 3
# A speedup that nobody chooses.
NEVER = 1e-9
# Gradients are sent down one by one, and wait in DRAM, where that takes less than this share of the time.
WORTH_DRAM = 0.95


@dataclass(frozen=True, kw_only=True)
class TaskCost:
    """What a task takes.

    Args:
        name: of the task; unique in a simulation.
        unit_s: seconds of each unit of a step, in order, on a device of speed 1: f0 ... fb(n-1) ... b0; as many
            backward units less as lower shards have nothing to train.
        num_steps: steps that it trains.
        num_shards: 0: the fewest that so many units make.
        load_bytes: of each shard's parameters, as they cross the link; one number for all shards alike.
        boundary_bytes: of what enters each shard, and of its gradient; one number for all alike.
        gradient_bytes: of each shard's gradients.
        update_s: seconds of each shard's optimizer step on the host.
        commit_s: seconds of a step's commit on the host.
        read_s: seconds of reading a batch; the next one is read while one is computed.
        setup_s: seconds of taking the task in, before a run begins. end_s: seconds of giving its model back.
        work_bytes: that units of each shard take on a device, beside its parameters.
        graph_bytes: that a forward of each shard takes to keep what its backward needs; 0: it is run again.
        num_micro_batches: that a step is made of: it may be spread over as many devices.
        ordered: units whose micro-batches have to go one after the other, wherever they are computed: those of shards
            whose forward changes buffers.
        priority: as `ModelTask`'s. weight: as `ModelTask`'s.
    """

    name: str
    unit_s: Sequence[float]
    num_steps: int = 1
    num_shards: int = 0
    load_bytes: Sequence[float] | float = 0
    boundary_bytes: Sequence[float] | float = 0
    gradient_bytes: Sequence[float] | float = 0
    update_s: Sequence[float] | float = 0.0
    commit_s: float = 0.0
    read_s: float = 0.0
    setup_s: float = 0.0
    end_s: float = 0.0
    work_bytes: Sequence[float] | float = 0
    graph_bytes: Sequence[float] | float = 0
    num_micro_batches: int = 1
    ordered: frozenset[tuple[str, int]] = frozenset()
    priority: int = 0
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not self.unit_s:
            raise ValueError(f"unit_s of {self.name}: empty; give the seconds of each unit of a step")
        if self.num_shards == 0:
            object.__setattr__(self, "num_shards", len(self.unit_s) // 2 + 1)
        if not self.num_shards <= len(self.unit_s) < 2 * self.num_shards:
            raise ValueError(
                f"num_shards of {self.name}: {self.num_shards} with {len(self.unit_s)} units, limit: from a half of "
                f"them to all; each shard has a forward, and those from the lowest that trains on a backward"
            )
        by_shard = ("load_bytes", "boundary_bytes", "gradient_bytes", "update_s", "work_bytes", "graph_bytes")
        for name in ("unit_s", "commit_s", "read_s", "setup_s", "end_s", *by_shard):
            value = getattr(self, name)
            values = [value] if isinstance(value, (int, float)) else value
            if not all(isinstance(each, (int, float)) and 0 <= each < math.inf for each in values):
                raise ValueError(f"{name} of {self.name}: {value!r}, limit: finite numbers, at least 0")
            if name in by_shard and len(values) not in (1, self.num_shards):
                raise ValueError(
                    f"{name} of {self.name}: {len(values)} values for {self.num_shards} shards; give one for each, or "
                    f"one number for all"
                )
        if self.num_steps < 1:
            raise ValueError(f"num_steps of {self.name}: {self.num_steps}, at least 1")
        if self.num_micro_batches < 1:
            raise ValueError(f"num_micro_batches of {self.name}: {self.num_micro_batches}, at least 1")
        if not self.weight > 0:
            raise ValueError(f"weight of {self.name}: {self.weight}, limit: above 0")

    @property
    def lowest_backward(self) -> int:
        """The lowest shard that has something to train."""
        return 2 * self.num_shards - 1 - len(self.unit_s)

    @property
    def chain(self) -> tuple[tuple[str, int], ...]:
        """(kind, shard) of a step's units, in order."""
        return training_chain(self.num_shards, self.lowest_backward)

    @property
    def step_s(self) -> float:
        """Seconds of a step's units."""
        return sum(self.unit_s)

    def of_shard(self, name: str, shard: int) -> float:
        """One of the figures by shard."""
        value = getattr(self, name)
        return float(value if isinstance(value, (int, float)) else value[shard])

    def input_bytes(self, kind: str, shard: int) -> float:
        """What a unit starts from: the boundary below it, and in a backward the gradient from above."""
        num_bytes = self.of_shard("boundary_bytes", shard)
        return num_bytes + (self.of_shard("boundary_bytes", shard + 1) if kind == BACKWARD else 0.0)

    def output_bytes(self, kind: str, shard: int) -> float:
        """What a unit leaves beside gradients of parameters: the boundary above it, or the gradient of that below."""
        if kind == FORWARD:
            return self.of_shard("boundary_bytes", shard + 1)
        assert kind in (FUSED, BACKWARD)
        return self.of_shard("boundary_bytes", shard) if shard > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class DeviceCost:
    """What a device takes.

    Args:
        speed: units take their seconds divided by this.
        load_bytes_per_s: of the link from DRAM; None: copies take no time.
        store_bytes_per_s: of the link to DRAM.
        unit_s: seconds of each unit beside its own: launches, threads that wake each other.
        memory_bytes: what units leave of it keeps shards, boundaries and graphs, until what is needed sooner takes it;
            None: nothing stays.
        copies_compute: copies keep a core of the host busy, as those of an emulated device without a link do.
    """

    speed: float = 1.0
    load_bytes_per_s: float | None = None
    store_bytes_per_s: float | None = None
    unit_s: float = 0.0
    memory_bytes: float | None = None
    copies_compute: bool = False

    def __post_init__(self) -> None:
        for name in ("speed", "load_bytes_per_s", "store_bytes_per_s", "memory_bytes"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name}: {value!r}, limit: finite, above 0")


@dataclass(frozen=True, kw_only=True)
class HostCost:
    """What the host has.

    Args:
        optimizer_threads: commits and updates at a time.
        cores: shared by the units of emulated devices, their copies and the optimizer; None: enough for all.
    """

    optimizer_threads: int = 1
    cores: float | None = None

    def __post_init__(self) -> None:
        if self.optimizer_threads < 1:
            raise ValueError(f"optimizer_threads: {self.optimizer_threads}, at least 1")
        if self.cores is not None and not self.cores > 0:
            raise ValueError(f"cores: {self.cores}, limit: above 0; None for enough")


class SimulatedDevice(NamedTuple):
    """What came of a device."""

    num_units: int
    busy: dict[str, float]  # by lane: share of the makespan
    loaded_bytes: float
    stored_bytes: float


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """What came of a simulated run."""

    makespan_s: float
    bound_s: float  # no schedule is faster
    devices: tuple[SimulatedDevice, ...]
    finished_s: dict[str, float]  # by task
    num_units: int
    schedule: tuple[Placed, ...] = ()  # with `record=True`: units in the order of their ends

    @property
    def busy_share(self) -> float:
        """Of the makespan, the mean share that devices computed."""
        return sum(device.busy["compute"] for device in self.devices) / len(self.devices)


def simulate(
    tasks: Sequence[TaskCost],
    devices: int | Sequence[DeviceCost] = 1,
    policy: str | Policy = "sharded-lrtf",
    *,
    host: HostCost | None = None,
    double_buffer: bool = True,
    record: bool = False,
    scheduler: Scheduler | None = None,
) -> Simulation:
    """Simulate training tasks to their end.

    Takes memory for tasks, devices and what is under way, and with `record` for every unit.

    Args:
        tasks: at least one, of different names.
        devices: a number of equal devices whose links take no time, or what each device takes.
        policy: as `ModelOrchestrator`'s.
        host: what the host has; default: one optimizer thread, and cores enough.
        double_buffer: load the next unit's shard while one computes.
        record: keep the schedule.
        scheduler: who decides, in place of a `Scheduler` of that policy: one that measures itself, say.

    Raises ValueError for what cannot be simulated.
    """
    costs = [DeviceCost()] * devices if isinstance(devices, int) else list(devices)
    if not tasks:
        raise ValueError("tasks: empty list; give at least one TaskCost")
    if not costs:
        raise ValueError(f"devices: {devices!r}; give at least one")
    names = [task.name for task in tasks]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"tasks: {names.count(twice)} are named {twice!r}; give each a name of its own")
    if scheduler is None:
        scheduler = Scheduler(resolve_policy(policy), double_buffer=double_buffer)
    host = host or HostCost()
    spreads = [(Spread(),) if len(costs) == 1 else predict_spreads(task, costs, host=host) for task in tasks]
    world = _World(tasks, spreads, costs, host, record=record)
    world.run(scheduler)
    return world.result(bound_s(tasks, costs))


def bound_s(tasks: Sequence[TaskCost], devices: int | Sequence[DeviceCost]) -> float:
    """Seconds that no schedule is faster than: max(max T, sum T / devices) where devices are equal.

    T is all of a task's units, with what of its commits and updates they wait for: a task's units run one after the
    other; where a step may be spread over several devices, those of the part with most micro-batches. In general, k
    tasks cannot be through before the k fastest devices could compute them (Horvath, Lam and Sethi 1977).
    """
    costs = [DeviceCost()] * devices if isinstance(devices, int) else list(devices)
    speeds = sorted((cost.speed for cost in costs), reverse=True)
    sums = list(accumulate(speeds))
    bounds = [sum(task.num_steps * task.step_s for task in tasks) / sums[-1]]
    work_s, most = 0.0, 0
    for task in sorted(tasks, key=lambda task: task.num_steps * task.step_s, reverse=True):
        work_s, most = work_s + task.num_steps * task.step_s, most + task.num_micro_batches
        bounds.append(work_s / sums[min(most, len(sums)) - 1])
    for task in tasks:
        lowest, number = task.lowest_backward, task.num_micro_batches
        share = max(end - first for first, end in part_ranges(number, min(number, len(costs)))) / number
        waits_s = task.commit_s * task.num_steps
        waits_s += (task.num_steps - 1) * task.of_shard("update_s", 0) if lowest == 0 else 0.0
        bounds.append(share * task.num_steps * task.step_s / speeds[0] + waits_s + task.setup_s + task.end_s)
    return max(bounds)


def predict_spreads(
    task: TaskCost, devices: Sequence[DeviceCost], *, host: HostCost | None = None
) -> tuple[Spread, ...]:
    """How a task's steps are best spread over 1, 2, ... of these devices: as many as it has micro-batches at most.

    For each number the task is simulated alone, twice. Its parts either add their gradients to those of the part
    before, which are sent up to the device: then one part's backward through a shard waits for the other's. Or they
    send each micro-batch's gradients down by themselves, and the host adds.
    """
    alone = replace(task, num_steps=PREDICTED_STEPS)
    backward = frozenset(node for node in task.chain if node[0] in (FUSED, BACKWARD))
    spreads = [Spread()]
    one_s = _alone_s(alone, [*spreads], devices[:1], host)
    for number in range(2, min(task.num_micro_batches, len(devices)) + 1):
        in_sums, in_pieces = Spread(1.0, task.ordered | backward, True), Spread(1.0, task.ordered, False)
        slower = [Spread(NEVER)] * (number - 1)
        sums_s, pieces_s = (_alone_s(alone, [*slower, each], devices[:number], host) for each in (in_sums, in_pieces))
        # Pieces wait in DRAM for their turn.
        best, best_s = (in_pieces, pieces_s) if pieces_s < WORTH_DRAM * sums_s else (in_sums, sums_s)
        spreads.append(best._replace(speedup=one_s / best_s if best_s > 0 else 1.0))
    return tuple(spreads)


def _alone_s(task: TaskCost, spreads: Sequence[Spread], devices: Sequence[DeviceCost], host: HostCost | None) -> float:
    """Seconds that a task takes, spread as in the last of these."""
    world = _World([task], [tuple(spreads)], devices, host or HostCost(), record=False)
    world.run(Scheduler(resolve_policy("sharded-lrtf")))
    return world.now_s


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
        """Begin a job."""
        self._advance(now_s)
        heappush(self._jobs, (self._virtual_s + seconds, next(self._serial), done))

    @property
    def next_s(self) -> float:
        """When the next job ends, if nothing changes."""
        if not self._jobs:
            return math.inf
        return self._now_s + max(0.0, self._jobs[0][0] - self._virtual_s) / self._rate

    def pop(self) -> Done:
        """The job that ends next."""
        self._advance(self.next_s)
        end_s, _, done = heappop(self._jobs)
        self._virtual_s = end_s  # not what adding up made of it
        return done


class _Queue:
    """Jobs that so many servers take in order."""

    def __init__(self, start: Callable[[float, Done], None], num_servers: int = 1) -> None:
        self._start = start  # (seconds, what to call then)
        self._num_free = num_servers
        self._waiting: deque[tuple[float, Done]] = deque()
        self.busy_s = 0.0

    def submit(self, seconds: float, done: Done) -> None:
        """Queue a job."""
        self._waiting.append((seconds, done))
        self._pump()

    def _pump(self) -> None:
        while self._num_free and self._waiting:
            seconds, done = self._waiting.popleft()
            self.busy_s += seconds
            if seconds == 0:  # at once, and without an event of its own
                done()
                continue
            self._num_free -= 1
            self._start(seconds, partial(self._end, done))

    def _end(self, done: Done) -> None:
        self._num_free += 1
        done()
        self._pump()


class _Link:
    """Copies in one direction, one at a time: urgent ones first, which others stop for in the middle."""

    def __init__(self, world: _World, *, computes: bool) -> None:
        self._world = world
        self._computes = computes  # copies keep a core busy; what has begun is then finished
        self._waiting: tuple[deque[tuple[float, Done]], deque[tuple[float, Done]]] = (deque(), deque())
        self._current: tuple[float, Done, bool] | None = None  # (end, what to call then, whether it stops for others)
        self.busy_s = 0.0

    def submit(self, seconds: float, done: Done, *, urgent: bool = False) -> None:
        """Queue a copy; one without bytes takes no turn."""
        if seconds == 0:
            done()
            return
        self.busy_s += seconds
        if urgent and self._current is not None and self._current[2]:
            end_s, stopped, _ = self._current
            self._waiting[False].appendleft((end_s - self._world.now_s, stopped))
            self._current = None
        self._waiting[urgent].append((seconds, done))
        self._pump()

    def _pump(self) -> None:
        if self._current is None and any(self._waiting):
            urgent = bool(self._waiting[True])
            seconds, done = self._waiting[urgent].popleft()
            current = self._current = (self._world.now_s + seconds, done, not (urgent or self._computes))
            start = self._world.compute if self._computes else self._world.wait
            start(seconds, partial(self._end, current))

    def _end(self, copy: tuple[float, Done, bool]) -> None:
        if self._current is not copy:
            return  # it was stopped since
        self._current = None
        copy[1]()
        self._pump()


@dataclass(eq=False)
class _Claim:
    """A unit whose shard is on its way to a device, or there."""

    unit: Unit
    is_loaded: bool = False
    is_run: bool = False
    has_input: bool = False
    is_dropped: bool = False
    slab: Hashable = None  # what is pinned of a device's residents
    graph: Hashable = None
    work_bytes: float = 0.0  # taken of its memory


@dataclass(eq=False)
class _Part:
    """Some of a step's micro-batches."""

    storing: bool = False
    waiting: list[Done] = field(default_factory=list)  # for what is being stored
    position: int = 0  # in the chain, of the first unit not begun


@dataclass(eq=False)
class _Task:
    cost: TaskCost
    spreads: tuple[Spread, ...]
    unit_s: dict[tuple[str, int], float]
    flow: Flow
    num_read: int = 0
    num_begun: int = 0
    num_commits: int = 0
    parts: list[_Part] = field(default_factory=list)  # of the step in progress
    sizes: list[int] = field(default_factory=list)  # micro-batches of each

    def begin(self, num_parts: int) -> None:
        """Cut the next step."""
        self.num_begun += 1
        self.parts = [_Part() for _ in range(num_parts)]
        self.sizes = [end - first for first, end in part_ranges(self.cost.num_micro_batches, num_parts)]

    def share(self, unit: Unit) -> float:
        """Of the step's micro-batches, those of a unit."""
        return self.sizes[unit.part] / self.cost.num_micro_batches

    @property
    def in_sums(self) -> bool:
        """Whether gradients of a part go on from those of the part before."""
        return self.spreads[len(self.parts) - 1].in_sums

    def so_far_bytes(self, unit: Unit) -> float:
        """Gradients of the parts before that a unit goes on from."""
        so_far = unit.part > 0 and self.in_sums and unit.kind != FORWARD
        return self.cost.of_shard("gradient_bytes", unit.shard) if so_far else 0.0

    def next_use_s(self, shard: int, *, beyond_step: bool = False, with_last: bool = False) -> float:
        """As `TaskState.next_use_s`."""
        positions = (max(0, part.position - with_last) for part in self.parts)
        return min((self.flow.next_use_s(shard, k, beyond_step=beyond_step) for k in positions), default=math.inf)

    def output_bytes(self, unit: Unit) -> float:
        """What a unit leaves, with gradients."""
        times = 0 if unit.kind == FORWARD else 1 if unit.part == 0 or self.in_sums else self.sizes[unit.part]
        num_bytes = times * self.cost.of_shard("gradient_bytes", unit.shard)
        return num_bytes + self.share(unit) * self.cost.output_bytes(unit.kind, unit.shard)


class _Device:
    def __init__(self, cost: DeviceCost, world: _World) -> None:
        self.cost = cost
        self.load, self.store = (_Link(world, computes=cost.copies_compute) for _ in range(2))
        self.residents: Residents | None = None
        if cost.memory_bytes is not None:
            self.ledger = Ledger("", int(cost.memory_bytes))
            self.residents = Residents(self.ledger)
        self.claims: dict[Unit, _Claim] = {}
        self.num_units = 0
        self.compute_s = 0.0
        self.loaded_bytes = self.stored_bytes = 0.0


class _World:
    """Carries out instructions in simulated time."""

    def __init__(
        self,
        tasks: Sequence[TaskCost],
        spreads: Sequence[tuple[Spread, ...]],  # by task
        devices: Sequence[DeviceCost],
        host: HostCost,
        *,
        record: bool,
    ) -> None:
        self.now_s = 0.0
        self._cores = _Cores(host.cores)
        self._timers: list[tuple[float, int, Done]] = []
        self._serial = count()
        self._events: deque[Event] = deque()
        self._tasks = {
            task.name: _Task(task, spread, unit_s, Flow.of(task.chain, unit_s, task.num_shards))
            for task, spread in zip(tasks, spreads, strict=True)
            for unit_s in [dict(zip(task.chain, task.unit_s, strict=True))]
        }
        self._devices = [_Device(cost, self) for cost in devices]
        self._host = _Queue(self.compute, host.optimizer_threads)
        self._placed: list[Placed] | None = [] if record else None
        self._finished_s: dict[str, float] = {}
        self._actions: dict[type, Callable[[Any], None]] = {
            Load: self._load,
            Drop: self._drop,
            Run: self._run,
            Read: self._read,
            Begin: self._begin,
            Commit: self._commit,
            Update: self._update,
            Finish: self._finish,
        }

    def run(self, scheduler: Scheduler) -> None:
        """To the end."""
        self.now_s = sum(task.cost.setup_s for task in self._tasks.values())
        self._events.extend(DeviceAdded(index) for index in range(len(self._devices)))
        self._events.extend(_added(task) for task in self._tasks.values())
        while True:
            while self._events:
                self._act(scheduler.take(self._events.popleft()))
                if not self._events:  # of what comes at one time, all is known before a device is given anything
                    self._act(scheduler.dispatch())
            if scheduler.finished and len(self._finished_s) == len(self._tasks):
                return
            timer_s, cores_s = self._timers[0][0] if self._timers else math.inf, self._cores.next_s
            assert min(timer_s, cores_s) < math.inf, "nothing is under way and tasks are unfinished"
            self.now_s = max(self.now_s, min(timer_s, cores_s))
            (heappop(self._timers)[2] if timer_s <= cores_s else self._cores.pop())()

    def result(self, bound: float) -> Simulation:
        """What came of it."""
        makespan_s = self.now_s
        whole_s = makespan_s or 1.0
        devices = tuple(
            SimulatedDevice(
                num_units=device.num_units,
                busy={
                    "load": device.load.busy_s / whole_s,
                    "compute": device.compute_s / whole_s,
                    "store": device.store.busy_s / whole_s,
                },
                loaded_bytes=device.loaded_bytes,
                stored_bytes=device.stored_bytes,
            )
            for device in self._devices
        )
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

    # -- time

    def wait(self, seconds: float, done: Done) -> None:
        heappush(self._timers, (self.now_s + seconds, next(self._serial), done))

    def compute(self, seconds: float, done: Done) -> None:
        self._cores.start(self.now_s, seconds, done)

    # -- instructions

    def _load(self, instruction: Load) -> None:
        index, unit = instruction
        device, task = self._devices[index], self._tasks[unit.task]
        claim = device.claims[unit] = _Claim(unit)
        num_bytes = task.cost.of_shard("load_bytes", unit.shard)

        def loaded() -> None:
            claim.is_loaded = True
            self._start(index, claim)

        if device.residents is not None and num_bytes:
            trains = unit.shard >= task.cost.lowest_backward
            version = task.num_commits if trains else -1
            key = (unit.task, unit.shard, version)

            def next_use_s() -> float:
                is_new = version in (-1, task.num_commits)
                return task.next_use_s(unit.shard, beyond_step=not trains) if is_new else math.inf

            if device.residents.pin(key, unit.task, next_use_s):
                claim.slab = key
                loaded()
                return
            if device.ledger.take(int(num_bytes)):
                device.residents.add(key, True, int(num_bytes), unit.task, next_use_s, lambda: None)
                claim.slab = key
        self._copy_in(device, num_bytes, loaded)

    def _copy_in(self, device: _Device, num_bytes: float, done: Done, *, urgent: bool = False) -> None:
        device.loaded_bytes += num_bytes
        rate = device.cost.load_bytes_per_s
        device.load.submit(num_bytes / rate if rate else 0.0, done, urgent=urgent)

    def _drop(self, instruction: Drop) -> None:
        index, unit = instruction
        device = self._devices[index]
        claim = device.claims.pop(unit)
        claim.is_dropped = True
        if claim.slab is not None and device.residents is not None:
            device.residents.unpin(claim.slab)

    def _run(self, instruction: Run) -> None:
        index, unit = instruction
        device, task = self._devices[index], self._tasks[unit.task]
        claim = device.claims[unit]
        claim.is_run = True
        part = task.parts[unit.part]
        part.position = 1 + task.flow.order[unit.kind, unit.shard]

        def brought() -> None:
            claim.has_input = True
            self._start(index, claim)

        def bring() -> None:
            self._copy_in(device, self._missing_bytes(device, task, claim), brought, urgent=True)

        if part.storing:
            part.waiting.append(bring)
        else:
            bring()

    def _missing_bytes(self, device: _Device, task: _Task, claim: _Claim) -> float:
        """What a unit starts from, as far as the device has not kept it; what it takes of memory is taken."""
        unit, cost, residents = claim.unit, task.cost, device.residents
        share, num_bytes = task.share(unit), task.so_far_bytes(unit)
        value, gradient = cost.of_shard("boundary_bytes", unit.shard), 0.0
        if unit.kind == BACKWARD:
            gradient = cost.of_shard("boundary_bytes", unit.shard + 1)
        if residents is None:
            return num_bytes + share * (value + gradient)
        work_bytes = int(cost.of_shard("work_bytes", unit.shard))
        claim.work_bytes = work_bytes if device.ledger.take(work_bytes) else 0
        if unit.kind == BACKWARD:
            graph = ("graph", unit.task, unit.step, unit.shard, unit.part)
            claim.graph = graph if residents.pin(graph, unit.task, lambda: math.inf) else None
        if residents.take(_boundary(VALUE, unit, unit.shard)) or claim.graph is not None:
            value = 0.0
        if unit.kind == BACKWARD and residents.take(_boundary(GRADIENT, unit, unit.shard + 1)):
            gradient = 0.0
        return num_bytes + share * (value + gradient)

    def _keep(self, device: _Device, task: _Task, claim: _Claim) -> None:
        """What stays on a device of a unit that was computed: shard, graph and boundaries, as far as there is room."""
        unit, residents, slab = claim.unit, device.residents, claim.slab
        assert residents is not None
        device.ledger.release(int(claim.work_bytes))
        if claim.graph is not None:
            residents.unpin(claim.graph, is_whole=False)
        begun, j, cost = task.num_begun, unit.shard, task.cost

        def next_use_of(shard: int) -> Callable[[], float]:
            return lambda: task.next_use_s(shard, with_last=True) if task.num_begun == begun else math.inf

        def offer(what: str, entered: int, shard: int) -> None:
            """What enters a shard, for the next unit of a shard."""
            num_bytes = int(task.share(unit) * cost.of_shard("boundary_bytes", entered))
            residents.offer(_boundary(what, unit, entered), True, num_bytes, unit.task, next_use_of(shard))

        graph_bytes = int(cost.of_shard("graph_bytes", j)) if unit.kind == FORWARD else 0
        if graph_bytes and slab is not None and device.ledger.take(graph_bytes):
            key = ("graph", unit.task, unit.step, j, unit.part)
            residents.keep(key, True, graph_bytes, unit.task, next_use_of(j), lambda: residents.unpin(slab))
        else:
            if slab is not None:
                residents.unpin(slab)
            if unit.kind == FORWARD:
                offer(VALUE, j, j)
        if unit.kind == FORWARD:
            offer(VALUE, j + 1, j + 1)
        elif j > cost.lowest_backward:
            offer(GRADIENT, j, j - 1)

    def _start(self, index: int, claim: _Claim) -> None:
        """Compute a unit, once all is there."""
        if claim.is_dropped or not (claim.is_loaded and claim.is_run and claim.has_input):
            return
        device, unit = self._devices[index], claim.unit
        del device.claims[unit]
        task = self._tasks[unit.task]
        seconds = task.unit_s[unit.kind, unit.shard]
        if claim.graph is not None:
            seconds = max(0.0, seconds - task.unit_s[FORWARD, unit.shard])
        seconds = task.share(unit) * seconds / device.cost.speed + device.cost.unit_s
        self.compute(seconds, partial(self._computed, index, claim, seconds, self.now_s))

    def _computed(self, index: int, claim: _Claim, seconds: float, start_s: float) -> None:
        unit = claim.unit
        device, task = self._devices[index], self._tasks[unit.task]
        if device.residents is not None:
            self._keep(device, task, claim)
        device.num_units += 1
        device.compute_s += self.now_s - start_s
        if self._placed is not None:
            self._placed.append(Placed(unit, index, start_s, self.now_s))
        task.parts[unit.part].storing = True
        self._events.append(Computed(index, unit, seconds))
        num_bytes = task.output_bytes(unit)
        device.stored_bytes += num_bytes
        rate = device.cost.store_bytes_per_s
        device.store.submit(num_bytes / rate if rate else 0.0, partial(self._stored, unit))

    def _stored(self, unit: Unit) -> None:
        part = self._tasks[unit.task].parts[unit.part]
        part.storing = False
        self._events.append(Stored(unit))
        waiting, part.waiting = part.waiting, []
        for bring in waiting:
            bring()

    def _read(self, instruction: Read) -> None:
        task = self._tasks[instruction.task]
        name = instruction.task
        if task.num_read == task.cost.num_steps:
            self._events.append(DataEnded(name))
            return
        event = BatchReady(name, task.num_read, True, num_micro_batches=task.cost.num_micro_batches)
        task.num_read += 1
        if task.cost.read_s == 0:
            self._events.append(event)
        else:
            self.compute(task.cost.read_s, partial(self._events.append, event))

    def _begin(self, instruction: Begin) -> None:
        self._tasks[instruction.task].begin(instruction.num_parts)

    def _commit(self, instruction: Commit) -> None:
        self._tasks[instruction.task].num_commits += 1
        event = StepCommitted(instruction.task, instruction.training)
        self._host.submit(self._tasks[instruction.task].cost.commit_s, partial(self._events.append, event))

    def _update(self, instruction: Update) -> None:
        seconds = self._tasks[instruction.task].cost.of_shard("update_s", instruction.shard)
        self._host.submit(seconds, partial(self._events.append, ShardUpdated(instruction.task, instruction.shard)))

    def _finish(self, instruction: Finish) -> None:
        def finished() -> None:
            self._finished_s[instruction.task] = self.now_s

        self._host.submit(self._tasks[instruction.task].cost.end_s, finished)


def _added(task: _Task) -> TaskAdded:
    cost = task.cost
    lowest = cost.lowest_backward
    return TaskAdded(
        task=cost.name,
        training=cost.chain,
        evaluation=(),
        needs=tuple((shard,) if shard >= lowest else () for shard in range(cost.num_shards)),
        updates=tuple(range(lowest, cost.num_shards)),
        unit_s=task.unit_s,
        num_steps=cost.num_steps,
        reads_ahead=True,
        priority=cost.priority,
        weight=cost.weight,
        spreads=task.spreads,
    )


# What of a boundary is kept on a device.
VALUE, GRADIENT = "value", "gradient"


def _boundary(what: str, unit: Unit, shard: int) -> Hashable:
    return what, unit.task, unit.step, shard, unit.part
