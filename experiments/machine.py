"""How a script measures, on what, and what a process that it starts is given."""

from __future__ import annotations

import contextlib
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

import podium
from podium.devices import num_cores as cores


def cpu() -> str:
    """Return the name of the processor."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    return name


def last_line_of(command: list[str], what: str, **variables: str) -> str:
    """Run a script in a process of its own, which fixes how JAX starts, and return the last line that it printed.

    Raises:
      ValueError: it failed; `what` could not be measured.
    """
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment() | variables)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise ValueError(f"{what} could not be measured: {last[0]}")
    return done.stdout.splitlines()[-1]


def environment() -> dict[str, str]:
    """Return the variables of a child: it finds podium where it is found here, also in a checkout not installed."""
    path = os.pathsep.join(filter(None, [str(Path(podium.__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path}


def repeat(work: Callable[[], Any], repeats: int) -> list[float]:
    """Return the seconds of each repeat after a first one that is not counted."""
    timings = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        jax.block_until_ready(work())
        timings.append(time.perf_counter() - began)
    return timings[1:]


def timing(steps: int, timings: list[float]) -> dict[str, Any]:
    """Return the median of repeats of so many steps, as seconds and as a rate, and each of them."""
    seconds = statistics.median(timings)
    return {"seconds": seconds, "steps_per_second": steps / seconds, "repeats": timings}


def circumstances() -> dict[str, Any]:
    """Return versions and hardware."""
    return {"versions": _versions(), "hardware": _hardware()}


def _versions() -> dict[str, str]:
    import jaxlib

    return {
        "podium": podium.__version__,
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "python": platform.python_version(),
    }


def _hardware() -> dict[str, Any]:
    device = jax.devices()[0]
    return {
        "cpu": cpu(),
        "cores": cores(),
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "platform": device.platform,
        "device_kind": device.device_kind,
        "device_count": jax.device_count(),
    }
