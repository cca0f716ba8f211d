"""The ratio of learning to acting: of inserting into a replay and sampling from it, the faster one waits."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

from podium.placement.actors import POLL_SECONDS


class ReplayTimeout(RuntimeError):
    """A replay that cannot be sampled, or has no room, for too long; the message says why and for how long."""


class Limiter:
    """Blocks the faster of inserting and sampling, as Reverb's limiters do (Cassirer et al. 2021, arXiv 2102.04736).

    Once the replay is open, with i items inserted since and s sampled, it holds

        -tolerance <= samples_per_insert * i - s <= tolerance

    so that over a run every item is sampled `samples_per_insert` times on average, however fast either side is. Before,
    everything may be inserted and nothing sampled.

    Args:
      samples_per_insert: above 0.
      tolerance: in samples. With less than half of what one insertion and one batch come to, both could wait for ever.
      timeout: seconds that either side waits while the other does nothing.

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

    def insert(self, items: int, waiting: Callable[[], None]) -> float:
        """Wait until `items` more may be inserted, and count them; returns the seconds waited.

        Args:
          items: to insert.
          waiting: called every `POLL_SECONDS` meanwhile; may raise.

        Raises:
          ReplayTimeout: nothing was sampled for as long as `timeout`.
        """
        fits = lambda: not self._open or self.balance + self.samples_per_insert * items <= self.tolerance  # noqa: E731
        waited = self._wait(fits, lambda: self.sampled, "nothing was sampled, to make room,", waiting)
        with self._condition:
            self.inserted += items
            self._condition.notify_all()
        return waited

    def sample(self, items: int, waiting: Callable[[], None]) -> float:
        """Wait until `items` more may be sampled, and count them; returns the seconds waited; see `insert`."""
        fits = lambda: self._open and self.balance - items >= -self.tolerance  # noqa: E731
        waited = self._wait(fits, lambda: self.inserted, "nothing was inserted, to sample from,", waiting)
        with self._condition:
            self.sampled += items
            self._condition.notify_all()
        return waited

    def _wait(
        self, fits: Callable[[], bool], others: Callable[[], int], words: str, waiting: Callable[[], None]
    ) -> float:
        began = still = time.monotonic()
        seen, said = others(), False
        while True:
            with self._condition:
                if fits():
                    return time.monotonic() - began
                self._condition.wait(POLL_SECONDS)
            now = time.monotonic()
            if others() != seen:
                seen, still = others(), now
            opened = "is open" if self._open else "holds too little to be sampled"
            story = (
                f"the replay {opened}, with {self.inserted} items inserted and {self.sampled} sampled; "
                f"{words} for {now - still:.0f} s"
            )
            if now - still > self._timeout:
                raise ReplayTimeout(f"{story}, which is as long as is waited.")
            if now - still > self._timeout / 4 and not said:
                said = True
                print(f"{story}.", file=sys.stderr, flush=True)
            waiting()
