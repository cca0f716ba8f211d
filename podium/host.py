"""Environments on the CPU, outside compiled programs: `HostEnv` (a batch), and `HostEnvFactory`, which makes them."""

from __future__ import annotations

import abc
import dataclasses
import reprlib
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from podium import keys
from podium.env import Env, auto_reset
from podium.types import DiscreteSpec, EnvSpec, PyTree, TimeStep


class HostEnv(Protocol):
    """A batch of environments that runs on the CPU and resets itself. One thread at a time may use it.

    Every array has a leading axis of `num_envs` and lies in NumPy. An environment may begin its next episode

    - in the same step that ends one: `obs` is then the first observation and `next_obs` the true last one; or
    - in the next step, whose action is ignored: the ending step returns the true last observation as `obs`, the one
      after it the first observation, reward 0, no flags, and `valid=False`, because it is no transition.

    Which of the two is told by `valid`: None in every step, or an array in every step. Of agents that act together
    (`EnvSpec.num_agents`) `valid` is [num_envs, N] in every step, and episodes begin in the step that ends one.

    Attributes:
      spec: of one environment.
      num_envs: in the batch.
    """

    spec: EnvSpec
    num_envs: int

    def reset(self) -> TimeStep:
        """Start every environment."""
        ...

    def send(self, action: np.ndarray) -> None:
        """Begin a step with actions [num_envs, ...] and return at once; raises ValueError for actions that are bad."""
        ...

    def recv(self) -> TimeStep:
        """Wait for the step that was sent."""
        ...

    def close(self) -> None:
        """Release threads and memory; may be called twice."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class HostEnvFactory:
    """A task for which a placement makes as many host environments as it needs.

    Args:
      spec: of one environment.
      make: `(num_envs, seed, first_index) -> HostEnv`; the environments have the numbers from first_index on, and all
        their randomness derives from `seed` and those numbers, so that no grouping changes it.
      resets_in_next_step: which of the two ways of `HostEnv` its environments go.
      compiled: whether a step is a compiled program, so that it takes the devices that would act meanwhile.
      frames_per_step: frames of the simulator in a step, for counting.
      evaluation: the same task by the protocol that scores are quoted for (whole episodes, unclipped rewards); None
        where it is the same.
      protocol: how an episode is played, in words, where that needs saying beside a score.
      record: the arguments it was made from, for `config.json`.
    """

    spec: EnvSpec
    make: Callable[[int, int, int], HostEnv]
    resets_in_next_step: bool = True
    compiled: bool = False
    frames_per_step: int = 1
    evaluation: HostEnvFactory | None = None
    protocol: str = ""
    record: dict[str, Any] = dataclasses.field(default_factory=dict)


def check_is_env(env: Any) -> None:
    """Raise ValueError for what is neither an `Env` nor a `HostEnvFactory`, such as another library's environment."""
    if not isinstance(env, Env | HostEnvFactory):
        name = repr(env) if isinstance(env, str) else "name"
        raise ValueError(
            f"env={reprlib.repr(env)} is neither a podium.Env nor a podium.HostEnvFactory; make one by "
            f"podium.envs.make({name}), or by podium.envs.from_gymnasium."
        )


def frames_per_step(env: Env | HostEnvFactory) -> int:
    """Return the frames of the simulator in a step; a pure environment counts none apart from its steps."""
    return env.frames_per_step if isinstance(env, HostEnvFactory) else 1


def check_actions(spec: EnvSpec, num_envs: int, action: Any) -> np.ndarray:
    """Return actions in the dtype of `spec`, contiguous; native simulators crash on some of what is refused here.

    Raises:
      ValueError: for a wrong shape, a wrong kind of number, an index out of range, or a number that is not finite.
    """
    array = np.asarray(action)
    shape = (num_envs, *spec.action.shape)
    if array.shape != shape:
        raise ValueError(f"actions of shape {array.shape} were sent to {num_envs} of {spec.name}; send {shape}.")
    if isinstance(spec.action, DiscreteSpec):
        if array.dtype.kind not in "iu":
            raise ValueError(f"actions of dtype {array.dtype} were sent to {spec.name}; send integers.")
        low, high = (array.min(), array.max()) if array.size else (0, 0)
        if low < 0 or high >= spec.action.num_values:
            most = spec.action.num_values - 1
            raise ValueError(f"actions {low} to {high} were sent to {spec.name}; send 0 to {most}.")
    else:
        if array.dtype.kind != "f":
            raise ValueError(f"actions of dtype {array.dtype} were sent to {spec.name}; send floats.")
        if not np.isfinite(array).all():
            raise ValueError(f"an action sent to {spec.name} is not finite; the policy has diverged.")
    return np.ascontiguousarray(array, dtype=spec.action.dtype)


class CheckedHostEnv(abc.ABC):
    """A `HostEnv` that refuses what simulators crash on: bad actions, and calls out of turn.

    Subclasses say what `reset`, `send`, `recv` and `close` do, in methods of the same names with an underscore.
    """

    def __init__(self, spec: EnvSpec, num_envs: int):
        self.spec, self.num_envs = spec, num_envs
        self._remedy = {"send": "call reset first", "recv": "call reset and send first"}

    def reset(self) -> TimeStep:
        """Start every environment."""
        self._check_turn("reset")
        timestep = self._reset()
        self._remedy = {"recv": "call send first"}
        return timestep

    def send(self, action: np.ndarray) -> None:
        """Begin a step with actions [num_envs, ...] and return at once; raises ValueError for actions that are bad."""
        self._check_turn("send")
        self._send(check_actions(self.spec, self.num_envs, action))
        self._remedy = dict.fromkeys(("reset", "send"), "call recv first, for the actions sent already")

    def recv(self) -> TimeStep:
        """Wait for the step that was sent."""
        self._check_turn("recv")
        self._remedy = {"recv": "call send first"}
        return self._recv()

    def close(self) -> None:
        """Release threads and memory; may be called twice."""
        closed = dict.fromkeys(("reset", "send", "recv"), "it is closed; make another")
        if self._remedy != closed:
            self._remedy = closed
            self._close()

    def _check_turn(self, method: str) -> None:
        if method in self._remedy:
            raise RuntimeError(f"{method} was called out of turn on {self.spec.name}: {self._remedy[method]}.")

    @abc.abstractmethod
    def _reset(self) -> TimeStep: ...

    @abc.abstractmethod
    def _send(self, action: np.ndarray) -> None: ...

    @abc.abstractmethod
    def _recv(self) -> TimeStep: ...

    @abc.abstractmethod
    def _close(self) -> None: ...


def on_host(env: Env) -> HostEnvFactory:
    """Return a pure environment as host environments: the same states as a fused rollout of the same seed.

    They are stepped by a compiled program of their own, on the first device. A way to test and to compare placements.
    """
    given, env = env, auto_reset(env)
    # The time is one number for all: on the host it costs nothing to count.
    at = lambda env_keys, time: keys.at_time(env_keys, jnp.broadcast_to(time, env_keys.shape))
    reset = jax.jit(lambda env_keys, time: jax.vmap(env.reset)(at(env_keys, time)))
    step = jax.jit(lambda env_keys, time, state, action: jax.vmap(env.step)(at(env_keys, time), state, action))

    def make(num_envs: int, seed: int, first_index: int) -> HostEnv:
        return _OnHost(env.spec, reset, step, num_envs, seed, first_index)

    shown = (given.evaluation or given)._replace(random_first_length=False)
    evaluation = on_host(shown) if given.evaluation or given.random_first_length else None
    record = {"name": env.spec.name}
    return HostEnvFactory(
        env.spec, make, resets_in_next_step=False, compiled=True, evaluation=evaluation, record=record
    )


class _OnHost(CheckedHostEnv):
    """A pure environment, batched."""

    def __init__(
        self,
        spec: EnvSpec,
        reset: Callable[..., Any],
        step: Callable[..., Any],
        num_envs: int,
        seed: int,
        first_index: int,
    ):
        super().__init__(spec, num_envs)
        self._run_reset, self._run_step = reset, step
        index = first_index + jnp.arange(num_envs)
        self._keys = keys.environment_keys(keys.roots(jax.random.key(seed)).env, index)
        self._time = 0
        self._state: PyTree = None
        self._sent: Any = None

    def _reset(self) -> TimeStep:
        self._state, timestep = self._run_reset(self._keys, np.uint32(self._time))
        self._time = (self._time + 1) % 2**32
        return _fetch(timestep, self.spec)

    def _send(self, action: np.ndarray) -> None:
        self._sent = self._run_step(self._keys, np.uint32(self._time), self._state, action)
        self._time = (self._time + 1) % 2**32

    def _recv(self) -> TimeStep:
        self._state, timestep = self._sent
        return _fetch(timestep, self.spec)

    def _close(self) -> None:
        self._state = self._sent = None


def _fetch(timestep: TimeStep, spec: EnvSpec) -> TimeStep:
    # The fields stay what they are: None is no array.
    fetched = TimeStep(*jax.tree.map(np.asarray, tuple(timestep)))  # On a CPU a third of what `device_get` takes.
    if spec.num_agents is None or fetched.valid is not None:
        return fetched
    all_live: Any = np.ones(fetched.reward.shape, bool)
    return fetched._replace(valid=all_live)
