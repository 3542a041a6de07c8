"""A byte-level GPT in a training loop of one's own: a global batch, in micro-batches that a GPU can take.

    python examples/elastic_text.py
    python examples/elastic_text.py --max-gpu-batch-size 8 --text book.txt

It trains with whole global batches too, and compares the losses of all steps. It needs no orchestrator.
"""

import argparse
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

from hydra_engine import elastic
from hydra_engine.cli import demo

CONFIG = demo.Config(width=64, num_blocks=2, lr=3e-3)
SEED = 0
TOLERANCE = 1e-3  # of losses: sums are in another order, which training lets grow


def train(windows, split):
    """Train with a split of the global batch; return the loss of every step."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    model = nn.DataParallel(demo.gpt(CONFIG, SEED)).to(device)
    optimizer = elastic.GradientAccumulation(torch.optim.AdamW(model.parameters(), lr=CONFIG.lr), split.steps)
    losses = []
    torch.manual_seed(SEED)
    for inputs, targets in DataLoader(windows, batch_size=split.global_batch_size, shuffle=True):
        loss_of_step = 0.0
        parts = zip(inputs.tensor_split(split.steps), targets.tensor_split(split.steps), strict=True)
        for x, y in parts:
            x, y = x.to(device), y.to(device)
            optimizer.zero_grad()
            loss = optimizer.weigh(demo.next_byte_loss(model(x), y), len(x), len(inputs))
            loss.backward()
            optimizer.step()
            loss_of_step += loss.item() / split.steps
        losses.append(loss_of_step)
    return losses


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="train on this file (default: the standard library's source)")
    parser.add_argument("--global-batch-size", type=int, default=32)
    parser.add_argument("--max-gpu-batch-size", type=int, default=12)
    parser.add_argument("--gpus", type=int, help="default: all that are visible, at least 1")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)

    windows = demo.windows(demo.read_text(args.text), args.steps * args.global_batch_size)
    split = elastic.init(args.global_batch_size, args.max_gpu_batch_size, args.gpus)
    losses = train(windows, split)
    print(f"{split}\nin {split.steps} rounds: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    whole = train(windows, elastic.init(args.global_batch_size, args.global_batch_size, args.gpus))
    print(f"whole:       loss {whole[0]:.4f} -> {whole[-1]:.4f}")
    difference = max(abs(ours - theirs) for ours, theirs in zip(losses, whole, strict=True))
    print(
        f"largest difference of {len(losses)} losses: {difference:.1e}, within {TOLERANCE}: {difference <= TOLERANCE}"
    )
    sys.exit(0 if difference <= TOLERANCE else 1)


if __name__ == "__main__":
    main()
