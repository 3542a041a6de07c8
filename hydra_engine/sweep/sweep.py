"""A sweep: a search space and a budget of trials in, an Optuna study out."""

from __future__ import annotations

import math
import os
import uuid
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hydra_engine import (
    DeviceSpec,
    EmulatedDevice,
    Logger,
    Model,
    ModelOrchestrator,
    ModelTask,
    Policy,
    furthest,
    load_newest,
)
from hydra_engine.sweep.cluster import ClusterSearch, load_ray
from hydra_engine.sweep.folder import SweepFolder
from hydra_engine.sweep.live import name_of
from hydra_engine.sweep.objective import Objective
from hydra_engine.sweep.population import Population
from hydra_engine.sweep.rungs import Rungs
from hydra_engine.sweep.search import MODELS_PER_DEVICE, Search, SearchSettings
from hydra_engine.sweep.study import Trials, directions_of, fixed_trial, load_optuna, open_study
from hydra_engine.texts import warn
from partitioners.plain_numbers import finite_number, whole_number

if TYPE_CHECKING:
    import optuna


# `hydra-engine resume` names the directory to go on from here (docs/signals.md), and that of a run without a
# checkpoint_dir, which was saved as its device was lost, begins so.
RESUME, RESCUE = "HYDRA_ENGINE_RESUME", "hydra-rescue-"


class Sweep:
    """Trains the trials of an Optuna study together, so many at a time as DRAM and devices take.

    Args:
        build_task: (trial) -> ModelTask, in Optuna's define-by-run style: it asks the trial for values, and makes a new
            model, and a task with `validation=` and without `name=`. It is called with torch's random stream seeded for
            the trial (`seed`), so a trial's model and results depend on its number and its values alone. What it raises
            fails the trial, and `optuna.TrialPruned` prunes it; so it does where a callback raises it. It runs beside
            training: where it draws from `random` or `numpy.random`, give it generators of its own.
        study: an `optuna.Study`, with the sampler, pruner, directions and storage of your choice; or the URL of a
            storage, in which the study is named "sweep"; or None: SQLite in `checkpoint_dir`, or memory without one.
        num_trials: trials in all. Those of an earlier call with the same `checkpoint_dir` count.
        timeout: seconds from the beginning of a call after which no new trial begins, as of `study.optimize`; trials
            that were begun go on to their end. None: no limit. `trial.study.stop()`, in `build_task` or in a callback,
            does the same at once. The next call goes on up to `num_trials`.
        parallel: the most models that are in DRAM at once; default: two per device. Fewer, while DRAM has no room.
        devices: as of `ModelOrchestrator`.
        policy: as of `ModelOrchestrator`. None: "in-step" where trials that train together share frozen weights, else
            "sharded-lrtf".
        dram: the most DRAM that all models take together, as of `ModelOrchestrator`; fewer train at once to keep to it.
        checkpoint_dir: folder of the sweep. Run again after it was killed, the sweep goes on with every trial from its
            last checkpoint, and trains none again that was told. None: nothing is saved.
        checkpoint_every: as of `ModelOrchestrator`.
        metric: the figure of the last validation, or of the best one where the task has `keep_best`, that is a trial's
            value: "validation_loss", or a name in the task's `metrics`; for several objectives a list, one name per
            direction. None: the validation loss.
        direction: "minimize" or "maximize", or Optuna's `StudyDirection`, or a list, of a study that is made here, or
            of one that is there already, which must have the same; needed for a metric, where no `optuna.Study` is
            given.
        seed: of the trials' random streams.
        rungs: `Rungs(min_resource=1, reduction_factor=3)`: synchronous successive halving, instead of the study's
            pruner. A trial waits at a rung in `checkpoint_dir`, and not in DRAM, until all trials have come there.
        population: `Population(settings=["lr"], interval=1)`: population-based training with `num_trials` members,
            instead of a pruner. The worst are pruned, and new trials go on in the state of the best with perturbed
            settings; `trial.user_attrs["parent"]` says of which.
        cluster: address of a Ray cluster, "auto" or HOST:PORT of its head (extra `ray`): the trials train on all of its
            nodes with a CPU, on each in one engine over `devices` there. A node that dies gives its trials back: they
            go on from their checkpoints, if nodes share `checkpoint_dir`, or else begin again, with the same bits. A
            node that joins gets trials, too. `parallel` is per node. None: this machine alone.
        loggers: as of `ModelOrchestrator`; trials are logged under their names, "trial-0" and so on, with their
            parameters as hparams. On a cluster each node has copies of them.

    Attributes:
        verbose: 0 silent, 1 a line for each trial that is over.
        study: that the last call has trained for, also after an interrupt; None before the first.

    A validation's value is reported to the study, by the validation's index from 0, and the pruner asked. A trial that
    raises is a failed trial; `study.trials[k].user_attrs["error"]` says why. A trial that is over gives its DRAM back,
    and the next one joins the others while they train.

    Raises at once what no trial could do without: TypeError and ValueError, also for a search space that Optuna refuses
    and for what `build_task` returns; ConnectionError for a storage or a cluster that cannot be reached;
    CheckpointError for a folder that is in use or of another study; ImportError without Optuna, or, for a cluster, Ray.
    """

    # More than seven parameters: it is public, and all but the first are settings that are named one by one.
    def __init__(
        self,
        build_task: Callable[[Any], ModelTask],
        *,
        study: optuna.Study | str | None = None,
        num_trials: int = 12,
        timeout: float | None = None,
        parallel: int | None = None,
        dram: int | str | None = None,
        devices: Sequence[DeviceSpec | str] | None = None,
        policy: str | Policy | None = None,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        checkpoint_every: str | int = "10min",
        metric: str | Sequence[str] | None = None,
        direction: str | optuna.study.StudyDirection | Sequence[str | optuna.study.StudyDirection] | None = None,
        seed: int = 0,
        rungs: Rungs | None = None,
        population: Population | None = None,
        cluster: str | None = None,
        loggers: Sequence[Logger] = (),
    ) -> None:
        load_optuna()
        if cluster is not None:
            load_ray()
            if not isinstance(cluster, str):
                raise TypeError(f"cluster: {cluster!r} is a {type(cluster).__name__}; give 'auto', or HOST:PORT")
        self._cluster = cluster
        if not callable(build_task):
            raise TypeError(f"build_task: {build_task!r} is not callable; give a function (trial) -> ModelTask")
        num_trials = whole_number("num_trials", num_trials, 1 if population is None else 2)  # a population's members
        parallel = None if parallel is None else whole_number("parallel", parallel)
        seed = whole_number("seed", seed, -(2**63))  # torch's least
        timeout = None if timeout in (None, math.inf) else finite_number("timeout", timeout)
        objective = Objective.parse(metric)
        self._directions = None if direction is None else directions_of(direction)
        if self._directions is not None and len(self._directions) != len(objective.names):
            raise ValueError(
                f"direction: {len(self._directions)}, limit: one for each of {len(objective.names)} metrics"
            )
        if metric is not None and direction is None and (study is None or isinstance(study, str)):
            raise ValueError(f"direction: not given, and metric {metric!r} may be any; give 'minimize' or 'maximize'")
        if rungs is not None and population is not None:
            raise ValueError("population: given beside rungs, limit: one of the two; a population prunes by itself")
        for field, given, kind in (("rungs", rungs, Rungs), ("population", population, Population)):
            if given is None:
                continue
            if not isinstance(given, kind):
                raise TypeError(f"{field}: {given!r} is a {type(given).__name__}; give a {kind.__name__}")
            if checkpoint_dir is None:
                raise ValueError(f"{field}: no checkpoint_dir, limit: a folder, where trials wait at a rung; give one")
            if len(objective.names) > 1:
                raise ValueError(f"{field}: {len(objective.names)} metrics, limit: 1, by which trials are ranked")
        if population is not None and cluster is not None:
            raise ValueError("population: given beside cluster, limit: this machine; leave one of them out")
        self._rungs: Rungs | Population | None = rungs or population
        settings = SearchSettings(
            build_task=build_task,
            objective=objective,
            parallel=parallel,
            dram=dram,
            devices=devices,
            policy=policy,
            checkpoint_every=checkpoint_every,
            seed=seed,
            population=population,
            loggers=loggers,
        )
        # Raises for what no run would take. On a cluster devices are each node's own, and none of them is touched here.
        here = settings if cluster is None else replace(settings, devices=[EmulatedDevice("1MiB")])
        orchestra = here.orchestra(None)
        if cluster is None:
            parallel = parallel or min(num_trials, MODELS_PER_DEVICE * len(orchestra.devices))
            settings = replace(settings, parallel=parallel)
        self._settings = settings
        self._study = study
        self._opened: tuple[optuna.Study, Any] | None = None  # and its storage, where it was opened here
        self._num_trials = num_trials
        self._timeout_s = timeout
        self._checkpoint_dir = checkpoint_dir
        self._sweep_id = uuid.uuid4().hex  # without a folder that has one
        self.verbose = 1

    def run(self) -> optuna.Study:
        """Train until the study has all trials, and return it.

        After Ctrl-C or SIGTERM what trains is saved, and the next call goes on with it; without `checkpoint_dir` these
        trials have failed. When every trial of the call has failed, the first failure is raised.
        """
        path, settings = self._checkpoint_dir, self._settings
        asked = os.environ.get(RESUME, "")
        if path is None and asked and os.path.basename(os.path.realpath(asked)).startswith(RESCUE):
            warn(
                f"hydra_engine: this sweep begins anew, and not from {asked}: without a checkpoint_dir nobody knows "
                f"which values the trials had whose weights were saved there; give it one"
            )
            del os.environ[RESUME]
        with nullcontext() if path is None else closing(SweepFolder(path)) as folder:
            if self._opened is None:
                url = None if folder is None else folder.study_url
                self._opened = open_study(self._study, url, self._directions, len(settings.objective.names))
            study, storage = self._opened
            sweep_id = self._sweep_id if folder is None else folder.sweep_id
            made = Trials(
                study, sweep_id, self._num_trials, storage, self._rungs, settings.seed, timeout_s=self._timeout_s
            )
            with closing(made) as trials:
                if folder is not None:
                    folder.check_is_of(trials.num_known)
                checkpoints = None if folder is None else folder.checkpoints
                search: Search | ClusterSearch
                if self._cluster is None:
                    search = Search(settings, trials, checkpoints, self.verbose)
                else:
                    search = ClusterSearch(self._cluster, settings, trials, checkpoints, self.verbose)
                search.run()
                search.check()
        return study

    @property
    def study(self) -> optuna.Study | None:
        """The study, also after an interrupt or an error; None before the first call. Another call goes on with it."""
        return None if self._opened is None else self._opened[0]

    def model(self, trial: optuna.trial.FrozenTrial) -> Model:
        """Return the model of a completed or pruned trial with the weights that it was left with, from its checkpoint.

        `sweep.model(study.best_trial)`. Raises ValueError without a `checkpoint_dir`, and for a trial that was not
        saved.
        """
        if self._checkpoint_dir is None:
            raise ValueError("model: nothing was saved; give the sweep a checkpoint_dir")
        name = name_of(trial)
        with closing(SweepFolder(self._checkpoint_dir)) as folder:
            place = furthest(folder.places(folder.checkpoints), name) or folder.checkpoints
            found = load_newest(place)
            over = None if found is None else found.data["tasks"].get(name, {}).get("over")
            if over not in ("finished", "stopped"):
                raise ValueError(f"model: {name} is not in {folder.path} as one that is over; give one that is")
            task = self._settings.build(fixed_trial(trial))
            task.name = name
            orchestra = ModelOrchestrator([task], devices=self._settings.devices, checkpoint_dir=place)
            orchestra.verbose = 0
            orchestra.train_models(resume=True)  # puts the weights back; there is nothing left to train
            return task.model  # type: ignore[no-any-return]
