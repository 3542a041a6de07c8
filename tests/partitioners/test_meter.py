"""The meter counts exactly what operations create and storages give back, and changes nothing."""

import copy
import gc
import threading
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from partitioners import MemoryMeter
from tests.covering import chosen
from tests.refused import refused

FLOAT = 4


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(16, 16, num_layers=2, dropout=0.2, bidirectional=True)

    def forward(self, x):
        return self.lstm(x)[0]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = self.project(x).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 16))

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


def floats(*shape):
    return lambda: torch.randn(*shape, requires_grad=True)


MODELS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)), floats(6, 16)),
    "inplace": (lambda: nn.Sequential(nn.Linear(16, 16), nn.ReLU(inplace=True)), floats(2, 3, 16)),
    "dropout": (lambda: nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.GELU()), floats(6, 16)),
    "conv": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.MaxPool2d(2)), floats(2, 3, 9, 9)),
    "lstm": (Recurrent, floats(5, 2, 16)),
    "attention": (Attention, floats(2, 5, 16)),
    "transformer": (lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), floats(2, 5, 16)),
    "embedding": (lambda: nn.Sequential(nn.Embedding(9, 16), nn.LayerNorm(16)), lambda: torch.randint(9, (3, 4))),
    "sparse": (lambda: nn.Embedding(9, 16, sparse=True), lambda: torch.randint(9, (3, 4))),
    "checkpoint": (Checkpointed, floats(6, 16)),
}


def two_passes(model, x):
    """Two forwards and backwards, so that the second adds to gradients; what is left of them."""
    torch.manual_seed(1)
    for _ in range(2):
        output = model(x)
        output.backward(torch.ones_like(output))
        del output
    return [x.grad, *(parameter.grad for parameter in model.parameters()), *model.buffers()]


def made(name):
    build, inputs = MODELS[name]
    torch.manual_seed(0)
    return build(), inputs()


@pytest.mark.rest
@pytest.mark.parametrize("name", chosen(MODELS, [*MODELS][::2]))
def test_bits_are_the_same_under_a_meter_and_gradients_alone_are_left(name):
    plain = two_passes(*made(name))
    model, x = made(name)
    with MemoryMeter() as meter:
        metered = two_passes(model, x)
        for expected, found in zip(plain, metered, strict=True):
            assert found is expected is None or torch.equal(expected.to_dense(), found.to_dense())
        del metered, found, expected
        gc.collect()
        grads = [tensor.grad for tensor in (x, *model.parameters()) if tensor.grad is not None]
        parts = [part for g in grads for part in ((g._indices(), g._values()) if g.is_sparse else (g,))]
        storages = {id(part.untyped_storage()): part.untyped_storage().nbytes() for part in parts}
        assert meter.current_bytes == sum(storages.values())
        assert meter.peak_bytes > meter.current_bytes


def test_mlp_forward_and_backward_by_hand():
    batch, wide, hidden, narrow = 6, 16, 32, 4
    model = nn.Sequential(nn.Linear(wide, hidden), nn.ReLU(), nn.Linear(hidden, narrow))
    x = torch.randn(batch, wide, requires_grad=True)
    incoming = torch.ones(batch, narrow)
    with MemoryMeter() as meter:
        output = model(x)
        between, result = batch * hidden * FLOAT, batch * narrow * FLOAT
        # The first Linear's output is saved by nobody: ReLU keeps its own result.
        assert meter.current_bytes == between + result
        assert meter.peak_bytes == 2 * between
        output.backward(incoming)
        grads = sum(parameter.numel() for parameter in model.parameters()) * FLOAT
        assert meter.current_bytes == grads + x.numel() * FLOAT + result
        upper = (narrow * hidden + narrow) * FLOAT
        lower = (hidden * wide + hidden) * FLOAT
        # Backward of the first Linear: output, upper gradients, gradient of its output, its own gradients, x's.
        assert meter.peak_bytes == result + upper + between + lower + x.numel() * FLOAT
        del output
        model.zero_grad()
        x.grad = None
        assert meter.current_bytes == 0


def test_views_and_in_place_operations_cost_nothing():
    outside = torch.ones(8)
    with MemoryMeter() as meter:
        outside.add_(1).view(2, 4).t()[0].mul_(2)
        torch.ops.aten._unsafe_view(outside, [4, 2])  # its schema calls this a fresh tensor
        assert meter.peak_bytes == 0
        inside = torch.ones(8)
        views = [inside[2:], inside.view(2, 4), inside.detach(), inside.relu_()]
        assert meter.current_bytes == 32
        del inside
        assert meter.current_bytes == 32
        views.clear()
        assert meter.current_bytes == 0
    assert meter.peak_bytes == 32


def test_what_no_operation_created_is_not_counted():
    with MemoryMeter() as meter:
        torch.empty(8, device="meta").add_(1)
        torch.empty(0).set_(torch.UntypedStorage(64), 0, (16,), (1,)).fill_(1).mul_(2)
        assert meter.peak_bytes == 0


def test_values_brought_from_python_and_numpy_are_counted():
    with MemoryMeter() as meter:
        kept = [torch.tensor([1.0, 2.0]), torch.from_numpy(np.ones(2))]
        assert meter.current_bytes == 8 + 16
        kept.clear()
        assert meter.current_bytes == 0


def test_growth_and_shrinking_are_noticed():
    deltas = []
    with MemoryMeter(deltas.append) as meter:
        grown, target = torch.empty(0), torch.empty(0)
        grown.resize_(8)
        assert meter.current_bytes == 32
        torch.mul(grown, 2, out=target)
        assert meter.current_bytes == 64
        grown.untyped_storage().resize_(4)  # no operation: seen with the next one
        assert meter.current_bytes == 64
        grown.resize_(1)
        assert meter.current_bytes == 36
        del grown, target
        assert meter.current_bytes == 0
    assert deltas == [32, 32, -28, -4, -32]


def test_changes_are_reported_as_they_happen_and_never_after_exit():
    deltas = []
    with MemoryMeter(deltas.append) as meter:
        first = torch.ones(4)
        second = first + 1
        del first
        assert deltas == [16, 16, -16]
        third = second * 2
    assert (meter.current_bytes, meter.peak_bytes) == (32, 32)
    del second, third
    torch.ones(100)
    assert deltas == [16, 16, -16, 16]
    assert (meter.current_bytes, meter.peak_bytes) == (32, 32)


def test_a_closed_meter_goes_with_its_last_reference_though_outputs_live_on():
    meter = MemoryMeter()
    with meter:
        kept = torch.ones(4)
    gone = weakref.ref(meter)
    del meter
    assert gone() is None
    assert kept.tolist() == [1, 1, 1, 1]


def test_a_storage_may_die_in_another_thread():
    deltas = []
    with MemoryMeter(deltas.append) as meter:
        box = [torch.ones(4)]
        thread = threading.Thread(target=box.clear)
        thread.start()
        thread.join()
        assert meter.current_bytes == 0
    assert deltas == [16, -16]


@pytest.mark.rest
def test_a_storage_in_a_reference_cycle_is_given_back_by_the_collector():
    with MemoryMeter() as meter:
        cycle = [torch.ones(4)]
        cycle.append(cycle)
        del cycle
        assert meter.current_bytes == 16
        gc.collect()
        assert meter.current_bytes == 0


class Full(Exception):
    pass


class Limit:
    """An `on_change` with a hard limit."""

    def __init__(self, limit_bytes):
        self.limit_bytes = limit_bytes
        self.used_bytes = 0

    def __call__(self, delta):
        if delta > 0 and self.used_bytes + delta > self.limit_bytes:
            raise Full(delta)
        self.used_bytes += delta


def test_an_exception_of_on_change_comes_out_of_the_operation_and_nothing_stays_counted():
    limit = Limit(40)
    with MemoryMeter(limit) as meter:
        kept = torch.ones(8)
        with pytest.raises(Full, match="16"):
            torch.ones(4)
        with pytest.raises(Full, match="32"):
            kept.resize_(16)  # the 32 bytes it was counted with stay
        assert (meter.current_bytes, meter.peak_bytes, limit.used_bytes) == (32, 32, 32)
        del kept
        assert (meter.current_bytes, limit.used_bytes) == (0, 0)


@pytest.mark.rest
def test_an_exception_of_on_change_comes_out_of_backward():
    layer, x = nn.Linear(16, 16), torch.randn(8, 16, requires_grad=True)
    limit = Limit(1200)
    with MemoryMeter(limit) as meter:
        output = layer(x).relu()
        incoming = torch.ones(8, 16).expand(8, 16)
        with pytest.raises(Full):
            output.backward(incoming)
        del output, incoming
        gc.collect()
        assert (meter.current_bytes, limit.used_bytes) == (0, 0)
    assert all(parameter.grad is None for parameter in layer.parameters())


def test_only_one_block_per_meter():
    meter = MemoryMeter()
    with meter, refused(RuntimeError), meter:
        pass
    with refused(RuntimeError):
        meter.__enter__()


def test_meters_nest_and_each_counts_its_own_block():
    with MemoryMeter() as outer:
        first = torch.ones(4)
        with MemoryMeter() as inner:
            second = torch.ones(2)
            del first
            assert (outer.current_bytes, inner.current_bytes) == (8, 8)
        del second
        assert (outer.current_bytes, outer.peak_bytes) == (0, 24)
        assert inner.current_bytes == 8


@pytest.mark.parametrize("name", sorted(MODELS.keys() - {"lstm", "sparse"}))
def test_fake_tensors_are_counted_with_the_bytes_of_real_ones(name):
    model, x = made(name)
    with MemoryMeter() as real:
        two_passes(model, x)
    model, x = made(name)
    mode = FakeTensorMode()
    memo = {id(parameter): nn.Parameter(mode.from_tensor(parameter.detach())) for parameter in model.parameters()}
    memo |= {id(buffer): mode.from_tensor(buffer) for buffer in model.buffers()}
    model = copy.deepcopy(model, memo)
    x = mode.from_tensor(x.detach()).requires_grad_(x.requires_grad)
    with mode, MemoryMeter() as fake:
        two_passes(model, x)
    assert (fake.current_bytes, fake.peak_bytes) == (real.current_bytes, real.peak_bytes)
