"""Makes layers of a module that has a forward of its own."""

from hydra_engine.capture.programs import Branch, called_with, check_call, without_caches
from hydra_engine.capture.segment import Segment, layers_for, layers_of

__all__ = ["Branch", "Segment", "called_with", "check_call", "layers_for", "layers_of", "without_caches"]
