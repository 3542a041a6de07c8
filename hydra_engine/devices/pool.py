"""Devices of an orchestrator: those that its user names, which are in, how many may fail, and what groups count on."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from hydra_engine.devices.cuda import KNOWN_NAMES, CudaDevice
from hydra_engine.devices.device import DeviceSpec
from hydra_engine.devices.emulated import EmulatedDevice
from hydra_engine.devices.page_locked import PageLocked
from hydra_engine.system import HostMemory, dram
from hydra_engine.tasks import ModelTask
from partitioners.plain_numbers import plain


def host_memory(devices: Sequence[DeviceSpec]) -> HostMemory:
    """Return the memory for what crosses the links of these devices."""
    first = next((device.index for device in devices if isinstance(device, CudaDevice)), None)
    return HostMemory() if first is None else PageLocked(first)


def resolve_devices(devices: Sequence[DeviceSpec | str] | None = None) -> list[DeviceSpec]:
    """Return the devices that a run uses: those named, or else every GPU, or one emulated device of half the free DRAM.

    Raises TypeError and ValueError for what is no device, RuntimeError for a GPU that is not there.
    """
    if devices is None:
        return [*CudaDevice.every()] or [EmulatedDevice(max(1, dram.available_dram_bytes() // 2))]
    if isinstance(devices, str) or not isinstance(devices, Sequence):
        raise TypeError(f"devices: {devices!r} is not a list; give a list such as [EmulatedDevice(memory='64MiB')]")
    if not devices:
        raise ValueError("devices: empty list; give at least one device, or leave it out")
    resolved = [resolve_device(device) for device in devices]
    names = [device.name for device in resolved if isinstance(device, CudaDevice)]
    if names and len(names) < len(resolved):
        raise ValueError(
            f"devices: {resolved} has CUDA devices and emulated ones, whose units take other bytes; give either kind"
        )
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"devices: {name!r} is there {names.count(name)} times; name each device once")
    return resolved


def resolve_device(device: DeviceSpec | str) -> DeviceSpec:
    """Return a device, or the one of this name."""
    if isinstance(device, DeviceSpec):
        return device
    if not isinstance(device, str):
        raise TypeError(
            f"devices: {device!r} is a {type(device).__name__}, not an EmulatedDevice, a CudaDevice or a string; "
            f"give EmulatedDevice(memory='64MiB'), or CudaDevice(0)"
        )
    named = CudaDevice.named(device)
    if named is None:
        raise ValueError(f"devices: {device!r}, known: {KNOWN_NAMES} and EmulatedDevice(memory=...)")
    return named


class Place(Enum):
    """Places of a device, as `ModelOrchestrator.devices` names them."""

    IN = "in"  # units may run on it
    LEAVING = "leaving"  # nothing more begins on it, and what it has is still on its way
    OUT = "out"  # it has no memory and no threads of the run any more


class PoolLimits(NamedTuple):
    """Limits of a pool, checked."""

    min_devices: int
    max_devices: int | None
    max_failures: int

    @classmethod
    def checked(cls, min_devices: object, max_devices: object, max_failures: object, num_devices: int) -> PoolLimits:
        """Check an orchestrator's arguments, for a pool that begins with so many devices."""
        least = _whole("min_devices", min_devices, 1)
        most = None if max_devices is None else _whole("max_devices", max_devices, 1)
        if most is not None and least > most:
            raise ValueError(f"min_devices: {least}, limit: max_devices={most}; lower it, or raise the maximum")
        if most is not None and num_devices > most:
            raise ValueError(
                f"max_devices: {most} with {num_devices} devices given, limit: at least as many; raise it, or give "
                f"fewer devices"
            )
        return cls(least, most, _whole("max_failures", max_failures, 0))


def _whole(what: str, value: object, least: int) -> int:
    value = plain(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{what}: {value!r}, limit: a whole number, at least {least}")
    return value


@dataclass
class _Member:
    index: int
    spec: DeviceSpec
    place: Place = Place.IN


class DevicePool:
    """The devices, by name. From any thread.

    A device keeps its number for good, so one that was removed comes back under its name, with its figures.

    Args:
        specs: that are in from the beginning.
        limits: on how many there are, and fail.
    """

    def __init__(self, specs: Sequence[DeviceSpec], limits: PoolLimits) -> None:
        self.limits = limits
        self._changed = threading.Condition()
        self._members = {spec.name_at(index): _Member(index, spec) for index, spec in enumerate(specs)}
        self._num_failures = 0

    @property
    def first(self) -> DeviceSpec:
        """The first device that ever was in."""
        return next(iter(self._members.values())).spec

    @property
    def places(self) -> dict[str, Place]:
        """Place of each device that was ever in, by name."""
        return {name: member.place for name, member in list(self._members.items())}

    @property
    def specs(self) -> dict[int, DeviceSpec]:
        """Devices that are in, by number."""
        return {each.index: each.spec for each in list(self._members.values()) if each.place is Place.IN}

    def known(self, name: str) -> DeviceSpec | None:
        """Return the device of a name, if there ever was one."""
        member = self._members.get(name)
        return None if member is None else member.spec

    def add(self, spec: DeviceSpec, name: str | None = None) -> tuple[str, int | None]:
        """Let a device in, and return its name and number; None where it is still leaving, and has to be waited for.

        name: of one that was removed.

        Raises ValueError for one that is in, or one too many.
        """
        with self._changed:
            if name is None:  # one object may be several devices
                found = [(each.place is Place.IN, name) for name, each in self._members.items() if each.spec is spec]
                name = min(found)[1] if found else spec.name_at(self._next_index())
            member = self._members.get(name)
            if member is not None and member.place is Place.LEAVING:
                return name, None
            if member is not None and member.place is Place.IN:
                raise ValueError(f"add_device: {name!r} is in already, limit: each device once; see `devices`")
            self.check_room(1, "add_device")
            index = self._next_index() if member is None else member.index
            self._members[name] = _Member(index, spec)
            return name, index

    def wait_until_out(self, name: str) -> None:
        """Wait while a device is leaving."""
        with self._changed:
            self._changed.wait_for(lambda: self.places.get(name) is not Place.LEAVING)

    def check_room(self, num_more: int, what: str) -> None:
        """Refuse more devices than there may be."""
        num_in, most = len(self.specs), self.limits.max_devices
        if most is not None and num_in + num_more > most:
            raise ValueError(
                f"{what}: {num_in} devices are in, limit: max_devices={most}; remove one first, or raise it"
            )

    def remove(self, name: str, *, at_once: bool) -> int:
        """Let a device go, and return its number, also where it is leaving. at_once: nothing of it has to end first.

        Raises ValueError for a name that is not in.
        """
        with self._changed:
            member = self._members.get(name)
            if member is None or member.place is Place.OUT:
                known = ", ".join(repr(each) for each, place in self.places.items() if place is Place.IN)
                raise ValueError(f"remove_device: {name!r} is not in, limit: one of {known or 'none: no device is in'}")
            member.place = Place.OUT if at_once else Place.LEAVING
            self._changed.notify_all()
            return member.index

    def take_back(self, name: str, *, is_new: bool) -> None:
        """A device could not be opened: it is out, or was never here."""
        with self._changed:
            self._members[name].place = Place.OUT
            if is_new:
                del self._members[name]
            self._changed.notify_all()

    def left(self, index: int) -> None:
        """A device that was leaving is out."""
        with self._changed:
            for member in self._members.values():
                if member.index == index:
                    member.place = Place.OUT
            self._changed.notify_all()

    def all_left(self) -> None:
        """The run is over: nothing is on its way any more."""
        with self._changed:
            for member in self._members.values():
                if member.place is Place.LEAVING:
                    member.place = Place.OUT
            self._changed.notify_all()

    def fail(self, index: int) -> str:
        """Count a failure, and let the device go, if it is in. Return its name."""
        with self._changed:
            name, member = next((name, each) for name, each in self._members.items() if each.index == index)
            if member.place is Place.IN:
                member.place = Place.LEAVING
                self._num_failures += 1
            return name

    @property
    def may_go_on(self) -> bool:
        """True if a run has had no more failures than it may."""
        return self._num_failures <= self.limits.max_failures

    def begin(self) -> None:
        """Begin to count failures anew: a run begins."""
        self._num_failures = 0

    def _next_index(self) -> int:
        return 1 + max((each.index for each in self._members.values()), default=-1)


class Quotas:
    """Quotas of an orchestrator's groups. A task without a group is in one that has no quota, with all others like it.

    Args:
        quotas: devices of each group; None: there are none, and no task may be in a group.
        tasks: the tasks.
        num_devices: gives the most that there may be.
        not_over: gives the tasks of the orchestrator that count on devices now, or will again.
    """

    def __init__(
        self,
        quotas: object,
        tasks: Iterable[ModelTask],
        num_devices: Callable[[], int],
        not_over: Callable[[], Iterable[ModelTask]],
    ) -> None:
        if not (quotas is None or isinstance(quotas, Mapping)):
            raise TypeError(f"quotas: {quotas!r} maps no groups to numbers of devices; give {{'a': 2, 'b': 2}}")
        self._num_devices = num_devices
        self._not_over = not_over
        self.are_given = quotas is not None
        self._quotas: dict[str | None, int] = {}  # by group
        for group, quota in (quotas or {}).items():
            self._quotas[group] = found = self._checked(group, quota)
            self._check_total(group, found, self._quotas)
        tasks = list(tasks)
        self._num_tasks = Counter(getattr(task, "group", None) for task in tasks)  # by group
        self._coming: list[ModelTask] = []  # being planned, and not in the orchestrator yet
        self._changing = threading.Lock()
        for task in tasks:
            self._check(task, self.of(task))
        empty = [group for group in self._quotas if all(task.group != group for task in tasks)]
        if empty:
            raise ValueError(
                f"quotas: group {empty[0]!r} has no task, limit: groups of the tasks that are given; leave it out, and "
                f"give add_task(quota=) with its first one"
            )

    def of(self, task: ModelTask) -> int | None:
        return self._quotas.get(task.group)

    @contextmanager
    def coming(self, task: ModelTask, quota: object) -> Iterator[None]:
        """Check a task that comes, and take in the quota of its group, if it brings one; not where the body raises."""
        with self._changing:
            brought = None if quota is None else self._brought(task, quota)
            found = self.of(task) if brought is None else brought
            self._check(task, found)
            if found is not None:  # what groups had whose tasks are over is free
                self._check_total(task.group, found, {each.group for each in (*self._not_over(), *self._coming)})
            if brought is not None:
                self._quotas[task.group] = brought
            self._num_tasks[task.group] += 1
            self._coming.append(task)
        try:
            yield
        except BaseException:
            with self._changing:
                self._num_tasks[task.group] -= 1
                if not self._num_tasks[task.group]:
                    self._quotas.pop(task.group, None)  # nobody else counts on it
            raise
        finally:
            with self._changing:
                self._coming.remove(task)

    def _brought(self, task: ModelTask, quota: object) -> int:
        """Return the quota of a group that comes with a task."""
        if not self.are_given or task.group is None or task.group in self._quotas:
            raise ValueError(
                f"quota: {quota!r} for {_name(task)} of group {task.group!r}, limit: a group that is none of "
                f"{_known(self._quotas)}, in an orchestrator with quotas= (or {{}}); leave it out"
            )
        return self._checked(task.group, quota)

    def _check(self, task: ModelTask, quota: int | None) -> None:
        """Refuse a task of a group without a quota, and one that could never begin; `quota`: of its group."""
        if task.group is not None and quota is None:
            raise ValueError(
                f"{_name(task)}: group {task.group!r} has no quota, known: {_known(self._quotas)}; name it in quotas=, "
                f"or give add_task(quota=) with its first task"
            )
        least, most = task.min_devices, self._num_devices()
        if least > most:
            raise ValueError(
                f"{_name(task)}: min_devices={least}, limit: {most}, the devices that there may be; lower it, or raise "
                f"that"
            )

    def _checked(self, group: object, quota: object) -> int:
        if not isinstance(group, str) or not group:
            raise TypeError(f"quotas: {group!r} is no name of a group; give a str that is not empty")
        quota = plain(quota)
        if isinstance(quota, bool) or not isinstance(quota, int):
            raise TypeError(f"quotas: {quota!r} for group {group!r} is no number of devices; give an int")
        if quota < 0:
            raise ValueError(f"quotas: {quota} for group {group!r}, limit: at least 0")
        return quota

    def _check_total(self, group: str | None, quota: int, groups: Container[str | None]) -> None:
        """Refuse a group whose quota is more than what is there beside those of the other groups that count."""
        others = [each for name, each in self._quotas.items() if name in groups and name != group]
        total, most = quota + sum(others), self._num_devices()
        if total > most:
            raise ValueError(
                f"quotas: {total} devices with group {group!r}, limit: {most}, the devices that there may be; lower a "
                f"quota, or give more devices, or a larger max_devices"
            )


def _known(quotas: Iterable[str | None]) -> str:
    return ", ".join(map(repr, quotas)) or "no group"


def _name(task: ModelTask) -> str:
    return "a task" if task.name is None else f"task {task.name!r}"
