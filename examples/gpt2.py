"""GPT-2 of two scales, the text that it reads, and devices: what `hydra_12_models.py` and `scaling_hydra.py` share.

Models begin with random weights, and read a text byte by byte: nothing is downloaded. Needs
`pip install 'hydra_engine[huggingface]'`.
"""

import argparse
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel

from hydra_engine import CudaDevice, EmulatedDevice, ModelTask
from hydra_engine.integrations.huggingface import causal_lm_loss, sequential


class Scale(NamedTuple):
    """A size of GPT-2, and how it is trained."""

    width: int
    num_blocks: int
    num_heads: int
    context: int  # tokens that the model sees
    vocabulary: int
    memory: str | None  # of each emulated device; None: trains on GPUs
    optimizer: Callable
    early_release: bool  # SGD then needs little more DRAM than the weights


SCALES = {
    "tiny": Scale(128, 4, 4, 16, 256, "8MiB", torch.optim.AdamW, False),
    "paper": Scale(1600, 48, 25, 1024, 50257, None, torch.optim.SGD, True),  # GPT-2 XL
}


class Windows(Dataset):
    """Windows of a text, evenly spaced: the ids of its bytes, and the same as labels."""

    def __init__(self, text, num_windows, context):
        if len(text) < context + num_windows:
            raise ValueError(f"text: {len(text)} bytes, limit: at least {context + num_windows}; give a longer one")
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.starts = range(0, len(text) - context + 1, (len(text) - context) // num_windows)[:num_windows]
        self.context = context

    def __len__(self):
        return len(self.starts)

    def __getitem__(self, index):
        window = self.bytes[self.starts[index] : self.starts[index] + self.context].long()
        return window, window.clone()


def read_text(path):
    """The file's bytes, or else the source of the standard library."""
    if path is not None:
        return path.read_bytes()
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return b"".join(source.read_bytes() for source in sources)


def make_task(scale, windows, validation=None, *, name, batch_size, lr, seed):
    """A GPT-2 with weights of its own, and one epoch of windows in order."""
    torch.manual_seed(seed)
    config = GPT2Config(
        n_embd=scale.width,
        n_layer=scale.num_blocks,
        n_head=scale.num_heads,
        n_positions=scale.context,
        vocab_size=scale.vocabulary,
        bos_token_id=0,
        eos_token_id=0,
    )
    return ModelTask(
        sequential(GPT2LMHeadModel(config).train()),
        causal_lm_loss,
        DataLoader(windows, batch_size=batch_size),
        lr,
        name=name,
        optimizer=scale.optimizer,
        early_release=scale.early_release,
        seed=seed,
        validation=None if validation is None else DataLoader(validation, batch_size=batch_size),
    )


def make_devices(scale, number):
    """Emulated devices, or the first GPUs; ends the program where there are fewer."""
    if scale.memory is not None:
        return [EmulatedDevice(memory=scale.memory) for _ in range(number)]
    if torch.cuda.device_count() < number:
        sys.exit(f"--scale paper: {torch.cuda.device_count()} GPUs, limit: at least {number}; take --scale tiny")
    return [CudaDevice(index) for index in range(number)]


def parser_of(description):
    """What both programs take."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", choices=SCALES, default="tiny", help="tiny (default), or paper: GPT-2 XL on GPUs")
    parser.add_argument("--text", type=Path, help="train on this file (default: the standard library's source)")
    parser.add_argument("--seed", type=int, default=0)
    return parser
