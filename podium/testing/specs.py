"""What `check_env` and `check_host_env` say alike of what was seen in play."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from podium.contracts import broken
from podium.types import ArraySpec, DiscreteSpec, EnvSpec, is_spec


def within(spec: Any, value: Any) -> bool:
    """Return whether every value lies within the bounds of its spec, but for rounding."""
    value = np.asarray(value)
    if isinstance(spec, DiscreteSpec):
        return bool(np.all((value >= 0) & (value < spec.num_values)))
    low, high = np.asarray(spec.low, np.float64), np.asarray(spec.high, np.float64)
    largest = np.maximum(*(np.where(np.isfinite(bound), np.abs(bound), 1) for bound in (low, high)))
    slack = 1e-5 * np.maximum(1, largest)
    return bool(np.all((value >= low - slack) & (value <= high + slack)))


def check_frames(spec: EnvSpec, first: Any, before: Any, after: Any, counts: np.ndarray) -> None:
    """Raise ContractError for stacks of frames that are none.

    Args:
      spec: of the environment.
      first: observations of resets, [B, ...].
      before: what was acted on, [T, B, ...].
      after: what that led to, [T, B, ...].
      counts: [T, B] bool, which of these rows are transitions that follow.
    """
    leaves = jax.tree.leaves(spec.obs, is_leaf=is_spec)
    for leaf, *seen in zip(leaves, *(jax.tree.leaves(x) for x in (first, before, after)), strict=True):
        if not isinstance(leaf, ArraySpec) or leaf.num_frames == 1:
            continue
        width = leaf.shape[-1] // leaf.num_frames
        begun, acted_on, led_to = (np.asarray(x) for x in seen)
        if not np.array_equal(begun[..., width:], begun[..., :-width]):
            raise broken(
                spec,
                f"its first observation is no stack of one frame, but the spec says num_frames={leaf.num_frames}.",
                "Fill the stack with the first frame, as podium.envs.wrappers.frame_stack does, or leave num_frames 1.",
            )
        if not np.array_equal(acted_on[counts][..., width:], led_to[counts][..., :-width]):
            raise broken(
                spec,
                f"next_obs is not obs less its oldest frame and one more; the spec says num_frames={leaf.num_frames}.",
                "Put the newest frame last, or leave num_frames 1.",
            )
