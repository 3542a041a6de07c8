"""Pages and tables in HTML that refer to nothing outside themselves."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from hydra_engine.pictures.picture import printable

_STYLE = """
body { font-family: sans-serif; color: #333; margin: 16px; }
div { overflow-x: auto; }
svg rect:hover, svg polyline:hover { opacity: 0.6; }
table { border-collapse: collapse; margin: 12px 0; }
th, td { padding: 2px 12px 2px 0; text-align: left; border-bottom: 1px solid #ddd; }
"""


def html_table(rows: Sequence[tuple[str, ...]], *, has_head: bool = True) -> str:
    """Rows of text as a table; the first row is the head, where it has one."""
    lines = [_row("th" if has_head and k == 0 else "td", row) for k, row in enumerate(rows)]
    return "\n".join(["<table>", *lines, "</table>"]) + "\n"


def _row(tag: str, cells: tuple[str, ...]) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(printable(cell))}</{tag}>" for cell in cells) + "</tr>"


def html_page(title: str, *parts: str) -> str:
    """A whole page with these elements, one after the other."""
    head = f'<head><meta charset="utf-8"><title>{escape(printable(title))}</title><style>{_STYLE}</style></head>'
    return "\n".join(["<!DOCTYPE html>", '<html lang="en">', head, "<body>", *parts, "</body>", "</html>"]) + "\n"
