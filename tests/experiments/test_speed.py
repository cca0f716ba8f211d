"""The table of speed: rows that are measured in processes, beside another checkout, and written between two lines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import speed


def checkout(folder: Path, rate: float) -> Path:
    """Return a checkout whose benchmark.py finds this rate at once."""
    (folder / "experiments").mkdir(parents=True)
    line = {"steps_per_second": rate, "versions": {}, "hardware": {"cores": 2, "load_average": 0.5}}
    (folder / "experiments" / "benchmark.py").write_text(
        f"import sys\nassert 'dqn' in sys.argv\nprint('{json.dumps(line)}')\n"
    )
    return folder


def test_a_row_is_measured_in_turn_with_another_checkout(tmp_path: Path) -> None:
    row = next(row for row in speed.ROWS if row.name == "dqn")
    here, there = speed.measure(row, [checkout(tmp_path / "new", 300.0), checkout(tmp_path / "old", 200.0)], 2)
    assert here["figures"] == {"steps_per_second": [300.0, 300.0]}
    assert here["command"] == "python experiments/benchmark.py anakin --agent dqn --num-steps 50000"
    assert speed.compare(row, here, there)["ratio"] == 1.5
    assert "300 steps/s" in speed.table({"dqn": here})


def test_seconds_are_faster_where_they_are_fewer() -> None:
    row = next(row for row in speed.ROWS if row.name == "solve")
    found = [{"figures": {"median_seconds": [seconds]}} for seconds in (1.0, 3.0)]
    assert speed.compare(row, *found)["ratio"] == 3.0


@pytest.mark.parametrize(("page", "front"), [("experiments/README.md", False), ("README.md", True)])
def test_the_pages_have_the_table_of_what_was_measured(page: str, front: bool) -> None:
    text, results = (
        (speed.HERE.parent / page).read_text(),
        json.loads((speed.HERE / "results" / "speed.json").read_text()),
    )
    assert text.split(speed.BEGIN)[1].split(speed.END)[0].strip() == speed.table(results, front)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--only", "dreamer"], "--only dreamer is no row. --list names them"),
        (["--only", "sebulba-65"], "--only sebulba-65 is no row. Did you mean 'sebulba-64'? --list names them"),
        (["--rounds", "0"], "--rounds 0 must be at least 1."),
        (["--beside", "nowhere"], "--beside nowhere is no checkout"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    flags: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert speed.main(flags) == 2
    assert sentence in capsys.readouterr().err


def test_a_page_without_the_lines_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "README.md").write_text("nothing\n")
    assert speed.main(["--draw", "--results", str(tmp_path / "none.json"), "--page", str(tmp_path / "README.md")]) == 2
    assert "lacks the lines" in capsys.readouterr().err
