"""Permutations that cost O(n): a keyed bijection of the index, where a sort would be a quarter of a PPO update."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from podium.types import Array, Key

_ROUNDS = 4


def permute(key: Key, index: Array, size: int) -> Array:
    """Map `index` through a random permutation of 0 ... size-1, drawn by `key`.

    Each round xors and multiplies by keyed constants (odd, so invertible modulo a power of two) and folds high bits
    onto low ones: every step is a bijection of k-bit integers, hence so is the whole. Where `size` is no power of two,
    results beyond it are mapped again until they fall inside (cycle walking; Black and Rogaway 2002), which keeps it a
    bijection and takes fewer than two rounds on average. Uniform enough for minibatches (tests hold it against
    chi-square bounds), not for cryptography.

    Args:
      key: one key, one permutation.
      index: integer array, each in 0 ... size-1.
      size: static, 1 ... 2**31.

    Returns:
      uint32 array of the shape of `index`; distinct inputs give distinct outputs.
    """
    if size == 1:
        return jnp.zeros(index.shape, jnp.uint32)
    bits = (size - 1).bit_length()
    mask = jnp.uint32((1 << bits) - 1)
    constants = jax.random.bits(key, (_ROUNDS, 2), jnp.uint32)

    def bijection(x: Array) -> Array:
        for i in range(_ROUNDS):
            x = (x ^ constants[i, 0]) & mask
            x = (x * (constants[i, 1] | 1)) & mask
            x = x ^ (x >> ((bits + 1) // 2))
            x = (x * jnp.uint32(0x9E3779B1)) & mask
            x = x ^ (x >> max(1, bits // 3))
        return x

    x = bijection(index.astype(jnp.uint32))
    if size == 1 << bits:
        return x
    outside = lambda x: x >= size  # noqa: E731
    return jax.lax.while_loop(lambda x: outside(x).any(), lambda x: jnp.where(outside(x), bijection(x), x), x)
