"""Gradients of networks over a mesh: summed once, after an unroll, and not wherever one arises."""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from podium.networks.network import Unroll
from podium.types import Array, PyTree

_batch_mesh: contextvars.ContextVar[Mesh | None] = contextvars.ContextVar("batch_mesh", default=None)


@contextlib.contextmanager
def batch_over(mesh: Mesh | None) -> Iterator[None]:
    """While tracing, let `sum_once` know that batches lie along this mesh's first axis; None is no mesh."""
    token = _batch_mesh.set(mesh)
    try:
        yield
    finally:
        _batch_mesh.reset(token)


def units_are_split() -> bool:
    """Say whether, while tracing, units of layers may lie along a second axis of the mesh of `batch_over`."""
    mesh = _batch_mesh.get()
    return mesh is not None and len(mesh.axis_names) > 1


def sum_once(unroll: Unroll) -> Unroll:
    """Return `unroll`, whose gradient devices sum once: after it, and as one vector.

    Left to itself the partitioner sums the gradient of each parameter where it arises: in a loop over time in every
    step, and elsewhere as a list, which CPU devices meet for array by array (18 meetings a gradient step of PPO with
    two hidden layers; eight devices on two cores spent two thirds of their time there). Within `batch_over` each
    device unrolls its own part of the batch with its own copy of one flat vector of parameters; what is summed is the
    gradient of that. The mathematics is the same: `unroll` treats every element of the batch alone. Where the mesh
    does not divide the batch, or each device is alone already (in a rollout), it runs as it is. Where the mesh has a
    second axis, along which parameters may be split, they stay arrays: as one vector they would cross it.
    """
    return functools.partial(_unroll_parts, unroll)


def _unroll_parts(unroll: Unroll, params: PyTree, memory: PyTree, obs: PyTree, first: Array) -> Any:
    """Unroll as `sum_once` says. At the level of the module: what refers to a ContextVar cannot be sent."""
    mesh, axis = _batch_mesh.get(), first.ndim - 1
    if mesh is None:
        return unroll(params, memory, obs, first)
    name, *others = mesh.axis_names
    number, alone = mesh.shape[name], jax.sharding.get_abstract_mesh().manual_axes
    if number == 1 or first.shape[axis] % number or name in alone:
        return unroll(params, memory, obs, first)
    share = first.shape[axis] // number
    cut = lambda tree, axis: jax.tree.map(lambda x: jax.lax.slice_in_dim(x, 0, share, axis=axis), tree)
    part = lambda memory, obs, first: unroll(params, cut(memory, 0), cut(obs, axis), cut(first, axis))
    # What of the output lies along the batch: the axis that a smaller batch makes shorter.
    wholes, parts = jax.eval_shape(unroll, params, memory, obs, first), jax.eval_shape(part, memory, obs, first)
    lie = lambda whole, part: P(*(name if m != n else None for m, n in zip(whole.shape, part.shape, strict=True)))
    flat, restore = (params, lambda params: params) if others else _flatten(params)
    rows = P(*(None,) * axis, name)
    return jax.shard_map(
        lambda flat, *rest: unroll(restore(flat), *rest),
        mesh=mesh,
        in_specs=(P(), P(name), rows, rows),
        out_specs=jax.tree.map(lie, wholes, parts),
        axis_names={name},
        check_vma=False,
    )(flat, memory, obs, first)


def _flatten(tree: PyTree) -> tuple[PyTree, Callable[[PyTree], PyTree]]:
    """Return the arrays of `tree` with those of each type of number joined to one vector, and what undoes that."""
    leaves, structure = jax.tree.flatten(tree)
    kinds: dict[Any, list[int]] = {}
    for i, leaf in enumerate(leaves):
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            kinds.setdefault(leaf.dtype, []).append(i)
    joined = [i for numbers in kinds.values() for i in numbers]
    vectors = [jnp.concatenate([leaves[i].ravel() for i in numbers]) for numbers in kinds.values()]
    others = {i: leaf for i, leaf in enumerate(leaves) if i not in joined}

    def restore(flat: tuple[list[Array], dict[int, Array]]) -> PyTree:
        vectors, found = flat[0], dict(flat[1])
        for vector, numbers in zip(vectors, kinds.values(), strict=True):
            ends = np.cumsum([leaves[i].size for i in numbers])
            for i, piece in zip(numbers, jnp.split(vector, ends[:-1]), strict=True):
                found[i] = piece.reshape(leaves[i].shape)
        return jax.tree.unflatten(structure, [found[i] for i in range(len(leaves))])

    return (vectors, others), restore
