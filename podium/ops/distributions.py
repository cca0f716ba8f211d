"""Action distributions as small pytrees: sample, mode, log_prob, entropy, kl."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podium.types import Array, Key

FEW_ACTIONS = 8
"""Up to so many actions, log-probabilities are computed action by action."""

NODES = 8
"""Points of the quadrature for the entropy of `TanhNormal`."""


class Categorical(NamedTuple):
    """A distribution over `A` actions, from logits [..., A]."""

    logits: Array

    def sample(self, keys: Key) -> Array:
        """Draw int32 [B], one key an environment: the argmax of Gumbel-perturbed logits."""
        noise = jax.vmap(lambda key: jax.random.gumbel(key, self.logits.shape[-1:]))(keys)
        return jnp.argmax(self.logits + noise, axis=-1).astype(jnp.int32)

    def mode(self) -> Array:
        """Return the likeliest action, int32 [...]."""
        return jnp.argmax(self.logits, axis=-1).astype(jnp.int32)

    def log_prob(self, action: Array) -> Array:
        """Return the log-probability of `action` [...]."""
        # A comparison instead of a gather: its gradient is a product, not a scatter, and A is small.
        actions = jnp.arange(self.logits.shape[-1]).reshape(-1, *(1,) * action.ndim)
        return _sum_actions(jnp.where(action == actions, self._log_probs(), 0.0))

    def log_probs(self) -> Array:
        """Return all log-probabilities [..., A]."""
        return jnp.moveaxis(self._log_probs(), 0, -1)

    def entropy(self) -> Array:
        """Return the entropy in nats [...]."""
        log_probs = self._log_probs()
        return -_sum_actions(jnp.exp(log_probs) * log_probs)

    def kl(self, other: Categorical) -> Array:
        """Return KL(self || other) in nats [...]."""
        log_probs = self._log_probs()
        return _sum_actions(jnp.exp(log_probs) * (log_probs - other._log_probs()))

    def _log_probs(self) -> Array:
        """Return log-probabilities with the actions first, [A, ...]."""
        logits = jnp.moveaxis(self.logits, -1, 0)
        if len(logits) > FEW_ACTIONS:
            return jax.nn.log_softmax(logits, axis=0)
        shifted = logits - jax.lax.stop_gradient(functools.reduce(jnp.maximum, logits))
        return shifted - jnp.log(_sum_actions(jnp.exp(shifted)))


def _sum_actions(x: Array) -> Array:
    """Sum over the first axis; over a few actions one by one, because a reduction of a short axis does not vectorise.

    (On CPU the compiler turns the axis back into the last one: 50 us of a 1,450 us gradient step of 2048 by 2.)
    """
    return functools.reduce(jnp.add, x) if len(x) <= FEW_ACTIONS else jnp.sum(x, axis=0)


class DiagGaussian(NamedTuple):
    """Independent normal distributions: mean [..., A] and log_std that broadcasts to it. Not bounded."""

    mean: Array
    log_std: Array

    def sample(self, keys: Key) -> Array:
        """Draw [B, A], one key an environment."""
        noise = jax.vmap(lambda key: jax.random.normal(key, self.mean.shape[1:]))(keys)
        return self.mean + jnp.exp(self.log_std) * noise

    def mode(self) -> Array:
        """Return the mean [..., A]."""
        return self.mean

    def log_prob(self, action: Array) -> Array:
        """Return the joint log-density of `action` [..., A]."""
        scaled = (action - self.mean) * jnp.exp(-self.log_std)
        return jnp.sum(-0.5 * jnp.square(scaled) - self.log_std - 0.5 * np.log(2 * np.pi), axis=-1)

    def entropy(self) -> Array:
        """Return the joint entropy in nats [...]."""
        per_dimension = self.log_std + 0.5 * np.log(2 * np.pi * np.e)
        return jnp.sum(jnp.broadcast_to(per_dimension, self.mean.shape), axis=-1)

    def kl(self, other: DiagGaussian) -> Array:
        """Return KL(self || other) in nats [...]."""
        variance_ratio = jnp.exp(2 * (self.log_std - other.log_std))
        distance = jnp.square((self.mean - other.mean) * jnp.exp(-other.log_std))
        return 0.5 * jnp.sum(variance_ratio + distance - 1 - 2 * (self.log_std - other.log_std), axis=-1)


class TanhNormal(NamedTuple):
    """Independent normal distributions squashed into (-1, 1) by tanh: of an action u = tanh(x), x ~ N(mean, std).

    What it draws and weighs is x, `raw`, and not u: at the bounds u cannot tell in float32 which x it came from.
    Densities are those of u (Haarnoja et al. 2018, arXiv 1812.05905, appendix C):

        log p(u) = log N(x; mean, std) - sum_i log(1 - tanh(x_i)^2)

    Fields: mean [..., A] and log_std that broadcasts to it, both of x.
    """

    mean: Array
    log_std: Array

    def sample(self, keys: Key) -> Array:
        """Draw raw [B, A], one key an environment."""
        return DiagGaussian(self.mean, self.log_std).sample(keys)

    def mode(self) -> Array:
        """Return the raw action [..., A] that acts greedily: the mean of x, the median of u (and not its mode)."""
        return self.mean

    def squash(self, raw: Array) -> Array:
        """Return u = tanh(raw), in [-1, 1]."""
        return jnp.tanh(raw)

    def log_prob(self, raw: Array) -> Array:
        """Return the joint log-density of u = tanh(raw), where raw is [..., A]."""
        return DiagGaussian(self.mean, self.log_std).log_prob(raw) - jnp.sum(_log_slope(raw), axis=-1)

    def draw(self, noise: Array) -> tuple[Array, Array]:
        """Return u [..., A] and its log-density [...], of standard normal `noise` [..., A]; both can be differentiated.

        The density is computed from the noise itself: (x - mean) / std loses it to rounding where std is small.
        """
        raw = self.mean + jnp.exp(self.log_std) * noise
        density = -0.5 * jnp.square(noise) - self.log_std - 0.5 * np.log(2 * np.pi) - _log_slope(raw)
        return jnp.tanh(raw), jnp.sum(density, axis=-1)

    def entropy(self) -> Array:
        """Return the joint differential entropy of u in nats [...], 0.693 * A at most.

        It has no closed form: H = H(x) + E log(1 - tanh(x)^2), and the expectation is by Gauss-Hermite quadrature of
        `NODES` points, within 0.03 nats a dimension for standard deviations up to 2. No sample, and no key.
        """
        points, weights = np.polynomial.hermite_e.hermegauss(NODES)
        std = jnp.exp(self.log_std)
        slope = sum(
            float(w) * _log_slope(self.mean + float(p) * std)
            for p, w in zip(points, weights / weights.sum(), strict=True)
        )
        return DiagGaussian(self.mean, self.log_std).entropy() + jnp.sum(slope, axis=-1)

    def kl(self, other: TanhNormal) -> Array:
        """Return KL(self || other) in nats [...]: that of what is squashed, for a bijection changes none."""
        return DiagGaussian(self.mean, self.log_std).kl(DiagGaussian(other.mean, other.log_std))


Policy = Categorical | DiagGaussian | TanhNormal
"""A distribution over actions."""


def _log_slope(x: Array) -> Array:
    """Return log(1 - tanh(x)^2), the logarithm of tanh's slope, finite for every x."""
    return 2.0 * (np.log(2.0) - x - jax.nn.softplus(-2.0 * x))
