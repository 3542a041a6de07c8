"""``hydra-engine report``: what a saved report says, and its pictures."""

from __future__ import annotations

import argparse
from pathlib import Path

from hydra_engine import Report
from hydra_engine.cli.command import Mistake, mistakes
from hydra_engine.pictures import timeline, trace


def run(options: argparse.Namespace) -> None:
    """Print the summary of a report; draw its timeline and write its trace where that is asked for."""
    with mistakes(OSError, ValueError, before=f"FILE: {options.file!r} cannot be read: ", after=_MAKE):
        report = Report.load(options.file)
    for field, path in (("--plot", options.plot), ("--trace", options.trace)):
        if path is not None and Path(path).exists() and Path(path).samefile(options.file):
            raise Mistake(f"{field}: {path!r} is the report itself, which this would replace; name another file")
    print(report.summary())
    for field, path, write in (("--plot", options.plot, timeline), ("--trace", options.trace, trace)):
        if path is not None:
            before, after = f"{field}: {path!r}: ", "; name another file, or mend this"
            with mistakes(ImportError, OSError, ValueError, before=before, after=after):
                write(report, path)
            print(f"written: {path}")


_MAKE = "; save one with report.save(FILE) or `hydra-engine train --report FILE`"
