"""What stays on a device between units: bytes moved are near those of giving up what is needed last."""

import math
from functools import lru_cache
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hydra_engine import DeviceCost, ModelTask, TaskCost, simulate
from hydra_engine.devices.budget import SLABS, WORK, Ledger, Residents, Ticket
from hydra_engine.host.pool import HostPool
from hydra_engine.planning.planned import kept_bytes
from hydra_engine.schedule.units import BACKWARD, FORWARD, FUSED
from partitioners import Presharded
from tests import exact, reference, zoo
from tests.covering import covering
from tests.refused import names


class Kept:
    """A device's ledger and residents, whose next uses are set by hand."""

    def __init__(self, memory_bytes=100):
        self.ledger = Ledger("device", memory_bytes)
        self.residents = Residents(self.ledger)
        self.next_use_s = {}
        self.disposed = []

    def ask(self, num_bytes, kind=WORK):
        """What is granted at once."""
        grants = []
        self.ledger.request(Ticket(num_bytes=num_bytes, granted=grants.append, refused=lambda _: None, kind=kind))
        return grants

    def until(self, key, seconds):
        self.next_use_s[key] = seconds
        return lambda: self.next_use_s[key]

    def add(self, key, num_bytes, next_use_s, user="task"):
        assert self.ask(num_bytes, SLABS) == [num_bytes]
        dispose = lambda: self.disposed.append(key)  # noqa: E731
        self.residents.add(key, f"value of {key}", num_bytes, user, self.until(key, next_use_s), dispose)

    def put(self, key, num_bytes, next_use_s, user="task"):
        self.add(key, num_bytes, next_use_s, user)
        self.residents.unpin(key)

    def offer(self, key, num_bytes, next_use_s):
        return self.residents.offer(key, f"value of {key}", num_bytes, "task", self.until(key, next_use_s))


@pytest.fixture
def kept():
    return Kept()


def test_what_is_needed_last_makes_room(kept):
    for key, seconds in (("soon", 1.0), ("late", 9.0), ("later", 10.0)):
        kept.put(key, 30, seconds)
    assert kept.ask(10) == [10]
    assert kept.disposed == []
    assert kept.ask(20) == [20]
    assert kept.disposed == ["later"]
    kept.next_use_s["soon"] = 20.0  # things have changed
    assert kept.ask(30) == [30]
    assert kept.disposed == ["later", "soon"]
    assert kept.residents.take("late") == "value of late"
    assert kept.residents.take("late") is None
    assert kept.ledger.used_bytes == 60


def test_what_is_pinned_stays(kept):
    kept.add("mine", 60, 99.0)
    kept.put("free", 30, 1.0)
    assert kept.residents.pin("mine", "other", lambda: 1.0) == "value of mine"
    assert kept.residents.pin("nothing", "other", lambda: 1.0) is None
    kept.residents.unpin("mine")
    assert kept.ask(30) == [30]
    assert kept.ask(30) == []
    assert kept.disposed == ["free"]
    kept.residents.unpin("mine")
    assert kept.ask(20) == [20]
    assert kept.disposed == ["free", "mine"]


def test_what_nobody_needs_or_is_broken_goes_with_its_last_pin(kept):
    kept.add("never", 10, math.inf)
    kept.residents.unpin("never")
    kept.add("broken", 10, 1.0)
    kept.residents.pin("broken", "other", lambda: 1.0)
    kept.residents.unpin("broken", is_whole=False)
    assert kept.disposed == ["never"]
    kept.residents.unpin("broken", is_whole=False)
    assert kept.disposed == ["never", "broken"]
    assert kept.ledger.used_bytes == 0


def test_nothing_is_kept_that_nobody_needs_or_that_is_there(kept):
    assert kept.ask(20) == [20]
    assert not kept.residents.keep("never", "", 10, "task", lambda: math.inf)
    assert kept.residents.keep("one", "", 10, "task", lambda: 1.0)
    assert not kept.residents.keep("one", "", 10, "task", lambda: 1.0)
    assert not kept.offer("never again", 10, math.inf)


def test_an_offer_displaces_what_is_needed_later_and_nothing_else(kept):
    kept.put("a", 50, 5.0)
    kept.put("b", 40, 2.0)
    assert not kept.offer("x", 20, 6.0)
    assert not kept.offer("y", 70, 3.0), "a alone would not make room"
    assert kept.disposed == []
    assert kept.offer("z", 20, 3.0)
    assert kept.disposed == ["a"]
    assert kept.ledger.used_bytes == 60
    assert kept.residents.take("z") == "value of z"
    assert kept.ledger.used_bytes == 40


def test_an_offer_stands_back_for_who_waits(kept):
    running = Ticket(num_bytes=90, granted=lambda _: None, refused=pytest.fail, activates=True)
    kept.ledger.request(running)
    assert kept.ask(50) == []
    assert not kept.offer("x", 5, 1.0)


def test_a_ticket_is_asked_for_its_bytes_again_when_what_it_counts_on_is_gone(kept):
    kept.put("shard", 60, 1.0)
    assert kept.ask(lambda: 50 if "shard" in kept.residents else 90) == [90]
    assert kept.ledger.used_bytes == 90


def test_everything_is_given_up_for_who_takes_all(kept):
    kept.put("a", 50, 5.0)
    assert kept.ask(None) == [100]
    assert kept.disposed == ["a"]


def test_what_nobody_will_need_is_swept(kept):
    for key in ("over", "pinned", "needed"):
        kept.add(key, 20, 1.0)
    kept.put("theirs", 10, 1.0, user="other")
    kept.residents.unpin("over")
    kept.residents.unpin("needed")
    kept.next_use_s |= dict.fromkeys(("over", "pinned", "theirs"), math.inf)
    kept.residents.sweep("task")
    assert kept.disposed == ["over"]
    assert kept.ledger.used_bytes == 50


def test_what_is_a_task_s_alone_is_forgotten_with_it(kept):
    kept.put("own", 40, 5.0)
    kept.put("shared", 20, 5.0)
    kept.residents.pin("shared", "other", lambda: 7.0)
    kept.residents.unpin("shared")
    kept.put("theirs", 10, 5.0, user="other")
    kept.residents.forget("task")
    assert kept.disposed == ["own"]
    kept.residents.forget()
    assert kept.ledger.used_bytes == 0
    assert kept.disposed == ["own", "shared", "theirs"]


# -- bytes moved

WIDTH, NUM_SHARDS, BATCH, NUM_STEPS = 256, 8, 16, 4


def build(num_frozen=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        shards = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(NUM_SHARDS - 1)]
        model = nn.Sequential(*shards, nn.Linear(WIDTH, 5))
        batches = [(torch.randn(BATCH, WIDTH), torch.randint(5, (BATCH,))) for _ in range(NUM_STEPS)]
    for layer in model[:num_frozen]:
        layer.requires_grad_(False)
    return model, batches


def tasks_of(num_tasks, num_frozen=0, **options):
    cut = Presharded(list(range(1, NUM_SHARDS + 1)))
    tasks = []
    for k in range(num_tasks):
        model, batches = build(num_frozen)
        tasks.append(ModelTask(model, F.cross_entropy, batches, 0.1, name=f"t{k}", partitioner=cut, seed=0, **options))
    return tasks


def trained(memory, num_tasks=1, *, num_frozen=0, policy="sharded-lrtf", **options):
    """Tasks on one device; the report and their states."""
    tasks = tasks_of(num_tasks, num_frozen, **options)
    models = [task.model for task in tasks]
    orchestra = exact.silent(tasks, memory, policy=policy)
    report = orchestra.train_models()
    expected_model, batches = build(num_frozen)
    losses = reference.train(expected_model, F.cross_entropy, batches, seed=0, lr=0.1, **options).losses
    for k, model in enumerate(models):
        exact.assert_as_expected(report, f"t{k}", model, exact.Expected(losses, [], zoo.state(expected_model)))
    exact.assert_within_budget(report)
    return report, {each.name: each.state for each in orchestra._tasks.all}


@lru_cache
def memory_for(num_more):
    """Memory of a device for one slab with its unit's work, and for so many slabs more."""
    orchestra = exact.silent(tasks_of(1), "64MiB")
    orchestra.generate()
    [planned] = orchestra._tasks.all
    shards = planned.state.cut.shards
    return max(map(planned.state.shard_bytes, shards)) + num_more * shards[0].slab_bytes


def uses_of(unit, state):
    """(key, bytes) of what a unit takes, its shard first, and of what it leaves."""
    shard, j, step = state.cut.shards[unit.shard], unit.shard, unit.step
    boundary = BATCH * WIDTH * 4
    version = step if shard.needs else None
    takes = [(("shard", unit.task, j, version), shard.slab_bytes), (("value", unit.task, j, step), boundary)]
    leaves = []
    if unit.kind == FUSED:
        takes.append((("target", unit.task, step), BATCH * 8))
    if unit.kind == BACKWARD:
        takes.append((("gradient", unit.task, j + 1, step), boundary))
    if unit.kind == FORWARD:
        leaves.append((("value", unit.task, j + 1, step), boundary))
    elif j > 0:
        leaves.append((("gradient", unit.task, j, step), boundary))
    return takes, leaves


def least_bytes(order, states, memory_bytes):
    """Bytes loaded when what is needed last in the executed order is given up, as far as there has to be room."""
    uses = {}
    steps = [uses_of(unit, states[unit.task]) for unit in order]
    for k, (takes, _) in enumerate(steps):
        for key, _ in takes:
            uses.setdefault(key, []).append(k)

    def next_use(key, k):
        return next((use for use in uses.get(key, ()) if use > k), math.inf)

    there, loaded = {}, 0
    for k, (unit, (takes, leaves)) in enumerate(zip(order, steps, strict=True)):
        state = states[unit.task]
        # Beside its shard: activations, and what it starts from and leaves.
        held = max(
            b.total(1) for (kind, j, _), b in state.measured.known.items() if (kind, j) == (unit.kind, unit.shard)
        )
        for key, num_bytes in takes:
            loaded += 0 if key in there else num_bytes
        slab = takes[0]
        others = {key: size for key, size in there.items() if key not in dict(takes)}
        while sum(others.values()) + held + slab[1] > memory_bytes:
            del others[max(others, key=lambda key: next_use(key, k))]
        there = others | dict(takes) | dict(leaves)
        there = {key: size for key, size in there.items() if next_use(key, k) < math.inf}
        while sum(there.values()) > memory_bytes:
            del there[max(there, key=lambda key: next_use(key, k))]
    return loaded


@pytest.mark.rest
@covering(strength=1, num_more=[1, 3, 8], num_frozen=[0, 4])
def test_bytes_loaded_are_near_the_least(num_more, num_frozen):
    """Budgets from two slabs, one of them with its unit's work, to everything at once."""
    memory_bytes = memory_for(num_more)
    report, states = trained(memory_bytes, num_frozen=num_frozen)
    order = [placed.unit for placed in sorted(report.schedule, key=lambda placed: placed.start_s)]
    assert report.devices[0].loaded_bytes <= 1.05 * least_bytes(order, states, memory_bytes)


def test_with_room_for_all_a_version_is_loaded_once():
    report, states = trained("64MiB", num_frozen=4)
    [state] = states.values()
    weights = [shard.slab_bytes for shard in state.cut.shards]
    batches = NUM_STEPS * (BATCH * WIDTH * 4 + BATCH * 8)  # only they come up of what units start from
    assert report.devices[0].loaded_bytes == sum(weights[:4]) + NUM_STEPS * sum(weights[4:]) + batches


# -- tasks that share a base


class Adapted(nn.Module):
    """A frozen layer of the base, and a small trained one beside it."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x):
        return torch.tanh(self.base(x) + self.up(self.down(x)))


def adapted(base, seed):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(*(Adapted(layer) for layer in base))


def base_layers():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return [nn.Linear(WIDTH, WIDTH).requires_grad_(False) for _ in range(4)]


def regression_batches():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return [(torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)) for _ in range(NUM_STEPS)]


def aliased(base):
    """Layers of their own whose parameters lie where those of the base do."""
    copies = [nn.Linear(WIDTH, WIDTH).requires_grad_(False) for _ in base]
    for layer, other in zip(copies, base, strict=True):
        layer.weight.data, layer.bias.data = other.weight.data, other.bias.data
    return copies


@pytest.mark.rest
@covering(strength=1, shares=["layers", "memory"], precision=["float32", "bfloat16"])
def test_four_tasks_over_one_frozen_base_load_it_once_and_hold_it_once(shares, precision):
    base, tasks, models = base_layers(), [], []
    values = [parameter.clone() for layer in base for parameter in layer.parameters()]
    for k in range(4):
        model = adapted(base if shares == "layers" or k == 0 else aliased(base), k)
        models.append(model)
        cut = Presharded([1, 2, 3, 4])
        options = {"lr": 0.1, "seed": k, "partitioner": cut, "precision": precision}
        tasks.append(ModelTask(model, F.mse_loss, regression_batches(), name=f"t{k}", **options))
    orchestra = exact.silent(tasks, "16MiB")
    plan = orchestra.generate()
    base_bytes = 4 * (WIDTH * WIDTH + WIDTH) * 4
    weights = [task.dram["weights"] for task in plan.tasks.values()]
    adapters = 4 * 2 * 4 * WIDTH * 4
    assert weights == [adapters + base_bytes, adapters, adapters, adapters]
    held = []
    opened = HostPool.open

    def open_and_count(pool, *arguments):
        opened(pool, *arguments)
        held.append(sum(each.nbytes() for each in pool._brought))

    # All are set up before the first one begins, however long that takes.
    with mock.patch.object(HostPool, "open", open_and_count), mock.patch("hydra_engine.run.feeds.FIRST_S", 60.0):
        report = orchestra.train_models()
    link = 1 if precision == "float32" else 1.5  # beside the masters, what is sent
    assert held == [base_bytes * link, 0, 0, 0]
    for k, model in enumerate(models):
        expected_model = adapted(base_layers(), k)
        expected = reference.train(
            expected_model, F.mse_loss, regression_batches(), seed=k, lr=0.1, precision=precision
        )
        exact.assert_as_expected(report, f"t{k}", model, exact.Expected(expected.losses, [], zoo.state(expected_model)))
    streamed = 4 if precision == "float32" else 2
    adapters, batch = adapters * streamed // 4, BATCH * WIDTH * (streamed + 4)
    assert report.devices[0].loaded_bytes == base_bytes * streamed // 4 + 4 * NUM_STEPS * (adapters + batch)
    # And they are the user's again, still in one place.
    for layer, (weight, bias) in zip(base, zip(values[::2], values[1::2], strict=True), strict=True):
        assert torch.equal(layer.weight, weight)
        assert torch.equal(layer.bias, bias)
    assert len({model[0].base.weight.data_ptr() for model in models}) == 1
    assert models[0][0].base.weight.untyped_storage().nbytes() == WIDTH * WIDTH * 4


def test_a_plan_says_whose_frozen_weights_are_equal_to_another_tasks():
    models = [adapted(base_layers(), k) for k in range(2)]
    models.append(adapted([layer.base for layer in models[1]], 2))
    tasks = [ModelTask(model, F.mse_loss, regression_batches(), 0.1, name=f"t{k}") for k, model in enumerate(models)]
    plan = exact.silent(tasks, "16MiB").generate()
    # The last one has the very layers of the second.
    assert [task.doubled_bytes for task in plan.tasks.values()] == [0, 4 * (WIDTH * WIDTH + WIDTH) * 4, 0]
    names(str(plan), task="t1: ", says="frozen weights")


def test_locality_loads_a_shared_base_less_often():
    """Three tasks of other lengths over one base, on a device that holds little of it."""

    def loaded(policy):
        base, tasks = base_layers(), []
        for k in range(3):
            batches = regression_batches() * (k + 1)
            cut = Presharded([1, 2, 3, 4])
            tasks.append(ModelTask(adapted(base, k), F.mse_loss, batches, 0.1, name=f"t{k}", seed=k, partitioner=cut))
        report = exact.silent(tasks, "900KiB", policy=policy).train_models()
        report.raise_failures()
        return report.devices[0].loaded_bytes

    assert loaded("locality") < 0.9 * loaded("sharded-lrtf")


def cost_of(state):
    """What a task takes, for a simulation."""
    shards = state.cut.shards
    held = {j: [] for j in range(len(shards))}
    for (_, j, _), unit in state.measured.known.items():
        held[j].append(unit.total(1))
    return TaskCost(
        name=state.name,
        unit_s=[state.measured.unit_s[node] for node in state.cut.chains[True]],
        num_shards=len(shards),
        num_steps=NUM_STEPS,
        load_bytes=[shard.slab_bytes for shard in shards],
        boundary_bytes=BATCH * WIDTH * 4,
        gradient_bytes=[shard.own_bytes for shard in shards],
        work_bytes=[max(each) for each in held.values()],
        graph_bytes=[kept_bytes(state, shard) for shard in shards],
    )


@covering(strength=1, num_more=[1, 6], num_frozen=[0, 4])
def test_a_simulation_moves_the_bytes_of_the_run(num_more, num_frozen):
    memory_bytes = memory_for(num_more)
    report, states = trained(memory_bytes, num_frozen=num_frozen)
    device = DeviceCost(memory_bytes=memory_bytes, load_bytes_per_s=5e9, store_bytes_per_s=5e9, unit_s=3e-4)
    found = simulate([cost_of(state) for state in states.values()], [device])
    targets = NUM_STEPS * BATCH * 8
    assert found.devices[0].loaded_bytes == pytest.approx(report.devices[0].loaded_bytes - targets, rel=0.05)


# -- the ledger, while what is kept is given up


def test_what_goes_with_something_else_is_given_back_once(kept):
    kept.add("slab", 40, 1.0)
    assert kept.ask(30) == [30]
    graph_next_use = kept.until("graph", 1.0)
    kept.residents.keep("graph", "value", 30, "task", graph_next_use, lambda: kept.residents.unpin("slab"))
    kept.next_use_s.update(slab=math.inf, graph=math.inf)  # the step went on elsewhere
    assert kept.ask(60) == [60]
    assert (kept.ledger.used_bytes, len(kept.residents)) == (60, 0)


def test_nobody_else_is_granted_what_is_given_up_for_one(kept):
    kept.put("slab", 60, 1.0)
    assert kept.ask(40) == [40]
    kept.residents.pin("slab", "task", kept.until("slab", 1.0))
    kept.ledger.activate()
    waiting = kept.ask(50)
    assert waiting == []
    kept.residents.unpin("slab")
    assert kept.ledger.used_bytes == 100
    kept.ledger.grow(10)  # the slab goes for it, and what is left of it to who waits
    assert (waiting, kept.ledger.used_bytes) == ([50], 100)


def test_who_counted_on_what_was_given_up_has_more_given_up(kept):
    kept.put("own", 40, 9.0)
    kept.put("other", 40, 1.0)
    grants = []
    num_bytes = lambda: 30 if "own" in kept.residents else 70  # noqa: E731
    kept.ledger.request(Ticket(num_bytes=num_bytes, granted=grants.append, refused=grants.append))
    assert grants == [70]
    assert kept.disposed == ["own", "other"]
