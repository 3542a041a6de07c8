"""Trace files are as the Trace Event Format says, and have every span of the run.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU: what `check` asks for, in its order.
"""

import json
from collections import defaultdict
from itertools import pairwise
from numbers import Real

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hydra_engine import DeviceReport, EmulatedDevice, ModelTask, Report, TaskReport
from hydra_engine.pictures import trace
from hydra_engine.pictures.trace_events import trace_events
from hydra_engine.trace import MemoryUse, Span
from tests import exact

METADATA = {  # by name: the argument that it must have, and of what type
    "process_name": ("name", str),
    "process_labels": ("labels", str),
    "process_sort_index": ("sort_index", int),
    "thread_name": ("name", str),
    "thread_sort_index": ("sort_index", int),
}
PHASES = {"X", "i", "C", "M"}  # of the format's kinds of events, those that we write


def check(state):
    """Hold a trace to the format: the object, the fields of every event and those of its kind, and nesting."""
    assert set(state) <= {"traceEvents", "displayTimeUnit", "systemTraceEvents", "otherData", "stackFrames", "samples"}
    assert state["displayTimeUnit"] in ("ms", "ns")
    assert isinstance(state["otherData"], dict)
    threads = defaultdict(list)
    for event in state["traceEvents"]:
        assert event["ph"] in PHASES
        assert isinstance(event["name"], str)
        assert isinstance(event.get("cat", ""), str)
        assert isinstance(event.get("args", {}), dict)
        assert type(event["pid"]) is type(event["tid"]) is int
        assert isinstance(event["ts"], Real)
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] == "i":
            assert event["s"] in ("g", "p", "t")
        elif event["ph"] == "C":
            assert event["args"]
            assert all(isinstance(value, Real) for value in event["args"].values())
        else:
            key, kind = METADATA[event["name"]]
            assert isinstance(event["args"][key], kind)
    for times in threads.values():  # here none nests either
        assert all(before[1] <= after[0] + 1e-6 for before, after in pairwise(sorted(times)))
    tids = [tid for _, tid in threads]
    assert len(tids) == len(set(tids))


SPANS = [
    Span("cpu:0", "load", "a.f0@0", 0.0, 1.0),
    Span("cpu:0", "load", "a.f0@0", 0.5, 0.75),  # inputs come beside a shard
    Span("cpu:0", "compute", "a.f0@0", 1.0, 2.0),
    Span("host", "again", "a.f0@0", 2.0, 2.0),
    Span("host", "commit", "b.c", 2.0, 2.25),
    Span("host", "update", "b.c.3", 2.25, 2.5),
    Span("host", "update", "a.0", 2.25, 3.0),
]
REPORT = Report(
    makespan_s=3.0,
    devices=[DeviceReport(name="cpu:0", busy_s=1.0, loaded_bytes=0, stored_bytes=0, peak_bytes=60, memory_bytes=100)],
    tasks={name: TaskReport(name=name, seed=0) for name in ("a", "b.c")},
    spans=SPANS,
    memory=[MemoryUse("cpu:0", 0.0, 40), MemoryUse("cpu:0", 1.0, 60)],
)


def test_trace_is_as_the_format_says():
    state = trace_events(REPORT)
    check(state)
    assert json.loads(json.dumps(state, allow_nan=False)) == state


@pytest.mark.parametrize(
    "broken", [{"ph": "Z"}, {"ts": -1}, {"dur": -1}, {"pid": "1"}, {"name": 3}, {"dur": 2e6}, {"args": []}], ids=str
)
def test_check_finds_what_the_format_refuses(broken):
    state = trace_events(REPORT)
    next(event for event in state["traceEvents"] if event["ph"] == "X").update(broken, tid=5)
    state["traceEvents"].append({"name": "next", "ph": "X", "ts": 1e6, "dur": 1, "pid": 1, "tid": 5})
    with pytest.raises((AssertionError, TypeError)):
        check(state)


def test_spans_stand_in_a_thread_of_their_lane_and_overlapping_ones_apart():
    events = trace_events(REPORT)["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans = [e for e in events if e["ph"] == "X"]
    assert [(processes[e["pid"]], threads[e["tid"]], e["name"], e["cat"], e["ts"], e["dur"]) for e in spans] == [
        ("cpu:0", "compute", "a.f0@0", "a", 1e6, 1e6),
        ("cpu:0", "load 1", "a.f0@0", "a", 0.0, 1e6),
        ("cpu:0", "load 2", "a.f0@0", "a", 5e5, 2.5e5),
        ("host", "commit", "b.c", "b.c", 2e6, 2.5e5),
        ("host", "update 1", "b.c.3", "b.c", 2.25e6, 2.5e5),
        ("host", "update 2", "a.0", "a", 2.25e6, 7.5e5),
    ]
    assert [(e["ts"], e["args"]["bytes"]) for e in events if e["ph"] == "C"] == [(0.0, 40), (1e6, 60)]
    assert [(e["name"], e["ts"]) for e in events if e["ph"] == "i"] == [("begun again: a.f0@0", 2e6)]


def test_trace_has_every_span_of_a_run_and_the_seconds_of_its_report(tmp_path):
    names, data = ["a\nb", "\x1b[31mc", "d.f0@3"], [(torch.rand(2, 4), torch.rand(2, 4))] * 2
    tasks = [ModelTask([nn.Linear(4, 4), nn.Linear(4, 4)], F.mse_loss, data, name=name) for name in names]
    report = exact.silent(tasks, devices=[EmulatedDevice("1MiB", bandwidth="50MB")] * 2).train_models()
    trace(report, tmp_path / "trace.json")
    state = json.loads((tmp_path / "trace.json").read_text())
    check(state)
    events = state["traceEvents"]
    processes = {each["pid"]: each["args"]["name"] for each in events if each["name"] == "process_name"}
    complete = [each for each in events if each["ph"] == "X"]
    assert len(complete) == len(report.spans)
    assert {each["cat"] for each in complete} == set(names)
    for device in report.devices:
        mine = [each for each in complete if processes[each["pid"]] == device.name]
        compute_us = sum(each["dur"] for each in mine if each["args"]["lane"] == "compute")
        assert compute_us / 1e6 == pytest.approx(device.busy_s, abs=1e-9 * len(mine))
    assert sum(each["ph"] == "C" for each in events) == len(report.memory)
