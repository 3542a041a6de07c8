"""Moments in bfloat16: rounded by turns, alike for every cut, and half of the DRAM."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hydra_engine import ModelTask
from hydra_engine.host.blocked import BLOCK, round_by_turns
from partitioners import Presharded
from tests import exact
from tests.refused import refused

OPTIMIZERS = {
    "adamw": torch.optim.AdamW,
    "fused": partial(torch.optim.AdamW, fused=True),
    "momentum": partial(torch.optim.SGD, momentum=0.9),
    "rows": torch.optim.Adafactor,
}


def rounded(values, turn):
    return round_by_turns(values.clone(), out := torch.empty_like(values, dtype=torch.bfloat16), turn) or out


def test_the_mean_of_65536_neighbours_and_of_65536_turns_is_the_value():
    # Neighbour k at one turn is as k + 1 at another one, since both go round by odd numbers.
    shift = next(k for k in range(BLOCK) if (k * 25717 - 40503) % 2**16 == 0)
    for value in (1.0, 1.001, 1.00390625, -3.14159, 1e-20, -7e-41, 0.0):
        values = torch.full((BLOCK,), value)
        first, second = rounded(values, 5).double(), rounded(values, 6).double()
        assert first.mean() == second.mean() == values[0].double()
        assert torch.equal(second, first.roll(-shift)), value


def test_each_rounding_is_a_neighbour_and_what_bfloat16_has_stays():
    torch.manual_seed(0)
    values = torch.cat([torch.randn(BLOCK + 100), torch.tensor([torch.inf, -torch.inf, torch.nan])])
    exact = values.bfloat16().float()
    assert torch.equal(rounded(exact, 7).float().nan_to_num(), exact.nan_to_num())
    found = rounded(values, 7)
    assert torch.equal(found.isnan(), values.isnan())
    bits, both = values.view(torch.int32), found.float().view(torch.int32)
    assert ((both - bits).abs()[:-3] < 2**16).all()


def test_an_average_of_nothing_falls():
    average, out = torch.ones(1000), torch.empty(1000, dtype=torch.bfloat16)
    nearest = torch.ones(1000, dtype=torch.bfloat16)
    for turn in range(1000):
        round_by_turns(average.mul_(0.999), out, turn)
        average = out.float()
        nearest = (nearest.float() * 0.999).bfloat16()
    assert average.mean() == pytest.approx(0.999**1000, rel=0.02)
    assert (nearest == 1).all()


def trained(ends, moments="bfloat16", optimizer=torch.optim.AdamW, saved=None, epochs=2, **settings):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(37, 301), nn.GELU(), nn.Linear(301, 500), nn.Linear(500, 5))
    batches = [(torch.randn(4, 37), torch.randint(0, 5, (4,))) for _ in range(5)]
    settings |= {"optimizer": optimizer, "partitioner": Presharded(ends), "precision": "bfloat16", "moments": moments}
    task = ModelTask(model, F.cross_entropy, batches, 1e-2, epochs, seed=1, **settings)
    orchestra = exact.silent([task], "64MiB", checkpoint_dir=saved)
    report = orchestra.train_models(resume=saved is not None and any(saved.iterdir()))
    report.raise_failures()
    return report.tasks["task-0"].losses, list(model.state_dict().values()), orchestra.plan.tasks["task-0"], report


def assert_same(actual, expected):
    assert actual[0] == expected[0]
    assert all(map(torch.equal, actual[1], expected[1]))


@pytest.mark.rest
@pytest.mark.parametrize(
    "name", ["adamw", "rows", *(pytest.param(name, marks=pytest.mark.rest) for name in ("fused", "momentum"))]
)
def test_bits_are_the_same_for_every_cut_and_near_those_of_float32(name):
    optimizer = OPTIMIZERS[name]
    one = trained([4], optimizer=optimizer)
    assert_same(trained([1, 2, 4], optimizer=optimizer, early_release=True, split_weights=True), one)
    exact = trained([4], "float32", optimizer)
    assert one[0] == pytest.approx(exact[0], rel=0.05)
    if name != "rows":  # Adafactor's averages are of rows and columns
        assert one[0] != exact[0]


@pytest.mark.rest
def test_a_task_that_is_saved_goes_on(tmp_path):
    trained([2, 4], saved=tmp_path, epochs=1)
    assert_same(trained([4], saved=tmp_path), trained([4]))


@pytest.mark.parametrize("first", ["float32", "bfloat16"])
def test_a_task_goes_on_with_moments_that_were_saved_otherwise(tmp_path, first):
    trained([4], first, saved=tmp_path, epochs=1, optimizer=OPTIMIZERS["fused"])
    other = "float32" if first == "bfloat16" else "bfloat16"
    losses, _, _, _ = trained([4], other, saved=tmp_path, optimizer=OPTIMIZERS["fused"])
    assert losses == pytest.approx(trained([4], "float32", optimizer=OPTIMIZERS["fused"])[0], rel=0.05)


def test_the_plan_has_half_of_the_bytes_and_the_report_says_that_it_is_not_exact():
    narrow, wide = trained([4]), trained([4], "float32")
    counters = 4 * 6  # AdamW counts the steps of each parameter
    assert narrow[2].dram["optimizer"] - counters == (wide[2].dram["optimizer"] - counters) / 2
    assert any("not plain PyTorch's" in message for message in narrow[3].messages)
    assert not any("not plain PyTorch's" in message for message in wide[3].messages)


@pytest.mark.parametrize("options", [{"precision": "float32"}, {"optimizer_scope": "task"}], ids=str)
def test_updates_that_are_the_optimizers_own_are_refused(options):
    with refused(says=f"moments bfloat16 {next(iter(options.values()))}"):
        ModelTask(nn.Linear(2, 2), F.mse_loss, [], moments="bfloat16", **{"precision": "bfloat16", **options})
