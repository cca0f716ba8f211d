"""What every change waits for: no entry of nightly.txt that has lost its test, and none of smoke.txt that waits."""

from __future__ import annotations

import itertools
from pathlib import Path

FILE = Path(__file__).with_name("nightly.txt")
SMOKE = Path(__file__).with_name("smoke.txt")
"""What says whether podium works on another Python, `pytest @tests/smoke.txt`, which ends where it finds one not."""


def test_every_entry_is_how_a_test_begins(stale: list[str]) -> None:
    assert not stale


def nightly() -> list[str]:
    return [line for line in FILE.read_text().splitlines() if line and not line.startswith("#")]


def test_no_entry_covers_another() -> None:
    entries = sorted(nightly())
    covered = [after for before, after in itertools.pairwise(entries) if after.startswith(before)]
    assert entries and not covered


def test_what_smoke_is_for_another_python_runs_by_day() -> None:
    assert not [line for line in SMOKE.read_text().splitlines() if line.startswith(tuple(nightly()))]
