"""Windows of consecutive steps, for agents with memory, drawn by their TD errors."""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from podium.agent import Replay
from podium.ops import sum_tree
from podium.ranges import check_value
from podium.replay import ring
from podium.replay.priorities import Priorities, check_exponents, importance, no_priorities, rank, weight_of
from podium.replay.ring import ReplayState, Transition
from podium.types import Array, Key, PyTree


class Windows(NamedTuple):
    """A minibatch of windows of K steps; what it says of a step means the same as in `podium.types.Trajectory`.

    Attributes:
      obs: [N, K, ...].
      action: [N, K, ...].
      reward: [N, K] float32.
      terminated: [N, K] bool.
      truncated: [N, K] bool.
      next_obs: [N, K, ...], before any reset.
      first: [N, K] bool, memory is zeroed there: where the row before ended an episode, or is no transition. False in
        the first row, whose `start` is zero already where an episode begins there.
      start: [N, ...], what `Transition.extras` held of the first row: the memory before it.
      weight: [N] float32, importance weights.
      valid: [N, K] bool, or None where all are.
      turn: [N, K] float32, or None where one acts alone.
    """

    obs: PyTree
    action: PyTree
    reward: Array
    terminated: Array
    truncated: Array
    next_obs: PyTree
    first: Array
    start: PyTree
    weight: Array
    valid: Array | None
    turn: Array | None = None


class SequenceState(NamedTuple):
    """What a replay of sequences holds.

    Attributes:
      ring: of steps, without their extras.
      starts: extras [L, rows / sequence_period, E, ...], of the rows that windows may begin with.
      unbroken: int32 [L, E], the newest rows of each environment that follow one another without a gap.
      priorities: of the windows; they alone change while an iteration learns.
    """

    ring: ReplayState
    starts: PyTree
    unbroken: Array
    priorities: Priorities


def sequences(
    buffer_capacity: int,
    batch_size: int,
    num_updates: int,
    sequence_length: int = 80,
    burn_in: int = 40,
    sequence_period: int = 40,
    min_replay_size: int = 1,
    priority_exponent: float = 0.9,
    importance_exponent: float = 0.0,
    annealing_updates: int = 0,
    smallest_priority: float = 1e-6,
) -> Replay:
    """Make a replay of windows of consecutive steps, overlapping ones (Kapturowski et al. 2019, section 2.3).

    A window begins at every `sequence_period`-th row and goes on through ends of episodes: `Windows.first` says where
    memory begins anew. Deliberate difference: the paper's windows never cross an end. A window can be drawn once its
    last row is there, until its first is written over; one in which rows do not follow one another (`Trajectory.gap`)
    never can. What `extras` hold, the memory before each step, is kept at starts of windows only.

    Windows are drawn in proportion to p ** priority_exponent with p what `grad` gives as priorities, such as
    `window_priority`, and a new one as the one with the largest p so far, or 1 if that is more (the paper's actors
    compute it). Weights are those of `prioritized`.

    Args:
      buffer_capacity: steps held, over all environments; rounded down to whole rollouts and periods.
      batch_size: N, windows a minibatch; the lanes must divide it.
      num_updates: minibatches learnt per iteration.
      sequence_length: K, steps of a window, those that burn in among them.
      burn_in: the first so many steps of a window are not learnt from, and only bring memory up to date; below K.
      sequence_period: steps from one start to the next. It must divide the rollout length, or that it.
      min_replay_size: steps it must hold before anything is learnt.
      priority_exponent: in [0, 1]; 0 draws uniformly.
      importance_exponent: in [0, 1]; 1 corrects in full, and 0, the paper's, not at all.
      annealing_updates: gradient steps over which that rises linearly to 1; 0 leaves it.
      smallest_priority: added to priorities, above 0, also in float32.

    Returns:
      a `Replay` of `Transition` items [T, B, ...] and `Windows` minibatches. `sample` returns as indices int32
      [L, N / L] start * E + environment. An item counts as the K - burn_in steps that are learnt from.

    Raises:
      ValueError: for an argument out of range; from `init`, where rollouts, periods, lanes and sizes do not fit.
    """
    counts = {"sequence_length": sequence_length, "sequence_period": sequence_period}
    ring.check_sizes(buffer_capacity, min_replay_size, batch_size=batch_size, num_updates=num_updates, **counts)
    check_value("burn_in", burn_in, "naturals", "40 is usual")
    if burn_in >= sequence_length:
        raise ValueError(
            f"burn_in={burn_in} leaves nothing to learn from in a window of sequence_length={sequence_length}; "
            f"use {sequence_length - 1} or less."
        )
    if buffer_capacity < sequence_length:
        enough = _enough_rows(sequence_length, sequence_period)
        raise ValueError(
            f"buffer_capacity={buffer_capacity} is less than a window of sequence_length={sequence_length}, of which "
            f"each environment needs one and a period more; use {enough} times num_envs, or more "
            "where rollouts are longer than a period."
        )
    check_exponents(priority_exponent, importance_exponent, annealing_updates, smallest_priority)
    weigh = partial(weight_of, exponent=priority_exponent, smallest=smallest_priority)

    def init(
        item: Transition, num_envs: int, num_lanes: int, rollout_length: int, stacks: PyTree = None
    ) -> SequenceState:
        ring.check_lanes(num_envs, batch_size, num_lanes)
        rows = _check_rows(buffer_capacity, num_envs, rollout_length, sequence_length, sequence_period)
        ring.check_fill(buffer_capacity, min_replay_size, rows * num_envs)
        steps = ring.empty(item._replace(extras=()), num_envs, num_lanes, rows, rollout_length, stacks)
        shape = num_lanes, rows // sequence_period, num_envs // num_lanes
        starts = jax.tree.map(lambda x: jnp.zeros((*shape, *x.shape), x.dtype), item.extras)
        unbroken = jnp.zeros((num_lanes, num_envs // num_lanes), jnp.int32)
        return SequenceState(steps, starts, unbroken, no_priorities(num_lanes, shape[1] * shape[2]))

    def add(state: SequenceState, items: Transition) -> SequenceState:
        num_lanes, rows, num_envs = state.ring.items.reward.shape
        time, position = items.reward.shape[0], state.ring.position
        number, num_starts = max(time // sequence_period, 1), rows // sequence_period
        # Windows that begin in this rollout, if any does: they must wait, and what began there before is gone.
        begins, new = position % sequence_period == 0, position // sequence_period
        # Windows that end in it, if any does, and at which of its rows; counted from one turn of the ring before.
        done = -(-(position + rows - sequence_length + 1) // sequence_period) + jnp.arange(number)
        end = done * sequence_period - rows + sequence_length - 1 - position

        def keep(held: Array, extras: Array) -> Array:
            lanes = ring.in_lanes(extras[::sequence_period], num_lanes)
            if time < sequence_period:
                lanes = jnp.where(begins, lanes, jax.lax.dynamic_slice_in_dim(held, new, 1, axis=1))
            return jax.lax.dynamic_update_slice_in_dim(held, lanes, new, axis=1)

        def places(start: Array) -> Array:
            return ((start % num_starts)[:, None] * num_envs + jnp.arange(num_envs)).reshape(-1)

        begun, ended = places(new + jnp.arange(number)), places(done)
        # An index of every block between the first and the last; a ring that begins anew leaves one at its end.
        ends = jnp.stack([begun[-1], ended[-1], jnp.int32(num_starts * num_envs - 1)])
        changed = jnp.concatenate([begun[:: sum_tree.FANOUT], ended[:: sum_tree.FANOUT], ends])
        nowhere = num_starts * num_envs * 2 + sum_tree.FANOUT  # Behind the end, where nothing is written.

        def rank_lane(levels: sum_tree.Levels, largest: Array, unbroken: Array) -> sum_tree.Levels:
            whole = unbroken + end[:, None] + 1 >= sequence_length
            weights = levels[0].at[jnp.where(begins, begun, nowhere)].set(0.0, mode="drop")
            there = jnp.where(jnp.repeat(end < time, num_envs), ended, nowhere)
            weights = weights.at[there].set(jnp.where(whole, weigh(largest), 0.0).reshape(-1), mode="drop")
            return sum_tree.replace(levels, weights, changed)

        priorities = state.priorities
        levels = jax.vmap(rank_lane)(priorities.levels, priorities.largest, state.unbroken)
        return SequenceState(
            ring.write(state.ring, items._replace(extras=())),
            jax.tree.map(keep, state.starts, items.extras),
            jnp.minimum(state.unbroken + time, rows),
            priorities._replace(levels=levels),
        )

    def can_sample(state: SequenceState) -> Array:
        return ring.holds(state.ring, min_replay_size) & (state.ring.filled >= sequence_length)

    def sample(key: Key, state: SequenceState) -> tuple[Windows, Array]:
        num_lanes, rows, num_envs = state.ring.items.reward.shape

        def sample_lane(
            key: Key, steps: Transition, starts: PyTree, levels: sum_tree.Levels
        ) -> tuple[tuple[Transition, Array], Array]:
            index = sum_tree.draw(key, levels, batch_size // num_lanes)
            share = levels[0].at[index].get(mode="promise_in_bounds") / sum_tree.total(levels)
            start, env = index // num_envs, index % num_envs
            row = (start[:, None] * sequence_period + jnp.arange(sequence_length)) % rows
            window = ring.window_at(steps, row, jnp.broadcast_to(env[:, None], row.shape))
            memory = jax.tree.map(lambda x: ring.at(x, start, env), starts)
            return (window._replace(extras=memory), share), index

        held = state.ring.items, state.starts, state.priorities.levels
        drawn, indices = jax.vmap(sample_lane)(ring.lane_keys(key, num_lanes), *held)
        steps, share = jax.tree.map(lambda x: x.reshape(batch_size, *x.shape[2:]), drawn)
        weight = importance(share, importance_exponent, annealing_updates, state.priorities.updates)
        fields = {name: value for name, value in steps._asdict().items() if name != "extras"}
        return Windows(**fields, first=_first(steps), start=steps.extras, weight=weight), indices

    def update_priorities(state: SequenceState, indices: Array, priority: Array | None) -> SequenceState:
        return state._replace(priorities=rank(state.priorities, indices, priority, weigh))

    def cut(state: SequenceState, gap: Array) -> SequenceState:
        return state._replace(unbroken=jnp.where(gap.reshape(state.unbroken.shape), 0, state.unbroken))

    learnt = sequence_length - burn_in
    functions = init, add, can_sample, sample
    return Replay(
        *functions, batch_size, num_updates, update_priorities, cut=cut, steps_per_item=learnt, keeps_frames=True
    )


def window_priority(td_error: Array, valid: Array | None = None, max_weight: float = 0.9) -> Array:
    """Return what windows are ranked by (Kapturowski et al. 2019, section 2.3).

        p = eta * max_i |delta_i| + (1 - eta) * mean_i |delta_i|

    Args:
      td_error: [T, N], of the steps that are learnt from.
      valid: [T, N] bool, those that count; None for all. Where none does, p is 0.
      max_weight: eta, in [0, 1].

    Returns:
      [N].

    >>> window_priority(jnp.array([[1.0], [-3.0]]), max_weight=0.5).tolist()
    [2.5]
    """
    error = jnp.abs(td_error)
    counted = jnp.ones_like(error) if valid is None else valid.astype(error.dtype)
    mean = jnp.sum(error * counted, axis=0) / jnp.maximum(jnp.sum(counted, axis=0), 1.0)
    return max_weight * jnp.max(error * counted, axis=0) + (1.0 - max_weight) * mean


def _first(steps: Transition) -> Array:
    """Return [N, K], where memory is zeroed within windows."""
    last = steps.terminated | steps.truncated
    if steps.valid is not None:
        last = last | ~steps.valid
    return jnp.concatenate([jnp.zeros_like(last[:, :1]), last[:, :-1]], axis=1)


def _enough_rows(sequence_length: int, unit: int) -> int:
    """Return the least multiple of `unit` that holds a window and a unit more."""
    return math.ceil((sequence_length + unit) / unit) * unit


def _check_rows(
    buffer_capacity: int, num_envs: int, rollout_length: int, sequence_length: int, sequence_period: int
) -> int:
    """Return the rows of a ring of whole rollouts and periods that a rollout and a window fit into."""
    unit = max(rollout_length, sequence_period)
    if unit % rollout_length or unit % sequence_period:
        if sequence_period > rollout_length:
            low = sequence_period // rollout_length * rollout_length
            use = f"{low} or {low + rollout_length}"
        else:
            use = str(max(n for n in range(1, sequence_period + 1) if rollout_length % n == 0))
        raise ValueError(
            f"sequence_period={sequence_period} and rollout_length={rollout_length}: one must divide the other, so "
            f"that windows begin at the same rows in every turn; use sequence_period={use}, or another rollout_length."
        )
    rows = buffer_capacity // (num_envs * unit) * unit
    if rows < sequence_length + unit:
        enough = _enough_rows(sequence_length, unit) * num_envs
        raise ValueError(
            f"buffer_capacity={buffer_capacity} holds {rows} steps of each of num_envs={num_envs} environments, but a "
            f"window of sequence_length={sequence_length} and {unit} more steps (rollout_length={rollout_length}, "
            f"sequence_period={sequence_period}) need {sequence_length + unit}; use {enough} or more."
        )
    return rows
