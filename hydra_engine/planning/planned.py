"""A task between its plan and its run: what was chosen for it, its memory, its reader; what tasks must not share."""

from __future__ import annotations

import math
import sys
import threading
import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hydra_engine.capture import Uncut
from hydra_engine.checkpoints import SavedTask
from hydra_engine.data import ALIGNMENT_BYTES, Beginning, Reader, Stream, UserDraws, capture, installed
from hydra_engine.devices import Ceilings, DeviceSpec
from hydra_engine.errors import HostOutOfMemory, PauseTask, StopTask
from hydra_engine.host import (
    BestWeights,
    BorrowedPool,
    FrozenBlocks,
    HostPool,
    ModelLayout,
    Shard,
    TaskState,
    Wanted,
    has_hooks,
    kept_pools,
    layout_of,
)
from hydra_engine.planning.adoption import Rehearsals
from hydra_engine.planning.costs import DeviceCost, TaskCost
from hydra_engine.planning.cuts import CutChoice, Kept, PredictedCut, kept_within
from hydra_engine.planning.simulate import predict_spreads
from hydra_engine.planning.trial import trial_state_bytes, update_bytes_per_s
from hydra_engine.schedule import FORWARD, MOST_AHEAD, Spread, part_ranges
from hydra_engine.system import dram
from hydra_engine.tasks import (
    FINISHED,
    BatchChooser,
    GuidedLoader,
    ModelTask,
    Purpose,
    TaskReport,
    chooses,
    plain_attributes,
)
from partitioners import STATED_RATES, Budget, Rates, format_bytes
from partitioners.profile import names, noted

# What a unit costs beside its kernels and copies: measured by benchmarks/overhead.
UNIT_S = 450e-6

# Of the DRAM that is free as an adaptive task begins, the share that batches larger than its first one may take.
STAGING_SHARE = 0.5

# Of the rate of a GPU's memory, what an update reaches there.
UPDATE_SHARE = 0.75

FIRST_READ = "as the first batch of its loader was read"

_DECIDING = threading.Lock()  # held while decisions of a task are replaced


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
            planned.shared.frozen.forget(planned.layout)
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
            total += sum(each.here_bytes for each in {each.shared.frozen for each in tasks})
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
            f"{', '.join(each.name for each in planned)}: {size_of(own)} of DRAM for weights, gradients, optimizer "
            f"state and a step, with other tasks {size_of(held)}, limit: dram={size_of(limit)}; raise dram, train "
            f"fewer tasks at once, forget those that are over (forget_task), freeze layers, or choose an optimizer "
            f"with less state (SGD)"
        )


@dataclass(frozen=True, kw_only=True)
class TaskContext:
    """What the tasks of an orchestrator share as they are planned."""

    alignment_bytes: int = ALIGNMENT_BYTES  # that every parameter's place is a multiple of, on all of the devices
    max_devices: int = 1  # that batches are split for, with `max_device_batch`
    frozen: FrozenBlocks = field(default_factory=FrozenBlocks)
    limit: DramLimit = field(default_factory=DramLimit)
    rehearsals: Rehearsals = field(default_factory=Rehearsals)


@dataclass(frozen=True, kw_only=True)
class Decisions:
    """What was chosen for a task by its plan, or since then; `TaskPlan` is what its user is shown of it."""

    spreading: Spreading = field(default_factory=Spreading)
    num_devices: int = 1  # that its spreading was predicted for
    num_micro_batches: int = 1  # of a step, as far as is known
    speedups: tuple[float, ...] = ()  # of a task whose batches are chosen, on 1, 2, ... devices, as predicted
    choice: CutChoice | None = None  # of its cut, where that was chosen by predictions
    predicted: PredictedCut | None = None
    no_homes_because: str = ""  # why its layers have no homes on devices, where some were asked for
    adopted: str | None = None  # the kind whose plan it has taken over


class CallbackCalls:
    """What a task's callbacks change and draw, and those of its first epoch, which is begun for the plan."""

    def __init__(self, task: ModelTask, report: TaskReport) -> None:
        source = task.model.__dict__["source"]
        self.draws = UserDraws(report.name)
        self.roots = (task.model if source is None else source, task.loss_fn)
        self.attributes = plain_attributes(*self.roots) if task.callbacks else {}  # as the program has made them
        self.stop: StopTask | PauseTask | None = None  # what one raised before the task is begun
        self._task, self._report = task, report

    def begin_epoch(self, epoch: int, stream: Stream) -> None:
        """Call callbacks for an epoch whose first batch is the sample, unless one has ended the task."""
        if self.stop is not None:
            return
        try:
            with self.draws.drawing(stream, "on_epoch_begin", is_call=True):
                for callback in self._task.callbacks:
                    callback.on_epoch_begin(self._report, epoch)
        except (StopTask, PauseTask) as stop:
            self.stop = stop


class PlannedTask:
    """A task that is ready to train: what was chosen for it, its state, and its reader with the sample in it."""

    def __init__(
        self,
        task: ModelTask,
        name: str,
        shared: TaskContext | None = None,
        *,
        keeps_positions: bool = False,
        start: SavedTask | Beginning | None = None,
    ) -> None:
        """keeps_positions: the reader says where the task stands.

        start: what it goes on from, with its weights put back, or where it begins again. A saved task keeps the devices
        that batches are split for, and with them its bits.
        """
        self.task, self.name, self._start = task, name, start
        self.shared = shared = TaskContext() if shared is None else shared
        self.report = TaskReport(name=name, seed=task.seed, hparams=dict(task.hparams))
        if (saved := self.saved) is not None:
            self.report = saved.report(task, goes_on=True)
        self.is_paused = False  # it is saved and at rest: another one of its name may go on from there
        self.pause_wanted = False  # once it has joined others
        self.has_left = False  # its memory is given back: it is trained, or will not be
        self.calls = CallbackCalls(task, self.report)
        trained = frozenset(id(each) for each in task.model.parameters() if each.requires_grad)
        if saved is not None:
            saved.put_callbacks(task.callbacks, *self.calls.roots)
        # About what they drew, weights that lose what they learn, and settings that do not count.
        self.doubts: list[str] = [] if saved is None else [*saved.messages]
        max_devices = shared.max_devices if saved is None or saved.max_devices is None else saved.max_devices
        self.reader = Reader(
            task,
            name,
            chooser=self._made_chooser(),
            keeps_positions=keeps_positions,
            start=None if start is None else start.position,
            begin_epoch=self.calls.begin_epoch,
            max_devices=max_devices,
        )
        with noting(name, "as its model was looked at"):
            task.model.check_hooks()
        self.uncut: Uncut | None = None  # why its own forward is one layer, if it could not be cut
        if task.model.is_pending or task.model.is_outdated:
            # By the first batch, which the reader keeps for the first step.
            with noting(name, "as its model was made into layers by its first batch"):
                trains = task.purpose is Purpose.TRAIN
                with noting(name, FIRST_READ):
                    inputs = self.reader.sample_inputs
                self.uncut = task.model.convert(inputs, evaluates=not trains, may_be_one=True)
        if task.model.kept_message:
            self.doubts.append(f"{name}: {task.model.kept_message}")
        self.tell_one_layer()
        layout = layout_of(task, shared.alignment_bytes, trained)
        if task.moments != "float32":
            self.doubts.append(
                f"{name}: moments={task.moments!r} rounds at each step: its results are not plain PyTorch's"
            )
        narrow = sum(slot.dtype == torch.bfloat16 for slot in layout.trainable_slots())
        if narrow and task.purpose is Purpose.TRAIN:
            self.doubts.append(
                f"{name}: {narrow} of its parameters are trained in bfloat16, which loses updates under 1/256 of a "
                f"weight; model.float() with precision='bfloat16' computes as narrow and keeps them"
            )
        self._take(layout, max_devices)
        self.decisions = Decisions()

    def _made_chooser(self) -> BatchChooser | None:
        task = self.task
        if task.purpose is Purpose.TRAIN and task.adapts != chooses(task.dataloader):
            raise ValueError(
                f"{self.name}: its loader began, or ceased, to have batches chosen once the task was made, which fixed "
                f"its plan; call autoscale_batch_size() and the like before ModelTask(...)"
            )
        if not (task.adapts and isinstance(task.dataloader, GuidedLoader)):
            return None
        try:
            chooser = task.dataloader.chooser()
            if self.saved is not None:
                self.saved.put_chooser(chooser)
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from error
        return chooser

    def _take(self, layout: ModelLayout, max_devices: int) -> None:
        """Make the state of a task with this layout, and tell the reader."""
        task, frozen = self.task, self.shared.frozen
        frozen.plan(layout)
        own_pool = HostPool if task.purpose is Purpose.TRAIN else BorrowedPool
        pool = own_pool(layout, early_release=task.early_release, frozen=frozen)
        self.state = state = TaskState(task, self.name, layout, pool, max_devices)
        self.reader.num_micro_batches = lambda: state.cut.num_micro_batches
        self.estimate = Estimate(state)

    def lay_out_again(self) -> None:
        """Begin anew with other layers, of the same parameters."""
        before = self.state
        self.shared.frozen.forget(self.layout)
        trained = frozenset(id(slot.parameter) for slot in self.layout.trainable_slots())
        self._take(layout_of(self.task, self.shared.alignment_bytes, trained), before.max_devices or 1)
        self.state.measured.state_bytes, self.state.pool.splits = before.measured.state_bytes, before.pool.splits

    def tell_one_layer(self) -> None:
        """Say once that its model is one layer, if it is, and why."""
        text = f"{self.name}: {self.task.model.one_layer_because}"
        if self.task.model.one_layer_because and text not in self.doubts:
            self.doubts.append(text)

    @property
    def saved(self) -> SavedTask | None:
        """What it goes on from, if it was saved."""
        return self._start if isinstance(self._start, SavedTask) else None

    @property
    def layout(self) -> ModelLayout:
        """The places of its parameters."""
        return self.state.layout

    @property
    def chooser(self) -> BatchChooser | None:
        """Its chooser of batch sizes, if they are chosen."""
        return self.reader.chooser

    def decide(self, **changes: Any) -> None:
        """Replace some of what was chosen for it. From any thread."""
        with _DECIDING:
            self.decisions = replace(self.decisions, **changes)

    @property
    def beginning(self) -> Beginning:
        """Where it began. To be asked once it is at rest."""
        if isinstance(self._start, Beginning):
            return self._start
        return Beginning(self.report.seed, None if self.saved is not None else self.reader.beginning)

    @property
    def drawn(self) -> set[str]:
        """Which of `random` and `numpy.random` its loader and its layers were seen to draw from."""
        return self.reader.drawn | ({"`random`", "`numpy.random`"} if self.state.cut.locked else set())

    @property
    def spreads(self) -> tuple[Spread, ...]:
        """How a step is spread over 1, 2, ... devices; where batches are chosen, over as many as it is known for."""
        spreads = self.decisions.spreading.spreads
        if self.chooser is None:
            return spreads
        known = self.decisions.speedups or (1.0,)
        told = [spread._replace(speedup=speedup) for spread, speedup in zip(spreads, known, strict=False)]
        return (*told, *spreads[len(told) : self.task.min_devices])

    def spread_over(self, devices: Sequence[DeviceSpec], num_micro_batches: int) -> None:
        """Predict how a step of so many micro-batches is best spread over 1, 2, ... of these devices."""
        if self.chooser is not None:  # it has as many micro-batches as it has devices
            num_micro_batches = max(num_micro_batches, len(devices))
            self.decide(speedups=self.chooser.speedups(len(devices)))  # of a task that goes on
        self.decide(spreading=Spreading(), num_micro_batches=num_micro_batches, num_devices=len(devices))
        pool = self.state.pool
        beside_bytes = 0 if pool.is_open else self.training_bytes - pool.kept_bytes
        limit = self.shared.limit
        self.decide(spreading=self.estimate.spreading(devices, num_micro_batches, beside_bytes, limit))

    def can_be_wider(self, num_devices: int) -> bool:
        """Return True if its steps may be spread over so many devices, and it is not known yet how."""
        most = num_devices if self.chooser is not None else min(self.decisions.num_micro_batches, num_devices)
        return self.task.purpose is Purpose.TRAIN and most > self.decisions.num_devices

    def wider(self, devices: Sequence[DeviceSpec]) -> Spreading:
        """Predict how a step is best spread over these devices, of which there are more than before."""
        number = self.decisions.num_micro_batches
        number = number if self.chooser is None else max(number, len(devices))
        self.decide(num_micro_batches=number, num_devices=len(devices))
        return self.estimate.spreading(devices, number, 0, self.shared.limit)

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
        return self.shared.frozen.doubled_bytes(self.layout)

    @property
    def dram(self) -> dict[str, int]:
        """Bytes of DRAM by what they hold; before the task is cut, without what depends on shards.

        What tasks share is counted once, with the first of them. The optimizer's state is an estimate from a trial
        step, exact for state that is laid out as the parameters.
        """
        layout, state = self.layout, self.state
        frozen, cast = self.shared.frozen.brought(layout)
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
            "parts": self.decisions.spreading.parts_bytes,
        }

    @property
    def training_bytes(self) -> int:
        """DRAM that training takes beside the weights, which are there already."""
        return sum(num_bytes for part, num_bytes in self.dram.items() if part != "weights")

    def most_samples(self, num_samples: int) -> int:
        """Samples of a batch for which DRAM has room; `num_samples`: of the first one, which was counted."""
        sample_bytes = self.state.measured.staging_bytes / num_samples
        room = min(dram.available_dram_bytes() * STAGING_SHARE, self.shared.limit.left_bytes)
        return num_samples + int(max(0, min(room, 2**62)) / max(1.0, sample_bytes))

    def num_steps(self) -> int | None:
        """Return the steps of the whole task; None: its loader does not say."""
        try:
            return len(self.task.dataloader) * self.task.epochs  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):  # an iterable without a length ends when it ends
            return None

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
        self.shared.limit.leave(self)


def size_of(num_bytes: int) -> str:
    return f"{format_bytes(num_bytes)} ({num_bytes} bytes)"


@contextmanager
def noting(name: str, when: str) -> Iterator[None]:
    """Note when it came on an error that names no task, as those of user code."""
    try:
        yield
    except Exception as error:
        if not names(error, name):
            noted(error, f"task {name}, {when}")
        raise


def known_steps(steps: Sequence[int | None]) -> list[int]:
    """Return steps of tasks; of one whose loader does not say, as many as of the longest."""
    most = max((each for each in steps if each is not None), default=1)
    return [max(1, most if number is None else number) for number in steps]


def check_dram(planned: list[PlannedTask]) -> None:
    """Refuse tasks whose gradients and optimizer states do not fit beside the weights, which are in DRAM already."""
    for each in planned:
        # Before anything large is touched. The factory is user code, and what it draws is none of the run's.
        with noting(each.name, "as a step of its optimizer was tried"), installed(Stream(capture())):
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
            f"{', '.join(each.name for each in planned)}: training needs {size_of(needed)} of DRAM for gradients and "
            f"optimizer state, available: {size_of(available)}; train fewer tasks at once, freeze layers, choose an "
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


def choose_kept(state: TaskState, memory_bytes: int, link_bytes_per_s: float, at_home: Collection[int] = ()) -> Kept:
    """Which graphs are worth keeping on a device beside these shards' homes, and what a step then takes."""
    shards, unit_s = state.cut.shards, state.measured.unit_s
    slabs = [shard.slab_bytes - (shard.own_bytes if shard.index in at_home else 0) for shard in shards]
    forward_s = [unit_s.get((FORWARD, shard.index), 0.0) for shard in shards]
    graphs = [_graph_bytes(state, shard) if state.may_keep_graph(shard) else None for shard in shards]
    free = memory_bytes - max(slabs[shard.index] + state.work_bytes(shard) for shard in shards) - max(slabs)
    free -= sum(state.home_bytes(shards[j]) for j in at_home)
    lowest, compute_s = state.cut.lowest_backward, _compute_s(state)
    return kept_within(slabs, graphs, forward_s, lowest, compute_s, free, link_bytes_per_s)


def least_step_s(state: TaskState) -> float:
    """Seconds of a step on a device of any memory: no forward is run twice that need not be, and nothing loaded."""
    kept = filter(state.may_keep_graph, state.cut.shards)
    return _compute_s(state) - sum(state.measured.unit_s.get((FORWARD, shard.index), 0.0) for shard in kept)


def _compute_s(state: TaskState) -> float:
    return sum(state.measured.unit_s.get(node, 0.0) for node in state.cut.chains[True])


def kept_bytes(state: TaskState, shard: Shard) -> int:
    """Bytes of a shard's graphs for a step; 0 where they are not kept."""
    is_kept = shard.index >= state.cut.keeps_from and state.may_keep_graph(shard)
    return (_graph_bytes(state, shard) or 0) if is_kept else 0


def _graph_bytes(state: TaskState, shard: Shard) -> int | None:
    """The most that it was seen to take."""
    known = list(state.measured.graph_bytes.items())  # a lane may add to them meanwhile
    return max((num_bytes for (j, _), num_bytes in known if j == shard.index), default=None)


def check_sharing(planned: Sequence[PlannedTask]) -> None:
    """Refuse tasks that train one parameter, or read through one random generator.

    The model of a task that is over is free. So is its loader, if it was read to its end: else a read may be under way.
    """
    trained: dict[int, str] = {}
    read: dict[int, str] = {}
    for each in planned:
        for slot in () if each.has_left else each.layout.trainable_slots():
            other = trained.setdefault(slot.parameter.data_ptr() or id(slot.parameter), each.name)
            if other != each.name:
                raise ValueError(
                    f"tasks {other} and {each.name} share the trainable parameter {slot.name}; freeze it in both, or "
                    f"give each task its own copy (of adapters: by hydra_engine.integrations.huggingface.adapters)"
                )
        loaders = () if each.has_read_all else (each.task.dataloader, each.task.validation)
        moved = [held for loader in loaders for held in _moved_by_reading(loader)]
        for owner in [read.setdefault(id(held), each.name) for held in moved]:
            if owner != each.name:
                raise ValueError(
                    f"tasks {owner} and {each.name} read through one generator, or one loader that keeps its place or "
                    f"its workers, so each would change what the other reads; give each task a loader of its own"
                )


def check_nothing_shared(planned: PlannedTask, others: Sequence[PlannedTask]) -> None:
    """Refuse a task that would join others which train weights that it has, or read frozen those that it trains."""
    holders = {id(slot.parameter): (other, slot) for other in others for slot in other.layout.slots}
    for slot in planned.layout.slots:
        other, theirs = holders.get(id(slot.parameter), (planned, slot))
        if other is not planned and (slot.trainable or theirs.trainable):
            mover = other.name if theirs.trainable else planned.name
            raise ValueError(
                f"tasks {other.name} and {planned.name} share the parameter {theirs.name}, which moves while {mover} "
                f"trains; add the task from the other's on_task_end or later, or give it a copy of its own"
            )


def check_shared_buffers(planned: Sequence[PlannedTask]) -> None:
    """Refuse tasks that share a buffer which one of them changes in training."""
    holders: dict[int, list[PlannedTask]] = {}
    for each in planned:
        for buffer in each.layout.buffers:
            holders.setdefault(id(buffer), []).append(each)
    for each in planned:
        for index in each.state.observed.changed_buffers:
            other = next((o for o in holders[id(each.layout.buffers[index])] if o is not each), None)
            if other is not None:
                raise ValueError(
                    f"tasks {each.name} and {other.name} share a module whose buffers change in training (BatchNorm, "
                    f"say), so their results would depend on one another; give each task its own, or put it in eval()"
                )


def check_apart(what: str, loader: object, planned: Sequence[PlannedTask]) -> None:
    """Refuse a loader whose reading would change what tasks read that have yet to train; `what` would read it."""
    moved = {id(held) for held in _moved_by_reading(loader)}
    for each in planned:
        for own in (each.task.dataloader, each.task.validation):
            if any(id(held) in moved for held in _moved_by_reading(own)):
                raise ValueError(
                    f"{what}: the loader shares its place, its generator or its persistent workers with a loader of "
                    f"task {each.name}, which has yet to train and would then read other batches; give {what} a loader "
                    f"of its own"
                )


def _moved_by_reading(loader: object) -> Iterator[object]:
    """What a reading of a loader leaves otherwise than it found it, as far as one can see from outside."""
    for holder in (loader, getattr(loader, "sampler", None)):
        if (generator := getattr(holder, "generator", None)) is not None:
            yield generator
    if getattr(loader, "persistent_workers", False) or isinstance(loader, (GuidedLoader, Iterator)):
        yield loader
