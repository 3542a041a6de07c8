"""Layers, losses, optimizers and loaders that hide something: tasks that an engine could train otherwise than they say.

A recipe is a function without arguments. It returns a dict: what differs from a plain task (`layers` or `model`,
`loss_fn`, `loader`, options of a task), and under `expect` what has to become of it:
"exact", "refused", "doubted", or "differs", which a comparison with the plain loop names.
"""

import copy
import random
import sys
import weakref
from array import array
from functools import partial
from itertools import count
from types import ModuleType, SimpleNamespace

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

RECIPES = {}


def recipe(function):
    """Register a recipe: it returns what differs from a plain task (layers, loss_fn, loader, and task options)."""
    RECIPES[function.__name__] = function
    return function


def batches(num=3, dtype=torch.float32):
    generator = torch.Generator().manual_seed(2)
    return [
        (torch.randn(6, 8, generator=generator).to(dtype), torch.randint(3, (6,), generator=generator))
        for _ in range(num)
    ]


def stack(*middle):
    """Put layers between two linear ones."""
    return [nn.Linear(8, 8), *middle, nn.Linear(8, 3)]


def around(*middle, **options):
    """A recipe of layers between two linear ones."""
    return {"layers": stack(*middle), **options}


def hooked(register, hook, layer=None):
    """A layer with a hook, by the method that registers it."""
    layer = nn.Linear(8, 8) if layer is None else layer
    register(layer, hook)
    return layer


class Base(nn.Module):
    """A linear layer, to be made odd."""

    def __init__(self, p=0.0):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.p = p

    def forward(self, x):
        return F.dropout(self.odd(self.linear(x)), self.p, self.training)

    def odd(self, x):
        return x


# -- B5, D28, F37: copies


class ClonedTable:
    """Copies a tensor that begins beside a multiple of 64 by itself."""

    def __init__(self, table):
        self.table = table

    def __deepcopy__(self, memo):
        return ClonedTable(self.table.clone())


class ScaledByATable(Base):
    def __init__(self):
        super().__init__()
        self.held = ClonedTable(torch.randn(20)[3:11])

    def odd(self, x):
        return x * self.held.table


class DenseBlock(nn.ModuleDict):
    def forward(self, x):
        found = [x]
        for layer in self.values():
            found.append(layer(torch.cat(found, 1)))
        return torch.cat(found, 1)[:, :8]


class ListBlock(nn.ModuleList):
    def forward(self, x):
        for layer in self:
            x = layer(x).tanh()
        return x


RECIPES |= {
    "object_that_moves_its_tensor": lambda: around(ScaledByATable(), expect="exact"),
    "old_weight_norm": lambda: around(torch.nn.utils.weight_norm(nn.Linear(8, 8)), expect="exact"),
    "module_dict_with_forward": lambda: around(
        DenseBlock({"a": nn.Linear(8, 4), "b": nn.Linear(12, 4)}), expect="exact"
    ),
    "module_list_with_forward": lambda: around(ListBlock([nn.Linear(8, 8), nn.Linear(8, 8)]), expect="exact"),
}


# -- B19: views


class BufferView(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("rows", self.linear.weight.data[:2])

    def odd(self, x):
        return x + self.rows.sum()


class TwoBuffers(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("all", torch.zeros(8))
        self.register_buffer("some", self.all[:3])

    def odd(self, x):
        if self.training:
            self.all += x.detach().mean(0)
        return x * (1 + self.some.sum())


class HiddenInDict(Base):
    def __init__(self):
        super().__init__()
        self.cache = {"deep": [self.linear.weight.detach()[1:]]}

    def odd(self, x):
        return x + self.cache["deep"][0].sum()


RECIPES |= {
    "buffer_view_of_parameter": lambda: around(nn.Sequential(BufferView())),
    "buffer_view_of_buffer": lambda: around(TwoBuffers()),
    "view_in_a_dict": lambda: around(HiddenInDict(), expect="differs"),
}


# -- B6, B7: weights that a layer changes itself


class Merging(Base):
    def __init__(self):
        super().__init__()
        self.linear.requires_grad_(False)
        self.delta = nn.Parameter(torch.randn(8, 8) / 8)
        self.merged = False

    def train(self, mode=True):
        if not mode and not self.merged:
            self.linear.weight.data += self.delta.data
            self.merged = True
        elif mode and self.merged:
            self.linear.weight.data -= self.delta.data
            self.merged = False
        return super().train(mode)

    def odd(self, x):
        return x if self.merged else x + x @ self.delta.t()


class Clamping(Base):
    def forward(self, x):
        self.linear.weight.data.clamp_(-0.2, 0.2)
        return self.linear(x)


class Normalizing(Base):
    def forward(self, x):
        with torch.no_grad():
            self.linear.weight.copy_(F.normalize(self.linear.weight, dim=1))
        return self.linear(x)


class Rebinding(Base):
    def forward(self, x):
        self.linear.weight.data = F.normalize(self.linear.weight.data, dim=1)
        return self.linear(x)


def clamp(module, *_):
    module.weight.data.clamp_(-0.1, 0.1)


RECIPES |= {
    "merges_on_eval": lambda: around(Merging(), validation=batches(2)),
    "merges_on_eval_without_validation": lambda: around(Merging()),
    "clamps_its_weight": lambda: around(Clamping()),
    "normalizes_its_weight": lambda: around(nn.Sequential(Normalizing())),
    "rebinds_its_data": lambda: {"layers": [Rebinding(), nn.Linear(8, 3)]},
    "clamps_in_a_hook": lambda: around(hooked(nn.Linear.register_forward_pre_hook, clamp)),
    "clamps_in_a_backward_hook": lambda: around(hooked(nn.Linear.register_full_backward_hook, clamp)),
}


# -- A2, B11, B12, B13: state and draws


class Counting(Base):
    def __init__(self, p=0.0):
        super().__init__(p)
        self.calls = 0

    def odd(self, x):
        self.calls += 1
        return x / self.calls


class Generating(Base):
    def __init__(self, p=0.0):
        super().__init__(p)
        self.generator = torch.Generator().manual_seed(3)

    def odd(self, x):
        return x + torch.randn(x.shape, generator=self.generator)


class NumpyGenerating(Base):
    def __init__(self, p=0.0):
        super().__init__(p)
        self.generator = np.random.default_rng(1)

    def odd(self, x):
        return x * float(self.generator.random())


class Seeding(Base):
    def odd(self, x):
        torch.manual_seed(7)
        return x + torch.randn(x.shape)


class FreshSeed(Base):
    def odd(self, x):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            return x + torch.randn(x.shape)


class PythonDraws(Base):
    def odd(self, x):
        return x * random.random()


RECIPES |= {
    "counter": lambda: around(Counting()),
    "counter_and_dropout": lambda: around(nn.Sequential(Counting(0.3), nn.Dropout(0.2))),
    "own_generator": lambda: around(Generating()),
    "own_generator_and_dropout": lambda: around(nn.Sequential(nn.Dropout(0.4), Generating(0.3))),
    "numpy_generator_and_dropout": lambda: around(NumpyGenerating(0.3)),
    "seeds_in_forward": lambda: around(Seeding()),
    "forks_and_seeds_in_forward": lambda: around(FreshSeed()),
    "draws_from_random": lambda: around(PythonDraws()),
}


class CountingLast(nn.Linear):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * self.calls


@recipe
def counter_in_the_class():
    class Shared(Base):
        calls = 0

        def odd(self, x):
            type(self).calls += 1
            return x / type(self).calls

    return around(Shared())


@recipe
def counter_in_a_closure():
    seen = []

    class Closing(Base):
        def odd(self, x):
            seen.append(1)
            return x / len(seen)

    return around(Closing())


@recipe
def hook_keeps_a_running_mean_in_a_dict():
    seen = {"mean": torch.zeros(8)}

    def center(module, entered, output):
        seen["mean"] = 0.9 * seen["mean"] + 0.1 * output.detach().mean(0)
        return output - seen["mean"]

    return around(hooked(nn.Linear.register_forward_hook, center), expect="refused")


class Caching(Base):
    last = None

    def odd(self, x):
        found = x if self.last is None else x + self.last
        self.last = x.detach()
        return found


class Annealing(Base):
    calls = 0

    def odd(self, x):
        self.calls += 1
        return x if self.calls < 4 else x / 2


class CountingLoss:
    calls = 0

    def __call__(self, output, target):
        self.calls += 1
        return F.cross_entropy(output, target) * self.calls


class CountingLossModule(nn.Module):
    calls = 0

    def forward(self, output, target):
        self.calls += 1
        return F.cross_entropy(output, target) * self.calls


@recipe
def loss_with_closure_state():
    seen = [0.0]

    def loss(output, target):
        found = F.cross_entropy(output, target)
        seen[0] = 0.9 * seen[0] + 0.1 * found.item()
        return found * (1 + seen[0])

    return around(loss_fn=loss)


@recipe
def loss_with_numpy_generator():
    generator = np.random.default_rng(1)
    return around(
        nn.Dropout(0.3), loss_fn=lambda output, target: F.cross_entropy(output, target) * float(generator.random())
    )


class Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient + 0.01 * torch.randn_like(gradient)


class NoisyBackward(Base):
    def odd(self, x):
        return Noisy.apply(x)


def add_noise(module, entering, _):
    return (entering[0] + torch.randn_like(entering[0]) / 100,)


def scale_by_numpy(module, entering, _):
    return (entering[0] * float(np.random.rand()),)


class NoisyTensorHook(Base):
    def odd(self, x):
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient + torch.randn_like(gradient) / 100)
        return x.tanh()


@recipe
def draws_in_a_parameter_hook():
    layer = nn.Linear(8, 8)
    layer.weight.register_hook(lambda gradient: gradient + torch.randn_like(gradient) / 100)
    return around(layer)


class Checkpointed(Base):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


RECIPES |= {
    "counter_last": lambda: {"layers": [nn.Linear(8, 8), CountingLast(8, 3)]},
    "cache_of_the_last_batch": lambda: around(Caching()),
    "anneals_after_some_calls": lambda: around(Annealing()),
    "loss_with_counter": lambda: around(nn.Dropout(0.3), loss_fn=CountingLoss()),
    "loss_module_with_counter": lambda: around(nn.Dropout(0.3), loss_fn=CountingLossModule()),
    "loss_that_draws": lambda: around(
        loss_fn=lambda output, target: F.cross_entropy(output + 0.1 * torch.randn_like(output), target)
    ),
    "draws_in_a_backward": lambda: around(NoisyBackward(0.2)),
    "draws_in_a_backward_hook": lambda: around(hooked(nn.Linear.register_full_backward_hook, add_noise)),
    "draws_in_a_tensor_hook": lambda: around(NoisyTensorHook()),
    "numpy_draws_in_a_backward": lambda: around(hooked(nn.Linear.register_full_backward_hook, scale_by_numpy)),
    "checkpoint_inside": lambda: around(Checkpointed(0.4), expect="exact"),
}


# -- B10: what a loss or a layer reads of others


class Leaving(Base):
    aux = torch.zeros(())

    def odd(self, x):
        self.aux = x.pow(2).mean()
        return x


@recipe
def loss_reads_an_attribute():
    layer = Leaving()
    return around(layer, loss_fn=lambda o, t: F.cross_entropy(o, t) + layer.aux)


@recipe
def loss_reads_through_the_model():
    model = nn.Sequential(*stack(nn.Sequential(Leaving())))
    return {"model": model, "loss_fn": lambda o, t: F.cross_entropy(o, t) + model[1][0].aux}


@recipe
def loss_reads_a_weight():
    layer = nn.Linear(8, 8)
    return around(layer, loss_fn=lambda o, t: F.cross_entropy(o, t) + layer.weight.pow(2).sum())


@recipe
def loss_reads_a_buffer():
    layer = nn.BatchNorm1d(8)
    return around(layer, loss_fn=lambda o, t: F.cross_entropy(o, t) * layer.running_mean.pow(2).sum())


@recipe
def loss_module_holds_a_layer():
    class Loss(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = [layer]

        def forward(self, output, target):
            return F.cross_entropy(output, target) + self.layer[0].aux

    layer = Leaving()
    return around(layer, loss_fn=Loss(layer))


@recipe
def layer_takes_the_norm_of_another_ones_weight():
    class Scaled(Base):
        def odd(self, x):
            return x * self.others[0].weight.detach().norm()

    first, second = nn.Linear(8, 8), Scaled()
    second.others = [first]
    return {"layers": [first, nn.Tanh(), second, nn.Linear(8, 3)]}


@recipe
def layer_reads_what_another_left():
    class Reading(Base):
        def __init__(self, other):
            super().__init__()
            self.other = [other]

        def odd(self, x):
            return x * self.other[0].aux.detach()

    first = Leaving()
    return around(first, nn.Tanh(), Reading(first))


@recipe
def layer_reads_what_another_left_in_a_global():
    left = {}

    class Giving(Base):
        def odd(self, x):
            left["x"] = x
            return x

    class Taking(Base):
        def odd(self, x):
            return x + left["x"]

    return around(Giving(), nn.Tanh(), Taking())


# -- B20, C24: buffers


class LateBuffer(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("b", None)

    def odd(self, x):
        if self.b is None:
            self.b = x.detach().mean(0)
        return x - self.b


class DropsItsBuffer(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("b", torch.ones(8))

    def odd(self, x):
        if self.b is not None:
            x, self.b = x * self.b * 2, None
        return x


class Bank(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("bank", torch.zeros(0, 8))

    def odd(self, x):
        if self.training:
            self.bank = torch.cat([self.bank, x.detach()])
        return x - self.bank.mean(0)


RECIPES |= {
    "buffer_set_in_forward": lambda: around(LateBuffer()),
    "buffer_becomes_none": lambda: around(DropsItsBuffer()),
    "memory_bank": lambda: around(Bank()),
}


# -- what only later batches show


class FreshBatches(list):
    """Gives copies."""

    def __iter__(self):
        return iter(copy.deepcopy(list(super().__iter__())))


def late(change, expect="refused", loader_of=list):
    """A layer that changes something of its own, or its input, on a later batch alone, and goes on from there."""

    class Layer(Base):
        def __init__(self):
            super().__init__(p=0.1)
            self.dropout, self.scale, self.factors, self.table = nn.Dropout(0.1), 1.0, [], torch.ones(8)

        def forward(self, x):
            if x.sum() > 100:
                change(self, x)
            x = super().forward(x) * self.scale * self.table[:8]
            for factor in self.factors:
                x = x * factor
            return self.dropout(x)

    loader = batches(5)
    loader[2][0].add_(10)
    return {"layers": [Layer(), nn.Linear(8, 3)], "loader": loader_of(loader), "expect": expect}


CHANGES = {
    "writes_to_its_weight": torch.no_grad()(lambda layer, x: layer.linear.weight.mul_(0.5)),
    "binds_its_weight_to_other_memory": lambda layer, x: setattr(
        layer.linear.weight, "data", layer.linear.weight.data * 0.5
    ),
    "freezes_its_weight": lambda layer, x: layer.linear.weight.requires_grad_(False),
    "replaces_its_weight": lambda layer, x: setattr(layer.linear, "weight", nn.Parameter(torch.ones(8, 8))),
    "registers_a_hook_on_its_weight": lambda layer, x: layer.linear.weight.register_hook(lambda gradient: gradient * 2),
    "works_in_place_on_the_batch": lambda layer, x: x.mul_(2),
}
ATTRIBUTES = {
    "scales": lambda layer, x: setattr(layer, "scale", layer.scale * 0.5),
    "sets_a_scale": lambda layer, x: setattr(layer, "scale", 0.5),
    "appends_to_a_list": lambda layer, x: layer.factors.append(0.5),
    "sets_another_dropout": lambda layer, x: setattr(layer.dropout, "p", 0.5),
    "evaluates_dropout": lambda layer, x: layer.dropout.eval(),
    "registers_a_hook": lambda layer, x: layer.linear.register_forward_hook(lambda module, args, out: out * 2),
    "registers_a_hook_on_gradients": lambda layer, x: layer.dropout.register_full_backward_hook(
        lambda module, inputs, outputs: (inputs[0] * 2,)
    ),
}
for expected, changes in (("refused", CHANGES), ("doubted", ATTRIBUTES)):
    for named, change in changes.items():
        RECIPES[f"late_{named}"] = partial(late, change, expected)


@recipe
def late_write_in_evaluation():
    def change(layer, x):
        if not torch.is_grad_enabled():
            layer.linear.weight.mul_(0.5)

    recipe = late(change)
    return recipe | {"validation": recipe["loader"]}


@recipe
def late_evaluation_of_dropout_beside_validation():
    return late(ATTRIBUTES["evaluates_dropout"], "doubted") | {"validation": batches()}


@recipe
def late_scale_of_the_longest_so_far():
    """As a rotary embedding that is rescaled; one of twice the length of the first is tried."""

    class Layer(Base):
        longest = 12

        def forward(self, x):
            self.longest = max(self.longest, len(x))
            return self.linear(x) * (12 / self.longest)

    short, longer = batches(), torch.randn(30, 8, generator=torch.Generator().manual_seed(3))
    loader = [*short, (longer, torch.arange(30) % 3), *short]
    return {"layers": [Layer(), nn.Linear(8, 3)], "loader": loader, "expect": "doubted"}


@recipe
def statistics_of_each_batch():
    class Layer(Base):
        def odd(self, x):
            self.kept, self.mean, self.length = x.detach(), float(x.detach().mean()), len(x)
            return x

    return around(Layer(), expect="exact")


@recipe
def late_write_in_a_retry():
    return late(CHANGES["writes_to_its_weight"]) | {"max_retries": 2}


@recipe
def late_work_in_place_on_copies_of_the_batch():
    return late(lambda layer, x: x.mul_(2), "exact", FreshBatches)


class Beside(Base):
    """Passes a part of its input on, beside what it computes."""

    def __init__(self, part=lambda x: x):
        super().__init__()
        self.part = part

    def forward(self, pair):
        x, mask = pair
        return self.linear(x), self.part(mask)


class ScalesBy(Base):
    """Changes what the layer below has passed on."""

    def __init__(self, change, is_late):
        super().__init__()
        self.change, self.is_late = change, is_late

    def forward(self, pair):
        x, mask = pair
        if not self.is_late or mask.max() > 1:
            self.change(mask)
        return self.linear(x * mask.mean())


def with_masks(num=4):
    found = [((x, torch.ones(6, 8)), target) for x, target in batches(num)]
    found[2][0][1].add_(1)
    return found


for part_name, part in {"whole": lambda mask: mask, "view": lambda mask: mask[:, 2:]}.items():
    for is_late in (False, True):
        for loader_of, expected in ((list, "refused"), (FreshBatches, "exact")):
            RECIPES[
                f"{'late_' * is_late}layer_above_works_in_place_on_{part_name}_part_of_{loader_of.__name__}_batches"
            ] = lambda part=part, is_late=is_late, loader_of=loader_of, expected=expected: {
                "layers": [Beside(part), ScalesBy(lambda mask: mask.mul_(0.5), is_late), nn.Linear(8, 3)],
                "loader": loader_of(with_masks()),
                "expect": expected,
            }


@recipe
def layer_above_works_on_a_batch_by_its_data():
    layers = [Beside(), ScalesBy(lambda mask: mask.data.mul_(0.5), is_late=False), nn.Linear(8, 3)]
    return {"layers": layers, "loader": with_masks(), "expect": "refused"}


@recipe
def late_work_in_place_on_what_is_also_the_target():
    def fresh(batch):
        x = batch[0].clone()
        return x, x

    found = late(lambda layer, x: x.mul_(0.5), "refused", FreshBatches)
    return found | {"layers": [*found["layers"], nn.Linear(3, 8)], "loss_fn": F.mse_loss, "unpack": fresh}


@recipe
def late_work_in_place_on_validation_after_copies_in_training():
    found = late(lambda layer, x: x.mul_(2), "refused", FreshBatches)
    return found | {"validation": list(found["loader"])}


@recipe
def late_work_in_place_that_changes_no_bit():
    return late(lambda layer, x: x.clamp_(-100, 100), "exact")


@recipe
def masked_targets_beside_a_list_of_validation():
    recipe = loss_masks_the_target_in_place()
    return recipe | {"loader": fresh_batches(), "validation": batches(2), "expect": "refused"}


@recipe
def writes_to_the_batch_in_eval_alone():
    layers = [nn.Dropout(0.5), nn.ReLU(inplace=True), nn.Linear(8, 3)]
    return {"layers": layers, "validation": batches(2)}


@recipe
def erases_at_random_in_place():
    class Erases(Base):
        def forward(self, x):
            if self.training:
                x.masked_fill_(torch.rand_like(x) < 0.2, 0)
            return self.linear(x)

    return {"layers": [Erases(), nn.Linear(8, 3)], "expect": "refused"}


class FreezesInEval(Base):
    def train(self, mode=True):
        super().train(mode)
        if not mode:
            self.linear.weight.requires_grad_(False)
        return self


class FreezesWhatItHasUsed(Base):
    def odd(self, x):
        self.linear.weight.requires_grad_(False)
        return x


class ShiftsIndices(nn.Module):
    """Out of range, if what it has left is given to it again."""

    def __init__(self):
        super().__init__()
        self.table, self.norm = nn.Embedding(9, 8), nn.BatchNorm1d(8)

    def forward(self, indices):
        return self.norm(self.table(indices.add_(1)).mean(1))


class Scales(Base):
    def forward(self, x):
        x.div_(255)
        self.last = float(x.sum())
        return self.linear(x)


def indices_to_shift(num=16):
    return DataLoader(TensorDataset(torch.arange(num * 3).reshape(num, 3) % 8, torch.arange(num) % 3), batch_size=8)


def fresh_batches():
    return DataLoader(TensorDataset(torch.rand(12, 8) * 255, torch.arange(12) % 3), batch_size=4)


for num in (1, 2):
    options = {"accumulation_steps": num, "expect": "exact"}
    RECIPES |= {
        f"shifts_indices_in_place_in_{num}_micro_batches": lambda options=options: {
            "layers": [ShiftsIndices(), nn.Linear(8, 3)],
            "loader": indices_to_shift(),
            "validation": indices_to_shift(),
            **options,
        },
        f"scales_in_place_and_notes_in_{num}_micro_batches": lambda options=options: {
            "layers": [Scales(), nn.Linear(8, 3)],
            "loader": fresh_batches(),
            "validation": fresh_batches(),
            **options,
        },
    }
RECIPES |= {
    "freezes_in_eval": lambda: around(FreezesInEval(), validation=batches(2), expect="refused"),
    "freezes_what_it_has_used": lambda: around(FreezesWhatItHasUsed(), expect="refused"),
}


@recipe
def inner_loop_on_a_parameter_of_its_own():
    class Layer(Base):
        def odd(self, x):
            weight = nn.Parameter(torch.full((8,), 2.0))
            weight.grad = torch.ones(8)
            torch.optim.SGD([weight], 0.1).step()
            return x * weight.detach()

    return around(Layer(), expect="exact")


@recipe
def forward_that_sets_a_gradient():
    class Layer(Base):
        def odd(self, x):
            self.linear.weight.grad = torch.ones(8, 8)
            return x

    return around(Layer(), expect="refused")


# -- B9, F37: boundaries


class Complex(nn.Module):
    def __init__(self, tail):
        super().__init__()
        self.weight, self.tail = nn.Parameter(torch.ones(8)), tail

    def forward(self, x):
        return self.tail(torch.complex(x * self.weight, x.tanh()))


class Apply(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def indices():
    return [(torch.randint(20, (6,)), torch.randint(3, (6,))) for _ in range(3)]


@recipe
def sparse_embedding():
    layers = [nn.Embedding(20, 8, sparse=True), nn.Linear(8, 3)]
    return {"layers": layers, "loader": indices(), "optimizer": torch.optim.SGD}


@recipe
def sparse_adam():
    layers = [nn.Embedding(20, 3, sparse=True), nn.Tanh()]
    return {"layers": layers, "loader": indices(), "optimizer": torch.optim.SparseAdam}


class Residual(Base):
    def forward(self, x):
        return self.linear(x).add_(x).relu_()


RECIPES |= {
    "conj_first_in_a_shard": lambda: around(
        Complex(lambda z: z), Apply(torch.conj), Apply(lambda z: z * z), Apply(torch.real)
    ),
    "conj_last_in_a_shard": lambda: around(Complex(torch.conj), Apply(lambda z: (z * (1 + 2j)).abs())),
    "neg_bit_at_a_boundary": lambda: around(Complex(lambda z: z.conj().imag), Apply(torch.tanh)),
    "sparse_boundary": lambda: around(Apply(lambda x: x.to_sparse()), Apply(lambda x: x.to_dense())),
    "nested_boundary": lambda: around(
        Apply(lambda x: torch.nested.nested_tensor([x[:2], x[2:]], layout=torch.jagged)),
        Apply(lambda x: torch.cat(x.unbind())),
    ),
    "in_place_on_what_another_needs": lambda: around(
        Residual(), nn.Linear(8, 8), nn.Hardtanh(inplace=True), expect="exact"
    ),
}


# -- B8, B14, B21: optimizers


def with_gradients(optimizer):
    """Each parameter that has a gradient, and its group."""
    return [(group, p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


class SGLD(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(torch.randn_like(parameter), alpha=1e-3)


class NumpyNoise(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for parameter in self.param_groups[0]["params"]:
            parameter.mul_(1 - 1e-3 * float(np.random.rand()))


class NoiseLater(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        self.num = getattr(self, "num", 0) + 1
        if self.num > 3:
            for parameter in self.param_groups[0]["params"]:
                parameter.add_(torch.randn_like(parameter), alpha=1e-3)


class GlobalCounter(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        count = self.state["global"].setdefault("step", 0) + 1
        self.state["global"]["step"] = count
        for group, parameter in with_gradients(self):
            parameter.add_(parameter.grad, alpha=-group["lr"] / count)


class GroupCounter(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        for group, parameter in with_gradients(self):
            parameter.add_(parameter.grad, alpha=-group["lr"] / group["k"])


class GroupTensor(torch.optim.SGD):
    def __init__(self, params, lr):
        super().__init__(params, lr)
        for group in self.param_groups:
            group["scale"] = torch.ones(())

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["scale"] *= 0.9
        for group, parameter in with_gradients(self):
            parameter.add_(parameter.grad * group["scale"], alpha=-group["lr"])


class AttributeCounter(torch.optim.SGD):
    num = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.num += 1
        for group in self.param_groups:
            group["lr"] = 0.01 / self.num
        super().step()


class NormScaled(torch.optim.SGD):
    """Couples parameters: scales by the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure=None):
        norm = torch.stack([parameter.grad.norm() for _, parameter in with_gradients(self)]).norm()
        for group, parameter in with_gradients(self):
            parameter.add_(parameter.grad / norm, alpha=-group["lr"])


OPTIMIZERS = (SGLD, NumpyNoise, NoiseLater, GlobalCounter, GroupCounter, GroupTensor, AttributeCounter, NormScaled)
for _scope in ("shard", "task"):
    RECIPES |= {
        f"optimizer_{each.__name__}_{_scope}": lambda optimizer=each, scope=_scope: around(
            nn.Dropout(0.2), optimizer=optimizer, optimizer_scope=scope
        )
        for each in OPTIMIZERS
    }


class OfType(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.linear, self.dtype = nn.Linear(8, 8).to(dtype), dtype

    def forward(self, x):
        return self.linear(x.to(self.dtype)).float()


@recipe
def gradient_noise_by_hook():
    layers = stack()
    for layer in layers:
        layer.weight.register_hook(lambda gradient: gradient + 0.01 * torch.randn_like(gradient))
    return {"layers": layers}


RECIPES |= {
    "tensor_lr": lambda: around(optimizer=lambda params, lr: torch.optim.AdamW(params, lr=torch.tensor(lr))),
    "tensor_lr_and_scheduler": lambda: around(
        optimizer=lambda params, lr: torch.optim.Adam(params, lr=torch.tensor(lr)),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
    ),
    "mixed_dtypes_clipped": lambda: around(
        OfType(torch.float64), OfType(torch.bfloat16), max_grad_norm=0.05, expect="exact"
    ),
}


# -- B16, B18, F39: loaders


class Drawing(Dataset):
    def __init__(self, draw, start=0):
        self.draw, self.num, self.start = draw, 0, start

    def __len__(self):
        return 12

    def __getitem__(self, index):
        self.num += 1
        x = torch.full((8,), float(index))
        return (x + self.draw() if self.num > self.start else x), index % 3


DRAWS = {
    "torch": lambda: torch.rand(8),
    "random": lambda: random.random(),
    "numpy": lambda: float(np.random.rand()),
}
for _start in (0, 10):
    RECIPES |= {
        f"dataset_draws_from_{name}_after_{_start}": lambda name=name, start=_start: around(
            nn.Dropout(0.2),
            loader=DataLoader(Drawing(DRAWS[name], start), batch_size=4, shuffle=True),
            expect="exact",
        )
        for name in DRAWS
    }


def seed_and_draw():
    torch.manual_seed(11)
    return torch.rand(8)


def fork_seed_and_draw():
    with torch.random.fork_rng(devices=[]):
        return seed_and_draw()


@recipe
def mixup_in_unpack():
    def unpack(batch):
        x, y = batch
        return x[torch.randperm(len(x))], y

    return around(nn.Dropout(0.2), unpack=unpack)


@recipe
def collate_that_draws():
    def collate(samples):
        x, y = default_collate(samples)
        return x * torch.rand(()), y

    data = Drawing(lambda: 0.0)
    return around(loader=DataLoader(data, batch_size=4, collate_fn=collate))


RECIPES |= {
    "dataset_seeds_torch": lambda: around(nn.Dropout(0.2), loader=DataLoader(Drawing(seed_and_draw), batch_size=4)),
    "dataset_forks_torch": lambda: around(
        nn.Dropout(0.2), loader=DataLoader(Drawing(fork_seed_and_draw), batch_size=4)
    ),
}


# -- Batches that are worked on in place


class Doubles(Base):
    """Works on its input in place, in training."""

    def forward(self, x):
        return self.linear(x.mul_(2) if self.training else x)


class Slices:
    """Gives slices of what it keeps."""

    def __init__(self, as_array=False):
        self.x = torch.randn(12, 8).numpy() if as_array else torch.randn(12, 8)

    def __len__(self):
        return 3

    def __iter__(self):
        for k in range(0, 12, 4):
            yield torch.as_tensor(self.x[k : k + 4]), torch.arange(4) % 3


@recipe
def input_is_the_target():
    def loss_fn(output, target):
        return F.mse_loss(output, target[:, :3])

    loader = [(x, x) for x, _ in batches()]
    return {"layers": [Doubles(), nn.Linear(8, 3)], "loss_fn": loss_fn, "loader": loader, "expect": "refused"}


@recipe
def loss_works_in_place_on_the_target():
    def loss_fn(output, target):
        return F.mse_loss(output, target.mul_(0.5))

    return around(loss_fn=loss_fn, loader=[(x, x[:, :3] * 1) for x, _ in batches()])


@recipe
def loss_masks_the_target_in_place():
    def loss_fn(output, target):
        target[target == 1] = -100
        return F.cross_entropy(output, target)

    return around(loss_fn=loss_fn, expect="refused")


@recipe
def loss_masks_the_target_of_batches_that_are_made_anew():
    return loss_masks_the_target_in_place() | {"loader": fresh_batches(), "expect": "exact"}


@recipe
def masks_a_target_that_every_micro_batch_has():
    """In plain PyTorch the second micro-batch finds what the first has left."""
    return with_a_common_table(lambda table: table.add_(1), "refused")


def with_a_common_table(change, expect):
    def loss_fn(output, target):
        labels, table = target
        change(table)
        return F.cross_entropy(output, labels) * table.sum()

    loader = [(x, (target, torch.arange(3))) for x, target in batches()]
    return around(loss_fn=loss_fn, loader=loader, accumulation_steps=2, expect=expect)


@recipe
def in_place_on_batches_that_are_made_anew():
    data = TensorDataset(torch.randn(12, 8), torch.arange(12) % 3)
    loader = DataLoader(data, batch_size=4)
    return {"layers": [Doubles(), nn.Linear(8, 3)], "loader": loader, "expect": "exact"}


RECIPES |= {
    "first_layer_works_in_place_on_a_list_of_batches": lambda: {
        "layers": [Doubles(), nn.Linear(8, 3)],
        "expect": "refused",
    },
    "first_layer_works_in_place_on_slices": lambda: {
        "layers": [Doubles(), nn.Linear(8, 3)],
        "loader": Slices(),
        "expect": "refused",
    },
    "first_layer_works_in_place_on_an_array": lambda: {
        "layers": [Doubles(), nn.Linear(8, 3)],
        "loader": Slices(as_array=True),
        "expect": "refused",
    },
    "first_layer_drops_in_place": lambda: {
        "layers": [nn.Dropout(0.5, inplace=True), nn.Linear(8, 8), nn.Linear(8, 3)],
        "expect": "refused",
    },
    "first_layer_is_a_relu_in_place": lambda: {
        "layers": [nn.ReLU(inplace=True), nn.Linear(8, 8), nn.Linear(8, 3)],
        "expect": "refused",
    },
}


# -- What comparing values does not tell


class SignOfZero(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("sign", torch.zeros(8))

    def odd(self, x):
        x = x * torch.copysign(torch.ones(()), self.sign)
        self.sign.neg_()
        return x


class OtherStrides(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.ones(8, 8))

    def odd(self, x):
        x = x * (1.0 if self.table.is_contiguous() else 1.5)
        self.table = self.table.T
        return x


class Empties(Base):
    def forward(self, x):
        return super().forward(x), x[:0], x[:0] * 2


class DoublesFirst(Base):
    def forward(self, x):
        return super().forward(x[0].mul_(2))


RECIPES |= {
    "buffer_of_signed_zeros": lambda: around(SignOfZero(), nn.Linear(8, 8), expect="exact"),
    "buffer_of_other_strides": lambda: around(OtherStrides(), nn.Linear(8, 8), expect="exact"),
    "empty_tensors_share_no_memory": lambda: around(Empties(), DoublesFirst(), expect="exact"),
}


# -- Backwards and hooks that reach for buffers


class Scaled(Base):
    """Divides by a buffer, which something changes in the backward."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(8))

    def odd(self, x):
        return x / self.scale.clone()


class NormInCheckpoint(Base):
    def __init__(self):
        super().__init__(0.2)
        self.norm = nn.BatchNorm1d(8)

    def odd(self, x):
        return self.norm(x)

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def gather(module, _, leaving):
    module.scale.mul_(0.9).add_(leaving[0].abs().sum(0))


def gather_beside_autograd(module, _, leaving):
    module.scale.data.mul_(0.9).add_(leaving[0].abs().sum(0))


def gather_in_another(module, _, leaving):
    module.scale = module.scale * 0.9 + leaving[0].abs().sum(0)


RECIPES |= {
    f"backward_hook_{hook.__name__}": lambda hook=hook: around(
        hooked(nn.Module.register_full_backward_hook, hook, Scaled()), nn.Linear(8, 8), expect="exact"
    )
    for hook in (gather, gather_beside_autograd, gather_in_another)
}


@recipe
def backward_of_a_shared_buffer():
    layers = [hooked(nn.Module.register_full_backward_hook, gather, Scaled()) for _ in range(2)]
    layers[1].scale = layers[0].scale
    return around(*layers, nn.Linear(8, 8))


class Divide(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return x / scale

    @staticmethod
    def backward(ctx, gradient):
        found = gradient / ctx.scale
        ctx.scale.add_(gradient.abs().mean(0))
        return found, None


class DividedByFunction(Scaled):
    def odd(self, x):
        return Divide.apply(x, self.scale)


@recipe
def parameter_hook_writes_a_buffer():
    layer = Scaled()
    layer.linear.weight.register_hook(lambda gradient: (layer.scale.add_(gradient.abs().mean(0)), None)[1])
    return around(layer, expect="refused")


@recipe
def parameter_hook_reads_a_buffer_that_changes():
    class Layer(Scaled):
        def odd(self, x):
            self.scale += x.detach().abs().mean(0)
            return x

    layer = Layer()
    layer.linear.weight.register_hook(lambda gradient: gradient * layer.scale)
    return around(layer, expect="refused")


@recipe
def parameter_hook_reads_a_buffer_that_stays():
    layer = Scaled()
    layer.linear.weight.register_hook(lambda gradient: gradient * layer.scale)
    return around(layer, nn.BatchNorm1d(8), expect="exact")


@recipe
def parameter_hook_reads_another_gradient():
    layers = stack(nn.Linear(8, 8))
    other = layers[1].weight
    layers[0].weight.register_hook(lambda gradient: gradient if other.grad is None else gradient + other.grad)
    return {"layers": layers, "expect": "refused"}


@recipe
def parameter_hook_writes_another_parameter():
    layers = stack(nn.Linear(8, 8))
    layers[0].weight.register_hook(lambda _: (layers[1].weight.data.mul_(0.9), None)[1])
    return {"layers": layers, "expect": "exact"}


@recipe
def parameter_hook_sorts_into_another_parameter():
    layers = stack(nn.Linear(8, 8))
    other, places = layers[1].weight, torch.empty(0, dtype=torch.long)
    layers[0].weight.register_hook(lambda _: (torch.sort(torch.ones(8, 8), out=(other.data, places)), None)[1])
    return {"layers": layers, "expect": "exact"}


@recipe
def parameter_hook_reads_another_weight():
    layers = stack(nn.Linear(8, 8))
    layers[0].weight.register_hook(lambda gradient: gradient + 0.1 * layers[1].weight.detach())
    return {"layers": layers, "expect": "exact"}


class WithDerivative(Base):
    def odd(self, x):
        return x + torch.func.jvp(self.linear, (x,), (torch.ones_like(x),))[1]


RECIPES |= {
    "batch_norm_in_a_checkpoint": lambda: around(
        NormInCheckpoint(), nn.Linear(8, 8), validation=batches(2), expect="exact"
    ),
    "function_changes_a_buffer_in_its_backward": lambda: around(DividedByFunction(), nn.Linear(8, 8), expect="exact"),
    "parameter_hook_reads_another_weight_early": lambda: {
        **parameter_hook_reads_another_weight(),
        "early_release": True,
        "expect": "refused",
    },
    "directional_derivative": lambda: around(WithDerivative(), nn.Linear(8, 8), expect="exact"),
}


# -- Batches whose containers and arrays change


class TakesDict(Base):
    def forward(self, batch):
        batch["calls"] += 1
        return super().forward(batch["x"]) / batch["calls"]


@recipe
def layer_changes_a_dict_that_the_loader_keeps():
    loader = [({"x": x, "calls": 0}, target) for x, target in batches()]
    return {"layers": [TakesDict(), nn.Linear(8, 3)], "loader": loader, "expect": "refused"}


@recipe
def layer_changes_a_dict_that_is_made_anew():
    def unpack(batch):
        return {"x": batch[0], "calls": 0}, batch[1]

    return {"layers": [TakesDict(), nn.Linear(8, 3)], "unpack": unpack, "expect": "exact"}


@recipe
def loss_pops_from_a_target_that_the_loader_keeps():
    def loss_fn(output, target):
        return F.cross_entropy(output, target.pop("first") if len(target) > 1 else target["second"])

    loader = [(x, {"first": target, "second": (target + 1) % 3}) for x, target in batches()]
    return around(loss_fn=loss_fn, loader=loader, expect="refused")


class OneArray:
    """Reads every batch into the same array, which begins beside a multiple of 64."""

    def __len__(self):
        return 3

    def __iter__(self):
        array = np.zeros(100, np.float32)[3:51].reshape(6, 8)
        for x, target in batches():
            array[:] = x.numpy()
            yield array, target


RECIPES |= {
    "array_that_the_loader_fills_again": lambda: {
        "layers": [Apply(torch.from_numpy), *stack()],
        "loader": OneArray(),
        "expect": "exact",
    },
}


# -- What other batches leave


class RunningMaximum(Base):
    most = 0.0

    def odd(self, x):
        self.most = max(self.most, x.abs().max().item())
        return x / self.most


class Slotted:
    __slots__ = ("most",)


class RunningMaximumInSlots(Base):
    def __init__(self):
        super().__init__()
        self.kept = Slotted()
        self.kept.most = 0.0

    def odd(self, x):
        self.kept.most = max(self.kept.most, x.abs().max().item())
        return x / self.kept.most


class Numbering(Base):
    def __init__(self):
        super().__init__()
        self.numbers = {}

    def odd(self, x):
        key = tuple((x.detach().sum(0) > 0).tolist())
        return x * (1 + self.numbers.setdefault(key, len(self.numbers)))


class LazyTable(Base):
    """Nothing but a cache: a table that is made again where it is too short."""

    table = None

    def odd(self, x):
        if self.table is None or len(self.table) < x.shape[0]:
            self.table = torch.linspace(0, 1, 5 * x.shape[0]).cos()
        return x * (1 if self.table is None else self.table[0])


RECIPES |= {
    f"attribute_of_{layer.__name__}": lambda layer=layer: around(
        layer(), nn.Linear(8, 8), expect="exact" if layer is LazyTable else "refused"
    )
    for layer in (RunningMaximum, RunningMaximumInSlots, Numbering, LazyTable)
}


# -- State where no copy has it: what counts is told from what stays


class Progress:
    step = 0

    @staticmethod
    def scale():
        Progress.step += 1
        return 1.0 if Progress.step < 40 else 0.5


class Longer(Progress):
    pass


class Steps:
    """Counts in an object, beside the layers."""

    def __init__(self):
        self.num = 0

    def __call__(self):
        self.num += 1
        return 1.0 if self.num < 40 else 0.5


class Halving(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx, x):
        Halving.calls += 1
        return x if Halving.calls < 40 else x / 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class FromSomeStepOn(Base):
    """Is another layer after many calls, which something else counts."""

    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def odd(self, x):
        return x * self.scale()


COUNTS, CELLS, SPACE, STEPS = bytearray(1), array("q", [0]), SimpleNamespace(num=0), Steps()
MODULE = ModuleType("tests.progress")
MODULE.num = 0
SCALES = iter([1.0] * 40 + [0.5] * 1000)


def endless():
    for k in count():
        yield 1.0 if k < 40 else 0.5


GENERATED = endless()


def elsewhere(name):
    """Make a function that counts in the globals of another module."""
    module = ModuleType(name)
    module.__file__ = f"{name}.py"
    exec("num = 0\ndef scale():\n    global num\n    num += 1\n    return 1.0 if num < 40 else 0.5", vars(module))
    sys.modules[name] = module
    return module.scale


IN_THE_PACKAGE, IN_ANOTHER = elsewhere("tests.elsewhere"), elsewhere("elsewhere")


def of_a_function_of_the_package():
    return IN_THE_PACKAGE()


def of_a_function_of_another_package():
    return IN_ANOTHER()


def of_bytes():
    COUNTS[0] = (COUNTS[0] + 1) % 256
    return 1.0 if COUNTS[0] < 40 else 0.5


def of_an_array():
    CELLS[0] += 1
    return 1.0 if CELLS[0] < 40 else 0.5


def of_a_namespace():
    SPACE.num += 1
    return 1.0 if SPACE.num < 40 else 0.5


def of_a_module():
    MODULE.num += 1
    return 1.0 if MODULE.num < 40 else 0.5


def of_an_object():
    return STEPS()


def of_a_class():
    Progress.step += 1
    return 1.0 if Progress.step < 40 else 0.5


def of_a_static_method():
    return Progress.scale()


def of_a_base_class():
    return Longer.scale()


def of_an_iterator():
    return next(SCALES)


def of_a_generator():
    return next(GENERATED)


COUNTERS = (of_bytes, of_an_array, of_a_namespace, of_a_module, of_an_object, of_a_class, of_a_static_method)
COUNTERS += (of_a_base_class, of_an_iterator, of_a_generator)
COUNTERS += (of_a_function_of_the_package, of_a_function_of_another_package)
RECIPES |= {
    f"counter_{scale.__name__}": lambda scale=scale: around(FromSomeStepOn(scale), expect="refused")
    for scale in COUNTERS
}
RECIPES |= {
    f"loss_with_a_counter_{scale.__name__}": lambda scale=scale: around(
        nn.Dropout(0.3), loss_fn=lambda output, target: F.cross_entropy(output, target) * scale(), expect="refused"
    )
    for scale in COUNTERS
}


@recipe
def counter_of_a_class_in_a_closure():
    class Local:
        num = 0

    def scale():
        Local.num += 1
        return 1.0 if Local.num < 40 else 0.5

    return around(FromSomeStepOn(scale), expect="refused")


RECIPES |= {
    "counter_of_an_autograd_function": lambda: around(Apply(Halving.apply), expect="refused"),
    "counter_of_an_autograd_function_that_is_named": lambda: around(
        Apply(lambda x: Halving.apply(x)), expect="refused"
    ),
}


class InAttribute(Base):
    """Counts in an attribute that is no number."""

    def __init__(self, kept, scale):
        super().__init__()
        self.kept, self.scale = kept, scale

    def odd(self, x):
        return x * self.scale(self.kept)


def of_step(k):
    return 1.0 if k < 40 else 0.5


def add_to_first(kept):
    kept[0] += 1
    return 1.0 if kept[0] < 40 else 0.5


RECIPES |= {
    "counter_in_an_attribute_of_bytes": lambda: around(InAttribute(bytearray(1), add_to_first), expect="refused"),
    "counter_in_an_attribute_of_array": lambda: around(InAttribute(array("q", [0]), add_to_first), expect="refused"),
    "counter_in_an_attribute_of_iterator": lambda: around(
        InAttribute(iter([1.0] * 40 + [0.5] * 1000), next), expect="refused"
    ),
    "counter_in_an_attribute_of_range": lambda: around(
        InAttribute(map(of_step, iter(range(1000))), next), expect="refused"
    ),
}


FIRST = {}
FIRST_OF = weakref.WeakKeyDictionary()


class FromTheStart(Base):
    """Is drawn to the weights that it began with, which it looks up by a key."""

    def __init__(self, key, table):
        super().__init__()
        self.key, self.table = key, table

    def odd(self, x):
        table, key = self.table(), self.key(self)
        if key not in table:
            table[key] = self.linear.weight.detach().clone()
        return x + F.linear(x, self.linear.weight - table[key])


def first():
    return FIRST


def first_of():
    return FIRST_OF


@recipe
def table_by_id_in_a_closure():
    table = {}
    return around(FromTheStart(id, lambda: table), expect="refused")


RECIPES |= {
    "table_by_id_of_a_parameter": lambda: around(
        FromTheStart(lambda layer: id(layer.linear.weight), first), expect="refused"
    ),
    "table_by_id_of_a_module": lambda: around(FromTheStart(id, first), expect="refused"),
    "table_by_module": lambda: around(FromTheStart(lambda layer: layer, first), expect="refused"),
    "table_by_weak_module": lambda: around(FromTheStart(lambda layer: layer, first_of), expect="refused"),
    "table_by_module_and_name": lambda: around(FromTheStart(lambda layer: (layer, "weight"), first), expect="refused"),
    "table_by_parameter": lambda: around(FromTheStart(lambda layer: layer.linear.weight, first), expect="refused"),
}


@recipe
def globals_that_stay():
    """What code looks up and leaves as it is costs nothing but the look."""

    def scale():
        return 1.0 / len((STILL.names, Still.names))

    return around(FromSomeStepOn(scale), expect="exact")


class Still:
    names = ("a", "b")


STILL = Still()


class LossByItsMaximum:
    most = 0.0

    def __call__(self, output, target):
        found = F.cross_entropy(output, target)
        self.most = max(self.most, found.item())
        return found / self.most


@recipe
def shared_buffer_that_is_replaced():
    class Layer(Scaled):
        def odd(self, x):
            self.scale = self.scale * 1.1
            return super().odd(x)

    layers = [Layer(), Layer()]
    layers[1].scale = layers[0].scale
    return around(*layers, expect="refused")


@recipe
def loss_reads_the_mode_of_a_layer():
    layers = stack(nn.Dropout(0.2))

    def loss_fn(output, target):
        return F.cross_entropy(output, target) * (1 if layers[1].training else 2)

    return {"layers": layers, "loss_fn": loss_fn, "validation": batches(2), "expect": "refused"}


class Leaves(Base):
    """Leaves the thread in another mode, which a layer after it sets back."""

    def __init__(self, change, put_back=None):
        super().__init__()
        self.change, self.put_back = change, put_back

    def odd(self, x):
        self.change()
        return x

    def forward(self, x):
        x = super().forward(x)
        if self.put_back is not None:
            self.put_back()
        return x


MODES = {
    "gradients": (partial(torch.set_grad_enabled, False), partial(torch.set_grad_enabled, True)),
    "default_dtype": (partial(torch.set_default_dtype, torch.float64), partial(torch.set_default_dtype, torch.float32)),
    "autocast": (partial(torch.set_autocast_enabled, "cpu", True), partial(torch.set_autocast_enabled, "cpu", False)),
}
RECIPES |= {
    f"layer_leaves_{name}_changed": lambda change=change, back=back: around(
        nn.Sequential(Leaves(change)), Leaves(back), Apply(torch.Tensor.float)
    )
    for name, (change, back) in MODES.items()
}
RECIPES |= {
    f"layer_puts_{name}_back": lambda change=change, back=back: around(
        Leaves(change, back), Apply(torch.Tensor.float), nn.Linear(8, 8), expect="exact"
    )
    for name, (change, back) in MODES.items()
}


@recipe
def loss_runs_a_backward_itself():
    def loss_fn(output, target):
        loss = F.cross_entropy(output, target)
        loss.backward(retain_graph=True)
        return loss

    return around(loss_fn=loss_fn)


@recipe
def loader_goes_on_from_gradients_of_its_batches():
    """Adversarial training, as one writes it down first."""
    x = torch.randn(6, 8, requires_grad=True)

    def unpack(batch):
        if x.grad is not None:
            x.data.add_(x.grad.sign(), alpha=0.1)
        return x, batch[1]

    return around(unpack=unpack, expect="refused")


@recipe
def clipped_with_parameters_that_are_left_out():
    def optimizer(params, lr):
        return torch.optim.AdamW(list(params)[:2], lr)

    return around(optimizer=optimizer, max_grad_norm=0.01, expect="refused")


class CouplesLater(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        parameters = [parameter for _, parameter in with_gradients(self)]
        for parameter in parameters:
            self.state[parameter]["num"] = self.state[parameter].get("num", 0) + 1
        if self.state[parameters[0]]["num"] > 4:
            norm = sum(parameter.norm() for parameter in parameters)
            for parameter in parameters:
                parameter.mul_(1 - 1e-3 / norm)


class CouplesLarge(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        parameters = [parameter for _, parameter in with_gradients(self)]
        norm = sum(parameter.grad.norm() for parameter in parameters if parameter.numel() > 16)
        for parameter in parameters:
            parameter.add_(parameter.grad / (1 + norm), alpha=-0.1)


RECIPES |= {
    "loss_object_with_a_running_maximum": lambda: around(nn.Dropout(0.3), loss_fn=LossByItsMaximum(), expect="refused"),
    "loss_of_a_spread_step_runs_a_backward_itself": lambda: {
        **loss_runs_a_backward_itself(),
        "accumulation_steps": 3,
        "spread": 2,
    },
    "batch_that_requires_gradients": lambda: around(
        loader=[(x.requires_grad_(), y) for x, y in batches()], expect="refused"
    ),
    "optimizer_that_couples_later": lambda: around(nn.Linear(8, 8), optimizer=CouplesLater, expect="refused"),
    "optimizer_that_couples_large_parameters": lambda: around(
        nn.Linear(8, 8), optimizer=CouplesLarge, expect="refused"
    ),
}
