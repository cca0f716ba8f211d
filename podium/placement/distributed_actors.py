"""Distributed actors (Acme, Hoffman et al. 2020, arXiv 2006.00979; Ape-X, Horgan et al. 2018, arXiv 1803.00933).

Workers, each with a copy of the policy and environments of its own, play whole rollouts and send them to one learner.
Nobody waits for the slowest: the learner takes rollouts as they come, and a worker fetches new parameters when it
begins its next rollout, or less often. Pure environments and the policy are one compiled program in each worker.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

import jax

from podium.agent import Agent, nearest_multiples
from podium.env import Env
from podium.host import HostEnvs
from podium.placement import program
from podium.placement.devices import Devices, resolve_apart, resolve_devices
from podium.placement.distributed_program import DistributedActorsProgram
from podium.placement.engine import Engine, resolve_engine
from podium.placement.explanation import Explanation
from podium.placement.learner import choose_lanes, fused_shapes, host_shapes
from podium.placement.program import Sizes
from podium.placement.replay_apart import ReplayApartProgram
from podium.placement.table import Move, Role, device_name


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
      replay_apart: whether the replay of an agent that has one is a part of its own: rollouts go into it as they come,
        learning samples from it, and the faster of the two waits. Else every update inserts a batch of rollouts and
        then samples. What it holds is not saved: a run that goes on fills it again.
      replay_device: that holds it then; None is the first that learns.
      replay_engine: where it is then: "threads" is in this process, on `replay_device`; "ray" is in a Ray actor, a
        process of its own, on its CPU or the GPU that it is given. Learning plans what goes into it, and minibatches
        come back; if the process is lost, the run ends, and one that goes on fills another.
      replay_tolerance: updates that inserting and sampling may then be ahead of each other, above 0.
      restarts: failures of workers that a run survives: the rollout under way is dropped and counted, and the worker
        begins anew with fresh episodes.
      worker_timeout: seconds without progress (a step of host environments, a rollout of pure ones) after which a
        worker counts as hung and the run ends; and for which inserting and sampling wait for each other.
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
    replay_apart: bool = False
    replay_device: jax.Device | None = None
    replay_engine: Engine | Literal["threads", "ray"] = "threads"
    replay_tolerance: float = 1.0
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
        if self.replay_apart and agent.replay is None:
            raise ValueError(f"replay_apart=True, but {agent.name} learns from no replay; leave it out.")
        program.check_one_seed("DistributedActors", seeds)
        program.check_one_process("DistributedActors")
        program.check_workers(num_envs, self.workers)
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
        make = ReplayApartProgram if self.replay_apart else DistributedActorsProgram
        return make(self, agent, env, sizes, shapes, workers, learners)

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
            **self._replay_amounts(),
            "parameters": f"{self._copies(workers)} * the parameters that act",
            "gradient sums": "gradient steps * the parameters" if len(learners) > 1 else 0,
        }
        share = "its share of the environments"
        return self._explain(workers, [share] * self.workers, learners, [share] * len(learners), amounts)

    def _replay_amounts(self) -> dict[str, int | str]:
        if not self.replay_apart:
            return {}
        if not resolve_engine(self.replay_engine).apart:
            return {"minibatches": "gradient steps * a minibatch, where its device differs"}
        return {"insertions": "what the agent plans of a batch", "minibatches": "gradient steps * a minibatch"}

    def _explain(
        self,
        workers: list[jax.Device],
        acted_for: list[str],
        learners: list[jax.Device],
        learnt_from: list[str],
        amounts: Mapping[str, int | str],
    ) -> Explanation:
        replay_elsewhere = resolve_engine(self.replay_engine).apart
        apart = resolve_engine(self.engine).apart
        places = ["Ray actor" if apart else device_name(workers[i % len(workers)]) for i in range(self.workers)]
        roles = [
            Role(f"worker {i}", place, share) for i, (place, share) in enumerate(zip(places, acted_for, strict=True))
        ]
        if self.replay_apart:
            place = "Ray actor" if replay_elsewhere else device_name(self.replay_device or learners[0])
            roles.append(Role("replay", place, "all of it"))
        roles += [Role("learning", device_name(x), share) for x, share in zip(learners, learnt_from, strict=True)]
        ways = {
            "observations": "among worker threads and devices",
            "actions": "among worker threads and devices",
            "trajectories": f"workers to {'replay' if self.replay_apart and not replay_elsewhere else 'learning'}",
            "insertions": "learning to replay",
            "minibatches": "replay to learning",
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
        if self.replay_apart:
            learns = f"learning and workers for one another where they are {self.replay_tolerance:g} update(s) ahead"
        else:
            learns = f"learning for {self.workers} rollouts, whoever they are from"
        waits = f"{learns}; {waits}."
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
        if self.lockstep and self.replay_apart:
            raise ValueError("lockstep=True ties rollouts to updates, and replay_apart=True parts them; choose one.")
        if not self.replay_apart and (self.replay_device is not None or self.replay_engine != "threads"):
            name = "replay_engine" if self.replay_device is None else "replay_device"
            raise ValueError(f"{name}={getattr(self, name)!r} is for a replay apart; give replay_apart=True too.")
        replay_engine = resolve_engine(self.replay_engine, "replay_engine")
        if self.replay_device is not None and replay_engine.apart:
            raise ValueError(
                f"replay_device={self.replay_device!r} is one of this process, but replay_engine="
                f"{self.replay_engine!r} puts the replay into another; leave one of them out."
            )
        if not 0 < self.replay_tolerance < math.inf:
            raise ValueError(
                f"replay_tolerance={self.replay_tolerance!r} must be finite and greater than 0 updates; 1 is usual."
            )
