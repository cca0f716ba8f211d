"""A run trained under one placement resumes under another: the agent as it was, the count of steps unbroken."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import podium
from podium.agents import dqn, ppo
from podium.host import on_host

STEPS = 8 * 9

PLACEMENTS: dict[str, Any] = {
    "Single": podium.Single(),
    "Anakin": podium.Anakin(2),
    "Sebulba": podium.Sebulba(lockstep=True),
    "LocalSGD": podium.LocalSGD(workers=2, average_every=2, devices=1),
    "CentralInference": podium.CentralInference(envs_per_actor=4, devices=1),
    "DistributedActors": podium.DistributedActors(workers=2),
    "ParameterServer": podium.ParameterServer(workers=2, devices=1),
    "Evolution": podium.Evolution(devices=1),
}
SHORT = ["Anakin", "LocalSGD", "Sebulba"]
LONG = [*PLACEMENTS, "Anakin"]


def train(agent: Any, placement: Any, updates: int, folder: Path, **options: Any) -> podium.Result:
    env: Any = podium.envs.make("podium/Catch")
    env = on_host(env) if placement in ("Sebulba", "CentralInference") else env
    return podium.train(
        agent,
        env,
        num_steps=STEPS * updates,
        num_envs=8,
        rollout_length=9,
        placement=PLACEMENTS[placement] if isinstance(placement, str) else placement,
        run_dir=folder,
        eval_episodes=4,
        progress=False,
        **options,
    )


def params(run_dir: Path) -> Any:
    return jax.device_get(podium.load(run_dir).params)


@pytest.mark.parametrize("order", [SHORT, pytest.param(LONG, marks=pytest.mark.slow)], ids=["some", "all"])
def test_a_run_goes_through_placements(order: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    agent = ppo.make(ppo.Config(hidden_sizes=(16,), num_minibatches=2))
    folder = tmp_path / "run"
    train(agent, order[0], 1, folder)
    for number, (before, after) in enumerate(itertools.pairwise(order), start=2):
        last = params(folder)
        # Nothing is trained where nothing is left to do: what is handed over is what was saved.
        same = train(agent, after, number - 1, folder, resume=True)
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(same.policy.params), last)
        done = train(agent, after, number, folder, resume=True)
        said = capsys.readouterr().err
        assert f"what {before}" in said, said
        assert done.summary["env_steps"] == STEPS * number
        moved = jax.tree.map(lambda x, y: np.abs(np.asarray(x) - np.asarray(y)).max(), last, params(folder))
        assert max(jax.tree.leaves(moved)) > 0
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["env_steps"] for row in rows] == [STEPS * number for number in range(1, len(order) + 1)]


def test_a_replay_begins_anew_and_the_agent_does_not(tmp_path: Path) -> None:
    agent = dqn.make(dqn.Config(hidden_sizes=(16,), batch_size=8, min_replay_size=64, buffer_capacity=512))
    first = train(agent, "Anakin", 3, tmp_path / "run")
    second = train(agent, "LocalSGD", 5, tmp_path / "run", resume=True)
    assert float(second.state.env_steps) == float(first.state.env_steps) + 2 * STEPS


def test_other_sizes_are_still_refused(tmp_path: Path) -> None:
    agent = ppo.make(ppo.Config(hidden_sizes=(16,), num_minibatches=2))
    train(agent, "Anakin", 1, tmp_path / "run")
    with pytest.raises(ValueError, match="seed was 0 and is 1"):
        train(agent, "LocalSGD", 2, tmp_path / "run", resume=True, seed=1)


def test_a_run_that_has_ended_is_not_said_to_run_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    agent, folder = ppo.make(ppo.Config(hidden_sizes=(16,), num_minibatches=2)), tmp_path / "run"
    first = train(agent, "Anakin", 1, folder)
    report = lambda: [(folder / f"placement.{ending}").read_text() for ending in ("txt", "svg")]
    before = report()
    again = train(agent, "Single", 1, folder, resume=True)
    assert again.summary == first.summary and report() == before
    assert "Resumed" not in capsys.readouterr().err
    train(agent, "Single", 2, folder, resume=True)
    assert report() != before
    assert "Resumed under Single what Anakin saved" in capsys.readouterr().err


def test_settings_are_compared_with_those_of_the_placement_that_saved_last(tmp_path: Path) -> None:
    """Another placement takes the run over with settings of its own; who resumes it then has to have these."""
    agent, folder = ppo.make(ppo.Config(hidden_sizes=(16,), num_minibatches=2)), tmp_path / "run"
    train(agent, "Anakin", 1, folder)
    train(agent, podium.Evolution(sigma=0.25, devices=1), 2, folder, resume=True)
    train(agent, podium.Evolution(sigma=0.25, devices=2), 2, folder, resume=True)
    with pytest.raises(ValueError, match="placement.settings.sigma was 0.25 and is 0.05"):
        train(agent, "Evolution", 2, folder, resume=True)
    assert json.loads((folder / "config.json").read_text())["config"]["placement"]["name"] == "anakin"


def test_the_same_placement_with_other_workers_is_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    agent = ppo.make(ppo.Config(hidden_sizes=(16,), num_minibatches=2))
    folder = tmp_path / "run"
    train(agent, "LocalSGD", 1, folder)
    settings: dict[str, Any] = {"num_envs": 8, "rollout_length": 9, "eval_episodes": 4, "progress": False}
    wider = podium.LocalSGD(workers=4, devices=1)
    podium.train(
        agent, podium.envs.make("podium/Catch"), num_steps=2 * STEPS, placement=wider, run_dir=folder, resume=True,
        **settings,
    )  # fmt: skip
    assert "LocalSGD of 4 workers what LocalSGD of 2 workers saved" in capsys.readouterr().err
