"""The budget holds whatever a batch brings and whatever buffers grow to; what is known is not found out again."""

import contextlib
import copy
import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hydra_engine.planning.fit
from hydra_engine import ModelTask, ShardDoesNotFit
from hydra_engine.host.measured import MOST_KNOWN, NUM_METERED
from hydra_engine.planning import PlannedTask
from partitioners import Presharded
from tests import exact, reference
from tests.audit import audited
from tests.covering import covering
from tests.refused import names

SEED = 5
WIDTH = 32
GENERATOR = torch.Generator().manual_seed(2)


def inputs(*shape):
    return torch.randn(*shape, WIDTH, generator=GENERATOR)


def classes(*shape):
    return torch.randint(WIDTH, shape, generator=GENERATOR)


def dense(num, *others):
    torch.manual_seed(1)
    return nn.Sequential(*others, *(nn.Linear(WIDTH, WIDTH) for _ in range(num)))


def lengths_of(order, num):
    found = list(range(40, 40 + num))
    if order == "falling":
        found.reverse()
    elif order == "any":
        random.Random(1).shuffle(found)
    return found


class Layer(nn.Module):
    """A linear layer, to be made something of."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)


def flat_loss(output, target):
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


class Trained:
    """A task that was trained with every unit counted from outside, and what the engine counted itself meanwhile."""

    def __init__(self, monkeypatch, model, loader, memory, *, num_devices=1, loss=flat_loss, **options):
        self.counted, self.spreads = [], []
        count, spread_over = hydra_engine.planning.fit._count, PlannedTask.spread_over
        original = copy.deepcopy(model)
        task = ModelTask(model, loss, loader, 1e-2, seed=SEED, name="grows", **options)
        orchestra = exact.silent([task], memory, num_devices=num_devices)
        orchestra.generate()
        monkeypatch.setattr(hydra_engine.planning.fit, "_count", lambda *args: self.counted.append(1) or count(*args))
        monkeypatch.setattr(PlannedTask, "spread_over", lambda *args: self.spreads.append(1) or spread_over(*args))
        with audited() as audit, contextlib.suppress(ShardDoesNotFit):
            orchestra.train_models()
        self.report, self.metered = orchestra.report.tasks["grows"], audit.metered
        self.state = orchestra._tasks.all[0].state
        self.num_known = max((len(table) for table in self.state.measured.known._units.values()), default=0)
        self.num_batches = len(self.state.measured.known._batches)
        assert audit.num_units
        assert not audit.over
        assert all(device.peak_bytes <= device.memory_bytes for device in orchestra.report.devices)
        steps = self.report.steps
        if steps:
            number = options.get("accumulation_steps", 1)
            batches = loader[:steps]
            reference.train(original, loss, batches, lr=1e-2, epochs=1, seed=SEED, accumulation_steps=number)
        for name, theirs in original.state_dict().items():
            assert torch.equal(model.state_dict()[name], theirs), name

    def metered_per_unit(self):
        """How often the unit that was metered most was."""
        kinds = [unit.partition("@")[0] for unit in self.metered]
        return max(map(kinds.count, kinds), default=0)


# -- buffers that grow


class Bank(nn.Module):
    """A memory bank: what it has seen, as `change` makes it of the old bank and the new rows."""

    def __init__(self, change):
        super().__init__()
        self.linear, self.change = nn.Linear(WIDTH, WIDTH), change
        self.register_buffer("bank", torch.zeros(2, WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        y = self.linear(x)
        if self.training:
            self.calls += 1
            self.change(self, y.detach())
        return y + self.bank.to(y.dtype).mean(0)


def append(bank, rows):
    bank.bank = torch.cat([bank.bank, rows])


def append_in_data(bank, rows):
    bank.bank.data = torch.cat([bank.bank, rows])


def append_in_place(bank, rows):
    start = len(bank.bank)
    bank.bank.resize_(start + len(rows), WIDTH)
    bank.bank[start:] = rows


def append_later(bank, rows):
    if bank.calls > 6:
        append(bank, rows)


def append_now_and_then(bank, rows):
    if bank.calls % 3 == 0:
        append(bank, rows)


def begin_again(bank, rows):
    bank.bank = torch.zeros(2, WIDTH) if bank.calls % 5 == 0 else torch.cat([bank.bank, rows])


def keep_the_last(bank, rows):
    bank.bank = torch.cat([bank.bank, rows])[-60:]


def change_type(bank, rows):
    bank.bank = bank.bank.to(torch.float64 if bank.bank.dtype == torch.float32 else torch.float32)


GROWING = (append, append_in_data, append_in_place, append_later, append_now_and_then)
BOUNDED = (begin_again, keep_the_last, change_type)


def banked(change, place):
    torch.manual_seed(1)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    layers[place] = Bank(change)
    return nn.Sequential(*layers)


def cases():
    """Every way of growing, in places and options in turn."""
    options = [{}, {"accumulation_steps": 2}, {"num_devices": 2, "accumulation_steps": 2}]
    partitioners = [None, Presharded([4]), Presharded([1, 2, 3, 4])]
    for k, change in enumerate(GROWING):
        for i, partitioner in enumerate(partitioners):
            marks = () if i == k % 3 and change in (append, append_in_place) else pytest.mark.rest
            yield pytest.param(change, 3 * ((k + i) % 2), partitioner, options[(k + i) % 3], marks=marks)


@pytest.mark.parametrize(("change", "place", "partitioner", "options"), list(cases()))
def test_a_buffer_that_grows_past_the_device_fails_the_task_by_name(monkeypatch, change, place, partitioner, options):
    loader = [(inputs(32), classes(32)) for _ in range(40)]
    model = banked(change, place)
    trained = Trained(monkeypatch, model, loader, "96KiB", partitioner=partitioner, **options)
    assert trained.report.status == "failed"
    assert 3 < trained.report.steps < 40
    assert isinstance(trained.report.exception, ShardDoesNotFit)
    names(trained.report.exception, task="grows", layer=f"{place} (Bank)", says="buffers")


@covering(strength=1, change=BOUNDED, place=[0, 3], num_devices=[1, 2])
def test_a_buffer_that_is_resized_within_bounds_is_trained(monkeypatch, change, place, num_devices):
    loader = [(inputs(16), classes(16)) for _ in range(12)]
    trained = Trained(monkeypatch, banked(change, place), loader, "96KiB", num_devices=num_devices)
    assert trained.report.status == "finished", trained.report.error


@pytest.mark.rest
def test_other_tasks_and_evaluations_go_on_beside_a_buffer_that_grows():
    models = [banked(append, 1), dense(3)]
    original = copy.deepcopy(models[1])
    loader = [(inputs(16), classes(16)) for _ in range(20)]
    tasks = [
        ModelTask(model, flat_loss, loader, 1e-2, seed=SEED, validation=loader[:2], name=name)
        for model, name in zip(models, "ab", strict=True)
    ]
    orchestra = exact.silent(tasks, "64KiB")
    with audited() as audit:
        report = orchestra.train_models()
    assert not audit.over
    assert report.tasks["a"].status == "failed"
    assert report.devices[0].peak_bytes <= report.devices[0].memory_bytes
    reference.train(original, flat_loss, loader, lr=1e-2, seed=SEED)
    assert all(map(torch.equal, models[1].parameters(), original.parameters()))


class Likeness(nn.Module):
    """Gives as many numbers for a row as rows were seen: what enters the shard above grows, too."""

    def __init__(self):
        super().__init__()
        self.register_buffer("bank", torch.zeros(2, WIDTH))

    def forward(self, x):
        self.bank = torch.cat([self.bank, x.detach()])
        return x @ self.bank.t(), x


class Weigh(nn.Module):
    def forward(self, pair):
        likeness, x = pair
        return x * torch.softmax(likeness, 1).amax(1, keepdim=True)


@pytest.mark.rest
@pytest.mark.parametrize("ends", [pytest.param([5], marks=pytest.mark.rest), [2, 5]], ids=str)
def test_what_a_growing_buffer_gives_to_shards_above_is_counted(monkeypatch, ends):
    torch.manual_seed(1)
    linear = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    model = nn.Sequential(linear[0], Likeness(), Weigh(), *linear[1:])
    loader = [(inputs(32), classes(32)) for _ in range(40)]
    trained = Trained(monkeypatch, model, loader, "160KiB", partitioner=Presharded(ends))
    assert trained.report.status == "failed"
    assert isinstance(trained.report.exception, ShardDoesNotFit)


# -- plain values


class Take(nn.Module):
    def forward(self, batch):
        return batch["x"]


VALUES = {
    "names": lambda i, rng: [f"{i}-{k}.jpg" for k in range(4)],
    "lists of names": lambda i, rng: [f"{i}-{k}" for k in range(rng.randint(1, 20))],
    "floats": lambda i, rng: 0.1 * i,
    "numbers below 0": lambda i, rng: -1 - i,
    "nested": lambda i, rng: {"at": (str(i), None, i % 2 == 0)},
}


@pytest.mark.parametrize(
    ("kind", "num_devices"),
    [
        ("names", 2),
        ("nested", 1),
        *(pytest.param(kind, 1, marks=pytest.mark.rest) for kind in ("lists of names", "floats", "numbers below 0")),
    ],
)
def test_values_that_differ_in_every_batch_are_no_new_shapes(monkeypatch, kind, num_devices):
    rng = random.Random(1)
    loader = [({"x": inputs(4, 8), "value": VALUES[kind](i, rng)}, classes(4, 8)) for i in range(30)]
    trained = Trained(monkeypatch, dense(4, Take()), loader, "64KiB", num_devices=num_devices)
    assert not trained.counted
    assert trained.metered_per_unit() < NUM_METERED
    assert trained.num_known <= NUM_METERED


NUMBERS = {
    "counting up": lambda i, rng: i,
    "large ones": lambda i, rng: 10**12 + i,
    "any order": lambda i, rng: rng.randrange(10**6),
    "lists": lambda i, rng: [rng.randint(1, 60) for _ in range(4)],
}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == "lists" else pytest.mark.rest) for kind in NUMBERS]
)
def test_numbers_that_decide_nothing_are_no_sizes(monkeypatch, kind):
    rng = random.Random(1)
    loader = [({"x": inputs(4, 8), "value": NUMBERS[kind](i, rng)}, classes(4, 8)) for i in range(60)]
    trained = Trained(monkeypatch, dense(4, Take()), loader, "64KiB")
    assert trained.metered_per_unit() <= NUM_METERED


class CutTo(nn.Module):
    def forward(self, pair):
        x, length = pair
        return x[:, :length]


class CutFrom(nn.Module):
    def forward(self, pair):
        x, length = pair
        return x[:, length:]


class Room(nn.Module):
    def forward(self, pair):
        x, size = pair
        return x + torch.ones(size).mean()


class OnlyARunTells(nn.Module):
    def forward(self, pair):
        x, length = pair
        return x[: int((x > -1e9).sum().item() > 0) * len(x), :length]


@pytest.mark.parametrize(
    "order", ["rising", *(pytest.param(order, marks=pytest.mark.rest) for order in ("falling", "any"))]
)
@pytest.mark.parametrize("layer", [CutTo, pytest.param(CutFrom, marks=pytest.mark.rest), Room])
def test_a_number_that_cuts_a_tensor_is_a_size(monkeypatch, layer, order):
    widths = {CutTo: lambda n: n, CutFrom: lambda n: 100 - n, Room: lambda n: 100}[layer]
    loader = [((inputs(2, 100), 50 * n if layer is Room else n), classes(2, widths(n))) for n in lengths_of(order, 15)]
    trained = Trained(monkeypatch, dense(3, layer()), loader, "200KiB")
    assert trained.report.status == "finished", trained.report.error


def test_where_only_a_run_tells_numbers_are_metered_a_few_times(monkeypatch):
    rng = random.Random(1)
    loader = [((inputs(2, 30), 30 + rng.randrange(10**6)), classes(2, 30)) for _ in range(40)]
    trained = Trained(monkeypatch, dense(3, OnlyARunTells()), loader, "200KiB")
    assert trained.metered_per_unit() <= NUM_METERED
    assert not trained.counted


class Heads(Layer):
    """A name decides which of two is used."""

    def forward(self, batch):
        x = batch["x"]
        for _ in range(5 if batch["head"] == "deep" else 1):
            x = torch.tanh(self.linear(x))
        return x


def test_a_name_that_decides_which_layers_run_is_metered(monkeypatch):
    names = ["flat"] * 10 + ["deep", "flat"] * 5
    loader = [({"x": inputs(4, 8), "head": name}, classes(4, 8)) for name in names]
    trained = Trained(monkeypatch, dense(2, Heads()), loader, "64KiB")
    assert trained.report.status == "finished", trained.report.error
    assert not trained.counted


# -- batches of other shapes


class Attend(Layer):
    def forward(self, x):
        return torch.softmax(self.linear(x) @ x.transpose(-1, -2), -1) @ x


@pytest.mark.parametrize("options", [{}, {"num_devices": 2, "accumulation_steps": 2}], ids=str)
@pytest.mark.parametrize("order", ["rising", "falling", "any"])
@pytest.mark.rest
def test_units_are_metered_where_a_batch_is_larger_than_all_before(monkeypatch, order, options):
    loader = [(inputs(2, n), classes(2, n)) for n in lengths_of(order, 64)]
    trained = Trained(monkeypatch, dense(2, Attend(), Attend()), loader, "4MiB", **options)
    assert trained.report.status == "finished", trained.report.error
    assert not trained.report.revisions
    assert not trained.spreads
    if not options:
        assert not trained.counted
        assert trained.metered_per_unit() <= {"rising": 63, "falling": NUM_METERED, "any": NUM_METERED + 4}[order]


def test_batch_and_length_that_vary_together_are_bounded(monkeypatch):
    rng = random.Random(1)
    shapes = [(rng.randint(1, 9), rng.randint(10, 60)) for _ in range(40)]
    loader = [(inputs(*shape), classes(*shape)) for shape in shapes]
    trained = Trained(monkeypatch, dense(3), loader, "2MiB")
    assert trained.report.status == "finished", trained.report.error
    assert not trained.counted
    assert trained.metered_per_unit() < NUM_METERED + 15


class Folds(nn.Module):
    """Needs a multiple of 7."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(7 * WIDTH, 7 * WIDTH)

    def forward(self, x):
        return self.linear(x.view(x.shape[0], -1, 7 * WIDTH)).view_as(x)


@pytest.mark.rest
def test_layers_that_need_other_sizes_are_counted_at_their_own(monkeypatch):
    loader = [(inputs(2, n), classes(2, n)) for n in range(42, 98, 7)]
    trained = Trained(monkeypatch, dense(1, Folds()), loader, "4MiB")
    assert trained.report.status == "finished", trained.report.error


class Pads(Layer):
    """Takes more for a length that it has to pad."""

    def forward(self, x):
        length = x.shape[1]
        padded = F.pad(x, (0, 0, 0, -length % 8)) if length % 8 else x
        return torch.tanh(self.linear(padded))[:, :length]


@pytest.mark.parametrize(
    "order", [*(pytest.param(order, marks=pytest.mark.rest) for order in ("rising", "falling")), "any"]
)
def test_a_layer_that_takes_more_at_smaller_sizes_is_metered_at_each(monkeypatch, order):
    loader = [(inputs(2, n), classes(2, n)) for n in lengths_of(order, 30)]
    trained = Trained(monkeypatch, dense(1, Pads(), Pads()), loader, "1MiB")
    assert trained.report.status == "finished", trained.report.error
    assert trained.num_known <= MOST_KNOWN
