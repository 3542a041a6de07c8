"""Plans a task: profiles its layers, cuts them into shards, rehearses a step on a device, sees that all of it fits."""

from __future__ import annotations

import math
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hydra_engine.capture import Uncut, UsesNotCarried
from hydra_engine.checkpoints import SavedTask
from hydra_engine.data import ALIGNMENT_BYTES, Batch, Beginning, Reader, Stream, UserDraws, capture, installed
from hydra_engine.devices import STATED, Ceilings, DeviceSpec
from hydra_engine.errors import DeviceFailed, DeviceLost, HostOutOfMemory, PauseTask, ShardDoesNotFit, StopTask
from hydra_engine.host import (
    BestWeights,
    BorrowedPool,
    FrozenBlocks,
    HostPool,
    LayerFault,
    Structure,
    TaskState,
    Wanted,
    has_hooks,
    kept_pools,
    kernel_refused,
    layout_of,
    make_optimizer,
    no_home_because,
    share_out,
)
from hydra_engine.planning.adoption import Rehearsals, Rehearsed, kind_of
from hydra_engine.planning.costs import DeviceCost, HostCost, TaskCost
from hydra_engine.planning.cuts import (
    CutChoice,
    PredictedCut,
    RunAtHand,
    Way,
    WholeRun,
    choose_kept,
    kept_bytes,
    least_step_s,
)
from hydra_engine.planning.rehearsal import REMEDY, Opened, TooLarge, own_device, rehearse
from hydra_engine.planning.same_model import check_converted, plain_error
from hydra_engine.planning.simulate import predict_spreads
from hydra_engine.planning.trial import trial_state_bytes, update_bytes_per_s
from hydra_engine.schedule import MOST_AHEAD, Spread, part_ranges
from hydra_engine.system import HostThreads, dram
from hydra_engine.tasks import (
    FINISHED,
    BatchChooser,
    GuidedLoader,
    ModelTask,
    Purpose,
    TaskPlan,
    TaskReport,
    chooses,
    plain_attributes,
)
from partitioners import (
    STATED_RATES,
    Budget,
    LayerCost,
    LayerTooLarge,
    Rates,
    format_bytes,
    profile,
    profile_evaluation,
    shard_bytes,
    slab_bytes,
)
from partitioners.boundary import UnfitTensor
from partitioners.cost import skips_of
from partitioners.plain_numbers import plain
from partitioners.profile import names, noted, spanned

# What a unit costs beside its kernels and copies: measured by benchmarks/overhead.
UNIT_S = 450e-6

# More micro-batches than memory asks for, under "auto", are for a step that is predicted to be so many times shorter:
# predictions from one rehearsal are no better than that.
LEAST_GAIN = 1.05

# Of the DRAM that is free as an adaptive task begins, the share that batches larger than its first one may take.
STAGING_SHARE = 0.5

# Batches larger than the sample by so much find room on a device whose slabs have an arena.
WORK_HEADROOM = 1.25
# Homes stay: they leave more.
HOMES_HEADROOM = 1.5

# Of the rate of a GPU's memory, what an update reaches there.
UPDATE_SHARE = 0.75

FIRST_READ = "as the first batch of its loader was read"


@dataclass(frozen=True, kw_only=True)
class Target:
    """The devices that a task is planned for, and who else is there."""

    device: DeviceSpec  # whose memory is the smallest
    budget: Budget
    num_threads: int
    devices: Sequence[DeviceSpec] = ()  # that a step may be spread over; none: the one device
    num_tasks: int = 1  # that share the devices
    most_slab_bytes: int | None = None  # that others' work leaves room for, where slabs have an arena
    opened: Opened | None = None  # the device for a rehearsal, where others work on it
    can_hold: Callable[[int, int], bool] = lambda *_: True  # devices at work: (bytes beside a slab, bytes of the slab)
    host: HostThreads | None = None  # by which cuts are predicted; None: its threads are not known yet
    together: Way | None = None  # that was chosen for all tasks together
    beside: Sequence[TaskCost] = ()  # tasks that train already, with the steps that they have left
    homes: str = "auto"  # of tasks that leave it open: "host", or as is predicted to be fastest

    @property
    def spread_devices(self) -> Sequence[DeviceSpec]:
        return self.devices or [self.device]

    @property
    def share(self) -> int:
        """The number of devices that the task has to itself while all tasks train."""
        return max(1, len(self.devices) // self.num_tasks)


class LeastBytes(NamedTuple):
    """The least memory of a device on which a task runs."""

    task: str
    num_bytes: int  # of its largest shard, slab and work
    layers: str  # of that shard, for messages
    slab_bytes: int  # of the largest slab
    work_bytes: int  # of the largest work


class Spreading(NamedTuple):
    """Predictions of a step that is spread over several devices."""

    spreads: tuple[Spread, ...] = (Spread(),)  # over 1, 2, ... of them
    one_device_because: str = ""  # why there are no more
    parts_bytes: int = 0  # DRAM that steps take for being spread


class Estimate:
    """Predicts how long a task's steps take, from what is known of a device's rates and the host's."""

    def __init__(self, state: TaskState) -> None:
        self._state = state
        self.input_bytes: list[int] = []  # by layer, of a step
        self.known: Ceilings | None = None  # of the device that it is planned for, once they are needed
        self._update_rate: float | None = None  # of the optimizer, once it is needed

    def rates(self, device: DeviceSpec) -> Ceilings:
        """The ceilings of the device that the task is planned for: the same for all of a plan."""
        if self.known is None:
            self.known = device.ceilings()
        return self.known

    def kernel_rates(self) -> Rates:
        """What layers are estimated with where they are not timed: products at the measured rate, if it is known."""
        precision = self._state.task.precision
        rates = STATED_RATES[self._state.place.type, precision]
        flops = None if self.known is None else self.known.matmul_flops.get(precision)
        return rates if flops is None else replace(rates, flops_per_s=flops)

    def _update_bytes_per_s(self) -> float:
        """Of parameters, that the host updates: as measured on one that a cache holds, and no more than DRAM moves."""
        if self._update_rate is None:
            with installed(Stream(capture())):  # the factory is user code
                self._update_rate = update_bytes_per_s(self._state.task)
        rate = self._update_rate
        num_bytes = self._state.layout.num_bytes[True]
        if self.known is None or self.known.dram_bytes_per_s is None or not num_bytes:
            return rate
        state_bytes = sum(self._state.measured.state_bytes.values())
        # Weights are read and written, gradients read, states read and written.
        return min(rate, self.known.dram_bytes_per_s / (3 + 2 * state_bytes / num_bytes))

    def home_update_bytes_per_s(self) -> float:
        """Of parameters, that the device updates which is their home: an emulated one by the host's code."""
        state = self._state
        if state.place.type == "cpu":
            return self._update_bytes_per_s()
        state_bytes, num_bytes = sum(state.measured.state_bytes.values()), max(1, state.layout.num_bytes[True])
        return UPDATE_SHARE * self.kernel_rates().memory_bytes_per_s / (3 + 2 * state_bytes / num_bytes)

    def home_times(self) -> float:
        """Bytes of a home for each byte of gradients, as `TaskState.home_bytes` has them."""
        layout, pool = self._state.layout, self._state.pool
        link_bytes = layout.link_bytes[True]
        masters = 0 if layout.narrow is None else link_bytes * 17 / 16 if pool.splits else layout.num_bytes[True]
        return 2 + (masters + sum(self._state.measured.state_bytes.values())) / max(1, link_bytes)

    def budget(self, budget: Budget, device: DeviceSpec) -> Budget:
        """The budget of a device with its rates, for partitioners that weigh times."""
        budget = replace(budget, link_bytes_per_s=self.rates(device).link_bytes_per_s, unit_s=UNIT_S)
        if self._state.task.purpose is not Purpose.TRAIN:
            return budget
        return replace(budget, update_bytes_per_s=self._update_bytes_per_s())

    def run_at_hand(self, target: Target, *, with_homes: bool = False) -> RunAtHand:
        """What a cut of the task is chosen for; with_homes: layers may be at home on devices."""
        state, device, host = self._state, target.device, target.host
        link = self.rates(device)
        computes_here = device.torch_device.type == "cpu"
        cores = host.cores / host.intra_op_threads if host is not None and computes_here else None
        figure = _in_two_digits if with_homes else float
        return RunAtHand(
            device=DeviceCost(
                load_bytes_per_s=figure(link.up_bytes_per_s),
                store_bytes_per_s=figure(link.down_bytes_per_s),
                unit_s=UNIT_S,
                memory_bytes=target.budget.memory_bytes,
                copies_compute=computes_here and link.origin != STATED,
            ),
            host=HostCost(optimizer_threads=1 if host is None else host.optimizer_threads, cores=cores),
            num_devices=len(target.spread_devices),
            num_tasks=target.num_tasks,
            double_buffer=target.budget.double_buffer,
            early_release=state.pool.early_release,
            home_times=self.home_times() if with_homes else 0.0,
            home_update_bytes_per_s=figure(self.home_update_bytes_per_s()) if with_homes else math.inf,
        )

    def spreading(self, devices: Sequence[DeviceSpec], number: int, beside_bytes: int, limit: DramLimit) -> Spreading:
        """Predict how a step of so many micro-batches is best spread over 1, 2, ... of these devices.

        beside_bytes: of DRAM, that the task has yet to take. limit: of DRAM, which counts the task without its parts.
        """
        task = self._state.task
        if len(devices) == 1 or task.purpose is not Purpose.TRAIN:
            return Spreading()
        if number == 1:
            more = "raise accumulation_steps" if task.accumulation_steps == 1 else "give larger batches"
            more = more if task.max_device_batch is None else "lower max_device_batch"
            return Spreading(one_device_because=f"it has one micro-batch; {more} to split it")
        if self._state.observed.runs_backward:
            return Spreading(one_device_because="its loss or a layer calls backward() itself")
        if self._state.homes.num_layers:
            return Spreading(one_device_because="layers have their homes on devices, where their units run")
        if self._state.pool.early_release:
            return Spreading(one_device_because="its shards are updated before the step is through")
        links = [device.ceilings() for device in devices]
        cost = DeviceCost(
            load_bytes_per_s=min(link.up_bytes_per_s for link in links),
            store_bytes_per_s=min(link.down_bytes_per_s for link in links),
            unit_s=UNIT_S,
            memory_bytes=min(device.memory_bytes for device in devices),
        )
        spreads = predict_spreads(self.cost(number), [cost] * len(devices))
        room = min(dram.available_dram_bytes() - beside_bytes, limit.left_bytes)
        taken = [self._parts_bytes(spread, k, number) for k, spread in enumerate(spreads, 1)]
        fitting = next((k for k, num_bytes in enumerate(taken) if k and num_bytes > room), len(taken))
        why = ""
        if fitting == 1:
            why = f"gradients of its parts would take {format_bytes(taken[1])} of DRAM"
        elif max(spread.speedup for spread in spreads[1:fitting]) <= 1:
            why = "spread over several it is not predicted to be faster"
        return Spreading(spreads[:fitting], why, max(taken[:fitting]))

    def _parts_bytes(self, spread: Spread, num_parts: int, num_micro_batches: int) -> int:
        """The most bytes of DRAM that gradients take until all of a step's parts have added theirs.

        Narrow ones are added up in float32. Those that are sent down by themselves wait for the parts before, which
        are at most `MOST_AHEAD` units behind, each.
        """
        if num_parts == 1:
            return 0
        state, by_shard = self._state, sorted(self._gradient_bytes())
        total = 0 if state.layout.narrow is None else sum(map(state.sum_bytes, state.cut.shards))
        if not spread.in_sums:
            for k, (first, end) in enumerate(part_ranges(num_micro_batches, num_parts)):
                total += (end - first) * sum(by_shard[-(MOST_AHEAD + 1) * k :] if k else ())
        return total

    def _gradient_bytes(self) -> list[int]:
        owned = map(self._state.pool.owned, self._state.cut.shards)
        return [sum(slot.link_bytes for slot in slots) for slots in owned]

    def cost(self, number: int) -> TaskCost:
        """What the task takes in so many micro-batches, for a simulation."""
        state, shards, rate = self._state, self._state.cut.shards, self._update_bytes_per_s()
        homes = {shard.index: state.home_bytes(shard) for shard in state.shards_for_homes()}
        home_rate = self.home_update_bytes_per_s() if homes else math.inf
        return TaskCost(
            name=state.name,
            unit_s=[state.measured.unit_s[node] for node in state.cut.chains[True]],
            num_shards=len(shards),
            load_bytes=[shard.slab_bytes for shard in shards],
            boundary_bytes=[self.input_bytes[shard.first] for shard in shards],
            work_bytes=[state.work_bytes(shard) for shard in shards],
            graph_bytes=[kept_bytes(state, shard) for shard in shards],
            gradient_bytes=self._gradient_bytes(),
            update_s=[sum(slot.num_bytes for slot in state.pool.owned(shard)) / rate for shard in shards],
            num_micro_batches=number,
            ordered=state.ordered,
            # A GPU's norm of a gradient has other bits than the host's, which takes those of what it adds up.
            adds_on_devices=state.place.type != "cpu" and state.task.max_grad_norm is not None,
            early_release=state.pool.early_release,
            homes=max(homes, default=-1) + 1,
            home_bytes=[homes.get(shard.index, 0) for shard in shards],
            move_bytes=[max(0, homes.get(j, 0) - num_bytes) for j, num_bytes in enumerate(self._gradient_bytes())],
            home_update_s=[sum(slot.num_bytes for slot in state.pool.owned(shard)) / home_rate for shard in shards],
            frozen_bytes=[shard.slab_bytes - shard.own_bytes for shard in shards],
        )


class DramLimit:
    """The most DRAM that the tasks of an orchestrator may take together; None: what the machine has.

    A task counts with what its plan says. From its end on it counts with those of its weights that are still in DRAM,
    even if nothing here refers to it any more. From any thread.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._tasks: weakref.WeakSet[PlannedTask] = weakref.WeakSet()
        self._weights: list[weakref.ref[Tensor]] = []  # of tasks that are over

    def enter(self, planned: PlannedTask) -> None:
        """Count a task from now on."""
        with self._lock:
            self._tasks.add(planned)

    def leave(self, planned: PlannedTask) -> None:
        """A task is over, or will not be trained."""
        averages = planned.report.ema_state or {}
        with self._lock:
            planned.frozen.forget(planned.layout)
            self._tasks.discard(planned)
            self._weights = [each for each in self._weights if each() is not None]
            self._weights += map(weakref.ref, (*(slot.parameter for slot in planned.layout.slots), *averages.values()))

    @property
    def held_bytes(self) -> int:
        """DRAM that all tasks take."""
        with self._lock:
            tasks = list(self._tasks)
            # A plan counts frozen weights until they are here, of whichever task: from then on nobody brings them.
            total = sum(sum(each.dram.values()) for each in tasks)
            total += sum(each.here_bytes for each in {id(each.frozen): each.frozen for each in tasks}.values())
            counted = {slot.parameter.data_ptr() for each in tasks for slot in each.layout.slots}
            for weight in [each for each in (ref() for ref in self._weights) if each is not None]:
                if weight.data_ptr() not in counted:
                    counted.add(weight.data_ptr())
                    total += weight.nbytes
            return total

    @property
    def left_bytes(self) -> float:
        """DRAM that one more task may take."""
        return math.inf if self._limit_bytes is None else self._limit_bytes - self.held_bytes

    def check(self, planned: Sequence[PlannedTask]) -> None:
        """Refuse tasks, which count already, if all tasks would take more than the limit."""
        limit = self._limit_bytes
        if limit is None or self.held_bytes <= limit:
            return
        _split_weights(planned)
        if (held := self.held_bytes) <= limit:
            return
        own = sum(sum(each.dram.values()) for each in planned)
        raise HostOutOfMemory(
            f"{', '.join(each.name for each in planned)}: {_size(own)} of DRAM for weights, gradients, optimizer state "
            f"and a step, with other tasks {_size(held)}, limit: dram={_size(limit)}; raise dram, train fewer tasks at "
            f"once, forget those that are over (forget_task), freeze layers, "
            f"or choose an optimizer with less state (SGD)"
        )


# More than 15 attributes: it is what a task has before, between and after runs, each thing with an owner of its own.
# Past 300 lines: half of its methods answer one question of those who run it from these.
class PlannedTask:
    """A task that is ready to train: its state, its reader with the sample in it, and how its steps are spread."""

    # More than seven parameters: all but the first two are what only some tasks have (a save, adapters, others beside).
    def __init__(
        self,
        task: ModelTask,
        name: str,
        frozen: FrozenBlocks | None = None,
        *,
        alignment_bytes: int = ALIGNMENT_BYTES,
        keeps_positions: bool = False,
        saved: SavedTask | None = None,
        beginning: Beginning | None = None,
        limit: DramLimit | None = None,
        rehearsals: Rehearsals | None = None,
        max_devices: int = 1,
    ) -> None:
        """`alignment_bytes`: that every parameter's place is a multiple of, on the devices that it may run on.

        keeps_positions: the reader says where the task stands. saved: what it goes on from; its weights have been put
        back. beginning: where it begins again, if not saved. limit: of DRAM, for all tasks. rehearsals: those of other
        tasks. max_devices: that batches are split for, with `max_device_batch`; a saved task keeps those that it had,
        and with them its bits.
        """
        self.task = task
        self.name = name
        self.saved = saved
        max_devices = max_devices if saved is None or saved.max_devices is None else saved.max_devices
        self.report = TaskReport(name=name, seed=task.seed, hparams=dict(task.hparams))
        if saved is not None:
            self.report = saved.report(task, goes_on=True)
        self._stopping: list[StopTask | PauseTask] = []  # what a callback raised before it is begun
        self.is_paused = False  # it is saved and at rest: another one of its name may go on from there
        self.pause_wanted = False  # once it has joined others
        self.has_left = False  # its memory is given back: it is trained, or will not be
        self.callback_draws = UserDraws(name)
        # What callbacks may change: as the program has made it.
        source = task.model.__dict__["source"]
        self.roots = (task.model if source is None else source, task.loss_fn)
        self.attributes = plain_attributes(*self.roots) if task.callbacks else {}
        self._trained = frozenset(id(each) for each in task.model.parameters() if each.requires_grad)
        if saved is not None:
            saved.put_callbacks(task.callbacks, *self.roots)
        # About what they drew, weights that lose what they learn, and settings that do not count.
        self.doubts: list[str] = [] if saved is None else [*saved.messages]
        if task.purpose is Purpose.TRAIN and task.adapts != chooses(task.dataloader):
            raise ValueError(
                f"{name}: its loader began, or ceased, to have batches chosen once the task was made, which fixed its "
                f"plan; call autoscale_batch_size() and the like before ModelTask(...)"
            )
        self.chooser: BatchChooser | None = None
        if task.adapts and isinstance(task.dataloader, GuidedLoader):
            try:
                self.chooser = task.dataloader.chooser()
                if saved is not None:
                    saved.put_chooser(self.chooser)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
        self.speedups: tuple[float, ...] = ()  # of a task whose batches are chosen, on 1, 2, ... devices, as predicted
        self._beginning, self.keeps_positions = beginning, keeps_positions
        start = None if beginning is None else beginning.position
        # Not a method: the two would hold each other.
        begin_epoch = partial(_begin_epoch, task, self.report, self._stopping, self.callback_draws)
        self.reader = Reader(
            task,
            name,
            chooser=self.chooser,
            keeps_positions=keeps_positions,
            start=start if saved is None else saved.position,
            begin_epoch=begin_epoch,
            max_devices=max_devices,
        )
        self.rehearsals = Rehearsals() if rehearsals is None else rehearsals
        self.adopted: str | None = None  # the kind whose plan it has taken over
        with _noting(name, "as its model was looked at"):
            task.model.check_hooks()
        self._uncut: Uncut | None = None  # why its own forward is one layer, if it could not be cut
        if task.model.is_pending or task.model.is_outdated:
            # By the first batch, which the reader keeps for the first step.
            with _noting(name, "as its model was made into layers by its first batch"):
                trains = task.purpose is Purpose.TRAIN
                self._uncut = task.model.convert(self._inputs(), evaluates=not trains, may_be_one=True)
        self._alignment_bytes, self._max_devices = alignment_bytes, max_devices
        if task.model.kept_message:
            self.doubts.append(f"{name}: {task.model.kept_message}")
        if task.model.one_layer_because:
            self._tell_one_layer()
        self.layout = layout_of(task, alignment_bytes, self._trained)
        if task.moments != "float32":
            self.doubts.append(
                f"{name}: moments={task.moments!r} rounds at each step: its results are not plain PyTorch's"
            )
        narrow = sum(slot.dtype == torch.bfloat16 for slot in self.layout.trainable_slots())
        if narrow and task.purpose is Purpose.TRAIN:
            self.doubts.append(
                f"{name}: {narrow} of its parameters are trained in bfloat16, which loses updates under 1/256 of a "
                f"weight; model.float() with precision='bfloat16' computes as narrow and keeps them"
            )
        self.frozen = FrozenBlocks() if frozen is None else frozen
        self.frozen.plan(self.layout)
        self._limit = DramLimit() if limit is None else limit
        self.state = self._new_state()
        self.estimate = Estimate(self.state)
        self.spreading = Spreading()
        self.num_micro_batches = 1  # of a step, as far as is known
        self.no_homes_because = ""  # why its layers have no homes on devices, where some were asked for
        self._most_devices = 1  # that a step's spreading was predicted for
        self.choice: CutChoice | None = None  # of its cut, where that was chosen by predictions
        self.predicted: PredictedCut | None = None
        self.as_planned: TaskCost | None = None  # what a step was predicted to take, for other tasks' plans

    def _new_state(self) -> TaskState:
        """Return the state of a task with this layout, of which the reader is told."""
        own_pool = HostPool if self.task.purpose is Purpose.TRAIN else BorrowedPool
        pool = own_pool(self.layout, early_release=self.task.early_release, frozen=self.frozen)
        state = TaskState(self.task, self.name, self.layout, pool, self._max_devices)
        self.reader.num_micro_batches = lambda: state.cut.num_micro_batches
        return state

    def _lay_out_again(self) -> None:
        """Begin anew with other layers, of the same parameters."""
        before = self.state
        self.frozen.forget(self.layout)
        self.layout = layout_of(self.task, self._alignment_bytes, self._trained)
        self.frozen.plan(self.layout)
        self.state = self._new_state()
        self.state.measured.state_bytes, self.state.pool.splits = before.measured.state_bytes, before.pool.splits
        self.estimate = Estimate(self.state)

    def _inputs(self) -> Any:
        with _noting(self.name, FIRST_READ):
            return self.reader.sample_inputs

    @property
    def beginning(self) -> Beginning:
        """Where it began. To be asked once it is at rest."""
        if self._beginning is not None:
            return self._beginning
        return Beginning(self.report.seed, None if self.saved is not None else self.reader.beginning)

    @property
    def stopping(self) -> StopTask | PauseTask | None:
        return self._stopping[0] if self._stopping else None

    @property
    def drawn(self) -> set[str]:
        """Which of `random` and `numpy.random` its loader and its layers were seen to draw from."""
        return self.reader.drawn | ({"`random`", "`numpy.random`"} if self.state.cut.locked else set())

    @property
    def spreads(self) -> tuple[Spread, ...]:
        """How a step is spread over 1, 2, ... devices; where batches are chosen, over as many as it is known for."""
        spreads = self.spreading.spreads
        if self.chooser is None:
            return spreads
        known = self.speedups or (1.0,)
        told = [spread._replace(speedup=speedup) for spread, speedup in zip(spreads, known, strict=False)]
        return (*told, *spreads[len(told) : self.task.min_devices])

    def make_plan(self, target: Target) -> TaskPlan:
        """Profile, cut, rehearse. Changes nothing of the task; the loader is read once, however often it is planned.

        Raises ShardDoesNotFit where the task does not fit, or not in the way that was chosen for all tasks together.
        """
        self.estimate = Estimate(self.state)
        with _noting(self.name, "as its plan was made"):  # an error of a partitioner, say
            try:
                plan = self._plan(target)
            except LayerFault as error:
                raise ValueError(f"{self.name}: {error}") from error
            self.as_planned = None if self.choice is None else self._of_task(self._cost_at_home(plan.boundaries))
        message = self.task.model.eval_message if self.task.purpose is Purpose.TRAIN else ""
        if message and (text := f"{self.name}: {message}") not in self.doubts:
            self.doubts.append(text)
            warnings.warn(text, stacklevel=2)
        return replace(plan, eval_message=message)

    def _plan(self, target: Target) -> TaskPlan:
        """Plan it with its layers, or as one layer where they fail on what a plain loop does."""
        planner, model = Planner(self, target), self.task.model
        try:
            return planner.plan()
        except Exception as error:
            has_remedy = isinstance(error, (LayerFault, UsesNotCarried)) or str(error).startswith(f"{self.name}:")
            is_whole = self._uncut is not None and self._uncut.__cause__ is None
            uncut = None if isinstance(error, UsesNotCarried) or not is_whole else self._uncut
            if uncut is not None and (has_remedy or isinstance(error, (LayerTooLarge, ShardDoesNotFit))):
                raise noted(uncut, f"task {self.name}: as one layer, {error}") from error
            is_of_layers = error is planner.fault and not isinstance(error, (DeviceLost, DeviceFailed, MemoryError))
            if not is_of_layers or (has_remedy and not model.is_converted) or not self._may_try_plain():
                raise
            raised = self._plain_error()
            if raised is None and model.is_converted and (plan := self._plan_as_one_layer(target, error)) is not None:
                return plan
            if raised is None and uncut is not None:
                raise noted(uncut, f"task {self.name}: as one layer, {type(error).__name__}: {error}") from error
            if not has_remedy:
                noted(error, f"task {self.name}: a plain {self._beside_plain(error, raised)}")
            if model.one_layer_because:
                for note in getattr(self._uncut and self._uncut.__cause__, "__notes__", ()):
                    noted(error, note)
                noted(error, f"task {self.name}: {model.one_layer_because}")
            raise

    def _may_try_plain(self) -> bool:
        """Return True if the model has values, and DRAM has room for another copy of them."""
        tensors = [*self.task.model.parameters(), *self.task.model.buffers()]
        needed = 2 * sum(each.nbytes for each in tensors)
        has_values = not any(each.is_meta for each in tensors)
        return self.task.purpose is not Purpose.PREDICT and has_values and needed < dram.available_dram_bytes()

    def _plain_error(self) -> Exception | None:
        """Return what a plain step on the first batch raises, and a validation where there is one; None: nothing."""
        task, trains = self.task, self.task.purpose is Purpose.TRAIN
        for training in (True, False) if trains and task.validation is not None else (trains,):
            inputs, target = (each.value() for each in self.reader.sample(training=training).whole)
            loss_fns = [task.loss_fn, *(() if training else task.metrics.values())]
            error = plain_error(task.model.as_plain, loss_fns, inputs, target, training=training)
            if error is not None:
                return error
        return None

    def _plan_as_one_layer(self, target: Target, error: Exception) -> TaskPlan | None:
        """Plan it as one layer, since its layers failed; None: so does that."""
        model, kind = self.task.model, type(self.task.model.source).__name__
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0].removeprefix(f"{self.name}: ")
        undo = model.become_one_layer(
            f"the model ({kind}) is one layer, which has to fit a device; cut into layers, it fails on what a plain "
            f"loop does: {first_line}"
        )
        self._lay_out_again()
        try:
            plan = Planner(self, target).plan()
        except Exception as other:
            undo()
            self._lay_out_again()
            if isinstance(other, (LayerTooLarge, ShardDoesNotFit)):
                noted(error, f"task {self.name}: as one layer it does not fit: {other}")
            return None
        self._tell_one_layer()
        return plan

    def _tell_one_layer(self) -> None:
        text = f"{self.name}: {self.task.model.one_layer_because}"
        self.doubts += [] if text in self.doubts else [text]

    def _beside_plain(self, error: Exception, raised: Exception | None) -> str:
        """Say what a plain step does where an error came here, and what differs, with a remedy; `raised`: by it."""
        plain = "loss_fn(model(inputs), target) on its first batch"
        if raised is not None:
            same = "the same" if str(raised) == str(error) else f"{type(raised).__name__}: {raised}"
            return " ".join([f"{plain} shows {same}", *getattr(raised, "__notes__", ())])
        task, ways = self.task, []
        number = len(self.reader.sample(training=task.purpose is Purpose.TRAIN).micro_batches)
        if number > 1:
            ways.append(
                f"in {number} micro-batches (take sizes from the inputs, or leave out accumulation_steps and "
                f"max_device_batch)"
            )
        if task.precision != "float32":
            ways.append(f"in {task.precision} (compute in float32 what does not exist in it, or leave out precision)")
        if len(task.model) > 1:
            ways.append(
                "differentiated layer by layer, so that neither the loss nor a layer can differentiate with respect to "
                "what came before it (make one layer of those that it reaches through; "
                "nn.Sequential(nn.Sequential(*layers)) makes one of all)"
            )
        return f"{plain} works; here it runs {', '.join(ways) or 'in a copy of the model, several times'}"

    def spread_over(self, devices: Sequence[DeviceSpec], num_micro_batches: int) -> None:
        """Predict how a step of so many micro-batches is best spread over 1, 2, ... of these devices."""
        if self.chooser is not None:  # it has as many micro-batches as it has devices
            num_micro_batches = max(num_micro_batches, len(devices))
            self.speedups = self.chooser.speedups(len(devices))  # of a task that goes on
        self.spreading, self.num_micro_batches = Spreading(), num_micro_batches
        pool = self.state.pool
        beside_bytes = 0 if pool.is_open else self.training_bytes - pool.kept_bytes
        self.spreading = self.estimate.spreading(devices, num_micro_batches, beside_bytes, self._limit)
        self._most_devices = len(devices)

    def least_bytes(self, device: DeviceSpec) -> LeastBytes:
        """Return the least memory of a device on which the task runs, counted without a rehearsal."""
        return Planner(self, Target(device=device, budget=Budget(memory_bytes=2**62), num_threads=1)).least_bytes()

    def can_be_wider(self, num_devices: int) -> bool:
        """Return True if its steps may be spread over so many devices, and it is not known yet how."""
        most = num_devices if self.chooser is not None else min(self.num_micro_batches, num_devices)
        return self.task.purpose is Purpose.TRAIN and most > self._most_devices

    def wider(self, devices: Sequence[DeviceSpec]) -> Spreading:
        """Predict how a step is best spread over these devices, of which there are more than before."""
        self._most_devices = len(devices)
        if self.chooser is not None:
            self.num_micro_batches = max(self.num_micro_batches, len(devices))
        return self.estimate.spreading(devices, self.num_micro_batches, 0, self._limit)

    @property
    def largest_slab_bytes(self) -> int:
        return max(shard.slab_bytes for shard in self.state.cut.shards)

    @property
    def work_bytes(self) -> int:
        """What its largest unit takes beside its slab."""
        return max(map(self.state.work_bytes, self.state.cut.shards))

    @property
    def unit_s(self) -> dict[tuple[str, int], float]:
        """Seconds of each unit, by (kind, shard)."""
        return self.state.measured.unit_s

    @property
    def doubled_bytes(self) -> int:
        """Frozen weights that another task has equal ones of, elsewhere in DRAM."""
        return self.frozen.doubled_bytes(self.layout)

    @property
    def dram(self) -> dict[str, int]:
        """Bytes of DRAM by what they hold; before the task is cut, without what depends on shards.

        What tasks share is counted once, with the first of them. The optimizer's state is an estimate from a trial
        step, exact for state that is laid out as the parameters.
        """
        layout, state = self.layout, self.state
        frozen, cast = self.frozen.brought(layout)
        casts = layout.link_bytes[True] + sum(layout.aligned(slot.link_bytes) for slot in cast)
        masters, rests = state.pool.split_bytes  # a cast and its remainder are the weight
        trained = layout.num_bytes[True] - masters + 2 * rests
        return {
            "weights": trained + sum(layout.aligned(slot.num_bytes) for slot in frozen),
            "casts": 0 if layout.narrow is None else casts - rests,
            "gradients": state.pool.gradients.num_bytes(state.cut.shards),
            "optimizer": sum(state.measured.state_bytes.values()),
            "best": 0 if self.task.keep_best is None else BestWeights.num_bytes(layout),
            "averages": 0 if self.task.ema_decay is None else layout.num_bytes[True],
            "step": state.measured.staging_bytes,
            "parts": self.spreading.parts_bytes,
        }

    @property
    def training_bytes(self) -> int:
        """DRAM that training takes beside the weights, which are there already."""
        return sum(num_bytes for part, num_bytes in self.dram.items() if part != "weights")

    def most_samples(self, num_samples: int) -> int:
        """Samples of a batch for which DRAM has room; `num_samples`: of the first one, which was counted."""
        sample_bytes = self.state.measured.staging_bytes / num_samples
        room = min(dram.available_dram_bytes() * STAGING_SHARE, self._limit.left_bytes)
        return num_samples + int(max(0, min(room, 2**62)) / max(1.0, sample_bytes))

    def num_steps(self) -> int | None:
        """Return the steps of the whole task; None: its loader does not say."""
        try:
            return len(self.task.dataloader) * self.task.epochs  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):  # an iterable without a length ends when it ends
            return None

    @property
    def way(self) -> Way:
        """Return how it is to be trained as it is planned now."""
        cut = self.state.cut
        return Way(tuple(cut.boundaries), cut.num_micro_batches, self.state.homes.num_layers)

    def _cost_at_home(self, boundaries: Sequence[int]) -> TaskCost:
        """Return what it takes, cut like this, with as many layers at home as now."""
        assert self.choice is not None
        return self.choice.cost(boundaries, homes=self.state.homes.num_layers)

    def rehearsed_cost(self) -> TaskCost:
        """Return what it takes in a simulation, by its rehearsal."""
        return self._of_task(self.estimate.cost(self.num_micro_batches))

    def options(self) -> list[tuple[Way, TaskCost]]:
        """Return the ways in which it may be trained, and what each takes in a simulation; the first is as it is now.

        These are its other cuts, and the likeliest ones of other numbers of micro-batches, where these are left open.
        """
        own, choice = self.way, self.choice
        if choice is None:
            return [(own, self.rehearsed_cost())]
        if self.task.adapts:  # what was chosen for its batches stays with its cut
            return [(own, self._of_task(self._cost_at_home(own.boundaries)))]
        cuts = [own.boundaries, *(ends for ends in map(tuple, choice.candidates) if ends != own.boundaries)]
        found = [(own._replace(boundaries=ends), self._cost_at_home(ends)) for ends in cuts]
        for number in self._numbers(own, choice.run.num_devices):
            found += [(Way(ends, number), cost) for ends, cost in choice.in_micro_batches(number).likeliest()]
        return [(way, self._of_task(cost)) for way, cost in found]

    def _of_task(self, cost: TaskCost) -> TaskCost:
        """A step's cost as that of this task; with one micro-batch where its steps are not spread whatever happens."""
        task, spreads = self.task, not self.state.observed.runs_backward
        number = cost.num_micro_batches if spreads and not task.adapts else 1
        return replace(cost, name=self.name, num_micro_batches=number, priority=task.priority, weight=task.weight)

    def _numbers(self, own: Way, num_devices: int) -> list[int]:
        """Larger numbers of micro-batches, for steps that are spread over more devices."""
        task, observed = self.task, self.state.observed
        if task.accumulation_steps != "auto" or self.saved is not None or task.early_release:
            return []
        if observed.runs_backward or observed.draws_outside_torch or self.state.shares_changed_buffer():
            return []
        most = min(num_devices, self.reader.sample().num_samples, task.max_devices or num_devices)
        return sorted({n for n in (*(2**k for k in range(1, most.bit_length())), most) if own.num_micro_batches < n})

    @property
    def wanted_homes(self) -> Wanted:
        """Return what its shards would take of devices to be at home there."""
        state = self.state
        shards = state.shards_for_homes()
        return Wanted.of(state, self.name, shards, [state.home_bytes(shard) for shard in shards])

    @property
    def has_read_all(self) -> bool:
        """True if it is over, and has read its loaders to their end."""
        return self.has_left and self.report.status == FINISHED and not self.report.stopped_early

    def leave(self) -> None:
        """It is trained, or will not be: nobody counts on what it has in DRAM any more."""
        self.has_left = True
        self.state.pool.let_go()
        self._limit.leave(self)


# Past 300 lines: micro-batches, cut and rehearsal are tried in turn, each from the one before.
class Planner:
    """Makes one plan of one task."""

    def __init__(self, planned: PlannedTask, target: Target) -> None:
        self._planned = planned
        self._target = target
        self._task, self.state, self._estimate = planned.task, planned.state, planned.estimate
        self._trains = planned.task.purpose is Purpose.TRAIN
        self._validates = self._trains and planned.task.validation is not None
        self.fault: Exception | None = None  # what layers or the loss raised, or were refused for

    def plan(self) -> TaskPlan:
        task, state, saved, device = self._task, self.state, self._planned.saved, self._target.device
        Structure(state.layout, torch.device("cpu"))  # raises for layers without replicas, before any is run
        rehearsals = self._planned.rehearsals
        num_samples = self._sample().num_samples
        state.place, state.homes.has_ieee_roots = device.torch_device, device.has_ieee_roots
        kind = kind_of(state, self._beside)
        found = rehearsals.get(kind)
        self._planned.adopted = None
        if found is not None and self._adopt(found):
            self._planned.adopted = kind
            return replace(self._as_plan(), adopted_from=None if found.task == state.name else found.task)
        if state.place.type != "cpu":
            self._estimate.rates(device)  # layers are not timed there, but counted against them
        for training in (True, False) if self._validates else (self._trains,):
            if task.model.is_converted:
                mode = "train()" if training else "eval()"
                with self._noting_fault(), _noting(self._planned.name, f"as its own forward was tried in {mode}"):
                    inputs = self._planned.reader.sample_inputs
                    check_converted(task.model, inputs, num_samples, training=training)
        is_auto = task.accumulation_steps == "auto"
        is_open = is_auto and saved is None
        number = self._number(1)
        if is_auto and saved is not None:
            number = saved.accumulation_steps  # with others, its losses would differ from those before
        if any(hasattr(task.partitioner, name) for name in ("choose", "candidates")):  # it weighs times, not only bytes
            budget = self._estimate.budget(self._target.budget, device)
            self._target = replace(self._target, budget=budget)
            if is_open and hasattr(task.partitioner, "choose"):
                powers = [2**k for k in range(num_samples.bit_length())]
                with suppress(LayerTooLarge):  # for several micro-batches by an upper bound: tried below all the same
                    number, _ = task.partitioner.choose(self._costs, powers, budget)
        together = self._target.together
        if together is not None and is_open:  # any other number is the user's, and with it the bits
            number = together.num_micro_batches
        chooser, first = self._planned.chooser, self._sample().choice
        is_chosen = chooser is not None and first is not None and chooser.fixed_because(first.step) is None
        may_split = is_auto or is_chosen
        while True:
            try:
                self.cut(number)
                break
            except (LayerTooLarge, ShardDoesNotFit) as error:
                if together is not None or not may_split or number >= num_samples:
                    raise ShardDoesNotFit(f"{self._planned.name}: {self._remedied(error)}") from error
                number *= 2
                if is_chosen:
                    self._planned.reader.split_sample(min(number, num_samples))
        step_s = self.decide()
        if is_open and self._trains and together is None:
            self._raise_number(step_s)
        choice, predicted = self._planned.choice, self._planned.predicted
        rehearsals.put(kind, Rehearsed.of(state, self._estimate.input_bytes, choice, predicted))
        return self._as_plan()

    def _number(self, auto: int) -> int:
        """Return the micro-batches of a step, as far as the user has said; `auto`: where that is left open."""
        task = self._task
        if task.max_device_batch is not None or task.adapts:
            return len(self._sample().micro_batches)
        return auto if isinstance(task.accumulation_steps, str) else task.accumulation_steps

    @contextmanager
    def _noting_fault(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.fault = error
            raise

    def least_bytes(self) -> LeastBytes:
        """As `PlannedTask.least_bytes`: with shards as fine as the partitioner makes them, or the user's fixed ones."""
        task, self.state.place = self._task, self._target.device.torch_device
        num_samples = self._sample().num_samples
        costs = self._costs(self._number(num_samples))
        number = len(self._sample().micro_batches)
        budget = self._target.budget.with_micro_batches(number)
        may_cut = len(costs) == 1 or task.partitioner.revise([len(costs)], 0, costs) is not None
        ends = [*range(1, len(costs) + 1)] if may_cut else task.partitioner.partition(costs, budget)
        shards = [*pairwise([0, *ends])]
        needed = [shard_bytes(costs, *shard, number) for shard in shards]
        first, last = shards[needed.index(max(needed))]
        what = spanned([cost.name for cost in costs[first:last]])
        slabs = [slab_bytes(costs, *shard) for shard in shards]
        work = max(both - slab for both, slab in zip(needed, slabs, strict=True))
        return LeastBytes(self._planned.name, max(needed), what, max(slabs), work)

    def _beside(self) -> Hashable:
        """All that a plan depends on beside the task's structure: devices, and the sizes of the first batches."""
        target, saved, is_auto = self._target, self._planned.saved, self._task.accumulation_steps == "auto"
        batches = [self._sample(), *([self._read(training=False)] if self._validates else [])]
        return (
            *(type(target.device), target.device.torch_device, target.device.ceilings_name),
            *(target.device.has_arena, target.budget),
            *(target.num_threads, tuple(each.memory_bytes for each in target.spread_devices), self.state.max_devices),
            target.together,
            self.state.pool.splits,
            *(self._leaves_homes_open, self._asked_homes),
            *((target.share, None if saved is None else saved.accumulation_steps) if is_auto else ()),
            *(each.fingerprint for batch in batches for each in batch.whole),
            *((len(batch.micro_batches) for batch in batches) if self._task.adapts else ()),
        )

    def _adopt(self, found: Rehearsed) -> bool:
        """Cut the task as one of the same structure was cut; False where others leave no room for that."""
        planned, target = self._planned, self._target
        found.put_into(self.state)
        self._estimate.input_bytes = list(found.input_bytes)
        planned.choice, planned.predicted = found.choice, found.predicted
        slab_bytes = planned.largest_slab_bytes
        fits = target.most_slab_bytes is None or slab_bytes <= target.most_slab_bytes
        if not fits or not target.can_hold(planned.work_bytes, slab_bytes):
            return False
        self.decide()
        return True

    def decide(self) -> float:
        """Decide what is kept and how a step is spread; predicted seconds of a step on its share of the devices."""
        device, step_s, number = self._target.device, 0.0, 1
        self._decide_homes()
        if self._trains:
            rate = self._estimate.rates(device).up_bytes_per_s
            at_home, *_ = self._estimate.run_at_hand(self._target).at_home(self._planned.wanted_homes)
            keeps_from, step_s = choose_kept(self.state, device.memory_bytes, rate, at_home)
            self.state.cut = replace(self.state.cut, keeps_from=keeps_from)
            number = len(self._sample().micro_batches)
        self._planned.spread_over(self._target.spread_devices, number)
        return step_s / max(spread.speedup for spread in self._planned.spreading.spreads[: self._target.share])

    def _decide_homes(self) -> None:
        """Decide how many of the lowest layers are to have their homes on devices: by its option, or with its cut."""
        planned, number = self._planned, self._asked_homes
        if self._task.homes == "auto" and planned.predicted is not None:
            number = planned.predicted.homes
        planned.no_homes_because = ""
        if number and self._trains:
            planned.no_homes_because = self._against_homes()
        is_so = self._trains and not planned.no_homes_because
        self.state.homes.num_layers = number if is_so else 0

    @property
    def _asked_homes(self) -> int:
        """So many of the lowest layers are to have homes on devices by the task's option; 0: it leaves that open."""
        asked = self._task.homes
        return (
            {"auto": 0, "host": 0, "device": self.state.layout.num_layers}[asked] if isinstance(asked, str) else asked
        )

    @property
    def _leaves_homes_open(self) -> bool:
        return self._trains and self._task.homes == self._target.homes == "auto"

    def _may_choose_homes(self) -> bool:
        """Return True if homes on devices may gain: an emulated one without a link of its own lies in the same DRAM."""
        device = self._target.device
        has_link = self.state.place.type != "cpu" or self._estimate.rates(device).origin == STATED
        return self._leaves_homes_open and has_link and not self._against_homes()

    def _against_homes(self) -> str:
        """Return why no layer has a home on a device; nothing, if one may."""
        task, layout = self._task, self.state.layout
        options = {
            f"early_release={task.early_release!r}": task.early_release,
            "ema_decay": task.ema_decay is not None,
            "optimizer_scope='task'": task.optimizer_scope == "task",
            "batches that adapt": task.adapts,
            "read_ahead=False, whose loader may look at weights,": not task.read_ahead,
            "hooks on parameters": has_hooks(layout),
        }
        against = next(
            (f"with {option} all layers have their home in DRAM" for option, is_so in options.items() if is_so), ""
        )
        if not against:
            slots = layout.trainable_slots()
            sample = {slot.index: nn.Parameter(torch.zeros((1,) * len(slot.shape))) for slot in slots}
            with installed(Stream(capture())):  # the factory is user code
                optimizer = make_optimizer(task, {slot.name: sample[slot.index] for slot in slots})
            against = no_home_because(optimizer)
        kinds = {device.ceilings_name: device for device in self._target.spread_devices}
        for device in kinds.values():
            if not against and (kernel := device.kernel()) is not None:
                against = kernel_refused(kernel, optimizer, sample, self.state.pool, task)
        return against

    def _raise_number(self, step_s: float) -> None:
        """Cut into more micro-batches, while a step is predicted to be shorter for it.

        Smaller ones leave room to keep more, and can be spread over devices that have no other task.
        """
        most, share = self._sample().num_samples, self._target.share
        best = tried = self.state.cut.num_micro_batches
        while step_s > LEAST_GAIN * least_step_s(self.state) / share:
            tried *= share if tried == 1 and share > 1 else 2
            if tried > most:
                break
            try:
                self.cut(tried)
            except (LayerTooLarge, ShardDoesNotFit):
                break
            found_s = self.decide()
            if step_s < LEAST_GAIN * found_s:
                break
            best, step_s = tried, found_s
        if self.state.cut.num_micro_batches != best:
            self.cut(best)
            self.decide()

    def _remedied(self, error: LayerTooLarge | ShardDoesNotFit) -> str:
        """What a partitioner says of a lone layer; an evaluation has no micro-batches to make smaller."""
        if self._task.max_device_batch is not None:
            return str(error).replace("raise accumulation_steps", "lower max_device_batch")
        if self._trains or not isinstance(error, LayerTooLarge):
            return str(error)
        return (
            f"{error.layer} needs {_size(error.needed_bytes)} alone on a device, available: "
            f"{_size(error.available_bytes)}; give smaller batches, or use a device with more memory"
        )

    def _read(self, *, training: bool) -> Batch:
        with _noting(self._planned.name, FIRST_READ):
            return self._planned.reader.sample(training=training)

    def _sample(self) -> Batch:
        return self._read(training=self._trains)

    def cut(self, number: int) -> None:
        """Cut and rehearse the task in so many micro-batches, finer where it does not fit."""
        costs, batch = self._costs(number), self._sample()
        evaluation = self._read(training=False) if self._validates else None
        self._estimate.input_bytes = [len(batch.micro_batches) * cost.input_bytes for cost in costs]
        budget = self._target.budget.with_micro_batches(len(batch.micro_batches))
        boundaries, refused = self._partition(costs, budget)
        boundaries = chosen = [*map(plain, boundaries)]
        while True:
            check_boundaries(boundaries, len(costs))
            try:
                self._rehearse(boundaries, costs, batch, evaluation)
                most = self._target.most_slab_bytes
                finer = None  # where a lone layer has the largest slab: check_arena says why not
                if most is not None and self._planned.largest_slab_bytes > most:
                    finer = self._with_smaller_slabs(boundaries, costs)
                if finer is None:
                    if self._planned.choice is not None and boundaries != chosen:
                        found = self._planned.predicted
                        homes = self._asked_homes or (0 if found is None else found.homes)
                        self._planned.predicted = self._planned.choice.predicted(boundaries, homes)
                    return
            except TooLarge as error:
                if refused is not None:
                    raise refused from error
                finer = self._task.partitioner.revise(boundaries, error.shard, costs)
                if finer is None and self._target.device.has_arena:  # another shard's slab takes the room
                    finer = self._with_smaller_slabs(boundaries, costs)
                if finer is None:
                    shard = self.state.cut.shards[error.shard]
                    needed = shard_bytes(costs, shard.first, shard.last, budget.num_micro_batches)
                    needed = max(needed, error.needed_bytes)  # as far as it came
                    layers = spanned([cost.name for cost in costs[shard.first : shard.last]])
                    raise ShardDoesNotFit(
                        f"shard {error.shard} ({layers}) needs {_size(needed)} on a device, "
                        f"available: {_size(budget.memory_bytes)}; cut it smaller (Pilot does), "
                        f"{'raise accumulation_steps' if self._trains else 'give smaller batches'}, or use a device "
                        f"with more memory"
                    ) from error
            boundaries = [*map(plain, finer)]

    def _rehearse(self, boundaries: list[int], costs: list[LayerCost], batch: Batch, evaluation: Batch | None) -> None:
        """Cut the task, and run a step of it. Raises TooLarge."""
        state = self.state
        state.cut_at(boundaries, skips_of(costs))
        held = [costs[shard.first : shard.last] for shard in state.cut.shards]
        state.cut = replace(
            state.cut,
            locked=frozenset(j for j, each in enumerate(held) if any(cost.draws_globally for cost in each)),
            drawing=frozenset(j for j, each in enumerate(held) if any(cost.draws_random for cost in each)),
        )
        opened = self._target.opened or partial(own_device, self._target.device, self._target.num_threads)
        state.observed.runs_backward = any(cost.runs_backward for cost in costs)
        with self._noting_fault():
            state.measured.unit_s = rehearse(state, batch, evaluation, opened)
        state.measured.known.forget_batches()
        for each in (batch, evaluation):
            if each is not None:
                state.measured.known.note_fitting(each.training, each.signature)

    def _with_smaller_slabs(self, boundaries: list[int], costs: list[LayerCost]) -> list[int] | None:
        """Finer boundaries that cut the largest slab; None where a lone layer has it, or the user cut so."""
        widest = max(self.state.cut.shards, key=lambda shard: shard.slab_bytes)
        return self._task.partitioner.revise(boundaries, widest.index, costs)

    def _partition(self, costs: list[LayerCost], budget: Budget) -> tuple[list[int], LayerTooLarge | None]:
        """The partitioner's boundaries, and why it refuses the model, if it does.

        Then it is tried all the same, one layer per shard: a lone layer's bytes are exact for one micro-batch in almost
        all layers, but an upper bound in the others, and for several micro-batches.
        """
        partitioner, number = self._task.partitioner, len(costs)
        planned = self._planned
        planned.choice = planned.predicted = None
        try:
            if not (self._trains and hasattr(partitioner, "candidates")):
                return partitioner.partition(costs, budget), None
            may_choose, asked = self._may_choose_homes(), self._asked_homes
            asked = asked if asked and not self._against_homes() else 0
            with_homes = may_choose or asked > 0
            if with_homes:
                costs, budget = in_round_figures(costs, budget)
            choice = planned.choice = CutChoice(
                costs=costs,
                candidates=partitioner.candidates(costs, budget),
                budget=budget,
                run=self._estimate.run_at_hand(self._target, with_homes=with_homes),
            )
            together, beside = self._target.together, self._target.beside
            if together is None:
                own = choice.fastest(asked)
                own = planned.predicted = choice.with_homes(own) if may_choose else own
                if beside:
                    [num_steps, *_] = known_steps([planned.num_steps(), *(each.num_steps for each in beside)])
                    planned.predicted = choice.beside(own, planned.name, num_steps, beside)
            else:
                found = choice.predicted(together.boundaries, together.homes)
                planned.predicted = found._replace(is_together=True)
            return list(planned.predicted.boundaries), None
        except LayerTooLarge as error:
            may_cut = number == 1 or partitioner.revise([number], 0, costs) is not None
            if not may_cut:
                raise
            return list(range(1, number + 1)), error

    def _costs(self, number: int) -> list[LayerCost]:
        """Costs of the layers for the first of so many micro-batches."""
        task, place = self._task, self.state.place
        self.state.split_into(number)
        inputs, target, _ = self._sample().micro_batches[0]
        with self._noting_fault(), installed(Stream(capture())), _naming(self._planned.name, task.purpose):
            if self._trains:
                # Elsewhere layers are not timed one by one: the rehearsal times them, on the device, in their shards.
                return profile(
                    task.model,
                    inputs,
                    target,
                    task.loss_fn,
                    precision=task.precision,
                    device=place,
                    rates=self._estimate.kernel_rates(),
                    time_layers=place.type == "cpu",
                )
            loss_fn = None if task.purpose is Purpose.PREDICT else task.loss_fn
            return profile_evaluation(task.model, inputs, target, loss_fn, precision=task.precision)

    def _as_plan(self) -> TaskPlan:
        state, spreading, known = self.state, self._planned.spreading, self._estimate.known
        timings = state.measured.timings.values()
        device_s = sum(timing.device_s for timing in timings)
        predicted = self._planned.predicted
        return TaskPlan(
            name=self._planned.name,
            boundaries=list(state.cut.boundaries),
            shard_bytes=[state.shard_bytes(shard) for shard in state.cut.shards],
            dram=self._planned.dram,
            accumulation_steps=state.cut.num_micro_batches,
            step_s=sum(state.measured.unit_s.values()),
            speedups=[spread.speedup for spread in spreading.spreads],
            shares_cores=state.place.type == "cpu",
            launch_share=sum(timing.launch_s for timing in timings) / device_s if device_s else None,
            one_device_because=spreading.one_device_because,
            graph_bytes=[kept_bytes(state, shard) for shard in state.cut.shards],
            doubled_bytes=self._planned.doubled_bytes,
            ceilings="" if known is None or known.origin == STATED else known.source,
            predicted_s=None if predicted is None else predicted.step_s,
            cut_because="" if predicted is None else str(predicted),
            no_homes_because=self._planned.no_homes_because,
        )


def _size(num_bytes: int) -> str:
    return f"{format_bytes(num_bytes)} ({num_bytes} bytes)"


def _in_two_digits(figure: float) -> float:
    return float(f"{figure:.2g}")


def in_round_figures(costs: Sequence[LayerCost], budget: Budget) -> tuple[list[LayerCost], Budget]:
    """Round what is measured, so that two runs on one machine choose alike."""
    link, update = map(_in_two_digits, (budget.link_bytes_per_s, budget.update_bytes_per_s))
    seconds = [map(_in_two_digits, (cost.forward_s, cost.backward_s)) for cost in costs]
    rounded = [
        replace(cost, forward_s=forward_s, backward_s=backward_s)
        for cost, (forward_s, backward_s) in zip(costs, seconds, strict=True)
    ]
    return rounded, replace(budget, link_bytes_per_s=link, update_bytes_per_s=update)


@contextmanager
def _noting(name: str, when: str) -> Iterator[None]:
    """Note when it came on an error that names no task, as those of user code."""
    try:
        yield
    except Exception as error:
        if not names(error, name):
            noted(error, f"task {name}, {when}")
        raise


@contextmanager
def _naming(name: str, purpose: Purpose) -> Iterator[None]:
    """Refuse in the task's name what shows as layers are profiled."""
    try:
        yield
    except UnfitTensor as error:
        raise UnfitTensor(f"{name}: {error}") from error
    except Exception as error:
        reads_another = isinstance(error, (AttributeError, RuntimeError)) and (
            isinstance(getattr(error, "obj", None), nn.Module) or "graph a second time" in str(error)
        )
        if not reads_another:
            remedy = None
            if purpose is Purpose.PREDICT:
                remedy = (
                    "a batch is what the first layer takes; of pairs (inputs, target), unpack=lambda batch: batch[0] "
                    "gives that, or predict(task, ...) as the task does"
                )
            if isinstance(error, TypeError) and "positional argument" in str(error):
                remedy = (
                    "layers take one argument, what the one before returned; a module whose own forward passes them "
                    "several is given whole: Model(module)"
                )
            if remedy is not None:
                noted(error, f"task {name}: {remedy}")
            raise
        note = "".join(f"{each}: " for each in getattr(error, "__notes__", ()))
        raise ValueError(f"{name}: {note}{error}; what another layer has left is not there: {REMEDY}") from error


def _begin_epoch(
    task: ModelTask,
    report: TaskReport,
    stopping: list[StopTask | PauseTask],
    draws: UserDraws,
    epoch: int,
    stream: Stream,
) -> None:
    """Call callbacks for an epoch whose first batch is the sample, unless one has ended the task."""
    if stopping:
        return
    try:
        with draws.drawing(stream, "on_epoch_begin", is_call=True):
            for callback in task.callbacks:
                callback.on_epoch_begin(report, epoch)
    except (StopTask, PauseTask) as stop:
        stopping.append(stop)


def ways_together(planned: Sequence[PlannedTask]) -> dict[int, Way]:
    """Return, by index of the task, the ways in which the whole run is predicted to end sooner than with their own.

    A cut of its own was chosen beside tasks that are taken to be like it. So where all are, and nothing but the cuts is
    open, there is nothing to do.
    """
    chosen = next((each.choice for each in planned if each.choice is not None), None)
    if chosen is None:
        return {}
    options = [each.options() for each in planned]
    others = {way[1:] for each in options for way, _ in each if way[1:] != each[0][0][1:]}
    if not others and len(planned) == 1:
        return {}
    steps = known_steps([each.num_steps() for each in planned])
    costs = [[replace(cost, num_steps=n) for _, cost in each] for each, n in zip(options, steps, strict=True)]
    if not others and len({tuple(replace(cost, name="") for cost in each) for each in costs}) == 1:
        return {}
    found = WholeRun.of(chosen.run, costs).worth_searching().best()
    return {i: options[i][k][0] for i, k in enumerate(found.chosen) if k > 0}


def rehearsed_s(planned: Sequence[PlannedTask]) -> float:
    """Predict the makespan of tasks by their rehearsals; of a run with fewer steps, where there are many."""
    run = next(each.choice.run for each in planned if each.choice is not None)
    steps = known_steps([each.num_steps() for each in planned])
    costs = [replace(each.rehearsed_cost(), num_steps=n) for each, n in zip(planned, steps, strict=True)]
    return WholeRun.of(run, [[cost] for cost in costs]).makespan_s([0] * len(costs))


def known_steps(steps: Sequence[int | None]) -> list[int]:
    """Return steps of tasks; of one whose loader does not say, as many as of the longest."""
    most = max((each for each in steps if each is not None), default=1)
    return [max(1, most if number is None else number) for number in steps]


def check_dram(planned: list[PlannedTask]) -> None:
    """Refuse tasks whose gradients and optimizer states do not fit beside the weights, which are in DRAM already."""
    for each in planned:
        # Before anything large is touched. The factory is user code, and what it draws is none of the run's.
        with _noting(each.name, "as a step of its optimizer was tried"), installed(Stream(capture())):
            found = trial_state_bytes(each.task, each.name, each.layout)
        each.state.measured.state_bytes = found
        each.state.pool.splits = bool(each.task.split_weights)
        against = _against_split(each) if each.task.split_weights else None
        if against is not None:
            raise ValueError(f"{each.name}: split_weights: {against}; leave it out")
    own = {each.state.pool for each in planned}
    needed = sum(each.training_bytes for each in planned)
    available = dram.available_dram_bytes() + sum(pool.kept_bytes for pool in own)
    if needed > available:
        for other in set(kept_pools()) - own:  # of those that may never train
            other.let_go()
        available = dram.available_dram_bytes() + sum(pool.kept_bytes for pool in own)
    if needed > available:
        _split_weights(planned)
        needed = sum(each.training_bytes for each in planned)
    if needed > available:
        raise HostOutOfMemory(
            f"{', '.join(each.name for each in planned)}: training needs {_size(needed)} of DRAM for gradients and "
            f"optimizer state, available: {_size(available)}; train fewer tasks at once, freeze layers, choose an "
            f"optimizer with less state (SGD), or use a machine with more DRAM"
        )


def _against_split(planned: PlannedTask) -> str | None:
    """Return why weights of a task have to be in DRAM in float32, beside its options."""
    if has_hooks(planned.layout):
        return "hooks are registered on parameters, which may read them at any time"
    if sys.platform != "linux":
        return f"the system is {sys.platform}, limit: linux, where memory is given back page by page"
    return None


def _split_weights(planned: Sequence[PlannedTask]) -> None:
    """Split the weights of tasks that leave it open, for which DRAM is too small otherwise."""
    for each in planned:
        pool = each.state.pool
        is_open = each.task.split_weights is None and each.task.may_split_weights and not pool.splits
        if is_open and not pool.is_open and _against_split(each) is None:
            pool.splits = True
            each.doubts.append(
                f"{each.name}: DRAM is too small for float32 weights beside the narrow ones, so they are split "
                f"(split_weights); results are the same, and other threads of yours than callbacks' read zeros"
            )


def check_boundaries(boundaries: list[int], num_layers: int) -> None:
    """Every layer exactly once, in order, whatever partitioner said so."""
    increasing = all(a < b for a, b in zip([0, *boundaries], boundaries, strict=False))
    if not boundaries or not increasing or boundaries[-1] != num_layers:
        raise ValueError(
            f"partitioner: {boundaries} is not a partition of {num_layers} layers; cumulative end indices must "
            f"increase and end at {num_layers}"
        )


def arena_bytes(planned: Sequence[PlannedTask], memory_bytes: int) -> int:
    """Of a device's memory, what is for slabs alone where they have an arena.

    All of them, if there is room beside the largest unit, larger batches than the sample, and what plans keep of
    forwards; else as many as there is, but two of the largest, one that computes and one that is loaded.
    """
    shards = [(each, shard) for each in planned for shard in each.state.cut.shards]
    # Where a step is spread, with the sums of other parts.
    work = max(
        each.state.work_bytes(shard) + (len(each.spreads) > 1) * each.state.sum_bytes(shard) for each, shard in shards
    )
    largest = max(each.largest_slab_bytes for each in planned)
    if largest > memory_bytes - work:  # a part that does not fit is found out as it runs, and then none is spread
        work = max(each.work_bytes for each in planned)
    kept = sum(kept_bytes(each.state, shard) for each, shard in shards)
    homes = sum(s.home_bytes(shard) for s in (p.state for p in planned) for shard in s.shards_for_homes())
    total, two = sum(shard.slab_bytes for _, shard in shards), 2 * largest
    wanted = min(total, max(two, memory_bytes - int(work * WORK_HEADROOM) - kept))
    wanted = max(wanted, min(total + homes, memory_bytes - int(work * HOMES_HEADROOM) - kept))
    return min(wanted, memory_bytes - work)


def planned_homes(planned: Sequence[PlannedTask], devices: Sequence[DeviceSpec]) -> list[dict[str, int]]:
    """Return, for each task, how many of its layers are to have their homes on which devices."""
    wanted = [each.wanted_homes for each in planned]
    found = share_out(wanted, {k: device.memory_bytes for k, device in enumerate(devices)})
    homes: list[dict[str, int]] = []
    for each in planned:
        layers: dict[str, int] = {}
        for index, k in found[each.name].items():
            shard, name = each.state.cut.shards[index], devices[k].name_at(k)
            layers[name] = layers.get(name, 0) + shard.last - shard.first
        homes.append(layers)
    return homes


def fits_arena(planned: PlannedTask, beside: Sequence[PlannedTask], memory_bytes: int) -> bool:
    """Whether every slab of a task finds a place, although memory is kept for the largest unit of all."""
    return planned.largest_slab_bytes <= memory_bytes - max(each.work_bytes for each in beside)


def check_arena(planned: Sequence[PlannedTask], memory_bytes: int) -> None:
    """Refuse tasks of which one's slab and another one's work do not fit a device together."""
    for each in planned:
        if not fits_arena(each, planned, memory_bytes):
            other = max(planned, key=lambda task: task.work_bytes)
            by_size = other.task.max_device_batch is not None
            change, option = ("lower", "max_device_batch") if by_size else ("raise", "accumulation_steps")
            raise ShardDoesNotFit(
                f"{each.name}: its largest shard has {_size(each.largest_slab_bytes)} of parameters, and units of "
                f"{other.name} take {_size(other.work_bytes)} beside theirs, together at most: {_size(memory_bytes)}; "
                f"cut {each.name} smaller, {change} {other.name}'s {option}, train them in two calls, or use a device "
                f"with more memory"
            )
