"""Threads that act: each steps its own host environments with the newest parameters and hands over trajectories."""

from __future__ import annotations

import dataclasses
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podium import keys
from podium.agent import Agent, fresh_carry
from podium.host import HostEnv, HostEnvs
from podium.types import Array, EnvSpec, Key, PyTree, TimeStep, Trajectory

POLL_SECONDS = 0.2
"""How long anything waits before it looks whether the run has ended or a thread has died."""

STOP_SECONDS = 10.0
"""How long a run that ends waits for its threads."""

SUMS = ("episodes", "episode_return_sum", "episode_length_sum", "valid_steps", "env_seconds", "inference_seconds")
"""What an actor counts in a rollout."""


class Stopped(Exception):  # Not an error: how a thread learns that the run is over.
    """The run is over."""


class ActorError(RuntimeError):
    """An actor thread died or hung; the message tells where."""


class Piece(NamedTuple):
    """What one actor hands over: trajectories [T, E, ...] of its groups of environments, and their story.

    Attributes:
      trajectories: on the actor's device, in the order of the environments.
      version: updates behind the parameters that acted.
      sums: counts and seconds, to be added up.
    """

    trajectories: list[Trajectory]
    version: int
    sums: dict[str, float]


class Slot:
    """The newest parameters for one actor device; older ones are forgotten."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._value: tuple[PyTree, int] | None = None

    def put(self, params: PyTree, version: int) -> None:
        """Replace what is there."""
        with self._condition:
            self._value = params, version
            self._condition.notify_all()

    def get(self, at_least: int, stop: threading.Event) -> tuple[PyTree, int]:
        """Wait for parameters of version `at_least` or newer; raises Stopped when the run ends."""
        with self._condition:
            while self._value is None or self._value[1] < at_least:
                if stop.is_set():
                    raise Stopped
                self._condition.wait(POLL_SECONDS)
            return self._value


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
        valid = np.ones(self.env.num_envs, bool) if timestep.valid is None else np.asarray(timestep.valid)
        # After a lost life the next row is real at once; after an end it is the one that is none, and the one after.
        self.first = ~valid | np.asarray(timestep.last)
        self._return += np.where(valid, timestep.info.get("raw_reward", timestep.reward), 0)
        self._length += valid
        end = np.asarray(timestep.info.get("episode_end", timestep.last)) & valid
        sums["episodes"] += end.sum()
        sums["episode_return_sum"] += self._return[end].sum()
        sums["episode_length_sum"] += self._length[end].sum()
        sums["valid_steps"] += valid.sum()
        self._return[end] = 0
        self._length[end] = 0


class Watched(threading.Thread):
    """A thread whose `progress` goes up with every step it does, so that one that died or hangs is noticed.

    Attributes:
      error: what it died of.
      progress: steps done, whatever a step is; waiting for another thread counts as one too.
    """

    def __init__(self, name: str):
        super().__init__(name=name, daemon=True)
        self.error: BaseException | None = None
        self.progress = 0


class Watch:
    """Looks after one thread; for a loop that waits for it and looks again every `POLL_SECONDS` or so.

    Args:
      thread: to look after.
      timeout: seconds without progress after which it counts as hung.
    """

    def __init__(self, thread: Watched, timeout: float):
        self._thread, self._timeout = thread, timeout
        self._seen, self._waited, self._looked = thread.progress, 0.0, time.monotonic()

    def look(self, alive: bool) -> None:
        """Look once; `alive` says whether the thread was, before anything that it could have done last was looked for.

        Raises:
          ActorError: it died, or did not come a step further for `timeout` seconds.
        """
        thread = self._thread
        if thread.error is not None:
            where = "".join(traceback.format_exception(thread.error))
            raise ActorError(f"{thread.name} died of {thread.error!r}.\n{where}") from thread.error
        if not alive:
            raise ActorError(f"{thread.name} ended without a word.")
        # A look that took far longer than it should was none: the process was stopped, or the machine asleep.
        now = time.monotonic()
        moved = thread.progress != self._seen
        self._waited = 0.0 if moved else self._waited + min(now - self._looked, 5 * POLL_SECONDS)
        self._seen, self._looked = thread.progress, now
        if self._waited > self._timeout:
            frame = sys._current_frames().get(thread.ident or 0)
            where = "".join(traceback.format_stack(frame)) if frame else ""
            raise ActorError(f"{thread.name} has not come a step further for {self._timeout:g} s; it is at\n{where}")


def end_threads(threads: Sequence[threading.Thread], stop: threading.Event, seconds: float) -> None:
    """Set `stop`, and wait for `threads` together at most so long; one that hangs in native code stays behind."""
    stop.set()
    deadline = time.monotonic() + seconds
    for thread in threads:
        if thread.ident is not None:
            thread.join(max(0.0, deadline - time.monotonic()))


class Actor(Watched):
    """Plays rollout after rollout, and waits where the learner does not keep up.

    Args:
      number: of this actor, for its name.
      make_env: `(num_envs, first_index) -> HostEnv`.
      first_index: global number of its first environment.
      groups: how many batches its environments form; one steps while another is acted for.
      compiled: functions to act with, on its device.
      run_key: of the run.
      start: iteration that it begins with.
      slot: of its device.
      lockstep: wait for the parameters of every update.
      depth: rollouts that may wait for the learner.
      stop: set when the run is over.
    """

    def __init__(
        self,
        number: int,
        make_env: Callable[[int, int], HostEnv],
        first_index: int,
        groups: int,
        compiled: Compiled,
        run_key: Key,
        start: int,
        slot: Slot,
        lockstep: bool,
        depth: int,
        stop: threading.Event,
    ):
        super().__init__(f"podium-actor-{number}")
        self.pieces: queue.Queue[Piece] = queue.Queue(depth)
        self._idle_seconds = 0.0
        self._make_env, self._first_index, self._groups = make_env, first_index, groups
        self._compiled, self._run_key, self._start, self._slot = compiled, run_key, start, slot
        self._lockstep, self._stop_event = lockstep, stop

    def run(self) -> None:
        """Play until the run ends; an error is kept for the learner to raise."""
        groups: list[Group] = []
        try:
            size = self._compiled.acting.num_envs
            for i in range(self._groups):
                index = self._first_index + i * size
                env, carry = self._make_env(size, index), self._compiled.carry(np.int32(index))
                groups.append(Group(env, index, carry, self._compiled.acting.resets_in_next_step))
            iteration = self._start
            while True:
                self._hand_over(self._play(groups, iteration))
                iteration += 1
        except Stopped:
            pass
        except BaseException as error:  # Whatever it is, the learner must hear of it.
            self.error = error
        finally:
            for group in groups:
                group.env.close()

    def _play(self, groups: list[Group], iteration: int) -> Piece:
        sums = dict.fromkeys(SUMS, 0.0)
        began = time.perf_counter()
        # The first rollout takes whatever there is; in lockstep every other one waits for the update before it.
        params, version = self._slot.get(iteration if self._lockstep else 0, self._stop_event)
        sums["actor_idle_seconds"] = self._idle_seconds + time.perf_counter() - began
        compiled, run = self._compiled, []
        for group in groups:
            step_keys = compiled.step_keys(self._run_key, np.int32(iteration), np.int32(group.first_index))
            run.append([compiled.blank(), step_keys, group.carry])
        for step in range(compiled.acting.length):
            for group, state in zip(groups, run, strict=True):
                if step:
                    self._receive(group, sums)
                began = time.perf_counter()
                rows, step_keys, carry = state
                rows, carry, action = compiled.step(
                    rows, params, step_keys, np.int32(step), carry, group.obs, group.first, group.came
                )
                state[0], state[2] = rows, carry
                group.env.send(np.asarray(action))
                sums["inference_seconds"] += time.perf_counter() - began
        trajectories = []
        for group, (rows, _, carry) in zip(groups, run, strict=True):
            self._receive(group, sums)
            trajectories.append(compiled.finish(rows, group.came, group.obs, group.carry, carry, np.int32(version)))
            group.carry = carry
        return Piece(trajectories, version, sums)

    def _receive(self, group: Group, sums: dict[str, float]) -> None:
        began = time.perf_counter()
        group.receive(sums)
        sums["env_seconds"] += time.perf_counter() - began
        self.progress += 1
        if self._stop_event.is_set():
            raise Stopped

    def _hand_over(self, piece: Piece) -> None:
        """Wait for a place in the queue. What it waited is counted with the next rollout: this one may be gone."""
        began = time.perf_counter()
        while True:
            if self._stop_event.is_set():
                raise Stopped
            try:
                self.pieces.put(piece, timeout=POLL_SECONDS)
            except queue.Full:
                self.progress += 1  # It waits for the learner, and is well.
            else:
                self._idle_seconds = time.perf_counter() - began
                return

    def take(self, timeout: float) -> Piece:
        """Return its next piece.

        Raises:
          ActorError: it died, or did not come a step further for `timeout` seconds.
        """
        watch = Watch(self, timeout)
        while True:
            alive = self.is_alive()
            try:
                return self.pieces.get(timeout=POLL_SECONDS)
            except queue.Empty:
                watch.look(alive)


class Compiled:
    """`Acting` compiled for one device."""

    def __init__(self, acting: Acting, params: PyTree, device: jax.Device):
        self.acting = acting
        here = jax.sharding.SingleDeviceSharding(device)
        jit = lambda function, **options: jax.jit(function, in_shardings=here, out_shardings=here, **options)  # noqa: E731
        place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here)  # noqa: E731
        shapes = lambda *args: jax.tree.map(place, args)  # noqa: E731
        params = jax.tree.map(place, params)
        blank = jax.eval_shape(acting.blank, params)
        row = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), blank)
        number, key = jax.ShapeDtypeStruct((), np.int32), jax.eval_shape(lambda: jax.random.key(0))
        carry = jax.eval_shape(acting.carry, number)
        step_keys = jax.eval_shape(acting.step_keys, key, number, number)
        self.step_keys = jit(acting.step_keys).lower(*shapes(key, number, number)).compile()
        self.blank = jax.jit(lambda: acting.blank(params), out_shardings=here).lower().compile()
        self.carry = jit(acting.carry).lower(*shapes(number)).compile()
        step = shapes(blank, params, step_keys, number, carry, row.obs, row.first, row.result)
        self.step = jit(acting.step, donate_argnums=0).lower(*step).compile()
        finish = shapes(blank, row.result, row.obs, carry, carry, number)
        self.finish = jit(acting.finish, donate_argnums=0).lower(*finish).compile()


def make_actors(
    envs: HostEnvs,
    compiled: list[Compiled],
    threads: int,
    groups: int,
    run_key: Key,
    seed: int,
    start: int,
    slots: list[Slot],
    lockstep: bool,
    depth: int,
    stop: threading.Event,
    first_index: int,
) -> list[Actor]:
    """Return the actors of every device, in the order of their environments from `first_index` on, not started yet."""
    actors: list[Actor] = []
    for functions, slot in zip(compiled, slots, strict=True):
        for _ in range(threads):
            number = len(actors)
            size = functions.acting.num_envs * groups
            index = first_index + number * size
            make_env = lambda num_envs, first: envs.make(num_envs, seed, first)  # noqa: E731
            actors.append(
                Actor(number, make_env, index, groups, functions, run_key, start, slot, lockstep, depth, stop)
            )
    return actors
