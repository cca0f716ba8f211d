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
from podium.agent import applied, observed
from podium.devices import at, jit
from podium.finite import all_finite, rollout_finite
from podium.learn import Gradient, Prepared, can_learn, gradient, num_gradients, prepare
from podium.placement.compiled.iteration import empty_replay
from podium.placement.contract import Acting, Actor, MakeActor, Sizes
from podium.rollout import Rollout, RolloutState, with_gap
from podium.types import Array, Key, Metrics, PyTree


@dataclasses.dataclass(frozen=True)
class GradientFunctions:
    """What one of `num_workers` computes in an iteration, beside playing: pure functions, cut at the gradient."""

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
        if agent.replay is None or agent.replay.update_priorities is None:
            return prepared, (), ready, finite
        priorities, kept = prepared.replay.priorities, prepared.replay._replace(priorities=())
        return dataclasses.replace(prepared, replay=kept), priorities, ready, finite

    def take(self, step: Array, state: PyTree, prepared: Prepared, priorities: PyTree) -> tuple[Gradient, Array]:
        """Take gradient `step` of an iteration at `state`; returns whether all of it is finite, too."""
        taken = gradient(self.acting.agent, state, prepared.ranked(priorities), step)
        return taken, all_finite(taken.grads)

    def observe(self, state: PyTree, rollout: Rollout) -> PyTree:
        """Return the State after it has observed a rollout."""
        return observed(self.acting.agent, state, rollout.trajectory())

    def apply(self, state: PyTree, gradient: PyTree, weight: Array) -> PyTree:
        """Return the State after a gradient, every number of which is multiplied by `weight`; 1 changes no bit."""
        weigh = lambda x: x * weight.astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else x
        return applied(self.acting.agent, state, jax.tree.map(weigh, gradient))

    @functools.cached_property
    def shapes(self) -> GradientShapes:
        """Trace an iteration for its shapes."""
        agent, sizes, number = self.acting.agent, self.sizes, jax.ShapeDtypeStruct((), np.int32)
        key = jax.eval_shape(lambda: jax.random.key(0))
        state = jax.eval_shape(lambda key: agent.init(key, self.acting.spec), key)
        replay = jax.eval_shape(lambda: empty_replay(self.acting, sizes))
        rollout = self.acting.shapes(sizes.rollout_length, sizes.num_envs)
        rollout = with_gap(rollout) if self.acting.on_host else rollout  # Pure environments are set back.
        to_prepare = key, number, number, state, rollout, replay
        prepared, priorities, _, _ = jax.eval_shape(self.prepare, *to_prepare)
        to_take = number, state, prepared, priorities
        taken, _ = jax.eval_shape(self.take, *to_take)
        steps = num_gradients(agent, prepared)
        return GradientShapes(state, rollout, to_prepare, to_take, taken.grads, steps, taken.metrics)

    def lower(self, device: jax.Device, keeps: bool) -> tuple[Any, Any]:
        """Trace `prepare` and `take` for a device; `keeps` what an iteration began with, for repeating it."""
        prepare = jit(self.prepare, device, () if keeps else (5,)).lower(*at(self.shapes.to_prepare, device))
        take = jit(self.take, device, () if keeps else (3,)).lower(*at(self.shapes.to_take, device))
        return prepare, take

    def compile(self, device: jax.Device, keeps: bool, lowered: Any = None) -> Callable[[int], GradientActor]:
        """Compile for a device, and return what makes the actor of a worker there; `lowered` is what `lower` gave."""
        acting, (prepare, take) = self.acting, lowered or self.lower(device, keeps)
        make_actor = acting.compile(acting.params_shapes(), device, keeps)
        params = jit(acting.agent.actor, device)
        return functools.partial(GradientActor, self, device, make_actor, params, prepare.compile(), take.compile())

    def make(self, worker: int, keeps: bool) -> GradientActor:
        """Compile, and make the actor of a worker, on the first device of this process."""
        return self.compile(jax.devices()[0], keeps)(worker)


class GradientShapes(NamedTuple):
    """Of what an iteration of one worker is given and makes; `to_prepare` and `to_take` are arguments."""

    state: PyTree
    rollout: Rollout
    to_prepare: tuple[Any, ...]
    to_take: tuple[Any, ...]
    gradient: PyTree
    steps: int
    metrics: Metrics


@dataclasses.dataclass(eq=False)
class GradientActor:
    """Environments, a replay, and the functions that play, plan and take gradients, in one place.

    It may live in another process: its methods take and return trees of arrays and plain values. A State of None
    stands for the one given last, so that none travels twice. What was played changes nothing until `settle`, so that
    an iteration may be repeated; environments on the host cannot be set back, and begin with fresh episodes then.
    What acts, `prepare` and `take_gradient`, which is `functions.take`, are compiled for `device`.
    """

    functions: GradientFunctions
    device: jax.Device
    make_actor: MakeActor
    params: Callable[[PyTree], PyTree]
    prepare: Callable[..., Any]
    take_gradient: Callable[..., Any]
    worker: int

    def __post_init__(self) -> None:
        self._state: PyTree = None
        self._actor: Actor | None = None
        self._failures = 0
        self._settled = False  # Whether what was played last is in the replay.

    def ready(self) -> None:
        """Say that it is made."""

    def begin(self, run_key: Key, standing: RolloutState | tuple[()], replay: PyTree, seed: int) -> None:
        """Let environments and replay stand so; `seed` is for environments on the host, which begin anew."""
        self.close()
        self._run_key, self._standing, self._replay = self._put((run_key, standing, replay))
        self._seed = seed

    def play(self, number: int, version: int, state: PyTree | None) -> tuple[Rollout, bool, dict[str, float], Array]:
        """Play iteration `number`, and plan what its gradients are taken from.

        Returns:
          the rollout; whether there is enough to learn from; what was counted; [E], as `GradientFunctions.prepare`.
        """
        self._bring(state)
        actor, self._actor = self._actor, None
        gap, self._settled = actor is None or not self._settled, False
        if actor is None:
            seed, first = keys.seed_after(self._seed, self._failures), self.worker * self.functions.sizes.num_envs
            actor = self.make_actor(self._run_key, seed, first, self._standing)
        actor.standing = self._standing
        try:
            played: Any = actor.play(self.params(self._state), version, number, lambda: None)
        except BaseException:
            self._failures += 1
            actor.close()
            raise
        self._actor, numbers = actor, (np.int32(number), np.int32(self.worker))
        rollout = with_gap(played.rollout, gap) if self.functions.acting.on_host else played.rollout
        planned = self.prepare(self._run_key, *numbers, self._state, rollout, self._replay)
        self._prepared, self._priorities, ready, finite = planned
        return rollout, bool(ready), played.stats, finite

    def take(self, step: int, state: PyTree | None) -> tuple[PyTree, bool, Metrics, bool]:
        """Take a gradient from what was played.

        Returns:
          the gradient; whether all of it is finite; its metrics; whether the iteration ends before it (`Agent.stops`).
        """
        self._bring(state)
        taken, finite = self.take_gradient(np.int32(step), self._state, self._prepared, self._priorities)
        self._priorities = taken.priorities
        return taken.grads, bool(finite), taken.metrics, taken.stop is not None and bool(taken.stop)

    def settle(self) -> None:
        """Let environments and replay stand as after what was played."""
        assert self._actor is not None
        self._settled = True
        self._standing, self._replay = self._actor.standing, self._prepared.ranked(self._priorities).replay

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
        return jax.device_put(tree, self.device, may_alias=False if travelled else None)
