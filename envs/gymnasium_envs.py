"""Environments of Gymnasium (Farama), by name as `gymnasium/NAME`, and vector environments of your own.

Continuous actions are clipped to their bounds, observations copied and brought to 32 bits, and `info` is left out. An
integer that 32 bits do not hold ends the run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from podium.envs.simulators import NextStepHostEnv, environment_seeds, import_simulator, narrow, within_bounds
from podium.host import HostEnv, HostEnvFactory
from podium.ranges import check_value
from podium.types import ArraySpec, DiscreteSpec, EnvSpec, PyTree, TimeStep

PREFIX = "gymnasium/"
_CONTROL = ("CartPole-v1", "Pendulum-v1", "Acrobot-v1", "MountainCar-v0", "MountainCarContinuous-v0")
_MODES = ("NextStep", "SameStep", "Disabled")


def names() -> list[str]:
    """List classic control; `make` knows whatever is registered with Gymnasium."""
    return [PREFIX + task for task in _CONTROL]


def make(name: str, *, asynchronous: bool = False, autoreset: str = "NextStep", **options: Any) -> HostEnvFactory:
    """Make an environment registered with Gymnasium.

    Args:
      name: `gymnasium/` and a name that `gymnasium.make` knows.
      asynchronous: a process for each environment (`AsyncVectorEnv`, spawned, as a fork would copy JAX's threads)
        instead of one after another (`SyncVectorEnv`).
      autoreset: when the next episode begins, by the names of `gymnasium.vector.AutoresetMode`: "NextStep", "SameStep",
        or "Disabled", where podium resets, in the same step. Transitions are the same; `NextStep` costs a row.
      **options: of `gymnasium.make`.

    Raises:
      ValueError: gymnasium is missing or cannot make it, or a space is not one of podium's.
    """
    gymnasium = import_simulator("gymnasium", name, "gymnasium")
    if autoreset not in _MODES:
        raise ValueError(f"autoreset={autoreset!r} is not a mode; use {', '.join(map(repr, _MODES))}.")
    # The passive checker would only repeat what check_actions and the spec say.
    make_one = functools.partial(gymnasium.make, name.removeprefix(PREFIX), **{"disable_env_checker": True, **options})
    try:
        one = make_one()
    except (gymnasium.error.Error, ImportError, TypeError) as error:
        raise ValueError(f"gymnasium cannot make {name} with {options}: {error}") from error
    limit = one.spec.max_episode_steps
    spec = EnvSpec(name, _spec(name, one.observation_space), _action_spec(name, one.action_space), limit)
    one.close()

    def make_vector_env(num_envs: int) -> Any:
        if asynchronous:
            return gymnasium.vector.AsyncVectorEnv([make_one] * num_envs, context="spawn", autoreset_mode=autoreset)
        return gymnasium.vector.SyncVectorEnv([make_one] * num_envs, autoreset_mode=autoreset)

    record = {"name": name, "options": {"asynchronous": asynchronous, "autoreset": autoreset, **options}}
    return _host_envs(spec, make_vector_env, autoreset, 1, record)


def from_vector_env(
    make_vector_env: Callable[[int], Any], name: str | None, max_episode_steps: int | None, frames_per_step: int
) -> HostEnvFactory:
    """Return `podium.envs.from_gymnasium` of these arguments."""
    if not callable(make_vector_env):
        raise ValueError(
            f"make_vector_env={make_vector_env!r} must be a function, (num_envs) -> gymnasium.vector.VectorEnv; what "
            "Gymnasium has by name is podium.envs.make('gymnasium/NAME')."
        )
    check_value("frames_per_step", frames_per_step, "counts", "1 is usual")
    if max_episode_steps is not None:
        check_value("max_episode_steps", max_episode_steps, "counts", "use None where there is no limit")
    one = make_vector_env(1)
    if not hasattr(one, "single_observation_space"):
        raise ValueError(
            f"make_vector_env(1) returned {one!r}, which is no gymnasium.vector.VectorEnv; put environments into one "
            "by gymnasium.vector.SyncVectorEnv."
        )
    name = type(one.unwrapped).__name__ if name is None else name
    try:
        obs, action = _spec(name, one.single_observation_space), _action_spec(name, one.single_action_space)
        mode = _mode(name, one.unwrapped)
    finally:
        one.close()
    spec = EnvSpec(name, obs, action, max_episode_steps)
    return _host_envs(spec, make_vector_env, mode, frames_per_step, {"name": name})


def _host_envs(
    spec: EnvSpec, make_vector_env: Callable[[int], Any], mode: str, frames_per_step: int, record: dict[str, Any]
) -> HostEnvFactory:
    def make(num_envs: int, seed: int, first_index: int) -> HostEnv:
        seeds = environment_seeds(seed, first_index, num_envs)
        return _Vector(spec, make_vector_env(num_envs), mode, seeds)

    return HostEnvFactory(
        spec, make, resets_in_next_step=mode == "NextStep", frames_per_step=frames_per_step, record=record
    )


def _spec(name: str, space: Any) -> PyTree:
    kind = type(space).__name__
    if kind == "Dict":
        return {key: _spec(name, child) for key, child in space.spaces.items()}
    if kind == "Tuple":
        return tuple(_spec(name, child) for child in space.spaces)
    if kind == "Discrete":
        if space.start != 0:
            raise ValueError(f"{name} has a Discrete space that starts at {space.start}; wrap it to start at 0.")
        return DiscreteSpec(int(space.n))
    if kind == "Box":
        dtype = narrow(space.dtype)
        return ArraySpec(tuple(space.shape), dtype, _bound(space.low, dtype), _bound(space.high, dtype))
    raise ValueError(f"{name} has a space of type {kind}; podium knows Box, Discrete, Dict and Tuple.")


def _bound(bound: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return a bound with fewer bits: where they hold it not, infinite, or of integers the nearest that they hold."""
    if np.issubdtype(dtype, np.integer):
        held = np.iinfo(dtype)
        bound = np.clip(bound, held.min, held.max)
    with np.errstate(over="ignore"):
        return bound.astype(dtype)


def _action_spec(name: str, space: Any) -> ArraySpec | DiscreteSpec:
    spec = _spec(name, space)
    if isinstance(spec, DiscreteSpec) or (isinstance(spec, ArraySpec) and np.issubdtype(spec.dtype, np.floating)):
        return spec
    raise ValueError(f"{name} has actions {space}; podium plays one index (Discrete) or floats (Box).")


class _Vector(NextStepHostEnv):
    """A Gymnasium vector environment."""

    def __init__(self, spec: EnvSpec, vector_env: Any, mode: str, seeds: list[int]):
        super().__init__(spec, len(seeds))
        self._vector_env, self._mode = vector_env, mode
        self._seeds: list[int] | None = seeds
        self._asynchronous = hasattr(vector_env, "step_async")
        self._action: Any = None

    def _reset(self) -> TimeStep:
        obs, _ = self._vector_env.reset(seed=self._seeds)
        self._seeds = None  # A second reset goes on with other episodes.
        timestep = self._first(_copied(self.spec.obs, obs))
        return timestep if self._mode == "NextStep" else timestep._replace(valid=None)

    def _send(self, action: np.ndarray) -> None:
        action = within_bounds(self.spec, action).astype(self._vector_env.single_action_space.dtype)
        if self._asynchronous:
            self._vector_env.step_async(action)
        else:
            self._action = action

    def _recv(self) -> TimeStep:
        step = self._vector_env.step_wait() if self._asynchronous else self._vector_env.step(self._action)
        obs, reward, terminated, truncated, info = step
        obs = _copied(self.spec.obs, obs)
        last = terminated | truncated
        if self._mode == "NextStep":
            return self._following(obs, reward, terminated, truncated, ended=last)
        next_obs = obs
        if last.any():
            if self._mode == "SameStep":
                next_obs = _with_rows(self.spec.obs, obs, last, info["final_obs"])
            else:
                following, _ = self._vector_env.reset(options={"reset_mask": last})
                obs = _copied(self.spec.obs, following)
        return TimeStep(obs, reward.astype(np.float32), terminated, truncated, next_obs)

    def _close(self) -> None:
        self._vector_env.close()
        self._vector_env = None


def _mode(name: str, vector_env: Any) -> str:
    # The attribute first: `metadata` belongs to the environments' class, and every instance writes its mode there.
    mode = getattr(vector_env, "autoreset_mode", None) or vector_env.metadata.get("autoreset_mode")
    mode = getattr(mode, "value", mode)
    if mode not in _MODES:
        raise ValueError(
            f"{name} does not say when it resets (autoreset_mode={mode!r}); set metadata['autoreset_mode'] to one of "
            "gymnasium.vector.AutoresetMode."
        )
    return str(mode)


def _copied(spec: PyTree, obs: Any) -> PyTree:
    """Return observations that no later step overwrites, in the structure and the dtypes of `spec`."""
    if isinstance(spec, dict):
        return {key: _copied(spec[key], obs[key]) for key in spec}
    if isinstance(spec, tuple):
        return tuple(map(_copied, spec, obs))
    copied = np.array(obs, spec.dtype)
    wide = np.asarray(obs).dtype
    if wide.kind in "iu" and wide.itemsize > copied.dtype.itemsize and (copied != obs).any():
        lost = np.asarray(obs)[copied != obs].flat[0]
        raise ValueError(
            f"an observation holds {lost}, and {copied.dtype} cannot; give it as floats, or count from another number."
        )
    return copied


def _with_rows(spec: PyTree, obs: PyTree, where: np.ndarray, rows: Any) -> PyTree:
    """Return `obs` with the rows of `where` taken from `rows`, an array of single observations."""
    if isinstance(spec, dict):
        return {key: _with_rows(spec[key], obs[key], where, _part(rows, key)) for key in spec}
    if isinstance(spec, tuple):
        return tuple(_with_rows(spec[i], obs[i], where, _part(rows, i)) for i in range(len(spec)))
    replaced = obs.copy()
    for i in np.flatnonzero(where):
        replaced[i] = rows[i]
    return replaced


def _part(rows: Any, key: Any) -> list[Any]:
    return [None if row is None else row[key] for row in rows]
