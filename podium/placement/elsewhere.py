"""A player whose environments and policy copy live where an engine puts them; see `players.Player`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from podium.agent import Agent
from podium.env import Env
from podium.host import HostEnvs
from podium.placement.acting import Acting, Compiled, CompiledFused, Fused
from podium.placement.engine import Engine, Handle, within
from podium.placement.players import Following, FusedPlayer, HostPlayer, Played, nothing_yet
from podium.types import Key, PyTree


@dataclasses.dataclass(frozen=True)
class PlayerFragment:
    """What makes a player in another process, and lets it play: compiled there, on its first device.

    Args:
      agent: that acts.
      env: that it plays in: pure and resetting itself, or host environments.
      num_envs: of the player.
      length: of a rollout.
      seed: of the environments' randomness.
      first_index: global number of the first.
      run_key: of the run.
    """

    agent: Agent
    env: Env | HostEnvs
    num_envs: int
    length: int
    seed: int
    first_index: int
    run_key: Key

    def __call__(self) -> _There:
        """Compile, and return the fragment."""
        device = jax.devices()[0]
        spec, run_key = self.env.spec, jax.device_put(self.run_key, device)
        params = jax.eval_shape(lambda key: self.agent.actor(self.agent.init(key, spec)), jax.random.key(0))
        if isinstance(self.env, HostEnvs):
            acting = Acting(self.agent, spec, self.num_envs, self.length, self.env.resets_in_next_step)
            compiled = Compiled(acting, params, device)
            return _There(HostPlayer(self.env, self.seed, self.first_index, compiled, run_key))
        fused = Fused(self.agent, self.env, self.num_envs, self.length)
        return _There(FusedPlayer(CompiledFused(fused, params, device), self.seed, self.first_index, run_key))


class _There:
    """A player where it lives. Parameters of None stand for those given last, so that none travel twice."""

    def __init__(self, player: FusedPlayer | HostPlayer):
        self._player = player
        self._params: PyTree = None

    def ready(self) -> None:
        """Say that it is made."""

    def play(self, params: PyTree | None, version: int, iteration: int) -> Played:
        if params is not None:
            self._params = jax.device_put(params, jax.devices()[0], may_alias=False)
        return self._player.play(self._params, version, iteration, lambda: None)


class PlayerElsewhere:
    """A `Player` in another process; made at once, while its process starts and compiles.

    Args:
      engine: that places it.
      name: of it, for messages.
      fragment: what it is.
      timeout: seconds that a rollout may take.
    """

    def __init__(self, engine: Engine, name: str, fragment: PlayerFragment, timeout: float):
        self._handle: Handle = engine.place(name, fragment)
        self._timeout, self._stands, self._sent = timeout, False, -1

    def play(
        self,
        params: PyTree,
        version: int,
        iteration: int,
        tick: Callable[[], None],
        following: Following = nothing_yet,
    ) -> Played:
        """Play one rollout; see `Player.play`.

        Raises:
          TimeoutError: it took too long.
        """
        if not self._stands:
            # The engine bounds how long this takes.
            self._handle.call("ready", waiting=tick)
            self._stands = True
        late = f"{self._handle.name} has not ended a rollout for {self._timeout:g} s."
        look = within(self._timeout, late, tick)
        sent: Any = None if version == self._sent else params
        self._sent = version
        played: Played = self._handle.call("play", sent, version, iteration, waiting=look)
        tick()
        return played

    def close(self) -> None:
        """End its process."""
        self._handle.close()
