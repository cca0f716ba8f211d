"""What a placement says of itself: who runs where and what moves, as a table and as one drawing, in text or SVG."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import jax

from podium.drawing import BOX, COLUMNS, Drawing, in_characters, in_svg, wrapped
from podium.files import write_atomic
from podium.types import PyTree

NEVER = "never; what acts is what was learnt last."
"""How stale the policy is where rollouts and updates take turns."""

DOWN, UP = 2, 27
"""Columns where what moves down and up is drawn."""

MOST_ROWS = 8
"""Rows that one role may have; of more, the rest is counted."""


class Role(NamedTuple):
    """Something that runs, where, and how much of it."""

    name: str
    where: str
    share: str = ""


class Move(NamedTuple):
    """Something that moves, on which way, and how many bytes in an update; None where sizes are not known."""

    name: str
    way: str
    amount: int | None


def table(title: str, roles: Iterable[Role], moves: Iterable[Move]) -> str:
    """Return who runs where and what moves in lines for people.

    >>> print(table("Here:", [Role("learning", "cpu:0", "all of it")], [Move("actions", "down", 12_800)]))
    Here:
      learning  cpu:0  all of it
      moves in an update:
      actions   down   12.8 kB
    """
    rows: list[Sequence[str]] = []
    for name, group in groupby(roles, key=lambda role: role.name):
        same = list(group)
        rows += same[:MOST_ROWS]
        if same[MOST_ROWS:]:
            rows.append((name, f"{len(same) - MOST_ROWS} more", "likewise"))
    moved = [(name, way, "" if amount is None else in_bytes(amount)) for name, way, amount in moves]
    rows += [("moves in an update:",) if moved else ("nothing moves",), *moved]
    # The heading is no cell: it is as long as it is.
    widths = [max(len(row[column]) for row in rows if len(row) > 1) for column in range(3)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip() for row in rows]
    return "\n".join([title, *(f"  {line}" for line in lines)])


def device_name(device: jax.Device) -> str:
    """Return such as "cpu:0"."""
    return f"{device.platform}:{device.id}"


def numbers(first: int, count: int) -> str:
    """Name consecutive environments.

    >>> numbers(8, 4), numbers(3, 1)
    ('environments 8 to 11', 'environment 3')
    """
    return f"environments {first} to {first + count - 1}" if count > 1 else f"environment {first}"


def roles_on(devices: Sequence[jax.Device], name: str, shares: Iterable[str]) -> list[Role]:
    """Return a role of this name on every device, each with its share."""
    return [Role(name, device_name(device), share) for device, share in zip(devices, shares, strict=True)]


def shares(num_envs: int | None, parts: int, first: int = 0) -> list[str]:
    """Name the environments of each of `parts` that share them evenly, from number `first` on; None for any number."""
    if num_envs is None:
        return ["its share of the environments"] * parts
    return [numbers(first + i * (num_envs // parts), num_envs // parts) for i in range(parts)]


def nbytes(tree: PyTree) -> int:
    """Return the bytes of all arrays; shapes and dtypes will do."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def in_bytes(number: int) -> str:
    """Write a number of bytes.

    >>> in_bytes(0), in_bytes(999), in_bytes(28_901_376)
    ('0 B', '999 B', '28.9 MB')
    """
    amount, units = float(number), ["B", "kB", "MB", "GB", "TB"]
    while amount >= 999.95 and len(units) > 1:
        amount, units = amount / 1000, units[1:]
    return f"{number} B" if units[0] == "B" else f"{amount:.3g} {units[0]}"


class Report(str):
    """Who runs where, what moves, how stale it may be and who waits for whom: text for people, with its parts.

    In a notebook it shows as a picture; `save` writes that.

    Args:
      headline: what the placement does, in a sentence.
      roles: who runs where, in the order of the drawing; those that follow one another and differ by a number share a
        box.
      moves: what moves, and how much; `way` names the roles at its ends in its order ("workers to server"), or one or
        none for what moves among its equals.
      stale: how old what is learnt from may be, in a sentence.
      waits: who waits for whom, in a sentence.

    Attributes:
      words: all of it but the drawing.
      drawing: boxes and arrows, in at most `COLUMNS` columns.

    >>> roles = [Role("acting", "cpu:0"), Role("learning", "cpu:1"), Role("learning", "cpu:2")]
    >>> moves = [Move("rollouts", "acting to learning", 12_800)]
    >>> print(Report("Here:", roles, moves, stale="never.", waits="nobody.").drawing)
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

    def __new__(cls, headline: str, roles: Iterable[Role], moves: Iterable[Move], *, stale: str, waits: str) -> Report:
        """Write it down."""
        roles, moves = tuple(roles), tuple(moves)
        drawing = in_characters(_layout(roles, moves))
        words = f"{table(headline, roles, moves)}\n  how stale: {stale}\n  who waits: {waits}"
        report = super().__new__(cls, f"{words}\n\n{textwrap.indent(drawing, '  ')}")
        report.headline, report.roles, report.moves, report.stale, report.waits = headline, roles, moves, stale, waits
        report.words, report.drawing = words, drawing
        return report

    def svg(self) -> str:
        """Return the drawing, between the headline and what is said of waiting, as SVG."""
        below = wrapped([f"How stale: {self.stale}", f"Who waits: {self.waits}"], COLUMNS)
        return in_svg(_layout(self.roles, self.moves, textwrap.wrap(self.headline, COLUMNS), below), self.headline)

    def _repr_svg_(self) -> str:
        return self.svg()

    def save(self, path: Path | str) -> None:
        """Write the text (.txt) or the drawing (.svg), by the ending of `path`.

        Raises:
          ValueError: for any other ending.
        """
        path = Path(path)
        contents = {".txt": f"{self}\n", ".svg": self.svg()}
        if path.suffix not in contents:
            raise ValueError(f"path={str(path)!r} must end in .txt or .svg.")
        write_atomic(path, contents[path.suffix].encode())


def _layout(
    roles: Sequence[Role], moves: Sequence[Move], above: Sequence[str] = (), below: Sequence[str] = ()
) -> Drawing:
    """Stack a box for every kind of role, arrows between neighbours; what moves otherwise is said beside or below."""
    kinds = [(name, list(group)) for name, group in groupby(roles, key=lambda role: re.sub(r" \d+$", "", role.name))]
    labels: dict[tuple[int, int], list[str]] = {}
    apart = []
    for move in moves:
        a, b = _ends(move, [name for name, _ in kinds])
        label = move.name if move.amount is None else f"{move.name}, {in_bytes(move.amount)}"
        # What moves among equals is said where there is any of it: among one there is none.
        if a != b or move.amount != 0:
            labels.setdefault((a, b), []).append(label)
        if abs(a - b) > 1:
            apart.append(f"{label}: {move.way}")
    boxes, arrows, texts, y = [], [], [(0, i, line) for i, line in enumerate(above)], len(above) + bool(above)
    for number, (name, group) in enumerate(kinds):
        lines = _describe(name, group)
        beside = wrapped([f"↻ {label}" for label in labels.get((number, number), [])], COLUMNS - BOX - 2)
        height = max(len(lines), len(beside)) + 2
        boxes.append((0, y, height))
        texts += [(2, y + 1 + i, line) for i, line in enumerate(lines)]
        texts += [(BOX + 1, y + 1 + i, line) for i, line in enumerate(beside)]
        y += height
        if number + 1 < len(kinds):
            down, up = labels.get((number, number + 1), []), labels.get((number + 1, number), [])
            gap = max(len(down), len(up)) + 1
            arrows += [(DOWN, y - 1, y + gap)] * bool(down) + [(UP, y + gap, y - 1)] * bool(up)
            texts += [(DOWN + 2, y + i, text) for i, text in enumerate(down)]
            texts += [(UP + 2, y + 1 + i, text) for i, text in enumerate(up)]  # Beside its line, not its head.
            y += gap
    notes = [*wrapped(apart, COLUMNS), *([""] if below else []), *below]
    texts += [(0, y + i, line) for i, line in enumerate(notes)]
    return Drawing(y + len(notes), boxes, arrows, texts)


def _describe(name: str, group: Sequence[Role]) -> list[str]:
    """Return what stands in the box of roles of one kind."""
    places = list(dict.fromkeys(role.where for role in group))
    shares = list(dict.fromkeys(role.share for role in group))
    where = ", ".join(places) if len(places) < 3 else f"{places[0]} to {places[-1]}"
    share = shares[0] if len(shares) == 1 else f"{shares[0]}, and so on"
    return wrapped([f"{name} x {len(group)}" if len(group) > 1 else name, where, share], BOX - 4)


def _ends(move: Move, names: Sequence[str]) -> tuple[int, int]:
    """Return the numbers of the boxes that a move leaves and reaches, from the names of roles in its way."""
    matches = [(re.search(rf"\b{re.escape(name)}s?\b", move.way), number) for number, name in enumerate(names)]
    numbers = [number for _, number in sorted((m.start(), n) for m, n in matches if m)] or [len(names) - 1]
    return numbers[0], numbers[-1]
