"""Environments of envpool (Weng et al. 2022), in C++ threads on the CPU: Atari, classic control, MuJoCo, others.

`Pong-v5` and the other games of Atari-57 go by envpool's own names; `envpool/NAME` is any of envpool's tasks that has
one index or one vector of floats as its action and one array as its observation.

What single families do (envpool 1.2.5):

Atari
    See `podium.envs.atari_host`. A lost life is told from `lives`, because envpool's own `episodic_life` presses FIRE
    and waits up to `noop_max` frames after each, in a step whose action and rewards are dropped and whose
    `elapsed_step` is not 0, as it is after a real reset. A stack begins with four times the first picture.
others
    Continuous actions are clipped to their bounds. Numbers of 64 bits come out with 32. A step that both ends an
    episode and reaches the time limit counts as truncated, because envpool keeps one of the two.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from podium.envs import atari_host, near_misses
from podium.envs.simulators import NextStepHostEnv, environment_seeds, import_simulator, narrow, within_bounds
from podium.host import HostEnv, HostEnvFactory
from podium.types import ArraySpec, DiscreteSpec, EnvSpec, TimeStep

PREFIX = "envpool/"

_GAMES = [f"{game}-v5" for game in atari_host.GAMES]
_CONTROL = ("CartPole-v1", "Pendulum-v1", "Acrobot-v1", "MountainCar-v0", "MountainCarContinuous-v0")
_ROBOTS = (
    *("Ant", "HalfCheetah", "Hopper", "Humanoid", "HumanoidStandup", "InvertedDoublePendulum", "InvertedPendulum"),
    *("Pusher", "Reacher", "Swimmer", "Walker2d"),
)
_NO_LIMIT = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class _Options:
    """Options of tasks that are no Atari game; None leaves the choice to envpool."""

    max_episode_steps: int | None = None
    num_threads: int | None = None

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if value is not None:
                atari_host.check_count(name, value)


def names() -> list[str]:
    """List Atari-57, and of the rest of envpool classic control and MuJoCo; `make` knows more."""
    tasks = [*_CONTROL, *(f"{robot}-{version}" for robot in _ROBOTS for version in ("v4", "v5"))]
    return _GAMES + [PREFIX + task for task in tasks]


def option_names(name: str) -> list[str]:
    """List what `make(name, ...)` accepts."""
    if _is_atari(name):
        return atari_host.option_names()
    return [field.name for field in dataclasses.fields(_Options)]


def make(name: str, **options: Any) -> HostEnvFactory:
    """Make a task of envpool.

    Args:
      name: one of `names()`, or `envpool/` before any other name that envpool has.
      **options: of `podium.envs.atari_host.Options`, for a game; else `max_episode_steps` and `num_threads`.

    Raises:
      ValueError: envpool is missing or has no such task, an option is out of range, or podium cannot play the task.
    """
    return _make_game(name, atari_host.Options(**options)) if _is_atari(name) else _make_task(name, _Options(**options))


def _task(name: str) -> str:
    return name.removeprefix(PREFIX)


def _is_atari(name: str) -> bool:
    task = _task(name)
    if task in _GAMES:
        return True
    registered = _library(name).registration.registry.specs
    if task not in registered:
        near = near_misses(task, list(registered))
        hint = f" Did you mean {' or '.join(repr(PREFIX + each) for each in near)}?" if near else ""
        raise ValueError(f"envpool has no task {task!r}.{hint} envpool.list_all_envs() lists them all.")
    return bool(registered[task][0] == "envpool.atari")


def _library(name: str) -> Any:
    return import_simulator("envpool", name, "atari")


def _pool(name: str, seeds: Sequence[int], config: dict[str, Any]) -> Any:
    """Return a pool that steps all its environments at once, so that results come in their order."""
    size = len(seeds)
    return _library(name).make(
        _task(name), env_type="gymnasium", num_envs=size, batch_size=size, seed=list(seeds), **config
    )


def _make_game(name: str, options: atari_host.Options) -> HostEnvFactory:
    config = {
        "frame_skip": options.frame_skip,
        "stack_num": options.stack,
        "img_height": options.screen,
        "img_width": options.screen,
        "repeat_action_probability": options.repeat_action_probability,
        "noop_max": options.noop_max,
        "full_action_space": options.full_action_space,
        "max_episode_steps": options.max_episode_steps,
        "num_threads": options.num_threads or 0,
    }
    actions = _library(name).make_spec(_task(name), **config).action_array_spec["action"]
    return atari_host.host_envs(
        name, int(actions.maximum) + 1, options, lambda seeds: _Emulators(_pool(name, seeds, config))
    )


class _Emulators:
    """A pool of Atari games; `podium.envs.atari_host.Emulators`."""

    def __init__(self, pool: Any):
        self._pool = pool

    def reset(self) -> tuple[np.ndarray, np.ndarray]:
        pictures, info = self._pool.reset()
        return pictures, info["lives"]

    def send(self, action: np.ndarray) -> None:
        self._pool.send(action)

    def recv(self) -> atari_host.Played:
        pictures, reward, _, cut, info = self._pool.recv()
        return atari_host.Played(pictures, reward, info["terminated"].astype(bool), cut, info["lives"])


def _make_task(name: str, options: _Options) -> HostEnvFactory:
    config = {key: value for key, value in dataclasses.asdict(options).items() if value is not None}
    try:
        described = _library(name).make_spec(_task(name), **config)
    except ImportError as error:
        raise ValueError(f"envpool cannot make {name} on this machine: {error}") from error
    limit = int(described.config.max_episode_steps)
    spec = EnvSpec(
        name, _obs_spec(name, described), _action_spec(name, described), None if limit == _NO_LIMIT else limit
    )

    with warnings.catch_warnings():
        # Bounds of 64 bits, of which Gymnasium says that they lose some. A pool would make this at its first recv, in
        # whatever thread that is, and only looks whether it is a Dict.
        warnings.simplefilter("ignore", UserWarning)
        space = described.observation_space

    def make(num_envs: int, seed: int, first_index: int) -> HostEnv:
        pool = _pool(name, environment_seeds(seed, first_index, num_envs), config)
        pool._gym_observation_space = space
        return _Tasks(spec, num_envs, pool)

    return HostEnvFactory(spec, make, record={"name": name, "options": dataclasses.asdict(options)})


def _obs_spec(name: str, described: Any) -> ArraySpec | DiscreteSpec:
    arrays = {key: array for key, array in described.state_array_spec.items() if key.startswith("obs")}
    players = described.config.max_num_players
    if len(arrays) != 1 or players != 1:
        raise ValueError(
            f"{name} has {len(arrays)} array(s) of observations and up to {players} player(s); of envpool's tasks "
            "podium plays those with one of each."
        )
    (array,) = arrays.values()
    dtype = narrow(array.dtype)
    if not np.issubdtype(dtype, np.floating):
        shape = _shape(array)
        return ArraySpec(shape, dtype, array.minimum, array.maximum) if shape else _index(name, array)
    # envpool writes the smallest positive number for "no lower bound", and the largest for "no upper bound".
    limits = np.finfo(array.dtype)
    low = np.where(np.asarray(array.minimum) == limits.tiny, -np.inf, array.minimum)
    high = np.where(np.asarray(array.maximum) == limits.max, np.inf, array.maximum)
    return ArraySpec(_shape(array), dtype, low.astype(dtype), high.astype(dtype))


def _action_spec(name: str, described: Any) -> ArraySpec | DiscreteSpec:
    ids = ("env_id", "players.env_id")
    arrays = {key: array for key, array in described.action_array_spec.items() if key not in ids}
    if len(arrays) == 1:
        (array,) = arrays.values()
        dtype, shape = narrow(array.dtype), _shape(array)
        if np.issubdtype(dtype, np.floating):
            return ArraySpec(shape, dtype, np.asarray(array.minimum, dtype), np.asarray(array.maximum, dtype))
        if not shape:
            return _index(name, array)
    raise ValueError(
        f"{name} has actions {', '.join(f'{key} {array.dtype}{array.shape}' for key, array in arrays.items())}; of "
        "envpool's tasks podium plays those whose action is one index or one vector of floats."
    )


def _index(name: str, array: Any) -> DiscreteSpec:
    if int(array.minimum) != 0:
        raise ValueError(
            f"{name} counts from {array.minimum}; of envpool's tasks podium plays those that count from 0."
        )
    return DiscreteSpec(int(array.maximum) + 1, narrow(array.dtype))


def _shape(array: Any) -> tuple[int, ...]:
    """Return the shape without the axis of players."""
    return tuple(array.shape[1:] if array.shape[:1] == [-1] else array.shape)


class _Tasks(NextStepHostEnv):
    """A pool of anything else."""

    def __init__(self, spec: EnvSpec, num_envs: int, pool: Any):
        super().__init__(spec, num_envs)
        self._pool = pool

    def _reset(self) -> TimeStep:
        return self._first(self._narrow(self._pool.reset()[0]))

    def _send(self, action: np.ndarray) -> None:
        self._pool.send(within_bounds(self.spec, action))

    def _recv(self) -> TimeStep:
        obs, reward, terminated, truncated, _ = self._pool.recv()
        return self._following(self._narrow(obs), reward, terminated, truncated, ended=terminated | truncated)

    def _narrow(self, obs: np.ndarray) -> np.ndarray:
        return obs.astype(self.spec.obs.dtype, copy=False)

    def _close(self) -> None:
        # envpool's own close releases nothing; the destructor does, also with a step under way.
        self._pool = None
