"""Where randomness comes from: a run's seed, the global number of an environment, and the step.

Nothing else: experience depends neither on devices nor on how environments are grouped, and a placement that steps
environments elsewhere draws the same.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from podium.types import Array, Key


class Roots(NamedTuple):
    """The independent streams of a run: its iterations (acting, learning), the agent's start, its environments."""

    run: Key
    agent: Key
    env: Key


def roots(key: Key) -> Roots:
    """Split a seed's key."""
    return Roots(*jax.random.split(key, 3))


class Iteration(NamedTuple):
    """The streams of one iteration."""

    rollout: Key
    learn: Key


def iteration(run_key: Key, number: Array) -> Iteration:
    """Return the keys of iteration `number`; whoever acts apart from the learner derives the same."""
    return Iteration(*jax.random.split(jax.random.fold_in(run_key, number)))


def exchange(run_key: Key, number: Array) -> Key:
    """Return the key of what the members of a population exchange after iteration `number`."""
    return jax.random.fold_in(jax.random.fold_in(run_key, 0x706F70), number)


def environment_keys(key: Key, index: Array) -> Key:
    """Return one key an environment, [B], from its global number."""
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, index)


def at_time(keys: Key, time: Array) -> Key:
    """Return the keys [B] of one step; `time` [B] counts steps since the start of the run, which itself is 0."""
    return jax.vmap(jax.random.fold_in)(keys, time)


def at_times(keys: Key, start: Array, num_steps: int) -> Key:
    """Return the keys [T, B] of steps `start` [B] to `start + T - 1`: one large draw is cheaper than many small."""
    return jax.vmap(lambda step: at_time(keys, start + step))(jnp.arange(num_steps, dtype=start.dtype))


def episode_seed(seed: int | None, run_key: Key, update: int) -> int:
    """Return the seed of episodes that begin after so many updates, outside the state of a run.

    Those of a run that resumes are not those it began with: `seed` is the run's where it was begun here, else None.
    """
    if seed is not None and update == 0:
        return seed
    return int(jax.random.randint(jax.random.fold_in(run_key, update), (), 0, 2**31 - 1))


def seed_after(seed: int, failures: int) -> int:
    """Return the seed, of 32 bits, of what is made anew: after a failure episodes are others than those before it.

    >>> seed_after(2**32 - 1, 0), seed_after(2**32 - 1, 1)
    (4294967295, 2654435760)
    """
    return (seed + failures * 0x9E3779B1) % 2**32
