"""The time of the model's kernels with everything resident."""

import time
from dataclasses import asdict
from statistics import median

import torch
from bounds import LayerSeconds


def synchronize(device):
    """Wait for all that was given to a device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Laps:
    """Seconds between marks, on the device's own clock where it has one."""

    def __init__(self, device):
        self._device = device
        self._marks = []

    def mark(self):
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def seconds(self):
        """Between each mark and the next."""
        synchronize(self._device)
        pairs = zip(self._marks, self._marks[1:], strict=False)
        if self._device.type == "cuda":
            return [first.elapsed_time(second) / 1e3 for first, second in pairs]
        return [second - first for first, second in pairs]


def layer_seconds(model, inputs, target, loss_fn, device, num_repeats=3):
    """Medians of each layer's seconds with one micro-batch: forward, then in reverse recompute and backward.

    As a streamed step has them: forwards save nothing, a backward starts from the stored input of its layer, gradients
    add up in place. The last layer's include the loss, taken in float32.
    """
    rounds = [one_round(list(model), inputs, target, loss_fn, device) for _ in range(num_repeats + 1)][1:]
    model.zero_grad(set_to_none=True)
    return [middle(each) for each in zip(*rounds, strict=True)]


def middle(measured):
    """The median of each of a layer's figures."""
    names = ("forward", "recompute", "backward")
    return LayerSeconds(**{name: median(asdict(each)[name] for each in measured) for name in names})


def one_round(layers, inputs, target, loss_fn, device):
    """One micro-batch through all layers."""
    laps, entered, x = Laps(device), [], inputs
    laps.mark()
    with torch.no_grad():
        for k, layer in enumerate(layers):
            entered.append(x)
            x = layer(x)
            if k == len(layers) - 1:
                x = loss_fn(x.float(), target)
            laps.mark()
    gradient = None
    for k in reversed(range(len(layers))):
        x = entered.pop()
        x = x.detach().requires_grad_() if x.is_floating_point() else x
        laps.mark()
        out = layers[k](x)
        if k == len(layers) - 1:
            out = loss_fn(out.float(), target)
        laps.mark()
        torch.autograd.backward(out, gradient)
        laps.mark()
        gradient, out = x.grad, None
    found = laps.seconds()
    num = len(layers)
    # Back to front, three marks each: the lap before the first of them is the host's own.
    back = {num - 1 - i: found[num + 3 * i + 1 : num + 3 * i + 3] for i in range(num)}
    return [LayerSeconds(forward=found[k], recompute=back[k][0], backward=back[k][1]) for k in range(num)]
