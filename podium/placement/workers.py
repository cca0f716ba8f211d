"""Workers and their server: threads that play and take gradients, and one state that the gradients move as they come.

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

from podium import episodes, keys
from podium.agent import Agent, Plan
from podium.env import Env
from podium.learn import Learned, learn
from podium.placement import program
from podium.placement.actors import POLL_SECONDS, Restarts, Stopped, Watched
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
    """`Cut.play` and `Cut.take` compiled for a device; gradients an iteration, and the shapes of their metrics."""

    cut: Cut
    device: jax.Device
    play: Callable[..., Played]
    take: Callable[..., Taken]
    steps: int
    metrics: Metrics


class Worker(Watched):
    """Does a number of iterations with environments of its own: plays, takes gradients, and brings them to the server.

    Args:
      number: of this worker.
      compiled: functions of its device.
      server: to read from and bring to.
      run_key: of the run, on its device.
      start: number of its first iteration.
      count: of its iterations.
      rollout_state: where its environments stand.
      replay: of its own, or `()`.
      restarts: shared with the others.
      stop: set when the run is over.
    """

    def __init__(
        self,
        number: int,
        compiled: Compiled,
        server: Server,
        run_key: Key,
        start: int,
        count: int,
        rollout_state: RolloutState,
        replay: PyTree,
        restarts: Restarts,
        stop: threading.Event,
    ):
        super().__init__(f"podium-worker-{number}")
        self.done = False
        self.stories: list[Story] = []
        self.rollout_state, self.replay = rollout_state, replay
        self._number, self._compiled, self._server, self._run_key = number, compiled, server, run_key
        self._start, self._count, self._restarts, self._stop_event = start, count, restarts, stop
        # Every worker begins with the State that the chunk begins with, however late its thread starts.
        self._newest = server.newest()
        self._here = self._newest._replace(state=jax.device_put(self._newest.state, compiled.device))

    def run(self) -> None:
        """Do all iterations; an error is kept for the caller of the chunk to raise."""
        try:
            for number in range(self._start, self._start + self._count):
                self.stories.append(self._persist(number))
                self._newest = self._server.newest()
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
                return self._iterate(number)._replace(dropped_rollouts=dropped)
            except Stopped:
                raise
            except Exception as error:
                if not self._restarts.take():
                    raise
                dropped += 1
                self._newest = self._server.newest()
                print(f"{self.name} repeats iteration {number}, which died of {error!r}", file=sys.stderr)

    def _iterate(self, number: int) -> Story:
        began, compiled = time.perf_counter(), self._compiled
        mine = self._run_key, np.int32(number), np.int32(self._number)
        newest = self._bring(self._newest)
        # The version in a trajectory counts updates: iterations of all workers together.
        version = np.int32(newest.iterations // compiled.cut.num_workers)
        played = compiled.play(*mine, version, newest.state, self.rollout_state, self.replay)
        replay, ready = played.replay, bool(played.ready)
        self._step()
        rows, given, nonfinite, waited, served = [], [], 0, 0.0, 0.0
        for step in range(compiled.steps if ready else 0):
            newest = self._bring(self._server.newest())
            taken = compiled.take(*mine, np.int32(step), newest.state, replay, played.plan)
            replay = taken.replay if compiled.cut.new_priorities else replay
            finite = bool(taken.finite)
            self._step()
            asked = time.perf_counter()
            given.append(self._server.give(taken.gradient, newest.version, finite, self._step))
            waited += time.perf_counter() - asked
            nonfinite += not finite
            rows.append(taken.metrics)
            self._step()
        asked = time.perf_counter()
        served = self._server.observe(played.trajectory, self._step) + sum(each.seconds for each in given)
        waited += time.perf_counter() - asked
        # Here the iteration counts as done, and not before: what failed above is repeated from where it began.
        self.rollout_state, self.replay = played.rollout, replay
        self._step()
        return Story(
            metrics=self._stack(jax.device_get(rows)),
            # Copied: views of a CPU's buffers would hold those.
            episodes=jax.tree.map(np.array, played.episodes),
            finite=np.array(played.finite),
            lags=[each.lag for each in given if each.applied],
            late=sum(each.late for each in given),
            dropped=sum(each.late and not each.applied for each in given),
            nonfinite=nonfinite,
            dropped_rollouts=0,
            seconds=(time.perf_counter() - began, waited, served),
        )

    def _bring(self, newest: Newest) -> Newest:
        """Return `newest` on the device of this worker; what is there already is not brought again."""
        if (newest.version, newest.iterations) != self._here[1:]:
            self._here = newest._replace(state=jax.device_put(newest.state, self._compiled.device))
        return self._here

    def _stack(self, rows: list[Metrics]) -> dict[str, np.ndarray]:
        if not rows:
            return {name: np.full((1, *x.shape), np.nan, x.dtype) for name, x in self._compiled.metrics.items()}
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def _step(self) -> None:
        """Say that a step is done, or that it waits for another worker, and is well."""
        self.progress += 1
        if self._stop_event.is_set():
            raise Stopped
