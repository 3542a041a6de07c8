"""Shards on their way to one device: asked for, loaded into slabs that units share, given back; and those at home."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from hydra_engine.devices import LOAD, SLABS, OpenDevice, Residents, Slab, Ticket
from hydra_engine.errors import DeviceGone, DeviceOutOfMemory
from hydra_engine.host import Home, LayerFault, Region, Shard, TaskOptimizer, TaskState
from hydra_engine.schedule import Unit
from hydra_engine.worker.spiller import Spiller
from hydra_engine.worker.unit import Claim, ClaimStage, Delay, SlabLoad


class Claims:
    """Claims of one device's units. Each ends once: dropped, or with the last job of its unit."""

    def __init__(self, device: OpenDevice, residents: Residents, spiller: Spiller) -> None:
        self._device = device
        self._residents = residents
        self._spiller = spiller
        self._waiting: dict[Unit, tuple[Claim, Ticket]] = {}  # neither begun nor dropped
        self._outstanding: set[Claim] = set()  # not ended
        self._at_work: set[Claim] = set()  # begun, and their slabs not let go
        self._lock = threading.Lock()  # of the two sets
        self._changed = threading.Condition(self._lock)
        self._num_settling = 0  # threads that wait for claims to end

    def request(self, unit: Unit, state: TaskState) -> None:
        """Ask for a unit's shard, and load it as soon as its bytes are granted."""
        claim = Claim(unit, state)

        def wanted() -> int:
            return sum(region.num_bytes for region in claim.regions if region.key not in self._residents)

        def granted(_: int) -> None:
            for region in claim.regions:
                claim.slabs[region] = self._pinned(claim, region)
            claim.stage = ClaimStage.GRANTED  # last: without its slabs it would pass for loaded

        with self._lock:
            self._outstanding.add(claim)
        ticket = Ticket(num_bytes=wanted, granted=granted, refused=claim.fail, kind=SLABS)
        self._waiting[unit] = (claim, ticket)
        self._device.ledger.request(ticket)

    def delay(self, unit: Unit) -> Delay | None:
        """Return what a unit that was begun waits for; None: nothing any more."""
        with self._lock:
            found = next((claim for claim in self._at_work if claim.unit == unit), None)
        if found is None:
            return None
        if found.stage is not ClaimStage.IN_LANES:
            return Delay.MEMORY
        is_there = all(load.is_whole for load in list(found.slabs.values()))
        return None if is_there else Delay.WEIGHTS

    def begin(self, unit: Unit) -> Claim:
        claim, _ = self._waiting.pop(unit)
        with self._lock:
            self._at_work.add(claim)
        return claim

    def drop(self, unit: Unit) -> None:
        """Give up the claim of a unit that will not be computed."""
        claim, ticket = self._waiting.pop(unit)
        if self._device.ledger.cancel(ticket) or claim.stage is ClaimStage.ASKED:
            self.end(claim)
            return
        self._device.ledger.activate()  # its bytes come back once its load is through

        def free() -> None:
            self.let_go(claim)
            self._device.ledger.release(0, deactivates=True)
            self.end(claim)

        at_once = all(load.is_late for load in claim.slabs.values())  # nothing is loading
        self._device.submit(LOAD, f"drop {unit}", free, at_once=at_once)

    def let_go(self, claim: Claim) -> None:
        """Leave a unit's shard to the next unit that needs it, or give its slabs back."""
        claim.views = {}
        for region, load in list(claim.slabs.items()):
            load.settle()  # after an error it may still be under way: into a region that is then nobody else's yet
            with self._device.ledger.lock:  # `_clear` counts a claim's slabs and their pins together
                del claim.slabs[region]
                self._residents.unpin(region.key, is_whole=load.is_whole and claim.error is None)
        with self._lock:
            self._at_work.discard(claim)
        if not claim.freed.is_done:
            claim.freed.keep(None)

    def end(self, claim: Claim) -> None:
        """Forget a claim: nothing of it is on its way any more."""
        with self._lock:
            self._outstanding.discard(claim)
            if self._num_settling:
                self._changed.notify_all()

    def settle(self, task: str | None = None, shard: int | None = None) -> None:
        """Wait until nothing of a task, of one of its shards, or of any is on its way through the device."""

        def concerns(claim: Claim) -> bool:
            is_given_up = shard is not None and isinstance(claim.error, DeviceGone)  # its lane may be in user code
            return not is_given_up and task in (None, claim.unit.task) and shard in (None, claim.unit.shard)

        with self._changed:
            self._num_settling += 1
            self._changed.wait_for(lambda: not any(map(concerns, self._outstanding)))
            self._num_settling -= 1

    def is_at_work(self, task: str, shard: int) -> bool:
        """Return True if a unit of a shard was begun, and has not let go of its slabs."""
        with self._lock:
            return any((claim.unit.task, claim.unit.shard) == (task, shard) for claim in self._at_work)

    def abandon(self, error: Exception) -> None:
        """Let those whose unit is in the lanes fail there, whenever they come to it."""
        with self._lock:
            for claim in self._outstanding:
                claim.fail(error, "a device that was taken away")

    def drop_all(self) -> None:
        """Give up all claims whose unit was not begun."""
        for unit in list(self._waiting):
            self.drop(unit)

    def give_up(self) -> None:
        """End all of them, after an error elsewhere: those whose unit is in the lanes fail there."""
        self.drop_all()
        with self._lock:
            for claim in self._outstanding:
                claim.fail(RuntimeError(f"{claim.unit} was given up: the run is closing"))
            self._outstanding = {claim for claim in self._outstanding if claim.stage is ClaimStage.IN_LANES}
        self.settle()

    def _pinned(self, claim: Claim, region: Region) -> SlabLoad:
        """Pin a region of a unit's shard: as it is on the device, or on its way there from now on."""
        state, shard, residents = claim.state, claim.shard, self._residents

        def next_use_s() -> float:
            return state.region_next_use_s(shard, region)

        found: SlabLoad | None = residents.pin(region.key, state.name, next_use_s)
        if found is not None:
            return found
        is_late = self._device.copies_at_once(shard.slab_bytes)
        load = SlabLoad(partial(self._spiller.load_slab, state, shard, region), late=is_late)

        def dispose() -> None:
            if load.is_whole:
                self._device.give_slab_back(load.slab.result())

        residents.add(region.key, load, region.num_bytes, state.name, next_use_s, dispose)
        if not is_late:
            self._device.submit(LOAD, claim.label, partial(load.load, self._make_room))
        return load

    def fill(self, claim: Claim) -> None:
        """Fill a unit's slabs that were spoiled, or left to the lane that computes, where it is this unit's turn."""
        loads = list(claim.slabs.values())
        for load in loads:
            load.settle()
        moved: set[SlabLoad] = set()  # each once: if that makes no room, nothing does
        while late := [load for load in loads if load.is_late and not load.is_whole]:
            with self._device.trace.span(self._device.name, LOAD, claim.label):
                late[0].load(partial(self._clear, claim, moved))
            late[0].slab.result()
        for region, load in claim.slabs.items():
            if load.is_spoiled and load.is_home:
                raise LayerFault(
                    f"a layer of shard {claim.shard.index} wrote to a parameter and raised, limit: only the optimizer "
                    f"changes parameters, since weights that are at home on a device are nowhere else; set homes='host'"
                )
            if load.is_spoiled:
                self._spiller.fill_slab(claim.state, claim.shard, region, load.slab.result())
                load.is_spoiled = False

    def _make_room(self) -> bool:
        """Give up a slab, for another one's place in the arena; or wait for a unit to let go of its own.

        In the load lane, so not for a unit that waits for it: one whose slabs are all there.
        """
        with self._lock:  # looked at first: whoever lets go meanwhile leaves a slab that can be given up
            granted = [claim for claim in self._at_work if claim.stage is not ClaimStage.ASKED]
            loaded = [claim for claim in granted if all(load.is_whole for load in list(claim.slabs.values()))]
        if self._residents.evict_slab():
            return True
        return bool(loaded) and loaded[0].freed.is_kept()

    def _clear(self, claim: Claim, moved: set[SlabLoad]) -> bool:
        """Give up a slab for one of the unit whose turn it is: also of units that are not begun, and then its own."""
        with self._device.ledger.lock:
            if self._residents.evict_slab():
                return True
            with self._lock:
                ahead = self._outstanding - self._at_work
            claims = [*(each for each in ahead if each.stage is ClaimStage.GRANTED), claim]
            pinned = [(region.key, load) for each in claims for region, load in each.slabs.items()]
            # Looked at first: what is loaded meanwhile counts as on its way.
            coming = next((load for _, load in pinned if not load.is_late and not load.slab.is_done), None)
            pins = Counter(key for key, _ in pinned)
            for key, load in pinned:
                is_free = load.is_whole and not load.is_home and load not in moved
                if is_free and self._residents.num_pins(key) == pins[key]:  # no graph refers to it
                    moved.add(load)
                    self._device.give_slab_back(load.take_back())
                    return True
        if coming is not None:
            coming.settle()
        return coming is not None


class DeviceHomes:
    """Shards that are at home on one device. Units find them there as slabs that are never evicted."""

    def __init__(
        self,
        index: int,
        device: OpenDevice,
        residents: Residents,
        claims: Claims,
        give_way: Callable[[Sequence[tuple[str, int]]], None],
    ) -> None:
        """`give_way`: told the homes, by task and shard, that are to leave, since a unit needs their room."""
        self._index = index
        self._device = device
        self._residents = residents
        self._claims = claims
        self._give_way = give_way
        self._places: dict[tuple[str, int], tuple[Slab, int]] = {}  # and bytes; in the order in which they came
        self.peak_bytes = 0
        self._leaving: set[tuple[str, int]] = set()  # whose bytes somebody waits for
        self._empty = threading.Condition(device.ledger.lock)
        device.ledger.reclaim = self._reclaim

    def open(self, state: TaskState, shard: Shard, optimizer: TaskOptimizer) -> Home | None:
        """Give a shard a home with what DRAM has, between two of its steps; None: there is no room."""
        device, num_bytes = self._device, optimizer.home_bytes(shard, state.pool)
        if device.kernel is not None and optimizer.kernel_refused(device.kernel, state.pool):
            return None  # of another kind than was planned for
        if not device.ledger.take(num_bytes, SLABS):
            return None
        try:
            slab = device.take_slab(num_bytes, self._residents.evict_slab, lasts=True)
        except DeviceOutOfMemory:
            device.ledger.release(num_bytes, kind=SLABS)
            return None
        key = state.name, shard.index
        with device.ledger.lock:
            self._places[key] = slab, num_bytes
            self.peak_bytes = max(self.peak_bytes, sum(each for _, each in self._places.values()))
        place = slab.storage, slab.offset
        try:
            home = Home(shard, self._index, device, place, state.pool, optimizer.optimizer, optimizer.moments)
            home.fill(has_gradient=state.staging.has_gradient)
        except BaseException:
            self._free(key)
            raise
        state.homes.of[shard.index] = home
        load = SlabLoad(lambda _: slab, late=False, is_home=True)
        load.load(lambda: False)
        for region in state.regions(shard):
            if region.trainable:  # its bytes are counted here
                self._residents.add(region.key, load, 0, state.name, lambda: 0.0, lambda: None)
        return home

    def close(self, state: TaskState, home: Home) -> None:
        """End a home, whose shard no unit and no update uses."""
        shard, key = home.shard, (state.name, home.shard.index)
        self._claims.settle(*key)  # a claim that was revoked may hold it still
        home.close(has_gradient=state.staging.has_gradient)
        regions = state.regions(shard)
        del state.homes.of[shard.index]
        self._residents.forget(state.name)  # graphs refer to it
        for region in regions:
            if region.trainable:
                self._residents.unpin(region.key, is_whole=False)
        self._free(key)

    def _free(self, key: tuple[str, int]) -> None:
        """Give a home's memory back."""
        with self._device.ledger.lock:
            slab, num_bytes = self._places.pop(key)
            is_awaited = key in self._leaving
            self._leaving.discard(key)
            self._device.give_slab_back(slab)
            self._device.ledger.release(num_bytes, kind=SLABS, deactivates=is_awaited)
            self._empty.notify_all()

    def end(self) -> None:
        """Refer to nobody of the run any more."""
        self._give_way, self._device.ledger.reclaim = lambda _: None, lambda _: False

    def wait_until_empty(self) -> None:
        """Wait until all homes have left."""
        with self._empty:
            self._empty.wait_for(lambda: not self._places)

    def give_all(self) -> bool:
        """Have all homes leave; False: there are none."""
        with self._device.ledger.lock:
            return self._reclaim(self._device.ledger.memory_bytes)

    def _reclaim(self, num_bytes: int) -> bool:
        """Have homes leave until so many bytes come back, the last one first. Under the ledger's lock."""
        asked = []
        for key in reversed(self._places):
            if num_bytes > 0 and key not in self._leaving and not self._claims.is_at_work(*key):
                asked.append(key)
                num_bytes -= self._places[key][1]
                self._leaving.add(key)
                self._device.ledger.activate()
        if asked:
            self._give_way(asked)
        return bool(self._leaving)
