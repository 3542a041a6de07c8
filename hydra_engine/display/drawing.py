"""Draws a schedule: a line per device in text, a row per device in SVG."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

from hydra_engine.pictures import GOLDEN_ANGLE
from hydra_engine.schedule import BACKWARD, EVALUATE, Placed

# A task's letter in text: as many tasks can be told apart.
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
ROW, GAP, LABEL, AXIS = 28, 8, 96, 24  # pixels


def draw_text(schedule: Sequence[Placed], width: int = 100) -> str:
    """A line of `width` characters for each device: the task that computes most of a character's time, or a dot.

    Every unit stands as its task's letter; a legend names the letters.
    """
    if width < 1:
        raise ValueError(f"width: {width}, at least 1 character")
    if not schedule:
        return "nothing was computed\n"
    letters = _letters(schedule)
    end_s = max(placed.end_s for placed in schedule)
    per_s = width / end_s if end_s > 0 else 0.0
    lines = []
    for device in range(max(placed.device for placed in schedule) + 1):
        shares: list[dict[str, float]] = [{} for _ in range(width)]
        for placed in schedule:
            if placed.device != device:
                continue
            low, high = placed.start_s * per_s, placed.end_s * per_s
            for cell in range(int(low), min(width, int(high) + 1)):
                share = min(high, cell + 1) - max(low, cell)
                letter = letters[placed.unit.task]
                shares[cell][letter] = shares[cell].get(letter, 0.0) + share
        cells = [max(share, key=lambda each: share[each]) if sum(share.values()) >= 0.5 else "." for share in shares]
        lines.append(f"device {device:<3} |{''.join(cells)}|")
    lines.append(f"           0{f'{end_s:.6g} s':>{width}}")
    lines += [f"{letter} {task}" for task, letter in letters.items()]
    return "\n".join(lines) + "\n"


def draw_svg(schedule: Sequence[Placed], width: int = 1000) -> str:
    """A row for each device and a box for each unit, in its task's colour: forward light, backward dark."""
    if width < 1:
        raise ValueError(f"width: {width}, at least 1 pixel")
    end_s = max((placed.end_s for placed in schedule), default=0.0)
    num_devices = max((placed.device for placed in schedule), default=-1) + 1
    tasks = {task: k for k, task in enumerate(_letters(schedule))}
    per_s = width / end_s if end_s > 0 else 0.0
    height = num_devices * (ROW + GAP) + AXIS
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LABEL + width}" height="{height}" font-family="sans-serif" '
        f'font-size="12">'
    ]
    for device in range(num_devices):
        middle = device * (ROW + GAP) + ROW / 2
        parts.append(f'<text x="0" y="{middle:g}" dominant-baseline="middle">device {device}</text>')
    for unit, device, start_s, stop_s in schedule:
        hue = tasks[unit.task] * GOLDEN_ANGLE % 360
        light = {BACKWARD: 45, EVALUATE: 85}.get(unit.kind, 70 if unit.kind == "f" else 55)
        x, wide = LABEL + start_s * per_s, (stop_s - start_s) * per_s
        title = escape(f"{unit}: {start_s:.6g} to {stop_s:.6g} s")
        parts.append(
            f'<rect x="{x:.2f}" y="{device * (ROW + GAP)}" width="{wide:.2f}" height="{ROW}" '
            f'fill="hsl({hue:.0f} 60% {light}%)" stroke="white"><title>{title}</title></rect>'
        )
    bottom = height - AXIS / 2
    parts.append(f'<text x="{LABEL}" y="{bottom:g}">0</text>')
    parts.append(f'<text x="{LABEL + width}" y="{bottom:g}" text-anchor="end">{end_s:.6g} s</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _letters(schedule: Sequence[Placed]) -> dict[str, str]:
    """Return the letter of each task, in the order in which tasks come up."""
    tasks = dict.fromkeys(placed.unit.task for placed in schedule)
    return {task: LETTERS[k % len(LETTERS)] for k, task in enumerate(tasks)}
