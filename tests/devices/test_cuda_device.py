"""CUDA as hydra_engine/devices/cuda.py uses it, on a stand-in that judges it (tests/fake_cuda.py): no GPU is needed.

tests/devices/test_gpu.py is what a GPU is asked. Here every copy that nobody waits for comes too late, and every rule
of use is checked; nothing here says that CUDA itself does what is expected of it.
"""

import threading
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from hydra_engine import CudaDevice, EmulatedDevice, ModelOrchestrator, ModelTask
from hydra_engine.checkpoints.checkpoint import load_newest
from hydra_engine.data import memory
from hydra_engine.data.streams import TaskGenerator
from hydra_engine.devices import Residents, rates
from hydra_engine.devices.lanes import COMPUTE, INPUT, LOAD, QUEUES, STORE
from hydra_engine.devices.pool import host_memory
from hydra_engine.errors import DeviceLost
from hydra_engine.tasks.callback import Callback
from hydra_engine.trace import Trace
from hydra_engine.worker.claims import Claims
from partitioners import Presharded
from tests import exact, reference, zoo
from tests.checkpoints.support import FullDisk
from tests.covering import covering
from tests.devices import test_gpu
from tests.devices.test_device import DeviceContract
from tests.devices.test_gpu import STRUCK_STEP, Asserts
from tests.fake_cuda import MIB, FakeCuda, Misuse
from tests.refused import names, refused
from tests.worker.test_keeping import Backwards, everything_kept

SEED, LR = 7, 0.05
PAGE_BYTES = 4096  # of memory, on the CPU


@pytest.fixture
def cuda():
    """Two cards; everything that used them leaves them as they were."""
    found = FakeCuda(num_devices=2)
    with found.installed():
        yield found
    found.check_all_left_as_found()


def test_rates_of_a_kind_of_card_are_measured_once_in_a_process(cuda, monkeypatch):
    monkeypatch.setattr("hydra_engine.devices.cuda._MEASURED", {})
    monkeypatch.setattr(rates, "DRAM_BYTES", 2**22)
    state = torch.get_rng_state()
    first = CudaDevice(0, asked(cuda, MIB)).ceilings()
    assert set(first.matmul_flops) == {"float32", "bfloat16", "float16"}
    assert first.dram_bytes_per_s > 0
    monkeypatch.setattr("hydra_engine.devices.cuda.time", None)  # nothing is timed any more
    assert CudaDevice(1, asked(cuda, MIB)).ceilings() is first
    assert torch.equal(torch.get_rng_state(), state)


def asked(cuda, budget_bytes):
    """The memory to ask for, so that the ledger has so much, a whole number of pages, to give."""
    return -(-budget_bytes * 16 // 15) + cuda.context_bytes


def devices_of(cuda, num=1, budget_bytes=MIB):
    devices = [CudaDevice(index, asked(cuda, budget_bytes)) for index in range(num)]
    assert [device.memory_bytes for device in devices] == num * [budget_bytes]
    return devices


def orchestra_of(tasks, devices, **options):
    return exact.silent(tasks, devices=devices, **options)


def trained(cuda, tasks, *, num_devices=1, budget_bytes=MIB, **options):
    """The report of a training within its budget that the judge has nothing against."""
    report = orchestra_of(tasks, devices_of(cuda, num_devices, budget_bytes), **options).train_models()
    assert not cuda.misuses
    report.raise_failures()
    exact.assert_within_budget(report, num_devices)
    return report


class TestCudaDevice(DeviceContract):
    MEMORY, ARENA_BYTES = 16 * PAGE_BYTES, 8 * PAGE_BYTES

    @pytest.fixture(autouse=True)
    def _on_a_stand_in(self, cuda):
        self.cuda = cuda

    def make(self, memory, index=0):
        return CudaDevice(index, asked(self.cuda, memory))

    def open(self, index, trace):
        return self.make(self.MEMORY, index).open(index, trace, 1, self.ARENA_BYTES)

    def test_each_lane_is_on_its_device_and_stream(self, trace):
        opened = self.open(1, trace)

        def here():
            torch_cuda = self.cuda.torch.cuda
            return torch_cuda.current_device(), torch_cuda.current_stream()

        found = [self.finish(opened, lane, here) for lane in QUEUES]
        opened.close()
        assert {device for device, _ in found} == {1}
        assert len({id(stream) for _, stream in found} - {id(self.cuda.cards[1].default_stream)}) == len(QUEUES)

    def test_backwards_run_in_the_compute_lane_itself(self, opened):
        is_on = torch._C._is_multithreading_enabled
        assert not self.finish(opened, COMPUTE, is_on)
        assert self.finish(opened, STORE, is_on)
        assert is_on()

    def test_streams_are_made_once_for_a_process(self, trace):
        for _ in range(20):
            self.open(0, trace).close()
        assert len(self.cuda.cards[0].streams) == len(QUEUES)

    @pytest.mark.parametrize("lane", [LOAD, INPUT, STORE])
    def test_job_that_the_compute_lane_hands_on_begins_once_all_it_queued_is_through(self, opened, lane):
        source, target, seen, done = torch.ones(64), torch.empty(64), [], threading.Event()

        def look():
            seen.append(target.clone())
            done.set()

        def hand_on():
            opened.copy(COMPUTE, [(target, source)])  # stands for kernels, which the stand-in does not put off
            seen.append(target.clone())
            opened.submit(lane, "look", look)

        opened.submit(COMPUTE, "hand on", hand_on)
        assert done.wait(30)
        assert seen[0].isnan().all()
        assert torch.equal(seen[1], source)

    def test_copies_of_other_layouts_and_dtypes_are_waited_for(self, opened):
        narrow, wide = torch.ones(4, 6).bfloat16(), torch.empty(4, 6)
        across = torch.empty(6, 4).t()
        self.finish(
            opened, LOAD, lambda: opened.copy(LOAD, [(wide, narrow), (across, wide), (wide[:, ::2], across[:, ::2])])
        )
        assert torch.equal(across, torch.ones(4, 6))
        assert self.cuda.num_copies == {"waited for": 3}

    def test_large_copies_go_in_pieces(self, opened):
        source, target = torch.randn(2000), torch.empty(2000)
        self.finish(opened, LOAD, lambda: opened.copy(LOAD, [(target, source)]))
        assert torch.equal(target, source)
        assert self.cuda.num_copies == {"put off": 4}  # 8,000 bytes in pieces of 2,048

    @pytest.mark.parametrize("num_bytes", [16, 3 * PAGE_BYTES])
    def test_places_in_dram_have_the_strides_and_the_size(self, opened, num_bytes):
        tensor = torch.empty(num_bytes // 16, 4).t()
        place = opened.place(tensor)
        assert (place.shape, place.stride(), place.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
        assert place.untyped_storage().nbytes() == num_bytes


class TestBudget:
    def test_context_and_a_sixteenth_are_no_budget(self, cuda):
        device = CudaDevice(0, 100 * MIB)
        assert device.memory_bytes == (100 * MIB - cuda.context_bytes) * 15 // 16 // PAGE_BYTES * PAGE_BYTES
        assert repr(device) == "CudaDevice(0, 90 MiB)"

    def test_all_that_is_free_is_taken_where_nothing_is_asked(self):
        cuda = FakeCuda(other_bytes=64 * MIB)
        with cuda.installed():
            device = CudaDevice()
            assert device.allowed_bytes == cuda.cards[0].total_bytes - cuda.context_bytes - 64 * MIB
            device.check_free()

    def test_a_card_that_is_full_is_refused_in_its_own_words(self, monkeypatch):
        cuda = FakeCuda(total_bytes=256 * MIB, other_bytes=151 * MIB)
        with cuda.installed():
            monkeypatch.setattr("hydra_engine.devices.cuda.LEAST_RESERVED_BYTES", 128 * MIB)
            with refused(RuntimeError, says="'cuda:0' 105906176 128"):
                CudaDevice()

    @pytest.mark.parametrize("budget_bytes", [64 * MIB, 2048 * MIB])
    def test_the_budgets_of_the_tests_on_a_gpu_can_be_had_there(self, monkeypatch, budget_bytes):
        cuda = FakeCuda(total_bytes=16 * 1024 * MIB, context_bytes=500 * MIB, library_bytes=20 * MIB)
        with cuda.installed(LEAST_RESERVED_BYTES=2**27, PAGE_BYTES=2**21):
            found = test_gpu.capped(budget_bytes)
        assert found.memory_bytes == budget_bytes
        assert found.allowed_bytes < budget_bytes + 2**27 + budget_bytes // 15

    def test_what_other_processes_have_is_not_taken_for_the_context(self):
        cuda = FakeCuda(total_bytes=4096 * MIB, other_bytes=2048 * MIB)
        with cuda.installed():
            assert CudaDevice(0, 2048 * MIB).allowed_bytes == 1024 * MIB  # a context has 1 GiB at most

    @pytest.mark.parametrize(
        ("index", "memory", "error", "says"),
        [
            (0, "1TiB", ValueError, "memory 'cuda:0' 256"),
            (0, "1MiB", ValueError, "memory 1 4"),
            (2, None, RuntimeError, "'cuda:2' 2"),
            (-1, None, ValueError, "index -1"),
            (True, None, ValueError, "index True"),
        ],
    )
    def test_what_the_card_has_not_is_refused(self, cuda, index, memory, error, says):
        with refused(error, says=says):
            CudaDevice(index, memory)

    @pytest.mark.parametrize("what", ["generate", "train_models", "evaluate", "predict"])
    def test_less_free_than_asked_is_refused_before_any_work(self, cuda, what):
        task, model = exact.task_of("mlp")
        orchestra = orchestra_of([task], devices_of(cuda, 2))
        before = {name: tensor.clone() for name, tensor in exact.zoo.state(model).items()}
        cuda.cards[1].other_bytes = cuda.cards[1].total_bytes - cuda.context_bytes - MIB // 2
        arguments = {"evaluate": ("mlp", task.dataloader), "predict": (model, task.dataloader)}.get(what, ())
        with refused(RuntimeError, says="'cuda:1' MiB 512"):
            getattr(orchestra, what)(*arguments)
        exact.assert_same_state(exact.zoo.state(model), before)
        assert not torch.is_grad_enabled() or not any(p.grad is not None for p in model.parameters())

    def test_less_free_as_training_begins_is_refused(self, cuda):
        task, _ = exact.task_of("mlp")
        orchestra = orchestra_of([task], devices_of(cuda))
        orchestra.generate()
        cuda.cards[0].other_bytes = cuda.cards[0].total_bytes - cuda.context_bytes - MIB // 2
        with refused(RuntimeError, says="'cuda:0' 512"):
            orchestra.train_models()

    @pytest.mark.parametrize(
        ("given", "says"),
        [
            (["cuda:0", "cuda:0"], "'cuda:0' 2"),
            (["cuda", "cuda:0"], "'cuda:0' 2"),
            (["cuda:1", "cuda:0", "cuda:1"], "'cuda:1' 2"),
            (["cuda:0", EmulatedDevice("1MiB")], "devices kind"),
        ],
    )
    def test_a_device_twice_and_two_kinds_are_refused(self, cuda, given, says):
        task, _ = exact.task_of("mlp")
        with refused(ValueError, says=says):
            ModelOrchestrator([task], devices=given)

    def test_every_cuda_device_is_used_where_none_is_named(self, cuda):
        task, _ = exact.task_of("mlp")
        orchestra = ModelOrchestrator([task])
        assert orchestra.devices == {"cuda:0": "in", "cuda:1": "in"}

    @pytest.mark.rest
    def test_a_task_joins_on_a_device_that_the_others_lend(self, cuda):
        joining, joining_model = exact.task_of("dropout")  # made here: in a callback its draws would meet the loader's

        class Adds(Callback):
            def on_step(self, report):
                if report.steps == 1:
                    orchestra.add_task(joining)

        task, model = exact.task_of("mlp", callbacks=[Adds()])
        orchestra = orchestra_of([task], devices_of(cuda))
        report = orchestra.train_models()
        exact.assert_within_budget(report)
        exact.assert_as_expected(report, "mlp", model, exact.expected("mlp"))
        exact.assert_as_expected(report, "dropout", joining_model, exact.expected("dropout"))


class TestOpening:
    @covering(
        settings=["", "expandable_segments:True", "max_split_size_mb:64,expandable_segments:False"],
        told=["call", "snapshot", "environment"],  # by torch 2.13, by 2.11, by neither
    )
    def test_allocator_is_left_as_it_was_found(self, settings, told, monkeypatch):
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", settings if told == "environment" else "")
        cuda = FakeCuda(num_devices=2, settings=settings, settings_told=told)
        with cuda.installed():
            opened = [device.open(0, Trace(), 1, MIB // 2) for device in devices_of(cuda, 2)]
            assert "expandable_segments:True" in cuda.settings
            assert ("max_split_size_mb:64" in cuda.settings) == ("max_split_size_mb:64" in settings)
            for device in opened:  # the first is closed while the other one is at work
                device.close()
        cuda.check_all_left_as_found()

    def test_allocator_may_take_the_arena_and_what_units_work_with_and_no_more(self, cuda):
        [device] = devices_of(cuda)
        opened = device.open(0, Trace(), 1, MIB // 2)
        most = cuda.cards[0].fraction * cuda.cards[0].total_bytes
        opened.close()
        assert most == pytest.approx(device.allowed_bytes)
        assert device.memory_bytes < device.allowed_bytes == asked(cuda, MIB) - cuda.context_bytes

    def test_an_arena_that_does_not_fit_leaves_all_as_it_was(self, cuda):
        [device] = devices_of(cuda)
        with pytest.raises(torch.OutOfMemoryError):
            device.open(0, Trace(), 1, 2 * MIB)

    def test_any_call_that_fails_leaves_all_as_it_was(self, cuda):
        [device] = devices_of(cuda)
        before = cuda.num_checks
        device.open(0, Trace(), 1, MIB // 2).close()
        num_failures = 0
        for at in range(1, cuda.num_checks - before + 1):
            cuda.fail_at = cuda.num_checks + at
            threads = set(threading.enumerate())
            try:
                device.open(0, Trace(), 1, MIB // 2).close()
            except torch.AcceleratorError:
                num_failures += 1
            cuda.fail_at = None
            assert set(threading.enumerate()) == threads
            cuda.torch.cuda.empty_cache()  # which may have been the call that failed
            cuda.torch.cuda.set_per_process_memory_fraction(1.0, 0)
        assert num_failures >= 3


class TestLibraries:
    """What is loaded with the first use of a kernel is no budget."""

    LIBRARY_BYTES = MIB

    def trained(self, model, batches, **options):
        task = ModelTask(model, F.cross_entropy, batches, LR, optimizer=torch.optim.AdamW, **options)
        orchestra_of([task], [CudaDevice(0, 64 * MIB)]).train_models().raise_failures()

    @pytest.mark.parametrize("precision", ["float32", "bfloat16"])
    def test_all_that_models_use_is_loaded_before_memory_is_measured(self, precision):
        cuda = FakeCuda(library_bytes=self.LIBRARY_BYTES)
        with cuda.installed():
            device = CudaDevice(0, 64 * MIB)
            [card] = cuda.cards
            loaded = set(card.libraries)
            assert device.context_bytes == cuda.context_bytes + len(loaded) * self.LIBRARY_BYTES
            assert device.allowed_bytes == 64 * MIB - device.context_bytes
            images = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5))
            self.trained(images, [(torch.randn(4, 3, 8, 8), torch.randint(5, (4,)))], precision=precision)
            block = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)
            words = nn.Sequential(nn.Embedding(11, 16), block, nn.Flatten(), nn.Linear(16 * 6, 5))
            self.trained(words, [(torch.randint(11, (4, 6)), torch.randint(5, (4,)))], precision=precision)
            assert {name for name, _ in loaded} >= {"cuBLAS", "cuDNN", "attention", "cuDNN, backward", "sort"}
            assert card.libraries == loaded, "none of it was loaded while training"
        cuda.check_all_left_as_found()

    def test_a_device_that_is_made_again_has_the_same_budget(self):
        cuda = FakeCuda(library_bytes=self.LIBRARY_BYTES)
        with cuda.installed():
            assert CudaDevice(0, 64 * MIB).memory_bytes == CudaDevice(0, 64 * MIB).memory_bytes

    def test_the_users_generators_and_settings_are_left_alone(self, cuda):
        before, here = torch.get_rng_state(), threading.get_ident()
        threads = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("hydra_engine.devices.cuda.load_libraries", lambda _: threads.append(threading.get_ident()))
            CudaDevice(0)
            CudaDevice(0)
        assert len(threads) == 1  # once for a process
        assert threads[0] != here
        CudaDevice(1)
        assert torch.equal(torch.get_rng_state(), before)  # the stand-in's default generators are checked in the end


class TestHostMemory:
    def test_all_of_it_is_locked_and_no_byte_more_is_taken(self, cuda):
        host = host_memory(devices_of(cuda))
        for num_bytes in (1, PAGE_BYTES - 1, PAGE_BYTES, 5 * PAGE_BYTES + 3, 20 * PAGE_BYTES):
            before = cuda.num_registered_bytes
            storage = host.new(num_bytes)
            assert storage.nbytes() == cuda.num_registered_bytes - before == num_bytes
            assert len(cuda.registered) == -(-num_bytes // (4 * PAGE_BYTES))  # one call takes four pages here
            other = host.new(num_bytes)
            assert len(cuda.registered) == 2 * -(-num_bytes // (4 * PAGE_BYTES))
            del storage, other
            assert cuda.registered == {}

    def test_nothing_takes_nothing(self, cuda):
        assert host_memory(devices_of(cuda)).new(0).nbytes() == 0
        assert cuda.num_registered_bytes == 0

    def test_it_is_locked_for_the_device_that_is_used(self, cuda):
        with FakeCuda(num_devices=2).installed() as only_one:
            host = host_memory([CudaDevice(1, 8 * MIB)])
            storage = host.new(PAGE_BYTES)
            assert [device for _, device in only_one.registered.values()] == [1]
            assert not only_one.cards[0].has_context
            del storage
        only_one.check_all_left_as_found()

    def test_what_is_let_go_is_unlocked_at_once_and_once(self, cuda):
        host = host_memory(devices_of(cuda))
        storage = host.new(PAGE_BYTES)
        host.let_go(storage)
        assert cuda.registered == {}
        host.let_go(storage)
        assert storage.nbytes() == PAGE_BYTES

    def test_a_tensor_keeps_it_locked(self, cuda):
        host = host_memory(devices_of(cuda))
        storage = host.new(PAGE_BYTES)
        tensor = torch.empty(0).set_(storage, 0, (16,), (1,))
        del storage
        assert len(cuda.registered) == 1
        del tensor
        assert cuda.registered == {}

    def test_locked_pages_are_not_given_back(self, cuda):
        host = host_memory(devices_of(cuda))
        storage = host.new(2 * PAGE_BYTES)
        tensor = torch.empty(0).set_(storage, 0, (2 * PAGE_BYTES // 4,), (1,)).fill_(3)
        host.discard(storage, 0, PAGE_BYTES)
        assert tensor.eq(3).all()
        host.let_go(storage)
        host.discard(storage, 0, PAGE_BYTES)
        assert not tensor[: PAGE_BYTES // 4].any()
        assert tensor[PAGE_BYTES // 4 :].eq(3).all()

    def test_what_cannot_be_locked_is_used_all_the_same(self, cuda, capsys):
        cuda.refused_registers = 10**6
        task, model = exact.task_of("gpt")
        report = trained(cuda, [task])
        exact.assert_as_expected(report, "gpt", model, exact.expected("gpt"))
        assert cuda.num_registered_bytes == 0
        names(capsys.readouterr().err, says="page-locked error 2")


class EachStep(Callback):
    """Calls a function after each step."""

    def __init__(self, call):
        self.call = call

    def on_step(self, report):
        self.call()


def is_locked(cuda, tensor):
    return any(start <= tensor.data_ptr() < start + size for start, (size, _) in list(cuda.registered.items()))


class TestPlaces:
    """DRAM for what units leave."""

    @pytest.fixture
    def opened(self, cuda):
        found = devices_of(cuda)[0].open(0, Trace(), 1, MIB // 2)
        yield found
        found.close()

    def test_they_are_cut_from_regions_that_were_locked_before(self, cuda, opened):
        before = cuda.num_registers
        places = [opened.place(torch.empty(num_bytes, dtype=torch.uint8)) for num_bytes in (1, 100, 512, 4000)]
        assert cuda.num_registers == before
        for k, place in enumerate(places):
            place.fill_(k)
        assert [int(place.min()) for place in places] == [int(place.max()) for place in places] == [0, 1, 2, 3]
        assert [place.untyped_storage().nbytes() for place in places] == [1, 100, 512, 4000]
        [region] = cuda.registered
        assert all(region <= place.data_ptr() < region + 8192 for place in places)

    def test_what_is_dropped_is_used_again(self, cuda, opened):
        num_registers = set()
        for size in (3000, 5000, 20_000, 700, 20_000, 3000) * 3:
            opened.place(torch.empty(size, dtype=torch.uint8))
            num_registers.add(cuda.num_registers)
        assert len(num_registers) == 2  # the region that was there, and one for 20,000 bytes

    def test_one_that_outlives_the_device_stays_locked_until_it_is_dropped(self, cuda):
        opened = devices_of(cuda)[0].open(0, Trace(), 1, MIB // 2)
        kept, other = (opened.place(torch.empty(5000, dtype=torch.uint8)) for _ in range(2))
        assert len(cuda.registered) == 2
        opened.close()
        assert len(cuda.registered) == 2
        del other
        [(region, (num_bytes, _))] = cuda.registered.items()
        assert region <= kept.data_ptr() < region + num_bytes
        kept.fill_(3)
        del kept
        assert cuda.registered == {}

    @pytest.mark.rest
    def test_dropping_one_asks_a_lost_device_for_nothing(self, lost_cuda):
        opened = devices_of(lost_cuda)[0].open(0, Trace(), 1, MIB // 2)
        places = [opened.place(torch.empty(5000)) for _ in range(3)]
        lost_cuda.strike()
        num_checks = lost_cuda.num_checks
        del places
        assert lost_cuda.num_checks == num_checks
        opened.close()

    @pytest.mark.rest
    def test_nothing_is_locked_after_the_first_step(self, cuda):
        counts = []
        options = {"epochs": 1, "accumulation_steps": 3, "partition": "each"}
        task, _ = exact.task_of("gpt", callbacks=[EachStep(lambda: counts.append(cuda.num_registers))], **options)
        trained(cuda, [task])
        assert len(counts) > 2
        assert counts[-1] == counts[0]

    def test_masters_beside_casts_are_not_locked(self, cuda):
        model = nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 40))
        model[2].requires_grad_(False)
        options = {"precision": "bfloat16", "name": "task"}
        batches = [(torch.randn(4, 40), torch.randn(4, 40))]
        task = ModelTask(model, F.mse_loss, batches, LR, partitioner=Presharded([2, 3]), **options)
        where = []
        task.callbacks = [EachStep(lambda: where.append([is_locked(cuda, model[k].weight) for k in (0, 2)]))]
        trained(cuda, [task])
        assert where == [[False, False]]

    def test_frozen_weights_are_locked_where_a_task_is_sent_them_as_they_are(self, cuda):
        frozen = nn.Linear(12, 12).requires_grad_(False)
        tasks, where = [], []
        looks = EachStep(lambda: where.append(is_locked(cuda, frozen.weight)))
        for name, precision in (("narrow", "bfloat16"), ("wide", "float32")):
            model = nn.Sequential(nn.Linear(12, 12), frozen, nn.Linear(12, 5))
            batches = [(torch.randn(4, 12), torch.randn(4, 5))]
            options = {"precision": precision, "callbacks": [looks], "partitioner": Presharded([1, 2, 3])}
            tasks.append(ModelTask(model, F.mse_loss, batches, LR, name=name, **options))
        trained(cuda, tasks)
        assert where == [True, True]


# Exactness: the bits of the plain loop, on one card and two


# Of `make test`: tied and frozen weights, and a layer that is not a plain one. Tests below train the others.
KINDS = [("tied", 2), ("frozen", 2), ("lstm", 1)]
ALL = [(name, num_devices) for name in zoo.MODELS for num_devices in (1, 2)]


@pytest.mark.rest
@pytest.mark.parametrize(
    ("name", "num_devices"), [pytest.param(*each, marks=[pytest.mark.rest] * (each not in KINDS)) for each in ALL]
)
def test_every_model_of_the_zoo_gives_the_bits_of_plain_pytorch(cuda, name, num_devices):
    options = {"optimizer": "adamw", "accumulation_steps": 3 if num_devices == 2 else 1, "epochs": 1}
    task, model = exact.task_of(name, partition="each" if num_devices == 2 else "three", **options)
    report = trained(cuda, [task], num_devices=num_devices)
    exact.assert_as_expected(report, name, model, exact.expected(name, **options))
    assert cuda.num_registered_bytes > 0
    assert cuda.num_copies["waited for"] == 0, "every copy is a plain one"


@pytest.mark.rest
@pytest.mark.parametrize("double_buffer", [True, pytest.param(False, marks=pytest.mark.rest)])
def test_several_tasks_on_two_devices(cuda, double_buffer):
    settings = {"gpt": {"optimizer": "adam"}, "cnn": {"optimizer": "momentum"}, "dropout": {"accumulation_steps": 3}}
    settings = {name: {"epochs": 1, **each} for name, each in settings.items()}
    tasks, models = zip(*(exact.task_of(name, **each) for name, each in settings.items()), strict=True)
    report = trained(cuda, tasks, num_devices=2, double_buffer=double_buffer)
    for name, model in zip(settings, models, strict=True):
        exact.assert_as_expected(report, name, model, exact.expected(name, **settings[name]))


@pytest.fixture
def let_go_meanwhile(request, monkeypatch):
    """Has units let go of their slabs just after one was looked for that could be given up."""
    if not request.param:
        return
    at_work, look = [], Residents.evict_slab

    def seen(claims):
        at_work[:] = claims._at_work
        try:
            return make_room(claims)
        finally:
            at_work.clear()

    def late(residents):
        found = look(residents)
        for claim in [] if found else at_work:
            if claim.slabs and all(load.is_whole for load in list(claim.slabs.values())):
                claim.freed.is_kept()
        return found

    make_room = Claims._make_room
    monkeypatch.setattr(Claims, "_make_room", seen)
    monkeypatch.setattr(Residents, "evict_slab", late)


@pytest.mark.rest
@pytest.mark.parametrize(
    ("num_devices", "let_go_meanwhile"),
    [(1, True), *(pytest.param(*each, marks=pytest.mark.rest) for each in ((1, False), (2, False), (2, True)))],
    indirect=["let_go_meanwhile"],
)
def test_slabs_are_given_up_where_the_arena_is_small(cuda, num_devices, let_go_meanwhile):
    def tasks():
        return zip(*(exact.task_of(name, partition="each", epochs=1) for name in ("gpt", "tied")), strict=True)

    given, _ = tasks()
    orchestra = orchestra_of(given, devices_of(cuda))
    plan = orchestra.generate()
    needed = max(max(each.shard_bytes) for each in plan.tasks.values())
    slabs = max(each.largest_slab_bytes for each in orchestra._tasks.all)
    tight = -(-(needed + slabs) // PAGE_BYTES) * PAGE_BYTES
    loaded = {}
    for budget_bytes in (MIB, tight):
        given, models = tasks()
        report = trained(cuda, given, num_devices=num_devices, budget_bytes=budget_bytes)
        for task, model in zip(given, models, strict=True):
            exact.assert_as_expected(report, task.name, model, exact.expected(task.name, epochs=1))
        loaded[budget_bytes] = sum(device.loaded_bytes for device in report.devices)
    assert loaded[tight] > loaded[MIB]


@pytest.mark.rest
def test_kept_graphs(cuda):
    options = {"optimizer": "adam", "accumulation_steps": 3, "epochs": 1}
    task, model = exact.task_of("gpt", **options)
    orchestra = orchestra_of([task], devices_of(cuda, 1, 4 * MIB))
    with everything_kept():
        orchestra.generate()
    with Backwards() as backwards:
        report = orchestra.train_models()
    exact.assert_as_expected(report, "gpt", model, exact.expected("gpt", **options))
    assert backwards.num_from_graphs == backwards.num > 0


class Remembers(nn.Module):
    """Adds what it got before, and holds what it gets: the last holder of an input, until the next one comes."""

    def __init__(self):
        super().__init__()
        self.linear, self.before = nn.Linear(12, 12), None

    def forward(self, x):
        out = self.linear(x)
        if self.before is not None and self.before.shape == x.shape:
            out = out + 0 * self.before
        self.before = x.detach()
        return out


@pytest.mark.parametrize("kept", [True, False])
def test_an_input_is_nobody_elses_while_kernels_may_read_it(cuda, kept):
    """Whoever is the last to hold it, a graph or a layer, in training and in evaluations: the stand-in looks on."""
    torch.manual_seed(2)
    layers = [nn.Linear(12, 12), nn.Tanh(), Remembers(), nn.GELU(), Remembers(), nn.Linear(12, 5)]
    batches = [(torch.randn(8, 12), torch.randn(8, 5)) for _ in range(3)]
    options = {"accumulation_steps": 4, "partitioner": Presharded([1, 2, 3, 4, 6]), "validation": batches}
    task = ModelTask(layers, F.mse_loss, batches, LR, 1, name="task", **options)
    orchestra = orchestra_of([task], devices_of(cuda, 1, 4 * MIB if kept else 24 * PAGE_BYTES))
    with everything_kept() if kept else nullcontext():
        orchestra.generate()
    orchestra.train_models().raise_failures()
    assert not cuda.misuses


@pytest.mark.rest
def test_updates_in_the_middle_of_a_step(cuda):
    task, model = exact.task_of("gpt", optimizer="adam", epochs=1, early_release=True)
    report = trained(cuda, [task])
    exact.assert_as_expected(report, "gpt", model, exact.expected("gpt", optimizer="adam", epochs=1))


@pytest.mark.rest
@pytest.mark.parametrize("name", ["gpt", "cnn"])
def test_bfloat16_with_float32_masters_in_dram(cuda, name):
    settings = {"optimizer": torch.optim.AdamW, "accumulation_steps": 3, "precision": "bfloat16", "max_grad_norm": 0.5}
    plain, loss_fn, loader = zoo.MODELS[name]()
    expected = reference.train(plain, loss_fn, loader, seed=SEED, lr=LR, **settings)
    model, loss_fn, loader = zoo.MODELS[name]()
    cut = Presharded(list(range(1, len(model) + 1)))
    task = ModelTask(model, loss_fn, loader, LR, name=name, seed=SEED, partitioner=cut, **settings)
    report = trained(cuda, [task], num_devices=2)
    assert report.tasks[name].losses == expected.losses
    exact.assert_same_state(zoo.state(model), zoo.state(plain))


def test_a_batch_whose_parts_are_windows_of_one_tensor(cuda):
    # With gaps between their rows, which a copy from a device does not have: no sign that a layer wrote there.
    tokens = torch.randint(zoo.VOCABULARY, (4, 6, zoo.CONTEXT + 1), generator=torch.Generator().manual_seed(2))
    windows = [(each[:, :-1], each[:, 1:]) for each in tokens]
    plain, loss_fn, _ = zoo.MODELS["gpt"]()
    expected = reference.train(plain, loss_fn, windows, seed=SEED, lr=LR)
    model, loss_fn, _ = zoo.MODELS["gpt"]()
    report = trained(cuda, [ModelTask(model, loss_fn, windows, LR, name="gpt", seed=SEED)])
    assert report.tasks["gpt"].losses == expected.losses
    exact.assert_same_state(zoo.state(model), zoo.state(plain))


@pytest.mark.rest
def test_validation_evaluation_and_prediction(cuda):
    plain, loss_fn, loader = zoo.MODELS["cnn"]()
    held_out = DataLoader(loader.dataset, batch_size=7)
    expected = reference.train(plain, loss_fn, loader, seed=SEED, lr=LR, epochs=2, validation=held_out)
    model, loss_fn, loader = zoo.MODELS["cnn"]()
    cut = Presharded([2, 4, 6])
    task = ModelTask(model, loss_fn, loader, LR, 2, name="cnn", seed=SEED, partitioner=cut, validation=held_out)
    orchestra = orchestra_of([task], devices_of(cuda, 2))
    report = orchestra.train_models()
    assert report.tasks["cnn"].losses == expected.losses
    assert report.tasks["cnn"].validation_losses == expected.validation_losses
    assert orchestra.evaluate("cnn", held_out).loss == expected.validation_losses[-1]
    outputs = list(orchestra.predict(model, [inputs for inputs, _ in held_out], partitioner=cut))
    with torch.no_grad():
        plain.eval()
        for (inputs, _), output in zip(held_out, outputs, strict=True):
            assert torch.equal(output, plain(inputs))


class Drawn(nn.Module):
    """Drops values by the generator of the device that runs it, as nn.Dropout does there."""

    def __init__(self, generator):
        super().__init__()
        self.linear, self.generator = nn.Linear(12, 12), generator

    def forward(self, x):
        x = self.linear(x)
        if not self.training:
            return x
        return x * (torch.rand(x.shape, generator=self.generator()) < 0.7)


def drawing_model(generator):
    torch.manual_seed(1)
    layers = [Drawn(generator), nn.Tanh(), Drawn(generator), nn.GELU(), Drawn(generator), nn.Linear(12, 5)]
    return nn.Sequential(*layers)


def drawing_task(cuda, ends, **options):
    def generator():
        is_here = threading.current_thread().name.endswith("-compute")
        return cuda.generator_here() if is_here else torch.Generator()  # the plan's profile, which takes the CPU

    _, loss_fn, loader = zoo.mlp()
    model = drawing_model(generator)
    records = [f"{k}.generator" for k in (0, 2, 4)]  # the stand-in counts its calls
    options |= {"seed": SEED, "partitioner": Presharded(ends), "records": records}
    return ModelTask(model, loss_fn, loader, LR, 1, **options), model


def test_draws_of_a_device_go_on_from_step_to_step_as_in_one_resident_model(cuda):
    task, model = drawing_task(cuda, [2, 4, 6], name="drawn")
    report = trained(cuda, [task])
    own = torch.Generator().manual_seed(SEED)
    _, loss_fn, loader = zoo.mlp()
    plain = drawing_model(lambda: own)
    expected = reference.train(plain, loss_fn, loader, seed=SEED, lr=LR)
    assert report.tasks["drawn"].losses == expected.losses
    exact.assert_same_state(zoo.state(model), zoo.state(plain))


def test_draws_of_a_device_depend_on_the_task_alone(cuda):
    found = []
    for ends, num_devices, company in (([6], 1, False), ([1, 2, 3, 4, 5, 6], 1, True), ([2, 4, 6], 2, True)):
        task, model = drawing_task(cuda, ends, name="drawn", accumulation_steps=3)
        tasks = [task, drawing_task(cuda, [3, 6], name="other")[0]] if company else [task]
        report = trained(cuda, tasks, num_devices=num_devices)
        found.append((report.tasks["drawn"].losses, zoo.state(model)))
    for losses, state in found[1:]:
        assert losses == found[0][0]
        exact.assert_same_state(state, found[0][1])


@pytest.mark.rest
@pytest.mark.parametrize(("dropout", "num_watched"), [(0.0, 0), (0.1, 1)])
def test_operations_of_attention_without_dropout_pass_no_mode(cuda, monkeypatch, dropout, num_watched):
    entered = []

    class Watched(TaskGenerator):
        def __enter__(self):
            entered.append(threading.current_thread().name)
            return super().__enter__()

    monkeypatch.setattr("hydra_engine.worker.drawing.TaskGenerator", Watched)
    torch.manual_seed(0)
    with_dropout = nn.Sequential(zoo.Block(16), nn.Dropout(dropout))
    layers = [nn.Embedding(11, 16), zoo.Block(16), with_dropout, nn.Linear(16, 11)]
    batches = [(torch.randint(11, (4, 6)), torch.randint(11, (24,))) for _ in range(3)]
    task = ModelTask(layers, zoo.next_byte_loss, batches, LR, name="task", partitioner=Presharded([2, 3, 4]))
    orchestra = orchestra_of([task], devices_of(cuda))
    orchestra.generate()
    [planned] = orchestra._tasks.all
    assert len(planned.state.cut.drawing) == num_watched
    entered.clear()
    orchestra.train_models().raise_failures()
    assert bool(entered) == bool(num_watched)


# Out of memory


class Failing(nn.Module):
    """Runs out of memory where a device computes on a batch of a size that it is armed for."""

    def __init__(self, is_armed_for):
        super().__init__()
        self.is_armed_for = is_armed_for

    def forward(self, x):
        if threading.current_thread().name.endswith("-compute") and self.is_armed_for(len(x)):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return x


@pytest.mark.parametrize("place", [pytest.param(1, marks=pytest.mark.rest), 3])
def test_a_step_that_the_allocator_could_not_serve_begins_again_on_a_finer_partition(cuda, place):
    armed = []  # sizes, at each of which it fails once
    model, loss_fn, loader = zoo.mlp()
    model.insert(place, Failing(lambda size: size in armed and armed.pop()))
    plain, _, _ = zoo.mlp()
    expected = reference.train(plain, loss_fn, zoo.mlp()[2], seed=SEED, lr=LR, epochs=2)
    task = ModelTask(model, loss_fn, loader, LR, 2, name="mlp", seed=SEED)
    other, other_model = exact.task_of("gpt")
    orchestra = orchestra_of([task, other], devices_of(cuda))
    before = orchestra.generate().tasks["mlp"].boundaries
    armed.append(3)  # the last batch of the first epoch
    report = orchestra.train_models()
    report.raise_failures()
    [revision] = report.tasks["mlp"].revisions
    assert len(revision.boundaries) > len(before)
    assert (revision.step, revision.accumulation_steps) == (9, 1)
    names(revision.reason, says="cuda:0 memory")
    assert report.tasks["mlp"].losses == expected.losses
    for actual, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(actual, wanted)
    exact.assert_as_expected(report, "gpt", other_model, exact.expected("gpt"))


# A device that is lost


def striking_task(cuda):
    torch.manual_seed(3)
    batches = [(torch.randn(4, 12), torch.randint(5, (4,))) for _ in range(6)]
    batches[STRUCK_STEP][0][0, 0] = Asserts.VALUE
    model = nn.Sequential(Asserts(lambda: cuda.strike()), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 5))
    return ModelTask(
        model, F.cross_entropy, batches, LR, name="struck", partitioner=Presharded([1, 4]), records=["0.strike"]
    ), model


@pytest.fixture
def lost_cuda(cuda, tmp_path, monkeypatch):
    """Two cards that may be lost: nothing is left behind but what a process that ends takes with it."""
    monkeypatch.chdir(tmp_path)
    return cuda


@pytest.mark.parametrize("num_devices", [pytest.param(1, marks=pytest.mark.rest), 2])
def test_a_lost_device_ends_the_process_with_all_commits_saved(lost_cuda, tmp_path, capsys, num_devices):
    struck, struck_model = striking_task(lost_cuda)
    others = {name: exact.task_of(name, optimizer="adam") for name in ("gpt", "dropout")}
    orchestra = orchestra_of([struck, *(task for task, _ in others.values())], devices_of(lost_cuda, num_devices))
    with pytest.raises(SystemExit) as ended:
        orchestra.train_models()
    assert ended.value.code == 75
    assert isinstance(ended.value.__cause__, DeviceLost)
    assert ended.value.__cause__.task == "struck"
    report = orchestra.report
    assert (report.tasks["struck"].status, report.tasks["struck"].steps) == ("failed", STRUCK_STEP)
    assert isinstance(report.tasks["struck"].exception, DeviceLost)

    [directory] = tmp_path.glob("hydra-rescue-*")
    checkpoint = load_newest(directory)
    said = {name: (each["steps"], each["over"]) for name, each in checkpoint.data["tasks"].items()}
    assert said == {
        "struck": (STRUCK_STEP, "lost"),
        **{name: (report.tasks[name].steps, None) for name in others if report.tasks[name].steps},
    }
    for name, (_, model) in others.items():
        found = report.tasks[name]
        assert found.status == "stopped"
        assert found.losses == exact.expected(name, optimizer="adam").losses[: found.steps]
        exact.assert_same_state(zoo.state(model), committed(name, found.steps))
        if found.steps:
            weights = checkpoint.read_tensors(name, "weights")
            assert weights.keys() == model.state_dict().keys()
            assert all(torch.equal(each, weights[key]) for key, each in model.state_dict().items())
    names(capsys.readouterr().err, says=f"{directory} index range")
    assert not any(parameter.isnan().any() for parameter in struck_model.parameters())
    del ended, report
    orchestra.report = None

    # As the next process would: without the struck task, and with the bits of an undisturbed run.
    again = {name: exact.task_of(name, optimizer="adam") for name in others}
    struck, _ = striking_task(lost_cuda)
    tasks = [struck, *(task for task, _ in again.values())]
    report = orchestra_of(tasks, [EmulatedDevice("8MiB")], checkpoint_dir=directory).train_models(resume=True)
    assert (report.tasks["struck"].status, report.tasks["struck"].steps) == ("failed", STRUCK_STEP)
    for name, (_, model) in again.items():
        exact.assert_as_expected(report, name, model, exact.expected(name, optimizer="adam"))


@pytest.mark.rest
@pytest.mark.parametrize("num_devices", [1, 2])
def test_a_step_that_a_lost_device_cut_off_is_not_saved(lost_cuda, tmp_path, num_devices):
    """Some of its weights are updated already, and nobody had asked for checkpoints."""
    names = ("gpt", "dropout")
    others = [exact.task_of(name, optimizer="adam", early_release=True)[0] for name in names]
    orchestra = orchestra_of([striking_task(lost_cuda)[0], *others], devices_of(lost_cuda, num_devices))
    with pytest.raises(SystemExit):
        orchestra.train_models()
    orchestra.report = None
    [directory] = tmp_path.glob("hydra-rescue-*")
    again = {name: exact.task_of(name, optimizer="adam", early_release=True) for name in names}
    tasks = [striking_task(lost_cuda)[0], *(task for task, _ in again.values())]
    resumed = orchestra_of(tasks, [EmulatedDevice(MIB)], checkpoint_dir=directory).train_models(resume=True)
    for name, (_, model) in again.items():
        exact.assert_as_expected(resumed, name, model, exact.expected(name, optimizer="adam"))


def test_a_lost_device_says_so_where_nothing_could_be_saved(lost_cuda, capsys, monkeypatch):
    monkeypatch.setattr("hydra_engine.checkpoints.directory.Disk", FullDisk)
    orchestra = orchestra_of([striking_task(lost_cuda)[0]], devices_of(lost_cuda))
    with pytest.raises(SystemExit):
        orchestra.train_models()
    text = capsys.readouterr().err
    names(text, says="checkpoint nothing saved")
    assert "hydra-engine resume" not in text
    orchestra.report = None


def committed(name, num_steps):
    """Plain PyTorch after so many steps."""
    model, loss_fn, loader = zoo.MODELS[name]()
    factory, lr = exact.OPTIMIZERS["adam"]
    options = {"epochs": exact.EPOCHS, "optimizer": factory, "max_steps": num_steps}
    reference.train(model, loss_fn, loader, seed=exact.SEED, lr=lr, **options)
    return zoo.state(model)


@pytest.mark.rest
@pytest.mark.parametrize(
    "share", [0.8, *(pytest.param(share, marks=pytest.mark.rest) for share in (0.35, 0.5, 0.65, 0.95))]
)
def test_whichever_call_finds_the_device_lost_everything_ends(lost_cuda, share, capsys):
    """Where no unit has begun to train yet, the loss is raised, and else the process ends."""
    tasks = [exact.task_of(name, epochs=1)[0] for name in ("mlp", "gpt")]
    trained(lost_cuda, tasks)
    lost_cuda.strike_at = lost_cuda.num_checks + round(share * lost_cuda.num_checks)
    tasks = [exact.task_of(name, epochs=1)[0] for name in ("mlp", "gpt")]
    with pytest.raises((SystemExit, DeviceLost)) as ended:
        orchestra_of(tasks, devices_of(lost_cuda)).train_models()
    if isinstance(ended.value, SystemExit):
        assert ended.value.code == 75
    assert not lost_cuda.misuses


# What is said of launching


def test_launching_is_timed_and_reported(cuda):
    task, _ = exact.task_of("gpt")
    orchestra = orchestra_of([task], devices_of(cuda, 2))
    plan = orchestra.generate()
    share = plan.tasks["gpt"].launch_share
    assert share > 0
    names(str(plan), task="gpt", says=f"launching {share:.0%}")
    assert ("interpreter" in str(plan)) == (share > 1 / 2)
    report = orchestra.train_models()
    worked = [device for device in report.devices if device.device_s]
    assert worked
    for device in worked:
        assert device.launch_s > 0
        assert 0 < device.device_s <= device.busy_s * 1.01
        names(str(report), says=f"{device.name} launching {device.launch_s / device.device_s:.0%}")


@pytest.mark.rest
def test_a_device_is_freed_with_its_run(cuda):
    task, _ = exact.task_of("mlp")
    orchestra = orchestra_of([task], devices_of(cuda))
    freed = []
    opened = CudaDevice.open

    def watched(device, *args):
        found = opened(device, *args)
        weakref.finalize(found, freed.append, True)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CudaDevice, "open", watched)
        orchestra.train_models()
    assert cuda.cards[0].allocated_bytes == 0


# The judge itself


class TestStandIn:
    """The faults that every other test here relies on it to find."""

    @pytest.fixture
    def judge(self):
        found = FakeCuda(num_devices=2)
        with found.installed():
            yield found

    def test_a_copy_that_nobody_waits_for_is_not_there(self, judge):
        target, source = torch.zeros(4), torch.ones(4)
        target.copy_(source, non_blocking=True)
        assert target.isnan().all()
        judge.torch.cuda.synchronize()
        assert target.eq(1).all()

    def test_memory_is_kept_until_the_copy_is_through(self, judge):
        target = torch.zeros(4)
        target.copy_(torch.ones(4), non_blocking=True)
        with refused(Misuse, says="source freed"):
            judge.torch.cuda.synchronize()

    def test_a_block_is_not_dropped_while_another_stream_has_work_on_it(self, judge):
        """The rule of torch's allocator: it goes back to the stream it came from, which may fill it again at once."""
        cuda, device = judge.torch.cuda, judge.torch.device("cuda", 0)
        first, second = cuda.Stream(0), cuda.Stream(0)

        def filled_by_the_first():
            with cuda.stream(first):
                return memory.place_for(torch.ones(4), device).fill_(1)

        with cuda.stream(second):
            block = filled_by_the_first()
            block.detach()  # touches nothing
            del block
            block = filled_by_the_first()
            block.add_(1)
            event = cuda.Event(blocking=True)
            event.record()
            event.synchronize()
            del block
            assert not judge.misuses
            block = filled_by_the_first()
            block.add_(1)
            del block
        [misuse] = judge.misuses
        names(misuse, says="dropped awaited")
        assert misuse.index("stream 0 of cuda:0") < misuse.index("stream 1 of cuda:0")

    @pytest.mark.parametrize(
        "leave",
        [
            lambda judge: judge.torch.cuda.set_per_process_memory_fraction(0.5, 0),
            lambda judge: judge.torch._C._accelerator_setAllocatorSettings("expandable_segments:True"),
            lambda judge: judge.generators[0].manual_seed(1),
            lambda judge: judge.torch.cuda.cudart().cudaHostRegister(PAGE_BYTES, 10, 1),
            lambda judge: torch.zeros(4).copy_(torch.ones(4), non_blocking=True),
        ],
    )
    def test_what_is_left_is_found(self, judge, leave):
        kept = [judge.torch.UntypedStorage(0, device=judge.torch.device("cuda", 0)), leave(judge)]
        with pytest.raises(AssertionError):
            judge.check_all_left_as_found()
        del kept


# Seeds


class Seeds(Callback):
    """As a user's seed_everything(); the last seed counts."""

    def __init__(self, num_seeds):
        self.num_seeds = num_seeds

    def on_step(self, report):
        for k in reversed(range(self.num_seeds)):
            torch.manual_seed(report.steps + k)


def test_what_a_callback_seeds_reaches_no_lane_and_waits_until_the_devices_are_closed(cuda, monkeypatch):
    monkeypatch.setattr(torch.cuda, "manual_seed_all", cuda.torch.cuda.manual_seed_all)
    functions = [torch.cuda.manual_seed_all, torch.cuda.manual_seed, torch.cuda.set_rng_state]
    results = []
    for callbacks in ([Seeds(1)], [Seeds(100)]):
        task, model = exact.task_of("dropout", epochs=1, partition="three", callbacks=callbacks)
        report = exact.silent([task], devices=devices_of(cuda)).train_models()
        report.raise_failures()
        results.append((report.tasks["dropout"].losses, zoo.state(model)))
    assert results[0][0] == results[1][0]
    exact.assert_same_state(results[0][1], results[1][1])
    assert functions == [torch.cuda.manual_seed_all, torch.cuda.manual_seed, torch.cuda.set_rng_state]
    seed = len(results[0][0])
    assert all(generator.initial_seed() == seed for generator in cuda.generators)
    cuda._states_before = [generator.get_state() for generator in cuda.generators]
