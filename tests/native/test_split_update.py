"""The native update of split weights has the bits of plain steps, ties and NaN included, by the same call."""

import pytest
import torch
from torch import nn

from hydra_engine.host.blocked import MOMENTS, step_narrow
from hydra_engine.host.split import SplitMaster, SplitWeight, row_of
from hydra_engine.native import NarrowUpdate, native
from hydra_engine.native.library import VARIABLE
from tests.covering import covering
from tests.host.test_split import UPPER, stored, weights
from tests.host.updates import (
    SCALED,
    assert_same_split,
    assert_same_state,
    assert_split_bits_are_plain,
    bits,
    gradients_of,
    groups,
    narrow_copies,
    parameters,
    plain_step,
    split_masters,
    split_updates,
    threads,
)
from tests.native.test_update import HOWS, SETTINGS, SEVERAL_UNITS, UNIT

LOWER = [0, 1, 0x7FFF, 0x8000, 0x8001, 0xC000, 0xFFFF]


def assert_taken(taken, kind, options, without=()):
    """Of torch's Adam that is not fused the roots are a library's, which the kernel may not have on every processor."""
    if kind is torch.optim.SGD or "fused" in options:
        assert set(taken) >= {p.numel() for p in parameters() if p.dim() and p.is_contiguous()} - {*without}


@pytest.mark.parametrize(("kind", "options"), SETTINGS.values(), ids=SETTINGS)
def test_bits_of_every_setting(kind, options, taken):
    assert_split_bits_are_plain(lambda own: kind(own, lr=0.01, **options), factors=SCALED if options else ())
    assert_taken(taken, kind, options)


@pytest.mark.parametrize("how", HOWS, ids=str)
def test_bits_of_groups_with_options_of_their_own(how, taken):
    assert_split_bits_are_plain(lambda own: torch.optim.AdamW(groups(own), lr=0.01, **how), factors=SCALED)


@covering(strength=1, how=HOWS, num_threads=[1, 2, 3], ids=str)
def test_bits_depend_on_no_number_of_threads(how, num_threads, taken):
    with threads(num_threads):
        assert_split_bits_are_plain(
            lambda own: torch.optim.AdamW(own, lr=0.01, amsgrad=True, **how),
            lambda: [nn.Parameter(torch.linspace(-1, 1, n)) for n in SEVERAL_UNITS],
            num_steps=3,
        )
    assert set(taken) == set(SEVERAL_UNITS) or "fused" not in how


@covering(strength=1, change=[0.0, 1.0, 2.0**-149], num_threads=[1, 2])
def test_every_upper_half_with_lower_halves_at_every_edge(num_threads, change, taken):
    """A step of 0 keeps each weight, ties too; one of 1 makes other ties of large and of small numbers."""
    values = weights(UPPER, LOWER)
    gradient = torch.full_like(values, change)
    theirs, ours = (nn.Parameter(values.clone()) for _ in range(2))
    masters = split_masters([ours])
    with threads(num_threads):
        step_narrow(torch.optim.SGD([ours], lr=1.0), split_updates([ours], masters, [gradient]))
        plain_step(torch.optim.SGD([theirs], lr=1.0), [NarrowUpdate(theirs, gradient, None)])
    assert taken == [len(values)]
    split, is_number = masters[0].split, ~theirs.isnan()
    loaded = split.load(torch.empty_like(values))
    assert torch.equal(bits(loaded)[is_number], bits(theirs)[is_number])
    assert torch.equal(bits(split.narrow)[is_number], bits(theirs.bfloat16())[is_number])
    assert torch.equal(loaded.isnan(), theirs.isnan())
    assert split.apart.has_nan
    # By torch's passes, which the tests of tests/host/test_split.py hold to the same.
    assert torch.equal(split.apart.places, stored(loaded).apart.places)
    assert torch.equal(split.apart.bits, stored(loaded).apart.bits)
    if change == 0.0:
        is_tie = is_number & (bits(values) & 0x1FFFF == 0x8000)
        assert set(is_tie.nonzero().flatten().tolist()) <= set(split.apart.places.tolist())


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_weight_that_is_nothing_but_ties(num_threads, taken):
    """Threads find them in any order; they are kept by place. Of each parameter its own."""
    sizes = [3 * UNIT + 5, 1, UNIT]
    tie = torch.tensor([0x3F808000], dtype=torch.int32).view(torch.float32)
    values = [nn.Parameter(tie.repeat(size)) for size in sizes]
    masters = split_masters(values)
    gradients = [torch.zeros(size, dtype=torch.bfloat16) for size in sizes]
    gradients[2][::2] = 1
    with threads(num_threads):
        step_narrow(torch.optim.SGD(values, lr=2.0**-20), split_updates(values, masters, gradients))
    assert taken == sizes
    expected = [torch.arange(sizes[0]), torch.arange(1), torch.arange(1, UNIT, 2)]
    for master, places, size in zip(masters, expected, sizes, strict=True):
        assert torch.equal(master.split.apart.places, places)
        assert torch.equal(master.split.apart.bits, bits(tie).expand(len(places)))
        assert torch.equal(master.split.load(torch.empty(size))[places], tie.expand(len(places)))


def test_NaN_that_arises_keeps_nothing_apart_and_goes_with_the_next_weights(taken):
    parameter = nn.Parameter(torch.ones(2 * UNIT))
    (master,) = split_masters([parameter])
    gradient = torch.zeros(2 * UNIT)
    gradient[UNIT + 3 :] = torch.nan
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    for _ in range(2):  # from weights without NaN, and from such
        step_narrow(optimizer, split_updates([parameter], [master], [gradient]))
        found = master.split.load(torch.empty(2 * UNIT))
        assert torch.equal(found[: UNIT + 3], torch.ones(UNIT + 3))
        assert found[UNIT + 3 :].isnan().all()
        assert master.split.apart.has_nan
        assert master.split.apart.nbytes == 0
    master.split.store(torch.ones(2 * UNIT))
    step_narrow(optimizer, split_updates([parameter], [master], [torch.zeros(2 * UNIT)]))
    assert not master.split.apart.has_nan
    assert taken == [2 * UNIT] * 3


@covering(strength=1, size=[1, 127, 129, 256, 1000], offset=[1, 3, 31])
def test_halves_may_begin_and_end_anywhere(size, offset, taken):
    """What lies beside them stays as it is."""
    room = size + offset + 40
    inside = slice(offset, offset + size)
    torch.manual_seed(size)
    values, gradient = torch.randn(room), torch.randn(room).bfloat16()
    narrow, rest = torch.full((room,), 7, dtype=torch.bfloat16), torch.full((room,), 7, dtype=torch.int16)
    parameter, plain = (nn.Parameter(values.clone()[inside]) for _ in range(2))
    split = SplitWeight(narrow[inside], rest[inside])
    split.store(row_of(parameter))
    update = NarrowUpdate(parameter, gradient[inside], narrow[inside], SplitMaster(parameter, parameter.data, split))
    optimizers = [torch.optim.AdamW([each], lr=0.1, fused=True) for each in (parameter, plain)]
    for _ in range(3):
        step_narrow(optimizers[0], [update])
        plain_step(optimizers[1], [NarrowUpdate(plain, gradient[inside], None)])
    assert taken == [size, size]
    assert_same_split(split, stored(row_of(plain)))
    assert (narrow == 7).sum() >= room - size
    assert torch.equal(narrow[:offset], torch.full((offset,), 7, dtype=torch.bfloat16))
    assert torch.equal(rest[:offset], torch.full((offset,), 7, dtype=torch.int16))
    assert torch.equal(narrow[offset + size :], torch.full((40,), 7, dtype=torch.bfloat16))
    assert torch.equal(rest[offset + size :], torch.full((40,), 7, dtype=torch.int16))


def narrow_moments(make, splits, num_steps=4):
    """Steps with moments in bfloat16; weights and the optimizer."""
    values = parameters()
    masters = split_masters(values) if splits else [None] * len(values)
    optimizer = make(values)
    for step in range(num_steps):
        gradients = gradients_of(step, values)
        if splits:
            updates = split_updates(values, masters, gradients)
        else:
            received = zip(values, gradients, narrow_copies(values), strict=True)
            updates = [NarrowUpdate(p, g, narrow) for p, g, narrow in received if g is not None]
        step_narrow(optimizer, updates, SCALED, narrows_moments=True)
    for master in masters if splits else ():
        master.show()
    return values, optimizer


@covering(strength=1, setting=list(SETTINGS), splits=[False, True])
def test_moments_in_bfloat16_are_those_of_torchs_passes(setting, splits, taken, monkeypatch):
    kind, options = SETTINGS[setting]

    def make(own):
        return kind(own, lr=0.01, **options)

    ours, optimizer = narrow_moments(make, splits)
    # Those of 300 elements have gradients and copies in float32: one operation of torch's without momentum and decay.
    assert_taken(taken, kind, options, () if splits else (300,))
    moments = [value for state in optimizer.state.values() for value in state.values() if value is not None]
    assert all(each.dtype == (MOMENTS if each.dim() else torch.float32) for each in moments if each.numel() > 1)
    monkeypatch.setenv(VARIABLE, "0")
    theirs, plain = narrow_moments(make, splits)
    assert all(torch.equal(bits(mine), bits(other)) for mine, other in zip(ours, theirs, strict=True))
    assert_same_state(optimizer, plain)


def test_without_a_compiler_torch_makes_the_updates(without_compiler, monkeypatch):
    monkeypatch.setattr("hydra_engine.host.blocked.native", lambda: without_compiler)
    assert_split_bits_are_plain(lambda own: torch.optim.AdamW(own, lr=0.01), factors=SCALED)
    assert without_compiler.missing_because


def test_a_split_weight_that_has_gaps_is_left_to_torch(taken):
    parameter = nn.Parameter(torch.randn(6, 8)[:, :5])
    masters = split_masters([parameter])
    step_narrow(torch.optim.SGD([parameter], lr=0.1), split_updates([parameter], masters, [torch.ones(6, 5)]))
    assert taken == []


def test_rows_of_split_and_of_whole_weights_go_with_one_call(taken, monkeypatch):
    values = [nn.Parameter(torch.randn(9)) for _ in range(3)]
    masters = split_masters(values[1:2])
    whole = [NarrowUpdate(p, torch.ones(9).bfloat16(), None) for p in values]
    updates = [whole[0], *split_updates(values[1:2], masters, [torch.ones(9)]), whole[2]]
    library, calls = native()._library.load(), []
    real = library.hydra_update
    monkeypatch.setattr(library, "hydra_update", lambda *row: calls.append(row[1].value) or real(*row))
    optimizer = torch.optim.SGD(values, lr=0.1)
    step_narrow(optimizer, updates)  # which tries a sample of each kind
    calls.clear()
    step_narrow(optimizer, updates)
    assert calls == [3]
    assert taken == [9] * 6
