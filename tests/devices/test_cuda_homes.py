"""Homes on GPUs, on the stand-in (tests/fake_cuda.py): update.cu makes the updates, as the host's compiler takes it.

It runs late, so that whoever reads a home without waiting finds the weights of the step before.
"""

import inspect
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils import cpp_extension

from hydra_engine import CudaDevice
from hydra_engine.devices.cuda import UpdateKernel
from hydra_engine.errors import DeviceLost
from hydra_engine.native import native
from hydra_engine.native.update import SAMPLE
from tests import exact, zoo
from tests.devices.test_cuda_device import asked, striking_task
from tests.fake_cuda import MIB, FakeCuda
from tests.host import test_homes as homes
from tests.host.test_homes import Calls, assert_is_plain, batches, homed, homes_of, plain, train
from tests.promises.test_resumed import Boom, saved_of
from tests.refused import names

# torch's fused steps take IEEE's roots, so that tasks of GPUs have the bits of the plain loop.
fused = partial(torch.optim.AdamW, weight_decay=0.1, fused=True)
CASES = {
    "AdamW": {"optimizer": fused},
    "amsgrad": {"optimizer": partial(torch.optim.Adam, amsgrad=True, weight_decay=0.1, fused=True)},
    "SGD": {"optimizer": torch.optim.SGD},
    "momentum": {"optimizer": partial(torch.optim.SGD, momentum=0.9, nesterov=True), "precision": "bfloat16"},
    "bfloat16": {"optimizer": fused, "precision": "bfloat16", "split_weights": False, "accumulation_steps": 3},
    "split": {"optimizer": fused, "precision": "bfloat16", "split_weights": True, "max_grad_norm": 0.1},
}


@pytest.fixture
def cuda():
    if not native().wait():
        pytest.skip(f"no native code: {native().missing_because or 'it is turned off'}")
    found = FakeCuda(num_devices=2, has_ieee_roots=True)
    with found.installed():
        yield found
    found.check_all_left_as_found()


def orchestra_of(cuda, *tasks, number=1, memory=MIB, **options):
    devices = [CudaDevice(index, asked(cuda, memory)) for index in range(number)]
    return homes.orchestra_of(*tasks, devices=devices, **options)


def of_case(case):
    """Options of a task, and of the plain loop."""
    options = CASES[case]
    return options, {name: value for name, value in options.items() if name != "split_weights"}


@pytest.mark.parametrize("case", CASES)
def test_homes_on_gpus_change_no_bit(cuda, case):
    task = homes.task_of("device", **of_case(case)[0])
    report = train(orchestra_of(cuda, task))
    assert_is_plain(task, report, **of_case(case)[1])
    assert not cuda.misuses
    assert homed(report) > [0]
    assert cuda.num_launches >= homes.NUM_STEPS


@pytest.mark.parametrize(
    "options", [{"precision": "float16"}, {"precision": "bfloat16"}, {"precision": "bfloat16", "moments": "bfloat16"}]
)
def test_default_steps_are_alike_on_host_and_gpu(cuda, options):
    """Whatever roots torch's own take, on this machine."""
    tasks = {name: homes.task_of(name, max_grad_norm=0.1, **options) for name in ("device", "host")}
    reports = {name: train(orchestra_of(cuda, task)) for name, task in tasks.items()}
    assert reports["device"].tasks["task"].losses == reports["host"].tasks["task"].losses
    exact.assert_same_state(*(zoo.state(task.model) for task in tasks.values()))
    assert [homed(reports[name]) > [0] for name in tasks] == [True, False]


@pytest.mark.parametrize(("kernels", "words"), [("wrong", "sample bits"), ("missing", "_compile_kernel torch")])
def test_a_kernel_that_is_wrong_or_missing_leaves_homes_in_dram(kernels, words):
    cuda = FakeCuda(kernels=kernels, has_ieee_roots=True)
    with cuda.installed():
        task = homes.task_of("device", optimizer=fused)
        orchestra = orchestra_of(cuda, task)
        names(orchestra.generate().tasks["task"].no_homes_because, says=words)
        report = train(orchestra)
        assert_is_plain(task, report, optimizer=fused)
        assert homed(report) == [0]
        orchestra = report = None
    cuda.check_all_left_as_found()


def test_torch_compiles_kernels_by_a_function_that_is_not_public():
    """So in torch 2.11 and 2.13; without it homes stay in DRAM."""
    parameters = [*inspect.signature(torch.cuda._compile_kernel).parameters]
    assert parameters == ["kernel_source", "kernel_name", "compute_capability", "cuda_include_dirs", "nvcc_options"]
    assert hasattr(cpp_extension, "CUDA_HOME")


def test_weights_that_the_kernel_cannot_step_stay_in_dram(cuda):
    net = homes.model().double()
    data = [(x.double(), y.double()) for x, y in batches()]
    because = orchestra_of(cuda, homes.task_of("device", net=net, data=data)).generate().tasks["task"].no_homes_because
    names(because, says="float32 float64")


@pytest.mark.parametrize("job", [homes.clamps, homes.changes_one, homes.reads])
def test_callbacks_have_the_weights_of_now(cuda, job):
    def called(place):
        does = homes.Does(job, lambda: task.model.source)
        options = {"optimizer": fused, "precision": "bfloat16", "split_weights": True}
        task = homes.task_of(place, callbacks=[does], **options)
        report = train(orchestra_of(cuda, task))
        return report.tasks["task"].losses, zoo.state(task.model), does.seen

    (losses, state, seen), (expected_losses, expected_state, expected) = map(called, ("device", "host"))
    assert losses == expected_losses
    exact.assert_same_state(state, expected_state)
    homes.assert_same_seen(seen, expected)


def test_what_is_saved_is_what_the_host_saves(cuda, tmp_path):
    found = []
    for place in ("device", "host"):
        options = {"optimizer": fused, "precision": "bfloat16", "split_weights": True}
        task = homes.task_of(place, callbacks=[Calls({5: homes.raises(Boom())})], **options)
        with pytest.raises(Boom):
            orchestra_of(cuda, task, directory=tmp_path / place).train_models()
        found.append(saved_of(tmp_path / place))
    assert found[0] == found[1]


def test_homes_move_as_devices_come_and_go(cuda):
    jobs = {
        3: lambda: orchestra.remove_device("cuda:0"),
        6: lambda: orchestra.add_device("cuda:0"),
        8: lambda: orchestra.remove_device("cuda:1"),
    }
    options = {"optimizer": fused, "precision": "bfloat16", "split_weights": True}
    task = homes.task_of("device", callbacks=[Calls(jobs)], **options)
    orchestra = orchestra_of(cuda, task, number=2)
    report = train(orchestra)
    assert_is_plain(task, report, optimizer=fused, precision="bfloat16")
    assert min(homed(report)) > 0


def test_homes_make_room(cuda):
    """For a batch that is larger than all before, and for a task that joins."""
    data = batches(2) + batches(1, seed=9, size=14) + batches(4, seed=4)
    found, second = {}, homes.task_of("device", name="second", epochs=1, optimizer=fused)
    jobs = {
        1: lambda: found.update(before=homes_of(orchestra)),
        4: lambda: orchestra.add_task(second),
    }
    task = homes.task_of("device", data=data, epochs=4, optimizer=fused, callbacks=[Calls(jobs)])
    orchestra = orchestra_of(cuda, task, memory=9 * 4096)
    report = train(orchestra)
    if all(each.accumulation_steps == 1 for each in report.tasks["task"].revisions):
        assert_is_plain(task, report, data=data, epochs=4, optimizer=fused)
    assert_is_plain(second, report, epochs=1, optimizer=fused)
    assert found["before"]


def test_an_update_that_could_not_be_launched_is_tried_again(cuda, monkeypatch):
    """Nothing of it was changed, and steps were not counted twice."""
    launch, fails = UpdateKernel.launch, [False, True, False, True]

    def fail(self, rows, sizes):
        if max(sizes) < max(SAMPLE) and fails and fails.pop(0):  # no sample
            raise RuntimeError("no launch")
        launch(self, rows, sizes)

    monkeypatch.setattr(UpdateKernel, "launch", fail)
    task = homes.task_of("device", optimizer=fused, max_retries=3)
    report = train(orchestra_of(cuda, task))
    assert_is_plain(task, report, optimizer=fused)
    assert len(report.tasks["task"].retries) == 2


def test_a_task_at_home_on_a_lost_device_resumes_where_it_was_saved(cuda, tmp_path, monkeypatch):
    """What DRAM has of its weights is of another step. Others are saved at their last commit."""
    monkeypatch.chdir(tmp_path)

    def tasks():
        task = homes.task_of("device", optimizer=fused, epochs=20, callbacks=[Calls({})])
        return [striking_task(cuda)[0], task, homes.task_of("host", optimizer=fused, epochs=20, name="other")]

    orchestra = orchestra_of(cuda, *tasks(), directory=tmp_path / "saved", every=2)
    with pytest.raises(SystemExit) as ended:
        orchestra.train_models()
    assert isinstance(ended.value.__cause__, DeviceLost)
    orchestra.report = ended = None
    again = tasks()
    report = homes.orchestra_of(*again, directory=tmp_path / "saved").train_models(resume=True)
    for task in again[1:]:
        assert_is_plain(task, report, epochs=20, optimizer=fused)


def test_the_best_weights_are_those_of_their_step(cuda):
    scales = (3.0, 0.5, 2.0)
    options = {"optimizer": fused, "precision": "bfloat16"}
    task = homes.task_of("device", validation=homes.Scaled(scales), keep_best="validation_loss", **options)
    report = train(orchestra_of(cuda, task))
    own, _ = plain(2 * homes.STEPS, validation=homes.Scaled(scales), **options)
    exact.assert_same_state(zoo.state(task.model), zoo.state(own))
    assert report.tasks["task"].best_step == 2 * homes.STEPS


def test_parameters_of_one_number_are_at_home_too(cuda):
    class Scales(nn.Module):
        def __init__(self):
            super().__init__()
            self.factor = nn.Parameter(torch.tensor(0.5))

        def forward(self, x):
            return x * self.factor

    found = []
    for place in ("device", "host"):
        net = homes.model()
        net.insert(2, Scales())
        task = homes.task_of(place, net=net, ends=[2, 3, 5, 8, 9], optimizer=fused, precision="bfloat16")
        report = train(orchestra_of(cuda, task))
        found.append((report.tasks["task"].losses, zoo.state(task.model)))
        assert (homed(report) > [0]) == (place == "device")
    assert found[0][0] == found[1][0]
    exact.assert_same_state(found[0][1], found[1][1])
