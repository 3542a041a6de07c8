"""Quotas of groups as tasks come and end: what a group counts on is free again once its tasks are over."""

from types import SimpleNamespace

import pytest

from hydra_engine.devices import Quotas
from tests.refused import refused


def task(group):
    return SimpleNamespace(name=None, group=group, min_devices=1, max_devices=None)


@pytest.fixture
def tasks():
    """Tasks that are not over; one of group "a" at first."""
    return [task("a")]


@pytest.fixture
def quotas(tasks):
    """Two of four devices are group "a"'s."""
    return Quotas({"a": 2}, tasks, lambda: 4, lambda: tasks)


def add(quotas, tasks, it, quota=None):
    with quotas.coming(it, quota):
        tasks.append(it)


def test_devices_of_a_group_that_is_over_are_free(quotas, tasks):
    add(quotas, tasks, task("b"), 2)
    with refused(says="'c' 6 4"):
        add(quotas, tasks, task("c"), 2)
    tasks.pop(1)
    for name in "cdef":  # one after the other, as a service has them
        add(quotas, tasks, task(name), 2)
        tasks.pop(1)
    add(quotas, tasks, task("g"), 1)
    add(quotas, tasks, task("h"), 1)
    assert [each.group for each in tasks] == ["a", "g", "h"]


def test_a_group_that_comes_again_has_its_quota_if_that_is_free(quotas, tasks):
    add(quotas, tasks, task("b"), 2)
    tasks.pop(1)
    add(quotas, tasks, task("b"))
    add(quotas, tasks, task("b"))  # its own devices are not counted twice
    del tasks[1:]
    add(quotas, tasks, task("c"), 1)
    with refused(says="'b' 5 4"):
        add(quotas, tasks, task("b"))
    tasks.pop(1)
    add(quotas, tasks, task("b"))
    assert quotas.of(task("b")) == 2


def test_a_group_whose_first_task_is_being_planned_counts(quotas, tasks):
    with quotas.coming(task("b"), 2), refused(says="'c' 5 4"):
        add(quotas, tasks, task("c"), 1)
    with pytest.raises(ZeroDivisionError), quotas.coming(task("d"), 2):
        raise ZeroDivisionError
    add(quotas, tasks, task("e"), 2)
