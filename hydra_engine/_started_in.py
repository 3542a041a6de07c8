"""The directory that the process began in, as far as the first import of the package tells.

A program may change its directory later, and the path of its script is relative to this one.
"""

from __future__ import annotations

import os
from contextlib import suppress

STARTED_IN: str | None = None
with suppress(OSError):  # it was removed
    STARTED_IN = os.getcwd()
