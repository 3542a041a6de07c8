"""Recovers from what raises: a step begins again, a loader is asked again, a task fails, or the run ends."""

from __future__ import annotations

from hydra_engine.errors import DeviceFailed, DeviceGone, DeviceLost, DeviceOutOfMemory
from hydra_engine.host import BuffersChanged
from hydra_engine.run.feeds import Feeds
from hydra_engine.run.running_task import FINAL, Again, Common, RunningTask
from hydra_engine.run.saves import Saves
from hydra_engine.run.workers import Workers
from hydra_engine.schedule import BACKWARD, DataFailed, DidNotFit, Event, Failed, Unit, UnitLost


class Recovery:
    """The department of failures."""

    def __init__(self, common: Common, workers: Workers, feeds: Feeds, saves: Saves) -> None:
        self._common = common
        self._workers = workers
        self._feeds = feeds
        self._saves = saves

    def data_failed(self, event: DataFailed) -> DataFailed | None:
        """Ask the loader again, or fail the task."""
        task = self._common.tasks[event.task]
        if self._may_go_again(task, event):
            task.planned.reader.restart()
            self._feeds.request(task)
            return None
        self._feeds.has_answered(event)
        self.note(event)
        return event

    def failed(self, event: Failed) -> Event:
        """Begin the unit or the step again, or fail the task; where a device was lost, the run ends."""
        if isinstance(event.error, DeviceFailed) and event.unit is not None:
            again = self._device_failed(event, event.error, event.unit)
            if again is not None:
                return again
        elif event.unit is not None and self._begins_again(event, event.unit):
            return DidNotFit(event.unit)
        if isinstance(event.error, DeviceLost):
            self._workers.homes.strike(event.error.device)
            self._saves.device_lost(event.error)
        self.note(event)
        return event

    def _device_failed(self, event: Failed, error: DeviceFailed, unit: Unit) -> Event | None:
        """Take a device out that has failed, and have its unit computed elsewhere; None: its task fails with it."""
        assert event.device is not None
        if not isinstance(error, DeviceGone):
            self._workers.failed(event.device, error)
        if not event.is_torn:
            return UnitLost(unit)
        task = self._common.tasks[event.task]
        if task.end.has_failed:
            return None
        assert task.step is not None
        task.step.again = Again(error.with_traceback(None), fits=True)
        return DidNotFit(unit)

    def note(self, event: Failed | DataFailed) -> None:
        """Fail the task; but one whose device was struck by another one has only been stopped.

        So has one whose loader fails after a signal, which may have ended its worker processes too.
        """
        lost = self._common.lost
        if self._common.is_interrupted and isinstance(event, DataFailed):
            return
        task = self._common.tasks.get(event.task)
        if task is None:
            return  # its end has raised, and it was forgotten
        if isinstance(event, DataFailed) and task.is_ending and task.end.is_paused:
            return  # it is saved, and its batch is read again when it goes on
        is_of_unit = isinstance(event, Failed) and event.unit is not None
        is_dropped = task.end.is_paused and not task.state.pool.early_release
        if is_of_unit and is_dropped and not isinstance(event.error, DeviceLost):
            return  # its step is dropped, and begins again when the task goes on
        if task.end.is_early and not task.is_ending and not isinstance(event.error, DeviceLost):
            return  # of a step that nobody wants any more
        if lost is None or not isinstance(event.error, DeviceLost) or event.task == lost.task:
            task.end.fail(event)

    def _begins_again(self, event: Failed, unit: Unit) -> bool:
        """Return True if the step of a unit that has raised begins again: cut finer, or as it is."""
        task = self._common.tasks[event.task]
        step = task.step
        assert step is not None
        is_whole = unit.kind != BACKWARD or not task.state.pool.early_release
        if isinstance(event.error, (DeviceOutOfMemory, BuffersChanged)) and is_whole and not task.end.has_failed:
            is_short = isinstance(event.error, DeviceOutOfMemory)
            has_room = is_short and self._workers.homes.give_all(event.device)  # once homes have left
            # Without its traceback, whose frames hold the unit's tensors.
            step.again = Again(event.error.with_traceback(None), fits=has_room)
            return True
        if not self._may_go_again(task, event):
            return False
        if step.again is None and isinstance(event.error, Exception):
            step.again = Again(event.error.with_traceback(None), fits=True)
        return True

    def _may_go_again(self, task: RunningTask, event: Failed | DataFailed) -> bool:
        """Return True if a failure is tried again. A second part of a step that begins again anyway is not counted."""
        if self._common.is_interrupted or task.end.ending is not None:
            return False
        unit = event.unit if isinstance(event, Failed) else None
        if unit is not None and task.step is not None and task.step.again is not None and task.step.again.fits:
            return isinstance(event.error, Exception) and not isinstance(event.error, FINAL)
        return task.retries.allow(event.error, str(unit or event.where), task.report.steps)
