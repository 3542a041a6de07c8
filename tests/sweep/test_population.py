"""Population-based training: the worst give way to forks of the best, with the bits of a plain loop that copies."""

import copy
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from hydra_engine import EmulatedDevice, stream_seed
from hydra_engine.sweep import Population, Rungs, Sweep
from hydra_engine.sweep.population import PARENT
from hydra_engine.sweep.rungs import RUNG, mark
from hydra_engine.sweep.study import Trials
from tests import reference
from tests.refused import refused
from tests.sweep.space import DEVICES, EPOCHS, STEPS, Kill, batches, build, keeping, settings, study_in

optuna = pytest.importorskip("optuna")
optuna.logging.set_verbosity(optuna.logging.WARNING)

NUM_TRIALS = 4
POPULATION = Population(settings=["lr"])
SEED = 4


def sweep_in(folder, build_task=build, **options):
    devices = [EmulatedDevice(size) for size in DEVICES]
    options = {"num_trials": NUM_TRIALS, "parallel": 2, "population": POPULATION, "devices": devices, **options}
    sweep = Sweep(build_task, study=study_in(folder), checkpoint_dir=folder / "sweep", seed=SEED, **options)
    sweep.verbose = 0
    return sweep


def parent_of(trial):
    return trial.user_attrs.get(PARENT)


def plain(study, number, num_epochs=EPOCHS):
    """A trial in plain PyTorch, with all that came before it: its model, its optimizer, and what all that reported."""
    trial, made = study.trials[number], []
    torch.manual_seed(stream_seed(SEED, number, 0))
    mine = settings(trial)
    model, adam, born = mine.pop("model"), mine.pop("optimizer"), 0
    seed = int(torch.randint(0, 2**63 - 1, ()).item())  # as ModelTask draws its own
    losses, validation_losses, state = [], [], {}
    if (parent := parent_of(trial)) is not None:
        born = parent["validations"]
        model, optimizer, losses, validation_losses = plain(study, parent["trial"], born)
        state = copy.deepcopy(optimizer.state_dict()["state"])

    def with_state(params, lr):
        made.append(adam(params, lr=lr))
        made[0].load_state_dict({**made[0].state_dict(), "state": state})
        return made[0]

    found = reference.train(
        model,
        F.cross_entropy,
        batches(),
        seed=seed,
        epochs=num_epochs - born,
        validation=batches(2, seed=4),
        optimizer=with_state,
        **mine,
    )
    return model, made[0], losses + found.losses, validation_losses + found.validation_losses


def assert_trained(study, kept=()):
    """Four trials at each time; one gives way after the first validation and one after the second."""
    trials = study.trials
    born = [trial for trial in trials if parent_of(trial) is not None]
    assert len(trials) == NUM_TRIALS + 2
    assert [trial.number for trial in born] == [4, 5]
    members = set(range(NUM_TRIALS))
    for step in range(EPOCHS):
        values = {number: plain(study, number, step + 1)[3][step] for number in members}
        for number, value in values.items():
            assert trials[number].intermediate_values[step] == value
        if step == EPOCHS - 1:
            break
        ranked = sorted(members, key=values.get)
        best, worst, new = trials[ranked[0]], trials[ranked[-1]], born[step]
        assert parent_of(new) == {"trial": best.number, "validations": step + 1, "instead_of": worst.number}
        assert new.params["width"] == best.params["width"]
        assert new.params["lr"] != best.params["lr"]
        assert min(new.intermediate_values) == step + 1
        assert worst.state.name == "PRUNED"
        assert max(worst.intermediate_values) == step
        members = members - {worst.number} | {new.number}
    for number in members:
        assert trials[number].state.name == "COMPLETE"
        assert trials[number].value == trials[number].intermediate_values[EPOCHS - 1]
    assert study.best_trial.number in members
    for number in kept:
        model, _, losses, validation_losses = plain(study, number, len(kept[number][1]))
        assert kept[number][:2] == (losses, validation_losses)
        assert all(map(torch.equal, kept[number][2], model.parameters()))


def decided(study):
    return [(trial.params, parent_of(trial), trial.state, trial.values) for trial in study.trials]


@pytest.mark.parametrize("num_devices", [1, pytest.param(2, marks=pytest.mark.rest)])
def test_forks_have_the_bits_of_a_plain_loop_that_copies_weights_and_optimizer_state(tmp_path, num_devices):
    kept = {}
    sweep = sweep_in(tmp_path, keeping(kept), devices=[EmulatedDevice("1MiB") for _ in range(num_devices)])
    study = sweep.run()
    assert_trained(study, kept)
    assert set(kept) == {trial.number for trial in study.trials if trial.state.name == "COMPLETE"}
    model = sweep.model(study.best_trial)
    assert all(map(torch.equal, model.parameters(), kept[study.best_trial.number][2]))


@pytest.mark.rest
def test_where_devices_cannot_plan_beside_training_groups_wait(tmp_path):
    device = EmulatedDevice("1MiB")
    device.has_room_for_planning = False
    assert_trained(sweep_in(tmp_path, devices=[device]).run())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    sweep_in(folder).run()
    return folder


@pytest.fixture(scope="module")
def expected(whole):
    return decided(study_in(whole))


class Killed(Exception):
    pass


@pytest.mark.rest
@pytest.mark.parametrize("write", [1, *(pytest.param(write, marks=pytest.mark.rest) for write in (0, 3, 5))])
def test_ended_in_the_middle_of_a_decision_it_decides_the_same_again(tmp_path, monkeypatch, expected, write):
    """A decision writes: for each birth the trial and a mark, for each that goes on a mark, for each other its end."""
    num, is_deciding, climb = 0, [], Trials.climb

    def counted(method):
        def call(*args, **options):
            nonlocal num
            if is_deciding:
                num += 1
                if num > write:
                    raise Killed
            return method(*args, **options)

        return call

    def climbing(trials):
        is_deciding.append(True)
        try:
            return climb(trials)
        finally:
            is_deciding.clear()

    with monkeypatch.context() as patched:
        patched.setattr(Trials, "climb", climbing)
        patched.setattr(optuna.study.Study, "add_trial", counted(optuna.study.Study.add_trial))
        patched.setattr(optuna.study.Study, "tell", counted(optuna.study.Study.tell))
        patched.setattr(optuna.trial.Trial, "set_user_attr", counted(optuna.trial.Trial.set_user_attr))
        with pytest.raises(Killed):
            sweep_in(tmp_path).run()
    assert decided(sweep_in(tmp_path).run()) == expected


@pytest.mark.rest
@pytest.mark.parametrize("who", ["parent", "fork"])
def test_killed_as_a_parent_or_its_fork_goes_on_it_ends_with_the_same_values(tmp_path, expected, who):
    number = expected[NUM_TRIALS][1]["trial"] if who == "parent" else NUM_TRIALS
    command = [sys.executable, "-m", "tests.sweep.test_population", str(tmp_path), str(number)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    first = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert first.returncode == -signal.SIGKILL, first.stderr
    assert len(study_in(tmp_path).trials) == NUM_TRIALS + 1
    assert decided(sweep_in(tmp_path).run()) == expected


@pytest.mark.rest
def test_nobody_joins_once_it_has_decided(whole, expected):
    assert decided(sweep_in(whole, num_trials=20).run()) == expected


LR = optuna.distributions.FloatDistribution(1e-3, 1.0, log=True)
NUM = optuna.distributions.IntDistribution(1, 9)
EVEN = optuna.distributions.IntDistribution(2, 8, step=2)
KIND = optuna.distributions.CategoricalDistribution(["a", "b", "c"])


def member(number, value, state="RUNNING", *, rung=0, waits=True, parent=None, **params):
    values = {"lr": (0.1, LR), "num": (2, NUM), "even": (4, EVEN), "kind": ("b", KIND)}
    values |= {name: (each, values[name][1]) for name, each in params.items()}
    return SimpleNamespace(
        number=number,
        state=SimpleNamespace(name=state),
        intermediate_values={0: value},
        user_attrs={RUNG: mark(rung, waits=waits), **({PARENT: parent} if parent else {})},
        params={name: each for name, (each, _) in values.items()},
        distributions={name: each for name, (_, each) in values.items()},
    )


def decide(*trials, maximize=False, is_complete=True, seed=0, **options):
    population = Population(**{"settings": ["lr"], "resample_probability": 0, **options})
    return population.decide(trials, is_complete=is_complete, maximize=maximize, seed=seed)


VALUES = [5.0, 1.0, 4.0, 2.0, 6.0, 3.0]


def members(values=VALUES, **params):
    return [member(number, value, **params) for number, value in enumerate(values)]


def test_the_best_quarter_takes_the_place_of_the_worst():
    found = decide(*members())
    assert (found.goes_on, found.ends) == ([1, 2, 3, 5], [0, 4])
    parents = [birth.user_attrs[PARENT] for birth in found.births]
    assert [(each["instead_of"], each["validations"]) for each in parents] == [(0, 1), (4, 1)]
    assert {each["trial"] for each in parents} <= {1, 3}
    for birth in found.births:
        assert birth.params["lr"] in (0.1 * 0.8, 0.1 * 1.2)
        assert (birth.rung, birth.params | {"lr": 0}) == (1, members()[0].params | {"lr": 0})
    assert sorted(decide(*members(), maximize=True).ends) == [1, 3]
    assert decide(*members()) == decide(*members())
    births = {str(decide(*members(), seed=seed).births) for seed in range(9)}
    assert len(births) > 1
    assert len(decide(*members(), quantile=0.5).ends) == 3
    assert len(decide(*members(VALUES[:3]), quantile=0.5).ends) == 1


def test_nothing_is_decided_before_all_have_come():
    for others in ([], [member(6, 0.0, waits=False)]):
        assert decide(*members(), *others, is_complete=bool(others)) == ((), (), ())
    assert decide() == ((), (), ())
    assert decide(member(0, 1.0)) == ([0], [], [])
    assert decide(*members(), member(6, 0.0, "FAIL")).ends == [0, 4]


def test_members_without_a_number_are_the_worst_by_their_numbers_whenever_a_kill_came():
    """A kill in the middle of the decision: some have gone on already, which the study then lists apart."""
    whole = members([math.nan, 1.0, float("nan"), 2.0, float("nan"), 3.0])
    assert decide(*whole, quantile=0.5).ends == [0, 2, 4]
    assert decide(*whole).ends == [2, 4]
    for gone in range(6):
        number = whole[gone].number
        killed = [
            *whole[:gone],
            member(number, whole[gone].intermediate_values[0], rung=1, waits=False),
            *whole[gone + 1 :],
        ]
        assert decide(*killed).ends == [each for each in (2, 4) if each != number]
        assert decide(*killed, maximize=True).ends == [each for each in (2, 4) if each != number]


def test_who_has_no_number_is_nobodys_parent():
    nan = math.nan
    found = decide(*members([nan, 1.0, nan, nan, nan, nan]), quantile=0.5)
    assert {birth.user_attrs[PARENT]["trial"] for birth in found.births} == {1}
    assert decide(*members([nan] * 4)) == ([0, 1, 2, 3], [], [])


@pytest.mark.parametrize(
    ("name", "value", "factors", "expected"),
    [
        ("lr", 0.1, (0.8, 1.2), {0.1 * 0.8, 0.1 * 1.2}),
        ("lr", 0.9, (1.2,), {1.0}),
        ("lr", 0.0011, (0.8,), {0.001}),
        ("num", 5, (0.8, 1.2), {4, 6}),
        ("num", 2, (0.8, 1.2), {1, 3}),
        ("num", 1, (0.8,), {1}),
        ("even", 4, (0.8, 1.2), {2, 6}),
        ("even", 8, (2.0,), {8}),
        ("kind", "b", (0.8, 1.2), {"a", "c"}),
        ("kind", "a", (0.8, 1.2), {"a", "b"}),
    ],
)
def test_values_stay_in_their_range(name, value, factors, expected):
    found = [decide(*members(**{name: value}), settings=[name], factors=factors, seed=seed) for seed in range(20)]
    assert {birth.params[name] for each in found for birth in each.births} == expected
    assert all(type(birth.params[name]) is type(value) for each in found for birth in each.births)
    found = [decide(*members(), settings=[name], resample_probability=1, seed=seed) for seed in range(20)]
    drawn = {birth.params[name] for each in found for birth in each.births}
    assert len(drawn) > 2
    distribution = members()[0].distributions[name]
    assert all(distribution._contains(distribution.to_internal_repr(each)) for each in drawn)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"rungs": Rungs()}, ValueError, "population: rungs"),
        ({"population": 3}, TypeError, "population: 3 Population"),
        ({"checkpoint_dir": None}, ValueError, "population: checkpoint_dir"),
        ({"metric": ["a", "b"], "direction": ["minimize"] * 2}, ValueError, "population: 2"),
        ({"num_trials": 1}, ValueError, "num_trials: 1 2"),
    ],
)
def test_options_that_a_population_refuses(options, error, says):
    with refused(error, says=says):
        Sweep(build, **{"population": POPULATION, "checkpoint_dir": "unused", **options})


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"settings": "lr"}, TypeError, "settings: 'lr'"),
        ({"settings": []}, ValueError, "settings: []"),
        ({"interval": 0}, ValueError, "interval: 0"),
        ({"interval": 1.5}, TypeError, "interval: 1.5"),
        ({"quantile": 0.6}, ValueError, "quantile: 0.6"),
        ({"resample_probability": 2}, ValueError, "resample_probability: 2"),
        ({"factors": (0.0, 1.2)}, ValueError, "factors: 0.0"),
    ],
)
def test_a_population_that_cannot_be(options, error, says):
    with refused(error, says=says):
        Population(**{"settings": ["lr"], **options})


def build_batches(trial):
    task = build(trial)
    task.dataloader = batches(trial.suggest_int("num", 2, 8))
    return task


@pytest.mark.parametrize(
    ("build_task", "settings", "task", "says"),
    [
        (build, ["lr", "width"], None, "'width' 0.weight 8]"),
        (build_batches, ["num"], None, "'num' batches"),
        (build, ["momentum"], "trial-0", "'momentum' 'width' 'lr'"),
        (lambda trial: build(trial, keep_best="loss"), ["lr"], "trial-0", "keep_best 'loss'"),
        (lambda trial: build(trial, optimizer_scope="task"), ["lr"], "trial-0", "optimizer_scope 'task' 'shard'"),
        (lambda trial: build(trial, early_release="all"), ["lr"], "trial-0", "early_release 'all'"),
    ],
)
def test_refused_before_anything_is_trained(tmp_path, build_task, settings, task, says):
    with refused(task=task, says=says):
        sweep_in(tmp_path, build_task, population=Population(settings=settings)).run()


def main(folder, number):
    """A sweep that is killed as soon as a trial has gone on after the first decision."""
    folder = Path(folder)
    kill = Kill(STEPS + 1, folder / "killed")
    torch.set_num_threads(1)
    sweep_in(folder, lambda trial: build(trial, *([kill] if trial.number == int(number) else []))).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
