"""RoundPipe: stages of layers dispatched to a pool of GPUs, here of one; weights exact, or one step old."""

import gc
import signal
import sys
import threading
from types import SimpleNamespace

import torch
from models import loss_fn

from .trainer import adamw_settings, micro_batches, narrowed_with_masters

NEEDS = (
    "roundpipe==0.1.1",
    "beartype==0.22.9",  # from 0.23 on, RoundPipe has every call's types checked
    "ninja==1.13.2",
    "py-cpuinfo==9.0.0",
    "tqdm",
)
MODEL_SHARE = 0.6  # of the device's memory, for weights and gradients: RoundPipe's own default


def build():
    """Compile the CPU Adam, or load what was compiled."""
    from roundpipe.optim.optim_builder import load_optim_function

    load_optim_function("adam")


class Trainer:
    """bfloat16 weights and gradients in page-locked DRAM, float32 masters and moments there, its own Adam in C++."""

    is_stale = False

    def __init__(self, scale, size, *, device, cap_bytes, micro_tokens):
        import roundpipe
        import roundpipe.threads

        self._package, self._cap_bytes, self._micro_tokens = roundpipe, cap_bytes, micro_tokens
        self._worker_error = None
        # An error in a thread ends the process: caught here, so that smaller micro-batches can be tried.
        roundpipe.threads.os = SimpleNamespace(_exit=self._note_worker_error)
        self._handler_before = signal.signal(signal.SIGUSR1, self._raise_worker_error)
        model, masters = narrowed_with_masters(scale, size)
        self._model = roundpipe.RoundPipe(model, optim_dtype=torch.float32, name=f"gpt-{size}")
        parameters = list(self._model.optim_parameters())
        with torch.no_grad():
            for parameter, master in zip(parameters, masters, strict=True):
                parameter.copy_(master)
        self._optimizer = roundpipe.optim.Adam(parameters, decoupled_weight_decay=True, **adamw_settings())

    def step(self, inputs, target):
        parts = micro_batches(inputs, target, self._micro_tokens)
        loss = self._model.forward_backward(
            input_args=(inputs,),
            label=target,
            loss_fn=lambda output, y: loss_fn(output.float(), y) * (len(y) / len(target)),
            run_config=self._run_config(len(parts)),
        )
        self._model.step(self._update, is_async=self.is_stale)
        return loss  # the sum of all micro-batches'

    def _run_config(self, num_micro_batches):
        plan = None
        if self._cap_bytes is not None:
            # Its own default limit is a share of the whole card, whatever the cap.
            self._model.model_timer.update_times()
            limit = MODEL_SHARE * self._cap_bytes / 2**30
            plan = self._package.ModelExecutePlan.auto("fused", self._model, model_memory_limit=limit)
        return self._package.RoundPipeRunConfig(
            num_microbatch=num_micro_batches, preserve_rng_state=False, execute_plan=plan
        )

    def _update(self):
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _note_worker_error(self, _code):
        """In the thread that failed, instead of the end of the process."""
        if self._worker_error is None:
            error = sys.exception()
            self._worker_error = error.__context__ if isinstance(error, SystemExit) else error
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)

    def _raise_worker_error(self, *_):
        """In the main thread, wherever it waits."""
        raise self._worker_error

    def close(self):
        """Wait for the last update; after an error, forget the package, whose threads and queues are spoilt."""
        if self._worker_error is None:
            self._model.synchronize()
        else:
            self._package.threads.os = SimpleNamespace(_exit=lambda _code: None)
            for attribute in self._model.layer_attrs:  # let the optimizer's thread go, or it waits for ever
                attribute.grad_download_started.set()
                attribute.param_upload_started.set()
            for name in [name for name in sys.modules if name.split(".")[0] == "roundpipe"]:
                del sys.modules[name]
        signal.signal(signal.SIGUSR1, self._handler_before)
        self._model = self._optimizer = self._package = self._worker_error = None
        gc.collect()


class StaleTrainer(Trainer):
    """As its authors advise: each step computes with the weights of the step before the last."""

    is_stale = True
