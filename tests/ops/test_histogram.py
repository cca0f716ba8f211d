"""Values as histograms: identities, and projections against SciPy's normal distribution bin by bin."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from podium.ops.histogram import Histogram
from podium.testing import assert_compiles_once

BINS = Histogram(-3.0, 7.0, 41)
WIDTH = 0.25


@pytest.mark.parametrize("bins", [BINS, Histogram(0.0, 150.0, 151), Histogram(-1.0, 1.0, 2, spread=0.3)])
def test_projections_are_those_of_a_loop_over_bins(bins: Histogram) -> None:
    values = np.linspace(bins.low - 1, bins.high + 1, 23)
    width = (bins.high - bins.low) / (bins.num_bins - 1)
    for value, found in zip(values, np.asarray(bins.project(jnp.asarray(values, jnp.float32))), strict=True):
        normal = stats.norm(np.clip(value, bins.low, bins.high), bins.spread * width)
        edges = [bins.low + (i - 0.5) * width for i in range(bins.num_bins + 1)]
        below = normal.cdf(edges)
        masses = [below[i + 1] - below[i] for i in range(bins.num_bins)]
        np.testing.assert_allclose(found, np.array(masses) / sum(masses), atol=1e-5)


def test_they_sum_to_one_and_mean_the_value_again() -> None:
    values = jnp.linspace(-2.0, 6.0, 1001).reshape(7, 143)
    probs = BINS.project(values)
    assert probs.shape == (7, 143, 41)
    np.testing.assert_allclose(probs.sum(-1), 1.0, atol=1e-6)
    np.testing.assert_allclose(BINS.center_of_mass(probs), values, atol=1e-5)
    np.testing.assert_allclose(BINS.mean(jnp.log(probs + 1e-30)), values, atol=1e-4)


def test_at_the_bounds_the_mean_lies_inside_by_less_than_half_a_bin() -> None:
    found = np.asarray(BINS.center_of_mass(BINS.project(jnp.array([-100.0, -3.0, 7.0, 100.0]))))
    assert found[0] == found[1] and found[2] == found[3]
    assert -3.0 < found[0] < -3.0 + WIDTH / 2 and 7.0 - WIDTH / 2 < found[2] < 7.0
    assert np.asarray(BINS.outside(jnp.array([-3.1, -3.0, 7.0, 7.1]))).tolist() == [True, False, False, True]


def test_cross_entropy_is_least_at_the_target() -> None:
    target = jnp.array([-2.0, 0.1, 6.9])
    best = jnp.log(BINS.project(target) + 1e-30)
    loss = lambda logits: BINS.cross_entropy(logits, target).sum()
    np.testing.assert_allclose(jax.grad(loss)(best), 0.0, atol=1e-6)
    entropy = -(jnp.exp(best) * best).sum(-1)
    np.testing.assert_allclose(BINS.cross_entropy(best, target), entropy, rtol=1e-5)
    for seed in range(3):
        shifted = best + 0.1 * jax.random.normal(jax.random.key(seed), best.shape)
        assert (BINS.cross_entropy(shifted, target) > BINS.cross_entropy(best, target)).all()


def test_it_is_compiled_once_and_the_same_in_batches() -> None:
    values = jnp.linspace(-4.0, 8.0, 12)
    one = jax.vmap(BINS.project)(values)
    np.testing.assert_allclose(one, BINS.project(values), atol=1e-7)
    assert_compiles_once(jax.jit(BINS.project), (values,))
