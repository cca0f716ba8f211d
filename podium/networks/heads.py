"""Linear heads of policies and values. How many outputs there are is read from the parameters."""

from __future__ import annotations

import flax.linen as nn
import jax.numpy as jnp

from podium import noisy, products
from podium.ops.bounds import Bounds, check_floats, check_vector
from podium.ops.distributions import Categorical, DiagGaussian, Policy, TanhNormal
from podium.seen import only_legal
from podium.types import Array, DiscreteSpec, EnvSpec, Key, PyTree

NARROW = 5
"""Up to so many outputs a linear head is computed column by column."""


def init_linear(key: Key, inputs: int, outputs: int, scale: float) -> PyTree:
    """Return parameters of a linear head: an orthogonal kernel of this gain, and zeros."""
    kernel = nn.initializers.orthogonal(scale)(key, (inputs, outputs), jnp.float32)
    return {"kernel": kernel, "bias": jnp.zeros(outputs, jnp.float32)}


def apply_linear(params: PyTree, x: Array) -> Array:
    """Return a linear head's outputs [..., n]."""
    kernel, outputs = params["kernel"], params["kernel"].shape[1]
    if 1 < outputs <= NARROW:
        # On CPU, forward and backward of a product with few columns cost 2 to 7 times those of its columns one by one
        # ([2048, 64] by [64, 2]: 217 us against 32); elsewhere the difference drowns.
        product = jnp.stack([x @ kernel[:, i] for i in range(outputs)], axis=-1)
    else:
        product = products.multiply(x, kernel)
    return noisy.add(params, x, product + params["bias"])


def apply_value(params: PyTree, x: Array) -> Array:
    """Return a linear head's single output without its last axis ([N, 1] costs more in the gradient than [N])."""
    if "noise" in params:
        return apply_linear(params, x)[..., 0]
    return x @ params["kernel"][:, 0] + params["bias"][0]


def init_policy(key: Key, inputs: int, spec: EnvSpec, squash: bool = False) -> PyTree:
    """Return parameters of a policy head: logits, or a mean and one log standard deviation an action dimension.

    With `squash`, the bounds of actions are among them; nothing learns these.

    Raises:
      ValueError: continuous actions are no vector (A,) of floats; with `squash`, they are discrete or have no bounds.
    """
    bounds = {"bounds": Bounds.of(spec, "squash=True needs", "leave squash out")} if squash else {}
    check_one_action(spec)
    if isinstance(spec.action, DiscreteSpec):
        return init_linear(key, inputs, spec.action.num_values, 0.01)
    check_vector(spec, "a policy here needs")
    size = spec.action.shape[0]
    return {**init_linear(key, inputs, size, 0.01), "log_std": jnp.zeros(size, jnp.float32), **bounds}


def check_one_action(spec: EnvSpec) -> None:
    """Raise ValueError for discrete actions that are several at once, or of which there is none."""
    if isinstance(spec.action, DiscreteSpec) and spec.action.num_values < 1:
        raise ValueError(
            f"{spec.name} has num_values={spec.action.num_values} discrete actions, and one must be taken; give its "
            "DiscreteSpec 1 or more."
        )
    if isinstance(spec.action, DiscreteSpec) and spec.action.shape:
        raise ValueError(
            f"{spec.name} takes discrete actions of shape {list(spec.action.shape)} at once, and a policy here chooses "
            "one; where these are several agents, let them share one agent, as ippo "
            "and mappo do (podium.multi)."
        )


def num_actions(spec: EnvSpec, what: str) -> int:
    """Return how many actions there are; raise ValueError where they are no one discrete choice, which `what` need."""
    check_floats(spec)
    if not isinstance(spec.action, DiscreteSpec):
        raise ValueError(f"the actions of {spec.name} are continuous; {what} need discrete ones; use ppo or sac.")
    check_one_action(spec)
    return spec.action.num_values


def apply_policy(params: PyTree, x: Array, obs: PyTree) -> Policy:
    """Return the distribution of a policy head, over the legal actions of `obs`."""
    outputs = apply_linear(params, x)
    if "log_std" not in params:
        return Categorical(only_legal(outputs, obs))
    # One for each row, so that on a mesh its gradient is summed with all others.
    log_std = jnp.broadcast_to(params["log_std"], outputs.shape)
    return TanhNormal(outputs, log_std) if "bounds" in params else DiagGaussian(outputs, log_std)
