"""A process group of one process, for peers that do not go without."""

import atexit
import os
import tempfile


def open_group(device):
    """Make the group, in place of one that a trainer left which failed as it was made; returns what ends it."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    folder = tempfile.TemporaryDirectory()
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")  # there may be no other network, and nobody to talk to
    os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed asks for it
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=f"file://{folder.name}/store", rank=0, world_size=1)

    def close():
        dist.destroy_process_group()
        folder.cleanup()

    return close


def keep_group(device):
    """Make the group unless there is one, until the process ends: for a peer that keeps the first that it saw."""
    import torch.distributed as dist

    if not dist.is_initialized():
        atexit.register(open_group(device))
