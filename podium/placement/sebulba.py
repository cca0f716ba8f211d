"""Sebulba (Hessel et al. 2021, Podracer): actor devices serve environments on the CPU, learner devices learn.

Threads step host environments and act on the actor devices; their rollouts wait in bounded queues; one program over
the mesh of learner devices learns from all of them as one global batch, and publishes its parameters to the actors.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, Self

import jax

from podium import distributed
from podium.agent import Agent
from podium.devices import Devices, resolve_apart, share_devices
from podium.env import Env
from podium.host import HostEnvFactory
from podium.placement.actors.actor import compile_actors
from podium.placement.actors.host import HostActing
from podium.placement.actors.loop import ActorLearnerLoop
from podium.placement.actors.pool import ADDITIONS, ActorPool
from podium.placement.compiled.iteration import resolve_lanes
from podium.placement.compiled.learner import learner_of, learning_bytes
from podium.placement.contract import EPISODES_RESTART, Asked, Placement, Program, Sizes
from podium.placement.remote.envs import Engine, place_envs
from podium.ranges import check_divides, check_fields, largest_divisor
from podium.report import Move, Report, Role, roles_on, shares
from podium.types import Metrics


@dataclasses.dataclass(frozen=True)
class Sebulba(Placement):
    """Act on some devices, learn on others, step environments on the CPU.

    Args:
      actor_devices: a number, a sequence of devices, or None for one. Numbers take the first devices for acting and
        those after them for learning; where there are not enough, both use the same. With several processes, numbers
        count the devices of each: it acts on its own for environments of its own, and the learners of all learn as one.
      learner_devices: a number, a sequence of devices, or None for one; see `actor_devices`.
      actor_threads: actors of each actor device, each a thread with environments of its own.
      envs_per_actor: environments of an actor; None divides `num_envs` among the actors.
      groups: batches that an actor's environments form, each with a thread of its own while a rollout lasts: one steps
        while another is acted for. One begins the next rollout while others end theirs, if that need not wait. None is
        two where they divide the environments, and one for pure environments: their steps are compiled programs too,
        for which there is nothing to be done meanwhile.
      queue_depth: rollouts of an actor that may wait for the learner.
      max_lag: a rollout whose parameters are more than so many updates old is dropped; None keeps all.
      lockstep: each rollout waits for the parameters of the update before it, as if fused.
      actor_timeout: seconds without a step after which an actor counts as hung and the run ends.
      engine: where environments are stepped: "threads" steps them in this process; "ray" steps those of each group in a
        Ray actor, a process of its own (`podium.launch`), and observations and actions travel.
    """

    takes_processes: ClassVar[bool] = True
    may_change: ClassVar[frozenset[str]] = Placement.may_change | {"actor_threads", "envs_per_actor", "groups"}

    actor_devices: Devices = None
    learner_devices: Devices = None
    actor_threads: int = 1
    envs_per_actor: int | None = None
    groups: int | None = None
    queue_depth: int = 1
    max_lag: int | None = None
    lockstep: bool = False
    actor_timeout: float = 60.0
    engine: Engine | Literal["threads", "ray"] = "threads"

    def program(self, agent: Agent, env: Env | HostEnvFactory, asked: Asked) -> Program:
        """Return the program; see `Placement.program`."""
        num_envs, rollout_length = asked.num_envs, asked.rollout_length
        check_fields(
            self,
            counts=("actor_threads", "envs_per_actor", "groups", "queue_depth"),
            naturals=("max_lag",),
            positive=("actor_timeout",),
        )
        on_devices, learners = self.devices()
        actors = len(on_devices) * self.actor_threads
        share = self._envs_per_actor(num_envs, actors * distributed.num_processes(), len(learners))
        envs = place_envs(env, self.engine, self.actor_timeout)
        groups = self._groups(share, envs)
        acting = HostActing(agent, envs, share, rollout_length, groups)
        lanes = resolve_lanes(acting, num_envs, rollout_length, len(learners), asked.num_lanes)
        sizes = Sizes(num_envs, rollout_length, 1, lanes)
        device_of = lambda actor: actor // self.actor_threads
        places = [on_devices[device_of(actor)] for actor in range(actors)]
        pool = ActorPool(
            partial(compile_actors, acting, places, distributed.process_id() * actors * share),
            on_devices,
            self.actor_timeout,
            device_of=device_of,
            queue_depth=self.queue_depth,
            max_lag=self.max_lag,
            lockstep=self.lockstep,
        )
        learner = learner_of(acting, sizes, learners)
        loop = SebulbaLoop(learner, pool)

        def moves() -> dict[str, int]:
            played_on = [device for device in places for _ in range(share)]
            acted = acting.bytes_moved(num_envs)
            return acted | learning_bytes(learner, acting, played_on, len(on_devices))

        report = partial(self._explain, num_envs)
        return Program(
            agent, envs, sizes, learners, loop, "Sebulba", moves, report, ADDITIONS, resume_loses=EPISODES_RESTART
        )

    def devices(self) -> tuple[list[jax.Device], list[jax.Device]]:
        """Return the devices that act, of this process, and those that learn, of all processes."""
        return resolve_apart(self.actor_devices, self.learner_devices)

    @classmethod
    def candidates(cls, num_devices: int, num_envs: int) -> Sequence[Self]:
        """Return as many learners as divide `num_envs`, with one or four actors for each device that is left."""
        actors, learners = share_devices(num_devices, num_envs)
        return [cls(actors, learners), cls(actors, learners, actor_threads=4)]

    def _explain(self, num_envs: int | None, amounts: Mapping[str, int | None]) -> Report:
        (actors, learners), processes = self.devices(), distributed.num_processes()
        own = None if num_envs is None else num_envs // processes
        acted_for = shares(own, len(actors), distributed.process_id() * (own or 0))
        threads = f"{len(actors) * self.actor_threads} thread(s)"
        roles = [Role("environments", "host CPU", f"{threads}, up to {self.groups or 2} groups side by side in each")]
        roles += roles_on(actors, "inference", acted_for)
        roles += roles_on(learners, "learning", shares(num_envs, len(learners)))
        ways = {
            "observations": "environments to inference",
            "actions": "inference to environments",
            "trajectories": "inference to learning",
            "parameters": "learning to inference",
            "gradient sums": "among learning devices",
        }
        if self.lockstep:
            stale, pace = "never; acting waits for every update.", "an actor for every update before its next rollout"
        else:
            stale = f"acting runs on meanwhile: a rollout is up to {self.queue_depth + 1} updates old when learnt from"
            stale += "." if self.max_lag is None else f", and dropped if more than {self.max_lag}."
            pace = f"an actor for learning where {self.queue_depth} of its rollouts wait in its queue"
        if processes > 1:
            pace += f". Threads and devices for inference are those of one of {processes} processes; all have as many"
        title = "Sebulba: threads step environments and act; one program learns from all rollouts as one batch."
        moves = [Move(name, way, amounts.get(name)) for name, way in ways.items()]
        return Report(title, roles, moves, stale=stale, waits=f"learning for a rollout of every actor; {pace}.")

    def _groups(self, share: int, envs: HostEnvFactory) -> int:
        if self.groups is None:
            return 1 if envs.compiled else largest_divisor(share, 2)
        groups = min(self.groups, share)
        if share % groups:
            raise ValueError(f"groups={groups} does not divide the {share} environments of an actor; use 1.")
        return groups

    def _envs_per_actor(self, num_envs: int, actors: int, learners: int) -> int:
        if self.envs_per_actor is not None and self.envs_per_actor * actors != num_envs:
            raise ValueError(
                f"num_envs={num_envs} is not envs_per_actor={self.envs_per_actor} times {actors} actors; use "
                f"num_envs={self.envs_per_actor * actors}, or leave envs_per_actor out."
            )
        unit = math.lcm(actors, learners)
        check_divides(num_envs, actors, f"the {actors} actors", unit)
        check_divides(num_envs, learners, f"the {learners} learner devices", unit)
        return num_envs // actors


class SebulbaLoop(ActorLearnerLoop):
    """Actors play beside the learner; an update takes one rollout of every actor."""

    def update(self, state: Any, number: int) -> tuple[Any, Metrics]:
        """Do update `number`."""
        batch = self.actors.take(number)
        state, metrics, params = self.learner.update(state, batch.rollouts, batch.version)
        batch.give_back()
        self.actors.publish(params, number + 1)
        return state, {**metrics, **batch.stats}
