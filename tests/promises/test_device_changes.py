"""Devices come, go and fail while tasks train; `python -m tests.device_changes` makes more of it."""

import threading

import pytest
import torch
from torch import nn

from hydra_engine import Callback, EmulatedDevice, ModelOrchestrator, ModelTask
from hydra_engine.errors import DeviceFailed
from hydra_engine.run.workers import Workers
from tests import device_changes, reference
from tests.refused import names, refused


def test_devices_that_come_and_go_change_no_bit_and_no_step_is_begun_again():
    device_changes.run_changes(45, seed=0)


def test_units_that_are_given_up_are_computed_elsewhere():
    device_changes.run_changes(36, seed=1, graces=(None, 0, 0.001))


@pytest.mark.parametrize("seed", [0, *(pytest.param(k, marks=pytest.mark.rest) for k in (1, 2, 3))])
def test_device_that_fails_costs_what_it_has_in_hand(seed):
    device_changes.run_failure(seed)


@pytest.mark.parametrize("seed", [0, *(pytest.param(k, marks=pytest.mark.rest) for k in (1, 2))])
def test_one_failure_too_many_ends_the_run_and_a_resume_has_its_bits(seed):
    device_changes.run_too_many(seed)


def test_homes_move_as_devices_come_and_go():
    device_changes.run_changes(36, seed=2, graces=(None, 0, 0.001), homes="device")


@pytest.mark.parametrize("seed", range(6, 10))
def test_tasks_go_back_where_a_device_fails_that_has_homes(seed):
    device_changes.run_lost(seed)


class Told(Callback):
    """Calls a function at a step."""

    def __init__(self, job, at=1):
        self.job, self.at, self.result = job, at, None

    def __deepcopy__(self, memo):
        return self

    def on_step(self, report):
        if report.steps == self.at:
            self.result = self.job()


def make_task(job=None, *, num_steps=4, **options):
    torch.manual_seed(0)
    callbacks = [] if job is None else [Told(job)]
    return ModelTask(
        nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)),
        nn.MSELoss(),
        [(torch.ones(4, 4) * k, torch.ones(4, 2)) for k in range(num_steps)],
        callbacks=callbacks,
        **options,
    )


def orchestra_of(*tasks, devices=None, **options):
    devices = [EmulatedDevice("1MiB")] if devices is None else devices
    orchestra = ModelOrchestrator(tasks, devices=devices, **options)
    orchestra.verbose = 0
    return orchestra


def trained(job, **options):
    """Train a task whose callback calls `job(orchestra)`; returns the orchestrator and what the job returned."""
    found = []
    orchestra = orchestra_of(make_task(lambda: found.append(job(orchestra))), **options)
    report = orchestra.train_models()
    report.raise_failures()
    assert found, "the callback was called"
    return orchestra, found[0]


def refusal(call):
    with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
        call()
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"min_devices": 0}, "min_devices 0"),
        ({"min_devices": True}, "min_devices True"),
        ({"max_devices": 0}, "max_devices 0"),
        ({"max_devices": 1.5}, "max_devices 1.5"),
        ({"max_failures": -1}, "max_failures -1"),
        ({"min_devices": 3, "max_devices": 2}, "min_devices 3 max_devices=2"),
        ({"max_devices": 1, "devices": [EmulatedDevice(), EmulatedDevice()]}, "max_devices 1 2"),
    ],
)
def test_limits_are_checked_before_anything_else(options, words):
    with refused(says=words):
        ModelOrchestrator([make_task()], **({"devices": [EmulatedDevice()]} | options))


def test_what_cannot_be_added_or_removed_is_refused_and_disturbs_nothing():
    first = EmulatedDevice("1MiB")

    def job(orchestra):
        return [
            refusal(lambda: orchestra.add_device(first)),
            refusal(lambda: orchestra.add_device("emulated:0")),
            refusal(lambda: orchestra.add_device("emulated:7")),
            refusal(lambda: orchestra.add_device(7)),
            refusal(lambda: orchestra.add_device(EmulatedDevice(64))),
            refusal(lambda: orchestra.remove_device("emulated:1")),
            refusal(lambda: orchestra.remove_device("emulated:0", grace_s=-1)),
            refusal(lambda: orchestra.remove_device("emulated:0", grace_s=float("nan"))),
            orchestra.add_device(EmulatedDevice("1MiB")),
            refusal(lambda: orchestra.add_device(EmulatedDevice("1MiB"))),
        ]

    orchestra, found = trained(job, devices=[first], max_devices=2)
    *errors, name, full = found
    most = f"{threading.TIMEOUT_MAX:g}"
    for error, kind, words in zip(
        [*errors, full],
        (ValueError, ValueError, ValueError, TypeError, *[ValueError] * 5),
        (
            *["add_device 'emulated:0'"] * 2,
            "devices 'emulated:7'",
            "",
            "64 bytes",
            "remove_device 'emulated:1' 'emulated:0'",
            f"grace_s -1 {most}",
            f"grace_s nan {most}",
            "add_device 2 max_devices=2",
        ),
        strict=True,
    ):
        assert isinstance(error, kind)
        names(error, says=words)
    assert name == "emulated:1"
    assert orchestra.devices == {"emulated:0": "in", "emulated:1": "in"}


def test_below_the_minimum_nothing_begins_until_a_device_is_added(capsys):
    """Another thread brings the last device back; the task's own callback waits for nothing."""
    has_gone, threads = threading.Event(), []

    def bring_back(orchestra):
        has_gone.wait()
        orchestra.add_device("emulated:0")

    def job(orchestra):
        threads.append(threading.Thread(target=bring_back, args=(orchestra,)))
        threads[0].start()
        orchestra.remove_device("emulated:0")
        has_gone.set()

    orchestra, _ = trained(job)
    threads[0].join()
    assert orchestra.report.tasks["task-0"].steps == 4
    names(capsys.readouterr().err, says="0 min_devices=1")
    assert len(orchestra.report.devices) == 1


def test_a_run_begins_paused_where_too_few_devices_are_in():
    orchestra = orchestra_of(make_task(), min_devices=2)
    orchestra.generate()
    adds = threading.Thread(target=lambda: orchestra.add_device(EmulatedDevice("1MiB")))
    adds.start()
    assert orchestra.train_models().tasks["task-0"].status == "finished"
    adds.join()


def test_devices_change_between_runs_too():
    orchestra = orchestra_of(make_task())
    assert len(orchestra.generate().devices) == 1
    assert orchestra.add_device(EmulatedDevice("2MiB")) == "emulated:1"
    assert orchestra.plan is None, "it is planned for other devices"
    orchestra.remove_device("emulated:0")
    assert orchestra.devices == {"emulated:0": "out", "emulated:1": "in"}
    report = orchestra.train_models()
    assert [device.name for device in report.devices] == ["emulated:1"]
    orchestra.remove_device("emulated:1")
    orchestra.add_task(make_task())
    with refused(RuntimeError, says="devices"):
        orchestra.train_models()
    orchestra.add_device("emulated:0")
    assert orchestra.train_models().tasks["task-1"].status == "finished"


def test_one_object_may_be_several_devices():
    device = EmulatedDevice("1MiB")
    orchestra = ModelOrchestrator([make_task()], devices=[device] * 2)
    orchestra.remove_device("emulated:1")
    assert orchestra.add_device("emulated:1") == "emulated:1"
    orchestra.remove_device("emulated:0")
    assert orchestra.add_device(device) == "emulated:0"
    names(refusal(lambda: orchestra.add_device(device)), says="add_device 'emulated:0'")


def test_a_device_that_comes_while_a_run_is_planned_is_opened_once(monkeypatch):
    """It waits until the plan is made, and is let into the run."""
    opened, threads = [], []
    open_device = Workers._opened

    def counted(workers, index, *others):
        opened.append(index)
        return open_device(workers, index, *others)

    class Batches(list):
        def __iter__(self):
            if not threads:
                threads.append(threading.Thread(target=orchestra.add_device, args=(EmulatedDevice(),)))
                threads[0].start()
            return super().__iter__()

    monkeypatch.setattr(Workers, "_opened", counted)
    task = make_task(lambda: threads[0].join(), num_steps=6)
    task.dataloader = Batches(task.dataloader)
    orchestra = orchestra_of(task, devices=[EmulatedDevice()])
    report = orchestra.train_models()
    assert sorted(opened) == [0, 1]  # the run opens the first one while another thread adds the second
    assert report.tasks["task-0"].steps == 6


def test_who_plans_changes_no_devices():
    """A loader that is read by `train_models` itself would wait for itself, or take the devices away under the plan."""
    found = []

    class Batches(list):
        def __iter__(self):
            if not found:
                found.append(refusal(lambda: orchestra.remove_device("emulated:0")))
                found.append(refusal(lambda: orchestra.add_device(EmulatedDevice())))
            return super().__iter__()

    task = make_task()
    task.dataloader = Batches(task.dataloader)
    orchestra = orchestra_of(task)
    orchestra.train_models().raise_failures()
    assert [str(each).partition(":")[0] for each in found] == ["remove_device", "add_device"]


def test_an_evaluation_without_a_device_ends(tmp_path):
    """Nobody can let a device into it, so it waits for none."""
    task = make_task()
    devices = [device_changes.Failing(device_changes.Fuse([2]).burns)]
    orchestra = orchestra_of(task, devices=devices, max_failures=5, checkpoint_dir=tmp_path)
    with refused(DeviceFailed, says="emulated:0 lane"):
        orchestra.evaluate(task, task.dataloader)
    assert orchestra.devices == {"emulated:0": "out"}


def test_a_device_that_comes_back_goes_on_with_its_figures():
    def job(orchestra):
        orchestra.add_device(EmulatedDevice("1MiB"))
        orchestra.remove_device("emulated:0")
        orchestra.add_device("emulated:0")
        orchestra.remove_device("emulated:1")

    orchestra, _ = trained(job)
    names = [device.name for device in orchestra.report.devices]
    assert names == ["emulated:0", "emulated:1"]
    assert orchestra.devices == {"emulated:0": "in", "emulated:1": "out"}
    assert len(orchestra.report.schedule) == 4


def test_a_step_is_spread_over_a_device_that_came(monkeypatch):
    """Steps of a task with four micro-batches, which began on one device."""
    monkeypatch.setattr("hydra_engine.planning.planned.predict_spreads", predicted_twice_as_fast)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    data = [(torch.ones(8, 4) * k, torch.ones(8, 2)) for k in range(30)]
    alone = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    alone.load_state_dict(model.state_dict())
    told = Told(lambda: orchestra.add_device(EmulatedDevice("1MiB")))
    task = ModelTask(model, nn.MSELoss(), data, accumulation_steps=4, lr=0.1, callbacks=[told], seed=3)
    orchestra = orchestra_of(task)
    report = orchestra.train_models()
    result = reference.train(alone, nn.MSELoss(), data, seed=3, lr=0.1, accumulation_steps=4)
    assert report.tasks["task-0"].losses == result.losses
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), alone.parameters(), strict=True))
    assert {placed.unit.part for placed in report.schedule} == {0, 1}


def predicted_twice_as_fast(cost, devices, **_):
    from hydra_engine.schedule import Spread

    return tuple(Spread(1.0 + k, in_sums=False) for k in range(min(cost.num_micro_batches, len(devices))))


def test_a_failure_of_the_only_device_ends_the_run_with_its_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where the last commits are saved
    orchestra = orchestra_of(make_task(), devices=[device_changes.Failing(device_changes.Fuse([9]).burns)])
    with refused(DeviceFailed, says="emulated:0 lane max_failures=0"):
        orchestra.train_models()
    assert orchestra.devices == {"emulated:0": "out"}
    assert orchestra.report.tasks["task-0"].status not in ("finished", "failed")
    assert len(orchestra.report.messages) >= 1


def test_a_layer_may_not_add_a_device():
    class Adds(nn.Linear):
        def forward(self, x):
            if orchestras and orchestras[0].report is None and self.training:
                found.append(refusal(lambda: orchestras[0].add_device(EmulatedDevice("1MiB"))))
            return super().forward(x)

    orchestras, found = [], []
    task = ModelTask(nn.Sequential(Adds(4, 2)), nn.MSELoss(), [(torch.ones(2, 4), torch.ones(2, 2))])
    orchestra = orchestra_of(task)
    orchestra.generate()
    orchestras.append(orchestra)
    orchestra.train_models().raise_failures()
    assert isinstance(found[0], RuntimeError)
    names(found[0], says="add_device layer loss")


def test_an_evaluation_whose_devices_went_as_it_was_planned_is_refused():
    class Batches(list):
        def __iter__(self):
            if orchestra.devices == {"emulated:0": "in"}:
                orchestra.remove_device("emulated:0")
            return super().__iter__()

    task = make_task()
    orchestra = orchestra_of(task)
    with refused(RuntimeError, says="devices"):
        orchestra.evaluate(task, Batches(task.dataloader))


def test_a_device_that_leaves_may_be_given_less_time():
    """A layer stands still on its device until the step that it belongs to was computed on the other one."""
    is_on, goes_on = threading.Event(), threading.Event()
    stands = []

    class Stands(nn.Linear):
        def forward(self, x):
            if stands and threading.current_thread().name == stands[0]:
                stands.clear()
                is_on.set()
                assert goes_on.wait(60)
            return super().forward(x)

    def remove():
        assert is_on.wait(60)
        orchestra.remove_device("emulated:0")
        orchestra.remove_device("emulated:0", grace_s=0)

    torch.manual_seed(0)
    model = nn.Sequential(Stands(4, 2))
    alone = nn.Sequential(nn.Linear(4, 2))
    alone.load_state_dict(model.state_dict())
    data = [(torch.ones(4, 4) * k, torch.ones(4, 2)) for k in range(4)]
    goes = Told(goes_on.set, at=4)
    task = ModelTask(model, nn.MSELoss(), data, seed=0, lr=0.1, callbacks=[goes])
    orchestra = orchestra_of(task, devices=[EmulatedDevice("1MiB"), EmulatedDevice("1MiB")])
    orchestra.generate()
    stands.append("emulated:0-compute")
    thread = threading.Thread(target=remove)
    thread.start()
    report = orchestra.train_models()
    thread.join()
    assert report.tasks["task-0"].losses == reference.train(alone, nn.MSELoss(), data, seed=0, lr=0.1).losses
    assert {placed.device for placed in report.schedule} == {1}
    assert orchestra.devices == {"emulated:0": "out", "emulated:1": "in"}
