"""Sees whether a callback has changed a model that is training: devices compute with copies, which would not follow."""

from __future__ import annotations

import copy
import reprlib
from bisect import bisect
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from operator import attrgetter, eq
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from partitioners.boundary import extent, extent_bytes
from partitioners.reach import IN_MODULES

_WHY = (
    "devices compute with copies of the layers that were made when training began, and with weights that were loaded "
    "before, so that it would not have the effect that it has in a plain loop: end the task there (raise StopTask) and "
    "go on with a new ModelTask of the changed model, or let the layer itself do it as its forward begins, in buffers "
    "(one that counts its steps, or the weights of a mean teacher)"
)
# Elements of all weights that are looked at for writes that no operation of torch's makes, as through NumPy: small
# models' all. At least NUM_SAMPLED of each weight.
MOST_SAMPLED, NUM_SAMPLED = 2**13, 4
# Values in a list or dict that is an attribute.
MOST_COMPARED = 100

_CONTAINERS = (dict, OrderedDict, list, set)
_VERSION, _REQUIRES_GRAD = attrgetter("_version"), attrgetter("requires_grad")
# What gives a tensor's memory to others, who may write there without an operation of torch's.
_GIVING = {Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.data_ptr, Tensor.untyped_storage, Tensor.storage}
# What reads a tensor's memory without an operation of torch's.
_READING = {*_GIVING, Tensor.tolist, Tensor.__reduce_ex__}
_SET_DATA = vars(torch._C.TensorBase)["data"].__set__


class Hidden(Protocol):
    """A weight whose values are elsewhere until it is shown."""

    def show(self) -> None:
        """Have the values in the weight's memory."""

    def hide(self) -> None:
        """Give that memory back."""

    def load(self, out: Tensor) -> Tensor:
        """Fill a tensor that is laid out as the weight with the values; return it."""


class _Weights(NamedTuple):
    """The weights that a watch follows: if calls leave their values and their memory alone, and where values are."""

    is_steady: bool = False
    stays: bool = False
    hidden: Mapping[int, Hidden] = MappingProxyType({})  # by id of a weight
    elements: _Elements | None = None  # of those that are not hidden


class ModelWatch:
    """Compares a model's modules with what they were as this was made, and its tensors with those before a call.

    What is compared, in an order that costs little: the attributes of all modules in one comparison of the
    interpreter's for each; which parameters and buffers they hold; `requires_grad`; autograd's counters of writes; the
    places of the tensors in memory; and a few elements of each weight. Beside that, every operation of the call's
    thread is looked at: what it writes to, through `.data` too, and also where the call puts the values back. Where it
    makes a NumPy array of a tensor, or the like, all of that tensor is compared.
    """

    def __init__(self, model: nn.Module, source: object = None, loss: object = None) -> None:
        """`source`: that the model was made of. Only modules are watched; names are those of the source, if any."""
        self._named: dict[nn.Module, str] = {}
        for each in (source, model, loss):
            for name, module in each.named_modules() if isinstance(each, nn.Module) else ():
                self._named.setdefault(module, name)
        self._types = list(map(type, self._named))
        self._now = list(map(vars, self._named))
        self._then = list(map(_copied, self._now))
        # Hooks and the like: most are empty, and looked at all together.
        self._empty = [value for now in self._now for value in now.values() if type(value) in _CONTAINERS and not value]
        holders = [holder for module in self._named for holder in (module._parameters, module._buffers)]
        self._holders = [holder for holder in holders if holder]
        self._tensors = self._held()
        self._parameters = list({id(each): each for each in self._tensors if isinstance(each, nn.Parameter)}.values())
        self._trained = list(map(_REQUIRES_GRAD, self._parameters))
        self._weights = _Weights()
        self._before: tuple[list[int], list[int], Tensor | None] | None = None
        self._writes = _Writes((), {})
        self._given = _HandedOut(self._writes)

    def follow(
        self,
        weights: Sequence[Tensor],
        *,
        is_steady: bool = True,
        stays: bool = True,
        hidden: Mapping[int, Hidden] = MappingProxyType({}),
    ) -> None:
        """Watch these weights: no update changes them in a call (`is_steady`), or gives them other memory (`stays`).

        hidden: those of them, by id, that are to be shown to a call which reads them.
        """
        there = [each for each in weights if id(each) not in hidden]
        self._weights = _Weights(is_steady, stays, hidden, _Elements(there) if there and is_steady else None)

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Note how the model is, and run the body, which calls a callback in this thread."""
        self._tensors = self._held()  # a forward may have bound a buffer of another shape
        elements = None if self._weights.elements is None else self._weights.elements.take()
        self._before = (self._versions(), self._places(), elements)
        self._writes = _Writes(self._tensors, self._weights.hidden)
        self._given = _HandedOut(self._writes)
        try:
            with self._writes, self._given:
                yield
        finally:
            self._writes.hide(compares=self._weights.is_steady)

    def check(self, who: str) -> None:
        """Raise ValueError where the model is not what it was; `who` was called in between."""
        try:
            change = self._change() or self._written()
        finally:
            self._given = _HandedOut(self._writes)  # the copies of this one go
        if change is not None:
            raise ValueError(f"{who} {change}; {_WHY}")

    def _held(self) -> list[Tensor]:
        return [each for holder in self._holders for each in holder.values() if each is not None]

    def _watched(self, with_weights: bool) -> list[Tensor]:
        return self._tensors if with_weights else [each for each in self._tensors if not each.requires_grad]

    def _versions(self) -> list[int]:
        return list(map(_VERSION, self._watched(self._weights.is_steady)))

    def _places(self) -> list[int]:
        return list(map(Tensor.data_ptr, self._watched(self._weights.stays)))

    def _change(self) -> str | None:
        try:
            is_same = all(map(eq, self._now, self._then)) and not any(self._empty)
        except Exception:  # a tensor took another one's place, and the two do not compare
            is_same = False
        is_other = not is_same or self._types != list(map(type, self._named))
        if is_other and (change := self._changed_module()) is not None:
            return change
        if list(map(id, held := self._held())) != list(map(id, self._tensors)):
            known = set(map(id, self._tensors))
            new = next((each for each in held if id(each) not in known), None)
            return "took a parameter or buffer away" if new is None else f"replaced {self._name(new)}"
        if (trained := list(map(_REQUIRES_GRAD, self._parameters))) != self._trained:
            k = next(k for k, (old, new) in enumerate(zip(self._trained, trained, strict=True)) if old != new)
            return f"set requires_grad of {self._name(self._parameters[k])} from {self._trained[k]} to {trained[k]}"
        return None

    def _written(self) -> str | None:
        if self._before is None:
            return None
        versions, places, elements = self._before
        if self._writes.first is not None:
            tensor, operation = self._writes.first
            return f"wrote to {self._name(tensor)} ({operation})"
        if self._versions() != versions:
            pairs = zip(self._watched(self._weights.is_steady), versions, strict=True)
            return f"wrote to {self._name(next(each for each, version in pairs if each._version != version))}"
        moved = self._given.moved
        if moved is None and self._places() != places:
            pairs = zip(self._watched(self._weights.stays), places, strict=True)
            moved = next(each for each, place in pairs if each.data_ptr() != place)
        if moved is not None:
            return f"gave {self._name(moved)} other memory (.data)"
        is_steady = self._weights.is_steady
        written = next((each for each in self._given.changed() if is_steady or not each.requires_grad), None)
        written = self._writes.changed if written is None else written
        if written is None and elements is not None and self._weights.elements is not None:
            written = self._weights.elements.changed(elements)
        return None if written is None else f"wrote to the memory of {self._name(written)}"

    def _changed_module(self) -> str | None:
        empty = set(map(id, self._empty))
        each = zip(self._named.items(), self._types, self._now, self._then, strict=True)
        for (module, name), kind, now, before in each:
            where = f"{name} ({kind.__name__})" if name else f"the model ({kind.__name__})"
            if type(module) is not kind:
                return f"made {where} a {type(module).__name__}"
            for attribute in dict.fromkeys([*before, *now]):
                old, new = before.get(attribute, "nothing"), now.get(attribute, "nothing")
                if _is_same(old, new) and not (id(new) in empty and new):
                    continue
                if attribute.endswith("_hooks"):
                    return f"registered or removed a hook ({attribute}) of {where}"
                if attribute in IN_MODULES:
                    return f"changed which {attribute[1:]} {where} has"
                return f"set {attribute} of {where} from {reprlib.repr(old)} to {reprlib.repr(new)}"
        return None

    def _name(self, tensor: Tensor) -> str:
        for module, name in self._named.items():
            for kind, holder in (("parameter", module._parameters), ("buffer", module._buffers)):
                for attribute, each in holder.items():
                    if each is tensor:
                        return f"{kind} {'.'.join(filter(None, (name, attribute)))!r}"
        return "a tensor"


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # its __init_subclass__
    """Sees the `first` write to one of some tensors, or to a part of one, under whatever name.

    Shows those of them, by id, that are hidden, before the first operation on one.
    """

    def __init__(self, tensors: Sequence[Tensor], hidden: Mapping[int, Hidden]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tensors = tensors
        self._hidden = hidden
        self._shown: dict[int, Tensor] = {}
        self.changed: Tensor | None = None  # one that was shown, as it was hidden again
        self._spans: list[tuple[int, int, Tensor]] | None = None  # (first byte, end, tensor), once something is written
        self.first: tuple[Tensor, str] | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._hidden:
            for each in pytree.arg_tree_leaves(*args, **kwargs):
                if isinstance(each, Tensor) and each.device.type == "cpu" and each.layout == torch.strided:
                    self.show(self.owner(each))
        for place, name in _written_arguments(func) if self.first is None else ():
            self._look(args[place] if place < len(args) else kwargs.get(name), func)
        return func(*args, **kwargs)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """A callback may compile what it calls: torch does so under no other modes."""
        return True

    def show(self, owner: Tensor | None) -> bool:
        """Return True if a tensor was hidden before the call; now it has its values."""
        if owner is None or id(owner) not in self._hidden:
            return False
        if id(owner) not in self._shown:
            self._shown[id(owner)] = owner
            with _disable_current_modes():
                self._hidden[id(owner)].show()
        return True

    def hide(self, *, compares: bool) -> None:
        """Hide what was shown; compares: note one that the call has written to."""
        while self._shown:
            index, owner = self._shown.popitem()
            if compares and self.changed is None:
                before = self._hidden[index].load(torch.empty_like(owner.data))
                self.changed = None if torch.equal(_bits(owner), _bits(before)) else owner
            self._hidden[index].hide()

    def _look(self, value: Any, func: Any) -> None:
        for each in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(each, Tensor) and each.device.type == "cpu" and each.layout == torch.strided:
                owner = self.owner(each)
                if owner is not None and self.first is None:
                    self.first = (owner, str(func))

    def owner(self, written: Tensor) -> Tensor | None:
        """Return the one that a tensor begins in."""
        if type(written).__torch_dispatch__ is not Tensor.__torch_dispatch__:
            return None  # of a class that may have no memory, as fake tensors have none
        if self._spans is None:
            self._spans = sorted(_spans(self._tensors), key=lambda span: span[0])
        place = written.data_ptr()
        index = bisect(self._spans, place, key=lambda span: span[0]) - 1
        if index < 0 or place >= self._spans[index][1]:
            return None
        return self._spans[index][2]


class _HandedOut(TorchFunctionMode):
    """Copies those of the tensors whose memory a call gets hold of, and sees which one is `moved` to other memory."""

    def __init__(self, writes: _Writes) -> None:
        super().__init__()
        self._writes = writes
        self.moved: Tensor | None = None
        self._before: dict[Tensor, Tensor] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _READING or func == _SET_DATA:
            owner = self._writes.owner(args[0])
            if func == _SET_DATA:
                self.moved = owner if owner is args[0] else self.moved
            elif not self._writes.show(owner) and owner is not None and func in _GIVING:
                self._before.setdefault(owner, _bits(owner).clone())
        return func(*args, **(kwargs or {}))

    def changed(self) -> Iterator[Tensor]:
        """Yield those that are not as they were copied."""
        return (tensor for tensor, before in self._before.items() if not torch.equal(_bits(tensor), before))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _spans(tensors: Iterable[Tensor]) -> Iterator[tuple[int, int, Tensor]]:
    for each in tensors:
        if each.numel() and each.device.type == "cpu" and each.layout == torch.strided:
            yield each.data_ptr(), each.data_ptr() + extent_bytes(each), each


@cache
def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """Arguments that an operation writes to, by place and name."""
    arguments = enumerate(func._schema.arguments)
    return tuple((k, each.name) for k, each in arguments if each.alias_info is not None and each.alias_info.is_write)


class _Elements:
    """A few elements of each of some tensors in one piece of memory, as bytes."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._bytes = torch.empty(0, dtype=torch.uint8).set_(tensors[0].untyped_storage())
        places, owners = [], []
        for k, each in enumerate(tensors):
            number, size = min(max(NUM_SAMPLED, MOST_SAMPLED // len(tensors)), each.numel()), each.element_size()
            last = max(0, extent(each.shape, each.stride()) - 1)
            spread = (torch.arange(number) * last).div(max(1, number - 1), rounding_mode="floor")
            first = (spread + int(each.storage_offset())) * size
            places.append((first[:, None] + torch.arange(size)).flatten())
            owners.append(torch.full((number * size,), k))
        self._places, self._owners = torch.cat(places), torch.cat(owners)  # the tensor of each byte

    def take(self) -> Tensor:
        return self._bytes.index_select(0, self._places)

    def changed(self, before: Tensor) -> Tensor | None:
        now = self.take()
        if torch.equal(now, before):
            return None
        return self._tensors[int(self._owners[now != before][0])]


def _copied(attributes: dict[str, Any]) -> dict[str, Any]:
    """A module's attributes; containers anew but for tensors', empty ones and large ones, slow to compare."""
    found = dict(attributes)
    for name, value in attributes.items():
        if type(value) in _CONTAINERS and 0 < len(value) <= MOST_COMPARED:
            found[name] = value if name in ("_parameters", "_buffers") else copy.copy(value)
    return found


def _is_same(old: Any, new: Any) -> bool:
    if old is new:
        return True
    try:
        return bool(old == new)
    except Exception:  # tensors, which are compared by their elements
        return False
