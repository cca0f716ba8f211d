"""Pictures of a run, drawn when it ends."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from podium.files import write_atomic
from podium.sinks.rows import Row, interval, mean


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
        points = [(row["env_steps"], *_mean_and_interval(row[name])) for row in rows if mean(row.get(name)) is not None]
        if points:
            env_steps, middle, low, high = np.asarray(points, float).T
            (line,) = axes.plot(env_steps, middle, label=label, marker="o" if len(points) < 30 else "", markersize=3)
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


def _for_curve(row: Row) -> dict[str, Any]:
    return {name: row[name] for name in ("env_steps", "episode_return", "eval_return") if row.get(name) is not None}


def _mean_and_interval(value: Any) -> tuple[float, float, float]:
    items = np.asarray(
        [math.nan if item is None else item for item in np.ravel(np.asarray(value, object)).tolist()], float
    )
    return (mean(value) or 0.0, *interval(items.tolist()))
