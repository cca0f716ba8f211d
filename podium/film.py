"""The film of a rollout: observations that are stacks of frames, as they travel, each frame once.

A step brings one frame and an episode begins with its first one k times (`ArraySpec.num_frames`). So a rollout's stacks
are the k frames of its first row, one more for every row after it, and where an episode begins. What is put together
again (`unroll`) is what was written, to the bit, for environments that keep to that, as `check_host_env` holds them to.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podium.ops.stacks import stacked
from podium.types import Array, ArraySpec, PyTree


class Film(NamedTuple):
    """The observations of R rows of E environments; arrays of JAX or NumPy.

    Attributes:
      frames: [R + k - 1, E, ..., C]: the k of the first row, oldest first, and the newest one of each row after it.
      anew: [R, E] bool, whether a row's stack is its newest frame k times.
    """

    frames: Any
    anew: Any


def is_film(x: object) -> bool:
    """Say whether a part of observations is a film."""
    return isinstance(x, Film)


def blank(specs: PyTree, rows: int) -> PyTree:
    """Return zeros [rows, 1, ...] of observations as they travel: films of stacks, others as they are."""

    def one(spec: Any) -> Any:
        if not isinstance(spec, ArraySpec) or spec.num_frames == 1:
            return jnp.stack([spec.zeros(1)] * rows)
        shape = *spec.shape[:-1], spec.shape[-1] // spec.num_frames
        frames = jnp.zeros((rows + spec.num_frames - 1, 1, *shape), spec.dtype)
        return Film(frames, jnp.zeros((rows, 1), bool))

    return jax.tree.map(one, specs, is_leaf=lambda x: hasattr(x, "zeros"))


def num_frames(film: Film) -> int:
    """Return k."""
    return int(film.frames.shape[0] - film.anew.shape[0] + 1)


def split(stack: Any, number: int) -> Any:
    """Return the frames of a stack [E, ..., k * C], in front: [k, E, ..., C]; of JAX or NumPy."""
    library: Any = np if isinstance(stack, np.ndarray) else jnp
    parts = stack.reshape(*stack.shape[:-1], number, -1)
    return library.moveaxis(parts, -2, 0)


def unroll(film: Film) -> Array:
    """Return the stacks [R, E, ..., k * C]."""
    rows, deep = film.anew.shape[0], num_frames(film) - 1
    row = jnp.arange(rows)[:, None]
    # The row that a stack's own frames begin with; before the first row are those of its stack.
    begun = jax.lax.cummax(jnp.where(film.anew & (row > 0), row, -deep), axis=0)
    env = jnp.arange(film.frames.shape[1])
    flat = film.frames.reshape(*film.frames.shape[:2], -1)
    frames = [
        flat.at[jnp.maximum(row - age, begun) + deep, env].get(mode="promise_in_bounds") for age in range(deep, -1, -1)
    ]
    shape = film.frames.shape[2:]
    return stacked(frames, (*shape[:-1], shape[-1] * (deep + 1)))


def unrolled(obs: PyTree) -> PyTree:
    """Return observations [R, E, ...] with stacks in the place of films."""
    return jax.tree.map(lambda x: unroll(x) if is_film(x) else x, obs, is_leaf=is_film)
