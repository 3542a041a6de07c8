"""A module's own forward as layers: the same bits, gradients and random draws, for each form of a batch."""

import copy
import functools
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hydra_engine import Model
from hydra_engine.capture import called_with, layers_of
from tests.refused import refused


def leaves(output):
    return [each for each in torch.utils._pytree.tree_leaves(output) if isinstance(each, torch.Tensor)]


def assert_same(module, *batches):
    """Outputs, gradients and buffers of the layers are those of the forward, in both modes; returns the layers."""
    layers = layers_of(module, batches[0])
    for training in (True, False):
        nets = [copy.deepcopy(module).train(training) for _ in range(2)]
        run = nn.Sequential(*layers_of(nets[1], batches[0]))
        for batch in batches:
            results = []
            for net in nets:
                net.load_state_dict(module.state_dict())
                net.zero_grad()
                args, kwargs = called_with(batch)
                torch.manual_seed(1)
                outputs = leaves(run(batch) if net is nets[1] else net(*args, **kwargs))
                drawn = torch.rand(())
                sum(each.square().sum() for each in outputs if each.requires_grad).backward()
                gradients = [each.grad for each in net.parameters()]
                results.append([*outputs, drawn, *net.buffers(), *gradients])
            for a, b in zip(*results, strict=True):
                assert (a is None and b is None) or torch.equal(a, b)
    return layers


class Residual(nn.Module):
    """In-place activation, a skip connection, functional dropout, a parameter of its own, a flatten."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Linear(4 * 36, 5)
        self.again = nn.Conv2d(4, 4, 3, padding=1)
        self.scale = nn.Parameter(torch.full((4, 1, 1), 0.5))

    def forward(self, x):
        x = F.relu_(self.norm(self.conv(x)))
        x = x + F.dropout(self.again(x) * self.scale, 0.3, self.training)
        return self.head(x.flatten(1))


@pytest.mark.rest
def test_functions_parameters_and_in_place_activations():
    layers = assert_same(Residual(), torch.randn(2, 3, 6, 6), torch.randn(5, 3, 6, 6))
    assert len(layers) >= 3


class Up(nn.Module):
    """A U-Net: values of the way down are gotten on the way up."""

    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(c, 4, 3, padding=1) for c in (1, 4, 4))
        self.up = nn.ModuleList(nn.Conv2d(8, 4, 3, padding=1) for _ in range(2))
        self.out = nn.Conv2d(4, 2, 1)

    def forward(self, x):
        kept = []
        for conv in self.down:
            x = F.relu(conv(x))
            kept.append(x)
            x = F.max_pool2d(x, 2)
        for conv in self.up:
            x = F.interpolate(x, scale_factor=2)
            x = conv(torch.cat([x, kept.pop()], 1))
        return {"mask": self.out(x), "size": x.shape[-1]}


def test_values_that_skip_layers():
    assert_same(Up(), torch.randn(2, 1, 16, 16), torch.randn(3, 1, 32, 32))


class Masked(nn.Module):
    """Decides by the values of the batch, as attention does that needs no mask."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, ids, mask=None, *, twice=False):
        x = self.embed(ids)
        if mask is not None and not mask.all():
            x = x * mask.unsqueeze(-1)
        for k in range(int(ids.max()) // 8):
            x = x + k + 1
        return self.out(x) * (2 if twice else 1)


def test_decisions_by_the_values_of_the_batch():
    ids = torch.tensor([[1, 2, 3]])
    whole, padded = torch.ones(1, 3), torch.tensor([[1.0, 1.0, 0.0]])
    assert_same(
        Masked(),
        {"ids": ids, "mask": whole},
        {"ids": ids, "mask": padded},
        {"ids": ids + 5, "mask": whole},
        {"ids": ids, "twice": True},
        {"ids": torch.tensor([[1], [8]])},
    )
    assert_same(Masked(), (ids, padded), (ids, whole), (ids,))


class Gate(nn.Module):
    """A branch on a value that is computed, within a module of its own."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.a(x)
        return self.b(x) if x.sum() > 0 else x


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.gates, self.head = nn.Linear(4, 4), nn.ModuleList([Gate(), Gate()]), nn.Linear(4, 2)

    def forward(self, x):
        x = self.stem(x)
        for gate in self.gates:
            x = gate(x)
        return self.head(x)


def test_a_module_with_a_branch_is_one_layer():
    layers = assert_same(Gated(), torch.randn(3, 4), torch.randn(2, 4))
    assert len(layers) == 4


class Packed(nn.LSTM):
    """Asks for lengths, which are none of them 0."""

    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(super().forward(packed)[0], batch_first=True)[0]


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rnn, self.out = nn.Embedding(9, 4), Packed(4, 3, batch_first=True), nn.Linear(3, 2)

    def forward(self, ids, lengths):
        return self.out(self.rnn(self.embed(ids), lengths)).mean(1)


class Chosen(nn.Module):
    """Draws by probabilities that the batch gives, whose sum is not 0."""

    def forward(self, h, probabilities):
        return h * torch.distributions.Categorical(probabilities).sample()[:, None]


class Choosing(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.choice, self.b = nn.Linear(4, 3), Chosen(), nn.Linear(3, 2)

    def forward(self, x, probabilities):
        return self.b(self.choice(self.a(x), probabilities + 1))


class Sampled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, mean, scale):
        return self.linear(torch.distributions.Normal(mean, scale * self.linear.weight.norm()).rsample())


class Variational(nn.Module):
    """Draws by a scale that it computes, which is larger than 0."""

    def __init__(self):
        super().__init__()
        self.mean, self.scale, self.sample, self.out = *(nn.Linear(4, 3) for _ in range(2)), Sampled(), nn.Linear(3, 2)

    def forward(self, x):
        return self.out(self.sample(self.mean(x), self.scale(x).exp()))


@pytest.mark.parametrize(
    ("make", "batches"),
    [
        (Tagger, [(torch.ones(3, t, dtype=torch.long), torch.tensor([t, 2, 1])) for t in (4, 6)]),
        (Choosing, [(torch.ones(n, 4), torch.rand(n, 5)) for n in (3, 2)]),
        (Variational, [torch.ones(3, 4), torch.ones(2, 4)]),
    ],
)
def test_a_module_that_asks_for_values_is_recorded_on_those_of_the_batch(make, batches):
    assert_same(make(), *batches)


def test_a_batch_without_values_is_recorded_on_those_of_the_first():
    ids, lengths = torch.ones(4, 3, dtype=torch.long), torch.tensor([3, 2, 1, 3])
    programs = Model(Tagger(), example=(ids, lengths))[0].place.programs
    program, _ = programs.find((ids[:2].to("meta"), lengths[:2].to("meta")), programs.flags(None))
    assert any(["rnn"] in piece.held for piece in program.pieces)
    with pytest.raises(ValueError, match=r"module rnn of the model \(Packed\).*does not run on zeros .*give Model"):
        Model(Tagger(), example=(ids.to("meta"), lengths.to("meta")))


def test_a_branch_of_the_model_itself_is_refused_with_its_line():
    with refused(says="test_layers.py: self.b(x) x.sum()"):
        Model(Gate(), example=torch.ones(2, 4))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3  # not what autograd would derive


class Custom(nn.Module):
    def forward(self, x):
        return Doubled.apply(x)


def test_a_function_with_a_backward_of_its_own():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.custom, self.b = nn.Linear(4, 4), Custom(), nn.Linear(4, 4)

        def forward(self, x):
            return self.b(self.custom(self.a(x)) + 1)

    assert_same(Net(), torch.randn(3, 4))


def test_names_and_parameters_are_the_modules_own():
    net = Residual()
    model = Model(net, example=torch.randn(2, 3, 6, 6))
    assert list(model.state_dict()) == list(net.state_dict())
    assert all(a is b for a, b in zip(model.parameters(), net.parameters(), strict=True))
    held = {id(each) for layer in model for each in nn.Module.parameters(layer)}
    assert held == {id(each) for each in net.parameters()}


def test_conversion_changes_nothing_of_the_module():
    net, state = Residual().eval(), torch.get_rng_state()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    Model(net, example=torch.randn(0, 3, 6, 6))
    assert torch.equal(state, torch.get_rng_state())
    assert not any(module.training for module in net.modules())
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())


def test_weights_and_example_on_meta():
    with torch.device("meta"):
        net, example = Residual(), torch.empty(2, 3, 6, 6)
    assert len(Model(net, example=example)) >= 3


class Optional(nn.Module):
    """A batch may lack what one of its modules is for; a loop is as long as the batch."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x, mask=None):
        h = self.a(x)
        if mask is not None:
            h = self.b(h) * mask
        for k in range(x.shape[0]):
            h = torch.tanh(self.c.weight.T @ self.c(h).T).T + k
        return self.c(h)


def test_a_batch_that_runs_fewer_or_more_modules_than_the_first():
    x, mask = torch.randn(3, 4), torch.ones(3, 1)
    assert_same(Optional(), {"x": x, "mask": mask}, {"x": x}, {"x": x[:1], "mask": mask[:1]}, {"x": x[:1]})
    assert_same(Optional(), {"x": x}, {"x": x, "mask": mask}, {"x": x[:2]})


class Swapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, swap=False):
        return self.a(self.b(x)) if swap else self.b(self.a(x))


def test_a_batch_that_needs_weights_in_another_order_is_refused_with_its_line():
    model = Model(Swapped(), example=(torch.ones(2, 4),))
    with refused(layer=" a ", says="test_layers.py: uses"):
        model((torch.ones(2, 4), True))


def test_a_copy_is_of_a_module_of_its_own():
    first = Model(Residual(), example=torch.randn(2, 3, 6, 6))
    second = copy.deepcopy(first)
    second.eval()
    x = torch.randn(3, 3, 6, 6)
    assert first.source.training
    assert not second.source.training
    with torch.no_grad():
        second.source.scale.mul_(2)
        assert torch.equal(second(x), second.source(x))
        first.eval()
        assert torch.equal(first(x), first.source(x))
        assert not torch.equal(first(x), second(x))
    assert {id(each) for each in second.parameters()}.isdisjoint(map(id, first.parameters()))


def test_what_was_pickled_is_converted_by_its_first_inputs():
    first = Model(Residual(), example=torch.randn(2, 3, 6, 6)).eval()
    second = pickle.loads(pickle.dumps(first))
    x = torch.randn(3, 3, 6, 6)
    assert second.is_pending
    assert torch.equal(second(x), first(x))
    assert len(second) == len(first)


def test_a_module_without_example_is_converted_as_it_is_called():
    net, x = Residual().eval(), torch.randn(2, 3, 6, 6)
    assert torch.equal(Model(net)(x), net(x))


def with_scale(forward):
    """Gives the forward its second argument."""

    @functools.wraps(forward)
    def scaled(self, x):
        return forward(self, x, 2.0)

    return scaled


class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    @with_scale
    def forward(self, x, scale):
        return self.linear(x) * scale


@pytest.mark.rest
def test_a_decorator_may_give_the_forward_more_arguments():
    assert_same(Wrapped(), torch.randn(3, 4))


# Names.


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return x + self.down(F.relu(self.up(self.norm(x))))


class Around(nn.Module):
    """What two modules give is added to what they get."""

    def __init__(self):
        super().__init__()
        self.first, self.a, self.b, self.last = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        x = self.first(x)
        return self.last(x + self.b(self.a(x)))


class Products(nn.Module):
    """Two weights of its own, and nothing inside."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4, 4))

    def forward(self, x):
        return F.relu(x @ self.a) @ self.b


class Mixed(nn.Module):
    """Blocks in a list, weights of its own between two of them, an embedding whose weight is the head's too."""

    def __init__(self):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(10, 4), nn.ModuleList(Block() for _ in range(2))
        self.weight, self.products = nn.Parameter(torch.ones(4, 4)), Products()

    def forward(self, ids):
        x = self.blocks[0](self.embed(ids))
        x = self.products(self.blocks[1](F.relu(x @ self.weight)))
        return x @ self.embed.weight.T


@pytest.mark.parametrize(
    ("module", "batch", "names"),
    [
        (
            Mixed(),
            torch.ones(2, 3, dtype=torch.long),
            [
                "embed (Embedding)",
                "blocks.0 (Block)",
                "forward of Mixed between blocks.0 and blocks.1",
                "blocks.1 (Block)",
                "forward of products (Products)",
                "forward of products (Products)",
                "forward of Mixed after products",
            ],
        ),
        (Products(), torch.ones(2, 4), ["forward of Products", "forward of Products"]),
        (Around(), torch.ones(2, 4), ["first (Linear)", "a to b", "last (Linear)"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_layers_have_the_names_of_the_modules_that_run_in_them(module, batch, names):
    layers = layers_of(module, batch)
    assert [layer.place.name for layer in layers] == names
    assert all(layer.extra_repr() == name for layer, name in zip(layers, names, strict=True))
    model = Model(module, example=batch)
    assert [model.shown(key) for key in model._modules] == names
    assert [copy.deepcopy(model).shown(key) for key in model._modules] == names
