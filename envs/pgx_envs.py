"""MinAtar (Young and Tian 2019) by Pgx (Koyamada et al. 2023), named `pgx/minatar-breakout`, as `podium.env.Env`.

`max_steps` truncates; all else is the games' own. Actions are the few that do something in a game, and stick with
probability 0.1 as in the paper. Pgx's board games for two are in `podium.envs.pgx_games`.

Options of `make`: `sticky_action_prob` (0.1), `max_steps` (10,000), and those of `podium.envs.suites.Options`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podium.env import Env, restart, transition
from podium.envs import pgx_games, render, suites, wrappers
from podium.envs.simulators import import_simulator
from podium.ranges import is_number
from podium.types import Array, ArraySpec, DiscreteSpec, EnvSpec, Key, PyTree, TimeStep

PREFIX = "pgx/"

_GAMES = ("asterix", "breakout", "freeway", "seaquest", "space_invaders")


def names() -> list[str]:
    """List the environments."""
    return [*(f"{PREFIX}minatar-{game}" for game in _GAMES), *(PREFIX + game for game in pgx_games.LONGEST)]


def make(name: str, **options: Any) -> Env:
    """Make an environment.

    Args:
      name: one of `names()`.
      **options: `sticky_action_prob`, in [0, 1); `max_steps`; and `podium.envs.suites.Options`. Of a game of two
        `openings` and `rules`.

    Returns:
      An `Env` with observations bool [10, 10, C] that does not reset itself; a game of two as `pgx_games.make` has it.

    Raises:
      ValueError: for an unknown name or option, a bad value, or where pgx is not installed.
    """
    suites.check_name(name, names(), "Pgx (of which podium has MinAtar and the games of two without hidden cards)")
    if name.removeprefix(PREFIX) in pgx_games.LONGEST:
        return pgx_games.make(name, **options)
    shared, own = suites.split_options(name, options, ["sticky_action_prob", "max_steps"])
    limit = suites.check_limit("max_steps", own.get("max_steps", 10_000))
    probability = own.get("sticky_action_prob", 0.1)
    if not is_number(probability) or not 0 <= probability < 1:
        raise ValueError(f"sticky_action_prob={probability!r} must be a number in [0, 1).")
    library = import_simulator("pgx", name, "pgx")
    game = type(library.make(name.removeprefix(PREFIX)))(sticky_action_prob=float(probability))
    return shared.wrap(wrappers.time_limit(_adapt(name, game), limit), 0)


def _adapt(name: str, game: Any) -> Env:
    key_shape = jax.eval_shape(lambda: jax.random.key(0))
    shapes = jax.eval_shape(lambda key, action: game.step(game.init(key), action, key), key_shape, jnp.int32(0))

    def reset(key: Key) -> tuple[PyTree, TimeStep]:
        state = suites.like(shapes, game.init(key))
        return state, restart(state.observation)

    def step(key: Key, state: PyTree, action: Array) -> tuple[PyTree, TimeStep]:
        state = suites.like(shapes, game.step(state, jnp.asarray(action, jnp.int32), key))
        return state, transition(state.observation, state.rewards[0], state.terminated, state.truncated)

    obs_spec = ArraySpec(shapes.observation.shape, np.bool_, 0, 1)
    spec = EnvSpec(name, obs_spec, DiscreteSpec(int(game.num_actions)))
    return Env(spec, reset, step, lambda state: render.grid(state.observation))
