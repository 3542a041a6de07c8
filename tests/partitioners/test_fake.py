"""Bytes counted without memory or arithmetic are those of a real run, to the byte; GPU kernels are estimated."""

import logging
import threading

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from partitioners import profile, profile_shapes
from partitioners.boundary import Boundary
from partitioners.copies import Copies
from partitioners.measure import STATED_RATES, Work, count
from partitioners.profile import named_layers
from tests.architectures import ARCHITECTURES, layer_peaks
from tests.covering import covering
from tests.refused import names, refused

RATES = STATED_RATES["cpu", "float32"]
LOSSES = (
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.soft_margin_loss,
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
)
# Counted by the same code for both, so equal too; the rest of a cost is the layer's structure.
COUNTED = (
    "saved_bytes",
    "peak_bytes",
    "forward_peak_bytes",
    "input_bytes",
    "output_bytes",
    "held_bytes",
    "forward_flops",
    "backward_flops",
    "draws_random",
    "draws_globally",
    "changes_input",
    "changes_buffers",
)


def metered(layers, inputs, target, loss_fn):
    """Each layer's figures from a metered run on real tensors."""
    copies, boundary, found = Copies(), Boundary.of_layer(inputs).detached(), []
    for index, layer in enumerate(layers):
        is_last = index == len(layers) - 1
        work = Work(copies.layer(layer), copies.loss(loss_fn) if is_last else None, target)
        fields, boundary = count(work, boundary, RATES)
        found.append(fields)
    return found


def assert_counts_equal(model, inputs, target, loss_fn):
    layers = [layer for _, layer in named_layers(model)]
    costs = profile(model, inputs, target, loss_fn, time_layers=False)
    for cost, real in zip(costs, metered(layers, inputs, target, loss_fn), strict=True):
        for field in COUNTED:
            assert getattr(cost, field) == real[field], f"layer {cost.index} ({cost.name}): {field}"


@pytest.fixture(params=ARCHITECTURES)
def architecture(request):
    torch.manual_seed(0)
    return ARCHITECTURES[request.param]()


def test_fake_tensors_give_the_bytes_of_a_metered_run(architecture):
    assert_counts_equal(*architecture)


@covering(loss_fn=LOSSES, reduction=["mean", "sum"], strength=1, ids=lambda value: getattr(value, "__name__", value))
def test_losses_that_reduce_into_their_own_elements_keep_those(loss_fn, reduction):
    model = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid())
    inputs, target = torch.randn(6, 8), torch.rand(6, 8)
    assert_counts_equal(model, inputs, target, lambda output, y: loss_fn(output, y, reduction=reduction))


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_strides_are_kept(memory_format):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU(), nn.Flatten(), nn.Linear(8 * 49, 3))
    inputs = torch.randn(4, 3, 9, 9).to(memory_format=memory_format)
    assert_counts_equal(model.to(memory_format=memory_format), inputs, torch.randint(3, (4,)), F.cross_entropy)


def test_a_model_on_meta_costs_what_the_same_model_with_values_costs(architecture):
    model, inputs, target, loss_fn = architecture
    real = profile(model, inputs, target, loss_fn, time_layers=False)
    on_meta = profile(model.to("meta"), inputs, target, loss_fn)
    assert on_meta == real
    assert not any(cost.timed for cost in on_meta)


def test_a_layer_larger_than_any_memory_is_profiled():
    with torch.device("meta"):
        layers = [nn.Linear(2**20, 2**20, bias=False) for _ in range(50)]
        inputs = torch.empty(1, 2**20)
    costs = profile(layers, inputs, inputs, F.mse_loss)
    assert {cost.param_bytes for cost in costs} == {4 * 2**40}
    assert {cost.forward_flops for cost in costs} == {2 * 2**40}
    assert {cost.backward_flops for cost in costs[1:]} == {4 * 2**40}
    assert costs[0].backward_flops == 2 * 2**40  # nothing below wants a gradient


class Branch(nn.Module):
    """Two ways, chosen by value: fake tensors have none."""

    def __init__(self):
        super().__init__()
        self.narrow, self.wide = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 400), nn.Linear(400, 4))

    def forward(self, x):
        return self.wide(x) if x.sum() > 0 else self.narrow(x)


def test_a_layer_that_depends_on_values_is_run_metered():
    layers = [nn.Identity(), Branch(), nn.Linear(4, 1)]
    for time_layers in (True, False):
        up, down = (
            profile(layers, sign * torch.ones(2, 4), torch.zeros(2, 1), F.mse_loss, time_layers=time_layers)
            for sign in (1, -1)
        )
        assert up[1].saved_bytes > down[1].saved_bytes


def test_a_layer_that_depends_on_values_and_has_none_is_refused_by_name():
    layers = [layer.to("meta") for layer in (nn.Linear(4, 4), Branch())]
    with refused(ValueError, says="values") as error:
        profile(layers, torch.ones(2, 4), torch.zeros(2, 4), F.mse_loss)
    names(error.value.__notes__[0], layer="1 (Branch)")


def test_equal_layers_are_counted_once_and_others_are_not(monkeypatch):
    ran = []
    monkeypatch.setattr(
        nn.Linear, "forward", lambda self, x: ran.append(x.shape) or F.linear(x, self.weight, self.bias)
    )
    layers = [nn.Linear(8, 8), *(nn.Linear(8, 8) for _ in range(5)), nn.Linear(8, 8, bias=False), nn.Linear(8, 8)]
    profile(layers, torch.randn(2, 8), torch.zeros(2, 8), F.mse_loss, time_layers=False)
    # Twice each: the first (whose input wants no gradient), the five, the one without a bias, the last with its loss.
    assert len(ran) == 2 * 4


class Numbered(nn.Linear):
    def __init__(self, index, note):
        super().__init__(8, 8)
        self.index, self.note = index, note

    def forward(self, x):
        self.note((isinstance(x, FakeTensor), self.index))
        return super().forward(x)


def test_of_layers_that_call_the_same_operations_the_first_is_timed():
    ran = []
    layers = [Numbered(k, ran.append) for k in range(5)]
    costs = profile(layers, torch.randn(2, 8, requires_grad=True), torch.zeros(2, 8), F.mse_loss)
    assert [index for is_fake, index in ran if not is_fake] == [0, 0, 4, 4]  # the last has the loss
    assert {index for is_fake, index in ran if is_fake} == {*range(5)}
    assert len({cost.forward_s for cost in costs}) == 2
    assert all(cost.timed for cost in costs)


def test_layers_that_differ_in_a_plain_attribute_are_different():
    layers = [nn.Linear(8, 8), nn.Dropout(0.0), nn.Dropout(0.5), nn.Linear(8, 1)]
    costs = profile(layers, torch.randn(2, 8), torch.zeros(2, 1), F.mse_loss)
    assert [cost.draws_random for cost in costs] == [False, False, True, False]


def test_threads_that_profile_side_by_side_leave_torchs_log_as_it_was():
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.disabled, list(logger.filters)
    layers, inputs = [nn.Linear(8, 8) for _ in range(20)], torch.randn(2, 8)
    found = []

    def run():
        found.append(profile_shapes(layers, inputs, inputs, F.mse_loss))

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [profile(layers, inputs, inputs, F.mse_loss, time_layers=False)] * 3
    assert (logger.disabled, list(logger.filters)) == before


# Kernels of a GPU, estimated on fake CPU tensors.


class Attention(nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.1 if self.training else 0.0, is_causal=True)


def test_attention_with_dropout_saves_no_matrix_of_weights_on_a_gpu():
    length, width = 512, 16
    layers = [nn.Linear(width, width), Attention(), nn.Linear(width, width)]
    inputs = torch.randn(1, 2, length, width)
    on_cpu, on_gpu = (profile(layers, inputs, inputs, F.mse_loss, device=device)[1] for device in (None, "cuda"))
    matrix_bytes = 2 * length * length * 4
    assert on_cpu.saved_bytes > matrix_bytes
    assert on_gpu.saved_bytes == inputs.nbytes + 2 * length * 4  # the output, and a logarithm for each row
    assert not on_gpu.timed


def test_dropout_saves_a_mask_of_booleans_on_a_gpu():
    layers = [nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 8)]
    inputs = torch.randn(16, 8)
    on_cpu, on_gpu = (profile(layers, inputs, inputs, F.mse_loss, device=device)[1] for device in (None, "cuda"))
    assert on_cpu.saved_bytes == inputs.nbytes + inputs.nbytes
    assert on_gpu.saved_bytes == inputs.nbytes + inputs.numel()


# Precision.


def test_bfloat16_halves_all_but_norms_and_the_loss():
    layers = [nn.Linear(8, 8, bias=False), nn.LayerNorm(8), nn.Linear(8, 8, bias=False)]
    inputs = torch.randn(16, 8)
    wide = profile(layers, inputs, inputs, F.mse_loss)
    narrow = profile(layers, inputs, inputs, F.mse_loss, precision="bfloat16")
    assert [cost.param_bytes for cost in narrow] == [128, 64, 128]
    assert [cost.grad_bytes for cost in narrow] == [128, 64, 128]
    assert [cost.accumulated_bytes for cost in narrow] == [256, 64, 256]
    assert [cost.output_bytes for cost in narrow] == [256, 256, 4]
    assert [cost.param_bytes for cost in wide] == [256, 64, 256]


# What the meter does not see.


def test_the_allocator_sees_no_less_than_the_meter(architecture):
    for peak in layer_peaks(*architecture):
        assert peak.allocated_bytes >= peak.metered_bytes > 0, peak
        assert peak.reserve_bytes == peak.allocated_bytes - peak.metered_bytes


MEAN = torch.zeros(4)


class Kept:
    mean = torch.zeros(4)


@pytest.mark.parametrize("place", ["closure", "global", "object", "dict", "list"])
def test_no_fake_tensor_is_left_where_a_hook_keeps_what_it_has_seen(place):
    closed, kept, table, record = torch.zeros(4), Kept(), {"mean": torch.zeros(4)}, []

    def hook(module, entered, output):
        nonlocal closed
        global MEAN
        now = output.detach().mean(0)
        if place == "closure":
            closed = closed + now
        elif place == "global":
            MEAN = MEAN + now
        elif place == "object":
            kept.mean = kept.mean + now
        elif place == "dict":
            table["mean"], table["last"] = table["mean"] + now, now
        else:
            record.append(now)

    layers = [nn.Linear(4, 4), nn.Linear(4, 2)]
    layers[0].register_forward_hook(hook)
    profile(layers, torch.ones(3, 4), torch.ones(3, 2), F.mse_loss, time_layers=False)
    assert record == []
    assert table.keys() == {"mean"}
    for tensor in (closed, MEAN, kept.mean, table["mean"]):
        assert torch.equal(tensor, torch.zeros(4))
