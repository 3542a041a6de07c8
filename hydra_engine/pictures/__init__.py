"""A run's report as files that people look at: its timeline, drawn by matplotlib, and its trace for Perfetto."""

from hydra_engine.pictures.text import draw_text
from hydra_engine.pictures.timeline import timeline
from hydra_engine.pictures.trace_events import trace

__all__ = ["draw_text", "timeline", "trace"]
