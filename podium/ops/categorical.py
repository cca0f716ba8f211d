"""Values as distributions over fixed atoms: what they mean, and where a Bellman update moves them (C51)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from podium.ops.rescaling import rescale, unrescale
from podium.types import Array


class Support(NamedTuple):
    """The Z numbers, evenly spaced from `low` to `high`, that a distribution of values gives probabilities to.

    Fields: low and high, floats that may be traced, low below high; num_atoms, Z, at least 2.

    >>> support = Support(-1.0, 1.0, 5)
    >>> support.atoms().tolist()
    [-1.0, -0.5, 0.0, 0.5, 1.0]
    >>> support.project(jnp.array([0.0, 0.0, 0.0, 0.0, 1.0]), jnp.array(-0.5), jnp.array(0.75)).tolist()
    [0.0, 0.0, 0.5, 0.5, 0.0]
    """

    low: float
    high: float
    num_atoms: int

    def width(self) -> float:
        """Return the distance between two atoms."""
        return (self.high - self.low) / (self.num_atoms - 1)

    def atoms(self) -> Array:
        """Return the numbers, [Z]."""
        return self.low + self.width() * jnp.arange(self.num_atoms)

    def expectation(self, probs: Array) -> Array:
        """Return the mean [...] of probabilities [..., Z]."""
        return probs @ self.atoms()

    def mean(self, logits: Array) -> Array:
        """Return the mean [...] of the distributions that logits [..., Z] stand for."""
        return self.expectation(jax.nn.softmax(logits, axis=-1))

    def project(self, probs: Array, reward: Array, discount: Array) -> Array:
        """Return the distribution of `reward + discount * Z`, spread over the atoms (Bellemare et al. 2017, eq. 7).

            m_i = sum_j p_j max(0, 1 - |clip(reward + discount z_j, low, high) - z_i| / width)

        Each moved atom is shared by its two neighbours, so the mean is kept where nothing is clipped. The paper's
        algorithm 1 adds these shares up atom by atom; this is the same sum as a product, without a scatter.

        Args:
          probs: [..., Z], of Z.
          reward: [...].
          discount: [...], 0 where the episode terminated: all of the mass is then at the reward.

        Returns:
          [..., Z] probabilities.
        """
        moved = jnp.clip(self._moved(reward, discount), self.low, self.high)
        # Counted in atoms before anything is [..., Z, Z]: on CPU a division there costs ten times the rest.
        position = (moved - self.low) / self.width()
        share = jnp.maximum(0.0, 1.0 - jnp.abs(position[..., None, :] - jnp.arange(self.num_atoms)[:, None]))
        return jnp.einsum("...j,...ij->...i", probs, share, precision=jax.lax.Precision.HIGHEST)

    def two_hot(self, value: Array) -> Array:
        """Return probabilities [..., Z] whose mean is `value` [...]: of its two neighbours, or of the nearest end.

        >>> Support(-1.0, 1.0, 5).two_hot(jnp.array(0.125)).tolist()
        [0.0, 0.0, 0.75, 0.25, 0.0]
        """
        position = (jnp.clip(value, self.low, self.high) - self.low) / self.width()
        return jnp.maximum(0.0, 1.0 - jnp.abs(position[..., None] - jnp.arange(self.num_atoms)))

    def outside(self, probs: Array, reward: Array, discount: Array) -> Array:
        """Return how much of the mass [...] `project` finds beyond the ends, 0 to 1, and leaves at them."""
        moved = self._moved(reward, discount)
        return jnp.sum(jnp.where((moved < self.low) | (moved > self.high), probs, 0.0), axis=-1)

    def _moved(self, reward: Array, discount: Array) -> Array:
        return reward[..., None] + discount[..., None] * self.atoms()


class RescaledSupport(NamedTuple):
    """Numbers of any size as distributions over Z atoms of `rescale`d ones (Schrittwieser et al. 2020, appendix F).

    Fields: low and high, numbers before they are rescaled, floats that may be traced, low below high; num_atoms, Z.

    >>> numbers = RescaledSupport(-8.0, 8.0, 17)
    >>> logits = jnp.log(numbers.project(jnp.array([-8.0, 3.0])) + 1e-9)
    >>> [round(x, 2) for x in numbers.mean(logits).tolist()]
    [-8.0, 3.0]
    """

    low: float
    high: float
    num_atoms: int

    def project(self, value: Array) -> Array:
        """Return the probabilities [..., Z] of values [...], each of two atoms."""
        return self._support().two_hot(rescale(value))

    def mean(self, logits: Array) -> Array:
        """Return the value [...] that logits [..., Z] stand for."""
        return unrescale(self._support().mean(logits))

    def cross_entropy(self, logits: Array, value: Array) -> Array:
        """Return -sum_i p_i(v) log softmax_i(logits) [...], in nats; least where the softmax is `project(value)`."""
        return cross_entropy(self.project(value), logits)

    def outside(self, value: Array) -> Array:
        """Return whether values [...] lie out of range, and are learnt as the nearest bound."""
        return (value < self.low) | (value > self.high)

    def _support(self) -> Support:
        low, high = (rescale(jnp.asarray(x, jnp.float32)) for x in (self.low, self.high))
        return Support(low, high, self.num_atoms)  # type: ignore[arg-type]  # Traced, as they may be.


def cross_entropy(probs: Array, logits: Array) -> Array:
    """Return -sum_i p_i log softmax_i(logits) [...], in nats, of probabilities and logits [..., Z]."""
    return -jnp.sum(probs * jax.nn.log_softmax(logits, axis=-1), axis=-1)


def kl_divergence(probs: Array, logits: Array) -> Array:
    """Return KL(p || softmax(logits)) [...], in nats and 0 or more: `cross_entropy` less the entropy of p."""
    return jnp.maximum(0.0, cross_entropy(probs, logits) - jnp.sum(jax.scipy.special.entr(probs), axis=-1))
