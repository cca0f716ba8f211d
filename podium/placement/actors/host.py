"""Actors of environments on the CPU: groups of them step in threads while others are acted for, step by step."""

from __future__ import annotations

import collections
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from podium import keys
from podium.agent import acted, fresh_carry, fresh_past
from podium.devices import at, jit
from podium.film import Film, blank, is_film
from podium.host import HostEnv, HostEnvFactory
from podium.host_rollout import EnvBatch, Rows, StepResult, rows_of
from podium.ops import stacks
from podium.placement.contract import STATS, Acting, Experience, Following, MakeActor, nothing_yet
from podium.placement.threads.supervision import Heartbeat, run_together
from podium.report import nbytes
from podium.rollout import Rollout, scaled, zeros
from podium.types import Array, Key, PyTree, is_spec


@dataclasses.dataclass(frozen=True)
class HostActing(Acting):
    """The functions of an actor of `num_envs` environments on the CPU, T = `length` steps a rollout.

    The environments form `groups` of E neighbours, which are acted for one by one; their rollout is one.
    """

    env: HostEnvFactory
    groups: int = 1
    on_host: ClassVar[bool] = True

    @property
    def group_size(self) -> int:
        """Return E."""
        return self.num_envs // self.groups

    def begin(self, key: Key, index: Array) -> tuple[()]:
        """Return `()`: the environments stand outside the state of a run."""
        return ()

    def shapes(self, length: int, num_envs: int) -> Rollout:
        """Return the shapes of a rollout of so many steps and environments."""

        def play(key: Key) -> Rollout:
            params = self.agent.actor(self.agent.init(key, self.spec))
            obs = jax.tree.map(lambda spec: spec.zeros(1), self.spec.obs, is_leaf=is_spec)
            carry, yes = fresh_carry(self.agent, self.spec, jnp.arange(1)), jnp.ones(1, bool)
            output = acted(self.agent, self.spec, jax.random.split(key, 1), params, carry, obs, yes, False)
            action, extras = jax.tree.map(lambda x: x[None], (output.action, output.extras))
            in_next = self.env.resets_in_next_step
            rows = blank(self.spec.obs, 2) if in_next else jax.tree.map(lambda x: x[None], obs)
            agents = () if self.spec.num_agents is None else (self.spec.num_agents,)
            reward = jnp.zeros((1, 1, *agents))
            result = StepResult(reward, yes[None], yes[None], None if in_next else rows, None)
            turn = jnp.ones((1, 1)) if self.spec.turns else None
            result = result._replace(valid=reward == 0 if in_next or agents else None, turn=turn)
            played = Rows(rows, yes[None], action, extras, result).rollout(carry, carry, jnp.zeros((), jnp.int32))
            return played._replace(past=fresh_past(self.agent, 1))

        return scaled(jax.eval_shape(play, jax.random.key(0)), length, num_envs)

    def obs_shapes(self, number: int) -> PyTree:
        """Return the shapes of what so many environments show."""
        return jax.eval_shape(lambda: jax.tree.map(lambda spec: spec.zeros(number), self.spec.obs, is_leaf=is_spec))

    def rows(self) -> Rows:
        """Return the shapes of a rollout under way."""
        return rows_of(self.shapes(self.length, self.num_envs))

    def carry(self, first_index: Array | int) -> PyTree:
        """Return the agent's memory at the start, for a group whose environments are numbered from `first_index` on."""
        return fresh_carry(self.agent, self.spec, first_index + jnp.arange(self.group_size))

    def step_keys(self, run_key: Key, iteration: Array, first_index: Array) -> Key:
        """Return the keys [T, E] to act with for a group in an iteration: those of a fused rollout."""
        rollout_key = keys.iteration(run_key, iteration).rollout
        index = first_index + jnp.arange(self.group_size)
        start = jnp.zeros(self.group_size, jnp.uint32)
        return keys.at_times(keys.environment_keys(rollout_key, index), start, self.length)

    def start(self, rows: Rows, group: Array, obs: PyTree) -> Rows:
        """Note what is older, of the stacks that a group sees at the start, than their newest frame."""

        def put(rows: Array | Film, obs: Array) -> Any:
            if not isinstance(rows, Film):
                return rows
            older = jnp.stack([stacks.frame_of(obs, place, rows.frames.shape[-1]) for place in range(rows.deep)])
            return rows._replace(frames=self._put_at(rows.frames, older, 0, group))

        return rows._replace(obs=jax.tree.map(put, rows.obs, obs, is_leaf=is_film))

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
        result: StepResult,
    ) -> tuple[Rows, PyTree, Array]:
        """Act at `time` for a group, and note beside it the result of the step before."""
        output = self.agent.act(step_keys[time], params, carry, obs, first, False)
        seen = self._put_obs(rows.obs, obs, time, group)
        first, action, extras = self._put(rows[1:4], (first, output.action, output.extras), time, group)
        # At the start there is no step before; what is written then is written over.
        result = self._put(rows.result, result, jnp.maximum(time - 1, 0), group)
        return Rows(seen, first, action, extras, result), output.carry, output.action

    def end(self, rows: Rows, group: Array, obs: PyTree, result: StepResult) -> Rows:
        """Note the result of a group's last step."""
        rows = rows._replace(result=self._put(rows.result, result, self.length - 1, group))
        in_next = self.env.resets_in_next_step
        return rows._replace(obs=self._put_obs(rows.obs, obs, self.length, group)) if in_next else rows

    def _put_obs(self, rows: PyTree, obs: PyTree, time: Array | int, group: Array) -> Any:
        """Note what a group sees; of stacks the newest frame."""

        def put(rows: Array | Film, obs: Array) -> Any:
            if not isinstance(rows, Film):
                return self._put(rows, obs, time, group)
            width, deep = rows.frames.shape[-1], rows.deep
            newest, anew = stacks.frame_of(obs, deep, width), stacks.is_one_frame(obs, width)
            return Film(self._put(rows.frames, newest, time + deep, group), self._put(rows.anew, anew, time, group))

        return jax.tree.map(put, rows, obs, is_leaf=is_film)

    def _put(self, rows: PyTree, values: PyTree, time: Array | int, group: Array) -> Any:
        return jax.tree.map(lambda rows, values: self._put_at(rows, values[None], time, group), rows, values)

    def _put_at(self, rows: Array, values: Array, time: Array | int, group: Array) -> Array:
        """Write values [rows, E, ...] of a group from `time` on."""
        return jax.lax.dynamic_update_slice(rows, values, (time, group * self.group_size, *[0] * (rows.ndim - 2)))

    def finish(self, rows: Rows, carry: Sequence[PyTree], end_carry: Sequence[PyTree], version: Array) -> Rollout:
        """Return the rollout as it travels, given what each group remembered."""
        join = lambda each: jax.tree.map(lambda *x: jnp.concatenate(x), *each)
        return rows.rollout(join(carry), join(end_carry), version)

    def compile(self, params: PyTree, device: jax.Device, keeps: bool = False) -> MakeActor:
        """Compile for a device, and return what makes actors there; `keeps` is for actors that can play again."""
        compiled = CompiledHostActing(self, params, device)
        return lambda run_key, seed, first_index, standing=None: HostActor(compiled, run_key, seed, first_index)

    def in_python(self, params: PyTree, device: jax.Device) -> MakeActor:
        """Return what makes actors whose loops are Python's: all actors on the host are."""
        return self.compile(params, device)

    def bytes_moved(self, num_envs: int) -> dict[str, int]:
        """Return what goes up to the device and comes down from it in a rollout of so many environments."""
        step = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), self.rows())
        parts, length, seen = num_envs // self.num_envs, self.length, self.obs_shapes(self.num_envs)
        return {
            # What the last step returned goes up twice: into the rollout that ends, and into the one that begins.
            "observations": parts * ((length + 1) * nbytes((seen, step.result)) + length * nbytes(step.first)),
            "actions": parts * length * nbytes(step.action),
        }


class CompiledHostActing:
    """`HostActing` compiled for one device."""

    def __init__(self, acting: HostActing, params: PyTree, device: jax.Device):
        def compiled(function: Callable[..., Any], *shapes: Any, uses_up: tuple[int, ...] = ()) -> Any:
            return jit(function, device, uses_up).lower(*at(shapes, device)).compile()

        self.acting, rows = acting, acting.rows()
        row = jax.tree.map(lambda x: jax.ShapeDtypeStruct((acting.group_size, *x.shape[2:]), x.dtype), rows)
        number, key = jax.ShapeDtypeStruct((), np.int32), jax.eval_shape(lambda: jax.random.key(0))
        carry = jax.eval_shape(acting.carry, number)
        step_keys = jax.eval_shape(acting.step_keys, key, number, number)
        self.step_keys = compiled(acting.step_keys, key, number, number)
        self.blank = compiled(lambda: zeros(rows))
        self.carry = compiled(acting.carry, number)
        seen = acting.obs_shapes(acting.group_size)
        films = any(map(is_film, jax.tree.leaves(rows.obs, is_leaf=is_film)))
        self.start = compiled(acting.start, rows, number, seen, uses_up=(0,)) if films else None
        step = rows, params, step_keys, number, number, carry, seen, row.first, row.result
        self.step = compiled(acting.step, *step, uses_up=(0,))
        self.end = compiled(acting.end, rows, number, seen, row.result, uses_up=(0,))
        carries = [carry] * acting.groups
        self.finish = compiled(acting.finish, rows, carries, carries, number, uses_up=(0,))


class RolloutBuffer:
    """A rollout under way, of groups that act and step each in a thread of its own.

    Attributes:
      rows: of all groups; a step of one group uses them up and returns others, so it holds `lock`.
      carry: the agent's memory where each group began the rollout.
      end_carry: the agent's memory where each group ended the rollout.
      past: discounted sums of rewards where each group began the rollout, or None.
    """

    def __init__(self, compiled: CompiledHostActing, rows: Rows):
        self.rows, self.lock = rows, threading.Lock()
        self.carry: list[PyTree] = [None] * compiled.acting.groups
        self.end_carry, self.past = list(self.carry), list(self.carry)

    def whole_past(self) -> np.ndarray | None:
        """Return `past` of all groups, [E]."""
        return None if self.past[0] is None else np.concatenate(self.past)


class ActingGroup(EnvBatch):
    """A batch of environments that is acted for, rollout after rollout.

    Args:
      env: the batch.
      number: of this group, among the groups whose rollout is one.
      first_index: global number of the first environment.
      compiled: functions to act with.

    Attributes:
      buffer: of the rollout that it has begun and not ended, if any.
    """

    def __init__(self, env: HostEnv, number: int, first_index: int, compiled: CompiledHostActing):
        super().__init__(env, compiled.acting.agent, compiled.acting.env.resets_in_next_step)
        self.buffer: RolloutBuffer | None = None
        self._number, self._first_index, self._compiled = number, first_index, compiled
        self._carry = compiled.carry(np.int32(first_index))

    def begin(self, buffer: RolloutBuffer, run_key: Key, iteration: int) -> None:
        """Begin a rollout."""
        self.buffer, self._time = buffer, 0
        self._step_keys = self._compiled.step_keys(run_key, np.int32(iteration), np.int32(self._first_index))
        buffer.carry[self._number], buffer.past[self._number] = self._carry, self.past
        if self._compiled.start is not None:
            with buffer.lock:
                buffer.rows = self._compiled.start(buffer.rows, np.int32(self._number), self.obs)

    def act(self, params: PyTree, stats: dict[str, float]) -> None:
        """Act, and let the environments step."""
        assert self.buffer is not None
        began, place = time.perf_counter(), (np.int32(self._time), np.int32(self._number))
        with self.buffer.lock:
            self.buffer.rows, self._carry, action = self._compiled.step(
                self.buffer.rows, params, self._step_keys, *place, self._carry, self.obs, self.first, self.result
            )
        self._time += 1
        self.env.send(np.asarray(action))
        stats["inference_seconds"] += time.perf_counter() - began

    def wait(self, stats: dict[str, float], heartbeat: Heartbeat) -> None:
        """Wait for the step."""
        began = time.perf_counter()
        self.receive(stats)
        stats["env_seconds"] += time.perf_counter() - began
        heartbeat()

    def end(self) -> None:
        """End the rollout."""
        assert self.buffer is not None
        with self.buffer.lock:
            self.buffer.rows = self._compiled.end(self.buffer.rows, np.int32(self._number), self.obs, self.result)
        self.buffer.end_carry[self._number] = self._carry
        self.buffer = None


class HostActor:
    """An `Actor` of environments on the CPU, in groups with a thread each: one steps while another is acted for.

    Args:
      compiled: functions to act with.
      run_key: of the run.
      seed: of the environments' randomness.
      first_index: global number of the first environment.
    """

    def __init__(self, compiled: CompiledHostActing, run_key: Key, seed: int, first_index: int):
        self.standing, self._compiled, self._run_key = (), compiled, run_key
        self._groups: list[ActingGroup] = []
        self._begun: RolloutBuffer | None = None
        self._spent: collections.deque[Rows] = collections.deque()
        make, size = compiled.acting.env.make, compiled.acting.group_size
        try:
            for number, index in enumerate(range(first_index, first_index + compiled.acting.num_envs, size)):
                self._groups.append(ActingGroup(make(size, seed, index), number, index, compiled))
        except BaseException:
            self.close()
            raise

    def play(
        self, params: PyTree, version: int, iteration: int, heartbeat: Heartbeat, following: Following = nothing_yet
    ) -> Experience:
        """Play one rollout. No group waits for the last steps of the others to begin the next."""
        buffer, self._begun = self._begun or self._new_buffer(), None
        ask = functools.cache(following)  # Once, for all groups.

        def play(group: ActingGroup, heartbeat: Heartbeat) -> dict[str, float]:
            stats = dict.fromkeys(STATS, 0.0)
            if group.buffer is None:
                group.begin(buffer, self._run_key, iteration)
                group.act(params, stats)
            for _ in range(1, self._compiled.acting.length):
                group.wait(stats, heartbeat)
                group.act(params, stats)
            group.wait(stats, heartbeat)
            group.end()
            with buffer.lock:
                ahead = ask()
                if ahead is not None and self._begun is None:
                    self._begun = self._new_buffer()
            if self._begun is not None:
                group.begin(self._begun, self._run_key, iteration + 1)
                group.act(ahead, stats)
            return stats

        all_stats = run_together([functools.partial(play, group) for group in self._groups], heartbeat)
        rollout = self._compiled.finish(buffer.rows, buffer.carry, buffer.end_carry, np.int32(version))
        rollout = rollout._replace(past=buffer.whole_past())
        stats = {name: sum(each[name] for each in all_stats) for name in STATS}
        # Those of a thread: all groups take theirs at the same time.
        seconds = {name: stats[name] / len(all_stats) for name in ("env_seconds", "inference_seconds")}
        return Experience(rollout, version, stats | seconds, reuse=lambda spent: self._spent.append(rows_of(spent)))

    def _new_buffer(self) -> RolloutBuffer:
        # Every row is written anew. On a CPU new memory costs more than what is done with it: page faults.
        return RolloutBuffer(self._compiled, self._spent.popleft() if self._spent else self._compiled.blank())

    def close(self) -> None:
        """Release the environments."""
        for group in self._groups:
            group.env.close()
