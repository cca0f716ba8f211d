"""Noisy layers (Fortunato et al. 2018, arXiv 1706.10295): linear layers whose weights are drawn anew for every use.

    y = (W + W_std * e_out e_in^T) x + b + b_std * e_out,   e = f(normal),  f(x) = sign(x) sqrt(|x|)      (eq. 9 to 11)

Such a layer is a dictionary of parameters that has `kernel_std` and `bias_std` beside `kernel` and `bias`; a network
applied to it as it is has its mean weights. Noise is data, in two ways: `perturb` gives the weights that one draw
makes, for a minibatch; `insert` puts draws of many rows beside the parameters, where layers find them, for rows that
act. As the noise is factorised, neither makes weights for each row.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from podium.types import Array, Key, PyTree

_STD = ("kernel_std", "bias_std")


def init_std(inputs: int, outputs: int, std: float) -> dict[str, Array]:
    """Return what makes a linear layer noisy: deviations of `std / sqrt(inputs)`, as the paper begins (section 3.2)."""
    value = std / math.sqrt(inputs)
    return {"kernel_std": jnp.full((inputs, outputs), value), "bias_std": jnp.full(outputs, value)}


def in_params(params: PyTree) -> bool:
    """Tell whether there is a noisy layer in `params`."""
    return bool(_shapes(params))


def sample(key: Key, params: PyTree) -> Array:
    """Draw the noise of all noisy layers in `params`, [n] float32: its inputs' and its outputs' of each."""
    normal = jax.random.normal(key, (sum(map(sum, _shapes(params))),))
    return jnp.sign(normal) * jnp.sqrt(jnp.abs(normal))


def perturb(params: PyTree, noise: Array) -> PyTree:
    """Return `params` whose means are the weights that `noise` [n] makes; their deviations are as they were."""

    def move(layer: Any, inputs: Array, outputs: Array) -> Any:
        kernel = layer["kernel"] + layer["kernel_std"] * inputs[:, None] * outputs
        return {**layer, "kernel": kernel, "bias": layer["bias"] + layer["bias_std"] * outputs}

    return _map(move, params, noise)


def insert(params: PyTree, noise: Array) -> PyTree:
    """Return `params` beside noise [B, n]: of each row of what `Network.apply` is given, a draw of its own."""

    def put(layer: Any, inputs: Array, outputs: Array) -> Any:
        return {**layer, "noise": {"inputs": inputs, "outputs": outputs}}

    return _map(put, params, noise)


def add(layer: Any, x: Array, outputs: Array) -> Array:
    """Return a linear layer's outputs [..., q] for inputs x [..., p] and what noise adds; as they are without noise."""
    if "noise" not in layer:
        return outputs
    parts = layer["kernel_std"], layer["bias_std"], layer["noise"]
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


def _map(function: Callable[[Any, Array, Array], Any], params: PyTree, noise: Array) -> PyTree:
    """Apply a function to every noisy layer and its own part of the noise [..., n]: of its inputs, of its outputs."""
    ends = itertools.accumulate(itertools.chain(*_shapes(params)))
    parts = iter(jnp.split(noise, list(ends)[:-1], axis=-1))

    def apply(layer: Any) -> Any:
        return function(layer, next(parts), next(parts)) if _is_noisy(layer) else layer

    return jax.tree.map(apply, params, is_leaf=_is_noisy)
