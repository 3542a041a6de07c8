"""What stays on a device never changes a bit, whoever else holds it: cases that a reviewer found."""

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hydra_engine import EmulatedDevice, ModelOrchestrator, ModelTask
from hydra_engine.planning.cuts import Kept
from hydra_engine.system import HostMemory
from hydra_engine.worker.kept_graphs import settle_graphs
from hydra_engine.worker.spiller import Spiller
from hydra_engine.worker.worker import Worker
from partitioners import Presharded
from tests import exact, reference, zoo
from tests.covering import covering
from tests.refused import names

WIDTH = 32


def batches(num=4, size=32, width=WIDTH):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, width, generator=generator), torch.randint(5, (size,), generator=generator))
        for _ in range(num)
    ]


def task_of(model, **options):
    options = {"seed": 0, "partitioner": Presharded(list(range(1, len(model) + 1)))} | options
    return ModelTask(model, F.cross_entropy, batches(), 0.1, **options)


def orchestra_of(tasks, memory="16MiB", **options):
    orchestra = ModelOrchestrator(tasks, devices=[EmulatedDevice(memory, **options)])
    orchestra.verbose = 0
    return orchestra


def trained(tasks, memory="16MiB", keeps_from=None):
    """The report, and the states of the tasks; `keeps_from`: whatever is predicted."""
    orchestra = orchestra_of(tasks, memory)
    kept = nullcontext()
    if keeps_from is not None:
        kept = mock.patch("hydra_engine.planning.planner.choose_kept", return_value=Kept(keeps_from, 1.0))
    with kept:
        report = orchestra.train_models()
    return report, [planned.state for planned in orchestra._tasks.all]


def assert_as_plain(build, memory="16MiB", keeps_from=None, **options):
    model, same = build(), build()
    report, [state] = trained([task_of(model, **options)], memory, keeps_from)
    options.pop("partitioner", None)
    expected = reference.train(same, F.cross_entropy, batches(), seed=0, lr=0.1, **options)
    assert report.tasks["task-0"].losses == expected.losses
    exact.assert_same_state(zoo.state(model), zoo.state(same))
    return state


def around(*layers):
    """A function that makes a model of these between two linear ones, always with the same weights."""

    def build():
        torch.manual_seed(0)
        return nn.Sequential(linear(), *(layer() for layer in layers), nn.Linear(WIDTH, 5))

    return build


def linear():
    return nn.Linear(WIDTH, WIDTH)


class Layer(nn.Module):
    """A linear layer, to be made something of."""

    def __init__(self):
        super().__init__()
        self.linear = linear()


# -- frozen parameters


class Uses(nn.Module):
    """Layers that others may hold, too, and one of its own."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.own = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.own(x)


def frozen_pair():
    return [nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False) for _ in range(2)]


@pytest.mark.parametrize("memory", ["64KiB", "16MiB"])
def test_shards_with_the_same_frozen_parameters_at_other_places_are_not_one(memory):
    def build():
        torch.manual_seed(0)
        a, b = frozen_pair()
        return nn.Sequential(Uses(a), Uses(a, b), Uses(a, b), nn.Linear(WIDTH, 5))

    assert_as_plain(build, memory)


def test_nor_are_those_of_two_tasks():
    def build(base):
        torch.manual_seed(2)
        a, b = base
        return [
            nn.Sequential(Uses(a), Uses(b, a), nn.Linear(WIDTH, 5)),
            nn.Sequential(Uses(a, b), nn.Linear(WIDTH, 5)),
        ]

    torch.manual_seed(0)
    base = frozen_pair()
    models, same = build(base), build(base)
    trained([task_of(model, name=name) for name, model in zip("ab", models, strict=True)])
    for model, plain in zip(models, same, strict=True):
        reference.train(plain, F.cross_entropy, batches(), seed=0, lr=0.1)
        assert all(map(torch.equal, model.parameters(), plain.parameters()))


class WritesLate(nn.Module):
    """Writes to its frozen weight on batches with large numbers."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        if x.sum() > 1e4:
            with torch.no_grad():
                self.weight.mul_(0.5)
        return x @ self.weight


@pytest.mark.parametrize("ends", [[1, 2], [2]], ids=["two shards", "one, waited for by the next unit"])
def test_frozen_weights_that_a_failed_unit_wrote_to_are_loaded_anew(ends):
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(3)), requires_grad=False)

    def build():
        torch.manual_seed(4)
        return nn.Sequential(WritesLate(weight), nn.Linear(WIDTH, 5))

    loud = batches()
    loud[2][0].add_(20)
    model, same = build(), build()
    bad = ModelTask(build(), F.cross_entropy, loud, 0.1, seed=0, name="bad", partitioner=Presharded(ends))
    report, _ = trained([bad, task_of(model, name="good", partitioner=Presharded(ends))])
    names(report.tasks["bad"].error, task="bad", says="'0.weight'")
    expected = reference.train(same, F.cross_entropy, batches(), seed=0, lr=0.1)
    assert report.tasks["good"].losses == expected.losses
    exact.assert_same_state(zoo.state(model), zoo.state(same))


def test_frozen_weights_that_their_user_replaced_are_no_longer_shared():
    base, other = nn.Linear(WIDTH, WIDTH).requires_grad_(False), nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    for mine, theirs in zip(other.parameters(), base.parameters(), strict=True):
        mine.data = theirs.data
    models = [nn.Sequential(layer, nn.Linear(WIDTH, 5)) for layer in (base, other)]
    orchestra = orchestra_of([task_of(model) for model in models])
    new, old = torch.randn(WIDTH, WIDTH), base.weight.data.clone()
    other.weight.data = new.clone()
    orchestra.train_models()
    assert torch.equal(other.weight, new)
    assert torch.equal(base.weight, old)


def test_a_plan_counts_a_base_once_for_each_precision_of_it():
    base = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))).requires_grad_(False)
    num = sum(parameter.numel() for parameter in base.parameters())
    precisions = ["float32", "bfloat16", "bfloat16"]
    tasks = [task_of([*base, nn.Linear(WIDTH, 5)], name=p + str(k), precision=p) for k, p in enumerate(precisions)]
    orchestra = orchestra_of(tasks)
    plans = orchestra.generate().tasks.values()
    own = list(plans)[-1].dram["weights"]
    assert [plan.dram["weights"] for plan in plans] == [own + 4 * num, own, own]
    casts = [plan.dram["casts"] for plan in plans]
    assert casts[0] == 0
    assert casts[1] == casts[2] + 2 * num
    orchestra.train_models()
    # Those are over: whoever comes now brings the base again.
    orchestra.add_task(task_of([*base, nn.Linear(WIDTH, 5)], name="late"))
    assert orchestra.generate().tasks["late"].dram["weights"] == own + 4 * num


def test_a_task_without_room_leaves_nothing_behind():
    base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    tasks = [task_of(nn.Sequential(base, nn.Linear(WIDTH, 5)), name=name) for name in "ab"]
    orchestra = orchestra_of(tasks)
    orchestra.generate()
    calls = []

    new = HostMemory.new

    def fails_once(memory, num_bytes, **options):
        calls.append(num_bytes)
        if len(calls) == 1:
            raise MemoryError("no DRAM")
        return new(memory, num_bytes, **options)

    with mock.patch.object(HostMemory, "new", fails_once):
        report = orchestra.train_models()
    assert [task.status for task in report.tasks.values()] == ["failed", "finished"]
    assert not orchestra._tasks._shared.frozen._blocks
    assert base.weight.untyped_storage().nbytes() == base.weight.nbytes


# -- boundaries


class Gate(Layer):
    """Passes its input on, and of its input saves a mask only."""

    def forward(self, x):
        gate = (x > 0).float()
        return x, self.linear(gate) * gate + x * gate


class Negated(Layer):
    """Works in place on what it gets."""

    def forward(self, pair):
        x, y = pair
        x.mul_(-1.0)
        return self.linear(x + y)


@covering(strength=1, memory=["48KiB", "56KiB", "64KiB", "80KiB", "128KiB", "16MiB"], keeps_from=[None, 0, 4])
def test_an_input_that_is_passed_on_is_kept_apart(memory, keeps_from):
    assert_as_plain(around(Gate, Negated), memory, keeps_from)


@pytest.mark.rest
def test_bits_do_not_depend_on_what_is_kept_even_where_plain_pytorch_refuses():
    def losses(keeps_from, memory):
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.ReLU(inplace=True), nn.Linear(WIDTH, 5))
        report, _ = trained([task_of(layers)], memory, keeps_from)
        return report.tasks["task-0"].losses

    assert losses(0, "16MiB") == losses(4, "16MiB") == losses(0, "64KiB")


# -- graphs


class ByBuffer(torch.autograd.Function):
    """Its backward looks at a buffer of a module."""

    @staticmethod
    def forward(ctx, x, module):
        ctx.module = module
        return x * module.num_calls

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.module.num_calls, None


class Counting(Layer):
    """A forward that changes a buffer which its backward needs."""

    def __init__(self):
        super().__init__()
        self.register_buffer("num_calls", torch.ones(()))

    def forward(self, x):
        with torch.no_grad():
            self.num_calls.add_(1)
        return ByBuffer.apply(torch.tanh(self.linear(x)), self)


@pytest.mark.parametrize("accumulation_steps", [1, 2])
@pytest.mark.parametrize("keeps_from", [0, 4])
def test_a_backward_sees_the_buffers_that_its_forward_left(keeps_from, accumulation_steps):
    assert_as_plain(around(Counting, linear), keeps_from=keeps_from, accumulation_steps=accumulation_steps)


class Hoarding(Layer):
    """Keeps tensors for its backward where no hook sees them."""

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.x = x.clone()
            return x * x

        @staticmethod
        def backward(ctx, gradient):
            return 2 * ctx.x * gradient

    def forward(self, x):
        return self.linear(self.Square.apply(x))


class Sparse(Layer):
    """Saves a sparse tensor."""

    def forward(self, x):
        return torch.sparse.mm(torch.eye(len(x)).to_sparse(), self.linear(x))


@pytest.mark.parametrize("layer", [Hoarding, Sparse])
def test_a_graph_that_holds_more_than_can_be_counted_is_not_kept(layer):
    state = assert_as_plain(around(layer, linear))
    assert state.measured.uncounted == {1}
    assert state.cut.keep_saved == set()
    assert not state.may_keep_graph(state.cut.shards[1])


class Eager(Layer):
    """Saves 40 times as much when the data say so."""

    def forward(self, x):
        y = self.linear(x)
        for _ in range(40 if x.mean() > 0.5 else 0):
            y = torch.tanh(y)
        return y


def test_a_forward_that_saves_more_than_at_the_sample_keeps_no_more_than_was_counted():
    torch.manual_seed(0)
    model = nn.Sequential(*(Eager() for _ in range(4)), nn.Linear(WIDTH, 5))
    (low, target), *_ = batches()
    task = ModelTask(
        model, F.cross_entropy, [(low, target), (low + 1, target)], 0.1, partitioner=Presharded([1, 2, 3, 4, 5])
    )
    kept = []

    def settled(run, residents):
        saved = run.graphs.saved
        if saved is not None and saved.graphs is not None:
            kept.append((saved.num_bytes, run.graphs.granted_bytes))
        settle_graphs(run, residents)

    with mock.patch("hydra_engine.worker.runner.settle_graphs", settled):
        trained([task], keeps_from=0)
    assert kept
    assert all(num_bytes <= granted for num_bytes, granted in kept)


# -- errors


def test_a_load_that_is_under_way_when_its_unit_fails_leaves_nothing_in_the_arena():
    width = 256
    options = {"partitioner": Presharded([1, 2, 3, 4])}
    tasks = []
    for name in "ab":
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
        tasks.append(ModelTask(model, F.cross_entropy, batches(3, 8, width), 0.1, name=name, seed=0, **options))
    orchestra = orchestra_of(tasks, "1200KiB", bandwidth="16MiB")
    orchestra.generate()
    store, close, left = Spiller.store_buffers, Worker.close, []

    def failing(spiller, state, unit, shard, out):
        if (unit.task, unit.kind, unit.shard, unit.step) == ("a", "f", 0, 1):
            raise RuntimeError("injected")
        store(spiller, state, unit, shard, out)

    def closing(worker):
        worker.settle()
        worker._residents.forget()
        left.append((worker.device.ledger.used_bytes, worker.device.arena._taken, worker.device.arena._elsewhere_bytes))
        close(worker)

    with mock.patch.object(Spiller, "store_buffers", failing), mock.patch.object(Worker, "close", closing):
        report = orchestra.train_models()
    assert [report.tasks[name].status for name in "ab"] == ["failed", "finished"]
    assert left == [(0, [], 0)]


# -- what is counted


@pytest.mark.rest
def test_outputs_on_their_way_down_are_counted_once_where_every_unit_is_metered():
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)), nn.Linear(WIDTH, 5))
    task = task_of(model, accumulation_steps=4)
    # So slow a link that an output is always on its way as the next micro-batch is computed.
    orchestra = orchestra_of([task], "4MiB", bandwidth="1MiB", meter_every_unit=True)
    orchestra.generate()
    [planned] = orchestra._tasks.all
    known = dict(planned.state.measured.known.items())
    orchestra.train_models()
    after = dict(planned.state.measured.known.items())
    assert {unit: after[unit] for unit in known} == known


# -- layers that work in place on what they get


class AddsInput(nn.Module):
    """As ResNet's: adds its input to what it made, and cuts that off, all in place."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        out = self.norm(self.linear(x))
        out += x
        return F.relu_(out)


def works_in_place():
    torch.manual_seed(0)
    blocks = [AddsInput(), nn.Linear(WIDTH, WIDTH), nn.Hardswish(inplace=True), AddsInput()]
    convolution = [nn.Unflatten(1, (2, 4, 4)), nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4, momentum=3e-4)]
    middle = [nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(16, WIDTH), nn.SiLU(inplace=True)]
    end = [nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2, inplace=True), nn.Linear(WIDTH, 5)]
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *blocks, *convolution, *middle, *end)


IN_THE_NET = (2, 4, 5, 9)  # within a block, before and after an activation, and among the convolution's


@pytest.mark.parametrize(
    "cut",
    [pytest.param(k, marks=() if k in IN_THE_NET else pytest.mark.rest) for k in range(1, len(works_in_place()))],
)
def test_layers_that_work_in_place_at_every_cut(cut):
    """Graphs that are kept hold what the layers above change: nobody but autograd's own checks would tell."""
    shards = Presharded([cut, len(works_in_place())])
    assert_as_plain(works_in_place, keeps_from=0, partitioner=shards, accumulation_steps=2)


# -- buffers that a backward writes to


def gather(module, _, leaving):
    module.scale.add_(leaving[0].abs().sum(0))


class NormInCheckpoint(nn.Module):
    """Runs its BatchNorm once more in the backward, and goes by a scale that a hook gathers there."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))
        self.register_full_backward_hook(gather)

    def forward(self, x):
        return checkpoint(self.norm, self.linear(x) / self.scale.clone(), use_reentrant=False)


@pytest.mark.parametrize("keeps_from", [0, 1, 4])
def test_buffers_that_a_backward_writes_to_are_those_of_plain_pytorch(keeps_from):
    assert_as_plain(around(NormInCheckpoint, NormInCheckpoint), keeps_from=keeps_from)


# -- what only later batches show


class ScalesByLongest(nn.Module):
    longest = 4

    def forward(self, x):
        self.longest = max(self.longest, len(x))
        return x * (4 / self.longest)


NAMED = r"'longest' of 0 .* changed in a forward as on no batch that was tried"


def test_evaluations_name_attributes_that_change_only_later():
    loader = [(torch.ones(size, 8), torch.zeros(size, dtype=torch.int64)) for size in (4, 30, 4)]
    model = nn.Sequential(ScalesByLongest(), nn.Linear(8, 3))
    task = ModelTask(model, F.cross_entropy, loader, 0.1, name="task")
    with pytest.warns(UserWarning, match=NAMED):
        orchestra_of([task]).evaluate(task, loader)


def test_predictions_name_attributes_that_change_only_later():
    model = nn.Sequential(ScalesByLongest(), nn.Linear(8, 3))
    with pytest.warns(UserWarning, match=NAMED):
        outputs = list(
            orchestra_of([task_of(nn.Sequential(nn.Linear(WIDTH, 5)))]).predict(
                model, [torch.ones(size, 8) for size in (4, 30, 4)]
            )
        )
    assert [len(output) for output in outputs] == [4, 30, 4]
