"""A profile measures each layer by itself, sees what the engine has to know, and leaves everything as it found it."""

import random
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from partitioners import DependsOnValues, MemoryMeter, Skips, profile, profile_evaluation
from tests.refused import names, refused

FLOAT, LONG = 4, 8


class Function(nn.Module):
    """A layer that is one function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Checkpointed(nn.Module):
    def __init__(self, *layers, use_reentrant=False):
        super().__init__()
        self.inner = nn.Sequential(*layers)
        self.use_reentrant = use_reentrant

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.use_reentrant)


class Counter(nn.Module):
    """Counts its calls in a buffer, in the way it is told."""

    def __init__(self, change):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.change = change

    def forward(self, x):
        self.change(self)
        return x * 2


def loss_by_mean(output, target):
    return (output - target).square().mean()


def costs_of(*layers, width=4, batch=3, inputs=None):
    """Costs of layers that end in `width` features, and of a last Linear with a loss."""
    inputs = torch.randn(batch, 4) if inputs is None else inputs
    return profile([*layers, nn.Linear(width, 1)], inputs, torch.zeros(batch, 1), loss_by_mean)


# What it measures.


def test_a_linear_and_a_loss_by_hand():
    batch, wide, narrow = 5, 8, 3
    model = nn.Sequential(nn.Linear(wide, narrow), nn.Linear(narrow, 1, bias=False))
    first, last = profile(model, torch.randn(batch, wide), torch.zeros(batch, 1), loss_by_mean)
    out, params = batch * narrow * FLOAT, (wide * narrow + narrow) * FLOAT
    assert (first.param_bytes, first.grad_bytes, first.buffer_bytes) == (params, params, 0)
    assert first.padding_bytes == 128 + 64 - params
    assert (first.input_bytes, first.output_bytes, first.target_bytes) == (batch * wide * FLOAT, out, 0)
    assert first.saved_bytes == out
    assert first.peak_bytes == out + params  # the input needs no gradient
    assert (last.input_bytes, last.output_bytes, last.target_bytes) == (out, FLOAT, batch * FLOAT)
    assert last.param_bytes == narrow * FLOAT
    # Output and difference, of which the loss keeps the difference; the loss.
    assert last.saved_bytes == batch * FLOAT + FLOAT
    assert [cost.index for cost in (first, last)] == [0, 1]
    assert [cost.name for cost in (first, last)] == ["0 (Linear)", "1 (Linear)"]
    assert first.forward_s > 0
    assert first.backward_s > 0


def test_peak_is_that_of_forward_and_backward_of_the_layer_alone():
    torch.manual_seed(0)
    layer, x = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), torch.randn(2, 5, 16)
    cost = profile([layer, nn.Flatten(), nn.Linear(80, 1)], x, torch.zeros(2, 1), loss_by_mean)[0]
    incoming = torch.ones_like(x)
    with MemoryMeter() as meter:
        output = layer(x)
        assert cost.saved_bytes == meter.current_bytes
        output.backward(incoming)
        assert cost.peak_bytes == meter.peak_bytes


def test_frozen_parameters_have_no_gradient():
    frozen = nn.Linear(4, 4).requires_grad_(False)
    cost = costs_of(frozen)[0]
    assert (cost.param_bytes, cost.grad_bytes, cost.saved_bytes, cost.backward_s < 1) == (80, 0, 48, True)


def test_a_layer_below_which_nothing_trains_makes_no_gradient_of_its_input():
    below, above = nn.Linear(4, 4), nn.ReLU()
    with_gradient = costs_of(below, above)[1]
    without = costs_of(below.requires_grad_(False), above)[1]
    assert with_gradient.peak_bytes == without.peak_bytes + 48


def test_the_last_layer_includes_the_loss_module():
    loss_fn = nn.CrossEntropyLoss(weight=torch.ones(7))
    cost = profile([nn.Linear(4, 7)], torch.randn(3, 4), torch.zeros(3, dtype=torch.long), loss_fn)[0]
    assert (cost.buffer_bytes, cost.target_bytes, cost.output_bytes) == (7 * FLOAT, 3 * LONG, FLOAT)
    assert cost.changes_buffers is False


def test_nested_and_integer_boundaries():
    split = Function(lambda x: {"left": x["x"] * 2, "both": (x["x"][:, :2], [x["ids"], x["ids"]]), "size": 3})
    join = Function(lambda b: b["left"] + b["both"][1][0].unsqueeze(1) + b["both"][0].sum() + b["size"])
    inputs = {"x": torch.randn(3, 4), "ids": torch.arange(3)}
    first, second, _ = costs_of(split, join, inputs=inputs)
    assert first.input_bytes == 48 + 24
    assert first.output_bytes == second.input_bytes == 48 + 40 + 24  # a slice reaches from its first to its last


def test_names_are_keys_and_classes_where_keys_are_numbers():
    model = nn.Sequential()
    model.add_module("embed", nn.Linear(4, 4))
    model.append(nn.ReLU())
    model.add_module("head", nn.Linear(4, 1))
    costs = profile(model, torch.randn(3, 4), torch.zeros(3, 1), loss_by_mean)
    assert [cost.name for cost in costs] == ["embed (Linear)", "1 (ReLU)", "head (Linear)"]


# What it sees.


@pytest.mark.parametrize(
    ("layer", "draws_random", "draws_globally"),
    [
        (nn.Linear(4, 4), False, False),
        (nn.Dropout(0.5), True, False),
        (nn.Dropout(0.5).eval(), False, False),
        (Function(lambda x: x + torch.randn_like(x)), True, False),
        (Function(lambda x: x + torch.randn(4, generator=torch.Generator())), False, False),
        (Function(lambda x: x * random.random()), False, True),
        (Function(lambda x: x * float(np.random.rand())), False, True),
        (Function(lambda x: F.scaled_dot_product_attention(x, x, x)), False, False),
        (Function(lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.0)), False, False),
        (Function(lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.1)), True, False),
        (Function(lambda x: F.rrelu(x, training=False)), False, False),
        (Function(lambda x: F.rrelu(x, training=True)), True, False),
        (Function(lambda x: torch.native_dropout(x, 0.5, False)[0]), False, False),
        (Function(lambda x: torch.native_dropout(x, 0.0, True)[0]), True, False),  # it draws all the same
        (nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0), False, False),
        (nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1), True, False),
        (Checkpointed(nn.Linear(4, 4), nn.Dropout(0.5)), True, True),
        # Nothing is drawn, yet the recomputation winds the process-wide generator back.
        (Checkpointed(nn.Linear(4, 4), nn.ReLU()), False, True),
        (Checkpointed(nn.Linear(4, 4), nn.Dropout(0.5), use_reentrant=True), True, True),
    ],
)
def test_draws(layer, draws_random, draws_globally):
    cost = costs_of(nn.Linear(4, 4), layer)[1]
    assert (cost.draws_random, cost.draws_globally) == (draws_random, draws_globally)


def test_a_draw_in_the_loss_belongs_to_the_last_layer():
    first, last = profile(
        [nn.Linear(4, 4), nn.Linear(4, 1)],
        torch.randn(3, 4),
        torch.zeros(3, 1),
        lambda output, target: (output + torch.rand_like(output) - target).sum(),
    )
    assert (first.draws_random, last.draws_random) == (False, True)


@pytest.mark.parametrize(
    ("layer", "changes_input"),
    [
        (nn.ReLU(inplace=True), True),
        (nn.ReLU(), False),
        (nn.Dropout(0.5, inplace=True), True),
        (Function(lambda x: x.view(-1).mul_(2).view_as(x)), True),
        (Function(lambda x: x.detach().mul_(2) + x), True),
        (nn.Identity(), False),
    ],
)
def test_work_in_place_on_the_input(layer, changes_input):
    inputs = torch.randn(3, 4)
    before = inputs.clone()
    first, _ = costs_of(layer, inputs=inputs)  # on the user's tensor
    _, second, _ = costs_of(nn.Linear(4, 4), layer)  # on what another layer made
    assert first.changes_input is second.changes_input is changes_input
    assert torch.equal(inputs, before)


def test_working_in_place_on_a_view_costs_a_copy_of_the_gradient():
    # A Linear hands on a view when it is given more than two dimensions.
    batch, sequence = torch.randn(3, 4), torch.randn(1, 3, 4)
    relu = nn.ReLU(inplace=True)
    flat = profile([nn.Linear(4, 4), relu, nn.Linear(4, 1)], batch, torch.zeros(3, 1), loss_by_mean)[1]
    view = profile([nn.Linear(4, 4), relu, nn.Linear(4, 1)], sequence, torch.zeros(1, 3, 1), loss_by_mean)[1]
    assert (flat.saved_bytes, view.saved_bytes) == (0, 0)
    assert (flat.peak_bytes, view.peak_bytes) == (48, 4 * 48)


def rebind(layer):
    layer.calls = layer.calls + 1


@pytest.mark.parametrize(
    ("layer", "changes_buffers"),
    [
        (nn.BatchNorm1d(4), True),
        (nn.BatchNorm1d(4).eval(), False),
        (Counter(lambda layer: layer.calls.add_(1)), True),
        (Counter(rebind), True),
        (Counter(lambda layer: layer.register_buffer("more", torch.zeros(1))), True),
        (Counter(lambda layer: None), False),
        (nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), True),
    ],
)
def test_changed_buffers(layer, changes_buffers):
    before = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    cost = costs_of(nn.Linear(4, 4), layer)[1]
    assert cost.changes_buffers is changes_buffers
    after = dict(layer.named_buffers())
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_shared_parameters_count_in_each_layer_that_holds_them():
    tied, middle, untied = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
    middle.weight = tied.weight
    costs = costs_of(tied, middle, untied, tied)
    assert [cost.shares_with for cost in costs] == [(1, 3), (0, 3), (), (0, 1), ()]
    assert [cost.param_bytes for cost in costs[:4]] == [80, 80, 64, 80]
    # The second place starts without a gradient, as the first did: no peak for adding two.
    assert costs[3].peak_bytes == costs[1].peak_bytes


# What it leaves alone.


def everything(model):
    return {
        "values": [parameter.clone() for parameter in model.parameters()],
        "places": [parameter.data_ptr() for parameter in model.parameters()],
        "grads": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "buffers": [buffer.clone() for buffer in model.buffers()],
        "flags": [module.training for module in model.modules()],
        "trainable": [parameter.requires_grad for parameter in model.parameters()],
        "torch": torch.get_rng_state(),
        "random": random.getstate(),
        "numpy": np.random.get_state(),
    }


def assert_same(before, after):
    for key, values in before.items():
        for old, new in zip(values, after[key], strict=True):
            if isinstance(old, (torch.Tensor, np.ndarray)):
                assert (old == new).all(), key
            else:
                assert old == new, key


@pytest.mark.parametrize("grad_mode", [True, False])
def test_everything_is_as_it_was(grad_mode):
    torch.manual_seed(0)
    noisy = Function(lambda x: x * random.random() * float(np.random.rand()))
    model = nn.Sequential(
        nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Dropout(0.5), noisy, Checkpointed(nn.Linear(4, 1))
    )
    model[3].eval()
    model[0].bias.requires_grad_(False)
    inputs, target = torch.randn(3, 4, requires_grad=True), torch.zeros(3, 1)
    (model(inputs) - target).square().mean().backward()
    given = [inputs.detach().clone(), target.clone(), inputs.grad.clone()]
    before = everything(model)
    with torch.set_grad_enabled(grad_mode):
        profile(model, inputs, target, loss_by_mean)
        assert torch.is_grad_enabled() is grad_mode
    assert_same(before, everything(model))
    assert all(torch.equal(a, b) for a, b in zip(given, [inputs, target, inputs.grad], strict=True))


def test_everything_is_as_it_was_after_an_error():
    def broken(x):
        random.random(), torch.rand(1), np.random.rand()
        raise KeyError("missing")

    model = nn.Sequential(nn.BatchNorm1d(4), Function(broken), nn.Linear(4, 1))
    inputs = torch.randn(3, 4)
    before = everything(model)
    with refused(KeyError, says="missing"):
        profile(model, inputs, torch.zeros(3, 1), loss_by_mean)
    assert_same(before, everything(model))


@pytest.mark.parametrize("name", ["weight", "running_mean"])
def test_a_hook_writes_to_a_copy_of_what_another_layer_has(name):
    layers = [nn.Linear(4, 4), nn.BatchNorm1d(4)]
    held = getattr(layers[1], name)
    before = held.detach().clone()

    def hook(*_):
        with torch.no_grad():
            held.add_(1)

    layers[0].register_forward_hook(hook)
    profile(layers, torch.ones(2, 4), torch.ones(2, 4), F.mse_loss)
    assert torch.equal(held, before)


def test_parameters_are_copies():
    seen = []
    layer = nn.Linear(4, 4)
    layer.register_forward_pre_hook(lambda module, _: seen.append(module.weight.data_ptr()))
    costs_of(layer)
    assert layer.weight.data_ptr() not in seen


class RealMeter(MemoryMeter):
    """Counts real tensors only: fake ones take no memory."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves((args, kwargs, result))):
            return result
        return super().__torch_dispatch__(lambda *_, **__: result, types, args, kwargs)


def test_only_one_layers_saved_tensors_are_alive_at_a_time():
    layers = [nn.Sequential(*(nn.Tanh() for _ in range(10))) for _ in range(10)]
    inputs, target = torch.randn(64, 64), torch.zeros(64, 1)
    with RealMeter() as meter:
        costs = profile([nn.Linear(64, 64), *layers, nn.Linear(64, 1)], inputs, target, loss_by_mean)
    each = costs[1].saved_bytes
    assert each == 10 * inputs.numel() * FLOAT
    assert meter.peak_bytes < 2 * each


def test_only_one_layers_copy_and_gradients_are_alive_at_a_time():
    layers = [nn.Linear(64, 64) for _ in range(10)]
    inputs, target = torch.randn(2, 64), torch.zeros(2, 64)
    with RealMeter() as meter:
        costs = profile(layers, inputs, target, loss_by_mean)
    assert meter.peak_bytes < 3 * costs[0].grad_bytes


def test_a_weight_that_a_hook_recomputes_does_not_hinder_the_copy():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        layer = nn.utils.weight_norm(nn.Linear(4, 4))
    layer(torch.randn(3, 4))  # leaves a weight that is no leaf
    assert costs_of(layer)[0].param_bytes == (16 + 4 + 4) * FLOAT


# What it refuses.


def test_a_layer_without_tensors_in_its_output_is_named():
    with refused(TypeError, says="output dict") as caught:
        costs_of(nn.Linear(4, 4), Function(lambda x: {"size": 3}))
    names(note_of(caught.value), layer="1 (Function)")


@pytest.mark.parametrize(
    ("loss_fn", "found"), [(lambda a, b: a - b, "(3, 1)"), (lambda a, b: (a - b).sum().item(), "float")]
)
def test_a_loss_that_is_no_scalar_is_refused_with_its_shape(loss_fn, found):
    with refused(ValueError, says=f"loss {found}") as caught:
        profile([nn.Linear(4, 1)], torch.randn(3, 4), torch.zeros(3, 1), loss_fn)
    names(note_of(caught.value), says="loss_fn")


def test_an_exception_in_a_layer_keeps_its_type_and_names_the_layer():
    with refused(RuntimeError, says="mat1 mat2") as caught:
        costs_of(nn.Linear(4, 5), nn.Linear(4, 4))
    names(note_of(caught.value), layer="1 (Linear)")


def test_a_lazy_layer_is_refused():
    with refused(ValueError, says="lazy"):
        costs_of(nn.LazyLinear(4))


@pytest.mark.parametrize(
    ("model", "error", "text"),
    [
        ([], ValueError, "model 0"),
        (nn.Sequential(), ValueError, "model 0"),
        ([torch.relu], TypeError, "0 (builtin_function_or_method)"),
    ],
)
def test_what_is_no_model_is_refused(model, error, text):
    with refused(error, says=text):
        profile(model, torch.randn(3, 4), torch.zeros(3, 1), loss_by_mean)


@pytest.mark.parametrize(("option", "value"), [("device", "meta"), ("device", "xpu"), ("precision", "int8")])
def test_other_devices_and_precisions_are_refused(option, value):
    with refused(ValueError, says=f"{option} '{value}'"):
        profile([nn.Linear(4, 1)], torch.randn(3, 4), torch.zeros(3, 1), loss_by_mean, **{option: value})


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), None])
def test_the_cpu_may_be_named(device):
    assert len(profile([nn.Linear(4, 1)], torch.randn(3, 4), torch.zeros(3, 1), loss_by_mean, device=device)) == 1


def note_of(error):
    """What was added to an exception: its notes, or its text where Python has none (3.10)."""
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


@pytest.mark.parametrize("num_heads", [4, 2, 1])
def test_attention_counts_every_head_of_queries_also_where_they_share_keys(num_heads):
    samples, heads, positions, width = 3, 4, 5, 8
    attention = Function(
        lambda x: F.scaled_dot_product_attention(x, x[:, :num_heads], x[:, :num_heads], enable_gqa=num_heads < heads)
    )
    inputs = torch.randn(samples, heads, positions, width)
    _, cost, _ = profile([nn.Linear(width, width), attention, nn.Linear(width, width)], inputs, inputs, loss_by_mean)
    product = 2 * samples * heads * positions * positions * width
    assert (cost.forward_flops, cost.backward_flops) == (2 * product, 5 * product)


# An evaluation.


def evaluated(*layers, **options):
    """Costs of layers and of a last Linear, in an evaluation of 3 samples."""
    model = nn.Sequential(*layers, nn.Linear(4, 1))
    return profile_evaluation(model, torch.randn(3, 4), torch.zeros(3, 1), loss_by_mean, **options)


def test_an_evaluation_by_hand():
    batch, wide, narrow = 5, 8, 3
    model = nn.Sequential(nn.Linear(wide, narrow), nn.Linear(narrow, 1, bias=False))
    first, last = profile_evaluation(model, torch.randn(batch, wide), torch.zeros(batch, 1), loss_by_mean)
    out, params = batch * narrow * FLOAT, (wide * narrow + narrow) * FLOAT
    assert (first.param_bytes, first.grad_bytes, first.accumulated_bytes, first.saved_bytes) == (params, 0, 0, 0)
    assert (first.input_bytes, first.output_bytes, first.target_bytes) == (batch * wide * FLOAT, out, 0)
    assert first.forward_peak_bytes == first.peak_bytes == out
    assert (last.input_bytes, last.output_bytes, last.target_bytes) == (out, FLOAT, batch * FLOAT)
    assert last.forward_peak_bytes == 3 * batch * FLOAT  # output, difference, square
    assert first.forward_flops == 2 * batch * wide * narrow
    assert (first.backward_s, first.backward_flops, first.timed) == (0, 0, False)


def test_without_a_loss_the_last_layers_output_leaves():
    model, inputs = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)), torch.randn(3, 4)
    last = profile_evaluation(model, inputs)[-1]
    assert (last.output_bytes, last.target_bytes, last.forward_peak_bytes) == (3 * 2 * FLOAT, 0, 3 * 2 * FLOAT)


def test_an_evaluation_is_in_eval_and_leaves_everything_as_it_was():
    torch.manual_seed(0)
    noisy = Function(lambda x: x * random.random() * float(np.random.rand()))
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), noisy, nn.Linear(4, 1))
    inputs = torch.randn(1, 4)  # a BatchNorm in training refuses it
    model(inputs.expand(3, 4)).sum().backward()
    before = everything(model)
    _, norm, dropout, noisy, _ = profile_evaluation(model, inputs, torch.zeros(1, 1), loss_by_mean)
    assert_same(before, everything(model))
    assert not norm.changes_buffers
    assert not dropout.draws_random
    assert dropout.forward_peak_bytes == 0  # no mask, no output of its own
    assert noisy.draws_globally
    assert torch.is_grad_enabled()


def test_what_depends_on_values_is_run():
    by_value = Function(lambda x: x * (2 if x.sum().item() > 0 else 3))
    costs = evaluated(by_value, nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    counted = evaluated(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))  # on fake tensors
    pairs = zip(costs[1:], counted, strict=True)
    assert [replace(cost, index=other.index, name=other.name) for cost, other in pairs] == counted
    assert costs[0].forward_peak_bytes >= costs[0].output_bytes == 3 * 4 * FLOAT
    with pytest.raises(DependsOnValues):
        evaluated(by_value, may_run=False)


def test_a_mistake_in_an_evaluation_is_the_layers_own():
    with refused(RuntimeError, says="mat1 mat2") as error:
        evaluated(nn.Linear(5, 4))
    names(error.value.__notes__[0], layer="0 (Linear)")


def test_values_that_skip_layers_are_counted_in_an_evaluation():
    skips = Skips()

    class Puts(nn.Module):
        def forward(self, x):
            skips.put("early", x * 2)
            return x

    by_value = Function(lambda x: x * (2 if x.sum().item() > 0 else 3))  # does not run on fake tensors
    gets = Function(lambda x: x + skips.get("early"))
    for before in ([], [by_value]):
        costs = evaluated(Puts(), nn.Linear(4, 4), gets, *before)
        assert [cost.puts for cost in costs[:3]] == [(("early", 3 * 4 * FLOAT),), (), ()]
        assert [cost.gets for cost in costs[:3]] == [(), (), ("early",)]


def test_shared_and_frozen_parameters_have_no_gradients_in_an_evaluation():
    layer = nn.Linear(4, 4)
    costs = evaluated(layer, nn.Linear(4, 4).requires_grad_(False), layer)
    assert [cost.shares_with for cost in costs] == [(2,), (), (0,), ()]
    assert {(cost.grad_bytes, cost.shared_bytes) for cost in costs} == {(0, 0)}
