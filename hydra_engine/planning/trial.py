"""Tries a task's optimizer on small copies of its parameters, before any work: what it keeps, and what it must not do.

One that is not torch's own steps all parameters at once, as in the plain loop, and a copy of it by parts, as a run
steps shards; both have to end with the same weights and states, at several scales of gradients. What a step changes
beside the parameters' states is refused, too: a counter that matters at the tenth step, say.
"""

from __future__ import annotations

import copy
import inspect
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from hydra_engine.data import Stream, capture, installed
from hydra_engine.host import (
    TORCHS,
    ModelLayout,
    Slot,
    has_step_hooks,
    is_moment,
    is_torchs,
    kept_groups,
    make_optimizer,
    part_of,
    step_natively,
)
from hydra_engine.native import NarrowUpdate
from hydra_engine.tasks import ModelTask
from partitioners.reach import PlainState, plain_state

NUM_TIMED_STEPS = 5

# Of the gradients of each step: what clips or scales by norms does it in one of them.
SCALES = (1.0, 1e4, 1e-3)
MOST_ELEMENTS = 8  # in a dimension


def trial_state_bytes(task: ModelTask, name: str, layout: ModelLayout) -> dict[int, int]:
    """Bytes of the optimizer's state by slot, from a step on tiny parameters of the same number of dimensions.

    A state tensor of the parameter's shape is taken to grow with it, any other to stay as it is. Also the first time
    that the factories run: what they raise is raised before any work starts. What they draw is the caller's.

    Refuses, with ValueError, an optimizer that stepping shard by shard would change, unless the task is stepped as a
    whole.
    """
    return _Trial(task, name, layout.trainable_slots()).run()


class _Copy(NamedTuple):
    """An optimizer over tiny parameters."""

    parameters: list[nn.Parameter]
    optimizer: torch.optim.Optimizer

    def results(self) -> PlainState:
        """Return weights and states, to be compared."""
        states = [self.optimizer.state.get(each, {}) for each in self.parameters]
        return plain_state(("weights", [each.data for each in self.parameters]), ("states", states))

    def beside(self) -> PlainState:
        """Return what the optimizer keeps beside the states of its parameters."""
        own, mine = vars(self.optimizer), {id(each) for each in self.parameters}
        roots = [(name, each) for name, each in own.items() if name == "param_groups" or name not in TORCHS]
        others = {repr(key): state for key, state in self.optimizer.state.items() if id(key) not in mine}
        return plain_state(*roots, ("state", others), copied_only=True, besides=mine)


class _Trial:
    def __init__(self, task: ModelTask, name: str, slots: Sequence[Slot]) -> None:
        self._task, self._name, self._slots = task, name, slots
        generator = torch.Generator().manual_seed(0)

        def drawn(scale: float = 1.0) -> Iterator[Tensor]:
            for slot in slots:
                sizes = [min(size, MOST_ELEMENTS) for size in slot.shape]
                kind = torch.complex64 if slot.dtype.is_complex else torch.float32
                yield (torch.randn(sizes, dtype=kind, generator=generator) * scale).to(slot.dtype)

        self._weights = list(drawn())
        self._gradients = [list(drawn(scale)) for scale in SCALES]
        self._kind = ""  # of the optimizer, for messages

    def run(self) -> dict[int, int]:
        plain = self._made()
        by_shard = self._task.optimizer_scope == "shard"
        stepped = {id(parameter) for group in plain.optimizer.param_groups for parameter in group["params"]}
        left = [s.name for s, p in zip(self._slots, plain.parameters, strict=True) if id(p) not in stepped]
        if left and self._task.max_grad_norm is not None:
            raise ValueError(
                f"{self._name}: optimizer: {self._kind} leaves out parameter {left[0]}, whose gradients the plain loop "
                f"would never set back and go on adding up in the norm that max_grad_norm limits; freeze what is not "
                f"trained (requires_grad_(False)), or leave max_grad_norm out"
            )
        if by_shard and has_step_hooks(plain.optimizer):
            raise self._refused("has step hooks, which would be called once for each shard")
        if is_torchs(plain.optimizer):
            self._step(plain, self._gradients[0])
        else:
            self._compare(plain, self._made(), by_shard=by_shard)
        return self._state_bytes(plain)

    def _compare(self, plain: _Copy, engine: _Copy, *, by_shard: bool) -> None:
        """Step two optimizers that may do anything, the second one by parts where a run does it."""
        for index, gradients in enumerate(self._gradients):
            before = plain.beside()
            self._step(plain, gradients)
            after = plain.beside()
            changed = [path for path in before | after if before.get(path) != after.get(path)]
            if changed and by_shard:
                raise self._refused(
                    f"keeps state in its groups or attributes instead of in optimizer.state of each parameter "
                    f"({', '.join(changed[:3])}), and would lose it when shards are stepped one by one"
                )
            self._step(engine, gradients, num_parts=2 + index if by_shard else 1)
            if plain.results() == engine.results():
                continue
            if by_shard:
                raise self._refused(
                    "gives other results shard by shard than for all parameters at once: it couples them, or draws "
                    "random numbers"
                )
            raise ValueError(
                f"{self._name}: optimizer: two {self._kind} that the factory made alike give other results from the "
                f"same gradients, so that they depend on something outside, or draw random numbers; keep what they "
                f"need in the optimizer, and draw from a torch.Generator of its own"
            )

    def _made(self) -> _Copy:
        task = self._task
        tiny = [nn.Parameter(weight.clone()) for weight in self._weights]
        optimizer = make_optimizer(task, {s.name: parameter for s, parameter in zip(self._slots, tiny, strict=True)})
        self._kind, mine = type(optimizer).__name__, {id(parameter) for parameter in tiny}
        if any(id(parameter) not in mine for group in optimizer.param_groups for parameter in group["params"]):
            # The factory builds groups of its own from the model, which must not be stepped.
            optimizer = self._moved_to(optimizer, tiny)
        _check_scheduler(None if task.lr_scheduler is None else task.lr_scheduler(optimizer))
        return _Copy(tiny, optimizer)

    def _moved_to(self, optimizer: torch.optim.Optimizer, tiny: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        """A copy of an optimizer, with tiny parameters in the place of the model's, and state of their size."""
        model = self._task.model
        memo: dict[int, Any] = {id(each): each for each in (*model.parameters(), *model.buffers())}
        for slot, parameter in zip(self._slots, tiny, strict=True):
            memo[id(slot.parameter)] = parameter
            for value in optimizer.state.get(slot.parameter, {}).values():
                if isinstance(value, Tensor) and value.shape == slot.parameter.shape:
                    memo[id(value)] = value[tuple(slice(size) for size in parameter.shape)].clone()
        made: torch.optim.Optimizer = object.__new__(type(optimizer))
        memo[id(optimizer)] = made
        try:
            # All its attributes, of which its own `__deepcopy__` takes three.
            made.__dict__ = {name: copy.deepcopy(value, memo) for name, value in vars(optimizer).items()}
        except Exception as error:
            raise ValueError(
                f"{self._name}: optimizer: {self._kind} is over other parameters than its factory was given, and "
                f"cannot be copied to be tried ({type(error).__name__}: {error}); let the factory build it over the "
                f"parameters that it is given"
            ) from error
        return made

    def _step(self, made: _Copy, gradients: Sequence[Tensor], num_parts: int = 1) -> None:
        """Step all parameters at once or, as a run does it, by parts: from a record of the groups, in another order.

        All parameters have gradients meanwhile, as shards that are stepped side by side have.
        """
        groups = kept_groups(made.optimizer)
        for first in reversed(range(num_parts)):
            for parameter, gradient in zip(made.parameters, gradients, strict=True):
                parameter.grad = gradient.clone()
            mine = {id(parameter) for parameter in made.parameters[first::num_parts]}
            parts = [{**group, "params": [p for p in group["params"] if id(p) in mine]} for group in groups]
            try:
                (made.optimizer if num_parts == 1 else part_of(made.optimizer, parts)).step()
            except Exception as error:
                if num_parts > 1:
                    raise self._refused(
                        f"cannot be stepped shard by shard: over some of its parameters it raised "
                        f"{type(error).__name__} ({error})"
                    ) from error
                raise ValueError(
                    f"{self._name}: optimizer: {self._kind} raised {type(error).__name__} in a trial step on small "
                    f"parameters ({error}); choose one that steps from dense gradients alone"
                ) from error

    def _state_bytes(self, plain: _Copy) -> dict[int, int]:
        narrows = self._task.moments != "float32"
        return {
            slot.index: sum(
                _grown_bytes(value, parameter, slot.shape) // (2 if narrows and is_moment(value, parameter) else 1)
                for value in plain.optimizer.state.get(parameter, {}).values()
                if isinstance(value, Tensor)
            )
            for slot, parameter in zip(self._slots, plain.parameters, strict=True)
        }

    def _refused(self, why: str) -> ValueError:
        return ValueError(
            f"{self._name}: optimizer: {self._kind} {why}; choose one that steps each parameter from its own gradient "
            f"and state, or set optimizer_scope='task'"
        )


def update_bytes_per_s(task: ModelTask) -> float:
    """Bytes of parameters that the task's optimizer steps in a second on this thread, measured on one of 1 MiB."""
    parameter = nn.Parameter(torch.zeros(2**9, 2**9))
    name = next(name for name, each in task.model.named_parameters() if each.requires_grad)
    optimizer = make_optimizer(task, {name: parameter})
    if any(each is not parameter for group in optimizer.param_groups for each in group["params"]):
        return math.inf  # the factory builds groups of its own from the model, which must not be stepped
    parameter.grad = torch.zeros_like(parameter)
    update = NarrowUpdate(parameter, parameter.grad, None)
    with installed(Stream(capture())):  # an optimizer may draw
        optimizer.step()  # makes its state
        step_natively(optimizer, [update])  # compares its bits
        start_s = time.perf_counter()
        for _ in range(NUM_TIMED_STEPS):
            if step_natively(optimizer, [update]):
                optimizer.step()
        seconds = time.perf_counter() - start_s
    return NUM_TIMED_STEPS * parameter.nbytes / seconds


def _check_scheduler(scheduler: Any) -> None:
    if scheduler is None:
        return
    if not isinstance(scheduler, LRScheduler):
        raise TypeError(f"lr_scheduler: the factory returned a {type(scheduler).__name__}, not an LRScheduler")
    passed_on = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(scheduler.step).parameters.values()
    wanted = [p.name for p in parameters if p.default is p.empty and p.kind not in passed_on]
    if wanted:
        raise ValueError(
            f"lr_scheduler: {type(scheduler).__name__} wants {', '.join(wanted)} at each step, which nobody passes; "
            f"choose one that follows the number of steps or epochs"
        )


def _grown_bytes(value: Tensor, tiny: Tensor, shape: Sequence[int]) -> int:
    """Bytes of a state tensor for a parameter of this shape: it grows along every dimension in which it was as tiny."""
    if value.dim() != tiny.dim():
        return value.nbytes
    sizes = [full if size == small else size for size, small, full in zip(value.shape, tiny.shape, shape, strict=True)]
    return value.element_size() * math.prod(sizes)
