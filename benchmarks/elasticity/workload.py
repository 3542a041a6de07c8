"""The training that all programs of this benchmark do, and the log by which `main.py` follows it."""

import argparse
import hashlib
import json
import os
import sys
import time
from pathlib import Path

import torch
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from gpt import gpt, token_batches

WIDTH, NUM_BLOCKS, NUM_HEADS, LENGTH, BATCH_SIZE, LR = 128, 4, 4, 64, 16, 1e-3
CHECKPOINT_EVERY = 10  # steps


def model():
    """A GPT of 867,328 parameters, with the same weights each time."""
    return gpt(WIDTH, NUM_BLOCKS, NUM_HEADS, LENGTH)


def batches(num_steps):
    """The batches of all steps: each a global batch, however many work at it."""
    return [(tokens, target.view_as(tokens)) for tokens, target in token_batches(num_steps, BATCH_SIZE, LENGTH)]


def loss_fn(logits, target):
    return F.cross_entropy(logits, target.flatten())


def options(*more):
    """The arguments of a program: how many steps, the log, the folder of checkpoints, and `more`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--commits", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    for name in more:
        parser.add_argument(name)
    return parser.parse_args()


class Log:
    """A file of JSON lines, which several processes append to; `time.monotonic` is one clock for all of them."""

    def __init__(self, path):
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def add(self, **fields):
        os.write(self._file, (json.dumps({"s": time.monotonic(), **fields}) + "\n").encode())

    def add_weights(self, found, task="gpt"):
        """Note what the training came to, in few characters."""
        content = b"".join(parameter.detach().numpy().tobytes() for parameter in found.parameters())
        self.add(task=task, weights=hashlib.sha256(content).hexdigest())


def one_thread():
    """Let each device, and each process, compute with one thread."""
    torch.set_num_threads(1)
