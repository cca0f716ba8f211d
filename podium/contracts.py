"""What shapes tell of environments and agents: whether they keep their contracts, as far as nothing need run.

It is asked wherever they become parts of a program (`podium.env.traced_once`, `podium.agent.acted` and so on), so that
who breaks a rule is told which; `podium.testing` asks for this and all that has to be played.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podium.ranges import is_integer
from podium.types import Array, ArraySpec, DiscreteSpec, EnvSpec, PyTree, Seen, TimeStep, is_spec


class ContractError(ValueError):
    """A contract of podium is broken; the message names the rule and the remedy."""


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
    if np.any(np.isnan(box.low)) or np.any(np.isnan(box.high)):
        raise broken(spec, "an ArraySpec has NaN for a bound.", "Leave low or high out where there is none.")
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


def trace(spec: EnvSpec, name: str, function: Callable, *args: Any) -> Any:
    """Return what `reset` or `step` gives; raises ContractError where jax cannot trace it."""
    try:
        return function(*args)
    except (TypeError, jax.errors.JAXIndexError) as error:
        raise broken(
            spec,
            f"{name} cannot be traced by jax.",
            "Branch on values by jnp.where or jax.lax.cond instead of `if`, compute with jax.numpy instead of numpy, "
            f"and return arrays only. jax said: {str(error).splitlines()[0]}",
        ) from error


def pair(spec: EnvSpec, name: str, result: Any) -> tuple[PyTree, TimeStep]:
    """Return what `reset` or `step` gave; raises ContractError where it is no pair of a state and a TimeStep."""
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], TimeStep)):
        raise broken(
            spec,
            f"{name} does not return a pair (state, TimeStep).",
            f"Make the TimeStep with podium.env.{'restart' if name == 'reset' else 'transition'}.",
        )
    return result


def check_timestep(spec: EnvSpec, name: str, timestep: TimeStep) -> None:
    """Raise ContractError where a TimeStep of one environment, or its shapes, is not what the spec says."""
    for field in ("obs", "next_obs"):
        obs = getattr(timestep, field)
        found: Any = jax.tree.structure(obs)
        expected: Any = jax.tree.structure(spec.obs, is_leaf=is_spec)
        if found != expected:
            raise broken(
                spec, f"{name} returns {field} of structure {found}.", f"Make it that of spec.obs: {expected}."
            )
        for part, leaf in zip(jax.tree.leaves(spec.obs, is_leaf=is_spec), jax.tree.leaves(obs), strict=True):
            if leaf.shape != tuple(part.shape) or leaf.dtype != np.dtype(part.dtype):
                raise broken(
                    spec,
                    f"{name} returns {field} {leaf.dtype}{list(leaf.shape)}, but spec.obs says "
                    f"{np.dtype(part.dtype)}{list(part.shape)}.",
                    "Correct the spec, or cast and reshape the observation.",
                )
    axes = () if spec.num_agents is None else (spec.num_agents,)
    _check_shape(spec, name, timestep, "reward", np.float32, axes)
    check_agents(spec, timestep)
    for field, dtype in {"terminated": np.bool_, "truncated": np.bool_, "turn": np.float32}.items():
        _check_shape(spec, name, timestep, field, dtype, ())
    _check_shape(spec, name, timestep, "valid", np.bool_, (), axes)
    if spec.turns != (timestep.turn is not None):
        raise broken(
            spec,
            f"{name} returns turn={timestep.turn}, but spec.turns={spec.turns}.",
            "Give podium.env.restart and transition a turn where two move in turn, and nowhere else.",
        )
    if not isinstance(timestep.info, dict):
        raise broken(spec, f"{name} returns info as {type(timestep.info).__name__}.", "It must be a dict of arrays.")


def _check_shape(
    spec: EnvSpec, name: str, timestep: TimeStep, field: str, dtype: Any, *shapes: tuple[int, ...]
) -> None:
    """Raise ContractError unless a field is an array of this dtype and one of these shapes; some may be None."""
    leaf = getattr(timestep, field)
    if leaf is None and field in TimeStep._field_defaults:
        return
    if not hasattr(leaf, "shape") or leaf.shape not in shapes or leaf.dtype != np.dtype(dtype):
        found = f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "shape") else type(leaf).__name__
        rule = " or ".join(f"{list(shape)}, one an agent" if shape else "a scalar" for shape in dict.fromkeys(shapes))
        raise broken(
            spec,
            f"{name} returns {field} as {found}.",
            f"It must be {np.dtype(dtype)}, {rule}; podium.env.restart and transition cast it.",
        )


def same_shapes(spec: EnvSpec, what: str, at_reset: PyTree, at_step: PyTree, weak: bool = True) -> None:
    """Raise ContractError where a step returns another structure, shape or dtype than a reset, or what was before it.

    Args:
      spec: of the environment.
      what: the name of it.
      at_reset: what `reset` returned; shapes will do.
      at_step: what `step` returned.
      weak: whether it is an error, too, that one of them is a Python number's and the other none's.
    """
    before, after = (jax.tree_util.tree_flatten_with_path(tree)[0] for tree in (at_reset, at_step))
    names_before, names_after = ([jax.tree_util.keystr(path) for path, _ in leaves] for leaves in (before, after))
    structure_before: Any = jax.tree.structure(at_reset)
    structure_after: Any = jax.tree.structure(at_step)
    if names_before != names_after or structure_before != structure_after:
        differing = sorted(set(names_before) ^ set(names_after))
        raise broken(
            spec,
            f"the {what} has another structure after step than after reset ({', '.join(differing) or 'other types'}).",
            "Return the same pytree from both; fill with zeros what has no value yet.",
        )
    for (path, x), (_, y) in zip(before, after, strict=True):
        old, new = (each if hasattr(each, "dtype") else jax.typeof(each) for each in (x, y))
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            raise broken(
                spec,
                f"{what}{jax.tree_util.keystr(path)} is {old.dtype}{list(old.shape)} after reset and "
                f"{new.dtype}{list(new.shape)} after step.",
                "jax.lax.scan needs one fixed shape and dtype; convert with jnp.asarray(value, dtype).",
            )
        if weak and getattr(old, "weak_type", False) != getattr(new, "weak_type", False):
            raise broken(
                spec,
                f"{what}{jax.tree_util.keystr(path)} is weakly typed only after {'reset' if old.weak_type else 'step'} "
                "(a Python number), which compiles every program twice.",
                f"Convert it with jnp.asarray(value, jnp.{old.dtype}).",
            )


def check_returned(who: str, name: str, value: Any, kind: type) -> None:
    """Raise ContractError where a function of an agent returned something else than a `kind`."""
    if not isinstance(value, kind):
        raise ContractError(
            f"{who}: {name} returns {type(value).__name__}. It must return podium.agent.{kind.__name__}."
        )


def check_rows(who: str, name: str, tree: PyTree, *leading: int) -> None:
    """Raise ContractError where an array of `tree`, or its shape, does not begin with the axes `leading`."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if leaf.shape[: len(leading)] != leading:
            axes = "[T, B]" if len(leading) == 2 else "[B]"
            raise ContractError(
                f"{who}: {name}{jax.tree_util.keystr(path)} has shape {leaf.shape}. Its leading axes must be "
                f"{leading}: {axes}."
            )


def check_actions(whose: str, spec: EnvSpec, action: Array, *batch: int) -> None:
    """Raise ContractError for actions [*batch, ...] of another shape or kind of number than the spec says.

    Args:
      whose: where they come from, as "ppo: act returns".
      spec: of the environment.
      action: one, or one of each of a batch; its shape will do.
      batch: axes in front.
    """
    expected, given = (*batch, *spec.action.shape), jax.typeof(action)
    if given.shape != expected:
        raise ContractError(f"{whose} actions of shape {given.shape}. It must be {expected}.")
    if isinstance(spec.action, DiscreteSpec) and not jnp.issubdtype(given.dtype, jnp.integer):
        raise ContractError(f"{whose} {given.dtype} actions. Discrete actions must be integers.")
    floats = jnp.issubdtype(spec.action.dtype, jnp.floating)
    if floats and not jnp.issubdtype(given.dtype, jnp.floating):
        raise ContractError(f"{whose} {given.dtype} actions. These are {np.dtype(spec.action.dtype)}.")


def _kind(tree: PyTree) -> str:
    return "None" if tree is None else type(tree).__name__


def check_kept(who: str, name: str, before: PyTree, after: PyTree) -> None:
    """Raise ContractError where a function returns another structure, shape or dtype than it was given."""
    given: Any = jax.tree.structure(before)
    returned: Any = jax.tree.structure(after)
    if given != returned:
        raise ContractError(
            f"{who}: {name} returns {_kind(after)} of another structure than the {_kind(before)} it was given. Given "
            f"{given}, returned {returned}; they must be the same."
        )
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True):
        old, new = jax.typeof(x), jax.typeof(y)
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            raise ContractError(
                f"{who}: {name} turns {jax.tree_util.keystr(path)} from {old.dtype}{list(old.shape)} into "
                f"{new.dtype}{list(new.shape)}. A loop needs one shape and dtype throughout: cast it back."
            )


def check_pair(who: str, name: str, value: Any, second: type) -> tuple[Any, Any]:
    """Return a pair as it is; raise ContractError for what is none, or whose second is no `second`."""
    if not (isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], second)):
        raise ContractError(
            f"{who}: {name} returns something else than ({name}s, {second.__name__}). Return ({name}s, "
            f"{second.__name__}(...)), of podium.agent."
        )
    return value
