"""Distributions over fixed atoms: the projection against a slow loop, rlax and identities."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podium.ops.categorical import Support, cross_entropy, kl_divergence
from podium.testing import assert_compiles_once

SUPPORT = Support(-3.0, 7.0, 21)


def drawn(seed: int, rows: int = 40, num_atoms: int = 21) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return distributions, rewards of which some lead out of the support, and discounts of which some are 0."""
    rng = np.random.default_rng(seed)
    probs = rng.dirichlet(np.full(num_atoms, 0.3), rows).astype(np.float32)
    discount = np.where(rng.random(rows) < 0.2, 0.0, rng.random(rows)).astype(np.float32)
    return probs, rng.normal(0, 4, rows).astype(np.float32), discount


def algorithm_1(support: Support, probs: np.ndarray, reward: float, discount: float) -> np.ndarray:
    """Project one distribution as Bellemare et al. 2017 write it, atom by atom."""
    width = (support.high - support.low) / (support.num_atoms - 1)
    masses = np.zeros(support.num_atoms)
    for j in range(support.num_atoms):
        moved = min(max(reward + discount * (support.low + j * width), support.low), support.high)
        b = (moved - support.low) / width
        lower, upper = int(np.floor(b)), int(np.ceil(b))
        if lower == upper:  # The paper's lines would lose what falls on an atom.
            masses[lower] += probs[j]
        else:
            masses[lower] += probs[j] * (upper - b)
            masses[upper] += probs[j] * (b - lower)
    return masses


@pytest.mark.parametrize("support", [SUPPORT, Support(-10.0, 10.0, 51), Support(0.0, 1.0, 2)])
def test_a_projection_is_algorithm_1(support: Support) -> None:
    probs, reward, discount = drawn(0, num_atoms=support.num_atoms)
    expected = [algorithm_1(support, *row) for row in zip(probs, reward, discount, strict=True)]
    np.testing.assert_allclose(support.project(probs, reward, discount), expected, atol=1e-5)


def test_a_projection_is_that_of_rlax(rlax: Any) -> None:
    probs, reward, discount = drawn(1)
    atoms = SUPPORT.atoms()
    moved = reward[:, None] + discount[:, None] * atoms
    expected = jax.vmap(rlax.categorical_l2_project, (0, 0, None))(moved, probs, atoms)
    np.testing.assert_allclose(SUPPORT.project(probs, reward, discount), expected, atol=1e-5)


def test_mass_is_one_and_the_mean_is_kept_inside_the_support() -> None:
    probs, reward, discount = drawn(2)
    projected = SUPPORT.project(probs, reward, discount)
    np.testing.assert_allclose(projected.sum(-1), 1.0, atol=1e-5)
    assert (projected >= 0).all()
    inside = 0.2 * reward, 0.4 * discount
    np.testing.assert_allclose(
        SUPPORT.expectation(SUPPORT.project(probs, *inside)),
        inside[0] + inside[1] * SUPPORT.expectation(probs),
        atol=1e-4,
    )


def test_a_termination_leaves_the_reward_alone() -> None:
    """Width 0.5: 1.5 is the atom 9; 1.75 lies between 9 and 10; what is out of range is the nearest end."""
    probs = drawn(3, 4)[0]
    projected = SUPPORT.project(probs, jnp.array([1.5, 1.75, 100.0, -100.0]), jnp.zeros(4))
    expected = np.zeros((4, 21))
    expected[0, 9] = expected[2, 20] = expected[3, 0] = 1.0
    expected[1, 9] = expected[1, 10] = 0.5
    np.testing.assert_allclose(projected, expected, atol=1e-6)
    outside = SUPPORT.outside(probs, jnp.array([1.5, 1.75, 100.0, -100.0]), jnp.zeros(4))
    np.testing.assert_allclose(outside, [0, 0, 1, 1], atol=1e-5)


def test_a_mean_is_that_of_the_softmax() -> None:
    probs = drawn(4)[0]
    np.testing.assert_allclose(SUPPORT.mean(jnp.log(probs + 1e-30)), (probs * SUPPORT.atoms()).sum(-1), atol=1e-4)
    np.testing.assert_allclose(SUPPORT.mean(jnp.zeros((2, 3, 21))), np.full((2, 3), 2.0), atol=1e-6)


def test_the_divergence_is_0_at_the_target_and_has_the_cross_entropys_gradient() -> None:
    probs = drawn(5)[0]
    np.testing.assert_allclose(kl_divergence(probs, jnp.log(probs + 1e-30)), 0.0, atol=1e-5)
    logits = jax.random.normal(jax.random.key(0), probs.shape)
    expected = (probs * (np.log(probs + 1e-30) - np.asarray(jax.nn.log_softmax(logits)))).sum(-1)
    np.testing.assert_allclose(kl_divergence(probs, logits), expected, rtol=1e-4)
    gradients = [
        jax.grad(lambda x, function=function: function(probs, x).sum())(logits)
        for function in (cross_entropy, kl_divergence)
    ]
    np.testing.assert_allclose(*gradients, atol=1e-6)
    np.testing.assert_allclose(gradients[0], jax.nn.softmax(logits) - probs, atol=1e-6)


def test_it_is_compiled_once_and_the_same_in_batches() -> None:
    rows = drawn(6)
    np.testing.assert_allclose(jax.vmap(SUPPORT.project)(*rows), SUPPORT.project(*rows), atol=1e-7)
    assert_compiles_once(jax.jit(SUPPORT.project), rows)
