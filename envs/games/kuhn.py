"""Kuhn poker: three cards, one bet."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podium.env import Env
from podium.envs import render
from podium.envs.games.turns import Ply, Rules, make_env
from podium.types import Array, ArraySpec, Key

_LONGEST = 3


class KuhnState(NamedTuple):
    """The deal and the betting.

    Attributes:
      cards: int8 [2], 0 to 2, of player 0 and player 1.
      actions: int8 [3], 0 pass, 1 bet, -1 not yet.
      plies: int32, plies so far.
    """

    cards: Array
    actions: Array
    plies: Array


def kuhn(openings: int = 0, rules: bool = False) -> Env:
    """Make Kuhn poker (Kuhn 1950): each puts in 1 and gets one of three cards; one bet of 1 may be made.

    Actions: 0 pass (check, or fold to a bet), 1 bet (or call). Two passes show the cards for 1, a call for 2, a pass
    after a bet loses 1. Both are always legal. The reward is what the mover gained by the ply that ended the game, 0
    before; the other lost as much. Player 0 loses 1/18 a game where both play well.

    Args:
      openings: an episode begins after 0 to so many random plies (`podium.envs.games.turns.make_env`).
      rules: whether observations hold the state, the other's card too, for planners.

    Returns:
      An `Env` with observations `Seen`: view float32 [9] in {0, 1}, the mover's card one-hot [3], then each ply so far
      one-hot [3, 2]; legal bool [2]; player 0 for who begins.

    Raises:
      ValueError: for `openings` outside 0 to 2.

    >>> env = kuhn()
    >>> state, timestep = env.reset(jax.random.key(0))
    >>> state, timestep = env.step(jax.random.key(0), state, 1)
    >>> timestep.obs.view[3:].tolist()
    [0.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    """

    def deal(key: Key) -> KuhnState:
        cards = jax.random.permutation(key, 3)[:2].astype(jnp.int8)
        return KuhnState(cards, jnp.full(_LONGEST, -1, jnp.int8), jnp.zeros((), jnp.int32))

    def facing_a_bet(state: KuhnState) -> Array:
        return (state.plies > 0) & (state.actions[jnp.maximum(state.plies - 1, 0)] == 1)

    def play(state: KuhnState, action: Array) -> Ply:
        me = state.plies % 2
        higher = jnp.where(state.cards[me] > state.cards[1 - me], 1.0, -1.0)
        faced = facing_a_bet(state)
        gain = jnp.where(faced, jnp.where(action == 1, 2 * higher, -1.0), higher)
        ended = faced | ((state.plies > 0) & (action == 0))
        actions = state.actions.at[state.plies].set(action.astype(jnp.int8))
        return Ply(KuhnState(state.cards, actions, state.plies + 1), jnp.where(ended, gain, 0.0), ended)

    def see(state: KuhnState) -> Array:
        card = jax.nn.one_hot(state.cards[state.plies % 2], 3, dtype=jnp.float32)
        return jnp.concatenate([card, jax.nn.one_hot(state.actions, 2, dtype=jnp.float32).reshape(-1)])

    def picture(state: KuhnState) -> np.ndarray:
        stakes = [1 + int(np.any(np.asarray(state.actions)[player::2] == 1)) for player in range(2)]
        return render.cards([int(card) + 1 for card in state.cards], None, stakes, int(state.plies) % 2)

    game = Rules(
        name="podium/Kuhn",
        view=ArraySpec((3 + 2 * _LONGEST,), np.float32, 0, 1),
        num_actions=2,
        max_plies=_LONGEST,
        deal=deal,
        play=play,
        legal=lambda state: jnp.ones(2, bool),
        player=lambda state: state.plies % 2,
        see=see,
        forfeit=lambda state: jnp.float32(-1),
        picture=picture,
    )
    return make_env(game, openings, rules)
