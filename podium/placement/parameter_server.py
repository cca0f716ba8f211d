"""Parameter server (DistBelief, Dean et al. 2012; Gorila, Nair et al. 2015; A3C, Mnih et al. 2016): late gradients.

Workers step environments of their own, act, and take gradients at the newest parameters they can read; the server
applies the gradients one after another as they come, so that each may be late by those applied since it was begun.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from podium.agent import Agent
from podium.env import Env
from podium.host import HostEnvs
from podium.placement import program
from podium.placement.actors import POLL_SECONDS, STOP_SECONDS, Restarts, Watch, end_threads
from podium.placement.cores import OneCore
from podium.placement.cut import Cut, HostCut, Shapes, cut
from podium.placement.devices import Devices, at, jit, resolve_devices
from podium.placement.engine import Engine, Handle, resolve_engine
from podium.placement.explanation import Explanation
from podium.placement.fragments import Compiled, Fragment, compile_acting, fragment, lower, make_fragment
from podium.placement.learner import seed_at
from podium.placement.program import RunState, Sizes
from podium.placement.table import Move, Role, device_name, nbytes, numbers
from podium.placement.workers import Server, Story, Worker
from podium.types import Key, Metrics, PyTree


@dataclasses.dataclass(frozen=True)
class ParameterServer:
    """Let workers take gradients, each at its own pace, and one server apply them as they come.

    Deliberate differences from the papers. Workers are threads of one process; what they compute with may live in
    processes of its own (`engine`), on one machine or several, while the server stays here. The parameters are in one
    piece, on one device, and gradients are applied under a lock; reading needs none, as arrays never change. So every
    gradient is taken at a State that was whole at some time, and no two are ever mixed, as they may be in A3C and
    Hogwild (Niu et al. 2011). A worker reads the newest State before every gradient, not once a rollout as in A3C. The
    optimiser's statistics are the server's, shared by all.

    An update is one iteration of every worker, `num_envs * rollout_length` steps, in any order. Each worker has a
    replay of its own, of the agent's capacity, as in Gorila, and learns once that is filled as the agent asks; lanes
    are cut from its environments. With one worker this is Single; with several, runs of one seed differ, for which
    gradient comes first is a matter of time.

    Args:
      workers: threads, which divide `num_envs` among them.
      devices: a number, a sequence of devices, or None for all there are; workers take turns in choosing one, and the
        server's State is on the first.
      max_lag: versions of the State (gradients applied) that a gradient may be behind; None lets all pass.
      late: what becomes of later ones: "drop", or "weigh" by 1 / lag (Zhang et al. 2016, Staleness-aware Async-SGD;
        with `max_lag=0` it is the paper's rule). The paper divides the step size, here it is the gradient, which is the
        same for SGD and less than that for optimisers that normalise, such as Adam.
      worker_timeout: seconds without a step after which a worker counts as hung and the run ends. A rollout is one
        step and so is a gradient: allow for the longer of them.
      restarts: iterations that failed and may be repeated, in the whole run; 0 ends the run at the first. The rollout
        that failed is dropped; gradients that it gave before stay applied. Costs a copy of the replay an iteration. A
        worker whose process is gone gets another, whose environments and replay stand where the chunk began.
        Environments on the host cannot be set back: a rollout of theirs that failed is followed by fresh episodes.
      engine: where environments, replays and gradients are: "threads" has them in this process; "ray" has those of
        each worker in a Ray actor (`podium.launch`). States, gradients and trajectories then travel, and after every
        chunk what a checkpoint holds of the workers: where their environments stand, and their replays.
    """

    workers: int = 4
    devices: Devices = None
    max_lag: int | None = None
    late: Literal["drop", "weigh"] = "drop"
    worker_timeout: float = 60.0
    restarts: int = 0
    engine: Engine | Literal["threads", "ray"] = "threads"

    def build(
        self,
        agent: Agent,
        env: Env | HostEnvs,
        *,
        num_envs: int,
        rollout_length: int,
        seeds: int = 1,
        num_lanes: int | None = None,
        max_updates: int = 1,
    ) -> ParameterServerProgram:
        """Check every size and return the program; see `Placement.build`."""
        program.check_sizes(num_envs, rollout_length, seeds, max_updates)
        self._check()
        program.check_one_seed("ParameterServer", seeds)
        program.check_one_process("ParameterServer")
        program.check_workers(num_envs, self.workers)
        env = env if isinstance(env, HostEnvs) else program.prepare(env)
        devices = self._devices()
        own = Sizes(num_envs // self.workers, rollout_length, 1, 1)
        lanes = self._lanes(cut(agent, env, own, self.workers), num_lanes)
        return ParameterServerProgram(self, agent, env, Sizes(num_envs, rollout_length, 1, lanes), devices)

    def _devices(self) -> list[jax.Device]:
        """Return the devices of this process that are used: the server's, and the workers' if they are here."""
        return resolve_devices(self.devices)[: 1 if resolve_engine(self.engine).apart else self.workers]

    def _lanes(self, own: Cut, requested: int | None) -> int:
        """Return the lanes of all workers together; each has as many."""
        if requested is not None and (requested < 1 or requested % self.workers):
            raise ValueError(
                f"num_lanes={requested} is not divisible by workers={self.workers}; leave it out to have it chosen."
            )
        try:
            lanes = own.lanes(None if requested is None else requested // self.workers)
        except ValueError as error:
            raise error if self.workers == 1 else ValueError(f"In each of workers={self.workers}: {error}") from None
        return lanes * self.workers

    def _check(self) -> None:
        if isinstance(self.workers, bool) or not isinstance(self.workers, int) or self.workers < 1:
            raise ValueError(f"workers={self.workers!r} must be a positive integer; 4 is usual.")
        program.check_max_lag(self.max_lag)
        program.check_not_negative("use 0 for none", restarts=self.restarts)
        if self.late not in ("drop", "weigh"):
            raise ValueError(f"late={self.late!r} is not known; use 'drop' or 'weigh'.")
        if self.late == "weigh" and self.max_lag is None:
            raise ValueError(
                "late='weigh' weighs nothing where max_lag=None lets all pass; use max_lag=0 to weigh all."
            )
        program.check_seconds(worker_timeout=self.worker_timeout)

    def explain(self) -> Explanation:
        """Say in a table and a drawing who runs where and what moves; the program knows the numbers."""
        self._check()
        devices = self._devices()
        apart = resolve_engine(self.engine).apart
        away = sum(apart or number % len(devices) > 0 for number in range(self.workers))
        amounts: dict[str, int | str] = {}
        if away:
            amounts = {
                "gradients": f"{away} * gradient steps * the parameters",
                "states": f"at most {away} * (gradient steps + 1) * the agent's state",
                "trajectories": f"{away} * num_envs / {self.workers} * rollout_length * a step",
            }
        return self._explain(devices, ["its share of the environments"] * self.workers, amounts)

    def _explain(self, devices: list[jax.Device], shares: list[str], amounts: Mapping[str, int | str]) -> Explanation:
        roles = [Role("server", device_name(devices[0]), "the agent's state; applies gradients one by one")]
        apart = resolve_engine(self.engine).apart
        where = lambda number: "Ray actor" if apart else device_name(devices[number % len(devices)])  # noqa: E731
        places = [where(number) for number in range(self.workers)]
        roles += [Role("worker", place, share) for place, share in zip(places, shares, strict=True)]
        moves = [Move(name, way, amounts[name]) for name, way in _WAYS.items() if name in amounts]
        moves = moves if any(amounts.values()) else []
        if self.max_lag is None:
            late = "however many others were applied meanwhile"
        else:
            what = "dropped" if self.late == "drop" else "weighed by 1 / lag"
            late = f"and {what} if more than {self.max_lag} others were applied meanwhile"
        title = (
            "ParameterServer: workers step environments, act and take gradients; a server applies them as they come."
        )
        stale = f"a gradient is taken at the newest state, {late}."
        waits = "a worker for its turn at the server, which serves one at a time; the server for nobody."
        return Explanation(title, roles, moves, stale=stale, waits=waits)


_WAYS = {
    "observations": "environments to workers",
    "actions": "workers to environments",
    "gradients": "workers to server",
    "states": "server to workers",
    "trajectories": "workers to server",
}


class ParameterServerProgram:
    """The compiled pieces of an iteration, and the threads that do them; a `Program`."""

    def __init__(
        self,
        placement: ParameterServer,
        agent: Agent,
        env: Env | HostEnvs,
        sizes: Sizes,
        devices: list[jax.Device],
    ):
        self.agent, self.env, self.sizes, self.devices = agent, env, sizes, devices
        self.compile_seconds = 0.0
        self._placement = placement
        self.workers = number = placement.workers
        self._own = Sizes(sizes.num_envs // number, sizes.rollout_length, 1, sizes.num_lanes // number)
        self._cut = cut(agent, env, self._own, number)
        self._restarts = Restarts(placement.restarts)
        self._engine = resolve_engine(placement.engine)
        self._lowered: dict[tuple[str, jax.Device], Any] = {}
        self._handles: list[Handle] = []
        self._is_compiled = False
        self._left: Any = None
        self._seed: int | None = None
        self._workers: list[Worker] = []
        self._stop = threading.Event()

    def _device(self, worker: int) -> jax.Device:
        return self.devices[worker % len(self.devices)]

    def init(self, seed: int) -> RunState:
        """Return the first state."""
        self._seed = seed
        start = program.run_once(self._start, SingleDeviceSharding(self.devices[0]))(jax.random.key(seed))
        places = [self._device(worker) for worker in range(self._cut.num_workers)]
        empty = {device: program.run_once(self._empty_replay, SingleDeviceSharding(device)) for device in self.devices}
        replay = () if self.agent.replay is None else tuple(empty[device]() for device in places)
        rollout = tuple(jax.device_put(own, device) for own, device in zip(start.rollout, places, strict=True))
        return start._replace(replay=replay, rollout=rollout)

    def _start(self, key: Key) -> RunState:
        """Return the first state without replays; of the environments, numbered through, each worker has a slice."""
        whole = cut(self.agent._replace(replay=None), self.env, self.sizes, 1).start(key)
        size = self._own.num_envs
        share = lambda worker: jax.tree.map(lambda x: x[worker * size : (worker + 1) * size], whole.rollout)  # noqa: E731
        return whole._replace(rollout=tuple(share(worker) for worker in range(self._cut.num_workers)))

    def _empty_replay(self) -> PyTree:
        return self._cut.start(jax.random.key(0)).replay

    def abstract_state(self) -> RunState:
        """Return the state's shapes, dtypes and shardings."""
        shapes, replay = jax.eval_shape(self._start, jax.random.key(0)), jax.eval_shape(self._empty_replay)
        places = [self._device(worker) for worker in range(self._cut.num_workers)]
        replays = () if self.agent.replay is None else tuple(at(replay, device) for device in places)
        rollouts = tuple(at(own, device) for own, device in zip(shapes.rollout, places, strict=True))
        return at(shapes._replace(rollout=()), self.devices[0])._replace(replay=replays, rollout=rollouts)

    @functools.cached_property
    def _shapes(self) -> Shapes:
        """Trace an iteration of one worker, once, for its shapes."""
        return self._cut.shapes()

    @property
    def _keeps(self) -> bool:
        """Whether an iteration leaves what it began with as it was, because it may be repeated."""
        return self._placement.restarts > 0

    def lower(self) -> None:
        """Trace every piece of this process, once, without compiling it."""
        if self._lowered:
            return
        began = time.perf_counter()
        shapes = self._shapes
        for device in [] if self._engine.apart else self.devices:
            for name, piece in lower(self._cut, shapes, device, self._keeps).items():
                self._lowered[name, device] = piece
        first = self.devices[0]
        apply = shapes.state, shapes.gradient, jax.ShapeDtypeStruct((), np.float32)
        self._lowered["apply", first] = jit(self._cut.apply, first).lower(*at(apply, first))
        observe = shapes.state, shapes.trajectory
        self._lowered["observe", first] = jit(self._cut.observe, first).lower(*at(observe, first))
        self.compile_seconds += time.perf_counter() - began

    def compile(self) -> None:
        """Trace and compile every piece, once, and place the workers' fragments."""
        if self._is_compiled:
            return
        self.lower()
        began = time.perf_counter()
        if self._engine.apart:
            self._place(lambda worker: functools.partial(make_fragment, self._cut, worker, self._keeps))
        # Each device has a program of its own; XLA compiles them side by side.
        with concurrent.futures.ThreadPoolExecutor() as threads:
            done = dict(
                zip(self._lowered, threads.map(lambda lowered: lowered.compile(), self._lowered.values()), strict=True)
            )
        self._apply, self._observe = done["apply", self.devices[0]], done["observe", self.devices[0]]
        if not self._engine.apart:
            pieces = {device: (done["play", device], done["take", device]) for device in self.devices}
            on = {device: Compiled(self._cut, device, *both) for device, both in pieces.items()}
            acting = {device: compile_acting(self._cut, device) for device in self.devices}
            here = self._device
            cores = OneCore(self._cut.num_workers)
            self._place(lambda worker: lambda: fragment(on[here(worker)], worker, acting[here(worker)], cores))
        self._is_compiled = True
        self.compile_seconds += time.perf_counter() - began

    def _place(self, make: Callable[[int], Callable[[], Fragment]]) -> None:
        """Place the fragments of all workers, and wait until they stand: they compile at the same time."""
        for worker in range(self._cut.num_workers):
            self._handles.append(self._engine.place(f"podium-worker-{worker}", make(worker)))
        for answer in [handle.start("ready") for handle in self._handles]:
            answer.result(lambda: None)

    def chunk(self, state: RunState, num_updates: int) -> tuple[RunState, Metrics]:
        """Let every worker do `num_updates` iterations, and end their threads; consumes `state`.

        Returns:
          the next state, and metrics as NumPy: [num_updates] each (row i is of the i-th iteration of all workers,
          which they did at about the same time), and "finite", [2].

        Raises:
          ActorError: a worker died or hung.
        """
        self.compile()
        start, placement = self.update_count(state), self._placement
        server = Server(
            state.agent,
            start * placement.workers,
            self._apply,
            self._observe,
            self.devices[0],
            placement.max_lag,
            placement.late == "weigh",
        )
        self._stop = stop = threading.Event()
        rollouts: Any = state.rollout
        replays = state.replay or [()] * placement.workers
        # Fragments stand where the last chunk left them, unless this state is of another one.
        begins, self._left = self._left is None or self._left is not state.update, None
        # A run that goes on: episodes on the host begin anew, and not with those it began with.
        seed = self._seed if self._seed is not None and start == 0 else seed_at(state.key, start)
        self._workers = [
            Worker(
                number,
                handle,
                self._shapes,
                placement.workers,
                server,
                state.key,
                start,
                num_updates,
                (rollouts[number], replays[number]),
                seed,
                begins,
                self._restarts,
                stop,
            )
            for number, handle in enumerate(self._handles)
        ]
        try:
            for worker in self._workers:
                worker.start()
            self._wait()
        finally:
            self._end_threads()
        rows = [_row(stories) for stories in zip(*(worker.stories for worker in self._workers), strict=True)]
        seen = [story.finite.all() for worker in self._workers for story in worker.stories]
        following = RunState(
            state.key,
            jax.device_put(jnp.int32(start + num_updates), self.devices[0]),
            server.newest().state,
            self._here(worker.standing[1] for worker in self._workers) if state.replay else (),
            self._here(worker.standing[0] for worker in self._workers),
        )
        self._left = following.update
        finite = np.array([bool(program.all_finite(following.agent)), all(seen)])
        return following, {**jax.tree.map(lambda *x: np.stack(x), *rows), "finite": finite}

    def _here(self, trees: Iterable[PyTree]) -> tuple[PyTree, ...]:
        """Return a tree of every worker as the state holds it: on a device of this process."""
        return tuple(jax.device_put(tree, self._device(worker)) for worker, tree in enumerate(trees))

    def _wait(self) -> None:
        """Wait for the workers; raises ActorError for one that died or hung."""
        watches = [(worker, Watch(worker, self._placement.worker_timeout)) for worker in self._workers]
        while watches:
            watches[0][0].join(POLL_SECONDS)
            for worker, watch in list(watches):
                alive = worker.is_alive()
                if worker.done:
                    watches.remove((worker, watch))
                else:
                    watch.look(alive)

    def _end_threads(self) -> None:
        end_threads(self._workers, self._stop, STOP_SECONDS)

    def close(self) -> None:
        """End threads and fragments; a thread that hangs in native code is left behind as a daemon."""
        self._end_threads()
        for handle in self._handles:
            handle.close()

    def agent_state(self, state: RunState) -> PyTree:
        """Return the agent's State within `state`."""
        return state.agent

    def update_count(self, state: RunState) -> int:
        """Return the number of iterations, of every worker, behind `state`."""
        return int(np.asarray(state.update))

    def adopt(self, state: RunState, agent: PyTree, update: int) -> RunState:
        """Return the first state with the agent's State of another run; see `Program.adopt`."""
        return program.adopt(state, agent, update)

    def explain(self) -> Explanation:
        """Say in a table and a drawing who runs where, and how many bytes move in an update."""
        size = self._own.num_envs
        shares = [numbers(worker * size, size) for worker in range(self._cut.num_workers)]
        moves: dict[str, int | str] = dict(self.bytes_per_update())
        return self._placement._explain(self.devices, shares, moves)

    def bytes_per_update(self) -> dict[str, int]:
        """Return what moves between devices in an update, from shapes; of states the most that may."""
        workers = range(self._cut.num_workers)
        away = sum(self._engine.apart or self._device(worker) != self.devices[0] for worker in workers)
        shapes = self._shapes
        acting: dict[str, int] = {}
        if isinstance(self._cut, HostCut) and not self._engine.apart:
            params = jax.eval_shape(self.agent.actor, shapes.state)
            acting = self._cut.acting().bytes_moved(params, self.sizes.num_envs)
        return {
            **acting,
            "gradients": away * shapes.steps * nbytes(shapes.gradient),
            # One to act with, and one for every gradient, unless nothing was applied meanwhile.
            "states": away * (shapes.steps + 1) * nbytes(shapes.state),
            "trajectories": away * nbytes(shapes.trajectory),
        }


def _row(stories: tuple[Story, ...]) -> dict[str, np.ndarray]:
    """Return the metrics of one iteration of all workers."""
    lags = [lag for story in stories for lag in story.lags]
    whole, waited, served = (sum(seconds) for seconds in zip(*(story.seconds for story in stories), strict=True))
    row = {
        **{name: sum(story.episodes[name] for story in stories) for name in stories[0].episodes},
        "policy_lag_mean": np.mean(lags) if lags else np.nan,
        "policy_lag_max": max(lags, default=0),
        "late_gradients": sum(story.late for story in stories),
        "dropped_gradients": sum(story.dropped for story in stories),
        "nonfinite_gradients": sum(story.nonfinite for story in stories),
        "dropped_rollouts": sum(story.dropped_rollouts for story in stories),
        "worker_idle": waited / max(whole, 1e-9),
        # All workers go on at once: the time that passed is about the mean of theirs.
        "server_idle": max(0.0, 1 - served * len(stories) / max(whole, 1e-9)),
    }
    learnt = {name: _finite_mean([story.metrics[name] for story in stories]) for name in stories[0].metrics}
    return {name: np.asarray(value, np.float32) for name, value in {**learnt, **row}.items()}


def _finite_mean(parts: list[np.ndarray]) -> np.ndarray:
    """Return the mean over gradients and workers of what is finite; NaN where nothing is."""
    values = np.concatenate(parts)
    counted = np.isfinite(values)
    with np.errstate(invalid="ignore"):
        return np.where(counted, values, 0).sum(0) / counted.sum(0)
