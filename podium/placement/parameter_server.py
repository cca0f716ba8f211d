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
from podium.devices import Devices, at, jit, resolve_devices
from podium.env import Env
from podium.host import HostEnvFactory
from podium.placement.actors.actor import make_acting
from podium.placement.actors.gradients import (
    GradientActor,
    GradientFunctions,
    Played,
    compile_functions,
    make_gradient_actor,
)
from podium.placement.compiled.iteration import (
    all_finite,
    empty_replay,
    episode_seed,
    params_shapes,
    resolve_lanes,
    run_once,
)
from podium.placement.contract import (
    ACTING,
    EPISODES_RESTART,
    Addition,
    Asked,
    Move,
    Placement,
    Program,
    Report,
    Role,
    Rollout,
    RunState,
    Sizes,
    check_divides,
    check_fields,
    device_name,
    nbytes,
    numbers,
    update_count,
)
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
        num_envs, rollout_length = asked.num_envs, asked.rollout_length
        self._check()
        check_divides(num_envs, self.workers, f"workers={self.workers}")
        devices = self._devices()
        acting = make_acting(agent, env, num_envs // self.workers, rollout_length)
        lanes = self._lanes(acting, asked.num_lanes)
        sizes = Sizes(num_envs, rollout_length, 1, lanes * self.workers)
        functions = GradientFunctions(acting, Sizes(acting.num_envs, rollout_length, 1, lanes), self.workers)
        loop = ParameterServerLoop(self, functions, sizes, devices)

        def moves() -> dict[str, int]:
            shapes, apart = functions.shapes, resolve_engine(self.engine).apart
            away = sum(apart or worker % len(devices) > 0 for worker in range(self.workers))
            acted = {} if apart else acting.bytes_moved(params_shapes(agent, acting.spec), num_envs)
            return {
                **acted,
                "gradients": away * shapes.steps * nbytes(shapes.gradient),
                # One to act with, and one for every gradient, unless nothing was applied meanwhile.
                "states": away * (shapes.steps + 1) * nbytes(shapes.state),
                "trajectories": away * nbytes(shapes.rollout),
            }

        shares = [numbers(worker * acting.num_envs, acting.num_envs) for worker in range(self.workers)]
        return Program(
            agent,
            acting.env,
            sizes,
            devices,
            loop,
            f"ParameterServer of {self.workers} workers",
            moves,
            lambda amounts: self._report(shares, amounts),
            ADDITIONS,
            resume_loses=EPISODES_RESTART if acting.on_host else "",
        )

    def explain(self) -> Report:
        """Say in a table and a drawing who runs where and what moves; `Program.explain` knows the numbers."""
        self._check()
        return self._report(["its share of the environments"] * self.workers)

    @classmethod
    def candidates(cls, num_devices: int, num_envs: int) -> Sequence[Self]:
        """Return four workers, or one a device."""
        return [cls(4 if 4 % num_devices == 0 else num_devices, devices=num_devices)]

    def _devices(self) -> list[jax.Device]:
        """Return the devices of this process that are used: the server's, and the workers' if they are here."""
        return resolve_devices(self.devices)[: 1 if resolve_engine(self.engine).apart else self.workers]

    def _lanes(self, acting: Any, requested: int | None) -> int:
        """Return the lanes of each worker; `requested` are those of all together."""
        if requested is not None and (requested < 1 or requested % self.workers):
            raise ValueError(
                f"num_lanes={requested} is not divisible by workers={self.workers}; leave it out to have it chosen."
            )
        own = None if requested is None else requested // self.workers
        try:
            return resolve_lanes(acting, acting.num_envs, acting.length, requested=own)
        except ValueError as error:
            raise error if self.workers == 1 else ValueError(f"In each of workers={self.workers}: {error}") from None

    def _check(self) -> None:
        check_fields(self, counts=("workers",), naturals=("max_gradient_lag", "restarts"), positive=("actor_timeout",))
        if self.late not in ("drop", "weigh"):
            raise ValueError(f"late={self.late!r} is not known; use 'drop' or 'weigh'.")
        if self.late == "weigh" and self.max_gradient_lag is None:
            raise ValueError(
                "late='weigh' weighs nothing where max_gradient_lag=None lets all pass; use max_gradient_lag=0 to "
                "weigh all."
            )

    def _report(self, shares: list[str], amounts: Mapping[str, int] | None = None) -> Report:
        devices, apart = self._devices(), resolve_engine(self.engine).apart
        roles = [Role("server", device_name(devices[0]), "the agent's state; applies gradients one by one")]
        places = ["Ray actor" if apart else device_name(devices[i % len(devices)]) for i in range(self.workers)]
        roles += [Role("worker", place, share) for place, share in zip(places, shares, strict=True)]
        ways = {
            "observations": "environments to workers",
            "actions": "workers to environments",
            "gradients": "workers to server",
            "states": "server to workers",
            "trajectories": "workers to server",
        }
        if amounts is None:
            known: tuple[str, ...] = ("gradients", "states", "trajectories") if apart or len(devices) > 1 else ()
        else:
            known = tuple(amounts) if any(amounts.values()) else ()
        moves = [Move(name, way, (amounts or {}).get(name)) for name, way in ways.items() if name in known]
        if self.max_gradient_lag is None:
            late = "however many others were applied meanwhile"
        else:
            what = "dropped" if self.late == "drop" else "weighed by 1 / lag"
            late = f"and {what} if more than {self.max_gradient_lag} others were applied meanwhile"
        title = (
            "ParameterServer: workers step environments, act and take gradients; a server applies them as they come."
        )
        stale = f"a gradient is taken at the newest state, {late}."
        waits = "a worker for its turn at the server, which serves one at a time; the server for nobody."
        return Report(title, roles, moves, stale=stale, waits=waits)


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


class Server:
    """The one State: whoever brings a gradient applies it, one at a time; reading waits for nobody.

    Args:
      state: on `device`.
      iterations: of all workers, that are behind it.
      apply: `(State, gradient, weight) -> State`, compiled.
      observe: `(State, Rollout) -> State`, compiled.
      device: that applies.
      max_lag: versions that a gradient may be behind; None lets all pass.
      weigh: whether later ones are weighed, and not dropped.
    """

    def __init__(
        self,
        state: PyTree,
        iterations: int,
        apply: Callable[..., PyTree],
        observe: Callable[..., PyTree],
        device: jax.Device,
        max_lag: int | None,
        weigh: bool,
    ):
        self._newest = Newest(state, 0, iterations)
        self._apply, self._observe, self._device = apply, observe, device
        self._max_lag, self._weigh = max_lag, weigh
        self._lock = threading.Lock()

    def newest(self) -> Newest:
        """Return the newest State; arrays never change, so what was read stays whole whatever is applied meanwhile."""
        return self._newest

    def apply(self, gradient: PyTree, version: int, finite: bool, heartbeat: Heartbeat) -> Applied:
        """Apply a gradient taken at `version`, unless it is not finite, or too late where such are dropped.

        Args:
          gradient: on any device.
          version: of the State that it was taken at.
          finite: whether all of it is.
          heartbeat: called every `POLL_SECONDS` while others are served; may raise.

        Returns:
          what became of it.
        """
        with acquired(self._lock, heartbeat):
            began, now = time.perf_counter(), self._newest
            lag = now.version - version
            late = finite and self._max_lag is not None and lag > self._max_lag
            applied = finite and (self._weigh or not late)
            if applied:
                weight = np.float32(1.0 / lag if late else 1.0)
                state = self._apply(now.state, jax.device_put(gradient, self._device), weight)
                # Nothing is replaced before it is there: an apply that fails leaves the State as it was.
                self._newest = Newest(jax.block_until_ready(state), now.version + 1, now.iterations)
            return Applied(lag, late, applied, time.perf_counter() - began)

    def observe(self, rollout: Rollout, heartbeat: Heartbeat) -> float:
        """Let the State observe a worker's rollout, after its last gradient; returns the seconds it took."""
        with acquired(self._lock, heartbeat):
            began, now = time.perf_counter(), self._newest
            state = self._observe(now.state, jax.device_put(rollout, self._device))
            self._newest = Newest(jax.block_until_ready(state), now.version, now.iterations + 1)
            return time.perf_counter() - began


class IterationStats(NamedTuple):
    """What one iteration of one worker came to.

    Attributes:
      metrics: of every gradient taken, [G] each; NaN, [1], where there was nothing to learn from.
      lags: of the gradients that were applied.
      sums: counts, and seconds: of the whole, of waiting for the server (its work for this worker included), and of
        that work.
      finite: whether every environment gave finite numbers only.
    """

    metrics: dict[str, np.ndarray]
    lags: list[int]
    sums: dict[str, float]
    finite: bool


class Chunk(NamedTuple):
    """What all workers do in a chunk: `length` iterations from number `start` on, of a run with this key and seed."""

    run_key: Key
    start: int
    length: int
    seed: int


class GradientWorker:
    """Does the iterations of a chunk: lets a `GradientActor` play and take gradients, and brings them to the server.

    Args:
      number: of this worker.
      handle: of its GradientActor, which may live elsewhere.
      functions: that it computes with.
      server: to read from and bring to.
      chunk: to do.
      standing: where its environments stand, and its replay, or `()`; an actor that is lost begins there again.
      begins: whether its actor does not stand there yet.
      restarts: shared with the other workers.
      stop: set when the run is over.

    Attributes:
      name: of its thread.
      iterations: what each came to.
      standing: as the argument, after the last iteration once it is done.
    """

    def __init__(
        self,
        number: int,
        handle: Handle,
        functions: GradientFunctions,
        server: Server,
        chunk: Chunk,
        standing: tuple[Any, PyTree],
        begins: bool,
        restarts: RestartBudget,
        stop: threading.Event,
    ):
        self.name = f"podium-worker-{number}"
        self.iterations: list[IterationStats] = []
        self.standing = standing
        self._handle, self._functions, self._server, self._chunk = handle, functions, server, chunk
        self._begins, self._restarts, self._stop = begins, restarts, stop
        # Every worker begins with the State that the chunk begins with, however late its thread starts.
        self._newest = server.newest()
        self._sent: Newest | None = None
        self._lost = False

    def run(self, heartbeat: Heartbeat) -> None:
        """Do all iterations."""
        for number in range(self._chunk.start, self._chunk.start + self._chunk.length):
            self.iterations.append(self._persist(number, heartbeat))
            self._newest = self._server.newest()
        self.standing = self._fetch(heartbeat)

    def _iterate(self, number: int, heartbeat: Heartbeat) -> IterationStats:
        """Play, bring every gradient to the server, and let it observe the rollout."""
        began, shapes = time.perf_counter(), self._functions.shapes
        # The version in a rollout counts updates: iterations of all workers together.
        version = self._newest.iterations // self._functions.num_workers
        played: Played = self._call("play", number, version, self._unsent(self._newest))
        heartbeat()
        rows, brought, waited = [], [], 0.0
        for step in range(shapes.steps if played.ready else 0):
            newest = self._server.newest()
            gradient, finite, metrics = self._call("take", step, self._unsent(newest))
            heartbeat()
            asked = time.perf_counter()
            brought.append(self._server.apply(gradient, newest.version, finite, heartbeat))
            waited += time.perf_counter() - asked
            rows.append(metrics)
            heartbeat()
        asked = time.perf_counter()
        served = self._server.observe(played.rollout, heartbeat) + sum(each.seconds for each in brought)
        waited += time.perf_counter() - asked
        # Here the iteration counts as done, and not before: what failed above is repeated from where it began.
        self._call("settle")
        heartbeat()
        sums = {
            **played.stats,
            "late_gradients": sum(each.late for each in brought),
            "dropped_gradients": sum(each.late and not each.applied for each in brought),
            "nonfinite_gradients": sum(not each.late and not each.applied for each in brought),
            "dropped_rollouts": 0,
            "seconds": time.perf_counter() - began,
            "waited": waited,
            "served": served,
        }
        lags = [each.lag for each in brought if each.applied]
        return IterationStats(_stack(jax.device_get(rows), shapes.metrics), lags, sums, bool(np.all(played.finite)))

    def _persist(self, number: int, heartbeat: Heartbeat) -> IterationStats:
        """Do an iteration, again from where it began if it fails and that is still allowed."""
        dropped = 0
        while True:
            try:
                self._begin(heartbeat)
                done = self._iterate(number, heartbeat)
                done.sums["dropped_rollouts"] = dropped
                return done
            except (Stopped, FatalError):
                raise
            except Exception as error:
                if not self._restarts.take():
                    raise
                dropped += 1
                self._newest, self._sent = self._server.newest(), None
                self._lost = self._lost or isinstance(error, LostError)
                print(f"{self.name} repeats iteration {number}, which died of {error!r}", file=sys.stderr)

    def _begin(self, heartbeat: Heartbeat) -> None:
        """Let the actor stand where the chunk began, if it does not stand anywhere yet, or is lost."""
        if self._lost:
            self._handle.restart()
            self._lost, self._begins = False, True
        if self._begins:
            # Starting a process takes as long as its engine allows, and is no step that hangs.
            chunk = self._chunk
            self._handle.call("begin", chunk.run_key, *self.standing, chunk.seed, heartbeat=heartbeat)
            self._begins = False

    def _fetch(self, heartbeat: Heartbeat) -> tuple[Any, PyTree]:
        """Return what the actor stands at; if that is lost now, where the chunk began."""
        try:
            standing: tuple[Any, PyTree] = self._call("standing")
            return standing
        except LostError as error:
            if not self._restarts.take():
                raise
            print(f"{self.name} goes back to where this chunk began, for {error}", file=sys.stderr)
            self.iterations[-1].sums["dropped_rollouts"] += 1
            self._lost = True
            self._begin(heartbeat)
            return self.standing

    def _unsent(self, newest: Newest) -> PyTree | None:
        """Return the State to send to the actor; None where that is what it has."""
        if self._sent is not None and self._sent[1:] == newest[1:]:
            return None
        self._sent = newest
        return newest.state

    def _call(self, method: str, *arguments: Any) -> Any:
        """Call the actor; while it is waited for no heartbeat counts, so that one that hangs is noticed."""
        return self._handle.call(method, *arguments, heartbeat=self._check_stop)

    def _check_stop(self) -> None:
        if self._stop.is_set():
            raise Stopped


class ParameterServerLoop:
    """A `Loop` whose chunk lets every worker do its iterations beside the others.

    Args:
      placement: its settings.
      functions: of one worker.
      sizes: of the run.
      devices: of this process that are used.
    """

    def __init__(
        self, placement: ParameterServer, functions: GradientFunctions, sizes: Sizes, devices: list[jax.Device]
    ):
        self.compile_seconds = 0.0
        self._placement, self._functions, self._sizes, self._devices = placement, functions, sizes, devices
        self._engine, self._restarts = resolve_engine(placement.engine), RestartBudget(placement.restarts)
        # Where an iteration may be repeated, it leaves what it began with as it was.
        self._keeps = placement.restarts > 0
        self._lowered: dict[jax.Device, tuple[Any, Any]] = {}
        self._apply_and_observe: tuple[Any, Any] | None = None
        self._handles: list[Handle] = []
        self._threads: list[SupervisedThread] = []
        self._stop = threading.Event()
        self._last: Any = None
        self._seed: int | None = None

    def chunk(self, state: RunState, num_updates: int) -> tuple[RunState, Metrics]:
        """Let every worker do `num_updates` iterations, and end their threads; see `Loop.chunk`.

        Row i of the metrics is of the i-th iteration of all workers, which they did at about the same time.
        """
        self.compile()
        assert self._apply_and_observe is not None
        placement, start, device = self._placement, update_count(state), self._devices[0]
        iterations, limit = start * placement.workers, placement.max_gradient_lag
        server = Server(state.agent, iterations, *self._apply_and_observe, device, limit, placement.late == "weigh")
        # Actors stand where the last chunk left them, unless this state is of another one.
        begins, self._last = self._last is None or self._last is not state.update, None
        chunk = Chunk(state.key, start, num_updates, episode_seed(self._seed, state.key, start))
        self._stop = stop = threading.Event()
        standing = list(zip(state.rollout, state.replay or [()] * placement.workers, strict=True))
        workers = [
            GradientWorker(i, handle, self._functions, server, chunk, standing[i], begins, self._restarts, stop)
            for i, handle in enumerate(self._handles)
        ]
        self._run(workers)
        rows = [_row(each) for each in zip(*(worker.iterations for worker in workers), strict=True)]
        finite = all(iteration.finite for worker in workers for iteration in worker.iterations)
        following = RunState(
            state.key,
            jax.device_put(jnp.int32(start + num_updates), device),
            server.newest().state,
            self._placed(worker.standing[1] for worker in workers) if state.replay else (),
            self._placed(worker.standing[0] for worker in workers),
        )
        self._last = following.update
        both = np.array([bool(all_finite(following.agent)), finite])
        return following, {**jax.tree.map(lambda *x: np.stack(x), *rows), "finite": both}

    def _run(self, workers: Sequence[GradientWorker]) -> None:
        """Let all workers run, and wait for them; raises ActorError for one that died or hung."""
        self._threads = [SupervisedThread(worker.name, worker.run, self._stop) for worker in workers]
        supervisors = [Supervisor(thread, self._placement.actor_timeout) for thread in self._threads]
        try:
            for thread in self._threads:
                thread.start()
            while supervisors:
                supervisors[0].thread.join(POLL_SECONDS)
                alive = [supervisor.thread.is_alive() for supervisor in supervisors]
                for supervisor, is_alive in zip(supervisors, alive, strict=True):
                    supervisor.check(is_alive)
                supervisors = [supervisor for supervisor in supervisors if not supervisor.thread.done]
        finally:
            end_threads(self._threads, self._stop)

    def init(self, seed: int) -> RunState:
        """Return the first state."""
        self._seed = seed
        first = run_once(self._start, SingleDeviceSharding(self._devices[0]))(jax.random.key(seed))
        empty = {device: run_once(self._empty_replay, SingleDeviceSharding(device)) for device in set(self._places())}
        replay = () if self._agent.replay is None else tuple(empty[device]() for device in self._places())
        return first._replace(replay=replay, rollout=self._placed(first.rollout))

    def abstract_state(self) -> RunState:
        """Return the state's shapes, dtypes and shardings."""
        shapes, replay = jax.eval_shape(self._start, jax.random.key(0)), jax.eval_shape(self._empty_replay)
        replays = () if self._agent.replay is None else tuple(at(replay, device) for device in self._places())
        rollouts = tuple(at(own, device) for own, device in zip(shapes.rollout, self._places(), strict=True))
        return at(shapes._replace(rollout=()), self._devices[0])._replace(replay=replays, rollout=rollouts)

    @property
    def _agent(self) -> Agent:
        return self._functions.acting.agent

    def _start(self, key: Key) -> RunState:
        """Return the first state without replays; of the environments, numbered through, each worker has a slice."""
        roots, acting, size = keys.roots(key), self._functions.acting, self._functions.sizes.num_envs
        whole = acting.begin(roots.env, jnp.arange(self._sizes.num_envs))
        share = lambda worker: jax.tree.map(lambda x: x[worker * size : (worker + 1) * size], whole)
        rollouts: Any = tuple(share(worker) for worker in range(self._placement.workers))
        return RunState(roots.run, jnp.zeros((), jnp.int32), acting.agent.init(roots.agent, acting.spec), (), rollouts)

    def _empty_replay(self) -> PyTree:
        return empty_replay(self._functions.acting, self._functions.sizes)

    def _places(self) -> list[jax.Device]:
        """Return the device of every worker, in this process."""
        return [self._devices[worker % len(self._devices)] for worker in range(self._placement.workers)]

    def _placed(self, trees: Iterable[PyTree]) -> tuple[PyTree, ...]:
        """Return a tree of every worker as the state holds it: on a device of this process."""
        return tuple(jax.device_put(tree, device) for tree, device in zip(trees, self._places(), strict=True))

    def lower(self) -> None:
        """Trace every function of this process, once, without compiling it."""
        if self._lowered or self._engine.apart:
            return
        began = time.perf_counter()
        self._lowered = {device: self._functions.lower(device, self._keeps) for device in set(self._places())}
        self.compile_seconds += time.perf_counter() - began

    def compile(self) -> None:
        """Trace and compile every function, once, and place the workers' actors."""
        if self._apply_and_observe is not None:
            return
        self.lower()
        began, of, first, keeps = time.perf_counter(), self._functions, self._devices[0], self._keeps
        shapes = of.shapes
        to_apply = at((shapes.state, shapes.gradient, jax.ShapeDtypeStruct((), np.float32)), first)
        to_observe = at((shapes.state, shapes.rollout), first)
        if self._engine.apart:
            plain = dataclasses.replace(of)  # Without the shapes that it has traced, which cannot be sent.
            self._place(lambda worker: functools.partial(make_gradient_actor, plain, worker, keeps))
        # Each device has programs of its own; XLA compiles them side by side.
        with concurrent.futures.ThreadPoolExecutor() as threads:
            apply = threads.submit(lambda: jit(of.apply, first).lower(*to_apply).compile())
            observe = threads.submit(lambda: jit(of.observe, first).lower(*to_observe).compile())
            compile = lambda device: compile_functions(of, device, keeps, self._lowered[device])
            on = dict(zip(self._lowered, threads.map(compile, self._lowered), strict=True))
        if not self._engine.apart:
            places = self._places()
            self._place(lambda worker: functools.partial(GradientActor, on[places[worker]], worker))
        self._apply_and_observe = apply.result(), observe.result()
        self.compile_seconds += time.perf_counter() - began

    def _place(self, make: Callable[[int], Callable[[], GradientActor]]) -> None:
        """Place the actors of all workers, and wait until they stand: they compile at the same time."""
        for worker in range(self._placement.workers):
            self._handles.append(self._engine.place(f"podium-worker-{worker}", make(worker)))
        for reply in [handle.start("ready") for handle in self._handles]:
            reply.result(lambda: None)

    def close(self) -> None:
        """End threads and actors; a thread that hangs in native code is left behind as a daemon."""
        end_threads(self._threads, self._stop)
        for handle in self._handles:
            handle.close()


def _stack(rows: list[Metrics], shapes: Metrics) -> dict[str, np.ndarray]:
    if not rows:
        return {name: np.full((1, *x.shape), np.nan, x.dtype) for name, x in shapes.items()}
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def _row(iterations: tuple[IterationStats, ...]) -> dict[str, np.ndarray]:
    """Return the metrics of one iteration of all workers."""
    lags = [lag for each in iterations for lag in each.lags]
    sums = {name: sum(each.sums[name] for each in iterations) for name in iterations[0].sums}
    whole, waited, served = (sums.pop(name) for name in ("seconds", "waited", "served"))
    row = {
        **sums,
        "policy_lag_mean": np.mean(lags) if lags else np.nan,
        "policy_lag_max": max(lags, default=0),
        "worker_idle": waited / max(whole, 1e-9),
        # All workers work at once: the time that passed is about the mean of theirs.
        "server_idle": max(0.0, 1 - served * len(iterations) / max(whole, 1e-9)),
    }
    learnt = {name: _finite_mean([each.metrics[name] for each in iterations]) for name in iterations[0].metrics}
    return {name: np.asarray(value, np.float32) for name, value in {**learnt, **row}.items()}


def _finite_mean(parts: list[np.ndarray]) -> np.ndarray:
    """Return the mean over gradients and workers of what is finite; NaN where nothing is."""
    values = np.concatenate(parts)
    counted = np.isfinite(values)
    with np.errstate(invalid="ignore"):
        return np.where(counted, values, 0).sum(0) / counted.sum(0)
