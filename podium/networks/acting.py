"""Acting by an actor-critic network, what that leaves for learning, and values of what was reached."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp

from podium.agent import ActOutput
from podium.networks.network import Network
from podium.ops import returns
from podium.types import Array, Key, PyTree, Trajectory, at_step


class Extras(NamedTuple):
    """What acting leaves for learning, [B, ...].

    `memory` is the one after the step (`()` without memory); `raw` what the policy drew, before it was squashed, and
    None where that is the action.
    """

    log_prob: Array
    value: Array
    memory: PyTree
    raw: Array | None = None


def drawn(trajectory: Trajectory) -> Array:
    """Return what the policy drew, [T, B, ...], and weighs: actions, or what they were before they were squashed."""
    raw: Array | None = trajectory.extras.raw
    return trajectory.action if raw is None else raw


def act(
    network: Network, keys: Key, params: PyTree, memory: PyTree, obs: PyTree, first: Array, greedy: bool
) -> ActOutput:
    """Act by an actor-critic network; the arguments are those of `Agent.act`, the extras `Extras`."""
    output, memory = network.apply(params, memory, obs, first)
    raw = output.policy.mode() if greedy else output.policy.sample(keys)
    extras = Extras(output.policy.log_prob(raw), output.value, memory)
    if output.bounds is None:
        return ActOutput(raw, memory, extras)
    return ActOutput(output.bounds.to_env(output.policy.squash(raw)), memory, extras._replace(raw=raw))


def next_values(
    network: Network,
    params: PyTree,
    value: Array,
    truncated: Array,
    reached: Callable[[Array | None], PyTree],
    memory: PyTree,
    view: Callable[[PyTree], PyTree] = lambda obs: obs,
    rounds: Array | None = None,
) -> Array:
    """Return V(s'_t) [T, B] by an actor-critic network; see `podium.ops.returns.next_values`.

    Args:
      network: whose output is `ActorCritic`.
      params: of it.
      value: [T, B], estimates at t.
      truncated: [T, B] bool, cut and not terminated.
      reached: `Trajectory.reached`, or what tells as it does which observation a step led to, before any reset.
      memory: [T, B, ...], after each step.
      view: applied to those observations that are evaluated.
      rounds: `podium.ops.returns.most_truncations`, where that is known.
    """

    def evaluate(step: Array | None) -> Array:
        no = jnp.zeros(value.shape[1:], bool)
        return network.apply(params, at_step(memory, step), view(reached(step)), no)[0].value

    return returns.next_values(value, truncated, evaluate, rounds)
