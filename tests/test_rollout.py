"""Rollouts: randomness by the environment's global number, flags and observations where episodes end, and counting."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podium.agent import ActOutput, Agent
from podium.env import Env, auto_reset, restart, transition
from podium.envs.wrappers import scale_reward
from podium.keys import environment_keys
from podium.learn import python_scan
from podium.ops.returns import next_values
from podium.rollout import Rollout, begin, rollout
from podium.testing import assert_compiles_once
from podium.types import ArraySpec, DiscreteSpec, EnvSpec, Trajectory

T, B = 12, 8


def random_walk() -> Env:
    """Make an environment in which everything is drawn: the start, the moves, both kinds of end.

    The observation is (start, time, position): the first tells episodes apart.
    """

    def reset(key: jax.Array) -> Any:
        state = jnp.stack([jax.random.uniform(key), 0.0, 0.0])
        return state, restart(state)

    def step(key: jax.Array, state: jax.Array, action: jax.Array) -> Any:
        move_key, end_key, cut_key = jax.random.split(key, 3)
        state = jnp.stack([state[0], state[1] + 1, state[2] + jax.random.normal(move_key) + action])
        terminated, truncated = jax.random.bernoulli(end_key, 0.2), jax.random.bernoulli(cut_key, 0.2)
        return state, transition(state, state[2], terminated, truncated)

    return Env(EnvSpec("test/Walk", ArraySpec((3,)), DiscreteSpec(3)), reset, step)


def counter() -> Agent:
    """Make an agent that acts at random and whose memory counts the steps since `first`."""

    def act(keys: Any, params: Any, memory: Any, obs: Any, first: Any, greedy: bool) -> ActOutput:
        memory = jnp.where(first, 0, memory) + 1
        action = jax.vmap(lambda key: jax.random.randint(key, (), 0, 3))(keys)
        return ActOutput(action, memory, {"memory": memory, "params": jnp.full(memory.shape, params)})

    carry = lambda spec, num_envs: jnp.zeros(num_envs, jnp.int32)
    return Agent(None, None, carry, act, None, None, None, None)  # type: ignore[arg-type]


ENV = auto_reset(scale_reward(random_walk(), 0.5))


@jax.jit
def play(key: jax.Array, state: Any, version: Any) -> Any:
    return rollout(key, counter(), ENV, jnp.float32(3), state, T, version)


@jax.jit
def start(index: jax.Array) -> Any:
    return begin(jax.random.key(7), ENV, index, counter().carry(ENV.spec, index.shape[0]))


@functools.cache
def played(low: int = 0, high: int = B) -> Any:
    return jax.device_get(play(jax.random.key(1), start(jnp.arange(low, high)), jnp.int32(5)))


def test_parts_of_the_batch_are_the_batch_bit_for_bit() -> None:
    whole, parts = played(), [played(0, 4), played(4, 8)]
    # Axis of the environments: 0 in the states and the carries, 1 in what has time.
    for i, axis in ((0, 0), (2, 1)):
        together, *apart = [part[i] for part in (whole, *parts)]
        joined = jax.tree.map(lambda *x: np.concatenate(x, axis), *apart)  # noqa: B023
        jax.tree.map(np.testing.assert_array_equal, together, joined)
    for name, x in whole[1]._asdict().items():
        if name == "policy_version":
            continue
        axis = 0 if name in ("carry", "end_carry") else 1
        joined = jax.tree.map(lambda *x: np.concatenate(x, axis), *[getattr(part[1], name) for part in parts])  # noqa: B023
        jax.tree.map(np.testing.assert_array_equal, x, joined)


def test_environments_and_times_draw_apart() -> None:
    trajectory = played()[1]
    assert len(np.unique(trajectory.obs[0, :, 0])) == B
    moves = trajectory.next_obs[..., 2] - trajectory.obs[..., 2] - trajectory.action
    assert len(np.unique(moves)) > 0.9 * T * B


def test_keys_follow_the_global_number_only() -> None:
    key = jax.random.key(3)
    data = jax.random.key_data(environment_keys(key, jnp.array([5, 2, 5])))
    np.testing.assert_array_equal(data[0], data[2])
    np.testing.assert_array_equal(data[1], jax.random.key_data(jax.random.fold_in(key, 2)))


def test_flags_and_observations_at_the_ends() -> None:
    _, t, _ = played()
    last = t.last
    assert t.terminated.any() and t.truncated.any() and (t.terminated & t.truncated).any()
    assert t.first[0].all()
    np.testing.assert_array_equal(t.first[1:], last[:-1])
    # Inside an episode what is reached is what is acted on next; at an end it is the true last observation.
    np.testing.assert_array_equal(t.obs[1:][~last[:-1]], t.next_obs[:-1][~last[:-1]])
    np.testing.assert_array_equal(t.next_obs[..., 0], t.obs[..., 0])
    np.testing.assert_array_equal(t.next_obs[..., 1], t.obs[..., 1] + 1)
    assert (t.obs[..., 1][t.first] == 0).all()
    assert (t.obs[1:, :, 0] != t.obs[:-1, :, 0])[last[:-1]].all()
    np.testing.assert_allclose(t.reward, 0.5 * t.next_obs[..., 2], rtol=1e-6)
    np.testing.assert_array_equal(t.discount, np.where(t.terminated, 0, 1))


def test_memory_begins_anew_with_every_episode() -> None:
    _, t, _ = played()
    np.testing.assert_array_equal(t.extras["memory"], t.obs[..., 1] + 1)
    np.testing.assert_array_equal(t.carry, np.zeros(B))
    np.testing.assert_array_equal(t.end_carry, t.extras["memory"][-1])
    np.testing.assert_array_equal(t.extras["params"], 3)
    assert t.policy_version == 5 and t.valid is None


def test_a_second_rollout_goes_on_where_the_first_stopped() -> None:
    middle, first, _ = played()
    np.testing.assert_array_equal(middle.first, first.last[-1])
    end, second, ended = jax.device_get(play(jax.random.key(2), jax.tree.map(jnp.asarray, middle), jnp.int32(6)))
    np.testing.assert_array_equal(second.first[0], first.last[-1])
    np.testing.assert_array_equal(second.obs[0], middle.obs)
    np.testing.assert_array_equal(second.carry, first.end_carry)
    goes_on = ~first.last[-1]
    np.testing.assert_array_equal(second.obs[0][goes_on], first.next_obs[-1][goes_on])
    # Rewards are halved on their way to the agent; returns are those the environment paid, over both rollouts.
    returns, lengths = np.zeros(B), np.zeros(B, int)
    counted = [played()[2], ended]
    for rows, number in ((first, 0), (second, 1)):
        for time in range(T):
            returns, lengths = returns + 2 * rows.reward[time], lengths + 1
            last = rows.last[time]
            np.testing.assert_array_equal(counted[number].ended[time], last)
            np.testing.assert_allclose(
                counted[number].episode_return[time], np.where(last, returns, 0), rtol=1e-4, atol=1e-5
            )
            np.testing.assert_array_equal(counted[number].episode_length[time], np.where(last, lengths, 0))
            returns, lengths = np.where(last, 0, returns), np.where(last, 0, lengths)
    np.testing.assert_allclose(end.episodes.episode_return, returns, rtol=1e-4, atol=1e-5)


def test_a_python_loop_gives_the_same() -> None:
    @functools.partial(jax.jit, static_argnums=2)
    def run(key: jax.Array, state: Any, fold: Any) -> Any:
        return rollout(key, counter(), ENV, jnp.float32(3), state, 2, jnp.int32(5), fold)

    found, expected = (run(jax.random.key(1), start(jnp.arange(B)), fold) for fold in (python_scan, jax.lax.scan))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, expected)


def test_rollouts_compile_once() -> None:
    function = jax.jit(lambda key, state: rollout(key, counter(), ENV, jnp.float32(0), state, 2, jnp.int32(0)))
    with assert_compiles_once(function):
        state = start(jnp.arange(B))
        for seed in range(2):
            state, _, _ = function(jax.random.key(seed), state)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_key_fixes_everything(seed: int) -> None:
    first, second = (play(jax.random.key(seed), start(jnp.arange(B)), jnp.int32(0)) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, second)
    assert (np.asarray(first[1].action) != played()[1].action).any() == (seed != 1)


def test_environments_draw_by_their_own_clock_whatever_the_length_of_rollouts() -> None:
    """One rollout of 6 steps is two of 3: where the environments go does not depend on how time is cut."""
    agent = counter()._replace(
        act=lambda keys, params, memory, obs, first, greedy: ActOutput(first.astype(jnp.int32), memory)
    )
    start = begin(jax.random.key(1), ENV, jnp.arange(B), agent.carry(ENV.spec, B))

    def play(state: Any, length: int) -> Any:
        state, trajectory, _ = rollout(jax.random.key(0), agent, ENV, 0.0, state, length, jnp.int32(0))
        return state, trajectory.next_obs

    _, whole = jax.jit(play, static_argnums=1)(start, 6)
    middle, early = jax.jit(play, static_argnums=1)(start, 3)
    _, late = jax.jit(play, static_argnums=1)(middle, 3)
    np.testing.assert_array_equal(whole, np.concatenate([early, late]))


def test_what_a_step_led_to_is_read_from_rows_that_hold_it_once() -> None:
    rng = np.random.default_rng(0)
    rows = {
        "view": rng.normal(size=(5, 3, 2)).astype(np.float32),
        "frames": rng.integers(0, 255, (5, 3, 4, 4), np.uint8),
    }
    flags, steps = np.zeros((4, 3), bool), jnp.array([3, 0, 2])
    played = Rollout(rows, flags, flags, flags, flags, None, flags, (), (), (), np.int32(0), ~flags)
    trajectory = played.trajectory()
    replaced = trajectory._replace(next_obs=jax.tree.map(lambda x: 0 * x, trajectory.next_obs))
    doubled = jax.tree.map(lambda x: x * 2, trajectory)
    for name in rows:
        np.testing.assert_array_equal(trajectory.obs[name], rows[name][:4])
        np.testing.assert_array_equal(trajectory.next_obs[name], rows[name][1:])
        np.testing.assert_array_equal(trajectory.reached(None)[name], rows[name][4])
        reached = [rows[name][step + 1, env] for env, step in enumerate(steps.tolist())]
        np.testing.assert_array_equal(trajectory.reached(steps)[name], np.stack(reached))
        # What was made anew of it says what it holds.
        np.testing.assert_array_equal(replaced.reached(steps)[name], 0 * np.stack(reached))
        np.testing.assert_array_equal(doubled.reached(steps)[name], np.stack(reached) * 2)
        np.testing.assert_array_equal(Trajectory(*trajectory).reached(steps)[name], np.stack(reached))


def test_a_program_that_asks_for_few_observations_reached_copies_none_of_the_others() -> None:
    def ask(rows: Any, cut: Any) -> Any:
        flags = jnp.zeros((64, 8), bool)
        played = Rollout(rows, flags, flags, flags, flags, None, flags, (), (), (), jnp.int32(0), ~flags).trajectory()
        return next_values(jnp.ones((64, 8)), cut, lambda step: played.reached(step).mean((1, 2)))

    shapes = jax.ShapeDtypeStruct((65, 8, 32, 32), np.float32), jax.ShapeDtypeStruct((64, 8), bool)
    memory = jax.jit(ask).lower(*shapes).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 65 * 8 * 32 * 32 * 4 / 8
