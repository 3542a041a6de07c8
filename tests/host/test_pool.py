"""The host pool takes a model over and gives it back as it was; a step's staging is overwritten, never added to."""

import copy
import gc
import random
import weakref
from contextlib import contextmanager

import psutil
import pytest
import torch
from torch import nn

from hydra_engine import Model
from hydra_engine.data.signature import Signature
from hydra_engine.data.streams import capture
from hydra_engine.host.layout import ModelLayout, SlabPiece
from hydra_engine.host.pool import HostPool, kept_pools
from hydra_engine.host.staging import StepStaging
from hydra_engine.system import dram
from partitioners.boundary import Boundary
from tests import zoo
from tests.host.test_layout import Odd, layout_of, random_layers


@contextmanager
def opened(layers):
    """A host pool that is open within."""
    pool = HostPool(layout_of(layers))
    pool.open()
    yield pool
    pool.close()


def copy_into(place, tensor):
    place.copy_(tensor)


@pytest.fixture(params=["cnn", "lstm", "tied", "frozen", *range(6)], ids=str)
def layers(request):
    if isinstance(request.param, int):
        return random_layers(random.Random(request.param))
    return list(zoo.MODELS[request.param]()[0])


class TestHostPool:
    def test_open_and_close_leave_every_value_and_object(self, layers):
        module = nn.ModuleList(layers)
        state = copy.deepcopy(module.state_dict())
        objects = [id(each) for each in [*module.parameters(), *module.buffers()]]
        strides = [parameter.stride() for parameter in module.parameters()]
        pool = HostPool(layout_of(layers))
        for _ in range(2):
            pool.open()
            assert all(torch.equal(tensor, state[name]) for name, tensor in module.state_dict().items())
            pool.close()
            assert all(torch.equal(tensor, state[name]) for name, tensor in module.state_dict().items())
        assert [id(each) for each in [*module.parameters(), *module.buffers()]] == objects
        assert [parameter.stride() for parameter in module.parameters()] == strides

    def test_close_gives_back_what_training_left_in_ordinary_storage(self, layers):
        with opened(layers) as pool:
            for slot in pool.layout.slots:
                slot.parameter.data.fill_(3)
            pool.buffers = [torch.zeros_like(buffer) for buffer in pool.buffers]
        assert all((parameter == 3).all() for parameter in nn.ModuleList(layers).parameters())
        assert not any(buffer.any() for buffer in nn.ModuleList(layers).buffers())
        for slot in pool.layout.slots:
            assert slot.parameter.untyped_storage().nbytes() == slot.num_bytes
            assert slot.parameter.storage_offset() == 0
            assert slot.parameter.grad is None

    def test_parameters_lie_in_the_pool_while_it_is_open_and_buffers_do_not(self, layers):
        with opened(layers) as pool:
            for slot in [each for each in pool.layout.slots if each.num_bytes]:
                [(_, source)] = pool.sources(SlabPiece(slot.trainable, slot.offset, 0, slot.num_bytes))
                assert source.data_ptr() == slot.parameter.data_ptr()
            for own, buffer in zip(pool.layout.buffers, pool.buffers, strict=True):
                assert torch.equal(own, buffer)
                assert own.stride() == buffer.stride()
                assert own.untyped_storage().data_ptr() != buffer.untyped_storage().data_ptr()

    def test_gradients_have_places_like_their_parameters(self, layers):
        with opened(layers) as pool:
            for slot, gradient in zip(pool.layout.slots, pool.gradients.places, strict=True):
                assert (gradient is not None) == slot.trainable
                if gradient is not None:
                    assert gradient.shape == slot.parameter.shape
                    gradient.fill_(slot.index)
            for slot, gradient in zip(pool.layout.slots, pool.gradients.places, strict=True):
                assert gradient is None or (gradient == slot.index).all(), "gradients overlap"

    @pytest.mark.parametrize(
        "values",
        [
            torch.rand(3, 4),
            torch.rand(4, 3).t(),
            torch.rand(3, 8)[:, 1:5],
            torch.rand(8)[::2],
            torch.rand(1, 8)[:, ::2],
        ],
        ids=["contiguous", "transposed", "sliced", "every other", "one row"],
    )
    def test_gradients_lie_as_autograd_lays_them(self, values):
        # A norm adds up in the order of memory, and fused optimizers choose their kernel by it.
        layer = nn.Identity()
        layer.weight = nn.Parameter(values)
        (layer.weight * 2).sum().backward()
        expected = layer.weight.grad.stride()
        with opened([layer]) as pool:
            assert pool.gradients.places[0].stride() == expected

    def test_tied_and_frozen_parameters_stay_so(self):
        layers = list(zoo.tied()[0])
        layers[1].requires_grad_(False)
        with opened(layers):
            pass
        assert layers[-1].weight is layers[0].token.weight
        assert not any(parameter.requires_grad for parameter in layers[1].parameters())

    def test_alignment_gaps_are_nobodys(self):
        layers = [Odd(), Odd()]
        before = copy.deepcopy(nn.ModuleList(layers).state_dict())
        taken = {True: set(), False: set()}
        with opened(layers) as pool:
            for slot in pool.layout.slots:
                taken[slot.trainable] |= set(range(slot.offset, slot.offset + slot.num_bytes))
            for kind, used in taken.items():
                [(_, source)] = pool.sources(SlabPiece(kind, 0, 0, pool.layout.num_bytes[kind]))
                flat = torch.empty(0, dtype=torch.uint8).set_(source.untyped_storage())
                flat[[k for k in range(len(flat)) if k not in used]] = 0xFF
        assert all(torch.equal(tensor, before[name]) for name, tensor in nn.ModuleList(layers).state_dict().items())

    @pytest.mark.parametrize(
        "last", [torch.full((3,), 7.0), torch.ones(5, dtype=torch.float64)], ids=["alike", "of another kind"]
    )
    def test_buffers_are_copies_until_the_end(self, last):
        layer = nn.BatchNorm1d(3)
        with opened([layer]) as pool:
            own = layer.running_mean
            mean = next(k for k, buffer in enumerate(pool.layout.buffers) if buffer is own)
            pool.buffers[mean] = last.clone()
            assert not own.any()
        assert (layer.running_mean is own) == (last.shape == own.shape)
        assert layer.running_mean.dtype == last.dtype
        assert torch.equal(layer.running_mean, last)

    def test_expanded_buffer_is_given_back(self):
        layer = nn.Linear(4, 4)
        layer.register_buffer("scale", torch.ones(1).expand(4))
        with opened([layer]):
            pass
        assert layer.scale.tolist() == [1, 1, 1, 1]

    def test_close_without_open_does_nothing(self):
        layer = nn.Linear(2, 2)
        address = layer.weight.data_ptr()
        HostPool(layout_of([layer])).close()
        assert layer.weight.data_ptr() == address


def kept(layer, precision="float32"):
    """A pool that is closed and keeps its memory, with gradients in it."""
    pool = HostPool(ModelLayout(Model([layer]), None, precision))
    pool.open()
    for gradient in pool.gradients.places:
        gradient.fill_(7)
    pool.close(keeps=True)
    return pool


def gradients_at(pool):
    return [gradient.data_ptr() for gradient in pool.gradients.places]


def ordinary(layer):
    return all(each.untyped_storage().nbytes() == each.nbytes for each in layer.parameters())


class TestKept:
    def test_the_next_open_goes_on_in_the_same_memory(self):
        layer = nn.Linear(64, 64)
        values = copy.deepcopy(layer.state_dict())
        pool = kept(layer)
        before = gradients_at(pool), [each.data_ptr() for each in layer.parameters()]
        assert pool in kept_pools()
        assert pool.kept_bytes == pool.layout.link_bytes[True] >= 4 * (64 * 64 + 64)
        assert all(torch.equal(tensor, values[name]) for name, tensor in layer.state_dict().items())
        pool.open()
        assert (gradients_at(pool), [each.data_ptr() for each in layer.parameters()]) == before
        assert pool not in kept_pools()
        assert pool.kept_bytes == 0
        pool.close()
        assert ordinary(layer)
        assert all(torch.equal(tensor, values[name]) for name, tensor in layer.state_dict().items())

    def test_what_its_user_changes_meanwhile_counts(self):
        layer = nn.Linear(3, 3)
        pool = kept(layer)
        layer.weight.data = torch.full((3, 3), 2.0).t()
        layer.bias.data.fill_(3)
        layer.bias.grad = torch.ones(3)
        pool.open()
        assert (layer.weight == 2).all()
        assert (layer.bias == 3).all()
        assert layer.bias.grad is None
        [(_, source)] = pool.sources(SlabPiece(True, 0, 0, pool.layout.num_bytes[True]))
        assert source.untyped_storage().data_ptr() == layer.weight.untyped_storage().data_ptr()
        pool.close()

    @pytest.mark.parametrize("way", ["let go", "closed", "opened by another", "split"])
    def test_it_is_let_go(self, way):
        layer = nn.Linear(64, 64)
        values = copy.deepcopy(layer.state_dict())
        pool = kept(layer, "bfloat16")
        assert pool.kept_bytes == 2 * pool.layout.link_bytes[True]  # gradients and casts
        storage = weakref.ref(pool.gradients.storages[0])
        if way in ("let go", "closed"):
            {"let go": pool.let_go, "closed": pool.close}[way]()
        else:
            pool.splits = way == "split"
            other = pool if way == "split" else HostPool(layout_of([layer]))
            other.open()
            other.close()
        assert storage() is None
        assert pool not in kept_pools()
        assert ordinary(layer)
        assert all(torch.equal(tensor, values[name]) for name, tensor in layer.state_dict().items())

    def test_what_was_replaced_stays_where_its_user_put_it(self):
        layer = nn.Linear(3, 3)
        pool = kept(layer)
        weight = layer.weight.data = torch.ones(3, 3)
        pool.let_go()
        assert layer.weight.data_ptr() == weight.data_ptr()
        assert ordinary(layer)

    def test_with_its_owner_go_the_gradients_and_weights_stay(self):
        layer = nn.Linear(64, 64)
        values = copy.deepcopy(layer.state_dict())
        pool = kept(layer)
        storage = weakref.ref(pool.gradients.storages[0])
        del pool
        gc.collect()
        assert storage() is None
        assert all(torch.equal(tensor, values[name]) for name, tensor in layer.state_dict().items())


class TestStepStaging:
    def begun(self, *values):
        """Staging with a step begun on these inputs."""
        staging = StepStaging()
        boundaries = [(Boundary.of(value, "a batch"), Boundary.of(value, "a target")) for value in values]
        staging.begin(boundaries, [1.0] * len(values), [capture()] * len(values), Signature.of(boundaries))
        return staging

    @pytest.fixture
    def staging(self):
        return self.begun(torch.zeros(1))

    def entering(self, staging, shard=1, m=0):
        boundary = staging.entering(shard, m)
        return boundary.build(boundary.tensors)

    def test_boundary_comes_out_as_it_went_in(self, staging):
        shared = torch.rand(3, 4).t()
        staging.put_boundary(1, 0, Boundary.of({"x": shared, "again": [shared]}, "an output"), copy_into)
        built = self.entering(staging)
        assert torch.equal(built["x"], shared)
        assert built["x"].stride() == shared.stride()
        assert built["again"][0] is built["x"]
        assert built["x"] is not shared

    def test_a_boundary_replaces_the_one_before_whatever_its_tensors(self, staging):
        shapes = [torch.rand(2, 3), torch.rand(3, 2), torch.rand(2, 3).t(), torch.rand(3, 2).double(), torch.rand(1)]
        counts = [[torch.rand(2) for _ in range(count)] for count in (1, 3, 2, 0)]
        for values in [*([each, each * 2] for each in (torch.rand(2, 3), *shapes)), *counts]:
            for _ in range(2):  # putting it twice equals once
                staging.put_boundary(1, 0, Boundary.of(values, "an output"), copy_into)
            found = self.entering(staging)
            assert [each.stride() for each in found] == [value.stride() for value in values]
            assert all(torch.equal(each, value) for each, value in zip(found, values, strict=True))

    def test_next_step_is_written_into_the_same_memory(self, staging):
        addresses = []
        for _ in range(2):
            value = torch.rand(2, 3)
            staging.put_boundary(1, 0, Boundary.of(value, "an output"), copy_into)
            staging.put_gradients(1, 0, [value], copy_into)
            addresses.append((self.entering(staging).data_ptr(), staging.gradients_of(1, 0)[0].data_ptr()))
            staging.clear()
        assert addresses[0] == addresses[1]

    def test_shards_and_micro_batches_do_not_share_memory(self):
        staging = self.begun(torch.zeros(1), torch.zeros(1))
        values = {(shard, m): torch.rand(4) for shard in (1, 2) for m in (0, 1)}
        for (shard, m), value in values.items():
            staging.put_boundary(shard, m, Boundary.of(value, "an output"), copy_into)
            staging.put_gradients(shard, m, [-value], copy_into)
        for (shard, m), value in values.items():
            assert torch.equal(self.entering(staging, shard, m), value)
            assert torch.equal(staging.gradients_of(shard, m)[0], -value)

    def test_gradients_replace_those_before_and_absent_ones_come_and_go(self, staging):
        some = [torch.rand(2) for _ in range(5)]
        for values in ([None, some[0]], [None, some[1]], [some[2], None], [None, None], some[3:]):
            staging.put_gradients(1, 0, values, copy_into)
            for stored, value in zip(staging.gradients_of(1, 0), values, strict=True):
                assert stored is None if value is None else torch.equal(stored, value)

    def test_inputs_enter_the_first_shard(self):
        first, second = torch.rand(2), torch.rand(3)
        staging = self.begun(first, second)
        assert staging.num_micro_batches == 2
        assert self.entering(staging, 0, 0) is first
        assert self.entering(staging, 0, 1) is second

    def test_signature_tells_steps_of_other_shapes_apart(self):
        same = [self.begun(torch.zeros(2, 3)).given.signature, self.begun(torch.ones(2, 3)).given.signature]
        others = [self.begun(torch.zeros(3, 3)), self.begun(torch.zeros(2, 3), torch.zeros(2, 3))]
        others.append(self.begun(torch.zeros(3, 2).t()))
        assert same[0] == same[1]
        assert len({same[0], *(staging.given.signature for staging in others)}) == 4

    def test_forward_begins_with_the_same_buffers_when_it_is_run_again(self):
        layout = layout_of([nn.BatchNorm1d(2), nn.Linear(2, 2)])
        lower, _ = layout.shards([1, 2])
        committed = [torch.zeros_like(buffer) for buffer in layout.buffers]
        staging = self.begun(torch.zeros(1))
        before = staging.buffers_for(lower, 0, committed)
        assert sorted(before) == list(lower.buffers)
        for index in lower.buffers:
            staging.buffers[index] = torch.ones_like(committed[index])  # as its forward left them
        assert all(staging.buffers_for(lower, 0, committed)[index] is committed[index] for index in lower.buffers)
        staging.clear()
        assert all(staging.buffers_for(lower, 0, committed)[index] is committed[index] for index in lower.buffers)

    def test_shard_above_begins_with_what_the_one_below_left_of_a_shared_buffer(self):
        layer = nn.BatchNorm1d(2, affine=False)
        layout = layout_of([layer, nn.Linear(2, 2), layer])
        lower, upper = layout.shards([1, 3])
        committed = [torch.zeros_like(buffer) for buffer in layout.buffers]
        staging = self.begun(torch.zeros(1))
        staging.buffers_for(lower, 0, committed)
        changed = staging.buffers[0] = torch.ones_like(committed[0])
        assert staging.buffers_for(upper, 0, committed)[0] is changed
        assert staging.buffers_for(lower, 0, committed)[0] is committed[0]

    def test_clear_forgets_the_step(self, staging):
        staging.losses[0], staging.has_gradient[0], staging.tied[0, 1, 0] = 1.0, True, torch.ones(1)
        staging.clear()
        assert not staging.losses
        assert not staging.has_gradient
        assert not staging.tied
        assert not staging.random


class TestAvailableDram:
    def test_is_what_the_machine_has_left_or_less(self):
        assert 0 < dram.available_dram_bytes() <= psutil.virtual_memory().total
