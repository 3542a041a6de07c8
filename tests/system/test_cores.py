"""The host's cores are counted, its threads stated and set; a node binds a whole run, and nothing after it."""

import os
import signal
import threading
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hydra_engine import Callback, EmulatedDevice, HostThreads, ModelTask
from hydra_engine.system import cores as host
from hydra_engine.system.cores import allowed_cores, bound, host_threads, num_cores, numa_nodes
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


def node_files(**cores_of):
    return {f"sys/devices/system/node/{name}/cpulist": f"{cores}\n" for name, cores in cores_of.items()}


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


def test_nodes_hold_the_cores_that_are_allowed(made_up):
    files = node_files(node0="0-3,8-9", node1="4-7", node2="", node10="10")
    files["sys/devices/system/node/has_cpu"] = "0-1,10\n"
    tree(made_up, files)
    assert numa_nodes(frozenset(range(11))) == {0: {0, 1, 2, 3, 8, 9}, 1: {4, 5, 6, 7}, 10: {10}}
    assert list(numa_nodes(frozenset(range(11)))) == [0, 1, 10]
    assert numa_nodes(frozenset({3, 8, 10})) == {0: {3, 8}, 10: {10}}


@pytest.mark.usefixtures("made_up")
def test_machine_without_nodes_has_one():
    assert numa_nodes(EIGHT) == {0: EIGHT}


# -- the choice


@pytest.fixture
def sixteen_cores(made_up, monkeypatch):
    """A machine of two nodes of eight cores each."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    return tree(made_up, node_files(node0="0-7", node1="8-15"))


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
    found = host_threads(intra_op_threads=intra_op_threads, device_nodes=[None] * num_devices, numa_node=None)
    assert found == HostThreads(
        cores=16,
        num_nodes=2,
        optimizer_threads=expected,
        intra_op_threads=intra_op_threads,
        optimizer_intra_op_threads=intra_op_threads,
        launch_cores=num_devices,
        data_cores=1,
        device_nodes=(None,) * num_devices,
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
    found = host_threads(device_nodes=[None] * num_devices, computes_here=False, **settings)
    assert (found.optimizer_threads, found.optimizer_intra_op_threads) == expected
    assert found.intra_op_threads == intra_op_threads


@pytest.mark.usefixtures("sixteen_cores")
def test_optimizer_threads_that_are_set_are_taken():
    found = host_threads(intra_op_threads=2, device_nodes=[None], optimizer_threads=9)
    assert (found.optimizer_threads, found.intra_op_threads, found.cores_left) == (9, 2, 0)


@pytest.mark.usefixtures("sixteen_cores")
def test_bound_run_has_its_node_s_cores():
    found = host_threads(intra_op_threads=2, device_nodes=[None], numa_node=1)
    assert (found.cores, found.num_nodes, found.numa_node) == (8, 2, 1)
    assert found.bound_cores == frozenset(range(8, 16))
    assert (found.optimizer_threads, found.cores_left) == (3, 2)


def test_quota_holds_of_a_node_as_well(sixteen_cores):
    tree(sixteen_cores, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "300000 100000\n"})
    found = host_threads(intra_op_threads=1, device_nodes=[None], numa_node=0)
    assert (found.cores, found.optimizer_threads) == (3, 1)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"intra_op_threads": 16, "device_nodes": [None]},
            "host: 16 cores, 2 NUMA nodes; 1 optimizer thread x 16 intra-op; 0 cores left, launches and data want 2",
        ),
        (
            {"intra_op_threads": 1, "device_nodes": [1, None, 0], "numa_node": 1, "optimizer_threads": 7},
            "host: 8 cores of NUMA node 1, 2 NUMA nodes; 7 optimizer threads x 1 intra-op; "
            "1 core left, launches and data want 4; device 0 is attached to node 1; device 2 is attached to node 0",
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
        ({"numa_node": 2}, ValueError, "numa_node 2 0,"),
        ({"numa_node": 1.0}, TypeError, "numa_node 1.0 int"),
        ({"numa_node": False}, TypeError, "numa_node False int"),
    ],
)
@pytest.mark.usefixtures("sixteen_cores")
def test_wrong_settings_are_refused(settings, error, says):
    with refused(error, says=says):
        host_threads(intra_op_threads=1, device_nodes=[None], **settings)


def test_node_is_refused_where_threads_cannot_be_bound(monkeypatch):
    monkeypatch.delattr(os, "sched_setaffinity")
    with refused(RuntimeError, says="numa_node 0 None"):
        host_threads(intra_op_threads=1, device_nodes=[None], numa_node=0)
    assert host_threads(intra_op_threads=1, device_nodes=[None]).bound_cores is None


# -- bound


@pytest.fixture
def first_core():
    """One core: where a machine has just one, binding to it changes nothing."""
    return frozenset({min(os.sched_getaffinity(0))})


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_bound_thread_has_its_cores_again(first_core, error):
    before, seen = os.sched_getaffinity(0), []
    with nullcontext() if error is None else pytest.raises(error), bound(first_core):
        thread = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
        thread.start()
        thread.join()
        seen.append(os.sched_getaffinity(0))
        if error is not None:
            raise error
    assert seen == [first_core, first_core]
    assert os.sched_getaffinity(0) == before


def test_nothing_is_bound_to_nothing():
    before = os.sched_getaffinity(0)
    with bound(None):
        assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize("with_helpers", [True, False])
def test_threads_begun_meanwhile_are_let_go(first_core, with_helpers):
    before, begun, done, ids = os.sched_getaffinity(0), threading.Event(), threading.Event(), []

    def wait():
        ids.append(threading.get_native_id())
        begun.set()
        done.wait(TIMEOUT_S)

    thread = threading.Thread(target=wait)
    try:
        with bound(first_core, with_helpers=with_helpers):
            thread.start()
            assert begun.wait(TIMEOUT_S)
        assert os.sched_getaffinity(ids[0]) == (before if with_helpers else first_core)
    finally:
        done.set()
        thread.join()


def test_intra_op_threads_of_the_caller_are_let_go(first_core):
    left = []

    def work():  # in a thread of its own, which has no intra-op threads yet
        num_threads, before = torch.get_num_threads(), host._thread_ids()
        torch.set_num_threads(2)
        with bound(first_core):
            torch.ones(2**20).sin_()
        left.extend(os.sched_getaffinity(thread) for thread in host._thread_ids() - before)
        torch.set_num_threads(num_threads)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(left) >= 1
    assert all(cores == os.sched_getaffinity(0) for cores in left)


# -- a run

SEEN = []  # threads, and their cores, as layers, optimizers and loaders found them


def see():
    SEEN.append((threading.current_thread().name, frozenset(os.sched_getaffinity(0))))


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


def orchestra_of(*tasks, optimizer_threads=None, numa_node=None, **options):
    orchestra = exact.silent(tasks, "1MiB", **options)
    orchestra.optimizer_threads, orchestra.numa_node = optimizer_threads, numa_node
    return orchestra


@pytest.fixture
def two_nodes(tmp_path, monkeypatch):
    """This machine's cores on two made-up nodes: the first one on node 0. Gives both; one of them may have none."""
    first, *others = sorted(os.sched_getaffinity(0))
    monkeypatch.setattr(host, "ROOT", tree(tmp_path, node_files(node0=first, node1=",".join(map(str, others)))))
    return frozenset({first}), frozenset(others)


@pytest.fixture
def undisturbed():
    before = os.sched_getaffinity(0)
    yield
    assert os.sched_getaffinity(0) == before


@pytest.mark.usefixtures("undisturbed")
def test_whole_run_is_bound_to_its_node(two_nodes):
    node = 1 if two_nodes[1] else 0
    orchestra = orchestra_of(task_of(model_of()), numa_node=node)
    plan = orchestra.generate()
    assert {cores for _, cores in SEEN} == {two_nodes[node]}  # the rehearsal
    report = orchestra.train_models()
    assert {cores for _, cores in SEEN} == {two_nodes[node]}
    assert {"emulated:0-compute", "hydra-optimizer_0", "task-0-reader"} <= {name for name, _ in SEEN}
    assert plan.host == report.host
    assert (report.host.numa_node, report.host.bound_cores) == (node, two_nodes[node])
    assert report.host.cores == len(two_nodes[node])


@pytest.mark.rest
@pytest.mark.usefixtures("undisturbed")
def test_task_that_comes_later_is_planned_on_the_node(two_nodes):
    trains, is_added, found, before = threading.Event(), threading.Event(), [], os.sched_getaffinity(0)

    class Waits(Callback):
        def on_step(self, report):
            trains.set()
            assert is_added.wait(TIMEOUT_S)

    orchestra = orchestra_of(task_of(model_of(), callbacks=[Waits()]), numa_node=0)

    def add():
        assert trains.wait(TIMEOUT_S)
        found.append(orchestra.add_task(task_of(model_of())))
        found.append(os.sched_getaffinity(0))
        is_added.set()

    thread = threading.Thread(target=add)
    thread.start()
    report = orchestra.train_models()
    thread.join()
    assert found == ["task-1", before]
    assert [task.status for task in report.tasks.values()] == ["finished"] * 2
    assert {cores for _, cores in SEEN} == {two_nodes[0]}


@pytest.mark.usefixtures("undisturbed")
def test_evaluation_is_bound_and_a_prediction_while_it_is_at_work(two_nodes):
    before = os.sched_getaffinity(0)
    orchestra = orchestra_of(task_of(model_of()), numa_node=0)
    orchestra.evaluate("task-0", batches())
    outputs = orchestra.predict(model_of(), [torch.ones(4, WIDTH)] * 2)
    assert os.sched_getaffinity(0) == before
    for output in outputs:
        assert output.shape == (4, WIDTH)
        assert os.sched_getaffinity(0) == before  # the caller's own again, while it has the word
    assert {cores for _, cores in SEEN} == {two_nodes[0]}


@pytest.mark.usefixtures("undisturbed")
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_caller_has_its_cores_again_after_errors(two_nodes, error):
    class Boom:
        def key(self, *_):
            raise error("boom")

    with refused(error, says="boom"):
        orchestra_of(task_of(model_of()), numa_node=0, policy=Boom()).train_models()


@pytest.mark.usefixtures("undisturbed", "two_nodes")
def test_caller_has_its_cores_again_after_ctrl_c():
    class Interrupts(Callback):
        def on_step(self, report):
            if report.steps == 1:  # a second one would come on the way out of the first
                signal.raise_signal(signal.SIGINT)

    orchestra = orchestra_of(task_of(model_of(), callbacks=[Interrupts()]), numa_node=0)
    with pytest.raises(KeyboardInterrupt):
        orchestra.train_models()
    assert orchestra.report.tasks["task-0"].status == "stopped"


@pytest.mark.usefixtures("undisturbed")
def test_caller_has_its_cores_again_where_planning_fails(two_nodes):
    with refused(RuntimeError, says="shapes"):
        orchestra_of(task_of(nn.Sequential(nn.Linear(WIDTH + 1, 3))), numa_node=0).generate()


@pytest.mark.parametrize("what", ["generate", "train_models", "evaluate", "predict"])
def test_wrong_settings_are_refused_before_any_work(what):
    arguments = {"evaluate": ("task-0", batches()), "predict": (model_of(), batches())}.get(what, ())
    orchestra = orchestra_of(task_of(model_of()), optimizer_threads=0)
    with refused(ValueError, says="optimizer_threads 0"):
        getattr(orchestra, what)(*arguments)
    orchestra.optimizer_threads, orchestra.numa_node = None, 4096
    with refused(ValueError, says="numa_node 4096"):
        getattr(orchestra, what)(*arguments)
    assert SEEN == []
    orchestra.numa_node = None
    assert orchestra.train_models().tasks["task-0"].status == "finished"


def test_plan_and_report_state_the_threads():
    orchestra = orchestra_of(task_of(model_of()), optimizer_threads=2)
    plan = orchestra.generate()
    assert (plan.host.optimizer_threads, plan.host.intra_op_threads) == (2, torch.get_num_threads())
    assert (plan.host.launch_cores, plan.host.data_cores, plan.host.device_nodes) == (1, 1, (None,))
    assert str(plan).splitlines()[-1] == str(plan.host)
    orchestra.optimizer_threads = 3  # of the run, as things stand then
    report = orchestra.train_models()
    assert report.host.optimizer_threads == 3
    assert str(report).splitlines()[-2] == str(report.host)
    assert orchestra.plan.host.optimizer_threads == 2


def test_attached_device_is_stated():
    class Attached(EmulatedDevice):
        def numa_node(self):
            return 1

    orchestra = orchestra_of(task_of(model_of()), devices=[EmulatedDevice("1MiB"), Attached("1MiB")])
    assert str(orchestra.generate()).endswith("; device 1 is attached to node 1")
    assert EmulatedDevice("1MiB").numa_node() is None


@pytest.mark.rest
def test_as_many_threads_update_at_once_as_are_set(monkeypatch):
    barrier = threading.Barrier(3, timeout=TIMEOUT_S)
    monkeypatch.setattr(SeenSGD, "meet", staticmethod(barrier.wait))
    report = orchestra_of(*(task_of(model_of(1)) for _ in range(3)), optimizer_threads=3).train_models()
    assert [task.status for task in report.tasks.values()] == ["finished"] * 3  # each meets two others
    updating = {name for name, _ in SEEN if name.startswith("hydra-optimizer")}
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
