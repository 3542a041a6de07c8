"""Live progress."""

import io

from hydra_engine.progress import Progress, TaskProgress

TASKS = [TaskProgress("a", 3, 10, 1.25), TaskProgress("b", 0, None, None)]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_silent_when_not_verbose():
    stream = io.StringIO()
    progress = Progress(0, stream)
    progress.show(TASKS, 0.0)
    progress.close(TASKS, 1.0)
    assert stream.getvalue() == ""


def test_log_has_a_line_every_five_seconds_and_one_at_the_end():
    stream = io.StringIO()
    progress = Progress(1, stream)
    for now_s in (0.0, 4.9, 5.0, 9.9):
        progress.show(TASKS, now_s)
    progress.close(TASKS, 9.95)
    tasks = "a 3/10 1.250 | b 0"
    assert stream.getvalue() == f"   0.0 s  {tasks}\n   5.0 s  {tasks}\n   9.9 s  {tasks}\n"


def test_terminal_line_is_written_over():
    stream = Terminal()
    progress = Progress(1, stream)
    progress.show(TASKS, 0.0)
    progress.show(TASKS, 0.1)
    progress.close(TASKS, 2.0)
    line = "a 3/10 1.250 | b 0"
    assert stream.getvalue() == f"\r\x1b[2K   0.0 s  {line}\r\x1b[2K   2.0 s  {line}\n"
