"""The batched core against ale-py, frame by frame: RAM, reward, lives, the end of a game, and screens."""

from __future__ import annotations

import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atari import oracle
from podium.envs.atari import starts, states
from podium.envs.atari.emulator import Consoles, Emulator
from podium.envs.atari.games import GAMES, Game
from podium.envs.atari.roms import find_rom

pytest.importorskip("ale_py", reason='ale-py is in the extra: pip install "podium[atari]"')


class Batch:
    """A lane for each of some games, in one program, beside an ale-py for each."""

    def __init__(self, games: tuple[Game, ...], seed: int):
        self.games, self.random = games, random.Random(seed)
        self.emulator = Emulator(games, tuple(find_rom(game) for game in games))
        self.ales = [oracle.make(game.rom) for game in games]
        for ale in self.ales:
            ale.reset_game()
        self.which = jnp.arange(len(games), dtype=jnp.int32)
        self.consoles = self.begin(states.join([states.from_ale(*pair) for pair in zip(self.ales, games, strict=True)]))
        self.actions = [0] * len(games)
        self.rewards = self.ends = self.screens = 0
        self.frame = jax.jit(self._frame)

    def begin(self, found: starts.Starts) -> Consoles:
        found = jax.tree.map(jnp.asarray, found)
        return self.emulator.begin(found.machine, self.which, found.knob, found.lives, found.started)

    def _frame(self, consoles: Consoles, action: Any, draws: Any) -> Any:
        everywhere = jnp.ones(len(self.games), bool)
        machine, knob, screens = self.emulator.frame(
            consoles.machine, self.which, action, consoles.knob, everywhere, draws
        )
        ram = machine.ram[:, :128].astype(jnp.int32)
        rules, *judged = self.emulator.rules.frame(self.which, consoles.rules, ram)
        return consoles._replace(machine=machine, knob=knob, rules=rules), judged, screens

    def play(self, frames: int, draw_every: int) -> list[str]:
        """Play random actions, each held for a while; return what differed. Games that end begin anew."""
        found = []
        for number in range(frames):
            for lane, game in enumerate(self.games):
                if self.random.random() < 0.25:
                    self.actions[lane] = self.random.choice(game.minimal_actions)
            draws = number % draw_every == 0
            self.consoles, judged, screens = self.frame(self.consoles, jnp.array(self.actions), jnp.array(draws))
            ram, (reward, lives, over) = np.asarray(self.consoles.machine.ram), map(np.asarray, judged)
            screens = np.asarray(screens)
            for lane, (game, ale) in enumerate(zip(self.games, self.ales, strict=True)):
                paid = oracle.act(ale, self.actions[lane])
                wanted = paid, ale.lives(), ale.game_over()
                got = reward[lane], lives[lane], over[lane]
                cells = np.flatnonzero(ram[lane] != ale.getRAM()) + 0x80
                if got != wanted or len(cells):
                    found.append(f"{game.name}, frame {number}: {got}, ale-py {wanted}, RAM {cells}")
                # Qbert's first frame goes on with what its reset left undone, over a picture that is not kept.
                if draws and not (game.name == "Qbert" and number == 0):
                    self.screens += 1
                    wrong = (screens[lane] != ale.getScreen()).sum()
                    found += [f"{game.name}, frame {number}: {wrong} pixels"] * bool(wrong)
                self.rewards += paid != 0
            self._begin_anew()
            if len(found) > 5:
                break
        return found

    def _begin_anew(self) -> None:
        for lane, (game, ale) in enumerate(zip(self.games, self.ales, strict=True)):
            if ale.game_over():
                self.ends += 1
                ale.reset_game()
                one = jax.tree.map(jnp.asarray, states.from_ale(ale, game))
                which = jnp.full(1, lane, jnp.int32)
                fresh = self.emulator.begin(one.machine, which, one.knob, one.lives, one.started)
                self.consoles = jax.tree.map(lambda old, new, lane=lane: old.at[lane].set(new[0]), self.consoles, fresh)


def test_a_hundred_frames_of_every_game_are_those_of_ale_py() -> None:
    """One program of 57 cartridges; 40 frames of every game and 100 of some were asked for."""
    batch = Batch(GAMES, seed=0)
    assert batch.play(100, draw_every=9) == []
    assert batch.screens == 12 * len(GAMES) - 1 and batch.rewards > 10


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_a_thousand_frames_of_every_game_are_those_of_ale_py(seed: int) -> None:
    batch = Batch(GAMES, seed)
    assert batch.play(1000, draw_every=25) == []
    assert batch.rewards > 300 and batch.ends > 5


@pytest.mark.slow
def test_resets_made_on_the_device_are_those_of_ale_py() -> None:
    """From the power switch through two resets of the environment, screens too."""
    emulator = Emulator(GAMES, tuple(find_rom(game) for game in GAMES))
    made = starts.make(emulator, 0)
    for lane, game in enumerate(GAMES):
        ale = oracle.make(game.rom)
        ale.reset_game()
        assert (made.machine.ram[lane, 0] == ale.getRAM()).all(), game.name
        if game.name != "Qbert":  # Its last frame is cut, and grey where ale-py says so.
            assert (made.screen[lane, 0] == ale.getScreen()).all(), game.name
