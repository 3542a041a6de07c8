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
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from hydra_engine import Callback, EmulatedDevice, ModelOrchestrator, ModelTask, split, stream_seed
from hydra_engine.adaptive import AdaptiveDataLoader, StepChoice
from partitioners import Presharded
from tests import reference

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
    narrow = reference.Narrow(model, loss_fn, reference.DTYPES[precision], grad_scaler) if precision != "float32" else None
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
            return None if is_over else choices[step].batch_size

        for inputs, target in loader.iterate(next_size):
            step = len(result.losses)
            choice = choices[step]
            assert len(inputs) == choice.batch_size, f"step {step}: the data gave another batch than was recorded"
            buffers = [buffer.clone() for buffer in model.buffers()]
            optimizer.zero_grad(set_to_none=True)
            result.samples.append(inputs.clone())
            if narrow is not None:
                loss = narrow.step(inputs, target, choice.micro_batches, loss_reduction, seed, step)
                result.measured.append(None)
            else:
                loss, measured = _step(model, loss_fn, inputs, target, choice, loss_reduction, seed, step, group_of)
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


def _step(model, loss_fn, inputs, target, choice, loss_reduction, seed, step, group_of):
    """Forward and backward of all micro-batches; leaves gradients, returns the loss and the norms."""
    num_groups, losses, sizes, micro = 1 + max(group_of.values()), [], [], []
    params = [p for p in model.parameters() if p.requires_grad]
    sums_losses = loss_reduction == "sum"
    before = [None] * len(params)
    for m, (x, y, weight) in enumerate(split(inputs, target, choice.micro_batches, loss_reduction)):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(stream_seed(seed, step, m))
            loss = loss_fn(model(x), y) * weight
            loss.backward()
        losses.append(loss.item())
        if weight > 0:
            # In float64, from what was added: independent of how the engine measures.
            own = [None if p.grad is None else p.grad.double() - (0 if b is None else b) for p, b in zip(params, before)]
            by = len(x) if sums_losses else weight
            sizes.append(float(len(x)) if sums_losses else weight * len(inputs))
            micro.append(_norms(params, own, group_of, num_groups, by))
        before = [None if p.grad is None else p.grad.double() for p in params]
    total = _norms(params, before, group_of, num_groups, len(inputs) if sums_losses else 1.0)
    return sum(losses), Measured(tuple(sizes), tuple(micro), total)


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
