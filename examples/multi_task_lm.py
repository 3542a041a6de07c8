"""Four byte-level GPTs train together on two small devices, each model's training state over 4 times a device.

    python examples/multi_task_lm.py                       # on the source of Python's own standard library
    python examples/multi_task_lm.py --text book.txt       # on a file of yours
    python examples/multi_task_lm.py --verify              # and retrain one task in plain PyTorch: the same bits?
    python examples/multi_task_lm.py --device cuda:0 --memory 4GiB     # on a GPU, or on several: --device cuda:0,cuda:1

It prints the plan, live progress, and at the end what became of each task and what each device did.
"""

import argparse
import sys
import sysconfig
import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from hydra_engine import CudaDevice, EmulatedDevice, ModelOrchestrator, ModelTask

VOCABULARY = 256  # bytes
CONTEXT = 64  # tokens the model sees
BATCH_SIZE = 8
EPOCHS = 2
TEXT_BYTES = 4_000_000  # of the standard library's source
STATE_BYTES = 16  # per parameter: weight, gradient, and AdamW's two moments, 4 bytes each


class Config(NamedTuple):
    """What one task tries."""

    width: int
    num_blocks: int
    lr: float
    dropout: float = 0.0


CONFIGS = {
    "base": Config(width=192, num_blocks=8, lr=1e-3),
    "fast": Config(width=192, num_blocks=8, lr=3e-3),
    "wide": Config(width=256, num_blocks=4, lr=5e-4),
    "deep": Config(width=160, num_blocks=11, lr=1e-3, dropout=0.1),
}


# --- the model: an nn.Sequential, whose layers the engine cuts into shards ---


class Embed(nn.Module):
    """Byte and position embeddings."""

    def __init__(self, width):
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(0.1 * torch.randn(CONTEXT, width))

    def forward(self, tokens):
        return self.token(tokens) + self.position


class Attention(nn.Module):
    """Causal self-attention with heads of 32."""

    def __init__(self, width):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (-1, 32)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(-2))


class Residual(nn.Module):
    """Half a transformer block: x + inner(norm(x))."""

    def __init__(self, width, inner, dropout):
        super().__init__()
        self.inner = nn.Sequential(nn.LayerNorm(width), inner, nn.Dropout(dropout))

    def forward(self, x):
        return x + self.inner(x)


def gpt(config, seed):
    """The untrained model, the same at every call."""
    torch.manual_seed(seed)
    width = config.width
    layers = [Embed(width)]
    for _ in range(config.num_blocks):
        mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        layers += [Residual(width, Attention(width), config.dropout), Residual(width, mlp, config.dropout)]
    return nn.Sequential(*layers, nn.LayerNorm(width), nn.Linear(width, VOCABULARY))


def next_byte_loss(logits, target):
    """Cross-entropy of every position's next byte."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


# --- the data ---


class Windows(Dataset):
    """Windows of a text, evenly spaced; the target is the same window one byte on."""

    def __init__(self, text, num_windows):
        if len(text) <= CONTEXT + num_windows:
            raise ValueError(f"text: {len(text)} bytes, limit: more than {CONTEXT + num_windows}; give a longer one")
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.num_windows = num_windows
        self.stride = (len(text) - CONTEXT - 1) // num_windows

    def __len__(self):
        return self.num_windows

    def __getitem__(self, index):
        start = index * self.stride
        window = self.bytes[start : start + CONTEXT + 1].long()
        return window[:-1], window[1:]


def read_text(path):
    """The file's bytes, or else the source of the standard library."""
    if path is not None:
        return path.read_bytes()
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return b"".join(source.read_bytes() for source in sources)[:TEXT_BYTES]


# --- the check: the same task in plain PyTorch ---


def train_plain(model, loader, validation, lr, seed):
    """What the engine's results must be; returns the losses of all steps, and of all epochs' validation."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    losses, validation_losses = [], []
    torch.manual_seed(seed)  # shuffling and dropout draw from this one stream
    for _ in range(EPOCHS):
        for inputs, target in loader:
            optimizer.zero_grad()
            loss = next_byte_loss(model(inputs), target)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        validation_losses.append(evaluate(model, validation))
    return losses, validation_losses


def evaluate(model, loader):
    """The mean loss; leaves the random stream and every module's training flag as they were."""
    training_flags = [(module, module.training) for module in model.modules()]
    total = 0.0
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        model.eval()
        for inputs, target in loader:
            total += next_byte_loss(model(inputs), target).item() * len(inputs)
    for module, training in training_flags:
        module.training = training
    return total / len(loader.dataset)


def verify(task, report, seed):
    """Retrain a task in plain PyTorch, print whether it ends with the same bits, and return that."""
    start_s = time.perf_counter()
    plain = gpt(CONFIGS[task.name], seed)
    losses, validation_losses = train_plain(plain, task.dataloader, task.validation, task.lr, report.seed)
    print(f"\nverify: {task.name} again in plain PyTorch, alone, in {time.perf_counter() - start_s:.1f} s")
    pairs = list(zip(task.model.state_dict().values(), plain.state_dict().values(), strict=True))
    num_equal = sum(torch.equal(ours, theirs) for ours, theirs in pairs)
    checks = [
        (num_equal == len(pairs), f"{num_equal} of {len(pairs)} weight tensors are bit-equal"),
        (report.losses == losses, f"losses of {len(losses)} steps are identical"),
        (report.validation_losses == validation_losses, f"validation losses of {EPOCHS} epochs are identical"),
    ]
    for holds, what in checks:
        print(f"  {'yes' if holds else 'NO'}: {what}")
    return all(holds for holds, _ in checks)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="train on this file (default: the standard library's source)")
    parser.add_argument("--steps", type=int, default=120, help="per task, in whole epochs (default: 120)")
    parser.add_argument("--device", help="GPUs to train on, such as cuda:0 or cuda:0,cuda:1 (default: emulated ones)")
    parser.add_argument("--memory", help="of each device (default: all that a GPU has free, 12MiB of an emulated one)")
    parser.add_argument("--devices", type=int, default=2, help="emulated ones (default: 2)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verify", action="store_true", help="retrain one task in plain PyTorch and compare")
    parser.add_argument("--verify-task", choices=CONFIGS, default="deep", help="the one to retrain (default: deep)")
    args = parser.parse_args()
    if args.steps < 1 or args.devices < 1:
        parser.error(f"--steps {args.steps} --devices {args.devices}, limit: at least 1 each")
    names = [] if args.device is None else args.device.split(",")
    args.indices = [name.removeprefix("cuda:") for name in names]
    if not all(index.isdecimal() for index in args.indices):
        parser.error(f"--device {args.device}, known: cuda:0, cuda:1, ...; several are separated by commas")
    if args.indices and args.verify:
        parser.error("--verify compares bits, which plain PyTorch has on the CPU; leave --device out")
    return args


def make_devices(args):
    """Those of the command line."""
    if args.indices:
        return [CudaDevice(int(index), args.memory) for index in args.indices]
    return [EmulatedDevice(memory=args.memory or "12MiB") for _ in range(args.devices)]


def main():
    args = parse_args()
    # One compute thread for each emulated device; more would compete for the same cores. Results depend on the number
    # (sums are cut differently), so the plain run uses the same.
    torch.set_num_threads(1)

    text = read_text(args.text)
    num_train = len(text) * 9 // 10
    steps_per_epoch = -(-args.steps // EPOCHS)
    train_windows = Windows(text[:num_train], steps_per_epoch * BATCH_SIZE)
    validation_windows = Windows(text[num_train:], len(train_windows) // 8)

    devices = make_devices(args)
    tasks = []
    for name, config in CONFIGS.items():
        task = ModelTask(
            gpt(config, args.seed),
            next_byte_loss,
            DataLoader(train_windows, batch_size=BATCH_SIZE, shuffle=True),
            config.lr,
            EPOCHS,
            name=name,
            optimizer=torch.optim.AdamW,
            seed=args.seed,
            validation=DataLoader(validation_windows, batch_size=BATCH_SIZE),
        )
        state_bytes = STATE_BYTES * sum(parameter.numel() for parameter in task.model.parameters())
        times = state_bytes / devices[0].memory_bytes
        print(
            f"{name}: {config.num_blocks:2} blocks of width {config.width}, lr {config.lr:g}, "
            f"dropout {config.dropout}, training state {state_bytes / 2**20:.1f} MiB = {times:.1f} times a device"
        )
        assert args.indices or times >= 4, "this example is about models larger than the device: give --memory less"
        tasks.append(task)
    print()

    orchestra = ModelOrchestrator(tasks, devices=devices)
    orchestra.verbose = 1  # the plan and live progress
    report = orchestra.train_models()
    print(f"\n{report}")
    report.raise_failures()

    if args.verify:
        task = next(task for task in tasks if task.name == args.verify_task)
        sys.exit(0 if verify(task, report.tasks[task.name], args.seed) else 1)


if __name__ == "__main__":
    main()
