"""podium.launch: what podium.train returns, from processes of a Ray cluster; and a learner that dies and goes on."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import podium
from podium.agents import a2c
from podium.placement.remote.engine import EngineError
from podium.sinks import read_metrics

pytestmark = pytest.mark.xdist_group("ray")

A2C = a2c.make(a2c.Config(hidden_sizes=(16,)))
STEPS = 8 * 8
SIZES: dict[str, Any] = {"num_envs": 8, "rollout_length": 8, "eval_episodes": 8, "progress": False}
PLACEMENT = podium.ParameterServer(1, devices=1)


def test_it_trains_with_workers_elsewhere_and_the_cluster_that_was_joined_stays(cluster: Any, tmp_path: Path) -> None:
    arguments = {**SIZES, "num_steps": 4 * STEPS, "eval_every": 0, "run_dir": tmp_path / "run"}
    result = podium.launch(A2C, "podium/Catch", placement=PLACEMENT, **arguments)
    assert result.summary["env_steps"] == 4 * STEPS and float(result.state.env_steps) == 4 * STEPS
    assert "Ray actor" in (tmp_path / "run" / "placement.txt").read_text()
    assert cluster.is_initialized()
    with pytest.raises(ValueError, match="This process has joined a Ray cluster already"):
        podium.launch(A2C, "podium/Catch", placement=PLACEMENT, address="auto", **arguments)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"restarts": -1}, "restarts=-1 must be an integer of 0 or more"),
        ({"restarts": 2}, "restarts=2 needs run_dir"),
        ({"restarts": 1, "run_dir": "runs/x", "checkpoint_every": 0}, "checkpoint_every=0 saves at the end only"),
        ({"restarts": 1, "run_dir": "runs/x", "eval_every": 0}, "eval_every=0, without checkpoint_every, saves at the"),
        ({"placement": podium.Anakin(1)}, "placement=Anakin: it has no workers .* use podium.train, or restarts=1"),
    ],
)
def test_what_cannot_be_launched_is_refused_before_anything_starts(changes: dict[str, Any], words: str) -> None:
    pytest.importorskip("ray", reason="the extra ray is not installed")
    with pytest.raises(ValueError, match=words):
        podium.launch(A2C, "podium/Catch", num_steps=STEPS, **{"placement": PLACEMENT, **SIZES, **changes})


@pytest.mark.parametrize(
    ("placement", "words"),
    [
        (podium.Sebulba(engine="ray"), "engine='ray' has no Ray cluster to live in; use podium.launch"),
        (podium.ParameterServer(2, engine="ray"), "engine='ray' has no Ray cluster"),
        (podium.DistributedActors(replay_apart=True, replay_engine="ray"), "replay_engine='ray' has no Ray cluster"),
    ],
)
def test_without_a_cluster_nothing_is_compiled_or_written(
    placement: Any, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = pytest.importorskip("ray", reason="the extra ray is not installed")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(ValueError, match=words):
        podium.train(A2C, "podium/Catch", placement=placement, num_steps=STEPS, run_dir=tmp_path / "run", **SIZES)
    assert not list(tmp_path.iterdir())


@pytest.mark.extras
def test_without_ray_it_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r'pip install "podium\[ray\]"'):
        podium.launch(A2C, "podium/Catch", placement=PLACEMENT, num_steps=STEPS)


@dataclasses.dataclass
class Pids:
    """A sink that notes which process trains."""

    path: Path

    def write(self, row: dict[str, Any]) -> None:
        with open(self.path, "a") as file:
            file.write(f"{os.getpid()}\n")

    def close(self, summary: dict[str, Any]) -> None:
        del summary

    def seen(self) -> list[int]:
        lines = self.path.read_text().split() if self.path.exists() else []
        return list(dict.fromkeys(map(int, lines)))


def launch_and(
    act: Callable[[int], None], tmp_path: Path, restarts: int, updates: int, learners: int = 1
) -> tuple[podium.Result, Pids]:
    """Launch, and act on each of the first `learners` learner processes once it has written a checkpoint."""
    pids, run_dir = Pids(tmp_path / "pids"), tmp_path / "run"

    def watch() -> None:
        deadline, before = time.monotonic() + 240, 0
        for number in range(learners):
            while time.monotonic() < deadline:
                steps = [int(path.parent.name) for path in run_dir.glob("checkpoints/*/manifest.json")]
                if len(pids.seen()) > number and max(steps, default=0) > before:
                    before = max(steps)
                    act(pids.seen()[number])
                    break
                time.sleep(0.01)

    threading.Thread(target=watch, daemon=True).start()
    result = podium.launch(
        A2C,
        "podium/Catch",
        placement=PLACEMENT,
        restarts=restarts,
        run_dir=run_dir,
        num_steps=updates * STEPS,
        checkpoint_every=20 * STEPS,
        eval_every=0,
        log_every=10 * STEPS,
        sinks=[pids],
        **SIZES,
    )
    return result, pids


@pytest.mark.slow
@pytest.mark.usefixtures("by_value")
def test_a_learner_that_is_killed_goes_on_from_its_checkpoint(
    tmp_path: Path, gone: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    updates = 600
    result, pids = launch_and(lambda pid: os.kill(pid, signal.SIGKILL), tmp_path, restarts=1, updates=updates)
    assert len(pids.seen()) == 2, "the learner ended before it was killed"
    assert "restart 1 of 1 goes on from its checkpoint" in capfd.readouterr().err
    assert result.summary["env_steps"] == updates * STEPS and result.interrupted is None
    rows = [row["env_steps"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert rows == list(range(10 * STEPS, updates * STEPS + 1, 10 * STEPS))
    whole = podium.train(A2C, "podium/Catch", placement=PLACEMENT, num_steps=updates * STEPS, eval_every=0, **SIZES)
    for ours, theirs in zip(jax.tree.leaves(result.state), jax.tree.leaves(whole.state), strict=True):
        np.testing.assert_allclose(ours, theirs, 1e-3, 1e-3)
    assert result.policy(np.zeros((10, 5, 2), np.float32)) in (0, 1, 2)
    gone(*pids.seen()[:1])


@pytest.mark.slow
@pytest.mark.usefixtures("by_value")
def test_a_learner_that_dies_more_often_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"gone for the 2\. time, and restarts=1: .*resume=True goes on"):
        launch_and(lambda pid: os.kill(pid, signal.SIGKILL), tmp_path, restarts=1, updates=100_000, learners=2)


@pytest.mark.slow
@pytest.mark.usefixtures("by_value")
def test_a_signal_reaches_the_learner_which_saves(tmp_path: Path) -> None:
    result, _ = launch_and(lambda pid: os.kill(os.getpid(), signal.SIGINT), tmp_path, restarts=1, updates=100_000)
    assert result.interrupted == "SIGINT"
    steps = [int(path.parent.name) for path in (tmp_path / "run").glob("checkpoints/*/manifest.json")]
    assert max(steps) == result.summary["env_steps"] < 100_000 * STEPS


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_errors_of_a_learner_elsewhere_are_those_of_train(tmp_path: Path) -> None:
    arguments = {**SIZES, "num_envs": 7, "run_dir": tmp_path / "run", "num_steps": 100 * STEPS}
    with pytest.raises(ValueError, match="num_envs=7 is not divisible by workers=2; use 6 or 8"):
        podium.launch(A2C, "podium/Catch", placement=podium.ParameterServer(2), restarts=1, **arguments)
