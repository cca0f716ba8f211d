"""Networks of flax nnx modules."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from podium.networks.network import Network
from podium.networks.summed import sum_once
from podium.types import Array, EnvSpec, Key, PyTree


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Graph:
    """What of an nnx module is no parameter: its definition, which lies among them and is no array.

    Two are equal where the environments are, of which `spec` is the digest: definitions may hold new functions each.
    """

    spec: str
    definition: Any = dataclasses.field(compare=False, repr=False)


_GRAPH = "nnx.GraphDef"
"""Its name among parameters, which is no attribute's."""


def from_nnx(make_module: Callable[[Key, EnvSpec], Any]) -> Network:
    """Make a memory-less `Network` of a flax nnx module.

    Args:
      make_module: `(key, spec) -> nnx.Module`, called as `module(obs, leading_axes)` and returning the output. It is
        split into a graph and a pytree of parameters by `init`; `nnx.jit` is never used.

    Returns:
      a `Network`, whose parameters are the module's `nnx.Param`; its `init` raises ValueError for a module that keeps
      anything else.
    """
    from flax import nnx

    def init(key: Key, spec: EnvSpec) -> PyTree:
        module = make_module(key, spec)
        graph, params = nnx.split(module)
        others = [leaf for _, leaf in nnx.to_flat_state(params) if not isinstance(leaf, nnx.Param)]
        if others:
            kinds = {type(leaf).__name__ if isinstance(leaf, nnx.Variable) else "plain arrays" for leaf in others}
            raise ValueError(
                f"{type(module).__name__} keeps {', '.join(sorted(kinds))} beside nnx.Param, which nothing would "
                "update; use LayerNorm or GroupNorm in place of BatchNorm, leave Dropout out, keep no rngs, and make "
                "constants where they are used."
            )
        return {**nnx.to_pure_dict(params), _GRAPH: _Graph(spec.sha256(), graph)}

    def unroll(params: PyTree, memory: PyTree, obs: PyTree, first: Array) -> Any:
        arrays = {name: part for name, part in params.items() if name != _GRAPH}
        return nnx.merge(params[_GRAPH].definition, arrays)(obs, first.ndim)

    def apply(params: PyTree, memory: PyTree, obs: PyTree, first: Array) -> tuple[Any, PyTree]:
        return unroll(params, memory, obs, first), memory

    return Network(init, lambda num_envs: (), apply, sum_once(unroll))
