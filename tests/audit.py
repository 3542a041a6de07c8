"""Counts the bytes of every unit from outside, and compares them with those that the device has granted it."""

from contextlib import contextmanager
from unittest import mock

from torch.utils._python_dispatch import _disable_current_modes

from hydra_engine.host.state import UnitBytes
from hydra_engine.worker.executor import Executor
from hydra_engine.worker.worker import Worker
from partitioners import MemoryMeter


class Audit:
    """What units took beside their slabs.

    Attributes:
        over: units that took more than they had been granted, with both.
        metered: units that the engine metered itself.
        num_units: all that were run.
    """

    def __init__(self):
        self.over = []
        self.metered = []
        self.num_units = 0
        self._peaks = {}


@contextmanager
def audited():
    """Within, every unit of every device is counted."""
    audit = Audit()
    run, settle_graphs, metered = Executor.run, Worker._settle_graphs, Worker._metered
    place_input = Worker._place_input

    def counted(executor, *args, **options):
        with MemoryMeter() as meter:
            try:
                return run(executor, *args, **options)
            finally:
                audit._peaks[id(executor)] = meter.peak_bytes

    def placed(worker, work, m):
        with _disable_current_modes():  # in the middle of the unit; inputs are counted apart
            return place_input(worker, work, m)

    def settled(worker, work):
        peak = audit._peaks.pop(id(worker._executors[work.unit.task]), None)
        if work.error is None and peak is not None:
            audit.num_units += 1
            # An output on its way to DRAM is in the peak already, or in none.
            took = work.beside_bytes + UnitBytes(peak, work.input_bytes, 0).total(work.num_micro_batches)
            if took > work.held_bytes:
                audit.over.append((str(work.unit), took, work.held_bytes))
        settle_graphs(worker, work)

    def noted(worker, work):
        audit.metered.append(str(work.unit))
        return metered(worker, work)

    with (
        mock.patch.object(Executor, "run", counted),
        mock.patch.object(Worker, "_place_input", placed),
        mock.patch.object(Worker, "_settle_graphs", settled),
        mock.patch.object(Worker, "_metered", noted),
    ):
        yield audit
