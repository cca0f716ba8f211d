"""A table that a script makes, between two lines of a page that people write."""

from __future__ import annotations

from pathlib import Path

from podium.files import write_atomic


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
