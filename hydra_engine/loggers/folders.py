"""Names of the files that loggers write, one for each task."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from urllib.parse import quote

# Of a file's name, which most file systems limit to 255; with room for an ending and a number. What is longer is cut,
# and ends in this many signs of its digest.
MOST_SIGNS, DIGEST_SIGNS = 200, 16


def file_name(task: str) -> str:
    """Return a task's name as a file's: without slashes, with no dot in front, and not too long for a file system."""
    name = quote(task, safe=" =+,@()[]", errors="surrogatepass")
    name = f"%2E{name[1:]}" if name.startswith(".") else name
    if len(name) <= MOST_SIGNS:
        return name
    return f"{name[: MOST_SIGNS - DIGEST_SIGNS - 1]}-{sha256(name.encode()).hexdigest()[:DIGEST_SIGNS]}"


def set_aside(path: Path) -> None:
    """Rename what is there: "task-0.csv" to "task-0.1.csv", or the next number that is free."""
    if path.exists():
        number = 1
        while (other := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
            number += 1
        path.rename(other)
