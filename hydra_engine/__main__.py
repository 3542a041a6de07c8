"""``python -m hydra_engine``."""

import sys

from hydra_engine.cli import main

sys.exit(main())
