"""Automatic resets: pools, the first episode's length, and how often an environment is traced."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import podium
from podium import testing
from podium.agents import ppo
from podium.env import auto_reset
from podium.envs import native, wrappers
from podium.evaluate import make_evaluator
from podium.placement.anakin import Anakin
from podium.placement.sebulba import Sebulba

CORRIDOR = native.corridor(length=4, max_steps=6)


def counting(env):
    """Return the environment, and how often each of its functions was called by Python."""
    calls = {"reset": 0, "step": 0}

    def reset(key):
        calls["reset"] += 1
        return env.reset(key)

    def step(key, state, action):
        calls["step"] += 1
        return env.step(key, state, action)

    return env._replace(reset=reset, step=step), calls


@pytest.mark.parametrize("placement", [Anakin(1), Sebulba(1, 1)])
def test_an_environment_is_traced_once_for_what_is_built(placement):
    env, calls = counting(CORRIDOR)
    agent = ppo.make(ppo.Config(hidden_sizes=(4,)))
    program = placement.build(agent, env, num_envs=8, rollout_length=8)
    program.init(0)
    evaluator = make_evaluator(agent, env, 4)
    jax.eval_shape(evaluator, jax.random.key(0), agent.actor(agent.init(jax.random.key(0), env.spec)))
    assert calls == {"reset": 1, "step": 1}


def test_an_environment_says_itself_how_many_start_states_it_pools():
    env, calls = counting(CORRIDOR._replace(pool_size=3))
    auto_reset(env)
    assert calls["reset"] == 1, "drawn once, all together"
    fresh, calls = counting(CORRIDOR._replace(pool_size=3))
    auto_reset(fresh, 0)
    assert calls["reset"] == 0


@pytest.mark.parametrize("placement", [Anakin(1), Sebulba(1, 1), podium.LocalSGD(2)])
def test_a_pool_is_drawn_once_nothing_else_is_wrong(placement):
    """It takes a compile, which of a simulator lasts a minute."""
    drawn = []

    def reset(key):
        jax.debug.callback(lambda: drawn.append(1))
        return CORRIDOR.reset(key)

    env, sizes = CORRIDOR._replace(reset=reset, pool_size=3), {"num_envs": 8, "rollout_length": 8}
    wrong = ppo.make(ppo.Config(hidden_sizes=(4,), num_minibatches=5))
    with pytest.raises(ValueError, match="num_minibatches=5 does not divide"):
        placement.build(wrong, env, **sizes)
    jax.effects_barrier()
    assert not drawn
    placement.build(ppo.make(ppo.Config(hidden_sizes=(4,))), env, **sizes).close()
    jax.effects_barrier()
    assert drawn


def test_a_pool_keeps_once_what_all_start_states_share():
    """A large array that every episode begins with is no constant of `pool_size` times its size."""

    def reset(key):
        state, timestep = CORRIDOR.reset(key)
        return (state._replace(position=jax.random.randint(key, (), 0, 3)), jnp.ones(1000), key), timestep

    def step(key, state, action):
        inner, timestep = CORRIDOR.step(key, state[0], action)
        return (inner, *state[1:]), timestep

    env = auto_reset(CORRIDOR._replace(reset=reset, step=step, render=None), 64)
    constants = jax.make_jaxpr(env.reset)(jax.random.key(0)).consts
    assert sum(np.size(jax.random.key_data(x) if x.dtype.name.startswith("key") else x) for x in constants) < 1500
    states, _ = jax.vmap(env.reset)(jax.random.split(jax.random.key(1), 50))
    assert set(np.asarray(states[0].position).tolist()) == {0, 1, 2}
    testing.check_env(env, num_steps=20)


def ends(env, num_envs, num_steps):
    """Return where each of `num_envs` environments ended, [num_steps, num_envs], standing still."""
    states, _ = jax.vmap(env.reset)(jax.random.split(jax.random.key(0), num_envs))

    def step(states, key):
        states, timestep = jax.vmap(env.step)(jax.random.split(key, num_envs), states, jnp.zeros(num_envs, int))
        return states, (timestep.terminated, timestep.truncated)

    return jax.tree.map(np.asarray, jax.lax.scan(step, states, jax.random.split(jax.random.key(1), num_steps))[1])


@pytest.mark.parametrize("pool_size", [0, 4])
def test_only_the_first_episode_has_a_random_length(pool_size):
    env = wrappers.random_first_length(CORRIDOR)
    terminated, truncated = ends(auto_reset(env, pool_size), 64, 18)
    assert not terminated.any()
    first = truncated.argmax(axis=0) + 1
    assert set(first.tolist()) == {1, 2, 3, 4, 5, 6}
    for i in range(64):
        assert np.diff(np.flatnonzero(truncated[:, i])).tolist() == [6] * (truncated[:, i].sum() - 1)
    testing.check_env(auto_reset(env, pool_size), num_steps=30)
    _, evaluated = ends(env, 8, 6)
    assert evaluated[-1].all() and evaluated.sum() == 8, "evaluation plays whole episodes"


def test_a_random_first_length_needs_a_limit():
    endless = testing.probe_policy()._replace(spec=testing.probe_policy().spec.__class__("endless", None, None))
    with pytest.raises(ValueError, match="endless has none"):
        wrappers.random_first_length(endless)
    with pytest.raises(ValueError, match="resets itself"):
        wrappers.random_first_length(auto_reset(CORRIDOR))
