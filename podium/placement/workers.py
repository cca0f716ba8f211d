"""Workers and their server: threads that bring gradients, and one state that the gradients move as they come.

A worker is a thread and a `Fragment`: the thread reads from the server, brings to it, and repeats what failed; the
fragment holds environments and replay, and computes. The fragment may live in another process; see `engine`.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from podium.placement.actors import Restarts, Stopped, Watched, turn
from podium.placement.cut import Shapes
from podium.placement.engine import EngineError, Handle, LostError
from podium.placement.fragments import Rolled
from podium.rollout import RolloutState
from podium.types import Key, Metrics, PyTree, Trajectory


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
        with turn(self._lock, waiting):
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
        with turn(self._lock, waiting):
            began, now = time.perf_counter(), self._newest
            state = self._observe(now.state, jax.device_put(trajectory, self._device))
            self._newest = Newest(jax.block_until_ready(state), now.version, now.iterations + 1)
            return time.perf_counter() - began


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
      seed: of environments on the host, where they begin.
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
        seed: int,
        begins: bool,
        restarts: Restarts,
        stop: threading.Event,
    ):
        super().__init__(f"podium-worker-{number}")
        self.done = False
        self.stories: list[Story] = []
        self.standing = standing
        self._handle, self._shapes, self._num_workers, self._server = handle, shapes, num_workers, server
        self._run_key, self._start, self._count, self._seed, self._begins = run_key, start, count, seed, begins
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
            self._handle.call("begin", self._run_key, *self.standing, self._seed, waiting=self._step)
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
