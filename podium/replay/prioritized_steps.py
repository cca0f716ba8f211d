"""Single steps, drawn by their TD error."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podium.agent import Replay
from podium.ops import sum_tree
from podium.replay.priorities import Priorities, check_exponents, importance, known, no_priorities, rank, weight_of
from podium.replay.ring import ReplayState, Transition, follows, lane_keys
from podium.replay.steps import Batch, n_step_return, read, uniform
from podium.types import Array, Key, PyTree


class Estimate(NamedTuple):
    """What acting thought, [B] float32 each: `value` of the action taken, and `best`, of the best one there was.

    Where `Agent.act` returns one as its `extras`, a prioritised replay computes first priorities from it.
    """

    value: Array
    best: Array


class PrioritizedState(NamedTuple):
    """What a prioritised replay holds: `ring`, and the `priorities`, which alone change while an iteration learns."""

    ring: ReplayState
    priorities: Priorities


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
    error of the lane so far, or 1 if that is more, n - 1 steps later. Deliberate differences: the bootstrap is the
    largest value by the network that acted, without a target network. Where an episode was cut and reset in the same
    step, or lies before a gap, its true last observation was never acted on, and the best value of the one before it
    stands in for it; the first gradient step that meets the transition sets that right.

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
      smallest_priority: added to TD errors, above 0, also in float32.

    Returns:
      a `Replay` as `uniform` returns, with importance weights in `Batch.weight`, for agents whose `grad` returns
      |TD error| [N] as `Aux.priorities`.

    Raises:
      ValueError: as `uniform`.
    """
    check_exponents(priority_exponent, importance_exponent, annealing_updates, smallest_priority)
    plain = uniform(buffer_capacity, batch_size, num_updates, min_replay_size, n_step, gamma)

    def init(
        item: Transition, num_envs: int, num_lanes: int, rollout_length: int, stacks: PyTree = None
    ) -> PrioritizedState:
        ring = plain.init(item, num_envs, num_lanes, rollout_length, stacks)
        _, rows, envs = ring.items.reward.shape
        return PrioritizedState(ring, no_priorities(num_lanes, rows * envs))

    def waiting(items: Transition) -> int:
        """Return how many of the newest rows begin no window of which all that is needed is known."""
        return n_step if isinstance(items.extras, Estimate) else n_step - 1

    weigh = partial(weight_of, exponent=priority_exponent, smallest=smallest_priority)

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
            flags = lane.reward, lane.terminated, lane.truncated, lane.valid, lane.turn
            seen, estimate = jax.tree.map(lambda x: x.at[row].get(mode="promise_in_bounds"), (flags, lane.extras))
            drawn = filled[:, None] if lane.valid is None else filled[:, None] & seen[3][:time]
            error = largest
            if isinstance(estimate, Estimate):
                # Where resets wait, the row behind an end shows what came of it, and is no transition; nor are rows
                # behind a gap whose frames are not all there.
                shown = None if items.valid is None else ~seen[3][1:] & follows(lane, row)
                error = known(_first_error(seen, estimate, shown, n_step, gamma), largest)
            weights = jnp.where(drawn, weigh(error), jnp.zeros((time, num_envs)))
            weights = jnp.concatenate([weights, jnp.zeros((late, num_envs))]).reshape(-1)
            return sum_tree.replace(levels, levels[0].at[index].set(weights, mode="promise_in_bounds"), changed)

        priorities = state.priorities
        levels = jax.vmap(rank_lane)(ring.items, priorities.levels, priorities.largest)
        return PrioritizedState(ring, priorities._replace(levels=levels))

    def can_sample(state: PrioritizedState) -> Array:
        return plain.can_sample(state.ring) & (state.ring.filled > waiting(state.ring.items))

    def sample(key: Key, state: PrioritizedState) -> tuple[Batch, Array]:
        num_lanes, _, num_envs = state.ring.items.reward.shape

        def sample_lane(key: Key, lane: Transition, levels: sum_tree.Levels) -> tuple[tuple[Batch, Array], Array]:
            index = sum_tree.draw(key, levels, batch_size // num_lanes)
            share = levels[0].at[index].get(mode="promise_in_bounds") / sum_tree.total(levels)
            batch = read(lane, index // num_envs, index % num_envs, n_step, gamma)
            return (batch, share), index

        drawn, indices = jax.vmap(sample_lane)(lane_keys(key, num_lanes), state.ring.items, state.priorities.levels)
        minibatch, share = jax.tree.map(lambda x: x.reshape(batch_size, *x.shape[2:]), drawn)
        weight = importance(share, importance_exponent, annealing_updates, state.priorities.updates)
        if minibatch.weight is not None:  # What was ranked may have become no transition since.
            weight = weight * minibatch.weight
        return minibatch._replace(weight=weight), indices

    def update_priorities(state: PrioritizedState, indices: Array, td_error: Array | None) -> PrioritizedState:
        return state._replace(priorities=rank(state.priorities, indices, td_error, weigh))

    def cut(state: PrioritizedState, gap: Array) -> PrioritizedState:
        assert plain.cut is not None
        return state._replace(ring=plain.cut(state.ring, gap))

    functions = init, add, can_sample, sample
    return Replay(*functions, batch_size, num_updates, update_priorities, cut=cut, keeps_frames=True)


def _first_error(seen: Any, estimate: Estimate, shown: Array | None, n_step: int, gamma: float) -> Array:
    """Return [T, E] n-step TD errors by what acting thought, of the windows within the rows [T + n, E].

    Args:
      seen: reward, terminated, truncated, valid or None, and turn or None.
      estimate: of the same rows.
      shown: [T + n - 1, E] bool, which of these rows but the first show what a cut episode came to, the one before it
        being its last; None where none does.
      n_step: n.
      gamma: in [0, 1].
    """
    truncated = seen[2]
    time = truncated.shape[0] - n_step
    window = np.arange(time)[:, None] + np.arange(n_step)
    reward, *ended = jax.tree.map(lambda x: jnp.moveaxis(x[window], 1, -1), seen)
    total, discount, length = n_step_return(reward, ended[0], ended[1], ended[2], gamma, ended[3])
    reached = jnp.arange(time)[:, None] + length
    # Behind any other cut the next row is of something else.
    elsewhere = truncated[:-1] if shown is None else truncated[:-1] & ~shown
    reached = reached - jnp.take_along_axis(elsewhere, reached - 1, axis=0)
    return total + discount * jnp.take_along_axis(estimate.best, reached, axis=0) - estimate.value[:time]
