"""VDN: value decomposition networks for agents that act together for one reward (Sunehag et al. 2018, 1706.05296).

    Q(s, a) = sum_n Q_n(o_n, a_n)                                                                             (eq. 3)

The team's value is the sum of its agents', each of what that one sees and does, and learnt from the team's reward by
`podium.agents.dqn`: the gradient of its one TD error goes through the sum to all. So each agent acts greedily by its
own values, and the team then takes the best joint action: the argmax of a sum of separate terms is each one's.

Here all agents share one network (the paper's weight sharing), told apart by what they observe. The team's reward is
the mean of its agents': where a reward is common to all, that reward, as podium's returns are. Agents that are dead
stay in the sum, with what they see, which says so; a step is one of the replay while anyone lives. Deliberate
differences from the paper: no memory, and no channels between agents; double Q-learning, n-step returns and the rest
as in `dqn`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from podium import replay
from podium.agent import Agent, Aux, Plan, brought_to
from podium.agents import dqn
from podium.multi import shared
from podium.multi.sharing import fold, unfold
from podium.networks import Network, brought_or
from podium.ops import action_values
from podium.ranges import check_config
from podium.replay import Batch
from podium.types import Array, Key, PyTree, Trajectory


@dataclasses.dataclass(frozen=True)
class Config(dqn.Config):
    """Hyperparameters of VDN, those of DQN: a transition is the team's, and a step one of the environment."""


def loss(config: dqn.Config, values: dqn.Values, batch: Batch) -> tuple[Array, Aux]:
    """Return the mean Huber loss of the team's TD error, metrics, and |TD error| [B].

        y = R + discount * sum_n Q_target_n(o'_n, argmax_a Q_n(o'_n, a)),   error = y - sum_n Q_n(o_n, a_n)

    Args:
      config: hyperparameters.
      values: action values, [B, N, A] of N agents.
      batch: n-step transitions of teams: actions [B, N], rewards and all else [B].
    """
    next_value = action_values.select(values.next_target_value, dqn.bootstrap_action(config, values))
    value = action_values.select(values.value, batch.action)
    return dqn.td_loss(config, value.sum(-1), next_value.sum(-1), batch)


def of_team(trajectory: Trajectory) -> Trajectory:
    """Return what happened to the team: its reward, and whether a step is one of anybody's, [T, B]."""
    valid = trajectory.valid
    alive = valid if valid is None or valid.ndim == trajectory.terminated.ndim else valid.any(-1)
    return trajectory._replace(reward=trajectory.reward.mean(-1), valid=alive)


def make(config: Config = Config(), network: Network | None = None, loss: dqn.Loss = loss) -> Agent:
    """Make a VDN agent for environments with several agents that act together.

    Args:
      config: hyperparameters.
      network: of one agent, as of `dqn.make`; all share it.
      loss: `(config, values, batch) -> (scalar, Aux)`; change VDN by passing another.

    Returns:
      an `Agent` with a `Replay` of the team's steps.

    Raises:
      ValueError: as `dqn.make`; from `init`, for an environment of one agent.
    """
    check_config(config, Config)
    again = functools.partial(make, network=network, loss=loss)
    network = brought_or(network, config.network)
    each = shared(dqn.make(config, network)._replace(replay=None))  # Acts; it would learn for itself.
    team = dqn.make(config, _of_all(network), loss)  # Learns; its network sees all agents at once.

    def plan(key: Key, state: dqn.State, trajectory: Trajectory) -> Plan:
        return Plan(replay.transitions(of_team(trajectory)))

    def observe(state: dqn.State, trajectory: Trajectory) -> dqn.State:
        return team.observe(state, of_team(trajectory))

    return each._replace(
        plan=plan,
        grad=team.grad,
        observe=observe,
        replay=team.replay,
        name="vdn",
        config=config,
        make=again,
        transforms=(),
        brought=brought_to(again),
    )


def _of_all(network: Network) -> Network:
    """Return the network for observations [B, N, ...] of N agents, [B, N, A] of values."""

    def unroll(params: PyTree, memory: PyTree, obs: PyTree, first: Array) -> Any:
        number = jax.tree.leaves(obs)[0].shape[1]
        value = network.unroll(params, memory, fold(obs, 0), jnp.repeat(first, number))
        return unfold(value, 0, number)

    return network._replace(unroll=unroll)
