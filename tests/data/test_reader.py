"""Batches come in the order of the plain loop, each with the random state that the plain loop would have."""

import random
from queue import SimpleQueue

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from hydra_engine import ModelTask, stream_seed
from hydra_engine.data.reader import Reader
from hydra_engine.data.streams import Stream, capture, install, installed, seeded
from hydra_engine.schedule.events import BatchReady, DataEnded, DataFailed
from tests.covering import covering
from tests.refused import refused

PATIENCE_S = 30
SEED = 77


class Noisy:
    """A loader that draws from every generator, at its start and for each batch, and counts what is asked of it."""

    def __init__(self, num_batches, size=4):
        self.num_batches, self.size = num_batches, size
        self.num_iterators = self.num_read = 0

    def __len__(self):
        return self.num_batches

    def __iter__(self):
        self.num_iterators += 1
        offset = torch.rand(1) + random.random() + np.random.rand()
        for _ in range(self.num_batches):
            self.num_read += 1
            inputs = torch.randn(self.size, 2) + offset + random.random() + np.random.standard_normal()
            yield inputs.float(), torch.randint(5, (self.size,))


class Endless(IterableDataset):
    """Has no length."""

    def __iter__(self):
        for _ in range(3):
            yield torch.rand(2), torch.randint(5, ())


def shuffled(num_samples=10, batch_size=4):
    return DataLoader(TensorDataset(torch.arange(num_samples), torch.arange(num_samples)), batch_size, shuffle=True)


LOADERS = {
    "noisy": lambda: Noisy(3),
    "shuffled": shuffled,
    "in order": lambda: DataLoader(TensorDataset(torch.arange(6), torch.arange(6)), 2),
    "list": lambda: [(torch.ones(2) * k, torch.zeros(2)) for k in range(3)],
    "without a length": lambda: DataLoader(Endless(), 2),
}


def draw():
    """What layers draw in a step."""
    return torch.rand(3), random.random(), np.random.rand()


def task_of(loader, epochs=2, **options):
    return ModelTask([nn.Linear(2, 2)], F.cross_entropy, loader, epochs=epochs, seed=SEED, **options)


def plain_loop(loader, *, epochs=2, validation=None, layers_draw=False):
    """(training, inputs, target, states after the read) of every batch, by the loop of tests/reference.py."""
    seen = []

    def read(loader, is_training):
        for inputs, target in loader:
            seen.append((is_training, inputs, target, capture()))
            if layers_draw:
                draw()

    outside = capture()
    torch.manual_seed(SEED)
    for _ in range(epochs):
        read(loader, True)
        if validation is not None:
            with torch.random.fork_rng(devices=[]):
                read(validation, False)
    install(outside)
    return seen


class Client:
    """Reads as the engine does: asks, waits for the event, takes."""

    def __init__(self, task, num_micro_batches=None):
        self.events = SimpleQueue()
        self.reader = Reader(task, "task-0")
        if num_micro_batches is not None:
            self.reader.num_micro_batches = lambda: num_micro_batches

    def __enter__(self):
        self.reader.start(self.events.put, 1)
        return self

    def __exit__(self, *exc):
        assert self.reader.close()

    def next_event(self, main=None):
        self.reader.request(main)
        return self.events.get(timeout=PATIENCE_S)

    def all(self, *, layers_draw=False):
        """Every batch with its event, until the data ends."""
        seen, main = [], None
        while isinstance(event := self.next_event(main), BatchReady):
            batch = self.reader.take()
            if layers_draw:
                stream = Stream(batch.main)
                with installed(stream):
                    draw()
                main = stream.state
            seen.append((event, batch))
        assert event == DataEnded("task-0")
        return seen


def values(batch, m=0):
    """Inputs and target that a micro-batch is trained on."""
    return tuple(boundary.build(boundary.tensors) for boundary in batch.boundaries[m])


def assert_as_plain(seen, expected):
    assert len(seen) == len(expected)
    for (event, batch), (training, inputs, target, state) in zip(seen, expected, strict=True):
        assert batch.training == event.training == training
        assert batch.step == event.step
        x, y = values(batch)
        assert torch.equal(x, inputs)
        assert torch.equal(y, target)
        assert batch.main.same_as(state._replace(device=batch.main.device))
        assert batch.start == [batch.main]


@covering(loader=list(LOADERS), validation=[None, "noisy", "shuffled"], layers_draw=[False, True])
def test_batches_and_random_states_are_the_plain_loops(loader, validation, layers_draw):
    def loaders():
        return LOADERS[loader](), validation and LOADERS[validation]()

    training, evaluation = loaders()
    expected = plain_loop(training, validation=evaluation, layers_draw=layers_draw)
    training, evaluation = loaders()
    with Client(task_of(training, validation=evaluation)) as client:
        assert_as_plain(client.all(layers_draw=layers_draw), expected)


def test_process_wide_generators_are_left_alone():
    task = task_of(Noisy(3), validation=Noisy(2))
    before = capture()
    with Client(task) as client:
        client.reader.sample()
        client.all()
    assert capture().same_as(before)


def test_steps_count_training_and_evaluation_apart_and_epochs_together():
    with Client(task_of(Noisy(2), validation=Noisy(1))) as client:
        seen = [(batch.training, batch.step, batch.epoch) for _, batch in client.all()]
    assert seen == [(True, 0, 0), (True, 1, 0), (False, 0, 0), (True, 2, 1), (True, 3, 1), (False, 1, 1)]


def test_evaluations_come_after_every_so_many_steps_and_are_numbered():
    with Client(task_of(Noisy(3), validation=Noisy(2), validation_interval=2)) as client:
        seen = [(batch.training, batch.step, batch.epoch, batch.evaluation) for _, batch in client.all()]
    # The last evaluation comes before the loader's second epoch is seen to end.
    assert [(step, epoch, number) for training, step, epoch, number in seen if training] == [
        (0, 0, 0), (1, 0, 0), (2, 0, 1), (3, 1, 1), (4, 1, 2), (5, 1, 2)
    ]  # fmt: skip
    assert [(step, epoch, number) for training, step, epoch, number in seen if not training] == [
        (0, 0, 0), (1, 0, 0), (2, 1, 1), (3, 1, 1), (4, 1, 2), (5, 1, 2)
    ]  # fmt: skip
    assert [training for training, *_ in seen] == [True, True, False, False] * 3


def test_the_loaders_iterator_stays_open_through_an_evaluation():
    loader, validation = Noisy(5), Noisy(1)
    with Client(task_of(loader, epochs=1, validation=validation, validation_interval=2)) as client:
        num_batches = len(client.all())
    assert num_batches == 5 + 2
    assert (loader.num_iterators, loader.num_read) == (1, 5)
    assert (validation.num_iterators, validation.num_read) == (2, 2)


@pytest.mark.parametrize("num_samples", [0, 1, 2, 5])
def test_loader_is_read_once_however_often_it_is_sampled(num_samples):
    loader = Noisy(3)
    expected = plain_loop(Noisy(3))
    client = Client(task_of(loader))
    samples = [client.reader.sample() for _ in range(num_samples)]
    assert (loader.num_iterators, loader.num_read) == ((1, 1) if num_samples else (0, 0))
    with client:
        seen = client.all()
    assert_as_plain(seen, expected)
    assert (loader.num_iterators, loader.num_read) == (2, 6)
    for sample in samples:
        assert all(map(torch.equal, values(sample), values(seen[0][1])))


def test_sample_is_split_as_the_plan_wants_it_now_and_not_as_it_would_be_evaluated():
    reader = Reader(task_of(Noisy(2, size=5), validation=[None]), "task-0")
    sizes = []
    for number in (1, 2, 4, 1):
        reader.num_micro_batches = lambda number=number: number
        sizes.append([len(values(reader.sample(), m)[0]) for m in range(len(reader.sample().boundaries))])
    reader.num_micro_batches = lambda: 2
    evaluation = reader.sample(training=False)
    reader.close()
    assert sizes == [[5], [3, 2], [2, 1, 1, 1], [5]]
    assert len(evaluation.boundaries) == 1
    assert evaluation.start == [evaluation.main]
    assert len(values(evaluation)[0]) == 5
    assert not evaluation.training


@pytest.mark.parametrize(
    ("loss_reduction", "weights"), [("mean", [4, 4, 2]), (lambda y: (y > 4).sum(), [0, 3, 2])], ids=["mean", "function"]
)
def test_evaluation_weighs_batches_by_their_samples_or_by_the_users_count(loss_reduction, weights):
    validation = DataLoader(TensorDataset(torch.arange(10.0), torch.arange(10)), 4)
    task = task_of(Noisy(1), epochs=1, validation=validation, loss_reduction=loss_reduction)
    with Client(task) as client:
        assert [batch.weight for _, batch in client.all() if not batch.training] == weights


def test_micro_batches_have_streams_of_their_own():
    expected = plain_loop(Noisy(2, size=5))
    with Client(task_of(Noisy(2, size=5), validation=[(torch.ones(4, 2), torch.ones(4))]), 3) as client:
        seen = client.all()
    training = [batch for _, batch in seen if batch.training]
    for step, (batch, (_, inputs, target, state)) in enumerate(zip(training, expected, strict=True)):
        pieces = [values(batch, m) for m in range(3)]
        assert torch.equal(torch.cat([x for x, _ in pieces]), inputs)
        assert torch.equal(torch.cat([y for _, y in pieces]), target)
        assert torch.equal(batch.main.torch, state.torch)
        for m, start in enumerate(batch.start):
            assert torch.equal(start.torch, seeded(stream_seed(SEED, step, m)))
            assert start.same_outside_torch(batch.main)
    for batch in (batch for _, batch in seen if not batch.training):  # an evaluation is never split
        assert len(batch.boundaries) == 1
        assert batch.start[0].same_as(batch.main)


def test_batch_is_a_copy_of_what_the_loader_may_write_over():
    class Reuses:
        """Reads every batch into the same memory."""

        def __iter__(self):
            memory = torch.zeros(3, 2)
            for k in range(3):
                yield memory.fill_(k), memory[:, 0]

    with Client(task_of(Reuses(), epochs=1)) as client:
        seen = client.all()
    assert [[value.unique().tolist() for value in values(batch)] for _, batch in seen] == [[[k], [k]] for k in range(3)]


def test_unpack_and_split_are_the_users():
    def unpack(batch):
        return batch["x"], batch["y"]

    def split(inputs, target, num):
        return [(inputs[m::num], target[m::num], 0.5) for m in range(num)]

    loader = [{"x": torch.arange(6), "y": torch.arange(6) * 10}]
    with Client(task_of(loader, epochs=1, unpack=unpack, split=split), 2) as client:
        [(_, batch)] = client.all()
    assert [value.tolist() for value in values(batch, 1)] == [[1, 3, 5], [10, 30, 50]]
    assert [weight for *_, weight in batch.micro_batches] == [0.5, 0.5]


class Fails:
    """Raises before its batch number `at`, or at its start."""

    def __init__(self, at):
        self.at = at

    def __iter__(self):
        if self.at is None:
            raise RuntimeError("boom at the start")
        for k in range(3):
            if k == self.at:
                raise RuntimeError(f"boom at {k}")
            yield torch.ones(2), torch.ones(2)


@pytest.mark.parametrize(("at", "num_read"), [(None, 0), (0, 0), (2, 2)])
def test_loader_that_raises_is_reported_after_what_was_read(at, num_read):
    task = task_of(Fails(at))
    before = capture()
    with Client(task) as client:
        for step in range(num_read):
            assert client.next_event() == BatchReady("task-0", step, True)
            client.reader.take()
        event = client.next_event()
    assert isinstance(event, DataFailed)
    assert str(event.error).startswith("boom at")
    assert event.task == "task-0"
    assert capture().same_as(before)


def test_batch_that_could_not_be_split_is_split_again_after_a_restart():
    failing = [1, 2]

    def split_at_times(inputs, target, number):
        draws = torch.rand(())
        if failing and float(inputs[0, 0]) == failing[0]:
            raise RuntimeError(f"boom at {failing.pop(0)}")
        return [(inputs + draws, target, 1.0)]

    def read():
        loader = [(torch.full((2, 2), float(k)), torch.ones(2)) for k in range(4)]
        seen, failures = [], 0
        with Client(task_of(loader, epochs=1, split=split_at_times), 2) as client:
            while not isinstance(event := client.next_event(), DataEnded):
                if isinstance(event, DataFailed):
                    failures += 1
                    client.reader.restart()
                else:
                    seen.append(values(client.reader.take())[0])
        return seen, failures

    seen, failures = read()
    expected, none = read()
    assert (failures, none, len(seen)) == (2, 0, 4)
    assert all(map(torch.equal, seen, expected))


@pytest.mark.parametrize(
    ("loader", "validation", "error", "says"),
    [
        (Fails(None), None, RuntimeError, "boom"),
        (Fails(0), None, RuntimeError, "boom"),
        ([], None, ValueError, "task-0 loader empty"),
        ([], [(torch.ones(2), torch.ones(2))], ValueError, "task-0 loader empty"),
    ],
    ids=["raises at the start", "raises", "empty", "empty beside a validation"],
)
def test_sample_of_a_loader_that_raises_or_is_empty_raises_the_same_again(loader, validation, error, says):
    reader = Reader(task_of(loader, validation=validation), "task-0")
    for _ in range(2):
        with refused(error, says=says):
            reader.sample()
    reader.close()


def test_close_ends_the_loaders_iterator():
    closed = []

    class Cleans:
        def __iter__(self):
            try:
                while True:
                    yield torch.ones(2), torch.ones(2)
            finally:
                closed.append(True)

    with Client(task_of(Cleans())) as client:
        client.next_event()
        client.reader.take()
    del client
    assert closed == [True]


def test_closed_without_having_started_reads_nothing():
    loader = Noisy(2)
    assert Reader(task_of(loader), "task-0").close()
    assert loader.num_iterators == 0
