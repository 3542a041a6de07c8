"""Frozen parameters in DRAM: once, however many tasks hold them."""

from __future__ import annotations

import threading
from collections.abc import Collection, Hashable, Set
from dataclasses import dataclass, field
from itertools import count, takewhile
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from hydra_engine.data import copy_of, flat, identical
from hydra_engine.host.layout import ModelLayout, Slot
from hydra_engine.system import Freed, HostMemory, is_alone

Cast: TypeAlias = "tuple[int, torch.dtype | None]"  # of a group; None: its weights
Missing: TypeAlias = "dict[Cast, Slot]"


@dataclass(eq=False, kw_only=True)
class FrozenBlock:
    """One frozen parameter, and its casts that devices are sent; where nothing is cast, the two are one."""

    serial: int  # never used twice, so that a device can tell blocks apart
    slot: Slot  # of the layout that brought it
    storage: torch.UntypedStorage
    host: HostMemory  # which the storage is of
    offset: int
    links: dict[torch.dtype, tuple[torch.UntypedStorage, int]] = field(default_factory=dict)  # and where in it
    parameters: list[nn.Parameter] = field(default_factory=list)  # bound to it
    num_users: int = 0
    num_writes: int = 0  # that callbacks may have made without a word to autograd
    _bound_versions: int = 0

    @property
    def weight(self) -> Tensor:
        return self.slot.view(self.storage, self.offset)

    def cast(self, slot: Slot) -> Tensor:
        """The tensor that devices are sent for a slot."""
        return slot.link_view(*self.links[slot.link_dtype])

    @property
    def version(self) -> int:
        """Grows when it is written to: nobody here does, but a callback may."""
        return self.num_writes + sum(parameter._version for parameter in self.parameters) - self._bound_versions

    def cast_anew(self) -> None:
        """Take over what was written to it: devices load it again."""
        self.num_writes += 1
        for dtype, (storage, offset) in self.links.items():
            if dtype != self.slot.dtype:
                link = self.slot.view(storage, offset, dtype)
                flat(link).copy_(flat(self.weight))

    def bind(self, parameter: nn.Parameter) -> None:
        """Point a parameter at it."""
        if any(each is parameter for each in self.parameters):
            return
        parameter.data = self.weight
        self.parameters.append(parameter)
        self._bound_versions += parameter._version


class FrozenBlocks:
    """The frozen parameters of tasks that may share some: one `nn.Parameter`, or several on the same memory.

    What a task brings lies in one piece, in the order of its layers. Several threads may call.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._serials = count()
        self._layouts: list[ModelLayout] = []  # in order, whose parameters will be here, or are
        self._blocks: dict[int, FrozenBlock] = {}  # by group
        # By id: a parameter, the group of those that lay on one memory with it, and where it lies as far as is known
        # here. One by one they are moved, for a rehearsal, say, and are still of one group.
        self._members: dict[int, tuple[nn.Parameter, int, Hashable]] = {}
        self._at: dict[Hashable, dict[int, int]] = {}  # by place: groups of those that lie there, by id

    def plan(self, layout: ModelLayout) -> None:
        """Tell of a layout before its parameters are moved here."""
        with self._lock:
            self._layouts.append(layout)
            for slot in _frozen(layout):
                self._group(slot.parameter)

    def forget(self, layout: ModelLayout) -> None:
        """A layout that was told of will not come any more."""
        with self._lock:
            self._layouts = [each for each in self._layouts if each is not layout]
            held = {id(slot.parameter) for each in self._layouts for slot in _frozen(each)}
            held |= {id(parameter) for block in self._blocks.values() for parameter in block.parameters}
            for key in [key for key in self._members if key not in held]:
                self._leave(key)

    def brought(self, layout: ModelLayout) -> tuple[list[Slot], list[Slot]]:
        """The frozen slots whose weights a planned layout brings, and those whose casts: no other has them before."""
        with self._lock:
            known = self._known()
            weights: Missing = {}
            casts: Missing = {}
            for each in self._layouts:
                weights, casts = self._missing(each, known)
                known |= {*weights, *casts}
                if each is layout:
                    break
            return list(weights.values()), list(casts.values())

    @property
    def here_bytes(self) -> int:
        """Bytes of all weights and casts that are here, whoever brought them."""
        with self._lock:
            return sum(b.weight.numel() * dtype.itemsize for b in self._blocks.values() for dtype in b.links)

    def _known(self) -> set[Cast]:
        """The casts that are here, and with None the weights."""
        return {(group, dtype) for group, block in self._blocks.items() for dtype in (None, *block.links)}

    def _missing(self, layout: ModelLayout, known: Set[Cast]) -> tuple[Missing, Missing]:
        """Slots whose weights, and slots whose casts, are not among those that are known."""
        weights: Missing = {}
        casts: Missing = {}
        for slot in _frozen(layout):
            group = self._group(slot.parameter)
            if (group, None) not in known:
                weights.setdefault((group, None), slot)
            if slot.link_dtype != slot.dtype and (group, slot.link_dtype) not in known:
                casts.setdefault((group, slot.link_dtype), slot)
        return weights, casts

    def doubled_bytes(self, layout: ModelLayout) -> int:
        """Bytes of the frozen weights that a planned layout brings although one before it has equal ones elsewhere.

        None where that is the smaller part: norms of ones are equal in all models. Values are compared where the first
        of them are equal, so that weights of other models cost nothing.
        """
        brought, _ = self.brought(layout)
        if not brought:
            return 0
        before = takewhile(lambda each: each is not layout, list(self._layouts))
        others: dict[Hashable, list[nn.Parameter]] = {}
        for slot in (slot for each in before for slot in _frozen(each)):
            others.setdefault(_first_values(slot.parameter), []).append(slot.parameter)
        doubled = sum(
            slot.num_bytes
            for slot in brought
            if any(identical(slot.parameter, other) for other in others.get(_first_values(slot.parameter), ()))
        )
        return doubled if 2 * doubled > sum(slot.num_bytes for slot in brought) else 0

    def acquire(
        self, layout: ModelLayout, host: HostMemory
    ) -> tuple[dict[int, FrozenBlock], list[torch.UntypedStorage]]:
        """Bind a layout's frozen parameters to blocks: by slot, and the storages that were made for them by `host`."""
        with self._lock:
            groups = {slot.index: self._group(slot.parameter) for slot in _frozen(layout)}
            weights, uncast = self._missing(layout, self._known())
            new = {group: slot for (group, _), slot in weights.items()}
            # Weights that all tasks here are sent casts of cross no link themselves.
            planned = [slot for each in (layout, *self._layouts) for slot in _frozen(each)]
            crosses = any(slot.link_dtype == slot.dtype and self._group(slot.parameter) in new for slot in planned)
            masters_host = host if crosses else HostMemory()
            storage = masters_host.new(sum(layout.aligned(slot.num_bytes) for slot in new.values()), is_written=False)
            link = host.new(sum(layout.aligned(slot.link_bytes) for slot in uncast.values()), is_written=False)
            offset, freed = 0, Freed()
            for group, slot in new.items():  # one at a time: extra DRAM is that of one parameter
                block = FrozenBlock(
                    serial=next(self._serials), slot=slot, storage=storage, host=masters_host, offset=offset
                )
                block.links[slot.dtype] = (storage, offset)
                flat(block.weight).copy_(flat(slot.parameter.data))  # an expanded one takes no other copy
                self._blocks[group] = block
                block.bind(slot.parameter)
                self._moved(slot.parameter)
                freed.add(slot.num_bytes)
                offset += layout.aligned(slot.num_bytes)
            found = {}
            for slot in _frozen(layout):
                block = found[slot.index] = self._blocks[groups[slot.index]]
                block.num_users += 1
                block.bind(slot.parameter)
                self._moved(slot.parameter)
            offset = 0
            for slot in uncast.values():
                block = found[slot.index]
                block.links[slot.link_dtype] = (link, offset)
                flat(block.cast(slot)).copy_(flat(block.weight))
                offset += layout.aligned(slot.link_bytes)
            return found, [storage, link]

    def _moved(self, parameter: nn.Parameter) -> None:
        if id(parameter) in self._members:
            self._join(parameter, self._members[id(parameter)][1])

    def _join(self, parameter: nn.Parameter, group: int) -> None:
        if id(parameter) in self._members:
            self._leave(id(parameter))
        place = _place(parameter)
        self._members[id(parameter)] = (parameter, group, place)
        self._at.setdefault(place, {})[id(parameter)] = group

    def _leave(self, key: int) -> None:
        _, _, place = self._members.pop(key)
        del self._at[place][key]
        if not self._at[place]:
            del self._at[place]

    def _group(self, parameter: nn.Parameter) -> int:
        """The group that a parameter is one with: those on its memory, unless its user gave it another since."""
        place = _place(parameter)
        known = self._members.get(id(parameter))
        if known is not None and known[2] == place:
            return known[1]
        there = self._at.get(place)
        group = next(self._serials) if there is None else next(iter(there.values()))
        self._join(parameter, group)
        return group

    def release(self, blocks: Collection[FrozenBlock]) -> None:
        """A task is through with them; whose last user it was gets ordinary storage again."""
        with self._lock:
            alone: dict[int, bool] = {}
            for block in blocks:
                block.num_users -= 1
            over = list({id(block): block for block in blocks if not block.num_users}.values())  # slots may share one
            for block in over:
                if id(block.storage) not in alone:
                    inside = [b for b in self._blocks.values() if b.storage is block.storage]
                    alone[id(block.storage)] = is_alone(block.storage, [p for b in inside for p in b.parameters])
                    if not any(each.num_users for each in inside):
                        block.host.let_go(block.storage)
            for block in over:
                own = copy_of(block.weight)
                for parameter in block.parameters:
                    if parameter.data_ptr() == block.weight.data_ptr():  # or its user gave it another memory since
                        parameter.grad = None
                        parameter.data = own.detach()
                        self._moved(parameter)
                if alone[id(block.storage)]:  # or all weights would be there twice
                    block.host.discard(block.storage, block.offset, block.slot.num_bytes)
            self._blocks = {group: block for group, block in self._blocks.items() if block.num_users}


def _frozen(layout: ModelLayout) -> list[Slot]:
    return [slot for slot in layout.slots if not slot.trainable]


def _first_values(parameter: nn.Parameter) -> Hashable:
    """Key that parameters have in common whose values may be equal."""
    values = () if parameter.is_meta else tuple(flat(parameter).reshape(-1)[:16].tolist())
    return parameter.dtype, tuple(parameter.shape), parameter.stride(), values or id(parameter)


def _place(parameter: nn.Parameter) -> Hashable:
    """The place where a parameter lies. While this is kept, nothing else will lie at the same address."""
    storage = StorageWeakRef(parameter.untyped_storage())  # type: ignore[no-untyped-call]
    return storage, parameter.storage_offset(), parameter.dtype, tuple(parameter.shape), parameter.stride()
