"""Workers that learn alone and take the mean of what they know: the arithmetic of `LocalSGD`, wherever they play."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from podium import keys
from podium.agent import Agent
from podium.learn import learn
from podium.placement import program
from podium.placement.fused import trajectory_specs
from podium.placement.learner import by_axis
from podium.placement.program import RunState, Sizes
from podium.placement.table import nbytes, numbers
from podium.rollout import RolloutState
from podium.types import Array, Key, Metrics, PyTree, Trajectory


class LocalSGDState(NamedTuple):
    """A run of W workers, and all that a checkpoint holds.

    Attributes:
      key: of the run; every iteration's keys are folded from it and `update`.
      update: int32, iterations done.
      agent: the mean of the workers' States at the last average or the end of the last chunk.
      workers: their States, [W, ...].
      replay: of each worker, [W, ...], or `()`.
      rollout: where the environments of each worker stand, [W, B / W, ...], or `()` where they are on the CPU.
    """

    key: Key
    update: Array
    agent: PyTree
    workers: PyTree
    replay: PyTree
    rollout: RolloutState | Any


@dataclasses.dataclass(frozen=True)
class Averaging:
    """What W = `workers` workers learn in an iteration, over a mesh with one axis along which they lie.

    Args:
      agent: that they train.
      sizes: of all together, but for the lanes, which are those of each.
      workers: W.
      average_every: iterations between averages.
      mesh: of the devices.
    """

    agent: Agent
    sizes: Sizes
    workers: int
    average_every: int
    mesh: Mesh

    @property
    def share(self) -> Sizes:
        """Return the sizes of one worker."""
        return dataclasses.replace(self.sizes, num_envs=self.sizes.num_envs // self.workers)

    @property
    def by_worker(self) -> Any:
        """Return how what each worker has lies along the mesh."""
        return P(*self.mesh.axis_names)

    def start(self, whole: RunState, replay: PyTree, rollouts: Any) -> LocalSGDState:
        """Return the first state.

        Args:
          whole: of a run without replay.
          replay: of one worker, empty.
          rollouts: of each worker, or `()`.
        """
        workers = self.each(jax.tree.map(jnp.copy, whole.agent))
        return LocalSGDState(whole.key, whole.update, whole.agent, workers, self.each(replay), rollouts)

    def partition(self, shapes: LocalSGDState) -> LocalSGDState:
        """Return how a state of such shapes lies along the mesh."""
        split = lambda tree: jax.tree.map(lambda x: self.by_worker, tree)  # noqa: E731
        once: Any = P()
        agent = jax.tree.map(lambda x: P(), shapes.agent)
        return LocalSGDState(once, once, agent, split(shapes.workers), split(shapes.replay), split(shapes.rollout))

    def each(self, tree: PyTree) -> PyTree:
        """Return a tree once for every worker, [W, ...]."""
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (self.workers, *x.shape)), tree)

    def learn(self, state: LocalSGDState, trajectories: Trajectory) -> tuple[LocalSGDState, Metrics, Array]:
        """Let each worker learn from its own trajectory, [W, T, B / W, ...]; average where it is time.

        Returns:
          the next state, metrics, and [B] whether each environment gave finite numbers only.
        """
        learn_key = keys.iteration(state.key, state.update).learn
        alone = self.agent._replace(observe=lambda agent_state, trajectory: agent_state)

        def work(number: Array, agent_state: PyTree, replay: PyTree, trajectory: Trajectory) -> Any:
            key = learn_key if self.workers == 1 else jax.random.fold_in(learn_key, number)
            return learn(key, alone, agent_state, replay, trajectory, self.sizes.num_lanes)

        def local(numbers: Array, agents: PyTree, replays: PyTree, trajectories: Trajectory) -> Any:
            return jax.vmap(work)(numbers, agents, replays, trajectories), _join(trajectories)

        learned, trajectory = jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=self.by_worker,
            out_specs=(self.by_worker, trajectory_specs(self.mesh.axis_names[0])),
            check_vma=False,
        )(jnp.arange(self.workers), state.workers, state.replay, trajectories)

        workers = jax.vmap(self.agent.observe, in_axes=(0, None))(learned.state, trajectory)
        update = state.update + 1
        agent, workers, distance = jax.lax.cond(
            update % self.average_every == 0,
            self._meet,
            lambda workers: (state.agent, workers, jnp.full((), jnp.nan)),
            workers,
        )
        metrics = {**jax.tree.map(lambda x: jnp.mean(x, axis=0), learned.metrics), "worker_distance": distance}
        finite = program.rollout_finite(self.agent, trajectory)
        return LocalSGDState(state.key, update, agent, workers, learned.replay, state.rollout), metrics, finite

    def split(self, trajectory: Trajectory) -> Trajectory:
        """Return a trajectory of all environments, [T, B, ...], as those of the workers, [W, T, B / W, ...]."""
        number = self.workers // self.mesh.size

        def dealt(axis: int, x: Array) -> Array:
            return jnp.moveaxis(x.reshape(*x.shape[:axis], number, -1, *x.shape[axis + 1 :]), axis, 0)

        def local(trajectory: Trajectory) -> Trajectory:
            version = jnp.broadcast_to(trajectory.policy_version, number)
            return by_axis(dealt, trajectory)._replace(policy_version=version)

        specs = trajectory_specs(self.mesh.axis_names[0])
        return jax.shard_map(local, mesh=self.mesh, in_specs=(specs,), out_specs=self.by_worker, check_vma=False)(
            trajectory
        )

    def _meet(self, workers: PyTree) -> tuple[PyTree, PyTree, Array]:
        """Return the mean of the workers' States, it again for each of them, and their distance from it."""
        agent = _mean(workers)
        return agent, self.each(agent), _distance(workers, agent)

    def settle(self, state: LocalSGDState) -> LocalSGDState:
        """Return the state as a chunk hands it over: its `agent` is the mean of what the workers know now."""
        return state._replace(agent=_mean(state.workers))

    def spread(self, state: LocalSGDState, where: LocalSGDState) -> LocalSGDState:
        """Return the state with its `agent` for every worker; `where` all lies."""
        return state._replace(workers=jax.jit(self.each, out_shardings=where.workers)(state.agent))

    def shares(self) -> list[str]:
        """Name the environments of each worker."""
        size = self.share.num_envs
        return [numbers(i * size, size) for i in range(self.workers)]

    def bytes_per_update(self, agent_state: PyTree) -> int:
        """Return what moves among devices for the averages, spread over all updates; `agent_state` are shapes."""
        moved = nbytes([x for x in jax.tree.leaves(agent_state) if _averaged(x)]) // self.average_every
        return moved if self.mesh.size > 1 else 0


def _join(trajectories: Trajectory) -> Trajectory:
    """Return trajectories [W, T, B, ...] as one of all environments, [T, W * B, ...]."""

    def flat(axis: int, x: Array) -> Array:
        moved = jnp.moveaxis(x, 0, axis)
        return moved.reshape(*moved.shape[:axis], -1, *moved.shape[axis + 2 :])

    return by_axis(flat, trajectories)._replace(policy_version=trajectories.policy_version[0])


def _averaged(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _mean(workers: PyTree) -> PyTree:
    """Return the mean of States [W, ...]; what is no number with a fraction is the first worker's."""
    return jax.tree.map(lambda x: jnp.mean(x, axis=0) if _averaged(x) else x[0], workers)


def _distance(workers: PyTree, mean: PyTree) -> Array:
    """Return the root mean square of what lies between States [W, ...] and their mean."""
    pairs = [(x, y) for x, y in zip(jax.tree.leaves(workers), jax.tree.leaves(mean), strict=True) if _averaged(x)]
    return jnp.sqrt(sum((jnp.sum(jnp.square(x - y)) for x, y in pairs), jnp.zeros(())) / sum(x.size for x, _ in pairs))
