"""Figures of a benchmark: to a file for `regressions.py`, and into a README between two comments.

FIGURES = Figures("overhead")
FIGURES.add("one shard, 1,024 tokens", [1.05, 1.07, 1.06], better="less", limit=1.06)
FIGURES.save("overhead.json")
"""

import json
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def add_arguments(parser, *, writes=False):
    """Add --json, and --write for a benchmark whose README is written by itself."""
    parser.add_argument("--json", metavar="PATH", help="also write the figures to this file, for regressions.py")
    if writes:
        parser.add_argument("--write", action="store_true", help="also put the tables into README.md")


def commit():
    """Short name of the commit that is measured, with a plus sign where files differ from it."""
    try:
        command = ["git", "-C", str(ROOT), "describe", "--always", "--exclude=*", "--dirty=+"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):  # no git, or no clone
        return "unknown"


class Figures:
    """Figures by name, each with one value for each repetition. `benchmark` is the folder's name."""

    def __init__(self, benchmark):
        self.benchmark = benchmark
        self.by_name = {}

    def add(self, name, values, *, better, limit=None):
        """Note a figure.

        Args:
            values: one for each repetition, or a number.
            better: "more" or "less".
            limit: the worst that its median may be; None: it is not judged.
        """
        assert better in ("more", "less"), better
        values = [float(each) for each in (values if isinstance(values, (list, tuple)) else [values])]
        self.by_name[name] = {"values": values, "better": better, "limit": limit}

    def save(self, path):
        """Write the figures to a file, in a folder that is made if need be. path: None: write nothing."""
        if path is not None:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            found = {"benchmark": self.benchmark, "commit": commit(), "figures": self.by_name}
            Path(path).write_text(json.dumps(found, indent=1) + "\n")


def table(head, rows):
    """Lines of a table in Markdown."""
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in [head, ["---"] * len(head), *rows])


def put(readme, name, text):
    """Replace what stands in a README between `<!-- NAME: by its command -->` and `<!-- end of NAME -->`."""
    begin, end = f"<!-- {name}: by its command -->\n", f"<!-- end of {name} -->"
    pattern = re.compile(f"({re.escape(begin)}).*?({re.escape(end)})", re.DOTALL)
    page, number = pattern.subn(lambda found: f"{found[1]}\n{text.strip()}\n\n{found[2]}", readme.read_text())
    if number != 1:
        raise ValueError(f"{readme}: {number} places for {name}; it needs one, {begin.strip()} ... {end}")
    readme.write_text(page)
