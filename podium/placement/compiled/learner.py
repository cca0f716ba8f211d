"""A learner of rollouts that come from elsewhere: one compiled program that learns from all of them as one batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from podium import distributed, keys, xla
from podium.agent import Agent
from podium.devices import make_mesh
from podium.learn import learn
from podium.networks import batch_over
from podium.placement.compiled.iteration import (
    chunk_finite,
    cut,
    empty_replay,
    gradient_bytes,
    join,
    map_envs,
    params_shapes,
    rollout_finite,
    run_once,
)
from podium.placement.contract import Acting, Rollout, RunState, Sizes, nbytes
from podium.types import Key, Metrics, PyTree, Trajectory


class Learner:
    """One program over the mesh of the devices that learn; rollouts go in, metrics and parameters come out.

    Args:
      agent: that learns.
      sizes: of the run.
      devices: of all processes.
      shapes: of the rollouts of all environments as one.
      start: `(key) -> state`, the first one.
      partition: `(shapes of the state) -> a PartitionSpec for every leaf`.
      update: `(state, trajectory) -> (state, metrics)`, "finite" among the metrics.
      params: `(state) -> ` the parameters that are acted with.
      params_along: how these lie along the mesh; None for everywhere.
      donate: whether an update uses up the state; else somebody may still read it.
    """

    def __init__(
        self,
        agent: Agent,
        sizes: Sizes,
        devices: Sequence[jax.Device],
        shapes: Rollout,
        start: Callable[[Key], Any],
        partition: Callable[[Any], Any],
        update: Callable[[Any, Trajectory], tuple[Any, Metrics]],
        params: Callable[[Any], PyTree] | None = None,
        params_along: P | None = None,
        donate: bool = True,
    ):
        self.agent, self.sizes, self.devices = agent, sizes, list(devices)
        self.rollout_shapes, self.compile_seconds = shapes, 0.0
        self.mesh = make_mesh(self.devices, "env")
        self.own_devices = [device for device in self.devices if device.process_index == jax.process_index()]
        self._start, self._update, self._donate = start, update, donate
        self._params = params or (lambda state: agent.actor(state.agent))
        self._params_along = NamedSharding(self.mesh, params_along or P())
        self.state_shapes = jax.eval_shape(start, jax.random.key(0))
        self.shardings = jax.tree.map(
            lambda spec: NamedSharding(self.mesh, spec),
            partition(self.state_shapes),
            is_leaf=lambda x: isinstance(x, P),
        )
        self.rollout_shardings = self._along(shapes)
        self._lowered: Any = None
        self._compiled: Any = None

    def init(self, seed: int) -> Any:
        """Return the first state."""
        return run_once(self._start, self.shardings)(jax.random.key(seed))

    def abstract_state(self) -> Any:
        """Return the state's shapes, dtypes and shardings."""
        place = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        return jax.tree.map(place, self.state_shapes, self.shardings)

    def lower(self) -> None:
        """Trace learning, once, without compiling it."""
        if self._lowered is not None:
            return
        began = time.perf_counter()
        update = jax.jit(
            self._step,
            donate_argnums=(0,) if self._donate else (),
            in_shardings=(self.shardings, self.rollout_shardings),
            out_shardings=(self.shardings, NamedSharding(self.mesh, P()), self._params_along),
        )
        self._lowered = update.lower(self.abstract_state(), self.rollout_shapes)
        self.compile_seconds += time.perf_counter() - began

    def compile(self) -> None:
        """Trace and compile learning, once."""
        if self._compiled is not None:
            return
        self.lower()
        began = time.perf_counter()
        self._compiled = self._lowered.compile(xla.in_one_order(self.devices))
        self.compile_seconds += time.perf_counter() - began

    def compiled_text(self) -> str:
        """Return the optimised program as text, to see what is communicated."""
        self.compile()
        return str(self._compiled.as_text())

    def params(self, state: Any) -> PyTree:
        """Return the parameters that are acted with in `state`."""
        return self._local(jax.jit(self._params, out_shardings=self._params_along)(state))

    def update(self, state: Any, rollouts: Sequence[Rollout], version: int) -> tuple[Any, Metrics, PyTree]:
        """Learn from rollouts, in the order of their environments; consumes `state`.

        Args:
          state: of the run.
          rollouts: of this process, for its share of the environments.
          version: updates behind the oldest parameters that acted, in any process.

        Returns:
          the next state, metrics as NumPy, and the parameters that are acted with now.
        """
        state, metrics, params = self._compiled(state, self.assemble(rollouts, version))
        # Waiting here bounds the work in flight and makes the clock honest. Copied, because what a CPU gives are views
        # that hold the device's buffers, 160 kB an update, as long as a row of metrics lives.
        return state, jax.tree.map(np.array, jax.block_until_ready(metrics)), self._local(params)

    def assemble(self, rollouts: Sequence[Rollout], version: int) -> Rollout:
        """Join rollouts, in the order of their environments, into one batch on the mesh."""
        share, low, parts = self.sizes.num_envs // len(self.devices), 0, []
        for rollout in rollouts:
            parts.append((low, rollout))
            low += rollout.reward.shape[1]
        local = [self._on(device, parts, i * share, share) for i, device in enumerate(self.own_devices)]
        if len(self.devices) == 1:
            return jax.device_put(local[0], self.rollout_shardings)

        def whole(axis: int, sharding: NamedSharding, *shards: jax.Array) -> jax.Array:
            shape = list(shards[0].shape)
            shape[axis] = self.sizes.num_envs
            return jax.make_array_from_single_device_arrays(tuple(shape), sharding, list(shards))

        # The version is the same everywhere, though some device may hold no rollout of the oldest.
        everywhere = jax.device_put(np.int32(version), NamedSharding(self.mesh, P()))
        return map_envs(whole, self.rollout_shardings, *local)._replace(policy_version=everywhere)

    def _on(self, device: jax.Device, parts: Sequence[tuple[int, Rollout]], low: int, size: int) -> Rollout:
        """Return the environments from `low` on, as many as `size`, of rollouts that begin with those given."""
        mine = []
        for first, rollout in parts:
            number = rollout.reward.shape[1]
            a, b = max(low - first, 0), min(low + size - first, number)
            if a < b:
                mine.append(jax.device_put(rollout if b - a == number else cut(rollout, a, b), device))
        return join(mine) if len(mine) > 1 else mine[0]

    def _local(self, params: PyTree) -> PyTree:
        return distributed.local(params) if self._params_along.is_fully_replicated else params

    def _step(self, state: Any, rollout: Rollout) -> tuple[Any, Metrics, PyTree]:
        with batch_over(self.mesh):
            state, metrics = self._update(state, rollout.trajectory())
        return state, metrics, self._params(state)

    def _along(self, shapes: Rollout) -> Rollout:
        """Return how the leaves of a rollout lie: environments along the mesh."""
        specs = P("env"), P(None, "env")
        along = map_envs(lambda axis, x: NamedSharding(self.mesh, specs[axis]), shapes)
        return along._replace(policy_version=NamedSharding(self.mesh, P()))


def learner_of(acting: Acting, sizes: Sizes, devices: Sequence[jax.Device]) -> Learner:
    """Return the learner of the agent as it is: replay lanes lie along the mesh, and the agent's State everywhere."""
    agent = acting.agent

    def partition(shapes: RunState) -> RunState:
        once: Any = P()
        replay = jax.tree.map(lambda x: P("env") if x.ndim else P(), shapes.replay)
        return RunState(once, once, jax.tree.map(lambda x: P(), shapes.agent), replay, ())

    def update(state: RunState, trajectory: Trajectory) -> tuple[RunState, Metrics]:
        key = keys.iteration(state.key, state.update).learn
        learned = learn(key, agent, state.agent, state.replay, trajectory, sizes.num_lanes)
        following = RunState(state.key, state.update + 1, learned.state, learned.replay, ())
        finite = chunk_finite(following.agent, rollout_finite(agent, trajectory))
        return following, {**learned.metrics, "finite": finite}

    shapes = acting.shapes(sizes.rollout_length, sizes.num_envs)
    return Learner(agent, sizes, devices, shapes, lambda key: start_apart(key, acting, sizes), partition, update)


def start_apart(key: Key, acting: Acting, sizes: Sizes, with_replay: bool = True) -> RunState:
    """Return the first state of a run whose environments, and perhaps its replay, are no part of it."""
    roots = keys.roots(key)
    replay = empty_replay(acting, sizes) if with_replay else ()
    return RunState(roots.run, jnp.zeros((), jnp.int32), acting.agent.init(roots.agent, acting.spec), replay, ())


def learning_bytes(
    learner: Learner, acting: Acting, played_on: Sequence[jax.Device | None], copies: int
) -> dict[str, int]:
    """Return what learning moves in an update, from shapes; single numbers are left out.

    Args:
      learner: that learns.
      acting: of the actors.
      played_on: for each environment of this process, the device that its rollout comes from; None is the host, or
        another process.
      copies: of the parameters that go to actors, from each process.
    """
    state, rollout, devices = learner.state_shapes, learner.rollout_shapes, learner.own_devices
    # What holds for one process holds for each.
    moving = sum(device != devices[i * len(devices) // len(played_on)] for i, device in enumerate(played_on))
    gradients = gradient_bytes(acting, learner.sizes, state.agent, state.replay) if len(learner.devices) > 1 else 0
    return {
        "trajectories": (nbytes(rollout) - nbytes(rollout.policy_version)) * moving // len(played_on),
        "parameters": nbytes(params_shapes(acting.agent, acting.spec)) * copies * distributed.num_processes(),
        "gradient sums": gradients,
    }
