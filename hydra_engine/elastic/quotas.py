"""Quotas of groups of tasks: how many devices each may count on, checked before any work."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from hydra_engine.elastic.split import as_int


@dataclass(frozen=True)
class Quota:
    """Devices of a group of tasks.

    Args:
        devices: that it gets whenever it asks for them. What it does not use, others borrow, and give back at the end
            of the unit that runs there.
        minimum: of these, those that it gets before other groups get theirs, where fewer devices are in than all quotas
            together; with fewer than this in, its tasks wait. At most `devices`.
        maximum: devices that it never uses more of, though others be idle; None: it borrows what is idle.
    """

    devices: int
    minimum: int = 0
    maximum: int | None = None

    def __post_init__(self) -> None:
        for field in ("devices", "minimum", "maximum"):
            value = as_int(getattr(self, field))
            object.__setattr__(self, field, value)
            is_left_out = field == "maximum" and value is None
            if not is_left_out and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
                raise ValueError(f"{field}: {value!r}, limit: a whole number of devices, at least 0")
        if self.minimum > self.devices:
            raise ValueError(
                f"minimum: {self.minimum}, limit: at most devices={self.devices}, which are guaranteed; lower it"
            )
        if self.maximum is not None and self.maximum < max(1, self.devices):
            raise ValueError(
                f"maximum: {self.maximum}, limit: at least devices={self.devices}, and at least 1; raise it"
            )


class Asking(Protocol):
    """Options of a task that say which devices it may have."""

    name: str | None
    group: str | None
    min_devices: int
    max_devices: int | None
    preemptible: bool


class Quotas:
    """Quotas of an orchestrator's groups. A task without a group is in one that has no quota, with all others like it.

    Args:
        quotas: an int or a `Quota` for each group; None: there are none, and no task may be in a group.
        tasks: the tasks.
        num_devices: gives the most that there may be.
        not_over: gives the tasks of the orchestrator that count on devices now, or will again.
    """

    def __init__(
        self,
        quotas: object,
        tasks: Iterable[Asking],
        num_devices: Callable[[], int],
        not_over: Callable[[], Iterable[Asking]],
    ) -> None:
        if not (quotas is None or isinstance(quotas, Mapping)):
            raise TypeError(f"quotas: {quotas!r} maps no groups to numbers of devices; give {{'a': 2, 'b': 2}}")
        self._num_devices = num_devices
        self._not_over = not_over
        self.are_given = quotas is not None
        self._quotas: dict[str | None, Quota] = {}  # by group
        for group, quota in (quotas or {}).items():
            self._quotas[group] = found = self._checked(group, quota)
            self._check_total(group, found, self._quotas)
        tasks = list(tasks)
        self._num_tasks = Counter(getattr(task, "group", None) for task in tasks)  # by group
        self._coming: list[Asking] = []  # being planned, and not in the orchestrator yet
        self._changing = threading.Lock()
        for task in tasks:
            self._check(task, self.of(task))
        empty = [group for group in self._quotas if all(task.group != group for task in tasks)]
        if empty:
            raise ValueError(
                f"quotas: group {empty[0]!r} has no task, limit: groups of the tasks that are given; leave it out, and "
                f"give add_task(quota=) with its first one"
            )

    def of(self, task: Asking) -> Quota | None:
        return self._quotas.get(task.group)

    @contextmanager
    def coming(self, task: Asking, quota: object) -> Iterator[None]:
        """Check a task that comes, and take in the quota of its group, if it brings one; not where the body raises."""
        with self._changing:
            brought = None if quota is None else self._brought(task, quota)
            found = brought or self.of(task)
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

    def _brought(self, task: Asking, quota: object) -> Quota:
        """Return the quota of a group that comes with a task."""
        if not self.are_given or task.group is None or task.group in self._quotas:
            raise ValueError(
                f"quota: {quota!r} for {_name(task)} of group {task.group!r}, limit: a group that is none of "
                f"{_known(self._quotas)}, in an orchestrator with quotas= (or {{}}); leave it out"
            )
        return self._checked(task.group, quota)

    def _check(self, task: Asking, quota: Quota | None) -> None:
        """Refuse a task of a group without a quota, and one that could never begin; `quota`: of its group."""
        if task.group is not None and quota is None:
            raise ValueError(
                f"{_name(task)}: group {task.group!r} has no quota, known: {_known(self._quotas)}; name it in quotas=, "
                f"or give add_task(quota=) with its first task"
            )
        limits = {"the devices that there may be": self._num_devices()}
        if quota is not None and quota.maximum is not None:
            limits["its group's maximum"] = quota.maximum
        if not task.preemptible and (quota is None or not quota.devices):
            raise ValueError(
                f"{_name(task)}: preemptible=False, limit: a group with a quota of at least 1, which the task keeps "
                f"to; leave it out, or give its group a quota"
            )
        if not task.preemptible and quota is not None:
            limits["its group's quota, as it is not preemptible"] = quota.devices
        least = task.min_devices
        for what, most in limits.items():
            if least > most:
                raise ValueError(f"{_name(task)}: min_devices={least}, limit: {most}, {what}; lower it, or raise that")

    def _checked(self, group: object, quota: object) -> Quota:
        if not isinstance(group, str) or not group:
            raise TypeError(f"quotas: {group!r} is no name of a group; give a str that is not empty")
        if not isinstance(quota, Quota):
            quota = as_int(quota)
            if isinstance(quota, bool) or not isinstance(quota, int):
                raise TypeError(
                    f"quotas: {quota!r} for group {group!r} is no number of devices; give an int, or a Quota"
                )
            try:
                quota = Quota(quota)
            except ValueError as error:
                raise ValueError(f"quotas: group {group!r}: {error}") from None
        return quota

    def _check_total(self, group: str | None, quota: Quota, groups: Container[str | None]) -> None:
        """Refuse a group whose quota is more than what is there beside those of the other groups that count."""
        others = [each.devices for name, each in self._quotas.items() if name in groups and name != group]
        total, most = quota.devices + sum(others), self._num_devices()
        if total > most:
            raise ValueError(
                f"quotas: {total} devices with group {group!r}, limit: {most}, the devices that there may be; lower a "
                f"quota, or give more devices, or a larger max_devices"
            )


def _known(quotas: Iterable[str | None]) -> str:
    return ", ".join(map(repr, quotas)) or "no group"


def _name(task: Asking) -> str:
    return "a task" if task.name is None else f"task {task.name!r}"
