"""Renderers return pictures, and move with the state."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from podium import envs
from podium.env import auto_reset
from podium.envs import render, wrappers

PICTURED = [
    "CartPole-v1",
    "Pendulum-v1",
    "Breakout-MinAtar",
    "podium/Catch",
    "podium/Corridor",
    "podium/RepeatFirst",
]


@pytest.mark.parametrize("name", PICTURED)
def test_picture_of_a_state_changes_with_the_state(name):
    env = envs.make(name)
    state, _ = env.reset(jax.random.key(0))
    before = env.render(state)
    assert before.dtype == np.uint8 and before.ndim == 3 and before.shape[2] == 3
    for t in range(3):
        state, _ = env.step(jax.random.key(t), state, env.spec.action.zeros() + 1)
    assert not np.array_equal(before, env.render(state))


def test_every_minatar_game_has_a_picture():
    assert all(envs.make(name).render is not None for name in envs.names() if name.endswith("MinAtar"))


def test_wrappers_pass_the_picture_through():
    env = envs.make("podium/Catch")
    wrapped = wrappers.time_limit(wrappers.sticky_actions(wrappers.clip_reward(env)), 5)
    wrapped = wrappers.frame_stack(wrappers.episode_statistics(auto_reset(wrapped)), 2)
    plain, inside = (e.reset(jax.random.key(0))[0] for e in (env, wrapped))
    np.testing.assert_array_equal(env.render(plain), wrapped.render(inside))


def test_pole_leans_the_way_the_angle_says():
    orange = np.array(render.ORANGE)
    columns = [np.argwhere((render.cartpole(0.0, a) == orange).all(-1))[:, 1].mean() for a in (-0.3, 0.0, 0.3)]
    assert columns[0] < columns[1] < columns[2]


def test_grid_shows_the_lowest_channel_on_top():
    picture = render.grid(np.array([[[1, 1], [0, 1], [0, 0]]]), cell=16)
    assert picture.shape == (16, 48, 3)
    assert [tuple(picture[8, x]) for x in (8, 24, 40)] == [render.CHANNELS[0], render.CHANNELS[1], render.CELL]
