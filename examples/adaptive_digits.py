"""An MLP learns scikit-learn's digits to one validation loss, with batches of 32 and with batches that adapt.

    python examples/adaptive_digits.py
    python examples/adaptive_digits.py --plot digits.png      # needs matplotlib: pip install 'hydra_engine[plot]'

The model does not fit the device, and the link is slow: every step loads the model twice, whatever its batch. So larger
batches pay for as long as the gradients are noisy. What was chosen is printed, and drawn.
"""

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from single_task_vision import digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from hydra_engine import Callback, EmulatedDevice, ModelOrchestrator, ModelTask, StopTask
from hydra_engine.adaptive import AdaptiveDataLoader


class Workload(NamedTuple):
    """What is trained, on which device, and to which validation loss."""

    name: str
    model: Callable[[], nn.Module]
    loss_fn: Callable[[Any, Any], torch.Tensor]
    train: Any  # data sets
    validation: Any
    batch_size: int
    max_batch_size: int
    lr: float
    optimizer: Any
    memory: str
    bandwidth: str
    target: float
    epochs: int


class Race(NamedTuple):
    """One training: seconds to the target, or None; (seconds, loss) of each validation; the record of its steps."""

    seconds: float | None
    num_steps: int
    validations: list[tuple[float, float]]
    choices: list[Any]


class Until(Callback):
    """Ends a task at a validation loss, and notes when each validation was over."""

    def __init__(self, target):
        self.target = target
        self.began_s = None
        self.validations = []

    def on_validation(self, report):
        self.validations.append((time.perf_counter() - self.began_s, report.validation_losses[-1]))
        if report.validation_losses[-1] <= self.target:
            raise StopTask


def race(workload, *, adapts, seed=0):
    """Train to the target; plans are made before the clock starts."""
    torch.manual_seed(seed)
    loader = AdaptiveDataLoader(workload.train, workload.batch_size, shuffle=True)
    if adapts:
        loader.autoscale_batch_size(workload.max_batch_size)
    until = Until(workload.target)
    task = ModelTask(
        workload.model(),
        workload.loss_fn,
        loader,
        lr=workload.lr,
        epochs=workload.epochs,
        name=workload.name,
        optimizer=workload.optimizer,
        seed=seed,
        validation=DataLoader(workload.validation, batch_size=2 * workload.batch_size),
        callbacks=[until],
    )
    orchestra = ModelOrchestrator([task], devices=[EmulatedDevice(workload.memory, bandwidth=workload.bandwidth)])
    orchestra.verbose = 0
    orchestra.generate()
    until.began_s = time.perf_counter()
    report = orchestra.train_models().tasks[workload.name]
    reached = bool(until.validations) and until.validations[-1][1] <= workload.target
    seconds = until.validations[-1][0] if reached else None
    return Race(seconds, report.steps, until.validations, report.adaptive)


def describe(name, found, target):
    """One line on a race."""
    if found.seconds is None:
        return f"{name}: validation loss {found.validations[-1][1]:.3f} after {found.num_steps} steps, not {target}"
    return f"{name}: validation loss {target} after {found.seconds:.1f} s and {found.num_steps} steps"


def plot(path, workload, fixed, adaptive):
    """Draw the validation losses of both over time, and the batches of the one that adapts."""
    try:
        import matplotlib
    except ImportError:
        sys.exit("--plot needs matplotlib: pip install 'hydra_engine[plot]'")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(7, 6), layout="constrained")
    for label, found in ((f"batches of {workload.batch_size}", fixed), ("batches that adapt", adaptive)):
        above.plot(*zip(*found.validations, strict=True), marker=".", label=label)
    above.axhline(workload.target, linewidth=0.8, linestyle="--", color="gray")
    above.set(xlabel="seconds", ylabel="validation loss", yscale="log", title=workload.name)
    above.legend()
    below.step([choice.step for choice in adaptive.choices], [choice.batch_size for choice in adaptive.choices])
    below.set(xlabel="step", ylabel="samples of the batch", yscale="log")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    print(f"drawn: {path}")


def compare(workload, path):
    """Race both ways, say what came of it, and draw it where a path is given."""
    fixed, adaptive = race(workload, adapts=False), race(workload, adapts=True)
    print(describe(f"batches of {workload.batch_size}", fixed, workload.target))
    print(describe("batches that adapt", adaptive, workload.target))
    sizes = [choice.batch_size for choice in adaptive.choices]
    print(f"batches from {min(sizes)} to {max(sizes)} samples; the last step: {adaptive.choices[-1]}")
    if path:
        plot(path, workload, fixed, adaptive)


def mlp():
    """The untrained model, the same at every call."""
    torch.manual_seed(0)
    layers = [nn.Flatten(), nn.Linear(64, 256), nn.ReLU()]
    for _ in range(3):
        layers += [nn.Linear(256, 256), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(256, 10))


def workload(epochs=25, target=0.45):
    """Digits through a link of 64 MiB/s."""
    train, validation = digits()
    return Workload(
        "digits",
        mlp,
        F.cross_entropy,
        train,
        validation,
        batch_size=32,
        max_batch_size=512,
        lr=0.02,
        optimizer=partial(torch.optim.SGD, momentum=0.9),
        memory="1536KiB",
        bandwidth="64MiB",
        target=target,
        epochs=epochs,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=25, help="at most")
    parser.add_argument("--target", type=float, default=0.45, help="validation loss to train to")
    parser.add_argument("--plot", metavar="FILE", help="draw losses and batches to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    compare(workload(args.epochs, args.target), args.plot)


if __name__ == "__main__":
    main()
