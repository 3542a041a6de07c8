"""The plain loop of a task: what PyTorch alone makes of it, on the CPU."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hydra_engine.data import stream_seed
from hydra_engine.errors import PauseTask, StopTask
from hydra_engine.host import make_optimizer
from hydra_engine.tasks import (
    FINISHED,
    STOPPED,
    EvaluationMeans,
    ModelTask,
    OneLayer,
    StepReport,
    TaskReport,
    ValidationReport,
    batch_size,
)
from hydra_engine.verify.record import Record, digest


class PlainLoop:
    """Trains one task as its user would without the engine, with the options of it that change results."""

    def __init__(self, task: ModelTask, record: Record) -> None:
        self._task, self._record = task, record
        self._forward = task.model.as_plain
        if isinstance(self._forward, OneLayer):  # it has no batch yet to be told from a chain of its children by
            self._forward.spreads = True
        self._parameters = {name: each for name, each in task.model.named_parameters() if each.requires_grad}
        self._optimizer = make_optimizer(task, self._parameters)
        self._scheduler = None if task.lr_scheduler is None else task.lr_scheduler(self._optimizer)
        self._averages: dict[str, Tensor] = {}
        assert task.name is not None
        self._report = TaskReport(name=task.name, seed=task.seed, status=STOPPED)

    def train(self) -> None:
        """Train; what a callback raises to stop the task ends it, all else goes on to the caller."""
        torch.manual_seed(self._task.seed)
        try:
            for epoch in range(self._task.epochs):
                self._epoch(epoch)
            self._report.status = FINISHED
        except (StopTask, PauseTask) as stop:
            self._report.stop_reason = str(stop)
        self._record.averages = {name: digest(each) for name, each in self._averages.items()}
        for callback in self._task.callbacks:
            callback.on_task_end(self._report)

    def _epoch(self, epoch: int) -> None:
        task, report = self._task, self._report
        for callback in task.callbacks:
            callback.on_epoch_begin(report, epoch)
        for batch in task.dataloader:
            self._step(epoch, *task.unpack(batch))
        if self._scheduler is not None and task.lr_scheduler_interval == "epoch":
            self._scheduler.step()
        if task.validation is not None:
            self._validate(epoch, task.validation)
        for callback in task.callbacks:
            callback.on_epoch(report, epoch)

    def _step(self, epoch: int, inputs: Any, target: Any) -> None:
        task, report = self._task, self._report
        began_s, num_samples = time.perf_counter(), batch_size(inputs)
        self._optimizer.zero_grad(set_to_none=True)
        loss = self._backward(inputs, target)
        norm = None
        if task.max_grad_norm is not None:
            norm = float(nn.utils.clip_grad_norm_(self._parameters.values(), task.max_grad_norm))
        rates = tuple(float(group["lr"]) for group in self._optimizer.param_groups if "lr" in group)
        self._optimizer.step()
        self._average()
        if self._scheduler is not None and task.lr_scheduler_interval == "step":
            self._scheduler.step()
        report.losses.append(loss)
        report.steps += 1
        report.last_step = StepReport(
            task=report.name,
            step=report.steps,
            epoch=epoch,
            loss=loss,
            learning_rates=rates,
            grad_norm=norm,
            num_samples=num_samples,
            samples_per_s=num_samples / max(1e-9, time.perf_counter() - began_s),
            time_s=time.time(),
        )
        for callback in task.callbacks:
            callback.on_step(report)

    def _backward(self, inputs: Any, target: Any) -> float:
        """Leave the gradients of a batch in the parameters, and return its loss."""
        task, count = self._task, self._task.accumulation_steps
        if count == 1:
            loss = task.loss_fn(self._forward(inputs), target)
            torch.autograd.backward(loss)
            return float(loss.item())
        total = 0.0
        for m, (x, y, weight) in enumerate(task.split(inputs, target, int(count))):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(stream_seed(task.seed, self._report.steps, m))
                part = task.loss_fn(self._forward(x), y) * weight
                torch.autograd.backward(part)
                total += float(part.item())
        return total

    @torch.no_grad()
    def _average(self) -> None:
        decay = self._task.ema_decay
        for name, parameter in self._parameters.items() if decay is not None else ():
            before = self._averages.get(name)
            self._averages[name] = parameter.clone() if before is None else before.lerp_(parameter, 1 - (decay or 0))

    def _validate(self, epoch: int, loader: Iterable[Any]) -> None:
        task, report = self._task, self._report
        reduction, means = task.loss_reduction, EvaluationMeans(sums_losses=task.loss_reduction == "sum")
        with evaluating(self._forward, task.loss_fn):
            for batch in loader:
                inputs, target = task.unpack(batch)
                loss = float(task.loss_fn(self._forward(inputs), target).item())
                size = batch_size(inputs)
                means.add(loss, float(reduction(target)) if callable(reduction) else size, {}, size)
        found = means.result().loss
        report.validation_losses.append(found)
        report.validation_steps.append(report.steps)
        report.last_validation = ValidationReport(
            task=report.name, step=report.steps, epoch=epoch, loss=found, metrics={}, time_s=time.time()
        )
        for callback in task.callbacks:
            callback.on_validation(report)


@contextmanager
def evaluating(*roots: object) -> Iterator[None]:
    """Put modules in eval() without gradients; torch's stream and the modes are then as they were."""
    modules = [module for root in roots if isinstance(root, nn.Module) for module in root.modules()]
    modes = [module.training for module in modules]
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for module in modules:
            module.training = False
        try:
            yield
        finally:
            for module, mode in zip(modules, modes, strict=True):
                module.training = mode
