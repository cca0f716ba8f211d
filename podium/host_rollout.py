"""A rollout of environments on the CPU under way: its rows, and where a batch of environments stands between steps."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from podium.agent import Agent
from podium.episodes import gained
from podium.host import HostEnv
from podium.ops.returns import discounted_sum
from podium.rollout import Rollout
from podium.types import PyTree, TimeStep


class StepResult(NamedTuple):
    """What a step brought, [E]; `next_obs` only where environments reset in the same step, `valid` only elsewhere.

    `turn` only where two take turns.
    """

    reward: Any
    terminated: Any
    truncated: Any
    next_obs: PyTree | None
    valid: Any | None
    turn: Any | None = None


class Rows(NamedTuple):
    """A rollout under way, [T, E, ...]: what acting knew and did, and what came of it.

    `obs` has a row more where environments reset in the next step, so that what it holds is also every `next_obs`.
    """

    obs: PyTree
    first: Any
    action: Any
    extras: PyTree
    result: StepResult

    def rollout(self, carry: PyTree, end_carry: PyTree, version: Any) -> Rollout:
        """Return the rollout as it travels, once it has ended."""
        acted = {name: value for name, value in self._asdict().items() if name != "result"}
        return Rollout(**acted, **self.result._asdict(), carry=carry, end_carry=end_carry, policy_version=version)


def rows_of(rollout: Rollout) -> Rows:
    """Return the rows of a rollout; shapes will do."""
    result = StepResult(*(getattr(rollout, name) for name in StepResult._fields))
    return Rows(rollout.obs, rollout.first, rollout.action, rollout.extras, result)


def result_of(timestep: TimeStep, resets_in_next_step: bool) -> StepResult:
    """Return the part of a TimeStep that goes into a rollout."""
    of_agents = timestep.valid is not None and timestep.valid.ndim > 1
    if (timestep.valid is None or of_agents) == resets_in_next_step:
        raise ValueError(
            "a host environment's TimeStep.valid must be None in every step where it resets in the same step, and an "
            "array in every step where it resets in the next; HostEnvFactory says "
            f"resets_in_next_step={resets_in_next_step}."
        )
    next_obs = None if resets_in_next_step else timestep.next_obs
    return StepResult(timestep.reward, timestep.terminated, timestep.truncated, next_obs, timestep.valid, timestep.turn)


class EnvBatch:
    """One batch of environments between steps: where it stands, and its episodes so far.

    Args:
      env: the batch.
      agent: that acts.
      resets_in_next_step: as `HostEnvFactory` says.

    Attributes:
      env: the batch.
      obs: to act on next.
      first: [E], whether `obs` begins an episode.
      result: of the last step.
      past: [E] float32, discounted sums of rewards (`Trajectory.past`); None for an agent without `reward_discount`.
    """

    def __init__(self, env: HostEnv, agent: Agent, resets_in_next_step: bool):
        self.env, self._next_step, self._gamma = env, resets_in_next_step, agent.reward_discount
        self.past = None if self._gamma is None else np.zeros(env.num_envs, np.float32)
        timestep = env.reset()
        self.obs = timestep.obs
        self.first = np.ones(env.num_envs, bool)
        self.result = result_of(timestep, self._next_step)
        self._return, self._length = np.zeros(env.num_envs), np.zeros(env.num_envs)
        self._sign = np.ones(env.num_envs)  # Of who moved first, where two take turns.

    def receive(self, stats: dict[str, float]) -> None:
        """Wait for the step that was sent; count the episodes that ended."""
        timestep = self.env.recv()
        self.result = result_of(timestep, self._next_step)
        self.obs = timestep.obs
        reward, self._sign = gained(timestep, self._sign)
        last = np.asarray(timestep.last)
        end = timestep.info.get("episode_end", last)
        if not self._next_step:
            self.first, steps = last, self.env.num_envs
            self._return += reward
            self._length += 1
        else:
            assert timestep.valid is not None
            valid = np.asarray(timestep.valid)
            # After a lost life the next row is real at once; after an end that is none, and the one after it is.
            self.first, steps = ~valid | last, int(valid.sum())
            self._return += np.where(valid, reward, 0)
            self._length += valid
            end = end & valid
        stats["valid_steps"] += steps
        if "nonfinite" in timestep.info:
            stats["nonfinite_steps"] += float(np.sum(timestep.info["nonfinite"]))
        if self._gamma is not None:
            rewards = timestep.reward, timestep.terminated
            past = discounted_sum(self.past, *rewards, self._gamma, timestep.valid)
            self.past = np.asarray(past, np.float32)
        if not end.any():  # Most of the time; what follows takes as long as all before it.
            return
        stats["episodes"] += float(end.sum())
        stats["episode_return_sum"] += self._return[end].sum()
        stats["episode_length_sum"] += self._length[end].sum()
        self._return[end] = self._length[end] = 0
