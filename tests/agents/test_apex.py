"""Ape-X: DQN with another replay and an epsilon for every actor; what is DQN's is tested there."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import podium
from podium import agents
from podium.agent import Agent, fresh_carry
from podium.agents import apex, dqn
from podium.replay import Estimate
from podium.types import ArraySpec, DiscreteSpec, EnvSpec, Trajectory

SPEC = EnvSpec("test", ArraySpec((4,)), DiscreteSpec(3))
SMALL = apex.Config(batch_size=16, buffer_capacity=256, min_replay_size=32, hidden_sizes=(8,), num_actors=4)


def played(agent: Agent, number: int, epsilon: float = 0.4) -> Any:
    """Return what `number` environments that all show the same do, how they would greedily, and the parameters."""
    params = agent.actor(agent.init(jax.random.key(0), SPEC))._replace(epsilon=jnp.float32(epsilon))
    obs = jnp.broadcast_to(jnp.array([1.0, -2.0, 3.0, 0.5]), (number, 4))
    memory, keys = fresh_carry(agent, SPEC, jnp.arange(number)), jax.random.split(jax.random.key(1), number)
    act = jax.jit(agent.act, static_argnums=5)
    return *(act(keys, params, memory, obs, jnp.ones(number, bool), greedy) for greedy in (False, True)), params, obs


def test_each_actor_explores_at_its_own_rate() -> None:
    """Epsilon 0.9 and spread 7 over four actors: 0.9, 0.9 ** (10 / 3), 0.9 ** (17 / 3), 0.9 ** 8, and again."""
    output, greedy, _, _ = played(apex.make(SMALL), 40_000, 0.9)
    np.testing.assert_array_equal(output.carry, np.arange(40_000))
    different = np.asarray(output.action != greedy.action).reshape(-1, 4).mean(0)
    # A random action is another than the best in two of three cases.
    expected = 2 / 3 * 0.9 ** (1 + 7 * np.arange(4) / 3)
    np.testing.assert_allclose(different, expected, atol=4 * np.sqrt(0.25 / 10_000))


def test_epsilons_of_the_paper() -> None:
    """With epsilon 0.4 and spread 7: 0.4 for the first actor, 0.4 ** 8 = 0.00065536 for the last; one alone has 0.4."""
    rates = apex.epsilons(jnp.float32(0.4), jnp.arange(360), 360, 7.0)
    np.testing.assert_allclose(rates[jnp.array([0, 359])], [0.4, 0.4**8], rtol=1e-5)
    assert (np.diff(rates) < 0).all()
    np.testing.assert_allclose(apex.epsilons(jnp.float32(0.4), jnp.arange(3), 1, 7.0), 0.4)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "epsilon 0.4 to 0.00066 over 16 actors"),
        ({"num_actors": 1}, "epsilon 0.4"),
        (
            {"epsilon_start": 1.0, "epsilon_spread": 3.0},
            "epsilon 1 to 0.4 over 25,000 steps, to the power of 1 to 4 over 16 actors",
        ),
        ({"epsilon_start": 1.0, "num_actors": 1}, "epsilon 1 to 0.4 over 25,000 steps"),
    ],
)
def test_the_plan_says_how_they_explore(fields: dict[str, Any], words: str) -> None:
    assert agents.get("apex").describe(apex.Config(**fields), 16, 1)["exploration"] == words


def test_acting_leaves_what_first_priorities_are_made_of() -> None:
    agent = apex.make(SMALL)
    output, greedy, params, obs = played(agent, 64)
    value = dqn_values(agent, params, obs)
    assert isinstance(output.extras, Estimate)
    np.testing.assert_allclose(output.extras.value, np.take_along_axis(value, output.action[:, None], 1)[:, 0])
    np.testing.assert_allclose(output.extras.best, value.max(1))
    np.testing.assert_array_equal(greedy.action, value.argmax(1))


def dqn_values(agent: Agent, params: Any, obs: Any) -> np.ndarray:
    """Return action values [B, A], by a DQN that leaves them as extras."""
    plain = dqn.make(agent.config, note=lambda value, action: value)
    return np.asarray(
        plain.act(jax.random.split(jax.random.key(0), len(obs)), params, (), obs, obs[:, 0] > 0, False)[2]
    )


def test_what_is_stored_first_is_ranked_by_it(experience: Callable[..., Trajectory], spec: EnvSpec) -> None:
    """A rollout's TD errors, by hand: n = 1, so windows of all rows but the last are ranked."""
    agent = apex.make(dataclasses.replace(SMALL, n_step=1, priority_exponent=1.0, gamma=0.9))
    state = agent.init(jax.random.key(0), spec)
    trajectory = experience(agent, agent.actor(state), spec)
    items = agent.plan(jax.random.key(0), state, trajectory).data
    stored = agent.replay.init(jax.tree.map(lambda x: x[0, 0], items), 8, 1, 6)
    stored = jax.jit(agent.replay.add)(stored, items)
    value, best = trajectory.extras
    # A cut episode's end is taken to be worth what the observation before it is.
    following = np.where(trajectory.truncated[:-1], best[:-1], best[1:])
    error = trajectory.reward[:-1] + 0.9 * trajectory.discount[:-1] * following - value[:-1]
    ranked = np.asarray(stored.priorities.levels[0])[0, :48].reshape(6, 8)
    np.testing.assert_allclose(ranked[:-1], np.abs(error) + 1e-6, rtol=1e-4)
    np.testing.assert_array_equal(ranked[-1], 0)


def test_without_priorities_and_spread_it_is_dqn() -> None:
    """Weights all 1 and one epsilon for all: other transitions are drawn, but what is done is done alike."""
    plain = {"hidden_sizes": (8,), "n_step": 3, "dueling": True, "epsilon_start": 0.4, "epsilon_end": 0.4}
    ours = apex.make(dataclasses.replace(SMALL, epsilon_spread=0.0))
    theirs = dqn.make(dqn.Config(**plain))
    state = ours.init(jax.random.key(0), SPEC)
    jax.tree.map(np.testing.assert_array_equal, state, theirs.init(jax.random.key(0), SPEC))
    obs, first = jax.random.normal(jax.random.key(1), (512, 4)), jnp.ones(512, bool)
    keys, params = jax.random.split(jax.random.key(2), 512), ours.actor(state)
    action = ours.act(keys, params, fresh_carry(ours, SPEC, jnp.arange(512)), obs, first, False).action
    np.testing.assert_array_equal(action, theirs.act(keys, params, (), obs, first, False).action)


@pytest.mark.slow  # Single steps through Python, and every operation of it is compiled alone.
def test_anakin_is_single_and_on_eight_devices_the_same() -> None:
    """Three updates, of which the last two learn; also the priorities agree."""
    agent = apex.make(dataclasses.replace(SMALL, num_updates=2, min_replay_size=64))
    runs = []
    for placement in (podium.Single(), podium.Anakin(1), podium.Anakin(8)):
        sizes = {"num_envs": 8, "rollout_length": 4, "num_lanes": 8, "max_updates": 3}
        program = placement.build(agent, podium.envs.make("podium/Catch"), **sizes)
        state, metrics = program.chunk(program.init(0), 3)
        np.testing.assert_array_equal(np.isfinite(metrics["loss"]), [False, True, True])
        runs.append(jax.device_get((agent.actor(state.agent), state.replay, state.rollout)))
    for other in runs[1:]:
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), other, runs[0])
    assert (runs[0][2].carry == np.arange(8)).all()


@pytest.mark.slow
def test_another_loss_is_used() -> None:
    def ranked_alike(config: Any, values: Any, batch: Any) -> Any:
        total, aux = dqn.loss(config, values, batch)
        return total, aux._replace(priorities=jnp.full(batch.reward.shape, 5.0))

    agent = apex.make(dataclasses.replace(SMALL, priority_exponent=1.0), loss=ranked_alike)
    program = podium.Anakin(1).build(
        agent, podium.envs.make("podium/Catch"), num_envs=8, rollout_length=4, max_updates=3
    )
    state, metrics = program.chunk(program.init(0), 3)
    assert np.isfinite(metrics["loss"]).all()
    assert (np.abs(np.asarray(state.replay.priorities.levels[0]) - 5.0) < 1e-4).any()
    assert int(state.replay.priorities.updates) == 3


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_actors", 0),
        ("num_actors", 2.0),
        ("epsilon_spread", -1.0),
        ("epsilon_spread", float("nan")),
        ("epsilon_start", 1.5),
        ("epsilon_end", 0.5),
        ("n_step", 0),
        ("dueling", 1),
        ("priority_exponent", 1.1),
        ("importance_exponent", float("nan")),
        ("annealing_updates", -5),
        ("smallest_priority", 0.0),
    ],
)
def test_bad_fields_are_refused_by_name_and_value(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{field}={value}")):
        apex.make(dataclasses.replace(apex.Config(), **{field: value}))


def test_every_field_that_is_not_dqns_is_checked_above() -> None:
    marks = test_bad_fields_are_refused_by_name_and_value.pytestmark
    own = {*vars(apex.Config)["__annotations__"], *vars(dqn.PrioritizedConfig)["__annotations__"]}
    assert {field for field, _ in marks[0].args[1]} == own
