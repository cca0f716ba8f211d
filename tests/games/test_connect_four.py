"""Connect Four looked ahead and solved, against minimax without tricks and positions that are known."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from podium import envs, games
from podium.games import connect_four


def play(columns):
    """Return `mine` and `taken` after stones in these columns, 0 to 6."""
    mine = taken = 0
    for column in columns:
        move = connect_four._moves(taken) & connect_four._COLUMN[column]
        assert move
        mine, taken = taken ^ mine, taken | move
    return mine, taken


def has_four(stones):
    return any(stones & stones >> s & stones >> 2 * s & stones >> 3 * s for s in (1, 6, 7, 8))


def random_position(generator, number):
    """Return a position of `number` stones and no four."""
    while True:
        mine = taken = 0
        for _ in range(number):
            moves = [m for c in range(7) if (m := connect_four._moves(taken) & connect_four._COLUMN[c])]
            mine, taken = taken ^ mine, taken | int(generator.choice(moves))
            if has_four(taken ^ mine):
                break
        else:
            return mine, taken


@functools.cache
def minimax(mine, taken, depth):
    """Return the score of looking `depth` plies ahead, as `_Lookahead` counts: the sooner the larger."""
    if has_four(taken ^ mine):
        return taken.bit_count() - 100
    moves = [m for c in range(7) if (m := connect_four._moves(taken) & connect_four._COLUMN[c])]
    if not depth or not moves:
        return 0
    return max(-minimax(taken ^ mine, taken | move, depth - 1) for move in moves)


def test_views_become_bitboards():
    env = envs.make("podium/ConnectFour")
    state, timestep = env.reset(jax.random.key(0))
    step = jax.jit(env.step)
    for number, column in enumerate([3, 3, 0, 6, 3, 2], 1):
        state, timestep = step(jax.random.key(0), state, column)
        assert connect_four.from_view(timestep.obs.view) == play([3, 3, 0, 6, 3, 2][:number])


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_alpha_beta_chooses_what_minimax_does(depth):
    generator, lookahead = np.random.default_rng(depth), connect_four._Lookahead(depth)
    for _ in range(12):
        mine, taken = random_position(generator, int(generator.integers(6, 36)))
        scores = {}
        for column in range(7):
            move = connect_four._moves(taken) & connect_four._COLUMN[column]
            if move:
                scores[column] = -minimax(taken ^ mine, taken | move, depth - 1)
        best = [column for column, score in scores.items() if score == max(scores.values())]
        assert sorted(lookahead.best_columns(mine, taken)) == best


def test_the_solver_agrees_with_minimax_to_the_end():
    generator, solver = np.random.default_rng(0), games.Solver()
    for _ in range(12):
        mine, taken = random_position(generator, 31)
        expected = []
        for column in range(7):
            move = connect_four._moves(taken) & connect_four._COLUMN[column]
            expected.append(-np.sign(minimax(taken ^ mine, taken | move, 42)) if move else None)
        assert solver.moves(mine, taken) == expected


@pytest.mark.parametrize(
    ("columns", "outcome"),
    [
        ("2252576253462244111563365343671351441", -1),
        ("7422341735647741166133573473242566", 1),
        ("23163416124767223154467471272416755633", 0),
        ("65214673556155731566316327373221417", -1),
    ],
)
def test_known_positions_are_solved(columns, outcome):
    """The first of Pascal Pons's test set L3_R1, columns from 1."""
    assert games.Solver().outcome(*play([int(column) - 1 for column in columns])) == outcome


@pytest.mark.parametrize("stones", [16, 20])
def test_the_outcome_of_a_position_is_the_best_of_its_moves(stones):
    generator, solver = np.random.default_rng(stones), games.Solver()
    for _ in range(3):
        position = random_position(generator, stones)
        outcomes = [outcome for outcome in solver.moves(*position) if outcome is not None]
        assert games.Solver().outcome(*position) == max(outcomes)


def test_who_looks_ahead_beats_who_does_not():
    env = envs.make("podium/ConnectFour", openings=4)
    score = games.match(env, games.alpha_beta(4), games.uniform, games=20)
    assert score.won >= 18
    assert games.match(env, games.alpha_beta(4), games.uniform, games=20) == score, "a seed gives the same games"


def test_solved_positions_tell_right_moves_from_wrong():
    solved = games.positions(envs.make("podium/ConnectFour", rules=True), 8, stones=24)
    assert solved.right.shape == (8, 7) and solved.obs.rules.mine.shape == (8, 6)
    legal = np.asarray(solved.obs.legal)
    assert not solved.right[~legal].any() and solved.right.any(-1).all() and (legal & ~solved.right).any(-1).all()
    assert games.right_moves(lambda obs: solved.right.argmax(-1), solved) == 1
    assert games.right_moves(lambda obs: (legal & ~solved.right).argmax(-1), solved) == 0
