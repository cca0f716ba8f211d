"""An actor that also takes gradients from what it played: environments, a replay and compiled functions together."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podium import keys
from podium.devices import at, jit
from podium.learn import Prepared, can_learn, gradient, num_gradients, prepare
from podium.placement.compiled.iteration import all_finite, empty_replay, params_shapes, rollout_finite, seed_after
from podium.placement.contract import Acting, Actor, MakeActor, Rollout, Sizes
from podium.rollout import RolloutState
from podium.types import Array, Key, Metrics, PyTree


class Taken(NamedTuple):
    """A gradient, whether all of it is finite, its metrics, and the priorities that the next one is drawn by."""

    gradient: PyTree
    finite: Array
    metrics: Metrics
    priorities: PyTree


@dataclasses.dataclass(frozen=True)
class GradientFunctions:
    """What one of several workers computes in an iteration, beside playing: pure functions, cut at the gradient.

    Args:
      acting: of the worker.
      sizes: of the worker.
      num_workers: of the run.
    """

    acting: Acting
    sizes: Sizes
    num_workers: int

    def prepare(
        self, run_key: Key, number: Array, worker: Array, state: PyTree, rollout: Rollout, replay: PyTree
    ) -> tuple[Prepared, PyTree, Array, Array]:
        """Plan what iteration `number` of a worker learns from.

        Returns:
          what the gradients are taken from, but for its priorities; these, `()` where there are none; a bool scalar,
          whether there is anything to learn from yet; and [E], whether each environment gave finite numbers only.
        """
        agent, trajectory, key = self.acting.agent, rollout.trajectory(), keys.iteration(run_key, number).learn
        # Workers shuffle and sample apart; one alone draws what Single and Anakin draw.
        key = key if self.num_workers == 1 else jax.random.fold_in(key, worker)
        prepared = prepare(key, agent, state, replay, trajectory, self.sizes.num_lanes)
        ready, finite = can_learn(agent, prepared), rollout_finite(agent, trajectory)
        if not self.new_priorities:
            return prepared, (), ready, finite
        priorities, kept = prepared.replay.priorities, prepared.replay._replace(priorities=())
        return dataclasses.replace(prepared, replay=kept), priorities, ready, finite

    def take(self, step: Array, state: PyTree, prepared: Prepared, priorities: PyTree) -> Taken:
        """Take gradient `step` of an iteration at `state`."""
        taken = gradient(self.acting.agent, state, prepared.ranked(priorities), step)
        return Taken(taken.grads, all_finite(taken.grads), taken.metrics, taken.priorities)

    def replay_after(self, prepared: Prepared, priorities: PyTree) -> PyTree:
        """Return the replay's state after the iteration, or `()`."""
        return prepared.ranked(priorities).replay

    def observe(self, state: PyTree, rollout: Rollout) -> PyTree:
        """Return the State after it has observed a rollout."""
        return self.acting.agent.observe(state, rollout.trajectory())

    def apply(self, state: PyTree, gradient: PyTree, weight: Array) -> PyTree:
        """Return the State after a gradient, every number of which is multiplied by `weight`; 1 changes no bit."""
        weigh = lambda x: x * weight.astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else x
        return self.acting.agent.apply(state, jax.tree.map(weigh, gradient))

    @property
    def new_priorities(self) -> bool:
        """Whether taking a gradient changes the replay's priorities."""
        return self.acting.agent.replay is not None and self.acting.agent.replay.update_priorities is not None

    @functools.cached_property
    def shapes(self) -> GradientShapes:
        """Trace an iteration for its shapes."""
        agent, key, number = self.acting.agent, jax.eval_shape(lambda: jax.random.key(0)), jnp.zeros((), jnp.int32)
        state = jax.eval_shape(lambda key: agent.init(key, self.acting.spec), key)
        replay = jax.eval_shape(lambda: empty_replay(self.acting, self.sizes))
        rollout = self.acting.shapes(self.sizes.rollout_length, self.sizes.num_envs)
        to_prepare = key, number, number, state, rollout, replay
        prepared, priorities, _, _ = jax.eval_shape(self.prepare, *to_prepare)
        to_take = number, state, prepared, priorities
        taken = jax.eval_shape(self.take, *to_take)
        steps = num_gradients(agent, prepared)
        return GradientShapes(state, replay, rollout, to_prepare, to_take, taken.gradient, steps, taken.metrics)

    def lower(self, device: jax.Device, keeps: bool) -> tuple[Any, Any]:
        """Trace `prepare` and `take` for a device; `keeps` what an iteration began with, for repeating it."""
        prepare = jit(self.prepare, device, () if keeps else (5,)).lower(*at(self.shapes.to_prepare, device))
        take = jit(self.take, device, () if keeps else (3,)).lower(*at(self.shapes.to_take, device))
        return prepare, take


class GradientShapes(NamedTuple):
    """Of what an iteration of one worker is given and makes; `to_prepare` and `to_take` are arguments."""

    state: PyTree
    replay: PyTree
    rollout: Rollout
    to_prepare: tuple[Any, ...]
    to_take: tuple[Any, ...]
    gradient: PyTree
    steps: int
    metrics: Metrics


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
