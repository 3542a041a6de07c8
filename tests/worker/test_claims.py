"""Slabs whose room is free, but in pieces: the unit whose turn it is takes back what lies in its way."""

from types import SimpleNamespace
from unittest import mock

import pytest

from hydra_engine import EmulatedDevice
from hydra_engine.devices import ArenaInPieces, Residents
from hydra_engine.devices.budget import SLABS
from hydra_engine.devices.lanes import LOAD, Promise
from hydra_engine.host import Region
from hydra_engine.schedule import Unit
from hydra_engine.trace import Trace
from hydra_engine.worker.claims import Claims
from hydra_engine.worker.unit import ClaimStage, SlabLoad

PIECE = 1024  # bytes
REST = 6 * PIECE


class Filled:
    """In place of a spiller: takes slabs, and notes of which keys and how often."""

    def __init__(self, device):
        self.device = device
        self.keys = []

    def load_slab(self, state, shard, region, make_room):
        slab = self.device.take_slab(region.num_bytes, make_room)
        self.keys.append(region.key)
        return slab


class OneDevice:
    """Claims of a device whose arena holds so many pieces, with shards of a task of given regions."""

    def __init__(self, *shards, pieces=4):
        self.arena_bytes = pieces * PIECE
        spec = EmulatedDevice(self.arena_bytes + REST, has_arena=True, bandwidth="100GB")
        self.device = spec.open(0, Trace(), 1, self.arena_bytes)
        self.residents = Residents(self.device.ledger)
        self.filled = Filled(self.device)
        self.claims = Claims(self.device, self.residents, self.filled)
        shards = [
            SimpleNamespace(
                index=j, slab_bytes=sum(sizes), regions=[Region((j, k), k == 0, size) for k, size in enumerate(sizes)]
            )
            for j, sizes in enumerate(shards)
        ]
        self.state = SimpleNamespace(
            name="task",
            cut=SimpleNamespace(shards=shards),
            regions=lambda shard: shard.regions,
            region_next_use_s=lambda *_: 0.0,
        )
        assert self.device.ledger.take(REST)  # no slab has room beside the arena

    def unit(self, shard):
        return Unit("task", "f", shard, 0)

    def ask(self, shard):
        self.claims.request(self.unit(shard), self.state)
        self.load()

    def load(self):
        """Wait until the load lane is through."""
        through = Promise()
        self.device.submit(LOAD, "through", lambda: through.keep(None))
        through.result()

    def begin(self, shard):
        claim = self.claims.begin(self.unit(shard))
        claim.stage = ClaimStage.IN_LANES
        return claim

    def places(self, claim):
        return [load.slab.result().offset // PIECE for load in claim.slabs.values() if load.is_whole]

    def compute(self, claim):
        """Fill what is left, as in the compute lane, and return where its slabs lie."""
        self.claims.fill(claim)
        places = self.places(claim)
        self.claims.let_go(claim)
        self.claims.end(claim)
        return places


@pytest.fixture
def one():
    made = []

    def make(*shards, **options):
        made.append(OneDevice(*shards, **options))
        return made[0]

    yield make
    for each in made:
        each.device.ledger.evict = lambda *_: None
        each.device.close()


def in_the_middle(device, shard):
    """Leave a shard of one piece in the middle of the arena: of the four, the second."""
    device.device.arena._taken += [(0, PIECE), (2 * PIECE, device.arena_bytes)]
    device.ask(shard)
    assert device.compute(device.begin(shard)) == [1]
    device.device.arena._taken = [(PIECE, 2 * PIECE)]


def in_pieces(one):
    """A device and the claim of its unit 1, whose room is split in two by the pinned slab of unit 0."""
    device = one([PIECE], [3 * PIECE])
    in_the_middle(device, 0)
    device.residents.pin((0, 0), "other", lambda: 0.0)
    device.ask(1)
    return device, device.begin(1)


def test_a_slab_of_the_unit_after_is_taken_back_and_filled_again(one):
    device, first = in_pieces(one)
    assert device.places(first) == []
    assert first.error is None
    device.ask(0)
    device.residents.unpin((0, 0))
    assert device.filled.keys == [(0, 0)]
    assert device.compute(first) == [0]
    assert device.filled.keys == [(0, 0), (1, 0)]
    second = device.begin(0)
    assert device.places(second) == []
    assert device.compute(second) == [3]
    assert device.filled.keys == [(0, 0), (1, 0), (0, 0)]
    assert device.device.ledger.free_bytes(SLABS) == 0  # both are kept


def test_a_unit_that_is_dropped_may_have_its_slab_taken_back(one):
    device, first = in_pieces(one)
    device.ask(0)
    device.residents.unpin((0, 0))
    assert device.compute(first) == [0]
    device.claims.drop(device.unit(0))
    device.load()
    device.claims.settle()
    assert (0, 0) not in device.residents
    assert device.device.ledger.free_bytes(SLABS) == PIECE


def test_a_units_own_slab_moves_where_the_other_one_has_no_room(one):
    device = one([PIECE], [3 * PIECE])
    in_the_middle(device, 0)
    before, after = device.state.cut.shards
    after.regions = [*before.regions, *after.regions]  # of which the first one is there
    device.ask(1)
    claim = device.begin(1)
    assert device.places(claim) == [1]
    assert device.compute(claim) == [3, 0]
    assert device.filled.keys == [(0, 0), (1, 0), (0, 0)]


def test_what_others_hold_is_not_taken_back(one):
    device, claim = in_pieces(one)
    with pytest.raises(ArenaInPieces, match=r"3 KiB asked for, 2 KiB free of a budget of 4 KiB"):
        device.claims.fill(claim)
    device.claims.let_go(claim)
    assert device.filled.keys == [(0, 0)]


def at_home(device, first, last):
    """Have a home from one piece of the arena to another."""
    place = first * PIECE, last * PIECE
    device.device.arena._taken = [place]
    device.device.arena._lasting = [place]
    assert device.device.ledger.take(place[1] - place[0], SLABS)


@pytest.mark.parametrize(("home", "sizes"), [((1, 2), (2 * PIECE, 2 * PIECE)), ((2, 3), (PIECE, 3 * PIECE))])
def test_two_slabs_that_do_not_fit_around_a_home_are_refused(one, home, sizes):
    device = one(sizes, pieces=5)
    at_home(device, *home)
    device.ask(0)
    claim = device.begin(0)
    with pytest.raises(ArenaInPieces) as caught:
        device.claims.fill(claim)
    claim.fail(caught.value)
    device.claims.let_go(claim)
    device.claims.end(claim)
    device.claims.settle()
    assert device.device.ledger.free_bytes(SLABS) == 4 * PIECE
    assert len(device.device.arena._taken) == 1


def test_a_slab_on_its_way_for_a_later_unit_is_waited_for_and_taken_back(one):
    device, first = in_pieces(one)
    device.residents.unpin((0, 0))
    begun, may_end = Promise(), Promise()
    load_slab = device.filled.load_slab

    def slowly(*arguments):
        slab = load_slab(*arguments)
        if not begun.is_done:
            begun.keep(None)
        may_end.result()
        return slab

    device.residents.forget()
    device.filled.load_slab = slowly
    device.device.arena._taken += [(0, PIECE), (2 * PIECE, device.arena_bytes)]
    device.claims.request(device.unit(0), device.state)
    begun.result()
    device.device.arena._taken = [(PIECE, 2 * PIECE)]
    settle = SlabLoad.settle

    def waits(load):
        if not load.slab.is_done and not may_end.is_done:
            may_end.keep(None)
        return settle(load)

    with mock.patch.object(SlabLoad, "settle", waits):
        assert device.compute(first) == [0]
    assert device.filled.keys == [(0, 0), (0, 0), (1, 0)]
    assert device.compute(device.begin(0)) == [0]


def test_a_slab_that_is_given_back_while_room_is_made_for_another_is_found(one):
    device = one([PIECE], [3 * PIECE])
    arena = device.device.arena
    slabs = [arena.take(PIECE) for _ in range(3)]
    arena.give_back(slabs[0])

    def too_late():
        arena.give_back(slabs[1])
        return False

    assert arena.take(2 * PIECE, too_late, lambda _: False).num_bytes == 2 * PIECE


def test_a_slab_is_filled_while_the_load_lane_gives_it_up(one):
    device = one([PIECE], [3 * PIECE])
    in_the_middle(device, 0)
    device.residents.pin((0, 0), "other", lambda: 0.0)
    gives_up, may_give_up = Promise(), Promise()
    give_up = Promise.give_up

    def slowly(promise, error):
        gives_up.keep(None)
        may_give_up.result()
        give_up(promise, error)

    with mock.patch.object(Promise, "give_up", slowly):
        device.claims.request(device.unit(1), device.state)
        gives_up.result()
        device.residents.unpin((0, 0))
        claim = device.begin(1)
        device.claims.fill(claim)
        may_give_up.keep(None)
        device.load()
    assert device.compute(claim) == [0]
    device.residents.forget()
    assert device.device.arena._taken == []


def test_a_claim_is_granted_once_all_its_slabs_are_asked_for(one):
    device = one([PIECE])
    stages, pinned = [], device.claims._pinned

    def noting(claim, region):
        stages.append(claim.stage)
        return pinned(claim, region)

    device.claims._pinned = noting
    device.ask(0)
    assert stages == [ClaimStage.ASKED]
    assert device.compute(device.begin(0)) == [0]
