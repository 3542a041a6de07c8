"""A schedule as text, a line per device."""

from __future__ import annotations

from collections.abc import Sequence

from hydra_engine import Placed

# A task's letter: as many tasks can be told apart.
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


def draw_text(schedule: Sequence[Placed], width: int = 100) -> str:
    """A line of `width` characters for each device: the task that computes most of a character's time, or a dot.

    Every unit of a `Report.schedule` or a simulation's stands as its task's letter; a legend names the letters.
    """
    if width < 1:
        raise ValueError(f"width: {width}, at least 1 character")
    if not schedule:
        return "nothing was computed\n"
    tasks = dict.fromkeys(placed.unit.task for placed in schedule)
    letters = {task: LETTERS[k % len(LETTERS)] for k, task in enumerate(tasks)}
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
