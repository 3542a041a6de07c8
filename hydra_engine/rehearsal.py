"""Runs one step of a task on a device and commits nothing: what units take, draw and change, and that they repeat."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from hydra_engine.device import DeviceSpec
from hydra_engine.errors import DeviceOutOfMemory
from hydra_engine.events import Computed, Event, Failed, Stored
from hydra_engine.indices import IndexLimit
from hydra_engine.optimizer import TaskOptimizer
from hydra_engine.randomness import Stream, capture, installed
from hydra_engine.reader import Batch
from hydra_engine.schedule import FORWARD, Unit
from hydra_engine.shard import Shard, Structure
from hydra_engine.task_state import TaskState
from hydra_engine.trace import Trace
from hydra_engine.worker import Worker


class TooLarge(Exception):
    """A shard ran out of device memory."""

    def __init__(self, shard: int, needed_bytes: int) -> None:
        super().__init__(shard)
        self.shard = shard
        self.needed_bytes = needed_bytes


def rehearse(
    state: TaskState, batch: Batch, evaluation: Batch | None, device: DeviceSpec, num_threads: int, *, draws: bool
) -> dict[tuple[str, int], float]:
    """Seconds of each unit of a step; in `state`, what they take and which shards need the process-wide generators.

    `evaluation`: a batch to evaluate as well, where the task has a validation loader. `draws`: a layer draws random
    numbers. Raises TooLarge, what a layer or the loss raised, and ValueError for layers that cannot be streamed.
    """
    stage = _Stage(state, device, num_threads)
    try:
        seconds, outputs = stage.run(batch)
        stage.check_names()
        state.draws = state.accumulation_steps == 1 and not state.end_of_forward().same_as(batch.main)
        state.draws_outside_torch = not state.end_of_forward().same_outside_torch(batch.start[-1])
        state.changed_buffers = set(state.staging.buffers)
        state.staging_bytes = state.staging.num_bytes
        state.check_draws()
        state.check_buffers()
        if draws and stage.repeats_bits:
            stage.find_locked(batch, outputs)
        if state.task.compile:
            stage.run(batch)  # its units are known by now, and run compiled: what cannot be is refused here
        if not stage.repeats_bits:
            # The first run has loaded kernels, and was metered: it says nothing of the seconds of others.
            seconds, _ = stage.run(batch)
        if evaluation is not None:
            stage.run(evaluation)
            state.draws |= not state.end_of_forward().same_as(evaluation.main)
    finally:
        stage.close()
    return seconds


class _UsesOriginals(Exception):
    """An operation took a tensor of the user's model instead of the device's copy."""


class _UsesAnothers(Exception):
    """An operation took a tensor of another shard, which has this name."""


class _OriginalsGuard(TorchDispatchMode):  # type: ignore[no-untyped-call]  # its __init_subclass__
    """Raises where a layer computes with the original weights: through a closure, they escape every copy.

    And where it computes with the weights of another shard, to which a list or a dict of modules may lead it.
    """

    def __init__(self, storages: set[int], structure: Structure) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages = storages
        self._names = structure.unbound()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for value in pytree.tree_leaves((args, kwargs)):
            if isinstance(value, Tensor) and value.layout == torch.strided:
                if id(value) in self._names:
                    raise _UsesAnothers(self._names[id(value)])
                address = value.untyped_storage().data_ptr()
                if address and address in self._storages:
                    raise _UsesOriginals
        return func(*args, **(kwargs or {}))


class _Stage:
    """A worker of its own, on which units run one after the other."""

    def __init__(self, state: TaskState, device: DeviceSpec, num_threads: int) -> None:
        self._state = state
        self._events: SimpleQueue[Event] = SimpleQueue()
        if state.steps_on_device:  # before anything is open: the factories are user code
            with installed(Stream(capture())):
                state.stepper = TaskOptimizer(state.task, state.layout, commits=False)
        trace = Trace()
        self.repeats_bits = device.torch_device.type == "cpu"
        largest = max(shard.slab_bytes for shard in state.shards)
        opened = device.for_rehearsal().open(0, trace, num_threads, largest)
        self._worker = Worker(0, opened, trace, self._events.put)
        try:
            state.open()
            originals = [*(slot.parameter.data for slot in state.layout.slots), *state.layout.buffers]
            storages = {tensor.untyped_storage().data_ptr() for tensor in originals}
            # Not the worker itself: it would hold itself, and what the task reads from, until the collector comes by.
            worker, name = weakref.proxy(self._worker), state.name
            self._worker.admit(state, lambda: _OriginalsGuard(storages, worker.structure(name)))
            self._limit = IndexLimit(self._worker.structure(state.name).layers[0])
        except BaseException:
            self.close()
            raise

    def check_names(self) -> None:
        """Check that no forward has registered anything."""
        self._state.layout.originals.check_names(self._worker.structure(self._state.name).layers)

    def close(self) -> None:
        self._worker.close()
        self._state.close()
        self._state.stepper = None

    def run(self, batch: Batch) -> tuple[dict[tuple[str, int], float], list[tuple[bytes, ...]]]:
        """Run a batch's units: seconds of each, and by shard a digest of what its forward left for each micro-batch."""
        state = self._state
        state.staging.begin(batch.boundaries, [weight for _, _, weight in batch.micro_batches], batch.start)
        seconds = {}
        for kind, shard in state.chains[batch.training]:
            with self._limit.watched() if shard == 0 else nullcontext():
                outcome = self._unit(Unit(state.name, kind, shard, batch.step))
            state.index_limit = self._limit.found
            if isinstance(outcome, Failed) and kind == FORWARD and _may_differentiate(outcome.error):
                state.keep_saved.add(shard)
                outcome = self._unit(Unit(state.name, kind, shard, batch.step))
            if isinstance(outcome, Failed):
                self._raise(outcome, state.shards[shard])
            else:
                seconds[kind, shard] = outcome
            state.pool.take_gradients_back(state.shards[shard])
        return seconds, [self._digests(shard) for shard in state.shards]

    def _unit(self, unit: Unit) -> float | Failed:
        self._worker.load(unit, self._state)
        self._worker.run(unit)
        computed = self._events.get()
        assert isinstance(computed, Computed)
        if not computed.stored:
            stored = self._events.get()
            if isinstance(stored, Failed):
                return stored
            assert isinstance(stored, Stored)
        return computed.seconds

    def _digests(self, shard: Shard) -> tuple[bytes, ...]:
        staging, following = self._state.staging, shard.index + 1
        found = []
        for m in range(staging.num_micro_batches):
            tensors = [staging.random[following, m].torch]
            if m in staging.losses and self._state.is_last(shard):
                tensors.append(torch.tensor(staging.losses[m], dtype=torch.float64))
            else:
                tensors.extend(staging.entering(following, m).tensors)
            found.append(_digest(tensors))
        return tuple(found)

    def find_locked(self, batch: Batch, outputs: list[tuple[bytes, ...]]) -> None:
        """Lock the shards whose draws come out otherwise when all process-wide generators are theirs.

        A layer that seeds or saves torch's global generator itself is such a one: the mode that redirects draws does
        not see it.
        """
        state = self._state
        locked, state.locked = state.locked, {shard.index for shard in state.shards}
        _, expected = self.run(batch)
        state.locked = locked
        while outputs != expected:
            state.locked.add(next(j for j, (a, b) in enumerate(zip(outputs, expected, strict=True)) if a != b))
            _, outputs = self.run(batch)

    def _raise(self, failed: Failed, shard: Shard) -> None:
        error, name = failed.error, self._state.name
        if isinstance(error, DeviceOutOfMemory):
            raise TooLarge(shard.index, error.needed_bytes) from error
        if isinstance(error, _UsesOriginals):
            raise ValueError(
                f"{name}: {failed.where} computes with a parameter or buffer of the original model, which a closure or "
                f"a functional call has kept; let the layer use its own attributes"
            ) from error
        if isinstance(error, _UsesAnothers):
            raise ValueError(
                f"{name}: {failed.where} computes with {error} of a layer in another shard, limit: what it has "
                f"registered; assign that parameter, or the module that holds it, to an attribute of this layer, not "
                f"to a list or a dict in it: it is then tied, and both shards hold it"
            ) from error
        raise error


def _may_differentiate(error: BaseException) -> bool:
    """Whether what a forward raised may come from autograd missing what it saved."""
    return isinstance(error, (RuntimeError, TypeError)) and not isinstance(error, DeviceOutOfMemory)


def _digest(tensors: Iterable[Tensor]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.digest()
