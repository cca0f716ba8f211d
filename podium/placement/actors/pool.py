"""Actors in threads of their own: each plays rollout after rollout with the latest parameters that were published."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from podium import distributed, keys
from podium.placement.contract import ACTING, Actor, Experience
from podium.placement.threads.channels import LatestParams, put, take
from podium.placement.threads.supervision import (
    FatalError,
    Heartbeat,
    RestartBudget,
    Stopped,
    SupervisedThread,
    Supervisor,
    end_threads,
)
from podium.rollout import Rollout, with_gap
from podium.tally import Addition
from podium.types import Key, PyTree

ADDITIONS: Mapping[str, Addition] = {
    **ACTING,
    "actor_idle": "mean",
    "learner_idle": "mean",
    "learn_seconds": "sum",
    "policy_lag_mean": "mean",
    "policy_lag_max": "max",
    "dropped_batches": "sum",
}
"""How what is told of a batch adds up over the updates of a row."""


class Batch(NamedTuple):
    """What an update learns from.

    Attributes:
      rollouts: of this process, in the order of their environments.
      version: updates behind the oldest parameters that acted, in any process.
      stats: of all rollouts of all processes.
      experiences: that the rollouts are of.
    """

    rollouts: list[Rollout]
    version: int
    stats: dict[str, Any]
    experiences: list[Experience]

    def give_back(self) -> None:
        """Let the actors play in the memory of these rollouts, which nobody reads any more."""
        for experience in self.experiences:
            if experience.rollout is not None and experience.reuse is not None:
                experience.reuse(experience.rollout)


class ActorPool:
    """Threads of actors, and the queues that their rollouts wait in.

    Args:
      compile: `(shapes of the parameters) -> ` for each actor `(run_key, seed) -> Actor`.
      devices: that parameters are copied to.
      timeout: seconds without a heartbeat after which a thread counts as hung.
      device_of: `(number of an actor) -> number of its device`; None lets actors take turns.
      queue_depth: rollouts of an actor that may wait for the learner.
      max_lag: a rollout whose parameters are more than so many updates old is dropped; None keeps all.
      lockstep: each rollout waits for the parameters of the update before it.
      refresh_every: rollouts that an actor plays with the same parameters.
      restarts: failures that all actors together survive; None for none, which are not counted then.
      in_order: whether a batch holds one rollout of each actor, and not those that come first.
      pick: `(params, number of the device) -> ` what is copied there.
      deliver: moves a rollout to where it is read, in the thread of its actor, while others are learnt from; such
        rollouts are not given back (`Batch.give_back`).

    Attributes:
      latest: parameters, for each device.
      services: what actors need beside them, in threads of these names; to be filled before `start`.
    """

    def __init__(
        self,
        compile: Callable[[PyTree], Sequence[Callable[[Key, int], Actor]]],
        devices: Sequence[jax.Device],
        timeout: float,
        *,
        device_of: Callable[[int], int] | None = None,
        queue_depth: int = 1,
        max_lag: int | None = None,
        lockstep: bool = False,
        refresh_every: int = 1,
        restarts: int | None = None,
        in_order: bool = True,
        pick: Callable[[PyTree, int], PyTree] = lambda params, number: params,
        deliver: Callable[[Rollout], Rollout] = lambda rollout: rollout,
    ):
        self._compile, self._devices, self._timeout = compile, list(devices), timeout
        self._queue_depth, self._max_lag, self._lockstep = queue_depth, max_lag, lockstep
        self._refresh_every, self._in_order, self._pick, self._deliver = refresh_every, in_order, pick, deliver
        self._device_of = device_of or (lambda actor: actor % len(self._devices))
        self._restarts = None if restarts is None else RestartBudget(restarts)
        self.latest = [LatestParams() for _ in self._devices]
        self.services: dict[str, Callable[[Heartbeat], None]] = {}
        self._queues: list[queue.Queue[Experience]] = []
        self.stop = threading.Event()
        self.threads: list[SupervisedThread] = []
        self._supervisors: list[Supervisor] = []

    def compile(self, params: PyTree) -> None:
        """Compile what acts; `params` are shapes of the parameters."""
        self._makers = self._compile(params)

    def start(self, run_key: Key, seed: int, iteration: int, params: PyTree) -> None:
        """Publish the first parameters, and let every actor play from this iteration on; `run_key` is on the host."""
        number = len(self._makers)
        shared: queue.Queue[Experience] = queue.Queue(number * self._queue_depth)
        self._queues = [queue.Queue(self._queue_depth) if self._in_order else shared for _ in range(number)]
        works = {
            f"podium-actor-{actor}": partial(self._work, actor, partial(make, run_key), seed, iteration)
            for actor, make in enumerate(self._makers)
        }
        self.threads = [SupervisedThread(*named, self.stop) for named in (works | self.services).items()]
        self.publish(params, iteration)
        self._supervisors = [Supervisor(thread, self._timeout) for thread in self.threads]
        for thread in self.threads:
            thread.start()

    def publish(self, params: PyTree, version: int) -> None:
        """Give all actors the parameters of this version."""
        for number, (latest, device) in enumerate(zip(self.latest, self._devices, strict=True)):
            # A copy of its own: what the learner donates must not be what an actor reads.
            copy = jax.device_put(self._pick(params, number), device, may_alias=False)
            latest.publish(jax.block_until_ready(copy), version)

    def take(self, number: int) -> Batch:
        """Return what update `number` learns from; with several processes, wait for all of them.

        Raises:
          ActorError: a thread died or hung.
        """
        began = time.perf_counter()
        experiences, dropped = self.collect(number)
        # Device programs of several processes wait for each other without end; here a dead one is noticed.
        everywhere, dropped = _gather(experiences, dropped)
        stats = account(everywhere, number, dropped)
        stats["learner_idle_seconds"] = time.perf_counter() - began
        rollouts = [experience.rollout for experience in experiences if experience.rollout is not None]
        return Batch(rollouts, min(experience.version for experience in everywhere), stats, experiences)

    def collect(self, number: int, heartbeat: Heartbeat | None = None) -> tuple[list[Experience], int]:
        """Wait for as many rollouts as there are actors; return them, and how many were dropped as too old.

        Meanwhile `heartbeat` is called as `take` does.
        """
        experiences, dropped = [], 0
        services = self._supervisors[len(self._queues) :]
        for actor, items in enumerate(self._queues):
            supervisors = [self._supervisors[actor], *services] if self._in_order else self._supervisors
            experience, late = take(items, supervisors, heartbeat), 0
            while self._max_lag is not None and number - experience.version > self._max_lag:
                experience, late = take(items, supervisors, heartbeat), late + 1
            if late and experience.rollout is not None:
                experience = experience._replace(rollout=with_gap(experience.rollout, True))
            experiences.append(experience)
            dropped += late
        return experiences, dropped

    def close(self) -> None:
        """End the threads; one that hangs in native code is left behind as a daemon."""
        end_threads(self.threads, self.stop)

    def _work(self, number: int, make: Callable[[int], Actor], seed: int, start: int, heartbeat: Heartbeat) -> None:
        """Play rollout after rollout, again after every failure that is survived; what a thread of an actor does."""
        items, latest = self._queues[number], self.latest[self._device_of(number)]
        iteration, failures = start, 0
        lost = 0  # Failures since the last rollout that was handed over.
        idle = 0.0  # Seconds; what one rollout waited is counted with the next, for that one may be gone.

        def play() -> None:
            nonlocal iteration, lost, idle
            actor = make(keys.seed_after(seed, failures))
            anew = True  # Its episodes follow none that were played before.
            # The first rollout takes whatever there is; in lockstep every other one waits for the update before it.
            held: dict[int, tuple[PyTree, int]] = {}  # The parameters of one iteration, asked for once.

            def params_of(iteration: int) -> tuple[PyTree, int]:
                due = iteration - (iteration - start) % self._refresh_every
                if due not in held:
                    fetched = latest.get(iteration if self._lockstep else 0, self.stop)
                    held.clear()
                    held[due] = fetched
                return held[due]

            def following() -> PyTree | None:
                wait = self._lockstep or items.full()
                return None if wait else params_of(iteration + 1)[0]

            try:
                while True:
                    began = time.perf_counter()
                    params, version = params_of(iteration)
                    waited = idle + time.perf_counter() - began
                    played = actor.play(params, version, iteration, heartbeat, following)
                    assert played.rollout is not None
                    stats = {**played.stats, "actor_idle_seconds": waited}
                    if self._restarts is not None:
                        stats["dropped_rollouts"] = lost
                    rollout = with_gap(self._deliver(played.rollout), anew)
                    began = time.perf_counter()
                    put(items, played._replace(rollout=rollout, stats=stats), heartbeat)
                    idle, anew = time.perf_counter() - began, False
                    iteration, lost = iteration + 1, 0
            finally:
                actor.close()

        while True:
            try:
                play()
            except (Stopped, FatalError):
                raise
            except Exception as error:
                if self._restarts is None or not self._restarts.take():
                    raise
                failures, lost = failures + 1, lost + 1
                print(f"podium-actor-{number} restarts at iteration {iteration}: {error!r}", file=sys.stderr)


def account(experiences: Sequence[Experience], number: int, dropped: int) -> dict[str, Any]:
    """Return what the rollouts of update `number` came to, and how old they were."""
    total = {name: sum(each.stats[name] for each in experiences) for name in experiences[0].stats}
    idle = total.pop("actor_idle_seconds")
    busy = total["env_seconds"] + total["inference_seconds"]
    lags = [number - experience.version for experience in experiences]
    row = {
        **total,
        **{name: max(each.maxima[name] for each in experiences) for name in experiences[0].maxima},
        "actor_idle": idle / max(idle + busy, 1e-9),
        "policy_lag_mean": np.mean(lags),
        "policy_lag_max": np.max(lags),
        "dropped_batches": dropped,
    }
    return {name: np.float32(value) for name, value in row.items()}


def _gather(experiences: list[Experience], dropped: int) -> tuple[list[Experience], int]:
    """Return the rollouts of all processes, without the arrays of others, and how many rollouts all dropped."""
    if distributed.num_processes() == 1:
        return experiences, dropped
    mine = [(each.version, each.stats, each.maxima) for each in experiences]
    gathered = distributed.gather({"experiences": mine, "dropped": dropped})
    everywhere = [Experience(None, *each) for process in gathered for each in process["experiences"]]
    return everywhere, sum(process["dropped"] for process in gathered)
