"""What threads hand to one another: the latest parameters, and the items of bounded queues."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Sequence
from typing import Any, TypeVar

from podium.placement.threads.supervision import POLL_SECONDS, Heartbeat, Stopped, Supervisor

T = TypeVar("T")


class LatestParams:
    """The latest parameters for one device, and their version; older ones are forgotten."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._latest: tuple[Any, int] | None = None

    def publish(self, params: Any, version: int) -> None:
        """Replace the parameters."""
        with self._condition:
            self._latest = params, version
            self._condition.notify_all()

    def get(self, at_least: int, stop: threading.Event) -> tuple[Any, int]:
        """Wait for parameters of version `at_least` or newer; raises Stopped when the run ends."""
        with self._condition:
            while self._latest is None or self._latest[1] < at_least:
                if stop.is_set():
                    raise Stopped
                self._condition.wait(POLL_SECONDS)
            return self._latest


def put(items: queue.Queue[T], item: T, heartbeat: Heartbeat) -> None:
    """Wait for room in a queue and put `item` there; `heartbeat` is called meanwhile, and may raise Stopped."""
    while True:
        heartbeat()  # Who waits for the learner is well.
        with contextlib.suppress(queue.Full):
            items.put(item, timeout=POLL_SECONDS)
            return


def take(items: queue.Queue[T], supervisors: Sequence[Supervisor], heartbeat: Heartbeat | None = None) -> T:
    """Return the next item of a queue; `supervisors` check all threads that may fill it.

    Whoever waits for threads that are well is well: `heartbeat` is called every `POLL_SECONDS`.

    Raises:
      ActorError: one of the threads died or hung, even where the others run.
    """
    while True:
        alive = [supervisor.thread.is_alive() for supervisor in supervisors]
        taken: list[T] = []
        with contextlib.suppress(queue.Empty):
            taken.append(items.get(timeout=POLL_SECONDS))
        for supervisor, is_alive in zip(supervisors, alive, strict=True):
            supervisor.check(is_alive)
        if taken:
            return taken[0]
        if heartbeat is not None:
            heartbeat()
