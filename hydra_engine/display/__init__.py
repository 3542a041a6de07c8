"""Pictures of schedules, and the live display of a run: made from reports, spans and what a run tells; never asked."""

from hydra_engine.display.drawing import draw_svg, draw_text
from hydra_engine.display.live import LiveDisplay
from hydra_engine.display.progress import AtWork, DeviceProgress, Doing, RunProgress, TaskProgress

__all__ = ["AtWork", "DeviceProgress", "Doing", "LiveDisplay", "RunProgress", "TaskProgress", "draw_svg", "draw_text"]
