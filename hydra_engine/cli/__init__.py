"""The command `hydra-engine`."""

from hydra_engine.cli.command import main

__all__ = ["main"]
