"""What actors are and give: the `Actor` protocol, and the `Experience` that a learner takes from one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from podium.placement.compiled.rollouts import Rollout
from podium.placement.threads.supervision import Heartbeat
from podium.types import PyTree

STATS = ("episodes", "episode_return_sum", "episode_length_sum", "valid_steps", "env_seconds", "inference_seconds")
"""What an actor counts in a rollout."""


class Experience(NamedTuple):
    """A rollout [T, E, ...] of one actor.

    Attributes:
      rollout: on the actor's device; None where only its statistics have come.
      version: updates behind the parameters that acted.
      stats: counts and seconds, to be added up.
      maxima: numbers of which the largest counts.
    """

    rollout: Rollout | None
    version: int
    stats: dict[str, float]
    maxima: dict[str, float] = {}


Following = Callable[[], PyTree | None]
"""Returns the parameters that the next rollout will be played with, or None where they are not known yet."""


def nothing_yet() -> None:
    """Return None: a `Following` that lets no rollout begin before the one before it has ended."""


class Actor(Protocol):
    """Some environments, and the compiled functions that act in them.

    Attributes:
      standing: where the environments stand, a `RolloutState` that may be replaced; `()` for those on the host.
    """

    standing: Any

    def play(
        self,
        params: PyTree,
        version: int,
        iteration: int,
        heartbeat: Heartbeat,
        following: Following = nothing_yet,
    ) -> Experience:
        """Play one rollout.

        Args:
          params: to act with.
          version: updates behind them.
          iteration: number of this rollout, from which its keys derive.
          heartbeat: called after every step, or once where all steps are one; may raise, and the rollout is lost.
          following: asked towards the end, by an actor that can let the next rollout begin while this one ends.
        """
        ...

    def close(self) -> None:
        """Release the environments; may be called twice."""
        ...


MakeActor = Callable[..., Actor]
"""`(run_key, seed, first_index, standing=None) -> Actor`: of the environments numbered from `first_index` on.

They start from `seed`, or stand where `standing` says.
"""


def seed_after(seed: int, failures: int) -> int:
    """Return the seed of what is made anew: after a failure episodes are others than those before it."""
    return (seed + failures * 0x9E3779B1) % 2**31
