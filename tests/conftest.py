"""What holds after every test: no thread left, the thread count as it was, and a hang becomes a traceback."""

import faulthandler
import os
import threading
import time
from types import SimpleNamespace

import pytest
import torch

# Far above any test (the limit is 10 s each), below a person's patience: prints every thread's stack and ends the run.
HANG_S = 120

# Threads of DataLoader and joblib, which end by themselves some time after their owner; and the one that tqdm, which
# torch.compile uses, keeps for good.
FOREIGN_THREADS = (
    "QueueFeederThread",
    "QueueManagerThread",
    "ExecutorManagerThread",
    "_pin_memory_loop",
    "tqdm_monitor",
)

# Tiny models: a second intra-op thread only adds noise to the timing, and the engine must use the caller's count.
torch.set_num_threads(1)


def pytest_addoption(parser):
    parser.addoption("--part", metavar="K/N", help="of the tests that are chosen, every N-th, beginning with the K-th")


def pytest_configure(config):
    # Output capturing is off only here, so this is the terminal's stderr and not the captured one.
    config.stderr_of_the_terminal = os.dup(2)


def pytest_unconfigure(config):
    os.close(config.stderr_of_the_terminal)


@pytest.hookimpl(trylast=True)  # after -m and -k have chosen
def pytest_collection_modifyitems(config, items):
    # HYDRA_ENGINE_FAKE_CUDA: see tests/devices/test_gpu.py
    if not torch.cuda.is_available() and not os.environ.get("HYDRA_ENGINE_FAKE_CUDA"):
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    if part := config.getoption("--part"):
        first, step = map(int, part.split("/"))
        chosen = items[first - 1 :: step]
        config.hook.pytest_deselected(items=[item for k, item in enumerate(items) if k % step != first - 1])
        items[:] = chosen


@pytest.fixture(autouse=True)
def _nothing_left_behind(request):
    threads_before = set(threading.enumerate())
    num_threads_before = torch.get_num_threads()
    patience_s = HANG_S * (5 if request.node.get_closest_marker("rest") else 1)
    faulthandler.dump_traceback_later(patience_s, exit=True, file=request.config.stderr_of_the_terminal)
    yield
    faulthandler.cancel_dump_traceback_later()
    left = []
    for thread in set(threading.enumerate()) - threads_before:
        if not any(name in thread.name for name in FOREIGN_THREADS):
            thread.join(5)  # one that the test has just let go ends as soon as a core is free
            left += [thread.name] if thread.is_alive() else []
    assert not left, f"threads left by the test: {sorted(left)}"
    assert torch.get_num_threads() == num_threads_before


@pytest.fixture
def hangs(monkeypatch):
    """Add the events that say that a call hangs: no other one is late then, however busy the machine is.

    For the time-outs of loaders and callbacks, time stands still until one hangs, and 1,000 seconds have passed then.
    """
    events, begin_s = [], time.monotonic()

    def monotonic():
        return 1000 + time.monotonic() - begin_s if any(each.is_set() for each in events) else 0.0

    for module in ("data.calls", "run.notifier"):
        monkeypatch.setattr(f"hydra_engine.{module}.time", SimpleNamespace(monotonic=monotonic))
    return events
