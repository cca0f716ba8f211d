"""Counts beyond what float32 and one word can count, and what agents schedule by them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import podium
from podium.agents import a2c, apex, dqn, impala, ppo, pqn, r2d2, rainbow
from podium.ops.counts import Count
from podium.ops.statistics import RunningStats, update_stats
from podium.types import Trajectory


def count(number: int) -> Count:
    return Count(jnp.uint32(number % 2**32), jnp.uint32(number // 2**32))


@pytest.mark.parametrize("start", [2**24, 2**30 + 1, 2**32 - 3, 2**48 + 5])
def test_no_step_is_lost(start: int) -> None:
    """Compiled with all optimisations, one by one, and by as many as an array says."""
    counted = jax.jit(lambda begin: jax.lax.fori_loop(0, 1000, lambda _, count: count.add(1), begin))(count(start))
    assert int(counted) == start + 1000
    assert int(jax.jit(Count.add)(counted, jnp.int32(7))) == start + 1007
    np.testing.assert_allclose(counted.total(), start + 1000, rtol=2**-23)


AGENTS: dict[str, Any] = {
    "ppo": ppo.make(ppo.Config(hidden_sizes=(4,), anneal_steps=2**25)),
    "a2c": a2c.make(a2c.Config(hidden_sizes=(4,), anneal_steps=2**25)),
    "impala": impala.make(impala.Config(hidden_sizes=(4,), anneal_steps=2**25)),
    "pqn": pqn.make(pqn.Config(hidden_sizes=(4,), anneal_steps=2**25, epsilon_decay_steps=2**25, epsilon_end=0.0)),
    "dqn": dqn.make(dqn.Config(hidden_sizes=(4,), anneal_steps=2**25, epsilon_decay_steps=2**25, epsilon_end=0.0)),
    "apex": apex.make(apex.Config(hidden_sizes=(4,), epsilon_decay_steps=2**25, epsilon_start=1.0, epsilon_end=0.0)),
    "r2d2": r2d2.make(r2d2.Config(hidden_sizes=(4,), epsilon_decay_steps=2**25, epsilon_start=1.0, epsilon_end=0.0)),
    "rainbow": rainbow.make(rainbow.Config(hidden_sizes=(4,), epsilon_decay_steps=2**25, epsilon_start=1.0)),
}


@pytest.mark.parametrize("name", AGENTS)
def test_agents_count_single_steps_in_long_runs(name: str) -> None:
    agent, spec = AGENTS[name], podium.envs.make("podium/Catch").spec
    state = agent.init(jax.random.key(0), spec)._replace(env_steps=count(2**24))
    zero = jnp.zeros((1, 1))
    obs = spec.obs.zeros(1, 1)
    no = jnp.zeros((1, 1), bool)
    trajectory = Trajectory(obs, zero.astype(int), zero, no, no, obs, no, (), (), (), jnp.int32(0))
    observe = jax.jit(
        lambda state: jax.lax.fori_loop(0, 2**16, lambda _, state: agent.observe(state, trajectory), state)
    )
    counted = observe(state)
    assert int(counted.env_steps) == 2**24 + 2**16
    if agent.replay is not None:
        np.testing.assert_allclose(agent.actor(counted).epsilon, 0.5 - 2**-9, rtol=1e-6)


def test_statistics_go_on_learning_in_long_runs() -> None:
    """After 2^24 rows of deviation 1, rows of deviation 3, one a batch; a count in float32 would stand still."""

    def add(stats: RunningStats, number: jax.Array) -> tuple[RunningStats, None]:
        return update_stats(stats, jnp.where(number % 2, 3.0, -3.0).reshape(1, 1)), None

    start = RunningStats(jnp.float32(2**24), jnp.float32(0), jnp.float32(2**24))
    stats, _ = jax.jit(lambda stats: jax.lax.scan(add, stats, jnp.arange(2**17)))(start)
    assert 1.3 < float(stats.std()) < 1.4
    still, _ = jax.jit(lambda stats: add(stats, 0))(start._replace(mean=jnp.float32(-3)))
    np.testing.assert_allclose(still.std(), 1.0, rtol=1e-5)
