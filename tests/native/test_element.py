"""The GPU's kernel has the bits of the host's and of torch's fused step. The host runs it here, thread after thread."""

import ctypes
import re
import shutil
import subprocess

import numpy as np
import pytest
import torch
from torch import nn

from hydra_engine.host.split import SplitWeight
from hydra_engine.native import NarrowUpdate, kernel, native, update
from tests.host.updates import SCALED, bits, plain_step
from tests.native.test_update import SETTINGS
from tests.update_kernel import compiled

OPTIONS = ["-arch=sm_90", *kernel.OPTIONS, "-Werror=all-warnings"]
BLOCK = kernel.ELEMENTS_OF_BLOCK
SIZES = [0, 1, 300, BLOCK, 2 * BLOCK + 37]
SPLIT = "split"
TYPES = [  # of the gradient and of the narrow weight
    (torch.float32, None),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, SPLIT),
    (torch.float32, SPLIT),
]
TIE = 1.00390625  # which is rounded down
SPECIAL = torch.tensor([0.0, -0.0, 1e-45, -1e-40, 1e-38, TIE, -3e38, 3e38, torch.inf, -torch.inf, torch.nan, 1.0])


@pytest.fixture(scope="module")
def gpu():
    """The kernel as the host's compiler understands it, without vectors."""
    if not native().wait():
        pytest.skip(f"no native code: {native().missing_because or 'it is turned off, or another process builds it'}")
    library = compiled(kernel.source())
    assert (library.elements_of_block(), library.threads()) == (BLOCK, kernel.THREADS)
    return library


@pytest.fixture(scope="module")
def host(gpu):
    return native()._library.load()


def works(kind, options, moments=torch.float32):
    """Updates of every size and of all types; the larger ones begin with all pairs of special weights and gradients."""
    group = kind([nn.Parameter(torch.ones(1))], lr=0.01, **options).param_groups[0]
    names = ["momentum_buffer"] if group.get("momentum") else []
    if kind is not torch.optim.SGD:
        names = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])]
    generator, found = torch.Generator().manual_seed(0), []
    pairs = torch.cartesian_prod(SPECIAL, SPECIAL).t()
    float16 = [(torch.float16, torch.float16)] if native()._library.load().hydra_has_float16() else []
    for size in SIZES:
        for gradient_type, narrow in TYPES + float16:
            weight, gradient, *state = torch.randn(2 + len(names), size, generator=generator)
            if size >= pairs.shape[1]:
                weight[: pairs.shape[1]], gradient[: pairs.shape[1]] = pairs
                for values in state:
                    values[-len(SPECIAL) :] = SPECIAL
            state = [each.abs() if name.endswith("_sq") else each for name, each in zip(names, state, strict=True)]
            halves = None
            if narrow is SPLIT:
                halves = SplitWeight(torch.empty(size, dtype=torch.bfloat16), torch.empty(size, dtype=torch.int16))
                halves.store(weight)
            place = halves.narrow if halves else None if narrow is None else torch.zeros(size, dtype=narrow)
            own = {name: each.to(moments) for name, each in zip(names, state, strict=True)}
            counter = None if kind is torch.optim.SGD else torch.tensor(3.0)
            found.append(update.Work(weight, gradient.to(gradient_type), place, group, own, counter, halves))
    return found


class Launched:
    """The kernel here, as what makes updates."""

    def __init__(self, library):
        self._library = library

    def launch(self, rows, sizes):
        ends = np.array(kernel.block_ends(sizes))
        self._library.launch(rows, ctypes.c_void_p(ends.ctypes.data), len(sizes))


def copy(*pairs):
    for target, source in pairs:
        target.copy_(source)


def step_on_gpu(gpu, kind, works, arithmetic, factors):
    """One launch for all of them; split weights go to halves of a GPU's, and come back."""
    there = []
    for work in works:
        halves = work.halves and SplitWeight(work.narrow, torch.empty_like(work.halves.rest))
        if halves:
            halves.ties = torch.empty(kernel.tie_bytes(len(work.narrow)) // 4, dtype=torch.int32)
            work.halves.copy_to(halves, copy)
        there.append((work._replace(halves=halves), arithmetic))
    update._launch(Launched(gpu), kind, there, factors)
    for (launched, _), work in zip(there, works, strict=True):
        if work.halves:
            launched.halves.copy_to(work.halves, copy)


def written(work):
    weight = work.halves.load(torch.empty_like(work.master)) if work.halves else work.master
    return [weight, *work.moments.values(), *([] if work.narrow is None else [work.narrow])]


def assert_same(mine, other):
    """Every bit, but for NaN, which is NaN."""
    for ours, theirs in zip(mine, other, strict=True):
        for value, expected in zip(written(ours), written(theirs), strict=True):
            assert torch.equal(value.isnan(), expected.isnan()), ours.group
            is_number = ~value.isnan()
            assert torch.equal(bits(value)[is_number], bits(expected)[is_number]), ours.group


@pytest.mark.parametrize(("kind", "options"), SETTINGS.values(), ids=SETTINGS)
def test_the_kernel_has_the_bits_of_the_hosts_and_of_torch(kind, options, gpu, host):
    """torch's own where its square roots are IEEE's: those of steps that are not fused are a library's."""
    ours, hosts, theirs = (works(kind, options) for _ in range(3))
    factors = SCALED if options else ()
    values = [float(factor) for factor in factors]
    arithmetic, is_ieee = update.PLAIN[0], kind is torch.optim.SGD or "fused" in options
    if is_ieee:
        arithmetic = update._agree(host, kind, ours[0], len(factors)) or pytest.skip("no candidate has torch's bits")
    masters = [nn.Parameter(work.master) for work in theirs]
    optimizer = kind([{**theirs[0].group, "params": masters}])
    for master, work in zip(masters, theirs, strict=True):
        optimizer.state[master] = {**work.moments, **({"step": work.counter} if work.counter is not None else {})}
    for _ in range(3):
        step_on_gpu(gpu, kind, ours, arithmetic, values)
        update._call(host, kind, [(work, arithmetic) for work in hosts], values)
        assert_same(ours, hosts)
        if is_ieee:
            gradients = [work.gradient.clone() for work in theirs]  # which it may overwrite
            plain_step(optimizer, [NarrowUpdate(*each, None) for each in zip(masters, gradients, strict=True)], factors)
            for mine, plain in zip(ours, theirs, strict=True):
                narrow = None if mine.narrow is None else plain.master.to(mine.narrow.dtype)
                assert_same([mine], [plain._replace(halves=None, narrow=narrow)])


@pytest.mark.parametrize("setting", [key for key, (_, options) in SETTINGS.items() if "fused" in options])
def test_moments_in_bfloat16_are_rounded_as_the_host_rounds_them(setting, gpu, host):
    kind, options = SETTINGS[setting]
    ours, hosts = (works(kind, options, torch.bfloat16) for _ in range(2))
    for _ in range(3):
        step_on_gpu(gpu, kind, ours, update.FUSED[0], SCALED[:1])
        update._call(host, kind, [(work, update.FUSED[0]) for work in hosts], SCALED[:1])
        assert_same(ours, hosts)


def test_NaN_with_all_bits_set_stays_NaN(gpu):
    """A GPU makes no other; rounded by turns as numbers are, it would become zero."""
    own = works(torch.optim.AdamW, {}, torch.bfloat16)
    for work in own:
        work.gradient.view(torch.int16 if work.gradient.itemsize == 2 else torch.int32).fill_(-1)
    step_on_gpu(gpu, torch.optim.AdamW, own, update.PLAIN[0], ())
    assert all(value.isnan().all() for work in own for value in written(work))


def test_ties_come_and_go_with_their_bits(gpu):
    """Neighbours have a word in common."""
    weight = torch.tensor([TIE, 1.0] * 50)
    halves = SplitWeight(torch.empty(100, dtype=torch.bfloat16), torch.empty(100, dtype=torch.int16))
    halves.store(weight)
    group = torch.optim.SGD([nn.Parameter(weight)], lr=1.0).param_groups[0]
    for change, expected in ((0.0, range(0, 100, 2)), (1.0 - TIE, range(1, 100, 2))):
        work = update.Work(torch.empty(100), torch.full((100,), change), halves.narrow, group, {}, None, halves)
        step_on_gpu(gpu, torch.optim.SGD, [work], update.PLAIN[0], ())
        assert halves.apart.places.tolist() == [*expected]
        weight = weight - change
        assert torch.equal(halves.load(torch.empty(100)), weight)


def test_the_kernel_compiles_for_a_gpu(tmp_path):
    """Each operation is rounded by itself: none is contracted or approximate, or takes denormals for zeros."""
    if missing := [name for name in ("nvcc", "ptxas") if not shutil.which(name)]:
        pytest.skip(f"{', '.join(missing)} not found")
    for kind in ("ptx", "cubin"):
        subprocess.run(["nvcc", *OPTIONS, f"-{kind}", kernel.SOURCE, "-o", tmp_path / kind], check=True)
    assert (tmp_path / "cubin").read_bytes().startswith(b"\x7fELF")
    text = (tmp_path / "ptx").read_text()
    assert re.search(r"\.visible \.entry hydra_update\(", text)
    assert {*re.findall(r"(?:add|sub|mul|fma|div|sqrt|rcp|rsqrt)\.\S*f(?:16|32|64)", text)} == {
        f"{operation}.rn.f32" for operation in ("add", "sub", "mul", "fma", "div", "sqrt")
    }
