"""Sums over batches, replicas and restarts, such as a loss and the samples that it is of."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Number
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

_REMEDY = "use it inside `with accumulator.synchronized():`"


class Accumulator(MutableMapping[Hashable, Any]):
    """A dict of sums, which is added to at any time, and read where all replicas meet.

        accumulator = Accumulator()
        for epoch in remaining_epochs_until(60, loader):
            for batch in loader:
                ...
                accumulator["loss"] += loss.detach() * len(batch)
                accumulator["samples"] += len(batch)
            with accumulator.synchronized():      # adds up the replicas
                print(accumulator["loss"] / accumulator["samples"])
                accumulator.clear()               # else the sums go on

    Outside such a block it can only be added to and subtracted from, by numbers and tensors without dimensions, which
    stay on their device until they are read. It looks empty there, and using a sum raises. Inside it is a dict of
    numbers, and every replica has to do the same with it. The constructor takes first values as `dict` does.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._sums: dict[Hashable, Any] = dict(*args, **kwargs)  # the same on every replica
        self._added: dict[tuple[Hashable, torch.device | None], Any] = {}  # here since then, by key and device
        self._is_open = False  # inside synchronized()

    @contextmanager
    def synchronized(self) -> Iterator[Accumulator]:
        """Let the sums be read and changed, after those of all replicas were added up: all have to enter it.

        The sums go on after it; `clear()` inside lets them begin anew.
        """
        if self._is_open:
            yield self
            return
        self._add_up()
        self._is_open = True
        try:
            yield self
        finally:
            self._is_open = False

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Add the values of a mapping, of pairs or of keyword arguments, each to the sum of its key."""
        for key, value in dict(*args, **kwargs).items():
            self[key] += value

    def subtract(self, *args: Any, **kwargs: Any) -> None:
        """Subtract the values of a mapping, of pairs or of keyword arguments, each from the sum of its key."""
        for key, value in dict(*args, **kwargs).items():
            self[key] -= value

    def reset(self) -> None:
        """Forget every sum, also outside of synchronized(), on this replica: all have to do the same."""
        self._sums.clear()
        self._added.clear()

    def clear(self) -> None:
        """Forget every sum, inside synchronized()."""
        if not self._is_open:
            raise RuntimeError(f"clear() outside of synchronized(); {_REMEDY}, or call reset()")
        self._sums.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the sums of all replicas, which are added up for it: all have to call it."""
        if not self._is_open:
            self._add_up()
        return {"sums": dict(self._sums)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from sums that were saved, with any number of replicas. All of them load the same."""
        if set(state) != {"sums"}:
            raise ValueError(
                f"state: keys {sorted(map(str, state))}, limit: ['sums']; load what state_dict() of an accumulator "
                f"returned"
            )
        self._sums = dict(state["sums"])
        self._added.clear()

    def __iadd__(self, other: Any) -> Accumulator:
        self.update(other)
        return self

    def __isub__(self, other: Any) -> Accumulator:
        self.subtract(other)
        return self

    def __getitem__(self, key: Hashable) -> Any:
        """Return the sum inside synchronized(), and outside something that takes += and -= only."""
        return self._sums[key] if self._is_open else _Sum(self, key, ())

    def __setitem__(self, key: Hashable, value: Any) -> None:
        if self._is_open:
            self._sums[key] = value
            return
        if not isinstance(value, _Sum) or value.owner is not self or value.key != key:
            raise TypeError(
                f"accumulator[{key!r}] = ... outside of synchronized(), limit: += and -= with a number or a tensor; "
                f"add to it, or {_REMEDY}"
            )
        for each in value.added:
            place = (key, each.device if isinstance(each, Tensor) else None)
            self._added[place] = self._added.get(place, 0) + each

    def __delitem__(self, key: Hashable) -> None:
        if not self._is_open:
            raise RuntimeError(f"del accumulator[{key!r}] outside of synchronized(); {_REMEDY}")
        del self._sums[key]

    def __contains__(self, key: object) -> bool:
        return self._is_open and key in self._sums

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._sums if self._is_open else ())

    def __len__(self) -> int:
        return len(self._sums) if self._is_open else 0

    def __repr__(self) -> str:
        return f"Accumulator({self._sums})" if self._is_open else "Accumulator(outside of synchronized())"

    def _add_up(self) -> None:
        """Add this replica's numbers and all others' to the sums, in the order of the replicas on each of them."""
        own: dict[Hashable, Any] = {}
        for (key, _), value in self._added.items():
            own[key] = own.get(key, 0) + (value.item() if isinstance(value, Tensor) else value)
        every = [own]
        if dist.is_available() and dist.is_initialized():
            every = [{} for _ in range(dist.get_world_size())]
            dist.all_gather_object(every, own)
        for each in every:
            for key, value in each.items():
                self._sums[key] = self._sums.get(key, 0) + value
        self._added.clear()


@dataclass(eq=False, repr=False, slots=True)
class _Sum:
    """A sum that is not known here: it keeps what is added, and refuses to be read."""

    owner: Accumulator
    key: Hashable
    added: tuple[Any, ...]

    def __add__(self, value: Any) -> _Sum:
        return _Sum(self.owner, self.key, (*self.added, self._checked(value)))

    def __sub__(self, value: Any) -> _Sum:
        return _Sum(self.owner, self.key, (*self.added, -self._checked(value)))

    def __repr__(self) -> str:
        return f"<sum of {self.key!r}, to be read inside synchronized()>"

    def _checked(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if value.dim() > 0:
                raise ValueError(
                    f"accumulator[{self.key!r}]: a tensor of shape {list(value.shape)}, limit: no dimensions; add its "
                    f".sum()"
                )
            value = value.detach()
            # A sum of many small numbers would lose them, and one of small types would overflow.
            if value.is_floating_point():
                return value if value.device.type == "mps" else value.double()  # which has no float64
            return value if value.is_complex() else value.long()
        if isinstance(value, _Sum) or not isinstance(value, Number):
            raise TypeError(
                f"accumulator[{self.key!r}]: a {type(value).__name__} was added, limit: a number or a tensor without "
                f"dimensions; add one of them"
            )
        return value

    def _refuse(self, *_: Any) -> NoReturn:
        raise RuntimeError(f"accumulator[{self.key!r}] was read outside of synchronized(); {_REMEDY}")

    __bool__ = __float__ = __int__ = __index__ = __format__ = __neg__ = __abs__ = __round__ = _refuse
    __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __pow__ = _refuse
    __radd__ = __rsub__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __hash__ = None  # type: ignore[assignment]
