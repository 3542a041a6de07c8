"""One device at work: takes units through its lanes.

    instruction      ledger, in order            lanes
    load(unit)       slab                        load     parameters into the slab; a few: compute, when the unit runs
    run(unit)        work, buffers, inputs,      compute  buffers and input of micro-batch 0
                     outputs                     input    inputs of micro-batches 1, ...
                     slab, work given back       compute  micro-batch 0, 1, ...; reports Computed
                     outputs given back          store    outputs of 0, 1, ...; gradients; reports Stored or Failed
    drop(unit)       slab given back

An error in any lane is kept with the unit; its later jobs then do nothing but give back what it holds, so there is one
way out for good and bad. Called by the thread that decides.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, TypeAlias, TypeVar

from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from hydra_engine.devices import COMPUTE, INPUT, LOAD, SLABS, STORE, OpenDevice, Promise, Residents, Ticket, Timer
from hydra_engine.errors import DeviceLost
from hydra_engine.host import BuffersChanged, DeviceStep, Region, Structure, TaskOptimizer, TaskState, UnitBytes
from hydra_engine.schedule import BACKWARD, FORWARD, Computed, Event, Failed, Stored, Unit
from hydra_engine.trace import Timing, Trace
from hydra_engine.worker.compiled import CompiledLayers
from hydra_engine.worker.executor import Executor, Modes
from hydra_engine.worker.graphs import Graph, Saved
from hydra_engine.worker.spiller import Arriving, Spiller
from hydra_engine.worker.unit import GivenUp, Left, Loading, MicroInput, MicroOutput, UnitOutput, Work
from partitioners import MemoryMeter

T = TypeVar("T")
Report: TypeAlias = "Callable[[Event], None]"
Functions: TypeAlias = "tuple[Callable[[Any, Any], Tensor], Mapping[str, Callable[[Any, Any], float | Tensor]]]"


class Worker:
    """Takes units through one device's lanes."""

    def __init__(self, index: int, device: OpenDevice, trace: Trace, report: Report) -> None:
        self.index = index
        self.device = device
        self._trace = trace
        self._report = report
        self._residents = Residents(device.ledger)
        self._spiller = Spiller(device, self._residents)
        self._executors: dict[str, Executor] = {}
        self._claims: dict[Unit, tuple[Work, Ticket]] = {}
        self._left: dict[tuple[str, int], Left] = {}  # by (task, part), of the last unit that was run here
        self.timing = Timing(0.0, 0.0)  # of all units, where launching is not computing
        self._computing: Unit | None = None
        self._at_work: set[Work] = set()  # run, and not through with their slabs
        self._struck: Unit | None = None  # after which the device did not finish any more
        self._outstanding: set[Work] = set()  # from load to stored or dropped
        self._changed = threading.Condition()

    def admit(self, state: TaskState, modes: Modes = nullcontext, functions: Functions | None = None) -> None:
        """Make this device's copy of a task's structure; units run inside `modes()`.

        functions: the loss and the metrics, where they are not the task's own.
        """
        structure = Structure(state.layout, self.device.torch_device)
        task = state.task
        compiled = CompiledLayers(structure) if task.compile else None
        loss_fn, metrics = functions or (task.loss_fn, task.metrics)
        self._executors[state.name] = Executor(
            structure, loss_fn, state.layout.num_layers, modes, metrics, self.device.random, compiled
        )

    def executor(self, name: str) -> Executor:
        """Return the executor of a task's units, on this device's copy of its structure."""
        return self._executors[name]

    def dismiss(self, name: str) -> None:
        """Forget a task."""
        self._executors.pop(name, None)  # its set-up may have failed before
        self._residents.forget(name)
        self._forget_left(name)

    def dismiss_all(self) -> None:
        """Forget all tasks, and what was left for them; nothing runs any more."""
        self._executors.clear()
        self._left.clear()

    def sweep(self, name: str) -> None:
        """A step of a task begins: nothing that was kept for the one before is of any use."""
        self._residents.sweep(name)

    def begin_again(self, name: str) -> None:
        """A step of a task begins again; nothing of it is under way. Its last unit here may have failed."""
        self.sweep(name)
        self._forget_left(name)

    def _forget_left(self, name: str) -> None:
        for key in list(self._left):  # units of other tasks are begun meanwhile
            if key[0] == name:
                self._left.pop(key, None)

    def holds(self, state: TaskState, shard: int) -> bool:
        """Whether most of a shard is on the device, or on its way there."""
        regions = state.regions(state.cut.shards[shard])
        resident = sum(region.num_bytes for region in regions if region.key in self._residents)
        return 2 * resident > sum(region.num_bytes for region in regions)

    def load(self, unit: Unit, state: TaskState) -> None:
        """Begin to bring a unit's shard; it becomes the device's claim."""
        work = Work(unit, state)

        def wanted() -> int:
            return sum(region.num_bytes for region in work.regions if region.key not in self._residents)

        def granted(_: int) -> None:
            work.slab_granted = True
            for region in work.regions:
                work.slabs[region] = self._pinned(work, region)

        with self._changed:
            self._outstanding.add(work)
        ticket = Ticket(num_bytes=wanted, granted=granted, refused=work.fail, kind=SLABS)
        self._claims[unit] = (work, ticket)
        self.device.ledger.request(ticket)

    def drop(self, unit: Unit) -> None:
        """Give up a claim."""
        work, ticket = self._claims.pop(unit)
        if self.device.ledger.cancel(ticket) or not work.slab_granted:
            self._over(work)
            return
        self.device.ledger.activate()  # its bytes come back once its load is through

        def free() -> None:
            self._let_go(work)
            self.device.ledger.release(0, deactivates=True)
            self._over(work)

        is_loading = any(not loading.is_late for loading in work.slabs.values())
        self.device.submit(LOAD, f"drop {unit}", free, at_once=not is_loading)

    def _pinned(self, work: Work, region: Region) -> Loading:
        """A region of a unit's shard, as it is on the device, or on its way there from now on."""
        state, shard, residents = work.state, work.shard, self._residents

        def next_use_s() -> float:
            return state.region_next_use_s(shard, region)

        found: Loading | None = residents.pin(region.key, state.name, next_use_s)
        if found is not None:
            return found
        is_late = self.device.copies_at_once(sum(each.num_bytes for each in work.regions))
        loading = Loading(
            partial(self._spiller.load_slab, state, shard, region.trainable, self._make_room), late=is_late
        )

        def dispose() -> None:
            if loading.is_whole:
                self._spiller.unload(loading.slab.result())

        residents.add(region.key, loading, region.num_bytes, state.name, next_use_s, dispose)
        if not is_late:
            self.device.submit(LOAD, work.label, loading.load)
        return loading

    def settle(self, task: str | None = None) -> None:
        """Wait until nothing of a task, or of any, is on its way through the device."""
        with self._changed:
            self._changed.wait_for(lambda: not any(task in (None, work.unit.task) for work in self._outstanding))

    def close(self) -> None:
        """End the lanes. What is still on its way, after an error elsewhere, is given up first: nothing hangs."""
        self.device.ledger.close()
        for unit in list(self._claims):
            self.drop(unit)
        with self._changed:
            for work in self._outstanding:
                work.fail(GivenUp(f"{work.unit} was given up: the run is closing"))
            self._outstanding = {work for work in self._outstanding if work.slab_granted and work.admitted}
        self.settle()
        self._residents.forget()
        self.device.close()

    def _over(self, work: Work) -> None:
        with self._changed:
            self._outstanding.discard(work)
            self._changed.notify_all()

    def run(self, unit: Unit) -> None:
        """Compute a claim, as soon as its bytes are granted and its load is through."""
        work, _ = self._claims.pop(unit)
        with self._changed:
            self._at_work.add(work)
        before = self._left.get((unit.task, unit.part))
        # Of one that has failed, it finds that out: its caller may not have heard of it yet.
        is_there = before is None or (before.stored.is_done and before.stored.is_kept())
        work.after = None if is_there else before
        self._left[unit.task, unit.part] = work.left
        if work.state.observed.resized:
            work.count_buffers(work.state.buffer_bytes(work.shard))
        work.signature = work.state.staging.signature_of(unit.part)
        work.known = work.state.unit_bytes(unit.kind, work.shard, work.signature)
        wanted = work.wanted_bytes
        if unit.kind == FORWARD and work.state.measured.graph_bytes_of(work.shard, work.signature) is None:
            work.saved = Saved() if work.state.may_keep_graph(work.shard) else None
        elif wanted is not None and unit.kind in (FORWARD, BACKWARD):
            wanted = self._with_graphs(work, wanted)
        self.device.ledger.request(
            Ticket(
                num_bytes=0 if work.error else wanted,
                granted=partial(self._admitted, work),
                refused=partial(self._refused, work),
                activates=True,
            )
        )

    def _with_graphs(self, work: Work, wanted: int) -> int:
        """Let a forward keep its graphs, or a backward go on from them; bytes that the unit then takes."""
        state, shard, unit = work.state, work.shard, work.unit
        num_bytes = state.measured.graph_bytes_of(shard, work.signature)
        if not num_bytes or shard.index < state.cut.keeps_from or not state.may_keep_graph(shard):
            return wanted
        key = (state.name, "graph", state.staging.serial, shard.index, unit.part)
        slab_bytes = sum(region.num_bytes for region in work.regions)
        if unit.kind == FORWARD:
            following = max(each.slab_bytes for each in state.cut.shards)
            if self.device.ledger.can_hold(wanted + num_bytes, slab_bytes + following):
                work.saved, work.graph_bytes = Saved(num_bytes), num_bytes
                return wanted + num_bytes
            return wanted
        found: list[Graph] | None = self._residents.pin(key, state.name, lambda: math.inf)
        if found is None:
            return wanted
        # As much as with its forward, until it is known better.
        before, work.signature = (work.signature, work.known), work.signature.in_role("graph")
        work.known = state.unit_bytes(unit.kind, shard, work.signature)
        wanted = wanted if work.wanted_bytes is None else work.wanted_bytes
        if not self.device.ledger.can_hold(wanted + num_bytes, slab_bytes):
            self._residents.unpin(key, is_whole=False)
            work.signature, work.known = before
            return wanted
        work.graph_key, work.graphs = key, found
        return wanted

    def _refused(self, work: Work, error: Exception) -> None:
        work.fail(error)
        self.device.ledger.activate()
        self._admitted(work, 0)

    def _admitted(self, work: Work, num_bytes: int) -> None:
        work.admitted = True
        work.held_bytes = num_bytes
        self.device.submit(COMPUTE, work.label, partial(self._compute, work))

    def _submit(self, lane: str, work: Work, promise: Promise[T], job: Callable[[], T]) -> None:
        """Queue part of a unit."""
        self.device.submit(lane, work.label, lambda: self._do(lane, work, promise, job))

    def _do(self, lane: str, work: Work, promise: Promise[T], job: Callable[[], T]) -> None:
        """Part of a unit; where the unit has failed, it fails too without being run."""
        try:
            promise.keep(self._done(lane, work, job))
        except BaseException as error:
            promise.give_up(error)

    def _done(self, lane: str, work: Work, job: Callable[[], T]) -> T:
        try:
            if work.error is not None:
                raise work.error
            try:
                return job()
            finally:
                self.device.finish()
        except BaseException as error:
            work.fail(error, f"{lane} lane")
            raise

    def _submit_input(self, work: Work, m: int) -> None:
        promise = work.inputs[m] = Promise()
        # It may lie where the one before the last did: the lane begins once what computed on that is through.
        with _disable_current_modes() if work.is_metered else nullcontext():  # inputs are counted apart
            arriving = [self._place_input(work, m)]  # not held by the lane, once it is loaded
        self.device.submit(
            INPUT,
            work.label,
            lambda: self._do(LOAD, work, promise, lambda: self._load_input(work, m, arriving.pop())),
        )

    def _place_input(self, work: Work, m: int) -> Arriving:
        has_graph = bool(work.graphs)
        arriving = self._spiller.place_input(work.state, work.unit.kind, work.shard, m, has_graph=has_graph)
        if work.is_metered:
            work.input_bytes = max(work.input_bytes, arriving.micro.num_bytes)
        return arriving

    def _load_input(self, work: Work, m: int, arriving: Arriving) -> MicroInput:
        return self._spiller.load_input(work.state, work.unit.kind, work.shard, m, arriving)

    def _load_first(self, work: Work) -> MicroInput:
        """The first input, and what else a unit begins with."""
        after = bool(work.graphs)
        self._charge_buffers(work, after)
        work.buffers = self._spiller.load_buffers(work.state, work.shard, work.unit.part, after=after)
        if work.goes_on:
            work.so_far = self._spiller.load_so_far(work.state, work.shard)
        if work.stepper is not None:
            work.step = self._spiller.load_step(work.stepper, work.shard)
        return self._load_input(work, work.first, self._place_input(work, work.first))

    def _charge_buffers(self, work: Work, after: bool) -> None:
        """Charge buffers that are larger than when the unit was run: a shard below may have changed one meanwhile."""
        if work.state.observed.resized.isdisjoint(work.shard.buffers):
            return
        num_bytes = self._spiller.buffer_bytes(work.state, work.shard, work.unit.part, after=after)
        if num_bytes > work.buffer_bytes:
            self._grow(work, num_bytes - work.buffer_bytes)
            work.count_buffers(num_bytes)

    def _grow(self, work: Work, num_bytes: int) -> None:
        self.device.ledger.grow(num_bytes)
        work.held_bytes += num_bytes

    def _bring_first(self, work: Work) -> None:
        """Bring the first input, once the unit before it is in DRAM; with it come the buffers.

        In the compute lane, which has nothing else to do: the load lane must not stand still for it, and waking one
        thread less is more than a small copy costs.
        """
        if work.after is not None:
            # Its job was queued before this one, and waits for no load. Where copies are as quick as memory, nothing is
            # gained by going on before all of it is there, and the C library's heap would grow for it.
            (work.after.passed if self.device.has_link else work.after.stored).result()
        start_s = self._trace.now_s()
        if work.error is None:
            for loading in work.slabs.values():
                if loading.is_late and not loading.slab.is_done:
                    loading.load()
        try:
            work.first_input = self._done(LOAD, work, partial(self._load_first, work))
        finally:
            self._trace.add(self.device.name, LOAD, work.label, start_s)

    def _inputs(self, work: Work) -> Iterator[MicroInput]:
        for m in range(work.first, work.end):
            if m + 1 < work.end:
                self._submit_input(work, m + 1)
            # Two are charged, this one and the next.
            yield self._take_input(work, m)

    def _take_input(self, work: Work, m: int) -> MicroInput:
        promise = work.inputs.pop(m, None)
        micro, work.first_input = work.first_input if promise is None else promise.result(), None
        assert micro is not None
        if work.unit.kind == FORWARD:
            work.entered = [(tensor, tensor._version) for tensor in micro.value.tensors]
        return micro

    def _emit(self, work: Work, m: int, out: MicroOutput) -> None:
        if work.unit.kind == FORWARD:
            self._keep_input(work, m, out)
        if work.stores:
            work.stores[-1].result()  # one on its way at most: the ledger holds no more
        work.output_bytes = max(work.output_bytes, out.num_bytes)
        if m == work.end - 1:
            work.last_output = out
            return
        stored: Promise[None] = Promise()
        work.stores.append(stored)
        held = [out]  # not by the lane, once it is stored
        self._submit(STORE, work, stored, lambda: self._store_micro(work, m, held.pop()))
        if work.is_metered:
            # What is stored counts apart: a metered run must not find it in one run and miss it in another.
            stored.result()

    def _keep_input(self, work: Work, m: int, out: MicroOutput) -> None:
        """Leave a forward's input to its backward, where no graph holds it and no layer worked in place on it."""
        entered, work.entered = work.entered, []
        passed_on = {tensor.untyped_storage().data_ptr() for tensor, _ in entered}
        out.is_held = any(
            tensor.untyped_storage().data_ptr() in passed_on or (work.saved is not None and work.saved.holds(tensor))
            for tensor in (() if out.value is None else out.value.tensors)
        )
        if entered and not work.graph_bytes and all(tensor._version == version for tensor, version in entered):
            self._spiller.keep_input(work.state, work.shard, m, [tensor for tensor, _ in entered], is_held=out.is_held)

    def _store_micro(self, work: Work, m: int, out: MicroOutput) -> None:
        try:
            self._spiller.store_micro(work.state, work.unit.kind, work.shard, m, out)
        finally:
            self.device.finish()  # before it is let go, whose last holder this is
        self._spiller.keep_output(work.state, work.shard, m, out)

    @contextmanager
    def _metered(self, work: Work) -> Iterator[None]:
        """Count what the unit creates."""
        ledger = self.device.ledger

        def on_change(delta: int) -> None:
            if delta > 0:
                now = UnitBytes(meter.current_bytes + delta, work.input_bytes, work.output_bytes)
                missing = work.beside_bytes + now.total(work.num_micro_batches) - work.held_bytes
                if missing > 0:
                    self._grow(work, missing)

        meter = MemoryMeter(on_change)
        if work.saved is not None:
            work.saved.created_bytes = lambda: meter.current_bytes
        with meter:
            yield
        measured = UnitBytes(meter.peak_bytes, work.input_bytes, work.output_bytes)
        if not work.graph_bytes:  # what a forward keeps is counted apart
            work.state.learn_unit_bytes(work.unit.kind, work.shard, work.signature, measured)
        if work.known is None:
            needed = work.beside_bytes + measured.total(work.num_micro_batches)
            ledger.settle(work.held_bytes, needed)
            work.held_bytes = needed

    def _compute(self, work: Work) -> None:
        executor = self._executors[work.unit.task]
        start_s = self._trace.now_s()
        output: UnitOutput | None = None
        timer: Timer | None = None
        executing = False
        self._computing = work.unit
        try:
            work.is_metered = work.known is None or self.device.meter_every_unit
            self._bring_first(work)
            work.views = self._views(work)
            start_s, executing, timer = self._trace.now_s(), True, self.device.timer()  # waiting is not work
            with self._metered(work) if work.is_metered else nullcontext():
                output = executor.run(
                    work.unit.kind,
                    work.shard,
                    work.views,
                    work.buffers,
                    self._inputs(work),
                    partial(self._emit, work),
                    locked=work.shard.index in work.state.cut.locked,
                    draws=work.shard.index in work.state.cut.drawing,
                    keep_saved=work.shard.index in work.state.cut.keep_saved,
                    on_recomputed=None if work.state.measured.repeats(work.shard) else work.state.check_repeated,
                    step=None if work.stepper is None else partial(self._step, work, work.stepper),
                    first=work.first,
                    so_far=work.so_far,
                    in_pieces=work.in_pieces,
                    is_last=work.end == work.state.staging.num_micro_batches,
                    saved=work.saved,
                    graphs=work.graphs,
                    written=work.state.observed.written_buffers,
                )
            if timer is not None:
                timer.launched()
            if work.state.note_resized(output.buffers) and not work.is_metered:
                raise BuffersChanged(f"{work.unit} resized buffers that its shard's forward left alone before")
        except BaseException as error:
            work.fail(error, f"layer {executor.current}" if executor.current else "")
        try:
            self.device.finish()  # before anything that it works with is given back
            if timer is not None and work.error is None:
                self._note(work, timer.timing())
        except BaseException as error:
            self._struck = self._struck or work.unit
            work.fail(error, "a kernel")
        if self._struck is None and isinstance(self._explained(work), DeviceLost):
            self._struck = work.unit
        work.so_far = {}  # what became of them is in the output
        if output is None or not output.buffers:
            work.buffers = {}
        if executing:
            self._trace.add(self.device.name, COMPUTE, work.label, start_s)
        executor.current = ""
        self._settle_graphs(work)
        held_bytes = work.held_bytes
        left_bytes = work.output_bytes + (output.num_bytes if output else 0)
        # Buffers stay until they are stored; weights that were stepped are in the slab.
        if output is not None and output.stepped is not None:
            kept_bytes = min(held_bytes, left_bytes + work.beside_bytes)
        else:
            self._let_go(work)
            kept_bytes = min(held_bytes, left_bytes)
        self.device.ledger.release(held_bytes - kept_bytes)
        seconds = self._trace.now_s() - start_s
        if work.error is not None:
            # Nothing goes on from it, and it may be run again at once.
            self._left.pop((work.unit.task, work.unit.part), None)
        self._computing = None
        # Where the device has stepped the optimizer, weights and states go down too: never in this thread.
        goes_at_once = output is not None and output.stepped is None and self.device.copies_at_once(left_bytes)
        work.output, output = output, None
        computed = Computed(self.index, work.unit, seconds, failed=work.error is not None)
        is_in_turn = work.after is None or work.after.stored.is_done
        if is_in_turn and goes_at_once:
            # Both are reported as one: whoever is woken by the first would only take the interpreter from the store.
            job = partial(self._store, work, kept_bytes, computed)
            self.device.submit(STORE, work.label, job, at_once=True)
        else:
            self._report(computed)
            self.device.submit(STORE, work.label, partial(self._store, work, kept_bytes))

    def _views(self, work: Work) -> dict[int, Tensor]:
        """Parameters in a unit's slabs. Apart, so that no slab is in the hands of what an error comes through last."""
        slabs = {region.trainable: loading.slab.result() for region, loading in work.slabs.items()}
        return self._spiller.views(work.state, work.shard, slabs)

    def _step(
        self,
        work: Work,
        stepper: TaskOptimizer,
        parameters: Sequence[nn.Parameter],
        gradients: dict[int, Tensor | None],
    ) -> DeviceStep:
        loaded, work.step = work.step, None
        assert loaded is not None
        return stepper.step(work.shard, loaded, parameters, gradients)

    def _settle_graphs(self, work: Work) -> None:
        """Leave a forward's graphs to its backward, with the slabs that they refer to; free those that are through."""
        state, shard, saved = work.state, work.shard, work.saved
        if work.graph_key is not None:
            work.graphs = ()
            self._residents.unpin(work.graph_key, is_whole=False)
        if saved is None or work.error is not None:
            return
        saved.created_bytes = None
        state.measured.learn_graph_bytes(shard, work.signature, saved.num_bytes)
        if not saved.all_seen:
            state.measured.uncounted.add(shard.index)
        if saved.graphs is None:
            work.saved = None
            return
        staging, serial, graphs, slabs = state.staging, state.staging.serial, saved.graphs, dict(work.slabs)

        def next_use_s() -> float:
            return state.progress.next_use_s(shard) if staging.serial == serial else math.inf

        def dispose() -> None:
            graphs.clear()
            for region, loading in slabs.items():
                self._residents.unpin(region.key, is_whole=loading.is_whole)

        name = (state.name, "graph", serial, shard.index, work.unit.part)
        if self._residents.keep(name, graphs, work.graph_bytes, state.name, next_use_s, dispose):
            work.slabs.clear()
            work.held_bytes -= work.graph_bytes
        work.saved = None

    def _make_room(self) -> bool:
        """Give up a slab, for another one's place in the arena; or wait for a unit to let go of its own.

        In the load lane, so not for a unit that waits for it: one whose slabs are all there.
        """
        if self._residents.give_up_slab():
            return True
        with self._changed:
            granted = [work for work in self._at_work if work.slab_granted]
            loaded = [work for work in granted if all(each.slab.is_done for each in list(work.slabs.values()))]
        return bool(loaded) and loaded[0].at_work.is_kept()

    def _let_go(self, work: Work) -> None:
        """Leave a unit's shard to the next one that needs it, or give its slabs back."""
        work.views = {}
        while work.slabs:
            region, loading = work.slabs.popitem()
            # After an error the load may still be under way: into a region that is then nobody else's yet.
            is_whole = loading.settle()
            self._residents.unpin(region.key, is_whole=is_whole and work.error is None)
        with self._changed:
            self._at_work.discard(work)
        if not work.at_work.is_done:
            work.at_work.keep(None)

    def _store(self, work: Work, kept_bytes: int, computed: Computed | None = None) -> None:
        """Send to DRAM what a unit has left; report that it is, after `computed` where that was not reported yet."""
        unit, output = work.unit, work.output
        stays_bytes = 0
        try:
            if output is not None and work.last_output is not None and work.error is None:
                last = work.end - 1
                self._spiller.store_micro(work.state, unit.kind, work.shard, last, work.last_output)
                self._spiller.store_buffers(work.state, unit, work.shard, output)
                self.device.finish()
                stays_bytes = self._spiller.keep_output(work.state, work.shard, last, work.last_output, kept_bytes)
                work.left.passed.keep(None)
                self._spiller.store_gradients(work.state, unit, work.shard, output)
                if output.stepped is not None and work.stepper is not None:
                    self._spiller.store_step(work.state, work.stepper, work.shard, work.views, output.stepped)
        except BaseException as error:
            work.fail(error, "store lane")
        try:
            self.device.finish()
        except BaseException as error:
            work.fail(error, "store lane")
        if output is not None and output.stepped is not None:
            self._let_go(work)
        work.output = work.last_output = output = None  # nobody holds it when its bytes are given back
        work.buffers = {}
        self.device.ledger.release(kept_bytes - stays_bytes, deactivates=True)
        self._over(work)
        # In this order: whoever waits for it must not be reported before it.
        if work.error is None:
            self._report(Stored(unit) if computed is None else computed._replace(stored=True))
            work.left.stored.keep(None)
        else:
            if computed is not None:
                self._report(computed)
            self._report(self._failed(work))
            if not work.left.passed.is_done:
                work.left.passed.give_up(work.error)
            work.left.stored.give_up(work.error)
            work.forget()

    def _failed(self, work: Work) -> Failed:
        """A unit has failed, or the whole device under it: then what was computed is to blame, whoever noticed."""
        # Before it is explained: meanwhile the compute lane may find out, and go on to the next unit.
        struck = self._computing or work.unit
        error = self._explained(work)
        assert error is not None
        if isinstance(error, DeviceLost):
            error.task = (self._struck or struck).task
        return Failed(work.unit.task, error, work.where, work.unit)

    def _explained(self, work: Work) -> BaseException | None:
        return None if work.error is None else self.device.explained(work.error)

    def _note(self, work: Work, timing: Timing) -> None:
        """What a unit took of the interpreter and of the device."""
        self.timing = Timing(self.timing.launch_s + timing.launch_s, self.timing.device_s + timing.device_s)
        work.state.measured.timings[work.unit.kind, work.unit.shard] = timing
