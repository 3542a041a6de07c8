"""The live display of a run, drawn by rich on a terminal or in a notebook; the engine does without it."""

from hydra_engine.display.live import NotebookDisplay, TerminalDisplay, observer_of

__all__ = ["NotebookDisplay", "TerminalDisplay", "observer_of"]
