"""A table that a script makes: which of its rows are asked for, and where it stands on a page that people write."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from podium.files import write_atomic
from podium.ranges import did_you_mean


def write_between(page: Path, begin: str, end: str, table: str) -> None:
    """Put `table` between the lines `begin` and `end` of a page, in place of what was there.

    Raises:
      ValueError: the page lacks one of the lines.
    """
    text = page.read_text()
    if begin not in text or end not in text:
        raise ValueError(f"{page} lacks the lines {begin!r} and {end!r} that the table goes between; put them in.")
    head, rest = text.split(begin, 1)
    write_atomic(page, f"{head}{begin}\n\n{table}\n\n{end}{rest.split(end, 1)[1]}".encode())


def check_rows(asked: Collection[str], rows: Collection[str]) -> None:
    """Raise ValueError where a name that `--only` gives is none of the rows', naming the nearest."""
    for name in asked:
        if name not in rows:
            raise ValueError(f"--only {name} is no row.{did_you_mean(name, rows)} --list names them.")
