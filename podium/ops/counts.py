"""Counts that never stand still: exact integers in two words, for float32 loses single steps from 2^24 on."""

from __future__ import annotations

from typing import NamedTuple, Self

import jax.numpy as jnp
import numpy as np

from podium.types import Array


class Count(NamedTuple):
    """An integer from 0 to 2^64 - 1, high * 2^32 + low; uint32 each, of any shape.

    Integers, because what averages States (`podium.LocalSGD`) leaves them as they are; a compensated sum of floats
    would be rounded there, and the compiler might simplify it.

    >>> steps = Count.zero().add(2**32 - 1).add(2)
    >>> int(steps), steps.total().item()
    (4294967297, 4294967296.0)
    """

    low: Array
    high: Array

    @classmethod
    def zero(cls) -> Self:
        """Return 0, a scalar."""
        return cls(jnp.zeros((), jnp.uint32), jnp.zeros((), jnp.uint32))

    def add(self, number: Array | int) -> Count:
        """Return the count and `number`, an integer from 0 to 2^32 - 1, more."""
        low = self.low + jnp.asarray(number, jnp.uint32)
        return Count(low, self.high + (low < self.low).astype(jnp.uint32))

    def total(self) -> Array:
        """Return the nearest float32, within 1 part in 2^23: what schedules compute with."""
        return self.high.astype(jnp.float32) * 2.0**32 + self.low.astype(jnp.float32)

    def __int__(self) -> int:
        """Return the exact number, of a scalar."""
        return (int(self.high) << 32) + int(self.low)

    def __float__(self) -> float:
        """Return the number in double precision, of a scalar."""
        return float(int(self))


def split(number: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the words of whole numbers, low and high, as a `Count` has them.

    >>> [word.tolist() for word in split(np.array([640.0, 2.0**33 + 5]))]
    [[640, 5], [0, 2]]
    """
    whole = np.asarray(number).astype(np.uint64)
    return (whole & 0xFFFFFFFF).astype(np.uint32), (whole >> 32).astype(np.uint32)
