"""Reads a task's batches in the order of the plain loop, each with the random state that the plain loop would have."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import torch

from hydra_engine.batches import MicroBatch, batch_size
from hydra_engine.boundary import Boundary, copy_in_dram
from hydra_engine.events import BatchReady, DataEnded, DataFailed, Event
from hydra_engine.loader_generators import putting_back, set_states, states_of
from hydra_engine.loader_position import EpochStart, epoch_start, position_of, restore
from hydra_engine.randomness import RandomState, Stream, installed, seeded, stream_seed
from hydra_engine.task import ModelTask
from hydra_engine.task_position import TaskPosition
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
    position: TaskPosition | None = None  # right after it was read, where the reader keeps positions

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
    position: TaskPosition | None = None


_RESTART = object()


class Reader:
    """Owns a task's loader, its iterator and its main random stream; reads one batch for each request.

    The first batch is also the sample that `generate()` profiles with: it is read once, whenever it is first needed.
    """

    def __init__(
        self, task: ModelTask, name: str, *, keeps_positions: bool = False, start: TaskPosition | None = None
    ) -> None:
        """`keeps_positions`: batches say where the task stands. `start`: it goes on from there."""
        self._task = task
        self._name = name
        self._keeps_positions = keeps_positions
        self._start = start
        self.messages: list[str] = []  # why batches may be other ones than those of the run that was saved
        self._stream = Stream(RandomState(seeded(task.seed), random.getstate(), np.random.get_state(), task.seed))
        self._items = self._sequence(start)
        self._num_evaluations = 0 if start is None else start.num_evaluations  # that ended
        self._num_evaluated = 0 if start is None else start.num_evaluated  # their batches, and of the one in progress
        self._last = start  # the last position, where they are kept
        self._first: _Item | None = None
        self._largest: _Item | None = None
        self._broken: BaseException | None = None
        self._requests: SimpleQueue[tuple[Any] | None] = SimpleQueue()
        self._ready: SimpleQueue[Batch] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self.accumulation_steps = 1
        self._dtype = None if task.precision == "float32" else DTYPES[task.precision]

    def sample(self, *, training: bool = True) -> Batch:
        """The first batch, as it is trained on or as it would be evaluated; it stays the next one to be read.

        Where a task goes on, it may be one of a validation, or none is left and the first of an epoch is read apart.
        """
        first = self._peek()
        if self._start is not None and first is None and self._largest is None:
            self._largest = self._first_apart()
        elif self._start is None and (first is None or (self._task.trains and not first.training)):
            what = "training" if self._task.trains else "evaluation"
            raise ValueError(f"{self._name}: the loader is empty; {what} needs at least one batch")
        found = self._largest or first
        assert found is not None
        return self._batch(found._replace(training=training))

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
                self._first = next(self._items, None)
            except BaseException as error:
                self._broken = error  # the iterator is gone with it
                raise
        return self._first

    def _scan(self) -> _Item | None:
        """The batch with most bytes of an epoch that is read apart, before the first epoch begins.

        On a copy of the task's random stream; generators of the loader's own are put back, so that training reads what
        it would have read.
        """
        largest, most = None, -1
        for inputs, target in self._apart():
            if (size := _num_bytes(inputs, target)) > most:
                kept = _own_pair(inputs, target)  # the loader may read on into the same memory
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
            yield from self._iterate(self._opened(loader, apart), apart)
        finally:
            put_back()

    @property
    def sample_inputs(self) -> Any:
        """The first batch's inputs as the loader gave them, for a forward that takes whole batches."""
        found = self._largest or self._first
        assert found is not None
        return found.inputs

    def start(self, report: Callable[[Event], None], num_threads: int) -> None:
        """Begin to serve requests, in a thread of its own: loaders are user code and may block."""
        self._thread = threading.Thread(
            target=self._serve, args=(report, num_threads), name=f"{self._name}-reader", daemon=True
        )
        self._thread.start()

    def request(self, main: RandomState | None) -> None:
        """Ask for the next batch; `main` is where the layers have left the main stream, if they draw from it."""
        self._requests.put((main,))

    def restart(self) -> None:
        """Ask for the batch that failed once more, from a new iterator; where positions are kept."""
        self._requests.put((_RESTART,))

    def take(self) -> Batch:
        """The batch that was reported ready."""
        return self._ready.get_nowait()

    def close(self) -> bool:
        """End the thread and the loader's iterator; False when user code does not come back."""
        self._requests.put(None)
        if self._thread is not None:
            self._thread.join(JOIN_S)
            if self._thread.is_alive():
                return False
        self._items.close()
        return True

    def _serve(self, report: Callable[[Event], None], num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        while (request := self._requests.get()) is not None:
            try:
                if request[0] is _RESTART:
                    self._begin_again()
                elif request[0] is not None:
                    self._stream.state = request[0]
                if self._last is not None and self._last.num_evaluated == self._num_evaluated:
                    self._last = self._last.with_random(self._stream.state)
                item, self._first = self._first or next(self._items, None), None
                if item is None:
                    report(DataEnded(self._name))
                    continue
                batch = self._batch(item)
                self._ready.put(batch)
                report(BatchReady(self._name, batch.step, batch.training))
            except BaseException as error:
                report(DataFailed(self._name, error, "its loader"))

    def _begin_again(self) -> None:
        """Go back to the last position, and past what was given since."""
        assert self._last is not None, "positions are not kept"
        num_given = self._num_evaluated - self._last.num_evaluated  # of the evaluation that follows it
        self._num_evaluations, self._num_evaluated = self._last.num_evaluations, self._last.num_evaluated
        self._items.close()
        self._items = self._sequence(self._last)
        for _ in range(num_given):
            next(self._items)

    def _sequence(self, start: TaskPosition | None) -> Generator[_Item, None, None]:
        """Epochs and evaluations in the plain loop's order; a generator, so that it can change threads."""
        interval = self._task.validation_interval
        num_steps, first_epoch = (0, 0) if start is None else (start.num_steps, start.epoch)
        for epoch in range(first_epoch, self._task.epochs):
            began, iterator = self._begun(epoch, num_steps) if start is None else self._resumed(start)
            num_batches = 0 if start is None else start.loader.num_batches
            is_due = start is not None and isinstance(interval, int) and num_steps % interval == 0
            if start is not None and is_due and not start.is_evaluated:
                yield from self._evaluation(epoch)
            start = None
            for inputs, target in self._iterate(iterator, self._stream):
                num_steps, num_batches = num_steps + 1, num_batches + 1
                self._note(began, num_batches, epoch, num_steps)
                yield _Item(inputs, target, num_steps - 1, epoch, True, self._num_evaluations, self._last)
                if isinstance(interval, int) and num_steps % interval == 0:
                    yield from self._evaluation(epoch)
            if interval == "epoch":
                yield from self._evaluation(epoch)

    def _begun(self, epoch: int, num_steps: int) -> tuple[EpochStart | None, Iterator[Any]]:
        """An epoch's iterator, and what it was opened with."""
        loader = self._task.dataloader
        began = epoch_start(loader, self._stream) if self._keeps_positions else None
        self._note(began, 0, epoch, num_steps)
        return began, self._opened(loader, self._stream)

    def _resumed(self, start: TaskPosition) -> tuple[EpochStart, Iterator[Any]]:
        """The iterator of an epoch in progress, and what it was opened with."""
        task = self._task
        if task.validation is not None:
            set_states(task.validation, start.validation)
        restored = restore(task.dataloader, self._stream, start.loader)
        if restored.message is not None:
            self.messages.append(f"{self._name}: {restored.message}")
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
        for inputs, target in self._iterate(self._opened(self._task.validation, self._stream), self._stream):
            self._num_evaluated += 1
            yield _Item(inputs, target, self._num_evaluated - 1, epoch, False, self._num_evaluations)
        self._stream.state = self._stream.state._replace(torch=outside.torch, device=outside.device)
        self._num_evaluations += 1

    def _opened(self, loader: Any, stream: Stream) -> Iterator[Any]:
        with installed(stream):
            return iter(loader)

    def _iterate(self, iterator: Iterator[Any], stream: Stream) -> Iterator[Any]:
        while True:
            with installed(stream):
                item = next(iterator, _END)
                if item is not _END:
                    item = self._task.unpack(item)
            if item is _END:
                return
            yield item

    def _narrow(self, pair: tuple[Boundary, Boundary]) -> tuple[Boundary, Boundary]:
        """Inputs as they cross the link; the target as it is, since the loss computes in float32."""
        inputs, target = pair
        return inputs.around(cast(inputs.tensors, self._dtype)) if self._dtype is not None else inputs, target

    def split_again(self, batch: Batch, accumulation_steps: int) -> Batch:
        """The same batch in another number of micro-batches."""
        inputs, target = map(_built, batch.whole)
        item = _Item(inputs, target, batch.step, batch.epoch, batch.training, batch.evaluation, batch.position)
        return self._split(item, batch.main, accumulation_steps)

    def _batch(self, item: _Item) -> Batch:
        return self._split(item, self._stream.state, self.accumulation_steps if item.training else 1)

    def _split(self, item: _Item, main: RandomState, accumulation_steps: int) -> Batch:
        inputs, target, step, epoch, training, evaluation, position = item
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
            position=position,
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
