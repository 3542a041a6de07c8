"""The host's cores are counted, its threads stated and set."""

import os
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hydra_engine import HostThreads, ModelTask
from hydra_engine.system import cores as host
from hydra_engine.system.cores import allowed_cores, host_threads, num_cores
from partitioners import Presharded
from tests import exact, reference, zoo
from tests.refused import refused

WIDTH, NUM_STEPS, TIMEOUT_S = 8, 2, 60.0


@pytest.fixture
def made_up(tmp_path, monkeypatch):
    """The root of a made-up system."""
    monkeypatch.setattr(host, "ROOT", tmp_path)
    return tmp_path


def tree(root, files):
    """A made-up system: text by path below its root."""
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


# -- facts

EIGHT = frozenset(range(8))


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "300000 100000\n"}, 3),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "250000 100000\n"}, 2),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "1600000 100000\n"}, 8),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 8),
        # The tightest of all that it is in.
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "200000 100000\n"}, 2),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "500000 100000\n"}, 5),
        # Of a path that is the host's, a container sees the last folder as the outermost one.
        ({"proc/self/cgroup": "0::/docker/1f\n", "sys/fs/cgroup/cpu.max": "400000 100000\n"}, 4),
        ({"proc/self/cgroup": "0::/../x\n", "sys/fs/cgroup/cpu.max": "400000 100000\n"}, 4),
        # Not one that it is not in.
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/b/cpu.max": "100000 100000\n"}, 8),
        # The first version, also beside the second.
        (
            {
                "proc/self/cgroup": "3:cpuset:/\n2:cpu,cpuacct:/job\n0::/\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "600000\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            6,
        ),
        ({"proc/self/cgroup": "2:cpu:/\n0::/\n", "sys/fs/cgroup/unified/cpu.max": "100000 50000\n"}, 2),
    ],
)
def test_cores_are_the_smaller_of_those_allowed_and_the_quota(made_up, files, cores):
    tree(made_up, files)
    assert num_cores(EIGHT) == cores


def test_allowed_cores_are_those_of_the_calling_thread(monkeypatch):
    assert allowed_cores() == os.sched_getaffinity(0)
    monkeypatch.delattr(os, "sched_getaffinity")
    assert allowed_cores() == frozenset(range(os.cpu_count()))


# -- the choice


@pytest.fixture
def sixteen_cores(made_up, monkeypatch):
    """A machine of sixteen cores, without a quota."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))


@pytest.mark.parametrize(
    ("num_devices", "intra_op_threads", "expected"),
    [
        (1, 1, 4),  # the most
        (8, 1, 4),
        (12, 1, 3),  # one core to each device, and one to the loaders
        (14, 1, 1),
        (15, 1, 1),  # at least one, though none is left
        (1, 4, 3),  # each takes several
        (1, 7, 2),
        (1, 8, 1),
        (1, 16, 1),
    ],
)
@pytest.mark.usefixtures("sixteen_cores")
def test_optimizer_threads_leave_cores_to_devices_and_loaders(num_devices, intra_op_threads, expected):
    found = host_threads(intra_op_threads=intra_op_threads, num_devices=num_devices)
    assert found == HostThreads(
        cores=16,
        optimizer_threads=expected,
        intra_op_threads=intra_op_threads,
        optimizer_intra_op_threads=intra_op_threads,
        launch_cores=num_devices,
        data_cores=1,
    )


@pytest.mark.parametrize(
    ("num_devices", "intra_op_threads", "optimizer_threads", "expected"),
    [(1, 16, None, (1, 14)), (2, 16, None, (1, 13)), (1, 4, None, (3, 4)), (1, 16, 4, (4, 3)), (1, 16, 20, (20, 1))],
)
@pytest.mark.usefixtures("sixteen_cores")
def test_where_devices_have_kernels_of_their_own_updates_leave_them_cores(
    num_devices, intra_op_threads, optimizer_threads, expected
):
    settings = {"intra_op_threads": intra_op_threads, "optimizer_threads": optimizer_threads}
    found = host_threads(num_devices=num_devices, computes_here=False, **settings)
    assert (found.optimizer_threads, found.optimizer_intra_op_threads) == expected
    assert found.intra_op_threads == intra_op_threads


@pytest.mark.usefixtures("sixteen_cores")
def test_optimizer_threads_that_are_set_are_taken():
    found = host_threads(intra_op_threads=2, num_devices=1, optimizer_threads=9)
    assert (found.optimizer_threads, found.intra_op_threads, found.cores_left) == (9, 2, 0)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"intra_op_threads": 16, "num_devices": 1},
            "host: 16 cores; 1 optimizer thread x 16 intra-op; 0 cores left, launches and data want 2",
        ),
        (
            {"intra_op_threads": 1, "num_devices": 3, "optimizer_threads": 15},
            "host: 16 cores; 15 optimizer threads x 1 intra-op; 1 core left, launches and data want 4",
        ),
    ],
)
@pytest.mark.usefixtures("sixteen_cores")
def test_threads_print_as_one_line(settings, text):
    assert str(host_threads(**settings)) == text


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"optimizer_threads": 0}, ValueError, "optimizer_threads 0 1"),
        ({"optimizer_threads": -2}, ValueError, "optimizer_threads -2 1"),
        ({"optimizer_threads": "2"}, TypeError, "optimizer_threads '2' int"),
        ({"optimizer_threads": True}, TypeError, "optimizer_threads True int"),
    ],
)
@pytest.mark.usefixtures("sixteen_cores")
def test_wrong_settings_are_refused(settings, error, says):
    with refused(error, says=says):
        host_threads(intra_op_threads=1, num_devices=1, **settings)


# -- a run

SEEN = []  # threads that layers, optimizers and loaders found themselves in


def see():
    SEEN.append(threading.current_thread().name)


class Seen(nn.Linear):
    """Tells where each of its forwards runs."""

    def forward(self, inputs):
        see()
        return super().forward(inputs)


class SeenSGD(torch.optim.SGD):
    """Tells where it steps; does `meet` before it in a run."""

    meet = staticmethod(lambda: None)

    def step(self, closure=None):
        if threading.current_thread().name.startswith("hydra-optimizer"):  # not planning's trial step
            SeenSGD.meet()
        see()
        return super().step(closure)


class Batches(list):
    """Tells where it is read."""

    def __iter__(self):
        for batch in super().__iter__():
            see()
            yield batch


@pytest.fixture(autouse=True)
def _forgotten():
    yield
    SEEN.clear()


def batches():
    generator = torch.Generator().manual_seed(1)
    return Batches(
        (torch.randn(4, WIDTH, generator=generator), torch.randint(3, (4,), generator=generator))
        for _ in range(NUM_STEPS)
    )


def model_of(num_layers=3):
    torch.manual_seed(0)
    return nn.Sequential(*(Seen(WIDTH, WIDTH) for _ in range(num_layers)))


def task_of(model, **options):
    options = {"optimizer": SeenSGD, "partitioner": Presharded([*range(1, len(model) + 1)]), "seed": 0} | options
    return ModelTask(model, F.cross_entropy, batches(), 0.1, **options)


def orchestra_of(*tasks, optimizer_threads=None, **options):
    orchestra = exact.silent(tasks, "1MiB", **options)
    orchestra.optimizer_threads = optimizer_threads
    return orchestra


@pytest.mark.parametrize("what", ["generate", "train_models", "evaluate", "predict"])
def test_wrong_settings_are_refused_before_any_work(what):
    arguments = {"evaluate": ("task-0", batches()), "predict": (model_of(), batches())}.get(what, ())
    orchestra = orchestra_of(task_of(model_of()), optimizer_threads=0)
    with refused(ValueError, says="optimizer_threads 0"):
        getattr(orchestra, what)(*arguments)
    assert SEEN == []
    orchestra.optimizer_threads = None
    assert orchestra.train_models().tasks["task-0"].status == "finished"


def test_plan_and_report_state_the_threads():
    orchestra = orchestra_of(task_of(model_of()), optimizer_threads=2)
    plan = orchestra.generate()
    assert (plan.host.optimizer_threads, plan.host.intra_op_threads) == (2, torch.get_num_threads())
    assert (plan.host.launch_cores, plan.host.data_cores) == (1, 1)
    assert str(plan).splitlines()[-1] == str(plan.host)
    orchestra.optimizer_threads = 3  # of the run, as things stand then
    report = orchestra.train_models()
    assert report.host.optimizer_threads == 3
    assert str(report).splitlines()[-2] == str(report.host)
    assert orchestra.plan.host.optimizer_threads == 2


@pytest.mark.rest
def test_as_many_threads_update_at_once_as_are_set(monkeypatch):
    barrier = threading.Barrier(3, timeout=TIMEOUT_S)
    monkeypatch.setattr(SeenSGD, "meet", staticmethod(barrier.wait))
    report = orchestra_of(*(task_of(model_of(1)) for _ in range(3)), optimizer_threads=3).train_models()
    assert [task.status for task in report.tasks.values()] == ["finished"] * 3  # each meets two others
    updating = {name for name in SEEN if name.startswith("hydra-optimizer")}
    assert updating == {"hydra-optimizer_0", "hydra-optimizer_1", "hydra-optimizer_2"}


@pytest.mark.rest
@pytest.mark.parametrize("optimizer_threads", [pytest.param(1, marks=pytest.mark.rest), 3])
def test_bits_do_not_depend_on_the_optimizer_threads(optimizer_threads):
    models = [model_of() for _ in range(2)]
    options = {"optimizer": torch.optim.AdamW, "max_grad_norm": 0.5}
    tasks = [task_of(model, **options) for model in models]
    report = orchestra_of(*tasks, optimizer_threads=optimizer_threads).train_models()
    plain = model_of()
    losses = reference.train(plain, F.cross_entropy, batches(), seed=0, lr=0.1, **options).losses
    for model, task in zip(models, report.tasks.values(), strict=True):
        assert task.losses == losses
        exact.assert_same_state(zoo.state(model), zoo.state(plain))
