"""An agent that asks learns the global number of each environment, and it is the same under every placement."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import podium
from podium import keys
from podium.agent import ActOutput, Agent, Aux, Plan, fresh_carry
from podium.env import Env, auto_reset, restart, transition
from podium.evaluate import Policy
from podium.rollout import begin, rollout
from podium.types import ArraySpec, DiscreteSpec, EnvSpec

NUM_ENVS, LENGTH, UPDATES = 8, 3, 2


def drawn() -> Env:
    """Make an environment that tells itself apart: all it shows is drawn, and it is cut after two steps."""

    def reset(key: Any) -> Any:
        state = jnp.stack([jax.random.uniform(key), 0.0])
        return state, restart(state)

    def step(key: Any, state: Any, action: Any) -> Any:
        state = jnp.stack([jax.random.uniform(key), state[1] + 1])
        return state, transition(state, 0.0, False, state[1] == 2)

    return Env(EnvSpec("test/Drawn", ArraySpec((2,)), DiscreteSpec(2)), reset, step)


def scribe() -> Agent:
    """Make an agent whose State sums up what every number saw."""

    def act(keys: Any, params: Any, memory: Any, obs: Any, first: Any, greedy: bool) -> ActOutput:
        return ActOutput(jnp.zeros_like(memory), memory, memory)

    return Agent(
        init=lambda key, spec: jnp.zeros(NUM_ENVS),
        actor=lambda state: state,
        carry=lambda spec, num_envs: jnp.zeros(num_envs, jnp.int32),
        act=act,
        plan=lambda key, state, trajectory: Plan(trajectory.obs),
        grad=lambda key, state, minibatch: (jnp.zeros(()), Aux({"loss": jnp.mean(minibatch)})),
        apply=lambda state, grads: state,
        observe=lambda state, trajectory: state.at[trajectory.extras].add(trajectory.obs[..., 0]),
        number=lambda memory, index: index,
    )


@functools.cache
def seen_by_environment() -> np.ndarray:
    """Return what each environment shows of a run with seed 0, by a rollout of it alone."""
    env, roots, length = auto_reset(drawn()), keys.roots(jax.random.key(0)), LENGTH * UPDATES

    @jax.jit
    def total(number: Any) -> Any:
        start = begin(roots.env, env, number[None], jnp.zeros(1, jnp.int32))
        seen = rollout(roots.run, scribe(), env, jnp.zeros(NUM_ENVS), start, length, jnp.int32(0))[1].obs
        return seen[:, 0, 0].sum()

    return np.array([total(jnp.int32(number)) for number in range(NUM_ENVS)])


@pytest.mark.parametrize(
    "placement",
    [
        podium.Single(),
        podium.Anakin(1),
        podium.Anakin(4),
        podium.LocalSGD(workers=4, devices=2),
        podium.ParameterServer(workers=2, devices=2),
        podium.Sebulba(actor_threads=2, groups=2, lockstep=True),
        podium.Sebulba(2, 2, actor_threads=2, groups=1, lockstep=True),
        podium.CentralInference(envs_per_actor=2, devices=2, lockstep=True),
        podium.DistributedActors(workers=4, actor_devices=2, lockstep=True),
    ],
    ids=repr,
)
def test_environment_i_has_number_i(placement: Any) -> None:
    expected = seen_by_environment()
    assert np.unique(expected.round(5)).size == NUM_ENVS
    program = placement.build(scribe(), drawn(), num_envs=NUM_ENVS, rollout_length=LENGTH, max_updates=UPDATES)
    try:
        state, _ = program.chunk(program.init(0), UPDATES)
        np.testing.assert_allclose(program.agent_state(state), expected, rtol=1e-5)
    finally:
        program.close()


def test_several_seeds_are_numbered_each() -> None:
    program = podium.Anakin(2).build(scribe(), drawn(), num_envs=4, rollout_length=1, seeds=3)
    np.testing.assert_array_equal(program.init(0).rollout.carry, [[0, 1, 2, 3]] * 3)


def test_evaluation_numbers_its_episodes_and_other_agents_need_no_numbers() -> None:
    spec = drawn().spec
    np.testing.assert_array_equal(Policy(scribe(), jnp.zeros(NUM_ENVS), spec).carry(3), [0, 1, 2])
    unnumbered = scribe()._replace(number=None)
    np.testing.assert_array_equal(fresh_carry(unnumbered, spec, jnp.arange(5, 8)), [0, 0, 0])
