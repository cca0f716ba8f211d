"""What every test process needs before it touches JAX: eight devices, a compilation cache, and no network."""

from __future__ import annotations

import atexit
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

NUM_DEVICES = 8


def _cache_folder() -> Path:
    """Return a folder of this user (cached programs are code) and these versions, for all workers of a session."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    if not os.access(base if base.exists() else base.parent, os.W_OK):
        base = Path(tempfile.gettempdir()) / f"podium-tests-{os.getuid()}"
    versions = (
        f"jax-{version('jax')}-jaxlib-{version('jaxlib')}-python-{sys.version_info.major}.{sys.version_info.minor}"
    )
    return base / "podium-tests" / f"{versions}-{platform.machine()}"


# Set as environment variables where child processes, which several tests start, shall have the same.
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("WANDB_SILENT", "true")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "PYTEST_XDIST_WORKER" not in os.environ:  # One folder for all workers of a session, and nobody's own.
    os.environ["PODIUM_CACHE"] = tempfile.mkdtemp(prefix="podium-tests-cache-")
    atexit.register(shutil.rmtree, os.environ["PODIUM_CACHE"], ignore_errors=True)
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_cache_folder()))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")

import jax  # noqa: E402

import podium  # noqa: E402, F401 - it says what XLA shall do before that starts.

# In this process only: a child says itself how many devices it wants.
jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
jax.devices()  # Started here, so that no test starts it with fewer.


def pytest_report_header() -> str:
    """Say what the tests run on."""
    return f"jax {jax.__version__} on {jax.default_backend()}, {jax.device_count()} devices"


@pytest.fixture(autouse=True)
def _wait_for_the_devices() -> Iterator[None]:
    """Let no test leave work behind: virtual devices beyond the cores, each with a queue, can starve a collective."""
    yield
    jax.effects_barrier()
    for array in jax.live_arrays():
        if not array.is_deleted():
            array.block_until_ready()
