"""LocalSGD: workers that learn alone and now and then take the mean of what they know (parameter averaging).

McDonald et al. 2010; Stich 2019, "Local SGD Converges Fast and Communicates Little". All in one compiled program: a
worker is a share of the environments with an agent's State of its own, and only the averaging crosses devices. Over
environments on the CPU a thread of each worker steps its share, and one program lets all learn.
"""

from __future__ import annotations

import dataclasses
import queue
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from podium import distributed, episodes, keys
from podium.agent import Agent
from podium.env import Env
from podium.host import HostEnvs
from podium.placement import program
from podium.placement.acting import Acting, Compiled, complete
from podium.placement.actors import Actor, Piece, Watched, take
from podium.placement.averaging import Averaging, LocalSGDState
from podium.placement.cores import OneCore
from podium.placement.devices import Devices, make_mesh, resolve_devices
from podium.placement.explanation import Explanation
from podium.placement.fused import FusedProgram
from podium.placement.learner import LearnerProgram, choose_lanes, host_shapes, start
from podium.placement.players import HostPlayer
from podium.placement.program import Sizes
from podium.placement.table import Move, Role, device_name
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
      worker_timeout: seconds without a step after which a worker whose environments are on the CPU counts as hung, and
        the run ends.
    """

    workers: int | None = None
    average_every: int = 4
    devices: Devices = None
    worker_timeout: float = 60.0

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
    ) -> LocalSGDProgram | HostLocalSGDProgram:
        """Check every size and return the program; see `Placement.build`. `num_lanes` are those of each worker."""
        program.check_sizes(num_envs, rollout_length, seeds, max_updates)
        program.check_one_seed("LocalSGD", seeds)
        devices, workers = self._resolve()
        program.check_workers(num_envs, workers)
        if isinstance(env, HostEnvs):
            program.check_one_process("LocalSGD over environments on the CPU")
            shapes = host_shapes(agent, env.spec, env.resets_in_next_step)
            share = num_envs // workers
            lanes = choose_lanes(agent, env.spec, shapes, share, rollout_length, 1, num_lanes)
            sizes = Sizes(num_envs, rollout_length, 1, lanes)
            return HostLocalSGDProgram(agent, env, sizes, devices, workers, self.average_every, self.worker_timeout)
        env = program.prepare(env)
        lanes = program.resolve_lanes(agent, env, num_envs // workers, rollout_length, 1, num_lanes)
        sizes = Sizes(num_envs, rollout_length, 1, lanes)
        return LocalSGDProgram(agent, env, sizes, devices, workers, self.average_every, max_updates)

    def explain(self) -> Explanation:
        """Say in a table and a drawing who runs where and what moves; `LocalSGDProgram.explain` knows the numbers."""
        devices, workers = self._resolve()
        formula = f"State / {self.average_every}" if len(devices) > 1 else 0
        shares = ["its share of the environments"] * workers
        return _explain(devices, shares, {"what workers know": formula}, self.average_every)

    def _resolve(self) -> tuple[list[jax.Device], int]:
        if self.workers is not None:
            program.check_positive(workers=self.workers)
        program.check_positive(average_every=self.average_every)
        program.check_seconds(worker_timeout=self.worker_timeout)
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


def _explain(devices: list[jax.Device], shares: list[str], amounts: Mapping[str, int | str], every: int) -> Explanation:
    each = len(shares) // len(devices)
    roles = [Role(f"worker {i}", device_name(devices[i // each]), share) for i, share in enumerate(shares)]
    ways = {
        "observations": "environments on the host to workers",
        "actions": "workers to environments on the host",
        "what workers know": "averaged among devices",
    }
    moves = [Move(name, ways[name], amount) for name, amount in amounts.items() if amount]
    title = "LocalSGD: workers step environments, act and learn alone; then they take the mean."
    often = "every iteration" if every == 1 else f"every {every} iterations"
    stale = f"never; each acts with its own newest parameters, which differ from the others' until the mean, {often}."
    waits = f"workers for one another when they take the mean, {often}."
    return Explanation(title, roles, moves, stale=stale, waits=waits)


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
        self.workers = workers
        mesh = make_mesh(devices, "worker")
        self._averaging = Averaging(agent, sizes, workers, average_every, mesh)
        super().__init__(agent, env, sizes, devices, "worker", max_updates)

    def _start(self, key: Key) -> LocalSGDState:
        share = self._averaging.share
        whole = program.start(key, self.agent._replace(replay=None), self.env, self.sizes)
        replay = program.start(key, self.agent, self.env, share).replay
        split = lambda x: x.reshape(self.workers, share.num_envs, *x.shape[1:])  # noqa: E731
        return self._averaging.start(whole, replay, jax.tree.map(split, whole.rollout))

    def _partition(self) -> LocalSGDState:
        return self._averaging.partition(jax.eval_shape(self._start, jax.random.key(0)))

    def _iterate(self, state: LocalSGDState) -> tuple[LocalSGDState, Metrics, Array]:
        rollout_key = keys.iteration(state.key, state.update).rollout

        def play(agent_state: PyTree, rollout_state: RolloutState) -> Any:
            params, length = self.agent.actor(agent_state), self.sizes.rollout_length
            following, trajectory, ended = rollout(
                rollout_key, self.agent, self.env, params, rollout_state, length, state.update
            )
            return following, trajectory, episodes.summarize(ended)

        by_worker = self._averaging.by_worker
        following, trajectories, ended = jax.shard_map(
            jax.vmap(play), mesh=self._mesh, in_specs=by_worker, out_specs=by_worker, check_vma=False
        )(state.workers, state.rollout)
        state, metrics, finite = self._averaging.learn(state._replace(rollout=following), trajectories)
        return state, {**metrics, **jax.tree.map(lambda x: jnp.sum(x, axis=0), ended)}, finite

    def _settle(self, state: LocalSGDState) -> LocalSGDState:
        return self._averaging.settle(state)

    def adopt(self, state: LocalSGDState, agent: PyTree, update: int) -> LocalSGDState:
        """Return the first state with the agent's State of another run for every worker; see `Program.adopt`."""
        return self._averaging.spread(super().adopt(state, agent, update), self._shardings)

    def explain(self) -> Explanation:
        """Say in a table and a drawing who runs where, and how many bytes move in an update."""
        return _explain(self.devices, self._averaging.shares(), self.bytes_per_update(), self._averaging.average_every)

    def bytes_per_update(self) -> dict[str, int]:
        """Return what moves in an update, averages spread over all."""
        agent_state = jax.eval_shape(self._start, jax.random.key(0)).agent
        return {"what workers know": self._averaging.bytes_per_update(agent_state)}


class HostLocalSGDProgram(LearnerProgram):
    """Workers whose environments are on the CPU, each stepped by a thread, and one program that learns; a `Program`."""

    def __init__(
        self,
        agent: Agent,
        envs: HostEnvs,
        sizes: Sizes,
        devices: list[jax.Device],
        workers: int,
        average_every: int,
        timeout: float,
    ):
        self.workers = workers
        mesh = make_mesh(devices, "env")
        self._averaging = Averaging(agent, sizes, workers, average_every, mesh)
        share, shapes = self._averaging.share.num_envs, host_shapes(agent, envs.spec, envs.resets_in_next_step)
        self._acting = Acting(agent, envs.spec, share, sizes.rollout_length, envs.resets_in_next_step)
        each = workers // len(devices)
        super().__init__(
            agent, envs, sizes, shapes, share, devices, [devices[i // each] for i in range(workers)], timeout
        )

    def _start(self, key: Key) -> LocalSGDState:
        first = partial(start, key, spec=self.env.spec, shapes=self._shapes)
        whole = first(agent=self.agent._replace(replay=None), sizes=self.sizes)
        return self._averaging.start(whole, first(agent=self.agent, sizes=self._averaging.share).replay, ())

    def _partition(self) -> LocalSGDState:
        return self._averaging.partition(self._start_shapes)

    def _update(self, state: LocalSGDState, trajectory: Trajectory) -> tuple[LocalSGDState, Metrics, PyTree]:
        state, metrics, finite = self._averaging.learn(state, self._averaging.split(complete(trajectory)))
        return state, {**metrics, "finite": program.chunk_finite(state.workers, finite)}, self._to_publish(state)

    def _to_publish(self, state: LocalSGDState) -> PyTree:
        return jax.vmap(self.agent.actor)(state.workers)

    @property
    def _published_where(self) -> NamedSharding:
        return NamedSharding(self._mesh, self._averaging.by_worker)

    def _publish(self, params: PyTree, version: int) -> None:
        """Give each worker its own."""
        for worker, (slot, device) in enumerate(zip(self._slots, self._actor_devices, strict=True)):
            mine = jax.tree.map(lambda x, worker=worker: x[worker], params)
            slot.put(jax.block_until_ready(jax.device_put(mine, device, may_alias=False)), version)

    def chunk(self, state: LocalSGDState, num_updates: int) -> tuple[LocalSGDState, Metrics]:
        """Do `num_updates` updates, each from a rollout of every worker's newest policy; see `LearnerProgram.chunk`."""
        state, metrics = super().chunk(state, num_updates)
        return self._settle(state), metrics

    def _compile_players(self, params: PyTree) -> None:
        compiled = {device: Compiled(self._acting, params, device) for device in self.devices}
        self._acting_on = [compiled[device] for device in self._actor_devices]
        self._settle = jax.jit(self._averaging.settle, donate_argnums=0, out_shardings=self._shardings)

    def _make_threads(self, run_key: Key, seed: int, start: int) -> Sequence[Watched]:
        share = self._averaging.share.num_envs
        self._actors, cores = [], OneCore(self.workers)
        for worker, (compiled, slot) in enumerate(zip(self._acting_on, self._slots, strict=True)):
            player = partial(HostPlayer, self.env, seed, worker * share, compiled, run_key, cores)
            pieces: queue.Queue[Piece] = queue.Queue(1)
            make_player = lambda failures, player=player: player()  # noqa: E731
            self._actors.append(Actor(worker, make_player, start, slot, pieces, self._stop, lockstep=True))
        return self._actors

    def _take(self, number: int) -> tuple[list[Piece], int]:
        return [take(actor.pieces, [self._watches[actor]]) for actor in self._actors], 0

    def adopt(self, state: LocalSGDState, agent: PyTree, update: int) -> LocalSGDState:
        """Return the first state with the agent's State of another run for every worker; see `Program.adopt`."""
        return self._averaging.spread(super().adopt(state, agent, update), self._shardings)

    def explain(self) -> Explanation:
        """Say in a table and a drawing who runs where, and how many bytes move in an update."""
        return _explain(self.devices, self._averaging.shares(), self.bytes_per_update(), self._averaging.average_every)

    def bytes_per_update(self) -> dict[str, int]:
        """Return what moves in an update, averages spread over all."""
        agent_state = self._start_shapes.agent
        return {
            **self._acting.bytes_moved(jax.eval_shape(self.agent.actor, agent_state), self.sizes.num_envs),
            "what workers know": self._averaging.bytes_per_update(agent_state),
        }
