"""What the machine can do at most, and what the model's kernels take with everything resident."""

import os
import platform
import subprocess
import time
from dataclasses import asdict
from statistics import median

import psutil
import torch
from bounds import LayerSeconds
from torch import nn

NUM_PROBES = 5
NUM_PRODUCTS = 10
LINK_PROBE_BYTES = 2**28


def synchronize(device):
    """Wait for all that was given to a device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(call, device, num_calls=NUM_PROBES):
    """The least of several calls' seconds, after one that does not count."""
    found = []
    for _ in range(num_calls + 1):
        synchronize(device)
        start_s = time.perf_counter()
        call()
        synchronize(device)
        found.append(time.perf_counter() - start_s)
    return min(found[1:])


def machine(scale, device):
    """The environment, and the rates that bounds are made of."""
    return {**environment(device), **link_rates(scale, device), **dram_rates(scale), **matmul_rate(scale, device)}


def environment(device):
    """What the figures were measured on."""
    found = {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "dram_bytes": psutil.virtual_memory().total,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gpu": None,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {"gpu": properties.name, "gpu_bytes": properties.total_memory, "cuda": torch.version.cuda}
        query = [
            "nvidia-smi",
            "--query-gpu=driver_version,pcie.link.gen.max,pcie.link.width.max",
            "--format=csv,noheader",
        ]
        try:
            told = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
            driver, generation, width = told.splitlines()[0].split(", ")
            found |= {"driver": driver, "pcie": f"generation {generation}, {width} lanes"}
        except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
            found |= {"driver": f"unknown: {error}"}
    return found


def cpu_name():
    """As the kernel has it."""
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown"


def link_rates(scale, device):
    """Bytes per second up and down, each alone, and of both together while both are busy."""
    if scale.is_emulated:
        return {"up_bytes_per_s": scale.bandwidth, "down_bytes_per_s": scale.bandwidth, "both_bytes_per_s": None}
    hosts = [torch.zeros(LINK_PROBE_BYTES, dtype=torch.uint8).pin_memory() for _ in range(2)]
    devices = [torch.zeros(LINK_PROBE_BYTES, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [torch.cuda.Stream(device) for _ in range(2)]

    def up():
        with torch.cuda.stream(streams[0]):
            devices[0].copy_(hosts[0], non_blocking=True)

    def down():
        with torch.cuda.stream(streams[1]):
            hosts[1].copy_(devices[1], non_blocking=True)

    def both():
        up()
        down()

    return {
        "up_bytes_per_s": LINK_PROBE_BYTES / seconds(up, device),
        "down_bytes_per_s": LINK_PROBE_BYTES / seconds(down, device),
        "both_bytes_per_s": 2 * LINK_PROBE_BYTES / seconds(both, device),
    }


def dram_rates(scale):
    """Bytes per second of STREAM's triad, and of an array changed in place; bounds take the faster.

    An update writes mostly where it reads, so the lines that a triad fetches only to overwrite cost it nothing.
    """
    host = torch.device("cpu")
    a, b, c = (torch.ones(scale.probe_bytes // 4) for _ in range(3))
    triad = 3 * a.nbytes / seconds(lambda: torch.add(b, c, alpha=3.0, out=a), host)
    in_place = 2 * a.nbytes / seconds(lambda: a.mul_(1.0001), host)
    return {"triad_bytes_per_s": triad, "in_place_bytes_per_s": in_place, "dram_bytes_per_s": max(triad, in_place)}


def matmul_rate(scale, device):
    """FLOP/s of one large product in bfloat16."""
    a, b = (torch.randn(scale.probe_width, scale.probe_width, device=device).bfloat16() for _ in range(2))
    out = torch.empty_like(a)

    def products():
        for _ in range(NUM_PRODUCTS):
            torch.mm(a, b, out=out)

    return {"matmul_flops_per_s": NUM_PRODUCTS * 2 * scale.probe_width**3 / seconds(products, device)}


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


def linear_parameters(model):
    """By layer, the elements of its linear weights."""
    return [sum(m.weight.numel() for m in layer.modules() if isinstance(m, nn.Linear)) for layer in model]
