"""Accumulated equals undivided, whatever the optimizer and the loop.

Most tests compare bits, and depend on nobody's kernels: losses are linear in the parameters, inputs are small whole
numbers and batch sizes powers of two. So every gradient is exact in any order of additions, and what is left to an
optimizer is the same arithmetic on the same numbers.
"""

import copy
import io
import pickle
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

from hydra_engine import split_batch
from hydra_engine.elastic import GradientAccumulation
from tests.covering import covering
from tests.refused import refused

# The wrapper knows nothing of an optimizer: these differ in where they keep their state and how they read gradients.
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adam": partial(torch.optim.Adam, lr=0.01),
    "adam, fused": partial(torch.optim.Adam, lr=0.01, fused=True),
    "adamw, foreach": partial(torch.optim.AdamW, lr=0.01, foreach=True, amsgrad=True),
    "asgd": partial(torch.optim.ASGD, lr=0.01),
    "rprop": partial(torch.optim.Rprop, lr=0.01),
}
REDUCTIONS = ["mean", "sum"]


class Linear(nn.Module):
    """A loss per sample that is linear in its two parameters."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 15).view(5, 3))
        self.bias = nn.Parameter(torch.linspace(0, 1, 3))

    def forward(self, samples):
        return (samples * self.weight + self.bias * samples[:, :1]).sum(dim=(1, 2))


def batches(num_batches=4, size=16, seed=0):
    """Batches of whole numbers."""
    generator = torch.Generator().manual_seed(seed)
    return list(torch.randint(-8, 9, (num_batches, size, 5, 3), generator=generator).float())


def reduced(losses, reduction):
    return losses.mean() if reduction == "mean" else losses.sum()


def descend(optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def train(model, optimizer, inputs, reduction="mean", after=lambda: None):
    """The loop of all training code."""
    for samples in inputs:
        descend(optimizer, reduced(model(samples), reduction))
        after()


def micro(inputs, steps=4):
    return [each for samples in inputs for each in samples.chunk(steps)]


def unwrapped(name="adam"):
    model = Linear()
    return model, OPTIMIZERS[name](model.parameters())


def undivided(name="adam", reduction="mean"):
    model, optimizer = unwrapped(name)
    train(model, optimizer, batches(), reduction)
    return model, optimizer


def wrapped(name="adam", steps=4, reduction="mean"):
    model, optimizer = unwrapped(name)
    return model, GradientAccumulation(optimizer, steps, reduction)


def resumed_from(model, optimizer, name="adam", steps=4):
    """Both in a new process's objects, with their states out of a file."""
    resumed, other = wrapped(name, steps)
    resumed.load_state_dict(model.state_dict())
    other.load_state_dict(through_a_file(optimizer.state_dict()))
    return resumed, other


def through_a_file(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def tensors(value):
    """All tensors and numbers in a nest, in order."""
    if isinstance(value, dict):
        value = list(value.values())
    return [each for part in value for each in tensors(part)] if isinstance(value, (list, tuple)) else [value]


def assert_equal(found, expected):
    """Both are pairs of a model and its optimizer: their weights and states are the same bits."""
    ours, theirs = (
        tensors([dict(model.state_dict()), getattr(optimizer, "optimizer", optimizer).state_dict()])
        for model, optimizer in (found, expected)
    )
    for one, two in zip(ours, theirs, strict=True):
        assert torch.equal(one, two) if isinstance(one, torch.Tensor) else one == two


# --- accumulated equals undivided ---


@covering(name=[*OPTIMIZERS], reduction=REDUCTIONS, strength=1)
def test_accumulated_is_undivided(name, reduction):
    model, optimizer = wrapped(name, reduction=reduction)
    train(model, optimizer, micro(batches()), reduction)
    assert_equal((model, optimizer), undivided(name, reduction))


@covering(name=["sgd", "adam"], reduction=REDUCTIONS, strength=1)
def test_unequal_micro_batches_of_a_network(name, reduction):
    """In float64, within a relative 1e-8: sums are in another order, and sizes are no powers of two."""

    def network():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()

    torch.manual_seed(1)
    inputs, targets = torch.randn(5, 11, 6).double(), torch.randint(4, (5, 11))
    plain, model = network(), network()
    expected = OPTIMIZERS[name](plain.parameters())
    optimizer = GradientAccumulation(OPTIMIZERS[name](model.parameters()), 4, reduction)
    sizes = split_batch(11, 3, 1)
    assert sizes == [3, 3, 3, 2]
    for x, y in zip(inputs, targets, strict=True):
        descend(expected, F.cross_entropy(plain(x), y, reduction=reduction))
        for part, target in zip(x.split(sizes), y.split(sizes), strict=True):
            loss = F.cross_entropy(model(part), target, reduction=reduction)
            descend(optimizer, optimizer.weigh(loss, len(part), len(x)))
    for found, right in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, right, rtol=1e-8, atol=1e-10)


def test_equal_micro_batches_weigh_as_they_are():
    loss = torch.ones(())
    assert wrapped(steps=4)[1].weigh(loss, 25, 100) is loss
    assert wrapped(steps=4, reduction="sum")[1].weigh(loss, 3, 100) is loss
    assert wrapped(steps=4)[1].weigh(loss, 50, 100) == 2


# --- when it steps and clears ---


class Logging(torch.optim.SGD):
    """Notes its calls."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.calls = []

    def step(self, closure=None):
        self.calls.append("step")
        return super().step(closure)

    def zero_grad(self, set_to_none=True):
        self.calls.append(f"zero {set_to_none}")
        super().zero_grad(set_to_none)


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_it_steps_at_the_last_micro_batch_and_clears_at_the_first(steps):
    model = Linear()
    optimizer = GradientAccumulation(Logging(model.parameters()), steps)
    samples = batches(1)[0]
    for i in range(15):
        before = len(optimizer.calls)
        descend(optimizer, model(samples).mean())
        is_last = i % steps == steps - 1
        assert optimizer.calls[before:] == ["zero True"] * (i % steps == 0) + ["step"] * is_last
        assert optimizer.stepped == is_last
        assert optimizer.accumulated == (i + 1) % steps


def test_gradients_add_up_in_place_until_the_step():
    model, optimizer = wrapped(steps=3, reduction="sum")
    samples = batches(1)[0]
    train(model, optimizer, [samples, samples])
    gradient = model.weight.grad
    once = model(samples).mean()
    optimizer.zero_grad()
    assert model.weight.grad is gradient
    assert torch.equal(gradient, 2 * torch.autograd.grad(once, model.weight)[0])


def test_a_loop_may_clear_after_its_step():
    model, optimizer = wrapped()
    for samples in micro(batches()):
        model(samples).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert model.weight.grad is None
    assert_equal((model, optimizer), undivided())


def test_gradients_may_stay_where_they_are():
    model, optimizer = wrapped()
    train(model, optimizer, micro(batches()))
    gradient = model.weight.grad
    optimizer.zero_grad(set_to_none=False)
    assert model.weight.grad is gradient
    assert not gradient.any()


def test_an_optimizer_of_old_takes_no_arguments():
    class Old(torch.optim.Optimizer):
        cleared = stepped = 0

        def zero_grad(self):
            self.cleared += 1

        def step(self):
            self.stepped += 1

    optimizer = GradientAccumulation(Old([torch.zeros(1)], {}), 3)
    for _ in range(6):
        optimizer.zero_grad()
        optimizer.step()
    assert (optimizer.optimizer.cleared, optimizer.optimizer.stepped) == (2, 2)


def test_parameters_without_gradient_stay_as_they_are():
    model, optimizer = wrapped("adamw, foreach")
    for _ in range(4):
        descend(optimizer, model.weight.sum())
    assert torch.equal(model.bias, Linear().bias)
    assert model.bias not in optimizer.state


def test_sparse_gradients():
    expected, found = (nn.Embedding.from_pretrained(torch.ones(8, 2), freeze=False, sparse=True) for _ in range(2))
    plain = torch.optim.SparseAdam(expected.parameters())
    optimizer = GradientAccumulation(torch.optim.SparseAdam(found.parameters()), 2)
    for _ in range(3):
        descend(plain, expected(torch.tensor([1, 2, 2, 7])).sum(1).mean())
        for indices in ([1, 2], [2, 7]):
            descend(optimizer, found(torch.tensor(indices)).sum(1).mean())
    assert torch.equal(found.weight, expected.weight)


# --- an optimizer of torch to all others ---


def test_groups_state_and_hooks_are_those_of_the_wrapped_optimizer():
    optimizer = wrapped()[1]
    inner = optimizer.optimizer
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert optimizer.defaults is inner.defaults
    assert repr(optimizer).startswith("GradientAccumulation (steps: 4, reduction: mean) of Adam (\nParameter Group 0")
    extra = nn.Parameter(torch.zeros(2))
    optimizer.add_param_group({"params": [extra], "lr": 0.5})
    assert inner.param_groups[1]["params"] == [extra]
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.param_groups[1]["lr"] == 0.5
    with refused(AttributeError, says="nothing"):
        optimizer.nothing  # noqa: B018


def test_step_hooks_see_whole_steps():
    def clip(optimizer, *_):
        norms.append(len(norms))
        nn.utils.clip_grad_value_([each for group in optimizer.param_groups for each in group["params"]], 0.25)

    norms = []
    model, optimizer = wrapped()
    optimizer.register_step_pre_hook(clip)
    train(model, optimizer, micro(batches()))
    assert len(norms) == 4
    expected = unwrapped()
    expected[1].register_step_pre_hook(clip)
    train(*expected, batches())
    assert_equal((model, optimizer), expected)
    assert any(
        not torch.equal(one, two) for one, two in zip(model.parameters(), undivided()[0].parameters(), strict=True)
    )


SCHEDULES = {
    "decay": partial(lr_scheduler.ExponentialLR, gamma=0.5),
    "one cycle": partial(lr_scheduler.OneCycleLR, max_lr=0.3, total_steps=9),  # moves betas too
    "chained": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, total_iters=2), lr_scheduler.CosineAnnealingLR(optimizer, 4)],
        milestones=[2],
    ),
}


@covering(name=[*SCHEDULES], way=["stepped", "hook", "of the wrapped"], strength=1)
def test_a_schedule_counts_steps(name, way):
    expected, (model, optimizer) = unwrapped(), wrapped()
    plainly = SCHEDULES[name](expected[1])
    schedule = SCHEDULES[name](optimizer.optimizer if way == "of the wrapped" else optimizer)
    if way == "hook":
        optimizer.register_step_post_hook(lambda *_: schedule.step())
    train(*expected, batches(7), after=plainly.step)
    train(
        model,
        optimizer,
        micro(batches(7)),
        after=lambda: schedule.step() if optimizer.stepped and way != "hook" else None,
    )
    assert schedule.last_epoch == 7
    assert schedule.get_last_lr() == plainly.get_last_lr()
    assert_equal((model, optimizer), expected)


def test_a_plateau_is_watched_as_ever():
    optimizer = wrapped()[1]
    schedule = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    schedule.step(1.0)
    schedule.step(2.0)
    assert optimizer.optimizer.param_groups[0]["lr"] == 0.005


# --- states ---


@covering(name=["sgd", "adam", "adamw, foreach", "asgd"], at=[0, 1, 3, 4, 6, 15], strength=1)
def test_a_resumed_step_is_one_that_was_not_interrupted(name, at):
    """Saved after so many of 16 micro-batches, also in the middle of a step, and loaded in a new process's objects."""
    inputs = micro(batches())
    model, optimizer = wrapped(name)
    train(model, optimizer, inputs[:at])
    saved = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    train(model, optimizer, inputs[at:])

    resumed, other = wrapped(name)
    train(resumed, other, inputs[:3])  # whatever it did before is gone
    resumed.load_state_dict(saved["model"])
    other.load_state_dict(saved["optimizer"])
    assert other.accumulated == at % 4
    gradients = saved["optimizer"]["accumulation"].get("gradients", {})
    before = copy.deepcopy(gradients)
    assert [each.grad is not None for each in resumed.parameters()] == [at % 4 > 0] * 2
    train(resumed, other, inputs[at:])
    assert all(torch.equal(gradients[i], each) for i, each in before.items())  # they are not the ones trained with
    assert_equal((resumed, other), (model, optimizer))
    assert_equal((resumed, other), undivided(name))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copy_goes_on_in_the_middle_of_a_step(copied):
    inputs = micro(batches())
    model, optimizer = wrapped()
    train(model, optimizer, inputs[:6])
    schedule = lr_scheduler.ExponentialLR(optimizer, 1.0)  # which patches `step` of the original
    twin, other = copied((model, optimizer))
    train(model, optimizer, inputs[6:])
    assert other.param_groups[0]["params"][0] is twin.weight
    assert (other.steps, other.reduction, other.accumulated) == (4, "mean", 2)
    train(twin, other, inputs[6:])
    assert all(map(torch.equal, twin.parameters(), model.parameters()))
    assert schedule.optimizer is optimizer


def test_a_copy_is_wrapped_whatever_the_wrapped_optimizer_does():
    class Single(torch.optim.SGD):
        def __deepcopy__(self, memo):
            return self

    optimizer = GradientAccumulation(Single([torch.zeros(1)], lr=0.1), 2)
    assert copy.deepcopy(optimizer).optimizer is optimizer.optimizer


def test_warm_moments_come_from_a_plain_optimizer_and_go_to_one():
    inputs = batches()
    first = unwrapped()
    train(*first, inputs[:1])
    resumed, optimizer = resumed_from(*first)
    train(resumed, optimizer, micro(inputs[1:3]))
    again, last = unwrapped()
    again.load_state_dict(resumed.state_dict())
    last.load_state_dict(through_a_file(optimizer.state_dict()))
    train(again, last, inputs[3:])
    assert_equal((again, last), undivided())


def test_a_warm_optimizer_may_be_wrapped():
    model, inner = unwrapped()
    train(model, inner, batches()[:2])
    optimizer = GradientAccumulation(inner, 4)
    train(model, optimizer, micro(batches()[2:]))
    assert_equal((model, optimizer), undivided())


def test_between_steps_another_number_may_go_on():
    inputs = batches()
    model, optimizer = wrapped(steps=4)
    train(model, optimizer, micro(inputs[:2], 4))
    resumed, other = resumed_from(model, optimizer, steps=2)
    assert other.steps == 2
    train(resumed, other, micro(inputs[2:], 2))
    assert_equal((resumed, other), undivided())


@pytest.mark.parametrize(("steps", "reduction"), [(2, "mean"), (4, "sum")])
def test_within_a_step_another_number_is_refused_and_nothing_is_loaded(steps, reduction):
    model, optimizer = wrapped()
    train(model, optimizer, micro(batches())[:6])
    _, other = wrapped(steps=steps, reduction=reduction)
    with refused(says=f"{steps}, {reduction}, 4,"):
        other.load_state_dict(optimizer.state_dict())
    assert not other.state
    assert other.accumulated == 0


# --- closures ---


@covering(name=["sgd", "adam"], reduction=REDUCTIONS, strength=1)
def test_closures_are_evaluated_micro_batch_by_micro_batch(name, reduction):
    """They may read a variable of the loop, as most do."""
    (expected, plain), (model, optimizer) = unwrapped(name), wrapped(name, reduction=reduction)
    losses, whole = [], []
    for samples in batches():
        whole.append(plain.step(lambda: evaluate(expected, plain, samples, reduction)))  # noqa: B023
        for part in samples.chunk(4):
            with torch.no_grad():  # which is for what surrounds the closure
                losses.append(optimizer.step(lambda: evaluate(model, optimizer, part, reduction)))  # noqa: B023
    assert_equal((model, optimizer), (expected, plain))
    torch.testing.assert_close(torch.stack(losses[3::4]), torch.stack(whole))
    assert all(loss.requires_grad for loss in losses[0::4])  # as the closure returned it


def evaluate(model, optimizer, samples, reduction="mean"):
    optimizer.zero_grad()
    loss = reduced(model(samples), reduction)
    loss.backward()
    return loss


def square(model, optimizer, samples, reduction, weigh=lambda loss, *_: loss):
    """A loss that LBFGS can minimize."""
    optimizer.zero_grad()
    losses = ((samples * model.weight).sum(dim=(1, 2)) - 1).square() + model.bias.square().sum()
    loss = weigh(reduced(losses, reduction), len(samples), 16)
    loss.backward()
    return loss


@covering(search=[None, "strong_wolfe"], reduction=REDUCTIONS, strength=1)
def test_lbfgs_evaluates_all_micro_batches_again(search, reduction):
    """In float64, within a relative 1e-8. Sizes are 6, 5 and 5."""
    expected, model = Linear().double(), Linear().double()
    lbfgs = partial(torch.optim.LBFGS, lr=0.01, max_iter=5, line_search_fn=search)
    plain = lbfgs(expected.parameters())
    optimizer = GradientAccumulation(lbfgs(model.parameters()), 3, reduction)
    for samples in batches(3):
        loss = plain.step(partial(square, expected, plain, samples.double(), reduction))
        for part in samples.double().tensor_split(3):
            found = optimizer.step(partial(square, model, optimizer, part, reduction, optimizer.weigh))
        torch.testing.assert_close(found, loss)
    assert optimizer.state[model.weight]["func_evals"] > 3
    for one, two in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("kind", ["one variable", "one object", "one method", "default"])
def test_closures_that_forget_their_data_are_not_evaluated_again(kind):
    model = Linear().double()
    optimizer = GradientAccumulation(torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=3), 2)
    samples = torch.ones(4, 5, 3).double()

    def once():
        return square(model, optimizer, samples, "mean")

    class Reads:
        def closure(self):
            return square(model, optimizer, samples, "mean")

    reads, closures = Reads(), []
    for samples in batches(1)[0].double().chunk(2):
        closures.append(
            {
                "one variable": lambda: square(model, optimizer, samples, "mean"),  # noqa: B023
                "one object": once,
                "one method": reads.closure,
                "default": lambda samples=samples: square(model, optimizer, samples, "mean"),
            }[kind]
        )
    optimizer.step(closures[0])
    if kind == "default":
        optimizer.step(closures[1])
        assert optimizer.stepped
        return
    with refused(RuntimeError, says="LBFGS 1 2"):
        optimizer.step(closures[1])
    assert optimizer.accumulated == 0


def test_closures_are_of_all_micro_batches_or_of_none():
    model, optimizer = wrapped()
    train(model, optimizer, micro(batches())[:1])
    with refused(says="closures: 0, 1"):
        optimizer.step(lambda: evaluate(model, optimizer, batches()[0]))


@pytest.mark.parametrize("loss", [None, 3])
def test_a_closure_may_return_no_tensor(loss):
    optimizer = wrapped("sgd")[1]
    assert [optimizer.step(lambda: loss) for _ in range(8)] == [loss] * 8


def test_a_loss_that_is_missing_makes_that_of_the_step_missing():
    optimizer = wrapped("sgd")[1]
    assert [optimizer.step(lambda loss=loss: loss) for loss in (None, 3, 3, 3)] == [None, 3, 3, None]


def test_a_closure_that_raised_is_not_evaluated_again():
    found = []
    for fails in (False, True):
        model = Linear().double()
        optimizer = GradientAccumulation(torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=3), 2)
        if fails:
            with pytest.raises(ZeroDivisionError):
                optimizer.step(lambda: 1 / 0)
        for part in batches(1)[0].double().chunk(2):
            optimizer.step(partial(square, model, optimizer, part, "mean"))
        found.append(model.weight.detach())
    assert torch.equal(*found)


def test_a_state_within_a_step_has_values_of_losses_which_nobody_changes_later():
    model, optimizer = wrapped("sgd")
    first, second, third, _ = micro(batches(1))
    for part in (first, second):
        optimizer.step(partial(evaluate, model, optimizer, part))
    saved = optimizer.state_dict()
    losses = saved["accumulation"]["losses"]
    assert not any(each.requires_grad for each in losses)
    resumed, other = wrapped("sgd")
    other.load_state_dict(saved)
    optimizer.step(partial(evaluate, model, optimizer, third))
    other.step(partial(evaluate, resumed, other, third))
    assert len(losses) == 2


def test_closures_of_a_resumed_step():
    model, optimizer = wrapped("sgd")
    parts = micro(batches(1))
    for part in parts[:2]:
        optimizer.step(partial(evaluate, model, optimizer, part))
    resumed, other = resumed_from(model, optimizer, "sgd")
    found = [
        [each.step(partial(evaluate, net, each, part)) for part in parts[2:]][-1]
        for net, each in ((model, optimizer), (resumed, other))
    ]
    assert found[0] == found[1]
    assert_equal((resumed, other), (model, optimizer))


# --- GradScaler ---


def scaler_of(growth_interval=1000):
    return torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=growth_interval)


def scaled_step(model, optimizer, scaler, samples):
    optimizer.zero_grad()
    scaler.scale(model(samples).mean()).backward()
    scaler.step(optimizer)
    scaler.update()


@covering(
    name=["momentum", "adam, fused", "rprop"],
    way=["each micro-batch", "unscaled first", "whole steps only"],
    strength=1,
)
def test_a_scaler_leaves_no_trace(name, way):
    """Its scale grows in the middle of steps, where it is called for each micro-batch."""
    scaler = scaler_of(growth_interval=3)
    model, optimizer = wrapped(name)
    scales = []
    for i, samples in enumerate(micro(batches())):
        optimizer.zero_grad()
        scaler.scale(model(samples).mean()).backward()
        scales.append(scaler.get_scale())
        if way == "whole steps only" and i % 4 < 3:
            optimizer.step()
            continue
        if way == "unscaled first":
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert_equal((model, optimizer), undivided(name))
    assert scaler.get_scale() == (32.0 if way == "whole steps only" else 512.0)
    assert (len(set(scales[:4])) > 1) == (way != "whole steps only")


@pytest.mark.parametrize("bad", [4, 5, 7])
def test_a_step_with_an_overflow_is_left_out_whole(bad):
    scaler = scaler_of()
    model, optimizer = wrapped()
    inputs = micro(batches())
    inputs[bad] = inputs[bad] * float("inf")
    stepped = []
    for samples in inputs:
        scaled_step(model, optimizer, scaler, samples)
        stepped.append(optimizer.stepped)
    assert [i for i, each in enumerate(stepped) if each] == [3, 11, 15]
    assert scaler.get_scale() == 8.0  # cut once, at the micro-batch that overflowed
    expected = unwrapped()
    train(*expected, [samples for i, samples in enumerate(batches()) if i != 1])
    assert_equal((model, optimizer), expected)


@pytest.mark.parametrize("bad", [None, 4])
def test_a_resumed_step_with_a_scaler(bad):
    inputs = micro(batches(2))
    if bad is not None:
        inputs[bad] = inputs[bad] * float("inf")
    (model, optimizer), scaler, same = wrapped(), scaler_of(growth_interval=3), scaler_of(growth_interval=3)
    for samples in inputs[:6]:
        scaled_step(model, optimizer, scaler, samples)
    resumed, other = resumed_from(model, optimizer)
    same.load_state_dict(scaler.state_dict())
    for samples in inputs[6:]:
        scaled_step(resumed, other, same, samples)
        scaled_step(model, optimizer, scaler, samples)
    assert_equal((resumed, other), (model, optimizer))
    assert other.stepped == (bad is None)


def test_gradients_in_float16_are_refused_as_a_scaler_does():
    model = Linear().half()
    scaler = scaler_of()
    optimizer = GradientAccumulation(torch.optim.SGD(model.parameters(), lr=0.1), 2)
    scaler.scale(model(batches()[0].half()).mean()).backward()
    with refused(says="float16 GradScaler float32"):
        scaler.step(optimizer)


# --- what is refused ---


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"optimizer": nn.Linear(1, 1)}, TypeError, "optimizer Linear"),
        ({"steps": 0}, ValueError, "steps 0"),
        ({"steps": 2.0}, TypeError, "steps 2.0"),
        ({"reduction": "none"}, ValueError, "'none' mean sum"),
    ],
)
def test_bad_arguments_are_refused(change, error, says):
    given = {"optimizer": torch.optim.SGD([torch.zeros(1)], lr=0.1), "steps": 2, "reduction": "mean", **change}
    with refused(error, says=says):
        GradientAccumulation(**given)


def test_an_empty_micro_batch_has_no_loss_to_weigh():
    with refused(says="size 0"):
        wrapped()[1].weigh(torch.zeros(()), 0, 16)
