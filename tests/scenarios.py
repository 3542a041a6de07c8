"""Scenarios: something happens to one of two small tasks as they train, and what is promised for it is checked.

    check(Scenario("tries again", "backward of the middle shard", step=3), directory)

An event (an error, a pause, a kill, a device that leaves, ...) happens at a place (a layer's forward, the loader, the
commit, ...) of a step, under a setting. What must hold then:

- the struck task has the status that the event leads to, and the losses and the weights of its last committed step;
- the other task has the losses and the weights of plain PyTorch, at its end or at its own last committed step;
- the run has ended, and no device used more than its budget;
- a resume leaves the bits of a run that nothing happened to.

`tests/promises/test_scenarios.py` has the table. All tasks are of one structure, so that one plan serves them.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Mapping
from functools import lru_cache, partial
from queue import SimpleQueue
from types import MappingProxyType
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hydra_engine import Callback, EmulatedDevice, ModelTask, PauseTask, StopTask
from hydra_engine.devices.emulated import OpenEmulatedDevice
from hydra_engine.errors import DeviceFailed
from hydra_engine.planning.cuts import Kept
from hydra_engine.run.signals import Inbox
from hydra_engine.schedule import StopRequested
from hydra_engine.tasks.report import AGAIN
from hydra_engine.worker.spiller import Spiller
from partitioners import Presharded
from tests import exact, processes, reference, zoo
from tests.refused import names

WIDTH, NUM_CLASSES, BATCH_SIZE = 8, 3, 6
EPOCH, EPOCHS = 4, 2  # steps, epochs
NUM_STEPS = EPOCH * EPOCHS
LR, SEED = 0.05, 21
SHARDS = [1, 2, 3]  # a layer each
VICTIM, BESIDE = "victim", "beside"
PATIENCE_S = 60


class Boom(Exception):
    """What an armed trap raises."""


class Trap:
    """Acts at one call, counted over all copies of its layer: the engine copies a layer's structure per device."""

    def __init__(self):
        self.fires_at = None
        self.fired = threading.Event()
        # Nobody looks into queues: what every forward counts up is refused, and so is the orchestrator in a layer.
        self._calls, self._action = SimpleQueue(), SimpleQueue()
        self._lock = threading.Lock()

    def __deepcopy__(self, memo):
        return self

    def arm(self, fires_at, action=None):
        """Act at call number `fires_at` from now, counting from 0; the action is to raise unless given."""
        self._calls, self.fires_at = SimpleQueue(), fires_at
        while not self._action.empty():
            self._action.get()
        self._action.put(action or self.fail)

    def touch(self):
        with self._lock:
            call = self._calls.qsize()
            self._calls.put(None)
        if call == self.fires_at:
            self.fired.set()
            self._action.get()()

    def fail(self):
        raise Boom(f"trap at call {self.fires_at}")


class TrapBackward(torch.autograd.Function):
    """Identity whose backward pass touches the trap."""

    @staticmethod
    def forward(ctx, x, trap):
        ctx.trap = trap
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.trap.touch()
        return grad, None


class Trapped(nn.Module):
    """A linear layer that can be made to fail in its forward or its backward pass.

    With a norm it has buffers, which must roll back too, and draws.
    """

    def __init__(self, num_outputs, *, normed):
        super().__init__()
        self.linear = nn.Linear(WIDTH, num_outputs)
        self.norm = nn.Sequential(nn.BatchNorm1d(num_outputs), nn.Dropout(0.2)) if normed else nn.Identity()
        self.in_forward, self.in_backward = Trap(), Trap()

    def forward(self, x):
        self.in_forward.touch()
        return TrapBackward.apply(self.norm(self.linear(x)), self.in_backward)


class TrappedLoader:
    """Draws an order as it is opened and noise for every batch; can be made to fail as it does either."""

    def __init__(self, samples, classes):
        self.samples, self.classes = samples, classes
        self.opens, self.reads = Trap(), Trap()

    def __len__(self):
        return EPOCH

    def __iter__(self):
        order = torch.randperm(len(self.samples)).view(-1, BATCH_SIZE)
        self.opens.touch()
        for indices in order:
            noise = 0.1 * torch.randn(BATCH_SIZE, WIDTH)
            self.reads.touch()
            yield self.samples[indices] + noise, self.classes[indices]


class TrappedLoss(nn.Module):
    """Cross entropy that can be made to fail."""

    def __init__(self):
        super().__init__()
        self.trap = Trap()

    def forward(self, outputs, target):
        self.trap.touch()
        return F.cross_entropy(outputs, target)


class Halfway(torch.optim.AdamW):
    """Changes weights, gradients and its state, and then touches the trap: at one step of one shard."""

    trap = Trap()

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(7)  # as an optimizer may
                    self.state[parameter]["count"] = self.state[parameter].get("count", 0) + 1
        self.trap.touch()


def halfway(trap):
    return type("Halfway", (Halfway,), {"trap": trap})


def build():
    """A model whose three layers are its shards, its loss and its loader; always the same."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(9)
        layers = (Trapped(WIDTH, normed=True), Trapped(WIDTH, normed=True), Trapped(NUM_CLASSES, normed=False))
        num_samples = EPOCH * BATCH_SIZE
        samples, classes = torch.randn(num_samples, WIDTH), torch.randint(NUM_CLASSES, (num_samples,))
    return nn.Sequential(*layers), TrappedLoss(), TrappedLoader(samples, classes)


@lru_cache
def held_out():
    generator = torch.Generator().manual_seed(5)
    return [(torch.randn(BATCH_SIZE, WIDTH, generator=generator), torch.arange(BATCH_SIZE) % 3) for _ in range(2)]


def victim(name=VICTIM, **options):
    """A task over a fresh `build()`, and its model."""
    model, loss_fn, loader = build()
    options = {"optimizer": torch.optim.AdamW, "partitioner": Presharded(SHARDS), "seed": SEED} | options
    return ModelTask(model, loss_fn, loader, LR, EPOCHS, name=name, **options), model


def beside(**options):
    """A task that the first failure of another must not harm, and its model."""
    return victim(BESIDE, **({"seed": SEED + 1} | options))


def committed(num_steps, **options):
    """Plain PyTorch's losses and state of `victim` after so many steps; None: at the end."""
    losses, validation_losses, states = _plain(tuple(sorted(({"seed": SEED} | options).items())))
    num_steps = NUM_STEPS if num_steps is None else num_steps
    num_epochs = num_steps // EPOCH if validation_losses else 0
    return exact.Expected(losses[:num_steps], validation_losses[:num_epochs], states[num_steps])


@lru_cache(maxsize=256)
def _plain(options):
    model, loss_fn, loader = build()
    states = []

    def note():
        states.append({name: tensor.detach().clone() for name, tensor in zoo.state(model).items()})

    note()
    options = {"optimizer": torch.optim.AdamW, **dict(options)}
    result = reference.train(model, loss_fn, loader, lr=LR, epochs=EPOCHS, on_step=note, **options)
    return result.losses, result.validation_losses, states


def graphs(*, kept):
    """Backwards continue their forward's graph where it is on the device, or never do."""
    keeps_from = 0 if kept else len(SHARDS)
    return mock.patch("hydra_engine.planning.planner.choose_kept", return_value=Kept(keeps_from, 1.0))


def begun_again(report):
    """The units that stopped a step that began again."""
    return [span.label for span in report.spans if span.lane == AGAIN]


# Devices that fail


class Failing(EmulatedDevice):
    """A device that can be made to fail: from then on it raises at each of its copies.

    `fails` says whether it is time, and is asked at each copy.
    """

    def __init__(self, fails, **options):
        super().__init__("1MiB", **options)
        self.fails = fails

    def open(self, index, trace, num_threads, arena_bytes=None):
        return OpenFailing(self, self.name_at(index), trace, num_threads, arena_bytes)


class OpenFailing(OpenEmulatedDevice):
    def __init__(self, spec, *args):
        super().__init__(spec, *args)
        self.fails, self.has_failed = spec.fails, False

    def _copy(self, lane, pairs, num_bytes, *, urgent):
        if self.has_failed or self.fails():
            self.has_failed = True
            raise DeviceFailed(self.name, f"in its {lane} lane")
        super()._copy(lane, pairs, num_bytes, urgent=urgent)


# Places: which trap, and at which of its calls step `s` with `n` micro-batches comes to micro-batch `m`. A shard below
# the last runs its layers' forward twice per step and micro-batch, unless its graph is kept:
#
#     f0 ... f0  f1 ... f1  last ... last  b1 ... b1  b0 ... b0      each over all micro-batches before the next
#     forward    forward    forward +      recompute + backward
#                           backward

LAYERS = {
    "forward of the lowest shard": (0, "in_forward", lambda n, m: (2 * n, m)),
    "forward of the middle shard": (1, "in_forward", lambda n, m: (2 * n, m)),
    "forward of the last shard": (2, "in_forward", lambda n, m: (n, m)),
    "backward of the last shard": (2, "in_backward", lambda n, m: (n, m)),
    "recomputed forward of the middle shard": (1, "in_forward", lambda n, m: (2 * n, n + m)),
    "backward of the middle shard": (1, "in_backward", lambda n, m: (n, m)),
    "recomputed forward of the lowest shard": (0, "in_forward", lambda n, m: (2 * n, n + m)),
    "backward of the lowest shard": (0, "in_backward", lambda n, m: (n, m)),
}
LOADS = ("load_slab", "load_input", "load_buffers")
STORES = ("store_micro", "store_buffers", "store_gradients")
USER_CODE = ("loss", "metric", "loader", "opening the loader", "commit", "update", "lr_scheduler", "callback")
PLACES = (*LAYERS, *LOADS, *STORES, *USER_CODE)
AHEAD = ("loader", "opening the loader")  # of the steps
NEVER_AGAIN = ("commit", "lr_scheduler", "callback")  # what fails there is not tried again

UPDATES = {
    "plain": {},
    "clipped": {"max_grad_norm": 0.5},
    "whole task": {"optimizer_scope": "task"},
    "early release": {"early_release": True},
    "all gradients": {"early_release": "all"},
}
IN_THE_STEP = ("early release", "all gradients")  # a step is not given up once it has begun


class Scenario(NamedTuple):
    """What happens where, and under which setting; prints as its name."""

    event: str
    place: str = "backward of the middle shard"
    step: int = 3
    num_devices: int = 1
    accumulation_steps: int = 1
    update: str = "plain"
    company: bool = True
    double_buffer: bool = True
    chaos: int | None = None
    kept: bool = False
    saves: bool = False

    def __str__(self):
        words = [
            self.event,
            self.place,
            f"step {self.step}",
            f"{self.num_devices}dev",
            f"{self.accumulation_steps}micro",
        ]
        words += [self.update, "company" if self.company else "alone", "double" if self.double_buffer else "single"]
        words += [name for name in ("chaos", "kept", "saves") if getattr(self, name)]
        return "-".join(words)


class World:
    """The two tasks of a scenario, with the victim's trap, and an orchestrator over them."""

    def __init__(self, scenario, directory):
        self.scenario, self.directory = scenario, directory
        self.event = EVENTS[scenario.event]
        self.threads, self.device_fails, self.told = [], threading.Event(), threading.Event()
        micro = max(scenario.accumulation_steps, 2 if scenario.place in STORES else 1)
        update = scenario.update
        if update in IN_THE_STEP and scenario.event in (*FAULTS, "stop", "device fails"):
            update = "clipped"  # what such an update refuses, or does not put back; a stop may end in mid-step
        if scenario.place == "update" and update == "whole task":
            update = "plain"  # three updates per step
        self.settings = {"accumulation_steps": micro, **UPDATES[update]}
        self.plain = self._plain_settings()
        self._trap()
        self.task, self.model = victim(**self.settings, **self.event.options, **self.options)
        self._place_trap()
        tasks, self.other_model = [self.task], None
        if scenario.company:
            other, self.other_model = beside(**self.settings)
            tasks = [other, self.task] if scenario.step % 2 else [self.task, other]
        self.saves = scenario.saves or self.event.saves
        devices = [
            Failing(
                self.fails,
                chaos=None if scenario.chaos is None else scenario.chaos + k,
                meter_every_unit=True,
                has_arena=scenario.chaos is not None,
            )
            for k in range(max(scenario.num_devices, 1 + self.event.max_failures))
        ]
        saving = {"checkpoint_dir": directory, "checkpoint_every": 2} if self.saves else {}
        self.orchestra = exact.silent(
            tasks, devices=devices, double_buffer=scenario.double_buffer, max_failures=self.event.max_failures, **saving
        )

    def _trap(self):
        """Make the trap, the options of the victim that hold it, and what plain PyTorch has of them."""
        self.trap, self.options, place = Trap(), {}, self.scenario.place
        if place == "update":
            self.options["optimizer"] = halfway(self.trap)
            self.plain["optimizer"] = Halfway
        elif place == "metric":
            metric = partial(_metric, trap=self.trap)
            self.options |= {"validation": held_out(), "metrics": {"accuracy": metric}}
            self.plain["validation"] = _Held()
        elif place == "lr_scheduler":
            self.options["lr_scheduler"] = partial(_schedule, trap=self.trap)
            self.plain["lr_scheduler"] = _schedule
        elif place == "callback":
            self.options["callbacks"] = [Touches(self.trap)]

    def _place_trap(self):
        """Let the trap be where the task has one, or put it there; `fires_at`: its call, of those from now on."""
        place, step, micro = self.scenario.place, self.scenario.step, self.settings["accumulation_steps"]
        kept = self.scenario.kept and self.scenario.num_devices == 1 and "recomputed" not in place
        self.keeps, self.fires_at, self.committed = kept, step, step
        if place in LAYERS:
            layer, name, calls = LAYERS[place]
            per_step, before = calls(micro, micro // 2)
            if kept and micro == 1:  # with more, a shard whose forward changes buffers keeps none
                per_step = micro
            self.trap, self.fires_at = getattr(self.model[layer], name), step * per_step + before
        elif place in LOADS + STORES:
            self.fires_at, self.committed = step + 1, None
        elif place == "loss":
            self.trap, self.fires_at = self.task.loss_fn.trap, step * micro + micro // 2
        elif place == "loader":
            self.trap, self.fires_at = self.task.dataloader.reads, max(step - 1, 0)  # the plan has read one batch
            self.committed = self.fires_at + 1
        elif place == "opening the loader":
            self.trap, self.fires_at, self.committed = self.task.dataloader.opens, 0, EPOCH
        elif place == "metric":
            self.fires_at = 2 * (step // EPOCH) + 1
            self.committed = EPOCH * (step // EPOCH + 1)
        elif place == "commit":
            self.model[1].linear.weight.register_hook(lambda grad: self.trap.touch())
        elif place == "update":
            self.fires_at = 3 * step + step % 3
        elif place in ("lr_scheduler", "callback"):
            self.committed = step + 1

    def fails(self):
        """Return True once, for the copy that is next after `device_fails` was set."""
        if self.device_fails.is_set():
            self.device_fails.clear()
            return True
        return False

    def run(self):
        """Plan, arm and train; returns what `train_models` raised, or None. The report is the orchestrator's."""
        with graphs(kept=self.keeps):
            self.orchestra.generate()
        self.trap.arm(self.fires_at, partial(self.event.act, self))
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(Inbox, "put", telling(self.told)))
            if self.scenario.place in LOADS + STORES:
                method = touching(self.scenario.place, self.trap)
                stack.enter_context(mock.patch.object(Spiller, self.scenario.place, method))
            try:
                self.orchestra.train_models()
            except BaseException as error:
                return error
            finally:
                for thread in self.threads:
                    thread.join(PATIENCE_S)
        return None

    # What an event does at its place

    def from_elsewhere(self, call, *arguments):
        """Call something in a thread of its own, and wait for it: a layer and a loader may not."""
        errors = []

        def job():
            try:
                call(*arguments)
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=job)
        thread.start()
        thread.join(PATIENCE_S)
        assert not errors, errors
        assert not thread.is_alive()

    def remove_device(self, grace_s):
        """Remove the device of the unit that runs; the only one is added again from elsewhere."""
        name = threading.current_thread().name.partition("-")[0]
        name = name if name in self.orchestra.devices else "emulated:0"
        self.from_elsewhere(self.orchestra.remove_device, name, grace_s)
        if self.scenario.num_devices == 1:
            self.threads.append(threading.Thread(target=self.orchestra.add_device, args=(name,)))
            self.threads[-1].start()

    # What must hold afterwards

    def expected(self, num_steps, seed=SEED):
        return committed(num_steps, seed=seed, **self.plain)

    def check_victim(self, status):
        """The task ended so at its last committed step, which is the one that the event is in."""
        found = self.report.tasks[VICTIM]
        assert found.status == status, found.error
        if self.committed is not None:
            # The step of the event is finished, and perhaps the one after; a loader's batch is for a later step.
            before, after = (0, 0) if self.event.at_once else (2 * (self.scenario.place in AHEAD), 2)
            assert self.committed - before <= found.steps <= self.committed + after
        self.check_committed(VICTIM, self.model)

    def check_committed(self, name, model):
        found, seed = self.report.tasks[name], SEED + (name == BESIDE)
        expected = self.expected(found.steps, seed) if name == VICTIM else self.expected_beside(found.steps)
        assert found.steps == len(found.losses)
        assert found.losses == expected.losses
        exact.assert_same_state(zoo.state(model), expected.state)

    def expected_beside(self, num_steps):
        return committed(num_steps, seed=SEED + 1, **self._plain_settings())

    def _plain_settings(self):
        known = ("accumulation_steps", "max_grad_norm")
        return {name: self.settings[name] for name in known if name in self.settings}

    def check_finished(self):
        """Nobody can tell from the victim's bits that anything happened."""
        expected = self.expected(None)
        exact.assert_as_expected(self.report, VICTIM, self.model, expected)
        assert self.report.tasks[VICTIM].validation_losses == expected.validation_losses
        assert self.report.tasks[VICTIM].error is None

    def check_beside(self):
        if self.other_model is not None:
            exact.assert_as_expected(self.report, BESIDE, self.other_model, self.expected_beside(None))

    def check_all_stopped(self):
        """The run was ended: each task is at a committed step of its own."""
        self.check_victim("stopped")
        if self.other_model is not None:
            assert self.report.tasks[BESIDE].status in ("stopped", "finished")
            self.check_committed(BESIDE, self.other_model)

    def check_resumed(self):
        """A resume on another partition and other devices leaves the bits of an undisturbed run."""
        self.trap.arm(None)
        self._trap()
        self.task, self.model = victim(**self.settings, **self.options, partitioner=Presharded([2, 3]))
        tasks = [self.task]
        if self.other_model is not None:
            other, self.other_model = beside(**self.settings, partitioner=Presharded([3]))
            tasks.append(other)
        num_devices = 3 - self.scenario.num_devices
        orchestra = exact.silent(tasks, num_devices=num_devices, checkpoint_dir=self.directory)
        self.report = orchestra.train_models(resume=True)
        self.check_finished()
        self.check_beside()


def telling(told):
    """`Inbox.put` that sets `told` once the thread that decides has heard of a signal."""
    put = Inbox.put

    def call(inbox, event):
        put(inbox, event)
        if isinstance(event, StopRequested):
            told.set()

    return call


def touching(method, trap):
    """The spiller's method that touches the trap for the victim's shards, after its work for a store."""
    original = getattr(Spiller, method)

    def call(owner, state, *args, **kwargs):
        if state.name != VICTIM:
            return original(owner, state, *args, **kwargs)
        if method in LOADS:  # what was loaded and is then lost must be given back by whoever loads
            trap.touch()
        result = original(owner, state, *args, **kwargs)
        if method in STORES:
            trap.touch()
        return result

    return call


class Touches(Callback):
    def __init__(self, trap):
        self.trap = trap

    def on_step(self, report):
        self.trap.touch()


class _Held(list):
    """The held-out batches as an option that can be told apart: one of a kind."""

    def __init__(self):
        super().__init__(held_out())

    def __hash__(self):
        return 0


def _metric(output, target, trap):
    trap.touch()
    return (output.argmax(1) == target).float().mean()


def _schedule(optimizer, trap=None):
    def factor(step):
        if trap is not None and step:
            trap.touch()
        return 0.9**step

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


# Events: what they do where they happen, and what must hold then


class Event(NamedTuple):
    """`act(world)` is called at the place. `check(world, error)` gets what `train_models` raised."""

    act: object
    check: object
    options: Mapping = MappingProxyType({})  # of the victim
    saves: bool = False  # whether or not the scenario says so
    max_failures: int = 0
    at_once: bool = False  # the step of the event is not committed


def _raises(error):
    def act(world):
        raise error()

    return act


def _failed(world, error, kind=Boom, says="in act"):
    """It failed alone, and alone it is what the run raises."""
    world.check_victim("failed")
    outcome = world.report.tasks[VICTIM]
    assert "Traceback (most recent call last)" in outcome.error
    names(outcome.error, says=says)
    assert outcome.retries == []
    world.check_beside()
    if world.scenario.company:
        assert error is None
        with pytest.raises(kind):
            world.report.raise_failures()
    else:
        assert isinstance(error, kind), error
        assert error is outcome.exception


def _tried_again(world, error):
    """Nobody can tell, except from the report. What is never tried again fails all the same."""
    assert world.report.tasks[VICTIM].revisions == []
    if world.scenario.place in NEVER_AGAIN:
        _failed(world, error)
        return
    assert error is None
    world.check_finished()
    world.check_beside()
    if world.scenario.place in LOADS and world.scenario.num_devices > 1 and not world.report.tasks[VICTIM].retries:
        return  # it was a claim of a device, which another one had taken over
    [retry] = world.report.tasks[VICTIM].retries
    names(retry.error, says="Boom")
    reads_ahead = world.scenario.place in AHEAD
    assert reads_ahead or world.committed is None or retry.step == world.committed
    is_unit = not reads_ahead and world.scenario.place != "update"
    assert retry.where.startswith(f"{VICTIM}.") == is_unit
    if world.scenario.place != "metric":  # an evaluation is no step
        assert begun_again(world.report) == [retry.where] * is_unit
    names(world.report, task=VICTIM, says=retry.where.split()[0])


def _stopped(world, error):
    assert error is None
    world.check_victim("stopped")
    assert world.report.tasks[VICTIM].error is None
    world.check_beside()


def _paused(world, error):
    """It is told apart from one that was stopped, and goes on from disk in the same orchestrator."""
    assert error is None
    assert world.report.tasks[VICTIM].status == "paused"
    world.check_beside()


def _unnoticed(world, error):
    """Neither task has another bit, and no step began again."""
    _finished(world, error)
    assert begun_again(world.report) == []


def _finished(world, error):
    assert error is None
    world.check_finished()
    world.check_beside()
    assert "leaving" not in world.orchestra.devices.values()


def _unnoticed_but_for_the_device(world, error):
    """No step began again but for a part that adds to sums ("+1"), which the device lost half stored."""
    _finished(world, error)
    assert all("+" in label for label in begun_again(world.report)[:1])
    assert len(begun_again(world.report)) <= 1
    [message] = world.report.messages
    names(message, says="was taken out")
    assert list(world.orchestra.devices.values()).count("out") == 1


def _ended_by(kind, code=None):
    def check(world, error):
        assert isinstance(error, kind), error
        assert code is None or error.code == code
        world.check_all_stopped()

    return check


def _killed(world, error):
    raise AssertionError("the process went on")


def _signal(number):
    def act(world):
        os.kill(os.getpid(), number)
        assert world.told.wait(PATIENCE_S)

    return act


def _end(name):
    """Stop or pause the victim from another thread, or by what a callback raises."""

    def act(world):
        if world.scenario.place == "callback":
            raise {"stop_task": StopTask, "pause_task": PauseTask}[name]
        world.from_elsewhere(getattr(world.orchestra, name), VICTIM)

    return act


NO_MEMORY = "[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 9"
RETRIED = {"max_retries": 1}
OF_THE_RUN = {"saves": True}

FAULTS = {
    "raises": Event(_raises(partial(Boom, "of the user's code")), _failed, at_once=True),
    "tries again": Event(_raises(partial(Boom, "once")), _tried_again, options=RETRIED, at_once=True),
    "host memory": Event(_raises(MemoryError), partial(_failed, kind=MemoryError, says="DRAM"), at_once=True),
    "torch's memory": Event(
        _raises(partial(RuntimeError, NO_MEMORY)),
        partial(_failed, kind=RuntimeError, says="DRAM"),
        at_once=True,
    ),
}
HAPPENINGS = {
    "interrupt": Event(_signal(signal.SIGINT), _ended_by(KeyboardInterrupt), **OF_THE_RUN),
    "SIGTERM": Event(_signal(signal.SIGTERM), _ended_by(SystemExit, 143), **OF_THE_RUN),
    "kill": Event(_signal(signal.SIGKILL), _killed, **OF_THE_RUN),
    "stop": Event(_end("stop_task"), _stopped),
    "pause": Event(_end("pause_task"), _paused, **OF_THE_RUN),
    "device leaves": Event(lambda world: world.remove_device(None), _unnoticed),
    "device leaves at once": Event(lambda world: world.remove_device(0), _unnoticed),
    "device fails": Event(lambda world: world.device_fails.set(), _unnoticed_but_for_the_device, max_failures=1),
}
EVENTS = {**FAULTS, **HAPPENINGS}


def check(scenario, directory):
    """Let it happen, and check everything that must hold then."""
    world = World(scenario, directory)
    if scenario.event == "kill":
        with pytest.raises(processes.ProcessEnded) as ended:
            processes.run(_train_in_a_process, scenario, directory)
        assert ended.value.exitcode == -signal.SIGKILL
    else:
        error = world.run()
        assert world.trap.fired.is_set(), error
        world.report = world.orchestra.report
        world.event.check(world, error)
        exact.assert_within_budget(world.report, scenario.num_devices)
    if world.saves and scenario.event != "stop":  # which a resume leaves as it is
        world.check_resumed()


def _train_in_a_process(scenario, directory):
    return repr(World(scenario, directory).run())
