"""What a placement says of itself, as a value: a table, and one drawing for terminals, notebooks and run folders."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from podium.files import write_atomic
from podium.placement.table import Move, Role, in_bytes, table

COLUMNS = 76
"""Of a drawing; what prints it may indent it a little."""

BOX = 44
"""Columns of a box."""

NEVER = "never; what acts is what was learnt last."
"""How stale the policy is where rollouts and updates take turns."""

DOWN, UP = 2, 27
"""Columns where what moves down and up is drawn."""


class Explanation(str):
    """Who runs where, what moves, how stale it may be and who waits for whom: text for people, with its parts.

    In a notebook it shows as a picture; `save` writes that.

    Attributes:
      headline: what the placement does, in a sentence.
      roles: who runs where.
      moves: what moves, on which way, and how much of it.
      stale: how old what is learnt from may be.
      waits: who waits for whom.
      words: all of it but the drawing.
      drawing: boxes and arrows, in at most `COLUMNS` columns.

    >>> roles = [Role("acting", "cpu:0"), Role("learning", "cpu:1"), Role("learning", "cpu:2")]
    >>> moves = [Move("rollouts", "acting to learning", 12_800)]
    >>> print(Explanation("Here:", roles, moves, stale="never.", waits="nobody.").drawing)
    ┌──────────────────────────────────────────┐
    │ acting                                   │
    │ cpu:0                                    │
    └──────────────────────────────────────────┘
      │ rollouts, 12.8 kB
      ▼
    ┌──────────────────────────────────────────┐
    │ learning x 2                             │
    │ cpu:1, cpu:2                             │
    └──────────────────────────────────────────┘
    """

    headline: str
    roles: tuple[Role, ...]
    moves: tuple[Move, ...]
    stale: str
    waits: str
    words: str
    drawing: str

    def __new__(
        cls, headline: str, roles: Iterable[Role], moves: Iterable[Move], *, stale: str, waits: str
    ) -> Explanation:
        """Write it down.

        Args:
          headline: a sentence.
          roles: in the order of the drawing; those that follow one another and differ by a number share a box.
          moves: `way` names the roles at its ends in its order ("workers to server"), or one or none for what moves
            among its equals.
          stale: a sentence.
          waits: a sentence.
        """
        roles, moves = tuple(roles), tuple(moves)
        drawing = _in_characters(_layout(roles, moves))
        words = f"{table(headline, roles, moves)}\n  how stale: {stale}\n  who waits: {waits}"
        explanation = super().__new__(cls, f"{words}\n\n{textwrap.indent(drawing, '  ')}")
        explanation.headline, explanation.roles, explanation.moves = headline, roles, moves
        explanation.stale, explanation.waits = stale, waits
        explanation.words, explanation.drawing = words, drawing
        return explanation

    def svg(self) -> str:
        """Return the drawing, between the headline and what is said of waiting, as SVG."""
        return _in_svg(self._page(), self.headline)

    def _repr_svg_(self) -> str:
        return self.svg()

    def save(self, path: Path | str) -> None:
        """Write the text (.txt), or the drawing (.svg, .png), by the ending of `path`.

        Raises:
          ValueError: for any other ending.
        """
        path = Path(path)
        if path.suffix == ".txt":
            write_atomic(path, f"{self}\n".encode())
        elif path.suffix == ".svg":
            write_atomic(path, self.svg().encode())
        elif path.suffix == ".png":
            _save_png(self._page(), path)
        else:
            raise ValueError(f"path={str(path)!r} must end in .txt, .svg or .png.")

    def _page(self) -> _Drawing:
        above = textwrap.wrap(self.headline, COLUMNS)
        below = [
            line
            for sentence in (f"How stale: {self.stale}", f"Who waits: {self.waits}")
            for line in textwrap.wrap(sentence, COLUMNS)
        ]
        return _layout(self.roles, self.moves).between(above, below)


class _Box(NamedTuple):
    """A box whose border lies in the cells from (x, y) on."""

    x: int
    y: int
    width: int
    height: int


class _Arrow(NamedTuple):
    """Cells where it turns, from the border of one box to that of another."""

    points: tuple[tuple[int, int], ...]


class _Text(NamedTuple):
    x: int
    y: int
    text: str


class _Drawing(NamedTuple):
    """A drawing on a grid of characters, which every way of showing it follows."""

    height: int
    boxes: list[_Box]
    arrows: list[_Arrow]
    texts: list[_Text]

    def between(self, above: Sequence[str], below: Sequence[str]) -> _Drawing:
        """Return it with lines of text above and below."""
        down = len(above) + 1
        foot = down + self.height + 1
        return _Drawing(
            foot + len(below),
            [box._replace(y=box.y + down) for box in self.boxes],
            [_Arrow(tuple((x, y + down) for x, y in arrow.points)) for arrow in self.arrows],
            [_Text(0, i, line) for i, line in enumerate(above)]
            + [text._replace(y=text.y + down) for text in self.texts]
            + [_Text(0, foot + i, line) for i, line in enumerate(below)],
        )


def _layout(roles: Sequence[Role], moves: Sequence[Move]) -> _Drawing:
    """Stack a box for every kind of role; neighbours have arrows, equals a loop, and the rest is said below."""
    kinds = [(name, list(group)) for name, group in groupby(roles, key=lambda role: _kind(role.name))]
    ends = [_ends(move, [name for name, _ in kinds]) for move in moves]
    drawing = _Drawing(0, [], [], [])
    y = 0
    for number, (name, group) in enumerate(kinds):
        # What moves among equals is drawn where there is any of it: among one there is none.
        round_it = [m for m, end in zip(moves, ends, strict=True) if end == (number, number) and m.amount != 0]
        room = COLUMNS - BOX - 5
        labels = [line for move in round_it for line in textwrap.wrap(_label(move), room)]
        lines = _describe(name, group)
        height = max(len(lines), len(labels)) + 2
        drawing.boxes.append(_Box(0, y, BOX, height))
        drawing.texts.extend(_Text(2, y + 1 + i, line) for i, line in enumerate(lines))
        if labels:
            right, last = BOX + 2, y + max(2, len(labels))
            drawing.arrows.append(_Arrow(((BOX - 1, y + 1), (right, y + 1), (right, last), (BOX - 1, last))))
            drawing.texts.extend(_Text(right + 2, y + 1 + i, line) for i, line in enumerate(labels))
        y += height
        if number + 1 < len(kinds):
            y = _join(drawing, y, moves, ends, number)
    apart = [m for m, (a, b) in zip(moves, ends, strict=True) if abs(a - b) > 1]
    notes = [line for move in apart for line in textwrap.wrap(f"{_label(move)}: {move.way}", COLUMNS)]
    drawing.texts.extend(_Text(0, y + i, line) for i, line in enumerate(notes))
    return drawing._replace(height=y + len(notes))


def _join(drawing: _Drawing, y: int, moves: Sequence[Move], ends: Sequence[tuple[int, int]], upper: int) -> int:
    """Draw what moves between box `upper`, which ends above `y`, and the next; returns where that begins."""
    labels = {
        column: [_label(move) for move, end in zip(moves, ends, strict=True) if end == way]
        for column, way in ((DOWN, (upper, upper + 1)), (UP, (upper + 1, upper)))
    }
    height = max(map(len, labels.values())) + 1
    for column, texts in labels.items():
        first = y if column == DOWN else y + 1  # Beside its line, not its head.
        drawing.texts.extend(_Text(column + 2, first + i, text) for i, text in enumerate(texts))
        if texts:
            way = ((column, y - 1), (column, y + height))
            drawing.arrows.append(_Arrow(way if column == DOWN else way[::-1]))
    return y + height


def _kind(name: str) -> str:
    return re.sub(r" \d+$", "", name)


def _describe(name: str, group: Sequence[Role]) -> list[str]:
    """Return what stands in the box of roles of one kind."""
    places = list(dict.fromkeys(role.where for role in group))
    shares = list(dict.fromkeys(role.share for role in group))
    where = ", ".join(places) if len(places) < 3 else f"{places[0]} to {places[-1]}"
    share = shares[0] if len(shares) == 1 else f"{shares[0]}, and so on"
    head = f"{name} x {len(group)}" if len(group) > 1 else name
    return [line for text in (head, where, share) for line in textwrap.wrap(text, BOX - 4)]


def _ends(move: Move, names: Sequence[str]) -> tuple[int, int]:
    """Return the numbers of the boxes that a move leaves and reaches, from the names of roles in its way."""
    found = [
        (match.start(), number)
        for number, name in enumerate(names)
        if (match := re.search(rf"\b{re.escape(name)}s?\b", move.way))
    ]
    numbers = [number for _, number in sorted(found)] or [len(names) - 1]
    return numbers[0], numbers[-1]


def _label(move: Move) -> str:
    return move.name if isinstance(move.amount, str) else f"{move.name}, {in_bytes(move.amount)}"


def _in_characters(drawing: _Drawing) -> str:
    cells = [[" "] * COLUMNS for _ in range(drawing.height)]

    def put(x: int, y: int, text: str) -> None:
        cells[y][x : x + len(text)] = text

    for x, y, width, height in drawing.boxes:
        put(x, y, "┌" + "─" * (width - 2) + "┐")
        for row in range(y + 1, y + height - 1):
            put(x, row, "│")
            put(x + width - 1, row, "│")
        put(x, y + height - 1, "└" + "─" * (width - 2) + "┘")
    for arrow in drawing.arrows:
        for x, y, character in _along(arrow.points):
            put(x, y, character)
    for x, y, text in drawing.texts:
        put(x, y, text)
    return "\n".join("".join(row).rstrip() for row in cells)


_HEADS = {(0, 1): "▼", (0, -1): "▲", (1, 0): "▶", (-1, 0): "◀"}
_TURNS = {((1, 0), (0, 1)): "┐", ((0, 1), (-1, 0)): "┘"}
"""Of loops, the only arrows that turn: they leave a box on its right and come back below."""


def _along(points: Sequence[tuple[int, int]]) -> Iterable[tuple[int, int, str]]:
    """Yield the cells of an arrow, but for the borders it leaves and reaches; a loop joins the border it leaves."""
    ways = [(_sign(b[0] - a[0]), _sign(b[1] - a[1])) for a, b in zip(points, points[1:], strict=False)]
    if len(ways) > 1:
        yield *points[0], "├"
    for i, ((dx, dy), (x, y), end) in enumerate(zip(ways, points, points[1:], strict=False)):
        while (x + dx, y + dy) != end:
            x, y = x + dx, y + dy
            yield x, y, "│" if dy else "─"
        if i + 1 < len(ways):
            yield *end, _TURNS[(dx, dy), ways[i + 1]]
        else:
            yield x, y, _HEADS[dx, dy]


def _sign(number: int) -> int:
    return (number > 0) - (number < 0)


CELL = 8.4, 19
"""Width and height of a character, in pixels."""
_MARGIN, _SIZE = 14, 14
_INK, _PAPER, _FILL, _LINE = "#1f2328", "#ffffff", "#f3f6fa", "#0757b5"


def _extent(drawing: _Drawing) -> tuple[float, float]:
    return COLUMNS * CELL[0] + 2 * _MARGIN, drawing.height * CELL[1] + 2 * _MARGIN


def _center(x: float, y: float) -> tuple[float, float]:
    return round(_MARGIN + (x + 0.5) * CELL[0], 1), round(_MARGIN + (y + 0.5) * CELL[1], 1)


def _in_svg(drawing: _Drawing, title: str) -> str:
    width, height = _extent(drawing)
    lines = [
        # It brings its own paper, so that a dark page does not matter.
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" role="img">',
        f"<title>{escape(title)}</title>",
        '<defs><marker id="head" viewBox="0 0 10 10" refX="10" refY="5" markerWidth="8" markerHeight="8" '
        f'orient="auto"><path d="M0,0 L10,5 L0,10 z" fill="{_LINE}"/></marker></defs>',
        f'<rect width="{width:g}" height="{height:g}" rx="6" fill="{_PAPER}"/>',
    ]
    for box in drawing.boxes:
        (x, y), (right, bottom) = _center(box.x, box.y), _center(box.x + box.width - 1, box.y + box.height - 1)
        size = f'width="{right - x:g}" height="{bottom - y:g}"'
        lines.append(f'<rect x="{x:g}" y="{y:g}" {size} rx="4" fill="{_FILL}" stroke="{_INK}"/>')
    for arrow in drawing.arrows:
        points = " ".join(f"{x:g},{y:g}" for x, y in (_center(*point) for point in arrow.points))
        lines.append(
            f'<polyline points="{points}" fill="none" stroke="{_LINE}" stroke-width="1.5" marker-end="url(#head)"/>'
        )
    lines.append(f'<g font-family="ui-monospace, Menlo, Consolas, monospace" font-size="{_SIZE}" fill="{_INK}">')
    for text in drawing.texts:
        x, y = _MARGIN + text.x * CELL[0], _center(0, text.y)[1] + _SIZE / 3
        lines.append(f'<text x="{x:g}" y="{y:g}">{escape(text.text)}</text>')
    return "\n".join([*lines, "</g>", "</svg>", ""])


def _save_png(drawing: _Drawing, path: Path) -> None:
    from matplotlib.figure import Figure

    inch = 100.0
    width, height = _extent(drawing)
    figure = Figure((width / inch, height / inch), facecolor=_PAPER)
    axes: Any = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    for box in drawing.boxes:
        (x, y), (right, bottom) = _center(box.x, box.y), _center(box.x + box.width - 1, box.y + box.height - 1)
        axes.fill([x, right, right, x], [y, y, bottom, bottom], facecolor=_FILL, edgecolor=_INK, linewidth=0.8)
    for arrow in drawing.arrows:
        points = [_center(*point) for point in arrow.points]
        axes.plot(*zip(*points, strict=True), color=_LINE, linewidth=1.1)
        head = {"arrowstyle": "-|>", "color": _LINE, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", points[-1], points[-2], arrowprops=head)
    for text in drawing.texts:
        place = _MARGIN + text.x * CELL[0], _center(0, text.y)[1]
        style: Any = {"family": "monospace", "size": _SIZE * 72 / inch, "color": _INK, "va": "center"}
        # Not mathematics, whatever stands in it.
        axes.text(*place, text.text, parse_math=False, **style)
    figure.savefig(path, dpi=2 * inch)
