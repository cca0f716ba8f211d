"""Emulated consoles against ale-py, frame by frame: memory, reward, lives, end, and screens where they are drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atari import oracle, play
from podium.envs.atari import starts, states
from podium.envs.atari.emulator import Consoles, Emulator
from podium.envs.atari.games import GAMES, Game, find
from podium.envs.atari.roms import find_rom
from podium.envs.atari.starts import Starts

pytest.importorskip("ale_py", reason='ale-py is in the extra: pip install "podium[atari]"')

Lane = tuple[Game, Any, Iterator[int]]
"""A game, ale-py with it, and what is played."""

UNDRAWN = {"Qbert": 2}
"""Frames after a reset in which ale-py shows lines that nobody drew, as they were before; here they are black."""


def emulator(games: tuple[Game, ...]) -> Emulator:
    return Emulator(games, tuple(map(find_rom, games)))


def begin(emulator: Emulator, which: Any, found: Starts) -> Consoles:
    found = jax.tree.map(jnp.asarray, found)
    return emulator.begin(found.machine, jnp.asarray(which, jnp.int32), found.knob, found.lives, found.started)


def compiled(emulator: Emulator, draws: bool) -> Callable[..., Any]:
    """Return a function of one frame."""
    return jax.jit(lambda consoles, action: emulator.play(consoles, action, jnp.zeros((len(action), 1), bool), draws))


def differences(lane: Lane, action: int, ram: Any, reward: Any, lives: Any, over: Any, screen: Any | None) -> list[str]:
    """Play the frame in ale-py too and return what differs."""
    game, ale, _ = lane
    wanted = oracle.act(ale, action), ale.lives(), ale.game_over()
    found = [] if (wanted == (reward, lives, over)) else [f"reward, lives, over {reward, lives, over}, ale-py {wanted}"]
    if (cells := np.flatnonzero(ram[:128] != ale.getRAM())).size:
        found.append(f"RAM at {[hex(cell + 128) for cell in cells[:6]]}")
    if screen is not None and (pixels := np.argwhere(screen != ale.getScreen())).size:
        found.append(f"{len(pixels)} pixels, the first {pixels[0].tolist()}")
    return [f"{game.name}: {each}" for each in found]


def follow(lanes: list[Lane], emulator: Emulator, consoles: Consoles, num_frames: int, draw_every: int) -> int:
    """Play all lanes beside ale-py; where a game ends, both begin again from ale-py's reset. Return how many ended."""
    step = {draws: compiled(emulator, draws) for draws in (False, True)}
    since = np.zeros(len(lanes), int)
    ends = 0
    for frame in range(num_frames):
        actions = [next(actions) for _, _, actions in lanes]
        draws = frame % draw_every == 0
        consoles, played = step[draws](consoles, jnp.asarray(actions, jnp.int32))
        got = [np.asarray(x) for x in (consoles.machine.ram, played.reward, played.lives, played.over)]
        screens = np.asarray(played.screens[:, 1]) if draws else None
        wrong = []
        for number, lane in enumerate(lanes):
            shown = screens is not None and since[number] >= UNDRAWN.get(lane[0].name, 0)
            screen = screens[number] if shown else None
            wrong += differences(lane, actions[number], *(x[number] for x in got), screen)
        assert not wrong, f"frame {frame}: {wrong}"
        since += 1
        for number in np.flatnonzero(got[3]):
            game, ale, _ = lanes[number]
            ale.reset_game()
            which = consoles.which[number]
            fresh = begin(emulator, which[None], states.from_ale(ale, game))
            consoles = states.set_state(consoles, int(number), states.get_state(fresh, 0))
            since[number], ends = 0, ends + 1
    return ends


def test_all_games_in_one_program():
    """100 frames of each from its reset, and of eight games those around an end, after hundreds in ale-py."""
    engine = emulator(GAMES)
    lanes: list[Lane] = []
    for game in GAMES:
        lanes.append((game, play.after_reset(game), oracle.held_actions(list(game.minimal_actions), 0)))
    found = [states.from_ale(ale, game) for game, ale, _ in lanes]
    for number, name in enumerate(play.ENDING):
        ale, actions, state = play.near_end(name, 12 + 2 * number)
        lanes.append((find(name), ale, iter([*actions, *[0] * 100])))
        found.append(state)
    which = [GAMES.index(game) for game, _, _ in lanes]
    assert follow(lanes, engine, begin(engine, which, states.join(found)), 100, 1) >= len(play.ENDING)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_all_games_from_the_power_switch():
    """1,000 frames of each, from consoles that ale-py had no part in; games that end begin again."""
    engine = emulator(GAMES)
    made = starts.make(engine, 0)
    lanes: list[Lane] = []
    for number, game in enumerate(GAMES):
        ale = play.after_reset(game)
        assert bytes(made.machine.ram[number, 0, :128]) == oracle.ram(ale), game.name
        if game.name not in UNDRAWN:
            np.testing.assert_array_equal(made.screen[number, 0], ale.getScreen(), game.name)
        lanes.append((game, ale, oracle.held_actions(list(game.minimal_actions), 2)))
    first = jax.tree.map(lambda x: x[:, 0], made)
    follow(lanes, engine, begin(engine, range(len(GAMES)), first), 1000, 20)
