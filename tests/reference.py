"""Plain PyTorch: the loop that says what the engine's results must be, and the only thing they are compared with."""

import copy
import math
from dataclasses import dataclass, field

import torch
from torch import nn

from hydra_engine import split, stream_seed


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a run leaves beside the weights, which are in the model itself."""

    losses: list  # one float per step
    validation_losses: list  # one float per epoch
    loss_scales: list = field(default_factory=list)  # one float per step, with a grad_scaler
    skipped_steps: list = field(default_factory=list)  # whose loss was not finite, with nonfinite="skip"


def train(
    model,
    loss_fn,
    loader,
    *,
    seed,
    lr=None,
    epochs=1,
    optimizer=None,
    lr_scheduler=None,
    lr_scheduler_interval="step",
    accumulation_steps=1,
    max_device_batch=None,
    max_devices=1,
    loss_reduction="mean",
    max_grad_norm=None,
    validation=None,
    unpack=None,
    max_steps=None,
    on_step=lambda: None,
    precision="float32",
    grad_scaler=None,
    nonfinite=None,
):
    """Train `model` in place, on the CPU, and stop after `max_steps` steps if given.

    `accumulation_steps` may be a function of the step. With `max_device_batch`, the size of each batch decides, for
    `max_devices`. In float32, `precision` leaves no trace; else see `Narrow`.
    """
    if precision != "float32":
        narrow = Narrow(model, loss_fn, DTYPES[precision], grad_scaler)
    unpack = unpack or _pair
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer, lr = (torch.optim.SGD, 1e-3 if lr is None else lr) if optimizer is None else (optimizer, lr)
    optimizer = optimizer(params) if lr is None else optimizer(params, lr=lr)
    scheduler = lr_scheduler(optimizer) if lr_scheduler else None
    result = Result(losses=[], validation_losses=[])

    torch.manual_seed(seed)  # one stream: loader, sampler and layers draw from it
    for _ in range(epochs):
        if max_steps == 0:
            return result
        for batch in loader:  # iter() and the sampler draw too
            inputs, target = unpack(batch)
            before = [buffer.clone() for buffer in model.buffers()]
            optimizer.zero_grad(set_to_none=True)
            n = accumulation_steps(len(result.losses)) if callable(accumulation_steps) else accumulation_steps
            if max_device_batch is not None:
                size = len(_first_tensor(inputs))
                n = min(size, max_devices * math.ceil(size / (max_device_batch * max_devices)))
            elif n == 1:
                n = None  # whole: it draws from the one stream, not from one of its own
            if precision != "float32":
                result.losses.append(narrow.step(inputs, target, n, loss_reduction, seed, len(result.losses)))
            elif n is None:
                loss = loss_fn(model(inputs), target)
                loss.backward()
                result.losses.append(loss.item())
            else:
                step = len(result.losses)
                parts = []
                for m, (x, y, weight) in enumerate(split(inputs, target, n, loss_reduction)):
                    with torch.random.fork_rng(devices=[]):
                        torch.manual_seed(stream_seed(seed, step, m))
                        part = loss_fn(model(x), y) * weight
                        part.backward()
                        parts.append(part.item())
                result.losses.append(sum(parts))
            if grad_scaler is not None:
                result.loss_scales.append(grad_scaler.get_scale())
            if nonfinite == "skip" and not math.isfinite(result.losses[-1]):
                for buffer, value in zip(model.buffers(), before, strict=True):
                    buffer.copy_(value)
                result.skipped_steps.append(len(result.losses) - 1)
                if len(result.losses) == max_steps:
                    return result
                continue
            if grad_scaler is not None:
                grad_scaler.unscale_(optimizer)
            if max_grad_norm is not None:
                torch.nn.utils.clip_grad_norm_(params, max_grad_norm)
            is_skipped = False
            if grad_scaler is None:
                optimizer.step()
            else:
                before = grad_scaler.get_scale()
                grad_scaler.step(optimizer)
                grad_scaler.update()
                is_skipped = grad_scaler.get_scale() < before
            if scheduler and not is_skipped and lr_scheduler_interval == "step":
                scheduler.step()
            on_step()
            if len(result.losses) == max_steps:
                return result
        if scheduler and lr_scheduler_interval == "epoch":
            scheduler.step()
        if validation is not None:
            forward = model if precision == "float32" else narrow.evaluated()
            result.validation_losses.append(evaluate(forward, loss_fn, validation, loss_reduction, unpack))
    return result


DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d)


class Narrow:
    """The casts of a narrow precision, written out: a second model in `dtype` beside the float32 masters.

    Its parameters are cast anew from the masters before each step; norms keep float32 and compute in it, buffers are
    the masters' own, the loss takes the output in float32. Gradients of several micro-batches add up in float32 and are
    rounded once.
    """

    def __init__(self, masters, loss_fn, dtype, grad_scaler):
        self.masters, self.loss_fn, self.dtype, self.grad_scaler = masters, loss_fn, dtype, grad_scaler
        shared = {id(buffer): buffer for buffer in masters.buffers()}
        self.model = copy.deepcopy(masters, shared)
        norms = [module for module in self.model.modules() if isinstance(module, NORMS)]
        self.wide = {id(parameter) for norm in norms for parameter in norm.parameters()}
        for parameter in self.model.parameters():
            if id(parameter) not in self.wide:
                parameter.data = parameter.data.to(dtype)
        for norm in norms:
            norm.register_forward_pre_hook(lambda _, args: tuple(x.float() for x in args))
            norm.register_forward_hook(lambda _, args, output: output.to(dtype))

    def parameters(self):
        return zip(self.masters.parameters(), self.model.parameters(), strict=True)

    def cast(self):
        with torch.no_grad():
            for master, parameter in self.parameters():
                parameter.copy_(master)

    def __call__(self, inputs):
        inputs = inputs.to(self.dtype) if inputs.is_floating_point() else inputs
        return self.model(inputs).float()

    def evaluated(self):
        """What `evaluate` runs, with the weights of now."""
        self.cast()
        return self

    def modules(self):
        return self.model.modules()

    def eval(self):
        self.model.eval()

    def step(self, inputs, target, n, loss_reduction, seed, step):
        """Forward and backward of all micro-batches; leaves gradients on the masters, returns the loss.

        n: micro-batches; None: the batch is whole.
        """
        self.cast()
        summed, parts = {}, []
        pieces = [(inputs, target, None)] if n is None else split(inputs, target, n, loss_reduction)
        for m, (x, y, weight) in enumerate(pieces):
            with torch.random.fork_rng(devices=[], enabled=n is not None):
                if n is not None:
                    torch.manual_seed(stream_seed(seed, step, m))
                loss = self.loss_fn(self(x), y)
                loss = loss if weight is None else loss * weight
                (loss if self.grad_scaler is None else self.grad_scaler.scale(loss)).backward()
                parts.append(loss.item())
            for master, parameter in self.parameters():
                if parameter.grad is not None:
                    gradient = parameter.grad.float()
                    summed[master] = summed[master] + gradient if master in summed else gradient
                    parameter.grad = None
        for master, parameter in self.parameters():
            if master in summed:
                master.grad = summed[master].to(parameter.dtype).float()
        return sum(parts)


def evaluate(model, loss_fn, loader, loss_reduction="mean", unpack=None):
    """One epoch's validation loss: the sample-weighted mean of the batch losses, or their sum. Changes nothing."""
    unpack = unpack or _pair
    roots = [model, loss_fn] if isinstance(loss_fn, nn.Module) else [model]
    training_flags = [(module, module.training) for root in roots for module in root.modules()]
    total, num_samples = 0.0, 0
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for root in roots:
            root.eval()
        for batch in loader:
            inputs, target = unpack(batch)
            loss = loss_fn(model(inputs), target).item()
            if loss_reduction == "mean":
                batch_size = _first_tensor(inputs).shape[0]
                total += loss * batch_size
                num_samples += batch_size
            else:
                total += loss
    for module, training in training_flags:
        module.training = training
    return total / num_samples if loss_reduction == "mean" else total


def _pair(batch):
    inputs, target = batch
    return inputs, target


def _first_tensor(value):
    while not isinstance(value, torch.Tensor):
        value = next(iter(value.values() if isinstance(value, dict) else value))
    return value
