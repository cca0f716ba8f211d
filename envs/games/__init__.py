"""Games of podium's own, pure JAX: turns, hidden cards, and hundreds of agents at once.

`tic_tac_toe`, `connect_four`, `kuhn` and `leduc` are for two players who take turns (`turns` has what they share);
`tag` is for many who act together. `podium.games` has judges of how well they are played.
"""

from podium.envs.games.connect_four import connect_four
from podium.envs.games.kuhn import kuhn
from podium.envs.games.leduc import leduc
from podium.envs.games.tag import tag
from podium.envs.games.tic_tac_toe import tic_tac_toe

__all__ = ["connect_four", "kuhn", "leduc", "tag", "tic_tac_toe"]
