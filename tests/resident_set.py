"""Trains one task and prints how far the process's resident set grew, and the plan (tests/host/test_resident_set.py).

python -m tests.resident_set adamw        # or bfloat16, split, split-early, moments, sgd-early
"""

import json
import os
import sys
from functools import partial

import psutil
import torch
from torch import nn
from torch.nn import functional as F

from hydra_engine import Callback, EmulatedDevice, ModelOrchestrator, ModelTask
from hydra_engine.system.dram import return_free_memory
from partitioners import Presharded

NUM_STEPS = 5  # through before freed memory is given back for the first time
SPLIT = {"precision": "bfloat16", "split_weights": True}
# Settings, layers, and the width of one: at least 1 GiB of weights, gradients and states each, or half of that.
# The C library keeps freed blocks of up to 32 MiB: a layer's weights are 1 MiB, 16 MiB ("large") or 64 MiB ("huge").
CASES = {
    "large": ({"optimizer": torch.optim.AdamW, "ema_decay": 0.999}, 8, 2048),
    "huge": ({"optimizer": torch.optim.AdamW}, 3, 4096),
    "momentum": ({"optimizer": partial(torch.optim.SGD, momentum=0.9)}, 10, 2048),
    "coupled": ({"optimizer": torch.optim.AdamW, "optimizer_scope": "task"}, 10, 2048),
    "rmsprop": ({"optimizer": torch.optim.RMSprop}, 10, 2048),
    "half": ({"optimizer": partial(torch.optim.AdamW, fused=True), "ema_decay": 0.999}, 108),
    "adamw": ({"optimizer": partial(torch.optim.AdamW, fused=True), "ema_decay": 0.999}, 216),
    "bfloat16": ({"optimizer": partial(torch.optim.AdamW, fused=True), "precision": "bfloat16"}, 272),
    "split": ({"optimizer": partial(torch.optim.AdamW, fused=True), **SPLIT}, 310),
    "split-early": ({"optimizer": partial(torch.optim.AdamW, fused=True), **SPLIT, "early_release": True}, 360),
    "moments": ({"optimizer": torch.optim.AdamW, **SPLIT, "early_release": True, "moments": "bfloat16"}, 540),
    "split-half": ({"optimizer": partial(torch.optim.AdamW, fused=True), **SPLIT, "early_release": True}, 180),
    "sgd-early": ({"optimizer": torch.optim.SGD, "early_release": True}, 1024),
}


class Watch(Callback):
    """The largest resident set after a step."""

    def __init__(self):
        self.peak_bytes = 0

    def on_step(self, report):
        self.peak_bytes = max(self.peak_bytes, psutil.Process(os.getpid()).memory_info().rss)


def main(case):
    settings, num_layers, width = (*CASES[case], 512)[:3]
    device_bytes = 40 * width**2  # a fiftieth of the state with 512: its memory is the process's, too
    layer = partial(nn.Linear, width, width, bias=False)
    batch = (torch.ones(1, width), torch.ones(1, width))
    # What torch allocates once for good: kernels, threads, the first optimizer.
    small = ModelTask([layer(), layer()], F.mse_loss, [batch] * 2, 1e-3, **settings)
    trained(small, device_bytes)
    return_free_memory()
    before = psutil.Process(os.getpid()).memory_info().rss
    watch = Watch()
    model = nn.Sequential(*(layer() for _ in range(num_layers)))
    partitioner = Presharded(list(range(1, num_layers + 1)))
    settings = {**settings, "partitioner": partitioner, "callbacks": [watch]}
    task = ModelTask(model, F.mse_loss, [batch] * NUM_STEPS, 1e-3, **settings)
    plan = trained(task, device_bytes)
    growth = watch.peak_bytes - before
    size = num_layers * width**2
    held = 4 * size * (2 if "ema_decay" in settings else 1)  # averages are in the report
    left = psutil.Process(os.getpid()).memory_info().rss - before - held
    each = {"growth": round(growth / size, 3), "plan": round(plan.dram_bytes / size, 3)}
    sizes = {"growth": growth, "plan": plan.dram_bytes, "device": device_bytes, "num_parameters": size, "left": left}
    print(json.dumps({**sizes, "bytes_per_parameter": each}))


def trained(task, device_bytes):
    orchestra = ModelOrchestrator([task], devices=[EmulatedDevice(device_bytes)])
    orchestra.verbose = 0
    plan = orchestra.generate().tasks["task-0"]
    orchestra.train_models().raise_failures()
    return plan


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1])
