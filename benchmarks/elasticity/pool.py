"""The engine: one process, whose devices join, leave and fail while it trains."""

import threading

import torch
import workload

from hydra_engine import Callback, EmulatedDevice, ModelOrchestrator, ModelTask
from hydra_engine.devices.emulated import OpenEmulatedDevice
from hydra_engine.errors import DeviceFailed
from partitioners import Presharded

MEMORY = "64MiB"


class Breakable(EmulatedDevice):
    """A device whose next copy fails, once, when `is_broken` was set."""

    is_broken = False

    def open(self, index, trace, num_threads, arena_bytes=None):
        return OpenBreakable(self, self.name_at(index), trace, num_threads, arena_bytes)


class OpenBreakable(OpenEmulatedDevice):
    def __init__(self, spec, *arguments):
        super().__init__(spec, *arguments)
        self._spec = spec

    def _copy(self, lane, pairs, num_bytes, *, urgent):
        if self._spec.is_broken:
            self._spec.is_broken = False
            raise DeviceFailed(self.name, "its cable was pulled")
        super()._copy(lane, pairs, num_bytes, urgent=urgent)


class Follow(Callback):
    """Notes each commit, and lets something happen after one of them, in another thread as an operator would."""

    def __init__(self, log, at_step, event):
        self.log, self.at_step, self.event = log, at_step, event

    def on_step(self, report):
        self.log.add(task="gpt", step=report.steps)
        if report.steps == self.at_step:
            self.log.add(event=True)
            threading.Thread(target=self.event).start()


def main():
    options = workload.options("--event", "--at")
    workload.one_thread()
    log = workload.Log(options.commits)
    devices = [Breakable(MEMORY), Breakable(MEMORY)]
    events = {
        "none": lambda: None,
        "join": lambda: orchestra.add_device(devices[1]),
        "leave": lambda: orchestra.remove_device("emulated:1"),
        "crash": lambda: setattr(devices[1], "is_broken", True),
    }
    task = ModelTask(
        model := workload.model(),
        workload.loss_fn,
        workload.batches(options.steps),
        workload.LR,
        name="gpt",
        optimizer=torch.optim.AdamW,
        partitioner=Presharded([2, 4, 6]),
        accumulation_steps=2,  # so that a step is spread over both devices
        seed=0,
        callbacks=[Follow(log, int(options.at), events[options.event])],
    )
    orchestra = ModelOrchestrator(
        [task],
        devices=devices[: 1 if options.event in ("join", "none") else 2],
        checkpoint_dir=options.folder,
        checkpoint_every=workload.CHECKPOINT_EVERY,
        max_failures=1,
    )
    orchestra.verbose = 0
    orchestra.train_models().raise_failures()
    log.add(devices=orchestra.devices)
    log.add_weights(model)


if __name__ == "__main__":
    main()
