"""Sees whether a callback has changed a model that is training: devices compute with copies, which would not follow."""

from __future__ import annotations

import copy
import reprlib
from collections import OrderedDict
from collections.abc import Sequence
from operator import attrgetter, eq
from typing import Any

import torch
from torch import Tensor, nn

_WHY = (
    "devices compute with copies of the layers that were made when training began, and with weights that were loaded "
    "before, so that it would not have the effect that it has in a plain loop: end the task there (raise StopTask) and "
    "go on with a new ModelTask of the changed model, or let the layer itself follow a buffer that counts its steps"
)
# Elements of a parameter that are looked at for writes through `.data`, which autograd's counters do not see.
NUM_SAMPLED = 4
# Values in a list or dict that is an attribute.
MOST_COMPARED = 100

_CONTAINERS = (dict, OrderedDict, list, set)
_VERSION, _REQUIRES_GRAD = attrgetter("_version"), attrgetter("requires_grad")


class ModelWatch:
    """Compares a model's modules with what they were as this was made, and its tensors with those before a call.

    What is compared, in an order that costs little: the attributes of all modules in one comparison of the
    interpreter's for each; which parameters and buffers they hold; `requires_grad`; autograd's counters of writes; the
    places of the weights in memory; and a few elements of each weight.
    """

    def __init__(self, model: nn.Module, *others: object) -> None:
        """`others`: the module that the model was made of, the loss; what is no module is left out."""
        self._named: dict[nn.Module, str] = {}
        for each in (model, *others):
            for name, module in each.named_modules() if isinstance(each, nn.Module) else ():
                self._named.setdefault(module, name)
        self._types = list(map(type, self._named))
        self._now = list(map(vars, self._named))
        self._then = list(map(_copied, self._now))
        # Hooks and the like: most are empty, and looked at all together.
        self._empty = [value for now in self._now for value in now.values() if _is_empty(value)]
        holders = [holder for module in self._named for holder in (module._parameters, module._buffers)]
        self._holders = [holder for holder in holders if holder]
        self._tensors = self._held()
        parameters = list({id(each): each for each in self._tensors if isinstance(each, nn.Parameter)}.values())
        self._parameters = parameters
        self._trained = list(map(_REQUIRES_GRAD, parameters))
        self._weights: list[Tensor] = []  # those that updates change
        self._elements: _Elements | None = None
        self._before: tuple[list[int], list[int], Tensor | None] | None = None

    def follow(self, weights: Sequence[Tensor]) -> None:
        """From now on watch these as well, which lie in one piece of memory and stay as they are during a call."""
        self._weights = list(weights)
        self._elements = _Elements(self._weights) if self._weights else None

    def begin(self) -> None:
        """A callback is about to be called."""
        self._tensors = self._held()  # a forward may have bound a buffer of another shape
        elements = None if self._elements is None else self._elements.take()
        self._before = (self._versions(), list(map(Tensor.data_ptr, self._weights)), elements)

    def check(self, who: str) -> None:
        """Raise ValueError where the model is not what it was; `who` was called in between."""
        change = self._change() or self._written()
        if change is not None:
            raise ValueError(f"{who} {change}; {_WHY}")

    def _held(self) -> list[Tensor]:
        return [each for holder in self._holders for each in holder.values() if each is not None]

    def _versions(self) -> list[int]:
        return list(map(_VERSION, self._watched()))

    def _watched(self) -> list[Tensor]:
        return self._tensors if self._weights else [each for each in self._tensors if not each.requires_grad]

    def _change(self) -> str | None:
        try:
            is_same = all(map(eq, self._now, self._then)) and not any(self._empty)
        except Exception:  # a tensor took another one's place, and the two do not compare
            is_same = False
        if not is_same or self._types != list(map(type, self._named)):
            change = self._changed_module()
            if change is not None:
                return change
        held = self._held()
        if list(map(id, held)) != list(map(id, self._tensors)):
            known = set(map(id, self._tensors))
            new = next((each for each in held if id(each) not in known), None)
            return "took a parameter or buffer away" if new is None else f"replaced {self._name(new)}"
        trained = list(map(_REQUIRES_GRAD, self._parameters))
        if trained != self._trained:
            k = next(k for k, (old, new) in enumerate(zip(self._trained, trained, strict=True)) if old != new)
            return f"set requires_grad of {self._name(self._parameters[k])} from {self._trained[k]} to {trained[k]}"
        return None

    def _written(self) -> str | None:
        if self._before is None:
            return None
        versions, places, elements = self._before
        now = self._versions()
        if now != versions:
            triples = zip(self._watched(), versions, now, strict=True)
            return f"wrote to {self._name(next(each for each, old, new in triples if old != new))}"
        if list(map(Tensor.data_ptr, self._weights)) != places:
            pairs = zip(self._weights, places, strict=True)
            moved = next(each for each, place in pairs if each.data_ptr() != place)
            return f"gave {self._name(moved)} other memory (.data)"
        written = None if elements is None or self._elements is None else self._elements.changed(elements)
        return None if written is None else f"wrote to {self._name(written)} (.data)"

    def _changed_module(self) -> str | None:
        empty = set(map(id, self._empty))
        each = zip(self._named.items(), self._types, self._now, self._then, strict=True)
        for (module, name), kind, now, before in each:
            where = f"layer {name!r} ({kind.__name__})" if name else f"the model ({kind.__name__})"
            if type(module) is not kind:
                return f"made {where} a {type(module).__name__}"
            for attribute in dict.fromkeys([*before, *now]):
                old, new = before.get(attribute, "nothing"), now.get(attribute, "nothing")
                if _is_same(old, new) and not (id(new) in empty and new):
                    continue
                if attribute.endswith("_hooks"):
                    return f"registered or removed a hook ({attribute}) of {where}"
                if attribute in ("_modules", "_parameters", "_buffers"):
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


class _Elements:
    """A few elements of each of some tensors in one piece of memory, as bytes."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._bytes = torch.empty(0, dtype=torch.uint8).set_(tensors[0].untyped_storage())
        places: list[int] = []
        self._owners: list[int] = []  # the tensor of each byte
        for k, each in enumerate(tensors):
            last = sum((length - 1) * stride for length, stride in zip(each.shape, each.stride(), strict=True))
            for n in range(min(NUM_SAMPLED, each.numel())):
                first = (each.storage_offset() + last * n // (NUM_SAMPLED - 1)) * each.element_size()
                places += range(first, first + each.element_size())
                self._owners += [k] * each.element_size()
        self._places = torch.tensor(places, dtype=torch.int64)

    def take(self) -> Tensor:
        """The bytes as they are."""
        return self._bytes.index_select(0, self._places)

    def changed(self, before: Tensor) -> Tensor | None:
        """A tensor whose bytes are others than before."""
        now = self.take()
        if torch.equal(now, before):
            return None
        return self._tensors[self._owners[int((now != before).nonzero()[0])]]


def _is_empty(value: object) -> bool:
    return type(value) in _CONTAINERS and not value


def _copied(attributes: dict[str, Any]) -> dict[str, Any]:
    """A module's attributes; its containers anew, but for those that are looked at otherwise: empty ones and tensors'.

    Large ones as they are: comparing what is in a vocabulary would take longer than a step.
    """
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
