"""The host optimizer: one optimizer object per task, stepped shard by shard from a record made at the commit.

An *update* is what a step does to a shard; `step` is only ever the name of an optimizer's own method:

    commit, end_step   make the record of a step, and move the schedule past it
    update             after the commit
    release            once the shard's backward is stored (`early_release`): before the commit, beside it or after it,
                       by its step's record
    before             copies that put an update back which raises half-way

An update of a shard that is at home on a device is the same, in that home's memory (`host/home.py`).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial, reduce
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype as group_tensors

from hydra_engine.data import copied
from hydra_engine.host.blocked import (
    MOMENTS,
    has_step_hooks,
    is_moment,
    make_states,
    moment_names,
    moments_ahead,
    new_private,
    part_of,
    step_narrow,
    step_natively,
    step_whole,
)
from hydra_engine.host.home import Home, home_bytes, home_of, kernel_refused, moment_bytes
from hydra_engine.host.hooks import call_hooks
from hydra_engine.host.layout import ModelLayout, Shard, Slot
from hydra_engine.host.loss_scale import LossScale
from hydra_engine.host.pool import HostPool
from hydra_engine.host.split import SplitMaster
from hydra_engine.host.staging import NONE, StepStaging
from hydra_engine.native import Kernel, NarrowUpdate, Rule, is_dense, native
from hydra_engine.system import Freed
from hydra_engine.tasks import (
    SCHEDULE,
    Difference,
    ModelTask,
    check_optimizer_needs_no_closure,
    differences,
    settings_of,
)


class BeforeUpdate:
    """Copies of a shard's weights, gradients, averages and optimizer state: as many bytes again, until it is let go of.

    Gradients too: clipping scales them in place, and so do some optimizers.
    """

    def __init__(
        self,
        own: MutableMapping[Any, Any],
        parameters: Mapping[int, nn.Parameter],
        others: Iterable[Tensor],
        masters: Mapping[int, SplitMaster] = NONE,
    ) -> None:
        """`own`: states by parameter. parameters: that the update may step, by slot. others: gradients and averages.

        masters: of slots that are split.
        """
        self._own = own
        split = [masters[index].split for index in parameters if index in masters]
        self._halves = [(each, each.copy()) for each in split]
        self._places = [(parameter, parameter.data) for parameter in parameters.values()]
        whole = [parameter.data for index, parameter in parameters.items() if index not in masters]
        self._tensors = [(tensor, tensor.clone()) for tensor in (*whole, *others)]
        states = [(parameter, own.get(parameter)) for parameter in parameters.values()]  # None: it has none yet
        self._states = [
            (p, None if state is None else {name: (v, copied(v)) for name, v in state.items()}) for p, state in states
        ]

    @torch.no_grad()
    def put_back(self) -> None:
        """Make everything as it was: in the same memory, which others may refer to."""
        for parameter, place in self._places:
            parameter.data = place  # which an optimizer may have put elsewhere
        for split, halves in self._halves:
            split.put_back(halves)
        for tensor, before in self._tensors:
            tensor.copy_(before)
        for parameter, state in self._states:
            if state is None:
                self._own.pop(parameter, None)
            else:
                self._own[parameter] = {name: _as_it_was(*each) for name, each in state.items()}


def _as_it_was(value: Any, before: Any) -> Any:
    if isinstance(value, Tensor) and value.shape == before.shape and value.dtype == before.dtype:
        value.copy_(before)
        return value
    return before


class Averages:
    """Keeps averages of weights (`ema_decay`), which move towards the weights with each step."""

    def __init__(self, decay: float | None, slots: Sequence[Slot]) -> None:
        self.decay = decay
        self._slots = () if decay is None else tuple(slots)
        places = new_private([slot.parameter for slot in self._slots])
        self.tensors = {slot.index: place for slot, place in zip(self._slots, places, strict=True)}

    @torch.no_grad()
    def move(self, slots: Iterable[Slot], pool: HostPool, *, is_first: bool) -> None:
        """Move the averages of these towards the weights, also of those that received no gradient."""
        if self.decay is None:
            return
        for slot in slots:
            average = self.tensors[slot.index]
            if is_first:
                pool.read(slot, into=average)
            else:
                average.lerp_(pool.read(slot), 1 - self.decay)

    def state(self) -> dict[str, Tensor]:
        """The averages by name: the tensors themselves, which the next step changes."""
        return {slot.name: self.tensors[slot.index] for slot in self._slots}

    def restore(self, saved: Mapping[str, Tensor]) -> None:
        """Take over what `state` gave."""
        for slot in self._slots:
            if slot.name not in saved:
                raise ValueError(f"ema_decay: no average of {slot.name} was saved; resume without ema_decay")
            self.tensors[slot.index] = saved[slot.name]


MomentsAhead: TypeAlias = dict[nn.Parameter, dict[str, Tensor]]

# Weights of a shard whose states are made beside its first forward: a thread costs less than their page faults.
AHEAD_BYTES = 2**24

_ADAMS = (torch.optim.Adam, torch.optim.AdamW)

# What torch itself keeps and changes on an optimizer.
TORCHS = {"state", "param_groups", "step", "defaults", "_opt_called", "_need_device_dtype_check_for_fused"}
TORCHS |= {"_warned_capturable_if_run_uncaptured", "_zero_grad_profile_name"}


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """A step as its updates need it, as of its commit: the next step and the scheduler go on meanwhile."""

    groups: list[dict[str, Any]] = field(default_factory=list)  # hyperparameters and parameters of each group
    has_gradient: dict[int, bool] = field(default_factory=dict)
    total_norm: Tensor | None = None  # of all gradients, before clipping; None: nothing clips
    is_first: bool = False
    loss_scale: float | None = None  # that the gradients carry
    is_skipped: bool = False  # a gradient was not finite: nothing is updated
    hooked: dict[int, Tensor] = field(default_factory=dict)  # by slot: a finished gradient that hooks have seen

    def received(self, slots: Iterable[Slot]) -> list[Slot]:
        return [slot for slot in slots if self.has_gradient.get(slot.index)]

    def gradient(self, slot: Slot, pool: HostPool) -> Tensor:
        """A slot's gradient, as its update begins with it."""
        return self.hooked[slot.index] if slot.index in self.hooked else pool.gradients.of(slot)


class Released(NamedTuple):
    """A step of which shards are updated with early release."""

    staging: StepStaging  # as the step has left it: the next one may begin meanwhile
    epoch: int
    num_steps: int  # before it


# Past 300 lines: there are three ways from gradients to weights; factors, norm and states of a step are in all of them.
# More than 15 attributes: those of one step are replaced together at its commit; the others never change.
class TaskOptimizer:
    """Owns a task's optimizer and scheduler. Shards of one step may be updated side by side."""

    def __init__(self, task: ModelTask, layout: ModelLayout, *, has_ieee_roots: bool = False) -> None:
        """has_ieee_roots: as of the devices that it is trained on."""
        self._task = task
        self._layout = layout
        self._rule = Rule(is_ieee=has_ieee_roots)
        self._refused: dict[str, str] = {}  # by kind of GPU
        if has_ieee_roots:
            native().wait()  # or torch would make the first updates, with other roots
        self._slots = layout.trainable_slots()
        self.factors: Sequence[float] = ()  # of its learning rates, by group; none: they are as they are
        self.optimizer = make_optimizer(task, {slot.name: slot.parameter for slot in self._slots})
        groups = kept_groups(self.optimizer)
        self.scheduler = task.lr_scheduler(self.optimizer) if task.lr_scheduler is not None else None
        self._settings = settings_of(task, self.optimizer, groups, self.scheduler)  # as the program makes them
        known = {id(slot.parameter): slot.name for slot in self._slots}
        members = [[known.get(id(p), "") for p in group["params"]] for group in self.optimizer.param_groups]
        self._settings["members"] = members
        self._is_torchs = is_torchs(self.optimizer)
        self._schedule_epoch = 0  # that the scheduler has reached
        self.num_steps = 0  # that were committed
        self._loss_scale = LossScale.of(task)
        self._releasing = threading.Lock()  # shards of a step are released side by side
        self._released: StepRecord | None = None  # of the step in progress, with early release
        self._committed = StepRecord()  # of the step before
        self._averages = Averages(task.ema_decay, self._slots)
        self._moments = MOMENTS if task.moments == "bfloat16" else None  # their dtype; None: the parameter's own
        self._freed = Freed()
        self._ahead: dict[tuple[int, ...], Future[MomentsAhead]] | None = None  # by the slots of a shard
        # Called before parameters, by slot, their averages or states change; None: any. It may wait.
        self.secure: Callable[[Iterable[int] | None], None] = lambda _: None

    @property
    def loss_scale(self) -> float | None:
        """Factor of the next step's loss; None: it has none."""
        return None if self._loss_scale is None else self._loss_scale.scale

    def commit(self, staging: StepStaging, pool: HostPool, epoch: int) -> StepRecord:
        """Record a step; one with a gradient that is not finite is skipped whole. `end_step` follows."""
        self.secure(None if self._task.optimizer_scope == "task" else ())
        if pool.early_release:
            with self._releasing:
                self._committed, self._released = self._record_released(epoch), None
                self._count_step()
            return self._committed
        self.reach_epoch(epoch)
        scale = self.loss_scale
        received = [slot for slot in self._slots if staging.has_gradient.get(slot.index)]
        if self._loss_scale is not None:
            rest = (slot for slot in received if slot.index not in staging.norms)  # which the host has added up
            is_finite = all(is_finite for _, is_finite in staging.norms.values())
            is_finite = is_finite and all(bool(pool.gradients.of(slot).isfinite().all()) for slot in rest)
            self._loss_scale.update(is_finite)
            if not is_finite:
                return replace(self.skipped(), loss_scale=scale)
        hooked = call_hooks(received, staging, pool, partial(self._finished, pool, scale, {}), self.secure)
        finished = partial(self._finished, pool, scale, hooked)
        received = [slot for slot in received if staging.has_gradient[slot.index]]
        total_norm = None
        if self._task.max_grad_norm is not None:
            others = (slot for slot in received if slot.index in hooked or slot.index not in staging.norms)
            norms = {index: norm for index, (norm, _) in staging.norms.items()}
            norms |= {slot.index: float(slot.norm(finished(slot), None)) for slot in others}
            total_norm = _total_norm(received, norms)
        if self._task.optimizer_scope == "task":
            self._update_all(pool, received, finished, total_norm)
            self._averages.move(self._slots, pool, is_first=self.num_steps == 0)
        record = StepRecord(
            groups=kept_groups(self.optimizer, self.factors),
            has_gradient=dict(staging.has_gradient),
            total_norm=total_norm,
            is_first=self.num_steps == 0,
            loss_scale=scale,
            hooked=hooked,
        )
        self._count_step()
        return record

    def skipped(self) -> StepRecord:
        """The record of a step that changes nothing, nor the loss scale."""
        return StepRecord(loss_scale=self.loss_scale, is_skipped=True)

    def _count_step(self) -> None:
        if self.num_steps:
            self.drop_ahead()
        self.num_steps += 1
        # torch's schedulers warn unless the optimizer was stepped before; ours is stepped through `update`.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]

    def end_step(self, record: StepRecord) -> None:
        """Move the scheduler past a committed step: what it raises comes after the step, as in the plain loop."""
        if not record.is_skipped:
            self._move_schedule("step")

    def _move_schedule(self, interval: str) -> None:
        if self.scheduler is not None and self._task.lr_scheduler_interval == interval:
            self.scheduler.step()

    def release(self, shard: Shard, released: Released, pool: HostPool) -> None:
        """Update a shard with early release, and give its gradients' place back. Its step may be committed already."""
        staging = released.staging
        try:
            self.secure(shard.owned)
            with self._releasing:
                is_committed = self.num_steps > released.num_steps
                record = self._committed if is_committed else self._record_released(released.epoch)
            hooked = call_hooks(pool.owned(shard), staging, pool, partial(self._finished, pool, None, {}), self.secure)
            self.update(shard, pool, replace(record, has_gradient=dict(staging.has_gradient), hooked=hooked))
        finally:
            pool.gradients.take_back(shard)

    def _record_released(self, epoch: int) -> StepRecord:
        """Return the record of the step in progress, made where its first shard is released, or at the commit."""
        self.reach_epoch(epoch)
        if self._released is None:
            self._released = StepRecord(groups=kept_groups(self.optimizer, self.factors), is_first=self.num_steps == 0)
        return self._released

    def _finished(self, pool: HostPool, scale: float | None, hooked: Mapping[int, Tensor], slot: Slot) -> Tensor:
        """A parameter's gradient as the optimizer takes it, or as hooks have left it."""
        if slot.index in hooked:
            return hooked[slot.index]
        return slot.finished(pool.gradients.of(slot), scale)

    def _update_all(
        self, pool: HostPool, slots: Sequence[Slot], finished: Callable[[Slot], Tensor], total_norm: Tensor | None
    ) -> None:
        """One step of the user's optimizer itself, which may keep what it likes wherever it likes.

        slots: that received gradients. total_norm: of these, where they are clipped.
        """
        try:
            for slot in slots:
                slot.parameter.grad = finished(slot)
            if total_norm is not None and self._task.max_grad_norm is not None:
                parameters = [slot.parameter for slot in slots]
                nn.utils.clip_grads_with_norm_(parameters, self._task.max_grad_norm, total_norm)
            with scaled(self.optimizer, self.factors):
                self.optimizer.step()
        finally:
            for slot in slots:
                slot.parameter.grad = None
            pool.bring_back(self._slots)
        pool.renew(self._slots)

    def learning_rates(self, record: StepRecord) -> tuple[float, ...]:
        """Return those that a step was made with, or was to be, by parameter group; none where groups have no "lr"."""
        groups = record.groups or self.optimizer.param_groups
        return tuple(float(group["lr"]) for group in groups if "lr" in group)

    def reach_epoch(self, epoch: int) -> None:
        """Step a scheduler of interval "epoch" for each epoch that has ended before this one."""
        while self._schedule_epoch < epoch:
            self._move_schedule("epoch")
            self._schedule_epoch += 1

    def update(self, shard: Shard, pool: HostPool, record: StepRecord) -> None:
        """Step the parameters that a shard owns, each from its own gradient, state and recorded hyperparameters."""
        if record.is_skipped:
            return
        self.secure(shard.owned)
        slots, without = record.received(pool.owned(shard)), self._without(pool.owned(shard), record)
        home = home_of(pool, shard)
        part = self._part(home or pool, record, slots)
        new = [p for group in part.param_groups for p in group["params"] if not part.state.get(p)]
        if new:
            ahead = self._take_ahead(shard) if home is None else home.moments(new)
            make_states(part, new, self._moments, ahead)
            new = [parameter for parameter in new if not part.state.get(parameter)]
        if home is not None:
            home.is_shown = False
        self._update([slot for slot in slots if slot.index in record.hooked], pool, home or pool, record, None)
        rest = [slot for slot in slots if slot.index not in record.hooked]
        self._update(rest, pool, home or pool, record, record.loss_scale, without)
        if home is not None:
            home.queued = home.opened.queued()
            return
        if self._is_torchs:
            self._place(new)
        else:  # which may hold its states elsewhere, too
            pool.bring_back([*slots, *without])
            pool.renew(without)
        self._averages.move(pool.owned(shard), pool, is_first=record.is_first)

    def make_ahead(
        self, shards: Iterable[Shard], submit: Callable[[Callable[[], MomentsAhead]], Future[MomentsAhead]]
    ) -> None:
        """Let another thread make the moments that the first updates of these shards need, in this order."""
        if self._ahead is not None or self.num_steps or self._task.optimizer_scope == "task":
            return
        self._ahead = {}
        for shard in shards:
            parameters = [p for i in shard.owned if not self.optimizer.state.get(p := self._layout.slots[i].parameter)]
            if sum(p.nbytes for p in parameters) >= AHEAD_BYTES:
                part = part_of(self.optimizer, kept_groups(self.optimizer))
                job = partial(moments_ahead, part, parameters, self._moments)
                self._ahead[tuple(shard.owned)] = submit(job)

    def _take_ahead(self, shard: Shard) -> MomentsAhead | None:
        """Return what was made ahead for a shard, or is being made; None if it was not begun."""
        future = (self._ahead or {}).pop(tuple(shard.owned), None)
        return None if future is None or future.cancel() else future.result()

    def drop_ahead(self) -> None:
        """Discard the moments that no update has used: the cut has changed, or the task is over."""
        for future in (self._ahead or {}).values():
            future.cancel()
        self._ahead = {}

    def _without(self, owned: Sequence[Slot], record: StepRecord) -> list[Slot]:
        """The parameters without a gradient that a step sees: torch's own passes them over, another may decay them."""
        return [] if self._is_torchs else [slot for slot in owned if not record.has_gradient.get(slot.index)]

    def before(self, shard: Shard, pool: HostPool, record: StepRecord) -> BeforeUpdate:
        """Copies of all that `update` would change of a shard; the casts that devices are sent are made anew by it.

        None of a GPU's memory: it is changed by one kernel, or not at all.
        """
        home = home_of(pool, shard)
        is_by_kernel = home is not None and home.opened.kernel is not None
        owned = pool.owned(shard) if not (record.is_skipped or is_by_kernel) else []
        slots, known = record.received(owned), self._averages.tensors
        tensors = [record.gradient(slot, pool) for slot in slots]
        tensors += [known[slot.index] for slot in owned if slot.index in known]
        place = home or pool
        stepped = {slot.index: place.parameter(slot) for slot in (*slots, *self._without(owned, record))}
        return BeforeUpdate(self._states_at(place), stepped, tensors, place.masters)

    def _states_at(self, place: HostPool | Home) -> MutableMapping[Any, Any]:
        """The states of parameters that are stepped there, by parameter."""
        return place.states if isinstance(place, Home) else self.optimizer.state

    def _part(self, place: HostPool | Home, record: StepRecord, slots: Iterable[Slot]) -> torch.optim.Optimizer:
        """The optimizer over these slots' parameters as they are stepped there, with a step's hyperparameters."""
        mine = {id(slot.parameter): place.parameter(slot) for slot in slots}
        groups = [{**g, "params": [mine[id(p)] for p in g["params"] if id(p) in mine]} for g in record.groups]
        part = part_of(self.optimizer, groups)
        part.state = self._states_at(place)  # type: ignore[assignment]
        return part

    @cached_property
    def moments(self) -> dict[int, dict[str, torch.dtype]]:
        """By slot, the names and types of the moments that its updates keep, as far as that is known before."""
        groups = {id(p): group for group in self.optimizer.param_groups for p in group["params"]}
        found: dict[int, dict[str, torch.dtype]] = {}
        for slot in self._slots:
            group, p = groups.get(id(slot.parameter)), slot.parameter
            is_narrow = self._moments is not None and p.dim() > 0 and p.dtype == torch.float32
            dtype = self._moments if is_narrow and self._moments is not None else p.dtype
            names = None if group is None else moment_names(self.optimizer, group)
            found[slot.index] = dict.fromkeys(names or (), dtype)
        return found

    def home_bytes(self, shard: Shard, pool: HostPool) -> int:
        """Bytes of a device that a shard's home takes."""
        return home_bytes(shard, pool, lambda slot: moment_bytes(slot, self.moments).values())

    def _update(
        self,
        slots: Sequence[Slot],
        pool: HostPool,
        place: HostPool | Home,
        record: StepRecord,
        scale: float | None,
        without: Sequence[Slot] = (),
    ) -> None:
        """Step some parameters, whose gradients carry a loss scale or none, and those that have no gradient."""
        if not slots and not without:
            return
        part = self._part(place, record, (*slots, *without))
        norm, limit = record.total_norm, self._task.max_grad_norm
        # As torch.nn.utils.clip_grads_with_norm_ has it, which takes all gradients at once.
        clip = None if norm is None or limit is None else torch.clamp(limit / (norm + 1e-6), max=1.0)
        factors = [each for each in (None if scale is None else 1 / scale, clip) if each is not None]
        casts = self._layout.narrow is not None
        updates: Sequence[NarrowUpdate] = [
            NarrowUpdate(
                place.parameter(slot),
                record.gradient(slot, pool),
                place.narrow(slot) if casts else None,
                place.masters.get(slot.index),
            )
            for slot in slots
        ]
        step = part.step
        if isinstance(place, Home) and (kernel := place.opened.kernel) is not None:
            self._launch(kernel, part, updates, factors)
            return
        if casts:
            with pool.shown(without):
                step_narrow(part, updates, factors, step, narrows_moments=self._moments is not None, rule=self._rule)
            return
        updates = step_natively(part, updates, factors, rule=self._rule)
        if updates or without:  # nothing to widen: one step for all is the fewest calls
            step_whole(step, updates, factors)

    def _launch(
        self,
        kernel: Kernel,
        part: torch.optim.Optimizer,
        updates: Sequence[NarrowUpdate],
        factors: Sequence[float | Tensor],
    ) -> None:
        """Queue updates on a GPU: all of them, since nothing else has these bits there."""
        stepped = {id(p) for group in part.param_groups for p in group["params"]}  # its maker may have left some out
        updates = [each for each in updates if id(each.parameter) in stepped]
        moments = self._moments or torch.float32
        if left := step_natively(part, updates, factors, moments, self._rule._replace(kernel=kernel)):
            raise RuntimeError(
                f"{len(left)} updates of {type(part).__name__} cannot be made on {kernel.kind}, since its options or "
                f"states are others than at the beginning; set homes='host', or leave them"
            )

    def kernel_refused(self, kernel: Kernel, pool: HostPool) -> str:
        """Return why a GPU's kernel cannot make the updates; nothing, if it can."""
        if kernel.kind not in self._refused:
            parameters = {slot.index: slot.parameter for slot in self._slots}
            self._refused[kernel.kind] = kernel_refused(kernel, self.optimizer, parameters, pool, self._task)
        return self._refused[kernel.kind]

    def _place(self, parameters: Iterable[nn.Parameter]) -> None:
        """Move states that a step of torch's has made, and that lie in the C library's memory, to private memory."""
        for parameter in parameters:
            state = self.optimizer.state.get(parameter, {})
            moments = {k: v for k, v in state.items() if isinstance(v, Tensor) and v.dim() and is_dense(v)}
            for (key, value), place in zip(moments.items(), new_private(moments.values()), strict=True):
                state[key] = place.copy_(value)
                self._freed.add(value.nbytes)

    def moving_tensors(self) -> Iterator[tuple[int, Tensor]]:
        """Averages and the state's tensors with their slots, all that an update of a slot changes but its weight."""
        for slot in self._slots:
            if slot.index in self._averages.tensors:
                yield slot.index, self._averages.tensors[slot.index]
            for value in self.optimizer.state.get(slot.parameter, {}).values():
                if isinstance(value, Tensor):
                    yield slot.index, value

    def state(self) -> dict[str, Any]:
        """State of the updates for a checkpoint: the tensors themselves, which the next step changes."""
        averages = self._averages.state() if self.num_steps else {}
        saved = self.optimizer.state_dict()
        if isinstance(state := saved.get("state"), dict):  # whichever parameter was updated first
            numbers = sorted(state, key=lambda key: key if isinstance(key, int) else math.inf)  # of none: after all
            saved["state"] = {number: state[number] for number in numbers}
        return {"optimizer": saved, "averages": averages}

    def schedule(self) -> dict[str, Any]:
        """State of all else for a checkpoint."""
        return {
            "settings": self._settings,
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "loss_scale": None if self._loss_scale is None else self._loss_scale.state_dict(),
            "num_steps": self.num_steps,
            "epoch": self._schedule_epoch,
        }

    def restore(self, state: Mapping[str, Any], schedule: Mapping[str, Any], *, is_fork: bool = False) -> list[str]:
        """Go on from what `state` and `schedule` gave, whose tensors are taken over.

        Options of groups and the schedule are the saved ones, unless the task is a fork, asks for its own
        (`resume_options`), or has another schedule than was saved: then they are its own, and its schedule is stepped
        anew as often as the saved one was. Returns what differs, and which of the two counts.
        Raises ValueError where the optimizer or the precision are of another kind.
        """
        own, saved_scale = self._loss_scale, schedule["loss_scale"]
        if (own is None) != (saved_scale is None):
            kinds = ("has none", "was saved with one") if own is None else ("has one", "was saved with none")
            raise ValueError(
                f"a loss scale (precision 'float16'): the task {kinds[0]}, and {kinds[1]}; resume with the task that "
                f"was saved"
            )
        settings = schedule.get("settings", self._settings)  # which the first checkpoints have not
        self._check_kind(settings["optimizer"])
        _check_members(self._settings["members"], settings["members"])
        found = list(differences(self._settings, settings))
        asks = is_fork or self._task.resume_options == "program"
        keeps_own = is_fork or (asks and found != []) or any(each.what == SCHEDULE for each in found)
        # No state tells what functions of the program return; those of any schedule may know the number of epochs.
        is_of_functions = _has_functions(schedule["scheduler"])
        has_other_epochs = self.scheduler is not None and self._settings["epochs"] != settings["epochs"]
        if not keeps_own and (is_of_functions or has_other_epochs):
            self._step_schedule_anew(schedule)
            both = self.optimizer.param_groups, state["optimizer"]["param_groups"]
            rates = [[group.get("lr") for group in groups] for groups in both]
            if keeps_own := rates[0] != rates[1]:
                at = f"{SCHEDULE}, at step {schedule['num_steps']}"
                found.append(Difference(at, *(", ".join(map(repr, each)) for each in rates)))
        elif keeps_own:
            self._step_schedule_anew(schedule)
        if keeps_own:
            self._take_over(state["optimizer"])
        else:
            restore_optimizer(self.optimizer, state["optimizer"])
            if self.scheduler is not None:
                self.scheduler.load_state_dict(schedule["scheduler"])
        for slot in self._slots if self._is_torchs and self._moments is None else ():
            states = self.optimizer.state.get(slot.parameter, {})
            for key, value in states.items():
                if is_moment(value, slot.parameter):  # which may have been saved in bfloat16
                    states[key] = value.float()
        if own is not None:
            scaling = own.restore(saved_scale, keeps_own=keeps_own)
            found += [Difference(f"grad_scaler: {name}", *values) for name, *values in scaling]
        self.num_steps, self._schedule_epoch = schedule["num_steps"], schedule["epoch"]
        if self.num_steps:
            self.optimizer._opt_called = True  # type: ignore[attr-defined]  # as in `_count_step`
            self._averages.restore(state["averages"])
        if not keeps_own:  # those in effect: what a later resume is compared with
            self._settings = {**settings, "epochs": self._settings["epochs"]}
        counts = "the program's counts" if keeps_own else "which counts; resume_options='program' takes the program's"
        return [] if asks else [f"{each}{';' if keeps_own else ','} {counts}" for each in found]

    def _check_kind(self, saved: str) -> None:
        """Refuse an optimizer that keeps other states than the saved one: torch's Adam and AdamW keep the same."""
        own, alike = self._settings["optimizer"], [kind.__qualname__ for kind in _ADAMS]
        if own != saved and not (own in alike and saved in alike):
            raise ValueError(
                f"optimizer: {own}, limit: {saved}, with which the task was saved, since the two keep other states; go "
                f"on with an optimizer of that kind, or give the task another name to train it from the beginning"
            )

    def _step_schedule_anew(self, schedule: Mapping[str, Any]) -> None:
        """Step the program's own schedule as often as the saved one was."""
        num_steps, epoch = schedule["num_steps"], schedule["epoch"]
        if num_steps:
            self.optimizer._opt_called = True  # type: ignore[attr-defined]  # as in `_count_step`
        try:
            for _ in range(num_steps):
                self._move_schedule("step")
            self.reach_epoch(epoch)
        except Exception as error:
            raise ValueError(
                f"lr_scheduler: {type(self.scheduler).__name__} does not reach the place that was saved, after "
                f"{num_steps} steps and {epoch} epochs ({error}); make it for all steps of the task"
            ) from error

    def _take_over(self, saved: Mapping[str, Any]) -> None:
        """Take over the states of parameters, and nothing of groups."""
        if self._task.optimizer_scope == "task":
            raise ValueError(
                "optimizer_scope: 'task', limit: 'shard' for a fork and for options or a schedule that are not those "
                "that were saved, since this optimizer keeps state beside that of its parameters, which cannot be told "
                "from its options; go on with those, or train a fork with another optimizer"
            )
        groups = self.optimizer.state_dict()["param_groups"]
        restore_optimizer(self.optimizer, saved)
        for group, own in zip(self.optimizer.param_groups, groups, strict=True):
            group.update({key: value for key, value in own.items() if key != "params"})
            if self._is_torchs:
                self._check_states(group)

    def _check_states(self, group: Mapping[str, Any]) -> None:
        """Refuse states that lack what a step with these options goes on from, as AdamW's with `amsgrad` does."""
        for ndim in {parameter.ndim for parameter in group["params"]}:
            sample = nn.Parameter(torch.zeros((1,) * ndim))
            sample.grad = torch.zeros_like(sample)
            kind: Any = type(self.optimizer)
            optimizer = kind([{**group, "params": [sample]}])
            optimizer.step()
            needed = {key for key, value in optimizer.state[sample].items() if value is not None}
            for had in (self.optimizer.state.get(each) for each in group["params"] if each.ndim == ndim):
                if had and not needed <= had.keys():
                    raise ValueError(
                        f"optimizer: its options need the state {min(needed - had.keys())!r}, limit: what was saved, "
                        f"which has {', '.join(sorted(had))}; go on with options that keep the same states"
                    )

    def ema_state(self) -> dict[str, Tensor] | None:
        """The model's state dict with the averages in the place of the weights; None before the first step."""
        if self._averages.decay is None or not self.num_steps:
            return None
        averages = {id(slot.parameter): self._averages.tensors[slot.index] for slot in self._slots}
        return with_averages(self._task.model, averages)


def _check_members(here: Sequence[Sequence[str]], saved: Sequence[Sequence[str]]) -> None:
    """Refuse groups of other parameters than were saved, since states are kept by their place in the groups."""
    places = [{name: (k, i) for k, g in enumerate(each) for i, name in enumerate(g)} for each in (here, saved)]
    if places[0].keys() != places[1].keys():
        return  # another model, which is refused by its own names
    for name, place in places[0].items():
        if place != places[1][name]:
            (group, index), (old_group, old_index) = place, places[1][name]
            raise ValueError(
                f"optimizer: parameter {name} is number {index} of group {group}, and was saved as number {old_index} "
                f"of group {old_group}, with {[len(g) for g in here]} and {[len(g) for g in saved]} parameters in "
                f"groups; make the groups as they were, in the same order (param_groups=, optimizer=)"
            )


def _has_functions(state: Any) -> bool:
    """Return True for the state of a schedule that functions of the program decide, or of several with one of them."""
    if isinstance(state, Mapping):
        return "lr_lambdas" in state or any(map(_has_functions, state.values()))
    return isinstance(state, (list, tuple)) and any(map(_has_functions, state))


def with_averages(model: nn.Module, averages: Mapping[int, Tensor]) -> dict[str, Tensor]:
    """A model's state dict, with copies of all values, and averages by id of a parameter in its place."""
    own = {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
    state = model.state_dict()
    return {name: averages.get(own.get(name, 0), value).detach().clone() for name, value in state.items()}


def make_optimizer(task: ModelTask, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    """The user's optimizer over these parameters, by name in the model's order, in the groups that are asked for."""
    options = {} if task.lr is None else {"lr": task.lr}
    groups = _groups(task, parameters)
    if task.lr_scheduler is not None:  # which writes to rates that are tensors, also where the optimizer is on trial
        owned: dict[int, Any] = {}
        options = _with_own_tensors(options, owned)
        groups = [_with_own_tensors(each, owned) if isinstance(each, dict) else each for each in groups]
    optimizer = task.optimizer(groups, **options)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer: the factory returned a {type(optimizer).__name__}, not a torch.optim.Optimizer")
    check_optimizer_needs_no_closure(optimizer)
    native().prepare(optimizer)
    return optimizer


def _with_own_tensors(options: dict[str, Any], owned: dict[int, Any]) -> dict[str, Any]:
    """Return options with copies of their tensors, one of each; `owned`: those that were copied, by id."""
    return {
        name: owned.setdefault(id(value), value.clone()) if isinstance(value, Tensor) else value
        for name, value in options.items()
    }


def _groups(task: ModelTask, parameters: Mapping[str, nn.Parameter]) -> list[Any]:
    if task.param_groups is None:
        return list(parameters.values())
    groups: list[dict[str, Any]] = []
    for name, parameter in parameters.items():
        options = task.param_groups(name)
        if not isinstance(options, dict) or "params" in options:
            raise TypeError(f"param_groups: {options!r} for parameter {name}; return a dict of the optimizer's options")
        group = next((each for each in groups if {k: v for k, v in each.items() if k != "params"} == options), None)
        if group is None:
            groups.append({**options, "params": [parameter]})
        else:
            group["params"].append(parameter)
    return groups


def is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if a step runs nothing but torch's own code, which draws no random numbers."""
    return type(optimizer).__module__.startswith("torch.optim") and not has_step_hooks(optimizer)


@contextmanager
def scaled(optimizer: torch.optim.Optimizer, factors: Sequence[float]) -> Iterator[None]:
    """Multiply the learning rates of groups while the body steps them; no factors: they stay as they are."""
    groups = optimizer.param_groups if factors else []
    before = [group["lr"] for group in groups]
    for group, factor in zip(groups, factors, strict=True):
        group["lr"] = group["lr"] * factor
    try:
        yield
    finally:
        for group, lr in zip(groups, before, strict=True):
            group["lr"] = lr


def kept_groups(optimizer: torch.optim.Optimizer, factors: Sequence[float] = ()) -> list[dict[str, Any]]:
    """Its groups as they are now, for updates that come after the schedule has moved on; `factors` as in `scaled`."""
    groups = [
        {name: value.clone() if isinstance(value, Tensor) else value for name, value in group.items()}
        for group in optimizer.param_groups
    ]
    if factors:
        for group, factor in zip(groups, factors, strict=True):
            group["lr"] = group["lr"] * factor
    return groups


def _total_norm(slots: Sequence[Slot], norms: Mapping[int, float]) -> Tensor:
    """Combine norms of these gradients, by slot, as `torch.nn.utils.get_total_norm` does.

    That takes them by type and device, in an order of its own, and rounds to the types that meet.
    """
    if not slots:
        return torch.tensor(0.0)
    groups = group_tensors([[slot.parameter for slot in slots]], with_indices=True)
    order = [slots[index].index for _, indices in groups.values() for index in indices]
    dtype = reduce(torch.promote_types, (slot.dtype.to_real() for slot in slots))
    total: Tensor = torch.linalg.vector_norm(torch.tensor([norms[index] for index in order], dtype=dtype))
    return total


def restore_optimizer(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Put back what `optimizer.state_dict()` gave; its tensors are taken over, so that DRAM holds them once.

    `load_state_dict` of torch casts state to its parameter's type and rebuilds whatever can be iterated, so that an
    average in float32 beside a bfloat16 weight, or counts, would be rounded. Here each value is put back as it was;
    only groups go through `load_state_dict`. An optimizer that has a `load_state_dict` of its own is trusted with all.

    After the scheduler was made, which sets learning rates. Raises ValueError where groups or parameters differ.
    """
    now, then = (
        [len(group["params"]) for group in groups] for groups in (optimizer.param_groups, saved["param_groups"])
    )
    if now != then:
        raise ValueError(
            f"the optimizer has groups of {now} parameters, and the saved one of {then}; resume with the model and the "
            f"optimizer= that were saved"
        )
    if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
        optimizer.load_state_dict(dict(saved))
        return
    optimizer.load_state_dict({**saved, "state": {}})
    indices = [index for group in saved["param_groups"] for index in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    by_index = dict(zip(indices, parameters, strict=True))
    for key, state in saved["state"].items():
        parameter = by_index.get(key, key)  # an optimizer may keep something under a name
        _check_shapes(key, parameter, state)
        optimizer.state[parameter] = state


def _check_shapes(key: Any, parameter: Any, state: Any) -> None:
    """Averages have their parameter's shape; a swap of two would be noticed late, or never."""
    names = ("exp_avg", "exp_avg_sq", "momentum_buffer", "max_exp_avg_sq", "square_avg")
    for name, value in state.items() if isinstance(parameter, Tensor) and isinstance(state, Mapping) else ():
        if name in names and isinstance(value, Tensor) and value.dim() and value.shape != parameter.shape:
            raise ValueError(
                f"parameter {key} has shape {tuple(parameter.shape)}, and its saved {name} {tuple(value.shape)}; "
                f"resume with the model that was saved"
            )
