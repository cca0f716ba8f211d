"""Learning from minibatches that a replay apart gives: planning what goes into it, and one gradient step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from podium import xla
from podium.agent import applied, graded, planned
from podium.compiling import CompiledOnce
from podium.devices import at, jit
from podium.networks import batch_over
from podium.placement.compiled.learner import Learner
from podium.rollout import Rollout
from podium.types import Key, Metrics, PyTree


@dataclasses.dataclass(eq=False)
class MinibatchSteps(CompiledOnce):
    """What a replay apart is filled by and learnt from.

    Args:
      learner: `observer_of` the run.
      minibatch: shapes of one.
      planner: device that plans what is inserted.
    """

    learner: Learner
    minibatch: PyTree
    planner: jax.Device

    def _lower(self) -> Any:
        learner, key = self.learner, jax.eval_shape(lambda: jax.random.key(0))
        agent, everywhere = learner.abstract_state().agent, NamedSharding(learner.mesh, P())
        held, self._along = learner.shardings.agent, NamedSharding(learner.mesh, P("env"))
        # The inserter plans by the newest State, whenever it likes: nothing is donated.
        step = jax.jit(
            self._step, in_shardings=(held, everywhere, self._along), out_shardings=(held, everywhere, everywhere)
        )
        self._metrics = jax.eval_shape(self._step, agent, key, self.minibatch)[1]
        plan = jit(self._plan, self.planner).lower(key, at(agent, self.planner), learner.rollout_shapes)
        return step.lower(agent, key, self.minibatch), plan

    def _compile(self, options: dict[str, Any] | None) -> Any:
        step, plan = self._lowered
        return step.compile(xla.in_one_order(self.learner.devices)), plan.compile()

    def plan(self, key: Key, agent: PyTree, rollout: Rollout) -> PyTree:
        """Return the data that go into the replay, planned where the rollout is, so that the State travels nowhere."""
        return self._compiled[1](*jax.device_put((key, agent), self.planner), rollout)

    def step(self, agent: PyTree, key: Key, minibatch: PyTree) -> tuple[PyTree, Metrics, Any]:
        """Take and apply a gradient; returns the State, its metrics, and new priorities."""
        stepped: tuple[PyTree, Metrics, Any] = self._compiled[0](agent, key, jax.device_put(minibatch, self._along))
        return stepped

    def mean(self, rows: Sequence[Metrics]) -> dict[str, np.ndarray]:
        """Return the mean over gradient steps; NaN where there were none, which the host loop leaves out."""
        if not rows:
            return {name: np.full(x.shape, np.nan, np.float32) for name, x in self._metrics.items()}
        return {name: np.mean([np.array(row[name]) for row in rows], axis=0) for name in rows[0]}

    def gradient(self) -> PyTree:
        """Return the shapes of a gradient."""
        agent, state = self.learner.agent, self.learner.state_shapes.agent
        return jax.eval_shape(agent.grad, jax.random.key(0), state, self.minibatch)[0]

    def _plan(self, key: Key, state: PyTree, rollout: Rollout) -> PyTree:
        return planned(self.learner.agent, key, state, rollout.trajectory()).data

    def _step(self, state: PyTree, key: Key, minibatch: PyTree) -> tuple[PyTree, Metrics, Any]:
        agent = self.learner.agent
        with batch_over(self.learner.mesh):
            grads, aux = graded(agent, key, state, minibatch)
        return applied(agent, state, grads), aux.metrics, aux.priorities
