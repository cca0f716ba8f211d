"""How an agent acts in an environment of either kind: the one place that asks which kind it is."""

from __future__ import annotations

from podium.agent import Agent
from podium.env import Env, auto_reset
from podium.host import HostEnvFactory
from podium.placement.actors.fused import FusedActing
from podium.placement.actors.host import HostActing
from podium.placement.compiled.rollouts import Acting


def make_acting(agent: Agent, env: Env | HostEnvFactory, num_envs: int, length: int, groups: int = 1) -> Acting:
    """Return how an actor acts in `num_envs` environments, T = `length` steps a rollout.

    Args:
      agent: that acts.
      env: pure, or on the CPU.
      num_envs: of one actor, E.
      length: of a rollout.
      groups: batches that environments on the CPU form, which step while others are acted for.
    """
    if isinstance(env, HostEnvFactory):
        return HostActing(agent, env, num_envs, length, groups)
    return FusedActing(agent, auto_reset(env), num_envs, length)
