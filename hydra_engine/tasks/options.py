"""Checks of a task's options and of its model: what can be seen before a batch is read."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Real
from types import FunctionType, SimpleNamespace
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset, IterableDataset

from hydra_engine.tasks.callback import Callback
from hydra_engine.tasks.chooser import GuidedLoader
from hydra_engine.tasks.model import Model
from hydra_engine.tasks.report import TRAINING_LOSS, VALIDATION_LOSS
from partitioners.boundary import UnfitTensor, check_fit
from partitioners.plain_numbers import plain
from partitioners.precision import DTYPES

# A rule: an option, the check of its value, and the error's text, which is formatted with the value.
Rule: TypeAlias = "tuple[str, Callable[[Any], bool], str]"


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_a(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kinds)


def _is_partitioner(value: object) -> bool:
    return not isinstance(value, type) and hasattr(value, "partition") and hasattr(value, "revise")


def _is_rate(value: object) -> bool:
    # Also of numpy: a learning rate is often one of a np.logspace.
    return isinstance(plain(value), (Tensor, Real)) and not isinstance(value, bool)


def _is_json(value: object) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def plain_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mapping as a dict with Python's numbers, in the lists and dicts within it too."""
    return cast("dict[str, Any]", pytree.tree_map(plain, dict(values)))


def _or_none(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or check(value)


def _known(field: str, *known: str | bool, beside: Callable[[Any], bool] = lambda value: False) -> Rule:
    """One of the known names, or a value that is fit `beside` them."""
    return field, lambda value: value in known or beside(value), "{!r}, known: " + ", ".join(map(repr, known))


# Optimizers by name: those of torch that step from dense gradients alone, each shard by itself.
OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    name.lower(): kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and kind not in (torch.optim.Optimizer, torch.optim.LBFGS, torch.optim.SparseAdam)
}

_FUNCTIONS = {
    "loss_fn": "give a function (output, target) -> scalar tensor, such as torch.nn.functional.mse_loss",
    "lr_scheduler": "give a function optimizer -> scheduler, such as partial(torch.optim.lr_scheduler.StepLR, "
    "step_size=10); the engine makes the optimizer",
    "param_groups": "give a function name -> options, such as lambda name: {{'weight_decay': 0.0}}",
    "unpack": "give a function batch -> (inputs, target)",
    "split": "give a function (inputs, target, n) -> list of (inputs, target, weight)",
}
# Modules of the data sets of Hugging Face, which are no torch.utils.data.Dataset; many projects have a `datasets`, too.
_HUGGING_FACE = ("datasets.arrow_dataset", "datasets.iterable_dataset", "datasets.dataset_dict")
_FLAGS = ("loader_alone", "read_ahead")
_OF_THREE = "{!r} is not a bool; give True, False, or None for where DRAM is too small otherwise"
EMPTY_VALIDATION = (
    "validation: the loader has no batches; look at drop_last, the sampler and the length of the data, or leave "
    "validation out"
)
# Raise TypeError.
TYPES: tuple[Rule, ...] = (
    ("name", _or_none(_is_a(str)), "{!r} is not a str; give a name, or leave it out"),
    ("loss_fn", lambda value: not isinstance(value, type), "{.__name__} is a class; give an instance of it"),
    ("loss_fn", callable, f"{{!r}} is not callable; {_FUNCTIONS['loss_fn']}"),
    *((field, _or_none(callable), f"{{!r}} is not callable; {_FUNCTIONS[field]}") for field in [*_FUNCTIONS][1:]),
    (
        "optimizer",
        lambda value: not isinstance(value, torch.optim.Optimizer),
        "an optimizer ({0.__class__.__name__}) that is made already, limit: what makes one, since the engine steps "
        "each shard by itself; give optimizer=torch.optim.{0.__class__.__name__} and lr=, or partial(torch.optim."
        "{0.__class__.__name__}, weight_decay=0.01) for other options",
    ),
    (
        "optimizer",
        _or_none(lambda value: isinstance(value, str) or callable(value)),
        "{!r} is not callable; give a name ('adamw'), a class (torch.optim.AdamW), or a function (params, lr=...)",
    ),
    (
        "records",
        lambda value: isinstance(value, (list, tuple)) and all(isinstance(each, str) for each in value),
        "{!r} is not a list of names; give those of attributes, such as ('loss_fn.history',)",
    ),
    ("lr", _or_none(_is_rate), "{!r} is not a number; give a learning rate such as 1e-3"),
    ("epochs", _is_int, "{!r} is not an int; give a number of passes over the loader"),
    ("seed", _or_none(_is_int), "{!r} is not an int; give a number, or leave it out to have one drawn"),
    (
        "accumulation_steps",
        lambda value: value == "auto" or _is_int(value),
        "{!r} is not an int; give a number of micro-batches, or 'auto'",
    ),
    ("max_device_batch", _or_none(_is_int), "{!r} is not an int; give a number of samples, None for no limit"),
    (
        "validation_interval",
        lambda value: isinstance(value, str) or _is_int(value),
        "{!r} is not an int; give a number of training steps, or 'epoch'",
    ),
    ("priority", _is_int, "{!r} is not an int; 0 is every task's, higher goes first"),
    ("group", _or_none(_is_a(str)), "{!r} is not a str; give a name in quotas="),
    ("min_devices", _is_int, "{!r} is not an int; give a number of devices"),
    ("max_devices", _or_none(_is_int), "{!r} is not an int; give a number of devices, None for any"),
    ("max_retries", _is_int, "{!r} is not an int; give a number of retries, 0 for none"),
    ("weight", _is_number, "{!r} is not a number; 1 is every task's"),
    ("max_grad_norm", _or_none(_is_number), "{!r} is not a number; give a norm such as 1.0, or leave it out"),
    ("timeout_s", _or_none(_is_number), "{!r} is not a number; None waits for ever"),
    *((field, _is_a(bool), "{!r} is not a bool; give True or False") for field in _FLAGS),
    ("split_weights", _or_none(_is_a(bool)), _OF_THREE),
    ("compile", _is_a(bool), "{!r} is not a bool; give True for torch.compile of each layer, or False"),
    (
        "partitioner",
        _or_none(lambda value: isinstance(value, str) or _is_partitioner(value)),
        "{!r} is not a partitioner; give Fastest() or Presharded([...])",
    ),
    (
        "metrics",
        _or_none(
            lambda value: (
                isinstance(value, Mapping)
                and all(isinstance(name, str) and callable(each) for name, each in value.items())
            )
        ),
        "{!r} does not map names to functions; give {{'accuracy': accuracy}}",
    ),
    (
        "hparams",
        _or_none(lambda value: isinstance(value, Mapping) and all(isinstance(key, str) for key in value)),
        "{!r} does not map names to values; give {{'lr': 0.1}}",
    ),
    (
        "hparams",
        _or_none(lambda value: _is_json(plain_values(value))),
        "{!r} holds what JSON does not; give None, bools, finite numbers, strings, and lists and dicts of them",
    ),
    (
        "grad_scaler",
        _or_none(_is_a(torch.amp.GradScaler)),
        "{!r} is not a torch.amp.GradScaler; give GradScaler('cpu', init_scale=...), or leave it out",
    ),
    (
        "callbacks",
        lambda value: isinstance(value, Iterable) and not isinstance(value, str),
        "{!r} is not a list; give a list of Callback objects",
    ),
)
# Raise ValueError; their types have been checked.
LIMITS: tuple[Rule, ...] = (
    ("name", _or_none(bool), "{!r}, limit: at least one character; give a name, or leave it out"),
    _known("optimizer", *sorted(OPTIMIZERS), beside=lambda value: not isinstance(value, str)),
    (
        "lr",
        _or_none(lambda value: isinstance(value, Tensor) or 0 <= value < math.inf),
        "{}, limit: finite, at least 0; 1e-3 is common",
    ),
    (
        "seed",
        _or_none(lambda value: -(2**63) <= value < 2**64),
        "{}, limit: 64 bits, as torch.manual_seed takes; give a smaller one",
    ),
    _known("precision", *DTYPES),
    _known("moments", "float32", "bfloat16"),
    _known("optimizer_scope", "shard", "task"),
    _known("early_release", False, True, "all"),
    (
        "homes",
        lambda value: value in ("auto", "host", "device") or (not isinstance(value, str) and value >= 0),
        "{!r}, known: 'auto', 'host', 'device', or a number of layers from the lowest on",
    ),
    _known("lr_scheduler_interval", "step", "epoch"),
    _known("loss_reduction", "mean", "sum", beside=callable),
    _known("resume_options", "checkpoint", "program"),
    _known("nonfinite", "skip", "stop", "raise", beside=lambda value: value is None),
    ("epochs", lambda value: value >= 1, "{}, limit: at least 1; to train nothing, call evaluate() or predict()"),
    ("accumulation_steps", lambda value: value == "auto" or value >= 1, "{}, limit: at least 1; or 'auto'"),
    ("max_device_batch", _or_none(lambda value: value >= 1), "{}, limit: at least 1; None for no limit"),
    (
        "validation_interval",
        lambda value: value == "epoch" or not isinstance(value, str),
        "{!r}, known: 'epoch', or a number of training steps",
    ),
    ("validation_interval", lambda value: value == "epoch" or value >= 1, "{}, limit: at least 1; or 'epoch'"),
    ("min_devices", lambda value: value >= 1, "{}, limit: at least 1; leave it out to take what there is"),
    ("max_devices", _or_none(lambda value: value >= 1), "{}, limit: at least 1; None for any"),
    ("max_retries", lambda value: value >= 0, "{}, limit: at least 0, which fails the task at its first error"),
    ("max_grad_norm", _or_none(lambda value: value > 0), "{}, limit: above 0; leave it out to clip nothing"),
    (
        "ema_decay",
        _or_none(lambda value: isinstance(value, (int, float)) and 0 <= value < 1),
        "{!r}, limit: 0 <= ema_decay < 1; 0.999 is common",
    ),
    ("weight", lambda value: 0 < value < math.inf, "{}, limit: finite, above 0; 1 is every task's"),
    ("timeout_s", _or_none(lambda value: 0 < value < math.inf), "{}, limit: finite, above 0; None waits for ever"),
)


def check_options(options: Mapping[str, Any]) -> None:
    """Raise TypeError or ValueError for the first of a task's options that is not fit, alone or beside the others."""
    for error, rules in ((TypeError, TYPES), (ValueError, LIMITS)):
        for field, is_fit, text in rules:
            if not is_fit(options[field]):
                shown = text.format(options[field])
                raise error(f"{field}: {' '.join(shown.split())}")  # a model's repr is of many lines
    for field in ("dataloader", "validation"):
        if options[field] is not None or field == "dataloader":
            check_loader(field, options[field])
    for callback in options["callbacks"]:
        if not isinstance(callback, Callback):
            raise TypeError(f"callbacks: {callback!r} is not a Callback; give objects of a class derived from it")
    for text in _conflicts(SimpleNamespace(**options)):
        raise ValueError(text)


@contextmanager
def naming_task(name: str | None) -> Iterator[None]:
    """Begin the text of what the body refuses with the task's name, if it has one; its cause and notes stay."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if isinstance(name, str) and name and type(error) in (TypeError, ValueError, UnfitTensor):
            error.args = (f"{name}: {error}",)
        raise


def check_loader(field: str, loader: object) -> None:
    """Raise TypeError for what gives no batches: no iterable, one batch, or a data set, which gives single samples."""
    kind = type(loader).__name__
    if (
        loader is None
        or isinstance(loader, (Tensor, nn.Module, Mapping, str, bytes))
        or not (hasattr(loader, "__iter__") or hasattr(loader, "__getitem__"))
    ):
        raise TypeError(f"{field}: a {kind} is no iterable of batches; give a DataLoader, or a list of batches")
    is_map = isinstance(loader, Dataset) and not isinstance(loader, IterableDataset)
    if is_map or type(loader).__module__ in _HUGGING_FACE:
        raise TypeError(
            f"{field}: a {kind} is a data set, whose items are single samples, limit: batches; give "
            f"DataLoader(data_set, batch_size=32, shuffle=True), or batch_size=None where its items are batches"
        )


def vetoes(task: Any) -> list[str]:
    """The options of a task that may veto a step once all of its gradients are there, so that updates wait for them."""
    found = {
        "max_grad_norm": task.max_grad_norm is not None,
        "precision='float16'": task.precision == "float16",
        "optimizer_scope='task'": task.optimizer_scope == "task",
        "max_retries": task.max_retries > 0,
        "nonfinite": task.nonfinite is not None,
    }
    return [option for option, may_veto in found.items() if may_veto]


def splits_against(task: Any) -> list[str]:
    """The options of a task with which float32 weights have to be in DRAM."""
    found = {
        f"precision={task.precision!r}": task.precision != "bfloat16",
        "optimizer_scope='task'": task.optimizer_scope == "task",
        "read_ahead=False": not task.read_ahead,  # the loader reads weights
    }
    return [option for option, is_against in found.items() if is_against]


def _conflicts(task: Any) -> Iterator[str]:
    for option in splits_against(task) if task.split_weights else ():
        yield f"split_weights: with {option} all weights are needed in float32; leave out one"
    whole = {
        "precision='float32'": task.precision == "float32",
        "optimizer_scope='task'": task.optimizer_scope == "task",
    }
    for option in (each for each in whole if whole[each] and task.moments != "float32"):
        yield f"moments: {task.moments!r} with {option}, where updates are the optimizer's own; leave out one"
    if task.grad_scaler is not None and task.precision != "float16":
        yield f"grad_scaler: given with precision {task.precision!r}; only 'float16' scales its loss"
    if task.grad_scaler is not None and not task.grad_scaler.is_enabled():
        yield "grad_scaler: it is disabled, as one for an absent device is; make a GradScaler('cpu')"
    if task.max_devices is not None and task.min_devices > task.max_devices:
        yield f"min_devices: {task.min_devices}, limit: max_devices={task.max_devices}; lower it, or raise the maximum"
    for veto in vetoes(task) if task.early_release else ():
        yield f"early_release: with {veto} a step waits until all gradients are there; leave out one"
    most, number = task.max_device_batch, task.accumulation_steps
    if most is not None and number != 1:
        yield (
            f"max_device_batch: {most} with accumulation_steps {number!r}, limit: one of them, since each decides the "
            f"number of micro-batches; leave out one"
        )
    if chooses(task.dataloader):
        yield from _chooser_conflicts(task)
    if task.validation is None and task.validation_interval != "epoch":
        yield f"validation_interval: {task.validation_interval} without a validation loader; give validation="
    if task.validation is None and task.metrics:
        yield f"metrics: {', '.join(task.metrics)} without a validation loader; give validation="
    yield from _best_conflicts(task)
    for field, number, when in (
        ("dataloader", task.epochs, f"in {task.epochs} epochs"),
        ("validation", task.epochs if task.validation_interval == "epoch" else 2, "at every validation"),
    ):
        if number > 1 and _is_used_up(getattr(task, field)):
            kind = type(getattr(task, field)).__name__
            yield (
                f"{field}: a {kind} gives its batches once, and is to be read {when}; give a loader that starts anew "
                f"at each iter() (a list, a DataLoader, an object whose __iter__ is a generator)"
            )


def chooses(loader: object) -> bool:
    """Return True for a loader that has its batch sizes chosen."""
    return isinstance(loader, GuidedLoader) and loader.adapts


def _chooser_conflicts(task: Any) -> Iterator[str]:
    try:
        task.dataloader.chooser()
    except ValueError as error:
        yield f"dataloader: {error}"
    if task.validation is task.dataloader:
        yield (
            "validation: the loader that is trained on, limit: another, since this one keeps its place in its data; "
            "give validation a loader of its own"
        )
    number, most = task.accumulation_steps, task.max_device_batch
    if number != 1:
        yield (
            f"accumulation_steps: {number!r} with batches that adapt, limit: 1, since each step has the number that is "
            f"chosen for it; leave it out"
        )
    if most is not None:
        yield f"max_device_batch: {most} with batches that adapt; leave it out, and bound those of the loader"


def _best_conflicts(task: Any) -> Iterator[str]:
    if task.keep_best is None:
        return
    by, metrics = task.keep_best.by, task.metrics or {}
    is_validated = task.validation is not None
    known = [TRAINING_LOSS, *([VALIDATION_LOSS] if is_validated else []), *metrics]
    if by not in known:
        remedy = "add it to metrics=" if is_validated else "give validation="
        yield f"keep_best: {by!r}, known: {', '.join(map(repr, known))}; name one of these, or {remedy}"
    if by in (TRAINING_LOSS, VALIDATION_LOSS) and by in metrics:
        yield f"keep_best: {by!r} is a loss, and the name of a metric as well; give the metric another name"
    if task.ema_decay is not None:
        yield (
            "keep_best: with ema_decay a task has two sets of weights, and its figures are of one of them; leave out "
            "one"
        )


def _is_used_up(loader: object) -> bool:
    """Return True for a loader that can be read only once: a generator, a map, a zip. A user's class may start anew."""
    is_ours_to_ask = isinstance(loader, Iterator) and not isinstance(type(loader).__iter__, FunctionType)
    return is_ours_to_ask and iter(loader) is loader  # type: ignore[call-overload]


def check_parameters(model: nn.Module, precision: str, *, trains: bool) -> None:
    """Raise for a parameter or buffer that cannot be streamed, and one that cannot be trained as it is."""
    for name, parameter in model.named_parameters():
        _check_parameter(name, parameter, precision)
        if trains and parameter.requires_grad and parameter.dtype == torch.float16:
            raise ValueError(
                f"parameter {name} is float16 and to be trained, limit: float32, since updates and optimizer states "
                f"overflow in it, or vanish; convert the model with model.float(), and compute narrow with "
                f"precision='float16' or 'bfloat16'"
            )
    for name, buffer in model.named_buffers():
        check_fit(f"buffer {name}", buffer)
    seen: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        other, first = seen.setdefault(tensor.data_ptr(), (name, tensor))
        if first is not tensor and tensor.numel():
            raise ValueError(
                f"{other} and {name} are two tensors over the same memory, expected memory of its own for each, since "
                f"devices have copies; tie them by assigning the same object to both, or clone one"
            )


def _check_parameter(name: str, parameter: nn.Parameter, precision: str) -> None:
    if nn.parameter.is_lazy(parameter):
        raise ValueError(f"parameter {name} is not initialised yet; run the lazy module once before")
    if parameter.device.type == "meta":
        raise ValueError(f"parameter {name} is on the meta device and has no values; materialise it first")
    if parameter.device.type != "cpu":
        raise ValueError(
            f"parameter {name} is on {parameter.device}; DRAM is the home of every weight, move the model with "
            f"model.cpu() and let the engine stream it"
        )
    if precision != "float32" and parameter.is_floating_point() and parameter.dtype != torch.float32:
        raise ValueError(
            f"parameter {name} is {parameter.dtype}, limit with precision {precision!r}: float32, the "
            f"masters' type; convert the model with model.float()"
        )
    if type(parameter) is not nn.Parameter:
        raise TypeError(f"parameter {name} is a {type(parameter).__name__}; only plain nn.Parameter is streamed")
    check_fit(f"parameter {name}", parameter)
    if parameter.is_conj() or parameter.is_neg():
        raise ValueError(
            f"parameter {name} is kept as the conjugate or negative of what lies in memory; give its numbers "
            f"with resolve_conj() and resolve_neg()"
        )


def check_trainable(model: Model, loss_fn: object) -> None:
    """Raise for a model that cannot be trained, and for a loss that would have to be."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad:
            raise ValueError(
                f"{model.shown(name)} has sparse=True, whose gradient is sparse, limit: "
                f"dense gradients; set sparse=False, and choose an optimizer that steps from dense ones"
            )
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError("the model has no trainable parameter; set requires_grad on at least one")
    for name, parameter in loss_fn.named_parameters() if isinstance(loss_fn, nn.Module) else ():
        if parameter.requires_grad:
            raise ValueError(f"parameter {name} of the loss is trainable; make it a layer of the model, or freeze it")


def check_validation(loader: Any) -> None:
    """Raise ValueError for a loader that says that it has no batches; one without a length is asked as it is read."""
    try:
        num_batches = len(loader)
    except Exception:  # it has none, or it is None
        return
    if num_batches == 0:
        raise ValueError(EMPTY_VALIDATION)


def check_optimizer_needs_no_closure(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that evaluates the model again inside its step (LBFGS)."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"optimizer: {type(optimizer).__name__} runs the whole model again inside its step (it needs a closure), "
            f"which a streamed model cannot do; choose one that steps from gradients"
        )
