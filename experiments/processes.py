"""Processes of a given time, each of which leaves a row: what it printed, or how it failed. For `gpu.py`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import machine

HERE = Path(__file__).resolve().parent
GRACE_SECONDS = 20.0
"""Between asking a piece to end and ending it."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """One process: a script of this folder with arguments, whose last line of output is JSON."""

    name: str
    script: str
    arguments: str
    timed: bool = True
    """Whether it must have the machine to itself; others run side by side, before the first timed one."""
    cached: bool = True
    """Whether it finds its programs compiled, by a run before, side by side with others, that is thrown away."""

    def command(self) -> list[str]:
        """Return what to run."""
        return [sys.executable, str(HERE / self.script), *shlex.split(self.arguments)]


def run(piece: Piece, seconds: float, cache: Path | None, alone: bool = True) -> dict[str, Any]:
    """Run a piece for at most so long; return its JSON and wall time, or an `error` and the end of what it said.

    Args:
      piece: to run.
      seconds: after which it is ended.
      cache: folder of compiled programs; None compiles anew.
      alone: whether no other process needs the device's memory.
    """
    began = time.monotonic()
    variables = machine.environment()
    if cache is not None:
        variables |= {"JAX_COMPILATION_CACHE_DIR": str(cache.resolve())}
        variables |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1"}
    if not alone:
        variables |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    code, out, err, in_time = finish(piece.command(), seconds, variables)
    error = (f"exit code {code}" if code else None) if in_time else f"ended after {seconds:.0f} s"
    wall: dict[str, Any] = {"command": f"python experiments/{piece.script} {piece.arguments}".strip()}
    wall |= {"wall_seconds": time.monotonic() - began}
    if error is None:
        try:
            return {**json.loads(out.strip().splitlines()[-1]), **wall}
        except (ValueError, IndexError):
            error = "its last line is no JSON"
    return {"error": error, "said": (err or out).strip().splitlines()[-30:], **wall}


def podium(command: list[str], seconds: float, variables: dict[str, str]) -> dict[str, Any]:
    """Run podium for so long, then as if by Ctrl-C; return its exit code, its JSON, or the end of its errors."""
    # Interrupted, it writes a checkpoint and ends.
    code, out, err, _ = finish(
        [sys.executable, "-m", "podium", *command], max(1.0, seconds), variables, GRACE_SECONDS * 2
    )
    row: dict[str, Any] = {"exit_code": code}
    with contextlib.suppress(ValueError, IndexError):
        row["summary"] = json.loads(out.strip().splitlines()[-1])
    if code:
        row["said"] = err.strip().splitlines()[-30:]
    return row


def finish(
    command: list[str], seconds: float, variables: dict[str, str], grace: float = 0.0
) -> tuple[int, str, str, bool]:
    """Run a process for at most so long, and for `grace` more after an interrupt, if that is any time.

    Returns:
      its exit code, what it wrote to both streams, and whether it ended by itself.
    """
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables) as process:
        with contextlib.suppress(subprocess.TimeoutExpired):
            out, err = process.communicate(timeout=seconds)
            return process.returncode, out, err, True
        if grace:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                out, err = process.communicate(timeout=grace)
                return process.returncode, out, err, False
        process.kill()
        out, err = process.communicate()
        return process.returncode, out, err, False
