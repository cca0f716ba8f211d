"""The environments of gymnax (Lange 2022) as `podium.env.Env`.

gymnax resets an environment inside its own `step`. This adapter calls the parts beneath it (`reset_env`, `step_env`,
`is_truncated`) so that a step ends where the environment ended, `next_obs` is the true last observation, and
`podium.env.auto_reset` (or a pool, or nothing) decides what follows.

What the adapter settles, for every environment:

- Observations of a Box are float32, whatever gymnax declares (Catch-bsuite declares int32 and returns float32,
  FourRooms-misc the reverse); of a Discrete space they stay an int32 index (FrozenLake-misc). Those of MinAtar, all 0
  and 1, are bool as in MinAtar itself (Young and Tian 2019): a quarter of the memory, and PPO on Breakout is 1.06
  (64 environments) to 1.14 times (1,024) as fast. Declared bounds as large as a float can be become infinite; bounds
  that gymnax's own observations break are mended (below).
- Rewards are float32, flags bool, and every array of the state has one fixed dtype that is not weak, so that no state
  compiles a program twice (in 12 of the 26 a weak type turns strong in the first step).
- Continuous actions are clipped to the bounds of the action space first. gymnax clips in some environments only:
  MountainCarContinuous-v0 pays for the action before clipping, Reacher-misc and Swimmer-misc never clip.
- `terminated` is what gymnax's `step_env` says, `truncated` its time limit; both where both hold.
- `info` is gymnax's, zeros at a reset, less `info["discount"]` (which only repeats `terminated`).

Options of `make`: the arguments of gymnax's constructor and the fields of its `EnvParams`, together:
`make("DeepSea-bsuite", size=10, deterministic=False)`, `make("CartPole-v1", max_steps_in_episode=200)`.

What single environments need, or do that one would not expect (gymnax 1.0.1):

MNISTBandit-bsuite
    Downloads MNIST when made (through `six`). gymnax reads the pixels as int8, so bright ones come out negative:
    mended here.
CartPole-v1
    `total_mass` and `polemass_length` are parameters of their own in gymnax. Here they follow `masscart`, `masspole`
    and `length` unless given.
Catch-, DeepSea-, MemoryChain-, UmbrellaChain-, SimpleBandit-bsuite
    Terminate by themselves before their time limit, so `spec.max_episode_steps` is the true length. DeepSea sets both
    flags at its end, as its time limit is its length.
DiscountingChain-bsuite, Freeway-MinAtar, BernoulliBandit-, GaussianBandit-, PointRobot-, Reacher-, Swimmer-misc
    Only ever truncate, as in gymnax, though the end belongs to the task in the papers: values bootstrap across it.
MemoryChain-bsuite
    Observations lag by one step, as in bsuite: the context is seen twice. It is -1 or 1, where gymnax declares [0, 2].
BernoulliBandit-, GaussianBandit-, PointRobot-misc
    The time in the observation is scaled for 100 steps, whatever the limit.
GaussianBandit-, MetaMaze-misc
    Declared bounds leave out the last reward and the scaled time.
MetaMaze-misc
    At the goal the agent is moved to a random cell, and the episode terminates only if that is the goal again.
Pong-misc
    Only the bottom wall reflects: a ball that leaves at the top stays away until it passes a side.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podium.env import Env, restart, transition
from podium.envs import render
from podium.ranges import check_type, did_you_mean
from podium.types import Array, ArraySpec, DiscreteSpec, EnvSpec, Key, PyTree, TimeStep


class _Postponed(types.ModuleType):
    """Stands for a module until something of it is used; then the real one takes its place."""

    def __getattr__(self, attribute: str) -> Any:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), attribute)


def _postpone(name: str) -> None:
    if name not in sys.modules and importlib.util.find_spec(name):
        sys.modules[name] = _Postponed(name)


# gymnax imports them for its pictures; they are nine tenths of the time that it takes to import.
_postpone("seaborn")
_postpone("matplotlib.pyplot")

import gymnax  # noqa: E402
from gymnax import registration  # noqa: E402
from gymnax.environments import spaces  # noqa: E402

# Steps after which these terminate whatever is done, so that evaluation need not wait for their time limit.
_NATURAL_LENGTH: dict[str, Callable[[Any, Any], int]] = {
    "Catch-bsuite": lambda env, params: env.rows - 1,
    "DeepSea-bsuite": lambda env, params: env.size,
    "MemoryChain-bsuite": lambda env, params: params.memory_length + 1,
    "UmbrellaChain-bsuite": lambda env, params: params.chain_length,
    "SimpleBandit-bsuite": lambda env, params: 1,
    "MNISTBandit-bsuite": lambda env, params: 1,
}

# Bounds for observations that leave those which gymnax declares.
_BOUNDS: dict[str, Callable[[Any, Any], tuple[Any, Any]]] = {
    "MemoryChain-bsuite": lambda env, params: (-1, max(1, env.num_bits - 1)),
    "BernoulliBandit-misc": lambda env, params: ([0, 0, 0, -np.inf], [1, 1, 1, np.inf]),
    "GaussianBandit-misc": lambda env, params: ([-np.inf, 0, 0, -np.inf], [np.inf, 1, 1, np.inf]),
    "MetaMaze-misc": lambda env, params: (
        [0] * (env.rf_size**2 + env.num_actions) + [-np.inf] * 2,
        [1] * (env.rf_size**2 + env.num_actions) + [np.inf] * 2,
    ),
}


def names() -> list[str]:
    """List the environments registered with gymnax, also those registered after it was imported."""
    return list(gymnax.registered_envs)


def option_names(name: str) -> list[str]:
    """List what `make(name, ...)` accepts: gymnax's constructor arguments, then its parameters."""
    constructor = _constructor_options(name)
    return constructor + [field for field in _parameter_names(name) if field not in constructor]


def make(name: str, **options: Any) -> Env:
    """Make the gymnax environment `name`.

    Args:
      name: one of `names()`.
      **options: constructor arguments and parameters, see `option_names(name)`.

    Returns:
      An `Env` that does not reset itself.

    Raises:
      ValueError: for an unknown name, an unknown option, or a value of the wrong type or shape.
      RuntimeError: for MNISTBandit-bsuite, where MNIST is neither present nor can be downloaded.

    >>> env = make("CartPole-v1", max_steps_in_episode=200)
    >>> env.spec.max_episode_steps, env.spec.action.num_values
    (200, 2)
    """
    if name not in gymnax.registered_envs:
        raise ValueError(f"{name!r} is not registered with gymnax; podium.envs.names() lists the environments.")
    constructor_names = _constructor_options(name)
    env = _construct(name, {k: v for k, v in options.items() if k in constructor_names})
    parameters = {k: v for k, v in options.items() if k not in constructor_names}
    params = _override(name, env.default_params, parameters, constructor_names)
    try:
        return _adapt(name, env, params)
    except (IndexError, TypeError, ZeroDivisionError) as error:
        raise ValueError(f"gymnax cannot play {name} with {options}: {error}") from error


def _adapt(name: str, gymnax_env: Any, params: Any) -> Env:
    obs_spec = _obs_spec(name, gymnax_env, params)
    action_spec = _action_spec(name, gymnax_env.action_space(params))
    key_shape = jax.eval_shape(lambda: jax.random.key(0))
    _, state_shape = jax.eval_shape(lambda key: gymnax_env.reset_env(key, params), key_shape)
    action_shape = jax.eval_shape(action_spec.zeros)
    info_shape = jax.eval_shape(
        lambda key, state, action: _info(gymnax_env.step_env(key, state, action, params)[4]),
        key_shape,
        state_shape,
        action_shape,
    )

    def convert(obs: Any, state: PyTree) -> tuple[PyTree, PyTree]:
        obs = jax.tree.map(lambda spec, x: jnp.asarray(x, spec.dtype), obs_spec, obs)
        return obs, jax.tree.map(lambda shape, x: jnp.asarray(x, shape.dtype), state_shape, state)

    def reset(key: Key) -> tuple[PyTree, TimeStep]:
        obs, state = convert(*gymnax_env.reset_env(key, params))
        return state, restart(obs, jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), info_shape))

    def step(key: Key, state: PyTree, action: Array) -> tuple[PyTree, TimeStep]:
        action = jnp.asarray(action, action_spec.dtype)
        if isinstance(action_spec, ArraySpec):
            action = jnp.clip(action, action_spec.low, action_spec.high)
        obs, state, reward, terminated, info = gymnax_env.step_env(key, state, action, params)
        obs, state = convert(obs, state)
        return state, transition(obs, reward, terminated, gymnax_env.is_truncated(state, params), _info(info))

    max_steps = int(params.max_steps_in_episode)
    if name in _NATURAL_LENGTH:
        max_steps = min(max_steps, int(_NATURAL_LENGTH[name](gymnax_env, params)))
    spec = EnvSpec(name, obs_spec, action_spec, max_steps)
    return Env(spec, reset, step, _renderer(name, gymnax_env, params, obs_spec))


def _info(info: dict[str, Any]) -> dict[str, Array]:
    # asarray with a dtype makes weak types strong.
    arrays = {key: jnp.asarray(value) for key, value in info.items() if key != "discount"}
    return {key: jnp.asarray(array, array.dtype) for key, array in arrays.items()}


def _obs_spec(name: str, env: Any, params: Any) -> PyTree:
    space = env.observation_space(params)
    if name in _BOUNDS:
        low, high = (np.asarray(b, np.float32) for b in _BOUNDS[name](env, params))
        return ArraySpec(tuple(space.shape), np.float32, low, high)
    if type(env).__module__.startswith("gymnax.environments.minatar."):  # Not by name: anyone may register one.
        return ArraySpec(tuple(space.shape), np.bool_, 0, 1)
    return _spec(name, space)


def _spec(name: str, space: Any) -> PyTree:
    if isinstance(space, spaces.Discrete):
        return DiscreteSpec(int(space.n))
    if isinstance(space, spaces.Box):
        low, high = _bound(space.low), _bound(space.high)
        return ArraySpec(tuple(space.shape), np.float32, low, high)
    if isinstance(space, spaces.Dict):
        return {key: _spec(name, child) for key, child in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_spec(name, child) for child in space.spaces)
    raise ValueError(f"{name} has a space of type {type(space).__name__}, which podium does not know.")


def _bound(bound: Any) -> np.ndarray:
    """Return a bound as float32, infinite where it is as large as a float32 can be."""
    bound = np.asarray(bound, np.float32)
    return np.where(np.abs(bound) >= np.finfo(np.float32).max, np.copysign(np.float32(np.inf), bound), bound)


def _action_spec(name: str, space: Any) -> DiscreteSpec | ArraySpec:
    spec = _spec(name, space)
    if not isinstance(spec, DiscreteSpec | ArraySpec):
        raise ValueError(f"{name} has several actions at once ({type(space).__name__}), which podium does not support.")
    return spec


def _constructor_options(name: str) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(registration._registry[name]).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind in kinds]


def _parameter_names(name: str) -> list[str]:
    if name == "MNISTBandit-bsuite":  # Making one just to look would download the data.
        from gymnax.environments.bsuite import mnist

        return [field.name for field in dataclasses.fields(mnist.EnvParams)]
    return [field.name for field in dataclasses.fields(registration._registry[name]().default_params)]


def _construct(name: str, options: dict[str, Any]) -> Any:
    try:
        env, _ = gymnax.make(name, **options)
    except (AssertionError, TypeError) as error:
        raise ValueError(f"gymnax refused {options} for {name}: {error or 'see its source for the rule'}") from error
    except (OSError, EOFError) as error:
        if name != "MNISTBandit-bsuite":
            raise
        raise RuntimeError(
            "MNISTBandit-bsuite reads the four MNIST files (train-images-idx3-ubyte.gz and so on) from the folder "
            f"/tmp/mnist, where gymnax downloads them; that failed here ({error}). Copy them there, or choose "
            "another environment; a half-finished file there must be deleted first."
        ) from error
    if name == "MNISTBandit-bsuite":
        env.images = env.images.astype(jnp.uint8)  # gymnax read the bytes as int8: 200 became -56.
    return env


def _override(name: str, params: Any, options: dict[str, Any], constructor_names: list[str]) -> Any:
    fields = [field.name for field in dataclasses.fields(params)]
    for option in options:
        if option not in fields:
            known = constructor_names + [field for field in fields if field not in constructor_names]
            hint = did_you_mean(option, known, 0.5)
            raise ValueError(f"{name} has no option {option!r}.{hint} It has: {', '.join(known)}.")
    if options:
        options = {option: _checked(name, option, getattr(params, option), v) for option, v in options.items()}
        params = params.replace(**options)
    if name == "CartPole-v1":
        params = _follow_masses(params, options)
    if int(params.max_steps_in_episode) < 1:
        raise ValueError(f"max_steps_in_episode={params.max_steps_in_episode} is below 1; use 1 or more.")
    return params


def _checked(name: str, option: str, default: Any, value: Any) -> Any:
    if isinstance(default, jax.Array | np.ndarray):
        value = jnp.asarray(value, default.dtype)
        if value.shape != default.shape:
            raise ValueError(f"{name}: {option} has shape {value.shape}; it must have shape {default.shape}.")
        return value
    check_type(f"{name}: {option}", value, default)
    return type(default)(value)


def _follow_masses(params: Any, options: dict[str, Any]) -> Any:
    """Keep CartPole's derived parameters true to the masses and the length they are made of."""
    if "total_mass" not in options and {"masscart", "masspole"} & options.keys():
        params = params.replace(total_mass=params.masscart + params.masspole)
    if "polemass_length" not in options and {"masspole", "length"} & options.keys():
        params = params.replace(polemass_length=params.masspole * params.length)
    return params


def _renderer(name: str, env: Any, params: Any, obs_spec: PyTree) -> Callable[[PyTree], np.ndarray] | None:
    if name == "CartPole-v1":
        return lambda state: render.cartpole(float(state.x), float(state.theta), float(params.x_threshold))
    if name == "Pendulum-v1":
        max_torque = float(params.max_torque)
        return lambda state: render.pendulum(float(state.theta), float(state.last_u), max_torque)
    if name.endswith("-MinAtar") or name in ("Pong-misc", "Catch-bsuite", "DeepSea-bsuite"):
        observe = jax.jit(lambda state: env.get_obs(state))
        cell = 8 if max(obs_spec.shape[:2]) > 20 else 16
        return lambda state: render.grid(observe(state), cell)
    return None
