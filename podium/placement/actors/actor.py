"""How an agent acts in an environment of either kind, the one place that asks which; actors of pure environments.

A whole rollout in a pure environment is one compiled program; those on the CPU are in `actors.host`.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from podium import episodes, keys, words
from podium.agent import Agent, fresh_carry, fresh_past
from podium.devices import at, jit
from podium.env import Env, auto_reset
from podium.host import HostEnvFactory
from podium.learn import python_scan
from podium.placement.actors.host import HostActing
from podium.placement.contract import STATS, Acting, Actor, Experience, Following, Heartbeat, MakeActor, nothing_yet
from podium.rollout import Rollout, RolloutState, begin, play, scaled
from podium.types import Array, Key, PyTree


@dataclasses.dataclass(frozen=True)
class FusedActing(Acting):
    """The functions of an actor of `num_envs` pure environments, which reset themselves; T = `length` steps."""

    env: Env
    on_host: ClassVar[bool] = False

    def begin(self, key: Key, index: Array) -> RolloutState:
        """Reset the environments numbered `index` [B]; `key` is that of all environments of a run."""
        past = fresh_past(self.agent, index.shape[0])
        return begin(key, self.env, index, fresh_carry(self.agent, self.spec, index), past)

    def play(
        self,
        run_key: Key,
        iteration: Array,
        params: PyTree,
        state: RolloutState,
        version: Array,
        fold: Callable[..., Any] = jax.lax.scan,
    ) -> tuple[RolloutState, Rollout, dict[str, Array]]:
        """Play a rollout, and count."""
        key = keys.iteration(run_key, iteration).rollout
        state, played, ended = play(key, self.agent, self.env, params, state, self.length, version, fold)
        valid: Array | int = played.terminated.size
        if played.valid is not None:
            valid = jnp.sum(episodes.any_agent(played.valid, played))
        stats = {**episodes.summarize(ended), "valid_steps": jnp.asarray(valid, jnp.float32)}
        return state, played, stats

    def shapes(self, length: int, num_envs: int) -> Rollout:
        """Return the shapes of a rollout of so many steps and environments."""

        def play(key: Key) -> Rollout:
            one, number = dataclasses.replace(self, num_envs=1, length=1), jnp.zeros((), jnp.int32)
            params, state = self.agent.actor(self.agent.init(key, self.spec)), self.begin(key, jnp.arange(1))
            return one.play(key, number, params, state, number)[1]

        return scaled(jax.eval_shape(play, jax.random.key(0)), length, num_envs)

    def compile(self, params: PyTree, device: jax.Device, keeps: bool = False) -> MakeActor:
        """Compile for a device, and return what makes actors there."""
        number, key = jax.ShapeDtypeStruct((), np.int32), jax.eval_shape(lambda: jax.random.key(0))
        start = lambda seed, first_index: self.begin(keys.roots(seed).env, first_index + jnp.arange(self.num_envs))
        state = jax.eval_shape(start, key, number)
        playing = functools.partial(self.play, fold=words.fold(device))
        play = jit(playing, device, () if keeps else (3,)).lower(*at((key, number, params, state, number), device))
        # Both now: what is compiled later is waited for by all of the run.
        compiled, begin = play.compile(), jit(start, device).lower(*at((key, number), device)).compile()

        def make(run_key: Key, seed: int, first_index: int, standing: Any = None) -> FusedActor:
            if standing is None:
                standing = begin(jax.device_put(jax.random.key(seed), device), np.int32(first_index))
            return FusedActor(compiled, run_key, standing)

        return make

    def in_python(self, params: PyTree, device: jax.Device) -> MakeActor:
        """Return what makes actors whose loops are Python's: every function is compiled alone, when first used."""
        env = self.env._replace(reset=jax.jit(self.env.reset), step=jax.jit(self.env.step))
        agent = self.agent._replace(act=jax.jit(self.agent.act, static_argnums=5))
        play = functools.partial(dataclasses.replace(self, agent=agent, env=env).play, fold=python_scan)
        return lambda run_key, seed, first_index, standing: FusedActor(play, run_key, standing)

    def bytes_moved(self, num_envs: int) -> dict[str, int]:
        """Return what goes up to the device and comes down from it in a rollout: nothing."""
        return {}


class FusedActor:
    """An `Actor` of pure environments.

    Args:
      play: `FusedActing.play`, compiled or not.
      run_key: of the run.
      standing: where the environments stand.
    """

    def __init__(self, play: Callable[..., Any], run_key: Key, standing: RolloutState):
        self.standing, self._play, self._run_key = standing, play, run_key

    def play(
        self, params: PyTree, version: int, iteration: int, heartbeat: Heartbeat, following: Following = nothing_yet
    ) -> Experience:
        """Play one rollout. What acting takes is part of `env_seconds`: all is one program."""
        began = time.perf_counter()
        self.standing, rollout, counts = self._play(
            self._run_key, np.int32(iteration), params, self.standing, np.int32(version)
        )
        stats = dict.fromkeys(STATS, 0.0) | {name: float(x) for name, x in jax.device_get(counts).items()}
        stats["env_seconds"] = time.perf_counter() - began
        heartbeat()
        return Experience(jax.block_until_ready(rollout), version, stats)

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


def make_acting(agent: Agent, env: Env | HostEnvFactory, num_envs: int, length: int) -> Acting:
    """Return how an actor acts in `num_envs` environments, T = `length` steps a rollout."""
    if isinstance(env, HostEnvFactory):
        return HostActing(agent, env, num_envs, length)
    return FusedActing(agent, auto_reset(env), num_envs, length)


def compile_actors(
    acting: Acting, places: Sequence[jax.Device], first_index: int, params: PyTree
) -> list[Callable[[Key, int], Actor]]:
    """Compile for the device of every actor, and return what makes each from `(run_key, seed)`.

    Args:
      acting: of each.
      places: their devices.
      first_index: number of the first environment of the first actor; the others' follow.
      params: shapes of the parameters that act.
    """
    on = {device: acting.compile(params, device) for device in dict.fromkeys(places)}
    indices = range(first_index, first_index + len(places) * acting.num_envs, acting.num_envs)
    return [functools.partial(on[device], first_index=i) for device, i in zip(places, indices, strict=True)]
