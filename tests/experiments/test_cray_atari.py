"""The Cray table: every cell runs, what has ended is left alone, and the table says what the runs say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cray_atari
import pytest

import podium

SUMMARY = {
    "env_steps": 9_999_360,
    "eval_return": 15_321.4,
    "episode_return": None,
    "wall_seconds": 90.0,
    "steps_per_second": 1234.5,
    "num_devices": 2,
    "platform": "gpu",
    "interrupted": None,
}


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Let scripts note their flags and write a summary in place of training; the third is stopped by a signal."""
    calls: list[list[str]] = []

    class Script:
        @staticmethod
        def main(argv: list[str]) -> int:
            calls.append(argv)
            folder = Path(argv[argv.index("--run-dir") + 1])
            folder.mkdir(parents=True, exist_ok=True)
            stopped = len(calls) == 3
            (folder / "summary.json").write_text(json.dumps({**SUMMARY, "interrupted": "SIGTERM" if stopped else None}))
            return 143 if stopped else 0

    monkeypatch.setattr(cray_atari, "SCRIPTS", dict.fromkeys(cray_atari.SCRIPTS, Script))
    return calls


def test_it_goes_on_where_it_was_stopped(scripts: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--agents", "a2c", "--folder", "cells", "--", "--actor-threads", "4"]
    assert cray_atari.main(argv) == 143 and len(scripts) == 3
    assert len(json.loads(Path("cells/table.json").read_text())) == 2
    assert cray_atari.main(argv) == 0 and len(scripts) == 5
    assert [" ".join(call).count("--resume") for call in scripts] == [0, 0, 0, 1, 0]
    assert "--env Qbert-v5 --preset atari-a2c --num-steps 10000000" in " ".join(scripts[3])
    assert "life_loss=True --actor-threads 4 --run-dir cells/a2c-Qbert" in " ".join(scripts[3])
    table = Path("cells/table.md").read_text()
    assert "| a2c | Qbert | 9,999,360 | 15,321 |  | 1.5 | 1,234 | 2 gpu | 15,101 | 1 h 36 min |" in table
    assert table in capsys.readouterr().out and cray_atari.main(argv) == 0 and len(scripts) == 5


@pytest.mark.parametrize(("argv", "named"), [(["--agents", "ape-x"], "ape-x"), (["--games", "Pong"], "Pong")])
def test_what_is_no_cell_is_refused(argv: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cray_atari.main(argv) == 2
    error = capsys.readouterr().err
    assert named in error and error.count("\n") == 1
    assert not list(Path().iterdir())


@pytest.mark.slow
def test_every_cell_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("envpool", reason='envpool is in the extra: pip install "podium[atari]"')
    monkeypatch.setenv("PODIUM_CACHE", str(tmp_path / "cache"))
    assert cray_atari.main(["--smoke", "--folder", "cells"]) == 0
    rows: list[dict[str, Any]] = json.loads(Path("cells/table.json").read_text())
    assert len(rows) == 12 and {row["env_steps"] for row in rows} == {cray_atari.SMOKE_STEPS}
    for row in rows:
        assert podium.load(Path("cells") / row["run"]).spec.name == f"{row['game']}-v5"
