"""Collect trajectories: scan `act` and `step` over time, for environments that are pure functions.

And rollouts as they travel between who plays and who learns: how they lie along a mesh, are cut and joined.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from podium import episodes, film, keys
from podium.agent import Agent, acted
from podium.env import Env
from podium.ops import stacks
from podium.ops.returns import discounted_sum
from podium.types import Array, Key, PyTree, Trajectory


class RolloutState(NamedTuple):
    """What one rollout hands to the next; every leaf is per environment, [B, ...].

    Attributes:
      index: int32 [B], the global number of each environment: all randomness derives from it.
      env_keys: uint32 [B, ...], words of the keys that the environments draw from; see `podium.keys`.
      time: uint32 [B], steps since the start of the run.
      env_state: of the environments.
      obs: [B, ...], to act on next.
      first: [B] bool, whether `obs` begins an episode.
      carry: [B, ...], the agent's recurrent memory.
      episodes: accumulators of return and length.
      past: [B] float32, discounted sums of rewards (`Trajectory.past`); None for an agent without `reward_discount`.
    """

    index: Array  # type: ignore[assignment]  # a tuple has a method of that name, which nobody calls
    env_keys: Array
    time: Array
    env_state: PyTree
    obs: PyTree
    first: Array
    carry: PyTree
    episodes: episodes.Episodes
    past: Array | None = None

    def moving(self) -> dict[str, PyTree]:
        """Return the fields that a step changes."""
        return {name: getattr(self, name) for name in ("env_state", "obs", "first", "carry", "episodes", "past")}


def begin(key: Key, env: Env, index: Array, carry: PyTree, past: Array | None = None) -> RolloutState:
    """Reset the environments numbered `index` [B], which draw from `key`.

    What the agent remembers of them are `carry` and `past`: see `podium.agent.fresh_carry` and `fresh_past`.
    """
    env_keys = keys.environment_keys(key, index)
    time = jnp.zeros(index.shape, jnp.uint32)
    env_state, timestep = jax.vmap(env.reset)(keys.at_time(env_keys, time))
    first = jnp.ones(index.shape, bool)
    counted = episodes.begin(index.shape[0], timestep.turn is not None)
    words = jax.random.key_data(env_keys)
    return RolloutState(index, words, time + 1, env_state, timestep.obs, first, carry, counted, past)


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
      key: of this rollout's actions.
      agent: whose `act` chooses.
      env: one that resets itself.
      params: what `agent.actor` gave.
      state: where the environments stand.
      num_steps: T.
      version: int32 scalar, the number of updates behind `params`.
      fold: how to repeat a step: `jax.lax.scan`, `podium.words.fold` of a device, or `podium.learn.python_scan` to read
        along.

    Returns:
      the next state, a Trajectory [T, B, ...], and the episodes that ended, [T, B].

    Raises:
      ValueError: the agent has a `reward_discount`, and `state` no discounted sums.
    """
    end, played, ended = play(key, agent, env, params, state, num_steps, version, fold)
    return end, played.trajectory(), ended


def play(
    key: Key,
    agent: Agent,
    env: Env,
    params: PyTree,
    state: RolloutState,
    num_steps: int,
    version: Array,
    fold: Callable[..., Any] = jax.lax.scan,
) -> tuple[RolloutState, Rollout, episodes.Ended]:
    """Do as `rollout` does, and return its trajectory as it travels; stacks of frames are filmed.

    Where an environment's stacks are not what `ArraySpec.num_frames` promises, its reward is NaN: what would be learnt
    from is not what was seen, and a run ends so, as it does for numbers of a simulator that are none.
    """
    if agent.reward_discount is not None and state.past is None:
        raise ValueError(
            f"{agent.name} has reward_discount={agent.reward_discount}, but state.past=None; give begin "
            "fresh_past(agent, num_envs)."
        )
    numbers = film.stacks_of(env.spec.obs)

    def step(carried: tuple[dict[str, PyTree], PyTree], given: tuple[Array, Key, Key]) -> tuple[tuple, tuple]:
        (moving, frames), (number, act_keys, env_keys) = carried, given
        before = state._replace(**moving)
        output = acted(agent, env.spec, act_keys, params, before.carry, before.obs, before.first, False)
        env_state, timestep = jax.vmap(env.step)(env_keys, before.env_state, output.action)
        counted, ended = episodes.accumulate(before.episodes, timestep)
        reward, seen = timestep.reward, (before.obs, timestep.next_obs)
        if numbers is not None:
            kept = film.keeps_promise(numbers, *seen, timestep.obs)
            reward = jnp.where(kept.reshape(-1, *[1] * (reward.ndim - 1)), reward, jnp.nan)
            frames, seen = film.exposed(numbers, frames, number, before.obs), film.shot(numbers, *seen)
        row = seen, output.action, reward, timestep.terminated, timestep.truncated, before.first, output.extras
        following = before._replace(
            env_state=env_state, obs=timestep.obs, first=timestep.last, carry=output.carry, episodes=counted
        )
        if agent.reward_discount is not None and before.past is not None:
            rewards = timestep.reward, timestep.terminated
            past = discounted_sum(before.past, *rewards, agent.reward_discount, timestep.valid)
            following = following._replace(past=past)
        return (following.moving(), frames), (row, timestep.valid, timestep.turn, ended)

    act_keys = keys.at_times(keys.environment_keys(key, state.index), jnp.zeros_like(state.time), num_steps)
    env_keys = keys.at_times(jax.random.wrap_key_data(state.env_keys), state.time, num_steps)
    frames = () if numbers is None else film.reels(numbers, state.obs, num_steps)
    given = jnp.arange(num_steps), act_keys, env_keys
    (moving, frames), ((seen, *row), valid, turn, ended) = fold(step, (state.moving(), frames), given)
    end = state._replace(**moving)
    action, reward, terminated, truncated, first, extras = row
    obs, next_obs = seen if numbers is None else film.developed(numbers, frames, seen)
    ends = terminated, truncated, next_obs, first
    played = Rollout(obs, action, reward, *ends, extras, state.carry, end.carry, version, valid)
    return end._replace(time=state.time + num_steps), played._replace(past=state.past, turn=turn), ended


class Rollout(NamedTuple):
    """T steps of E environments as they travel: the fields of a `Trajectory`, but for `obs` and `next_obs`.

    Of stacks of frames `obs` is a `podium.film.Film`, so that no frame travels twice, and `next_obs` has the newest
    frame of each. Where environments reset in the NEXT step, what follows a step is the true next observation, also at
    an end: then `obs` is [T + 1, E, ...], or a film of T + 1 rows, and `next_obs` None.
    """

    obs: PyTree
    action: Any
    reward: Any
    terminated: Any
    truncated: Any
    next_obs: PyTree | None
    first: Any
    extras: PyTree
    carry: PyTree
    end_carry: PyTree
    policy_version: Any
    valid: Any | None
    gap: Any | None = None
    past: Any | None = None
    turn: Any | None = None

    def trajectory(self) -> Trajectory:
        """Return the rollout with its `next_obs`, and stacks in the place of films."""
        rows = film.unrolled(self.obs)
        if self.next_obs is None:
            obs, next_obs = jax.tree.map(lambda x: x[:-1], rows), jax.tree.map(lambda x: x[1:], rows)
            trajectory = KeptTrajectory(*self._replace(obs=obs, next_obs=next_obs))
            strips = film.strips(self.obs)
            trajectory.rows = film.strips(self.obs, self.reward.shape[0])
            trajectory.led_to = lambda step: film.at(strips, None if step is None else step + 1)
            return trajectory
        leaves = jax.tree.leaves(self.obs, is_leaf=film.is_film)
        if not any(map(film.is_film, leaves)):
            return Trajectory(*self)
        newest = self.next_obs

        def after(obs: PyTree, frames: PyTree) -> Any:
            follow = lambda kept, seen, frame: stacks.pushed(seen, frame) if film.is_film(kept) else frame
            return jax.tree.map(follow, self.obs, obs, frames, is_leaf=film.is_film)

        trajectory = KeptTrajectory(*self._replace(obs=rows, next_obs=after(rows, newest)))
        trajectory.rows = rows = film.strips(self.obs)
        trajectory.led_to = lambda step: after(film.at(rows, step), film.at(newest, step))
        return trajectory


class KeptTrajectory(Trajectory):
    """A Trajectory whose `obs` and `next_obs` are made of what its rollout kept, for who asks for few of them.

    So a program that reads `reached` and `kept` has no copy of all stacks. What is made anew of one (`_replace`, a
    mapped tree) knows nothing of that, and reads `obs` and `next_obs`.

    Attributes:
      rows: `obs`, with `podium.film.Strips` in the place of stacks.
      led_to: what `reached` returns.
    """

    rows: PyTree = None
    led_to: Callable[[Array | None], PyTree] | None = None

    def reached(self, step: Array | None) -> PyTree:
        """Return what that step led to; see `Trajectory.reached`."""
        return super().reached(step) if self.led_to is None else self.led_to(step)

    def kept(self) -> PyTree:
        """Return `obs`, with strips of films in the place of stacks; see `Trajectory.kept`."""
        return super().kept() if self.rows is None else self.rows


R = TypeVar("R", Rollout, Trajectory)


def map_envs(function: Callable[..., Any], *rollouts: R) -> R:
    """Map `function(axis of the environments, *leaves)` over rollouts; the version stays the first one's."""
    fields = {}
    for name in rollouts[0]._fields:
        axis = 0 if name in ("carry", "end_carry", "gap", "past") else 1
        values = [getattr(rollout, name) for rollout in rollouts]
        fields[name] = values[0] if name == "policy_version" else jax.tree.map(partial(function, axis), *values)
    return type(rollouts[0])(**fields)


def specs_of(axis: str) -> Rollout:
    """Return how a rollout lies along the mesh axis that holds the environments; a prefix of its tree."""
    rows: Any = P(None, axis)
    by_env: Any = P(axis)
    once: Any = P()
    each = {"carry": by_env, "end_carry": by_env, "gap": by_env, "past": by_env}
    return Rollout(*(rows,) * 8, **each, policy_version=once, valid=rows, turn=rows)


def scaled(rollout: Rollout, length: int, num_envs: int) -> Rollout:
    """Return the shapes of a rollout of so many steps and environments, given those of one step of one environment."""

    def scale(axis: int, x: Any) -> jax.ShapeDtypeStruct:
        # One row more than steps stays one row more.
        lead = (num_envs,) if axis == 0 else (length + x.shape[0] - 1, num_envs)
        return jax.ShapeDtypeStruct((*lead, *x.shape[axis + 1 :]), x.dtype)

    return map_envs(scale, rollout)


def with_gap(rollout: Rollout, gap: bool | None = None) -> Rollout:
    """Return a rollout that says whether a gap lies before it; shapes that say so for None."""
    size = rollout.reward.shape[1]
    said = jax.ShapeDtypeStruct((size,), bool) if gap is None else np.full(size, gap)
    return rollout._replace(gap=said)


def zeros(shapes: PyTree) -> Any:
    """Return zeros of these shapes."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


@partial(jax.jit, static_argnums=(1, 2))
def cut(rollout: Rollout, low: int, high: int) -> Rollout:
    """Return the environments from `low` up to `high`."""
    return map_envs(lambda axis, x: jax.lax.slice_in_dim(x, low, high, axis=axis), rollout)


@jax.jit
def join(rollouts: list[Rollout]) -> Rollout:
    """Return the environments of all rollouts, in their order, with the oldest version."""
    versions = jnp.stack([rollout.policy_version for rollout in rollouts])
    return map_envs(lambda axis, *x: jnp.concatenate(x, axis), *rollouts)._replace(policy_version=versions.min())


def gathered(rollouts: R) -> R:
    """Return the rollouts of W workers, [W, T, E, ...], as one of all environments, [T, W * E, ...]."""

    def flat(axis: int, x: Array) -> Array:
        moved = jnp.moveaxis(x, 0, axis)
        return moved.reshape(*moved.shape[:axis], -1, *moved.shape[axis + 2 :])

    return map_envs(flat, rollouts)._replace(policy_version=rollouts.policy_version[0])


def dealt(rollout: R, number: int) -> R:
    """Return a rollout of all environments, [T, W * E, ...], as those of W = `number` workers, [W, T, E, ...]."""

    def deal(axis: int, x: Array) -> Array:
        return jnp.moveaxis(x.reshape(*x.shape[:axis], number, -1, *x.shape[axis + 1 :]), axis, 0)

    return map_envs(deal, rollout)._replace(policy_version=jnp.broadcast_to(rollout.policy_version, number))
