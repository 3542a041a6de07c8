"""Values of a step and of a validation: callbacks find them in the report, and loggers are given them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """The values of one committed training step.

    Attributes:
        step: training steps committed, this one included.
        epoch: of the step's batch, from 0.
        loss: over all micro-batches; may be NaN or infinite.
        learning_rates: that the step was made with, one per parameter group; none of an optimizer without "lr".
        grad_norm: norm of all gradients before clipping. None: nothing has computed it, so that it costs nothing here.
            `max_grad_norm` and batches that adapt compute it.
        num_samples: of the step's batch.
        samples_per_s: these, over the seconds since the task's last commit of a training step or evaluation batch.
        time_s: of the commit, in seconds since 1970.
    """

    task: str
    step: int
    epoch: int
    loss: float
    learning_rates: tuple[float, ...]
    grad_norm: float | None
    num_samples: int
    samples_per_s: float
    time_s: float

    def values(self) -> dict[str, float]:
        """Return the values by the names that files have: "loss", "lr", "grad_norm", "samples_per_s".

        "lr_0", "lr_1" and so on where there are several parameter groups; without those that there are not.
        """
        values = {"loss": self.loss}
        if len(self.learning_rates) == 1:
            values["lr"] = self.learning_rates[0]
        else:
            values |= {f"lr_{k}": lr for k, lr in enumerate(self.learning_rates)}
        if self.grad_norm is not None:
            values["grad_norm"] = self.grad_norm
        values["samples_per_s"] = self.samples_per_s
        return values


@dataclass(frozen=True, kw_only=True)
class ValidationReport:
    """The figures of one validation.

    Attributes:
        step: training steps committed before it.
        epoch: in which it was made, from 0.
        metrics: by name.
        time_s: of its end, in seconds since 1970.
    """

    task: str
    step: int
    epoch: int
    loss: float
    metrics: dict[str, float]
    time_s: float

    def values(self) -> dict[str, float]:
        """Return the figures by the names that files have: "validation_loss", and "metrics_NAME" of each metric."""
        return {"validation_loss": self.loss, **{f"metrics_{name}": value for name, value in self.metrics.items()}}
