"""Synchronous successive halving: trials wait at a rung on disk, and the best go on with the same bits."""

import threading
from types import SimpleNamespace

import pytest

from hydra_engine import Callback, EmulatedDevice, PauseTask
from hydra_engine.sweep import Rungs, Sweep
from hydra_engine.sweep.rungs import RUNG, mark
from hydra_engine.sweep.search import Search
from hydra_engine.sweep.study import Trials
from tests.refused import names
from tests.sweep.space import DEVICES, EPOCHS, STEPS, First, Interrupt, build, plain, study_in

optuna = pytest.importorskip("optuna")
optuna.logging.set_verbosity(optuna.logging.WARNING)

NUM_TRIALS = 4
RUNGS = Rungs(min_resource=1, reduction_factor=2)


def sweep_in(folder, build_task=build, **options):
    devices = [EmulatedDevice(size) for size in DEVICES]
    options = {"num_trials": NUM_TRIALS, "parallel": 2, "rungs": RUNGS, "devices": devices, **options}
    sweep = Sweep(
        build_task,
        study=study_in(folder),
        checkpoint_dir=folder / "sweep",
        **options,
    )
    sweep.verbose = 0
    return sweep


def assert_halved(study):
    """Four come to the first rung, two to the second, and one to the end: the best ones of plain PyTorch."""
    losses, first, second = ranked(study)
    assert len(study.trials) == NUM_TRIALS
    for trial in study.trials:
        number = trial.number
        num_validations = EPOCHS if number in second else 2 if number in first else 1
        assert list(trial.intermediate_values.values()) == losses[number][:num_validations]
        assert trial.state.name == ("COMPLETE" if number in second else "PRUNED")
        assert trial.value == losses[number][num_validations - 1]


def ranked(study):
    """Losses of all trials in plain PyTorch, those that come to the second rung, and those that come to the end."""
    losses = {trial.number: plain(trial)[0].validation_losses for trial in study.trials}
    first = sorted(losses, key=lambda number: losses[number][0])[: NUM_TRIALS // 2]
    return losses, first, sorted(first, key=lambda number: losses[number][1])[: NUM_TRIALS // 4]


@pytest.mark.parametrize("is_timeout", [False, True])
def test_of_a_study_that_is_ended_before_a_rung_is_full_those_that_came_there_are_ranked(
    tmp_path, monkeypatch, is_timeout
):
    now_s = [0.0]
    monkeypatch.setattr("hydra_engine.sweep.study.time", SimpleNamespace(monotonic=lambda: now_s[0]))

    def build_and_end(trial):
        if trial.number == NUM_TRIALS - 1 and is_timeout:
            now_s[0] = 100.0
        elif trial.number == NUM_TRIALS - 1:
            trial.study.stop()
        return build(trial)

    assert_halved(sweep_in(tmp_path, build_and_end, num_trials=NUM_TRIALS + 3, timeout=100).run())


@pytest.mark.rest
def test_a_trial_that_goes_on_past_its_rung_rests_at_its_next_validation(tmp_path):
    """So does one that was killed as it paused with early release, which commits one more step."""
    interrupt = Interrupt(STEPS + 2)
    sweep = sweep_in(
        tmp_path,
        lambda trial: build(trial, *([interrupt] if trial.number == 0 else [])),
        rungs=Rungs(min_resource=2, reduction_factor=2),
    )
    with pytest.raises(KeyboardInterrupt):
        sweep.run()
    assert len(study_in(tmp_path).trials[0].intermediate_values) == 1
    steps = {}
    study = sweep_in(tmp_path, lambda trial: build(trial, First(trial.number, steps))).run()
    losses, _, second = ranked(study)
    for trial in study.trials:
        assert trial.state.name == ("COMPLETE" if trial.number in second else "PRUNED")
        found = trial.intermediate_values
        assert found == dict(enumerate(losses[trial.number][: len(found)]))
    assert steps[0] > STEPS + 2
    assert len(study.trials[0].intermediate_values) == 2


class Count(Callback):
    """Notes the most tasks that train at once."""

    lock, live, most = threading.Lock(), set(), 0

    def __init__(self, number):
        self.number = number

    def on_step(self, report):
        with Count.lock:
            Count.live.add(self.number)
            Count.most = max(Count.most, len(Count.live))

    def on_task_end(self, report):
        with Count.lock:
            Count.live.discard(self.number)

    on_task_pause = on_task_end


@pytest.mark.rest
def test_the_best_of_a_rung_go_on_with_the_bits_of_plain_pytorch(tmp_path):
    Count.most = 0
    Count.live.clear()
    study = sweep_in(tmp_path, lambda trial: build(trial, Count(trial.number))).run()
    assert_halved(study)
    assert Count.most <= 2


@pytest.mark.rest
def test_trials_wait_at_a_rung_where_devices_are_lent_for_rehearsals(tmp_path):
    device = EmulatedDevice("1MiB")
    device.has_room_for_planning = False
    assert_halved(sweep_in(tmp_path, devices=[device]).run())


@pytest.mark.rest
def test_a_device_that_was_removed_stays_out_and_one_that_came_stays_in(tmp_path, monkeypatch):
    found, train = [], Search._train

    def changing(search):
        if not found:
            search._orchestra.add_device(EmulatedDevice("1MiB"))
            search._orchestra.remove_device("emulated:0")
        train(search)
        found.append(search._orchestra.devices)

    monkeypatch.setattr(Search, "_train", changing)
    assert_halved(sweep_in(tmp_path).run())
    assert len(found) > 1
    assert found == [{"emulated:0": "out", "emulated:1": "in"}] * len(found)


@pytest.mark.parametrize("num_pruned", [1, *(pytest.param(number, marks=pytest.mark.rest) for number in (0, 2))])
def test_a_sweep_that_ends_in_the_middle_of_a_decision_decides_the_same_again(tmp_path, monkeypatch, num_pruned):
    class Killed(Exception):
        pass

    prune, num = Trials.prune, 0

    def prune_some(trials, trial):
        nonlocal num
        if num == num_pruned:
            raise Killed
        num += 1
        prune(trials, trial)

    with monkeypatch.context() as patched:
        patched.setattr(Trials, "prune", prune_some)
        sweep = sweep_in(tmp_path)
        with pytest.raises(Killed):
            sweep.run()
    assert_halved(sweep_in(tmp_path).run())


def test_a_trial_that_fails_is_no_reason_to_wait(tmp_path):
    class Fail(Callback):
        def on_step(self, report):
            raise ZeroDivisionError

    failing = (0, 4)

    def build_or_fail(trial):
        return build(trial, *([Fail()] if trial.number in failing else []))

    study = sweep_in(tmp_path, build_or_fail, num_trials=5).run()
    states = [trial.state.name for trial in study.trials]
    assert [number for number, state in enumerate(states) if state == "FAIL"] == list(failing)
    assert states.count("PRUNED") == 2  # one of three goes on
    assert states.count("COMPLETE") == 1


def test_a_callback_of_ones_own_pauses_no_trial(tmp_path):
    class Pause(Callback):
        def on_step(self, report):
            raise PauseTask

    study = sweep_in(
        tmp_path, lambda trial: build(trial, *([Pause()] if trial.number == 1 else [])), num_trials=2
    ).run()
    assert study.trials[1].state.name == "FAIL"
    names(study.trials[1].user_attrs["error"], says="callback paused")


def trial_of(number, state, values, rung=0, waits=False):
    attributes = {RUNG: mark(rung, waits=waits)}
    return SimpleNamespace(
        number=number,
        state=SimpleNamespace(name=state),
        intermediate_values=dict(enumerate(values)),
        user_attrs=attributes,
    )


def decide(*trials, is_complete=True, maximize=False, factor=3):
    found = Rungs(reduction_factor=factor).decide(trials, is_complete=is_complete, maximize=maximize, seed=0)
    return list(found.goes_on), list(found.ends)


def test_the_best_third_goes_on():
    waiting = [trial_of(number, "RUNNING", [value], waits=True) for number, value in enumerate([5, 1, 4, 2, 6, 3])]
    assert decide(*waiting) == ([1, 3], [0, 2, 4, 5])
    assert decide(*waiting, maximize=True) == ([4, 0], [1, 2, 3, 5])
    assert decide(*waiting, is_complete=False) == ([], [])
    assert decide(*waiting, trial_of(6, "RUNNING", [])) == ([], [])
    assert decide(*waiting, trial_of(6, "FAIL", [0])) == ([1, 3], [0, 2, 4, 5])
    assert decide(*waiting, trial_of(6, "RUNNING", [float("nan")], waits=True))[0] == [1, 3]
    assert decide(*waiting[:2]) == ([1], [0])
    assert decide() == ([], [])
