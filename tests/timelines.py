"""Timelines of runs that are trained now: `python -m tests.timelines` makes those in docs/screens/.

timeline-2.png: four tasks on 2 emulated devices, one of which is stopped early.
timeline-64.png: 72 tasks on 64 emulated devices, which share this machine's cores.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from hydra_engine import Callback, EmulatedDevice, ModelOrchestrator, ModelTask, Report, StopTask
from hydra_engine.pictures import timeline

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "screens"


class Stops(Callback):
    """Ends its task after some steps."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps

    def on_step(self, report) -> None:
        if report.steps == self._num_steps:
            raise StopTask("this was enough")


def task(name, *, seed, width, depth, num_batches, epochs=1, lr=0.3, **options):
    """A task that learns to tell which of its 8 classes a sample was made of."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(8, width, generator=generator)

    def batch():
        target = torch.randint(8, (64,), generator=generator)
        return centres[target] + 0.5 * torch.randn(64, width, generator=generator), target

    data = [batch() for _ in range(num_batches)]
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())]
    torch.manual_seed(seed)
    model = nn.Sequential(*layers, nn.Linear(width, 8))
    return ModelTask(
        model,
        F.cross_entropy,
        data,
        lr,
        epochs,
        name=name,
        seed=seed,
        validation=[batch() for _ in range(2)],
        **options,
    )


def train(tasks, memory: str, num_devices: int) -> Report:
    """Train tasks on emulated devices."""
    devices = [EmulatedDevice(memory, bandwidth="400MB") for _ in range(num_devices)]
    orchestra = ModelOrchestrator(tasks, devices=devices, homes="host")  # pictures show loads
    orchestra.verbose = 0
    return orchestra.train_models()


def two_devices() -> Report:
    return train(
        [
            task("wide", seed=0, width=512, depth=3, num_batches=6, epochs=2, lr=0.1),
            task("deep", seed=1, width=256, depth=8, num_batches=6, epochs=2),
            task("small", seed=2, width=128, depth=2, num_batches=6, epochs=3),
            task("stopped", seed=3, width=256, depth=4, num_batches=6, epochs=2, callbacks=[Stops(7)]),
        ],
        "3.5MiB",
        2,
    )


def many_devices() -> Report:
    return train([task(f"trial-{k}", seed=k, width=96, depth=3, num_batches=3) for k in range(72)], "256KiB", 64)


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    report = two_devices()
    print(report.summary())
    timeline(report, FOLDER / "timeline-2.png")
    report = many_devices()
    print(report.summary())
    begun_s = min(span.start_s for span in report.spans)  # after 72 tasks were set up
    timeline(report, FOLDER / "timeline-64.png", start_s=begun_s)


if __name__ == "__main__":
    main()
