"""The grids of XLand-MiniGrid (Nikulin et al. 2024), named `xminigrid/MiniGrid-Empty-8x8`, as `podium.env.Env`.

They are MiniGrid's tasks. Those that the package calls XLand are left out: they want rulesets, which it fetches from
the network, and without one there is nothing to reach in them.

Reaching the goal terminates, the time limit truncates. Observations are what the agent sees, [V, V, 2] integers: the
number of a tile and that of its colour.

Options of `make`: `height`, `width`, `view_size`, `max_steps`, and those of `podium.envs.suites.Options`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podium.env import Env, restart, transition
from podium.envs import suites
from podium.envs.simulators import import_simulator
from podium.ranges import check_value
from podium.types import Array, ArraySpec, DiscreteSpec, EnvSpec, Key, PyTree, TimeStep

PREFIX = "xminigrid/"

_GRIDS = (
    "MiniGrid-BlockedUnlockPickUp",
    "MiniGrid-DoorKey-5x5",
    "MiniGrid-DoorKey-6x6",
    "MiniGrid-DoorKey-8x8",
    "MiniGrid-DoorKey-16x16",
    "MiniGrid-Empty-5x5",
    "MiniGrid-Empty-6x6",
    "MiniGrid-Empty-8x8",
    "MiniGrid-Empty-16x16",
    "MiniGrid-EmptyRandom-5x5",
    "MiniGrid-EmptyRandom-6x6",
    "MiniGrid-EmptyRandom-8x8",
    "MiniGrid-EmptyRandom-16x16",
    "MiniGrid-FourRooms",
    "MiniGrid-LockedRoom",
    "MiniGrid-MemoryS8",
    "MiniGrid-MemoryS16",
    "MiniGrid-MemoryS32",
    "MiniGrid-MemoryS64",
    "MiniGrid-MemoryS128",
    "MiniGrid-Playground",
    "MiniGrid-Unlock",
    "MiniGrid-UnlockPickUp",
)
_FIELDS = ("height", "width", "view_size", "max_steps")
_LEAST = 3


def names() -> list[str]:
    """List the environments."""
    return [PREFIX + grid for grid in _GRIDS]


def option_names(name: str) -> list[str]:
    """List what `make(name, ...)` accepts."""
    return [*_FIELDS, *suites.OPTIONS]


def make(name: str, **options: Any) -> Env:
    """Make an environment.

    Args:
      name: one of `names()`.
      **options: see `option_names`.

    Returns:
      An `Env` with discrete actions that does not reset itself.

    Raises:
      ValueError: for an unknown name or option, a bad value, or where xminigrid is not installed.
    """
    suites.check_name(name, names(), "XLand-MiniGrid (of which podium has MiniGrid)")
    shared, own = suites.split_options(name, options, _FIELDS)
    for option, value in own.items():
        check_value(option, value, "counts", "leave it out for the grid's own")
        if option in ("height", "width") and value < _LEAST:
            raise ValueError(f"{option}={value} leaves no room between walls; use {_LEAST} or more.")
    if own.get("view_size", 1) % 2 == 0:
        raise ValueError(
            f"view_size={own['view_size']} is even, but the agent sees as far left as right; use an odd one."
        )
    library = import_simulator("xminigrid", name, "xminigrid")
    grid, params = library.make(name.removeprefix(PREFIX), **own)
    return shared.wrap(_adapt(name, grid, params), 0)


def _adapt(name: str, grid: Any, params: Any) -> Env:
    key_shape = jax.eval_shape(lambda: jax.random.key(0))
    advance = lambda before, action: grid.step(params, before, jnp.asarray(action, jnp.int32))
    shapes = jax.eval_shape(lambda key: advance(grid.reset(params, key), 0), key_shape)

    def reset(key: Key) -> tuple[PyTree, TimeStep]:
        state = suites.like(shapes, grid.reset(params, key))
        return state, restart(state.observation)

    def step(key: Key, state: PyTree, action: Array) -> tuple[PyTree, TimeStep]:
        del key  # The grid keeps its own.
        state = suites.like(shapes, advance(state, action))
        terminated = state.discount == 0
        truncated = state.state.step_num >= params.max_steps
        return state, transition(state.observation, state.reward, terminated, truncated)

    obs_spec = ArraySpec(shapes.observation.shape, shapes.observation.dtype, 0, _largest_number())
    spec = EnvSpec(name, obs_spec, DiscreteSpec(int(grid.num_actions(params))), int(params.max_steps))
    return Env(spec, reset, step, lambda state: np.asarray(grid.render(params, state), np.uint8))


def _largest_number() -> int:
    constants = import_simulator("xminigrid.core.constants", PREFIX, "xminigrid")
    return int(max(constants.NUM_TILES, constants.NUM_COLORS)) - 1
