"""Training with the engine gives the bits of plain PyTorch (design: "as if alone"), whatever else varies."""

import random
from itertools import combinations, product

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from hydra_engine import EmulatedDevice, Model, ModelOrchestrator, ModelTask
from partitioners import Presharded
from tests import exact, reference, zoo
from tests.covering import covering, parts

COVERING = exact.covering()
# Three batches of each: what differs does so in the first steps, and each epoch begins with draws of its own.
mlp, gpt, cnn, dropout = (zoo.SHORT_MODELS[name] for name in ("mlp", "gpt", "cnn", "dropout"))


def assert_engine_equals_plain(build, *, shards=None, num_devices=2, chaos=7, memory=exact.MEMORY, seed=11, **options):
    """Train `build()` twice, with the engine and in plain PyTorch, both with these options of a task; same bits."""
    expected_model, expected_loss_fn, loader = build()
    expected = reference.train(expected_model, expected_loss_fn, loader, seed=seed, **options)
    model, loss_fn, loader = build()
    partitioner = Presharded(exact.ends("each", len(model)) if shards is None else shards)
    task = ModelTask(model, loss_fn, loader, name="task", partitioner=partitioner, seed=seed, **options)
    report = exact.run([task], num_devices=num_devices, chaos=chaos, memory=memory)
    exact.assert_as_expected(
        report, "task", model, exact.Expected(expected.losses, expected.validation_losses, zoo.state(expected_model))
    )
    assert report.tasks["task"].validation_losses == expected.validation_losses
    if isinstance(loss_fn, nn.Module):
        exact.assert_same_state(zoo.state(loss_fn), zoo.state(expected_loss_fn))
    return model, report


@pytest.mark.parametrize("case", COVERING, ids=str)
def test_case_of_the_covering(case):
    exact.check(case)


@pytest.mark.rest
@pytest.mark.parametrize("case", COVERING, ids=str)
def test_case_of_the_covering_with_larger_models(case):
    exact.check(case, large=True)


def test_covering_has_every_pair_of_factor_values():
    covered = set().union(*(parts({f: getattr(case, f) for f in exact.FACTORS}) for case in COVERING))
    for a, b in combinations(exact.FACTORS, 2):
        for x, y in product(exact.FACTORS[a], exact.FACTORS[b]):
            assert ((a, x), (b, y)) in covered
    assert len(COVERING) == len(set(COVERING)) == 40  # a covering alone needs 36: models x optimizers


@pytest.mark.rest
def test_runs_have_every_case_once_in_company_of_those_with_the_same_run():
    product = exact.whole_product()
    assert len(product) == len(set(product)) == 9 * 4 * 3**3 * 2**6
    runs = exact.runs()
    cases_of_runs = [case for cases in runs for case in cases]
    assert len(cases_of_runs) == len(product)
    assert set(cases_of_runs) == set(product)
    assert {(len(cases), cases[0].company) for cases in runs} == {(1, False), (exact.COMPANY, True)}
    assert all(len({tuple(getattr(case, f) for f in exact.RUN_FACTORS) for case in cases}) == 1 for cases in runs)
    assert exact.runs() == runs


def test_branch_leaves_a_gradient_absent_in_some_steps():
    """Otherwise the zoo's "parameter unused in some steps" would not be one."""
    model, loss_fn, loader = zoo.SHORT_MODELS["branch"]()
    used = set()
    for inputs, target in loader:
        model.zero_grad(set_to_none=True)
        loss_fn(model(inputs), target).backward()
        used.add((model[2].positive.weight.grad is not None, model[2].negative.weight.grad is not None))
    assert used == {(True, False), (False, True)}


# generate()


def expected_of_few(name, **options):
    return exact.expected(name, num_batches=zoo.NUM_SHORT, **options)


class CountingLoader:
    """Counts how often it is opened and how many batches are taken from it."""

    def __init__(self, loader):
        self.loader, self.num_opened, self.num_batches = loader, 0, 0

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        self.num_opened += 1
        for batch in self.loader:
            self.num_batches += 1
            yield batch


@pytest.mark.parametrize("num_calls", [0, 2])
def test_generate_changes_no_bit_and_reads_no_batch_of_its_own(num_calls):
    model, loss_fn, loader = dropout()
    loader = CountingLoader(loader)
    factory, lr = exact.OPTIMIZERS["adamw"]
    task = ModelTask(model, loss_fn, loader, lr, exact.EPOCHS, name="dropout", optimizer=factory, seed=exact.SEED)
    orchestra = exact.orchestrator([task])
    for _ in range(num_calls):
        plan = orchestra.generate()
        assert plan.tasks["dropout"].boundaries[-1] == len(model)
    report = orchestra.train_models()
    exact.assert_as_expected(report, "dropout", model, expected_of_few("dropout", optimizer="adamw"))
    assert (loader.num_opened, loader.num_batches) == (exact.EPOCHS, exact.EPOCHS * zoo.NUM_SHORT)


def test_generate_does_not_change_the_model():
    task, model = exact.task_of("cnn")
    before = {name: tensor.clone() for name, tensor in zoo.state(model).items()}
    exact.orchestrator([task]).generate()
    exact.assert_same_state(zoo.state(model), before)


# Loaders and random streams


def test_seed_drawn_from_torch_is_reported():
    model, loss_fn, loader = dropout()
    assert loader.generator is None
    torch.manual_seed(99)
    report = exact.run([ModelTask(model, loss_fn, loader, 0.1, 2)], chaos=3)
    seed = report.tasks["task-0"].seed
    expected_model, loss_fn, loader = dropout()
    expected = reference.train(expected_model, loss_fn, loader, seed=seed, lr=0.1, epochs=2)
    assert report.tasks["task-0"].losses == expected.losses
    exact.assert_same_state(zoo.state(model), zoo.state(expected_model))


def test_seed_follows_torchs_generator():
    seeds = []
    for _ in range(2):
        torch.manual_seed(99)
        model, loss_fn, loader = mlp()
        seeds.append(exact.run([ModelTask(model, loss_fn, loader, 0.1)]).tasks["task-0"].seed)
    assert seeds[0] == seeds[1]


def test_training_leaves_the_global_generators_as_it_found_them():
    task, _ = exact.task_of("dropout", num_batches=zoo.NUM_SHORT)
    orchestra = exact.orchestrator([task], num_devices=2)
    torch.manual_seed(3)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    orchestra.train_models()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]


def test_same_dataset_in_two_shuffling_loaders():
    """Both loaders draw their order from "the" global generator, each from its own task's stream."""
    tasks, models = [], []
    for seed in (1, 2):
        model, loss_fn, loader = dropout()
        tasks.append(ModelTask(model, loss_fn, loader, 0.1, 2, seed=seed))
        models.append(model)
    report = exact.run(tasks, num_devices=2, chaos=8)
    for k, seed in enumerate((1, 2)):
        expected = expected_of_few("dropout", seed=seed)
        exact.assert_as_expected(report, f"task-{k}", models[k], expected)


class NoisyData(Dataset):
    """Draws in __getitem__, hence in the worker processes, from seeds that the loader draws."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.full((6,), float(index)) / 12 + 0.1 * torch.randn(6), index % 3


def noisy(num_workers):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 3))
    return model, F.cross_entropy, DataLoader(NoisyData(), batch_size=4, shuffle=True, num_workers=num_workers)


# Forking beside threads is what every trainer with loader workers does; newer Pythons warn about it.
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_loader_that_draws_in_its_workers(num_workers):
    assert_engine_equals_plain(lambda: noisy(num_workers), lr=0.1, epochs=2)


class Countdown(IterableDataset):
    """A data set without a length: an epoch ends when it does."""

    def __iter__(self):
        for index in range(11):
            yield torch.full((6,), index / 11), index % 3


def test_loader_without_a_length_ends_at_its_last_batch():
    def build():
        model, loss_fn, _ = noisy(0)
        return model, loss_fn, DataLoader(Countdown(), batch_size=4)

    _, report = assert_engine_equals_plain(build, lr=0.1, epochs=3)
    assert report.tasks["task"].steps == 9


def test_unpack_turns_a_batch_into_the_pair():
    def build():
        model, loss_fn, _ = noisy(0)
        samples = [{"pixels": torch.full((6,), k / 9), "label": k % 3, "id": k} for k in range(9)]
        return model, loss_fn, DataLoader(samples, batch_size=4, shuffle=True)

    assert_engine_equals_plain(build, lr=0.1, epochs=2, unpack=lambda batch: (batch["pixels"], batch["label"]))


# Validation


@pytest.mark.rest
@covering(name=["dropout", "cnn"], shuffle=[False, True], accumulation_steps=[1, 3], strength=1)
def test_validation_changes_no_bit_and_gives_the_plain_losses(name, shuffle, accumulation_steps):
    build, options = zoo.SHORT_MODELS[name], {"lr": 0.1, "epochs": 2, "accumulation_steps": accumulation_steps}
    validation = DataLoader(build()[2].dataset, batch_size=10, shuffle=shuffle)  # the last batch is short
    model, report = assert_engine_equals_plain(build, validation=validation, **options)
    assert len(report.tasks["task"].validation_losses) == 2
    assert all(module.training for module in model.modules())

    without, report = assert_engine_equals_plain(build, **options)
    assert report.tasks["task"].validation_losses == []
    exact.assert_same_state(zoo.state(model), zoo.state(without))


def test_validation_sums_a_loss_that_sums():
    def build():
        model, _, loader = mlp()
        return model, nn.CrossEntropyLoss(reduction="sum"), loader

    validation = DataLoader(mlp()[2].dataset, batch_size=10)
    for accumulation_steps in (1, 3):
        options = {"loss_reduction": "sum", "accumulation_steps": accumulation_steps}
        assert_engine_equals_plain(build, lr=0.01, validation=validation, **options)


def test_each_module_keeps_its_own_training_flag():
    def build():
        model, loss_fn, loader = cnn()
        model[1].eval()  # frozen statistics, as in fine-tuning
        return model, loss_fn, loader

    model, _ = assert_engine_equals_plain(build, lr=0.1, epochs=2, validation=cnn()[2])
    assert not model[1].training
    assert model[4].training
    assert model[1].num_batches_tracked == 0


# Learning rates, schedules, loss weights


def test_learning_rate_schedule_that_moves_the_momentum_too():
    def one_cycle(optimizer):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=2 * zoo.NUM_SHORT)

    factory, lr = exact.OPTIMIZERS["momentum"]
    options = {"optimizer": factory, "lr_scheduler": one_cycle, "max_grad_norm": 0.5}
    assert_engine_equals_plain(gpt, lr=lr, epochs=2, **options)


def test_learning_rate_is_passed_only_if_given():
    assert_engine_equals_plain(mlp)  # SGD, 1e-3
    assert_engine_equals_plain(mlp, optimizer=torch.optim.Adam)  # Adam's own default
    assert_engine_equals_plain(mlp, optimizer=torch.optim.Adam, lr=0.02)


def test_loss_that_sums_is_not_weighted():
    def build():
        model, _, loader = dropout()
        return model, nn.CrossEntropyLoss(reduction="sum"), loader

    assert_engine_equals_plain(build, lr=0.01, epochs=2, accumulation_steps=3, loss_reduction="sum", max_grad_norm=0.5)


class CentredLoss(nn.Module):
    """Keeps a running mean in a buffer, as a DINO-style loss does, and changes it in training alone."""

    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(5))
        self.register_buffer("class_weight", torch.linspace(0.5, 1.5, 5))

    def forward(self, outputs, target):
        if self.training:
            self.centre.mul_(0.9).add_(0.1 * outputs.detach().mean(0))
        return F.cross_entropy(outputs - self.centre, target, self.class_weight)


@covering(accumulation_steps=[1, 3], shards=[[5], [1, 2, 5]], strength=1)
def test_loss_module_with_buffers(accumulation_steps, shards):
    def build():
        model, _, loader = mlp()
        return model, CentredLoss(), loader

    assert_engine_equals_plain(
        build, shards=shards, lr=0.1, epochs=2, accumulation_steps=accumulation_steps, validation=mlp()[2]
    )


# Boundaries


class Spread(nn.Module):
    """Takes a dict; gives one tensor twice, integers, and a plain number."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 8)

    def forward(self, inputs):
        hidden = self.linear(inputs["x"]) * inputs["scale"].unsqueeze(-1)
        return hidden, {"again": hidden, "index": hidden.argmax(-1), "factor": 0.5}


class Halve(nn.Module):
    """Works in place on its input, which the other name of the same tensor has to show."""

    def forward(self, inputs):
        hidden, others = inputs
        hidden.mul_(others["factor"])
        return [hidden.detach() > 0, others]


class Join(nn.Module):
    """Uses what came twice, the integers and the mask."""

    def __init__(self):
        super().__init__()
        self.embedding, self.linear = nn.Embedding(8, 8), nn.Linear(8, 3)

    def forward(self, inputs):
        mask, others = inputs
        return self.linear(others["again"] * mask + self.embedding(others["index"]))


def nested_boundaries():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        model = nn.Sequential(Spread(), Halve(), Join())
        samples = [({"x": torch.randn(6), "scale": torch.rand(())}, k % 3) for k in range(20)]
    return model, F.cross_entropy, DataLoader(samples, batch_size=5, shuffle=True)


@covering(shards=[[3], [1, 3], [2, 3], [1, 2, 3]], accumulation_steps=[1, 3], strength=1)
def test_nested_boundaries_keep_dtype_and_identity(shards, accumulation_steps):
    options = {"lr": 0.1, "epochs": 2, "accumulation_steps": accumulation_steps}
    assert_engine_equals_plain(nested_boundaries, shards=shards, validation=nested_boundaries()[2], **options)


class AddPair(nn.Module):
    """The first layer of a model whose input is a tuple."""

    def forward(self, inputs):
        left, right = inputs
        return left + right


def test_inputs_may_be_a_tuple():
    def build():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            model = nn.Sequential(AddPair(), nn.Linear(6, 3))
            samples = [((torch.randn(6), torch.randn(6)), k % 3) for k in range(20)]
        return model, F.cross_entropy, DataLoader(samples, batch_size=5, shuffle=True)

    assert_engine_equals_plain(build, lr=0.1, accumulation_steps=3)


@pytest.mark.parametrize("shards", [[1, 3, 5], [1, 2, 3, 4, 5]])
def test_in_place_layer_first_in_a_shard(shards):
    def build():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            model = nn.Sequential(
                nn.Linear(12, 16), nn.ReLU(inplace=True), nn.Linear(16, 16), nn.ReLU(inplace=True), nn.Linear(16, 5)
            )
        return model, F.cross_entropy, mlp()[2]

    assert_engine_equals_plain(build, shards=shards, lr=0.1)


def test_in_place_layer_first_in_the_model():
    """It changes the loader's own tensors in plain PyTorch too; the recomputation must not see them changed twice."""

    def build():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            model = nn.Sequential(nn.ELU(inplace=True), nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 5))
        return model, F.cross_entropy, mlp()[2]

    for accumulation_steps in (1, 3):
        assert_engine_equals_plain(build, lr=0.1, accumulation_steps=accumulation_steps)


# Layers with something special


class RebindsItsBuffer(nn.Module):
    """Puts a new tensor in the buffer's place instead of writing to it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
        return x * (1 + self.mean)


def with_middle(build_layer):
    """An MLP with this layer in its middle, 16 features wide."""

    def build():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), build_layer(), nn.ReLU(), nn.Linear(16, 5))
        return model, F.cross_entropy, mlp()[2]

    return build


@pytest.mark.parametrize(
    ("build_layer", "accumulation_steps"), [(RebindsItsBuffer, 1), (RebindsItsBuffer, 3), (nn.Identity, 3)]
)
def test_layer_with_something_special(build_layer, accumulation_steps):
    assert_engine_equals_plain(with_middle(build_layer), lr=0.1, epochs=2, accumulation_steps=accumulation_steps)


def test_lstm_with_dropout_between_its_layers():
    def build():
        _, loss_fn, loader = zoo.SHORT_MODELS["lstm"]()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            model = nn.Sequential(
                nn.Embedding(zoo.VOCABULARY, 8),
                zoo.Lstm(8, 8, num_layers=2, dropout=0.3),
                nn.Linear(8, zoo.VOCABULARY),
            )
        return model, loss_fn, loader

    assert_engine_equals_plain(build, lr=0.1)


def test_channels_last_weights_keep_their_strides():
    def build():
        model, loss_fn, loader = cnn()
        return model.to(memory_format=torch.channels_last), loss_fn, loader

    before = [param.stride() for param in build()[0].parameters()]
    model, _ = assert_engine_equals_plain(build, lr=0.1)
    assert [param.stride() for param in model.parameters()] == before


# Models, partitions, and what is left after training


class Net(nn.Module):
    """A module whose children run in order."""

    def __init__(self, layers):
        super().__init__()
        self.body, self.act, self.head = layers

    def forward(self, x):
        return self.head(self.act(self.body(x)))


@covering(wrap=[nn.Sequential, Net, list], explicit=[False, True], strength=1)
def test_model_shares_the_users_layers(wrap, explicit):
    def layers():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(4)
            return [nn.Linear(12, 8), nn.Dropout(0.2), nn.Linear(8, 5)]

    mine, loader = layers(), mlp()[2]
    params = [param for layer in mine for param in layer.parameters()]
    wrapped = nn.Sequential(*mine) if wrap is nn.Sequential else wrap(mine)
    task = ModelTask(Model(wrapped) if explicit else wrapped, F.cross_entropy, loader, 0.1, 2, seed=5)
    exact.run([task])

    expected_model = nn.Sequential(*layers())
    reference.train(expected_model, F.cross_entropy, mlp()[2], seed=5, lr=0.1, epochs=2)
    exact.assert_same_state(zoo.state(nn.Sequential(*mine)), zoo.state(expected_model))
    assert [id(param) for layer in mine for param in layer.parameters()] == [id(param) for param in params]


def test_model_can_be_indexed_and_sliced_like_a_sequential():
    layers = [nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 5)]
    model = Model(layers)
    assert model[0] is layers[0]
    assert list(model[1:]) == layers[1:]
    assert len(model) == 3


def test_trained_weights_are_on_the_cpu_in_ordinary_storage():
    task, model = exact.task_of("tied", num_batches=zoo.NUM_SHORT)
    exact.run([task])
    assert model[0].token.weight is model[3].weight
    for tensor in zoo.state(model).values():
        assert tensor.device.type == "cpu"
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        assert tensor.is_leaf
    model(next(iter(zoo.SHORT_MODELS["tied"]()[2]))[0]).sum().backward()  # and the model still works by itself


def wide():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        layers = [layer for _ in range(6) for layer in (nn.Linear(128, 128), nn.Tanh())]
        model = nn.Sequential(*layers, nn.Linear(128, 5))
        samples, classes = torch.randn(16, 128), torch.randint(5, (16,))
    return model, F.cross_entropy, DataLoader(TensorDataset(samples, classes), batch_size=4, shuffle=True)


@pytest.mark.parametrize("double_buffer", [True, False])
def test_default_partition_of_a_model_larger_than_the_device(double_buffer):
    """About 400 KB of weights through 384 KiB, with gradients: Pilot has to cut."""
    model, loss_fn, loader = wide()
    task = ModelTask(model, loss_fn, loader, 0.1, 2, seed=5)
    orchestra = exact.orchestrator([task], memory="384KiB", double_buffer=double_buffer, chaos=2)
    plan = orchestra.generate()
    boundaries = list(plan.tasks["task-0"].boundaries)
    assert len(boundaries) > 1
    assert boundaries == sorted(set(boundaries))
    assert boundaries[-1] == len(model)
    report = orchestra.train_models()
    exact.assert_within_budget(report)
    expected_model, loss_fn, loader = wide()
    expected = reference.train(expected_model, loss_fn, loader, seed=5, lr=0.1, epochs=2)
    assert report.tasks["task-0"].losses == expected.losses
    exact.assert_same_state(zoo.state(model), zoo.state(expected_model))


def test_everything_by_default():
    """No devices, no seed, no partitioner, a plain EmulatedDevice: the ten lines of the README."""
    model, loss_fn, loader = mlp()
    orchestra = ModelOrchestrator([ModelTask(model, loss_fn, loader, 0.1, 2)])
    orchestra.verbose = 0
    report = orchestra.train_models()
    expected_model, loss_fn, loader = mlp()
    seed = report.tasks["task-0"].seed
    expected = reference.train(expected_model, loss_fn, loader, seed=seed, lr=0.1, epochs=2)
    assert report.tasks["task-0"].losses == expected.losses
    exact.assert_same_state(zoo.state(model), zoo.state(expected_model))
    assert report.makespan_s > 0


def test_link_speed_changes_no_bit():
    task, model = exact.task_of("mlp", num_batches=zoo.NUM_SHORT)
    report = exact.silent([task], devices=[EmulatedDevice("8MiB", bandwidth=50_000_000)]).train_models()
    exact.assert_as_expected(report, "mlp", model, expected_of_few("mlp"))
    assert report.devices[0].loaded_bytes > 0
    assert report.devices[0].stored_bytes > 0
