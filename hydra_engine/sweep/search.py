"""One call of a sweep: keeps as many trials in training as there is room for, and tells the study what became of them.

    caller's thread      begins the first trial, then trains all that join, in `train_models`
    "sweep" thread       while they train: tells trials that are over, asks for the next, builds, plans and adds it
    callbacks' threads   one per trial: report validations, ask the pruner, and say that the trial has begun or is over

What happens to a trial travels as (trial, report) to the "sweep" thread: report None is its first step.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any
from weakref import WeakValueDictionary

from torch import nn

from hydra_engine import (
    DeviceSpec,
    HostOutOfMemory,
    Logger,
    ModelOrchestrator,
    ModelTask,
    Policy,
    Report,
    TaskReport,
    drawing_apart,
    furthest,
    stream_seed,
)
from hydra_engine.sweep.folder import SweepFolder
from hydra_engine.sweep.live import LiveTrial, name_of
from hydra_engine.sweep.objective import Objective
from hydra_engine.sweep.population import Population
from hydra_engine.sweep.study import Trials, fixed_trial, is_of_space, load_optuna, say_progress

# After an interrupt, a trial that is being built or planned is waited for no longer; its thread is left behind.
INTERRUPTED_S = 10.0
# While nothing happens, trials whose callbacks do not return are looked for so often: nobody tells that they are over.
LOOK_S = 1.0
# Models in DRAM per device: while one's weights cross the link or are updated, another computes.
MODELS_PER_DEVICE = 2


@dataclass(frozen=True, kw_only=True)
class SearchSettings:
    """Settings of a sweep, checked."""

    build_task: Callable[[Any], ModelTask]
    objective: Objective
    parallel: int | None  # None: `MODELS_PER_DEVICE`
    dram: int | str | None  # for all models; None: what the machine has
    devices: Sequence[DeviceSpec | str] | None  # None: as `ModelOrchestrator`
    policy: str | Policy | None  # None: by what trials share
    checkpoint_every: str | int
    seed: int
    population: Population | None = None
    loggers: Sequence[Logger] = ()

    def build(self, trial: Any) -> Any:
        """Call `build_task`, beside whatever trains, with torch's random stream seeded for the trial."""
        with drawing_apart(stream_seed(self.seed, trial.number, 0)):
            return self.build_task(trial)

    def check(self, trial: Any, task: Any, *, is_first: bool) -> None:
        """Raise TypeError or ValueError for what `build_task` returned, if it cannot be trained in this sweep."""
        self.objective.check(task, name_of(trial))
        if self.population is not None:
            self.population.check(task, name_of(trial), list(trial.params))
            if is_first:
                self.population.check_settings(task, trial, lambda params: self.build(fixed_trial(trial, params)))

    def orchestra(self, checkpoints: Path | None) -> ModelOrchestrator:
        """Make the orchestrator of a call. It stays: what has become of its devices is known."""
        orchestra = ModelOrchestrator(
            [],
            devices=self.devices,
            policy=self.policy or "sharded-lrtf",
            checkpoint_dir=checkpoints,
            checkpoint_every=self.checkpoint_every,
            dram=self.dram,
            loggers=self.loggers,
        )
        orchestra.verbose = 0
        return orchestra


class _Stage(Enum):
    """Stages of a search."""

    RESTS = auto()  # nothing trains
    TRAINS = auto()  # others may join
    LEFT = auto()  # its "sweep" thread did not end, and is left to itself: what comes of it is nobody's


class _Outcomes:
    """Ends of trials, as the study and whoever watches are told."""

    def __init__(self, trials: Trials, names: Sequence[str], verbose: int) -> None:
        """`names`: of a trial's values."""
        self._trials = trials
        self._names = names
        self._verbose = verbose
        self._first_failure: BaseException | None = None
        self._num_well = 0  # trials that did not fail

    def check(self) -> None:
        if self._first_failure is not None and not self._num_well:
            raise self._first_failure

    def ended(self, trial: Any, report: TaskReport, values: list[float] | None, *, is_pruned: bool = False) -> None:
        """Tell what a trial's task has come to; is_pruned: the study knows that."""
        if is_pruned:
            self.pruned(trial, "pruned", report)
        elif report.status == "failed":
            self.failed(trial, report.exception or RuntimeError(report.error), report.error)
        elif report.error is not None:
            self.failed(trial, RuntimeError(report.error))
        elif values is None or any(value != value for value in values):
            figures = "was validated never" if values is None else f"has {self.figures(values)}"
            self.failed(trial, RuntimeError(f"{name_of(trial)} {figures}, limit: numbers; see its validation"))
        else:
            self.completed(trial, values, report)

    def pruned(self, trial: Any, text: str, report: TaskReport | None = None) -> None:
        self._num_well += 1
        self.tell(trial, text, report)

    def completed(self, trial: Any, values: list[float], report: TaskReport) -> None:
        self._trials.complete(trial, values, {"steps": report.steps})
        self._num_well += 1
        self.tell(trial, f"completed, {self.figures(values)}", report)

    def failed(self, trial: Any, error: BaseException, text: str | None = None) -> None:
        """Tell that a trial was ended by an error: it has failed, or is pruned, by `optuna.TrialPruned`."""
        if isinstance(error, load_optuna().TrialPruned):
            self._trials.prune(trial)
            self.pruned(trial, "pruned, as it raised TrialPruned")
            return
        self._first_failure = self._first_failure or error
        said = str(error).strip()
        line = f"{type(error).__name__}: {said.splitlines()[0]}" if said else type(error).__name__
        self._trials.fail(trial, text or line)
        self.tell(trial, f"failed, {line}")

    def figures(self, values: Sequence[float]) -> str:
        return ", ".join(f"{name} {value:.6g}" for name, value in zip(self._names, values, strict=True))

    def tell(self, trial: Any, outcome: str, report: TaskReport | None = None) -> None:
        if self._verbose:
            steps = "" if report is None else f" after {report.steps} steps"
            values = {name: f"{each:.4g}" if isinstance(each, float) else each for name, each in trial.params.items()}
            params = ", ".join(f"{name}={value}" for name, value in values.items())
            say_progress(f"{self._trials.progress}; trial {trial.number}: {outcome}{steps}", params)


class _Models:
    """The models that trials brought: each has parameters of its own."""

    def __init__(self) -> None:
        self.is_empty = True
        self._parameters: WeakValueDictionary[int, nn.Parameter] = WeakValueDictionary()  # trainable, by id

    def add(self, task: ModelTask, name: str) -> None:
        """Add a trial's model; refuse one that another trial trains or has trained."""
        self.is_empty = False
        own = {each: parameter for each, parameter in task.model.named_parameters() if parameter.requires_grad}
        for parameter_name, parameter in own.items():
            if self._parameters.get(id(parameter)) is parameter:
                raise ValueError(
                    f"build_task: {name} got a model whose parameter {parameter_name} another trial trains, limit: a "
                    f"model of its own; make a new one in each call, and share frozen ones at most"
                )
        self._parameters.update({id(parameter): parameter for parameter in own.values()})


def frozen(task: ModelTask) -> set[nn.Parameter]:
    """Return the weights that a task does not train."""
    return {parameter for parameter in task.model.parameters() if not parameter.requires_grad}


class Search:
    """Trains the trials of one call; thrown away after it."""

    def __init__(
        self,
        settings: SearchSettings,
        trials: Trials,
        checkpoints: str | os.PathLike[str] | None,
        verbose: int,
        node: str = "",
    ) -> None:
        """`checkpoints`: folder of the trials' checkpoints; None: they are not saved. node: this one's directory there.

        Trials go on from the directory that has most of them, whosever that is.
        """
        self._settings = settings
        self._trials = trials
        self._root = None if checkpoints is None else Path(checkpoints)
        self._checkpoints = None if self._root is None else self._root / node
        self._outcomes = _Outcomes(trials, settings.objective.names, verbose)
        self._models = _Models()
        self._orchestra = settings.orchestra(self._checkpoints)  # of all trials
        self._parallel = settings.parallel or MODELS_PER_DEVICE * len(self._orchestra.devices)
        self._live: dict[str, LiveTrial] = {}  # in DRAM; touched by the "sweep" thread alone while it runs
        self._stage = _Stage.RESTS
        self._largest_bytes = 0  # of DRAM, that a trial has taken so far
        self._has_room = True  # False: DRAM had none for the next trial; until one is over
        self._events: SimpleQueue[tuple[LiveTrial | None, TaskReport | None] | None] = SimpleQueue()
        self._error: BaseException | None = None  # ends the sweep, once what trains is over

    def run(self) -> None:
        """Train until no trial is left."""
        try:
            while self._prepare():
                self._train()
                if self._error is not None:
                    raise self._error
        except BaseException as error:
            for trial in self._trials.interrupt(error, go_on=self._checkpoints is not None):
                self._outcomes.tell(trial, "interrupted, goes on when the sweep is run again")
            raise

    def check(self) -> None:
        """Raise the first failure, if every trial has failed."""
        self._outcomes.check()

    def look_again(self) -> None:
        """Ask for more trials, if there is room: others were given back."""
        self._events.put((None, None))

    # -- trials begin

    def _prepare(self) -> bool:
        """Add and plan trials while nothing trains; False where none is left to train."""
        self._has_room = True
        self._plan()  # those that came too late to join
        while len(self._live) < self._num_first() and self._has_room and self._begin():
            self._plan()
        return bool(self._live)

    def _num_first(self) -> int:
        """Return the number of trials that a run begins with; others join."""
        if self._settings.policy is not None:
            return 1
        weights = [weight for live in self._live.values() for weight in frozen(live.task)]
        if len(set(weights)) < len(weights):
            self._orchestra.policy = "in-step"  # and stays so
        if self._orchestra.policy == "in-step":
            return self._parallel  # in step from the beginning, they load what they share once
        return min(2, self._parallel) if weights else 1  # two tell if trials share frozen weights

    def _begin(self) -> bool:
        """Build the study's next trial and add its task, if it can be; False where there is none, or no room."""
        if self._live and self._orchestra.dram_left_bytes < self._largest_bytes:
            self._has_room = False
            return False
        self._climb()
        trial = self._trials.next()
        if trial is None:
            return False
        live = self._built(trial)
        if live is not None:
            self._add(live)
        return True

    def _built(self, trial: Any) -> LiveTrial | None:
        """Call `build_task`; None where that failed the trial, or pruned it. Raises what every trial would meet."""
        try:
            task = self._settings.build(trial)
        except Exception as error:
            self._failed(trial, error)
            if is_of_space(error):
                raise
            return None
        if self._stage is _Stage.LEFT:
            return None
        try:
            self._settings.check(trial, task, is_first=self._models.is_empty)
            self._models.add(task, name_of(trial))
        except (TypeError, ValueError) as error:
            self._failed(trial, error)
            raise
        objective = self._settings.objective
        return LiveTrial(trial, task, self._trials, objective, lambda *event: self._events.put(event))

    def _add(self, live: LiveTrial) -> None:
        """Add a trial's task; while others train, it is planned and joins them."""
        try:
            self._place(live)
            self._orchestra.add_task(live.task)
        except Exception as error:
            self._refused(live, error)
        else:
            self._live[live.name] = live
            self._note_plan(live)
            if self._stage is _Stage.TRAINS and not live.is_planned:
                self._tell_as_saved(live)

    def _place(self, live: LiveTrial) -> None:
        """Let a trial begin in its parent's state, or go on from another node's directory if that has more of it."""
        if self._checkpoints is None:
            return
        if (parent := self._trials.parent(live.trial)) is not None:
            self._orchestra.fork_task(name_of(parent), live.name)
        found = furthest(self._places, live.name)
        if found is not None and found != self._checkpoints:
            self._orchestra.resume_task(live.name, found)

    @property
    def _places(self) -> list[Path]:
        own, root = self._checkpoints, self._root
        return [] if own is None or root is None else [own, *SweepFolder.places(root)]

    def _tell_as_saved(self, live: LiveTrial) -> None:
        """Tell a trial that was over before a kill, and so has joined nobody; others came too late, and wait."""
        task = live.task
        with suppress(RuntimeError):
            report = self._forget(live)
            self._outcomes.ended(live.trial, report, self._settings.objective.outcome(task, report))

    def _plan(self) -> None:
        """Plan trials one by one while nothing trains, so that what is wrong with one is its own failure."""
        for live in [each for each in self._live.values() if not each.is_planned]:
            try:
                self._orchestra.generate()
            except Exception as error:
                self._orchestra.stop_task(live.name)
                self._orchestra.forget_task(live.name)  # it may come again
                del self._live[live.name]
                self._refused(live, error)
            else:
                self._note_plan(live)

    def _refused(self, live: LiveTrial, error: Exception) -> None:
        """The trial has failed; or it waits, where only DRAM is missing that others have now."""
        live.release()
        if isinstance(error, HostOutOfMemory) and self._live:
            self._has_room = False
            self._trials.put_back(live.trial)
        else:
            self._failed(live.trial, error)

    def _note_plan(self, live: LiveTrial) -> None:
        plan = self._orchestra.plan
        if plan is not None and live.name in plan.tasks:
            live.is_planned = True
            # Frozen weights may be shared: the next trial then finds them here. One that brings its own is refused.
            own = plan.tasks[live.name].dram_bytes - sum(weight.nbytes for weight in frozen(live.task))
            self._largest_bytes = max(self._largest_bytes, own)

    # -- trials train

    def _train(self) -> None:
        self._stage = _Stage.TRAINS
        thread = threading.Thread(target=self._keep_full, name="sweep", daemon=True)
        thread.start()
        try:
            report = self._trained()
            self._end(thread)
        except BaseException:
            self._end(thread, INTERRUPTED_S)
            if thread.is_alive():
                self._stage = _Stage.LEFT
            raise
        for name, live in list(self._live.items()):
            # A pause was heard of before; who was added again since, too late to join, waits for the next run.
            if name in report.tasks and report.tasks[name].status != "paused":
                self._over(live, report.tasks[name], is_last=True)

    def _end(self, thread: threading.Thread, wait_s: float | None = None) -> None:
        self._stage = _Stage.RESTS
        self._events.put(None)
        thread.join(wait_s)

    def _trained(self) -> Report:
        try:
            return self._orchestra.train_models(resume=self._checkpoints is not None)
        except Exception as error:
            report = self._orchestra.report
            if report is not None and any(task.exception is error for task in report.tasks.values()):
                return report  # every trial has failed
            raise

    def _keep_full(self) -> None:
        """Tell trials that are over, and begin others in their place, until the run is over."""
        is_over = False
        while not is_over and self._stage is not _Stage.LEFT:
            try:
                is_over = self._hear()
                while self._error is None and self._wants_more() and self._begin():
                    pass
            except BaseException as error:
                self._error = self._error or error

    def _hear(self) -> bool:
        """Wait for what becomes of a trial, and tell it. True: the run is over."""
        try:
            event = self._events.get(timeout=LOOK_S)
        except Empty:
            self._give_up_late()
            return False
        live, report = (None, None) if event is None else event
        if live is not None and report is not None:
            self._has_room = True
            self._over(live, report)
        return event is None

    def _give_up_late(self) -> None:
        for live in list(self._live.values()):
            if (error := live.late) is not None:
                with suppress(RuntimeError):  # the run is still to give up on it
                    self._forget(live)
                if live.name not in self._live:
                    self._has_room = True
                    self._failed(live.trial, error)

    def _wants_more(self) -> bool:
        # One that was added and not planned came too late.
        is_running = self._stage is _Stage.TRAINS and all(live.is_planned for live in self._live.values())
        return is_running and self._has_room and len(self._live) < self._parallel

    # -- trials end

    def _over(self, live: LiveTrial, report: TaskReport, *, is_last: bool = False) -> None:
        """Tell the study how a trial has ended, and free its memory. In the run, its task is forgotten.

        A task is stopped by its callbacks, or by an interrupt, after which the trial goes on some day. is_last: the run
        has ended, and was not interrupted.
        """
        if live.name not in self._live:
            return
        trial = live.trial
        if report.status == "paused":
            self._forget(live)
            if self._trials.is_at_rung(trial, len(report.validation_losses)):
                self._trials.rest(trial)
            else:
                text = f"{live.name}: a callback paused it, limit: rungs; in a sweep, raise StopTask to end a trial"
                self._failed(trial, RuntimeError(text))
            return
        is_ended = report.status in ("finished", "failed") or report.error is not None or live.is_ended_by_callback
        if not (live.is_pruned or is_ended or is_last):
            return
        values = self._settings.objective.outcome(live.task, report)
        self._forget(live)
        self._outcomes.ended(trial, report, values, is_pruned=live.is_pruned)

    def _forget(self, live: LiveTrial) -> TaskReport:
        """Free a trial's memory and return its report; RuntimeError where its task has not left the run yet."""
        report = self._orchestra.forget_task(live.name)
        del self._live[live.name]
        live.release()
        return report

    def _climb(self) -> None:
        for trial in self._trials.climb():
            is_at_rung = self._settings.population is None
            self._outcomes.pruned(trial, "pruned at its rung" if is_at_rung else "pruned, for a better one")

    def _failed(self, trial: Any, error: BaseException, text: str | None = None) -> None:
        if self._stage is not _Stage.LEFT:
            self._outcomes.failed(trial, error, text)
