"""Rollouts as they travel from actors to a learner, and how their environments lie, are cut and joined."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from podium.agent import Agent
from podium.rollout import RolloutState
from podium.types import Array, EnvSpec, Key, PyTree, Trajectory


class Rollout(NamedTuple):
    """T steps of E environments as they travel: the fields of a `Trajectory`, but for `obs` and `next_obs`.

    Where environments reset in the NEXT step, what follows a step is the true next observation, also at an end: then
    `obs` is [T + 1, E, ...] and `next_obs` None, so that no observation travels twice.
    """

    obs: PyTree
    action: Any
    reward: Any
    terminated: Any
    truncated: Any
    next_obs: PyTree | None
    first: Any
    extras: PyTree
    carry: PyTree
    end_carry: PyTree
    policy_version: Any
    valid: Any | None

    def trajectory(self) -> Trajectory:
        """Return the rollout with its `next_obs`."""
        if self.next_obs is not None:
            return Trajectory(*self)
        before, after = jax.tree.map(lambda x: x[:-1], self.obs), jax.tree.map(lambda x: x[1:], self.obs)
        return Trajectory(*self._replace(obs=before, next_obs=after))


class Acting(Protocol):
    """How an actor acts in environments of one kind, fused with them or on the host: functions, and what compiles them.

    Attributes:
      agent: that acts.
      env: that it acts in.
      num_envs: environments of one actor, E.
      length: steps of a rollout, T.
      on_host: whether the environments run on the CPU, outside the state of a run.
    """

    @property
    def agent(self) -> Agent: ...  # noqa: D102

    @property
    def env(self) -> Any: ...  # noqa: D102

    @property
    def num_envs(self) -> int: ...  # noqa: D102

    @property
    def length(self) -> int: ...  # noqa: D102

    @property
    def on_host(self) -> bool: ...  # noqa: D102

    @property
    def spec(self) -> EnvSpec:
        """What describes an environment."""
        ...

    def begin(self, key: Key, index: Array) -> RolloutState | tuple[()]:
        """Return where environments numbered `index` [B] stand at the start; `()` where they are outside the state."""
        ...

    def shapes(self, length: int, num_envs: int) -> Rollout:
        """Return the shapes of a rollout of so many steps and environments."""
        ...

    def compile(self, params: PyTree, device: jax.Device, keeps: bool = False) -> Callable[..., Any]:
        """Compile for a device, and return what makes actors there; see `actors.experience.MakeActor`.

        Args:
          params: shapes of the parameters that act.
          device: that acts.
          keeps: whether playing leaves where the environments stood as it was, because it may be repeated.
        """
        ...

    def in_python(self, params: PyTree, device: jax.Device) -> Callable[..., Any]:
        """Return what makes actors whose loops are Python's, to be read along."""
        ...

    def bytes_moved(self, params: PyTree, num_envs: int) -> dict[str, int]:
        """Return what goes up to the device and comes down from it in a rollout of so many environments."""
        ...


R = TypeVar("R", Rollout, Trajectory)


def map_envs(function: Callable[..., Any], *rollouts: R) -> R:
    """Map `function(axis of the environments, *leaves)` over rollouts; the version stays the first one's."""
    fields = {}
    for name in rollouts[0]._fields:
        axis = 0 if name in ("carry", "end_carry") else 1
        values = [getattr(rollout, name) for rollout in rollouts]
        fields[name] = values[0] if name == "policy_version" else jax.tree.map(partial(function, axis), *values)
    return type(rollouts[0])(**fields)


def specs_of(axis: str) -> Trajectory:
    """Return how a trajectory lies along the mesh axis that holds the environments; a prefix of its tree."""
    rows: Any = P(None, axis)
    by_env: Any = P(axis)
    once: Any = P()
    return Trajectory(*(rows,) * 8, carry=by_env, end_carry=by_env, policy_version=once, valid=rows)


def scaled(rollout: Rollout, length: int, num_envs: int) -> Rollout:
    """Return the shapes of a rollout of so many steps and environments, given those of one step of one environment."""

    def scale(axis: int, x: Any) -> jax.ShapeDtypeStruct:
        # One row more than steps stays one row more.
        lead = (num_envs,) if axis == 0 else (length + x.shape[0] - 1, num_envs)
        return jax.ShapeDtypeStruct((*lead, *x.shape[axis + 1 :]), x.dtype)

    return map_envs(scale, rollout)


def zeros(shapes: PyTree) -> Any:
    """Return zeros of these shapes."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def _cut(rollout: Rollout, low: int, high: int) -> Rollout:
    return map_envs(lambda axis, x: jax.lax.slice_in_dim(x, low, high, axis=axis), rollout)


def _join(rollouts: list[Rollout]) -> Rollout:
    versions = jnp.stack([rollout.policy_version for rollout in rollouts])
    return map_envs(lambda axis, *x: jnp.concatenate(x, axis), *rollouts)._replace(policy_version=versions.min())


cut: Callable[..., Rollout] = jax.jit(_cut, static_argnums=(1, 2))
"""`(rollout, low, high) -> Rollout` of the environments from `low` up to `high`."""

join: Callable[..., Rollout] = jax.jit(_join)
"""`(rollouts) -> Rollout` of the environments of all, in their order, with the oldest version."""
