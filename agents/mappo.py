"""PPO for agents that act together: MAPPO and IPPO (Yu et al. 2022, arXiv 2103.01955; de Witt et al. 2020, 2011.09533).

One policy for all agents, each of which sees its own `view`. In MAPPO the critic sees the `world` of the environment,
as it may while training: centralised training with decentralised execution. In IPPO it sees no more than the policy.
All else is `podium.agents.ppo` as it is, shared by `podium.multi.shared`: every agent is to it an environment of its
own, so that the loss is a mean over agents, advantages are each one's own, and a dead agent counts for nothing.

Deliberate differences from Yu et al.: no value normalisation (PopArt), and no Huber loss of the value; `value_clip` and
more epochs are there to be set.
"""

from __future__ import annotations

import dataclasses
import functools

from podium.agent import ActOutput, Agent, Plan, brought_to
from podium.agents import ppo
from podium.multi import shared
from podium.networks import Network
from podium.ranges import check_config
from podium.types import Array, EnvSpec, Key, PyTree, Seen, Trajectory


@dataclasses.dataclass(frozen=True)
class Config(ppo.Config):
    """Hyperparameters of PPO, and what the critic sees."""

    central_critic: bool = True
    """Whether the critic sees the `world` of observations; without it this is IPPO."""

    def network(self, separate: bool = False) -> Network:
        """Build it: a critic that sees the `world` shares neither torso nor memory with the policy."""
        return super().network(separate or self.central_critic)


def make(config: Config = Config(), network: Network | None = None, loss: ppo.Loss = ppo.loss) -> Agent:
    """Make an agent for environments with several agents that act together.

    Args:
      config: hyperparameters.
      network: as of `ppo.make`.
      loss: as of `ppo.make`.

    Returns:
      an `Agent`.

    Raises:
      ValueError: as `ppo.make` and `podium.multi.shared`; from `init`, for `central_critic` where observations have no
        `world`.
    """
    check_config(config, Config)
    base = ppo.make(config, network, loss)
    agent = shared(base if config.central_critic else _without_world(base))

    def init(key: Key, spec: EnvSpec) -> PyTree:
        several = spec.num_agents is not None  # Else `shared` refuses it.
        if config.central_critic and several and not (isinstance(spec.obs, Seen) and spec.obs.world is not None):
            raise ValueError(
                f"central_critic=True, but observations of {spec.name} have no world for a critic to see; use "
                "central_critic=False, or the agent ippo."
            )
        return agent.init(key, spec)

    again, name = functools.partial(make, network=network, loss=loss), "mappo" if config.central_critic else "ippo"
    return agent._replace(init=init, name=name, make=again, transforms=(), brought=brought_to(again))


def _without_world(agent: Agent) -> Agent:
    """Return an agent that sees of observations no more than each one's view."""

    def own(obs: PyTree) -> PyTree:
        return obs._replace(world=None) if isinstance(obs, Seen) else obs

    def init(key: Key, spec: EnvSpec) -> PyTree:
        return agent.init(key, dataclasses.replace(spec, obs=own(spec.obs)))

    def act(keys: Key, params: PyTree, carry: PyTree, obs: PyTree, first: Array, greedy: bool) -> ActOutput:
        return agent.act(keys, params, carry, own(obs), first, greedy)

    def seen(trajectory: Trajectory) -> Trajectory:
        return trajectory._replace(obs=own(trajectory.obs), next_obs=own(trajectory.next_obs))

    def plan(key: Key, state: PyTree, trajectory: Trajectory) -> Plan:
        return agent.plan(key, state, seen(trajectory))

    def observe(state: PyTree, trajectory: Trajectory) -> PyTree:
        return agent.observe(state, seen(trajectory))

    return agent._replace(init=init, act=act, plan=plan, observe=observe)
