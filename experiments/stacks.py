"""Say where threads of Python are, by looking at them again and again while something runs."""

from __future__ import annotations

import collections
import linecache
import sys
import threading
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

import podium


class Stacks:
    """Looks at all threads but its own and the one that made it, every `seconds`, while it is entered as a context.

    A look counts the innermost line of podium's that a thread is in, whatever that line waits for: a call into compiled
    code, a transfer, a lock, Python's own one.
    """

    def __init__(self, seconds: float = 0.002):
        self._seconds, self._stop = seconds, threading.Event()
        self._seen: collections.Counter[tuple[str, int]] = collections.Counter()
        self._left_out = {threading.get_ident()}

    def __enter__(self) -> Self:
        """Begin to look; what was seen before is kept."""
        self._stop.clear()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Look no more."""
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        self._left_out.add(threading.get_ident())
        while not self._stop.wait(self._seconds):
            for thread, frame in sys._current_frames().items():
                if thread not in self._left_out and (place := _innermost(frame)):
                    self._seen[place] += 1

    def shares(self, most: int = 8) -> dict[str, float]:
        """Return what share of the looks found a thread in a line, the most frequent lines first."""
        total = sum(self._seen.values())
        return {
            f"{Path(file).name}:{line} {linecache.getline(file, line).strip()}": number / total
            for (file, line), number in self._seen.most_common(most)
        }


_FOLDER = str(Path(podium.__file__).resolve().parent)


def _innermost(frame: FrameType | None) -> tuple[str, int] | None:
    """Return file and line of the innermost frame that is podium's, if any."""
    while frame is not None and not frame.f_code.co_filename.startswith(_FOLDER):
        frame = frame.f_back
    return (frame.f_code.co_filename, frame.f_lineno) if frame else None
