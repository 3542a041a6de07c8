"""What a user brings: a model as a sequence of layers, and a training job around it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from types import FunctionType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from hydra_engine.tasks.callback import Callback
from hydra_engine.tasks.splitting import LossReduction, Split, split, unpack_pair
from partitioners import Partitioner, Pilot, make_partitioner
from partitioners.boundary import check_fit
from partitioners.precision import DTYPES

OptimizerFactory: TypeAlias = "Callable[..., torch.optim.Optimizer]"
SchedulerFactory: TypeAlias = "Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]"

# Of a loader, for one batch: what torch.distributed's collectives wait by default where they wait longest.
LOADER_TIMEOUT_S = 1800.0
# Of a callback, for one call: it may wait for other tasks, as long as a loader may.
CALLBACK_TIMEOUT_S = LOADER_TIMEOUT_S
NONFINITE = ("skip", "stop", "raise")


class Model(nn.Sequential):
    """An `nn.Sequential` that shares the layers of `x`.

    `x` is an `nn.Sequential`, a list of layers, or a module whose children run in order, each on what the one before
    returned. `generate()` runs such a module once to see that its own `forward` is no more than that.
    """

    def __init__(self, x: nn.Module | Iterable[nn.Module] | Mapping[str, nn.Module]) -> None:
        super().__init__()
        # Not named_children(), which leaves out the second place of a module that runs twice.
        if isinstance(x, nn.Module):
            layers = [(name, layer) for name, layer in x._modules.items() if layer is not None]
        elif isinstance(x, Mapping):  # what slicing an nn.Sequential passes
            layers = list(x.items())
        else:
            layers = [(str(k), layer) for k, layer in enumerate(x)]
        for name, layer in layers:
            if not isinstance(layer, nn.Module):
                raise TypeError(f"layer {name} of the model is a {type(layer).__name__}, not an nn.Module")
            if not _can_be_called(layer):
                raise TypeError(
                    f"layer {name} of the model is a {type(layer).__name__}, which has no forward and cannot be "
                    f"called; give Model the list of layers in the order they run"
                )
        for kind, named in (("parameter", _own_parameters(x)), ("buffer", _own_buffers(x))):
            if named:
                raise ValueError(
                    f"{kind} {named[0]!r} belongs to the {type(x).__name__} itself, so no layer would carry it; "
                    f"move it into one of its children"
                )
        if isinstance(x, nn.Module) and (x._forward_hooks or x._forward_pre_hooks or x._backward_hooks):
            raise ValueError(
                f"the model ({type(x).__name__}) has hooks of its own, which running its layers would not call; "
                f"register them on its layers"
            )
        if not layers:
            raise ValueError(f"the model ({type(x).__name__}) has no layers; give it at least one")
        self._modules.update(layers)
        # Kept out of _modules: it must not appear in state_dict() or children().
        object.__setattr__(self, "source", x if isinstance(x, nn.Module) else None)

    @property
    def has_own_forward(self) -> bool:
        """Whether the model came from a module whose `forward` is not `nn.Sequential`'s."""
        source: nn.Module | None = self.__dict__["source"]
        if isinstance(source, Model):
            return source.has_own_forward
        return source is not None and type(source).forward is not nn.Sequential.forward


def _can_be_called(layer: nn.Module) -> bool:
    if type(layer).__call__ is not nn.Module.__call__:
        return True
    return getattr(layer.forward, "__func__", layer.forward) is not nn.Module.forward


def _own_parameters(x: object) -> list[str]:
    return [name for name, _ in x.named_parameters(recurse=False)] if isinstance(x, nn.Module) else []


def _own_buffers(x: object) -> list[str]:
    return [name for name, _ in x.named_buffers(recurse=False)] if isinstance(x, nn.Module) else []


class Purpose(Enum):
    """What a run makes of a task."""

    TRAIN = "train"  # it steps the weights, and evaluates its validation loader in between
    EVALUATE = "evaluate"  # it reads its validation loader once, for the loss and metrics
    PREDICT = "predict"  # it reads its validation loader once, for the model's outputs; it has no loss


class ModelTask:
    """One training job: a model, a loss, data, an optimizer, a number of epochs.

    Args:
        model: a `Model`, or anything `Model` takes. Its parameters live on the CPU; training changes them in place.
        loss_fn: (output, target) -> scalar tensor. May be a module without trainable parameters.
        dataloader: an iterable of batches, read once per epoch; one that gives nothing in a later epoch is an error.
        lr: learning rate handed to the optimizer factory; 1e-3 where neither lr nor optimizer is given.
        epochs: passes over the loader, at least 1.
        name: unique within an orchestrator; default "task-0", "task-1", ...
        optimizer: (params, lr=...) -> torch.optim.Optimizer; default torch.optim.SGD.
        param_groups: (name) -> options of the optimizer for the parameter of that name in `model.named_parameters()`:
            `lambda name: {"weight_decay": 0.0} if name.endswith("bias") else {}`. Parameters of equal options are one
            group, in the order in which the first of each comes.
        optimizer_scope: "shard": the optimizer updates each parameter from that parameter's own gradient and state,
            shard by shard, under the next step's forward. "task": it couples parameters (Prodigy, say), so all are
            stepped at once at the commit.
        early_release: update a shard as soon as its gradient has arrived, in the middle of the step. DRAM then holds
            the gradients of two shards instead of all: SGD takes little more than the weights. For tasks whose step
            nothing can veto: not with `max_grad_norm`, float16, scope "task", `max_retries` or `nonfinite`. A failure
            or a stop in the middle of a step leaves the shards above with that step's update (Ctrl-C and SIGTERM let
            the step end), and a device that runs out of memory in a recomputing backward fails the task.
        optimizer_device: where updates run. "host": on the CPU, under other work of the devices. "device": at the end
            of a shard's backward unit; the optimizer's state is loaded and stored with the shard, and no gradient
            crosses the link. Steps are then released early, with the limits of `early_release`, and nothing may hook
            into parameters. "auto": whichever is predicted to take less time, "host" where the task may veto its steps.
        ema_decay: keep an exponential moving average of the weights, as torch's `AveragedModel` with
            `get_ema_multi_avg_fn(ema_decay)` does; in `TaskReport.ema_state` at the end.
        lr_scheduler: (optimizer) -> torch.optim.lr_scheduler.LRScheduler.
        lr_scheduler_interval: "step" or "epoch".
        partitioner: cuts the layers into shards: an object, or a name such as "optimal"; default
            `partitioners.Pilot()`.
        precision: "float32", "bfloat16" or "float16". In a narrow one, devices are sent casts of the float32 weights
            and compute in that type; norms keep float32 weights and compute in float32, buffers stay as they are, and
            the loss and metrics take the output in float32. Gradients cross the link narrow, rounded once; the host
            optimizer steps the float32 weights. float16 has a dynamic loss scale: a step with a gradient that is not
            finite changes nothing but buffers, and moves neither the schedule nor the averages.
        grad_scaler: where the loss scale of float16 starts and how it moves; default `torch.amp.GradScaler("cpu")`.
        accumulation_steps: micro-batches per step, or "auto": as few as the model fits with, or with the partitioner
            "optimal" the least predicted step time; and more where the step is then predicted to be shorter, on devices
            that would idle otherwise, or with the room that smaller ones leave for what is kept. A number is kept
            whatever comes; under "auto" a batch whose step does not fit raises it from then on.
        loss_reduction: how micro-batch losses make the batch's: "mean", "sum", or a function (target) -> number whose
            shares are the weights (a count of unmasked tokens, say).
        max_grad_norm: clip the global gradient norm to this, as `torch.nn.utils.clip_grad_norm_` does.
        seed: of the task's own random stream; default: drawn from torch's generator now.
        unpack: batch -> (inputs, target); default: the batch is that pair.
        split: (inputs, target, n) -> sequence of (inputs, target, weight); default `hydra_engine.split`.
        validation: a loader evaluated through the same shards without gradients, in eval(). Losses in
            `TaskReport.validation_losses`, weighted as `loss_reduction` says; torch's random stream goes on after it as
            if nothing had been drawn.
        validation_interval: "epoch": after every epoch; or an int N: after every N training steps, counted over the
            whole training, in the middle of an epoch too. Where the last step is no multiple of N, there is none at
            the end.
        metrics: name -> function (output, target) -> number, of each validation batch; a validation's figure is their
            mean, weighted by samples. In `TaskReport.validation_metrics`.
        priority: units of tasks of a higher one go first, under every policy; any int.
        weight: its share of compute time under the policy "fair-share", beside the other tasks' weights.
        callbacks: `hydra_engine.Callback` objects, called before epochs, after steps, validations and epochs, and at
            the end; in a thread of the task's own. See there what they may do to the model.
        scan_batches: plan for the largest batch: `generate()` then reads the whole loader once more, before training.
            Random generators that the loader, its samplers and its data set hold are put back after it; what else
            reading changes in them stays changed. Without it, the first batch is the sample, and a larger one is made
            room for when it comes.
        max_retries: how often, in one run, the task goes on after an exception of a unit (load, forward, backward,
            store, evaluation), of an update or of its loader, instead of failing. After a unit's the step begins again
            from its first unit, with the same batch and the same random numbers; an update's shard is put back and
            updated again; a loader is brought back to the last batch that it gave. Bits are those of a run in which
            nothing was raised, as long as layers and loader keep nothing of the attempt. Not tried again: what is
            raised in the commit (hooks on parameters, `lr_scheduler`, an optimizer of scope "task"), in callbacks,
            in set-up and as a larger batch is fitted, what is no `Exception`, `DeviceLost`, `LoaderTimeout`. Above 0,
            each shard's weights, gradients, optimizer state and averages are copied before it is updated; with 0
            nothing is. In `TaskReport.retries`.
        nonfinite: what becomes of a training step whose loss (as reported, of all its micro-batches) is infinite or
            NaN. None: as in the plain loop, nobody looks. "skip": the step changes nothing, neither weights, optimizer
            state, schedule, loss scale, averages nor buffers; its loss is in `losses`, its index in `skipped_steps`,
            and the random stream goes on as it was drawn from. "stop": the task ends with the step before it, and
            `TaskReport.error` says why. "raise": it fails there with `NonFiniteLoss`.
        loader_timeout_s: seconds in which the loader has to open its iterator, or give a batch, of `validation` too;
            the task then fails with `LoaderTimeout`, and the others go on. None: for ever. Waiting for others' loaders
            does not count; a retry's way back to its batch does. It also limits the loader's `len` and the factories of
            optimizer and schedule as the task begins, and the first batch of one that `add_task` plans beside others,
            which then raises. `generate()`, which reads the first batch in your own thread, also that of a resume,
            waits for ever. The default of half an hour is what collectives of torch.distributed commonly wait: no batch
            takes as long, and a run of days loses little.
        loader_alone: read the loaders, `validation` too, always alone, with the task's states of torch, `random` and
            `numpy.random` in place of the process-wide ones. False: only if they draw from `random` or `numpy.random`
            as they are opened or give their first batch; else they are read beside other tasks' loaders. A loader that
            draws from these later is an error, which names this remedy.
        read_ahead: ask the loader for the next batch while a step computes. False: only once the step is in all of the
            model's parameters and buffers, for a loader that reads them: from the model itself, where they are after
            each step (gradients are not). Worker processes of a loader read ahead by themselves, and see nothing of it.
        callback_timeout_s: seconds in which a callback has to return from one call; the task then fails with
            `CallbackTimeout`, the thread is left behind, and the others go on. None: for ever. After Ctrl-C or SIGTERM
            a call has 10 s at most, whatever is given here.
        compile: run each layer through `torch.compile`, whole, with one graph for all layers that are built alike.
            Results are those of the uncompiled task within rounding. Layers that draw random numbers, hold `Skips` or
            differentiate inside their forward run uncompiled, and so do evaluation and units that are metered. A layer
            that cannot be compiled is refused by `generate()`; `torch.compiler.disable` on its forward leaves it out.

    Hooks that are registered on parameters (`register_hook`, `register_post_accumulate_grad_hook`) act on the step's
    finished gradient, once per step, on the host: with several micro-batches on their sum.

    Raises TypeError or ValueError for what can be seen now; what needs a batch is checked by `generate()`.
    """

    purpose = Purpose.TRAIN

    def __init__(
        self,
        model: nn.Module | Iterable[nn.Module],
        loss_fn: Callable[[Any, Any], Tensor],
        dataloader: Iterable[Any],
        lr: float | None = None,
        epochs: int = 1,
        *,
        name: str | None = None,
        optimizer: OptimizerFactory | None = None,
        param_groups: Callable[[str], dict[str, Any]] | None = None,
        optimizer_scope: str = "shard",
        early_release: bool = False,
        optimizer_device: str = "host",
        ema_decay: float | None = None,
        lr_scheduler: SchedulerFactory | None = None,
        lr_scheduler_interval: str = "step",
        partitioner: Partitioner | str | None = None,
        precision: str = "float32",
        grad_scaler: torch.amp.GradScaler | None = None,
        accumulation_steps: int | str = 1,
        loss_reduction: LossReduction = "mean",
        max_grad_norm: float | None = None,
        seed: int | None = None,
        unpack: Callable[[Any], tuple[Any, Any]] | None = None,
        split: Split | None = None,
        validation: Iterable[Any] | None = None,
        validation_interval: int | str = "epoch",
        metrics: Mapping[str, Callable[[Any, Any], float | Tensor]] | None = None,
        callbacks: Sequence[Callback] = (),
        scan_batches: bool = False,
        priority: int = 0,
        weight: float = 1.0,
        max_retries: int = 0,
        nonfinite: str | None = None,
        loader_timeout_s: float | None = LOADER_TIMEOUT_S,
        loader_alone: bool = False,
        read_ahead: bool = True,
        callback_timeout_s: float | None = CALLBACK_TIMEOUT_S,
        compile: bool = False,
    ) -> None:
        _check_choice("lr_scheduler_interval", lr_scheduler_interval, ("step", "epoch"))
        _check_choice("optimizer_scope", optimizer_scope, ("shard", "task"))
        _check_choice("precision", precision, tuple(DTYPES))
        _check_grad_scaler(grad_scaler, precision)
        _check_choice("optimizer_device", optimizer_device, ("host", "device", "auto"))
        vetoes = {"max_grad_norm": max_grad_norm is not None, "precision='float16'": precision == "float16"}
        vetoes["optimizer_scope='task'"] = optimizer_scope == "task"
        _check_faults(max_retries, nonfinite)
        _check_timeout("loader_timeout_s", loader_timeout_s)
        _check_timeout("callback_timeout_s", callback_timeout_s)
        vetoes["max_retries"], vetoes["nonfinite"] = max_retries > 0, nonfinite is not None
        early = {"early_release": early_release, "optimizer_device='device'": optimizer_device == "device"}
        for option, veto in ((a, b) for a in early for b in vetoes if early[a] and vetoes[b]):
            raise ValueError(f"{option}: with {veto} a step waits until all gradients are there; leave out one")
        self.may_veto = any(vetoes.values())
        self.optimizer_device = optimizer_device
        _check_interval(validation_interval, validation)
        _check_int("epochs", epochs)
        if accumulation_steps != "auto":
            _check_int("accumulation_steps", accumulation_steps)
        if not callable(loss_reduction):
            _check_choice("loss_reduction", loss_reduction, ("mean", "sum"))
        if max_grad_norm is not None and not isinstance(max_grad_norm, (int, float)):
            raise TypeError(f"max_grad_norm: {max_grad_norm!r} is not a number")
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(f"max_grad_norm: {max_grad_norm}, limit: above 0; leave it out to clip nothing")
        if ema_decay is not None and not (isinstance(ema_decay, (int, float)) and 0 <= ema_decay < 1):
            raise ValueError(f"ema_decay: {ema_decay!r}, limit: 0 <= ema_decay < 1; 0.999 is common")
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise TypeError(f"priority: {priority!r} is not an int; 0 is every task's, higher goes first")
        if isinstance(weight, bool) or not isinstance(weight, (int, float)):
            raise TypeError(f"weight: {weight!r} is not a number")
        if not 0 < weight < math.inf:
            raise ValueError(f"weight: {weight}, limit: finite, above 0; 1 is every task's")
        functions = {"loss_fn": loss_fn, "optimizer": optimizer, "lr_scheduler": lr_scheduler}
        for field, value in {**functions, "param_groups": param_groups, "unpack": unpack, "split": split}.items():
            if value is not None and not callable(value):
                raise TypeError(f"{field}: {value!r} is not callable; give a function")
        if isinstance(loss_fn, type):
            raise TypeError(f"loss_fn: {loss_fn.__name__} is a class; give an instance of it")
        partitioner = make_partitioner(partitioner) if isinstance(partitioner, str) else partitioner
        for method in ("partition", "revise"):
            if partitioner is not None and (isinstance(partitioner, type) or not hasattr(partitioner, method)):
                raise TypeError(f"partitioner: {partitioner!r} is not a partitioner; give Pilot() or Presharded([...])")
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise TypeError(f"seed: {seed!r} is not an int")
        self.model = model if isinstance(model, Model) else Model(model)
        self.loss_fn = loss_fn
        self.dataloader = dataloader
        self.lr = lr if lr is not None or optimizer is not None else 1e-3
        self.epochs = epochs
        self.name = name
        self.optimizer: OptimizerFactory = optimizer if optimizer is not None else torch.optim.SGD
        self.param_groups = param_groups
        self.optimizer_scope = optimizer_scope
        self.ema_decay = ema_decay
        self.lr_scheduler = lr_scheduler
        self.lr_scheduler_interval = lr_scheduler_interval
        self.partitioner: Partitioner = partitioner if partitioner is not None else Pilot()
        self.early_release = bool(early_release)
        self.priority = priority
        self.weight = float(weight)
        self.max_retries = max_retries
        self.nonfinite = nonfinite
        self.loader_timeout_s = loader_timeout_s
        self.callback_timeout_s = callback_timeout_s
        self.precision = precision
        self.grad_scaler = grad_scaler
        self.accumulation_steps = accumulation_steps
        self.loss_reduction = loss_reduction
        self.max_grad_norm = max_grad_norm
        self.seed = seed if seed is not None else int(torch.randint(0, 2**63 - 1, ()).item())
        self.unpack = unpack if unpack is not None else unpack_pair
        self.split: Split = split if split is not None else partial(_split, loss_reduction=loss_reduction)
        self.splits_by_user = split is not None or callable(loss_reduction)  # the default one calls that
        self.validation = validation
        self.validation_interval = validation_interval
        self.metrics = _checked_metrics(metrics or {}, validation)
        for callback in callbacks:
            if not isinstance(callback, Callback):
                raise TypeError(f"callbacks: {callback!r} is not a Callback; give objects of a class derived from it")
        self.callbacks = tuple(callbacks)
        num_evaluations = 2 if isinstance(validation_interval, int) else epochs
        for field, loader, number in (("dataloader", dataloader, epochs), ("validation", validation, num_evaluations)):
            if number > 1 and _is_used_up(loader):
                raise ValueError(
                    f"{field}: a {type(loader).__name__} gives its batches once, and is to be read "
                    f"{f'in {epochs} epochs' if loader is dataloader else 'at every validation'}; give a loader that "
                    f"starts anew at each iter() (a list, a DataLoader, an object whose __iter__ is a generator)"
                )
        if scan_batches and isinstance(dataloader, Iterator):
            raise ValueError(
                f"scan_batches: the loader is a {type(dataloader).__name__}, which can be read only once; give one "
                f"that starts anew at each iter(), or leave scan_batches out"
            )
        if scan_batches and getattr(dataloader, "persistent_workers", False):
            raise ValueError(
                "scan_batches: the loader has persistent workers, which begin anew for the scan and lose their place; "
                "give one with persistent_workers=False, or leave scan_batches out"
            )
        for field, flag in {"loader_alone": loader_alone, "read_ahead": read_ahead}.items():
            if not isinstance(flag, bool):
                raise TypeError(f"{field}: {flag!r} is not a bool; give True or False")
        self.loader_alone = loader_alone
        self.read_ahead = read_ahead
        if not isinstance(compile, bool):
            raise TypeError(f"compile: {compile!r} is not a bool; give True for torch.compile of each layer, or False")
        self.compile = compile
        self.scan_batches = scan_batches
        self._check_parameters()
        self._check_trainable()

    def _check_parameters(self) -> None:
        seen: dict[int, str] = {}
        for name, parameter in self.model.named_parameters():
            if nn.parameter.is_lazy(parameter):
                raise ValueError(f"parameter {name} is not initialised yet; run the lazy module once before")
            if parameter.device.type not in ("cpu", "meta"):
                raise ValueError(
                    f"parameter {name} is on {parameter.device}; DRAM is the home of every weight, move the model with "
                    f"model.cpu() and let the engine stream it"
                )
            if parameter.device.type == "meta":
                raise ValueError(f"parameter {name} is on the meta device and has no values; materialise it first")
            if self.precision != "float32" and parameter.is_floating_point() and parameter.dtype != torch.float32:
                raise ValueError(
                    f"parameter {name} is {parameter.dtype}, limit with precision {self.precision!r}: float32, the "
                    f"masters' type; convert the model with model.float()"
                )
            if type(parameter) is not nn.Parameter:
                raise TypeError(
                    f"parameter {name} is a {type(parameter).__name__}; only plain nn.Parameter is streamed"
                )
            check_fit(f"parameter {name}", parameter)
            if parameter.is_conj() or parameter.is_neg():
                raise ValueError(
                    f"parameter {name} is kept as the conjugate or negative of what lies in memory; give its numbers "
                    f"with resolve_conj() and resolve_neg()"
                )
            address = parameter.data_ptr()
            if address and address in seen:
                raise ValueError(
                    f"parameters {seen[address]} and {name} are two Parameter objects over the same memory; tie them "
                    f"by assigning the same object to both"
                )
            seen[address] = name
        for name, buffer in self.model.named_buffers():
            check_fit(f"buffer {name}", buffer)

    def _check_trainable(self) -> None:
        for name, module in self.model.named_modules():
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad:
                raise ValueError(
                    f"layer {name} is an {type(module).__name__} with sparse=True, whose gradient is sparse, limit: "
                    f"dense gradients; set sparse=False, and choose an optimizer that steps from dense ones"
                )
        if not any(p.requires_grad for p in self.model.parameters()):
            raise ValueError("the model has no trainable parameter; set requires_grad on at least one")
        if isinstance(self.loss_fn, nn.Module):
            for name, parameter in self.loss_fn.named_parameters():
                if parameter.requires_grad:
                    raise ValueError(
                        f"parameter {name} of the loss is trainable; make it a layer of the model, or freeze it"
                    )

    def __repr__(self) -> str:
        return f"ModelTask({self.name or 'unnamed'}: {len(self.model)} layers, {self.epochs} epochs)"


def _checked_metrics(metrics: Any, validation: object) -> dict[str, Callable[[Any, Any], float | Tensor]]:
    if not isinstance(metrics, Mapping) or not all(map(callable, metrics.values())):
        raise TypeError(f"metrics: {metrics!r} does not map names to functions; give {{'accuracy': accuracy}}")
    if metrics and validation is None:
        raise ValueError(f"metrics: {', '.join(metrics)} without a validation loader; give validation=")
    return dict(metrics)


def _check_grad_scaler(scaler: object, precision: str) -> None:
    if scaler is None:
        return
    if not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(f"grad_scaler: {scaler!r} is not a torch.amp.GradScaler")
    if precision != "float16":
        raise ValueError(f"grad_scaler: given with precision {precision!r}; only 'float16' scales its loss")
    if not scaler.is_enabled():
        raise ValueError("grad_scaler: it is disabled, as one for an absent device is; make a GradScaler('cpu')")


def _is_used_up(loader: object) -> bool:
    """Return True for a loader that can be read only once: a generator, a map, a zip. A user's class may start anew."""
    is_ours_to_ask = isinstance(loader, Iterator) and not isinstance(type(loader).__iter__, FunctionType)
    return is_ours_to_ask and iter(loader) is loader  # type: ignore[call-overload]


def _split(inputs: Any, target: Any, num_micro_batches: int, *, loss_reduction: LossReduction) -> Any:
    return split(inputs, target, num_micro_batches, loss_reduction)


def _check_interval(interval: object, validation: object) -> None:
    if interval == "epoch":
        return
    if isinstance(interval, str):
        raise ValueError(f"validation_interval: {interval!r}, known: 'epoch', or a number of training steps")
    _check_int("validation_interval", interval)
    if validation is None:
        raise ValueError(f"validation_interval: {interval} without a validation loader; give validation=")


def _check_faults(max_retries: object, nonfinite: object) -> None:
    if isinstance(max_retries, bool) or not isinstance(max_retries, int):
        raise TypeError(f"max_retries: {max_retries!r} is not an int; give a number of retries, 0 for none")
    if max_retries < 0:
        raise ValueError(f"max_retries: {max_retries}, limit: at least 0, which fails the task at its first error")
    if nonfinite is not None:
        _check_choice("nonfinite", nonfinite, NONFINITE)


def _check_timeout(field: str, seconds: object) -> None:
    if seconds is None:
        return
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise TypeError(f"{field}: {seconds!r} is not a number; None waits for ever")
    if not 0 < seconds < math.inf:
        raise ValueError(f"{field}: {seconds}, limit: finite, above 0; None waits for ever")


def _check_choice(field: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{field}: {value!r}, known: {', '.join(map(repr, known))}")


def _check_int(field: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{field}: {value!r} is not an int")
    if value < 1:
        raise ValueError(f"{field}: {value}, limit: at least 1")


def check_optimizer_needs_no_closure(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that evaluates the model again inside its step (LBFGS)."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"optimizer: {type(optimizer).__name__} runs the whole model again inside its step (it needs a closure), "
            f"which a streamed model cannot do; choose one that steps from gradients"
        )
