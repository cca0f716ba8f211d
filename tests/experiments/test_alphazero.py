"""The script of AlphaZero trains, and judges what it trained."""

from __future__ import annotations

import json
from pathlib import Path

import alphazero_anakin
import pytest

pytest.importorskip("mctx", reason='mctx is in the extra: pip install "podium[games]"')


def test_the_summary_says_how_many_lines_are_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--num-steps 1024 --num-envs 16 --rollout-length 16 --hidden-sizes 16 --num-simulations 4 --batch-size 64"
    more = "--min-replay-size 256 --num-updates 1 --no-progress --no-compilation-cache --devices 1"
    argv = ["--env", "podium/TicTacToe", *sizes.split(), *more.split(), "--run-dir", str(tmp_path / "run")]
    assert alphazero_anakin.main(argv) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["lines_lost"] == sum(summary["lines"][seat]["lost"] for seat in ("first", "second")) > 0
    assert "lines lost" in capsys.readouterr().out


def test_a_game_without_rules_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    assert alphazero_anakin.main(["--env", "podium/Catch", "--run-dir", str(tmp_path / "run")])
    assert not (tmp_path / "run").exists()
