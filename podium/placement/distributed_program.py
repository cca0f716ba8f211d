"""The program of `DistributedActors`: workers that play whole rollouts, and a learner that takes them as they come."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import jax

from podium.agent import Agent
from podium.env import Env
from podium.host import HostEnvs
from podium.placement.acting import Acting, Compiled, CompiledFused, Fused
from podium.placement.actors import Actor, Piece, Restarts, Watched, seed_after, take
from podium.placement.cores import OneCore
from podium.placement.elsewhere import PlayerElsewhere, PlayerFragment
from podium.placement.engine import resolve_engine
from podium.placement.explanation import Explanation
from podium.placement.learner import LearnerProgram, Shapes, fresh
from podium.placement.players import FusedPlayer, HostPlayer, Player
from podium.placement.program import Sizes
from podium.placement.table import numbers
from podium.types import Key, PyTree

if TYPE_CHECKING:
    from podium.placement.distributed_actors import DistributedActors


class DistributedActorsProgram(LearnerProgram):
    """The workers and the learner's program for one agent, one task and one set of sizes; a `Program`."""

    def __init__(
        self,
        placement: DistributedActors,
        agent: Agent,
        env: Env | HostEnvs,
        sizes: Sizes,
        shapes: Shapes,
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

    def _make_threads(self, run_key: Key, seed: int, start: int) -> Sequence[Watched]:
        placement, number = self._placement, self._placement.workers
        together: queue.Queue[Piece] = queue.Queue(number * placement.queue_depth)
        self._cores = OneCore(number)
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
        seed, index = seed_after(seed, failures), worker * self._share
        if self._engine.apart:
            sizes = self._share, self.sizes.rollout_length
            fragment = PlayerFragment(self.agent, self.env, *sizes, seed, index, run_key)
            return PlayerElsewhere(self._engine, f"podium-player-{worker}", fragment, self._placement.worker_timeout)
        functions = self._functions[worker % len(self._functions)]
        if isinstance(functions, CompiledFused):
            return FusedPlayer(functions, seed, index, run_key)
        return HostPlayer(self.env, seed, index, functions, run_key, self._cores)

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

    def _on_worker(self) -> list[jax.Device | None]:
        """Return for each environment the device that its rollouts come from; None is another process."""
        if self._engine.apart:
            return [None] * self._own_envs
        return [self._actor_devices[i // self._share % len(self._actor_devices)] for i in range(self._own_envs)]

    def bytes_per_update(self) -> dict[str, int]:
        """Return what moves in an update, from the shapes that are compiled for; single numbers are left out."""
        return {**self._acting_bytes(), **self._bytes_learning(self._on_worker())}

    def _parameter_bytes(self) -> int:
        """Return the bytes of the parameters that go to devices, or to every worker in a process of its own."""
        return super()._parameter_bytes() * (self._placement.workers if self._engine.apart else 1)

    def _acting_bytes(self) -> dict[str, int]:
        """Return what goes up and comes down for host environments; nothing does for pure ones."""
        if self._acting is None:
            return {}
        params = jax.eval_shape(self.agent.actor, self.abstract_state().agent)
        return self._acting.bytes_moved(params, self.sizes.num_envs)
