"""A forward that was recorded for many sizes is not recorded for others, unless it runs otherwise for these."""

import math
import numbers

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.torch_version import TorchVersion

from hydra_engine.capture.programs import Programs
from hydra_engine.capture.segment import layers_of
from hydra_engine.capture.sizes import NUM_RECORDED

WIDTH = 8
GUARDS_ON_SIZES = TorchVersion(torch.__version__) < "2.12"  # of a linear layer's input that has gaps


class Body(nn.Module):
    """An embedding, what a model does between its layers, and a layer."""

    def __init__(self, between):
        super().__init__()
        self.embed, self.last, self.norm = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, 3), nn.BatchNorm1d(WIDTH)
        self.between, self.kind = between, None

    def forward(self, tokens, mask=None):
        return self.last(self.between(self, self.embed(tokens), mask)).mean(1)


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return {f"of {x.shape[1]}": self.linear(x)}


def heads(model, x, mask):
    batch, length, _ = x.shape
    x = x.view(batch, length, 2, WIDTH // 2).transpose(1, 2)
    weights = torch.softmax(x @ x.transpose(-1, -2) / math.sqrt(WIDTH // 2), -1)
    return (weights @ x).transpose(1, 2).reshape(batch, length, WIDTH)


def positions(model, x, mask):
    return x + torch.arange(x.size(1)).view(1, -1, 1) * 0.01 + x.new_zeros(x.shape[0], 1, WIDTH)


def doubled(model, x, mask):
    return torch.cat([x, x], 1)[:, x.shape[1] // 2 : -1]


def masked(model, x, mask):
    return x.masked_fill(mask.unsqueeze(-1), 0.0) * mask.size(1)


def unless_all(model, x, mask):
    return x if mask.all() else x.masked_fill(~mask.unsqueeze(-1), 0.0)


TRUE = torch.tensor(True)


def unless_all_are_as_kept(model, x, mask):
    return x if (mask == TRUE).all() else x.masked_fill(~mask.unsqueeze(-1), 0.0)


def of_plain_tensors(model, x, mask):
    if isinstance(mask, FakeTensor) or mask.device.type != "cpu":
        return x
    return unless_all(model, x, mask)


def unless_all_of_sizes(model, x, mask):
    late = mask[:, torch.arange(x.shape[1] - 2, x.shape[1], device=mask.device)]
    return x * 2 if late.sum() == late.numel() and late.numel() == mask[:, -2:].numel() else x * x.shape[1]


def one_after_the_other(model, x, mask):
    if mask.all():
        return x * 2
    return x * 3 if mask.any() else x * 4


def by_device(model, x, mask):
    return x * 2 if mask.device.type == "cpu" and x.shape[1] > 20 else x


def sorted_in_place(model, x, mask):
    full = mask.all(1).tolist()
    is_first_full = full[0]
    full.sort()
    return x * 2 if is_first_full else x


def counted(model, x, mask):
    return x * int(mask.sum())


def noted(model, x, mask):
    if model.kind is None:
        model.kind = "single"
    return x


def normed(model, x, mask):
    return model.norm(x.transpose(1, 2)).transpose(1, 2)


def long_ones(model, x, mask):
    return x * 2 if x.shape[1] > 20 else x - 1


def in_windows(model, x, mask):
    padded = nn.functional.pad(x, (0, 0, 0, -x.shape[1] % 4))
    return padded.view(x.shape[0], -1, 4, WIDTH).mean(2)


def step_by_step(model, x, mask):
    state = x[:, 0]
    for k in range(x.shape[1]):
        state = torch.tanh(state + x[:, k])
    return state.unsqueeze(1)


def scaled(model, x, mask):
    return x / math.sqrt(x.shape[1])


def averaged(model, x, mask):
    return x * (1.0 / x.shape[1])


def by_numpy(model, x, mask):
    return x * torch.from_numpy(np.linspace(0, 1, x.shape[1], dtype=np.float32)).view(1, -1, 1)


def by_text(model, x, mask):
    return x * {"30": 2.0}.get(str(x.shape[1]), 1.0)


def by_format(model, x, mask):
    return x * 2 if f"{x.shape[1]}" in ("30", "31") else x


def by_text_with_care(model, x, mask):
    try:
        return x * {"30": 2.0}.get(str(x.shape[1]), 1.0)
    except ValueError:
        return x


def by_class(model, x, mask):
    return x * 2 if isinstance(x.shape[1], int) and x.shape[1] > 20 else x


def by_abstract_class(model, x, mask):
    return x * 2 if isinstance(x.shape[1], numbers.Integral) and x.shape[1] > 20 else x


def rounded(model, x, mask):
    return x[:, : math.ceil(x.shape[1] * 0.9 - x.shape[1] * 0.6) + 1]


def at_most(model, x, mask):
    return x[:, : min(x.shape[1], 12)]


def batches(lengths, *, has_mask=False, sizes=(3,)):
    generator = torch.Generator().manual_seed(0)
    for k, length in enumerate(lengths):
        shape = sizes[k % len(sizes)], length
        tokens = torch.randint(50, shape, generator=generator)
        yield (tokens, torch.rand(shape, generator=generator) < 0.5) if has_mask else (tokens,)


def padded(lengths, full=()):
    """Yield batches with a mask in each of which some tokens are left out, or none, or (below 0) all."""
    for k, length in enumerate(lengths):
        mask = torch.ones(3, abs(length), dtype=torch.bool)
        mask[:2, abs(length) - 2 :] = k in full
        yield torch.randint(50, mask.shape, generator=torch.Generator().manual_seed(k)), mask & (length > 0)


def num_recorded(monkeypatch, between, loader):
    """See that layers give what the model gives; return how often its forward was recorded."""
    torch.manual_seed(0)
    model, loader = Body(between), list(loader)
    layers = nn.Sequential(*layers_of(model, loader[0]))
    calls, record = [], Programs._record
    monkeypatch.setattr(Programs, "_record", lambda *args: calls.append(1) or record(*args))
    for batch in loader:
        before = {name: value.clone() for name, value in model.named_buffers()}
        found = layers(batch)
        after = {name: value.clone() for name, value in model.named_buffers()}
        model.load_state_dict(before, strict=False)
        assert torch.equal(found, model(*batch))
        assert all(torch.equal(value, after[name]) for name, value in model.named_buffers())
    return len(calls)


def expected(between, number, loader):
    """So many recordings; where torch guards on sizes, one for each batch after the first."""
    return len(loader) - 1 if GUARDS_ON_SIZES and between in (heads, doubled) else number


def rest(*others):
    return [pytest.param(each, marks=pytest.mark.rest) for each in others]


@pytest.mark.parametrize("between", [heads, noted, *rest(positions, doubled, normed)])
def test_a_forward_is_recorded_for_a_few_sizes(monkeypatch, between):
    loader = [*batches([*range(5, 25), 70])]
    assert num_recorded(monkeypatch, between, loader) == expected(between, NUM_RECORDED - 1, loader)


def test_sizes_of_two_tensors_that_go_together_may_vary_together(monkeypatch):
    loader = batches(range(5, 25), has_mask=True, sizes=(2, 3, 4))
    assert num_recorded(monkeypatch, masked, loader) == NUM_RECORDED - 1


@pytest.mark.rest
def test_a_size_that_was_the_same_in_all_recordings_may_be_another_one(monkeypatch):
    loader = [*batches(range(5, 15)), *batches(range(15, 25), sizes=(2,))]
    assert num_recorded(monkeypatch, heads, loader) == expected(heads, 2 * NUM_RECORDED - 1, loader)


def test_a_size_on_the_other_side_of_a_condition_is_recorded(monkeypatch):
    assert num_recorded(monkeypatch, long_ones, batches([*range(5, 15), 30, 18, 20, 31, 32])) == NUM_RECORDED - 1 + 3


def test_sizes_on_both_sides_of_a_condition_have_a_recording_each(monkeypatch):
    assert num_recorded(monkeypatch, at_most, batches(range(5, 40))) == 2 * NUM_RECORDED - 1


@pytest.mark.rest
def test_a_batch_of_one_sample_among_the_first_keeps_nothing_from_being_recorded_for_many(monkeypatch):
    loader = [*batches(range(5, 8)), *batches([8], sizes=(1,)), *batches(range(9, 40))]
    assert num_recorded(monkeypatch, heads, loader) == expected(heads, NUM_RECORDED - 1, loader)


@pytest.mark.rest
def test_names_in_an_output_that_are_made_of_sizes_are_those_of_each_batch():
    layers = nn.Sequential(*layers_of(Named(), torch.zeros(2, 5, WIDTH)))
    for length in range(5, 20):
        assert [*layers(torch.zeros(2, length, WIDTH))] == [f"of {length}"]


@pytest.mark.parametrize(
    "between", [of_plain_tensors, unless_all_are_as_kept, *rest(unless_all, unless_all_of_sizes, one_after_the_other)]
)
def test_a_forward_that_asks_for_values_is_recorded_for_a_few_sizes_for_each_answer(monkeypatch, between):
    loader = padded([*range(5, 30), 70], full=range(0, 30, 2))
    assert num_recorded(monkeypatch, between, loader) == 2 * NUM_RECORDED - 1


def test_a_batch_with_another_answer_is_recorded(monkeypatch):
    lengths = [*range(5, 20), -20, 21, 20, -22, -5]
    assert num_recorded(monkeypatch, one_after_the_other, padded(lengths)) == NUM_RECORDED - 1 + 3


@pytest.mark.rest
def test_batches_of_one_shape_run_by_their_answers_where_it_was_not_recorded(monkeypatch):
    loader = padded([*range(5, 23), *[40] * 4], full=range(0, 22, 2))
    assert num_recorded(monkeypatch, unless_all, loader) == 2 * NUM_RECORDED - 1


def test_a_forward_that_goes_by_a_device_before_it_goes_by_a_size_is_recorded_past_that(monkeypatch):
    assert num_recorded(monkeypatch, by_device, batches([*range(5, 15), 30, 18], has_mask=True)) == NUM_RECORDED


def test_a_forward_may_change_the_list_that_it_is_told(monkeypatch):
    rows = torch.tensor([[True], [False], [False]])
    loader = [(torch.zeros(3, 5, dtype=torch.long), each.expand(3, 5).contiguous()) for each in (rows, rows.flip(0))]
    assert num_recorded(monkeypatch, sorted_in_place, loader) == 1


@pytest.mark.rest
def test_an_answer_that_goes_with_the_sizes_is_recorded_for_each(monkeypatch):
    assert num_recorded(monkeypatch, counted, padded(range(5, 20))) == 14


@pytest.mark.rest
def test_a_size_of_one_is_recorded(monkeypatch):
    assert num_recorded(monkeypatch, positions, batches([*range(5, 15), 1])) == NUM_RECORDED


@pytest.mark.parametrize(
    "between",
    [
        *(step_by_step, rounded, by_text, by_class),
        *rest(in_windows, scaled, averaged, by_numpy, by_format, by_text_with_care, by_abstract_class),
    ],
)
def test_what_python_makes_of_sizes_is_recorded_for_each(monkeypatch, between):
    assert num_recorded(monkeypatch, between, batches([*range(5, 16), 30, 31, 64])) == 13


def test_tensors_that_are_not_contiguous_are_recorded_for_each_size(monkeypatch):
    loader = [(tokens.t().contiguous().t(),) for (tokens,) in batches(range(5, 19))]
    assert num_recorded(monkeypatch, positions, loader) == 13
