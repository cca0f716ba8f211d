"""Evolution: a generation against a plain loop over its members, and nothing but returns between devices."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import podium
from podium import keys
from podium.agent import Agent
from podium.agents import a2c, apex, dqn, impala, ppo
from podium.evaluate import make_evaluator
from podium.placement.strategy import centered_ranks, perturbed

POPULATION, LIMIT = 32, 9  # A game of Catch lasts 9 steps.

AGENTS: dict[str, Agent] = {
    "ppo": ppo.make(ppo.Config(hidden_sizes=(16,))),
    "ppo gru": ppo.make(ppo.Config(hidden_sizes=(16,), memory="gru", memory_size=8)),
    "a2c": a2c.make(a2c.Config(hidden_sizes=(16,))),
    "impala": impala.make(impala.Config(hidden_sizes=(16,))),
    "dqn": dqn.make(dqn.Config(hidden_sizes=(16,))),
    "apex": apex.make(apex.Config(hidden_sizes=(16,))),
}


def build(placement: podium.Evolution, agent: Agent, env: Any = "podium/Catch", **sizes: Any) -> Any:
    env = podium.envs.make(env) if isinstance(env, str) else env
    return placement.build(agent, env, **{"num_envs": POPULATION, "rollout_length": LIMIT, "max_updates": 3, **sizes})


def chosen(agent: Agent, env: Any) -> list[str]:
    shapes = jax.eval_shape(lambda key: agent.init(key, env.spec), jax.random.key(0))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(shapes)]
    return [path for path, moved in zip(paths, perturbed(agent, env.spec, shapes), strict=True) if moved]


@pytest.mark.parametrize("episodes", [1, 2])
def test_a_generation_is_that_of_a_loop_over_its_members(episodes: int) -> None:
    agent, env = AGENTS["ppo"], podium.envs.make("podium/Catch")
    placement = podium.Evolution(sigma=0.3, learning_rate=0.1, weight_decay=0.01, episodes=episodes, devices=1)
    program = build(placement, agent)
    start = program.init(5)
    before = jax.device_get(start.agent)
    noise_key, play_key = keys.iteration(start.key, start.update)
    paths = set(chosen(agent, env))

    def vector(state: Any) -> np.ndarray:
        leaves = jax.tree_util.tree_leaves_with_path(state)
        return np.concatenate([np.asarray(x).ravel() for path, x in leaves if jax.tree_util.keystr(path) in paths])

    def moved(state: Any, values: np.ndarray) -> Any:
        at = 0

        def place(path: Any, x: Any) -> Any:
            nonlocal at
            if jax.tree_util.keystr(path) not in paths:
                return x
            at += x.size
            return values[at - x.size : at].reshape(x.shape)

        return jax.tree_util.tree_map_with_path(place, state)

    parameters = vector(before)
    play = jax.jit(make_evaluator(agent, env, episodes, LIMIT))
    returns, all_noise = [], []
    for pair in range(POPULATION // episodes // 2):
        noise = np.asarray(jax.random.normal(jax.random.fold_in(noise_key, pair), parameters.shape))
        for sign in (1, -1):
            params = agent.actor(moved(before, parameters + sign * 0.3 * noise))
            returns.append(float(play(jax.random.fold_in(play_key, pair), params)["eval_return"]))
            all_noise.append(sign * noise)
    # Mean ranks of ties, the slow way.
    ranks = np.array([sum(o < r for o in returns) + (sum(o == r for o in returns) - 1) / 2 for r in returns])
    weights = ranks / (len(returns) - 1) - 0.5
    gradient = 0.01 * parameters - (weights[:, None] * np.array(all_noise)).mean(0) / 0.3
    optimizer = optax.adam(0.1)
    change, _ = optimizer.update(gradient, optimizer.init(parameters))

    state, metrics = program.chunk(start, 1)
    np.testing.assert_allclose(vector(jax.device_get(state.agent)), parameters + change, atol=2e-5)
    np.testing.assert_allclose(metrics["episode_return_sum"][0], np.mean(returns) * POPULATION, rtol=1e-5)
    assert len(set(returns)) > 1
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(state.agent), strict=True):
        same = np.array_equal(x, y)
        assert same != (jax.tree_util.keystr(path) in paths), path


def test_ranks_of_equal_returns_are_equal() -> None:
    returns = np.random.default_rng(0).integers(0, 5, 50).astype(np.float32)
    ranks = np.asarray(centered_ranks(jnp.asarray(returns)))
    assert abs(ranks.sum()) < 1e-5
    assert ranks.min() >= -0.5
    assert ranks.max() <= 0.5
    for value in range(5):
        assert np.ptp(ranks[returns == value]) == 0
        if value:
            assert ranks[returns == value][0] > ranks[returns == value - 1][0]
    np.testing.assert_allclose(centered_ranks(jnp.ones(4)), np.zeros(4))


def test_what_is_perturbed_is_what_the_action_depends_on() -> None:
    env, pendulum = podium.envs.make("podium/Catch"), podium.envs.make("Pendulum-v1")
    assert all(path.startswith(".params[") for path in chosen(AGENTS["dqn"], env))  # And not `.target_params`.
    names = chosen(AGENTS["ppo"], env)
    assert any("actor" in name for name in names)
    assert not any("critic" in name or "value" in name or "opt_state" in name for name in names)
    assert not any("stats" in name for name in chosen(ppo.make(ppo.Config(normalize_obs=True)), pendulum))
    assert any("gru" in name.lower() or "memory" in name.lower() for name in chosen(AGENTS["ppo gru"], env))


def test_an_agent_with_nothing_to_perturb_is_refused() -> None:
    agent = AGENTS["ppo"]
    act = agent.act
    blind = agent._replace(act=lambda keys, *rest: act(keys, *rest)._replace(action=jnp.zeros(keys.shape, jnp.int32)))
    with pytest.raises(ValueError, match="the actions of ppo depend on no array of its State"):
        build(podium.Evolution(devices=1), blind)


def test_the_number_of_devices_and_of_members_at_once_changes_nothing() -> None:
    final = []
    for devices, at_once in ((1, None), (2, None), (4, 2), (1, 4)):
        program = build(podium.Evolution(devices=devices, members_at_once=at_once), AGENTS["ppo"])
        state, metrics = program.chunk(program.init(0), 3)
        final.append((jax.device_get(state.agent.params), metrics["episode_return_sum"]))
    for params, returns in final[1:]:
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), params, final[0][0])
        np.testing.assert_allclose(returns, final[0][1])


def test_only_returns_cross_devices() -> None:
    text = build(podium.Evolution(devices=4), AGENTS["ppo"]).compiled_text()
    kinds = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter|collective-broadcast"
    moved: dict[str, int] = {}
    for shape, kind in re.findall(rf"= (.*?)\s({kinds})(?:-start)?\(", text):
        axes = [[int(n) for n in axes.split(",") if n] for axes in re.findall(r"\w\[([\d,]*)\]", shape)]
        sizes = [int(np.prod(shape, initial=1)) for shape in axes]
        moved[kind] = moved.get(kind, 0) + max(sizes)
    assert moved == {"all-gather": POPULATION, "all-reduce": 1}, moved


def test_a_generation_counts_the_steps_that_were_played() -> None:
    program = build(podium.Evolution(devices=1), AGENTS["ppo"], "CartPole-v1", rollout_length=500, max_updates=1)
    _, metrics = program.chunk(program.init(0), 1)
    assert metrics["valid_steps"][0] == metrics["episode_length_sum"][0] == metrics["episode_return_sum"][0]
    assert POPULATION * 8 < metrics["valid_steps"][0] < POPULATION * 200
    result = podium.train(
        AGENTS["ppo"], "CartPole-v1", num_steps=16_000, num_envs=32, placement=podium.Evolution(devices=1),
        progress=False, eval_every=0,
    )  # fmt: skip
    row = result.metrics[-1]
    assert row["env_steps"] == 16_000
    assert row["valid_steps"] < 16_000


@pytest.mark.parametrize(
    ("changes", "sizes", "words"),
    [
        ({"sigma": 0.0}, {}, "sigma=0.0 must be finite and greater than 0; 0.05 is usual"),
        ({"learning_rate": float("nan")}, {}, "learning_rate=nan must be finite"),
        ({"weight_decay": -1.0}, {}, "weight_decay=-1.0 must be finite and 0 or more"),
        ({"episodes": 0}, {}, "episodes=0 must be a positive integer"),
        ({"members_at_once": 1.5}, {}, "members_at_once=1.5 must be a positive integer"),
        ({}, {"num_envs": 7}, "num_envs=7 is not divisible by 2, .*; use 6 or 8"),
        ({"devices": 4}, {"num_envs": 6}, "num_envs=6 is not divisible by 8, .*; use 8"),
        ({}, {"seeds": 2}, "Evolution runs one seed"),
        ({}, {"rollout_length": 0}, "rollout_length=0 must be a positive integer"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], sizes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build(podium.Evolution(**{"devices": 1, **changes}), AGENTS["ppo"], **sizes)


def test_it_says_who_plays_where_and_what_moves() -> None:
    text = build(podium.Evolution(devices=2), AGENTS["ppo"]).explain()
    assert re.search(r"cpu:1 +members 16 to 31", text)
    assert re.search(r"returns +from all to all +128 B", text)
    assert "nothing moves" in build(podium.Evolution(devices=1), AGENTS["ppo"]).explain()


def test_a_run_goes_on_exactly(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "num_envs": POPULATION,
        "placement": podium.Evolution(devices=2),
        "eval_every": 0,
        "log_every": POPULATION * LIMIT,
        "progress": False,
    }
    agent, unit = AGENTS["ppo"], POPULATION * LIMIT
    whole = podium.train(agent, "podium/Catch", num_steps=8 * unit, **settings)
    podium.train(agent, "podium/Catch", num_steps=5 * unit, run_dir=tmp_path / "run", **settings)
    resumed = podium.train(agent, "podium/Catch", num_steps=8 * unit, run_dir=tmp_path / "run", resume=True, **settings)
    assert resumed.summary["params_sha256"] == whole.summary["params_sha256"]


# The last layer of a Q-network is not small at the start, so that it takes more noise to change what is greedy.
_FOR_Q = podium.Evolution(sigma=0.2, learning_rate=0.05, weight_decay=0.005, devices=1)

LEARNERS: dict[str, tuple[Agent, podium.Evolution, int, int]] = {
    "ppo": (ppo.make(ppo.Config()), podium.Evolution(devices=1), 1024, 60),
    "a2c": (a2c.make(a2c.Config()), podium.Evolution(devices=1), 1024, 60),
    "impala": (impala.make(impala.Config()), podium.Evolution(devices=1), 1024, 60),
    "dqn": (dqn.make(dqn.Config()), _FOR_Q, 2048, 110),
    "apex": (apex.make(apex.Config()), _FOR_Q, 2048, 110),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "ppo")) for name in LEARNERS])
def test_it_reaches_the_optimum_of_catch(name: str) -> None:
    agent, placement, population, generations = LEARNERS[name]
    result = podium.train(
        agent, "podium/Catch", num_steps=generations * population * LIMIT, num_envs=population,
        placement=placement, progress=False, eval_every=0,
    )  # fmt: skip
    assert result.summary["eval_return"] >= 0.9


@pytest.mark.slow
def test_it_solves_cartpole() -> None:
    result = podium.train(
        ppo.make(ppo.Config()), "CartPole-v1", num_steps=40 * 256 * 500, num_envs=256,
        placement=podium.Evolution(devices=1), progress=False, eval_every=0,
    )  # fmt: skip
    assert result.summary["eval_return"] >= 475
