"""Whether a killed run loses anything, and what saving costs. See README.md.

python benchmarks/durability/main.py                        # every experiment; exit code 1 where one misses its limit
python benchmarks/durability/main.py kills --kills 10       # some of them, and smaller
python benchmarks/durability/main.py cost --pairs 1 --every 20 --saves 1 --no-judge
"""

import argparse
import mmap
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from torch import nn

from hydra_engine import Callback, EmulatedDevice, ModelOrchestrator, ModelTask
from hydra_engine.checkpoints.checkpoint import load_newest, place
from hydra_engine.checkpoints.directory import CheckpointDirectory
from partitioners import Presharded, format_bytes

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from clocked import Clocked
from gpt import gpt, token_batches

from tests.durability import TORCHRUN_KILLS, in_own_process, under_torchrun


class Model(NamedTuple):
    """A GPT, how it is cut, and what it learns from."""

    width: int
    num_blocks: int
    num_heads: int
    batch_size: int
    length: int
    boundaries: tuple[int, ...]
    memory: str


MODEL = Model(768, 7, 12, 2, 128, (3, 5, 7, 9), "1GiB")  # 50,108,416 parameters
PIECE_BYTES = 2**22  # of a plain write
PAGE_BYTES = 4096
EXTRA_STEPS = 5  # after the last save that is due, so that its writing falls into the time that is measured
SHORT_STEPS = 12  # of the run that saves at every one
RATE_EVERY, RATE_SAVES = 4, 3  # steps between saves where their rate is measured, and how many
HELD_LIMIT, RATE_LIMIT = 0.02, 0.70


class Trained(NamedTuple):
    """One training."""

    step_s: float  # from the second step to the last one, set-up and the save at the end left out
    report: object

    @property
    def held_share(self):
        """Of the run's time, what saving held up."""
        return self.report.checkpoints.held_s / self.report.makespan_s


def trained(folder, num_steps, *, every=None, callbacks=(), device=None):
    """Train the model; every: steps between saves into a folder, which is new or not there; None: without."""
    model = gpt(MODEL.width, MODEL.num_blocks, MODEL.num_heads, MODEL.length)
    loader = Clocked(token_batches(num_steps, MODEL.batch_size, MODEL.length))
    task = ModelTask(
        model,
        nn.CrossEntropyLoss(),
        loader,
        1e-4,
        name="gpt",
        optimizer=torch.optim.AdamW,
        partitioner=Presharded(list(MODEL.boundaries)),
        seed=0,
        callbacks=callbacks,
    )
    saving = {} if every is None else {"checkpoint_dir": folder, "checkpoint_every": every, "keep": 1}
    orchestra = ModelOrchestrator([task], devices=[device or EmulatedDevice(MODEL.memory)], **saving)
    orchestra.verbose = 0
    orchestra.generate()
    report = orchestra.train_models()
    report.raise_failures()
    return Trained((loader.asked_s[-1] - loader.asked_s[2]) / (num_steps - 2), report)


def spread(values, text=str):
    """Median and range."""
    return f"{text(median(values))}  ({text(min(values))} to {text(max(values))})"


def verdict(is_good):
    return "yes" if is_good else "NO"


def kills(options, root):
    """Trainings killed at random moments, half of them while a checkpoint is written."""
    return killed(options, root, "as it was")


def others(options, root):
    """The same, each start on other devices, budgets, partitions and policies."""
    return killed(options, root, "on others", "--other-settings")


def killed(options, root, name, *more):
    """Print what became of so many kills; whether all struck and no bit is another."""
    begin_s = time.monotonic()
    arguments = ("--kills", options.kills, "--seed", options.seed, "--at-once", options.at_once, "--folder", root)
    plain, runs = [], []
    for outcome in in_own_process(*arguments, *more):
        (plain if outcome.name.startswith("plain") else runs).append(outcome)
    struck = [kill for run in runs for kill in run.kills]
    bad = [run for run in runs if run.error or run.different]
    num_equal = sum(len(run.kills) for run in runs if run not in bad)
    print(f"{name}: an uninterrupted run takes {spread([run.duration_s for run in plain], seconds)}")
    print(f"{name}: {len(struck)} kills in {len(runs)} runs, {time.monotonic() - begin_s:.0f} s")
    print(
        f"{name}: {sum(kill.in_save for kill in struck)} cut off a save or a removal, "
        f"{sum(not kill.num_whole for kill in struck)} came before the first checkpoint"
    )
    is_good = not bad and len(struck) == options.kills
    print(f"{name}: resumed bitwise equal: {num_equal} of {options.kills}: {verdict(is_good)}", flush=True)
    for run in bad:
        print(f"{run.name}: {run.settings} {run.kills} {run.error} {run.different[:5]}")
    return is_good


def seconds(value):
    return f"{value:.2f} s"


def share(value):
    return f"{value:.2%}"


def rate(value):
    return f"{value / 1e9:.2f} GB/s"


def torchrun(options, root):
    """Two injected kills under torchrun."""
    different, struck, begun = under_torchrun(root / "torchrun")
    is_good = not different and tuple(struck) == TORCHRUN_KILLS
    print(f"torchrun: killed at {', '.join(struck)}; its last process found {begun} steps")
    print(f"torchrun: places that differ from the uninterrupted run: {different or 'none'}: {verdict(is_good)}")
    return is_good


def cost(options, root):
    """What saves hold up, and how much longer steps are: pairs with and without, who goes first changes."""
    num_steps = options.every * options.saves + EXTRA_STEPS
    ratios, again, shares, reports = [], [], [], []
    for k in range(options.pairs):
        runs = {}
        for is_saving in (bool(k % 2), not k % 2):
            runs[is_saving] = new_run(options, root, num_steps, options.every if is_saving else None)
        again.append(runs[False].step_s)
        ratios.append(runs[True].step_s / runs[False].step_s)
        shares.append(runs[True].held_share)
        reports.append(runs[True].report.checkpoints)
        print(f"pair {k}: {told(reports[-1])}", flush=True)
    print(f"without saves: {spread(again, seconds)} per step")
    print(f"a save per {options.every} steps: {spread(ratios, '{:.3f}'.format)} times as long per step")
    is_good = median(shares) <= HELD_LIMIT
    print(f"a save per {options.every} steps: held up {spread(shares, share)}, at most 2 %: {verdict(is_good)}")
    often, without = (new_run(options, root, SHORT_STEPS, every) for every in (1, None))
    print(f"a save at every step: {told(often.report.checkpoints)}")
    print(
        f"a save at every step: {often.step_s / without.step_s:.3f} times as long per step, held up "
        f"{often.held_share:.2%}; not judged",
        flush=True,
    )
    return is_good


def told(checkpoints):
    """A run's saves in words."""
    return (
        f"{checkpoints.num_saved} saves, {format_bytes(checkpoints.num_bytes)} written in {checkpoints.write_s:.2f} s, "
        f"{format_bytes(checkpoints.copied_bytes)} copied first, {checkpoints.held_s * 1e3:.0f} ms held up"
    )


def new_run(options, root, num_steps, every, callbacks=()):
    """A training with a folder of its own, which is gone afterwards."""
    folder = Path(tempfile.mkdtemp(dir=root))
    try:
        return trained(folder / "checkpoints", num_steps, every=every, callbacks=callbacks, device=options.device)
    finally:
        shutil.rmtree(folder)


class WritesBeside(Callback):
    """At the steps at which a run would save, the plain write instead, in a thread."""

    def __init__(self, write: Callable[[], float]):
        self._write, self._thread, self._pending = write, ThreadPoolExecutor(1), []

    def on_step(self, report):
        if report.steps % RATE_EVERY == 0 and report.steps <= RATE_EVERY * RATE_SAVES:
            self._pending.append(self._thread.submit(self._write))

    def rates(self):
        """Bytes per second of each."""
        with self._thread:
            return [each.result() for each in self._pending]


def plain_rate(path, data, is_direct):
    """Bytes per second of a plain write and fsync: what `dd bs=4M conv=fsync` does, or with `oflag=direct`."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if is_direct else 0)
    with memoryview(data) as whole:
        begin_s = time.perf_counter()
        descriptor = os.open(path, flags, 0o600)
        try:
            done = 0
            while done < len(whole):
                done += os.write(descriptor, whole[done : done + PIECE_BYTES])
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        elapsed_s = time.perf_counter() - begin_s
    path.unlink()
    return len(data) / elapsed_s


def bytes_of(checkpoint):
    """All files of a checkpoint one after the other, in whole pages as direct writes want them."""
    files = [checkpoint.path, *(place(checkpoint.path, stored) for stored in checkpoint.manifest.files)]
    num_bytes = sum(path.stat().st_size for path in files)
    data = mmap.mmap(-1, -(-num_bytes // PAGE_BYTES) * PAGE_BYTES)
    for path in files:
        data.write(path.read_bytes())
    return data


def content_of(checkpoint, name):
    """A task's parts, as a new checkpoint takes them."""
    return {part: checkpoint.read_tensors(name, part) for part in checkpoint.parts(name)}


def saved_rate(folder, contents, num_bytes):
    """Bytes per second of the writer with nothing beside it."""
    with CheckpointDirectory(folder) as directory:
        begin_s = time.perf_counter()
        with directory.begin() as new:
            for name, parts in contents.items():
                new.add(name, parts)
            new.commit()
        elapsed_s = time.perf_counter() - begin_s
    shutil.rmtree(folder)
    return num_bytes / elapsed_s


def rates(options, root):
    """The writer beside a plain write of the same bytes, with nothing else at work and while a model trains."""
    num_steps = RATE_EVERY * RATE_SAVES + EXTRA_STEPS
    trained(root / "first", RATE_EVERY, every=RATE_EVERY, device=options.device)
    newest = load_newest(root / "first")
    contents = {name: content_of(newest, name) for name in newest.task_names}
    data = bytes_of(newest)
    shutil.rmtree(root / "first")

    def plain(is_direct=False):
        return plain_rate(root / "plain", data, is_direct)

    def in_training():
        saves = new_run(options, root, num_steps, RATE_EVERY).report.checkpoints
        return saves.num_bytes / saves.write_s

    def plain_in_training():
        beside = WritesBeside(plain)
        new_run(options, root, num_steps, None, [beside])
        return median(beside.rates())

    ways = {
        "plain": plain,
        "plain, O_DIRECT": lambda: plain(True),
        "writer": lambda: saved_rate(root / "alone", contents, len(data)),
        "plain, beside a training": plain_in_training,
        "writer, beside a training": in_training,
    }
    found = {name: [] for name in ways}
    for k in range(options.rounds):
        for name in list(ways)[:: -1 if k % 2 else 1]:
            try:
                found[name].append(ways[name]())
            except OSError as error:  # not every file system can write past its cache
                print(f"{name}: {error}")
    print(f"{format_bytes(len(data))} per checkpoint, {options.rounds} rounds")
    for name, values in found.items():
        print(f"{name:26} {spread(values, rate) if values else '-'}")
    good = []
    for where in ("", ", beside a training"):
        ratios = [a / b for a, b in zip(found[f"writer{where}"], found[f"plain{where}"], strict=True)]
        good.append(median(ratios) >= RATE_LIMIT)
        print(f"writer over plain write{where}: {spread(ratios, '{:.2f}'.format)}, at least 0.70: {verdict(good[-1])}")
    sys.stdout.flush()
    return all(good)


EXPERIMENTS = {"kills": kills, "others": others, "torchrun": torchrun, "cost": cost, "rates": rates}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiments", nargs="*", help=f"of {', '.join(EXPERIMENTS)}; default: all")
    parser.add_argument("--kills", type=int, default=100, help="of `kills` and `others` each (default 100)")
    parser.add_argument("--seed", type=int, default=0, help="of their moments (default 0)")
    parser.add_argument("--at-once", type=int, default=2, help="runs at a time there (default 2)")
    parser.add_argument("--pairs", type=int, default=3, help="of `cost`: alternating pairs (default 3)")
    parser.add_argument("--every", type=int, default=50, help="of `cost`: steps per save (default 50)")
    parser.add_argument("--saves", type=int, default=2, help="of `cost`: saves per run (default 2)")
    parser.add_argument("--rounds", type=int, default=5, help="of `rates` (default 5)")
    parser.add_argument("--device", help="of `cost` and `rates`: cuda:0, say (default: an emulated one)")
    parser.add_argument("--folder", type=Path, help="on the file system to write to (default: the temporary folder's)")
    parser.add_argument("--no-judge", action="store_true", help="exit code 0 whatever comes out")
    options = parser.parse_args(argv)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    is_good = True
    try:
        for name in options.experiments or EXPERIMENTS:
            with tempfile.TemporaryDirectory(prefix="durability-", dir=options.folder) as root:
                is_good = EXPERIMENTS[name](options, Path(root)) and is_good
    finally:
        torch.set_num_threads(num_threads)
    return 0 if is_good or options.no_judge else 1


if __name__ == "__main__":
    sys.exit(main())
