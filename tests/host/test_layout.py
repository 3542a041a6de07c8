"""Where parameters lie: aligned, each owned once, any partition copies exactly what its shards hold."""

import copy
import random

import pytest
import torch
from torch import nn

from hydra_engine import Model
from hydra_engine.data.memory import copy_of
from hydra_engine.host.layout import ModelLayout, Structure
from hydra_engine.host.pool import HostPool
from tests import zoo

CPU = torch.device("cpu")


class Odd(nn.Module):
    """Parameters of every shape and layout that a copy could get wrong."""

    def __init__(self):
        super().__init__()
        self.transposed = nn.Parameter(torch.randn(5, 3).t())
        self.sliced = nn.Parameter(torch.randn(4, 6)[:, 1:5:2])
        self.channels_last = nn.Parameter(torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last))
        self.scalar = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.randn(0, 3))
        self.single = nn.Parameter(torch.randn(1, 7, 1)[:, ::2])
        self.float64 = nn.Parameter(torch.randn(3, dtype=torch.float64))
        self.integers = nn.Parameter(torch.arange(7), requires_grad=False)
        self.register_parameter("absent", None)
        self.register_buffer("counter", torch.tensor(3))
        self.register_buffer("mask", torch.rand(3, 4) > 0.5)
        self.register_buffer("nothing", None)

    def forward(self, x):
        return x


def random_layers(rng):
    """Layers of all sorts; some weights tied, some frozen."""
    torch.manual_seed(rng.randrange(1000))
    makers = [
        lambda: nn.Linear(6, 6),
        lambda: nn.Linear(6, 6, bias=False),
        lambda: nn.BatchNorm1d(6),
        lambda: nn.ReLU(),
        lambda: Odd(),
        lambda: zoo.Lstm(6, 6),
        lambda: nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6)),
    ]
    layers = [nn.Linear(6, 6), *(rng.choice(makers)() for _ in range(rng.randint(1, 8)))]
    linears = [module for layer in layers for module in layer.modules() if isinstance(module, nn.Linear)]
    for linear in linears[1:]:
        if rng.random() < 0.3:
            linear.weight = rng.choice(linears).weight
    for layer in layers:
        if rng.random() < 0.2:
            layer.requires_grad_(False)
    if rng.random() < 0.2:  # a layer that runs twice
        layers.append(rng.choice(layers))
    return layers


def layout_of(layers, loss=None):
    return ModelLayout(Model(layers), loss)


def random_boundaries(rng, num_layers):
    cuts = rng.sample(range(1, num_layers), rng.randint(0, num_layers - 1)) if num_layers > 1 else []
    return [*sorted(cuts), num_layers]


def held_by(layers, shard):
    """Ids of the parameters of the shard's layers."""
    return {id(p) for layer in layers[shard.first : shard.last] for p in layer.parameters()}


@pytest.fixture(params=range(12))
def case(request):
    """Random layers, their layout, and a random partition."""
    rng = random.Random(request.param)
    layers = random_layers(rng)
    layout = layout_of(layers)
    return layers, layout, layout.shards(random_boundaries(rng, len(layers)))


class TestLayout:
    def test_every_parameter_has_one_slot_and_every_buffer_is_found_once(self, case):
        layers, layout, _ = case
        expected = list(nn.ModuleList(layers).parameters())
        assert [id(slot.parameter) for slot in layout.slots] == [id(parameter) for parameter in expected]
        assert [slot.index for slot in layout.slots] == list(range(len(expected)))
        trainable = [id(parameter) for parameter in expected if parameter.requires_grad]
        assert [id(slot.parameter) for slot in layout.trainable_slots()] == trainable
        assert [id(buffer) for buffer in layout.buffers] == [id(b) for b in nn.ModuleList(layers).buffers()]

    def test_slots_are_aligned_and_apart(self, case):
        _, layout, _ = case
        for kind in (True, False):
            end = 0
            for slot in (slot for slot in layout.slots if slot.trainable == kind):
                assert slot.offset % 64 == 0
                assert slot.offset >= end, "slots overlap, or are out of order"
                end = slot.offset + slot.num_bytes
            assert end <= layout.num_bytes[kind]

    def test_names_are_the_models(self):
        model, _, _ = zoo.gpt()
        layout = ModelLayout(Model(model), None)
        assert [slot.name for slot in layout.slots] == [name for name, _ in model.named_parameters()]

    def test_offsets_are_the_drawing(self):
        #   trainable   |weight 40 B |bias 8 B |              |tied weight|
        #               0            64        128
        #   frozen                              |weight 8 B |bias 8 B|
        #                                       0           64       128
        first, frozen, last = nn.Linear(5, 2), nn.Linear(1, 2).requires_grad_(False), nn.Linear(5, 2, bias=False)
        last.weight = first.weight
        layout = layout_of([first, frozen, last])
        assert [(slot.name, slot.trainable, slot.offset) for slot in layout.slots] == [
            ("0.weight", True, 0),
            ("0.bias", True, 64),
            ("1.weight", False, 0),
            ("1.bias", False, 64),
        ]
        assert layout.num_bytes == {True: 128, False: 128}
        lower, upper = layout.shards([1, 3])
        assert (lower.slots, lower.owned, lower.borrowed, lower.upper) == ((0, 1), (0, 1), {}, {0: 1})
        assert (upper.slots, upper.owned, upper.borrowed, upper.upper) == ((0, 2, 3), (), {0: 0}, {})
        assert (lower.needs, upper.needs) == ((0,), (0,))
        assert (lower.slab_bytes, upper.slab_bytes) == (128, 192)

    def test_loss_belongs_to_the_last_shard(self):
        loss = nn.CrossEntropyLoss(weight=torch.ones(2))
        layout = layout_of([nn.Linear(2, 2), nn.BatchNorm1d(2)], loss)
        first, last = layout.shards([1, 2])
        weight = next(k for k, buffer in enumerate(layout.buffers) if buffer is loss.weight)
        assert weight in last.buffers
        assert weight not in first.buffers
        assert len(last.buffers) == 4


class TestShards:
    def test_layers_are_covered_once_in_order_and_shards_hold_exactly_what_their_layers_do(self, case):
        layers, layout, shards = case
        assert [k for shard in shards for k in range(shard.first, shard.last)] == list(range(len(layers)))
        assert [shard.index for shard in shards] == list(range(len(shards)))
        assert [shard.is_first for shard in shards] == [shard.index == 0 for shard in shards]
        for shard in shards:
            assert {id(layout.slots[index].parameter) for index in shard.slots} == held_by(layers, shard)
            buffers = {id(b) for layer in layers[shard.first : shard.last] for b in layer.buffers()}
            assert {id(layout.buffers[index]) for index in shard.buffers} == buffers
            tensors = [layout.buffers[index] for index in shard.buffers]
            assert shard.buffer_bytes == sum(-(-tensor.nbytes // 64) * 64 for tensor in tensors)

    def test_every_trainable_parameter_is_updated_by_its_lowest_shard(self, case):
        layers, layout, shards = case
        owned = [index for shard in shards for index in shard.owned]
        assert sorted(owned) == [slot.index for slot in layout.trainable_slots()]
        for slot in layout.trainable_slots():
            holders = [shard.index for shard in shards if id(slot.parameter) in held_by(layers, shard)]
            [owner] = [shard.index for shard in shards if slot.index in shard.owned]
            assert owner == holders[0]
            assert [shard.index for shard in shards if slot.index in shard.borrowed] == holders[1:]
            for lower, upper in zip(holders, [*holders[1:], None], strict=True):
                assert shards[lower].upper.get(slot.index) == upper, "gradients go down from holder to holder"
        for shard in shards:
            trainable = [index for index in shard.slots if layout.slots[index].trainable]
            owners = {s.index for s in shards for index in trainable if index in s.owned}
            assert list(shard.needs) == sorted(owners), "a shard needs the owners of what it holds, and nothing else"

    def test_pieces_bring_exactly_the_shards_parameters(self, case):
        _, layout, shards = case
        values = {slot.index: slot.parameter.detach().clone() for slot in layout.slots}
        pool = HostPool(layout)
        pool.open()
        for shard in shards:
            slab = torch.UntypedStorage(shard.slab_bytes + 64)
            flat = torch.empty(0, dtype=torch.uint8).set_(slab, 0, (shard.slab_bytes + 64,), (1,)).fill_(0xA5)
            ends = 0
            for piece in sorted(shard.pieces, key=lambda piece: piece.target):
                assert piece.target >= ends, "pieces overlap in the slab"
                ends = piece.target + piece.num_bytes
                assert piece.trainable == (piece.target < shard.own_bytes)
                for start, source in pool.sources(piece):
                    flat[piece.target + start :][: len(source)] = source
            assert ends <= shard.slab_bytes
            assert (flat[shard.slab_bytes :] == 0xA5).all()
            for index, offset in shard.offsets.items():
                slot = layout.slots[index]
                view = slot.view(slab, offset)
                assert view.data_ptr() % 64 == slot.parameter.data_ptr() % 64
                assert torch.equal(view, values[index])
                assert view.dtype == slot.parameter.dtype
                assert view.stride() == slot.parameter.stride()
        pool.close()

    def test_own_parameters_are_one_copy_for_each_kind_in_slabs_that_are_no_larger_than_they_are(self, case):
        layers, layout, shards = case
        for shard in shards:
            lower = {id(p) for layer in layers[: shard.first] for p in layer.parameters()}
            own = [index for index in shard.slots if id(layout.slots[index].parameter) not in lower]
            kinds = {layout.slots[index].trainable for index in own if layout.slots[index].num_bytes}
            assert len(shard.pieces) == len(kinds) + len(shard.slots) - len(own)
            sizes = [layout.slots[index].num_bytes for index in shard.slots]
            assert shard.slab_bytes == sum(-(-size // 64) * 64 for size in sizes)


def bound(layers, layout):
    """A structure with copies of the originals' values."""
    structure = Structure(layout, CPU)
    structure.bind(
        {slot.index: copy_of(slot.parameter.detach()) for slot in layout.slots},
        {index: copy_of(buffer) for index, buffer in enumerate(layout.buffers)},
    )
    return structure


def storages(layers):
    tensors = [*nn.ModuleList(layers).parameters(), *nn.ModuleList(layers).buffers()]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel()}


class TestStructure:
    def test_shares_nothing_with_the_original(self, case):
        layers, layout, _ = case
        structure = bound(layers, layout)
        originals = [*layers, *(module for layer in layers for module in layer.modules())]
        originals += list(nn.ModuleList(layers).parameters()) + list(nn.ModuleList(layers).buffers())
        copies = [module for layer in structure.layers for module in layer.modules()]
        copies += [*nn.ModuleList(structure.layers).parameters(), *nn.ModuleList(structure.layers).buffers()]
        assert not {id(each) for each in originals} & {id(each) for each in copies}
        assert not storages(layers) & storages(structure.layers)

    def test_has_the_originals_values_once_bound_and_keeps_what_is_tied_tied(self, case):
        layers, layout, _ = case
        structure = bound(layers, layout)
        for name in ("named_parameters", "named_buffers"):
            expected = list(getattr(nn.ModuleList(layers), name)(remove_duplicate=False))
            actual = list(getattr(nn.ModuleList(structure.layers), name)(remove_duplicate=False))
            assert [name for name, _ in actual] == [name for name, _ in expected]
            for (_, a), (_, b) in zip(actual, expected, strict=True):
                assert torch.equal(a, b)
                assert a.requires_grad == b.requires_grad
                assert a.stride() == b.stride()

        def pattern(layers):
            named = nn.ModuleList(layers).named_parameters(remove_duplicate=False)
            first = {}
            return {name: first.setdefault(id(parameter), name) for name, parameter in named}

        assert pattern(structure.layers) == pattern(layers)

    def test_takes_no_memory_of_its_own_and_release_leaves_nothing_bound_and_allocates_nothing(self, case):
        layers, layout, shards = case
        structure = Structure(layout, CPU)
        tensors = [*nn.ModuleList(structure.layers).parameters(), *nn.ModuleList(structure.layers).buffers()]
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
        structure = bound(layers, layout)
        for parameter in structure.parameters:
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        for shard in shards:
            structure.release(shard)
            part = nn.ModuleList(structure.layers[shard.first : shard.last])
            for tensor in [*part.parameters(), *part.buffers()]:
                assert tensor.grad is None
                assert tensor.untyped_storage().nbytes() == 0
        assert all(parameter.numel() or not layout.slots[k].num_bytes for k, parameter in enumerate(values(layout)))
        heads = {tensor.untyped_storage()._cdata for tensor in (*structure.parameters, *structure.buffers)}
        assert len(heads) == len({tensor.dtype for tensor in (*structure.parameters, *structure.buffers)})

    def test_has_placeholders_for_buffers_that_were_replaced_since(self):
        norm = nn.BatchNorm1d(3)
        layout = layout_of([norm])
        layout.put_buffers([torch.ones(4), *layout.buffers[1:]])
        structure = Structure(layout, CPU)
        assert norm.running_mean.tolist() == [1] * 4
        assert structure.layers[0].running_mean is structure.buffers[0]

    def test_a_change_in_place_is_a_change_of_one(self, case):
        layers, layout, shards = case
        structure = bound(layers, layout)
        tensors = [*structure.parameters, *structure.buffers]
        for _ in range(2):
            for tensor in tensors:
                before = [each._version for each in tensors if each is not tensor]
                with torch.no_grad():
                    tensor.zero_()
                assert [each._version for each in tensors if each is not tensor] == before
            for shard in shards:
                structure.release(shard)

    def test_originals_are_not_touched(self):
        model, _, _ = zoo.cnn()
        layers = list(model)
        before = copy.deepcopy(model.state_dict())
        structure = bound(layers, layout_of(layers))
        with torch.no_grad():
            for parameter in structure.parameters:
                parameter.add_(1)
        nn.Sequential(*structure.layers)(torch.randn(3, 1, 8, 8))
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())

    @pytest.mark.parametrize("name", ["gpt", "cnn", "tied", "lstm", "frozen"])
    def test_computes_what_the_original_computes(self, name):
        model, _, loader = zoo.MODELS[name]()
        inputs, _ = next(iter(loader))
        structure = bound(list(model), layout_of(list(model)))
        assert torch.equal(nn.Sequential(*structure.layers)(inputs), model(inputs))

    def test_lstms_flat_weights_follow(self):
        lstm = nn.LSTM(3, 4, num_layers=2, bidirectional=True)
        layout = layout_of([lstm])
        structure = bound([lstm], layout)
        [own] = structure.layers
        assert [id(weight) for weight in own._flat_weights] == [id(p) for p in own.parameters()]
        inputs = torch.randn(5, 2, 3)
        assert torch.equal(own(inputs)[0], lstm(inputs)[0])
        doubled = {slot.index: slot.parameter.detach() * 2 for slot in layout.slots}
        structure.bind(doubled, {})
        with torch.no_grad():
            for parameter in lstm.parameters():
                parameter.mul_(2)
        assert torch.equal(own(inputs)[0], lstm(inputs)[0])

    def test_two_structures_of_one_layout_are_apart(self):
        layers = [nn.Linear(2, 2)]
        layout = layout_of(layers)
        one, two = bound(layers, layout), bound(layers, layout)
        with torch.no_grad():
            one.parameters[0].zero_()
        assert torch.equal(two.layers[0].weight, layers[0].weight)

    def test_buffers_are_taken_as_the_forward_left_them(self):
        class Counts(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("in_place", torch.zeros(()))
                self.register_buffer("rebound", torch.zeros(()))
                self.register_buffer("grown", torch.zeros(1))
                self.register_buffer("left", torch.ones(()))

            def forward(self, x):
                self.in_place += 1
                self.rebound = self.rebound + 2
                self.grown = torch.cat([self.grown, self.grown + 1])
                return x

        layers = [nn.Linear(2, 2), Counts()]
        layout = layout_of(layers)
        structure = bound(layers, layout)
        names = {id(layers[1].get_buffer(name)): name for name in ("in_place", "rebound", "grown", "left")}
        for _ in range(2):  # the layer's own places are there again for the next run
            structure.layers[1](torch.zeros(1))
            taken = structure.take_buffers(1, 2)
            values = {names[id(layout.buffers[index])]: value.tolist() for index, value in taken.items()}
            assert values == {"in_place": 1, "rebound": 2, "grown": [0, 1], "left": 1}
            assert structure.take_buffers(0, 1) == {}
            structure.release(layout.shards([1, 2])[1])
            structure.bind({}, {index: copy_of(buffer) for index, buffer in enumerate(layout.buffers)})


def values(layout):
    return [slot.parameter for slot in layout.slots]
