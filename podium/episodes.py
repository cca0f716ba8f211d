"""Return and length of the episodes under way, and of those that ended in a rollout."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from podium.types import Array, Metrics, TimeStep

SUMS = ("episodes", "episode_return_sum", "episode_length_sum", "nonfinite_steps")
"""What `summarize` returns."""


class Episodes(NamedTuple):
    """Per environment [B]: reward and steps gathered since its episode began.

    Where two take turns the return is that of who moved first, and `sign` is 1 where that one moves, else -1.
    """

    episode_return: Array
    episode_length: Array
    sign: Array | None = None


class Ended(NamedTuple):
    """Per step [..., B]: return and length of the episode that ended there; zeros where none did.

    `nonfinite` is where a simulator lost its numbers, or None where the environment does not say.
    """

    ended: Array
    episode_return: Array
    episode_length: Array
    nonfinite: Array | None = None


def begin(num_envs: int, turns: bool = False) -> Episodes:
    """Return accumulators at zero; `turns` says whether two players move in turn."""
    sign = jnp.ones(num_envs, jnp.float32) if turns else None
    return Episodes(jnp.zeros(num_envs, jnp.float32), jnp.zeros(num_envs, jnp.int32), sign)


def accumulate(episodes: Episodes, timestep: TimeStep) -> tuple[Episodes, Ended]:
    """Add one batched step.

    The reward counted is `info["raw_reward"]` where there is one, and the end of an episode `info["episode_end"]`: an
    environment may mark what is no end, such as a lost life, as terminal for the learner. `info["nonfinite"]` is where
    `podium.envs.wrappers.truncate_nonfinite` cut an episode.
    """
    valid = True if timestep.valid is None else any_agent(timestep.valid, timestep)
    reward, sign = gained(timestep, episodes.sign)
    total = episodes.episode_return + jnp.where(valid, reward, 0.0)
    length = episodes.episode_length + jnp.where(valid, 1, 0)
    last = timestep.info.get("episode_end", timestep.last) & valid
    ended = Ended(last, jnp.where(last, total, 0.0), jnp.where(last, length, 0), timestep.info.get("nonfinite"))
    return Episodes(jnp.where(last, 0.0, total), jnp.where(last, 0, length), sign), ended


def gained(timestep: TimeStep, sign: Any = None) -> tuple[Any, Any]:
    """Return what a step counts for in the return of its episode, [B], and the next `sign`; of JAX or NumPy.

    Of agents that act together it is their mean. Where two take turns it is what who moved first gained: `sign` is 1
    where that one moves, else -1, and 1 again behind an end.
    """
    reward = timestep.info.get("raw_reward", timestep.reward)
    if reward.ndim > timestep.terminated.ndim:
        reward = reward.mean(axis=-1)
    if timestep.turn is None:
        return reward, sign
    last = timestep.last
    return sign * reward, last + ~last * sign * timestep.turn


def any_agent(valid: Any, timestep: Any) -> Any:
    """Return whether a row is a transition of any of the agents that act together."""
    return valid if valid.ndim == timestep.terminated.ndim else valid.any(axis=-1)


def summarize(ended: Ended) -> Metrics:
    """Return sums over a rollout, from which any number of rollouts can be averaged: count, returns, lengths.

    And `nonfinite_steps`, 0 where the environment does not tell of any.
    """
    return {
        "episodes": jnp.sum(ended.ended).astype(jnp.float32),
        "episode_return_sum": jnp.sum(ended.episode_return),
        "episode_length_sum": jnp.sum(ended.episode_length).astype(jnp.float32),
        "nonfinite_steps": jnp.float32(0) if ended.nonfinite is None else jnp.sum(ended.nonfinite).astype(jnp.float32),
    }
