"""Exactness: the factors that must not change one bit, a covering of all their pairs, and the whole product.

    python -m tests.exact                            # every combination once; `make exact`
    python -m tests.exact --only lstm-adamw          # the cases with this in their name
    python -m tests.exact --sample 500 --seed 1      # 500 runs, drawn at random
    python -m tests.exact --only chaos-half chaos-all --tight --sample 200 --seed 1   # homes under chaos, little memory

`tests/promises/test_exact.py` runs the covering. A case trains one model of the zoo with the engine and in plain
PyTorch (`tests/reference.py`) and compares losses, parameters, buffers, and the peak of every device with its budget.
Cases in company train three at a time, in one run, and each of the three is compared. The ledger of a device notes the
most that was in use whenever bytes were given out, so its peak within the budget says that each allocation was.
"""

import argparse
import faulthandler
import math
import multiprocessing
import os
import random
import sys
import time
import traceback
import zlib
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from functools import lru_cache, partial
from itertools import cycle, islice, product
from typing import NamedTuple

import torch

from hydra_engine import EmulatedDevice, ModelOrchestrator, ModelTask, ShardDoesNotFit
from partitioners import Presharded
from tests import reference, zoo
from tests.covering import cover

OPTIMIZERS = {
    "sgd": (torch.optim.SGD, 0.1),
    "momentum": (partial(torch.optim.SGD, momentum=0.9), 0.05),
    "adam": (torch.optim.Adam, 0.01),
    "adamw": (partial(torch.optim.AdamW, weight_decay=0.1), 0.01),
}


class Case(NamedTuple):
    """One value of every factor; prints as its name."""

    model: str
    optimizer: str
    partition: str
    num_devices: int
    policy: str
    double_buffer: bool
    accumulation_steps: int
    max_grad_norm: float | None
    company: bool
    chaos: bool
    homes: str

    def __str__(self):
        return "-".join(
            (
                self.model,
                self.optimizer,
                self.partition,
                f"{self.num_devices}dev",
                self.policy,
                "double" if self.double_buffer else "single",
                f"{self.accumulation_steps}micro",
                f"clip{self.max_grad_norm}" if self.max_grad_norm else "noclip",
                "company" if self.company else "alone",
                "chaos" if self.chaos else "calm",
                f"{self.homes}homes",
            )
        )


FACTORS = {
    "model": tuple(zoo.MODELS),
    "optimizer": tuple(OPTIMIZERS),
    "accumulation_steps": (1, 3),
    "max_grad_norm": (None, 0.5),
    "partition": ("one", "three", "each"),
    "num_devices": (1, 2, 3),
    "policy": ("sharded-lrtf", "fifo"),
    "double_buffer": (True, False),
    "company": (False, True),
    "chaos": (False, True),
    "homes": ("no", "half", "all"),
}

# Those of a run rather than of one of its tasks: cases in company agree in them.
RUN_FACTORS = ("num_devices", "policy", "double_buffer", "company", "chaos")
COMPANY = 3  # tasks of a run in company

EPOCHS = 2
SEED = 1234  # of a run's first task; the others have the next ones
MEMORY = "8MiB"  # of one emulated device
TIGHT_KIB = [2**k for k in range(4, 13)]  # the first that will do is taken
HANG_S = 3600  # a case that takes longer ends `make exact` with every thread's stack


def run(tasks, *, num_devices=1, **options):
    """Train the tasks on emulated devices that meter every unit, and check that none exceeded its budget."""
    report = orchestrator(tasks, num_devices=num_devices, **options).train_models()
    assert_within_budget(report, num_devices)
    return report


def orchestrator(tasks, *, num_devices=1, memory=MEMORY, policy="sharded-lrtf", double_buffer=True, chaos=None):
    """A silent orchestrator over emulated devices; `chaos` is the seed of their delays, None for no delays."""
    # Every other test device has an arena, as a GPU does.
    has_arena = chaos is not None and chaos % 2 == 1
    devices = [
        EmulatedDevice(
            memory=memory, chaos=None if chaos is None else chaos + k, meter_every_unit=True, has_arena=has_arena
        )
        for k in range(num_devices)
    ]
    return silent(tasks, devices=devices, policy=policy, double_buffer=double_buffer)


def silent(tasks, memory=MEMORY, *, num_devices=1, devices=None, **options):
    """An orchestrator that prints nothing, on `devices`, or on emulated ones of a memory each."""
    devices = [EmulatedDevice(memory) for _ in range(num_devices)] if devices is None else devices
    orchestra = ModelOrchestrator(tasks, devices=devices, **options)
    orchestra.verbose = 0
    return orchestra


def assert_within_budget(report, num_devices=1):
    """Every device's peak, by its own ledger, is above nothing and within its budget."""
    for k in range(num_devices):
        device = report.devices[k]
        assert device.peak_bytes <= device.memory_bytes, f"{device.name}: {device.peak_bytes} > {device.memory_bytes}"
    assert any(report.devices[k].peak_bytes > 0 for k in range(num_devices)), "no device used any memory"


def assert_same_state(actual, expected):
    """Bitwise: every tensor of two `zoo.state` dicts, by name."""
    assert actual.keys() == expected.keys()
    different = [name for name, tensor in actual.items() if not torch.equal(tensor, expected[name])]
    assert not different, f"not bit-equal to plain PyTorch: {different} of {list(actual)}"


def assert_as_expected(report, name, model, expected):
    """The task finished, and its losses and its model are bit for bit those of `expected`."""
    assert report.tasks[name].status == "finished", report.tasks[name].error
    assert report.tasks[name].steps == len(expected.losses)
    assert report.tasks[name].losses == expected.losses
    assert_same_state(zoo.state(model), expected.state)


class Expected(NamedTuple):
    """What plain PyTorch leaves of one configuration."""

    losses: list
    validation_losses: list
    state: dict


@lru_cache(maxsize=512)
def expected(name, *, optimizer="sgd", epochs=EPOCHS, seed=SEED, num_batches=zoo.NUM_BATCHES, **options):
    """Plain PyTorch's result for a model of the zoo."""
    model, loss_fn, loader = zoo.ALL_MODELS[name](num_batches=num_batches)
    factory, lr = OPTIMIZERS[optimizer]
    options |= {"seed": seed, "lr": lr, "epochs": epochs, "optimizer": factory}
    result = reference.train(model, loss_fn, loader, **options)
    assert all(map(math.isfinite, result.losses)), f"{name} diverges, so its comparison proves nothing"
    return Expected(result.losses, result.validation_losses, zoo.state(model))


# More than seven parameters: each is a factor.
def task_of(
    zoo_name, *, name=None, optimizer="sgd", partition="three", epochs=EPOCHS, seed=SEED, homes="no", **options
):
    """A task over a fresh model of the zoo, and that model: what `expected` describes."""
    model, loss_fn, loader = zoo.ALL_MODELS[zoo_name](num_batches=options.pop("num_batches", zoo.NUM_BATCHES))
    factory, lr = OPTIMIZERS[optimizer]
    options |= {"name": name or zoo_name, "optimizer": factory, "seed": seed}
    options["partitioner"] = Presharded(ends(partition, len(model)))
    options["homes"] = homes_of(homes, len(model))
    return ModelTask(model, loss_fn, loader, lr, epochs, **options), model


def homes_of(homes, num_layers):
    """As `ModelTask(homes=)` has it: "no" layer, the lower "half", or "all" of them are at home on devices."""
    return {"no": "host", "half": -(-num_layers // 2), "all": "device"}[homes]


def ends(partition, num_layers):
    """Cumulative end indices of a partition: "one" shard, "three" shards, or a shard for "each" layer."""
    num_shards = {"one": 1, "three": 3, "each": num_layers}[partition]
    return [num_layers * (j + 1) // num_shards for j in range(num_shards)]


def check(case, *, large=False):
    """Train the case, in company beside another, with the engine; compare each with plain PyTorch.

    large: with the larger models of the zoo.
    """
    cases = [case, *(other for other in run_of()[case] if other != case)][:2]
    check_run([each._replace(model=f"large-{each.model}") for each in cases] if large else cases)


def check_run(cases, *, memory=MEMORY):
    """Train these cases in one run, and compare each of them with plain PyTorch; the report."""
    tasks, results = [], []
    for k, case in enumerate(cases):
        options = {
            "seed": SEED + k,
            "optimizer": case.optimizer,
            "accumulation_steps": case.accumulation_steps,
            "max_grad_norm": case.max_grad_norm,
            "num_batches": zoo.NUM_SHORT,
        }
        task, model = task_of(case.model, name=str(case), partition=case.partition, homes=case.homes, **options)
        tasks.append(task)
        results.append((str(case), model, expected(case.model, **options)))
    first = cases[0]
    report = run(
        tasks,
        num_devices=first.num_devices,
        memory=memory,
        policy=first.policy,
        double_buffer=first.double_buffer,
        chaos=zlib.crc32(str(first).encode()) if first.chaos else None,
    )
    for name, model, result in results:
        assert_as_expected(report, name, model, result)
    return report


def check_run_tightly(cases):
    """The same, with the least memory of `TIGHT_KIB` in which the tasks can be planned."""
    for kib in TIGHT_KIB:
        with suppress(ShardDoesNotFit):
            return check_run(cases, memory=f"{kib}KiB")
    raise AssertionError(f"{cases[0]} has no plan in {kib} KiB")


def whole_product():
    """Every combination."""
    return [Case(**dict(zip(FACTORS, values, strict=True))) for values in product(*FACTORS.values())]


def runs():
    """The whole product as runs of cases: alone, or in company by threes that are drawn the same each time."""
    alone, companies = [], {}
    for case in whole_product():
        if case.company:
            companies.setdefault(tuple(getattr(case, factor) for factor in RUN_FACTORS), []).append(case)
        else:
            alone.append((case,))
    together = []
    for setting, cases in companies.items():
        random.Random(str(setting)).shuffle(cases)
        together.extend(zip(*[iter(cases)] * COMPANY, strict=True))
    return alone + together


@lru_cache(maxsize=1)
def run_of():
    """Each case's run."""
    return {case: cases for cases in runs() for case in cases}


def covering():
    """Cases with every pair of values of every two factors, and random ones up to 40."""
    return [Case(**values) for values in cover(FACTORS, num_cases=40)]


def main(argv=None):
    """Run all cases, or some, over processes; print progress, failures, count and seconds. 1 if any failed.

    The order is drawn, the same for a seed, so that what is done of a run that is stopped is a sample of the whole.
    """
    args = _arguments(argv)
    chosen = [cases for cases in runs() if any(text in str(case) for text in args.only for case in cases)]
    random.Random(args.seed).shuffle(chosen)
    chosen = chosen[args.skip :][: args.sample]
    num_cases = sum(map(len, chosen))
    print(f"{num_cases} cases in {len(chosen)} runs, seed {args.seed}, {args.workers} processes", flush=True)
    begin_s = time.perf_counter()
    num_done, num_failed, num_homed, printed_s = 0, 0, 0, 0.0
    # spawn: a child of a process that has run torch's threads must not inherit their locks.
    context = multiprocessing.get_context("spawn")
    cores = context.SimpleQueue()
    for core, _ in zip(cycle(_cores()), range(args.workers)):
        cores.put(core)
    with ProcessPoolExecutor(args.workers, mp_context=context, initializer=_begin, initargs=(cores,)) as pool:
        check_each = check_run_tightly if args.tight else check_run
        for future in as_completed([pool.submit(_run_chunk, chunk, check_each) for chunk in _chunks(chosen, 16)]):
            num_chunk_cases, num_chunk_homed, failures = future.result()
            num_done += num_chunk_cases
            num_homed += num_chunk_homed
            num_failed += len(failures)
            for name, story in failures:
                print(f"FAILED {name}\n{story}", flush=True)
            elapsed_s = time.perf_counter() - begin_s
            if elapsed_s - printed_s > 10 or num_done == num_cases:
                printed_s = elapsed_s
                rate = num_done / elapsed_s
                left_s = (num_cases - num_done) / rate
                print(
                    f"{num_done}/{num_cases} cases, {num_failed} failed, {elapsed_s:.0f} s, "
                    f"{rate:.1f} cases/s, {left_s:.0f} s left",
                    flush=True,
                )
    print(
        f"{num_done} cases in {len(chosen)} runs, {num_homed} of them with layers at home on devices, "
        f"{num_failed} failures, {time.perf_counter() - begin_s:.0f} s",
        flush=True,
    )
    return 1 if num_failed or not num_done else 0


def _arguments(argv):
    parser = argparse.ArgumentParser(prog="python -m tests.exact", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=[""], metavar="SUBSTRING", help="cases with one in their name")
    parser.add_argument("--tight", action="store_true", help="on devices with as little memory as will do")
    parser.add_argument("--sample", type=int, metavar="N", help="N of the runs, drawn at random")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the order of runs")
    parser.add_argument("--skip", type=int, default=0, metavar="N", help="leave out the first N runs, to go on")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), metavar="N", help="processes (default: cores)")
    return parser.parse_args(argv)


def _choose_cores(chaos):
    """Let the next run's threads use every core under chaos, and otherwise this worker's own.

    On one core they hand the interpreter's lock over with a fifth less processor time. Chaos keeps what only threads
    that run at once can show.
    """
    if hasattr(os, "sched_setaffinity"):  # Linux; threads inherit it from the one that starts them
        os.sched_setaffinity(0, _run_chunk.all_cores if chaos else {_run_chunk.core})


def _chunks(runs, size):
    iterator = iter(runs)
    while chunk := list(islice(iterator, size)):
        yield chunk


def _cores():
    """The cores that this process may use."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count()))


def _begin(cores):
    """Set a worker up: it computes with one thread, and takes a core of its own from the queue."""
    torch.set_num_threads(1)
    _run_chunk.all_cores = _cores()
    _run_chunk.core = cores.get()


def _run_chunk(runs, check_each):
    failures, num_homed = [], 0
    for cases in runs:
        _choose_cores(cases[0].chaos)
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        try:
            num_homed += any(device.homed_bytes for device in check_each(cases).devices)
        except Exception:
            failures.append((", ".join(map(str, cases)), traceback.format_exc()))
        finally:
            faulthandler.cancel_dump_traceback_later()
    return sum(map(len, runs)), num_homed, failures


if __name__ == "__main__":
    sys.exit(main())
