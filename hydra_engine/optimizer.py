"""The host optimizer: one optimizer object per task, stepped shard by shard from a record made at the commit."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hydra_engine.blocked import part_of
from hydra_engine.memory import HostPool, StepStaging
from hydra_engine.shard import ModelLayout, Shard, Slot
from hydra_engine.task import ModelTask, check_optimizer_needs_no_closure

NUM_TIMED_STEPS = 5


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """What a step's updates need, as it was at its commit: the next step and the scheduler go on meanwhile."""

    groups: list[dict[str, Any]]  # hyperparameters and parameters of each group
    has_gradient: dict[int, bool]
    total_norm: Tensor | None
    is_first: bool = False


class TaskOptimizer:
    """Owns a task's optimizer and scheduler. Shards of one step may be updated side by side."""

    def __init__(self, task: ModelTask, layout: ModelLayout) -> None:
        self._task = task
        self._slots = layout.trainable_slots()
        self.optimizer = make_optimizer(task, {slot.name: slot.parameter for slot in self._slots})
        self.scheduler = task.lr_scheduler(self.optimizer) if task.lr_scheduler is not None else None
        self._epoch = 0
        self._num_steps = 0
        averaged = self._slots if task.ema_decay is not None else []
        self._averages = {slot.index: torch.empty_like(slot.parameter) for slot in averaged}

    def commit(self, staging: StepStaging, pool: HostPool, epoch: int) -> StepRecord:
        """Record a step, and move the scheduler past it."""
        self.reach_epoch(epoch)
        self._call_hooks(staging, pool)
        total_norm = None
        if self._task.optimizer_scope == "task":
            self._step_all(pool, staging.has_gradient)
        elif self._task.max_grad_norm is not None:
            gradients = [pool.gradients[s.index] for s in self._slots if staging.has_gradient.get(s.index)]
            total_norm = nn.utils.get_total_norm([g for g in gradients if g is not None])
        groups = [{name: _kept(value) for name, value in group.items()} for group in self.optimizer.param_groups]
        record = StepRecord(
            groups=groups,
            has_gradient=dict(staging.has_gradient),
            total_norm=total_norm,
            is_first=self._num_steps == 0,
        )
        if self._task.optimizer_scope == "task":
            self._average(self._slots, record)
        self._num_steps += 1
        # torch's schedulers warn unless the optimizer was stepped before; ours is stepped through `update`.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        if self.scheduler is not None and self._task.lr_scheduler_interval == "step":
            self.scheduler.step()
        return record

    @torch.no_grad()  # as in a backward
    def _call_hooks(self, staging: StepStaging, pool: HostPool) -> None:
        """Let the hooks that the user registered on a parameter act on its finished gradient."""
        for slot in self._slots:
            gradient, parameter = pool.gradients[slot.index], slot.parameter
            if gradient is None or not staging.has_gradient.get(slot.index):
                continue
            for hook in (parameter._backward_hooks or {}).values():
                changed = hook(gradient)
                if changed is not None and changed is not gradient:
                    gradient.copy_(changed)
            after = (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values()
            for hook in after:
                parameter.grad = gradient
                hook(parameter)
                if parameter.grad is None:  # it was taken, for an optimizer of the hook's own
                    staging.has_gradient[slot.index] = False
                elif parameter.grad is not gradient:
                    gradient.copy_(parameter.grad)
                parameter.grad = None

    def _step_all(self, pool: HostPool, has_gradient: Mapping[int, bool]) -> None:
        """One step of the user's optimizer itself, which may keep what it likes wherever it likes."""
        slots = [slot for slot in self._slots if has_gradient.get(slot.index)]
        for slot in slots:
            slot.parameter.grad = pool.gradients[slot.index]
        try:
            if self._task.max_grad_norm is not None:
                nn.utils.clip_grad_norm_([slot.parameter for slot in slots], self._task.max_grad_norm)
            self.optimizer.step()
        finally:
            for slot in slots:
                slot.parameter.grad = None

    def reach_epoch(self, epoch: int) -> None:
        """Step a scheduler of interval "epoch" for each epoch that has ended before this one."""
        while self._epoch < epoch:
            self._epoch += 1
            if self.scheduler is not None and self._task.lr_scheduler_interval == "epoch":
                self.scheduler.step()

    def update(self, shard: Shard, pool: HostPool, record: StepRecord) -> None:
        """Step the parameters that a shard owns, each from its own gradient, state and recorded hyperparameters."""
        slots = [slot for slot in pool.owned(shard) if record.has_gradient.get(slot.index)]
        for slot in slots:
            slot.parameter.grad = pool.gradients[slot.index]
        try:
            parameters = [slot.parameter for slot in slots]
            if record.total_norm is not None:
                assert self._task.max_grad_norm is not None
                nn.utils.clip_grads_with_norm_(parameters, self._task.max_grad_norm, record.total_norm)
            mine = {id(parameter) for parameter in parameters}
            groups = [{**g, "params": [p for p in g["params"] if id(p) in mine]} for g in record.groups]
            part_of(self.optimizer, groups).step()
        finally:
            for slot in slots:
                slot.parameter.grad = None
        self._average(pool.owned(shard), record)

    @torch.no_grad()
    def _average(self, slots: Iterable[Slot], record: StepRecord) -> None:
        """Move the averages towards the weights, also of those that received no gradient."""
        if self._task.ema_decay is None:
            return
        for slot in slots:
            average = self._averages[slot.index]
            if record.is_first:
                average.copy_(slot.parameter)
            else:
                average.lerp_(slot.parameter, 1 - self._task.ema_decay)

    def ema_state(self) -> dict[str, Tensor] | None:
        """The model's state dict with the averages in the place of the weights; None before the first step."""
        if self._task.ema_decay is None or self._num_steps == 0:
            return None
        model = self._task.model
        averages = {id(slot.parameter): self._averages[slot.index] for slot in self._slots}
        own = {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
        state = model.state_dict()
        return {name: averages.get(own.get(name, 0), value).detach().clone() for name, value in state.items()}


def make_optimizer(task: ModelTask, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    """The user's optimizer over these parameters, by name in the model's order, in the groups that are asked for."""
    options = {} if task.lr is None else {"lr": task.lr}
    optimizer = task.optimizer(_groups(task, parameters), **options)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer: the factory returned a {type(optimizer).__name__}, not a torch.optim.Optimizer")
    check_optimizer_needs_no_closure(optimizer)
    return optimizer


def _groups(task: ModelTask, parameters: Mapping[str, nn.Parameter]) -> list[Any]:
    """Parameters, or one dict for each set of options."""
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


def trial_state_bytes(task: ModelTask, layout: ModelLayout) -> int:
    """DRAM that the optimizer's state will take, from one step on tiny parameters of the same number of dimensions.

    A state tensor of the parameter's shape is taken to grow with it, any other to stay as it is. Also the first time
    that the factories run: what they raise is raised before any work starts. Refuses an optimizer that keeps state
    beside `optimizer.state`, which stepping shard by shard would lose, and a scheduler that wants to be told a metric.
    """
    slots = layout.trainable_slots()
    tiny = [nn.Parameter(torch.zeros([min(size, 2) for size in slot.shape], dtype=slot.dtype)) for slot in slots]
    optimizer = make_optimizer(task, {slot.name: parameter for slot, parameter in zip(slots, tiny, strict=True)})
    _check_scheduler(task, optimizer)
    mine = {id(parameter) for parameter in tiny}
    if any(id(parameter) not in mine for group in optimizer.param_groups for parameter in group["params"]):
        # The factory builds groups of its own from the model. They are never stepped on trial; Adam's two moments.
        return 2 * layout.num_bytes[True]
    for parameter in tiny:
        parameter.grad = torch.ones_like(parameter)  # of zeros, an optimizer that scales by them makes nothing
    before = _beside_state(optimizer)
    optimizer.step()
    if task.optimizer_scope == "shard" and _beside_state(optimizer) != before:
        raise ValueError(
            f"optimizer: {type(optimizer).__name__} keeps state in its groups or attributes instead of in "
            f"optimizer.state, and would lose it when shards are stepped one by one; choose one that keeps state per "
            f"parameter, or set optimizer_scope='task'"
        )
    total = 0
    for slot, parameter in zip(slots, tiny, strict=True):
        for value in optimizer.state[parameter].values():
            if isinstance(value, Tensor):
                grows = value.shape == parameter.shape and value.dim() > 0
                total += value.element_size() * slot.parameter.numel() if grows else value.nbytes
    return total


def update_bytes_per_s(task: ModelTask) -> float:
    """Bytes of parameters that the task's optimizer steps in a second on this thread, measured on one of 1 MiB."""
    parameter = nn.Parameter(torch.zeros(2**9, 2**9))
    name = next(name for name, each in task.model.named_parameters() if each.requires_grad)
    optimizer = make_optimizer(task, {name: parameter})
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # makes its state
    start_s = time.perf_counter()
    for _ in range(NUM_TIMED_STEPS):
        optimizer.step()
    return NUM_TIMED_STEPS * parameter.nbytes / (time.perf_counter() - start_s)


def _check_scheduler(task: ModelTask, optimizer: torch.optim.Optimizer) -> None:
    if task.lr_scheduler is None:
        return
    scheduler = task.lr_scheduler(optimizer)
    if not isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler):
        raise TypeError(f"lr_scheduler: the factory returned a {type(scheduler).__name__}, not an LRScheduler")
    wanted = [p.name for p in inspect.signature(scheduler.step).parameters.values() if p.default is p.empty]
    if wanted:
        raise ValueError(
            f"lr_scheduler: {type(scheduler).__name__} wants {', '.join(wanted)} at each step, which nobody passes; "
            f"choose one that follows the number of steps or epochs"
        )


def _beside_state(optimizer: torch.optim.Optimizer) -> str:
    """What of an optimizer must not change in a step: plain values of its groups and attributes."""
    plain = (bool, int, float, complex, str, tuple, type(None))
    public = {name: value for name, value in vars(optimizer).items() if not name.startswith("_")}  # the rest is torch's
    return repr([{k: v for k, v in p.items() if isinstance(v, plain)} for p in (*optimizer.param_groups, public)])


def _kept(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
