"""Parameter server (DistBelief, Dean et al. 2012; Gorila, Nair et al. 2015; A3C, Mnih et al. 2016): late gradients.

Workers step environments of their own, act, and take gradients at the newest parameters they can read; the server
applies the gradients one after another as they come, so that each may be late by those applied since it was begun.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from podium import keys
from podium.agent import Agent
from podium.compiling import run_once
from podium.devices import Devices, at, jit, resolve_devices
from podium.env import Env
from podium.finite import all_finite
from podium.host import HostEnvFactory
from podium.placement.actors.actor import make_acting
from podium.placement.actors.gradients import GradientFunctions
from podium.placement.compiled.iteration import empty_replay, resolve_lanes
from podium.placement.contract import ACTING, EPISODES_RESTART, Asked, Placement, Program, RunState, Sizes
from podium.placement.remote.engine import Engine, Handle, LostError, resolve_engine
from podium.placement.threads.supervision import (
    POLL_SECONDS,
    FatalError,
    Heartbeat,
    RestartBudget,
    Stopped,
    SupervisedThread,
    Supervisor,
    acquired,
    end_threads,
)
from podium.ranges import check_divides, check_fields
from podium.report import Move, Report, Role, device_name, nbytes, shares
from podium.rollout import Rollout
from podium.tally import Addition
from podium.types import Key, Metrics, PyTree

ADDITIONS: Mapping[str, Addition] = {
    **ACTING,
    "policy_lag_mean": "mean",
    "policy_lag_max": "max",
    "late_gradients": "sum",
    "dropped_gradients": "sum",
    "nonfinite_gradients": "sum",
    "dropped_rollouts": "sum",
    "worker_idle": "mean",
    "server_idle": "mean",
}
"""How what is told of an iteration of all workers adds up over the updates of a row."""


@dataclasses.dataclass(frozen=True)
class ParameterServer(Placement):
    """Let workers take gradients, each at its own pace, and one server apply them as they come.

    Deliberate differences from the papers. Workers are threads of one process; what they compute with may live in
    processes of its own (`engine`), on one machine or several, while the server stays here. The parameters are in one
    piece, on one device, and gradients are applied under a lock; reading needs none, as arrays never change. So every
    gradient is taken at a State that was whole at some time, and no two are ever mixed, as they may be in A3C and
    Hogwild (Niu et al. 2011). A worker reads the newest State before every gradient, not once a rollout as in A3C. The
    optimiser's statistics are the server's, shared by all.

    `Agent.stops` ends the iteration of the worker whose gradient says so and nobody else's; metrics are then means over
    the gradients that were taken.

    An update is one iteration of every worker, `num_envs * rollout_length` steps, in any order. Each worker has a
    replay of its own, of the agent's capacity, as in Gorila, and learns once that is filled as the agent asks; lanes
    are cut from its environments. With one worker this is Single; with several, runs of one seed differ, for which
    gradient comes first is a matter of time.

    Args:
      workers: threads, which divide `num_envs` among them.
      devices: a number, a sequence of devices, or None for all there are; workers take turns in choosing one, and the
        server's State is on the first.
      max_gradient_lag: gradients applied meanwhile that a gradient may be behind; None lets all pass.
      late: what becomes of later gradients: "drop", or "weigh" by 1 / lag (Zhang et al. 2016, Staleness-aware
        Async-SGD; with `max_gradient_lag=0` it is the paper's rule). The paper divides the step size, here it is the
        gradient, which is the same for SGD and less than that for optimisers that normalise, such as Adam.
      actor_timeout: seconds without a step after which a worker counts as hung and the run ends. A rollout is one
        step and so is a gradient: allow for the longer of them.
      restarts: iterations that failed and may be repeated, in the whole run; 0 ends the run at the first. The rollout
        that failed is dropped; gradients that it gave before stay applied. Costs a copy of the replay an iteration. A
        worker whose process is gone gets another, whose environments and replay stand where the chunk began.
        Environments on the host cannot be set back: a rollout of theirs that failed is followed by fresh episodes.
      engine: where environments, replays and gradients are: "threads" has them in this process; "ray" has those of
        each worker in a Ray actor (`podium.launch`). States, gradients and rollouts then travel, and after every
        chunk what a checkpoint holds of the workers: where their environments stand, and their replays.
    """

    workers: int = 4
    devices: Devices = None
    max_gradient_lag: int | None = None
    late: Literal["drop", "weigh"] = "drop"
    actor_timeout: float = 60.0
    restarts: int = 0
    engine: Engine | Literal["threads", "ray"] = "threads"

    def program(self, agent: Agent, env: Env | HostEnvFactory, asked: Asked) -> Program:
        """Return the program; see `Placement.program`."""
        num_envs, length, workers = asked.num_envs, asked.rollout_length, self.workers
        engine, places = self._resolve()
        check_divides(num_envs, workers, f"workers={workers}")
        acting = make_acting(agent, env, num_envs // workers, length)
        lanes = self._lanes(acting, asked.num_lanes)
        functions = GradientFunctions(acting, Sizes(acting.num_envs, length, 1, lanes), workers)
        sizes = Sizes(num_envs, length, 1, lanes * workers)
        loop = ParameterServerLoop(self, functions, sizes, engine, places)

        def moves() -> dict[str, int]:
            shapes, away = functions.shapes, sum(engine.apart or place != places[0] for place in places)
            return {
                **({} if engine.apart else acting.bytes_moved(num_envs)),
                "gradients": away * shapes.steps * nbytes(shapes.gradient),
                # One to act with, and one for every gradient, unless nothing was applied meanwhile.
                "states": away * (shapes.steps + 1) * nbytes(shapes.state),
                "trajectories": away * nbytes(shapes.rollout),
            }

        report = functools.partial(self._explain, num_envs)
        layout, loses = f"ParameterServer of {workers} workers", EPISODES_RESTART if acting.on_host else ""
        devices = list(dict.fromkeys(places))
        return Program(agent, acting.env, sizes, devices, loop, layout, moves, report, ADDITIONS, resume_loses=loses)

    @classmethod
    def candidates(cls, num_devices: int, num_envs: int) -> Sequence[Self]:
        """Return four workers, or one a device."""
        return [cls(4 if 4 % num_devices == 0 else num_devices, devices=num_devices)]

    def _resolve(self) -> tuple[Engine, list[jax.Device]]:
        """Check the settings; return the engine, and each worker's device here: the server's, where they are apart."""
        check_fields(self, counts=("workers",), naturals=("max_gradient_lag", "restarts"), positive=("actor_timeout",))
        if self.late not in ("drop", "weigh"):
            raise ValueError(f"late={self.late!r} is not known; use 'drop' or 'weigh'.")
        if self.late == "weigh" and self.max_gradient_lag is None:
            raise ValueError(
                "late='weigh' weighs nothing where max_gradient_lag=None lets all pass; use max_gradient_lag=0 to "
                "weigh all."
            )
        engine, devices = resolve_engine(self.engine), resolve_devices(self.devices)
        return engine, [devices[0 if engine.apart else worker % len(devices)] for worker in range(self.workers)]

    def num_replays(self) -> int:
        """Return the number of workers."""
        return len(self._resolve()[1])

    def _lanes(self, acting: Any, requested: int | None) -> int:
        """Return the lanes of each worker; `requested` are those of all together."""
        if requested is not None and (requested < 1 or requested % self.workers):
            raise ValueError(
                f"num_lanes={requested} is not divisible by workers={self.workers}; leave it out to have it chosen."
            )
        try:
            own = requested and requested // self.workers
            return resolve_lanes(acting, acting.num_envs, acting.length, requested=own)
        except ValueError as error:
            raise error if self.workers == 1 else ValueError(f"In each of workers={self.workers}: {error}") from None

    def _explain(self, num_envs: int | None, amounts: Mapping[str, int | None]) -> Report:
        engine, places = self._resolve()
        if num_envs is None and (engine.apart or len(set(places)) > 1):
            amounts = dict.fromkeys(("gradients", "states", "trajectories"))
        roles = [Role("server", device_name(places[0]), "the agent's state; applies gradients one by one")]
        where = ["Ray actor" if engine.apart else device_name(place) for place in places]
        roles += [
            Role("worker", place, share) for place, share in zip(where, shares(num_envs, self.workers), strict=True)
        ]
        ways = {
            "observations": "environments to workers",
            "actions": "workers to environments",
            "gradients": "workers to server",
            "states": "server to workers",
            "trajectories": "workers to server",
        }
        known = amounts if any(amount != 0 for amount in amounts.values()) else {}
        moves = [Move(name, ways[name], amount) for name, amount in known.items()]
        if self.max_gradient_lag is None:
            late = "however many others were applied meanwhile"
        else:
            what = "dropped" if self.late == "drop" else "weighed by 1 / lag"
            late = f"and {what} if more than {self.max_gradient_lag} others were applied meanwhile"
        return Report(
            "ParameterServer: workers step environments, act and take gradients; a server applies them as they come.",
            roles,
            moves,
            stale=f"a gradient is taken at the newest state, {late}.",
            waits="a worker for its turn at the server, which serves one at a time; the server for nobody.",
        )


class Newest(NamedTuple):
    """The server's State, the gradients applied to it since the chunk began, and the iterations observed in the run."""

    state: PyTree
    version: int
    iterations: int


class Applied(NamedTuple):
    """What became of a gradient: its lag, whether it was late (a finite one), or applied, and seconds of serving it."""

    lag: int
    late: bool
    applied: bool
    seconds: float


@dataclasses.dataclass(eq=False)
class Server:
    """The one State: whoever brings a gradient applies it, one at a time; reading `newest` waits for nobody.

    Arrays never change, so what was read stays whole whatever is applied meanwhile.

    Args:
      newest: to begin with.
      do_apply: `(State, gradient, weight) -> State`, compiled for `device`.
      do_observe: `(State, Rollout) -> State`, likewise.
      device: that applies.
      settings: which gradients are late, and what becomes of them.
    """

    newest: Newest
    do_apply: Callable[..., PyTree]
    do_observe: Callable[..., PyTree]
    device: jax.Device
    settings: ParameterServer
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def apply(self, gradient: PyTree, version: int, finite: bool, heartbeat: Heartbeat) -> Applied:
        """Apply a gradient taken at `version`, unless it is not finite, or too late where such are dropped.

        `heartbeat`, which may raise, is called every `POLL_SECONDS` while others are served.
        """
        with acquired(self.lock, heartbeat):
            began, now, limit = time.perf_counter(), self.newest, self.settings.max_gradient_lag
            lag = now.version - version
            late = finite and limit is not None and lag > limit
            applied = finite and (not late or self.settings.late == "weigh")
            if applied:
                weight = np.float32(1.0 / lag if late else 1.0)
                state = self.do_apply(now.state, jax.device_put(gradient, self.device), weight)
                # Nothing is replaced before it is there: an apply that fails leaves the State as it was.
                self.newest = Newest(jax.block_until_ready(state), now.version + 1, now.iterations)
            return Applied(lag, late, applied, time.perf_counter() - began)

    def observe(self, rollout: Rollout, heartbeat: Heartbeat) -> float:
        """Let the State observe a worker's rollout, after its last gradient; returns the seconds it took."""
        with acquired(self.lock, heartbeat):
            began, now = time.perf_counter(), self.newest
            state = self.do_observe(now.state, jax.device_put(rollout, self.device))
            self.newest = Newest(jax.block_until_ready(state), now.version, now.iterations + 1)
            return time.perf_counter() - began


class IterationStats(NamedTuple):
    """What one iteration of one worker came to: metrics of all gradients, lags of those applied, whether all is finite.

    `sums` are counts, and seconds: of the whole, of waiting for the server (its work for this worker included), and of
    that work. `finite` is of what the environments gave.
    """

    rows: list[dict[str, np.ndarray]]
    lags: list[int]
    sums: dict[str, float]
    finite: bool


@dataclasses.dataclass(eq=False)
class GradientWorker:
    """Does the iterations of a chunk: lets a `GradientActor` play and take gradients, and brings them to the server.

    Args:
      newest: of the server when the chunk begins: all workers begin with it, however late their threads start.
      numbers: of the iterations.
      start: arguments of `GradientActor.begin`: where the chunk begins, and an actor that was lost begins again.
      begins: whether the actor does not stand there yet.

    Attributes:
      iterations: what each came to.
      standing: where the environments stand, and the replay, or `()`, once all iterations are done.
    """

    loop: ParameterServerLoop
    handle: Handle
    server: Server
    newest: Newest
    numbers: range
    start: tuple[Key, Any, PyTree, int]
    begins: bool

    def __post_init__(self) -> None:
        self.iterations: list[IterationStats] = []
        self.standing: tuple[Any, PyTree] = self.start[1:3]
        self._sent: Newest | None = None
        self._lost, self._stop = False, self.loop.stop

    def run(self, heartbeat: Heartbeat) -> None:
        """Do all iterations, each again from where it began if it fails and that is still allowed."""
        dropped = 0
        while len(self.iterations) < len(self.numbers):
            number = self.numbers[len(self.iterations)]
            try:
                self._begin(heartbeat)
                self.iterations.append(self._iterate(number, dropped, heartbeat))
                dropped = 0
            except (Stopped, FatalError):
                raise
            except Exception as error:
                if not self.loop.restarts.take():
                    raise
                dropped += 1
                self._sent, self._lost = None, self._lost or isinstance(error, LostError)
                print(f"{self.handle.name} repeats iteration {number}, which died of {error!r}", file=sys.stderr)
            self.newest = self.server.newest
        try:
            self.standing = self._call("standing")
        except LostError as error:
            if not self.loop.restarts.take():
                raise
            print(f"{self.handle.name} goes back to where this chunk began, for {error}", file=sys.stderr)
            self.iterations[-1].sums["dropped_rollouts"] += 1
            self._lost = True
            self._begin(heartbeat)

    def _iterate(self, number: int, dropped: int, heartbeat: Heartbeat) -> IterationStats:
        """Play, bring every gradient to the server, and let it observe the rollout."""
        began, functions = time.perf_counter(), self.loop.functions
        # The version in a rollout counts updates: iterations of all workers together.
        version = self.newest.iterations // functions.num_workers
        rollout, ready, stats, finite_envs = self._call("play", number, version, self._unsent(self.newest))
        heartbeat()
        rows, brought, waited = [], [], 0.0
        for step in range(functions.shapes.steps if ready else 0):
            newest = self.server.newest
            gradient, finite, metrics, stop = self._call("take", step, self._unsent(newest))
            heartbeat()
            rows.append(metrics)
            if stop:
                break
            asked = time.perf_counter()
            brought.append(self.server.apply(gradient, newest.version, finite, heartbeat))
            waited += time.perf_counter() - asked
            heartbeat()
        asked = time.perf_counter()
        served = self.server.observe(rollout, heartbeat) + sum(each.seconds for each in brought)
        waited += time.perf_counter() - asked
        # Here the iteration counts as done, and not before: what failed above is repeated from where it began.
        self._call("settle")
        heartbeat()
        sums = {
            **stats,
            "late_gradients": sum(each.late for each in brought),
            "dropped_gradients": sum(each.late and not each.applied for each in brought),
            "nonfinite_gradients": sum(not each.late and not each.applied for each in brought),
            "dropped_rollouts": dropped,
            "seconds": time.perf_counter() - began,
            "waited": waited,
            "served": served,
        }
        lags = [each.lag for each in brought if each.applied]
        return IterationStats(jax.device_get(rows), lags, sums, bool(np.all(finite_envs)))

    def _begin(self, heartbeat: Heartbeat) -> None:
        """Let the actor stand where the chunk began, if it does not stand anywhere yet, or is lost."""
        if self._lost:
            self.handle.restart()
            self._lost, self.begins = False, True
        if self.begins:
            # Starting a process takes as long as its engine allows, and is no step that hangs.
            self.handle.call("begin", *self.start, heartbeat=heartbeat)
            self.begins = False

    def _unsent(self, newest: Newest) -> PyTree | None:
        """Return the State to send to the actor; None where that is what it has."""
        if self._sent is not None and self._sent[1:] == newest[1:]:
            return None
        self._sent = newest
        return newest.state

    def _call(self, method: str, *arguments: Any) -> Any:
        """Call the actor; while it is waited for no heartbeat counts, so that one that hangs is noticed."""

        def check_stop() -> None:
            if self._stop.is_set():
                raise Stopped

        return self.handle.call(method, *arguments, heartbeat=check_stop)


@dataclasses.dataclass(eq=False)
class ParameterServerLoop:
    """A `Loop` whose chunk lets every worker do its iterations beside the others.

    The first of `places`, the devices of all workers in this process, is the server's; `functions` are of one worker.
    """

    placement: ParameterServer
    functions: GradientFunctions
    sizes: Sizes
    engine: Engine
    places: list[jax.Device]
    compile_seconds: float = 0.0

    def __post_init__(self) -> None:
        self.restarts, self.stop = RestartBudget(self.placement.restarts), threading.Event()
        # Where an iteration may be repeated, it leaves what it began with as it was.
        self._keeps = self.placement.restarts > 0
        self._has_replay = self.functions.acting.agent.replay is not None
        self._empty_replay = functools.partial(empty_replay, self.functions.acting, self.functions.sizes)
        self._lowered: dict[jax.Device, tuple[Any, Any]] = {}
        self._apply: Any = None
        self._handles: list[Handle] = []
        self._threads: list[SupervisedThread] = []
        self._last: Any = None
        self._seed: int | None = None

    def chunk(self, state: RunState, num_updates: int) -> tuple[RunState, Metrics]:
        """Let every worker do `num_updates` iterations, and end their threads; see `Loop.chunk`.

        Row i of the metrics is of the i-th iteration of all workers, which they did at about the same time.
        """
        self.compile()
        settings, first, self.stop = self.placement, int(state.update), threading.Event()
        newest = Newest(state.agent, 0, first * settings.workers)
        server = Server(newest, self._apply, self._observe, self.places[0], settings)
        # Actors stand where the last chunk left them, unless this state is of another one.
        begins, self._last = self._last is None or self._last is not state.update, None
        numbers, seed = range(first, first + num_updates), keys.episode_seed(self._seed, state.key, first)
        standing = zip(state.rollout, state.replay or [()] * settings.workers, strict=True)
        workers = [
            GradientWorker(self, handle, server, newest, numbers, (state.key, *own, seed), begins)
            for handle, own in zip(self._handles, standing, strict=True)
        ]
        self._run(workers)
        iterations = list(zip(*(worker.iterations for worker in workers), strict=True))
        rows = [_row(each, self.functions.shapes.metrics) for each in iterations]
        finite = all(each.finite for one in iterations for each in one)
        rollout, replay = (self._placed(each) for each in zip(*(worker.standing for worker in workers), strict=True))
        self._last = jax.device_put(jnp.int32(first + num_updates), self.places[0])
        state = RunState(state.key, self._last, server.newest.state, replay if state.replay else (), rollout)
        both = np.array([bool(all_finite(state.agent)), finite])
        return state, {**jax.tree.map(lambda *x: np.stack(x), *rows), "finite": both}

    def _run(self, workers: Sequence[GradientWorker]) -> None:
        """Let all workers run, and wait for them; raises ActorError for one that died or hung."""
        self._threads = [SupervisedThread(worker.handle.name, worker.run, self.stop) for worker in workers]
        supervisors = [Supervisor(thread, self.placement.actor_timeout) for thread in self._threads]
        try:
            for thread in self._threads:
                thread.start()
            while supervisors:
                supervisors[0].thread.join(POLL_SECONDS)
                for supervisor in supervisors:
                    supervisor.check(supervisor.thread.is_alive())
                supervisors = [supervisor for supervisor in supervisors if not supervisor.thread.done]
        finally:
            end_threads(self._threads, self.stop)

    def init(self, seed: int) -> RunState:
        """Return the first state."""
        self._seed = seed
        first = run_once(self._start, SingleDeviceSharding(self.places[0]))(jax.random.key(seed))
        empty = {device: run_once(self._empty_replay, SingleDeviceSharding(device)) for device in set(self.places)}
        replay = tuple(empty[device]() for device in self.places) if self._has_replay else ()
        return first._replace(replay=replay, rollout=self._placed(first.rollout))

    def abstract_state(self) -> RunState:
        """Return the state's shapes, dtypes and shardings."""
        shapes, replay = jax.eval_shape(self._start, jax.random.key(0)), jax.eval_shape(self._empty_replay)
        replays = self._placed([replay] * len(self.places), at) if self._has_replay else ()
        whole = at(shapes._replace(rollout=()), self.places[0])
        return whole._replace(replay=replays, rollout=self._placed(shapes.rollout, at))

    def _start(self, key: Key) -> RunState:
        """Return the first state without replays; of the environments, numbered through, each worker has a slice."""
        roots, acting, size = keys.roots(key), self.functions.acting, self.functions.sizes.num_envs
        whole = acting.begin(roots.env, jnp.arange(self.sizes.num_envs))
        share = lambda worker: jax.tree.map(lambda x: x[worker * size : (worker + 1) * size], whole)
        rollouts: Any = tuple(share(worker) for worker in range(self.placement.workers))
        return RunState(roots.run, jnp.zeros((), jnp.int32), acting.agent.init(roots.agent, acting.spec), (), rollouts)

    def _placed(self, trees: Iterable[PyTree], put: Callable[..., Any] = jax.device_put) -> tuple[PyTree, ...]:
        """Return a tree of every worker as the state holds it: on a device of this process."""
        return tuple(put(tree, device) for tree, device in zip(trees, self.places, strict=True))

    def lower(self) -> None:
        """Trace every function of this process, once, without compiling it."""
        if self._lowered or self.engine.apart:
            return
        began = time.perf_counter()
        self._lowered = {device: self.functions.lower(device, self._keeps) for device in set(self.places)}
        self.compile_seconds += time.perf_counter() - began

    def compile(self) -> None:
        """Trace and compile every function, once, and place the workers' actors."""
        if self._apply is not None:
            return
        self.lower()
        began, of, first, keeps = time.perf_counter(), self.functions, self.places[0], self._keeps
        state, weight = of.shapes.state, jax.ShapeDtypeStruct((), np.float32)
        to_apply, to_observe = at(((state, of.shapes.gradient, weight), (state, of.shapes.rollout)), first)
        # Each device has programs of its own; XLA compiles them side by side.
        with concurrent.futures.ThreadPoolExecutor() as threads:
            apply = threads.submit(lambda: jit(of.apply, first).lower(*to_apply).compile())
            observe = threads.submit(lambda: jit(of.observe, first).lower(*to_observe).compile())
            compile = lambda device: of.compile(device, keeps, self._lowered[device])
            on = dict(zip(self._lowered, threads.map(compile, self._lowered), strict=True))
        plain = dataclasses.replace(of)  # Without the shapes that it has traced, which cannot be sent.
        for worker, place in enumerate(self.places):
            make = functools.partial(on[place], worker) if on else functools.partial(plain.make, worker, keeps)
            self._handles.append(self.engine.place(f"podium-worker-{worker}", make))
        # All are asked before any is waited for: elsewhere they compile at the same time.
        for reply in [handle.start("ready") for handle in self._handles]:
            reply.result(lambda: None)
        self._apply, self._observe = apply.result(), observe.result()
        self.compile_seconds += time.perf_counter() - began

    def close(self) -> None:
        """End threads and actors; a thread that hangs in native code is left behind as a daemon."""
        end_threads(self._threads, self.stop)
        for handle in self._handles:
            handle.close()


def _row(iterations: tuple[IterationStats, ...], shapes: Metrics) -> dict[str, np.ndarray]:
    """Return the metrics of one iteration of all workers; `shapes` are those of a gradient's."""
    lags = [lag for each in iterations for lag in each.lags]
    sums = {name: sum(each.sums[name] for each in iterations) for name in iterations[0].sums}
    whole, waited, served = (sums.pop(name) for name in ("seconds", "waited", "served"))
    rows = [row for each in iterations for row in each.rows]
    row = {
        **{name: _finite_mean([row[name] for row in rows], shape) for name, shape in shapes.items()},
        **sums,
        "policy_lag_mean": np.mean(lags) if lags else np.nan,
        "policy_lag_max": max(lags, default=0),
        "worker_idle": waited / max(whole, 1e-9),
        # All workers work at once: the time that passed is about the mean of theirs.
        "server_idle": max(0.0, 1 - served * len(iterations) / max(whole, 1e-9)),
    }
    return {name: np.asarray(value, np.float32) for name, value in row.items()}


def _finite_mean(values: list[np.ndarray], shape: Any) -> np.ndarray:
    """Return the mean over gradients and workers of what is finite; NaN where nothing is."""
    stacked = np.stack(values or [np.full(shape.shape, np.nan)])
    counted = np.isfinite(stacked)
    with np.errstate(invalid="ignore"):
        return np.where(counted, stacked, 0).sum(0) / counted.sum(0)
