"""Updates of every kind and the plain way to make them, which `step_narrow` has the bits of."""

from contextlib import contextmanager

import torch
from torch import nn

from hydra_engine.host.blocked import step_narrow
from hydra_engine.host.split import SplitMaster, SplitWeight, row_of
from hydra_engine.native import NarrowUpdate

SMALL_CHUNK = 256
DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # what crosses the link, of one parameter after the other
NUM_STEPS = 4
SCALED = (0.37, torch.tensor(1.3))  # a loss scale's factor, and clipping's


@contextmanager
def threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def parameters():
    """Of every shape and layout: one that fits a block, several blocks with a rest, one element, none."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 5), (3 * SMALL_CHUNK + 17,), (), (0,), (33, 29), (1, 300), (7,), (2 * SMALL_CHUNK,), (300, 1)]
    values = [torch.randn(shape, generator=generator) for shape in shapes]
    values.append(torch.randn(8, 16, 3, 5, generator=generator).contiguous(memory_format=torch.channels_last))
    values.append(torch.randn(31, 40, generator=generator).t())
    values.append(torch.randn(40, 31, generator=generator)[:, :30])  # with gaps
    return [nn.Parameter(value) for value in values]


def gradients_of(step, values):
    """The same for both sides, laid out like their parameters; now and then a parameter receives none."""
    generator = torch.Generator().manual_seed(step)
    drawn = [torch.empty_like(p, dtype=DTYPES[k % 3]).normal_(0, 1, generator=generator) for k, p in enumerate(values)]
    return [None if step % 4 == 2 and k % 5 == 1 else gradient for k, gradient in enumerate(drawn)]


def groups(values):
    """Every third parameter with options of its own."""
    mine = [p for k, p in enumerate(values) if k % 3 == 0]
    others = [p for k, p in enumerate(values) if k % 3 != 0]
    return [{"params": others}, {"params": mine, "lr": 0.003, "weight_decay": 0.01}]


def plain_step(optimizer, updates, factors=()):
    for update in updates:
        update.parameter.grad = update.gradient.to(update.parameter.dtype)
        for factor in factors:
            update.parameter.grad.mul_(factor)
    optimizer.step()
    with torch.no_grad():
        for update in updates:
            update.parameter.grad = None
            if update.narrow is not None:
                update.narrow.copy_(update.parameter)


def narrow_copies(values):
    return [None if k % 3 == 2 else p.detach().to(DTYPES[k % 3]) for k, p in enumerate(values)]


def assert_same_state(ours, theirs):
    ours, theirs = ours.state_dict(), theirs.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for index, state in theirs["state"].items():
        assert list(ours["state"][index]) == list(state)
        for key, value in state.items():
            mine = ours["state"][index][key]
            assert mine.dtype == value.dtype, (index, key)
            assert mine.stride() == value.stride(), (index, key)
            assert torch.equal(mine, value), (index, key)


def assert_bits_are_plain(make, values=parameters, factors=(), num_steps=NUM_STEPS):
    """Weights, narrow copies and state after each of some steps on what `values()` makes, twice."""
    ours, theirs = values(), values()
    optimizers = make(ours), make(theirs)
    narrows = narrow_copies(ours), narrow_copies(theirs)
    for step in range(num_steps):
        for optimizer, own, narrow, way in zip(
            optimizers, (ours, theirs), narrows, (step_narrow, plain_step), strict=True
        ):
            gradients = gradients_of(step, own)
            updates = [NarrowUpdate(*each) for each in zip(own, gradients, narrow, strict=True) if each[1] is not None]
            way(optimizer, updates, factors)
        for k, (mine, plain) in enumerate(zip(ours, theirs, strict=True)):
            assert torch.equal(mine, plain), (step, k)
            assert mine.grad is None
            if narrows[0][k] is not None:
                assert torch.equal(narrows[0][k], narrows[1][k]), (step, k)
                assert torch.equal(narrows[0][k], mine.to(DTYPES[k % 3])), (step, k)
        assert_same_state(*optimizers)


def split_masters(values):
    """Split these parameters, as a host pool does, but for the places that they keep."""
    found = []
    for parameter in values:
        row = row_of(parameter)
        split = SplitWeight(torch.empty_like(row, dtype=torch.bfloat16), torch.empty_like(row, dtype=torch.int16))
        split.store(row)
        found.append(SplitMaster(parameter, parameter.data, split))
    return found


def split_updates(values, masters, gradients):
    """Updates of split weights by the gradients that there are."""
    return [
        NarrowUpdate(p, gradient, master.split.narrow.as_strided(p.shape, p.stride()), master)
        for p, master, gradient in zip(values, masters, gradients, strict=True)
        if gradient is not None
    ]


def bits(tensor):
    return tensor.detach().view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


def assert_same_split(actual, expected):
    """Compare split weights in every bit, also what is kept apart of them."""
    assert torch.equal(bits(actual.narrow), bits(expected.narrow))
    assert torch.equal(actual.rest, expected.rest)
    assert torch.equal(actual.apart.places, expected.apart.places)
    assert torch.equal(actual.apart.bits, expected.apart.bits)
    assert actual.apart.has_nan == expected.apart.has_nan


def assert_split_bits_are_plain(make, values=parameters, factors=(), num_steps=NUM_STEPS):
    """Split weights and state after each of some steps, beside plain steps of whole weights."""
    ours, theirs = values(), values()
    masters, optimizers = split_masters(ours), (make(ours), make(theirs))
    for step in range(num_steps):
        step_narrow(optimizers[0], split_updates(ours, masters, gradients_of(step, ours)), factors)
        received = zip(theirs, gradients_of(step, theirs), strict=True)
        plain_step(optimizers[1], [NarrowUpdate(p, g, None) for p, g in received if g is not None], factors)
        for master, parameter in zip(masters, theirs, strict=True):
            row = row_of(parameter)
            assert torch.equal(bits(master.split.load(torch.empty_like(row))), bits(row)), step
            assert torch.equal(bits(master.split.narrow), bits(row.bfloat16())), step
        for mine, parameter in zip(masters, split_masters(theirs), strict=True):
            assert_same_split(mine.split, parameter.split)
        assert_same_state(*optimizers)
