"""Keeps the modes of a thread and of the process that code of the user's has changed in a unit from other units."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeAlias

import torch

from hydra_engine.devices import AUTOCAST_KINDS

Mode: TypeAlias = "tuple[Any, Any]"  # its getter and its setter

_SMALLEST = sys.float_info.min * sys.float_info.epsilon  # a zero where such numbers are flushed, which has no getter
_OF_THREAD: Sequence[Mode] = (
    (torch.is_grad_enabled, torch.set_grad_enabled),
    *((partial(torch.is_autocast_enabled, k), partial(torch.set_autocast_enabled, k)) for k in AUTOCAST_KINDS),
    (torch.get_num_threads, torch.set_num_threads),
    (lambda: _SMALLEST * 1.0 == 0.0, torch.set_flush_denormal),
)
_OF_PROCESS: Sequence[Mode] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda found: torch.use_deterministic_algorithms(found[0], warn_only=found[1]),
    ),
)


def _modes(kinds: Sequence[Mode]) -> list[Any]:
    return [get() for get, _ in kinds]


def _put_back(kinds: Sequence[Mode], before: Sequence[Any]) -> None:
    for (get, set_mode), mode in zip(kinds, before, strict=True):
        if get() != mode:
            set_mode(mode)


def put_back(before: Sequence[Any]) -> None:
    """Set the thread's modes to those that a unit began with."""
    _put_back(_OF_THREAD, before)


class UnitModes:
    """Modes that each unit begins with: the thread's own, and the process's from before any unit.

    Those of the process are put back once no unit runs: another one's layer may have set them for an operation.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._num_units = 0
        self._of_process: list[Any] = []

    def begin(self) -> Sequence[Any]:
        """Note that a unit begins; return its thread's modes. Some microseconds."""
        with self._mutex:
            if not self._num_units:
                self._of_process = _modes(_OF_PROCESS)
            self._num_units += 1
        return _modes(_OF_THREAD)

    def end(self, before: Sequence[Any]) -> None:
        """Note that a unit is over, and put modes back."""
        put_back(before)
        with self._mutex:
            self._num_units -= 1
            if not self._num_units:
                _put_back(_OF_PROCESS, self._of_process)


UNIT_MODES = UnitModes()  # the process's, as the modes are
