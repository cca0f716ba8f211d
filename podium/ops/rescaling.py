"""A scale for values of any size: large ones are drawn together, so that no reward need be clipped."""

from __future__ import annotations

import jax.numpy as jnp

from podium.types import Array


def rescale(x: Array, eps: float = 1e-3) -> Array:
    """Draw values together (Pohlen et al. 2018, arXiv 1805.11593, proposition A.2).

        h(x) = sign(x) (sqrt(|x| + 1) - 1) + eps x

    Args:
      x: [...].
      eps: 0 or more; above 0 the inverse has a bounded slope.

    Returns:
      [...], computed without the difference above, in which small values would be lost.

    >>> rescale(jnp.array([0.0, 3.0, -8.0]), 0.0).tolist()
    [0.0, 1.0, -2.0]
    """
    return x / (jnp.sqrt(jnp.abs(x) + 1.0) + 1.0) + eps * x


def unrescale(y: Array, eps: float = 1e-3) -> Array:
    """Return the x [...] of which `rescale(x, eps)` is y.

        h^-1(y) = sign(y) (((sqrt(1 + 4 eps (|y| + 1 + eps)) - 1) / (2 eps))^2 - 1)

    It is computed as y (u + 1) / (1 + eps (u + 1)), where u = sqrt(|x| + 1) solves eps u^2 + u = 1 + eps + |y|: the
    same, but exact for small values, and for an eps of 0 too.

    >>> unrescale(jnp.array([0.0, 1.0, -2.0]), 0.0).tolist()
    [0.0, 3.0, -8.0]
    """
    total = 1.0 + eps + jnp.abs(y)
    root = 2.0 * total / (1.0 + jnp.sqrt(1.0 + 4.0 * eps * total))
    return y * (root + 1.0) / (1.0 + eps * (root + 1.0))
