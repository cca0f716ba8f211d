"""Policies of actions in [-1, 1], and critics of observations and such actions.

Layers are initialised as LeCun's (uniform), as Brax does: orthogonal weights of several critics at once would be a
batched QR, which deadlocks XLA's pool of CPU threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from podium.networks import (
    ROWS,
    Network,
    Unroll,
    Wanted,
    apply_linear,
    apply_value,
    network_seeing,
    shape_of,
    sum_once,
)
from podium.ops.distributions import TanhNormal
from podium.ops.histogram import Histogram
from podium.ranges import check_choice, check_value
from podium.seen import world_of
from podium.torsos import ACTIVATIONS, DTYPES, MLP, apply_module, check_sizes, flatten_obs, obs_width, part_of_obs
from podium.types import Array, EnvSpec, Key, PyTree

LOG_STD = (-5.0, 2.0)
"""Bounds of log standard deviations; a network's output is squashed between them, so that its gradient never ends."""


def gaussian_policy(
    hidden_sizes: Sequence[int] = (256, 256),
    activation: str = "relu",
    dtype: str = "float32",
    layer_norm: bool = False,
    log_std: float = sum(LOG_STD) / 2,
) -> Network:
    """Make a stochastic policy, whose mean and deviation are linear heads of one MLP.

    Args:
      hidden_sizes: units of each hidden layer.
      activation: one of `podium.torsos.ACTIVATIONS`.
      dtype: that hidden layers compute in, "float32" or "bfloat16"; heads compute in float32.
      layer_norm: whether hidden layers are normalised.
      log_std: about which log standard deviations begin, within `LOG_STD`.

    Returns:
      a `Network` without memory, whose output is `TanhNormal` of [..., A]; for actions that are a vector (A,).

    Raises:
      ValueError: for an unknown name, or sizes that are not positive.
    """
    mlp = _mlp(hidden_sizes, activation, dtype, layer_norm)
    low, high = LOG_STD

    def init(key: Key, spec: EnvSpec) -> PyTree:
        torso_key, mean_key, std_key = jax.random.split(key, 3)
        (size,) = spec.action.shape
        std = _linear(std_key, mlp.hidden_sizes[-1], size)
        return {
            "torso": mlp.init(torso_key, jnp.zeros((1, obs_width(spec)))),
            "mean": _linear(mean_key, mlp.hidden_sizes[-1], size),
            "log_std": {
                **std,
                "bias": std["bias"] + np.arctanh(2.0 * (log_std - low) / (high - low) - 1.0, dtype=np.float32),
            },
        }

    def unroll(params: PyTree, memory: PyTree, obs: PyTree, first: Array) -> TanhNormal:
        x = _features(mlp, params["torso"], obs, first.ndim)
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
        inputs = _side_by_side(params["torso"], *obs)
        # A copy for each critic: of what they share XLA makes one product, and turns what comes of it about.
        inputs = jnp.broadcast_to(inputs, (len(params["value"]["kernel"]), *inputs.shape))

        def one(params: PyTree, inputs: Array) -> Array:
            x = apply_module(mlp, params["torso"], inputs).astype(jnp.float32)
            return apply_value(params["value"], x)

        return jax.vmap(one)(params, inputs)

    return _network(init, unroll)


def seeing(policy: Network, critic: Network, actor_obs: str, critic_obs: str) -> tuple[Network, Network]:
    """Return a policy and a critic that each see one part of every observation, and nothing of the others.

    Of a `podium.types.Seen` that is (a part of) the `view` for the policy, and for the critic of the `world` where
    there is one.

    Args:
      policy: of observations.
      critic: of pairs `(obs, action)`.
      actor_obs: name of the policy's part of observations that are a dictionary; empty for all of them.
      critic_obs: likewise of the critic's.

    Returns:
      both; their `init` raises ValueError where there is no such part, see `podium.torsos.part_of_spec`.

    Raises:
      ValueError: one of them has memory.
    """
    for name, network in {"policy": policy, "critic": critic}.items():
        if network.recurrent:
            raise ValueError(f"{name} has memory, but single steps are learnt from; pass one without, or use ppo.")
    part_of_pair = lambda pair, name, of: (part_of_obs(pair[0], name, of), pair[1])
    sees = network_seeing(critic, critic_obs, "critic_obs", world_of, part_of_pair)
    return network_seeing(policy, actor_obs, "actor_obs"), sees


STOCHASTIC = Wanted(
    f"a TanhNormal of actions [{ROWS}, A], as continuous.gaussian_policy does",
    lambda output, spec: isinstance(output, TanhNormal) and shape_of(output.mean) == (ROWS, *spec.action.shape),
)
"""What agents need of a policy that explores by itself."""

DETERMINISTIC = Wanted(
    f"actions [{ROWS}, A], as continuous.deterministic_policy does",
    lambda output, spec: shape_of(output) == (ROWS, *spec.action.shape),
)
"""What agents need of a policy that they add noise to."""

ENSEMBLE = Wanted(
    f"values [E, {ROWS}], as continuous.critic_ensemble does",
    lambda output, spec: len(shape_of(output)) == 2 and shape_of(output)[1] == ROWS,
    with_action=True,
)
"""What agents need of critics, the smallest value of which counts."""


class Judgement(NamedTuple):
    """Output of `predictive_critic`, of states and actions: `logits` [..., Z] of a histogram of values.

    And `features` [..., F], and a `prediction` [..., F + 1] of those of the next state and action, and of the reward.
    """

    logits: Array
    features: Array
    prediction: Array


JUDGEMENT = Wanted(
    "a Judgement, as continuous.predictive_critic does",
    lambda output, spec: isinstance(output, Judgement),
    with_action=True,
)
"""What agents need of a critic whose values are a histogram."""


def predictive_critic(
    histogram: Histogram,
    hidden_sizes: Sequence[int] = (512, 512),
    activation: str = "silu",
    dtype: str = "float32",
    layer_norm: bool = True,
) -> Network:
    """Make a critic whose values are a histogram, and which predicts what comes of an action in its own features.

    An MLP of observation and action side by side gives features; each of two heads, a hidden layer and a linear one,
    gives a part of a `Judgement` of these.

    Args:
      histogram: of the values, Z bins; those of a critic that has learnt nothing lie nearly all in the bin of 0.
      hidden_sizes: units of each hidden layer before the features, F the last of them.
      activation: as of `gaussian_policy`, likewise all that follow.
      dtype: that hidden layers compute in.
      layer_norm: whether hidden layers are normalised.

    Returns:
      a `Network` without memory, whose `obs` are a pair `(obs, action [..., A])` and whose output is a `Judgement`.

    Raises:
      ValueError: for an unknown name, or sizes that are not positive.
    """
    mlp = _mlp(hidden_sizes, activation, dtype, layer_norm)
    width = mlp.hidden_sizes[-1]
    hidden = _mlp((width,), activation, dtype, layer_norm)

    def init_head(key: Key, outputs: int) -> PyTree:
        hidden_key, output_key = jax.random.split(key)
        return {"hidden": hidden.init(hidden_key, jnp.zeros((1, width))), "output": _linear(output_key, width, outputs)}

    def init(key: Key, spec: EnvSpec) -> PyTree:
        torso_key, value_key, prediction_key = jax.random.split(key, 3)
        (size,) = spec.action.shape
        value = init_head(value_key, histogram.num_bins)
        value["output"]["bias"] = 40.0 * histogram.project(jnp.zeros(()))
        return {
            "torso": mlp.init(torso_key, jnp.zeros((1, obs_width(spec) + size))),
            "value": value,
            "prediction": init_head(prediction_key, width + 1),
        }

    def head(params: PyTree, x: Array) -> Array:
        return apply_linear(params["output"], apply_module(hidden, params["hidden"], x).astype(jnp.float32))

    def unroll(params: PyTree, memory: PyTree, obs: tuple[PyTree, Array], first: Array) -> Judgement:
        features = apply_module(mlp, params["torso"], _side_by_side(params["torso"], *obs)).astype(jnp.float32)
        return Judgement(head(params["value"], features), features, head(params["prediction"], features))

    return _network(init, unroll)


def _mlp(hidden_sizes: Sequence[int], activation: str, dtype: str, layer_norm: bool = False) -> MLP:
    check_choice("activation", activation, tuple(ACTIVATIONS))
    check_choice("dtype", dtype, DTYPES)
    check_sizes("hidden_sizes", hidden_sizes)
    return MLP(tuple(hidden_sizes), activation, jnp.dtype(dtype), nn.initializers.lecun_uniform(), layer_norm)


def _linear(key: Key, inputs: int, outputs: int) -> PyTree:
    kernel = nn.initializers.lecun_uniform()(key, (inputs, outputs), jnp.float32)
    return {"kernel": kernel, "bias": jnp.zeros(outputs, jnp.float32)}


def _side_by_side(params: PyTree, obs: PyTree, action: Array) -> Array:
    """Return observation and action [..., n], for a torso with these parameters."""
    width = params["params"]["Dense_0"]["kernel"].shape[-2] - action.shape[-1]
    return jnp.concatenate([flatten_obs(obs, action.ndim - 1, width), action], axis=-1)


def _features(mlp: MLP, params: PyTree, obs: PyTree, leading: int) -> Array:
    x = flatten_obs(obs, leading, params["params"]["Dense_0"]["kernel"].shape[0])
    return apply_module(mlp, params, x).astype(jnp.float32)


def _network(init: Callable[[Key, EnvSpec], PyTree], unroll: Unroll) -> Network:
    """Make a network without memory."""
    apply = lambda params, memory, obs, first: (unroll(params, memory, obs, first), memory)
    return Network(init, lambda num_envs: (), apply, sum_once(unroll))
