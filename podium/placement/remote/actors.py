"""Actors in processes of their own: parameters go there, and rollouts come back."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax

from podium.placement.contract import Acting, Actor, Experience, Following, Heartbeat, nothing_yet
from podium.placement.remote.engine import Engine, Handle, within
from podium.types import Key, PyTree


class _Fragment:
    """An actor where it lives, compiled for the first device there.

    Parameters of None stand for those given last, so that none travel twice.
    """

    def __init__(self, acting: Acting, run_key: Key, seed: int, first_index: int):
        device = jax.devices()[0]
        make = acting.compile(acting.params_shapes(), device)
        self._actor: Actor = make(jax.device_put(run_key, device), seed, first_index)
        self._params: PyTree = None

    def ready(self) -> None:
        """Say that it is made."""

    def play(self, params: PyTree | None, version: int, iteration: int) -> Experience:
        if params is not None:
            self._params = jax.device_put(params, jax.devices()[0], may_alias=False)
        played = self._actor.play(self._params, version, iteration, lambda: None)
        return played._replace(reuse=None)  # What it was played in is copied on its way, and stays here.


class RemoteActor:
    """An `Actor` in another process; made at once, while its process starts and compiles.

    Args:
      engine: that places it.
      acting: how it acts.
      timeout: seconds that a rollout may take.
      name: for messages.
      first_index: global number of the first environment.
      run_key: of the run.
      seed: of the environments' randomness.
    """

    def __init__(
        self, engine: Engine, acting: Acting, timeout: float, name: str, first_index: int, run_key: Key, seed: int
    ):
        self.standing: Any = ()
        self._handle: Handle = engine.place(name, partial(_Fragment, acting, run_key, seed, first_index))
        self._timeout, self._stands, self._sent = timeout, False, -1

    def play(
        self, params: PyTree, version: int, iteration: int, heartbeat: Heartbeat, following: Following = nothing_yet
    ) -> Experience:
        """Play one rollout; raises TimeoutError where that takes too long."""
        if not self._stands:  # The engine bounds how long this takes.
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
