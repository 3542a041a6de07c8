"""The study: trials that are asked for, reported and told, by Optuna's public API."""

from __future__ import annotations

import math
import re
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from enum import Enum
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

from hydra_engine.sweep.population import PARENT, Population
from hydra_engine.sweep.rungs import RUNG, Birth, Rungs, mark, rung_of, waits
from hydra_engine.texts import LINE, say

if TYPE_CHECKING:
    import optuna

T = TypeVar("T")

# User attribute of a trial: the sweep that it belongs to, and the id by which that sweep opens it again.
MARK = "hydra_engine"
STUDY_NAME = "sweep"
# User attribute of a running trial: True while nobody trains it, since the sweep was interrupted.
INTERRUPTED = "interrupted"
# A storage that does not answer is given up after this.
STORAGE_TIMEOUT_S = 15.0
PAUSE_S = 0.5  # before a storage that has not answered is asked again
DIRECTIONS = ("minimize", "maximize")
LEAST_REST = 10  # characters, with less of which a line of progress ends before the rest


class StudyMismatch(ValueError):
    """Settings that the study which is there already does not have."""


def load_optuna() -> Any:
    """Import Optuna, which the rest of the engine does without."""
    try:
        import optuna
    except ImportError as error:
        raise ImportError(
            "hydra_engine.sweep: optuna is not installed, limit: a sweep needs it; `pip install hydra_engine[sweep]`, "
            "or `pip install optuna`"
        ) from error
    return optuna


def directions_of(given: Any) -> list[str]:
    """Return the names of one direction, or of several: strings, or Optuna's own."""
    several = [given] if isinstance(given, (str, Enum)) or not isinstance(given, Iterable) else given
    return [each.name.lower() if isinstance(each, Enum) else each for each in several]


def open_study(
    study: Any, default_url: str | None, directions: Sequence[str] | None, num_values: int
) -> tuple[Any, Any]:
    """Return the user's study, or the one named "sweep" in a storage: a URL, None for `default_url` or memory.

    With it, the storage, where it was opened here.

    directions: of a study that is made here; one that is there already must have the same. Raises TypeError,
    ValueError, and ConnectionError within seconds for a storage that cannot be reached.
    """
    optuna, storage = load_optuna(), None
    for direction in directions or ():
        if direction not in DIRECTIONS:
            raise ValueError(f"direction: {direction!r}, known: {', '.join(map(repr, DIRECTIONS))}")
    if isinstance(study, optuna.Study):
        _check_directions(study, directions, "or leave it out")
    elif study is None or isinstance(study, str):
        study, storage = _named_study(optuna, study or default_url, directions or ["minimize"] * num_values)
    else:
        raise TypeError(f"study: {study!r} is a {type(study).__name__}; give an optuna.Study, or a storage's URL")
    if len(study.directions) != num_values:
        raise StudyMismatch(
            f"metric: {num_values} figures, limit: {len(study.directions)}, the number of the study's directions; name "
            f"one metric per direction"
        )
    return study, storage


def _check_directions(study: Any, directions: Sequence[str] | None, remedy: str) -> None:
    found = [direction.name.lower() for direction in study.directions]
    if directions is not None and found != list(directions):
        raise StudyMismatch(
            f"direction: {list(directions)}, limit: {found}, of the study {study.study_name!r} that is there already; "
            f"give that, {remedy}"
        )


def _named_study(optuna: Any, url: str | None, directions: Sequence[str]) -> tuple[Any, Any]:
    if url is None:
        return optuna.create_study(study_name=STUDY_NAME, directions=list(directions)), None

    def open_it() -> tuple[Any, Any]:
        # SQLite has one writer at a time, and a disk that others keep busy may take longer than its 5 s.
        waiting = {"engine_kwargs": {"connect_args": {"timeout": 60}}} if url.startswith("sqlite") else {}
        storage = optuna.storages.RDBStorage(url, **waiting)
        return optuna.create_study(
            storage=storage, study_name=STUDY_NAME, directions=list(directions), load_if_exists=True
        ), storage

    shown = re.sub(r"(?<=://)[^@/]*@", "...@", url)  # a password is nobody's business
    try:
        study, storage = _in_time(open_it, STORAGE_TIMEOUT_S)
    except Exception as error:
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConnectionError(
            f"study: {shown!r} cannot be opened: {said}; give sqlite:///FILE in a folder that exists, or the URL of a "
            f"server that answers, with its driver installed"
        ) from error
    _check_directions(study, directions, f"or another storage than {shown!r}")
    return study, storage


def _in_time(job: Callable[[], T], timeout_s: float) -> T:
    """Run a job in a thread, which is left behind where it does not return."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(job())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="sweep-storage", daemon=True).start()
    if not wait([result], timeout_s).done:
        raise TimeoutError(f"no answer in {timeout_s:g} s")
    return result.result()


def _answered(job: Callable[[], T]) -> T:
    """Do a job that may be done twice; again, while the storage does not answer, and has not been given up."""
    unanswered, until_s = load_optuna().exceptions.StorageInternalError, time.monotonic() + STORAGE_TIMEOUT_S
    while True:
        try:
            return job()
        except unanswered:
            if time.monotonic() >= until_s:
                raise
            time.sleep(PAUSE_S)


class _Stop:
    """Stands for `Study.stop` while a sweep runs: Optuna's own refuses calls from outside of `study.optimize`."""

    def __init__(self, study: Any, *, is_of_copy: bool = False) -> None:
        self._study = study
        self._is_of_copy = is_of_copy
        self.is_called = False

    def __call__(self) -> None:
        self.is_called = True
        if self._is_of_copy:
            with suppress(RuntimeError):  # it does not optimize: a loss that stops the study is tried before it trains
                type(self._study).stop(self._study)

    def __reduce__(self) -> Any:
        return partial(_Stop, is_of_copy=True), (self._study,)


class _Progress:
    """Counts a sweep's trials, for people: a storage that does not answer is not asked for that."""

    def __init__(self, study: Any, num_over: int, num_in_all: int) -> None:
        self.num_over = num_over
        self.num_in_all = num_in_all
        self.values: list[float] = []  # of completed trials; none of several objectives
        self._best: Callable[[list[float]], float] = max if study.directions[0].name == "MAXIMIZE" else min

    def __str__(self) -> str:
        best = f", best {self._best(self.values):.4g}" if self.values else ""
        return f"{self.num_over}/{self.num_in_all} done{best}"


def say_progress(text: str, rest: str = "") -> None:
    """Print a line of progress; a text that is longer goes on in an indented one, a rest is cut."""
    *lines, last = textwrap.wrap(text, LINE, subsequent_indent="    ") or [""]
    room = LINE - len(last) - len(", ")
    if rest and room >= LEAST_REST:
        last += f", {textwrap.shorten(rest, room, placeholder='...')}"
    say("\n".join([*lines, last]))


class Trials:
    """A sweep's trials in a study. From any thread: one call at a time, so that a decision sees all reports before it.

    A trial is in the study from the moment it is asked for, and is told once. One that was running when its process was
    killed is opened again, under its own number, with the values that it was given.

    Until `close`, `study.stop()` may be called from any thread: trials that were begun go on, and no new ones begin.

    Attributes:
        study: that they are in.
        num_known: trials of this sweep that were asked for, and not born of others.
    """

    def __init__(
        self,
        study: Any,
        sweep_id: str,
        num_trials: int,
        storage: Any = None,
        rungs: Rungs | Population | None = None,
        seed: int = 0,
        timeout_s: float | None = None,
    ) -> None:
        """`sweep_id`: whose trials they are. num_trials: that the sweep has in all, those of earlier calls too.

        storage: the study's, where it was opened here. seed: of a population's decisions. timeout_s: from now on, after
        which no new trial begins.
        """
        self._optuna = load_optuna()
        self.study: optuna.Study = study
        vars(study)["stop"] = self._stop = _Stop(study)
        self._until_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        self._sweep_id = sweep_id
        self._num_trials = num_trials
        self._rungs = rungs
        self._seed = seed
        self._lock = threading.RLock()
        state = self._optuna.trial.TrialState
        mine = [each for each in self._mine() if each.state != state.WAITING]
        begun = [each for each in mine if each.state == state.RUNNING]
        self._waiting = [
            self._optuna.trial.Trial(study, each.user_attrs[MARK]["trial_id"])
            for each in begun
            if "trial_id" in each.user_attrs[MARK]
        ]
        self.num_known = sum("trial_id" in each.user_attrs[MARK] and PARENT not in each.user_attrs for each in mine)
        # Killed between `ask` and the second mark, so nothing was asked of it yet.
        for each in (each for each in begun if "trial_id" not in each.user_attrs[MARK]):
            if storage is None and not self._waiting:
                study.tell(each.number, state=state.FAIL)  # another takes its place
            else:
                self._waiting.append(self._opened(storage or self._waiting[0].storage, each.number))
                self.num_known += PARENT not in each.user_attrs
        # The last that were born go first: whoever they are forks of must not go on before.
        self._waiting.sort(key=lambda each: -_born_after(each))
        self._at_rung: dict[int, Any] = {}  # trials that wait on disk, by number
        if rungs is not None:
            self._at_rung = {each.number: each for each in self._waiting if waits(each)}
            self._waiting = [each for each in self._waiting if not waits(each)]
        if isinstance(rungs, Population) and any(rung_of(each) > 0 for each in mine):
            self._stop()  # it has begun to decide, and nobody can join it any more
        self._untold: dict[int, Any] = {}  # given out by `next`, by number
        num_over = len(mine) - len(self._waiting) - len(self._at_rung)
        complete = [each for each in mine if each.state == state.COMPLETE]
        self._progress = _Progress(study, num_over, num_trials + len(mine) - self.num_known)
        self._progress.values = [each.value for each in complete] if self.has_pruning else []

    def _mine(self) -> list[Any]:
        marked = ((each, each.user_attrs.get(MARK)) for each in self.study.get_trials(deepcopy=False))
        return [each for each, mark in marked if isinstance(mark, dict) and mark.get("sweep") == self._sweep_id]

    @property
    def has_pruning(self) -> bool:
        """True if trials report values while they train; Optuna has no pruning of several objectives."""
        return len(self.study.directions) == 1

    def next(self) -> Any | None:
        """Return the next trial to train: one that was running or put back, or else a new one; None: no more."""
        with self._lock:
            if self._waiting:
                trial = self._waiting.pop(0)
                if trial.user_attrs.get(INTERRUPTED):
                    trial.set_user_attr(INTERRUPTED, False)
                self._untold[trial.number] = trial
                return trial
            if self._is_complete:
                return None
            waiting = self._optuna.trial.TrialState.WAITING
            if not self.study.get_trials(deepcopy=False, states=(waiting,)):
                # Marked before it is asked for: a kill in between leaves no trial of which nobody knows.
                mark = {MARK: {"sweep": self._sweep_id}}  # not enqueued: Optuna would take its parameters for given
                self.study.add_trial(self._optuna.trial.create_trial(state=waiting, user_attrs=mark))
            trial = self.study.ask()
            trial.set_user_attr(
                MARK, {"sweep": self._sweep_id, "trial_id": self._trial_id(trial.storage, trial.number)}
            )
            self.num_known += 1
            self._untold[trial.number] = trial
            return trial

    @property
    def num_waiting(self) -> int:
        """Number of trials that were begun, and of which `next` gives out the first."""
        return len(self._waiting)

    @property
    def has_more(self) -> bool:
        """True if `next` has a trial."""
        self._look_at_clock()
        return self.num_waiting > 0 or not self._is_complete

    @property
    def progress(self) -> str:
        """Number of trials that are over, and the best value: "3/12 done, best 0.41"."""
        with self._lock:
            return str(self._progress)

    @property
    def _is_complete(self) -> bool:
        """True if no new trial is to be asked for: all were, or the study is stopped."""
        return self.num_known >= self._num_trials or self._stop.is_called

    def _look_at_clock(self) -> None:
        """Stop the study once its time is over; not in `next`, so that `climb` before it knows of that."""
        if time.monotonic() >= self._until_s:
            self._stop()

    def close(self) -> None:
        """Give the study its own `stop` back."""
        if vars(self.study).get("stop") is self._stop:
            del vars(self.study)["stop"]

    def _trial_id(self, storage: Any, number: int) -> int:
        study_id = storage.get_study_id_from_name(self.study.study_name)
        return int(storage.get_trial_id_from_study_id_trial_number(study_id, number))

    def _opened(self, storage: Any, number: int) -> Any:
        trial_id = self._trial_id(storage, number)
        trial = self._optuna.trial.Trial(self.study, trial_id)
        trial.set_user_attr(MARK, {"sweep": self._sweep_id, "trial_id": trial_id})
        return trial

    def put_back(self, trial: Any) -> None:
        """Have a trial, which could not begin yet, be the next one."""
        with self._lock:
            self._waiting.insert(0, trial)

    def reported(self, trial: Any) -> set[int]:
        """Return the steps that a trial has reported, before its process was killed, or that are its parent's."""
        with self._lock:
            found = next(each for each in self.study.get_trials(deepcopy=False) if each.number == trial.number)
            return {*found.intermediate_values, *range(_born_after(found))}

    def parent(self, trial: Any) -> int | None:
        """Return the number of the trial in whose state one begins; None where it has come to a rung of its own."""
        born = _born_after(trial)
        if self._rungs is None or not born or born < self._rungs.num_validations(rung_of(trial) - 1):
            return None
        return int(trial.user_attrs[PARENT]["trial"])

    def prunes(self, trial: Any, value: float, step: int) -> bool:
        """Report a value, and return True if the pruner ends the trial; it is told so then. Rungs ask none."""
        with self._lock:
            _answered(partial(trial.report, value, step))
            if self._rungs is not None or not _answered(trial.should_prune):
                return False
            self.prune(trial)
            return True

    def is_at_rung(self, trial: Any, num_validations: int) -> bool:
        """Return True if a trial has come to the rung that it trains for.

        Or past it: one that was killed as it paused may go on from a later step.
        """
        with self._lock:
            return self._rungs is not None and num_validations >= self._rungs.num_validations(rung_of(trial))

    def rest(self, trial: Any) -> None:
        """A trial is saved at its rung, and waits there."""
        with self._lock:
            _answered(partial(trial.set_user_attr, RUNG, mark(rung_of(trial), waits=True)))
            self._at_rung[trial.number] = trial

    def climb(self) -> list[Any]:
        """Let the best trials of a rung that is full go on, be the next ones; prune the others, and return them.

        Trials that are born there come before those that go on, whose forks they are.
        """
        with self._lock:
            self._look_at_clock()
            if self._rungs is None:
                return []
            maximize = self.study.directions[0].name == "MAXIMIZE"
            decision = self._rungs.decide(
                self._mine(), is_complete=self._is_complete, maximize=maximize, seed=self._seed
            )
            # Births first, and then who goes on, before others are pruned: who decides again after a kill finds the
            # same ones.
            self._waiting += [self._born(birth) for birth in decision.births]
            for number in decision.goes_on:
                trial = self._at_rung.pop(number)
                trial.set_user_attr(RUNG, mark(rung_of(trial) + 1, waits=False))
                self._waiting.append(trial)
            pruned = [self._at_rung.pop(number) for number in decision.ends]
            for trial in pruned:
                self.prune(trial)
            return pruned

    def _born(self, birth: Birth) -> Any:
        """Put a trial that runs into the study, with all that it is known by in one write."""
        trial = self._optuna.trial.create_trial(
            state=self._optuna.trial.TrialState.RUNNING,
            params=birth.params,
            distributions=birth.distributions,
            user_attrs={MARK: {"sweep": self._sweep_id}, RUNG: mark(birth.rung, waits=False), **birth.user_attrs},
        )
        self.study.add_trial(trial)
        self._progress.num_in_all += 1
        [number] = [each.number for each in self._mine() if each.user_attrs.get(PARENT) == birth.user_attrs[PARENT]]
        return self._opened(next(iter(self._at_rung.values())).storage, number)

    def complete(self, trial: Any, values: list[float], attributes: dict[str, Any]) -> None:
        """Tell that a trial was trained to its end."""
        self._tell(trial, self._optuna.trial.TrialState.COMPLETE, values, attributes)

    def prune(self, trial: Any) -> None:
        """Tell that a trial is not trained further."""
        self._tell(trial, self._optuna.trial.TrialState.PRUNED)

    def fail(self, trial: Any, error: str) -> None:
        self._tell(trial, self._optuna.trial.TrialState.FAIL, attributes={"error": error})

    def _tell(
        self, trial: Any, state: Any, values: list[float] | None = None, attributes: dict[str, Any] | None = None
    ) -> None:
        with self._lock:
            self._untold.pop(trial.number, None)
            for key, value in (attributes or {}).items():
                _answered(partial(trial.set_user_attr, key, value))
            # One that was told, and the answer lost, is skipped.
            _answered(partial(self.study.tell, trial, values, state=state, skip_if_finished=True))
            self._progress.num_over += 1
            if self.has_pruning:
                self._progress.values += values or []

    def interrupt(self, error: BaseException, *, go_on: bool) -> list[Any]:
        """Note that an error has ended the sweep. Return the trials that go on as it is run again; else they failed."""
        with self._lock:
            untold = [trial for number, trial in self._untold.items() if number not in self._at_rung]
        found = []
        for trial in untold:
            if not go_on:
                self.fail(trial, f"the sweep was ended by {type(error).__name__}")
                continue
            with suppress(Exception), self._lock:  # of the storage, which may be what was raised
                trial.set_user_attr(INTERRUPTED, True)
                found.append(trial)
        return found


def fixed_trial(trial: Any, params: dict[str, Any] | None = None) -> Any:
    """Return a trial that gives `build_task` a trial's values again, or others; it can stop no study."""
    fixed = load_optuna().trial.FixedTrial(trial.params if params is None else params, number=trial.number)
    fixed.study = SimpleNamespace(stop=lambda: None)
    return fixed


def is_of_space(error: BaseException) -> bool:
    """Return True if Optuna itself has refused what a trial asked for, such as a range without values.

    Where that was on another machine, from which no traceback comes, the error says so as its attribute `is_of_space`.
    """
    if isinstance(error, load_optuna().TrialPruned):  # of a function in Optuna that prunes
        return False
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    name = "" if traceback is None else str(traceback.tb_frame.f_globals.get("__name__"))
    return name.partition(".")[0] == "optuna" or getattr(error, "is_of_space", False)


def _born_after(trial: Any) -> int:
    """Return the number of validations that a trial's parent had as it was born; 0 for one that was asked for."""
    return int(trial.user_attrs.get(PARENT, {"validations": 0})["validations"])
