"""What is read of an observation that is a `Seen`, and how actions that are not legal are ruled out."""

from __future__ import annotations

import jax.numpy as jnp

from podium.types import Array, PyTree, Seen

ILLEGAL = -1e9
"""Logit and value of an action that is not legal: its probability is 0, and no gradient passes."""


def view_of(obs: PyTree) -> PyTree:
    """Return what the policy sees of an observation, of its specs or of statistics of it."""
    return obs.view if isinstance(obs, Seen) else obs


def world_of(obs: PyTree) -> PyTree:
    """Return what a centralised critic sees: the `world`, where there is one, else what the policy sees."""
    return obs.world if isinstance(obs, Seen) and obs.world is not None else view_of(obs)


def legal_of(obs: PyTree) -> Array | None:
    """Return [..., A] bool, the actions that may be taken; None where all may."""
    legal: Array | None = obs.legal if isinstance(obs, Seen) else None
    return legal


def only_legal(value: Array, obs: PyTree) -> Array:
    """Return logits or action values [..., A] with those that are not legal at `ILLEGAL`."""
    legal = legal_of(obs)
    return value if legal is None else jnp.where(legal, value, ILLEGAL)
