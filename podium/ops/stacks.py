"""Stacks of frames: k of them side by side on the last axis, put together from single ones."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from podium.types import Array


def stacked(frames: Sequence[Array], shape: tuple[int, ...]) -> Array:
    """Return k frames [..., n], oldest first, as one stack [..., *shape], where `shape` ends with k * C."""
    batch, width = frames[0].shape[:-1], shape[-1] // len(frames)
    if is_word(frames[0].dtype, shape[-1], width):
        words = (frame.astype(jnp.uint32) << 8 * i for i, frame in enumerate(frames))
        return jax.lax.bitcast_convert_type(sum(words, jnp.uint32(0)), jnp.uint8).reshape(*batch, *shape)
    return jnp.concatenate([frame.reshape(*batch, *shape[:-1], width) for frame in frames], axis=-1)


def is_word(dtype: object, size: int, width: int) -> bool:
    """Say whether a pixel's frames are the bytes of one word, the oldest its lowest: on a CPU several times as fast."""
    return dtype == jnp.uint8 and size == 4 and width == 1
