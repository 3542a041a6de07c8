"""The live display on the screen of a terminal emulator: `python -m tests.screens` makes the pictures in docs/screens/.

Each picture is what a terminal showed while a process of its own trained, 0.6 of the way through.
"""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pyte
import torch
from rich.console import Console
from rich.text import Text
from torch import nn

from hydra_engine import Callback, EmulatedDevice, Model, ModelOrchestrator, ModelTask

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "screens"
NUMBERS, COLUMNS, LINES = (6, 30), 80, 24

NOTEBOOK = """from tests.screens import train

train(4, 60)"""


class Emulator:
    """A terminal's screen, with what has scrolled out of it."""

    def __init__(self, columns: int, lines: int = LINES) -> None:
        self.screen = pyte.HistoryScreen(columns, lines, history=10_000, ratio=0.5)
        self._stream = pyte.ByteStream(self.screen)

    def feed(self, data: bytes | str) -> None:
        self._stream.feed(data.encode() if isinstance(data, str) else data)

    @property
    def rows(self) -> list[str]:
        """All rows from the first that was written, without blanks at their ends, and without empty ones at the end."""
        columns = range(self.screen.columns)
        before = ["".join(row[k].data for k in columns) for row in self.screen.history.top]
        rows = [row.rstrip() for row in [*before, *self.screen.display]]
        while rows and not rows[-1]:
            rows.pop()
        return rows

    def text(self) -> Text:
        """The screen's rows in their colours, without empty ones at the end."""
        rows = []
        for line in range(self.screen.lines):
            row = Text()
            for column in range(self.screen.columns):
                sign = self.screen.buffer[line][column]
                colour = {"default": None, "brown": "yellow"}.get(sign.fg, sign.fg)
                row.append(sign.data, f"{'bold ' if sign.bold else ''}{colour or ''}".strip() or None)
            row.rstrip()
            rows.append(row)
        while rows and not rows[-1].plain:
            rows.pop()
        return Text("\n").join(rows)

    def svg(self, title: str) -> str:
        """A picture that needs nothing from elsewhere."""
        width = self.screen.columns
        console = Console(file=io.StringIO(), record=True, width=width, force_terminal=True, legacy_windows=False)
        console.print(self.text(), no_wrap=True, overflow="ignore", crop=False)
        picture = console.export_svg(title=title, unique_id="screen")
        picture = re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)
        return "\n".join(line.rstrip() for line in picture.splitlines()) + "\n"


class Child:
    """A process whose terminal is an emulator."""

    def __init__(self, command: list[str], columns: int, lines: int = LINES, **environment: str) -> None:
        self.emulator = Emulator(columns, lines)
        self._controller, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        unset = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR")
        env = {key: value for key, value in os.environ.items() if key not in unset}
        env |= {"TERM": "xterm-256color", "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8", **environment}
        self.process = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, env=env, cwd=ROOT)
        os.close(terminal)
        self.is_quiet = False  # nothing came when it was read last

    def read(self, timeout_s: float = 0.1) -> bool:
        """Show what the process has written; False once it is over and nothing more comes."""
        ready, _, _ = select.select([self._controller], [], [], timeout_s)
        self.is_quiet = not ready
        if self.is_quiet:
            return self.process.poll() is None
        try:
            data = os.read(self._controller, 65_536)
        except OSError:  # the other end is closed
            data = b""
        self.emulator.feed(data)
        return bool(data)

    def finish(self) -> int:
        while self.read():
            pass
        os.close(self._controller)
        return self.process.wait()


class Losses(Callback):
    """Prints several lines while the display is there."""

    def on_epoch(self, report, epoch):
        # `print` writes an end of its own apart, and what another task's thread prints may come between.
        print(f"{report.name}: epoch {epoch} is over\n  its loss is {report.losses[-1]:.4f}\n", end="")


def task(k: int, num_steps: int, *, prints: bool = False) -> ModelTask:
    """A small task: in the first two thirds of all, of two epochs."""
    torch.manual_seed(k)
    model = nn.Sequential(*(nn.Linear(160, 160) for _ in range(6)))
    data = [(torch.randn(16, 160), torch.randn(16, 160)) for _ in range(num_steps // 2 * (1 + k % 2))]
    return ModelTask(
        Model(model),
        nn.MSELoss(),
        data,
        1e-3,
        2,
        name=("bert-large", "gpt2", "t5-small", "vit-b16", "resnet")[k % 5] + f"-{k}",
        validation=data[:2],
        callbacks=[Losses()] if prints else [],
    )


def train(num_tasks: int, num_steps: int, *, prints: bool = False) -> None:
    """Train on two devices with a slow link, each smaller than a model."""
    devices = [EmulatedDevice(memory="900KiB", bandwidth="60MiB") for _ in range(2)]
    orchestra = ModelOrchestrator(
        [task(k, num_steps, prints=prints) for k in range(num_tasks)], devices=devices, homes="host"
    )
    orchestra.verbose = 0
    orchestra.generate()
    orchestra.verbose = 1
    orchestra.train_models()


def command(num_tasks: int, num_steps: int, *, prints: bool = False) -> list[str]:
    """The command that trains."""
    return [sys.executable, "-c", f"from tests.screens import train; train({num_tasks}, {num_steps}, prints={prints})"]


def take(num_tasks: int) -> None:
    """Keep the screen as it is at 60 % of the first task."""
    child = Child(command(num_tasks, 240 if num_tasks < 30 else 40), COLUMNS)
    found = None
    while child.read(0.02):
        rows = child.emulator.rows
        percent = [int(each) for each in re.findall(r"^[a-z].* (\d+)% +\d\.", "\n".join(rows), re.MULTILINE)]
        if found is None and child.is_quiet and percent and max(percent) >= 60:  # not in the middle of a picture
            found = child.emulator.svg(f"{num_tasks} tasks, {COLUMNS} columns")
    assert child.finish() == 0, child.emulator.rows
    assert found is not None
    (FOLDER / f"live-{num_tasks}-tasks-{COLUMNS}-columns.svg").write_text(found, encoding="utf-8")


def run_notebook() -> list[dict]:
    """The outputs of the notebook's cell, as Jupyter's kernel and its client make them."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(NOTEBOOK)])
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(ROOT)}}).execute()
    return notebook.cells[0].outputs


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for number in NUMBERS:
        take(number)


if __name__ == "__main__":
    main()
