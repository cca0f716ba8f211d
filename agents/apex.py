"""Ape-X DQN (Horgan et al. 2018, arXiv 1803.00933): actors that explore each in its own way, a prioritised replay.

It is `dqn` with another replay and another probability of exploring. What the paper does by processes (actors with
buffers of their own, one learner) is a matter of placement here, and none is named. Deliberate differences: those of
`dqn`; transitions are priced by the values that acting saw, whose bootstrap comes from the network that acts
(`podium.replay.prioritized` says what else); the ring forgets the oldest, as the paper's does in the end.
"""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp

from podium.agent import ActOutput, Agent, brought_to
from podium.agents import dqn
from podium.networks import Network
from podium.ops.action_values import select
from podium.ranges import check_config, check_fields
from podium.replay import Estimate
from podium.types import Array, EnvSpec, Key, PyTree


@dataclasses.dataclass(frozen=True)
class Config(dqn.PrioritizedConfig):
    """Hyperparameters of Ape-X: those of DQN with prioritised replay, some with the paper's value, and its own."""

    n_step: int = 3
    """Rewards summed before the bootstrap, 1 or more."""
    dueling: bool = True
    """Whether action values are a state's value plus advantages of mean zero."""
    epsilon_start: float = 0.4
    """At the start, the probability that the first actor, which explores most, acts at random; 0 to 1."""
    epsilon_end: float = 0.4
    """That probability after the decay, 0 to epsilon_start; the paper's stays as it is."""
    epsilon_spread: float = 7.0
    """Actor i of N explores with probability epsilon ** (1 + epsilon_spread * i / (N - 1)); 0 or more."""
    num_actors: int = 16
    """N above, 1 or more: environment i explores as actor i modulo N, so num_envs is usual, and any number goes."""


def estimate(value: Array, action: Array) -> Estimate:
    """Return what first priorities are computed from: of values [B, A], that of `action` [B], and the best."""
    return Estimate(select(value, action), jnp.max(value, axis=-1))


def epsilons(epsilon: Array, number: Array, num_actors: int, spread: float) -> Array:
    """Return [B], the probability that each actor acts at random (Horgan et al. 2018, section 4.1).

        epsilon_i = epsilon ** (1 + spread * i / (N - 1)),   i = number modulo N

    Args:
      epsilon: scalar, of actor 0.
      number: [B] integers, of the environments.
      num_actors: N.
      spread: the paper's alpha; 7 there.

    >>> [round(x, 4) for x in epsilons(0.4, jnp.array([0, 1, 2, 3]), 3, 7.0).tolist()]
    [0.4, 0.0162, 0.0007, 0.4]
    """
    return epsilon ** (1.0 + spread * (number % num_actors) / max(num_actors - 1, 1))


def make(config: Config = Config(), network: Network | None = None, loss: dqn.Loss = dqn.loss) -> Agent:
    """Make an Ape-X DQN agent; its memory is the global number of each environment.

    Args:
      config: hyperparameters.
      network: without memory, whose output is action values [..., A]; None builds one of `config`'s sizes.
      loss: as of `dqn.make`; its `Aux.priorities` are what transitions are drawn by.

    Returns:
      an `Agent` with a prioritised `Replay`.

    Raises:
      ValueError: for a field out of range or a network with memory; from `init`, for continuous actions.
    """
    check_config(config, Config)
    check_fields(config, not_negative=["epsilon_spread"], counts=["num_actors"])
    again = functools.partial(make, network=network, loss=loss)
    base = dqn.make(config, network, loss, note=estimate)

    def carry(spec: EnvSpec, num_envs: int) -> Array:
        return jnp.zeros(num_envs, jnp.int32)

    def number(memory: Array, index: Array) -> Array:
        return index.astype(jnp.int32)

    def act(keys: Key, params: dqn.Params, memory: Array, obs: PyTree, first: Array, greedy: bool) -> ActOutput:
        epsilon = epsilons(params.epsilon, memory, config.num_actors, config.epsilon_spread)
        return base.act(keys, params._replace(epsilon=epsilon), (), obs, first, greedy)._replace(carry=memory)

    return base._replace(carry=carry, number=number, act=act, name="apex", make=again, brought=brought_to(again))
