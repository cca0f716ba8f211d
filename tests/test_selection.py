"""What every change waits for: no entry of nightly.txt, or of the smoke tests, that has lost its test."""

from __future__ import annotations

import itertools
from pathlib import Path

FILE = Path(__file__).with_name("nightly.txt")


def test_every_entry_is_how_a_test_begins(stale: list[str]) -> None:
    assert not stale


def test_no_entry_covers_another() -> None:
    entries = sorted(line for line in FILE.read_text().splitlines() if line and not line.startswith("#"))
    covered = [after for before, after in itertools.pairwise(entries) if after.startswith(before)]
    assert entries and not covered
