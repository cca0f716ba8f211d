"""LocalSGD: workers that learn alone and now and then take the mean of what they know (parameter averaging).

McDonald et al. 2010; Stich 2019, "Local SGD Converges Fast and Communicates Little". All in one compiled program: a
worker is a share of the environments with an agent's State of its own, and only the averaging crosses devices.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from podium import distributed, episodes, keys
from podium.agent import Agent
from podium.env import Env
from podium.host import HostEnvs
from podium.learn import learn
from podium.placement import program
from podium.placement.devices import Devices, resolve_devices
from podium.placement.explanation import Explanation
from podium.placement.fused import FusedProgram, trajectory_specs
from podium.placement.program import Sizes
from podium.placement.table import Move, Role, device_name, nbytes, numbers
from podium.rollout import RolloutState, rollout
from podium.types import Array, Key, Metrics, PyTree, Trajectory


@dataclasses.dataclass(frozen=True)
class LocalSGD:
    """Let every worker learn alone, and average what they know every `average_every` iterations.

    Averaged are all numbers with a fraction in the agent's State: parameters, targets, and the optimiser's moments.
    `Agent.observe` is the exception: it sees the whole batch in every iteration, as under every other placement, so
    counters count all workers' steps, and normalisers, where there are any, are never of one worker alone.

    A worker learns with the agent's own settings from its share of the environments: as many minibatches from fewer
    steps, or, with a replay, batches of the same size from a buffer of its own.

    Args:
      workers: divide the environments among them; None for one a device.
      average_every: iterations between averages. With 1, and one step of plain gradient descent an iteration, the
        workers together take the step of the global gradient.
      devices: a number (of each process, where there are several), a sequence of devices, or None for as many as
        divide `workers`.
    """

    workers: int | None = None
    average_every: int = 4
    devices: Devices = None

    def build(
        self,
        agent: Agent,
        env: Env | HostEnvs,
        *,
        num_envs: int,
        rollout_length: int,
        seeds: int = 1,
        num_lanes: int | None = None,
        max_updates: int = 1,
    ) -> LocalSGDProgram:
        """Check every size and return the program; see `Placement.build`. `num_lanes` are those of each worker."""
        program.check_sizes(num_envs, rollout_length, seeds, max_updates)
        program.check_one_seed("LocalSGD", seeds)
        devices, workers = self._resolve()
        program.check_workers(num_envs, workers)
        env = program.prepare(env)
        lanes = program.resolve_lanes(agent, env, num_envs // workers, rollout_length, 1, num_lanes)
        sizes = Sizes(num_envs, rollout_length, 1, lanes)
        return LocalSGDProgram(agent, env, sizes, devices, workers, self.average_every, max_updates)

    def explain(self) -> Explanation:
        """Say in a table and a drawing who runs where and what moves; `LocalSGDProgram.explain` knows the numbers."""
        devices, workers = self._resolve()
        formula = f"State / {self.average_every}" if len(devices) > 1 else 0
        shares = ["its share of the environments"] * workers
        return _explain(devices, shares, formula, self.average_every)

    def _resolve(self) -> tuple[list[jax.Device], int]:
        if self.workers is not None:
            program.check_positive(workers=self.workers)
        program.check_positive(average_every=self.average_every)
        devices = resolve_devices(self.devices)
        workers = len(devices) if self.workers is None else self.workers
        if self.devices is None and distributed.num_processes() == 1:
            devices = devices[: max(n for n in range(1, len(devices) + 1) if workers % n == 0)]
        if workers % len(devices):
            more = -(-workers // len(devices)) * len(devices)
            raise ValueError(
                f"workers={workers} is not divisible by devices={len(devices)}; use workers={more}, or fewer devices."
            )
        return devices, workers


def _explain(devices: list[jax.Device], shares: list[str], average: int | str, every: int) -> Explanation:
    each = len(shares) // len(devices)
    roles = [Role(f"worker {i}", device_name(devices[i // each]), share) for i, share in enumerate(shares)]
    moves = [Move("what workers know", "averaged among devices", average)] if average else []
    title = "LocalSGD: workers step environments, act and learn alone; then they take the mean."
    often = "every iteration" if every == 1 else f"every {every} iterations"
    stale = f"never; each acts with its own newest parameters, which differ from the others' until the mean, {often}."
    waits = f"workers for one another when they take the mean, {often}."
    return Explanation(title, roles, moves, stale=stale, waits=waits)


class LocalSGDState(NamedTuple):
    """A run of W workers, and all that a checkpoint holds.

    Attributes:
      key: of the run; every iteration's keys are folded from it and `update`.
      update: int32, iterations done.
      agent: the mean of the workers' States at the last average or the end of the last chunk.
      workers: their States, [W, ...].
      replay: of each worker, [W, ...], or `()`.
      rollout: where the environments of each worker stand, [W, B / W, ...].
    """

    key: Key
    update: Array
    agent: PyTree
    workers: PyTree
    replay: PyTree
    rollout: RolloutState


class LocalSGDProgram(FusedProgram):
    """The program for one agent, one environment and one set of sizes; a `Program`."""

    def __init__(
        self,
        agent: Agent,
        env: Env,
        sizes: Sizes,
        devices: list[jax.Device],
        workers: int,
        average_every: int,
        max_updates: int,
    ):
        self.workers, self.average_every = workers, average_every
        super().__init__(agent, env, sizes, devices, "worker", max_updates)

    def _start(self, key: Key) -> LocalSGDState:
        share = dataclasses.replace(self.sizes, num_envs=self.sizes.num_envs // self.workers)
        whole = program.start(key, self.agent._replace(replay=None), self.env, self.sizes)
        replay = program.start(key, self.agent, self.env, share).replay
        split = lambda x: x.reshape(self.workers, share.num_envs, *x.shape[1:])  # noqa: E731
        rollouts = jax.tree.map(split, whole.rollout)
        workers = self._each(jax.tree.map(jnp.copy, whole.agent))
        return LocalSGDState(whole.key, whole.update, whole.agent, workers, self._each(replay), rollouts)

    def _each(self, tree: PyTree) -> PyTree:
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (self.workers, *x.shape)), tree)

    def _partition(self) -> LocalSGDState:
        shapes = jax.eval_shape(self._start, jax.random.key(0))
        split = lambda tree: jax.tree.map(lambda x: P("worker"), tree)  # noqa: E731
        once: Any = P()
        agent = jax.tree.map(lambda x: P(), shapes.agent)
        return LocalSGDState(once, once, agent, split(shapes.workers), split(shapes.replay), split(shapes.rollout))

    def _iterate(self, state: LocalSGDState) -> tuple[LocalSGDState, Metrics, Array]:
        rollout_key, learn_key = keys.iteration(state.key, state.update)
        alone = self.agent._replace(observe=lambda agent_state, trajectory: agent_state)

        def work(number: Array, agent_state: PyTree, replay: PyTree, rollout_state: RolloutState) -> Any:
            params, length = self.agent.actor(agent_state), self.sizes.rollout_length
            following, trajectory, ended = rollout(
                rollout_key, self.agent, self.env, params, rollout_state, length, state.update
            )
            key = learn_key if self.workers == 1 else jax.random.fold_in(learn_key, number)
            learned = learn(key, alone, agent_state, replay, trajectory, self.sizes.num_lanes)
            return learned, following, trajectory, episodes.summarize(ended)

        def local(numbers: Array, agents: PyTree, replays: PyTree, rollouts: RolloutState) -> Any:
            learned, following, trajectory, ended = jax.vmap(work)(numbers, agents, replays, rollouts)
            return learned, following, _join(trajectory), ended

        by_worker: Any = P("worker")
        learned, following, trajectory, ended = jax.shard_map(
            local,
            mesh=self._mesh,
            in_specs=by_worker,
            out_specs=(by_worker, by_worker, trajectory_specs("worker"), by_worker),
            check_vma=False,
        )(jnp.arange(self.workers), state.workers, state.replay, state.rollout)

        workers = jax.vmap(self.agent.observe, in_axes=(0, None))(learned.state, trajectory)
        update = state.update + 1
        agent, workers, distance = jax.lax.cond(
            update % self.average_every == 0,
            self._meet,
            lambda workers: (state.agent, workers, jnp.full((), jnp.nan)),
            workers,
        )
        metrics = {
            **jax.tree.map(lambda x: jnp.mean(x, axis=0), learned.metrics),
            **jax.tree.map(lambda x: jnp.sum(x, axis=0), ended),
            "worker_distance": distance,
        }
        finite = program.rollout_finite(self.agent, trajectory)
        return LocalSGDState(state.key, update, agent, workers, learned.replay, following), metrics, finite

    def _meet(self, workers: PyTree) -> tuple[PyTree, PyTree, Array]:
        """Return the mean of the workers' States, it again for each of them, and their distance from it."""
        agent = _mean(workers)
        return agent, self._each(agent), _distance(workers, agent)

    def _settle(self, state: LocalSGDState) -> LocalSGDState:
        return state._replace(agent=_mean(state.workers))

    def adopt(self, state: LocalSGDState, agent: PyTree, update: int) -> LocalSGDState:
        """Return the first state with the agent's State of another run for every worker; see `Program.adopt`."""
        state = super().adopt(state, agent, update)
        workers = jax.jit(self._each, out_shardings=self._shardings.workers)(state.agent)
        return state._replace(workers=workers)

    def explain(self) -> Explanation:
        """Say in a table and a drawing who runs where, and how many bytes move in an update."""
        share = self.sizes.num_envs // self.workers
        shares = [numbers(i * share, share) for i in range(self.workers)]
        return _explain(self.devices, shares, self.bytes_per_update()["what workers know"], self.average_every)

    def bytes_per_update(self) -> dict[str, int]:
        """Return what moves in an update, averages spread over all."""
        leaves = jax.tree.leaves(jax.eval_shape(self._start, jax.random.key(0)).agent)
        moved = nbytes([x for x in leaves if _averaged(x)]) // self.average_every
        return {"what workers know": moved if len(self.devices) > 1 else 0}


def _join(trajectory: Trajectory) -> Trajectory:
    """Return trajectories [W, T, B, ...] as one of all environments, [T, W * B, ...]."""
    rows = lambda x: jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])  # noqa: E731
    by_env = lambda x: x.reshape(-1, *x.shape[2:])  # noqa: E731
    ends = {"carry", "end_carry", "policy_version"}
    fields = {name: jax.tree.map(rows, value) for name, value in trajectory._asdict().items() if name not in ends}
    carries = {name: jax.tree.map(by_env, getattr(trajectory, name)) for name in ("carry", "end_carry")}
    return Trajectory(**fields, **carries, policy_version=trajectory.policy_version[0])


def _averaged(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _mean(workers: PyTree) -> PyTree:
    """Return the mean of States [W, ...]; what is no number with a fraction is the first worker's."""
    return jax.tree.map(lambda x: jnp.mean(x, axis=0) if _averaged(x) else x[0], workers)


def _distance(workers: PyTree, mean: PyTree) -> Array:
    """Return the root mean square of what lies between States [W, ...] and their mean."""
    pairs = [(x, y) for x, y in zip(jax.tree.leaves(workers), jax.tree.leaves(mean), strict=True) if _averaged(x)]
    return jnp.sqrt(sum((jnp.sum(jnp.square(x - y)) for x, y in pairs), jnp.zeros(())) / sum(x.size for x, _ in pairs))
