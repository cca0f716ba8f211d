"""Training under faults: NaN in a reward or a gradient, a save that fails, a hostile run folder."""

from __future__ import annotations

import dataclasses
import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import podium
from podium import envs
from podium.agent import Agent
from podium.agents import dqn, ppo
from podium.checkpoint import CheckpointError, Checkpoints
from podium.finite import rollout_finite
from podium.sinks import read_metrics
from podium.types import Trajectory

STEPS = 16 * 8  # Of one iteration.
PPO = ppo.make(ppo.Config(hidden_sizes=(16,), num_epochs=1, num_minibatches=2, learning_rate=1e-3))
SMALL = dqn.Config(hidden_sizes=(16,), batch_size=32, buffer_capacity=1024, min_replay_size=256, num_updates=2)
DQN = dqn.make(SMALL)
WAITING = dqn.make(dataclasses.replace(SMALL, min_replay_size=1024))


def train(agent: Agent, run_dir: Path | None, env: Any = "podium/Catch", **changes: Any) -> podium.Result:
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
    }
    return podium.train(agent, env, run_dir=run_dir, **(arguments | changes))


def nan_gradient_after(agent: Agent, bad: Callable[[Any], Any]) -> Agent:
    """Return the agent with gradients of NaN once `bad(state)`."""

    def grad(key: Any, state: Any, minibatch: Any) -> Any:
        grads, aux = agent.grad(key, state, minibatch)
        return jax.tree.map(lambda g: jnp.where(bad(state), jnp.nan, g), grads), aux

    return agent._replace(grad=grad)


def nan_reward_after(steps: int) -> Any:
    """Return Catch in which the reward is NaN where the ball is in column 1 after `steps` steps."""
    env = envs.make("podium/Catch")

    def step(key: Any, state: Any, action: Any) -> Any:
        state, timestep = env.step(key, state, action)
        bad = (state.ball_row == steps) & (state.ball_column == 1)
        return state, timestep._replace(reward=jnp.where(bad, jnp.nan, timestep.reward))

    return env._replace(step=step)


@pytest.mark.parametrize("agent", [PPO, DQN], ids=["ppo", "dqn"])
def test_nan_in_the_gradient_stops_the_run_and_keeps_the_last_good_checkpoint(agent: Agent, tmp_path: Path) -> None:
    """The fifth iteration turns bad: the chunk of 5 and 6 ends the run, and the checkpoint at 4 is the last."""
    bad = nan_gradient_after(agent, lambda state: state.env_steps.total() >= 4 * STEPS)
    with pytest.raises(podium.NonFiniteError) as caught:
        train(bad, tmp_path / "run")
    assert f"before env_steps={6 * STEPS}" in str(caught.value)
    assert f"the last good checkpoint is at {4 * STEPS} environment steps" in str(caught.value)
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints")
    assert checkpoints.steps() == [2 * STEPS, 4 * STEPS]
    for step in checkpoints.steps():
        state, _, _ = checkpoints.restore_raw(step)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state) if np.asarray(leaf).dtype.kind == "f")
    checkpoints.close()
    policy = podium.load(tmp_path / "run", agent=agent)
    assert policy.act(np.zeros((2, 10, 5, 2), np.float32))[0].shape == (2,)
    # Mended, the run is resumed from there as if nothing had been.
    mended = nan_gradient_after(agent, lambda state: state.env_steps.total() < 0)
    resumed = train(mended, tmp_path / "run", resume=True)
    assert [row["env_steps"] for row in resumed.metrics] == [n * STEPS for n in (2, 4, 6, 8, 10)]
    assert resumed.summary["params_sha256"] == train(agent, None).summary["params_sha256"]


@pytest.mark.parametrize("placement", [podium.Anakin(1), podium.Single()], ids=["anakin", "single"])
@pytest.mark.parametrize(
    "agent", [PPO, DQN, pytest.param(WAITING, marks=pytest.mark.slow)], ids=["ppo", "dqn", "waiting"]
)
def test_nan_in_a_reward_stops_the_run_before_it_is_saved(agent: Agent, placement: Any, tmp_path: Path) -> None:
    """The ball reaches row 9 in the ninth step, which is in the second iteration; a replay may keep it for long."""
    words = f"A reward or an observation of podium/Catch.*env_steps={2 * STEPS}.*checkpoint is at {STEPS} environment"
    with pytest.raises(podium.NonFiniteError, match=words) as caught:
        train(agent, tmp_path / "run", nan_reward_after(9), checkpoint_every=STEPS, placement=placement)
    if agent is not DQN:  # Which may have sampled the row, or not.
        assert ("parameters" in str(caught.value)) == (agent is PPO)
    assert Checkpoints(tmp_path / "run" / "checkpoints").steps() == [STEPS]
    row = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]
    assert row["episode_return"] is None  # JSON has no NaN.


def test_every_reward_is_looked_at_and_every_observation_that_a_replay_keeps() -> None:
    """Bad numbers in one place of a trajectory [3, 4] each."""
    rows = jnp.zeros((3, 4))
    good = Trajectory(*[rows] * 8, carry=(), end_carry=(), policy_version=jnp.int32(0))
    good = good._replace(obs={"image": jnp.zeros((3, 4, 2, 2)), "count": jnp.zeros((3, 4), jnp.int32)})
    assert rollout_finite(DQN, good).tolist() == [True] * 4
    for name, bad in (("reward", jnp.nan), ("next_obs", jnp.inf), ("obs", -jnp.inf)):
        leaf = getattr(good, name)
        leaf = {**leaf, "image": leaf["image"].at[2, 1, 0, 1].set(bad)} if name == "obs" else leaf.at[2, 1].set(bad)
        for agent, seen in ((DQN, True), (PPO, name == "reward")):
            found = rollout_finite(agent, good._replace(**{name: leaf})).tolist()
            assert found == [True, not seen, True, True], (name, agent.name)


@pytest.mark.slow
def test_one_bad_seed_of_several_stops_the_run() -> None:
    def start(key: Any, spec: Any) -> Any:
        state = PPO.init(key, spec)
        first = jax.random.key_data(key)[0] == jax.random.key_data(key_of_seed(1))[0]
        return state._replace(params=jax.tree.map(lambda p: jnp.where(first, jnp.nan, p), state.params))

    def key_of_seed(seed: int) -> Any:
        return jax.random.split(jax.random.fold_in(jax.random.key(0), seed), 3)[1]

    with pytest.raises(podium.NonFiniteError):
        train(PPO._replace(init=start), None, seeds=2, num_steps=2 * STEPS, eval_every=0)


def test_a_save_that_fails_is_an_error_and_older_steps_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Checkpoints._write

    def full(self: Checkpoints, env_steps: int, *arguments: Any) -> None:
        if env_steps >= 4 * STEPS:
            raise CheckpointError(f"checkpoint {env_steps}: the disk is full.") from OSError(errno.ENOSPC, "full")
        write(self, env_steps, *arguments)

    monkeypatch.setattr(Checkpoints, "_write", full)
    with pytest.raises(CheckpointError, match=f"checkpoint {4 * STEPS}: the disk is full"):
        train(PPO, tmp_path / "run")
    monkeypatch.undo()
    assert Checkpoints(tmp_path / "run" / "checkpoints").steps() == [2 * STEPS]
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert rows[-1]["env_steps"] <= 6 * STEPS  # Known at the next save at the latest.
    resumed = train(PPO, tmp_path / "run", resume=True)
    assert [row["env_steps"] for row in resumed.metrics] == [n * STEPS for n in (2, 4, 6, 8, 10)]


def test_metrics_that_cannot_be_written_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from podium.sinks import JsonlSink

    def full(self: JsonlSink, row: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(self.path))

    monkeypatch.setattr(JsonlSink, "write", full)
    with pytest.raises(OSError, match="No space left on device"):
        train(PPO, tmp_path / "run")


# A folder from a stranger.


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    train(PPO, folder, num_steps=2 * STEPS)
    return folder


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("agent", "name"), "os.system", "No agent is named 'os.system'"),
        (("agent", "name"), "../../evil", "No agent is named"),
        (("agent", "name"), ["ppo"], "agent"),
        (("agent", "name"), None, "agent"),
        (("agent", "config"), {"__class__": "os"}, "ppo has no field '__class__'"),
        (("agent", "config"), {"learning_rate": "__import__('os').system('touch PWNED')"}, "pass agent="),
        (("agent", "config"), {"hidden_sizes": [10**12]}, "fit|hidden_sizes"),
        (("agent", "config"), [1, 2], "agent"),
        (("agent",), "ppo", "agent"),
        (("agent",), None, "agent"),
        (("env", "name"), "subprocess.Popen", "No environment is named"),
        (("env", "options"), {"rows": -1}, "rows"),
        (("env", "options"), {"rows": "x"}, "env"),
        (("env", "options"), {"__reduce__": 1}, "has no option '__reduce__'"),
        (("env",), 3, "env"),
        (("seeds",), "many", "seeds"),
        (("seeds",), -1, "seed"),
        (("seeds",), 10**9, "fit|seeds"),
        (("seeds",), None, "seeds"),
    ],
)
def test_a_hostile_config_is_refused_in_words(
    path: tuple[str, ...], value: Any, message: str, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(trained, tmp_path / "run"))
    monkeypatch.chdir(tmp_path)
    record = json.loads((folder / "config.json").read_text())
    node = record["config"]
    for name in path[:-1]:
        node = node[name]
    node[path[-1]] = value
    (folder / "config.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match=message):
        podium.load(folder)
    assert {p.name for p in tmp_path.iterdir()} == {"run"}
    with pytest.raises(ValueError):
        train(PPO, folder, resume=True, num_steps=2 * STEPS)


def test_a_config_that_lacks_a_field_is_refused_by_name(trained: Path, tmp_path: Path) -> None:
    for field in ("agent", "env", "seeds"):
        folder = Path(shutil.copytree(trained, tmp_path / field))
        record = json.loads((folder / "config.json").read_text())
        del record["config"][field]
        (folder / "config.json").write_text(json.dumps(record))
        with pytest.raises(ValueError, match=field):
            podium.load(folder)
