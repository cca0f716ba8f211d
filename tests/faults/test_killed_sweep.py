"""A sweep that is killed, at whatever moment, and resumed, ends with the table of one that was not, to the bit."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FLAGS = (
    "sweep --agent ppo --env podium/Catch --preset none --vary learning_rate=1e-3..1e-2:log:4 activation=tanh,relu "
    "--at-once 2 --seeds 2 --devices 1 --num-envs 8 --rollout-length 8 --num-steps 40960 --eval-every 4096 "
    "--eval-episodes 8 --hidden-sizes 16"
)
ALL = ("sweep.json", "program-0/config.json", "program-1/checkpoints/*/manifest.json", "program-3/*.jsonl")
HALVED = ("program-1/*.jsonl", ".*.partial", "program-*-rung-1/*.jsonl", "program-*-rung-2/checkpoints/*/manifest.json")


def start(run_dir: Path, *further: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "podium", *FLAGS.split(), "--run-dir", str(run_dir), *further]
    return subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})


@pytest.mark.slow
@pytest.mark.parametrize(("further", "moments"), [("", ALL), ("--halve-at 8192 16384", HALVED)])
def test_killed_and_resumed_the_table_is_the_same(further: str, moments: tuple[str, ...], tmp_path: Path) -> None:
    assert start(tmp_path / "whole", *further.split()).wait() == 0
    run_dir, kills = tmp_path / "killed", 0
    for wanted in moments:
        process = start(run_dir, *further.split(), *(["--resume"] if run_dir.exists() else []))
        while process.poll() is None and not list(run_dir.glob(wanted)):
            time.sleep(0.01)
        kills += process.poll() is None
        process.kill()
        process.wait()
    assert kills >= 3
    assert start(run_dir, *further.split(), "--resume").wait() == 0
    assert (run_dir / "table.json").read_bytes() == (tmp_path / "whole" / "table.json").read_bytes()
