"""GPUs that are shared with others, by a made-up NVML and the stand-in for CUDA: looks one at a time, without waits."""

import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

from hydra_engine import FreeGpus
from hydra_engine.devices import watcher
from hydra_engine.devices.watcher import GpuWatcher
from tests.fake_cuda import MIB, FakeCuda
from tests.refused import names, refused


class FakeNvml:
    """NVML of a machine with some GPUs of 256 MiB: `pids` and `used_bytes` by UUID, and errors to raise."""

    class NVMLError(Exception): ...

    def __init__(self, *uuids):
        self.pids = {uuid: [] for uuid in uuids}
        self.used_bytes = dict.fromkeys(uuids, 0)
        self.no_processes = self.no_init = None
        self.lost = set()
        self.num_inits = 0

    def nvmlInit(self):
        if self.no_init is not None:
            raise self.NVMLError(self.no_init)
        self.num_inits += 1

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid not in self.pids:
            raise self.NVMLError("Not Found")
        return SimpleNamespace(uuid=uuid)

    def nvmlDeviceGetMemoryInfo(self, handle):
        if handle.uuid in self.lost:
            raise self.NVMLError("GPU is lost")
        used = self.used_bytes[handle.uuid]
        return SimpleNamespace(total=256 * MIB, free=256 * MIB - used, used=used)

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        if self.no_processes is not None:
            raise self.NVMLError(self.no_processes)
        return [SimpleNamespace(pid=pid, usedGpuMemory=None) for pid in self.pids[handle.uuid]]


class FakePool:
    def __init__(self, specs):
        self.devices = {spec.name: "in" for spec in specs}
        self.orders, self.refuses = [], None

    def add_device(self, device):
        name = device if isinstance(device, str) else device.name
        self.orders.append(("add", device if isinstance(device, str) else type(device).__name__, name))
        if self.refuses is not None:
            raise self.refuses
        assert self.devices.get(name, "out") == "out"
        self.devices[name] = "in"
        return name

    def remove_device(self, name, grace_s=None):
        self.orders.append(("remove", name, grace_s))
        assert self.devices[name] == "in"
        self.devices[name] = "out"


@pytest.fixture
def cuda():
    found = FakeCuda(num_devices=3)
    with found.installed():
        yield found


@pytest.fixture
def nvml():
    return FakeNvml("GPU-fake-0", "GPU-fake-1", "GPU-fake-2")


@pytest.fixture(autouse=True)
def locks(tmp_path, monkeypatch):
    """Claims of this test are its own."""
    monkeypatch.setattr(watcher.tempfile, "tempdir", str(tmp_path))
    watcher._claim_file.cache_clear()
    yield tmp_path
    watcher._claim_file.cache_clear()


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


def started(nvml, max_devices=None, **settings):
    """A watcher, its clock, and a pool of the GPUs that were free."""
    clock = Clock()
    made = GpuWatcher(FreeGpus(nvml=nvml, **settings), max_devices=max_devices, clock=clock)
    return made, clock, FakePool(made.take())


def test_free_gpus_are_taken_at_the_beginning(cuda, nvml):
    nvml.pids["GPU-fake-1"] = [5]
    _, _, pool = started(nvml)
    assert pool.devices == {"cuda:0": "in", "cuda:2": "in"}
    assert nvml.num_inits == 1
    assert [card.has_context for card in cuda.cards] == [True, False, True]  # nothing of ours where others work


def test_no_more_are_taken_than_the_pool_may_have(cuda, nvml):
    _, _, pool = started(nvml, max_devices=2)
    assert pool.devices == {"cuda:0": "in", "cuda:1": "in"}
    assert not cuda.cards[2].has_context


def test_gpus_are_known_by_uuid_and_not_by_number(cuda, monkeypatch):
    """CUDA_VISIBLE_DEVICES=2,0: cuda:0 is the third of NVML's; the other is a part of a GPU, by MIG."""
    monkeypatch.setattr(watcher.CudaDevice, "uuids", lambda: {"cuda:0": "c", "cuda:1": "a"})
    nvml = FakeNvml("MIG-a", "GPU-b", "GPU-c")
    nvml.pids["GPU-c"] = [5]
    _, _, pool = started(nvml)
    assert pool.devices == {"cuda:1": "in"}


def test_a_gpu_is_given_up_to_another_process_and_taken_back(cuda, nvml):
    made, clock, pool = started(nvml, grace_s=7, free_s=60)
    own = watcher.os.getpid()
    for uuid in nvml.pids:
        nvml.pids[uuid] = [own]
    made.poll(pool)
    assert pool.orders == []
    nvml.pids["GPU-fake-1"] = [own, 5]
    made.poll(pool)
    assert pool.orders == [("remove", "cuda:1", 7)]
    nvml.pids["GPU-fake-1"] = [own]  # the context stays
    for clock.now_s in (5, 64):
        made.poll(pool)
    assert pool.devices["cuda:1"] == "out"
    clock.now_s = 65
    made.poll(pool)
    assert pool.orders == [("remove", "cuda:1", 7), ("add", "CudaDevice", "cuda:1")]


def test_a_gpu_that_was_in_use_joins_as_a_new_device(cuda, nvml):
    nvml.pids["GPU-fake-2"] = [5]
    made, clock, pool = started(nvml, memory=None)
    made.poll(pool)
    nvml.pids["GPU-fake-2"] = []
    for clock.now_s in (5, 65):
        made.poll(pool)
    assert pool.orders == [("add", "CudaDevice", "cuda:2")]


def test_memory_that_is_asked_for_is_the_budget_and_others_may_have_the_rest(cuda, nvml):
    nvml.pids["GPU-fake-0"], nvml.used_bytes["GPU-fake-0"] = [5], 100 * MIB
    nvml.pids["GPU-fake-1"], nvml.used_bytes["GPU-fake-1"] = [5], 157 * MIB
    made = GpuWatcher(FreeGpus(nvml=nvml, memory="100MiB"))
    specs = made.take()
    assert [spec.name for spec in specs] == ["cuda:0", "cuda:2"]
    assert [spec.memory_bytes + spec.context_bytes <= 100 * MIB for spec in specs] == [True, True]
    pool = FakePool(specs)
    nvml.used_bytes["GPU-fake-0"] = 156 * MIB + specs[0].held_bytes(0)
    made.poll(pool)
    assert pool.orders == []
    nvml.used_bytes["GPU-fake-0"] += 1
    made.poll(pool)
    assert pool.orders == [("remove", "cuda:0", 30.0)]


@pytest.mark.parametrize("told", ["Not Supported", "Insufficient Permissions"])
def test_where_processes_are_not_told_memory_tells(cuda, nvml, told, monkeypatch):
    monkeypatch.setattr("hydra_engine.devices.watcher.UNSEEN_BYTES", 2 * MIB)
    nvml.no_processes = told
    nvml.used_bytes["GPU-fake-1"] = 3 * MIB
    made, _, pool = started(nvml)
    assert pool.devices == {"cuda:0": "in", "cuda:2": "in"}
    nvml.used_bytes["GPU-fake-2"] = 200 * MIB
    made.poll(pool)
    assert pool.orders == [("remove", "cuda:2", 30.0)]


def watched(made, pool, num_looks):
    """Let a run's thread look so many times; what the run then has to report."""
    waits, messages = [], []

    def wait(seconds):
        waits.append((threading.current_thread().name, seconds))
        return len(waits) > num_looks

    made._wait = wait
    with made.watching(pool, messages):
        pass
    assert waits == [("hydra-gpus", made._settings.poll_s)] * (num_looks + 1)
    return messages


def test_a_run_watches_until_its_end_and_reports_changes(cuda, nvml):
    nvml.pids["GPU-fake-1"] = [5]
    made, _, pool = started(nvml, free_s=0, poll_s=3)
    nvml.pids["GPU-fake-1"], nvml.pids["GPU-fake-0"] = [], [watcher.os.getpid(), 8]
    given_up, taken = watched(made, pool, 4)
    names(given_up, says="cuda:0 process 8")
    names(taken, says="cuda:1 free")
    assert pool.devices == {"cuda:0": "out", "cuda:1": "in", "cuda:2": "in"}
    assert watched(made, pool, 1) == []


def test_the_end_of_a_run_ends_the_wait(cuda, nvml):
    made, _, pool = started(nvml, poll_s=3600)
    messages = []
    with made.watching(pool, messages):
        pass
    assert messages == []


def test_a_gpu_that_nvml_does_not_show_stays_as_it_is(cuda, nvml):
    made, _, pool = started(nvml)
    nvml.lost.add("GPU-fake-1")
    nvml.pids["GPU-fake-1"] = [5]
    [message] = watched(made, pool, 3)
    names(message, says="cuda:1 NVML lost")
    assert "3 times" in message
    assert pool.orders == []


def test_what_the_pool_refuses_is_reported_and_tried_again_later(cuda, nvml):
    nvml.pids["GPU-fake-1"] = [5]
    made, clock, pool = started(nvml, free_s=60)
    nvml.pids["GPU-fake-1"] = []
    made.poll(pool)
    pool.refuses = RuntimeError("no room")
    for clock.now_s in (60, 65, 120):
        made.poll(pool)
    assert len(pool.orders) == 1
    pool.refuses = None
    for clock.now_s in (124, 125):
        made.poll(pool)
    assert pool.orders == [("add", "CudaDevice", "cuda:1")] * 2
    assert pool.devices["cuda:1"] == "in"


def test_what_goes_wrong_in_a_look_ends_neither_the_watch_nor_the_run(cuda, nvml):
    made, _, pool = started(nvml)
    pool.devices = None
    [message] = watched(made, pool, 2)
    names(message, says="AttributeError (2 times)")


# --- what is not there ---


def test_without_free_gpus_nothing_begins_and_who_is_there_is_said(cuda, nvml):
    nvml.pids["GPU-fake-0"], nvml.pids["GPU-fake-1"] = [5, 6], [7]
    nvml.lost.add("GPU-fake-2")
    with refused(RuntimeError, says="cuda:0 cuda:1 cuda:2") as caught:
        started(nvml)
    names(caught.value, says="5 7 lost")
    assert "\n" not in str(caught.value)
    assert not any(card.has_context for card in cuda.cards)


def test_without_nvml_that_is_said_in_one_line(cuda, nvml, monkeypatch):
    nvml.no_init = "Driver Not Loaded"
    with refused(RuntimeError, says="Driver Not Loaded"):
        started(nvml)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with refused(ImportError, says="nvidia-ml-py hydra_engine[nvml]"):
        GpuWatcher(FreeGpus())
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    nvml.no_init = None
    assert [spec.name for spec in GpuWatcher(FreeGpus()).take()] == ["cuda:0", "cuda:1", "cuda:2"]


def test_without_gpus_that_is_said_in_one_line(monkeypatch):
    monkeypatch.setattr(watcher.CudaDevice, "uuids", dict)
    with refused(RuntimeError, says="CUDA driver") as caught:
        GpuWatcher.asked("auto")
    assert "\n" not in str(caught.value)


def test_other_devices_are_not_watched():
    assert [GpuWatcher.asked(devices) for devices in (None, "cuda:0", ["auto"], [])] == [None] * 4


@pytest.mark.gpu
def test_nvml_knows_the_gpus_of_this_process():
    pytest.importorskip("pynvml")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and not the stand-in for it")
    made = GpuWatcher(FreeGpus(memory="1GiB"))
    names = [spec.name for spec in made.take()]
    for name, gpu in made._look().items():
        assert gpu.total_bytes > gpu.free_bytes > 0
        assert name not in names or gpu.pids is None or gpu.pids  # there is a context of this process


# --- several runs of one user ---

HOLD = """
import fcntl, sys
file = open(sys.argv[1], "a")
fcntl.lockf(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_gpu_that_another_run_has_claimed_is_left_to_it(cuda, nvml, locks):
    """Two runs that begin at once see no process on any GPU yet: only one of them takes each."""
    path = locks / f"hydra-engine-{watcher.os.getuid()}-fake-1.lock"
    other = [sys.executable, "-S", "-c", HOLD, str(path)]
    with subprocess.Popen(other, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout.readline() == "held\n"
        made, clock, pool = started(nvml, free_s=0)
        assert pool.devices == {"cuda:0": "in", "cuda:2": "in"}
        [message] = watched(made, pool, 1)
        names(message, says="cuda:1 claimed")
        run.stdin.close()
        run.wait()
    made.poll(pool)
    clock.now_s = 1
    made.poll(pool)
    assert pool.orders == [("add", "CudaDevice", "cuda:1")]
    assert len(started(nvml)[2].devices) == 3  # the same process may have several


def test_where_nothing_can_be_claimed_gpus_are_taken(cuda, nvml, monkeypatch, tmp_path):
    monkeypatch.setattr(watcher.tempfile, "tempdir", str(tmp_path / "nowhere"))
    _, _, pool = started(nvml)
    assert len(pool.devices) == 3
