"""Films: observations that are stacks of frames, of steps that follow one another, with every frame once.

Of the k frames of a stack k - 1 were seen a step before, so a film of R rows is R + k - 1 frames and not R * k. What a
stack may be is what `ArraySpec.num_frames` promises: the one before and a frame more, or one frame k times.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from podium.ops import stacks
from podium.types import Array, ArraySpec, PyTree, is_spec


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


def is_film(x: object) -> bool:
    """Say whether a part of observations is a film."""
    return isinstance(x, Film)


def blank(specs: PyTree, rows: int) -> PyTree:
    """Return zeros [rows, 1, ...] of observations as they travel: films of stacks, others as they are."""

    def one(spec: Any) -> Any:
        if not isinstance(spec, ArraySpec) or spec.num_frames == 1:
            return jnp.stack([spec.zeros(1)] * rows)
        shape = *spec.shape[:-1], spec.shape[-1] // spec.num_frames
        return Film(jnp.zeros((rows + spec.num_frames - 1, 1, *shape), spec.dtype), jnp.zeros((rows, 1), bool))

    return jax.tree.map(one, specs, is_leaf=is_spec)


def unroll(film: Film) -> Array:
    """Return the stacks [R, E, ..., k * C]."""
    rows, deep = film.anew.shape[0], film.deep
    row = jnp.arange(rows)[:, None]
    # The row that a stack's own frames begin with; before the first row are those of its stack.
    begun = jax.lax.cummax(jnp.where(film.anew & (row > 0), row, -deep), axis=0)
    flat = film.frames.reshape(*film.frames.shape[:2], -1)
    frames = [flat[deep:]]  # Newest first; behind where a stack's own end, the last of them again.
    for age in range(1, deep + 1):
        frames.append(jnp.where((row - age >= begun)[..., None], flat[deep - age : deep - age + rows], frames[-1]))
    shape = film.frames.shape[2:]
    return stacks.stacked(frames[::-1], (*shape[:-1], shape[-1] * (deep + 1)))


def unrolled(obs: PyTree) -> PyTree:
    """Return observations [R, E, ...] with stacks in the place of films."""
    return jax.tree.map(lambda x: unroll(x) if is_film(x) else x, obs, is_leaf=is_film)
