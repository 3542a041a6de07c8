"""Places of a task's parameters, the shards that hold them, and the layers' structure without their weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from hydra_engine.data import ALIGNMENT_BYTES, identical
from hydra_engine.tasks import Model
from partitioners.boundary import extent, extent_bytes
from partitioners.cost import Skip
from partitioners.precision import DTYPES, compute_norms_in_float32, kept_parameters
from partitioners.replicas import Replicas

_VERSION = attrgetter("_version")


class LayerFault(ValueError):
    """A layer does what cannot be trained exactly; the message has no task's name yet."""


class Registered(NamedTuple):
    """A parameter or buffer of the layers."""

    name: str  # "parameter 0.weight"
    tensor: Tensor


@dataclass(frozen=True, kw_only=True)
class Slot:
    """One parameter of a task and its place in the host buffers of its kind (trainable or frozen).

    At `offset` lies the parameter itself, the master that the optimizer steps; at `link_offset` of another buffer what
    devices are sent. Where the precision casts nothing, the two are one. Places of parameters follow each other at
    multiples of the alignment, wherever the user's begin.
    """

    index: int
    name: str
    parameter: nn.Parameter
    trainable: bool
    owner: int  # the first layer that holds it: there it is stored, and updated
    offset: int
    num_bytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    gradient_stride: tuple[int, ...]  # as autograd lays a gradient out: in rows where the parameter has gaps
    dtype: torch.dtype
    link_offset: int
    link_bytes: int
    link_dtype: torch.dtype  # on devices, and of the gradient

    def gradient_view(self, storage: torch.UntypedStorage, offset: int, dtype: torch.dtype | None = None) -> Tensor:
        """The gradient's tensor at byte `offset` of a buffer; `dtype`: of another tensor that is laid out alike."""
        dtype = dtype or self.link_dtype
        empty = torch.empty(0, dtype=dtype, device=storage.device)
        return empty.set_(storage, offset // dtype.itemsize, self.shape, self.gradient_stride)

    def finished(self, gradient: Tensor, loss_scale: float | None) -> Tensor:
        """The gradient as the optimizer takes it: of the parameter's own type, without the loss scale."""
        gradient = gradient.to(self.dtype)
        return gradient if loss_scale is None else gradient * (1 / loss_scale)

    def norm(self, gradient: Tensor, loss_scale: float | None) -> Tensor:
        """The norm of the gradient as the optimizer takes it."""
        # Not of a wider copy where that can be left to torch: on a GPU it makes none.
        taken = gradient if loss_scale is None else self.finished(gradient, loss_scale)
        norm: Tensor = torch.linalg.vector_norm(taken, dtype=self.dtype)
        return norm

    def link_view(self, storage: torch.UntypedStorage, offset: int) -> Tensor:
        """The tensor that devices compute with, at byte `offset` of a slab or a host buffer."""
        return self.view(storage, offset, self.link_dtype)

    def view(self, storage: torch.UntypedStorage, offset: int, dtype: torch.dtype | None = None) -> Tensor:
        """The parameter's tensor at byte `offset` of a host buffer; `dtype`: another than its own."""
        dtype = dtype or self.dtype
        # By `set_`, not by slicing one tensor: views share a version counter, and a load into another slab of the same
        # arena would then make autograd refuse this one.
        tensor = torch.empty(0, dtype=dtype, device=storage.device)
        if offset % dtype.itemsize:  # a file that was mapped may have any address; storages begin at any byte
            storage, offset = storage[offset:], 0
        return tensor.set_(storage, offset // dtype.itemsize, self.shape, self.stride)


class Binding(NamedTuple):
    """Attribute `attribute` of submodule `path` of a layer is slot (or buffer) `number`."""

    path: str
    attribute: str
    number: int


class SlabPiece(NamedTuple):
    """`num_bytes` at `source` of a link buffer go to `target` of a slab, in one copy."""

    trainable: bool
    source: int
    target: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Layers `[first, last)` of a task, and what their slab looks like."""

    index: int
    first: int
    last: int
    offsets: dict[int, int]  # by slot, of every parameter it holds: where it lies in the slab
    pieces: tuple[SlabPiece, ...]  # one per kind, and one for each tied parameter that a lower shard owns
    slab_bytes: int
    own_bytes: int  # of these, for trainable parameters, which come first; frozen ones may be other tasks', too
    owned: tuple[int, ...]  # trainable parameters it updates
    borrowed: dict[int, int]  # trainable parameters that a lower shard owns, and which
    upper: dict[int, int]  # slot -> the next higher shard that holds it, whose gradient is handed down
    buffers: tuple[int, ...]
    buffer_bytes: int
    arriving: tuple[str, ...] = ()  # names of the values that skip layers and are gotten here
    leaving: tuple[str, ...] = ()  # names of those that are put here and gotten above
    above: dict[str, int] = field(default_factory=dict)  # by such a name: the next higher shard that gets it

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def slots(self) -> tuple[int, ...]:
        return tuple(self.offsets)

    @property
    def needs(self) -> tuple[int, ...]:
        """Shards whose update this one's load waits for."""
        return tuple(sorted({*self.borrowed.values(), *([self.index] if self.owned else ())}))


class Labels:
    """How the user knows layers, for messages. Refers to the model weakly: others of its structure may ask on."""

    def __init__(self, shown: Callable[[str], str]) -> None:
        """`shown`: a method that tells it of a layer or a path in one; its object has to be kept alive elsewhere."""
        self._shown = WeakMethod(shown)
        self._known: dict[str, str] = {}  # units ask for those of layers

    def __call__(self, path: str) -> str:
        if path not in self._known:
            shown = self._shown()
            self._known[path] = path if shown is None else shown(path)
        return self._known[path]


class ModelLayout:
    """The parameters and buffers of a task in layer order; a module loss counts as part of the last layer's shard.

    In a narrow precision, floating-point parameters cross the link in it, but for those of norms and of the loss.
    Where nothing `trains`, all parameters lie with the frozen ones: there are no gradients.
    """

    def __init__(
        self,
        model: Model,
        loss_fn: Callable[..., Any] | None,
        precision: str = "float32",
        *,
        trains: bool = True,
        alignment_bytes: int = ALIGNMENT_BYTES,
        trained: Collection[int] = (),
    ) -> None:
        """`alignment_bytes`: that the place of every parameter is a multiple of, in DRAM and in slabs.

        trained: ids of parameters that train at some time, also where they are frozen now.
        """
        self._alignment_bytes = alignment_bytes
        self.shown = Labels(model.shown)
        named = model.source if model.has_names_of_source else nn.Module()
        self._source_names: dict[int, list[str]] = {}  # by id, every one that a state dict has; see `_names`
        both = named.named_parameters, named.named_buffers
        for name, tensor in chain(*(each(remove_duplicate=False) for each in both)):
            self._source_names.setdefault(id(tensor), []).append(name)
        loss = {"loss_fn": loss_fn} if isinstance(loss_fn, nn.Module) else {}
        self.layers: list[nn.Module] = [*model, *loss.values()]
        self.names = [*model._modules, *loss]
        self.num_layers = len(model)
        self.slots: list[Slot] = []
        self.buffers: list[Tensor] = []
        self.num_bytes = {True: 0, False: 0}  # of the parameters, by trainable
        self.link_bytes = {True: 0, False: 0}  # of what devices are sent
        self.narrow = None if precision == "float32" else DTYPES[precision]
        kept = set().union(*map(kept_parameters, model)) if self.narrow else set()
        kept |= {id(parameter) for each in loss.values() for parameter in each.parameters()}
        self.parameters: list[list[Binding]] = []  # by layer
        self.buffer_bindings: list[list[Binding]] = []
        self._ends: list[dict[bool, int]] = []  # by layer: where its parameters end in each link buffer
        numbers: dict[int, int] = {}  # by id
        buffer_numbers: dict[int, int] = {}  # likewise: a parameter may be registered as a buffer, too
        self._buffer_names: dict[str, tuple[int, bool]] = {}  # with their numbers; True: a state dict has it
        for k, layer in enumerate(self.layers):
            for path, name, parameter in _named(layer, "_parameters"):
                if id(parameter) not in numbers:
                    numbers[id(parameter)] = len(self.slots)
                    link_dtype = self.narrow if self.narrow and id(parameter) not in kept else parameter.dtype
                    is_trainable = trains and (parameter.requires_grad or id(parameter) in trained)
                    self._place(k, self._names(k, path, name, parameter)[0], parameter, is_trainable, link_dtype)
            for path, name, buffer in _named(layer, "_buffers"):
                if id(buffer) not in buffer_numbers:
                    buffer_numbers[id(buffer)] = len(self.buffers)
                    self.buffers.append(buffer)
                persists = k < self.num_layers and name not in layer.get_submodule(path)._non_persistent_buffers_set
                for each in self._names(k, path, name, buffer):
                    self._buffer_names.setdefault(each, (buffer_numbers[id(buffer)], persists))
            kinds = (("_parameters", numbers, self.parameters), ("_buffers", buffer_numbers, self.buffer_bindings))
            for kind, of, found in kinds:
                found.append([Binding(path, name, of[id(each)]) for path, name, each in _named(layer, kind)])
            self._ends.append(dict(self.link_bytes))

    def _place(
        self, layer: int, name: str, parameter: nn.Parameter, is_trainable: bool, link_dtype: torch.dtype
    ) -> None:
        size = extent(parameter.shape, parameter.stride())
        is_dense = torch.ops.aten.is_non_overlapping_and_dense(parameter)
        order = torch.preserve_format if is_dense else torch.contiguous_format
        num_bytes = size * parameter.element_size()
        slot = Slot(
            index=len(self.slots),
            name=name,
            parameter=parameter,
            trainable=is_trainable,
            owner=min(layer, self.num_layers - 1),
            offset=self.num_bytes[is_trainable],
            num_bytes=num_bytes,
            shape=tuple(parameter.shape),
            stride=parameter.stride(),
            gradient_stride=torch.empty_like(parameter, device="meta", memory_format=order).stride(),
            dtype=parameter.dtype,
            link_offset=self.link_bytes[is_trainable],
            link_bytes=size * link_dtype.itemsize,
            link_dtype=link_dtype,
        )
        self.slots.append(slot)
        self.num_bytes[is_trainable] += self.aligned(num_bytes)
        self.link_bytes[is_trainable] += self.aligned(slot.link_bytes)

    def _names(self, layer: int, path: str, attribute: str, tensor: Tensor) -> list[str]:
        """Names of an attribute as state dicts of the model have it."""
        own = ".".join(filter(None, (self.names[layer], path, attribute)))
        return self._source_names.get(id(tensor), [own])

    @property
    def registered(self) -> list[Registered]:
        """Parameters, then buffers as the user's modules have them now, by their names."""
        names: dict[int, str] = {}
        for name, (number, _) in self._buffer_names.items():
            names.setdefault(number, f"buffer {name}")
        parameters = [Registered(f"parameter {slot.name}", slot.parameter) for slot in self.slots]
        return [*parameters, *(Registered(names[number], buffer) for number, buffer in enumerate(self.buffers))]

    @cached_property
    def views(self) -> list[tuple[nn.Module, str]]:
        """Attributes that are views of parameters or buffers, as they were before these were moved to the host pool.

        Replicas begin without them: their module's forward or hook makes them. Raises LayerFault for layers that
        replicas cannot stand for.
        """
        storages = {tensor.untyped_storage().data_ptr() for _, tensor in self.registered if _address(tensor)}
        known = {id(tensor) for _, tensor in self.registered}
        found = []
        for name, layer in zip(self.names, self.layers, strict=True):
            for path, module in layer.named_modules():
                if isinstance(module, torch.jit.ScriptModule):
                    where = self.shown(f"{name}.{path}" if path else name)
                    raise LayerFault(
                        f"{where} is compiled by torch.jit, expected a module in Python, which can have other weights: "
                        f"give the module from before torch.jit.script or trace, and script it after training"
                    )
                others = ((key, each) for key, each in vars(module).items() if isinstance(each, Tensor))
                for attribute, tensor in others:
                    is_own = id(tensor) in known or not _address(tensor)
                    if not is_own and tensor.untyped_storage().data_ptr() in storages:
                        found.append((module, attribute))
        return found

    def persistent_buffers(self) -> dict[str, int]:
        """Buffers that a state dict of the model has, by name, and their numbers."""
        return {name: number for name, (number, persists) in self._buffer_names.items() if persists}

    def named_slots(self) -> Iterator[tuple[str, Slot, bool]]:
        """Parameters by every name that they have, and whether a loss holds it."""
        for k, bindings in enumerate(self.parameters):
            for path, attribute, number in bindings:
                slot = self.slots[number]
                for name in self._names(k, path, attribute, slot.parameter):
                    yield name, slot, k >= self.num_layers

    def put_buffers(self, values: Sequence[Tensor], numbers: Collection[int] | None = None) -> None:
        """Give the user's modules these values, by number; `numbers`: only these of them."""
        before, self.buffers = self.buffers, list(self.buffers)
        for layer, bindings in zip(self.layers, self.buffer_bindings, strict=True):
            for path, name, index in bindings:
                if numbers is not None and index not in numbers:
                    continue
                module, own, value = layer.get_submodule(path), before[index], values[index]
                if (own.shape, own.stride(), own.dtype) == (value.shape, value.stride(), value.dtype):
                    if not identical(own, value):  # expanded ones cannot be written to
                        own.copy_(value)
                else:  # a forward bound a tensor of another kind
                    module._buffers[name] = self.buffers[index] = value

    def aligned(self, num_bytes: int) -> int:
        return -(-num_bytes // self._alignment_bytes) * self._alignment_bytes

    def buffer_bytes(self, buffer: Tensor) -> int:
        return self.aligned(extent_bytes(buffer))

    def trainable_slots(self) -> list[Slot]:
        """Trainable parameters, in the order of `model.parameters()`."""
        order = {key: k for k, key in enumerate(self._source_names)}
        return sorted((s for s in self.slots if s.trainable), key=lambda s: order.get(id(s.parameter), 0))

    def shards(self, boundaries: Sequence[int], skips: Sequence[Skip] = ()) -> list[Shard]:
        """The shards with these cumulative end indices; `skips`: values that skip layers."""
        owners = {slot.index: sum(slot.owner >= end for end in boundaries) for slot in self.slots}
        higher: dict[int, int] = {}  # slot -> the lowest shard so far that holds it, from the last one downwards
        found: list[Shard] = []
        for j in reversed(range(len(boundaries))):
            found.append(self._shard(j, boundaries, skips, owners, higher))
            higher.update(dict.fromkeys(found[-1].offsets, j))
        return found[::-1]

    def _shard(
        self, j: int, boundaries: Sequence[int], skips: Sequence[Skip], owners: dict[int, int], higher: dict[int, int]
    ) -> Shard:
        first, last = boundaries[j - 1] if j else 0, boundaries[j]
        end = last if last < self.num_layers else len(self.layers)
        held = sorted({binding.number for k in range(first, end) for binding in self.parameters[k]})
        pieces: list[SlabPiece] = []
        offsets: dict[int, int] = {}
        target = own_bytes = 0
        for kind in (True, False):
            start = self._ends[first - 1][kind] if first else 0
            stop = self._ends[end - 1][kind]
            if stop > start:
                pieces.append(SlabPiece(kind, start, target, stop - start))
            for index in held:
                if self.slots[index].trainable == kind and owners[index] == j:
                    offsets[index] = target + self.slots[index].link_offset - start
            target += stop - start
            for index in held:
                slot = self.slots[index]
                if slot.trainable == kind and owners[index] != j:
                    offsets[index] = target
                    pieces.append(SlabPiece(kind, slot.link_offset, offsets[index], slot.link_bytes))
                    target += self.aligned(slot.link_bytes)
            own_bytes = target if kind else own_bytes
        held_skips = [skip for skip in skips if skip.gets[-1] >= last]
        next_get = {skip.name: min(k for k in skip.gets if k >= last) for skip in held_skips}
        buffers = sorted({binding.number for k in range(first, end) for binding in self.buffer_bindings[k]})
        trainable = [index for index in held if self.slots[index].trainable]
        return Shard(
            index=j,
            first=first,
            last=last,
            offsets={index: offsets[index] for index in held},
            pieces=tuple(pieces),
            slab_bytes=target,
            own_bytes=own_bytes,
            owned=tuple(index for index in trainable if owners[index] == j),
            borrowed={index: owners[index] for index in trainable if owners[index] != j},
            upper={index: higher[index] for index in trainable if index in higher},
            buffers=tuple(buffers),
            buffer_bytes=sum(self.buffer_bytes(self.buffers[index]) for index in buffers),
            arriving=tuple(s.name for s in skips if s.put < first and any(first <= k < last for k in s.gets)),
            leaving=tuple(skip.name for skip in held_skips if first <= skip.put < last),
            above={name: sum(end <= layer for end in boundaries) for name, layer in next_get.items()},
        )


def _named(layer: nn.Module, kind: str) -> Iterator[tuple[str, str, Any]]:
    # Attributes, not tensors, are what a structure binds: one parameter under two names is found twice.
    for path, module in layer.named_modules(remove_duplicate=False):
        for name, tensor in getattr(module, kind).items():
            if tensor is not None:
                yield path, name, tensor


def _address(tensor: Tensor) -> int:
    """Return where a tensor's memory begins; 0 if it has none."""
    is_plain = tensor.layout == torch.strided and not nn.parameter.is_lazy(tensor) and tensor.device.type != "meta"
    return tensor.data_ptr() if is_plain and tensor.numel() else 0


def writes(name: str) -> str:
    """Say that a layer writes to its parameter."""
    return (
        f"writes to its parameter {name!r}, limit: only the optimizer changes parameters; compute the changed one anew "
        f"in each forward (torch.nn.utils.parametrize), keep what a forward changes in a buffer (the weights of a mean "
        f"teacher, say), leave out options such as max_norm, or change it after training and evaluation"
    )


class Structure:
    """One device's replicas of a task's layers: all of their Python, none of their tensors.

    Parameters and buffers are empty placeholders whose `.data` is pointed at a slab while a unit runs, so that two
    devices can run one shard at once, and whatever else in a layer refers to the same Parameter object (an LSTM's list
    of flat weights) follows. Python attributes that a forward changes are put back after each unit, by the executor.
    """

    def __init__(self, layout: ModelLayout, device: torch.device) -> None:
        self.device = device
        self.narrow = layout.narrow
        self._placeholders: dict[torch.dtype, Tensor] = {}
        self.parameters: list[nn.Parameter] = []
        for slot in layout.slots:
            # `.data`: with a version counter of its own, so that changing one in place is not a change of all.
            empty = self._placeholder(slot.link_dtype).data
            self.parameters.append(nn.Parameter(empty, requires_grad=slot.parameter.requires_grad))
        self._requires_grad = [parameter.requires_grad for parameter in self.parameters]
        self._trains = any(slot.trainable for slot in layout.slots)
        self.buffers = [self._placeholder(buffer.dtype).data for buffer in layout.buffers]
        self._registered, views = layout.registered, layout.views
        places = zip(self._registered, [*self.parameters, *self.buffers], strict=True)
        self._replicas = Replicas(layout.layers, {id(each.tensor): place for each, place in places})
        self.layers: list[nn.Module] = self._replicas.roots
        for module, attribute in views:
            del vars(self._replicas.of(module))[attribute]
        if self.narrow is not None:
            for layer in self.layers[: layout.num_layers]:
                compute_norms_in_float32(layer, self.narrow)
        self.names, self.shown = layout.names, layout.shown
        self.slot_names = [slot.name for slot in layout.slots]
        self._buffer_places = [
            [(layer.get_submodule(b.path), b.attribute, b.number) for b in bindings]
            for layer, bindings in zip(self.layers, layout.buffer_bindings, strict=True)
        ]
        numbers = {(id(module), name): index for each in self._buffer_places for module, name, index in each}
        holders = Counter(numbers.values())
        self._shared_places = [each for of in self._buffer_places for each in of if holders[each[2]] > 1]

    def _placeholder(self, dtype: torch.dtype) -> Tensor:
        """Nothing of a dtype: one for all, kept for good.

        Made anew after each unit, it would lie behind the unit's gradient in the heap, so that the gradient's place,
        once free, grows with nothing around it and is too small for the next one (an aligned block of the C library is
        cut from a larger one): every unit of a step would leave such a place behind.
        """
        if dtype not in self._placeholders:
            self._placeholders[dtype] = torch.empty(0, dtype=dtype, device=self.device)
        return self._placeholders[dtype]

    def bind(self, views: dict[int, Tensor], buffers: dict[int, Tensor]) -> None:
        for index, view in views.items():
            self.parameters[index].data = view
        for index, buffer in buffers.items():
            self.buffers[index].data = buffer

    def take_buffers(self, first: int, end: int) -> dict[int, Tensor]:
        """The buffers of layers `[first, end)` as their forward left them, also where it bound a new tensor."""
        found: dict[int, Tensor] = {}
        for module, name, index in chain(*self._buffer_places[first:end]):
            value = module._buffers.get(name)  # one that was deleted, its executor refuses
            if value is not None and value is not self.buffers[index]:
                found[index] = value.detach()
                module._buffers[name] = self.buffers[index]
            else:
                found.setdefault(index, self.buffers[index].data)
        return found

    def parameter_versions(self, slots: Iterable[int]) -> list[int]:
        """Numbers that change when a parameter is written to, other than through `.data`."""
        return list(map(_VERSION, map(self.parameters.__getitem__, slots)))

    def check_parameters(self, views: Mapping[int, Tensor], versions: Sequence[int]) -> None:
        """Refuse what was written to since it was bound to its view, or is switched.

        Views are by slot. An LSTM on a GPU moves its weights elsewhere for cuDNN, with the same values; on the CPU
        nothing does. Raises LayerFault.
        """
        is_on_cpu = self.device.type == "cpu"
        for (index, view), version in zip(views.items(), versions, strict=True):
            parameter = self.parameters[index]
            is_moved = parameter.data_ptr() != view.data_ptr()
            if is_on_cpu if is_moved else parameter._version != version:
                raise LayerFault(f"a layer {writes(self.slot_names[index])}")
            if parameter.requires_grad != self._requires_grad[index] and self._trains:
                raise LayerFault(
                    f"a layer switches requires_grad of its parameter {self.slot_names[index]!r}, limit: as before "
                    f"training, since each device has a copy; set it before, or detach in the forward"
                )

    def check_shared(self) -> None:
        """Raises LayerFault for a buffer of several modules in whose place one of them has set another."""
        for module, name, index in self._shared_places:
            if module._buffers.get(name) is not self.buffers[index]:
                each = self._registered[len(self.parameters) + index].name
                raise LayerFault(
                    f"{each}, which several modules hold, is replaced in the forward of a {type(module).__name__}, "
                    f"limit: one for all, since the others would go on with the old one: write to it in place "
                    f"(copy_, add_), or register a clone in each"
                )

    def current_buffers(self, first: int, end: int) -> dict[int, Tensor]:
        """The buffers of layers `[first, end)` as they are bound now."""
        found: dict[int, Tensor] = {}
        for module, name, index in chain(*self._buffer_places[first:end]):
            value = module._buffers.get(name)
            if value is not None and (index not in found or value is not self.buffers[index]):
                found[index] = value
        return found

    def buffer_versions(self, first: int, end: int) -> dict[int, tuple[int, int, int]]:
        """Numbers that change when one of them is written to, or another tensor takes its place."""
        found = self.current_buffers(first, end)
        return {index: (id(value), value.data_ptr(), value._version) for index, value in found.items()}

    def release(self, shard: Shard) -> None:
        """Let go of the slab: nothing here keeps device memory alive between units."""
        places = [*(self.parameters[k] for k in shard.slots), *(self.buffers[k] for k in shard.buffers)]
        for place in places:
            place.grad = None
            place.data = self._placeholder(place.dtype)
