"""Where the fragments of a placement live: objects of this process, or each in a process of its own (`remote.ray`).

Threads, queues, supervision and restarts stay in the process that drives a placement, whatever the engine. What a
worker thread works with is a *fragment*: an object whose methods take and return trees of arrays and plain values. A
thread calls it through a `Handle`, and does not see where it is.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any, ClassVar, Literal, Protocol

from podium.placement.threads.supervision import FatalError, Heartbeat


class FragmentError(RuntimeError):
    """A fragment raised in a process of its own; the message holds what, and the traceback there."""


class LostError(RuntimeError):
    """The process that held a fragment is gone, and the fragment with it; `Handle.restart` makes another."""


class EngineError(FatalError):
    """The engine itself is gone, or has no room: nothing can be placed any more."""


class Reply(Protocol):
    """A call under way."""

    def result(self, heartbeat: Heartbeat) -> Any:
        """Wait for what the method returns; `heartbeat` is called several times a second meanwhile, and may raise.

        Raises:
          FragmentError: the method raised, in another process; in this one it is the error itself.
          LostError: the fragment's process is gone.
          EngineError: the engine is.
        """


class Handle(Protocol):
    """A fragment, wherever it lives. Calls are done one after another, in the order that they were begun in.

    Attributes:
      name: of the fragment, for messages.
    """

    name: str

    def start(self, method: str, *arguments: Any) -> Reply:
        """Begin `fragment.method(*arguments)`; returns at once where the fragment has a process of its own."""

    def call(self, method: str, *arguments: Any, heartbeat: Heartbeat) -> Any:
        """Do `fragment.method(*arguments)`; waits and raises as `Reply.result` does."""

    def restart(self) -> None:
        """Make the fragment anew, as it was when it was placed, and forget this one."""

    def close(self) -> None:
        """End the fragment, by its `close` if it has one and is here, and its process; may be called twice."""


class Engine(Protocol):
    """How fragments are placed: a value that can be printed and sent, and holds no fragment itself."""

    @property
    def apart(self) -> bool:
        """Whether fragments live in other processes; what they take and return is then NumPy, and travels."""

    def place(self, name: str, make: Callable[[], Any]) -> Handle:
        """Let `make()` make a fragment where it is to live; returns at once where that is another process.

        An error of `make` is raised by the first call. `make` must be something that can be sent where `apart`.
        """


@dataclasses.dataclass(frozen=True)
class Threads:
    """Fragments are objects of this process; a call is a call."""

    apart: ClassVar[bool] = False

    def place(self, name: str, make: Callable[[], Any]) -> Handle:
        """Make the fragment."""
        return _Here(name, make)


ENGINES: dict[str, Callable[[], Engine]] = {"threads": Threads}
"""What makes the engine of each name; `remote.ray` adds its own."""


class _Here:
    """A fragment in this process."""

    def __init__(self, name: str, make: Callable[[], Any]):
        self.name, self._make, self._fragment = name, make, make()

    def start(self, method: str, *arguments: Any) -> _Done:
        return _Done(getattr(self._fragment, method)(*arguments))

    def call(self, method: str, *arguments: Any, heartbeat: Heartbeat) -> Any:
        return self.start(method, *arguments).value

    def restart(self) -> None:
        self._fragment = self._make()

    def close(self) -> None:
        fragment, self._fragment = self._fragment, None
        if hasattr(fragment, "close"):
            fragment.close()


@dataclasses.dataclass(frozen=True)
class _Done:
    value: Any

    def result(self, heartbeat: Heartbeat) -> Any:
        return self.value


def within(seconds: float, late: str, heartbeat: Heartbeat) -> Callable[[], None]:
    """Return what may be called in place of `heartbeat`: it raises TimeoutError(late) after so many seconds."""
    deadline = time.monotonic() + seconds

    def look() -> None:
        heartbeat()
        if time.monotonic() > deadline:
            raise TimeoutError(late)

    return look


def resolve_engine(engine: Engine | Literal["threads", "ray"], field: str = "engine") -> Engine:
    """Return the engine of this name, or the one given; `field` is what messages call it.

    Raises:
      ValueError: it is none, or its library is not installed.
    """
    if isinstance(engine, str) and engine in ENGINES:
        return ENGINES[engine]()
    if isinstance(engine, str) or not hasattr(engine, "place"):
        raise ValueError(f"{field}={engine!r} is not known; use {' or '.join(map(repr, ENGINES))}.")
    return engine


def check_engines(placement: Any) -> None:
    """Raise ValueError where an engine of a placement has no cluster to put anything into, before a run begins."""
    for field in ("engine", "replay_engine"):
        given: Any = getattr(placement, field, None)
        engine: Any = ENGINES[given]() if isinstance(given, str) and given in ENGINES else given
        if hasattr(engine, "require_cluster"):
            engine.require_cluster(f"{field}={given!r}")
