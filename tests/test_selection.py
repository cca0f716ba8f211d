"""What every change waits for: no entry of nightly.txt that has lost its test, and none of smoke.txt that waits."""

from __future__ import annotations

import itertools
from pathlib import Path

SMOKE = Path(__file__).with_name("smoke.txt")
"""What says whether podium works on another Python, `pytest @tests/smoke.txt`, which ends where it finds one not."""


def test_every_entry_is_how_a_test_begins(stale: list[str]) -> None:
    assert not stale


def test_no_entry_covers_another(nightly: tuple[str, ...]) -> None:
    entries = sorted(nightly)
    covered = [after for before, after in itertools.pairwise(entries) if after.startswith(before)]
    assert entries and not covered


def test_what_smoke_is_for_another_python_runs_by_day(nightly: tuple[str, ...]) -> None:
    lines = SMOKE.read_text().splitlines()
    assert lines and not [line for line in lines if line.startswith(nightly)]
