"""Spans in rows: those of one lane of one device, no two of a row at the same time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hydra_engine.schedule import Unit
from hydra_engine.trace import Span

HOST = "host"
COMPUTE, LOAD, STORE = DEVICE_LANES = ("compute", "load", "store")
COMMIT, UPDATE = HOST_LANES = ("commit", "update")
AGAIN = "again"  # a moment, at which a step began again
_DROPPED = "drop "  # before the unit whose claim was given up


def lane_rows(spans: Iterable[Span]) -> dict[tuple[str, str], list[list[Span]]]:
    """Rows by device and lane; a lane has more than one where jobs of it overlapped, as on several threads."""
    found: dict[tuple[str, str], list[list[Span]]] = {}
    for span in sorted(spans, key=lambda each: each.start_s):
        rows = found.setdefault((span.device, span.lane), [])
        row = next((row for row in rows if row[-1].end_s <= span.start_s), None)
        if row is None:
            rows.append(row := [])
        row.append(span)
    return found


def unit_of(span: Span) -> Unit | None:
    """Return the unit that a device's lane worked for; None: it was no unit."""
    try:
        return Unit.parse(span.label.removeprefix(_DROPPED))
    except ValueError:
        return None


def task_of(span: Span) -> str:
    """Return the name of the task that a span was for; "" where that is not known."""
    if span.lane == COMMIT:
        return span.label
    if span.lane == UPDATE:
        return span.label.rpartition(".")[0]
    unit = unit_of(span)
    return "" if unit is None else unit.task


def share(spans: Iterable[Span], start_s: float, end_s: float) -> float:
    """Return the share of a window that spans take."""
    taken_s = sum(max(0.0, min(span.end_s, end_s) - max(span.start_s, start_s)) for span in spans)
    return taken_s / (end_s - start_s) if end_s > start_s else 0.0


def ordered_devices(names: Sequence[str], spans: Iterable[Span]) -> list[str]:
    """Return the devices of a report, and then those that only spans know of."""
    return list(dict.fromkeys([*names, *(span.device for span in spans if span.device != HOST)]))
