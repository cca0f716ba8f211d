"""Rewards are normalised as by Gymnasium's wrapper, whatever the rollouts' length and wherever the actors are.

Its variance moves with every step and ours with every rollout, so what is compared is what both divide by, the
variance of all discounted sums seen so far.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import podium
from podium import keys
from podium.agents import a2c, ppo
from podium.env import Env, auto_reset, restart, transition
from podium.host import on_host
from podium.host_rollout import EnvBatch
from podium.rollout import begin, rollout
from podium.types import ArraySpec, DiscreteSpec, EnvSpec, TimeStep

NUM_ENVS, STEPS, GAMMA = 4, 640, 0.97


def noise() -> Env:
    """Make an environment whose rewards and ends of both kinds nobody's actions change."""
    spec = EnvSpec("test/Noise", ArraySpec((2,)), DiscreteSpec(2), max_episode_steps=1000)

    def reset(key: jax.Array) -> Any:
        obs = jax.random.normal(key, (2,))
        return obs, restart(obs)

    def step(key: jax.Array, state: jax.Array, action: jax.Array) -> Any:
        obs_key, end_key = jax.random.split(key)
        obs = jax.random.normal(obs_key, (2,))
        ended = jax.random.bernoulli(end_key, 0.02, (2,))
        return obs, transition(obs, 1.0 + obs.sum(), ended[0], ended[1])

    return Env(spec, reset, step)


def agent(**fields: Any) -> podium.Agent:
    fields = {"num_epochs": 1, "num_minibatches": 1, "gamma": GAMMA, "normalize_reward": True} | fields
    return ppo.make(ppo.Config(hidden_sizes=(2,), **fields))


class Replayed(gymnasium.vector.VectorEnv):
    """Environments that give what was written down, [T, B] each."""

    metadata = {"autoreset_mode": gymnasium.vector.AutoresetMode.NEXT_STEP}

    def __init__(self, reward: np.ndarray, terminated: np.ndarray, truncated: np.ndarray):
        self.num_envs, self._rows = reward.shape[1], iter(zip(reward, terminated, truncated, strict=True))

    def reset(self, **_: Any) -> Any:
        return None, {}

    def step(self, actions: Any) -> Any:
        return (None, *next(self._rows), {})


class SameStep(gymnasium.wrappers.vector.NormalizeReward):
    """Without rows that are no transition, which the wrapper takes the row after an end for."""

    _prev_dones: Any = property(lambda self: np.zeros(self.num_envs), lambda self, value: None)


def by_gymnasium(kind: Any, *rows: np.ndarray) -> tuple[float, np.ndarray]:
    """Return the variance that Gymnasium's wrapper comes to, and its discounted sums."""
    wrapper = kind(Replayed(*rows), gamma=GAMMA)
    wrapper.reset()
    for _ in range(len(rows[0])):
        wrapper.step(None)
    return float(wrapper.return_rms.var), wrapper.accumulated_reward


@functools.cache
def expected(steps: int = STEPS) -> float:
    """Return what Gymnasium's wrapper comes to over the same rewards."""
    env, actor = auto_reset(noise()), a2c.make(a2c.Config(hidden_sizes=(2,)))
    state = actor.init(jax.random.key(0), env.spec)

    @jax.jit
    def play(key: jax.Array) -> Any:
        start = begin(keys.roots(key).env, env, jnp.arange(NUM_ENVS), ())
        return rollout(key, actor, env, actor.actor(state), start, STEPS, jnp.int32(0))[1]

    played = jax.device_get(play(jax.random.key(0)))
    assert played.terminated.any() and played.truncated.any()
    rows = (np.asarray(x)[:steps] for x in (played.reward, played.terminated, played.truncated))
    return by_gymnasium(SameStep, *rows)[0]


def variance(placement: Any, length: int, env: Any = None, steps: int = STEPS, **fields: Any) -> float:
    """Return the variance that the agent comes to in as many steps."""
    updates = steps // length
    program = placement.build(
        agent(**fields), env or noise(), num_envs=NUM_ENVS, rollout_length=length, max_updates=updates
    )
    try:
        state, _ = program.chunk(program.init(0), updates)
        stats = program.agent_state(state).return_stats
        assert float(stats.count) == NUM_ENVS * steps
        return float(stats.std()) ** 2
    finally:
        program.close()


def test_the_statistics_are_gymnasiums_whatever_the_rollouts_length() -> None:
    found = [variance(podium.Anakin(1), length) for length in (5, 128)]
    np.testing.assert_allclose(found, expected(), rtol=1e-5)


PLACEMENTS: dict[str, tuple[Any, bool]] = {
    "Single": (podium.Single(), False),
    "Anakin on 2 devices": (podium.Anakin(2), False),
    "LocalSGD": (podium.LocalSGD(workers=2, average_every=3), False),
    "ParameterServer": (podium.ParameterServer(2), False),
    "Single, host": (podium.Single(), True),
    "LocalSGD, host": (podium.LocalSGD(workers=2, average_every=3), True),
    "ParameterServer, host": (podium.ParameterServer(2), True),
    "Sebulba": (podium.Sebulba(actor_threads=2), True),
    "CentralInference": (podium.CentralInference(envs_per_actor=2, devices=1), True),
    "DistributedActors": (podium.DistributedActors(workers=1), True),
}


@pytest.mark.parametrize("name", PLACEMENTS)
def test_every_placement_carries_the_sums(name: str) -> None:
    placement, host = PLACEMENTS[name]
    env = on_host(noise()) if host else None
    np.testing.assert_allclose(variance(placement, 16, env, steps=64), expected(64), rtol=1e-4)


def test_a_run_that_resumes_has_the_sums_of_the_run_that_was_not_stopped(tmp_path: Path) -> None:
    def train(folder: str, updates: int, resume: bool = False) -> Any:
        sizes = {"num_envs": NUM_ENVS, "rollout_length": 16, "eval_every": 0, "eval_episodes": 1, "progress": False}
        result = podium.train(
            agent(),
            noise(),
            num_steps=updates * 16 * NUM_ENVS,
            placement=podium.Anakin(1),
            run_dir=tmp_path / folder,
            resume=resume,
            **sizes,
        )
        return result.state

    train("stopped", 2)
    jax.tree.map(np.testing.assert_array_equal, train("stopped", 4, resume=True), train("whole", 4))


def test_rows_that_are_no_transition_change_no_sum() -> None:
    """Gymnasium leaves out the row after an end, where environments reset in the next step."""
    rng, shape = np.random.default_rng(0), (50, NUM_ENVS)
    rows = rng.normal(size=shape).astype(np.float32), rng.random(shape) < 0.1, rng.random(shape) < 0.1
    ended = rows[1] | rows[2]
    valid = ~np.roll(ended, 1, axis=0)
    valid[0] = True
    rows = rows[0], rows[1] & valid, rows[2] & valid
    # An end in a row that was left out is none: the next row is a transition.
    valid[1:] = ~(rows[1] | rows[2])[:-1]

    class Recorded:
        num_envs = NUM_ENVS
        steps = iter(zip(*rows, valid, strict=True))

        def reset(self) -> TimeStep:
            none = np.zeros(NUM_ENVS, bool)
            return TimeStep(np.zeros(NUM_ENVS), np.zeros(NUM_ENVS), none, none, np.zeros(NUM_ENVS), {}, ~none)

        def recv(self) -> TimeStep:
            reward, terminated, truncated, valid = next(self.steps)
            obs = np.zeros(NUM_ENVS)
            return TimeStep(obs, reward, terminated, truncated, obs, {}, valid)

    make: Any = Recorded
    batch: Any = EnvBatch(make(), agent(), resets_in_next_step=True)
    for _ in range(len(valid)):
        batch.receive(dict.fromkeys(("valid_steps", "episodes", "episode_return_sum", "episode_length_sum"), 0.0))
    np.testing.assert_allclose(batch.past, by_gymnasium(gymnasium.wrappers.vector.NormalizeReward, *rows)[1], rtol=1e-5)
