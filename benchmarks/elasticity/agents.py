"""The engine under torchrun: `examples/under_torchrun.py` with the models of this benchmark, two of them."""

import os
import sys
from pathlib import Path

import torch
import workload

from hydra_engine import Callback, ModelTask
from partitioners import Presharded

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import under_torchrun


class Follow(Callback):
    """Notes each commit."""

    def __init__(self, log):
        self.log = log

    def on_step(self, report):
        self.log.add(task=report.name, step=report.steps)

    def on_task_end(self, report):
        if report.status == "finished":
            self.log.add_weights(MODELS[report.name], report.name)


MODELS = {}  # by the name of their task


def main():
    options = workload.options()
    workload.one_thread()
    log = workload.Log(options.commits)
    log.add(rank=int(os.environ["RANK"]), num_ranks=int(os.environ["WORLD_SIZE"]), pid=os.getpid())

    def make_task(name, epochs, callbacks):
        MODELS[name] = workload.model()
        return ModelTask(
            MODELS[name],
            workload.loss_fn,
            workload.batches(options.steps),
            workload.LR,
            epochs,
            name=name,
            optimizer=torch.optim.AdamW,
            partitioner=Presharded([2, 4, 6]),
            seed=0,
            callbacks=callbacks,
        )

    under_torchrun.make_task, under_torchrun.LRS = make_task, ("a", "b")
    under_torchrun.MEMORY = "64MiB"
    sys.exit(0 if under_torchrun.run(options.folder, 1, [Follow(log)]) else 1)


if __name__ == "__main__":
    main()
