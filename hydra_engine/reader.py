"""Reads a task's batches in the order of the plain loop, each with the random state that the plain loop would have."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import torch

from hydra_engine.batches import MicroBatch, batch_size
from hydra_engine.boundary import Boundary, copy_of
from hydra_engine.events import BatchReady, DataEnded, DataFailed, Event
from hydra_engine.randomness import RandomState, Stream, installed, seeded, stream_seed
from hydra_engine.task import ModelTask

# A user's loader that does not return is left behind: its thread is a daemon.
JOIN_S = 10.0

_END = object()


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One batch, ready to be begun."""

    step: int  # counts training batches, and evaluation batches on their own
    epoch: int
    training: bool
    micro_batches: list[MicroBatch]
    boundaries: list[tuple[Boundary, Boundary]]  # the same, taken apart
    main: RandomState  # the task's main stream after the read
    start: list[RandomState]  # by micro-batch, before its forward
    num_samples: int
    weight: float  # of an evaluation batch among those of its epoch
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


class Reader:
    """Owns a task's loader, its iterator and its main random stream; reads one batch for each request.

    The first batch is also the sample that `generate()` profiles with: it is read once, whenever it is first needed.
    """

    def __init__(self, task: ModelTask, name: str) -> None:
        self._task = task
        self._name = name
        self._stream = Stream(RandomState(seeded(task.seed), random.getstate(), np.random.get_state()))
        self._items = self._sequence()
        self._first: _Item | None = None
        self._largest: _Item | None = None
        self._broken: BaseException | None = None
        self._requests: SimpleQueue[tuple[RandomState | None] | None] = SimpleQueue()
        self._ready: SimpleQueue[Batch] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self.accumulation_steps = 1

    def sample(self, *, training: bool = True) -> Batch:
        """The first batch, as it is trained on or as it would be evaluated; it stays the next one to be read."""
        if self._broken is not None:
            raise self._broken
        if self._first is None:
            try:
                self._first = next(self._items, None)
            except BaseException as error:
                self._broken = error  # the iterator is gone with it
                raise
        if self._first is None or not self._first.training:
            raise ValueError(f"{self._name}: the loader is empty; training needs at least one batch")
        if self._task.scan_batches and self._largest is None:
            self._largest = self._scan()
        return self._batch((self._largest or self._first)._replace(training=training))

    def _scan(self) -> _Item:
        """The batch with most bytes of an epoch that is read apart, on copies of the random streams that it draws from.

        A loader's own generators are put back, so that training reads what it would have read.
        """
        assert self._first is not None
        loader = self._task.dataloader
        holders = (loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None))
        found = {id(g): g for g in (getattr(h, "generator", None) for h in holders) if isinstance(g, torch.Generator)}
        states = [(generator, generator.get_state()) for generator in found.values()]
        stream = Stream(self._stream.state)
        kept = _own_pair(self._first.inputs, self._first.target)  # the loader may read on into the same memory
        self._first = largest = self._first._replace(inputs=_built(kept[0]), target=_built(kept[1]))
        most = _num_bytes(largest.inputs, largest.target)
        try:
            for inputs, target in self._iterate(loader, stream):
                if (size := _num_bytes(inputs, target)) > most:
                    boundaries = _own_pair(inputs, target)
                    largest = largest._replace(inputs=_built(boundaries[0]), target=_built(boundaries[1]))
                    most = size
        finally:
            for generator, state in states:
                generator.set_state(state)
        return largest

    @property
    def sample_inputs(self) -> Any:
        """The first batch's inputs as the loader gave them, for a forward that takes whole batches."""
        assert self._first is not None
        return (self._largest or self._first).inputs

    def start(self, report: Callable[[Event], None], num_threads: int) -> None:
        """Begin to serve requests, in a thread of its own: loaders are user code and may block."""
        self._thread = threading.Thread(
            target=self._serve, args=(report, num_threads), name=f"{self._name}-reader", daemon=True
        )
        self._thread.start()

    def request(self, main: RandomState | None) -> None:
        """Ask for the next batch; `main` is where the layers have left the main stream, if they draw from it."""
        self._requests.put((main,))

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
            if request[0] is not None:
                self._stream.state = request[0]
            try:
                item, self._first = self._first or next(self._items, None), None
                if item is None:
                    report(DataEnded(self._name))
                    continue
                batch = self._batch(item)
                self._ready.put(batch)
                report(BatchReady(self._name, batch.step, batch.training))
            except BaseException as error:
                report(DataFailed(self._name, error, "its loader"))

    def _sequence(self) -> Generator[_Item, None, None]:
        """Epochs and evaluations in the plain loop's order; a generator, so that it can change threads."""
        num_steps = num_evaluations = 0
        for epoch in range(self._task.epochs):
            for inputs, target in self._iterate(self._task.dataloader):
                yield _Item(inputs, target, num_steps, epoch, True)
                num_steps += 1
            if self._task.validation is not None:
                # As under torch.random.fork_rng: torch's stream goes on as if nothing had been drawn.
                outside = self._stream.state.torch
                for inputs, target in self._iterate(self._task.validation):
                    yield _Item(inputs, target, num_evaluations, epoch, False)
                    num_evaluations += 1
                self._stream.state = self._stream.state._replace(torch=outside)

    def _iterate(self, loader: Any, stream: Stream | None = None) -> Iterator[Any]:
        stream = self._stream if stream is None else stream
        with installed(stream):
            iterator = iter(loader)
        while True:
            with installed(stream):
                item = next(iterator, _END)
                if item is not _END:
                    item = self._task.unpack(item)
            if item is _END:
                return
            yield item

    def split_again(self, batch: Batch, accumulation_steps: int) -> Batch:
        """The same batch in another number of micro-batches."""
        inputs, target = map(_built, batch.whole)
        item = _Item(inputs, target, batch.step, batch.epoch, batch.training)
        return self._split(item, batch.main, accumulation_steps)

    def _batch(self, item: _Item) -> Batch:
        return self._split(item, self._stream.state, self.accumulation_steps)

    def _split(self, item: _Item, main: RandomState, accumulation_steps: int) -> Batch:
        inputs, target, step, epoch, training = item
        seed = self._task.seed
        micro_batches: list[MicroBatch] = [(inputs, target, 1.0)]
        start = [main]
        boundaries = [whole] = [_own_pair(inputs, target)]
        if training and accumulation_steps > 1:
            micro_batches = [_triple(each) for each in self._task.split(inputs, target, accumulation_steps)]
            boundaries = [_own_pair(x, y) for x, y, _ in micro_batches]
            if not micro_batches:
                raise ValueError(f"{self._name}: split= returned no micro-batches for a batch of {batch_size(inputs)}")
            start = [main._replace(torch=seeded(stream_seed(seed, step, m))) for m in range(len(micro_batches))]
        reduction = self._task.loss_reduction
        return Batch(
            step=step,
            epoch=epoch,
            training=training,
            micro_batches=micro_batches,
            boundaries=boundaries,
            main=main,
            start=start,
            num_samples=batch_size(inputs),
            weight=float(reduction(target)) if callable(reduction) else float(batch_size(inputs)),
            whole=whole,
            accumulation_steps=accumulation_steps if training else 1,
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
    return boundary.around([copy_of(tensor) for tensor in boundary.tensors])


def _triple(micro_batch: Any) -> MicroBatch:
    if not isinstance(micro_batch, tuple) or len(micro_batch) != 3:
        raise ValueError(f"split= returned {type(micro_batch).__name__}, not a triple (inputs, target, weight)")
    return micro_batch
