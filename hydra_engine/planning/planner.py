"""Plans a task: profiles its layers, cuts them into shards, rehearses a step on a device, sees that all of it fits."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import nn

from hydra_engine.capture import UsesNotCarried
from hydra_engine.data import Batch, Stream, capture, installed
from hydra_engine.devices import STATED, DeviceSpec
from hydra_engine.errors import DeviceFailed, DeviceLost, ShardDoesNotFit
from hydra_engine.host import (
    LayerFault,
    Structure,
    has_hooks,
    kernel_refused,
    make_optimizer,
    no_home_because,
    share_out,
)
from hydra_engine.planning.adoption import Rehearsed, kind_of
from hydra_engine.planning.costs import DeviceCost, HostCost, TaskCost
from hydra_engine.planning.cuts import CutChoice, RunAtHand, Way, WholeRun
from hydra_engine.planning.planned import (
    FIRST_READ,
    UNIT_S,
    Estimate,
    PlannedTask,
    choose_kept,
    kept_bytes,
    known_steps,
    least_step_s,
    noting,
    size_of,
)
from hydra_engine.planning.rehearsal import REMEDY, Opened, TooLarge, own_device, rehearse
from hydra_engine.planning.same_model import check_converted, plain_error
from hydra_engine.system import HostThreads, dram
from hydra_engine.tasks import ModelTask, Purpose, TaskPlan
from partitioners import Budget, LayerCost, LayerTooLarge, profile, profile_evaluation, shard_bytes, slab_bytes
from partitioners.boundary import UnfitTensor
from partitioners.cost import skips_of
from partitioners.plain_numbers import plain
from partitioners.profile import noted, spanned

# More micro-batches than memory asks for, under "auto", are for a step that is predicted to be so many times shorter:
# predictions from one rehearsal are no better than that.
LEAST_GAIN = 1.05

# Batches larger than the sample by so much find room on a device whose slabs have an arena.
WORK_HEADROOM = 1.25
# Homes stay: they leave more.
HOMES_HEADROOM = 1.5


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


def make_plan(planned: PlannedTask, target: Target) -> TaskPlan:
    """Profile, cut, rehearse. Changes nothing of the task; the loader is read once, however often it is planned.

    Raises ShardDoesNotFit where the task does not fit, or not in the way that was chosen for all tasks together.
    """
    planned.estimate = Estimate(planned.state)
    with noting(planned.name, "as its plan was made"):  # an error of a partitioner, say
        try:
            plan = _made_plan(planned, target)
        except LayerFault as error:
            raise ValueError(f"{planned.name}: {error}") from error
    message = planned.task.model.eval_message if planned.task.purpose is Purpose.TRAIN else ""
    if message and (text := f"{planned.name}: {message}") not in planned.doubts:
        planned.doubts.append(text)
        warnings.warn(text, stacklevel=2)
    return replace(plan, eval_message=message)


def least_bytes(planned: PlannedTask, device: DeviceSpec) -> LeastBytes:
    """Return the least memory of a device on which a task runs, counted without a rehearsal."""
    return Planner(planned, Target(device=device, budget=Budget(memory_bytes=2**62), num_threads=1)).least_bytes()


def _made_plan(planned: PlannedTask, target: Target) -> TaskPlan:
    """Plan a task with its layers, or as one layer where they fail on what a plain loop does."""
    planner, model, name = Planner(planned, target), planned.task.model, f"task {planned.name}"
    try:
        return planner.plan()
    except Exception as error:
        has_remedy = isinstance(error, (LayerFault, UsesNotCarried)) or str(error).startswith(f"{planned.name}:")
        is_whole = planned.uncut is not None and planned.uncut.__cause__ is None
        uncut = None if isinstance(error, UsesNotCarried) or not is_whole else planned.uncut
        if uncut is not None and (has_remedy or isinstance(error, (LayerTooLarge, ShardDoesNotFit))):
            raise noted(uncut, f"{name}: as one layer, {error}") from error
        is_of_layers = error is planner.fault and not isinstance(error, (DeviceLost, DeviceFailed, MemoryError))
        if not is_of_layers or (has_remedy and not model.is_converted) or not _may_try_plain(planned.task):
            raise
        raised = _plain_error(planned)
        if raised is None and model.is_converted and (plan := _plan_as_one_layer(planned, target, error)) is not None:
            return plan
        if raised is None and uncut is not None:
            raise noted(uncut, f"{name}: as one layer, {type(error).__name__}: {error}") from error
        if not has_remedy:
            noted(error, f"{name}: a plain {_beside_plain(planned, error, raised)}")
        if model.one_layer_because:
            for note in getattr(planned.uncut and planned.uncut.__cause__, "__notes__", ()):
                noted(error, note)
            noted(error, f"{name}: {model.one_layer_because}")
        raise


def _may_try_plain(task: ModelTask) -> bool:
    """Return True if the model has values, and DRAM has room for another copy of them."""
    tensors = [*task.model.parameters(), *task.model.buffers()]
    needed = 2 * sum(each.nbytes for each in tensors)
    has_values = not any(each.is_meta for each in tensors)
    return task.purpose is not Purpose.PREDICT and has_values and needed < dram.available_dram_bytes()


def _plain_error(planned: PlannedTask) -> Exception | None:
    """Return what a plain step on the first batch raises, and a validation where there is one; None: nothing."""
    task, trains = planned.task, planned.task.purpose is Purpose.TRAIN
    for training in (True, False) if trains and task.validation is not None else (trains,):
        inputs, target = (each.value() for each in planned.reader.sample(training=training).whole)
        loss_fns = [task.loss_fn, *(() if training else task.metrics.values())]
        error = plain_error(task.model.as_plain, loss_fns, inputs, target, training=training)
        if error is not None:
            return error
    return None


def _plan_as_one_layer(planned: PlannedTask, target: Target, error: Exception) -> TaskPlan | None:
    """Plan a task as one layer, since its layers failed; None: so does that."""
    model, kind = planned.task.model, type(planned.task.model.source).__name__
    first_line = (str(error).strip() or type(error).__name__).splitlines()[0].removeprefix(f"{planned.name}: ")
    undo = model.become_one_layer(
        f"the model ({kind}) is one layer, which has to fit a device; cut into layers, it fails on what a plain "
        f"loop does: {first_line}"
    )
    planned.lay_out_again()
    try:
        plan = Planner(planned, target).plan()
    except Exception as other:
        undo()
        planned.lay_out_again()
        if isinstance(other, (LayerTooLarge, ShardDoesNotFit)):
            noted(error, f"task {planned.name}: as one layer it does not fit: {other}")
        return None
    planned.tell_one_layer()
    return plan


def _beside_plain(planned: PlannedTask, error: Exception, raised: Exception | None) -> str:
    """Say what a plain step does where an error came here, and what differs, with a remedy; `raised`: by it."""
    plain = "loss_fn(model(inputs), target) on its first batch"
    if raised is not None:
        same = "the same" if str(raised) == str(error) else f"{type(raised).__name__}: {raised}"
        return " ".join([f"{plain} shows {same}", *getattr(raised, "__notes__", ())])
    task, ways = planned.task, []
    number = len(planned.reader.sample(training=task.purpose is Purpose.TRAIN).micro_batches)
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
        rehearsals = self._planned.shared.rehearsals
        num_samples = self._sample().num_samples
        state.place, state.homes.has_ieee_roots = device.torch_device, device.has_ieee_roots
        kind = kind_of(state, self._beside)
        found = rehearsals.get(kind)
        self._planned.decide(adopted=None)
        if found is not None and self._adopt(found):
            self._planned.decide(adopted=kind)
            return replace(_as_plan(self._planned), adopted_from=None if found.task == state.name else found.task)
        if state.place.type != "cpu":
            self._estimate.rates(device)  # layers are not timed there, but counted against them
        for training in (True, False) if self._validates else (self._trains,):
            if task.model.is_converted:
                mode = "train()" if training else "eval()"
                with self._noting_fault(), noting(self._planned.name, f"as its own forward was tried in {mode}"):
                    inputs = self._planned.reader.sample_inputs
                    check_converted(task.model, inputs, num_samples, training=training)
        is_auto = task.accumulation_steps == "auto"
        is_open = is_auto and saved is None
        number = self._number(1)
        if is_auto and saved is not None:
            number = saved.accumulation_steps  # with others, its losses would differ from those before
        # By times, not bytes alone: where it says so, or where its candidates are chosen from by predictions.
        if getattr(task.partitioner, "weighs_times", False) or hasattr(task.partitioner, "candidates"):
            self._target = replace(self._target, budget=self._estimate.budget(self._target.budget, device))
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
                    raise ShardDoesNotFit(f"{self._planned.name}: {_remedied(task, error)}") from error
                number *= 2
                if is_chosen:
                    self._planned.reader.split_sample(min(number, num_samples))
        step_s = self.decide()
        if is_open and self._trains and together is None:
            self._raise_number(step_s)
        chosen = self._planned.decisions
        rehearsals.put(kind, Rehearsed.of(state, self._estimate.input_bytes, chosen.choice, chosen.predicted))
        return _as_plan(self._planned)

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
        """As the function of this name: with shards as fine as the partitioner makes them, or the user's fixed ones."""
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
            *(_leaves_homes_open(self._planned, target), _asked_homes(self._planned)),
            *((target.share, None if saved is None else saved.accumulation_steps) if is_auto else ()),
            *(each.fingerprint for batch in batches for each in batch.whole),
            *((len(batch.micro_batches) for batch in batches) if self._task.adapts else ()),
        )

    def _adopt(self, found: Rehearsed) -> bool:
        """Cut the task as one of the same structure was cut; False where others leave no room for that."""
        planned, target = self._planned, self._target
        found.put_into(self.state)
        self._estimate.input_bytes = list(found.input_bytes)
        planned.decide(choice=found.choice, predicted=found.predicted)
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
            at_home, *_ = _run_at_hand(self._planned, self._target).at_home(self._planned.wanted_homes)
            keeps_from, step_s = choose_kept(self.state, device.memory_bytes, rate, at_home)
            self.state.cut = replace(self.state.cut, keeps_from=keeps_from)
            number = len(self._sample().micro_batches)
        self._planned.spread_over(self._target.spread_devices, number)
        spreads = self._planned.decisions.spreading.spreads
        return step_s / max(spread.speedup for spread in spreads[: self._target.share])

    def _decide_homes(self) -> None:
        """Decide how many of the lowest layers are to have their homes on devices: by its option, or with its cut."""
        number, predicted = _asked_homes(self._planned), self._planned.decisions.predicted
        if self._task.homes == "auto" and predicted is not None:
            number = predicted.homes
        against = _against_homes(self._planned, self._target) if number and self._trains else ""
        self._planned.decide(no_homes_because=against)
        self.state.homes.num_layers = number if self._trains and not against else 0

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

    def _read(self, *, training: bool) -> Batch:
        with noting(self._planned.name, FIRST_READ):
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
                    finer = _with_smaller_slabs(self._planned, boundaries, costs)
                if finer is None:
                    choice, found = self._planned.decisions.choice, self._planned.decisions.predicted
                    if choice is not None and boundaries != chosen:
                        homes = _asked_homes(self._planned) or (0 if found is None else found.homes)
                        self._planned.decide(predicted=choice.predicted(boundaries, homes))
                    return
            except TooLarge as error:
                if refused is not None:
                    raise refused from error
                finer = self._task.partitioner.revise(boundaries, error.shard, costs)
                if finer is None and self._target.device.has_arena:  # another shard's slab takes the room
                    finer = _with_smaller_slabs(self._planned, boundaries, costs)
                if finer is None:
                    shard = self.state.cut.shards[error.shard]
                    needed = shard_bytes(costs, shard.first, shard.last, budget.num_micro_batches)
                    needed = max(needed, error.needed_bytes)  # as far as it came
                    layers = spanned([cost.name for cost in costs[shard.first : shard.last]])
                    raise ShardDoesNotFit(
                        f"shard {error.shard} ({layers}) needs {size_of(needed)} on a device, "
                        f"available: {size_of(budget.memory_bytes)}; cut it smaller (Pilot does), "
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

    def _partition(self, costs: list[LayerCost], budget: Budget) -> tuple[list[int], LayerTooLarge | None]:
        """The partitioner's boundaries, and why it refuses the model, if it does.

        Then it is tried all the same, one layer per shard: a lone layer's bytes are exact for one micro-batch in almost
        all layers, but an upper bound in the others, and for several micro-batches.
        """
        partitioner, number = self._task.partitioner, len(costs)
        planned = self._planned
        planned.decide(choice=None, predicted=None)
        try:
            if not (self._trains and hasattr(partitioner, "candidates")):
                return partitioner.partition(costs, budget), None
            may_choose, asked = _may_choose_homes(planned, self._target), _asked_homes(planned)
            asked = asked if asked and not _against_homes(planned, self._target) else 0
            with_homes = may_choose or asked > 0
            if with_homes:
                costs, budget = in_round_figures(costs, budget)
            choice = CutChoice(
                costs=costs,
                candidates=partitioner.candidates(costs, budget),
                budget=budget,
                run=_run_at_hand(planned, self._target, with_homes=with_homes),
            )
            together, beside = self._target.together, self._target.beside
            if together is None:
                found = choice.fastest(asked)
                found = choice.with_homes(found) if may_choose else found
                if beside:
                    [num_steps, *_] = known_steps([planned.num_steps(), *(each.num_steps for each in beside)])
                    found = choice.beside(found, planned.name, num_steps, beside)
            else:
                found = choice.predicted(together.boundaries, together.homes)._replace(is_together=True)
            planned.decide(choice=choice, predicted=found)
            return list(found.boundaries), None
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


def _remedied(task: ModelTask, error: LayerTooLarge | ShardDoesNotFit) -> str:
    """What a partitioner says of a lone layer; an evaluation has no micro-batches to make smaller."""
    if task.max_device_batch is not None:
        return str(error).replace("raise accumulation_steps", "lower max_device_batch")
    if task.purpose is Purpose.TRAIN or not isinstance(error, LayerTooLarge):
        return str(error)
    return (
        f"{error.layer} needs {size_of(error.needed_bytes)} alone on a device, available: "
        f"{size_of(error.available_bytes)}; give smaller batches, or use a device with more memory"
    )


def _with_smaller_slabs(planned: PlannedTask, boundaries: list[int], costs: list[LayerCost]) -> list[int] | None:
    """Finer boundaries that cut the largest slab; None where a lone layer has it, or the user cut so."""
    widest = max(planned.state.cut.shards, key=lambda shard: shard.slab_bytes)
    return planned.task.partitioner.revise(boundaries, widest.index, costs)


def _run_at_hand(planned: PlannedTask, target: Target, *, with_homes: bool = False) -> RunAtHand:
    """Return what a cut of the task is chosen for; with_homes: layers may be at home on devices."""
    estimate, host = planned.estimate, target.host
    device, link = target.device, estimate.rates(target.device)
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
        early_release=planned.state.pool.early_release,
        home_times=estimate.home_times() if with_homes else 0.0,
        home_update_bytes_per_s=figure(estimate.home_update_bytes_per_s()) if with_homes else math.inf,
    )


def _asked_homes(planned: PlannedTask) -> int:
    """So many of the lowest layers are to have homes on devices by the task's option; 0: it leaves that open."""
    asked = planned.task.homes
    return {"auto": 0, "host": 0, "device": planned.layout.num_layers}[asked] if isinstance(asked, str) else asked


def _leaves_homes_open(planned: PlannedTask, target: Target) -> bool:
    return planned.task.purpose is Purpose.TRAIN and planned.task.homes == target.homes == "auto"


def _may_choose_homes(planned: PlannedTask, target: Target) -> bool:
    """Return True if homes on devices may gain: an emulated one without a link of its own lies in the same DRAM."""
    has_link = planned.state.place.type != "cpu" or planned.estimate.rates(target.device).origin == STATED
    return _leaves_homes_open(planned, target) and has_link and not _against_homes(planned, target)


def _against_homes(planned: PlannedTask, target: Target) -> str:
    """Return why no layer has a home on a device; nothing, if one may."""
    task, layout = planned.task, planned.layout
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
    kinds = {device.ceilings_name: device for device in target.spread_devices}
    for device in kinds.values():
        if not against and (kernel := device.kernel()) is not None:
            against = kernel_refused(kernel, optimizer, sample, planned.state.pool, task)
    return against


def _as_plan(planned: PlannedTask) -> TaskPlan:
    state, chosen, known = planned.state, planned.decisions, planned.estimate.known
    timings = state.measured.timings.values()
    device_s = sum(timing.device_s for timing in timings)
    predicted = chosen.predicted
    return TaskPlan(
        name=planned.name,
        boundaries=list(state.cut.boundaries),
        shard_bytes=[state.shard_bytes(shard) for shard in state.cut.shards],
        dram=planned.dram,
        accumulation_steps=state.cut.num_micro_batches,
        step_s=sum(state.measured.unit_s.values()),
        speedups=[spread.speedup for spread in chosen.spreading.spreads],
        shares_cores=state.place.type == "cpu",
        launch_share=sum(timing.launch_s for timing in timings) / device_s if device_s else None,
        one_device_because=chosen.spreading.one_device_because,
        graph_bytes=[kept_bytes(state, shard) for shard in state.cut.shards],
        doubled_bytes=planned.doubled_bytes,
        ceilings="" if known is None or known.origin == STATED else known.source,
        predicted_s=None if predicted is None else predicted.step_s,
        cut_because="" if predicted is None else str(predicted),
        no_homes_because=chosen.no_homes_because,
    )


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


def way_of(planned: PlannedTask) -> Way:
    """Return how a task is to be trained as it is planned now."""
    cut = planned.state.cut
    return Way(tuple(cut.boundaries), cut.num_micro_batches, planned.state.homes.num_layers)


def predicted_cost(planned: PlannedTask) -> TaskCost | None:
    """Return what a step was predicted to take, for other tasks' plans; None: its cut was not chosen by predictions."""
    choice, homes = planned.decisions.choice, planned.state.homes.num_layers
    return None if choice is None else _of_task(planned, choice.cost(planned.state.cut.boundaries, homes=homes))


def _rehearsed_cost(planned: PlannedTask) -> TaskCost:
    return _of_task(planned, planned.estimate.cost(planned.decisions.num_micro_batches))


def options_of(planned: PlannedTask) -> list[tuple[Way, TaskCost]]:
    """Return the ways in which a task may be trained, and what each takes in a simulation; the first is as it is now.

    These are its other cuts, and the likeliest ones of other numbers of micro-batches, where these are left open.
    """
    own, choice = way_of(planned), planned.decisions.choice
    if choice is None:
        return [(own, _rehearsed_cost(planned))]
    cuts = [own.boundaries]
    if not planned.task.adapts:  # what was chosen for its batches stays with its cut
        cuts += [ends for ends in map(tuple, choice.candidates) if ends != own.boundaries]
    found = [(own._replace(boundaries=ends), choice.cost(ends, homes=own.homes)) for ends in cuts]
    for number in _numbers(planned, choice.run.num_devices):
        found += [(Way(ends, number), cost) for ends, cost in choice.in_micro_batches(number).likeliest()]
    return [(way, _of_task(planned, cost)) for way, cost in found]


def _of_task(planned: PlannedTask, cost: TaskCost) -> TaskCost:
    """Return a step's cost as a task's; with one micro-batch where its steps are not spread whatever happens."""
    task, spreads = planned.task, not planned.state.observed.runs_backward
    number = cost.num_micro_batches if spreads and not task.adapts else 1
    return replace(cost, name=planned.name, num_micro_batches=number, priority=task.priority, weight=task.weight)


def _numbers(planned: PlannedTask, num_devices: int) -> list[int]:
    """Return larger numbers of micro-batches, for steps that are spread over more devices."""
    task, state = planned.task, planned.state
    is_open = task.accumulation_steps == "auto" and planned.saved is None
    if not is_open or task.early_release or task.adapts:
        return []
    if state.observed.runs_backward or state.observed.draws_outside_torch or state.shares_changed_buffer():
        return []
    most = min(num_devices, planned.reader.sample().num_samples, task.max_devices or num_devices)
    powers = (2**k for k in range(1, most.bit_length()))
    return sorted({number for number in (*powers, most) if number > state.cut.num_micro_batches})


def ways_together(planned: Sequence[PlannedTask]) -> dict[int, Way]:
    """Return, by index of the task, the ways in which the whole run is predicted to end sooner than with their own.

    A cut of its own was chosen beside tasks that are taken to be like it. So where all are, and nothing but the cuts is
    open, there is nothing to do.
    """
    chosen = next((each.decisions.choice for each in planned if each.decisions.choice is not None), None)
    if chosen is None:
        return {}
    options = [options_of(each) for each in planned]
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
    run = next(each.decisions.choice.run for each in planned if each.decisions.choice is not None)
    steps = known_steps([each.num_steps() for each in planned])
    costs = [replace(_rehearsed_cost(each), num_steps=n) for each, n in zip(planned, steps, strict=True)]
    return WholeRun.of(run, [[cost] for cost in costs]).makespan_s([0] * len(costs))


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
                f"{each.name}: its largest shard has {size_of(each.largest_slab_bytes)} of parameters, and units of "
                f"{other.name} take {size_of(other.work_bytes)} beside theirs, together at most: "
                f"{size_of(memory_bytes)}; cut {each.name} smaller, {change} {other.name}'s {option}, train them in "
                f"two calls, or use a device with more memory"
            )
