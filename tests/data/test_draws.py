"""Loaders are read side by side, with the draws of the plain loop; what cannot be is a message with its task's name."""

import queue
import random
import threading
from contextlib import ExitStack, contextmanager, suppress

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset, TensorDataset

from hydra_engine import Callback, Logger, ModelTask, drawing_apart, stream_seed
from hydra_engine.data.draws import UserDraws
from hydra_engine.data.streams import Stream, capture, install, installed
from tests import exact, reference
from tests.covering import covering
from tests.data.test_streams import DRAWS, draws_in_turns, draws_of, in_threads, state_of
from tests.data.test_timeout import draws_outside
from tests.refused import names, refused

PATIENCE_S = 30
NUM_BATCHES = 12


class Loader:
    """Gives batches of noise; calls `before(k)` as batch number k of all epochs is asked for."""

    def __init__(self, before=lambda k: None, noise=lambda k: torch.randn(4, 3), num_batches=NUM_BATCHES):
        self.before, self.noise, self.num_batches, self.num_read = before, noise, num_batches, 0

    def __len__(self):
        return self.num_batches

    def __iter__(self):
        for _ in range(self.num_batches):
            k, self.num_read = self.num_read, self.num_read + 1
            self.before(k)
            yield self.noise(k), torch.ones(4, 2) * k


def model(seed, *, dropout=0.0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = [nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)]
    return nn.Sequential(*layers[:2], nn.Dropout(dropout), layers[2])


@contextmanager
def left_alone():
    """Put the process-wide generators back, which tasks' streams begin with meanwhile."""
    outside = capture()
    seed_outside_torch()
    try:
        yield
    finally:
        install(outside)


def plain(loader, *, seed=1, dropout=0.0, epochs=2, **options):
    """Losses and weights of the plain loop."""
    net = model(seed, dropout=dropout)
    with left_alone():
        return reference.train(net, nn.MSELoss(), loader, seed=seed, lr=0.05, epochs=epochs, **options), net


def seed_outside_torch():
    """Make `random` and `numpy.random` what a task's streams of both begin with, when an orchestrator is made."""
    random.seed(99)
    np.random.seed(99)


def task(name, loader, *, seed=1, dropout=0.0, epochs=2, **options):
    return ModelTask(model(seed, dropout=dropout), nn.MSELoss(), loader, 0.05, epochs, name=name, seed=seed, **options)


def orchestra_of(*tasks, num_devices=1, **options):
    seed_outside_torch()
    return exact.silent(tasks, num_devices=num_devices, **options)


def train(*tasks, num_devices=1):
    return orchestra_of(*tasks, num_devices=num_devices).train_models()


def assert_as_plain(report, trained, expected):
    result, net = expected
    outcome = report.tasks[trained.name]
    assert outcome.status == "finished", outcome.error
    assert outcome.losses == result.losses
    assert outcome.validation_losses == result.validation_losses
    assert all(torch.equal(a, b) for a, b in zip(trained.model.parameters(), net.parameters(), strict=True))


def test_loaders_are_read_at_the_same_time():
    """Each batch of a loader waits until the other one is asked for its own."""
    both = threading.Barrier(2)

    def meet(k):
        if k > 1:
            both.wait(PATIENCE_S)

    tasks = [task(name, Loader(meet), seed=seed, dropout=0.5) for seed, name in enumerate("ab")]
    before = draws_outside()
    report = train(*tasks)
    for seed, each in enumerate(tasks):
        assert_as_plain(report, each, plain(Loader(), seed=seed, dropout=0.5))
    assert report.messages == ()
    assert draws_outside()[0] == before[0]
    assert both.broken is False


def test_draws_from_torch_are_those_of_the_stream():
    before = draws_outside()
    for name, draw in DRAWS.items():
        beside, alone = UserDraws("task"), UserDraws("task", alone=True)
        stream, expected = Stream(state_of(5)), Stream(state_of(5))
        for _ in range(5):
            with alone.drawing(expected):
                wanted = draw()
            with beside.drawing(stream):
                assert torch.equal(draw(), wanted), name
            assert torch.equal(stream.state.torch, expected.state.torch), name
    assert draws_outside() == before


def seeds_itself(k):
    torch.manual_seed(k)
    return torch.randn(4, 3)


def in_a_fork(k):
    with torch.random.fork_rng():
        torch.manual_seed(k)
        x = torch.randn(4, 3)
    return x + torch.randn(4, 3)


def puts_back(k):
    state = torch.get_rng_state()
    x = torch.randn(4, 3)
    torch.set_rng_state(state)
    return x + torch.randn(4, 3)


def by_initial_seed(k):
    generator = np.random.default_rng(torch.initial_seed() % 2**32 + k)
    return torch.from_numpy(generator.random((4, 3), dtype=np.float32)) + torch.rand(1)


def by_default_generator(k):
    return torch.randn(4, 3, generator=torch.default_generator) + torch.randperm(3, generator=torch.default_generator)


@covering(strength=1, noise=[seeds_itself, in_a_fork, puts_back, by_initial_seed, by_default_generator], late=[0, 1, 5])
def test_torchs_own_functions_mean_the_tasks_stream(noise, late):
    def noisy(k):
        return noise(k) if k >= late else torch.full((4, 3), float(k))

    each = task("a", Loader(noise=noisy), dropout=0.5)
    before = draws_outside()
    report = train(each, task("b", Loader(), seed=2))
    assert_as_plain(report, each, plain(Loader(noise=noisy), dropout=0.5))
    assert draws_outside()[0] == before[0]
    assert torch.random.default_generator is torch.default_generator


class Augmented(Dataset):
    """Draws from all three in the process that loads."""

    def __len__(self):
        return 16

    def __getitem__(self, k):
        noise = torch.randn(3) + random.random() + np.random.standard_normal()
        return noise.float() + torch.initial_seed() % 7, torch.ones(2) * k


@pytest.mark.parametrize("persistent", [True, pytest.param(False, marks=pytest.mark.rest)])
def test_workers_are_seeded_as_in_the_plain_loop(persistent):
    def loader():
        return DataLoader(Augmented(), 4, shuffle=True, num_workers=2, persistent_workers=persistent)

    each = task("a", loader(), epochs=3, dropout=0.5)
    assert_as_plain(train(each, task("b", Loader(), seed=2)), each, plain(loader(), epochs=3, dropout=0.5))


@pytest.mark.rest
def test_many_shuffled_loaders():
    def loader(seed):
        torch.manual_seed(seed)
        return DataLoader(TensorDataset(torch.randn(40, 3), torch.randn(40, 2)), 4, shuffle=True)

    tasks = [task(f"t{k}", loader(k), seed=k, dropout=0.5, validation=loader(50 + k)) for k in range(4)]
    report = train(*tasks, num_devices=2)
    for k, each in enumerate(tasks):
        assert_as_plain(report, each, plain(loader(k), seed=k, dropout=0.5, validation=loader(50 + k)))


# -- what draws from `random` or `numpy.random`


def from_random(k):
    return torch.full((4, 3), random.random())


def from_numpy(k):
    return torch.from_numpy(np.random.standard_normal((4, 3)).astype(np.float32))


def late(noise, at, num=1000):
    """Noise of batches `at` to `at + num`; else none."""
    return lambda k: noise(k) if at <= k < at + num else torch.full((4, 3), float(k))


@pytest.mark.parametrize("noise", [from_random, pytest.param(from_numpy, marks=pytest.mark.rest)])
def test_loader_that_draws_from_the_first_batch_is_read_alone(noise):
    both = [task(name, Loader(noise=noise), dropout=0.5) for name in "ab"]
    report = train(*both)
    for each in both:
        assert_as_plain(report, each, plain(Loader(noise=noise), dropout=0.5))


@pytest.mark.rest
@pytest.mark.parametrize("num", [1, 1000])
@pytest.mark.parametrize("at", [pytest.param(2, marks=pytest.mark.net), 10, NUM_BATCHES + 3])
@pytest.mark.parametrize("noise", [from_random, from_numpy])
def test_loader_that_draws_late_is_exact_where_nothing_else_draws(noise, at, num):
    each = task("late", Loader(noise=late(noise, at, num)))
    report = train(each)
    assert_as_plain(report, each, plain(Loader(noise=late(noise, at, num))))
    names(*report.messages, task="late", says="loader `")


class Waits:
    """Two loaders that are read at the same time, as long as both are read."""

    def __init__(self):
        self.both = threading.Barrier(2)

    def __call__(self, k):
        if k > 1 and not self.both.broken:
            with suppress(threading.BrokenBarrierError):  # the other is over, or read alone
                self.both.wait(1)


@pytest.mark.rest
@pytest.mark.parametrize("noise", [from_random, from_numpy])
def test_others_are_exact_beside_one_that_draws_late(noise):
    waits = Waits()
    guilty = task("late", Loader(waits, late(noise, 10)))
    other = task("other", Loader(waits), seed=2, dropout=0.5)
    report = train(guilty, other)
    names(*[text for text in report.messages if text.startswith("late:")], task="late", says="loader `")
    assert_as_plain(report, other, plain(Loader(), seed=2, dropout=0.5))


class Tells(Callback):
    def __init__(self):
        self.over = threading.Event()

    def on_epoch(self, report, epoch):
        if epoch == 1:
            self.over.set()


@pytest.mark.rest
@pytest.mark.parametrize("validation", [True, pytest.param(False, marks=pytest.mark.rest)])
def test_loader_may_wait_for_anothers_callback(validation):
    """The other opens iterators and reads, its validation's for the first time too."""
    tells = Tells()

    def wait(k):
        if k == 3:
            assert tells.over.wait(PATIENCE_S)

    waiting = task("waiting", Loader(wait), timeout_s=PATIENCE_S)
    other = task("other", Loader(), seed=2, dropout=0.5, callbacks=[tells], validation=Loader() if validation else None)
    report = train(waiting, other)
    assert_as_plain(report, waiting, plain(Loader()))
    assert_as_plain(report, other, plain(Loader(), seed=2, dropout=0.5, validation=Loader() if validation else None))


# -- what splits a batch


def shuffled_parts(inputs, target, number):
    order = torch.randperm(len(inputs))
    return [(inputs[order[m::number]], target[order[m::number]], 1 / number) for m in range(number)]


def noisy_parts(inputs, target, number):
    noise = random.random() + np.random.standard_normal() + torch.rand(1).item()
    return [(inputs[m::number] + noise, target[m::number], 1 / number) for m in range(number)]


class CountsCalls:
    """Has a generator of its own, and counts: one call more than the plain loop's would show."""

    def __init__(self):
        self.generator, self.num_calls = torch.Generator().manual_seed(5), 0

    def __call__(self, inputs, target, number):
        self.num_calls += 1
        noise = torch.rand((), generator=self.generator) * self.num_calls
        return [(inputs[m::number] + noise, target[m::number], 1 / number) for m in range(number)]


def plain_split(loader, split, number, *, epochs=2, dropout=0.5):
    """The loop of the design, with the user's `split`."""
    net = model(1, dropout=dropout)
    optimizer, losses, loss_fn = torch.optim.SGD(net.parameters(), lr=0.05), [], nn.MSELoss()
    with left_alone():
        torch.manual_seed(1)
        for inputs, target in (batch for _ in range(epochs) for batch in loader):
            optimizer.zero_grad(set_to_none=True)
            parts = []
            for m, (x, y, w) in enumerate(split(inputs, target, number)):
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(stream_seed(1, len(losses), m))
                    part = loss_fn(net(x), y) * w
                    part.backward()
                    parts.append(part.item())
            losses.append(sum(parts))
            optimizer.step()
    return reference.Result(losses=losses, validation_losses=[]), net


@pytest.mark.rest
@covering(strength=1, split=[shuffled_parts, noisy_parts, CountsCalls], generates=[False, True])
def test_split_that_draws(split, generates):
    make = split if isinstance(split, type) else lambda: split
    each = task("a", Loader(), dropout=0.5, accumulation_steps=2, split=make())
    other = task("b", Loader(), seed=2)
    orchestra = orchestra_of(each, other)
    if generates:
        orchestra.generate()
        orchestra.generate()
    report = orchestra.train_models()
    assert_as_plain(report, each, plain_split(Loader(), make(), 2))
    assert_as_plain(report, other, plain(Loader(), seed=2))


@pytest.mark.rest
def test_split_that_draws_goes_on_where_it_was_saved(tmp_path):
    def made(*callbacks):
        options = {"dropout": 0.5, "accumulation_steps": 2, "split": shuffled_parts, "epochs": 3}
        each = task("a", Shuffled(), callbacks=callbacks, **options)
        return each, orchestra_of(each, checkpoint_dir=tmp_path, checkpoint_every=5)

    class Shuffled:
        def __len__(self):
            return NUM_BATCHES

        def __iter__(self):
            for k in range(NUM_BATCHES):
                yield torch.randn(4, 3), torch.ones(4, 2) * k

    class Breaks(Callback):
        def on_step(self, report):
            if report.steps == 17:
                raise RuntimeError("boom")

    expected = plain_split(Shuffled(), shuffled_parts, 2, epochs=3)
    _, orchestra = made(Breaks())
    with pytest.raises(RuntimeError, match="boom"):
        orchestra.train_models()
    again, orchestra = made()
    assert_as_plain(orchestra.train_models(resume=True), again, expected)


def test_weights_of_batches_and_unpack_that_draw():
    def unpack(batch):
        x, y = batch
        return x + torch.rand(1) + random.random(), y

    def weight(target):
        torch.rand(3)
        return float(len(target))

    each = task("a", Loader(), dropout=0.5, unpack=unpack, loss_reduction=weight)
    report = train(each, task("b", Loader(), seed=2))
    assert_as_plain(report, each, plain(Loader(), dropout=0.5, unpack=unpack))


# -- loaders that can be read once


@pytest.mark.parametrize(
    "make", [iter, lambda x: (y for y in x), lambda x: map(tuple, x), lambda x: zip(*zip(*x, strict=True), strict=True)]
)
def test_iterator_is_refused_where_it_is_read_twice(make):
    batches = [(torch.ones(4, 3), torch.ones(4, 2))] * 3
    for field, loader, validation in (("dataloader", make(batches), None), ("validation", batches, make(batches))):
        with refused(says=f"{field} once iter"):
            task("a", loader, validation=validation)
    assert train(task("a", make(batches), epochs=1)).tasks["a"].steps == 3


class Once:
    """Gives its batches at the first iter() alone; `starts_anew`: at each."""

    def __init__(self, *, starts_anew):
        self.starts_anew, self.position = starts_anew, 0

    def __iter__(self):
        self.position = 0 if self.starts_anew else self.position
        return self

    def __next__(self):
        if self.position == 3:
            raise StopIteration
        self.position += 1
        return torch.ones(4, 3) * self.position, torch.ones(4, 2)


def test_loader_that_gives_nothing_later_is_an_error():
    with refused(task="a", says="loader epoch 1"):
        train(task("a", Once(starts_anew=False)))
    again = task("a", Once(starts_anew=True))
    assert_as_plain(train(again), again, plain(Once(starts_anew=True)))


# -- threads of a loader's


@pytest.mark.rest
@pytest.mark.parametrize("at", [0, pytest.param(3, marks=pytest.mark.net)])
def test_torchs_generator_that_a_thread_of_its_own_moves_is_told(at):
    """Nothing can send its draws to the task's stream; read alone, they are of that."""

    class Background(Loader):
        def __iter__(self):
            for k in range(NUM_BATCHES):
                if k >= at:
                    thread = threading.Thread(target=torch.rand, args=(1,))
                    thread.start()
                    thread.join(PATIENCE_S)
                yield torch.randn(4, 3), torch.ones(4, 2)

    [message] = train(task("a", Background())).messages
    names(message, task="a", says="torch's generator loader_alone=True")
    each = task("a", Background(), loader_alone=True)
    report = train(each)
    assert_as_plain(report, each, plain(Background()))
    assert report.messages == ()


class DrawsAtEachStep(Callback):
    def __init__(self, draw):
        self.draw, self.drawn = draw, []

    def on_step(self, report):
        self.drawn.append(self.draw())


class Noisy(nn.Module):
    def forward(self, x):
        return x + np.random.standard_normal() if self.training else x


def weights():
    return [*nn.Linear(1, 2).weight.flatten().tolist(), torch.rand(()).item()]


CALLBACK_DRAWS = {
    "random": random.random,
    "a seed": lambda: random.seed(3),
    "numpy": lambda: np.random.rand(3).tolist(),
    "torch": weights,
    "torch's seed": lambda: torch.manual_seed(3).initial_seed(),
}


@pytest.mark.parametrize("others", [0, pytest.param(1, marks=pytest.mark.rest)])
@pytest.mark.parametrize("noise", [pytest.param(None, marks=pytest.mark.rest), from_random])
@pytest.mark.parametrize("what", CALLBACK_DRAWS)
def test_what_a_callback_draws_is_of_the_tasks_stream(what, noise, others):
    """As in the plain loop; other tasks', which draw the same, have streams of their own."""
    draw, drawn = CALLBACK_DRAWS[what], []
    noise = noise or (lambda k: torch.randn(4, 3))
    calls = [DrawsAtEachStep(draw) for _ in range(1 + others)]
    tasks = [task(f"t{k}", Loader(noise=noise), seed=k, dropout=0.5, callbacks=[calls[k]]) for k in range(1 + others)]
    report = train(*tasks)
    for k, each in enumerate(tasks):
        drawn.clear()
        step = lambda: drawn.append(draw())  # noqa: E731
        assert_as_plain(report, each, plain(Loader(noise=noise), seed=k, dropout=0.5, on_step=step))
        assert calls[k].drawn == drawn
    assert not report.messages


def test_what_a_callback_draws_as_a_layer_does_is_of_the_tasks_stream():
    def layers():
        return nn.Sequential(*model(1), Noisy())

    each, calls = layers(), DrawsAtEachStep(np.random.rand)
    trained = ModelTask(each, nn.MSELoss(), Loader(), 0.05, 2, name="a", callbacks=[calls], seed=1)
    report, expected = train(trained), layers()
    with left_alone():
        result = reference.train(expected, nn.MSELoss(), Loader(), seed=1, lr=0.05, epochs=2, on_step=np.random.rand)
    assert_as_plain(report, trained, (result, expected))


def test_what_is_drawn_as_an_epoch_begins_is_of_the_tasks_stream():
    class Seeds(Callback):
        def on_epoch_begin(self, report, epoch):
            random.seed(epoch)

    class Seeded(Loader):
        def __iter__(self):
            random.seed(self.num_read // NUM_BATCHES)
            return super().__iter__()

    each = task("a", Loader(noise=from_random), callbacks=[Seeds()])
    assert_as_plain(train(each), each, plain(Seeded(noise=from_random)))


def test_a_call_that_takes_long_keeps_others_waiting_for_moments(monkeypatch):
    monkeypatch.setattr("hydra_engine.data.streams.MOST_S", 0.01)
    draws, stream, others = UserDraws("a"), Stream(state_of(5)), {0: draws_of(0)}
    with draws.drawing(stream, "on_step", is_call=True):
        drawn, expected = random.random(), random.Random(5)
        assert in_threads(1, draws_in_turns) == others
        random.random()  # is the process's
    with installed(stream):
        assert [drawn, random.random()] == [expected.random(), expected.random()]


def test_what_is_drawn_in_company_of_a_call_is_told():
    draws, others, stream = UserDraws("a"), UserDraws("b"), Stream(capture())
    for _ in range(2):
        with draws.drawing(stream, "on_step"), others.drawing(stream):
            pass
    with others.drawing(stream), draws.drawing(stream, "on_step"):
        random.random()
    names(draws.message, task="a", says="callback `random`")
    names(others.message, task="b", says="loader `random`")


# Loaders that read in a thread of their own


class Reads(threading.Thread):
    """As prefetch_generator's BackgroundGenerator, which DataLoaderX gives: an iterator that is a thread.

    It begins to read with the first batch that is asked for, so that its draws always fall into a read.
    """

    def __init__(self, iterable):
        super().__init__(daemon=True, name="background")
        self.iterable, self.queue, self.asked = iterable, queue.SimpleQueue(), threading.Event()
        self.start()

    def run(self):
        self.asked.wait()
        for each in self.iterable:
            self.queue.put(each)
        self.queue.put(None)

    def __iter__(self):
        return self

    def __next__(self):
        self.asked.set()
        found = self.queue.get()
        if found is None:
            self.join()
            raise StopIteration
        return found


class DataLoaderX(DataLoader):
    def __iter__(self):
        return Reads(super().__iter__())


class Forgotten(DataLoader):
    """Its thread, which waits for room, is kept nowhere."""

    def __iter__(self):
        batches, room = super().__iter__(), queue.Queue(1)

        def read():
            for each in batches:
                room.put(each)
            room.put(None)

        threading.Thread(target=read, daemon=True).start()
        yield from iter(room.get, None)


@pytest.mark.parametrize("kind", [DataLoaderX, Forgotten])
def test_a_thread_of_a_loader_that_draws_from_torch_is_told(kind):
    def told(**options):
        x = torch.arange(32.0).view(16, 2)
        loader = kind(TensorDataset(x, x), 4, **options)
        task = ModelTask(nn.Sequential(nn.Linear(2, 2)), F.mse_loss, loader, seed=1, name="a")
        return exact.run([task]).messages

    [message] = told(shuffle=True)
    names(message, task="a", says="thread generator")
    assert told(shuffle=True, generator=torch.Generator().manual_seed(1)) == ()
    assert told() == ()


# A thread of the user's


class Own(nn.Module):
    """Has a forward of its own."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.b(self.a(x).relu() + 1)


class Adapted(torch.optim.AdamW):
    """An optimizer of the user's."""

    def step(self, closure=None):
        super().step(closure)


@contextmanager
def drawing(draw):
    over = threading.Event()

    def draws():
        while not over.wait(draw() % 1e-3):
            pass

    thread = threading.Thread(target=draws)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def seeded_again():
    torch.manual_seed(4)
    return 1e-4


DRAWS_ELSEWHERE = random.random, lambda: float(np.random.rand()), lambda: float(torch.rand(())), seeded_again


class DrawsAsItLogs(Logger):
    def log_step(self, step):
        for draw in DRAWS_ELSEWHERE:
            draw()


@pytest.mark.parametrize(
    ("build", "options"),
    [
        (lambda: model(1, dropout=0.5), {"optimizer": torch.optim.AdamW}),
        (Own, {"optimizer": Adapted, "lr_scheduler": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda k: 1)}),
    ],
    ids=["a chain", "a forward of its own"],
)
@pytest.mark.parametrize("accumulation_steps", [1, pytest.param(2, marks=pytest.mark.rest)])
def test_threads_and_a_logger_that_draw_fail_no_task_and_change_none(build, options, accumulation_steps):
    torch.manual_seed(1)
    batches = [(torch.randn(4, 3), torch.randn(4, 2)) for _ in range(6)]
    options, nets = options | {"accumulation_steps": accumulation_steps}, []
    for _ in range(3):
        torch.manual_seed(1)
        nets.append(build())
    expected = reference.train(nets[0], nn.MSELoss(), batches, seed=1, lr=0.05, epochs=2, **options), nets[0]
    tasks = [
        ModelTask(net, nn.MSELoss(), batches, 0.05, 2, name=name, seed=1, callbacks=[Callback()], **options)
        for name, net in zip("ab", nets[1:], strict=True)
    ]
    with ExitStack() as stack:
        for draw in DRAWS_ELSEWHERE:
            stack.enter_context(drawing(draw))
        report = exact.silent(tasks, num_devices=2, loggers=[DrawsAsItLogs()]).train_models()
    for each in tasks:
        assert_as_plain(report, each, expected)
    told = [text.partition(":")[0] for text in report.messages if "random stream" in text]
    assert len(set(told)) == len(told)


class ByRandom(nn.Linear):
    """Draws from `random`, as the user's thread does."""

    def forward(self, x):
        return super().forward(x) * (1 + random.random())


def by_random():
    return nn.Sequential(ByRandom(3, 2))


@pytest.mark.parametrize(
    ("build", "draw"),
    [
        (lambda: model(1, dropout=0.5), lambda: float(torch.rand(()))),
        (lambda: model(1, dropout=0.5), seeded_again),
        (Own, seeded_again),
        (by_random, random.random),
    ],
    ids=["torch", "a seed", "a forward of its own", "a layer that draws there, too"],
)
def test_a_thread_of_the_users_that_hides_what_layers_draw_fails_no_task(build, draw):
    torch.manual_seed(1)
    batches = [(torch.randn(4, 3), torch.randn(4, 2)) for _ in range(3)]
    with drawing(draw):
        report = exact.silent([ModelTask(build(), nn.MSELoss(), batches, 0.05, name="a", seed=1)]).train_models()
    report.raise_failures()


def test_what_is_drawn_apart_is_of_a_stream_of_its_own():
    before = torch.get_rng_state()
    with drawing_apart(7):
        found = [torch.rand(3), torch.randperm(4)]
    generator = torch.Generator().manual_seed(7)
    expected = [torch.rand(3, generator=generator), torch.randperm(4, generator=generator)]
    assert all(map(torch.equal, found, expected))
    with drawing_apart():
        torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)
