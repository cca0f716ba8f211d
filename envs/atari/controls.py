"""What a player's action does to the console's ports: joysticks, paddles, the fire buttons and the switches."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from podium.envs.atari.games import NUM_ACTIONS, Game
from podium.types import Array

KNOB_LOW, KNOB_HIGH, KNOB_STEP = 27_450, 790_196, 23_000
"""A paddle's resistance in ohms at its ends, and how far an action moves it in one frame."""

KNOB_CENTRE = (KNOB_LOW + KNOB_HIGH) // 2
"""Where the paddle stands after a reset."""

NEVER, ALWAYS = -(2**31), -1
"""Charges of pins that no paddle hangs on: bit 7 of them is what bit 7 of the pin reads as."""

UP, DOWN, LEFT, RIGHT, FIRE = 1, 2, 4, 8, 16
_PUSHED = (
    *(0, FIRE, UP, RIGHT, LEFT, DOWN, UP + RIGHT, UP + LEFT, DOWN + RIGHT, DOWN + LEFT),
    *(FIRE + way for way in (UP, RIGHT, LEFT, DOWN, UP + RIGHT, UP + LEFT, DOWN + RIGHT, DOWN + LEFT)),
)
_OPEN, _KNOB, _PARTNER, _CHARGED = range(4)


class Controls(NamedTuple):
    """What the ports hold during one frame; int32 [...] each.

    Attributes:
      port_a: the byte of the joysticks' pins and the paddles' buttons; 0 is pressed.
      port_b: the byte of the console's switches.
      fire: bit 7 of INPT4 and of INPT5, in place: 0 (pressed) or 128.
      charge: of INPT0 to INPT3. Zero or more: bit 7 reads 0 while the dump transistor is on, and becomes 1 more than so
        many CPU cycles after it was switched off. Below zero, `NEVER` or `ALWAYS`: bit 7 is that of this number.
      knob: the paddle's resistance after this frame's move, for the next frame; KNOB_CENTRE where there is none.
    """

    port_a: Array
    port_b: Array
    fire: tuple[Array, Array]
    charge: tuple[Array, Array, Array, Array]
    knob: Array


def controls(
    games: Game | Sequence[Game],
    which: Array,
    action: Array,
    knob: Array,
    *,
    reset: Array | bool = False,
    select: Array | bool = False,
    difficulty: Array | int = 0,
) -> Controls:
    """Return what the ports hold in one frame of play. The second player never moves.

    Args:
      games: what is played.
      which: int32 [...], the number in `games` of each environment's; ignored where there is but one.
      action: int32 [...], ale-py's number, 0 to 17; one that is illegal in the game acts as 0.
      knob: int32 [...], the paddle's resistance at the end of the frame before; KNOB_CENTRE after a reset.
      reset: bool [...], the RESET switch is held.
      select: bool [...], the SELECT switch is held.
      difficulty: int32 [...], bit 0 the left difficulty switch, bit 1 the right one; 1 is "A".
    """
    wiring = wiring_of((games,) if isinstance(games, Game) else tuple(games))
    row = action if len(wiring.pots) == 1 else which * NUM_ACTIONS + action
    kinds: Array | np.ndarray = wiring.pots[0]
    if len(wiring.pots) > 1:
        kinds = jnp.take(jnp.asarray(wiring.pots), which, mode="clip")
    return wired(wiring.words, kinds, row, knob, reset=reset, select=select, difficulty=difficulty)


def wired(
    words: Array | np.ndarray,
    kinds: Array | np.ndarray,
    row: Array,
    knob: Array,
    *,
    reset: Array | bool = False,
    select: Array | bool = False,
    difficulty: Array | int = 0,
) -> Controls:
    """Return `controls` from a `Wiring`, which may be an argument of the program: one for any game.

    Args:
      words: int32 [rows], of a `Wiring`.
      kinds: int32 [...], of its `pots`.
      row: int32 [...], of `words`: an action, or that of a game.
      knob: as for `controls`.
      reset: as for `controls`.
      select: as for `controls`.
      difficulty: as for `controls`.
    """
    word = jnp.take(jnp.asarray(words), row, mode="clip")
    turn = KNOB_STEP * (((word >> 10) & 1) - ((word >> 11) & 1))
    knob = jnp.where(turn == 0, knob, jnp.clip(knob + turn, KNOB_LOW, KNOB_HIGH))

    shape = jnp.broadcast_shapes(jnp.shape(word), jnp.shape(reset), jnp.shape(select), jnp.shape(difficulty))
    port_b = 0x3C + jnp.where(reset, 0, 1) + jnp.where(select, 0, 2) + ((jnp.asarray(difficulty, jnp.int32) & 3) << 6)

    pins = [(kinds >> (2 * pin)) & 3 for pin in range(4)]
    return Controls(
        word & 0xFF,
        jnp.broadcast_to(port_b, shape),
        ((word >> 1) & 0x80, (word >> 2) & 0x80),
        tuple(_charge(kind, knob) for kind in pins),  # type: ignore[arg-type]
        knob,
    )


def charge_cycles(resistance: Array) -> Array:
    """Return floor(1904 r / 100000), the CPU cycles in which a paddle of r ohms charges; exact in 32 bits to 18M ohms.

    >>> int(charge_cycles(790_196)) == 1904 * 790_196 // 100_000
    True
    """
    return resistance * 119 // 6250


def _charge(kind: Array | np.ndarray, knob: Array) -> Array:
    fixed = {_OPEN: NEVER, _PARTNER: KNOB_CENTRE * 119 // 6250, _CHARGED: ALWAYS}
    if isinstance(kind, np.generic):  # One game: no choice is left to the program.
        return charge_cycles(knob) if kind == _KNOB else jnp.full(jnp.shape(knob), fixed[int(kind)], jnp.int32)
    charge = jnp.full(jnp.shape(kind), NEVER, jnp.int32)
    for other in (_PARTNER, _CHARGED):
        charge = jnp.where(kind == other, fixed[other], charge)
    return jnp.where(kind == _KNOB, charge_cycles(knob), charge)


class Wiring(NamedTuple):
    """How games are wired.

    Attributes:
      words: int32 [games * actions], port A, then a bit each for INPT4, INPT5, left and right.
      pots: int32 [games], the kinds of four pins.
    """

    words: np.ndarray
    pots: np.ndarray


@functools.lru_cache(maxsize=64)
def wiring_of(games: tuple[Game, ...]) -> Wiring:
    """Return how games are wired."""
    words = [_word(game, action if action in game.legal_actions else 0) for game in games for action in range(18)]
    return Wiring(np.array(words, np.int32), np.array([_pots(game) for game in games], np.int32))


def _word(game: Game, action: int) -> int:
    pushed = _PUSHED[action]
    fire = bool(pushed & FIRE)
    if game.controller_left == "paddles":
        port_a = 0xFF ^ (fire << (6 if game.swap_paddles else 7))
        return port_a | 3 << 8 | bool(pushed & LEFT) << 10 | bool(pushed & RIGHT) << 11
    ways = pushed & 15
    if game.swap_ports:
        return (0xFF ^ ways) | 1 << 8 | (not fire) << 9
    return (0xFF ^ ways << 4) | (not fire) << 8 | 1 << 9


def _pots(game: Game) -> int:
    pins = [_OPEN] * 4
    if game.controller_left == "paddles":
        pins[:2] = (_PARTNER, _KNOB) if game.swap_paddles else (_KNOB, _PARTNER)
    if game.controller_right == "paddles":
        pins[2:] = (_CHARGED, _CHARGED)
    return sum(kind << (2 * pin) for pin, kind in enumerate(pins))
