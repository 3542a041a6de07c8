"""Counts the bytes of every unit from outside, and compares them with those that the device has granted it."""

import threading
from contextlib import contextmanager
from unittest import mock

from torch.utils._python_dispatch import _disable_current_modes

from hydra_engine.host.state import UnitBytes
from hydra_engine.worker.executor import Executor
from hydra_engine.worker.kept_graphs import settle_graphs
from hydra_engine.worker.runner import Runner
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
        self._peaks = {}  # of the unit that a thread has computed last


@contextmanager
def audited():
    """Within, every unit of every device is counted."""
    audit = Audit()
    run, settle, place_input = Executor.run, settle_graphs, Runner._place_input

    @contextmanager
    def counted(executor, *args):
        with MemoryMeter() as meter:
            try:
                with run(executor, *args) as running:
                    yield running
            finally:
                audit._peaks[threading.get_ident()] = meter.peak_bytes

    def placed(runner, unit_run, m):
        with _disable_current_modes():  # in the middle of the unit; inputs are counted apart
            return place_input(runner, unit_run, m)

    def settled(unit_run, residents):
        peak, account = audit._peaks.pop(threading.get_ident(), None), unit_run.account
        if unit_run.is_metered:
            audit.metered.append(str(unit_run.claim.unit))
        if unit_run.claim.error is None and peak is not None:
            audit.num_units += 1
            # An output on its way to DRAM is in the peak already, or in none.
            took = account.beside_bytes + UnitBytes(peak, account.input_bytes, 0).total(account.num_micro_batches)
            if took > account.held_bytes:
                audit.over.append((str(unit_run.claim.unit), took, account.held_bytes))
        settle(unit_run, residents)

    with (
        mock.patch.object(Executor, "run", counted),
        mock.patch.object(Runner, "_place_input", placed),
        mock.patch("hydra_engine.worker.runner.settle_graphs", settled),
    ):
        yield audit
