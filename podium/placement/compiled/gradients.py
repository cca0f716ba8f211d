"""The shapes of gradients and of what else learning moves, and how many bytes that is in an update."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from podium import keys
from podium.agent import Agent
from podium.learn import Prepared, can_learn, gradient, num_gradients, prepare
from podium.placement.compiled.devices import at, jit
from podium.placement.compiled.iteration import all_finite, empty_replay, rollout_finite
from podium.placement.compiled.rollouts import Acting, Rollout, zeros
from podium.placement.contract import Sizes
from podium.placement.report import nbytes
from podium.types import Array, Key, Metrics, PyTree


def prepared_shapes(acting: Acting, sizes: Sizes, state: PyTree, replay: PyTree) -> Prepared:
    """Return the shapes of what the gradients of an iteration are taken from; shapes will do for the arguments."""

    def prepared(key: Key, state: PyTree, replay: PyTree) -> Prepared:
        trajectory = zeros(acting.shapes(sizes.rollout_length, sizes.num_envs)).trajectory()
        return prepare(key, acting.agent, state, replay, trajectory, sizes.num_lanes)

    return jax.eval_shape(prepared, jax.random.key(0), state, replay)


def gradient_shapes(agent: Agent, state: PyTree, prepared: Prepared) -> PyTree:
    """Return the shapes of one gradient."""
    return jax.eval_shape(lambda state, prepared: gradient(agent, state, prepared, 0).grads, state, prepared)


def gradient_bytes(acting: Acting, sizes: Sizes, state: PyTree, replay: PyTree) -> int:
    """Return the bytes of all gradients of an update, of one seed; shapes will do for `state` and `replay`."""
    prepared: Any = prepared_shapes(acting, sizes, state, replay)
    return nbytes(gradient_shapes(acting.agent, state, prepared)) * num_gradients(acting.agent, prepared)


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
