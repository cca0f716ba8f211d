"""Values as histograms: a critic that classifies which bin a value lies in, in place of a regression."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podium.ops import categorical
from podium.types import Array


class Histogram(NamedTuple):
    """Values from `low` to `high` as probabilities of Z bins alike, whose centers are Z numbers from low to high.

    A value is spread over its neighbours as by a normal distribution around it (HL-Gauss; Imani and White 2018, and
    Farebrother et al. 2024, arXiv 2403.03950), cut at the outermost edges:

        p_i(v) = (F(e_{i+1}) - F(e_i)) / (F(e_Z) - F(e_0)),   F the distribution function of N(v, (spread * width)^2)

    Fields: low and high, floats that may be traced; num_bins, Z, at least 2; spread, in widths of a bin, 0.75 there.

    >>> bins = Histogram(-1.0, 1.0, 5)
    >>> bins.centers().tolist()
    [-1.0, -0.5, 0.0, 0.5, 1.0]
    >>> round(float(bins.center_of_mass(bins.project(jnp.array(0.1)))), 2)
    0.1
    """

    low: float
    high: float
    num_bins: int
    spread: float = 0.75

    def centers(self) -> Array:
        """Return the value that each bin stands for, [Z]."""
        return self._support().atoms()

    def project(self, value: Array) -> Array:
        """Return the probabilities [..., Z] of values [...]; those out of range are as the nearest bound.

        Their mean is the value again, but for 1e-5 of a bin's width; within four widths of a bound it lies nearer to
        the middle, by up to half a width.
        """
        edges = self.low + self._width() * (jnp.arange(self.num_bins + 1) - 0.5)
        value = jnp.clip(value, self.low, self.high)[..., None]
        below = jax.lax.erf((edges - value) / (np.sqrt(2.0) * self.spread * self._width()))
        return (below[..., 1:] - below[..., :-1]) / (below[..., -1:] - below[..., :1])

    def center_of_mass(self, probs: Array) -> Array:
        """Return the mean [...] of probabilities [..., Z]."""
        return self._support().expectation(probs)

    def mean(self, logits: Array) -> Array:
        """Return the value [...] that logits [..., Z] stand for."""
        return self._support().mean(logits)

    def cross_entropy(self, logits: Array, value: Array) -> Array:
        """Return -sum_i p_i(v) log softmax_i(logits) [...], in nats; least where the softmax is `project(value)`."""
        return categorical.cross_entropy(self.project(value), logits)

    def outside(self, value: Array) -> Array:
        """Return whether values [...] lie out of range, and are learnt as the nearest bound."""
        return (value < self.low) | (value > self.high)

    def _support(self) -> categorical.Support:
        return categorical.Support(self.low, self.high, self.num_bins)

    def _width(self) -> float:
        return self._support().width()
