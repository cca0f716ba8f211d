"""Continuous control: policies in [-1, 1]^A, an ensemble of critics of observations and actions, and what acting needs.

What they compute with are actions in [-1, 1]; `podium.ops.bounds.Bounds` says what these are in an environment's units.
Layers are initialised as LeCun's (uniform), as Brax does: orthogonal weights of several critics at once would be a
batched QR, which deadlocks XLA's pool of CPU threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from podium.networks import Network, Unroll, apply_linear, apply_value, sum_once
from podium.ops.bounds import Bounds
from podium.ops.distributions import TanhNormal
from podium.ops.statistics import RunningStats
from podium.ranges import check_choice, check_value
from podium.torsos import ACTIVATIONS, DTYPES, MLP, apply_module, check_sizes, flatten_obs, obs_width
from podium.types import Array, EnvSpec, Key, PyTree

LOG_STD = (-5.0, 2.0)
"""Bounds of log standard deviations; a network's output is squashed between them, so that its gradient never ends."""


class Params(NamedTuple):
    """What acting needs: the policy, bounds, statistics if observations are normalised, whether actions are random."""

    policy: PyTree
    bounds: Bounds
    obs_stats: RunningStats | None
    random: Array


def random_actions(keys: Key, bounds: Bounds) -> Array:
    """Return actions [B, A] that are uniform in [-1, 1], one key each."""
    return jax.vmap(lambda key: jax.random.uniform(key, bounds.low.shape, minval=-1.0))(keys)


def gaussian_policy(
    hidden_sizes: Sequence[int] = (256, 256), activation: str = "relu", dtype: str = "float32"
) -> Network:
    """Make a stochastic policy, whose mean and deviation are linear heads of one MLP.

    Args:
      hidden_sizes: units of each hidden layer.
      activation: one of `podium.torsos.ACTIVATIONS`.
      dtype: that hidden layers compute in, "float32" or "bfloat16"; heads compute in float32.

    Returns:
      a `Network` without memory, whose output is `TanhNormal` of [..., A]; for actions that are a vector (A,).

    Raises:
      ValueError: for an unknown name, or sizes that are not positive.
    """
    mlp = _mlp(hidden_sizes, activation, dtype)

    def init(key: Key, spec: EnvSpec) -> PyTree:
        torso_key, mean_key, std_key = jax.random.split(key, 3)
        (size,) = spec.action.shape
        return {
            "torso": mlp.init(torso_key, jnp.zeros((1, obs_width(spec)))),
            "mean": _linear(mean_key, mlp.hidden_sizes[-1], size),
            "log_std": _linear(std_key, mlp.hidden_sizes[-1], size),
        }

    def unroll(params: PyTree, memory: PyTree, obs: PyTree, first: Array) -> TanhNormal:
        x = _features(mlp, params["torso"], obs, first.ndim)
        low, high = LOG_STD
        log_std = low + 0.5 * (high - low) * (1.0 + jnp.tanh(apply_linear(params["log_std"], x)))
        return TanhNormal(apply_linear(params["mean"], x), log_std)

    def policy_mask(params: PyTree) -> PyTree:
        return {name: name != "log_std" for name in params}

    return _network(init, unroll)._replace(policy_mask=policy_mask)


def deterministic_policy(
    hidden_sizes: Sequence[int] = (256, 256), activation: str = "relu", dtype: str = "float32"
) -> Network:
    """Make a policy whose output is an action, [..., A] in [-1, 1] by tanh; else as `gaussian_policy`."""
    mlp = _mlp(hidden_sizes, activation, dtype)

    def init(key: Key, spec: EnvSpec) -> PyTree:
        torso_key, mean_key = jax.random.split(key)
        (size,) = spec.action.shape
        torso = mlp.init(torso_key, jnp.zeros((1, obs_width(spec))))
        return {"torso": torso, "mean": _linear(mean_key, mlp.hidden_sizes[-1], size)}

    def unroll(params: PyTree, memory: PyTree, obs: PyTree, first: Array) -> Array:
        return jnp.tanh(apply_linear(params["mean"], _features(mlp, params["torso"], obs, first.ndim)))

    return _network(init, unroll)


def critic_ensemble(
    num_critics: int = 2, hidden_sizes: Sequence[int] = (256, 256), activation: str = "relu", dtype: str = "float32"
) -> Network:
    """Make E critics alike, each an MLP of its own of observation and action side by side, computed together.

    Args:
      num_critics: E, 1 or more.
      hidden_sizes: as of `gaussian_policy`, likewise all that follow.
      activation: one of `podium.torsos.ACTIVATIONS`.
      dtype: that hidden layers compute in.

    Returns:
      a `Network` without memory, whose `obs` are a pair `(obs, action [..., A])` and whose output is values [E, ...].

    Raises:
      ValueError: for an unknown name, or sizes that are not positive.
    """
    check_value("num_critics", num_critics, "counts", "2 is usual")
    mlp = _mlp(hidden_sizes, activation, dtype)

    def init(key: Key, spec: EnvSpec) -> PyTree:
        (size,) = spec.action.shape

        def one(key: Key) -> PyTree:
            torso_key, value_key = jax.random.split(key)
            torso = mlp.init(torso_key, jnp.zeros((1, obs_width(spec) + size)))
            return {"torso": torso, "value": _linear(value_key, mlp.hidden_sizes[-1], 1)}

        return jax.vmap(one)(jax.random.split(key, num_critics))

    def unroll(params: PyTree, memory: PyTree, obs: tuple[PyTree, Array], first: Array) -> Array:
        seen, action = obs
        width = params["torso"]["params"]["Dense_0"]["kernel"].shape[-2] - action.shape[-1]
        inputs = jnp.concatenate([flatten_obs(seen, first.ndim, width), action], axis=-1)

        def one(params: PyTree) -> Array:
            x = apply_module(mlp, params["torso"], inputs).astype(jnp.float32)
            return apply_value(params["value"], x)

        return jax.vmap(one)(params)

    return _network(init, unroll)


def _mlp(hidden_sizes: Sequence[int], activation: str, dtype: str) -> MLP:
    check_choice("activation", activation, tuple(ACTIVATIONS))
    check_choice("dtype", dtype, DTYPES)
    check_sizes("hidden_sizes", hidden_sizes)
    return MLP(tuple(hidden_sizes), activation, jnp.dtype(dtype), nn.initializers.lecun_uniform())


def _linear(key: Key, inputs: int, outputs: int) -> PyTree:
    kernel = nn.initializers.lecun_uniform()(key, (inputs, outputs), jnp.float32)
    return {"kernel": kernel, "bias": jnp.zeros(outputs, jnp.float32)}


def _features(mlp: MLP, params: PyTree, obs: PyTree, leading: int) -> Array:
    x = flatten_obs(obs, leading, params["params"]["Dense_0"]["kernel"].shape[0])
    return apply_module(mlp, params, x).astype(jnp.float32)


def _network(init: Callable[[Key, EnvSpec], PyTree], unroll: Unroll) -> Network:
    """Make a network without memory."""
    apply = lambda params, memory, obs, first: (unroll(params, memory, obs, first), memory)
    return Network(init, lambda num_envs: (), apply, sum_once(unroll))
