"""Play rollouts apart from the learner: of host environments step by step, of pure ones as one compiled program."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import numpy as np

from podium.host import HostEnv, HostEnvs
from podium.placement.acting import Compiled, CompiledFused, Rows, result_of
from podium.placement.cores import OneCore
from podium.placement.together import together
from podium.types import Key, PyTree, Trajectory

SUMS = ("episodes", "episode_return_sum", "episode_length_sum", "valid_steps", "env_seconds", "inference_seconds")
"""What a player counts in a rollout."""


class Played(NamedTuple):
    """A rollout [T, E, ...], and counts to be added up."""

    trajectory: Trajectory
    sums: dict[str, float]


Following = Callable[[], PyTree | None]
"""Returns the parameters that the next rollout will be played with, or None where they are not known yet."""


def nothing_yet() -> None:
    """Return None: a `Following` that lets no rollout begin before the one before it has ended."""


class Player(Protocol):
    """Some environments, and the compiled functions that act in them."""

    def play(
        self,
        params: PyTree,
        version: int,
        iteration: int,
        tick: Callable[[], None],
        following: Following = nothing_yet,
    ) -> Played:
        """Play one rollout.

        Args:
          params: to act with.
          version: updates behind them.
          iteration: number of this rollout, from which its keys derive.
          tick: called after every step, or once where all steps are one; may raise, and then the rollout is lost.
          following: asked towards the end, by a player that can let the next rollout begin while this one ends.
        """
        ...

    def close(self) -> None:
        """Release the environments."""
        ...


class Group:
    """One batch of environments under way: where it stands between steps, and its episodes so far."""

    def __init__(self, env: HostEnv, first_index: int, resets_in_next_step: bool):
        self.env, self.first_index = env, first_index
        self._next_step = resets_in_next_step
        timestep = env.reset()
        self.obs = timestep.obs
        self.first = np.ones(env.num_envs, bool)
        self.came = result_of(timestep, self._next_step)
        self._return = np.zeros(env.num_envs)
        self._length = np.zeros(env.num_envs)

    def receive(self, sums: dict[str, float]) -> None:
        """Wait for the step that was sent; count the episodes that ended."""
        timestep = self.env.recv()
        self.came = result_of(timestep, self._next_step)
        self.obs = timestep.obs
        reward, last = timestep.info.get("raw_reward", timestep.reward), np.asarray(timestep.last)
        end = timestep.info.get("episode_end", last)
        if timestep.valid is None:
            self.first, steps = last, self.env.num_envs
            self._return += reward
            self._length += 1
        else:
            valid = np.asarray(timestep.valid)
            # After a lost life the next row is real at once; after an end that is none, and the one after it is.
            self.first, steps = ~valid | last, int(valid.sum())
            self._return += np.where(valid, reward, 0)
            self._length += valid
            end = end & valid
        sums["valid_steps"] += steps
        if not end.any():  # Most of the time; what follows takes as long as all before it.
            return
        sums["episodes"] += float(end.sum())
        sums["episode_return_sum"] += self._return[end].sum()
        sums["episode_length_sum"] += self._length[end].sum()
        self._return[end] = 0
        self._length[end] = 0


class Rollout:
    """A rollout under way, of groups that act and step each in a thread of its own.

    Args:
      compiled: functions to act with.

    Attributes:
      rows: of it; a step of one group uses them up and returns others, so it holds `lock`.
      carry: the agent's memory where each group began it.
      end_carry: likewise, where it ended it.
    """

    def __init__(self, compiled: Compiled):
        self.rows: Rows = compiled.blank()
        self.lock = threading.Lock()
        self.carry: list[PyTree] = [None] * compiled.acting.groups
        self.end_carry: list[PyTree] = [None] * compiled.acting.groups


class ActingGroup(Group):
    """A `Group` that is acted for, rollout after rollout.

    Args:
      env: of it.
      number: of it, among the groups whose rollout is one.
      first_index: global number of the first environment.
      compiled: functions to act with.

    Attributes:
      rollout: that it has begun and not ended, if any.
    """

    def __init__(self, env: HostEnv, number: int, first_index: int, compiled: Compiled):
        super().__init__(env, first_index, compiled.acting.resets_in_next_step)
        self.rollout: Rollout | None = None
        self._number, self._compiled, self._carry = number, compiled, compiled.carry(np.int32(first_index))

    def begin(self, rollout: Rollout, run_key: Key, iteration: int) -> None:
        """Begin a rollout."""
        self.rollout, self._time = rollout, 0
        self._step_keys = self._compiled.step_keys(run_key, np.int32(iteration), np.int32(self.first_index))
        rollout.carry[self._number] = self._carry

    def act(self, params: PyTree, sums: dict[str, float]) -> None:
        """Act, and let the environments step."""
        assert self.rollout is not None
        began, place = time.perf_counter(), (np.int32(self._time), np.int32(self._number))
        with self.rollout.lock:
            self.rollout.rows, self._carry, action = self._compiled.step(
                self.rollout.rows, params, self._step_keys, *place, self._carry, self.obs, self.first, self.came
            )
        self._time += 1
        self.env.send(np.asarray(action))
        sums["inference_seconds"] += time.perf_counter() - began

    def wait(self, sums: dict[str, float], tick: Callable[[], None]) -> None:
        """Wait for the step."""
        began = time.perf_counter()
        self.receive(sums)
        sums["env_seconds"] += time.perf_counter() - began
        tick()

    def end(self) -> None:
        """End the rollout."""
        assert self.rollout is not None
        with self.rollout.lock:
            self.rollout.rows = self._compiled.end(self.rollout.rows, np.int32(self._number), self.obs, self.came)
        self.rollout.end_carry[self._number] = self._carry
        self.rollout = None


class HostPlayer:
    """Host environments in groups, a thread for each: one steps while another is acted for.

    Args:
      envs: makes them.
      seed: of their randomness.
      first_index: global number of the first.
      compiled: functions to act with, on some device.
      run_key: of the run.
      cores: that it shares with the other players of this process, if there are any.
    """

    def __init__(
        self,
        envs: HostEnvs,
        seed: int,
        first_index: int,
        compiled: Compiled,
        run_key: Key,
        cores: OneCore | None = None,
    ):
        self._compiled, self._run_key, self._cores = compiled, run_key, cores or OneCore(1)
        self._groups: list[ActingGroup] = []
        self._begun: Rollout | None = None
        size = compiled.acting.group_size
        try:
            for number in range(compiled.acting.groups):
                index = first_index + number * size
                self._groups.append(ActingGroup(envs.make(size, seed, index), number, index, compiled))
        except BaseException:
            self.close()
            raise

    def play(
        self,
        params: PyTree,
        version: int,
        iteration: int,
        tick: Callable[[], None],
        following: Following = nothing_yet,
    ) -> Played:
        """Play one rollout; see `Player.play`. No group waits for the last steps of the others to go on, if it may."""
        rollout, self._begun = self._begun or Rollout(self._compiled), None
        ask = functools.cache(following)  # Once, for all groups.

        def play(group: ActingGroup, tick: Callable[[], None]) -> dict[str, float]:
            sums = dict.fromkeys(SUMS, 0.0)
            if group.rollout is None:
                group.begin(rollout, self._run_key, iteration)
                group.act(params, sums)
            for _ in range(1, self._compiled.acting.length):
                group.wait(sums, tick)
                group.act(params, sums)
            group.wait(sums, tick)
            group.end()
            with rollout.lock:
                ahead = ask()
                if ahead is not None and self._begun is None:
                    self._begun = Rollout(self._compiled)
            if self._begun is not None:
                group.begin(self._begun, self._run_key, iteration + 1)
                group.act(ahead, sums)
            return sums

        with self._cores.rollout(iteration):
            all_sums = together([functools.partial(play, group) for group in self._groups], tick)
        trajectory = self._compiled.finish(rollout.rows, rollout.carry, rollout.end_carry, np.int32(version))
        sums = {name: sum(each[name] for each in all_sums) for name in SUMS}
        # Those of a thread: all groups take theirs at the same time.
        seconds = {name: sums[name] / len(all_sums) for name in ("env_seconds", "inference_seconds")}
        return Played(trajectory, sums | seconds)

    def close(self) -> None:
        """Release the environments."""
        for group in self._groups:
            group.env.close()


class FusedPlayer:
    """Pure environments whose whole rollout is one compiled program.

    Args:
      compiled: it, on some device.
      seed: of the environments' randomness.
      first_index: global number of the first.
      run_key: of the run.
    """

    def __init__(self, compiled: CompiledFused, seed: int, first_index: int, run_key: Key):
        self._compiled, self._run_key = compiled, run_key
        self._state = compiled.begin(jax.random.key(seed), np.int32(first_index))

    def play(
        self,
        params: PyTree,
        version: int,
        iteration: int,
        tick: Callable[[], None],
        following: Following = nothing_yet,
    ) -> Played:
        """Play one rollout; see `Player.play`. What acting takes is part of `env_seconds`: all is one program."""
        began = time.perf_counter()
        self._state, trajectory, counts = self._compiled.play(
            self._run_key, np.int32(iteration), params, self._state, np.int32(version)
        )
        sums = dict.fromkeys(SUMS, 0.0) | {name: float(x) for name, x in jax.device_get(counts).items()}
        sums["env_seconds"] = time.perf_counter() - began
        tick()
        return Played(jax.block_until_ready(trajectory), sums)

    def close(self) -> None:
        """Do nothing: there is nothing to release."""
