"""Pictures of schedules and lines of progress, made from reports and spans."""

from hydra_engine.display.drawing import draw_svg, draw_text
from hydra_engine.display.progress import ProgressLine, TaskProgress

__all__ = [
    "ProgressLine",
    "TaskProgress",
    "draw_svg",
    "draw_text",
]
