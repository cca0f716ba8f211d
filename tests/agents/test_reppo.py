"""REPPO: its returns against a loop, its losses by hand and by numeric slopes, bad input, and ends on paper."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import podium
from podium import continuous, testing
from podium.agent import policy_leaves
from podium.agents import reppo
from podium.continuous import predictive_critic
from podium.ops.histogram import Histogram
from podium.placement.anakin import Anakin
from podium.types import ArraySpec, DiscreteSpec, EnvSpec, Trajectory

SPEC = EnvSpec("test", ArraySpec((3,)), ArraySpec((2,), low=[-2.0, 0.0], high=[2.0, 1.0]))
SMALL: dict[str, Any] = {"hidden_sizes": (8,), "num_bins": 11, "num_epochs": 2, "num_minibatches": 2}

REFUSED: list[tuple[str, object]] = [
    ("learning_rate", 0.0),
    ("anneal_steps", -1),
    ("gamma", 1.01),
    ("td_lambda", -0.1),
    ("kl_bound", 0.0),
    ("initial_kl_multiplier", 0.0),
    ("initial_temperature", -1.0),
    ("target_entropy_scale", -1.0),
    ("num_epochs", 0),
    ("num_minibatches", 2.5),
    ("num_bins", 1),
    ("value_min", 100.0),
    ("value_min", float("-inf")),
    ("value_max", float("nan")),
    ("prediction_coef", -1.0),
    ("max_grad_norm", -1.0),
    ("adam_eps", 0.0),
    ("normalize_obs", 1),
    ("dtype", "float16"),
    ("hidden_sizes", (64, 0)),
    ("activation", "sine"),
]


@pytest.mark.parametrize(("field", "value"), REFUSED)
def test_bad_fields_are_refused_by_name_and_value(field: str, value: object) -> None:
    shown = repr(value) if isinstance(value, str) else str(value)
    with pytest.raises(ValueError, match=re.escape(f"{field}={shown}")):
        reppo.make(dataclasses.replace(reppo.Config(), **{field: value}))


def test_every_field_is_checked_above() -> None:
    own = {field.name for field in dataclasses.fields(reppo.Config)} - {"actor_obs", "critic_obs"}
    assert {field for field, _ in REFUSED} == own, "those two: tests/test_parts_of_observations.py"


def test_actions_and_observations_that_it_cannot_take_are_refused_before_any_compile() -> None:
    with pytest.raises(ValueError, match=r"podium/Catch are discrete, but reppo needs .*; use ppo"):
        Anakin(1).build(reppo.make(), podium.envs.make("podium/Catch"), num_envs=1, rollout_length=1)
    with pytest.raises(ValueError, match=r"the actions of far lie between low=\[-inf, -inf\] and high=\[inf, inf\]"):
        reppo.make().init(jax.random.key(0), EnvSpec("far", ArraySpec((3,)), ArraySpec((2,))))
    with pytest.raises(ValueError, match="normalize_obs=True: the observations of words are discrete"):
        reppo.make().init(jax.random.key(0), EnvSpec("words", DiscreteSpec(5), SPEC.action))
    with pytest.raises(ValueError, match="num_minibatches=64 does not divide the 24 steps.*; use 24"):
        Anakin(1).build(reppo.make(), podium.envs.make("Pendulum-v1"), num_envs=4, rollout_length=6)


def rows(time: int, num_envs: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    ends = rng.random((2, time, num_envs)) < 0.2
    numbers = rng.normal(size=(3, time, num_envs))
    return {"reward": numbers[0], "q": numbers[1], "log_prob": numbers[2], "terminated": ends[0], "truncated": ends[1]}


@pytest.mark.parametrize("td_lambda", [0.0, 0.7, 1.0])
def test_returns_are_those_of_a_loop(td_lambda: float) -> None:
    x, gamma, alpha = rows(9, 5), 0.9, 0.3
    assert (x["terminated"] & x["truncated"]).any()
    expected = np.zeros((9, 5))
    for b in range(5):
        for t in reversed(range(9)):
            if x["terminated"][t, b]:  # Nothing follows: no value, no entropy.
                expected[t, b] = x["reward"][t, b]
                continue
            onwards = x["q"][t, b]
            if t < 8 and not x["truncated"][t, b]:
                onwards = (1 - td_lambda) * onwards + td_lambda * expected[t + 1, b]
            expected[t, b] = x["reward"][t, b] + gamma * (onwards - alpha * x["log_prob"][t, b])
    discount = gamma * (1.0 - x["terminated"])
    last = x["terminated"] | x["truncated"]
    given = (jnp.asarray(y, jnp.float32) for y in (x["reward"], discount, last, x["q"], x["log_prob"]))
    found = jax.jit(reppo.soft_lambda_return)(*given, jnp.float32(alpha), td_lambda)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_without_entropy_and_ends_a_lambda_of_1_gives_the_discounted_sum() -> None:
    reward, zero = jnp.ones((3, 1)), jnp.zeros((3, 1))
    found = reppo.soft_lambda_return(
        reward, 0.5 + zero, zero > 0, jnp.full((3, 1), 8.0), 7 + zero, jnp.float32(0.0), 1.0
    )
    # 1 + 0.5 * (1 + 0.5 * (1 + 0.5 * 8)) = 2.75; the last one bootstraps.
    np.testing.assert_allclose(found[:, 0], [2.75, 3.5, 5.0])


def test_losses_by_hand() -> None:
    config = reppo.Config(kl_bound=0.1, target_entropy_scale=0.5)
    actor = reppo.Actor((), jnp.log(0.2), jnp.log(4.0))
    q, log_prob, kl = jnp.array([3.0, 3.0]), jnp.array([-2.0, -2.0]), jnp.array([0.05, 0.3])
    found = reppo.policy_losses(config, actor, q, log_prob, kl, 2)
    # Near: 0.2 * -2 - 3 = -3.4; far: 4 * 0.3 = 1.2. Temperature: 0.2 * (2 + 1) = 0.6; multiplier: 4 * (0.1 - kl).
    np.testing.assert_allclose(found, [-3.4 + 0.6 + 0.2, 1.2 + 0.6 - 0.8], rtol=1e-5)
    slope = lambda q, log_prob, kl: reppo.policy_losses(config, actor, q, log_prob, kl, 2).sum()
    by_q, by_log_prob, by_kl = jax.grad(slope, (0, 1, 2))(q, log_prob, kl)
    np.testing.assert_allclose([by_q, by_log_prob, by_kl], [[-1, 0], [0.2, 0], [0, 4]], rtol=1e-5)


@pytest.mark.parametrize(("entropy", "kl", "falls", "grows"), [(-0.4, 0.2, True, True), (-1.2, 0.05, False, False)])
def test_the_weights_move_so_that_entropy_and_divergence_meet_their_targets(
    entropy: float, kl: float, falls: bool, grows: bool
) -> None:
    """The target of one action is -0.5 nats: a wider policy lowers the temperature."""
    loss = lambda actor: reppo.policy_losses(
        reppo.Config(), actor, jnp.zeros(1), jnp.full(1, -entropy), jnp.full(1, kl), 1
    ).sum()
    slope = jax.grad(loss)(reppo.Actor((), jnp.float32(-1.0), jnp.float32(-2.0)))
    assert (slope.log_temperature > 0) == falls and (slope.log_kl_multiplier < 0) == grows
    np.testing.assert_allclose(slope.log_temperature, np.exp(-1.0) * (entropy + 0.5), rtol=1e-5)
    np.testing.assert_allclose(slope.log_kl_multiplier, np.exp(-2.0) * (0.1 - kl), rtol=1e-5)


def test_a_critic_that_has_learnt_nothing_says_0() -> None:
    bins = Histogram(-10.0, 10.0, 41)
    critic = predictive_critic(bins, (8,))
    first = jnp.zeros(5, bool)
    judged = critic.unroll(critic.init(jax.random.key(0), SPEC), (), (jnp.ones((5, 3)), jnp.zeros((5, 2))), first)
    assert judged.logits.shape == (5, 41) and judged.features.shape == (5, 8) and judged.prediction.shape == (5, 9)
    np.testing.assert_allclose(bins.mean(judged.logits), 0.0, atol=0.05)


@pytest.fixture(scope="module")
def agent() -> podium.agent.Agent:
    return reppo.make(reppo.Config(value_min=-10.0, value_max=10.0, learning_rate=1e-2, **SMALL))


def played(agent: Any, state: Any, key: jax.Array) -> Trajectory:
    """Return 8 steps of 4 environments of noise, whose actions and extras are those of `act`."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=(8, 4, *shape)), jnp.float32)
    obs, no = draw(3), jnp.zeros((8, 4), bool)
    keys = jax.random.split(key, (8, 4))
    output = jax.vmap(lambda keys, obs: agent.act(keys, agent.actor(state), (), obs, no[0], False))(keys, obs)
    ends = jnp.zeros((8, 4), bool).at[3, 1].set(True)
    return Trajectory(obs, output.action, draw(), ends, ~ends & no, draw(3), no, output.extras, (), (), jnp.int32(0))


def test_the_divergence_begins_at_0_and_rows_that_are_none_change_no_gradient(agent: Any) -> None:
    state = agent.init(jax.random.key(0), SPEC)
    trajectory = played(agent, state, jax.random.key(1))
    plan = jax.jit(agent.plan)
    grad = jax.jit(agent.grad)
    batch = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), plan(jax.random.key(2), state, trajectory).data)
    _, aux = grad(jax.random.key(3), state, batch)
    np.testing.assert_allclose([aux.metrics["kl"], aux.metrics["kl_over_bound"]], 0.0, atol=1e-6)
    valid = jnp.ones(32, bool).at[20:].set(False)
    other = batch._replace(reward=batch.reward.at[20:].add(5.0), target=batch.target.at[20:].add(5.0))
    one, two = (grad(jax.random.key(3), state, x._replace(valid=valid)) for x in (batch, other))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), one, two)
    # The action that was played, in [-1, 1] whatever the bounds are.
    raw = np.arctanh(np.asarray(batch.action, float))
    np.testing.assert_allclose(batch.action, state.bounds.to_unit(trajectory.action).reshape(32, 2))
    assert np.isfinite(raw).all()


def test_a_policy_with_one_deviation_for_all_states_is_compared_row_by_row() -> None:
    plain = continuous.gaussian_policy((8,))
    one = lambda output: output._replace(log_std=output.log_std.reshape(-1, 2)[0])
    policy = plain._replace(
        apply=lambda *given: (one(plain.apply(*given)[0]), ()), unroll=lambda *given: one(plain.unroll(*given))
    )
    agent = reppo.make(reppo.Config(hidden_sizes=(8,), num_bins=11), policy=policy)
    state = agent.init(jax.random.key(0), SPEC)
    trajectory = played(agent, state, jax.random.key(1))
    assert trajectory.extras.log_std.shape == trajectory.extras.mean.shape == (8, 4, 2)


def test_the_policy_alone_may_evolve(agent: Any) -> None:
    shapes = jax.eval_shape(lambda key: agent.init(key, SPEC), jax.random.key(0))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(shapes)]
    for mask in (agent, agent._replace(policy_mask=None)):
        moved = [path for path, moves in zip(paths, policy_leaves(mask, shapes), strict=True) if moves]
        assert moved and all(path.startswith(".params.actor.policy") for path in moved)
    assert not any("log_std" in path for path, m in zip(paths, policy_leaves(agent, shapes), strict=True) if m)


# Reward 1 and gamma 0.9: 1 / (1 - 0.9) = 10 where episodes are cut, at whichever step, and 2.71, 1.9, 1 where they end.
@pytest.mark.slow
@pytest.mark.parametrize(("end", "expected"), [("truncation", [10.0]), ("termination", [2.71, 1.9, 1.0])])
def test_values_on_paper(end: str, expected: list[float]) -> None:
    config = reppo.Config(
        gamma=0.9,
        learning_rate=3e-3,
        value_min=-2.0,
        value_max=14.0,
        num_bins=81,
        # An entropy that weighs nothing, so that values are those of rewards.
        initial_temperature=1e-8,
        num_epochs=4,
        num_minibatches=4,
        hidden_sizes=(16,),
        normalize_obs=False,
    )
    agent, env = reppo.make(config), getattr(testing, f"probe_{end}")(continuous=True)
    program = Anakin(devices=1).build(agent, env, num_envs=8, rollout_length=16, num_lanes=1, max_updates=100)
    state, metrics = program.chunk(program.init(0), 100)
    assert metrics["finite"].all()
    obs, bins = np.eye(len(expected), dtype=np.float32), Histogram(-2.0, 14.0, 81)
    first, action = jnp.zeros(len(obs), bool), jnp.full((len(obs), 1), 0.3)
    critic = predictive_critic(bins, (16,))
    judged = critic.unroll(program.agent_state(state).params.critic, (), (jnp.asarray(obs), action), first)
    np.testing.assert_allclose(bins.mean(judged.logits), expected, rtol=0.08)
    if end == "truncation":  # And the critic foresees the reward.
        np.testing.assert_allclose(judged.prediction[:, -1], 1.0, atol=0.1)
