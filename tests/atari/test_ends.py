"""Ends in the environments atari/NAME: lost lives, games over, limits on frames, against ale-py where it has them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atari import oracle, play
from podium import envs
from podium.env import Env
from podium.envs.atari import states
from podium.envs.atari.games import find

pytest.importorskip("ale_py", reason='ale-py is in the extra: pip install "podium[atari]"')

RAM = {"observation": "ram", "frame_skip": 1, "sticky_actions": 0.0, "noop_max": 0}
BREAKOUT = find("Breakout")


def batched(env: Env) -> tuple[Any, Any]:
    return jax.jit(jax.vmap(env.reset)), jax.jit(jax.vmap(env.step))


def keys(*shape: int, seed: int = 0) -> Any:
    return jax.random.split(jax.random.key(seed), shape)


def index(action: int) -> int:
    return BREAKOUT.minimal_actions.index(action)


def resized(grey: np.ndarray) -> np.ndarray:
    """Return [84, 84], the mean over areas, not rounded."""

    def weights(old: int) -> np.ndarray:
        edges = np.arange(85) * old / 84
        pixels = np.arange(old)
        overlap = np.minimum(edges[1:, None], pixels + 1) - np.maximum(edges[:-1, None], pixels)
        return np.maximum(overlap, 0) * 84 / old

    return weights(210) @ grey.astype(np.float64) @ weights(160).T


def test_pictures_lives_and_rewards_of_held_actions():
    """Four frames an action; both losses of a life and the end of the game, each in an episode of its own."""
    games = [play.near_end("Breakout", 28, lives) for lives in (1, 0)]
    found = states.join([state for _, _, state in games])
    env = envs.make("atari/Breakout", life_loss=True, start_states=found)
    reset, step = batched(env)
    state, first = reset(keys(16))
    lanes = [int(np.flatnonzero(np.asarray(first.info["lives"]) == lives)[0]) for lives in (2, 1)]
    state, first = jax.tree.map(lambda x: x[jnp.asarray(lanes)], (state, first))
    assert env.spec.obs.shape == (84, 84, 4)
    for number, (ale, _, _) in enumerate(games):
        picture = resized(ale.getScreenGrayscale())
        assert np.abs(np.asarray(first.obs[number], float) - picture[..., None]).max() <= 0.5 + 1e-6
        np.testing.assert_array_equal(env.render(states.get_state(state, number)), ale.getScreenRGB())
    lost, over = np.zeros(2, bool), np.zeros(2, bool)
    taken = [[resized(ale.getScreenGrayscale())] * 4 for ale, _, _ in games]
    for number in range(8):
        held = [actions[4 * number] if 4 * number < len(actions) else 1 for _, actions, _ in games]
        before = [ale.lives() for ale, _, _ in games]
        state, got = step(keys(2, seed=number), state, jnp.asarray([index(action) for action in held]))
        for lane, (ale, _, _) in enumerate(games):
            if over[lane]:
                continue
            reward, greys = 0, []
            for _ in range(4):
                if not ale.game_over():
                    reward += oracle.act(ale, held[lane])
                    greys.append(ale.getScreenGrayscale())
            loses = ale.lives() < before[lane]
            assert float(got.info["raw_reward"][lane]) == reward and float(got.reward[lane]) == np.sign(reward)
            assert bool(got.terminated[lane]) == (loses or ale.game_over())
            assert bool(got.info["episode_end"][lane]) == ale.game_over()
            assert int(got.info["lives"][lane]) == ale.lives()
            lost[lane] |= loses and not ale.game_over()
            over[lane] = ale.game_over()
            if not over[lane]:
                taken[lane] = [*taken[lane][1:], resized(np.maximum(greys[-2], greys[-1]))]
                difference = np.asarray(got.next_obs[lane], float) - np.stack(taken[lane], -1)
                assert np.abs(difference).max() <= 0.5 + 1e-6
                # After a lost life the game goes on, with the pictures that it has.
                np.testing.assert_array_equal(got.obs[lane], got.next_obs[lane])
                np.testing.assert_array_equal(env.render(states.get_state(state, lane)), ale.getScreenRGB())
    assert lost[0] and over[1]


@pytest.mark.slow
def test_sticky_actions_and_limits_on_frames():
    """A fourth of the frames keeps the action before; all 18 actions; episodes of nine frames, which the limit cuts."""
    _, _, start = play.near_end("Breakout", 12)
    options: dict[str, Any] = {"observation": "ram", "noop_max": 0, "start_states": start, "full_action_space": True}
    env = envs.make("atari/Breakout", frame_skip=1, sticky_actions=0.25, max_episode_frames=9, **options)
    assert env.spec.action.num_values == 18 and env.spec.max_episode_steps == 9
    reset, step = batched(env)
    num_envs = 128
    state, first = reset(keys(num_envs))
    assert not np.asarray(first.info["episode_end"]).any()
    rng, stuck, count, before = np.random.default_rng(0), 0, 0, np.zeros(num_envs, int)
    for number in range(1, 20):
        action = (before + rng.integers(1, 18, num_envs)) % 18
        state, got = step(keys(num_envs, seed=number), state, action)
        ends = number % 9 == 0
        np.testing.assert_array_equal(got.truncated, ends)
        np.testing.assert_array_equal(got.terminated, False)
        np.testing.assert_array_equal(got.info["episode_end"], ends)
        held = np.asarray(state.consoles.held)
        if ends:
            np.testing.assert_array_equal(held, 0)  # A new episode begins with no action before.
        else:
            assert ((held == action) | (held == before)).all()
            stuck, count = stuck + (held == before).sum(), count + num_envs
        before = held
    assert abs(stuck / count - 0.25) < 4 * np.sqrt(0.25 * 0.75 / count)


def test_an_end_at_the_limit_is_an_end():
    _, actions, start = play.near_end("Breakout", 4)
    env = envs.make("atari/Breakout", **RAM, start_states=start, max_episode_frames=4)
    state, _ = env.reset(jax.random.key(0))
    run = jax.jit(lambda state, actions: jax.lax.scan(lambda s, a: env.step(jax.random.key(1), s, a), state, actions))
    _, got = run(state, jnp.asarray([index(action) for action in actions]))
    np.testing.assert_array_equal(got.terminated, [False, False, False, True])
    np.testing.assert_array_equal(got.truncated, False)


@pytest.mark.slow
def test_mixed_games_are_each_ale_py():
    names = ["Breakout", "Asterix", "RoadRunner"]
    ends = [play.near_end(name, 6) for name in names]
    given = {name: state for name, (_, _, state) in zip(names, ends, strict=True)}
    given["Asterix"] = states.join([given["Asterix"]] * 5)  # Games are drawn alike, however many states they have.
    env = envs.make("atari/Mixed", games=names, **RAM, start_states=given)
    assert env.spec.action.num_values == 18
    reset, step = batched(env)
    state, first = reset(keys(300))
    drawn = np.asarray(first.info["game"])
    assert (np.abs(np.bincount(drawn) - 100) < 40).all()
    lanes = [int(np.flatnonzero(drawn == number)[0]) for number in range(3)]
    state = jax.tree.map(lambda x: x[jnp.asarray(lanes)], state)
    for number in range(6):
        actions = [actions[number] for _, actions, _ in ends]
        state, got = step(keys(3, seed=number), state, jnp.asarray(actions))
        for lane, (ale, _, _) in enumerate(ends):
            reward = oracle.act(ale, actions[lane])
            np.testing.assert_array_equal(got.next_obs[lane], ale.getRAM())
            assert (float(got.reward[lane]), int(got.info["lives"][lane])) == (reward, ale.lives())
            assert bool(got.terminated[lane]) == ale.game_over()
    assert np.asarray(got.terminated).all()
