"""LocalSGD: workers that learn alone and now and then average what they know, with all others or with neighbours.

McDonald et al. 2010; Stich 2019, "Local SGD Converges Fast and Communicates Little"; among neighbours Lian et al. 2017
and Assran et al. 2019 (`podium.gossip`). All in one compiled program: a worker is a share of the environments with an
agent's State of its own, and only the averaging crosses devices. Over environments on the CPU an actor of each worker
steps its share, and one program lets all learn.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, Self, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from podium import distributed, episodes, gossip, keys
from podium.agent import Agent
from podium.devices import Devices, make_mesh, resolve_sharing
from podium.env import Env
from podium.finite import chunk_finite, rollout_finite
from podium.host import HostEnvFactory
from podium.learn import learn_from, prepare
from podium.placement.actors.actor import compile_actors, make_acting
from podium.placement.actors.loop import ActorLearnerLoop
from podium.placement.actors.pool import ADDITIONS, ActorPool
from podium.placement.compiled.chunk import CompiledLoop
from podium.placement.compiled.iteration import empty_replay, resolve_lanes, start
from podium.placement.compiled.learner import Learner
from podium.placement.contract import EPISODES_RESTART, Acting, Asked, Loop, Placement, Program, Sizes, adopt
from podium.ranges import check_choice, check_divides, check_fields
from podium.report import Move, Report, Role, device_name, nbytes, shares
from podium.rollout import Rollout, RolloutState, dealt, gathered, specs_of
from podium.types import Array, Key, Metrics, PyTree

MIXES = ("mean", *get_args(gossip.Graph))

BY_WORKER = P("env")
"""How what each worker has lies along the mesh."""


@dataclasses.dataclass(frozen=True)
class LocalSGD(Placement):
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
      mix: whom a worker averages with: "mean" with all; "ring" with its two neighbours; "exponential" with one, which
        stands 1, 2, 4, ... places further from average to average. Among neighbours no sum over all is ever taken but
        when a chunk ends: the agent's State is then the workers' mean, and `worker_distance` their distance from it.
      devices: a number (of each process, where there are several), a sequence of devices, or None for as many as
        divide `workers`.
      actor_timeout: seconds without a step after which a worker whose environments are on the CPU counts as hung, and
        the run ends.
    """

    takes_processes: ClassVar[bool] = True
    may_change: ClassVar[frozenset[str]] = Placement.may_change | {"workers"}  # The layout has them.

    workers: int | None = None
    average_every: int = 4
    mix: Literal["mean"] | gossip.Graph = "mean"
    devices: Devices = None
    actor_timeout: float = 60.0

    def program(self, agent: Agent, env: Env | HostEnvFactory, asked: Asked) -> Program:
        """Return the program; see `Placement.program`. `num_lanes` are those of each worker."""
        num_envs, rollout_length = asked.num_envs, asked.rollout_length
        devices, workers = self._resolve()
        check_divides(num_envs, workers, f"workers={workers}")
        acting = make_acting(agent, env, num_envs // workers, rollout_length)
        if acting.on_host and distributed.num_processes() > 1:
            raise ValueError(
                f"{distributed.num_processes()} processes: LocalSGD over environments on the CPU runs in one; use "
                "podium.Sebulba."
            )
        lanes = resolve_lanes(acting, acting.num_envs, rollout_length, requested=asked.num_lanes)
        sizes = Sizes(num_envs, rollout_length, 1, lanes)
        rounds = [] if self.mix == "mean" else gossip.neighbours(self.mix, workers)
        averaging = _Averaging(acting, sizes, workers, self.average_every, rounds, make_mesh(devices, "env"))
        loop = averaging.loop(asked.max_updates, devices, self.actor_timeout)
        layout = f"{'HostLocalSGD' if acting.on_host else 'LocalSGD'} of {workers} workers"
        report, additions = partial(self._explain, num_envs), {**ADDITIONS, "worker_distance": "mean"}
        loses = EPISODES_RESTART if acting.on_host else ""
        moves, adopt = averaging.moves, averaging.adopt
        return Program(
            agent, acting.env, sizes, devices, loop, layout, moves, report, additions, resume_loses=loses, adopt=adopt
        )

    @classmethod
    def candidates(cls, num_devices: int, num_envs: int) -> Sequence[Self]:
        """Return one worker a device; one alone has nobody to average with."""
        if num_devices == 1:
            raise ValueError("devices=1 make one worker, which is podium.Anakin(1); LocalSGD averages two or more.")
        return [cls(num_devices, devices=num_devices)]

    def num_replays(self) -> int:
        """Return the number of workers."""
        return self._resolve()[1]

    def _resolve(self) -> tuple[list[jax.Device], int]:
        check_fields(self, counts=("workers", "average_every"), positive=("actor_timeout",))
        check_choice("mix", self.mix, MIXES)
        devices = resolve_sharing(self.devices, "workers", self.workers)
        workers = self.workers or len(devices)
        if self.mix != "mean" and workers == 1:
            raise ValueError(f'mix="{self.mix}": workers=1 has no neighbour to mix with; use workers=2, or mix="mean".')
        return devices, workers

    def _explain(self, num_envs: int | None, amounts: Mapping[str, int | None]) -> Report:
        devices, workers = self._resolve()
        if num_envs is None and len(devices) > 1:
            amounts = {"what workers know": None}
        places = [device_name(devices[i // (workers // len(devices))]) for i in range(workers)]
        each = zip(places, shares(num_envs, workers), strict=True)
        roles = [Role(f"worker {i}", place, share) for i, (place, share) in enumerate(each)]
        ways = {
            "observations": "environments on the host to workers",
            "actions": "workers to environments on the host",
            "what workers know": "averaged among devices" if self.mix == "mean" else f"between neighbours ({self.mix})",
        }
        moves = [Move(name, ways[name], amount) for name, amount in amounts.items() if amount != 0]
        whose = "the mean" if self.mix == "mean" else "the mean with their neighbours"
        title = f"LocalSGD: workers step environments, act and learn alone; then they take {whose}."
        often = "every iteration" if self.average_every == 1 else f"every {self.average_every} iterations"
        stale = f"never; each acts with its own newest parameters, which differ from the others' until {whose}"
        waits = f"workers for one another when they take {whose}"
        return Report(title, roles, moves, stale=f"{stale}, {often}.", waits=f"{waits}, {often}.")


class LocalSGDState(NamedTuple):
    """A run of W workers, and all that a checkpoint holds.

    Attributes:
      key: as `RunState` has it.
      update: int32, iterations done.
      agent: the mean of the workers' States at the end of the last chunk, or at the last average with all since then.
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


class LocalSGDLoop(ActorLearnerLoop):
    """An actor of each worker plays with that worker's parameters; an update takes one rollout of each.

    Args:
      learner, actors: see `ActorLearnerLoop`.
      settle: see `CompiledLoop`.
    """

    def __init__(self, learner: Learner, actors: ActorPool, settle: Callable[..., tuple[Any, Metrics]]):
        super().__init__(learner, actors)
        self.settle = settle

    def update(self, state: Any, number: int) -> tuple[Any, Metrics]:
        """Do update `number`."""
        batch = self.actors.take(number)
        state, metrics, params = self.learner.update(state, batch.rollouts, batch.version)
        self.actors.publish(params, number + 1)
        return state, {**metrics, **batch.stats}

    def chunk(self, state: Any, num_updates: int) -> tuple[Any, Metrics]:
        """Do `num_updates` updates; see `Loop.chunk`."""
        state, metrics = super().chunk(state, num_updates)
        settle = jax.jit(self.settle, donate_argnums=0, out_shardings=(self.learner.shardings, None))
        state, last = settle(state)
        rows: dict[str, Any] = dict(metrics)
        for name, value in jax.device_get(last).items():
            rows[name] = np.append(rows[name][:-1], value)
        return state, rows


@dataclasses.dataclass(frozen=True, eq=False)
class _Averaging:
    """What W = `workers` workers do in an iteration, over a mesh along which they lie.

    Args:
      acting: of one worker.
      sizes: of all workers together, but for the lanes, which are those of each.
      workers: W.
      average_every: iterations between averages.
      rounds: of gossip (`gossip.neighbours`); none where the average is over all.
      mesh: of the devices.
    """

    acting: Acting
    sizes: Sizes
    workers: int
    average_every: int
    rounds: Sequence[tuple[int, ...]]
    mesh: Mesh

    def loop(self, max_updates: int, devices: list[jax.Device], timeout: float) -> Loop:
        """Return what trains: one compiled program, or actors on the host beside one that learns."""
        if not self.acting.on_host:
            return CompiledLoop(
                self.start, self._partition, self._iterate, self.mesh, self.sizes, max_updates, settle=self.settle
            )
        acting, sizes = self.acting, self.sizes
        shapes = acting.shapes(sizes.rollout_length, sizes.num_envs)
        acted_with = lambda state: jax.vmap(acting.agent.actor)(state.workers)
        learner = Learner(
            acting.agent, sizes, self.mesh, shapes, self.start, self._partition, self._update, acted_with, BY_WORKER
        )
        places = [devices[worker * len(devices) // self.workers] for worker in range(self.workers)]
        own = lambda params, worker: jax.tree.map(lambda x: x[worker], params)
        compile = partial(compile_actors, acting, places, 0)
        return LocalSGDLoop(learner, ActorPool(compile, places, timeout, lockstep=True, pick=own), self.settle)

    def start(self, key: Key) -> LocalSGDState:
        """Return the first state."""
        share = dataclasses.replace(self.sizes, num_envs=self.acting.num_envs)
        one = start(key, self.acting, self.sizes, with_replay=False)
        split = lambda x: x.reshape(self.workers, share.num_envs, *x.shape[1:])
        workers, replay = self._each(jax.tree.map(jnp.copy, one.agent)), self._each(empty_replay(self.acting, share))
        return LocalSGDState(one.key, one.update, one.agent, workers, replay, jax.tree.map(split, one.rollout))

    def _partition(self, shapes: LocalSGDState) -> LocalSGDState:
        split = lambda tree: jax.tree.map(lambda x: BY_WORKER, tree)
        once: Any = P()
        agent = jax.tree.map(lambda x: P(), shapes.agent)
        return LocalSGDState(once, once, agent, split(shapes.workers), split(shapes.replay), split(shapes.rollout))

    def _each(self, tree: PyTree) -> PyTree:
        """Return a tree once for every worker, [W, ...]."""
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (self.workers, *x.shape)), tree)

    def _iterate(self, state: LocalSGDState) -> tuple[LocalSGDState, Metrics, Array]:
        """Let each worker play with its own policy, then learn."""
        acting: Any = self.acting  # Fused.

        def play(agent_state: PyTree, standing: RolloutState) -> Any:
            params, number = acting.agent.actor(agent_state), state.update
            following, rollout, stats = acting.play(state.key, number, params, standing, number)
            return following, rollout, {name: stats[name] for name in episodes.SUMS}

        following, rollouts, ended = self._on_devices(jax.vmap(play))(state.workers, state.rollout)
        state, metrics, finite = self._learn(state._replace(rollout=following), rollouts)
        return state, {**metrics, **jax.tree.map(lambda x: jnp.sum(x, axis=0), ended)}, finite

    def _update(self, state: LocalSGDState, rollout: Rollout) -> tuple[LocalSGDState, Metrics]:
        """Learn from the rollouts of all workers as one, [T, B, ...]."""
        state, metrics, finite = self._learn(state, self._split(rollout))
        return state, {**metrics, "finite": chunk_finite(state.workers, finite)}

    def _learn(self, state: LocalSGDState, rollouts: Rollout) -> tuple[LocalSGDState, Metrics, Array]:
        """Let each worker learn from its own rollout, [W, T, B / W, ...]; average where it is time.

        Returns:
          the next state, metrics, and [B] whether each environment gave finite numbers only.
        """
        agent, learn_key = self.acting.agent, keys.iteration(state.key, state.update).learn

        def work(number: Array, agent_state: PyTree, replay: PyTree, rollout: Rollout) -> Any:
            key = learn_key if self.workers == 1 else jax.random.fold_in(learn_key, number)
            prepared = prepare(key, agent, agent_state, replay, rollout.trajectory(), self.sizes.num_lanes)
            agent_state, prepared, metrics = learn_from(agent, agent_state, prepared)
            return agent_state, prepared.replay, metrics

        def local(numbers: Array, agents: PyTree, replays: PyTree, rollouts: Rollout) -> Any:
            return jax.vmap(work)(numbers, agents, replays, rollouts), gathered(rollouts)

        learn = self._on_devices(local, out_specs=(BY_WORKER, specs_of("env")))
        learned, rollout = learn(jnp.arange(self.workers), state.workers, state.replay, rollouts)
        trajectory, (workers, replay, metrics) = rollout.trajectory(), learned
        workers = jax.vmap(agent.observe, in_axes=(0, None))(workers, trajectory)
        update = state.update + 1
        apart = lambda workers: (state.agent, workers, jnp.full((), jnp.nan))
        average = partial(self._gossip, state) if self.rounds else self._average
        mean, workers, distance = jax.lax.cond(update % self.average_every == 0, average, apart, workers)
        metrics = {**jax.tree.map(lambda x: jnp.mean(x, axis=0), metrics), "worker_distance": distance}
        state = LocalSGDState(state.key, update, mean, workers, replay, state.rollout)
        return state, metrics, rollout_finite(agent, trajectory)

    def _split(self, rollout: Rollout) -> Rollout:
        """Return a rollout of all environments, [T, B, ...], as those of the workers, [W, T, B / W, ...]."""
        local = partial(dealt, number=self.workers // self.mesh.size)
        split: Rollout = self._on_devices(local, in_specs=(specs_of("env"),))(rollout)
        return split

    def _on_devices(self, function: Callable[..., Any], in_specs: Any = BY_WORKER, out_specs: Any = BY_WORKER) -> Any:
        return jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    def _average(self, workers: PyTree) -> tuple[PyTree, PyTree, Array]:
        """Return the mean of the workers' States, it again for each of them, and their distance from it."""
        agent = gossip.mean(workers)
        return agent, self._each(agent), gossip.distance(workers, agent)

    def _gossip(self, state: LocalSGDState, workers: PyTree) -> tuple[PyTree, PyTree, Array]:
        """Return what `_average` does, but each worker's mean with its neighbours, and no mean of all."""
        share = partial(gossip.mix, rounds=self.rounds, num_devices=self.mesh.size, axis="env")
        mixed = self._on_devices(lambda workers, number: share(workers, number=number), in_specs=(BY_WORKER, P()))
        return state.agent, mixed(workers, state.update // self.average_every), jnp.full((), jnp.nan)

    def settle(self, state: LocalSGDState) -> tuple[LocalSGDState, Metrics]:
        """Return a chunk's state, whose `agent` is the mean of what workers know now, and the last row's metrics."""
        state = state._replace(agent=gossip.mean(state.workers))
        return state, {"worker_distance": gossip.distance(state.workers, state.agent)} if self.rounds else {}

    def adopt(self, state: LocalSGDState, agent: PyTree, update: int) -> LocalSGDState:
        """Return a first state with another run's State of the agent for every worker."""
        where = jax.tree.map(lambda x: x.sharding, state.workers)
        state = adopt(state, agent, update)
        return state._replace(workers=jax.jit(self._each, out_shardings=where)(state.agent))

    def moves(self) -> dict[str, int]:
        """Return the bytes that move in an update; those of the averages are spread over all updates."""
        agent, spec = self.acting.agent, self.acting.spec
        state = jax.eval_shape(lambda key: agent.init(key, spec), jax.random.key(0))
        known = nbytes([x for x in jax.tree.leaves(state) if gossip.is_mixed(x)])
        heard = [gossip.received(offset, self.workers, self.mesh.size) for offsets in self.rounds for offset in offsets]
        times = sum(heard) / len(self.rounds) if self.rounds else float(self.mesh.size > 1)
        acted = self.acting.bytes_moved(self.sizes.num_envs)
        return {**acted, "what workers know": int(known * times) // self.average_every}
