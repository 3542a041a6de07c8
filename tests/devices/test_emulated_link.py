"""An emulated link by a clock of the test's own: copies take their bytes' time, and urgent ones stop others."""

import threading
import time
from unittest import mock

import pytest

from hydra_engine.devices import lanes
from hydra_engine.devices.lanes import EmulatedLink

BYTES_PER_S = 1000
WAKES_LATE_S = 2**-14  # a power of two, so that sums are exact


class Clock:
    """Stands in for `time`, and for the condition that the link waits by: only waiting takes time."""

    def __init__(self):
        self.now_s = 0.0
        self.late_s = WAKES_LATE_S
        self.comes_after_s = None  # so long into the next wait an urgent copy comes
        self.urgent_s = 0.0  # that it takes

    def perf_counter(self):
        return self.now_s

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def notify_all(self):
        pass

    def wait(self, seconds):
        if self.comes_after_s is not None and self.comes_after_s < seconds:
            self.now_s += self.comes_after_s
            self.comes_after_s = None
            self.link._num_urgent += 1
        else:
            self.now_s += seconds + self.late_s

    def wait_for(self, is_my_turn):
        if not is_my_turn():  # the urgent copy passes
            self.now_s += self.urgent_s
            self.link._num_urgent -= 1
        assert is_my_turn()


@pytest.fixture
def clock():
    clock = Clock()
    clock.link = EmulatedLink(BYTES_PER_S)
    clock.link._changed = clock
    with mock.patch.object(lanes, "time", clock):
        yield clock


def test_a_copy_takes_its_bytes_time_less_what_was_spent(clock):
    clock.link.spend(500, 0.25, urgent=False)
    assert clock.now_s == 0.25 + WAKES_LATE_S


def test_one_that_took_longer_than_the_link_does_not_wait(clock):
    clock.link.spend(500, 0.75, urgent=True)
    assert clock.now_s == 0


def test_a_copy_stops_for_an_urgent_one_at_once_and_goes_on_after_it(clock):
    clock.late_s, clock.comes_after_s, clock.urgent_s = 0.0, 0.25, 4.0
    clock.link.spend(1000, 0.0, urgent=False)
    assert clock.now_s == 0.25 + 4.0 + 0.75


def test_an_urgent_copy_stops_for_none(clock):
    clock.late_s, clock.comes_after_s, clock.urgent_s = 0.0, 0.25, 4.0
    clock.link.spend(1000, 0.0, urgent=True)
    assert clock.now_s == 1.0


class Ahead:
    """Stands in for `time`, which a test may set forward."""

    by_s = 0.0

    def perf_counter(self):
        return time.perf_counter() + self.by_s


def test_urgent_copies_of_other_threads_pass_one_that_takes_a_day():
    ahead, link = Ahead(), EmulatedLink(BYTES_PER_S)

    def spending(num_bytes, urgent):
        return threading.Thread(target=link.spend, args=(num_bytes, 0.0), kwargs={"urgent": urgent}, daemon=True)

    with mock.patch.object(lanes, "time", ahead):
        day = spending(86_400 * BYTES_PER_S, False)
        day.start()
        while not link._is_busy:
            pass
        urgent = [spending(1, True) for _ in range(4)]
        for thread in urgent:
            thread.start()
        for thread in urgent:
            thread.join(timeout=60)
        assert [thread.is_alive() for thread in (day, *urgent)] == [True, False, False, False, False]
        while not link._is_busy:  # again
            pass
        ahead.by_s = 100_000.0
        with link._changed:
            link._changed.notify_all()
        day.join(timeout=60)
        assert not day.is_alive()
