"""What a user adds from outside the package: an agent, an environment and a placement, registered under names."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import podium
from podium import placement as placements
from podium.agents import ppo


@dataclasses.dataclass(frozen=True)
class Config(ppo.Config):
    """Hyperparameters of an agent of one's own."""

    temper: float = 1.0
    """What every reward's weight is multiplied by, above 0."""
    on_start: Callable[[], None] | None = None
    """Called once; no flag can say it."""


def make(config: Config) -> podium.Agent:
    """Make PPO with another entropy bonus."""
    if not config.temper > 0:
        raise ValueError(f"temper={config.temper} must be greater than 0.")
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(ppo.Config)}
    return ppo.make(ppo.Config(**{**fields, "entropy_coef": config.temper * config.entropy_coef}))


@dataclasses.dataclass(frozen=True)
class Counting(podium.Placement):
    """Run everything as `Single` does, and count the programs made.

    Args:
      limit: programs that may be made in a process, 1 or more.
      learning_rate: named as the agents' is, to be told apart from it.
      loud: whether to say so.
    """

    takes_host_envs: ClassVar[bool] = False
    made: ClassVar[list[Any]] = []

    limit: int = 100
    learning_rate: float = 0.5
    loud: bool = False

    def build(self, agent: podium.Agent, env: Any, **sizes: Any) -> Any:
        """Return the program of `Single`."""
        if len(self.made) >= self.limit:
            raise ValueError(f"limit={self.limit} programs were made already; use {len(self.made) + 1} or more.")
        self.made.append(self)
        return podium.Single().build(agent, env, **sizes)

    def explain(self) -> Any:
        """Say what `Single` says."""
        return podium.Single().explain()


podium.agents.register("tempered", make, Config)
placements.register("counting", Counting)
if "own/Grid" not in podium.envs.names():
    podium.envs.register("own/Grid", lambda rows=4: podium.envs.make("podium/Catch", rows=rows, columns=3))
