"""Sends what a task's loaders, callbacks and layers draw to its random stream, whoever else draws at the same time.

What a thread draws from torch's global generator is sent to the task's, operation by operation. `random` and
`numpy.random` cannot be redirected: code that was seen to draw from them in its first calls is called by one thread at
a time, with the task's states installed. What moves them otherwise may be another thread: a message says so.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import _pop_mode, _push_mode
from torch.utils._python_dispatch import _disable_current_modes

from hydra_engine.capture import draw_apart_in
from hydra_engine.data.streams import (
    GLOBAL_GENERATORS,
    MOST_S,
    TORCH,
    RandomState,
    Stream,
    TaskGenerator,
    ask,
    seeded,
    with_generator,
)

# torch's own functions read the global generator here, and only C code knows it otherwise.
_TORCH_RANDOM: Any = torch.random
_GLOBAL: torch.Generator = torch.default_generator
# A key of torch's dispatcher that nothing else uses. Where a thread includes it, kernels registered for it come first;
# operations without one fall through to what they always were, at no cost (a dispatch mode makes each of them slow).
# torch has no public key of that kind.
_KEY = "TESTING_ONLY_GenericMode"

NUM_WATCHED = 2  # calls of one kind: opening an iterator and reading its first batch


class UserDraws:
    """Sends what one kind of a task's user code draws to the task's stream: its loader, `split=`, its callbacks.

    The first calls have the process-wide generators to themselves, with the task's states installed; so have all later
    ones once `random` or `numpy.random` has moved in one of the first. Later draws there are the process's.
    """

    def __init__(self, name: str, *, alone: bool = False) -> None:
        """alone: its user says that it draws where nobody would expect it, such as in threads of its own."""
        self._name = name
        self._is_alone = alone
        self._num_calls: Counter[str] = Counter()  # by what is called
        self._moved: set[str] = set()  # generators that moved, not in a call's own turn
        self.drawn: set[str] = set()  # which of `random` and `numpy.random` it was seen to draw from

    @property
    def message(self) -> str | None:
        """Doubts about what was drawn, for the end of a run; the same of all of a task's user code."""
        if not self._moved:
            return None
        return (
            f"{self._name}: `random`, `numpy.random` or torch's generator moved past the task's random stream while "
            f"its loader was read or a callback called. If another thread drew, it matters where the task draws there. "
            f"If the loader or a callback did, for the first time or in a thread of its own, results may differ in "
            f"each run: let it draw from a generator of its own; loader_alone=True covers what is drawn during a read"
        )

    def resumed(self, before: RandomState, after: RandomState) -> None:
        """Note what the reads of a resume drew, which are made elsewhere."""
        self._num_calls[""] = -1  # the next read may only find the end of an epoch
        self.drawn |= before.moved_outside_torch(after)

    @contextmanager
    def drawing(
        self, stream: Stream, what: str = "", *, is_call: bool = False, is_last: bool = False
    ) -> Iterator[None]:
        """Run the body, whose draws move the stream.

        what: is called. is_call: a callback is, which may wait for another task. is_last: the task draws nothing after.
        """
        self._num_calls[what] += 1
        is_apart = not is_last and (self._is_alone or bool(self.drawn) or self._num_calls[what] <= NUM_WATCHED)
        mode = None if self._is_alone else TaskGenerator(stream.state.torch)
        try:
            with self._apart(stream, is_call) if is_apart else self._beside(), Redirected(mode):
                yield
        finally:
            if mode is not None:
                stream.state = stream.state._replace(torch=mode.state)

    @contextmanager
    def _apart(self, stream: Stream, is_call: bool) -> Iterator[None]:
        before = stream.state
        try:
            # Another task's loader may hang in its turn, which is no matter to a callback that draws nothing.
            patience_s = MOST_S if is_call and not self.drawn else None
            with GLOBAL_GENERATORS.turn(stream, may_end=is_call, patience_s=patience_s):
                yield
        finally:
            moved = before.moved(stream.state)
            self.drawn |= moved - {TORCH}
            if not self._is_alone:  # else it is this code's, in whatever thread
                self._moved |= moved & {TORCH}

    @contextmanager
    def _beside(self) -> Iterator[None]:
        before = GLOBAL_GENERATORS.outside()
        try:
            yield
        finally:
            now = GLOBAL_GENERATORS.outside()
            if before is not None and now is not None:
                self._moved |= before.moved(now)


@contextmanager
def drawing_apart(seed: int | None = None) -> Iterator[None]:
    """Let what the body draws from torch, in this thread, move no stream of others, whatever trains at the same time.

    seed: of the body's own stream; None: it begins as the process's.
    """
    with Redirected(TaskGenerator(ask(_GLOBAL.get_state) if seed is None else seeded(seed))):
        yield


@contextmanager
def drawing_as_usual() -> Iterator[None]:
    """Run the body, which is the engine's, where a callback has called it: it keeps streams apart by itself."""
    if _HERE.mode is None:
        yield
        return
    GLOBAL_GENERATORS.take_from(threading.get_ident())  # readers of other threads draw
    with Redirected(None), _disable_current_modes():  # of who watches the callback
        modes: list[Any] = [_pop_mode() for _ in range(torch._C._len_torch_function_stack())]  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for mode in reversed(modes):
                _push_mode(mode)  # type: ignore[no-untyped-call]


# -- torch's global generator


class _Here(threading.local):
    """The generator of this thread, as `Redirected` has it."""

    mode: TaskGenerator | None = None


_HERE = _Here()


class Redirected:
    """Sends the body's draws, in this thread, to a task's generator; None: to the process's.

    The mode sees only operations that may draw: as a dispatch mode of the whole body it would make all others slow.
    `torch.manual_seed`, `torch.get_rng_state` and the like mean the task's generator, too.
    """

    def __init__(self, mode: TaskGenerator | None) -> None:
        self._mode = mode
        self._outer: TaskGenerator | None = None

    def __enter__(self) -> TaskGenerator | None:
        if not _KNOWN:
            register_draws()
        _USERS.add(1)
        self._outer, _HERE.mode = _HERE.mode, self._mode
        torch._C._dispatch_tls_set_dispatch_key_included(_THE_KEY, _HERE.mode is not None)
        return _HERE.mode

    def __exit__(self, *exc: object) -> None:
        _HERE.mode = self._outer
        torch._C._dispatch_tls_set_dispatch_key_included(_THE_KEY, _HERE.mode is not None)
        _USERS.add(-1)


draw_apart_in(lambda: Redirected(TaskGenerator(seeded(0))))


class _ByThread:
    """Stands for the global generator in torch's functions: that of the thread that asks, or itself."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_GLOBAL if _HERE.mode is None else _HERE.mode.generator, name)


class _Users:
    """Counts the threads with a generator of their own: only while there are any torch's functions ask for it."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._number = 0

    def add(self, number: int) -> None:
        with self._mutex:
            self._number += number
            _TORCH_RANDOM.default_generator = _ByThread() if self._number else _GLOBAL


_USERS = _Users()


def _leave_in_child() -> None:
    """Give a process that was forked by a thread that reads, a loader's worker, its generator as the global one."""
    mode, _HERE.mode = _HERE.mode, None
    _USERS.__init__()  # type: ignore[misc]  # its lock may have been another thread's
    _TORCH_RANDOM.default_generator = _GLOBAL
    if mode is not None:
        torch._C._dispatch_tls_set_dispatch_key_included(_THE_KEY, False)
        _GLOBAL.set_state(mode.state)


os.register_at_fork(after_in_child=_leave_in_child)


def register_draws() -> None:
    """Register a kernel for every operation that draws, also of libraries that were imported since the last time."""
    with _REGISTERING:
        if not _LIBRARIES:
            others = _LIBRARIES["_"] = _LIBRARY("_", "IMPL")
            others.fallback(torch.library.fallthrough_kernel, _KEY)
        names = set(torch._C._dispatch_get_all_op_names()) - _KNOWN
        for full_name in names:
            _register(full_name)
        _KNOWN.update(names)


def _register(full_name: str) -> None:
    space, _, name = full_name.partition("::")
    base, _, overload = name.partition(".")
    packets = getattr(torch.ops, space)
    if not hasattr(packets, base):
        return
    op = getattr(getattr(packets, base), overload or "default", None)
    if op is None or torch.Tag.nondeterministic_seeded not in op.tags:
        return
    has_parts = torch._C._dispatch_has_kernel_for_dispatch_key(full_name, "CompositeImplicitAutograd")
    # One that is made of others and takes no generator is sent on by what it is made of.
    if with_generator(op) is not None or not has_parts:
        if space not in _LIBRARIES:
            _LIBRARIES[space] = _LIBRARY(space, "IMPL")
        _LIBRARIES[space].impl(name, _kernel(op), _KEY)


_THE_KEY: Any = torch._C._parse_dispatch_key(_KEY)
_LIBRARY: Any = torch.library.Library
_REGISTERING = threading.Lock()
_LIBRARIES: dict[str, Any] = {}  # by namespace; torch forgets the kernels with these
_KNOWN: set[str] = set()  # names of operations that were looked at


def _kernel(op: Any) -> Callable[..., Any]:
    include = torch._C._dispatch_tls_set_dispatch_key_included

    def draw(*args: Any, **kwargs: Any) -> Any:
        mode, generator = _HERE.mode, kwargs.get("generator")
        is_own = isinstance(generator, torch.Generator) and generator._cdata != _GLOBAL._cdata  # type: ignore[attr-defined]
        include(_THE_KEY, False)
        try:
            if mode is None or is_own:
                return op(*args, **kwargs)
            with mode:
                return op(*args, **kwargs)
        finally:
            include(_THE_KEY, True)

    return draw
