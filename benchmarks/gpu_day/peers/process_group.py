"""A process group, of one process for peers that do not go without, or of several."""

import atexit
import os
import tempfile


def open_group(device, rank=0, world_size=1, store=None):
    """Make the group, in place of one that a trainer left which failed as it was made; returns what ends it.

    store: a path that all processes of a group of several name.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    folder = tempfile.TemporaryDirectory()
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")  # there may be no other network, and nobody to talk to
    store = store or f"{folder.name}/store"
    os.environ.setdefault("LOCAL_RANK", str(rank))  # DeepSpeed asks for it
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world_size)

    def close():
        dist.destroy_process_group()
        folder.cleanup()

    return close


def keep_group(device):
    """Make the group unless there is one, until the process ends: for a peer that keeps the first that it saw."""
    import torch.distributed as dist

    if not dist.is_initialized():
        atexit.register(open_group(device))
