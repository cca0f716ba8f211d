"""The environments of Jumanji (Bonnet et al. 2024) that have one agent and one discrete action, as `podium.env.Env`.

They are named as there: `jumanji/Game2048-v1`. Those with several actions at once or several agents are left out, and
so is Sokoban, which fetches its levels from the network.

Jumanji ends an episode at its time limit as it ends any other, with a discount of 0. Here the time limit is a
truncation, and its other ends are terminations. Observations are dictionaries of Jumanji's arrays; `action_mask`, which
no agent of podium reads, is one of them.

Options of `make`: the numbers that Jumanji's constructor takes (`time_limit`, `board_size`, ...), and those of
`podium.envs.suites.Options`.
"""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podium.env import Env, restart, transition
from podium.envs import suites, wrappers
from podium.envs.simulators import import_simulator
from podium.types import Array, ArraySpec, DiscreteSpec, EnvSpec, Key, PyTree, TimeStep

PREFIX = "jumanji/"

_TASKS = (
    "CVRP-v1",
    "Game2048-v1",
    "GraphColoring-v1",
    "Knapsack-v1",
    "Maze-v0",
    "PacMan-v1",
    "SlidingTilePuzzle-v0",
    "Snake-v1",
    "TSP-v1",
)


def names() -> list[str]:
    """List the environments."""
    return [PREFIX + task for task in _TASKS]


def make(name: str, **options: Any) -> Env:
    """Make an environment.

    Args:
      name: one of `names()`.
      **options: whole numbers of Jumanji's constructor, and `podium.envs.suites.Options`.

    Returns:
      An `Env` with discrete actions that does not reset itself.

    Raises:
      ValueError: for an unknown name or option, a bad value, or where jumanji is not installed.
    """
    suites.check_name(name, names(), "Jumanji (of which podium has what has one agent and one discrete action)")
    library = import_simulator("jumanji", name, "jumanji")
    task = type(library.make(name.removeprefix(PREFIX)))
    numbers = [each.name for each in inspect.signature(task).parameters.values() if "int" in str(each.annotation)]
    shared, own = suites.split_options(name, options, numbers)
    for option, value in own.items():
        suites.check_limit(option, value)
    game = library.make(name.removeprefix(PREFIX), **own)
    limit = getattr(game, "time_limit", None)
    env = _adapt(name, game)
    return shared.wrap(env if limit is None else wrappers.time_limit(env, int(limit)), 0)


def _adapt(name: str, game: Any) -> Env:
    if hasattr(game, "time_limit"):
        game.time_limit = np.iinfo(np.int32).max  # A wrapper outside knows it, and truncates.
    key_shape = jax.eval_shape(lambda: jax.random.key(0))
    num_actions = int(game.action_spec.num_values)
    advance = lambda state, action: game.step(state, jnp.asarray(action, jnp.int32))
    shapes = jax.eval_shape(lambda key: advance(game.reset(key)[0], 0), key_shape)
    obs_shapes = _as_dict(shapes[1].observation)

    def reset(key: Key) -> tuple[PyTree, TimeStep]:
        state, first = game.reset(key)
        return suites.like(shapes[0], state), restart(suites.like(obs_shapes, _as_dict(first.observation)))

    def step(key: Key, state: PyTree, action: Array) -> tuple[PyTree, TimeStep]:
        del key  # The game keeps its own.
        state, reached = advance(state, action)
        obs = suites.like(obs_shapes, _as_dict(reached.observation))
        return suites.like(shapes[0], state), transition(obs, reached.reward, reached.last())

    return Env(EnvSpec(name, jax.tree.map(_spec, obs_shapes), DiscreteSpec(num_actions)), reset, step)


def _as_dict(obs: Any) -> Any:
    """Return an observation, a named tuple or a dataclass, as a dictionary."""
    if hasattr(obs, "_asdict"):
        return {field: _as_dict(value) for field, value in obs._asdict().items()}
    if hasattr(obs, "__dataclass_fields__"):
        return {field: _as_dict(getattr(obs, field)) for field in obs.__dataclass_fields__}
    return obs


def _spec(shape: Any) -> ArraySpec:
    bounds = (0, 1) if shape.dtype == bool else (-np.inf, np.inf)
    return ArraySpec(shape.shape, shape.dtype, *bounds)
