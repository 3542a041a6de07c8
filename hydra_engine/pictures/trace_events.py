"""A run's spans as trace events, which Perfetto (https://ui.perfetto.dev) and chrome://tracing open.

Written after the Trace Event Format, which its authors publish at
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU, in its form of a JSON object:

    a device, the host   a process        M  process_name, process_sort_index
    a lane               its thread(s)    M  thread_name, thread_sort_index
    a span               complete event   X  ts and dur in microseconds, cat: the task
    a step begun again   instant event    i  of its process
    memory in use        counter          C  bytes

Complete events of one thread must not overlap unless they nest, says the format, and Perfetto draws no others: what
overlaps in a lane gets threads of its own. Numbers of threads differ in all processes, as those of Linux do.
"""

from __future__ import annotations

import json
import os
from itertools import count
from pathlib import Path
from typing import Any

from hydra_engine import Report
from hydra_engine.pictures.lanes import AGAIN, DEVICE_LANES, HOST, HOST_LANES, devices_of, lane_rows, task_of

_ORDER = {lane: k for k, lane in enumerate((*DEVICE_LANES, *HOST_LANES))}  # others come last


def trace(report: Report, path: str | os.PathLike[str]) -> None:
    """Write a run's spans as trace events, in JSON, which https://ui.perfetto.dev and chrome://tracing open.

    A process for each device and the host, a thread for each lane, and a counter of the memory in use.
    """
    Path(path).write_text(json.dumps(trace_events(report), allow_nan=False, separators=(",", ":")), encoding="utf-8")


def trace_events(report: Report) -> dict[str, Any]:
    """Return the same for JSON."""
    processes = {name: pid for pid, name in enumerate([*devices_of(report), HOST], 1)}
    events: list[dict[str, Any]] = []
    for name, pid in processes.items():
        events.append(_meta("process_name", pid, pid, name=name))
        events.append(_meta("process_sort_index", pid, pid, sort_index=pid))
    tids = count(len(processes) + 1)
    lanes = lane_rows(report.spans)
    for (device, lane), rows in sorted(lanes.items(), key=lambda item: _ORDER.get(item[0][1], len(_ORDER))):
        pid = processes[device]
        for k, row in enumerate(rows, 1):
            tid = next(tids)
            events.append(_meta("thread_name", pid, tid, name=lane if len(rows) == 1 else f"{lane} {k}"))
            events.append(_meta("thread_sort_index", pid, tid, sort_index=tid))
            for span in row:
                start_ns, end_ns = _ns(span.start_s), _ns(span.end_s)
                when = {"ts": start_ns / 1e3, "dur": (end_ns - start_ns) / 1e3}
                where = {"pid": pid, "tid": tid, "args": {"lane": lane}}
                events.append({"name": span.label, "cat": task_of(span) or lane, "ph": "X", **when, **where})
    host = processes[HOST]
    for span in report.spans:
        if span.lane == AGAIN:
            at = {"ph": "i", "ts": _ns(span.start_s) / 1e3, "pid": host, "tid": host, "s": "p"}
            events.append({"name": f"begun again: {span.label}", "cat": AGAIN, **at})
    for used in report.memory:
        pid = processes[used.device]
        at = {"ph": "C", "ts": _ns(used.at_s) / 1e3, "pid": pid, "tid": pid}
        events.append({"name": "memory in use", "cat": "memory", **at, "args": {"bytes": used.used_bytes}})
    # Perfetto wants to know the unit before the first event.
    return {"displayTimeUnit": "ms", "otherData": {"makespan_s": report.makespan_s}, "traceEvents": events}


def _ns(seconds: float) -> int:
    """Round to what Perfetto keeps, so that spans that meet do not overlap there."""
    return round(seconds * 1e9)


def _meta(name: str, pid: int, tid: int, /, **args: Any) -> dict[str, Any]:
    return {"name": name, "ph": "M", "ts": 0, "pid": pid, "tid": tid, "args": args}
