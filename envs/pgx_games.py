"""Games of two in turn by Pgx (Koyamada et al. 2023), named `pgx/othello`, as podium's own games are.

They are Pgx's rules in `podium.envs.games.turns`: random `openings`, `rules` for planners, the sign of a turn, and what
is illegal loses at once. Pgx draws who is to move first; player 0 is who that is. The observation, which Pgx stores
within its state, is left out of it, and made of it when somebody looks. A game that Pgx ends after a number of plies
is over, and drawn: no truncation. Its poker shows too little of what was bid (see `podium/Kuhn`), and backgammon rolls
dice within the game: they are not here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podium.env import Env
from podium.envs import render, suites
from podium.envs.games.turns import Ply, Rules, make_env
from podium.envs.simulators import import_simulator
from podium.types import Array, ArraySpec, Key, PyTree


class PgxState(NamedTuple):
    """Pgx's own state without its observation, and the player who began (Pgx's number, int32)."""

    game: PyTree
    first: Array


LONGEST = {
    "tic_tac_toe": 9,
    "connect_four": 42,
    "othello": 128,
    "go_9x9": 162,
    "hex": 122,
    "animal_shogi": 256,
    "gardner_chess": 256,
}
"""Plies of a game, at most: Othello's 60 stones and as many passes, Hex's 121 and a swap, Pgx's own bounds."""

_BOARDS = ("tic_tac_toe", "connect_four", "othello", "go_9x9")
"""Whose first two planes are the mover's stones and the other's."""


def make(name: str, **options: Any) -> Env:
    """Make a game.

    Args:
      name: of the game, behind a prefix.
      **options: `openings` and `rules`, as of `podium.envs.games.turns.make_env`.

    Returns:
      An `Env` with observations `Seen`: Pgx's own as view, of who is to move; legal bool [A]; player 0 for who began.

    Raises:
      ValueError: for an unknown option, a bad value, or where pgx is not installed.
    """
    shared, own = suites.split_options(name, options, ["openings", "rules"])
    if shared != suites.Options():
        raise ValueError(f"{name} is a game of two in turn, whose options are openings and rules alone.")
    library = import_simulator("pgx", name, "pgx")
    short = name.partition("/")[2]
    return make_env(_rules(name, library.make(short), LONGEST[short], short in _BOARDS), **own)


def _rules(name: str, pgx: Any, longest: int, is_board: bool) -> Rules:
    key_shape = jax.eval_shape(lambda: jax.random.key(0))
    shapes = jax.eval_shape(lambda key: pgx.step(pgx.init(key), jnp.int32(0)), key_shape)
    bare = shapes.replace(observation=jax.ShapeDtypeStruct((0,), shapes.observation.dtype))

    def without(state: Any) -> Any:
        return suites.like(bare, state.replace(observation=jnp.zeros((0,), shapes.observation.dtype)))

    def deal(key: Key) -> PgxState:
        state = without(pgx.init(key))
        return PgxState(state, state.current_player)

    def play(state: PgxState, action: Array) -> Ply:
        mover, following = state.game.current_player, pgx.step(state.game, action)
        gain = following.rewards[mover].astype(jnp.float32)
        return Ply(PgxState(without(following), state.first), gain, following.terminated | following.truncated)

    def see(state: PgxState) -> Array:
        return jnp.asarray(pgx.observe(state.game), shapes.observation.dtype)

    def player(state: PgxState) -> Array:
        return (state.game.current_player != state.first).astype(jnp.int32)

    def picture(state: PgxState) -> np.ndarray:
        planes = np.asarray(see(state))
        if not is_board:
            return render.grid(planes)
        mine, theirs = planes[..., 0], planes[..., 1]
        return render.board(mine, theirs) if int(player(state)) == 0 else render.board(theirs, mine)

    is_flag = shapes.observation.dtype == np.bool_
    bounds = (0, 1) if is_flag else (-np.inf, np.inf)
    return Rules(
        name=name,
        view=ArraySpec(shapes.observation.shape, shapes.observation.dtype, *bounds),
        num_actions=int(pgx.num_actions),
        max_plies=longest,
        deal=deal,
        play=play,
        legal=lambda state: state.game.legal_action_mask,
        player=player,
        see=see,
        forfeit=lambda state: jnp.float32(-1),
        picture=picture,
    )
