"""Units on tensors that are on the device: any partition's chain gives autograd's bits, and can be run again."""

import gc
import random
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hydra_engine import Model
from hydra_engine.data.memory import copy_of
from hydra_engine.data.streams import Stream, capture, install, installed
from hydra_engine.host.layout import ModelLayout, Structure
from hydra_engine.schedule.units import BACKWARD, EVALUATE, FORWARD, FUSED, evaluation_chain, training_chain
from hydra_engine.worker.executor import Executor, UnitSpec
from hydra_engine.worker.unit import MicroInput
from partitioners import MemoryMeter
from partitioners.boundary import Boundary
from tests import exact, zoo
from tests.covering import covering
from tests.refused import refused

CPU = torch.device("cpu")


class Bench:
    """Runs the units of one step by hand, and keeps what the engine keeps in DRAM: copies, by shard and micro-batch."""

    def __init__(self, model, loss_fn, ends, batches, *, locked=False, times=1):
        self.layout = ModelLayout(Model(model), loss_fn)
        self.structure = Structure(self.layout, CPU)
        self.executor = Executor(self.structure, loss_fn, self.layout.num_layers)
        self.shards = self.layout.shards(ends)
        self.locked, self.times = locked, times
        self.weights = [None] * len(batches) if len(batches) == 1 else [1 / len(batches)] * len(batches)
        self.targets = [Boundary.of(y, "a target") for _, y in batches]
        self.entering = {(0, m): Boundary.of(x, "a batch") for m, (x, _) in enumerate(batches)}
        self.random = {(0, m): capture() for m in range(len(batches))}
        self.incoming = {}  # (shard, m): gradients of what enters it
        self.tied = {}  # (slot, shard, m)
        self.buffers = dict(enumerate(map(copy_of, self.layout.buffers)))
        self.before = {}  # by shard: its buffers before its forward
        self.gradients = {}  # by slot
        self.losses = {}

    @property
    def num_micro_batches(self):
        return len(self.targets)

    def views(self, shard):
        return {index: copy_of(self.layout.slots[index].parameter.detach()) for index in shard.slots}

    def micro_input(self, kind, shard, m):
        j = shard.index
        micro = MicroInput(value=copies(self.entering[j, m]), random=self.random[j, m])
        if j == len(self.shards) - 1:
            micro.target = copies(self.targets[m])
            micro.weight = self.weights[m] if kind != EVALUATE else None
        elif kind == BACKWARD:
            micro.gradients = [g if g is None else copy_of(g) for g in self.incoming[j + 1, m]]
        if kind in (FUSED, BACKWARD):
            for slot, above in shard.upper.items():
                if self.tied.get((slot, above, m)) is not None:
                    micro.tied[slot] = copy_of(self.tied[slot, above, m])
        return micro

    def unit(self, kind, j):
        """Run a unit, as often as asked: each time must leave the same."""
        shard = self.shards[j]
        self.before.setdefault(j, {index: copy_of(self.buffers[index]) for index in shard.buffers})
        for _ in range(self.times):
            buffers = {index: copy_of(buffer) for index, buffer in self.before[j].items()}
            spec = UnitSpec(kind, shard, range(self.num_micro_batches), locked=self.locked)
            with self.executor.run(spec, self.views(shard), buffers) as running:
                emitted = {m: running.micro(m, self.micro_input(kind, shard, m)) for m in spec.micro_batches}
                out = running.end()
            self.store(kind, shard, emitted, out)
        return emitted, out

    def store(self, kind, shard, emitted, out):
        j = shard.index
        for m, each in emitted.items():
            if each.value is not None:
                self.entering[j + 1, m] = copies(each.value)
            if kind != BACKWARD:
                self.random[j + 1, m] = each.random
            if each.gradients is not None:
                self.incoming[j, m] = each.gradients
            self.tied.update({(slot, j, m): gradient for slot, gradient in each.tied.items()})
            if each.loss is not None:
                self.losses[m] = each.loss
        self.gradients.update(out.gradients)
        self.buffers.update({index: copy_of(buffer) for index, buffer in out.buffers.items()})

    def run(self, *, training=True):
        slots = self.layout.slots
        lowest = min(s.index for s in self.shards if any(slots[index].trainable for index in s.slots))
        for kind, j in training_chain(len(self.shards), lowest) if training else evaluation_chain(len(self.shards)):
            self.unit(kind, j)
        return self


def copies(boundary):
    return boundary.around([copy_of(tensor) for tensor in boundary.tensors])


def plain(model, loss_fn, batches):
    """The plain loop's step without its update; each micro-batch draws from where the process stands."""
    outside = capture()
    losses = {}
    for m, (x, y) in enumerate(batches):
        install(outside)
        loss = loss_fn(model(x), y)
        loss = loss if len(batches) == 1 else loss * (1 / len(batches))
        loss.backward()
        losses[m] = loss.item()
    after = capture()
    install(outside)
    return losses, after


def case(name, num_micro_batches):
    """A fresh model of the zoo with its loss, and a batch for each micro-batch."""
    model, loss_fn, loader = zoo.MODELS[name]()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        batches = [batch for batch, _ in zip(loader, range(num_micro_batches), strict=False)]
    return model, loss_fn, [tuple(batch) for batch in batches]


def assert_chain_as_plain(build, loss_fn, batches, ends, **options):
    """Run the units of two models that are built alike, of one as a whole."""
    model = build()
    losses, after = plain(model, loss_fn, batches)
    assert_as_plain(Bench(build(), loss_fn, ends, batches, **options).run(), model, losses, after)


def assert_as_plain(bench, model, losses, after):
    assert bench.losses == losses
    for slot, parameter in zip(bench.layout.slots, model.parameters(), strict=True):
        gradient = bench.gradients.get(slot.index)
        assert (gradient is None) == (parameter.grad is None), slot.name
        assert gradient is None or torch.equal(gradient, parameter.grad), slot.name
    for index, buffer in enumerate(model.buffers()):
        assert torch.equal(bench.buffers[index], buffer)
    last = bench.num_micro_batches - 1
    assert bench.random[len(bench.shards), last].same_as(after)


@pytest.fixture(autouse=True)
def _seeded():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        yield


@covering(name=list(zoo.MODELS), num_micro_batches=[1, 3], partition=["one", "three", "each"])
def test_chain_of_any_partition_gives_autograds_bits(name, num_micro_batches, partition):
    model, loss_fn, batches = case(name, num_micro_batches)
    ends = exact.ends(partition, len(model))
    assert_chain_as_plain(lambda: case(name, num_micro_batches)[0], loss_fn, batches, ends)


@covering(strength=1, name=["dropout", "cnn", "tied", "branch"], locked=[False, True])
def test_units_that_are_run_again_leave_the_same(name, locked):
    model, loss_fn, batches = case(name, 2)
    ends = exact.ends("three", len(model))
    assert_chain_as_plain(lambda: case(name, 2)[0], loss_fn, batches, ends, locked=locked, times=3)


class DrawsElsewhere(nn.Module):
    """Draws from `random`, which no mode redirects."""

    def forward(self, x):
        return x * random.random() + torch.rand(1)


def test_locked_unit_draws_from_the_tasks_own_states():
    def build():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            return nn.Sequential(nn.Linear(2, 2), DrawsElsewhere(), nn.Linear(2, 2))

    batches = [(torch.rand(3, 2), torch.zeros(3).long())]
    stream, before = Stream(capture()), capture()
    model = build()
    with installed(stream):
        losses, after = plain(model, F.cross_entropy, batches)
    bench = Bench(build(), F.cross_entropy, [1, 2, 3], batches, locked=True).run()
    assert_as_plain(bench, model, losses, after)
    assert capture().same_as(before), "the process-wide generators are as they were"


def test_evaluation_is_that_of_eval_mode_without_gradients_and_restores_each_modules_own_flag():
    model, loss_fn, batches = case("cnn", 1)
    expected = loss_fn(model.eval()(batches[0][0]), batches[0][1]).item()
    model, loss_fn, _ = case("cnn", 1)
    model[1].eval()
    bench = Bench(model, loss_fn, [2, 4, 6], batches).run(training=False)
    assert bench.losses == {0: expected}
    assert bench.gradients == {}
    assert all(torch.equal(bench.buffers[k], buffer) for k, buffer in enumerate(model.buffers()))
    assert not any(tensor.requires_grad for boundary in bench.entering.values() for tensor in boundary.tensors)
    flags = [module.training for layer in bench.structure.layers for module in layer.modules()]
    assert flags == [module.training for layer in model for module in layer.modules()]


class Fails(nn.Module):
    def forward(self, x):
        raise ValueError("boom")


@pytest.mark.parametrize("kind", [FORWARD, EVALUATE])
def test_unit_that_raises_lets_go_of_everything_and_names_its_layer(kind):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), Fails(), nn.Linear(2, 2))
    bench = Bench(model, F.cross_entropy, [3, 4], [(torch.rand(4, 2), torch.zeros(4).long())])
    with pytest.raises(ValueError, match="boom"):
        bench.unit(kind, 0)
    assert bench.executor.current == "2"
    layers = nn.ModuleList(bench.structure.layers)
    assert all(tensor.numel() == 0 for tensor in [*layers.parameters(), *layers.buffers()])
    assert all(module.training for module in layers.modules())
    assert torch.is_grad_enabled()


def test_units_let_go_of_everything_and_their_outputs_carry_no_graph():
    model, loss_fn, batches = case("cnn", 1)
    bench = Bench(model, loss_fn, [2, 4, 6], batches).run()
    layers = nn.ModuleList(bench.structure.layers)
    assert all(tensor.numel() == 0 for tensor in [*layers.parameters(), *layers.buffers()])
    assert all(parameter.grad is None for parameter in layers.parameters())
    tensors = [*bench.entering[1, 0].tensors, *bench.incoming[1, 0], *bench.gradients.values()]
    assert all(not tensor.requires_grad and tensor.grad_fn is None for tensor in tensors)
    assert bench.entering[1, 0].requires_grad == (True,), "it is known all the same that a gradient is to come"
    assert (0, 0) not in bench.incoming, "the lowest shard sends no gradient of the inputs"
    assert [gradient is not None for gradient in bench.incoming[1, 0]] == [True]


@pytest.mark.rest
def test_forward_unit_keeps_nothing_for_a_backward():
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(16, 16), nn.Tanh())), nn.Linear(16, 2))
    bench = Bench(model, F.cross_entropy, [12, 13], [(torch.rand(64, 16), torch.zeros(64).long())])
    shard, output_bytes = bench.shards[0], 64 * 16 * 4
    views, micro = bench.views(shard), bench.micro_input(FORWARD, shard, 0)
    gc.collect()
    with MemoryMeter() as meter, bench.executor.run(UnitSpec(FORWARD, shard), views, {}) as running:
        running.micro(0, micro)
        running.end()
    assert meter.peak_bytes < 4 * output_bytes, "12 outputs are saved by a forward that is to be differentiated"


class Emits(nn.Module):
    """Returns its own weight and buffer beside its input."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(3, 2))
        self.register_buffer("offset", torch.rand(3, 2))

    def forward(self, x):
        return x, self.weight, self.weight.t(), self.offset


class Adds(nn.Module):
    def forward(self, values):
        x, weight, transposed, offset = values
        return x * weight + transposed.t() * offset


@pytest.mark.parametrize("kind", [FORWARD, EVALUATE])
def test_outputs_share_no_memory_with_the_slab_or_the_buffers(kind):
    bench = Bench(nn.Sequential(Emits(), Adds()), F.mse_loss, [1, 2], [(torch.rand(3, 2), torch.rand(3, 2))])
    shard = bench.shards[0]
    views, buffers = bench.views(shard), {0: copy_of(bench.buffers[0])}
    bound = {tensor.untyped_storage().data_ptr() for tensor in (*views.values(), *buffers.values())}
    with bench.executor.run(UnitSpec(kind, shard), views, buffers) as running:
        out = running.micro(0, bench.micro_input(kind, shard, 0))
        running.end()
    for tensor in out.value.tensors:
        assert tensor.untyped_storage().data_ptr() not in bound


def test_weight_that_crosses_a_boundary_gets_its_gradient():
    model = nn.Sequential(Emits(), Adds())
    assert_chain_as_plain(lambda: model, F.mse_loss, [(torch.rand(3, 2), torch.rand(3, 2))], [1, 2])


def test_integers_and_unused_tensors_receive_no_gradient():
    class Splits(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x):
            out = self.linear(x)
            return {"used": out, "unused": out * 2, "index": torch.arange(3), "plain": x}

    class Takes(nn.Module):
        def forward(self, values):
            return values["used"][values["index"]]

    bench = Bench(
        nn.Sequential(Splits(), Takes()), F.cross_entropy, [1, 2], [(torch.rand(3, 2), torch.zeros(3).long())]
    ).run()
    assert bench.entering[1, 0].requires_grad == (True, True, False, False)
    assert [gradient is not None for gradient in bench.incoming[1, 0]] == [True, False, False, False]


def test_in_place_layer_at_the_start_of_a_shard_gives_autograds_bits():
    def build():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            return nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True), nn.Linear(2, 2))

    batches = [(torch.randn(5, 2), torch.zeros(5).long())]
    assert_chain_as_plain(build, F.cross_entropy, batches, [1, 2, 3])


@pytest.mark.parametrize("loss_fn", [lambda y, t: y, lambda y, t: 1.5, lambda y, t: None])
def test_loss_that_is_not_one_number_is_refused(loss_fn):
    bench = Bench(nn.Sequential(nn.Linear(2, 2)), loss_fn, [1], [(torch.rand(3, 2), torch.zeros(3))])
    with refused(says="scalar"):
        bench.unit(FUSED, 0)
    assert bench.executor.current == "loss_fn"


class Leaves(nn.Linear):
    """Leaves the modes of the thread and of the process other than it found them."""

    def forward(self, x):
        x = super().forward(x)
        torch.set_grad_enabled(not torch.is_grad_enabled())
        torch.set_autocast_enabled("cpu", True)
        torch.set_autocast_enabled("cuda", True)
        torch.set_num_threads(torch.get_num_threads() + 1)
        torch.set_flush_denormal(True)
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True, warn_only=True)
        return x


def modes():
    of_process = torch.get_default_dtype(), torch.get_deterministic_debug_mode()
    of_thread = torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda"), torch.get_num_threads()
    return of_process, (torch.is_grad_enabled(), *of_thread, sys.float_info.min / 2 == 0.0)


@pytest.mark.parametrize("kind", [FORWARD, EVALUATE])
def test_modes_that_a_layer_leaves_changed_end_with_its_unit(kind):
    """Those of the process with the last unit that runs: another one's layer may have set them for an operation."""
    bench = Bench(nn.Sequential(Leaves(2, 2), nn.Linear(2, 2)), F.mse_loss, [1, 2], [(torch.ones(1, 2),) * 2])
    before, shard = modes(), bench.shards[1]
    bench.unit(kind, 0)
    assert modes() == before
    with bench.executor.run(UnitSpec(kind, shard), bench.views(shard), {}):
        bench.unit(kind, 0)
        assert modes()[0] == (torch.float64, 1)
    assert modes() == before
