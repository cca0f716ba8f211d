"""Distributed actors (Acme, Hoffman et al. 2020, arXiv 2006.00979; Ape-X, Horgan et al. 2018, arXiv 1803.00933).

Workers, each with a copy of the policy and environments of its own, play whole rollouts and send them to one learner.
Nobody waits for the slowest: the learner takes rollouts as they come, and a worker fetches new parameters when it
begins its next rollout, or less often. Pure environments and the policy are one compiled program in each worker.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from podium import keys
from podium.agent import Agent
from podium.devices import Devices, resolve_apart, resolve_devices, share_devices
from podium.env import Env
from podium.finite import all_finite
from podium.host import HostEnvFactory
from podium.placement.actors.actor import compile_actors, make_acting
from podium.placement.actors.loop import ActorLearnerLoop
from podium.placement.actors.pool import ADDITIONS, ActorPool, account
from podium.placement.compiled.iteration import plan_shapes, resolve_lanes
from podium.placement.compiled.learner import learner_of, learning_bytes, observer_of
from podium.placement.compiled.minibatches import MinibatchSteps
from podium.placement.contract import (
    EPISODES_RESTART,
    STATS,
    Acting,
    Actor,
    Asked,
    Experience,
    Placement,
    Program,
    Sizes,
)
from podium.placement.remote.actors import RemoteActor
from podium.placement.remote.engine import Engine, resolve_engine
from podium.placement.remote.replay import ReplayFunctions, ReplayServer
from podium.placement.threads.rate_limiter import RateLimiter
from podium.placement.threads.supervision import ActorError, Heartbeat, SupervisedThread, Supervisor, end_threads
from podium.ranges import check_divides, check_fields
from podium.report import Move, Report, Role, device_name, nbytes, roles_on, shares
from podium.rollout import Rollout, join
from podium.types import Key, Metrics, PyTree


@dataclasses.dataclass(frozen=True)
class DistributedActors(Placement):
    """Workers with a policy copy each send rollouts to one learner, which takes them as they come.

    A batch holds as many rollouts as there are workers, whoever they are from: a fast worker may have two in it and a
    slow one none. For an agent with a replay, and in lockstep, it holds one of each worker: what a replay stores of an
    environment must follow on in time.

    Args:
      workers: actors, each a thread with `num_envs / workers` environments and a policy copy.
      actor_devices: where workers act, by turns: a number, a sequence of devices, or None for one. Numbers take the
        first devices for acting and those after them for learning; where there are not enough, both use the same.
      learner_devices: a number, a sequence of devices, or None for one; see `actor_devices`.
      refresh_every: rollouts that a worker plays with the same parameters.
      queue_depth: rollouts of each worker that may wait for the learner.
      max_lag: a rollout whose parameters are more than so many updates old is dropped; None keeps all.
      lockstep: each rollout waits for the parameters of the update before it, as if fused.
      replay_apart: whether the replay of an agent that has one is a part of its own: rollouts go into it as they come,
        learning samples from it, and the faster of the two waits. Else every update inserts a batch of rollouts and
        then samples. What it holds is not saved: a run that resumes fills it again.
      replay_device: that holds it then; None is the first that learns.
      replay_engine: where it is then: "threads" is in this process, on `replay_device`; "ray" is in a Ray actor, a
        process of its own, on its CPU or the GPU that it is given. Learning plans what goes into it, and minibatches
        come back; if the process is lost, the run ends, and one that resumes fills another.
      replay_tolerance: updates that inserting and sampling may then be ahead of each other, above 0.
      restarts: failures of workers that a run survives: the rollout under way is dropped and counted, and the worker
        begins anew with fresh episodes.
      actor_timeout: seconds without progress (a step of host environments, a rollout of pure ones) after which a
        worker counts as hung and the run ends; and for which inserting and sampling wait for each other where no
        rollout is being played.
      engine: where workers play: "threads" has their environments and policy copies in this process, on
        `actor_devices`; "ray" has those of each in a Ray actor (`podium.launch`), a process of its own, on its CPU or
        the GPU that it is given. Parameters go there and rollouts come back.
    """

    may_change: ClassVar[frozenset[str]] = Placement.may_change | {"replay_device", "replay_engine", "workers"}

    workers: int = 4
    actor_devices: Devices = None
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
    actor_timeout: float = 60.0
    engine: Engine | Literal["threads", "ray"] = "threads"

    def program(self, agent: Agent, env: Env | HostEnvFactory, asked: Asked) -> Program:
        """Return the program; see `Placement.program`."""
        num_envs, rollout_length = asked.num_envs, asked.rollout_length
        self._check()
        if self.replay_apart and agent.replay is None:
            raise ValueError(f"replay_apart=True, but {agent.name} learns from no replay; leave it out.")
        on_devices, learners = self.devices()
        unit = math.lcm(self.workers, len(learners))
        check_divides(num_envs, self.workers, f"workers={self.workers}", unit)
        check_divides(num_envs, len(learners), f"the {len(learners)} learner devices", unit)
        acting = make_acting(agent, env, num_envs // self.workers, rollout_length)
        lanes = resolve_lanes(acting, num_envs, rollout_length, len(learners), asked.num_lanes)
        sizes, in_order = Sizes(num_envs, rollout_length, 1, lanes), self.lockstep or agent.replay is not None
        engine, share = resolve_engine(self.engine), acting.num_envs
        places = [on_devices[worker % len(on_devices)] for worker in range(self.workers)]
        played_on = [None if engine.apart else places[i // share] for i in range(num_envs)]
        acted = {} if engine.apart else acting.bytes_moved(num_envs)
        # How often the parameters are sent in an update, if every worker fetches those of each.
        copies = self.workers if engine.apart else len(on_devices)

        def compile(params: PyTree) -> list[Callable[[Key, int], Actor]]:
            if not engine.apart:
                return compile_actors(acting, places, 0, params)
            # Each of those in other processes compiles there.
            make = partial(RemoteActor, engine, acting, self.actor_timeout)
            return [partial(make, f"podium-actor-{i}", i * share) for i in range(self.workers)]

        pool = ActorPool(
            compile,
            on_devices,
            self.actor_timeout,
            queue_depth=self.queue_depth,
            max_lag=self.max_lag,
            lockstep=self.lockstep,
            refresh_every=self.refresh_every,
            restarts=self.restarts,
            in_order=in_order,
            deliver=self._deliver(learners),
        )
        loop: ReplayLoop | DistributedActorsLoop
        if self.replay_apart:
            loop = ReplayLoop(self, acting, sizes, learners, pool)
            moves = lambda: {**acted, **loop.bytes_moved(played_on, copies)}
        else:
            learner = learner_of(acting, sizes, learners)
            loop = DistributedActorsLoop(learner, pool)
            moves = lambda: {**acted, **learning_bytes(learner, acting, played_on, copies)}
        layout = "ReplayApart" if self.replay_apart else "DistributedActors"
        report = partial(self._explain, num_envs, in_order=in_order)
        additions = {**ADDITIONS, "dropped_rollouts": "sum", "replay_balance": "mean"}
        loses = "episodes and the replay begin anew" if self.replay_apart else EPISODES_RESTART
        return Program(agent, acting.env, sizes, learners, loop, layout, moves, report, additions, resume_loses=loses)

    def devices(self) -> tuple[list[jax.Device], list[jax.Device]]:
        """Return the devices that act, at most one a worker, and those that learn.

        Workers in other processes fetch their parameters from the first that learns.
        """
        if resolve_engine(self.engine).apart:
            learning = resolve_devices(1 if self.learner_devices is None else self.learner_devices)
            return learning[:1], learning
        acting, learning = resolve_apart(self.actor_devices, self.learner_devices)
        return acting[: self.workers], learning

    def _deliver(self, learners: Sequence[jax.Device]) -> Callable[[Rollout], Rollout]:
        """Return what moves a rollout to the device that reads it; of several, which is known with the whole batch."""
        reads = [self.planner(learners)] if self.replay_apart else learners
        return partial(jax.device_put, device=reads[0]) if len(reads) == 1 else lambda rollout: rollout

    def planner(self, learners: Sequence[jax.Device]) -> jax.Device:
        """Return the device that reads rollouts for a replay apart, and holds it where this process does."""
        return self.replay_device or learners[0]

    @classmethod
    def candidates(cls, num_devices: int, num_envs: int) -> Sequence[Self]:
        """Return four workers, or as many as divide `num_envs`, and as many learners as do."""
        actors, learners = share_devices(num_devices, num_envs)
        return [cls(next(n for n in (4, 2, 1) if num_envs % n == 0), actors, learners)]

    def _explain(self, num_envs: int | None, amounts: Mapping[str, int | None], in_order: bool = True) -> Report:
        (on_devices, learners), ray = self.devices(), "Ray actor"
        apart, replay_elsewhere = (resolve_engine(engine).apart for engine in (self.engine, self.replay_engine))
        roles = [
            Role(f"worker {i}", ray if apart else device_name(on_devices[i % len(on_devices)]), share)
            for i, share in enumerate(shares(num_envs, self.workers))
        ]
        if self.replay_apart:
            place = ray if replay_elsewhere else device_name(self.planner(learners))
            roles.append(Role("replay", place, "all of it"))
        learnt = shares(num_envs, len(learners)) if in_order else ["its share of every batch"] * len(learners)
        roles += roles_on(learners, "learning", learnt)
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
        if num_envs is None:
            replay = ["minibatches"] if self.replay_apart else []
            amounts = dict.fromkeys(["trajectories", *replay, "parameters", "gradient sums"])
        moves = [Move(name, ways[name], amount) for name, amount in amounts.items()]
        if self.replay_apart:
            learns = f"learning and workers for one another where they are {self.replay_tolerance:g} update(s) ahead"
        else:
            learns = f"learning for {self.workers} rollouts, whoever they are from"
        return Report(title, roles, moves, stale=stale, waits=f"{learns}; {waits}.")

    def _check(self) -> None:
        check_fields(
            self,
            counts=("workers", "refresh_every", "queue_depth"),
            naturals=("max_lag", "restarts"),
            positive=("actor_timeout", "replay_tolerance"),
        )
        if self.actor_devices is not None and resolve_engine(self.engine).apart:
            raise ValueError(
                f"actor_devices={self.actor_devices!r} are of this process, but engine={self.engine!r} has workers act "
                "in others, each on its CPU or the GPU that it is given; leave one of them out."
            )
        if self.lockstep and self.refresh_every > 1:
            raise ValueError(
                f"lockstep=True plays every rollout with new parameters, but refresh_every={self.refresh_every}; use 1."
            )
        if self.lockstep and self.replay_apart:
            raise ValueError("lockstep=True ties rollouts to updates, and replay_apart=True parts them; choose one.")
        for field, usual in {"replay_device": None, "replay_engine": "threads"}.items():
            if not self.replay_apart and getattr(self, field) != usual:
                raise ValueError(f"{field}={getattr(self, field)!r} is for a replay apart; give replay_apart=True too.")
        if not isinstance(self.replay_device, jax.Device | None):
            raise ValueError(
                f"replay_device={self.replay_device!r} must be a device of JAX's, such as jax.devices()[0]."
            )
        if self.replay_device is not None and resolve_engine(self.replay_engine, "replay_engine").apart:
            raise ValueError(
                f"replay_device={self.replay_device!r} is one of this process, but replay_engine="
                f"{self.replay_engine!r} puts the replay into another; leave one of them out."
            )


class DistributedActorsLoop(ActorLearnerLoop):
    """Workers play beside the learner; an update takes as many rollouts as there are workers, as they come."""

    def update(self, state: Any, number: int) -> tuple[Any, Metrics]:
        """Do update `number`."""
        batch = self.actors.take(number)
        state, metrics, params = self.learner.update(state, batch.rollouts, batch.version)
        self.actors.publish(params, number + 1)
        return state, {**metrics, **batch.stats}


class Inserted(NamedTuple):
    """A batch of rollouts that is in the replay, and what its actors told; without arrays but for `rollout`."""

    rollout: Rollout
    experiences: list[Experience]
    dropped: int


class ReplayLoop(ActorLearnerLoop):
    """Workers play, rollouts go into a replay apart as they come, and learning draws from it as it likes.

    Nothing ties an insertion to a gradient step but a limiter, which holds their ratio to that of the agent's replay.
    An update is as many gradient steps as an insertion is worth, and observes the rollouts inserted meanwhile.
    """

    def __init__(
        self, placement: DistributedActors, acting: Acting, sizes: Sizes, devices: list[jax.Device], pool: ActorPool
    ):
        super().__init__(observer_of(acting, sizes, devices), pool)
        self._placement, self._acting, self._sizes, self._pool = placement, acting, sizes, pool
        self._engine = resolve_engine(placement.replay_engine, "replay_engine")
        planner = placement.planner(devices)
        plan = plan_shapes(acting, sizes.rollout_length, sizes.num_envs)
        self._functions = ReplayFunctions(acting, sizes, plan, None if self._engine.apart else planner)
        self._drawn, self._steps_per_batch = self._functions.drawn(), self._functions.replay.steps_per_batch
        self._steps = MinibatchSteps(self.learner, self._drawn.minibatch, planner)
        self._inserted: deque[Inserted] = deque()  # Until learning starts an update takes one, then all there are.
        self._ready, self._stop = False, threading.Event()
        self._limiter: RateLimiter
        self._replay: ReplayServer | None = None
        self._inserter: Supervisor | None = None

    def update(self, state: Any, number: int) -> tuple[Any, Metrics]:
        """Take as many gradient steps as an insertion is worth, and observe what was inserted meanwhile."""
        assert self._replay is not None
        began, rows, seen, finite = time.perf_counter(), list[Metrics](), list[Inserted](), True
        while not self._ready and not self._inserted:
            time.sleep(0.002)
            self._check_threads()
        waited = time.perf_counter() - began
        fold_key = jax.random.split(keys.iteration(state.key, state.update).learn)[1]
        for step in range(self._drawn.per_insertion if self._ready else 0):
            sample_key, grad_key = jax.random.split(jax.random.fold_in(fold_key, step))
            waited += self._limiter.sample(self._steps_per_batch, self._check_threads)
            minibatch, indices = self._replay.sample(sample_key, self._check_threads)
            agent, metrics, priorities = self._steps.step(state.agent, grad_key, minibatch)
            self._replay.rank(indices, priorities, self._check_threads)
            state = state._replace(agent=agent)
            rows.append(metrics)
        while self._inserted and (rows or not seen):
            seen.append(self._inserted.popleft())
            oldest = min(experience.version for experience in seen[-1].experiences)
            state, observed, _ = self.learner.update(state, [seen[-1].rollout], oldest)
            finite = finite and bool(observed["finite"])
        state = state._replace(update=state.update + 1)
        self._newest, self._published = jax.block_until_ready(state.agent), number + 1
        self.actors.publish(self.learner.params(state), number + 1)
        row: dict[str, Any] = {**self._steps.mean(rows), **_told(seen, number), "learner_idle_seconds": waited}
        finite_now = np.array([bool(self._all_finite(state.agent)), finite])
        return state, {**row, "replay_balance": np.float32(self._limiter.balance), "finite": finite_now}

    def _insert(self, run_key: Key, start: int, heartbeat: Heartbeat) -> None:
        """Put rollouts into the replay as they come, as far as the limiter lets it: what the inserter does."""
        assert self._replay is not None

        def playing() -> None:  # Workers are well, however long a rollout takes: both threads may wait for them.
            self._limiter.coming()
            heartbeat()

        for number in itertools.count(start):
            experiences, dropped = self._pool.collect(self._published, playing)
            self._limiter.insert(self._sizes.steps_per_update, heartbeat)
            rollout = join([each.rollout for each in experiences])  # Delivered to the planner.
            plan_key = jax.random.split(keys.iteration(run_key, jnp.int32(number)).learn)[0]
            ready = self._replay.add(self._steps.plan(plan_key, self._newest, rollout), rollout.gap, heartbeat)
            told = [experience._replace(rollout=None) for experience in experiences]
            self._inserted.append(Inserted(rollout, told, dropped))
            if ready:
                self._limiter.open()
                self._ready = True
            heartbeat()

    def _check_threads(self) -> None:
        """Raise for a dead or hung worker, which the inserter notices, or inserter."""
        assert self._inserter is not None
        if isinstance(self._inserter.thread.error, ActorError):
            raise self._inserter.thread.error
        self._inserter.check(self._inserter.thread.is_alive())

    def start(self, state: Any, run_key: Key, seed: int, first: int) -> None:
        """Start the workers and the inserter."""
        self._newest, self._published, timeout = state.agent, first, self._placement.actor_timeout
        per_update = self._drawn.per_insertion * self._steps_per_batch
        tolerance = max(self._placement.replay_tolerance * per_update, (self._steps_per_batch + per_update) / 2)
        self._limiter = RateLimiter(per_update / self._sizes.steps_per_update, tolerance, timeout)
        thread = SupervisedThread("podium-inserter", partial(self._insert, run_key, first), self._stop)
        self._inserter = Supervisor(thread, timeout)
        super().start(state, run_key, seed, first)
        thread.start()

    @property
    def compile_seconds(self) -> float:
        """Seconds spent in tracing and compiling so far."""
        return super().compile_seconds + self._steps.compile_seconds

    def lower(self) -> None:
        """Trace learning, once."""
        super().lower()
        self._steps.lower()

    def compile(self) -> None:
        """Compile acting and learning, and place the replay, once."""
        super().compile()
        self._steps.compile()
        if self._replay is None:
            self._all_finite = jax.jit(all_finite)
            self._replay = ReplayServer(self._engine, self._functions, self._placement.actor_timeout)

    def close(self) -> None:
        """End the threads, and the replay with what it holds."""
        self._stop.set()
        super().close()
        if self._inserter is not None:
            end_threads([self._inserter.thread], self._stop)
        if self._replay is not None:
            self._replay.close()

    def bytes_moved(self, played_on: Sequence[jax.Device | None], copies: int) -> dict[str, int]:
        """Return what learning moves in an update, from shapes; see `learning_bytes`."""
        drawn, planner, devices = self._drawn, self._steps.planner, self.learner.devices
        rollout, away = self.learner.rollout_shapes, sum(device != planner for device in played_on)
        elsewhere = self._engine.apart or [planner] != devices
        return {
            "trajectories": (nbytes(rollout) - nbytes(rollout.policy_version)) * away // len(played_on),
            **({"insertions": nbytes(self._functions.plan.data)} if self._engine.apart else {}),
            "minibatches": drawn.per_insertion * nbytes(drawn.minibatch) if elsewhere else 0,
            "parameters": nbytes(self._acting.params_shapes()) * copies,
            "gradient sums": drawn.per_insertion * nbytes(self._steps.gradient()) if len(devices) > 1 else 0,
        }


def _told(seen: Sequence[Inserted], number: int) -> dict[str, Any]:
    """Return what the rollouts that an update observed came to; there may be none."""
    experiences, dropped = [each for batch in seen for each in batch.experiences], sum(x.dropped for x in seen)
    if experiences:
        return account(experiences, number, dropped)
    nothing = dict.fromkeys((*STATS, "actor_idle_seconds", "dropped_rollouts"), 0.0)
    unknown = dict.fromkeys(("policy_lag_mean", "policy_lag_max", "actor_idle"), np.float32(np.nan))
    return account([Experience(None, number, nothing)], number, dropped) | unknown
