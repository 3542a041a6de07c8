"""Keeps the modes of a thread and of the process that code of the user's has changed in a unit from other units."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch

from hydra_engine.devices import AUTOCAST_KINDS

ThreadModes: TypeAlias = "tuple[Any, ...]"

_SMALLEST = sys.float_info.min * sys.float_info.epsilon  # a zero where such numbers are flushed, which has no getter


def _of_thread() -> ThreadModes:
    is_autocast = torch.is_autocast_enabled
    kinds = [is_autocast(kind) for kind in AUTOCAST_KINDS]
    return torch.is_grad_enabled(), torch.get_num_threads(), _SMALLEST * 1.0 == 0.0, *kinds


def _of_process() -> ThreadModes:
    return torch.get_default_dtype(), torch.get_deterministic_debug_mode()


_SET_IN_THREAD: Sequence[Callable[[Any], Any]] = (
    torch.set_grad_enabled,
    torch.set_num_threads,
    torch.set_flush_denormal,
    *(partial(torch.set_autocast_enabled, kind) for kind in AUTOCAST_KINDS),
)
_SET_IN_PROCESS: Sequence[Callable[[Any], Any]] = (torch.set_default_dtype, torch.set_deterministic_debug_mode)


def _set_all(setters: Sequence[Callable[[Any], Any]], modes: ThreadModes, before: ThreadModes) -> None:
    for set_mode, mode, was in zip(setters, modes, before, strict=True):
        if mode != was:
            set_mode(was)


def put_back(before: ThreadModes) -> None:
    """Set the thread's modes to those that a unit began with."""
    if (modes := _of_thread()) != before:
        _set_all(_SET_IN_THREAD, modes, before)


class UnitModes:
    """ThreadModes that each unit begins with: the thread's own, and the process's from before any unit.

    Those of the process are put back once no unit runs: another one's layer may have set them for an operation.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._num_units = 0
        self._of_process: ThreadModes = ()

    def begin(self) -> ThreadModes:
        """Note that a unit begins; return its thread's modes. Some microseconds."""
        with self._mutex:
            if not self._num_units:
                self._of_process = _of_process()
            self._num_units += 1
        return _of_thread()

    def end(self, before: ThreadModes) -> None:
        """Note that a unit is over, and put modes back."""
        put_back(before)
        with self._mutex:
            self._num_units -= 1
            if not self._num_units and (modes := _of_process()) != self._of_process:
                _set_all(_SET_IN_PROCESS, modes, self._of_process)


UNIT_MODES = UnitModes()  # the process's, as the modes are
