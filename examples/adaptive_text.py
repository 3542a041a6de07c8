"""A byte-level GPT learns a text to one validation loss, with batches of 16 and with batches that adapt.

    python examples/adaptive_text.py
    python examples/adaptive_text.py --text book.txt --plot text.png

As examples/adaptive_digits.py, with AdamW: its learning rate grows with the square root of what a larger batch is worth.
"""

import argparse
from pathlib import Path

import torch
from adaptive_digits import Workload, compare
from multi_task_lm import Config, Windows, gpt, next_byte_loss, read_text
from torch.utils.data import random_split

NUM_WINDOWS = 2400
CONFIG = Config(width=96, num_blocks=3, lr=1e-3)


def workload(text=None, epochs=20, target=2.5, num_windows=NUM_WINDOWS):
    """A text through a link of 64 MiB/s."""
    windows = Windows(read_text(text), num_windows)
    split = torch.Generator().manual_seed(0)
    train, validation = random_split(windows, [num_windows - num_windows // 6, num_windows // 6], split)
    return Workload(
        "text",
        lambda: gpt(CONFIG, 0),
        next_byte_loss,
        train,
        validation,
        batch_size=16,
        max_batch_size=256,
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
    parser.add_argument("--epochs", type=int, default=20, help="at most")
    parser.add_argument("--target", type=float, default=2.5, help="validation loss to train to")
    parser.add_argument("--windows", type=int, default=NUM_WINDOWS, help="of the text, validation's too")
    parser.add_argument("--plot", metavar="FILE", help="draw losses and batches to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    compare(workload(args.text, args.epochs, args.target, args.windows), args.plot)


if __name__ == "__main__":
    main()
