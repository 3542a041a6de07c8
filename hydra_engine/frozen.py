"""Frozen parameters in DRAM: once, however many tasks hold them."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor, nn

from hydra_engine.boundary import copy_of
from hydra_engine.dram import Freed, discard, is_alone, new_storage
from hydra_engine.shard import ModelLayout, Slot, aligned


@dataclass(eq=False, kw_only=True)
class Block:
    """One frozen parameter, and the cast of it that devices are sent; where nothing is cast, the two are one."""

    serial: int  # never used twice, so that a device can tell blocks apart
    slot: Slot  # of the layout that brought it
    storage: torch.UntypedStorage
    offset: int
    link: torch.UntypedStorage
    link_offset: int
    parameters: list[nn.Parameter]  # bound to it
    num_users: int = 0

    @property
    def weight(self) -> Tensor:
        return self.slot.view(self.storage, self.offset)

    @property
    def narrow(self) -> Tensor:
        """What devices are sent."""
        return self.slot.link_view(self.link, self.link_offset)


class FrozenBlocks:
    """The frozen parameters of tasks that may share some: one `nn.Parameter`, or several on the same memory.

    A task's own lie in one piece, in the order of its layers. Several threads may call.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._serials = count()
        self._blocks: dict[tuple[int, torch.dtype], Block] = {}
        self._same: dict[int, nn.Parameter] = {}  # by id of a parameter: the first one on its memory, which lives on
        self._joined: list[nn.Parameter] = []  # so that no id above is another's

    def join(self, layout: ModelLayout) -> set[int]:
        """Make a layout's frozen parameters known, before any is moved; slots of those that are known already."""
        with self._lock:
            places = {_place(parameter): self._same[id(parameter)] for parameter in self._joined}
            shared = set()
            for slot in layout.slots:
                if slot.trainable:
                    continue
                first = self._same.get(id(slot.parameter))
                if first is None:
                    first = places.get(_place(slot.parameter))
                if first is not None:
                    shared.add(slot.index)
                elif slot.num_bytes:
                    places[_place(slot.parameter)] = slot.parameter
                if id(slot.parameter) not in self._same:
                    self._same[id(slot.parameter)] = slot.parameter if first is None else first
                    self._joined.append(slot.parameter)
            return shared

    def acquire(self, layout: ModelLayout) -> tuple[dict[int, Block], list[torch.UntypedStorage]]:
        """Bind a layout's frozen parameters to blocks: by slot, and the storages that were made for them."""
        with self._lock:
            slots = [slot for slot in layout.slots if not slot.trainable]
            new = [slot for slot in slots if self._key(slot) not in self._blocks]
            storage = link = new_storage(sum(aligned(slot.num_bytes) for slot in new))
            if layout.narrow is not None:
                link = new_storage(sum(aligned(slot.link_bytes) for slot in new))
            offset = link_offset = 0
            freed = Freed()
            for slot in new:
                block = self._blocks[self._key(slot)] = Block(
                    serial=next(self._serials),
                    slot=slot,
                    storage=storage,
                    offset=offset,
                    link=link,
                    link_offset=link_offset if layout.narrow is not None else offset,
                    parameters=[slot.parameter],
                )
                block.weight.copy_(slot.parameter.data)
                slot.parameter.data = block.weight  # one at a time: extra DRAM is that of one parameter
                freed.add(slot.num_bytes)
                if layout.narrow is not None:
                    block.narrow.copy_(block.weight)
                offset += aligned(slot.num_bytes)
                link_offset += aligned(slot.link_bytes)
            found = {}
            for slot in slots:
                block = found[slot.index] = self._blocks[self._key(slot)]
                block.num_users += 1
                if not any(parameter is slot.parameter for parameter in block.parameters):
                    block.parameters.append(slot.parameter)
                    slot.parameter.data = block.weight
            return found, [storage] if link is storage else [storage, link]

    def release(self, blocks: Iterable[Block]) -> None:
        """A task is through with them; whose last user it was gets ordinary storage again."""
        with self._lock:
            alone: dict[int, bool] = {}
            over = []
            for block in blocks:
                block.num_users -= 1
                if block.num_users == 0:
                    over.append(block)
            for block in over:
                if id(block.storage) not in alone:
                    inside = [b for b in self._blocks.values() if b.storage is block.storage]
                    alone[id(block.storage)] = is_alone(block.storage, [p for b in inside for p in b.parameters])
            for block in over:
                own = copy_of(block.weight)
                for k, parameter in enumerate(block.parameters):
                    parameter.grad = None
                    parameter.data = own if k == 0 else own.detach()
                if alone[id(block.storage)]:  # or all weights would be there twice
                    discard(block.storage, block.offset, block.slot.num_bytes)
            self._blocks = {key: block for key, block in self._blocks.items() if block.num_users}

    def _key(self, slot: Slot) -> tuple[int, torch.dtype]:
        return id(self._same.get(id(slot.parameter), slot.parameter)), slot.link_dtype


def _place(parameter: nn.Parameter) -> tuple[object, ...]:
    """Where it lies; nowhere else if it has no memory."""
    place = parameter.data_ptr() or id(parameter)
    return place, parameter.dtype, tuple(parameter.shape), parameter.stride()
