"""A learner of rollouts that come from elsewhere: one compiled program that learns from all of them as one batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from podium import distributed, keys
from podium.agent import Agent, observed
from podium.compiling import CompiledOnMesh
from podium.devices import make_mesh
from podium.finite import chunk_finite, rollout_finite
from podium.learn import learn
from podium.networks import batch_over
from podium.placement.compiled.iteration import gradient_bytes, start
from podium.placement.contract import Acting, RunState, Sizes
from podium.report import nbytes
from podium.rollout import Rollout, cut, join, map_envs, with_gap
from podium.types import Key, Metrics, PyTree


@dataclasses.dataclass(eq=False)
class Learner(CompiledOnMesh):
    """One program over the mesh of the devices that learn; rollouts go in, metrics and parameters come out.

    Args:
      start, partition, mesh: see `CompiledOnMesh`; environments lie along "env".
      rollout_shapes: of the rollouts of all environments as one.
      learn: `(state, rollout) -> (state, metrics)`, "finite" among the metrics.
      acted_with: `(state) -> ` the parameters that are acted with; None for the agent's.
      params_along: how these lie along the mesh.
      donate: whether an update uses up the state; else somebody may still read it.
    """

    agent: Agent
    sizes: Sizes
    mesh: Mesh
    rollout_shapes: Rollout
    start: Callable[[Key], Any]
    partition: Callable[[Any], Any]
    learn: Callable[[Any, Rollout], tuple[Any, Metrics]]
    acted_with: Callable[[Any], PyTree] | None = None
    params_along: P = P()
    donate: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.own_devices = [device for device in self.devices if device.process_index == jax.process_index()]
        self._params = self.acted_with or (lambda state: self.agent.actor(state.agent))
        self._params_sharding = NamedSharding(self.mesh, self.params_along)
        along = [NamedSharding(self.mesh, spec) for spec in (P("env"), P(None, "env"))]
        self._everywhere = NamedSharding(self.mesh, P())
        self.rollout_shapes = with_gap(self.rollout_shapes)
        shardings = map_envs(lambda axis, x: along[axis], self.rollout_shapes)
        self.rollout_shardings = shardings._replace(policy_version=self._everywhere)

    def _lower(self) -> Any:
        update = jax.jit(
            self._step,
            donate_argnums=(0,) if self.donate else (),
            in_shardings=(self.shardings, self.rollout_shardings),
            out_shardings=(self.shardings, self._everywhere, self._params_sharding),
        )
        return update.lower(self.abstract_state(), self.rollout_shapes)

    def params(self, state: Any) -> PyTree:
        """Return the parameters that are acted with in `state`."""
        return self._local(jax.jit(self._params, out_shardings=self._params_sharding)(state))

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
        share = self.sizes.num_envs // len(self.devices)
        local = [self._on(device, rollouts, i * share, share, version) for i, device in enumerate(self.own_devices)]
        if len(self.devices) == 1:
            return local[0]

        def whole(axis: int, sharding: NamedSharding, *shards: jax.Array) -> jax.Array:
            shape = *shards[0].shape[:axis], self.sizes.num_envs, *shards[0].shape[axis + 1 :]
            return jax.make_array_from_single_device_arrays(shape, sharding, list(shards))

        gaps = jax.device_put([part.gap for part in local], self.own_devices)
        local = [part._replace(gap=gap) for part, gap in zip(local, gaps, strict=True)]
        # The version is the same everywhere, though some device may hold no rollout of the oldest.
        oldest = jax.device_put(np.int32(version), self._everywhere)
        return map_envs(whole, self.rollout_shardings, *local)._replace(policy_version=oldest)

    def _on(self, device: jax.Device, rollouts: Sequence[Rollout], low: int, size: int, version: int) -> Rollout:
        """Return the environments from `low` on, as many as `size`, of rollouts in the order of their environments.

        What the host holds and is small stays there: it goes in with the program that reads it, for a transfer less.
        """
        mine = []
        for rollout in rollouts:
            number = rollout.reward.shape[1]
            a, b = max(low, 0), min(low + size, number)
            if a < b:
                arrays = rollout._replace(gap=None, policy_version=None)
                moved = jax.device_put(arrays if b - a == number else cut(arrays, a, b), device)
                mine.append(moved._replace(gap=np.asarray(rollout.gap)[a:b], policy_version=np.int32(version)))
            low -= number
        return join(mine) if len(mine) > 1 else mine[0]

    def _local(self, params: PyTree) -> PyTree:
        return distributed.local(params) if self._params_sharding.is_fully_replicated else params

    def _step(self, state: Any, rollout: Rollout) -> tuple[Any, Metrics, PyTree]:
        with batch_over(self.mesh):
            state, metrics = self.learn(state, rollout)
        return state, metrics, self._params(state)


def learner_of(acting: Acting, sizes: Sizes, devices: Sequence[jax.Device]) -> Learner:
    """Return the learner of the agent as it is: replay lanes lie along the mesh, and the agent's State everywhere."""
    agent = acting.agent

    def update(state: RunState, rollout: Rollout) -> tuple[RunState, Metrics]:
        trajectory = rollout.trajectory()
        key = keys.iteration(state.key, state.update).learn
        learned = learn(key, agent, state.agent, state.replay, trajectory, sizes.num_lanes)
        following = RunState(state.key, state.update + 1, learned.state, learned.replay, ())
        finite = chunk_finite(following.agent, rollout_finite(agent, trajectory))
        return following, {**learned.metrics, "finite": finite}

    return _learner(acting, sizes, devices, update)


def observer_of(acting: Acting, sizes: Sizes, devices: Sequence[jax.Device]) -> Learner:
    """Return a learner whose updates only observe rollouts, of a run with no replay in its state; donates nothing."""
    agent = acting.agent

    def update(state: RunState, rollout: Rollout) -> tuple[RunState, Metrics]:
        trajectory = rollout.trajectory()
        finite = rollout_finite(agent, trajectory).all()
        return state._replace(agent=observed(agent, state.agent, trajectory)), {"finite": finite}

    return _learner(acting, sizes, devices, update, with_replay=False, donate=False)


def _learner(
    acting: Acting,
    sizes: Sizes,
    devices: Sequence[jax.Device],
    update: Callable[[RunState, Rollout], tuple[RunState, Metrics]],
    with_replay: bool = True,
    donate: bool = True,
) -> Learner:
    def partition(shapes: RunState) -> RunState:
        once: Any = P()
        replay = jax.tree.map(lambda x: P("env") if x.ndim else P(), shapes.replay)
        return RunState(once, once, jax.tree.map(lambda x: P(), shapes.agent), replay, ())

    mesh, shapes = make_mesh(devices, "env"), acting.shapes(sizes.rollout_length, sizes.num_envs)
    begin = lambda key: start(key, acting, sizes, with_replay, with_envs=False)
    return Learner(acting.agent, sizes, mesh, shapes, begin, partition, update, donate=donate)


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
        "parameters": nbytes(acting.params_shapes()) * copies * distributed.num_processes(),
        "gradient sums": gradients,
    }
