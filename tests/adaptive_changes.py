"""Adaptive tasks killed and resumed, and under devices that come and go: their record says all that they did.

    python -m tests.adaptive_changes                          # 20 kills and 50 changes of the devices
    python -m tests.adaptive_changes --kills 200 --changes 1000 --seed 7

A run in a process of its own saves checkpoints, is killed (SIGKILL) at random moments and goes on until it is through;
then another one begins. In further runs devices are added and removed at random while an adaptive task trains beside a
plain one. The record of each run is replayed on one device of this process, and must leave the same bits.

`plain` is the loop that says what a record means: tests compare the engine with it.
"""

import argparse
import faulthandler
import math
import os
import random
import signal
import sys
import tempfile
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from hydra_engine import Callback, EmulatedDevice, ModelTask, StepChoice, stream_seed
from hydra_engine import split as evenly
from hydra_engine.adaptive import AdaptiveDataLoader
from tests import exact, processes, reference

ROUNDING = 1e-6  # of a sum of gains
HANG_S = 240
MEMORY = "1MiB"
MOST_DEVICES = 4


# -- what a record means


class Measured(NamedTuple):
    """Norms of a step's mean gradients, squared, by parameter group."""

    sizes: tuple  # samples of each micro-batch, or the share of the batch that its loss has
    micro: tuple
    total: tuple


class Result(NamedTuple):
    """What the plain loop leaves beside the weights, which are in the model itself."""

    losses: list
    validation_losses: list
    measured: list  # a `Measured` per step
    loss_scales: list
    samples: list  # inputs of each step


def plain(
    model,
    loss_fn,
    loader,
    choices,
    *,
    seed,
    lr=None,
    epochs=1,
    optimizer=torch.optim.SGD,
    param_groups=None,
    lr_scheduler=None,
    lr_scheduler_interval="step",
    loss_reduction="mean",
    max_grad_norm=None,
    validation=None,
    validation_interval="epoch",
    precision="float32",
    grad_scaler=None,
    nonfinite=None,
    split=None,
):
    """Train `model` in place as a record says: its batches, micro-batches and factors of the learning rates.

    An epoch is over once the sum of the gains, as recorded, is the number of initial batches in a pass.
    """
    names = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    params = [p for _, p in names]
    made = _grouped(names, param_groups)
    optimizer = optimizer(made) if lr is None else optimizer(made, lr=lr)
    group_of = {id(p): k for k, group in enumerate(optimizer.param_groups) for p in group["params"]}
    scheduler = lr_scheduler(optimizer) if lr_scheduler else None
    narrow = None
    if precision != "float32":
        narrow = _Narrow(model, loss_fn, reference.DTYPES[precision], grad_scaler)
    result = Result([], [], [], [], [])
    torch.manual_seed(seed)
    for epoch in range(epochs):

        def next_size(epoch=epoch):
            step = len(result.losses)
            if loader.steps_per_pass is None:
                is_over = loader.num_passes > epoch
            else:
                before = choices[step - 1] if step else None
                progress = 0.0 if before is None else before.progress + before.gain
                is_over = progress >= (epoch + 1) * loader.steps_per_pass - ROUNDING
            # Of a stream the end shows only where another batch is asked for.
            return None if is_over else choices[step].batch_size if step < len(choices) else 1

        for inputs, target in loader.iterate(next_size):
            step = len(result.losses)
            choice = choices[step]
            assert len(inputs) == choice.batch_size, f"step {step}: the data gave another batch than was recorded"
            buffers = [buffer.clone() for buffer in model.buffers()]
            optimizer.zero_grad(set_to_none=True)
            result.samples.append(inputs.clone())
            if narrow is not None:
                loss = narrow.step(inputs, target, choice.micro_batches, loss_reduction, seed, step)
                scale = 1.0 if grad_scaler is None else grad_scaler.get_scale()
                result.measured.append(narrow.measured(len(inputs), choice.micro_batches, group_of, scale))
            else:
                number = choice.micro_batches
                pieces = split(inputs, target, number) if split else evenly(inputs, target, number, loss_reduction)
                streams = [stream_seed(seed, step, m) for m in range(len(pieces))]
                loss, measured = _step(model, loss_fn, pieces, streams, group_of, sums_losses=loss_reduction == "sum")
                result.measured.append(measured)
            result.losses.append(loss)
            if grad_scaler is not None:
                result.loss_scales.append(grad_scaler.get_scale())
            if nonfinite == "skip" and not math.isfinite(loss):
                for buffer, value in zip(model.buffers(), buffers, strict=True):
                    buffer.data.copy_(value)
                continue
            is_skipped = _update(optimizer, params, choice.factors, max_grad_norm, grad_scaler)
            if scheduler and not is_skipped and lr_scheduler_interval == "step":
                scheduler.step()
            if isinstance(validation_interval, int) and (step + 1) % validation_interval == 0 and validation:
                result.validation_losses.append(_evaluated(model, loss_fn, validation, loss_reduction, narrow))
        if scheduler and lr_scheduler_interval == "epoch":
            scheduler.step()
        if validation is not None and validation_interval == "epoch":
            result.validation_losses.append(_evaluated(model, loss_fn, validation, loss_reduction, narrow))
    return result


def _grouped(names, param_groups):
    if param_groups is None:
        return [p for _, p in names]
    groups = []
    for name, p in names:
        options = param_groups(name)
        found = next((each for each in groups if each[0] == options), None)
        if found is None:
            groups.append((options, [p]))
        else:
            found[1].append(p)
    return [{**options, "params": params} for options, params in groups]


def _step(model, loss_fn, pieces, streams, group_of, *, sums_losses):
    """Forward and backward of all micro-batches; leaves gradients, returns the loss and the norms."""
    num_groups, losses, sizes, micro = 1 + max(group_of.values()), [], [], []
    params = [p for p in model.parameters() if p.requires_grad]
    num_samples = sum(len(x) for x, _, _ in pieces)
    before = [None] * len(params)
    for (x, y, weight), stream in zip(pieces, streams, strict=True):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(stream)
            loss = loss_fn(model(x), y) * weight
            loss.backward()
        losses.append(loss.item())
        if weight > 0:
            # In float64, from what was added: independent of how the engine measures.
            pairs = zip(params, before, strict=True)
            own = [None if p.grad is None else p.grad.double() - (0 if b is None else b) for p, b in pairs]
            by = len(x) if sums_losses else weight
            sizes.append(float(len(x)) if sums_losses else weight * num_samples)
            micro.append(_norms(params, own, group_of, num_groups, by))
        before = [None if p.grad is None else p.grad.double() for p in params]
    total = _norms(params, before, group_of, num_groups, num_samples if sums_losses else 1.0)
    return sum(losses), Measured(tuple(sizes), tuple(micro), total)


class _Narrow(reference.Narrow):
    """Takes the norms of each micro-batch's gradients as autograd leaves them, all with a mean loss."""

    def __init__(self, masters, *others):
        super().__init__(masters, *others)
        self._seen = []  # (master, squared norm), parameter by parameter
        for master, parameter in self.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(partial(self._see, master))

    def _see(self, master, parameter):
        self._seen.append((master, float(parameter.grad.double().square().sum())))

    def measured(self, num_samples, number, group_of, scale):
        """Norms of the step that was the last; all parameters have received a gradient from each micro-batch."""
        seen, self._seen = self._seen, []
        size, more = divmod(num_samples, number)
        sizes = [float(size + (m < more)) for m in range(number)]
        num_groups, each = 1 + max(group_of.values()), len(seen) // number
        micro = [[0.0] * num_groups for _ in sizes]
        for k, (master, norm) in enumerate(seen):
            weight = sizes[k // each] / num_samples
            micro[k // each][group_of[id(master)]] += norm / (weight * scale) ** 2
        params = [p for p in self.masters.parameters() if p.requires_grad]
        gradients = [None if p.grad is None else p.grad.double() for p in params]
        return Measured(tuple(sizes), tuple(map(tuple, micro)), _norms(params, gradients, group_of, num_groups, scale))


def _norms(params, gradients, group_of, num_groups, divisor):
    found = [0.0] * num_groups
    for p, gradient in zip(params, gradients, strict=True):
        if gradient is not None:
            found[group_of[id(p)]] += float((gradient / divisor).square().sum())
    return tuple(found)


def _update(optimizer, params, factors, max_grad_norm, grad_scaler):
    """One step of the optimizer with its learning rates multiplied; returns True if it was left out."""
    if grad_scaler is not None:
        grad_scaler.unscale_(optimizer)
    if max_grad_norm is not None:
        torch.nn.utils.clip_grad_norm_(params, max_grad_norm)
    before = [group["lr"] for group in optimizer.param_groups]
    for group, factor in zip(optimizer.param_groups, factors, strict=True):
        group["lr"] = group["lr"] * factor
    is_skipped = False
    if grad_scaler is None:
        optimizer.step()
    else:
        scale = grad_scaler.get_scale()
        grad_scaler.step(optimizer)
        grad_scaler.update()
        is_skipped = grad_scaler.get_scale() < scale
    for group, lr in zip(optimizer.param_groups, before, strict=True):
        group["lr"] = lr
    return is_skipped


def _evaluated(model, loss_fn, validation, loss_reduction, narrow):
    forward = model if narrow is None else narrow.evaluated()
    return reference.evaluate(forward, loss_fn, validation, loss_reduction)


class Noise:
    """The gradient noise scale, written out from its formulas."""

    def __init__(self, initial, num_groups=1, smoothing=0.999):
        self.initial, self.num_groups, self.smoothing = initial, num_groups, smoothing
        self.weight, self._sqr, self._var = 0.0, [0.0] * num_groups, [0.0] * num_groups

    def add(self, measured):
        n, total = len(measured.sizes), sum(measured.sizes)
        if n < 2 or not all(math.isfinite(x) for row in (*measured.micro, measured.total) for x in row):
            return
        scale = total / self.initial
        theta = self.smoothing**scale
        for k in range(self.num_groups):
            mean = sum(size / total * row[k] for size, row in zip(measured.sizes, measured.micro, strict=True))
            sqr = (n * measured.total[k] - mean) / (n - 1)
            var = (mean - measured.total[k]) * scale / (n - 1)
            self._sqr[k] = theta * self._sqr[k] + (1 - theta) * sqr
            self._var[k] = theta * self._var[k] + (1 - theta) * var
        self.weight = theta * self.weight + (1 - theta)

    @property
    def sqr(self):
        return [max(x / self.weight, 0.0) if self.weight else 1.0 for x in self._sqr]

    @property
    def var(self):
        return [max(x / self.weight, 1e-6) if self.weight else 0.0 for x in self._var]

    @property
    def scale(self):
        return sum(self.var) * self.initial / sum(self.sqr)

    def gains(self, batch_size):
        s = batch_size / self.initial
        if not self.weight:
            return [1.0] * self.num_groups
        return [(v + q) / (v / s + q) for v, q in zip(self.var, self.sqr, strict=True)]


def record(sizes, *, initial, num_samples, epochs=1, factors=(), gain=None):
    """A record that was never run: (batch, micro-batches) over and over, cut off at the end of each pass.

    gain: (batch) -> gain of a step; default: half way between 1 and S. factors: (step) -> factors; empty: the engine's.
    """
    choices, progress, left, k = [], 0.0, num_samples, 0
    while progress < epochs * num_samples / initial - ROUNDING:
        batch, number = sizes[k % len(sizes)] if k else (initial, min(2, initial))
        batch = min(batch, left)
        scale = batch / initial
        worth = scale if scale < 1 else (1 + scale) / 2 if gain is None else gain(batch)
        choices.append(
            StepChoice(
                step=k,
                batch_size=batch,
                micro_batches=min(number, batch),
                gain=worth,
                progress=progress,
                factors=tuple(factors(k)) if callable(factors) else (),
            )
        )
        progress, left, k = progress + worth, (left - batch) or num_samples, k + 1
    return choices


# -- runs that are disturbed


def network(seed):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            *(nn.Linear(12, 24), nn.Dropout(0.2), nn.BatchNorm1d(24), nn.Tanh()),
            *(nn.Linear(24, 24), nn.Dropout(0.1), nn.ReLU(), nn.Linear(24, 3)),
        )


def samples_of(seed, num_samples=120):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(num_samples, 12, generator=generator)
    noise = torch.randn(num_samples, 3, generator=generator)
    return TensorDataset(inputs, (inputs[:, :3] + noise).argmax(1))


INITIAL, MOST = 6, 48
OPTIONS = (
    {"optimizer": partial(torch.optim.SGD, momentum=0.9), "lr": 0.02, "max_grad_norm": 1.0},
    {"optimizer": partial(torch.optim.AdamW, weight_decay=0.1), "lr": 0.005},
    {"optimizer": torch.optim.Adam, "lr": 0.005, "early_release": True},
)


def adaptive_task(seed, epochs, *, replay=(), **options):
    """A task that adapts; one seed has the same bits everywhere. `options`: that make no other bits."""
    # BatchNorm takes no micro-batch of one sample.
    loader = AdaptiveDataLoader(samples_of(seed), INITIAL, shuffle=True, drop_last=True)
    loader.autoscale_batch_size(MOST, local_bsz_bounds=(2, MOST), replay=replay)
    settings = {**OPTIONS[seed % len(OPTIONS)], **options}
    return ModelTask(network(seed), F.cross_entropy, loader, epochs=epochs, seed=seed, name="adaptive", **settings)


def plain_task(seed, num_steps, **options):
    generator = torch.Generator().manual_seed(seed)
    batches = [
        (torch.randn(8, 12, generator=generator), torch.randint(3, (8,), generator=generator)) for _ in range(num_steps)
    ]
    settings = {"optimizer": torch.optim.Adam, "lr": 0.01, "accumulation_steps": 2}
    return ModelTask(network(seed), F.cross_entropy, batches, seed=seed, name="plain", **settings, **options)


def check_replayed(seed, epochs, choices, losses, state):
    """On one device of this process, the record leaves the same bits, and so does the plain loop."""
    assert [each.step for each in choices] == list(range(len(losses))), (
        "a step is missing in the record, or there twice"
    )
    task = adaptive_task(seed, epochs, replay=choices)
    report = exact.silent([task], MEMORY).train_models()
    report.raise_failures()
    again = report.tasks["adaptive"]
    assert again.adaptive == choices, "another record"
    assert again.losses == losses, "other losses"
    _check_state(task.model, state, "replayed")
    alone, loader = network(seed), adaptive_task(seed, epochs).dataloader
    options = {name: value for name, value in OPTIONS[seed % len(OPTIONS)].items() if name != "early_release"}
    result = plain(alone, F.cross_entropy, loader, choices, seed=seed, epochs=epochs, **options)
    assert result.losses == losses, "other losses than the plain loop's"
    _check_state(alone, state, "in the plain loop")
    worth, last = epochs * len(loader.dataset) / INITIAL, choices[-1]
    assert last.progress < worth <= last.progress + last.gain + ROUNDING, "the run did not end by its progress"


def _check_state(model, state, where):
    different = [name for name, value in model.state_dict().items() if not torch.equal(value, state[name])]
    assert not different, f"other bits {where}: {different}"


class InStep(Callback):
    """Tells another process each step, and waits for its leave to go on."""

    def __init__(self, connection):
        self.connection = connection

    def on_step(self, report):
        self.connection.send(report.steps)
        self.connection.recv()


def _train(folder, seed, epochs, num_devices, connection):
    """The body of a process that is killed: goes on from what is saved, and leaves its record at the end."""
    faulthandler.dump_traceback_later(HANG_S, exit=True)
    task = adaptive_task(seed, epochs, callbacks=[] if connection is None else [InStep(connection)])
    orchestra = exact.silent(
        [task], MEMORY, num_devices=num_devices, checkpoint_dir=folder / "saved", checkpoint_every=2
    )
    report = orchestra.train_models(resume=True)
    report.raise_failures()
    found = report.tasks["adaptive"]
    result = {"choices": found.adaptive, "losses": found.losses}
    torch.save({**result, "state": task.model.state_dict()}, folder / "new")
    os.replace(folder / "new", folder / "result")


def run_kills(num_kills, seed, *, epochs=3, most_kills=8):
    """Runs that are killed so many times in all, each of them a few times; returns how many runs it took."""
    rng, left, num_runs = random.Random(seed), num_kills, 0
    while left:
        with tempfile.TemporaryDirectory() as directory:
            folder, kills = Path(directory), 0
            while not (folder / "result").exists():
                num_devices = rng.randint(1, 3)  # another number each time
                if not left or kills == most_kills:
                    process = processes.start(_train, folder, seed + num_runs, epochs, num_devices, None)
                    process.join()
                    is_killed = False
                else:
                    ours, theirs = Pipe()
                    with ours:
                        with theirs:
                            process = processes.start(_train, folder, seed + num_runs, epochs, num_devices, theirs)
                        is_killed = _killed(process, ours, rng)
                left, kills = left - is_killed, kills + is_killed
                assert is_killed or process.exitcode == 0, f"a run ended with {process.exitcode}"
            found = torch.load(folder / "result", weights_only=False)
        check_replayed(seed + num_runs, epochs, found["choices"], found["losses"], found["state"])
        num_runs += 1
    return num_runs


def _killed(process, connection, rng):
    """Kill a process at a random moment: while it sets up, or after some of its steps. False: it was over."""
    try:
        for _ in range(rng.choice((0, 1, 1, 2, 3, 5, 8))):
            connection.recv()
            connection.send(None)
    except (EOFError, ConnectionError):
        process.join()  # it was over before
    process.join(rng.uniform(0.0, 0.2))
    process.kill()
    process.join()
    return process.exitcode == -signal.SIGKILL


class Changes(Callback):
    """Adds and removes devices at random, from the tasks' callbacks."""

    def __init__(self, rng, most):
        self.rng, self.most, self.num_changes = rng, most, 0
        self.orchestra = None

    def __deepcopy__(self, memo):
        return self

    def on_step(self, report):
        if report.name == "adaptive" and self.num_changes < self.most and self.rng.random() < 0.7:
            self.change()

    def change(self):
        places = self.orchestra.devices
        here = [name for name, place in places.items() if place == "in"]
        away = [name for name, place in places.items() if place == "out"]
        if len(here) > 1 and (len(here) == MOST_DEVICES or self.rng.random() < 0.5):
            self.orchestra.remove_device(self.rng.choice(here), grace_s=self.rng.choice((None, None, 0)))
        elif len(places) < MOST_DEVICES:
            self.orchestra.add_device(EmulatedDevice(MEMORY, chaos=self.rng.choice((None, 1))))
        elif away:
            self.orchestra.add_device(self.rng.choice(away))
        else:
            return  # one is on its way out
        self.num_changes += 1


def run_changes(num_changes, seed, *, epochs=3):
    """Runs in which devices come and go so many times in all; returns how many runs it took."""
    rng, num_runs = random.Random(seed), 0
    while num_changes > 0:
        own_seed = seed + num_runs
        changes = Changes(rng, num_changes)
        tasks = [adaptive_task(own_seed, epochs, callbacks=[changes]), plain_task(own_seed, 20 * epochs)]
        changes.orchestra = orchestra = exact.silent(tasks, MEMORY)
        report = orchestra.train_models()
        report.raise_failures()
        assert all(device.peak_bytes <= device.memory_bytes for device in report.devices)
        found = report.tasks["adaptive"]
        check_replayed(own_seed, epochs, found.adaptive, found.losses, tasks[0].model.state_dict())
        alone, beside = network(own_seed), plain_task(own_seed, 20 * epochs)
        options = {"optimizer": torch.optim.Adam, "lr": 0.01, "accumulation_steps": 2}
        result = reference.train(alone, F.cross_entropy, beside.dataloader, seed=own_seed, **options)
        assert report.tasks["plain"].losses == result.losses, "other losses of the plain task"
        _check_state(alone, tasks[1].model.state_dict(), "of the plain task")
        assert changes.num_changes, "no device came or went"
        num_changes, num_runs = num_changes - changes.num_changes, num_runs + 1
    return num_runs


def main(args=None):
    parser = argparse.ArgumentParser(prog="python -m tests.adaptive_changes", description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20, help="of runs in processes of their own")
    parser.add_argument("--changes", type=int, default=50, help="of the devices, while a task trains")
    parser.add_argument("--seed", type=int, default=0)
    parsed = parser.parse_args(args)
    torch.set_num_threads(1)
    run_kills(parsed.kills, parsed.seed)
    run_changes(parsed.changes, parsed.seed)
    print(f"{parsed.kills} kills, {parsed.changes} changes: every run has the bits of its record replayed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
