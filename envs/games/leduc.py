"""Leduc hold'em: six cards, a public one, two rounds of betting."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podium.env import Env
from podium.envs import render
from podium.envs.games.turns import Ply, Rules, make_env
from podium.types import Array, ArraySpec, Key

FOLD, CALL, RAISE = 0, 1, 2
_MOST_RAISES = 2
_LONGEST_ROUND = 4


class LeducState(NamedTuple):
    """The deal and the betting.

    Attributes:
      cards: int8 [3], of player 0, of player 1, and the public one; 2 * rank + suit.
      actions: int8 [2, 4], those of each round, -1 not yet.
      round: int32, 0 or 1.
      plies: int32, plies of this round so far.
      stakes: int32 [2], what each has put in.
      raises: int32, of this round.
    """

    cards: Array
    actions: Array
    round: Array
    plies: Array
    stakes: Array
    raises: Array


def leduc(openings: int = 0, rules: bool = False) -> Env:
    """Make Leduc hold'em (Southey et al. 2005): three ranks of two cards, one card a player, one public after a round.

    Each puts in 1. In a round player 0 begins; a raise adds 2 in the first and 4 in the second to what the other has
    put in, and a round has two raises at most. It ends with a call, or when both have checked; then the public card is
    shown, or the hands are: a pair with the public card wins, else the higher rank, and equal ranks share.

    Actions: 0 fold, 1 call (or check), 2 raise. Folding is illegal where nothing is to be called, raising after two
    raises; an illegal action folds: it loses at once what its player has put in. The reward is what the mover gained by
    the ply that ended the game, 0 before; the other lost as much. All cards are dealt at the reset: a step uses no
    chance. Where a round ends with player 1, player 0 moves next; where it ends with player 0, the same moves again.

    Args:
      openings: an episode begins after 0 to so many random legal plies (`podium.envs.games.turns.make_env`).
      rules: whether observations hold the state, all cards too, for planners.

    Returns:
      An `Env` with observations `Seen`: view float32 [30] in {0, 1}, the rank of the mover's card one-hot [3], that of
      the public card [3], zeros until it is shown, then each ply of each round one-hot [2, 4, 3]; legal bool [3];
      player 0 for who begins. Suits count for nothing and are not shown.

    Raises:
      ValueError: for `openings` outside 0 to 7.

    >>> env = leduc()
    >>> state, timestep = env.reset(jax.random.key(0))
    >>> timestep.obs.legal.tolist()
    [False, True, True]
    """

    def deal(key: Key) -> LeducState:
        zero = jnp.zeros((), jnp.int32)
        cards = jax.random.permutation(key, 6)[:3].astype(jnp.int8)
        actions = jnp.full((2, _LONGEST_ROUND), -1, jnp.int8)
        return LeducState(cards, actions, zero, zero, jnp.ones(2, jnp.int32), zero)

    def player(state: LeducState) -> Array:
        return state.plies % 2

    def legal(state: LeducState) -> Array:
        to_call = state.stakes[player(state)] < state.stakes[1 - player(state)]
        return jnp.stack([to_call, jnp.ones((), bool), state.raises < _MOST_RAISES])

    def showdown(state: LeducState, me: Array) -> Array:
        """Return 1 where `me` has the better hand, -1 where the other has, 0 for equal ranks."""
        ranks = state.cards // 2
        strength = ranks[:2] + 3 * (ranks[:2] == ranks[2])
        return jnp.sign(strength[me] - strength[1 - me]).astype(jnp.float32)

    def play(state: LeducState, action: Array) -> Ply:
        me = player(state)
        theirs = state.stakes[1 - me]
        put_in = theirs + jnp.where(action == RAISE, jnp.where(state.round == 0, 2, 4), 0)
        stakes = state.stakes.at[me].set(jnp.where(action == FOLD, state.stakes[me], put_in))
        round_over = (action == CALL) & (state.plies > 0)
        shown = round_over & (state.round == 1)
        next_round = round_over & (state.round == 0)
        gain = jnp.where(action == FOLD, -state.stakes[me], jnp.where(shown, theirs * showdown(state, me), 0.0))
        new = LeducState(
            cards=state.cards,
            actions=state.actions.at[state.round, state.plies].set(action.astype(jnp.int8)),
            round=state.round + next_round,
            plies=jnp.where(next_round, 0, state.plies + 1),
            stakes=stakes,
            raises=jnp.where(next_round, 0, state.raises + (action == RAISE)),
        )
        return Ply(new, gain, (action == FOLD) | shown)

    def see(state: LeducState) -> Array:
        ranks = jax.nn.one_hot(state.cards // 2, 3, dtype=jnp.float32)
        actions = jax.nn.one_hot(state.actions, 3, dtype=jnp.float32)
        return jnp.concatenate([ranks[player(state)], ranks[2] * (state.round > 0), actions.reshape(-1)])

    def picture(state: LeducState) -> np.ndarray:
        ranks = [int(card) // 2 + 1 for card in state.cards]
        public = ranks[2] if int(state.round) else 0
        return render.cards(ranks[:2], public, [int(stake) for stake in state.stakes], int(player(state)))

    game = Rules(
        name="podium/Leduc",
        view=ArraySpec((6 + 2 * _LONGEST_ROUND * 3,), np.float32, 0, 1),
        num_actions=3,
        max_plies=2 * _LONGEST_ROUND,
        deal=deal,
        play=play,
        legal=legal,
        player=player,
        see=see,
        forfeit=lambda state: -state.stakes[player(state)].astype(jnp.float32),
        picture=picture,
    )
    return make_env(game, openings, rules)
