"""The native update has the bits of torch's own step in every implementation, or it is not used."""

import ctypes
import re
import sys

import pytest
import torch
from torch import nn

from hydra_engine import ModelOrchestrator, ModelTask
from hydra_engine.host.blocked import step_narrow
from hydra_engine.native import NarrowUpdate, native, update
from hydra_engine.native.library import Library
from hydra_engine.native.update import Native
from tests.covering import covering
from tests.host.updates import SCALED, SMALL_CHUNK, assert_bits_are_plain, groups, parameters, plain_step, threads
from tests.refused import names

HOWS = ({}, {"foreach": True}, {"fused": True})
VARIANTS = {
    "Adam": [{}, {"weight_decay": 0.1, "amsgrad": True}, {"betas": (0.3, 0.9), "maximize": True}],
    "AdamW": [{}, {"amsgrad": True, "maximize": True}, {"weight_decay": 0, "eps": 1e-3}, {"betas": (0.5, 0.5)}],
    "SGD": [
        {},
        {"weight_decay": 0.1},
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"momentum": 0.3, "dampening": 0.1, "maximize": True},
        {"momentum": 0.5, "nesterov": True},
        {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1, "maximize": True},
    ],
}
# Fused, and by turns torch's plain loop and its foreach, which round alike.
SETTINGS = {
    f"{name}({ {**options, **how} })": (getattr(torch.optim, name), {**options, **how})
    for name, variants in VARIANTS.items()
    for k, options in enumerate(variants)
    for how in (HOWS[k % 2], {"fused": True})
}
BLOCK, BLOCKS = (
    int(re.search(text, update.SOURCE.read_text())[1]) for text in (r"kBlock = (\d+);", r"kUnit = (\d+) \* kBlock;")
)
UNIT = BLOCKS * BLOCK  # elements that a thread takes at a time
SEVERAL_UNITS = (3 * UNIT + 13, 5, UNIT)


@pytest.mark.parametrize(("kind", "options"), SETTINGS.values(), ids=SETTINGS)
def test_bits_of_every_setting(kind, options, taken):
    assert_bits_are_plain(lambda own: kind(own, lr=0.01, **options), factors=SCALED if options else ())


@pytest.mark.parametrize("factors", [(), SCALED], ids=["plain", "scaled"])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_bits_at_the_ends_of_spans_and_units(kind, factors, taken):
    """The fused step goes over spans of 32 elements and units; what is left of them is stepped in blocks."""
    sizes = [1, 31, 32, 33, 63, 95, 161, UNIT - 1, UNIT + 32, UNIT + 45]
    assert_bits_are_plain(
        lambda own: kind(own, lr=0.01, weight_decay=0.1, fused=True),
        lambda: [nn.Parameter(torch.linspace(-1, 1, size)) for size in sizes for _ in range(3)],
        factors,
    )
    assert set(taken) == set(sizes)


@covering(strength=1, how=HOWS, num_threads=[1, 2, 3], ids=str)
def test_bits_depend_on_no_number_of_threads(how, num_threads, taken):
    """Each at torch's own number: its kernels divide what is large among threads."""
    with threads(num_threads):
        for kind, options in ((torch.optim.AdamW, {"amsgrad": True}), (torch.optim.SGD, {"momentum": 0.9})):
            assert_bits_are_plain(
                lambda own, kind=kind, options=options: kind(own, lr=0.01, **how, **options),
                lambda: [nn.Parameter(torch.linspace(-1, 1, n)) for n in SEVERAL_UNITS],
                num_steps=3,
            )
    assert set(taken) == set(SEVERAL_UNITS) or "fused" not in how


@pytest.mark.parametrize("function", [update.PARALLEL, "GOMP_nothing"])
def test_torchs_threads_make_the_update_where_they_can_be_called(function, monkeypatch, taken):
    if sys.platform != "linux" or "backend: OpenMP" not in torch.__config__.parallel_info():
        pytest.skip("torch's threads are not those of an OpenMP library that is known here")
    monkeypatch.setattr(update, "PARALLEL", function)
    library, calls = native()._library.load(), []
    real = library.hydra_update
    monkeypatch.setattr(library, "hydra_update", lambda *row: calls.append(row[3].value) or real(*row))
    with threads(3):
        assert_bits_are_plain(
            lambda own: torch.optim.AdamW(own, lr=0.01, fused=True),
            lambda: [nn.Parameter(torch.linspace(-1, 1, n)) for n in SEVERAL_UNITS],
        )
    assert set(taken) == set(SEVERAL_UNITS)
    assert calls
    assert all(bool(address) == (function == "GOMP_parallel") for address in calls)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_groups_and_schedules_keep_their_options(kind, taken):
    """Schedules may move betas or momentum with each step, for which no new sample is stepped."""
    sides = parameters(), parameters()
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizers = [kind(groups(own), lr=0.01, **options) for own in sides]
    known = []
    for step in range(5):
        for optimizer, own, way in zip(optimizers, sides, (step_narrow, plain_step), strict=True):
            for group in optimizer.param_groups:
                group["lr"] *= 0.7
                group.update({"momentum": 0.95 - 0.05 * step} if options else {"betas": (0.95 - 0.05 * step, 0.99)})
            gradients = [torch.full_like(p, 0.1 * (step + 1), dtype=torch.bfloat16) for p in own]
            way(optimizer, [NarrowUpdate(p, g, None) for p, g in zip(own, gradients, strict=True)], SCALED)
        known.append(len(native()._agreed))
    assert all(torch.equal(mine, plain) for mine, plain in zip(*sides, strict=True))
    assert len(set(known[1:])) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factors", [(), SCALED], ids=["plain", "scaled"])
def test_the_kernel_makes_the_updates(factors, dtype, taken):
    """All but the first step's, which makes the state, and those of tensors with gaps or without dimensions."""
    values = parameters()
    optimizer = torch.optim.SGD(values, lr=0.1, momentum=0.9)
    updates = [NarrowUpdate(p, torch.ones_like(p, dtype=dtype), None) for p in values]
    step_narrow(optimizer, updates, factors)
    assert taken == []
    step_narrow(optimizer, updates, factors)
    assert taken == [p.numel() for p in values if p.dim() and p.is_contiguous() | (p.numel() != 40 * 30)]


@pytest.mark.parametrize("begin", [0, 1, 16, 31, 32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_weights_begin_anywhere_and_end_where_they_end(dtype, begin, taken):
    """Whole blocks of those that begin a line are written past the cache."""
    size = 3 * SMALL_CHUNK + 17
    parameter = nn.Parameter(torch.linspace(-3, 5, size))
    memory = torch.full((size + 64,), 7, dtype=dtype)
    narrow = memory[begin : begin + size]
    optimizer = torch.optim.AdamW([parameter], lr=0.01, fused=True)
    for step in range(3):
        step_narrow(optimizer, [NarrowUpdate(parameter, torch.full_like(narrow, 0.1 * (step + 1)), narrow)])
        assert torch.equal(narrow, parameter.to(dtype))
    is_native = dtype == torch.bfloat16 or native()._library.load().hydra_has_float16()
    assert taken == ([size] * 2 if is_native else [])
    assert all(torch.equal(each, torch.full_like(each, 7)) for each in (memory[:begin], memory[begin + size :]))


def test_gradients_and_what_is_not_stepped_stay_as_they_are(taken):
    values = parameters()
    optimizer = torch.optim.AdamW(values, fused=True)
    updates = [NarrowUpdate(p, torch.ones_like(p, dtype=torch.bfloat16), None) for p in values]
    step_narrow(optimizer, updates)
    before = [p.detach().clone() for p in values]
    step_narrow(optimizer, updates[1:], SCALED)
    assert all(torch.equal(each.gradient, torch.ones_like(each.gradient)) for each in updates)
    assert [k for k, p in enumerate(values) if torch.equal(p, before[k]) and p.numel()] == [0]


def test_what_is_written_is_known_to_autograd(taken):
    parameter = nn.Parameter(torch.ones(9))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    loss = (parameter * parameter).sum()
    step_narrow(optimizer, [NarrowUpdate(parameter, torch.ones(9).bfloat16(), None)])
    assert taken == [9]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("how", HOWS, ids=str)
def test_numbers_at_the_edge(how, taken):
    for value in (float("inf"), float("-inf"), float("nan"), 3e38, 1e-45, -0.0):
        ours, theirs = (nn.Parameter(torch.tensor([1.0, value, 0.0, -1.0, value] * 7)) for _ in range(2))
        gradient = torch.tensor([value, 1.0, 0.0, value, value] * 7)
        optimizers = [torch.optim.AdamW([each], lr=0.1, **how) for each in (ours, theirs)]
        for _ in range(3):
            step_narrow(optimizers[0], [NarrowUpdate(ours, gradient, None)])
            plain_step(optimizers[1], [NarrowUpdate(theirs, gradient, None)])
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def test_torch_makes_the_updates_where_a_thread_flushes_denormals(taken):
    """torch's other threads may not, so that bits depend on which of them has a number."""
    parameter = nn.Parameter(torch.ones(9))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    try:
        if torch.set_flush_denormal(True):
            step_narrow(optimizer, [NarrowUpdate(parameter, torch.ones(9).bfloat16(), None)])
            assert taken == []
    finally:
        torch.set_flush_denormal(False)
    step_narrow(optimizer, [NarrowUpdate(parameter, torch.ones(9).bfloat16(), None)])
    assert taken == [9]


def adamw_steps(kernel, monkeypatch):
    monkeypatch.setattr("hydra_engine.host.blocked.native", lambda: kernel)
    assert_bits_are_plain(lambda own: torch.optim.AdamW(own, lr=0.01), factors=SCALED)


def test_a_kernel_with_other_bits_is_not_used(monkeypatch):
    """As on a processor on which torch rounds as in none of the candidates."""

    class Wrong:
        calls = 0

        def hydra_has_float16(self):
            return 1

        def hydra_update(self, rows, num_rows, num_threads, *others):
            Wrong.calls += 1

    class WrongLibrary:
        def load(self):
            return Wrong()

    kernel = Native(WrongLibrary())
    adamw_steps(kernel, monkeypatch)
    assert Wrong.calls == len(kernel._agreed) * len(update._unfused())
    assert set(kernel._agreed.values()) == {None}


@pytest.mark.parametrize("wrong", [None, 0x3F80_0000, 0x407F_FFFF])
def test_one_wrong_root_of_all_mantissas_is_seen(wrong):
    class Roots:
        def hydra_roots(self, values, roots, size, refines, of_library):
            values, roots = (
                torch.frombuffer((ctypes.c_int32 * size.value).from_address(each.value), dtype=torch.int32)
                for each in (values, roots)
            )
            roots.view(torch.float32).copy_(values.view(torch.float32).sqrt())
            roots += values == wrong if wrong is not None else 0

    assert update._same_roots(Roots(), update.PLAIN[0]) == (wrong is None)


def test_square_roots_are_torchs_on_every_processor_whose_library_names_its_own(taken):
    """Whatever MKL does here: by a formula of the kernel, or by calling it."""
    library = Library(update.SOURCE).load()
    assert any(update._same_roots(library, each) for each in update._unfused()) or not update._of_torch("vmsSqrt")


def test_a_function_that_no_library_names_is_not_called(monkeypatch):
    assert update._of_torch("vmsNothing") == 0
    monkeypatch.setattr(update, "SQUARE_ROOTS", "vmsNothing")
    assert update._unfused() == update.PLAIN


def test_without_a_compiler_torch_makes_the_updates(without_compiler, monkeypatch, tmp_path):
    adamw_steps(without_compiler, monkeypatch)
    names(without_compiler.missing_because, says="g++ clang++ CXX")
    assert not list(tmp_path.iterdir())


def test_rows_are_laid_out_as_in_the_source(taken):
    """The kernel tells the size of its struct: a field that one side lacks would shift all others."""
    assert Library(update.SOURCE).load().hydra_update_bytes() == update.PLACES.size + update.REST.size


def test_a_plan_says_that_there_is_no_compiler(without_compiler, monkeypatch):
    kernel = without_compiler
    for module in ("host.optimizer", "run.task_list"):
        monkeypatch.setattr(f"hydra_engine.{module}.native", lambda: kernel)
    data = [(torch.ones(2, 3), torch.ones(2, 1))]
    orchestra = ModelOrchestrator([ModelTask(nn.Sequential(nn.Linear(3, 1)), nn.MSELoss(), data, 0.1, 1)])
    plan = orchestra.generate()
    assert f"{kernel.missing_because}\n" in str(plan)
    names(kernel.missing_because, says="C++ compiler")
