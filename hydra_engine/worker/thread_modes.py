"""Settings of a thread or of the process that a unit's code may change, and that are put back after it.

Layers of other shards run in other threads, and at other times, and layers of other tasks in between.
"""

from __future__ import annotations

import sys
from typing import Any, TypeAlias

import torch

ThreadModes: TypeAlias = "tuple[Any, ...]"

_SMALLEST = sys.float_info.min * sys.float_info.epsilon  # a zero where such numbers are flushed, which has no getter
_SETTERS: tuple[Any, ...] = (  # in the order of `thread_modes`
    torch.set_grad_enabled,
    lambda is_enabled: torch.set_autocast_enabled("cpu", is_enabled),
    torch.set_num_threads,
    torch.set_flush_denormal,
    torch.set_default_dtype,
    torch.use_deterministic_algorithms,
)
_NUM_OF_PROCESS = 2  # the last ones; the others are the thread's


def thread_modes() -> ThreadModes:
    """Return the modes of this thread and of the process. A microsecond."""
    return (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_num_threads(),
        _SMALLEST * 1.0 == 0.0,
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
    )


def put_back(before: ThreadModes, *, of_process: bool = True) -> None:
    """Set the modes as they were, those of the process too."""
    now = thread_modes()
    if not of_process:
        now = (*now[:-_NUM_OF_PROCESS], *before[-_NUM_OF_PROCESS:])
    for set_mode, old, new in zip(_SETTERS, before, now, strict=True):
        if new != old:
            set_mode(old)
