"""The ratio of learning to acting: of inserting into a replay and sampling from it, the faster one waits."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

from podium.placement.threads.supervision import POLL_SECONDS, Heartbeat


class ReplayTimeout(RuntimeError):
    """A replay that cannot be sampled for too long; the message says why and for how long."""


class RateLimiter:
    """Blocks the faster of inserting and sampling, as Reverb's limiters do (Cassirer et al. 2021, arXiv 2102.04736).

    Once the replay is open, with i items inserted since and s sampled, it holds

        -tolerance <= samples_per_insert * i - s <= tolerance

    so that over a run every item is sampled `samples_per_insert` times on average, however fast either side is. Before,
    everything may be inserted and nothing sampled.

    Args:
      samples_per_insert: above 0.
      tolerance: in samples. With less than half of what one insertion and one batch come to, both could wait for ever.
      timeout: seconds that sampling waits while nothing is inserted, and nothing is said to be `coming`.

    Raises:
      ValueError: for a number out of range.
    """

    def __init__(self, samples_per_insert: float, tolerance: float, timeout: float):
        for name, value in (("samples_per_insert", samples_per_insert), ("tolerance", tolerance), ("timeout", timeout)):
            if not 0 < value < float("inf"):
                raise ValueError(f"{name}={value!r} must be finite and greater than 0.")
        self.samples_per_insert, self.tolerance = samples_per_insert, tolerance
        self.inserted = self.sampled = 0
        self._before, self._open, self._timeout = 0, False, timeout
        self._heard = time.monotonic()  # When something was inserted, or said to be coming.
        self._condition = threading.Condition()

    @property
    def balance(self) -> float:
        """Samples that are due, none before it opens; negative where it is inserting that is behind."""
        with self._condition:
            if not self._open:
                return 0.0
            return self.samples_per_insert * (self.inserted - self._before) - self.sampled

    def open(self) -> None:
        """Say that the replay holds enough to be sampled; may be said again."""
        with self._condition:
            if not self._open:
                self._open, self._before = True, self.inserted
            self._condition.notify_all()

    def coming(self) -> None:
        """Say that what is inserted next is being made: whoever samples waits on."""
        self._heard = time.monotonic()

    def insert(self, items: int, heartbeat: Heartbeat) -> float:
        """Wait until `items` more may be inserted, and count them; returns the seconds waited.

        Whoever learns may do other things for as long as it likes (evaluate, write a checkpoint), so this has no limit
        of its own.

        Args:
          items: to insert.
          heartbeat: called every `POLL_SECONDS` meanwhile; may raise, as it does when the run is over.
        """
        fits = lambda: not self._open or self.balance + self.samples_per_insert * items <= self.tolerance
        began = time.monotonic()
        while not self._fit(fits):
            heartbeat()
        with self._condition:
            self.inserted += items
            self._heard = time.monotonic()
            self._condition.notify_all()
        return time.monotonic() - began

    def sample(self, items: int, heartbeat: Heartbeat) -> float:
        """Wait until `items` more may be sampled, and count them; see `insert`.

        Raises:
          ReplayTimeout: nothing was inserted, or coming, for as long as `timeout`.
        """
        fits = lambda: self._open and self.balance - items >= -self.tolerance
        began, said = time.monotonic(), False
        while not self._fit(fits):
            now = time.monotonic()
            still = max(began, self._heard)
            opened = "is open" if self._open else "holds too little to be sampled"
            state = (
                f"the replay {opened}, with {self.inserted} items inserted and {self.sampled} sampled; "
                f"nothing was inserted, to sample from, for {now - still:.0f} s"
            )
            if now - still > self._timeout:
                raise ReplayTimeout(f"{state}, which is as long as is waited.")
            if now - still > self._timeout / 4 and not said:
                said = True
                print(f"{state}.", file=sys.stderr, flush=True)
            heartbeat()
        with self._condition:
            self.sampled += items
            self._condition.notify_all()
        return time.monotonic() - began

    def _fit(self, fits: Callable[[], bool]) -> bool:
        """Tell whether it fits; where it does not, wait a little before telling."""
        with self._condition:
            if fits():
                return True
            self._condition.wait(POLL_SECONDS)
            return False
