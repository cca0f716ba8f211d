"""Sebulba (Hessel et al. 2021, Podracer): actor devices serve environments on the CPU, learner devices learn.

Threads step host environments and act on the actor devices; their trajectories wait in bounded queues; one program over
the mesh of learner devices learns from all of them as one global batch, and publishes its parameters to the actors.
"""

from __future__ import annotations

import dataclasses
import math
import queue
from collections.abc import Mapping
from functools import partial
from typing import Literal

import jax

from podium import distributed
from podium.agent import Agent, nearest_multiples
from podium.env import Env
from podium.host import HostEnvs, on_host
from podium.placement import program
from podium.placement.acting import Acting, Compiled
from podium.placement.actors import Actor, Piece, take
from podium.placement.cores import OneCore
from podium.placement.devices import Devices, resolve_apart
from podium.placement.engine import Engine
from podium.placement.explanation import Explanation
from podium.placement.learner import LearnerProgram, choose_lanes, fresh, host_shapes
from podium.placement.players import HostPlayer
from podium.placement.program import Sizes
from podium.placement.ray_envs import place_envs
from podium.placement.table import Move, Role, device_name, numbers
from podium.types import Key, PyTree


@dataclasses.dataclass(frozen=True)
class Sebulba:
    """Act on some devices, learn on others, step environments on the CPU.

    Args:
      actor_devices: a number, a sequence of devices, or None for one. Numbers take the first devices for acting and
        those after them for learning; where there are not enough, both use the same. With several processes, numbers
        count the devices of each: it acts on its own for environments of its own, and the learners of all learn as one.
      learner_devices: likewise.
      actor_threads: threads of each actor device, each with environments of its own.
      envs_per_thread: environments of a thread; None divides `num_envs` among the threads.
      groups: batches that a thread's environments form, each with a thread of its own while a rollout lasts: one steps
        while another is acted for. One begins the next rollout while others end theirs, if that need not wait.
      queue_depth: rollouts of a thread that may wait for the learner.
      max_lag: a rollout whose parameters are more than so many updates old is dropped; None keeps all.
      lockstep: each rollout waits for the parameters of the update before it, as if fused.
      actor_timeout: seconds without a step after which a thread counts as hung and the run ends.
      engine: where environments are stepped: "threads" steps them in this process; "ray" steps those of each group in a
        Ray actor, a process of its own (`podium.launch`), and observations and actions travel.
    """

    actor_devices: Devices = None
    learner_devices: Devices = None
    actor_threads: int = 1
    envs_per_thread: int | None = None
    groups: int = 2
    queue_depth: int = 1
    max_lag: int | None = None
    lockstep: bool = False
    actor_timeout: float = 60.0
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
    ) -> SebulbaProgram:
        """Check every size and return the program; see `Placement.build`."""
        program.check_sizes(num_envs, rollout_length, seeds, max_updates)
        if seeds != 1:
            raise ValueError(f"seeds={seeds}: Sebulba runs one seed; start several processes for several.")
        self._check()
        envs = place_envs(env if isinstance(env, HostEnvs) else on_host(env), self.engine, self.actor_timeout)
        actors, learners = self.devices()
        threads = distributed.num_processes() * len(actors) * self.actor_threads
        per_thread = self._envs_per_thread(num_envs, threads, len(learners))
        groups = min(self.groups, per_thread)
        if per_thread % groups:
            raise ValueError(f"groups={groups} does not divide the {per_thread} environments of a thread; use 1.")
        shapes = host_shapes(agent, envs.spec, envs.resets_in_next_step)
        lanes = choose_lanes(agent, envs.spec, shapes, num_envs, rollout_length, len(learners), num_lanes)
        sizes = Sizes(num_envs, rollout_length, 1, lanes)
        return SebulbaProgram(self, agent, envs, sizes, actors, learners, per_thread, groups)

    def devices(self) -> tuple[list[jax.Device], list[jax.Device]]:
        """Return the devices that act, of this process, and those that learn, of all processes."""
        return resolve_apart(self.actor_devices, self.learner_devices)

    def explain(self) -> Explanation:
        """Say in a table and a drawing who runs where and what moves; `SebulbaProgram.explain` knows the numbers."""
        actors, learners = self.devices()
        steps, share = "num_envs * rollout_length", "its share of the environments"
        amounts: dict[str, int | str] = {
            "observations": "num_envs * (rollout_length + 1) * what a step returns",
            "actions": f"{steps} * an action",
            "trajectories": f"{steps} * (obs, action, what came of it), where its devices differ",
            "parameters": f"{len(actors)} * the parameters that act",
            "gradient sums": "gradient steps * the parameters" if len(learners) > 1 else 0,
        }
        return self._explain(actors, [share] * len(actors), learners, [share] * len(learners), amounts)

    def _explain(
        self,
        actors: list[jax.Device],
        acted_for: list[str],
        learners: list[jax.Device],
        learnt_from: list[str],
        amounts: Mapping[str, int | str],
    ) -> Explanation:
        threads = f"{len(actors) * self.actor_threads} thread(s)"
        roles = [Role("environments", "host CPU", f"{threads}, up to {self.groups} groups side by side in each")]
        roles += [Role("inference", device_name(x), share) for x, share in zip(actors, acted_for, strict=True)]
        roles += [Role("learning", device_name(x), share) for x, share in zip(learners, learnt_from, strict=True)]
        ways = {
            "observations": "environments to inference",
            "actions": "inference to environments",
            "trajectories": "inference to learning",
            "parameters": "learning to inference",
            "gradient sums": "among learning devices",
        }
        if self.lockstep:
            stale, pace = "never; acting waits for every update.", "a thread for every update before its next rollout"
        else:
            stale = f"acting goes on meanwhile: a rollout is up to {self.queue_depth + 1} updates old when learnt from"
            stale += "." if self.max_lag is None else f", and dropped if more than {self.max_lag}."
            pace = f"a thread for learning where {self.queue_depth} of its rollouts wait in its queue"
        if (processes := distributed.num_processes()) > 1:
            pace += f". Threads and devices for inference are those of one of {processes} processes; all have as many"
        title = "Sebulba: threads step environments and act; one program learns from all rollouts as one batch."
        moves = [Move(name, way, amounts[name]) for name, way in ways.items()]
        return Explanation(title, roles, moves, stale=stale, waits=f"learning for a rollout of every thread; {pace}.")

    def _check(self) -> None:
        program.check_positive(actor_threads=self.actor_threads, groups=self.groups, queue_depth=self.queue_depth)
        program.check_max_lag(self.max_lag)
        program.check_seconds(actor_timeout=self.actor_timeout)

    def _envs_per_thread(self, num_envs: int, threads: int, learners: int) -> int:
        if self.envs_per_thread is not None and self.envs_per_thread * threads != num_envs:
            raise ValueError(
                f"num_envs={num_envs} is not envs_per_thread={self.envs_per_thread} times {threads} threads; use "
                f"num_envs={self.envs_per_thread * threads}, or leave envs_per_thread out."
            )
        parts = {"actor threads": threads, "learner devices": learners}
        for name, number in parts.items():
            if num_envs % number:
                use = nearest_multiples(num_envs, math.lcm(threads, learners))
                raise ValueError(f"num_envs={num_envs} is not divisible by the {number} {name}; use {use}.")
        return num_envs // threads


class SebulbaProgram(LearnerProgram):
    """The threads and the learner's program for one agent, one task and one set of sizes; a `Program`."""

    def __init__(
        self,
        placement: Sebulba,
        agent: Agent,
        envs: HostEnvs,
        sizes: Sizes,
        actor_devices: list[jax.Device],
        learner_devices: list[jax.Device],
        per_thread: int,
        groups: int,
    ):
        shapes = host_shapes(agent, envs.spec, envs.resets_in_next_step)
        timeout = placement.actor_timeout
        super().__init__(agent, envs, sizes, shapes, per_thread, learner_devices, actor_devices, timeout)
        self._placement = placement
        rollouts = per_thread, sizes.rollout_length
        self._acting = Acting(agent, envs.spec, *rollouts, envs.resets_in_next_step, groups)

    def _compile_players(self, params: PyTree) -> None:
        self._acting_on = [Compiled(self._acting, params, device) for device in self._actor_devices]

    def _make_threads(self, run_key: Key, seed: int, start: int) -> list[Actor]:
        placement = self._placement
        self._actors: list[Actor] = []
        cores = OneCore(len(self._acting_on) * placement.actor_threads * self._acting.groups)
        for compiled, slot in zip(self._acting_on, self._slots, strict=True):
            for _ in range(placement.actor_threads):
                number = len(self._actors)
                index = distributed.process_id() * self._own_envs + number * compiled.acting.num_envs
                player = partial(HostPlayer, self.env, seed, index, compiled, run_key, cores)
                pieces: queue.Queue[Piece] = queue.Queue(placement.queue_depth)
                make_player = lambda failures, player=player: player()  # noqa: E731
                self._actors.append(Actor(number, make_player, start, slot, pieces, self._stop, placement.lockstep))
        return self._actors

    def _take(self, number: int) -> tuple[list[Piece], int]:
        """Take a piece of every actor."""
        placement = self._placement
        taken = [
            fresh(partial(take, actor.pieces, [self._watches[actor]]), number, placement.max_lag)
            for actor in self._actors
        ]
        return [piece for piece, _ in taken], sum(dropped for _, dropped in taken)

    def explain(self) -> Explanation:
        """Say in a table and a drawing who runs where, and how many bytes move in an update."""
        actors, learners = self._actor_devices, self.devices
        acted_for, learnt_from = self._own_envs // len(actors), self.sizes.num_envs // len(learners)
        shares = lambda number, size, first=0: [numbers(first + i * size, size) for i in range(number)]  # noqa: E731
        return self._placement._explain(
            actors,
            shares(len(actors), acted_for, distributed.process_id() * self._own_envs),
            learners,
            shares(len(learners), learnt_from),
            self.bytes_per_update(),
        )

    def bytes_per_update(self) -> dict[str, int]:
        """Return what moves in an update, from the shapes that are compiled for; single numbers are left out."""
        params = jax.eval_shape(self.agent.actor, self.abstract_state().agent)
        acted_for = self._own_envs // len(self._actor_devices)
        return {
            **self._acting.bytes_moved(params, self.sizes.num_envs),
            **self._bytes_learning([self._actor_devices[i // acted_for] for i in range(self._own_envs)]),
        }
