"""A game between two players, as moving pictures."""

from __future__ import annotations

from typing import Any

import jax

from podium.env import Env
from podium.games.match import plies
from podium.games.players import as_player, check_two_players
from podium.pictures import gif
from podium.ranges import check_seed


def film(env: Env, policy_a: Any, policy_b: Any, seed: int = 0, greedy: bool = True, fps: float = 2) -> bytes:
    """Return an animated GIF of one game, in which `policy_a` moves first (before random openings, if there are any).

    It begins with the position that the game starts from, and pauses on its last.

    Args:
      env: a game of two in turn that has a renderer, such as `podium.envs.make("podium/ConnectFour")`.
      policy_a: who sits first, as `podium.games.as_player` takes it.
      policy_b: the other, likewise.
      seed: of the start and all draws.
      greedy: of a `podium.Policy`, take its best action instead of sampling.
      fps: plies a second, above 0 to 50.

    Raises:
      ValueError: for a game that is not for two in turn or has no renderer, a player that cannot play it, or `fps` out
        of range.
    """
    check_two_players(env, "film")
    check_seed(seed)
    render = env.render
    if render is None:
        raise ValueError(f"{env.spec.name} has no renderer.")
    players = as_player(policy_a, greedy), as_player(policy_b, greedy)
    pictures = []
    for ply in plies(env, players, 2, seed):  # Of two games, each with the seats of the other; the first is shown.
        pictures.append(render(jax.tree.map(lambda x: x[0], jax.device_get(ply.state))))
        if ply.ended[0]:
            break
    return gif(pictures, fps)
