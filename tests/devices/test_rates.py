"""Ceilings: stated, or measured once in a process, and used by plans."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hydra_engine import EmulatedDevice, ModelOrchestrator, ModelTask
from hydra_engine.devices import rates
from hydra_engine.devices.rates import MEASURED_NOW, STATED, Ceilings, dram_bytes_per_s
from hydra_engine.planning import PlannedTask
from partitioners import STATED_RATES, Budget
from tests.refused import refused

CPU = Ceilings(
    name="cpu",
    up_bytes_per_s=5e9,
    down_bytes_per_s=4e9,
    dram_bytes_per_s=20e9,
    matmul_flops={"float32": 1e11, "bfloat16": 2e11, "float16": 3e11},
)


@pytest.fixture
def has_rates(monkeypatch):
    """Give emulated devices without a bandwidth these rates."""

    def give(ceilings):
        ceilings_of = EmulatedDevice.ceilings
        monkeypatch.setattr(
            EmulatedDevice, "ceilings", lambda self: ceilings if self.bandwidth is None else ceilings_of(self)
        )

    return give


def test_rates_are_finite_and_above_0():
    for rate in (0, -1.0, float("inf"), float("nan"), True, "1e9", None):
        with refused(ValueError, says=f"down_bytes_per_s {rate!r} 0"):
            replace(CPU, down_bytes_per_s=rate)
        with refused(ValueError, says=f"matmul_flops float32 {rate!r}"):
            replace(CPU, matmul_flops={"float32": rate})


# --- measuring ---


def test_matrices_grow_until_a_product_takes_long_or_memory_ends(monkeypatch):
    sizes, mm = [], torch.mm

    def noting(left, right, *, out):
        sizes.append(len(left))
        return mm(left, right, out=out)

    monkeypatch.setattr(torch, "mm", noting)
    monkeypatch.setattr(rates, "MATMUL_S", 0.0)
    rates.matmul_flops(torch.device("cpu"), torch.float32, 2**30, lambda: None)
    assert set(sizes) == {64}
    monkeypatch.setattr(rates, "MATMUL_S", 1e9)
    rates.matmul_flops(torch.device("cpu"), torch.float32, 3 * 4 * 128**2, lambda: None)
    assert set(sizes) == {64, 128}


def test_dram_traffic_counts_reads_and_writes(monkeypatch):
    monkeypatch.setattr(rates, "DRAM_BYTES", 2**20)
    monkeypatch.setattr(rates, "median_s", lambda work, repeats: work() or 0.5)
    assert dram_bytes_per_s(4, 1) == 2 * 2**20 / 0.5


def test_no_generator_of_the_process_is_drawn_from(monkeypatch):
    monkeypatch.setattr(rates, "MATMUL_S", 1e-5)
    before = torch.get_rng_state()
    rates.matmul_flops(torch.device("cpu"), torch.bfloat16, 2**20, lambda: None)
    assert torch.equal(torch.get_rng_state(), before)


# --- plans ---


def plan_of(*devices, **options):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    loader = [(torch.randn(4, 8), torch.randint(4, (4,)))]
    task = ModelTask(model, F.cross_entropy, loader, 0.1, name="net", **options)
    orchestra = ModelOrchestrator([task], devices=list(devices))
    orchestra.verbose = 0
    return orchestra.generate()


def test_a_stated_bandwidth_is_not_measured():
    found = EmulatedDevice("1MiB", bandwidth="1MB").ceilings()
    assert (found.link_bytes_per_s, found.up_bytes_per_s, found.origin) == (1e6, 1e6, STATED)
    assert EmulatedDevice("1MiB").ceilings().origin == MEASURED_NOW
    assert CPU.link_bytes_per_s == 4e9  # the slower way


def test_plan_says_where_its_rates_come_from():
    assert "rates of cpu: measured now" in str(plan_of(EmulatedDevice("8MiB"))).splitlines()
    assert "rates of" not in str(plan_of(EmulatedDevice("8MiB", bandwidth="1GiB")))


def test_loads_and_stores_are_predicted_at_their_own_rates(has_rates, monkeypatch):
    has_rates(CPU)
    seen = []

    def predict(task, devices, *, host=None):
        seen.extend(devices)
        raise LookupError

    monkeypatch.setattr("hydra_engine.planning.planned.predict_spreads", predict)
    with pytest.raises(LookupError):
        plan_of(EmulatedDevice("8MiB"), EmulatedDevice("8MiB", bandwidth="4500000000"), accumulation_steps=2)
    assert {(cost.load_bytes_per_s, cost.store_bytes_per_s) for cost in seen} == {(4.5e9, 4e9)}


@pytest.mark.parametrize(("dram", "expected"), [(3e3, 1e3), (1e18, 1e15)])
def test_an_update_is_no_faster_than_dram(has_rates, monkeypatch, dram, expected):
    monkeypatch.setattr("hydra_engine.planning.planned.update_bytes_per_s", lambda _: 1e15)  # what a cache holds
    has_rates(replace(CPU, dram_bytes_per_s=dram))
    planned = PlannedTask(ModelTask([nn.Linear(8, 4)], F.cross_entropy, [], 0.1), "net")
    budget = planned.estimate.budget(Budget(memory_bytes=2**23), EmulatedDevice("8MiB"))
    assert budget.update_bytes_per_s == expected  # weights are read and written, gradients read


def test_layers_that_are_not_timed_are_counted_at_the_measured_rate_of_products(has_rates):
    has_rates(replace(CPU, matmul_flops={"float32": 123e9}))
    planned = PlannedTask(ModelTask([nn.Linear(8, 4)], F.cross_entropy, [], 0.1), "net")
    assert planned.estimate.kernel_rates() == STATED_RATES["cpu", "float32"]
    planned.estimate.rates(EmulatedDevice("8MiB"))
    assert planned.estimate.kernel_rates().flops_per_s == 123e9
