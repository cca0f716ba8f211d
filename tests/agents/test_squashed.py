"""Squashed policies of ppo, a2c and impala: actions within bounds, weighed as drawn, and bounds that nothing learns."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import podium
from podium.agents import a2c, impala, ppo
from podium.networks import drawn
from podium.ops.distributions import DiagGaussian, TanhNormal
from podium.placement.anakin import Anakin
from podium.types import ArraySpec, DiscreteSpec, EnvSpec

SPEC = EnvSpec("test", ArraySpec((3,)), ArraySpec((2,), low=[-2.0, 0.0], high=[2.0, 1.0]))
ALL = pytest.mark.parametrize(
    ("module", "fields"),
    [(ppo, {"num_minibatches": 1}), (a2c, {}), (impala, {"memory": "gru", "memory_size": 4})],
    ids=["ppo", "a2c", "impala gru"],
)

LEARNING = pytest.mark.parametrize(
    ("module", "fields"),
    [pytest.param(*case, marks=[] if case[0] is ppo else pytest.mark.slow) for case in ALL.args[1]],
    ids=["ppo", "a2c", "impala gru"],
)


def make(module: Any, squash: bool = True, **fields: Any) -> Any:
    return module.make(module.Config(squash=squash, hidden_sizes=(8,), **fields))


@ALL
def test_actions_lie_within_bounds_and_learning_sees_what_was_drawn(
    module: Any, fields: dict[str, Any], experience: Any
) -> None:
    agent = make(module, **fields)
    state = agent.init(jax.random.key(0), SPEC)
    trajectory = experience(agent, agent.actor(state), SPEC)
    raw = drawn(trajectory)
    expected = np.array([0.0, 0.5]) + np.tanh(raw) * np.array([2.0, 0.5])
    np.testing.assert_allclose(trajectory.action, expected, atol=1e-6)
    plan = jax.jit(agent.plan)(jax.random.key(0), state, trajectory)
    np.testing.assert_array_equal(plan.data.action, raw)


@ALL
def test_at_the_bounds_themselves_nothing_is_lost(module: Any, fields: dict[str, Any]) -> None:
    """Where tanh is 1 in float32 the ratio of what learns to what acted is still 1, and gradients are finite."""
    agent = make(module, **fields)
    state = agent.init(jax.random.key(0), SPEC)
    params = state.params
    params["policy"]["bias"] = jnp.array([30.0, -30.0])
    program = lambda keys: agent.act(keys, agent.actor(state._replace(params=params)), agent.carry(SPEC, 4), *rest)
    rest = jnp.ones((4, 3)), jnp.zeros(4, bool), False
    output = jax.jit(program)(jax.random.split(jax.random.key(1), 4))
    np.testing.assert_allclose(output.action, np.tile([2.0, 0.0], (4, 1)))
    policy = TanhNormal(jnp.array([30.0, -30.0]), jnp.zeros(2))
    assert np.isfinite(output.extras.log_prob).all()
    slope = jax.grad(lambda mean: policy._replace(mean=mean).log_prob(output.extras.raw).sum())(policy.mean)
    assert np.isfinite(slope).all()


@LEARNING
def test_bounds_are_nobodys_to_learn(module: Any, fields: dict[str, Any]) -> None:
    agent, env = make(module, **fields), podium.envs.make("Pendulum-v1")
    program = Anakin(1).build(agent, env, num_envs=4, rollout_length=4, max_updates=5)
    state, metrics = program.chunk(program.init(0), 5)
    policy = program.agent_state(state).params["policy"]
    np.testing.assert_array_equal([policy["bounds"].low, policy["bounds"].high], [[-2.0], [2.0]])
    assert np.isfinite(metrics["entropy"]).all() and metrics["finite"].all()


@pytest.mark.parametrize("module", [ppo, a2c, impala])
def test_what_cannot_be_squashed_is_refused(module: Any) -> None:
    agent = make(module)
    for action, words in (
        (DiscreteSpec(3), r"are discrete, but squash=True needs .*; leave squash out"),
        (ArraySpec((2,)), r"between low=\[-inf, -inf\] and high=\[inf, inf\], but squash=True needs"),
    ):
        with pytest.raises(ValueError, match=words):
            agent.init(jax.random.key(0), EnvSpec("test", ArraySpec((3,)), action))
    with pytest.raises(ValueError, match="squash=1 must be True or False"):
        make(module, squash=1)  # type: ignore[arg-type]


def test_without_it_nothing_is_added() -> None:
    agent = make(ppo, squash=False)
    state = agent.init(jax.random.key(0), SPEC)
    assert "bounds" not in state.params["policy"]
    keys = jax.random.split(jax.random.key(1), 4)
    output = agent.act(keys, agent.actor(state), (), jnp.ones((4, 3)), jnp.zeros(4, bool), False)
    assert output.extras.raw is None


def test_the_entropy_has_the_gradient_of_a_mean_over_samples() -> None:
    """Quadrature has no noise; a million samples agree with it, of the value and of its slopes."""
    noise = jax.random.normal(jax.random.key(0), (1_000_000, 1))

    def sampled(mean: jax.Array, log_std: jax.Array) -> jax.Array:
        return -jnp.mean(TanhNormal(mean, log_std).draw(noise)[1])

    arguments = jnp.array([0.4]), jnp.array([-0.3])
    exact = jax.value_and_grad(lambda *x: TanhNormal(*x).entropy().sum(), (0, 1))(*arguments)
    found = jax.jit(jax.value_and_grad(sampled, (0, 1)))(*arguments)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=0.01), found, exact)
    assert float(exact[0]) < float(DiagGaussian(*arguments).entropy().sum())
