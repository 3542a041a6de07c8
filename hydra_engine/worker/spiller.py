"""Copies one device's shards, boundaries and gradients between DRAM and the device."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from hydra_engine.data import check_classes, check_indices, flat, identical, place_for, with_bits_of
from hydra_engine.devices import LOAD, STORE, OpenDevice, Residents, Slab
from hydra_engine.host import WHOLE, BuffersChanged, Region, Shard, TaskState
from hydra_engine.schedule import BACKWARD, EVALUATE, FORWARD, Unit
from hydra_engine.tasks import Purpose
from hydra_engine.worker.unit import MicroInput, MicroOutput, UnitOutput
from partitioners.boundary import Boundary, extent_bytes

# What of a boundary is kept on a device; keeping less costs more than copying it again.
VALUE, GRADIENT = "value", "gradient"
LEAST_KEPT_BYTES = 2**12
# Tensors of parameters that a device keeps from unit to unit: some 10 MiB of Python objects.
MOST_VIEWS = 2**14

Pairs: TypeAlias = list[tuple[Tensor, Tensor]]  # target and source


class Arriving(NamedTuple):
    """An input of one micro-batch, and the copies across the link that are still to be made into it."""

    micro: MicroInput
    copies: Pairs


@dataclass
class KeptTensor:
    """A tensor of a boundary that is on the device, too."""

    tensor: Tensor
    place: Tensor  # in DRAM, by which it is known
    is_held: bool  # something else on the device has its memory
    users: Mapping[int, Shard]  # whose units start from it, by their number; replaced, never written to

    def all_users(self) -> Iterable[Shard]:
        return self.users.values()


class Views:
    """Parameters of shards in their slabs on one device, kept from unit to unit."""

    def __init__(self, device: OpenDevice) -> None:
        self._device = device
        # By task, shard and places; with the shard, so that no other has its id.
        self._kept: dict[tuple[str, int, tuple[int, ...]], tuple[Shard, dict[int, Tensor]]] = {}
        self._num_kept = 0  # tensors
        self._lock = threading.Lock()  # of the two

    def of(self, state: TaskState, shard: Shard, slabs: Mapping[bool, Slab]) -> dict[int, Tensor]:
        """A shard's parameters, by slot, in its slabs by whether they are trainable.

        Kept for the next unit whose slabs are at the same places: two calls of torch for each of hundreds of parameters
        were a third of what a unit costs beside its kernels. Not those of a slab beside the arena, whose memory would
        stay.
        """
        is_kept = bool(slabs) and all(map(self._device.arena.holds, slabs.values()))
        key = (state.name, id(shard), tuple([slabs[kind].offset for kind in sorted(slabs)]))
        if is_kept and (kept := self._kept.get(key)) is not None:
            return kept[1]
        found: dict[int, Tensor] = {}
        for index, offset in shard.offsets.items():
            slot = state.layout.slots[index]
            slab, base = slabs[slot.trainable], 0 if slot.trainable else shard.own_bytes
            found[index] = slot.link_view(slab.storage, slab.offset + offset - base)
        if is_kept:
            with self._lock:
                while self._kept and self._num_kept + len(found) > MOST_VIEWS:
                    self._drop(next(iter(self._kept)))
                self._kept[key] = shard, found
                self._num_kept += len(found)
        return found

    def forget(self, task: str | None = None) -> None:
        """Let go of a task's views, whose units are through, None: of all, and so of the arena's memory."""
        with self._lock:
            for key in [key for key in self._kept if task in (None, key[0])]:
                self._drop(key)

    def _drop(self, key: tuple[str, int, tuple[int, ...]]) -> None:
        self._num_kept -= len(self._kept.pop(key)[1])


class Spiller:
    """Copies for one device; called in its load and store lanes."""

    def __init__(self, device: OpenDevice, residents: Residents) -> None:
        self._device = device
        self._residents = residents
        self.views = Views(device)
        self._storing = ""  # the task of which something is stored; one at a time

    def load_slab(self, state: TaskState, shard: Shard, region: Region, make_room: Callable[[], bool]) -> Slab:
        """Take a slab, and fill it. make_room: makes some in the arena; False: there is nothing that could."""
        slab = self._device.take_slab(region.num_bytes, make_room)
        try:
            self.fill_slab(state, shard, region, slab)
        except BaseException:
            self._device.give_slab_back(slab)
            raise
        return slab

    def fill_slab(self, state: TaskState, shard: Shard, region: Region, slab: Slab) -> None:
        """Fill a slab with a shard's parameters of one kind, in one copy where they lie in one piece."""
        base = 0 if region.trainable else shard.own_bytes
        try:
            pairs = [
                (slab.bytes(piece.target - base + start, len(source)), source)
                for piece in shard.pieces
                if piece.trainable == region.trainable
                for start, source in state.pool.sources(piece)
            ]
            self._load(state, pairs)
        finally:
            self._device.finish()

    def _load(self, state: TaskState, pairs: Pairs, *, urgent: bool = False) -> None:
        num_bytes = self._device.copy(LOAD, pairs, urgent=urgent)
        self._device.trace.count_work(state.name, loaded_bytes=num_bytes)

    def load_buffers(self, state: TaskState, shard: Shard, part: int, *, after: bool) -> dict[int, Tensor]:
        """Bring the buffers that a unit begins with."""
        return {index: self._bring(tensor) for index, tensor in buffers_of(state, shard, part, after=after).items()}

    def load_so_far(self, state: TaskState, shard: Shard) -> dict[int, Tensor]:
        parts = state.staging.parts
        return {} if parts is None else {i: self._bring(tensor) for i, tensor in parts.so_far(shard.owned).items()}

    def place_input(self, state: TaskState, kind: str, shard: Shard, m: int, *, has_graph: bool = False) -> Arriving:
        """Make room for what one micro-batch of a unit starts from; `has_graph`: its forward's input is not needed.

        In the compute lane, so that the room is of its stream's memory, whichever lane fills it. Whoever drops it then
        gives it to kernels that come after those that read it; of another stream's memory, the next input would be
        copied over what kernels are still to read.
        """
        staging, j, copies = state.staging, shard.index, Pairs()
        value = staging.entering(j, m)
        value = value.around(() if has_graph else [self._value(state, kind, j, each, copies) for each in value.tensors])
        micro = MicroInput(value=value, random=staging.random[j, m])

        def placed_all(value: Boundary) -> Boundary:
            return value.around(self._place_all(value.tensors, copies))

        micro.skips = {name: placed_all(staging.entering(name, m)) for name in shard.arriving}
        if state.cut.is_last(shard) and state.task.purpose is not Purpose.PREDICT:
            micro.target = placed_all(staging.given.targets[m])
            micro.weight = staging.given.weights[m] if state.is_split and kind != EVALUATE else None
            micro.loss_scale = None if kind == EVALUATE else state.loss_scale
        elif kind == BACKWARD:
            gradients = staging.gradients_of(j + 1, m)
            kept = self._residents.take((state.name, GRADIENT, staging.serial, j + 1, m)) if self._residents else None
            micro.gradients = self._place_all(gradients, copies) if kept is None else kept
            for name in (*shard.arriving, *shard.leaving):
                if name in shard.above:
                    gradients = staging.gradients_of((name, shard.above[name]), m)
                    micro.skip_gradients[name] = self._place_all(gradients, copies)
        if kind not in (FORWARD, EVALUATE):
            for slot, above in shard.upper.items():
                gradient = staging.tied.get((slot, above, m))
                if gradient is not None:
                    micro.tied[slot] = self._place(gradient, copies)
        return Arriving(micro, copies)

    def load_input(self, state: TaskState, kind: str, shard: Shard, m: int, arriving: Arriving) -> MicroInput:
        """Fill an input's room, in any lane."""
        micro, copies = arriving
        _check_values(state, kind, shard, m, micro)
        if copies:
            self._load(state, copies, urgent=True)
        return micro

    def store_micro(self, state: TaskState, kind: str, shard: Shard, m: int, out: MicroOutput) -> None:
        """Send what one micro-batch left to the step's staging."""
        staging, j = state.staging, shard.index
        self._storing = state.name
        if out.value is not None:
            # What leaves the last shard is the caller's.
            passed = {} if state.cut.is_last(shard) else out.passed
            staging.put_boundary(j + 1, m, out.value, self._send, self._device.place, passed)
        if kind != BACKWARD:
            staging.random[j + 1, m] = out.random
        for name, value in out.skips.items():
            staging.put_boundary(name, m, value, self._send, self._device.place)
        for name, gradients in out.skip_gradients.items():
            staging.put_gradients((name, j), m, gradients, self._send, self._device.place)
        if out.gradients is not None:
            staging.put_gradients(j, m, out.gradients, self._send, self._device.place)
        for slot, gradient in out.tied.items():
            staging.tied[slot, j, m] = None if gradient is None else self._sent(gradient)
        if out.pieces and staging.parts is not None:
            pieces = {slot: None if each is None else self._sent(each) for slot, each in out.pieces.items()}
            self._device.finish()
            staging.parts.add(j, m, pieces)
        if out.squares is not None:
            staging.squares[j, m] = out.squares.tolist()
        if out.loss is not None:
            staging.losses[m] = float(out.loss)
            staging.metrics[m] = {name: float(value) for name, value in out.metrics.items()}

    def store_gradients(self, state: TaskState, unit: Unit, shard: Shard, out: UnitOutput) -> None:
        """Send the shard's gradients to DRAM."""
        staging = state.staging
        self._storing = state.name
        present = {index: gradient for index, gradient in out.gradients.items() if gradient is not None}
        if out.gradients and staging.parts is not None:
            _, end = staging.range_of(unit.part)
            if not staging.parts.put(shard.index, end, out.gradients, self._store, self._device.finish):
                return
        elif out.gradients:
            state.pool.gradients.lend(shard)
            staging.has_gradient |= {index: gradient is not None for index, gradient in out.gradients.items()}
            home = state.homes.of.get(shard.index)
            if home is None:  # they are laid out as their parameters, except for dimensions of size 1
                places = [state.pool.gradients.of(state.layout.slots[index]) for index in present]
                self._store_all([*zip(places, present.values(), strict=True)])
            else:
                for index, gradient in present.items():
                    # Where no part of the memory is for slabs alone, it does not matter where a home's gradients lie.
                    as_it_is = not self._device.ledger.is_split and _is_compact(gradient)
                    home.put_gradient(index, gradient, as_it_is=as_it_is)
        if out.squares is not None:
            staging.squares[shard.index, WHOLE] = out.squares.tolist()
        if out.norms is not None:
            norms = zip(present, out.norms.tolist(), strict=True)
            staging.norms |= {index: (norm, _is_finite(norm, present[index])) for index, norm in norms}

    def store_buffers(self, state: TaskState, unit: Unit, shard: Shard, out: UnitOutput) -> None:
        """Send the buffers that a unit changed to DRAM; a backward gives those alone that it has written to itself."""
        if not out.buffers:
            return
        staging = state.staging
        self._storing = state.name
        before = staging.buffers_for(shard, unit.part, state.pool.buffers)
        # On the CPU, what did not change is not copied.
        is_here = self._device.torch_device.type == "cpu"
        after = out.buffers if is_here else {index: self._sent(value) for index, value in out.buffers.items()}
        self._device.finish()
        changed = {index: value for index, value in after.items() if not identical(value, before[index])}
        if unit.kind == BACKWARD:
            state.check_backward_buffers(changed)
        if staging.parts is not None and not state.changes_buffers(shard) and changed:
            state.observed.any_may_change = True
            raise BuffersChanged(f"{unit} changed buffers that its shard's forward left alone at the sample")
        for index, value in changed.items():
            staging.buffers[index] = place_for(value, start=0) if is_here else value
            if is_here:
                self._send(staging.buffers[index], value)

    def keep_output(self, state: TaskState, shard: Shard, m: int, out: MicroOutput, granted_bytes: int = 0) -> int:
        """Keep what a unit left for the next one, if there is room. Return the bytes of `granted_bytes` that it takes.

        granted_bytes: still granted for it; 0: others have to be found.
        """
        j, shards = shard.index, state.cut.shards
        if out.value is not None and j + 1 < len(shards):
            return self.keep_values(state, shards[j + 1], m, out.value.tensors, out.held, granted_bytes)
        if out.gradients is not None and j > 0:
            return self._keep_gradients(state, shards[j - 1], m, out.gradients, granted_bytes)
        return 0

    def keep_values(
        self,
        state: TaskState,
        user: Shard,
        m: int,
        tensors: Sequence[Tensor | None],
        held: Collection[int],
        granted_bytes: int = 0,
    ) -> int:
        """Keep tensors that enter a shard, as they are in DRAM, for its units; None: not as they are there.

        held: those whose memory something else holds. What passes through several shards is kept once, for all.
        """
        staging, serial, stays_bytes = state.staging, state.staging.serial, 0
        for k, (tensor, place) in enumerate(zip(tensors, staging.entering(user.index, m).tensors, strict=True)):
            if tensor is None or (num_bytes := extent_bytes(tensor)) < LEAST_KEPT_BYTES or not _is_compact(tensor):
                continue
            key = (state.name, VALUE, serial, id(place))
            found: KeptTensor | None = self._residents.find(key)
            if found is not None:
                found.users = {**found.users, user.index: user}
                continue
            kept = KeptTensor(_alias(tensor), place, k in held, {user.index: user})
            if self._keep(state, key, kept, num_bytes, kept.all_users, granted_bytes - stays_bytes):
                stays_bytes += num_bytes
        return stays_bytes

    def _keep_gradients(
        self, state: TaskState, user: Shard, m: int, gradients: Sequence[Tensor | None], granted_bytes: int
    ) -> int:
        """Keep the gradients of a shard's output, for its backward."""
        present = [gradient for gradient in gradients if gradient is not None]
        num_bytes = sum(map(extent_bytes, present))
        if num_bytes < LEAST_KEPT_BYTES or not all(map(_is_compact, present)):
            return 0
        key = (state.name, GRADIENT, state.staging.serial, user.index + 1, m)
        kept = [None if gradient is None else _alias(gradient) for gradient in gradients]
        return num_bytes if self._keep(state, key, kept, num_bytes, lambda: (user,), granted_bytes) else 0

    def _keep(
        self,
        state: TaskState,
        key: Hashable,
        value: Any,
        num_bytes: int,
        users: Callable[[], Iterable[Shard]],
        granted_bytes: int,
    ) -> bool:
        """Keep a value of the step for units of these shards. Return True if that takes of `granted_bytes`."""
        staging, serial = state.staging, state.staging.serial

        def next_use_s() -> float:
            if staging.serial != serial:
                return math.inf
            return min((state.progress.next_use_s(user, with_last=True) for user in users()), default=math.inf)

        if num_bytes <= granted_bytes:
            return self._residents.keep(key, value, num_bytes, state.name, next_use_s)
        self._residents.offer(key, value, num_bytes, state.name, next_use_s)
        return False

    def _value(self, state: TaskState, kind: str, j: int, source: Tensor, pairs: Pairs) -> Tensor:
        """Find a tensor that enters a shard on the device, or make room for it.

        A layer may work in place on what it gets: what others have as well is copied for it. At once, in the compute
        lane, as that is where its memory is written and given to others.
        """

        def is_last(kept: KeptTensor) -> bool:
            others = {k: user for k, user in kept.users.items() if k != j}
            if kind != FORWARD:  # the last of the shard's units that starts from it
                kept.users = others
            return not others

        # Its bytes are counted among those that the unit was granted for its inputs.
        key = (state.name, VALUE, state.staging.serial, id(source))
        found = self._residents.take_or_pin(key, is_last) if self._residents else None
        if found is None:
            return self._place(source, pairs)
        kept: KeptTensor
        kept, is_out = found
        if is_out and not kept.is_held:
            return kept.tensor
        place = place_for(source, self._device.torch_device)
        flat(place).copy_(flat(kept.tensor))
        if not is_out:
            self._residents.unpin(key)
        return place

    def _place_all(self, tensors: Sequence[Tensor | None], pairs: Pairs) -> list[Any]:
        return [None if each is None else self._place(each, pairs) for each in tensors]

    def _bring(self, tensor: Tensor) -> Tensor:
        """In the compute lane, as all that units work on is."""
        pairs: Pairs = []
        place = self._place(tensor, pairs)
        self._device.copy(LOAD, pairs, urgent=True)
        return place

    def _place(self, tensor: Tensor, pairs: Pairs) -> Tensor:
        """Make room on the device for a copy of a tensor, and add the copy to those to be made."""
        place = place_for(tensor, self._device.torch_device)
        is_plain = place.is_contiguous() and not (place.is_conj() or place.is_neg() or tensor.requires_grad)
        pairs.append((place, tensor) if is_plain else (flat(place), flat(tensor)))
        return place

    def _sent(self, tensor: Tensor) -> Tensor:
        place = self._device.place(tensor)
        self._send(place, tensor)
        return place

    def _send(self, place: Tensor, tensor: Tensor) -> None:
        self._store(flat(place), flat(tensor))

    def _store(self, place: Tensor, tensor: Tensor) -> None:
        self._store_all([(place, tensor)])

    def _store_all(self, pairs: Pairs) -> None:
        num_bytes = self._device.copy(STORE, pairs)
        self._device.trace.count_work(self._storing, stored_bytes=num_bytes)


def buffers_of(state: TaskState, shard: Shard, part: int, *, after: bool) -> dict[int, Tensor]:
    """Buffers that a shard's forward begins with, in DRAM, if it has any; a shard below may have changed a shared one.

    after: as all forwards of the step left them, which is what a backward that runs none of them sees.
    """
    sources = state.staging.buffers_for(shard, part, state.pool.buffers)
    if after:
        sources = {index: state.staging.buffers.get(index, tensor) for index, tensor in sources.items()}
    return sources


def _check_values(state: TaskState, kind: str, shard: Shard, m: int, micro: MicroInput) -> None:
    """Refuse indices and classes of a batch that a layer or the loss has no place for."""
    if shard.is_first and kind != BACKWARD and state.observed.index_limit is not None:
        check_indices(
            state.staging.entering(0, m), state.observed.index_limit, state.layout.shown(state.layout.names[0])
        )
    if micro.target is not None and state.observed.classes:
        tensors = state.staging.given.targets[m].tensors
        for place, classes in state.observed.classes.items():
            if (place.training, place.num_tensors) == (kind != EVALUATE, len(tensors)):
                check_classes(tensors[place.number], classes)


def _is_finite(norm: float, gradient: Tensor) -> bool:
    """Return True if all numbers of a gradient are finite: those of one whose norm is infinite may be large alone."""
    return math.isfinite(norm) or math.isfinite(torch.linalg.vector_norm(gradient, math.inf))


def _is_compact(tensor: Tensor) -> bool:
    """Return True if it lies in a storage of its own, which takes no more bytes than a copy would."""
    return tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == extent_bytes(tensor)


def _alias(tensor: Tensor) -> Tensor:
    """Return the same memory without its graph. Not as a view: autograd lets nobody work in place on one."""
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return with_bits_of(tensor, empty.set_(tensor.untyped_storage(), 0, tensor.shape, tensor.stride()))
