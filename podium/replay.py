"""Replay buffers as pure functions: a ring of single steps in lanes, n-step transitions made when they are sampled.

Every array is [L, rows, E, ...]: L lanes, a ring of `rows` times, E environments a lane. All environments write at one
shared position, a whole rollout at a time, so an insertion is one contiguous in-place write per array. Reading is one
gather per array, batched over lanes by `vmap`: a mesh that holds whole lanes exchanges nothing, and sampling costs the
same whatever the buffer holds. Donate the state (`jax.jit(replay.add, donate_argnums=0)`) and it is never copied.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podium.agent import Replay, nearest_multiples
from podium.types import Array, Key, PyTree, Trajectory

# Rows are counted and indexed in int32.
_MAX_CAPACITY = 2**31 - 1


class Transition(NamedTuple):
    """One step as it is stored; see `podium.types.Trajectory` for the meaning of each field."""

    obs: PyTree
    action: Array
    reward: Array
    terminated: Array
    truncated: Array
    next_obs: PyTree
    valid: Array | None = None


class Batch(NamedTuple):
    """A minibatch of n-step transitions; its one-step target is `reward + discount * value(next_obs)`.

    Attributes:
      obs: [N, ...].
      action: [N, ...].
      reward: [N] float32, discounted sum of the rewards from `obs` until `next_obs`.
      discount: [N] float32, gamma to the number of steps between them; 0 where the episode terminated there.
      next_obs: [N, ...], where the window stopped: n steps on, or the true last observation of the episode.
      weight: [N] float32, how much a row counts in the loss: 0 for a row that is no transition, an importance weight
        in a prioritised replay. None: all count the same.
    """

    obs: PyTree
    action: Array
    reward: Array
    discount: Array
    next_obs: PyTree
    weight: Array | None = None


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


def n_step_return(
    reward: Array, terminated: Array, truncated: Array, valid: Array | None, gamma: float
) -> tuple[Array, Array, Array]:
    """Sum the rewards of windows of n steps, each stopped where its episode ends (Sutton 1988; Hessel et al. 2018).

        R = sum_{k < m} gamma^k r_k,   discount = gamma^m (1 - terminated_{m-1}),   m <= n steps in the window

    A window also stops before a row that is no transition. Truncation stops it but keeps the bootstrap; where both
    flags are set, termination counts.

    Args:
      reward: [..., n], consecutive steps of one environment.
      terminated: [..., n] bool.
      truncated: [..., n] bool.
      valid: [..., n] bool, or None where all are.
      gamma: in [0, 1].

    Returns:
      return [...], discount [...], both float32, and m [...] int32.

    >>> end = jnp.array([False, True, False])
    >>> [x.item() for x in n_step_return(jnp.ones(3), end, ~end & False, None, 0.5)]
    [1.5, 0.0, 2]
    >>> [x.item() for x in n_step_return(jnp.ones(3), ~end & False, end, None, 0.5)]
    [1.5, 0.25, 2]
    """
    n = reward.shape[-1]
    goes_on = ~(terminated | truncated)[..., :-1]
    if valid is not None:
        goes_on = goes_on & valid[..., 1:]
    inside = jnp.concatenate([jnp.ones_like(terminated[..., :1]), jnp.cumprod(goes_on, axis=-1).astype(bool)], axis=-1)
    powers = jnp.asarray(gamma ** np.arange(n + 1), jnp.float32)
    total = jnp.sum(jnp.where(inside, powers[:-1] * reward, 0.0), axis=-1)
    length = jnp.sum(inside, axis=-1, dtype=jnp.int32)
    # After a termination nothing is inside any more, so any termination inside is at the window's last step.
    return total, powers[length] * (1.0 - jnp.any(inside & terminated, axis=-1)), length


def uniform(
    buffer_capacity: int,
    batch_size: int,
    num_updates: int,
    min_replay_size: int = 1,
    n_step: int = 1,
    gamma: float = 0.99,
) -> Replay:
    """Make a replay that samples uniformly, with replacement, from the newest `buffer_capacity` steps.

    Args:
      buffer_capacity: steps held, over all environments; rounded down to whole rollouts.
      batch_size: N, transitions a minibatch; the lanes must divide it.
      num_updates: minibatches learnt per iteration.
      min_replay_size: steps it must hold before anything is learnt.
      n_step: steps in a transition, 1 or more.
      gamma: discount per step, in [0, 1].

    Returns:
      a `Replay` of `Transition` items [T, B, ...] and `Batch` minibatches. Environment b lives in lane b // E; T must
      be the `rollout_length` of `init` in every `add`. `sample` returns minibatches lane by lane, and as indices
      int32 [L, N / L] row * E + environment; before `can_sample` it returns zeros or repeats, never garbage.

    Raises:
      ValueError: for an argument out of range; from `init`, where rollouts, lanes and sizes do not fit each other.
    """
    _check(buffer_capacity, batch_size, num_updates, min_replay_size, n_step, gamma)

    def init(item: Transition, num_envs: int, num_lanes: int, rollout_length: int) -> ReplayState:
        if num_envs % num_lanes:
            raise ValueError(f"num_envs={num_envs} is not divisible by num_lanes={num_lanes}; use a divisor.")
        if batch_size % num_lanes:
            use = nearest_multiples(batch_size, num_lanes)
            raise ValueError(f"batch_size={batch_size} is not divisible by num_lanes={num_lanes}; use {use}.")
        rows = buffer_capacity // (num_envs * rollout_length) * rollout_length
        if rows < n_step + rollout_length:
            enough = -(-(n_step + rollout_length) // rollout_length) * rollout_length * num_envs
            raise ValueError(
                f"buffer_capacity={buffer_capacity} holds {rows} steps of each of num_envs={num_envs} environments in "
                f"whole rollouts, but n_step={n_step} and rollout_length={rollout_length} need "
                f"{n_step + rollout_length}; use {enough} or more."
            )
        if min_replay_size > rows * num_envs:
            raise ValueError(
                f"min_replay_size={min_replay_size} is more than the {rows * num_envs} steps that "
                f"buffer_capacity={buffer_capacity} holds in whole rollouts, so learning would never start; "
                f"use {rows * num_envs} or less."
            )
        shape = (num_lanes, rows, num_envs // num_lanes)
        items = jax.tree.map(lambda x: jnp.zeros((*shape, *x.shape), x.dtype), item)
        return ReplayState(items, jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))

    def add(state: ReplayState, items: Transition) -> ReplayState:
        num_lanes, rows, num_envs = state.items.reward.shape
        time = items.reward.shape[0]
        if rows % time:
            raise ValueError(f"a rollout of {time} steps does not divide the {rows} rows that `init` made for another.")

        def write(ring: Array, new: Array) -> Array:
            lanes = jnp.moveaxis(new.reshape(time, num_lanes, num_envs, *new.shape[2:]), 1, 0)
            return jax.lax.dynamic_update_slice_in_dim(ring, lanes, state.position, axis=1)

        return ReplayState(
            jax.tree.map(write, state.items, items),
            (state.position + time) % rows,
            jnp.minimum(state.filled + time, rows),
        )

    def can_sample(state: ReplayState) -> Array:
        num_lanes, _, num_envs = state.items.reward.shape
        return (state.filled * (num_lanes * num_envs) >= min_replay_size) & (state.filled >= n_step)

    def sample(key: Key, state: ReplayState) -> tuple[Batch, Array]:
        num_lanes, rows, num_envs = state.items.reward.shape
        # A window may begin at every row but the newest n - 1: there it would run across the write position.
        num_starts = jnp.maximum(state.filled - (n_step - 1), 1)
        oldest = state.position - state.filled

        def sample_lane(key: Key, lane: Transition) -> tuple[Batch, Array]:
            drawn = _draw_below(key, batch_size // num_lanes, num_starts * num_envs, rows * num_envs)
            row, env = (oldest + drawn // num_envs) % rows, drawn % num_envs
            return _read(lane, row, env, n_step, gamma), row * num_envs + env

        lane_keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(num_lanes))
        minibatch, indices = jax.vmap(sample_lane)(lane_keys, state.items)
        return jax.tree.map(lambda x: x.reshape(batch_size, *x.shape[2:]), minibatch), indices

    return Replay(init, add, can_sample, sample, batch_size, num_updates)


def _draw_below(key: Key, size: int, bound: Array, largest: int) -> Array:
    """Draw int32 [size], uniform in [0, bound); `largest` is what `bound` can ever be.

    The remainder of one random word: no probability is off by more than a share bound / 2**32, 0.1% at four million.
    `jax.random.randint` removes that with a second word and serves above; on CPU the draw is most of the sampling.
    """
    if largest > 1 << 22:
        return jax.random.randint(key, (size,), 0, bound)
    return (jax.random.bits(key, (size,), jnp.uint32) % bound.astype(jnp.uint32)).astype(jnp.int32)


def _read(lane: Transition, row: Array, env: Array, n_step: int, gamma: float) -> Batch:
    """Gather from one lane [rows, E, ...] the n-step transitions that begin at `row` [n] of `env` [n]."""
    rows = lane.reward.shape[0]

    def at(x: Array, row: Array, env: Array) -> Array:
        return x.at[row, env].get(mode="promise_in_bounds")

    window = (row[:, None] + jnp.arange(n_step)) % rows
    flags = (lane.reward, lane.terminated, lane.truncated, lane.valid)
    rewards, terminated, truncated, valid = jax.tree.map(lambda x: at(x, window, env[:, None]), flags)
    reward, discount, length = n_step_return(rewards, terminated, truncated, valid, gamma)
    # Observations are the bulk of the data: only those at both ends of the window are read.
    stop = (row + length - 1) % rows
    return Batch(
        obs=jax.tree.map(lambda x: at(x, row, env), lane.obs),
        action=at(lane.action, row, env),
        reward=reward,
        discount=discount,
        next_obs=jax.tree.map(lambda x: at(x, stop, env), lane.next_obs),
        weight=None if lane.valid is None else at(lane.valid, row, env).astype(jnp.float32),
    )


def _check(
    buffer_capacity: int, batch_size: int, num_updates: int, min_replay_size: int, n_step: int, gamma: float
) -> None:
    counts = {
        "buffer_capacity": buffer_capacity,
        "batch_size": batch_size,
        "num_updates": num_updates,
        "min_replay_size": min_replay_size,
        "n_step": n_step,
    }
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
            raise ValueError(f"{name}={value!r} must be an integer of 1 or more; use at least 1.")
    if buffer_capacity > _MAX_CAPACITY:
        raise ValueError(f"buffer_capacity={buffer_capacity} must be less than 2**31; use {_MAX_CAPACITY} or less.")
    if min_replay_size > buffer_capacity:
        raise ValueError(
            f"min_replay_size={min_replay_size} is more than buffer_capacity={buffer_capacity}, so learning would "
            f"never start; use {buffer_capacity} or less."
        )
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma={gamma} must lie between 0 and 1; 0.99 is usual.")
