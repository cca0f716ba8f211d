"""The rows of evidence: each names what there is, and a try trains, resumes and keeps nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import podium
from podium import presets
from podium.files import write_json


@pytest.fixture
def evidence() -> Any:
    import evidence

    return evidence


def test_rows_name_what_there_is(evidence: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert evidence.main(["--list"]) == 0
    names = capsys.readouterr().out.split()
    assert names == [row.name for row in evidence.ROWS] and len(set(names)) == len(names)
    borrowed = {"ppo/Boxing-v5"}  # A preset made for another game, as its remark says.
    for row in evidence.ROWS:
        assert row.agent in podium.agents.names() and row.env in podium.envs.names()
        made_for = "none" if row.preset == "none" else presets.of_agent(row.agent)[row.preset].env
        assert made_for in ("none", row.env) or row.name in borrowed


def test_a_row_that_is_none_is_refused(evidence: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert evidence.main(["--only", "ddpg/CartPole-v1"]) == 2
    assert "ddpg/CartPole-v1 is no row. Did you mean 'pqn/CartPole-v1'?" in capsys.readouterr().err


def test_a_try_gives_a_row_and_keeps_nothing(evidence: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    given = ["--only", "ppo/podium/Catch", "--seeds", "2", "--num-steps", "4096"]
    given += ["--runs", str(tmp_path / "runs"), "--results", str(tmp_path / "results")]
    rows = []
    for _ in range(2):  # The second finds the run ended, and says the same of it.
        assert evidence.main(given) == 0
        rows.append(json.loads(capfd.readouterr().out.splitlines()[-1]))
    row = rows[0]
    assert row == rows[1] and not (tmp_path / "results").exists()
    assert (row["name"], row["steps"], len(row["returns"]), len(row["returns_sampled"])) == (
        *("ppo/podium/Catch", 4096),
        *(2, 2),
    )
    low, high = row["interval"]
    assert low <= row["mean"] == sum(row["returns"]) / 2 <= high and row["wall_seconds"] > 0


def test_results_become_a_table_and_pictures(evidence: Any, tmp_path: Path) -> None:
    row = next(row for row in evidence.ROWS if row.name == "ppo/CartPole-v1")
    result = {
        **{"name": row.name, "settings": row.settings(), "steps": 500_000, "returns": [490.0, 500.0], "mean": 495.0},
        **{"interval": [431.5, 558.5], "returns_sampled": [480.0, 470.0], "wall_seconds": 12.3},
        "curve": [[250_000, [200.0, 300.0]], [500_000, [490.0, 500.0]]],
    }
    write_json(tmp_path / f"{row.file}.json", result)
    (tmp_path / "README.md").write_text(f"before\n{evidence.BEGIN}\nold\n{evidence.END}\nafter\n")
    assert evidence.main(["--draw", "--results", str(tmp_path)]) == 0
    text = (tmp_path / "README.md").read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert "**495** [431.5, 558.5] | 490, 500 | 475 | 500 (RL Baselines3 Zoo" in text
    assert (tmp_path / f"{row.file}.png").stat().st_size > 1_000
    kept = json.loads((tmp_path / f"{row.file}.json").read_text())
    assert kept["published"]["value"] == 500 and kept["returns"] == [490.0, 500.0]  # As the row says; as it was.
    assert not [path for path in tmp_path.iterdir() if ".tmp" in path.name]
    (tmp_path / "README.md").write_text("no marks\n")
    assert evidence.main(["--draw", "--results", str(tmp_path)]) == 2
