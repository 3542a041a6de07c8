"""Each sample is given once per pass, at any sizes and over restarts; fixed sizes give torch's batches."""

import copy
import math
import random
from collections import Counter
from itertools import chain, cycle, islice, pairwise

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SubsetRandomSampler, TensorDataset

from hydra_engine.adaptive import AdaptiveDataLoader, AdaScale, Autoscale, remaining_epochs_until
from tests.covering import covering
from tests.refused import refused


class Numbers(Dataset):
    """The numbers below `length`; `loaded` has those that were read, one by one."""

    def __init__(self, length):
        self.length = length
        self.loaded = []

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if not 0 <= index < self.length:
            raise IndexError(index)
        self.loaded.append(index)
        return index


class Noisy(Numbers):
    """Numbers with noise from torch's process-wide generator."""

    def __getitem__(self, index):
        return super().__getitem__(index), torch.rand(())


class AtOnce(Numbers):
    """Numbers that are read a batch at a time; `calls` has the batches."""

    def __init__(self, length):
        super().__init__(length)
        self.calls = []

    def __getitems__(self, indices):
        self.calls.append(indices)
        return list(indices)


class Flow(IterableDataset):
    """Numbers without a length and an index, each worker its share."""

    def __init__(self, length):
        self.length = length
        self.num_read = 0

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for number in range(first, self.length, step):
            self.num_read += 1
            yield number


class Asked:
    """A guide that asks for the sizes, one after another, and then ends the epoch."""

    def __init__(self, *sizes):
        self.sizes = list(sizes)
        self.num_calls = 0

    def __call__(self):
        self.num_calls += 1
        return self.sizes.pop(0) if self.sizes else None


def adaptive(data, batch_size=10, **options):
    options.setdefault("collate_fn", list)
    return AdaptiveDataLoader(data, batch_size, **options)


def batches(loader, *sizes):
    return list(loader.iterate(Asked(*sizes)))


def restarted(loader, **options):
    """Another loader over the same data that goes on from the state of one."""
    options = {"batch_size": loader.batch_size, "collate_fn": loader.collate_fn, **options}
    other = AdaptiveDataLoader(loader.dataset, **options)
    other.load_state_dict(loader.state_dict())
    return other


def span(*bounds):
    """Lists of numbers between one bound and the next."""
    return [list(range(low, high)) for low, high in pairwise(bounds)]


def flat(lists):
    return list(chain.from_iterable(lists))


def same(a, b):
    """True if two lists of batches have the same tensors."""
    pairs = list(zip(a, b, strict=True))
    return all(torch.equal(x, y) for one, other in pairs for x, y in zip(one, other, strict=True))


# -- passes


@covering(length=[9, 25], sizes=[(1,), (3,), (7, 1, 30), (100,)], shuffle=[False, True])
def test_each_sample_is_given_once_per_pass_at_any_sizes(length, sizes, shuffle):
    loader = adaptive(Numbers(length), 4, shuffle=shuffle)
    found, asked = [], cycle(sizes)
    while len(found) < 3 * length:
        size = next(asked)
        [batch] = batches(loader, size)
        found += batch
        begun = (len(found) - 1) // length * length  # of the pass that the batch is of
        assert len(found) - len(batch) >= begun
        assert len(batch) == size or len(found) % length == 0
    passes = [found[i : i + length] for i in range(0, 3 * length, length)]
    assert all(sorted(each) == list(range(length)) for each in passes)
    assert (passes[0] != passes[1]) == shuffle


@pytest.mark.parametrize("seed", range(2))
def test_each_sample_is_given_once_over_random_sizes_and_restarts(seed):
    draw = random.Random(seed)
    torch.manual_seed(seed)
    loader = adaptive(Numbers(40), 8, shuffle=True)
    counts = Counter()
    for _ in range(60):
        [batch] = batches(loader, draw.randint(1, 20))
        counts.update(batch)
        if draw.random() < 0.5:
            loader = restarted(loader, shuffle=True, batch_size=draw.randint(1, 20))
        _, passes, given = loader.place
        assert counts.total() == passes * 40 + given
        assert set(counts.values()) <= {passes, passes + 1}
        assert sum(each > passes for each in counts.values()) == given


def test_a_batch_has_the_size_that_is_asked_for_when_it_is_read():
    loader = adaptive(Numbers(20))
    guide = Asked(3, 7, 4, 100, 5)
    iterator = loader.iterate(guide)
    assert guide.num_calls == 0
    assert next(iterator) == list(range(3))
    assert guide.num_calls == 1
    assert loader.dataset.loaded == [0, 1, 2]  # and nothing ahead
    assert list(iterator) == span(3, 10, 14, 20) + span(0, 5)
    assert loader.place == (1, 1, 5)


def test_an_epoch_may_end_within_a_pass_and_the_next_goes_on():
    loader = adaptive(Numbers(20))
    assert batches(loader, 8) == span(0, 8)
    assert batches(loader, 8, 8, 8) == span(8, 16, 20) + span(0, 8)
    assert batches(loader) == []
    assert loader.place == (3, 1, 8)


def test_the_guide_is_asked_when_one_is_set():
    loader = adaptive(Numbers(20))
    loader.guide = Asked(15, 15)
    assert list(loader) == span(0, 15, 20)
    loader.guide = None
    assert list(loader) == []  # the rest of the pass, which ended with the epoch before
    assert list(loader) == span(0, 10, 20)


def test_an_iteration_that_was_left_goes_on_in_the_next():
    loader = adaptive(Numbers(30))
    assert next(iter(loader)) == list(range(10))
    assert list(loader) == span(10, 20, 30)
    assert list(loader) == span(0, 10, 20, 30)
    assert loader.place == (2, 2, 0)


def test_a_batch_is_looked_at_without_taking_it():
    loader = adaptive(Numbers(20))
    state = loader.state_dict()
    assert next(iter(loader)) == list(range(10))
    loader.load_state_dict(state)
    assert list(loader) == span(0, 10, 20)


def test_a_sample_that_failed_is_read_again():
    class Fails(Numbers):
        def __getitem__(self, index):
            if index == 7 and self.loaded.count(6) == 1:
                raise OSError("gone")
            return super().__getitem__(index)

    loader = adaptive(Fails(10), 5)
    iterator = iter(loader)
    assert next(iterator) == [0, 1, 2, 3, 4]
    with refused(OSError, says="gone"):
        next(iterator)
    assert list(loader) == span(5, 10)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_goes_on_by_itself(copied):
    loader = adaptive(Numbers(20))
    next(iter(loader))
    other = copied(loader)
    assert list(other) == list(loader) == span(10, 20)


# -- as torch's loader


@covering(shuffle=[False, True], drop_last=[False, True], own=[False, True])
def test_fixed_sizes_give_the_batches_of_torch_under_the_same_seed(shuffle, drop_last, own):
    def epochs(kind):
        torch.manual_seed(5)
        generator = torch.Generator().manual_seed(7) if own else None
        loader = kind(Noisy(23), batch_size=4, shuffle=shuffle, drop_last=drop_last, generator=generator)
        assert len(loader) == (5 if drop_last else 6)
        return [batch for _ in range(3) for batch in loader], torch.rand(())

    (found, after), (expected, expected_after) = epochs(AdaptiveDataLoader), epochs(DataLoader)
    assert same(found, expected)
    assert torch.equal(after, expected_after)


def test_the_order_is_drawn_at_iter_and_not_again_after_a_restart():
    torch.manual_seed(0)
    loader = adaptive(Numbers(20), shuffle=True)
    before = torch.get_rng_state()
    iterator = iter(loader)
    begun = torch.get_rng_state()
    assert not torch.equal(before, begun)
    next(iterator)
    rest = loader.state_dict()["order"][10:].tolist()
    assert list(restarted(loader, shuffle=True)) == [rest]
    assert torch.equal(torch.get_rng_state(), begun)


def test_a_data_set_that_reads_batches_at_once_is_asked_for_the_batch():
    loader = adaptive(AtOnce(20), 5)
    assert batches(loader, 3, 12, 12) == span(0, 3, 15, 20)
    assert loader.dataset.calls == span(0, 3, 15, 20)


def test_a_data_set_has_to_return_a_list_of_samples():
    class Collated(AtOnce):
        def __getitems__(self, indices):
            return torch.tensor(indices)

    with refused(TypeError, says="__getitems__ Tensor list"):
        next(iter(adaptive(Collated(20))))


def test_samples_are_collated_as_with_torch():
    data = TensorDataset(torch.arange(6.0), torch.arange(6))
    values, labels = next(iter(AdaptiveDataLoader(data, 4)))
    assert values.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert labels.dtype == torch.int64


def test_a_sampler_decides_the_samples_of_a_pass():
    torch.manual_seed(1)
    loader = adaptive(Numbers(50), 4, sampler=SubsetRandomSampler(range(10, 20)))
    assert len(loader) == 3
    assert sorted(flat(loader)) == list(range(10, 20))
    repeated = adaptive(Numbers(3), 4, sampler=RandomSampler(range(3), replacement=True, num_samples=8))
    assert [len(each) for each in repeated] == [4, 4]
    assert loader.sampler is not None


def test_batches_are_pinned_as_torch_does():
    loader = adaptive(Numbers(20), pin_memory=True)
    if torch.accelerator.is_available():
        assert list(loader) == span(0, 10, 20)
        return
    before = torch.get_rng_state()
    with pytest.warns(UserWarning, match="no accelerator is found"):
        assert list(loader) == span(0, 10, 20)
    state = torch.get_rng_state()
    torch.set_rng_state(before)
    list(adaptive(Numbers(20)))
    assert torch.equal(state, torch.get_rng_state())  # nothing else is drawn for it


# -- drop_last


def test_a_rest_below_the_initial_size_is_dropped_and_not_loaded():
    loader = adaptive(Numbers(25), drop_last=True)
    assert list(loader) == span(0, 10, 20)
    assert loader.dataset.loaded == list(range(20))
    assert batches(loader, 12, 30, 6) == [*span(0, 12, 25), list(range(6))]


def test_a_batch_that_is_asked_for_is_given_below_the_initial_size_too():
    loader = adaptive(Numbers(25), drop_last=True)
    assert batches(loader, 20, 4, 4) == [*span(0, 20, 24), [0, 1, 2, 3]]
    assert loader.place == (1, 1, 4)


# -- iterable data


def test_iterable_data_come_at_the_sizes_asked_for():
    loader = adaptive(Flow(20))
    iterator = loader.iterate(Asked(3, 9, 30, 5, 5, 20))  # the first 5 finds the pass over
    assert next(iterator) == [0, 1, 2]
    assert loader.dataset.num_read == 3
    assert list(iterator) == span(3, 12, 20) + span(0, 5, 20)
    assert list(loader) == []
    assert list(loader) == span(0, 10, 20)
    with pytest.raises(TypeError):
        len(loader)


def test_iterable_data_go_on_behind_what_was_given():
    loader = adaptive(Flow(30), 4)
    assert batches(loader, 7, 5) == span(0, 7, 12)
    other = restarted(loader, batch_size=6)
    assert loader.state_dict()["order"] is None
    assert list(other) == span(12, 18, 24, 30)
    assert other.place == (2, 1, 0)


def test_iterable_data_drop_the_rest():
    loader = adaptive(Flow(25), drop_last=True)
    assert list(loader) == span(0, 10, 20)
    assert batches(loader, 12, 30, 6, 6) == [*span(0, 12, 25), list(range(6))]


def test_iterable_data_that_end_before_the_position_are_refused():
    loader = adaptive(Flow(30))
    batches(loader, 20)
    other = adaptive(Flow(15))
    other.load_state_dict(loader.state_dict())
    with refused(says="15 20"):
        next(iter(other))


def test_iterable_data_without_samples_end_an_epoch_and_stop_a_guide():
    assert list(adaptive(Flow(0))) == []
    with refused(says="batch_size: 10 drop_last"):
        batches(adaptive(Flow(5), drop_last=True), 10)


# -- workers


def test_workers_give_the_same_batches_at_any_sizes():
    data = TensorDataset(torch.arange(40.0).reshape(20, 2), torch.arange(20, dtype=torch.bfloat16))
    torch.manual_seed(3)
    loader = AdaptiveDataLoader(data, 4, shuffle=True, num_workers=2, persistent_workers=True)
    found = batches(loader, 4, 4, 7)
    alone = AdaptiveDataLoader(data, 4, shuffle=True)
    torch.manual_seed(3)
    assert same(found, batches(alone, 4, 4, 7))
    state = loader.state_dict()
    for each in (loader, alone):
        each.load_state_dict(state)
    rests = batches(loader, 2, 3), batches(alone, 2, 3)
    assert [len(each[0]) for each in rests[0]] == [2, 3]
    assert same(*rests)


def test_workers_draw_as_those_of_torch():
    def read(kind):
        torch.manual_seed(2)
        return list(kind(Noisy(10), batch_size=4, shuffle=True, num_workers=2))

    assert same(read(AdaptiveDataLoader), read(DataLoader))


def test_workers_over_iterable_data_take_turns_by_chunks():
    loader = adaptive(Flow(14), 4, num_workers=2)
    assert batches(loader, 6, 5, 9) == [[0, 2, 4, 6, 1, 3], [5, 7, 8, 10, 12], [9, 11, 13]]


# -- states


def test_a_state_goes_on_at_another_batch_size_without_loading_what_was_given():
    torch.manual_seed(4)
    loader = adaptive(Numbers(30), shuffle=True)
    given = flat(batches(loader, 10, 2))
    loader.dataset.loaded.clear()
    rest = list(restarted(loader, batch_size=7, shuffle=True))
    assert [len(each) for each in rest] == [7, 7, 4]
    assert loader.dataset.loaded == flat(rest)
    assert sorted(given + flat(rest)) == list(range(30))


def test_a_run_that_restarts_after_every_batch_equals_one_that_does_not():
    def run(restarts):
        generator = torch.Generator().manual_seed(11)
        loader = adaptive(Numbers(25), shuffle=True, generator=generator)
        found = []
        for size in (4, 9, 12, 25, 3, 30, 8):
            found += batches(loader, size)
            if restarts:
                loader = restarted(loader, shuffle=True, generator=torch.Generator())
        return found, loader.place

    assert run(True) == run(False)


def test_states_share_one_order_and_plain_values():
    loader = adaptive(Numbers(30))
    assert loader.state_dict() == {
        "epoch": 0, "generators": (), "given": 0, "num_samples": 30, "order": None, "passes": 0
    }  # fmt: skip
    batches(loader, 10)
    first = loader.state_dict()
    batches(loader, 10)
    second = loader.state_dict()
    assert first["order"] is second["order"]
    assert first["order"].dtype == torch.int64
    assert (first["given"], second["given"]) == (10, 20)
    list(loader)
    assert loader.state_dict()["order"] is None
    assert (first["given"], first["order"].tolist()) == (10, list(range(30)))


def test_the_state_of_a_sampler_s_generator_is_kept():
    loader, other = (
        adaptive(Numbers(20), sampler=RandomSampler(range(20), generator=torch.Generator().manual_seed(1)))
        for _ in range(2)
    )
    next(iter(loader))
    next(iter(other)), next(iter(other)), next(iter(other), None)
    other.load_state_dict(loader.state_dict())
    assert [*loader, *loader] == [*other, *other]


def test_states_of_other_data_are_refused():
    loader = adaptive(Numbers(30))
    batches(loader, 10)
    state = loader.state_dict()
    for other, change, says in (
        (adaptive(Numbers(31)), {}, "31 30"),
        (adaptive(Flow(30)), {"num_samples": None}, "iterable indexed"),
        (adaptive(Numbers(30)), {"order": None}, "iterable indexed"),
        (adaptive(Numbers(30), generator=torch.Generator()), {}, "generators: 1 0"),
    ):
        with refused(says=says):
            other.load_state_dict({**state, **change})
    with refused(says="epoch generators"):
        loader.load_state_dict({"epoch": 0})
    assert list(loader) == span(10, 20, 30)  # as before


# -- epochs


def test_epochs_are_counted_to_the_last():
    loader = adaptive(Numbers(20))
    found = [(epoch, batch) for epoch in remaining_epochs_until(2, loader) for batch in loader]
    assert found == [(epoch, batch) for epoch in range(2) for batch in span(0, 10, 20)]
    assert list(remaining_epochs_until(2, loader)) == []
    found = [(epoch, sum(map(len, loader))) for epoch in remaining_epochs_until(4, loader)]
    assert found == [(2, 20), (3, 20)]


def test_epochs_go_on_after_a_restart_within_one():
    loader = adaptive(Numbers(30))
    given = ((epoch, batch) for epoch in remaining_epochs_until(3, loader) for batch in loader)
    found = list(islice(given, 4))
    given.close()
    loader = restarted(loader)
    found += [(epoch, batch) for epoch in remaining_epochs_until(3, loader) for batch in loader]
    assert found == [(epoch, batch) for epoch in range(3) for batch in span(0, 10, 20, 30)]


def test_an_epoch_that_was_left_is_given_again_with_its_rest():
    loader = adaptive(Numbers(30))
    found = []
    for epoch in remaining_epochs_until(2, loader):
        for batch in loader:
            found.append((epoch, batch[0]))
            if len(found) == 1:
                break
    assert found == [(0, 0), (0, 10), (0, 20), (1, 0), (1, 10), (1, 20)]


def test_a_state_from_the_end_of_an_epoch_begins_with_the_next():
    loader = adaptive(Numbers(20))
    list(loader)
    loader = restarted(loader)
    assert [(epoch, len(list(loader))) for epoch in remaining_epochs_until(2, loader)] == [(1, 2)]


@pytest.mark.parametrize("data", [Numbers(20), Flow(20)])
def test_a_state_from_the_last_batch_of_an_epoch_ends_that_epoch_first(data):
    loader = adaptive(data)
    iterator = iter(loader)
    next(iterator), next(iterator)
    loader = restarted(loader)
    assert [(epoch, len(list(loader))) for epoch in remaining_epochs_until(2, loader)] == [(0, 0), (1, 2)]


def test_guided_epochs_are_counted_by_the_guide():
    loader = adaptive(Numbers(20))
    sizes = []
    for epoch in remaining_epochs_until(2, loader):
        loader.guide = Asked(15, 15, 15)
        sizes += [(epoch, len(batch)) for batch in loader]
    assert sizes == [(0, 15), (0, 5), (0, 15), (1, 5), (1, 15), (1, 5)]


def test_epochs_without_a_batch_do_not_go_on_for_ever():
    loader = adaptive(Numbers(20))
    epochs = remaining_epochs_until(2, loader)
    assert next(epochs) == 0
    with refused(RuntimeError, says="epoch 0"):
        next(epochs)


def test_a_number_of_epochs_is_an_int():
    with refused(TypeError, says="num_epochs 2.0"):
        next(remaining_epochs_until(2.0, adaptive(Numbers(20))))


# -- arguments


def test_autoscaling_keeps_its_limits():
    loader = adaptive(Numbers(100), 16)
    assert loader.autoscale is None
    loader.autoscale_batch_size(64, local_bsz_bounds=[4, 32])
    assert loader.autoscale == Autoscale(max_batch_size=64, local_bsz_bounds=(4, 32), gradient_accumulation=True)
    loader.autoscale_batch_size(16, (16, 128), gradient_accumulation=False)
    assert loader.autoscale == Autoscale(max_batch_size=16, local_bsz_bounds=(16, 128), gradient_accumulation=False)


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ((15,), ValueError, "max_batch_size: 15, 16"),
        ((64.0,), TypeError, "max_batch_size: 64.0"),
        ((True,), TypeError, "max_batch_size: True"),
        ((64, 8), TypeError, "local_bsz_bounds: 8"),
        ((64, (1, 2, 3)), TypeError, "local_bsz_bounds: 3)"),
        ((64, (1, 2.5)), TypeError, "local_bsz_bounds[1] 2.5"),
        ((64, (0, 8)), ValueError, "local_bsz_bounds[0] 0 1"),
        ((64, (8, 4)), ValueError, "local_bsz_bounds: (4, 8)"),
        ((64, (9, 32)), ValueError, "local_bsz_bounds[0] 9, 8"),
        ((64, (17, 32), False), ValueError, "local_bsz_bounds[0] 17, 16"),
        ((64, (4, 15), False), ValueError, "local_bsz_bounds[1] 15, 16"),
        ((64, None, 1), TypeError, "gradient_accumulation: 1"),
    ],
)
def test_limits_that_exclude_the_initial_batch_are_refused(arguments, error, says):
    loader = adaptive(Numbers(100), 16)
    with refused(error, says=says):
        loader.autoscale_batch_size(*arguments)
    assert loader.autoscale is None


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"scaling_rule": "linear"}, "scaling_rule: 'linear' ScalingRule"),
        ({"scaling_rule": AdaScale}, "scaling_rule: AdaScale ScalingRule"),
        ({"replay": [1]}, "replay: [1] StepChoice"),
        ({"replay": "abc"}, "replay: 'abc' StepChoice"),
    ],
)
def test_no_rule_and_no_record_are_refused(options, says):
    with refused(TypeError, says=says):
        adaptive(Numbers(100), 16).autoscale_batch_size(64, **options)


@pytest.mark.parametrize(
    ("data", "options", "error", "says"),
    [
        (Numbers(9), {}, ValueError, "batch_size: 10, 9"),
        (Numbers(9), {"batch_size": 0}, ValueError, "batch_size: 0"),
        (Numbers(9), {"batch_size": None}, TypeError, "batch_size: None"),
        (Numbers(9), {"batch_sampler": [[0]]}, ValueError, "batch_sampler:"),
        (Numbers(9), {"batches": 3}, TypeError, "'batches'"),
        (Numbers(9), {"shuffle": True, "sampler": range(9)}, ValueError, "exclusive shuffle"),
        (Flow(9), {"shuffle": True}, ValueError, "IterableDataset shuffle"),
    ],
)
def test_arguments_that_make_no_batches_are_refused(data, options, error, says):
    with refused(error, says=says):
        AdaptiveDataLoader(data, **{"batch_size": 10, **options})


@pytest.mark.parametrize(("size", "error"), [(0, ValueError), (2.0, TypeError), (True, TypeError)])
def test_sizes_that_are_none_are_refused(size, error):
    with refused(error, says=f"next_size() {size}"):
        batches(adaptive(Numbers(20)), size)


@pytest.mark.parametrize("odd", ["b", 0.5, None, True])
def test_samplers_of_other_than_numbers_are_refused(odd):
    with refused(TypeError, says=f"sampler: {odd!r}"):
        iter(adaptive(Numbers(20), 2, sampler=[odd, odd]))


def test_length_is_the_batches_of_a_pass_at_the_initial_size():
    for length, size in ((20, 10), (25, 10), (7, 7)):
        assert len(adaptive(Numbers(length), size)) == math.ceil(length / size)
        assert len(adaptive(Numbers(length), size, drop_last=True)) == length // size
