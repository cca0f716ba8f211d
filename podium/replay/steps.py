"""Single steps, drawn uniformly: n-step transitions are made when they are sampled."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podium.agent import Replay
from podium.ranges import check_value
from podium.replay import ring
from podium.replay.ring import ReplayState, Transition
from podium.types import Array, Key, PyTree


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


def n_step_return(
    reward: Array,
    terminated: Array,
    truncated: Array,
    valid: Array | None,
    gamma: float,
    turn: Array | None = None,
) -> tuple[Array, Array, Array]:
    """Sum the rewards of windows of n steps, each stopped where its episode ends (Sutton 1988; Hessel et al. 2018).

        R = sum_{k < m} gamma^k r_k,   discount = gamma^m (1 - terminated_{m-1}),   m <= n steps in the window

    A window also stops before a row that is no transition. Truncation stops it but keeps the bootstrap; where both
    flags are set, termination counts. Where two take turns, what comes after a step counts times its `turn`.

    Args:
      reward: [..., n], consecutive steps of one environment.
      terminated: [..., n] bool.
      truncated: [..., n] bool.
      valid: [..., n] bool, or None where all are.
      gamma: in [0, 1].
      turn: [..., n], 1, or -1 where the opponent moves next; None where one acts alone.

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
    # After a termination nothing is inside any more, so any termination inside is at the window's last step.
    goes_on_after, length = 1.0 - jnp.any(inside & terminated, axis=-1), jnp.sum(inside, axis=-1, dtype=jnp.int32)
    if turn is not None:
        sign = jnp.cumprod(jnp.where(inside, turn, 1.0), axis=-1)  # Of what comes after each step.
        goes_on_after = goes_on_after * sign[..., -1]
        reward = reward * jnp.concatenate([jnp.ones_like(sign[..., :1]), sign[..., :-1]], axis=-1)
    total = jnp.sum(jnp.where(inside, powers[:-1] * reward, 0.0), axis=-1)
    return total, powers[length] * goes_on_after, length


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
    ring.check_sizes(buffer_capacity, min_replay_size, batch_size=batch_size, num_updates=num_updates, n_step=n_step)
    check_value("gamma", gamma, "fractions", "0.99 is usual")

    def init(
        item: Transition, num_envs: int, num_lanes: int, rollout_length: int, stacks: PyTree = None
    ) -> ReplayState:
        ring.check_lanes(num_envs, batch_size, num_lanes)
        rows = _check_rows(buffer_capacity, num_envs, rollout_length, n_step)
        ring.check_fill(buffer_capacity, min_replay_size, rows * num_envs)
        return ring.empty(item, num_envs, num_lanes, rows, rollout_length, stacks)

    def can_sample(state: ReplayState) -> Array:
        return ring.holds(state, min_replay_size) & (state.filled >= n_step)

    def sample(key: Key, state: ReplayState) -> tuple[Batch, Array]:
        num_lanes, rows, num_envs = state.items.reward.shape
        # A window may begin at every row but the newest n - 1: there it would run across the write position.
        num_starts = jnp.maximum(state.filled - (n_step - 1), 1)
        oldest = state.position - state.filled

        def sample_lane(key: Key, lane: Transition) -> tuple[Batch, Array]:
            drawn = draw_below(key, batch_size // num_lanes, num_starts * num_envs, rows * num_envs)
            row, env = (oldest + drawn // num_envs) % rows, drawn % num_envs
            return read(lane, row, env, n_step, gamma), row * num_envs + env

        minibatch, indices = jax.vmap(sample_lane)(ring.lane_keys(key, num_lanes), state.items)
        return jax.tree.map(lambda x: x.reshape(batch_size, *x.shape[2:]), minibatch), indices

    def cut(state: ReplayState, gap: Array) -> ReplayState:
        num_lanes, rows, num_envs = state.items.reward.shape
        newest = (state.position - 1) % rows

        def cut_lane(truncated: Array, gap: Array) -> Array:
            row = jax.lax.dynamic_index_in_dim(truncated, newest, keepdims=False)
            return jax.lax.dynamic_update_index_in_dim(truncated, row | (gap & (state.filled > 0)), newest, 0)

        truncated = jax.vmap(cut_lane)(state.items.truncated, gap.reshape(num_lanes, num_envs))
        return state._replace(items=state.items._replace(truncated=truncated))

    return Replay(init, ring.write, can_sample, sample, batch_size, num_updates, cut=cut, keeps_frames=True)


def draw_below(key: Key, size: int, bound: Array, largest: int) -> Array:
    """Draw int32 [size], uniform in [0, bound); `largest` is what `bound` can ever be.

    The remainder of one random word: no probability is off by more than a share bound / 2**32, 0.1% at four million.
    `jax.random.randint` removes that with a second word and serves above; on CPU the draw is most of the sampling.
    """
    if largest > 1 << 22:
        return jax.random.randint(key, (size,), 0, bound)
    return (jax.random.bits(key, (size,), jnp.uint32) % bound.astype(jnp.uint32)).astype(jnp.int32)


def read(lane: Transition, row: Array, env: Array, n_step: int, gamma: float) -> Batch:
    """Gather from one lane [rows, E, ...] the n-step transitions that begin at `row` [n] of `env` [n]."""
    rows = lane.reward.shape[0]

    window = (row[:, None] + jnp.arange(n_step)) % rows
    flags = (lane.reward, lane.terminated, lane.truncated, lane.valid, lane.turn)
    rewards, *ends, turn = jax.tree.map(lambda x: ring.at(x, window, env[:, None]), flags)
    reward, discount, length = n_step_return(rewards, ends[0], ends[1], ends[2], gamma, turn)
    # Observations are the bulk of the data: only those at both ends of the window are read.
    stop = row if n_step == 1 else (row + length - 1) % rows
    obs, next_obs = ring.ends_at(lane, row, stop, env)
    return Batch(
        obs=obs,
        action=ring.at(lane.action, row, env),
        reward=reward,
        discount=discount,
        next_obs=next_obs,
        weight=None if lane.valid is None else ring.at(lane.valid, row, env).astype(jnp.float32),
    )


def _check_rows(buffer_capacity: int, num_envs: int, rollout_length: int, n_step: int) -> int:
    """Return the rows of a ring that a rollout and a window fit into."""
    rows = buffer_capacity // (num_envs * rollout_length) * rollout_length
    if rows < n_step + rollout_length:
        enough = -(-(n_step + rollout_length) // rollout_length) * rollout_length * num_envs
        raise ValueError(
            f"buffer_capacity={buffer_capacity} holds {rows} steps of each of num_envs={num_envs} environments in "
            f"whole rollouts, but n_step={n_step} and rollout_length={rollout_length} need "
            f"{n_step + rollout_length}; use {enough} or more."
        )
    return rows
