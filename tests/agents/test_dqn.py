"""DQN: its loss by hand, its schedules, what it learns, and what it leaves in a compiled program."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import podium
from podium.agent import Agent
from podium.agents import dqn
from podium.learn import learn, num_updates
from podium.networks import Network, actor_critic, q_network
from podium.ops.counts import Count
from podium.replay import Batch
from podium.types import ArraySpec, DiscreteSpec, EnvSpec, Trajectory

SPEC = EnvSpec("test", ArraySpec((4,)), DiscreteSpec(3))
SMALL = dqn.Config(batch_size=16, buffer_capacity=256, min_replay_size=32, hidden_sizes=(8,), huber_delta=1.0)


def batch(**fields: object) -> Batch:
    """Return two transitions; the second is two steps long and ends in a termination."""
    return Batch(
        **{
            "obs": jnp.zeros((2, 1)),
            "action": jnp.array([1, 0]),
            "reward": jnp.array([1.0, 2.0]),
            "discount": jnp.array([0.5, 0.0]),
            "next_obs": jnp.zeros((2, 1)),
            **fields,
        }
    )


VALUES = dqn.Values(
    value=jnp.array([[9.0, 3.0], [1.5, 9.0]]),
    next_value=jnp.array([[5.0, 4.0], [7.0, 7.0]]),
    next_target_value=jnp.array([[2.0, 8.0], [6.0, 6.0]]),
)


# Double: the online network prefers action 0, the target network values it 2: y = 1 + 0.5 * 2 = 2, error 2 - 3 = -1.
# Not double: the target network's own best is 8: y = 1 + 0.5 * 8 = 5, error 5 - 3 = 2.
# Terminated: y = 2, error 2 - 1.5 = 0.5. Huber with delta 1: 0.5 e^2 up to 1, then |e| - 0.5.
@pytest.mark.parametrize(
    ("double", "td_error", "expected"),
    [(True, [1.0, 0.5], (0.5 + 0.125) / 2), (False, [2.0, 0.5], (1.5 + 0.125) / 2)],
)
def test_loss_by_hand(double: bool, td_error: list[float], expected: float) -> None:
    total, aux = dqn.loss(dqn.Config(double=double, huber_delta=1.0), VALUES, batch())
    np.testing.assert_allclose(total, expected)
    np.testing.assert_allclose(aux.priorities, td_error)
    np.testing.assert_allclose(aux.metrics["q_mean"], (3 + 1.5) / 2)
    np.testing.assert_allclose(aux.metrics["td_error_abs"], np.mean(td_error))
    np.testing.assert_allclose(aux.metrics["loss"], expected)


def test_huber_delta_is_used() -> None:
    # Errors 2 and 0.5 with delta 4 are both in the square: (2 + 0.125) / 2.
    total, _ = dqn.loss(dqn.Config(double=False, huber_delta=4.0), VALUES, batch())
    np.testing.assert_allclose(total, (2 + 0.125) / 2)


def test_rows_without_weight_are_left_out_and_others_weighted() -> None:
    total, aux = dqn.loss(dqn.Config(huber_delta=1.0), VALUES, batch(weight=jnp.array([0.0, 1.0])))
    np.testing.assert_allclose(total, 0.125)
    np.testing.assert_allclose(aux.metrics["q_mean"], 1.5)
    total, _ = dqn.loss(dqn.Config(huber_delta=1.0), VALUES, batch(weight=jnp.array([0.5, 1.0])))
    np.testing.assert_allclose(total, (0.5 * 0.5 + 0.125) / 2)


def test_gradient_moves_the_chosen_value_only_and_not_the_target() -> None:
    def total(value: jax.Array, next_target_value: jax.Array) -> jax.Array:
        return dqn.loss(
            dqn.Config(huber_delta=1.0), VALUES._replace(value=value, next_target_value=next_target_value), batch()
        )[0]

    by_value, by_target = jax.grad(total, (0, 1))(VALUES.value, VALUES.next_target_value)
    # d/dQ of the mean Huber loss: -clip(error, -1, 1) / 2 at the chosen action.
    np.testing.assert_allclose(by_value, [[0.0, 0.5], [-0.25, 0.0]])
    np.testing.assert_array_equal(by_target, 0.0)


def test_dueling_advantages_have_mean_zero() -> None:
    agent = dqn.make(dataclasses.replace(SMALL, dueling=True))
    params = agent.init(jax.random.key(0), SPEC).params
    obs = jax.random.normal(jax.random.key(1), (5, 4))
    unroll = q_network((8,), "relu", dueling=True).unroll
    value = unroll(params, (), obs, jnp.zeros(5, bool))
    hidden = jax.nn.relu(obs @ params["torso"]["params"]["Dense_0"]["kernel"])
    np.testing.assert_allclose(value.mean(-1), hidden @ params["value"]["kernel"][:, 0], rtol=1e-5, atol=1e-6)
    assert "value" not in dqn.make(SMALL).init(jax.random.key(0), SPEC).params


@pytest.mark.parametrize(("period", "tau"), [(1, 1.0), (3, 1.0), (1, 0.25), (2, 0.25)])
def test_target_moves_at_every_period_by_tau(period: int, tau: float) -> None:
    agent = dqn.make(dataclasses.replace(SMALL, target_update_period=period, tau=tau, learning_rate=0.1))
    state = agent.init(jax.random.key(0), SPEC)
    grads = jax.tree.map(jnp.ones_like, state.params)
    apply = jax.jit(agent.apply)
    target = state.target_params
    jax.tree.map(np.testing.assert_array_equal, target, state.params)
    for count in range(1, 8):
        state = apply(state, grads)
        assert int(state.updates) == count
        if count % period == 0:
            target = jax.tree.map(lambda p, t: tau * p + (1 - tau) * t, state.params, target)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), target, state.target_params)


def test_the_learning_rate_falls_linearly_to_zero() -> None:
    agent = dqn.make(dataclasses.replace(SMALL, learning_rate=0.1, anneal_steps=1000))
    state = agent.init(jax.random.key(0), SPEC)
    grads = jax.tree.map(jnp.ones_like, state.params)
    apply = jax.jit(agent.apply)
    for steps, factor in ((0, 1.0), (250, 0.75), (1000, 0.0), (2000, 0.0)):
        after = apply(state._replace(env_steps=Count.zero().add(steps)), grads).params
        # Adam's first step is as long as the rate.
        moved = lambda new, old: np.testing.assert_allclose(old - new, 0.1 * factor, atol=1e-5)  # noqa: B023
        jax.tree.map(moved, after, state.params)


def trajectory(time: int, num_envs: int, valid: jax.Array | None = None) -> Trajectory:
    zeros = jnp.zeros((time, num_envs))
    no = zeros.astype(bool)
    obs = jnp.zeros((time, num_envs, 4))
    action = zeros.astype(jnp.int32)
    return Trajectory(obs, action, zeros, no, no, obs, no, (), (), (), jnp.int32(0), valid)


def test_epsilon_falls_linearly_with_environment_steps() -> None:
    agent = dqn.make(dataclasses.replace(SMALL, epsilon_start=0.9, epsilon_end=0.1, epsilon_decay_steps=40))
    state = agent.init(jax.random.key(0), SPEC)
    epsilons = []
    for _ in range(7):
        epsilons.append(float(agent.actor(state).epsilon))
        state = agent.observe(state, trajectory(2, 4))
    np.testing.assert_allclose(epsilons, [0.9, 0.74, 0.58, 0.42, 0.26, 0.1, 0.1], rtol=1e-5)
    # Rows that are no transition are no steps.
    valid = jnp.zeros((2, 4), bool).at[0].set(True)
    assert float(agent.observe(state, trajectory(2, 4, valid)).env_steps) == 7 * 8 + 4


def test_acting_explores_at_the_rate_epsilon_and_greedily_not_at_all() -> None:
    agent = dqn.make(SMALL)
    params = agent.actor(agent.init(jax.random.key(0), SPEC))
    keys = jax.random.split(jax.random.key(1), 4000)
    obs = jnp.broadcast_to(jnp.array([1.0, -2.0, 3.0, 0.5]), (4000, 4))
    first = jnp.zeros(4000, bool)
    act = jax.jit(agent.act, static_argnums=5)
    best = np.asarray(act(keys, params, (), obs, first, True).action)
    assert best.dtype == np.int32 and np.unique(best).size == 1
    for epsilon, different in ((0.0, 0.0), (0.3, 0.2), (1.0, 2 / 3)):
        action = act(keys, params._replace(epsilon=jnp.float32(epsilon)), (), obs, first, False).action
        assert action.dtype == jnp.int32
        assert abs(np.mean(action != best) - different) < 4 * np.sqrt(0.25 / 4000)
    # One key an environment: half of the batch acts as it does in the whole.
    half = act(keys[:2000], params, (), obs[:2000], first[:2000], False).action
    np.testing.assert_array_equal(half, act(keys, params, (), obs, first, False).action[:2000])


# One state, so the best value V obeys V = 1 + gamma V when nothing ever terminates (V = 2 with gamma = 0.5), although
# every window is cut. Where half of the steps terminate, the target of action 1 is 1 half the time and 1 + V / 2
# otherwise, so the mean is V = 1 + V / 4 = 4 / 3. Action 0 is worth 1 less; n-step returns of random play are lower,
# so they are checked with single-step windows only.
@pytest.mark.parametrize(
    ("end", "value", "config"),
    [
        ("truncated", 2.0, {}),
        ("terminated", 4 / 3, {}),
        ("both", 4 / 3, {"double": False, "dueling": True}),
    ],
)
def test_learns_the_value_that_the_kind_of_end_implies(
    end: str, value: float, config: dict, learnt_in_one_state: Any
) -> None:
    config = dqn.Config(
        learning_rate=3e-3,
        gamma=0.5,
        huber_delta=10.0,
        batch_size=128,
        num_updates=16,
        buffer_capacity=512,
        min_replay_size=64,
        target_update_period=20,
        hidden_sizes=(16,),
        **config,
    )
    state = learnt_in_one_state(dqn.make(config), end)
    network = q_network(config.hidden_sizes, config.activation, config.dueling)
    learnt = network.unroll(state.params, (), jnp.ones((1, 1)), jnp.zeros(1, bool))[0]
    np.testing.assert_allclose(learnt, [value - 1, value], atol=0.12)


def program(agent: Agent, num_lanes: int):
    """Return one iteration, add + sample + grad + apply, as `podium.learn` runs it."""

    def step(state: dqn.State, replay_state: object, trajectory: Trajectory, key: jax.Array) -> tuple:
        learned = learn(key, agent, state, replay_state, trajectory, num_lanes)
        return learned.state, learned.replay

    return step


def random_trajectory(seed: int, time: int, num_envs: int) -> Trajectory:
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.normal(size=(time, num_envs, *shape)).astype(np.float32)
    flag = lambda: rng.random((time, num_envs)) < 0.1
    action = rng.integers(3, size=(time, num_envs), dtype=np.int32)
    return Trajectory(draw(4), action, draw(), flag(), flag(), draw(4), flag(), (), (), (), np.int32(0))


def initial(agent: Agent, seed: int = 0) -> tuple[dqn.State, object]:
    state = agent.init(jax.random.key(seed), SPEC)
    item = jax.tree.map(lambda x: x[0, 0], agent.plan(jax.random.key(0), state, random_trajectory(0, 4, 16)).data)
    return state, agent.replay.init(item, 16, 8, 4)


def test_frames_stay_bytes_until_the_network_sees_them() -> None:
    agent, frames = dqn.make(SMALL), jnp.zeros((4, 16, 8, 8, 1), jnp.uint8)

    def learnt_from(key: jax.Array) -> Any:
        seen = random_trajectory(0, 4, 16)._replace(obs=frames, next_obs=frames)
        state = agent.init(key, EnvSpec("frames", ArraySpec((8, 8, 1), np.uint8, 0, 255), DiscreteSpec(3)))
        items = agent.plan(key, state, seen).data
        held = agent.replay.init(jax.tree.map(lambda x: jnp.zeros(x.shape[2:], x.dtype), items), 16, 8, 4)
        return held.items, agent.replay.sample(key, agent.replay.add(held, items))[0]

    for rows in jax.eval_shape(learnt_from, jax.random.key(0)):
        assert rows.obs.dtype == rows.next_obs.dtype == jnp.uint8


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices; tests/conftest.py makes them")
def test_on_a_mesh_nothing_but_sums_crosses_devices_and_the_numbers_agree() -> None:
    agent = dqn.make(dataclasses.replace(SMALL, n_step=3, num_updates=2, dueling=True))
    mesh = jax.make_mesh((8,), ("env",), axis_types=(AxisType.Auto,))
    place = lambda spec: lambda x: jax.device_put(x, NamedSharding(mesh, spec(x)))
    whole = place(lambda x: PartitionSpec())
    by_lane = place(lambda x: PartitionSpec("env") if np.ndim(x) else PartitionSpec())
    by_env = place(lambda x: PartitionSpec(None, "env") if np.ndim(x) else PartitionSpec())
    state, replay_state = initial(agent)
    many = jax.tree.map(whole, state), jax.tree.map(by_lane, replay_state)
    one = state, replay_state
    step = jax.jit(program(agent, 8))
    for i in range(5):
        one = step(*one, random_trajectory(i, 4, 16), jax.random.key(i))
        many = step(*many, jax.tree.map(by_env, random_trajectory(i, 4, 16)), jax.random.key(i))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), one[0].params, many[0].params)
    lowered = step.lower(*many, jax.tree.map(by_env, random_trajectory(0, 4, 16)), jax.random.key(0))
    text = lowered.compile().as_text()
    for collective in ("all-gather", "all-to-all", "collective-permute"):
        assert collective not in text
    assert "all-reduce" in text


def test_seeds_batch_under_vmap() -> None:
    agent = dqn.make(SMALL)
    step, keys = program(agent, 8), jax.random.split(jax.random.key(5), 2)
    apart = [initial(agent, seed) for seed in range(2)]
    stack = lambda trees: jax.tree.map(lambda *x: np.stack(x), *trees)
    together = stack(apart)
    one, both = jax.jit(step), jax.jit(jax.vmap(step))
    for i in range(3):
        rollouts = [random_trajectory(10 * i + seed, 4, 16) for seed in range(2)]
        apart = [one(*carry, rollouts[seed], keys[seed]) for seed, carry in enumerate(apart)]
        together = both(*together, stack(rollouts), keys)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), stack(apart), together)


def test_a_state_can_be_donated() -> None:
    agent = dqn.make(SMALL)
    step = jax.jit(program(agent, 8), donate_argnums=(0, 1))
    state, replay_state = step(*initial(agent), random_trajectory(0, 4, 16), jax.random.key(0))
    assert int(state.updates) == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("learning_rate", 0.0),
        ("learning_rate", float("inf")),
        ("anneal_steps", -1),
        ("gamma", -0.1),
        ("gamma", 1.01),
        ("n_step", 0),
        ("double", 1),
        ("dueling", "yes"),
        ("batch_size", 0),
        ("num_updates", 0),
        ("samples_per_insert", -1.0),
        ("samples_per_insert", float("nan")),
        ("buffer_capacity", 0),
        ("min_replay_size", 0),
        ("min_replay_size", 50_001),
        ("target_update_period", 0),
        ("target_update_period", 2.5),
        ("tau", 0.0),
        ("tau", 1.5),
        ("epsilon_start", 1.5),
        ("epsilon_end", -0.1),
        ("epsilon_end", 1.5),
        ("epsilon_decay_steps", 0),
        ("huber_delta", 0.0),
        ("max_grad_norm", -1.0),
        ("max_grad_norm", float("nan")),
        ("adam_eps", 0.0),
        ("hidden_sizes", ()),
        ("hidden_sizes", (64, 0)),
        ("activation", "sine"),
        ("torso", "resnet"),
        ("dtype", "float16"),
    ],
)
def test_bad_fields_are_refused_by_name_and_value(field: str, value: object) -> None:
    shown = repr(value) if isinstance(value, str) else str(value)
    with pytest.raises(ValueError, match=re.escape(f"{field}={shown}")):
        dqn.make(dataclasses.replace(dqn.Config(), **{field: value}))


@pytest.mark.parametrize(("samples", "length", "updates"), [(2.0, 4, 8), (0.5, 4, 2), (0.25, 4, 1), (4.0, 1, 4)])
def test_samples_per_insert_decide_the_number_of_minibatches(samples: float, length: int, updates: int) -> None:
    """Minibatches of 16 from 16 environments: each sample per insert is a minibatch for every step of a rollout."""
    agent = dqn.make(dataclasses.replace(SMALL, samples_per_insert=samples, num_updates=3))
    plan = jax.eval_shape(agent.plan, jax.random.key(0), (), random_trajectory(0, length, 16))
    assert num_updates(agent.replay, plan) == updates == samples * length * 16 / 16


def test_samples_per_insert_that_are_no_whole_minibatches_are_refused() -> None:
    env = podium.envs.make("podium/Catch")
    for samples, length, use in ((0.6, 4, "0.5 or 0.75"), (0.1, 4, "0.25"), (0.5, 1, "1")):
        agent = dqn.make(dataclasses.replace(SMALL, samples_per_insert=samples))
        words = f"samples_per_insert={samples:g} asks for .* after each {length} x 16 steps.* use {use}, or another"
        with pytest.raises(ValueError, match=words):
            podium.Anakin(1).build(agent, env, num_envs=16, rollout_length=length)
    with pytest.raises(ValueError, match="samples_per_insert=1e.30 asks for .*; use less"):
        podium.Anakin(1).build(
            dqn.make(dataclasses.replace(SMALL, samples_per_insert=1e30)), env, num_envs=16, rollout_length=1
        )
    # What a sentence says, six digits of it, will do.
    config = dataclasses.replace(SMALL, samples_per_insert=1.0, batch_size=32, buffer_capacity=960)
    with pytest.raises(ValueError, match="use 2.66667, or another"):
        podium.Anakin(1).build(dqn.make(config), env, num_envs=12, rollout_length=1)
    config = dataclasses.replace(config, samples_per_insert=2.66667)
    podium.Anakin(1).build(dqn.make(config), env, num_envs=12, rollout_length=1)


def test_every_field_is_checked_above() -> None:
    marks = test_bad_fields_are_refused_by_name_and_value.pytestmark
    assert {field for field, _ in marks[0].args[1]} == {field.name for field in dataclasses.fields(dqn.Config)}


def test_continuous_actions_and_networks_with_memory_are_refused() -> None:
    spec = EnvSpec("pendulum", ArraySpec((3,)), ArraySpec((1,), low=-2, high=2))
    with pytest.raises(
        ValueError, match="actions of pendulum are continuous; action values need discrete ones; use ppo or sac"
    ):
        dqn.make(SMALL).init(jax.random.key(0), spec)
    with pytest.raises(ValueError, match="network has memory"):
        dqn.make(SMALL, network=actor_critic(memory="gru"))


def test_another_network_and_another_loss_are_used() -> None:
    table = Network(
        init=lambda key, spec: jnp.zeros(spec.action.num_values),
        carry=lambda num_envs: (),
        apply=lambda params, memory, obs, first: (jnp.broadcast_to(params, (*first.shape, 3)), memory),
        unroll=lambda params, memory, obs, first: jnp.broadcast_to(params, (*first.shape, 3)),
    )

    def doubled(config: dqn.Config, values: dqn.Values, batch: Batch) -> tuple:
        total, aux = dqn.loss(config, values, batch)
        return 2 * total, aux

    rows = batch(action=jnp.array([1, 2]))
    state = dqn.make(SMALL, table).init(jax.random.key(0), SPEC)
    gradient, _ = dqn.make(SMALL, table).grad(jax.random.key(0), state, rows)
    # Errors 1 and 2: -clip(error, -1, 1) / 2 at actions 1 and 2.
    np.testing.assert_allclose(gradient, [0.0, -0.5, -0.5])
    gradient, _ = dqn.make(SMALL, table, doubled).grad(jax.random.key(0), state, rows)
    np.testing.assert_allclose(gradient, [0.0, -1.0, -1.0])
