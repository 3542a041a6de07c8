"""One row of the results: its figures, its peaks of memory, or why it failed."""

import gc
import threading
import time
import traceback
from contextlib import contextmanager

import psutil
import torch
from bounds import spread
from kernels import synchronize

SAMPLE_S = 0.02  # between looks at the process's memory


class HostPeak:
    """The most resident memory of this process while it is open, looked at every 20 ms."""

    def __enter__(self):
        self._process, self._over = psutil.Process(), threading.Event()
        self.num_bytes = self._process.memory_info().rss
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self):
        while not self._over.wait(SAMPLE_S):
            self.num_bytes = max(self.num_bytes, self._process.memory_info().rss)

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()


@contextmanager
def measured(emit, device, key):
    """One row: what the body fills in, the peaks, or why it failed."""
    method, size, memory, tokens = key
    row = {"method": method, "size": size, "memory": memory, "tokens": tokens, "status": "failed"}
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    start_s = time.perf_counter()
    with HostPeak() as host:
        try:
            yield row
            row["status"] = "ok"
        except Exception as error:
            traceback.print_exc()
            row["reason"] = in_short(error)
    row["host_peak_bytes"] = host.num_bytes
    if device.type == "cuda":
        row["device_peak_bytes"] = torch.cuda.max_memory_reserved(device)
        row["device_peak_allocated_bytes"] = torch.cuda.max_memory_allocated(device)
    row["row_s"] = time.perf_counter() - start_s
    emit(row)


def in_short(error):
    """An error in a line."""
    lines = str(error).strip().splitlines() or [""]
    is_memory = isinstance(error, torch.OutOfMemoryError)
    return ("out of memory: " if is_memory else f"{type(error).__name__}: ") + lines[0][:200]


def timed_steps(step, data, device, num_warm):
    """Seconds of each step after the warm ones."""
    found = []
    for batch in data:
        start_s = time.perf_counter()
        step(*batch)
        synchronize(device)
        found.append(time.perf_counter() - start_s)
    return found[num_warm:]


def filled(row, seconds, tokens):
    """A row with its figures: tokens are those of what `seconds` were taken of."""
    row.update(spread(seconds), num_steps=len(seconds))
    row["tokens_per_s"] = tokens / row["step_s"]
