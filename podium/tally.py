"""Metrics of iterations added up to rows of metrics, the same bits whatever chunks they came in."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, get_args

import numpy as np

Addition = Literal["sum", "mean", "max", "last", "each"]
"""How a metric adds up over the updates of a row; but for a sum, NaN is what did not happen, and is left out.

"last" is the newest, and "each" all of them in order.
"""

OF_EPISODES: Mapping[str, Addition] = MappingProxyType(
    {"episodes": "sum", "episode_return_sum": "sum", "episode_length_sum": "sum", "nonfinite_steps": "sum"}
)
"""The metrics that every program makes, see `podium.episodes.summarize`; a row has their means over episodes."""


class Tally:
    """The metrics of every iteration since the last row, added up in order: the same bits whatever the chunks were.

    Args:
      additions: how each metric adds up; those not named, which are the agent's, are means.
      record: of an earlier tally, to continue it.

    Raises:
      ValueError: an addition is none of these.

    >>> tally = Tally({"wait_max": "max"})
    >>> metrics = {"wait_max": [1.0, 5.0], "loss": [3.0, np.nan], **dict.fromkeys(OF_EPISODES, [2.0, 4.0])}
    >>> tally.add({name: np.array(values) for name, values in metrics.items()}, num_updates=2, seconds=0.1)
    >>> row = tally.averages()
    >>> row["wait_max"], row["loss"], row["episodes"], row["episode_return"]
    (5.0, 3.0, 6.0, 1.0)
    """

    def __init__(self, additions: Mapping[str, Addition], record: Mapping[str, Any] | None = None):
        for name, addition in additions.items():
            if addition not in get_args(Addition):
                raise ValueError(f"additions[{name!r}]={addition!r} is none of {', '.join(get_args(Addition))}.")
        self._additions = {**additions, **OF_EPISODES}
        record = record or {}
        self.updates, self.seconds = int(record.get("updates", 0)), float(record.get("seconds", 0.0))
        self._values = {name: np.asarray(value, float) for name, value in record.get("sums", {}).items()}
        self._counts = {name: np.asarray(value, int) for name, value in record.get("counts", {}).items()}
        for name in self._counts.keys() & self._named("max"):
            # Up to 0.1.0 some maxima were averaged; their mean is the best bound known of them.
            with np.errstate(invalid="ignore", divide="ignore"):
                self._values[name] = self._values[name] / self._counts.pop(name)

    def _named(self, addition: Addition) -> set[str]:
        return {name for name, declared in self._additions.items() if declared == addition}

    def add(self, metrics: Mapping[str, Any], num_updates: int, seconds: float) -> None:
        """Add the metrics of a chunk, [num_updates, ...] each, and the seconds that it took."""
        self.updates += num_updates
        self.seconds += seconds
        for name, values in metrics.items():
            addition = self._additions.get(name, "mean")
            if addition == "max":
                before = self._values.get(name, np.full(values.shape[1:], np.nan))
                self._values[name] = np.fmax(before, np.fmax.reduce(np.asarray(values, float), axis=0))
                continue
            if addition in ("last", "each"):
                before = self._values.get(name, np.zeros(0)).tolist()
                known = [*before, *(each.tolist() for each in values if np.isfinite(each).all())]
                self._values[name] = np.array(known[-1:] if addition == "last" else known)
                continue
            # NaN stands for what did not happen, but in a sum.
            counted = np.ones_like(values, bool) if addition == "sum" else np.isfinite(values)
            before = np.asarray(self._values.get(name, np.zeros(values.shape[1:])), float)
            # A cumulative sum adds one by one; `np.sum` adds in pairs, which would show where chunks began.
            added = np.cumsum(np.concatenate([before[None], np.where(counted, values, 0.0)]), axis=0)
            self._values[name] = added[-1]
            self._counts[name] = self._counts.get(name, 0) + counted.sum(0)

    def record(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"updates": self.updates, "seconds": self.seconds, "sums": self._values, "counts": self._counts}

    def averages(self) -> dict[str, Any]:
        """Return the metrics of a row: sums, means and maxima, and means over episodes; NaN where there was none."""
        values, row = dict(self._values), {}
        with np.errstate(invalid="ignore", divide="ignore"):
            episodes = values.pop("episodes")
            row["episode_return"] = to_python(values.pop("episode_return_sum") / episodes)
            row["episode_length"] = to_python(values.pop("episode_length_sum") / episodes)
            row["episodes"] = to_python(episodes)
            for name, value in values.items():
                addition = self._additions.get(name, "mean")
                if addition == "last":
                    value = value[-1] if len(value) else np.nan
                row[name] = to_python(value / self._counts[name] if addition == "mean" else value)
        return row


def to_python(value: Any) -> Any:
    """Return arrays as floats, or lists of floats, one a seed."""
    if isinstance(value, dict):
        return {key: to_python(item) for key, item in value.items()}
    array = np.asarray(value, float)
    return float(array) if array.ndim == 0 else array.tolist()
