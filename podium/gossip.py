"""Gossip: workers mix what they know with that of a few neighbours, in place of a mean over all; and that mean.

Lian et al. 2017 (arXiv 1705.09056, D-PSGD) on a ring; Assran et al. 2019 (arXiv 1811.10792) on the one-peer exponential
graph, where the worker that is listened to stands 1, 2, 4, ... places further from round to round. What is mixed by is
a circulant matrix, so every round keeps the mean, and push-sum's weights (which are for graphs that do not) stay 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from podium.types import Array, PyTree

Graph = Literal["ring", "exponential"]


def neighbours(graph: Graph, num_workers: int) -> list[tuple[int, ...]]:
    """Return whom a worker listens to, round after round: how many places further each stands, modulo W.

    >>> neighbours("ring", 8), neighbours("exponential", 8)
    ([(1, 7)], [(1,), (2,), (4,)])

    Args:
      graph: "ring", both neighbours in every round; "exponential", one worker a round. Rounds repeat.
      num_workers: W, 2 or more. Where it is a power of two, log2(W) exponential rounds give the mean exactly.
    """
    if graph == "ring":
        return [tuple(sorted({1, num_workers - 1}))]  # Two workers have one neighbour each.
    return [(2**k,) for k in range((num_workers - 1).bit_length())]


def is_mixed(x: Any) -> bool:
    """Say whether an array, or its shape, is of numbers with a fraction, which workers mix."""
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def mean(workers: PyTree) -> PyTree:
    """Return the mean of what workers know, [W, ...]; what is no number with a fraction is the first worker's."""
    return jax.tree.map(lambda x: jnp.mean(x, axis=0) if is_mixed(x) else x[0], workers)


def distance(workers: PyTree, mean: PyTree) -> Array:
    """Return the root mean square of what lies between what workers know, [W, ...], and their mean."""
    pairs = [(x, y) for x, y in zip(jax.tree.leaves(workers), jax.tree.leaves(mean), strict=True) if is_mixed(x)]
    return jnp.sqrt(sum((jnp.sum(jnp.square(x - y)) for x, y in pairs), jnp.zeros(())) / sum(x.size for x, _ in pairs))


def mix(trees: PyTree, rounds: Sequence[tuple[int, ...]], number: Array, num_devices: int, axis: str) -> PyTree:
    """Return every worker's mean of itself and of those it listens to; inside `jax.shard_map` over the workers.

    Args:
      trees: [W / D, ...], of the workers of this device; what is no number with a fraction stays each worker's own.
      rounds: as `neighbours` gives them.
      number: int scalar, of this round, from 0.
      num_devices: D.
      axis: name of the mesh axis along which workers lie.
    """
    leaves, structure = jax.tree.flatten(trees)
    mixed = [i for i, x in enumerate(leaves) if is_mixed(x)]
    workers = leaves[0].shape[0]
    # All that has one dtype travels as one array: what a round costs is its messages.
    for dtype in dict.fromkeys(leaves[i].dtype for i in mixed):
        group = [i for i in mixed if leaves[i].dtype == dtype]
        flat = jnp.concatenate([leaves[i].reshape(workers, -1) for i in group], axis=1)
        branches = [partial(_listen, offsets, num_devices, axis) for offsets in rounds]
        flat = jax.lax.switch(number % len(rounds), branches, flat) if len(rounds) > 1 else branches[0](flat)
        start = 0
        for i in group:
            size = leaves[i][0].size
            leaves[i] = flat[:, start : start + size].reshape(leaves[i].shape)
            start += size
    return jax.tree.unflatten(structure, leaves)


def received(offset: int, num_workers: int, num_devices: int) -> int:
    """Return how many workers' numbers a device gets from others as its own listen to those `offset` places further."""
    return sum(part for _, part, device in _parts(offset, num_workers // num_devices) if device % num_devices)


def _listen(offsets: Sequence[int], num_devices: int, axis: str, own: Array) -> Array:
    heard = (_further(own, offset, num_devices, axis) for offset in offsets)
    return sum(heard, own) / (1 + len(offsets))


def _further(own: Array, offset: int, num_devices: int, axis: str) -> Array:
    """Return [W / D, ...], what those `offset` places further have."""
    found: list[Any] = []
    for low, size, device in _parts(offset, own.shape[0]):
        part = own[low : low + size]
        if device % num_devices:
            part = jax.lax.ppermute(part, axis, [((i + device) % num_devices, i) for i in range(num_devices)])
        found.append(part)
    return found[0] if len(found) == 1 else jnp.concatenate(found)


def _parts(offset: int, share: int) -> list[tuple[int, int, int]]:
    """Return where `share` neighbouring workers lie that stand further: (first of a device, how many, devices away)."""
    device, first = divmod(offset, share)
    parts = [(first, share - first, device), (0, first, device + 1)]
    return [part for part in parts if part[1]]
