"""A sweep that was killed goes on: no trial twice, none that was told again, and the bits of plain PyTorch."""

import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from hydra_engine import Callback
from tests.refused import refused
from tests.sweep.space import EPOCHS, STEPS, First, Interrupt, build, keeping, plain, study_in, sweep_of

optuna = pytest.importorskip("optuna")
optuna.logging.set_verbosity(optuna.logging.WARNING)


def sweep_in(folder, build_task=build, **options):
    return sweep_of(build_task, **{"num_trials": 6, "checkpoint_every": 2, "checkpoint_dir": folder, **options})


def study_of(folder):
    return optuna.load_study(study_name="sweep", storage=f"sqlite:///{folder / 'study.db'}")


def outcomes(study):
    return [(trial.number, trial.state.name, trial.params, trial.values) for trial in study.trials]


def assert_as_alone(study):
    for trial in study.trials:
        validation_losses = plain(trial)[0].validation_losses
        found = list(trial.intermediate_values.values())
        assert trial.intermediate_values.keys() == set(range(len(found)))
        assert found == validation_losses[: len(found)]
        assert trial.value == found[-1]
        if trial.state.name == "COMPLETE":
            assert found == validation_losses


@pytest.mark.rest
@pytest.mark.parametrize(("number", "step"), [(0, 1), (3, 5), (5, 12)])
def test_killed_it_goes_on_with_each_trial(tmp_path, number, step):
    command = [sys.executable, "-m", "tests.sweep.space", str(tmp_path), str(number), str(step)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    first = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    assert first.returncode == -signal.SIGKILL, first.stderr
    before = study_in(tmp_path)
    told = [each for each in outcomes(before) if each[1] == "COMPLETE"]
    begun = [trial.params for trial in before.trials]
    built = Counter()

    def build_and_count(trial):
        built[trial.number] += 1
        return build(trial)

    study = sweep_in(tmp_path / "sweep", build_and_count, study=before).run()
    assert [trial.number for trial in study.trials] == list(range(6))
    assert {trial.state.name for trial in study.trials} == {"COMPLETE"}
    assert [each for each in outcomes(study) if each in told] == told
    assert built == Counter(set(range(6)) - {number for number, *_ in told})
    for trial, params in zip(study.trials, begun, strict=False):
        assert params.items() <= trial.params.items()  # one may have been killed before it had all
    assert_as_alone(study)


def test_interrupted_it_goes_on_from_the_checkpoint(tmp_path, capsys):
    first = sweep_in(
        tmp_path, lambda trial: build(trial, *([Interrupt(STEPS + 1)] if trial.number == 1 else [])), num_trials=3
    )
    first.verbose = 1
    with pytest.raises(KeyboardInterrupt):
        first.run()
    before = study_of(tmp_path)
    interrupted = [trial.number for trial in before.trials if trial.state.name == "RUNNING"]
    assert 1 in interrupted
    assert [trial.number for trial in before.trials if trial.user_attrs.get("interrupted")] == interrupted
    lines = capsys.readouterr().out.splitlines()
    assert [
        int(line.split("trial ")[1].split(":")[0]) for line in lines if "interrupted, goes on" in line
    ] == interrupted
    steps = {}
    study = sweep_in(tmp_path, lambda trial: build(trial, First(trial.number, steps)), num_trials=3).run()
    assert steps[1] > STEPS
    assert [trial.number for trial in study.trials] == list(range(3))
    assert not any(trial.user_attrs.get("interrupted") for trial in study.trials)
    assert_as_alone(study)


def test_what_is_built_after_an_interrupt_is_nobodys(tmp_path, monkeypatch):
    """`build_task` does not return in time: its thread is left behind, and tells the study nothing any more."""
    monkeypatch.setattr("hydra_engine.sweep.search.INTERRUPTED_S", 0.0)
    is_building, may_build, threads = threading.Event(), threading.Event(), []

    class Interrupt(Callback):
        def on_step(self, report):
            if report.steps == 1:
                assert is_building.wait(60)
                os.kill(os.getpid(), signal.SIGINT)

    def build_late(trial):
        if trial.number == 0:
            return build(trial, Interrupt())
        threads.append(threading.current_thread())
        is_building.set()
        assert may_build.wait(60)
        raise OSError("too late")

    own = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
    with pytest.raises(KeyboardInterrupt):
        sweep_in(tmp_path, build_late, study=own, num_trials=2).run()
    before = [(trial.number, trial.state.name, trial.user_attrs.get("interrupted")) for trial in own.trials]
    assert before == [(0, "RUNNING", True), (1, "RUNNING", True)]
    may_build.set()
    threads[0].join()
    assert [(trial.number, trial.state.name, trial.user_attrs.get("interrupted")) for trial in own.trials] == before
    study = sweep_in(tmp_path, study=own, num_trials=2).run()
    assert [trial.number for trial in study.trials] == [0, 1]
    assert_as_alone(study)


@pytest.mark.rest
def test_a_sweep_that_is_through_trains_nothing_again(tmp_path):
    sweep = sweep_in(tmp_path, num_trials=2)
    expected = outcomes(sweep.run())
    built = []
    study = sweep_in(tmp_path, lambda trial: built.append(trial.number), num_trials=2).run()
    assert outcomes(study) == expected
    assert built == []
    assert len(sweep_in(tmp_path, num_trials=3).run().trials) == 3
    assert len(sweep.run().trials) == 3


@pytest.mark.rest
def test_a_study_of_ones_own_goes_on_beside_other_trials(tmp_path):
    url = f"sqlite:///{tmp_path / 'own.db'}"
    own = optuna.create_study(study_name="own", storage=url, sampler=optuna.samplers.RandomSampler(seed=1))
    other = own.ask()  # another process trains this one
    assert len(sweep_in(tmp_path / "a", study=own, num_trials=1).run().trials) == 2
    assert len(sweep_in(tmp_path / "b", study=own, num_trials=1).run().trials) == 3
    assert len(sweep_in(tmp_path / "a", study=own, num_trials=2).run().trials) == 4
    assert own.trials[other.number].state.name == "RUNNING"


@pytest.mark.rest
def test_a_trial_that_ended_before_it_could_be_told_is_told(tmp_path):
    """Its end was saved, and the process was killed: nothing of it is trained again."""
    again = untold(tmp_path, sweep_in(tmp_path, num_trials=2).run())
    steps = {}
    study = sweep_in(tmp_path, lambda trial: build(trial, First(trial.number, steps)), num_trials=2, study=again).run()
    assert steps == {}
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 2
    for trial in study.trials:
        assert trial.value == plain(trial)[0].validation_losses[-1]


def test_beside_others_a_trial_that_ended_before_it_could_be_told_is_told_and_gives_way(tmp_path):
    """Trial 0 goes on, and waits until trial 2 has come in the place of trial 1, which was over."""
    told = sweep_in(tmp_path, num_trials=2).run()
    again = untold(tmp_path, told)
    steps, has_come = {}, threading.Event()

    class Wait(Callback):
        def on_step(self, report):
            assert has_come.wait(60)

    def build_longer(trial):
        if trial.number == 2:
            has_come.set()
        task = build(trial, First(trial.number, steps), *([Wait()] if trial.number == 0 else []))
        task.epochs += trial.number == 0
        return task

    study = sweep_in(tmp_path, build_longer, num_trials=3, study=again).run()
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 3
    assert steps == {0: EPOCHS * STEPS + 1, 2: 1}
    assert study.trials[1].value == plain(study.trials[1])[0].validation_losses[-1]
    assert study.trials[1].user_attrs["steps"] == EPOCHS * STEPS


def test_a_rescue_is_not_taken_for_the_trials_of_a_new_study(tmp_path, monkeypatch, capsys):
    """Without a folder nobody knows what the saved trials had for values."""
    sweep_in(tmp_path, num_trials=2).run()
    rescue = tmp_path / "hydra-rescue-1"
    (tmp_path / "checkpoints").rename(rescue)
    monkeypatch.setenv("HYDRA_ENGINE_RESUME", str(rescue))
    kept = {}
    study = sweep_of(keeping(kept), num_trials=2).run()
    for trial in study.trials:
        assert kept[trial.number][0] == plain(trial)[0].losses
        assert trial.value == plain(trial)[0].validation_losses[-1]
    assert f"this sweep begins anew, and not from {rescue}" in capsys.readouterr().err


def untold(folder, told):
    """The study of a sweep that was killed before any of its trials was told."""
    url = f"sqlite:///{folder / 'study.db'}"
    optuna.delete_study(study_name="sweep", storage=url)
    again = optuna.create_study(study_name="sweep", storage=url)
    sweep_id = (folder / "sweep.id").read_text().strip()
    for trial in told_trials(told, again):
        trial.set_user_attr("hydra_engine", {"sweep": sweep_id, "trial_id": trial_id(again, trial)})
    return again


def told_trials(told, again):
    """The trials of a study in another, as they were while they ran."""
    for trial in told.trials:
        again.enqueue_trial(trial.params)
        asked = again.ask()
        asked.suggest_categorical("width", [4, 8])
        asked.suggest_float("lr", 1e-3, 1.0, log=True)
        yield asked


def trial_id(study, trial):
    study_id = trial.storage.get_study_id_from_name(study.study_name)
    return trial.storage.get_trial_id_from_study_id_trial_number(study_id, trial.number)


def test_a_trials_model_comes_back_with_its_weights(tmp_path):
    kept = {}
    sweep = sweep_in(tmp_path, keeping(kept), num_trials=2)
    study = sweep.run()
    assert len(kept) == 2
    for trial in study.trials:
        weights = kept[trial.number][2]
        assert all(map(torch.equal, sweep_in(tmp_path).model(trial).parameters(), weights))
    with refused(task="trial-7"):
        sweep.model(SimpleNamespace(number=7, params={}))
    with refused(says="checkpoint_dir"):
        sweep_of().model(study.best_trial)


@pytest.mark.parametrize(
    ("is_asked", "is_own"),
    [
        (True, True),
        pytest.param(False, False, marks=pytest.mark.rest),
        pytest.param(True, False, marks=pytest.mark.rest),
        pytest.param(False, True, marks=pytest.mark.rest),
    ],
)
def test_killed_as_a_trial_was_asked_for(tmp_path, is_asked, is_own):
    sweep_in(tmp_path, num_trials=1).run()
    study = study_of(tmp_path)
    mark = {"hydra_engine": {"sweep": (tmp_path / "sweep.id").read_text().strip()}}
    study.add_trial(optuna.trial.create_trial(state=optuna.trial.TrialState.WAITING, user_attrs=mark))
    if is_asked:
        study.ask()
    study = sweep_in(tmp_path, num_trials=2, study=study if is_own else None).run()
    expected = ["COMPLETE", "FAIL", "COMPLETE"] if is_asked and is_own else ["COMPLETE"] * 2
    assert [trial.state.name for trial in study.trials] == expected
