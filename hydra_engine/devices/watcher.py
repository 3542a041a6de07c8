"""The watcher of a machine that is shared with others: free GPUs join a pool, and leave it when somebody wants them.

`hydra_engine.elastic.Watch` decides; here is what it needs: NVML, a clock, and a thread while a run is at work.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from hydra_engine.control import Pool
from hydra_engine.devices.cuda import CudaDevice
from hydra_engine.elastic import FreeGpus, GiveUp, SeenGpu, Watch

AUTO = "auto"
# The end of a run waits so long for a look that is under way: NVML may hang with its driver.
PATIENCE_S = 10.0


class GpuWatcher:
    """Watches the GPUs of one orchestrator: `take` gives those to begin with, `watching` is for each run.

    Raises ImportError without nvidia-ml-py, RuntimeError where NVML does not work or there is no GPU.
    """

    def __init__(
        self,
        settings: FreeGpus,
        *,
        max_devices: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], bool] | None = None,
    ) -> None:
        """`wait` for so many seconds; True: the run is over."""
        self._uuids = CudaDevice.uuids()
        if not self._uuids:
            raise RuntimeError(
                f"devices: {AUTO!r}, limit: a process that sees CUDA devices; check the driver and "
                f"CUDA_VISIBLE_DEVICES, or leave devices= out to train on the CPU"
            )
        self._nvml = _begun(settings.nvml)
        self._settings = settings
        self._watch = Watch(settings, max_devices)
        self._max_devices = max_devices
        self._clock, self._wait = clock, wait
        self._told: Counter[str] = Counter()  # for the report of a run

    @classmethod
    def asked(cls, devices: Any, max_devices: int | None = None) -> GpuWatcher | None:
        """Return the watcher for devices="auto" or `FreeGpus`; None for all others."""
        settings = FreeGpus() if isinstance(devices, str) and devices == AUTO else devices
        return cls(settings, max_devices=max_devices) if isinstance(settings, FreeGpus) else None

    def take(self) -> list[CudaDevice]:
        """Return the GPUs that are free now; RuntimeError if none is."""
        specs: list[CudaDevice] = []
        refused = []
        for name, seen in self._look().items():
            if self._max_devices is not None and len(specs) == self._max_devices:
                break
            occupant = seen if isinstance(seen, str) else self._settings.occupant(seen, os.getpid())
            try:
                if occupant is None:
                    specs.append(self._spec(name))
            except RuntimeError as error:
                occupant = str(error)
            if occupant is not None:
                refused.append(f"{name}: {occupant}")
        if not specs:
            raise RuntimeError(
                f"devices: no GPU is free ({'; '.join(refused)}), limit: one to begin with; begin again when one is, "
                f"ask for less with FreeGpus(memory=...), or name the devices"
            )
        return specs

    @contextmanager
    def watching(self, pool: Pool, messages: list[str]) -> Iterator[None]:
        """Let GPUs join and leave a pool during the block, from a thread; `messages` says what happened."""
        over = threading.Event()

        def work() -> None:
            while not (self._wait or over.wait)(self._settings.poll_s):
                try:
                    self.poll(pool)
                except Exception as error:  # the next look may be better
                    self._told[f"{type(error).__name__}: {error}"] += 1

        self._watch.begin()
        self._told.clear()
        thread = threading.Thread(target=work, name="hydra-gpus", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(PATIENCE_S)
            messages += (f"{text} ({times} times)" if times > 1 else text for text, times in list(self._told.items()))
            if thread.is_alive():
                messages.append(f"NVML did not return; the thread {thread.name!r}, which asked, was left behind")

    def poll(self, pool: Pool) -> None:
        """Look once, and let GPUs join and leave."""
        occupants = {}
        for name, seen in self._look().items():
            if isinstance(seen, str):
                self._told[f"{name}: {seen}; it stays as it is"] += 1
            else:
                occupants[name] = self._settings.occupant(seen, os.getpid())
        for change in self._watch.decide(self._clock(), occupants, pool.devices):
            name = change.name
            try:
                if isinstance(change, GiveUp):
                    pool.remove_device(name, self._settings.grace_s)
                    self._told[f"{name}: given up, {change.occupant}"] += 1
                else:
                    pool.add_device(self._spec(name))
                    self._told[f"{name}: taken, since it was free"] += 1
            except (ValueError, RuntimeError) as error:
                self._watch.refused(name)
                self._told[f"{name}: {error}"] += 1

    def _look(self) -> dict[str, SeenGpu | str]:
        """Return what NVML shows of each GPU, or why it does not."""
        return {name: self._seen(name, uuid) for name, uuid in self._uuids.items()}

    def _seen(self, name: str, uuid: str) -> SeenGpu | str:
        nvml = self._nvml
        try:
            try:
                handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            except nvml.NVMLError:
                handle = nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        except nvml.NVMLError as error:
            return f"NVML does not show it: {error}"
        try:
            shown = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        except nvml.NVMLError:  # not supported, or not permitted: memory tells
            shown = None
        pids = None if shown is None else frozenset(int(each.pid) for each in shown)
        held_bytes = CudaDevice.held_bytes(int(name.partition(":")[2]))
        return SeenGpu(total_bytes=memory.total, free_bytes=memory.free, held_bytes=held_bytes, pids=pids)

    def _spec(self, name: str) -> CudaDevice:
        """Return the GPU with what is free of it now, which may be less than it was before."""
        memory = self._settings.memory
        if memory is None and not _claimed(self._uuids[name]):
            raise RuntimeError("another run of this user has claimed it")
        return CudaDevice(int(name.partition(":")[2]), memory)


def _begun(nvml: Any) -> Any:
    """Return the module that asks NVML, ready to be asked."""
    if nvml is None:
        try:
            import pynvml
        except ImportError as error:
            raise ImportError(
                f"devices: {AUTO!r} without nvidia-ml-py, limit: NVML tells which GPUs are free; "
                f"`pip install hydra_engine[nvml]` or `pip install nvidia-ml-py`, or name the devices"
            ) from error
        nvml = pynvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise RuntimeError(
            f"devices: {AUTO!r}, but NVML does not work here: {error}; see whether nvidia-smi does, or name the devices"
        ) from error
    return nvml


def _claimed(uuid: str) -> bool:
    """Claim a GPU for this process, until its end; False: another one of this user has claimed it.

    Two runs that begin at the same time would both take a GPU, see each other there and give it up; and since a context
    stays until its process ends, neither would take it back.
    """
    try:
        fcntl.lockf(_claim_file(uuid), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:  # or there is no folder for temporary files, so that nothing can be claimed
        return not isinstance(error, BlockingIOError)
    return True


@cache
def _claim_file(uuid: str) -> int:
    """Open the file that is locked. It stays open: whoever closes any descriptor of it gives this lock up."""
    path = Path(tempfile.gettempdir(), f"hydra-engine-{os.getuid()}-{uuid}.lock")
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
