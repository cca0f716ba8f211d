"""Wrappers at the boundaries of episodes, inside and outside auto_reset."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import podium
from podium import envs, testing
from podium.agents import ppo
from podium.env import Env, auto_reset, reset_key, restart, transition
from podium.envs import native, wrappers
from podium.host import on_host
from podium.multi import returns_of
from podium.placement.anakin import Anakin
from podium.placement.sebulba import Sebulba
from podium.types import ArraySpec, DiscreteSpec, EnvSpec, is_spec

NEVER = 99


class CountState(NamedTuple):
    start: jax.Array
    time: jax.Array


def count(terminates: int = NEVER, truncates: int = NEVER) -> Env:
    """Make episodes with observation `start + time`, where start is a random hundred, and reward 2 * time."""

    def observe(state):
        return jnp.array([state.start + state.time], jnp.float32)

    def reset(key):
        state = CountState(100 * jax.random.randint(key, (), 1, 1000), jnp.int32(0))
        return state, restart(observe(state))

    def step(key, state, action):
        state = CountState(state.start, state.time + 1)
        ended = state.time >= terminates, state.time >= truncates
        return state, transition(observe(state), 2 * state.time, *ended)

    return Env(EnvSpec("count", ArraySpec((1,)), DiscreteSpec(2)), reset, step)


def roll(env: Env, num_steps: int, policy=lambda t: 0):
    """Return the first TimeStep and those of `num_steps` steps, [T, ...]."""
    key = jax.random.key(0)
    state, first = env.reset(key)
    inputs = jax.random.split(key, num_steps), jnp.array([policy(t) for t in range(num_steps)])
    return first, jax.lax.scan(lambda state, i: env.step(i[0], state, i[1]), state, inputs)[1]


def play(env: Env, num_steps: int, policy=lambda t: 0):
    """Roll, compiled, into NumPy."""
    return jax.tree.map(np.asarray, jax.jit(lambda: roll(env, num_steps, policy))())


# Ends by termination, by truncation, by both at once; in the very first step, and later.
ENDS = [(3, NEVER), (NEVER, 3), (3, 3), (1, NEVER), (NEVER, 1), (1, 1)]


def play_all_ends(wrap, num_steps: int = 7):
    """Play `wrap(count(...))` for every pair in ENDS, in one program; yield the pair with what `play` returns."""
    run = jax.jit(jax.vmap(lambda terminates, truncates: roll(wrap(count(terminates, truncates)), num_steps)))
    result = jax.tree.map(np.asarray, run(*jnp.array(ENDS).T))
    for i, ends in enumerate(ENDS):
        yield ends, *jax.tree.map(lambda x: x[i], result)  # noqa: B023


def test_auto_reset_keeps_the_true_last_observation():
    for (terminates, truncates), first, steps in play_all_ends(auto_reset):
        length = min(terminates, truncates)
        ends = np.arange(7) % length == length - 1
        np.testing.assert_array_equal(steps.last, ends)
        np.testing.assert_array_equal(steps.terminated, ends & (terminates <= length))
        np.testing.assert_array_equal(steps.truncated, ends & (truncates <= length))
        np.testing.assert_array_equal(steps.obs[ends] % 100, 0)
        np.testing.assert_array_equal(steps.next_obs[ends] % 100, length)
        np.testing.assert_array_equal(steps.obs[~ends], steps.next_obs[~ends])
        before = np.concatenate([[first.obs], steps.obs[:-1]])
        np.testing.assert_array_equal(before // 100, steps.next_obs // 100)
        assert len(np.unique(steps.obs[ends])) == ends.sum(), "fresh resets differ"


def test_pooled_auto_reset_starts_from_the_pool_and_keeps_the_true_last_observation():
    _, steps = play(auto_reset(count(1), pool_size=2), 40)
    assert len(np.unique(steps.obs)) == 2
    np.testing.assert_array_equal(steps.obs % 100, 0)
    np.testing.assert_array_equal(steps.next_obs % 100, 1)


@pytest.mark.parametrize("outside", [False, True])
def test_episode_statistics_at_every_end(outside):
    wrap = wrappers.episode_statistics
    for ends, first, steps in play_all_ends(lambda env: wrap(auto_reset(env)) if outside else auto_reset(wrap(env))):
        assert first.info["episode_length"] == 0 and first.info["episode_return"] == 0
        # At time t of an episode the rewards 2 + 4 + ... + 2t = t(t+1) have come in.
        time = np.arange(7) % min(ends) + 1
        np.testing.assert_array_equal(steps.info["episode_length"], time)
        np.testing.assert_array_equal(steps.info["episode_return"], time * (time + 1))


@pytest.mark.parametrize("outside", [False, True])
def test_frame_stack_never_mixes_episodes(outside):
    def wrap(env):
        return wrappers.frame_stack(auto_reset(env), 3) if outside else auto_reset(wrappers.frame_stack(env, 3))

    for plain, stacked_play in zip(play_all_ends(auto_reset), play_all_ends(wrap), strict=True):
        _, first, steps = plain
        _, first_stacked, stacked = stacked_play
        frames = [float(first.obs[0])] * 3
        np.testing.assert_array_equal(first_stacked.obs, frames)
        for t in range(7):
            frames = [*frames[1:], float(steps.next_obs[t, 0])]
            np.testing.assert_array_equal(stacked.next_obs[t], frames)
            if steps.last[t]:
                frames = [float(steps.obs[t, 0])] * 3
            np.testing.assert_array_equal(stacked.obs[t], frames)


def test_frame_stack_takes_pytrees_images_and_scalars():
    spec = {"image": ArraySpec((4, 4, 2), np.uint8, 0, 255), "depth": ArraySpec(())}
    obs = {"image": jnp.ones((4, 4, 2), jnp.uint8), "depth": jnp.float32(0.5)}
    env = Env(
        EnvSpec("camera", spec, DiscreteSpec(2)),
        lambda key: ((), restart(obs)),
        lambda key, state, action: ((), transition(jax.tree.map(lambda x: 2 * x, obs), 0, False)),
    )
    stacked = wrappers.frame_stack(env, 3)
    assert stacked.spec.obs["image"].shape == (4, 4, 6) and stacked.spec.obs["depth"].shape == (3,)
    state, _ = stacked.reset(jax.random.key(0))
    _, timestep = stacked.step(jax.random.key(0), state, 0)
    np.testing.assert_array_equal(timestep.obs["depth"], [0.5, 0.5, 1])
    np.testing.assert_array_equal(timestep.obs["image"][0, 0], [1, 1, 1, 1, 2, 2])
    assert timestep.obs["image"].dtype == np.uint8


def test_frame_stack_repeats_bounds():
    env = wrappers.frame_stack(envs.make("MountainCar-v0"), 2)
    np.testing.assert_allclose(env.spec.obs.low, [-1.2, -0.07] * 2)


@pytest.mark.parametrize("terminates", [3, 5, 9])
def test_time_limit_truncates_at_its_step(terminates):
    _, steps = play(auto_reset(wrappers.time_limit(count(terminates), 5)), 5)
    length = min(terminates, 5)
    assert np.flatnonzero(steps.last)[0] == length - 1
    assert steps.truncated[length - 1] == (terminates >= 5)
    assert steps.terminated[length - 1] == (terminates <= 5)


def test_time_limit_starts_afresh_with_each_episode():
    _, steps = play(auto_reset(wrappers.time_limit(count(3), 4)), 12)
    assert not steps.truncated.any()


def test_time_limit_ends_episodes_of_an_environment_that_tells_them_from_lost_lives():
    def lives(every: int) -> Env:
        """Make an environment that marks every few steps as terminal for the learner, and whose episodes never end."""
        told = {"episode_end": jnp.zeros((), bool)}
        reset = lambda key: (jnp.zeros((), jnp.int32), restart(jnp.zeros(1), told))

        def step(key, state, action):
            return state + 1, transition(jnp.zeros(1), 1.0, (state + 1) % every == 0, False, told)

        return Env(EnvSpec("lives", ArraySpec((1,)), DiscreteSpec(2)), reset, step)

    _, steps = play(auto_reset(wrappers.time_limit(lives(100), 5)), 15)
    np.testing.assert_array_equal(np.flatnonzero(steps.info["episode_end"]), [4, 9, 14])
    np.testing.assert_array_equal(steps.truncated, steps.info["episode_end"])
    env, agent = wrappers.time_limit(lives(100), 5), podium.agents.ppo.make()
    program = podium.Anakin(1).build(agent, env, num_envs=32, rollout_length=10)
    _, metrics = program.chunk(program.init(0), 1)
    assert metrics["episodes"].sum() == 64 and metrics["episode_length_sum"].sum() == 320


def test_time_limit_is_the_shorter_of_two_in_the_spec():
    env = envs.make("podium/Corridor", max_steps=30)
    limits = [wrappers.time_limit(env, n).spec.max_episode_steps for n in (7, 50)]
    assert limits == [7, 30]
    assert wrappers.time_limit(count(), 8).spec.max_episode_steps == 8


def test_time_limit_outside_auto_reset_is_refused():
    with pytest.raises(ValueError, match=r"auto_reset\(time_limit\(env, 5\)\)"):
        wrappers.time_limit(auto_reset(count(3)), 5)


def echo(length: int) -> Env:
    """Make episodes that pay the action executed plus one."""
    env = count(length)

    def step(key, state, action):
        state, timestep = env.step(key, state, action)
        return state, timestep._replace(reward=(action + 1).astype(jnp.float32))

    return env._replace(step=step)


@pytest.mark.parametrize("outside", [False, True])
def test_sticky_actions_repeat_what_was_executed_but_never_across_episodes(outside):
    wrap = lambda env: wrappers.sticky_actions(env, 0.25)
    env = wrap(auto_reset(echo(4))) if outside else auto_reset(wrap(echo(4)))
    num_steps = 4000
    rng = np.random.default_rng(0)
    chosen = rng.integers(0, 1000, num_steps)  # More actions than the spec has, to tell every one apart.
    _, steps = play(env, num_steps, policy=lambda t: chosen[t])
    executed = steps.reward.astype(int) - 1
    own = executed == chosen
    first = np.arange(num_steps) % 4 == 0
    assert own[first].all()
    np.testing.assert_array_equal(executed[~own], np.roll(executed, 1)[~own])
    assert abs((~own[~first]).mean() - 0.25) < 0.03


@pytest.mark.parametrize("outside", [False, True])
def test_raw_reward_is_the_innermost(outside):
    wrap = lambda env: wrappers.clip_reward(wrappers.scale_reward(wrappers.sign_reward(env), 3.0), -1, 2)
    env = wrap(auto_reset(count(3))) if outside else auto_reset(wrap(count(3)))
    first, steps = play(env, 3)
    np.testing.assert_array_equal(steps.reward, [2, 2, 2])
    np.testing.assert_array_equal(steps.info["raw_reward"], [2, 4, 6])
    assert first.info["raw_reward"] == 0 and steps.reward.dtype == np.float32


@pytest.mark.parametrize("statistics_outside", [False, True])
def test_episode_return_is_counted_from_the_raw_reward(statistics_outside):
    clip, statistics = wrappers.clip_reward, wrappers.episode_statistics
    env = statistics(clip(count(3))) if statistics_outside else clip(statistics(count(3)))
    _, steps = play(auto_reset(env), 3)
    np.testing.assert_array_equal(steps.info["episode_return"], [2, 6, 12])
    np.testing.assert_array_equal(steps.reward, [1, 1, 1])


def test_time_limit_and_statistics_commute():
    limit = lambda env: wrappers.time_limit(env, 4)
    statistics = wrappers.episode_statistics
    runs = [play(auto_reset(env), 9) for env in (limit(statistics(count(NEVER))), statistics(limit(count(NEVER))))]
    jax.tree.map(np.testing.assert_array_equal, *runs)


@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (lambda env: wrappers.time_limit(env, 0), "max_steps=0"),
        (lambda env: wrappers.time_limit(env, 2.5), "max_steps=2.5 must be an integer of 1 or more"),
        (lambda env: wrappers.action_repeat(env, 2.5), "num_repeats=2.5 must be an integer"),
        (lambda env: wrappers.frame_stack(env, 2.0), "num_frames=2.0 must be an integer"),
        (lambda env: wrappers.sticky_actions(env, "0.5"), "probability='0.5' is outside"),
        (lambda env: wrappers.flicker(env, None), "probability=None is outside"),
        (lambda env: wrappers.clip_reward(env, "-1", "1"), "low='-1' is not below high='1'"),
        (lambda env: wrappers.scale_reward(env, "2"), "factor='2'"),
        (lambda env: auto_reset(env, 2.5), "pool_size=2.5 must be an integer of 0 or more"),
        (lambda env: wrappers.frame_stack(env, 0), "num_frames=0"),
        (lambda env: wrappers.frame_stack(envs.make("FrozenLake-misc"), 2), "one-hot"),
        (lambda env: wrappers.sticky_actions(env, 1.0), r"probability=1.0 is outside \[0, 1\)"),
        (lambda env: wrappers.clip_reward(env, 1, 1), "low=1 is not below high=1"),
        (lambda env: wrappers.scale_reward(env, 0), "factor=0"),
        (lambda env: wrappers.scale_reward(env, float("nan")), "factor=nan"),
        (lambda env: auto_reset(env, -1), "pool_size=-1"),
    ],
)
def test_bad_arguments_are_refused_at_once(wrap, message):
    with pytest.raises(ValueError, match=message):
        wrap(count(3))


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_reset_key_is_another_key_of_the_same_kind_with_independent_draws(impl):
    keys = jax.random.split(jax.random.key(0, impl=impl), 5000)
    others = jax.vmap(reset_key)(keys)
    assert others.dtype == keys.dtype
    draw = jax.vmap(jax.random.uniform)
    a, b = np.asarray(draw(keys)), np.asarray(draw(others))
    assert not (a == b).any()
    assert abs(np.corrcoef(a, b)[0, 1]) < 4 / np.sqrt(a.size)


def test_action_repeat_sums_rewards_and_stops_at_the_end():
    env = wrappers.action_repeat(wrappers.time_limit(native.corridor(length=8, max_steps=30), 5), 3)
    assert env.spec.max_episode_steps == 2
    state, _ = env.reset(jax.random.key(0))
    state, timestep = env.step(jax.random.key(1), state, 1)
    assert timestep.obs.argmax() == 3 and not timestep.last
    state, timestep = env.step(jax.random.key(2), state, 1)
    assert timestep.obs.argmax() == 5 and timestep.truncated and not timestep.terminated
    paid = wrappers.scale_reward(testing.probe_value(3.0), 2.0)
    _, timestep = wrappers.action_repeat(paid, 4).step(jax.random.key(0), paid.reset(jax.random.key(0))[0], 0)
    assert timestep.reward == 6 and timestep.info["raw_reward"] == 3 and timestep.terminated
    with pytest.raises(ValueError, match="num_repeats=0"):
        wrappers.action_repeat(env, 0)
    testing.check_env(auto_reset(env))


def test_rewards_of_repeated_actions_are_summed():
    env = wrappers.action_repeat(testing.probe_truncation(1.5, 5), 2)
    state, _ = env.reset(jax.random.key(0))
    rewards = []
    for _ in range(3):
        state, timestep = env.step(jax.random.key(0), state, 0)
        rewards.append(float(timestep.reward))
    assert rewards == [3.0, 3.0, 1.5] and timestep.truncated


def test_who_dies_between_repeats_has_acted_and_is_told_what_it_cost():
    """The first of two agents dies in its step number `dies`, for -5; each step alive pays 1, and to the dead 9."""

    def team(dies: int) -> Env:
        def reset(key):
            return jnp.int32(0), restart(jnp.zeros((2, 1)))._replace(reward=jnp.zeros(2), valid=jnp.ones(2, bool))

        def step(key, time, action):
            alive = jnp.array([time < dies, True])
            reward = jnp.where(alive, jnp.array([jnp.where(time + 1 == dies, -5.0, 1.0), 1.0]), 9.0)
            made = transition(jnp.full((2, 1), time, jnp.float32), reward, time + 1 >= 6)
            return time + 1, made._replace(valid=alive)

        return Env(EnvSpec("team", ArraySpec((2, 1)), DiscreteSpec(2, shape=(2,)), num_agents=2), reset, step)

    for dies, valid, reward in [
        (1, [1, 0, 0], [-5]),
        (2, [1, 0, 0], [-4]),
        (3, [1, 1, 0], [2, -5]),
        (9, [1] * 3, [2] * 3),
    ]:
        _, plain = play(team(dies), 6, lambda t: [0, 0])
        everything = plain.reward.reshape(3, 2, 2).sum(1)
        for env in (team(dies), returns_of(team(dies), [0]), wrappers.scale_reward(team(dies), 1.0)):
            _, steps = play(wrappers.action_repeat(env, 2), 3, lambda t: [0, 0])
            assert steps.valid.tolist() == [[bool(v), True] for v in valid]
            assert steps.reward[: len(reward), 0].tolist() == reward and steps.reward[:, 1].tolist() == [2, 2, 2]
            raw = steps.info["raw_reward"]
            assert raw.tolist() == everything[:, : raw.shape[1]].tolist()
            assert steps.terminated.tolist() == [False, False, True]
        testing.check_env(wrappers.action_repeat(team(dies), 2), num_steps=8)


@pytest.mark.parametrize("continuous", [False, True])
def test_the_last_action_and_its_reward_are_shown_within_an_episode_only(continuous):
    probe = testing.probe_truncation(1.5, 2, continuous)
    action, shown = (jnp.full(1, 0.25), [0.25]) if continuous else (jnp.int32(1), [0.0, 1.0])
    for env in (auto_reset(wrappers.show_last_action(probe)), wrappers.show_last_action(auto_reset(probe))):
        state, first = env.reset(jax.random.key(0))
        assert not first.obs["last_action"].any() and first.obs["last_reward"] == 0
        state, timestep = env.step(jax.random.key(0), state, action)
        assert timestep.obs["last_action"].tolist() == shown and timestep.obs["last_reward"] == 1.5
        state, timestep = env.step(jax.random.key(0), state, action)
        assert timestep.next_obs["last_action"].tolist() == shown, "the true last observation"
        assert not timestep.obs["last_action"].any() and timestep.obs["last_reward"] == 0
        testing.check_env(env, num_steps=20)


@pytest.mark.parametrize("outside", [False, True])
def test_wrappers_know_agents_that_act_together(outside):
    def wrap(env):
        return wrappers.episode_statistics(wrappers.frame_stack(wrappers.show_last_action(env), 2))

    team = wrappers.truncate_nonfinite(testing.probe_team(num_agents=3, length=2))
    env = wrap(auto_reset(team)) if outside else auto_reset(wrap(team))
    _, steps = play(env, 6, lambda t: [0, 1, 2])
    shapes = {name: spec.shape for name, spec in env.spec.obs.view.items()}
    assert shapes == {"obs": (3, 8), "last_action": (3, 8), "last_reward": (3, 2)}
    assert shapes == {name: x.shape[1:] for name, x in steps.obs.view.items()}
    shown = steps.next_obs.view["last_action"][..., 4:].argmax(-1)
    np.testing.assert_array_equal(shown, np.broadcast_to([0, 1, 2], (6, 3)))
    np.testing.assert_array_equal(steps.next_obs.view["last_reward"][..., 1], steps.reward)
    paid = steps.reward.mean(-1)
    np.testing.assert_allclose(steps.info["episode_return"][1::2], paid[::2] + paid[1::2], rtol=1e-6)
    np.testing.assert_array_equal(steps.info["episode_length"], [1, 2] * 3)


def test_in_a_game_of_two_the_return_is_that_of_who_moved_first():
    """Action 1 pays its mover 10, and the last of three moves 1 more: 10 - 10 + 11."""
    _, steps = play(wrappers.episode_statistics(auto_reset(testing.probe_game(3))), 6, lambda t: 1)
    np.testing.assert_array_equal(steps.info["episode_return"], [10, 0, 11] * 2)


def losing(env, what, at=3):
    """Return an environment whose simulator loses its numbers at a step."""

    def step(key, state, action):
        time, inner = state
        inner, timestep = env.step(key, inner, action)
        lost = time + 1 >= at
        if what == "reward":
            timestep = timestep._replace(reward=jnp.where(lost, jnp.inf, timestep.reward))
        else:
            obs = jnp.where(lost, jnp.nan, timestep.obs)
            timestep = timestep._replace(obs=obs, next_obs=obs, terminated=timestep.terminated | lost)
        return (time + 1, inner), timestep

    def reset(key):
        state, timestep = env.reset(key)
        return (jnp.zeros((), jnp.int32), state), timestep

    return env._replace(reset=reset, step=step, render=None)


@pytest.mark.parametrize("outside", [False, True])
def test_a_frame_is_blank_half_of_the_time_and_the_game_is_the_same(outside):
    """Every observation is drawn for by itself: first ones, true last ones, and those between."""
    wrap = lambda env: wrappers.flicker(auto_reset(env)) if outside else auto_reset(wrappers.flicker(env))
    _, steps = play(wrap(count(terminates=4)), 4_000)
    seen, reached = steps.obs[:, 0], steps.next_obs[:, 0]
    for blank in ((reached == 0), (seen == 0), (reached == 0)[steps.last], (seen == 0)[steps.last]):
        assert abs(blank.mean() - 0.5) < 5 * np.sqrt(0.25 / blank.size)
    np.testing.assert_array_equal(seen[~steps.last], reached[~steps.last])
    assert np.corrcoef((reached == 0)[steps.last], (seen == 0)[steps.last])[0, 1] < 0.15
    time = np.arange(4_000) % 4 + 1
    np.testing.assert_array_equal(reached[reached != 0] % 100, time[reached != 0])
    np.testing.assert_array_equal(seen[steps.last & (seen != 0)] % 100, 0)
    np.testing.assert_array_equal(steps.reward, 2 * time)
    np.testing.assert_array_equal(steps.last, time == 4)


def test_flicker_takes_pytrees_together_and_its_spec_has_the_blank():
    never = play(wrappers.flicker(wrappers.show_last_action(count()), 0.0), 20)[1]
    np.testing.assert_array_equal(never.obs["last_action"].sum(-1), 1.0)
    often = play(wrappers.flicker(wrappers.show_last_action(count()), 0.5), 200)[1]
    blank = often.obs["last_action"].sum(-1) == 0
    np.testing.assert_array_equal(blank, often.obs["obs"][:, 0] == 0)
    assert 0.3 < blank.mean() < 0.7
    high = count()._replace(spec=EnvSpec("high", ArraySpec((1,), np.float32, 2, 5), DiscreteSpec(2)))
    spec = wrappers.flicker(high).spec.obs
    assert (spec.low, spec.high) == (0, 5)


@pytest.mark.parametrize("outside", [False, True])
def test_what_is_legal_is_told_whatever_is_shown(outside):
    def wrap(env):
        return wrappers.frame_stack(wrappers.flicker(wrappers.show_last_action(env), 0.5), 2)

    game = testing.probe_game(3)
    env = wrap(auto_reset(game)) if outside else auto_reset(wrap(game))
    first, steps = play(env, 60)
    for obs in (first.obs, steps.obs, steps.next_obs):
        assert (obs.legal == [True, False, True]).all()
    np.testing.assert_array_equal(steps.obs.player, (np.arange(1, 61) % 3) % 2)
    assert env.spec.obs.legal.shape == (3,) and env.spec.obs.player == DiscreteSpec(2)
    shapes = {name: spec.shape for name, spec in env.spec.obs.view.items()}
    assert shapes == {"obs": (6,), "last_action": (6,), "last_reward": (2,)}
    assert shapes == {name: x.shape[1:] for name, x in steps.obs.view.items()}
    blank = steps.next_obs.view["last_action"][:, 3:].sum(-1) == 0
    assert 0.2 < blank.mean() < 0.8


@pytest.mark.parametrize("probability", [1.0, -0.1, float("nan")])
def test_an_impossible_flicker_is_refused(probability):
    with pytest.raises(ValueError, match=r"probability=.* is outside \[0, 1\)"):
        wrappers.flicker(count(), probability)


def test_every_pure_environment_takes_flicker_by_name():
    for name in ("podium/Catch", "Breakout-MinAtar"):
        env = envs.make(name, flicker=0.9)
        timesteps = jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.key(0), 64))[1]
        blank = ~timesteps.obs.astype(bool).reshape(64, -1).any(-1)
        assert 0.7 < blank.mean() < 1.0 and timesteps.obs.dtype == env.spec.obs.dtype
    with pytest.raises(ValueError, match="flicker cannot blank the discrete observations of FrozenLake-misc"):
        envs.make("FrozenLake-misc", flicker=0.5)
    with pytest.raises(ValueError, match="flicker='often' must be a number"):
        envs.make("podium/Catch", flicker="often")
    envs.register("test/OnTheCPU", lambda: on_host(native.catch()))
    try:
        with pytest.raises(ValueError, match="flicker=0.5 is for pure environments, and test/OnTheCPU runs on the CPU"):
            envs.make("test/OnTheCPU", flicker=0.5)
    finally:
        del envs._factories["test/OnTheCPU"]


@pytest.mark.parametrize("what", ["obs", "reward"])
def test_where_a_simulator_loses_its_numbers_the_episode_is_truncated(what):
    env = wrappers.truncate_nonfinite(losing(native.corridor(length=8), what))
    state, _ = env.reset(jax.random.key(0))
    for _ in range(2):
        state, before = env.step(jax.random.key(0), state, 1)
        assert not before.info["nonfinite"] and not before.last
    state, timestep = env.step(jax.random.key(0), state, 1)
    assert timestep.info["nonfinite"] and timestep.truncated and not timestep.terminated and timestep.reward == 0
    assert timestep.next_obs.tolist() == before.next_obs.tolist(), "the last finite observation"
    testing.check_env(auto_reset(env), num_steps=20)
    with pytest.raises(ValueError, match="resets itself"):
        wrappers.truncate_nonfinite(auto_reset(env))


@pytest.mark.parametrize("order", [1, -1])
def test_an_episode_that_lost_its_numbers_is_counted_whatever_else_is_wrapped(order):
    """Also where ends are told from lost lives; what was paid until then counts, on either side of a clip."""
    env = losing(native.corridor(length=8), "reward")

    def step(key, state, action):
        state, timestep = env.step(key, state, action)
        return state, timestep._replace(info={"episode_end": timestep.terminated})

    def reset(key):
        state, timestep = env.reset(key)
        return state, timestep._replace(info={"episode_end": timestep.terminated})

    wrapped = env._replace(reset=reset, step=step)
    for wrap in (wrappers.clip_reward, wrappers.truncate_nonfinite)[::order]:
        wrapped = wrap(wrapped)
    _, steps = play(wrappers.episode_statistics(auto_reset(wrapped)), 9, lambda t: 1)
    assert steps.info["episode_end"].tolist() == [False, False, True] * 3
    assert steps.info["episode_length"].tolist() == [1, 2, 3] * 3 and not steps.info["raw_reward"].any()
    assert steps.info["nonfinite"].tolist() == steps.truncated.tolist() == steps.info["episode_end"].tolist()


@pytest.mark.parametrize("placement", [Anakin(1), Sebulba(1, 1, groups=1)])
def test_steps_that_lost_their_numbers_are_counted(placement):
    env = wrappers.truncate_nonfinite(losing(native.corridor(length=8), "obs", at=4))
    agent = ppo.make(ppo.Config(hidden_sizes=(4,), num_minibatches=1, num_epochs=1))
    program = placement.build(agent, env, num_envs=4, rollout_length=8)
    _, metrics = program.chunk(program.init(0), 1)
    try:
        assert float(np.sum(metrics["nonfinite_steps"])) == 8 == float(np.sum(metrics["episodes"]))
        testing.check_metrics(program, metrics)
    finally:
        program.close()


@pytest.mark.parametrize(
    "wrap",
    [
        lambda env: wrappers.frame_stack(env, 2),
        wrappers.show_last_action,
        lambda env: wrappers.flicker(wrappers.time_limit(env, 7), probability=0.3),
        lambda env: wrappers.action_repeat(env=env, num_repeats=2),
    ],
)
def test_what_an_evaluation_plays_is_wrapped_too(wrap):
    task = envs.make("podium/Catch")
    other = task._replace(spec=dataclasses.replace(task.spec, name="other"))
    wrapped = wrap(task._replace(evaluation=other))
    assert wrapped.evaluation.spec.sha256() == dataclasses.replace(wrapped.spec, name="other").sha256()
    shapes = jax.tree.map(lambda spec: tuple(spec.shape), wrapped.spec.obs, is_leaf=is_spec)
    _, first = wrapped.evaluation.reset(jax.random.key(0))
    assert jax.tree.map(jnp.shape, first.obs) == shapes


@pytest.mark.parametrize("wrap", [wrappers.sticky_actions, lambda env: wrappers.action_repeat(env, 2)])
def test_no_move_is_taken_again_where_it_would_be_anothers(wrap):
    with pytest.raises(ValueError, match="podium/TicTacToe, where players take turns, that is another's move"):
        wrap(envs.make("podium/TicTacToe"))
