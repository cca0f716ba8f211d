"""Central inference at work: threads that step environments, and a server that acts for all who wait, in one batch.

Rollouts lie in NumPy on the host. Every thread writes what its environments gave into columns of its own; the server
reads from there what to act on, in one gather, and writes beside it what acting gave. When the last thread has finished
a rollout, all of it is one contiguous batch for the learner.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podium import keys
from podium.agent import Agent, fresh_carry
from podium.host import HostEnv
from podium.placement.acting import Acting, Rows, trajectory_of
from podium.placement.actors import POLL_SECONDS, Persistent, Piece, Restarts, Slot, Stopped, Working
from podium.placement.devices import at, jit
from podium.placement.players import SUMS, Group
from podium.placement.table import nbytes
from podium.types import Array, EnvSpec, Key, PyTree, Trajectory

SMALLEST_BATCH = 8
"""Batches are padded to one of a few sizes, each half of the next; none is smaller than this."""


@dataclasses.dataclass(frozen=True)
class Inference:
    """Acting for environments that stand anywhere in their rollouts."""

    agent: Agent
    spec: EnvSpec

    def act(
        self, run_key: Key, params: PyTree, iteration: Array, index: Array, time: Array, memory: PyTree, obs: PyTree,
        first: Array,
    ) -> tuple[Array, PyTree, PyTree]:  # fmt: skip
        """Return actions, extras and memory for environments numbered `index` [n], at step `time` [n] of a rollout.

        The keys are those of a fused rollout: they derive from the run, the iteration, the environment and the step.
        """

        def one(iteration: Array, index: Array, time: Array) -> Key:
            rollout_key = keys.iteration(run_key, iteration).rollout
            return jax.random.fold_in(jax.random.fold_in(rollout_key, index), time)

        output = self.agent.act(jax.vmap(one)(iteration, index, time), params, memory, obs, first, False)
        return output.action, output.extras, output.carry

    def compile(self, params: PyTree, size: int, device: jax.Device) -> Callable[..., Any]:
        """Compile `act` for a batch of `size`; `params` are shapes."""
        is_spec = lambda x: hasattr(x, "zeros")  # noqa: E731
        obs = jax.tree.map(lambda x: jax.ShapeDtypeStruct((size, *x.shape), x.dtype), self.spec.obs, is_leaf=is_spec)
        number, key = jax.ShapeDtypeStruct((size,), np.int32), jax.eval_shape(lambda: jax.random.key(0))
        memory, first = (
            jax.eval_shape(lambda: fresh_carry(self.agent, self.spec, jnp.arange(size))),
            jax.ShapeDtypeStruct((size,), bool),
        )
        arguments = (key, params, number, number, jax.ShapeDtypeStruct((size,), np.uint32), memory, obs, first)
        return jit(self.act, device).lower(*at(arguments, device)).compile()


def sizes_of_batches(most: int) -> list[int]:
    """Return the sizes that batches are padded to, the smallest first.

    >>> sizes_of_batches(64), sizes_of_batches(20), sizes_of_batches(3)
    ([8, 16, 32, 64], [10, 20], [3])
    """
    sizes = [most]
    while sizes[0] >= 2 * SMALLEST_BATCH:
        sizes.insert(0, -(-sizes[0] // 2))
    return sizes


class Store(NamedTuple):
    """Rollouts under way: a ring [R, T, B, ...] of all that a rollout is, `carry` and `end_carry` [R, B, ...]."""

    rows: Rows
    carry: PyTree
    end_carry: PyTree


class Ring:
    """The rollouts under way of B environments: room for R of them, so that nobody waits for the slowest at once.

    Args:
      acting: of B environments.
      params: shapes of the parameters.
      depth: R.
      num_workers: that each fill columns of their own.
      wait_for: `(iteration)`, returns when that iteration may begin; raises Stopped.
      start: number of the first iteration.
    """

    def __init__(
        self, acting: Acting, params: PyTree, depth: int, num_workers: int, wait_for: Callable[[int], Any], start: int
    ):
        ring = lambda x: np.zeros((depth, *x.shape), x.dtype)  # noqa: E731
        memory = jax.eval_shape(lambda: acting.carry(0))
        self.depth, self.length = depth, acting.length
        self.store = Store(
            jax.tree.map(ring, jax.eval_shape(acting.blank, params)),
            jax.tree.map(ring, memory),
            jax.tree.map(ring, memory),
        )
        self.finished: queue.Queue[Piece] = queue.Queue()  # Never longer than the ring.
        self.versions = np.full(depth, np.iinfo(np.int32).max, np.int32)
        self._acting, self._num_workers, self._wait_for = acting, num_workers, wait_for
        self._condition = threading.Condition()
        self._free_until = start + depth  # The first iteration that there is no room for yet.
        self._stories: list[list[tuple[dict[str, float], dict[str, float]]]] = [[] for _ in range(depth)]

    def enter(self, iteration: int, stop: threading.Event, progress: Callable[[], None]) -> int:
        """Wait until there is room for a rollout of this iteration, and return its place in the ring."""
        while True:
            if stop.is_set():
                raise Stopped
            with self._condition:
                if iteration < self._free_until:
                    break
                self._condition.wait(POLL_SECONDS)
            progress()
        self._wait_for(iteration)
        return iteration % self.depth

    def leave(self, place: int, sums: dict[str, float], most: dict[str, float]) -> None:
        """Say that a worker has finished its columns of the rollout in this place; the last one hands it over."""
        with self._condition:
            self._stories[place].append((sums, most))
            if len(self._stories[place]) < self._num_workers:
                return
        stories, self._stories[place] = self._stories[place], []
        total = {name: sum(story[name] for story, _ in stories) for name in sums}
        largest = {name: max(story[name] for _, story in stories) for name in most}
        version, self.versions[place] = int(self.versions[place]), np.iinfo(np.int32).max
        self.finished.put(Piece(self._trajectory(place, version), version, total, largest))

    def _trajectory(self, place: int, version: int) -> Trajectory:
        """Return views of the rollout in this place, as it travels."""
        rows, carry, end_carry = jax.tree.map(lambda x: x[place], self.store)
        return trajectory_of(rows, carry, end_carry, np.int32(version))

    def release(self) -> None:
        """Say that the oldest finished rollout has been copied, so that its place is free."""
        with self._condition:
            self._free_until += 1
            self._condition.notify_all()


class Stepper(Persistent):
    """Steps some environments, and waits for an action at every step.

    Args:
      number: of this thread.
      make_env: `(failures so far) -> HostEnv`.
      columns: of its environments in the ring.
      first_index: global number of the first of them.
      ring: of the server.
      server: that acts.
      start: number of its first iteration.
      restarts: failures that are still allowed, of all together.
      stop: set when the run is over.
    """

    def __init__(
        self,
        number: int,
        make_env: Callable[[int], HostEnv],
        columns: slice,
        first_index: int,
        ring: Ring,
        server: Server,
        start: int,
        restarts: Restarts,
        stop: threading.Event,
    ):
        super().__init__(f"podium-stepper-{number}", stop, start, restarts)
        self.columns, self.place, self.time = columns, 0, 0
        self.asked = 0.0
        self.action: Any = None
        self._answered = threading.Lock()
        self._answered.acquire()
        self._make_env, self._first_index, self._ring, self._server = make_env, first_index, ring, server

    def answer(self, action: np.ndarray) -> None:
        """Give it the actions that it waits for; called by the server."""
        self.action = action
        self._answered.release()

    def _play(self) -> None:
        env = self._make_env(self.failures)
        try:
            self._server.forget(self.columns)
            group = Group(env, self._first_index, self._ring.store.rows.result.next_obs is None)
            while True:
                self._play_one(group)
                self._handed_over()
        finally:
            env.close()

    def _play_one(self, group: Group) -> None:
        """Play one rollout."""
        sums, slowest = dict.fromkeys(SUMS, 0.0), 0.0
        began = time.perf_counter()
        self.place = self._ring.enter(self.iteration, self._stop_event, self._tick)
        sums["actor_idle_seconds"] = time.perf_counter() - began
        rows: Rows = jax.tree.map(lambda x: x[self.place, :, self.columns], self._ring.store.rows)
        write_obs, write_result = _writer(rows.obs), _writer(tuple(rows.result))
        for step in range(self._ring.length):
            write_obs(step, group.obs)
            rows.first[step] = group.first
            self.time = step
            self.asked = time.perf_counter()
            self._server.requests.put(self)
            action = self._wait()
            began = time.perf_counter()
            slowest = max(slowest, began - self.asked)
            sums["inference_seconds"] += began - self.asked
            group.env.send(action)
            group.receive(sums)
            write_result(step, tuple(group.came))
            sums["env_seconds"] += time.perf_counter() - began
            self._tick()
        if rows.result.next_obs is None:
            write_obs(-1, group.obs)
        sums["dropped_rollouts"] = self.lost
        self._ring.leave(self.place, sums, {"inference_latency_max": slowest})

    def _wait(self) -> np.ndarray:
        while not self._answered.acquire(timeout=POLL_SECONDS):
            self._tick()  # It waits for the server, which is watched itself.
        return self.action


def _writer(rows: PyTree) -> Callable[[int, PyTree], None]:
    """Return a function that writes a row; it runs in every step of every thread, and walks few trees."""
    if isinstance(rows, np.ndarray):
        return rows.__setitem__
    if isinstance(rows, tuple):
        fields = [(i, _writer(field)) for i, field in enumerate(rows) if field is not None]

        def write_fields(step: int, row: Any) -> None:
            for i, write in fields:
                write(step, row[i])

        return write_fields

    columns = jax.tree.leaves(rows)

    def write(step: int, row: PyTree) -> None:
        for column, value in zip(columns, jax.tree.leaves(row), strict=True):
            column[step] = value

    return write


class Server(Working):
    """Acts for whoever waits: for as many as fit in a batch, and for fewer when the first has waited long enough.

    Args:
      number: of this server.
      compiled: `Inference.act` for each size of a batch, the smallest first.
      memory: of the agent for the server's environments at the start, NumPy.
      first_index: global number of the first of them.
      run_key: of the run, on the server's device.
      ring: of rollouts.
      slot: of parameters.
      batch_size: environments that are waited for.
      max_wait: seconds that the first to ask waits for others, from when the server has time for it.
      stop: set when the run is over.
    """

    def __init__(
        self,
        number: int,
        compiled: dict[int, Callable[..., Any]],
        memory: PyTree,
        first_index: int,
        run_key: Key,
        ring: Ring,
        slot: Slot,
        batch_size: int,
        max_wait: float,
        stop: threading.Event,
    ):
        super().__init__(f"podium-inference-{number}", stop)
        self.requests: queue.SimpleQueue[Stepper] = queue.SimpleQueue()
        self._compiled, self._beginning, self._memory = compiled, memory, jax.tree.map(np.array, memory)
        self._first_index, self._run_key, self._ring, self._slot = first_index, run_key, ring, slot
        self._batch_size, self._max_wait = batch_size, max_wait
        self._lock = threading.Lock()
        self._told = Served()

    def forget(self, columns: slice) -> None:
        """Let the memory for these environments be that of the start; they have no request here."""
        for now, first in zip(jax.tree.leaves(self._memory), jax.tree.leaves(self._beginning), strict=True):
            now[columns] = first[columns]

    def story(self) -> Served:
        """Return what was done since this was last asked."""
        with self._lock:
            told, self._told = self._told, Served()
        return told

    def _work(self) -> None:
        while True:
            self._serve(*self._collect())

    def _collect(self) -> tuple[list[Stepper], float]:
        """Return whoever waits, and how long the first of them was kept waiting for others."""
        free = time.perf_counter()
        while True:
            self._tick()
            try:
                waiting = [self.requests.get(timeout=POLL_SECONDS)]
                break
            except queue.Empty:
                pass
        began = max(waiting[0].asked, free)
        size = self._batch_size // (waiting[0].columns.stop - waiting[0].columns.start)
        while len(waiting) < size:
            left = began + self._max_wait - time.perf_counter()
            try:
                waiting.append(self.requests.get(timeout=left) if left > 0 else self.requests.get_nowait())
            except queue.Empty:
                break
        return waiting, time.perf_counter() - began

    def _serve(self, waiting: list[Stepper], waited: float) -> None:
        began = time.perf_counter()
        params, version = self._slot.get(0, self._stop_event)
        ring, store = self._ring, self._ring.store
        each = waiting[0].columns.stop - waiting[0].columns.start
        count = each * len(waiting)
        size = next(size for size in self._compiled if size >= count)
        # A place in the batch that nobody asked for repeats the last one, and is thrown away.
        padded = waiting + [waiting[-1]] * (-(-size // each) - len(waiting))
        numbers = np.array([(x.columns.start, x.place, x.time, x.iteration) for x in padded], np.int32)
        column, place, step, iteration = np.repeat(numbers.T, each, axis=1)[:, :size]
        column = column + np.tile(np.arange(each, dtype=np.int32), len(padded))[:size]
        memory = jax.tree.map(lambda x: x[column], self._memory)
        output = self._compiled[size](
            self._run_key,
            params,
            iteration,
            column + np.int32(self._first_index),
            step.astype(np.uint32),
            memory,
            jax.tree.map(lambda x: x[place, step, column], store.rows.obs),
            store.rows.first[place, step, column],
        )
        action, extras, after = jax.device_get(output)
        column, place, step = column[:count], place[:count], step[:count]
        kept = jax.tree.leaves((store.rows.action, store.rows.extras))
        for rows, given in zip(kept, jax.tree.leaves((action, extras)), strict=True):
            rows[place, step, column] = given[:count]
        begins, ends = step == 0, step == ring.length - 1
        for now, before, following, start, end in zip(
            *map(jax.tree.leaves, (self._memory, memory, after, store.carry, store.end_carry)), strict=True
        ):
            now[column] = following[:count]
            start[place[begins], column[begins]] = before[:count][begins]
            end[place[ends], column[ends]] = following[:count][ends]
        np.minimum.at(ring.versions, place, np.int32(version))
        # Counted before anybody hears of it: who asks after a rollout finds all of its batches counted.
        with self._lock:
            self._told = self._told.add(len(waiting), waited, time.perf_counter() - began)
        for i, stepper in enumerate(waiting):
            stepper.answer(action[i * each : (i + 1) * each])


class Served(NamedTuple):
    """What a server did in a while.

    Attributes:
      batches: that it acted for.
      requests: in them.
      wait_max: longest that a request was kept waiting for others, in seconds.
      seconds: it spent in acting.
    """

    batches: int = 0
    requests: int = 0
    wait_max: float = 0.0
    seconds: float = 0.0

    def add(self, requests: int, waited: float, seconds: float) -> Served:
        """Count one batch more."""
        return Served(self.batches + 1, self.requests + requests, max(self.wait_max, waited), self.seconds + seconds)


def bytes_moved(acting: Acting, params: PyTree) -> dict[str, int]:
    """Return what goes up to the device and comes down from it while a rollout of all environments is acted for."""
    step = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), jax.eval_shape(acting.blank, params))
    memory, numbers = nbytes(jax.eval_shape(lambda: acting.carry(0))), 3 * 4 * acting.num_envs
    return {
        "observations": acting.length * (nbytes((step.obs, step.first)) + memory + numbers),
        "actions": acting.length * (nbytes((step.action, step.extras)) + memory),
    }
