"""Measures one group of rows in this process and prints each as a line of JSON."""

import ctypes
import faulthandler
import importlib
import json
import signal
import sys
from pathlib import Path

import torch
from peers.rows import run_peer
from scales import SCALES, Group


def run_group(scale, group, emit, folder):
    """Measure a group's rows; `emit` takes each as a dict, `folder` is for files beside them."""
    device = torch.device("cpu" if scale.is_emulated else "cuda:0")
    if device.type == "cuda":
        torch.cuda.init()
        torch.cuda.set_device(device)
    if group.module == "peers":
        run_peer(scale, group, device, emit)
    else:
        importlib.import_module(group.module).METHODS[group.method](scale, group, device, emit, folder)


def main(scale_name, group, folder):
    """`group`: as JSON."""
    found = json.loads(group)
    group = Group(**{name: tuple(each) if isinstance(each, list) else each for name, each in found.items()})
    # Libraries that print do not cut a row in two.
    run_group(SCALES[scale_name], group, lambda row: print(f"\n{json.dumps(row)}", flush=True), Path(folder))


def tell_when_ended():
    """Print where each thread is when the session ends this process: it hangs there, or was too slow."""
    faulthandler.register(signal.SIGTERM, chain=True)


if __name__ == "__main__":
    tell_when_ended()
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a driver that is killed leaves nobody on the device
    main(*sys.argv[1:])
