"""Play rollouts apart from the learner: of host environments step by step, of pure ones as one compiled program."""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Sequence
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
from podium.placement.together import together
from podium.rollout import RolloutState, begin, rollout
from podium.types import Array, EnvSpec, Key, PyTree, TimeStep, Trajectory

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
    """The compiled functions of acting for `num_envs` environments, T = `length` steps a rollout.

    The environments form `groups` of E neighbours, which are acted for one after another; their rollout is one.
    """

    agent: Agent
    spec: EnvSpec
    num_envs: int
    length: int
    resets_in_next_step: bool
    groups: int = 1

    @property
    def group_size(self) -> int:
        """Return E."""
        return self.num_envs // self.groups

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
            carry = fresh_carry(self.agent, self.spec, jnp.arange(self.num_envs))
            return self.agent.act(act_keys, params, carry, obs, jnp.ones(self.num_envs, bool), False)

        shapes = jax.eval_shape(act, params, jax.tree.map(lambda x: x[0], obs))
        tile = lambda x: jnp.zeros((self.length, *x.shape), x.dtype)  # noqa: E731
        next_obs = None if self.resets_in_next_step else obs
        valid = first if self.resets_in_next_step else None
        result = Result(jnp.zeros(lead, jnp.float32), first, first, next_obs, valid)
        return Rows(obs, first, tile(shapes.action), jax.tree.map(tile, shapes.extras), result)

    def bytes_moved(self, params: PyTree, num_envs: int) -> dict[str, int]:
        """Return what goes up to the device and comes down from it in a rollout of so many environments."""
        step = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), jax.eval_shape(self.blank, params))
        parts, length = num_envs // self.num_envs, self.length
        return {
            # What the last step returned goes up twice: into the rollout that ends, and into the one that begins.
            "observations": parts * ((length + 1) * nbytes((step.obs, step.result)) + length * nbytes(step.first)),
            "actions": parts * length * nbytes(step.action),
        }

    def carry(self, first_index: Array | int) -> PyTree:
        """Return the agent's memory at the start, for a group whose environments are numbered from `first_index` on."""
        return fresh_carry(self.agent, self.spec, first_index + jnp.arange(self.group_size))

    def step_keys(self, run_key: Key, iteration: Array, first_index: Array) -> Key:
        """Return the keys [T, E] to act with for a group in an iteration: those of a fused rollout."""
        rollout_key = keys.iteration(run_key, iteration).rollout
        index = first_index + jnp.arange(self.group_size)
        start = jnp.zeros(self.group_size, jnp.uint32)
        return keys.at_times(keys.environment_keys(rollout_key, index), start, self.length)

    def step(
        self,
        rows: Rows,
        params: PyTree,
        step_keys: Key,
        time: Array,
        group: Array,
        carry: PyTree,
        obs: PyTree,
        first: Array,
        came: Result,
    ) -> tuple[Rows, PyTree, Array]:
        """Act at `time` for a group, and note beside it what came of the step before."""
        output = self.agent.act(step_keys[time], params, carry, obs, first, False)
        rows = Rows(
            self._put(rows.obs, obs, time, group),
            self._put(rows.first, first, time, group),
            self._put(rows.action, output.action, time, group),
            self._put(rows.extras, output.extras, time, group),
            # At the start there is no step before; what is written then is written over.
            self._put(rows.result, came, jnp.maximum(time - 1, 0), group),
        )
        return rows, output.carry, output.action

    def end(self, rows: Rows, group: Array, obs: PyTree, came: Result) -> Rows:
        """Note what came of a group's last step."""
        rows = rows._replace(result=self._put(rows.result, came, self.length - 1, group))
        return rows._replace(obs=self._put(rows.obs, obs, self.length, group)) if self.resets_in_next_step else rows

    def _put(self, rows: PyTree, values: PyTree, time: Array | int, group: Array) -> PyTree:
        def put(rows: Array, values: Array) -> Array:
            return jax.lax.dynamic_update_slice(rows, values[None], (time, first, *[0] * (rows.ndim - 2)))

        first = group * self.group_size
        return jax.tree.map(put, rows, values)

    def finish(self, rows: Rows, carry: Sequence[PyTree], end_carry: Sequence[PyTree], version: Array) -> Trajectory:
        """Return the rollout as it travels, given what each group remembered; `complete` makes it whole."""
        carry, end_carry = (jax.tree.map(lambda *x: jnp.concatenate(x), *each) for each in (carry, end_carry))
        return trajectory_of(rows, carry, end_carry, version)


def trajectory_of(rows: Rows, carry: PyTree, end_carry: PyTree, version: Any) -> Trajectory:
    """Return a rollout that is no longer under way as it travels."""
    result = rows.result
    return Trajectory(
        obs=rows.obs,
        action=rows.action,
        reward=result.reward,
        terminated=result.terminated,
        truncated=result.truncated,
        next_obs=result.next_obs,
        first=rows.first,
        extras=rows.extras,
        carry=carry,
        end_carry=end_carry,
        policy_version=version,
        valid=result.valid,
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
        rows = jax.eval_shape(acting.blank, params)
        row = jax.tree.map(lambda x: jax.ShapeDtypeStruct((acting.group_size, *x.shape[2:]), x.dtype), rows)
        number, key = jax.ShapeDtypeStruct((), np.int32), jax.eval_shape(lambda: jax.random.key(0))
        carry = jax.eval_shape(acting.carry, number)
        step_keys = jax.eval_shape(acting.step_keys, key, number, number)
        self.step_keys = jit(acting.step_keys, device).lower(*at((key, number, number), device)).compile()
        self.blank = jit(lambda: acting.blank(params), device).lower().compile()
        self.carry = jit(acting.carry, device).lower(at(number, device)).compile()
        step = at((rows, params, step_keys, number, number, carry, row.obs, row.first, row.result), device)
        self.step = jit(acting.step, device, (0,)).lower(*step).compile()
        self.end = jit(acting.end, device, (0,)).lower(*at((rows, number, row.obs, row.result), device)).compile()
        carries = [carry] * acting.groups
        self.finish = jit(acting.finish, device, (0,)).lower(*at((rows, carries, carries, number), device)).compile()


class Rollout:
    """A rollout under way, of groups that act and step each in a thread of its own.

    Args:
      compiled: functions to act with.

    Attributes:
      rows: of it; whoever gives them away for others holds `lock`.
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
    """

    def __init__(self, envs: HostEnvs, seed: int, first_index: int, compiled: Compiled, run_key: Key):
        self._compiled, self._run_key = compiled, run_key
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
