"""Spans and counters add up, from any number of threads."""

import threading
from itertools import pairwise

import pytest

from hydra_engine import trace as trace_module
from hydra_engine.trace import Trace

PATIENCE_S = 30


class Clock:
    """Time that passes when told."""

    def __init__(self):
        self.now_s = 1000.0

    def perf_counter(self):
        return self.now_s


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(trace_module, "time", clock)
    return clock


def test_span_has_its_times_since_the_trace_began(clock):
    trace = Trace()
    clock.now_s += 2
    with trace.span("cpu:0", "load", "bert.f2@5"):
        clock.now_s += 3
    assert trace.spans() == [("cpu:0", "load", "bert.f2@5", 2.0, 5.0)]
    assert trace.now_s() == 5.0


def test_span_of_a_body_that_raises_is_recorded(clock):
    def fails():
        clock.now_s += 1
        raise ValueError("boom")

    trace = Trace()
    with pytest.raises(ValueError, match="boom"), trace.span("cpu:0", "compute", "unit"):
        fails()
    assert trace.busy_s("cpu:0", "compute") == 1.0


def test_spans_are_in_the_order_of_their_ends(clock):
    trace = Trace()
    with trace.span("cpu:0", "compute", "outer"):
        clock.now_s += 1
        with trace.span("cpu:0", "load", "inner"):
            clock.now_s += 1
    assert [span.label for span in trace.spans()] == ["inner", "outer"]


def test_busy_time_and_bytes_add_up_by_device_and_lane(clock):
    trace = Trace()
    for device, lane, seconds in (("a", "load", 1), ("a", "load", 2), ("a", "store", 4), ("b", "load", 8)):
        with trace.span(device, lane, "unit"):
            clock.now_s += seconds
        trace.count_bytes(device, lane, seconds * 10)
    assert [trace.busy_s(*key) for key in (("a", "load"), ("a", "store"), ("b", "load"))] == [3, 4, 8]
    assert [trace.bytes_moved(*key) for key in (("a", "load"), ("a", "store"), ("b", "load"))] == [30, 40, 80]


def test_lane_that_did_nothing_has_nothing():
    assert Trace().busy_s("a", "load") == 0
    assert Trace().bytes_moved("a", "load") == 0
    assert Trace().spans() == []


def test_totals_stay_when_old_spans_go(clock, monkeypatch):
    monkeypatch.setattr(trace_module, "MAX_SPANS", 3)
    trace = Trace()
    for number in range(10):
        with trace.span("a", "load", str(number)):
            clock.now_s += 1
    assert [span.label for span in trace.spans()] == ["7", "8", "9"]
    assert trace.busy_s("a", "load") == 10


def test_memory_in_use_is_kept_with_its_moments_the_last_of_it(clock, monkeypatch):
    monkeypatch.setattr(trace_module, "MAX_SPANS", 3)
    trace = Trace()
    for number in range(5):
        clock.now_s += 1
        trace.note_memory("a", number)
    assert [(used.device, used.used_bytes) for used in trace.memory()] == [("a", 2), ("a", 3), ("a", 4)]
    assert [after.at_s - before.at_s for before, after in pairwise(trace.memory())] == [1, 1]


def test_spans_that_are_handed_out_are_the_callers():
    trace = Trace()
    with trace.span("a", "load", "unit"):
        pass
    trace.spans().clear()
    assert len(trace.spans()) == 1


def test_nothing_is_lost_between_threads():
    trace, start = Trace(), threading.Barrier(4)

    def work():
        start.wait(PATIENCE_S)
        for _ in range(200):
            with trace.span("a", "load", "unit"):
                trace.count_bytes("a", "load", 3)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(trace.spans()) == 800
    assert trace.bytes_moved("a", "load") == 2400
    assert trace.busy_s("a", "load") == pytest.approx(sum(span.end_s - span.start_s for span in trace.spans()))
