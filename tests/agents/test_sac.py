"""SAC: its losses by hand and against numeric integrals, its temperature, and that it solves the continuous probe."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from podium import testing
from podium.agents import sac
from podium.ops.bounds import Bounds
from podium.placement.anakin import Anakin
from podium.replay import Batch
from podium.types import ArraySpec, EnvSpec

SPEC = EnvSpec("test", ArraySpec((3,)), ArraySpec((2,), low=[-2.0, 0.0], high=[2.0, 1.0]))
SMALL: dict[str, Any] = {"batch_size": 16, "buffer_capacity": 256, "min_replay_size": 32, "hidden_sizes": (8,)}


def batch(size: int = 16, discount: float = 0.9) -> Batch:
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    action = Bounds.of(SPEC, "", "").to_env(jnp.tanh(draw(size, 2)))
    return Batch(draw(size, 3), action, draw(size), jnp.full(size, discount), draw(size, 3))


def test_target_by_hand() -> None:
    rows = Batch((), jnp.zeros(2), jnp.array([1.0, 2.0]), jnp.array([0.5, 0.0]), ())
    # 1 + 0.5 * (min(3, 4) - 0.1 * -2) = 2.6; a terminated one is its reward.
    found = sac.soft_target(rows, jnp.array([[3.0, 9.0], [4.0, 8.0]]), jnp.array([-2.0, 5.0]), jnp.float32(0.1))
    np.testing.assert_allclose(found, [2.6, 2.0], rtol=1e-6)


def test_policy_and_temperature_losses_by_hand() -> None:
    q, log_prob = jnp.array([[1.0, 5.0], [2.0, 4.0]]), jnp.array([-1.0, 3.0])
    # (0.5 * -1 - 1 + 0.5 * 3 - 4) / 2 = -2.
    np.testing.assert_allclose(sac.policy_loss(q, log_prob, jnp.float32(0.5), None), -2.0)
    np.testing.assert_allclose(sac.policy_loss(q, log_prob, jnp.float32(0.5), jnp.array([True, False])), -1.5)
    # -0.5 * (mean(-1, 3) - 2) = 0.5.
    np.testing.assert_allclose(sac.temperature_loss(jnp.log(0.5), log_prob, -2.0, None), 0.5, rtol=1e-6)


@pytest.mark.parametrize(("entropy", "rises"), [(-5.0, True), (0.5, False)])
def test_the_temperature_rises_where_the_entropy_is_below_its_target(entropy: float, rises: bool) -> None:
    slope = jax.grad(sac.temperature_loss)(jnp.float32(-1.0), jnp.full(4, -entropy), -2.0, None)
    assert (slope < 0) == rises
    np.testing.assert_allclose(slope, np.exp(-1.0) * (entropy + 2.0), rtol=1e-6)


def test_gradients_are_those_of_the_losses_written_out() -> None:
    """The whole of `grad`, for two critics and two actions, against a loop in NumPy for its values."""
    config = sac.Config(initial_temperature=0.3, target_entropy_scale=0.5, **SMALL)
    agent = sac.make(config)
    state, rows, key = agent.init(jax.random.key(0), SPEC), batch(), jax.random.key(3)
    state = state._replace(target_critic=jax.tree.map(lambda x: 0.5 * x, state.target_critic))
    grads, aux = jax.jit(agent.grad)(key, state, rows)
    noise, next_noise = np.asarray(jax.random.normal(key, (2, 16, 2)))

    def dense(x: np.ndarray, layer: Any) -> np.ndarray:
        return x @ np.asarray(layer["kernel"], np.float64) + np.asarray(layer["bias"], np.float64)

    def features(x: np.ndarray, torso: Any) -> np.ndarray:
        return np.maximum(dense(x, torso["params"]["Dense_0"]), 0.0)

    def act(obs: Any, noise: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        x = features(np.asarray(obs, np.float64), state.params.policy["torso"])
        std = np.exp(-5 + 3.5 * (1 + np.tanh(dense(x, state.params.policy["log_std"]))))
        mean = dense(x, state.params.policy["mean"])
        raw = mean + std * noise
        return np.tanh(raw), (stats.norm.logpdf(raw, mean, std) - np.log1p(-(np.tanh(raw) ** 2))).sum(-1)

    def q(params: Any, obs: Any, action: np.ndarray) -> np.ndarray:
        x, values = np.concatenate([np.asarray(obs, np.float64), action], -1), []
        for i in range(2):
            one = jax.tree.map(lambda leaf, i=i: leaf[i], params)
            values.append(dense(features(x, one["torso"]), one["value"])[:, 0])
        return np.stack(values)

    next_action, next_log_prob = act(rows.next_obs, next_noise)
    bootstrap = q(state.target_critic, rows.next_obs, next_action).min(0) - 0.3 * next_log_prob
    target = np.asarray(rows.reward) + 0.9 * bootstrap
    unit = (np.asarray(rows.action) - [0.0, 0.5]) / [2.0, 0.5]
    values = q(state.params.critic, rows.obs, unit)
    np.testing.assert_allclose(aux.metrics["loss"], 0.5 * ((values - target) ** 2).sum(0).mean(), rtol=1e-4)
    np.testing.assert_allclose(aux.metrics["q_mean"], values.mean(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(aux.metrics["entropy"], -next_log_prob.mean(), rtol=1e-4)
    np.testing.assert_allclose(aux.metrics["temperature"], 0.3, rtol=1e-6)
    # The last layer's bias moves a value by as much: the gradient is the mean error, of each critic by itself.
    bias = grads.parts.critic["value"]["bias"][:, 0]
    np.testing.assert_allclose(bias, (values - target).mean(1), rtol=1e-4, atol=1e-5)
    _, log_prob = act(rows.obs, noise)
    np.testing.assert_allclose(grads.parts.log_temperature, -0.3 * (log_prob.mean() - 1.0), rtol=1e-4, atol=1e-6)

    def policy_loss(shift: float) -> float:
        x = features(np.asarray(rows.obs, np.float64), state.params.policy["torso"])
        std = np.exp(-5 + 3.5 * (1 + np.tanh(dense(x, state.params.policy["log_std"]))))
        raw = dense(x, state.params.policy["mean"]) + shift * np.array([1.0, 0.0]) + std * noise
        density = stats.norm.logpdf(noise) - np.log(std) - np.log1p(-(np.tanh(raw) ** 2))
        return float((0.3 * density.sum(-1) - q(state.params.critic, rows.obs, np.tanh(raw)).min(0)).mean())

    slope = (policy_loss(1e-5) - policy_loss(-1e-5)) / 2e-5
    np.testing.assert_allclose(grads.parts.policy["mean"]["bias"][0], slope, rtol=1e-3, atol=1e-5)


def test_actions_count_in_the_bounds_units_of_no_environment() -> None:
    """An environment whose actions are a thousand times as large has the same gradients."""
    agent, rows, key = sac.make(sac.Config(**SMALL)), batch(), jax.random.key(0)
    wide = EnvSpec("wide", SPEC.obs, ArraySpec((2,), low=[-2000.0, 0.0], high=[2000.0, 1000.0]))
    grad = jax.jit(agent.grad)
    one = grad(key, agent.init(jax.random.key(1), SPEC), rows)
    other = grad(key, agent.init(jax.random.key(1), wide), rows._replace(action=1000 * rows.action))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), one, other)


@pytest.mark.slow
def test_it_finds_the_best_action_and_lowers_the_temperature_until_the_entropy_meets_its_target() -> None:
    config = sac.Config(
        gamma=0.5,
        learning_rate=3e-3,
        critic_learning_rate=3e-3,
        temperature_learning_rate=1e-2,
        batch_size=64,
        buffer_capacity=4096,
        min_replay_size=64,
        warmup_steps=64,
        hidden_sizes=(32,),
    )
    agent, env = sac.make(config), testing.probe_continuous(target=0.5)
    program = Anakin(devices=1).build(agent, env, num_envs=4, rollout_length=1, num_lanes=1, max_updates=1200)
    state, metrics = program.chunk(program.init(0), 1200)
    params = agent.actor(program.agent_state(state))
    keys, obs, first = jax.random.split(jax.random.key(0), 1), jnp.ones((1, 1)), jnp.zeros(1, bool)
    np.testing.assert_allclose(agent.act(keys, params, (), obs, first, True).action, 0.5, atol=0.1)
    # A reward of -(u - 0.5)^2 and an entropy of -1 want a temperature of 2 * exp(2 * -1) / (2 pi e) = 0.016; on its way
    # there from 1 the critics' error of 0.01 keeps the policy wider.
    np.testing.assert_allclose(metrics["temperature"][-1], 0.016, atol=0.004)
    np.testing.assert_allclose(np.mean(metrics["entropy"][-100:]), -0.75, atol=0.4)
