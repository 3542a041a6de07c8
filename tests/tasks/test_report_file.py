"""What a run reports can be saved, loaded, drawn, traced and summed up; what a file holds equals what was saved."""

import dataclasses
import json
import math
import os
import re
import threading
from collections.abc import Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hydra_engine import DeviceReport, EmulatedDevice, ModelOrchestrator, ModelTask, Report, SavedError, TaskReport
from hydra_engine.tasks.report_file import to_json
from tests import exact
from tests.refused import refused


def tasks():
    def of(seed):
        generator = torch.Generator().manual_seed(seed)
        data = [
            (torch.rand(8, 16, generator=generator), torch.randint(16, (8,), generator=generator)) for _ in range(4)
        ]
        layers = [nn.Linear(16, 16) for _ in range(4)]
        return ModelTask(layers, F.cross_entropy, data, epochs=2, name=f"task<{seed}>", seed=seed, validation=data[:1])

    return [of(seed) for seed in range(3)]


def orchestra_of(tasks, *devices):
    return exact.silent(tasks, devices=devices)


def report_of(*tasks, **options):
    return Report(**{"makespan_s": 1.0, "tasks": {task.name: task for task in tasks}, "devices": [], **options})


@pytest.fixture(scope="module")
def report():
    return orchestra_of(tasks(), *(EmulatedDevice("12KiB", bandwidth="50MB") for _ in range(2))).train_models()


@pytest.fixture(scope="module")
def loaded(report, tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "run.json"
    report.save(path)
    return Report.load(path)


def example(hint):
    """A value of this type, no field of which has its default."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return example(next(each for each in inner if each is not NoneType))
    if dataclasses.is_dataclass(hint):
        hints = get_type_hints(hint)
        return hint(**{each.name: example(hints[each.name]) for each in dataclasses.fields(hint)})
    if hasattr(hint, "_fields"):
        return hint(*map(example, get_type_hints(hint).values()))
    if origin is not None and issubclass(origin, Mapping):
        return {"key": example(inner[1])}
    if origin in (tuple, frozenset):
        return origin([example(inner[0])])
    if origin is not None and issubclass(origin, Sequence):
        return [example(inner[0])]
    simple = {int: 3, float: 0.1, str: "text", bool: True}
    simple |= {BaseException: ValueError("boom"), torch.Tensor: torch.ones(2)}
    return {"a": [1, 0.5, None, math.inf]} if hint is Any else simple[hint]


def test_every_field_comes_back(tmp_path):
    report = example(Report)
    report.save(tmp_path / "run.json")
    found = Report.load(tmp_path / "run.json")
    [task], [given] = found.tasks.values(), report.tasks.values()
    assert (task.ema_state, given.ema_state.keys()) == (None, {"key"})
    assert isinstance(task.exception, SavedError)
    assert (task.exception.kind, task.exception.text) == ("ValueError", "boom")
    task.ema_state, task.exception = given.ema_state, given.exception
    assert found == report


def test_numbers_that_json_lacks_and_what_looks_like_the_files_own_words_come_back(tmp_path):
    losses, own_words = [math.nan, math.inf, -math.inf, 1.0], {"__float__": {"__float__": "x"}, "a": {"__float__": 1.5}}
    hparams = {"lr": math.inf, "d": (1, 2), "b": [{"__float__": None}], **own_words}
    report_of(TaskReport(name="a", seed=1, losses=losses, hparams=hparams)).save(tmp_path / "run.json")
    json.loads((tmp_path / "run.json").read_text(), parse_constant=pytest.fail)
    found = Report.load(tmp_path / "run.json").tasks["a"]
    assert math.isnan(found.losses[0])
    assert found.losses[1:] == [math.inf, -math.inf, 1.0]
    assert found.hparams == {**hparams, "d": [1, 2]}


def test_a_link_stays_and_what_is_no_file_is_written_to(tmp_path):
    report = report_of()
    (tmp_path / "runs").mkdir()
    (tmp_path / "last.json").symlink_to(tmp_path / "runs" / "1.json")
    report.save(tmp_path / "last.json")
    assert (tmp_path / "last.json").is_symlink()
    assert Report.load(tmp_path / "runs" / "1.json").makespan_s == 1.0
    os.mkfifo(tmp_path / "pipe")
    taken = []
    reader = threading.Thread(target=lambda: taken.append((tmp_path / "pipe").read_text()))
    reader.start()
    report.save(tmp_path / "pipe")
    reader.join(30)
    assert taken == [(tmp_path / "runs" / "1.json").read_text()]
    assert (tmp_path / "pipe").is_fifo()


def test_failure_of_a_loaded_report_is_raised_and_saved_again(tmp_path):
    class Own(Exception):
        pass

    task = TaskReport(name="a", seed=1, status="failed", exception=Own("boom\nand more"), error="Traceback ...")
    report_of(task).save(tmp_path / "1.json")
    found = Report.load(tmp_path / "1.json")
    found.save(tmp_path / "2.json")
    assert (tmp_path / "1.json").read_text() == (tmp_path / "2.json").read_text()
    with refused(SavedError, says="Own: boom more"):
        found.raise_failures()
    assert found.tasks["a"].error == "Traceback ..."
    assert found.summary().splitlines()[1].endswith("Own: boom")


def test_file_of_an_older_or_newer_report_is_read_as_far_as_it_is_known(tmp_path):
    path = tmp_path / "run.json"
    report_of(TaskReport(name="a", seed=1)).save(path)
    state = json.loads(path.read_text())
    del state["report"]["memory"]
    state["report"]["tasks"]["a"]["some_day"] = 1
    path.write_text(json.dumps(state))
    assert Report.load(path).memory == ()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("not JSON", "JSON"),
        pytest.param("[" * 100_000, "JSON", id="deep"),
        ("[1]", "no report"),
        ('{"format": "other"}', "no report"),
        ('{"format": "hydra_engine report", "version": 9, "hydra_engine": "7.1"}', "7.1"),
        ('{"format": "hydra_engine report", "version": 1}', "KeyError"),
        ('{"format": "hydra_engine report", "version": 1, "report": {}}', "makespan_s devices"),
    ],
)
def test_file_that_is_no_report_is_refused(content, says, tmp_path):
    (tmp_path / "run.json").write_text(content)
    with refused(says=f"run.json {says}"):
        Report.load(tmp_path / "run.json")


def test_file_is_written_whole_or_not_at_all(report, tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    path.write_text("before")
    monkeypatch.setattr("pathlib.Path.replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        report.save(path)
    assert [each.name for each in tmp_path.iterdir()] == ["run.json"]
    assert path.read_text() == "before"


def test_loaded_report_gives_what_the_report_gave(report, loaded):
    assert to_json(loaded) == to_json(report)
    assert (str(loaded), loaded.summary(), loaded.schedule) == (str(report), report.summary(), report.schedule)


def test_memory_in_use_is_told_up_to_the_peak(report):
    for device in report.devices:
        used = [each.used_bytes for each in report.memory if each.device == device.name]
        assert max(used) == device.peak_bytes <= device.memory_bytes
        assert min(used) >= 0
    moments = [each.at_s for each in report.memory]
    assert moments == sorted(moments)


def test_summary_says_what_needs_a_look():
    failed = TaskReport(name="b", seed=1, status="failed", steps=1, exception=ValueError("boom\nmore"))
    memory = {"loaded_bytes": 2048, "stored_bytes": 1024, "peak_bytes": 512, "memory_bytes": 1024}
    devices = [DeviceReport(name="cpu:0", busy_s=3.0, **memory)]
    done = TaskReport(name="a", seed=1, status="finished", steps=3)
    report = report_of(done, failed, makespan_s=4.0, devices=devices, messages=["a batch was skipped"])
    assert report.summary().splitlines() == [
        "2 tasks on 1 device in 4.0 s: 1 finished, 1 failed",
        "computing 75% of the time (cpu:0 75%)",
        "loaded 2 KiB, stored 1 KiB; at most 512 B of 1 KiB in use, on cpu:0",
        "b failed after 1 step: ValueError: boom",
        "a batch was skipped",
    ]
    assert repr(report) == "<Report: 2 tasks on 1 device in 4.0 s: 1 finished, 1 failed>"
    assert repr(failed) == "<TaskReport 'b': failed, 1 step>"


def test_names_of_several_lines_and_codes_of_terminals_disturb_no_table():
    data = [(torch.rand(2, 4), torch.rand(2, 4))]
    names = ["a\nb", "\x1b[31mc", "d.f0@3"]
    named = [ModelTask([nn.Linear(4, 4)], F.mse_loss, data, name=name) for name in names]
    orchestra = orchestra_of(named, EmulatedDevice("1MiB"))
    plan, report = orchestra.generate(), orchestra.train_models()
    for text in (str(plan), str(report), report.compare()):
        assert [name for name in ("a?b  ", "?[31mc", "d.f0@3") if name not in text] == []
        assert "\x1b" not in text
    assert [placed.unit.task for placed in report.schedule].count("a\nb") == 1


def test_plans_are_one_line_in_a_list():
    plan = orchestra_of(tasks(), EmulatedDevice("12KiB")).generate()
    assert repr(plan) == "<Plan: 3 tasks on 1 device>"
    assert re.fullmatch(r"<TaskPlan 'task<0>': \d shards?, .* KiB>", repr(plan.tasks["task<0>"]))


def test_plan_is_printed_once(tmp_path, capsys):
    orchestra = ModelOrchestrator(tasks(), devices=[EmulatedDevice("12KiB")], checkpoint_dir=tmp_path / "run")
    orchestra.generate()
    orchestra.train_models(resume=True)
    assert capsys.readouterr().out.count("plan for ") == 1
