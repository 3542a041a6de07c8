"""A task's epochs and evaluations, in the order of the plain loop, from the beginning or from a saved position on."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from hydra_engine.data.batch import Item
from hydra_engine.data.calls import UserCalls
from hydra_engine.data.draws import UserDraws
from hydra_engine.data.generators import num_workers_of, putting_back, states_of
from hydra_engine.data.position import (
    EpochStart,
    TaskPosition,
    epoch_start,
    kept_iterators,
    numbers_of,
    position_of,
    restore,
    restore_between,
)
from hydra_engine.data.streams import RandomState, Stream
from hydra_engine.schedule import EpochAhead, EvaluationOver
from hydra_engine.system import begin_workers
from hydra_engine.tasks import EMPTY_VALIDATION, BatchChooser, GuidedLoader, ModelTask, Purpose, StepChoice

_END = object()
_WORKER_DIED = (
    "a worker of the loader ended; one that reads weights of a model that is being trained does, since they are not in "
    "its memory: give the data set a copy of the model (copy.deepcopy)"
)


class _Goal(NamedTuple):
    """A place to go back to: a position, the batches of the evaluation after it that were given, and the stream."""

    last: TaskPosition
    num_given: int
    random: RandomState


class _Loader:
    """One of the user's loaders; its draws move the stream that it is read with."""

    def __init__(self, loader: Any, task: ModelTask, name: str, calls: UserCalls) -> None:
        self.loader = loader
        self.draws = UserDraws(name, alone=task.loader_alone)
        self._unpack = task.unpack
        self.calls = calls

    def opened(self, stream: Stream) -> Iterator[Any]:
        with self._asking(stream), begin_workers(num_workers_of(self.loader)):
            return iter(self.loader)

    def pairs(self, iterator: Iterator[Any], stream: Stream) -> Iterator[Any]:
        num_workers = num_workers_of(self.loader)  # which an __iter__ that yields begins with its first batch
        while True:
            with self._asking(stream), begin_workers(num_workers):
                num_workers = 0
                try:
                    batch = next(iterator, _END)
                except RuntimeError as error:
                    if "DataLoader worker" in str(error):  # torch has no other sign of it
                        error.add_note(_WORKER_DIED)
                    raise
                if batch is not _END:
                    batch = self._unpack(batch)
            if batch is _END:
                return
            yield batch

    @contextmanager
    def _asking(self, stream: Stream) -> Iterator[None]:
        """Call user code; the time in which others' loaders were waited for does not count."""
        self.calls.prepare()
        with self.draws.drawing(stream), self.calls.timed():
            yield


class Lead:
    """Leads the loader of a task whose batches are chosen: says how large each is to be, and when an epoch is over.

    choice: that of the last batch; None: there was none. devices: that the next step is spread over, and the most that
    there may ever be.
    """

    def __init__(self, loader: GuidedLoader, chooser: BatchChooser) -> None:
        self._loader, self._chooser = loader, chooser
        self.choice: StepChoice | None = None
        self.devices = (1, 1)
        self._asked: StepChoice | None = None  # for the batch that is read

    @contextmanager
    def over(self, epoch: int) -> Iterator[None]:
        """Have the iterator that the body opens ask here."""
        self._loader.guide = partial(next, self._sizes(epoch), None)
        try:
            yield
        finally:
            self._loader.guide = None

    def _sizes(self, epoch: int) -> Iterator[int]:
        """Choose the size of each batch of an epoch as it is about to be read."""
        num_passes = self._loader.num_passes
        while True:
            is_over = self._chooser.is_over(self.choice, epoch)
            if self._loader.num_passes > num_passes if is_over is None else is_over:
                return
            self._asked = self._chooser.choose(self.choice, *self.devices)
            yield self._asked.batch_size

    def given(self) -> StepChoice:
        """Return the choice as the batch has come out: at the end of the data it may be smaller."""
        assert self._asked is not None
        self.choice = self._chooser.given(self._asked, self._loader.last_size)
        return self.choice

    def apart(self) -> StepChoice:
        """Return a choice for a batch that was read for a plan."""
        return self._chooser.sized(self._chooser.choose(self.choice, *self.devices), self._loader.last_size)


class _Epoch(NamedTuple):
    """The beginning of an epoch, as far as positions in it depend on it."""

    start: EpochStart
    held: list[Any]  # iterators of the loader's, as the epoch began
    unread: dict[str, Any]  # numbers of the loader's, before the first batch of all


@dataclass
class _Evaluations:
    """Evaluations up to now."""

    num_ended: int = 0
    num_batches: int = 0  # theirs, and of the one in progress


class Epochs:
    """Reads a task's loaders item by item, with the task's random stream.

    messages: reasons why batches may differ from those of the run that was saved.
    """

    # Its parameters are what a task has of its own before it reads.
    def __init__(
        self,
        task: ModelTask,
        name: str,
        calls: UserCalls,
        stream: Stream,
        start: TaskPosition | None,
        chooser: BatchChooser | None,
        *,
        keeps: bool,
    ) -> None:
        """`start`: it goes on from there. keeps: items say where the task stands. chooser: of batch sizes."""
        self._task = task
        loader = task.dataloader
        self.lead = Lead(loader, chooser) if chooser is not None and isinstance(loader, GuidedLoader) else None
        self._name = name
        self.keeps_positions = keeps
        self._training = _Loader(task.dataloader, task, name, calls)
        self._validation = _Loader(task.validation, task, name, calls)
        self.stream = stream
        self.messages: list[str] = []
        self._begun_epoch = -1  # the last that was told to begin
        self._last = start  # the last position, where they are kept
        self._first = start  # the one before all, once its loader was read
        self._asked_at = stream.state  # the stream, when the last item was asked for
        self._goal: _Goal | None = None  # to go back to before the next item
        self._begin(start)

    def _begin(self, start: TaskPosition | None) -> None:
        """Give items from a position on; None: from the beginning."""
        self._evaluations = _Evaluations()
        if start is not None:
            self._evaluations = _Evaluations(start.num_evaluations, start.num_evaluated)
            if self.lead is not None:
                self.lead.choice = start.choice
        self._items = self._sequence(start)

    @property
    def draws(self) -> tuple[UserDraws, UserDraws]:
        return self._training.draws, self._validation.draws

    @property
    def beginning(self) -> TaskPosition:
        """The task's position before its loader was read, where positions are kept. Not for a loader that is read."""
        if self._first is None:
            self._note(self._epoch_start(0), 0, 0, 0)
            self._first = self._last
        assert self._first is not None, "positions are not kept"
        return self._first

    def next(self) -> Item | EpochAhead | EvaluationOver | None:
        """Read the next batch; or say that an epoch is about to begin, or an evaluation is over; None at the end."""
        return next(self._items, None)

    def first_apart(self) -> Item:
        """Return an epoch's first batch for a plan, read on a copy of the stream: training reads the same."""
        stream = Stream(self.stream.state)
        loader = self._training.loader
        put_back, place = putting_back(loader), loader.state_dict() if isinstance(loader, GuidedLoader) else None
        if place is not None:
            loader.begin_anew()
        try:
            for inputs, target in self._training.pairs(self._training.opened(stream), stream):
                return Item(inputs, target, choice=None if self.lead is None else self.lead.apart())
        finally:
            put_back()
            if place is not None:
                loader.load_state_dict(place)

        raise ValueError(f"{self._name}: the loader is empty, and was not when it was saved; resume with that one")

    def restart(self) -> None:
        """Before the next item, go back to where the one that failed was asked for: its iterator is gone.

        To the last position, that is, and past the batches that were given since. That may raise, and is tried again.
        """
        if self._goal is None:
            assert self._last is not None, "positions are not kept"
            num_given = self._evaluations.num_batches - self._last.num_evaluated
            self._goal = _Goal(self._last, num_given, self._asked_at)

    def go_to(self, main: RandomState | None) -> None:
        """Set the stream to where the layers have left it, if they draw, and go back where that was asked for."""
        if self._goal is not None:
            last, num_given, random = self._goal
            self._items.close()
            self._begin(last)
            for _ in range(num_given):
                next(self._items)
            if num_given:  # layers may have drawn in between
                self.stream.state = random
            self._goal = None
            return
        if main is not None:
            self.stream.state = main
        self._asked_at = self.stream.state
        if self._last is not None and self._last.num_evaluated == self._evaluations.num_batches:  # it was given last
            self._last = self._last.with_random(self.stream.state)

    def close(self) -> None:
        self._items.close()

    def _sequence(self, start: TaskPosition | None) -> Generator[Item | EpochAhead | EvaluationOver, None, None]:
        """Epochs and evaluations; a generator, so that it can change threads."""
        interval = self._task.validation_interval
        num_steps, first_epoch = (0, 0) if start is None else (start.num_steps, start.epoch)
        began: _Epoch | None = None
        for epoch in range(first_epoch, self._task.epochs):
            if epoch > self._begun_epoch:  # not again where a retry goes back
                self._begun_epoch = epoch
                yield EpochAhead(self._name, epoch)
            began, iterator = self._begun(epoch, num_steps, began) if start is None else self._resumed(start)
            num_batches = 0 if start is None else start.loader.num_batches
            is_due = start is not None and isinstance(interval, int) and num_steps % interval == 0
            if start is not None and is_due and not start.is_evaluated:
                yield from self._evaluation(epoch)
            start = None
            for inputs, target in self._training.pairs(iterator, self.stream):
                num_steps, num_batches = num_steps + 1, num_batches + 1
                choice = None if self.lead is None else self.lead.given()
                self._note(began, num_batches, epoch, num_steps)
                yield Item(inputs, target, num_steps - 1, epoch, True, self._evaluations.num_ended, self._last, choice)
                if isinstance(interval, int) and num_steps % interval == 0:
                    yield from self._evaluation(epoch)
            if num_batches == 0 and num_steps > 0:
                raise ValueError(
                    f"{self._name}: its loader gave no batch in epoch {epoch}, and did in those before; give one that "
                    f"starts anew at each iter() (a list, a DataLoader, an object whose __iter__ is a generator), or "
                    f"fewer epochs"
                )
            if interval == "epoch":
                yield from self._evaluation(epoch)

    def _begun(self, epoch: int, num_steps: int, before: _Epoch | None) -> tuple[_Epoch | None, Iterator[Any]]:
        """An epoch's iterator, and how it began; `before`: how the last one did."""
        began = self._epoch_start(num_steps, before)
        self._note(began, 0, epoch, num_steps)
        self._first = self._first or self._last
        with nullcontext() if self.lead is None else self.lead.over(epoch):
            return began, self._training.opened(self.stream)

    def _epoch_start(self, num_steps: int, before: _Epoch | None = None) -> _Epoch | None:
        """Return how an epoch is about to begin, if positions are kept."""
        loader = self._training.loader
        if num_steps == 0 and isinstance(loader, GuidedLoader):
            loader.begin_anew()  # wherever another task, or a plan, has left it
        if not self.keeps_positions:
            return None
        unread = numbers_of(loader) if before is None else before.unread
        return _Epoch(epoch_start(loader, self.stream), kept_iterators(loader) if num_steps else [], unread)

    def _resumed(self, start: TaskPosition) -> tuple[_Epoch, Iterator[Any]]:
        """The iterator of an epoch in progress, and how that began."""
        begin = self._training.calls.begin  # a time limit is of each batch that is read on the way
        begin()
        told: list[str] = []
        validation = self._task.validation
        if validation is not None:
            was_open = start.num_evaluations > 0
            message = restore_between(validation, self.stream, start.validation, was_open=was_open)
            told += [] if message is None else [message]
        unread = numbers_of(self._training.loader)
        with nullcontext() if self.lead is None else self.lead.over(start.epoch):
            iterator, messages = restore(self._training.loader, self.stream, start.loader, begin)
        held = kept_iterators(self._training.loader) if start.loader.keeps_iterator else []
        self._training.draws.resumed(start.loader.start.random, self.stream.state)
        self.messages += [f"{self._name}: {each}" for each in (*told, *messages)]
        return _Epoch(start.loader.start, held, unread), iterator

    def _note(self, began: _Epoch | None, num_batches: int, epoch: int, num_steps: int) -> None:
        """Keep where the task stands, if positions are kept."""
        if began is None:
            return
        task = self._task
        self._last = TaskPosition(
            num_steps=num_steps,
            epoch=epoch,
            loader=position_of(task.dataloader, self.stream, began.start, num_batches, began.held, began.unread),
            validation=() if task.validation is None else states_of(task.validation),
            num_evaluations=self._evaluations.num_ended,
            num_evaluated=self._evaluations.num_batches,
            is_evaluated=num_batches == 0,
            choice=None if self.lead is None else self.lead.choice,
        )

    def _evaluation(self, epoch: int) -> Generator[Item | EvaluationOver, None, None]:
        """Give one evaluation's batches, in an epoch maybe; torch's stream goes on as if nothing had been drawn."""
        if self._task.validation is None:
            return
        outside, evaluations = self.stream.state, self._evaluations
        for inputs, target in self._validation.pairs(self._validation.opened(self.stream), self.stream):
            evaluations.num_batches += 1
            yield Item(inputs, target, evaluations.num_batches - 1, epoch, False, evaluations.num_ended)
        if evaluations.num_batches == 0 and self._task.purpose is Purpose.TRAIN:
            raise ValueError(f"{self._name}: {EMPTY_VALIDATION}")
        self.stream.state = self.stream.state._replace(torch=outside.torch, device=outside.device)
        evaluations.num_ended += 1
        reached = epoch + (self._task.validation_interval == "epoch")
        if reached < self._task.epochs:  # else its callbacks are called when the task is over
            yield EvaluationOver(self._name, reached)
