"""What agents that learn action values share: the value of an action, and acting greedily but for epsilon."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from podium.ranges import as_float, is_traced
from podium.types import Array, Key


def select(value: Array, action: Array) -> Array:
    """Return `value` [..., A] at `action` [...], by comparison: its gradient is a product, not a scatter.

    >>> select(jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.array([1, 0])).tolist()
    [2.0, 3.0]
    """
    return jnp.sum(jnp.where(action[..., None] == jnp.arange(value.shape[-1]), value, 0.0), axis=-1)


def select_atoms(atoms: Array, action: Array) -> Array:
    """Return what `atoms` [..., A, Z] has of `action` [...], [..., Z]; as `select`.

    >>> select_atoms(jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.array(1)).tolist()
    [3.0, 4.0]
    """
    return select(jnp.swapaxes(atoms, -1, -2), action[..., None])


def greedy(value: Array) -> Array:
    """Return the best actions, int32 [...], of values [..., A]; of equals the first."""
    return jnp.argmax(value, axis=-1).astype(jnp.int32)


def epsilon_greedy(keys: Key, value: Array, epsilon: Array, legal: Array | None = None) -> Array:
    """Return the best actions, but with a probability of `epsilon` any.

    Args:
      keys: [B].
      value: [B, A], least where an action is not legal.
      epsilon: in [0, 1]; scalar or [B].
      legal: [B, A] bool, what may be drawn; None for all.

    Returns:
      int32 [B].
    """
    # One draw an environment gives both numbers: on CPU a draw costs more than the network's forward.
    explore, pick = jnp.moveaxis(jax.vmap(lambda key: jax.random.uniform(key, (2,)))(keys), -1, 0)
    if legal is None:
        random_action = jnp.floor(pick * value.shape[-1]).astype(jnp.int32)
    else:  # The n-th of those that are legal.
        number = jnp.cumsum(legal, axis=-1) - 1
        drawn = jnp.floor(pick * (number[..., -1] + 1)).astype(jnp.int32)
        random_action = jnp.argmax(legal & (number == drawn[..., None]), axis=-1).astype(jnp.int32)
    return jnp.where(explore < epsilon, random_action, greedy(value))


def decayed(start: float, end: float, decay_steps: float, env_steps: Array) -> Any:
    """Return epsilon after `env_steps`: falling linearly from `start` to `end` over `decay_steps`, then constant."""
    return start + jnp.minimum(env_steps / as_float(decay_steps), 1.0) * (end - start)


def check_epsilons(start: float, end: float) -> None:
    """Refuse an epsilon that would rise, unless it is known only when a program runs.

    Raises:
      ValueError: naming `epsilon_end` and `epsilon_start`.
    """
    if not (is_traced(start) or is_traced(end)) and end > start:
        raise ValueError(f"epsilon_end={end} must lie between 0 and epsilon_start={start}; use {min(0.05, start)}.")
