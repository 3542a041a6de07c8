"""GPUs of a machine that is shared with others: which ones are free, which a run takes, and which it gives up.

Decisions alone: no clock, no threads and no NVML here. `devices/watcher.py` looks, waits and acts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from threading import TIMEOUT_MAX
from typing import Any, NamedTuple

from partitioners import format_bytes, parse_bytes
from partitioners.plain_numbers import make_plain

# A GPU on which processes hold more than this, and none is shown, is not free: in a container, NVML leaves out those
# of other containers. The driver itself and a desktop take less.
UNSEEN_BYTES = 2**31


@dataclass(frozen=True, kw_only=True)
class SeenGpu:
    """A GPU as NVML shows it at one time.

    held_bytes: what this process holds of it. pids: of the processes that compute there; None: NVML does not tell.
    """

    total_bytes: int
    free_bytes: int
    held_bytes: int = 0
    pids: frozenset[int] | None = frozenset()


@dataclass(frozen=True, kw_only=True)
class FreeGpus:
    """Devices of `ModelOrchestrator(devices=FreeGpus())`: the GPUs that are free, at any time. "auto" is the same.

    Args:
        memory: a GPU is free where this process can have so much of it, in bytes or as text ("20GiB"), whoever else is
            there; of each GPU no more is used. None: a GPU is free where no other process computes, and all of it is
            used.
        poll_s: seconds between two looks.
        free_s: a GPU that was seen in use is taken once it has been free for so long. It is given up at once.
        grace_s: that the unit on a GPU which is given up has to finish; see `ModelOrchestrator.remove_device`.
        nvml: the module that asks NVML; None: pynvml, of nvidia-ml-py.
    """

    memory: int | str | None = None
    poll_s: float = 5.0
    free_s: float = 60.0
    grace_s: float | None = 30.0
    nvml: Any = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        make_plain(self)
        if self.memory is not None:
            parse_bytes(self.memory, "memory")
        _check_seconds("poll_s", self.poll_s, "more than 0, a day at most", lambda value: 0 < value <= 86400)
        _check_seconds("free_s", self.free_s, "0 or more")
        if self.grace_s is not None:
            _check_seconds("grace_s", self.grace_s, "0 or more, or None")

    def occupant(self, gpu: SeenGpu, own_pid: int) -> str | None:
        """Return in words what keeps this GPU from being free; None: it is free."""
        if self.memory is not None:
            asked, room = parse_bytes(self.memory, "memory"), gpu.free_bytes + gpu.held_bytes
            return None if room >= asked else f"{format_bytes(room)} free, {format_bytes(asked)} asked for"
        if others := _others(gpu, own_pid):
            return others
        unseen = gpu.total_bytes - gpu.free_bytes - gpu.held_bytes
        return None if unseen <= UNSEEN_BYTES else f"{format_bytes(unseen)} held by processes that NVML does not show"


def _check_seconds(
    what: str, value: Any, limit: str, is_right: Callable[[float], bool] = lambda value: value >= 0
) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (is_number and math.isfinite(value) and value <= TIMEOUT_MAX and is_right(value)):
        raise ValueError(f"{what}: {value!r}, limit: seconds, {limit}; give for example 5")


def _others(gpu: SeenGpu, own_pid: int) -> str | None:
    """Name the processes of others on a GPU.

    A driver may number processes as the host does, and not as our container: where this process holds memory and is
    not listed, it is one of those that are.
    """
    pids = gpu.pids or frozenset()
    others = pids - {own_pid}
    if gpu.held_bytes and others == pids:
        return f"{len(others) - 1} more processes than this one" if len(others) > 1 else None
    return f"process {min(others)}" + (f" and {len(others) - 1} more" if len(others) > 1 else "") if others else None


class Take(NamedTuple):
    """A GPU is free: let it join."""

    name: str


class GiveUp(NamedTuple):
    """Somebody else wants a GPU: let it go."""

    name: str
    occupant: str


class Watch:
    """Decides which GPUs join and leave a pool, over all runs of an orchestrator.

    A GPU is given up at the first look that shows it in use, and taken once it has been free for `free_s`: so it does
    not come and go with every short process. One that somebody else removed from the pool, or that failed, stays out
    until somebody adds it.
    """

    def __init__(self, settings: FreeGpus, max_devices: int | None = None) -> None:
        """`max_devices`: of the pool."""
        self._free_s = settings.free_s
        self._max_devices = max_devices
        self._free_since: dict[str, float] = {}  # GPUs that were free at every look since
        self._given_up: set[str] = set()  # and not back yet

    def begin(self) -> None:
        """Forget what was seen before a time without looks."""
        self._free_since.clear()

    def decide(self, now_s: float, occupants: Mapping[str, str | None], pool: Mapping[str, str]) -> list[Take | GiveUp]:
        """Return what is to change, given who is on each GPU, and its place in the pool: "in", "leaving" or "out".

        A GPU that is not in `occupants` was not seen, and nothing changes for it.
        """
        changes: list[Take | GiveUp] = []
        self._given_up -= {name for name, place in pool.items() if place == "in"}
        self._free_since = {
            name: self._free_since.get(name, now_s) for name, occupant in occupants.items() if occupant is None
        }
        num_in = sum(place != "out" for place in pool.values())
        for name, occupant in occupants.items():
            if occupant is not None and pool.get(name) == "in":
                self._given_up.add(name)
                changes.append(GiveUp(name, occupant))
            elif occupant is None and (name not in pool or (pool[name] == "out" and name in self._given_up)):
                has_room = self._max_devices is None or num_in < self._max_devices
                if has_room and now_s - self._free_since[name] >= self._free_s:
                    num_in += 1
                    self._given_up.discard(name)  # from now on, who takes it out means it
                    changes.append(Take(name))
        return changes

    def refused(self, name: str) -> None:
        """A GPU could not join: wait for `free_s` again."""
        self._free_since.pop(name, None)
        self._given_up.add(name)
