"""Optimisers: directions by hand and against optax, the bound, the rate, and the paper's sums as means."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from podium.ops import optimizers

PARAMS = {"a": np.array([1.0, -2.0], np.float32), "b": np.float32(0.5)}


def gradients(count: int) -> list[Any]:
    rng = np.random.default_rng(0)
    return [jax.tree.map(lambda x: np.float32(rng.normal(size=np.shape(x))), PARAMS) for _ in range(count)]


def run(optimizer: optax.GradientTransformation, rate: float, grads: list[Any]) -> Any:
    params, state = PARAMS, optimizer.init(PARAMS)
    for gradient in grads:
        params, state = optimizers.descend(optimizer, rate, params, state, gradient)
    return params


def test_rmsprop_is_the_papers() -> None:
    params = {k: np.asarray(v, np.float64) for k, v in PARAMS.items()}
    square = {k: np.zeros_like(v) for k, v in params.items()}
    for gradient in gradients(4):
        for k, g in gradient.items():
            square[k] = 0.9 * square[k] + 0.1 * np.float64(g) ** 2
            params[k] = params[k] - 0.05 * g / np.sqrt(square[k] + 0.01)
    found = run(optimizers.make("rmsprop", 0.01, decay=0.9), 0.05, gradients(4))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, params)


@pytest.mark.parametrize(("name", "count"), [("adam", 3), ("radam", 4), ("radam", 9)])
def test_adam_and_radam_are_optaxs(name: str, count: int) -> None:
    params, optimizer = PARAMS, getattr(optax, name)(0.05, eps=1e-5)
    state = optimizer.init(params)
    for gradient in gradients(count):
        updates, state = optimizer.update(gradient, state)
        params = optax.apply_updates(params, updates)
    found = run(optimizers.make(name, 1e-5), 0.05, gradients(count))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, params)


@pytest.mark.parametrize("name", optimizers.OPTIMIZERS)
def test_the_gradient_is_bounded_before_anything_else(name: str) -> None:
    large = {"a": np.array([3.0, 0.0], np.float32), "b": np.float32(4.0)}
    bounded = run(optimizers.make(name, 0.1, max_grad_norm=0.5), 0.05, [large])
    by_hand = run(optimizers.make(name, 0.1), 0.05, [jax.tree.map(lambda g: g / 10, large)])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), bounded, by_hand)


def test_radam_begins_as_momentum_and_goes_on_as_adam_rectified() -> None:
    # Liu et al. 2020, alg. 2: rho_t = rho - 2 t b^t / (1 - b^t), rho = 2 / (1 - b) - 1 = 1999, passes 4 in step 5 and
    # 5 (optax's threshold) in step 6; the rectifier of step 6 by hand.
    params, grads, m, n = 0.5, gradients(6), 0.0, 0.0
    for t, gradient in enumerate(grads, 1):
        m, n = 0.9 * m + 0.1 * float(gradient["b"]), 0.999 * n + 0.001 * float(gradient["b"]) ** 2
        rho = 1999 - 2 * t * 0.999**t / (1 - 0.999**t)
        assert (rho >= 5) == (t == 6)
        step = m / (1 - 0.9**t)
        if rho >= 5:
            step *= np.sqrt((rho - 4) * (rho - 2) * 1999 / ((1999 - 4) * (1999 - 2) * rho))
            step /= np.sqrt(n / (1 - 0.999**t)) + 1e-8
        params -= 0.05 * step
    np.testing.assert_allclose(run(optimizers.make("radam", 1e-8), 0.05, grads)["b"], params, rtol=1e-4)


def test_sums_over_n_steps_are_means_with_eps_over_n_squared_and_the_bound_over_n() -> None:
    # What agents/impala.py says of its difference from the paper.
    n = 640
    sums = [jax.tree.map(lambda g: n * g, gradient) for gradient in gradients(4)]
    paper = run(optimizers.make("rmsprop", 0.1, max_grad_norm=40.0), 6e-4, sums)
    means = run(optimizers.make("rmsprop", 0.1 / n**2, max_grad_norm=40.0 / n), 6e-4, gradients(4))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), paper, means)


def test_the_rate_falls_linearly_to_zero_or_stays() -> None:
    rates = [float(optimizers.annealed(0.2, 1000, jnp.float32(steps))) for steps in (0, 250, 1000, 2000)]
    np.testing.assert_allclose(rates, [0.2, 0.15, 0.0, 0.0], atol=1e-8)
    assert optimizers.annealed(0.2, 0, jnp.float32(250)) == 0.2
    assert float(optimizers.annealed(0.2, 4 * 10**9, jnp.float32(10**9))) == pytest.approx(0.15)


def test_an_unknown_optimizer_is_named() -> None:
    with pytest.raises(ValueError, match="optimizer='sgd' is unknown; use one of adam, rmsprop, radam"):
        optimizers.make("sgd", 1e-5)


@pytest.mark.parametrize("name", optimizers.OPTIMIZERS)
def test_array_by_array_is_as_one_vector(name: str) -> None:
    """Where the state is made decides the form; every step after it keeps that, and takes the same way."""
    optimizer = optimizers.make(name, 0.1, max_grad_norm=0.5)
    joined = optimizer.init(PARAMS)
    with optimizers.by_array():
        apart = optimizer.init(PARAMS)
    assert [x.shape for x in jax.tree.leaves(joined) if jnp.ndim(x)] == [(3,)] * (len(jax.tree.leaves(apart)) // 2)
    params = [PARAMS, PARAMS]
    for gradient in gradients(4):
        params[0], joined = optimizers.descend(optimizer, 0.05, params[0], joined, gradient)
        params[1], apart = optimizers.descend(optimizer, 0.05, params[1], apart, gradient)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), *params)
    moments = [np.concatenate([np.ravel(x) for x in jax.tree.leaves(state)]) for state in (joined, apart)]
    np.testing.assert_allclose(*moments, rtol=1e-6)


def test_many_parameters_stay_arrays() -> None:
    few, many = {"w": jnp.zeros((512, 511)), "b": jnp.zeros(512)}, {"w": jnp.zeros((512, 512)), "b": jnp.zeros(512)}
    optimizer = optimizers.make("adam", 1e-5)
    largest = lambda params: max(jnp.ndim(leaf) for leaf in jax.tree.leaves(optimizer.init(params)))
    assert largest(few) == 1
    assert largest(many) == 2
