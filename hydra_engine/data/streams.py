"""Random streams: each task has its own, and what it draws does not depend on who else runs.

The process has one CPU generator, one `random` and one `numpy.random`. Who draws from the last two runs with the task's
states installed, under one lock. A layer's draws from torch go to the task's own generator instead, one by one,
without a lock; how, and a loader's, as `hydra_engine/data/draws.py` says.
"""

from __future__ import annotations

import hashlib
import math
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from partitioners.measure import draws_random

TORCH = "torch's generator"
MOST_S = 0.5  # that a turn which may end keeps another thread waiting


def random_from_state(saved: Mapping[str, Any]) -> RandomState:
    """Make a random stream's states of such a dict; raises ValueError where one is missing, or there is one more."""
    if saved.keys() != set(RandomState._fields):
        raise ValueError(
            f"a random stream's states are {list(saved)}, expected {list(RandomState._fields)}; resume with the "
            f"hydra_engine that saved them"
        )
    return RandomState(**saved)


def copied(state: Any, made: dict[int, Tensor] | None = None) -> Any:
    """Copy state that goes on changing: its tensors go to DRAM of their own, strides kept, one for each object.

    Dicts, lists, tuples, sets and numpy arrays are copied as what they are; all else is kept. made: copies by object.
    """
    made = {} if made is None else made
    if isinstance(state, Tensor):
        if id(state) not in made:
            made[id(state)] = state.detach().to("cpu", copy=True)
        return made[id(state)]
    if isinstance(state, dict):
        rebuilt = state.copy()  # an OrderedDict stays one, a defaultdict keeps its default
        for key, each in state.items():  # one by one: a Counter's update adds
            rebuilt[key] = copied(each, made)
        return rebuilt
    if type(state) in (list, tuple):
        return type(state)(copied(each, made) for each in state)
    return state.copy() if isinstance(state, (np.ndarray, set)) else state


def stream_seed(seed: int, step: int, micro_batch: int) -> int:
    """Seed of the random stream of one micro-batch (`accumulation_steps` > 1), in [0, 2**63).

    Keyed by task seed, step and micro-batch, so that it does not matter which device runs it or when.
    """
    digest = hashlib.blake2b(f"{seed}:{step}:{micro_batch}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class RandomState(NamedTuple):
    """States of torch's CPU generator, `random`, `numpy.random` and a device's. Never written to: replaced."""

    torch: Tensor
    python: tuple[Any, ...]
    numpy: Any
    device: int | bytes = 0  # the seed, until something was drawn on a device

    def same_as(self, other: RandomState) -> bool:
        """Return True if nothing was drawn between the two."""
        return self.same_in_torch(other) and self.same_outside_torch(other)

    def same_in_torch(self, other: RandomState) -> bool:
        """Return True if nothing was drawn from torch, which no other thread does for a task."""
        return torch.equal(self.torch, other.torch) and self.device == other.device

    def same_outside_torch(self, other: RandomState) -> bool:
        """Return True if nothing was drawn from `random` and `numpy.random`."""
        return not self.moved_outside_torch(other)

    def moved(self, other: RandomState) -> set[str]:
        """Return the process-wide generators that were drawn from between the two."""
        is_same = torch.equal(self.torch, other.torch)
        return self.moved_outside_torch(other) | (set() if is_same else {TORCH})

    def moved_outside_torch(self, other: RandomState) -> set[str]:
        """Return those of `random` and `numpy.random` that were drawn from between the two."""
        is_same = self.numpy[2:] == other.numpy[2:] and bool(np.array_equal(self.numpy[1], other.numpy[1]))
        moved = {"`random`": self.python != other.python, "`numpy.random`": not is_same}
        return {name for name, has_moved in moved.items() if has_moved}


# torch makes the tensor of a generator's state while it holds the generator's lock. Other threads wait for that lock
# without letting go of the interpreter's. Where the tensor sets off a garbage collection that closes a file, the first
# thread waits for the interpreter and the second for the generator, for ever. So one thread at a time asks.
_ASKING = threading.RLock()
os.register_at_fork(before=_ASKING.acquire, after_in_parent=_ASKING.release, after_in_child=_ASKING.release)


def ask(method: Callable[..., Any], *args: Any) -> Any:
    """Call a method of a generator that several threads use."""
    with _ASKING:
        return method(*args)


def capture() -> RandomState:
    """The process-wide states, also in a thread whose draws go elsewhere: `torch.get_rng_state` has what stands in."""
    return RandomState(ask(torch.default_generator.get_state), random.getstate(), np.random.get_state())


def install(state: RandomState) -> None:
    """Make these the process-wide states."""
    ask(torch.default_generator.set_state, state.torch)
    random.setstate(state.python)
    np.random.set_state(state.numpy)


def seeded(seed: int) -> Tensor:
    """Return the state of a fresh torch generator with this seed."""
    return torch.Generator().manual_seed(seed).get_state()


class Stream:
    """A task's random stream; its `state` moves as the body of `installed` draws."""

    def __init__(self, state: RandomState) -> None:
        self.state = state


class Turn:
    """One thread's use of the process-wide generators, maybe with a stream's states installed."""

    def __init__(self, stream: Stream | None, *, may_end: bool) -> None:
        self.thread, self.since_s = threading.get_ident(), time.monotonic()
        self.stream, self.may_end = stream, may_end
        self.outside: RandomState | None = None  # states that it has replaced


class GlobalGenerators:
    """Lets one thread at a time have the process-wide generators; reentrant, since a locked layer may run a locked op.

    `take_from` ends the turn of a thread that hangs, with the states of before. What cannot be prevented: should the
    thread wake up one day, it may still draw from what is another task's by then, or the user's.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()  # held for moments
        self._turns: list[Turn] = []  # of one thread, each inside the one before

    @property
    def is_free(self) -> bool:
        return not self._turns

    @contextmanager
    def turn(
        self, stream: Stream | None = None, *, may_end: bool = False, patience_s: float | None = None
    ) -> Iterator[Turn]:
        """Have them for the body, which moves the stream.

        may_end: after `MOST_S`, if another thread waits. patience_s: after which the body runs without them.
        """
        turn = Turn(stream, may_end=may_end)
        try:  # an exception out of a signal handler finds the turn noted, or not begun
            with self._changed:
                if self._wait(patience_s):
                    turn.since_s = time.monotonic()
                    turn.outside = None if stream is None else capture()
                    self._turns.append(turn)
                    if stream is not None:
                        install(stream.state)
            yield turn
        finally:
            with self._changed:
                if turn in self._turns:
                    self._end(turn)

    def _wait(self, patience_s: float | None) -> bool:
        until_s = math.inf if patience_s is None else time.monotonic() + patience_s
        while self._turns and self._turns[0].thread != threading.get_ident():
            turn, now_s = self._turns[0], time.monotonic()
            ends_s = turn.since_s + MOST_S if turn.may_end else math.inf
            if ends_s <= now_s:
                self.take_from(turn.thread)
            elif until_s <= now_s:
                return False
            else:
                next_s = min(ends_s, until_s)
                self._changed.wait(None if next_s == math.inf else next_s - now_s)
        return True

    def _end(self, turn: Turn) -> None:
        self._turns.remove(turn)
        if turn.stream is not None and turn.outside is not None:
            turn.stream.state = capture()._replace(device=turn.stream.state.device)
            install(turn.outside)
        self._changed.notify_all()

    def take_from(self, thread: int | None) -> None:
        """End this thread's turn, if it has one; it may still be at work."""
        with self._changed:
            for turn in reversed([each for each in self._turns if each.thread == thread]):
                self._end(turn)

    def outside(self) -> RandomState | None:
        """Return the states that no stream has; None while a turn has replaced them."""
        with self._changed:
            return None if self._turns else capture()


GLOBAL_GENERATORS = GlobalGenerators()  # the process's, which no object of ours can own


def installed(stream: Stream) -> AbstractContextManager[Turn]:
    """Run the body with the stream as the process-wide generators."""
    return GLOBAL_GENERATORS.turn(stream)


@cache
def with_generator(func: Any) -> Any | None:
    """The overload of a seeded op that takes a generator, or None."""

    def names(overload: Any) -> list[str]:
        return [argument.name for argument in overload._schema.arguments]

    if "generator" in names(func):
        return func
    packet, wanted = func.overloadpacket, sorted([*names(func), "generator"])
    overloads = (getattr(packet, name) for name in packet.overloads())
    return next((each for each in overloads if sorted(names(each)) == wanted), None)


def draw_from(generator: torch.Generator, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run a seeded op of the CPU with draws from this generator instead of the process's."""
    if (overload := with_generator(func)) is not None:
        return overload(*args, **{**kwargs, "generator": generator})
    with GLOBAL_GENERATORS.turn():  # it takes no generator
        outside = ask(torch.default_generator.get_state)
        ask(torch.default_generator.set_state, generator.get_state())
        try:
            return func(*args, **kwargs)
        finally:
            generator.set_state(ask(torch.default_generator.get_state))
            ask(torch.default_generator.set_state, outside)


def is_elsewhere(values: Iterable[Any]) -> bool:
    """Return True if an op with these arguments draws on a device and not on the CPU."""
    devices = (value.device if isinstance(value, Tensor) else value for value in values)
    return any(isinstance(device, torch.device) and device.type != "cpu" for device in devices)


class TaskGenerator(TorchDispatchMode):  # type: ignore[no-untyped-call]  # its __init_subclass__
    """Sends what seeded ops draw to a task's own generator, unless they were given one.

    An op that takes none runs with the state installed in the global generator, under the lock.
    """

    def __init__(self, start: torch.Generator | Tensor) -> None:
        """`start`: the task's generator, or the state that it has; then one is made once something draws."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._start = start
        self.drew_elsewhere = False  # on a device, whose own generator has the task's state installed

    @property
    def generator(self) -> torch.Generator:
        if isinstance(self._start, Tensor):
            generator = torch.Generator()
            generator.set_state(self._start)
            self._start = generator
        return self._start

    @property
    def state(self) -> Tensor:
        """The stream's state, which is the one that it began with where nothing was drawn. Not to be written to."""
        return self._start if isinstance(self._start, Tensor) else self._start.get_state()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not draws_random(func, args, kwargs):
            return func(*args, **kwargs)
        if is_elsewhere((*args, *kwargs.values())):
            self.drew_elsewhere = True
            return func(*args, **kwargs)
        return draw_from(self.generator, func, args, kwargs)
