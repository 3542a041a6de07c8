"""Reads a task's batches in the order of the plain loop, each with the random state that the plain loop would have."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import torch

from hydra_engine.batches import MicroBatch, batch_size
from hydra_engine.boundary import Boundary, copy_in_dram
from hydra_engine.events import BatchReady, DataEnded, DataFailed, Event
from hydra_engine.loader_generators import putting_back
from hydra_engine.randomness import GLOBAL_GENERATORS, RandomState, Stream, installed, seeded, stream_seed
from hydra_engine.task import ModelTask
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
    main: RandomState  # the task's main stream after the read
    start: list[RandomState]  # by micro-batch, before its forward
    num_samples: int
    weight: float  # of an evaluation batch among those of its evaluation
    whole: tuple[Boundary, Boundary]  # inputs and target as they were read, to be split anew
    accumulation_steps: int  # micro-batches asked for

    @property
    def signature(self) -> tuple[Any, ...]:
        """What decides the memory of every unit of its step."""
        return tuple((inputs.signature, target.signature) for inputs, target in self.boundaries)


class _Item(NamedTuple):
    """What the loader gave, unpacked, and its place in the task."""

    inputs: Any
    target: Any
    step: int
    epoch: int
    training: bool
    evaluation: int


class _EpochStart(NamedTuple):
    """How things stood before an epoch's iterator was opened."""

    epoch: int
    num_steps: int
    num_evaluations: int
    num_evaluated: int
    random: RandomState
    put_back: list[Callable[[], None]]  # generators of the loaders' own


class _Goal(NamedTuple):
    """A position to go back to."""

    epoch: _EpochStart
    num_read: int
    outside: RandomState
    opened: list[RandomState]


class Reader:
    """Owns a task's loader, its iterator and its main random stream; reads one batch for each request.

    The first batch is also the sample that `generate()` profiles with: it is read once, whenever it is first needed.
    """

    def __init__(self, task: ModelTask, name: str) -> None:
        self._task = task
        self._name = name
        self._stream = Stream(RandomState(seeded(task.seed), random.getstate(), np.random.get_state(), task.seed))
        self._epoch = _EpochStart(0, 0, 0, 0, self._stream.state, [])
        self._items = self._sequence()
        self._num_evaluations = 0  # that ended
        self._num_evaluated = 0  # their batches, and those of the one in progress
        self._first: _Item | None = None
        self._largest: _Item | None = None
        self._broken: BaseException | None = None
        self._requests: SimpleQueue[tuple[RandomState | None] | None] = SimpleQueue()
        self._ready: SimpleQueue[Batch] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._num_read = 0  # of the epoch's batches, and of the evaluations in it
        self._read = self._stream.state  # after the last of them
        self._outside = self._stream.state  # of the evaluation in progress
        self._opened: list[RandomState] = []  # the epoch's iterators, from these states
        self._reopening: list[RandomState] = []
        self._goal: _Goal | None = None
        self._answering = threading.Lock()  # a batch comes in time, or its thread is left behind: never both
        self._since_s: float | None = None  # when user code was last asked, by time.monotonic(); None: it is not
        self._is_left = False
        self.accumulation_steps = 1
        self._dtype = None if task.precision == "float32" else DTYPES[task.precision]

    def sample(self, *, training: bool = True) -> Batch:
        """The first batch, as it is trained on or as it would be evaluated; it stays the next one to be read."""
        first = self._peek()
        if first is None or (self._task.trains and not first.training):
            what = "training" if self._task.trains else "evaluation"
            raise ValueError(f"{self._name}: the loader is empty; {what} needs at least one batch")
        return self._batch((self._largest or first)._replace(training=training))

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to read at all."""
        return self._peek() is None

    def _peek(self) -> _Item | None:
        if self._broken is not None:
            raise self._broken
        if self._first is None:
            try:
                if self._task.scan_batches:
                    self._largest = self._scan()
                self._first = self._next()
            except BaseException as error:
                self._broken = error  # the iterator is gone with it
                raise
        return self._first

    def _scan(self) -> _Item | None:
        """The batch with most bytes of an epoch that is read apart, before the first epoch begins.

        On a copy of the task's random stream; generators of the loader's own are put back, so that training reads what
        it would have read.
        """
        loader = self._task.dataloader
        largest, most = None, -1
        put_back = putting_back(loader)
        try:
            for inputs, target in self._iterate(loader, Stream(self._stream.state)):
                if (size := _num_bytes(inputs, target)) > most:
                    kept = _own_pair(inputs, target)  # the loader may read on into the same memory
                    largest, most = _Item(_built(kept[0]), _built(kept[1]), 0, 0, True, 0), size
        finally:
            put_back()
        return largest

    @property
    def sample_inputs(self) -> Any:
        """The first batch's inputs as the loader gave them, for a forward that takes whole batches."""
        assert self._first is not None
        return (self._largest or self._first).inputs

    def start(self, report: Callable[[Event], None], num_threads: int) -> None:
        """Begin to serve requests, in a thread of its own: loaders are user code and may block."""
        self._thread = threading.Thread(
            target=self._serve, args=(report, num_threads), name=self.thread_name, daemon=True
        )
        self._thread.start()

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
        if self._thread is not None:
            GLOBAL_GENERATORS.take_from(self._thread.ident)

    @property
    def thread_name(self) -> str:
        """Of the thread that reads."""
        return f"{self._name}-reader"

    def request(self, main: RandomState | None) -> None:
        """Ask for the next batch; `main` is where the layers have left the main stream, if they draw from it."""
        self._since_s = None
        self._requests.put((main,))

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

    def _serve(self, report: Callable[[Event], None], num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        while (request := self._requests.get()) is not None:
            try:
                if self._goal is not None:
                    self._go_back(self._goal, request[0])
                elif request[0] is not None:
                    self._stream.state = request[0]
                item, self._first = self._first or self._next(), None
                self._since_s = time.monotonic()  # splitting is user code, too
                batch = None if item is None else self._batch(item)
                answer: Event = DataEnded(self._name)
                if batch is not None:
                    answer = BatchReady(self._name, batch.step, batch.training)
            except BaseException as error:
                batch, answer = None, DataFailed(self._name, error, "its loader")
            with self._answering:
                self._since_s = None
                if self._is_left:
                    return
                if batch is not None:
                    self._ready.put(batch)
                report(answer)

    def restart(self) -> None:
        """With the next request, go back to the position after the last batch that was read, and read on.

        After a `DataFailed`: the iterator is gone with its error. The epoch is read again up to there.
        """
        if self._goal is None:  # else it raised on its way there
            self._goal = _Goal(self._epoch, self._num_read, self._outside, self._opened)

    def _go_back(self, goal: _Goal, main: RandomState | None) -> None:
        start, num_read, outside, opened = goal
        self._reopening = list(opened)
        self._num_evaluations, self._num_evaluated = start.num_evaluations, start.num_evaluated
        self._stream.state = start.random
        for put_back in start.put_back:
            put_back()
        self._items = self._sequence(start.epoch, start.num_steps)
        for _ in range(num_read):
            next(self._items)
        if num_read:  # else the layers' draws are in the state that the epoch was to begin with
            self._stream.state = self._read if main is None else main
        self._num_read, self._outside, self._goal = num_read, outside, None

    def _next(self) -> _Item | None:
        item = next(self._items, None)
        self._num_read += 1
        self._read = self._stream.state
        return item

    def _sequence(self, first_epoch: int = 0, num_steps: int = 0) -> Generator[_Item, None, None]:
        """Epochs and evaluations in the plain loop's order; a generator, so that it can change threads."""
        interval = self._task.validation_interval
        for epoch in range(first_epoch, self._task.epochs):
            self._num_read, self._opened = 0, []
            put_back = [putting_back(loader) for loader in (self._task.dataloader, self._task.validation)]
            counts = (self._num_evaluations, self._num_evaluated)
            self._epoch = _EpochStart(epoch, num_steps, *counts, self._stream.state, put_back)
            for inputs, target in self._iterate(self._task.dataloader):
                yield _Item(inputs, target, num_steps, epoch, True, self._num_evaluations)
                num_steps += 1
                if isinstance(interval, int) and num_steps % interval == 0:
                    yield from self._evaluation(epoch)
            if interval == "epoch":
                yield from self._evaluation(epoch)

    def _evaluation(self, epoch: int) -> Generator[_Item, None, None]:
        """The batches of one evaluation, which may lie between two of an epoch, whose iterator stays open meanwhile.

        As under torch.random.fork_rng: torch's stream goes on as if nothing had been drawn.
        """
        if self._task.validation is None:
            return
        self._outside = self._stream.state
        for inputs, target in self._iterate(self._task.validation):
            yield _Item(inputs, target, self._num_evaluated, epoch, False, self._num_evaluations)
            self._num_evaluated += 1
        self._stream.state = self._stream.state._replace(torch=self._outside.torch, device=self._outside.device)
        self._num_evaluations += 1

    def _iterate(self, loader: Any, stream: Stream | None = None) -> Iterator[Any]:
        if stream is None:
            stream = self._stream
            if self._reopening:  # where layers had left the stream, which are not run again
                stream.state = self._reopening.pop(0)
            self._opened.append(stream.state)
        with self._asking(stream):
            iterator = iter(loader)
        while True:
            with self._asking(stream):
                item = next(iterator, _END)
                if item is not _END:
                    item = self._task.unpack(item)
            if item is _END:
                return
            yield item

    @contextmanager
    def _asking(self, stream: Stream) -> Iterator[None]:
        """Ask user code; how long others were asked before does not count."""
        self._since_s = None
        with installed(stream):
            self._since_s = time.monotonic()
            yield

    def _narrow(self, pair: tuple[Boundary, Boundary]) -> tuple[Boundary, Boundary]:
        """Inputs as they cross the link; the target as it is, since the loss computes in float32."""
        inputs, target = pair
        return inputs.around(cast(inputs.tensors, self._dtype)) if self._dtype is not None else inputs, target

    def split_again(self, batch: Batch, accumulation_steps: int) -> Batch:
        """The same batch in another number of micro-batches."""
        inputs, target = map(_built, batch.whole)
        item = _Item(inputs, target, batch.step, batch.epoch, batch.training, batch.evaluation)
        return self._split(item, batch.main, accumulation_steps)

    def _batch(self, item: _Item) -> Batch:
        return self._split(item, self._stream.state, self.accumulation_steps if item.training else 1)

    def _split(self, item: _Item, main: RandomState, accumulation_steps: int) -> Batch:
        inputs, target, step, epoch, training, evaluation = item
        seed = self._task.seed
        micro_batches: list[MicroBatch] = [(inputs, target, 1.0)]
        start = [main]
        whole = _own_pair(inputs, target)
        boundaries = [self._narrow(whole)]
        if accumulation_steps > 1:
            micro_batches = [_triple(each) for each in self._task.split(inputs, target, accumulation_steps)]
            boundaries = [self._narrow(_own_pair(x, y)) for x, y, _ in micro_batches]
            if not micro_batches:
                raise ValueError(f"{self._name}: split= returned no micro-batches for a batch of {batch_size(inputs)}")
            if training:
                seeds = [stream_seed(seed, step, m) for m in range(len(micro_batches))]
                start = [main._replace(torch=seeded(each), device=each) for each in seeds]
            else:
                start = [main] * len(micro_batches)
        reduction = self._task.loss_reduction
        return Batch(
            step=step,
            epoch=epoch,
            training=training,
            evaluation=evaluation,
            micro_batches=micro_batches,
            boundaries=boundaries,
            main=main,
            start=start,
            num_samples=batch_size(inputs),
            weight=float(reduction(target)) if callable(reduction) else float(batch_size(inputs)),
            whole=whole,
            accumulation_steps=accumulation_steps,
        )


def _built(boundary: Boundary) -> Any:
    return boundary.build(boundary.tensors)


def _num_bytes(inputs: Any, target: Any) -> int:
    return sum(each.num_bytes for each in (Boundary.of(inputs, "a batch"), Boundary.of(target, "a target")))


def _own_pair(inputs: Any, target: Any) -> tuple[Boundary, Boundary]:
    return _own(inputs, "a batch"), _own(target, "a target")


def _own(value: Any, where: str) -> Boundary:
    """Taken apart, with copies of its tensors: a loader may read the next batch into the same memory."""
    boundary = Boundary.of(value, where)
    return boundary.around([copy_in_dram(tensor) for tensor in boundary.tensors])


def _triple(micro_batch: Any) -> MicroBatch:
    if not isinstance(micro_batch, tuple) or len(micro_batch) != 3:
        raise ValueError(f"split= returned {type(micro_batch).__name__}, not a triple (inputs, target, weight)")
    return micro_batch
