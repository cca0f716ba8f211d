"""Central inference at work: threads that step environments, one of which acts for all who ask, in one batch.

Rollouts lie in NumPy on the host. Every thread writes what its environments gave, and what acting for them gave, into
columns of its own. When the last thread has finished a rollout, all of it is one contiguous batch for the learner.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podium import xla
from podium.agent import Agent, fresh_carry
from podium.host import HostEnv
from podium.placement.acting import Acting, Rows, trajectory_of
from podium.placement.actors import POLL_SECONDS, Persistent, Piece, Restarts, Slot, Stopped
from podium.placement.cores import OneCore, pushing_nobody_aside
from podium.placement.devices import at, jit
from podium.placement.engine import EngineError
from podium.placement.players import SUMS, Group
from podium.placement.table import nbytes
from podium.types import EnvSpec, PyTree, Trajectory

SMALLEST_BATCH = 8
"""Batches are padded to one of a few sizes, each half of the next; none is smaller than this."""


class Question(NamedTuple):
    """What acting for n environments takes, [n, ...]; `key` is the data of their keys."""

    key: Any
    memory: PyTree
    obs: PyTree
    first: Any


class Answer(NamedTuple):
    """What acting for n environments gives, [n, ...]."""

    action: Any
    extras: PyTree
    memory: PyTree


@dataclasses.dataclass(frozen=True)
class Inference:
    """Acting for environments that stand anywhere in their rollouts."""

    agent: Agent
    spec: EnvSpec

    def act(self, params: PyTree, question: Question) -> Answer:
        """Return the answer."""
        act_keys = jax.random.wrap_key_data(question.key)
        output = self.agent.act(act_keys, params, question.memory, question.obs, question.first, False)
        return Answer(output.action, output.extras, output.carry)

    def question(self, size: int) -> Question:
        """Return the shapes of a question for so many environments."""
        is_spec = lambda x: hasattr(x, "zeros")  # noqa: E731
        obs = jax.tree.map(lambda x: jax.ShapeDtypeStruct((size, *x.shape), x.dtype), self.spec.obs, is_leaf=is_spec)
        return Question(
            jax.eval_shape(lambda: jax.random.key_data(jax.random.split(jax.random.key(0), size))),
            jax.eval_shape(lambda: fresh_carry(self.agent, self.spec, jnp.arange(size))),
            obs,
            jax.ShapeDtypeStruct((size,), bool),
        )

    def compile(self, params: PyTree, size: int, device: jax.Device) -> Callable[[PyTree, Question], Answer]:
        """Compile `act` for a batch of `size`; `params` are shapes."""
        lowered = jit(self.act, device).lower(*at((params, self.question(size)), device))
        return lowered.compile(xla.one_by_one(device))


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
      make_keys: `(iteration)`, the data of the keys [T, B] to act with in it.
      wait_for: `(iteration)`, returns when that iteration may begin; raises Stopped.
      start: number of the first iteration.
    """

    def __init__(
        self,
        acting: Acting,
        params: PyTree,
        depth: int,
        num_workers: int,
        make_keys: Callable[[int], np.ndarray],
        wait_for: Callable[[int], Any],
        start: int,
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
        self._num_workers, self._make_keys, self._wait_for = num_workers, make_keys, wait_for
        self._condition = threading.Condition()
        self._free_until = start + depth  # The first iteration that there is no room for yet.
        self._stories: list[list[tuple[int, dict[str, float], dict[str, float]]]] = [[] for _ in range(depth)]
        self._keys: list[tuple[int, np.ndarray] | None] = [None] * depth

    def enter(self, iteration: int, stop: threading.Event, progress: Callable[[], None]) -> tuple[int, np.ndarray]:
        """Wait until there is room for a rollout of this iteration; return its place in the ring, and its keys."""
        while True:
            if stop.is_set():
                raise Stopped
            with self._condition:
                if iteration < self._free_until:
                    break
                self._condition.wait(POLL_SECONDS)
            progress()
        self._wait_for(iteration)
        place = iteration % self.depth
        with self._condition:
            made = self._keys[place]
            if made is None or made[0] != iteration:
                self._keys[place] = made = iteration, self._make_keys(iteration)
        return place, made[1]

    def leave(self, place: int, version: int, sums: dict[str, float], most: dict[str, float]) -> None:
        """Say that a worker has finished its columns of the rollout in this place; the last one hands it over.

        Args:
          place: of the rollout.
          version: of the oldest parameters that acted.
          sums: see `Piece`.
          most: see `Piece`.
        """
        with self._condition:
            self._stories[place].append((version, sums, most))
            if len(self._stories[place]) < self._num_workers:
                return
        stories, self._stories[place] = self._stories[place], []
        total = {name: sum(story[name] for _, story, _ in stories) for name in sums}
        largest = {name: max(story[name] for _, _, story in stories) for name in most}
        oldest = min(version for version, _, _ in stories)
        self.finished.put(Piece(self._trajectory(place, oldest), oldest, total, largest))

    def _trajectory(self, place: int, version: int) -> Trajectory:
        """Return views of the rollout in this place, as it travels."""
        rows, carry, end_carry = jax.tree.map(lambda x: x[place], self.store)
        return trajectory_of(rows, carry, end_carry, np.int32(version))

    def release(self) -> None:
        """Say that the oldest finished rollout has been copied, so that its place is free."""
        with self._condition:
            self._free_until += 1
            self._condition.notify_all()


class Request:
    """How one thread asks, again and again.

    Attributes:
      question: leaves and structure of a `Question`.
      answer: None until there is one.
      version: of the parameters that acted.
    """

    def __init__(self) -> None:
        self.question: tuple[list[np.ndarray], Any] = [], None
        self.answer: Answer | None = None
        self.version = 0
        self._woken = threading.Lock()
        self._woken.acquire()

    def sleep(self, tick: Callable[[], None], until: float = math.inf) -> None:
        """Wait until another thread calls `wake`, or until a time; `tick` is called now and then, and may raise."""
        while (left := until - time.perf_counter()) > 0:
            if self._woken.acquire(timeout=min(left, POLL_SECONDS)):
                return
            tick()  # Whoever acts is watched itself.

    def wake(self) -> None:
        """End `sleep`, of now or of the next time; called by another thread."""
        with contextlib.suppress(RuntimeError):  # It was woken before and has not noticed yet.
            self._woken.release()


class Stepper(Persistent):
    """Steps some environments, and asks for actions at every step.

    Args:
      number: of this thread.
      make_env: `(failures so far) -> HostEnv`.
      columns: of its environments in the ring.
      first_index: global number of the first of them.
      memory: of the agent for them at the start, NumPy.
      ring: of rollouts.
      server: that acts.
      start: number of its first iteration.
      restarts: failures that are still allowed, of all together.
      cores: that it shares with the others.
      stop: set when the run is over.
    """

    def __init__(
        self,
        number: int,
        make_env: Callable[[int], HostEnv],
        columns: slice,
        first_index: int,
        memory: PyTree,
        ring: Ring,
        server: Server,
        start: int,
        restarts: Restarts,
        cores: OneCore,
        stop: threading.Event,
    ):
        super().__init__(f"podium-stepper-{number}", stop, start, restarts)
        self._cores = cores
        self._columns, self._beginning, self._request = columns, memory, Request()
        self._make_env, self._first_index, self._ring, self._server = make_env, first_index, ring, server

    def _play(self) -> None:
        env = self._make_env(self.failures)
        try:
            group = Group(env, self._first_index, self._ring.store.rows.result.next_obs is None)
            memory = self._beginning
            with pushing_nobody_aside():  # Not before: threads that the environments make inherit it.
                while True:
                    memory = self._play_one(group, memory)
                    self._handed_over()
        finally:
            env.close()

    def _play_one(self, group: Group, memory: PyTree) -> PyTree:
        """Play one rollout from this memory on, and return the memory after it."""
        sums, slowest, version = dict.fromkeys(SUMS, 0.0), 0.0, np.iinfo(np.int32).max
        began = time.perf_counter()
        place, act_keys = self._ring.enter(self.iteration, self._stop_event, self._tick)
        sums["actor_idle_seconds"] = time.perf_counter() - began
        rows: Rows = jax.tree.map(lambda x: x[place, :, self._columns], self._ring.store.rows)
        act_keys = act_keys[:, self._columns]
        write_obs, write_acted = _writer(rows.obs), _writer((rows.action, rows.extras))
        write_result = _writer(tuple(rows.result))
        self._remember(self._ring.store.carry, place, memory)
        with self._cores.rollout(self.iteration):
            for step in range(self._ring.length):
                write_obs(step, group.obs)
                rows.first[step] = group.first
                asked = time.perf_counter()
                self._request.question = jax.tree.flatten(Question(act_keys[step], memory, group.obs, group.first))
                action, extras, memory = self._server.ask(self._request, self._tick)
                began = time.perf_counter()
                slowest, version = max(slowest, began - asked), min(version, self._request.version)
                sums["inference_seconds"] += began - asked
                group.env.send(action)
                write_acted(step, (action, extras))  # While they step.
                group.receive(sums)
                write_result(step, tuple(group.came))
                sums["env_seconds"] += time.perf_counter() - began
                self._tick()
        if rows.result.next_obs is None:
            write_obs(-1, group.obs)
        self._remember(self._ring.store.end_carry, place, memory)
        sums["dropped_rollouts"] = self.lost
        self._ring.leave(place, version, sums, {"inference_latency_max": slowest})
        return memory

    def _remember(self, carries: PyTree, place: int, memory: PyTree) -> None:
        for carry, value in zip(jax.tree.leaves(carries), jax.tree.leaves(memory), strict=True):
            carry[place, self._columns] = value


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


class ServingError(EngineError):
    """Acting for others failed, so that no worker can go on."""


class Server:
    """Acts for whoever waits: for as many as fit in a batch, and for fewer when they have waited long enough.

    It has no thread of its own. Whoever runs when a batch is due acts for all who ask ("flat combining"; Hendler et al.
    2010, SPAA): the one whose request fills it, the first to ask after the bound, or else the one who has waited
    longest. So the bound does not depend on when a sleeping thread gets Python's lock, where many want it.

    Args:
      compiled: `Inference.act` for each size of a batch, the smallest first.
      slot: of parameters.
      most: requests that a batch holds.
      max_wait: seconds for which whoever waits is kept waiting for others, from when nobody acts any more.
      stop: set when the run is over.
    """

    def __init__(
        self,
        compiled: dict[int, Callable[[PyTree, Question], Answer]],
        slot: Slot,
        most: int,
        max_wait: float,
        stop: threading.Event,
    ):
        self._compiled, self._slot, self._most, self._max_wait, self._stop = compiled, slot, most, max_wait, stop
        self._lock = threading.Lock()
        self._waiting: list[Request] = []
        self._someone_acts = False
        self._since = 0.0  # When somebody began to wait while nobody acts.
        self._told = Served()

    def story(self) -> Served:
        """Return what was done since this was last asked."""
        with self._lock:
            told, self._told = self._told, Served()
        return told

    def ask(self, request: Request, tick: Callable[[], None]) -> Answer:
        """Return the answer to `request.question`; the calling thread may act for others too.

        Args:
          request: of the calling thread.
          tick: called several times a second while it waits; may raise Stopped.

        Raises:
          ServingError: this thread acted, and that failed.
        """
        request.answer = None
        with self._lock:
            if not self._waiting and not self._someone_acts:
                self._since = time.perf_counter()
            self._waiting.append(request)
        while request.answer is None:
            batch, until = self._take(request)
            if batch:
                self._act(batch, request)
            else:
                request.sleep(tick, until)
        return request.answer

    def _take(self, request: Request) -> tuple[list[Request], float]:
        """Return the batch that the calling thread has to act for, if it is due, and else how long it may sleep."""
        with self._lock:
            if self._someone_acts or not self._waiting:
                return [], math.inf
            waited = time.perf_counter() - self._since
            if waited < self._max_wait and len(self._waiting) < self._most:
                longest = request is self._waiting[0]
                return [], self._since + self._max_wait if longest else math.inf
            batch, self._waiting = self._waiting[: self._most], self._waiting[self._most :]
            self._someone_acts = True
            self._told = self._told.waited(waited)
            return batch, 0.0

    def _act(self, batch: list[Request], own: Request) -> None:
        """Answer requests, `own` perhaps among them, and wake who asked, and who has waited longest meanwhile."""
        try:
            began = time.perf_counter()
            answers, version = self._serve(batch)
        except Stopped:
            raise
        except Exception as error:
            raise ServingError(f"acting for whoever asked failed: {error!r}") from error
        with self._lock:
            # Counted before anybody hears of it: who asks after a rollout finds all of its batches counted.
            self._since = time.perf_counter()
            self._told = self._told.served(len(batch), self._since - began)
            for request, answer in zip(batch, answers, strict=True):
                request.version, request.answer = version, answer
            self._someone_acts = False
            following = self._waiting[:1]
        for request in (*batch, *following):
            if request is not own:
                request.wake()

    def _serve(self, batch: list[Request]) -> tuple[list[Answer], int]:
        """Return the answers to requests, all of them for equally many environments, and the version that acted."""
        params, version = self._slot.get(0, self._stop)
        asked, structure = [request.question[0] for request in batch], batch[0].question[1]
        each = len(asked[0][-1])
        size = next(size for size in self._compiled if size >= each * len(asked))
        # A place in the batch that nobody asked for repeats the last one, and is thrown away.
        asked += asked[-1:] * (-(-size // each) - len(asked))
        question = jax.tree.unflatten(structure, [np.concatenate(parts)[:size] for parts in zip(*asked, strict=True)])
        answer, structure = jax.tree.flatten(self._compiled[size](params, question))
        answer = [np.asarray(x) for x in answer]
        places = [slice(i * each, (i + 1) * each) for i in range(len(batch))]
        return [jax.tree.unflatten(structure, [x[place] for x in answer]) for place in places], version


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

    def waited(self, seconds: float) -> Served:
        """Note how long the requests of a batch were kept waiting for others."""
        return self._replace(wait_max=max(self.wait_max, seconds))

    def served(self, requests: int, seconds: float) -> Served:
        """Count one batch more."""
        return Served(self.batches + 1, self.requests + requests, self.wait_max, self.seconds + seconds)


def bytes_moved(acting: Acting, params: PyTree) -> dict[str, int]:
    """Return what goes up to the device and comes down from it while a rollout of all environments is acted for."""
    step = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), jax.eval_shape(acting.blank, params))
    memory = nbytes(jax.eval_shape(lambda: acting.carry(0)))
    act_keys = nbytes(Inference(acting.agent, acting.spec).question(acting.num_envs).key)
    return {
        "observations": acting.length * (nbytes((step.obs, step.first)) + memory + act_keys),
        "actions": acting.length * (nbytes((step.action, step.extras)) + memory),
    }
