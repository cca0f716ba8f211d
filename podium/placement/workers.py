"""Workers and their server: threads that play and take gradients, and one state that the gradients move as they come.

A worker is a thread and a `Fragment`: the thread reads from the server, brings to it, and repeats what failed; the
fragment holds environments and replay, and computes. The fragment may live in another process; see `engine`.

The arithmetic is that of `podium.learn.learn`, which is cut at the gradient by handing it an agent whose `apply` keeps
the gradient instead of using it: keys, shuffles and minibatches stand there once, for this placement as for all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from podium import episodes, keys
from podium.agent import Agent, Plan
from podium.env import Env
from podium.learn import Learned, learn
from podium.placement import program
from podium.placement.actors import POLL_SECONDS, Restarts, Stopped, Watched
from podium.placement.engine import EngineError, Handle, LostError
from podium.placement.program import Sizes
from podium.rollout import RolloutState, rollout
from podium.types import Array, Key, Metrics, PyTree, Trajectory


class Played(NamedTuple):
    """What playing gives: where the environments stand, and all that the gradients are to be taken from.

    Attributes:
      rollout: where the environments stand afterwards.
      trajectory: [T, E, ...], of this worker's environments.
      plan: of it, by the State that acted.
      replay: with the rollout in it, or `()`.
      ready: bool scalar, whether there is anything to learn from yet.
      episodes: counts and sums of what ended.
      finite: [E], whether each environment gave finite numbers only.
    """

    rollout: RolloutState
    trajectory: Trajectory
    plan: Plan
    replay: PyTree
    ready: Array
    episodes: Metrics
    finite: Array


class Taken(NamedTuple):
    """A gradient, whether all of it is finite, its metrics, and the replay where that has new priorities, else `()`."""

    gradient: PyTree
    finite: Array
    metrics: Metrics
    replay: PyTree


class Shapes(NamedTuple):
    """Of what an iteration of one worker is given and makes: `play` and `take` are arguments of `Cut`'s functions."""

    state: PyTree
    play: tuple[Any, ...]
    take: tuple[Any, ...]
    trajectory: PyTree
    gradient: PyTree
    steps: int
    metrics: Metrics


class _Held(NamedTuple):
    """A State, and beside it the gradient that `apply` was given."""

    state: PyTree
    gradient: PyTree


@dataclasses.dataclass(frozen=True)
class Cut:
    """An iteration of one worker, cut at the gradient into pure functions; `sizes` are those of one worker."""

    agent: Agent
    env: Env
    sizes: Sizes
    num_workers: int

    @property
    def new_priorities(self) -> bool:
        """Whether taking a gradient changes the replay."""
        return self.agent.replay is not None and self.agent.replay.update_priorities is not None

    def play(
        self,
        run_key: Key,
        number: Array,
        worker: Array,
        version: Array,
        state: PyTree,
        rollout_state: RolloutState,
        replay: PyTree,
    ) -> Played:
        """Collect iteration `number` of a worker, and plan what it learns from; `version` goes into the trajectory."""
        key, params = keys.iteration(run_key, number).rollout, self.agent.actor(state)
        length = self.sizes.rollout_length
        following, trajectory, ended = rollout(key, self.agent, self.env, params, rollout_state, length, version)
        plans = []

        def plan(key: Key, state: PyTree, trajectory: Trajectory) -> Plan:
            plans.append(self.agent.plan(key, state, trajectory))
            return plans[0]

        def no_steps(update: Callable[..., Any], carry: PyTree, numbers: Array) -> Any:
            shapes = jax.eval_shape(update, carry, numbers[0])[1]
            return carry, jax.tree.map(lambda x: jnp.zeros((1, *x.shape), x.dtype), shapes)

        planning = self.agent._replace(plan=plan, observe=lambda state, trajectory: state)
        stored = self._learn(run_key, number, worker, planning, state, replay, trajectory, no_steps).replay
        ready = jnp.ones((), bool) if self.agent.replay is None else self.agent.replay.can_sample(stored)
        finite = program.rollout_finite(self.agent, trajectory)
        return Played(following, trajectory, plans[0], stored, ready, episodes.summarize(ended), finite)

    def take(
        self, run_key: Key, number: Array, worker: Array, step: Array, state: PyTree, replay: PyTree, plan: Plan
    ) -> Taken:
        """Take gradient `step` of iteration `number` of a worker, at `state`."""
        agent = self.agent

        def grad(key: Key, held: _Held, minibatch: PyTree) -> Any:
            return agent.grad(key, held.state, minibatch)

        def one_step(update: Callable[..., Any], carry: PyTree, numbers: Array) -> Any:
            carry, metrics = update(carry, step)
            return carry, jax.tree.map(lambda x: x[None], metrics)

        apply = lambda held, gradient: _Held(held.state, gradient)  # noqa: E731
        taking = self._planned()._replace(grad=grad, apply=apply)
        shapes, _ = self.gradients(state, replay, plan)
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        learned = self._learn(run_key, number, worker, taking, _Held(state, nothing), replay, plan, one_step)
        gradient = learned.state.gradient
        kept = learned.replay if self.new_priorities else ()
        return Taken(gradient, program.all_finite(gradient), learned.metrics, kept)

    def gradients(self, state: PyTree, replay: PyTree, plan: Plan) -> tuple[PyTree, int]:
        """Return the shapes of a gradient and how many an iteration takes; shapes will do for the arguments."""
        stands_for_trajectory: Any = plan
        return program.gradients(self._planned(), self.sizes, state, replay, stands_for_trajectory)

    def _planned(self) -> Agent:
        """Return the agent for which the plan stands where a trajectory did, once that is planned for and stored."""
        stands_for_it: Callable[..., Any] = lambda key, state, plan: plan  # noqa: E731
        return self.agent._replace(
            plan=stands_for_it,
            observe=lambda state, plan: state,
            replay=self.agent.replay and self.agent.replay._replace(add=lambda replay, items: replay),
        )

    def shapes(self) -> Shapes:
        """Trace an iteration for its shapes."""
        start = jax.eval_shape(lambda key: program.start(key, self.agent, self.env, self.sizes), jax.random.key(0))
        number = jax.ShapeDtypeStruct((), np.int32)
        mine = start.key, number, number, number
        play = *mine, start.agent, start.rollout, start.replay
        played = jax.eval_shape(self.play, *play)
        take = *mine, start.agent, played.replay, played.plan
        gradient, steps = self.gradients(*take[4:])
        metrics = jax.eval_shape(self.take, *take).metrics
        return Shapes(start.agent, play, take, played.trajectory, gradient, steps, metrics)

    def apply(self, state: PyTree, gradient: PyTree, weight: Array) -> PyTree:
        """Return the State after a gradient, every number of which is multiplied by `weight`; 1 changes no bit."""
        weigh = lambda x: x * weight.astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else x  # noqa: E731
        return self.agent.apply(state, jax.tree.map(weigh, gradient))

    def _learn(
        self,
        run_key: Key,
        number: Array,
        worker: Array,
        agent: Agent,
        state: PyTree,
        replay: PyTree,
        trajectory: Any,
        fold: Callable[..., Any],
    ) -> Learned:
        key = keys.iteration(run_key, number).learn
        # Workers shuffle and sample apart; one alone draws what Single and Anakin draw.
        key = key if self.num_workers == 1 else jax.random.fold_in(key, worker)
        return learn(key, agent, state, replay, trajectory, self.sizes.num_lanes, fold)


class Newest(NamedTuple):
    """The server's State, the gradients applied to it since the chunk began, and the iterations observed in the run."""

    state: PyTree
    version: int
    iterations: int


class Given(NamedTuple):
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
      observe: `(State, Trajectory) -> State` for each number of environments, compiled.
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

    def give(self, gradient: PyTree, version: int, finite: bool, waiting: Callable[[], None]) -> Given:
        """Apply a gradient taken at `version`, unless it is not finite, or too late where such are dropped.

        Args:
          gradient: on any device.
          version: of the State that it was taken at.
          finite: whether all of it is.
          waiting: called every `POLL_SECONDS` while others are served; may raise.

        Returns:
          what became of it.
        """
        with self._turn(waiting):
            began, now = time.perf_counter(), self._newest
            lag = now.version - version
            late = finite and self._max_lag is not None and lag > self._max_lag
            applied = finite and (self._weigh or not late)
            if applied:
                weight = np.float32(1.0 / lag if late else 1.0)
                state = self._apply(now.state, jax.device_put(gradient, self._device), weight)
                # Nothing is replaced before it is there: an apply that fails leaves the State as it was.
                self._newest = Newest(jax.block_until_ready(state), now.version + 1, now.iterations)
            return Given(lag, late, applied, time.perf_counter() - began)

    def observe(self, trajectory: Trajectory, waiting: Callable[[], None]) -> float:
        """Let the State observe a worker's rollout, after its last gradient; returns the seconds it took."""
        with self._turn(waiting):
            began, now = time.perf_counter(), self._newest
            state = self._observe(now.state, jax.device_put(trajectory, self._device))
            self._newest = Newest(jax.block_until_ready(state), now.version, now.iterations + 1)
            return time.perf_counter() - began

    @contextlib.contextmanager
    def _turn(self, waiting: Callable[[], None]) -> Iterator[None]:
        while not self._lock.acquire(timeout=POLL_SECONDS):
            waiting()
        try:
            yield
        finally:
            self._lock.release()


class Story(NamedTuple):
    """What one iteration of one worker came to.

    Attributes:
      metrics: of every gradient taken, [G] each; NaN, [1], where there was nothing to learn from.
      episodes: counts and sums.
      finite: [E], whether each environment gave finite numbers only.
      lags: of the gradients that were applied.
      late: gradients that came too late.
      dropped: those of them that were dropped.
      nonfinite: gradients dropped because a number in them was not finite.
      dropped_rollouts: attempts at this iteration that failed before.
      seconds: of the whole, of waiting for the server (its work for this worker included), and of that work.
    """

    metrics: dict[str, np.ndarray]
    episodes: dict[str, np.ndarray]
    finite: np.ndarray
    lags: list[int]
    late: int
    dropped: int
    nonfinite: int
    dropped_rollouts: int
    seconds: tuple[float, float, float]


class Compiled(NamedTuple):
    """`Cut.play` and `Cut.take` compiled for a device."""

    cut: Cut
    device: jax.Device
    play: Callable[..., Played]
    take: Callable[..., Taken]


def lower(cut: Cut, shapes: Shapes, device: jax.Device, keeps: bool) -> dict[str, Any]:
    """Trace `Cut.play` and `Cut.take` for a device; `keeps` what an iteration began with, for repeating it."""
    play = jit(cut.play, device, () if keeps else (5, 6))
    take = jit(cut.take, device, (5,) if cut.new_priorities and not keeps else ())
    return {"play": play.lower(*at(shapes.play, device)), "take": take.lower(*at(shapes.take, device))}


def jit(function: Callable[..., Any], device: jax.Device, donated: tuple[int, ...] = ()) -> Any:
    """Return `function` jitted for a device."""
    here = SingleDeviceSharding(device)
    return jax.jit(function, in_shardings=here, out_shardings=here, donate_argnums=donated)


def at(tree: PyTree, device: jax.Device) -> Any:
    """Return the shapes of `tree` on `device`."""
    here = SingleDeviceSharding(device)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), tree)


class Rolled(NamedTuple):
    """What a rollout gives to others than its own worker; see `Played`."""

    trajectory: Trajectory
    ready: bool
    episodes: Metrics
    finite: Array


class Fragment:
    """The part of a worker that computes: environments, a replay, and the functions of its device.

    A State of None stands for the one given last, so that none is brought twice.

    Args:
      compiled: functions of its device.
      worker: number of this worker.
    """

    def __init__(self, compiled: Compiled, worker: int):
        self._compiled, self._worker = compiled, np.int32(worker)
        self._state: PyTree = None

    def ready(self) -> None:
        """Say that it is made."""

    def begin(self, run_key: Key, rollout_state: RolloutState, replay: PyTree) -> None:
        """Let the environments and the replay stand so."""
        self._run_key, self._rollout, self._replay = self._put((run_key, rollout_state, replay))

    def play(self, number: int, version: int, state: PyTree | None) -> Rolled:
        """Collect iteration `number`; nothing stands otherwise than before until `settle`."""
        self._bring(state)
        self._mine = self._run_key, np.int32(number), self._worker
        played = self._compiled.play(*self._mine, np.int32(version), self._state, self._rollout, self._replay)
        self._played, self._learnt = played, played.replay
        return Rolled(played.trajectory, bool(played.ready), played.episodes, played.finite)

    def take(self, step: int, state: PyTree | None) -> tuple[PyTree, bool, Metrics]:
        """Take a gradient from what was played; returns it, whether all of it is finite, and its metrics."""
        self._bring(state)
        taken = self._compiled.take(*self._mine, np.int32(step), self._state, self._learnt, self._played.plan)
        if self._compiled.cut.new_priorities:
            self._learnt = taken.replay
        return taken.gradient, bool(taken.finite), taken.metrics

    def settle(self) -> None:
        """Let everything stand as after what was played."""
        self._rollout, self._replay = self._played.rollout, self._learnt

    def standing(self) -> tuple[RolloutState, PyTree]:
        """Return where the environments stand, and the replay."""
        return self._rollout, self._replay

    def _bring(self, state: PyTree | None) -> None:
        if state is not None:
            self._state = self._put(state)

    def _put(self, tree: PyTree) -> PyTree:
        # What comes from another process is copied: it would be used in place, and cannot be donated then.
        travelled = any(isinstance(x, np.ndarray) for x in jax.tree.leaves(tree))
        return jax.device_put(tree, self._compiled.device, may_alias=False if travelled else None)


def make_fragment(cut: Cut, worker: int, keeps: bool) -> Fragment:
    """Return a fragment with functions of its own, on the first device of this process."""
    device = jax.devices()[0]
    lowered = lower(cut, cut.shapes(), device, keeps)
    return Fragment(Compiled(cut, device, **{name: piece.compile() for name, piece in lowered.items()}), worker)


class Worker(Watched):
    """Does a number of iterations: lets a fragment play and take gradients, and brings them to the server.

    Args:
      number: of this worker.
      handle: of its fragment.
      shapes: of an iteration.
      num_workers: of the run.
      server: to read from and bring to.
      run_key: of the run.
      start: number of its first iteration.
      count: of its iterations.
      standing: where its environments stand, and its replay, or `()`; a fragment that is lost begins there again.
      begins: whether its fragment is not there yet.
      restarts: shared with the others.
      stop: set when the run is over.

    Attributes:
      standing: likewise, after the last iteration once it is done.
    """

    def __init__(
        self,
        number: int,
        handle: Handle,
        shapes: Shapes,
        num_workers: int,
        server: Server,
        run_key: Key,
        start: int,
        count: int,
        standing: tuple[RolloutState, PyTree],
        begins: bool,
        restarts: Restarts,
        stop: threading.Event,
    ):
        super().__init__(f"podium-worker-{number}")
        self.done = False
        self.stories: list[Story] = []
        self.standing = standing
        self._handle, self._shapes, self._num_workers, self._server = handle, shapes, num_workers, server
        self._run_key, self._start, self._count, self._begins = run_key, start, count, begins
        self._restarts, self._stop_event = restarts, stop
        # Every worker begins with the State that the chunk begins with, however late its thread starts.
        self._newest = server.newest()
        self._sent: Newest | None = None
        self._lost = False

    def _run(self) -> None:
        try:
            for number in range(self._start, self._start + self._count):
                self.stories.append(self._persist(number))
                self._newest = self._server.newest()
            self.standing = self._fetch()
            self.done = True
        except Stopped:
            pass
        except BaseException as error:  # Whatever it is, the run must hear of it.
            self.error = error

    def _persist(self, number: int) -> Story:
        """Do an iteration, again from where it began if it fails and that is still allowed."""
        dropped = 0
        while True:
            try:
                self._stand()
                return self._iterate(number)._replace(dropped_rollouts=dropped)
            except (Stopped, EngineError):
                raise
            except Exception as error:
                if not self._restarts.take():
                    raise
                dropped += 1
                self._newest, self._sent = self._server.newest(), None
                self._lost = self._lost or isinstance(error, LostError)
                print(f"{self.name} repeats iteration {number}, which died of {error!r}", file=sys.stderr)

    def _stand(self) -> None:
        """Let the fragment stand where the chunk began, if it does not stand anywhere yet, or is lost."""
        if self._lost:
            self._handle.restart()
            self._lost, self._begins = False, True
        if self._begins:
            # Starting a process takes as long as its engine allows, and is no step that hangs.
            self._handle.call("begin", self._run_key, *self.standing, waiting=self._step)
            self._begins = False

    def _fetch(self) -> tuple[RolloutState, PyTree]:
        """Return what stands in the fragment; if that is lost now, where the chunk began."""
        try:
            return self._call("standing")
        except LostError as error:
            if not self._restarts.take():
                raise
            print(f"{self.name} goes back to where this chunk began, for {error}", file=sys.stderr)
            self.stories[-1] = self.stories[-1]._replace(dropped_rollouts=self.stories[-1].dropped_rollouts + 1)
            self._lost = True
            self._stand()
            return self.standing

    def _iterate(self, number: int) -> Story:
        began, steps = time.perf_counter(), self._shapes.steps
        # The version in a trajectory counts updates: iterations of all workers together.
        version = self._newest.iterations // self._num_workers
        rolled: Rolled = self._call("play", number, version, self._unsent(self._newest))
        self._step()
        rows, given, nonfinite, waited, served = [], [], 0, 0.0, 0.0
        for step in range(steps if rolled.ready else 0):
            newest = self._server.newest()
            gradient, finite, metrics = self._call("take", step, self._unsent(newest))
            self._step()
            asked = time.perf_counter()
            given.append(self._server.give(gradient, newest.version, finite, self._step))
            waited += time.perf_counter() - asked
            nonfinite += not finite
            rows.append(metrics)
            self._step()
        asked = time.perf_counter()
        served = self._server.observe(rolled.trajectory, self._step) + sum(each.seconds for each in given)
        waited += time.perf_counter() - asked
        # Here the iteration counts as done, and not before: what failed above is repeated from where it began.
        self._call("settle")
        self._step()
        return Story(
            metrics=self._stack(jax.device_get(rows)),
            # Copied: views of a CPU's buffers would hold those.
            episodes=jax.tree.map(np.array, rolled.episodes),
            finite=np.array(rolled.finite),
            lags=[each.lag for each in given if each.applied],
            late=sum(each.late for each in given),
            dropped=sum(each.late and not each.applied for each in given),
            nonfinite=nonfinite,
            dropped_rollouts=0,
            seconds=(time.perf_counter() - began, waited, served),
        )

    def _unsent(self, newest: Newest) -> PyTree | None:
        """Return the State to send to the fragment; None where that is what it has."""
        if self._sent is not None and self._sent[1:] == newest[1:]:
            return None
        self._sent = newest
        return newest.state

    def _call(self, method: str, *arguments: Any) -> Any:
        return self._handle.call(method, *arguments, waiting=self._look)

    def _stack(self, rows: list[Metrics]) -> dict[str, np.ndarray]:
        if not rows:
            return {name: np.full((1, *x.shape), np.nan, x.dtype) for name, x in self._shapes.metrics.items()}
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def _step(self) -> None:
        """Say that a step is done, or that it waits for another worker, and is well."""
        self.progress += 1
        self._look()

    def _look(self) -> None:
        """Leave off if the run is over."""
        if self._stop_event.is_set():
            raise Stopped
