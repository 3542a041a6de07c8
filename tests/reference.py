"""Plain PyTorch: the loop that says what the engine's results must be, and the only thing they are compared with."""

from dataclasses import dataclass

import torch
from torch import nn

from hydra_engine import split, stream_seed


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a run leaves beside the weights, which are in the model itself."""

    losses: list  # one float per step
    validation_losses: list  # one float per epoch


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
    loss_reduction="mean",
    max_grad_norm=None,
    validation=None,
    unpack=None,
    max_steps=None,
    on_step=lambda: None,
):
    """Train `model` in place, on the CPU in float32, and stop after `max_steps` steps if given.

    `accumulation_steps` may be a function of the step.
    """
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
            optimizer.zero_grad(set_to_none=True)
            n = accumulation_steps(len(result.losses)) if callable(accumulation_steps) else accumulation_steps
            if n == 1:
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
            if max_grad_norm is not None:
                torch.nn.utils.clip_grad_norm_(params, max_grad_norm)
            optimizer.step()
            on_step()
            if scheduler and lr_scheduler_interval == "step":
                scheduler.step()
            if len(result.losses) == max_steps:
                return result
        if scheduler and lr_scheduler_interval == "epoch":
            scheduler.step()
        if validation is not None:
            result.validation_losses.append(evaluate(model, loss_fn, validation, loss_reduction, unpack))
    return result


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
