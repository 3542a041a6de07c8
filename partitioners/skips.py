"""Values that skip layers: one layer puts them, and layers further up get them."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any


class Skips:
    """Carries values from one layer of a model to others, past the layers between.

    Layers hold the same `Skips` object as an attribute. One calls `put(name, value)` in its forward, once per forward;
    any number of layers after it call `get(name)`. Values are tensors, or tuples, lists and dicts of them; gradients
    flow back the same way. In plain PyTorch it is a dict. In the engine, a value crosses to another shard through
    DRAM only where it is gotten, however many shards lie between; whoever passes a value on from layer to layer, in a
    tuple, has it stored and loaded at every shard.

        class Down(nn.Module):
            def forward(self, x):
                self.skips.put("high", x)
                return self.pool(x)

        class Up(nn.Module):
            def forward(self, x):
                return self.conv(torch.cat([self.grow(x), self.skips.get("high")], dim=1))

    A copy of a model has a `Skips` of its own, without values. (The idea of named skips is torchgpipe's,
    https://torchgpipe.readthedocs.io/en/stable/guide.html#long-skip-connections.)
    """

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}

    def put(self, name: str, value: Any) -> None:
        """Leave a value for layers further up; it stays until the next forward puts another."""
        frame = current()
        if frame is None:
            self._values[name] = value
        else:
            frame.put(name, value)

    def get(self, name: str) -> Any:
        """Return the value that an earlier layer put. Raises KeyError when none did."""
        frame = current()
        if frame is not None:
            return frame.get(name)
        if name not in self._values:
            raise _missing(name)
        return self._values[name]

    def __deepcopy__(self, memo: dict[int, Any]) -> Skips:
        return Skips()

    def __reduce__(self) -> tuple[type[Skips], tuple[()]]:
        return Skips, ()  # values are of one forward, and tensors in a graph cannot be pickled


class Frame:
    """Values that are put and gotten while some layers run in `with frame:`, apart from the others."""

    def __init__(self, arriving: Mapping[str, Any]) -> None:
        """`arriving`: values that the layers get, beside those that they put themselves."""
        self.arriving = arriving
        self.values: dict[str, Any] = {}  # put
        self.gotten: list[str] = []  # of those that arrived, in order
        self.is_replayed = False
        self._before: Frame | None = None

    def __enter__(self) -> Frame:
        self._before, _LOCAL.frame = current(), self
        return self

    def __exit__(self, *_: object) -> None:
        _LOCAL.frame, self._before, self.is_replayed = self._before, None, False

    def replayed(self) -> Frame:
        """Return it as the context of its layers' backward: a checkpoint inside one runs parts of its forward again."""
        self.is_replayed = True
        return self

    def put(self, name: str, value: Any) -> None:
        if self.is_replayed and name in self.values:
            return
        if name in self.values or name in self.arriving:
            raise ValueError(f"skips: {name!r} is put twice in one forward; give each value a name of its own")
        self.values[name] = value

    def get(self, name: str) -> Any:
        if name in self.values:
            return self.values[name]
        if name not in self.arriving:
            raise _missing(name)
        if name not in self.gotten:
            self.gotten.append(name)
        return self.arriving[name]


_LOCAL = threading.local()


def current() -> Frame | None:
    """Return the frame of this thread, if layers run in one."""
    return getattr(_LOCAL, "frame", None)


def _missing(name: str) -> KeyError:
    return KeyError(f"skips: no layer before this one has put {name!r} in this forward; put it at every forward")
