"""Games in ale-py brought to where a test begins: after a reset, in their midst, or shortly before their end."""

from __future__ import annotations

import functools
from collections import deque
from itertools import islice
from typing import Any

from atari import oracle
from podium.envs.atari import states
from podium.envs.atari.games import Game, find
from podium.envs.atari.starts import Starts

ENDING = {
    "Asterix": 1, "Berzerk": 0, "Breakout": 1, "Frostbite": 0, "Jamesbond": 1, "Qbert": 1, "RoadRunner": 0,
    "WizardOfWor": 0,
}  # fmt: skip
"""Games that random actions lose soon, and the seed of those that do."""


def after_reset(game: Game) -> Any:
    """Return ale-py after `loadROM` and `reset_game`."""
    ale = oracle.make(game.rom)
    ale.reset_game()
    return ale


def near_end(name: str, frames: int, lives: int = 0) -> tuple[Any, list[int], Starts]:
    """Return ale-py so many frames before no more lives than these are left, the actions to there, and its state.

    With no `lives` that is the end of the game.
    """
    game = find(name)
    data, actions = _before_end(game, ENDING[name], frames, lives)
    ale = after_reset(game)
    for action in actions[:-frames]:
        oracle.act(ale, action)
    # What ale-py's state does not hold is then as it was when it was recorded, too.
    assert bytes(ale.cloneState().__getstate__()) == data
    return ale, actions[-frames:], states.from_ale(ale, game)


@functools.cache
def _before_end(game: Game, seed: int, frames: int, lives: int) -> tuple[bytes, list[int]]:
    ale = after_reset(game)
    actions, before = [], deque([bytes(ale.cloneState().__getstate__())], frames)
    for action in islice(oracle.held_actions(list(game.minimal_actions), seed), 3000):
        oracle.act(ale, action)
        actions.append(action)
        if ale.game_over() or 0 < ale.lives() <= lives:
            return before[0], actions
        before.append(bytes(ale.cloneState().__getstate__()))
    raise AssertionError(f"{game.name} did not end.")
