"""Values that cross between layers: a tensor, or nested tuples, lists and dicts of tensors and other values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from partitioners.reach import Shared


def fingerprint(part: Any) -> Any:
    """Return a hashable value that two layers share only if they hold the same types, shapes and settings.

    An object that is no module, tensor or plain value counts by identity: a layer that holds one equals itself alone.
    """
    seen: dict[int, int] = {}

    def of(value: Any) -> Any:
        if isinstance(value, (nn.Module, Tensor)):
            if id(value) in seen:
                return ("again", seen[id(value)])
            seen[id(value)] = len(seen)
            if isinstance(value, nn.Module):
                return (type(value), of(vars(value)))
            if nn.parameter.is_lazy(value) or value.layout is not torch.strided:
                return ("object", id(value))
            return (type(value), value.shape, value.stride(), value.dtype, value.requires_grad, value.is_leaf)
        if isinstance(value, dict):
            return (type(value), tuple((of(k), of(v)) for k, v in value.items()))
        if isinstance(value, (list, tuple)):
            return (type(value), tuple(map(of, value)))
        if isinstance(value, (set, frozenset)):
            return (type(value), frozenset(map(of, value)))
        if value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype, torch.device)):
            return (type(value), value)
        if isinstance(value, Shared):
            return (type(value),)  # what it stands for, its holder says in plain attributes
        return ("object", id(value))

    return of(part)


class UnfitTensor(TypeError):
    """A tensor cannot be carried from layer to layer, because it is more than strided memory."""


def check_fit(where: str, tensor: Tensor) -> None:
    """Raise UnfitTensor for a tensor that is sparse, nested, quantized or of a class of its own."""
    if tensor.is_nested:
        kind = "nested tensor"
    elif tensor.layout != torch.strided:
        kind = f"tensor of layout {tensor.layout}"
    elif tensor.is_quantized:
        kind = "quantized tensor"
    elif type(tensor) in (Tensor, nn.Parameter) or isinstance(tensor, FakeTensor):
        return
    else:
        kind = f"tensor of class {type(tensor).__name__}"
    raise UnfitTensor(
        f"{where} is a {kind}, limit: plain strided tensors, which are copied from layer to layer; give what it "
        f"consists of as plain tensors, and put it together in the layer that uses it"
    )


class _Slot(NamedTuple):
    """Stands in a tree where tensor `number` goes: one tensor appearing twice has two slots, one number."""

    number: int


# How a value is made up: by tensor its dtype, number of dimensions and how they lie in memory; where tensors appear.
Form: TypeAlias = "tuple[tuple[Any, ...], ...]"


class Sizes(NamedTuple):
    """The sizes of a value, which decide the memory that a unit takes on it."""

    form: Form
    sizes: tuple[int, ...]  # every dimension of its tensors
    numbers: tuple[int, ...]  # whole numbers that are no less than 0
    values: tuple[Any, ...]  # other plain values; of what has no hash, its type


# Of a lone tensor, which most values are: taken apart and put together without walking a tree.
_LEAF = pytree.tree_structure(0)
_LONE = (_Slot(0),)


class Boundary(NamedTuple):
    """A value taken apart: its unique tensors, and how to build it again around other tensors."""

    tensors: tuple[Tensor, ...]
    requires_grad: tuple[bool, ...]
    views: tuple[bool, ...]  # which of them their producer made as views
    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    shares_memory: bool  # two of its tensors lie in one storage, which their copies do not

    @classmethod
    def of(cls, value: Any, where: str) -> Boundary:
        """Take `value` apart; `where` names its origin in errors.

        Raises UnfitTensor for tensors that are more than strided memory, which a copy would not be.
        """
        if type(value) is Tensor and value.layout == torch.strided and not (value.is_nested or value.is_quantized):
            return cls((value,), (value.requires_grad,), (value._is_view(),), _LONE, _LEAF, False)
        flat, spec = pytree.tree_flatten(value)
        numbers: dict[int, int] = {}
        tensors: list[Tensor] = []
        leaves: list[Any] = []
        for leaf in flat:
            if not isinstance(leaf, Tensor):
                leaves.append(leaf)
                continue
            check_fit(where, leaf)
            leaves.append(_Slot(numbers.setdefault(id(leaf), len(numbers))))
            if len(numbers) > len(tensors):
                tensors.append(leaf)
        places = [_place(tensor) for tensor in tensors if tensor.numel()]  # what is empty lies nowhere
        return cls(
            tuple(tensors),
            tuple(tensor.requires_grad for tensor in tensors),
            tuple(tensor._is_view() for tensor in tensors),
            tuple(leaves),
            spec,
            shares_memory=len(set(places)) < len(places),
        )

    @classmethod
    def of_layer(cls, value: Any) -> Boundary:
        """Take a layer's input or output apart; raises UnfitTensor for objects that hide tensors, too."""
        boundary = cls.of(value, "a layer's input or output")
        for leaf in boundary.leaves:
            if any(isinstance(held, Tensor) for held in getattr(leaf, "__dict__", {}).values()):
                raise UnfitTensor(
                    f"a layer's input or output holds a {type(leaf).__name__} with tensors inside, which nobody would "
                    f"carry from layer to layer; pass tuples, lists and dicts of tensors"
                )
        return boundary

    def build(self, tensors: Sequence[Tensor]) -> Any:
        """The value around these tensors; its containers are new each time, so a layer may change them."""
        if self.spec is _LEAF and tensors:
            return tensors[0]
        leaves = [tensors[leaf.number] if isinstance(leaf, _Slot) else leaf for leaf in self.leaves]
        return pytree.tree_unflatten(leaves, self.spec)

    def value(self) -> Any:
        """The value around its own tensors."""
        return self.build(self.tensors)

    def around(self, tensors: Sequence[Tensor]) -> Boundary:
        """The same value with its tensors elsewhere."""
        return Boundary(tuple(tensors), *self[1:])

    @property
    def num_bytes(self) -> int:
        """Bytes its tensors take once copied: strides are kept, so gaps travel too."""
        return sum(extent_bytes(tensor) for tensor in self.tensors)

    @property
    def storage_bytes(self) -> int:
        """Bytes of the storages behind its tensors, each once: what they keep alive."""
        storages = {id(storage): storage for storage in (tensor.untyped_storage() for tensor in self.tensors)}
        return sum(storage.nbytes() for storage in storages.values())

    @property
    def signature(self) -> Sizes:
        """The sizes that decide how much memory a unit takes on this value."""
        form = tuple((t.dtype, t.dim(), _order(t)) for t in self.tensors)
        sizes = tuple(size for t in self.tensors for size in t.shape)
        if self.spec is _LEAF and self.tensors:
            return Sizes((form,), sizes, (), ())
        slots = tuple(leaf.number for leaf in self.leaves if isinstance(leaf, _Slot))
        numbers = tuple(leaf for leaf in self.leaves if _is_number(leaf))
        values = tuple(_value(leaf) for leaf in self.leaves if not (isinstance(leaf, _Slot) or _is_number(leaf)))
        return Sizes((form, slots, (len(numbers),)), sizes, numbers, values)

    @property
    def fingerprint(self) -> Any:
        """Hashable; equal for values of the same structure, shapes, strides, types and plain values."""
        return fingerprint((self.tensors, self.leaves)), str(self.spec), self.views

    def detached(self) -> Boundary:
        """The same values without the graph that made them, requiring grad where they did."""
        return self.around([tensor.detach().requires_grad_(tensor.requires_grad) for tensor in self.tensors])

    def copied(self) -> Boundary:
        """Fresh tensors for one run of a layer, which may work in place on them.

        Autograd forbids that on a leaf that requires grad, so those are made by a function of this boundary's tensors,
        which receive the gradients. Views stay views: working in place on one (on a Linear's output, given a batch of
        sequences) makes backward copy the whole gradient twice.
        """
        differentiable = [tensor for tensor in self.tensors if tensor.requires_grad]
        for tensor in differentiable:
            tensor.grad = None  # the run before this one
        entered = iter(_Enter.apply(*differentiable) if differentiable else ())  # type: ignore[no-untyped-call]
        copies = [next(entered) if tensor.requires_grad else tensor.detach().clone() for tensor in self.tensors]
        return self.around(
            [copy.view_as(copy) if view else copy for copy, view in zip(copies, self.views, strict=True)]
        )


def _place(tensor: Tensor) -> int:
    """The tensor's storage, by address; a fake one has no address."""
    storage = tensor.untyped_storage()
    return storage._cdata if isinstance(tensor, FakeTensor) else storage.data_ptr()


class _Enter(torch.autograd.Function):
    """Copies tensors in and passes their gradients out."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # zeros for an unused input would be counted as the layer's
        return tuple(tensor.detach().clone() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return grads


def _is_number(leaf: Any) -> bool:
    """Return True for a number that a tensor may be cut by."""
    return type(leaf) is int and leaf >= 0


def _value(leaf: Any) -> Any:
    try:
        hash(leaf)
    except TypeError:
        return type(leaf)
    return leaf


def _order(tensor: Tensor) -> tuple[int, ...] | None:
    """Order of a tensor's dimensions in memory; its strides if gaps lie between. None: one after the other."""
    shape, stride = tensor.shape, tensor.stride()
    if tensor.is_contiguous() and 1 not in shape:
        return None
    order = tuple(sorted(range(len(shape)), key=lambda k: -stride[k]))
    step = 1
    for k in reversed(order):
        if stride[k] != step:
            return stride
        step *= max(1, shape[k])
    return None if order == tuple(range(len(shape))) else (-1, *order)


def extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to the last one of a strided tensor, gaps included."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def extent_bytes(tensor: Tensor) -> int:
    """Bytes from the first to the last element."""
    if tensor.is_contiguous():
        return tensor.nbytes
    return extent(tensor.shape, tensor.stride()) * tensor.element_size()
