"""Replay buffers as pure functions: a ring of single steps in lanes, n-step transitions made when they are sampled.

`uniform` draws every transition alike, `prioritized` those with a large TD error more often.

Every array is [L, rows, E, ...]: L lanes, a ring of `rows` times, E environments a lane. All environments write at one
shared position, a whole rollout at a time, so an insertion is one contiguous in-place write per array. Reading is one
gather per array, batched over lanes by `vmap`: a mesh that holds whole lanes exchanges nothing, and sampling costs the
same whatever the buffer holds. Donate the state (`jax.jit(replay.add, donate_argnums=0)`) and it is never copied.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podium.agent import Replay
from podium.ops import sum_tree
from podium.ranges import check_value, nearest_multiples
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
    extras: PyTree = ()


class Estimate(NamedTuple):
    """What acting thought, [B] float32 each: `value` of the action taken, and `best`, of the best one there was.

    Where `Agent.act` returns one as its `extras`, a prioritised replay computes first priorities from it.
    """

    value: Array
    best: Array


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


class Priorities(NamedTuple):
    """How likely everything in a replay is drawn.

    Attributes:
      levels: weights [L, n] float32, row * E + environment, 0 for what is not drawn; and sums; see `ops.sum_tree`.
      largest: [L] float32, largest TD error that each lane has met.
      updates: int32 scalar, minibatches learnt from.
    """

    levels: sum_tree.Levels
    largest: Array
    updates: Array


class PrioritizedState(NamedTuple):
    """What a prioritised replay holds: `ring`, and the `priorities`, which alone change while an iteration learns."""

    ring: ReplayState
    priorities: Priorities


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
        rows = _check_rows(buffer_capacity, num_envs, rollout_length, n_step)
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

    def cut(state: ReplayState, gap: Array) -> ReplayState:
        num_lanes, rows, num_envs = state.items.reward.shape
        newest = (state.position - 1) % rows

        def cut_lane(truncated: Array, gap: Array) -> Array:
            row = jax.lax.dynamic_index_in_dim(truncated, newest, keepdims=False)
            return jax.lax.dynamic_update_index_in_dim(truncated, row | (gap & (state.filled > 0)), newest, 0)

        truncated = jax.vmap(cut_lane)(state.items.truncated, gap.reshape(num_lanes, num_envs))
        return state._replace(items=state.items._replace(truncated=truncated))

    return Replay(init, add, can_sample, sample, batch_size, num_updates, cut=cut)


def prioritized(
    buffer_capacity: int,
    batch_size: int,
    num_updates: int,
    min_replay_size: int = 1,
    n_step: int = 1,
    gamma: float = 0.99,
    priority_exponent: float = 0.6,
    importance_exponent: float = 0.4,
    annealing_updates: int = 0,
    smallest_priority: float = 1e-6,
) -> Replay:
    """Make a replay that samples by TD error: proportional prioritisation (Schaul et al. 2016, arXiv 1511.05952).

        P(i) = 1 / L * p_i / (sum of p in the lane of i),   p = (|TD error| + smallest_priority) ** priority_exponent
        w_i = (N P(i)) ** -importance_exponent / (the largest such number of the minibatch)

    Every lane gives the same number of rows to a minibatch, so what is drawn with p_i is drawn with the P(i) above, and
    weights made of that P keep the gradient unbiased (importance_exponent=1) however the lanes compare. They are
    scaled by the largest of the whole minibatch, of all lanes, so that they only make steps smaller (section 3.4); N
    cancels. Some scale by the largest weight in the buffer instead, which lets one transition that is hardly ever drawn
    decide the size of every step.

    First priorities. Where items carry an `Estimate`, it is the n-step TD error that acting saw (Horgan et al. 2018,
    arXiv 1803.00933), once what follows the window has been acted on: n steps later. Otherwise it is the largest TD
    error of the lane so far, n - 1 steps later. Deliberate differences: the bootstrap is the largest value by the
    network that acted, without a target network. Where an episode was cut and reset in the same step, its true last
    observation was never acted on, and the best value of the one before it stands in for it; the first gradient step
    that meets the transition sets that right.

    What begins no whole window, and rows that are no transition, have weight 0 and are never drawn. Among duplicates in
    a minibatch the largest priority counts.

    Args:
      buffer_capacity: as are all up to `gamma`, as of `uniform`.
      batch_size: likewise.
      num_updates: likewise.
      min_replay_size: likewise.
      n_step: likewise.
      gamma: likewise.
      priority_exponent: alpha, in [0, 1]; 0 draws uniformly.
      importance_exponent: beta, in [0, 1]; 1 corrects in full.
      annealing_updates: gradient steps over which beta rises linearly to 1; 0 leaves it.
      smallest_priority: added to TD errors, above 0.

    Returns:
      a `Replay` as `uniform` returns, with importance weights in `Batch.weight`, for agents whose `grad` returns
      |TD error| [N] as `Aux.priorities`.

    Raises:
      ValueError: as `uniform`.
    """
    _check_prioritized(priority_exponent, importance_exponent, annealing_updates, smallest_priority)
    plain = uniform(buffer_capacity, batch_size, num_updates, min_replay_size, n_step, gamma)

    def init(item: Transition, num_envs: int, num_lanes: int, rollout_length: int) -> PrioritizedState:
        ring = plain.init(item, num_envs, num_lanes, rollout_length)
        _, rows, envs = ring.items.reward.shape
        levels = jax.tree.map(lambda x: jnp.zeros((num_lanes, *x.shape)), sum_tree.empty(rows * envs))
        return PrioritizedState(ring, Priorities(levels, jnp.ones(num_lanes), jnp.zeros((), jnp.int32)))

    def waiting(items: Transition) -> int:
        """Return how many of the newest rows begin no window of which all that is needed is known."""
        return n_step if isinstance(items.extras, Estimate) else n_step - 1

    def weigh(td_error: Array) -> Array:
        return (jnp.abs(td_error) + smallest_priority) ** priority_exponent

    def add(state: PrioritizedState, items: Transition) -> PrioritizedState:
        _, rows, num_envs = state.ring.items.reward.shape
        time, late = items.reward.shape[0], waiting(items)
        # Windows that this rollout completes begin in the first `time` of these rows; the others must wait.
        since = jnp.arange(-late, time)
        row = (state.ring.position + since) % rows
        filled = since[:time] >= -state.ring.filled
        index = (row[:, None] * num_envs + jnp.arange(num_envs)).reshape(-1)
        # An index of every block between the first and the last; a ring that begins anew leaves one at its end.
        changed = jnp.concatenate([index[:: sum_tree.FANOUT], index[-1:], jnp.array([rows * num_envs - 1])])
        ring = plain.add(state.ring, items)

        def rank_lane(lane: Transition, levels: sum_tree.Levels, largest: Array) -> sum_tree.Levels:
            flags = lane.reward, lane.terminated, lane.truncated, lane.valid
            seen, estimate = jax.tree.map(lambda x: x.at[row].get(mode="promise_in_bounds"), (flags, lane.extras))
            known = filled[:, None] if lane.valid is None else filled[:, None] & seen[-1][:time]
            error = largest
            if isinstance(estimate, Estimate):
                error = _first_error(seen, estimate, n_step, gamma)
            weights = jnp.where(known, weigh(error), jnp.zeros((time, num_envs)))
            weights = jnp.concatenate([weights, jnp.zeros((late, num_envs))]).reshape(-1)
            return sum_tree.replace(levels, levels[0].at[index].set(weights, mode="promise_in_bounds"), changed)

        priorities = state.priorities
        levels = jax.vmap(rank_lane)(ring.items, priorities.levels, priorities.largest)
        return PrioritizedState(ring, priorities._replace(levels=levels))

    def can_sample(state: PrioritizedState) -> Array:
        return plain.can_sample(state.ring) & (state.ring.filled > waiting(state.ring.items))

    def sample(key: Key, state: PrioritizedState) -> tuple[Batch, Array]:
        num_lanes, _, num_envs = state.ring.items.reward.shape

        def sample_lane(key: Key, lane: Transition, levels: sum_tree.Levels) -> tuple[Batch, Array]:
            index = sum_tree.draw(key, levels, batch_size // num_lanes)
            share = levels[0].at[index].get(mode="promise_in_bounds") / sum_tree.total(levels)
            batch = _read(lane, index // num_envs, index % num_envs, n_step, gamma)
            return batch._replace(weight=share), index

        lane_keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(num_lanes))
        minibatch, indices = jax.vmap(sample_lane)(lane_keys, state.ring.items, state.priorities.levels)
        minibatch = jax.tree.map(lambda x: x.reshape(batch_size, *x.shape[2:]), minibatch)
        exponent = jnp.asarray(importance_exponent)
        if annealing_updates:
            progress = jnp.minimum(state.priorities.updates / annealing_updates, 1.0)
            exponent = exponent + progress * (1.0 - exponent)
        # A lane in which nothing can be drawn gives rows that count nothing.
        weight = jnp.where(minibatch.weight > 0, minibatch.weight**-exponent, 0.0)
        largest = jnp.maximum(jnp.max(weight), jnp.finfo(jnp.float32).tiny)
        return minibatch._replace(weight=weight / largest), indices

    def update_priorities(state: PrioritizedState, indices: Array, td_error: Array | None) -> PrioritizedState:
        if td_error is None:
            raise ValueError("priorities=None from grad, but the replay is prioritised; return |TD error| in Aux.")
        errors = jnp.abs(td_error).reshape(indices.shape)

        def rank_lane(levels: sum_tree.Levels, index: Array, error: Array) -> sum_tree.Levels:
            weights = levels[0]
            # What is never drawn stays so, whoever asks.
            drawable = weights.at[index].get(mode="promise_in_bounds") > 0
            # Duplicates are made alike, so that their order means nothing, and all is written at once: between two
            # writes XLA would read `drawable` from a copy of every weight.
            alike = index[:, None] == index
            error = jnp.max(jnp.where(alike, error, 0.0), axis=1)
            weight = jnp.where(drawable, weigh(error), 0.0)
            return sum_tree.replace(levels, weights.at[index].set(weight, mode="promise_in_bounds"), index)

        priorities = state.priorities
        levels = jax.vmap(rank_lane)(priorities.levels, indices, errors)
        largest = jnp.maximum(priorities.largest, jnp.max(errors, axis=1))
        return state._replace(priorities=Priorities(levels, largest, priorities.updates + 1))

    def cut(state: PrioritizedState, gap: Array) -> PrioritizedState:
        assert plain.cut is not None
        return state._replace(ring=plain.cut(state.ring, gap))

    return Replay(init, add, can_sample, sample, batch_size, num_updates, update_priorities, cut=cut)


def _first_error(seen: Any, estimate: Estimate, n_step: int, gamma: float) -> Array:
    """Return [T, E] n-step TD errors by what acting thought, of the windows within the rows [T + n, E].

    Args:
      seen: reward, terminated, truncated, and valid or None.
      estimate: of the same rows.
      n_step: n.
      gamma: in [0, 1].
    """
    _, _, truncated, valid = seen
    time = truncated.shape[0] - n_step
    window = np.arange(time)[:, None] + np.arange(n_step)
    reward, *ended = jax.tree.map(lambda x: jnp.moveaxis(x[window], 1, -1), seen)
    total, discount, length = n_step_return(reward, ended[0], ended[1], ended[2], gamma)
    reached = jnp.arange(time)[:, None] + length
    # Behind a cut the next row is of something else; where resets wait it shows what this episode came to, and is no
    # transition.
    elsewhere = jnp.take_along_axis(truncated, reached - 1, axis=0)
    if valid is not None:
        elsewhere = elsewhere & jnp.take_along_axis(valid, reached, axis=0)
    reached = reached - elsewhere
    return total + discount * jnp.take_along_axis(estimate.best, reached, axis=0) - estimate.value[:time]


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


def _check_prioritized(
    priority_exponent: float, importance_exponent: float, annealing_updates: int, smallest_priority: float
) -> None:
    check_value("priority_exponent", priority_exponent, "fractions", "0.6 is usual")
    check_value("importance_exponent", importance_exponent, "fractions", "0.4 is usual")
    check_value("annealing_updates", annealing_updates, "naturals", "use 0 for none")
    check_value("smallest_priority", smallest_priority, "positive", "1e-6 is usual")


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
        check_value(name, value, "counts", "use at least 1")
    if buffer_capacity > _MAX_CAPACITY:
        raise ValueError(f"buffer_capacity={buffer_capacity} must be less than 2**31; use {_MAX_CAPACITY} or less.")
    if min_replay_size > buffer_capacity:
        raise ValueError(
            f"min_replay_size={min_replay_size} is more than buffer_capacity={buffer_capacity}, so learning would "
            f"never start; use {buffer_capacity} or less."
        )
    check_value("gamma", gamma, "fractions", "0.99 is usual")
