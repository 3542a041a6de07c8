"""Kill a training at random moments, start it again, and compare what it leaves with an uninterrupted one.

    python -m tests.durability                           # 4 kills, 2 of them while a checkpoint is written
    python -m tests.durability --kills 100 --aimed 50    # what `benchmarks/durability` runs
    python -m tests.durability --other-settings          # each start on other devices, budgets, partitions, policies

Runs take turns in which layers are at home on devices: none, half, all. With other settings each start draws them.

One JSON object per run, the uninterrupted one first. This process imports torch, computes nothing and has no thread, so
that a training is a fork of it: a start takes milliseconds, and the 100 minutes.
"""

import argparse
import faulthandler
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import NamedTuple

import torch

from hydra_engine.checkpoints.checkpoint import FILES, newest_first, read_manifest
from tests import durable, exact
from tests.durable import Settings

ROOT = Path(__file__).parent.parent
HANG_S = 60  # a training that takes longer is ended, with every thread's stack in its log
POLL_S = 0.0005
STEM_LENGTH = len("00000001-4f1c9a2e")  # of a file's name: the checkpoint that wrote it
TRIED = "00000000-"  # the file that is written as a directory is opened
MORE_KILLS = 0.25  # of the runs are killed more than once
MARGIN = 1.2  # aimed kills fall up to so many times a save's duration after its begin: also right after it


class Moment(NamedTuple):
    """When a process is killed: seconds after its start, or after it began a save."""

    after_s: float
    save: int | None = None  # 1: the first that the process makes; None: whatever it does


class Kill(NamedTuple):
    """One that struck."""

    after_s: float  # the process's start
    aimed: bool
    in_save: bool  # a save, or the removal of an old one, was cut off: something unfinished lies there
    num_whole: int  # checkpoints that lie there


class Outcome(NamedTuple):
    """What became of a run; `different` and `error` are empty where it is as it should be."""

    name: str
    kills: list  # that struck
    settings: list  # of each process, and of those that it did not take
    duration_s: float
    begun: dict | None = None  # task -> steps that the last process found
    different: list | tuple = ()  # places that do not hold the bits of the uninterrupted run
    error: str = ""
    saving: dict | None = None  # what the last process says of its own
    homed_bytes: int = 0  # of devices, that homes took in the last process
    num_saves: int = 0  # the last process's, as they look from outside
    save_s: float = 0.0  # their mean


class Saves:
    """The saves of one process, as they look from outside."""

    def __init__(self, directory):
        self.directory = directory
        self._known = self._written()  # by the processes before
        self._begun_s, self._ended_s = {}, {}

    def _whole(self):
        return newest_first(self.directory)

    def _written(self):
        """The beginnings of files' names, one for each save that something is there of."""
        try:
            names = os.listdir(self.directory / FILES)
        except FileNotFoundError:
            return set()
        return {name[:STEM_LENGTH] for name in names if not name.startswith((TRIED, "."))}

    def look(self, now_s):
        """Note what is new."""
        for stem in self._written() - self._known - self._begun_s.keys():
            self._begun_s[stem] = now_s
        whole = {path.name for path in self._whole()}
        for stem in self._begun_s.keys() - self._ended_s.keys():
            if f"checkpoint-{stem}.json" in whole:
                self._ended_s[stem] = now_s

    def begin_s(self, number):
        """When the process began one; None: not yet."""
        begun_s = list(self._begun_s.values())
        return begun_s[number - 1] if len(begun_s) >= number else None

    @property
    def durations_s(self):
        """Of those that ended."""
        return [end_s - self._begun_s[name] for name, end_s in self._ended_s.items()]

    def after_kill(self):
        """Whether a save or a removal was cut off, so that files lie there unnamed; how many checkpoints there are."""
        whole = self._whole()
        named = {stored.file for path in whole for stored in read_manifest(path).files}
        files = self.directory / FILES
        there = {path.name for path in files.iterdir()} if files.exists() else set()
        return bool(there - named), len(whole)


def start(folder, settings):
    """Fork a process that trains; its id. What it prints goes to the folder's log."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        faulthandler.dump_traceback_later(HANG_S, exit=True, file=log)
        durable.train(folder, settings)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)  # not the parent's clean-up


def lived(folder, settings, moment):
    """One process from start to end: a generator, to go on until it gives (exit code, Kill or None, Saves).

    The code is negative where a signal ended it. `moment`: None to let it end by itself.
    """
    saves = Saves(folder / durable.CHECKPOINTS)
    begin_s = time.monotonic()
    pid = start(folder, settings)
    try:
        while True:
            ended, status = os.waitpid(pid, os.WNOHANG)
            now_s = time.monotonic()
            if ended:
                pid = None
                return os.waitstatus_to_exitcode(status), None, saves
            saves.look(now_s)
            base_s = begin_s if moment is None or moment.save is None else saves.begin_s(moment.save)
            if moment is not None and base_s is not None and now_s >= base_s + moment.after_s:
                os.kill(pid, signal.SIGKILL)
                _, status = os.waitpid(pid, 0)
                pid = None
                code = os.waitstatus_to_exitcode(status)
                struck = Kill(now_s - begin_s, moment.save is not None, *saves.after_kill())
                return code, struck if code == -signal.SIGKILL else None, saves
            yield  # others have their turn
    finally:
        if pid is not None:  # this run was given up
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def run(folder, moments, settings, expected=None):
    """Train in a new folder, killed at each moment that comes before the end; like `lived`, gives an `Outcome`.

    settings: of each process. expected: what the uninterrupted run left; None: this is it.
    """
    folder.mkdir()
    begin_s, kills = time.monotonic(), []
    for moment, each in zip((*moments, None), settings, strict=True):
        code, kill, saves = yield from lived(folder, each, moment)
        if kill is None:
            break
        kills.append(kill)
    outcome = Outcome(name=folder.name, kills=kills, settings=settings, duration_s=time.monotonic() - begin_s)
    if code:
        return outcome._replace(error=f"exit code {code}\n{(folder / 'log').read_text()}")
    left, durations_s = durable.load_results(folder), saves.durations_s
    begun = left["begun"]
    has_resumed = any(begun.values()) or len(begun) < len(durable.BUILDERS)
    if has_resumed != bool(kills and kills[-1].num_whole):
        return outcome._replace(error=f"it began with {begun} steps, where the kills left {kills}")
    if left["saving"]["num_failed"]:
        return outcome._replace(error=f"a save failed: {left['saving']}")
    return outcome._replace(
        begun=begun,
        saving=left["saving"],
        homed_bytes=left["homed_bytes"],
        different=[] if expected is None else durable.differences(left["leaves"], expected),
        num_saves=len(durations_s),
        save_s=sum(durations_s) / max(1, len(durations_s)),
    )


def ended(runs):
    """Let each go on by a step; those that ended, with their outcomes."""
    found = []
    for each in runs:
        try:
            next(each)
        except StopIteration as end:
            found.append((each, end.value))
    time.sleep(0 if found else POLL_S)
    return found


def uninterrupted(root, number):
    """Outcomes of so many runs that are not killed, all at once, and what the first left.

    Where they are several, one alone is before them: it says what they have to leave.
    """
    expected, groups = None, [["plain"]]
    if number > 1:
        groups.append([f"plain-{k}" for k in range(number)])
    for group in groups:
        active = [run(root / name, (), [Settings()], expected) for name in group]
        outcomes = []
        while active:
            for one, outcome in ended(active):
                active.remove(one)
                outcomes.append(outcome)
        for outcome in outcomes:
            if outcome.error or outcome.different:
                raise RuntimeError(f"a run that was not killed went wrong, see {root}: {outcome}")
        expected = expected or durable.load_results(root / "plain")["leaves"]
    return outcomes, expected


class Campaign:
    """So many kills of each kind, and the outcome of every run that they took.

    root: a folder, where a run that went wrong is left. at_once: so many runs at a time.
    """

    def __init__(self, root, num_kills, num_aimed, *, seed=0, other_settings=False, at_once=1):
        self.root, self.seed, self.other_settings, self.at_once = root, seed, other_settings, at_once
        self._left = {True: num_aimed, False: num_kills - num_aimed}  # by whether they are aimed
        self._limit = 4 * num_kills + 4  # of runs: a moment may come too late, but not always
        self._num_runs = 0

    @property
    def num_missing(self):
        """Kills that did not strike."""
        return sum(self._left.values())

    def outcomes(self):
        """The uninterrupted runs' first."""
        plain, expected = uninterrupted(self.root, self.at_once)
        yield from plain
        active = {}
        try:
            while True:
                while len(active) < self.at_once and self.num_missing and self._num_runs < self._limit:
                    one, aimed, number = self._drawn(plain[0], expected)
                    active[one] = aimed, number
                    self._left[aimed] -= number
                if not active:
                    return
                for one, outcome in ended(active):
                    aimed, number = active.pop(one)
                    self._left[aimed] += number - len(outcome.kills)
                    if not (outcome.error or outcome.different):
                        shutil.rmtree(self.root / outcome.name)
                    yield outcome
        finally:
            for one in active:
                one.close()

    def _drawn(self, plain, expected):
        """The next run; whether its kills are aimed, and how many they are."""
        rng = random.Random(f"{self.seed}-{self._num_runs}")
        name = f"run-{self._num_runs}"
        self._num_runs += 1
        aimed = self._left[True] > self._left[False]
        number = min(self._left[aimed], rng.choice((2, 3)) if rng.random() < MORE_KILLS else 1)
        moments = [_moment(rng, plain, aimed, number) for _ in range(number)]
        same = Settings(homes=exact.FACTORS["homes"][(self.seed + self._num_runs) % 3])
        settings = [Settings.drawn(rng) if self.other_settings else same for _ in range(number + 1)]
        return run(self.root / name, moments, settings, expected), aimed, number


def _moment(rng, plain, aimed, number):
    """When a process is killed, of as many that share the time of the uninterrupted run."""
    if aimed:
        return Moment(rng.uniform(0, MARGIN * plain.save_s), rng.randint(1, max(1, plain.num_saves // number)))
    return Moment(rng.uniform(0, plain.duration_s / number))


def in_own_process(*arguments):
    """The outcomes of `python -m tests.durability`, one by one; raises CalledProcessError if there are none.

    A process that has computed, as that of a test has, cannot fork trainings.
    """
    command = [sys.executable, "-m", "tests.durability", *map(str, arguments)]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # it would begin a thread as it is imported
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            outcome = None
            for line in process.stdout:
                outcome = json.loads(line)
                kills = [Kill(**kill) for kill in outcome["kills"]]
                settings = [Settings(**each) for each in outcome["settings"]]
                yield Outcome(**{**outcome, "kills": kills, "settings": settings})
        except BaseException:
            process.terminate()
            raise
    if process.returncode and outcome is None:
        raise subprocess.CalledProcessError(process.returncode, command)


TORCHRUN_TASKS = ("conv", "drawing")
TORCHRUN_KILLS = ("conv:8", "drawing:19")
TORCHRUN_S = 100  # at most


def under_torchrun(root):
    """A training under torchrun that kills itself at two steps, beside one that does not, in a new folder each.

    Their differences, where it killed itself, and the steps that its last process found of each task.
    """
    plain, killed = root / "plain", root / "killed"
    for folder in (plain, killed):
        folder.mkdir(parents=True)
    tasks = ["--tasks", *TORCHRUN_TASKS]
    kills = [each for place in TORCHRUN_KILLS for each in ("--kill-at", place)]
    # What the command `torchrun` runs.
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "--max-restarts=3"]
    options = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    commands = (
        [sys.executable, "-m", "tests.durable", str(plain), *tasks],
        [sys.executable, *launch, "-m", "tests.durable", str(killed), *tasks, *kills],
    )
    processes = [subprocess.Popen(command, **options) for command in commands]
    try:
        printed = [process.communicate(timeout=TORCHRUN_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, text in zip(processes, printed, strict=True):
        if process.returncode:
            raise RuntimeError(f"{process.args} ended with {process.returncode}:\n{text}")
    expected, found = (durable.load_results(folder) for folder in (plain, killed))
    struck = sorted(path.name.removeprefix("killed-").replace("-", ":") for path in killed.glob("killed-*"))
    return durable.differences(found["leaves"], expected["leaves"]), struck, found["begun"]


def main(argv=None):
    """Print what became of each run; 0 where every kill struck and every run left the bits that it should."""
    parser = argparse.ArgumentParser(prog="python -m tests.durability", description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=4, metavar="N")
    parser.add_argument("--aimed", type=int, metavar="N", help="of them, while a save is written (default: half)")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    parser.add_argument("--other-settings", action="store_true", help="draw devices and partitions for each start")
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="runs at a time (default 1)")
    parser.add_argument("--folder", type=Path, help="where runs are, and stay if they go wrong (default: a new one)")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    aimed = arguments.kills // 2 if arguments.aimed is None else arguments.aimed
    root = Path(tempfile.mkdtemp(prefix="durability-", dir=arguments.folder))
    campaign = Campaign(
        root,
        arguments.kills,
        aimed,
        seed=arguments.seed,
        other_settings=arguments.other_settings,
        at_once=arguments.at_once,
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # with its trainings
    is_good = True
    for outcome in campaign.outcomes():
        is_good = is_good and not outcome.error and not outcome.different
        kills = [kill._asdict() for kill in outcome.kills]
        settings = [each._asdict() for each in outcome.settings]
        print(json.dumps({**outcome._asdict(), "kills": kills, "settings": settings}), flush=True)
    if is_good:
        shutil.rmtree(root)
    else:
        print(f"what went wrong is in {root}", file=sys.stderr)
    return 0 if is_good and not campaign.num_missing else 1


if __name__ == "__main__":
    sys.exit(main())
