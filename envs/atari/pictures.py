"""From colour indices to what agents see: true colours, grey, and small grey pictures of the last two frames.

A screen is [..., H, 160] colour indices, H lines of the game's window (210 in all of the 57 games), int32 or uint8.
"""

from __future__ import annotations

import functools
import math

import jax.numpy as jnp
import numpy as np

from podium.envs.atari.palette import NTSC
from podium.types import Array

PALETTE = np.repeat(np.frombuffer(NTSC, np.uint8).reshape(128, 3), 2, axis=0)
"""[256, 3], red, green and blue of each index; odd ones, which the console does not make, are as the even one below."""

GREYS = ((PALETTE @ np.array([2989, 5870, 1140]) + 5000) // 10_000).astype(np.uint8)
"""[256], the grey of each index: 0.2989 R + 0.587 G + 0.114 B, rounded."""


def rgb(screen: Array) -> Array:
    """Return the colours of a screen, uint8 [..., H, 160, 3]."""
    return jnp.take(jnp.asarray(PALETTE), jnp.asarray(screen, jnp.int32), axis=0, mode="clip")


def grey(screen: Array) -> Array:
    """Return the greys of a screen, uint8 [..., H, 160]."""
    return jnp.take(jnp.asarray(GREYS), jnp.asarray(screen, jnp.int32), mode="clip")


def preprocess(before: Array, last: Array, size: int | tuple[int, int] = 84) -> Array:
    """Return the small grey picture of two frames: grey, then the brighter of the two, then `resize`.

    Objects that the console draws in every other frame are so in every picture. The order matters: the brighter index
    is not the brighter grey.

    Args:
      before: [..., H, 160], the colour indices of the frame before the last.
      last: [..., H, 160], those of the last frame.
      size: as for `resize`.
    """
    return resize(jnp.maximum(grey(before), grey(last)), size)


def resize(picture: Array, size: int | tuple[int, int] = 84) -> Array:
    """Shrink a picture; each new pixel is the mean over the area that it covers, rounded, halves to even.

    Computed in integers, so exact wherever it runs. ale-py sums in float32, which differs by one grey level in some
    pixels whose mean is exactly a half: two in 10,000 at size 84.

    Args:
      picture: uint8 [..., H, W].
      size: height and width of the result, or one number for both.

    Returns:
      uint8 [..., height, width].

    Raises:
      ValueError: `size` is below 1 or larger than the picture.
    """
    shape = picture.shape[-2:]
    wanted = (size, size) if isinstance(size, int) else tuple(size)
    if len(wanted) != 2 or not all(1 <= new <= old for new, old in zip(wanted, shape, strict=True)):
        raise ValueError(
            f"size={size} must be from 1 to {shape[0]} high and to {shape[1]} wide: pictures only shrink; use 84."
        )
    total, rows = _sum_areas(jnp.asarray(picture, jnp.int32), wanted[0], -2)
    total, columns = _sum_areas(total, wanted[1], -1)
    area = rows * columns
    quotient, twice = total // area, 2 * (total % area)
    up = (twice > area) | ((twice == area) & (quotient % 2 == 1))
    return (quotient + up).astype(jnp.uint8)


def _sum_areas(pixels: Array, size: int, axis: int) -> tuple[Array, int]:
    """Return sums over stretches of an axis, in the smallest unit that divides all of them, and units a stretch."""
    indices, weights, units = _stretches(pixels.shape[axis], size)
    trailing = (1,) * (-axis - 1)
    total = jnp.zeros((), jnp.int32)
    for index, weight in zip(indices, weights, strict=True):
        total = total + jnp.take(pixels, jnp.asarray(index), axis=axis, mode="clip") * weight.reshape(-1, *trailing)
    return total, units


@functools.lru_cache(maxsize=64)
def _stretches(old: int, new: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Return which pixels each of `new` stretches meets and for how many units, [most that one meets, new] both.

    In units of which a pixel has `new / gcd` and a stretch `old / gcd`, pixels and stretches begin at whole numbers.
    """
    pixel, stretch = new // math.gcd(old, new), old // math.gcd(old, new)
    begin = stretch * np.arange(new)
    first = begin // pixel
    most = int(np.max((begin + stretch - 1) // pixel - first)) + 1
    index = first + np.arange(most)[:, None]
    weight = np.minimum((index + 1) * pixel, begin + stretch) - np.maximum(index * pixel, begin)
    return np.minimum(index, old - 1).astype(np.int32), np.maximum(weight, 0).astype(np.int32), stretch
