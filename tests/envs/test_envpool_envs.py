"""envpool's environments: where episodes end, lives, rewards, and what must not reach native code."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from podium import envs, testing
from podium.envs import atari_host, envpool_envs
from podium.host import HostEnvFactory

envpool = pytest.importorskip("envpool", reason='envpool is in the extra: pip install "podium[atari]"')


def play(host_envs: HostEnvFactory, actions: Any, seed: int = 0) -> Any:
    """Return the TimeSteps, [1 + T, B, ...], row 0 that of the reset."""
    actions = np.asarray(actions)
    env = host_envs.make(actions.shape[1], seed, 0)
    steps = [env.reset()]
    for action in actions:
        env.send(action)
        steps.append(env.recv())
    env.close()
    return jax.tree.map(lambda *x: np.stack(x), *steps)


def test_listed_names_are_envpools():
    known = set(envpool.list_all_envs())
    assert {name.removeprefix(envpool_envs.PREFIX) for name in envpool_envs.names()} <= known
    assert len(set(atari_host.GAMES)) == len(atari_host.GAMES) == 57


@pytest.mark.parametrize(
    ("name", "options", "num_steps"),
    [
        ("envpool/CartPole-v1", {}, 100),
        ("envpool/HalfCheetah-v4", {"max_episode_steps": 7}, 20),
        ("envpool/FrozenLake-v1", {}, 40),
        ("Breakout-v5", {"life_loss": True, "max_episode_frames": 50}, 30),
    ],
)
def test_contract(name, options, num_steps):
    testing.check_host_env(envs.make(name, **options), num_envs=2, num_steps=num_steps)


def test_rows_after_an_end_are_no_transition():
    seen = play(envs.make("envpool/CartPole-v1"), np.ones((80, 4), np.int32))
    ends = np.argwhere(seen.terminated[:-1])
    assert len(ends) > 8 and not seen.truncated.any()
    for t, i in ends:
        x, _, angle, _ = seen.obs[t, i]
        assert abs(angle) > 0.2 or abs(x) > 2.4
        assert not seen.valid[t + 1, i] and seen.reward[t + 1, i] == 0
        assert np.all(np.abs(seen.obs[t + 1, i]) <= 0.05)
    assert (~seen.valid[1:]).sum() == len(ends)


def test_time_limit_truncates():
    made = envs.make("envpool/Pendulum-v1", max_episode_steps=5)
    seen = play(made, np.zeros((12, 2, 1), np.float32))
    assert made.spec.max_episode_steps == 5 and not seen.terminated.any()
    assert np.flatnonzero(seen.truncated[:, 0]).tolist() == [5, 11]
    assert np.flatnonzero(~seen.valid[:, 0]).tolist() == [0, 6, 12]


def test_continuous_actions_are_clipped():
    pendulum = envs.make("envpool/Pendulum-v1")
    steps = [play(pendulum, np.full((3, 2, 1), torque, np.float32)) for torque in (2.0, 200.0)]
    jax.tree.map(np.testing.assert_array_equal, *steps)


def test_lost_lives_end_episodes_for_learning_only():
    actions = np.random.default_rng(0).integers(0, 4, (300, 1))
    plain = play(envs.make("Breakout-v5", noop_max=1), actions)
    seen = play(envs.make("Breakout-v5", noop_max=1, life_loss=True), actions)
    for field in ("obs", "reward", "valid", "info"):
        jax.tree.map(np.testing.assert_array_equal, getattr(seen, field), getattr(plain, field))
    end = int(np.flatnonzero(seen.info["episode_end"])[0])
    lost = np.flatnonzero(seen.terminated[: end + 1, 0])
    assert len(lost) == 5 and lost[-1] == end
    assert np.flatnonzero(plain.terminated[: end + 1, 0]).tolist() == [end]
    for t in lost[:-1]:
        assert seen.valid[t + 1, 0]
        np.testing.assert_array_equal(seen.obs[t + 1, 0, ..., :-1], seen.obs[t, 0, ..., 1:])
    assert not seen.valid[end + 1, 0]


def test_reward_is_the_sign_and_the_raw_one_stays():
    actions = np.random.default_rng(0).integers(0, 6, (150, 2))
    made = envs.make("SpaceInvaders-v5", life_loss=True)
    assert made.evaluation is not None
    clipped, scored = (play(each, actions) for each in (made, made.evaluation))
    raw = clipped.info["raw_reward"]
    assert raw.max() >= 5
    np.testing.assert_array_equal(clipped.reward, np.sign(raw))
    np.testing.assert_array_equal(scored.reward, raw)
    np.testing.assert_array_equal(scored.info["raw_reward"], raw)


def test_evaluation_plays_whole_games_with_the_rest_as_trained():
    made = envs.make("Pong-v5", life_loss=True, repeat_action_probability=0.25, frame_skip=3, max_episode_frames=100)
    evaluation = made.evaluation
    assert evaluation is not None and made.frames_per_step == evaluation.frames_per_step == 3
    assert made.spec.max_episode_steps == evaluation.spec.max_episode_steps == 34
    changed = {"life_loss": False, "reward_clip": False}
    assert evaluation.record["options"] == {**made.record["options"], **changed}


def test_frames_are_last_and_the_cap_cuts():
    made = envs.make("Pong-v5", stack=2, screen=42, max_episode_frames=10)
    seen = play(made, np.zeros((5, 1), np.int32))
    assert seen.obs.shape == (6, 1, 42, 42, 2) and made.spec.obs.shape == (42, 42, 2)
    assert np.flatnonzero(seen.truncated).tolist() == [3] and not seen.terminated.any()
    assert np.flatnonzero(seen.info["episode_end"]).tolist() == [3]
    np.testing.assert_array_equal(seen.obs[1:4, ..., 0], seen.obs[:3, ..., 1])


def test_sticky_actions_reach_the_emulator():
    made = envs.make("Pong-v5", repeat_action_probability=1.0)
    up, down = (play(made, np.full((8, 1), action)) for action in (2, 3))
    np.testing.assert_array_equal(up.obs, down.obs)
    assert envs.make("Pong-v5", full_action_space=True).spec.action.num_values == 18


@pytest.mark.parametrize(
    "action",
    [np.zeros(1, np.int32), np.zeros(3, np.int32), np.zeros((2, 1), np.int32), np.zeros(2), [0, 6], [-1, 0], [0, None]],
)
def test_bad_actions_are_refused_and_the_process_lives(action):
    env = envs.make("Pong-v5").make(2, 0, 0)
    env.reset()
    with pytest.raises(ValueError, match="were sent to"):
        env.send(action)
    env.send(np.zeros(2, np.int32))
    assert env.recv().valid.all()


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("Pong-v5", {"frame_skip": 0}, "frame_skip=0 must be a positive integer"),
        ("Pong-v5", {"stack": 0}, "stack=0 must be"),
        ("Pong-v5", {"screen": -84}, "screen=-84 must be"),
        ("Pong-v5", {"screen": 10**6}, "screen=1000000 is more than the 210 lines"),
        ("Pong-v5", {"stack": 4.0}, "stack=4.0 must be"),
        ("Pong-v5", {"noop_max": 0}, "noop_max=0 must be"),
        ("Pong-v5", {"num_threads": -1}, "num_threads=-1 must be"),
        ("Pong-v5", {"max_episode_frames": 2**40}, "max_episode_frames=1099511627776 must be"),
        ("Pong-v5", {"repeat_action_probability": 1.5}, "repeat_action_probability=1.5 must be a number from 0 to 1"),
        ("Pong-v5", {"reward_clip": 1}, "reward_clip=1 must be True or False"),
        ("Pong-v5", {"frameskip": 4}, "Pong-v5 has no option 'frameskip'. Did you mean 'frame_skip'"),
        ("envpool/CartPole-v1", {"max_episode_steps": 0}, "max_episode_steps=0 must be"),
        ("envpool/CartPole-v1", {"stack": 4}, "has no option 'stack'.* It has: max_episode_steps, num_threads"),
        ("envpool/Pong", {}, "envpool has no task 'Pong'. Did you mean 'envpool/Pong-v5'"),
        ("envpool/Pongo-v5", {}, "envpool has no task 'Pongo-v5'. Did you mean 'envpool/Pong-v5'"),
        ("envpool/Go9x9-v1", {}, "up to 2 player"),
        ("envpool/MiniGrid-Empty-5x5-v0", {}, "has 3 array"),
    ],
)
def test_refusals_before_native_code(name, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        envs.make(name, **options)


def test_any_game_of_envpool_can_be_made():
    assert envs.make("envpool/Adventure-v5").spec.obs.shape == (84, 84, 4)


@pytest.mark.parametrize("sizes", [(0, 0, 0), (1, -1, 0), (1, 0, -1)])
def test_sizes_and_seeds_are_checked(sizes):
    with pytest.raises(ValueError, match=r"is below [01]; use [01] or more"):
        envs.make("envpool/CartPole-v1").make(*sizes)


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_close_ends_the_threads_also_with_a_step_under_way():
    count = lambda: len(list(Path("/proc/self/task").iterdir()))
    gc.collect()  # Of tests before.
    before = count()
    env = envs.make("Pong-v5", num_threads=3).make(3, 0, 0)
    env.reset()
    env.send(np.zeros(3, np.int32))
    assert count() >= before + 3
    env.close()
    gc.collect()
    assert count() == before
