"""A run that is steered from outside, by its socket and by what NVML shows: same process, same bits, no step redone."""

import os
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hydra_engine import EmulatedDevice, FreeGpus, ModelOrchestrator, ModelTask
from hydra_engine.control import ask
from hydra_engine.devices import watcher
from hydra_engine.tasks import Callback
from tests.devices.test_watcher import FakeNvml
from tests.fake_cuda import FakeCuda
from tests.refused import refused

STEPS = 8


class At(Callback):
    """Does something at some steps."""

    def __init__(self, **does):
        self.does = {int(step.removeprefix("step_")): do for step, do in does.items()}

    def on_step(self, report):
        self.does.get(report.steps, lambda: None)()


def trained(devices, directory=None, make_callback=None):
    """Losses, weights, the report and the orchestrator of one task; `make_callback` is given the orchestrator."""
    drawn = torch.Generator().manual_seed(5)
    batches = [(torch.randn(4, 8, generator=drawn), torch.randn(4, 1, generator=drawn)) for _ in range(STEPS)]
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)), nn.Linear(8, 1))
    task = ModelTask(model, F.mse_loss, batches, 0.1, seed=7)
    orchestra = ModelOrchestrator([task], devices=devices, checkpoint_dir=directory)
    orchestra.verbose = 0
    if make_callback is not None:
        task.callbacks = (make_callback(orchestra),)
    report = orchestra.train_models()
    report.raise_failures()
    return report.tasks["task-0"].losses, [each.detach().clone() for each in model.parameters()], report, orchestra


@pytest.fixture(scope="module")
def alone():
    return trained([EmulatedDevice("1MiB")])


def check_bits(found, alone):
    assert found[0] == alone[0]
    assert len(found[0]) == STEPS
    assert all(map(torch.equal, found[1], alone[1]))


def test_devices_leave_and_join_a_run_by_its_socket(tmp_path, alone):
    seen = []

    def make(orchestra):
        def order(what, name):
            seen.append(ask(tmp_path, {"do": what, "name": name}))

        def order_what_is_not_there():
            with refused(says="remove_device: 'emulated:7'"):
                ask(tmp_path, {"do": "remove", "name": "emulated:7"})

        return At(
            step_2=lambda: order("remove", "emulated:1"),
            step_3=order_what_is_not_there,
            step_5=lambda: order("add", "emulated:1"),
        )

    found = trained([EmulatedDevice("1MiB"), EmulatedDevice("1MiB")], tmp_path, make)
    check_bits(found, alone)
    assert [answer["name"] for answer in seen] == ["emulated:1"] * 2
    assert seen[0]["devices"]["emulated:1"] in ("leaving", "out")
    assert seen[1]["devices"] == found[3].devices == {"emulated:0": "in", "emulated:1": "in"}
    assert found[2].messages == ()
    assert "CONTROL" not in [each.name for each in tmp_path.iterdir()]


def test_an_order_that_waits_for_a_device_to_leave_does_not_hold_up_the_end_of_the_run(tmp_path, alone):
    is_asked, answers, client = threading.Event(), [], []

    def make(orchestra):
        def add_device(device):
            is_asked.set()
            return ModelOrchestrator.add_device(orchestra, device)

        def order():
            # Nothing of the run ever tells that it has left.
            orchestra._devices.pool.remove("emulated:1", at_once=False)
            client.append(threading.Thread(target=lambda: answers.append(ask(tmp_path, add))))
            client[0].start()
            assert is_asked.wait(60)

        add = {"do": "add", "name": "emulated:1"}
        orchestra.add_device = add_device
        return At(step_8=order)

    found = trained([EmulatedDevice("1MiB"), EmulatedDevice("1MiB")], tmp_path, make)
    client[0].join()
    check_bits(found, alone)
    assert found[2].messages == ()
    assert [answer["devices"] for answer in answers] == [{"emulated:0": "in", "emulated:1": "in"}]


def test_a_run_whose_directory_takes_no_socket_goes_on_and_says_so(tmp_path, alone):
    (tmp_path / "CONTROL").write_text("the user's own")
    found = trained([EmulatedDevice("1MiB")], tmp_path)
    check_bits(found, alone)
    [message] = found[2].messages
    assert message.startswith(f"{tmp_path} takes no socket")


def test_gpus_are_given_up_to_others_and_taken_back(tmp_path, monkeypatch, alone):
    """Two of three GPUs are free; at step 2 somebody wants one, and at step 4 both of the others are free."""
    monkeypatch.setattr(watcher.tempfile, "tempdir", str(tmp_path))
    watcher._claim_file.cache_clear()
    own, places = os.getpid(), []
    nvml = FakeNvml("GPU-fake-0", "GPU-fake-1", "GPU-fake-2")
    nvml.pids = {"GPU-fake-0": [own], "GPU-fake-1": [own], "GPU-fake-2": [5]}

    def make(orchestra):
        def look(**pids):
            nvml.pids |= {f"GPU-fake-{key[-1]}": pids[key] for key in pids}
            orchestra._devices.watcher.poll(orchestra)
            places.append(orchestra.devices)

        return At(
            step_2=lambda: look(on_1=[own, 6]),
            step_4=lambda: look(on_1=[own], on_2=[]),
            step_6=look,
        )

    # The thread of the run waits for a day: the callbacks look.
    gpus = FreeGpus(nvml=nvml, poll_s=86400, free_s=0)
    cuda = FakeCuda(num_devices=3)
    with cuda.installed():
        found = trained(gpus, make_callback=make)
        found[3]._devices.watcher.poll(found[3])  # for one that was still leaving at the last look
    cuda.check_all_left_as_found()
    watcher._claim_file.cache_clear()
    check_bits(found, alone)
    assert places[0]["cuda:0"] == "in"
    assert places[0]["cuda:1"] in ("leaving", "out")
    assert "cuda:2" not in places[0]
    assert places[1]["cuda:2"] == "in"
    assert found[3].devices == {"cuda:0": "in", "cuda:1": "in", "cuda:2": "in"}
    assert found[2].messages[0] == "cuda:1: given up, process 6"
    assert "cuda:2: taken, since it was free" in found[2].messages
