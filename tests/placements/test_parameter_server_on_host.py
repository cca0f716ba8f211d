"""ParameterServer over environments on the host: Single with one worker; fresh episodes after a rollout that fails."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from alike import assert_close

import podium
from podium import replay
from podium.agent import Agent
from podium.agents import a2c, dqn, impala, ppo
from podium.env import Env
from podium.host import on_host
from podium.placement.threads.supervision import ActorError

NUM_ENVS = 8

DQN = dqn.make(dqn.Config(hidden_sizes=(16,), batch_size=32, min_replay_size=64, buffer_capacity=1024))

AGENTS: dict[str, tuple[Agent, int, int]] = {
    "ppo gru": (ppo.make(ppo.Config(hidden_sizes=(16,), num_minibatches=2, memory="gru", memory_size=16)), 8, 3),
    "a2c": (a2c.make(a2c.Config(hidden_sizes=(16,))), 8, 3),
    "impala": (impala.make(impala.Config(hidden_sizes=(16,))), 8, 3),
    "dqn": (DQN, 1, 14),
    "dqn, ranked": (DQN._replace(replay=replay.prioritized(1024, 32, num_updates=2, min_replay_size=64)), 1, 14),
}


def catch() -> Env:
    env = podium.envs.make("podium/Catch")
    assert isinstance(env, Env)
    return env


def run(placement: Any, agent: Agent, length: int, updates: int, env: Any) -> tuple[Any, dict[str, Any]]:
    program = placement.build(agent, env, num_envs=NUM_ENVS, rollout_length=length, max_updates=updates)
    try:
        return program.chunk(program.init(0), updates)
    finally:
        program.close()
        assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("podium-worker")]


def server(workers: int, **settings: Any) -> podium.ParameterServer:
    return podium.ParameterServer(workers, **{"devices": 1, **settings})


QUICK = ("a2c",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in AGENTS]
)
def test_with_one_worker_it_is_single(name: str) -> None:
    agent, length, updates = AGENTS[name]
    ours, metrics = run(server(1), agent, length, updates, on_host(catch()))
    single, single_metrics = run(podium.Single(), agent, length, updates, catch())
    assert_close(ours.agent, single.agent, 1e-5)
    for key in ("episodes", "episode_return_sum", "episode_length_sum"):
        np.testing.assert_array_equal(metrics[key], single_metrics[key])
    assert (metrics["valid_steps"] == NUM_ENVS * length).all()
    assert (metrics["env_seconds"] > 0).all() and (metrics["inference_seconds"] > 0).all()
    if name.startswith("dqn"):
        assert_close(ours.replay[0], single.replay, 1e-5)


def test_a_chunk_begins_where_the_last_one_ended_and_a_state_of_another_begins_anew(watched: Any) -> None:
    agent, length, _ = AGENTS["a2c"]
    env, seeds, closed = watched()
    whole, _ = run(server(1), agent, length, 4, env)
    assert seeds == [0] and len(closed) == 1
    program = server(1).build(agent, env, num_envs=NUM_ENVS, rollout_length=length, max_updates=4)
    try:
        state, _ = program.chunk(program.init(0), 2)
        state, _ = program.chunk(state, 2)
        assert_close(state.agent, whole.agent, 0.0)
        assert len(seeds) == 2
        program.chunk(program.adopt(program.init(0), state.agent, 4), 1)
        assert len(seeds) == 3 and seeds[2] not in seeds[:2] and len(closed) == 2
    finally:
        program.close()
    assert len(closed) == 3


def test_environments_that_reset_in_the_next_step() -> None:
    """What is learnt from travels as one observation more than there are steps; rows that are no steps do not count."""
    pytest.importorskip("gymnasium")
    agent, length, _ = AGENTS["a2c"]
    env = podium.envs.make("gymnasium/CartPole-v1")
    state, metrics = run(server(2), agent, 32, 6, env)
    assert metrics["finite"].all()
    assert metrics["episodes"].sum() > 10
    rows = 6 * NUM_ENVS * 32
    assert rows - 2 * metrics["episodes"].sum() <= metrics["valid_steps"].sum() < rows
    assert float(state.agent.env_steps) == metrics["valid_steps"].sum()


def fail() -> None:
    raise ZeroDivisionError("the simulator broke")


@pytest.mark.parametrize("name", [pytest.param("dqn", marks=pytest.mark.slow), "a2c"])
def test_a_rollout_that_fails_is_dropped_and_counted_and_episodes_begin_anew(name: str, watched: Any) -> None:
    agent, length, updates = AGENTS[name]
    at = length * (updates - 1) + (length + 1) // 2
    env, seeds, closed = watched(lambda number: fail() if number == at else None)
    state, metrics = run(server(1, restarts=1), agent, length, updates, env)
    assert metrics["dropped_rollouts"].tolist() == [0] * (updates - 1) + [1]
    assert metrics["valid_steps"].tolist() == [NUM_ENVS * length] * updates
    assert len(set(seeds)) == len(closed) == 2
    assert float(state.agent.env_steps) == NUM_ENVS * length * updates


def test_a_simulator_that_breaks_ends_the_run_with_its_traceback(watched: Any) -> None:
    agent, length, _ = AGENTS["a2c"]
    env, _, closed = watched(lambda number: fail() if number == 30 else None)
    with pytest.raises(ActorError, match=r"(?s)podium-worker-\d died of .*Traceback.*the simulator broke"):
        run(server(2), agent, length, 10, env)
    assert len(closed) == 2


def test_a_run_that_resumes_says_that_episodes_restart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    agent, length, _ = AGENTS["dqn"]
    arguments: dict[str, Any] = {
        "num_envs": NUM_ENVS,
        "rollout_length": length,
        "placement": server(2),
        "eval_every": 0,
        "run_dir": tmp_path / "run",
        "progress": False,
    }
    first = podium.train(agent, on_host(catch()), num_steps=200, **arguments)
    result = podium.train(agent, on_host(catch()), num_steps=400, resume=True, **arguments)
    assert "episodes restart" in capsys.readouterr().err
    assert (float(first.state.env_steps), float(result.state.env_steps)) == (200, 400)


def test_it_says_what_moves() -> None:
    agent, length, _ = AGENTS["a2c"]
    program = server(2).build(agent, on_host(catch()), num_envs=NUM_ENVS, rollout_length=length)
    moved = program.bytes_per_update()
    assert moved["observations"] > length * NUM_ENVS * 400 and moved["actions"] == length * NUM_ENVS * 4
    assert "environments to workers" in program.explain()
    assert jax.devices()[0].platform in str(program.explain())


@pytest.mark.learning
def test_four_workers_learn_catch_on_the_host() -> None:
    """A3C's arrangement. The best is 1 in every episode; the rate is one for gradients from 128 steps."""
    result = podium.train(
        a2c.make(a2c.Config(learning_rate=1e-3)),
        on_host(catch()),
        num_steps=300_000,
        num_envs=32,
        rollout_length=16,
        placement=server(4),
        eval_every=0,
        progress=False,
    )
    assert result.summary["eval_return"] >= 0.9
