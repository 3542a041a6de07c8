"""TrainStream: weights on the GPU as far as they fit, Adam in C++ threads while the backward goes on."""

import torch
from models import ADAMW, LR, loss_fn

from .trainer import micro_batches, narrowed_with_masters

NEEDS = ("trainstream==0.4.1", "ninja==1.13.2")


def build():
    """Compile its CUDA extension, minutes of nvcc's work, or load what was compiled."""
    import trainstream  # noqa: F401


class Trainer:
    """bfloat16 weights, float32 masters and moments in DRAM; nothing recomputed, activations go to DRAM instead.

    Gradients of several micro-batches add up in DRAM. `offload=True`, since TrainStream otherwise trains a model that
    fits without masters and with moments in bfloat16.
    """

    def __init__(self, scale, size, *, device, cap_bytes, micro_tokens):
        import trainstream

        self._package, self._device, self._micro_tokens = trainstream, device, micro_tokens
        model, masters = narrowed_with_masters(scale, size)
        optimizer = ADAMW(model.parameters(), lr=LR)
        self._model, self._optimizer = trainstream.wrap(
            model,
            optimizer,
            device=device,
            blocks=list(model)[1:-1],  # what it looks for is layers of one kind and no others
            offload=True,
            moment_dtype="float32",
            quantize="none",
        )
        self._optimizer.load_state_dict(initial_state(self._optimizer, masters))

    def step(self, inputs, target):
        parts = micro_batches(inputs, target, self._micro_tokens)
        self._optimizer.accumulation_steps = len(parts)
        mean = 0.0
        for x, y, share in parts:
            loss = loss_fn(self._model(x.to(self._device)).float(), y.to(self._device)) * share
            loss.backward()
            mean += loss.detach()
        self._optimizer.step()
        return mean

    def close(self):
        self._package.unwrap(self._model)
        self._model = self._optimizer = None


def initial_state(optimizer, masters):
    """Nothing but the masters, which TrainStream would widen from bfloat16."""
    state = optimizer.state_dict()
    for k, master in enumerate(masters):
        zeros = torch.zeros(()).expand(master.shape)
        state["state"][k] = {"step": 0, "exp_avg": zeros, "exp_avg_sq": zeros, "master": master}
    return state
