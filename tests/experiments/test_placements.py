"""The table of placements: a row each, with what other tools read, and refusals in a sentence."""

from __future__ import annotations

import json
from pathlib import Path

import placements
import pytest

from podium.placement import PLACEMENTS

NEEDED = {
    "placement",
    "agent",
    "env",
    "episode_return",
    "optimum",
    "steps_per_second",
    "policy_lag_mean",
    "policy_lag_max",
    "bytes_per_update",
}


@pytest.mark.slow
def test_every_placement_has_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    code = placements.main(["--agent", "a2c", "--num-steps", "1024", "--seed", "3", "--json", str(file)])
    assert code == 0
    rows = json.loads(file.read_text())
    assert [row["placement"] for row in rows] == [kind.__name__ for kind in PLACEMENTS.values()]
    for row in rows:
        assert row.keys() >= NEEDED
        assert row["optimum"] == 1.0
        assert row["seed"] == 3
        assert -1 <= row["episode_return"] <= 1
        assert row["steps_per_second"] > 0
        # A single device sends nothing.
        assert (row["bytes_per_update"] > 0) == (row["placement"] != "Single")
    table = capsys.readouterr().out
    assert all(f"| {row['placement']} |" in table for row in rows)


def test_a_row_has_what_other_tools_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    arguments = ["--agent", "a2c", "--num-steps", "1024", "--json", str(file), "--placements", "local_sgd"]
    assert placements.main(arguments) == 0
    (row,) = json.loads(file.read_text())
    assert row.keys() >= NEEDED
    assert row["bytes_per_update"] > 0
    assert "| LocalSGD |" in capsys.readouterr().out


def test_unknown_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert placements.main(["--env", "podium/Cacth", "--placements", "anakin"]) == 2
    assert "podium/Catch" in capsys.readouterr().err
    assert placements.main(["--placements", "anakim"]) == 2
    assert "Did you mean 'anakin'?" in capsys.readouterr().err
