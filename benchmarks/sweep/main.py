"""Sweeps: bits, memory and kills, and the same trials by other means. See README.md.

python benchmarks/sweep/main.py                        # every experiment; exit code 1 where one is not exact
python benchmarks/sweep/main.py halving --rounds 1     # some of them, and smaller
python benchmarks/sweep/main.py memory --dram 400MiB   # another cap than of six trials
"""

import argparse
import importlib.util
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from statistics import median
from typing import NamedTuple

import optuna
import psutil
import space
import torch

from hydra_engine import Callback, EmulatedDevice, ModelOrchestrator, ModelTask, stream_seed
from hydra_engine.planning import DramLimit
from hydra_engine.sweep import Sweep
from partitioners import format_bytes, parse_bytes

HERE = Path(__file__).resolve().parent
HANG_S = 300  # a process that takes longer has failed

optuna.logging.set_verbosity(optuna.logging.WARNING)


class Scale(NamedTuple):
    """What an experiment searches, and on what."""

    num_trials: int
    widths: tuple[int, ...]
    num_blocks: tuple[int, int]  # least and most
    num_windows: int
    epochs: int
    parallel: int
    memory: str  # of each of two devices


HALVING = Scale(24, (64, 128), (2, 4), 96, 4, 4, "32MiB")
MEMORY = Scale(60, (192,), (4, 4), 24, 1, 6, "32MiB")
KILLS = Scale(12, (32,), (1, 2), 48, 2, 3, "32MiB")


class Space:
    """The search space of a scale, for the engine and for plain PyTorch."""

    def __init__(self, scale):
        self.scale = scale
        self.data = space.data(scale.num_windows)

    def settings(self, trial):
        """Model, loader and learning rate."""
        width = trial.suggest_categorical("width", self.scale.widths)
        num_blocks = trial.suggest_int("num_blocks", *self.scale.num_blocks)
        batch_size = trial.suggest_categorical("batch_size", (16, 8))
        lr = trial.suggest_float("lr", 1e-4, 1e-2, log=True)
        return space.gpt(width, num_blocks), space.batches_of(self.data, batch_size), lr

    def build(self, trial, *callbacks):
        """The trial's task."""
        model, loader, lr = self.settings(trial)
        return ModelTask(
            model,
            space.next_byte_loss,
            loader,
            lr,
            self.scale.epochs,
            optimizer=torch.optim.AdamW,
            validation=self.data.validation,
            seed=trial.number,
            callbacks=callbacks,
        )

    def plain(self, trial):
        """The trial alone in plain PyTorch: losses and validation loss, epoch by epoch."""
        torch.manual_seed(stream_seed(0, trial.number, 0))
        model, loader, lr = self.settings(trial)
        return space.plain_epochs(model, loader, self.data.validation, lr, trial.number)

    def sweep(self, build, **options):
        """The engine's sweep, which prints nothing."""
        devices = [EmulatedDevice(self.scale.memory) for _ in range(2)]
        options = {"num_trials": self.scale.num_trials, "parallel": self.scale.parallel, **options}
        sweep = Sweep(build, devices=devices, **options)
        sweep.verbose = 0
        return sweep


class Keep(Callback):
    """Keeps a trial's losses, by its number."""

    def __init__(self, number, kept):
        self.number, self.kept = number, kept

    def on_task_end(self, report):
        self.kept.setdefault(self.number, []).append((list(report.losses), list(report.validation_losses)))


class Clocks(NamedTuple):
    """Seconds, on the wall's clock and of the processor, by this process and those that it started and that ended."""

    wall: float
    processor: float

    @classmethod
    def now(cls):
        return cls(time.perf_counter(), sum(os.times()[:4]))

    def since(self):
        return Clocks(*(now - then for now, then in zip(Clocks.now(), self, strict=True)))


def spread(values, unit=""):
    """Median and range."""
    return f"{median(values):.2f}{unit} ({min(values):.2f} to {max(values):.2f})"


def verdict(is_good):
    return "yes" if is_good else "NO"


# --- halving: the bits of the same trials one by one, with the same decisions ---


def halving(options):
    """24 trials of successive halving; True where bits and best configuration are those of one by one."""
    found = Space(HALVING)
    sweeps, ones = [], []
    is_good = True
    for number in range(options.rounds):
        kept = {}
        study = new_study(number)
        begun = Clocks.now()
        found.sweep(lambda trial, kept=kept: found.build(trial, Keep(trial.number, kept)), study=study).run()
        sweeps.append(begun.since())
        begun = Clocks.now()
        alone = [one_by_one(found, trial) for trial in study.trials]
        ones.append(begun.since())
        is_good = judged(study, kept, alone) and is_good
    for clock in Clocks._fields:
        theirs, mine = ([getattr(each, clock) for each in clocks] for clocks in (ones, sweeps))
        ratios = [one / sweep for one, sweep in zip(theirs, mine, strict=True)]
        print(
            f"halving: {clock}: the sweep {spread(mine, ' s')}, one by one {spread(theirs, ' s')}, times the sweep's "
            f"{spread(ratios)}",
            flush=True,
        )
    own_decisions(found)
    return is_good


def new_study(seed):
    pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=2)
    return optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed), pruner=pruner)


def one_by_one(found, trial):
    """The trial in plain PyTorch, for as many epochs as the sweep trained it."""
    epochs = found.plain(trial)
    trained = [next(epochs) for _ in trial.intermediate_values]
    return [loss for losses, _ in trained for loss in losses], [loss for _, loss in trained]


def judged(study, kept, alone):
    """Print how a sweep ended, and whether its bits and its best trial are those of one by one."""
    trials = study.trials
    num_equal = sum(kept.get(trial.number) == [alone[trial.number]] for trial in trials)
    num_equal_reports = sum(list(trial.intermediate_values.values()) == alone[trial.number][1] for trial in trials)
    complete = [trial for trial in trials if trial.state.name == "COMPLETE"]
    best = min(complete, key=lambda trial: alone[trial.number][1][-1])
    is_best = best.params == study.best_params and study.best_value == alone[best.number][1][-1]
    num_epochs = sum(len(trial.intermediate_values) for trial in trials)
    print(
        f"halving: {len(trials)} trials, {len(complete)} complete, {num_epochs} of "
        f"{len(trials) * HALVING.epochs} epochs trained; bits of one by one: {num_equal} of {len(trials)} trials; "
        f"best configuration equal: {verdict(is_best)}, {study.best_params}, {study.best_value:.4f}",
        flush=True,
    )
    return is_best and num_equal == num_equal_reports == len(trials)


def own_decisions(found):
    """One by one by Optuna itself, which decides with the reports in another order. Not judged."""

    def objective(trial):
        for step, (_, value) in zip(range(HALVING.epochs), found.plain(trial), strict=False):
            trial.report(value, step)
            if trial.should_prune():
                raise optuna.TrialPruned
        return value

    study = new_study(0)
    begin_s = time.perf_counter()
    study.optimize(objective, n_trials=HALVING.num_trials)
    seconds = time.perf_counter() - begin_s
    num_epochs = sum(len(trial.intermediate_values) for trial in study.trials)
    print(
        f"halving: one by one with its own decisions, of the first round: {num_epochs} epochs, {seconds:.2f} s, best "
        f"{study.best_params}, {study.best_value:.4f}",
        flush=True,
    )


# --- memory: many trials where few fit ---


def memory(options):
    """60 trials where DRAM is capped, six, and one, each sweep in a process of its own.

    True where each trial is trained once, to its end, and no plan is past the cap.
    """
    numbers = (MEMORY.num_trials, MEMORY.parallel, 1)
    many, few, one = (in_own_process("memory", number, options.dram or "") for number in numbers)
    is_good = many["complete"] == many["once"] == MEMORY.num_trials and many["planned_bytes"] <= many["cap_bytes"]
    for each in (many, few, one):
        print(
            f"memory: {each['trials']} trials, {each['complete']} complete, {each['once']} trained once; planned at "
            f"most {format_bytes(each['planned_bytes'])} of {format_bytes(each['cap_bytes'])}, "
            f"{each['planned_bytes'] / each['trial_bytes']:.2f} trials; resident set + "
            f"{format_bytes(each['grown_bytes'])} at its peak, {each['seconds']:.1f} s"
        )
    beyond = many["grown_bytes"] - one["grown_bytes"]
    print(
        f"memory: plans of all: {format_bytes(many['trials'] * many['trial_bytes'])}; peak of many / peak of few: "
        f"{many['grown_bytes'] / few['grown_bytes']:.2f}; many beyond one: {format_bytes(beyond)}, cap less one trial: "
        f"{format_bytes(many['cap_bytes'] - many['trial_bytes'])}",
        flush=True,
    )
    return is_good


class Together(Callback):
    """Lets the first trials wait for each other in their first steps, until DRAM is full."""

    def __init__(self, number):
        self.number, self.begun, self.is_full = number, set(), threading.Event()

    def on_step(self, report):
        self.begun.add(report.name)
        if len(self.begun) >= self.number:
            self.is_full.set()
        self.is_full.wait()


def memory_child(number, dram):
    """One sweep; prints what became of it."""
    scale = MEMORY._replace(num_trials=int(number))
    found, kept, planned = Space(scale), {}, []
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0), pruner=optuna.pruners.NopPruner())
    trial_bytes = largest_bytes(found)
    cap_bytes = parse_bytes(dram, "dram") if dram else scale.parallel * trial_bytes
    together = Together(min(scale.num_trials, cap_bytes // trial_bytes))
    check = DramLimit.check

    def noting(limit, tasks):
        check(limit, tasks)
        planned.append(limit.held_bytes)

    def build(trial):
        return found.build(trial, together, Keep(trial.number, kept))

    DramLimit.check = noting
    sweep = found.sweep(build, study=study, parallel=2 * together.number, dram=cap_bytes)
    base_bytes = psutil.Process().memory_info().rss
    begin_s = time.perf_counter()
    try:
        sweep.run()
    finally:
        DramLimit.check = check
    seconds = time.perf_counter() - begin_s
    peak_bytes = peak_of_this_process()
    once = [
        trial for trial in study.trials if [len(losses) for losses, _ in kept[trial.number]] == [steps_of(scale, trial)]
    ]
    print(
        json.dumps(
            {
                "trials": len(study.trials),
                "complete": sum(trial.state.name == "COMPLETE" for trial in study.trials),
                "once": len(once),
                "trial_bytes": trial_bytes,
                "cap_bytes": cap_bytes,
                "planned_bytes": max(planned),
                "grown_bytes": peak_bytes - base_bytes,
                "seconds": seconds,
            }
        )
    )


def largest_bytes(found):
    """DRAM that the largest trial takes, by its plan."""
    params = {"width": found.scale.widths[-1], "num_blocks": found.scale.num_blocks[1], "batch_size": 16, "lr": 1e-3}
    task = found.build(optuna.trial.FixedTrial(params))
    orchestra = ModelOrchestrator([task], devices=[EmulatedDevice(found.scale.memory) for _ in range(2)])
    orchestra.verbose = 0
    return orchestra.generate().tasks["task-0"].dram_bytes


def peak_of_this_process():
    """The largest resident set that it had. (`getrusage` may say that of the process which started it.)"""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


def steps_of(scale, trial):
    """Steps of a trial that was trained to its end."""
    return scale.epochs * -(-scale.num_windows // trial.params["batch_size"])


def in_own_process(*arguments):
    """What this program prints as a child."""
    command = [sys.executable, __file__, "child", *map(str, arguments)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


# --- base: four adapters over one frozen base that is larger than the device ---


def base(options):
    """Sweeps of one and of four LoRA trials over one base, in turn; True where all bits are those of plain PyTorch.

    How often the base is loaded depends on who is held up, so that is printed and not judged.
    """
    try:
        import adapters
    except ImportError as error:
        print(f"base: not measured: {error}; `pip install hydra_engine[huggingface]`")
        return True
    ratios, is_equal, is_once = [], True, True
    for _ in range(options.rounds):
        one, one_equal = adapters.sweep_over(adapters.RANKS[:1])
        four, four_equal = adapters.sweep_over(adapters.RANKS)
        is_equal, is_once = is_equal and one_equal and four_equal, is_once and four["brought"] == one["brought"]
        ratios.append(four["loaded"] / one["loaded"])
    print(
        f"base: {format_bytes(one['brought'])} in DRAM for one trial, {format_bytes(four['brought'])} for four, once: "
        f"{verdict(is_once)}; on a device with a third of it; loaded {spread(ratios)} times what one loads"
    )
    print(f"base: bits of plain PyTorch: {verdict(is_equal)}", flush=True)
    return is_equal and is_once


# --- kills: at random moments ---


def kills(options):
    """kill -9 at random moments, until so many have struck; True where each study is as if there had been none."""
    draws = random.Random(options.seed)
    found = Space(KILLS)
    with tempfile.TemporaryDirectory() as root:
        whole_s = life(Path(root) / "whole", None)[1]
        num_kills = num_studies = 0
        is_good = True
        while num_kills < options.kills:
            folder = Path(root) / f"study-{num_studies}"
            num_studies += 1
            lives = []  # of its processes
            is_over = False
            while not is_over:
                told, num_built = told_of(folder), len(built_in(folder))
                is_over, lived_s = life(folder, draws.uniform(0, whole_s / 3) if num_kills < options.kills else None)
                num_kills += not is_over
                lives.append(f"{lived_s:.1f}")
                again = told.keys() & built_in(folder)[num_built:]
                is_good = is_good and not again and told.items() <= told_of(folder).items()
            is_good = as_without_kills(found, folder) and is_good
            print(f"study {num_studies}, processes that lived for {', '.join(lives)} s", flush=True)
    print(
        f"kills: {num_kills} kills in {num_studies} studies of {KILLS.num_trials} trials; an uninterrupted sweep takes "
        f"{whole_s:.1f} s; every trial once, values unchanged and those of plain PyTorch: {verdict(is_good)}",
        flush=True,
    )
    return is_good


def life(folder, moment_s):
    """Run a process of a sweep, and kill it `moment_s` seconds after the sweep began.

    Whether it ended by itself before, and for how many seconds it lived.
    """
    folder.mkdir(exist_ok=True)
    command = [sys.executable, __file__, "child", "kills", folder]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        if process.stdout.readline() != "begun\n":
            raise RuntimeError(f"a process of the sweep ended with {process.wait(HANG_S)} before it began")
        begin_s = time.perf_counter()
        try:
            process.wait(HANG_S if moment_s is None else moment_s)
        except subprocess.TimeoutExpired:
            process.kill()
        lived_s = time.perf_counter() - begin_s
    if process.returncode not in (0, -9) or (process.returncode and moment_s is None):
        raise RuntimeError(f"a process of the sweep ended with {process.returncode}")
    return process.returncode == 0, lived_s


def kills_child(folder):
    """A sweep that saves, and notes the trials that it builds."""
    folder = Path(folder)
    found = Space(KILLS)

    def build(trial):
        with (folder / "built").open("a") as file:
            print(trial.number, file=file)
        return found.build(trial)

    sweep = found.sweep(build, checkpoint_dir=folder, checkpoint_every=4)
    print("begun", flush=True)
    sweep.run()


def built_in(folder):
    """Numbers of trials, as often as they were built."""
    file = folder / "built"
    return [int(line) for line in file.read_text().splitlines()] if file.exists() else []


def told_of(folder):
    """Number -> all that the study holds of a trial that is over, as text. The study's files stay as they are."""
    with tempfile.TemporaryDirectory() as copied:
        for file in folder.glob("study.db*"):
            shutil.copy(file, copied)
        try:
            study = optuna.load_study(study_name="sweep", storage=f"sqlite:///{copied}/study.db")
        except KeyError:  # killed before the study was made
            return {}
        return {trial.number: repr(trial) for trial in study.trials if trial.state.is_finished()}


def as_without_kills(found, folder):
    """Whether a study has each trial once, over and well, with what plain PyTorch reports in as many epochs."""
    study = optuna.load_study(study_name="sweep", storage=f"sqlite:///{folder / 'study.db'}")
    ends = Counter(trial.state.name for trial in study.trials)
    print(f"kills: {ends['COMPLETE']} complete, {ends['PRUNED']} pruned, {len(study.trials)} in all; ", end="")
    if [trial.number for trial in study.trials] != list(range(KILLS.num_trials)):
        return False
    return ends["COMPLETE"] + ends["PRUNED"] == KILLS.num_trials and all(
        list(trial.intermediate_values.values()) == one_by_one(found, trial)[1]
        and trial.value == trial.intermediate_values[trial.last_step]
        and (trial.state.name == "PRUNED" or trial.last_step == KILLS.epochs - 1)
        for trial in study.trials
    )


# --- beside: the same trials by other means ---


class Program(NamedTuple):
    """One of the programs `beside_*.py`."""

    file: str
    arguments: tuple[str, ...] = ()

    @property
    def num_lines(self):
        """Lines of code: no empty ones, no comments, and not the docstring, which has one line."""
        lines = [line.strip() for line in (HERE / self.file).read_text().splitlines()]
        return sum(bool(line) and not line.startswith(("#", '"""')) for line in lines)


PROGRAMS = {
    "the engine": Program("beside_hydra.py"),
    "Optuna alone, spawn": Program("beside_optuna.py", ("spawn",)),
    "Optuna alone, fork": Program("beside_optuna.py", ("fork",)),
    "Ray Tune": Program("beside_ray.py"),
}


def beside(options):
    """The same 12 trials by each program, in turn; True where all have the same values."""
    programs = dict(PROGRAMS)
    if importlib.util.find_spec("ray") is None:
        del programs["Ray Tune"]
        print("beside: Ray Tune: not measured, ray is not installed")
    clocks, peaks = {name: [] for name in programs}, {name: [] for name in programs}
    expected, is_good = None, True
    for number in range(options.rounds):
        order = list(programs) if number % 2 == 0 else list(reversed(programs))
        for name in order:
            taken, peak_bytes, values = measured(programs[name])
            clocks[name].append(taken)
            peaks[name].append(peak_bytes / 2**20)
            expected = expected or values
            is_good = is_good and values == expected and len(values) == 12
    for name, program in programs.items():
        for clock in Clocks._fields:
            mine, engines = ([getattr(each, clock) for each in clocks[key]] for key in (name, "the engine"))
            ratios = [each / engine for each, engine in zip(mine, engines, strict=True)]
            print(f"beside: {name:20} {clock:9} {spread(mine, ' s')}, times the engine's {spread(ratios)}")
        print(
            f"beside: {name:20} peak {median(peaks[name]):.0f} MiB ({min(peaks[name]):.0f} to {max(peaks[name]):.0f}), "
            f"{program.num_lines} lines"
        )
    print(f"beside: values of 12 trials equal, bit for bit: {verdict(is_good)}", flush=True)
    return is_good


def measured(program):
    """Time of a program, the most DRAM of it and its processes (shared pages once), and what it found."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, HERE / program.file, folder, *program.arguments]
        peak_bytes = 0
        begun = Clocks.now()
        with (Path(folder) / "printed").open("w+") as printed:
            process = subprocess.Popen(command, stdout=printed)
            while process.poll() is None:
                peak_bytes = max(peak_bytes, tree_bytes(process.pid))
                time.sleep(0.1)
            taken = begun.since()
            printed.seek(0)
            lines = printed.readlines()
    if process.returncode:
        raise RuntimeError(f"{program.file} ended with {process.returncode}")
    return taken, peak_bytes, json.loads(lines[-1])


def tree_bytes(pid):
    """DRAM of a process and its descendants."""
    total = 0
    try:
        tree = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.Error:
        return 0
    for process in tree:
        try:
            total += process.memory_full_info().pss
        except psutil.Error:  # it has ended
            continue
    return total


EXPERIMENTS = {"halving": halving, "memory": memory, "base": base, "kills": kills, "beside": beside}
CHILDREN = {"memory": memory_child, "kills": kills_child}


def main(arguments=None):
    arguments = sys.argv[1:] if arguments is None else arguments
    torch.set_num_threads(1)  # bits depend on it; one compute thread for each device
    if arguments[:1] == ["child"]:
        CHILDREN[arguments[1]](*arguments[2:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiments", nargs="*", metavar="EXPERIMENT", help=f"{', '.join(EXPERIMENTS)}; default: all")
    parser.add_argument("--rounds", type=int, default=3, help="of halving, base and beside (default: 3)")
    parser.add_argument("--kills", type=int, default=10, help="default: 10")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of kills (default: 0)")
    parser.add_argument("--dram", help="of memory: the cap (default: of six trials)")
    options = parser.parse_args(arguments)
    unknown = set(options.experiments) - EXPERIMENTS.keys()
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}, known: {', '.join(EXPERIMENTS)}")
    print(f"{len(space.text())} bytes of text", flush=True)
    verdicts = [EXPERIMENTS[name](options) for name in options.experiments or EXPERIMENTS]
    return 0 if all(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
