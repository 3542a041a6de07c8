"""Sends what a loader or a layer draws to its task's random stream, whoever else reads and draws meanwhile.

What a thread draws from torch's global generator is sent to the task's, operation by operation, so that loaders are
read side by side, and layers run beside them. `random` and `numpy.random` cannot be redirected: a loader that was seen
to draw from them is read alone, with the task's states installed. What moves them elsewhere may be another thread: a
message says so.
"""

from __future__ import annotations

import inspect
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import contextmanager, nullcontext
from enum import Enum
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.overrides import _pop_mode, _push_mode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data.dataloader import _BaseDataLoaderIter  # a loader's iterator has no public class

from hydra_engine.capture import draw_apart_in
from hydra_engine.data.streams import (
    GLOBAL_GENERATORS,
    RandomState,
    Stream,
    TaskGenerator,
    ask,
    capture,
    draw_from,
    drawn_by_others,
    install,
    installed,
    is_elsewhere,
    put_back_outside_torch,
    seeded,
    with_generator,
)
from hydra_engine.system import Hold, TakenAway

# torch's own functions read the global generator here, and only C code knows it otherwise.
_TORCH_RANDOM: Any = torch.random
_GLOBAL: torch.Generator = torch.default_generator
# A key of torch's dispatcher that nothing else uses. Where a thread includes it, kernels registered for it come first;
# operations without one fall through to what they always were, at no cost (a dispatch mode makes each of them slow).
_KEY = "TESTING_ONLY_GenericMode"

_DEPTH = 3  # of attributes, from a loader to a thread

# Opening an iterator and reading its first batch; the first calls of a callback's method.
NUM_WATCHED = 2
# A callback's first calls keep others from `random` and `numpy.random` no longer than this.
FIRST_CALLS_S = 0.5
NUM_OUTSIDE_TORCH = 2  # generators: of `random` and `numpy.random`

_OWN = "let the callback draw from a generator of its own (random.Random(), numpy.random.default_rng())"
_REMEDY = (
    "let it draw from a generator of its own, or set loader_alone=True on the task, which reads it alone from the "
    "beginning"
)


class _Company(Enum):
    """The company in which a loader is read."""

    WATCHED = "watched"  # alone, and looked at: its first reads, and all reads since it came into doubt
    BESIDE = "beside"  # beside other loaders: it was seen to draw from torch at most
    ALONE = "alone"  # it draws from generators that cannot be redirected, or its user says so


class LoaderDraws:
    """Reads a loader so that every draw is the plain loop's, alone or beside others.

    The first reads are alone and watched. After them a loader that drew at most from torch is read beside others; if
    `random`, `numpy.random` or torch's own state moves meanwhile, it is watched again, and a message says so: another
    thread may have drawn.
    """

    def __init__(self, name: str, *, alone: bool, what: str = "its loader") -> None:
        """`what`: the code that draws. alone: its user says that it draws where nobody would expect it."""
        self._name = f"{name}: {what}"
        self._turn = _Company.ALONE if alone else _Company.WATCHED
        self._num_watched = 0
        self._doubt: str | None = None  # what somebody did that may have been this loader
        self.drawn: set[str] = set()  # which of `random` and `numpy.random` it was seen to draw from
        self._num_reads = 0
        self._outside: RandomState | None = None  # as its first read began
        self._is_passed_by = False  # somebody drew from torch in its first reads, and not by this thread
        self._threads: list[str] = []  # that it reads with
        self._begun: set[str] = set()  # threads that were not there before its first reads
        self._others_draw = False  # another thread was seen to draw from torch

    @property
    def message(self) -> str | None:
        """Doubts about it, for the end of a run."""
        if self._threads and self._is_passed_by:
            return (
                f"{self._name} reads in a thread of its own ({', '.join(self._threads)}), and something drew from "
                f"torch's generator meanwhile, past the task's stream: results may be others in each run; draw the "
                f"order in __iter__ itself, or give the sampler a generator of its own"
            )
        if self._doubt is None:
            return None
        return (
            f"{self._name} may have drawn what is others': {self._doubt}; if it did, results are not those of plain "
            f"PyTorch; {_REMEDY}"
        )

    def resumed(self, before: RandomState, after: RandomState) -> None:
        """Note what reads drew that are not watched: those of the process that was saved, and the way back to it."""
        self._num_watched = -1  # the next read may only find the end of an epoch
        self.drawn |= before.moved_outside_torch(after)
        if self.drawn:
            self._turn = _Company.ALONE

    @contextmanager
    def reading(self, stream: Stream) -> Iterator[None]:
        """Run the body, which reads the loader; its draws move the stream."""
        self._num_reads += 1
        others: set[threading.Thread] = set()
        if self._num_reads <= NUM_WATCHED:
            others.update(threading.enumerate())
            self._outside = self._outside or _outside()
        if self._turn is _Company.ALONE:
            before = stream.state
            with installed(stream):
                watch = _Watch()
                with _standing_in(watch) if self._num_reads <= NUM_WATCHED else nullcontext():
                    yield
                if self._num_reads <= NUM_WATCHED:
                    self._is_passed_by |= watch.is_passed_by
            if len(self.drawn) < NUM_OUTSIDE_TORCH:
                self.drawn |= before.moved_outside_torch(stream.state)
        else:
            with self._watched(stream) if self._turn is _Company.WATCHED else self._beside(stream):
                yield
        if self._num_reads <= NUM_WATCHED:
            self._begun |= {each.name for each in threading.enumerate() if each not in others}

    def note_threads(self, *roots: Any) -> None:
        """Look for threads that a loader, or its iterator, reads with; once it has given its first batch."""
        if self._num_reads == NUM_WATCHED:
            self._threads = _threads_of(roots) or sorted(self._begun)
            now = _outside()
            before = now if self._outside is None else self._outside
            is_known = bool(before.torch.numel() and now.torch.numel())
            self._is_passed_by |= is_known and not torch.equal(before.torch, now.torch)

    @contextmanager
    def _watched(self, stream: Stream) -> Iterator[None]:
        with installed(stream):
            before = stream.state
            watch = _Watch()
            with _standing_in(watch):
                yield
            self._num_watched += 1
            self.drawn |= before.moved_outside_torch(capture())
            self._is_passed_by |= watch.is_passed_by
            is_passed_by = watch.is_passed_by
            if is_passed_by or self.drawn:
                self._turn = _Company.ALONE
            elif self._num_watched >= NUM_WATCHED and self._doubt is None:
                self._turn = _Company.BESIDE
        if is_passed_by and "torch's generator" in drawn_by_others():
            self._others_draw = True
            self._doubt = "another thread draws from torch's generator, in the middle of its reads"
            if not watch.drew:
                stream.state = stream.state._replace(torch=before.torch)
            if not self.drawn:
                self._turn = _Company.BESIDE

    @contextmanager
    def _beside(self, stream: Stream) -> Iterator[None]:
        own = _Own(stream.state)
        with GLOBAL_GENERATORS.beside() as turn:
            before = _outside()
            try:
                with _standing_in(own):
                    yield
            finally:
                stream.state = stream.state._replace(torch=own.generator.get_state())
            after = _outside()
            moved = _moved(before, after._replace(torch=before.torch) if self._others_draw else after)
        if moved is None and not turn.is_in_doubt:
            return
        company = "beside others" if turn.had_company else "and it did not in its first batches"
        self._doubt = f"somebody drew from {moved or '`random` or `numpy.random`'} while a batch was read, {company}"
        self._turn = _Company.WATCHED


def _threads_of(roots: Iterable[Any]) -> list[str]:
    """Return names of the threads that these hold, in attributes and in variables of generators; none of torch's."""
    found: dict[int, Any] = {}
    level = list(roots)
    for _ in range(_DEPTH):
        holders = [each for each in level if id(each) not in found and not isinstance(each, _BaseDataLoaderIter)]
        found |= {id(each): each for each in holders}
        level = []
        for each in holders:
            level += getattr(each, "__dict__", {}).values()
            level += inspect.getgeneratorlocals(each).values() if inspect.isgenerator(each) else ()
            level += getattr(each, "_threads", ()) if isinstance(each, Executor) else ()
    threads = (each for each in (*found.values(), *level) if isinstance(each, threading.Thread))
    return sorted({each.name for each in threads if each is not threading.current_thread()})


@contextmanager
def beside_loaders(*, is_call: bool = False) -> Iterator[None]:
    """Run user code of no stream while loaders are read; is_call: it may take long, and nobody waits for its end."""
    with GLOBAL_GENERATORS.beside(is_call=is_call), _standing_in(_Own(_outside())):
        yield


class CallbackDraws:
    """Sends what a task's callbacks draw to the task's stream, as in the plain loop.

    Draws from torch are sent there one by one. For `random` and `numpy.random` a call has the task's states installed,
    and no other user code beside it: the first calls, for moments, and all calls once one was seen to draw there. A
    later draw finds the process's states, which are the task's where nobody has drawn; else the end of the run says so.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._drawn: set[str] = set()
        self._doubts: set[str] = set()
        self._num_calls: Counter[str] = Counter()  # by what is called

    @property
    def message(self) -> str | None:
        """Doubts about them, for the end of a run."""
        if not self._doubts:
            return None
        return (
            f"{self._name}: its callbacks, or another thread meanwhile, may have drawn from "
            f"{' and '.join(sorted(self._doubts))}, which is no part of the task's stream there; if they did, results "
            f"are not those of plain PyTorch; {_OWN}"
        )

    @contextmanager
    def calling(self, stream: Stream, what: str = "", *, is_last: bool = False) -> Iterator[None]:
        """Run the body, which calls the callbacks; what: is called. is_last: the task draws nothing after it."""
        self._num_calls[what] += 1
        own = _Own(stream.state)
        try:
            if not is_last and (self._drawn or self._num_calls[what] <= NUM_WATCHED):
                with self._alone(stream), _standing_in(own):
                    yield
            else:
                with self._beside(stream), _standing_in(own):
                    yield
        finally:
            stream.state = stream.state._replace(torch=own.generator.get_state())

    @contextmanager
    def _alone(self, stream: Stream) -> Iterator[None]:
        before, raised = stream.state, None
        timer = threading.Timer(FIRST_CALLS_S, GLOBAL_GENERATORS.take_from, [threading.get_ident()])
        timer.daemon = True
        try:
            with installed(stream):
                if not self._drawn:  # it may wait for another task
                    timer.start()
                _HERE.timer = timer
                try:
                    yield
                except BaseException as error:
                    raised = error
                timer.cancel()
        except TakenAway:
            stream.state = before
        finally:
            timer.cancel()
            _HERE.timer = None
        self._drawn |= before.moved_outside_torch(stream.state)
        if raised is not None:
            raise raised

    @contextmanager
    def _beside(self, stream: Stream) -> Iterator[None]:
        with GLOBAL_GENERATORS.beside(is_call=True) as turn:
            before = _outside()
            yield
            after = _outside()
        moved = before.moved_outside_torch(after)
        if moved and (turn.had_company or turn.is_in_doubt or not before.same_outside_torch(stream.state)):
            self._doubts |= moved
        elif moved:  # they were the task's
            self._drawn |= moved
            stream.state = stream.state._replace(python=after.python, numpy=after.numpy)
            put_back_outside_torch(before)


@contextmanager
def drawing_as_usual() -> Iterator[None]:
    """Run the body, which is the engine's, where a callback has called it: it keeps streams apart by itself."""
    if _HERE.stand_in is None:
        yield
        return
    if _HERE.timer is not None:  # the callback has them alone
        _HERE.timer.cancel()
        GLOBAL_GENERATORS.take_from(threading.get_ident())
    with _standing_in(None), _disable_current_modes():  # of who watches the callback
        modes: list[Any] = [_pop_mode() for _ in range(torch._C._len_torch_function_stack())]  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for mode in reversed(modes):
                _push_mode(mode)  # type: ignore[no-untyped-call]


def _outside() -> RandomState:
    """Return the process-wide states as they are while nobody has replaced them; torch's is empty if unknown."""

    def look(hold: Hold | None) -> RandomState:
        if hold is None:
            return capture()
        found: RandomState | None = hold.outside
        return capture()._replace(torch=torch.empty(0)) if found is None else found

    return GLOBAL_GENERATORS.look(look)


def _moved(before: RandomState, after: RandomState) -> str | None:
    """Name the generators that were drawn from between the two, as an error says it."""
    if not before.same_outside_torch(after):
        return "`random` or `numpy.random`"
    is_known = before.torch.numel() and after.torch.numel()
    return "torch's global generator" if is_known and not torch.equal(before.torch, after.torch) else None


# -- torch's global generator


class _Own:
    """A generator of the task's, which stands in for the global one."""

    def __init__(self, state: RandomState) -> None:
        self.state = state  # as it began
        self.generator = torch.Generator()
        if state.torch.numel():
            self.generator.set_state(state.torch)

    def run(self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if is_elsewhere((*args, *kwargs.values())):
            return op(*args, **kwargs)
        return draw_from(self.generator, op, args, kwargs)

    def attribute(self, name: str) -> Any:
        return getattr(self.generator, name)


class LayerDraws:
    """Sends the body's draws, in this thread, to a task's generator, as its `TaskGenerator` does.

    That sees only operations that may draw: as a dispatch mode of the whole body it would make all others slow, too.
    """

    def __init__(self, mode: TaskGenerator) -> None:
        self._mode = mode
        self._outer: _StandIn = None

    def __enter__(self) -> TaskGenerator:
        self._outer, _HERE.stand_in = _HERE.stand_in, self
        torch._C._dispatch_tls_set_dispatch_key_included(_registered(), True)
        return self._mode

    def __exit__(self, *exc: object) -> None:
        torch._C._dispatch_tls_set_dispatch_key_included(_registered(), self._outer is not None)
        _HERE.stand_in = self._outer

    def run(self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        with self._mode:
            return op(*args, **kwargs)

    def attribute(self, name: str) -> Any:
        return getattr(_GLOBAL, name)


draw_apart_in(lambda: LayerDraws(TaskGenerator(seeded(0))))


class _Watch:
    """Lets draws be, and sees those that come from no function of torch's in this thread."""

    def __init__(self) -> None:
        self._last = ask(_GLOBAL.get_state)
        self._was_moved = False
        self.drew = False  # by torch's functions

    @property
    def is_passed_by(self) -> bool:
        """True if somebody drew past torch's functions, until now."""
        return self._was_moved or not torch.equal(self._last, ask(_GLOBAL.get_state))

    def run(self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return self._seen(partial(op, *args, **kwargs))

    def attribute(self, name: str) -> Any:
        method = getattr(_GLOBAL, name)
        return (lambda *args: self._seen(partial(ask, method, *args))) if callable(method) else method

    def _seen(self, job: Callable[[], Any]) -> Any:
        self._was_moved, self.drew = self.is_passed_by, True
        try:
            return job()
        finally:
            self._last = ask(_GLOBAL.get_state)


_StandIn: TypeAlias = "_Own | LayerDraws | _Watch | None"


class _Here(threading.local):
    """The stand-in of this thread, and what ends its turn alone while it calls a callback."""

    stand_in: _StandIn = None
    timer: threading.Timer | None = None


_HERE = _Here()


class _ByThread:
    """Stands for the global generator in torch's functions: the stand-in of the thread that asks, or itself."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_GLOBAL, name) if _HERE.stand_in is None else _HERE.stand_in.attribute(name)


class _Readers:
    """Counts the threads with a stand-in: only meanwhile torch's functions ask for it."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._number = 0

    def add(self, number: int) -> None:
        with self._mutex:
            self._number += number
            _TORCH_RANDOM.default_generator = _ByThread() if self._number else _GLOBAL


_READERS = _Readers()


@contextmanager
def _standing_in(stand_in: _StandIn) -> Iterator[None]:
    """Send the body's draws from torch's global generator, in this thread, to another one; None: to itself."""
    key = _registered()
    outer, was_included = _HERE.stand_in, torch._C._dispatch_tls_is_dispatch_key_included(key)
    _READERS.add(1)
    _HERE.stand_in = stand_in
    torch._C._dispatch_tls_set_dispatch_key_included(key, stand_in is not None)
    try:
        yield
    finally:
        torch._C._dispatch_tls_set_dispatch_key_included(key, was_included)
        _HERE.stand_in = outer
        _READERS.add(-1)


def _leave_in_child() -> None:
    """Give a process that was forked by a thread that reads, a loader's worker, the global generator as its own."""
    stand_in, _HERE.stand_in = _HERE.stand_in, None
    _READERS.__init__()  # type: ignore[misc]  # its lock may have been another thread's
    _TORCH_RANDOM.default_generator = _GLOBAL
    if stand_in is not None:
        torch._C._dispatch_tls_set_dispatch_key_included(_registered(), False)
    # A fork in the middle of a read gets the stream's states. Where the read is watched, they are there already; and a
    # layer leaves its fork as a dispatch mode would.
    if isinstance(stand_in, _Own):
        install(stand_in.state._replace(torch=stand_in.generator.get_state()))


os.register_at_fork(after_in_child=_leave_in_child)


def _registered() -> Any:
    """The key, with a kernel for every operation that draws; made when it is first needed, for the whole process."""
    if not _KNOWN:
        register_draws()
    return _THE_KEY


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
        _LIBRARIES[space].impl(name, _kernel(op, _THE_KEY), _KEY)


_THE_KEY: Any = torch._C._parse_dispatch_key(_KEY)
_LIBRARY: Any = torch.library.Library
_REGISTERING = threading.Lock()
_LIBRARIES: dict[str, Any] = {}  # by namespace; torch forgets the kernels with these
_KNOWN: set[str] = set()  # names of operations that were looked at


def _kernel(op: Any, key: Any) -> Callable[..., Any]:
    include = torch._C._dispatch_tls_set_dispatch_key_included

    def draw(*args: Any, **kwargs: Any) -> Any:
        stand_in, generator = _HERE.stand_in, kwargs.get("generator")
        is_own = isinstance(generator, torch.Generator) and generator._cdata != _GLOBAL._cdata  # type: ignore[attr-defined]
        include(key, False)
        try:
            return op(*args, **kwargs) if stand_in is None or is_own else stand_in.run(op, args, kwargs)
        finally:
            include(key, True)

    return draw
