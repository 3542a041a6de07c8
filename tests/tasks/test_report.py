"""Plans and reports print as tables, and a failure in them is raised as it was."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hydra_engine import DeviceReport, EmulatedDevice, ModelOrchestrator, ModelTask, Plan, Report, TaskPlan, TaskReport
from hydra_engine.tasks.report import table

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

device      busy  loaded   stored  peak of budget
----------  ----  -------  ------  ---------------
emulated:0  75%   1.5 MiB  10 B    1 KiB of 64 MiB
makespan 4.0 s"""


def report_of(*tasks, makespan_s=4.0):
    device = DeviceReport(
        name="emulated:0",
        busy_s=3.0,
        loaded_bytes=3 * MIB // 2,
        stored_bytes=10,
        peak_bytes=KIB,
        memory_bytes=64 * MIB,
    )
    return Report(makespan_s=makespan_s, tasks={task.name: task for task in tasks}, devices=[device])


def test_report_prints_as_two_tables():
    a = TaskReport(name="a", seed=1, status="finished", steps=3, losses=[2.5, 2.0, 1.25], validation_losses=[0.5, 0.25])
    b = TaskReport(name="b", seed=2, status="failed", exception=ValueError("boom"))
    assert str(report_of(a, b)) == REPORT


def test_report_of_a_run_that_took_no_time_prints():
    assert "makespan 0.0 s" in str(report_of(TaskReport(name="a", seed=1), makespan_s=0.0))


def test_task_is_stopped_until_something_became_of_it():
    task = TaskReport(name="a", seed=1)
    assert (task.status, task.steps, task.losses, task.validation_losses) == ("stopped", 0, [], [])
    assert task.error is task.exception is None


def test_reports_do_not_share_their_losses():
    one, two = TaskReport(name="a", seed=1), TaskReport(name="b", seed=1)
    one.losses.append(1.0)
    assert two.losses == []


def test_first_failure_is_raised():
    errors = [ValueError("first"), KeyError("second")]
    tasks = [TaskReport(name=str(k), seed=0, status="failed", exception=error) for k, error in enumerate(errors)]
    finished = TaskReport(name="fine", seed=0, status="finished")
    with pytest.raises(ValueError, match="first") as raised:
        report_of(finished, *tasks).raise_failures()
    assert raised.value is errors[0]


@pytest.mark.parametrize("status", ["finished", "stopped"])
def test_nothing_is_raised_where_nothing_failed(status):
    report_of(TaskReport(name="a", seed=0, status=status)).raise_failures()


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
    failing = ModelTask(
        [nn.Linear(4, 2)],
        F.cross_entropy,
        [batch],
        epochs=2,
        name="failing",
        lr_scheduler=LastStepFails,
        lr_scheduler_interval="epoch",
    )
    orchestra = ModelOrchestrator([failing, *others], devices=[EmulatedDevice("1MiB")])
    orchestra.verbose = 0
    with pytest.raises(ValueError, match="boom") if num_others == 0 else nullcontext():
        orchestra.train_models()
    outcome = orchestra.report.tasks["failing"]
    assert outcome.status == "failed"
    assert "boom after the last epoch" in outcome.error
    assert outcome.steps == 2
