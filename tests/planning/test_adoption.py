"""A task of the structure of one that was planned takes over its plan; one that differs in anything is rehearsed."""

import argparse
import gc
import hashlib
import operator
import os
import pickle
import sys
import weakref
from dataclasses import dataclass
from functools import partial
from types import MethodType

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hydra_engine import EmulatedDevice, Model, ModelOrchestrator, ModelTask
from hydra_engine.planning import adoption, rehearsal
from partitioners import Presharded
from tests import reference

pytestmark = pytest.mark.rest

SCALE = 0.5  # a global that a layer reads
EPOCHS = 2
ARGS = argparse.Namespace(rate=0.0)


@dataclass
class Config:
    width: int = 8
    bias: bool = True


class Rate:
    """Reads a global from a method, and the environment."""

    def __call__(self):
        return ARGS.rate + float(os.environ.get("HYDRA_TEST_RATE", "0"))


class Reads(nn.Module):
    """Reads a rate, and calls a package."""

    def __init__(self):
        super().__init__()
        self.rate = Rate()

    @property
    def factor(self):
        return np.exp(self.rate())

    def forward(self, x):
        return x * self.factor


class Scaled(nn.Module):
    """Reads attributes, a config, a buffer and a global."""

    def __init__(self, factor=1.0):
        super().__init__()
        self.factor, self.config, self.names = factor, Config(), {"a": [1, 2]}
        self.activation = torch.tanh
        self.register_buffer("mask", torch.ones(8))

    def forward(self, x):
        return self.activation(x * self.factor * SCALE * self.mask)


def batches(num=3, size=5, dtype=torch.float32, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, 8, generator=generator).to(dtype), torch.randint(3, (size,), generator=generator))
        for _ in range(num)
    ]


def model_of(seed):
    torch.manual_seed(seed)
    layers = nn.Linear(8, 8), nn.BatchNorm1d(8), Scaled(), nn.Dropout(0.2), nn.Linear(8, 8, bias=False), nn.Linear(8, 3)
    return nn.Sequential(*layers)


def loss(output, target):
    return F.cross_entropy(output, target)


def task_of(name, seed=0, model=None, loader=None, loss_fn=loss, lr=1e-2, **options):
    options = {"optimizer": torch.optim.AdamW, "partitioner": Presharded([2, 4, 6]), "seed": seed, **options}
    model = model_of(seed) if model is None else model
    return ModelTask(model, loss_fn, batches() if loader is None else loader, lr, EPOCHS, name=name, **options)


def orchestra_of(*tasks, memory="1MiB", **settings):
    orchestra = ModelOrchestrator(tasks, devices=[EmulatedDevice(memory, meter_every_unit=True)], **settings)
    orchestra.verbose = 0
    return orchestra


def adopted(first, second):
    """Whose plan each of two tasks has."""
    return [plan.adopted_from for plan in orchestra_of(first, second).generate().tasks.values()]


@pytest.fixture
def num_rehearsals(monkeypatch):
    """How many steps were run for a plan."""
    count, run = [], rehearsal._Rehearsal.run
    monkeypatch.setattr(rehearsal._Rehearsal, "run", lambda *args, **kwargs: count.append(1) or run(*args, **kwargs))
    return count


@pytest.mark.net
def test_tasks_of_one_structure_share_a_rehearsal_and_have_the_bits_of_plain_pytorch(num_rehearsals):
    tasks = [task_of(str(k), seed=k, lr=1e-3 * (k + 1), validation=batches(2, seed=9)) for k in range(3)]
    orchestra = orchestra_of(*tasks)
    orchestra_of(task_of("alone", validation=batches(2, seed=9))).generate()
    alone = len(num_rehearsals)
    plan = orchestra.generate()
    assert [each.adopted_from for each in plan.tasks.values()] == [None, "0", "0"]
    assert len(num_rehearsals) == 2 * alone
    assert len({tuple(each.boundaries) for each in plan.tasks.values()}) == 1
    assert len({tuple(each.shard_bytes) for each in plan.tasks.values()}) == 1
    report = orchestra.train_models()
    assert report.devices[0].peak_bytes <= report.devices[0].memory_bytes
    for k, task in enumerate(tasks):
        model = model_of(k)
        settings = {"epochs": EPOCHS, "optimizer": torch.optim.AdamW, "validation": batches(2, seed=9)}
        result = reference.train(model, loss, batches(), seed=k, lr=1e-3 * (k + 1), **settings)
        found = report.tasks[task.name]
        assert (found.losses, found.validation_losses) == (result.losses, result.validation_losses)
        expected = model.state_dict()
        assert all(torch.equal(value, expected[name]) for name, value in task.model.state_dict().items())


@pytest.mark.net
def test_a_task_added_later_adopts_the_plan_of_one_that_is_over():
    orchestra = orchestra_of(task_of("first"))
    orchestra.train_models()
    orchestra.add_task(task_of("second", seed=1))
    assert orchestra.generate().tasks["second"].adopted_from == "first"


def test_a_second_plan_of_a_task_is_its_own(num_rehearsals):
    orchestra = orchestra_of(task_of("first"))
    orchestra.generate()
    before = len(num_rehearsals)
    orchestra.add_task(task_of("second", model=nn.Sequential(nn.Linear(8, 3)), partitioner=Presharded([1])))
    plan = orchestra.generate()
    assert len(num_rehearsals) > before
    assert [each.adopted_from for each in plan.tasks.values()] == [None, None]


@pytest.mark.net
def test_other_seeds_rates_optimizers_settings_and_lambdas_of_one_code_are_the_same_structure():
    def make(name, seed, lr, decay):
        options = {"optimizer": partial(torch.optim.AdamW, weight_decay=decay), "hparams": {"lr": lr}}
        return task_of(name, seed, lr=lr, loss_fn=lambda output, target: F.cross_entropy(output, target), **options)

    assert adopted(make("first", 0, 1e-2, 0.0), make("second", 1, 1e-3, 0.1)) == [None, "first"]


def test_layers_that_a_loss_closes_over_may_have_other_weights():
    def make(name):
        frozen = nn.Linear(3, 3).requires_grad_(False)
        return task_of(name, loss_fn=lambda output, target: F.cross_entropy(frozen(output), target))

    assert adopted(make("first"), make("second")) == [None, "first"]


def test_classes_that_are_made_anew_for_each_task_are_compared_by_their_code():
    def model(factor):
        class Local(nn.Module):
            bias = factor

            def forward(self, x):
                return super().__call__ and x + self.bias

        return nn.Sequential(nn.Linear(8, 8), Local(), nn.Linear(8, 3))

    first, same, other = (
        task_of(name, model=model(factor), partitioner=Presharded([2, 3]))
        for name, factor in (("a", 1.0), ("b", 1.0), ("b", 2.0))
    )
    assert adopted(first, same) == [None, "a"]
    assert adopted(first, other) == [None, None]


class Whole(nn.Module):
    """A forward of its own, of which layers are made."""

    def __init__(self, seed=0, scale=1.0, is_deep=True):
        super().__init__()
        self.layers, self.scale, self.is_deep = model_of(seed), scale, is_deep

    def forward(self, x):
        hidden = self.layers[:2](x) * self.scale
        return self.layers[2 if self.is_deep else 4 :](hidden)


@pytest.mark.net
def test_models_of_one_module_with_a_forward_of_its_own_are_alike():
    def make(name, *args, **options):
        return task_of(name, model=Model(Whole(*args, **options)), partitioner="pilot")

    first, second = make("first", 0), make("second", 1)
    orchestra = orchestra_of(first, second)
    assert [plan.adopted_from for plan in orchestra.generate().tasks.values()] == [None, "first"]
    report = orchestra.train_models()
    for seed, name in enumerate(("first", "second")):
        settings = {"lr": 1e-2, "epochs": EPOCHS, "optimizer": torch.optim.AdamW}
        assert report.tasks[name].losses == reference.train(Whole(seed), loss, batches(), seed=0, **settings).losses
    assert adopted(make("first", 0), make("second", 0, scale=2.0)) == [None, None]
    assert adopted(make("first", 0), make("second", 0, is_deep=False)) == [None, None]


class Bare(nn.Module):
    """Uses weights of its own, of which a layer that is made has a set."""

    def __init__(self):
        super().__init__()
        for name in "gfedcba":
            setattr(self, name, nn.Parameter(torch.ones(8)))
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        weights = [self.g, self.f, self.e, self.d, self.c, self.b, self.a]
        return self.last(self.first(x) * torch.stack(weights).sum(0))


def test_weights_of_a_made_layer_stand_in_the_same_order_in_every_process():
    task = task_of("first", model=Model(Bare()), partitioner="pilot")
    orchestra_of(task)
    names = [name for layer in task.model for name, _ in layer.named_parameters()]
    assert [name for name in names if len(name) == 1] == [*"abcdefg"], names


class Changes:
    """What a second model has other than the first: each changes a model in place."""

    def other_dropout(model):
        model[3].p = 0.3

    def other_flag(model):
        model[3].eval()

    def other_attribute(model):
        model[2].factor = 2.0

    def other_type_of_an_attribute(model):
        model[2].factor = 1

    def other_value_in_a_config(model):
        model[2].config.bias = False

    def other_value_in_a_container(model):
        model[2].names["a"][1] = 3

    def another_attribute(model):
        model[2].more = None

    def other_function(model):
        model[2].activation = torch.sigmoid

    def forward_of_its_own(model):
        model[2].forward = MethodType(lambda self, x: x * self.factor, model[2])

    def hook(model):
        model[4].register_forward_hook(lambda module, args, output: None)

    def hook_on_a_parameter(model):
        model[4].weight.register_hook(lambda gradient: gradient)

    def tie(model):
        model[4].weight = model[0].weight

    def frozen_parameter(model):
        model[0].bias.requires_grad_(False)

    def other_dtype(model):
        model[2].mask = model[2].mask.half()

    def another_layer(model):
        model[3] = nn.Identity()

    def a_tensor_beside_the_weights(model):
        model[2].extra = torch.ones(2)

    def a_generator(model):
        model[2].generator = torch.Generator()


@pytest.mark.parametrize("change", [each for each in vars(Changes).values() if callable(each)])
def test_a_model_that_differs_is_rehearsed(change):
    model = model_of(1)
    change(model)
    assert adopted(task_of("first"), task_of("second", model=model)) == [None, None]


def test_a_module_in_other_places_is_seen():
    def task(name, *places):
        layers = [nn.Linear(8, 8), nn.Linear(8, 8)]
        chosen = [*(layers[k] for k in places), nn.Linear(8, 3)]
        return task_of(name, model=nn.Sequential(*chosen), partitioner=Presharded([2, 4]))

    assert adopted(task("first", 0, 1, 0), task("second", 0, 1, 0)) == [None, "first"]
    assert adopted(task("first", 0, 1, 0), task("second", 0, 1, 1)) == [None, None]


@pytest.mark.parametrize(
    "options",
    [
        {"loss_fn": nn.CrossEntropyLoss()},
        {"loss_fn": partial(loss)},
        {"loss_fn": lambda output, target: F.cross_entropy(output, target, label_smoothing=0.1)},
        {"loader": batches(size=6)},
        {"validation": batches(2)},
        {"accumulation_steps": 2},
        {"loss_reduction": "sum"},
        {"optimizer": torch.optim.SGD},  # its state is of another size
        {"early_release": True},
        {"partitioner": Presharded([3, 6])},
    ],
    ids=lambda options: "-".join(options),
)
def test_a_task_that_differs_is_rehearsed(options):
    second = task_of("second", 1, **{"validation": None, **options})
    assert adopted(task_of("first"), second) == [None, None]


@pytest.mark.parametrize("options", [{}, {"metrics": {"largest": lambda output, target: output.max()}}])
def test_metrics_are_compared(options):
    first = task_of("first", validation=batches(2), metrics={"largest": lambda output, target: output.min()})
    assert adopted(first, task_of("second", 1, validation=batches(2), **options)) == [None, None]


def test_precisions_are_compared():
    tasks = [
        task_of(name, model=nn.Sequential(nn.Linear(8, 3)), precision=precision, partitioner=Presharded([1]))
        for name, precision in (("a", "float32"), ("b", "bfloat16"), ("c", "bfloat16"))
    ]
    assert [plan.adopted_from for plan in orchestra_of(*tasks).generate().tasks.values()] == [None, None, "b"]


def test_a_method_that_was_replaced_is_seen(monkeypatch):
    orchestra = orchestra_of(task_of("first"))
    orchestra.generate()
    orchestra.stop_task("first")
    before = Scaled.forward
    monkeypatch.setattr(Scaled, "forward", lambda self, x: before(self, x))
    orchestra.add_task(task_of("second", 1))
    assert orchestra.generate().tasks["second"].adopted_from is None


@pytest.mark.parametrize("scale", [0.5, 0.25])
def test_values_of_globals_count_and_those_of_buffers_do_not(monkeypatch, scale):
    orchestra = orchestra_of(task_of("first"))
    orchestra.generate()
    orchestra.stop_task("first")
    monkeypatch.setattr(f"{__name__}.SCALE", scale)
    model = model_of(1)
    model[2].mask[3] = 0.0
    orchestra.add_task(task_of("second", 1, model=model))
    assert orchestra.generate().tasks["second"].adopted_from == ("first" if scale == 0.5 else None)


def flip_mkldnn(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", not torch.backends.mkldnn.enabled)


def flip_fastpath(_):
    torch.backends.mha.set_fastpath_enabled(not torch.backends.mha.get_fastpath_enabled())


def flip_flash(_):
    torch.backends.cuda.enable_flash_sdp(not torch.backends.cuda.flash_sdp_enabled())


def flip_deterministic(_):
    modes = {0: 1, 1: 0, 2: 0}
    torch.set_deterministic_debug_mode(modes[torch.get_deterministic_debug_mode()])


@pytest.fixture
def as_before():
    """Torch's settings."""
    flash, fastpath = torch.backends.cuda.flash_sdp_enabled(), torch.backends.mha.get_fastpath_enabled()
    mode = torch.get_deterministic_debug_mode()
    yield
    torch.backends.cuda.enable_flash_sdp(flash)
    torch.backends.mha.set_fastpath_enabled(fastpath)
    torch.set_deterministic_debug_mode(mode)


def with_layer(name, layer):
    return task_of(name, model=nn.Sequential(nn.Linear(8, 8), layer, nn.Linear(8, 3)), partitioner=Presharded([2, 3]))


@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize(
    ("layer", "flip"),
    [
        (nn.ReLU, flip_mkldnn),
        (nn.ReLU, flip_fastpath),
        (nn.ReLU, flip_flash),
        (nn.ReLU, flip_deterministic),
    ],
)
def test_what_a_layer_asks_for_and_has_changed_is_seen(monkeypatch, layer, flip):
    orchestra = orchestra_of(with_layer("first", layer()), with_layer("second", layer()))
    assert orchestra.generate().tasks["second"].adopted_from == "first"
    for name in ("first", "second"):  # or they would be rehearsed anew, too
        orchestra.stop_task(name)
    flip(monkeypatch)
    orchestra.add_task(with_layer("third", layer()))
    assert orchestra.generate().tasks["third"].adopted_from is None


def test_getters_of_other_attributes_are_rehearsed():
    def getting(name):
        model = model_of(0)
        model[2].get = operator.attrgetter(name)
        return model

    first, second = (task_of(name, model=getting(name)) for name in ("factor", "names"))
    assert adopted(first, second) == [None, None]


@pytest.mark.net
def test_a_closure_is_compared_by_its_values():
    def loss_of(smoothing):
        return lambda output, target: F.cross_entropy(output, target, label_smoothing=smoothing)

    for smoothing, whose in ((0.1, "first"), (0.2, None)):
        first = task_of("first", loss_fn=loss_of(0.1))
        assert adopted(first, task_of("second", 1, loss_fn=loss_of(smoothing))) == [None, whose]


class InPlace(nn.Module):
    def forward(self, x):
        return x.mul_(2.0)


def test_layers_that_work_in_place_on_a_batch_are_rehearsed_with_each_loader():
    def make(name, loader):
        model = nn.Sequential(InPlace(), nn.Linear(8, 3))
        return task_of(name, model=model, loader=loader, partitioner=Presharded([1, 2]))

    class Fresh:
        def __iter__(self):
            return iter(batches())

        def __len__(self):
            return 3

    assert adopted(make("first", Fresh()), make("second", Fresh())) == [None, None]
    with pytest.raises(ValueError, match=r"second: 0 .*: work in place on the inputs of a batch that loader"):
        orchestra_of(make("first", Fresh()), make("second", batches())).generate()


class Counts(nn.Module):
    """Refused: its forward counts."""

    def __init__(self):
        super().__init__()
        self.num = 0

    def forward(self, x):
        self.num += 1
        return x * self.num


@pytest.mark.net
def test_what_was_refused_is_refused_again():
    orchestra = orchestra_of(task_of("first"))
    orchestra.generate()
    for name in ("second", "third"):
        orchestra.add_task(with_layer(name, Counts()))
        with pytest.raises(ValueError, match=f"{name}: .*attribute 'num'|{name}: run twice on the same input"):
            orchestra.generate()
        orchestra.stop_task(name)


@pytest.mark.net
def test_other_devices_are_another_plan():
    orchestra = orchestra_of(task_of("first"))
    orchestra.generate()
    orchestra.buffer = "2KiB"
    orchestra.add_task(task_of("second", 1))
    assert [plan.adopted_from for plan in orchestra.generate().tasks.values()] == [None, "first"]


def test_a_plan_that_is_kept_for_others_keeps_no_model():
    orchestra = orchestra_of(task_of("other", model=nn.Sequential(nn.Linear(8, 3)), partitioner=Presharded([1])))
    task = task_of("first")
    orchestra.add_task(task)
    orchestra.generate()
    known = orchestra._tasks._shared.rehearsals._found
    assert len(known) == 2
    layer = weakref.ref(task.model[2])
    del orchestra, task
    gc.collect()
    assert layer() is None


class TestInAFolder:
    """Plans beside checkpoints, found by an orchestrator that remembers nothing."""

    @pytest.fixture
    def planned(self, tmp_path, num_rehearsals, monkeypatch):
        """Train, take the last checkpoint away, and let go of all but the files."""
        monkeypatch.setattr(sys.modules["__main__"], "__file__", __file__, raising=False)  # tests in parallel have none
        adoption._program.cache_clear()
        orchestra_of(task_of("first"), checkpoint_dir=tmp_path, checkpoint_every=2).train_models()
        newest = max(tmp_path.glob("checkpoint-*"))
        newest.unlink()
        num_rehearsals.clear()
        return tmp_path

    @pytest.mark.net
    def test_a_resume_has_the_plan_without_a_rehearsal_and_the_bits(self, planned, num_rehearsals):
        assert len([*(planned / "plans").iterdir()]) == 1
        task = task_of("first")
        report = orchestra_of(task, checkpoint_dir=planned).train_models(resume=True).tasks["first"]
        assert not num_rehearsals
        model = model_of(0)
        result = reference.train(model, loss, batches(), seed=0, lr=1e-2, epochs=EPOCHS, optimizer=torch.optim.AdamW)
        assert report.losses == result.losses
        assert all(torch.equal(value, model.state_dict()[name]) for name, value in task.model.state_dict().items())

    def others(self):
        def other_loss(output, target):
            return F.cross_entropy(output, target) * 2

        wide = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 3))
        return {
            "the same": {},
            "other seed": {"seed": 1},
            "other width": {"model": wide, "partitioner": Presharded([1, 2])},
            "other loss": {"loss_fn": other_loss},
            "other batch": {"loader": batches(size=6)},
        }

    @pytest.mark.parametrize("other", ["the same", "other seed", "other width", "other loss", "other batch"])
    def test_another_task_is_planned_anew(self, planned, num_rehearsals, other):
        orchestra_of(task_of("second", **self.others()[other]), checkpoint_dir=planned).generate()
        assert bool(num_rehearsals) == (other not in ("the same", "other seed"))

    @pytest.mark.parametrize("what", ["torch", "a package", "a file of the program", "the command line", "a global"])
    def test_so_is_one_of_another_program(self, planned, num_rehearsals, monkeypatch, what):
        if what == "torch":
            monkeypatch.setattr(torch, "__version__", "2.0.0")
        elif what == "a package":
            monkeypatch.setattr(adoption.Path, "glob", lambda self, pattern: iter([self / pattern]))
        elif what == "the command line":
            monkeypatch.setattr(sys, "argv", [sys.argv[0], "--dropout", "0.1"])
        elif what == "a global":
            monkeypatch.setattr(f"{__name__}.SCALE", 0.25)
        else:
            digest = adoption._file_digest
            monkeypatch.setattr(adoption, "_file_digest", lambda path: "another" if path == __file__ else digest(path))
        adoption._program.cache_clear()
        orchestra_of(task_of("second"), checkpoint_dir=planned).generate()
        adoption._program.cache_clear()
        assert num_rehearsals

    def test_what_code_reads_from_elsewhere_is_compared(self, monkeypatch):
        def kind():
            layer = Reads()
            layer.extra = torch.ones(2)
            layer.register_buffer("trained", values.pop())
            task = with_layer("first", layer)
            [planned] = orchestra_of(task)._tasks.all
            return adoption.kind_of(planned.state, tuple)

        values = [torch.zeros(2), torch.ones(2)] * 4
        first = kind()
        assert kind() == first  # whatever a buffer holds
        monkeypatch.setenv("HYDRA_TEST_RATE", "0.1")
        assert kind() != first
        monkeypatch.undo()
        monkeypatch.setattr(ARGS, "rate", 0.1)
        assert kind() != first

    def test_the_plan_of_a_task_that_fails_is_removed(self, planned, num_rehearsals):
        loader = batches()
        loader[2] = loader[2][0], loader[2][1] + 3
        with pytest.raises(IndexError, match="second failed"):
            orchestra_of(task_of("second", loader=loader), checkpoint_dir=planned).train_models(resume=True)
        assert not num_rehearsals
        assert not [*(planned / "plans").iterdir()]

    @pytest.mark.parametrize("damage", ["a bit", "the end", "everything", "a call"])
    def test_so_is_one_whose_file_is_damaged(self, planned, num_rehearsals, capfd, damage):
        [path] = (planned / "plans").iterdir()
        written = bytearray(path.read_bytes())
        if damage == "a bit":
            written[len(written) // 2] ^= 1
        elif damage == "a call":  # with the right hash
            content = pickle.dumps(operator.methodcaller("unlink"))
            written = hashlib.sha256(content).digest() + content
        path.write_bytes(written[: {"the end": -1, "everything": 0}.get(damage, len(written))])
        orchestra = orchestra_of(task_of("second"), checkpoint_dir=planned)
        orchestra.generate()
        assert num_rehearsals
        assert f"{path} is not a plan as it was written" in capfd.readouterr().err
        orchestra.train_models(resume=True)
        assert len(path.read_bytes()) > 1000  # written anew
