"""One small Ray cluster for all tests that ask for `cluster`; they are skipped where the extra is absent.

Modules that use it say `pytestmark = pytest.mark.xdist_group("ray")`: one process of pytest runs them all.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

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
