"""Collect trajectories: scan `act` and `step` over time, for environments that are pure functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from podium import episodes
from podium.agent import Agent
from podium.env import Env
from podium.types import Array, Key, PyTree, Trajectory


class RolloutState(NamedTuple):
    """What one rollout hands to the next; every leaf is per environment, [B, ...].

    Attributes:
      index: int32 [B], the global number of each environment: all randomness derives from it.
      env_state: of the environments.
      obs: [B, ...], to act on next.
      first: [B] bool, whether `obs` begins an episode.
      carry: [B, ...], the agent's recurrent memory.
      episodes: accumulators of return and length.
    """

    index: Array  # type: ignore[assignment]  # a tuple has a method of that name, which nobody calls
    env_state: PyTree
    obs: PyTree
    first: Array
    carry: PyTree
    episodes: episodes.Episodes


def environment_keys(key: Key, index: Array) -> Key:
    """Return one key an environment, [B], derived from its global number, so that no layout changes it."""
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, index)


def begin(key: Key, env: Env, index: Array, carry: PyTree) -> RolloutState:
    """Reset the environments numbered `index` [B]; `carry` is the agent's memory for them."""
    env_state, timestep = jax.vmap(env.reset)(environment_keys(key, index))
    first = jnp.ones(index.shape, bool)
    return RolloutState(index, env_state, timestep.obs, first, carry, episodes.begin(index.shape[0]))


def rollout(
    key: Key,
    agent: Agent,
    env: Env,
    params: PyTree,
    state: RolloutState,
    num_steps: int,
    version: Array,
    fold: Callable[..., Any] = jax.lax.scan,
) -> tuple[RolloutState, Trajectory, episodes.Ended]:
    """Act for `num_steps` in every environment.

    Args:
      key: of this rollout.
      agent: whose `act` chooses.
      env: one that resets itself.
      params: what `agent.actor` gave.
      state: where the environments stand.
      num_steps: T.
      version: int32 scalar, the number of updates behind `params`.
      fold: how to repeat a step: `jax.lax.scan`, or `podium.learn.python_scan` to read along.

    Returns:
      the next state, a Trajectory [T, B, ...], and the episodes that ended, [T, B].
    """

    def step(state: RolloutState, keys: tuple[Key, Key]) -> tuple[RolloutState, tuple]:
        act_keys, env_keys = keys
        output = agent.act(act_keys, params, state.carry, state.obs, state.first, False)
        env_state, timestep = jax.vmap(env.step)(env_keys, state.env_state, output.action)
        counted, ended = episodes.accumulate(state.episodes, timestep)
        row = (
            state.obs,
            output.action,
            timestep.reward,
            timestep.terminated,
            timestep.truncated,
            timestep.next_obs,
            state.first,
            output.extras,
        )
        following = RolloutState(state.index, env_state, timestep.obs, timestep.last, output.carry, counted)
        return following, (row, timestep.valid, ended)

    keys = _step_keys(environment_keys(key, state.index), num_steps)
    end, (row, valid, ended) = fold(step, state, keys)
    trajectory = Trajectory(*(*row, state.carry, end.carry, version, valid))
    return end, trajectory, ended


def _step_keys(keys: Key, num_steps: int) -> tuple[Key, Key]:
    """Return keys to act and keys to step, [T, B] each, at once: one large draw is cheaper than many small."""
    times = jnp.arange(num_steps)
    pairs = jax.vmap(lambda time: jax.vmap(lambda key: jax.random.split(jax.random.fold_in(key, time)))(keys))(times)
    return pairs[..., 0], pairs[..., 1]
