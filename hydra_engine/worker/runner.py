"""Computes units in one device's lanes, and sends what they leave to DRAM.

An error in any lane is kept with the unit's claim. The unit's later jobs then do nothing but give back what it holds,
so there is one way out for good and bad.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import add
from typing import TypeAlias, TypeVar

from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from hydra_engine.data import same_bits
from hydra_engine.devices import COMPUTE, INPUT, LOAD, STORE, OpenDevice, Promise, Residents, Timer
from hydra_engine.errors import DeviceGone, DeviceLost
from hydra_engine.host import BuffersChanged
from hydra_engine.schedule import BACKWARD, EVALUATE, FORWARD, FUSED, Computed, Event, Failed, Stored, Unit
from hydra_engine.trace import Timing, Trace
from hydra_engine.worker.claims import Claims
from hydra_engine.worker.executor import NOTHING, Executor, UnitSpec
from hydra_engine.worker.kept_graphs import settle_graphs
from hydra_engine.worker.spiller import Arriving, Spiller, buffers_of
from hydra_engine.worker.unit import Claim, MicroInput, MicroOutput, Sums, UnitOutput, UnitRun, storage_bytes

T = TypeVar("T")
Report: TypeAlias = "Callable[[Event], None]"
Entered: TypeAlias = "Sequence[tuple[Tensor, int]]"  # tensors that a forward starts from, with their versions


def _is_alike(a: Tensor, b: Tensor) -> bool:
    """Return True if two tensors that begin at one address are read alike."""
    return a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype and same_bits(a, b)


def _spec_of(run: UnitRun) -> UnitSpec:
    state, shard, kind = run.claim.state, run.claim.shard, run.claim.unit.kind
    cut, j = state.cut, shard.index
    return UnitSpec(
        kind,
        shard,
        run.micro_batches,
        locked=j in cut.locked,
        draws=j in cut.drawing,
        keep_saved=j in cut.keep_saved,
        in_pieces=run.sums is Sums.IN_PIECES,
        is_last=run.micro_batches.stop == state.staging.num_micro_batches,
        written=state.observed.written_buffers,
        changes=state.observed.attributes,
        norm_groups=state.norm_groups,
        norm=state.norm,
    )


def _charge_buffers(run: UnitRun, after: bool) -> None:
    """Charge buffers that are larger than when the unit was begun: a shard below may have changed one meanwhile."""
    claim = run.claim
    if claim.state.observed.resized.isdisjoint(claim.shard.buffers):
        return
    buffers = buffers_of(claim.state, claim.shard, claim.unit.part, after=after)
    run.account.count_buffers(sum(map(claim.state.layout.buffer_bytes, buffers.values())))


def _note_shared(run: UnitRun, entered: Entered, out: MicroOutput) -> None:
    """Note which tensors of a forward's output are one of its input, as it came, and whose memory others hold."""
    if out.value is None:
        return
    intact = {tensor.data_ptr(): k for k, (tensor, version) in enumerate(entered) if tensor._version == version}
    found = ((i, tensor, intact.get(tensor.data_ptr())) for i, tensor in enumerate(out.value.tensors))
    out.passed = {i: k for i, tensor, k in found if k is not None and _is_alike(tensor, entered[k][0])}
    saved, inputs = run.graphs.saved, set()
    if run.claim.unit.kind == FORWARD:  # of an evaluation no input is kept
        inputs = {tensor.untyped_storage().data_ptr() for tensor, version in entered if tensor._version == version}
    out.held = {
        i
        for i, tensor in enumerate(out.value.tensors)
        if (i not in out.passed and tensor.untyped_storage().data_ptr() in inputs)
        or (saved is not None and saved.holds(tensor))
    }


@dataclass(eq=False)
class Runner:
    """Computes one device's units. Those methods without an underscore are jobs of its compute lane."""

    _index: int
    _device: OpenDevice
    _trace: Trace
    _report: Report
    _decide: Callable[[], None]  # at the end of a job that has told something, where nothing is held any more
    _spiller: Spiller
    _claims: Claims
    _residents: Residents
    timing: Timing = field(default_factory=lambda: Timing(0.0, 0.0))  # of all units, where launching is not computing
    # Held while results are written to DRAM: whoever gives a unit up waits for that, and nothing follows.
    storing: threading.Lock = field(default_factory=threading.Lock)
    _computing: Unit | None = None
    _struck: Unit | None = None  # after which the device did not finish any more

    def compute(self, run: UnitRun, executor: Executor) -> None:
        """Compute a unit whose bytes are granted, report it, and have what it leaves stored."""
        claim, device = run.claim, self._device
        start_s = self._trace.now_s()
        output: UnitOutput | None = None
        timer: Timer | None = None
        executing = False
        self._computing = claim.unit
        try:
            run.is_metered = run.account.known is None or device.meter_every_unit
            self._bring_first(run)
            self._set_views(claim)
            if claim.unit.kind == EVALUATE and claim.state.task.metrics and claim.state.cut.is_last(claim.shard):
                claim.state.homes.show_all()  # which metrics may read
            start_s, executing, timer = self._trace.now_s(), True, device.timer()  # waiting is not work
            with run.account.metered(run.graphs.saved) if run.is_metered else NOTHING:
                output = self._run_micro_batches(run, executor)
            if claim.error is not None:  # given up meanwhile: nothing of it counts
                raise claim.error
            if run.is_metered and not run.graphs.granted_bytes:  # what a forward keeps is counted apart
                claim.state.learn_unit_bytes(
                    claim.unit.kind, claim.shard, run.account.signature, run.account.measured()
                )
            if timer is not None:
                timer.launched()
            if output.buffers and claim.state.note_resized(output.buffers) and not run.is_metered:
                raise BuffersChanged(f"{claim.unit} resized buffers that its shard's forward left alone before")
        except BaseException as error:
            claim.fail(error, executor.shown)
        try:
            device.finish()  # before anything that it works with is given back
            if timer is not None and claim.error is None:
                timing = claim.state.measured.timings[claim.unit.kind, claim.unit.shard] = timer.timing()
                self.timing = Timing(*map(add, self.timing, timing))
        except BaseException as error:
            self._struck = self._struck or claim.unit
            claim.fail(error, "a kernel")
        if claim.error is not None and executing:
            claim.spoil(has_written=executor.has_written)
        if claim.error is not None and self._struck is None and isinstance(device.explained(claim.error), DeviceLost):
            self._struck = claim.unit
        run.so_far = {}  # what became of them is in the output
        if output is None or not output.buffers:
            run.buffers = {}
        if executing and not isinstance(claim.error, DeviceGone):  # then it counts where it is computed again
            self._trace.add(device.name, COMPUTE, claim.label, start_s)
            self._trace.count_work(claim.unit.task, computed_s=self._trace.now_s() - start_s - run.waited_s)
        executor.current = ""
        settle_graphs(run, self._residents)
        run.output, output = output, None
        try:
            self._hand_over(run, start_s)
        finally:
            self._decide()

    def _run_micro_batches(self, run: UnitRun, executor: Executor) -> UnitOutput:
        """Run the layers on one micro-batch after the other; each one's output is on its way before the next begins."""
        claim, micro_batches, kind = run.claim, run.micro_batches, run.claim.unit.kind
        is_forward, has_gradients = kind == FORWARD, kind in (FUSED, BACKWARD)
        spec = _spec_of(run)
        last: MicroOutput | None = None
        with executor.run(spec, claim.views, run.buffers, run.so_far, run.graphs) as running:
            for m in micro_batches:
                if m + 1 < micro_batches.stop:
                    self._submit_input(run, m + 1)  # two are charged, this one and the next
                micro = run.first_input or self._awaited(run, run.inputs.pop(m))
                run.first_input = None
                entered = [] if has_gradients else [(tensor, tensor._version) for tensor in micro.value.tensors]
                out = running.micro(m, micro)
                if not has_gradients:
                    _note_shared(run, entered, out)
                del micro
                if is_forward:
                    self._keep_input(run, m, entered, out)
                last = self._emit(run, m, out)
                del entered, out  # before the next one's arrive
            output = running.end()
        output.last = last
        return output

    def _hand_over(self, run: UnitRun, start_s: float) -> None:
        """Give back what a computed unit needs no more, report it, and have its output stored."""
        claim, held_bytes, kept_bytes = run.claim, run.account.held_bytes, run.account.output_bytes
        goes_at_once = False
        if run.output is not None:  # held by nobody here when it is stored
            kept_bytes += run.output.num_bytes
            is_at_home = claim.shard.index in claim.state.homes.of
            gradient_bytes = storage_bytes(run.output.gradients.values()) if is_at_home else 0  # which cross no link
            goes_at_once = self._device.copies_at_once(kept_bytes - gradient_bytes)
        self._claims.let_go(claim)
        kept_bytes = min(held_bytes, kept_bytes)
        self._device.ledger.release(held_bytes - kept_bytes)
        seconds = self._trace.now_s() - start_s
        # Nothing goes on from one that has failed, and it may be run again at once.
        run.passage.is_void = claim.error is not None
        self._computing = None
        goes_at_once = goes_at_once and run.is_in_turn
        computed = Computed(self._index, claim.unit, seconds, failed=claim.error is not None, stored=goes_at_once)
        # At once, both are reported as one: whoever is woken by this would only take the interpreter from the store.
        if not goes_at_once:
            self._report(computed)
        job = partial(self._store, run, kept_bytes, computed if goes_at_once else None)
        self._device.submit(STORE, claim.label, job, at_once=goes_at_once)

    def _copies_here(self, run: UnitRun, num_bytes: int) -> bool:
        """Return True if the lane that computes copies something of a micro-batch by itself, without waking another."""
        return not run.is_metered and self._device.copies_at_once(num_bytes)

    # -- what a unit starts from

    def _bring_first(self, run: UnitRun) -> None:
        """Bring the first input, once the unit before it is in DRAM; with it come the buffers.

        In the compute lane, which has nothing else to do: the load lane must not stand still for it, and waking one
        thread less is more than a small copy costs.
        """
        claim = run.claim
        if run.after is not None:
            # Its job was queued before this one, and waits for no load. Where copies are as quick as memory, nothing is
            # gained by going on before all of it is there, and the C library's heap would grow for it.
            (run.after.passed if self._device.has_link else run.after.stored).result()
        start_s = self._trace.now_s()
        try:
            run.first_input = claim.do(LOAD, self._device, partial(self._load_first, run))
        finally:
            self._trace.add(self._device.name, LOAD, claim.label, start_s)

    def _load_first(self, run: UnitRun) -> MicroInput:
        """Load the first input, and what else a unit begins with."""
        claim, after = run.claim, bool(run.graphs.graphs)
        if claim.shard.buffers:
            _charge_buffers(run, after)
            run.buffers = self._spiller.load_buffers(claim.state, claim.shard, claim.unit.part, after=after)
        if run.sums is Sums.GOES_ON:
            run.so_far = self._spiller.load_so_far(claim.state, claim.shard)
        m = run.micro_batches.start
        return self._spiller.load_input(claim.state, claim.unit.kind, claim.shard, m, self._place_input(run, m))

    def _set_views(self, claim: Claim) -> None:
        """Apart, so that no slab is in the hands of what an error comes through last."""
        self._claims.fill(claim)
        slabs = {region.trainable: load.slab.result() for region, load in claim.slabs.items()}
        claim.views = self._spiller.views.of(claim.state, claim.shard, slabs)

    def _submit_input(self, run: UnitRun, m: int) -> None:
        promise = run.inputs[m] = Promise()
        claim = run.claim
        # It may lie where the one before the last did: the lane begins once what computed on that is through.
        with _disable_current_modes() if run.is_metered else NOTHING:  # inputs are counted apart
            arriving = [self._place_input(run, m)]  # not held by the lane, once it is loaded
        num_bytes = sum(source.nbytes for _, source in arriving[0].copies)

        def load() -> MicroInput:
            return self._spiller.load_input(claim.state, claim.unit.kind, claim.shard, m, arriving.pop())

        job = partial(promise.fulfil, partial(claim.do, LOAD, self._device, load))
        self._device.submit(INPUT, claim.label, job, at_once=self._copies_here(run, num_bytes))

    def _place_input(self, run: UnitRun, m: int) -> Arriving:
        claim, has_graph = run.claim, bool(run.graphs.graphs)
        arriving = self._spiller.place_input(claim.state, claim.unit.kind, claim.shard, m, has_graph=has_graph)
        if run.is_metered:
            run.account.input_bytes = max(run.account.input_bytes, arriving.micro.num_bytes)
        return arriving

    def _awaited(self, run: UnitRun, promise: Promise[T]) -> T:
        """Wait for a copy, which is not computing."""
        start_s = self._trace.now_s()
        try:
            return promise.result()
        finally:
            run.waited_s += self._trace.now_s() - start_s

    # -- what a unit leaves

    def _keep_input(self, run: UnitRun, m: int, entered: Entered, out: MicroOutput) -> None:
        """Leave a forward's input to its backward, where no graph holds it and no layer worked in place on it."""
        if run.graphs.granted_bytes:
            return
        claim, value = run.claim, () if out.value is None else out.value.tensors
        others = {value[i].untyped_storage().data_ptr() for i in out.held}
        tensors = [tensor if tensor._version == version else None for tensor, version in entered]
        held = {k for k, each in enumerate(tensors) if each is not None and each.untyped_storage().data_ptr() in others}
        self._spiller.keep_values(claim.state, claim.shard, m, tensors, held)

    def _emit(self, run: UnitRun, m: int, out: MicroOutput) -> MicroOutput | None:
        """Have a micro-batch's output stored, or return it: the last one goes with what the unit itself leaves."""
        claim = run.claim
        if run.stores:
            self._awaited(run, run.stores[-1])  # one on its way at most: the ledger holds no more
        run.account.output_bytes = max(run.account.output_bytes, out.num_bytes)
        if m == run.micro_batches.stop - 1:
            return out
        stored: Promise[None] = Promise()
        run.stores.append(stored)
        held = [out]  # not by the lane, once it is stored

        def store() -> None:
            self._store_micro(claim, m, held.pop())

        at_once = run.is_in_turn and self._copies_here(run, run.account.output_bytes)
        job = partial(stored.fulfil, partial(claim.do, STORE, self._device, store))
        self._device.submit(STORE, claim.label, job, at_once=at_once)
        if run.is_metered:
            # What is stored counts apart: a metered run must not find it in one run and miss it in another.
            stored.result()
        return None

    def _store_micro(self, claim: Claim, m: int, out: MicroOutput) -> None:
        try:
            with self.storing:
                if claim.error is not None:
                    raise claim.error
                self._spiller.store_micro(claim.state, claim.unit.kind, claim.shard, m, out)
        finally:
            self._device.finish()  # before it is let go, whose last holder this is
        self._spiller.keep_output(claim.state, claim.shard, m, out)

    def _store(self, run: UnitRun, kept_bytes: int, computed: Computed | None = None) -> None:
        """Send to DRAM what a unit has left; report that it is, by `computed` where that was not reported yet."""
        try:
            with self.storing:
                self._store_alone(run, kept_bytes, computed)
        finally:
            if computed is None:  # else the lane that computes is at work here, which decides at the end of its job
                self._decide()

    def _store_alone(self, run: UnitRun, kept_bytes: int, computed: Computed | None) -> None:
        claim, output, spiller = run.claim, run.output, self._spiller
        unit, state, shard = claim.unit, claim.state, claim.shard
        stays_bytes = 0
        is_torn = False
        try:
            if output is not None and output.last is not None and claim.error is None:
                m = run.micro_batches.stop - 1
                spiller.store_micro(state, unit.kind, shard, m, output.last)
                spiller.store_buffers(state, unit, shard, output)
                self._device.finish()
                stays_bytes = spiller.keep_output(state, shard, m, output.last, kept_bytes)
                run.passage.passed.keep(None)
                is_torn = run.sums is Sums.GOES_ON  # onto sums that it began with
                spiller.store_gradients(state, unit, shard, output)
        except BaseException as error:
            claim.fail(error, "store lane")
        try:
            self._device.finish()
        except BaseException as error:
            claim.fail(error, "store lane")
        run.output = output = None  # nobody holds it when its bytes are given back
        run.buffers = {}
        self._device.ledger.release(kept_bytes - stays_bytes, deactivates=True)
        self._claims.end(claim)
        # In this order: whoever waits for it must not be reported before it.
        if claim.error is None:
            self._report(Stored(unit) if computed is None else computed)
            run.passage.stored.keep(None)
        else:
            if computed is not None:
                self._report(computed._replace(stored=False))
            self._report(self._failed(claim, claim.error)._replace(is_torn=is_torn))
            if not run.passage.passed.is_done:
                run.passage.passed.give_up(claim.error)
            run.passage.stored.give_up(claim.error)
            run.forget()

    def _failed(self, claim: Claim, error: BaseException) -> Failed:
        """Report a unit that has failed, or the whole device under it: then what was computed is to blame."""
        # Before it is explained: meanwhile the compute lane may find out, and go on to the next unit.
        struck = self._computing or claim.unit
        error = self._device.explained(error)
        if isinstance(error, DeviceLost):
            error.task = (self._struck or struck).task
        return Failed(claim.unit.task, error, claim.where, claim.unit, device=self._index)
