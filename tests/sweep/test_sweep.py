"""Trials of a sweep train as if alone, and the study says what became of them."""

import _thread
import copy
import gc
import math
import pickle
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hydra_engine import (
    Callback,
    CheckpointError,
    EmulatedDevice,
    HostOutOfMemory,
    KeepBest,
    ModelOrchestrator,
    ModelTask,
    StopTask,
)
from hydra_engine.host import HostPool
from hydra_engine.planning import DramLimit
from hydra_engine.sweep import Sweep
from hydra_engine.sweep.search import Search
from hydra_engine.system import dram
from partitioners import Presharded
from tests.refused import names, refused
from tests.sweep.space import EPOCHS, STEPS, accuracy, batches, build, keeping, plain

optuna = pytest.importorskip("optuna")
optuna.logging.set_verbosity(optuna.logging.WARNING)

COMPLETE, PRUNED, FAIL = (optuna.trial.TrialState[name] for name in ("COMPLETE", "PRUNED", "FAIL"))
PRUNERS = {
    "halving": lambda: optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=2),
    "hyperband": lambda: optuna.pruners.HyperbandPruner(min_resource=1, max_resource=EPOCHS, reduction_factor=2),
    "none": optuna.pruners.NopPruner,
}


def study_of(pruner="none", sampler=None, **options):
    sampler = sampler or optuna.samplers.RandomSampler(seed=5)
    # Hyperband goes by the study's name.
    return optuna.create_study(study_name="one", sampler=sampler, pruner=PRUNERS[pruner](), **options)


def sweep_of(build_task=build, *, num_devices=1, **options):
    options = {"num_trials": 4, "parallel": 2, **options}
    sweep = Sweep(build_task, devices=[EmulatedDevice("1MiB") for _ in range(num_devices)], **options)
    sweep.verbose = 0
    return sweep


def states(study):
    return [trial.state for trial in study.trials]


@pytest.mark.parametrize("pruner", ["halving", "none", pytest.param("hyperband", marks=pytest.mark.rest)])
def test_one_by_one_it_decides_as_optuna_does(pruner):
    def objective(trial):
        result, _ = plain(trial)
        for step, value in enumerate(result.validation_losses):
            trial.report(value, step)
            if trial.should_prune():
                raise optuna.TrialPruned
        return result.validation_losses[-1]

    expected = study_of(pruner)
    expected.optimize(objective, n_trials=6)
    study = sweep_of(study=study_of(pruner), num_trials=6, parallel=1).run()
    for mine, theirs in zip(study.trials, expected.trials, strict=True):
        assert (mine.state, mine.params, mine.values) == (theirs.state, theirs.params, theirs.values)
        assert mine.intermediate_values == theirs.intermediate_values
    assert (PRUNED in states(study)) == (pruner != "none")


@pytest.mark.parametrize("num_devices", [pytest.param(1, marks=pytest.mark.rest), 2])
def test_together_each_trial_has_the_bits_of_plain_pytorch(num_devices):
    kept = {}
    study = study_of("halving")
    assert sweep_of(keeping(kept), study=study, num_trials=7, parallel=3, num_devices=num_devices).run() is study
    assert sorted(kept) == list(range(7))
    assert set(states(study)) <= {COMPLETE, PRUNED}
    for trial in study.trials:
        losses, validation_losses, weights = kept[trial.number]
        num_epochs = len(trial.intermediate_values)
        assert len(losses) == num_epochs * STEPS
        result, model = plain(trial, max_steps=None if num_epochs == EPOCHS else len(losses))
        assert losses == result.losses
        assert all(map(torch.equal, weights, model.parameters()))
        whole, _ = plain(trial)
        assert validation_losses == whole.validation_losses[:num_epochs]
        assert list(trial.intermediate_values.values()) == validation_losses
        assert trial.value == validation_losses[-1]


def test_a_trial_that_raises_is_a_failed_trial():
    class Fail(Callback):
        def on_step(self, report):
            if report.steps == 3:
                raise ArithmeticError("its third step")

    def build_or_fail(trial):
        if trial.number == 0:
            raise OSError("no such file")
        if trial.number == 1:
            return build(trial, Fail())
        if trial.number == 2:
            return build(trial, partitioner=Presharded([1, 2]))  # of four layers
        if trial.number == 3:
            raise optuna.TrialPruned
        return build(trial)

    study = sweep_of(build_or_fail, num_trials=7).run()
    assert states(study) == [FAIL, FAIL, FAIL, PRUNED, COMPLETE, COMPLETE, COMPLETE]
    names(study.trials[0].user_attrs["error"], says="OSError:")
    names(study.trials[1].user_attrs["error"], says="ArithmeticError:")


def test_a_model_that_fits_no_device_is_a_failed_trial():
    def build_large(trial):
        task = build(trial)
        if trial.number % 2 == 0:
            large = nn.Sequential(nn.Linear(8, 100_000), nn.Linear(100_000, 3))
            return ModelTask(large, F.cross_entropy, batches(), validation=batches(2))
        return task

    study = sweep_of(build_large).run()
    assert states(study) == [FAIL, COMPLETE, FAIL, COMPLETE]
    names(study.trials[0].user_attrs["error"], task="trial-0", says="ShardDoesNotFit:")


def test_when_every_trial_has_failed_the_first_failure_is_raised():
    def build_and_fail(trial):
        raise OSError(f"no data for trial {trial.number}")

    with refused(OSError, says="trial 0"):
        sweep_of(build_and_fail).run()


def test_a_loss_that_is_not_a_number_is_a_failed_trial():
    def build_nan(trial):
        task = build(trial)
        task.validation = [(torch.full((5, 8), torch.nan), torch.zeros(5, dtype=torch.long))]
        return task if trial.number == 1 else build(trial)

    study = sweep_of(build_nan, study=study_of()).run()
    assert states(study) == [COMPLETE, FAIL, COMPLETE, COMPLETE]
    names(study.trials[1].user_attrs["error"], says="validation_loss nan")


@pytest.mark.rest
def test_a_callback_may_end_a_trial_which_is_completed_with_its_last_value():
    class Stop(Callback):
        def on_epoch(self, report, epoch):
            if epoch == 1:
                raise StopTask

    study = sweep_of(lambda trial: build(trial, Stop())).run()
    assert states(study) == [COMPLETE] * 4
    for trial in study.trials:
        assert trial.user_attrs["steps"] == 2 * STEPS
        assert trial.value == plain(trial)[0].validation_losses[1]


def beside_two(callback, **options):
    """Trial 1 of three in two slots, which has a callback; trial 0 waits until trial 2 has come in its place."""
    has_come = threading.Event()

    class Wait(Callback):
        def on_step(self, report):
            assert has_come.wait(60)

    def build_and_tell(trial):
        if trial.number == 2:
            has_come.set()
        if trial.number == 1:
            return build(trial, callback, **options)
        return build(trial, *([Wait()] if trial.number == 0 else []))

    study = sweep_of(build_and_tell, study=study_of(), num_trials=3).run()
    assert (study.trials[0].state, study.trials[2].state) == (COMPLETE, COMPLETE)
    return study.trials[1]


@pytest.mark.parametrize("epoch", [0, 1])
def test_a_trial_that_a_callback_ends_before_an_epoch_gives_way_to_the_next(epoch):
    class Stop(Callback):
        def on_epoch_begin(self, report, number):
            if number == epoch:
                raise StopTask

    trial = beside_two(Stop())
    if epoch == 0:
        assert trial.state == FAIL
        names(trial.user_attrs["error"], task="trial-1", says="RuntimeError: validation")
    else:
        assert (trial.state, trial.value) == (COMPLETE, plain(trial)[0].validation_losses[0])
        assert trial.user_attrs["steps"] == STEPS


@pytest.mark.parametrize("hook", ["on_step", "on_task_end"])
def test_a_trial_whose_callback_does_not_return_gives_way_to_the_next(hook, monkeypatch, hangs):
    monkeypatch.setattr("hydra_engine.sweep.search.LOOK_S", 0.02)
    may_return, is_called, blocked = threading.Event(), threading.Event(), Callback()
    hangs.append(is_called)

    def block(report):
        is_called.set()
        may_return.wait(60)

    setattr(blocked, hook, block)
    try:
        trial = beside_two(blocked, timeout_s=0.2)
    finally:
        may_return.set()
        for each in [thread for thread in threading.enumerate() if thread.name == "trial-1-callbacks"]:
            each.join()
    assert trial.state == FAIL
    names(trial.user_attrs["error"], task="trial-1", says=f"CallbackTimeout: {hook} 0.2")


@pytest.mark.parametrize("is_done", [pytest.param(False, marks=pytest.mark.rest), True])
def test_a_storage_that_does_not_answer_for_a_moment_fails_no_trial(is_done, monkeypatch):
    """is_done: it has done what it was asked for, and the answer alone was lost."""
    monkeypatch.setattr("hydra_engine.sweep.study.PAUSE_S", 0.0)
    calls = []

    def now_and_then(method):
        def call(storage, trial_id, *args, **options):
            if optuna.trial.TrialState.RUNNING in options.values():  # a trial is asked for
                return method(storage, trial_id, *args, **options)
            calls.append(method.__name__)
            if len(calls) % 2 == 0:
                return method(storage, trial_id, *args, **options)
            if is_done:
                method(storage, trial_id, *args, **options)
            raise optuna.exceptions.StorageInternalError("the database is locked")

        return call

    study = study_of("halving")
    sweep = sweep_of(study=study, parallel=1)
    with monkeypatch.context() as patched:
        for name in ("set_trial_intermediate_value", "set_trial_state_values"):
            owner = optuna.storages.InMemoryStorage
            patched.setattr(owner, name, now_and_then(getattr(owner, name)))
        sweep.run()
    assert set(calls) == {"set_trial_intermediate_value", "set_trial_state_values"}
    expected = sweep_of(study=study_of("halving"), parallel=1).run()
    found = [
        [(trial.state, trial.values, trial.intermediate_values) for trial in each.trials] for each in (study, expected)
    ]
    assert found[0] == found[1]


@pytest.mark.rest
def test_a_metric_is_a_trials_value():
    study = sweep_of(
        lambda trial: build(trial, metrics={"accuracy": accuracy}), metric="accuracy", direction="maximize"
    ).run()
    assert study.direction.name == "MAXIMIZE"
    assert all(trial.value in {k / 10 for k in range(11)} for trial in study.trials)


@pytest.mark.rest
def test_several_objectives():
    study = sweep_of(
        lambda trial: build(trial, metrics={"accuracy": accuracy}),
        metric=["validation_loss", "accuracy"],
        direction=["minimize", "maximize"],
    ).run()
    assert states(study) == [COMPLETE] * 4
    for trial in study.trials:
        assert trial.values[0] == plain(trial)[0].validation_losses[-1]
        assert trial.intermediate_values == {}
    assert study.best_trials


def test_a_grid_is_trained_once_and_then_the_sweep_ends():
    sampler = optuna.samplers.GridSampler({"width": [4, 8], "lr": [0.01, 0.1]}, seed=1)
    study = sweep_of(study=study_of(sampler=sampler), num_trials=9, parallel=1).run()
    points = [(trial.params["width"], trial.params["lr"]) for trial in study.trials]
    assert sorted(points) == [(4, 0.01), (4, 0.1), (8, 0.01), (8, 0.1)]


class Most(Callback):
    """Counts trials that hold their weights."""

    def __init__(self, models, counts):
        self.models, self.counts = models, counts

    def on_step(self, report):
        self.counts.append(sum(any(p.numel() for p in model.parameters()) for model in self.models))


@pytest.mark.rest
@pytest.mark.parametrize("parallel", [pytest.param(1, marks=pytest.mark.rest), 2])
def test_so_many_models_hold_weights_at_once(parallel):
    models, counts = [], []

    def build_and_count(trial):
        task = build(trial, Most(models, counts))
        models.append(task.model)
        return task

    sweep_of(build_and_count, num_trials=4, parallel=parallel).run()
    assert len(models) == 4
    assert max(counts) <= parallel
    assert not any(parameter.numel() for model in models for parameter in model.parameters())


@pytest.mark.rest
def test_of_a_trial_that_is_over_nothing_is_held():
    """Not its task, its loader or its model, while others train; by counting references alone."""
    torch.optim.Adam([nn.Parameter(torch.zeros(1))])  # the first imports torch._dynamo, which leaves frames in cycles
    alive, is_freed = {}, threading.Event()

    class Wait(Callback):
        def on_step(self, report):
            assert is_freed.wait(60)

    def freed(number):
        del alive[number]
        if alive.keys() == {1}:
            is_freed.set()

    def build_and_watch(trial):
        task = build(trial, *([Wait()] if trial.number == 1 else []))
        alive[trial.number] = weakref.ref(task)
        weakref.finalize(task, freed, trial.number).atexit = False
        return task

    gc.collect()
    gc.disable()
    try:
        sweep_of(build_and_watch, num_trials=5).run()
    finally:
        gc.enable()
    assert is_freed.is_set()


def bytes_of(trial, build_task=build):
    """DRAM that a trial's task takes, by its plan."""
    orchestra = ModelOrchestrator([build_task(optuna.trial.FixedTrial(trial))], devices=[EmulatedDevice("1MiB")])
    orchestra.verbose = 0
    return orchestra.generate().tasks["task-0"].dram_bytes


def build_tiny(trial, *callbacks):
    """A task that takes little time to plan, and as much DRAM as every other trial's."""
    lr = trial.suggest_float("lr", 1e-3, 1.0)
    return ModelTask(
        nn.Sequential(nn.Linear(8, 3)), F.cross_entropy, batches(1), lr, validation=batches(1), callbacks=callbacks
    )


def grid_of(*learning_rates):
    return optuna.samplers.GridSampler({"width": [4, 8], "lr": list(learning_rates)}, seed=2)


@pytest.mark.rest
@pytest.mark.parametrize(("num_trials", "num_held"), [(9, 3), pytest.param(60, 6, marks=pytest.mark.rest)])
def test_more_trials_than_dram_holds(num_trials, num_held, monkeypatch):
    """All complete, none is trained twice, and DRAM is never past the limit: by the plans, and by pools that are open.

    The first ones wait for each other, so that the limit is reached, whoever is fast. Of models that are over and not
    told yet the weights alone are in DRAM, so there may be more models than that.
    """
    each = bytes_of({"lr": 0.1}, build_tiny)
    limits, counted, pools, most, built, begun, is_full = set(), [], set(), [], [], set(), threading.Event()
    check, take, give_back = DramLimit.check, HostPool.open, HostPool.close

    def checked(limit, planned):
        check(limit, planned)
        limits.add(limit)
        counted.append(limit.held_bytes)

    def opened(pool, *arguments):
        pools.add(pool)
        most.append(len(pools))
        take(pool, *arguments)

    def closed(pool, **options):
        give_back(pool, **options)
        pools.discard(pool)

    class Full(Callback):
        def on_step(self, report):
            begun.add(report.name)
            if len(begun) >= num_held:
                is_full.set()
            assert is_full.wait(300)
            counted.extend(limit.held_bytes for limit in list(limits))

    def build_and_count(trial):
        built.append(trial.number)
        return build_tiny(trial, Full())

    monkeypatch.setattr(DramLimit, "check", checked)
    monkeypatch.setattr(HostPool, "open", opened)
    monkeypatch.setattr(HostPool, "close", closed)
    study = study_of()
    sweep_of(build_and_count, study=study, num_trials=num_trials, parallel=2 * num_held, dram=num_held * each).run()
    assert [trial.number for trial in study.trials] == list(range(num_trials))
    assert states(study) == [COMPLETE] * num_trials
    assert built == list(range(num_trials))
    assert max(counted) == num_held * each
    assert max(most) == num_held
    assert not pools


def test_a_trial_that_is_larger_than_those_before_waits_for_room():
    """Its size is known once it is built: then it gives its DRAM back, and comes again under its number."""
    kept, built = {}, []

    def build_and_note(trial):
        built.append(trial.number)
        return keeping(kept)(trial)

    dram_bytes = bytes_of({"width": 8, "lr": 0.1})
    study = study_of(sampler=grid_of(0.01, 0.1, 1.0))
    sweep_of(build_and_note, study=study, num_trials=6, parallel=4, dram=dram_bytes).run()
    assert [trial.number for trial in study.trials] == list(range(6))
    assert states(study) == [COMPLETE] * 6
    assert set(built) == set(range(6))
    for trial in study.trials:
        assert kept[trial.number][0] == plain(trial)[0].losses


def test_a_trial_that_alone_is_past_the_limit_has_failed():
    dram_bytes = bytes_of({"width": 8, "lr": 0.1}) - 1
    study = sweep_of(study=study_of(sampler=grid_of(0.01, 0.1)), parallel=4, dram=dram_bytes).run()
    assert states(study) == [COMPLETE if trial.params["width"] == 4 else FAIL for trial in study.trials]
    for trial in study.trials:
        if trial.state == FAIL:
            names(trial.user_attrs["error"], task=f"trial-{trial.number}", says="HostOutOfMemory:")


@pytest.mark.parametrize("num_missing", [0, 1])
def test_trials_over_one_base_begin_together_where_dram_holds_it_once(monkeypatch, num_missing):
    """All four, to the byte; of four bases there would be no room for two."""
    base = nn.Linear(8, 256).requires_grad_(False)

    def over_base(trial):
        lr = trial.suggest_float("lr", 1e-3, 1.0)
        return ModelTask(nn.Sequential(base, nn.Linear(256, 3)), F.cross_entropy, batches(1), lr, validation=batches(1))

    tasks = [over_base(optuna.trial.FixedTrial({"lr": 0.1})) for _ in range(4)]
    orchestra = ModelOrchestrator(tasks, devices=[EmulatedDevice("1MiB")])
    orchestra.verbose = 0
    dram_bytes = sum(plan.dram_bytes for plan in orchestra.generate().tasks.values()) - num_missing
    del orchestra, tasks
    begun, train = [], Search._train

    def noted(search):
        begun.append((len(search._live), search._orchestra.policy))
        train(search)

    monkeypatch.setattr(Search, "_train", noted)
    study = sweep_of(over_base, study=study_of(), parallel=4, dram=dram_bytes).run()
    assert states(study) == [COMPLETE] * 4
    assert begun[0] == (4 - num_missing, "in-step")


def test_a_trial_whose_checkpoint_cannot_be_read_has_failed_alone(tmp_path, monkeypatch):
    place = Search._place

    def damaged(search, live):
        if live.trial.number in (0, 2):
            raise CheckpointError("no checkpoint is whole")
        place(search, live)

    monkeypatch.setattr(Search, "_place", damaged)
    study = sweep_of(study=study_of(), checkpoint_dir=tmp_path).run()
    assert states(study) == [FAIL, COMPLETE, FAIL, COMPLETE]
    names(study.trials[0].user_attrs["error"], says="CheckpointError:")


@pytest.mark.rest
def test_where_dram_has_no_room_a_trial_waits_for_another_to_end(monkeypatch):
    begun, most = set(), []
    monkeypatch.setattr(dram, "available_dram_bytes", lambda: 10 if begun else 1 << 30)

    class Fill(Callback):
        def on_step(self, report):
            begun.add(report.name)
            most.append(len(begun))

        def on_task_end(self, report):
            begun.discard(report.name)

    study = sweep_of(lambda trial: build(trial, Fill()), num_trials=5, parallel=4).run()
    assert states(study) == [COMPLETE] * 5
    assert max(most) < 4


@pytest.mark.rest
def test_where_devices_have_no_room_beside_training_they_are_lent_for_the_rehearsal_of_the_next_trial():
    device = EmulatedDevice("1MiB")
    device.has_room_for_planning = False
    kept = {}
    sweep = Sweep(keeping(kept), num_trials=5, parallel=2, devices=[device], study=study_of())
    sweep.verbose = 0
    study = sweep.run()
    assert states(study) == [COMPLETE] * 5
    for trial in study.trials:
        assert kept[trial.number][0] == plain(trial)[0].losses


@pytest.mark.parametrize("is_own", [False, True])
def test_interrupted_without_a_folder_running_trials_have_failed(is_own):
    class Interrupt(Callback):
        def on_step(self, report):
            if report.name == "trial-0" and report.steps == 2:
                _thread.interrupt_main()

    study = study_of() if is_own else None
    sweep = sweep_of(lambda trial: build(trial, Interrupt()), study=study, direction=None if is_own else "minimize")
    assert sweep.study is None
    with pytest.raises(KeyboardInterrupt):
        sweep.run()
    found = sweep.study
    assert found is study or not is_own
    num_begun = len(found.trials)
    assert set(states(found)) == {FAIL}
    names(found.trials[0].user_attrs["error"], says="KeyboardInterrupt")
    assert sweep.run() is found is sweep.study
    assert states(found) == [FAIL] * num_begun + [COMPLETE] * (4 - num_begun)


def test_the_default_is_two_models_per_device():
    devices = [EmulatedDevice("1MiB") for _ in range(3)]
    assert Sweep(build, devices=devices)._settings.parallel == 6
    assert Sweep(build, devices=devices, num_trials=4)._settings.parallel == 4


def test_a_line_says_what_became_of_each_trial(capsys):
    sweep = sweep_of(num_trials=1)
    sweep.verbose = 1
    study = sweep.run()
    [line] = capsys.readouterr().out.splitlines()
    value = study.trials[0].value
    begin = f"1/1 done, best {value:.4g}; trial 0: completed, validation_loss {value:.6g} after 12 steps, width="
    assert line.startswith(begin)
    assert len(line) <= 100


@pytest.mark.parametrize("direction", ["minimize", "maximize"])
def test_the_lines_of_a_sweep_count_trials_and_have_the_best_value(direction, capsys):
    """Of all that are over, failed and pruned ones too, and those of an earlier call."""
    study = study_of(direction=direction)

    def build_some(trial):
        if trial.number == 1:
            raise OSError("no such file: " + "a/long/path" * 20)
        if trial.number == 2:
            raise optuna.TrialPruned
        return build_tiny(trial)

    for num_trials in (4, 5):
        sweep = sweep_of(build_some, study=study, num_trials=num_trials, parallel=1, direction=direction)
        sweep._sweep_id, sweep.verbose = "mine", 1
        sweep.run()
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 100 for line in lines)
    assert "".join(line.strip() for line in lines if line[0] == " ").endswith("a/long/path")
    heads = [line for line in lines if line[0] != " "]
    values = [trial.value for trial in study.trials]
    better = max if direction == "maximize" else min
    best = [better(value for value in values[: k + 1] if value is not None) for k in range(5)]
    in_all = [4, 4, 4, 4, 5]
    assert [line.split(";")[0] for line in heads] == [f"{k + 1}/{in_all[k]} done, best {best[k]:.4g}" for k in range(5)]


def tiny_sweep(build_task=None, *, study=None, **options):
    return sweep_of(build_task or build_tiny, study=study or study_of(), **{"num_trials": 6, **options})


class Each:
    """A loader whose batches a function yields."""

    def __init__(self, function):
        self.function = function

    def __iter__(self):
        return self.function()


class At(Callback):
    """Does something once, at a hook."""

    def __init__(self, hook, job):
        setattr(self, hook, lambda report, *_: job())


@pytest.mark.parametrize(
    "hook",
    [None, "on_step", *(pytest.param(hook, marks=pytest.mark.rest) for hook in ("on_epoch_begin", "on_task_end"))],
)
def test_a_trial_stops_the_study_as_in_optuna(hook):
    """In `build_task`, or in a callback: it ends in order, no other begins, and the next call goes on."""

    def build_and_stop(trial):
        if trial.number == 2 and hook is None:
            trial.study.stop()
        return build_tiny(trial, *([At(hook, trial.study.stop)] if trial.number == 2 and hook else []))

    def objective(trial):
        if trial.number == 2:
            trial.study.stop()
        return trial.suggest_float("lr", 1e-3, 1.0)

    expected = study_of()
    expected.optimize(objective, n_trials=6)
    sweep = tiny_sweep(build_and_stop, parallel=1)
    study = sweep.run()
    assert states(study) == states(expected) == [COMPLETE] * 3
    assert "stop" not in vars(study)
    assert states(sweep.run()) == [COMPLETE] * 6
    with pytest.raises(RuntimeError, match="stop"):
        study.stop()  # Optuna's own again


def test_a_loss_that_holds_its_study_stops_it():
    """It is tried before the trial trains, on copies of what it holds."""

    def build_and_stop(trial):
        def loss_fn(output, target):
            trial.study.stop()
            return F.cross_entropy(output, target)

        task = build_tiny(trial)
        return ModelTask(task.model, loss_fn, batches(1), validation=batches(1))

    assert states(tiny_sweep(build_and_stop, num_trials=3, parallel=1).run()) == [COMPLETE]


def test_trials_that_train_as_the_study_is_stopped_are_trained_to_their_end():
    have_begun = threading.Barrier(2)

    def build_two(trial):
        def stop():
            have_begun.wait(60)
            trial.study.stop()

        return build(trial, *([At("on_task_end", stop)] if trial.number < 2 else []))

    study = sweep_of(build_two, study=study_of(), num_trials=9).run()
    assert states(study) == [COMPLETE] * 2
    assert [trial.user_attrs["steps"] for trial in study.trials] == [EPOCHS * STEPS] * 2


def test_a_study_may_be_copied_while_a_sweep_runs():
    """With Optuna's own `stop`."""
    copies = []

    def build_and_copy(trial):
        copies.extend((pickle.loads(pickle.dumps(trial.study)), copy.deepcopy(trial.study)))
        return build_tiny(trial)

    tiny_sweep(build_and_copy, num_trials=1).run()
    for each in copies:
        each.optimize(lambda trial: trial.study.stop(), n_trials=5)
        assert len(each.trials) == 2


@pytest.mark.parametrize(("timeout", "num_trials"), [(0, 0), (25, 3), (math.inf, 6)])
def test_no_trial_begins_after_the_timeout(timeout, num_trials, monkeypatch):
    now_s = [0.0]
    monkeypatch.setattr("hydra_engine.sweep.study.time", SimpleNamespace(monotonic=lambda: now_s[0]))

    def build_slowly(trial):
        now_s[0] += 10
        return build_tiny(trial)

    study = tiny_sweep(build_slowly, parallel=1, timeout=timeout).run()
    assert states(study) == [COMPLETE] * num_trials


@pytest.mark.parametrize(
    "hook",
    [
        "on_validation",
        "on_epoch_begin",
        *(pytest.param(hook, marks=pytest.mark.rest) for hook in ("on_step", "on_epoch", "on_task_end")),
    ],
)
def test_a_callback_prunes_its_trial_as_optunas_own_do(hook, tmp_path):
    """It has ended in order: its report says stopped, and its model comes back."""
    reports = []

    class Prune(Callback):
        pass

    def prune(_, report, *arguments):
        reports.append(report)
        raise optuna.TrialPruned("not promising")

    setattr(Prune, hook, prune)

    def build_pruned(trial):
        return build(trial, *([Prune()] if trial.number == 1 else []))

    sweep = sweep_of(build_pruned, study=study_of(), num_trials=3, checkpoint_dir=tmp_path)
    study = sweep.run()
    assert states(study) == [COMPLETE, PRUNED, COMPLETE]
    assert "error" not in study.trials[1].user_attrs
    assert sweep.run() is study
    assert len(study.trials) == 3
    if hook == "on_task_end":
        assert reports[0].status == "finished"
    else:
        assert (reports[0].status, reports[0].exception) == ("stopped", None)
        names(reports[0].stop_reason, says=f"{hook} pruned")
    if hook != "on_epoch_begin":
        steps = {"on_step": 1, "on_task_end": EPOCHS * STEPS}.get(hook, STEPS)
        expected = plain(study.trials[1], max_steps=steps)[1].parameters()
        assert all(map(torch.equal, sweep.model(study.trials[1]).parameters(), expected))


def test_a_trial_that_a_callback_prunes_gives_way_to_the_next():
    def prune():
        raise optuna.TrialPruned

    assert beside_two(At("on_step", prune)).state == PRUNED


@pytest.mark.parametrize("what", ["metric", "loss", "loader"])
def test_whatever_of_a_trial_raises_trial_pruned_prunes_it(what):
    def prune(*_):
        raise optuna.TrialPruned

    def loader():
        yield from batches(1)
        prune()

    def build_pruned(trial):
        task = build_tiny(trial)
        if trial.number == 1 and what == "metric":
            task.metrics = {"mine": prune}
        elif trial.number == 1:
            loss, train = (prune, batches(1)) if what == "loss" else (F.cross_entropy, Each(loader))
            task = ModelTask(task.model, loss, train, validation=batches(1))
        return task

    study = tiny_sweep(build_pruned, num_trials=3).run()
    assert states(study) == [COMPLETE, PRUNED, COMPLETE]


def test_a_trial_is_built_again_where_build_task_has_stopped_the_study(tmp_path):
    def build_and_stop(trial):
        trial.study.stop()
        return build(trial)

    sweep = sweep_of(build_and_stop, checkpoint_dir=tmp_path)
    study = sweep.run()
    assert states(study) == [COMPLETE]
    assert all(map(torch.equal, sweep.model(study.trials[0]).parameters(), plain(study.trials[0])[1].parameters()))


def test_out_of_dram_alone_is_a_failed_trial(monkeypatch):
    monkeypatch.setattr(dram, "available_dram_bytes", lambda: 10)
    with pytest.raises(HostOutOfMemory):
        sweep_of(num_trials=2).run()


@pytest.mark.rest
def test_a_trial_that_is_built_too_late_to_join_trains_in_the_next_run():
    is_over = threading.Event()
    kept = {}

    class End(Callback):
        def on_task_end(self, report):
            is_over.set()

    def build_late(trial):
        if trial.number == 0:
            return build(trial, End())
        if trial.number == 1:
            assert is_over.wait(60)
            for thread in threading.enumerate():
                if thread.name.startswith("trial-0"):
                    thread.join()  # the run is over
        return keeping(kept)(trial)

    study = sweep_of(build_late, num_trials=3).run()
    assert states(study) == [COMPLETE] * 3
    for trial in study.trials[1:]:
        assert kept[trial.number][0] == plain(trial)[0].losses


def test_a_second_call_goes_on_with_the_study():
    sweep = sweep_of(num_trials=2)
    study = sweep.run()
    assert sweep.run() is study
    assert len(study.trials) == 2


def test_the_value_of_a_trial_is_that_of_the_weights_it_leaves():
    reports, given = {}, {}

    class Notes(Callback):
        def __init__(self, number):
            self.number = number

        def on_task_end(self, report):
            reports[self.number] = report

    def build_best(trial):
        given[trial.number] = {"depth": 2} if trial.number == 1 else {}
        return build(
            trial,
            Notes(trial.number),
            metrics={"accuracy": accuracy},
            keep_best=KeepBest("accuracy", "max"),
            hparams=given[trial.number],
        )

    study = study_of(directions=["minimize", "maximize"])  # whose sampler has a seed
    sweep_of(build_best, study=study, metric=["validation_loss", "accuracy"]).run()
    for trial in study.trials:
        report = reports[trial.number]
        at = report.validation_steps.index(report.best_step)
        accuracies = report.validation_metrics["accuracy"]
        assert at == accuracies.index(max(accuracies))
        assert trial.values == [report.validation_losses[at], accuracies[at]]
        assert report.hparams == (given[trial.number] or trial.params)
    assert any(report.best_step != report.validation_steps[-1] for report in reports.values())
