"""A policy's game on the device as an animated GIF, in the colours of ale-py."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest
from PIL import Image, ImageSequence

from podium import envs
from podium.agents import ppo
from podium.commands import replay
from podium.envs.atari import states
from podium.evaluate import Policy

ale_py = pytest.importorskip("ale_py", reason='ale-py is in the extra: pip install "podium[atari]"')
roms = pytest.importorskip("ale_py.roms")


def test_a_game_played_at_random_is_shown_in_true_colours(tmp_path: Path) -> None:
    """Every frame of the file, to the pixel; the actions that were drawn are repeated in ale-py."""
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    ale = ale_py.ALEInterface()
    ale.setFloat("repeat_action_probability", 0.0)
    ale.loadROM(roms.get_rom_path("breakout"))
    ale.reset_game()
    options = {"screen": 42, "frame_skip": 1, "sticky_actions": 0.0, "max_episode_frames": 12}
    env = envs.make("atari/Breakout", start_states=states.from_ale(ale, "Breakout"), **options)
    agent = ppo.make(ppo.Config(hidden_sizes=(8,)))
    policy = Policy(agent, agent.actor(agent.init(jax.random.key(0), env.spec)), env.spec)
    [episode] = replay.play(policy, env, episodes=1, greedy=False)
    assert (episode.length, episode.ending) == (12, "truncated")
    # Frames that equal the one before are one in the file: only those that differ are looked for.
    shown = [ale.getScreenRGB()]
    for state in episode.states[1:-1]:  # An environment that ends begins again: the last state is of the next episode.
        ale.act(ale_py.Action(int(state.consoles.held)))
        if (ale.getScreenRGB() != shown[-1]).any():
            shown.append(ale.getScreenRGB())
    path = tmp_path / "game.gif"
    assert replay.write_gif(path, env, [episode]) == 13
    with Image.open(path) as gif:
        frames = [np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(gif)]
    assert len(shown) > 2 and len(frames) >= len(shown)
    for frame, wanted in zip(frames, shown, strict=False):
        np.testing.assert_array_equal(frame, wanted)
