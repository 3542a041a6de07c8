"""Shards at home on devices: the bits of the plain loop, wherever the state of a layer is and whatever moves it."""

import faulthandler
import signal
import threading
import weakref
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from hydra_engine import Callback, EmulatedDevice, ModelTask, PauseTask, StopTask
from hydra_engine.errors import DeviceFailed
from hydra_engine.host import Home, TaskOptimizer, Wanted, share_out
from hydra_engine.run.task_list import Site
from partitioners import Fastest, Presharded
from tests import exact, reference, zoo
from tests.device_changes import Failing, Fuse
from tests.promises.test_resumed import Boom, saved_of
from tests.refused import names

HANG_S = 30
SEED, LR, STEPS, EPOCHS = 7, 0.01, 3, 3  # steps of an epoch
NUM_STEPS = STEPS * EPOCHS
ENDS = [2, 4, 6, 7, 8]
HALF = 4  # layers


@pytest.fixture(autouse=True)
def _told_where_it_hangs(_nothing_left_behind, request):
    faulthandler.dump_traceback_later(HANG_S, exit=True, file=request.config.stderr_of_the_terminal)


def model():
    with torch.random.fork_rng():
        torch.manual_seed(3)
        layers = [nn.Linear(6, 16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, 16), nn.ReLU(), nn.BatchNorm1d(16)]
        return nn.Sequential(*layers, nn.Linear(16, 8), nn.Linear(8, 3))


def batches(num=STEPS, seed=1, size=6):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(size, 6, generator=generator), torch.randn(size, 3, generator=generator)) for _ in range(num)]


adamw = partial(torch.optim.AdamW, weight_decay=0.1)


# More than seven parameters: each is another one's.
def task_of(homes="device", *, name="task", epochs=EPOCHS, data=None, callbacks=(), ends=ENDS, net=None, **options):
    options = {"optimizer": adamw, "seed": SEED, "homes": homes, **options}
    data = batches() if data is None else data
    options.setdefault("partitioner", Presharded(list(ends)))
    net = model() if net is None else net
    return ModelTask(net, F.mse_loss, data, LR, epochs, name=name, callbacks=list(callbacks), **options)


def devices_of(number=1, memory="1MiB", *, chaos=None, has_arena=False):
    seeds = [None if chaos is None else chaos + k for k in range(number)]
    return [EmulatedDevice(memory, chaos=seed, meter_every_unit=True, has_arena=has_arena) for seed in seeds]


def orchestra_of(*tasks, devices=None, directory=None, every=1, **options):
    devices = devices_of() if devices is None else devices
    return exact.silent(tasks, devices=devices, checkpoint_dir=directory, checkpoint_every=every, **options)


def train(orchestra, **options):
    """Train to the end; the report, of devices that were within their memory."""
    report = orchestra.train_models(**options)
    report.raise_failures()
    exact.assert_within_budget(report, len(report.devices))
    return report


def plain(num_steps=None, *, epochs=EPOCHS, data=None, job=lambda: None, **options):
    """The model of plain PyTorch after so many steps, with `job` after each, and its result."""
    own = model()
    options = {"optimizer": adamw, "on_step": job, "max_steps": num_steps, **options}
    data = batches() if data is None else data
    return own, reference.train(own, F.mse_loss, data, seed=SEED, lr=LR, epochs=epochs, **options)


def assert_is_plain(task, report, num_steps=None, **options):
    own, result = plain(num_steps, **options)
    found = report.tasks[task.name]
    assert found.losses[: len(result.losses)] == result.losses
    exact.assert_same_state(zoo.state(task.model), zoo.state(own))


def homed(report):
    return [device.homed_bytes for device in report.devices]


class Calls(Callback):
    """Calls jobs at steps of its task."""

    def __init__(self, jobs):
        self.jobs = dict(jobs)

    def __deepcopy__(self, memo):
        return self

    def on_step(self, report):
        self.jobs.pop(report.steps, lambda: None)()


def raises(error):
    def job():
        raise error

    return job


# -- who gets which room


def wanted(task, *homes, slab=4, frozen=0, work=5, device=None, shards=None):
    """A task that asks for homes of these sizes."""
    shards = tuple(range(len(homes))) if shards is None else shards
    number = max(shards, default=0) + 1
    return Wanted(task, shards, homes, (slab,) * number, (frozen,) * number, work, device)


def test_tasks_take_turns_and_the_lowest_shards_come_first():
    two = [wanted("a", 10, 10, 10), wanted("b", 10, 10, 10)]
    assert share_out(two, {0: 5 + 2 * 4 + 39}) == {"a": {0: 0, 1: 0}, "b": {0: 0}}


def test_tasks_have_devices_of_their_own_and_stay_where_they_are():
    two = [wanted("a", 10, 10), wanted("b", 10, 10)]
    found = share_out(two, {0: 100, 1: 100})
    assert [set(found[task].values()) for task in "ab"] in ([{0}, {1}], [{1}, {0}])
    assert share_out([wanted("a", 10, 10, device=1)], {0: 1000, 1: 100}) == {"a": {0: 1, 1: 1}}
    assert share_out([wanted("a", 10, 10, device=1)], {0: 1000}) == {"a": {0: 0, 1: 0}}, "it has gone"


def test_a_model_that_is_larger_than_a_device_goes_on_on_another_one():
    found = share_out([wanted("a", *[10] * 4)], {0: 5 + 25, 1: 5 + 25})["a"]
    assert sorted(found) == [0, 1, 2, 3]
    assert sorted(found.values()) == [0, 0, 1, 1]
    assert found[0] == found[1]


def test_room_is_left_for_the_largest_unit_and_two_slabs_of_what_is_loaded():
    assert len(share_out([wanted("a", 10, 10)], {0: 20 + 5})["a"]) == 2, "where all have homes, nothing is loaded"
    assert share_out([wanted("a", 10, 10)], {0: 20 + 4})["a"] == {0: 0}, "10 + 5 + 2 * 4"
    assert share_out([wanted("a", 10, 10)], {0: 10 + 5 + 7})["a"] == {}
    assert len(share_out([wanted("a", 10, 10, frozen=2)], {0: 20 + 5 + 4})["a"]) == 2
    assert len(share_out([wanted("a", 10, 10, frozen=2)], {0: 20 + 5 + 3})["a"]) == 1
    other = wanted("b", work=50, slab=9, shards=(0,))._replace(shards=(), slab_bytes=(9,), frozen_bytes=(0,))
    assert share_out([wanted("a", 10, 10), other], {0: 50 + 18 + 19}) == {"a": {0: 0}, "b": {}}


def test_without_a_device_nothing_has_a_home():
    assert share_out([], {0: 100}) == {}
    assert share_out([wanted("a", 10), wanted("b")], {}) == {"a": {}, "b": {}}


# -- bits


def halving(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


CASES = {
    "AdamW": {},
    "Adam": {"optimizer": partial(torch.optim.Adam, amsgrad=True, weight_decay=0.1)},
    "SGD": {"optimizer": torch.optim.SGD},
    "momentum": {"optimizer": partial(torch.optim.SGD, momentum=0.9, nesterov=True)},
    "bfloat16": {"precision": "bfloat16", "split_weights": False},
    "split": {"precision": "bfloat16", "split_weights": True, "max_grad_norm": 0.1},
    "float16": {"precision": "float16", "grad_scaler": {"growth_interval": 2}, "max_grad_norm": 0.1},
    "all skipped": {"precision": "float16", "grad_scaler": {"init_scale": 2.0**40}},
    "clipped": {"max_grad_norm": 0.1},
    "micro-batches": {"accumulation_steps": 3},
    "micro-batches, split": {"accumulation_steps": 3, "precision": "bfloat16", "split_weights": True},
    "schedule": {"lr_scheduler": halving, "optimizer": torch.optim.SGD},
    "schedule by epoch": {"lr_scheduler": halving, "lr_scheduler_interval": "epoch"},
}


def of_case(case):
    """Options of a task, and of the plain loop."""
    options = dict(CASES[case])
    if "grad_scaler" in options:
        options["grad_scaler"] = torch.amp.GradScaler("cpu", **options["grad_scaler"])
    return options, {name: value for name, value in options.items() if name != "split_weights"}


@pytest.mark.parametrize("case", CASES)
def test_homes_change_no_bit(case):
    for homes, devices in (("device", devices_of(chaos=2)), (HALF, devices_of(chaos=1, has_arena=True))):
        task = task_of(homes, **of_case(case)[0])
        report = train(orchestra_of(task, devices=devices))
        assert_is_plain(task, report, **of_case(case)[1])
        assert homed(report) > [0], f"homes={homes}, {devices}"


def test_homes_that_are_chosen_change_no_bit():
    """Over a link of 100 KB a second, which takes longer than all else."""
    for number, memory in ((1, "1MiB"), (2, "16KiB")):
        devices = [EmulatedDevice(memory, bandwidth=100_000) for _ in range(number)]
        task = task_of("auto", partitioner=Fastest(), epochs=1)
        report = train(orchestra_of(task, devices=devices))
        assert_is_plain(task, report, epochs=1)
        assert max(homed(report)) > 0


def test_moments_in_bfloat16_are_as_on_the_host():
    options = {"precision": "bfloat16", "moments": "bfloat16"}
    task, other = task_of(**options), task_of("host", **options)
    report = train(orchestra_of(task))
    assert report.tasks["task"].losses == train(orchestra_of(other)).tasks["task"].losses
    exact.assert_same_state(zoo.state(task.model), zoo.state(other.model))
    assert homed(report) > [0]


def test_weights_of_several_shards_stay_in_dram():
    task, tied = exact.task_of("tied", optimizer="adamw", partition="one", homes="all")
    report = exact.run([task])
    exact.assert_as_expected(report, "tied", tied, exact.expected("tied", optimizer="adamw"))
    assert homed(report) > [0], "no other shard has them"
    task, tied = exact.task_of("tied", optimizer="adamw", partition="each", homes="all")
    ends = exact.run([task])
    exact.assert_as_expected(ends, "tied", tied, exact.expected("tied", optimizer="adamw"))
    assert 0 < homed(ends)[0] < homed(report)[0]


def test_what_is_at_home_is_loaded_once():
    """A step still loads its batch."""

    def loaded(homes, epochs):
        return train(orchestra_of(task_of(homes, epochs=epochs, ends=[8]))).devices[0].loaded_bytes

    weights = sum(each.nbytes for each in model().parameters())
    steps = {homes: loaded(homes, 3) - loaded(homes, 1) for homes in ("device", "host")}
    assert steps["host"] - steps["device"] >= 2 * STEPS * weights
    assert steps["device"] < 2 * STEPS * weights / 2


class Alive(Callback):
    """Counts gradients that are still in memory once a step's updates are through."""

    def __init__(self, gradients):
        self.gradients, self.counts = gradients, set()

    def __deepcopy__(self, memo):
        return self

    def on_step(self, report):
        self.counts.add(sum(each() is not None for each in self.gradients))


@pytest.mark.parametrize("has_arena", [False, True])
def test_gradients_stay_where_they_are_until_their_update_but_for_an_arena(monkeypatch, has_arena):
    stay, gradients, put = set(), [], Home.put_gradient

    def noted(home, index, gradient, **options):
        put(home, index, gradient, **options)
        places = home._pool.gradients.places
        stay.add(places[index].data_ptr() == gradient.data_ptr())
        gradients.append(weakref.ref(gradient))

    monkeypatch.setattr(Home, "put_gradient", noted)
    alive = Alive(gradients)
    task = task_of(callbacks=[alive])
    assert_is_plain(task, train(orchestra_of(task, devices=devices_of(has_arena=has_arena))))
    assert stay == {not has_arena}
    assert alive.counts == {0}


@pytest.mark.parametrize("max_grad_norm", [None, 0.05])
def test_an_update_that_is_tried_again_begins_with_the_same_gradients(monkeypatch, max_grad_norm):
    update, calls = TaskOptimizer.update, []

    def raises_at_the_end(owner, *arguments):
        update(owner, *arguments)
        calls.append(None)
        if len(calls) == 7:
            raise Boom

    monkeypatch.setattr(TaskOptimizer, "update", raises_at_the_end)
    task = task_of(max_grad_norm=max_grad_norm, max_retries=1)
    report = train(orchestra_of(task))
    assert_is_plain(task, report, max_grad_norm=max_grad_norm)
    [retry] = report.tasks["task"].retries
    assert retry.where.startswith("its optimizer, shard ")
    assert homed(report) > [0]


# -- callbacks


def clamps(net, step, _):
    with torch.no_grad():
        for each in net.parameters():
            each.clamp_(-0.2, 0.2)


def changes_one(net, step, _):
    if step == 4:
        with torch.no_grad():
            net[3].weight.mul_(0.5)
            net[7].bias.detach().numpy()[:] = 1.0


def reads(net, step, seen):
    seen.append({name: value.clone() for name, value in net.state_dict().items()})


def computes(net, step, seen):
    net.eval()
    with torch.no_grad():
        seen.append({"output": net(torch.ones(2, 6))})
    net.train()


def swaps(net, step, _):
    if step in (2, 5):
        net.load_state_dict({k: v * 0.5 if v.is_floating_point() else v for k, v in net.state_dict().items()})


def replaces(net, step, _):
    if step == 4:
        for each in net.parameters():
            each.data = each.data * 0.5


def hooks(net, step, _):
    if step == 3:
        net[3].weight.register_hook(lambda gradient: gradient * 0.5)


def freezes(net, step, _):
    if step in (2, 6):
        net[3].requires_grad_(step == 6)
        net[0].weight.requires_grad_(step == 6)


class Does(Callback):
    def __init__(self, job, net):
        self.job, self.net, self.seen = job, net, []

    def __deepcopy__(self, memo):
        return self

    def on_step(self, report):
        self.job(self.net(), report.steps, self.seen)


def calling(job, homes, **options):
    """Train with a job at each step; its report, the task, and what the job has seen."""
    does = Does(job, lambda: task.model.source)
    task = task_of(homes, callbacks=[does], **options)
    return train(orchestra_of(task, devices=devices_of(chaos=2))), task, does.seen


def assert_same_seen(seen, expected):
    assert len(seen) == len(expected)
    for mine, theirs in zip(seen, expected, strict=True):
        exact.assert_same_state(mine, theirs)


@pytest.mark.parametrize("job", [clamps, changes_one, reads, computes, swaps, replaces, hooks, freezes])
def test_callbacks_have_the_model_as_in_the_plain_loop(job):
    report, task, seen = calling(job, "device")
    own, expected, losses = model(), [], []
    step = lambda: losses.append(0) or job(own, len(losses), expected)  # noqa: E731
    result = reference.train(own, F.mse_loss, batches(), seed=SEED, lr=LR, epochs=EPOCHS, optimizer=adamw, on_step=step)
    assert report.tasks["task"].losses == result.losses
    exact.assert_same_state(zoo.state(task.model), zoo.state(own))
    assert_same_seen(seen, expected)
    assert homed(report) > [0]


@pytest.mark.parametrize("job", [changes_one, reads, swaps, hooks, freezes])
def test_callbacks_have_split_weights_as_from_the_host(job):
    options = {"precision": "bfloat16", "split_weights": True}
    report, task, seen = calling(job, HALF, **options)
    other, host, expected = calling(job, "host", **options)
    assert report.tasks["task"].losses == other.tasks["task"].losses
    exact.assert_same_state(zoo.state(task.model), zoo.state(host.model))
    assert_same_seen(seen, expected)


def test_callbacks_that_do_not_read_the_model_change_nothing():
    calls = Calls({})
    calls.reads_model = False
    task = task_of(callbacks=[calls])
    assert_is_plain(task, train(orchestra_of(task, devices=devices_of(chaos=1))))


# -- validation, the best weights, and what comes after


class Scaled:
    """Batches whose targets are larger in some passes than in others."""

    def __init__(self, scales):
        self.scales, self.begun = scales, 0

    def __len__(self):
        return 2

    def __iter__(self):
        scale, self.begun = self.scales[self.begun % len(self.scales)], self.begun + 1
        return ((inputs, scale * target) for inputs, target in batches(2, seed=5))


@pytest.mark.parametrize(("best", "scales"), [(2, (3.0, 0.5, 2.0)), (3, (4.0, 2.0, 0.5))])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_best_weights_are_handed_back_and_go_on_from_the_model(precision, best, scales):
    task = task_of(validation=Scaled(scales), keep_best="validation_loss", precision=precision)
    orchestra = orchestra_of(task)
    report = train(orchestra)
    _, whole = plain(validation=Scaled(scales), precision=precision)
    assert report.tasks["task"].validation_losses == whole.validation_losses
    assert report.tasks["task"].losses == whole.losses
    assert report.tasks["task"].best_step == best * STEPS
    assert_is_plain(task, report, best * STEPS, precision=precision)
    assert homed(report) > [0]
    if precision == "float32":
        net = task.model.source
        assert orchestra.evaluate(task, batches()).loss == reference.evaluate(net, F.mse_loss, batches())
        net.eval()
        found = list(orchestra.predict(task, batches()))
        assert all(torch.equal(a, net(x)) for a, (x, _) in zip(found, batches(), strict=True))


# -- saved, paused, stopped


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(("before", "after"), [("device", "host"), ("host", "device"), (HALF, "device")])
def test_a_resume_may_have_other_homes(tmp_path, precision, before, after):
    first = task_of(before, precision=precision, callbacks=[Calls({5: raises(Boom())})])
    with pytest.raises(Boom):
        orchestra_of(first, directory=tmp_path, every=2).train_models()
    exact.assert_same_state(zoo.state(first.model), zoo.state(plain(5, precision=precision)[0]))
    again = task_of(after, precision=precision)
    assert_is_plain(again, train(orchestra_of(again, directory=tmp_path), resume=True), precision=precision)


def test_what_is_saved_while_training_is_what_the_host_saves(tmp_path):
    """While updates on the device go on, every step is written."""
    found = []
    for homes in ("device", "host"):
        directory = tmp_path / homes
        task = task_of(homes, precision="bfloat16", split_weights=True, callbacks=[Calls({5: raises(Boom())})])
        with pytest.raises(Boom):
            orchestra_of(task, directory=directory).train_models()
        found.append(saved_of(directory))
    assert found[0] == found[1]


def test_a_task_is_paused_and_goes_on(tmp_path):
    class Pauses(Calls):
        def on_task_pause(self, report):
            orchestra.add_task(again)

    again = task_of()
    first, other = task_of(callbacks=[Pauses({5: raises(PauseTask())})]), task_of(name="other")
    orchestra = orchestra_of(first, other, directory=tmp_path, every=100)
    report = train(orchestra)
    exact.assert_same_state(zoo.state(first.model), zoo.state(plain(5)[0]))
    assert_is_plain(again, report)
    assert_is_plain(other, report)


def test_stopped_or_failed_it_has_its_last_step():
    stopped = task_of(name="stopped", callbacks=[Calls({5: raises(StopTask())})])
    failed = task_of(name="failed", callbacks=[Calls({4: raises(Boom())})])
    called = task_of(name="called", epochs=100, callbacks=[Calls({5: lambda: orchestra.stop_task("called")})])
    orchestra = orchestra_of(stopped, failed, called)
    report = orchestra.train_models()
    assert [report.tasks[each].status for each in ("stopped", "failed", "called")] == ["stopped", "failed", "stopped"]
    assert_is_plain(stopped, report, 5)
    assert_is_plain(failed, report, 4)
    assert_is_plain(called, report, report.tasks["called"].steps, epochs=100)


class BreaksOff:
    """A policy that raises from its 25th key on."""

    def __init__(self):
        self.num_keys = 0

    def key(self, candidate):
        self.num_keys += 1
        if self.num_keys >= 25:
            raise Boom
        return 0


def test_a_run_that_breaks_off_leaves_the_last_step():
    task = task_of()
    orchestra = orchestra_of(task, policy=BreaksOff())
    with pytest.raises(Boom):
        orchestra.train_models()
    assert_is_plain(task, orchestra.report, orchestra.report.tasks["task"].steps)


def test_the_first_error_stays_where_homes_cannot_be_saved_either(monkeypatch):
    def broken(home):
        raise OSError("no room")

    monkeypatch.setattr(Home, "save", broken)
    orchestra = orchestra_of(task_of(), policy=BreaksOff())
    with pytest.raises(Boom):
        orchestra.train_models()
    names(orchestra.report.tasks["task"].exception, says="no room")


# -- homes come and go


def homes_of(orchestra, name="task"):
    """By shard, the device of each home that a task has now."""
    return dict(orchestra._running._common.tasks[name].state.homes.devices)


def test_tasks_that_begin_together_keep_their_homes():
    found = {}
    tasks = [
        task_of(name=name, callbacks=[Calls({6: lambda name=name: found.update({name: homes_of(orchestra, name)})})])
        for name in "ab"
    ]
    orchestra = orchestra_of(*tasks)
    report = train(orchestra)
    for task in tasks:
        assert_is_plain(task, report)
    assert found == {name: dict.fromkeys(range(len(ENDS)), 0) for name in "ab"}


@pytest.mark.parametrize("chaos", [None, 1])
def test_a_device_goes_and_comes_back(chaos):
    jobs = {
        3: lambda: orchestra.remove_device("emulated:0"),
        6: lambda: orchestra.add_device("emulated:0"),
        8: lambda: orchestra.remove_device("emulated:1", grace_s=0),
        11: lambda: orchestra.add_device("emulated:1"),
    }
    tasks = [
        task_of(name="a", epochs=5, callbacks=[Calls(jobs)]),
        task_of(name="b", epochs=5, precision="bfloat16", split_weights=True),
    ]
    orchestra = orchestra_of(*tasks, devices=devices_of(2, chaos=chaos, has_arena=chaos is not None))
    report = train(orchestra)
    assert_is_plain(tasks[0], report, epochs=5)
    assert_is_plain(tasks[1], report, epochs=5, precision="bfloat16")


def test_a_lone_task_moves_to_the_other_device():
    found = []
    jobs = {3: lambda: orchestra.remove_device("emulated:0"), 7: lambda: found.append(homes_of(orchestra))}
    task = task_of(callbacks=[Calls(jobs)])
    orchestra = orchestra_of(task, devices=devices_of(2))
    report = train(orchestra)
    assert_is_plain(task, report)
    assert found == [dict.fromkeys(range(len(ENDS)), 1)]
    assert min(homed(report)) > 0


def test_the_last_device_goes_and_another_one_comes():
    def change():
        orchestra.remove_device("emulated:0")
        orchestra.add_device(EmulatedDevice("1MiB"))

    task = task_of(callbacks=[Calls({4: change})])
    orchestra = orchestra_of(task)
    assert_is_plain(task, train(orchestra))


@pytest.mark.parametrize("has_arena", [False, True])
def test_a_task_that_joins_gets_room_and_leaves_it(has_arena):
    """20 KiB are room for one of the two, and half of the other."""
    found, second = [], task_of(name="second", epochs=2)
    jobs = {
        2: lambda: found.append(homes_of(orchestra, "first")),
        3: lambda: orchestra.add_task(second),
        28: lambda: found.append(homes_of(orchestra, "first")),
    }
    first = task_of(name="first", epochs=10, callbacks=[Calls(jobs)])
    orchestra = orchestra_of(first, devices=devices_of(memory="20KiB", has_arena=has_arena))
    report = train(orchestra)
    assert_is_plain(first, report, epochs=10)
    assert_is_plain(second, report, epochs=2)
    assert len(found[0]) == len(ENDS)
    assert len(found[1]) < len(ENDS)


def test_a_task_gets_room_that_another_one_leaves(monkeypatch):
    monkeypatch.setattr("hydra_engine.run.workers.LEAST_STAY_S", 0.0)
    found, has_looked = [], threading.Event()

    def look():
        found.append(len(homes_of(orchestra, "long")))
        has_looked.set()

    long = task_of(name="long", epochs=10, callbacks=[Calls({2: look, 28: look})])
    short = task_of(name="short", epochs=1, callbacks=[Calls({1: has_looked.wait})])
    orchestra = orchestra_of(long, short, devices=devices_of(memory="20KiB"))
    report = train(orchestra)
    assert_is_plain(long, report, epochs=10)
    assert found[0] < found[1] == len(ENDS)


# Where an arena is for slabs alone, a unit may take half as much again as those that were known.
@pytest.mark.parametrize(("has_arena", "size"), [(False, 30), (False, 45), (True, 12)])
def test_a_batch_that_is_larger_than_all_before(has_arena, size):
    """Its units have no room beside the homes."""
    data = batches(2) + batches(1, seed=9, size=size) + batches(2, seed=4)
    task = task_of(data=data, epochs=1)
    report = train(orchestra_of(task, devices=devices_of(memory="20KiB", has_arena=has_arena)))
    revisions = report.tasks["task"].revisions
    if all(each.accumulation_steps == 1 for each in revisions):
        assert_is_plain(task, report, data=data, epochs=1)


def test_a_device_may_come_back_in_the_call_that_removes_it():
    def change():
        orchestra.remove_device("emulated:0")
        orchestra.add_device("emulated:0")

    task = task_of(callbacks=[Calls({4: change})])
    orchestra = orchestra_of(task, devices=devices_of(2))
    assert_is_plain(task, train(orchestra))
    assert orchestra.devices == {"emulated:0": "in", "emulated:1": "in"}


# -- a device fails


def fails(task, copies, **options):
    """Train on two devices that fail at these copies; the report and what was raised."""
    fuse = Fuse(copies)
    devices = [Failing(fuse.burns) for _ in range(2)]
    orchestra = orchestra_of(task, devices=devices, max_failures=len(copies), **options)
    try:
        orchestra.train_models()
    except DeviceFailed as error:
        return orchestra.report, error
    assert fuse.num_burnt == len(copies)
    return orchestra.report, None


IN_NET = [(97, 2, "float32"), (91, 1, "float32"), (85, 1, "bfloat16"), (103, 1, "float32"), (109, 2, "bfloat16")]
OTHERS = [(copy, 1, precision) for precision in ("float32", "bfloat16") for copy in range(60, 160, 9)]


@pytest.mark.parametrize(
    ("copy", "every", "precision"), IN_NET + [pytest.param(*case, marks=pytest.mark.rest) for case in OTHERS]
)
def test_a_task_goes_back_to_its_last_saved_step(tmp_path, copy, every, precision):
    steps = []

    class Notes(Callback):
        def on_step(self, report):
            steps.append((report.steps, len(report.losses)))

    options = {"precision": precision, "validation": batches(2, seed=5)}
    task = task_of(callbacks=[Notes()], **options)
    report, error = fails(task, [copy], directory=tmp_path, every=every)
    assert error is None
    _, whole = plain(**options)
    assert report.tasks["task"].status == "finished"
    assert report.tasks["task"].validation_losses == whole.validation_losses
    assert len(report.tasks["task"].losses) == NUM_STEPS
    assert_is_plain(task, report, **options)
    assert [(step, step) for step, _ in steps] == steps
    message = next(text for text in report.messages if "went back" in text)
    names(message, task="task", says="emulated:0 step")
    last = max(range(len(steps)), key=lambda k: (k and steps[k][0] <= steps[k - 1][0], k))
    if last and steps[last][0] <= steps[last - 1][0]:  # callbacks saw undone steps again
        names(message, says=f"{steps[last - 1][0]} {steps[last][0] - 1}")


def test_without_a_checkpoint_the_task_fails_and_others_go_on():
    is_time = threading.Event()
    task, other = task_of(name="a", callbacks=[Calls({2: is_time.set})]), task_of("host", name="b")
    devices = [Failing(is_time.is_set), EmulatedDevice("1MiB")]
    report = orchestra_of(task, other, devices=devices, max_failures=1).train_models()
    assert report.tasks["a"].status == "failed"
    names(report.tasks["a"].exception, says="emulated:0 homes='host' checkpoint_dir")
    assert str(report.tasks["a"].exception).startswith("emulated:0 has failed")
    assert_is_plain(other, report)


def unbuffered():
    net = model()
    net[5] = nn.LayerNorm(16)
    return net


def shuffled():
    data = TensorDataset(*(torch.cat(each) for each in zip(*batches(), strict=True)))
    return DataLoader(data, batch_size=6, shuffle=True)


@pytest.mark.parametrize(
    ("homes", "net", "copy", "options", "is_there"),
    [
        (HALF, model, 11, {"callbacks": [Callback()]}, True),  # nothing is committed
        ("device", unbuffered, 35, {"precision": "bfloat16", "split_weights": True}, True),
        ("device", unbuffered, 70, {"validation": batches(1, seed=5)}, True),
        ("device", model, 50, {}, False),  # its buffers are another step's
        (HALF, unbuffered, 50, {}, False),
        ("device", unbuffered, 50, {"callbacks": [Calls({})]}, False),  # which may keep what it has seen
    ],
)
def test_where_nothing_is_saved_a_task_begins_again_if_dram_has_it_as_it_began(homes, net, copy, options, is_there):
    task = task_of(homes, net=net(), data=shuffled(), **options)
    report, _ = fails(task, [copy])
    if not is_there:
        assert report.tasks["task"].status == "failed"
        return
    message = next(text for text in report.messages if "went back" in text)
    assert message.endswith("to step 0")
    assert ("from step 0" in message) == (net is model), message
    other = task_of("host", net=net(), data=shuffled(), **options)
    assert report.tasks["task"].losses == train(orchestra_of(other)).tasks["task"].losses
    exact.assert_same_state(zoo.state(task.model), zoo.state(other.model))


@pytest.mark.parametrize("stops", [False, True])
def test_a_task_that_is_cut_off_on_its_way_back_is_reported_as_it_is_there(stops, tmp_path, monkeypatch):
    """Interrupted, it waits for the next call; stopped, it is over."""
    plan_one, is_time, pause, ends = Site.plan_one, threading.Event(), threading.Event(), []

    class Ends(Callback):
        def on_task_end(self, report):
            ends.append((report.status, report.steps))

    def fail_once_saved():
        while not any(tmp_path.glob("checkpoint-*.json")):
            pause.wait(0.001)
        is_time.set()

    def cut_off(*args):
        if stops:
            orchestra.stop_task("task")
        else:
            signal.raise_signal(signal.SIGINT)
            while not orchestra._running._common.is_interrupted:
                pause.wait(0.001)
        return plan_one(*args)

    monkeypatch.setattr(Site, "plan_one", cut_off)
    task = task_of(callbacks=[Calls({4: fail_once_saved}), Ends()])
    devices = [Failing(is_time.is_set), EmulatedDevice("1MiB")]
    orchestra = orchestra_of(task, devices=devices, directory=tmp_path, max_failures=1)
    with nullcontext() if stops else pytest.raises(KeyboardInterrupt):
        orchestra.train_models()
    found = orchestra.report.tasks["task"]
    assert found.stop_reason == ("stop_task() was called" if stops else "the run was interrupted")
    assert found.status == "stopped"
    assert 0 < found.steps == len(found.losses) <= 4
    assert_is_plain(task, orchestra.report, found.steps)
    assert ends == [("stopped", found.steps)] * stops


def test_after_a_failure_homes_are_on_the_other_device(tmp_path, monkeypatch):
    monkeypatch.setattr("hydra_engine.run.workers.LEAST_STAY_S", 0.0)
    task = task_of()
    report, _ = fails(task, [73], directory=tmp_path)
    assert_is_plain(task, report)
    assert min(homed(report)) > 0


# -- what has no home


def hooked():
    net = model()
    net[0].weight.register_hook(lambda gradient: gradient)
    return net


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ema_decay": 0.9}, "ema_decay"),
        ({"early_release": True}, "early_release"),
        ({"optimizer_scope": "task"}, "optimizer_scope"),
        ({"optimizer": torch.optim.RMSprop}, "RMSprop"),
        ({"optimizer": partial(torch.optim.SGD, momentum=0.9, dampening=0.1)}, "SGD dampening"),
        ({"net": hooked()}, "hooks"),
    ],
)
def test_the_plan_says_why_nothing_has_a_home(options, words):
    task = task_of(epochs=1, **options)
    orchestra = orchestra_of(task)
    plan = orchestra.generate()
    names(plan.tasks["task"].no_homes_because, says=words)
    names(str(plan), says=words)
    assert homed(train(orchestra)) == [0]


@pytest.mark.parametrize("homes", ["auto", "host", 0])
def test_nothing_has_a_home_that_asks_for_none(homes):
    orchestra = orchestra_of(task_of(homes, epochs=1))
    assert orchestra.generate().tasks["task"].no_homes_because == ""
    assert homed(train(orchestra)) == [0]


def test_a_thread_that_reads_weights_changes_nothing():
    """It sees those of the last time that DRAM had them."""
    is_over = threading.Event()

    def look():
        while not is_over.wait(0.001):
            sum(float(each.detach().abs().sum()) for each in task.model.source.parameters())

    task = task_of()
    thread = threading.Thread(target=look)
    thread.start()
    report = train(orchestra_of(task))
    is_over.set()
    thread.join()
    assert_is_plain(task, report)
