"""Value rescaling: its inverse, the formulas of the paper, and small values."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podium.ops.rescaling import rescale, unrescale

X = np.concatenate([-np.logspace(6, -6, 25), [0.0], np.logspace(-6, 6, 25)])


@pytest.mark.parametrize("eps", [0.0, 1e-3, 0.1])
def test_each_undoes_the_other(eps: float) -> None:
    x = jnp.asarray(X, jnp.float32)
    np.testing.assert_allclose(jax.jit(unrescale)(jax.jit(rescale)(x, eps), eps), x, rtol=2e-6)
    np.testing.assert_allclose(rescale(unrescale(x / 1e3, eps), eps), x / 1e3, rtol=2e-6)


@pytest.mark.parametrize("eps", [1e-3, 0.1])
def test_they_are_what_the_paper_says(eps: float) -> None:
    """The formulas as printed, in double precision."""
    expected = np.sign(X) * (np.sqrt(np.abs(X) + 1) - 1) + eps * X
    np.testing.assert_allclose(rescale(jnp.asarray(X, jnp.float32), eps), expected, rtol=1e-5)
    y = X / 1e3
    root = (np.sqrt(1 + 4 * eps * (np.abs(y) + 1 + eps)) - 1) / (2 * eps)
    expected = np.sign(y) * (root**2 - 1)
    np.testing.assert_allclose(unrescale(jnp.asarray(y, jnp.float32), eps), expected, rtol=1e-5, atol=1e-9)


def test_they_rise_and_have_slopes_everywhere() -> None:
    for function in (rescale, unrescale):
        slope = jax.vmap(jax.grad(function))(jnp.asarray(X, jnp.float32))
        assert (slope > 0).all() and jnp.isfinite(slope).all()
