"""Games between two players, or among many, and what they won."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podium.env import Env
from podium.games.players import Player, as_player, check_two_players
from podium.ranges import check_positive, check_seed
from podium.types import PyTree


class Score(NamedTuple):
    """How many games were won, drawn and lost."""

    won: int
    drawn: int
    lost: int


def match(env: Env, policy_a: Any, policy_b: Any, games: int = 100, seed: int = 0, greedy: bool = True) -> Score:
    """Play games between two policies, each start twice with the seats exchanged.

    Two policies that draw nothing play one and the same pair of games again and again where every game starts alike:
    make the environment with `openings`, or sample. An illegal action loses, as the game has it.

    Args:
      env: a game of two in turn, such as `podium.envs.make("podium/ConnectFour", openings=8)`.
      policy_a: who is counted, as `podium.games.as_player` takes it.
      policy_b: the other, likewise.
      games: an even number.
      seed: of starts and draws; equal seeds give equal starts whoever plays.
      greedy: of a `podium.Policy`, take its best action instead of sampling.

    Returns:
      `Score(won, drawn, lost)`, from the view of `policy_a`; they add up to `games`.

    Raises:
      ValueError: for an odd number of games, a game that is not for two in turn, or a player that cannot play it.
    """
    check_two_players(env, "match")
    check_games(games, seed)
    gain, done = np.zeros(games), np.zeros(games, bool)
    for ply in plies(env, (as_player(policy_a, greedy), as_player(policy_b, greedy)), games, seed):
        gain += np.where(done, 0.0, ply.gain)
        done |= ply.ended
    return Score(int((gain > 0).sum()), int((gain == 0).sum()), int((gain < 0).sum()))


def check_games(games: int, seed: int) -> None:
    """Raise ValueError for a number of games that is not even, or for what is no seed."""
    check_positive(games=games)
    if games % 2:
        raise ValueError(f"games={games} is odd, and each start is played in both seats; use {games + 1}.")
    check_seed(seed)


class Moved(NamedTuple):
    """Where many games stand after a ply: their states [B, ...], what the first player gained by it, and who is done.

    `gain` [B] and `ended` [B] mean nothing in games that ended before.
    """

    state: PyTree
    gain: np.ndarray
    ended: np.ndarray


def plies(env: Env, players: tuple[Player, Player], games: int, seed: int) -> Iterator[Moved]:
    """Play games of two, in the first half of which the first player has the first seat; yield their start and plies.

    Raises:
      ValueError: a player cannot play it.
    """
    for player in players:
        player.check(env.spec)

    reset_key, play_key = jax.random.split(jax.random.key(seed))
    starts = jnp.tile(jax.random.split(reset_key, games // 2), 2)
    state, timestep = jax.jit(jax.vmap(env.reset))(starts)
    step = jax.jit(jax.vmap(env.step))
    seat = np.repeat([0, 1], games // 2)
    carries = [player.carry(games) for player in players]
    done, met = np.zeros(games, bool), np.zeros((2, games), bool)
    yield Moved(state, np.zeros(games), done)
    for time in range(env.spec.max_episode_steps or 100_000):
        keys = jax.random.split(jax.random.fold_in(play_key, time), (3, games))
        moves_first = np.asarray(timestep.obs.player) == seat  # Whether the first of the two players is to move.
        action = np.zeros(games, np.int32)
        for index, player in enumerate(players):
            moves = (moves_first if index == 0 else ~moves_first) & ~done
            chosen, carries[index] = _act(player, keys[index], carries[index], timestep.obs, ~met[index], moves)
            action = np.where(moves, chosen, action)
            met[index] |= moves
        state, timestep = step(keys[2], state, jnp.asarray(action))
        done = done | np.asarray(timestep.last)
        yield Moved(state, np.asarray(timestep.reward) * np.where(moves_first, 1, -1), done)
        if done.all():
            return


def _act(player: Player, keys: Any, carry: Any, obs: Any, first: np.ndarray, moves: np.ndarray) -> tuple[Any, Any]:
    """Let a player act in the games in which it is to move; its memory of the others stays."""
    if player.on_host:  # Each position takes its time there.
        rows = np.flatnonzero(moves)
        action = np.zeros(len(moves), np.int32)
        if len(rows):
            given = jax.tree.map(lambda x: x[rows], (keys, carry, obs, first))
            action[rows], new = player.act(*given)
            carry = jax.tree.map(lambda old, new: jnp.asarray(old).at[rows].set(new), carry, new)
        return action, carry
    action, new = player.act(keys, carry, obs, jnp.asarray(first))
    keep = lambda old, new: jnp.where(moves.reshape(-1, *[1] * (jnp.ndim(new) - 1)), new, old)
    return np.asarray(action), jax.tree.map(keep, carry, new)


def round_robin(env: Env, policies: Sequence[Any], games: int = 100, seed: int = 0, greedy: bool = True) -> np.ndarray:
    """Play a match between every two of P policies.

    Args:
      env: as `match` takes it.
      policies: P of them, 2 or more.
      games: of every match.
      seed: of every match.
      greedy: of a `podium.Policy`, take its best action instead of sampling.

    Returns:
      [P, P, 3] int64: what the row's policy won, drew and lost against the column's; zeros on the diagonal. `elo` takes
      it.

    Raises:
      ValueError: for fewer than 2 policies, and as `match` does.
    """
    if len(policies) < 2:
        raise ValueError(f"round_robin got {len(policies)} policies; a table has 2 or more.")
    players = [as_player(policy, greedy) for policy in policies]
    table = np.zeros((len(players), len(players), 3), np.int64)
    for i in range(len(players)):
        for j in range(i + 1, len(players)):
            score = match(env, players[i], players[j], games, seed)
            table[i, j], table[j, i] = score, score[::-1]
    return table
