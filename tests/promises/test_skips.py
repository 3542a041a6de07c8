"""Values that skip layers: as in plain PyTorch, bit for bit, through DRAM only where they are gotten."""

import copy
import pickle
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hydra_engine import EmulatedDevice, ModelTask, Skips
from partitioners import Optimal, Pilot, Presharded, profile, shard_bytes
from partitioners.cost import ShardTable, skips_of
from tests import exact, reference, zoo
from tests.covering import covering
from tests.refused import refused

SEED, LR, EPOCHS = 7, 1e-2, 2


class Down(nn.Module):
    """Half the size, twice the channels; leaves what it had for the way up."""

    def __init__(self, skips, name, channels):
        super().__init__()
        self.skips, self.name = skips, name
        self.conv = nn.Conv2d(channels, 2 * channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(2 * channels)

    def forward(self, x):
        self.skips.put(self.name, x)
        return F.max_pool2d(F.relu(self.norm(self.conv(x))), 2)


class Up(nn.Module):
    """The way back, beside what was left on the way down."""

    def __init__(self, skips, name, channels):
        super().__init__()
        self.skips, self.name = skips, name
        self.grow = nn.ConvTranspose2d(2 * channels, channels, 2, stride=2)
        self.conv = nn.Conv2d(2 * channels, channels, 3, padding=1)

    def forward(self, x):
        return F.relu(self.conv(torch.cat([self.grow(x), self.skips.get(self.name)], dim=1)))


def unet(depth=3, channels=2):
    """One layer per level and way, with dropout at the bottom."""
    torch.manual_seed(1)
    skips = Skips()
    downs = [Down(skips, f"level {k}", channels * 2**k) for k in range(depth)]
    ups = [Up(skips, f"level {k}", channels * 2**k) for k in reversed(range(depth))]
    bottom = nn.Sequential(nn.Conv2d(channels * 2**depth, channels * 2**depth, 1), nn.Dropout(0.2))
    return nn.Sequential(nn.Conv2d(1, channels, 3, padding=1), *downs, bottom, *ups, nn.Conv2d(channels, 1, 1))


def images(num=3):
    generator = torch.Generator().manual_seed(2)
    return [(torch.randn(4, 1, 16, 16, generator=generator), torch.randn(4, 1, 16, 16, generator=generator))] * num


class Several(nn.Module):
    """Gets a value that is gotten elsewhere, too, and mixes it in more than once."""

    def __init__(self, skips, name, width=6):
        super().__init__()
        self.skips, self.name = skips, name
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        value = self.skips.get(self.name)
        value = value["a"] * value["mask"] if isinstance(value, dict) else value
        return torch.tanh(self.linear(x) * value + value)


class Leave(nn.Module):
    """Puts its own output, and a dict with a mask."""

    def __init__(self, skips, width=6):
        super().__init__()
        self.skips = skips
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        x = torch.sigmoid(self.linear(x))
        self.skips.put("output", x)
        self.skips.put("dict", {"a": 2 * x, "mask": x.detach() > 0.4})
        return x


def several():
    """Two values that layers of many shards get."""
    torch.manual_seed(1)
    skips = Skips()
    names = ["output", "dict", "output", "output", "dict", "dict", "output"]
    return nn.Sequential(nn.Linear(6, 6), Leave(skips), *(Several(skips, name) for name in names), nn.Linear(6, 6))


def vectors(num=3):
    generator = torch.Generator().manual_seed(2)
    return [(torch.randn(5, 6, generator=generator), torch.randn(5, 6, generator=generator)) for _ in range(num)]


MODELS = {"unet": (unet, images), "several": (several, vectors)}


def task_of(network, loader, partitioner, **settings):
    return ModelTask(
        network, F.mse_loss, loader, LR, EPOCHS, name="net", seed=SEED, partitioner=partitioner, **settings
    )


def orchestra_of(task, *, num_devices=2, chaos=4):
    devices = [EmulatedDevice("8MiB", chaos=chaos, meter_every_unit=True) for _ in range(num_devices)]
    return exact.silent([task], devices=devices)


def trained(task, *, num_devices=2, chaos=4):
    orchestra = orchestra_of(task, num_devices=num_devices, chaos=chaos)
    report = orchestra.train_models()
    report.raise_failures()
    assert all(device.peak_bytes <= device.memory_bytes for device in report.devices)
    return report, orchestra.plan.tasks["net"]


@covering(name=list(MODELS), ends=["each", "pairs", "one"], accumulation_steps=[1, 3], strength=1)
def test_skips_across_shards_give_the_bits_of_plain_pytorch(name, ends, accumulation_steps):
    build, batches = MODELS[name]
    network, plain = build(), build()
    num = len(network)
    cut = {"each": list(range(1, num + 1)), "pairs": [*range(2, num, 2), num], "one": [num]}[ends]
    settings = {"optimizer": torch.optim.AdamW, "accumulation_steps": accumulation_steps}
    settings |= {"validation": batches(), "max_grad_norm": 0.7}
    expected = reference.train(plain, F.mse_loss, batches(), seed=SEED, lr=LR, epochs=EPOCHS, **settings)
    report, _ = trained(task_of(network, batches(), Presharded(cut), **settings))
    assert report.tasks["net"].losses == expected.losses
    assert report.tasks["net"].validation_losses == expected.validation_losses
    exact.assert_same_state(zoo.state(network), zoo.state(plain))


@pytest.mark.rest
def test_skips_in_a_narrow_precision():
    precision = "bfloat16"
    network, plain = several(), several()
    expected = reference.train(plain, F.mse_loss, vectors(), seed=SEED, lr=LR, epochs=EPOCHS, precision=precision)
    report, _ = trained(task_of(network, vectors(), Presharded(list(range(1, 11))), precision=precision))
    assert report.tasks["net"].losses == expected.losses
    exact.assert_same_state(zoo.state(network), zoo.state(plain))


def passing(num_layers):
    """A value that passes layers which do without it."""
    skips = Skips()
    torch.manual_seed(1)
    idle = [nn.Tanh() for _ in range(num_layers)]
    return nn.Sequential(nn.Linear(6, 6), Leave(skips), *idle, Several(skips, "output"), nn.Linear(6, 6))


def test_the_plan_counts_a_skip_s_bytes_once_however_many_shards_it_passes():
    step_bytes = {}
    for middle in (0, 1, 6):
        network = passing(middle)
        cuts = {"skipping": list(range(1, len(network) + 1)), "inside": [1, len(network) - 1, len(network)]}
        for name, ends in cuts.items():
            plan = orchestra_of(task_of(network, vectors(1), Presharded(ends)), num_devices=1).generate()
            step_bytes[name, middle] = plan.tasks["net"].dram["step"]
    boundary = 5 * 6 * 4  # also the skip's bytes, whose value and gradient are kept beside those of the boundaries
    assert {step_bytes["inside", middle] for middle in (0, 1, 6)} == {step_bytes["inside", 0]}
    for middle in (0, 1, 6):
        boundaries = 2 * boundary * (middle + 1)
        assert step_bytes["skipping", middle] - step_bytes["inside", middle] == boundaries + 2 * boundary


@mock.patch("hydra_engine.devices.budget.Residents.keep", return_value=False)
@mock.patch("hydra_engine.devices.budget.Residents.offer", return_value=False)
def test_a_skip_crosses_the_link_only_where_it_is_put_and_gotten(*_):
    """With nothing that stays on the device."""
    moved = []
    for middle in (1, 6):
        network = passing(middle)
        report, _ = trained(task_of(network, vectors(1), Presharded(list(range(1, len(network) + 1)))), num_devices=1)
        moved.append((report.devices[0].loaded_bytes, report.devices[0].stored_bytes))
    boundary = 5 * 6 * 4
    # A layer between: its input in forward and again in backward, with the gradient above; its output and gradient.
    assert moved[1][0] - moved[0][0] == 5 * EPOCHS * 3 * boundary
    assert moved[1][1] - moved[0][1] == 5 * EPOCHS * 2 * boundary


@covering(name=list(MODELS), partitioner=[Pilot(), Optimal()], strength=1)
def test_partitioners_leave_room_for_skips(name, partitioner):
    build, batches = MODELS[name]
    network = build()
    inputs, target = batches()[0]
    costs = profile(network, inputs, target, F.mse_loss)
    # A tenth for gradients: what leaves a concatenation is a view with gaps, and travels with them.
    most = 11 * max(shard_bytes(costs, k, k + 1) for k in range(len(costs))) // 10
    devices = [EmulatedDevice(most, meter_every_unit=True)]
    orchestra = exact.silent([task_of(network, batches(), partitioner)], devices=devices)
    report = orchestra.train_models()
    assert report.devices[0].peak_bytes <= most
    assert len(orchestra.plan.tasks["net"].boundaries) > 1


@covering(name=list(MODELS), num_micro_batches=[1, 2], strength=1)
def test_the_table_of_all_shards_counts_skips_as_the_formula_does(name, num_micro_batches):
    build, batches = MODELS[name]
    costs = profile(build(), *batches()[0], F.mse_loss, time_layers=False)
    assert skips_of(costs)
    table = ShardTable.of(costs, num_micro_batches)
    for first in range(len(costs)):
        for last in range(first + 1, len(costs) + 1):
            assert table.full[first, last] == shard_bytes(costs, first, last, num_micro_batches)


@pytest.mark.rest
def test_fake_and_metered_profiles_know_the_same_skips():
    for build, batches in MODELS.values():
        fake, real = (profile(build(), *batches()[0], F.mse_loss, time_layers=run) for run in (False, True))
        assert skips_of(fake) == skips_of(real) != []
        assert [cost.peak_bytes for cost in fake] == [cost.peak_bytes for cost in real]


def test_a_copy_has_skips_of_its_own_without_values():
    network = several()
    network(torch.randn(2, 6))
    twin = copy.deepcopy(network)
    assert twin[1].skips is twin[2].skips is not network[1].skips
    with pytest.raises(KeyError, match="'output'"):
        twin[2].skips.get("output")
    assert isinstance(pickle.loads(pickle.dumps(network[1].skips)), Skips)


def test_getting_what_nobody_put_and_putting_twice_are_refused_before_training():
    skips = Skips()
    missing = nn.Sequential(nn.Linear(6, 6), Several(skips, "nothing"))
    twice = nn.Sequential(Leave(skips), Leave(skips), nn.Linear(6, 6))
    for network, error, words in ((missing, KeyError, "'nothing'"), (twice, ValueError, "'output'")):
        with refused(error, says=words):
            exact.silent([task_of(network, vectors(), None)]).generate()
