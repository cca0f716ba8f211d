"""Stacks of frames, each frame kept once: an observation of k frames is put together again when it is read.

Of the k frames of an observation k - 1 were seen a step before, and all of `next_obs` but its newest one in `obs`. So a
step brings one new frame, and keeping that alone takes an eighth of two stacks of four. Which frames are there already
is not assumed but compared, number by number, as a rollout is written: what is read is what was written, to the bit.

Where the next row goes on from something else (an episode that was reset in the same step, a gap in time), what this
one led to is in no stack of the ring; its newest frame is kept in a spare place, of which there is one for every
`STEPS_PER_SPARE` rows, or for every row where frames are small. Where those do not suffice, and for the first k - 1
rows behind a `Trajectory.gap`, whose older frames were never written, a step is stored as no transition (`valid` is
False), but for a termination that lacks a place: behind it nothing is worth anything, and some frame will do.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podium.ops.stacks import gathered, is_word, words
from podium.types import Array

STEPS_PER_SPARE = 16
"""Rows of an environment for each spare place that it has, where frames are not small."""

SMALL = 2**26
"""Bytes that spare places may take in any case."""


class Frames(NamedTuple):
    """The observations [..., k * C] of a ring of `rows` steps, and what they led to; lanes are in front of all.

    Attributes:
      frames: [L, places, E, ..., C], a ring of frames as they were seen, and behind it M spare places.
      stacks: int32 [L, rows, E, 2, 2], of `obs` and of `next_obs` the place of the newest frame, and its age: how many
        frames before it are the stack's own, at most k - 1; the oldest of these stands for those before.
      missing: int32 [L, E], in how many of the next rows the stack reaches back to frames that were never written.
      last: [L, E, ..., k * C], what the newest row led to.
      owner: int32 [L, M, E], the row that last took a spare place; -1 for none.
      taken: int32 [L, E], how many times one was taken.
    """

    frames: Array
    stacks: Array
    missing: Array
    last: Array
    owner: Array
    taken: Array


class Steps(NamedTuple):
    """What is written of a rollout, [L, T, E, ...]; `valid` where a row is a transition."""

    obs: Array
    next_obs: Array
    terminated: Array
    valid: Array


class Kept(NamedTuple):
    """Which transitions can be read again: of the rollout [L, T, E], and in the row right before it [L, E]."""

    rollout: Array
    before: Array


def empty(stack: Array, num_frames: int, shape: tuple[int, int, int], ring: int) -> Frames:
    """Return nothing yet.

    Args:
      stack: one observation [..., k * C], of which shape and dtype count.
      num_frames: k, 2 or more.
      shape: L, rows, E.
      ring: places that are no spare ones; see `ring_size`.
    """
    lanes, rows, envs = shape
    frame = *stack.shape[:-1], stack.shape[-1] // num_frames
    size = lanes * envs * math.prod(frame) * np.dtype(stack.dtype).itemsize
    spares = max(-(-rows // STEPS_PER_SPARE), min(rows, SMALL // size))
    return Frames(
        frames=jnp.zeros((lanes, ring + spares, envs, *frame), stack.dtype),
        stacks=jnp.zeros((lanes, rows, envs, 2, 2), jnp.int32),
        missing=jnp.zeros((lanes, envs), jnp.int32),
        last=jnp.zeros((lanes, envs, *stack.shape), stack.dtype),
        owner=jnp.full((lanes, spares, envs), -1, jnp.int32),
        taken=jnp.zeros((lanes, envs), jnp.int32),
    )


def ring_size(rows: int, num_frames: int, rollout_length: int) -> int:
    """Return the places, whole rollouts, of `rows` frames, those before the oldest, and the one after the newest."""
    return rows + -(-num_frames // rollout_length) * rollout_length


def write(held: Frames, steps: Steps, kept_before: Array, row: Array, place: Array) -> tuple[Frames, Kept]:
    """Write a rollout.

    Args:
      held: what is there.
      steps: of the rollout.
      kept_before: [L, E] bool, whether the row before it holds a transition.
      row: int32 scalar, the row that the first step goes to.
      place: int32 scalar, the place that its frame goes to.
    """
    return jax.vmap(partial(_write, row=row, place=place))(held, steps, kept_before)


def _write(held: Frames, steps: Steps, kept_before: Array, row: Array, place: Array) -> tuple[Frames, Kept]:
    """Write a rollout of one lane, T steps of E environments."""
    obs, next_obs, terminated, valid = steps
    (time, envs), (spares, _) = valid.shape, held.owner.shape
    rows, ring, width = held.stacks.shape[0], held.frames.shape[0] - spares, held.frames.shape[-1]
    deep = held.last.shape[-1] // width - 1
    number, previous = jnp.arange(time)[:, None], (row - 1) % rows

    # A stack begins anew with one frame k times, goes on from what the step before led to, or is of unknown origin.
    anew, anew_next, grows, follows = _relations(obs, next_obs, held.last, width)
    unknown = ~anew & ~(follows & jnp.concatenate([jnp.ones((1, envs), bool), grows[:-1]]))

    # How many frames of its own a stack has, and whether all of them were written. Of events the last one counts.
    latest = lambda event, before: jax.lax.cummax(jnp.where(event, number, before), axis=0)
    age = jnp.minimum(number - latest(anew | unknown, -held.stacks[previous, :, 1, 1]), deep)
    lost = latest(unknown, held.missing - deep)
    found = (latest(anew, -deep - 1) >= lost) | (number - lost >= deep)
    found_next = anew_next | (grows & found)
    age_next = jnp.where(anew_next, 0, jnp.minimum(age + 1, deep))

    # What a step led to is the next row's stack, or its newest frame takes a spare place: of the rows before all but
    # the rollout's last, which are candidates here, the first being the one before the rollout.
    shared = follows & ~unknown
    wants = ~shared & jnp.concatenate([kept_before[None], (valid & found_next)[:-1]])
    turn = jnp.cumsum(wants, axis=0) - 1
    spare = (held.taken + turn) % spares
    env = jnp.arange(envs)
    owner = held.owner.at[spare, env].get(mode="promise_in_bounds")
    in_use = held.stacks.at[owner, env, 1, 0].get(mode="clip") == ring + spare
    in_use &= (owner >= 0) & ((owner - row) % rows >= time)
    takes = wants & (turn < spares) & ~in_use
    candidate = jnp.broadcast_to((row - 1 + number) % rows, takes.shape)

    # A row's own place is there for what it led to where that is nowhere.
    own, nowhere = place + number, ring + spares
    elsewhere = jnp.where(takes, ring + spare, jnp.where(shared, own, own - 1))
    leads_to = jnp.concatenate([elsewhere[1:], jnp.full((1, envs), (place + time) % ring)])
    before = jnp.where(takes[0], ring + spare[0], held.stacks[previous, :, 1, 0])
    update = jax.lax.dynamic_update_slice_in_dim
    led_to = jnp.concatenate([held.last[None, ..., -width:], next_obs[:-1, ..., -width:]])
    spares_taken = jnp.where(takes, ring + spare, nowhere)
    frames = held.frames.at[spares_taken, env].set(led_to, mode="drop")
    frames = update(frames, obs[..., -width:], place, 0)
    frames = update(frames, next_obs[-1:, ..., -width:], (place + time) % ring, 0)
    is_last_odd = ~(anew_next | grows)[-1]
    age_next = age_next.at[-1].set(jnp.where(is_last_odd, 0, age_next[-1]))
    seen, led = jnp.stack([jnp.broadcast_to(own, age.shape), age], -1), jnp.stack([leads_to, age_next], -1)
    stacks = update(held.stacks.at[previous, :, 1, 0].set(before), jnp.stack([seen, led], -2), row, 0)
    kept = jnp.concatenate([(shared | takes)[1:], found_next[-1:]])
    return (
        Frames(
            frames=frames,
            stacks=stacks,
            missing=jnp.where(is_last_odd, deep, jnp.where(found[-1], 0, lost[-1] + deep - time)),
            last=next_obs[-1],
            owner=held.owner.at[jnp.where(takes, spare, spares), env].set(candidate, mode="drop"),
            taken=held.taken + jnp.sum(takes, axis=0),
        ),
        Kept(found & (kept | terminated), (shared | takes)[0]),
    )


def obs_at(held: Frames, row: Array, env: Array) -> Array:
    """Return `obs` of one lane at rows and environments [...]: [..., k * C]."""
    return _gathered(held, _places(held, row, env)[0], env)


def next_obs_at(held: Frames, row: Array, env: Array) -> Array:
    """Return `next_obs` likewise."""
    return _gathered(held, _places(held, row, env)[1], env)


def both_at(held: Frames, row: Array, env: Array) -> tuple[Array, Array]:
    """Return `obs` and `next_obs` of the same steps."""
    obs, next_obs = _places(held, row, env)
    return _gathered(held, obs, env), _gathered(held, next_obs, env)


def follows(held: Frames, row: Array) -> Array:
    """Return [n - 1, E], whether each of the rows but the first shows what the transition before it led to.

    Args:
      held: one lane.
      row: int32 [n], rows in order of time.
    """
    newest = held.stacks.at[row, :, :, 0].get(mode="promise_in_bounds")
    return newest[1:, :, 0] == newest[:-1, :, 1]


def _places(held: Frames, row: Array, env: Array) -> tuple[Array, Array]:
    """Return where the frames of `obs` are, [..., k], oldest first, and those of `next_obs`."""
    deep = held.last.shape[-1] // held.frames.shape[-1] - 1
    stacks = held.stacks.at[row, env].get(mode="promise_in_bounds")
    (newest, age), (newest_next, age_next) = (jnp.moveaxis(stacks[..., i, :], -1, 0)[..., None] for i in (0, 1))
    ring = held.frames.shape[0] - held.owner.shape[0]
    obs = (newest - jnp.minimum(jnp.arange(deep, -1, -1), age)) % ring
    # Behind the newest frame are those of the step's own observation, but where the stack is one frame k times.
    older = jnp.where(age_next > 0, obs[..., 1:], newest_next)
    return obs, jnp.concatenate([older, newest_next], axis=-1)


def _gathered(held: Frames, places: Array, env: Array) -> Array:
    place = jnp.stack([places, jnp.broadcast_to(env[..., None], places.shape)], axis=-1)
    return gathered(held.frames, place)


def _relations(obs: Array, next_obs: Array, last: Array, width: int) -> tuple[Array, Array, Array, Array]:
    """Return how stacks compare, [T, E] bool each.

    Returns:
      whether `obs` is one frame k times; `next_obs` likewise; whether `next_obs` is `obs` and a frame more; and `obs`
      what the step before led to, of the first step `last`.
    """
    same = lambda a, b: jnp.all(a == b, axis=tuple(range(2, a.ndim)))
    if is_word(obs.dtype, obs.shape[-1], width):
        flat = lambda x: words(x).reshape(*x.shape[: x.ndim - last.ndim + 1], -1)
        obs, next_obs, last = flat(obs), flat(next_obs), flat(last)
        once = lambda stack: same(stack, (stack & 0xFF) * np.uint32(0x01010101))
        grows = same(next_obs & 0xFFFFFF, obs >> 8)
    else:
        newer, older = lambda stack: stack[..., width:], lambda stack: stack[..., :-width]
        once = lambda stack: same(newer(stack), older(stack))
        grows = same(older(next_obs), newer(obs))
    follows = jnp.concatenate([same(obs[:1], last[None]), same(obs[1:], next_obs[:-1])])
    return once(obs), once(next_obs), grows, follows
