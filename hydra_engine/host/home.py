"""Shards at home on a device: their weights, masters, moments and finished gradients stay there from step to step.

    fill()            a home begins with what DRAM has
    update            as on the host, in the home's memory (`TaskOptimizer.update`): by the same code on an emulated
                      device, by a kernel with the same bits on a GPU, of which nothing waits for the end (`queued`)
    show(), save()    weights alone, or all of it, are copied to DRAM; the home stays
    close()           DRAM is the home again, of gradients in mid-step too

Code that reads weights in DRAM asks for them first. What a callback writes there is loaded to the home afterwards.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from hydra_engine.devices import OpenDevice
from hydra_engine.host.blocked import MOMENTS, moment_names, new_private
from hydra_engine.host.layout import Shard, Slot
from hydra_engine.host.pool import HostPool
from hydra_engine.host.split import SplitMaster, SplitWeight, row_of
from hydra_engine.native import Kernel, Work, is_dense, kernel, native
from hydra_engine.system import HostMemory
from hydra_engine.tasks import ModelTask

# By slot, the names and types of the moments that its updates keep.
Moments: TypeAlias = "Mapping[int, Mapping[str, torch.dtype]]"


def no_home_because(optimizer: torch.optim.Optimizer) -> str:
    """Return why this optimizer's updates are made on the host alone; nothing, if devices may make them."""
    for group in optimizer.param_groups:
        if moment_names(optimizer, group) is None:
            kind = type(optimizer).__name__
            return f"devices update by torch's Adam, AdamW and SGD without dampening, not by {kind} with its options"
    return ""


def kernel_refused(
    gpu: Kernel,
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[int, nn.Parameter],
    pool: HostPool,
    task: ModelTask,
) -> str:
    """Return why a GPU's kernel cannot make a task's updates; nothing, if it can: once for each kind of them.

    parameters: of the optimizer, by slot; they may be of other sizes.
    """
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    works: dict[object, Work] = {}
    for slot in pool.layout.trainable_slots():
        group = groups.get(id(parameters[slot.index]))
        if group is None:  # its maker left it out
            continue
        if slot.dtype != torch.float32 or not is_dense(slot.parameter):
            return f"devices update dense weights in float32, and {slot.name} is {slot.dtype} in strides {slot.stride}"
        casts, splits = pool.layout.narrow is not None, pool.is_split(slot)
        like = torch.empty((1,) * len(slot.shape))
        kind = MOMENTS if task.moments == "bfloat16" and slot.shape else torch.float32
        moments = {name: like.to(kind) for name in moment_names(optimizer, group) or ()}
        gradient, narrow = (torch.empty_like(like, dtype=slot.link_dtype) for _ in range(2))
        counter = None if isinstance(optimizer, torch.optim.SGD) else torch.tensor(0.0)
        work = Work(like, gradient, narrow if casts else None, group, moments, counter, like if splits else None)
        works[id(group), slot.link_dtype, kind, splits] = work
    num_factors = (task.max_grad_norm is not None) + (task.precision == "float16")
    return native().refusal(gpu, type(optimizer), [*works.values()], num_factors)


def home_bytes(shard: Shard, pool: HostPool, state_bytes: Callable[[Slot], Iterable[int]]) -> int:
    """Bytes of a device that a shard's home takes: weights, masters, gradients, and states, which take `state_bytes`.

    The pool may have yet to be opened.
    """
    total, aligned = pool.layout.aligned(shard.own_bytes), pool.layout.aligned
    for slot in pool.owned(shard):
        parts = slot.link_bytes, _master_bytes(slot, pool), _tie_bytes(slot, pool)
        total += sum(map(aligned, [*parts, *state_bytes(slot)]))
    return total


def _master_bytes(slot: Slot, pool: HostPool) -> int:
    if pool.is_split(slot):
        return slot.link_bytes  # of remainders
    return 0 if pool.layout.narrow is None else slot.num_bytes


def _tie_bytes(slot: Slot, pool: HostPool) -> int:
    """Bytes of a split weight's ties, as a GPU's kernel needs them; on emulated devices nothing is there."""
    return kernel.tie_bytes(slot.link_bytes // 2) if pool.is_split(slot) else 0


def moment_bytes(slot: Slot, moments: Moments) -> dict[str, int]:
    """Bytes of a parameter's moments, by name."""
    return {name: slot.parameter.numel() * dtype.itemsize for name, dtype in moments[slot.index].items()}


def home_of(pool: HostPool, shard: Shard) -> Home | None:
    """The shard's home on a device; None: it is DRAM."""
    home = pool.homes.get(shard.owned[0]) if pool.homes and shard.owned else None
    assert home is None or isinstance(home, Home)
    return home


class Home:
    """The state of one shard on one device. Between two of its task's units, or in the device's compute lane."""

    def __init__(
        self,
        shard: Shard,
        device: int,
        opened: OpenDevice,
        place: tuple[torch.UntypedStorage, int],
        pool: HostPool,
        optimizer: torch.optim.Optimizer,
        moments: Moments,
    ) -> None:
        """`place`: the device's memory, and where the home's bytes begin; those that units bind come first."""
        self.shard, self.device, self.opened = shard, device, opened
        self._pool, self._optimizer = pool, optimizer
        self._slots = pool.owned(shard)
        self.is_shown = False  # DRAM has the weights of now
        self.is_lost = False  # its device has failed, and what DRAM has is of another step
        self.gradients: dict[int, Tensor] = {}  # by slot, as are the next two
        self.masters: dict[int, SplitMaster] = {}
        self._narrow: dict[int, Tensor] = {}
        self._parameters: dict[int, nn.Parameter] = {}  # that the optimizer steps
        self.states: dict[nn.Parameter, dict[str, Any]] = defaultdict(dict)
        self._moments: dict[nn.Parameter, dict[str, Tensor]] = {}  # where they lie, in the order of the optimizer's
        self.queued: Callable[[], None] | None = None  # waits until the last update is through; None: it is
        (storage, start), aligned = place, pool.layout.aligned
        end = start + aligned(shard.own_bytes)

        def take(num_bytes: int) -> int:
            nonlocal end
            before, end = end, end + aligned(num_bytes)
            return before

        for slot in self._slots:
            narrow = self._narrow[slot.index] = slot.link_view(storage, start + shard.offsets[slot.index])
            self.gradients[slot.index] = slot.gradient_view(storage, take(slot.link_bytes))
            at = take(_master_bytes(slot, pool))
            if slot.index in pool.masters:
                row, empty = row_of(narrow), torch.empty(0, dtype=torch.int16, device=storage.device)
                split = SplitWeight(row, empty.set_(storage, at // 2, row.shape, (1,)))
                if opened.kernel is not None:
                    num_bytes = _tie_bytes(slot, pool)
                    split.ties = empty.to(torch.int32).set_(storage, take(num_bytes) // 4, (num_bytes // 4,), (1,))
                shown = slot.view(HostMemory().new(slot.num_bytes), 0)  # whose pages come and go
                parameter = nn.Parameter(shown)
                self.masters[slot.index] = SplitMaster(parameter, shown, split)
            else:
                parameter = nn.Parameter(narrow if pool.layout.narrow is None else slot.view(storage, at))
            self._parameters[slot.index] = parameter
            self._moments[parameter] = {
                name: slot.gradient_view(storage, take(num_bytes), moments[slot.index][name])
                for name, num_bytes in moment_bytes(slot, moments).items()
            }

    def parameter(self, slot: Slot) -> nn.Parameter:
        """The parameter that the optimizer steps."""
        return self._parameters[slot.index]

    def narrow(self, slot: Slot) -> Tensor:
        """The tensor that units compute with."""
        return self._narrow[slot.index]

    def put_gradient(self, index: int, gradient: Tensor, *, as_it_is: bool) -> None:
        """Take over a slot's finished gradient: `as_it_is`, until its update, or else as a copy in the home's memory.

        Either way its bytes count as the home's.
        """
        place = self.gradients[index]
        if not as_it_is or (gradient.dtype, gradient.stride()) != (place.dtype, place.stride()):
            gradient = place.copy_(gradient)
        self._pool.gradients.places[index] = gradient

    def drop_gradients(self) -> None:
        """Let go of gradients that are elsewhere, since their update is through."""
        for index, place in self.gradients.items():
            self._pool.gradients.places[index] = place

    def renew(self, slots: Iterable[Slot]) -> None:
        """Cast parameters anew for units, after they were put back."""
        for slot in slots if self._pool.layout.narrow is not None else ():
            if slot.index not in self.masters:
                self._narrow[slot.index].copy_(self._parameters[slot.index].data)

    def moments(self, parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, dict[str, Tensor]]:
        """Places for the moments of parameters that have none yet, with zeros in them."""
        found = {parameter: dict(self._moments[parameter]) for parameter in parameters}
        for places in found.values():
            for place in places.values():
                place.zero_()
        return found

    def _copy(self, *pairs: tuple[Tensor, Tensor]) -> None:
        """Copy each (target, source) to or from DRAM, after the last update."""
        if self.queued is not None:
            self.queued()
        self.opened.copy_now(pairs)

    def fill(self, *, has_gradient: Mapping[int, bool]) -> None:
        """Take over what DRAM has, and those gradients of the step in progress that are there; others come here."""
        self.load_weights(self._slots)
        self.is_shown = True
        for slot in self._slots:
            parameter = self._parameters[slot.index]
            state = self._optimizer.state.get(slot.parameter)
            if state:
                places = self._moments[parameter]
                self.states[parameter] = {key: self._copied(value, places.get(key)) for key, value in state.items()}
            if has_gradient.get(slot.index):
                self._copy((self.gradients[slot.index], self._pool.gradients.of(slot)))
        for slot in self._slots:
            self._pool.gradients.places[slot.index] = self.gradients[slot.index]
            self._pool.homes[slot.index] = self

    def load_weights(self, slots: Iterable[Slot]) -> None:
        """Take over the weights that DRAM has of these parameters."""
        for slot in slots:
            if (master := self.masters.get(slot.index)) is not None:
                self._pool.masters[slot.index].split.copy_to(master.split, self._copy)
                continue
            self._copy((self._parameters[slot.index].data, slot.parameter.data))
            if self._pool.layout.narrow is not None:
                self._copy((self._narrow[slot.index], self._pool.narrow(slot)))

    def read(self, slot: Slot, into: Tensor | None = None) -> Tensor:
        """Return a parameter's values, in `into` or in new memory."""
        into = torch.empty_like(slot.parameter.data) if into is None else into
        if (master := self.masters.get(slot.index)) is None:
            self._copy((into, self._parameters[slot.index].data))
            return into
        narrow, rest = (torch.empty_like(each, device="cpu") for each in (master.split.narrow, master.split.rest))
        master.split.copy_to(SplitWeight(narrow, rest), self._copy).load(row_of(into))
        return into

    def show(self) -> None:
        """Let DRAM have the weights of now."""
        if self.is_shown:
            return
        self.is_shown = True
        for slot in self._slots:
            if (master := self.masters.get(slot.index)) is not None:
                master.split.copy_to(self._pool.masters[slot.index].split, self._copy)
            else:
                self._copy((slot.parameter.data, self._parameters[slot.index].data))
        self._pool.renew(self._slots)

    def save(self) -> None:
        """Let DRAM have weights and states of now."""
        self.show()
        states = self._optimizer.state
        for slot in self._slots:
            if state := self.states.get(self._parameters[slot.index]):
                before = states.get(slot.parameter, {})
                states[slot.parameter] = {key: self._copied(value, before.get(key)) for key, value in state.items()}

    def close(self, *, has_gradient: Mapping[int, bool]) -> None:
        """Make DRAM the home; has_gradient: by slot, of the step in progress. What a lost one had, is lost."""
        if not self.is_lost:
            self.save()
        for slot in self._slots:
            del self._pool.homes[slot.index]
            place = self._pool.gradients.place(slot)
            if has_gradient.get(slot.index) and not self.is_lost:
                self._copy((place, self._pool.gradients.of(slot)))
            self._pool.gradients.places[slot.index] = place

    def _copied(self, value: Any, place: object) -> Any:
        """Return a state's copy, in a place of the same kind if there is one, and else in DRAM."""
        if not isinstance(value, Tensor):
            return value
        if not isinstance(place, Tensor) or (place.shape, place.dtype) != (value.shape, value.dtype):
            place = new_private([value])[0] if value.dim() else torch.empty_like(value, device="cpu")
        self._copy((place, value))
        return place


class TaskHomes:
    """The homes of one task, and those that it is to have. Changed while nothing uses the shards that move."""

    def __init__(self) -> None:
        self.lost_on = ""  # the name of a device that has failed, where some were
        self.has_start = False  # DRAM has the task as it began; its steps are on devices alone, or none is committed
        self.num_layers = 0  # lowest ones, whose shards are to have homes where there is room
        self.has_ieee_roots = False  # updates, also in DRAM, take those; as `DeviceSpec.has_ieee_roots`
        self.of: dict[int, Home] = {}  # by shard of the present cut
        self.targets: dict[int, int | None] = {}  # by shard that is to move: the device; None: DRAM
        self.most: int | None = None  # of the shards that may have one, once a device had too little room for more
        self.gives_way: set[int] = set()  # shards whose homes a device waits to be rid of
        # Held by whoever opens or closes homes, copies to DRAM from them, or notes what DRAM has for a checkpoint.
        self.lock = threading.RLock()
        # Called before DRAM is written to, with slots: a checkpoint may be reading it.
        self.secure: Callable[[Iterable[int]], None] = lambda _: None
        # Makes DRAM the home of all, where nothing of the task is under way.
        self.close_all: Callable[[], None] = lambda: None

    def end(self) -> None:
        """The task is over: refer to nobody any more."""
        self.secure, self.close_all = lambda _: None, lambda: None

    @property
    def devices(self) -> dict[int, int]:
        """By shard, the device of its home."""
        return {index: home.device for index, home in list(self.of.items())}

    def show(self, slot: int) -> None:
        """Let DRAM have the weights of a parameter's shard as they are now, if that is at home on a device."""
        with self.lock:
            home = next((each for each in self.of.values() if slot in each.gradients), None)
            if home is not None and not home.is_shown:
                self.has_start = False
                self.secure(home.gradients)
                home.show()

    def show_all(self) -> None:
        """Let DRAM have the weights of now."""
        with self.lock:
            for home in self.of.values():
                self.show(next(iter(home.gradients)))

    def save(self) -> None:
        """Let DRAM have all state of now, for a checkpoint."""
        if self.lost_on:
            raise RuntimeError(f"{self.lost_on} has failed, where shards were at home")
        self.has_start = False
        for home in self.of.values():
            home.save()
