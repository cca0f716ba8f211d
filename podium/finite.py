"""Whether numbers are finite: those of an agent's State, of what environments gave, of a chunk of both."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from podium.agent import Agent
from podium.types import Array, PyTree, Trajectory

SMALL = 2**16
"""Numbers in an array that `all_finite` may copy."""


def all_finite(tree: PyTree, small: int = SMALL) -> Array:
    """Return a bool scalar, whether every number in `tree` is finite.

    Arrays of one type of up to `small` numbers are looked at as one, because a CPU compiles each loop for as long as a
    large one's; 0 looks at each alone, as suits arrays that lie split over devices.
    """
    floating = _floating(tree)
    joined: dict[Any, list[Array]] = {}
    for x in floating:
        if x.size <= small:
            joined.setdefault(x.dtype, []).append(x.ravel())
    looked_at = [x for x in floating if x.size > small] + [jnp.concatenate(arrays) for arrays in joined.values()]
    return functools.reduce(jnp.logical_and, [jnp.isfinite(x).all() for x in looked_at], jnp.ones((), bool))


def _floating(tree: PyTree) -> list[Array]:
    return [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]


def rollout_finite(agent: Agent, trajectory: Trajectory) -> Array:
    """Return [B], whether every reward of an environment is finite, and where there is a replay every observation.

    What a replay stores comes from these, so that no replay need ever be read as a whole; without one, what is not
    finite in an observation shows in the agent's state at once. One answer an environment keeps devices apart until the
    end of a chunk.
    """
    seen = () if agent.replay is None else (trajectory.obs, trajectory.next_obs)
    leaves = _floating((trajectory.reward, seen))
    return functools.reduce(jnp.logical_and, [jnp.isfinite(x).all((0, *range(2, x.ndim))) for x in leaves])


def chunk_finite(agent_state: PyTree, envs_finite: Array, small: int = SMALL) -> Array:
    """Return what a chunk says as "finite", [2]: of the agent's State, and of all that the environments [B] gave."""
    return jnp.stack([all_finite(agent_state, small), envs_finite.all()])
