"""Do several things at the same time, in threads that end together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


class _LeaveOff(Exception):  # Not an error: how the others learn that one has failed.
    """Another one failed."""


def together(functions: Sequence[Callable[[Callable[[], None]], T]], tick: Callable[[], None]) -> list[T]:
    """Call every function, the first in this thread and the others in threads named after it; return what they return.

    One that hangs is waited for; whoever looks after the calling thread sees that nothing ticks any more.

    Args:
      functions: `(tick) -> result`; each calls that `tick` often, which also raises once another one has failed.
      tick: may raise, in whichever thread calls it; that counts as a failure too.

    Raises:
      what the first that failed raised, after all have ended.
    """
    results: dict[int, T] = {}
    failures: list[BaseException] = []

    def tick_of_each() -> None:
        if failures:
            raise _LeaveOff
        tick()

    def run(number: int) -> None:
        try:
            results[number] = functions[number](tick_of_each)
        except _LeaveOff:
            pass
        except BaseException as error:  # Whatever it is, whoever waits for all must hear of it.
            failures.append(error)

    name = threading.current_thread().name
    threads = [
        threading.Thread(target=run, args=(number,), name=f"{name}-{number}", daemon=True)
        for number in range(1, len(functions))
    ]
    for thread in threads:
        thread.start()
    run(0)
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return [results[number] for number in range(len(functions))]
