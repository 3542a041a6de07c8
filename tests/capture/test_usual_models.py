"""Models as people write them: each trains to the bits of plain PyTorch, or is refused by what may be done about it."""

import dataclasses
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from hydra_engine import Model, ModelTask
from hydra_engine.capture import called_with
from tests import exact, zoo
from tests.any_model import harness

# The check of a forward's code: in `make test` are the tests that carry `net`.
pytestmark = pytest.mark.rest


def batches(count=3):
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(4, 6, generator=generator), torch.randn(4, 6, generator=generator)) for _ in range(count)]


def task_of(module, data, loss_fn=F.mse_loss):
    return ModelTask(module, loss_fn, data, 0.1, name="t", seed=7)


def assert_trains(make, data=None, loss_fn=F.mse_loss, **options):
    """Train the module as it comes; returns the report."""
    data, nets = data or batches(), []
    for _ in range(2):
        torch.manual_seed(3)
        nets.append(make())
    optimizer, losses = torch.optim.SGD(nets[0].parameters(), lr=0.1), []
    torch.manual_seed(7)
    for inputs, target in data:
        args, kwargs = called_with(inputs)
        loss = loss_fn(nets[0](*args, **kwargs), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    report = exact.run([task_of(Model(nets[1], **options), data, loss_fn)])
    report.raise_failures()
    assert report.tasks["t"].losses == losses
    exact.assert_same_state(zoo.state(nets[1]), zoo.state(nets[0]))
    return report


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.more()

    def more(self):
        pass

    def forward(self, x):
        return self.b(self.a(x).relu())


class OnlyTrains(Two):
    def forward(self, x):
        if not self.training:
            raise NotImplementedError("use .export() to infer")
        return super().forward(x)


class Detector(Two):
    """Takes targets in training and gives a loss; without them, it gives what it finds in each sample."""

    def forward(self, x, targets=None):
        assert self.training == (targets is not None)
        found = super().forward(x)
        return {"loss": F.mse_loss(found, targets)} if self.training else [{"boxes": each} for each in found]


class Exports(Two):
    """Looks up in evaluation what is there after an export only."""

    def forward(self, x):
        return super().forward(x) * (1 if self.training else self.scales["exported"])


def the_loss(output, target):
    return output["loss"]


@pytest.mark.net
@pytest.mark.parametrize(
    ("make", "pack", "loss_fn"),
    [
        (OnlyTrains, lambda x, y: (x, y), F.mse_loss),
        (Detector, lambda x, y: ((x, y), y), the_loss),
        (Exports, lambda x, y: (x, y), F.mse_loss),
    ],
)
def test_what_the_forward_raises_in_eval_is_no_matter_for_training(make, pack, loss_fn):
    assert_trains(make, [pack(*batch) for batch in batches()], loss_fn)


def test_what_the_forward_raises_in_training_is_no_matter_for_predictions():
    module, data = Detector(), [x for x, _ in batches()]
    found = list(exact.orchestrator([task_of(Two(), batches())]).predict(module, data))
    module.eval()
    for outputs, x in zip(found, data, strict=True):
        assert all(torch.equal(a["boxes"], b["boxes"]) for a, b in zip(outputs, module(x), strict=True))


def test_a_mode_that_the_forward_raises_in_is_recorded_where_it_is_asked_for():
    with pytest.raises(NotImplementedError, match="to infer"):
        list(exact.orchestrator([task_of(Two(), batches())]).predict(OnlyTrains(), [x for x, _ in batches()]))


class Cache:
    """Keys and values for generating text."""

    def __init__(self, keys):
        self.keys = keys


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    cache: Cache | None = None


class InTuple(Two):
    def forward(self, x):
        return super().forward(x), Cache(x)


class InRecord(Two):
    def forward(self, x):
        return Output(super().forward(x), Cache(x))


@dataclasses.dataclass(frozen=True)
class Scaled:
    """Makes more of its fields as it is made, which must not be made again."""

    logits: torch.Tensor

    def __post_init__(self):
        object.__setattr__(self, "logits", self.logits * 2)


class InScaled(Two):
    def forward(self, x):
        return Scaled(super().forward(x))


class InDict(Two):
    def forward(self, x):
        return {"logits": super().forward(x), "inner": {"model": self, "kind": torch.float32, "cache": Cache(x)}}


def first(output, target):
    return F.mse_loss(output[0], target)


def logits(output, target):
    return F.mse_loss(output["logits"] if isinstance(output, dict) else output.logits, target)


@pytest.mark.net
@pytest.mark.parametrize(
    ("make", "loss_fn"), [(InTuple, first), (InRecord, logits), (InScaled, logits), (InDict, logits)]
)
def test_what_the_loss_does_not_read_need_not_be_a_tensor(make, loss_fn):
    assert_trains(make, loss_fn=loss_fn)


@pytest.mark.net
@pytest.mark.parametrize(
    ("make", "loss_fn", "place"),
    [
        (InTuple, lambda output, target: output[1].keys.mean(), r"output\[1\]"),
        (InRecord, lambda output, target: output.cache.keys.mean(), "output.cache"),
        (
            InDict,
            lambda output, target: next(output["inner"]["model"].parameters()).mean(),
            r"output\['inner'\]\['model'\]",
        ),
    ],
)
def test_a_loss_that_reads_what_is_no_tensor_is_refused_with_its_place(make, loss_fn, place):
    with pytest.raises(TypeError, match=rf"{place} of the model's own forward is a .*, which layers do not carry"):
        exact.run([task_of(make(), batches(), loss_fn)]).raise_failures()


def test_predictions_hold_records():
    module, data = InRecord(), [torch.randn(64, 6)]
    found = list(exact.orchestrator([task_of(Two(), batches())]).predict(module, data))
    assert torch.equal(found[0].logits, module(data[0]).logits)
    assert "is a Cache" in repr(found[0].cache)


def test_a_language_model_as_it_comes_returns_its_cache_in_a_tuple():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=9, n_embd=4, n_layer=2, n_head=2, n_positions=8, bos_token_id=0, eos_token_id=0
    )
    ids = torch.arange(8).reshape(2, 4)
    data = [({"input_ids": ids, "return_dict": False}, ids)] * 2
    assert_trains(
        lambda: transformers.GPT2LMHeadModel(config),
        data,
        lambda output, y: F.cross_entropy(output[0].flatten(0, 1), y.flatten()),
    )


def block():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))


class ByTask(nn.Module):
    """A body, and a head for each task; the first batch runs one of them."""

    def __init__(self):
        super().__init__()
        self.body, self.heads = nn.Linear(6, 6), nn.ModuleDict({"a": nn.Linear(6, 6), "b": block()})

    def forward(self, x, task):
        return self.heads[task](self.body(x))


class ByLanguage(nn.Module):
    """Encoders and decoders by language around layers that all share."""

    def __init__(self):
        super().__init__()
        self.encoders = nn.ModuleDict({each: block() for each in "ab"})
        self.shared = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        self.decoders = nn.ModuleDict({each: block() for each in "ab"})

    def forward(self, x, languages):
        return self.decoders[languages[1]](self.shared(self.encoders[languages[0]](x)))


class Adapted(nn.Module):
    """An adapter by task within each block, and one whose own branch is by a value that it computes."""

    class Gate(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x):
            x = self.a(x)
            return self.b(x) if x.sum() > 0 else x

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.adapters = block(), nn.ModuleDict({"a": nn.Linear(6, 6), "b": Adapted.Gate()})

        def forward(self, x, task):
            return self.adapters[task](self.linear(x)) + x

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(2))
        self.out = nn.Linear(6, 6)

    def forward(self, x, task):
        for each in self.blocks:
            x = each(x, task)
        return self.out(x)


class Swaps(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = block(), block()

    def forward(self, x, swaps):
        return self.a(self.b(x)) if swaps else self.b(self.a(x))


class HasSwaps(Two):
    def more(self):
        self.inner = Swaps()

    def forward(self, x, swaps):
        return self.b(self.inner(self.a(x), swaps))


def chosen(choices):
    return [((x, choice), y) for (x, y), choice in zip(batches(len(choices)), choices, strict=True)]


@pytest.mark.parametrize(
    ("make", "choices"),
    [
        pytest.param(ByTask, "abab", marks=pytest.mark.net),
        (ByLanguage, ["ab", "ba", "aa", "bb"]),
        (Adapted, "abba"),
    ],
)
def test_batches_may_choose_between_branches(make, choices):
    assert_trains(make, chosen(choices))


@pytest.mark.net
def test_modules_that_change_places_are_refused_and_train_as_one_layer():
    data = chosen([False, True, False])
    with pytest.raises(ValueError, match=r"keep inner as one layer: Model\(module, whole=\['inner'\]\)"):
        exact.run([task_of(HasSwaps(), data)]).raise_failures()
    assert_trains(HasSwaps, data, whole=["inner"])
    with pytest.raises(ValueError, match="put the modules that it chooses between into one module"):
        exact.run([task_of(Swaps(), data)]).raise_failures()


def test_names_of_modules_to_keep_whole_are_checked():
    for name in ("heads", "heads.c"):
        with pytest.raises(ValueError, match=rf"whole: '{name}', expected a module with a forward, .*body, heads.a"):
            Model(ByTask(), whole=[name])
    with pytest.raises(ValueError, match="whole: '0', expected none where layers are given"):
        Model(block(), whole=["0"])
    with pytest.raises(ValueError, match="expected none for a Model"):
        Model(Model(ByTask()), whole=["body"])
    assert Model(Model(ByTask(), whole=["body"])).whole == ("body",)


class Leaves(nn.Module):
    """Leaves a part of the loss in an attribute, which is not there before."""

    def __init__(self):
        super().__init__()
        self.linear, self.shape = nn.Linear(6, 6), None

    def forward(self, x):
        self.shape, y = x.shape, self.linear(x)
        self.leave(y.square().mean())
        return y

    def leave(self, value):
        self.aux_loss = value

    def left(self):
        return self.aux_loss


class HasAuxiliary(Two):
    part = Leaves

    def more(self):
        self.expert = self.part()

    def forward(self, x):
        return self.b(self.expert(self.a(x)))


class Returns(HasAuxiliary):
    """Does what the refusal says."""

    def forward(self, x):
        return super().forward(x), self.expert.left()


def test_a_part_of_the_loss_that_is_returned_too_is_exact():
    assert_trains(Returns, loss_fn=lambda output, y: F.mse_loss(output[0], y) + output[1])


def test_a_loss_that_reads_a_setting_of_a_model_that_leaves_something_is_exact():
    module = HasAuxiliary()
    module.expert(torch.ones(1, 6))
    assert_trains(HasAuxiliary, loss_fn=lambda y, x: F.mse_loss(y, x) / module.a.in_features)


class GateOfMost(nn.Module):
    """Decides by a value that it computes, and has most of the weights, in modules of its own."""

    def __init__(self):
        super().__init__()
        self.a, self.b = block(), block()

    def forward(self, x):
        x = self.a(x)
        return self.b(x) if x.sum() > 0 else x


class Recurrent(nn.Module):
    """Makes a tensor of a size that depends on values, in a module that is most of the model."""

    def __init__(self):
        super().__init__()
        self.embed, self.rnn = nn.Linear(6, 8), nn.LSTM(8, 6, batch_first=True)

    def forward(self, x):
        packed = nn.utils.rnn.pack_padded_sequence(self.embed(x)[None], torch.tensor([len(x)]), batch_first=True)
        return nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0][0]


class DropsLayers(nn.Module):
    """Leaves layers out by chance, in training."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(block() for _ in range(3))

    def forward(self, x):
        for each in self.layers:
            if not (self.training and torch.rand([]) < 0.5):
                x = each(x)
        return x


class Around(nn.Module):
    part: type

    def __init__(self):
        super().__init__()
        self.part_of_most, self.out = self.part(), nn.Linear(6, 6)

    def forward(self, x):
        return self.out(self.part_of_most(x * 2))


@pytest.mark.parametrize(
    ("part", "line"),
    [
        pytest.param(GateOfMost, r"x.sum\(\) > 0", marks=pytest.mark.net),
        (Recurrent, "pack_padded_sequence"),
        (DropsLayers, "torch.rand"),
    ],
)
def test_a_module_with_most_of_the_weights_is_one_layer_and_the_report_says_why(part, line):
    report = assert_trains(type("Net", (Around,), {"part": part}), batches(6))
    named = rf"part_of_most \({part.__name__}\), with \d\d% of .* is one layer: test_usual_models.py:\d+: .*{line}"
    assert any(re.search(named, each) for each in report.messages)


class DropsPath(nn.Module):
    """A block that is left out by chance: stochastic depth."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        if self.training and torch.rand(1) < 0.5:
            return x
        return x + F.dropout(self.linear(x), 0.2, self.training)


class DropsInPlace(DropsPath):
    """Changes what it got, or not."""

    def forward(self, x):
        return F.relu_(x) if self.training and torch.rand(1).item() < 0.5 else self.linear(x)


class Repeats(DropsPath):
    def forward(self, x):
        for _ in range(int(torch.randint(0, 3, (1,)))):
            x = (x + self.linear(x)) / 3
        return x


@pytest.mark.parametrize("part", [pytest.param(DropsPath, marks=pytest.mark.net), DropsInPlace, Repeats])
def test_a_block_that_decides_by_a_number_it_draws_is_one_layer(part):
    class Net(Two):
        def more(self):
            self.blocks = nn.ModuleList(part() for _ in range(3))

        def forward(self, x):
            x = self.a(x)
            for each in self.blocks:
                x = x * 0.5 + each(x + 1)
            return self.b(x)

    case = harness.Case("Net", Net, batches, batches, F.mse_loss)
    harness.check(case, harness.each_layer)
    assert_trains(Net, batches(6))


def test_a_number_that_the_model_itself_draws_and_decides_by_is_refused_with_its_line():
    with pytest.raises(ValueError, match=r"test_usual_models.py:\d+: .*torch.rand.* put that part into a module"):
        Model(DropsLayers(), example=batches()[0][0])
    assert_trains(type("Net", (Around,), {"part": DropsLayers}))


class Features(nn.Module):
    """Takes features by hooks, and reads them in the same forward."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.Tanh())
        self.out, self.features = nn.Linear(6, 6), {}
        self.hook()

    def forward(self, x):
        y = self.net(x)
        return self.out(y) + sum(self.features.values())


class OverSelf(Features):
    def hook(self):
        def keep(key):
            def hook(module, inputs, output):
                self.features[key] = output

            return hook

        for key in (1, 3):
            self.net[key].register_forward_hook(keep(key))


class OverList(Features):
    def hook(self):
        self.list = features = []
        self.net[1].register_forward_hook(lambda module, inputs, output: features.append(output))

    def forward(self, x):
        y = self.out(self.net(x)) + self.list[-1]
        self.list.clear()
        return y


class OnOwn(OverSelf):
    """The hook is on a module of the user's own, and on the inputs of another."""

    def hook(self):
        self.inner = Leaves()
        self.inner.register_forward_hook(lambda module, inputs, output: self.features.update(inner=output))
        self.out.register_forward_pre_hook(lambda module, inputs: self.features.update(out=inputs[0]))

    def forward(self, x):
        y = self.out(self.net(self.inner(x)))
        return y + self.features["inner"] * self.features["out"]


class NotRead(OverList):
    """The list is for people to look at."""

    def forward(self, x):
        return self.out(self.net(x))


@pytest.mark.parametrize("make", [pytest.param(OverSelf, marks=pytest.mark.net), OverList, OnOwn, NotRead])
def test_features_that_hooks_take_are_those_of_the_same_forward(make):
    assert_trains(make, [*batches(), *((x[:2], y[:2]) for x, y in batches())])


class Late(OverSelf):
    """Reads what the forward before has left."""

    def forward(self, x):
        late = self.features.get(1, 0.0)
        return self.out(self.net(x)) + late


class WholeOverSelf(Features):
    """A hook in a module that is one layer closes over that."""

    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.features = nn.Linear(6, 6), []
            self.linear.register_forward_hook(lambda module, inputs, output: self.features.append(output))

        def forward(self, x):
            y = self.linear(x)
            return y + self.features.pop() if y.sum() > 0 else y - self.features.pop()

    def hook(self):
        self.features = {"none": 0.0}
        self.part = self.Part()

    def forward(self, x):
        return super().forward(self.part(x))


class AllOverSelf(OverSelf):
    """All of it is one layer; what hooks take has no graph, so that a copy would compute with an old one."""

    def hook(self):
        def keep(module, inputs, output):
            self.features[0] = output.detach()

        self.net[1].register_forward_hook(keep)

    def forward(self, x):
        y = super().forward(x)
        return y if y.sum() < 1e9 else -y


class InChain(nn.Module):
    """Layers are its children."""

    def __init__(self):
        super().__init__()
        self.first, self.second = AllOverSelf(), nn.Linear(6, 6)

    def forward(self, x):
        return self.second(self.first(x))


class InLoss(nn.Module):
    """A perceptual loss: a hook made by a method fills an attribute."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.net, self.features = nn.Sequential(nn.Linear(6, 6), nn.ReLU()).requires_grad_(False), {}
        self.net[1].register_forward_hook(self.hook(1))

    def hook(self, key):
        def keep(module, inputs, output):
            self.features[key] = output

        return keep

    def grab(self, x):
        self.net(x)
        return self.features[1]

    def forward(self, output, target):
        return F.mse_loss(output, target) + F.l1_loss(self.grab(output), self.grab(target))


class CountsCalls(Features):
    """A hook counts its calls, and the forward goes by their number later on."""

    def hook(self):
        self.counter = counter = {"n": 0}

        def count(module, inputs, output):
            counter["n"] += 1

        self.net[1].register_forward_hook(count)

    def forward(self, x):
        return self.out(self.net(x)) * (2 if self.counter["n"] > 30 else 1)


class NotesShapes(NotRead):
    """Shapes that a copy of the model would note are lost."""

    def hook(self):
        self.list = shapes = []
        self.net[1].register_forward_hook(lambda module, inputs, output: shapes.append(tuple(output.shape)))


@pytest.mark.parametrize(
    ("make", "name"), [pytest.param(CountsCalls, "counter", marks=pytest.mark.net), (NotesShapes, "list")]
)
def test_a_hook_that_changes_plain_values_with_each_call_is_refused(make, name):
    with pytest.raises(ValueError, match=f"changes {name}"):
        exact.run([task_of(make(), batches())]).raise_failures()


@pytest.mark.net
def test_features_that_layers_would_not_take_are_refused():
    with pytest.raises(ValueError, match=r"late.* uses a tensor that no call of torch's Python functions made"):
        exact.run([task_of(Late(), batches())]).raise_failures()


@pytest.mark.net
@pytest.mark.parametrize("make", [WholeOverSelf, AllOverSelf, InChain, OverSelf])
def test_hooks_of_copies_close_over_the_copies(make):
    whole = {"whole": [""]} if make is OverSelf else {}
    assert_trains(make, **whole)


@pytest.mark.net
def test_hooks_of_a_loss_close_over_its_copy():
    expected = assert_trains(Two, loss_fn=InLoss()).tasks["t"].losses
    assert expected != assert_trains(Two).tasks["t"].losses


class Encodes(Two):
    """Takes two arguments, and returns a distribution, whose parameters torch checks by their values."""

    def forward(self, x, y):
        # Dynamo, once it was used in the process, lets distributions check nothing unless asked.
        found = torch.distributions.Normal(self.a(x + y), F.softplus(self.b(x)) + 1e-3, validate_args=True)
        return found.rsample(), torch.distributions.Independent(found, 1)


def divergence(output, target):
    prior = torch.distributions.Independent(torch.distributions.Normal(torch.zeros(6), 1.0), 1)
    return F.mse_loss(output[0], target) + torch.distributions.kl_divergence(output[1], prior).mean()


class Freezes(Two):
    """Takes the gradient of one part of its loss without that of some weights."""

    def forward(self, x):
        y = self.a(x)
        self.b.requires_grad_(False)
        alone = self.b(y).square().mean()
        self.b.requires_grad_(True)
        return alone + self.b(y.detach()).abs().mean()


class HasFreezes(Two):
    def more(self):
        self.part = Freezes()

    def forward(self, x):
        return self.part(self.a(x)) + self.b(x).mean()


def to_itself(output, target):
    return output


def in_pairs(pack):
    return [(pack(x, y), y) for x, y in batches()]


@pytest.mark.net
@pytest.mark.parametrize(
    ("make", "data", "loss_fn"),
    [
        (Encodes, in_pairs(lambda x, y: (x, y)), divergence),
        (Encodes, in_pairs(lambda x, y: {"x": x, "y": y}), divergence),
        (Freezes, batches(), to_itself),
    ],
)
def test_a_forward_that_cannot_be_cut_is_one_layer_and_the_report_says_why(make, data, loss_fn):
    [message] = assert_trains(make, data, loss_fn).messages
    assert re.search(
        rf"the model \({make.__name__}\) is one layer, .* cannot be cut: test_usual_models.py:\d+: ", message
    )
    assert not assert_trains(make, data, loss_fn, whole=[""]).messages


class OfPacked(Two):
    def more(self):
        self.rnn = nn.GRU(6, 6)

    def forward(self, packed):
        return self.a(self.rnn(packed)[1][0])


@pytest.mark.net
def test_batches_of_packed_sequences_train_one_layer():
    data = [(pack_sequence([x[:k, :].expand(k, 6) for k in (4, 3, 1, 1)]), y) for x, y in batches()]
    [message] = assert_trains(OfPacked, data).messages
    assert "what it is given needs values" in message


@pytest.mark.net
def test_a_module_that_freezes_weights_for_a_while_is_one_layer():
    assert_trains(HasFreezes, loss_fn=to_itself)


class GateWithDropout(nn.Module):
    """Decides by a value that it computes, so that it runs to be recorded, and draws."""

    def __init__(self):
        super().__init__()
        self.linear, self.dropout = nn.Linear(6, 6), nn.Dropout(0.5)

    def forward(self, x):
        x = self.dropout(self.linear(x))
        return x if x.sum() > 0 else -x


class HasDroppingGate(Two):
    def more(self):
        self.gate = GateWithDropout()

    def forward(self, x):
        return self.b(self.gate(self.a(x)).relu())


@pytest.mark.net
def test_a_batch_of_another_shape_is_recorded_without_the_tasks_random_numbers():
    assert_trains(HasDroppingGate, [(x[:n], y[:n]) for n, (x, y) in zip((4, 3, 2), batches(), strict=True)])
