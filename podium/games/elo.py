"""Ratings of a pool from who beat whom."""

from __future__ import annotations

from typing import Any

import numpy as np

_SCALE = 400 / np.log(10)


def elo(table: Any, prior: float = 1.0, anchor: int | None = None) -> np.ndarray:
    """Return the Elo ratings that explain a table of matches best (Bradley and Terry 1952).

    Player i is expected to score 1 / (1 + 10 ** ((r_j - r_i) / 400)) against j, a draw as half a win. The ratings
    are of greatest likelihood with a little prior: each pair that met also drew `prior` games, without which one who
    won all games would be infinitely good. Found by Newton's method.

    Args:
      table: [P, P, 3], won, drawn and lost by the row's player against the column's, as `round_robin` returns it.
      prior: draws added to every pair that met, above 0.
      anchor: whose rating is 0; None makes their mean 0.

    Returns:
      [P] float64.

    Raises:
      ValueError: for a table of another shape or that contradicts itself, players that no chain of matches joins, or a
        `prior` or an `anchor` out of range.

    >>> table = np.zeros((2, 2, 3))
    >>> table[0, 1], table[1, 0] = (10, 0, 0), (0, 0, 10)
    >>> elo(table, anchor=1).round().tolist()
    [529.0, 0.0]
    """
    table = np.asarray(table, np.float64)
    if table.ndim != 3 or table.shape[0] != table.shape[1] or table.shape[2] != 3 or len(table) < 2:
        raise ValueError(f"table has shape {list(table.shape)}; it must be [P, P, 3] of 2 players or more.")
    if not np.array_equal(table, table.transpose(1, 0, 2)[..., ::-1]) or (table < 0).any():
        raise ValueError(
            "table[i, j] must be won, drawn and lost by i, and table[j, i] the same in reverse, not negative."
        )
    if not 0 < prior < np.inf:
        raise ValueError(f"prior={prior} must be finite and above 0, or who won everything has no rating; 1 is usual.")
    number = len(table)
    if anchor is not None and not 0 <= anchor < number:
        raise ValueError(f"anchor={anchor} is none of {number} players; use 0 to {number - 1}, or None.")
    met = (table.sum(-1) > 0) & ~np.eye(number, dtype=bool)
    reached = np.linalg.matrix_power(np.eye(number) + met, number) > 0
    if not reached.all():
        apart = np.flatnonzero(~reached[0])
        raise ValueError(f"Players {apart.tolist()} met nobody who is joined to player 0 by matches; play some.")

    games = np.where(met, table.sum(-1) + prior, 0)
    score = (np.where(met, table[..., 0] + (table[..., 1] + prior) / 2, 0)).sum(1)
    rating = np.zeros(number)
    likelihood = lambda r: score @ r - (games * np.logaddexp(r[:, None], r)).sum() / 2
    for _ in range(100):
        expected = 1 / (1 + np.exp(rating - rating[:, None]))
        gradient = score - (games * expected).sum(1)
        weight = games * expected * (1 - expected)
        curvature = np.diag(weight.sum(1)) - weight + 1 / number  # Plus a constant: their mean is free.
        move, size = np.linalg.solve(curvature, gradient), 1.0
        while likelihood(rating + size * move) < likelihood(rating) - 1e-12 and size > 1e-6:
            size /= 2
        rating = rating + size * move
        if np.abs(move).max() < 1e-10:
            break
    rating = rating * _SCALE
    return rating - (rating.mean() if anchor is None else rating[anchor])
