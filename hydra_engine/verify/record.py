"""What a training leaves step by step, as digests: of the batch, the weights, the buffers and the flags."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from typing import Any, TypeAlias

import torch

from hydra_engine.errors import PauseTask
from hydra_engine.tasks import Callback, ModelTask, TaskReport
from partitioners.reach import plain_state

Digest: TypeAlias = bytes

# Batches that a loader gives before it is opened again.
BATCHES = 2


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a step has left, once its callbacks have returned."""

    loss: float
    weights: Mapping[str, Digest]  # by the user's name
    buffers: Mapping[str, Digest]
    flags: Mapping[str, bool]  # "training" of modules, "requires_grad" of parameters
    random: Digest  # state of torch's generator, as callbacks see it; b"": not looked at


@dataclass(kw_only=True)
class Record:
    """A training: its batches, its steps and its validations, in their order."""

    batches: list[Digest] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    validation_losses: list[float] = field(default_factory=list)
    averages: Mapping[str, Digest] = field(default_factory=dict)  # of weights, at the end (ema_decay)
    num_layers: int = 0
    error: str | None = None  # the first line of what ended it


class FirstBatches:
    """The first batches of a loader, each time that it is opened, with their digests."""

    def __init__(self, loader: Iterable[Any], most: int, seen: list[Digest] | None = None) -> None:
        self._loader, self._most, self._seen = loader, most, seen

    def __iter__(self) -> Iterator[Any]:
        return self._reading(iter(self._loader))  # what opening it draws is drawn now

    def _reading(self, iterator: Iterator[Any]) -> Iterator[Any]:
        for batch in islice(iterator, self._most):
            if self._seen is not None:
                self._seen.append(digest(batch))
            yield batch


class Recorder(Callback):
    """Records a task's steps after all of its callbacks; pauses it after one of them, if asked to."""

    def __init__(self, task: ModelTask, record: Record, pause_after: int | None = None) -> None:
        self._model, self._record, self._pause_after = task.model, record, pause_after
        self._is_whole = task.accumulation_steps == 1  # else micro-batches have streams of their own

    def on_step(self, report: TaskReport) -> None:
        model = self._model
        modules = (model if model.source is None else model.source).named_modules()
        flags = {f"{name or 'the model'}.training": module.training for name, module in modules}
        flags |= {f"{name}.requires_grad": each.requires_grad for name, each in model.named_parameters()}
        step = Step(
            loss=report.losses[-1],
            weights={name: digest(each) for name, each in model.named_parameters()},
            buffers={name: digest(each) for name, each in model.named_buffers()},
            flags=flags,
            random=digest(torch.get_rng_state()) if self._is_whole else b"",
        )
        self._record.steps.append(step)
        if report.steps == self._pause_after:
            raise PauseTask("saved, and resumed")

    def on_validation(self, report: TaskReport) -> None:
        self._record.validation_losses.append(report.validation_losses[-1])


def digest(value: Any) -> Digest:
    """Return a digest of all that a value holds: of every bit of tensors, and of numbers and strings."""
    return blake2b(repr(plain_state(("", value))).encode(), digest_size=16).digest()
