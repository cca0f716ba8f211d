"""Noisy layers (Fortunato et al. 2018, arXiv 1706.10295): linear layers whose weights are drawn anew for every use.

    y = (W + W_std * e_out e_in^T) x + b + b_std * e_out,   e = f(normal),  f(x) = sign(x) sqrt(|x|)      (eq. 9 to 11)

Such a layer is a dictionary of parameters that has `kernel_std` and `bias_std` beside `kernel` and `bias`. The noise is
data: `insert` puts it beside the parameters of each layer, where `add` finds it, and a network applied to parameters
without noise has its mean weights. Factorised as it is, one draw for each of many rows costs no more products than one
for all.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from podium.types import Array, Key, PyTree

_STD = ("kernel_std", "bias_std")


def init_std(inputs: int, outputs: int, std: float) -> dict[str, Array]:
    """Return what makes a linear layer noisy: deviations of `std / sqrt(inputs)`, as the paper begins (section 3.2)."""
    value = std / math.sqrt(inputs)
    return {"kernel_std": jnp.full((inputs, outputs), value), "bias_std": jnp.full(outputs, value)}


def sample(key: Key, params: PyTree) -> Array:
    """Draw the noise of all noisy layers in `params`, [n] float32: its inputs' and its outputs' of each."""
    normal = jax.random.normal(key, (sum(map(sum, _shapes(params))),))
    return jnp.sign(normal) * jnp.sqrt(jnp.abs(normal))


def insert(params: PyTree, noise: Array) -> PyTree:
    """Return `params` with noise in them.

    Args:
      params: of a network.
      noise: [n], the same for whatever the network is applied to; or [B, n], of one row each of what `Network.apply`
        is given.
    """
    shapes = iter(_shapes(params))
    start = 0

    def take(size: int) -> Array:
        nonlocal start
        start += size
        return noise[..., start - size : start]

    def put(layer: Any) -> Any:
        if not _is_noisy(layer):
            return layer
        inputs, outputs = next(shapes)
        return {**layer, "noise": {"inputs": take(inputs), "outputs": take(outputs)}}

    return jax.tree.map(put, params, is_leaf=_is_noisy)


def remove(params: PyTree) -> PyTree:
    """Return what `insert` was given, of parameters or of their gradient."""
    drop = lambda layer: {name: x for name, x in layer.items() if name != "noise"} if _is_noisy(layer) else layer
    return jax.tree.map(drop, params, is_leaf=_is_noisy)


def add(layer: Any, x: Array, outputs: Array) -> Array:
    """Return a linear layer's outputs [..., q] for inputs x [..., p] and what noise adds; as they are without noise."""
    if "noise" not in layer:
        return outputs
    noise = jax.lax.stop_gradient(layer["noise"])
    parts = layer["kernel_std"], layer["bias_std"], noise
    kernel_std, bias_std, noise = jax.tree.map(lambda a: a.astype(x.dtype), parts)
    return outputs + ((x * noise["inputs"]) @ kernel_std + bias_std) * noise["outputs"]


def mean_mask(params: PyTree) -> PyTree:
    """Mark the parameters that a network without noise depends on: a prefix of `params`, all but the deviations."""
    mark = lambda layer: {name: name not in _STD for name in layer} if _is_noisy(layer) else True
    return jax.tree.map(mark, params, is_leaf=_is_noisy)


def _is_noisy(node: Any) -> bool:
    return isinstance(node, dict) and "kernel_std" in node


def _shapes(params: PyTree) -> list[tuple[int, int]]:
    """Return the inputs and outputs of every noisy layer."""
    layers = jax.tree.leaves(params, is_leaf=_is_noisy)
    return [layer["kernel_std"].shape for layer in layers if _is_noisy(layer)]
