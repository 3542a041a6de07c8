"""How fast the host steps an optimizer in 16 bits, beside torch's own step and memory itself. See README.md.

python benchmarks/host_optimizer/main.py                           # all of it; exit code 1 below the limit
python benchmarks/host_optimizer/main.py --params 20e6 --repeats 5 --no-judge
"""

import argparse
import sys
import time
from statistics import median, quantiles

import torch
from torch import nn

from hydra_engine.host.blocked import NarrowUpdate, step_narrow

NARROW = torch.bfloat16
LR = 1e-3
MAX_WIDTH = 1024
ALIGNMENT_BYTES = 64
LIMIT = 1.1  # the least that the default may be, in times torch's own

# Bytes per parameter, from and to memory: each read or write of a pass counts once; lines that are fetched only to be
# overwritten do not, here or in the memory's own rate.
WIDEN, NARROW_DOWN = 2 + 4, 4 + 2
BYTES = {
    "fused": WIDEN + (4 + 3 * 8) + NARROW_DOWN,  # gradient read; master and two moments read and written
    # Decay; first moment; second, in two; its root, the root's correction, epsilon; weight.
    "unfused": WIDEN + 8 + 12 + (8 + 12) + (8 + 8 + 8) + 16 + NARROW_DOWN,
    "blocked": 2 + 3 * 8 + 2,
}


def gpt_shapes(num_parameters):
    """Of the parameters of GPT blocks, as many as come nearest."""
    width = min(MAX_WIDTH, max(16, int((num_parameters / 24) ** 0.5) // 16 * 16))
    block = [(3 * width, width), (3 * width,), (width, width), (width,), (width,), (width,)]
    block += [(4 * width, width), (4 * width,), (width, 4 * width), (width,), (width,), (width,)]
    size = sum(torch.Size(shape).numel() for shape in block)
    return block * max(1, round(num_parameters / size))


def views(shapes, dtype):
    """Tensors one after the other in one buffer, as the engine's host pool lays them out."""
    unit = ALIGNMENT_BYTES // dtype.itemsize
    sizes = [-(-torch.Size(shape).numel() // unit) * unit for shape in shapes]
    buffer = torch.zeros(sum(sizes), dtype=dtype)
    return [
        piece[: torch.Size(shape).numel()].view(shape) for piece, shape in zip(buffer.split(sizes), shapes, strict=True)
    ]


class Host:
    """What the host holds of a model trained in 16 bits, with torch's fused AdamW or its unfused default."""

    def __init__(self, shapes, *, fused):
        generator = torch.Generator().manual_seed(0)
        self.parameters = [nn.Parameter(master) for master in views(shapes, torch.float32)]
        self.gradients, self.narrows = views(shapes, NARROW), views(shapes, NARROW)
        with torch.no_grad():
            for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
                parameter.normal_(0, 0.02, generator=generator)
                gradient.normal_(0, 1e-3, generator=generator)
        self.num_parameters = sum(parameter.numel() for parameter in self.parameters)
        self.optimizer = torch.optim.AdamW(self.parameters, lr=LR, fused=fused)
        self.updates = [NarrowUpdate(*each) for each in zip(self.parameters, self.gradients, self.narrows, strict=True)]
        self.widened = views(shapes, torch.float32)  # made once: the plain way at its best


def plain(host):
    """Torch's own step, and the casts before and after it."""
    for parameter, gradient, widened in zip(host.parameters, host.gradients, host.widened, strict=True):
        parameter.grad = widened.copy_(gradient)
    host.optimizer.step()
    with torch.no_grad():
        for parameter, narrow in zip(host.parameters, host.narrows, strict=True):
            narrow.copy_(parameter)
            parameter.grad = None


def blocked(host):
    """The same, a block at a time."""
    step_narrow(host.optimizer, host.updates, None)


def default(host):
    """What the engine calls for a shard's update."""
    step_narrow(host.optimizer, host.updates, None)


WAYS = {"plain": plain, "blocked": blocked, "default": default}


def seconds(call, *arguments):
    start_s = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - start_s


class Triad:
    """STREAM's triad, a = b + s c: two reads and a write of float32."""

    def __init__(self, num_elements):
        self.a, self.b, self.c = (torch.ones(num_elements) for _ in range(3))

    def bytes_per_s(self):
        moved = self.a.nbytes + self.b.nbytes + self.c.nbytes
        return moved / seconds(lambda: torch.add(self.b, self.c, alpha=3.0, out=self.a))


def bits(shapes, way):
    """Everything there is after three steps."""
    host = Host(shapes, fused=True)
    for _ in range(3):
        WAYS[way](host)
    state = [value for parameter in host.parameters for value in host.optimizer.state[parameter].values()]
    return [*host.parameters, *host.narrows, *state]


def check_bits(num_parameters):
    """All ways give the bits of the plain one."""
    shapes = gpt_shapes(num_parameters)
    expected = bits(shapes, "plain")
    for way in WAYS:
        for ours, theirs in zip(bits(shapes, way), expected, strict=True):
            assert torch.equal(ours, theirs), f"{way}: other bits than the plain way's"


def spread(values, digits):
    """Median and quartiles."""
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def measure(host, triad, num_repeats):
    """Seconds and ratios to the plain way of each way, in alternating pairs, and the memory's rate between them."""
    seconds_of, ratios, rates = {way: [] for way in WAYS}, {way: [] for way in WAYS}, []
    for way in WAYS.values():
        way(host)
    for repeat in range(num_repeats):
        rates.append(triad.bytes_per_s())
        for name, way in WAYS.items():
            if repeat % 2:  # who goes first changes
                way_s, plain_s = seconds(way, host), seconds(plain, host)
            else:
                plain_s, way_s = seconds(plain, host), seconds(way, host)
            seconds_of[name].append(way_s)
            ratios[name].append(plain_s / way_s)
    return seconds_of, ratios, rates


def report(kind, host, triad, num_repeats):
    """Print a table; the default's median ratio to the plain way."""
    seconds_of, ratios, rates = measure(host, triad, num_repeats)
    print(f"torch.optim.AdamW, {kind}; triad {spread([rate / 1e9 for rate in rates], 1)} GB/s")
    print("         ms per step            million parameters/s  bytes  of triad  times the plain way's speed")
    for name in WAYS:
        step_s, moved = median(seconds_of[name]), BYTES[kind if name == "plain" else "blocked"]
        share = moved * host.num_parameters / step_s / median(rates)
        print(
            f"{name:8} {spread([1e3 * each for each in seconds_of[name]], 1):22} "
            f"{host.num_parameters / step_s / 1e6:20.0f}  {moved:5}  {share:8.0%}  {spread(ratios[name], 3)}",
            flush=True,
        )
    return median(ratios["default"])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=float, default=100e6, help="number of parameters (default 100e6)")
    parser.add_argument("--threads", type=int, default=1, help="intra-op threads (default 1)")
    parser.add_argument("--repeats", type=int, default=15, help="alternating pairs (default 15)")
    parser.add_argument("--triad", type=int, default=1024, help="MiB of each of the triad's buffers (default 1024)")
    parser.add_argument("--no-judge", action="store_true", help="exit code 0 whatever comes out")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    check_bits(min(arguments.params, 2e6))
    triad = Triad(arguments.triad * 2**18)
    shapes = gpt_shapes(arguments.params)
    host = Host(shapes, fused=True)
    print(f"{host.num_parameters:,} parameters in {len(shapes)} tensors, {NARROW}, {arguments.threads} thread(s)")
    ratio = report("fused", host, triad, arguments.repeats)
    del host
    report("unfused", Host(shapes, fused=False), triad, arguments.repeats)
    good = ratio >= LIMIT
    print(f"default: {ratio:.3f} times torch's fused AdamW plus casts, at least {LIMIT}: {'yes' if good else 'NO'}")
    sys.exit(0 if good or arguments.no_judge else 1)


if __name__ == "__main__":
    main()
