"""After a restore the batches are bit for bit those of the loop that was not interrupted, whatever draws in between."""

import gc
import itertools
import random
import weakref
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from hydra_engine.checkpoints.nested import flatten, unflatten
from hydra_engine.data.generators import generators_of, states_of
from hydra_engine.data.position import (
    LoaderPosition,
    epoch_start,
    kept_iterators,
    numbers_of,
    position_of,
    restore,
    restore_between,
)
from hydra_engine.data.streams import Stream, capture, installed
from tests.covering import covering
from tests.refused import names, refused

# Of later Pythons, which warn of a fork beside threads.
forks = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")

NUM_SAMPLES = 26
BATCH = 4  # the last of seven has two
DATA = TensorDataset(torch.arange(NUM_SAMPLES), torch.arange(NUM_SAMPLES) ** 2)


class Plain(Dataset):
    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        return index


class Augmented(Plain):
    """Draws from all three process-wide generators, and one of its own, for every sample."""

    def __init__(self):
        self.own = np.random.default_rng(3)

    def __getitem__(self, index):
        draws = [torch.rand(()).item(), random.random(), np.random.rand(), self.own.random()]
        return torch.tensor([super().__getitem__(index), *draws])


class Counting(IterableDataset):
    def __iter__(self):
        return iter(range(NUM_SAMPLES))


class Shuffling(IterableDataset):
    """Draws for every sample from the process-wide generator."""

    def __iter__(self):
        for k in range(NUM_SAMPLES):
            yield k + torch.rand(())


class DrawsEachTime(BatchSampler):
    """Every batch of indices is drawn from the process-wide generator when it is asked for."""

    def __init__(self):
        pass

    def __len__(self):
        return 7

    def __iter__(self):
        for _ in range(7):
            yield torch.randint(NUM_SAMPLES, (BATCH,)).tolist()


class Stateful:
    """Has a state dict, as torchdata's loaders."""

    def __init__(self):
        self.loader, self.num_read = DataLoader(DATA, BATCH, shuffle=True), 0

    def __iter__(self):
        first, self.first = getattr(self, "first", 0), 0
        seed = int(torch.empty((), dtype=torch.int64).random_()) if first == 0 else self.seed
        self.seed = seed
        order = torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(seed))
        for self.num_read in range(first + 1, 8):
            yield order[(self.num_read - 1) * BATCH : self.num_read * BATCH]

    def state_dict(self):
        return {"seed": self.seed, "num_read": self.num_read}

    def load_state_dict(self, state):
        self.seed, self.first = state["seed"], state["num_read"]


def own_generator(seed=5):
    return torch.Generator().manual_seed(seed)


class Jitter:
    def __init__(self, seed):
        self.own = np.random.default_rng(seed)

    def __call__(self, index):
        return index + self.own.random()


class Transformed(Plain):
    """Its transforms are in a list, as `Compose` keeps them, and in a closure."""

    def __init__(self):
        own = random.Random(4)
        self.transforms = [Jitter(1), {"scale": Jitter(2)}["scale"], lambda index: index * own.random()]

    def __getitem__(self, index):
        for transform in self.transforms:
            index = transform(index)
        return index


def noisy(samples, own):
    return torch.tensor(samples) + own.random()


LOADERS = {
    "in order": lambda: DataLoader(DATA, BATCH),
    "shuffled": lambda: DataLoader(DATA, BATCH, shuffle=True),
    "own generator": lambda: DataLoader(DATA, BATCH, shuffle=True, generator=own_generator()),
    "augmented": lambda: DataLoader(Augmented(), BATCH, shuffle=True, drop_last=True),
    "replacement": lambda: DataLoader(
        DATA, BATCH, sampler=RandomSampler(DATA, replacement=True, num_samples=100, generator=own_generator())
    ),
    "weighted": lambda: DataLoader(DATA, BATCH, sampler=WeightedRandomSampler(range(1, 27), 26)),
    "batch sampler": lambda: DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 5, drop_last=True)),
    "no batches": lambda: DataLoader(DATA, batch_size=None, shuffle=True),
    "iterable": lambda: DataLoader(Counting(), BATCH),
    "transforms": lambda: DataLoader(Transformed(), BATCH, shuffle=True),
    "collate": lambda: DataLoader(Plain(), BATCH, collate_fn=partial(noisy, own=np.random.default_rng(6))),
    "a list": lambda: [torch.tensor([k]) for k in range(7)],
    "stateful": Stateful,
}


def bits(batch):
    leaves = batch if isinstance(batch, (list, tuple)) else [batch]
    return [(leaf.dtype, leaf.tolist()) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def read(iterator, stream, num=None, draws=True):
    """Batches with what the model draws after each, as a training loop's layers do."""
    found = []
    while num is None or len(found) < num:
        with installed(stream):
            batch = next(iterator, None)
            if batch is None:
                break
            drawn = [torch.rand(2).tolist(), random.random(), np.random.rand()] if draws else []
        found.append((bits(batch), drawn))
    return found


def loop(loader, stream, num_epochs, draws=True):
    """All batches, epoch by epoch."""
    found = []
    for _ in range(num_epochs):
        with installed(stream):
            iterator = iter(loader)
        found.append(read(iterator, stream, draws=draws))
    return found


def seeded_stream():
    random.seed(1)
    np.random.seed(1)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return Stream(capture())


def test_what_a_loader_holds_is_not_read_for_its_numbers():
    class Augmented(list):
        times_opened = 0

        def __iter__(self):
            self.times_opened += 1
            return super().__iter__()

    class Wraps:
        def __init__(self):
            self.held, self.seen, self.epoch = Augmented([1, 2]), [3, 4], 5

    loader = Wraps()
    assert numbers_of(loader) == {"Wraps.seen": "[3, 4]", "Wraps.epoch": 5}
    assert loader.held.times_opened == 0


def interrupted(make, epoch, num_batches, draws=True):
    """The position in an epoch of a loop, as a checkpoint gives it back."""
    stream, loader = seeded_stream(), make()
    unread = numbers_of(loader)
    loop(loader, stream, epoch, draws)
    held = kept_iterators(loader) if epoch else []
    start = epoch_start(loader, stream)
    with installed(stream):
        iterator = iter(loader)
    read(iterator, stream, num_batches, draws)
    position = position_of(loader, stream, start, num_batches, held, unread)
    read(iterator, stream, 1)  # what happens after it is of no matter
    return LoaderPosition.from_state(unflatten({n: each.clone() for n, each in flatten(position.to_state()).items()}))


def resumed(make, position, draws=True):
    """The rest of the epoch and one more, of another loader."""
    torch.manual_seed(99)  # it matters to nobody
    loader, stream = make(), Stream(capture())
    iterator, messages = restore(loader, stream, position)
    return [read(iterator, stream, draws=draws), *loop(loader, stream, 1, draws)], "\n".join(messages) or None, loader


@covering(strength=1, name=list(LOADERS), epoch=[0, 2])
def test_batches_go_on_as_if_nothing_had_happened(name, epoch):
    expected = loop(LOADERS[name](), seeded_stream(), epoch + 2)[epoch:]
    for num_batches in (1, 3, len(expected[0])) if name == "stateful" else (0, 1, 3, len(expected[0])):
        if name == "stateful" and num_batches == len(expected[0]):
            continue  # up to the loader
        found, message, _ = resumed(LOADERS[name], interrupted(LOADERS[name], epoch, num_batches))
        assert found == [expected[0][num_batches:], expected[1]], num_batches
        assert message is None


@pytest.mark.parametrize(
    "make", [lambda: DataLoader(DATA, batch_sampler=DrawsEachTime()), lambda: DataLoader(Shuffling(), BATCH)]
)
def test_what_draws_at_every_batch_is_followed_where_nothing_else_draws(make):
    expected = loop(make(), seeded_stream(), 2, draws=False)
    found, message, _ = resumed(make, interrupted(make, 0, 3, draws=False), draws=False)
    assert found == [expected[0][3:], expected[1]]
    assert message is None
    _, message, _ = resumed(make, interrupted(make, 0, 3))
    names(message, says="process-wide generators state_dict")


def workers(data, **options):
    return lambda: DataLoader(data(), BATCH, shuffle=True, num_workers=2, multiprocessing_context="fork", **options)


@forks
@covering(strength=1, data=[Augmented, Plain], persistent=[False, True])
def test_loaders_with_workers(data, persistent):
    make = workers(data, persistent_workers=persistent)
    epoch = 0 if data is Augmented and persistent else 1  # else its workers' generators are older than the epoch
    expected = loop(make(), seeded_stream(), epoch + 2)[epoch:]
    found, message, _ = resumed(make, interrupted(make, epoch, 3))
    assert found == [expected[0][3:], expected[1]]
    assert (message is not None) == (persistent and epoch > 0)  # that its workers draw nothing is not known


@forks
@covering(strength=1, data=[Augmented, Plain], num_batches=[0, 3], is_open=[False, True])
def test_persistent_workers_are_those_of_a_fresh_process(data, num_batches, is_open):
    epoch = 0 if data is Augmented else 1
    make = workers(data, persistent_workers=True)
    expected = loop(make(), seeded_stream(), epoch + 2)[epoch:]
    position, loader = interrupted(make, epoch, num_batches), make()
    if is_open:
        with installed(Stream(capture())):
            next(iter(loader))
    found, message, _ = resumed(lambda: loader, position)
    assert found == [expected[0][num_batches:], expected[1]]
    assert (message is not None) == (epoch > 0)


class Around:
    """A loader of one's own around torch's."""

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        yield from self.loader


@forks
@pytest.mark.parametrize("epoch", [1, pytest.param(0, marks=pytest.mark.rest)])
def test_persistent_workers_are_found_in_a_loader_around_theirs(epoch):
    def make():
        return Around(workers(Plain, persistent_workers=True)())

    expected = loop(make(), seeded_stream(), epoch + 2)[epoch:]
    position, loader = interrupted(make, epoch, 3), make()
    with installed(Stream(capture())):
        next(iter(loader))
    found, message, _ = resumed(lambda: loader, position)
    assert found == [expected[0][3:], expected[1]]
    assert (message is None) == (epoch == 0)


@forks
@pytest.mark.parametrize("was_open", [False, True])
def test_a_loader_that_is_read_from_its_beginning_each_time(was_open):
    """Its own generator, too, is where the workers of the readings before have left it."""

    def make():
        options = {"generator": own_generator(), "num_workers": 1, "persistent_workers": True}
        return DataLoader(Plain(), BATCH, shuffle=True, **options)

    loader, stream = make(), seeded_stream()
    loop(loader, stream, int(was_open))
    states, state = states_of(loader), stream.state
    expected = loop(loader, stream, 1)
    for again in (make(), loader):
        stream = Stream(state)
        assert (restore_between(again, stream, states, was_open=was_open) is not None) == was_open
        assert stream.state.same_as(state)
        assert loop(again, stream, 1) == expected


@forks
def test_a_loader_with_workers_is_freed_without_the_cyclic_collector():
    """From which torch's workers end only after time-outs."""
    make = workers(Plain, persistent_workers=True)
    position, loader, stream = interrupted(make, 1, 3), make(), seeded_stream()
    gc.collect()
    gc.disable()
    try:
        iterator, _ = restore(loader, stream, position)
        with installed(stream):
            next(iterator)
        freed = weakref.ref(loader)
        del loader, iterator
        assert freed() is None
    finally:
        gc.enable()


@forks
def test_what_workers_drew_in_earlier_epochs_is_told():
    make = workers(Augmented, persistent_workers=True)
    _, message, _ = resumed(make, interrupted(make, 1, 3))
    names(message, says="workers earlier epochs")


def test_generators_that_are_made_later_are_followed():
    class Lazy(Plain):
        def __getitem__(self, index):
            if not hasattr(self, "own"):
                self.own = random.Random(0)
            return index + self.own.random()

    def make():
        return DataLoader(Lazy(), BATCH)

    found, message, _ = resumed(make, interrupted(make, 0, 3))
    assert found[0] == loop(make(), seeded_stream(), 1)[0][3:]
    assert message is None


def test_generators_that_were_made_where_nobody_sees_them_are_told():
    class Lazy(Plain):
        def __getitem__(self, index):
            if not hasattr(self, "own"):
                self.own = random.Random(0)
            return index

    position = interrupted(lambda: DataLoader(Lazy(), BATCH), 0, 3)
    _, message, _ = resumed(lambda: DataLoader(Lazy(), BATCH, num_workers=1), position)
    names(message, says="generators")


def test_generators_of_the_loaders_own_are_found_in_order():
    loader = DataLoader(Augmented(), BATCH, shuffle=True, generator=own_generator())
    assert generators_of(loader) == [loader.dataset.own, loader.generator]


def test_each_batch_that_is_read_on_the_way_is_a_call_of_its_own():
    reads = []

    class Counts(Plain):
        def __getitem__(self, index):
            reads.append(index)
            return super().__getitem__(index)

    def make():
        return DataLoader(Counts(), BATCH)

    position, begun = interrupted(make, 0, 3), []
    reads.clear()
    restore(make(), Stream(capture()), position, lambda: begun.append(len(reads)))
    assert begun == [0, BATCH, 2 * BATCH]


def test_another_loader_is_refused():
    shorter = DataLoader(TensorDataset(torch.arange(9)), BATCH)
    seven = lambda: list(range(7))  # noqa: E731
    for make, num_batches, other, says in [
        (LOADERS["own generator"], 3, LOADERS["in order"](), "0 random 1"),  # generators
        *((make, 6, other, "3 batches 6") for make in (LOADERS["in order"], seven) for other in (shorter, [1, 2, 3])),
        (seven, 6, Stateful(), "no state_dict"),
        (Stateful, 3, [], "state_dict none"),
    ]:
        with refused(says=says):
            restore(other, Stream(capture()), interrupted(make, 0, num_batches))


# Loaders that keep one iterator over all epochs


class Forever:
    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        while True:
            yield from self.sampler


class MultiEpochs(DataLoader):
    """As those of timm and YOLO: opened once, as it is made."""

    def __init__(self):
        super().__init__(Plain(), BATCH, shuffle=True)
        object.__setattr__(self, "batch_sampler", Forever(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self):
        return len(self.batch_sampler.sampler)

    def __iter__(self):
        for _ in range(len(self)):
            yield next(self.iterator)


class Cycled:
    """Opened at its first epoch, in a generator that another object holds."""

    def __init__(self):
        self.source = SimpleNamespace(batches=None)

    def _all(self):
        while True:
            yield from DataLoader(Plain(), BATCH, shuffle=True)

    def __iter__(self):
        self.source.batches = self.source.batches or self._all()
        return itertools.islice(self.source.batches, 6)


class InAList(Cycled):
    """Holds it in a list."""

    def __init__(self):
        self.iterators = [self._all()]

    def __iter__(self):
        return itertools.islice(self.iterators[0], 6)


class InAClosure(Cycled):
    """Holds it in a variable that a function of its own reads."""

    def __init__(self):
        batches = self._all()
        self.next = lambda: next(batches)

    def __iter__(self):
        return (self.next() for _ in range(6))


class Prefetches:
    """Keeps the iterator of the epoch in progress alone, as prefetchers do."""

    def __iter__(self):
        self.iterator = iter(DataLoader(Plain(), BATCH))
        return self

    def __next__(self):
        return next(self.iterator)


class Begins:
    """Holds an iterator of a class of its own, which begins again at each `iter`."""

    class Rows:
        def __iter__(self):
            self.rows = list(DataLoader(Plain(), BATCH))
            return self

        def __next__(self):
            if not self.rows:
                raise StopIteration
            return self.rows.pop(0)

    def __init__(self):
        self.rows = self.Rows()

    def __iter__(self):
        return iter(self.rows)


@pytest.mark.parametrize(
    ("make", "is_told"),
    [(MultiEpochs, True), (Cycled, True), (InAList, True), (InAClosure, True), (Prefetches, False), (Begins, False)],
)
def test_an_iterator_that_is_kept_over_epochs_is_told_from_the_second_one_on(make, is_told):
    expected = loop(make(), seeded_stream(), 1)[0][2:]
    found, message, _ = resumed(make, interrupted(make, 0, 2))
    assert (found[0], message) == (expected, None)
    _, message, _ = resumed(make, interrupted(make, 1, 2))
    assert (message is not None) == is_told


def test_a_kept_iterator_that_was_read_in_this_process_is_told():
    loader = MultiEpochs()
    position = interrupted(lambda: loader, 0, 2)
    names(resumed(lambda: loader, position)[1], says="iterator epochs")


@forks
def test_the_only_iterator_of_a_loader_is_not_ended_with_its_workers(monkeypatch):
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.1)  # s for which torch waits for workers

    class Kept(MultiEpochs):
        def __init__(self):
            DataLoader.__init__(self, Plain(), BATCH, num_workers=1, persistent_workers=True)
            object.__setattr__(self, "batch_sampler", Forever(self.batch_sampler))
            self.iterator = DataLoader.__iter__(self)

    found, message, _ = resumed(Kept, interrupted(Kept, 0, 2))
    assert found[0] == loop(Kept(), seeded_stream(), 1)[0][2:]
    names(message, says="iterator epochs")


class CountsEpochs(RandomSampler):
    """Its order depends on how often it was asked for, as that of a DistributedSampler on its epoch."""

    epoch = 0

    def __iter__(self):
        generator = own_generator(self.epoch)
        self.epoch += 1
        return iter(torch.randperm(NUM_SAMPLES, generator=generator).tolist())


class MovesItsList(RandomSampler):
    def __init__(self, data):
        super().__init__(data)
        self.order = list(range(NUM_SAMPLES))

    def __iter__(self):
        random.shuffle(self.order)
        return iter(self.order)


@pytest.mark.parametrize(
    ("kind", "says"),
    [(CountsEpochs, "CountsEpochs.epoch 1 2"), (MovesItsList, "MovesItsList.order")],
)
def test_numbers_that_a_loader_keeps_from_epoch_to_epoch_are_compared(kind, says):
    def make():
        return DataLoader(DATA, BATCH, sampler=kind(DATA))

    expected = loop(make(), seeded_stream(), 1)[0][2:]
    found, message, _ = resumed(make, interrupted(make, 0, 2))
    assert (found[0], message) == (expected, None)
    names(resumed(make, interrupted(make, 1, 2))[1], says=says)


@forks
def test_workers_that_give_batches_out_of_order_are_told_in_the_middle_of_an_epoch():
    make = workers(Plain, in_order=False)
    for num_batches in (0, 3):
        message = resumed(make, interrupted(make, 0, num_batches))[1]
        assert (message is not None) == (num_batches > 0)


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        (
            lambda: DataLoader(Plain(), BATCH),
            lambda: DataLoader(Plain(), 2 * BATCH),
            f"batch_size: {2 * BATCH} {BATCH}",
        ),
        (
            lambda: DataLoader(Plain(), BATCH),
            lambda: DataLoader(Plain(), BATCH, shuffle=True),
            "RandomSampler Sequential",
        ),
        (lambda: list(range(5)), lambda: list(range(7)), "length: 7 5"),
    ],
    ids=["batch size", "order", "list"],
)
def test_what_a_place_depends_on_is_compared(first, second, says):
    for num_batches in (0, 2):
        message = resumed(second, interrupted(first, 0, num_batches))[1]
        names(message, says=says)
        assert ("miss" in message) == (num_batches > 0)


@forks
def test_an_iterable_data_set_has_other_places_with_another_number_of_workers():
    first, second = (lambda k=k: DataLoader(Counting(), BATCH, num_workers=k) for k in (1, 2))
    names(resumed(second, interrupted(first, 0, 2))[1], says="num_workers: 2 1")


class Counted(BatchSampler):
    """Its length is found by drawing."""

    def __init__(self):
        self.generator = own_generator()
        super().__init__(RandomSampler(DATA, generator=self.generator), BATCH, drop_last=False)

    def __len__(self):
        return sum(1 for _ in self)


def test_nothing_is_drawn_to_know_where_a_loader_stands():
    loader, stream = DataLoader(DATA, batch_sampler=Counted()), seeded_stream()
    before = states_of(loader)
    epoch_start(loader, stream)
    assert torch.equal(before[0], states_of(loader)[0])


class Wraps:
    def __init__(self, batch_size):
        self.loader = DataLoader(Plain(), batch_size)

    def __iter__(self):
        return iter(self.loader)


def test_a_loader_within_another_is_compared():
    names(resumed(lambda: Wraps(8), interrupted(lambda: Wraps(4), 0, 2))[1], says="batch_size: 8 4")
