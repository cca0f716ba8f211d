"""How threads that all need Python's lock share cores: they push nobody aside, and keep to one core if that pays."""

from __future__ import annotations

import contextlib
import os
import secrets
import statistics
import threading
import time
from collections.abc import Iterator

TRIAL = (False, False, True, True, False, False, True, True)
"""Which rollouts of a trial are played on one core. Every second is timed: by then all threads have moved."""

PERIOD = 256
"""Rollouts from one trial to the next: what environments take may change as the policy learns."""

WORTH = 0.95
"""Seconds on one core, of those on all, from which on the one is kept."""


@contextlib.contextmanager
def pushing_nobody_aside() -> Iterator[None]:
    """Let the calling thread, whenever it is woken, not push aside a running one, which may hold Python's lock.

    Where many threads are woken at once, the one that holds the lock is else stopped again and again by others that can
    do nothing but wait for it. Linux alone knows how (SCHED_BATCH); elsewhere nothing changes.
    """
    if not hasattr(os, "sched_setscheduler"):
        yield
        return
    before = os.sched_getscheduler(0)
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, before, os.sched_param(0))


class OneCore:
    """One core for all threads of a crowd, if they play faster there; that is tried now and then.

    Threads that need Python's lock for most of what they do run one at a time wherever they are. On several cores
    whoever gets the lock must often be woken on a core that sleeps, and meanwhile nobody runs; on one core the next
    runs as soon as the one before it stops. But what they do without the lock (simulators in C++, acting on the CPU)
    then is one at a time too. What weighs more is measured: each trial plays rollouts in both ways, in turn, and the
    median of the threads' seconds decides for the rest of the period.

    Linux alone lets a thread choose its cores. Elsewhere, and for a single thread or core, nothing changes.

    Args:
      threads: in the crowd.
    """

    def __init__(self, threads: int):
        everywhere = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set[int]()
        self._everywhere = everywhere if threads > 1 else set[int]()
        self._lock = threading.Lock()
        self._first: int | None = None  # Number of the rollout that somebody played first.
        self._period, self._one = -1, set[int]()
        self._seconds: dict[bool, list[float]] = {}
        self._kept: bool | None = None  # None until the trial of this period is over.

    @contextlib.contextmanager
    def rollout(self, number: int) -> Iterator[None]:
        """Play the rollout of this number where it should be played: the calling thread, and those it starts."""
        if len(self._everywhere) < 2:
            yield
            return
        one = self.chosen(number)
        if one:
            self._go(self._one)
        began = time.perf_counter()
        try:
            yield
        finally:
            if one:
                self._go(self._everywhere)
        self.tell(number, time.perf_counter() - began)

    def chosen(self, number: int) -> bool:
        """Return whether a thread's rollout of this number is to be played on one core."""
        with self._lock:
            self._first = number if self._first is None else self._first
            period, position = divmod(number - self._first, PERIOD)
            if period < self._period:  # Behind the others.
                return bool(self._kept)
            if period > self._period:
                # Another core each time, by chance: other programs on this machine may do the same.
                self._period, self._one, self._kept = period, {secrets.choice(sorted(self._everywhere))}, None
                self._seconds = {False: [], True: []}
            if position < len(TRIAL):
                return TRIAL[position]
            if self._kept is None:
                on_all, on_one = (self._seconds[way] for way in (False, True))
                self._kept = bool(on_all and on_one) and (statistics.median(on_one) < WORTH * statistics.median(on_all))
            return self._kept

    def tell(self, number: int, seconds: float) -> None:
        """Note how long a thread's rollout of this number took it."""
        with self._lock:
            period, position = divmod(number - (self._first or 0), PERIOD)
            if period == self._period and position < len(TRIAL) and position % 2 == 1:
                self._seconds[TRIAL[position]].append(seconds)

    def _go(self, cores: set[int]) -> None:
        with contextlib.suppress(OSError):  # A container may have lost cores meanwhile.
            os.sched_setaffinity(0, cores)
