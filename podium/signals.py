"""SIGINT and SIGTERM as something to ask about between chunks, alike in every process of a run."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

from podium import distributed


@contextlib.contextmanager
def catch_signals() -> Iterator[list[str]]:
    """Collect the names of SIGINT and SIGTERM instead of dying; a second one acts as usual. Main thread only."""
    caught: list[str] = []
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return
    before: dict[int, Any] = {}

    def handler(number: int, frame: Any) -> None:
        caught.append(signal.Signals(number).name)
        signal.signal(number, before[number])
        print(f"{caught[0]}: saving after this chunk or compilation; once more quits at once.", file=sys.stderr)

    for number in (signal.SIGINT, signal.SIGTERM):
        # None where a handler was not installed by Python, such as that of jax.distributed.
        before[number] = signal.signal(number, handler) or signal.SIG_DFL
    try:
        yield caught
    finally:
        for caught_number, former in before.items():
            signal.signal(caught_number, former)


def agree(caught: list[str]) -> str | None:
    """Return the name of a signal that any process has caught, the same in all, or None."""
    return next((name for names in distributed.gather(list(caught)) for name in names), None)
