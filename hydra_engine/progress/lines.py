"""Lines of a log about a run."""

from __future__ import annotations

from hydra_engine.progress.state import Observer, RunProgress, TaskProgress
from hydra_engine.texts import LINE, clock, number, printable, rate, say

LOG_S, MOST_LOG_S = 5.0, 60.0  # seconds between two lines, first and later
MOST_LOGGED = 8  # tasks in a line, but for the last ones
BETWEEN = " | "  # tasks in a line
LEAST_NAME, DOTS = 8, "..."


class PlainLines(Observer):
    """Prints a line of at most 100 characters now and then: where nothing can be written over, or nothing does."""

    period_s = LOG_S

    def show(self, run: RunProgress) -> None:
        """Print as many tasks as fit in a line, and how many others there are."""
        self.period_s = min(MOST_LOG_S, max(LOG_S, run.now_s / 20))
        begin, tasks = f"{run.now_s:6.1f} s  ", run.first(len(run.tasks))
        for most in range(MOST_LOGGED, 0, -1):
            shown, others = tasks[:most], tasks[most:]
            end = f"{BETWEEN}and {len(others)} more" if others else ""
            line = begin + BETWEEN.join(_described(task, LINE - len(begin + end)) for task in shown) + end
            if len(line) <= LINE:
                break
        counts = f": {run.counts(others)}" if others else ""
        say(line + counts if len(line + counts) <= LINE else line)

    def close(self, run: RunProgress) -> None:
        """Print all tasks."""
        lines: list[str] = []
        begin = f"{run.now_s:6.1f} s  "
        for task in run.tasks:
            told = _described(task, LINE - len(begin))
            if lines and len(lines[-1] + BETWEEN + told) <= LINE:
                lines[-1] += BETWEEN + told
            else:
                lines.append((" " * len(begin) if lines else begin) + told)
        say("\n".join(lines))


def _described(task: TaskProgress, columns: int) -> str:
    """Return a task's figures, in so many columns if that can be: its name is cut."""
    told = [str(task.steps) if task.num_steps is None else f"{task.steps}/{task.num_steps}"]
    told += [f"loss {number(task.loss)}"] if task.loss is not None else []
    told += [f"validation {number(task.validation)}"] if task.validation is not None else []
    told += [task.batch] if task.batch else []
    told += [rate(task.steps_per_s)] if task.steps_per_s else []
    told += [f"{clock(task.left_s)} left"] if task.left_s is not None else []
    told += [task.doing.value] if task.doing.is_over else []
    figures, name = " ".join(told), printable(task.name)
    room = max(LEAST_NAME, columns - len(figures) - 1)
    return f"{name if len(name) <= room else name[: room - len(DOTS)] + DOTS} {figures}"
