"""Craftax and Craftax-Classic (Matthews et al. 2024), named `craftax/Classic-Symbolic`, as `podium.env.Env`.

The package tells one `done`; here a death, and the end that victory is, terminate, and the time limit truncates, or
both where both happen in one step. The environment is the package's own without automatic resets.

A world is dear to generate (up to twenty times a step), so that episodes begin in one of a pool of worlds, drawn once;
an evaluation draws new ones. Where training is long enough to learn a pool by heart, `pool_size=0` draws a world for
every episode, as the package does.

Options of `make`: the fields of the package's `EnvParams` (`max_timesteps`, `day_length`, `god_mode` ...), and those of
`podium.envs.suites.Options`. `info["achievements"]` is the number of achievements unlocked in this episode.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podium.env import Env, restart, transition
from podium.envs import suites
from podium.envs.simulators import import_simulator
from podium.ranges import check_type, check_value
from podium.types import Array, ArraySpec, DiscreteSpec, EnvSpec, Key, PyTree, TimeStep

PREFIX = "craftax/"
POOL_SIZE = 256


def names() -> list[str]:
    """List the environments."""
    return [PREFIX + name for name in ("Symbolic", "Pixels", "Classic-Symbolic", "Classic-Pixels")]


def make(name: str, **options: Any) -> Env:
    """Make an environment.

    Args:
      name: one of `names()`.
      **options: fields of the package's `EnvParams`, and `podium.envs.suites.Options`.

    Returns:
      An `Env` with discrete actions that does not reset itself.

    Raises:
      ValueError: for an unknown name or option, a bad value, or where craftax is not installed.
    """
    suites.check_name(name, names(), "Craftax")
    library = import_simulator("craftax.craftax_env", name, "craftax")
    game = library.make_craftax_env_from_name(f"Craftax-{name.removeprefix(PREFIX)}-v1", auto_reset=False)
    fields = [field.name for field in dataclasses.fields(game.default_params) if field.name != "fractal_noise_angles"]
    shared, own = suites.split_options(name, options, fields)
    for option in {"max_timesteps", "day_length"} & set(own):
        check_value(option, own[option], "counts", f"{getattr(game.default_params, option)} is usual")
    for option, value in own.items():
        check_type(f"{name}: {option}", value, getattr(game.default_params, option))
    params = game.default_params.replace(**own)
    return shared.wrap(_adapt(name, game, params), POOL_SIZE)


def _adapt(name: str, game: Any, params: Any) -> Env:
    limit = int(params.max_timesteps)
    # Told that there is no limit, the game ends by itself only.
    endless = params.replace(max_timesteps=np.iinfo(np.int32).max)
    key_shape = jax.eval_shape(lambda: jax.random.key(0))
    obs_shape, shapes = jax.eval_shape(lambda key: game.reset_env(key, params), key_shape)

    def info(state: Any) -> dict[str, Array]:
        return {"achievements": jnp.sum(state.achievements).astype(jnp.float32)}

    def reset(key: Key) -> tuple[PyTree, TimeStep]:
        obs, state = game.reset_env(key, params)
        state = suites.like(shapes, state)
        return state, restart(jnp.asarray(obs, obs_shape.dtype), info(state))

    def step(key: Key, state: PyTree, action: Array) -> tuple[PyTree, TimeStep]:
        obs, state, reward, _, _ = game.step_env(key, state, action, params)
        state = suites.like(shapes, state)
        terminated = game.is_terminal(state, endless)
        obs = jnp.asarray(obs, obs_shape.dtype)
        return state, transition(obs, reward, terminated, state.timestep >= limit, info(state))

    obs_spec = ArraySpec(obs_shape.shape, obs_shape.dtype, 0, 1)
    spec = EnvSpec(name, obs_spec, DiscreteSpec(int(game.action_space(params).n)), limit)
    return Env(spec, reset, step, _renderer(name))


def _renderer(name: str) -> Callable[[PyTree], np.ndarray]:
    where = "craftax.craftax_classic" if "Classic" in name else "craftax.craftax"
    made: list[Callable[[PyTree], Array]] = []

    def render(state: PyTree) -> np.ndarray:
        if not made:
            renderer = import_simulator(where + ".renderer", name, "craftax")
            cell = import_simulator(where + ".constants", name, "craftax").BLOCK_PIXEL_SIZE_IMG
            made.append(jax.jit(renderer.make_craftax_pixel_renderer(cell)))
        return np.clip(np.asarray(made[0](state)), 0, 255).astype(np.uint8)

    return render
