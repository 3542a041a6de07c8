"""A sweep on many machines: who has which trial, in this process; and nodes of Ray, where it is installed."""

import faulthandler
import itertools
import os
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from types import SimpleNamespace

import pytest
import torch

from hydra_engine import Callback, EmulatedDevice
from hydra_engine.sweep import Rungs, Sweep, cluster
from hydra_engine.sweep.cluster import Handout, NodeTrials
from hydra_engine.sweep.objective import Objective
from hydra_engine.sweep.search import Search, SearchSettings
from hydra_engine.sweep.study import Trials
from tests.refused import names, refused
from tests.sweep.space import STEPS, First, Interrupt, build, plain, sweep_of

optuna = pytest.importorskip("optuna")
optuna.logging.set_verbosity(optuna.logging.WARNING)

# Far above any wait; processes that import torch share two cores with whatever else runs.
HANG_S = 300


def new_study(seed=1):
    return optuna.create_study(
        sampler=optuna.samplers.RandomSampler(seed=seed), pruner=optuna.pruners.NopPruner(), study_name="own"
    )


def settings_of(build_task=build, parallel=2):
    return SearchSettings(
        build_task=build_task,
        objective=Objective.parse(None),
        parallel=parallel,
        dram=None,
        devices=[EmulatedDevice("1MiB")],
        policy="sharded-lrtf",
        checkpoint_every=1,
        seed=0,
    )


def train_as(node, handout, build_task=build, checkpoints=None, parallel=2):
    """What a node does, with a caller in this process; each request takes a turn, as in the caller's thread."""
    turn = threading.Lock()

    def ask(method, *args):
        with turn:
            return handout.answer(node, method, *args)

    search = Search(settings_of(build_task, parallel), NodeTrials(ask), checkpoints, 0, node)
    search.run()
    search.check()


def outcomes(study):
    return [(trial.params, trial.value) for trial in study.trials]


def assert_once_each(study, num_trials):
    assert [trial.number for trial in study.trials] == list(range(num_trials))
    for trial in study.trials:
        assert trial.state.name == "COMPLETE"
        expected = plain(trial)[0].validation_losses
        assert list(trial.intermediate_values.values()) == expected
        assert trial.value == expected[-1]


def test_a_node_trains_what_it_is_given_with_the_bits_of_plain_pytorch():
    study = new_study()
    train_as("node-a", Handout(Trials(study, "mine", 4)))
    assert_once_each(study, 4)
    assert outcomes(study) == outcomes(sweep_of(study=new_study(), num_trials=4).run())


def test_a_trial_of_a_node_asks_the_callers():
    study = new_study()
    handout = Handout(Trials(study, "mine", 1))
    trial = NodeTrials(lambda method, *args: handout.answer("node-a", method, *args)).next()
    width = trial.suggest_categorical("width", [4, 8])
    trial.set_user_attr("note", "here")
    assert trial.number == 0
    assert trial.params == {"width": width} == study.trials[0].params
    assert trial.user_attrs["note"] == "here" == study.trials[0].user_attrs["note"]
    with refused(AttributeError, says="suggest_all"):
        trial.suggest_all("width")


@pytest.mark.parametrize("is_callback", [False, True])
def test_a_trial_of_a_node_stops_the_callers_study(is_callback):
    class Stop(Callback):
        def on_step(self, report):
            self.study.stop()

    def build_and_stop(trial):
        assert trial.study.study_name == "own"
        callback = Stop()
        callback.study = trial.study
        if trial.number == 1 and not is_callback:
            trial.study.stop()
        return build(trial, *([callback] if trial.number == 1 and is_callback else []))

    study = new_study()
    with closing(Trials(study, "mine", 6)) as trials:
        handout = Handout(trials)
        train_as("node-a", handout, build_and_stop, parallel=1)
        assert handout.answer("node-b", "next") is None
        assert not trials.has_more
    assert_once_each(study, 2)


def test_no_node_gets_a_new_trial_after_the_timeout(monkeypatch):
    now_s = [0.0]
    monkeypatch.setattr("hydra_engine.sweep.study.time", SimpleNamespace(monotonic=lambda: now_s[0]))
    trials = Trials(new_study(), "mine", 3, timeout_s=5.0)
    handout = Handout(trials)
    assert handout.answer("a", "next") == 0
    now_s[0] = 5.0
    assert handout.answer("a", "next") is None
    handout.give_back("a")
    assert handout.answer("b", "next") == 0  # it has begun
    assert not trials.has_more


def test_a_callback_on_a_node_prunes_its_trial():
    class Prune(Callback):
        def on_validation(self, report):
            raise optuna.TrialPruned

    study = new_study()
    handout = Handout(Trials(study, "mine", 2))
    train_as("node-a", handout, lambda trial: build(trial, *([Prune()] if trial.number == 0 else [])))
    assert [trial.state.name for trial in study.trials] == ["PRUNED", "COMPLETE"]
    assert handout.num_well == 2


def vanishing(trial):
    """Trial 1 ends its node, as far as the caller can tell."""
    return build(trial, *([Interrupt(STEPS + 2)] if trial.number == 1 else []))


@pytest.mark.rest
@pytest.mark.parametrize("is_shared", [True, False])
def test_a_node_that_dies_gives_its_trials_back(tmp_path, is_shared):
    study = new_study()
    trials = Trials(study, "mine", 4)
    handout = Handout(trials)
    with pytest.raises(KeyboardInterrupt):
        train_as("node-a", handout, vanishing, tmp_path / "a")
    begun = [trial.number for trial in study.trials if trial.state.name == "RUNNING"]
    assert 1 in begun
    assert handout.give_back("node-a") == begun
    assert trials.num_waiting == len(begun)
    first, folder = {}, tmp_path / ("a" if is_shared else "b")
    train_as("node-b", handout, lambda trial: build(trial, First(trial.number, first)), folder)
    assert_once_each(study, 4)
    assert (first[1] > STEPS) == is_shared


class NoRay:
    """A cluster that has no CPU for the processes that were asked for."""

    @staticmethod
    def wait(requests, timeout):
        return [], requests


@pytest.mark.parametrize(("num_left", "has_asked"), [(0, False), (0, True), (1, False)])
def test_a_node_that_is_never_placed_does_not_keep_a_sweep_that_has_no_trial_left(num_left, has_asked):
    trials = Trials(new_study(), "mine", num_left)
    search = cluster.ClusterSearch("auto", settings_of(), trials, None, 0)
    search._ray, search._looked_s = NoRay, float("inf")
    search._members = [cluster.Member("a", "a", None, "node-a", requests=object(), has_asked=has_asked)]
    assert search._go_on() == (num_left > 0 or has_asked)


def test_a_trial_that_is_lost_again_and_again_has_failed():
    study = new_study()
    trials = Trials(study, "mine", 2)
    handout = Handout(trials)
    for attempt in range(cluster.MOST_LOSSES + 1):
        assert handout.answer("a", "next") == 0
        assert handout.give_back("b") == []
        assert handout.give_back("a") == [0]
        assert trials.num_waiting == (attempt < cluster.MOST_LOSSES)
    assert study.trials[0].state.name == "FAIL"
    names(study.trials[0].user_attrs["error"], says="11 10")
    assert handout.answer("a", "next") == 1


def test_a_trial_that_is_over_or_waits_at_a_rung_is_not_given_back(tmp_path):
    study = new_study()
    trials = Trials(study, "mine", 3, rungs=Rungs(min_resource=1, reduction_factor=2))
    handout = Handout(trials)
    for _ in range(3):
        handout.answer("a", "next")
    handout.answer("a", "complete", 0, [0.5], {})
    handout.answer("a", "prunes", 1, 0.25, 0)
    handout.answer("a", "rest", 1)
    assert handout.give_back("a") == [2]
    assert handout.answer("b", "next") == 2


def test_what_optuna_refuses_with_the_caller_ends_the_sweep():
    handout = Handout(Trials(new_study(), "mine", 3))

    def build_nothing(trial):
        trial.suggest_float("lr", 2.0, 1.0)

    with refused(says="low"):
        train_as("node-a", handout, build_nothing)


def test_all_have_failed():
    search = cluster.ClusterSearch("auto", settings_of(), Trials(new_study(), "mine", 1), None, 0)
    search.check()
    search._handout.answer("a", "next")
    search._handout.answer("a", "fail", 0, "OSError: the disk is away")
    with refused(RuntimeError, task="trial-0", says="OSError: disk"):
        search.check()


def test_without_ray_the_error_names_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with refused(ImportError, says="hydra_engine[ray]"):
        Sweep(build, cluster="auto")


@pytest.mark.parametrize("address", ["127.0.0.1:9", "nowhere"])
def test_a_cluster_that_cannot_be_reached(address):
    pytest.importorskip("ray", reason="ray is not installed: pip install 'hydra_engine[ray]'")
    study = new_study()
    with refused(ConnectionError, says=f"cluster: '{address}' 'auto'"):
        Sweep(build, study=study, cluster=address).run()
    assert study.trials == []


# -- nodes of Ray

RAY_NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False}


@pytest.fixture(scope="module")
def nodes():
    """A cluster of processes on this machine: a head without a CPU, and three nodes."""
    ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'hydra_engine[ray]'")
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")  # whatever token this user has
        patch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
        found = Cluster(initialize_head=True, head_node_args={**RAY_NODE, "num_cpus": 0})
        try:
            for _ in range(3):
                found.add_node(**RAY_NODE)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Ray's own
                ray.init(found.address, namespace="sweep", logging_level="ERROR")
            yield found
        finally:
            ray.shutdown()
            found.shutdown()


class Stage:
    """A place on which the first one to come waits for ever."""

    def __init__(self):
        self.has_come, self.node_id = threading.Event(), None

    def come(self, node_id):
        is_first, self.node_id = self.node_id is None, self.node_id or node_id
        self.has_come.set()
        return is_first

    def first(self):
        assert self.has_come.wait(HANG_S)
        return self.node_id


class Come(Callback):
    def on_step(self, report):
        if report.steps == STEPS + 2:
            import ray

            come = ray.get_actor("stage", namespace="sweep").come
            if ray.get(come.remote(ray.get_runtime_context().get_node_id())):
                threading.Event().wait(HANG_S)  # until its node is killed


@pytest.mark.rest
def test_twelve_trials_on_three_nodes_of_which_one_is_killed_and_another_comes(nodes, tmp_path):
    import ray

    faulthandler.cancel_dump_traceback_later()  # each wait below ends by itself
    study, local = new_study(), new_study()
    for each in (study, local):
        for width, lr in itertools.product((4, 8), (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)):
            each.enqueue_trial({"width": width, "lr": lr})
    options = {"num_trials": 12, "parallel": 2, "devices": [EmulatedDevice("1MiB")]}
    Sweep(build, study=local, **options).run()

    stage = ray.remote(Stage).options(name="stage", num_cpus=0, max_concurrency=4).remote()
    options |= {"cluster": nodes.address, "checkpoint_dir": tmp_path, "checkpoint_every": 1}
    there = Sweep(lambda trial: build(trial, *([Come()] if trial.number == 4 else [])), study=study, **options)
    with ThreadPoolExecutor(1) as threads:
        ended = threads.submit(there.run)
        node_id = ray.get(stage.first.remote(), timeout=HANG_S)
        [victim] = [node for node in nodes.worker_nodes if node.node_id == node_id]
        nodes.remove_node(victim, allow_graceful=False)
        nodes.add_node(**RAY_NODE)
        ended.result(HANG_S)
    assert_once_each(study, 12)
    assert outcomes(study) == outcomes(local)
    for number in (4, 11):
        weights = plain(study.trials[number])[1].parameters()
        assert all(map(torch.equal, there.model(study.trials[number]).parameters(), weights))


@pytest.mark.rest
def test_what_no_trial_could_do_without_ends_a_sweep_on_nodes(nodes):
    with refused(TypeError, task="trial-", says="build_task: int ModelTask"):
        Sweep(lambda trial: 3, num_trials=5, cluster="auto").run()
    with refused(says="cluster: 'other:6379'"):
        Sweep(build, cluster="other:6379").run()
