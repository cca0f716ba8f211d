"""Bounds of continuous actions, and the map between a box and [-1, 1], in which policies and critics compute."""

from __future__ import annotations

from typing import NamedTuple, Self

import jax.numpy as jnp
import numpy as np

from podium.types import Array, ArraySpec, DiscreteSpec, EnvSpec


class Bounds(NamedTuple):
    """A box of actions: `low` and `high`, [A] float32 each.

    It rides in the parameters that act, for `Agent.act` sees no spec; nothing learns it, and `podium.Evolution` moves
    the policy and leaves it alone.
    """

    low: Array
    high: Array

    @classmethod
    def of(cls, spec: EnvSpec, needs: str, instead: str) -> Self:
        """Return the bounds of an environment's actions.

        Args:
          spec: of the environment.
          needs: who asks for bounded actions, for a sentence: "sac needs".
          instead: what else to do, for a sentence: "use ppo".

        Raises:
          ValueError: the actions are discrete, no vector (A,) of floats, or a side of them has no bound.
        """
        action, bounded = spec.action, "continuous actions, a vector (A,) within finite bounds"
        if isinstance(action, DiscreteSpec):
            raise ValueError(f"the actions of {spec.name} are discrete, but {needs} {bounded}; {instead}.")
        check_vector(spec, needs)
        low, high = (np.broadcast_to(np.asarray(side, np.float32), action.shape) for side in (action.low, action.high))
        if not (np.isfinite(low) & np.isfinite(high) & (low < high)).all():
            raise ValueError(
                f"the actions of {spec.name} lie between low={low.tolist()} and high={high.tolist()}, but {needs} "
                f"{bounded}, low below high; say them in the environment's ArraySpec, or {instead}."
            )
        with np.errstate(over="ignore"):
            widest = np.abs(low) + np.abs(high)
        if not np.isfinite(widest).all():
            raise ValueError(
                f"the actions of {spec.name} lie between low={low.tolist()} and high={high.tolist()}, whose sum or "
                "difference no float32 holds; scale them in the environment."
            )
        return cls(jnp.asarray(low), jnp.asarray(high))

    def to_env(self, unit: Array) -> Array:
        """Return actions [..., A] in the environment's units, of those in [-1, 1]; rounding leaves none outside.

        >>> Bounds(jnp.array([-2.0, 0.0]), jnp.array([2.0, 1.0])).to_env(jnp.array([0.5, -1.0])).tolist()
        [1.0, 0.0]
        """
        middle, half = 0.5 * (self.high + self.low), 0.5 * (self.high - self.low)
        return jnp.clip(middle + half * unit, self.low, self.high)

    def to_unit(self, action: Array) -> Array:
        """Return actions [..., A] in [-1, 1], of those in the environment's units: undo `to_env`."""
        middle, half = 0.5 * (self.high + self.low), 0.5 * (self.high - self.low)
        return (action - middle) / half


def check_vector(spec: EnvSpec, needs: str) -> None:
    """Raise ValueError where actions in a box are no vector (A,) of floats, which `needs` says who needs."""
    check_floats(spec)
    shape = spec.action.shape
    if len(shape) != 1 or not shape[0]:
        least = ", A 1 or more" if tuple(shape) == (0,) else ""
        raise ValueError(
            f"the actions of {spec.name} have shape {shape}, but {needs} a vector (A,){least}; reshape them in "
            "the environment."
        )


def check_floats(spec: EnvSpec) -> None:
    """Raise ValueError for a box of integers, which no policy draws."""
    if isinstance(spec.action, ArraySpec) and not jnp.issubdtype(spec.action.dtype, jnp.floating):
        raise ValueError(
            f"the actions of {spec.name} are {np.dtype(spec.action.dtype).name} in a box, and an agent chooses one "
            "index or floats; number them all by a DiscreteSpec, or let the environment take floats and round them."
        )
