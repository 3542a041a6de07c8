"""A run that goes on from a checkpoint ends with the bits of one that was never interrupted."""

import _thread
import errno
import random
import re
import shutil
import tempfile
import threading
from functools import lru_cache, partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import hydra_engine
from hydra_engine import Callback, CheckpointError, KeepBest, ModelTask, StopTask
from hydra_engine.checkpoints.checkpoint import load_newest, newest_first, read_manifest
from hydra_engine.run.feeds import Joining
from hydra_engine.system import process as restart
from hydra_engine.system.files import Disk
from partitioners import Presharded
from tests import exact, zoo
from tests.checkpoints.support import TRIED, FullDisk, assert_nothing_unnamed, path_of
from tests.refused import names, refused

PATIENCE_S = 60
NUM_STEPS = 12


class Boom(RuntimeError):
    """What interrupts a task here: it has failed, and a resume tries it again."""


class FailsAfter(Callback):
    """Fails the task once so many steps are committed."""

    def __init__(self, num_steps):
        self.num_steps = num_steps

    def on_step(self, report):
        if report.steps == self.num_steps:
            raise Boom


class Counted(IterableDataset):
    """Draws from its own generator and from torch's; has no length."""

    def __init__(self):
        self.generator = torch.Generator()
        self.generator.manual_seed(8)

    def __iter__(self):
        for _ in range(24):
            yield torch.randn(6, generator=self.generator) + torch.rand(()), torch.randn(3)


class Stateful:
    """A loader with a state dict, as torchdata's StatefulDataLoader has one."""

    def __init__(self):
        self.position, self.generator = 0, torch.Generator()
        self.generator.manual_seed(4)

    def __iter__(self):
        while self.position < 6:
            self.position += 1
            yield torch.randn(4, 6, generator=self.generator), torch.randn(4, 3)
        self.position = 0

    def state_dict(self):
        return {"position": self.position, "generator": self.generator.get_state()}

    def load_state_dict(self, state):
        self.position = state["position"]
        self.generator.set_state(state["generator"])


class OutsideTorch:
    """Draws from `random` as it is opened, or at each batch; begins with what it finds there as it is made."""

    def __init__(self, *, at_batches):
        self.at_batches, self.batches = at_batches, list(with_own_generator())
        random.seed(5)

    def __iter__(self):
        order = self.batches if self.at_batches else random.sample(self.batches, len(self.batches))
        return ((x + random.random(), y) if self.at_batches else (x, y) for x, y in order)


def shuffled(generator=None):
    data = torch.Generator().manual_seed(1)
    samples = TensorDataset(torch.randn(24, 6, generator=data), torch.randn(24, 3, generator=data))
    return DataLoader(samples, 4, shuffle=True, generator=generator)


def with_own_generator():
    return shuffled(torch.Generator().manual_seed(5))


LOADERS = {
    "shuffled": shuffled,
    "own generator": with_own_generator,
    "iterable": lambda: DataLoader(Counted(), 4),
    "stateful": Stateful,
    "holes": lambda: [
        (x.fill_(torch.nan) if k in (0, 5, 7) else x, y)
        for k, (x, y) in enumerate(2 * list(shuffled(torch.Generator().manual_seed(2))))
    ],
    "draws outside torch": partial(OutsideTorch, at_batches=True),
    "drawn order": partial(OutsideTorch, at_batches=False),
    "list": lambda: list(shuffled(torch.Generator().manual_seed(2))),
}


def model(*, draws=False, batch_norm=False):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        layers = [nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)]
        if batch_norm:
            layers.insert(1, nn.BatchNorm1d(16))
        if draws:
            layers.insert(2, nn.Dropout(0.3))
        return nn.Sequential(*layers)


def task_of(
    loader="shuffled", *, draws=False, batch_norm=False, epochs=2, ends=None, name="task", loss=F.mse_loss, **options
):
    layers = model(draws=draws, batch_norm=batch_norm)
    ends = [2, 4, len(layers)] if ends is None else [*(end for end in ends if end < len(layers)), len(layers)]
    options = {"optimizer": partial(torch.optim.AdamW, weight_decay=0.1), "seed": 7, **options}
    return ModelTask(layers, loss, LOADERS[loader](), 0.01, epochs, name=name, partitioner=Presharded(ends), **options)


def orchestra_of(tasks, directory=None, *, memory="1MiB", num_devices=1, every=1, **options):
    options |= {"checkpoint_dir": directory, "checkpoint_every": every}
    return exact.silent(tasks, memory, num_devices=num_devices, **options)


def saved_of(directory, name="task"):
    """Everything that a checkpoint holds of a task, as bytes and nested values that compare bit for bit."""
    found = load_newest(directory)
    state = found.read_nested(name, "state")
    for key in ("position", "accumulation_steps", "revisions", "retries"):
        state.pop(key)
    weights = found.read_tensors(name, "weights")
    return plain([weights, state, found.read_nested(name, "optimizer")])


def plain(value):
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), bytes(value.contiguous().reshape(-1).view(torch.uint8).tolist())
    if isinstance(value, dict):
        return [(key, plain(each)) for key, each in value.items()]
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return repr(value)


CASES = {
    "plain": {},
    "draws": {"draws": True},
    "draws, micro-batches": {"draws": True, "accumulation_steps": 2},
    "micro-batches are chosen": {"accumulation_steps": "auto"},
    "buffers": {"batch_norm": True, "accumulation_steps": 2},
    "own generator": {"loader": "own generator", "draws": True},
    "iterable": {"loader": "iterable"},
    "stateful": {"loader": "stateful"},
    "list": {"loader": "list"},
    "draws outside torch": {"loader": "draws outside torch"},
    "drawn order": {"loader": "drawn order"},
    "steps are skipped": {"loader": "holes", "epochs": 1, "nonfinite": "skip", "batch_norm": True, "draws": True},
    "retried": {"max_retries": 2, "draws": True, "ema_decay": 0.9},
    "momentum, clipped": {"optimizer": partial(torch.optim.SGD, momentum=0.9), "max_grad_norm": 0.1},
    "schedule by step": {"lr_scheduler": lambda each: torch.optim.lr_scheduler.CosineAnnealingLR(each, 12)},
    "schedule by epoch": {
        "lr_scheduler": lambda each: torch.optim.lr_scheduler.StepLR(each, 1, 0.5),
        "lr_scheduler_interval": "epoch",
    },
    "averages": {"ema_decay": 0.9},
    "validated by epoch": {"validation": shuffled, "draws": True},
    "validated by step": {
        "validation": with_own_generator,
        "validation_interval": 3,
        "metrics": {"mean": lambda x, _: x.mean()},
    },
    "best by validation": {"validation": shuffled, "draws": True, "keep_best": "validation_loss", "batch_norm": True},
    "best by training loss": {"keep_best": KeepBest("loss", patience=5)},
    "bfloat16": {"precision": "bfloat16", "ema_decay": 0.9},
    "float16": {"precision": "float16", "grad_scaler": lambda: torch.amp.GradScaler("cpu", growth_interval=2)},
    "float16, skips": {"precision": "float16", "grad_scaler": lambda: torch.amp.GradScaler("cpu", init_scale=2.0**40)},
    "whole task": {"optimizer_scope": "task", "ema_decay": 0.9},
    "early release": {"early_release": True, "ema_decay": 0.9},
    "early release, room for all": {"early_release": "all", "ema_decay": 0.9},
    "groups": {"param_groups": lambda name: {"weight_decay": 0.0} if name.endswith("bias") else {}},
}
FRESH = ("validation", "grad_scaler")  # made anew for each task


def of_case(case, **options):
    found = {**CASES[case], **options}
    for key in FRESH:
        if key in found:
            found[key] = found[key]()
    return task_of(**found)


@lru_cache
def uninterrupted(case):
    """The report, the state of the model, and what was saved of a case that trains to its end at once."""
    whole = of_case(case)
    with tempfile.TemporaryDirectory() as directory:
        report = orchestra_of([whole], directory).train_models().tasks["task"]
        return report, zoo.state(whole.model), saved_of(directory)


# Every fourth case is cut once in the net. Not those whose every setting another case has, too.
ALSO_IN_OTHERS = ("plain", "draws", "buffers", "averages", "early release, room for all")
CUTS = [
    pytest.param(
        case, after, marks=() if k % 12 == (1, 6, 8).index(after) and case not in ALSO_IN_OTHERS else pytest.mark.rest
    )
    for k, case in enumerate(CASES)
    for after in (1, 6, 8)
]


@pytest.mark.parametrize(("case", "after"), CUTS)
def test_resumed_run_equals_an_uninterrupted_one(tmp_path, case, after):
    expected, state, saved = uninterrupted(case)
    interrupted = orchestra_of([of_case(case, callbacks=[FailsAfter(after)])], tmp_path / "cut")
    with pytest.raises(Boom):
        interrupted.train_models()
    assert interrupted.report.tasks["task"].steps == after
    again = of_case(case, ends=[1, 3, 4])
    options = {"num_devices": 2, "policy": "fifo", "double_buffer": False, "memory": "600KiB"}
    found = orchestra_of([again], tmp_path / "cut", **options).train_models(resume=True).tasks["task"]
    assert found.status == "finished"
    assert plain(found.losses) == plain(expected.losses)
    assert found.validation_losses == expected.validation_losses
    assert found.validation_metrics == expected.validation_metrics
    for figure in ("steps", "skipped_steps", "loss_scales"):
        assert getattr(found, figure) == getattr(expected, figure)
    exact.assert_same_state(zoo.state(again.model), state)
    assert plain(found.ema_state or {}) == plain(expected.ema_state or {})
    assert saved_of(tmp_path / "cut") == saved


@pytest.mark.rest  # scenarios are resumed on other partitions and devices
@pytest.mark.parametrize("name", zoo.MODELS)
def test_resumed_models_equal_plain_pytorch(tmp_path, name):
    """Cut at several places in one training, each time on another partition."""
    expected = exact.expected(name, optimizer="adamw", accumulation_steps=3)
    num_steps = len(expected.losses)
    options = {"optimizer": "adamw", "accumulation_steps": 3}
    for k, (after, partition) in enumerate(
        [(1, "three"), (num_steps // 2, "each"), (num_steps - 1, "one"), (None, "three")]
    ):
        callbacks = [] if after is None else [FailsAfter(after)]
        task, layers = exact.task_of(name, partition=partition, callbacks=callbacks, **options)
        orchestra = orchestra_of([task], tmp_path, memory="8MiB", num_devices=1 + k % 3, every=2)
        if after is not None:
            with pytest.raises(Boom):
                orchestra.train_models(resume=True)
    report = orchestra.train_models(resume=True)
    exact.assert_as_expected(report, name, layers, expected)


@pytest.mark.rest
def test_saving_changes_no_bit_and_tasks_go_on_beside_each_other(tmp_path):
    names = ("dropout", "cnn")
    tasks = [exact.task_of(name, optimizer="adam") for name in names]
    orchestra = orchestra_of([task for task, _ in tasks], tmp_path, memory="8MiB", num_devices=2)
    report = orchestra.train_models()
    for name, (_, layers) in zip(names, tasks, strict=True):
        exact.assert_as_expected(report, name, layers, exact.expected(name, optimizer="adam"))
    assert report.checkpoints.num_saved >= len(names)
    assert report.checkpoints.num_failed == 0
    assert load_newest(tmp_path).data["tasks"].keys() == set(names)


@pytest.mark.rest
def test_one_fails_and_goes_on_while_others_are_over(tmp_path):
    make = partial(task_of, draws=True)
    wholes = [make(name=name, epochs=epochs) for name, epochs in (("a", 1), ("b", 2))]
    expected = orchestra_of(wholes).train_models()
    cut = [make(name="a", epochs=1), make(name="b", callbacks=[FailsAfter(8)])]
    first = orchestra_of(cut, tmp_path, every=3).train_models()
    assert [first.tasks[name].status for name in "ab"] == ["finished", "failed"]
    again = [make(name="a", epochs=1), make(name="b")]
    report = orchestra_of(again, tmp_path, every=3).train_models(resume=True)
    assert list(report.tasks) == ["a", "b"]
    for name, task, whole in zip("ab", again, wholes, strict=True):
        assert report.tasks[name].status == "finished"
        assert report.tasks[name].losses == expected.tasks[name].losses
        exact.assert_same_state(zoo.state(task.model), zoo.state(whole.model))
    names(report.messages, says="resumed")


@pytest.mark.rest
def test_finished_run_is_not_trained_again_and_more_epochs_go_on(tmp_path):
    expected = orchestra_of([longer := task_of(epochs=3, validation=shuffled())]).train_models().tasks["task"]
    orchestra_of([task_of(validation=shuffled())], tmp_path).train_models()
    again = task_of(validation=shuffled())
    report = orchestra_of([again], tmp_path).train_models(resume=True)
    assert (report.tasks["task"].status, report.tasks["task"].losses) == ("finished", expected.losses[:NUM_STEPS])
    assert (report.devices, report.checkpoints.num_saved) == ([], 0)
    more = task_of(epochs=3, validation=shuffled())
    found = orchestra_of([more], tmp_path).train_models(resume=True).tasks["task"]
    assert (found.losses, found.validation_losses) == (expected.losses, expected.validation_losses)
    exact.assert_same_state(zoo.state(more.model), zoo.state(longer.model))


def test_a_stopped_task_stays_stopped(tmp_path):
    class Stops(Callback):
        def on_step(self, report):
            if report.steps == 4:
                raise StopTask

    first = task_of(callbacks=[Stops()])
    orchestra_of([first], tmp_path).train_models()
    again = task_of()
    report = orchestra_of([again], tmp_path).train_models(resume=True)
    assert (report.tasks["task"].status, report.tasks["task"].steps) == ("stopped", 4)
    exact.assert_same_state(zoo.state(again.model), zoo.state(first.model))


def test_a_callback_that_fails_at_the_last_epochs_end_is_saved_as_a_failure(tmp_path):
    class Fails(Callback):
        def on_epoch(self, report, epoch):
            if report.steps == NUM_STEPS:
                raise Boom

    expected = orchestra_of([task_of()]).train_models().tasks["task"].losses
    with pytest.raises(Boom):
        orchestra_of([task_of(callbacks=[Fails()])], tmp_path).train_models()
    found = load_newest(tmp_path)
    assert found.data["tasks"]["task"]["over"] == "failed"
    assert "Boom" in found.read_nested("task", "state")["error"]
    again = orchestra_of([task_of()], tmp_path).train_models(resume=True).tasks["task"]
    assert (again.status, again.losses) == ("finished", expected)


def test_what_a_callback_does_at_the_last_epochs_end_is_saved(tmp_path):
    class Clears(Callback):
        def on_epoch(self, report, epoch):
            if report.steps == NUM_STEPS:
                with torch.no_grad():
                    task.model[0].weight.zero_()

    task = task_of(callbacks=[Clears()])
    orchestra_of([task], tmp_path).train_models()
    again = task_of()
    orchestra_of([again], tmp_path).train_models(resume=True)
    assert not again.model[0].weight.any()
    exact.assert_same_state(zoo.state(again.model), zoo.state(task.model))


@pytest.mark.rest
def test_resume_begins_where_nothing_is_saved(tmp_path):
    expected = orchestra_of([task_of()]).train_models().tasks["task"].losses
    assert orchestra_of([task_of()], tmp_path / "new").train_models(resume=True).tasks["task"].losses == expected


@pytest.mark.rest
def test_plan_made_before_is_made_anew(tmp_path):
    expected = orchestra_of([task_of("own generator")]).train_models().tasks["task"].losses
    with pytest.raises(Boom):
        orchestra_of([task_of("own generator", callbacks=[FailsAfter(5)])], tmp_path).train_models()
    orchestra = orchestra_of([task_of("own generator")], tmp_path)
    orchestra.generate()
    assert orchestra.train_models(resume=True).tasks["task"].losses == expected


@pytest.mark.rest
def test_a_task_that_is_added_goes_on_where_it_was(tmp_path):
    """It was not there as the call began."""
    begun = []

    class Notes(Callback):
        def on_step(self, report):
            begun.append(report.steps)

    expected = orchestra_of([task_of(name="b", draws=True)]).train_models().tasks["b"].losses
    first = [task_of(name="a"), task_of(name="b", draws=True, callbacks=[FailsAfter(5)])]
    orchestra_of(first, tmp_path).train_models()

    added = task_of(name="b", draws=True, callbacks=[Notes()])  # in a callback its draws would meet the loader's

    class Adds(Callback):
        def on_epoch(self, report, epoch):
            if epoch == 0:
                orchestra.add_task(added)

    orchestra = orchestra_of([task_of(name="c", callbacks=[Adds()])], tmp_path, keep=1)
    report = orchestra.train_models(resume=True)
    assert report.tasks["b"].losses == expected
    assert begun[0] == 6
    assert load_newest(tmp_path).data["tasks"].keys() == {"a", "b", "c"}


OTHERS_THAT_CHANGE = ("plain", "whole task", "early release", "float16")


class Gate(Disk):
    """Holds up the first file of a save until it is opened."""

    def __init__(self):
        self.is_open, self.is_reached = threading.Event(), threading.Event()

    def write(self, path, put):
        if not path.name.startswith(TRIED):
            self.is_reached.set()
            assert self.is_open.wait(PATIENCE_S)
        return super().write(path, put)


@pytest.mark.parametrize(
    "case",
    ["early release", "averages", *(pytest.param(case, marks=pytest.mark.rest) for case in OTHERS_THAT_CHANGE)],
)
def test_what_changes_while_it_is_written_is_written_as_it_was(tmp_path, monkeypatch, case):
    gate = Gate()
    monkeypatch.setattr("hydra_engine.checkpoints.directory.Disk", lambda: gate)

    class Opens(Callback):
        """Training goes on for four steps before the disk takes anything."""

        def on_step(self, report):
            if report.steps == 6:
                assert gate.is_reached.wait(PATIENCE_S)
                gate.is_open.set()
            if report.steps == 7:
                raise Boom

    orchestra = orchestra_of([of_case(case, callbacks=[Opens()])], tmp_path / "cut", every=2)
    with pytest.raises(Boom):
        orchestra.train_models()
    assert orchestra.report.checkpoints.copied_bytes > 0
    *_, slow = [  # the end may name the same step, where updates of the next one had begun
        path for path in newest_first(tmp_path / "cut") if read_manifest(path).data["tasks"]["task"]["steps"] == 2
    ]
    with pytest.raises(Boom):
        orchestra_of([of_case(case, callbacks=[FailsAfter(2)])], tmp_path / "short", every=2).train_models()
    only(slow, tmp_path / "only")
    *_, short = newest_first(tmp_path / "short")
    only(short, tmp_path / "reference")
    expected, found = saved_of(tmp_path / "reference"), saved_of(tmp_path / "only")
    assert found[0] == expected[0]
    assert found[2] == expected[2]


def only(path, directory):
    """A directory that holds one checkpoint."""
    shutil.copytree(path.parent / "files", directory / "files")
    shutil.copy(path, directory)


@pytest.mark.rest
def test_a_full_disk_stops_no_training_and_the_next_save_succeeds(tmp_path, monkeypatch, capsys):
    disk = FullDisk()
    disk.is_full = False
    monkeypatch.setattr("hydra_engine.checkpoints.directory.Disk", lambda: disk)

    class Fills(Callback):
        def on_step(self, report):
            if report.steps == NUM_STEPS - 1:  # a save begins at each step, or after the one that is being written
                assert disk.has_refused.wait(PATIENCE_S)
            disk.is_full = 3 <= report.steps < NUM_STEPS - 1

    expected = orchestra_of([task_of()]).train_models().tasks["task"].losses
    report = orchestra_of([task_of(callbacks=[Fills()])], tmp_path).train_models()
    assert report.tasks["task"].losses == expected
    assert report.checkpoints.num_failed >= 1
    names(report.messages, says=f"{errno.ENOSPC}")
    names(capsys.readouterr().err, says=f"{errno.ENOSPC}")
    assert load_newest(tmp_path).data["tasks"]["task"] == {"steps": NUM_STEPS, "over": "finished", "loss": expected[-1]}
    assert_nothing_unnamed(tmp_path)


def test_a_damaged_checkpoint_is_passed_over_with_a_message(tmp_path, capsys):
    expected = orchestra_of([task_of()]).train_models().tasks["task"].losses
    with pytest.raises(Boom):
        orchestra_of([task_of(callbacks=[FailsAfter(9)])], tmp_path, every=3).train_models()
    found = load_newest(tmp_path)
    newest, weights = found.path, path_of(found, "task", "weights")
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    report = orchestra_of([task_of()], tmp_path).train_models(resume=True)
    assert report.tasks["task"].losses == expected
    names(report.messages, says=newest)
    names(capsys.readouterr().err, says=newest)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"keep": 0}, ValueError, "keep 0 1"),
        ({"every": 0}, ValueError, "checkpoint_every 0 1"),
        ({"every": "often"}, ValueError, "checkpoint_every 'often'"),
        ({"every": 1.5}, TypeError, "checkpoint_every 1.5 float"),
    ],
)
def test_malformed_options_are_refused(tmp_path, options, error, words):
    with refused(error, says=words):
        orchestra_of([task_of()], tmp_path, **options)


def test_what_cannot_be_resumed_is_refused(tmp_path):
    with refused(says="resume checkpoint_dir"):
        orchestra_of([task_of()]).train_models(resume=True)
    with pytest.raises(Boom):
        orchestra_of([task_of(callbacks=[FailsAfter(3)])], tmp_path).train_models()
    with refused(CheckpointError, says="resume=True"):
        orchestra_of([task_of()], tmp_path).train_models()
    for other, words in (
        (task_of(batch_norm=True), "model"),
        (task_of("stateful"), "loader"),
        (task_of(optimizer=torch.optim.SGD), "optimizer: SGD AdamW"),
    ):
        with refused(says=words):
            orchestra_of([other], tmp_path).train_models(resume=True)


@pytest.mark.rest
@pytest.mark.parametrize("name", ["runs", "hydra-rescue-7"])
def test_the_variable_of_the_command_asks_for_a_resume(tmp_path, monkeypatch, name):
    directory = tmp_path / name
    with pytest.raises(Boom):
        orchestra_of([task_of(callbacks=[FailsAfter(5)])], directory).train_models()
    monkeypatch.setenv(restart.VARIABLE, str(directory))
    other = orchestra_of([task_of()], tmp_path / "other").train_models()
    assert other.messages == (), "it has a directory of its own"
    if name == "runs":  # only what was made for a lost device is nobody's own
        assert orchestra_of([task_of()]).train_models().messages == ()
    found = orchestra_of([task_of()], directory if name == "runs" else None).train_models()
    names(found.messages, says="resumed")
    assert found.tasks["task"].losses == other.tasks["task"].losses
    assert load_newest(directory).data["tasks"]["task"]["over"] == "finished"
    assert orchestra_of([task_of()]).train_models().messages == (), "it was asked for once"


def test_a_task_that_cannot_be_saved_is_told_once_and_trains_on(tmp_path):
    def with_more(params, **options):
        optimizer = torch.optim.SGD(params, **options)
        optimizer.param_groups[0]["told"] = threading.Lock()
        return optimizer

    tasks = [task_of(name="a", optimizer=with_more), task_of(name="b")]
    report = orchestra_of(tasks, tmp_path, every=2).train_models()
    assert [report.tasks[name].status for name in "ab"] == ["finished", "finished"]
    [message] = report.messages
    names(message, task="'a'", says="told")
    assert load_newest(tmp_path).task_names == ("b",)


class InterruptsAt(Callback):
    """As Ctrl-C in a notebook, once; no step is committed before the run has heard of it."""

    def __init__(self, step):
        self.step, self.heard = step, threading.Event()

    def on_step(self, report):
        if report.steps == self.step:
            self.step = None
            _thread.interrupt_main()
            assert self.heard.wait(PATIENCE_S)


@pytest.fixture
def cut_off(monkeypatch):
    """Makes an orchestrator, and its task, that was interrupted."""

    def make(directory, *, every=1):
        interrupts, hears = InterruptsAt(3), Joining.stop_requested
        monkeypatch.setattr(Joining, "stop_requested", lambda *args: (interrupts.heard.set(), hears(*args))[1])
        task = task_of("shuffled", draws=True, callbacks=[interrupts])
        orchestra = orchestra_of([task], directory, every=every)
        with pytest.raises(KeyboardInterrupt):
            orchestra.train_models()
        assert 3 <= orchestra.report.tasks["task"].steps < NUM_STEPS
        return orchestra, task

    return make


@pytest.mark.parametrize("every", [1, "10min"])
def test_the_same_orchestrator_goes_on_after_an_interrupt(tmp_path, cut_off, every):
    expected = orchestra_of([whole := task_of(draws=True)]).train_models().tasks["task"]
    orchestra, task = cut_off(tmp_path, every=every)
    with refused(RuntimeError, task="task", says="step resume=True"):
        orchestra.train_models()
    found = orchestra.train_models(resume=True).tasks["task"]
    assert (found.status, found.losses) == ("finished", expected.losses)
    exact.assert_same_state(zoo.state(task.model), zoo.state(whole.model))
    with refused(RuntimeError, says="trained already"):
        orchestra.train_models(resume=True)


def test_an_interrupted_task_goes_on_beside_a_new_one(tmp_path, cut_off):
    expected = orchestra_of([task_of(draws=True)]).train_models().tasks["task"]
    orchestra, _ = cut_off(tmp_path)
    orchestra.add_task(task_of(name="new"))
    report = orchestra.train_models(resume=True)
    assert report.tasks["task"].losses == expected.losses
    assert report.tasks["new"].status == "finished"


def test_a_task_that_has_failed_is_tried_again_by_the_same_orchestrator(tmp_path):
    expected = orchestra_of([task_of()]).train_models().tasks["task"]
    task = task_of(callbacks=[FailsAfter(5)])
    orchestra = orchestra_of([task], tmp_path)
    with pytest.raises(Boom):
        orchestra.train_models()
    task.callbacks[0].num_steps = None
    assert orchestra.train_models(resume=True).tasks["task"].losses == expected.losses


def test_without_a_directory_an_interrupted_task_cannot_go_on(cut_off):
    orchestra, _ = cut_off(None)
    with refused(ValueError, task="task", says="resume checkpoint_dir"):
        orchestra.train_models(resume=True)
    with refused(RuntimeError, task="task", says="new"):
        orchestra.train_models()


def test_a_task_that_nothing_is_saved_of_does_not_begin_with_moved_weights(tmp_path, cut_off):
    orchestra, _ = cut_off(tmp_path)
    for path in tmp_path.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    with refused(CheckpointError, task="task", says="step"):
        orchestra.train_models(resume=True)


def test_a_task_that_failed_in_its_first_step_does_not_begin_with_what_that_has_moved(tmp_path):
    task = task_of()
    orchestra = orchestra_of([task], tmp_path)
    orchestra.generate()
    task.callbacks = [FailsAfter(1)]
    with pytest.raises(Boom):
        orchestra.train_models()
    for path in tmp_path.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    orchestra.report.tasks["task"].steps = 0
    with refused(CheckpointError, task="task", says="step 0 new"):
        orchestra.train_models(resume=True)


@pytest.mark.rest
def test_a_second_call_of_an_orchestrator_goes_on_in_its_directory(tmp_path):
    orchestra = orchestra_of([task_of(name="a")], tmp_path)
    orchestra.train_models()
    orchestra.add_task(task_of(name="b"))
    orchestra.train_models()
    tasks = load_newest(tmp_path).data["tasks"]
    assert {name: each["over"] for name, each in tasks.items()} == {"a": "finished", "b": "finished"}


def test_what_a_run_saves_is_documented(tmp_path):
    orchestra_of([task_of(epochs=1)], tmp_path).train_models()
    found = load_newest(tmp_path)
    text = (Path(hydra_engine.__file__).parent / "checkpoints" / "checkpoint.md").read_text()
    assert set(re.findall(r"^\| `data\.(\w+)` \|", text, re.MULTILINE)) == found.data.keys()
    [row] = re.findall(r"^\| `state` \(nested\) \| (.*) \|", text, re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", row)) == found.read_nested("task", "state").keys()


@pytest.mark.rest
def test_last_ones_are_kept_and_what_they_say_of_the_run(tmp_path):
    orchestra = orchestra_of([task_of(name="a"), task_of(name="b", epochs=1)], tmp_path, keep=2)
    orchestra.train_models()
    found = load_newest(tmp_path)
    assert len(list(tmp_path.glob("checkpoint-*"))) <= 3
    assert found.data["tasks"]["b"]["steps"] == NUM_STEPS // 2
    assert found.data["plan"]["tasks"]["a"]["boundaries"] == [2, 4, 5]
    assert found.data["report"]["devices"][0]["name"] == "emulated:0"
    assert not [each.name for each in threading.enumerate() if each.name.startswith("hydra")]
