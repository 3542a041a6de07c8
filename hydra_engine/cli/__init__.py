"""The command `hydra-engine`."""

from hydra_engine.cli.main import main

__all__ = [
    "main",
]
