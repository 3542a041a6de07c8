"""One architecture, as a case: trained through the engine as layers, and by its own forward; every bit compared."""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import nn

from hydra_engine import Model, ModelTask
from partitioners import Presharded
from tests import exact, reference, zoo

SEED, LR = 7, 1e-3
OPTIONS = {"seed": SEED, "lr": LR, "optimizer": torch.optim.AdamW}
MEMORY = "1GiB"  # of the emulated device; shards end where the case says, so that it decides nothing


class Case(NamedTuple):
    """One architecture with a random state, and its data.

    `make`, `batches` and `validation` return new objects at every call, with the same values. A batch is a pair
    (inputs, target): what the module's forward takes (a tensor, a tuple, or a dict of keyword arguments), and what
    `loss_fn` takes beside the forward's output.
    """

    name: str
    make: Callable[[], nn.Module]
    batches: Callable[[], list]  # of training: two shapes
    validation: Callable[[], list]
    loss_fn: Callable[[Any, Any], torch.Tensor]
    is_listed: bool = True  # among those that must train; the others are tried


class Called(nn.Module):
    """A module as its own loop calls it, on a tensor, a tuple of positional or a dict of keyword arguments."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, inputs):
        if isinstance(inputs, dict):
            return self.module(**inputs)
        return self.module(*inputs) if isinstance(inputs, tuple) else self.module(inputs)


def new_module(case):
    """The case's module in training mode, the same bits at every call; no parameter is zero or one throughout."""
    torch.manual_seed(1)
    module = case.make()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.01 * torch.randn_like(parameter)
    return module.train()


def plain(case):
    """Losses, validation losses and state after plain PyTorch trained the case by the module's own forward."""
    module = new_module(case)
    options = {**OPTIONS, "validation": case.validation()}
    result = reference.train(Called(module), case.loss_fn, case.batches(), **options)
    assert all(map(math.isfinite, result.losses)), f"{case.name} diverges, so its comparison proves nothing"
    return exact.Expected(result.losses, result.validation_losses, zoo.state(module))


_expected = lru_cache(maxsize=8)(plain)


def converted(case):
    """The module, and its layers."""
    module = new_module(case)
    return module, Model(module, example=case.batches()[0][0])


def one_shard(num_layers):
    """Ends of the coarsest cut."""
    return [num_layers]


def each_layer(num_layers):
    """Ends of the finest cut: as many shards as layers."""
    return list(range(1, num_layers + 1))


def check(case, cut):
    """Train the case with the engine and compare each loss, parameter and buffer with plain PyTorch.

    cut: the number of layers -> the ends of the shards.
    """
    module, model = converted(case)
    options = {**OPTIONS, "validation": case.validation(), "partitioner": Presharded(cut(len(model)))}
    task = ModelTask(model, case.loss_fn, case.batches(), name=case.name, **options)
    report = exact.run([task], memory=MEMORY)
    task_report, expected = report.tasks[case.name], _expected(case)
    assert task_report.status == "finished", task_report.error
    for word, ours, theirs in (
        ("loss", task_report.losses, expected.losses),
        ("validation loss", task_report.validation_losses, expected.validation_losses),
    ):
        assert len(ours) == len(theirs), f"{len(ours)} times a {word}, not {len(theirs)}"
        wrong = [k for k, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b]
        assert not wrong, f"{word} {wrong[0]} is {ours[wrong[0]]}, by its own forward {theirs[wrong[0]]}"
    state = zoo.state(module)
    assert state.keys() == expected.state.keys()
    wrong = [name for name, tensor in state.items() if not torch.equal(tensor, expected.state[name])]
    assert not wrong, f"{len(wrong)} of {len(state)} tensors differ, {wrong[0]} first"


class Row(NamedTuple):
    """What became of a case, for a table; `one` and `each` are "yes" where they hold."""

    name: str
    module: str  # its class
    layers: int | None  # None: refused
    one: str  # bit-equal in one shard
    each: str  # ... in as many shards as layers

    @property
    def holds(self):
        return self.one == self.each == "yes"


def examine(case):
    """Convert a case, train it in both cuts, and say how that ended."""
    name = type(case.make()).__name__
    try:
        _, model = converted(case)
    except Exception as error:
        return Row(case.name, name, None, first_line(error), "")
    return Row(case.name, name, len(model), _verdict(case, one_shard), _verdict(case, each_layer))


def _verdict(case, cut):
    try:
        check(case, cut)
    except Exception as error:
        return first_line(error)
    return "yes"


def first_line(error):
    """The kind of an error and the first line of its message, as a cell of a table."""
    lines = str(error).strip().splitlines() or [""]
    # A failed task's message is its traceback, which ends with what was raised.
    line = lines[-1] if lines[0].startswith("Traceback") else lines[0]
    return f"{type(error).__name__}: {line}".replace("|", "\\|")
