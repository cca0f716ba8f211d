"""Tic-tac-toe: three in a row on three by three."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from podium.env import Env
from podium.envs import render
from podium.envs.games.turns import Ply, Rules, make_env
from podium.types import Array, ArraySpec, Key

_LINES = np.array(
    [0b000000111, 0b000111000, 0b111000000, 0b001001001, 0b010010010, 0b100100100, 0b100010001, 0b001010100], np.int32
)


class TicTacToeState(NamedTuple):
    """Stones as sets of squares, bit 3 * row + column, int32: of who is to move, of the other; and who that is."""

    mine: Array
    theirs: Array
    player: Array


def tic_tac_toe(openings: int = 0, rules: bool = False) -> Env:
    """Make tic-tac-toe: two players in turn put a stone on a free square; three in a line win.

    Actions: 0 to 8, square 3 * row + column. The reward is 1 for the ply that makes a line, -1 for an illegal one,
    which loses at once, else 0; a full board is a draw. Played well by both it is a draw.

    Args:
      openings: an episode begins after 0 to so many random legal plies (`podium.envs.games.turns.make_env`).
      rules: whether observations hold the state, for planners.

    Returns:
      An `Env` with observations `Seen`: view float32 [3, 3, 2] in {0, 1}, the mover's stones and the other's; legal
      bool [9], the free squares; player 0 for who began.

    Raises:
      ValueError: for `openings` outside 0 to 8.

    >>> import jax
    >>> env = tic_tac_toe()
    >>> state, timestep = env.reset(jax.random.key(0))
    >>> state, timestep = env.step(jax.random.key(0), state, 4)
    >>> timestep.obs.view[1, 1].tolist(), float(timestep.turn), int(timestep.obs.legal.sum())
    ([0.0, 1.0], -1.0, 8)
    """
    squares = np.arange(9, dtype=np.int32)

    def deal(key: Key) -> TicTacToeState:
        del key
        return TicTacToeState(*(jnp.zeros((), jnp.int32),) * 3)

    def play(state: TicTacToeState, action: Array) -> Ply:
        stones = state.mine | (1 << action)
        won = jnp.any(stones & _LINES == _LINES)
        full = stones | state.theirs == 0b111111111
        new = TicTacToeState(state.theirs, stones, 1 - state.player)
        return Ply(new, won.astype(jnp.float32), won | full)

    def on_board(stones: Array) -> Array:
        return stones >> squares & 1

    def see(state: TicTacToeState) -> Array:
        planes = jnp.stack([on_board(state.mine), on_board(state.theirs)], -1)
        return planes.reshape(3, 3, 2).astype(jnp.float32)

    def picture(state: TicTacToeState) -> np.ndarray:
        mine, theirs = (np.asarray(on_board(stones)).reshape(3, 3) for stones in (state.mine, state.theirs))
        return render.board(mine, theirs) if int(state.player) == 0 else render.board(theirs, mine)

    game = Rules(
        name="podium/TicTacToe",
        view=ArraySpec((3, 3, 2), np.float32, 0, 1),
        num_actions=9,
        max_plies=9,
        deal=deal,
        play=play,
        legal=lambda state: on_board(state.mine | state.theirs) == 0,
        player=lambda state: state.player,
        see=see,
        forfeit=lambda state: jnp.float32(-1),
        picture=picture,
    )
    return make_env(game, openings, rules)
