"""What every replay here stands on: a ring of steps in lanes, written a whole rollout at a time."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from podium.ranges import check_value, nearest_multiples
from podium.replay import frames
from podium.replay.frames import Frames
from podium.types import Array, PyTree, Trajectory


class Transition(NamedTuple):
    """One step as it is stored; see `podium.types.Trajectory` for the meaning of each field."""

    obs: PyTree
    action: PyTree
    reward: Array
    terminated: Array
    truncated: Array
    next_obs: PyTree
    valid: Array | None = None
    extras: PyTree = ()
    turn: Array | None = None


class ReplayState(NamedTuple):
    """What a replay holds. Arrays have the lane axis in front; the scalars are the same for every lane.

    Attributes:
      items: `Transition` of arrays [L, rows, E, ...]; where observations are stacks of frames, their `Frames` stand in
        `obs`, and None in `next_obs`.
      position: int32 scalar, the row that the next insertion writes first.
      filled: int32 scalar, rows that hold data.
      place: int32 scalar, the place of `Frames` that the next insertion writes first; None where there are none.
    """

    items: Transition
    position: Array
    filled: Array
    place: Array | None = None


def transitions(trajectory: Trajectory) -> Transition:
    """Return the part of a trajectory [T, B, ...] that a replay stores."""
    return Transition(*(getattr(trajectory, field) for field in Transition._fields))


def empty(
    item: Transition, num_envs: int, num_lanes: int, rows: int, rollout_length: int, stacks: PyTree = None
) -> ReplayState:
    """Return a ring of so many rows with nothing in it.

    Args:
      item: one item (no batch axes).
      num_envs: over all lanes.
      num_lanes: L.
      rows: of whole rollouts.
      rollout_length: T.
      stacks: of how many frames the arrays of `item.obs` are stacks, a tree of its structure; None for 1 each.
    """
    shape = (num_lanes, rows, num_envs // num_lanes)
    zeros = lambda x: jnp.zeros((*shape, *x.shape), x.dtype)
    nothing = lambda: jnp.zeros((), jnp.int32)  # Each a buffer of its own, so that all can be donated.
    most = 1 if stacks is None else max(jax.tree.leaves(stacks))
    if most == 1:
        return ReplayState(jax.tree.map(zeros, item), nothing(), nothing())
    places = frames.ring_size(rows, most, rollout_length)
    kept = lambda x, number: frames.empty(x, number, shape, places) if number > 1 else zeros(x)
    others = jax.tree.map(zeros, item._replace(obs=(), next_obs=(), valid=None))
    items = others._replace(
        obs=jax.tree.map(kept, item.obs, stacks),
        next_obs=jax.tree.map(lambda x, number: None if number > 1 else zeros(x), item.next_obs, stacks),
        valid=jnp.zeros(shape, bool),
    )
    return ReplayState(items, nothing(), nothing(), nothing())


def write(state: ReplayState, items: Transition) -> ReplayState:
    """Return the ring with the rollout `items` [T, B, ...] in it.

    Raises:
      ValueError: T does not divide the rows.
    """
    num_lanes, rows, _ = state.items.reward.shape
    time = items.reward.shape[0]
    if rows % time:
        raise ValueError(f"a rollout of {time} steps does not divide the {rows} rows that `init` made for another.")
    held, place, new = state.items, state.place, jax.tree.map(lambda x: in_lanes(x, num_lanes), items)
    if place is not None:
        held, place, new = _write_frames(held, place, state.position, new)
    put = lambda ring, new: _update(ring, new, state.position)
    written = jax.tree.map(put, held._replace(obs=(), next_obs=()), new._replace(obs=(), next_obs=()))
    seen = [
        jax.tree.map(lambda ring, new: ring if _is_frames(ring) else put(ring, new), *both, is_leaf=_is_frames)
        for both in ((held.obs, new.obs), (held.next_obs, new.next_obs))
    ]
    written = written._replace(obs=seen[0], next_obs=seen[1])
    return ReplayState(written, (state.position + time) % rows, jnp.minimum(state.filled + time, rows), place)


def _write_frames(held: Transition, place: Array, row: Array, new: Transition) -> tuple[Transition, Array, Transition]:
    """Write the stacks of a rollout [L, T, E, ...].

    Returns:
      what is held, the next place, and what is left to be written: stacks no longer, and steps that could not be kept
      as no transitions.
    """
    (_, rows, _), time = held.reward.shape, new.reward.shape[1]
    previous = (row - 1) % rows
    at_previous = lambda x: jax.lax.dynamic_index_in_dim(x, previous, axis=1, keepdims=False)
    valid = jnp.ones(new.reward.shape, bool) if new.valid is None else new.valid
    assert held.valid is not None
    before = at_previous(held.valid)
    all_kept = frames.Kept(valid, before)
    structure: Any = jax.tree.structure(new.obs)
    leaves = [structure.flatten_up_to(tree) for tree in (held.obs, new.obs, new.next_obs)]
    following = place
    for i, (stacks, obs, next_obs) in enumerate(zip(*leaves, strict=True)):
        if isinstance(stacks, Frames):
            steps = frames.Steps(obs, next_obs, new.terminated, valid)
            leaves[0][i], kept = frames.write(stacks, steps, before, row, place)
            leaves[1][i], leaves[2][i] = leaves[0][i], None
            all_kept = jax.tree.map(jnp.logical_and, all_kept, kept)
            following = (place + time) % (stacks.frames.shape[1] - stacks.owner.shape[1])
    held_obs, new_obs, new_next_obs = (structure.unflatten(each) for each in leaves)
    before = _update(held.valid, (all_kept.before | (before & at_previous(held.terminated)))[:, None], previous)
    new = new._replace(obs=new_obs, next_obs=new_next_obs, valid=all_kept.rollout)
    return held._replace(obs=held_obs, valid=before), following, new


def terminate(state: Any, over: Array) -> Any:
    """Return what a replay holds with the newest step of the environments `over` [B] terminated, where it goes on.

    Args:
      state: a `ReplayState`, or one that has it as `ring`; what else there is stays as it is.
      over: bool, to whom nothing happens any more.
    """
    if isinstance(getattr(state, "ring", None), ReplayState):
        # Where windows are counted, a gap before what comes is no flag of the newest step.
        follows = state.unbroken.reshape(over.shape) > 0 if hasattr(state, "unbroken") else True
        return state._replace(ring=terminate(state.ring, over & follows))
    if not isinstance(state, ReplayState):
        return state
    items, newest = state.items, (state.position - 1) % state.items.reward.shape[1]
    at_newest = lambda x: jax.lax.dynamic_index_in_dim(x, newest, axis=1)
    terminated = at_newest(items.terminated)
    goes_on = ~(terminated | at_newest(items.truncated)) & (state.filled > 0)
    if items.valid is not None:
        goes_on &= at_newest(items.valid)
    terminated |= goes_on & over.reshape(terminated.shape)
    return state._replace(items=items._replace(terminated=_update(items.terminated, terminated, newest)))


def ends_at(lane: Transition, row: Array, stop: Array, env: Array) -> tuple[PyTree, PyTree]:
    """Return `obs` of one lane [rows, E, ...] at `row`, and `next_obs` at `stop`, of environments `env`; [...] each."""
    if not any(map(_is_frames, jax.tree.leaves(lane.obs, is_leaf=_is_frames))):
        seen = jax.tree.map(lambda x: at(x, row, env), lane.obs)
        return seen, jax.tree.map(lambda x: at(x, stop, env), lane.next_obs)
    structure: Any = jax.tree.structure(lane.obs, is_leaf=_is_frames)
    pairs = []
    for obs, next_obs in zip(*(structure.flatten_up_to(x) for x in (lane.obs, lane.next_obs)), strict=True):
        if not isinstance(obs, Frames):
            pairs.append((at(obs, row, env), at(next_obs, stop, env)))
        elif stop is row:
            pairs.append(frames.both_at(obs, row, env))
        else:
            pairs.append((frames.obs_at(obs, row, env), frames.next_obs_at(obs, stop, env)))
    first, second = zip(*pairs, strict=True)
    return structure.unflatten(first), structure.unflatten(second)


def follows(lane: Transition, row: Array) -> Array:
    """Return of one lane, for rows `row` [n], whether each but the first shows what the one before led to: [n - 1, E].

    That is known of transitions and their stacks of frames; of all else it is taken for so.
    """
    stacks = filter(_is_frames, jax.tree.leaves(lane.obs, is_leaf=_is_frames))
    known = jnp.ones((row.shape[0] - 1, lane.reward.shape[1]), bool)
    return functools.reduce(jnp.logical_and, (frames.follows(held, row) for held in stacks), known)


def window_at(lane: Transition, row: Array, env: Array) -> Transition:
    """Return all of one lane [rows, E, ...] at rows and environments [...]."""
    obs, next_obs = ends_at(lane, row, row, env)
    others = jax.tree.map(lambda x: at(x, row, env), lane._replace(obs=(), next_obs=()))
    return others._replace(obs=obs, next_obs=next_obs)


def at(x: Array, row: Array, env: Array) -> Array:
    """Return an array of one lane [rows, E, ...] at rows and environments, which broadcast."""
    return x.at[row, env].get(mode="promise_in_bounds")


def _update(ring: Array, new: Array, row: Array) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(ring, new, row, axis=1)


def _is_frames(x: object) -> bool:
    return isinstance(x, Frames)


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
    """Refuse sizes that are no counts, which int32 bounds as it does indices, and more to wait for than it holds."""
    for name, value in {"buffer_capacity": buffer_capacity, "min_replay_size": min_replay_size, **counts}.items():
        check_value(name, value, "counts", "use at least 1")
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
