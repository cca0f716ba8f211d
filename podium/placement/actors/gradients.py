"""An actor that also takes gradients from what it played: environments, a replay and compiled functions together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from podium.placement.actors.experience import Actor, MakeActor, seed_after
from podium.placement.compiled.devices import jit
from podium.placement.compiled.gradients import GradientFunctions, Taken
from podium.placement.compiled.iteration import params_shapes
from podium.placement.compiled.rollouts import Rollout
from podium.rollout import RolloutState
from podium.types import Array, Key, Metrics, PyTree


class Functions(NamedTuple):
    """What a worker computes with, compiled for a device."""

    of: GradientFunctions
    device: jax.Device
    make_actor: MakeActor
    params: Callable[[PyTree], PyTree]
    prepare: Callable[..., tuple[Any, PyTree, Array, Array]]
    take: Callable[..., Taken]


class Played(NamedTuple):
    """What a rollout gives to others than its own worker; `finite` is [E], `ready` whether there is enough to learn."""

    rollout: Rollout
    ready: bool
    stats: dict[str, float]
    finite: Array


class GradientActor:
    """Environments, a replay, and the functions that play, plan and take gradients, in one place.

    It may live in another process: its methods take and return trees of arrays and plain values. A State of None
    stands for the one given last, so that none travels twice. What was played changes nothing until `settle`, so that
    an iteration may be repeated; environments on the host cannot be set back, and begin with fresh episodes then.

    Args:
      functions: of its device.
      worker: number of this worker.
    """

    def __init__(self, functions: Functions, worker: int):
        self._functions, self._worker = functions, np.int32(worker)
        self._state: PyTree = None
        self._actor: Actor | None = None
        self._failures = 0

    def ready(self) -> None:
        """Say that it is made."""

    def begin(self, run_key: Key, standing: RolloutState | tuple[()], replay: PyTree, seed: int) -> None:
        """Let environments and replay stand so; `seed` is for environments on the host, which begin anew."""
        self.close()
        self._run_key, self._standing, self._replay = self._put((run_key, standing, replay))
        self._seed = seed

    def play(self, number: int, version: int, state: PyTree | None) -> Played:
        """Play iteration `number`, and plan what its gradients are taken from."""
        self._bring(state)
        experience = self._play(number, version)
        mine = self._run_key, np.int32(number), self._worker
        self._prepared, self._priorities, ready, finite = self._functions.prepare(
            *mine, self._state, experience.rollout, self._replay
        )
        return Played(experience.rollout, bool(ready), experience.stats, finite)

    def _play(self, number: int, version: int) -> Any:
        actor = self._actor or self._make_actor()
        self._actor, actor.standing = None, self._standing
        try:
            played = actor.play(self._functions.params(self._state), version, number, lambda: None)
        except BaseException:
            self._failures += 1
            actor.close()
            raise
        self._actor = actor
        return played

    def _make_actor(self) -> Actor:
        seed, first = seed_after(self._seed, self._failures), int(self._worker) * self._functions.of.sizes.num_envs
        return self._functions.make_actor(self._run_key, seed, first, self._standing)

    def take(self, step: int, state: PyTree | None) -> tuple[PyTree, bool, Metrics]:
        """Take a gradient from what was played; returns it, whether all of it is finite, and its metrics."""
        self._bring(state)
        taken = self._functions.take(np.int32(step), self._state, self._prepared, self._priorities)
        self._priorities = taken.priorities
        return taken.gradient, bool(taken.finite), taken.metrics

    def settle(self) -> None:
        """Let environments and replay stand as after what was played."""
        assert self._actor is not None
        self._standing = self._actor.standing
        self._replay = self._functions.of.replay_after(self._prepared, self._priorities)

    def standing(self) -> tuple[RolloutState | tuple[()], PyTree]:
        """Return where the environments stand, and the replay."""
        return self._standing, self._replay

    def close(self) -> None:
        """Release the environments."""
        if self._actor is not None:
            self._actor.close()
            self._actor = None

    def _bring(self, state: PyTree | None) -> None:
        if state is not None:
            self._state = self._put(state)

    def _put(self, tree: PyTree) -> PyTree:
        # What comes from another process is copied: it would be used in place, and cannot be donated then.
        travelled = any(isinstance(x, np.ndarray) for x in jax.tree.leaves(tree))
        return jax.device_put(tree, self._functions.device, may_alias=False if travelled else None)


def compile_functions(of: GradientFunctions, device: jax.Device, keeps: bool, lowered: Any = None) -> Functions:
    """Compile what a worker computes with, for a device; `lowered` is what `of.lower` returned, if it was called."""
    prepare, take = lowered or of.lower(device, keeps)
    acting = of.acting
    make = acting.compile(params_shapes(acting.agent, acting.spec), device, keeps)
    return Functions(of, device, make, jit(acting.agent.actor, device), prepare.compile(), take.compile())


def make_gradient_actor(of: GradientFunctions, worker: int, keeps: bool) -> GradientActor:
    """Return one with functions of its own, on the first device of this process."""
    return GradientActor(compile_functions(of, jax.devices()[0], keeps), worker)
