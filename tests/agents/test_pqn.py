"""PQN: its loss by hand, its targets against a loop at every kind of end, its schedules, and values known on paper."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podium.agent import Agent, policy_leaves
from podium.agents import pqn
from podium.networks import q_network
from podium.types import ArraySpec, DiscreteSpec, EnvSpec

SMALL: dict[str, Any] = {"hidden_sizes": (8,), "memory_size": 5, "gamma": 0.9, "num_epochs": 1, "num_minibatches": 1}
KEY = jax.random.key(0)


def make(**fields: Any) -> Agent:
    return pqn.make(pqn.Config(**{**SMALL, **fields}))


def planned(agent: Agent, state: Any, trajectory: Any) -> Any:
    return jax.jit(functools.partial(agent.plan, KEY))(state, trajectory)


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


@pytest.mark.parametrize("valid", [None, jnp.array([True, False, True])])
def test_loss_by_hand(valid: Any) -> None:
    # Q(s, a) is 2, 5, -1; targets 1, 9, 1: errors 1, -4, -2, so (1 + 16 + 4) / 6, or (1 + 4) / 4 without the second.
    value = jnp.array([[2.0, 7.0], [7.0, 5.0], [-1.0, 7.0]])
    rows = jnp.zeros((3, 1)), jnp.zeros(3, bool), jnp.array([0, 1, 0]), jnp.array([1.0, 9.0, 1.0])
    batch = pqn.Batch(*rows, valid, None if valid is None else jnp.float32(2))
    total, metrics = pqn.loss(pqn.Config(), value, batch)
    every = valid is None
    np.testing.assert_allclose(total, 21 / 6 if every else 5 / 4)
    assert metrics["loss"] == total
    np.testing.assert_allclose(metrics["q_mean"], 2.0 if every else 0.5)
    np.testing.assert_allclose(metrics["td_error_abs"], 7 / 3 if every else 1.5)


@pytest.mark.parametrize("memory", ["none", pytest.param("gru", marks=pytest.mark.slow)])
def test_targets_are_a_loop_of_the_values_that_acting_saw_and_of_true_last_observations(
    memory: str, experience: Any, spec: Any
) -> None:
    agent = make(memory=memory, q_lambda=0.7, reward_scale=0.5)
    state = agent.init(KEY, spec)
    t = jax.device_get(experience(agent, agent.actor(state), spec))
    num_steps, num_envs = t.reward.shape
    network = q_network((8,), memory=memory, memory_size=5, layer_norm=True)
    unroll = jax.jit(network.unroll)
    acted = np.asarray(unroll(state.params, t.carry, t.obs, t.first)).max(-1)
    np.testing.assert_allclose(acted, t.extras.value, rtol=1e-4, atol=1e-5)
    # Every observation reached, with the memory that acting left, and no episode begun.
    rows = jax.tree.map(lambda x: x.reshape(1, -1, *x.shape[2:]), (t.extras.memory, t.next_obs))
    start = jax.tree.map(lambda m: m[0], rows[0])
    reached = unroll(state.params, start, rows[1], np.zeros((1, num_steps * num_envs), bool))
    reached = np.asarray(reached).max(-1).reshape(num_steps, num_envs)
    expected = np.zeros_like(t.reward)
    for b in range(num_envs):
        for i in reversed(range(num_steps)):
            following = reached[i, b]
            if i < num_steps - 1 and not (t.terminated[i, b] or t.truncated[i, b]):
                following = 0.3 * reached[i, b] + 0.7 * expected[i + 1, b]
            expected[i, b] = 0.5 * t.reward[i, b] + (0.0 if t.terminated[i, b] else 0.9 * following)
    np.testing.assert_allclose(planned(agent, state, t).data.target, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("memory", ["none", pytest.param("gru", marks=pytest.mark.slow)])
def test_the_gradient_is_that_of_the_loss_and_rows_that_are_none_have_no_part_in_it(
    memory: str, experience: Any, spec: Any, masked: Any
) -> None:
    agent = make(memory=memory)
    state = agent.init(KEY, spec)
    trajectory = masked(experience(agent, agent.actor(state), spec))
    none = ~trajectory.valid
    found, metrics = gradient(agent, state, trajectory)
    changed = trajectory._replace(
        action=jnp.where(none, 2 - trajectory.action, trajectory.action), reward=trajectory.reward + 50.0 * none
    )
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5),
        (found, metrics),
        gradient(agent, state, changed),
    )
    target = planned(agent, state, trajectory).data.target
    network = q_network((8,), memory=memory, memory_size=5, layer_norm=True)

    def loss(params: Any) -> Any:
        value = network.unroll(params, trajectory.carry, trajectory.obs, trajectory.first)
        chosen = jnp.take_along_axis(value, trajectory.action[..., None], -1)[..., 0]
        return jnp.sum(jnp.where(none, 0.0, 0.5 * (chosen - target) ** 2)) / jnp.sum(~none)

    total, expected = jax.jit(jax.value_and_grad(loss))(state.params)
    np.testing.assert_allclose(metrics["loss"], total, rtol=1e-4)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4), found, expected)


def test_epsilon_and_the_rate_fall_with_environment_steps(experience: Any, spec: Any) -> None:
    agent = make(epsilon_start=0.9, epsilon_end=0.1, epsilon_decay_steps=96, anneal_steps=192, learning_rate=0.1)
    state = agent.init(KEY, spec)
    trajectory = experience(agent, agent.actor(state), spec)
    ones = jax.tree.map(jnp.ones_like, state.params)
    epsilons, moved = [], []
    for _ in range(5):
        epsilons.append(float(agent.actor(state).epsilon))
        # RAdam's first steps are the mean of gradients, here of norm 10 at most.
        step = jax.tree.map(lambda x, y: x - y, state.params, agent.apply(state, ones).params)
        moved.append(float(jnp.sqrt(sum(jnp.sum(x**2) for x in jax.tree.leaves(step)))))
        state = agent.observe(state, trajectory)
    np.testing.assert_allclose(epsilons, [0.9, 0.5, 0.1, 0.1, 0.1], rtol=1e-5)
    size = sum(x.size for x in jax.tree.leaves(state.params)) ** 0.5
    np.testing.assert_allclose(moved, min(size, 10) * 0.1 * np.array([1, 0.75, 0.5, 0.25, 0]), rtol=1e-4, atol=1e-6)


def test_all_of_the_network_and_nothing_else_is_the_policys(spec: Any) -> None:
    agent = make(normalize_obs=True, memory="gru")
    shapes = jax.eval_shape(lambda: agent.init(KEY, spec))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(shapes)]
    for path, marked in zip(paths, policy_leaves(agent, shapes), strict=True):
        assert marked == path.startswith(".params"), path


def test_minatars_planes_go_through_its_convolution() -> None:
    agent = make(torso="minatar_cnn", hidden_sizes=(128,))
    planes = EnvSpec("planes", ArraySpec((10, 10, 4), bool, False, True), DiscreteSpec(3))
    shapes = jax.eval_shape(lambda: agent.init(KEY, planes))
    kernels = {x.shape for x in jax.tree.leaves(shapes.params) if x.ndim > 1}
    assert kernels == {(3, 3, 4, 16), (8 * 8 * 16, 128), (128, 3)}
    # A LayerNorm after each layer: scale and bias beside its kernel and bias.
    assert sum(x.ndim == 1 for x in jax.tree.leaves(shapes.params)) == 2 * 2 + 3


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["none", "gru"])
@pytest.mark.parametrize("name", ["probe_truncation", "probe_termination"])
def test_values_on_paper(name: str, memory: str, values_on_paper: Any) -> None:
    fields = {"q_lambda": 0.5, "learning_rate": 5e-3, "num_epochs": 4, "memory": memory, "epsilon_decay_steps": 1000}
    values_on_paper(make(**fields), name, 300)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("learning_rate", 0.0, "must be finite and greater than 0; 0.0005 is usual"),
        ("gamma", 1.5, "must be between 0 and 1; 0.99 is usual"),
        ("q_lambda", -0.1, "must be between 0 and 1; 0.65 is usual"),
        ("num_epochs", 0, "must be an integer of 1 or more"),
        ("num_minibatches", 1.5, "must be an integer of 1 or more"),
        ("epsilon_start", 2.0, "must be between 0 and 1"),
        ("epsilon_decay_steps", 0, "must be an integer of 1 or more"),
        ("reward_scale", 0.0, "must be finite and greater than 0; 1.0 is usual"),
        ("max_grad_norm", -1.0, "must be finite and 0 or more; 10.0 is usual"),
        ("anneal_steps", -1, "must be finite and 0 or more"),
        ("optimizer_eps", 0.0, "must be finite and greater than 0"),
        ("normalize_obs", 1, "must be True or False"),
        ("layer_norm", "yes", "must be True or False; True is usual"),
        ("hidden_sizes", (), "must be a sequence of positive integers"),
        ("memory_size", 0, "must be an integer of 1 or more; 64 is usual"),
    ],
)
def test_a_field_out_of_range_is_refused(field: str, value: Any, message: str) -> None:
    fields = {field: value, "memory": "gru"}
    named = f"{field}=({re.escape(repr(value))}|\\({value},\\)) {message}"
    with pytest.raises(ValueError, match=named):
        pqn.make(pqn.Config(**fields))


def test_an_epsilon_that_rises_an_unknown_memory_and_continuous_actions_are_refused(spec: Any) -> None:
    with pytest.raises(ValueError, match="epsilon_end=0.5 must lie between 0 and epsilon_start=0.1; use 0.05"):
        make(epsilon_start=0.1, epsilon_end=0.5)
    with pytest.raises(ValueError, match="memory='rnn'"):
        make(memory="rnn")
    with pytest.raises(
        ValueError, match="actions of box are continuous; action values need discrete ones; use ppo or sac"
    ):
        make().init(KEY, EnvSpec("box", spec.obs, ArraySpec((2,))))
