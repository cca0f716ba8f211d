"""The scripts of leagues and of PSRO train, rate and judge."""

from __future__ import annotations

import json
from pathlib import Path

import league
import psro
import pytest

SIZES = "--num-steps 1024 --num-envs 16 --rollout-length 16 --size 2 --games 4 --config hidden_sizes=(16,)"


@pytest.mark.slow
@pytest.mark.parametrize("compare", [False, True])
def test_the_league_is_rated(tmp_path: Path, compare: bool) -> None:
    argv = ["--env", "podium/TicTacToe", *SIZES.split(), "--run-dir", str(tmp_path), *["--compare"] * compare]
    assert league.main(argv) == 0
    summary, table = (json.loads((tmp_path / name).read_text()) for name in ("summary.json", "elo.json"))
    names = ["league", "self-play", "uniform"] if compare else ["learner", "snapshot 2", "snapshot 1"]
    assert list(summary["elo"]) == list(table["elo"]) == names and sum(summary["elo"].values()) == pytest.approx(0)
    assert summary["lines_lost"] == sum(summary[seat]["lost"] for seat in ("first", "second"))
    assert (tmp_path / "elo.png").read_bytes().startswith(b"\x89PNG")
    assert ("rate" in summary) == compare
    if compare:
        assert summary["elo_above_self_play"] == summary["elo"]["league"] - summary["elo"]["self-play"]


@pytest.mark.slow
def test_psro_says_how_much_its_mixture_can_be_exploited(tmp_path: Path) -> None:
    assert psro.main(["--iterations", "2", "--num-steps", "8192", "--run-dir", str(tmp_path)]) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert 0 <= summary["exploitability"] == summary["exploitability_before_each"][-1] < 1.2
    assert len(summary["weights"][0]) == 3


def test_a_wrong_flag_is_refused_before_anything_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    for argv, words in (
        (["--env", "podium/Catch"], "two players in turn"),
        (["--games", "3"], "--games 3 must be even"),
        (["--num-envs", "24"], "num_envs=24 is not divisible by 16"),
    ):
        assert league.main([*argv, "--run-dir", str(folder)]) == 2
        assert words in capsys.readouterr().err
    assert not folder.exists()
