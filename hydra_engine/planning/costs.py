"""What tasks, devices and the host take, for a simulation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hydra_engine.schedule import BACKWARD, FORWARD, FUSED, training_chain
from partitioners.plain_numbers import finite_number, make_plain, plain, whole_number


# More than 15 attributes: as those of ModelTask, they are figures of their own, which a caller names one by one.
@dataclass(frozen=True, kw_only=True)
class TaskCost:
    """What a task takes.

    Args:
        name: of the task; unique in a simulation.
        unit_s: seconds of each unit of a step, in order, on a device of speed 1: f0 ... fb(n-1) ... b0; as many
            backward units less as lower shards have nothing to train.
        num_steps: steps that it trains.
        num_shards: 0: the fewest that so many units make.
        load_bytes: of each shard's parameters, as they cross the link; one number for all shards alike.
        boundary_bytes: of what enters each shard, and of its gradient; one number for all alike.
        gradient_bytes: of each shard's gradients.
        update_s: seconds of each shard's optimizer step on the host.
        commit_s: seconds of a step's commit on the host.
        read_s: seconds of reading a batch; the next one is read while one is computed.
        setup_s: seconds of taking the task in, before a run begins. end_s: seconds of giving its model back.
        first_step_times: units of the first step take so many times as long: memory that is touched, and kernels that
            are loaded, for the first time.
        work_bytes: that units of each shard take on a device, beside its parameters.
        forward_bytes: the same of forwards that keep nothing; None: as much as work_bytes.
        graph_bytes: that a forward of each shard takes to keep what its backward needs; 0: it is run again.
        num_micro_batches: that a step is made of: it may be spread over as many devices.
        ordered: units whose micro-batches have to go one after the other, wherever they are computed: those of shards
            whose forward changes buffers.
        adds_on_devices: gradients of a step that is spread are added up on devices, not by the host.
        priority: as `ModelTask`'s. weight: as `ModelTask`'s. early_release: as `ModelTask`'s.
        homes: so many of the lowest shards are to have their homes on devices, as far as there is room.
        home_bytes: that each shard's home takes of a device, with its gradients; 0: its home is DRAM in any case.
        move_bytes: of home_bytes, those that cross the link as a home comes to a device or leaves it.
        home_update_s: seconds of each shard's optimizer step on the device of its home.
        frozen_bytes: of load_bytes, those that do not train: a shard at home loads no others.
    """

    name: str
    unit_s: Sequence[float]
    num_steps: int = 1
    num_shards: int = 0
    load_bytes: Sequence[float] | float = 0
    boundary_bytes: Sequence[float] | float = 0
    gradient_bytes: Sequence[float] | float = 0
    update_s: Sequence[float] | float = 0.0
    commit_s: float = 0.0
    read_s: float = 0.0
    setup_s: float = 0.0
    end_s: float = 0.0
    first_step_times: float = 1.0
    work_bytes: Sequence[float] | float = 0
    forward_bytes: Sequence[float] | float | None = None
    graph_bytes: Sequence[float] | float = 0
    num_micro_batches: int = 1
    ordered: frozenset[tuple[str, int]] = frozenset()
    adds_on_devices: bool = False
    priority: int = 0
    weight: float = 1.0
    early_release: bool | str = False
    homes: int = 0
    home_bytes: Sequence[float] | float = 0
    move_bytes: Sequence[float] | float = 0
    home_update_s: Sequence[float] | float = 0.0
    frozen_bytes: Sequence[float] | float = 0

    def __post_init__(self) -> None:
        make_plain(self)
        if not len(self.unit_s):
            raise ValueError(f"unit_s of {self.name}: empty; give the seconds of each unit of a step")
        if self.num_shards == 0:
            object.__setattr__(self, "num_shards", len(self.unit_s) // 2 + 1)
        if not self.num_shards <= len(self.unit_s) < 2 * self.num_shards:
            raise ValueError(
                f"num_shards of {self.name}: {self.num_shards} with {len(self.unit_s)} units, limit: from a half of "
                f"them to all; each shard has a forward, and those from the lowest that trains on a backward"
            )
        by_shard = ["load_bytes", "boundary_bytes", "gradient_bytes", "update_s", "work_bytes", "graph_bytes"]
        by_shard += ["home_bytes", "move_bytes", "home_update_s", "frozen_bytes"]
        if self.forward_bytes is not None:
            by_shard.append("forward_bytes")
        for name in ("unit_s", "commit_s", "read_s", "setup_s", "end_s", *by_shard):
            value = getattr(self, name)
            values = [value] if isinstance(value, (int, float)) else [*map(plain, value)]
            if not all(_is_number(each) and 0 <= each < math.inf for each in values):
                raise ValueError(f"{name} of {self.name}: {value!r}, limit: finite numbers, at least 0")
            if not isinstance(value, (int, float)):
                object.__setattr__(self, name, tuple(values))
            if name in by_shard and len(values) not in (1, self.num_shards):
                raise ValueError(
                    f"{name} of {self.name}: {len(values)} values for {self.num_shards} shards; give one for each, or "
                    f"one number for all"
                )
        for name in ("num_steps", "num_micro_batches"):
            whole_number(f"{name} of {self.name}", getattr(self, name))
        whole_number(f"homes of {self.name}", self.homes, 0)
        if self.homes and self.early_release:
            raise ValueError(f"homes of {self.name}: {self.homes} with early_release; leave out one")
        times = self.first_step_times
        if not (_is_number(times) and 1 <= times < math.inf):
            raise ValueError(f"first_step_times of {self.name}: {times!r}, limit: a finite number, at least 1")
        if not (_is_number(self.weight) and self.weight > 0):
            raise ValueError(f"weight of {self.name}: {self.weight!r}, limit: above 0")
        object.__setattr__(self, "ordered", frozenset(self.ordered))
        if not self.ordered <= set(self.chain):
            unknown = sorted(map(str, self.ordered - set(self.chain)))
            raise ValueError(f"ordered of {self.name}: {', '.join(unknown)} not among its units: {self.chain}")

    @property
    def lowest_backward(self) -> int:
        """The lowest shard that has something to train."""
        return 2 * self.num_shards - 1 - len(self.unit_s)

    @property
    def chain(self) -> tuple[tuple[str, int], ...]:
        """(kind, shard) of a step's units, in order."""
        return training_chain(self.num_shards, self.lowest_backward)

    @property
    def step_s(self) -> float:
        """Seconds of a step's units."""
        return sum(self.unit_s)

    @property
    def least_step_s(self) -> float:
        """Seconds of a step's units where every forward that can be is kept for its backward."""
        unit_s = dict(zip(self.chain, self.unit_s, strict=True))
        again = [j for kind, j in self.chain if kind == BACKWARD and self.of_shard("graph_bytes", j)]
        return sum(self.unit_s) - sum(min(unit_s[FORWARD, j], unit_s[BACKWARD, j]) for j in again)

    def of_shard(self, name: str, shard: int) -> float:
        """One of the figures by shard."""
        value = getattr(self, name)
        return float(value if isinstance(value, (int, float)) else value[shard])

    def unit_work_bytes(self, kind: str, shard: int) -> float:
        """What a unit takes on a device beside its parameters."""
        is_light = kind == FORWARD and self.forward_bytes is not None and not self.of_shard("graph_bytes", shard)
        return self.of_shard("forward_bytes" if is_light else "work_bytes", shard)

    def input_bytes(self, kind: str, shard: int) -> float:
        """What a unit starts from: the boundary below it, and in a backward the gradient from above."""
        num_bytes = self.of_shard("boundary_bytes", shard)
        return num_bytes + (self.of_shard("boundary_bytes", shard + 1) if kind == BACKWARD else 0.0)

    def output_bytes(self, kind: str, shard: int) -> float:
        """What a unit leaves beside gradients of parameters: the boundary above it, or the gradient of that below."""
        if kind == FORWARD:
            return self.of_shard("boundary_bytes", shard + 1)
        assert kind in (FUSED, BACKWARD)
        return self.of_shard("boundary_bytes", shard) if shard > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class DeviceCost:
    """What a device takes.

    Args:
        speed: units take their seconds divided by this.
        load_bytes_per_s: of the link from DRAM; None: copies take no time.
        store_bytes_per_s: of the link to DRAM.
        unit_s: seconds of each unit beside its own: launches, threads that wake each other.
        variation: of units' seconds from one to the next: the standard deviation of their logarithm.
        memory_bytes: what units leave of it keeps shards, boundaries and graphs, until what is needed sooner takes it;
            None: nothing stays.
        copies_compute: copies keep a core of the host busy, as those of an emulated device without a link do.
    """

    speed: float = 1.0
    load_bytes_per_s: float | None = None
    store_bytes_per_s: float | None = None
    unit_s: float = 0.0
    variation: float = 0.0
    memory_bytes: float | None = None
    copies_compute: bool = False

    def __post_init__(self) -> None:
        make_plain(self)
        for name in ("speed", "load_bytes_per_s", "store_bytes_per_s", "memory_bytes"):
            value = getattr(self, name)
            if not (value is None and name != "speed") and not (_is_number(value) and 0 < value < math.inf):
                raise ValueError(f"{name}: {value!r}, limit: finite, above 0")
        for name in ("unit_s", "variation"):
            finite_number(name, getattr(self, name))


class DeviceChange(NamedTuple):
    """A device goes, or comes back.

    Attributes:
        at_s: seconds of the run. device: its index. is_in: False: it goes, once its unit is computed.
    """

    at_s: float
    device: int
    is_in: bool


def in_order(changes: Sequence[DeviceChange], num_devices: int) -> list[DeviceChange]:
    """Return changes by their time, of devices that are all in at first. Raises ValueError for what cannot be."""
    is_in = [True] * num_devices
    for at_s, device, _ in changes:
        if not (_is_number(at_s) and 0 <= at_s < math.inf):
            raise ValueError(f"at_s of a change: {at_s!r}, limit: a finite number, at least 0")
        if device not in range(num_devices):
            raise ValueError(f"device of a change: {device!r}, limit: an index of the devices, 0 to {num_devices - 1}")
    ordered = sorted((DeviceChange(*change) for change in changes), key=lambda change: change.at_s)
    for change in ordered:
        if is_in[change.device] == change.is_in:
            state, first = ("in", "go before it comes") if change.is_in else ("out", "come before it goes")
            text = f"device {change.device} is {state} already: let it {first}; all are in at first"
            raise ValueError(f"change at {change.at_s:g} s: {text}")
        is_in[change.device] = change.is_in
    return ordered


@dataclass(frozen=True, kw_only=True)
class HostCost:
    """What the host has.

    Args:
        optimizer_threads: commits and updates at a time.
        cores: shared by the units of emulated devices, their copies and the optimizer; None: enough for all.
        shares_dram: one update alone keeps DRAM busy, so that n at a time take n times as long each.
    """

    optimizer_threads: int = 1
    cores: float | None = None
    shares_dram: bool = False

    def __post_init__(self) -> None:
        make_plain(self)
        whole_number("optimizer_threads", self.optimizer_threads)
        if self.cores is not None and not (_is_number(self.cores) and self.cores > 0):
            raise ValueError(f"cores: {self.cores!r}, limit: above 0; None for enough")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float))
