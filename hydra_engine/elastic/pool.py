"""Devices of an orchestrator: which are in, which leave, and how many may fail. No torch, no threads of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, NamedTuple, TypeVar

from hydra_engine.elastic.split import as_int

T = TypeVar("T")


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
    value = as_int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{what}: {value!r}, limit: a whole number, at least {least}")
    return value


@dataclass
class _Member(Generic[T]):
    index: int
    spec: T
    place: Place = Place.IN


class DevicePool(Generic[T]):
    """The devices, by name. From any thread.

    A device keeps its number for good, so one that was removed comes back under its name, with its figures.

    Args:
        specs: that are in from the beginning.
        name_of: the name of a device of this number.
        limits: on how many there are, and fail.
    """

    def __init__(self, specs: Sequence[T], name_of: Callable[[T, int], str], limits: PoolLimits) -> None:
        self.limits = limits
        self._name_of = name_of
        self._changed = threading.Condition()
        self._members = {name_of(spec, index): _Member(index, spec) for index, spec in enumerate(specs)}
        self._num_failures = 0

    @property
    def first(self) -> T:
        """The first device that ever was in."""
        return next(iter(self._members.values())).spec

    @property
    def places(self) -> dict[str, Place]:
        """Place of each device that was ever in, by name."""
        return {name: member.place for name, member in list(self._members.items())}

    @property
    def specs(self) -> dict[int, T]:
        """Devices that are in, by number."""
        return {each.index: each.spec for each in list(self._members.values()) if each.place is Place.IN}

    def known(self, name: str) -> T | None:
        """Return the device of a name, if there ever was one."""
        member = self._members.get(name)
        return None if member is None else member.spec

    def add(self, spec: T, name: str | None = None) -> tuple[str, int | None]:
        """Let a device in, and return its name and number; None where it is still leaving, and has to be waited for.

        name: of one that was removed.

        Raises ValueError for one that is in, or one too many.
        """
        with self._changed:
            if name is None:  # one object may be several devices
                found = [(each.place is Place.IN, name) for name, each in self._members.items() if each.spec is spec]
                name = min(found)[1] if found else self._name_of(spec, self._next_index())
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
