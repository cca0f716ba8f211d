"""IMPALA: on-policy it is A2C, off-policy its losses against a loop, rows that are none, and values known on paper."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from alike import assert_close

from podium.agent import Agent
from podium.agents import a2c, impala
from podium.networks import actor_critic

SMALL: dict[str, Any] = {"hidden_sizes": (8,), "memory_size": 5, "gamma": 0.9}
KEY = jax.random.key(0)


def make(**fields: Any) -> Agent:
    return impala.make(impala.Config(**{**SMALL, **fields}))


def gradient(agent: Agent, state: Any, trajectory: Any) -> Any:
    """Return gradient and metrics for the whole rollout."""

    @jax.jit
    def compute(state: Any, trajectory: Any) -> Any:
        plan = agent.plan(KEY, state, trajectory)
        minibatch = plan.data, plan.per_env
        if plan.unit == "step":
            minibatch = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), plan.data)
        return agent.grad(KEY, state, (minibatch, agent.statistics(minibatch)))

    found, aux = jax.device_get(compute(state, trajectory))
    return found, aux.metrics


@pytest.mark.parametrize(("memory", "lambda_"), [("none", 1.0), pytest.param("lstm", 0.7, marks=pytest.mark.slow)])
def test_on_policy_it_is_a2c(memory: str, lambda_: float, experience: Any, spec: Any) -> None:
    agent = make(memory=memory, vtrace_lambda=lambda_)
    other = a2c.make(a2c.Config(**SMALL, memory=memory, gae_lambda=lambda_))
    state = agent.init(KEY, spec)
    trajectory = experience(agent, state.params, spec)
    found, metrics = gradient(agent, state, trajectory)
    expected, others = gradient(other, other.init(KEY, spec), trajectory)
    assert_close(found, expected)
    assert_close({name: metrics[name] for name in others}, others)
    assert_close((metrics["rho"], metrics["approx_kl"]), (1.0, 0.0))


@pytest.mark.parametrize("memory", ["none", pytest.param("gru", marks=pytest.mark.slow)])
def test_targets_are_those_of_the_network_that_learns(memory: str, experience: Any, spec: Any) -> None:
    agent = make(memory=memory, rho_bar=1.2, c_bar=0.9, value_coef=0.7, entropy_coef=0.1)
    state, acted = agent.init(KEY, spec), agent.init(jax.random.key(5), spec)
    state.params["policy"]["bias"] = jnp.array([0.5, -0.5, 0.0])
    trajectory = experience(agent, acted.params, spec)
    network = actor_critic((8,), "tanh", memory, 5)
    unroll = jax.jit(network.unroll)
    output = unroll(state.params, trajectory.carry, trajectory.obs, trajectory.first)
    t = jax.device_get(trajectory)
    num_steps, num_envs = t.reward.shape
    # Every observation reached, with the memory that acting left, and no episode begun.
    rows = jax.tree.map(lambda x: x.reshape(1, -1, *x.shape[2:]), (t.extras.memory, t.next_obs))
    start = jax.tree.map(lambda m: m[0], rows[0])
    reached = unroll(state.params, start, rows[1], np.zeros((1, num_steps * num_envs), bool))
    reached = np.asarray(reached.value).reshape(num_steps, num_envs)
    value, log_prob = np.asarray(output.value), np.asarray(output.policy.log_prob(trajectory.action))
    ratio = np.exp(log_prob - t.extras.log_prob)
    assert (ratio > 1.2).any() and (ratio < 0.9).any()
    target, policy_loss = np.zeros((2, num_steps, num_envs))
    for b in range(num_envs):
        following = 0.0  # v - V of the row behind.
        for i in reversed(range(num_steps)):
            last = t.terminated[i, b] or t.truncated[i, b]
            ahead = reached[i, b] if last or i == num_steps - 1 else value[i + 1, b]
            discount = 0.0 if t.terminated[i, b] else 0.9
            following = 0.0 if last else following
            rho, c = min(1.2, ratio[i, b]), min(0.9, ratio[i, b])
            advantage = rho * (t.reward[i, b] + discount * (ahead + following) - value[i, b])
            delta = rho * (t.reward[i, b] + discount * ahead - value[i, b])
            following = delta + discount * c * following
            target[i, b] = value[i, b] + following
            policy_loss[i, b] = -log_prob[i, b] * advantage
    _, metrics = gradient(agent, state, trajectory)
    means = {"policy_loss": policy_loss.mean(), "value_loss": 0.5 * np.square(target - value).mean()}
    means |= {"entropy": np.asarray(output.policy.entropy()).mean(), "rho": np.minimum(1.2, ratio).mean()}
    means |= {"approx_kl": (ratio - 1 - np.log(ratio)).mean()}
    means["loss"] = means["policy_loss"] + 0.7 * means["value_loss"] - 0.1 * means["entropy"]
    assert_close(metrics, means, 1e-4)


def test_only_log_probability_value_and_entropy_have_gradients(experience: Any, spec: Any) -> None:
    # Of the loss with everything else held at what it is: targets, importance weights, bootstraps.
    agent = make()
    state, acted = agent.init(KEY, spec), agent.init(jax.random.key(5), spec)
    trajectory = experience(agent, acted.params, spec)
    batch = agent.plan(KEY, state, trajectory).data
    output = actor_critic((8,)).unroll(state.params, (), batch.obs, batch.first)

    def total(log_ratio: Any, next_value: Any) -> Any:
        return impala.loss(agent.config, output, next_value, batch._replace(log_prob=log_ratio))[0]

    by_behaviour, by_next = jax.grad(total, (0, 1))(batch.log_prob, output.value)
    np.testing.assert_array_equal(by_behaviour, 0)
    np.testing.assert_array_equal(by_next, 0)


def test_rows_that_are_none_change_nothing(experience: Any, spec: Any, masked: Any) -> None:
    agent = make()
    state, acted = agent.init(KEY, spec), agent.init(jax.random.key(5), spec)
    trajectory = masked(experience(agent, acted.params, spec))
    none = ~trajectory.valid
    assert none.any()
    extras = trajectory.extras._replace(log_prob=trajectory.extras.log_prob - 3.0 * none)
    action = jnp.where(none, 0, trajectory.action)
    other = trajectory._replace(reward=trajectory.reward + 100.0 * none, action=action, extras=extras)
    assert_close(gradient(agent, state, trajectory), gradient(agent, state, other))
    assert int(agent.observe(state, trajectory).env_steps) == trajectory.valid.sum()


BAD: list[tuple[str, Any]] = [
    *[(name, value) for name in ("learning_rate", "optimizer_eps", "rho_bar", "c_bar") for value in (0, -1.0)],
    *[(name, -1) for name in ("anneal_steps", "value_coef", "entropy_coef", "max_grad_norm")],
    *[(name, value) for name in ("gamma", "vtrace_lambda", "rmsprop_decay") for value in (-0.1, 1.1)],
    *[("optimizer", "sgd"), ("torso", "resnet"), ("dtype", "float16"), ("memory", "rnn"), ("activation", "swish")],
    *[("num_minibatches", 0), ("num_minibatches", 1.5), ("hidden_sizes", ()), ("c_bar", 1.5)],
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_bad_fields_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name}="):
        make(**{name: value})


@pytest.mark.parametrize(
    ("name", "memory"),
    [
        ("probe_truncation", "none"),
        ("probe_termination", "none"),
        pytest.param("probe_truncation", "gru", marks=pytest.mark.slow),
    ],
)
def test_values_are_those_on_paper(name: str, memory: str, values_on_paper: Any) -> None:
    fields = {"optimizer": "adam"} if name == "probe_truncation" else {}
    length = 5 if name == "probe_truncation" else 3
    settings = {"learning_rate": 0.03, "anneal_steps": 800 * 4 * length, "max_grad_norm": 0.0, "memory": memory}
    values_on_paper(make(**settings, **fields), name, 800)
