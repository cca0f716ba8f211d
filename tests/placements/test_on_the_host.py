"""Single, LocalSGD and Evolution over environments on the CPU: what they reach over pure ones, and what fails."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from alike import assert_close

import podium
from podium import keys, replay
from podium.agent import Agent
from podium.agents import dqn, impala, ppo
from podium.evaluate import make_host_evaluator
from podium.host import HostEnvFactory, on_host
from podium.placement.threads.supervision import ActorError

NUM_ENVS = 8

DQN = dqn.make(dqn.Config(hidden_sizes=(16,), batch_size=32, min_replay_size=64, buffer_capacity=1024))
AGENTS: dict[str, tuple[Agent, int, int]] = {
    "ppo gru": (ppo.make(ppo.Config(hidden_sizes=(16,), num_minibatches=2, memory="gru", memory_size=16)), 8, 4),
    "impala": (impala.make(impala.Config(hidden_sizes=(16,))), 8, 4),
    "dqn": (DQN, 1, 14),
    "dqn, ranked": (DQN._replace(replay=replay.prioritized(1024, 32, num_updates=2, min_replay_size=64)), 1, 14),
}
PLACEMENTS: dict[str, Any] = {
    "Single": podium.Single(),
    "one worker": podium.LocalSGD(1, devices=1),
    "two workers": podium.LocalSGD(2, average_every=2, devices=2),
    "four workers on two devices": podium.LocalSGD(4, average_every=3, devices=2),
}
EVOLUTION = podium.Evolution(sigma=0.3, learning_rate=0.1, weight_decay=0.01, devices=1)
POPULATION, LIMIT = 16, 9


def catch() -> Any:
    return podium.envs.make("podium/Catch")


def run(placement: Any, agent: Agent, env: Any, length: int, chunks: list[int], num_envs: int = NUM_ENVS) -> Any:
    """Return the agent's State after chunks of so many updates, and the metrics of the last chunk."""
    program = placement.build(agent, env, num_envs=num_envs, rollout_length=length, max_updates=max(chunks))
    try:
        state = program.init(0)
        for updates in chunks:
            state, metrics = program.chunk(state, updates)
        return jax.device_get(program.agent_state(state)), metrics
    finally:
        program.close()


QUICK = {
    ("Single", "ppo gru"),
    ("Single", "dqn, ranked"),
    ("two workers", "dqn"),
    ("four workers on two devices", "impala"),
}


@pytest.mark.parametrize(
    ("placement", "agent"),
    [
        pytest.param(*pair, marks=[] if pair in QUICK else pytest.mark.slow)
        for pair in itertools.product(PLACEMENTS, AGENTS)
    ],
)
def test_where_environments_step_changes_nothing(placement: str, agent: str) -> None:
    made, length, updates = AGENTS[agent]
    chunks = [updates // 2, updates - updates // 2]
    pure, _ = run(PLACEMENTS[placement], made, catch(), length, chunks)
    host, metrics = run(PLACEMENTS[placement], made, on_host(catch()), length, chunks)
    assert_close(host, pure)
    assert metrics["finite"].all() and metrics["valid_steps"].sum() == NUM_ENVS * length * chunks[-1]


@pytest.mark.parametrize("agent", [pytest.param("ppo gru", marks=pytest.mark.slow), "dqn"])
def test_single_is_sebulba_in_lockstep_where_resets_take_a_step(agent: str) -> None:
    made, length, updates = AGENTS[agent]
    env = podium.envs.make("gymnasium/CartPole-v1")
    length, updates = (32, 4) if length > 1 else (1, 40)  # Long enough for episodes to end.
    single, metrics = run(podium.Single(), made, env, length, [updates])
    sebulba, _ = run(podium.Sebulba(lockstep=True), made, env, length, [updates])
    assert_close(single, sebulba)
    assert metrics["episodes"].sum() > 0
    assert metrics["valid_steps"].sum() == NUM_ENVS * length * updates - metrics["episodes"].sum()


@pytest.mark.parametrize(("episodes", "devices"), [(1, 1), (2, 2)])
def test_a_generation_is_that_of_a_loop_over_its_members(episodes: int, devices: int) -> None:
    agent, envs = AGENTS["ppo gru"][0], on_host(catch())
    placement = podium.Evolution(sigma=0.3, learning_rate=0.1, episodes=episodes, devices=devices)
    program = placement.build(agent, envs, num_envs=POPULATION, rollout_length=LIMIT, max_updates=1)
    start, strategy = program.init(5), placement.strategy(agent, envs.spec)
    noise_key, play_key = keys.iteration(start.key, start.update)
    seed = int(jax.random.randint(play_key, (), 0, 2**31 - 1))
    returns = []
    for pair in range(POPULATION // episodes // 2):
        both = strategy.perturb(noise_key, start.agent, np.int32(pair))
        for half in range(2):
            # One member at a time, in environments of the seed and the numbers that it meets among all.
            alone = HostEnvFactory(envs.spec, lambda n, *_, pair=pair: envs.make(n, seed, pair * n), False)
            play = make_host_evaluator(agent, alone, episodes, LIMIT)
            played = play(jax.random.key(0), jax.tree.map(lambda x, half=half: x[half], both))
            assert played is not None
            returns.append(float(played["eval_return"]))
    assert len(set(returns)) > 1
    flat = np.asarray(returns, np.float32).reshape(-1, 2)
    expected, _, _ = strategy.learn(1, noise_key, start, flat, np.float32(0))
    state, metrics = program.chunk(start, 1)
    np.testing.assert_allclose(metrics["episode_return_sum"][0], np.mean(returns) * POPULATION, rtol=1e-5)
    assert_close(jax.device_get(state.agent), jax.device_get(expected.agent), 2e-5)


def test_where_nothing_is_random_evolution_on_the_host_is_evolution() -> None:
    agent, env = AGENTS["impala"][0], podium.envs.make("podium/Corridor")
    limit = env.spec.max_episode_steps
    pure, _ = run(EVOLUTION, agent, env, limit, [3], POPULATION)
    host, _ = run(EVOLUTION, agent, on_host(env), limit, [3], POPULATION)
    assert_close(host, pure)


def test_devices_and_members_at_once_change_nothing_on_the_host() -> None:
    agent, final = AGENTS["ppo gru"][0], []
    for devices, at_once in ((1, None), (2, None), (2, 4), (1, 2)):
        placement = podium.Evolution(devices=devices, members_at_once=at_once)
        final.append(run(placement, agent, on_host(catch()), LIMIT, [3], POPULATION))
    for state, metrics in final[1:]:
        assert_close(state, final[0][0])
        np.testing.assert_allclose(metrics["episode_return_sum"], final[0][1]["episode_return_sum"])


def test_a_generation_steps_until_its_last_episode_ends_and_closes_what_it_made(watched: Any) -> None:
    steps: list[int] = []
    envs, seeds, closed = watched(steps.append)
    _, metrics = run(EVOLUTION, AGENTS["impala"][0], envs, 1000, [2], POPULATION)
    assert len(steps) == 2 * 2 * 9  # Two generations of two halves; a game of Catch lasts 9 steps.
    assert len(seeds) == len(closed) == 4
    assert list(metrics["valid_steps"]) == [9 * POPULATION] * 2


def fail(number: int) -> None:
    if number == 7:
        raise OSError("the simulator fell over")


@pytest.mark.parametrize(
    "placement", [PLACEMENTS["Single"], PLACEMENTS["two workers"], EVOLUTION], ids=["Single", "LocalSGD", "Evolution"]
)
def test_an_environment_that_fails_ends_the_run_with_its_error(placement: Any, watched: Any) -> None:
    envs, seeds, closed = watched(fail)
    with pytest.raises(ActorError, match="the simulator fell over"):
        run(placement, AGENTS["impala"][0], envs, 9, [3])
    assert len(seeds) == len(closed)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("podium-")]


@pytest.mark.parametrize(
    "placement",
    [
        podium.Single(actor_timeout=5.0),
        podium.LocalSGD(2, devices=1, actor_timeout=5.0),
        podium.Evolution(devices=1, actor_timeout=5.0),
    ],
    ids=["Single", "LocalSGD", "Evolution"],
)
def test_an_environment_that_hangs_is_noticed(placement: Any, monkeypatch: pytest.MonkeyPatch, watched: Any) -> None:
    monkeypatch.setattr("podium.placement.threads.supervision.STOP_SECONDS", 0.2)
    release = threading.Event()
    envs, _, _ = watched(lambda number: number == 7 and release.wait(30))
    try:
        with pytest.raises(ActorError, match=r"(?s)has not come a step further for 5 s; it is at.*release\.wait"):
            run(placement, AGENTS["impala"][0], envs, 9, [3])
    finally:
        release.set()


@pytest.mark.parametrize("placement", [podium.Single, podium.LocalSGD, podium.Evolution])
def test_a_timeout_must_be_above_zero(placement: Any) -> None:
    with pytest.raises(ValueError, match="actor_timeout=0 must be finite and greater than 0; 60.0 is usual"):
        run(placement(actor_timeout=0), AGENTS["impala"][0], on_host(catch()), 9, [1])


@pytest.mark.parametrize("placement", ["Single", "LocalSGD"])
def test_a_run_on_the_host_resumes_with_new_episodes(
    placement: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = train_settings({"Single": PLACEMENTS["Single"], "LocalSGD": PLACEMENTS["two workers"]}[placement])
    podium.train(**settings, num_steps=3 * 8 * NUM_ENVS, run_dir=tmp_path / "run")
    done = podium.train(**settings, num_steps=6 * 8 * NUM_ENVS, run_dir=tmp_path / "run", resume=True)
    assert done.summary["env_steps"] == 6 * 8 * NUM_ENVS
    assert "environments on the CPU save no state" in capsys.readouterr().err


def test_evolution_on_the_host_resumes_exactly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = train_settings(EVOLUTION, rollout_length=LIMIT)
    whole = podium.train(**settings, num_steps=4 * LIMIT * NUM_ENVS)
    podium.train(**settings, num_steps=2 * LIMIT * NUM_ENVS, run_dir=tmp_path / "run")
    rest = podium.train(**settings, num_steps=4 * LIMIT * NUM_ENVS, run_dir=tmp_path / "run", resume=True)
    assert_close(jax.device_get(rest.policy.params), jax.device_get(whole.policy.params), 0.0)
    assert "save no state" not in capsys.readouterr().err


def train_settings(placement: Any, rollout_length: int = 8) -> dict[str, Any]:
    return {
        "agent": AGENTS["impala"][0],
        "env": on_host(catch()),
        "num_envs": NUM_ENVS,
        "rollout_length": rollout_length,
        "placement": placement,
        "eval_episodes": 4,
        "progress": False,
    }


def test_they_say_what_moves_between_host_and_device() -> None:
    for placement in (*PLACEMENTS.values(), EVOLUTION):
        program = placement.build(AGENTS["impala"][0], on_host(catch()), num_envs=NUM_ENVS, rollout_length=8)
        moved = program.bytes_per_update()
        assert moved["observations"] > 8 * NUM_ENVS * 50 * 4  # Catch shows 10 x 5 numbers.
        assert moved["actions"] == 8 * NUM_ENVS * 4
        text = str(program.explain())
        assert "observations" in text and "host" in text
