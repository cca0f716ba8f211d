"""Returns against loops that can be read, identities, and rlax; every place an episode can end at."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podium.ops.returns import discounted_sums, gae, lambda_return, next_values, vtrace
from podium.testing import assert_compiles_once
from podium.types import at_step

T, B, GAMMA = 7, 6, 0.9

jit_gae, jit_vtrace, jit_lambda_return = jax.jit(gae), jax.jit(vtrace), jax.jit(lambda_return)


def columns(seed: int = 0) -> dict[str, np.ndarray]:
    """Return random steps [T, B]; an environment each of no end, each kind of end at 0, inside and at T - 1, all."""
    rng = np.random.default_rng(seed)
    terminated, truncated = np.zeros((2, T, B), bool)
    terminated[[0, 3, T - 1], 1] = True
    truncated[[0, 3, T - 1], 2] = True
    terminated[[0, 3, T - 1], 3] = truncated[[0, 3, T - 1], 3] = True
    terminated[2, 4] = truncated[4, 4] = True
    terminated[::2, 5] = truncated[:, 5] = True
    reward, value, next_value = rng.normal(size=(3, T, B)).astype(np.float32)
    return {
        "reward": reward,
        "discount": (GAMMA * ~terminated).astype(np.float32),
        "value": value,
        "next_value": next_value,
        "last": terminated | truncated,
    }


def slow_gae(steps: dict[str, np.ndarray], lambda_: float) -> np.ndarray:
    """Sum (gamma * lambda)^k delta_{t+k} forward from every t until the episode ends: no recursion."""
    advantage = np.zeros((T, B))
    for b in range(B):
        for t in range(T):
            factor = 1.0
            for k in range(t, T):
                r, d, v, n, last = (float(steps[name][k, b]) for name in steps)
                advantage[t, b] += factor * (r + d * n - v)
                factor *= d * lambda_
                if last:
                    break
    return advantage


@pytest.mark.parametrize("lambda_", [0.0, 0.3, 0.95, 1.0])
def test_gae_is_the_slow_loop(lambda_: float) -> None:
    steps = columns()
    np.testing.assert_allclose(gae(**steps, lambda_=lambda_), slow_gae(steps, lambda_), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(jit_gae(**steps, lambda_=lambda_), slow_gae(steps, lambda_), rtol=1e-5, atol=1e-5)


def test_gae_of_lambda_0_is_the_td_error() -> None:
    s = columns(1)
    td_error = s["reward"] + s["discount"] * s["next_value"] - s["value"]
    np.testing.assert_allclose(jit_gae(**s, lambda_=0.0), td_error, rtol=1e-6)


def test_gae_of_lambda_1_is_the_bootstrapped_return_minus_the_value() -> None:
    s = columns(2)
    # The values of one estimator: inside an episode what is reached is what is acted on next.
    inside = ~s["last"][:-1]
    s["next_value"][:-1][inside] = s["value"][1:][inside]
    discounted = np.zeros((T, B))
    for b in range(B):
        for t in reversed(range(T)):
            following = s["next_value"][t, b] if s["last"][t, b] or t == T - 1 else discounted[t + 1, b]
            discounted[t, b] = s["reward"][t, b] + s["discount"][t, b] * following
    np.testing.assert_allclose(jit_gae(**s, lambda_=1.0), discounted - s["value"], rtol=1e-5, atol=1e-5)


def test_gae_by_hand_at_the_two_kinds_of_end() -> None:
    # gamma = 1/2, lambda = 1/2, V = 4 everywhere, r = 1. Terminated: 1 - 4 = -3; truncated: 1 + 4/2 - 4 = -1.
    # The step before either: -1 + A / 4, so -1.75 and -1.25; nothing of the step after the end (-1 as a row's last).
    terminated = np.array([[0, 0], [1, 0], [0, 0]], bool)
    last = np.array([[0, 0], [1, 1], [0, 0]], bool)
    fours = np.full((3, 2), 4, np.float32)
    advantage = jit_gae(np.ones((3, 2), np.float32), np.float32(0.5) * ~terminated, fours, fours, last, 0.5)
    np.testing.assert_array_equal(advantage, [[-1.75, -1.25], [-3, -1], [-1, -1]])


@pytest.mark.parametrize("lambda_", [0.0, 0.8, 1.0])
def test_gae_equals_rlax_where_nothing_is_truncated(lambda_: float, rlax: Any) -> None:
    rng = np.random.default_rng(3)
    reward = rng.normal(size=(T, B)).astype(np.float32)
    values = rng.normal(size=(T + 1, B)).astype(np.float32)
    last = rng.random((T, B)) < 0.3
    discount = (GAMMA * ~last).astype(np.float32)
    expected = jax.vmap(rlax.truncated_generalized_advantage_estimation, (1, 1, None, 1), 1)(
        reward, discount, lambda_, values
    )
    found = jit_gae(reward, discount, values[:-1], values[1:], last, lambda_)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_gae_under_vmap_and_compiled_once() -> None:
    several = [columns(seed) for seed in (4, 5)]
    stacked = jax.tree.map(lambda *x: np.stack(x), *several)
    mapped = jax.jit(jax.vmap(lambda steps: gae(**steps, lambda_=0.9)))
    with assert_compiles_once(mapped):
        found = mapped(stacked)
        mapped(jax.tree.map(lambda x: x[::-1], stacked))
    for i, steps in enumerate(several):
        np.testing.assert_allclose(found[i], slow_gae(steps, 0.9), rtol=1e-5, atol=1e-5)


def test_gae_does_not_stop_gradients() -> None:
    s = columns(6)
    by_value = jax.grad(lambda value: jnp.sum(gae(**{**s, "value": value}, lambda_=0.0)))(s["value"])
    np.testing.assert_array_equal(by_value, -np.ones((T, B)))


def without_value(steps: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return what lambda-returns are of."""
    return {name: x for name, x in steps.items() if name != "value"}


def slow_lambda_return(steps: dict[str, np.ndarray], lambda_: float) -> np.ndarray:
    """Weigh the n-step returns from every t by (1 - lambda) lambda^(n - 1), the longest by all the rest: no recursion.

    The definition in Sutton and Barto 2018, eq. 12.3: the longest ends with the episode, or with the last row.
    """
    target = np.zeros((T, B))
    for b in range(B):
        for t in range(T):
            rewards, factor, weight = 0.0, 1.0, 1.0
            for k in range(t, T):
                r, d, n, last = (float(steps[name][k, b]) for name in ("reward", "discount", "next_value", "last"))
                rewards += factor * r
                factor *= d
                longest = last or k == T - 1
                target[t, b] += weight * (1.0 if longest else 1 - lambda_) * (rewards + factor * n)
                weight *= lambda_
                if longest:
                    break
    return target


@pytest.mark.parametrize("lambda_", [0.0, 0.3, 0.95, 1.0])
def test_lambda_return_is_the_slow_loop(lambda_: float) -> None:
    steps = without_value(columns())
    expected = slow_lambda_return(steps, lambda_)
    np.testing.assert_allclose(lambda_return(**steps, lambda_=lambda_), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(jit_lambda_return(**steps, lambda_=lambda_), expected, rtol=1e-5, atol=1e-5)


def test_lambda_return_of_0_is_the_one_step_target() -> None:
    s = without_value(columns(1))
    np.testing.assert_allclose(
        jit_lambda_return(**s, lambda_=0.0), s["reward"] + s["discount"] * s["next_value"], rtol=1e-6
    )


def test_lambda_return_of_1_is_the_return_to_the_end_or_the_value_there() -> None:
    s = without_value(columns(2))
    total = np.zeros((T, B))
    for b in range(B):
        for t in reversed(range(T)):
            following = s["next_value"][t, b] if s["last"][t, b] or t == T - 1 else total[t + 1, b]
            total[t, b] = s["reward"][t, b] + s["discount"][t, b] * following
    found = jit_lambda_return(**s, lambda_=1.0)
    np.testing.assert_allclose(found, total, rtol=1e-5, atol=1e-5)
    # Values inside an episode cancel: only those at its end count, and at the last row.
    inside = ~s["last"] & (np.arange(T)[:, None] < T - 1)
    other = np.where(inside, s["next_value"] + 100, s["next_value"])
    np.testing.assert_allclose(jit_lambda_return(**{**s, "next_value": other}, lambda_=1.0), found, rtol=1e-5)


@pytest.mark.parametrize("lambda_", [0.0, 0.8, 1.0])
def test_lambda_return_is_gae_and_the_value_where_values_are_one_networks(lambda_: float) -> None:
    s = columns(3)
    inside = ~s["last"][:-1]
    s["next_value"][:-1][inside] = s["value"][1:][inside]
    found = jit_lambda_return(**without_value(s), lambda_=lambda_)
    np.testing.assert_allclose(found, jit_gae(**s, lambda_=lambda_) + s["value"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("end", ["terminated", "truncated", "both"])
@pytest.mark.parametrize("t", [0, 1, T - 1])
def test_lambda_return_at_every_kind_and_place_of_an_end(end: str, t: int) -> None:
    # gamma = lambda = 1/2, r = 1, V = 4. The end: 1 where it terminated, else 1 + 4/2 = 3; nothing of what follows.
    # The step before: 1 + (4/2 + 1/2) / 2 or 1 + (4/2 + 3/2) / 2. Where nothing ends, 1 + 4/2 = 3 at T - 1.
    terminated = np.zeros((T, 1), bool)
    terminated[t] = end != "truncated"
    last = np.zeros((T, 1), bool)
    last[t] = True
    reward = np.where(np.arange(T)[:, None] > t, 100, 1).astype(np.float32)
    next_value = np.where(np.arange(T)[:, None] > t, 100, 4).astype(np.float32)
    found = jit_lambda_return(reward, np.float32(0.5) * ~terminated, next_value, last, 0.5)[:, 0]
    at_end = 3 if end == "truncated" else 1
    assert found[t] == at_end
    if t:
        assert found[t - 1] == 1 + 0.5 * (0.5 * 4 + 0.5 * at_end)
    if t < T - 1:
        assert found[-1] == 100 + 0.5 * 100


@pytest.mark.parametrize("lambda_", [0.0, 0.65, 1.0])
def test_lambda_return_equals_rlax_where_nothing_is_truncated(lambda_: float, rlax: Any) -> None:
    rng = np.random.default_rng(3)
    reward = rng.normal(size=(T, B)).astype(np.float32)
    values = rng.normal(size=(T + 1, B, 3)).astype(np.float32)
    last = rng.random((T, B)) < 0.3
    discount = (GAMMA * ~last).astype(np.float32)
    best = values.max(-1)
    found = jit_lambda_return(reward, discount, best[1:], last, lambda_)
    expected = jax.vmap(rlax.lambda_returns, (1, 1, 1, None), 1)(reward, discount, best[1:], lambda_)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    # Peng's Q(lambda), whose traces go on through whatever was done.
    action = rng.integers(3, size=(T, B))
    error = jax.vmap(rlax.q_lambda, (1, 1, 1, 1, 1, None), 1)(
        values[:-1], action, reward, discount, values[1:], lambda_
    )
    chosen = np.take_along_axis(values[:-1], action[..., None], -1)[..., 0]
    np.testing.assert_allclose(found - chosen, error, rtol=1e-4, atol=1e-5)


def test_lambda_return_under_vmap_and_compiled_once() -> None:
    several = [without_value(columns(seed)) for seed in (4, 5)]
    mapped = jax.jit(jax.vmap(lambda steps: lambda_return(**steps, lambda_=0.9)))
    with assert_compiles_once(mapped):
        found = mapped(jax.tree.map(lambda *x: np.stack(x), *several))
        mapped(jax.tree.map(lambda *x: np.stack(x), *several[::-1]))
    for i, steps in enumerate(several):
        np.testing.assert_allclose(found[i], slow_lambda_return(steps, 0.9), rtol=1e-5, atol=1e-5)


def log_ratios(seed: int = 0) -> np.ndarray:
    """Return log-ratios [T, B] on both sides of every bound used here."""
    return np.random.default_rng(100 + seed).normal(0, 0.7, (T, B)).astype(np.float32)


def slow_vtrace(
    steps: dict[str, np.ndarray], log_ratio: np.ndarray, lambda_: float, rho_bar: float, c_bar: float
) -> tuple[np.ndarray, np.ndarray]:
    """Sum eq. 1 forward from every t until the episode ends, the product of all c written out: no recursion."""
    target, advantage = np.zeros((2, T, B))
    for b in range(B):
        for t in reversed(range(T)):
            target[t, b], factor = steps["value"][t, b], 1.0
            for k in range(t, T):
                r, d, v, n, last = (float(steps[name][k, b]) for name in steps)
                ratio = np.exp(float(log_ratio[k, b]))
                target[t, b] += factor * min(rho_bar, ratio) * (r + d * n - v)
                factor *= d * lambda_ * min(c_bar, ratio)
                if last:
                    break
            r, d, v, n, last = (float(steps[name][t, b]) for name in steps)
            if not last and t < T - 1:
                n += lambda_ * (target[t + 1, b] - float(steps["value"][t + 1, b]))
            advantage[t, b] = min(rho_bar, np.exp(float(log_ratio[t, b]))) * (r + d * n - v)
    return target, advantage


BOUNDS = [(1.0, 1.0, 1.0), (0.7, 1.5, 0.8), (0.0, 0.9, 0.9), (1.0, np.inf, np.inf)]


@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
def test_vtrace_is_the_slow_loop(bounds: tuple[float, float, float]) -> None:
    steps, log_ratio = columns(), log_ratios()
    found = jit_vtrace(log_ratio, *steps.values(), *bounds)
    for x, y in zip(found, slow_vtrace(steps, log_ratio, *bounds), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
    plain = vtrace(log_ratio, **steps, lambda_=bounds[0], rho_bar=bounds[1], c_bar=bounds[2])
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), plain, found)


@pytest.mark.parametrize("lambda_", [0.0, 0.8, 1.0])
def test_vtrace_on_policy_is_gae(lambda_: float) -> None:
    s = columns(1)
    found = jit_vtrace(0 * s["reward"], *s.values(), lambda_, 1.0, 1.0)
    advantage = jit_gae(**s, lambda_=lambda_)
    np.testing.assert_allclose(found.target, advantage + s["value"], rtol=1e-5, atol=1e-5)
    # The estimates of one network: inside an episode what is reached is what is acted on next.
    inside = ~s["last"][:-1]
    s["next_value"][:-1][inside] = s["value"][1:][inside]
    found = jit_vtrace(0 * s["reward"], *s.values(), lambda_, 2.0, 1.0)
    np.testing.assert_allclose(found.advantage, jit_gae(**s, lambda_=lambda_), rtol=1e-5, atol=1e-5)


def test_vtrace_on_policy_is_the_n_step_return() -> None:
    # Mnih et al. 2016: rewards up to the end of the episode or the rollout, and the value there. Any value between
    # cancels, so the targets do not depend on it.
    s = columns(2)
    inside = ~s["last"][:-1]
    s["next_value"][:-1][inside] = s["value"][1:][inside]
    total = np.zeros((T, B))
    for b in range(B):
        for t in reversed(range(T)):
            following = s["next_value"][t, b] if s["last"][t, b] or t == T - 1 else total[t + 1, b]
            total[t, b] = s["reward"][t, b] + s["discount"][t, b] * following
    found = jit_vtrace(0 * s["reward"], *s.values(), 1.0, 1.0, 1.0)
    np.testing.assert_allclose(found.target, total, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found.advantage, total - s["value"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bounds", [(1.0, 1.0, 1.0), (0.7, 1.5, 1.0)], ids=str)
def test_vtrace_equals_rlax_where_nothing_is_truncated(bounds: tuple[float, float, float], rlax: Any) -> None:
    rng, (lambda_, rho_bar, _) = np.random.default_rng(3), bounds
    reward, log_ratio = rng.normal(size=(2, T, B)).astype(np.float32)
    values = rng.normal(size=(T + 1, B)).astype(np.float32)
    last = rng.random((T, B)) < 0.3
    discount = (GAMMA * ~last).astype(np.float32)
    found = jit_vtrace(log_ratio, reward, discount, values[:-1], values[1:], last, *bounds)
    oracle = jax.vmap(rlax.vtrace_td_error_and_advantage, (1, 1, 1, 1, 1, None, None, None), 1)
    arguments = values[:-1], values[1:], reward, discount, np.exp(log_ratio), lambda_, rho_bar, rho_bar
    expected = oracle(*arguments)
    np.testing.assert_allclose(found.target - values[:-1], expected.errors, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found.advantage, expected.pg_advantage, rtol=1e-5, atol=1e-5)


def test_vtrace_by_hand_at_the_two_kinds_of_end() -> None:
    # pi / mu = 1/2, gamma = 1/2, V = 4, r = 1. The end: terminated 1 - 4 = -3, truncated 1 + 4/2 - 4 = -1, halved.
    # The step before: delta = -1/2; v = 4 - 1/2 + 1/4 * (-1.5 or -0.5); A = 1/2 * (-1 + 1/2 * (-1.5 or -0.5)).
    terminated = np.array([[0, 0], [1, 0], [0, 0]], bool)
    last = np.array([[0, 0], [1, 1], [0, 0]], bool)
    fours, ones = np.full((3, 2), 4, np.float32), np.ones((3, 2), np.float32)
    found = jit_vtrace(np.log(0.5 * ones), ones, np.float32(0.5) * ~terminated, fours, fours, last, 1.0, 1.0, 1.0)
    np.testing.assert_allclose(found.target, [[3.125, 3.375], [2.5, 3.5], [3.5, 3.5]])
    np.testing.assert_allclose(found.advantage, [[-0.875, -0.625], [-1.5, -0.5], [-0.5, -0.5]])


def test_vtrace_of_a_transition_does_not_depend_on_rows_that_are_none() -> None:
    # As of an environment that resets in the next step: a row that is none follows every end.
    s, log_ratio = columns(4), log_ratios(4)
    s["last"] &= ~np.concatenate([np.zeros((1, B), bool), s["last"][:-1]])
    none = np.concatenate([np.zeros((1, B), bool), s["last"][:-1]])
    assert none.any()
    s["last"] &= ~none
    other = {name: x if name == "last" else np.where(none, 100 + x, x) for name, x in s.items()}
    found = jit_vtrace(log_ratio, *s.values(), 1.0, 1.0, 1.0)
    changed = jit_vtrace(np.where(none, -30, log_ratio), *other.values(), 1.0, 1.0, 1.0)
    for x, y in zip(found, changed, strict=True):
        np.testing.assert_array_equal(np.asarray(x)[~none], np.asarray(y)[~none])
        assert (np.asarray(x) != np.asarray(y))[none].all()


def test_vtrace_under_vmap_and_compiled_once() -> None:
    several = [(log_ratios(seed), *columns(seed).values()) for seed in (4, 5)]
    mapped = jax.jit(jax.vmap(lambda args: vtrace(*args)))
    with assert_compiles_once(mapped):
        found = mapped(jax.tree.map(lambda *x: np.stack(x), *several))
        mapped(jax.tree.map(lambda *x: np.stack(x), *several[::-1]))
    for i, args in enumerate(several):
        expected = jit_vtrace(*args, 1.0, 1.0, 1.0)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x[i], y, rtol=1e-5, atol=1e-5), found, expected)  # noqa: B023


@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
def test_discounted_sums_are_the_slow_loop(gamma: float) -> None:
    s = columns(7)
    start, valid = np.arange(B, dtype=np.float32), np.random.default_rng(7).random((T, B)) < 0.8
    expected = np.zeros((T, B))
    for b in range(B):
        total = start[b]
        for t in range(T):
            if valid[t, b]:
                total = s["reward"][t, b] + (0.0 if s["last"][t, b] else gamma * total)
            expected[t, b] = total
    found = jax.jit(discounted_sums)(s["reward"], s["last"], gamma, start, valid)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(
        discounted_sums(s["reward"], s["last"], gamma, 2.0),
        discounted_sums(s["reward"], s["last"], gamma, jnp.full(B, 2.0)),
    )


# Environments: none; t = 0 and T - 1; two inside; adjacent; the last row only; every row.
TRUNCATED = np.zeros((T, B), bool)
TRUNCATED[[0, T - 1], 1] = True
TRUNCATED[[1, 4], 2] = True
TRUNCATED[[2, 3], 3] = True
TRUNCATED[T - 1, 4] = True
TRUNCATED[:, 5] = True
NUMBERS = np.arange(T * B, dtype=np.float32).reshape(T, B)
VALUES = 1000 + NUMBERS


def worth(inputs: dict[str, jax.Array]) -> jax.Array:
    """Return the value of what was reached: minus the row's number, counted from 1."""
    assert inputs["reached"].shape == (B, 2)
    return -inputs["reached"][:, 0] - inputs["memory"][0]


def reached() -> dict[str, np.ndarray]:
    return {"reached": np.stack([NUMBERS, 0 * NUMBERS], -1), "memory": (np.ones((T, B), np.float32),)}


def worth_of_step(step: jax.Array | None) -> jax.Array:
    return worth(at_step(reached(), step))


def slow_next_values(truncated: np.ndarray) -> np.ndarray:
    expected = np.zeros((T, B))
    for t in range(T):
        for b in range(B):
            known = t < T - 1 and not truncated[t, b]
            expected[t, b] = VALUES[t + 1, b] if known else -NUMBERS[t, b] - 1
    return expected


@pytest.mark.parametrize("envs", [[0], [0, 1], [1], [2], [3], [4], [5], range(B)], ids=str)
def test_next_values_are_the_slow_loop(envs: list[int]) -> None:
    truncated = TRUNCATED & np.isin(np.arange(B), envs)
    function = jax.jit(functools.partial(next_values, evaluate=worth_of_step))
    np.testing.assert_array_equal(function(VALUES, truncated), slow_next_values(truncated))


def test_next_values_under_vmap() -> None:
    both = np.stack([TRUNCATED, np.zeros_like(TRUNCATED)])
    mapped = jax.vmap(lambda truncated: next_values(VALUES, truncated, worth_of_step))
    np.testing.assert_array_equal(mapped(both), [slow_next_values(x) for x in both])


@pytest.mark.parametrize(("envs", "rounds"), [([0, 4], 0), ([1], 1), ([1, 2, 3], 2), ([5], T - 1)])
def test_next_values_evaluate_every_row_they_need_once(envs: list[int], rounds: int) -> None:
    truncated = TRUNCATED & np.isin(np.arange(B), envs)
    seen: list[np.ndarray] = []

    def watched(step: jax.Array | None) -> jax.Array:
        seen.append(np.asarray(at_step(reached(), step)["reached"][:, 0]).astype(int))
        return worth_of_step(step)

    with jax.disable_jit():
        next_values(jnp.asarray(VALUES), jnp.asarray(truncated), watched)
    np.testing.assert_array_equal(seen[0], NUMBERS[-1])
    assert len(seen) == 1 + rounds
    for b in range(B):
        needed = [t * B + b for t in np.flatnonzero(truncated[:-1, b])]
        # An environment that has no more is evaluated at its first row meanwhile, and that is thrown away.
        assert [row[b] for row in seen[1:]] == needed + [b] * (rounds - len(needed))


def test_next_values_and_gae_are_finite_where_episodes_terminated() -> None:
    steps = columns(8)
    terminated = steps["discount"] == 0
    found = next_values(VALUES, steps["last"] & ~terminated, worth_of_step)
    assert np.isfinite(found).all()
    assert np.isfinite(gae(**{**steps, "next_value": np.asarray(found)}, lambda_=1.0)).all()


@pytest.mark.parametrize("length", [1, 2])
def test_the_shortest_rollouts(length: int) -> None:
    value, inputs = np.full((length, 1), 5, np.float32), np.full((length, 1), 7, np.float32)
    truncated = np.ones((length, 1), bool)
    found = next_values(value, truncated, functools.partial(at_step, inputs))
    np.testing.assert_array_equal(found, inputs)
    advantage = gae(np.ones((length, 1), np.float32), np.full((length, 1), 0.5), value, found, truncated, 0.5)
    np.testing.assert_array_equal(advantage, np.full((length, 1), 1 + 3.5 - 5))
