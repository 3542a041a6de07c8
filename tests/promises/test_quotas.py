"""Groups with quotas in a real run: who had which device when, from its trace; bits; and what is refused.

Layers and callbacks hold the run where it is to be seen, so nothing depends on how long anything takes.
"""

import copy
import threading
from collections import Counter, defaultdict

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hydra_engine import Callback, ModelTask
from hydra_engine.devices import COMPUTE
from hydra_engine.elastic import Quota
from hydra_engine.schedule import Unit
from hydra_engine.schedule.policies import NOT_YET, ShardedLRTF
from partitioners import Presharded
from tests import exact, reference, zoo

STEPS, WAIT_S = 6, 120.0


class Crossing:
    """Holds units on all four devices until the test has seen who they are, at each scene of the story."""

    def __init__(self):
        self.changed = threading.Condition()
        self.scene = ""
        self.inside = []  # groups of the units that are held
        self.seen = {}  # by scene
        self.ready = set()  # tasks that have offered a unit to any device

    def enter(self, group):
        with self.changed:
            if not self.scene or (group == "b" and self.scene != "together"):  # as B is planned, and once it has 2
                return
            mine = self.scene
            self.inside.append(group)
            if len(self.inside) == 4:
                self.seen[mine] = Counter(self.inside)
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: self.scene != mine or (mine in self.seen and mine != "alone"), WAIT_S)

    def to(self, scene):
        with self.changed:
            self.scene, self.inside = scene, []
            self.changed.notify_all()

    def wait(self, condition):
        with self.changed:
            assert self.changed.wait_for(condition, WAIT_S)


CROSSING = Crossing()


class Held(nn.Linear):
    """A layer whose unit may be held."""

    def __init__(self, group, *sizes):
        super().__init__(*sizes)
        self.group = group

    def forward(self, x):
        CROSSING.enter(self.group)
        return super().forward(x)


class Seeing(ShardedLRTF):
    """Tells which tasks have offered a unit that could run."""

    def key(self, candidate):
        if candidate.ready_order != NOT_YET:
            with CROSSING.changed:
                CROSSING.ready.add(candidate.task)
                CROSSING.changed.notify_all()
        return super().key(candidate)


class Calls(Callback):
    def __init__(self, *, after_step_2=lambda: None, at_end=lambda: None):
        self.after_step_2, self.at_end = after_step_2, at_end

    def on_step(self, report):
        if report.steps == 2:
            self.after_step_2()

    def on_task_end(self, report):
        self.at_end()


def batches(num_steps):
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(8, 6, generator=generator), torch.randint(3, (8,), generator=generator)) for _ in range(num_steps)
    ]


def task(name, num_steps=STEPS, *, group=None, **options):
    torch.manual_seed(len(name) + ord(name[-1]))
    model = nn.Sequential(Held(name[0], 6, 6), nn.Dropout(0.2), nn.Tanh(), Held(name[0], 6, 3))
    options = {"partitioner": Presharded([3, 4]), "seed": 5, "group": group or name[0], **options}
    return ModelTask(model, F.cross_entropy, batches(num_steps), 1e-2, name=name, **options)


def orchestra_of(*tasks, num_devices=4, **options):
    return exact.silent(tasks, "1MiB", num_devices=num_devices, **options)


def assert_as_plain(trained, plain_model, report, **options):
    expected = reference.train(plain_model, F.cross_entropy, trained.dataloader, seed=5, lr=1e-2, **options)
    assert report.status == "finished"
    assert report.losses == expected.losses
    exact.assert_same_state(zoo.state(trained.model), zoo.state(plain_model))


def units_by_device(report):
    """Units that each device has computed, in order."""
    found = defaultdict(list)
    for span in sorted(report.spans, key=lambda span: span.start_s):
        if span.lane == COMPUTE:
            found[span.device].append(Unit.parse(span.label))
    return found


def counts_over_time(report):
    """Devices by group, at every time at which a unit begins."""
    spans = [span for span in report.spans if span.lane == COMPUTE]
    for now_s in sorted(span.start_s for span in spans):
        yield Counter(span.label[0] for span in spans if span.start_s <= now_s < span.end_s)


def test_a_group_borrows_idle_devices_and_gives_them_back_within_a_unit():
    """A runs on 4; B arrives: A 2 and B 2, each device after the unit that it was in; B ends: A 4."""
    b_has_ended, ended, lock = threading.Event(), [], threading.Lock()

    def one_of_b_ends():
        with lock:
            ended.append("b")
            if len(ended) == 2:
                CROSSING.to("alone again")
                b_has_ended.set()

    def a_waits():
        assert b_has_ended.wait(WAIT_S)  # so that its steps are not through before

    tasks = {name: task(name, callbacks=[Calls(after_step_2=a_waits)]) for name in ("a0", "a1", "a2", "a3")}
    late = {name: task(name, 3, callbacks=[Calls(at_end=one_of_b_ends)]) for name in ("b0", "b1")}
    plain = {name: copy.deepcopy(nn.Sequential(*each.model)) for name, each in (tasks | late).items()}
    orchestra = orchestra_of(*tasks.values(), quotas={"a": 2}, policy=Seeing())
    CROSSING.to("")
    CROSSING.seen.clear()
    orchestra.generate()
    CROSSING.to("alone")
    errors = []

    def b_arrives():
        try:
            CROSSING.wait(lambda: "alone" in CROSSING.seen)
            orchestra.add_task(late["b0"], quota=2)
            orchestra.add_task(late["b1"])
            CROSSING.wait(lambda: CROSSING.ready >= {"b0", "b1"})
        except BaseException as error:
            errors.append(error)
        CROSSING.to("together")

    thread = threading.Thread(target=b_arrives)
    thread.start()
    try:
        report = orchestra.train_models()
    finally:
        CROSSING.to("")
        b_has_ended.set()
        thread.join()
    assert errors == []
    assert CROSSING.seen == {"alone": {"a": 4}, "together": {"a": 2, "b": 2}, "alone again": {"a": 4}}
    # The same from the trace: the first unit of each device, and the one that it began when that was through.
    devices = units_by_device(report).values()
    assert sorted(str(units[0]) for units in devices) == [f"a{k}.f0@0" for k in range(4)]
    assert Counter(units[1].task[0] for units in devices) == {"a": 2, "b": 2}
    story = [{"a": 4}, {"a": 2, "b": 2}, {"a": 4}]
    for counts in counts_over_time(report):
        if story and counts == story[0]:
            del story[0]
    assert story == []
    assert set(Counter(unit for units in devices for unit in units).values()) == {1}, "no unit was computed twice"
    for name, each in (tasks | late).items():
        assert_as_plain(each, plain[name], report.tasks[name])


def test_a_step_is_spread_over_as_many_devices_as_the_task_says():
    CROSSING.to("")
    wide = task("wide", group="a", accumulation_steps=4, min_devices=4)
    narrow = task("narrow", group="a", accumulation_steps=4, min_devices=2, max_devices=2, preemptible=False)
    plain = [copy.deepcopy(nn.Sequential(*each.model)) for each in (wide, narrow)]
    report = orchestra_of(wide, narrow, quotas={"a": Quota(2, minimum=1, maximum=4)}).train_models()
    units = [unit for units in units_by_device(report).values() for unit in units]
    for name, number in (("wide", 4), ("narrow", 2)):
        assert {unit.part for unit in units if unit.task == name} == set(range(number))
    for each, model in zip((wide, narrow), plain, strict=True):
        assert_as_plain(each, model, report.tasks[each.name], accumulation_steps=4)


def test_a_group_goes_on_from_a_checkpoint_under_another_quota(tmp_path):
    CROSSING.to("")
    plain = copy.deepcopy(nn.Sequential(*task("a0").model))
    first = task("a0", callbacks=[Calls(after_step_2=lambda: orchestra.pause_task("a0"))])
    orchestra = orchestra_of(first, quotas={"a": 2}, checkpoint_dir=tmp_path)
    orchestra.train_models()
    again = task("a0", group="other")
    report = orchestra_of(again, num_devices=1, quotas={"other": 1}, checkpoint_dir=tmp_path).train_models(resume=True)
    assert_as_plain(again, plain, report.tasks["a0"])


# -- refused before any work


@pytest.mark.parametrize(
    ("quotas", "error", "words"),
    [
        ([2, 2], TypeError, "quotas: [2, 2] maps no groups to numbers of devices"),
        ({"a": "2"}, TypeError, "quotas: '2' for group 'a' is no number of devices"),
        ({"a": True}, TypeError, "quotas: True for group 'a' is no number of devices"),
        ({"a": 1.0}, TypeError, "quotas: 1.0 for group 'a' is no number of devices"),
        ({0: 1}, TypeError, "quotas: 0 is no name of a group"),
        ({"": 1}, TypeError, "quotas: '' is no name of a group"),
        ({"a": -1}, ValueError, "quotas: group 'a': devices: -1, limit: a whole number of devices, at least 0"),
        ({"a": 3, "b": 2}, ValueError, "quotas: 5 devices with group 'b', limit: 4"),
        ({"a": 2, "b": 1}, ValueError, "quotas: group 'b' has no task, limit: groups of the tasks that are given"),
        ({"b": 1}, ValueError, "task 'a': group 'a' has no quota, known: 'b'"),
        ({}, ValueError, "task 'a': group 'a' has no quota, known: no group"),
        (None, ValueError, "task 'a': group 'a' has no quota, known: no group"),
    ],
)
def test_quotas_that_cannot_be_are_refused_in_one_line(quotas, error, words):
    with pytest.raises(error) as raised:
        orchestra_of(task("a"), quotas=quotas)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"devices": 2, "minimum": 3}, "minimum: 3, limit: at most devices=2"),
        ({"devices": 2, "maximum": 1}, "maximum: 1, limit: at least devices=2"),
        ({"devices": 0, "maximum": 0}, "maximum: 0, limit: at least devices=0, and at least 1"),
        ({"devices": 1.5}, "devices: 1.5, limit: a whole number"),
        ({"devices": 1, "minimum": True}, "minimum: True, limit: a whole number"),
        ({"devices": 1, "maximum": "4"}, "maximum: '4', limit: a whole number"),
    ],
)
def test_a_quota_that_cannot_be_is_refused(options, words):
    with pytest.raises(ValueError, match="limit") as raised:
        Quota(**options)
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"group": 1}, TypeError, "group: 1 is not a str"),
        ({"min_devices": "2"}, TypeError, "min_devices: '2' is not an int"),
        ({"min_devices": 0}, ValueError, "min_devices: 0, limit: at least 1"),
        ({"max_devices": 1.5}, TypeError, "max_devices: 1.5 is not an int"),
        ({"max_devices": 0}, ValueError, "max_devices: 0, limit: at least 1"),
        ({"min_devices": 3, "max_devices": 2}, ValueError, "min_devices: 3, limit: max_devices=2"),
        ({"preemptible": 0}, TypeError, "preemptible: 0 is not a bool"),
    ],
)
def test_options_that_cannot_be_are_refused(options, error, words):
    with pytest.raises(error) as raised:
        ModelTask(nn.Sequential(nn.Linear(6, 3)), F.cross_entropy, batches(1), **options)
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("options", "quotas", "words"),
    [
        ({"min_devices": 5}, {"a": 1}, "task 'a': min_devices=5, limit: 4, the devices that there may be"),
        ({"min_devices": 3}, {"a": Quota(1, maximum=2)}, "task 'a': min_devices=3, limit: 2, its group's maximum"),
        ({"min_devices": 2, "preemptible": False}, {"a": 1}, "min_devices=2, limit: 1, its group's quota"),
        ({"preemptible": False}, {"a": 0}, "preemptible=False, limit: a group with a quota of at least 1"),
    ],
)
def test_a_task_that_could_never_begin_is_refused(options, quotas, words):
    with pytest.raises(ValueError, match="limit") as raised:
        orchestra_of(task("a", **options), quotas=quotas)
    assert words in str(raised.value)


def test_devices_that_are_yet_to_come_count_with_max_devices():
    orchestra_of(task("a", min_devices=6), quotas={"a": 6}, num_devices=2, max_devices=6)
    with pytest.raises(ValueError, match="quotas: 7 devices with group 'a', limit: 6"):
        orchestra_of(task("a"), quotas={"a": 7}, num_devices=2, max_devices=6)


def test_a_task_that_comes_while_others_train_is_of_a_known_group_or_brings_its_quota():
    CROSSING.to("")
    told = []

    def add(*args, **options):
        try:
            told.append(orchestra.add_task(*args, **options))
        except Exception as error:
            told.append(str(error))

    def come():
        add(task("b"))
        add(task("b"), quota=3)
        add(task("a1"), quota=1)
        add(task("b", preemptible=False), quota=0)
        add(task("x", group="b"), quota="2")
        raises = ModelTask(nn.Sequential(nn.Linear(4, 3)), F.cross_entropy, batches(1), name="b", group="b")
        add(raises, quota=2)  # as it is planned
        add(task("b"), quota=2)
        add(task("b1"))

    first = task("a", callbacks=[Calls(after_step_2=come)])
    orchestra = orchestra_of(first, quotas={"a": 2})
    report = orchestra.train_models()
    expected = [
        "task 'b': group 'b' has no quota, known: 'a'",
        "quotas: 5 devices with group 'b', limit: 4",
        "quota: 1 for task 'a1' of group 'a', limit: a group that is none of 'a'",
        "preemptible=False, limit: a group with a quota",
        "quotas: '2' for group 'b' is no number of devices",
        "mat1 and mat2 shapes cannot be multiplied",
    ]
    assert [words in text for words, text in zip(expected, told[:6], strict=True)] == [True] * 6, told
    assert told[6:] == ["b", "b1"]
    assert {name: each.status for name, each in report.tasks.items()} == dict.fromkeys(("a", "b", "b1"), "finished")


def test_devices_of_a_group_whose_tasks_have_ended_are_anothers():
    CROSSING.to("")
    told = []

    def add(it, **options):
        try:
            told.append(orchestra.add_task(it, **options))
        except Exception as error:
            told.append(str(error))

    def b_ends():
        add(task("c", 3, callbacks=[Calls(at_end=lambda: add(task("d", 3), quota=2))]), quota=2)

    def come():
        add(task("b", 3, callbacks=[Calls(at_end=b_ends)]), quota=2)

    orchestra = orchestra_of(task("a", callbacks=[Calls(after_step_2=come)]), quotas={"a": 2})
    report = orchestra.train_models()
    assert told == ["b", "c", "d"]
    assert {name: each.status for name, each in report.tasks.items()} == dict.fromkeys("abcd", "finished")


def test_a_quota_stays_for_the_tasks_that_count_on_it():
    """The first task of a group brings it and fails as it is planned, after the second one was let in."""
    is_planned, told, threads = threading.Event(), [], []

    class Raises(list):
        def __iter__(self):
            assert is_planned.wait(60)
            raise RuntimeError("its loader raises")

    def come():
        first = task("b1", group="b")
        first.dataloader = Raises(first.dataloader)

        def add_first():
            with pytest.raises(RuntimeError, match="its loader raises"):
                orchestra.add_task(first, quota=1)
            told.append("b1")

        threads.append(threading.Thread(target=add_first))
        threads[0].start()
        while orchestra._quotas.of(first) is None:
            pass
        second = task("b2", group="b", preemptible=False)
        planning = threading.Thread(target=lambda: told.append(orchestra.add_task(second)))
        planning.start()
        while orchestra._quotas._num_tasks["b"] < 2:
            pass
        is_planned.set()
        for each in (*threads, planning):
            each.join()

    orchestra = orchestra_of(task("a", callbacks=[Calls(after_step_2=come)]), quotas={"a": 2})
    report = orchestra.train_models()
    assert sorted(told) == ["b1", "b2"]
    assert report.tasks["b2"].status == "finished"
