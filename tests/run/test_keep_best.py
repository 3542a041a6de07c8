"""The best weights are kept and handed back: those of plain PyTorch at that step, bit for bit."""

from functools import reduce
from operator import add

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hydra_engine import Callback, KeepBest, ModelTask, StopTask
from hydra_engine.checkpoints.checkpoint import load_newest
from partitioners import Presharded
from tests import exact, reference, zoo
from tests.covering import covering
from tests.refused import names, refused
from tests.run.test_forget import At, raises

SEED, LR, STEPS = 7, 0.02, 3
# By epoch: the second of the validations, and of the training epochs, is the best one.
SCALES = (3.0, 0.5, 2.0, 4.0, 5.0)
EPOCHS = len(SCALES)
BEST = 1


class Scaled:
    """Batches whose targets are larger in some passes than in others."""

    def __init__(self, num=STEPS, seed=1, scales=SCALES, begun=0):
        generator = torch.Generator().manual_seed(seed)
        self.batches = [
            (torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator)) for _ in range(num)
        ]
        self.scales, self.begun = scales, begun

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        scale, self.begun = self.scales[self.begun % len(self.scales)], self.begun + 1
        for inputs, target in self.batches:
            yield inputs, scale * target


def steady(num=STEPS, seed=1):
    return Scaled(num, seed, (1.0,))


def model():
    with torch.random.fork_rng():
        torch.manual_seed(3)
        layers = [nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, 8), nn.Linear(8, 3)]
        return nn.Sequential(*layers)


def task_of(*, epochs=EPOCHS, loader=None, validated=True, name="task", **options):
    if validated:
        options = {"validation": Scaled(2, seed=2), "keep_best": "validation_loss", **options}
    options = {"optimizer": torch.optim.AdamW, "seed": SEED, **options}
    loader = steady() if loader is None else loader
    return ModelTask(model(), F.mse_loss, loader, LR, epochs, name=name, partitioner=Presharded([2, 4, 6]), **options)


def orchestra_of(*tasks, num_devices=1, directory=None, **options):
    return exact.silent(tasks, "1MiB", num_devices=num_devices, checkpoint_dir=directory, **options)


def run(*tasks, **options):
    return orchestra_of(*tasks, **options).train_models().tasks["task"]


def plain(num_steps, *, loader=None, **options):
    """The weights of plain PyTorch after so many steps, and its result."""
    own = model()
    options = {"optimizer": torch.optim.AdamW, **options}
    result = reference.train(
        own, F.mse_loss, loader or steady(), seed=SEED, lr=LR, epochs=EPOCHS, max_steps=num_steps, **options
    )
    return own, result


def assert_is_plain(task, num_steps, **options):
    exact.assert_same_state(zoo.state(task.model), zoo.state(plain(num_steps, **options)[0]))


def error(output, target):
    return F.mse_loss(output, target)


def minus_error(output, target):
    return -F.mse_loss(output, target)


CASES = {
    "host": {},
    "early release": {"early_release": True},
    "whole task": {"optimizer_scope": "task"},
    "clipped, retried": {"max_grad_norm": 0.1, "max_retries": 1},
    "bfloat16": {"precision": "bfloat16"},
    "in order": {"read_ahead": False},
}


def of_the_loop(case):
    return {name: CASES[case][name] for name in ("max_grad_norm", "precision") if name in CASES[case]}


def net_has(*names):
    """Each case once; only these are in the net."""
    return [pytest.param(case, marks=() if case in names else pytest.mark.rest) for case in CASES]


@pytest.mark.rest
@pytest.mark.parametrize("case", net_has("clipped, retried", "bfloat16"))
def test_the_model_has_the_weights_of_its_best_validation(case):
    options = CASES[case]
    task = task_of(**options)
    report = run(task, num_devices=2 if case in ("host", "early release") else 1)
    loop = of_the_loop(case)
    _, whole = plain(None, validation=Scaled(2, seed=2), **loop)
    assert report.validation_losses == whole.validation_losses
    assert report.losses == whole.losses
    assert min(whole.validation_losses) == whole.validation_losses[BEST]
    assert (report.best_step, report.best_value) == ((BEST + 1) * STEPS, whole.validation_losses[BEST])
    assert (report.status, report.stopped_early) == ("finished", False)
    assert_is_plain(task, (BEST + 1) * STEPS, **loop)


@pytest.mark.parametrize("case", net_has("early release", "whole task"))
def test_the_model_has_the_weights_of_its_best_epoch(case):
    options = CASES[case]
    task = task_of(validated=False, loader=Scaled(), keep_best="loss", **options)
    report = run(task)
    loop = of_the_loop(case)
    _, whole = plain(None, loader=Scaled(), **loop)
    assert report.losses == whole.losses
    epochs = [whole.losses[k : k + STEPS] for k in range(0, len(whole.losses), STEPS)]
    means = [reduce(add, losses) / STEPS for losses in epochs]  # `sum` rounds otherwise since Python 3.12
    assert min(means) == means[BEST]
    assert report.best_step == (BEST + 1) * STEPS
    assert report.best_value == means[BEST]
    assert_is_plain(task, (BEST + 1) * STEPS, loader=Scaled(), **loop)


def test_the_best_of_a_metric_may_be_its_highest():
    task = task_of(keep_best=KeepBest("minus_error", "max"), metrics={"error": error, "minus_error": minus_error})
    report = run(task)
    values = report.validation_metrics["minus_error"]
    assert report.best_value == values[BEST] == max(values)
    assert_is_plain(task, (BEST + 1) * STEPS)


@pytest.mark.rest
def test_validations_in_the_middle_of_an_epoch():
    task = task_of(validation_interval=4)
    report = run(task)
    assert report.validation_steps == [4, 8, 12]
    assert report.best_step == report.validation_steps[report.validation_losses.index(min(report.validation_losses))]
    assert_is_plain(task, report.best_step)


def test_of_equal_values_the_first_one_is_kept():
    task = task_of(keep_best=KeepBest("same", patience=2), metrics={"same": lambda output, target: 1.0})
    report = run(task)
    assert (report.best_step, report.steps, report.stopped_early) == (STEPS, 3 * STEPS, True)
    assert_is_plain(task, STEPS)


@pytest.mark.rest
def test_what_is_no_number_is_not_the_best():
    nan = float("nan")
    task = task_of(validation=Scaled(2, seed=2, scales=(nan, 9.0, nan, 1.0, nan)))
    report = run(task)
    assert [value == value for value in report.validation_losses] == [False, True, False, True, False]
    assert (report.best_step, report.best_value) == (4 * STEPS, report.validation_losses[3])
    assert_is_plain(task, 4 * STEPS)


@pytest.mark.parametrize("interval", [STEPS, STEPS + 1])
def test_a_task_without_a_validation_says_that_nothing_was_judged(interval):
    messages = orchestra_of(task_of(epochs=1, validation_interval=interval)).train_models().messages
    assert len(messages) == (interval > STEPS)
    for each in messages:
        names(each, task="task", says=f"validation_interval {interval} keep_best")


def test_without_any_number_the_last_weights_stay():
    task = task_of(keep_best=KeepBest("none", patience=3), metrics={"none": lambda output, target: float("nan")})
    report = run(task)
    assert (report.best_step, report.best_value, report.steps) == (None, None, 3 * STEPS)
    assert_is_plain(task, 3 * STEPS)


class Told(Callback):
    """Notes what a task was told."""

    def __init__(self):
        self.calls, self.best, self.ends = [], [], 0

    def on_validation(self, report):
        self.calls.append("validation")
        self.best.append((report.best_step, report.best_value))

    def on_epoch(self, report, epoch):
        self.calls.append(epoch)

    def on_task_end(self, report):
        self.ends += 1
        self.state = (report.status, report.stopped_early, report.best_step)


class Begins(Told):
    """Reads nothing ahead over an epoch's end."""

    def on_epoch_begin(self, report, epoch):
        pass


TOLD = [
    ("host", Told),
    ("early release", Begins),
    *(
        pytest.param(case, told, marks=pytest.mark.rest)
        for case, told in (
            ("whole task", Told),
            ("clipped, retried", Begins),
            ("bfloat16", Told),
            ("in order", Begins),
        )
    ),
]


@pytest.mark.parametrize(("case", "told"), TOLD)
def test_patience_ends_a_task_as_finished(case, told):
    callback = told()
    task = task_of(keep_best=KeepBest("validation_loss", patience=2), callbacks=[callback], **CASES[case])
    other = task_of(name="other")
    report = orchestra_of(task, other).train_models()
    found = report.tasks["task"]
    assert (found.status, found.stopped_early, found.error) == ("finished", True, None)
    assert found.steps == len(found.losses) == 4 * STEPS
    assert found.losses == plain(4 * STEPS, **of_the_loop(case))[1].losses
    assert callback.calls == ["validation", 0, "validation", 1, "validation", 2, "validation", 3]
    assert [step for step, _ in callback.best] == [STEPS, 2 * STEPS, 2 * STEPS, 2 * STEPS]
    assert (callback.ends, callback.state) == (1, ("finished", True, 2 * STEPS))
    assert report.tasks["other"].steps == EPOCHS * STEPS
    assert not report.tasks["other"].stopped_early
    assert_is_plain(task, 2 * STEPS, **of_the_loop(case))


@pytest.mark.parametrize(("case", "told"), TOLD)
def test_patience_counts_epochs_by_the_training_loss(case, told):
    callback = told()
    task = task_of(
        validated=False, loader=Scaled(), keep_best=KeepBest("loss", patience=2), callbacks=[callback], **CASES[case]
    )
    report = run(task)
    assert (report.status, report.stopped_early, report.steps) == ("finished", True, 4 * STEPS)
    assert callback.calls == [0, 1, 2, 3]
    assert_is_plain(task, 2 * STEPS, loader=Scaled(), **of_the_loop(case))


def test_with_its_last_batch_a_task_ends_by_itself():
    task = task_of(epochs=4, keep_best=KeepBest("validation_loss", patience=2))
    report = run(task)
    assert (report.status, report.stopped_early, report.steps) == ("finished", False, 4 * STEPS)
    assert_is_plain(task, 2 * STEPS)


@pytest.mark.rest
@pytest.mark.parametrize(("raised", "status"), [(StopTask(), "stopped"), (RuntimeError("boom"), "failed")])
def test_however_it_ends_the_best_weights_are_handed_back(raised, status):
    task, other = task_of(callbacks=[At(3 * STEPS + 2, raises(raised))]), task_of(name="other", epochs=1)
    report = orchestra_of(task, other).train_models().tasks["task"]
    assert (report.status, report.best_step, report.steps) == (status, 2 * STEPS, 3 * STEPS + 2)
    assert_is_plain(task, 2 * STEPS)


def test_before_its_first_validation_a_stopped_task_keeps_its_last_step():
    task = task_of(callbacks=[At(STEPS - 1, raises(StopTask()))])
    assert run(task).best_step is None
    assert_is_plain(task, STEPS - 1)


@pytest.mark.rest
def test_a_callback_that_raises_at_the_last_validation_fails_the_task():
    class Raises(Callback):
        def on_validation(self, report):
            if report.stopped_early or len(report.validation_losses) == 4:
                raise RuntimeError("boom")

    task, other = (
        task_of(keep_best=KeepBest("validation_loss", patience=2), callbacks=[Raises()]),
        task_of(name="other"),
    )
    report = orchestra_of(task, other).train_models().tasks["task"]
    assert report.status == "failed"
    assert_is_plain(task, 2 * STEPS)


def test_the_plan_counts_the_best_weights():
    with_best, without = task_of(), task_of(name="other", keep_best=None)
    plan = orchestra_of(with_best, without).generate()
    buffers = sum(buffer.nbytes for buffer in with_best.model.buffers())
    parameters = sum(parameter.nbytes for parameter in with_best.model.parameters())
    dram = plan.tasks["task"].dram
    assert parameters + buffers <= dram["best"] <= parameters + buffers + 64 * len(list(with_best.model.parameters()))
    assert plan.tasks["other"].dram["best"] == 0


# -- resumed


class Boom(RuntimeError):
    """What interrupts a task."""


@pytest.mark.rest
@covering(
    strength=1,
    by=["validation_loss", "loss"],
    case=["early release", "bfloat16"],
    after=[STEPS, 2 * STEPS + 1],
)
def test_a_resumed_task_has_the_same_best(tmp_path, by, case, after):
    def task(**options):
        return task_of(validation=steady(2, seed=2), keep_best=KeepBest(by, patience=2), **CASES[case], **options)

    whole = task()
    expected = run(whole, directory=tmp_path / "whole", checkpoint_every=1)
    cut = orchestra_of(task(callbacks=[At(after, raises(Boom()))]), directory=tmp_path / "cut", checkpoint_every=1)
    with pytest.raises(Boom):
        cut.train_models()
    again = task()
    found = orchestra_of(again, num_devices=2, directory=tmp_path / "cut").train_models(resume=True).tasks["task"]
    for name in ("status", "steps", "losses", "validation_losses", "best_step", "best_value", "stopped_early"):
        assert getattr(found, name) == getattr(expected, name), name
    exact.assert_same_state(zoo.state(again.model), zoo.state(whole.model))
    states = [load_newest(tmp_path / each) for each in ("whole", "cut")]
    mine, theirs = (each.read_tensors("task", "best") for each in states)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_a_task_that_ended_early_is_over_until_its_patience_is_longer(tmp_path):
    def task(patience, begun=0):
        validation = Scaled(2, seed=2, scales=(0.5, 5.0, 5.0, 5.0, 5.0), begun=begun)
        return task_of(validation=validation, keep_best=KeepBest("validation_loss", patience=patience))

    first = task(2)
    report = run(first, directory=tmp_path)
    assert (report.steps, report.best_step, report.stopped_early) == (3 * STEPS, STEPS, True)
    again = task(2)
    orchestra = orchestra_of(again, directory=tmp_path)
    report = orchestra.train_models(resume=True).tasks["task"]
    assert (report.steps, report.best_step, report.stopped_early) == (3 * STEPS, STEPS, True)
    assert report.status == "finished"
    assert_is_plain(again, STEPS)
    longer = orchestra_of(task(3, begun=2), directory=tmp_path).train_models(resume=True).tasks["task"]
    assert (longer.status, longer.steps) == ("finished", 4 * STEPS)


def test_a_resume_by_another_figure_is_refused(tmp_path):
    run(task_of(epochs=1), directory=tmp_path)
    other = task_of(epochs=2, keep_best="error", metrics={"error": error})
    with refused(says="keep_best 'error' 'validation_loss'"):
        orchestra_of(other, directory=tmp_path).train_models(resume=True)


def test_hparams_are_in_the_report_also_of_a_task_that_was_over(tmp_path):
    hparams = {"lr": LR, "width": [16, 8], "note": None}
    assert run(task_of(epochs=1, hparams=hparams), directory=tmp_path).hparams == hparams
    again = orchestra_of(task_of(epochs=1, hparams={"lr": 1}), directory=tmp_path)
    assert again.train_models(resume=True).tasks["task"].hparams == {"lr": 1}
