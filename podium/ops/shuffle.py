"""Permutations that cost O(n): a keyed bijection of the index, where a sort would be a quarter of a PPO update."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from podium.types import Array, Key

_ROUNDS = 4
_SMALL = 64
"""Up to so many elements a permutation is drawn exactly: few bits mix badly, and comparing all pairs costs nothing."""


def permute(key: Key, index: Array, size: int) -> Array:
    """Map `index` through a random permutation of 0 ... size-1, drawn by `key`.

    Each round xors and multiplies by keyed constants (odd, so invertible modulo a power of two) and folds high bits
    onto low ones: every step is a bijection of k-bit integers, hence so is the whole. Where `size` is no power of two,
    results beyond it are mapped again until they fall inside (cycle walking; Black and Rogaway 2002), which keeps it a
    bijection and takes fewer than two rounds on average. Uniform enough for minibatches (tests hold it against
    chi-square bounds), not for cryptography. Few bits would not be: up to 64 elements each draws a random word, and
    goes to the place of its word among all in order.

    Args:
      key: one key, one permutation.
      index: integer array, each in 0 ... size-1.
      size: static, 1 ... 2**31.

    Returns:
      uint32 array of the shape of `index`; distinct inputs give distinct outputs.
    """
    if size == 1:
        return jnp.zeros(index.shape, jnp.uint32)
    if size <= _SMALL:
        return _rank(jax.random.bits(key, (size,), jnp.uint32), index)
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
    outside = lambda x: x >= size
    return jax.lax.while_loop(lambda x: outside(x).any(), lambda x: jnp.where(outside(x), bijection(x), x), x)


def _rank(words: Array, index: Array) -> Array:
    """Return how many of `words` come before the one at `index`; of equal words the earlier comes first."""
    index = index.astype(jnp.uint32)
    word = words[index][..., None]
    earlier = (words == word) & (jnp.arange(words.size, dtype=jnp.uint32) < index[..., None])
    return jnp.sum((words < word) | earlier, axis=-1, dtype=jnp.uint32)
