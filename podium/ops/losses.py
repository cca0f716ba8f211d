"""Losses over rows [N] or [T, N], to be minimised: what is left when returns and advantages are given."""

from __future__ import annotations

import jax.numpy as jnp

from podium.ops.distributions import Policy
from podium.ops.statistics import masked_means
from podium.types import Array, Metrics


def actor_critic(
    policy: Policy,
    value: Array,
    action: Array,
    advantage: Array,
    target: Array,
    valid: Array | None,
    value_coef: float,
    entropy_coef: float,
    num_valid: Array | None = None,
    **others: Array,
) -> tuple[Array, Metrics]:
    """Return the loss of an actor-critic (Mnih et al. 2016, arXiv 1602.01783, section 4), and its parts as metrics.

        mean( -log pi(a) * A + value_coef * (target - V)^2 / 2 - entropy_coef * H(pi) )

    Args:
      policy: of the rows.
      value: V of the rows.
      action: what the policy drew in the rows.
      advantage: A; pass it without a gradient.
      target: of the values; pass it without a gradient.
      valid: rows that count; None for all.
      value_coef: weight of the value loss.
      entropy_coef: weight of the entropy, per nat.
      num_valid: how many rows are valid, where that is known; see `podium.ops.statistics.masked_mean`.
      others: further values of the rows, whose means are metrics.
    """
    means = masked_means(
        valid,
        num_valid,
        policy_loss=-policy.log_prob(action) * advantage,
        value_loss=0.5 * jnp.square(target - value),
        entropy=policy.entropy(),
        **others,
    )
    total = means["policy_loss"] + value_coef * means["value_loss"] - entropy_coef * means["entropy"]
    return total, {"loss": total, **means}
