"""VDN: a team's value is the sum of its agents'."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from alike import assert_close

import podium
from everywhere import ONE_DEVICE, PLACEMENTS, all_but, state_under
from podium import testing
from podium.agents import dqn, vdn
from podium.env import Env, auto_reset
from podium.replay import Batch
from podium.rollout import begin, rollout
from podium.types import Array, Key, PyTree, TimeStep

SIZES: dict[str, Any] = {"hidden_sizes": (16,), "learning_rate": 1e-2}
OFF = {"buffer_capacity": 2048, "min_replay_size": 64, "batch_size": 64, "num_updates": 4, "epsilon_decay_steps": 1000}
CONFIG = vdn.Config(**SIZES, **OFF)


def batch(number: int, size: int = 5) -> tuple[dqn.Values, Batch]:
    keys = jax.random.split(jax.random.key(3), 6)
    shape = (size, number, 4)
    value, next_value, next_target_value = (3 * jax.random.normal(key, shape) for key in keys[:3])
    action = jax.random.randint(keys[3], (size, number), 0, 4)
    discount = jnp.array([0.9, 0.0, 0.9, 0.9, 0.9])
    rows = Batch((), action, jax.random.normal(keys[4], (size,)), discount, (), jnp.array([1.0, 1.0, 0.0, 1.0, 1.0]))
    return dqn.Values(value, next_value, next_target_value), rows


@pytest.mark.parametrize("double", [True, False])
def test_alone_its_loss_is_dqns(double: bool) -> None:
    config = vdn.Config(double=double, huber_delta=1.0)
    values, rows = batch(1)
    found, aux = vdn.loss(config, values, rows)
    one = dqn.Values(*(x[:, 0] for x in values[:3]), ())
    expected, of_one = dqn.loss(config, one, rows._replace(action=rows.action[:, 0]))
    assert found == expected
    jax.tree.map(np.testing.assert_array_equal, aux, of_one)


def test_the_teams_error_and_its_gradient_by_hand() -> None:
    """Two agents: each chosen value gets the derivative of one and the same error."""
    value = jnp.array([[[1.0, 5.0], [2.0, 7.0]]])
    following = jnp.array([[[4.0, 3.0], [0.0, 6.0]]])
    rows = Batch((), jnp.array([[0, 1]]), jnp.array([2.0]), jnp.array([0.5]), (), None)
    config = vdn.Config(huber_delta=100.0)
    of = lambda value: vdn.loss(config, dqn.Values(value, following, following), rows)
    # Target 2 + 0.5 (4 + 6) = 7; the team's value 1 + 7 = 8; error -1, half its square 0.5, slope 1.
    (total, aux), gradient = jax.value_and_grad(of, has_aux=True)(value)
    assert total == 0.5 and aux.priorities.tolist() == [1.0] and aux.metrics["q_mean"] == 8
    assert gradient.tolist() == [[[1.0, 0.0], [0.0, 1.0]]]


def _paid_as_a_team(env: Env) -> Env:
    """Return the environment with a common reward, of which no agent sees whose it is."""

    def step(key: Key, state: PyTree, action: Array) -> tuple[PyTree, TimeStep]:
        state, timestep = env.step(key, state, action)
        return state, timestep._replace(reward=jnp.broadcast_to(timestep.reward.mean(), timestep.reward.shape))

    return env._replace(step=step)


@pytest.mark.slow
def test_it_learns_from_a_common_reward() -> None:
    env = _paid_as_a_team(testing.probe_team(3, dies=True))
    result = podium.train(vdn.make(CONFIG), env, num_steps=8000, num_envs=16, rollout_length=8, progress=False)
    assert result.summary["eval_return"] == pytest.approx(2.0, abs=0.1)


def test_the_replay_holds_steps_of_the_team() -> None:
    env, agent = auto_reset(testing.probe_team(3, 3, dies=True)), vdn.make(CONFIG)
    state = agent.init(jax.random.key(0), env.spec)
    start = begin(jax.random.key(1), env, jnp.arange(4), ())
    _, trajectory, _ = rollout(jax.random.key(2), agent, env, agent.actor(state), start, 6, jnp.int32(0))
    stored = agent.plan(jax.random.key(3), state, trajectory).data
    assert stored.reward.shape == stored.valid.shape == (6, 4) and stored.action.shape == (6, 4, 3)
    np.testing.assert_allclose(stored.reward, trajectory.reward.mean(-1))
    assert stored.valid.all()  # Two of three live throughout.
    dead = trajectory._replace(valid=jnp.zeros_like(trajectory.valid).at[0].set(True))
    assert agent.plan(jax.random.key(3), state, dead).data.valid.sum() == 4
    assert int(agent.observe(state, trajectory).env_steps) == 24


def test_agents_act_as_those_of_dqn_do() -> None:
    env, agent = testing.probe_team(3), vdn.make(CONFIG)
    params = agent.actor(agent.init(jax.random.key(0), env.spec))
    _, timestep = jax.vmap(env.reset)(jax.random.split(jax.random.key(1), 4))
    keys, first = jax.random.split(jax.random.key(2), 4), jnp.ones(4, bool)
    action = agent.act(keys, params, (), timestep.obs, first, True).action
    one = dqn.make(CONFIG)
    rows = jax.tree.map(lambda x: x[:, 1], timestep.obs)
    np.testing.assert_array_equal(action[:, 1], one.act(keys, params, (), rows, first, True).action)
    drawn = agent.act(jax.random.split(jax.random.key(4), 4), params, (), timestep.obs, first, False).action
    assert drawn.shape == (4, 3) and (drawn < 3).all()


@functools.cache
def by_one_device() -> Any:
    return state_under(ONE_DEVICE, vdn.make(CONFIG), testing.probe_team(3, 3, dies=True), num_lanes=8)


@pytest.mark.slow
@pytest.mark.parametrize("placement", all_but("two devices", "central inference"))
def test_every_placement_learns_the_same(placement: str) -> None:
    env = testing.probe_team(3, 3, dies=True)
    assert_close(state_under(PLACEMENTS[placement], vdn.make(CONFIG), env, num_lanes=8), by_one_device(), relative=0)


@pytest.mark.slow
def test_a_resumed_run_is_the_same(tmp_path: Any) -> None:
    def train(folder: str, num_steps: int, **more: Any) -> str:
        sizes = {"num_envs": 8, "rollout_length": 8, "eval_every": 256, "checkpoint_every": 256, "progress": False}
        env = testing.probe_team(3, dies=True)
        result = podium.train(vdn.make(CONFIG), env, num_steps=num_steps, run_dir=tmp_path / folder, **sizes, **more)
        return str(result.summary["params_sha256"])

    whole = train("whole", 512)
    train("halves", 256)
    assert train("halves", 512, resume=True) == whole


def test_one_agent_is_refused() -> None:
    with pytest.raises(ValueError, match="CartPole-v1 has one agent"):
        vdn.make().init(jax.random.key(0), podium.envs.make("CartPole-v1").spec)
