"""Batches whose sizes are chosen as they are read: what a loader and its chooser are asked, and what they are told."""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from hydra_engine.system import begin_workers


class LaneSeconds(NamedTuple):
    """Seconds of one step, or of one step on the average: all in all, and how long lanes of its devices worked."""

    step_s: float
    compute_s: float
    link_s: float = 0.0


class StepMeasures(NamedTuple):
    """Squared norms of one step's gradients.

    sizes: samples by micro-batch, which weigh its mean gradient. micro: of each micro-batch's mean gradient, by
    parameter group. total: of the step's.
    """

    sizes: tuple[float, ...]
    micro: tuple[tuple[float, ...], ...]
    total: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class StepChoice:
    """A step whose batch was chosen: what was chosen, and the figures that it was chosen by.

    Attributes:
        step: index of the step.
        batch_size: samples of the step.
        micro_batches: that they are split into; sizes differ by at most 1.
        devices: that the step could be spread over as its batch was read.
        desired_devices: the number of devices that would be worth having.
        noise: the gradient noise scale in samples; None: not known yet.
        gain: steps of the initial batch that this step is worth, as predicted.
        progress: sum of the gains before this step.
        goodput: predicted, in samples of the initial batch per second; None: not known yet.
        factors: of the learning rate, by parameter group; empty until the step begins.
        seconds: of the step, as measured, with those of its devices' lanes; None: it is not over.
    """

    step: int
    batch_size: int
    micro_batches: int
    devices: int = 1
    desired_devices: int = 1
    noise: float | None = None
    gain: float = 1.0
    progress: float = 0.0
    goodput: float | None = None
    factors: tuple[float, ...] = ()
    seconds: LaneSeconds | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        numbers = (self.gain, self.progress, *self.factors)
        is_split = 1 <= self.micro_batches <= self.batch_size
        if not is_split or self.gain <= 0 or self.progress < 0 or not all(map(math.isfinite, numbers)):
            raise ValueError(
                f"StepChoice: {self}, limit: at least one sample in each micro-batch, a gain above 0, finite progress "
                f"and factors; give a choice as TaskReport.adaptive has it"
            )

    @property
    def micro_batch(self) -> int:
        """Samples of the largest micro-batch."""
        return -(-self.batch_size // self.micro_batches)

    @property
    def short(self) -> str:
        """The batch and the first factor, for a line of progress."""
        return f"batch {self.batch_size}" + (f" lr x{self.factors[0]:.3g}" if self.factors else "")

    def __str__(self) -> str:
        factors = " ".join(f"{factor:.3g}" for factor in self.factors) or "-"
        noise = "-" if self.noise is None else f"{self.noise:.3g}"
        goodput = "-" if self.goodput is None else f"{self.goodput:.3g} samples/s"
        return (
            f"batch {self.batch_size} in {self.micro_batches} micro-batches on {self.devices} devices "
            f"({self.desired_devices} desired), lr x {factors}, noise scale {noise}, gain {self.gain:.3g}, progress "
            f"{self.progress:.1f}, goodput {goodput}"
        )

    @staticmethod
    def to_columns(choices: Sequence[StepChoice]) -> dict[str, Tensor]:
        """Return choices as columns in float64, which hold every figure as it is: a run of days has millions."""
        columns: dict[str, list[Any]] = {name: [getattr(each, name) for each in choices] for name in _COLUMNS}
        columns |= {name: [math.nan if each is None else each for each in columns[name]] for name in _MAY_BE_NONE}
        factors = [each.factors for each in choices]
        columns |= {"factors": factors, "seconds": [each.seconds or [math.nan] * 3 for each in choices]}
        return {name: torch.tensor(each, dtype=torch.float64) for name, each in columns.items()}

    @classmethod
    def from_columns(cls, saved: Mapping[str, Tensor]) -> list[StepChoice]:
        """Return what `to_columns` was given."""
        columns: dict[str, Any] = {name: saved[name].tolist() for name in (*_COLUMNS, "factors", "seconds")}
        columns |= {name: map(int, columns[name]) for name in _WHOLE}
        columns |= {name: [None if math.isnan(each) else each for each in columns[name]] for name in _MAY_BE_NONE}
        columns["factors"] = map(tuple, columns["factors"])
        columns["seconds"] = [None if math.isnan(each[0]) else LaneSeconds(*each) for each in columns["seconds"]]
        return [cls(**dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]


_WHOLE = ("step", "batch_size", "micro_batches", "devices", "desired_devices")
_MAY_BE_NONE = ("noise", "goodput")
_COLUMNS = (*_WHOLE, *_MAY_BE_NONE, "gain", "progress")


class BatchChooser:
    """Chooses the batches of one task as they are read, and learns from its steps; derive from it.

    Called by several threads, for one task. A choice follows from the one before it and from what was learned: where a
    reader goes back, it asks once more after an earlier one. What raises fails the task; but `factored` is asked by the
    thread that decides, as a policy is, so it answers at once and raises nothing.

    Attributes:
        most: samples of a micro-batch; room for more is not looked for.
    """

    most: int = sys.maxsize

    # -- batches

    def choose(self, after: StepChoice | None, devices: int = 1, max_devices: int = 1) -> StepChoice:
        """Choose the step that follows `after`; None: the first. The one method that there has to be.

        devices: that it is spread over. max_devices: that there may ever be.
        """
        raise NotImplementedError

    def is_over(self, after: StepChoice | None, epoch: int) -> bool | None:
        """Return True if an epoch is over after this choice; None: it is once the data was read through."""
        return None

    def given(self, choice: StepChoice, batch_size: int) -> StepChoice:
        """Return the choice as a batch of this size makes it: at the end of the data there may be less."""
        return self.sized(choice, batch_size)

    def sized(self, choice: StepChoice, batch_size: int) -> StepChoice:
        """Return the choice for a batch of this size, which is read for a plan."""
        return replace(choice, batch_size=batch_size, micro_batches=min(batch_size, choice.micro_batches))

    def steps_left(self, choice: StepChoice, epochs: int) -> int | None:
        """Predict how many steps of so many epochs there are from this one on; None: only the data says so."""
        return None

    # -- steps

    def begin(self, optimizer: torch.optim.Optimizer, *, sums_losses: bool = False) -> None:
        """The task begins to train, or goes on; sums_losses: its loss is a sum over samples, not a mean.

        Raises ValueError for an optimizer that batches cannot be chosen for.
        """

    def factored(self, choice: StepChoice) -> StepChoice:
        """Return the choice as its step begins: with factors of the learning rates by group, or none."""
        return choice

    def learn(self, choice: StepChoice, seconds: LaneSeconds, devices: int, measures: StepMeasures | None) -> bool:
        """Take in a step that was committed. Return True where `speedups` may have become others.

        seconds: of the step, on one of the devices that it was on. measures: None: it was skipped.
        """
        return False

    def speedups(self, max_devices: int) -> tuple[float, ...]:
        """Predict how many times as fast as on one device the task is on 1, 2, ... devices; empty: nobody knows."""
        return ()

    # -- memory

    def fixed_because(self, step: int) -> str | None:
        """Return why a step's micro-batches stay as they are; None: they may be made smaller."""
        return None

    def limit(self, micro_batch: int, batch: int | None = None) -> None:
        """There is no room for micro-batches, or batches, of more samples than these; None: as far as was known."""

    def smaller(self, choice: StepChoice) -> StepChoice:
        """Return a choice in more micro-batches, of one sample at least: a device had no room for these."""
        return replace(choice, micro_batches=min(choice.batch_size, 2 * choice.micro_batches))

    # -- state

    def state_dict(self) -> dict[str, Any]:
        """Return what was learned, as plain values: it is saved with the task."""
        return {}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""


class GuidedLoader(ABC):
    """A loader that is asked for the size of each batch; `ModelTask` takes it, and asks as its chooser says.

    It keeps its place: a new iteration goes on with the pass over the data that is in progress. Random numbers that it
    draws come from torch's default generator, or from generators that it holds.

    Attributes:
        guide: asked by what `iter()` returns for the samples of each batch; None ends the epoch. Without a guide,
            `iter()` gives a pass in batches of their usual size.
        last_size: samples of the batch that was given last.
        num_passes: passes over the data that are over.
        plain: a loader of the same data that keeps no place; for validations.
    """

    guide: Callable[[], int | None] | None = None
    last_size: int = 0
    num_passes: int = 0
    plain: Any

    @property
    def adapts(self) -> bool:
        """True if it has a chooser: as it is when the task is made."""
        return True

    @abstractmethod
    def chooser(self) -> BatchChooser:
        """Make a chooser for one task. Raises ValueError where no task can be trained so."""

    @abstractmethod
    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over batches, which goes on to ask the guide that there is now."""

    @abstractmethod
    def begin_anew(self) -> None:
        """Leave the pass in progress: the next iteration begins another one."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the place behind the last batch, with `num_passes`. What it holds does not change."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on behind that batch."""

    @staticmethod
    def opened(loader: DataLoader[Any]) -> Iterator[Any]:
        """Return torch's iterator; its workers begin without the memory that updates write to."""
        with begin_workers(loader.num_workers):
            return iter(loader)
