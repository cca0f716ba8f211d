"""Judges of games of two in turn: matches, exact ones where a game is small, and ratings.

`match` plays two policies in both seats, `film` shows a game of theirs, `round_robin` every two of a pool, such as the
`snapshots` of a league, and `elo` rates them. `versus` freezes an opponent in an environment for one. `lines_lost`
plays every line of tic-tac-toe against a policy; `exploitability` is what a best response gains in Kuhn and Leduc
poker. For Connect Four there are `alpha_beta`, a player that looks some plies ahead, and positions solved exactly
(`positions`, `right_moves`, `Solver`). `psro` trains best responses to a mixture of earlier ones, of which `average`
makes one policy. The games are `podium.envs.games`.
"""

from podium.games.connect_four import Positions, Solver, alpha_beta, positions, right_moves
from podium.games.elo import elo
from podium.games.exploitability import average, exploitability, probabilities, value
from podium.games.film import film
from podium.games.lines import Lines, every_line, lines_lost
from podium.games.match import Score, match, round_robin
from podium.games.players import Player, as_player, snapshots, uniform, uniform_probabilities
from podium.games.psro import PSRO, nash, psro
from podium.games.versus import versus

__all__ = [
    "PSRO",
    "Lines",
    "Player",
    "Positions",
    "Score",
    "Solver",
    "alpha_beta",
    "as_player",
    "average",
    "elo",
    "every_line",
    "exploitability",
    "film",
    "lines_lost",
    "match",
    "nash",
    "positions",
    "probabilities",
    "psro",
    "right_moves",
    "round_robin",
    "snapshots",
    "uniform",
    "uniform_probabilities",
    "value",
    "versus",
]
