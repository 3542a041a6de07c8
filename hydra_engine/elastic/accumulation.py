"""Gradient accumulation around any optimizer of torch, in any training loop."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor

from partitioners.plain_numbers import plain, whole_number

Closure = Callable[[], Any]  # returns a loss: a tensor, a number or None

REDUCTIONS = ("mean", "sum")


class GradientAccumulation(torch.optim.Optimizer):
    """An optimizer that takes one step for every `steps` micro-batches, and leaves the training loop as it is.

    The loop calls `zero_grad()` and `step()` once per micro-batch. Gradients add up in `.grad`; they are cleared before
    the first micro-batch, and the wrapped optimizer steps after the last one. For a mean loss they are divided by
    `steps` then. Micro-batches of unequal sizes need `weigh()`. All else (`param_groups`, `state`, hooks) is that of
    the wrapped optimizer. Its step hooks see the gradients of the whole step, which makes them the place to clip.

    optimizer: any optimizer of torch, warm or new. It stays in use, as the attribute `optimizer`.
    steps: micro-batches per step.
    reduction: "mean" if the loss is a mean over samples, "sum" if it is a sum.

    `accumulated` is the number of micro-batches since the last step, `stepped` says whether the last `step()` stepped
    the wrapped optimizer. A schedule that counts steps goes on where `stepped` is True.
    """

    # GradScaler then leaves unscaling to `step`, and gives it `grad_scale` and `found_inf` as attributes.
    _step_supports_amp_scaling = True

    def __init__(self, optimizer: torch.optim.Optimizer, steps: int, reduction: str = "mean") -> None:
        # Not super().__init__(): groups, state and hooks are those of the wrapped optimizer.
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer: {type(optimizer).__name__} is not a torch.optim.Optimizer; give one")
        if reduction not in REDUCTIONS:
            raise ValueError(f"reduction: {reduction!r}, known: {', '.join(REDUCTIONS)}; give that of the loss")
        self.optimizer = optimizer
        self.steps = whole_number("steps", steps)
        self.reduction = reduction
        self.stepped = False
        self._begin()

    def _begin(self) -> None:
        """Begin with the first micro-batch of a step."""
        self.accumulated = 0
        self._closures: list[Closure] = []
        self._losses: list[Any] = []  # of closures, one per micro-batch
        # With a GradScaler, whose scale may change after every micro-batch, gradients wait here without it.
        self._unscaled: dict[Tensor, Tensor] = {}
        self._found_inf: Any = 0.0

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer" or name.startswith("__"):  # unpickled, and not filled yet
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__} (steps: {self.steps}, reduction: {self.reduction}) of {self.optimizer!r}"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)

    def weigh(self, loss: Tensor, size: int, total: float) -> Tensor:
        """Return the loss of `size` samples as it counts in a step of `total` samples; call backward on the result.

        A mean loss is multiplied by size * steps / total, which is 1 where all micro-batches have the same size.
        """
        size, total = whole_number("size", size), plain(total)
        if self.reduction == "sum" or size * self.steps == total:
            return loss
        return loss * (size * self.steps / total)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clear the gradients, with the arguments of the wrapped optimizer, before a step's first micro-batch."""
        if self.accumulated == 0:
            self.optimizer.zero_grad(*args, **kwargs)

    def step(self, closure: Closure | None = None) -> Any:
        """Count a micro-batch, and step the wrapped optimizer if it is the last one of a step.

        closure: evaluates this micro-batch, and is evaluated now. An optimizer that evaluates more than once, such as
        LBFGS, has those of all micro-batches evaluated again, so they keep their data: `partial(closure, x, y)`.

        Returns this micro-batch's loss, or what the wrapped optimizer returned for that of all of them.
        """
        loss = None
        if closure is not None:
            if len(self._losses) < self.accumulated:
                raise ValueError(f"closures: {len(self._losses)}, micro-batches: {self.accumulated}; give all or none")
            with torch.enable_grad():
                loss = closure()
            self._closures.append(closure)
            self._losses.append(loss.detach() if isinstance(loss, Tensor) else loss)
        if "found_inf" in vars(self):  # for the time of this call, by GradScaler.step
            self._unscale()
        self.accumulated += 1
        self.stepped = False
        if self.accumulated < self.steps:
            return loss
        try:
            return self._step_with_all(closure)
        finally:
            self._begin()

    def _step_with_all(self, closure: Closure | None) -> Any:
        """Step the wrapped optimizer, unless a GradScaler found a gradient that is not finite."""
        for parameter, gradient in self._unscaled.items():
            parameter.grad = gradient
        if self._found_inf:
            return None
        self._average()
        found = self.optimizer.step() if closure is None else self.optimizer.step(self._whole())
        self.stepped = True
        return found

    def _parameters(self) -> Iterator[Tensor]:
        for group in self.optimizer.param_groups:
            yield from group["params"]

    @torch.no_grad()
    def _average(self) -> None:
        """Divide the sum of the micro-batches' gradients, for a mean loss."""
        gradients = [parameter.grad for parameter in self._parameters() if parameter.grad is not None]
        if gradients and self.reduction == "mean" and self.steps > 1:
            torch._foreach_div_(gradients, self.steps)

    @torch.no_grad()
    def _unscale(self) -> None:
        """Take the gradients of the last micro-batch, without their scale."""
        self._found_inf = self._found_inf + self.found_inf  # not +=, which would write to the scaler's
        for parameter in self._parameters():
            if parameter.grad is None:
                continue
            if parameter.grad.dtype is torch.float16:
                raise ValueError("gradients: float16 with a GradScaler, limit: float32; keep parameters in float32")
            scale = 1.0 if self.grad_scale is None else self.grad_scale.to(parameter.grad.device)  # None: by unscale_()
            gradient = parameter.grad / scale
            if parameter in self._unscaled:
                gradient += self._unscaled[parameter]
            self._unscaled[parameter] = gradient
            parameter.grad = None

    # --- closures ---

    def _whole(self) -> Closure:
        """The closure of the whole step. Its first evaluation was that of the micro-batches, one after the other."""
        is_evaluated = True

        def whole() -> Any:
            nonlocal is_evaluated
            if not is_evaluated:
                self._evaluate()
            is_evaluated = False
            if any(loss is None for loss in self._losses):
                return None
            return sum(self._losses) / (self.steps if self.reduction == "mean" else 1)

        return whole

    def _evaluate(self) -> None:
        """Evaluate all micro-batches at the weights that the wrapped optimizer tries."""
        num_distinct = len({_data_of(closure) for closure in self._closures})
        if num_distinct < self.steps:
            raise RuntimeError(
                f"{type(self.optimizer).__name__} evaluates again: {num_distinct} closures, micro-batches: {self.steps}"
                "; give each its data, functools.partial(closure, x, y), and resume where accumulated is 0"
            )
        self.accumulated, self._losses = 0, []
        for closure in self._closures:
            with torch.enable_grad():
                loss = closure()  # its zero_grad() clears before the first one only
            self._losses.append(loss.detach() if isinstance(loss, Tensor) else loss)
            self.accumulated += 1
        self._average()

    # --- state ---

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state, and "accumulation": the micro-batches of a step that is not complete.

        The wrapped optimizer may load it as well; it ignores the entry.
        """
        return {**self.optimizer.state_dict(), "accumulation": self._saved()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class, or of the wrapped optimizer's. Gradients are then those of the state, or none."""
        saved = state_dict.get("accumulation", {"accumulated": 0})
        if saved["accumulated"] and (saved["steps"], saved["reduction"]) != (self.steps, self.reduction):
            raise ValueError(
                f"steps, reduction: {self.steps}, {self.reduction}, limit: the state's {saved['steps']}, "
                f"{saved['reduction']} in the middle of a step; give these, or save where accumulated is 0"
            )
        self.optimizer.load_state_dict(state_dict)
        self._restore(saved)

    def _saved(self) -> dict[str, Any]:
        """The step so far, with parameters by their index."""
        saved: dict[str, Any] = {"steps": self.steps, "reduction": self.reduction, "accumulated": self.accumulated}
        if self.accumulated:
            parameters = list(enumerate(self._parameters()))
            saved["gradients"] = {i: each.grad for i, each in parameters if each.grad is not None}
            saved["unscaled"] = {i: self._unscaled[each] for i, each in parameters if each in self._unscaled}
            saved["found_inf"] = float(self._found_inf)
            saved["losses"] = list(self._losses)
        return saved

    def _restore(self, saved: dict[str, Any]) -> None:
        self._begin()
        self.stepped = False
        self.accumulated = saved["accumulated"]
        gradients, unscaled = saved.get("gradients", {}), saved.get("unscaled", {})
        for i, parameter in enumerate(self._parameters()):
            parameter.grad = gradients[i].to(parameter.device, copy=True) if i in gradients else None
            if i in unscaled:
                self._unscaled[parameter] = unscaled[i].to(parameter.device, copy=True)
        self._found_inf = saved.get("found_inf", 0.0)
        self._losses = list(saved.get("losses", ()))

    def __getstate__(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer, "accumulation": self._saved()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        saved = state["accumulation"]
        self.optimizer, self.steps, self.reduction = state["optimizer"], saved["steps"], saved["reduction"]
        self._restore(saved)


def _data_of(closure: Any) -> Hashable:
    """The variables and arguments that a closure reads; evaluated again, two that have the same ones do the same."""
    if isinstance(closure, partial):
        return (_data_of(closure.func), *map(id, closure.args), *map(id, closure.keywords.values()))
    if isinstance(closure, MethodType):
        return (closure.__func__, id(closure.__self__))
    if isinstance(closure, FunctionType):
        arguments = [*(closure.__defaults__ or ()), *(closure.__kwdefaults__ or {}).values()]
        return (closure.__code__, *map(id, arguments), *map(id, closure.__closure__ or ()))
    return id(closure)
