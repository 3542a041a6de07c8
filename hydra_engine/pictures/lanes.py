"""Spans in rows: those of one lane of one device, no two of a row at the same time."""

from __future__ import annotations

from collections.abc import Iterable

from hydra_engine import Report, Span, Unit

# As a report's spans name them.
HOST, COMMIT, UPDATE, AGAIN = "host", "commit", "update", "again"
COMPUTE, LOAD, STORE = DEVICE_LANES = ("compute", "load", "store")
HOST_LANES = (COMMIT, UPDATE)


def lane_rows(spans: Iterable[Span]) -> dict[tuple[str, str], list[list[Span]]]:
    """Rows by device and lane; a lane has more than one where jobs of it overlapped, as on several threads."""
    found: dict[tuple[str, str], list[list[Span]]] = {}
    for span in sorted((each for each in spans if each.lane != AGAIN), key=lambda each: each.start_s):
        rows = found.setdefault((span.device, span.lane), [])
        row = next((row for row in rows if row[-1].end_s <= span.start_s), None)
        if row is None:
            rows.append(row := [])
        row.append(span)
    return found


def unit_of(span: Span) -> Unit | None:
    """Return the unit that a device's lane worked for; None: it was no unit."""
    try:
        return Unit.parse(span.label.removeprefix("drop "))  # a claim that was given up
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


def devices_of(report: Report) -> list[str]:
    """Return the devices of a report, and then those that only spans know of."""
    others = [*(span.device for span in report.spans), *(used.device for used in report.memory)]
    known = dict.fromkeys([*(device.name for device in report.devices), *others])
    return [name for name in known if name != HOST]
