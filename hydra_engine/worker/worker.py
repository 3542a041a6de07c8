"""One device at work: takes units through its lanes.

    instruction      ledger, in order            lanes
    load(unit)       slab                        load     parameters into the slab; a few: compute, when the unit runs
    run(unit)        work, buffers, inputs,      compute  buffers and input of micro-batch 0
                     outputs                     input    inputs of micro-batches 1, ...
                     slab, work given back       compute  micro-batch 0, 1, ...; reports Computed
                     outputs given back          store    outputs of 0, 1, ...; gradients; reports Stored or Failed
    drop(unit)       slab given back

Called by the thread that decides.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor

from hydra_engine.devices import COMPUTE, OpenDevice, Residents, Ticket
from hydra_engine.errors import DeviceGone
from hydra_engine.host import Structure, TaskState
from hydra_engine.schedule import Computed, Event, Failed, Stored, Unit
from hydra_engine.trace import UPDATE, Timing, Trace
from hydra_engine.worker.claims import Claims, DeviceHomes
from hydra_engine.worker.compiled import CompiledLayers
from hydra_engine.worker.executor import NOTHING, Executor, Modes
from hydra_engine.worker.kept_graphs import prepare_graphs
from hydra_engine.worker.runner import Report, Runner
from hydra_engine.worker.spiller import Spiller
from hydra_engine.worker.unit import ClaimStage, Delay, Passage, UnitRun

# The loss and the metrics, where they are not the task's own.
Functions: TypeAlias = "tuple[Callable[[Any, Any], Tensor], Mapping[str, Callable[[Any, Any], float | Tensor]]]"


class Worker:
    """Takes units through one device's lanes: tasks are admitted, their units claimed, then run or dropped."""

    def __init__(
        self,
        index: int,
        device: OpenDevice,
        trace: Trace,
        report: Report,
        decide: Callable[[], None],
        give_way: Callable[[Sequence[tuple[str, int]]], None] = lambda _: None,
    ) -> None:
        """Make one that tells `report` of its units, and calls `decide` once what it has told may be decided upon.

        give_way: as of DeviceHomes.
        """
        self.index = index
        self.device = device
        self._residents = Residents(device.ledger)
        self._spiller = spiller = Spiller(device, self._residents)
        self._claims = Claims(device, self._residents, spiller)
        self.homes = DeviceHomes(index, device, self._residents, self._claims, give_way)
        self._runner = Runner(index, device, trace, self._say, decide, spiller, self._claims, self._residents)
        self._report, self._decide = report, decide
        self._saying = threading.Lock()
        self._updates: dict[Callable[[], None], Callable[[], None]] = {}  # of shards at home, not begun, by lane job
        self._is_mute = False  # the device was taken away: what it still says is of no more use
        self._under_way: dict[Unit, bool] = {}  # not stored yet; True: it is computed
        self._executors: dict[str, Executor] = {}  # by task
        self._passages: dict[tuple[str, int], Passage] = {}  # by (task, part), of the last unit that was run here

    @property
    def timing(self) -> Timing:
        """Seconds of all units, where launching is not computing."""
        return self._runner.timing

    def admit(self, state: TaskState, modes: Modes = lambda: NOTHING, functions: Functions | None = None) -> None:
        """Make this device's copy of a task's structure; its micro-batches run inside `modes()`."""
        structure = Structure(state.layout, self.device.torch_device)
        task = state.task
        compiled = CompiledLayers(structure) if task.compile else None
        loss_fn, metrics = functions or (task.loss_fn, task.metrics)
        self._executors[state.name] = Executor(
            structure, loss_fn, state.layout.num_layers, modes, metrics, self.device.random, compiled
        )

    def executor(self, name: str) -> Executor:
        return self._executors[name]

    def dismiss(self, name: str) -> None:
        self._executors.pop(name, None)  # its set-up may have failed before
        self._residents.forget(name)
        self._spiller.views.forget(name)
        self._forget_passages(name)

    def dismiss_all(self) -> None:
        """Forget all tasks, and what was left for them; nothing runs any more."""
        self._executors.clear()
        self._passages.clear()

    def sweep(self, name: str) -> None:
        """Give up what was kept for a task's step before: the next one begins."""
        self._residents.sweep(name)

    def begin_again(self, name: str) -> None:
        """Forget a task's step, which begins again; nothing of it is under way. Its last unit may have failed."""
        self.sweep(name)
        self._forget_passages(name)

    def _forget_passages(self, name: str) -> None:
        for key in list(self._passages):  # units of other tasks are begun meanwhile
            if key[0] == name:
                self._passages.pop(key, None)

    def holds(self, state: TaskState, shard: int) -> bool:
        """Return True if most of a shard is on the device, or on its way there."""
        wanted = state.cut.shards[shard]
        resident = (region.num_bytes for region in state.regions(wanted) if region.key in self._residents)
        return 2 * sum(resident) > wanted.slab_bytes

    def load(self, unit: Unit, state: TaskState) -> None:
        """Begin to bring a unit's shard; it becomes the device's claim."""
        self._claims.request(unit, state)

    def delay(self, unit: Unit) -> Delay | None:
        """Return what a unit that was begun here waits for, for people; None: it computes, or is through."""
        return self._claims.delay(unit)

    def drop(self, unit: Unit) -> None:
        self._claims.drop(unit)

    def run(self, unit: Unit) -> None:
        """Compute a claim, as soon as its bytes are granted and its load is through."""
        claim = self._claims.begin(unit)
        before = self._passages.get((unit.task, unit.part))
        # After one that has failed in its store, the unit finds that out: its caller may not have heard of it yet.
        is_there = before is None or before.is_void or (before.stored.is_done and before.stored.is_kept())
        run = UnitRun(claim, self.device.ledger, after=None if is_there else before)
        self._passages[unit.task, unit.part] = run.passage
        wanted_bytes = prepare_graphs(run, self._residents)
        self._under_way[unit] = False

        def granted(num_bytes: int) -> None:
            if claim.stage is ClaimStage.GRANTED:
                claim.stage = ClaimStage.IN_LANES
            run.account.held_bytes = num_bytes
            job = partial(self._runner.compute, run, self._executors[unit.task])
            self.device.submit(COMPUTE, claim.label, job)

        def refused(error: Exception) -> None:
            claim.fail(error)
            self.device.ledger.activate()
            granted(0)

        num_bytes = 0 if claim.error else wanted_bytes
        self.device.ledger.request(Ticket(num_bytes=num_bytes, granted=granted, refused=refused, activates=True))

    def update(self, label: str, job: Callable[[], None]) -> None:
        """Update a shard that is at home here, between two units; at once where the device was taken away."""

        def update() -> None:
            with self.device.trace.span(self.device.name, UPDATE, label):
                job()
            self._decide()

        def run() -> None:
            with self._saying:
                is_mine = self._updates.pop(run, None) is not None
            if is_mine:
                update()

        with self._saying:
            is_gone = self._is_mute
            if not is_gone:
                self._updates[run] = update
        if is_gone:
            threading.Thread(target=update, name=f"{self.device.name}-update", daemon=True).start()
        else:
            self.device.submit(COMPUTE, label, run)

    def _say(self, event: Event) -> None:
        with self._saying:
            if self._is_mute:
                return
            if isinstance(event, Computed) and not event.stored:
                self._under_way[event.unit] = True
            elif isinstance(event, (Computed, Stored, Failed)) and event.unit is not None:
                self._under_way.pop(event.unit, None)
            self._report(event)

    def abandon(self) -> None:
        """Say now that the units under way have failed. Their lanes go on, and nobody hears of them any more.

        Waits for no unit, but for what one is just writing to DRAM; after that nothing more is written.
        """
        error = DeviceGone(self.device.name, "it was taken away, and its time of grace is over")
        with self._runner.storing, self._saying:
            updates, self._updates = list(self._updates.values()), {}  # which may wait behind a unit that does not end
            self._claims.abandon(error)
            self._is_mute = True
            for unit, is_computed in self._under_way.items():
                if not is_computed:
                    self._report(Computed(self.index, unit, 0.0, failed=True))
                self._report(Failed(unit.task, error, "a device that was taken away", unit, device=self.index))
        self._decide()
        for job in updates:
            job()

    def retire(self) -> None:
        """Close the device, once all that is on its way is through. In a thread that may wait."""
        self._claims.settle()
        self.close()

    def settle(self, task: str | None = None) -> None:
        self._claims.settle(task)

    def vacate(self) -> None:
        """Wait until nothing is on its way, and give up all that is kept: somebody else has the device for a while."""
        self._claims.settle()
        self._residents.vacate()

    def leave(self) -> None:
        """Go from a device that somebody else uses again, once all that is on its way is through."""
        self._claims.drop_all()
        self._claims.settle()
        self._residents.leave()
        self._spiller.views.forget()

    def close(self) -> None:
        """End the lanes. What is still on its way, after an error elsewhere, is given up first: nothing hangs."""
        self.device.ledger.close()
        self.homes.end()
        self._claims.give_up()
        self._residents.forget()
        self._spiller.views.forget()
        self.device.close()
