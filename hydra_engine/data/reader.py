"""Reads a task's batches in the order of the plain loop, each with the random state that the plain loop would have."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch

from hydra_engine.data.batch import Batch, Item, Splitter
from hydra_engine.data.calls import LeftBehind, UserCalls
from hydra_engine.data.draws import drawing_apart
from hydra_engine.data.epochs import Epochs
from hydra_engine.data.position import TaskPosition
from hydra_engine.data.streams import RandomState, Stream, seeded
from hydra_engine.errors import LoaderTimeout
from hydra_engine.schedule import BatchReady, DataEnded, DataFailed, EpochAhead, EvaluationOver, Event
from hydra_engine.tasks import BatchChooser, ModelTask, Purpose

# A user's loader that does not return is left behind: its thread is a daemon.
JOIN_S = 10.0


class Reader:
    """Reads a task's loaders in a thread of its own, one batch for each request.

    The first batch is also the sample that `generate()` profiles with: it is read once, whenever it is first needed.
    """

    def __init__(
        self,
        task: ModelTask,
        name: str,
        *,
        keeps_positions: bool = False,
        start: TaskPosition | None = None,
        begin_epoch: Callable[[int, Stream], None] | None = None,
        max_devices: int = 1,
        chooser: BatchChooser | None = None,
    ) -> None:
        """`keeps_positions`: batches say where the task stands. `start`: it goes on from there.

        begin_epoch: called before an epoch's iterator is opened for the sample; for later ones `EpochAhead` is said,
        and after evaluations `EvaluationOver`, where the task has callbacks as the run begins.
        max_devices: that batches are split for, with `max_device_batch`. chooser: of batch sizes.
        """
        self._task = task
        self._max_devices = max_devices
        self.chooser = chooser
        self._name = name
        self._is_resumed = start is not None and start.num_steps > 0
        self._begin_epoch = begin_epoch
        self._calls = UserCalls(name, task.timeout_s)
        stream = Stream(RandomState(seeded(task.seed), random.getstate(), np.random.get_state(), task.seed))
        self._epochs = Epochs(task, name, self._calls, stream, start, chooser, keeps=keeps_positions)
        self._splitter = Splitter(task, name, max_devices)
        self.num_micro_batches: Callable[[], int] = lambda: 1  # that a training batch is split into, as things stand
        self._pending: Item | BaseException | None = None  # read and not given yet; or what reading the first raised
        self._apart: Item | None = None  # of a task that goes on with no batch left: read for a plan
        self._requests: SimpleQueue[tuple[RandomState | None, int] | None] = SimpleQueue()
        self._ready: SimpleQueue[Batch] = SimpleQueue()
        self._thread: threading.Thread | None = None

    # -- the sample, before the thread is started

    def sample(self, *, training: bool = True) -> Batch:
        """The first batch, as it is trained on or as it would be evaluated; it stays the next one to be read.

        Where a task goes on, it may be one of a validation, or none is left and the first of an epoch is read apart.
        """
        first, trains = self._peek(), self._task.purpose is Purpose.TRAIN
        if self._is_resumed and first is None and self._apart is None:
            self._apart = self._epochs.first_apart()
        elif not self._is_resumed and (first is None or (trains and not first.training)):
            what = "training" if trains else "evaluation"
            raise ValueError(
                f"{self._name}: the loader is empty; {what} needs at least one batch: look at "
                f"drop_last, the sampler, and the length of the data"
            )
        apart = Stream(self._epochs.stream.state)
        return self._batch(self._sample_item()._replace(training=training), apart)  # split anew as it begins

    @property
    def beginning(self) -> TaskPosition:
        """The task's position before its first batch was read, where positions are kept. For a reader at rest."""
        return self._epochs.beginning

    @property
    def keeps_positions(self) -> bool:
        """True if batches say where the task stands."""
        return self._epochs.keeps_positions

    @property
    def stream(self) -> Stream:
        """The task's random stream, while the reader is at rest: what draws between two reads moves it."""
        return self._epochs.stream

    @property
    def is_empty(self) -> bool:
        return self._peek() is None

    @property
    def sample_inputs(self) -> Any:
        """The sample's inputs as the loader gave them, for a forward that takes whole batches."""
        return self._sample_item().inputs

    def _sample_item(self) -> Item:
        found = self._apart or self._peek()
        assert found is not None
        return found

    def _peek(self) -> Item | None:
        if self._pending is None:
            try:
                self._pending = self._read_first()
            except LeftBehind:  # it was planned beside a run, which would not wait for it
                timeout_s = self._task.timeout_s or math.inf
                self._pending = LoaderTimeout(self._name, timeout_s, threading.current_thread().name)
                raise self._pending from None
            except BaseException as error:
                self._pending = error  # the iterator is gone with it
                raise
        if isinstance(self._pending, BaseException):
            raise self._pending
        return self._pending

    def _read_first(self) -> Item | None:
        while isinstance(ahead := self._epochs.next(), (EpochAhead, EvaluationOver)):
            if isinstance(ahead, EvaluationOver):
                continue
            if self._begin_epoch is not None:
                self._begin_epoch(ahead.epoch, self._epochs.stream)
        return ahead

    def split_sample(self, num_micro_batches: int) -> None:
        """Split the first batch into more micro-batches than were chosen, of which none is to be larger from now on."""
        first = self._sample_item()
        assert self.chooser is not None
        assert first.choice is not None
        self.chooser.limit(-(-first.choice.batch_size // num_micro_batches))
        found = first._replace(choice=replace(first.choice, micro_batches=num_micro_batches))
        if self._apart is None:
            self._pending = found
        else:
            self._apart = found

    # -- batches

    def in_smaller_pieces(self, batch: Batch) -> Batch:
        """The same batch in smaller micro-batches, as is chosen: a device has no room for these."""
        assert self.chooser is not None
        assert batch.choice is not None
        return self.split_again(replace(batch, choice=self.chooser.smaller(batch.choice)), batch.accumulation_steps)

    def split_again(self, batch: Batch, num_micro_batches: int) -> Batch:
        """The same batch in another number of micro-batches. Raises ValueError where that draws otherwise."""
        item = batch.item
        if self._thread is None:  # the loader was not read on
            sample = self._sample_item()
            item = item._replace(inputs=sample.inputs, target=sample.target)
        return self._splitter.again(batch, item, num_micro_batches, for_plan=self._thread is None)

    def _batch(self, item: Item, stream: Stream) -> Batch:
        number = self.num_micro_batches() if item.training else 1
        return self._splitter.split(item, stream, number, for_plan=self._thread is None)

    @property
    def drawn(self) -> set[str]:
        """Those of `random` and `numpy.random` that its user code was seen to draw from."""
        return set[str]().union(*(each.drawn for each in (*self._epochs.draws, self._splitter.draws)))

    @property
    def messages(self) -> list[str]:
        """Doubts about batches, and about numbers that others drew, for the end of a run."""
        doubts = (each.message for each in (*self._epochs.draws, self._splitter.draws))
        return [*self._epochs.messages, *filter(None, doubts)]

    # -- the thread

    def start(self, report: Callable[[Any], None], num_threads: int, set_up: Callable[[], Any] | None = None) -> None:
        """Serve requests from now on, in a thread; set_up: called in it before, reported unless it was left behind."""
        arguments = (report, num_threads, set_up)
        if not self._task.callbacks:  # asked no sooner: a task may get some after its orchestrator was made
            self._begin_epoch = None
        self._thread = threading.Thread(target=self._serve, args=arguments, name=self.thread_name, daemon=True)
        self._thread.start()

    @property
    def thread_name(self) -> str:
        return f"{self._name}-reader"

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Call the task's other user code, in this reader's thread: what it draws is nobody's, and it may be late."""
        with drawing_apart(), self._calls.timed():
            yield

    def request(self, main: RandomState | None, num_devices: int = 1) -> None:
        """Ask for a batch. main: its stream as layers have left it, if they draw; num_devices: of its step, by now."""
        self._calls.end()
        self._requests.put((main, num_devices))

    def restart(self) -> None:
        """With the next request, go back to where the batch that failed was asked for; where positions are kept."""
        if self._pending is None:  # else it was read, and splitting it failed
            self._epochs.restart()

    def take(self) -> Batch:
        return self._ready.get_nowait()

    def leave_behind(self) -> float | None:
        """Leave the thread to itself if user code did not come back in `timeout_s`; else seconds until then."""
        return self._calls.leave_late()

    def close(self) -> bool:
        """End the thread and the loader's iterator; False when user code does not come back."""
        self._requests.put(None)
        if self._thread is not None:
            self._thread.join(0.0 if self._calls.is_left else JOIN_S)  # who is late already is not waited for again
            if self._thread.is_alive():
                self._calls.leave()
                return False
        self._epochs.close()
        return True

    def _serve(self, report: Callable[[Any], None], num_threads: int, set_up: Callable[[], Any] | None) -> None:
        torch.set_num_threads(num_threads)
        if set_up is not None and not self._calls.answer(partial(report, set_up())):
            return
        while (request := self._requests.get()) is not None:
            try:
                if self._epochs.lead is not None:
                    self._epochs.lead.devices = request[1], max(request[1], self._max_devices)
                answer, batch = self._next(request[0])
            except BaseException as error:
                answer, batch = DataFailed(self._name, error, "its loader"), None
            if not self._calls.answer(partial(self._hand_over, report, answer, batch)):
                return

    def _next(self, main: RandomState | None) -> tuple[Event | EpochAhead | EvaluationOver, Batch | None]:
        """Read the next batch, and say so; or say that callbacks or the end come first."""
        if self._pending is None:
            self._epochs.go_to(main)
        item, self._pending = self._pending or self._epochs.next(), None
        while isinstance(item, (EpochAhead, EvaluationOver)) and self._begin_epoch is None:  # there are no callbacks
            item = self._epochs.next()
        if isinstance(item, (EpochAhead, EvaluationOver)):
            return item, None
        if not isinstance(item, Item):
            return DataEnded(self._name), None
        self._calls.begin()  # splitting is user code, too
        stream = self._epochs.stream
        read = stream.state
        try:
            batch = self._batch(item, stream)
        except BaseException:
            self._pending, stream.state = item, read
            raise
        num_left = None
        if self.chooser is not None and batch.choice is not None:
            num_left = self.chooser.steps_left(batch.choice, self._task.epochs)
        return BatchReady(self._name, batch.step, batch.training, num_left=num_left), batch

    def _hand_over(self, report: Callable[[Any], None], answer: Any, batch: Batch | None) -> None:
        if batch is not None:
            self._ready.put(batch)
        report(answer)
