"""Checks that come before any figure: the tests that need a GPU, races, and a device that is lost."""

import hashlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from row import measured
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from hydra_engine import ModelOrchestrator, ModelTask
from hydra_engine.devices.cuda import OpenCudaDevice
from hydra_engine.devices.lanes import QUEUES
from partitioners import Presharded
from tests.devices import test_gpu
from tests.fake_cuda import FakeCuda
from tests.worker.test_keeping import everything_kept

ROOT = Path(__file__).resolve().parents[2]
SLEEP_CYCLES = (20_000, 400_000)  # at least and at most, of the kernel before each other: 0.01 to 0.2 ms
# The lanes that are held back in turn, so that each is once the one that the others run away from.
HOLDS = {"nothing": (), **{lane: (lane,) for lane in QUEUES}, "everything": tuple(QUEUES)}
NUM_MICRO_BATCHES = 4
STRUCK_STEP, NUM_STEPS = 3, 8
DEVICE_LOST = 75  # the exit code
TIMED = "double_buffering or copies_are_hidden"  # the tests that compare times: they have the device to themselves
HOMES = "TestHomes"  # first of all the kernel's bits
NUM_SLOWEST = 12  # tests whose seconds a row tells
NUM_PROCESSES = 8  # that share the device in the others


@contextmanager
def device_of(scale):
    """CUDA, or where there is none its stand-in."""
    fake = FakeCuda(total_bytes=2**30) if scale.is_emulated else None
    test_gpu._set_kernels(True, False, False, False, False)
    with nullcontext() if fake is None else fake.installed():
        yield fake


def run(arguments, environment=(), folder=ROOT, stderr=subprocess.PIPE):
    """Run Python in a process of its own with this folder's modules; what it printed, and its exit code."""
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": path, **dict(environment)},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    )


def gpu_tests(scale, row, chosen, num_processes):
    """Run tests that are marked `gpu`, on the stand-in where there is no GPU. chosen: by pytest's `-k`."""
    environment = {"HYDRA_ENGINE_FAKE_CUDA": "1"} if scale.is_emulated else {}
    options = ["-m", "gpu", "-W", "default", "-q", "-p", "no:cacheprovider", "-k", chosen, "-n", str(num_processes)]
    options += ["--durations", str(NUM_SLOWEST), "--durations-min", "1"]
    ended = run(["-m", "pytest", *options, "--dist", "worksteal", "tests/devices/test_gpu.py"], environment)
    lines = [line for line in ended.stdout.splitlines() if line.strip()]
    row["said"] = lines[-1] if lines else ended.stderr[-300:]
    row["slowest"] = [" ".join(line.split()) for line in lines if re.match(r"[\d.]+s (call|setup|teardown) ", line)]
    if ended.returncode:
        row["output"] = ended.stdout[-20000:] + ended.stderr[-2000:]
        raise RuntimeError(row["said"])


# Races


class Late(TorchDispatchMode):
    """Queues a kernel that sleeps before each other one of the lane's thread."""

    def __init__(self, sleep, seed):
        super().__init__()
        self._sleep, self._random = sleep, random.Random(seed)
        self.num_held = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self._sleep(self._random.randint(*SLEEP_CYCLES))
            self.num_held += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def held_back(lanes, sleep):
    """Hold back what the device does in some lanes, so that the host is far ahead of it; the modes of these lanes."""
    inside, modes = OpenCudaDevice._inside, []

    @contextmanager
    def late(self, lane):
        mode = Late(sleep, seed=len(modes)) if lane in lanes else nullcontext()
        modes.append(mode)
        with inside(self, lane), mode:
            yield

    with mock.patch.object(OpenCudaDevice, "_inside", late):
        yield modes


def raced(scale, is_kept, lanes=(), budget_bytes=None):
    """Train with some lanes held back.

    Returns a digest of every loss and weight, how many kernels were held back, and the device's bytes, which are found
    where none are given.
    """
    with device_of(scale) as fake:
        sleep = (lambda _: None) if fake else torch.cuda._sleep
        task, model = test_gpu.task_of(
            "gpt",
            make=partial(test_gpu.gpt, scale.race_width),
            partition=0,
            accumulation_steps=NUM_MICRO_BATCHES,
        )
        with everything_kept() if is_kept else nullcontext():
            if budget_bytes is None:
                budget_bytes = scale.race_bytes if is_kept else smallest_bytes(scale, task, model)
            orchestra = planned(task, budget_bytes)
        with held_back(lanes, sleep) as modes:
            report = orchestra.train_models()
        report.raise_failures()
        if fake and fake.misuses:
            raise RuntimeError(fake.misuses[0])
        num_held = sum(getattr(mode, "num_held", 0) for mode in modes)
        return digest(report.tasks["gpt"].losses, model), num_held, budget_bytes


def planned(task, budget_bytes):
    orchestra = test_gpu.orchestra_of([task], budget_bytes=budget_bytes)
    orchestra.generate()
    return orchestra


def smallest_bytes(scale, task, model):
    """Bytes of the smallest device that holds the task, to an eighth: boundaries find no room there."""
    page_bytes = 2**12 if scale.is_emulated else 2**21
    most_bytes = 100 * sum(each.nbytes for each in model.parameters())
    wanted_bytes = max(sum(each.nbytes for each in layer.parameters()) for layer in model)
    while wanted_bytes < most_bytes:
        budget_bytes = page_bytes * -(-wanted_bytes // page_bytes)
        try:
            planned(task, budget_bytes)
            return budget_bytes
        except (ValueError, RuntimeError) as error:  # too small; many say for what
            print(f"races: {budget_bytes} bytes: {error}", file=sys.stderr, flush=True)
            [needed] = re.findall(r"\((\d+) bytes\) on a device", str(error)) or [0]
            wanted_bytes = max(budget_bytes * 9 // 8, int(needed))
    raise RuntimeError(f"does not fit {most_bytes} bytes")


def digest(losses, model):
    """A hash of losses and weights, to the bit."""
    found = hashlib.sha256(json.dumps(losses).encode())
    for tensor in model.state_dict().values():
        found.update(tensor.detach().contiguous().view(torch.uint8).numpy())
    return found.hexdigest()


def race(is_kept, scale, row):
    """Compare runs whose lanes are held back with one in which nothing is asynchronous."""
    call = f"print(*right.raced(scales.SCALES[{scale_name(scale)!r}], {is_kept}))"
    blocking = {"CUDA_LAUNCH_BLOCKING": "1"}
    ended = run(["-c", f"import child, right, scales; child.tell_when_ended(); {call}"], blocking, stderr=None)
    expected, _, budget_bytes = printed(ended).split()
    row.update(budget_bytes=int(budget_bytes), held_back={})
    for name, lanes in HOLDS.items():
        print(f"races: {name} held back", file=sys.stderr, flush=True)
        found, num_held, _ = raced(scale, is_kept, lanes, int(budget_bytes))
        row["held_back"][name] = {"same_bits": found == expected, "num_held": num_held}
    different = [name for name, each in row["held_back"].items() if not each["same_bits"]]
    if different:
        raise RuntimeError(f"other bits with {', '.join(different)} held back")


def scale_name(scale):
    return "emulated" if scale.is_emulated else "gpu"


def printed(ended):
    """The last line that a process printed; raises what it said where it failed."""
    if ended.returncode:
        raise RuntimeError(f"exit code {ended.returncode}: {(ended.stderr or '').strip()[-300:]}")
    return ended.stdout.splitlines()[-1]


# A device that is lost


def sticky_run(scale, folder, *, is_struck, resume=False):
    """Train a task beside one that strikes the device, or alone; a digest of its losses and weights."""
    with device_of(scale) as fake:
        model, loss_fn, loader = test_gpu.gpt()
        options = {"partitioner": Presharded([3, 7]), "homes": "host"}  # which loses no commit
        tasks = [ModelTask(model, loss_fn, loader, test_gpu.LR, 6, name="other", seed=1, **options)]
        if is_struck:
            torch.manual_seed(3)
            batches = [(torch.randn(4, 12), torch.randn(4, 5)) for _ in range(NUM_STEPS)]
            batches[STRUCK_STEP][0][0, 0] = test_gpu.Asserts.VALUE
            asserts = test_gpu.Asserts(None if fake is None else fake.strike)
            struck = nn.Sequential(asserts, nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 5))
            options = {"name": "struck", "partitioner": Presharded([1, 4]), "seed": 2}
            tasks.insert(0, ModelTask(struck, F.mse_loss, batches, test_gpu.LR, **options))
        device = test_gpu.capped(test_gpu.BUDGET_BYTES)
        checkpoints = {"checkpoint_dir": folder} if is_struck else {}
        orchestra = ModelOrchestrator(tasks, devices=[device], **checkpoints)
        orchestra.verbose = 0
        report = orchestra.train_models(resume=resume)
        return digest(report.tasks["other"].losses, model)


def sticky(scale, row):
    """Lose the device by a failed assertion: exit code 75, and a checkpoint that goes on to the undisturbed bits."""
    with tempfile.TemporaryDirectory() as folder:

        def call(**options):
            text = f"print(right.sticky_run(scales.SCALES[{scale_name(scale)!r}], {folder!r}, **{options}))"
            return run(["-c", f"import right, scales; {text}"])

        expected = printed(call(is_struck=False))
        lost = call(is_struck=True)
        row["exit_code"] = lost.returncode
        if lost.returncode != DEVICE_LOST:
            raise RuntimeError(f"exit code {lost.returncode}: {lost.stderr.strip()[-300:]}")
        row["same_bits"] = printed(call(is_struck=True, resume=True)) == expected
        if not row["same_bits"]:
            raise RuntimeError("resumed to other bits")


def check(find, scale, group, device, emit, _):
    """One row of a check."""
    with measured(emit, device, group.rows()[0]) as row:
        find(scale, row)


METHODS = {
    "tests of homes": partial(check, partial(gpu_tests, chosen=HOMES, num_processes=0)),
    "gpu tests": partial(check, partial(gpu_tests, chosen=f"not ({TIMED} or {HOMES})", num_processes=NUM_PROCESSES)),
    "gpu tests, timed": partial(check, partial(gpu_tests, chosen=TIMED, num_processes=0)),
    "races, kept graphs": partial(check, partial(race, True)),
    "races, no room for boundaries": partial(check, partial(race, False)),
    "sticky error": partial(check, sticky),
}
