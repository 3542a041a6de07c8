"""How large micro-batches that adapt may be: what fits the devices, within what the user allows."""

from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import hydra_engine.run.feeds
from hydra_engine import Callback, EmulatedDevice, ModelTask, ShardDoesNotFit, StepChoice, StopTask
from hydra_engine.adaptive import AdaptiveDataLoader
from partitioners import Presharded
from tests.covering import chosen, covering
from tests.exact import assert_within_budget, silent
from tests.refused import refused

INITIAL, NUM_SAMPLES = 8, 600


def network(width=64):
    """Its middle layer takes most: 16 KiB of weights at a width of 64."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3))


def task_of(most=NUM_SAMPLES, *, model=None, bounds=None, initial=INITIAL, accumulates=True, replay=(), **options):
    generator = torch.Generator().manual_seed(2)
    data = TensorDataset(
        torch.randn(NUM_SAMPLES, 6, generator=generator), torch.randint(3, (NUM_SAMPLES,), generator=generator)
    )
    loader = AdaptiveDataLoader(data, initial, shuffle=True)
    loader.autoscale_batch_size(most, bounds, accumulates, replay=replay)
    return ModelTask(model or network(), F.cross_entropy, loader, 0.01, name="a", seed=3, **options)


class Watched:
    """One run on metered devices, and what its micro-batches were limited to."""

    def __init__(self, task, memory, num_devices=1):
        found = []

        def counted(*args):
            found.append(count(*args))
            return found[-1]

        count = hydra_engine.run.feeds.largest_micro_batch
        devices = [EmulatedDevice(each, meter_every_unit=True) for each in _list(memory, num_devices)]
        orchestra = silent([task], devices=devices)
        with mock.patch("hydra_engine.run.feeds.largest_micro_batch", counted):
            self.report = orchestra.train_models()
        self.report.raise_failures()
        assert_within_budget(self.report, len(devices))
        self.choices = self.report.tasks["a"].adaptive
        self.limit = found[-1] if found else None

    @property
    def peak(self):
        """Share of its memory that the fullest device has used."""
        return max(device.peak_bytes / device.memory_bytes for device in self.report.devices)


class Stops(Callback):
    """Ends the task with its first step."""

    def on_step(self, report):
        raise StopTask


def limit_of(memory, **options):
    return Watched(task_of(callbacks=[Stops()], **options), memory).limit


def _list(memory, num_devices):
    return memory if isinstance(memory, list) else [memory] * num_devices


def of_size(micro_batch, num_steps=4):
    """A record: the initial batch, then steps of two micro-batches of this size."""
    sizes = [INITIAL] + [2 * micro_batch] * num_steps
    return [
        StepChoice(step=k, batch_size=size, micro_batches=2, gain=size / INITIAL, progress=float(sum(sizes[:k])))
        for k, size in enumerate(sizes)
    ]


@pytest.mark.parametrize("partitioner", chosen([None, Presharded([5]), Presharded([1, 2, 3, 4, 5])], [None]), ids=str)
@pytest.mark.parametrize("memory", chosen(["72KiB", "100KiB", "160KiB"], ["100KiB"]))
def test_what_is_counted_to_fit_does_and_fills_the_memory(memory, partitioner):
    if memory == "72KiB" and partitioner is not None and partitioner.boundaries == [5]:
        memory = "80KiB"
    free = Watched(task_of(partitioner=partitioner), memory)
    assert INITIAL // 2 <= free.limit < NUM_SAMPLES
    assert all(each.micro_batch <= free.limit for each in free.choices)
    boundaries = free.report.tasks["a"].revisions
    assert boundaries == []
    most = min(free.limit, 140)  # four steps of a pass
    full = Watched(
        task_of(partitioner=partitioner, replay=of_size(most)[: 1 + (NUM_SAMPLES - INITIAL) // (2 * most)]), memory
    )
    assert full.choices[1].micro_batch == most
    if most == free.limit:
        assert full.peak >= 0.7, "there is room for larger ones"


@pytest.mark.rest
def test_more_memory_is_room_for_larger_micro_batches():
    limits = [limit_of(memory) for memory in ("72KiB", "96KiB", "256KiB")]
    assert limits == sorted(limits)
    assert limits[0] < limits[-1]
    assert limit_of("64MiB") == NUM_SAMPLES


@pytest.mark.rest
def test_the_smallest_device_decides():
    assert limit_of(["256KiB", "96KiB"]) == limit_of("96KiB")


@pytest.mark.rest
@pytest.mark.parametrize(
    ("most", "bounds", "expected"),
    [(100, None, 100), (600, (2, 50), 50), pytest.param(600, (4, 4), 4, marks=pytest.mark.rest), (30, (1, 50), 30)],
    ids=str,
)
def test_it_is_within_what_the_user_allows(most, bounds, expected):
    run = Watched(task_of(most, bounds=bounds), "64MiB")
    assert run.limit == expected
    low = 1 if bounds is None else bounds[0]
    full = [each for each in run.choices if each.batch_size >= INITIAL]
    assert all(low <= each.batch_size // each.micro_batches for each in full)
    assert all(each.micro_batch <= expected and each.batch_size <= most for each in run.choices)


@covering(accumulates=[True, False], num_devices=[1, 2], strength=1)
def test_a_first_batch_that_does_not_fit_is_cut_into_more(num_devices, accumulates):
    """240 samples do not fit in two micro-batches; memory goes before bounds and what the user says of accumulation."""
    task = task_of(initial=240, bounds=(60, 300), accumulates=accumulates)
    run = Watched(task, "96KiB", num_devices)
    assert run.choices[0].batch_size == 240
    assert run.choices[0].micro_batches > 2
    assert all(each.micro_batch < 120 for each in run.choices)
    assert sum(each.batch_size for each in run.choices) >= NUM_SAMPLES


def test_one_sample_that_does_not_fit_is_an_error():
    task = task_of(model=network(256))
    with refused(ShardDoesNotFit, task="a", layer="layer"):
        Watched(task, "600KiB")


def test_a_record_that_does_not_fit_says_that_it_is_fixed():
    choices = of_size(100, num_steps=2)
    with refused(ShardDoesNotFit, task="a", says="replay="):
        Watched(task_of(replay=choices), "80KiB")


class OnlyARunTells(nn.Module):
    """Takes memory by the values of its input."""

    def forward(self, x):
        with torch.no_grad():
            number = int(x.new_ones(len(x)).sum().item())
        return x * torch.ones(number, 16).mean()


def test_where_only_a_run_tells_micro_batches_may_be_eight_times_the_first():
    model = network()
    model[1] = OnlyARunTells()
    run = Watched(task_of(model=model), "128KiB")
    assert run.limit == 8 * INITIAL // 2
    assert all(each.micro_batch <= 8 * INITIAL // 2 for each in run.choices)


@pytest.mark.rest
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"optimizer": torch.optim.AdamW, "early_release": True}, marks=pytest.mark.rest),
        pytest.param({"precision": "bfloat16"}, marks=pytest.mark.rest),
        pytest.param(
            {"optimizer": partial(torch.optim.SGD, momentum=0.9), "max_grad_norm": 1.0}, marks=pytest.mark.rest
        ),
        {"validation": [(torch.zeros(9, 6), torch.zeros(9, dtype=torch.long))]},
    ],
    ids=str,
)
def test_other_ways_to_train_keep_to_the_memory(options):
    run = Watched(task_of(**options), "160KiB", 2)
    assert run.limit > INITIAL
    choices = of_size(min(run.limit, 140))
    number = 1 + (NUM_SAMPLES - INITIAL) // choices[1].batch_size
    full = Watched(task_of(replay=choices[:number], **options), "160KiB", 2)
    assert full.choices[1].micro_batch == min(run.limit, 140)
    assert full.report.tasks["a"].revisions == []
