"""What the adapters of CPU simulators share: their import, seeds, bounds of actions, rows that are no transition."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from podium.host import CheckedHostEnv
from podium.types import ArraySpec, EnvSpec, PyTree, TimeStep

_NARROW = {np.dtype(np.float64): np.dtype(np.float32), np.dtype(np.int64): np.dtype(np.int32)}


def import_simulator(module: str, name: str, extra: str) -> Any:
    """Import `module`, which the environment `name` runs on.

    Raises:
      ValueError: it is not installed; the sentence names podium's extra that has it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        raise ValueError(
            f'{name} needs {package}, which cannot be imported ({error}); pip install "podium[{extra}]".'
        ) from error


def environment_seeds(seed: int, first_index: int, num_envs: int) -> list[int]:
    """Return one seed an environment, 1 to 2**31 - 2, from the run's seed and the environment's number alone.

    Consecutive seeds, as simulators take by default, would make environment 1 of seed 0 the same as 0 of seed 1.

    Raises:
      ValueError: for a negative `seed` or `first_index`, or a `num_envs` below 1.

    >>> environment_seeds(0, 0, 3)[1:] == environment_seeds(0, 1, 2)
    True
    """
    for argument, value, least in (("seed", seed, 0), ("first_index", first_index, 0), ("num_envs", num_envs, 1)):
        if value < least:
            raise ValueError(f"{argument}={value} is below {least}; use {least} or more.")
    draws = (np.random.SeedSequence((seed, first_index + i)).generate_state(1)[0] for i in range(num_envs))
    return [1 + int(draw) % (2**31 - 2) for draw in draws]


def narrow(dtype: Any) -> np.dtype:
    """Return the dtype that JAX computes in: 32 bits where a simulator has 64."""
    return _NARROW.get(np.dtype(dtype), np.dtype(dtype))


def within_bounds(spec: EnvSpec, action: np.ndarray) -> np.ndarray:
    """Clip continuous actions to the bounds of the action space; indices stay."""
    return np.clip(action, spec.action.low, spec.action.high) if isinstance(spec.action, ArraySpec) else action


class NextStepHostEnv(CheckedHostEnv):
    """A `HostEnv` over a simulator that resets in the step after the one that ends an episode.

    `_first` and `_following` make its TimeSteps; the rows that such a simulator returns at a reset have `valid=False`.
    """

    def __init__(self, spec: EnvSpec, num_envs: int):
        super().__init__(spec, num_envs)
        self._resetting = np.ones(num_envs, bool)

    def _first(self, obs: PyTree, **info: np.ndarray) -> TimeStep:
        """Return what `reset` returns: no transition either."""
        self._resetting = np.ones(self.num_envs, bool)
        nothing = np.zeros(self.num_envs, bool)
        return self._following(obs, np.zeros(self.num_envs), nothing, nothing, nothing, **info)

    def _following(
        self, obs: PyTree, reward: Any, terminated: Any, truncated: Any, ended: np.ndarray, **info: Any
    ) -> TimeStep:
        """Return what `recv` returns; `ended` says which simulators reset in the next step."""
        valid: Any = ~self._resetting
        self._resetting = valid & ended
        reward = np.where(valid, reward, 0).astype(np.float32)
        return TimeStep(obs, reward, terminated & valid, truncated & valid, obs, info, valid)
