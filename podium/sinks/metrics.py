"""The metrics file: one JSON object a line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from podium.files import to_jsonable, write_atomic
from podium.ranges import is_number
from podium.sinks.rows import Row


class JsonlSink:
    """Append metrics to a file, one JSON object a line; NaN and infinity become null.

    Every row goes to the disk at once, so a kill loses at most the row being written; that torn line goes before
    the first row that is written here.

    Args:
      path: the file; created if missing.
    """

    essential = True

    def __init__(self, path: Path):
        self.path = Path(path)
        self._is_whole = False

    def write(self, row: Row) -> None:
        """Append one line.

        Raises:
          OSError: the file cannot be written; it carries the path.
        """
        line = (json.dumps(to_jsonable(row), allow_nan=False) + "\n").encode()
        try:
            if not self._is_whole:
                self.truncate_after(math.inf)
            # Opened anew for each row, some 20 us: nothing to leak, and nothing left in a buffer by a kill.
            with open(self.path, "ab", buffering=0) as file:
                written = file.write(line)
        except OSError as error:
            raise OSError(error.errno, error.strerror or str(error), str(self.path)) from error
        if written != len(line):
            raise OSError(f"Only a part of a row was written to {self.path}; the disk may be full.")

    def truncate_after(self, env_steps: float) -> int:
        """Drop the rows later than `env_steps`, and a torn last line, atomically; return how many rows are left.

        A resumed run calls this with the restored step, so that the file has no gap and no double.

        Raises:
          ValueError: a line before the last is not JSON.
        """
        self._is_whole = True
        if not self.path.exists():
            return 0
        before = self.path.read_bytes()
        rows = [pair for pair in _parse(before, self.path) if pair[1].get("env_steps", -math.inf) <= env_steps]
        after = b"".join(line + b"\n" for line, _ in rows)
        if after != before:
            write_atomic(self.path, after)
        return len(rows)

    def close(self, summary: Row) -> None:
        """Do nothing: the summary is a file of its own."""


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read a metrics file; a torn last line is left out.

    Raises:
      ValueError: a line before the last is not JSON.
    """
    return [row for _, row in _parse(Path(path).read_bytes(), Path(path))]


def _parse(data: bytes, path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    """Return the lines of a metrics file with their rows, without a torn last one."""
    lines = data.split(b"\n")
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or not is_number(row.get("env_steps", 0)):
                raise ValueError("not an object of numbers")
        except ValueError:
            if number == len(lines):  # No newline behind it: a kill tore it.
                break
            raise ValueError(
                f"{path}, line {number} is not a JSON object that podium writes; remove the line or restore the file."
            ) from None
        rows.append((line, row))
    return rows
