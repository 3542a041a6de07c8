"""The machine, the rates that bounds are made of, and what waiting and page-locking cost."""

import os
import platform
import resource
import subprocess
import threading
import time
from pathlib import Path
from statistics import median

import psutil
import torch
from link import measure
from row import measured

from hydra_engine import CudaDevice, EmulatedDevice
from hydra_engine.devices.pool import host_memory
from hydra_engine.system.cores import host_threads
from hydra_engine.system.dram import available_dram_bytes
from tests.fake_cuda import FakeCuda

NUM_REPEATS = 5
THREADS = (1, 4, 8, 14, 16)
NUM_WAKES = 200
SLEEP_CYCLES = 200_000  # of the kernel that is waited for, about 0.1 ms
LIMITS = ("RLIMIT_MEMLOCK", "RLIMIT_NOFILE", "RLIMIT_NPROC", "RLIMIT_AS", "RLIMIT_STACK")
TOLD = ("driver_version", "pcie.link.gen.max", "pcie.link.width.max", "clocks.max.sm", "power.limit")


def environment(scale):
    """The machine and its limits."""
    found = {
        "cpu": first_line("/proc/cpuinfo", "model name"),
        "cores": num_cores(),
        "threads": torch.get_num_threads(),
        "dram_bytes": psutil.virtual_memory().total,
        "dram_available_bytes": available_dram_bytes(),
        "huge_pages": text_of("/sys/kernel/mm/transparent_hugepage/enabled"),
        "huge_pages_shared": text_of("/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        "huge_pages_reserved": first_line("/proc/meminfo", "HugePages_Total"),
        "numa_nodes": len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))),
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in LIMITS},
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gpu": None,
    }
    if scale.is_emulated:
        return found
    properties = torch.cuda.get_device_properties(0)
    found |= {"gpu": properties.name, "gpu_bytes": properties.total_memory, "cuda": torch.version.cuda}
    query = ["nvidia-smi", f"--query-gpu={','.join(TOLD)}", "--format=csv,noheader"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
        found["told"] = dict(zip(TOLD, told.splitlines()[0].split(", "), strict=True))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        found["told"] = {"driver_version": f"unknown: {error}"}
    return found


def num_cores():
    return len(os.sched_getaffinity(0))


def text_of(path):
    """The content of a small file, or a word that it is not there."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return "unknown"


def first_line(path, name):
    """The value of the first line of a file that begins with a name."""
    found = (line.split(":", 1)[1].strip() for line in text_of(path).splitlines() if line.startswith(name))
    return next(found, "unknown")


def spec_of(scale):
    """The device of the session, without a cap where it is a GPU."""
    return EmulatedDevice("64MiB", scale.bandwidth) if scale.is_emulated else CudaDevice(0)


def ceilings(scale):
    """Rates of the link, of copies in DRAM and of matrix products."""
    spec = spec_of(scale)
    host = host_threads(intra_op_threads=torch.get_num_threads(), num_devices=1, computes_here=scale.is_emulated)
    return measure(spec, host.optimizer_threads, host.optimizer_intra_op_threads)


def beside_traffic(scale):
    """The same rates of the link while all but two cores read and write DRAM, and the rate of that traffic."""
    array, is_over, num_passes = torch.ones(scale.probe_bytes // 4), threading.Event(), 0

    def traffic():
        nonlocal num_passes
        torch.set_num_threads(max(1, num_cores() - 2))
        while not is_over.is_set():
            array.mul_(1.0001)
            num_passes += 1

    thread = threading.Thread(target=traffic)
    start_s = time.perf_counter()
    thread.start()
    try:
        found = ceilings(scale)
    finally:
        is_over.set()
        thread.join()
    traffic_s = time.perf_counter() - start_s
    rates = {name: found[name] for name in found if name.endswith(("up_bytes_per_s", "down_bytes_per_s"))}
    return {**rates, "traffic_bytes_per_s": 2 * array.nbytes * num_passes / traffic_s}


def stream(scale):
    """Bytes per second of STREAM's triad, and of an array changed in place, by number of threads.

    An update writes mostly where it reads, so the lines that a triad fetches only to overwrite cost it nothing.
    """
    before = torch.get_num_threads()
    a, b, c = (torch.ones(scale.probe_bytes // 4) for _ in range(3))
    triad, in_place = {}, {}
    try:
        for num in sorted({*(each for each in THREADS if each < num_cores()), num_cores()}):
            torch.set_num_threads(num)
            triad[num] = 3 * a.nbytes / least_s(lambda: torch.add(b, c, alpha=3.0, out=a))
            in_place[num] = 2 * a.nbytes / least_s(lambda: a.mul_(1.0001))
    finally:
        torch.set_num_threads(before)
    return {
        "triad_bytes_per_s": triad,
        "in_place_bytes_per_s": in_place,
        "dram_bytes_per_s": max(*triad.values(), *in_place.values()),
    }


def least_s(call):
    """The least of several calls' seconds, after one that does not count."""
    found = []
    for _ in range(NUM_REPEATS + 1):
        start_s = time.perf_counter()
        call()
        found.append(time.perf_counter() - start_s)
    return min(found[1:])


def locking(scale):
    """Seconds in which DRAM is taken, touched and page-locked, and in which it is let go."""
    host = host_memory([spec_of(scale)])
    start_s = time.perf_counter()
    plain = torch.zeros(scale.locked_bytes, dtype=torch.uint8)
    touched_s = time.perf_counter() - start_s
    del plain
    start_s = time.perf_counter()
    storage = host.new(scale.locked_bytes)
    locked_s = time.perf_counter() - start_s
    start_s = time.perf_counter()
    host.let_go(storage)
    let_go_s = time.perf_counter() - start_s
    per_gb = 1e9 / scale.locked_bytes
    return {
        "touch_s_per_gb": touched_s * per_gb,
        "lock_s_per_gb": locked_s * per_gb,
        "let_go_s_per_gb": let_go_s * per_gb,
    }


def wake_up(scale):
    """Seconds from the end of a kernel until the host knows: asleep on a blocking event, and asking all the time."""
    cuda = FakeCuda().torch.cuda if scale.is_emulated else torch.cuda
    sleep = (lambda _: None) if scale.is_emulated else torch.cuda._sleep

    def late_s(wait):
        start = cuda.Event(enable_timing=True)
        end = cuda.Event(enable_timing=True, blocking=True)
        begun_s = time.perf_counter()
        start.record()
        sleep(SLEEP_CYCLES)
        end.record()
        wait(end)
        return time.perf_counter() - begun_s - start.elapsed_time(end) / 1e3

    def asks(event):
        while not event.query():
            pass

    found = {}
    for name, wait in (("blocking", lambda event: event.synchronize()), ("asking", asks)):
        found[f"{name}_s"] = median([late_s(wait) for _ in range(NUM_WAKES)][NUM_WAKES // 10 :])
    return found


PARTS = {
    "environment": environment,
    "ceilings": ceilings,
    "stream": stream,
    "beside traffic": beside_traffic,
    "page-locking": locking,
    "wake-up": wake_up,
}


def facts(scale, group, device, emit, _):
    """A row for each fact."""
    for key in group.rows():
        with measured(emit, device, key) as row:
            row.update(PARTS[key[0]](scale))


METHODS = {"facts": facts}
