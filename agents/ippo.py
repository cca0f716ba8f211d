"""IPPO: independent PPO of agents that share a policy (de Witt et al. 2020, arXiv 2011.09533); see `mappo`."""

from __future__ import annotations

import dataclasses

from podium.agent import Agent
from podium.agents import mappo, ppo
from podium.networks import Network
from podium.ranges import check_config


@dataclasses.dataclass(frozen=True)
class Config(mappo.Config):
    """Hyperparameters of PPO; the critic sees what the policy sees."""

    central_critic: bool = False
    """Whether the critic sees the `world` of observations; with it this is MAPPO."""


def make(config: Config = Config(), network: Network | None = None, loss: ppo.Loss = ppo.loss) -> Agent:
    """Make an agent as `mappo.make` does."""
    check_config(config, Config)
    return mappo.make(config, network, loss)
