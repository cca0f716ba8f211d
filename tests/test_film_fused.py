"""In a compiled program every frame is kept once too, from the rollout to the minibatch; what is learnt is the same."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from alike import assert_close

import everywhere
import podium
from podium import envs, film
from podium.agents import a2c, dqn, impala, ppo, pqn
from podium.env import Env, auto_reset
from podium.envs import wrappers
from podium.rollout import begin, play, rollout
from podium.testing import ContractError, check_agent, check_env
from podium.types import TimeStep


def pictures(size: int = 16, says_so: bool = True, num_frames: int = 4, ends: float = 0.2) -> Env:
    """Return stacks of random frames, whose newest tells which action is paid; episodes end and are cut at random."""
    picture = podium.ArraySpec((size, size, 1), np.uint8, 0, 2)
    spec = podium.EnvSpec("pictures", picture, podium.DiscreteSpec(3), max_episode_steps=100)

    def see(key: Any) -> Any:
        return jax.random.randint(key, picture.shape, 0, 3).astype(jnp.uint8)

    def reset(key: Any) -> Any:
        obs, no = see(key), jnp.zeros((), bool)
        return obs, TimeStep(obs, jnp.float32(0), no, no, obs, {})

    def step(key: Any, seen: Any, action: Any) -> Any:
        obs, (terminated, truncated) = see(key), jax.random.bernoulli(jax.random.fold_in(key, 1), ends, (2,))
        reward = (action == seen[0, 0, 0]).astype(jnp.float32)
        return obs, TimeStep(obs, reward, terminated, truncated, obs, {})

    env = wrappers.frame_stack(Env(spec=spec, reset=reset, step=step), num_frames)
    return env if says_so else untold(env)


def untold(env: Env) -> Env:
    """Return an environment that does not say what it shows is stacks of."""
    return env._replace(spec=dataclasses.replace(env.spec, obs=dataclasses.replace(env.spec.obs, num_frames=1)))


def losing(env: Env) -> Env:
    """Return an environment that loses its numbers now and then."""

    def step(key: Any, state: Any, action: Any) -> Any:
        state, timestep = env.step(key, state, action)
        return state, timestep._replace(reward=jnp.where(jax.random.bernoulli(key, 0.3), jnp.nan, timestep.reward))

    return env._replace(step=step)


SIZES: dict[str, Any] = {"hidden_sizes": (8,)}
AGENTS: dict[str, Any] = {
    "ppo": lambda: ppo.make(ppo.Config(**SIZES, num_minibatches=2, num_epochs=2)),
    "ppo, whole": lambda: ppo.make(ppo.Config(**SIZES, num_minibatches=1)),
    "ppo, normalised": lambda: ppo.make(ppo.Config(**SIZES, num_minibatches=2, normalize_obs=True)),
    "ppo, memory": lambda: ppo.make(ppo.Config(**SIZES, num_minibatches=2, memory="gru", memory_size=8)),
    "pqn": lambda: pqn.make(pqn.Config(**SIZES, num_minibatches=2)),
    "a2c": lambda: a2c.make(a2c.Config(**SIZES)),
    "impala": lambda: impala.make(impala.Config(**SIZES)),
    "dqn": lambda: dqn.make(dqn.Config(**SIZES, buffer_capacity=512, min_replay_size=64, batch_size=32)),
}
PLACEMENTS: dict[str, Any] = {
    "one device": everywhere.ONE_DEVICE,
    "two workers": podium.LocalSGD(devices=1, workers=2),
    **everywhere.PLACEMENTS,
}


def assert_same_of_films(placement: str, agent: str, **sizes: Any) -> None:
    told, not_told = (
        everywhere.state_under(PLACEMENTS[placement], AGENTS[agent](), pictures(says_so=says_so), 3, **sizes)
        for says_so in (True, False)
    )
    assert_close(told, not_told, tolerance=1e-6, relative=0)


NIGHTLY = ("ppo, whole", "ppo, normalised", "a2c")
"""What is like another of them with films."""


@pytest.mark.parametrize("agent", [pytest.param(name, marks=[pytest.mark.slow] * (name in NIGHTLY)) for name in AGENTS])
def test_every_agent_learns_from_films_what_it_does_from_stacks(agent: str) -> None:
    assert_same_of_films("one device", agent)


@pytest.mark.parametrize(
    "placement",
    [
        *("single", "sebulba"),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("two devices", "distributed actors", "parameter server", "two workers")
        ),
    ],
)
@pytest.mark.parametrize("agent", ["ppo", pytest.param("ppo, memory", marks=pytest.mark.slow)])
def test_every_placement_learns_from_films_what_it_does_from_stacks(agent: str, placement: str) -> None:
    assert_same_of_films(placement, agent)


@pytest.mark.slow
def test_eight_devices_and_several_seeds() -> None:
    assert_same_of_films("eight devices", "ppo", num_envs=16, num_lanes=8)
    assert_same_of_films("one device", "ppo", seeds=3)


@pytest.mark.parametrize("num_frames", [2, 4])
def test_a_trajectory_is_that_of_stacks_to_the_bit(num_frames: int) -> None:
    agent, found = AGENTS["ppo, memory"](), []
    for says_so in (True, False):
        env = auto_reset(pictures(24, says_so, num_frames))
        state = agent.init(jax.random.key(1), env.spec)
        start = begin(jax.random.key(2), env, jnp.arange(6), agent.carry(env.spec, 6))
        given = jax.random.key(3), agent, env, agent.actor(state), start, 39, jnp.int32(0)
        end, trajectory, _ = rollout(*given)
        assert trajectory.last.any(axis=0).all() and trajectory.last[0].any() and trajectory.last[-1].any()
        steps = np.array([0, 37, 5, 7, 38, 20])
        np.testing.assert_array_equal(trajectory.reached(jnp.asarray(steps)), trajectory.next_obs[steps, np.arange(6)])
        np.testing.assert_array_equal(trajectory.reached(None), trajectory.next_obs[-1])
        _, again, _ = rollout(*given[:4], end, *given[5:])
        found.append(jax.device_get((tuple(trajectory), tuple(again))))
        assert (jax.tree.leaves(trajectory.kept())[0].shape[0] == 38 + num_frames) == says_so
    jax.tree.map(np.testing.assert_array_equal, *found)


@pytest.mark.parametrize(("num_lanes", "width"), [(1, 1), (2, 1), (2, 3)])
def test_minibatches_are_put_together_from_strips(num_lanes: int, width: int) -> None:
    rng = np.random.default_rng(0)
    frames = jnp.asarray(rng.integers(0, 256, (3 + 9, 4, 5, 3, width), np.uint8))
    kept = film.Film(frames, jnp.asarray(rng.random((9, 4)) < 0.3))
    whole, strip = np.asarray(film.unroll(kept)), film.strips(kept)
    strips = film.cut(strip, num_lanes)
    of_lane = np.moveaxis(whole.reshape(9, num_lanes, -1, *whole.shape[2:]), 1, 0)  # [L, T, E / L, ...]
    steps = of_lane.reshape(num_lanes, -1, *whole.shape[2:])
    index = rng.integers(0, steps.shape[1], (num_lanes, 7)).astype(np.uint32)
    np.testing.assert_array_equal(film.picked(strips, jnp.asarray(index)), steps[np.arange(num_lanes)[:, None], index])
    np.testing.assert_array_equal(film.picked(strips, None), steps)
    chosen = rng.integers(0, 4 // num_lanes, (num_lanes, 3))
    by_env = np.moveaxis(of_lane, 2, 1)
    picked = film.of_envs(strips, jnp.asarray(chosen))
    np.testing.assert_array_equal(picked, by_env[np.arange(num_lanes)[:, None], chosen])
    np.testing.assert_array_equal(film.of_envs(strips, None), by_env)
    row = rng.integers(0, 9, 4)
    np.testing.assert_array_equal(film.at(strip, jnp.asarray(row)), whole[row, np.arange(4)])
    np.testing.assert_array_equal(film.at(strip, None), whole[-1])


def test_a_program_holds_every_frame_twice_and_no_stack() -> None:
    """What a step was acted on and what it led to: a frame each, where whole stacks are eight, and twelve in lanes."""
    config = ppo.Config(**SIZES, num_minibatches=64, num_epochs=1)
    temporary = lambda says_so: (
        podium.Anakin(1)
        .build(ppo.make(config), pictures(size=32, says_so=says_so), num_envs=8, rollout_length=512)
        .loop.memory_analysis()  # type: ignore[attr-defined]
        .temp_size_in_bytes
    )
    frames = 8 * 512 * 32 * 32
    assert temporary(True) < 2.5 * frames and temporary(False) > 8 * frames


def test_lanes_of_films_stay_on_their_devices() -> None:
    agent = AGENTS["ppo"]()
    program = podium.Anakin(2).build(agent, pictures(size=64), num_envs=8, rollout_length=64, num_lanes=2)
    found = re.findall(r"= (.*?)\s(?:all-|collective|reduce-scatter)", program.loop.compiled_text())  # type: ignore[attr-defined]
    assert found and not [shape for shape in found if "u8" in shape]


def test_stacks_that_are_none_end_a_run_in_a_sentence() -> None:
    env = pictures()
    other = lambda timestep: timestep._replace(obs=2 - timestep.obs, next_obs=2 - timestep.next_obs)

    def step(key: Any, state: Any, action: Any) -> Any:
        state, timestep = env.step(key, state, action)
        turned = jax.random.bernoulli(key, 0.1)
        return state, jax.tree.map(lambda a, b: jnp.where(turned, a, b), other(timestep), timestep)

    broken = env._replace(step=step)
    sizes: dict[str, Any] = {"num_envs": 8, "rollout_length": 8, "num_steps": 256, "run_dir": None, "progress": False}
    with pytest.raises(podium.NonFiniteError, match="num_frames"):
        podium.train(AGENTS["ppo"](), broken, **sizes)
    podium.train(AGENTS["ppo"](), untold(broken), **sizes)
    with pytest.raises(ContractError, match="num_frames"):
        check_env(broken)


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda env: wrappers.flicker(env, 0.5),
        lambda env: wrappers.action_repeat(env, 2),
        lambda env: wrappers.truncate_nonfinite(losing(env)),
    ],
    ids=["flicker", "action_repeat", "truncate_nonfinite"],
)
def test_wrappers_that_show_no_stacks_any_more_say_so(wrapped: Any) -> None:
    env = wrapped(pictures())
    assert env.spec.obs.num_frames == 1
    check_env(env)
    assert wrappers.action_repeat(pictures(), 1).spec.obs.num_frames == 4


def test_small_stacks_and_whole_observations_are_kept_as_they_are() -> None:
    agent, env = AGENTS["ppo"](), auto_reset(wrappers.frame_stack(envs.make("CartPole-v1"), 2))
    start = begin(jax.random.key(2), env, jnp.arange(4), ())
    params = agent.actor(agent.init(jax.random.key(1), env.spec))
    _, played, _ = play(jax.random.key(3), agent, env, params, start, 5, jnp.int32(0))
    assert played.obs.shape == played.next_obs.shape == (5, 4, 8)
    assert played.trajectory().kept() is played.obs


@pytest.mark.parametrize("name", ["ppo", *(pytest.param(x, marks=pytest.mark.slow) for x in ("pqn", "ppo, memory"))])
def test_agents_that_learn_from_films_keep_the_contract(name: str) -> None:
    check_agent(AGENTS[name](), pictures())
