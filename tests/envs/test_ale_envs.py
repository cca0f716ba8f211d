"""The Atari games through ale-py: the same as through envpool."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from podium import envs, testing
from podium.envs import ale_envs
from podium.host import HostEnvFactory

pytest.importorskip("ale_py.vector_env", reason='ale-py is in the extra: pip install "podium[atari]"')


def play(host_envs: HostEnvFactory, actions: Any) -> Any:
    """Return the TimeSteps, [1 + T, B, ...], row 0 that of the reset."""
    env = host_envs.make(actions.shape[1], 0, 0)
    steps = [env.reset()]
    for action in actions:
        env.send(action)
        steps.append(env.recv())
    env.close()
    return jax.tree.map(lambda *x: np.stack(x), *steps)


def test_listed_names_can_be_made():
    for name in ale_envs.names():
        assert ale_envs._rom(name)


def test_contract():
    made = envs.make("ale/Breakout-v5", life_loss=True, max_episode_frames=50)
    assert made.spec.max_episode_steps == 13
    testing.check_host_env(made, num_envs=2, num_steps=30)


@pytest.mark.parametrize(("game", "num_steps"), [("Pong", 80), ("Breakout", 250)])
def test_gives_what_envpool_gives(game, num_steps):
    pytest.importorskip("envpool", reason='envpool is in the extra: pip install "podium[atari]"')
    made = [envs.make(f"{prefix}{game}-v5", noop_max=1, life_loss=True) for prefix in ("", "ale/")]
    num_actions = made[0].spec.action.num_values
    actions = np.random.default_rng(0).integers(0, num_actions, (num_steps, 1))
    ours, theirs = (play(each, actions) for each in made)
    for field in ("reward", "terminated", "truncated", "valid", "info"):
        jax.tree.map(np.testing.assert_array_equal, getattr(ours, field), getattr(theirs, field))
    np.testing.assert_array_equal(ours.obs, theirs.obs)
    assert ours.info["raw_reward"].any() and (game == "Pong" or ours.terminated.sum() > 4)


@pytest.mark.parametrize("action", [np.zeros(1, np.int32), np.zeros(2), [0, 6], [-1, 0]])
def test_bad_actions_are_refused(action):
    env = envs.make("ale/Pong-v5").make(2, 0, 0)
    env.reset()
    with pytest.raises(ValueError, match="were sent to"):
        env.send(action)
    env.send(np.zeros(2, np.int32))
    assert env.recv().valid.all()


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("ale/Pongo-v5", {}, "ale-py has no game 'ale/Pongo-v5'. Did you mean 'ale/Pong-v5'"),
        ("ale/Pong-v5", {"noop_max": 0}, "noop_max=0 must be"),
        ("ale/Pong-v5", {"frames": 4}, "has no option 'frames'"),
    ],
)
def test_refusals(name, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        envs.make(name, **options)
