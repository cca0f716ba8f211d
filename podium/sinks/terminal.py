"""The line of progress."""

from __future__ import annotations

import math
import os
import sys
import time
from typing import IO, Any

from podium.sinks.rows import Row, mean


class TerminalSink:
    """Show progress: one live line in a terminal, an occasional plain line elsewhere.

    Args:
      total_env_steps: what 100% is.
      progress: False shows nothing.
      stream: where to; None is standard error.
      seconds_between_lines: of plain lines; the first row and the last always show.
    """

    def __init__(
        self,
        total_env_steps: int,
        progress: bool = True,
        stream: IO[str] | None = None,
        seconds_between_lines: float = 10.0,
    ):
        self.total_env_steps = total_env_steps
        self.progress = progress
        self._stream = sys.stderr if stream is None else stream
        self._seconds = seconds_between_lines
        self._live: Any = None
        self._last_line = -math.inf
        self._eval_return: Any = None
        self._unprinted: str | None = None
        # CI often pretends to be a terminal, and a line rewritten a thousand times is unreadable there.
        self._is_terminal = self._stream.isatty() and not os.environ.get("CI") and os.environ.get("TERM") != "dumb"

    def write(self, row: Row) -> None:
        """Show one row."""
        self.show(row)

    def show(self, row: Row) -> None:
        """Show one row, or how far the next has got."""
        if not self.progress:
            return
        self._eval_return = row.get("eval_return", self._eval_return)
        line = progress_line({**row, "eval_return": self._eval_return}, self.total_env_steps)
        if self._is_terminal:
            self._show_live(line)
        elif time.monotonic() - self._last_line >= self._seconds:
            self._print(line)
        else:
            self._unprinted = line

    def close(self, summary: Row) -> None:
        """Show the last row, and leave it on the screen."""
        del summary
        if self._live is not None:
            self._live.stop()
            self._live = None
        elif self._unprinted is not None:
            self._print(self._unprinted)

    def _show_live(self, line: str) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        if self._live is None:
            console = Console(file=self._stream)
            self._live = Live(console=console, auto_refresh=False)
            self._live.start()
        self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)

    def _print(self, line: str) -> None:
        print(line, file=self._stream, flush=True)
        self._last_line, self._unprinted = time.monotonic(), None


def progress_line(row: Row, total_env_steps: int) -> str:
    """Write one row for people.

    >>> progress_line({"env_steps": 500, "steps_per_second": 100.0, "episode_return": 21.5}, 1000)
    ' 50%  500/1,000 steps  100 steps/s  episode_return 21.5  ETA 0:00:05'
    """
    env_steps = int(row["env_steps"])
    parts = [f"{100 * env_steps // max(total_env_steps, 1):3d}%", f"{env_steps:,}/{total_env_steps:,} steps"]
    speed = mean(row.get("steps_per_second"))
    if speed is not None:
        parts.append(f"{speed:,.0f} steps/s")
    for name in ("episode_return", "eval_return"):
        value = mean(row.get(name))
        if value is not None:
            parts.append(f"{name} {value:.4g}")
    parts += _of_actors(row)
    if speed:
        # Steps are those of one seed, speed is that of all.
        returns = row.get("episode_return")
        seeds = len(returns) if isinstance(returns, list) else 1
        seconds = int(max(total_env_steps - env_steps, 0) * seeds / speed)
        parts.append(f"ETA {seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}")
    return "  ".join(parts)


def _of_actors(row: Row) -> list[str]:
    """Say how stale the policies or gradients were, who waited, and where the time went, as far as a row has it."""
    parts = []
    lag = mean(row.get("policy_lag_mean"))  # None where nothing was learnt from yet.
    if lag is not None:
        lost = sum(row.get(name, 0) for name in ("dropped_batches", "dropped_gradients", "nonfinite_gradients"))
        dropped = f"  {lost:.0f} dropped" if lost else ""
        parts.append(f"lag {lag:.1f}, at most {row.get('policy_lag_max', lag):.0f}{dropped}")
    for waiting, served in (("actor", "learner"), ("worker", "server")):
        if f"{waiting}_idle" in row and f"{served}_idle" in row:
            ways = (f"{who}{'s' * (who == waiting)} {100 * row[f'{who}_idle']:.0f}%" for who in (waiting, served))
            parts.append(f"idle: {' '.join(ways)}")
    if "learn_seconds" in row and "env_seconds" in row and "inference_seconds" in row:
        seconds = [row[name] for name in ("env_seconds", "inference_seconds", "learn_seconds")]
        env, inference, learn = (f"{100 * value / max(sum(seconds), 1e-9):.0f}" for value in seconds)
        parts.append(f"time: env {env}% inference {inference}% learning {learn}%")
    return parts
