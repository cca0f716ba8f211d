"""Every line of play against a policy, in a game small enough: whether it can be beaten at all."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podium.env import Env
from podium.games.match import Score
from podium.games.players import as_player, check_two_players
from podium.games.tree import Level, batched, expand, legal_actions


class Lines(NamedTuple):
    """How all lines end, by the seat of the policy: it moves first, or second."""

    first: Score
    second: Score

    @property
    def lost(self) -> int:
        """Lines lost in either seat."""
        return self.first.lost + self.second.lost


def every_line(env: Env, policy: Any) -> Lines:
    """Play every line against a policy's greedy move: all that an opponent can do, in both seats.

    The policy may hold no memory; one that draws is asked once a position, with one key. In tic-tac-toe it takes a
    second. A line in which the policy makes an illegal move is lost.

    Args:
      env: a game of two in turn that begins in one position, such as `podium.envs.make("podium/TicTacToe")`.
      policy: as `podium.games.as_player` takes it.

    Returns:
      `Lines(first, second)`, each `Score(won, drawn, lost)`.

    Raises:
      ValueError: for a game that is not for two in turn, that begins in more than one position or is too large, or a
        policy with memory.
    """
    check_two_players(env, "every_line")
    player = as_player(policy)
    player.check(env.spec)
    if jax.tree.leaves(player.carry(1)):
        raise ValueError("every_line asks a policy about positions in no order, and this one has a memory; use match.")

    def moves(obs: Any) -> Any:
        number = len(obs.view)
        keys = jnp.broadcast_to(jax.random.key(0), (number,))
        return player.act(keys, (), obs, jnp.ones(number, bool))[0]

    return Lines(*(_score(env, moves, seat) for seat in range(2)))


def _score(env: Env, moves: Any, seat: int) -> Score:
    def follow(level: Level) -> np.ndarray:
        legal = legal_actions(level)
        rows = np.flatnonzero((level.player == seat) & ~level.ended)
        if not len(rows):
            return legal
        chosen = batched(moves, jax.tree.map(lambda x: np.asarray(x)[rows], level.obs))
        follow = legal.copy()
        follow[rows] = np.arange(legal.shape[1]) == chosen[:, None]
        return follow

    counts, total = np.zeros(3, int), np.zeros(1)
    for depth, level in enumerate(expand(env, follow)):
        if depth == 0 and len(level.player) > 1:
            raise ValueError(
                f"every_line follows a game from one position, and env={env.spec.name} begins in {len(level.player)}; "
                "make it without openings."
            )
        total = level.gain if depth == 0 else total[level.parent] + level.gain
        mine = (total if seat == 0 else -total)[level.ended]
        counts += [(mine > 0).sum(), (mine == 0).sum(), (mine < 0).sum()]
    return Score(*map(int, counts))


def lines_lost(env: Env, policy: Any) -> int:
    """Return in how many lines a policy's greedy move loses, in both seats together: `every_line(env, policy).lost`.

    Raises:
      ValueError: as `every_line` does.
    """
    return every_line(env, policy).lost
