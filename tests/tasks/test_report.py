"""Plans and reports print as tables, and a failure in them is raised as it was."""

import traceback
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hydra_engine import DeviceReport, ModelTask, Plan, Report, TaskPlan, TaskReport
from hydra_engine.errors import SavedError
from hydra_engine.texts import table
from tests import exact
from tests.refused import names, refused

KIB, MIB = 2**10, 2**20


def task_plan(name, boundaries, shard_bytes, **options):
    defaults = {"dram": {"weights": 2 * MIB, "gradients": MIB}, "accumulation_steps": 1, "step_s": 0.1}
    return TaskPlan(name=name, boundaries=boundaries, shard_bytes=shard_bytes, **(defaults | options))


PLAN = """\
plan for EmulatedDevice(64 MiB), EmulatedDevice(1 GiB)
task    shards  layers per shard  largest shard  micro-batches  DRAM
------  ------  ----------------  -------------  -------------  -------
bert    3       2 1 4             2 MiB          1              3 MiB
task-1  9       1 to 2            1.5 KiB        4              1.5 MiB"""


def test_plan_prints_as_a_table():
    bert = task_plan("bert", [2, 3, 7], [MIB, 2 * MIB, 512])
    many = task_plan("task-1", [*range(1, 9), 10], [1536] * 9, dram={"weights": 3 * MIB // 2}, accumulation_steps=4)
    plan = Plan(tasks={"bert": bert, "task-1": many}, devices=["EmulatedDevice(64 MiB)", "EmulatedDevice(1 GiB)"])
    assert str(plan).startswith(PLAN)


REPORT = """\
task  status    steps  loss            validation
----  --------  -----  --------------  --------------
a     finished  3      2.500 -> 1.250  0.500 -> 0.250
b     failed    0      -               -

b: failed after step 0: ValueError: boom

device      busy  loaded   stored  peak of budget
----------  ----  -------  ------  ---------------
emulated:0  75%   1.5 MiB  10 B    1 KiB of 64 MiB
makespan 4.0 s"""


def report_of(*tasks, makespan_s=4.0):
    moved = {"loaded_bytes": 3 * MIB // 2, "stored_bytes": 10}
    device = DeviceReport(name="emulated:0", busy_s=3.0, **moved, peak_bytes=KIB, memory_bytes=64 * MIB)
    return Report(makespan_s=makespan_s, tasks={task.name: task for task in tasks}, devices=[device])


def test_report_prints_as_two_tables():
    a = TaskReport(name="a", seed=1, status="finished", steps=3, losses=[2.5, 2.0, 1.25], validation_losses=[0.5, 0.25])
    b = TaskReport(name="b", seed=2, status="failed", exception=ValueError("boom"))
    assert str(report_of(a, b)) == REPORT


def test_report_of_a_run_that_took_no_time_prints():
    assert "makespan 0.0 s" in str(report_of(TaskReport(name="a", seed=1), makespan_s=0.0))


def test_task_is_stopped_until_something_became_of_it_and_shares_no_losses():
    TaskReport(name="other", seed=1).losses.append(1.0)
    task = TaskReport(name="a", seed=1)
    assert (task.status, task.steps, task.losses, task.validation_losses) == ("stopped", 0, [], [])
    assert task.error is task.exception is None


def test_the_first_failure_is_raised_and_nothing_where_nothing_failed():
    errors = [ValueError("first"), KeyError("second")]
    failed = [TaskReport(name=str(k), seed=0, status="failed", exception=error) for k, error in enumerate(errors)]
    others = [TaskReport(name=status, seed=0, status=status) for status in ("finished", "stopped")]
    report_of(*others).raise_failures()
    with pytest.raises(ValueError, match="first") as raised:
        report_of(*others, *failed).raise_failures()
    assert raised.value is errors[0]


def test_a_report_names_each_failed_task_with_the_first_line_of_its_reason():
    """Also of an error without a text, of one whose text begins with an empty line, and of one read from a file."""
    errors = [
        ValueError("boom\nand more"),
        AssertionError(),
        OSError("\n no such file\n"),
        SavedError("KeyError", "'x'\n"),
    ]
    failed = [TaskReport(name=str(k), seed=0, status="failed", exception=error) for k, error in enumerate(errors)]
    lines = str(report_of(*failed)).splitlines()
    reasons = ["ValueError: boom", "AssertionError", "OSError: no such file", "KeyError: 'x'"]
    assert lines[7:11] == [f"{k}: failed after step 0: {reason}" for k, reason in enumerate(reasons)]


def test_a_reason_says_where_it_failed():
    error = "b failed in b.fb0@2, blocks.1 (Block)\nTraceback ..."
    failed = TaskReport(name="b", seed=0, status="failed", exception=ValueError("boom"), error=error)
    assert failed.reason == "ValueError: boom, in b.fb0@2, blocks.1 (Block)"


@pytest.mark.parametrize("num_failed", [1, 2, 3])
def test_the_failure_that_is_raised_names_all_others_once(num_failed):
    errors = [ValueError("first"), KeyError("second"), OSError("third\nline")][:num_failed]
    failed = [TaskReport(name=f"t{k}", seed=0, status="failed", exception=error) for k, error in enumerate(errors)]
    report = report_of(TaskReport(name="good", seed=0, status="finished"), *failed)
    for _ in range(2):
        with pytest.raises(ValueError, match="first") as raised:
            report.raise_failures()
    text = "".join(traceback.format_exception_only(raised.value))
    others = ["t1: KeyError: 'second'", "t2: OSError: third"][: num_failed - 1]
    head = [f"{len(others)} other task{'s' * (len(others) > 1)} failed, too:"] if others else []
    assert text.splitlines() == ["ValueError: first", *head, *others]


def test_columns_of_a_table_are_aligned():
    assert table([("a", "long head"), ("longer", "b"), ("", "")]) == [
        "a       long head",
        "------  ---------",
        "longer  b",
        "",
    ]


class LastStepFails(torch.optim.lr_scheduler.LRScheduler):
    """Raises when it is stepped after the second epoch."""

    def get_lr(self):
        if self.last_epoch == 2:
            raise ValueError("boom after the last epoch")
        return [group["lr"] for group in self.optimizer.param_groups]


@pytest.mark.parametrize("num_others", [0, 1])
def test_failure_after_the_last_step_is_reported(num_others):
    batch = (torch.rand(3, 4), torch.zeros(3).long())
    others = [ModelTask([nn.Linear(4, 2)], F.cross_entropy, [batch]) for _ in range(num_others)]
    schedule = {"lr_scheduler": LastStepFails, "lr_scheduler_interval": "epoch"}
    failing = ModelTask([nn.Linear(4, 2)], F.cross_entropy, [batch], epochs=2, name="failing", **schedule)
    orchestra = exact.silent([failing, *others])
    with pytest.raises(ValueError, match="boom") if num_others == 0 else nullcontext():
        orchestra.train_models()
    outcome = orchestra.report.tasks["failing"]
    assert outcome.status == "failed"
    names(outcome.error, says="boom")
    assert outcome.steps == 2


COMPARED = """\
task  best validation_loss  at step  last  status           steps  lr     depth
----  --------------------  -------  ----  ---------------  -----  -----  -----
c     0.25                  4        0.5   finished, early  6      0.001  -
a     0.5                   2        0.75  finished         4      0.1    12
b     0.5                   2        nan   stopped          4      -      -
d     -                     -        -     failed           0      -      3"""


def compared():
    def of(name, validation_losses, **options):
        steps = [2 * (k + 1) for k in range(len(validation_losses))]
        return TaskReport(name=name, seed=0, validation_losses=validation_losses, validation_steps=steps, **options)

    a = of("a", [0.5, 0.75], status="finished", steps=4, hparams={"lr": 0.1, "depth": 12})
    a.validation_metrics = {"accuracy": [0.5, 0.25]}
    b = of("b", [0.5, float("nan")], steps=4, losses=[2.0, 1.0])
    b.validation_metrics = {"accuracy": [0.25, 0.75]}
    c = of("c", [1.0, 0.25, 0.5], status="finished", steps=6, stopped_early=True, hparams={"lr": 0.001})
    c.best_step, c.best_value = 4, 0.25
    return report_of(a, b, c, of("d", [], status="failed", hparams={"depth": 3}))


def test_tasks_compare_as_a_table_with_the_best_first():
    assert compared().compare() == COMPARED


def test_tasks_compare_by_any_figure_in_either_direction():
    lines = compared().compare(by="accuracy", best="max").splitlines()
    assert [line.split()[:4] for line in lines[2:]] == [
        ["b", "0.75", "4", "0.75"],
        ["a", "0.5", "2", "0.25"],
        ["c", "-", "-", "-"],
        ["d", "-", "-", "-"],
    ]
    assert compared().compare(by="loss").splitlines()[2].split()[:4] == ["b", "1", "2", "1"]


def test_an_unknown_figure_is_refused():
    with refused(says="by: f1 accuracy"):
        compared().compare(by="f1")
    with refused(says="best: most max"):
        compared().compare(best="most")
