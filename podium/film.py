"""Films: observations that are stacks of frames, of steps that follow one another, with every frame once.

Of the k frames of a stack k - 1 were seen a step before, so a film of R rows is R + k - 1 frames and not R * k. What a
stack may be is what `ArraySpec.num_frames` promises: the one before and a frame more, or one frame k times.

A film is exposed a step at a time (`reels`, `exposed`, `shot`, `developed`), and read whole (`unrolled`); as a strip
(`strips`) a row an environment (`at`), and cut into lanes minibatches of stacks (`picked`, `of_envs`).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podium.ops import stacks
from podium.types import Array, ArraySpec, EnvSpec, PyTree, at_step, is_spec

LARGE = 1024
"""Bytes of a stack from which on frames are kept once; of smaller ones the places would take more than they save."""


class Film(NamedTuple):
    """Stacks [R, E, ..., k * C], R rows of E environments.

    Attributes:
      frames: [k - 1 + R, E, ..., C]: the older ones of the first row's stack, then the newest one of each row's.
      anew: [R, E] bool, whether a row's stack is its newest frame k times.
    """

    frames: Any
    anew: Any

    @property
    def deep(self) -> int:
        """Return k - 1."""
        return int(self.frames.shape[0] - self.anew.shape[0])

    def begun(self) -> Array:
        """Return [R, E], as of `Strips.begun`; before the first row are the frames of its own stack."""
        row = jnp.arange(self.anew.shape[0])[:, None]
        return jax.lax.cummax(jnp.where(self.anew & (row > 0), row, -self.deep), axis=0)


class Shot(NamedTuple):
    """What is noted of a step of E environments, beside its frame on the film.

    Attributes:
      anew: [E] bool, whether what was acted on is one frame k times.
      led_to: [E, ..., C], the newest frame of what that led to.
    """

    anew: Any
    led_to: Any


class Strips(NamedTuple):
    """Films in L lanes of environments, to put stacks together from.

    Attributes:
      frames: [k - 1 + R, L, E / L, ..., C].
      begun: int32 [L, R, E / L], the row that a stack's own frames begin with; of stacks that began before the first
        row 1 - k.
    """

    frames: Any
    begun: Any

    def stacks(self, row: Array, env: Array) -> Array:
        """Return the stacks [L, n, ..., k * C] of rows [L, n] of the environments [L, n] of each lane."""
        lanes, rows, envs = self.begun.shape
        deep = self.frames.shape[0] - rows
        begun = jnp.take_along_axis(self.begun.reshape(lanes, -1), row * envs + env, 1)
        age = jnp.arange(deep, -1, -1)
        frame = deep + jnp.maximum(row[..., None] - age, begun[..., None])
        place = jnp.stack([frame, jnp.broadcast_to(env[..., None], frame.shape)], axis=-1)
        return stacks.gathered(self.frames, place, in_lanes=True)


def is_film(x: object) -> bool:
    """Say whether a part of observations is a film."""
    return isinstance(x, Film)


def is_strips(x: object) -> bool:
    """Say whether a part of observations is films in lanes."""
    return isinstance(x, Strips)


def stacks_of(specs: PyTree, obs: PyTree = None) -> PyTree:
    """Return of how many frames each array of an observation is a stack, as far as that pays; None where nowhere.

    Args:
      specs: of an environment's observations.
      obs: what is kept of one, if not all; shapes will do. Of what is no whole observation nothing is known.
    """
    leaves = jax.tree.leaves(specs, is_leaf=is_spec)
    structure: Any = jax.tree.structure(specs, is_leaf=is_spec)
    if obs is not None:
        shapes = [x.shape for x in jax.tree.leaves(obs)]
        if structure != jax.tree.structure(obs) or shapes != [tuple(x.shape) for x in leaves]:
            return None
    size = lambda spec: math.prod(spec.shape) * np.dtype(spec.dtype).itemsize
    numbers = [x.num_frames if isinstance(x, ArraySpec) and size(x) >= LARGE else 1 for x in leaves]
    return structure.unflatten(numbers) if any(number > 1 for number in numbers) else None


def unstacked(spec: EnvSpec) -> EnvSpec:
    """Return a spec that promises of no observation that a step brings one new frame of it."""
    alone = lambda leaf: dataclasses.replace(leaf, num_frames=1) if isinstance(leaf, ArraySpec) else leaf
    return dataclasses.replace(spec, obs=jax.tree.map(alone, spec.obs, is_leaf=is_spec))


def blank(specs: PyTree, rows: int) -> PyTree:
    """Return zeros [rows, 1, ...] of observations as they travel: films of stacks, others as they are."""

    def one(spec: Any) -> Any:
        if not isinstance(spec, ArraySpec) or spec.num_frames == 1:
            return jnp.stack([spec.zeros(1)] * rows)
        shape = *spec.shape[:-1], spec.shape[-1] // spec.num_frames
        return Film(jnp.zeros((rows + spec.num_frames - 1, 1, *shape), spec.dtype), jnp.zeros((rows, 1), bool))

    return jax.tree.map(one, specs, is_leaf=is_spec)


def reels(numbers: PyTree, first: PyTree, rows: int) -> PyTree:
    """Return frames [k - 1 + R, E, ..., C] to be exposed, of stacks; None of what else there is.

    Args:
      numbers: of `stacks_of`.
      first: what is acted on first, [E, ...], whose older frames are there already.
      rows: R.
    """

    def reel(number: int, first: Array) -> Array | None:
        if number == 1:
            return None
        older = [stacks.frame_of(first, place, first.shape[-1] // number) for place in range(number - 1)]
        return jnp.zeros((number - 1 + rows, *older[0].shape), first.dtype).at[: number - 1].set(jnp.stack(older))

    return jax.tree.map(reel, numbers, first)


def exposed(numbers: PyTree, frames: PyTree, row: Array, obs: PyTree) -> PyTree:
    """Return the frames with those of a row: the newest of `obs`, what is acted on then."""

    def expose(number: int, obs: Array, frames: Array | None) -> Array | None:
        if frames is None:
            return None
        newest = stacks.frame_of(obs, number - 1, obs.shape[-1] // number)
        return jax.lax.dynamic_update_index_in_dim(frames, newest, row + number - 1, 0)

    return jax.tree.map(expose, numbers, obs, frames)


def shot(numbers: PyTree, obs: PyTree, next_obs: PyTree) -> PyTree:
    """Return what is noted of a step [E, ...]: a `Shot` of stacks, a pair of what else there is.

    Args:
      numbers: of `stacks_of`.
      obs: what was acted on.
      next_obs: what that led to.
    """

    def take(number: int, obs: Array, next_obs: Array) -> Any:
        if number == 1:
            return obs, next_obs
        width = obs.shape[-1] // number
        return Shot(stacks.is_one_frame(obs, width), stacks.frame_of(next_obs, number - 1, width))

    return jax.tree.map(take, numbers, obs, next_obs)


def developed(numbers: PyTree, frames: PyTree, shots: PyTree) -> tuple[PyTree, PyTree]:
    """Return observations [R, E, ...] and what they led to, with films of stacks and the newest frames of those.

    Args:
      numbers: of `stacks_of`.
      frames: of `exposed`, of all rows.
      shots: of `shot`, [R, ...].
    """
    obs = lambda number, shot, frames: shot[0] if frames is None else Film(frames, shot.anew)
    return jax.tree.map(obs, numbers, shots, frames), jax.tree.map(lambda number, shot: shot[1], numbers, shots)


def keeps_promise(numbers: PyTree, obs: PyTree, next_obs: PyTree, following: PyTree) -> Array:
    """Return [E], whether a step's stacks are what `ArraySpec.num_frames` promises.

    Args:
      numbers: of `stacks_of`.
      obs: [E, ...], what was acted on.
      next_obs: [E, ...], what that led to: `obs` less its oldest frame and one more.
      following: [E, ...], what is acted on next: `next_obs`, or one frame k times.
    """

    def keeps(number: int, obs: Array, next_obs: Array, following: Array) -> Any:
        if number == 1:
            return True
        width = obs.shape[-1] // number
        goes_on = stacks.is_shifted(obs, next_obs, width)
        return goes_on & (stacks.is_equal(following, next_obs) | stacks.is_one_frame(following, width))

    kept = [x for x in jax.tree.leaves(jax.tree.map(keeps, numbers, obs, next_obs, following)) if x is not True]
    return jnp.stack(kept).all(axis=0)


def unroll(film: Film) -> Array:
    """Return the stacks [R, E, ..., k * C]."""
    rows, deep, begun = film.anew.shape[0], film.deep, film.begun()
    row = jnp.arange(rows)[:, None]
    flat = film.frames.reshape(*film.frames.shape[:2], -1)
    frames = [flat[deep:]]  # Newest first; behind where a stack's own end, the last of them again.
    for age in range(1, deep + 1):
        frames.append(jnp.where((row - age >= begun)[..., None], flat[deep - age : deep - age + rows], frames[-1]))
    return stacks.stacked(frames[::-1], _stack_shape(film.frames.shape[2:], deep))


def unrolled(obs: PyTree) -> PyTree:
    """Return observations [R, E, ...] with stacks in the place of films."""
    return jax.tree.map(lambda x: unroll(x) if is_film(x) else x, obs, is_leaf=is_film)


def strips(obs: PyTree, rows: int | None = None) -> PyTree:
    """Return observations with films as `Strips` of one lane; of the first `rows` where that is given."""

    def strip(x: Any) -> Any:
        if not is_film(x):
            return x[:rows]
        frames = x.frames if rows is None else x.frames[: x.deep + rows]
        return Strips(frames[:, None], x.begun()[None, :rows])

    return jax.tree.map(strip, obs, is_leaf=is_film)


def at(obs: PyTree, step: Array | None) -> PyTree:
    """Return of observations [R, E, ...], with `strips`, that of row `step` [E] of each; of the last one for None."""

    def row_of(x: Any) -> Array:
        if not is_strips(x):
            row: Array = at_step(x, step)
            return row
        _, rows, envs = x.begun.shape
        row, deep = jnp.full(envs, rows - 1) if step is None else step, x.frames.shape[0] - rows
        begun = jnp.take_along_axis(x.begun[0], row[None], 0)[0]
        flat = x.frames.reshape(x.frames.shape[0], envs, -1)
        of_age = lambda age: jnp.take_along_axis(flat, (deep + jnp.maximum(row - age, begun))[None, :, None], 0)[0]
        return stacks.stacked([of_age(age) for age in range(deep, -1, -1)], _stack_shape(x.frames.shape[3:], deep))

    return jax.tree.map(row_of, obs, is_leaf=is_strips)


def cut(strip: Strips, num_lanes: int) -> Strips:
    """Return a strip of one lane in several, fixed groups of neighbouring environments."""
    frames = strip.frames.reshape(strip.frames.shape[0], num_lanes, -1, *strip.frames.shape[3:])
    return Strips(frames, jnp.moveaxis(strip.begun[0].reshape(strip.begun.shape[1], num_lanes, -1), 1, 0))


def picked(strips: Strips, index: Array | None) -> Array:
    """Return the stacks of the steps `index` [L, n] of each lane, [L, n, ...]; of all R * E / L for None.

    A lane's steps are numbered in order of time, and in each of environments, as `podium.learn.to_lanes` has them.
    """
    lanes, rows, envs = strips.begun.shape
    if index is None:
        index = jnp.broadcast_to(jnp.arange(rows * envs), (lanes, rows * envs))
    row, env = jnp.divmod(index.astype(jnp.int32), envs)
    return strips.stacks(row, env)


def of_envs(strips: Strips, index: Array | None) -> Array:
    """Return the stacks of the environments `index` [L, n] of each lane, [L, n, R, ...]; of all for None."""
    lanes, rows, envs = strips.begun.shape
    if index is None:
        index = jnp.broadcast_to(jnp.arange(envs), (lanes, envs))
    shape = *index.shape, rows
    env, row = (jnp.broadcast_to(x, shape) for x in (index.astype(jnp.int32)[..., None], jnp.arange(rows)))
    whole = strips.stacks(row.reshape(lanes, -1), env.reshape(lanes, -1))
    return whole.reshape(*shape, *whole.shape[2:])


def _stack_shape(frame: tuple[int, ...], deep: int) -> tuple[int, ...]:
    return *frame[:-1], frame[-1] * (deep + 1)
