"""Sums over blocks of blocks: draw from weights that change a few at a time, at a cost that hardly grows with them.

The sum tree of Schaul et al. 2016 (arXiv 1511.05952, appendix B.2.1) with 32 children a node in place of two: four
levels hold a million weights, so a draw is four gathers of contiguous blocks and not twenty of single numbers. Sums are
computed again from what they sum, never corrected by differences, so that rounding does not add up over a run.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from podium.types import Array, Key

FANOUT = 32
"""Children of a node. Timed on a CPU, 16 and 32 are alike and 64 to 256 slower; 32 takes fewer steps elsewhere."""

Levels = tuple[Array, ...]
"""Weights [n], 0 or more, then sums over blocks of them, and so on up to at most `FANOUT` numbers; padded by zeros."""

# Running sums of a block, as a product: one call, where `cumsum` takes a dozen.
_UPTO = np.triu(np.ones((FANOUT, FANOUT), np.float32))


def empty(size: int) -> Levels:
    """Return weights of zero, at least `size` of them, and their sums."""
    sizes = [size]
    while sizes[-1] > FANOUT:
        sizes.append(-(-sizes[-1] // FANOUT))
    return tuple(jnp.zeros(-(-n // FANOUT) * FANOUT, jnp.float32) for n in sizes)


def replace(levels: Levels, weights: Array, changed: Array) -> Levels:
    """Return the sums for `weights`, where nothing has changed outside the blocks of the indices `changed` [k].

    >>> levels = empty(40)
    >>> levels = replace(levels, levels[0].at[35].set(2.0), jnp.array([35]))
    >>> levels[1][:3].tolist(), total(levels).item()
    ([0.0, 2.0, 0.0], 2.0)
    """
    replaced = [weights]
    for sums in levels[1:]:
        changed = changed // FANOUT
        blocks = _blocks(replaced[-1]).at[changed].get(mode="promise_in_bounds")
        replaced.append(sums.at[changed].set(jnp.sum(blocks, axis=-1), mode="promise_in_bounds"))
    return tuple(replaced)


def total(levels: Levels) -> Array:
    """Return the sum of all weights."""
    return jnp.sum(levels[-1])


def draw(key: Key, levels: Levels, number: int) -> Array:
    """Draw indices with probability in proportion to their weights, with replacement, stratified.

    The whole is cut into `number` equal segments and one index is drawn from each (Schaul et al. 2016, appendix B.2.1):
    an index is expected number * weight / total times, as without, and varies less. Segments are kept to at the top
    level; within a block every level has randomness of its own, which one float32 for all would be too coarse for.

    Args:
      key: of the draw.
      levels: of weights.
      number: of indices.

    Returns:
      int32 [number], never of a weight of zero unless all are.
    """
    noise = jax.random.uniform(key, (len(levels), number))
    segment = (jnp.arange(number) + noise[-1]) / number
    index = _pick(levels[-1][None], segment)
    for level, share in zip(levels[-2::-1], noise[-2::-1], strict=True):
        block = _blocks(level).at[index].get(mode="promise_in_bounds")
        index = index * FANOUT + _pick(block, share)
    return index


def _blocks(level: Array) -> Array:
    return level.reshape(-1, FANOUT)


def _pick(weights: Array, share: Array) -> Array:
    """Return [k], where in each row of `weights` [k or 1, FANOUT] the running sum first exceeds a share [k] of all."""
    # In full precision: an accelerator's default would round the sums.
    upto = jnp.matmul(weights, _UPTO, precision=jax.lax.Precision.HIGHEST)
    number = jnp.arange(FANOUT, dtype=jnp.int32)
    # Sums are rounded, so they may fall where they should stay: a weight of zero is passed over by its own number.
    positive = weights > 0
    last = jnp.max(jnp.where(positive, number, 0), axis=-1, keepdims=True)
    exceeds = positive & (upto > share[:, None] * upto[:, -1:])
    return jnp.min(jnp.where(exceeds, number, last), axis=-1)
