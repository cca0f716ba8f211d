"""What `check_env` and `check_host_env` say alike of specs."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from podium.ranges import is_integer
from podium.testing.errors import ContractError
from podium.types import ArraySpec, DiscreteSpec, EnvSpec, Seen, is_spec


def broken(spec: EnvSpec, rule: str, remedy: str) -> ContractError:
    """Return the error that says which rule an environment broke, and how to mend it."""
    return ContractError(f"{spec.name}: {rule} {remedy}")


def check_spec(spec: Any) -> None:
    """Raise ContractError for a spec that no agent could use."""
    if not isinstance(spec, EnvSpec):
        raise ContractError(f"Env.spec is a {type(spec).__name__}; make it a podium.types.EnvSpec.")
    if not isinstance(spec.action, ArraySpec | DiscreteSpec):
        raise broken(spec, f"spec.action is a {type(spec.action).__name__}.", "Make it a DiscreteSpec or an ArraySpec.")
    leaves = jax.tree.leaves(spec.obs, is_leaf=is_spec)
    for leaf in leaves:
        if not is_spec(leaf):
            raise broken(spec, f"spec.obs holds a {type(leaf).__name__}.", "Use ArraySpec and DiscreteSpec only.")
    for leaf in [*leaves, spec.action]:
        if isinstance(leaf, DiscreteSpec) and leaf.num_values < 1:
            raise broken(spec, f"a DiscreteSpec has num_values={leaf.num_values}.", "It needs at least 1 value.")
        if isinstance(leaf, ArraySpec):
            _check_bounds(spec, leaf)
    if isinstance(spec.obs, Seen):
        _check_seen(spec, spec.obs)
    if spec.num_agents is not None and (isinstance(spec.num_agents, bool) or spec.num_agents < 1):
        raise broken(spec, f"spec.num_agents={spec.num_agents!r}.", "It must be an int of at least 1, or None.")
    if spec.num_agents is not None and spec.turns:
        raise broken(spec, "spec.turns is True where agents act together.", "They move in turn, or all at once.")
    limit = spec.max_episode_steps
    if limit is not None and not is_integer(limit, 1):
        raise broken(spec, f"spec.max_episode_steps={limit!r}.", "It must be an int of at least 1, or None.")


def _check_bounds(spec: EnvSpec, box: ArraySpec) -> None:
    """Raise ContractError for bounds of another shape than what they bound, or in the wrong order."""
    for name, bound in (("low", box.low), ("high", box.high)):
        try:
            np.broadcast_to(bound, box.shape)
        except ValueError:
            raise broken(
                spec,
                f"an ArraySpec of shape {list(box.shape)} has a {name} of shape {list(np.shape(bound))}.",
                "Give one number, or one for each.",
            ) from None
    if not np.all(np.asarray(box.low) <= np.asarray(box.high)):
        raise broken(spec, "an ArraySpec has a low above its high.", "Swap them.")


def _check_seen(spec: EnvSpec, seen: Seen) -> None:
    """Raise ContractError where the specs of who may do what fit no action or no player."""
    if seen.legal is not None:
        if not isinstance(spec.action, DiscreteSpec):
            raise broken(
                spec, "spec.obs.legal marks actions, but spec.action is a box.", "Leave legal None, or number them."
            )
        shape = (*spec.action.shape, spec.action.num_values)
        legal = seen.legal
        if not isinstance(legal, ArraySpec) or tuple(legal.shape) != shape or np.dtype(legal.dtype) != bool:
            found = f"{np.dtype(legal.dtype)}{list(legal.shape)}" if is_spec(legal) else type(legal).__name__
            raise broken(
                spec, f"spec.obs.legal is {found}, but there are {list(shape)} actions.", "Make it bool of that shape."
            )
    if seen.player is not None and not (
        isinstance(seen.player, DiscreteSpec) and np.dtype(seen.player.dtype) == np.int32
    ):
        raise broken(spec, "spec.obs.player is no index of a player.", "Make it a DiscreteSpec of as many as play.")


def check_agents(spec: EnvSpec, timestep: Any) -> None:
    """Raise ContractError where actions or observations do not agree with how many agents act together.

    Args:
      spec: of the environment.
      timestep: of one environment, or its shapes.
    """
    number, action = spec.num_agents, tuple(spec.action.shape)
    if number is None:
        if isinstance(spec.action, DiscreteSpec) and action:
            raise broken(
                spec,
                f"spec.action is of shape {list(action)}, but spec.num_agents is None.",
                "Say how many agents act together, or number the combinations of what one agent does.",
            )
        return
    found = {"spec.action": action}
    found |= {
        f"obs{jax.tree_util.keystr(path)}": x.shape for path, x in jax.tree_util.tree_leaves_with_path(timestep.obs)
    }
    for name, shape in found.items():
        if tuple(shape[:1]) != (number,):
            raise broken(
                spec,
                f"{name} has shape {list(shape)}, but spec.num_agents={number}.",
                f"Where {number} agents act together, all begins with an axis of so many; repeat what they share.",
            )


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
