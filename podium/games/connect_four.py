"""Connect Four on bitboards, in plain Python: a player that looks a few plies ahead, and who wins when all is known.

A position is two integers, `mine` (stones of who is to move) and `taken` (all stones), bit 7 * column + height; the top
bit of each column stays empty, so that shifts do not run from one into the next. How threats are found, and moves that
do not lose at once, is as Pascal Pons describes ("Solving Connect Four", blog.gamesolver.org, 2015).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podium.env import Env
from podium.games.players import Player, as_player
from podium.ranges import check_positive, check_seed, is_integer
from podium.types import Array, EnvSpec, PyTree, Seen

_ROWS, _COLUMNS = 6, 7
_BOTTOM = sum(1 << 7 * column for column in range(_COLUMNS))
_BOARD = _BOTTOM * ((1 << _ROWS) - 1)
_COLUMN = [((1 << _ROWS) - 1) << 7 * column for column in range(_COLUMNS)]
_CENTRE_FIRST = (3, 2, 4, 1, 5, 0, 6)
_SQUARES = _ROWS * _COLUMNS
_WIN = 100


def from_view(view: Any) -> tuple[int, int]:
    """Return `mine` and `taken` of an observation's view, [6, 7, 2], the top row first."""
    heights = np.arange(_ROWS)[::-1, None] + 7 * np.arange(_COLUMNS)
    mine, theirs = (sum(1 << int(bit) for bit in heights[np.asarray(view)[..., i] > 0]) for i in range(2))
    return mine, mine | theirs


def _wins_at(mine: int, taken: int) -> int:
    """Return the empty squares, within reach or not, that would make four in a row of `mine`."""
    found = mine << 1 & mine << 2 & mine << 3  # Upwards there is but one side.
    for shift in (7, 6, 8):
        pair = mine << shift & mine << 2 * shift
        found |= pair & mine << 3 * shift
        found |= pair & mine >> shift
        pair = mine >> shift & mine >> 2 * shift
        found |= pair & mine << shift
        found |= pair & mine >> 3 * shift
    return found & (_BOARD ^ taken)


def _moves(taken: int) -> int:
    """Return the squares that a stone can fall to."""
    return taken + _BOTTOM & _BOARD


def _safe_moves(mine: int, taken: int) -> int:
    """Return the moves after which the other has no win at once; for who has none himself."""
    moves, threats = _moves(taken), _wins_at(taken ^ mine, taken)
    forced = moves & threats
    if forced:
        if forced & forced - 1:
            return 0
        moves = forced
    return moves & ~(threats >> 1)


def _ordered(mine: int, taken: int, moves: int) -> list[int]:
    """Return moves, those first that threaten most, then those nearer to the centre."""
    found = [moves & _COLUMN[column] for column in _CENTRE_FIRST if moves & _COLUMN[column]]
    if len(found) > 1:
        found.sort(key=lambda move: -_wins_at(mine | move, taken | move).bit_count())
    return found


class Solver:
    """Who wins where both play perfectly, exactly; it remembers what it has found.

    It looks through some 100,000 positions a second. All moves from a random position of 18 stones take 0.1 s on
    average, of 16 0.2 s, of 14 2 s, on one core of a CPU; from one of fewer they can take very long.

    Args:
      most_remembered: positions; the table is emptied where it holds so many.
    """

    def __init__(self, most_remembered: int = 4_000_000):
        self._known: dict[int, tuple[int, int]] = {}
        self._most = most_remembered

    def outcome(self, mine: int, taken: int) -> int:
        """Return 1 where who is to move wins, 0 for a draw, -1 where the other wins; nobody has four yet."""
        if taken == _BOARD:
            return 0
        if _moves(taken) & _wins_at(mine, taken):
            return 1
        return self._search(mine, taken, -1, 1)

    def moves(self, mine: int, taken: int) -> list[int | None]:
        """Return what each column leads to for who is to move: 1 a win, 0 a draw, -1 a loss, None where it is full."""
        found: list[int | None] = []
        for column in range(_COLUMNS):
            move = _moves(taken) & _COLUMN[column]
            if not move:
                found.append(None)
            elif move & _wins_at(mine, taken):
                found.append(1)
            else:
                found.append(-self.outcome(taken ^ mine, taken | move))
        return found

    def _search(self, mine: int, taken: int, low: int, high: int) -> int:
        """Return the outcome for who is to move and cannot win at once, exact where it lies between low and high."""
        moves = _safe_moves(mine, taken)
        if not moves:
            return -1 if _moves(taken) else 0
        if taken.bit_count() >= _SQUARES - 2:
            return 0
        key = mine + taken  # Distinct: the carry of a column marks its height.
        least, most = self._known.get(key, (-1, 1))
        low, high = max(low, least), min(high, most)
        if low >= high:
            return low
        best = -1
        for move in _ordered(mine, taken, moves):
            best = max(best, -self._search(taken ^ mine, taken | move, -high, -max(low, best)))
            if best >= high:
                break
        if best <= low:
            most = min(most, best)
        elif best >= high:
            least = max(least, best)
        else:
            least = most = best
        if len(self._known) >= self._most:
            self._known.clear()
        self._known[key] = least, most
        return best


class _Lookahead:
    """Alpha-beta to a depth: wins and losses within it, the sooner the larger; all else is 0."""

    def __init__(self, depth: int):
        self.depth = depth
        self._known: dict[tuple[int, int, int], tuple[int, int]] = {}

    def best_columns(self, mine: int, taken: int) -> list[int]:
        """Return the columns that are equally good, best of all."""
        best, columns = -_WIN, list[int]()
        for column in _CENTRE_FIRST:
            move = _moves(taken) & _COLUMN[column]
            if not move:
                continue
            if move & _wins_at(mine, taken):
                score = _WIN - taken.bit_count() - 1
            else:
                score = -self._search(taken ^ mine, taken | move, self.depth - 1, -_WIN, 1 - best)
            if score > best:
                best, columns = score, []
            if score == best:
                columns.append(column)
        return columns

    def _search(self, mine: int, taken: int, depth: int, low: int, high: int) -> int:
        stones = taken.bit_count()
        if depth == 0 or stones == _SQUARES:
            return 0
        if _moves(taken) & _wins_at(mine, taken):
            return _WIN - stones - 1
        if depth == 1:
            return 0
        moves = _safe_moves(mine, taken)
        if not moves:
            return stones + 2 - _WIN if stones < _SQUARES - 1 else 0
        if depth == 2:
            return 0
        key = mine, taken, depth
        least, most = self._known.get(key, (-_WIN, _WIN))
        low, high = max(low, least), min(high, most)
        if low >= high:
            return low
        best = -_WIN
        for move in _ordered(mine, taken, moves):
            best = max(best, -self._search(taken ^ mine, taken | move, depth - 1, -high, -max(low, best)))
            if best >= high:
                break
        if best <= low:
            most = min(most, best)
        elif best >= high:
            least = max(least, best)
        else:
            least = most = best
        if len(self._known) > 1_000_000:
            self._known.clear()
        self._known[key] = least, most
        return best


def check_is_connect_four(spec: EnvSpec, who: str) -> None:
    """Raise ValueError unless observations are those of Connect Four."""
    view = spec.obs.view if isinstance(spec.obs, Seen) else None
    if tuple(getattr(view, "shape", ())) != (_ROWS, _COLUMNS, 2):
        raise ValueError(
            f"{who} plays Connect Four only, and env={spec.name}; use podium.envs.make('podium/ConnectFour')."
        )


def alpha_beta(depth: int = 6) -> Player:
    """Return a player of Connect Four that sees every win and loss within `depth` plies, and nothing beyond.

    It takes a sooner win before a later one and a later loss before a sooner one; among moves that it holds for equally
    good it draws. It computes on the host: `match` takes it, `versus` does not.

    Args:
      depth: plies that it looks ahead, 1 or more.

    Raises:
      ValueError: for a depth below 1.
    """
    check_positive(depth=depth)
    lookahead = _Lookahead(depth)

    def act(keys: Any, carry: PyTree, obs: Seen, first: Any) -> tuple[np.ndarray, PyTree]:
        seeds = np.asarray(jax.random.key_data(keys))
        actions = np.zeros(len(seeds), np.int32)
        for i, view in enumerate(np.asarray(obs.view)):
            columns = lookahead.best_columns(*from_view(view))
            actions[i] = np.random.default_rng(seeds[i]).choice(columns)
        return actions, carry

    return Player(act, on_host=True, check=lambda spec: check_is_connect_four(spec, f"alpha_beta({depth})"))


class Positions(NamedTuple):
    """Solved positions of Connect Four.

    Attributes:
      obs: [N, ...], as an environment shows them.
      right: [N, 7] bool, the legal moves that keep the outcome of perfect play.
    """

    obs: Seen
    right: np.ndarray


def positions(env: Env, number: int = 200, stones: int = 18, seed: int = 0) -> Positions:
    """Return solved positions that random play reaches, all different; in each a legal move is right, and one wrong.

    Args:
      env: `podium/ConnectFour` without openings; with `rules=True` for policies that plan.
      number: N.
      stones: on the board, 14 to 36; the fewer, the longer it takes (`Solver`).
      seed: of the play.

    Raises:
      ValueError: for another game, an environment with openings, or numbers out of range.
    """
    check_is_connect_four(env.spec, "positions")
    check_positive(number=number)
    check_seed(seed)
    if not is_integer(stones, 14, 36):
        raise ValueError(f"stones={stones!r} must be an integer, 14 to 36: fewer take too long to solve; 18 is usual.")
    solver, seen, rows, right = Solver(), set(), [], []
    play, batch = jax.jit(_play_randomly(env, stones), static_argnums=1), max(64, 4 * number)
    for attempt in range(64):
        obs, going = jax.tree.map(np.asarray, play(jax.random.fold_in(jax.random.key(seed), attempt), batch))
        for i in np.flatnonzero(going):
            mine, taken = from_view(obs.view[i])
            if taken.bit_count() != stones:
                raise ValueError("positions: env begins with openings; make it with openings=0.")
            if (mine, taken) in seen:
                continue
            seen.add((mine, taken))
            outcomes = solver.moves(mine, taken)
            known = [outcome for outcome in outcomes if outcome is not None]
            if min(known) < max(known):
                rows.append(jax.tree.map(lambda x: x[i], obs))  # noqa: B023
                right.append([outcome == max(known) for outcome in outcomes])
            if len(rows) == number:
                return Positions(jax.tree.map(lambda *x: jnp.asarray(np.stack(x)), *rows), np.array(right))
    raise ValueError(f"Random play reached {len(rows)} positions of number={number}, stones={stones}; ask for fewer.")


def _play_randomly(env: Env, plies: int) -> Any:
    def play(key: Array, number: int) -> tuple[Seen, Array]:
        def ply(before: Any, key: Array) -> tuple[Any, None]:
            state, obs, going = before
            keys = jax.random.split(key, number)
            action = jax.random.categorical(key, jnp.where(obs.legal, 0.0, -jnp.inf))
            state, timestep = jax.vmap(env.step)(keys, state, action)
            return (state, timestep.next_obs, going & ~timestep.last), None

        keys = jax.random.split(key, plies + 1)
        state, timestep = jax.vmap(env.reset)(jax.random.split(keys[0], number))
        begin = state, timestep.obs, jnp.ones(number, bool)
        return jax.lax.scan(ply, begin, keys[1:])[0][1:]

    return play


def right_moves(policy: Any, solved: Positions, seed: int = 0, greedy: bool = True) -> float:
    """Return the share of solved positions in which a policy's move is right.

    Args:
      policy: as `podium.games.as_player` takes it.
      solved: from `positions`.
      seed: of the policy's draws.
      greedy: of a `podium.Policy`, take its best action instead of sampling.
    """
    check_seed(seed)
    player, number = as_player(policy, greedy), len(solved.right)
    keys = jax.random.split(jax.random.key(seed), number)
    action, _ = player.act(keys, player.carry(number), solved.obs, jnp.ones(number, bool))
    return float(solved.right[np.arange(number), np.asarray(action)].mean())
