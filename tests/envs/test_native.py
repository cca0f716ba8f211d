"""podium's own environments: their optima, reached by hand."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from podium import envs
from podium.envs import native


def play(env, policy, key):
    """Return the rewards of one episode under `policy(obs)`."""
    state, timestep = env.reset(key)
    step, rewards = jax.jit(env.step), []
    while not timestep.last:
        state, timestep = step(key, state, policy(np.asarray(timestep.obs)))
        rewards.append(float(timestep.reward))
    return rewards, timestep


def test_catch_pays_one_to_who_follows_the_ball():
    def follow(obs):
        ball, paddle = obs[..., 0].sum(0).argmax(), obs[..., 1].sum(0).argmax()
        return 1 + np.sign(int(ball) - int(paddle))

    env = native.catch(rows=4, columns=5)
    for seed in range(6):
        rewards, timestep = play(env, follow, jax.random.key(seed))
        assert rewards == [0, 0, 1]
        assert timestep.terminated and not timestep.truncated


def test_catch_pays_minus_one_for_a_miss():
    env = native.catch(rows=3, columns=3)
    returns = {sum(play(env, lambda obs: 1, jax.random.key(seed))[0]) for seed in range(8)}
    assert returns == {1.0, -1.0}


def test_corridor_is_length_minus_one_steps_long():
    rewards, timestep = play(native.corridor(length=5), lambda obs: 1, jax.random.key(0))
    assert rewards == [0, 0, 0, 1] and timestep.terminated


def test_corridor_truncates_who_stays():
    rewards, timestep = play(native.corridor(length=5, max_steps=7), lambda obs: 0, jax.random.key(0))
    assert rewards == [0] * 7 and timestep.truncated and not timestep.terminated


def test_corridor_sets_both_flags_when_the_limit_meets_the_goal():
    _, timestep = play(native.corridor(length=4, max_steps=3), lambda obs: 1, jax.random.key(0))
    assert timestep.terminated and timestep.truncated


def test_repeat_first_shows_the_cue_once_and_pays_for_it():
    env = native.repeat_first(num_cues=3, delay=2)
    state, timestep = env.reset(jax.random.key(3))
    cue = int(timestep.obs.argmax())
    seen = []
    for _ in range(3):
        state, timestep = env.step(jax.random.key(0), state, cue)
        seen.append(timestep.obs.tolist())
    assert seen == [[0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 0, 0]]
    assert timestep.reward == 1 and timestep.terminated
    rewards, _ = play(env, lambda obs: (cue + 1) % 3, jax.random.key(3))
    assert rewards == [0, 0, 0]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("podium/Catch", {"rows": 1}),
        ("podium/Catch", {"rows": "5"}),
        ("podium/Catch", {"rows": 5.5}),
        ("podium/Catch", {"rows": 3, "columns": 9}),
        ("podium/Corridor", {"length": 1}),
        ("podium/Corridor", {"length": 9, "max_steps": 7}),
        ("podium/RepeatFirst", {"num_cues": 1}),
        ("podium/RepeatFirst", {"delay": 0}),
    ],
)
def test_bad_arguments_are_refused(name, options):
    with pytest.raises(ValueError, match="="):
        envs.make(name, **options)
