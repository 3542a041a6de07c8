"""``hydra-engine demo``: byte-level GPTs on two small devices, each model's training state over 4 times a device."""

from __future__ import annotations

import argparse
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from hydra_engine import (
    CudaDevice,
    DeviceSpec,
    EmulatedDevice,
    ModelOrchestrator,
    ModelTask,
    ShardDoesNotFit,
    TaskReport,
)
from hydra_engine.cli.command import Failure, Mistake, mistakes
from hydra_engine.cli.sample import devices_of
from hydra_engine.texts import plural, table

VOCABULARY = 256  # bytes
CONTEXT = 64  # tokens the model sees
BATCH_SIZE = 8
EPOCHS = 2
TEXT_BYTES = 4_000_000  # of the standard library's source
STATE_BYTES = 16  # per parameter: weight, gradient, and AdamW's two moments, 4 bytes each
DEVICES = ("12MiB", "12MiB")
STEPS, FULL_STEPS = 20, 120  # of each model
CHECKED = "deep"  # the model that is trained again
# Seconds that planning took, over those of one step of all models in plain PyTorch; and those of a step here.
PLAN_STEPS, ENGINE_TIMES = 9, 2.0


class Config(NamedTuple):
    """The settings that one task tries."""

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
    """Byte and position embeddings: (batch, time) of bytes -> (batch, time, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(0.1 * torch.randn(CONTEXT, width))

    def forward(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.token(tokens) + self.position
        return embedded


class Attention(nn.Module):
    """Causal self-attention with heads of 32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, 32)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        projected: Tensor = self.out(attended.transpose(1, 2).flatten(-2))
        return projected


class Residual(nn.Module):
    """Half a transformer block: x + inner(norm(x))."""

    def __init__(self, width: int, inner: nn.Module, dropout: float) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.LayerNorm(width), inner, nn.Dropout(dropout))

    def forward(self, x: Tensor) -> Tensor:
        summed: Tensor = x + self.inner(x)
        return summed


def gpt(config: Config, seed: int) -> nn.Sequential:
    """Return the untrained model, the same at every call."""
    torch.manual_seed(seed)
    width = config.width
    layers: list[nn.Module] = [Embed(width)]
    for _ in range(config.num_blocks):
        mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        layers += [Residual(width, Attention(width), config.dropout), Residual(width, mlp, config.dropout)]
    return nn.Sequential(*layers, nn.LayerNorm(width), nn.Linear(width, VOCABULARY))


def next_byte_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Return the cross-entropy of every position's next byte."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def windows(text: bytes, num_windows: int) -> TensorDataset:
    """Return evenly spaced windows of a text; the target is the same window one byte on."""
    if len(text) <= CONTEXT + num_windows:
        raise ValueError(f"text: {len(text)} bytes, expected more than {CONTEXT + num_windows}; give a longer one")
    stride = (len(text) - CONTEXT - 1) // num_windows
    every = torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, CONTEXT + 1, stride)
    chosen = every[:num_windows].long()
    return TensorDataset(chosen[:, :-1], chosen[:, 1:])


def read_text(path: str | Path | None) -> bytes:
    """Return the file's bytes, or else the source of the standard library."""
    if path is not None:
        return Path(path).read_bytes()
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return b"".join(source.read_bytes() for source in sources)[:TEXT_BYTES]


# --- the check ---


def train_plain(model: nn.Module, task: ModelTask, lr: float, seed: int) -> tuple[list[float], list[float]]:
    """Train a model on a task's batches; return its losses of all steps, and of all epochs' validation."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    losses, validation_losses = [], []
    torch.manual_seed(seed)  # shuffling and dropout draw from this one stream
    for _ in range(EPOCHS):
        for inputs, target in task.dataloader:
            optimizer.zero_grad()
            loss = next_byte_loss(model(inputs), target)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
        assert task.validation is not None
        model.eval()
        total, num_windows = 0.0, 0
        with torch.random.fork_rng(devices=[]), torch.no_grad():  # a loader draws as it is opened
            for inputs, target in task.validation:
                total += next_byte_loss(model(inputs), target).item() * len(inputs)
                num_windows += len(inputs)
        model.train()
        validation_losses.append(total / num_windows)
    return losses, validation_losses


def differences(task: ModelTask, report: TaskReport, config: Config) -> list[str]:
    """Train a task again in plain PyTorch, print what is compared, and return what differs."""
    start_s = time.perf_counter()
    plain = gpt(config, report.seed)
    losses, validation_losses = train_plain(plain, task, config.lr, report.seed)
    print(f"{report.name} again in plain PyTorch, alone, in {time.perf_counter() - start_s:.1f} s")
    pairs = list(zip(task.model.state_dict().values(), plain.state_dict().values(), strict=True))
    num_equal = sum(torch.equal(ours, theirs) for ours, theirs in pairs)
    checks = {
        f"{num_equal} of {len(pairs)} weight tensors are bit-equal": num_equal == len(pairs),
        f"losses of {len(losses)} steps are identical": report.losses == losses,
        f"validation losses of {EPOCHS} epochs are identical": report.validation_losses == validation_losses,
    }
    for text, holds in checks.items():
        print(f"  {'yes' if holds else 'NO'}: {text}")
    return [text for text, holds in checks.items() if not holds]


# --- the command ---


def run(options: argparse.Namespace) -> None:
    """Plan, train and check; raises Failure if a task failed or a bit differs."""
    steps_per_epoch = -(-(options.steps or (FULL_STEPS if options.full else STEPS)) // EPOCHS)
    devices = _devices(options)
    tasks = _tasks(options, steps_per_epoch)
    threads = torch.get_num_threads()
    # One compute thread for each emulated device; more would compete for the same cores. Results depend on the number
    # (sums are cut differently), so the plain run uses the same.
    torch.set_num_threads(1)
    try:
        _demonstrate(tasks, devices, EPOCHS * steps_per_epoch, options)
    finally:
        torch.set_num_threads(threads)


def _devices(options: argparse.Namespace) -> Sequence[DeviceSpec]:
    devices = devices_of(options.devices or DEVICES)
    if options.memory is None:
        return devices
    gpus = [each for each in devices if isinstance(each, CudaDevice)]
    if not gpus:
        raise Mistake(
            f"--memory: {options.memory!r} with no GPU, expected one; give --devices 8MiB 8MiB for emulated ones"
        )
    with mistakes(ValueError, RuntimeError, before="--memory: "):
        return [CudaDevice(each.index, options.memory) for each in gpus]


def _tasks(options: argparse.Namespace, steps_per_epoch: int) -> list[ModelTask]:
    remedy = f"; name a file of more than {10 * CONTEXT} bytes, or leave it out"
    with mistakes(OSError, ValueError, before="--text: ", after=remedy):
        text = read_text(options.text)
        num_train = len(text) * 9 // 10
        train = windows(text[:num_train], steps_per_epoch * BATCH_SIZE)
        validation = windows(text[num_train:], max(1, len(train) // 8))
    return [
        ModelTask(
            gpt(config, options.seed),
            next_byte_loss,
            DataLoader(train, batch_size=BATCH_SIZE, shuffle=True),
            config.lr,
            EPOCHS,
            name=name,
            optimizer=torch.optim.AdamW,
            seed=options.seed,
            validation=DataLoader(validation, batch_size=BATCH_SIZE),
        )
        for name, config in CONFIGS.items()
    ]


def _demonstrate(
    tasks: list[ModelTask], devices: Sequence[DeviceSpec], num_steps: int, options: argparse.Namespace
) -> None:
    is_checked = all(isinstance(device, EmulatedDevice) for device in devices)
    _announce(devices, num_steps, options.seed, is_checked=is_checked)
    rows: list[tuple[str, ...]] = [("model", "blocks", "width", "lr", "dropout", "training state", "of a device")]
    times = []
    for task, (name, config) in zip(tasks, CONFIGS.items(), strict=True):
        state_bytes = STATE_BYTES * sum(parameter.numel() for parameter in task.model.parameters())
        times.append(state_bytes / min(device.memory_bytes for device in devices))
        shown = (str(config.num_blocks), str(config.width), f"{config.lr:g}", str(config.dropout))
        rows.append((name, *shown, f"{state_bytes / 2**20:.1f} MiB", f"{times[-1]:.1f} times"))
    print("", *table(rows), sep="\n")
    orchestra = ModelOrchestrator(tasks, devices=devices)
    orchestra.tracebacks = options.debug
    print("\n1. plan")
    larger = f"; or give larger ones: --devices {' '.join(DEVICES)}"
    with mistakes(ShardDoesNotFit, before="--devices: ", after=larger):
        orchestra.generate()
    print("\n2. train")
    report = orchestra.train_models()
    print(f"\n{report}")
    failed = [name for name, task in report.tasks.items() if task.status == "failed"]
    if failed:
        raise Failure(f"{len(failed)} of {len(tasks)} models failed: {', '.join(failed)}; --debug shows why")
    ended = (
        f"{len(tasks)} models, each {min(times):.1f} to {max(times):.1f} times a device, were trained together on "
        f"{plural(len(devices), 'device')} in {report.makespan_s:.1f} s"
    )
    if not is_checked:
        print(f"\nConclusion: {ended}. Bits are compared on emulated devices alone: leave --devices out.")
        return
    print("\n3. check")
    [task] = [task for task in tasks if task.name == CHECKED]
    found = differences(task, report.tasks[CHECKED], CONFIGS[CHECKED])
    if found:
        raise Failure(f"{ended}, but {CHECKED} differs from plain PyTorch: not {'; not '.join(found)}; report this bug")
    print(f"\nConclusion: {ended}, and {CHECKED} has every bit that plain PyTorch gives it alone.")


def _announce(devices: Sequence[DeviceSpec], num_steps: int, seed: int, *, is_checked: bool) -> None:
    """Say how long each phase takes, from a step in plain PyTorch here and now, and what it does."""
    model = gpt(CONFIGS[CHECKED], seed)
    optimizer, tokens = torch.optim.AdamW(model.parameters()), torch.zeros(BATCH_SIZE, CONTEXT, dtype=torch.long)
    seconds = []
    for _ in range(2):  # the first one also allocates
        start_s = time.perf_counter()
        next_byte_loss(model(tokens), tokens).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        seconds.append(time.perf_counter() - start_s)
    step_s = len(CONFIGS) * min(seconds)
    plan_s, train_s = PLAN_STEPS * step_s, ENGINE_TIMES * num_steps * step_s / min(len(devices), 2)
    check_s = num_steps * step_s / len(CONFIGS) if is_checked else 0.0
    print(
        f"Four byte-level GPTs train together on {plural(len(devices), 'device')}, each too small for any: about "
        f"{_about(plan_s + train_s + check_s)} here.\n"
        f"1. plan, {_about(plan_s)}: profile each model on its first batch, cut it into shards that fit a device\n"
        f"2. train, {_about(train_s)}: {num_steps} steps of each; while one's weights travel, another computes"
    )
    if is_checked:
        print(f"3. check, {_about(check_s)}: train {CHECKED} again, in plain PyTorch, and compare all bits")


def _about(seconds: float) -> str:
    return f"{max(1, round(seconds))} s" if seconds < 100 else f"{seconds / 60:.0f} min"
