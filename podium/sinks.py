"""Where metrics go: a JSON line file, the terminal, a picture, Weights & Biases. Training fails for the first only."""

from __future__ import annotations

import json
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal, Protocol

import numpy as np

from podium.files import to_jsonable, write_atomic
from podium.ranges import is_number

Row = Mapping[str, Any]
"""Metrics of one chunk: names to numbers, or to lists with one number a seed. `env_steps` is always there."""


class Sink(Protocol):
    """A place that takes metrics. `essential` sinks end the run when they fail; others are dropped with a warning."""

    def write(self, row: Row) -> None:
        """Take the metrics of one chunk."""

    def close(self, summary: Row) -> None:
        """Take the summary of the run, and end."""


class Sinks(list[Any]):
    """Several sinks as one. A sink that raises is warned about once and dropped, unless it is `essential`.

    >>> Sinks([]).write({"env_steps": 1})
    """

    def write(self, row: Row) -> None:
        """Hand `row` to every sink.

        Raises:
          OSError: the metrics file cannot be written.
        """
        for sink in list(self):
            self._call(sink, sink.write, row)

    def show(self, row: Row) -> None:
        """Hand a row that is not whole yet to the line of progress."""
        for sink in list(self):
            if isinstance(sink, TerminalSink):
                self._call(sink, sink.show, row)

    def close(self, summary: Row) -> None:
        """Close every sink, then raise the error of an essential one, if any."""
        failed: Exception | None = None
        for sink in list(self):
            try:
                self._call(sink, sink.close, summary)
            except Exception as error:
                failed = failed or error
        self.clear()
        if failed is not None:
            raise failed

    def _call(self, sink: Any, method: Callable[[Row], None], row: Row) -> None:
        try:
            method(row)
        except Exception as error:
            if getattr(sink, "essential", False):
                raise
            if any(sink is other for other in self):
                self[:] = [other for other in self if other is not sink]
            warnings.warn(f"{type(sink).__name__} failed and is off from here on: {_short(error)}", stacklevel=3)


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
    speed = _mean(row.get("steps_per_second"))
    if speed is not None:
        parts.append(f"{speed:,.0f} steps/s")
    for name in ("episode_return", "eval_return"):
        value = _mean(row.get(name))
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
    lag = _mean(row.get("policy_lag_mean"))  # None where nothing was learnt from yet.
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


class CurveSink:
    """Draw `curve.png` when the run ends.

    Args:
      path: of the picture.
      rows: of the run before it was resumed.
    """

    def __init__(self, path: Path, rows: Iterable[Row] = ()):
        self.path = Path(path)
        self._rows = [_for_curve(row) for row in rows]

    def write(self, row: Row) -> None:
        """Remember what the picture needs of one row."""
        self._rows.append(_for_curve(row))

    def close(self, summary: Row) -> None:
        """Draw the picture, but for a run that failed before its first row."""
        if self._rows or summary:
            plot_curve(self._rows, self.path)


class PictureSink:
    """Draw a picture of all rows when the run ends.

    Args:
      path: of the picture.
      rows: of the run; a list that goes on growing.
      draw: `(rows, path)`.
    """

    def __init__(self, path: Path, rows: Sequence[Row], draw: Callable[[Sequence[Row], Path], None]):
        self._path, self._rows, self._draw = path, rows, draw

    def write(self, row: Row) -> None:
        """Do nothing: the row is in the list."""

    def close(self, summary: Row) -> None:
        """Draw, but for a run that failed before its first row."""
        if self._rows and summary:
            self._draw(self._rows, self._path)


def plot_curve(rows: Iterable[Row], path: Path, title: str = "") -> None:
    """Plot training and evaluation returns against environment steps into a PNG file.

    Args:
      rows: with `env_steps` and, where known, `episode_return` and `eval_return`: numbers, or lists with one number
        a seed, which are drawn as their mean in a band of its 95% interval.
      path: of the picture; replaced atomically.
      title: above it.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    rows = list(rows)
    for name, label in (("episode_return", "training"), ("eval_return", "evaluation (greedy)")):
        points = [
            (row["env_steps"], *_mean_and_interval(row[name])) for row in rows if _mean(row.get(name)) is not None
        ]
        if points:
            env_steps, mean, low, high = np.asarray(points, float).T
            (line,) = axes.plot(env_steps, mean, label=label, marker="o" if len(points) < 30 else "", markersize=3)
            axes.fill_between(env_steps, low, high, color=line.get_color(), alpha=0.25, linewidth=0)
    axes.set(xlabel="environment steps", ylabel="episode return", title=title)
    axes.grid(alpha=0.3)
    if axes.get_lines():
        axes.legend()
    save_figure(figure, path, dpi=120)


def save_figure(figure: Any, path: Path, **options: Any) -> None:
    """Write a figure of matplotlib as a PNG file, atomically; `options` are those of its `savefig`."""
    import io

    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", **options)
    write_atomic(Path(path), buffer.getvalue())


def interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Return Student's interval of the mean of a few seeds: mean +- t(n - 1) s / sqrt(n).

    The bootstrap is too narrow below about ten seeds, which is where reinforcement learning lives. NaN are left out;
    one value is its own interval.

    >>> [round(bound, 2) for bound in interval([1.0, 2.0, 3.0])]
    [-0.48, 4.48]
    """
    from scipy.special import stdtrit

    array = np.asarray(values, float).ravel()
    array = array[np.isfinite(array)]
    if array.size == 0:
        return math.nan, math.nan
    mean = float(array.mean())
    if array.size == 1:
        return mean, mean
    half = float(stdtrit(array.size - 1, 0.5 + confidence / 2) * array.std(ddof=1) / math.sqrt(array.size))
    return mean - half, mean + half


class WandbSink:
    """Send metrics to Weights & Biases. Whatever goes wrong there becomes one warning; training continues.

    Args:
      mode: "disabled" does nothing and does not import wandb; "offline" keeps files for `wandb sync`; "online" sends,
        and falls back to "offline" where no key is configured, rather than to ask for one.
      project: of the run.
      config: shown beside it.
      dir: where wandb keeps its files.
      name: of the run; None lets wandb choose.
    """

    def __init__(
        self,
        mode: Literal["disabled", "offline", "online"],
        project: str,
        config: Mapping[str, Any],
        dir: Path,
        name: str | None = None,
    ):
        if mode not in ("disabled", "offline", "online"):
            raise ValueError(f"wandb={mode!r} is not a mode; use 'disabled', 'offline' or 'online'.")
        self._run: Any = None
        if mode != "disabled":
            self._guard(lambda: self._start(mode, project, config, Path(dir), name))

    def write(self, row: Row) -> None:
        """Log one row at its `env_steps`."""
        if self._run is not None:
            values = {key: _mean(value) for key, value in row.items()}
            self._guard(lambda: self._run.log(values, step=int(row["env_steps"])))

    def close(self, summary: Row) -> None:
        """Log the summary and end the run."""
        if self._run is not None:
            self._guard(lambda: self._run.summary.update(to_jsonable(summary)))
        if self._run is not None:
            self._guard(lambda: self._run.finish())
        self._run = None

    def _start(self, mode: str, project: str, config: Mapping[str, Any], folder: Path, name: str | None) -> None:
        try:
            import wandb
        except ImportError:
            warnings.warn("wandb is not installed, so it is off; `pip install wandb` to use it.", stacklevel=5)
            return
        if mode == "online" and not wandb.login(prompt=False):
            warnings.warn("wandb has no API key, so it is offline; `wandb login`, then `wandb sync`.", stacklevel=5)
            mode = "offline"
        folder.mkdir(parents=True, exist_ok=True)
        # Capturing the console would fight with the live progress line.
        settings = wandb.Settings(console="off", silent=True, init_timeout=60)
        self._run = wandb.init(
            mode=mode,  # type: ignore[arg-type]
            project=project,
            config=to_jsonable(config),
            dir=str(folder),
            name=name,
            settings=settings,
        )

    def _guard(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except Exception as error:
            self._run = None
            warnings.warn(f"wandb failed and is off from here on: {_short(error)}", stacklevel=4)


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


def _mean(value: Any) -> float | None:
    """Return the mean of the finite numbers in a number or a list; None without any."""
    if value is None or isinstance(value, str):
        return None
    items = [item for item in np.ravel(np.asarray(value, dtype=object)).tolist() if item is not None]
    finite = [float(item) for item in items if math.isfinite(item)]
    return sum(finite) / len(finite) if finite else None


def _mean_and_interval(value: Any) -> tuple[float, float, float]:
    items = np.asarray(
        [math.nan if item is None else item for item in np.ravel(np.asarray(value, object)).tolist()], float
    )
    return (_mean(value) or 0.0, *interval(items.tolist()))


def _for_curve(row: Row) -> dict[str, Any]:
    return {name: row[name] for name in ("env_steps", "episode_return", "eval_return") if row.get(name) is not None}


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]}"
