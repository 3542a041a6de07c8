"""Bytes created and freed by the operations of a region of code, counted by storage."""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Bound once: the meter runs in front of every operation.
_LIFT = torch.ops.aten.lift_fresh.default
_RESIZE = torch.ops.aten.resize_.default
_STRIDED = torch.strided

_Meter = TypeVar("_Meter", bound="MemoryMeter")


class _State(Enum):
    NEW = "new"  # not entered yet
    ACTIVE = "active"  # counting
    CLOSED = "closed"  # the figures are final, no storage is followed any more


class _Seen(weakref.ref[torch.UntypedStorage]):
    """A storage that was created or resized under the meter, and the bytes counted for it."""

    __slots__ = ("before", "key", "num_bytes")
    key: int
    num_bytes: int
    before: int  # bytes that it had when it came in from outside, on top of those


class MemoryMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # its __init_subclass__
    """Counts the bytes of storages that operations create inside it; use one meter for one ``with`` block.

    It counts storages, not tensors. So a view costs nothing, and a storage is freed when its last tensor dies, whoever
    held it (also autograd). It counts exact ``nbytes``, without rounding. Backward is counted too: the autograd engine
    passes on the modes of its caller. Three things are not seen: memory that a kernel allocates and frees within one
    operation, memory that no operation of torch created (``torch.UntypedStorage(n)``), and the meta device.

    ``on_change(delta)`` is called with a positive delta when a storage appears or has grown, before the operation
    returns its result. It may raise: the exception comes out of the operation, and the bytes are not counted. It is
    called with a negative delta when a storage dies, in the thread that drops it, possibly in the middle of any
    allocation (garbage collection). That call has to be cheap, must not raise, and must not take a lock that the same
    thread may hold. Nothing is reported after ``__exit__``; outputs may live on.

    ``peak_bytes`` is the highest ``current_bytes`` so far; both keep their last value after ``__exit__``.
    """

    def __init__(self, on_change: Callable[[int], None] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._on_change = on_change
        self._live: dict[int, _Seen] = {}
        # Deltas not added up yet. A storage may die between the read and the write of `current += n`, in the same
        # thread, where no lock helps. So counting only appends (atomic), and `_settle` alone adds.
        self._deltas: deque[int] = deque()
        self._settling = threading.Lock()
        self._current_bytes = 0
        self._peak_bytes = 0
        self._state = _State.NEW

    @property
    def current_bytes(self) -> int:
        self._settle()
        return self._current_bytes

    @property
    def peak_bytes(self) -> int:
        self._settle()
        return self._peak_bytes

    def __enter__(self: _Meter) -> _Meter:
        # A second block would begin with storages of the first that nobody follows any more.
        if self._state is not _State.NEW:
            raise RuntimeError(f"this MemoryMeter is {self._state.value}, a meter measures one block; make a new one")
        self._state = _State.ACTIVE
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            super().__exit__(*exc)  # type: ignore[no-untyped-call]
        finally:
            self._state = _State.CLOSED
            # Without its weak reference a storage dies unnoticed; it also breaks the cycle meter -> reference -> meter.
            self._live.clear()
            # Often a closure over this meter, and over what it measures: a cycle that would keep all of it alive.
            self._on_change = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # Before the call: a sparse tensor that is added to in place holds other storages afterwards.
        incoming = _storages(args, [])
        if kwargs:
            _storages(kwargs.values(), incoming)
        num_bytes = incoming[0].nbytes() if func is _RESIZE and incoming else 0
        result = func(*args, **kwargs)
        for storage in _storages(result if isinstance(result, (tuple, list)) else (result,), []):
            seen = self._live.get(id(storage))
            if seen is not None:
                if seen.before + seen.num_bytes != storage.nbytes():  # resize_, set_ with a size, out=
                    self._resized(seen, storage.nbytes() - seen.before)
            elif func is _RESIZE:  # of storages that were there before
                if storage.nbytes() > num_bytes:
                    self._created(storage, num_bytes)
            # The schema does not tell a view from a fresh tensor (`_unsafe_view` hides it): compare with what came in.
            # torch.tensor() and from_numpy() have their storage before they dispatch: it is `lift_fresh`'s argument.
            elif func is _LIFT or not any(storage is other for other in incoming):
                self._created(storage)
        return result

    def _created(self, storage: torch.UntypedStorage, before: int = 0) -> None:
        num_bytes = storage.nbytes() - before
        if num_bytes and self._on_change is not None:
            self._on_change(num_bytes)  # may raise: nothing is counted yet
        seen = _Seen(storage, self._freed)
        seen.key, seen.num_bytes, seen.before = id(storage), num_bytes, before
        self._live[seen.key] = seen
        self._deltas.append(num_bytes)
        self._settle()

    def _resized(self, seen: _Seen, num_bytes: int) -> None:
        delta = num_bytes - seen.num_bytes
        if self._on_change is not None:
            self._on_change(delta)
        seen.num_bytes = num_bytes
        self._deltas.append(delta)
        self._settle()

    def _freed(self, seen: weakref.ref[torch.UntypedStorage]) -> None:
        """Note that a storage died. The interpreter calls this in any thread, at any moment."""
        assert isinstance(seen, _Seen)
        if self._state is not _State.ACTIVE:
            return
        self._live.pop(seen.key, None)
        self._deltas.append(-seen.num_bytes)
        on_change = self._on_change  # another thread may close the meter meanwhile
        if seen.num_bytes and on_change is not None:
            on_change(-seen.num_bytes)

    def _settle(self) -> None:
        """Add up the deltas in their order. Never waits: a thread that is adding already adds these too."""
        while self._deltas and self._settling.acquire(blocking=False):
            try:
                while self._deltas:
                    self._current_bytes += self._deltas.popleft()
                    self._peak_bytes = max(self._peak_bytes, self._current_bytes)
            finally:
                self._settling.release()


def _storages(values: Iterable[Any], found: list[torch.UntypedStorage]) -> list[torch.UntypedStorage]:
    """Add to ``found`` the storages behind an operation's arguments or results, which nest lists at most."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.layout is not _STRIDED:
                if value.layout is torch.sparse_coo:
                    _storages((value._indices(), value._values()), found)
            # The tensor's word, not its storage's: a fake tensor stands for a CPU one, and its storage is on meta.
            elif not value.is_meta:
                found.append(value.untyped_storage())
        elif isinstance(value, (tuple, list)):
            _storages(value, found)
        elif isinstance(value, torch.UntypedStorage):
            found.append(value)
    return found
