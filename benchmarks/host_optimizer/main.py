"""How fast the host steps an optimizer in 16 bits, beside torch's step, DeepSpeed's and memory itself. See README.md.

python benchmarks/host_optimizer/main.py                           # all of it; exit code 1 below the limits
python benchmarks/host_optimizer/main.py --params 20e6 --repeats 5 --no-judge
OMP_WAIT_POLICY=passive python benchmarks/host_optimizer/main.py --processor-time      # beside other work
"""

import argparse
import ctypes
import os
import sys
import time
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from statistics import median, quantiles

import torch
from torch import nn

from hydra_engine.host.blocked import step_narrow
from hydra_engine.host.split import SplitMaster, SplitWeight
from hydra_engine.native import NarrowUpdate, native
from hydra_engine.native.library import VARIABLE

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from figures import Figures, add_arguments

try:
    from deepspeed.ops.adam import DeepSpeedCPUAdam
except ImportError:
    DeepSpeedCPUAdam = None

NARROW = torch.bfloat16
FIGURES = Figures("host_optimizer")
LR = 1e-3
MAX_WIDTH = 1024
ALIGNMENT_BYTES = 64
# The least that the native update may be, in times the speed of each other way.
LIMITS = {"plain": 1.5, "deepspeed": 1.5, "deepspeed-32": 0.95}

# Bytes per parameter, from and to memory: each read or write of a pass counts once; lines that are fetched only to be
# overwritten do not, here or in the memory's own rate.
WIDEN, NARROW_DOWN = 2 + 4, 4 + 2
FLOAT32_STEP = 4 + 3 * 8  # gradient read; master and two moments read and written
BYTES = {
    "fused": WIDEN + FLOAT32_STEP + NARROW_DOWN,
    # Decay; first moment; second, in two; its root, the root's correction, epsilon; weight.
    "unfused": WIDEN + 8 + 12 + (8 + 12) + (8 + 8 + 8) + 16 + NARROW_DOWN,
    "deepspeed": WIDEN + FLOAT32_STEP + NARROW_DOWN,
    "deepspeed-32": FLOAT32_STEP,
    "blocked": 2 + 3 * 8 + 2,
    "native": 2 + 3 * 8 + 2,
    "split": 2 + (4 + 4) + 2 * 8,  # both halves read and written; moments
}

HOWS = ({}, {"foreach": True}, {"fused": True})
ADAMS = ({}, {"amsgrad": True}, {"weight_decay": 0}, {"weight_decay": 0.1, "maximize": True}, {"betas": (0.4, 0.9)})
SGDS = ({}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"momentum": 0.3, "dampening": 0.1})
SETTINGS = [
    *product((torch.optim.Adam, torch.optim.AdamW), ADAMS, HOWS),
    *product((torch.optim.SGD,), SGDS, HOWS),
]
FACTORS = ((), (0.5,), (1 / 3, torch.tensor(0.7)))  # none; a loss scale's; that and clipping's


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
    """What the host holds of a model trained in 16 bits, with an optimizer of torch."""

    def __init__(self, shapes, make):
        generator = torch.Generator().manual_seed(0)
        self.parameters = [nn.Parameter(master) for master in views(shapes, torch.float32)]
        self.gradients, self.narrows = views(shapes, NARROW), views(shapes, NARROW)
        with torch.no_grad():
            for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
                parameter.normal_(0, 0.02, generator=generator)
                gradient.normal_(0, 1e-3, generator=generator)
        self.num_parameters = sum(parameter.numel() for parameter in self.parameters)
        self.optimizer = make(self.parameters)
        self.updates = [NarrowUpdate(*each) for each in zip(self.parameters, self.gradients, self.narrows, strict=True)]
        self.widened = views(shapes, torch.float32)  # made once: the plain way at its best
        self.deepspeed = None if DeepSpeedCPUAdam is None else DeepSpeedCPUAdam(self.parameters, lr=LR)

    def tensors(self):
        """Everything that a step changes."""
        state = [value for parameter in self.parameters for value in self.optimizer.state[parameter].values()]
        return [*self.weights(), *self.narrows, *(value for value in state if value is not None)]

    def weights(self):
        """The weights in float32."""
        return self.parameters


class SplitHost(Host):
    """The same with split weights: a remainder of 16 bits in the place of a master."""

    def __init__(self, shapes, make):
        super().__init__(shapes, make)
        self.masters = []
        for parameter, narrow, rest in zip(self.parameters, self.narrows, views(shapes, torch.int16), strict=True):
            halves = SplitWeight(narrow.view(-1), rest.view(-1))
            halves.store(parameter.detach().view(-1))
            self.masters.append(SplitMaster(parameter, parameter.data, halves))
        rows = zip(self.parameters, self.gradients, self.narrows, self.masters, strict=True)
        self.updates = [NarrowUpdate(*each) for each in rows]

    def weights(self):
        """The weights in float32, put together."""
        return [master.load(torch.empty_like(p)) for master, p in zip(self.masters, self.parameters, strict=True)]


def with_casts(host, step, factors=()):
    """A step of the whole, and the casts before and after it."""
    for parameter, gradient, widened in zip(host.parameters, host.gradients, host.widened, strict=True):
        parameter.grad = widened.copy_(gradient)
        for factor in factors:
            widened.mul_(factor)
    step()
    with torch.no_grad():
        for parameter, narrow in zip(host.parameters, host.narrows, strict=True):
            narrow.copy_(parameter)
            parameter.grad = None


def plain(host, factors=()):
    """Torch's own step, and the casts."""
    with_casts(host, host.optimizer.step, factors)


def deepspeed(host):
    """DeepSpeed's step, and the casts."""
    with_casts(host, host.deepspeed.step)


def deepspeed_32(host):
    """DeepSpeed's step alone, on gradients that are float32 already."""
    for parameter, widened in zip(host.parameters, host.widened, strict=True):
        parameter.grad = widened
    host.deepspeed.step()
    for parameter in host.parameters:
        parameter.grad = None


def blocked(host, factors=()):
    """What the engine calls for a shard's update, where there is no compiler."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = "0"
    try:
        step_narrow(host.optimizer, host.updates, factors)
    finally:
        os.environ.pop(VARIABLE)
        os.environ.update({} if before is None else {VARIABLE: before})


def by_kernel(host, factors=()):
    """What the engine calls for a shard's update."""
    step_narrow(host.optimizer, host.updates, factors)


WAYS = {"plain": plain, "blocked": blocked, "native": by_kernel, "split": by_kernel}
PEERS = {} if DeepSpeedCPUAdam is None else {"deepspeed": deepspeed, "deepspeed-32": deepspeed_32}


@contextmanager
def intra_op_threads(count):
    """Threads of torch, and of the OpenMP library that DeepSpeed's kernel is linked to."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    if PEERS:
        ctypes.CDLL("libgomp.so.1").omp_set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def seconds(call, *arguments, clock=time.perf_counter):
    start_s = clock()
    call(*arguments)
    return clock() - start_s


def processor_seconds(call, *arguments):
    """Seconds that a step would take if each of its threads had a core to itself, and all had the same to do."""
    return seconds(call, *arguments, clock=time.process_time) / torch.get_num_threads()


class Triad:
    """STREAM's triad, a = b + s c: two reads and a write of float32."""

    def __init__(self, num_elements):
        self.a, self.b, self.c = (torch.ones(num_elements) for _ in range(3))

    def bytes_per_s(self, timed):
        moved = self.a.nbytes + self.b.nbytes + self.c.nbytes
        return moved / timed(lambda: torch.add(self.b, self.c, alpha=3.0, out=self.a))


def check_bits(num_parameters):
    """All ways give the bits of the plain one, in every setting: weights, narrow copies and state after three steps."""
    shapes = gpt_shapes(num_parameters)
    for index, (kind, options, how) in enumerate(SETTINGS):
        factors, found = FACTORS[index % len(FACTORS)], {}
        for name, way in WAYS.items():
            make = SplitHost if name == "split" else Host
            host = make(shapes, lambda own: kind(own, lr=LR, **options, **how))  # noqa: B023
            for _ in range(3):
                way(host, factors)
            found[name] = host.tensors()
        for name in WAYS:
            for ours, theirs in zip(found[name], found["plain"], strict=True):
                assert torch.equal(ours, theirs), f"{kind.__name__}({options | how}): {name} has other bits than plain"
    print(f"{len(SETTINGS)} settings: bits of torch's own step in {', '.join(WAYS)}")


def spread(values, digits):
    """Median and quartiles."""
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def measure(hosts, ways, triad, num_repeats, timed):
    """Seconds of each way, in rounds that each begin with another one, and the memory's rate between them."""
    found, rates = {name: [] for name in ways}, []
    for name, way in ways.items():
        for _ in range(2):  # the first makes the state
            way(hosts[name == "split"])
    for repeat in range(num_repeats):
        rates.append(triad.bytes_per_s(timed))
        names = list(ways)
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            found[name].append(timed(ways[name], hosts[name == "split"]))
    return found, rates


def note(kind, name, ratios):
    """Note how many times faster the native update is than another way, in each round."""
    if kind == "fused" and name in LIMITS:
        threads = "1 thread" if torch.get_num_threads() == 1 else f"{torch.get_num_threads()} threads"
        FIGURES.add(f"{threads}: times faster than {name}", ratios, better="more", limit=LIMITS[name])


def report(kind, hosts, ways, *how):
    """Print a table; the native update's median ratios to all others, by their names."""
    found, rates = measure(hosts, ways, *how)
    print(
        f"{kind} AdamW, {torch.get_num_threads()} thread(s); triad {spread([rate / 1e9 for rate in rates], 1)} GB/s\n"
        "              ms per step            million parameters/s  bytes  of triad  native is faster by"
    )
    ratios = {}
    for name, times in found.items():
        step_s, moved = median(times), BYTES[kind if name == "plain" else name]
        each = [other / mine for other, mine in zip(times, found["native"], strict=True)]
        note(kind, name, each)
        ratios[name] = median(each)
        print(
            f"{name:13} {spread([1e3 * each for each in times], 1):22} {hosts[0].num_parameters / step_s / 1e6:20.0f}  "
            f"{moved:5}  {moved * hosts[0].num_parameters / step_s / median(rates):8.0%}  {spread(each, 3)}",
            flush=True,
        )
    return ratios


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=float, default=60e6, help="number of parameters (default 60e6)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="intra-op threads (default 1 and 2)")
    parser.add_argument("--repeats", type=int, default=15, help="rounds (default 15)")
    parser.add_argument("--triad", type=int, default=1024, help="MiB of each of the triad's buffers (default 1024)")
    parser.add_argument("--processor-time", action="store_true", help="of all threads together, not of the clock")
    parser.add_argument("--no-judge", action="store_true", help="exit code 0 whatever comes out")
    add_arguments(parser)
    arguments = parser.parse_args()
    timed = processor_seconds if arguments.processor_time else seconds
    if not native().wait():
        print(f"no native code: {native().missing_because or 'it is turned off'}; native is the same as blocked")
    shapes, is_good = gpt_shapes(arguments.params), True
    triad = Triad(arguments.triad * 2**18)
    check_bits(min(arguments.params, 5e4))
    for count in arguments.threads:
        with intra_op_threads(count):
            for kind in ("fused", "unfused"):
                hosts = [
                    make(shapes, lambda own: torch.optim.AdamW(own, lr=LR, fused=kind == "fused"))  # noqa: B023
                    for make in (Host, SplitHost)
                ]
                print(f"{hosts[0].num_parameters:,} parameters in {len(shapes)} tensors, {NARROW}")
                ways = WAYS | PEERS if kind == "fused" else WAYS
                ratios = report(kind, hosts, ways, triad, arguments.repeats, timed)
                for name, limit in LIMITS.items():
                    if kind == "fused" and name in ratios:
                        good = ratios[name] >= limit
                        is_good &= good
                        words = f"native: {ratios[name]:.3f} times {name}, at least {limit}"
                        print(f"{count} thread(s), {words}: {'yes' if good else 'NO'}")
                del hosts
    FIGURES.save(arguments.json)
    sys.exit(0 if is_good or arguments.no_judge else 1)


if __name__ == "__main__":
    main()
