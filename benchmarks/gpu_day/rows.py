"""Rows in files: one JSON line each, one file for each stage, appended as soon as a row is known."""

import json
from datetime import date
from pathlib import Path

BOOT = Path("/proc/sys/kernel/random/boot_id")  # of Linux, another one for each machine that is lent
KEY = ("method", "size", "memory", "tokens")


def failed(key, reason):
    """The row of what ended its process."""
    return {**dict(zip(KEY, key, strict=True)), "status": "failed", "reason": reason}


class Results:
    """The rows of one stage at one scale; of rows with the same key the last counts, but one that is ok stays."""

    def __init__(self, folder, stage, scale_name):
        self._path, self._scale_name, self.rows = folder / f"{stage}.jsonl", scale_name, {}
        for line in self._path.read_text().splitlines() if self._path.exists() else ():
            self._take(json.loads(line))

    def _take(self, row):
        key = tuple(row[name] for name in KEY)
        if row["scale"] == self._scale_name and self.status(key) != "ok":
            self.rows[key] = row

    def add(self, row):
        """Take a row and write it, with its day and machine: those of one kind are not equally fast."""
        machine = BOOT.read_text().strip() if BOOT.exists() else ""
        row = {**row, "scale": self._scale_name, "day": date.today().isoformat(), "machine": machine}
        self._take(row)
        with self._path.open("a") as lines:
            lines.write(f"{json.dumps(row)}\n")

    def status(self, key):
        """Return "ok" or "failed"; None: nobody tried."""
        return self.rows[key]["status"] if key in self.rows else None

    def get(self, *key):
        """A row that was measured, or None."""
        return self.rows[key] if self.status(key) == "ok" else None
