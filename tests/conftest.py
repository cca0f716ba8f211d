"""What every test process needs before it touches JAX: eight devices, a compilation cache, and no network."""

from __future__ import annotations

import atexit
import gc
import itertools
import os
import platform
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

NUM_DEVICES = 8

# Looked through for doctests, it would register what it has in every test process.
collect_ignore = ["plugin_of_own.py"]

NIGHTLY = tuple(
    line
    for line in Path(__file__).with_name("nightly.txt").read_text().splitlines()
    if line and not line.startswith("#")
)
"""Tests that are `slow`, by how their names begin."""


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
# Most programs here run once: compiling them is what takes time. .ci/nightly compiles them as users do.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
if os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "1":
    # Each program in one piece, as all cores have tests to run: a sixth less; and loops from templates of LLVM's in
    # place of MLIR's passes: two fifths less. XLA ends the process for a flag that it does not know.
    known = {
        "--xla_cpu_parallel_codegen_split_count=1": ("0.10.", "0.11."),
        "--xla_cpu_use_fusion_emitters=false": ("0.10.",),
    }
    quick = [flag for flag, versions in known.items() if version("jaxlib").startswith(versions)]
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *quick]).strip()
# Programs need not say which line of Python every operation is from.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
if "PYTEST_XDIST_WORKER" not in os.environ:  # One folder for all workers of a session, and nobody's own.
    os.environ["PODIUM_CACHE"] = tempfile.mkdtemp(prefix="podium-tests-cache-")
    atexit.register(shutil.rmtree, os.environ["PODIUM_CACHE"], ignore_errors=True)
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_cache_folder()))
# What took longer is kept, for the next session; to keep a program takes a while too.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")

import jax  # noqa: E402

from podium.envs.atari import compiler  # noqa: E402

compiler.avoid_avx512()  # JAX starts here, before any test makes an environment that would.
# In this process only: a child says itself how many devices it wants.
jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
jax.devices()  # Started here, so that no test starts it with fewer.


def pytest_report_header() -> str:
    """Say what the tests run on."""
    return f"jax {jax.__version__} on {jax.default_backend()}, {jax.device_count()} devices"


COLLECTED = pytest.StashKey[list[str]]()
PLAYED = itertools.count(1)
"""Tests of this process."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what is in `NIGHTLY`."""
    config.stash[COLLECTED] = [item.nodeid for item in items]
    for item in items:
        if item.nodeid.startswith(NIGHTLY):
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """Search for garbage less often, and not among what was imported and collected, which all lives to the end.

    JAX's traces are large graphs of objects, so that the default of 700 new ones has all of them walked all the time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture
def nightly() -> tuple[str, ...]:
    """Return `NIGHTLY`."""
    return NIGHTLY


@pytest.fixture
def stale(request: pytest.FixtureRequest) -> list[str]:
    """Return entries of `NIGHTLY` by which no test's name begins.

    Of a file from which nothing was collected nothing is known: it was not asked for, or needs an extra.
    """
    if any("::" in path for path in request.config.args) or request.config.getoption("lf"):
        pytest.skip("some files were collected in part")
    names = request.config.stash[COLLECTED]
    files = {name.partition("::")[0] for name in names}
    known = lambda file: file in files or not (request.config.rootpath / file).exists()
    return [
        entry
        for entry in NIGHTLY
        if known(entry.partition("::")[0]) and not any(name.startswith(entry) for name in names)
    ]


@pytest.fixture(scope="session")
def rlax() -> Any:
    """Return rlax, an oracle; without it the test is skipped."""
    with warnings.catch_warnings():
        # Its dependency tensorflow_probability asks jax for names that have moved.
        warnings.simplefilter("ignore", DeprecationWarning)
        return pytest.importorskip("rlax", reason="rlax is in the dev extra")


@pytest.fixture(autouse=True)
def _forget_programs_before_there_are_too_many() -> Iterator[None]:
    """Let go of compiled programs: each is mapped into memory, and past Linux's 65,530 maps a process dies of one more.

    Two workers of a nightly run did, in reading and in writing the compilation cache.
    """
    yield
    maps = Path("/proc/self/maps")
    if next(PLAYED) % 10 == 0 and maps.exists() and maps.read_bytes().count(b"\n") > 20_000:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(autouse=True)
def _wait_for_the_devices() -> Iterator[None]:
    """Let no test leave work behind: virtual devices beyond the cores, each with a queue, can starve a collective."""
    yield
    jax.effects_barrier()
    for array in jax.live_arrays():
        if not array.is_deleted():
            array.block_until_ready()
