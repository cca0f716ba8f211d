"""What a placement says of itself: who runs where, and what moves in an update. One small table for all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

import jax

from podium.types import PyTree

LONGEST = 8
"""Rows that one role may have; of more, the rest is counted."""


class Role(NamedTuple):
    """Something that runs, where, and how much of it."""

    name: str
    where: str
    share: str = ""


class Move(NamedTuple):
    """Something that moves, on which way, and how many bytes of it an update; a formula where sizes are not known."""

    name: str
    way: str
    amount: int | str


def table(title: str, roles: Iterable[Role], moves: Iterable[Move]) -> str:
    """Return who runs where and what moves in lines for people.

    >>> print(table("Here:", [Role("learning", "cpu:0", "all of it")], [Move("actions", "down", 12_800)]))
    Here:
      learning  cpu:0  all of it
      moves in an update:
      actions   down   12.8 kB
    """
    moved = [(name, way, amount if isinstance(amount, str) else in_bytes(amount)) for name, way, amount in moves]
    head = ("moves in an update:",) if moved else ("nothing moves",)
    rows: list[Sequence[str]] = [*_shorten(roles), head, *moved]
    # The heading is no cell: it is as long as it is.
    widths = [max(len(row[column]) for row in rows if len(row) > 1) for column in range(3)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip() for row in rows]
    return "\n".join([title, *(f"  {line}" for line in lines)])


def _shorten(roles: Iterable[Role]) -> list[Role]:
    shown: list[Role] = []
    for name, group in groupby(roles, key=lambda role: role.name):
        same = list(group)
        shown += same[:LONGEST] + ([Role(name, f"{len(same) - LONGEST} more", "likewise")] if same[LONGEST:] else [])
    return shown


def device_name(device: jax.Device) -> str:
    """Return such as "cpu:0"."""
    return f"{device.platform}:{device.id}"


def numbers(first: int, count: int) -> str:
    """Name consecutive environments.

    >>> numbers(8, 4), numbers(3, 1)
    ('environments 8 to 11', 'environment 3')
    """
    return f"environments {first} to {first + count - 1}" if count > 1 else f"environment {first}"


def nbytes(tree: PyTree) -> int:
    """Return the bytes of all arrays; shapes and dtypes will do."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def in_bytes(number: int) -> str:
    """Write a number of bytes.

    >>> in_bytes(0), in_bytes(999), in_bytes(28_901_376)
    ('0 B', '999 B', '28.9 MB')
    """
    amount, unit = float(number), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if amount < 999.95 or unit == "TB":
            break
        amount /= 1000
    return f"{number} B" if unit == "B" else f"{amount:.3g} {unit}"
