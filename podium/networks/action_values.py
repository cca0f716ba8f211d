"""Networks that value actions: what is wanted of one, and how it is made."""

from __future__ import annotations

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from podium import noisy
from podium.networks.brought import ROWS, Wanted, shape_of
from podium.networks.cells import Core, make_cell, with_heads
from podium.networks.heads import apply_linear, apply_value, init_linear, num_actions
from podium.networks.network import Network
from podium.seen import only_legal
from podium.torsos import make_torso, seeing
from podium.types import Array, EnvSpec, Key, PyTree


def values_of_actions(num_atoms: int | None = None) -> Wanted:
    """Return what agents need that act by the best value: values, or so many atoms of each value's distribution."""
    atoms = () if num_atoms is None else (num_atoms,)
    shape = ", ".join(map(str, (ROWS, "number of actions", *atoms)))
    return Wanted(
        f"action values [{shape}], as networks.q_network does",
        lambda output, spec: shape_of(output) == (ROWS, num_actions(spec, "action values"), *atoms),
    )


def q_network(
    hidden_sizes: Sequence[int] = (64, 64),
    activation: str = "relu",
    dueling: bool = False,
    torso: str | nn.Module = "mlp",
    dtype: str = "float32",
    memory: str = "none",
    memory_size: int = 64,
    layer_norm: bool = False,
    num_atoms: int | None = None,
    noisy_std: float | None = None,
) -> Network:
    """Make action values Q [..., A]: a torso, a memory if asked for, and a linear head.

    The head is two (Wang et al. 2016, eq. 9) when `dueling`. With `num_atoms` it gives so many numbers Z an action,
    [..., A, Z], of which a distribution of values is made; `dueling` then adds and subtracts atom by atom (Hessel et
    al. 2018, section 3). The value of an action that is not legal (`podium.types.Seen`) is the least there is; with
    atoms, that is for who makes values of them. `torso`, `dtype`, `memory` and `memory_size` as in `actor_critic`,
    `layer_norm` and `noisy_std`, which heads have too, as in `podium.torsos.make_torso`.

    Raises:
      ValueError: for an unknown name or sizes that are not positive; from `init`, for continuous actions.
    """
    encoder = seeing(make_torso(torso, hidden_sizes, activation, dtype, layer_norm, noisy_std), "", "")
    core = Core(encoder, make_cell(memory, memory_size))

    def init(key: Key, spec: EnvSpec) -> PyTree:
        number = num_actions(spec, "action values")
        torso_key, action_key, value_key = jax.random.split(key, 3)
        params, width = core.split_init(torso_key, spec)
        params["advantage"] = linear(action_key, width, number * (num_atoms or 1))
        return {**params, "value": linear(value_key, width, num_atoms or 1)} if dueling else params

    def linear(key: Key, inputs: int, outputs: int) -> PyTree:
        std = {} if noisy_std is None else noisy.init_std(inputs, outputs, noisy_std)
        return {**init_linear(key, inputs, outputs, 1.0), **std}

    def heads(params: PyTree, x: Array, obs: PyTree) -> Array:
        outputs, axis = apply_linear(params["advantage"], x), -1
        if num_atoms is not None:
            outputs, axis = outputs.reshape(*outputs.shape[:-1], -1, num_atoms), -2
        if dueling:
            value = apply_value(params["value"], x) if num_atoms is None else apply_linear(params["value"], x)
            outputs = jnp.expand_dims(value, axis) + outputs - outputs.mean(axis, keepdims=True)
        return only_legal(outputs, obs) if num_atoms is None else outputs

    return with_heads(core, init, heads)._replace(policy_mask=noisy.mean_mask)
