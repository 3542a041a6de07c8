"""Reads a task's batches in the order of the plain loop, each with the random state that the plain loop would have."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import torch

from hydra_engine.data.boundary import Boundary, copy_in_dram
from hydra_engine.data.draws import LoaderDraws, beside_loaders
from hydra_engine.data.generators import putting_back, set_states, states_of
from hydra_engine.data.position import EpochStart, TaskPosition, epoch_start, position_of, restore
from hydra_engine.data.signature import Signature
from hydra_engine.data.streams import GLOBAL_GENERATORS, RandomState, Stream, seeded, stream_seed
from hydra_engine.errors import LoaderTimeout
from hydra_engine.schedule import BatchReady, DataEnded, DataFailed, EpochAhead, Event
from hydra_engine.system import TakenAway
from hydra_engine.tasks import MicroBatch, ModelTask, Purpose, batch_size
from partitioners.precision import DTYPES, cast

# A user's loader that does not return is left behind: its thread is a daemon.
JOIN_S = 10.0

_END = object()


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One batch, ready to be begun."""

    step: int  # counts training batches, and evaluation batches on their own
    epoch: int
    training: bool
    evaluation: int  # how many evaluations came before: the one that an evaluation batch is part of
    micro_batches: list[MicroBatch]
    boundaries: list[tuple[Boundary, Boundary]]  # the same, taken apart
    read: RandomState  # the task's main stream after the read
    main: RandomState  # the same after the batch was split, which may draw as well
    start: list[RandomState]  # by micro-batch, before its forward
    num_samples: int
    weight: float  # of an evaluation batch among those of its evaluation
    whole: tuple[Boundary, Boundary]  # inputs and target as they were read, to be split anew
    accumulation_steps: int  # micro-batches asked for
    position: TaskPosition | None = None  # right after it was read, where the reader keeps positions

    @cached_property
    def signature(self) -> Signature:
        """What decides the memory of every unit of its step."""
        return Signature.of(self.boundaries)


class _Item(NamedTuple):
    """What the loader gave, unpacked, and its place in the task."""

    inputs: Any
    target: Any
    step: int
    epoch: int
    training: bool
    evaluation: int
    position: TaskPosition | None = None


class _Goal(NamedTuple):
    """Where to go back to: a position, past so many batches of the evaluation after it, and the stream as it was."""

    last: TaskPosition
    num_given: int
    random: RandomState


class Reader:
    """Owns a task's loader, its iterator and its main random stream; reads one batch for each request.

    The first batch is also the sample that `generate()` profiles with: it is read once, whenever it is first needed.
    """

    def __init__(
        self,
        task: ModelTask,
        name: str,
        *,
        keeps_positions: bool = False,
        start: TaskPosition | None = None,
        begin_epoch: Callable[[int], None] | None = None,
    ) -> None:
        """`keeps_positions`: batches say where the task stands. `start`: it goes on from there.

        begin_epoch: called before an epoch's iterator is opened for the sample; for later ones, `EpochAhead` is said.
        """
        self._task = task
        self._name = name
        self._keeps_positions = keeps_positions
        self._start = start
        self._begin_epoch = begin_epoch
        self._begun_epoch = -1  # the last one that was told to begin
        self._messages: list[str] = []  # why batches may be other ones than those of the run that was saved
        self._training_draws = LoaderDraws(name, alone=task.loader_alone)
        self._validation_draws = LoaderDraws(name, alone=task.loader_alone)
        self._split_draws = LoaderDraws(name, alone=task.loader_alone, what="its split= or loss_reduction=")
        # The batch that was split for a plan, at what state of the stream, in how many, into what, and the state then.
        self._split_first: tuple[Any, RandomState, int, list[MicroBatch], RandomState] | None = None
        self._stream = Stream(RandomState(seeded(task.seed), random.getstate(), np.random.get_state(), task.seed))
        self._items = self._sequence(start)
        self._num_evaluations = 0 if start is None else start.num_evaluations  # that ended
        self._num_evaluated = 0 if start is None else start.num_evaluated  # their batches, and of the one in progress
        self._last = start  # the last position, where they are kept
        self._first: _Item | None = None
        self._largest: _Item | None = None
        self._broken: BaseException | None = None
        self._asked_at = self._stream.state  # the stream, when the last item was asked for
        self._is_to_restart = False
        self._goal: _Goal | None = None  # not reached yet
        self._requests: SimpleQueue[tuple[RandomState | None] | None] = SimpleQueue()
        self._ready: SimpleQueue[Batch] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._answering = threading.Lock()  # a batch comes in time, or its thread is left behind: never both
        self._at_work: int | None = None  # the thread that asked user code last
        self._since_s: float | None = None  # when user code was last asked, by time.monotonic(); None: it is not
        self._is_left = False
        self.accumulation_steps = 1
        self._dtype = None if task.precision == "float32" else DTYPES[task.precision]

    def sample(self, *, training: bool = True) -> Batch:
        """The first batch, as it is trained on or as it would be evaluated; it stays the next one to be read.

        Where a task goes on, it may be one of a validation, or none is left and the first of an epoch is read apart.
        """
        first = self._peek()
        if self._start is not None and first is None and self._largest is None:
            self._largest = self._first_apart()
        elif self._start is None and (first is None or (self._task.purpose is Purpose.TRAIN and not first.training)):
            what = "training" if self._task.purpose is Purpose.TRAIN else "evaluation"
            raise ValueError(f"{self._name}: the loader is empty; {what} needs at least one batch")
        found = self._largest or first
        assert found is not None
        return self._batch(found._replace(training=training), Stream(self._stream.state))  # split anew as it begins

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to read at all."""
        return self._peek() is None

    def _peek(self) -> _Item | None:
        if self._broken is not None:
            raise self._broken
        if self._first is None:
            try:
                self._first = self._read_first()
            except TakenAway:  # it was planned beside a run, which would not wait for it
                timeout_s = self._task.loader_timeout_s or math.inf
                self._broken = LoaderTimeout(self._name, timeout_s, threading.current_thread().name)
                raise self._broken from None
            except BaseException as error:
                self._broken = error  # the iterator is gone with it
                raise
        return self._first

    def _read_first(self) -> _Item | None:
        ahead = next(self._items, None) if self._begin_epoch is not None else None
        while True:
            if isinstance(ahead, EpochAhead):
                assert self._begin_epoch is not None
                self._begin_epoch(ahead.epoch)
            if self._task.scan_batches and self._largest is None:  # before an iterator is opened
                self._largest = self._scan()
            ahead = next(self._items, None)
            if not isinstance(ahead, EpochAhead):
                return ahead

    def _scan(self) -> _Item | None:
        """The batch with most bytes of an epoch that is read apart, before the first epoch begins.

        On a copy of the task's random stream; generators of the loader's own are put back, so that training reads what
        it would have read.
        """
        largest, most = None, -1
        for inputs, target in self._apart():
            if (size := _num_bytes(self._name, inputs, target)) > most:
                kept = _own_pair(self._name, inputs, target)  # the loader may read on into the same memory
                largest, most = _Item(_built(kept[0]), _built(kept[1]), 0, 0, True, 0), size
        return largest

    def _first_apart(self) -> _Item:
        """For a plan; nothing of it is trained on."""
        with closing(self._apart()) as pairs:
            for inputs, target in pairs:
                return _Item(inputs, target, 0, 0, True, 0)
        raise ValueError(f"{self._name}: the loader is empty, and was not when it was saved; resume with that one")

    def _apart(self) -> Generator[Any, None, None]:
        loader = self._task.dataloader
        put_back = putting_back(loader)
        apart = Stream(self._stream.state)
        try:
            yield from self._iterate(self._opened(loader, apart, self._training_draws), apart, self._training_draws)
        finally:
            put_back()

    @property
    def sample_inputs(self) -> Any:
        """The first batch's inputs as the loader gave them, for a forward that takes whole batches."""
        found = self._largest or self._first
        assert found is not None
        return found.inputs

    def start(self, report: Callable[[Any], None], num_threads: int, set_up: Callable[[], Any] | None = None) -> None:
        """Begin to serve requests, in a thread of its own: loaders are user code and may block.

        set_up: what to do before, in that thread; what it returns is reported, unless the thread was left behind.
        """
        self._thread = threading.Thread(
            target=self._serve, args=(report, num_threads, set_up), name=self.thread_name, daemon=True
        )
        self._thread.start()

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Call the task's other user code, in this reader's thread: what it draws is nobody's, and it may be late."""
        with beside_loaders(), self._timed():
            yield

    @contextmanager
    def _timed(self) -> Iterator[None]:
        self._at_work = threading.get_ident()
        self._since_s = time.monotonic()
        try:
            yield
        finally:
            self._since_s = None
        if self._is_left:
            raise TakenAway(f"{self._name}: its loader came back too late, and was left behind")

    def leave_behind(self) -> float | None:
        """Leave the thread to itself if user code did not come back in `loader_timeout_s`; else seconds until then.

        Its lock on the process-wide generators is taken away, and they are as they were: others go on.
        """
        timeout_s = self._task.loader_timeout_s
        assert timeout_s is not None
        with self._answering:
            late_s = 0.0 if self._since_s is None else time.monotonic() - self._since_s
            if late_s < timeout_s:
                return timeout_s - late_s
            self._leave()
            return None

    def _leave(self) -> None:
        self._is_left = True
        GLOBAL_GENERATORS.take_from(self._at_work)

    @property
    def thread_name(self) -> str:
        """Of the thread that reads."""
        return f"{self._name}-reader"

    def request(self, main: RandomState | None) -> None:
        """Ask for the next batch; `main` is where the layers have left the main stream, if they draw from it."""
        self._since_s = None
        self._requests.put((main,))

    def restart(self) -> None:
        """With the next request, go back to where the batch that failed was asked for, and ask again.

        The iterator is gone with its error. For a reader that keeps positions.
        """
        self._is_to_restart = True

    def take(self) -> Batch:
        """The batch that was reported ready."""
        return self._ready.get_nowait()

    def close(self) -> bool:
        """End the thread and the loader's iterator; False when user code does not come back."""
        self._requests.put(None)
        if self._thread is not None:
            self._thread.join(0.0 if self._is_left else JOIN_S)  # who is late already is not waited for again
            if self._thread.is_alive():
                with self._answering:
                    self._leave()
                return False
        self._items.close()
        return True

    def _serve(self, report: Callable[[Any], None], num_threads: int, set_up: Callable[[], Any] | None) -> None:
        torch.set_num_threads(num_threads)
        self._at_work = threading.get_ident()
        if set_up is not None and not self._answer(report, set_up(), None):
            return
        while (request := self._requests.get()) is not None:
            try:
                self._go_to(request[0])
                item, self._first = self._first or next(self._items, None), None
                self._since_s = time.monotonic()  # splitting is user code, too
                batch = self._batch(item, self._stream) if isinstance(item, _Item) else None
                answer: Event | EpochAhead = item if isinstance(item, EpochAhead) else DataEnded(self._name)
                if batch is not None:
                    answer = BatchReady(self._name, batch.step, batch.training)
            except BaseException as error:
                batch, answer = None, DataFailed(self._name, error, "its loader")
            if not self._answer(report, answer, batch):
                return

    def _answer(self, report: Callable[[Any], None], answer: Any, batch: Batch | None) -> bool:
        """Report something; False where the thread was left behind meanwhile."""
        with self._answering:
            self._since_s = None
            if self._is_left:
                return False
            if batch is not None:
                self._ready.put(batch)
            report(answer)
            return True

    def _go_to(self, main: RandomState | None) -> None:
        """Set the stream to where the next item begins, and the iterator, where it has to be another."""
        if self._is_to_restart or self._goal is not None:
            self._is_to_restart = False
            self._begin_again()
            return
        if main is not None:
            self._stream.state = main
        self._asked_at = self._stream.state
        if self._last is not None and self._last.num_evaluated == self._num_evaluated:  # it was given last
            self._last = self._last.with_random(self._stream.state)

    def _begin_again(self) -> None:
        """Go back to the last position, and past what was given since; that may raise, and is tried again as it was."""
        if self._goal is None:
            assert self._last is not None, "positions are not kept"
            self._goal = _Goal(self._last, self._num_evaluated - self._last.num_evaluated, self._asked_at)
        last, num_given, random = self._goal
        self._num_evaluations, self._num_evaluated = last.num_evaluations, last.num_evaluated
        self._items.close()
        self._items = self._sequence(last)
        for _ in range(num_given):
            next(self._items)
        if num_given:  # layers may have drawn in between
            self._stream.state = random
        self._goal = None

    def _sequence(self, start: TaskPosition | None) -> Generator[_Item | EpochAhead, None, None]:
        """Epochs and evaluations in the plain loop's order; a generator, so that it can change threads."""
        interval = self._task.validation_interval
        num_steps, first_epoch = (0, 0) if start is None else (start.num_steps, start.epoch)
        for epoch in range(first_epoch, self._task.epochs):
            if self._begin_epoch is not None and epoch > self._begun_epoch:  # not again where a retry goes back
                self._begun_epoch = epoch
                yield EpochAhead(self._name, epoch)
            began, iterator = self._begun(epoch, num_steps) if start is None else self._resumed(start)
            num_batches = 0 if start is None else start.loader.num_batches
            is_due = start is not None and isinstance(interval, int) and num_steps % interval == 0
            if start is not None and is_due and not start.is_evaluated:
                yield from self._evaluation(epoch)
            start = None
            for inputs, target in self._iterate(iterator, self._stream, self._training_draws):
                num_steps, num_batches = num_steps + 1, num_batches + 1
                self._note(began, num_batches, epoch, num_steps)
                yield _Item(inputs, target, num_steps - 1, epoch, True, self._num_evaluations, self._last)
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

    def _begun(self, epoch: int, num_steps: int) -> tuple[EpochStart | None, Iterator[Any]]:
        """An epoch's iterator, and what it was opened with."""
        loader = self._task.dataloader
        began = epoch_start(loader, self._stream) if self._keeps_positions else None
        self._note(began, 0, epoch, num_steps)
        return began, self._opened(loader, self._stream, self._training_draws)

    def _resumed(self, start: TaskPosition) -> tuple[EpochStart, Iterator[Any]]:
        """The iterator of an epoch in progress, and what it was opened with."""
        task = self._task
        if task.validation is not None:
            set_states(task.validation, start.validation)
        self._since_s = time.monotonic()
        restored = restore(task.dataloader, self._stream, start.loader)
        if restored.message is not None:
            self._messages.append(f"{self._name}: {restored.message}")
        return start.loader.start, restored.iterator

    def _note(self, began: EpochStart | None, num_batches: int, epoch: int, num_steps: int) -> None:
        """Keep where the task stands, if positions are kept."""
        if began is None:
            return
        task = self._task
        self._last = TaskPosition(
            num_steps=num_steps,
            epoch=epoch,
            loader=position_of(task.dataloader, self._stream, began, num_batches),
            validation=() if task.validation is None else states_of(task.validation),
            num_evaluations=self._num_evaluations,
            num_evaluated=self._num_evaluated,
            is_evaluated=num_batches == 0,
        )

    def _evaluation(self, epoch: int) -> Generator[_Item, None, None]:
        """The batches of one evaluation, which may lie between two of an epoch, whose iterator stays open meanwhile.

        As under torch.random.fork_rng: torch's stream goes on as if nothing had been drawn.
        """
        if self._task.validation is None:
            return
        outside = self._stream.state
        draws = self._validation_draws
        iterator = self._opened(self._task.validation, self._stream, draws)
        for inputs, target in self._iterate(iterator, self._stream, draws):
            self._num_evaluated += 1
            yield _Item(inputs, target, self._num_evaluated - 1, epoch, False, self._num_evaluations)
        self._stream.state = self._stream.state._replace(torch=outside.torch, device=outside.device)
        self._num_evaluations += 1

    def _opened(self, loader: Any, stream: Stream, draws: LoaderDraws) -> Iterator[Any]:
        with self._asking(stream, draws):
            return iter(loader)

    def _iterate(self, iterator: Iterator[Any], stream: Stream, draws: LoaderDraws) -> Iterator[Any]:
        while True:
            with self._asking(stream, draws):
                item = next(iterator, _END)
                if item is not _END:
                    item = self._task.unpack(item)
            if item is _END:
                return
            yield item

    @contextmanager
    def _asking(self, stream: Stream, draws: LoaderDraws) -> Iterator[None]:
        """Ask user code; how long others were asked before does not count."""
        self._since_s = None
        with draws.reading(stream), self._timed():
            yield

    @property
    def drawn(self) -> set[str]:
        """Which of `random` and `numpy.random` its user code was seen to draw from."""
        return self._training_draws.drawn | self._validation_draws.drawn | self._split_draws.drawn

    @property
    def messages(self) -> list[str]:
        """Why batches, or what others drew, may be other than they should."""
        doubts = (each.message for each in (self._training_draws, self._validation_draws, self._split_draws))
        return [*self._messages, *filter(None, doubts)]

    def _narrow(self, pair: tuple[Boundary, Boundary]) -> tuple[Boundary, Boundary]:
        """Inputs as they cross the link; the target as it is, since the loss computes in float32."""
        inputs, target = pair
        return inputs.around(cast(inputs.tensors, self._dtype)) if self._dtype is not None else inputs, target

    def split_again(self, batch: Batch, accumulation_steps: int) -> Batch:
        """The same batch in another number of micro-batches. Raises ValueError where that draws otherwise."""
        inputs, target = map(_built, batch.whole)
        item = _Item(inputs, target, batch.step, batch.epoch, batch.training, batch.evaluation, batch.position)
        stream = Stream(batch.read)
        found = self._split(item, stream, accumulation_steps)
        if not stream.state.same_as(batch.main):  # from which the next batch may be read already
            raise ValueError(
                f"{self._name}: split= draws random numbers, so that a batch cannot be split anew, into "
                f"{accumulation_steps} micro-batches, while it is trained on; set accumulation_steps to that number, "
                f"or draw from a generator that split= makes for itself"
            )
        return found

    def _batch(self, item: _Item, stream: Stream) -> Batch:
        return self._split(item, stream, self.accumulation_steps if item.training else 1)

    def _split(self, item: _Item, stream: Stream, accumulation_steps: int) -> Batch:
        inputs, target, step, epoch, training, evaluation, position = item
        seed, read, reduction = self._task.seed, stream.state, self._task.loss_reduction
        micro_batches: list[MicroBatch] = [(inputs, target, 1.0)]
        if accumulation_steps > 1:
            micro_batches, stream.state = self._micro_batches(item, read, accumulation_steps)
        weight = 0.0 if training else float(batch_size(inputs))
        if callable(reduction) and not training:
            with self._split_draws.reading(stream):
                weight = float(reduction(target))
        main = stream.state
        start = [main]
        whole = _own_pair(self._name, inputs, target)
        boundaries = [self._narrow(whole)]
        if accumulation_steps > 1:
            boundaries = [self._narrow(_own_pair(self._name, x, y)) for x, y, _ in micro_batches]
            if not micro_batches:
                raise ValueError(f"{self._name}: split= returned no micro-batches for a batch of {batch_size(inputs)}")
            if training:
                seeds = [stream_seed(seed, step, m) for m in range(len(micro_batches))]
                start = [main._replace(torch=seeded(each), device=each) for each in seeds]
            else:
                start = [main] * len(micro_batches)
        return Batch(
            step=step,
            epoch=epoch,
            training=training,
            evaluation=evaluation,
            micro_batches=micro_batches,
            boundaries=boundaries,
            read=read,
            main=main,
            start=start,
            num_samples=batch_size(inputs),
            weight=weight,
            whole=whole,
            accumulation_steps=accumulation_steps,
            position=position,
        )

    def _micro_batches(self, item: _Item, read: RandomState, number: int) -> tuple[list[MicroBatch], RandomState]:
        """Split a batch as the plain loop does, after the read: what that draws is of the same stream.

        A plan and the training that follows it split the first batch once, since a function may count its calls.
        """
        if self._split_first is not None:
            first, at, split_in, found, after = self._split_first
            if self._thread is not None:
                self._split_first = None
            if first is item.inputs and at is read and split_in == number:
                return found, after
        task, stream = self._task, Stream(read)
        with self._split_draws.reading(stream) if task.splits_by_user else nullcontext():
            found = [_triple(each) for each in task.split(item.inputs, item.target, number)]
        if self._thread is None:  # for a plan
            self._split_first = (item.inputs, read, number, found, stream.state)
        return found, stream.state


def _built(boundary: Boundary) -> Any:
    return boundary.build(boundary.tensors)


def _num_bytes(task: str, inputs: Any, target: Any) -> int:
    return Boundary.of(inputs, f"{task}: a batch").num_bytes + Boundary.of(target, f"{task}: a target").num_bytes


def _own_pair(task: str, inputs: Any, target: Any) -> tuple[Boundary, Boundary]:
    return _own(inputs, f"{task}: a batch"), _own(target, f"{task}: a target")


def _own(value: Any, where: str) -> Boundary:
    """Taken apart, with copies of its tensors: a loader may read the next batch into the same memory."""
    boundary = Boundary.of(value, where)
    return boundary.around([copy_in_dram(tensor) for tensor in boundary.tensors])


def _triple(micro_batch: Any) -> MicroBatch:
    if not isinstance(micro_batch, tuple) or len(micro_batch) != 3:
        raise ValueError(f"split= returned {type(micro_batch).__name__}, not a triple (inputs, target, weight)")
    return micro_batch
