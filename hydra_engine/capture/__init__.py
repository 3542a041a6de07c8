"""Makes layers of a module that has a forward of its own."""

from hydra_engine.capture.outputs import UsesNotCarried, carried
from hydra_engine.capture.programs import Uncut, called_with
from hydra_engine.capture.segment import Segment, layers_for, layers_of, programs_of
from hydra_engine.capture.tape import saved_hooks
from hydra_engine.capture.whole import draw_apart_in

__all__ = [
    "Segment",
    "Uncut",
    "UsesNotCarried",
    "called_with",
    "carried",
    "draw_apart_in",
    "layers_for",
    "layers_of",
    "programs_of",
    "saved_hooks",
]
