"""Actors that do not act themselves: threads step environments, and inference servers act for whoever waits.

A server is a thread for each device. It acts in one batch for the requests that have come, never for more than fit and
never later than a bound. Rollouts lie in NumPy on the host; those of the actors of a device are joined to learn from.
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
from podium.agent import ActOutput, fresh_carry
from podium.devices import at, jit
from podium.film import is_film
from podium.host_rollout import EnvBatch
from podium.ops import stacks
from podium.placement.actors.host import HostActing
from podium.placement.actors.pool import ADDITIONS as POOL_ADDITIONS
from podium.placement.actors.pool import ActorPool, Batch
from podium.placement.contract import STATS, Actor, Experience, Following, nothing_yet
from podium.placement.threads.channels import LatestParams
from podium.placement.threads.supervision import POLL_SECONDS, Heartbeat
from podium.report import nbytes
from podium.rollout import map_envs, with_gap
from podium.tally import Addition
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
    key = jax.eval_shape(lambda: jax.random.key_data(jax.random.split(jax.random.key(0), size)))
    carry = jax.eval_shape(lambda: fresh_carry(acting.agent, acting.spec, jnp.arange(size)))
    return ActRequest(key, carry, acting.obs_shapes(size), jax.ShapeDtypeStruct((size,), bool))


def bytes_moved(acting: HostActing, num_envs: int) -> dict[str, int]:
    """Return what goes up to devices and comes down from them in a rollout of all environments, without padding."""
    rollout, request = acting.shapes(acting.length, num_envs), request_shapes(acting, num_envs)
    return {
        "observations": acting.length * nbytes(request),
        "actions": nbytes((rollout.action, rollout.extras)) + acting.length * nbytes(request.carry),
    }


class CompiledInference:
    """Acting for environments that stand anywhere in their rollouts, compiled for one device.

    Args:
      acting: of the environments of an actor.
      params: shapes of the parameters.
      device: that acts.
      batch_size: environments that it acts for at once, at most.

    Attributes:
      act: for each size of a batch, the smallest first.
      step_keys: `HostActing.step_keys`, but for the data of the keys.
      rows: shapes of an actor's rollout under way.
    """

    def __init__(self, acting: HostActing, params: PyTree, device: jax.Device, batch_size: int):
        self.acting, self.rows = acting, acting.rows()

        def act(params: PyTree, request: ActRequest) -> ActOutput:
            key = jax.random.wrap_key_data(request.key)
            return acting.agent.act(key, params, request.carry, request.obs, request.first, False)

        lower = lambda size: jit(act, device).lower(*at((params, request_shapes(acting, size)), device))
        self.act = {size: lower(size).compile(xla.one_by_one(device)) for size in batch_sizes(batch_size)}
        number, key = jax.ShapeDtypeStruct((), np.int32), jax.eval_shape(lambda: jax.random.key(0))
        step_keys = lambda *numbers: jax.random.key_data(acting.step_keys(*numbers))
        self.step_keys = jit(step_keys, device).lower(*at((key, number, number), device)).compile()


Replies = queue.SimpleQueue[tuple[ActOutput, int]]
"""Where an actor finds the reply to its request, and the version of the parameters that acted."""


def get(items: queue.SimpleQueue[Any], heartbeat: Heartbeat) -> Any:
    """Wait for an item; `heartbeat` is called meanwhile, for who waits is well, and may raise Stopped."""
    while True:
        try:
            return items.get(timeout=POLL_SECONDS)
        except queue.Empty:
            heartbeat()


class InferenceServer:
    """Acts for whoever waits: for as many as fit in a batch, and for fewer when they have waited long enough.

    Args:
      act: `(params, request) -> reply`, for each size of a batch, the smallest first; see `CompiledInference`.
      envs_per_request: environments of each request.
      max_wait: seconds that a request waits for others, from when the device is free; 0 waits for nobody.
      latest: parameters to act with.

    Attributes:
      served: of every batch: environments, seconds that it waited for others, seconds of acting; whoever counts them
        takes them out.
    """

    def __init__(self, act: Mapping[int, Callable], envs_per_request: int, max_wait: float, latest: LatestParams):
        self.served: deque[tuple[int, float, float]] = deque()
        self._compiled, self._each, self._max_wait, self._latest = act, envs_per_request, max_wait, latest
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
            params, version = self._latest.get(0, stop)
            replies = self._act(params, [request for request, _ in batch])
            # Counted before anybody hears of it: who asks after a rollout finds all of its batches counted.
            self.served.append((len(batch) * self._each, waited, time.perf_counter() - began))
            for (_, waiting), reply in zip(batch, replies, strict=True):
                waiting.put((reply, version))
            heartbeat()

    def _collect(self, heartbeat: Heartbeat) -> tuple[list[tuple[ActRequest, Replies]], float]:
        """Return requests to act for, and the seconds that the first was kept waiting for others."""
        batch = [get(self._requests, heartbeat)]
        began = time.perf_counter()
        while len(batch) < self._most:
            left = began + self._max_wait - time.perf_counter()
            try:
                batch.append(self._requests.get(left > 0, min(max(left, 0), POLL_SECONDS)))
            except queue.Empty:
                if left <= 0:
                    break
                heartbeat()
        return batch, time.perf_counter() - began

    def _act(self, params: PyTree, requests: list[ActRequest]) -> list[ActOutput]:
        each = self._each
        size = next(size for size in self._compiled if size >= each * len(requests))
        # A place in the batch that nobody asked for repeats the last one, and is thrown away.
        padded = requests + requests[-1:] * (-(-size // each) - len(requests))
        request = jax.tree.map(lambda *parts: np.concatenate(parts)[:size], *padded)
        leaves, structure = jax.tree.flatten(self._compiled[size](params, request))
        leaves = [np.asarray(x) for x in leaves]
        places = [slice(low, low + each) for low in range(0, len(requests) * each, each)]
        return [jax.tree.unflatten(structure, [x[place] for x in leaves]) for place in places]


class EnvActor:
    """An `Actor` that does not act: it steps environments on the CPU, and asks a server at every step.

    Args:
      compiled: what its server acts with.
      server: that acts, with the newest parameters it has.
      first_index: global number of the first environment.
      run_key: of the run.
      seed: of the environments' randomness.
    """

    def __init__(self, compiled: CompiledInference, server: InferenceServer, first_index: int, run_key: Key, seed: int):
        self.standing = ()
        self._compiled, self._server = compiled, server
        self._run_key, self._first_index = run_key, np.int32(first_index)
        self._replies: Replies = queue.SimpleQueue()
        acting = compiled.acting
        self._carry = jax.tree.map(np.asarray, acting.carry(first_index))
        self._env = acting.env.make(acting.num_envs, seed, first_index)
        try:
            self._batch = EnvBatch(self._env, acting.agent, acting.env.resets_in_next_step)
        except BaseException:
            self.close()
            raise

    def play(
        self, params: PyTree, version: int, iteration: int, heartbeat: Heartbeat, following: Following = nothing_yet
    ) -> Experience:
        """Play one rollout, in NumPy; see `Actor.play`. The server's parameters act, at each step the newest."""
        batch, stats, carry = self._batch, dict.fromkeys(STATS, 0.0), self._carry
        past = batch.past
        latency_max, oldest = 0.0, np.iinfo(np.int32).max
        rows = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), self._compiled.rows)
        obs = jax.tree.leaves(rows.obs, is_leaf=is_film)
        acted, result = (jax.tree.leaves(x) for x in ((rows.action, rows.extras), rows.result))
        step_keys = np.asarray(self._compiled.step_keys(self._run_key, np.int32(iteration), self._first_index))
        for time_step, key in enumerate(step_keys):
            _write(obs, time_step, batch.obs)
            rows.first[time_step] = batch.first
            asked = time.perf_counter()
            self._server.ask(ActRequest(key, self._carry, batch.obs, batch.first), self._replies)
            reply, acted_with = get(self._replies, heartbeat)
            began = time.perf_counter()
            latency_max, oldest = max(latency_max, began - asked), min(oldest, acted_with)
            stats["inference_seconds"] += began - asked
            self._env.send(np.asarray(reply.action))
            self._carry = reply.carry
            _write(acted, time_step, (reply.action, reply.extras))  # While they step.
            batch.receive(stats)
            _write(result, time_step, batch.result)
            stats["env_seconds"] += time.perf_counter() - began
            heartbeat()
        if rows.result.next_obs is None:
            _write(obs, len(step_keys), batch.obs)
        rollout = rows.rollout(carry, self._carry, np.int32(oldest))._replace(past=past)
        return Experience(rollout, oldest, stats, {"inference_latency_max": latency_max})

    def close(self) -> None:
        """Release the environments."""
        self._env.close()


def _write(rows: list[Any], time_step: int, values: PyTree) -> None:
    for row, value in zip(rows, jax.tree.leaves(values), strict=True):
        if not is_film(row):
            row[time_step] = value
            continue
        stack, width, deep = np.asarray(value), row.frames.shape[-1], row.deep
        row.frames[time_step + deep] = stacks.frame_of(stack, deep, width)
        row.anew[time_step] = stacks.is_one_frame(stack, width)
        for place in range(deep if time_step == 0 else 0):
            row.frames[place] = stacks.frame_of(stack, place, width)


def empty(shape: jax.ShapeDtypeStruct) -> np.ndarray:
    """Return an array for anything, at a multiple of 64 bytes: only there a device on the CPU takes it uncopied."""
    size = math.prod(shape.shape) * shape.dtype.itemsize
    room = np.empty(size + 64, np.uint8)
    start = -room.ctypes.data % 64
    return room[start : start + size].view(shape.dtype).reshape(shape.shape)


class InferencePool(ActorPool):
    """Actors that step environments, and beside them the servers that act for them, one a device.

    Args:
      acting: of the environments of an actor.
      devices: that act, each for its share of the actors.
      share: actors of a device.
      batch_size: environments that a device acts for at once, at most.
      max_wait: seconds that a request waits for others; see `InferenceServer`.
      settings: see `ActorPool`.
    """

    def __init__(
        self,
        acting: HostActing,
        devices: list[jax.Device],
        share: int,
        batch_size: int,
        max_wait: float,
        **settings: Any,
    ):
        super().__init__(self._compile_all, devices, device_of=lambda actor: actor // share, **settings)
        self._acting, self._share, self._batch_size, self._max_wait = acting, share, batch_size, max_wait
        self._servers: list[InferenceServer] = []

    def _compile_all(self, params: PyTree) -> Sequence[Callable[[Key, int], Actor]]:
        makers: list[Callable[[Key, int], Actor]] = []
        self._shapes = with_gap(self._acting.shapes(self._acting.length, self._acting.num_envs * self._share))
        for number, (device, latest) in enumerate(zip(self._devices, self.latest, strict=True)):
            compiled = CompiledInference(self._acting, params, device, self._batch_size)
            server = InferenceServer(compiled.act, self._acting.num_envs, self._max_wait, latest)
            self.services[f"podium-inference-{number}"] = partial(server.serve, self.stop)
            self._servers.append(server)
            for _ in range(self._share):
                makers.append(partial(EnvActor, compiled, server, len(makers) * self._acting.num_envs))
        return makers

    def take(self, number: int) -> Batch:
        """Return what update `number` learns from, one rollout a device; see `ActorPool.take`."""
        batch, share = super().take(number), self._share
        join = lambda axis, whole, *parts: np.concatenate(parts, axis, out=empty(whole))
        version, rollouts = np.int32(batch.version), []
        for low in range(0, len(batch.rollouts), share):
            whole = map_envs(join, self._shapes, *batch.rollouts[low : low + share])
            rollouts.append(whole._replace(policy_version=version))
        return batch._replace(rollouts=rollouts, stats=batch.stats | self._served())

    def _served(self) -> dict[str, np.float32]:
        """Return what the servers did since this was last asked."""
        batches = [server.served.popleft() for server in self._servers for _ in range(len(server.served))]
        envs, waited, seconds = zip(*batches, strict=True) if batches else ((0,), (0.0,), (0.0,))
        row = {"server_seconds": sum(seconds), "inference_batch_mean": np.mean(envs), "inference_wait_max": max(waited)}
        return {name: np.float32(value) for name, value in row.items()}
