"""Rows of metrics, and the mean and the interval of what several seeds have in them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Row = Mapping[str, Any]
"""Metrics of one chunk: names to numbers, or to lists with one number a seed. `env_steps` is always there."""


def mean(value: Any) -> float | None:
    """Return the mean of the finite numbers in a number or a list; None without any."""
    if value is None or isinstance(value, str):
        return None
    items = [item for item in np.ravel(np.asarray(value, dtype=object)).tolist() if item is not None]
    finite = [float(item) for item in items if math.isfinite(item)]
    return sum(finite) / len(finite) if finite else None


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
