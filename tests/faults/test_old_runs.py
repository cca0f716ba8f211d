"""Run folders of podium 0.1.0, written by it: a checkpoint between two rows, with the metrics since the last one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import podium
from podium.agents import dqn, ppo
from podium.sinks import read_metrics
from podium.upgrades import upgrade

FOLDERS = Path(__file__).parent / "runs_of_0_1_0"
STEPS = 16 * 8  # Of one iteration.
AGENTS = {
    "ppo": ppo.make(ppo.Config(hidden_sizes=(4,), num_epochs=1, num_minibatches=2, learning_rate=1e-3)),
    "dqn": dqn.make(
        dqn.Config(hidden_sizes=(4,), batch_size=32, buffer_capacity=256, min_replay_size=128, n_step=2, num_updates=2)
    ),
}


def resume(name: str, folder: Path, **changes: Any) -> podium.Result:
    arguments: dict[str, Any] = {
        "num_steps": 10 * STEPS,
        "num_envs": 16,
        "rollout_length": 8,
        "log_every": 2 * STEPS,
        "eval_every": 4 * STEPS,
        "checkpoint_every": 2 * STEPS,
        "eval_episodes": 16,
        "progress": False,
        "placement": podium.Anakin(1),
        "resume": True,
    }
    return podium.train(AGENTS[name], "podium/Catch", run_dir=folder, **(arguments | changes))


@pytest.mark.parametrize("name", ["ppo", "dqn"])
def test_a_run_of_0_1_0_is_resumed(name: str, tmp_path: Path) -> None:
    """Stopped after iteration 5 of 10; the row at 6 has what the fifth said, from the checkpoint, and the sixth."""
    folder = Path(shutil.copytree(FOLDERS / name, tmp_path / "run"))
    before = read_metrics(folder / "metrics.jsonl")
    result = resume(name, folder)
    rows = read_metrics(folder / "metrics.jsonl")
    assert rows[:2] == before and [row["updates"] for row in rows] == [2, 4, 6, 8, 10]
    # An episode in Catch has 9 steps, whoever plays.
    ended = [16 * ((8 * update) // 9 - (8 * (update - 2)) // 9) for update in (2, 4, 6, 8, 10)]
    assert [row["episodes"] for row in rows] == ended
    assert int(result.state.env_steps) == 10 * STEPS  # Saved as a float32.
    assert result.summary["env_steps"] == 10 * STEPS and result.summary["wall_seconds"] > before[-1]["wall_seconds"]


def test_its_policy_is_the_one_in_the_checkpoint(tmp_path: Path) -> None:
    """Nothing is trained, for the run has ended where the checkpoint is."""
    folder = Path(shutil.copytree(FOLDERS / "ppo", tmp_path / "run"))
    loaded = podium.load(folder)
    result = resume("ppo", folder, num_steps=5 * STEPS)
    for x, y in zip(*map(jax.tree.leaves, (loaded.params, result.policy.params)), strict=True):
        np.testing.assert_array_equal(x, y)


def test_another_placement_takes_its_agent_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(shutil.copytree(FOLDERS / "ppo", tmp_path / "run"))
    result = resume("ppo", folder, placement=podium.Single(), num_steps=6 * STEPS)
    assert result.summary["env_steps"] == 6 * STEPS
    assert "Resumed under Single what Anakin saved: the agent's state is exactly as it was" in capsys.readouterr().err


def test_checkpoints_say_what_those_of_0_1_0_said(tmp_path: Path) -> None:
    """Fields of the same names, which an older podium could read as well."""

    def meta(checkpoint: Path) -> dict[str, Any]:
        return dict(json.loads((checkpoint / "checkpoint.json").read_text())["meta"])

    folder = Path(shutil.copytree(FOLDERS / "ppo", tmp_path / "run"))
    resume("ppo", folder)
    old, new = meta(FOLDERS / "ppo" / "checkpoints" / "640"), meta(folder / "checkpoints" / str(10 * STEPS))
    assert new.keys() - {"config"} == old.keys() and new["tally"].keys() == old["tally"].keys()
    assert new["placement"] == old["placement"] == "Anakin"
    assert new["evaluation"].keys() >= old["evaluation"].keys()


def test_only_leaves_that_are_known_to_have_changed_are_upgraded() -> None:
    old = {"agent/env_steps": {"dtype": "float32", "shape": [2]}, "agent/x": {"dtype": "bool", "shape": []}}
    now = {"agent/env_steps/low", "agent/env_steps/high", "agent/x"}
    upgraded = upgrade(1, old, now)
    assert upgraded.table.keys() == now and upgraded.table["agent/env_steps/low"] == {"dtype": "uint32", "shape": [2]}
    arrays = upgraded.convert({"agent/env_steps": np.float32([640, 2**33]), "agent/x": np.array(True)})
    assert arrays.keys() == now and arrays["agent/env_steps/high"].tolist() == [0, 2]
    # What is new begins somewhere, where what lies beside it says how much of it there is.
    first, past = "rollout/0/first", "rollout/0/past"
    upgraded = upgrade(1, {first: {"dtype": "bool", "shape": [3]}}, {first, past})
    arrays = upgraded.convert({first: np.array([True, False, True])})
    assert upgraded.table[past] == {"dtype": "float32", "shape": [3]}
    assert arrays[first].tolist() == [True, False, True] and arrays[past].tolist() == [0, 0, 0]
    # What is gone is left out, unless it is wanted.
    gone = {"agent/stopped": {"dtype": "bool", "shape": []}}
    assert upgrade(1, gone, set()).table == {} and upgrade(1, gone, {"agent/stopped"}).table == gone
    # But nothing that an agent of one's own still keeps so, or that was saved since.
    for schema, wanted in ((1, set(old)), (1, {"agent/env_steps/low"}), (2, now)):
        assert upgrade(schema, old, wanted).table == old
