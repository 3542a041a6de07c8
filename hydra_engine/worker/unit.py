"""A unit on a device: its shard (`Claim`), its computation (`UnitRun`), and tensors that enter and leave it."""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TypeAlias, TypeVar

from torch import Tensor

from hydra_engine.data import RandomState, Signature
from hydra_engine.devices import ArenaInPieces, Ledger, OpenDevice, Promise, Slab
from hydra_engine.host import Region, TaskState, UnitBytes
from hydra_engine.schedule import BACKWARD, FUSED, Unit
from hydra_engine.worker.graphs import GraphUse, SavedTensors
from partitioners import MemoryMeter
from partitioners.boundary import Boundary

T = TypeVar("T")
MakeRoom: TypeAlias = "Callable[[], bool]"  # has another slab given back; False: there is none


@dataclass(kw_only=True)
class MicroInput:
    """Tensors that one micro-batch of a unit starts from, on the device."""

    value: Boundary
    random: RandomState  # before the shard's forward
    target: Boundary | None = None  # last shard
    weight: float | None = None  # of this micro-batch's loss; None: the plain loss
    loss_scale: float | None = None  # the loss is multiplied by it before its backward
    gradients: Sequence[Tensor | None] = ()  # of the shard's output, for a backward
    tied: dict[int, Tensor] = field(default_factory=dict)  # slot -> gradient from the shards above
    skips: dict[str, Boundary] = field(default_factory=dict)  # values that skip layers and are gotten here
    skip_gradients: dict[str, Sequence[Tensor | None]] = field(default_factory=dict)  # from the shards above

    @property
    def num_bytes(self) -> int:
        gradients = [*self.gradients, *itertools.chain(*self.skip_gradients.values()), *self.tied.values()]
        values = [value.tensors for value in (self.value, self.target, *self.skips.values()) if value]
        return storage_bytes([*itertools.chain(*values), *gradients])


@dataclass(kw_only=True)
class MicroOutput:
    """Tensors that one micro-batch of a unit leaves, on the device."""

    random: RandomState  # after the shard's forward
    value: Boundary | None = None  # forward: what enters the next shard
    gradients: list[Tensor | None] | None = None  # backward: of what entered this shard
    tied: dict[int, Tensor | None] = field(default_factory=dict)  # borrowed slot -> gradient so far
    skips: dict[str, Boundary] = field(default_factory=dict)  # forward: values for shards further up
    squares: Tensor | None = None  # backward of an adaptive task: squared norms of its gradients, by group
    skip_gradients: dict[str, list[Tensor | None]] = field(default_factory=dict)  # backward: of those gotten here
    pieces: dict[int, Tensor | None] = field(default_factory=dict)  # by owned slot: of this micro-batch alone
    # Read by whoever stores them: the lane that computes must not wait for the device.
    loss: float | Tensor | None = None
    metrics: dict[str, float | Tensor] = field(default_factory=dict)  # of an evaluation
    # Of the tensors of `value`: those that are a tensor of the input as it came; and those whose memory something else
    # that stays on the device holds.
    passed: Mapping[int, int] = field(default_factory=dict)
    held: Collection[int] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes that stay on the device until they are stored."""
        gradients = [*(self.gradients or ()), *itertools.chain(*self.skip_gradients.values())]
        values = itertools.chain(*(value.tensors for value in (self.value, *self.skips.values()) if value))
        return storage_bytes([*values, *gradients, *self.tied.values(), *self.pieces.values()])


@dataclass(kw_only=True)
class UnitOutput:
    """Tensors that a unit leaves once all its micro-batches are through, on the device."""

    gradients: dict[int, Tensor | None]  # by owned slot; None: it received none
    buffers: dict[int, Tensor]
    # Of the step's gradients, where they are all in these: norms of those that there are; squared ones, by group.
    norms: Tensor | None = None
    squares: Tensor | None = None
    last: MicroOutput | None = None  # of its last micro-batch, which goes to DRAM with it

    @property
    def num_bytes(self) -> int:
        """Bytes that stay on the device until they are stored, beside those of the last micro-batch."""
        return storage_bytes([*self.gradients.values(), *self.buffers.values()])


def storage_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the storages behind these tensors, each once."""
    storages = [t.untyped_storage() for t in tensors if t is not None]
    if len(storages) < 2:
        return storages[0].nbytes() if storages else 0
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


class SlabLoad:
    """A slab that is being filled, or was, for every unit that needs it."""

    def __init__(self, load: Callable[[MakeRoom], Slab], *, late: bool, is_home: bool = False) -> None:
        self.slab: Promise[Slab] = Promise()
        # Loaded when the first unit runs, by the lane that computes: it is small, or had no room in one piece before.
        self.is_late = late
        self.is_home = is_home  # DRAM may have old values of it
        self.is_spoiled = False  # a unit failed on it, which may have written to the parameters: to be filled again
        self._load = load

    @property
    def is_whole(self) -> bool:
        return self.slab.has_result

    def settle(self) -> bool:
        """Wait for the load, if it was begun. Return True if the slab is filled."""
        slab = self.slab  # of one that becomes late meanwhile, the promise that was given up
        return slab.has_result if self.is_late else slab.is_kept()

    def load(self, make_room: MakeRoom) -> None:
        """Fill the slab, or leave it to the lane that computes. Its errors are of no unit: others may need it."""

        def filled() -> Slab:
            try:
                return self._load(make_room)
            except ArenaInPieces:
                self.is_late = True
                raise

        if self.is_late:  # the load lane may be just giving up the one before
            self.slab = Promise()
        self.slab.fulfil(filled)

    def take_back(self) -> Slab:
        """Return the slab, whose place is wanted. It is filled again when the first unit runs."""
        self.is_late, slab, self.slab = True, self.slab.result(), Promise()
        return slab


class ClaimStage(Enum):
    """Stages of a claim."""

    ASKED = auto()  # the ledger has not granted its slabs, or has refused them
    GRANTED = auto()  # its slabs are filled, or on their way
    IN_LANES = auto()  # its unit is in the lanes, and the last of its jobs ends it


class Delay(Enum):
    """What holds up a unit that was begun."""

    MEMORY = auto()  # bytes that the ledger has not granted
    WEIGHTS = auto()  # a slab that is not filled


class Claim:
    """A unit's shard on its way to the device, or there, until its unit is computed or the claim is dropped."""

    def __init__(self, unit: Unit, state: TaskState) -> None:
        self.unit = unit
        self.label = str(unit)
        self.state = state
        self.shard = state.cut.shards[unit.shard]
        self.regions = state.regions(self.shard)
        self.slabs: dict[Region, SlabLoad] = {}  # pinned
        self.views: dict[int, Tensor] = {}  # parameters in the slabs, by slot, once the unit runs
        self.stage = ClaimStage.ASKED
        self.error: BaseException | None = None  # the first, of the unit too
        self.where = ""  # that the error came from
        self.freed: Promise[None] = Promise()  # kept once the slabs are let go

    def fail(self, error: BaseException, where: str = "") -> None:
        forget_frames(error)
        if self.error is None:
            self.error, self.where = error, where

    def spoil(self, *, has_written: bool) -> None:
        """Have its slabs filled again: its unit may have written to parameters; has_written: it was seen to."""
        for load in self.slabs.values():
            load.is_spoiled = has_written or not load.is_home

    def do(self, lane: str, device: OpenDevice, job: Callable[[], T]) -> T:
        """Do part of the unit in a lane, to the end. Where the unit has failed, raise why instead."""
        try:
            if self.error is not None:
                raise self.error
            try:
                return job()
            finally:
                device.finish()
        except BaseException as error:
            self.fail(error, f"{lane} lane")
            raise


@dataclass(kw_only=True)
class Account:
    """Bytes that a unit takes beside its slabs: known before, granted, and seen."""

    ledger: Ledger
    signature: Signature
    num_micro_batches: int
    buffer_bytes: int  # of its shard's buffers
    beside_bytes: int  # granted beside `known`: for buffers, gradients that it adds to
    known: UnitBytes | None = None  # what such a unit took at most so far; None: it has to be metered
    held_bytes: int = 0  # granted now
    work_bytes: int = 0  # peak of what a metered unit created
    input_bytes: int = 0  # of one micro-batch, the largest seen
    output_bytes: int = 0  # likewise

    @property
    def wanted_bytes(self) -> int | None:
        """Bytes to ask for; None: not known yet."""
        return None if self.known is None else self.beside_bytes + self.known.total(self.num_micro_batches)

    def look_up(self, claim: Claim) -> None:
        """Look up what is known of such units."""
        self.known = claim.state.unit_bytes(claim.unit.kind, claim.shard, self.signature)

    def measured(self) -> UnitBytes:
        return UnitBytes(self.work_bytes, self.input_bytes, self.output_bytes)

    def total_bytes(self, work_bytes: int) -> int:
        """Bytes that the unit takes beside its slabs, where it has created so many."""
        return self.beside_bytes + self.measured()._replace(work=work_bytes).total(self.num_micro_batches)

    def grow(self, num_bytes: int) -> None:
        self.ledger.grow(num_bytes)
        self.held_bytes += num_bytes

    @contextmanager
    def metered(self, saved: SavedTensors | None) -> Iterator[None]:
        """Count the bytes that the body creates, for `saved` too, and grow where they are more than was granted."""

        def on_change(delta: int) -> None:
            if delta > 0 and (missing := self.total_bytes(meter.current_bytes + delta) - self.held_bytes) > 0:
                self.grow(missing)

        meter = MemoryMeter(on_change)
        if saved is not None:
            saved.created_bytes = lambda: meter.current_bytes
        with meter:
            yield
        self.work_bytes = meter.peak_bytes
        if self.known is None:
            needed = self.total_bytes(self.work_bytes)
            self.ledger.settle(self.held_bytes, needed)
            self.held_bytes = needed

    def count_buffers(self, num_bytes: int) -> None:
        """Charge buffers that are larger than what was granted for them."""
        more = num_bytes - self.buffer_bytes
        if more > 0:
            self.grow(more)
            self.beside_bytes, self.buffer_bytes = self.beside_bytes + more, num_bytes


class Sums(Enum):
    """Gradients of a unit that has some of a step's micro-batches."""

    OWN = auto()  # the first ones, or the only ones: it adds up its own
    GOES_ON = auto()  # it adds to those of the micro-batches before, in place
    IN_PIECES = auto()  # it gives each micro-batch's apart, and the host adds them up


class Passage:
    """Progress of what a unit leaves, on its way to DRAM."""

    def __init__(self) -> None:
        self.passed: Promise[None] = Promise()  # all that the next unit starts from
        self.stored: Promise[None] = Promise()  # gradients of parameters, too
        self.is_void = False  # the unit has failed before it left anything


class UnitRun:
    """A unit that is computed: what it works with on the device, and what it leaves there until that is stored."""

    def __init__(self, claim: Claim, ledger: Ledger, after: Passage | None) -> None:
        unit, state = claim.unit, claim.state
        staging, shard = state.staging, claim.shard
        self.claim = claim
        self.micro_batches = range(*staging.range_of(unit.part))  # of the step's
        self.sums = Sums.OWN
        if staging.parts is not None and unit.part > 0:
            if not staging.parts.in_sums:
                self.sums = Sums.IN_PIECES
            elif unit.kind in (FUSED, BACKWARD):
                self.sums = Sums.GOES_ON
        signature, buffer_bytes = staging.signature_of(unit.part), state.buffer_bytes(shard)
        sum_bytes = state.sum_bytes(shard) if self.sums is Sums.GOES_ON else 0
        self.account = Account(
            ledger=ledger,
            signature=signature,
            num_micro_batches=len(self.micro_batches),
            buffer_bytes=buffer_bytes,
            beside_bytes=buffer_bytes + sum_bytes,
        )
        self.account.look_up(claim)
        self.is_metered = False
        self.graphs = GraphUse()
        self.after = after  # of the unit before it, where that is still on its way to DRAM
        self.passage = Passage()
        # The next three are brought by the lane that computes.
        self.first_input: MicroInput | None = None
        self.buffers: dict[int, Tensor] = {}
        self.so_far: dict[int, Tensor] = {}
        self.inputs: dict[int, Promise[MicroInput]] = {}  # the others on their way, by micro-batch
        self.stores: list[Promise[None]] = []  # outputs on their way to DRAM, but for the last
        self.output: UnitOutput | None = None
        self.waited_s = 0.0  # seconds in which the compute lane waited for copies of micro-batches

    @property
    def is_in_turn(self) -> bool:
        """True if nothing of the unit before it is on its way to DRAM."""
        return self.after is None or self.after.stored.is_done

    def forget(self) -> None:
        """Let go of everything on the device: the unit has failed, and somebody may keep its error for long."""
        self.graphs = GraphUse()
        self.first_input, self.inputs, self.stores = None, {}, []
        self.claim.views, self.buffers, self.so_far = {}, {}, {}


def forget_frames(error: BaseException) -> None:
    """Clear the variables of the functions that an error came through: they hold a unit's activations.

    The error's text stays as it is, and functions that still run keep theirs.
    """
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__
