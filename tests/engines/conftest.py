"""One small Ray cluster for all tests that ask for `cluster`; they are skipped where the extra is absent.

Modules that use it say `pytestmark = pytest.mark.xdist_group("ray")`: one process of pytest runs them all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from podium.placement.remote.engine import Handle, Reply
from podium.placement.remote.ray import RayEngine, RayHandle
from podium.placement.threads.supervision import Heartbeat

START = {
    "num_cpus": 16,  # That it believes in: far less runs at once.
    "object_store_memory": 200 * 2**20,
    "include_dashboard": False,
    "log_to_driver": False,
    "logging_level": "error",
}


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """Yield the module `ray`, joined to a cluster on this machine."""
    ray = pytest.importorskip("ray", reason="the extra ray is not installed (there is no wheel for some Pythons)")
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    with warnings.catch_warnings():
        # Ray starts its processes by a fork, which JAX warns of; nothing but `exec` follows here.
        warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
        ray.init(**START)
    try:
        yield ray
    finally:
        ray.shutdown()
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.fixture
def by_value(cluster: Any, request: pytest.FixtureRequest) -> None:
    """Let what the test module defines travel as code: a Ray process cannot import it."""
    cluster.cloudpickle.register_pickle_by_value(sys.modules[request.module.__name__])


def is_alive(pid: int) -> bool:
    """Tell whether a process runs; one that has ended and was not waited for does not."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.fixture
def gone() -> Any:
    """Return a function that waits until processes have ended."""

    def wait(*pids: int, seconds: float = 20.0) -> None:
        deadline = time.monotonic() + seconds
        while any(map(is_alive, pids)):
            assert time.monotonic() < deadline, [pid for pid in pids if is_alive(pid)]
            time.sleep(0.05)

    assert is_alive(os.getpid())
    return wait


Before = Callable[[RayHandle, str], None]
"""`(handle, method)`: what a test does before a call."""


@dataclasses.dataclass(frozen=True)
class Spied:
    """The handle of a fragment in a Ray actor, which a test sees, and whose calls it may disturb."""

    handle: RayHandle
    before: Before

    @property
    def name(self) -> str:
        """The fragment's."""
        return self.handle.name

    def start(self, method: str, *arguments: Any) -> Reply:
        self.before(self.handle, method)
        return self.handle.start(method, *arguments)

    def call(self, method: str, *arguments: Any, heartbeat: Heartbeat) -> Any:
        self.before(self.handle, method)
        return self.handle.call(method, *arguments, heartbeat=heartbeat)

    def restart(self) -> None:
        self.handle.restart()

    def close(self) -> None:
        self.handle.close()


@dataclasses.dataclass(frozen=True)
class SpiedEngine(RayEngine):
    """Ray actors, with the handles of all that were placed."""

    before: Before = lambda handle, method: None
    handles: list[RayHandle] = dataclasses.field(default_factory=list)

    def place(self, name: str, make: Callable[[], Any]) -> Handle:
        """Place the fragment, and remember its handle."""
        self.handles.append(super().place(name, make))
        return Spied(self.handles[-1], self.before)

    def pids(self) -> list[int]:
        """Return the processes of the fragments."""
        return [handle.pid for handle in self.handles if handle.pid is not None]


@pytest.fixture
def spied() -> type[SpiedEngine]:
    """Return the class of an engine whose handles a test sees, and whose calls it may disturb."""
    return SpiedEngine


@dataclasses.dataclass
class Signal:
    """Sends the process of a fragment a signal before the nth call of a method, once."""

    number: int
    name: str
    method: str
    nth: int
    sent_to: list[int] = dataclasses.field(default_factory=list)
    calls: int = 0

    def __call__(self, handle: RayHandle, method: str) -> None:
        self.calls += (handle.name, method) == (self.name, self.method)
        if self.calls == self.nth and not self.sent_to:
            assert handle.pid is not None
            self.sent_to.append(handle.pid)
            os.kill(handle.pid, self.number)


@pytest.fixture
def signalling() -> type[Signal]:
    """Return the class of what signals a process before a call."""
    return Signal
