"""Experience for agents to learn from: random observations with both kinds of ends, acted on by the agent itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podium import testing
from podium.agent import Agent
from podium.env import auto_reset
from podium.learn import learn
from podium.placement.anakin import Anakin
from podium.rollout import begin, rollout
from podium.types import ArraySpec, DiscreteSpec, EnvSpec, Trajectory

T, B = 6, 8


def collect(agent: Agent, params: Any, spec: EnvSpec, seed: int = 0) -> Trajectory:
    """Act [T, B] steps by `params`; an end of each kind at the first and the last step, and others at random."""
    rng = np.random.default_rng(seed)
    obs = rng.normal(size=(2, T + 1, B, *spec.obs.shape)).astype(np.float32)
    terminated, truncated = rng.random((2, T, B)) < 0.2
    terminated[0, 0] = truncated[0, 1] = terminated[-1, 2] = truncated[-1, 3] = True
    terminated[0, 1] = terminated[-1, 3] = truncated[-1, 4] = terminated[-1, 4] = False
    last = terminated | truncated
    # What is reached is what is acted on next, but behind an end.
    next_obs = np.where(last.reshape(*last.shape, *(1,) * len(spec.obs.shape)), obs[1][1:], obs[0][1:])
    first = np.concatenate([rng.random((1, B)) < 0.5, last[:-1]])
    act = jax.jit(agent.act, static_argnums=5)
    carry = start = jax.tree.map(lambda m: m + 0.3, agent.carry(spec, B))
    outputs = []
    for t in range(T):
        keys = jax.random.split(jax.random.key(100 * seed + t), B)
        outputs.append(act(keys, params, carry, obs[0][t], first[t], False))
        carry = outputs[-1].carry
    action, extras = jax.tree.map(lambda *x: np.stack(x), *[(o.action, o.extras) for o in outputs])
    reward = rng.normal(size=(T, B)).astype(np.float32)
    rows = obs[0][:-1], action, reward, terminated, truncated, next_obs, first, extras
    return jax.tree.map(jnp.asarray, Trajectory(*rows, start, carry, np.int32(0)))


@pytest.fixture(scope="session")
def experience() -> Callable[..., Trajectory]:
    """Return `collect`."""
    return collect


@pytest.fixture(scope="session")
def spec() -> EnvSpec:
    """Return what `experience` can be had in."""
    return EnvSpec("test/Noise", ArraySpec((3,)), DiscreteSpec(3))


@pytest.fixture(scope="session")
def masked() -> Callable[[Trajectory], Trajectory]:
    """Return a function that makes the rows behind an end none, as of environments that reset in the next step."""

    def mask(trajectory: Trajectory) -> Trajectory:
        after = jnp.concatenate([jnp.zeros((1, B), bool), trajectory.last[:-1]])
        ends = {"terminated": trajectory.terminated & ~after, "truncated": trajectory.truncated & ~after}
        return trajectory._replace(valid=~after, **ends)

    return mask


@pytest.fixture(scope="session")
def values_on_paper() -> Callable[[Agent, str, int], None]:
    """Return a check that an agent of gamma 0.9 learns the values of a probe environment."""

    def check(agent: Agent, name: str, num_updates: int) -> None:
        # Truncation keeps the future: 1 / (1 - 0.9) = 10. Termination ends it: 1 + 0.9 + 0.81, 1 + 0.9, 1.
        expected = {"probe_truncation": [10.0], "probe_termination": [2.71, 1.9, 1.0]}[name]
        length, env = 5 if name == "probe_truncation" else 3, getattr(testing, name)()
        sizes = {"num_envs": 4, "rollout_length": length, "num_lanes": 1, "max_updates": num_updates}
        program = Anakin(devices=1).build(agent, env, **sizes)
        state, metrics = program.chunk(program.init(0), num_updates)
        assert metrics["finite"].all()
        # Values along an episode, as the agent sees it while it acts.
        env = auto_reset(env)
        start = begin(jax.random.key(0), env, jnp.arange(1), agent.carry(env.spec, 1))
        params = agent.actor(program.agent_state(state))
        play = lambda start: rollout(jax.random.key(0), agent, env, params, start, length, jnp.int32(0))
        values = np.asarray(jax.jit(play)(start)[1].extras.value)[:, 0]
        np.testing.assert_allclose(values, np.broadcast_to(expected, values.shape), rtol=0.06)

    return check


def one_state(key: jax.Array, time: int, num_envs: int, end: str) -> Trajectory:
    """Return random play in one state: action 1 pays 1, action 0 nothing; every second step is an `end`."""
    action = jax.random.randint(key, (time, num_envs), 0, 2)
    ended = jnp.broadcast_to(jnp.arange(time)[:, None] % 2 == 1, action.shape)
    no = jnp.zeros_like(ended)
    obs = jnp.ones((time, num_envs, 1))
    flags = {"terminated": (ended, no), "truncated": (no, ended), "both": (ended, ended)}[end]
    return Trajectory(
        obs, action, action.astype(jnp.float32), *flags, obs, jnp.roll(ended, 1, 0), (), (), (), jnp.int32(0)
    )


@pytest.fixture(scope="session")
def learnt_in_one_state() -> Callable[[Agent, str], Any]:
    """Return a function that says an agent's State after 59 iterations of 16 gradient steps in `one_state`."""

    def run(agent: Agent, end: str) -> Any:
        assert agent.replay is not None
        state = agent.init(jax.random.key(0), EnvSpec("one state", ArraySpec((1,)), DiscreteSpec(2)))
        plan = agent.plan(jax.random.key(0), state, one_state(jax.random.key(0), 4, 8, end))
        held = agent.replay.init(jax.tree.map(lambda x: x[0, 0], plan.data), 8, 2, 4)

        def iteration(carry: tuple, key: jax.Array) -> tuple[tuple, jax.Array]:
            learned = learn(key, agent, *carry, one_state(key, 4, 8, end), 2)
            return (learned.state, learned.replay), learned.metrics["loss"]

        (state, _), losses = jax.jit(lambda carry, keys: jax.lax.scan(iteration, carry, keys))(
            (state, held), jax.random.split(jax.random.key(1), 60)
        )
        # 32 steps an iteration: the first holds fewer than min_replay_size, learns nothing and says so.
        assert np.isnan(losses[0]) and np.isfinite(losses[1:]).all()
        assert int(state.updates) == 59 * 16 and float(state.env_steps) == 60 * 32
        return state

    return run
