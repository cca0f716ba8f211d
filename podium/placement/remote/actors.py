"""Actors in processes of their own: parameters go there, and rollouts come back."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from podium.placement.compiled.iteration import params_shapes
from podium.placement.contract import Acting, Actor, Experience, Following, nothing_yet
from podium.placement.remote.engine import Engine, Handle, within
from podium.placement.threads.supervision import Heartbeat
from podium.types import Key, PyTree


@dataclasses.dataclass(frozen=True)
class _MakeFragment:
    """What is sent to the other process, and makes the actor there: compiled for its first device."""

    acting: Acting
    run_key: Key
    seed: int
    first_index: int

    def __call__(self) -> _Fragment:
        acting, device = self.acting, jax.devices()[0]
        make = acting.compile(params_shapes(acting.agent, acting.spec), device)
        return _Fragment(make(jax.device_put(self.run_key, device), self.seed, self.first_index))


class _Fragment:
    """An actor where it lives. Parameters of None stand for those given last, so that none travel twice."""

    def __init__(self, actor: Actor):
        self._actor = actor
        self._params: PyTree = None

    def ready(self) -> None:
        """Say that it is made."""

    def play(self, params: PyTree | None, version: int, iteration: int) -> Experience:
        if params is not None:
            self._params = jax.device_put(params, jax.devices()[0], may_alias=False)
        return self._actor.play(self._params, version, iteration, lambda: None)


class RemoteActor:
    """An `Actor` in another process; made at once, while its process starts and compiles.

    Args:
      engine: that places it.
      name: for messages.
      acting: how it acts.
      run_key: of the run.
      seed: of the environments' randomness.
      first_index: global number of the first environment.
      timeout: seconds that a rollout may take.
    """

    def __init__(
        self, engine: Engine, name: str, acting: Acting, run_key: Key, seed: int, first_index: int, timeout: float
    ):
        self.standing: Any = ()
        self._handle: Handle = engine.place(name, _MakeFragment(acting, run_key, seed, first_index))
        self._timeout, self._stands, self._sent = timeout, False, -1

    def play(
        self,
        params: PyTree,
        version: int,
        iteration: int,
        heartbeat: Heartbeat,
        following: Following = nothing_yet,
    ) -> Experience:
        """Play one rollout; see `Actor.play`.

        Raises:
          TimeoutError: it took too long.
        """
        if not self._stands:
            # The engine bounds how long this takes.
            self._handle.call("ready", heartbeat=heartbeat)
            self._stands = True
        late = f"{self._handle.name} has not ended a rollout for {self._timeout:g} s."
        bounded = within(self._timeout, late, heartbeat)
        sent: Any = None if version == self._sent else params
        self._sent = version
        experience: Experience = self._handle.call("play", sent, version, iteration, heartbeat=bounded)
        heartbeat()
        return experience

    def close(self) -> None:
        """End its process."""
        self._handle.close()
