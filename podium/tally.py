"""Metrics of iterations added up to rows of metrics, the same bits whatever chunks they came in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

_SUMS = (
    "episodes",
    "episode_return_sum",
    "episode_length_sum",
    "valid_steps",
    "dropped_batches",
    "dropped_gradients",
    "late_gradients",
    "nonfinite_gradients",
    "dropped_rollouts",
    "env_seconds",
    "inference_seconds",
    "learn_seconds",
)
_MAXIMA = ("policy_lag_max",)


class Tally:
    """The metrics of every iteration since the last row, added up in order: the same bits whatever the chunks were."""

    def __init__(self, record: Mapping[str, Any] | None = None):
        record = record or {}
        self.updates, self.seconds = int(record.get("updates", 0)), float(record.get("seconds", 0.0))
        self._sums = {name: np.asarray(value, float) for name, value in record.get("sums", {}).items()}
        self._counts = {name: np.asarray(value, int) for name, value in record.get("counts", {}).items()}

    def add(self, metrics: Mapping[str, Any], num_updates: int, seconds: float) -> None:
        """Add the metrics of a chunk, [num_updates, ...] each."""
        self.updates += num_updates
        self.seconds += seconds
        for name, values in metrics.items():
            # NaN stands for what did not happen, but in a sum.
            counted = np.ones_like(values, bool) if name in _SUMS else np.isfinite(values)
            before = np.asarray(self._sums.get(name, np.zeros(values.shape[1:])), float)
            if name in _MAXIMA:
                self._sums[name] = np.maximum(before, values.max(0))
                continue
            # A cumulative sum adds one by one; `np.sum` adds in pairs, which would show where chunks began.
            self._sums[name] = np.cumsum(np.concatenate([before[None], np.where(counted, values, 0.0)]), axis=0)[-1]
            self._counts[name] = self._counts.get(name, 0) + counted.sum(0)

    def record(self) -> dict[str, Any]:
        """Return all of it for a checkpoint."""
        return {"updates": self.updates, "seconds": self.seconds, "sums": self._sums, "counts": self._counts}

    def averages(self) -> dict[str, Any]:
        """Return means over episodes and over iterations, NaN where there was none."""
        sums, means = dict(self._sums), {}
        with np.errstate(invalid="ignore", divide="ignore"):
            episodes = sums.pop("episodes")
            means["episode_return"] = to_python(sums.pop("episode_return_sum") / episodes)
            means["episode_length"] = to_python(sums.pop("episode_length_sum") / episodes)
            means["episodes"] = to_python(episodes)
            whole = lambda name: name in _SUMS or name in _MAXIMA  # noqa: E731
            return means | {
                name: to_python(value if whole(name) else value / self._counts[name]) for name, value in sums.items()
            }


def to_python(value: Any) -> Any:
    """Return arrays as floats, or lists of floats, one a seed."""
    if isinstance(value, dict):
        return {key: to_python(item) for key, item in value.items()}
    array = np.asarray(value, float)
    return float(array) if array.ndim == 0 else array.tolist()
