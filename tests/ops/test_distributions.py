"""Distributions against scipy, closed forms, frequencies of samples and finite differences."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from scipy import integrate, stats

from podium.ops.distributions import Categorical, DiagGaussian, TanhNormal

T, B = 3, 4
SHAPES = [(B,), (T, B)]


@jax.jit
def everything(policy: Any, other: Any, action: jax.Array) -> dict[str, jax.Array]:
    """Return what a distribution has to say, in one program."""
    return {
        "log_prob": policy.log_prob(action),
        "entropy": policy.entropy(),
        "kl": policy.kl(other),
        "kl_of_itself": policy.kl(policy),
        "mode": policy.mode(),
        "log_probs": policy.log_probs() if isinstance(policy, Categorical) else None,
    }


def categorical(shape: tuple[int, ...], num_actions: int = 5, seed: int = 0) -> tuple[Categorical, np.ndarray]:
    """Return a distribution and its probabilities, computed in float64."""
    logits = 2 * np.random.default_rng(seed).normal(size=(*shape, num_actions))
    probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    return Categorical(jnp.asarray(logits, jnp.float32)), probs


def gaussian(shape: tuple[int, ...], size: int = 3, seed: int = 0) -> DiagGaussian:
    rng = np.random.default_rng(seed)
    return DiagGaussian(
        jnp.asarray(rng.normal(size=(*shape, size)), jnp.float32), jnp.asarray(0.5 * rng.normal(size=size), jnp.float32)
    )


@pytest.mark.parametrize("num_actions", [1, 2, 5, 11])
@pytest.mark.parametrize("shape", SHAPES)
def test_categorical_is_that_of_scipy(shape: tuple[int, ...], num_actions: int) -> None:
    policy, probs = categorical(shape, num_actions)
    other, other_probs = categorical(shape, num_actions, seed=1)
    action = np.random.default_rng(2).integers(num_actions, size=shape)
    expected = np.log(np.take_along_axis(probs, action[..., None], -1))[..., 0]
    found = everything(policy, other, jnp.asarray(action))
    np.testing.assert_allclose(found["log_prob"], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["log_probs"], np.log(probs), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["entropy"], stats.entropy(probs, axis=-1), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["kl"], stats.entropy(probs, other_probs, axis=-1), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found["kl_of_itself"], np.zeros(shape), atol=1e-6)
    np.testing.assert_array_equal(found["mode"], probs.argmax(-1))
    assert found["log_prob"].shape == found["entropy"].shape == found["mode"].shape == shape
    assert found["mode"].dtype == jnp.int32


def test_categorical_of_extreme_logits_is_finite() -> None:
    policy = Categorical(jnp.array([[1e4, -1e4, 0.0], [0.0, 0.0, 0.0]]))
    for x in (policy.entropy(), policy.log_prob(jnp.array([0, 1])), policy.log_prob(jnp.array([1, 1]))):
        assert jnp.isfinite(x).all()
    np.testing.assert_allclose(policy.entropy(), [0, np.log(3)], rtol=1e-6)
    gradient = jax.grad(lambda logits: Categorical(logits).entropy().sum())(policy.logits)
    assert jnp.isfinite(gradient).all()


def test_categorical_samples_have_its_frequencies() -> None:
    num_samples = 20_000
    _, probs = categorical((2,))
    draw = jax.jit(lambda logits, key: Categorical(logits).sample(jax.random.split(key, num_samples)))
    for row in range(2):
        logits = jnp.broadcast_to(jnp.log(probs[row]), (num_samples, 5))
        action = draw(logits, jax.random.key(row))
        assert action.shape == (num_samples,) and action.dtype == jnp.int32
        assert stats.chisquare(np.bincount(action, minlength=5), probs[row] * num_samples).pvalue > 1e-3


def test_gaussian_samples_have_its_moments_and_shape() -> None:
    num_samples = 20_000
    mean, log_std = jnp.array([1.0, -2.0]), jnp.array([0.0, -1.0])
    keys = jax.random.split(jax.random.key(0), num_samples)
    action = np.asarray(DiagGaussian(jnp.broadcast_to(mean, (num_samples, 2)), log_std).sample(keys))
    for i in range(2):
        scaled = (action[:, i] - mean[i]) / np.exp(log_std[i])
        assert stats.kstest(np.asarray(scaled), "norm").pvalue > 1e-3
    assert abs(np.corrcoef(action.T)[0, 1]) < 0.03


@pytest.mark.parametrize("kind", ["categorical", "gaussian"])
def test_an_environment_draws_by_its_own_key_alone(kind: str) -> None:
    policy = categorical((6,))[0] if kind == "categorical" else gaussian((6,))
    keys = jax.random.split(jax.random.key(0), 6)
    whole = policy.sample(keys)
    if kind == "categorical":
        parts = [Categorical(policy.logits[i : i + 3]).sample(keys[i : i + 3]) for i in (0, 3)]
    else:
        parts = [DiagGaussian(policy.mean[i : i + 3], policy.log_std).sample(keys[i : i + 3]) for i in (0, 3)]
    np.testing.assert_array_equal(whole, np.concatenate(parts))


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_gaussian_is_that_of_scipy(shape: tuple[int, ...], size: int) -> None:
    policy, other = gaussian(shape, size), gaussian(shape, size, seed=1)
    action = np.random.default_rng(2).normal(size=(*shape, size)).astype(np.float32)
    found = everything(policy, other, jnp.asarray(action))
    policy, other = jax.device_get((policy, other))
    std, other_std = np.exp(policy.log_std), np.exp(other.log_std)
    expected = stats.norm.logpdf(action, policy.mean, std).sum(-1)
    np.testing.assert_allclose(found["log_prob"], expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        found["entropy"], np.full(shape, stats.norm.entropy(scale=std).sum()), rtol=1e-5, atol=1e-6
    )
    # KL(N0 || N1) = log(s1 / s0) + (s0^2 + (m0 - m1)^2) / (2 s1^2) - 1/2, summed over dimensions.
    distance = np.square(policy.mean - other.mean)
    kl = (np.log(other_std / std) + (std**2 + distance) / (2 * other_std**2) - 0.5).sum(-1)
    np.testing.assert_allclose(found["kl"], kl, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found["kl_of_itself"], np.zeros(shape), atol=1e-6)
    np.testing.assert_array_equal(found["mode"], policy.mean)


def test_kl_by_monte_carlo() -> None:
    rng = np.random.default_rng(3)
    policy, other = gaussian((1,)), gaussian((1,), seed=1)
    action = np.asarray(policy.mean) + np.exp(policy.log_std) * rng.normal(size=(200_000, 3))
    difference = policy.log_prob(jnp.asarray(action, jnp.float32)) - other.log_prob(jnp.asarray(action, jnp.float32))
    np.testing.assert_allclose(difference.mean(), policy.kl(other)[0], rtol=0.03)
    (policy, probs), (other, _) = categorical((1,)), categorical((1,), seed=1)
    action = jnp.asarray(rng.choice(5, size=(200_000,), p=probs[0]))
    difference = policy.log_prob(action) - other.log_prob(action)
    np.testing.assert_allclose(difference.mean(), policy.kl(other)[0], rtol=0.03)


def test_gradients_are_finite_differences() -> None:
    action = jnp.asarray(np.random.default_rng(4).integers(5, size=(T, B)))
    policy, _ = categorical((T, B))
    box = gaussian((T, B))
    point = jnp.asarray(np.random.default_rng(5).normal(size=(T, B, 3)), jnp.float32)
    functions = [
        (lambda logits: Categorical(logits).log_prob(action).sum(), (policy.logits,)),
        (lambda logits: Categorical(logits).entropy().sum(), (policy.logits,)),
        (lambda mean, log_std: DiagGaussian(mean, log_std).log_prob(point).sum(), (box.mean, box.log_std)),
    ]
    for function, args in functions:
        check_grads(jax.jit(function), args, order=1, modes=["rev"], atol=0.02, rtol=0.02, eps=1e-2)


def test_gradient_of_log_prob_is_one_hot_minus_probabilities() -> None:
    policy, probs = categorical((T, B))
    action = np.random.default_rng(6).integers(5, size=(T, B))
    gradient = jax.jit(jax.grad(lambda logits: Categorical(logits).log_prob(jnp.asarray(action)).sum()))(policy.logits)
    np.testing.assert_allclose(gradient, np.eye(5)[action] - probs, rtol=1e-4, atol=1e-6)


TANH_NORMALS = [(0.0, 0.0), (0.7, -1.5), (-1.5, 0.3), (3.0, -0.5), (0.2, 0.69)]


def density(mean: float, log_std: float, u: float) -> float:
    """Return the density of u = tanh(x) by the change of variables, in float64."""
    return float(stats.norm.pdf(np.arctanh(u), mean, np.exp(log_std)) / (1 - u * u))


@pytest.mark.parametrize(("mean", "log_std"), TANH_NORMALS)
def test_a_tanh_normal_is_that_of_numeric_integrals(mean: float, log_std: float) -> None:
    policy = TanhNormal(jnp.array([mean]), jnp.array([log_std]))
    u = np.array([-0.95, -0.3, 0.1, 0.8, 0.99])
    found = jnp.exp(policy.log_prob(jnp.arctanh(jnp.asarray(u, jnp.float32))[:, None]))
    np.testing.assert_allclose(found, [density(mean, log_std, x) for x in u], rtol=1e-3, atol=1e-7)
    # In x, where nothing is steep: the densities sum to 1, and H = -E log p(u).
    x = np.linspace(mean - 12 * np.exp(log_std), mean + 12 * np.exp(log_std), 20_001)
    log_prob = np.asarray(policy.log_prob(jnp.asarray(x, jnp.float32)[:, None]), np.float64)
    log_slope = 2 * (np.log(2) - x - np.logaddexp(0, -2 * x))
    np.testing.assert_allclose(integrate.trapezoid(np.exp(log_prob + log_slope), x), 1.0, atol=1e-3)
    weights = stats.norm.pdf(x, mean, np.exp(log_std))
    np.testing.assert_allclose(policy.entropy(), -integrate.trapezoid(weights * log_prob, x), atol=0.03)


def test_a_tanh_normal_far_out_is_finite_and_its_gradient_too() -> None:
    policy = TanhNormal(jnp.array([[0.0], [40.0], [-200.0]]), jnp.array([-5.0]))
    value, gradient = jax.value_and_grad(lambda mean: policy._replace(mean=mean).draw(jnp.ones((3, 1)))[1].sum())(
        policy.mean
    )
    assert np.isfinite(value) and np.isfinite(gradient).all()
    assert np.isfinite(policy.log_prob(policy.mean + 1)).all() and np.isfinite(policy.entropy()).all()


def test_what_a_tanh_normal_draws_of_noise_has_its_density_and_their_gradients_are_finite_differences() -> None:
    mean, log_std, noise = jnp.array([[0.3, -0.8]]), jnp.array([[-0.5, 0.2]]), jnp.array([[1.1, -0.4]])
    unit, log_prob = TanhNormal(mean, log_std).draw(noise)
    raw = mean + jnp.exp(log_std) * noise
    np.testing.assert_allclose(unit, jnp.tanh(raw), rtol=1e-6)
    np.testing.assert_allclose(log_prob, TanhNormal(mean, log_std).log_prob(raw), rtol=1e-5)
    check_grads(lambda m, s: TanhNormal(m, s).draw(noise), (mean, log_std), order=1, modes=["rev"], rtol=0.02)
    check_grads(lambda m, s: TanhNormal(m, s).entropy(), (mean, log_std), order=1, modes=["rev"], rtol=0.02)


def test_a_tanh_normal_acts_as_the_normal_in_it() -> None:
    policy, other = TanhNormal(*gaussian((B,))), TanhNormal(*gaussian((B,), seed=1))
    keys = jax.random.split(jax.random.key(0), B)
    np.testing.assert_array_equal(policy.sample(keys), DiagGaussian(*policy).sample(keys))
    np.testing.assert_array_equal(policy.kl(other), DiagGaussian(*policy).kl(DiagGaussian(*other)))
    np.testing.assert_array_equal(policy.squash(policy.mode()), jnp.tanh(policy.mean))
