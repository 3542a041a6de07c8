"""Programs that an engine could train otherwise than they say: what `python -m tests.verified` tells of each.

An older engine refused or doubted 342 of them, and trained 113 exactly. Names begin with R: for recipes, H: for layers
and losses that hide something, T: for optimizers, schedules and hooks on parameters, B: for defects that were mended,
O: and F: for modules with a forward of their own.
"""

import copy
import random
import re
import threading
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint

from tests.recipes import RECIPES, Apply, Base, CountingLoss, Generating, around, batches

PROGRAMS = {f"R:{name}": program for name, program in RECIPES.items()}


def deep(*middle, last=(), **options):
    """A recipe of layers in the middle of five or more."""
    ends = [nn.Linear(8, 8), nn.Tanh()], [nn.Linear(8, 8), nn.Tanh(), *last, nn.Linear(8, 3)]
    return {"layers": [*ends[0], *middle, *ends[1]], **options}


class Acts(nn.Module):
    """A linear layer, and a function of this module and what the layer returns."""

    def __init__(self, act, **kept):
        super().__init__()
        self.linear, self.act = nn.Linear(8, 8), act
        for name, value in kept.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.act(self, self.linear(x))


def acting(act, **kept):
    """A recipe of such a layer; functions make what it keeps."""
    return lambda: deep(Acts(act, **{name: make() for name, make in kept.items()}))


def counted(where, name="calls"):
    """Count in a dict."""
    where[name] = where.get(name, 0) + 1
    return where[name]


# -- Copies and views; what comes or goes in a forward


class Copied(Base):
    """Copies itself by a function."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def __deepcopy__(self, memo):
        return self.how(self)


def made_anew(layer):
    made = Copied(layer.how)
    made.load_state_dict(layer.state_dict())
    return made


def in_a_lock(layer, x):
    with layer.lock:
        return x.tanh()


def held_in_a_list(other):
    return Acts(lambda layer, x: layer.others[0](x), others=[other])


def of_another_shard():
    first = nn.Linear(8, 8)
    return {"layers": [first, nn.Tanh(), held_in_a_list(first), nn.Linear(8, 3)]}


def viewing():
    layer = Acts(lambda layer, x: x @ layer.turned)
    layer.turned = layer.linear.weight.detach().t()
    return around(layer)


def register_late(layer, x):
    if not hasattr(layer, "late"):
        layer.register_buffer("late", x.detach().mean(0))
    return x - layer.late


def make_a_parameter(layer, x):
    if not hasattr(layer, "scale"):
        layer.scale = nn.Parameter(torch.full((8,), 2.0))
    return x * layer.scale


COMES_OR_GOES = {
    "in_forward": lambda layer, x: setattr(layer, "mean", x.detach().mean(0)),
    "to_none": lambda layer, x: setattr(layer, "mean", None),
    "registered": lambda layer, x: layer.register_buffer("new", torch.ones(8)),
    "in_backward": lambda layer, x: x.register_hook(lambda gradient: setattr(layer, "mean", gradient.mean(0))),
    "never": lambda layer, x: None,
}


def coming_or_going(how):
    def act(layer, x):
        COMES_OR_GOES[how](layer, x)
        return x * 1.0

    layer = Acts(act)
    layer.register_buffer("mean", torch.zeros(8) if how == "to_none" else None)
    return deep(layer)


PROGRAMS |= {f"H:late_buffer_{how}": partial(coming_or_going, how) for how in COMES_OR_GOES}
PROGRAMS |= {
    "R:deepcopy_returns_self": lambda: around(Copied(lambda layer: layer)),
    "R:deepcopy_makes_a_new_one": lambda: around(nn.Sequential(Copied(made_anew))),
    "R:deepcopy_is_shallow": lambda: around(Copied(copy.copy)),
    "B:memo_ignored": lambda: around(Copied(made_anew), nn.Dropout(0.2)),
    "H:draws_as_it_is_copied": lambda: deep(Copied(made_anew), nn.Dropout(0.2)),
    "R:lock_in_a_layer": acting(in_a_lock, lock=threading.Lock),
    "R:layer_hidden_in_a_list": lambda: around(held_in_a_list(nn.Linear(8, 8))),
    "R:layer_of_another_shard_hidden_in_a_list": of_another_shard,
    "R:attribute_view": viewing,
    "B:views_in_a_list": RECIPES["view_in_a_dict"],
    "B:buffer_views": RECIPES["buffer_view_of_buffer"],
    "R:pruned": lambda: around(prune.l1_unstructured(nn.Linear(8, 8), "weight", 0.5)),
    "R:old_spectral_norm": lambda: around(nn.utils.spectral_norm(nn.Linear(8, 8))),
    "R:jit_script": lambda: around(torch.jit.script(nn.Linear(8, 8))),
    "R:jit_first": lambda: {"layers": [torch.jit.script(nn.Linear(8, 8)), nn.Tanh(), nn.Linear(8, 3)]},
    "R:jit_trace_nested": lambda: around(nn.Sequential(nn.Tanh(), torch.jit.trace(nn.Linear(8, 8), torch.ones(2, 8)))),
    "B:trace": lambda: around(torch.jit.trace(nn.Linear(8, 8), torch.ones(2, 8))),
    "B:script_inside_a_layer": acting(lambda layer, x: layer.inner(x), inner=lambda: torch.jit.script(nn.Linear(8, 8))),
    "R:buffer_registered_in_forward": acting(register_late),
    "R:parameter_made_in_forward": acting(make_a_parameter),
    "B:late_buffer": RECIPES["buffer_set_in_forward"],
}


# -- Weights that a layer writes to


class Adapter(nn.Module):
    """Merges what it learns into its frozen weight on eval(), as LoRA layers did."""

    def __init__(self, delta):
        super().__init__()
        self.base, self.merged = nn.Linear(8, 8).requires_grad_(False), False
        self.delta = nn.Parameter(torch.full((8, 8), delta))

    def train(self, mode=True):
        super().train(mode)
        if mode == self.merged:
            self.base.weight.data += self.delta.data * (-1 if mode else 1)
            self.merged = not mode
        return self

    def forward(self, x):
        return self.base(x) if self.merged else F.linear(x, self.base.weight + self.delta, self.base.bias)


class Writes(nn.Module):
    """Changes its weight in its forward, or in a hook."""

    def __init__(self, write, register=None):
        super().__init__()
        self.weight = nn.Parameter(torch.full((8,), 0.5))
        self.write = write if register is None else lambda layer: None
        if register is not None:
            register(self, lambda layer, *_: write(layer))

    def forward(self, x):
        self.write(self)
        return x * self.weight


def shrink(layer):
    layer.weight.data.mul_(0.9)


def shrink_by_numpy(layer):
    layer.weight.detach().numpy()[:] *= 0.9


def on_output(layer, hook):
    layer.register_forward_hook(lambda module, _, out: out.register_hook(lambda gradient: hook(module)) and None)


WRITES = {
    "mul": shrink,
    "no_grad": torch.no_grad()(lambda layer: layer.weight.mul_(0.9)),
    "normalize": lambda layer: setattr(layer.weight, "data", F.normalize(layer.weight.data, dim=0)),
    "numpy": shrink_by_numpy,
    "new_parameter": lambda layer: setattr(layer, "weight", nn.Parameter(layer.weight.detach() * 0.9)),
    "clamp_that_changes_nothing": lambda layer: layer.weight.data.clamp_(-10, 10),
    "rebinds_to_the_same": lambda layer: setattr(layer.weight, "data", layer.weight.data.clamp(-10, 10)),
}
REGISTERS = {
    "backward": nn.Module.register_full_backward_hook,
    "forward": nn.Module.register_forward_hook,
    "tensor": on_output,
}
PROGRAMS |= {f"H:writes_{how}": lambda write=write: deep(Writes(write)) for how, write in WRITES.items()}
PROGRAMS |= {f"H:writes_{how}_hook": lambda on=on: deep(Writes(shrink, on)) for how, on in REGISTERS.items()}
PROGRAMS |= {
    f"H:adapter_merges_{delta}{named}": lambda delta=delta, options=options: deep(Adapter(delta), **options)
    for delta, (named, options) in product((0.0, 0.1), {"": {}, "_validation": {"validation": batches(1)}}.items())
}
PROGRAMS |= {
    "H:writes_frozen": lambda: deep(Writes(shrink).requires_grad_(False)),
    "B:data.mul_": lambda: around(Writes(shrink)),
    "B:data_=_": lambda: around(Writes(WRITES["normalize"])),
}


# -- State of layers: counters, generators, records, caches


def count(layer, x):
    return x * (1 + 0.1 * counted(vars(layer)))


def draw(layer, x):
    return x + layer.own.random()


HIDDEN = {
    "counter": lambda: Acts(count),
    "torch": lambda: Acts(
        lambda layer, x: x + torch.randn(x.shape, generator=layer.own), own=torch.Generator().manual_seed(1)
    ),
    "numpy": lambda: Acts(draw, own=np.random.default_rng(1)),
    "random": lambda: Acts(draw, own=random.Random(1)),
}
for kind, make in HIDDEN.items():
    PROGRAMS |= {
        f"H:hidden_{kind}_alone": lambda make=make: deep(make()),
        f"H:hidden_{kind}_dropout": lambda make=make: deep(nn.Dropout(0.3), make()),
        f"H:hidden_{kind}_first": lambda make=make: {"layers": [make(), *deep()["layers"]]},
        f"H:hidden_{kind}_last": lambda make=make: deep(last=[make()]),
    }

LATER = {
    "greater": lambda layer: layer.calls > 3,
    "swapped": lambda layer: 3 < layer.calls,  # noqa: SIM300
    "modulo": lambda layer: layer.calls % 4 == 0,
    "equal": lambda layer: layer.calls == 4,
    "min": lambda layer: min(layer.calls / 1000, 1.0) > 0.004,
    "average": lambda layer: layer.average > 1.9,
    "tensor": lambda layer: bool(layer.number > 3),
    "tensor_of_number": lambda layer: bool(torch.tensor(layer.calls) > 3),
}


def later(is_late):
    """A recipe of a layer that does something else after some steps."""

    def act(layer, x):
        layer.calls += 1
        layer.number += 1
        layer.average = 0.5 * layer.average + 1.0
        return x * (2 if is_late(layer) else 1)

    return acting(act, calls=int, average=float, number=lambda: torch.tensor(0))


def of_its_class(layer, x):
    Acts.num = getattr(Acts, "num", 0) + 1
    return x * {7: 2.0}.get(Acts.num, 1.0)


def of_a_closure():
    calls = {}
    return deep(Acts(lambda layer, x: x * {7: 2.0}.get(counted(calls), 1.0)))


def outside():
    """Appends to a list that no copy has for itself."""
    kept = []
    return SimpleNamespace(append=lambda value: kept.append(value))


def statistics(kind):
    def act(layer, x):
        layer.mean, layer.attention = float(x.detach().mean()), x.detach()
        layer.seen = [layer.mean]
        layer.history.append(layer.mean)
        if kind == "average":
            layer.average = 0.9 * getattr(layer, "average", 0.0) + 0.1 * layer.mean
        elif kind == "tensor":
            layer.calls += 1
        return x.tanh()

    return acting(act, history=list if kind == "list" else outside, calls=lambda: torch.tensor(0))


REMEMBERS = {"tensor": torch.Tensor.detach, "number": lambda x: float(x.detach().mean()), "list": torch.Tensor.tolist}


def remembering(kind):
    def act(layer, x):
        now = REMEMBERS[kind](x)
        last, layer.last = getattr(layer, "last", now), now
        return x * (1 + (torch.tensor(last) if kind == "list" else last))

    return acting(act)


def by_shape(layer, x):
    if layer.mask is None or layer.length != x.shape[0]:
        layer.length, layer.mask = x.shape[0], torch.ones(x.shape[0], 1)
    return x * layer.mask * layer.masks.setdefault(x.shape[0], torch.ones(x.shape[0], 1))


def by_content(layer, x):
    if layer.key is None or not torch.equal(layer.key, x):
        layer.key, layer.table = x.detach().clone(), x.detach().mean(1, keepdim=True)
    return x - layer.table


KEEPS = {
    "attribute": lambda layer, wide: setattr(layer, "attention", wide),
    "list": lambda layer, wide: layer.kept.__setitem__(0, wide),
    "new_list": lambda layer, wide: setattr(layer, "kept", [*layer.kept[:1], wide]),
    "dict": lambda layer, wide: layer.store.__setitem__("all", [wide]),
    "child": lambda layer, wide: setattr(layer.linear, "attention", wide),
    "object": lambda layer, wide: setattr(layer.bag, "attention", wide),
}


def keeping(keep):
    def act(layer, x):
        wide = x[:, :, None].expand(*x.shape, 64).tanh()
        keep(layer, wide)
        return x + wide.mean(-1)

    return acting(act, kept=lambda: [None], store=dict, bag=SimpleNamespace)


def seed(layer, x):
    torch.manual_seed(11)
    return x + torch.randn(x.shape)


def fork_and_seed(layer, x):
    with torch.random.fork_rng(devices=[]):
        return seed(layer, x)


PROGRAMS |= {f"H:later_{how}": later(is_late) for how, is_late in LATER.items()}
PROGRAMS |= {f"H:statistics_{kind}": statistics(kind) for kind in ("list", "average", "tensor", "last")}
PROGRAMS |= {f"H:remembers_{kind}": remembering(kind) for kind in REMEMBERS}
PROGRAMS |= {f"H:keeps_activations_{where}": keeping(keep) for where, keep in KEEPS.items()}
PROGRAMS |= {
    "H:looksup_class": acting(of_its_class),
    "H:looksup_closure": of_a_closure,
    "H:looksup_dict": acting(lambda layer, x: x * {7: 2.0}.get(counted(vars(layer)), 1.0)),
    "H:looksup_text": acting(lambda layer, x: x * (1.0 + (str(counted(vars(layer))) == "7"))),
    "H:cached_shapes": acting(by_shape, mask=lambda: None, length=int, masks=dict),
    "H:cached_content": acting(by_content, key=lambda: None, table=lambda: None),
    "H:seeds_all": lambda: deep(Acts(seed), nn.Dropout(0.2)),
    "B:seeds": lambda: deep(Acts(fork_and_seed), nn.Dropout(0.2)),
    "B:counter": acting(count),
    "B:counter_and_dropout": RECIPES["counter_and_dropout"],
    "B:own_generator": RECIPES["own_generator"],
    "B:own_generator_and_dropout,_last_shard": lambda: {"layers": [nn.Dropout(0.2), Generating(0.3), nn.Linear(8, 3)]},
}


for num in (1, 3):
    PROGRAMS[f"H:reads_grad_{num}"] = lambda num=num: deep(
        Acts(lambda layer, x: x * (1 if layer.linear.weight.grad is None else 2)), accumulation_steps=num
    )


# -- Backwards


class Alters(torch.autograd.Function):
    """Changes a gradient."""

    @staticmethod
    def forward(ctx, x, alter):
        ctx.alter = alter
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return ctx.alter(gradient), None


def noisy(gradient):
    return gradient + 0.1 * torch.randn(gradient.shape)


def noisy_in_a_fork(gradient):
    with torch.random.fork_rng(devices=[]):
        return noisy(gradient)


def noisy_for_nothing(gradient):
    noisy(gradient)
    return gradient.clone()


def by_tensor_hook(layer, x):
    x.register_hook(noisy)
    return x


def with_a_noisy_hook(_, entering, leaving):
    return (noisy(entering[0]),)


def altering(alter):
    return Acts(lambda layer, x: Alters.apply(x, alter))


def module_hook():
    layer = Acts(lambda layer, x: x)
    layer.linear.register_full_backward_hook(with_a_noisy_hook)
    return layer


def checkpointed(dropout, **options):
    body = nn.Sequential(nn.Linear(8, 8), nn.Dropout(dropout), nn.Tanh())
    return Acts(lambda layer, x: checkpoint(layer.body, x, use_reentrant=False, **options), body=body)


def differentiate(layer, x):
    with torch.enable_grad():
        y = x.detach().requires_grad_()
        return x + torch.autograd.grad((y**3).sum(), y)[0]


DRAWS_BACKWARD = {
    "torch": partial(altering, noisy),
    "forked": partial(altering, noisy_in_a_fork),
    "dropped": partial(altering, noisy_for_nothing),
    "random": partial(altering, lambda gradient: gradient + random.random()),
    "numpy": partial(altering, lambda gradient: gradient + np.random.rand()),
    "module_hook": module_hook,
    "tensor_hook": lambda: Acts(by_tensor_hook),
}
for how, make in DRAWS_BACKWARD.items():
    PROGRAMS[f"H:draws_backward_{how}"] = lambda make=make: deep(make())
    PROGRAMS[f"H:draws_backward_{how}_dropout"] = lambda make=make: deep(nn.Dropout(0.2), make())
PROGRAMS |= {
    "H:draws_backward_last": lambda: deep(last=[altering(noisy)]),
    "H:checkpoint_draws_anew": lambda: deep(checkpointed(0.3, preserve_rng_state=False)),
    "H:checkpoint_dropout": lambda: deep(checkpointed(0.3), nn.Dropout(0.2)),
    "H:checkpoint_without_state": lambda: deep(checkpointed(0.0, preserve_rng_state=False), nn.Dropout(0.2)),
    "B:draws_in_backward": RECIPES["draws_in_a_backward"],
    "B:differentiates": acting(differentiate),
}


# -- Losses, and what a layer leaves for others


class Loss:
    """Weighs its calls, each otherwise; or keeps a record that it never looks at."""

    def __init__(self, kind):
        self.kind, self.calls, self.seen, self.generator = kind, 0, [], np.random.default_rng(0)

    def __call__(self, output, target):
        weight = 1.0
        if self.kind == "counter":
            self.calls += 1
            weight = self.calls
        elif self.kind == "numpy":
            weight = float(self.generator.random())
        else:
            self.seen.append(output.detach().mean().item())
            weight = len(self.seen) if self.kind == "list" else 1.0
        return F.cross_entropy(output, target) * weight

    def call(self, output, target):
        return self(output, target)


class ModuleLoss(nn.Module):
    def __init__(self, loss):
        super().__init__()
        self.loss = loss

    def forward(self, output, target):
        return self.loss(output, target)


def closing(kind):
    calls, loss = 0, Loss(kind)

    def loss_fn(output, target):
        nonlocal calls
        calls += 1
        return loss(output, target) * (calls if kind == "counter" else 1)

    return loss_fn


def late_closure():
    calls = {}
    return lambda output, target: F.cross_entropy(output, target) * (1 if counted(calls) < 100 else 2)


NUM_CALLS = 0


def late_global(output, target):
    global NUM_CALLS
    NUM_CALLS += 1
    return F.cross_entropy(output, target) * (1 if NUM_CALLS < 100 else 2)


LOSSES = {
    "object": Loss,
    "module": lambda kind: ModuleLoss(Loss(kind)),
    "method": lambda kind: Loss(kind).call,
    "partial": lambda kind: partial(Loss.call, Loss(kind)),
    "closure": closing,
}
LATE_LOSSES = {"closure": late_closure, "module": lambda: ModuleLoss(late_closure()), "global": lambda: late_global}
PROGRAMS |= {
    f"H:loss_{shape}_{kind}": lambda make=make, kind=kind: deep(loss_fn=make(kind))
    for (shape, make), kind in product(LOSSES.items(), ("counter", "numpy", "list", "record"))
}
PROGRAMS |= {f"H:late_loss_{name}": lambda make=make: deep(loss_fn=make()) for name, make in LATE_LOSSES.items()}
STARTS = {"absent": {}, "none": {"aux": None}, "number": {"aux": 0.0}, "list": {"aux": []}}


def leaving(start):
    """A layer that leaves a term of the loss on itself."""

    def act(layer, x):
        if isinstance(getattr(layer, "aux", None), list):
            layer.aux[:] = [x.square().mean()]
        else:
            layer.aux = x.square().mean()
        return x

    return Acts(act, **copy.deepcopy(STARTS[start]))


def loss_reads(start):
    layer = leaving(start)

    def loss_fn(output, target):
        aux = sum(layer.aux) if isinstance(layer.aux, list) else layer.aux
        return F.cross_entropy(output, target) + 0.1 * (0.0 if aux is None else aux)

    return deep(layer, loss_fn=loss_fn)


def loss_reads_a_number():
    layer = leaving("none")
    layer.scale = 0.5
    return deep(layer, loss_fn=lambda output, target: F.cross_entropy(output, target) * layer.scale)


class LossOfModel:
    def __init__(self, model):
        self.model = model

    def __call__(self, output, target):
        return F.cross_entropy(output, target) + sum(each.aux for each in self.model.modules() if hasattr(each, "aux"))


def loss_reads_the_model(wrap):
    model = nn.Sequential(*deep(wrap(leaving("number")))["layers"])
    return {"model": model, "loss_fn": LossOfModel(model)}


def layer_reads(start):
    layer = leaving(start)
    return deep(layer, Acts(lambda self, x: x * (1 + self.others[0].aux), others=[layer]))


def hook_hands_activation(change):
    kept, layers = {}, deep()["layers"]
    layers[0].register_forward_hook(lambda module, _, out: kept.update(out=change(out)))
    layers[3].register_forward_hook(lambda module, _, out: out + 0.1 * kept["out"])
    return {"layers": layers}


def closing_over_a_weight():
    first = nn.Linear(8, 8)
    return {"layers": [first, nn.Tanh(), Acts(lambda layer, x: x + F.linear(x, first.weight)), nn.Linear(8, 3)]}


def hand_its_buffer(layer, x):
    layer.calls += 1
    return x, layer.calls


def with_buffer(act, name, tensor, *above):
    layer = Acts(act)
    layer.register_buffer(name, tensor.clone() if tensor.is_contiguous() else tensor)
    return deep(layer, *above)


PROGRAMS |= {f"H:loss_reads_left_{start}": partial(loss_reads, start) for start in STARTS}
PROGRAMS |= {f"H:layer_reads_left_{start}": partial(layer_reads, start) for start in ("absent", "number")}
PROGRAMS |= {
    "H:loss_object_reads_left": lambda: loss_reads_the_model(lambda layer: layer),
    "H:loss_object_reads_left_nested": partial(loss_reads_the_model, nn.Sequential),
    "H:loss_reads_a_number": loss_reads_a_number,
    "H:hook_hands_activation": lambda: hook_hands_activation(lambda out: out),
    "H:hook_hands_activation_detached": partial(hook_hands_activation, torch.Tensor.detach),
    "F:layer_closes_over_anothers_weight": closing_over_a_weight,
    "B:aux_loss": RECIPES["loss_reads_an_attribute"],
    "B:loss_with_a_counter": lambda: around(loss_fn=CountingLoss()),
    "B:loss_with_a_counter_and_dropout": RECIPES["loss_with_counter"],
    "B:hands_its_buffer": lambda: with_buffer(
        hand_its_buffer, "calls", torch.zeros(4), Apply(lambda pair: pair[0] * pair[1][:1])
    ),
    "B:expanded_buffer": lambda: with_buffer(
        lambda layer, x: x * layer.scale[: len(x)], "scale", torch.ones(1, 8).expand(6, 8)
    ),
}


# -- Forwards of the modules' own


class Net(nn.Module):
    """Children in a forward of its own, which `between` has a say in."""

    def __init__(self, between):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.between = between

    def forward(self, x):
        return self.last(self.between(self, self.first(x).tanh()))


def leave_aux(net, x):
    net.aux = x.square().mean()
    return net.middle(x)


def own_forward_with_aux():
    net = Net(leave_aux)
    return {"model": net, "loss_fn": lambda output, target: F.cross_entropy(output, target) + 0.1 * net.aux}


def own_forward_is_a_closure():
    net = Net(None)
    net.forward = lambda x: net.last(net.middle(net.first(x)).relu())
    return {"model": net}


OWN_FORWARDS = {
    "O:own_forward_python_random": lambda net, x: net.middle(x) * random.random(),
    "O:own_forward_item_scale": lambda net, x: net.middle(x) / (1 + x.abs().mean().item()),
    "O:own_forward_layerdrop": lambda net, x: net.middle(x) if torch.rand(()) < 0.5 else x,
    "O:own_forward_counter": lambda net, x: net.middle(x) / counted(vars(net)),
    "O:own_forward_anneal": lambda net, x: net.middle(x) / (1 if counted(vars(net)) < 4 else 2),
    "F:own_forward_branches_on_a_value": lambda net, x: net.middle(x) if x.sum() > 0 else x,
}
PROGRAMS |= {name: lambda between=between: {"model": Net(between)} for name, between in OWN_FORWARDS.items()}
PROGRAMS |= {"O:own_forward_aux": own_forward_with_aux, "F:own_forward_is_a_closure": own_forward_is_a_closure}


# -- Optimizers, schedules, hooks on parameters


class Scaling(torch.optim.Optimizer):
    """Steps each parameter by its gradient times a factor, of whose making it may keep what it likes where it likes."""

    def __init__(self, params, lr, factor, **options):
        super().__init__(params, {"lr": lr, **options})
        self.factor, self.calls, self.table = factor, 0, {"k": {}}
        self.generator, self.python, self.numpy = torch.Generator(), random.Random(4), np.random.default_rng(5)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad * self.factor(self, group, parameter) * group["lr"])


def optimized(optimizer, scope="shard", **options):
    middle = [nn.Linear(8, 8) for _ in range(3)]
    return around(*middle, nn.Dropout(0.2), optimizer=optimizer, optimizer_scope=scope, **options)


def scaled(factor, scope="shard"):
    """A recipe whose optimizer steps by a factor."""
    return lambda: optimized(lambda params, lr: Scaling(params, lr, factor, scale=torch.tensor(1.0)), scope)


def of_the_first(optimizer, group, p):
    first = optimizer.state[group["params"][0]]
    return 1 / (counted(first) if p is group["params"][0] else first["calls"])


def of_all_gradients(optimizer, group, p):
    norm = torch.stack([other.grad.norm() for other in group["params"] if other.grad is not None]).norm()
    return 1 / max(1.0, norm.item())


def index_of(group, p):
    return next(k for k, other in enumerate(group["params"]) if other is p)


def outside_generator(scope):
    generator = torch.Generator().manual_seed(9)
    return scaled(lambda optimizer, group, p: 1 + 0.1 * torch.randn(p.shape, generator=generator), scope)()


FACTORS = {
    "keeps_count_in_global": lambda o, group, p: 1 / counted(o.state["global"]),
    "keeps_count_in_group": lambda o, group, p: 1 / counted(group),
    "keeps_count_on_itself": lambda o, group, p: 1 / counted(vars(o)),
    "keeps_count_in_private": lambda o, group, p: 1 / counted(vars(o), "_hidden"),
    "keeps_count_in_a_table": lambda o, group, p: 1 / counted(o.table["k"]),
    "keeps_count_that_matters_late": lambda o, group, p: 2 if counted(vars(o), "_hidden") > 40 else 1,
    "keeps_tensor_in_group": lambda o, group, p: group["scale"].mul_(0.99),
    "keeps_first_of_the_group": of_the_first,
    "keeps_python_random": lambda o, group, p: o.python.random(),
    "keeps_numpy_random": lambda o, group, p: float(o.numpy.random()),
    "keeps_by_all_gradients": of_all_gradients,
    "keeps_by_the_one_before": lambda o, group, p: 1 + group["params"][index_of(group, p) - 1].mean(),
    "keeps_by_order": lambda o, group, p: 1 / (index_of(group, p) + 1),
    "own_generator": lambda o, group, p: 1 + 0.1 * torch.randn(p.shape, generator=o.generator),
    "draws_randn_like": lambda o, group, p: 1 + 0.1 * torch.randn_like(p),
    "draws_in_place": lambda o, group, p: 1 + 0.1 * torch.empty_like(p).normal_(),
    "draws_dropout": lambda o, group, p: F.dropout(torch.ones_like(p)),
    "draws_bernoulli": lambda o, group, p: torch.bernoulli(torch.full_like(p, 0.5)),
    "draws_given_the_default_generator": lambda o, group, p: torch.rand(p.shape, generator=torch.default_generator),
    "draws_random": lambda o, group, p: random.random(),
    "draws_numpy": lambda o, group, p: float(np.random.rand()),
}


def later_factor(scope, late):
    """A recipe of an optimizer that steps by another factor after ten steps."""
    return scaled(lambda o, group, p: late(o, p) if counted(o.state[p]) > 10 else 1, scope)


class Lookahead(torch.optim.Optimizer):
    """An optimizer around another one, as they are written."""

    def __init__(self, inner, looks=True):
        self.optimizer, self.looks = inner, looks
        super().__init__(inner.param_groups, {})
        self.param_groups = inner.param_groups
        for group in self.param_groups if looks else ():
            group["counter"] = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.optimizer.step()
        for group in self.param_groups if self.looks else ():
            for p in group["params"] if group["counter"] == 0 else ():
                slow = self.state[p].setdefault("slow", p.detach().clone())
                p.copy_(slow.add_(p - slow, alpha=0.5))
            group["counter"] = (group["counter"] + 1) % 5


class Sam(torch.optim.SGD):
    """Wants a closure, and does not say so in its signature."""

    def step(self, closure=None):
        assert closure is not None, "SAM requires closure"


class Rebinding(torch.optim.SGD):
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.data = p.data - self.param_groups[0]["lr"] * p.grad


def with_step_hook(params, lr):
    optimizer = torch.optim.SGD(params, lr=lr)
    optimizer.register_step_post_hook(
        lambda each, *_: [p.data.clamp_(-0.3, 0.3) for p in each.param_groups[0]["params"]]
    )
    return optimizer


def scheduled(factor):
    return optimized(torch.optim.SGD, lr_scheduler=partial(lr_scheduler.LambdaLR, lr_lambda=factor))


def counting_outside():
    calls = {}
    return scheduled(lambda step: 1 / counted(calls))


def add_noise(parameter):
    if parameter.grad is None:  # it is called with the gradient itself
        return noisy(parameter)
    parameter.grad = noisy(parameter.grad)
    return None


def noisy_hook(register):
    made = optimized(torch.optim.SGD)
    getattr(made["layers"][1].weight, register)(add_noise)
    return made


def hooks_with_generators(is_shared):
    made, shared = optimized(torch.optim.SGD), torch.Generator()
    for p in (made["layers"][1].weight, made["layers"][2].bias):
        own = shared if is_shared else torch.Generator()
        p.register_hook(lambda gradient, own=own: gradient + torch.randn(gradient.shape, generator=own))
    return made


WRAPPED = {
    "lookahead": lambda params, lr: Lookahead(torch.optim.AdamW(params, lr=lr)),
    "wrapped": lambda params, lr: Lookahead(torch.optim.SGD(params, lr=lr), looks=False),
    "step_hooks": with_step_hook,
}
for scope in ("shard", "task"):
    PROGRAMS |= {f"T:{name}_{scope}": scaled(factor, scope) for name, factor in FACTORS.items()}
    PROGRAMS |= {f"T:{name}_{scope}": partial(optimized, optimizer, scope) for name, optimizer in WRAPPED.items()}
    PROGRAMS[f"T:outside_generator_{scope}"] = partial(outside_generator, scope)
OPTIMIZERS = {
    "lbfgs": torch.optim.LBFGS,
    "sam_needs_closure": Sam,
    "sparse_adam": torch.optim.SparseAdam,
    "exact_puts_weights_elsewhere": Rebinding,
    "exact_tensor_lr": lambda params, lr: torch.optim.Adam(params, lr=torch.tensor(lr)),
    "exact_tensor_lr_one_by_one": lambda params, lr: torch.optim.AdamW(params, lr=torch.tensor(lr), foreach=False),
    "exact_maximize": lambda params, lr: torch.optim.AdamW(params, lr=lr, maximize=True),
    "exact_fused": lambda params, lr: torch.optim.SGD(params, lr=lr, fused=True),
}
SCHEDULES = {
    "random": lambda step: random.random(),
    "numpy": lambda step: np.random.rand(),
    "torch": lambda step: torch.rand(()).item(),
}
PROGRAMS |= {f"T:{name}": partial(optimized, optimizer) for name, optimizer in OPTIMIZERS.items()}
PROGRAMS |= {f"T:schedule_draws_{name}": partial(scheduled, factor) for name, factor in SCHEDULES.items()}
PROGRAMS |= {
    f"T:parameter_hook_draws_{register}": partial(noisy_hook, register)
    for register in ("register_hook", "register_post_accumulate_grad_hook")
}
PROGRAMS |= {
    "T:draws_after_10_steps": later_factor("shard", lambda o, p: torch.randn_like(p)),
    "T:draws_after_10_steps_task": later_factor("task", lambda o, p: torch.randn_like(p)),
    "T:keeps_after_10_steps_used": later_factor("shard", lambda o, p: 1 / counted(vars(o))),
    "T:keeps_after_10_steps_unused": later_factor("shard", lambda o, p: min(1, counted(vars(o)))),
    "T:exact_plain": scaled(lambda o, group, p: 1),
    "T:exact_tensor_of_the_group": scaled(lambda o, group, p: group["scale"]),
    "T:schedule_counts_outside": counting_outside,
    "T:hooks_generator_shared": partial(hooks_with_generators, True),
    "T:hooks_generator_each": partial(hooks_with_generators, False),
    "B:global_counter": RECIPES["optimizer_GlobalCounter_shard"],
    "B:optimizer_draws": RECIPES["optimizer_NumpyNoise_shard"],
}


# -- The table: how likely people write such a program, and the rule of the contract that forbids it by name


class Case(NamedTuple):
    was: str  # what an older engine made of it: "refused", or doubted; "exact"
    likely: str  # one of LIKELY
    rule: str  # number of a rule of docs/contract.md; "-": none
    family: str


LIKELY = ("common", "rare", "nobody")
REFUSED = """
common 2 | buffers or parameters that come or go in a forward
    B:late_buffer H:late_buffer_{in_backward,in_forward,registered,to_none} R:buffer_{becomes_none,set_in_forward}
    R:buffer_registered_in_forward R:parameter_made_in_forward R:shared_buffer_that_is_replaced
common 2 | a layer counts, or averages, in an attribute
    B:counter{,_and_dropout} H:hidden_counter_{alone,dropout,first,last} R:anneals_after_some_calls R:counter
    R:attribute_of_{Numbering,RunningMaximum,RunningMaximumInSlots} R:counter_{and_dropout,in_a_closure,last}
    H:later_{average,equal,greater,min,modulo,swapped,tensor,tensor_of_number}
common 2 | a layer keeps a record that it never reads
    H:statistics_{average,list,tensor}
rare 2 | a layer counts outside of itself, or what is looked up by a step
    R:counter_of_{a_base_class,a_class,a_class_in_a_closure,a_function_of_another_package,a_function_of_the_package}
    R:counter_of_{a_generator,a_module,a_namespace,a_static_method,an_array,an_iterator,an_object,bytes}
    R:counter_of_an_autograd_function{,_that_is_named} R:counter_in_the_class H:looksup_{class,closure,dict,text}
nobody 2 | a layer counts in an odd attribute
    R:counter_in_an_attribute_of_{array,bytes,iterator,range}
rare 1 | a layer uses what it kept of the last batch
    H:remembers_{list,number,tensor} R:cache_of_the_last_batch
rare 1 | draws from a generator of its own
    B:own_generator B:own_generator_and_dropout,_last_shard H:hidden_{numpy,random,torch}_{alone,dropout,first,last}
    H:loss_{closure,method,module,object,partial}_numpy R:loss_with_numpy_generator R:numpy_generator_and_dropout
    R:own_generator{,_and_dropout}
rare 1 | a view of a parameter or buffer is kept
    B:{buffer_views,views_in_a_list} R:{attribute_view,buffer_view_of_buffer,buffer_view_of_parameter,view_in_a_dict}
rare 1 | a table keyed by an id, a module or a parameter
    R:table_by_{id_in_a_closure,id_of_a_module,id_of_a_parameter,module,module_and_name,parameter,weak_module}
nobody 1 | a forward touches gradients
    H:reads_grad_3 R:forward_that_sets_a_gradient
nobody 1 | a mode of the thread is left changed
    R:layer_leaves_{autocast,default_dtype,gradients}_changed
common 1 | a forward of the model's own draws elsewhere, counts, or goes by a number
    O:own_forward_{anneal,counter,item_scale,python_random}
rare 1 | a forward of the model's own that cannot be recorded
    F:own_forward_{branches_on_a_value,is_a_closure} O:own_forward_layerdrop
rare 2 | something odd on a later batch only
    R:late_{appends_to_a_list,evaluates_dropout,evaluation_of_dropout_beside_validation,registers_a_hook,scales}
    R:late_{scale_of_the_longest_so_far,sets_a_scale,sets_another_dropout}
    R:late_registers_a_hook_on_{gradients,its_weight}
rare 3 | writes to its weights on a later batch only
    R:late_{binds_its_weight_to_other_memory,freezes_its_weight,replaces_its_weight}
    R:late_{write_in_a_retry,write_in_evaluation,writes_to_its_weight}
rare 3 | merges, freezes or writes
    H:adapter_merges_{0.0,0.1}_validation R:{merges_on_eval,freezes_in_eval,freezes_what_it_has_used} B:data.mul_
    H:writes_{backward_hook,clamp_that_changes_nothing,forward_hook,frozen,mul,new_parameter,no_grad,normalize,numpy}
    H:writes_{rebinds_to_the_same,tensor_hook} R:clamps_{in_a_backward_hook,in_a_hook,its_weight} R:rebinds_its_data
    R:normalizes_its_weight B:data_=_
rare 4 | a layer reads another one
    F:layer_closes_over_anothers_weight H:hook_hands_activation{,_detached} H:layer_reads_left_{absent,number}
    R:layer_of_another_shard_hidden_in_a_list R:layer_reads_what_another_left{,_in_a_global}
common 4 | the loss reads what a layer left
    B:aux_loss H:loss_object_reads_left{,_nested} H:loss_reads_left_{absent,list,none,number} O:own_forward_aux
    R:{loss_module_holds_a_layer,loss_reads_an_attribute,loss_reads_through_the_model}
common 6 | the loss counts, or averages
    B:loss_with_a_counter{,_and_dropout} H:loss_{closure,method,module,object,partial}_{counter,list}
    R:loss_{module_with_counter,object_with_a_running_maximum,with_closure_state,with_counter}
    H:late_loss_{closure,global,module} R:loss_with_a_counter_of_{a_base_class,a_class,a_function_of_another_package}
    R:loss_with_a_counter_of_{a_function_of_the_package,a_generator,a_module,a_namespace,a_static_method,an_array}
    R:loss_with_a_counter_of_{an_iterator,an_object,bytes}
common 6 | the loss keeps a record that it never reads
    H:loss_{closure,method,module,object,partial}_record
common 6 | the loss reads a weight
    R:loss_reads_a_weight
rare 6 | the loss reads a buffer or a mode, or calls backward
    R:{loss_reads_a_buffer,loss_reads_the_mode_of_a_layer,loss_runs_a_backward_itself}
    R:loss_of_a_spread_step_runs_a_backward_itself
common 9 | the loss masks the target in place
    R:{loss_masks_the_target_in_place,masked_targets_beside_a_list_of_validation}
rare 9 | works in place on what the loader keeps
    R:{layer_changes_a_dict_that_the_loader_keeps,loss_pops_from_a_target_that_the_loader_keeps,input_is_the_target}
    R:{erases_at_random_in_place,first_layer_drops_in_place,first_layer_is_a_relu_in_place}
    R:first_layer_works_in_place_on_{a_list_of_batches,an_array,slices} R:loss_works_in_place_on_the_target
    R:{late_,}layer_above_works_in_place_on_{view,whole}_part_of_list_batches
    R:late_{work_in_place_on_validation_after_copies_in_training,work_in_place_on_what_is_also_the_target}
    R:{late_works_in_place_on_the_batch,writes_to_the_batch_in_eval_alone}
nobody 9 | changes a part of the target that micro-batches share
    R:masks_a_target_that_every_micro_batch_has
common 9 | the loader begins to draw
    R:dataset_draws_from_{numpy,random}_after_10
rare 9 | a batch requires gradients
    R:{batch_that_requires_gradients,loader_goes_on_from_gradients_of_its_batches}
rare 11 | odd tensors between layers
    R:{nested_boundary,sparse_adam,sparse_boundary,sparse_embedding}
rare 12 | draws in a backward
    B:draws_in_backward H:checkpoint_draws_anew H:draws_backward_{dropped,forked,module_hook,numpy,random}{,_dropout}
    H:draws_backward_{last,tensor_hook,tensor_hook_dropout,torch,torch_dropout} R:numpy_draws_in_a_backward
    R:draws_in_a_{backward,backward_hook,tensor_hook}
common 7 | an optimizer couples parameters
    R:{optimizer_NormScaled_shard,optimizer_that_couples_large_parameters,optimizer_that_couples_later}
    T:keeps_{by_all_gradients,by_order,by_the_one_before,first_of_the_group}_shard
common 7 | an optimizer keeps what no parameter's state holds
    B:global_counter R:optimizer_{AttributeCounter,GlobalCounter,GroupCounter,GroupTensor}_shard
    T:keeps_after_10_steps_{unused,used} T:keeps_{count_in_a_table,count_in_global,count_in_group}_shard
    T:keeps_{count_in_private,count_on_itself,count_that_matters_late,numpy_random,python_random,tensor_in_group}_shard
    T:{lookahead,wrapped}_shard
rare 7 | an optimizer draws, has hooks, or leaves parameters out
    B:optimizer_draws R:optimizer_{NoiseLater,NumpyNoise,SGLD}_{shard,task} T:draws_after_10_steps{,_task}
    T:draws_{bernoulli,dropout,given_the_default_generator,in_place,numpy,randn_like,random}_{shard,task}
    T:{outside_generator,own_generator,step_hooks}_shard R:clipped_with_parameters_that_are_left_out
common 7 | an optimizer wants a closure or sparse gradients
    T:{lbfgs,sam_needs_closure,sparse_adam}
rare 7 | a hook on a parameter draws
    R:{draws_in_a_parameter_hook,gradient_noise_by_hook} T:hooks_generator_shared
    T:parameter_hook_draws_{register_hook,register_post_accumulate_grad_hook}
nobody 7 | a hook on a parameter reads or writes others
    R:parameter_hook_reads_{a_buffer_that_changes,another_gradient,another_weight_early}
    R:parameter_hook_{sorts_into_another_parameter,writes_a_buffer,writes_another_parameter}
nobody 7 | a schedule draws, or counts outside
    T:schedule_{counts_outside,draws_numpy,draws_random,draws_torch}
rare - | a buffer changes in the backward of two shards
    R:backward_of_a_shared_buffer
nobody - | copies itself in an odd way
    B:memo_ignored R:deepcopy_{is_shallow,makes_a_new_one,returns_self} R:object_that_moves_its_tensor
rare - | what cannot be copied, or is compiled by torch.jit
    B:{script_inside_a_layer,trace} R:{jit_first,jit_script,jit_trace_nested,lock_in_a_layer}
"""
EXACT = """
common - | exact before: what people write
    H:{checkpoint_dropout,checkpoint_without_state,cached_shapes,cached_content,statistics_last,loss_reads_a_number}
    H:keeps_activations_{attribute,child,dict,list,new_list,object} R:batch_norm_in_a_checkpoint R:checkpoint_inside
    R:{collate_that_draws,draws_from_random,loss_that_draws,mixup_in_unpack,memory_bank,old_spectral_norm}
    R:dataset_draws_from_{numpy_after_0,random_after_0,torch_after_0,torch_after_10} R:module_{dict,list}_with_forward
    R:{pruned,statistics_of_each_batch,attribute_of_LazyTable,globals_that_stay,tensor_lr,tensor_lr_and_scheduler}
    R:{in_place_on_batches_that_are_made_anew,in_place_on_what_another_needs,layer_hidden_in_a_list,old_weight_norm}
    R:{scales_in_place_and_notes,shifts_indices_in_place}_in_{1,2}_micro_batches
    R:loss_masks_the_target_of_batches_that_are_made_anew R:mixed_dtypes_clipped
    T:exact_{fused,maximize,plain,tensor_lr,tensor_lr_one_by_one}
rare - | exact before: what few people write
    B:{differentiates,expanded_buffer,hands_its_buffer,seeds} H:adapter_merges_{0.0,0.1} H:late_buffer_never H:seeds_all
    H:{draws_as_it_is_copied,reads_grad_1} R:backward_hook_gather{,_beside_autograd,_in_another}
    R:directional_derivative
    R:{array_that_the_loader_fills_again,buffer_of_other_strides,buffer_of_signed_zeros,empty_tensors_share_no_memory}
    R:{conj_first,conj_last}_in_a_shard R:dataset_{forks,seeds}_torch R:function_changes_a_buffer_in_its_backward
    R:{forks_and_,}seeds_in_forward R:inner_loop_on_a_parameter_of_its_own R:layer_changes_a_dict_that_is_made_anew
    R:{late_,}layer_above_works_in_place_on_{view,whole}_part_of_FreshBatches_batches R:neg_bit_at_a_boundary
    R:late_work_in_place_{on_copies_of_the_batch,that_changes_no_bit} R:merges_on_eval_without_validation
    R:layer_puts_{autocast,default_dtype,gradients}_back R:parameter_hook_reads_{another_weight,a_buffer_that_stays}
    R:optimizer_{AttributeCounter,GlobalCounter,GroupCounter,GroupTensor,NormScaled}_task T:hooks_generator_each
    T:{lookahead,outside_generator,own_generator,step_hooks,wrapped}_task T:exact_tensor_of_the_group
    T:keeps_{by_all_gradients,by_order,by_the_one_before,count_in_a_table,count_in_global,count_in_group}_task
    T:keeps_{count_in_private,count_on_itself,count_that_matters_late,first_of_the_group,numpy_random}_task
    T:keeps_{python_random,tensor_in_group}_task T:exact_puts_weights_elsewhere
"""


def expanded(name):
    """The names that a name with braces stands for, as a shell has them."""
    found = re.search(r"\{([^{}]*)\}", name)
    if found is None:
        return [name]
    return [
        each for part in found[1].split(",") for each in expanded(f"{name[: found.start()]}{part}{name[found.end() :]}")
    ]


CASES = {}
for was, rows in {"refused": REFUSED, "exact": EXACT}.items():
    for row in rows.strip().splitlines():
        if " | " in row:
            head, family = row.split(" | ")
        else:
            case = Case(was, *head.split(), family)
            CASES |= {each: case for name in row.split() for each in expanded(name)}
CASES |= {name: Case("since", "rare", "-", "a recipe that is newer") for name in PROGRAMS if name not in CASES}
