"""Gossip: what a round keeps, how fast workers come together, and what crosses devices for it."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from podium import gossip
from podium.devices import make_mesh

COLLECTIVES = r"= .*?\s(all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("


def mixed(graph: Any, num_workers: int, num_devices: int) -> Any:
    """Return `(trees [W, ...], number) -> trees` over so many devices."""
    mesh = make_mesh(jax.devices()[:num_devices], "env")
    rounds = gossip.neighbours(graph, num_workers)
    share = lambda trees, number: gossip.mix(trees, rounds, number, num_devices, "env")
    return jax.jit(jax.shard_map(share, mesh=mesh, in_specs=(P("env"), P()), out_specs=P("env"), check_vma=False))


def matrix(graph: Any, num_workers: int, number: int) -> np.ndarray:
    """Return what a round does, written down: the row of a worker says whose numbers it takes the mean of."""
    rounds = gossip.neighbours(graph, num_workers)
    rows = np.zeros((num_workers, num_workers))
    for worker in range(num_workers):
        heard = {worker, *((worker + offset) % num_workers for offset in rounds[number % len(rounds)])}
        rows[worker, list(heard)] = 1 / len(heard)
    return rows


@pytest.mark.parametrize("graph", ["ring", "exponential"])
@pytest.mark.parametrize(("workers", "devices"), [(2, 2), (8, 8), (8, 2), (6, 2), (12, 4), (5, 1), (8, 1)])
def test_a_round_is_its_matrix_and_keeps_the_mean(graph: Any, workers: int, devices: int) -> None:
    rng = np.random.default_rng(0)
    tree = {
        "wide": rng.normal(size=(workers, 3, 2)).astype(np.float32),
        "one": rng.normal(size=workers).astype(np.float32),
        "half": jnp.asarray(rng.normal(size=(workers, 4)), jnp.bfloat16),
        "count": np.arange(workers),
    }
    step = mixed(graph, workers, devices)
    for number in range(4):
        after = step(tree, number)
        rows = matrix(graph, workers, number)
        np.testing.assert_allclose(rows.sum(0), 1)  # As much is heard of every worker: the mean stays.
        for name in ("wide", "one"):
            np.testing.assert_allclose(after[name], np.einsum("ij,j...->i...", rows, tree[name]), atol=1e-6)
        np.testing.assert_allclose(
            np.asarray(after["half"], np.float32), rows @ np.asarray(tree["half"], np.float32), atol=0.03
        )
        np.testing.assert_array_equal(after["count"], tree["count"])
        np.testing.assert_allclose(np.mean(after["wide"], 0), np.mean(tree["wide"], 0), atol=5e-7)
        tree = after


def test_on_a_ring_of_eight_distances_shrink_by_the_second_eigenvalue() -> None:
    step, ring = mixed("ring", 8, 8), 2 * np.pi * np.arange(8) / 8
    x = np.stack([np.cos(ring), np.sin(ring)], 1).astype(np.float32)  # The slowest to go: once around the ring.
    apart = [np.linalg.norm(x)]
    for number in range(6):
        x = step(x, number)
        apart.append(np.linalg.norm(x))
    np.testing.assert_allclose(np.divide(apart[1:], apart[:-1]), 0.804738, atol=5e-7)
    assert (1 + 2 * np.cos(np.pi / 4)) / 3 == pytest.approx(0.804738, abs=5e-7)


@pytest.mark.parametrize(("graph", "workers", "rounds"), [("exponential", 8, 3), ("exponential", 4, 2), ("ring", 2, 1)])
def test_so_many_rounds_give_the_mean(graph: Any, workers: int, rounds: int) -> None:
    x = np.random.default_rng(0).uniform(-0.1, 0.1, (workers, 50)).astype(np.float32)
    expected = x.astype(np.float64).mean(0)
    step = mixed(graph, workers, workers)
    for number in range(rounds):
        assert number == 0 or np.abs(np.asarray(x) - expected).max() > 1e-3
        x = step(x, number)
    np.testing.assert_allclose(np.asarray(x, np.float64), np.broadcast_to(expected, x.shape), rtol=0, atol=2.5e-8)


@pytest.mark.parametrize(
    ("graph", "workers", "devices", "permutes"),
    [("ring", 8, 8, 2), ("ring", 8, 2, 2), ("ring", 2, 2, 1), ("exponential", 8, 8, 3), ("ring", 8, 1, 0)],
)
def test_only_permutes_cross_devices(graph: Any, workers: int, devices: int, permutes: int) -> None:
    tree = {"a": jnp.ones((workers, 3)), "b": jnp.ones((workers, 2, 2))}
    text = mixed(graph, workers, devices).lower(tree, 0).compile().as_text()
    assert re.findall(COLLECTIVES, text) == ["collective-permute"] * permutes


def test_what_a_device_receives_is_counted() -> None:
    count = partial(gossip.received, num_workers=8)
    assert [count(offset, num_devices=8) for offset in (1, 7, 4)] == [1, 1, 1]
    assert [count(offset, num_devices=2) for offset in (1, 7, 2, 4)] == [1, 1, 2, 4]
    assert [count(offset, num_devices=1) for offset in (1, 7, 4)] == [0, 0, 0]
