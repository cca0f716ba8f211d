"""TD3: smoothed targets, its losses by hand, the first critic for the policy, noise in acting, and the probe."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podium import testing
from podium.agents import td3
from podium.continuous import critic_ensemble, deterministic_policy
from podium.ops.bounds import Bounds
from podium.placement.anakin import Anakin
from podium.replay import Batch
from podium.types import ArraySpec, EnvSpec

SPEC = EnvSpec("test", ArraySpec((3,)), ArraySpec((2,), low=[-2.0, 0.0], high=[2.0, 1.0]))
SMALL: dict[str, Any] = {"batch_size": 16, "buffer_capacity": 256, "min_replay_size": 32, "hidden_sizes": (8,)}


def test_target_noise_is_clipped_and_so_is_the_action() -> None:
    noise = jnp.array([[1.0], [10.0], [-10.0], [10.0]])
    # 0.2 * 1; clipped to 0.5 and -0.5; 0.8 + 0.5 is no action.
    found = td3.smoothed(jnp.array([[0.0], [0.0], [0.0], [0.8]]), noise, 0.2, 0.5)
    np.testing.assert_allclose(found, [[0.2], [0.5], [-0.5], [1.0]], rtol=1e-6)


def test_target_by_hand() -> None:
    rows = Batch((), jnp.zeros(2), jnp.array([1.0, 2.0]), jnp.array([0.5, 0.0]), ())
    # 1 + 0.5 * min(3, 4); a terminated one is its reward.
    np.testing.assert_allclose(td3.target(rows, jnp.array([[3.0, 9.0], [4.0, 8.0]])), [2.5, 2.0])


def test_gradients_are_those_of_the_losses_written_out() -> None:
    agent = td3.make(td3.Config(policy_delay=1, target_noise=0.5, **SMALL))
    state, key, rng = agent.init(jax.random.key(0), SPEC), jax.random.key(3), np.random.default_rng(0)
    state = state._replace(target_params=jax.tree.map(lambda x: 0.5 * x, state.target_params))
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    unit = jnp.tanh(draw(16, 2))
    rows = Batch(draw(16, 3), Bounds.of(SPEC, "", "").to_env(unit), draw(16), jnp.full(16, 0.9), draw(16, 3))
    grads, aux = jax.jit(agent.grad)(key, state, rows)

    first = jnp.zeros(16, bool)
    pi = lambda params, obs: deterministic_policy((8,)).unroll(params, (), obs, first)
    q = lambda params, obs, action: critic_ensemble(2, (8,)).unroll(params, (), (obs, action), first)
    noise = np.clip(0.5 * np.asarray(jax.random.normal(key, (16, 2))), -0.5, 0.5)
    next_action = np.clip(np.asarray(pi(state.target_params.policy, rows.next_obs)) + noise, -1, 1)
    next_q = np.asarray(q(state.target_params.critic, rows.next_obs, jnp.asarray(next_action)))
    target = np.asarray(rows.reward) + 0.9 * next_q.min(0)
    values = np.asarray(q(state.params.critic, rows.obs, unit))
    np.testing.assert_allclose(aux.metrics["loss"], ((values - target) ** 2).sum(0).mean(), rtol=1e-4)
    np.testing.assert_allclose(aux.metrics["q_mean"], values.mean(), rtol=1e-4, atol=1e-5)
    bias = grads.parts.critic["value"]["bias"][:, 0]
    np.testing.assert_allclose(bias, 2 * (values - target).mean(1), rtol=1e-4, atol=1e-5)

    # The policy follows the first critic alone (Fujimoto et al. 2018, algorithm 1).
    expected = jax.grad(lambda params: -q(state.params.critic, rows.obs, pi(params, rows.obs))[0].mean())(
        state.params.policy
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), grads.parts.policy, expected)


def test_exploration_is_normal_noise_clipped_to_the_bounds() -> None:
    agent = td3.make(td3.Config(warmup_steps=0, exploration_noise=0.1, **SMALL))
    params = agent.actor(agent.init(jax.random.key(0), SPEC))
    keys, obs, first = jax.random.split(jax.random.key(1), 4000), jnp.ones((4000, 3)), jnp.zeros(4000, bool)
    act = jax.jit(agent.act, static_argnums=5)
    played, greedy = (np.asarray(act(keys, params, (), obs, first, greedy).action) for greedy in (False, True))
    # A tenth of half the range: 0.2 of 4 units, 0.05 of 1.
    np.testing.assert_allclose((played - greedy).std(0), [0.2, 0.05], rtol=0.05)
    np.testing.assert_allclose((played - greedy).mean(0), [0.0, 0.0], atol=0.02)


@pytest.mark.slow
def test_it_finds_the_best_action() -> None:
    config = td3.Config(
        gamma=0.5,
        learning_rate=3e-3,
        critic_learning_rate=3e-3,
        batch_size=64,
        buffer_capacity=4096,
        min_replay_size=64,
        warmup_steps=256,
        hidden_sizes=(32,),
    )
    agent, env = td3.make(config), testing.probe_continuous(target=0.5)
    program = Anakin(devices=1).build(agent, env, num_envs=4, rollout_length=1, num_lanes=1, max_updates=600)
    state, _ = program.chunk(program.init(0), 600)
    params = agent.actor(program.agent_state(state))
    keys, obs, first = jax.random.split(jax.random.key(0), 1), jnp.ones((1, 1)), jnp.zeros(1, bool)
    np.testing.assert_allclose(agent.act(keys, params, (), obs, first, True).action, 0.5, atol=0.1)
