"""Central inference (SEED RL, Espeholt et al. 2020, arXiv 1910.06591): environments send observations, and get actions.

Light threads do little but step environments. Their observations go to the inference server of their learner device,
which acts for all who wait in one batch: never for more than fit, and never later than a bound. So no policy is copied
to any actor, and an environment that takes long holds up nobody. Deliberate differences from Espeholt et al.: every
environment gives one rollout to every batch, so that fast ones are not seen more often than slow ones, though they may
run ahead by `queue_depth`; and requests stay in one process and need no gRPC.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, Self

from podium.agent import Agent
from podium.devices import Devices, resolve_devices
from podium.env import Env
from podium.host import HostEnvFactory
from podium.placement.actors.host import HostActing
from podium.placement.actors.inference import ADDITIONS, InferencePool, bytes_moved
from podium.placement.actors.loop import ActorLearnerLoop
from podium.placement.compiled.iteration import resolve_lanes
from podium.placement.compiled.learner import learner_of, learning_bytes
from podium.placement.contract import EPISODES_RESTART, Asked, Placement, Program, Sizes
from podium.placement.remote.envs import Engine, place_envs
from podium.ranges import check_divides, check_fields, is_number
from podium.report import Move, Report, Role, roles_on, shares
from podium.types import Metrics


@dataclasses.dataclass(frozen=True)
class CentralInference(Placement):
    """Step environments in threads, and act for whoever waits in one batch, on the devices that learn.

    Args:
      envs_per_actor: environments that an actor, a thread, steps at once. None takes as few as give no more threads
        than cores, but one a device: Python runs one thread at a time, and each costs something at every step.
        Environments that wait more than they compute, for a simulator elsewhere say, want more: 1 gives each its own.
      devices: that act and learn, each for its share of the environments: a number, a sequence of devices, or None for
        all there are.
      batch_size: environments that a device acts for at once, at most; None is all of its share.
      max_wait: seconds that an observation waits for others to fill the batch, once the device is free; 0 acts at once
        for whoever has come while it was busy.
      queue_depth: rollouts of an actor that may wait for the learner.
      max_lag: a rollout whose oldest parameters are more than so many updates old is dropped, that of one actor; None
        keeps all.
      lockstep: each rollout waits for the parameters of the update before it, as if fused.
      restarts: failures of actors that a run survives: the rollout under way is dropped and counted, and the actor
        begins anew with fresh episodes.
      actor_timeout: seconds without a step after which a thread counts as hung and the run ends.
      engine: where environments are stepped: "threads" steps them in this process; "ray" steps those of each thread in
        a Ray actor, a process of its own (`podium.launch`), and observations and actions travel.
    """

    may_change: ClassVar[frozenset[str]] = Placement.may_change | {"batch_size", "envs_per_actor", "max_wait"}

    envs_per_actor: int | None = None
    devices: Devices = None
    batch_size: int | None = None
    max_wait: float = 0.0
    queue_depth: int = 1
    max_lag: int | None = None
    lockstep: bool = False
    restarts: int = 0
    actor_timeout: float = 60.0
    engine: Engine | Literal["threads", "ray"] = "threads"

    def program(self, agent: Agent, env: Env | HostEnvFactory, asked: Asked) -> Program:
        """Return the program; see `Placement.program`."""
        num_envs, rollout_length = asked.num_envs, asked.rollout_length
        check_fields(
            self,
            counts=("envs_per_actor", "batch_size", "queue_depth"),
            naturals=("max_lag", "restarts"),
            positive=("actor_timeout",),
        )
        if not is_number(self.max_wait) or not 0 <= self.max_wait < 10:
            raise ValueError(f"max_wait={self.max_wait!r} must be 0 to 10 seconds; 0 waits for nobody.")
        devices = resolve_devices(self.devices)
        each = self._envs_per_actor(num_envs, len(devices))
        share = num_envs // len(devices)
        envs = place_envs(env, self.engine, self.actor_timeout)
        acting = HostActing(agent, envs, each, rollout_length)
        lanes = resolve_lanes(acting, num_envs, rollout_length, len(devices), asked.num_lanes)
        sizes = Sizes(num_envs, rollout_length, 1, lanes)
        pool = InferencePool(
            acting,
            devices,
            share // each,
            min(share, self.batch_size or share),
            self.max_wait,
            timeout=self.actor_timeout,
            queue_depth=self.queue_depth,
            max_lag=self.max_lag,
            lockstep=self.lockstep,
            restarts=self.restarts,
        )
        learner = learner_of(acting, sizes, devices)
        loop = CentralInferenceLoop(learner, pool)

        def moves() -> dict[str, int]:
            learnt = learning_bytes(learner, acting, [None] * num_envs, len(devices))
            return bytes_moved(acting, num_envs) | learnt

        report = partial(self._explain, num_envs)
        name = "CentralInference"
        return Program(agent, envs, sizes, devices, loop, name, moves, report, ADDITIONS, resume_loses=EPISODES_RESTART)

    @classmethod
    def candidates(cls, num_devices: int, num_envs: int) -> Sequence[Self]:
        """Return it with few threads, as fast environments want, and one for each of 64, as those that wait do."""
        waiting = max(1, num_envs // 64)
        apart = [cls(envs_per_actor=waiting, devices=num_devices)] if num_envs % (waiting * num_devices) == 0 else []
        return [cls(devices=num_devices), *apart]

    def _explain(self, num_envs: int | None, amounts: Mapping[str, int | None]) -> Report:
        devices, each = resolve_devices(self.devices), self.envs_per_actor
        if num_envs is not None:
            each = self._envs_per_actor(num_envs, len(devices))
            threads = f"{num_envs // each} threads, {each} in each"
        else:
            threads = "as many threads as cores" if each is None else f"num_envs / {each} threads, {each} in each"
        roles = [Role("environments", "host CPU", threads)]
        for name in ("inference", "learning"):
            roles += roles_on(devices, name, shares(num_envs, len(devices)))
        ways = {
            "observations": "environments to inference",
            "actions": "inference to environments",
            "trajectories": "inference to learning",  # From the host, where both write them.
            "parameters": "learning to inference",
            "gradient sums": "among learning devices",
        }
        if self.lockstep:
            stale = "never; every rollout waits for the update before it."
        else:
            stale = f"acting takes the newest at every step; a rollout is up to {self.queue_depth + 1} updates old"
            stale += " when learnt from"
            stale += "." if self.max_lag is None else f", and dropped if more than {self.max_lag}."
        size = "all" if self.batch_size is None else f"a batch of {self.batch_size}"
        if self.max_wait:
            begins = f"when {size} wait, or the first has waited {1000 * self.max_wait:g} ms"
        else:
            begins = f"as soon as the device is free, for {size} of those who wait"
        waits = f"environments for inference, which begins {begins}; learning for a rollout of every environment."
        title = "CentralInference: threads step environments; each device acts for whoever waits, and learns."
        moves = [Move(name, way, amounts.get(name)) for name, way in ways.items()]
        return Report(title, roles, moves, stale=stale, waits=waits)

    def _envs_per_actor(self, num_envs: int, num_devices: int) -> int:
        most = self.batch_size
        if self.envs_per_actor is None:
            check_divides(num_envs, num_devices, f"devices={num_devices}")
            share = num_envs // num_devices
            actors = max(1, (os.cpu_count() or 1) // num_devices)
            fit = [each for each in range(1, share + 1) if share % each == 0 and (most is None or each <= most)]
            return next((each for each in fit if share // each <= actors), fit[-1])
        each = self.envs_per_actor
        unit = each * num_devices
        check_divides(num_envs, unit, f"{unit}, envs_per_actor={each} times devices={num_devices}")
        if most is not None and most < each:
            raise ValueError(
                f"batch_size={most} holds not even the envs_per_actor={each} of one actor; use {each} or more."
            )
        return each


class CentralInferenceLoop(ActorLearnerLoop):
    """Servers act for actors beside the learner; an update takes one rollout of every environment."""

    def update(self, state: Any, number: int) -> tuple[Any, Metrics]:
        """Do update `number`."""
        batch = self.actors.take(number)
        state, metrics, params = self.learner.update(state, batch.rollouts, batch.version)
        self.actors.publish(params, number + 1)
        return state, {**metrics, **batch.stats}
