"""Supervised threads: one that dies or hangs ends the run with its traceback, and every one of them can be stopped.

A supervised thread calls its `heartbeat` at every step. Whoever waits for the thread checks it with a `Supervisor`,
which raises `ActorError` for one that died, or that gave no heartbeat for too long.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

Heartbeat = Callable[[], None]
"""Called at every step, and several times a second while waiting; raises `Stopped` once the run is over."""

POLL_SECONDS = 0.2
"""How long anything waits before it checks whether the run has ended or a thread has died."""

STOP_SECONDS = 10.0
"""How long a run that ends waits for its threads."""


class Stopped(Exception):  # Not an error: how a thread learns that the run is over.
    """The run is over."""


class ActorError(RuntimeError):
    """A thread of the run died or hung; the message tells where."""


class FatalError(RuntimeError):
    """An error that no restart of a thread can mend: something that all of them need is gone."""


class SupervisedThread(threading.Thread):
    """A thread that runs one function until that returns, or until the run ends.

    Args:
      name: of the thread.
      function: `(heartbeat) -> result`.
      stop: set when the run is over.

    Attributes:
      heartbeats: number of them so far.
      done: whether the function has returned.
      result: what it returned.
      error: what it raised, if anything.
    """

    def __init__(self, name: str, function: Callable[[Heartbeat], Any], stop: threading.Event):
        super().__init__(name=name, daemon=True)
        self._function, self._over = function, stop
        self.heartbeats, self.done = 0, False
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        """Call the function, and keep what becomes of it."""
        try:
            self.result = self._function(self.heartbeat)
            self.done = True
        except Stopped:
            pass
        except BaseException as error:  # Whatever it is, the learner must hear of it.
            self.error = error

    def heartbeat(self) -> None:
        """Count a step; raises Stopped when the run is over."""
        self.heartbeats += 1
        if self._over.is_set():
            raise Stopped

    def join(self, timeout: float | None = None) -> None:
        """Wait for the end of the thread for at most `timeout` seconds; not at all where it never started."""
        if self.ident is not None:
            super().join(timeout)

    def where(self) -> str:
        """Return the lines that the thread, and the threads it runs (`run_together`), are at now."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        stacks = {names.get(number, ""): frame for number, frame in sys._current_frames().items()}
        mine = [name for name in sorted(stacks) if name == self.name or name.startswith(f"{self.name}-")]
        return "".join(line for name in mine for line in (f"{name}:\n", *traceback.format_stack(stacks[name])))


class Supervisor:
    """Checks one thread; for a loop that waits for it, and calls `check` every `POLL_SECONDS` or so.

    Args:
      thread: to check.
      timeout: seconds without a heartbeat after which the thread counts as hung.
    """

    def __init__(self, thread: SupervisedThread, timeout: float):
        self.thread, self._timeout = thread, timeout
        self._seen, self._waited, self._checked = thread.heartbeats, 0.0, time.monotonic()

    def check(self, alive: bool) -> None:
        """Check once; `alive` says whether the thread was, before anything that it could have done last was looked for.

        Raises:
          ActorError: the thread died, or gave no heartbeat for `timeout` seconds.
        """
        thread = self.thread
        if thread.error is not None:
            where = "".join(traceback.format_exception(thread.error))
            raise ActorError(f"{thread.name} died of {thread.error!r}.\n{where}") from thread.error
        if not alive and not thread.done:
            raise ActorError(f"{thread.name} ended without a word.")
        # A check that took far longer than it should was none: the process was stopped, or the machine asleep.
        now, moved = time.monotonic(), thread.heartbeats != self._seen
        self._waited = 0.0 if moved else self._waited + min(now - self._checked, 5 * POLL_SECONDS)
        self._seen, self._checked = thread.heartbeats, now
        if self._waited > self._timeout:
            at = thread.where()
            raise ActorError(f"{thread.name} has not come a step further for {self._timeout:g} s; it is at\n{at}")


def supervise(name: str, function: Callable[[Heartbeat], T], timeout: float | None) -> T:
    """Call `function(heartbeat)` in a thread of this name, and return what it returns; without a timeout, in this one.

    Raises:
      ActorError: the function raised something, or gave no heartbeat for `timeout` seconds.
    """
    if timeout is None:
        return function(lambda: None)
    stop = threading.Event()
    thread = SupervisedThread(name, function, stop)
    supervisor = Supervisor(thread, timeout)
    thread.start()
    try:
        while not thread.done:
            thread.join(POLL_SECONDS)
            alive = thread.is_alive()  # Asked once: it may end at any time.
            if not thread.done:
                supervisor.check(alive)
        result: T = thread.result
        return result
    finally:
        stop.set()


def end_threads(threads: Sequence[SupervisedThread], stop: threading.Event) -> None:
    """Set `stop`, and wait `STOP_SECONDS` at most for all threads; one that hangs in native code is left behind."""
    stop.set()
    deadline = time.monotonic() + STOP_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


class RestartBudget:
    """How many failures, `number`, the threads of a run may still survive, all together."""

    def __init__(self, number: int):
        self._left, self._lock = number, threading.Lock()

    def take(self) -> bool:
        """Take one restart, and tell whether there was one left."""
        with self._lock:
            self._left -= 1
            return self._left >= 0


@contextlib.contextmanager
def acquired(lock: threading.Lock, heartbeat: Heartbeat) -> Iterator[None]:
    """Hold a lock; `heartbeat`, which may raise, is called every `POLL_SECONDS` until the lock is free."""
    while not lock.acquire(timeout=POLL_SECONDS):
        heartbeat()
    try:
        yield
    finally:
        lock.release()


class _Aborted(Exception):  # Not an error: how the other functions learn that one has failed.
    """Another function failed."""


def run_together(functions: Sequence[Callable[[Heartbeat], T]], heartbeat: Heartbeat) -> list[T]:
    """Call every function, the first in this thread and the others in threads named after it; return their results.

    A function that hangs is waited for; whoever supervises the calling thread sees that no heartbeat comes any more.

    Args:
      functions: `(heartbeat) -> result`; each calls that `heartbeat` often, which also raises once another failed.
      heartbeat: may raise, in whichever thread calls it; that counts as a failure too.

    Raises:
      what the first that failed raised, after all have ended.
    """
    results: dict[int, T] = {}
    failures: list[BaseException] = []

    def heartbeat_of_each() -> None:
        if failures:
            raise _Aborted
        heartbeat()

    def run(number: int) -> None:
        try:
            results[number] = functions[number](heartbeat_of_each)
        except _Aborted:
            pass
        except BaseException as error:  # Whatever it is, whoever waits for all must hear of it.
            failures.append(error)

    name = threading.current_thread().name
    thread_of = lambda number: threading.Thread(target=run, args=(number,), name=f"{name}-{number}", daemon=True)
    threads = [thread_of(number) for number in range(1, len(functions))]
    for thread in threads:
        thread.start()
    run(0)
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return [results[number] for number in range(len(functions))]
