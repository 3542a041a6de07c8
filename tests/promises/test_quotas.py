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
from hydra_engine.schedule import Unit
from hydra_engine.schedule.policies import NOT_YET, ShardedLRTF
from partitioners import Presharded
from tests import exact, reference, zoo
from tests.refused import refused

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


@pytest.mark.rest
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
    narrow = task("narrow", group="a", accumulation_steps=4, min_devices=2, max_devices=2)
    plain = [copy.deepcopy(nn.Sequential(*each.model)) for each in (wide, narrow)]
    report = orchestra_of(wide, narrow, quotas={"a": 2}).train_models()
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


# -- refused before any work (and in test_wrong_calls.py)


def test_devices_that_are_yet_to_come_count_with_max_devices():
    orchestra_of(task("a", min_devices=6), quotas={"a": 6}, num_devices=2, max_devices=6)
    with refused(says="quotas 7 6"):
        orchestra_of(task("a"), quotas={"a": 7}, num_devices=2, max_devices=6)


def test_a_task_that_comes_while_others_train_is_of_a_known_group_or_brings_its_quota():
    CROSSING.to("")
    raises = ModelTask(nn.Sequential(nn.Linear(4, 3)), F.cross_entropy, batches(1), name="b", group="b")
    wrong = [  # task, quota, error, words
        (task("b"), None, ValueError, "'b' 'a'"),
        (task("b"), 3, ValueError, "5 'b' 4"),
        (task("a1"), 1, ValueError, "'a1' 1"),
        (task("x", group="b"), "2", TypeError, "'2' 'b'"),
        (raises, 2, RuntimeError, "8x6 4x3"),  # as it is planned
    ]
    added = []

    def come():
        for each, quota, error, words in wrong:
            with refused(error, says=words):
                orchestra.add_task(each, quota=quota)
        added.append(orchestra.add_task(task("b"), quota=2))
        added.append(orchestra.add_task(task("b1")))

    first = task("a", callbacks=[Calls(after_step_2=come)])
    orchestra = orchestra_of(first, quotas={"a": 2})
    report = orchestra.train_models()
    report.raise_failures()
    assert added == ["b", "b1"]
    assert {name: each.status for name, each in report.tasks.items()} == dict.fromkeys(("a", "b", "b1"), "finished")


def test_devices_of_a_group_whose_tasks_have_ended_are_anothers():
    CROSSING.to("")
    told = []

    def add(it, **options):
        told.append(orchestra.add_task(it, **options))

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
            raise ZeroDivisionError

    def come():
        first = task("b1", group="b")
        first.dataloader = Raises(first.dataloader)

        def add_first():
            with pytest.raises(ZeroDivisionError):
                orchestra.add_task(first, quota=1)
            told.append("b1")

        threads.append(threading.Thread(target=add_first))
        threads[0].start()
        while orchestra._quotas.of(first) is None:
            pass
        second = task("b2", group="b")
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
