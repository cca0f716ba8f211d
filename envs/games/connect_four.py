"""Connect Four: four in a row on six rows and seven columns, into which stones fall."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from podium.env import Env
from podium.envs import render
from podium.envs.games.turns import Ply, Rules, make_env
from podium.types import Array, ArraySpec, Key

ROWS, COLUMNS = 6, 7
_FULL_ROW = (1 << COLUMNS) - 1


class ConnectFourState(NamedTuple):
    """Stones as a set of columns a row, uint8 [6], lowest row first, and who is to move, int32.

    `mine` are those of who is to move, `theirs` the other's.
    """

    mine: Array
    theirs: Array
    player: Array


def four_in_a_row(stones: Array) -> Array:
    """Say whether four lie in a line, by shifts.

    Args:
      stones: uint8 [6], a set of columns a row.
    """
    r0, r1, r2, r3 = (stones[i : ROWS - 3 + i] for i in range(4))
    across = stones & stones >> 1 & stones >> 2 & stones >> 3
    up = r0 & r1 & r2 & r3
    rising = r0 & r1 >> 1 & r2 >> 2 & r3 >> 3
    falling = r0 >> 3 & r1 >> 2 & r2 >> 1 & r3
    return jnp.any(across != 0) | jnp.any((up | rising | falling) != 0)


def connect_four(openings: int = 0, rules: bool = False) -> Env:
    """Make Connect Four, 6 rows by 7 columns: two players in turn drop a stone into a column; four in a line win.

    Actions: 0 to 6, the column. The reward is 1 for the ply that makes a line of four, -1 for a stone into a full
    column, which loses at once, else 0; a full board is a draw. Played well by both, who begins wins (Allis 1988).

    Args:
      openings: an episode begins after 0 to so many random legal plies (`podium.envs.games.turns.make_env`).
      rules: whether observations hold the state, for planners.

    Returns:
      An `Env` with observations `Seen`: view float32 [6, 7, 2] in {0, 1}, the top row first, the mover's stones and the
      other's; legal bool [7], the columns with room; player 0 for who began.

    Raises:
      ValueError: for `openings` outside 0 to 41.

    >>> import jax
    >>> env = connect_four()
    >>> state, timestep = env.reset(jax.random.key(0))
    >>> state, timestep = env.step(jax.random.key(0), state, 3)
    >>> timestep.obs.view[5, 3].tolist(), float(timestep.turn)
    ([0.0, 1.0], -1.0)
    """
    columns = np.arange(COLUMNS, dtype=np.uint8)

    def deal(key: Key) -> ConnectFourState:
        del key
        return ConnectFourState(*(jnp.zeros(ROWS, jnp.uint8),) * 2, jnp.zeros((), jnp.int32))

    def play(state: ConnectFourState, action: Array) -> Ply:
        bit = jnp.uint8(1) << action.astype(jnp.uint8)
        taken = state.mine | state.theirs
        below = jnp.concatenate([jnp.full(1, _FULL_ROW, jnp.uint8), taken[:-1]])
        stones = state.mine | bit & below & ~taken  # The column's lowest free square is the one above a taken one.
        won = four_in_a_row(stones)
        full = (stones | state.theirs)[-1] == _FULL_ROW
        return Ply(ConnectFourState(state.theirs, stones, 1 - state.player), won.astype(jnp.float32), won | full)

    def on_board(stones: Array) -> Array:
        return stones[::-1, None] >> columns & 1

    def legal(state: ConnectFourState) -> Array:
        return (state.mine | state.theirs)[-1] >> columns & 1 == 0

    def see(state: ConnectFourState) -> Array:
        return jnp.stack([on_board(state.mine), on_board(state.theirs)], -1).astype(jnp.float32)

    def picture(state: ConnectFourState) -> np.ndarray:
        mine, theirs = (np.asarray(on_board(stones)) for stones in (state.mine, state.theirs))
        return render.board(mine, theirs) if int(state.player) == 0 else render.board(theirs, mine)

    game = Rules(
        name="podium/ConnectFour",
        view=ArraySpec((ROWS, COLUMNS, 2), np.float32, 0, 1),
        num_actions=COLUMNS,
        max_plies=ROWS * COLUMNS,
        deal=deal,
        play=play,
        legal=legal,
        player=lambda state: state.player,
        see=see,
        forfeit=lambda state: jnp.float32(-1),
        picture=picture,
    )
    return make_env(game, openings, rules)
