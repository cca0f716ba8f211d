"""Play rollouts apart from the learner: of host environments step by step, of pure ones as one compiled program."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from podium import episodes, keys
from podium.agent import Agent, fresh_carry
from podium.env import Env
from podium.host import HostEnv, HostEnvs
from podium.placement.devices import at, jit
from podium.placement.table import nbytes
from podium.rollout import RolloutState, begin, rollout
from podium.types import Array, EnvSpec, Key, PyTree, TimeStep, Trajectory

SUMS = ("episodes", "episode_return_sum", "episode_length_sum", "valid_steps", "env_seconds", "inference_seconds")
"""What a player counts in a rollout."""


class Played(NamedTuple):
    """A rollout: trajectories [T, E, ...] of each group of environments in their order, and counts to be added up."""

    trajectories: list[Trajectory]
    sums: dict[str, float]


class Player(Protocol):
    """Some environments, and the compiled functions that act in them."""

    def play(self, params: PyTree, version: int, iteration: int, tick: Callable[[], None]) -> Played:
        """Play one rollout.

        Args:
          params: to act with.
          version: updates behind them.
          iteration: number of this rollout, from which its keys derive.
          tick: called after every step, or once where all steps are one; may raise, and then the rollout is lost.
        """
        ...

    def close(self) -> None:
        """Release the environments."""
        ...


class Rows(NamedTuple):
    """A rollout under way, [T, E, ...]: what acting knew and did, and what came of it.

    `obs` has a row more where environments reset in the next step, so that what it holds is also every `next_obs`.
    """

    obs: PyTree
    first: Array
    action: Array
    extras: PyTree
    result: Result


class Result(NamedTuple):
    """What a step brought, [E]; `next_obs` only where environments reset in the same step, `valid` only elsewhere."""

    reward: Any
    terminated: Any
    truncated: Any
    next_obs: PyTree | None
    valid: Any | None


def result_of(timestep: TimeStep, resets_in_next_step: bool) -> Result:
    """Return the part of a TimeStep that goes into a trajectory."""
    if (timestep.valid is None) == resets_in_next_step:
        raise ValueError(
            "a host environment's TimeStep.valid must be None in every step where it resets in the same step, and an "
            f"array in every step where it resets in the next; HostEnvs says resets_in_next_step={resets_in_next_step}."
        )
    next_obs = None if resets_in_next_step else timestep.next_obs
    return Result(timestep.reward, timestep.terminated, timestep.truncated, next_obs, timestep.valid)


@dataclasses.dataclass(frozen=True)
class Acting:
    """The compiled functions of acting for one group of `num_envs` environments, T = `length` steps a rollout."""

    agent: Agent
    spec: EnvSpec
    num_envs: int
    length: int
    resets_in_next_step: bool

    def blank(self, params: PyTree) -> Rows:
        """Return zeros."""
        lead = (self.length, self.num_envs)
        rows = self.length + 1 if self.resets_in_next_step else self.length
        is_spec = lambda x: hasattr(x, "zeros")  # noqa: E731
        zeros = lambda spec: jnp.zeros((rows, self.num_envs, *spec.shape), spec.dtype)  # noqa: E731
        obs = jax.tree.map(zeros, self.spec.obs, is_leaf=is_spec)
        first = jnp.zeros(lead, bool)

        def act(params: PyTree, obs: PyTree) -> Any:
            act_keys = jax.random.split(jax.random.key(0), self.num_envs)
            return self.agent.act(act_keys, params, self.carry(0), obs, jnp.ones(self.num_envs, bool), False)

        shapes = jax.eval_shape(act, params, jax.tree.map(lambda x: x[0], obs))
        tile = lambda x: jnp.zeros((self.length, *x.shape), x.dtype)  # noqa: E731
        next_obs = None if self.resets_in_next_step else obs
        valid = first if self.resets_in_next_step else None
        result = Result(jnp.zeros(lead, jnp.float32), first, first, next_obs, valid)
        return Rows(obs, first, tile(shapes.action), jax.tree.map(tile, shapes.extras), result)

    def bytes_moved(self, params: PyTree, num_envs: int) -> dict[str, int]:
        """Return what goes up to the device and comes down from it in a rollout of so many environments in groups."""
        step = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), jax.eval_shape(self.blank, params))
        groups, length = num_envs // self.num_envs, self.length
        return {
            # What the last step returned goes up twice: into the rollout that ends, and into the one that begins.
            "observations": groups * ((length + 1) * nbytes((step.obs, step.result)) + length * nbytes(step.first)),
            "actions": groups * length * nbytes(step.action),
        }

    def carry(self, first_index: Array | int) -> PyTree:
        """Return the agent's memory at the start, for the environments numbered from `first_index` on."""
        return fresh_carry(self.agent, self.spec, first_index + jnp.arange(self.num_envs))

    def step_keys(self, run_key: Key, iteration: Array, first_index: Array) -> Key:
        """Return the keys [T, E] to act with in an iteration: those of a fused rollout."""
        rollout_key = keys.iteration(run_key, iteration).rollout
        index = first_index + jnp.arange(self.num_envs)
        start = jnp.zeros(self.num_envs, jnp.uint32)
        return keys.at_times(keys.environment_keys(rollout_key, index), start, self.length)

    def step(
        self,
        rows: Rows,
        params: PyTree,
        step_keys: Key,
        time: Array,
        carry: PyTree,
        obs: PyTree,
        first: Array,
        came: Result,
    ) -> tuple[Rows, PyTree, Array]:
        """Act at `time`, and note beside it what came of the step before."""
        output = self.agent.act(step_keys[time], params, carry, obs, first, False)
        put = lambda rows, row, at: jax.tree.map(lambda x, y: x.at[at].set(y), rows, row)  # noqa: E731
        rows = Rows(
            put(rows.obs, obs, time),
            put(rows.first, first, time),
            put(rows.action, output.action, time),
            put(rows.extras, output.extras, time),
            # At the start there is no step before; what is written then is written over.
            put(rows.result, came, jnp.maximum(time - 1, 0)),
        )
        return rows, output.carry, output.action

    def finish(
        self, rows: Rows, came: Result, obs: PyTree, carry: PyTree, end_carry: PyTree, version: Array
    ) -> Trajectory:
        """Return the rollout, with what came of its last step, as it travels; `complete` makes it whole."""
        put_last = lambda rows, row: jax.tree.map(lambda x, y: x.at[-1].set(y), rows, row)  # noqa: E731
        result = put_last(rows.result, came)
        flags = result.terminated, result.truncated
        return Trajectory(
            put_last(rows.obs, obs) if self.resets_in_next_step else rows.obs,
            rows.action,
            result.reward,
            *flags,
            result.next_obs,
            rows.first,
            rows.extras,
            carry,
            end_carry,
            version,
            result.valid,
        )


def complete(trajectory: Trajectory) -> Trajectory:
    """Return a trajectory with its `next_obs`, where it travelled as one observation more than there are steps.

    Where the reset waits for the next step, what follows is the true next observation, also at an end.
    """
    if trajectory.next_obs is not None:
        return trajectory
    obs = trajectory.obs
    before, after = jax.tree.map(lambda x: x[:-1], obs), jax.tree.map(lambda x: x[1:], obs)
    return trajectory._replace(obs=before, next_obs=after)


class Group:
    """One batch of environments under way: where it stands between rollouts, and its episodes so far."""

    def __init__(self, env: HostEnv, first_index: int, carry: PyTree, resets_in_next_step: bool):
        self.env, self.first_index, self.carry = env, first_index, carry
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
        if not np.any(end):  # Most of the time; what follows takes as long as all before it.
            return
        sums["episodes"] += float(end.sum())
        sums["episode_return_sum"] += self._return[end].sum()
        sums["episode_length_sum"] += self._length[end].sum()
        self._return[end] = 0
        self._length[end] = 0


class Compiled:
    """`Acting` compiled for one device."""

    def __init__(self, acting: Acting, params: PyTree, device: jax.Device):
        self.acting = acting
        params = at(params, device)
        blank = jax.eval_shape(acting.blank, params)
        row = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), blank)
        number, key = jax.ShapeDtypeStruct((), np.int32), jax.eval_shape(lambda: jax.random.key(0))
        carry = jax.eval_shape(acting.carry, number)
        step_keys = jax.eval_shape(acting.step_keys, key, number, number)
        self.step_keys = jit(acting.step_keys, device).lower(*at((key, number, number), device)).compile()
        self.blank = jit(lambda: acting.blank(params), device).lower().compile()
        self.carry = jit(acting.carry, device).lower(at(number, device)).compile()
        step = at((blank, params, step_keys, number, carry, row.obs, row.first, row.result), device)
        self.step = jit(acting.step, device, (0,)).lower(*step).compile()
        finish = at((blank, row.result, row.obs, carry, carry, number), device)
        self.finish = jit(acting.finish, device, (0,)).lower(*finish).compile()


class HostPlayer:
    """Host environments in groups: one steps while another is acted for.

    Args:
      envs: makes them.
      seed: of their randomness.
      first_index: global number of the first.
      groups: how many batches they form.
      compiled: functions to act with, on some device.
      run_key: of the run.
    """

    def __init__(self, envs: HostEnvs, seed: int, first_index: int, groups: int, compiled: Compiled, run_key: Key):
        self._compiled, self._run_key = compiled, run_key
        self._groups: list[Group] = []
        size = compiled.acting.num_envs
        try:
            for i in range(groups):
                index = first_index + i * size
                env, carry = envs.make(size, seed, index), compiled.carry(np.int32(index))
                self._groups.append(Group(env, index, carry, compiled.acting.resets_in_next_step))
        except BaseException:
            self.close()
            raise

    def play(self, params: PyTree, version: int, iteration: int, tick: Callable[[], None]) -> Played:
        """Play one rollout; see `Player.play`."""
        sums = dict.fromkeys(SUMS, 0.0)
        compiled, run = self._compiled, []
        for group in self._groups:
            step_keys = compiled.step_keys(self._run_key, np.int32(iteration), np.int32(group.first_index))
            run.append([compiled.blank(), step_keys, group.carry])
        for step in range(compiled.acting.length):
            for group, state in zip(self._groups, run, strict=True):
                if step:
                    _receive(group, sums, tick)
                began = time.perf_counter()
                rows, step_keys, carry = state
                rows, carry, action = compiled.step(
                    rows, params, step_keys, np.int32(step), carry, group.obs, group.first, group.came
                )
                state[0], state[2] = rows, carry
                group.env.send(np.asarray(action))
                sums["inference_seconds"] += time.perf_counter() - began
        trajectories = []
        for group, (rows, _, carry) in zip(self._groups, run, strict=True):
            _receive(group, sums, tick)
            trajectories.append(compiled.finish(rows, group.came, group.obs, group.carry, carry, np.int32(version)))
            group.carry = carry
        return Played(trajectories, sums)

    def close(self) -> None:
        """Release the environments."""
        for group in self._groups:
            group.env.close()


def _receive(group: Group, sums: dict[str, float], tick: Callable[[], None]) -> None:
    began = time.perf_counter()
    group.receive(sums)
    sums["env_seconds"] += time.perf_counter() - began
    tick()


@dataclasses.dataclass(frozen=True)
class Fused:
    """The compiled functions of a rollout of `num_envs` pure environments, which reset themselves."""

    agent: Agent
    env: Env
    num_envs: int
    length: int

    def begin(self, key: Key, first_index: Array) -> RolloutState:
        """Reset the environments; `key` is that of a seed."""
        index = first_index + jnp.arange(self.num_envs)
        return begin(keys.roots(key).env, self.env, index, fresh_carry(self.agent, self.env.spec, index))

    def play(
        self, run_key: Key, iteration: Array, params: PyTree, state: RolloutState, version: Array
    ) -> tuple[RolloutState, Trajectory, dict[str, Array]]:
        """Play a rollout, and count."""
        key = keys.iteration(run_key, iteration).rollout
        state, trajectory, ended = rollout(key, self.agent, self.env, params, state, self.length, version)
        valid = trajectory.reward.size if trajectory.valid is None else jnp.sum(trajectory.valid)
        return state, trajectory, {**episodes.summarize(ended), "valid_steps": jnp.asarray(valid, jnp.float32)}

    def trajectory(self) -> Trajectory:
        """Return the shapes of what `play` gives."""
        key = jax.eval_shape(lambda: jax.random.key(0))
        number = jax.ShapeDtypeStruct((), jnp.int32)
        params = jax.eval_shape(lambda key: self.agent.actor(self.agent.init(key, self.env.spec)), key)
        state = jax.eval_shape(self.begin, key, number)
        return jax.eval_shape(self.play, key, number, params, state, number)[1]


class CompiledFused:
    """`Fused` compiled for one device."""

    def __init__(self, fused: Fused, params: PyTree, device: jax.Device):
        number, key = jax.ShapeDtypeStruct((), np.int32), jax.eval_shape(lambda: jax.random.key(0))
        state = jax.eval_shape(fused.begin, key, number)
        self.begin = jit(fused.begin, device).lower(*at((key, number), device)).compile()
        arguments = at((key, number, params, state, number), device)
        self.play = jit(fused.play, device, (3,)).lower(*arguments).compile()


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

    def play(self, params: PyTree, version: int, iteration: int, tick: Callable[[], None]) -> Played:
        """Play one rollout; see `Player.play`. What acting takes is part of `env_seconds`: all is one program."""
        began = time.perf_counter()
        self._state, trajectory, counts = self._compiled.play(
            self._run_key, np.int32(iteration), params, self._state, np.int32(version)
        )
        sums = dict.fromkeys(SUMS, 0.0) | {name: float(x) for name, x in jax.device_get(counts).items()}
        sums["env_seconds"] = time.perf_counter() - began
        tick()
        return Played([jax.block_until_ready(trajectory)], sums)

    def close(self) -> None:
        """Do nothing: there is nothing to release."""
