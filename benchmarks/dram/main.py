"""The time of a host update where DRAM has less of each parameter: split weights, moments in bfloat16. See README.md.

python benchmarks/dram/main.py
python benchmarks/dram/main.py --params 2e6 --repeats 2 --threads 2
"""

import argparse
import sys
import time
from pathlib import Path
from statistics import median

import torch
from torch import nn

from hydra_engine.host.blocked import step_narrow
from hydra_engine.host.split import SplitMaster, SplitWeight
from hydra_engine.native import NarrowUpdate

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from figures import Figures, add_arguments

WIDTH = 1024
WAYS = {"whole": (False, False), "split": (True, False), "split, narrow moments": (True, True)}


class Host:
    """A model of square matrices as the host has it."""

    def __init__(self, num_parameters, *, splits, narrows_moments):
        torch.manual_seed(0)
        self.narrows_moments = narrows_moments
        self.masters, self.updates = [], []
        for _ in range(max(1, round(num_parameters / WIDTH**2))):
            parameter = nn.Parameter(0.02 * torch.randn(WIDTH, WIDTH))
            narrow, master = parameter.detach().bfloat16(), None
            if splits:
                halves = SplitWeight(narrow.view(-1), torch.empty(WIDTH**2, dtype=torch.int16))
                halves.store(parameter.detach().view(-1))
                master = SplitMaster(parameter, parameter.data, halves)
            gradient = (1e-3 * torch.randn(WIDTH, WIDTH)).bfloat16()
            self.updates.append(NarrowUpdate(parameter, gradient, narrow, master))
        self.optimizer = torch.optim.AdamW([update.parameter for update in self.updates], 1e-3, fused=True)

    def step(self):
        """Update all parameters; seconds, and those of processors."""
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        step_narrow(self.optimizer, self.updates, narrows_moments=self.narrows_moments)
        return time.perf_counter() - start_s, time.process_time() - start_cpu_s

    def weights(self):
        """The weights in float32."""
        masters = [(each.master, each.parameter.detach()) for each in self.updates]
        return [p if master is None else master.load(torch.empty_like(p)) for master, p in masters]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--params", type=float, default=30e6)
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--threads", type=int, default=1)
    add_arguments(parser)
    options = parser.parse_args()
    figures = Figures("dram")
    torch.set_num_threads(options.threads)
    hosts = {name: Host(options.params, splits=s, narrows_moments=m) for name, (s, m) in WAYS.items()}
    times = {name: [] for name in WAYS}
    for k in range(2 + options.repeats):  # the first makes states, the second places them
        for name in list(WAYS)[:: 1 if k % 2 else -1]:
            times[name].append(hosts[name].step())
    same = all(map(torch.equal, hosts["whole"].weights(), hosts["split"].weights()))
    print(f"split weights are {'bit-equal' if same else 'NOT EQUAL'} after {2 + options.repeats} steps")
    size = sum(update.parameter.numel() for update in hosts["whole"].updates)
    for name, found in times.items():
        pairs = [(a[1] / b[1], b) for a, b in zip(found[2:], times["whole"][2:], strict=True)]
        seconds, cpu_s = (median(each) for each in zip(*found[2:], strict=True))
        ratios = sorted(ratio for ratio, _ in pairs)
        spread = f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        print(f"{name:22} {size / seconds / 1e6:6.0f} million parameters/s, processor {1e3 * cpu_s:6.1f} ms: {spread}")
        if name != "whole":
            figures.add(f"{name}: times the whole weights' time", ratios, better="less")
    figures.save(options.json)
    raise SystemExit(not same)


if __name__ == "__main__":
    main()
