"""Batch sizes and learning rates that adapt in a training loop of one's own, without the engine.

    loader       chooses the size of a step's batch as it reads it, and gives it in micro-batches
    backward()   as it ends, squared norms are taken, and the gradient is added to those of the step so far
    step()       does nothing until the step's last micro-batch, in whose `.grad` the whole step's gradient is

A loop with gradient accumulation looks like one without: `zero_grad`, `backward` and `step` once per micro-batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hydra_engine import LaneSeconds, StepChoice, StepMeasures, square_norms
from hydra_engine.adaptive.adaptation import Adaptation, Autoscale
from hydra_engine.adaptive.loader import AdaptiveDataLoader, checked_rule
from hydra_engine.adaptive.rules import ScalingRule

_KEYS = ("adaptation", "before", "loader", "lr_scheduler", "model", "optimizer", "scaler", "steps")  # of a checkpoint


class AdaptiveDataParallel(nn.Module):
    """A model in a loop of one's own, whose batches and learning rates adapt, on the one device where the model is.

        loader = AdaptiveDataLoader(data, batch_size=64, shuffle=True)
        loader.autoscale_batch_size(1024)
        model = AdaptiveDataParallel(model, optimizer, lr_scheduler, loader=loader)
        for epoch in remaining_epochs_until(60, loader):
            for inputs, targets in loader:
                optimizer.zero_grad()
                criterion(model(inputs), targets).backward()
                optimizer.step()
            lr_scheduler.step()

    The loader gives micro-batches, one after the other. The loss is a mean over their samples: the gradient of a
    micro-batch of b samples counts b / B in a step of B samples, whatever the loss consists of. It is multiplied by
    that when `backward()` has ended, rounded, and added in the order of the micro-batches. In the step's last
    micro-batch `.grad` has the sum, which may be clipped; before, `.grad` is the micro-batch's own, and what is done to
    it has no effect. Until the last one, `step()` of the optimizer and of the schedule do nothing, nor do `unscale_()`,
    `step()` and `update()` of the scaler. So a schedule may be stepped per batch or per epoch.

    Call `backward()` once per micro-batch. If a micro-batch has none, its whole step is left out. A step of a single
    micro-batch is as without this class, but for its learning rate; its noise is taken from its own gradient and that
    of the step before, of which a copy is kept. Gradients that are not finite tell nothing of the noise.

    A learning rate is multiplied for the time of `step()`, by a factor that follows from the steps before. Without a
    loader, or with one that does not adapt, nothing but the noise is measured, and steps are those of the plain loop.
    (LEGWScale's warm-up counts there too.) Without a loader, all sizes count in batches of the loop.

    The attributes of the model, `module`, can be read here as well. State dicts are those of the model, without a
    prefix; `checkpoint()` has all of the training.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        lr_scheduler: Any = None,
        scaler: Any = None,
        *,
        loader: AdaptiveDataLoader | None = None,
        scaling_rule: ScalingRule | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Take the lead of the loader and of `step()`, until `close()`.

        optimizer, lr_scheduler, scaler: of the loop; scaler: a GradScaler. Other schedules are not known here, and are
        to be stepped once per epoch.
        loader: on which `autoscale_batch_size` was called, if batches are to adapt.
        scaling_rule: of learning rates; left out, it is the loader's, or `rule_for(optimizer)`.
        clock: seconds, by which steps are timed.

        Raises TypeError and ValueError for what does not belong together.
        """
        super().__init__()
        _check_model(model, optimizer)
        _check_helpers(optimizer, lr_scheduler, scaler)
        _check_loader(loader)
        initial = 1 if loader is None else loader.batch_size
        settings = (None if loader is None else loader.autoscale) or Autoscale(max_batch_size=initial)
        if checked_rule(scaling_rule) is not None:
            settings = replace(settings, scaling_rule=scaling_rule)
        adaptation = Adaptation(settings, initial, steps_per_epoch=None if loader is None else loader.steps_per_pass)
        adaptation.begin(optimizer)
        self.module = model
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.scaler = scaler
        self.loader = loader
        self._loop = _Loop(adaptation, _Gradients(optimizer, scaler), loader, clock)
        self._undo = self._lead()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of this module, or of the model."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":  # not there yet
                raise
        return getattr(self.module, name)

    # -- figures

    @property
    def steps(self) -> list[StepChoice]:
        """The record: a choice for each step that is over, skipped ones too. `replay` of another loader takes it."""
        return self._loop.record

    @property
    def scale(self) -> float:
        """The batch of the last step, as a multiple of the initial one; 1 before the first."""
        last = self._loop.last
        return 1.0 if last is None else last.batch_size / self._loop.initial

    @property
    def gain(self) -> float:
        """Steps of the initial batch that the last step was worth; 1 before the first."""
        last = self._loop.last
        return 1.0 if last is None else last.gain

    @property
    def progress(self) -> float:
        """Sum of the gains of all steps."""
        last = self._loop.last
        return 0.0 if last is None else last.progress + last.gain

    @property
    def noise_scale(self) -> float | None:
        """The batch, in samples, in which noise and gradient are equally large; None: not known yet."""
        return self._loop.adaptation.noise_scale

    # -- state

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the model's state dict."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load a state dict of the model."""
        return self.module.load_state_dict(*args, **kwargs)

    def checkpoint(self) -> dict[str, Any]:
        """Return the state of everything that was given: model, optimizer, schedule, scaler, loader, and the choices.

        As in torch's state dicts, tensors are not copied. torch's random numbers are not among it. Raises RuntimeError
        before the last micro-batch of a step was stepped.
        """
        self._loop.check_between_steps("checkpoint()")
        return {
            "adaptation": self._loop.adaptation.state_dict(),
            "before": self._loop.gradients.state_dict(),
            "loader": None if self.loader is None else self.loader.state_dict(),
            "lr_scheduler": None if self.lr_scheduler is None else self.lr_scheduler.state_dict(),
            "model": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "steps": StepChoice.to_columns(self.steps),
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go on from what `checkpoint()` returned, in the middle of an epoch too.

        Raises ValueError if it is of another training, before anything is changed as far as that shows.
        """
        self._loop.check_between_steps("restore()")
        if sorted(saved) != list(_KEYS):
            raise ValueError(f"saved: keys {sorted(saved)}, limit: {list(_KEYS)}; give what checkpoint() returned")
        own = {"loader": self.loader, "lr_scheduler": self.lr_scheduler, "scaler": self.scaler}
        for name, each in own.items():
            if (each is None) != (saved[name] is None):
                here, there = ("not given", "saved") if each is None else ("given", "not saved")
                raise ValueError(f"{name}: {here}, limit: {there}; give what the training that was saved had")
        num_groups = len(saved["optimizer"]["param_groups"])
        if num_groups != len(self.optimizer.param_groups):
            raise ValueError(
                f"optimizer: {len(self.optimizer.param_groups)} parameter groups, limit: {num_groups}, those of the "
                f"one that was saved; give one with the same groups"
            )
        steps = StepChoice.from_columns(saved["steps"])
        self._loop.adaptation.load_state_dict(saved["adaptation"])
        self.module.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        for name, each in own.items():
            if each is not None:
                each.load_state_dict(saved[name])
        self._loop.gradients.load_state_dict(saved["before"])
        self._loop.record[:] = steps

    def close(self) -> None:
        """Leave loader, optimizer, schedule and scaler as they were given; another wrapper may take them."""
        self._undo.close()

    # -- the loop

    def _lead(self) -> ExitStack:
        """Put the loop's hooks in place; return what takes them away again."""
        loop, undo = self._loop, ExitStack()
        for parameter in _parameters(self.optimizer):
            if parameter.requires_grad:
                hook = parameter.register_post_accumulate_grad_hook(loop.computed)  # type: ignore[no-untyped-call]
                undo.callback(hook.remove)
        if self.loader is not None:
            self.loader.cut = loop.cut
            self.loader.guide = None if self.loader.autoscale is None else loop.next_size
            for name in ("cut", "guide"):
                undo.callback(setattr, self.loader, name, None)
        _lead_step(self.optimizer, loop, undo)
        if self.lr_scheduler is not None:
            _only_at_the_last(self.lr_scheduler, ("step",), loop, undo)
        if self.scaler is not None:
            _only_at_the_last(self.scaler, ("unscale_", "update"), loop, undo)
            _only_at_the_last(self.scaler, ("step",), loop, undo, then=loop.end_skipped)
        return undo


# -- steps


@dataclass(kw_only=True)
class _Step:
    """A step in progress."""

    choice: StepChoice
    sizes: tuple[int, ...]  # of its micro-batches, in samples
    index: int = 0  # of the micro-batch in progress
    norms: dict[int, list[Tensor]] = field(default_factory=dict)  # by micro-batch and parameter group
    total: list[Tensor] | None = None  # squared norms of the step's gradient, by parameter group
    pair: tuple[list[Tensor], ...] | None = None  # of a step of one micro-batch, as `_Gradients.paired` gives it

    @property
    def is_last(self) -> bool:
        return self.index == len(self.sizes) - 1


class _Loop:
    """The steps of a training loop, from the choice of a batch to its record."""

    def __init__(
        self,
        adaptation: Adaptation,
        gradients: _Gradients,
        loader: AdaptiveDataLoader | None,
        clock: Callable[[], float],
    ) -> None:
        self.adaptation = adaptation
        self.gradients = gradients
        self.record: list[StepChoice] = []
        self.initial = 1 if loader is None else loader.batch_size
        self._loader = loader
        self._adapts = loader is not None and loader.autoscale is not None
        self._clock = clock
        self._asked: StepChoice | None = None  # the choice for the batch that is read
        self._began_s = 0.0
        self._step: _Step | None = None  # in progress
        self._first: _Step | None = None  # with which the newest batch of the loader began
        self._backward = -1  # the number that torch gave the last backward pass

    @property
    def last(self) -> StepChoice | None:
        """The choice of the last step that is over."""
        return self.record[-1] if self.record else None

    @property
    def is_between(self) -> bool:
        """True before the last micro-batch of a step."""
        return self._step is not None and not self._step.is_last

    def check_between_steps(self, what: str) -> None:
        """Raise RuntimeError while a step is in progress."""
        if self._step is not None:
            raise RuntimeError(
                f"{what} in micro-batch {self._step.index + 1} of {len(self._step.sizes)} of step "
                f"{self._step.choice.step}, limit: between steps, since gradients are not saved; call it where "
                f"len(steps) has grown after optimizer.step(), or behind the loop over the loader"
            )

    # -- asked by the loader

    def next_size(self) -> int | None:
        """Choose the size of the batch that is about to be read; None: the epoch is over."""
        assert self._loader is not None
        if self.last is None and self._loader.epoch > 0:
            raise RuntimeError(
                f"loader: epoch {self._loader.epoch}, limit: 0 before the first step; restore() the checkpoint of that "
                f"training, or give a new loader"
            )
        is_over = self.adaptation.is_over(self.last, self._loader.epoch)
        if is_over is None:  # no length: an epoch is a pass
            is_over = self._loader.num_passes > self._loader.epoch
        if is_over:
            return None
        self._asked = self.adaptation.choose(self.last)
        self._began_s = self._clock()
        return self._asked.batch_size

    def cut(self, num_samples: int) -> Iterator[int]:
        """Begin a step of so many samples, and give the sizes of its micro-batches as each is about to be read."""
        assert self._loader is not None
        if (self._loader.autoscale is not None) != self._adapts:
            raise RuntimeError(
                "loader: autoscale_batch_size() was called after AdaptiveDataParallel took the loader, limit: before; "
                "call it first"
            )
        step, place = self._begin(num_samples), self._loader.place
        self._first = step
        try:
            for index, size in enumerate(step.sizes):
                step.index = index
                yield size
                if not step.is_last:
                    self.gradients.clear()
        finally:  # the next batch is asked for, or the loop was left
            if self._first is step:  # no other iteration is under way
                if self._loader.place != place:
                    self.end_skipped()
                else:  # which gives these samples again
                    self._drop(step)

    def _begin(self, num_samples: int) -> _Step:
        """Begin a step; its factors follow from all steps before it."""
        if self._adapts:
            assert self._asked is not None
            choice = self.adaptation.factored(self.adaptation.given(self._asked, num_samples))
        else:
            choice = self.adaptation.choose(self.last)
            factors = self.adaptation.factored(choice).factors  # of the initial batch: a shorter last one is no choice
            choice = replace(self.adaptation.given(choice, num_samples), micro_batches=1, factors=factors)
            self._began_s = self._clock()
        self.gradients.drop()
        number = choice.micro_batches  # whose sizes differ by at most 1, larger ones first
        sizes = tuple((num_samples + k) // number for k in reversed(range(number)))
        self._step = _Step(choice=choice, sizes=sizes)
        return self._step

    # -- told by torch

    def computed(self, _: Tensor) -> None:
        """Have `_ended` called at the end of the backward pass that is going on."""
        number = torch._C._current_graph_task_id()
        if number != self._backward:
            self._backward = number
            torch.autograd.Variable._execution_engine.queue_callback(self._ended)

    def _ended(self) -> None:
        """Take in the gradient of the micro-batch in progress."""
        step = self._step
        if step is None:
            if self._adapts:
                return  # somebody's own, outside of the loop over the loader
            step = self._begin(self.initial)
        self._take(step)

    @torch.no_grad()
    def _take(self, step: _Step) -> None:
        """Measure `.grad`, and add it to the gradients of the step."""
        num_samples, gradients = step.choice.batch_size, self.gradients
        if len(step.sizes) == 1:
            is_first = not step.norms
            step.norms[0] = gradients.norms()
            step.pair = gradients.paired(num_samples, step.norms[0], is_first=is_first)
            return
        if step.index in step.norms:
            raise RuntimeError(
                f"backward() ended twice in micro-batch {step.index + 1} of {len(step.sizes)} of step "
                f"{step.choice.step}, limit: once, since its gradient is added to those of the others; add the losses "
                f"up, and use torch.utils.checkpoint with use_reentrant=False"
            )
        step.norms[step.index] = gradients.norms()
        gradients.add(step.sizes[step.index] / num_samples, is_last=step.is_last)
        if step.is_last:
            step.total = gradients.norms()

    # -- told by the training loop

    def run(self, optimizer_step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Step the optimizer with scaled learning rates, if the step's last micro-batch is through."""
        self.gradients.check_groups()
        step = self._step
        if step is None:
            if self._adapts:
                raise RuntimeError(
                    "optimizer.step() outside of the loop over the loader, or twice for a batch, limit: once for each "
                    "batch that the loader gives; call it there"
                )
            step = self._begin(self.initial)
        if self._adapts and any(each is not None for each in (*args, *kwargs.values())):
            raise ValueError(
                "optimizer.step(): a closure was given, limit: none where a step may have several micro-batches; call "
                "backward() first, and step() without arguments"
            )
        if not step.is_last:
            return None
        if len(step.norms) < len(step.sizes) and len(step.sizes) > 1:
            self.end_skipped()
            return None
        if not step.norms and not args and not kwargs:  # gradients that were set by hand
            self._take(step)
        with self.gradients.scaled_rates(step.choice.factors):
            found = optimizer_step(*args, **kwargs)
        self._learn(step)
        self._end(step)
        return found

    def end_skipped(self) -> None:
        """End a step whose last micro-batch is through, if it was not stepped: it tells nothing of the noise."""
        if self._step is not None:
            self._end(self._step)

    def _learn(self, step: _Step) -> None:
        """Take in the norms of a step. They wait for the device here."""
        if len(step.sizes) > 1:
            assert step.total is not None
            micro = tuple(_numbers(step.norms[k]) for k in range(len(step.sizes)))
            self.adaptation.measured(StepMeasures(tuple(map(float, step.sizes)), micro, _numbers(step.total)))
        elif step.pair is not None:
            now, before, mean = map(_numbers, step.pair)
            self.adaptation.measured_alone(step.choice.batch_size, now, before, mean)

    def _end(self, step: _Step) -> None:
        """Put the step in the record."""
        seconds = self._clock() - self._began_s
        lanes = LaneSeconds(seconds, seconds)
        if self._adapts:
            self.adaptation.timed(step.choice, lanes)
        self.record.append(replace(step.choice, seconds=lanes))
        self._drop(step)

    def _drop(self, step: _Step) -> None:
        """Forget a step, if it is the one in progress."""
        if self._step is step:
            self._step = None
            self.gradients.drop()


# -- gradients


class _Before(NamedTuple):
    """The gradient of the step before, which had one micro-batch."""

    num_samples: int
    norms: list[Tensor]
    gradients: dict[Tensor, Tensor]  # by parameter, unscaled


class _Gradients:
    """Gradients of an optimizer's parameters, in `.grad` and here, and its learning rates."""

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: Any) -> None:
        self._optimizer = optimizer
        self._scaler = scaler
        self._num_groups = len(optimizer.param_groups)
        self._sums: dict[Tensor, Tensor] = {}  # of the step's micro-batches, by parameter
        self._before: _Before | None = None

    @property
    def _unscaling(self) -> float:
        """The factor that takes the scaler's scale off."""
        return 1.0 if self._scaler is None else 1.0 / float(self._scaler.get_scale())

    def check_groups(self) -> None:
        """Raise ValueError if parameter groups were added."""
        number = len(self._optimizer.param_groups)
        if number != self._num_groups:
            raise ValueError(
                f"optimizer: {number} parameter groups, limit: {self._num_groups}, as when AdaptiveDataParallel took "
                f"it; add groups before that"
            )

    def norms(self) -> list[Tensor]:
        """Squared norms of what is in `.grad`, without the scaler's scale, by parameter group."""
        unscaling = self._unscaling**2
        return [each * unscaling for each in self._norms_of({each: each.grad for each in self._with_gradients()})]

    def add(self, weight: float, *, is_last: bool) -> None:
        """Add `.grad` times a weight to the sum; with the last micro-batch, `.grad` becomes the sum."""
        parameters = self._with_gradients()
        found = [each.grad for each in parameters]
        if is_last:
            weighed = found
            torch._foreach_mul_(weighed, weight)
        else:
            weighed = list(torch._foreach_mul(found, weight))
        both = [
            (gradient, self._sums[each])
            for each, gradient in zip(parameters, weighed, strict=True)
            if each in self._sums
        ]
        if both:
            torch._foreach_add_(*map(list, zip(*both, strict=True)))
        self._sums.update(zip(parameters, weighed, strict=True))
        self._before = None  # which was not the step before any more
        if is_last:
            for parameter, total in self._sums.items():  # one that this micro-batch did not reach, too
                parameter.grad = total
            self._sums = {}

    def clear(self) -> None:
        """Clear `.grad`, of a micro-batch that was added to the sum."""
        for parameter in _parameters(self._optimizer):
            parameter.grad = None

    def drop(self) -> None:
        """Forget the sum, of a step that is over."""
        self._sums = {}

    def paired(self, num_samples: int, norms: list[Tensor], *, is_first: bool) -> tuple[list[Tensor], ...] | None:
        """Keep `.grad` for the next step; return its squared norms, those of the step before, and of the mean of both.

        None: the step before tells nothing. is_first: it is the first time in this step. The gradient that was kept is
        this step's own otherwise.
        """
        unscaling = self._unscaling
        now = {parameter: parameter.grad * unscaling for parameter in self._with_gradients()}  # copies
        before, self._before = self._before, _Before(num_samples, norms, now)
        if before is None or not is_first or before.num_samples != num_samples:
            return None
        sums = {each: now[each] + before.gradients.get(each, 0) for each in now}
        sums |= {each: gradient for each, gradient in before.gradients.items() if each not in now}
        return norms, before.norms, [each / 4 for each in self._norms_of(sums)]

    @contextmanager
    def scaled_rates(self, factors: Sequence[float]) -> Generator[None, None, None]:
        """Multiply the learning rates for the time of the block; schedules never see it."""
        groups = self._optimizer.param_groups
        rates = [group["lr"] for group in groups]
        try:
            for group, factor in zip(groups, factors, strict=True):
                if factor != 1:
                    group["lr"] = group["lr"] * factor
            yield
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate

    def state_dict(self) -> dict[str, Any] | None:
        """Return the gradient that is kept for the next step, with parameters by their index."""
        if self._before is None:
            return None
        indices = {each: k for k, each in enumerate(_parameters(self._optimizer))}
        return {
            "num_samples": self._before.num_samples,
            "gradients": {indices[each]: gradient for each, gradient in self._before.gradients.items()},
        }

    @torch.no_grad()
    def load_state_dict(self, saved: Mapping[str, Any] | None) -> None:
        """Take over the gradient of the step before the next."""
        self.drop()
        self._before = None
        if saved is None:
            return
        parameters = list(_parameters(self._optimizer))
        found = {parameters[k]: each.to(parameters[k].device, copy=True) for k, each in saved["gradients"].items()}
        self._before = _Before(saved["num_samples"], self._norms_of(found), found)

    def _with_gradients(self) -> list[Any]:
        return [each for each in _parameters(self._optimizer) if each.grad is not None]

    def _norms_of(self, gradients: Mapping[Tensor, Tensor]) -> list[Tensor]:
        return [
            square_norms([gradients[each] for each in group["params"] if each in gradients])
            for group in self._optimizer.param_groups
        ]


def _numbers(norms: Sequence[Tensor]) -> tuple[float, ...]:
    return tuple(map(float, norms))


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


# -- others' methods


def _lead_step(optimizer: torch.optim.Optimizer, loop: _Loop, undo: ExitStack) -> None:
    """Have the loop run `optimizer.step`, until `undo` puts it back."""
    own = optimizer.step
    if "step" in vars(optimizer):
        undo.callback(setattr, optimizer, "step", own)
    else:
        undo.callback(vars(optimizer).pop, "step", None)

    @wraps(getattr(own, "__func__", own))  # with the marks of a schedule
    def step(_: Any, *args: Any, **kwargs: Any) -> Any:
        return loop.run(own, *args, **kwargs)

    step._is_led = True  # type: ignore[attr-defined]
    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]  # schedules want a method


def _only_at_the_last(
    target: Any, names: Sequence[str], loop: _Loop, undo: ExitStack, then: Callable[[], None] | None = None
) -> None:
    """Have methods do nothing before a step's last micro-batch, until `undo`. then: is called after them.

    The class changes, not the object: a schedule's state dict has whatever is in the object.
    """
    own = type(target)

    def led(name: str) -> Callable[..., Any]:
        method = getattr(own, name)

        @wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if loop.is_between:
                return None
            found = method(self, *args, **kwargs)
            if then is not None:
                then()
            return found

        return call

    target.__class__ = type(own.__name__, (own,), {"__module__": own.__module__, **{name: led(name) for name in names}})
    undo.callback(setattr, target, "__class__", own)


# -- arguments


def _check_model(model: Any, optimizer: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: {type(model).__name__} is not a torch.nn.Module; give one")
    if isinstance(model, AdaptiveDataParallel):
        raise ValueError("model: it is an AdaptiveDataParallel already, limit: one; give its .module, after close()")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer: {type(optimizer).__name__} is not a torch.optim.Optimizer; give one")
    if getattr(optimizer.step, "_is_led", False):
        raise ValueError(
            "optimizer: another AdaptiveDataParallel has it, limit: one; close() that one, or make a new one"
        )
    own = set(model.parameters())
    num_others = sum(each not in own for each in _parameters(optimizer))
    if num_others:
        raise ValueError(
            f"optimizer: {num_others} of its parameters are not the model's, limit: 0; make the optimizer with "
            f"model.parameters()"
        )


def _check_helpers(optimizer: torch.optim.Optimizer, lr_scheduler: Any, scaler: Any) -> None:
    if getattr(lr_scheduler, "optimizer", optimizer) is not optimizer:
        raise ValueError(
            "lr_scheduler: it is of another optimizer, limit: the one given; give one that was made with it"
        )
    for name, each, method in (("lr_scheduler", lr_scheduler, "step"), ("scaler", scaler, "unscale_")):
        if each is not None and not hasattr(each, method):
            raise TypeError(f"{name}: {type(each).__name__} has no {method}(), limit: a {name} of torch; give one")


def _check_loader(loader: Any) -> None:
    if loader is not None and not isinstance(loader, AdaptiveDataLoader):
        raise TypeError(f"loader: {type(loader).__name__} is not an AdaptiveDataLoader; give one, or None")
    if loader is not None and (loader.guide is not None or loader.cut is not None):
        raise ValueError("loader: another training leads it, limit: one; close() that one, or make a new loader")
