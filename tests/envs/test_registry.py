"""Names, near misses and options of podium.envs."""

from __future__ import annotations

import gymnax
import pytest

from podium import envs
from podium.envs import native


def test_names_hold_every_family():
    names = envs.names()
    assert set(gymnax.registered_envs) < set(names)
    assert {"podium/Catch", "podium/Corridor", "podium/RepeatFirst", "atari/Pong", "atari/Mixed"} < set(names)
    assert sum(name.startswith("atari/") for name in names) == 58
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("breakout", "'atari/Breakout' or 'Breakout-MinAtar'"),
        ("cartpole", "'CartPole-v1'"),
        ("CartPole-v0", "'CartPole-v1'"),
        ("cart_pole", "'CartPole-v1'"),
        ("catch", "'podium/Catch' or 'Catch-bsuite'"),
        ("atari/breakout", "'atari/Breakout'"),
        ("mountaincar", "'MountainCar-v0'"),
        ("spaceinvader", "'atari/SpaceInvaders' or 'SpaceInvaders-MinAtar'"),
    ],
)
def test_unknown_name_suggests_what_was_meant(asked, meant):
    with pytest.raises(ValueError, match=f"Did you mean {meant}") as error:
        envs.make(asked)
    assert "podium.envs.names()" in str(error.value)


def test_name_like_no_other_gets_no_suggestion():
    with pytest.raises(ValueError, match=r"named 'qqqq'\. podium"):
        envs.make("qqqq")


@pytest.mark.parametrize(
    ("name", "option", "hint"),
    [
        ("podium/Catch", "row", r"Did you mean 'rows'\? It has: rows, columns"),
        ("CartPole-v1", "max_steps", "Did you mean 'max_steps_in_episode'"),
        ("atari/Pong", "frameskip", r"Did you mean 'frame_skip'\? It has: observation, frame_skip"),
        ("DeepSea-bsuite", "sizes", "Did you mean 'size'"),
    ],
)
def test_unknown_option_names_those_there_are(name, option, hint):
    with pytest.raises(ValueError, match=f"{name} has no option '{option}'. {hint}"):
        envs.make(name, **{option: 3})


def test_a_factory_is_a_function_that_returns_an_environment(monkeypatch):
    monkeypatch.setattr(envs, "_factories", dict(envs._factories))
    with pytest.raises(ValueError, match="factory=Env.* must be a function that returns the environment"):
        envs.register("test/Made", native.catch())
    envs.register("test/Nothing", lambda size=3: None)
    with pytest.raises(ValueError, match="the factory of test/Nothing returned None, which is neither a podium.Env"):
        envs.make("test/Nothing", flicker=0.5)


def test_register_adds_a_name_once():
    envs.register("test/TinyCatch", lambda columns=3: native.catch(4, columns))
    try:
        assert envs.make("test/TinyCatch", columns=2).spec.obs.shape == (4, 2, 2)
        with pytest.raises(ValueError, match="no option 'rows'"):
            envs.make("test/TinyCatch", rows=2)
        with pytest.raises(ValueError, match="taken"):
            envs.register("test/TinyCatch", native.catch)
    finally:
        del envs._factories["test/TinyCatch"]
