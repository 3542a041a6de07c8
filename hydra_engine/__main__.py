"""``python -m hydra_engine``."""

from __future__ import annotations

import sys

from hydra_engine.cli import main

sys.exit(main())
