"""Adaptive loaders in tasks: what a user may do with them beside training one task to its end."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from hydra_engine import EmulatedDevice, ModelOrchestrator, ModelTask, StepReport
from hydra_engine.adaptive import Adaptation, AdaptiveDataLoader, Autoscale
from hydra_engine.tasks import split
from tests.run.test_loggers import Recorder

FEATURES, CLASSES = 6, 3


def samples(number=48, seed=0):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(number, FEATURES, generator=generator)
    return TensorDataset(inputs, torch.randint(CLASSES, (number,), generator=generator))


def loader(data=None, batch_size=6, most=24, *, replay=(), **options):
    found = AdaptiveDataLoader(samples() if data is None else data, batch_size, **options)
    if most:
        found.autoscale_batch_size(most, replay=replay)
    return found


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, CLASSES))


def task(data, **options):
    return ModelTask(model(), F.cross_entropy, data, **{"lr": 0.1, "name": "t", "seed": 1, **options})


def trained(*tasks, memory="4MiB", **options):
    orchestra = ModelOrchestrator(list(tasks), devices=[EmulatedDevice(memory)], **options)
    orchestra.verbose = 0
    report = orchestra.train_models()
    report.raise_failures()
    return report.tasks


def test_validations_through_one_loader_are_those_of_torchs():
    def validated(validation):
        tasks = [task(loader(most=None), name=name, epochs=2, validation=validation) for name in "ab"]
        return [each.validation_losses for each in trained(*tasks).values()]

    data = samples(20, seed=1)
    assert validated(loader(data, most=None)) == validated(DataLoader(data, batch_size=6))


@pytest.mark.rest
def test_a_step_may_be_worth_more_than_an_epoch_of_whole_batches():
    data = loader(samples(59), batch_size=30, most=59, drop_last=True)
    found = trained(task(data, epochs=40))["t"]
    assert found.status == "finished"


@pytest.mark.rest
def test_a_task_begins_a_pass_wherever_the_loader_was_left():
    data = loader(most=None, shuffle=True)
    fresh = trained(task(data, epochs=2))["t"].losses
    next(iter(data))
    assert trained(task(data, epochs=2))["t"].losses == fresh
    planned = ModelOrchestrator([task(data, epochs=2)], devices=[EmulatedDevice("4MiB")])
    planned.verbose = 0
    planned.generate()
    assert trained(task(data, epochs=2))["t"].losses == fresh


def test_a_resume_with_a_larger_maximum_has_room():
    small, large = (Adaptation(Autoscale(max_batch_size=most), 6) for most in (12, 48))
    large.load_state_dict(small.state_dict())
    assert large.bounds[1] == 48


def test_time_comes_first_and_samples_second():
    """The loader knows how many samples it has given, whatever their tensors look like."""

    def collate(rows):
        inputs, targets = zip(*rows, strict=True)
        return torch.stack(inputs, dim=1), torch.stack(targets)  # features, samples

    def along_samples(inputs, target, number):
        pieces = split(inputs.T.contiguous(), target, number)
        return [(x.T.contiguous(), y, weight) for x, y, weight in pieces]

    class Turn(nn.Module):
        def forward(self, x):
            return x.T.contiguous()

    data = loader(collate_fn=collate)
    turned = ModelTask(
        nn.Sequential(Turn(), *model()), F.cross_entropy, data, lr=0.1, name="t", seed=1, epochs=3, split=along_samples
    )
    found = trained(turned)["t"].adaptive
    plain = trained(task(loader(replay=found), epochs=3))["t"]
    assert [each.batch_size for each in plain.adaptive] == [each.batch_size for each in found]
    assert len(plain.losses) == len(found)


@pytest.mark.rest
def test_an_optimizer_may_leave_parameters_out():
    def some(parameters, lr):
        return torch.optim.SGD([each for each in parameters if each.dim() > 1], lr=lr)

    found = trained(task(loader(), optimizer=some, epochs=2))["t"]
    assert found.status == "finished"
    assert found.adaptive[-1].noise is not None


def test_dram_bounds_batches():
    data = loader(samples(4096), most=4096)
    found = trained(task(data, epochs=3), dram="40KiB")["t"].adaptive
    assert max(each.batch_size for each in found) < 4096


@pytest.mark.parametrize("most", [None, 24])
def test_what_is_led_by_nobody_stays_so_after_a_run(most):
    data = loader(most=most)
    trained(task(data))
    assert data.guide is None
    assert data.cut is None


def test_a_loss_that_looks_at_its_value_leaves_micro_batches_room():
    def watched(output, target):
        loss = F.cross_entropy(output, target)
        if float(loss.detach()) > 1e9:
            raise RuntimeError("diverged")
        return loss

    data = loader(samples(400), batch_size=8, most=400)
    found = trained(ModelTask(model(), watched, data, lr=0.1, name="t", seed=1, epochs=4), memory="64MiB")["t"].adaptive
    assert all(each.micro_batches <= 400 // 32 + 1 for each in found)


def test_min_devices_hold_from_the_first_step():
    steps = ModelOrchestrator([task(loader(), min_devices=2)], devices=[EmulatedDevice("4MiB") for _ in range(2)])
    steps.verbose = 0
    steps.train_models().raise_failures()
    assert {each.devices for each in steps.report.tasks["t"].adaptive[1:]} == {2}


@pytest.mark.parametrize("bounds", [None, (4, 16)])
def test_steps_have_the_norm_that_is_measured(bounds):
    found = []
    for limit in (None, 1e6):  # which clips nothing, and computes the norm
        data, recorder = loader(batch_size=10, most=None), Recorder()
        if bounds:
            data.autoscale_batch_size(20, local_bsz_bounds=bounds)
        trained(task(data, max_grad_norm=limit), loggers=[recorder])
        found.append(recorder.of(StepReport)[0].grad_norm)
    measured, computed = found
    assert measured == (pytest.approx(computed, rel=1e-5) if bounds else None)
