"""What sac and td3 share: bad input, counts of updates, random warm-up, bounds, delays, and values on paper."""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import podium
from podium import testing
from podium.agent import Agent, policy_leaves
from podium.agents import reppo, sac, td3
from podium.continuous import critic_ensemble
from podium.learn import num_updates
from podium.networks import actor_critic
from podium.placement.anakin import Anakin
from podium.replay import Batch
from podium.testing import assert_compiles_once
from podium.types import ArraySpec, DiscreteSpec, EnvSpec, Trajectory

BOTH = pytest.mark.parametrize("module", [sac, td3], ids=["sac", "td3"])
SPEC = EnvSpec("test", ArraySpec((3,)), ArraySpec((2,), low=[-2.0, 0.0], high=[2.0, 1.0]))
SMALL: dict[str, Any] = {"batch_size": 16, "buffer_capacity": 256, "min_replay_size": 32, "hidden_sizes": (8,)}

REFUSED: list[tuple[str, object]] = [
    ("learning_rate", 0.0),
    ("critic_learning_rate", float("inf")),
    ("gamma", 1.01),
    ("tau", 0.0),
    ("n_step", 0),
    ("num_critics", 0),
    ("policy_delay", 0),
    ("policy_delay", 1.5),
    ("batch_size", 0),
    ("updates_per_step", 0.0),
    ("updates_per_step", -1.0),
    ("updates_per_step", float("nan")),
    ("buffer_capacity", 0),
    ("min_replay_size", 1_000_001),
    ("warmup_steps", -1),
    ("warmup_steps", 2.5),
    ("max_grad_norm", -1.0),
    ("adam_eps", 0.0),
    ("adam_eps", 1e-46),
    ("actor_obs", 3),
    ("critic_obs", None),
    ("normalize_obs", 1),
    ("dtype", "float16"),
    ("hidden_sizes", (64, 0)),
    ("activation", "sine"),
]
OWN: dict[Any, list[tuple[str, object]]] = {
    sac: [
        ("temperature_learning_rate", -1e-3),
        ("initial_temperature", 0.0),
        ("target_entropy_scale", -1.0),
    ],
    td3: [("exploration_noise", -0.1), ("target_noise", -0.1), ("target_noise_bound", -0.5)],
}


@pytest.mark.parametrize(
    ("module", "field", "value"),
    [(module, *case) for module in (sac, td3) for case in REFUSED + OWN[module]],
)
def test_bad_fields_are_refused_by_name_and_value(module: Any, field: str, value: object) -> None:
    shown = repr(value) if isinstance(value, str) else str(value)
    with pytest.raises(ValueError, match=re.escape(f"{field}={shown}")):
        module.make(dataclasses.replace(module.Config(), **{field: value}))


@BOTH
def test_what_is_no_config_of_it_is_refused(module: Any) -> None:
    for config in ({"tau": 0.1}, None, {sac: td3, td3: sac}[module].Config()):
        with pytest.raises(ValueError, match=rf"is no podium.agents.{module.__name__.split('.')[-1]}.Config; make one"):
            module.make(config)


@BOTH
def test_every_field_is_checked_above(module: Any) -> None:
    checked = {field for field, _ in REFUSED + OWN[module]}
    assert checked == {field.name for field in dataclasses.fields(module.Config)}


@BOTH
def test_discrete_and_unbounded_actions_are_refused_before_any_compile(module: Any) -> None:
    with pytest.raises(ValueError, match=r"podium/Catch are discrete, but (sac|td3) needs .*; use ppo, or dqn"):
        Anakin(1).build(module.make(), podium.envs.make("podium/Catch"), num_envs=1, rollout_length=1)
    spec = EnvSpec("far", ArraySpec((3,)), ArraySpec((2,)))
    with pytest.raises(ValueError, match=r"the actions of far lie between low=\[-inf, -inf\] and high=\[inf, inf\]"):
        module.make().init(jax.random.key(0), spec)
    words = EnvSpec("words", DiscreteSpec(5), SPEC.action)
    with pytest.raises(ValueError, match="normalize_obs=True: the observations of words are discrete"):
        module.make(module.Config(normalize_obs=True)).init(jax.random.key(0), words)


def trajectory(time: int, num_envs: int, seed: int = 0) -> Trajectory:
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.normal(size=(time, num_envs, *shape)), jnp.float32)
    no = jnp.zeros((time, num_envs), bool)
    return Trajectory(draw(3), draw(2), draw(), no, no, draw(3), no, (), (), (), jnp.int32(0))


@pytest.mark.parametrize("module", [sac, td3, reppo], ids=["sac", "td3", "reppo"])
@pytest.mark.parametrize("part", ["policy", "critic"])
def test_what_has_memory_is_refused(module: Any, part: str) -> None:
    with pytest.raises(ValueError, match=f"{part} has memory, but single steps are learnt from; pass one without, or"):
        module.make(**{part: actor_critic(memory="gru")})


@BOTH
def test_updates_per_step_counts_gradient_steps(module: Any) -> None:
    for ratio, time, num_envs, updates in ((1.0, 1, 1, 1), (4.0, 1, 1, 4), (1.0, 2, 4, 8), (0.125, 2, 4, 1)):
        agent = module.make(module.Config(updates_per_step=ratio, **SMALL))
        assert num_updates(agent.replay, agent.plan(jax.random.key(0), (), trajectory(time, num_envs))) == updates
    agent = module.make(module.Config(updates_per_step=0.3, **SMALL))
    words = "updates_per_step=0.3 asks for 1.2 minibatches of batch_size=16 after each 1 x 4 steps, and only whole"
    with pytest.raises(ValueError, match=f"{re.escape(words)}.*; use 0.25 or 0.5, or another rollout_length"):
        Anakin(1).build(agent, podium.envs.make("Pendulum-v1"), num_envs=4, rollout_length=1)


@BOTH
def test_actions_are_uniform_within_bounds_until_the_warm_up_is_over_and_then_the_policys(module: Any) -> None:
    agent = module.make(module.Config(warmup_steps=16, **SMALL))
    state = agent.init(jax.random.key(0), SPEC)
    keys, obs, first = jax.random.split(jax.random.key(1), 4000), jnp.ones((4000, 3)), jnp.zeros(4000, bool)
    act = jax.jit(agent.act, static_argnums=5)
    low, high = np.array([-2.0, 0.0]), np.array([2.0, 1.0])
    for steps in (0, 8, 16, 24):
        params = agent.actor(state)
        action = np.asarray(act(keys, params, (), obs, first, False).action)
        assert (action >= low).all() and (action <= high).all() and action.dtype == np.float32
        quantiles = np.quantile((action - low) / (high - low), [0.1, 0.5, 0.9], axis=0)
        uniform = np.abs(quantiles - np.array([[0.1], [0.5], [0.9]])).max() < 0.03
        assert bool(params.random) == uniform == (steps < 16), (steps, quantiles)
        greedy = np.asarray(act(keys, params, (), obs, first, True).action)
        assert (greedy == greedy[0]).all()
        state = agent.observe(state, trajectory(2, 4))


@BOTH
@pytest.mark.parametrize("delay", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_policy_steps_are_delayed_exactly(module: Any, delay: int) -> None:
    agent = module.make(module.Config(policy_delay=delay, tau=0.25, learning_rate=0.1, **SMALL))
    state = agent.init(jax.random.key(0), SPEC)
    rows = trajectory(1, 16)
    batch = Batch(rows.obs[0], rows.action[0], rows.reward[0], jnp.full(16, 0.9), rows.next_obs[0])
    step = jax.jit(lambda key, state: agent.apply(state, agent.grad(key, state, batch)[0]))
    grad = jax.jit(agent.grad)
    same = lambda a, b: all(jax.tree.leaves(jax.tree.map(lambda x, y: bool((x == y).all()), a, b)))
    for count in range(1, 7):
        grads, _ = grad(jax.random.key(count), state, batch)
        following = step(jax.random.key(count), state)
        due, before, after = count % delay == 0, state.params, following.params
        assert int(following.updates) == count and float(grads.due) == due
        assert not same(before.critic, after.critic)
        assert same(before.policy, after.policy) == (not due)
        assert same(jax.tree.map(jnp.zeros_like, grads.parts.policy), grads.parts.policy) == (not due)
        assert same(state.opt_state.policy, following.opt_state.policy) == (not due)
        if module is sac:
            assert (before.log_temperature == after.log_temperature) == (not due)
            old, new = state.target_critic, following.target_critic
            moved = True
        else:
            old, new, moved = state.target_params.critic, following.target_params.critic, due
        expected = jax.tree.map(lambda p, t: 0.25 * p + 0.75 * t, after.critic, old) if moved else old
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), new, expected)
        state = following
    assert_compiles_once(step, (jax.random.key(0), state))


@BOTH
def test_a_gradient_that_comes_late_steps_what_it_was_taken_for(module: Any) -> None:
    """A server may apply a gradient to a state that has stepped on: whether the policy's is due travels with it."""
    agent = module.make(module.Config(policy_delay=2, **SMALL))
    state = agent.init(jax.random.key(0), SPEC)._replace(updates=jnp.int32(1))
    rows = trajectory(1, 16)
    batch = Batch(rows.obs[0], rows.action[0], rows.reward[0], jnp.full(16, 0.9), rows.next_obs[0])
    grads, _ = jax.jit(agent.grad)(jax.random.key(0), state, batch)
    late = agent.apply(state._replace(updates=jnp.int32(2)), grads)
    assert float(grads.due) == 1.0
    assert not np.array_equal(late.params.policy["mean"]["kernel"], state.params.policy["mean"]["kernel"])


@BOTH
def test_rows_that_are_none_change_no_gradient(module: Any) -> None:
    agent = module.make(module.Config(policy_delay=1, **SMALL))
    state = agent.init(jax.random.key(0), SPEC)
    rows = trajectory(1, 16)
    weight = jnp.ones(16).at[5:].set(0.0)
    batch = Batch(rows.obs[0], rows.action[0], rows.reward[0], jnp.full(16, 0.9), rows.next_obs[0], weight)
    other = batch._replace(reward=batch.reward.at[5:].add(7.0), obs=batch.obs.at[5:].add(1.0))
    grad = jax.jit(agent.grad)
    one, two = (grad(jax.random.key(0), state, rows) for rows in (batch, other))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), one, two)


@BOTH
def test_the_policy_alone_may_evolve(module: Any) -> None:
    agent = module.make(module.Config(normalize_obs=True, **SMALL))
    shapes = jax.eval_shape(lambda key: agent.init(key, SPEC), jax.random.key(0))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(shapes)]
    for mask in (agent, agent._replace(policy_mask=None)):
        moved = [path for path, moves in zip(paths, policy_leaves(mask, shapes), strict=True) if moves]
        assert moved and all(path.startswith(".params.policy") for path in moved)
    assert not any("log_std" in path for path, m in zip(paths, policy_leaves(agent, shapes), strict=True) if m)


def test_critics_are_apart_and_initialised_differently() -> None:
    critic = critic_ensemble(3, (8,))
    params = critic.init(jax.random.key(0), SPEC)
    obs, action, first = jnp.ones((5, 3)), jnp.zeros((5, 2)), jnp.zeros(5, bool)
    values = critic.unroll(params, (), (obs, action), first)
    assert values.shape == (3, 5) and len({float(x) for x in values[:, 0]}) == 3
    alone = critic.unroll(jax.tree.map(lambda x: x[1:2], params), (), (obs, action), first)
    np.testing.assert_allclose(values[1:2], alone, rtol=1e-6)
    by_first = jax.grad(lambda params: critic.unroll(params, (), (obs, action), first)[0].sum())(params)
    assert all(float(jnp.abs(x[1:]).max()) == 0.0 for x in jax.tree.leaves(by_first))


PAPER = {"truncation": [10.0], "termination": [2.71, 1.9, 1.0]}
QUICK_PAPER = {("sac", "truncation", 1), ("td3", "termination", 1)}


# Reward 1 and gamma 0.9: 1 / (1 - 0.9) = 10 where episodes are cut, at whichever step, and 2.71, 1.9, 1 where they end.
@pytest.mark.parametrize(
    ("algorithm", "end", "n_step"),
    [
        pytest.param(*case, marks=[] if case in QUICK_PAPER else pytest.mark.slow)
        for case in itertools.product(("sac", "td3"), PAPER, (1, 3))
    ],
)
def test_values_on_paper(algorithm: str, end: str, n_step: int) -> None:
    module, expected = {"sac": sac, "td3": td3}[algorithm], PAPER[end]
    # An entropy that weighs nothing, so that values are those of rewards.
    own = {"initial_temperature": 1e-6, "temperature_learning_rate": 0.0} if module is sac else {}
    config = module.Config(
        gamma=0.9,
        n_step=n_step,
        tau=0.05,
        learning_rate=1e-3,
        critic_learning_rate=3e-3,
        updates_per_step=1.0,
        batch_size=64,
        buffer_capacity=1024,
        min_replay_size=64,
        hidden_sizes=(16,),
        **own,
    )
    agent: Agent = module.make(config)
    env = getattr(testing, f"probe_{end}")(continuous=True)
    program = Anakin(devices=1).build(agent, env, num_envs=4, rollout_length=3, num_lanes=1, max_updates=150)
    state, metrics = program.chunk(program.init(0), 150)
    assert metrics["finite"].all()
    params = program.agent_state(state).params
    obs = np.eye(len(expected), dtype=np.float32)
    critic = critic_ensemble(config.num_critics, config.hidden_sizes)
    action, first = jnp.full((len(obs), 1), 0.3), jnp.zeros(len(obs), bool)
    value = critic.unroll(params.critic, (), (jnp.asarray(obs), action), first)
    np.testing.assert_allclose(value, np.broadcast_to(expected, value.shape), rtol=0.08)
