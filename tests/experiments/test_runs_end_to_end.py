"""Train, go on, replay: the scripts one after another on one small run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import ppo_anakin
import pytest
from PIL import Image

import podium
from podium.__main__ import main
from podium.commands import cache, replay

TRAIN = (
    "--env podium/Catch --env-options rows=4 columns=3 --preset none --devices 1 --num-envs 8 --rollout-length 8 "
    "--hidden-sizes 8 --eval-episodes 4 --run-dir run --no-progress --no-compilation-cache"
).split()


@pytest.fixture
def trained(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Train two seeds for 128 steps; return what was printed."""
    monkeypatch.setenv("PODIUM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "use_compilation_cache", lambda: None)
    assert ppo_anakin.main([*TRAIN, "--seeds", "2", "--num-steps", "130"]) == 0
    return capsys.readouterr().out


def test_train_resume_replay(trained: str, capsys: pytest.CaptureFixture[str]) -> None:
    for row in (
        "agent          ppo",
        "environment    podium/Catch rows=4 columns=3",
        "8 environments on each",
        "128 a seed, rounded down from 130 to whole rollouts",
        "2 rollouts of 64 steps",
        "16 steps, 4 a pass, 4 passes",
        "podium replay run",
    ):
        assert row in trained or row == "8 environments on each" and "2 whole runs on each" in trained, row
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["env_steps"] == 128 and len(summary["eval_return"]) == 2

    more = [*TRAIN, "--seeds", "2", "--num-steps", "192"]
    assert ppo_anakin.main([*more, "--resume", "--gamma", "0.5"]) == 2
    assert "gamma was 0.99 and is 0.5" in capsys.readouterr().err
    assert ppo_anakin.main([*more, "--resume"]) == 0
    capsys.readouterr()
    assert json.loads(Path("run/summary.json").read_text())["env_steps"] == 192

    assert main(["replay", "run", "--episodes", "3", "--policy", "1", "--fps", "10"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[:3]] == ["episode 1", "episode 2", "episode 3"]
    assert all("3 steps, terminated" in line for line in lines[:3])
    # Three steps an episode: the state before each, and the last.
    assert lines[-1] == "run/replay.gif: 12 frames, 10 a second"
    with Image.open("run/replay.gif") as gif:
        assert gif.n_frames > 3 and gif.size == (3 * 16, 4 * 16)
        gif.seek(2)
        assert len(np.unique(np.asarray(gif.convert("RGB")).reshape(-1, 3), axis=0)) > 3
    assert main(["replay", "run", "--best", "--gif", "best.gif", "--max-frames", "2"]) == 0
    assert Path("best.gif").stat().st_size > 100

    for argv, named in (
        (["missing"], "missing"),
        (["run", "--episodes", "0"], "episodes"),
        (["run", "--max-steps", "-1"], "max_steps"),
        (["run", "--fps", "0"], "fps"),
        (["run", "--policy", "2"], "seed=2"),
        (["run", "--best", "--step", "64"], "--step"),
        ([], "RUN_DIR"),
    ):
        assert main(["replay", *argv]) == 2, argv
        error = capsys.readouterr().err
        assert named in error and error.count("\n") == 1, error


def test_returns_are_printed_without_a_renderer(
    trained: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make = podium.envs.make
    monkeypatch.setattr(podium.envs, "make", lambda name, **options: make(name, **options)._replace(render=None))
    assert main(["replay", "run", "--episodes", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("episode 1: return") and "has no renderer" in lines[-1]
    assert not Path("run/replay.gif").exists()


def test_played_returns_are_those_of_evaluate() -> None:
    """Catch pays 1 or -1 once, so a mean over the same number of episodes must agree with the parts."""
    env = podium.envs.make("podium/Corridor")
    result = podium.train(
        podium.agents.ppo.make(),
        env,
        num_steps=64,
        num_envs=8,
        rollout_length=8,
        placement=podium.Single(),
        progress=False,
    )
    episodes = replay.play(result.policy, env, 4, max_steps=7)
    scores = podium.evaluate(result.policy, env, 4, max_steps=7)
    assert np.isclose(np.mean([episode.episode_return for episode in episodes]), scores["eval_return"])
    assert np.isclose(np.mean([episode.length for episode in episodes]), scores["eval_length"])
    assert np.mean([episode.ending == "cut" for episode in episodes]) == scores["eval_unfinished"]
    assert all(len(episode.states) == episode.length + 1 for episode in episodes)
