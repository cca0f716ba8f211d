"""The compiled functions of acting apart from a learner: step by step on the host, or a rollout as one program."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podium import episodes, keys
from podium.agent import Agent, fresh_carry
from podium.env import Env
from podium.placement.devices import at, jit
from podium.placement.table import nbytes
from podium.rollout import RolloutState, begin, rollout
from podium.types import Array, EnvSpec, Key, PyTree, TimeStep, Trajectory


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

    The environments form `groups` of E neighbours, which are acted for one by one; their rollout is one.
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

    def blank_trajectory(self, params: PyTree) -> Trajectory:
        """Return a rollout of zeros as it travels, of environments that are one group."""
        carry = self.carry(0)
        return trajectory_of(self.blank(params), carry, carry, jnp.zeros((), jnp.int32))

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
