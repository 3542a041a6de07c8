"""A task's defaults, and a model that shares its layers."""

from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hydra_engine import Model, ModelTask
from partitioners import Fastest, Presharded
from tests import exact
from tests.refused import refused


def task_of(*args, model=None, **options):
    return ModelTask(model if model is not None else [nn.Linear(2, 2)], F.cross_entropy, [], *args, **options)


class TestDefaults:
    def test_are_those_of_the_documentation(self):
        task = task_of()
        assert (task.lr, task.epochs, task.name) == (1e-3, 1, None)
        assert task.optimizer is torch.optim.SGD
        assert task.lr_scheduler is None
        assert task.lr_scheduler_interval == "step"
        assert isinstance(task.partitioner, Fastest)
        assert (task.precision, task.accumulation_steps, task.loss_reduction) == ("float32", 1, "mean")
        assert task.max_grad_norm is task.validation is None
        assert task.unpack(("x", "y")) == ("x", "y")

    def test_learning_rate_is_the_default_only_without_an_optimizer(self):
        for lr, optimizer, expected in (
            (None, None, 1e-3),
            (None, torch.optim.Adam, None),
            (0.5, torch.optim.Adam, 0.5),
            (0.5, None, 0.5),
            (np.float32(0.5), None, 0.5),  # it may be of NumPy
            (0.0, None, 0.0),  # zero is kept
        ):
            assert task_of(lr, optimizer=optimizer).lr == expected

    def test_loader_may_be_of_a_module_named_datasets(self):
        loader = type("Loader", (), {"__module__": "datasets.mine", "__iter__": lambda self: iter(())})()
        assert ModelTask([nn.Linear(2, 2)], F.mse_loss, loader).dataloader is loader

    def test_arguments_come_in_hydras_order(self):
        loader = [1]
        task = ModelTask(Model([nn.Linear(2, 2)]), F.mse_loss, loader, 0.25, 7)
        assert (task.loss_fn, task.dataloader, task.lr, task.epochs) == (F.mse_loss, loader, 0.25, 7)

    def test_options_are_kept(self):
        options = {
            "name": "bert",
            "partitioner": Presharded([1]),
            "validation": [2],
            "unpack": tuple,
            "split": max,
            "lr_scheduler": torch.optim.lr_scheduler.ConstantLR,
            "lr_scheduler_interval": "epoch",
            "accumulation_steps": "auto",
            "max_grad_norm": 2.5,
            "seed": 11,
        }
        task = task_of(**options)
        assert {name: getattr(task, name) for name in options} == options

    def test_split_follows_the_loss_reduction(self):
        batch = torch.zeros(6), torch.zeros(6)
        assert [w for *_, w in task_of().split(*batch, 2)] == [0.5, 0.5]
        assert [w for *_, w in task_of(loss_reduction="sum").split(*batch, 2)] == [1.0, 1.0]

    def test_seed_is_drawn_from_torch(self):
        with torch.random.fork_rng(devices=[]):
            layers = [nn.Linear(2, 2)]
            torch.manual_seed(4)
            drawn = [task_of(model=layers).seed for _ in range(2)]
            torch.manual_seed(4)
            assert [task_of(model=layers).seed for _ in range(2)] == drawn
            assert drawn[0] != drawn[1]
            before = torch.get_rng_state()
            assert task_of(model=layers, seed=0).seed == 0
            assert torch.equal(torch.get_rng_state(), before), "a seed that is given draws nothing"


class TestPrinting:
    def test_task_prints_its_name_and_size(self):
        assert repr(task_of(epochs=3, name="bert")) == "ModelTask(bert: 1 layers, 3 epochs)"
        assert repr(task_of()) == "ModelTask(unnamed: 1 layers, 1 epochs)"

    def test_default_names_are_places_in_the_list(self):
        batch = (torch.rand(3, 2), torch.zeros(3).long())
        tasks = [ModelTask([nn.Linear(2, 2)], F.cross_entropy, [batch], name=name) for name in (None, "bert", None)]
        orchestra = exact.silent(tasks)
        assert list(orchestra.generate().tasks) == ["task-0", "bert", "task-2"]
        assert list(orchestra.train_models().tasks) == ["task-0", "bert", "task-2"]


class TestModel:
    def test_shares_the_layers_of_a_list_as_do_its_slices(self):
        layers = [nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)]
        model = Model(layers)
        assert [id(layer) for layer in model] == [id(layer) for layer in layers]
        assert list(model._modules) == ["0", "1", "2"]
        part = model[1:]
        assert isinstance(part, Model)
        assert [id(layer) for layer in part] == [id(layer) for layer in layers[1:]]

    def test_keeps_the_names_of_a_sequential(self):
        source = nn.Sequential(OrderedDict(embed=nn.Linear(2, 2), head=nn.Linear(2, 2)))
        model = Model(source)
        assert list(model.state_dict()) == list(source.state_dict())
        assert all(a is b for a, b in zip(model.parameters(), source.parameters(), strict=True))

    def test_takes_lists_and_dicts_of_modules_that_can_be_called(self):
        class Dense(nn.ModuleDict):
            def __call__(self, x):
                for layer in self.values():
                    x = torch.cat([x, layer(x)], dim=1)
                return x

        model = Model([InTurn([nn.Linear(2, 2), nn.ReLU()]), Dense({"a": nn.Linear(2, 2), "b": nn.Linear(4, 2)})])
        assert model(torch.ones(1, 2)).shape == (1, 6)

    @pytest.mark.parametrize("layer", [nn.ModuleList([nn.ReLU()]), nn.ModuleDict(), nn.Module()])
    def test_refuses_layers_without_a_forward(self, layer):
        with refused(TypeError, layer=f"1 ({type(layer).__name__})", says="forward"):
            Model([nn.ReLU(), layer])

    def test_layer_in_two_places_runs_twice(self):
        layer = nn.Linear(2, 2)
        model = Model([layer, nn.ReLU(), layer])
        assert len(model) == 3
        assert torch.equal(model(torch.ones(1, 2)), layer(layer(torch.ones(1, 2)).relu()))

    def test_task_keeps_a_model_and_wraps_anything_else(self):
        layers = [nn.Linear(2, 2)]
        model = Model(layers)
        assert task_of(model=model).model is model
        wrapped = task_of(model=layers).model
        assert isinstance(wrapped, Model)
        assert wrapped[0] is layers[0]


class Unreadable:
    """Layers that cannot be made, for a reason that is told."""

    def __iter__(self):
        error = ValueError("no layers")
        error.__notes__ = ["in shard 3 of the file"]
        raise error from OSError("the disk is gone")


@pytest.mark.parametrize("name", ["a", None])
def test_what_is_refused_keeps_its_cause_and_notes_under_the_tasks_name(name):
    with pytest.raises(ValueError, match="no layers") as caught:
        task_of(model=Unreadable(), name=name)
    assert str(caught.value) == ("no layers" if name is None else "a: no layers")
    assert str(caught.value.__cause__) == "the disk is gone"
    assert caught.value.__notes__ == ["in shard 3 of the file"]
    assert any(each.name == "__iter__" for each in caught.traceback)


class InTurn(nn.ModuleList):
    def forward(self, x):
        for layer in self:
            x = layer(x)
        return x


class TestNamesOfLayers:
    def test_of_a_sequence_are_keys_and_classes(self):
        model = Model(nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU())))
        assert [model.shown(path) for path in ("0", "1", "1.0", "1.0.gate", "loss_fn", "metric f1")] == [
            "0 (Linear)",
            "1 (Sequential)",
            "1.0 (ReLU)",
            "1.0.gate",
            "loss_fn",
            "metric f1",
        ]

    def test_of_children_are_their_names(self):
        model = Model(nn.Sequential(OrderedDict(embed=nn.Linear(2, 2), head=nn.Sequential(nn.ReLU()))))
        assert [model.shown(path) for path in ("embed", "head.0")] == ["embed (Linear)", "head.0 (ReLU)"]

    def test_of_layers_made_by_hand_are_those_of_the_modules_that_they_hold(self):
        source = nn.Module()
        source.body = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        source.norm, source.head = nn.LayerNorm(2), nn.Linear(2, 2)
        held = InTurn([source.norm, source.head])
        model = Model.by_hand(source, [source.body[0], InTurn([source.body[1]]), held, nn.ReLU()])
        assert [model.shown(path) for path in ("0", "1", "2", "3", "2.1", "2.1.weight")] == [
            "body.0 (Linear)",
            "body.1 (Linear)",
            "norm to head",
            "3 (ReLU)",
            "head (Linear)",
            "head.weight",
        ]
