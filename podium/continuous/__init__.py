"""Continuous control: policies in [-1, 1]^A, critics of observations and actions, and what off-policy agents share.

What they compute with are actions in [-1, 1]; `podium.ops.bounds.Bounds` says what these are in an environment's units.
"""

from podium.continuous.networks import (
    DETERMINISTIC,
    ENSEMBLE,
    JUDGEMENT,
    STOCHASTIC,
    Judgement,
    critic_ensemble,
    deterministic_policy,
    gaussian_policy,
    predictive_critic,
    seeing,
)
from podium.continuous.off_policy import OffPolicyConfig, Params, random_actions

__all__ = [
    "DETERMINISTIC",
    "ENSEMBLE",
    "JUDGEMENT",
    "STOCHASTIC",
    "Judgement",
    "OffPolicyConfig",
    "Params",
    "critic_ensemble",
    "deterministic_policy",
    "gaussian_policy",
    "predictive_critic",
    "random_actions",
    "seeing",
]
