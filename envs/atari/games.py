"""What podium knows of each of the 57 Atari games: its cartridge, how it is wired and begun, and how it is scored.

The facts stand in `games.json`. They were measured through ale-py's public interface (0.12.1, default mode and
difficulty) and hold for it, frame by frame.
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import json
from typing import Any

from podium.envs import near_misses

Expression = int | str | tuple[Any, ...]
"""A rule over one frame's RAM; `podium.envs.atari.rules` says what it may hold and how it is evaluated."""

NUM_ACTIONS = 18
"""ale-py's actions: 0 none, 1 fire, 2 up, 3 right, 4 left, 5 down, 6 up-right, 7 up-left, 8 down-right, 9 down-left;
10 to 17 are the eight directions with fire."""

_SIZES = {"2K": 2048, "4K": 4096, "F8": 8192, "F6": 16384, "E0": 8192, "FE": 8192}


@dataclasses.dataclass(frozen=True)
class Variable:
    """A number that a rule remembers from frame to frame.

    Args:
      name: in the expressions of this game.
      init: its value before the first frame of an episode.
      next: its value in each frame.
    """

    name: str
    init: int
    next: Expression


@dataclasses.dataclass(frozen=True)
class VariationSelect:
    """How the console's switches choose the default game variation at a reset.

    Args:
      until: (address, values) of RAM cells, addresses $80 to $FF; SELECT is pressed until every cell holds one of its
        values.
      select_frames: that SELECT is held for, before one idle frame.
      before: (step, n) that come first: "reset_switch", n frames with RESET; "select", n presses of SELECT; "noop",
        n times action 0 at the environment's level.
      special: the name of a sequence of its own ("double_dunk"), or None.
    """

    until: tuple[tuple[int, tuple[int, ...]], ...] = ()
    select_frames: int = 0
    before: tuple[tuple[str, int], ...] = ()
    special: str | None = None


@dataclasses.dataclass(frozen=True)
class Game:
    """One game. Hashable, so that it may be a static argument of a compiled function.

    Args:
      name: as ALE writes it, without the version: "MsPacman", "UpNDown".
      rom: the name of its cartridge file without suffix: "ms_pacman".
      md5: of the cartridge, in hexadecimal.
      bank: how the cartridge is addressed: 2K, 4K, F8, F6, E0 or FE.
      minimal_actions: numbers of the actions that do something, in ale-py's order.
      terminal: 1 (or another number but 0) when the game is over.
      score: its points; how they grow is the reward, unless `reward` says otherwise.
      lives: as ale-py counts them.
      lives_at_reset: `lives` before the first frame of an episode.
      reward: of one frame; "delta" is the change of the score.
      variables: what else the rules remember, in the order of evaluation; they come before the three above.
      lives_kept_when_over: `lives` is reported as it is when the game is over, not as 0.
      legal_actions: any other action acts as 0.
      variation_select: see there; None when nothing is to be chosen.
      start_actions: actions of one frame each at the end of a reset.
      controller_left: "joystick" or "paddles", in the console's left port.
      controller_right: in the right port.
      swap_paddles: the player's paddle is the second of the left port.
      swap_ports: the player's joystick is in the right port.
      y_start: the first line that is drawn.
      height: lines that are drawn.
      hmove_blanks: False where moving objects blanks no pixels at the left edge.
      atari100k: one of the 26 games of the Atari-100k benchmark.
      notes: oddities, for people.
    """

    name: str
    rom: str
    md5: str
    bank: str
    minimal_actions: tuple[int, ...]
    terminal: Expression
    score: Expression
    lives: Expression
    lives_at_reset: int
    reward: Expression = "delta"
    variables: tuple[Variable, ...] = ()
    lives_kept_when_over: bool = False
    legal_actions: tuple[int, ...] = tuple(range(NUM_ACTIONS))
    variation_select: VariationSelect | None = None
    start_actions: tuple[int, ...] = ()
    controller_left: str = "joystick"
    controller_right: str = "joystick"
    swap_paddles: bool = False
    swap_ports: bool = False
    y_start: int = 34
    height: int = 210
    hmove_blanks: bool = True
    atari100k: bool = False
    notes: str = ""

    @property
    def rom_bytes(self) -> int:
        """Size of the cartridge."""
        return _SIZES[self.bank]


def find(name: str) -> Game:
    """Return the game called `name`.

    Raises:
      ValueError: there is none; the sentence names those that are near.

    >>> find("MsPacman").rom
    'ms_pacman'
    """
    for game in GAMES:
        if game.name == name:
            return game
    near = near_misses(name, [game.name for game in GAMES])
    hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    raise ValueError(f"No Atari game is named {name!r}.{hint} podium.envs.atari.games.GAMES lists the {len(GAMES)}.")


def _load() -> tuple[Game, ...]:
    text = importlib.resources.files(__package__).joinpath("games.json").read_text(encoding="utf-8")
    return tuple(_game(fields) for fields in json.loads(text)["games"])


def _game(fields: dict[str, Any]) -> Game:
    variables = tuple(Variable(**_frozen(variable)) for variable in fields.pop("variables", ()))
    variation_select = _variation_select(fields.pop("variation_select", None))
    return Game(**_frozen(fields), variables=variables, variation_select=variation_select)


def _variation_select(fields: dict[str, Any] | None) -> VariationSelect | None:
    if fields is None:
        return None
    until = tuple((int(cell.removeprefix("@"), 16), tuple(values)) for cell, values in fields.pop("until", ()))
    return VariationSelect(until, **_frozen(fields))


def _frozen(value: Any) -> Any:
    """Return what JSON gave with tuples for lists."""
    if isinstance(value, dict):
        return {name: _frozen(entry) for name, entry in value.items()}
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


GAMES: tuple[Game, ...] = _load()
"""The 57 games that scores are reported for (Atari-57), by name."""
