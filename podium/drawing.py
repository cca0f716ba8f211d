"""A drawing of boxes below one another and arrows between them, on a grid of characters; as text or as SVG."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from html import escape
from typing import NamedTuple

COLUMNS = 76
"""Of a drawing; what prints it may indent it a little."""

BOX = 44
"""Columns of a box."""


class Drawing(NamedTuple):
    """A drawing on a grid of characters: boxes (x, y, height), arrows, texts (x, y, text); every format shows it.

    An arrow (x, tail, head) goes straight from row to row in column x; both lie on the borders of boxes.
    """

    height: int
    boxes: list[tuple[int, int, int]]
    arrows: list[tuple[int, int, int]]
    texts: list[tuple[int, int, str]]


def wrapped(texts: Iterable[str], width: int) -> list[str]:
    """Return texts in lines of at most `width` columns."""
    return [line for text in texts for line in textwrap.wrap(text, width)]


def in_characters(drawing: Drawing) -> str:
    """Return a drawing as text."""
    cells = [[" "] * COLUMNS for _ in range(drawing.height)]

    def put(x: int, y: int, text: str) -> None:
        cells[y][x : x + len(text)] = text

    for x, y, height in drawing.boxes:
        put(x, y, "┌" + "─" * (BOX - 2) + "┐")
        for row in range(y + 1, y + height - 1):
            put(x, row, "│" + " " * (BOX - 2) + "│")
        put(x, y + height - 1, "└" + "─" * (BOX - 2) + "┘")
    for x, tail, head in drawing.arrows:
        for row in range(min(tail, head) + 1, max(tail, head)):
            put(x, row, "│")
        put(x, head + (1 if head < tail else -1), "▲" if head < tail else "▼")
    for x, y, text in drawing.texts:
        put(x, y, text)
    return "\n".join("".join(row).rstrip() for row in cells)


def in_svg(drawing: Drawing, title: str) -> str:
    """Return a drawing as SVG, on paper of its own."""
    cell_width, cell_height, margin, ink, line = 8.4, 19, 14, "#1f2328", "#0757b5"
    at_x = lambda x: round(margin + (x + 0.5) * cell_width, 1)
    at_y = lambda y: margin + (y + 0.5) * cell_height
    width, height = COLUMNS * cell_width + 2 * margin, drawing.height * cell_height + 2 * margin
    lines = [
        # It brings its own paper, so that a dark page does not matter.
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" role="img">',
        f"<title>{escape(title)}</title>",
        '<defs><marker id="head" viewBox="0 0 10 10" refX="10" refY="5" markerWidth="8" markerHeight="8" '
        f'orient="auto"><path d="M0,0 L10,5 L0,10 z" fill="{line}"/></marker></defs>',
        f'<rect width="{width:g}" height="{height:g}" rx="6" fill="#ffffff"/>',
    ]
    for x, y, rows in drawing.boxes:
        size = f'width="{(BOX - 1) * cell_width:g}" height="{(rows - 1) * cell_height:g}"'
        lines.append(f'<rect x="{at_x(x):g}" y="{at_y(y):g}" {size} rx="4" fill="#f3f6fa" stroke="{ink}"/>')
    for x, tail, head in drawing.arrows:
        points = f"{at_x(x):g},{at_y(tail):g} {at_x(x):g},{at_y(head):g}"
        lines.append(
            f'<polyline points="{points}" fill="none" stroke="{line}" stroke-width="1.5" marker-end="url(#head)"/>'
        )
    lines.append(f'<g font-family="ui-monospace, Menlo, Consolas, monospace" font-size="14" fill="{ink}">')
    for x, y, text in drawing.texts:
        lines.append(f'<text x="{margin + x * cell_width:g}" y="{at_y(y) + 14 / 3:g}">{escape(text)}</text>')
    return "\n".join([*lines, "</g>", "</svg>", ""])
