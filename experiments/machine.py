"""What a script's figures were measured on, and what a process that it starts is given."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
from pathlib import Path

import podium
from podium.devices import num_cores as cores  # noqa: F401


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
