"""Plain PyTorch with everything on the device: what streaming is measured against."""

import torch
from models import ADAMW, LR, loss_fn
from torch import nn

from .trainer import micro_batches, narrowed_with_masters

NEEDS = ()


class Resident:
    """bfloat16 weights, float32 masters and AdamW's moments on one device, stepped layer by layer.

    So that of the widened gradients only one layer's are there at a time.
    """

    def __init__(self, model, masters, device, lr=LR):
        self._device = device
        self._model = model.to(device)
        masters = iter([nn.Parameter(master.to(device)) for master in masters])
        self._layers = []
        for layer in self._model:
            parameters = list(layer.parameters())
            owned = [next(masters) for _ in parameters]
            self._layers.append((parameters, owned, ADAMW(owned, lr=lr)))

    def step_parts(self, parts):
        """Train one step on its micro-batches; return the mean loss."""
        mean = 0.0
        for x, y, share in parts:
            loss = loss_fn(self._model(x.to(self._device)).float(), y.to(self._device)) * share
            loss.backward()
            mean += loss.detach()
        for parameters, masters, optimizer in self._layers:
            for parameter, master in zip(parameters, masters, strict=True):
                master.grad, parameter.grad = parameter.grad.float(), None
            optimizer.step()
            with torch.no_grad():
                for parameter, master in zip(parameters, masters, strict=True):
                    parameter.copy_(master)
                    master.grad = None
        return mean


class Trainer(Resident):
    """A GPT of a scale, resident."""

    def __init__(self, scale, size, *, device, cap_bytes, micro_tokens):
        super().__init__(*narrowed_with_masters(scale, size), device)
        self._micro_tokens = micro_tokens

    def step(self, inputs, target):
        return self.step_parts(micro_batches(inputs, target, self._micro_tokens))

    def close(self):
        pass
