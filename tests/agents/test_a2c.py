"""A2C: the step that PPO takes when nothing of PPO is left, rows that are none, and values known on paper."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from alike import assert_close

from podium.agent import Agent
from podium.agents import a2c, ppo
from podium.learn import learn

SMALL: dict[str, Any] = {"hidden_sizes": (8,), "memory_size": 5, "gamma": 0.9}


def make(**fields: Any) -> Agent:
    return a2c.make(a2c.Config(**{**SMALL, **fields}))


@pytest.mark.parametrize("memory", ["none", pytest.param("gru", marks=pytest.mark.slow)])
def test_ppo_of_one_epoch_and_minibatch_takes_the_same_step(memory: str, experience: Any, spec: Any) -> None:
    shared = {**SMALL, "memory": memory, "gae_lambda": 0.8, "learning_rate": 0.01, "anneal_steps": 1000}
    ours = a2c.make(a2c.Config(**shared, optimizer="adam", entropy_coef=0.02))
    theirs = ppo.make(
        ppo.Config(**shared, num_epochs=1, num_minibatches=1, normalize_advantage=False, entropy_coef=0.02)
    )
    before = ours.init(jax.random.key(0), spec)
    trajectory = experience(ours, before.params, spec)

    def step(agent: Agent) -> Any:
        state = agent.init(jax.random.key(0), spec)
        function = lambda state: learn(jax.random.key(1), agent, state, (), trajectory, 4)
        return jax.jit(function)(state)

    found, expected = step(ours), step(theirs)
    assert_close(found.state.params, expected.state.params, 1e-6)
    assert_close(found.metrics["value_loss"], expected.metrics["value_loss"], 1e-6)
    assert float(found.state.env_steps) == float(expected.state.env_steps) == trajectory.reward.size
    # Something did move.
    moved = jax.tree.map(lambda x, y: float(abs(x - y).max()), found.state.params, before.params)
    assert max(jax.tree.leaves(moved)) > 0.005


def test_rows_that_are_none_change_nothing(experience: Any, spec: Any, masked: Any) -> None:
    agent = make()
    state = agent.init(jax.random.key(0), spec)
    trajectory = masked(experience(agent, state.params, spec))
    none = ~trajectory.valid
    assert none.any()

    @jax.jit
    def gradient(trajectory: Any) -> Any:
        flat = lambda x: x.reshape(-1, *x.shape[2:])
        batch = jax.tree.map(flat, agent.plan(jax.random.key(0), state, trajectory).data)
        given = batch, agent.statistics(batch)
        return agent.grad(jax.random.key(0), state, given), agent.observe(state, trajectory).env_steps

    extras = trajectory.extras._replace(value=trajectory.extras.value - 50.0 * none)
    action = jnp.where(none, 0, trajectory.action)
    other = trajectory._replace(reward=trajectory.reward + 100.0 * none, action=action, extras=extras)
    found, changed = gradient(trajectory), gradient(other)
    assert_close(found, changed, 1e-5)
    assert int(found[1]) == trajectory.valid.sum()


BAD: list[tuple[str, Any]] = [
    *[(name, value) for name in ("learning_rate", "optimizer_eps") for value in (0, -1.0, float("nan"))],
    *[(name, -1) for name in ("anneal_steps", "value_coef", "entropy_coef", "max_grad_norm")],
    *[(name, value) for name in ("gamma", "gae_lambda", "rmsprop_decay") for value in (-0.1, 1.1)],
    *[("optimizer", "sgd"), ("torso", "resnet"), ("dtype", "float16"), ("memory", "rnn"), ("activation", "swish")],
    ("hidden_sizes", ()),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_bad_fields_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name}="):
        make(**{name: value})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["probe_truncation", "probe_termination"])
def test_values_are_those_on_paper(name: str, values_on_paper: Any) -> None:
    fields = {"optimizer": "adam"} if name == "probe_truncation" else {}
    length = 5 if name == "probe_truncation" else 3
    values_on_paper(make(learning_rate=0.03, anneal_steps=800 * 4 * length, max_grad_norm=0.0, **fields), name, 800)
