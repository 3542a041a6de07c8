"""A training job: a model, its data, and how it is to be trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from hydra_engine.tasks.callback import Callback
from hydra_engine.tasks.chooser import GuidedLoader
from hydra_engine.tasks.model import Model, uncompiled
from hydra_engine.tasks.options import (
    OPTIMIZERS,
    check_options,
    check_parameters,
    check_trainable,
    check_validation,
    chooses,
    naming_task,
    plain_values,
    splits_against,
)
from hydra_engine.tasks.report import KeepBest
from hydra_engine.tasks.splitting import LossReduction, Split, unpack_batch
from hydra_engine.tasks.splitting import split as split_batch
from partitioners import Fastest, Partitioner, make_partitioner
from partitioners.plain_numbers import plain
from partitioners.reach import Opaque

OptimizerFactory: TypeAlias = "Callable[..., torch.optim.Optimizer]"
SchedulerFactory: TypeAlias = "Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]"

# Seconds for one batch of a loader, or one call of a callback: the longest that torch.distributed's collectives wait by
# default.
TIMEOUT_S = 1800.0


class Purpose(Enum):
    """The work that a run does for a task."""

    TRAIN = "train"  # it steps the weights, and evaluates its validation loader in between
    EVALUATE = "evaluate"  # it reads its validation loader once, for the loss and metrics
    PREDICT = "predict"  # it reads its validation loader once, for the model's outputs; it has no loss


# More than 15 attributes: each is an option of a training loop that users name one by one, and nothing else is one.
class ModelTask(Opaque):
    """One training job: a model, a loss, data, an optimizer, a number of epochs.

    docs/tasks.md says more on options marked with a star.

    Args:
        model: a `Model`, or anything `Model` takes. Its parameters live on the CPU; training changes them in place.
        loss_fn: (output, target) -> scalar tensor. May be a module without trainable parameters.
        dataloader: an iterable of batches, read once per epoch; one that gives nothing in a later epoch is an error.
        lr: learning rate handed to the optimizer factory; 1e-3 where neither lr nor optimizer is given.
        epochs: passes over the loader, at least 1.
        name: unique within an orchestrator; default "task-0", "task-1", ...
        optimizer: (params, lr=...) -> torch.optim.Optimizer, or the name of a class of torch.optim in small letters
            ("adamw"); default torch.optim.SGD.
        param_groups: (name) -> options of the optimizer for the parameter of that name in `model.named_parameters()`:
            `lambda name: {"weight_decay": 0.0} if name.endswith("bias") else {}`. Parameters of equal options are one
            group, in the order in which the first of each comes.
        optimizer_scope: "shard": the optimizer updates each parameter from that parameter's own gradient and state,
            shard by shard, under the next step's forward. "task": it couples parameters (Prodigy, say), so all are
            stepped at once at the commit.
        early_release*: update a shard as soon as its gradient has arrived, in the middle of the step, which nothing may
            veto then: not with `max_grad_norm`, float16, scope "task", `max_retries` or `nonfinite`. True: DRAM has the
            gradients of two shards at a time, and backwards wait for updates. "all": it has those of all, as without.
        homes*: where the state of the layers stays from step to step, their weights, moments and masters. "host": in
            DRAM, from which devices load weights for each unit, and where the host updates them. "device": on a device,
            which then makes their updates and loads nothing, for as many of the lowest layers as it has room; a number:
            for so many layers at most. "auto": for as many as are predicted to make steps shortest, where devices have
            a link; else as "host".
        ema_decay: keep an exponential moving average of the weights, as torch's `AveragedModel` with
            `get_ema_multi_avg_fn(ema_decay)` does; in `TaskReport.ema_state` at the end.
        lr_scheduler: (optimizer) -> torch.optim.lr_scheduler.LRScheduler.
        lr_scheduler_interval: "step" or "epoch".
        partitioner: cuts the layers into shards: an object, or a name such as "optimal"; default
            `partitioners.Fastest()`.
        precision: "float32", or a narrow one that devices compute in: "bfloat16", "float16" (docs/precision.md).
        split_weights*: with precision "bfloat16", have in DRAM the weights that devices get and the 16 bits that these
            lack, instead of float32 weights beside them: 2 bytes per parameter less, and the same results. True, False,
            or None: where DRAM is too small otherwise. The model's parameters then have their values in callbacks and
            after training; to other threads of yours they are zero (docs/memory.md).
        moments: with a 16-bit precision, "float32"; or "bfloat16", which is **not exact**: the averages that the
            optimizer keeps of each parameter are rounded after each step. They take half of the DRAM, and results are
            near those of plain PyTorch.
        grad_scaler: where the loss scale of float16 starts and how it moves; default `torch.amp.GradScaler("cpu")`.
        accumulation_steps*: micro-batches per step, or "auto": chosen by the plan. A number is kept whatever comes;
            under "auto" a batch whose step does not fit raises it from then on.
        max_device_batch*: the loader's batch is split into micro-batches of at most so many samples, as
            `hydra_engine.split_batch` says for the most devices that the orchestrator may have. Instead of
            `accumulation_steps`.
        loss_reduction: how micro-batch losses make the batch's: "mean", "sum", or a function (target) -> number whose
            shares are the weights (a count of unmasked tokens, say).
        max_grad_norm: clip the global gradient norm to this, as `torch.nn.utils.clip_grad_norm_` does.
        seed: of the task's own random stream; default: drawn from torch's generator now.
        unpack: batch -> (inputs, target); default: the batch is that pair, or, as data collators of `transformers` make
            it, a mapping with `labels`. These are then the target, and an input as well where the model's own forward
            takes them; all else in it are inputs.
        split: (inputs, target, n) -> sequence of (inputs, target, weight); default `hydra_engine.split`.
        validation: a loader evaluated through the same shards without gradients, in eval(). Losses in
            `TaskReport.validation_losses`, weighted as `loss_reduction` says; torch's random stream goes on after it as
            if nothing had been drawn.
        validation_interval: "epoch": after every epoch; or an int N: after every N training steps, counted over the
            whole training, in the middle of an epoch too. Where the last step is no multiple of N, none is at the end.
        metrics: name -> function (output, target) -> number, of each validation batch; a validation's figure is their
            mean, weighted by samples. In `TaskReport.validation_metrics`.
        keep_best*: hand the model back as it was where this figure was best, weights and buffers, however the task
            ends: a `hydra_engine.KeepBest`, which may end it early; or the figure's name alone, where less is better.
        resume_options*: where the task goes on from a checkpoint, whose options of the optimizer and whose schedule
            count: those of the "checkpoint", as with torch's `load_state_dict`, with a line in `report.messages` for
            each that the program gives otherwise; or those of the "program". A changed schedule is the program's.
        hparams: a mapping that JSON takes, shown in the table of `Report.compare`.
        priority: units of tasks of a higher one go first, under every policy; any int.
        group*: of tasks that share the devices which `ModelOrchestrator(quotas=)` gives that group.
        min_devices: with fewer in, it begins no step; with as many, a step is spread over no fewer, as far as it has
            micro-batches. max_devices: a step is spread over no more; None: over all of its group's.
        weight: its share of compute time under the policy "fair-share", beside the other tasks' weights.
        callbacks: `hydra_engine.Callback` objects, called in a thread of the task's own; see there what they may do.
        max_retries*: how often, in one run, the task goes on after an exception of a unit, an update or its loader,
            instead of failing. In `TaskReport.retries`.
        nonfinite*: what becomes of a training step whose loss is infinite or NaN. None: nobody looks. "skip": the step
            changes nothing. "stop": the task ends with the step before it. "raise": it fails with `NonFiniteLoss`.
        timeout_s*: seconds in which the loader has to open its iterator, or give a batch, of `validation` too, and in
            which a callback has to return from one call; the task then fails with `LoaderTimeout` or `CallbackTimeout`,
            and the others go on. None: for ever.
        loader_alone: read the loaders, `validation` too, always alone, with the task's states of torch, `random` and
            `numpy.random` in place of the process-wide ones. False: only if they draw from `random` or `numpy.random`
            as they are opened or give their first batch; `report.messages` names one that draws from these later.
        read_ahead: ask the loader for the next batch while a step computes. False: only once the step is in all of the
            model's parameters and buffers, for a loader that reads them (gradients are not there).
        records: attributes of layers or of the loss that forwards change and nothing reads, by which no result differs:
            ("loss_fn.history", "blocks.1.norms"). An attribute that is not named is refused, if it changes again where
            a batch runs again: each device's copy would have one of its own.
        compile: run each layer through `torch.compile`; results are those of the uncompiled task within rounding
            (docs/precision.md).

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
        optimizer: OptimizerFactory | str | None = None,
        param_groups: Callable[[str], dict[str, Any]] | None = None,
        optimizer_scope: str = "shard",
        early_release: bool | str = False,
        homes: str | int = "auto",
        ema_decay: float | None = None,
        lr_scheduler: SchedulerFactory | None = None,
        lr_scheduler_interval: str = "step",
        partitioner: Partitioner | str | None = None,
        precision: str = "float32",
        split_weights: bool | None = None,
        moments: str = "float32",
        grad_scaler: torch.amp.GradScaler | None = None,
        accumulation_steps: int | str = 1,
        max_device_batch: int | None = None,
        loss_reduction: LossReduction = "mean",
        max_grad_norm: float | None = None,
        seed: int | None = None,
        unpack: Callable[[Any], tuple[Any, Any]] | None = None,
        split: Split | None = None,
        validation: Iterable[Any] | None = None,
        validation_interval: int | str = "epoch",
        metrics: Mapping[str, Callable[[Any, Any], float | Tensor]] | None = None,
        keep_best: KeepBest | str | None = None,
        resume_options: str = "checkpoint",
        hparams: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callback] = (),
        priority: int = 0,
        group: str | None = None,
        min_devices: int = 1,
        max_devices: int | None = None,
        weight: float = 1.0,
        max_retries: int = 0,
        nonfinite: str | None = None,
        timeout_s: float | None = TIMEOUT_S,
        loader_alone: bool = False,
        read_ahead: bool = True,
        records: Sequence[str] = (),
        compile: bool = False,
    ) -> None:
        # Not lr: the optimizer computes with what it is given.
        epochs, seed, accumulation_steps, max_device_batch = map(
            plain, (epochs, seed, accumulation_steps, max_device_batch)
        )
        validation_interval, max_retries = map(plain, (validation_interval, max_retries))
        priority, weight, min_devices, max_devices = map(plain, (priority, weight, min_devices, max_devices))
        homes = plain(homes)
        ema_decay, max_grad_norm = map(plain, (ema_decay, max_grad_norm))
        timeout_s = plain(timeout_s)
        loss_fn = uncompiled(loss_fn)
        with naming_task(name):
            if keep_best is not None and not isinstance(keep_best, KeepBest):
                keep_best = KeepBest(keep_best)
            options = locals()
            check_options(options)
            if isinstance(partitioner, str):
                partitioner = make_partitioner(partitioner)
            self.model = model if isinstance(model, Model) else Model(model)
            check_parameters(self.model, precision, trains=self.purpose is Purpose.TRAIN)
            if self.purpose is Purpose.TRAIN:
                check_trainable(self.model, loss_fn)
                check_validation(validation)
        self.loss_fn = loss_fn
        self.dataloader = dataloader
        self.lr = lr if lr is not None or optimizer is not None else 1e-3
        self.epochs = epochs
        self.name = name
        by_name = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
        self.optimizer: OptimizerFactory = by_name if by_name is not None else torch.optim.SGD
        self.param_groups = param_groups
        self.optimizer_scope = optimizer_scope
        self.ema_decay = ema_decay
        self.lr_scheduler = lr_scheduler
        self.lr_scheduler_interval = lr_scheduler_interval
        self.partitioner: Partitioner = partitioner if partitioner is not None else Fastest()
        self.early_release = early_release if isinstance(early_release, str) else bool(early_release)
        self.homes = homes
        self.priority = priority
        self.group = group
        self.min_devices = min_devices
        self.max_devices = max_devices
        self.weight = float(weight)
        self.max_retries = max_retries
        self.nonfinite = nonfinite
        self.timeout_s = timeout_s
        self.precision = precision
        self.split_weights = split_weights
        self.moments = moments
        self.grad_scaler = grad_scaler
        self.accumulation_steps = accumulation_steps
        self.max_device_batch = max_device_batch
        # As of now: its plan depends on it.
        self.adapts = self.purpose is Purpose.TRAIN and chooses(dataloader)
        self.loss_reduction = loss_reduction
        self.max_grad_norm = max_grad_norm
        self.resume_options = resume_options
        self.is_seeded = seed is not None
        self.seed = seed if seed is not None else int(torch.randint(0, 2**63 - 1, ()).item())
        self.unpack = unpack if unpack is not None else partial(unpack_batch, with_labels=self.model.takes("labels"))
        self.split: Split = split if split is not None else partial(split_batch, loss_reduction=loss_reduction)
        self.splits_by_user = split is not None or callable(loss_reduction)  # the default one calls that
        # One that keeps its place would go on where another evaluation, or task, was left.
        self.validation = validation.plain if isinstance(validation, GuidedLoader) else validation
        self.validation_interval = validation_interval
        self.metrics = dict(metrics or {})
        self.keep_best = keep_best
        self.hparams = plain_values(hparams or {})
        self.callbacks = tuple(callbacks)
        self.loader_alone = loader_alone
        self.read_ahead = read_ahead
        self.records = tuple(records)
        self.compile = compile

    @property
    def may_split_weights(self) -> bool:
        """True if no option stands against `split_weights`."""
        return self.purpose is Purpose.TRAIN and not splits_against(self)

    def __repr__(self) -> str:
        return f"ModelTask({self.name or 'unnamed'}: {len(self.model)} layers, {self.epochs} epochs)"
