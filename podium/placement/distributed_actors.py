"""Distributed actors (Acme, Hoffman et al. 2020, arXiv 2006.00979; Ape-X, Horgan et al. 2018, arXiv 1803.00933).

Workers, each with a copy of the policy and environments of its own, play whole rollouts and send them to one learner.
Nobody waits for the slowest: the learner takes rollouts as they come, and a worker fetches new parameters when it
begins its next rollout, or less often. Pure environments and the policy are one compiled program in each worker.
"""

from __future__ import annotations

import dataclasses
import queue
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import jax

from podium.agent import Agent, nearest_multiples
from podium.env import Env
from podium.host import HostEnvs
from podium.placement import program
from podium.placement.acting import Acting, Compiled, CompiledFused, Fused, FusedPlayer, HostPlayer, Player
from podium.placement.actors import Actor, Piece, Restarts, take
from podium.placement.devices import Devices, resolve_apart, resolve_devices
from podium.placement.elsewhere import PlayerElsewhere, PlayerFragment
from podium.placement.engine import Engine, resolve_engine
from podium.placement.explanation import Explanation
from podium.placement.learner import LearnerProgram, choose_lanes, fresh, fused_shapes, host_shapes
from podium.placement.program import Sizes
from podium.placement.table import Move, Role, device_name, numbers
from podium.types import Key, PyTree


@dataclasses.dataclass(frozen=True)
class DistributedActors:
    """Workers with a policy copy each send rollouts to one learner, which takes them as they come.

    A batch holds as many rollouts as there are workers, whoever they are from: a fast worker may have two in it and a
    slow one none. For an agent with a replay, and in lockstep, it holds one of each worker: what a replay stores of an
    environment must follow on in time.

    Args:
      workers: threads, each with `num_envs / workers` environments and a policy copy.
      worker_devices: where workers act, by turns: a number, a sequence of devices, or None for one. Numbers take the
        first devices for acting and those after them for learning; where there are not enough, both use the same.
      learner_devices: likewise.
      refresh_every: rollouts that a worker plays with the same parameters.
      queue_depth: rollouts of each worker that may wait for the learner.
      max_lag: a rollout whose parameters are more than so many updates old is dropped; None keeps all.
      lockstep: each rollout waits for the parameters of the update before it, as if fused.
      restarts: failures of workers that a run survives: the rollout under way is dropped and counted, and the worker
        begins anew with fresh episodes.
      worker_timeout: seconds without progress (a step of host environments, a rollout of pure ones) after which a
        worker counts as hung and the run ends.
      engine: where workers play: "threads" has their environments and policy copies in this process, on
        `worker_devices`; "ray" has those of each in a Ray actor (`podium.launch`), a process of its own, on its CPU or
        the GPU that it is given. Parameters go there and trajectories come back.
    """

    workers: int = 4
    worker_devices: Devices = None
    learner_devices: Devices = None
    refresh_every: int = 1
    queue_depth: int = 1
    max_lag: int | None = None
    lockstep: bool = False
    restarts: int = 0
    worker_timeout: float = 60.0
    engine: Engine | Literal["threads", "ray"] = "threads"

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
    ) -> DistributedActorsProgram:
        """Check every size and return the program; see `Placement.build`."""
        program.check_sizes(num_envs, rollout_length, seeds, max_updates)
        self._check()
        program.check_one_seed("DistributedActors", seeds)
        program.check_one_process("DistributedActors")
        if num_envs % self.workers:
            use = nearest_multiples(num_envs, self.workers)
            raise ValueError(f"num_envs={num_envs} is not divisible by workers={self.workers}; use {use}.")
        workers, learners = self.devices()
        if num_envs % len(learners):
            use = nearest_multiples(num_envs, len(learners))
            raise ValueError(f"num_envs={num_envs} is not divisible by the {len(learners)} learner devices; use {use}.")
        if isinstance(env, HostEnvs):
            shapes = host_shapes(agent, env.spec, env.resets_in_next_step)
        else:
            env = program.prepare(env)
            shapes = fused_shapes(agent, env)
        lanes = choose_lanes(agent, env.spec, shapes, num_envs, rollout_length, len(learners), num_lanes)
        sizes = Sizes(num_envs, rollout_length, 1, lanes)
        return DistributedActorsProgram(self, agent, env, sizes, shapes, workers, learners)

    def devices(self) -> tuple[list[jax.Device], list[jax.Device]]:
        """Return the devices that act, at most one a worker, and those that learn.

        Workers in other processes fetch their parameters from the first that learns.
        """
        if resolve_engine(self.engine).apart:
            learning = resolve_devices(1 if self.learner_devices is None else self.learner_devices)
            return learning[:1], learning
        acting, learning = resolve_apart(self.worker_devices, self.learner_devices)
        return acting[: self.workers], learning

    def _copies(self, workers: list[jax.Device]) -> int:
        """Return how often the parameters are sent in an update, if every worker fetches those of each."""
        return self.workers if resolve_engine(self.engine).apart else len(workers)

    def explain(self) -> Explanation:
        """Say in a table and a drawing who runs where and what moves; the program knows the numbers."""
        workers, learners = self.devices()
        amounts: dict[str, int | str] = {
            "trajectories": "num_envs * rollout_length * (obs, action, what came of it), where its devices differ",
            "parameters": f"{self._copies(workers)} * the parameters that act",
            "gradient sums": "gradient steps * the parameters" if len(learners) > 1 else 0,
        }
        share = "its share of the environments"
        return self._explain(workers, [share] * self.workers, learners, [share] * len(learners), amounts)

    def _explain(
        self,
        workers: list[jax.Device],
        acted_for: list[str],
        learners: list[jax.Device],
        learnt_from: list[str],
        amounts: Mapping[str, int | str],
    ) -> Explanation:
        apart = resolve_engine(self.engine).apart
        places = ["Ray actor" if apart else device_name(workers[i % len(workers)]) for i in range(self.workers)]
        roles = [
            Role(f"worker {i}", place, share) for i, (place, share) in enumerate(zip(places, acted_for, strict=True))
        ]
        roles += [Role("learning", device_name(x), share) for x, share in zip(learners, learnt_from, strict=True)]
        ways = {
            "observations": "among worker threads and devices",
            "actions": "among worker threads and devices",
            "trajectories": "workers to learning",
            "parameters": "learning to workers",
            "gradient sums": "among learning devices",
        }
        if self.lockstep:
            stale, waits = "never; acting waits for every update.", "a worker for every update before its next rollout"
        else:
            often = "its next rollout" if self.refresh_every == 1 else f"every {self.refresh_every}th rollout"
            stale = f"a worker takes the newest parameters at {often}, and plays on meanwhile"
            stale += "." if self.max_lag is None else f"; rollouts more than {self.max_lag} updates old are dropped."
            waits = f"a worker for learning where {self.queue_depth} of its rollouts wait"
        title = "DistributedActors: workers play with a policy copy each; one learner takes rollouts as they come."
        moves = [Move(name, ways[name], amount) for name, amount in amounts.items()]
        waits = f"learning for {self.workers} rollouts, whoever they are from; {waits}."
        return Explanation(title, roles, moves, stale=stale, waits=waits)

    def _check(self) -> None:
        program.check_positive(workers=self.workers, refresh_every=self.refresh_every, queue_depth=self.queue_depth)
        program.check_max_lag(self.max_lag)
        program.check_not_negative("use 0 for none", restarts=self.restarts)
        program.check_seconds(worker_timeout=self.worker_timeout)
        if self.lockstep and self.refresh_every > 1:
            raise ValueError(
                f"lockstep=True plays every rollout with new parameters, but refresh_every={self.refresh_every}; use 1."
            )


class DistributedActorsProgram(LearnerProgram):
    """The workers and the learner's program for one agent, one task and one set of sizes; a `Program`."""

    def __init__(
        self,
        placement: DistributedActors,
        agent: Agent,
        env: Env | HostEnvs,
        sizes: Sizes,
        shapes: Any,
        worker_devices: list[jax.Device],
        learner_devices: list[jax.Device],
    ):
        share = sizes.num_envs // placement.workers
        timeout = placement.worker_timeout
        super().__init__(agent, env, sizes, shapes, share, learner_devices, worker_devices, timeout)
        self._placement, self._share = placement, share
        self._in_order = placement.lockstep or agent.replay is not None
        self._restarts = Restarts(placement.restarts)
        self._engine = resolve_engine(placement.engine)
        self._acting: Acting | None = None
        if isinstance(env, HostEnvs) and not self._engine.apart:
            self._acting = Acting(agent, env.spec, share, sizes.rollout_length, env.resets_in_next_step)

    def _compile_players(self, params: PyTree) -> None:
        self._functions: list[Compiled | CompiledFused] = []
        if self._engine.apart:
            return  # Each compiles in its own process.
        if self._acting is None:
            fused = Fused(self.agent, self.env, self._share, self.sizes.rollout_length)
            self._functions = [CompiledFused(fused, params, device) for device in self._actor_devices]
        else:
            self._functions = [Compiled(self._acting, params, device) for device in self._actor_devices]

    def _make_threads(self, run_key: Key, seed: int, start: int) -> list[Actor]:
        placement, number = self._placement, self._placement.workers
        together: queue.Queue[Piece] = queue.Queue(number * placement.queue_depth)
        self._workers = [
            Actor(
                worker,
                partial(self._make_player, run_key, seed, worker),
                start,
                self._slots[worker % len(self._slots)],
                queue.Queue(placement.queue_depth) if self._in_order else together,
                self._stop,
                placement.lockstep,
                placement.refresh_every,
                self._restarts,
            )
            for worker in range(number)
        ]
        return self._workers

    def _make_player(self, run_key: Key, seed: int, worker: int, failures: int) -> Player:
        # After a failure its episodes are others than those it began with.
        seed = (seed + failures * 0x9E3779B1) % 2**31
        index = worker * self._share
        if self._engine.apart:
            sizes = self._share, self.sizes.rollout_length
            fragment = PlayerFragment(self.agent, self.env, *sizes, seed, index, run_key)
            return PlayerElsewhere(self._engine, f"podium-player-{worker}", fragment, self._placement.worker_timeout)
        functions = self._functions[worker % len(self._functions)]
        if isinstance(functions, CompiledFused):
            return FusedPlayer(functions, seed, index, run_key)
        return HostPlayer(self.env, seed, index, 1, functions, run_key)

    def _take(self, number: int) -> tuple[list[Piece], int]:
        """Take a piece of every worker, or as many as there are workers of whoever has one."""
        placement, taken = self._placement, []
        for worker in self._workers:
            threads = [worker] if self._in_order else self._workers
            watches = [self._watches[thread] for thread in threads]
            taken.append(fresh(partial(take, worker.pieces, watches), number, placement.max_lag))
        return [piece for piece, _ in taken], sum(dropped for _, dropped in taken)

    def explain(self) -> Explanation:
        """Say in a table and a drawing who runs where, and how many bytes move in an update."""
        learnt = self.sizes.num_envs // len(self.devices)
        share = "its share of every batch"
        return self._placement._explain(
            self._actor_devices,
            [numbers(i * self._share, self._share) for i in range(self._placement.workers)],
            self.devices,
            [numbers(i * learnt, learnt) if self._in_order else share for i in range(len(self.devices))],
            self.bytes_per_update(),
        )

    def bytes_per_update(self) -> dict[str, int]:
        """Return what moves in an update, from the shapes that are compiled for; single numbers are left out."""
        if self._engine.apart:
            moved = self._bytes_learning([None] * self._own_envs)
            return {**moved, "parameters": moved["parameters"] * self._placement.workers}
        on_worker = [self._actor_devices[i // self._share % len(self._actor_devices)] for i in range(self._own_envs)]
        learning = self._bytes_learning([*on_worker])
        if self._acting is None:
            return learning
        params = jax.eval_shape(self.agent.actor, self.abstract_state().agent)
        return {**self._acting.bytes_moved(params, self.sizes.num_envs), **learning}
