"""Stacks of frames: k of them side by side on the last axis, oldest first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podium.types import Array


def is_word(dtype: object, size: int, width: int) -> bool:
    """Say whether a pixel's frames are the bytes of one word, the oldest its lowest: on a CPU several times as fast."""
    return dtype == jnp.uint8 and size == 4 and width == 1


def words(stack: Array) -> Array:
    """Return stacks of which `is_word` holds, [..., 4], as words [...]."""
    return jax.lax.bitcast_convert_type(stack, jnp.uint32)


def stacked(frames: Sequence[Array], shape: tuple[int, ...]) -> Array:
    """Return k frames [..., n], oldest first, as one stack [..., *shape], where `shape` ends with k * C."""
    batch, width = frames[0].shape[:-1], shape[-1] // len(frames)
    if is_word(frames[0].dtype, shape[-1], width):
        shifted = (frame.astype(jnp.uint32) << 8 * i for i, frame in enumerate(frames))
        return jax.lax.bitcast_convert_type(sum(shifted, jnp.uint32(0)), jnp.uint8).reshape(*batch, *shape)
    return jnp.concatenate([frame.reshape(*batch, *shape[:-1], width) for frame in frames], axis=-1)


def pushed(stack: Array, frame: Array) -> Array:
    """Return stacks [..., k * C] less their oldest frame and one more, [..., C]."""
    width = frame.shape[-1]
    if is_word(stack.dtype, stack.shape[-1], width):
        moved = (words(stack) >> 8) | (frame[..., 0].astype(jnp.uint32) << 24)
        return jax.lax.bitcast_convert_type(moved, jnp.uint8)
    return jnp.concatenate([stack[..., width:], frame], axis=-1)


def frame_of(stack: Any, place: int, width: int) -> Any:
    """Return one frame [..., C] of stacks [..., k * C], of JAX or NumPy; the oldest has place 0."""
    if isinstance(stack, jax.Array) and is_word(stack.dtype, stack.shape[-1], width):
        return (words(stack) >> 8 * place).astype(jnp.uint8)[..., None]
    return stack[..., place * width : (place + 1) * width]


def gathered(frames: Array, place: Array, in_lanes: bool = False) -> Array:
    """Return stacks [..., H, W, k * C] of frames wherever they lie, in one operation: on a CPU as fast as of stacks.

    Args:
      frames: [A, E, H, W, C], or any axes for H and W; [A, L, E, H, W, C] `in_lanes`.
      place: int32 [..., k, 2], of each frame of a stack, oldest first, its places along A and E; [L, ..., k, 2]
        `in_lanes`, of frames of that lane. All must be there: nothing is checked.
      in_lanes: whether frames have an axis L. They are read as they lie: with it in front all would be copied.
    """
    axes, number = ((0, 2) if in_lanes else (0, 1)), place.ndim - 2
    lead = frames.shape[: axes[1] + 1]
    flat = frames.reshape(*lead, -1, frames.shape[-1])
    lanes: dict[str, Any] = {"operand_batching_dims": (1,), "start_indices_batching_dims": (0,)} if in_lanes else {}
    # Pixels come before the frames of a stack: [..., pixels, k, C].
    numbers = jax.lax.GatherDimensionNumbers((number, number + 2), axes, axes, **lanes)
    sizes, mode = (*[1] * len(lead), *flat.shape[-2:]), jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS
    found = jax.lax.gather(flat, place, numbers, sizes, mode=mode)
    return found.reshape(*place.shape[:-2], *frames.shape[len(lead) : -1], place.shape[-2] * frames.shape[-1])


def is_one_frame(stack: Any, width: int) -> Any:
    """Say of stacks [E, ..., k * C], of JAX or NumPy, which are one frame k times: bool [E]."""
    axes = tuple(range(1, stack.ndim))
    if isinstance(stack, jax.Array) and is_word(stack.dtype, stack.shape[-1], width):
        seen = words(stack)
        return jnp.all(seen == (seen & 0xFF) * np.uint32(0x01010101), axis=axes[:-1])
    number = stack.shape[-1] // width
    frames = [frame_of(stack, place, width) for place in range(number)]
    equal = True
    for older, newer in zip(frames, frames[1:], strict=False):
        equal = equal & (older == newer).all(axis=axes)
    return equal


def is_equal(stack: Array, other: Array) -> Array:
    """Say of stacks [E, ...] which are equal: bool [E]."""
    return jnp.all(stack == other, axis=tuple(range(1, stack.ndim)))


def is_shifted(stack: Array, following: Array, width: int) -> Array:
    """Say which stacks [E, ..., k * C] are followed by them less their oldest frame and one more: bool [E]."""
    if is_word(stack.dtype, stack.shape[-1], width):
        return is_equal(words(stack) >> 8, words(following) & 0xFFFFFF)
    return is_equal(stack[..., width:], following[..., :-width])
