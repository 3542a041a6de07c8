"""A run's spans as files that people look at: its timeline as SVG, PNG and HTML, and its trace for Perfetto."""

from hydra_engine.pictures.page import html_page, html_table
from hydra_engine.pictures.picture import GOLDEN_ANGLE, plural, printable, write_png
from hydra_engine.pictures.timeline import Curve, DeviceBudget, RunFigures, draw_timeline
from hydra_engine.pictures.trace_events import trace_events
