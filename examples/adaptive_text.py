"""A byte-level GPT learns a text to one validation loss, with batches of 4 and with batches that adapt.

    python examples/adaptive_text.py
    python examples/adaptive_text.py --text book.txt --plot text.png

As examples/adaptive_digits.py, with AdamW, whose learning rate grows with the square root of what a batch is worth.
"""

import argparse
from pathlib import Path

import torch
from adaptive_digits import Workload, compare
from torch.utils.data import random_split

from hydra_engine.cli import demo

NUM_WINDOWS = 800
CONFIG = demo.Config(width=256, num_blocks=1, lr=1e-3)


def workload(text=None, epochs=12, target=2.5, num_windows=NUM_WINDOWS):
    """A text through a link of 64 MiB/s."""
    split = torch.Generator().manual_seed(0)
    num_validated = num_windows // 8
    windows = demo.windows(demo.read_text(text), num_windows)
    train, validation = random_split(windows, [num_windows - num_validated, num_validated], split)
    return Workload(
        "text",
        lambda: demo.gpt(CONFIG, 0),
        demo.next_byte_loss,
        train,
        validation,
        batch_size=4,
        max_batch_size=64,
        lr=CONFIG.lr,
        optimizer=torch.optim.AdamW,
        memory="8MiB",
        bandwidth="64MiB",
        target=target,
        epochs=epochs,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="train on this file (default: the standard library's source)")
    parser.add_argument("--epochs", type=int, default=12, help="at most")
    parser.add_argument("--target", type=float, default=2.5, help="validation loss to train to")
    parser.add_argument("--windows", type=int, default=NUM_WINDOWS, help="of the text, validation's too")
    parser.add_argument("--plot", metavar="FILE", help="draw losses and batches to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    compare(workload(args.text, args.epochs, args.target, args.windows), args.plot)


if __name__ == "__main__":
    main()
