"""Pictures of schedules and lines of progress, made from reports and spans."""

from hydra_engine.display.drawing import draw_svg, draw_text
from hydra_engine.display.progress import Progress, TaskProgress

__all__ = [
    "Progress",
    "TaskProgress",
    "draw_svg",
    "draw_text",
]
