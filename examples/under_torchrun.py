"""Models that train under torchrun, one engine for each agent; agents of this machine may come, go and crash.

    torchrun --nnodes=1:2 --nproc-per-node=1 --max-restarts=9 --rdzv-backend=c10d --rdzv-id=7 \
        --rdzv-endpoint=localhost:29400 examples/under_torchrun.py --folder runs/7

In two terminals; the second one may come at any time. Each process trains the tasks of its rank. Whenever the number of
agents changes, torchrun starts all processes anew, and each task goes on from its last checkpoint, wherever it is then.
docs/elastic.md says more.
"""

import argparse
import fcntl
import hashlib
import os
import sys
import threading
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from hydra_engine import Callback, EmulatedDevice, ModelOrchestrator, ModelTask, PauseTask
from hydra_engine.checkpoints import furthest

MEMORY = "1MiB"  # of the device; a GPU of its own: CUDA_VISIBLE_DEVICES=1 torchrun ...
LRS = {"a": 1e-3, "b": 5e-4, "c": 2e-4, "d": 1e-4}


def make_task(name, epochs, callbacks=()):
    """The same task each time: a task is known by its name, and its bits are those of its seed."""
    torch.manual_seed(0)
    inputs = torch.randn(2000, 64)
    loader = DataLoader(TensorDataset(inputs, inputs[:, :10].argmax(dim=1)), batch_size=50, shuffle=True)
    blocks = [nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Dropout(0.1)) for _ in range(4)]
    model = nn.Sequential(nn.Linear(64, 256), *blocks, nn.Linear(256, 10))
    options = {"optimizer": torch.optim.AdamW, "seed": 1, "callbacks": callbacks}
    return ModelTask(model, F.cross_entropy, loader, LRS[name], epochs, name=name, **options)


class Others(Callback):
    """Watches the processes of the other ranks, and pauses all tasks here once one of them, or the agent, is gone.

    A process holds a lock as long as it lives. torchrun itself tells nobody that an agent has left.
    """

    def __init__(self, folder, rank, num_ranks):
        self.is_one_gone = False
        self._paths = [folder / f"alive-{each}" for each in range(num_ranks)]
        self._own = self._paths.pop(rank).open("w")
        fcntl.flock(self._own, fcntl.LOCK_EX)
        self._agent, self._seen = os.getppid(), set()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self):
        while not self._is_over.wait(1.0):
            self.look()

    def look(self):
        """Note who is there, and whether one is gone who was there."""
        alive = {path for path in self._paths if is_locked(path)}
        if self._seen - alive or os.getppid() != self._agent:
            self.is_one_gone = True
        self._seen |= alive

    def on_step(self, report):
        if self.is_one_gone:
            raise PauseTask

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._is_over.set()
        self._thread.join()
        self._own.close()


def is_locked(path):
    """True where a process is alive that holds this lock."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def train(folder, rank, num_ranks, epochs=3, callbacks=()):
    """Train the tasks of this rank, each from where it is saved furthest; models of those that are through."""
    tasks = {name: make_task(name, epochs, callbacks) for name in list(LRS)[rank::num_ranks]}
    if not tasks:
        return {}
    own = folder / f"rank-{rank}"
    orchestra = ModelOrchestrator(
        list(tasks.values()), devices=[EmulatedDevice(MEMORY)], checkpoint_dir=own, checkpoint_every=10
    )
    orchestra.verbose = 0
    for name in tasks:
        found = furthest([own, *sorted(folder.glob("rank-*"))], name)
        if found not in (None, own):
            orchestra.resume_task(name, found)
    report = orchestra.train_models(resume=True)
    report.raise_failures()
    return {name: task.model for name, task in tasks.items() if report.tasks[name].status == "finished"}


def run(folder, epochs, callbacks=()):
    """Train the tasks of this process, and wait for the others; False where one is gone before all are through."""
    folder.mkdir(parents=True, exist_ok=True)
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    through = {name: folder / f"{name}-is-through-{epochs}" for name in LRS}
    with Others(folder, rank, num_ranks) as others:
        for name, model in train(folder, rank, num_ranks, epochs, [others, *callbacks]).items():
            weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
            print(f"{name}: weights {hashlib.sha256(weights).hexdigest()[:16]}")
            through[name].touch()
        # Where one agent ends while others work, torchrun lets nobody join them any more.
        while not (is_through := all(path.exists() for path in through.values())) and not others.is_one_gone:
            time.sleep(1.0)
    return is_through


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, required=True, help="of checkpoints, the same for all agents")
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    sys.exit(0 if run(options.folder, options.epochs) else 1)  # 1: torchrun starts this process again


if __name__ == "__main__":
    main()
