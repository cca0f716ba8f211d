"""Action values: the value of an action and its gradient, acting but for epsilon, epsilon's decay and its refusals."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podium.ops import action_values


@pytest.mark.parametrize("shape", [(5,), (4, 3)])
def test_select_is_indexing_and_so_is_its_gradient(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    value, action = rng.normal(size=(*shape, 6)).astype(np.float32), rng.integers(6, size=shape)
    indexed = lambda value: jnp.take_along_axis(value, action[..., None], -1)[..., 0]
    np.testing.assert_array_equal(action_values.select(value, action), indexed(value))
    gradients = [
        jax.grad(lambda value, f=f: jnp.sum(jnp.sin(f(value))))(value)
        for f in (indexed, lambda value: action_values.select(value, action))
    ]
    np.testing.assert_allclose(*gradients, rtol=1e-6)


def test_every_action_is_explored_equally_and_the_best_taken_else() -> None:
    number, actions = 6000, 3
    keys = jax.random.split(jax.random.key(0), number)
    value = jnp.broadcast_to(jnp.array([0.0, 2.0, 1.0]), (number, actions))
    for epsilon in (0.0, 0.3, 1.0):
        action = action_values.epsilon_greedy(keys, value, jnp.float32(epsilon))
        assert action.dtype == jnp.int32
        expected = np.full(actions, epsilon / actions) + (1 - epsilon) * np.array([0, 1, 0])
        found = np.bincount(action, minlength=actions) / number
        assert (np.abs(found - expected) <= 4 * np.sqrt(expected * (1 - expected) / number)).all()


def test_each_may_explore_at_a_rate_of_its_own() -> None:
    keys, value = jax.random.split(jax.random.key(1), 4000), jnp.tile(jnp.array([1.0, 0.0]), (4000, 1))
    action = action_values.epsilon_greedy(keys, value, jnp.arange(4000) % 2)
    assert (action[::2] == 0).all() and abs(action[1::2].mean() - 0.5) < 0.05


def test_epsilon_falls_linearly_and_stays() -> None:
    assert float(action_values.decayed(0.9, 0.1, 4 * 10**9, jnp.float32(10**9))) == pytest.approx(0.7)
    found = [float(action_values.decayed(0.9, 0.1, 40, jnp.float32(steps))) for steps in (0, 10, 40, 1000)]
    np.testing.assert_allclose(found, [0.9, 0.7, 0.1, 0.1], rtol=1e-6)


def test_an_epsilon_that_rises_is_refused_unless_it_is_traced() -> None:
    with pytest.raises(ValueError, match=r"epsilon_end=0.5 must lie between 0 and epsilon_start=0.02; use 0.02\."):
        action_values.check_epsilons(0.02, 0.5)
    action_values.check_epsilons(0.5, 0.5)
    jax.eval_shape(lambda x: action_values.check_epsilons(x, 0.5), 0.1)
