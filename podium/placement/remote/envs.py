"""Host environments stepped in processes of their own: for simulators that hold Python's lock, or crash."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from functools import partial
from typing import Literal

import numpy as np

from podium.env import Env
from podium.host import CheckedHostEnv, HostEnv, HostEnvFactory, on_host
from podium.placement.remote.engine import Engine, Handle, Reply, resolve_engine, within
from podium.types import EnvSpec, TimeStep


def on_ray(envs: HostEnvFactory, engine: Engine | None = None, step_timeout: float = 60.0) -> HostEnvFactory:
    """Return the same task with every batch of environments in a Ray actor: a process of its own.

    Actions and observations travel; the placement sees no difference. Evaluation plays in this process.

    Args:
      envs: the task; what it makes must be something that can be sent.
      engine: of the actors; None is `RayEngine()`, one CPU each.
      step_timeout: seconds after which a step that has not come counts as hung, and raises TimeoutError.
    """
    if not step_timeout > 0:
        raise ValueError(f"step_timeout={step_timeout!r} must be greater than 0 seconds; 60 is usual.")
    where = engine or resolve_engine("ray")

    def make(num_envs: int, seed: int, first_index: int) -> HostEnv:
        name, batch = f"podium-envs-{first_index}-{first_index + num_envs - 1}", (num_envs, seed, first_index)
        return _Proxy(envs.spec, num_envs, where.place(name, partial(_Batch, envs.make, *batch)), step_timeout)

    return dataclasses.replace(envs, make=make, compiled=False, evaluation=envs.evaluation or envs)


def place_envs(
    env: Env | HostEnvFactory, engine: Engine | Literal["threads", "ray"], step_timeout: float
) -> HostEnvFactory:
    """Return a task, pure ones too, as environments on the host, stepped where the engine of a placement says."""
    envs, where = env if isinstance(env, HostEnvFactory) else on_host(env), resolve_engine(engine)
    return on_ray(envs, where, step_timeout) if where.apart else envs


class _Batch:
    """A batch of environments where it lives, with a step in one call."""

    def __init__(self, make: Callable[[int, int, int], HostEnv], num_envs: int, seed: int, first_index: int):
        self._env = make(num_envs, seed, first_index)

    def ready(self) -> None:
        """Say that it is made."""

    def reset(self) -> TimeStep:
        return self._env.reset()

    def step(self, action: np.ndarray) -> TimeStep:
        self._env.send(action)
        return self._env.recv()


class _Proxy(CheckedHostEnv):
    """A batch of environments that lives elsewhere."""

    def __init__(self, spec: EnvSpec, num_envs: int, handle: Handle, step_timeout: float):
        super().__init__(spec, num_envs)
        self._handle, self._step_timeout = handle, step_timeout
        self._sent: Reply | None = None
        self._closed = threading.Event()

    def _reset(self) -> TimeStep:
        # The first one waits for the process too; the engine bounds how long that may take.
        self._handle.call("ready", heartbeat=self._look)
        return self._await(self._handle.start("reset"))

    def _send(self, action: np.ndarray) -> None:
        self._sent = self._handle.start("step", action)

    def _recv(self) -> TimeStep:
        assert self._sent is not None
        return self._await(self._sent)

    def _await(self, answer: Reply) -> TimeStep:
        late = f"{self._handle.name} has not ended a step for step_timeout={self._step_timeout:g} s."
        return answer.result(within(self._step_timeout, late, self._look))

    def _close(self) -> None:
        self._closed.set()
        self._handle.close()

    def _look(self) -> None:
        if self._closed.is_set():
            raise RuntimeError(f"{self._handle.name} was closed while it was waited for.")
