"""What every replay here stands on: a ring of steps in lanes, written a whole rollout at a time."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from podium.ranges import check_value, nearest_multiples
from podium.types import Array, PyTree, Trajectory

# Rows are counted and indexed in int32.
MAX_CAPACITY = 2**31 - 1


class Transition(NamedTuple):
    """One step as it is stored; see `podium.types.Trajectory` for the meaning of each field."""

    obs: PyTree
    action: Array
    reward: Array
    terminated: Array
    truncated: Array
    next_obs: PyTree
    valid: Array | None = None
    extras: PyTree = ()


class ReplayState(NamedTuple):
    """What a replay holds. Arrays have the lane axis in front; the scalars are the same for every lane.

    Attributes:
      items: `Transition` of arrays [L, rows, E, ...].
      position: int32 scalar, the row that the next insertion writes first.
      filled: int32 scalar, rows that hold data.
    """

    items: Transition
    position: Array
    filled: Array


def transitions(trajectory: Trajectory) -> Transition:
    """Return the part of a trajectory [T, B, ...] that a replay stores."""
    return Transition(*(getattr(trajectory, field) for field in Transition._fields))


def empty(item: Transition, num_envs: int, num_lanes: int, rows: int) -> ReplayState:
    """Return a ring of so many rows with nothing in it, for items like `item` (no batch axes)."""
    shape = (num_lanes, rows, num_envs // num_lanes)
    items = jax.tree.map(lambda x: jnp.zeros((*shape, *x.shape), x.dtype), item)
    return ReplayState(items, jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))


def write(state: ReplayState, items: Transition) -> ReplayState:
    """Return the ring with the rollout `items` [T, B, ...] in it.

    Raises:
      ValueError: T does not divide the rows.
    """
    num_lanes, rows, num_envs = state.items.reward.shape
    time = items.reward.shape[0]
    if rows % time:
        raise ValueError(f"a rollout of {time} steps does not divide the {rows} rows that `init` made for another.")

    def put(ring: Array, new: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(ring, in_lanes(new, num_lanes), state.position, axis=1)

    return ReplayState(
        jax.tree.map(put, state.items, items),
        (state.position + time) % rows,
        jnp.minimum(state.filled + time, rows),
    )


def in_lanes(x: Array, num_lanes: int) -> Array:
    """Return [T, B, ...] as [L, T, E, ...]."""
    time, batch = x.shape[:2]
    return jnp.moveaxis(x.reshape(time, num_lanes, batch // num_lanes, *x.shape[2:]), 1, 0)


def holds(state: ReplayState, number: int) -> Array:
    """Return a bool scalar, whether the ring holds `number` steps or more, over all environments."""
    num_lanes, _, num_envs = state.items.reward.shape
    return state.filled * (num_lanes * num_envs) >= number


def lane_keys(key: Array, num_lanes: int) -> Array:
    """Return a key for each lane, [L]."""
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(num_lanes))


def check_sizes(buffer_capacity: int, min_replay_size: int, **counts: int) -> None:
    """Refuse sizes that are no counts, a ring too large to index, and more to wait for than it holds."""
    for name, value in {"buffer_capacity": buffer_capacity, "min_replay_size": min_replay_size, **counts}.items():
        check_value(name, value, "counts", "use at least 1")
    if buffer_capacity > MAX_CAPACITY:
        raise ValueError(f"buffer_capacity={buffer_capacity} must be less than 2**31; use {MAX_CAPACITY} or less.")
    if min_replay_size > buffer_capacity:
        raise ValueError(
            f"min_replay_size={min_replay_size} is more than buffer_capacity={buffer_capacity}, so learning would "
            f"never start; use {buffer_capacity} or less."
        )


def check_lanes(num_envs: int, batch_size: int, num_lanes: int) -> None:
    """Refuse lanes that do not share environments and minibatches evenly."""
    if num_envs % num_lanes:
        raise ValueError(f"num_envs={num_envs} is not divisible by num_lanes={num_lanes}; use a divisor.")
    if batch_size % num_lanes:
        use = nearest_multiples(batch_size, num_lanes)
        raise ValueError(f"batch_size={batch_size} is not divisible by num_lanes={num_lanes}; use {use}.")


def check_fill(buffer_capacity: int, min_replay_size: int, num_steps: int) -> None:
    """Refuse to wait for more than the `num_steps` that a ring of whole rollouts holds."""
    if min_replay_size > num_steps:
        raise ValueError(
            f"min_replay_size={min_replay_size} is more than the {num_steps} steps that "
            f"buffer_capacity={buffer_capacity} holds in whole rollouts, so learning would never start; "
            f"use {num_steps} or less."
        )
