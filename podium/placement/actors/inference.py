"""Actors that do not act themselves: threads step environments, and inference servers act for whoever waits.

A server is a thread for each device. It acts in one batch for the requests that have come, never for more than fit and
never later than a bound. Rollouts lie in NumPy on the host, one for all actors of a device: each writes what its
environments and the server gave into columns of its own, and when the last has ended, it is one contiguous batch.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podium import xla
from podium.agent import fresh_carry
from podium.devices import at, jit
from podium.placement.actors.host import EnvBatch, HostActing, rows_of
from podium.placement.actors.pool import ADDITIONS as POOL_ADDITIONS
from podium.placement.actors.pool import Batch, Progress, account, persist, take_fresh
from podium.placement.compiled.iteration import map_envs, seed_after
from podium.placement.contract import STATS, Addition, Experience, Rollout, nbytes
from podium.placement.threads.channels import LatestParams, take
from podium.placement.threads.supervision import (
    POLL_SECONDS,
    Heartbeat,
    RestartBudget,
    SupervisedThread,
    Supervisor,
    end_threads,
)
from podium.types import Key, PyTree

ADDITIONS: Mapping[str, Addition] = {
    **POOL_ADDITIONS,
    "server_seconds": "sum",
    "inference_batch_mean": "mean",
    "inference_latency_max": "max",
    "inference_wait_max": "max",
    "dropped_rollouts": "sum",
}
"""How what is told of a batch adds up over the updates of a row."""

SMALLEST_BATCH = 8
"""Batches are padded to one of a few sizes, each half of the next; none is smaller than this."""


class ActRequest(NamedTuple):
    """What acting for n environments takes, [n, ...]; `key` is the data of their keys."""

    key: Any
    carry: PyTree
    obs: PyTree
    first: Any


class ActReply(NamedTuple):
    """What acting for n environments gives, [n, ...]."""

    action: Any
    extras: PyTree
    carry: PyTree


def batch_sizes(most: int) -> list[int]:
    """Return the sizes that batches are padded to, the smallest first.

    >>> batch_sizes(64), batch_sizes(20), batch_sizes(3)
    ([8, 16, 32, 64], [10, 20], [3])
    """
    sizes = [most]
    while sizes[0] >= 2 * SMALLEST_BATCH:
        sizes.insert(0, -(-sizes[0] // 2))
    return sizes


def request_shapes(acting: HostActing, size: int) -> ActRequest:
    """Return the shapes of a request for `size` environments."""
    row = lambda x: jax.ShapeDtypeStruct((size, *x.shape), x.dtype)
    obs = jax.tree.map(row, acting.spec.obs, is_leaf=lambda x: hasattr(x, "zeros"))
    key = jax.eval_shape(lambda: jax.random.key_data(jax.random.split(jax.random.key(0), size)))
    carry = jax.eval_shape(lambda: fresh_carry(acting.agent, acting.spec, jnp.arange(size)))
    return ActRequest(key, carry, obs, jax.ShapeDtypeStruct((size,), bool))


def bytes_moved(acting: HostActing) -> dict[str, int]:
    """Return what goes up to a device and comes down from it in a rollout; padding is left out."""
    rows, request = acting.rows(), request_shapes(acting, acting.num_envs)
    return {
        "observations": acting.length * nbytes(request),
        "actions": nbytes((rows.action, rows.extras)) + acting.length * nbytes(request.carry),
    }


Act = Callable[[PyTree, list[Any]], ActReply]
"""`(params, leaves of an ActRequest) -> ActReply`."""


class CompiledInference:
    """Acting for environments that stand anywhere in their rollouts, compiled for one device.

    Args:
      acting: of all environments of the device.
      params: shapes of the parameters.
      device: that acts.
      batch_size: environments that it acts for at once, at most.

    Attributes:
      act: for each size of a batch, the smallest first.
    """

    def __init__(self, acting: HostActing, params: PyTree, device: jax.Device, batch_size: int):
        self.acting = acting
        agent = acting.agent

        def act(structure: Any, params: PyTree, leaves: list[Any]) -> ActReply:
            key, carry, obs, first = jax.tree.unflatten(structure, leaves)
            output = agent.act(jax.random.wrap_key_data(key), params, carry, obs, first, False)
            return ActReply(output.action, output.extras, output.carry)

        self.act: dict[int, Act] = {}
        for size in batch_sizes(batch_size):
            leaves, structure = jax.tree.flatten(request_shapes(acting, size))
            lowered = jit(partial(act, structure), device).lower(*at((params, leaves), device))
            self.act[size] = lowered.compile(xla.one_by_one(device))
        number, key = jax.ShapeDtypeStruct((), np.int32), jax.eval_shape(lambda: jax.random.key(0))
        key_data = lambda *numbers: jax.random.key_data(acting.step_keys(*numbers))
        self._key_data = jit(key_data, device).lower(*at((key, number, number), device)).compile()

    def step_keys(self, run_key: Key, iteration: int, first_index: int) -> np.ndarray:
        """Return the data of the keys [T, B] to act with in an iteration: those of a fused rollout."""
        return np.asarray(self._key_data(run_key, np.int32(iteration), np.int32(first_index)))


Replies = queue.SimpleQueue[tuple[ActReply, int]]
"""Where an actor finds the reply to its request, and the version of the parameters that acted."""


def get(replies: Replies, heartbeat: Heartbeat) -> tuple[ActReply, int]:
    """Wait for a reply; `heartbeat` is called meanwhile, and may raise Stopped."""
    while True:
        try:
            return replies.get(timeout=POLL_SECONDS)
        except queue.Empty:
            heartbeat()  # Who waits for the server is well; its thread is supervised itself.


class InferenceServer:
    """Acts for whoever waits: for as many as fit in a batch, and for fewer when they have waited long enough.

    Args:
      act: compiled, for each size of a batch; see `CompiledInference`.
      envs_per_request: environments of each request.
      max_wait: seconds that a request waits for others, from when the device is free; 0 waits for nobody.

    Attributes:
      latest: parameters to act with.
      served: of every batch: environments, seconds that it waited for others, seconds of acting; whoever counts them
        takes them out.
    """

    def __init__(self, act: Mapping[int, Act], envs_per_request: int, max_wait: float):
        self.latest = LatestParams()
        self.served: deque[tuple[int, float, float]] = deque()
        self._compiled, self._each, self._max_wait = act, envs_per_request, max_wait
        self._most = max(act) // envs_per_request
        self._requests: queue.SimpleQueue[tuple[ActRequest, Replies]] = queue.SimpleQueue()

    def ask(self, request: ActRequest, replies: Replies) -> None:
        """Ask for a reply; it will be put into `replies`."""
        self._requests.put((request, replies))

    def serve(self, stop: threading.Event, heartbeat: Heartbeat) -> None:
        """Act for batch after batch; what the thread of a server does. It ends when `heartbeat` raises."""
        while True:
            batch, waited = self._collect(heartbeat)
            began = time.perf_counter()
            params, version = self.latest.get(0, stop)
            replies = self._act(params, [request for request, _ in batch])
            # Counted before anybody hears of it: who asks after a rollout finds all of its batches counted.
            self.served.append((len(batch) * self._each, waited, time.perf_counter() - began))
            for (_, waiting), reply in zip(batch, replies, strict=True):
                waiting.put((reply, version))
            heartbeat()

    def _collect(self, heartbeat: Heartbeat) -> tuple[list[tuple[ActRequest, Replies]], float]:
        """Return requests to act for, and the seconds that the first was kept waiting for others."""
        batch: list[tuple[ActRequest, Replies]] = []
        began, until = 0.0, math.inf
        while len(batch) < self._most:
            left = until - time.perf_counter()
            try:
                batch.append(self._requests.get(left > 0, min(max(left, 0), POLL_SECONDS)))
            except queue.Empty:
                if left <= 0:
                    break
                heartbeat()
            if len(batch) == 1 and not began:
                began = time.perf_counter()
                until = began + self._max_wait
        return batch, time.perf_counter() - began

    def _act(self, params: PyTree, requests: list[ActRequest]) -> list[ActReply]:
        asked = [jax.tree.leaves(request) for request in requests]
        each = self._each
        size = next(size for size in self._compiled if size >= each * len(asked))
        # A place in the batch that nobody asked for repeats the last one, and is thrown away.
        asked += asked[-1:] * (-(-size // each) - len(asked))
        leaves = [np.concatenate(parts)[:size] for parts in zip(*asked, strict=True)]
        leaves, structure = jax.tree.flatten(self._compiled[size](params, leaves))
        leaves = [np.asarray(x) for x in leaves]
        places = [slice(low, low + each) for low in range(0, len(requests) * each, each)]
        return [jax.tree.unflatten(structure, [x[place] for x in leaves]) for place in places]


class RolloutStore:
    """The rollouts under way of the actors of a device, in NumPy: room for several, so that nobody waits at once.

    Args:
      acting: of all environments of the device.
      room: rollouts that there is room for.
      begin_until: the first iteration that may not begin yet.
      num_actors: that each fill columns of their own.
      make_keys: `(iteration) -> ` the data of the keys [T, B] to act with in it.

    Attributes:
      finished: rollouts in their order; never more than there is room for.
    """

    def __init__(
        self, acting: HostActing, room: int, begin_until: int, num_actors: int, make_keys: Callable[[int], np.ndarray]
    ):
        shapes = acting.shapes(acting.length, acting.num_envs)
        self.finished: queue.Queue[Experience] = queue.Queue()
        self._rollouts = [jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes) for _ in range(room)]
        self._parts: list[list[Experience]] = [[] for _ in range(room)]
        self._keys: list[tuple[int, np.ndarray] | None] = [None] * room
        self._begin_until, self._num_actors, self._make_keys = begin_until, num_actors, make_keys
        self._condition = threading.Condition()

    def begin(self, iteration: int, heartbeat: Heartbeat) -> tuple[Rollout, np.ndarray]:
        """Wait until an iteration may begin; return room for its rollout, and its keys."""
        with self._condition:
            while iteration >= self._begin_until:
                self._condition.wait(POLL_SECONDS)
                heartbeat()
            place = iteration % len(self._rollouts)
            made = self._keys[place]
            if made is None or made[0] != iteration:
                self._keys[place] = made = iteration, self._make_keys(iteration)
            return self._rollouts[place], made[1]

    def end(self, iteration: int, part: Experience) -> None:
        """Note that an actor has filled its columns; `part` is without them. The last actor's ends the rollout."""
        place = iteration % len(self._rollouts)
        with self._condition:
            parts = self._parts[place]
            parts.append(part)
            if len(parts) < self._num_actors:
                return
            self._parts[place] = []
        version = min(part.version for part in parts)
        stats = {name: sum(part.stats[name] for part in parts) for name in part.stats}
        maxima = {name: max(part.maxima[name] for part in parts) for name in part.maxima}
        rollout = self._rollouts[place]._replace(policy_version=np.int32(version))
        self.finished.put(Experience(rollout, version, stats, maxima))

    def release(self) -> None:
        """Let one more iteration begin."""
        with self._condition:
            self._begin_until += 1
            self._condition.notify_all()


class EnvActor:
    """Steps some environments, rollout after rollout, and asks a server for actions at every step.

    Args:
      acting: of all environments of the device.
      columns: of its environments among these.
      first_index: global number of the first of them all.
      server: that acts.
      seed: of the environments' randomness.
    """

    def __init__(self, acting: HostActing, columns: slice, first_index: int, server: InferenceServer, seed: int):
        self._columns, self._server = columns, server
        self._replies: Replies = queue.SimpleQueue()
        self._carry = jax.tree.map(lambda x: np.asarray(x)[columns], acting.carry(first_index))
        self._env = acting.env.make(columns.stop - columns.start, seed, first_index + columns.start)
        try:
            self._batch = EnvBatch(self._env, acting.env.resets_in_next_step)
        except BaseException:
            self.close()
            raise

    def play(self, rollout: Rollout, act_keys: np.ndarray, heartbeat: Heartbeat) -> Experience:
        """Play one rollout into these columns of `rollout`; return what it came to."""
        batch, stats = self._batch, dict.fromkeys(STATS, 0.0)
        latency_max, oldest = 0.0, np.iinfo(np.int32).max
        columns = lambda axis, x: x[self._columns] if axis == 0 else x[:, self._columns]
        mine, act_keys = map_envs(columns, rollout), act_keys[:, self._columns]
        rows = rows_of(mine)
        obs, acted, result = (jax.tree.leaves(x) for x in (rows.obs, (rows.action, rows.extras), rows.result))
        _write(jax.tree.leaves(mine.carry), ..., self._carry)
        for time_step, key in enumerate(act_keys):
            _write(obs, time_step, batch.obs)
            rows.first[time_step] = batch.first
            asked = time.perf_counter()
            request = ActRequest(key, self._carry, batch.obs, batch.first)
            self._server.ask(request, self._replies)
            reply, version = get(self._replies, heartbeat)
            began = time.perf_counter()
            latency_max, oldest = max(latency_max, began - asked), min(oldest, version)
            stats["inference_seconds"] += began - asked
            self._env.send(reply.action)
            self._carry = reply.carry
            _write(acted, time_step, (reply.action, reply.extras))  # While they step.
            batch.receive(stats)
            _write(result, time_step, batch.result)
            stats["env_seconds"] += time.perf_counter() - began
            heartbeat()
        if mine.next_obs is None:
            _write(obs, -1, batch.obs)
        _write(jax.tree.leaves(mine.end_carry), ..., self._carry)
        return Experience(None, oldest, stats, {"inference_latency_max": latency_max})

    def close(self) -> None:
        """Release the environments."""
        self._env.close()


def _write(rows: list[np.ndarray], place: Any, values: PyTree) -> None:
    for row, value in zip(rows, jax.tree.leaves(values), strict=True):
        row[place] = value


class InferencePool:
    """Actors that step environments, the servers that act for them, and the rollouts that both write.

    Args:
      acting: of all environments of a device.
      devices: that act, each for its share of the environments.
      envs_per_actor: environments of an actor, a thread.
      batch_size: environments that a device acts for at once, at most.
      max_wait: seconds that a request waits for others; see `InferenceServer`.
      timeout: seconds without a heartbeat after which a thread counts as hung.
      queue_depth: rollouts that may wait for the learner, or begin before the slowest actor has ended the one before.
      max_lag: a rollout whose oldest parameters are more than so many updates old is dropped; None keeps all.
      lockstep: each rollout waits for the parameters of the update before it.
      restarts: failures that all actors together survive.
    """

    def __init__(
        self,
        acting: HostActing,
        devices: Sequence[jax.Device],
        *,
        envs_per_actor: int,
        batch_size: int,
        max_wait: float,
        timeout: float,
        queue_depth: int,
        max_lag: int | None,
        lockstep: bool,
        restarts: int,
    ):
        self._acting, self._devices, self._each = acting, list(devices), envs_per_actor
        self._batch_size, self._max_wait, self._timeout = batch_size, max_wait, timeout
        self._queue_depth, self._max_lag, self._lockstep = queue_depth, max_lag, lockstep
        self._restarts = RestartBudget(restarts)
        self._servers: list[InferenceServer] = []
        self._stores: list[RolloutStore] = []
        self._supervisors: list[list[Supervisor]] = []
        self.stop = threading.Event()
        self.threads: list[SupervisedThread] = []

    def compile(self, params: PyTree) -> None:
        """Compile what acts; `params` are shapes of the parameters."""
        self._compiled = [CompiledInference(self._acting, params, x, self._batch_size) for x in self._devices]

    def start(self, run_key: Key, seed: int, iteration: int, params: PyTree) -> None:
        """Publish the first parameters, and let every actor play from this iteration on; `run_key` is on the host."""
        share = self._acting.num_envs
        num_actors = share // self._each
        # In lockstep an iteration may begin when its parameters are published, and until then none.
        room = 1 if self._lockstep else self._queue_depth + 1
        begin_until = iteration if self._lockstep else iteration + room
        for number, compiled in enumerate(self._compiled):
            server = InferenceServer(compiled.act, self._each, self._max_wait)
            make_keys = partial(compiled.step_keys, run_key, first_index=number * share)
            store = RolloutStore(self._acting, room, begin_until, num_actors, make_keys)
            serve = partial(server.serve, self.stop)
            threads = [SupervisedThread(f"podium-inference-{number}", serve, self.stop)]
            for actor in range(num_actors):
                columns = slice(actor * self._each, (actor + 1) * self._each)
                make = partial(EnvActor, self._acting, columns, number * share, server)
                name = f"podium-actor-{number * num_actors + actor}"
                work = partial(self._work, name, store, make, Progress(iteration), seed)
                threads.append(SupervisedThread(name, work, self.stop))
            self._servers.append(server)
            self._stores.append(store)
            self.threads += threads
            self._supervisors.append([Supervisor(thread, self._timeout) for thread in threads])
        self.publish(params, iteration)
        for thread in self.threads:
            thread.start()

    def publish(self, params: PyTree, version: int) -> None:
        """Give all servers the parameters of this version; in lockstep the iteration of this number may begin."""
        for server, device in zip(self._servers, self._devices, strict=True):
            # A copy of its own: what the learner donates must not be what a server reads.
            copy = jax.device_put(params, device, may_alias=False)
            server.latest.publish(jax.block_until_ready(copy), version)
        if self._lockstep:
            self._release()

    def take(self, number: int) -> Batch:
        """Return what update `number` learns from, in NumPy; it is written again after `release`.

        Raises:
          ActorError: a thread died or hung.
        """
        began = time.perf_counter()
        experiences, dropped = [], 0
        for store, supervisors in zip(self._stores, self._supervisors, strict=True):
            wait = partial(take, store.finished, supervisors)
            experience, late = take_fresh(wait, number, self._max_lag, store.release)
            experiences.append(experience)
            dropped += late
        row = account(experiences, number, dropped)
        row["learner_idle_seconds"] = np.float32(time.perf_counter() - began)
        rollouts = [experience.rollout for experience in experiences if experience.rollout is not None]
        return Batch(rollouts, min(experience.version for experience in experiences), row | self._served())

    def release(self) -> None:
        """Say that what was taken has been copied."""
        if not self._lockstep:
            self._release()

    def close(self) -> None:
        """End the threads; one that hangs in native code is left behind as a daemon."""
        end_threads(self.threads, self.stop)

    def _release(self) -> None:
        for store in self._stores:
            store.release()

    def _served(self) -> dict[str, np.float32]:
        """Return what the servers did since this was last asked."""
        batches = [server.served.popleft() for server in self._servers for _ in range(len(server.served))]
        envs, waited, seconds = zip(*batches, strict=True) if batches else ((0,), (0.0,), (0.0,))
        row = {"server_seconds": sum(seconds), "inference_batch_mean": np.mean(envs), "inference_wait_max": max(waited)}
        return {name: np.float32(value) for name, value in row.items()}

    def _work(
        self,
        name: str,
        store: RolloutStore,
        make: Callable[[int], EnvActor],
        progress: Progress,
        seed: int,
        heartbeat: Heartbeat,
    ) -> None:
        """Play rollout after rollout; what the thread of an actor does."""

        def play() -> None:
            actor = make(seed_after(seed, progress.failures))
            try:
                while True:
                    began = time.perf_counter()
                    rollout, act_keys = store.begin(progress.iteration, heartbeat)
                    waited = time.perf_counter() - began
                    part = actor.play(rollout, act_keys, heartbeat)
                    stats = {**part.stats, "actor_idle_seconds": waited, "dropped_rollouts": progress.lost}
                    store.end(progress.iteration, part._replace(stats=stats))
                    progress.handed_over()
            finally:
                actor.close()

        persist(name, progress, self._restarts, play)
