"""Rates of the link, of copies in DRAM and of matrix products, measured in the lanes of a device as a run uses them."""

from functools import partial
from threading import Barrier, Event

import torch

from hydra_engine.devices import COMPUTE, LOAD, STORE, Promise, host_memory
from hydra_engine.devices.rates import dram_bytes_per_s, matmul_flops, median_s
from hydra_engine.trace import Trace
from partitioners.precision import DTYPES

NUM_REPEATS = 7
COPY_BYTES = 2**26  # starting and awaiting it is nothing beside it
SHARE = 4  # of a device's memory, that one copy may take, and the matrices of a product


def measure(spec, num_workers, num_threads):
    """num_workers: threads that update weights on the host; num_threads: intra-op, of each of them and of a lane."""
    opened, host = spec.open(0, Trace(), num_threads, spec.memory_bytes // SHARE), host_memory([spec])
    num_bytes = min(COPY_BYTES, spec.memory_bytes // SHARE)
    try:
        here = [torch.empty(0, dtype=torch.uint8).set_(host.new(num_bytes)).fill_(1) for _ in range(2)]
        there = [opened.take_slab(num_bytes).bytes(0, num_bytes) for _ in range(2)]
        up = partial(_copy, opened, LOAD, there[0], here[0])
        down = partial(_copy, opened, STORE, here[1], there[1])
        seconds = [_in_lane(opened, LOAD, partial(_timed, up)).result()]
        seconds += [_in_lane(opened, STORE, partial(_timed, down)).result(), *_both_s(opened, up, down)]
        names = ("up_bytes_per_s", "down_bytes_per_s", "both_up_bytes_per_s", "both_down_bytes_per_s")
        most_bytes = opened.ledger.memory_bytes // SHARE
        products = {
            precision: _in_lane(
                opened,
                COMPUTE,
                partial(matmul_flops, opened.torch_device, dtype, most_bytes, opened.finish, NUM_REPEATS),
            ).result()
            for precision, dtype in DTYPES.items()
        }
    finally:
        opened.close()
    return {
        "name": spec.ceilings_name,
        **{name: num_bytes / each for name, each in zip(names, seconds, strict=True)},
        "dram_bytes_per_s": dram_bytes_per_s(num_workers, num_threads, NUM_REPEATS),
        "matmul_flops": products,
        "num_threads": num_threads,
    }


def _timed(work):
    return median_s(work, NUM_REPEATS)


def _copy(opened, lane, target, source):
    opened.copy(lane, [(target, source)])
    opened.finish()


def _both_s(opened, *copies):
    """Median seconds of a load and a store at once: each goes on until the other was timed often enough."""
    together, timed = Barrier(2), [Event(), Event()]

    def job(k):
        together.wait()
        try:
            seconds = _timed(copies[k])
        finally:
            timed[k].set()
        while not all(each.is_set() for each in timed):
            copies[k]()
        return seconds

    promises = [_in_lane(opened, lane, partial(job, k)) for k, lane in enumerate((LOAD, STORE))]
    return [promise.result() for promise in promises]


def _in_lane(opened, lane, work):
    promise = Promise()
    opened.submit(lane, "rates", partial(promise.fulfil, work))
    return promise
