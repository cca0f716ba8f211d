"""Threads that act: each plays rollouts with the newest parameters and hands them over to the learner."""

from __future__ import annotations

import abc
import contextlib
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from podium.placement.engine import EngineError
from podium.placement.players import Player
from podium.types import PyTree, Trajectory

T = TypeVar("T")

POLL_SECONDS = 0.2
"""How long anything waits before it looks whether the run has ended or a thread has died."""

STOP_SECONDS = 10.0
"""How long a run that ends waits for its threads."""


class Stopped(Exception):  # Not an error: how a thread learns that the run is over.
    """The run is over."""


class ActorError(RuntimeError):
    """An actor thread died or hung; the message tells where."""


@contextlib.contextmanager
def turn(lock: threading.Lock, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold a lock; `waiting`, which may raise, is called every `POLL_SECONDS` until it is free."""
    while not lock.acquire(timeout=POLL_SECONDS):
        waiting()
    try:
        yield
    finally:
        lock.release()


class Piece(NamedTuple):
    """What one actor hands over: a rollout [T, E, ...], and its story.

    Attributes:
      trajectory: on the actor's device; None where only the story has come.
      version: updates behind the parameters that acted.
      sums: counts and seconds, to be added up.
      most: numbers of which the largest counts.
    """

    trajectory: Trajectory | None
    version: int
    sums: dict[str, float]
    most: dict[str, float] = {}


class Slot:
    """The newest parameters for one actor device; older ones are forgotten."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._value: tuple[PyTree, int] | None = None

    def put(self, params: PyTree, version: int) -> None:
        """Replace what is there."""
        with self._condition:
            self._value = params, version
            self._condition.notify_all()

    def get(self, at_least: int, stop: threading.Event) -> tuple[PyTree, int]:
        """Wait for parameters of version `at_least` or newer; raises Stopped when the run ends."""
        with self._condition:
            while self._value is None or self._value[1] < at_least:
                if stop.is_set():
                    raise Stopped
                self._condition.wait(POLL_SECONDS)
            return self._value


class Restarts:
    """How often the threads of a run may still begin anew what failed."""

    def __init__(self, number: int):
        self._left, self._lock = number, threading.Lock()

    def take(self) -> bool:
        """Take one, if there is one."""
        with self._lock:
            self._left -= 1
            return self._left >= 0


class Watched(abc.ABC):
    """A thread whose `progress` goes up with every step it does, so that one that died or hangs is noticed.

    It has a Thread and is none, so that no attribute of a subclass replaces one that Thread keeps to itself.

    Attributes:
      name: of the thread.
      error: what it died of.
      progress: steps done, whatever a step is; waiting for another thread counts as one too.
    """

    def __init__(self, name: str):
        self.name = name
        self.error: BaseException | None = None
        self.progress = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @abc.abstractmethod
    def _run(self) -> None:
        """Do all that there is to do; an error is kept in `error`."""

    def start(self) -> None:
        """Begin; once only."""
        self._thread.start()

    def is_alive(self) -> bool:
        """Tell whether it has begun and not ended."""
        return self._thread.is_alive()

    def join(self, seconds: float) -> None:
        """Wait for its end at most so long; not at all where it never began."""
        if self._thread.ident is not None:
            self._thread.join(seconds)

    def where(self) -> str:
        """Return the lines that it, and those it waits for (`together`), are at now."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        stacks = {names.get(number, ""): frame for number, frame in sys._current_frames().items()}
        mine = [name for name in sorted(stacks) if name == self.name or name.startswith(f"{self.name}-")]
        return "".join(line for name in mine for line in (f"{name}:\n", *traceback.format_stack(stacks[name])))


class Watch:
    """Looks after one thread; for a loop that waits for it and looks again every `POLL_SECONDS` or so.

    Args:
      thread: to look after.
      timeout: seconds without progress after which it counts as hung.
    """

    def __init__(self, thread: Watched, timeout: float):
        self.thread, self._timeout = thread, timeout
        self._seen, self._waited, self._looked = thread.progress, 0.0, time.monotonic()

    def look(self, alive: bool) -> None:
        """Look once; `alive` says whether the thread was, before anything that it could have done last was looked for.

        Raises:
          ActorError: it died, or did not come a step further for `timeout` seconds.
        """
        thread = self.thread
        if thread.error is not None:
            where = "".join(traceback.format_exception(thread.error))
            raise ActorError(f"{thread.name} died of {thread.error!r}.\n{where}") from thread.error
        if not alive:
            raise ActorError(f"{thread.name} ended without a word.")
        # A look that took far longer than it should was none: the process was stopped, or the machine asleep.
        now = time.monotonic()
        moved = thread.progress != self._seen
        self._waited = 0.0 if moved else self._waited + min(now - self._looked, 5 * POLL_SECONDS)
        self._seen, self._looked = thread.progress, now
        if self._waited > self._timeout:
            at = thread.where()
            raise ActorError(f"{thread.name} has not come a step further for {self._timeout:g} s; it is at\n{at}")


def end_threads(threads: Sequence[Watched], stop: threading.Event, seconds: float) -> None:
    """Set `stop`, and wait for `threads` together at most so long; one that hangs in native code stays behind."""
    stop.set()
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


class Working(Watched):
    """A thread that works until the run ends; an error is kept for the learner to raise.

    Args:
      name: of the thread.
      stop: set when the run is over.
    """

    def __init__(self, name: str, stop: threading.Event):
        super().__init__(name)
        self._stop_event = stop

    @abc.abstractmethod
    def _work(self) -> None:
        """Work until `_tick` raises Stopped."""

    def _run(self) -> None:
        try:
            self._work()
        except Stopped:
            pass
        except BaseException as error:  # Whatever it is, the learner must hear of it.
            self.error = error

    def _tick(self) -> None:
        """Count a step; raises Stopped when the run is over."""
        self.progress += 1
        if self._stop_event.is_set():
            raise Stopped


class _Task(Working):
    """Calls one function, and keeps what it returns."""

    def __init__(self, name: str, function: Callable[[Callable[[], None]], Any], stop: threading.Event):
        super().__init__(name, stop)
        self._function = function
        self.result: Any = None

    def _work(self) -> None:
        self.result = self._function(self._tick)


def look_after(name: str, function: Callable[[Callable[[], None]], T], timeout: float) -> T:
    """Call `function(tick)` in a thread of this name, and return what it returns; it calls `tick` at every step.

    Raises:
      ActorError: it raised something, or did not come a step further for `timeout` seconds.
    """
    stop = threading.Event()
    task = _Task(name, function, stop)
    watch = Watch(task, timeout)
    task.start()
    try:
        while True:
            task.join(POLL_SECONDS)
            alive = task.is_alive()  # Asked once: it may end at any time.
            if not alive and task.error is None:
                return task.result
            watch.look(alive)
    finally:
        stop.set()


class Persistent(Working):
    """One whose work is rollout after rollout, and begins anew after a failure, as often as that is allowed.

    Args:
      name: of the thread.
      stop: set when the run is over.
      start: number of its first iteration.
      restarts: failures that are still allowed, of all threads together; None allows none, and counts none.

    Attributes:
      iteration: that it is at.
      failures: of it so far.
      lost: those of them since the last rollout that was handed over.
    """

    def __init__(self, name: str, stop: threading.Event, start: int, restarts: Restarts | None):
        super().__init__(name, stop)
        self.iteration, self.failures, self.lost = start, 0, 0
        self._restarts = restarts

    @abc.abstractmethod
    def _play(self) -> None:
        """Make what is played with, and play from `iteration` on; calls `_handed_over` after each rollout."""

    def _work(self) -> None:
        while True:
            try:
                self._play()
            except (Stopped, EngineError):
                raise
            except Exception as error:
                if self._restarts is None or not self._restarts.take():
                    raise
                self.failures += 1
                self.lost += 1
                print(f"{self.name} begins anew, with iteration {self.iteration}: {error!r}", file=sys.stderr)

    def _handed_over(self) -> None:
        self.iteration += 1
        self.lost = 0


class Actor(Persistent):
    """Plays rollout after rollout, and waits where the learner does not keep up.

    Args:
      number: of this actor, for its name.
      make_player: `(failures so far) -> Player`; called in the thread, again after a failure.
      start: iteration that it begins with.
      slot: of its parameters.
      pieces: where to put rollouts; a full one is waited for.
      stop: set when the run is over.
      lockstep: wait for the parameters of every update.
      refresh_every: rollouts that it plays with the same parameters.
      restarts: failures that are still allowed, of all actors together.
    """

    def __init__(
        self,
        number: int,
        make_player: Callable[[int], Player],
        start: int,
        slot: Slot,
        pieces: queue.Queue[Piece],
        stop: threading.Event,
        lockstep: bool = False,
        refresh_every: int = 1,
        restarts: Restarts | None = None,
    ):
        super().__init__(f"podium-actor-{number}", stop, start, restarts)
        self.pieces = pieces
        self._make_player, self._start, self._slot = make_player, start, slot
        self._lockstep, self._refresh_every = lockstep, refresh_every
        self._params: tuple[PyTree, int] | None = None
        self._refreshed = -1
        self._idle_seconds = 0.0

    def _play(self) -> None:
        player, self._refreshed = self._make_player(self.failures), -1
        try:
            while True:
                began = time.perf_counter()
                params, version = self._params_of(self.iteration)
                idle = self._idle_seconds + time.perf_counter() - began
                trajectory, sums = player.play(params, version, self.iteration, self._tick, self._following)
                sums["actor_idle_seconds"] = idle
                if self._restarts is not None:
                    sums["dropped_rollouts"] = self.lost
                self._hand_over(Piece(trajectory, version, sums))
                self._handed_over()
        finally:
            player.close()

    def _params_of(self, iteration: int) -> tuple[PyTree, int]:
        """Return parameters and their version: new ones every `refresh_every` rollouts, once for a rollout.

        The first rollout takes whatever there is; in lockstep every other one waits for the update before it.
        """
        due = (iteration - self._start) % self._refresh_every == 0 and iteration != self._refreshed
        if self._params is None or due:
            self._params = self._slot.get(iteration if self._lockstep else 0, self._stop_event)
            self._refreshed = iteration
        return self._params

    def _following(self) -> PyTree | None:
        """Return the parameters of the next rollout; None where it must wait, for an update or for the learner."""
        return None if self._lockstep or self.pieces.full() else self._params_of(self.iteration + 1)[0]

    def _hand_over(self, piece: Piece) -> None:
        """Wait for a place in the queue. What it waited is counted with the next rollout: this one may be gone."""
        began = time.perf_counter()
        while True:
            if self._stop_event.is_set():
                raise Stopped
            try:
                self.pieces.put(piece, timeout=POLL_SECONDS)
            except queue.Full:
                self.progress += 1  # It waits for the learner, and is well.
            else:
                self._idle_seconds = time.perf_counter() - began
                return


def seed_after(seed: int, failures: int) -> int:
    """Return the seed of what is made anew: after a failure episodes are others than those before it."""
    return (seed + failures * 0x9E3779B1) % 2**31


def take(pieces: queue.Queue[Piece], watches: Sequence[Watch]) -> Piece:
    """Return the next piece of a queue; `watches` are of all threads that may fill it.

    Raises:
      ActorError: one of them died or hung, even where the others go on.
    """
    while True:
        alive = [watch.thread.is_alive() for watch in watches]
        piece = None
        with contextlib.suppress(queue.Empty):
            piece = pieces.get(timeout=POLL_SECONDS)
        for watch, is_alive in zip(watches, alive, strict=True):
            watch.look(is_alive)
        if piece is not None:
            return piece
