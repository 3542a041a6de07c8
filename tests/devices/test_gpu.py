"""What a GPU is asked.

    python -m pytest tests/devices/test_gpu.py                                    # on a GPU of at least 16 GiB
    HYDRA_ENGINE_FAKE_CUDA=1 python -m pytest tests/devices/test_gpu.py           # on tests/fake_cuda.py: without a GPU

The second says whether the Python here is right, and nothing of a GPU: sizes are small then, and no time is compared.

Bits are compared under deterministic kernels; with the resident loop within `TOLERANCE`, since its optimizer steps on
the device and the engine's on the host, which do not round alike.
"""

import gc
import math
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

# Read once, as cuBLAS starts: https://docs.nvidia.com/cuda/cublas/#results-reproducibility
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch
from torch import OutOfMemoryError, nn
from torch.nn import functional as F

from hydra_engine import CudaDevice, ModelOrchestrator, ModelTask
from hydra_engine.checkpoints.checkpoint import load_newest
from hydra_engine.devices import cuda as device
from hydra_engine.native import Work, native
from hydra_engine.tasks.callback import Callback
from partitioners import Presharded
from tests import reference, zoo
from tests.devices.test_device import DeviceContract
from tests.fake_cuda import MIB, FakeCuda
from tests.native.test_update import SETTINGS
from tests.refused import names, refused

# A warning of a driver's or a library's is no failure of what is tested here.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

IS_FAKE = not torch.cuda.is_available()
GIB = 2**30
SEED, LR, NUM_STEPS = 11, 1e-3, 8

# Relative difference of losses, and the distance between two models' weights as a share of the way that they went.
TOLERANCE = {"float32": (1e-4, 0.02), "bfloat16": (2e-2, 0.1)}
# "Not slower", for times that are not the same twice; and the share of load time under other units' compute.
NOT_SLOWER = math.inf if IS_FAKE else 1.10
LEAST_HIDDEN = 0.0 if IS_FAKE else 0.5


class Sizes(NamedTuple):
    """A model of equal layers and a budget that holds a few of them."""

    width: int
    num_layers: int
    budget_bytes: int


# Each layer 256 MiB, the model 3 GiB. The allocator takes pieces of 20 MiB for each stream, which the
# sixteenth of a budget that is kept free has to hold: hence no smaller one.
LARGE = Sizes(64, 12, 128 * 1024) if IS_FAKE else Sizes(8192, 12, 2 * GIB)
BUDGET_BYTES = 4 * MIB if IS_FAKE else 2 * GIB  # where the model is small


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch):
    if not IS_FAKE:
        yield
        return
    fake = FakeCuda(has_ieee_roots=True)
    with fake.installed():
        monkeypatch.setattr(sys.modules[__name__], "torch", fake.torch)
        yield
    fake.check_all_left_as_found()


@pytest.fixture
def deterministic():
    """Kernels that add in the same order each time; and none in TF32."""
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.allow_tf32,
        torch.backends.cuda.matmul.allow_tf32,
    )
    _set_kernels(True, False, False, False, False)
    yield
    _set_kernels(*before)


@pytest.fixture
def no_collector():
    """Only what nobody holds any more is freed."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def _set_kernels(is_deterministic, fills, benchmarks, convolves_in_tf32, multiplies_in_tf32):
    torch.use_deterministic_algorithms(is_deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = fills
    torch.backends.cudnn.benchmark = benchmarks
    torch.backends.cudnn.allow_tf32 = convolves_in_tf32
    torch.backends.cuda.matmul.allow_tf32 = multiplies_in_tf32


def gpu():
    return torch.device("cuda", 0)


def capped(budget_bytes, index=0):
    """A device whose ledger has so much, a multiple of 2 MiB, to give."""
    allowed_bytes = max(-(-budget_bytes * 16 // 15), budget_bytes + device.LEAST_RESERVED_BYTES)
    found = CudaDevice(index, allowed_bytes + CudaDevice(index).context_bytes)
    assert found.memory_bytes == budget_bytes
    return found


def orchestra_of(tasks, *, budget_bytes=BUDGET_BYTES, **options):
    orchestra = ModelOrchestrator(tasks, devices=[capped(budget_bytes)], **options)
    orchestra.verbose = 0
    return orchestra


def trained(tasks, **options):
    report = orchestra_of(tasks, **options).train_models()
    report.raise_failures()
    [used] = report.devices
    assert 0 < used.peak_bytes <= used.memory_bytes
    return report


class Attention(nn.Module):
    """Causal, written out: fused kernels have no deterministic backward in float32."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
        later = x.new_ones(x.shape[1], x.shape[1]).triu(1).bool()
        return x + self.out(scores.masked_fill(later, -math.inf).softmax(-1) @ v)


def gpt(width=64, vocabulary=97, dropout=0.0):
    torch.manual_seed(1)
    blocks = [
        nn.Sequential(Attention(width), nn.Linear(width, width), nn.GELU(), nn.Dropout(dropout)) for _ in range(4)
    ]
    model = nn.Sequential(nn.Embedding(vocabulary, width), *blocks, nn.LayerNorm(width), nn.Linear(width, vocabulary))
    tokens = torch.randint(vocabulary, (NUM_STEPS, 6, 17))
    return model, zoo.next_byte_loss, [(each[:, :-1], each[:, 1:]) for each in tokens]


def gpt_with_dropout():
    return gpt(dropout=0.2)


MODELS = {"gpt": gpt, "gpt_with_dropout": gpt_with_dropout, "cnn": zoo.cnn, "dropout": zoo.dropout}


def ends_of(partition, num_layers):
    """A number of shards as equal as can be; 0: one for each layer."""
    number = partition or num_layers
    return [num_layers * (j + 1) // number for j in range(number)]


def task_of(name, *, partition=3, label=None, make=None, **options):
    """A task over a fresh model, which is spilled, and that model; `partition` None: the planner's."""
    model, loss_fn, loader = (make or MODELS[name])()
    options = {"optimizer": torch.optim.AdamW, "seed": SEED, "homes": "host"} | options
    shards = None if partition is None else Presharded(ends_of(partition, len(model)))
    task = ModelTask(model, loss_fn, loader, LR, name=label or name, partitioner=shards, **options)
    return task, model


def result_of(report, name, model):
    return report.tasks[name].losses, {key: each.detach().clone() for key, each in zoo.state(model).items()}


def assert_same(found, expected):
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    assert not [key for key in found[1] if not torch.equal(found[1][key], expected[1][key])]


class TestCudaDevice(DeviceContract):
    MEMORY, ARENA_BYTES = (MIB, MIB // 2) if IS_FAKE else (64 * MIB, 32 * MIB)

    def make(self, memory, index=0):
        return capped(memory, index)

    def open(self, index, trace):
        return self.make(self.MEMORY, index).open(index, trace, 1, self.ARENA_BYTES)

    def test_two_devices_have_two_names(self, trace):
        if torch.cuda.device_count() < 2:
            pytest.skip("needs two GPUs")
        super().test_two_devices_have_two_names(trace)

    def test_what_is_copied_in_pieces_comes_back_out(self, opened):
        num_bytes = self.ARENA_BYTES - 64
        source, target = torch.randint(256, (num_bytes,), dtype=torch.uint8), torch.empty(num_bytes, dtype=torch.uint8)
        view = opened.take_slab(num_bytes).bytes(0, num_bytes)
        self.finish(opened, "load", lambda: opened.copy("load", [(view, source)]))
        self.finish(opened, "store", lambda: opened.copy("store", [(target, view)]))
        assert torch.equal(target, source)

    def test_allocator_is_left_as_it_was_found(self, trace):
        self.open(0, trace).close()  # which frees what cuBLAS has kept for this thread
        before = torch.cuda.get_per_process_memory_fraction(0), torch.cuda.memory_allocated(0)
        self.open(0, trace).close()
        assert (torch.cuda.get_per_process_memory_fraction(0), torch.cuda.memory_allocated(0)) == before


# Exactness


@pytest.mark.usefixtures("deterministic")
class TestSameBits:
    """A task's bits depend on the task alone."""

    @pytest.mark.parametrize("precision", ["float32", "bfloat16"])
    @pytest.mark.parametrize("name", MODELS)
    def test_across_partitions(self, name, precision):
        found = []
        for partition in (1, 3, 0):
            task, model = task_of(name, partition=partition, precision=precision)
            found.append(result_of(trained([task]), name, model))
        assert all(map(math.isfinite, found[0][0]))
        assert_same(found[1], found[0])
        assert_same(found[2], found[0])

    @pytest.mark.parametrize("accumulation_steps", [1, 3])
    def test_with_double_buffering_and_without(self, accumulation_steps):
        found = []
        for double_buffer in (True, False):
            task, model = task_of("gpt_with_dropout", accumulation_steps=accumulation_steps)
            found.append(result_of(trained([task], double_buffer=double_buffer), task.name, model))
        assert_same(found[1], found[0])

    def test_alone_and_beside_two_others(self):
        names = ("gpt_with_dropout", "cnn", "dropout")
        alone = {}
        for name in names:
            task, model = task_of(name)
            alone[name] = result_of(trained([task]), name, model)
        tasks, models = zip(*map(task_of, names), strict=True)
        report = trained(tasks)
        for name, model in zip(names, models, strict=True):
            assert_same(result_of(report, name, model), alone[name])

    def test_of_a_task_that_joins_while_another_trains(self):
        """Rehearsed on the device that the other one lends, or with the plan of one that was."""

        class Adds(Callback):
            def on_step(self, report):
                if report.steps == 2:
                    for task, _ in joining:
                        orchestra.add_task(task)

        task, model = task_of("cnn")
        alone = result_of(trained([task]), "cnn", model)
        joining = [task_of("cnn"), task_of("cnn", label="again")]
        first, first_model = task_of("gpt_with_dropout", callbacks=[Adds()])
        orchestra = orchestra_of([first])
        report = orchestra.train_models()
        report.raise_failures()
        [used] = report.devices
        assert 0 < used.peak_bytes <= used.memory_bytes
        assert [plan.adopted_from for plan in orchestra.plan.tasks.values()] == [None, None, "cnn"]
        for task, model in joining:
            assert_same(result_of(report, task.name, model), alone)
        task, model = task_of("gpt_with_dropout")
        expected = result_of(trained([task]), task.name, model)
        assert_same(result_of(report, first.name, first_model), expected)

    def test_twice(self):
        found = []
        for _ in range(2):
            task, model = task_of("gpt_with_dropout", partition=0, accumulation_steps=3)
            found.append(result_of(trained([task]), task.name, model))
        assert_same(found[1], found[0])

    def test_predictions_are_those_of_the_resident_model(self):
        model, _, loader = gpt()
        inputs = [each for each, _ in loader]
        outputs = list(orchestra_of([task_of("cnn")[0]]).predict(model, inputs, partitioner=Presharded([2, 5, 7])))
        resident = model.to(gpu()).eval()
        with torch.no_grad():
            for each, output in zip(inputs, outputs, strict=True):
                assert torch.equal(resident(each.to(gpu())).cpu(), output)


TYPES = [  # of a gradient and of the narrow weight; True: a split weight
    (torch.float32, None, False),
    (torch.bfloat16, torch.bfloat16, False),
    (torch.bfloat16, torch.bfloat16, True),
    (torch.float16, torch.float16, False),
]


class TestHomes:
    """docs/homes.md: update.cu makes the updates of layers that are at home on a GPU."""

    @pytest.mark.parametrize("setting", [*SETTINGS][:: 5 if IS_FAKE else 1])
    def test_the_kernel_has_the_bits_of_the_host(self, setting):
        kind, options = SETTINGS[setting]
        group = kind([nn.Parameter(torch.ones(1))], lr=LR, **options).param_groups[0]
        names = ["momentum_buffer"] if options.get("momentum") else []
        counter = None if kind is torch.optim.SGD else torch.tensor(0.0)
        if counter is not None:
            names = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])]
        for moments in (torch.float32, torch.bfloat16):
            works = [
                Work(
                    torch.ones(1),
                    torch.ones(1, dtype=gradient),
                    None if narrow is None else torch.ones(1, dtype=narrow),
                    group,
                    {name: torch.ones(1, dtype=moments) for name in names},
                    counter,
                    is_split or None,
                )
                for gradient, narrow, is_split in TYPES
            ]
            assert native().refusal(CudaDevice(0).kernel(), kind, works, len(options) % 3) == ""

    @pytest.mark.usefixtures("deterministic")
    @pytest.mark.parametrize("options", [{}, {"precision": "bfloat16"}, {"split_weights": True, "max_grad_norm": 0.1}])
    def test_same_bits_as_with_homes_in_dram(self, options):
        options = {"precision": "bfloat16" if "split_weights" in options else "float32", **options}
        found = []
        for homes in ("host", "device", 4):
            task, model = task_of("gpt_with_dropout", homes=homes, **options)
            orchestra = orchestra_of([task], budget_bytes=4 * BUDGET_BYTES)
            report = orchestra.train_models()
            report.raise_failures()
            assert (report.devices[0].homed_bytes > 0) == (homes != "host"), orchestra.plan
            found.append(result_of(report, task.name, model))
        assert_same(found[1], found[0])
        assert_same(found[2], found[0])

    @pytest.mark.usefixtures("deterministic")
    def test_homes_make_room(self):
        """In the middle of a step, and a device that goes and comes back."""

        class Moves(Callback):
            def on_step(self, report):
                if report.steps == 3:
                    orchestra.remove_device("cuda:0")
                    orchestra.add_device("cuda:0")

        task, model = task_of("gpt", precision="bfloat16")
        expected = result_of(trained([task]), "gpt", model)
        task, model = task_of("gpt", precision="bfloat16", homes="device", callbacks=[Moves()])
        orchestra = orchestra_of([task])
        report = orchestra.train_models()
        report.raise_failures()
        assert report.devices[0].homed_bytes > 0
        assert_same(result_of(report, "gpt", model), expected)


class OnGpu:
    """A loader's batches, on the device."""

    def __init__(self, loader):
        self._loader = loader

    def __iter__(self):
        for inputs, target in self._loader:
            yield inputs.to(gpu()), target.to(gpu())


def resident(make, **options):
    """Losses and weights of the plain loop with everything on the device, and the way that the weights went."""
    model, loss_fn, loader = make()
    before = {key: each.detach().clone() for key, each in zoo.state(model).items()}
    model.to(gpu())
    found = reference.train(
        model, loss_fn, OnGpu(loader), seed=SEED, lr=LR, **{"optimizer": torch.optim.AdamW} | options
    )
    model.to("cpu")
    after = {key: each.detach().clone() for key, each in zoo.state(model).items()}
    way = distance(after, before)
    del model
    if not IS_FAKE:
        torch.cuda.empty_cache()
    return found.losses, after, way


def distance(a, b):
    return math.sqrt(sum(float((a[key].double() - b[key].double()).square().sum()) for key in a))


def assert_near(found, losses, state, way, precision):
    loss_tolerance, way_tolerance = TOLERANCE[precision]
    assert found[0] == pytest.approx(losses, rel=loss_tolerance)
    assert distance(found[1], state) <= way_tolerance * way


@pytest.mark.usefixtures("deterministic")
class TestNearResident:
    """The plain loop with float32 masters on the device; dropout draws what it draws there."""

    @pytest.mark.parametrize("accumulation_steps", [1, 3])
    @pytest.mark.parametrize("precision", ["float32", "bfloat16"])
    @pytest.mark.parametrize("name", MODELS)
    def test_losses_and_weights(self, name, precision, accumulation_steps):
        options = {"precision": precision, "accumulation_steps": accumulation_steps}
        expected = resident(MODELS[name], **options)
        task, model = task_of(name, **options)
        assert_near(result_of(trained([task]), name, model), *expected, precision)


# The budget


def large(num_samples, num_steps, num_frozen):
    """A model that is larger than its budget; its upper layers may be frozen, which leaves the host nothing to do."""

    def make():
        torch.manual_seed(5)
        layers = [nn.Linear(LARGE.width, LARGE.width, bias=False, device="meta") for _ in range(LARGE.num_layers)]
        model = nn.Sequential(*layers).to_empty(device="cpu")
        for layer in model:  # drawing all of it would take a minute
            few = torch.randn(LARGE.width, 64) / LARGE.width**0.5
            layer.weight.data.copy_(few.repeat(1, LARGE.width // 64))
        model[LARGE.num_layers - num_frozen :].requires_grad_(False)
        batches = [
            (torch.randn(num_samples, LARGE.width), torch.randn(num_samples, LARGE.width)) for _ in range(num_steps)
        ]
        return model, F.mse_loss, batches

    return make


def large_task(label, *, num_samples=16, num_steps=6, num_frozen=0, **options):
    make = large(num_samples, num_steps, num_frozen)
    options = {"optimizer": torch.optim.SGD, "partition": 0} | options
    return task_of(label, label=label, make=make, **options)


@pytest.mark.usefixtures("deterministic")
def test_two_models_each_larger_than_the_cap():
    """Cut in two ways, they leave the same bits; and nothing is taken beyond what was allowed."""
    tasks, models = zip(large_task("each", num_steps=3), large_task("pairs", partition=6, num_steps=3), strict=True)
    assert sum(each.nbytes for each in models[0].parameters()) > 1.4 * LARGE.budget_bytes
    orchestra = orchestra_of(tasks, budget_bytes=LARGE.budget_bytes)
    [spec] = orchestra._devices.pool.specs.values()
    torch.cuda.empty_cache()
    held_bytes = torch.cuda.memory_reserved(0)
    torch.cuda.reset_peak_memory_stats(0)
    report = orchestra.train_models()
    report.raise_failures()
    assert torch.cuda.max_memory_reserved(0) <= held_bytes + spec.allowed_bytes
    assert report.devices[0].peak_bytes <= report.devices[0].memory_bytes == LARGE.budget_bytes
    found = [result_of(report, task.name, model) for task, model in zip(tasks, models, strict=True)]
    assert all(map(math.isfinite, found[0][0]))
    assert_same(found[1], found[0])
    del tasks, models, orchestra


def test_nothing_is_allocated_on_the_device_after_warm_up():
    counts = []

    class Counts(Callback):
        def on_step(self, report):
            stats = torch.cuda.memory_stats(0)
            counts.append((stats["num_device_alloc"], stats["num_alloc_retries"]))

    task, _ = large_task("large", num_samples=64, num_steps=8, callbacks=[Counts()])
    trained([task], budget_bytes=LARGE.budget_bytes)
    assert len(counts) == 8
    assert counts[-1] == counts[2]


# Overlap


def step_s(report, name):
    """Seconds of a step, the first two left out."""
    ends_s = [span.end_s for span in report.spans if span.lane == "commit" and span.label == name]
    return (ends_s[-1] - ends_s[1]) / (len(ends_s) - 2)


def hidden_share(report, after_s):
    """Of the time in which shards are loaded, that in which another unit computes."""
    loads = [span for span in report.spans if span.lane == "load" and span.start_s > after_s]
    computes = [span for span in report.spans if span.lane == "compute"]
    total_s = sum(span.end_s - span.start_s for span in loads)
    hidden_s = sum(
        max(0.0, min(load.end_s, compute.end_s) - max(load.start_s, compute.start_s))
        for load in loads
        for compute in computes
        if load.label != compute.label
    )
    return hidden_s / total_s


def test_double_buffering_is_not_slower_than_one_after_the_other():
    """Where loads take longer than what is computed on them."""
    seconds = {True: [], False: []}
    num_samples = 16 if IS_FAKE else 256
    for double_buffer in (True, False, True, False):
        task, _ = large_task("large", num_samples=num_samples, num_frozen=LARGE.num_layers - 1)
        report = trained([task], budget_bytes=LARGE.budget_bytes, double_buffer=double_buffer)
        seconds[double_buffer].append(step_s(report, "large"))
    assert min(seconds[True]) <= NOT_SLOWER * min(seconds[False])


def test_copies_are_hidden_behind_the_compute_of_others():
    """Where what is computed takes longer than the loads."""
    options = {"num_samples": 16 if IS_FAKE else 4096, "num_steps": 4, "num_frozen": LARGE.num_layers - 1}
    tasks = [large_task(label, **options)[0] for label in ("a", "b")]
    report = trained(tasks, budget_bytes=LARGE.budget_bytes if IS_FAKE else 3 * GIB)
    first_s = max(
        next(span.end_s for span in report.spans if (span.lane, span.label) == ("commit", label)) for label in "ab"
    )
    assert hidden_share(report, first_s) >= LEAST_HIDDEN


# Faults


class Exhausts(nn.Module):
    """Asks for more than the card has, once, when it is armed.

    Of its globals it reads no `torch`: the stand-in's counts its calls, and a layer may not change what it reads.
    """

    def __init__(self, is_armed):
        super().__init__()
        self.is_armed = is_armed

    def forward(self, x):
        if self.is_armed():
            if IS_FAKE:
                raise OutOfMemoryError("CUDA out of memory, of a stand-in")
            x.new_empty(2**42)
        return x


@pytest.mark.usefixtures("deterministic", "no_collector")  # a failed unit's error holds nothing of the device
def test_a_step_that_ran_out_of_memory_begins_again_on_a_finer_partition():
    armed = []

    def with_trap():
        model, loss_fn, loader = gpt_with_dropout()
        model.insert(3, Exhausts(lambda: bool(armed) and armed.pop()))
        return model, loss_fn, loader

    task, model = task_of("gpt", make=with_trap)
    calm = result_of(trained([task]), "gpt", model)
    task, model = task_of("gpt", make=with_trap, partition=None)
    orchestra = orchestra_of([task])
    num_shards = len(orchestra.generate().tasks["gpt"].boundaries)
    armed.append(True)
    report = orchestra.train_models()
    report.raise_failures()
    [revision] = report.tasks["gpt"].revisions
    assert len(revision.boundaries) > num_shards
    assert_same(result_of(report, "gpt", model), calm)


class Asserts(nn.Module):
    """Takes an index out of range on the device, where a batch holds a certain value."""

    VALUE = 1234.0

    def __init__(self, strike):
        super().__init__()
        self.strike = strike

    def forward(self, x):
        if self.strike is not None and x[0, 0] == self.VALUE:
            self.strike()
            return x
        index = (x[0, :1] == self.VALUE).long() * 10**6
        return x + 0 * x[0][index]


STRUCK_STEP = 2


def lose_the_device():
    """Train two tasks, of which one strikes the device; runs in a process of its own, in an empty directory."""
    fake = FakeCuda() if IS_FAKE else None
    with nullcontext() if fake is None else fake.installed():
        torch.manual_seed(3)
        batches = [(torch.randn(4, 12), torch.randn(4, 5)) for _ in range(6)]
        batches[STRUCK_STEP][0][0, 0] = Asserts.VALUE
        strike = None if fake is None else (lambda: fake.strike())
        bad = nn.Sequential(Asserts(strike), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 5))
        options = {"partitioner": Presharded([1, 4]), "records": [] if fake is None else ["0.strike"]}
        struck = ModelTask(bad, F.mse_loss, batches, LR, name="struck", **options)
        model, loss_fn, loader = gpt()
        options = {"partitioner": Presharded([3, 7]), "homes": "host"}  # which loses no commit
        other = ModelTask(model, loss_fn, loader, LR, 50, name="other", seed=SEED, **options)
        orchestra = ModelOrchestrator([struck, other], devices=[capped(BUDGET_BYTES)])
        orchestra.verbose = 0
        try:
            orchestra.train_models()
        finally:
            found = orchestra.report.tasks
            statuses = {name: (each.status, each.steps) for name, each in found.items()}
            torch.save({"weights": model.state_dict(), "statuses": statuses}, "expected.pt")


def test_a_device_side_assert_ends_the_process_with_the_others_saved(tmp_path):
    root = Path(__file__).resolve().parents[2]
    environment = os.environ | {"PYTHONPATH": str(root)}
    command = "from tests.devices.test_gpu import lose_the_device; lose_the_device()"
    ended = subprocess.run(
        [sys.executable, "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=110
    )
    assert ended.returncode == 75, ended.stderr
    expected = torch.load(tmp_path / "expected.pt", weights_only=True)
    [directory] = tmp_path.glob("hydra-rescue-*")
    checkpoint = load_newest(directory)
    said = checkpoint.data["tasks"]
    assert expected["statuses"]["struck"] == ("failed", STRUCK_STEP)
    assert expected["statuses"]["other"] == ("stopped", said["other"]["steps"])
    assert (said["struck"]["over"], said["other"]["over"]) == ("lost", None)
    weights = checkpoint.read_tensors("other", "weights")
    assert weights.keys() == expected["weights"].keys()
    assert all(torch.equal(each, expected["weights"][key]) for key, each in weights.items())
    names(ended.stderr, says=f"{directory.name} device-side assert")


# What is said


def test_launching_is_timed():
    task, _ = task_of("gpt")
    orchestra = orchestra_of([task])
    share = orchestra.generate().tasks["gpt"].launch_share
    assert share > 0
    report = orchestra.train_models()
    [used] = report.devices
    assert used.launch_s > 0
    assert used.device_s > 0
    names(str(report), says=f"cuda:0 launching {used.launch_s / used.device_s:.0%}")


def test_what_the_card_has_not_is_refused():
    _, total = torch.cuda.mem_get_info(0)
    with refused(ValueError, says="memory 'cuda:0'"):
        CudaDevice(0, total + 1)
    with refused(RuntimeError, says=f"'cuda:{torch.cuda.device_count()}'"):
        CudaDevice(torch.cuda.device_count())


@pytest.mark.skipif(IS_FAKE, reason="needs a GPU")
def test_the_link_is_measured():
    ceilings = CudaDevice(0).ceilings()
    assert 1e9 < ceilings.up_bytes_per_s < 1e12
    assert 1e9 < ceilings.down_bytes_per_s < 1e12
