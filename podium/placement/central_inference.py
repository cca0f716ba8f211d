"""Central inference (SEED RL, Espeholt et al. 2020, arXiv 1910.06591): environments send observations, and get actions.

Many light threads do little but step environments. Whoever has an observation asks the server of its learner device,
which acts for all who wait in one batch: never for more than fit, and never later than a bound. So no policy is copied
to any worker, and an environment that takes long holds up nobody. Deliberate differences from Espeholt et al.: every
environment gives one rollout to every batch, so that fast ones are not seen more often than slow ones, though they may
run ahead by `queue_depth`; requests stay in one process and need no gRPC; and a server is no thread, but work that
one of those who ask does for all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Literal

import jax
import numpy as np

from podium.agent import Agent, nearest_multiples
from podium.env import Env
from podium.host import HostEnv, HostEnvs, on_host
from podium.placement import inference, program
from podium.placement.acting import Acting
from podium.placement.actors import Piece, Restarts, Watched, seed_after, take
from podium.placement.cores import OneCore
from podium.placement.devices import Devices, at, jit, resolve_devices
from podium.placement.engine import Engine
from podium.placement.explanation import Explanation
from podium.placement.inference import Inference, Ring, Server, Stepper, sizes_of_batches
from podium.placement.learner import LearnerProgram, choose_lanes, fresh, host_shapes
from podium.placement.program import Sizes
from podium.placement.ray_envs import place_envs
from podium.placement.table import Move, Role, device_name, numbers
from podium.types import Key, PyTree


@dataclasses.dataclass(frozen=True)
class CentralInference:
    """Step environments in many threads, and act for whoever waits in one batch, on the devices that learn.

    Args:
      envs_per_worker: environments that a thread steps at once; there are `num_envs / envs_per_worker` threads.
      devices: that act and learn, each for its share of the environments: a number, a sequence of devices, or None for
        all there are.
      batch_size: environments that a device acts for at once, at most; None is all of its share.
      max_wait: seconds that an observation waits for others to fill the batch, once the device is free; 0 acts at once
        for whoever has come while it was busy.
      queue_depth: rollouts of all environments that may wait for the learner, or be begun before the slowest
        environment has ended the one before.
      max_lag: a batch of rollouts whose oldest parameters are more than so many updates old is dropped; None keeps all.
      lockstep: each rollout waits for the parameters of the update before it, as if fused.
      restarts: failures of workers that a run survives: the rollout under way is dropped and counted, and the worker
        begins anew with fresh episodes.
      worker_timeout: seconds without a step after which a thread counts as hung and the run ends.
      engine: where environments are stepped: "threads" steps them in this process; "ray" steps those of each thread in
        a Ray actor, a process of its own (`podium.launch`), and observations and actions travel.
    """

    envs_per_worker: int = 1
    devices: Devices = None
    batch_size: int | None = None
    max_wait: float = 0.0
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
    ) -> CentralInferenceProgram:
        """Check every size and return the program; see `Placement.build`."""
        program.check_sizes(num_envs, rollout_length, seeds, max_updates)
        self._check()
        program.check_one_seed("CentralInference", seeds)
        program.check_one_process("CentralInference")
        envs = place_envs(env if isinstance(env, HostEnvs) else on_host(env), self.engine, self.worker_timeout)
        devices = resolve_devices(self.devices)
        unit = self.envs_per_worker * len(devices)
        if num_envs % unit:
            raise ValueError(
                f"num_envs={num_envs} is not divisible by {unit}, envs_per_worker={self.envs_per_worker} times "
                f"devices={len(devices)}; use {nearest_multiples(num_envs, unit)}."
            )
        if self.batch_size is not None and self.batch_size < self.envs_per_worker:
            raise ValueError(
                f"batch_size={self.batch_size} holds not even the envs_per_worker={self.envs_per_worker} of one "
                f"thread; use {self.envs_per_worker} or more."
            )
        shapes = host_shapes(agent, envs.spec, envs.resets_in_next_step)
        lanes = choose_lanes(agent, envs.spec, shapes, num_envs, rollout_length, len(devices), num_lanes)
        return CentralInferenceProgram(self, agent, envs, Sizes(num_envs, rollout_length, 1, lanes), devices)

    def explain(self) -> Explanation:
        """Say in a table and a drawing who runs where and what moves; the program knows the numbers."""
        devices = resolve_devices(self.devices)
        steps = "num_envs * rollout_length"
        amounts: dict[str, int | str] = {
            "observations": f"{steps} * an observation",
            "actions": f"{steps} * (an action, and what the learner needs of acting)",
            "trajectories": f"{steps} * (obs, action, what came of it)",
            "parameters": f"{len(devices)} * the parameters that act",
            "gradient sums": "gradient steps * the parameters" if len(devices) > 1 else 0,
        }
        workers = "num_envs" + (f" / {self.envs_per_worker}" if self.envs_per_worker > 1 else "")
        return self._explain(workers, devices, ["its share of the environments"] * len(devices), amounts)

    def _explain(
        self, workers: str, devices: list[jax.Device], shares: list[str], amounts: Mapping[str, int | str]
    ) -> Explanation:
        roles = [Role("environments", "host CPU", f"{workers} threads, {self.envs_per_worker} in each")]
        for name in ("inference", "learning"):
            roles += [Role(name, device_name(x), share) for x, share in zip(devices, shares, strict=True)]
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
        moves = [Move(name, way, amounts[name]) for name, way in ways.items()]
        return Explanation(title, roles, moves, stale=stale, waits=waits)

    def _check(self) -> None:
        program.check_positive(envs_per_worker=self.envs_per_worker, queue_depth=self.queue_depth)
        if self.batch_size is not None:
            program.check_positive(batch_size=self.batch_size)
        program.check_max_lag(self.max_lag)
        program.check_not_negative("use 0 for none", restarts=self.restarts)
        if not 0 <= self.max_wait < 10:
            raise ValueError(f"max_wait={self.max_wait!r} must be 0 to 10 seconds; 0 waits for nobody.")
        program.check_seconds(worker_timeout=self.worker_timeout)


class CentralInferenceProgram(LearnerProgram):
    """The threads, the servers and the learner's program for one agent, one task and one set of sizes; a `Program`."""

    def __init__(
        self, placement: CentralInference, agent: Agent, envs: HostEnvs, sizes: Sizes, devices: list[jax.Device]
    ):
        shapes = host_shapes(agent, envs.spec, envs.resets_in_next_step)
        share = sizes.num_envs // len(devices)
        super().__init__(agent, envs, sizes, shapes, share, devices, devices, placement.worker_timeout)
        self._placement, self._share = placement, share
        self._acting = Acting(agent, envs.spec, share, sizes.rollout_length, envs.resets_in_next_step)
        self._batch_size = min(share, placement.batch_size or share)
        self._restarts = Restarts(placement.restarts)

    def _compile_players(self, params: PyTree) -> None:
        self._params = params
        act = Inference(self.agent, self.env.spec)
        sizes = sizes_of_batches(self._batch_size)
        self.compiled_acting = [{size: act.compile(params, size, device) for size in sizes} for device in self.devices]
        key_data = lambda *numbers: jax.random.key_data(self._acting.step_keys(*numbers))  # noqa: E731
        number, key = jax.ShapeDtypeStruct((), np.int32), jax.eval_shape(lambda: jax.random.key(0))
        self._key_data = [
            jit(key_data, device).lower(*at((key, number, number), device)).compile() for device in self.devices
        ]

    def _make_threads(self, run_key: Key, seed: int, start: int) -> Sequence[Watched]:
        placement, each = self._placement, self._placement.envs_per_worker
        workers = self._share // each
        cores = OneCore(workers * len(self.devices))
        self._rings: list[Ring] = []
        self._servers: list[Server] = []
        self._steppers: list[list[Stepper]] = []
        for number, slot in enumerate(self._slots):
            # The first rollout takes whatever there is; in lockstep every other one waits for the update before it.
            wait_for = lambda iteration, slot=slot: slot.get(iteration if placement.lockstep else 0, self._stop)  # noqa: E731
            first = number * self._share
            make_keys = partial(self._make_keys, number, run_key, first)
            ring = Ring(self._acting, self._params, placement.queue_depth + 1, workers, make_keys, wait_for, start)
            server = Server(
                self.compiled_acting[number], slot, self._batch_size // each, placement.max_wait, self._stop
            )
            memory = jax.device_get(self._acting.carry(first))
            columns = [slice(i * each, (i + 1) * each) for i in range(workers)]
            self._steppers.append(
                [
                    Stepper(
                        number * workers + worker,
                        partial(self._make_env, seed, first + mine.start),
                        mine,
                        first + mine.start,
                        jax.tree.map(lambda x, mine=mine: x[mine], memory),
                        ring,
                        server,
                        start,
                        self._restarts,
                        cores,
                        self._stop,
                    )
                    for worker, mine in enumerate(columns)
                ]
            )
            self._rings.append(ring)
            self._servers.append(server)
        return [stepper for steppers in self._steppers for stepper in steppers]

    def _make_keys(self, device: int, run_key: Key, first_index: int, iteration: int) -> np.ndarray:
        """Return the data of the keys [T, B] to act with in an iteration on a device: those of a fused rollout."""
        return np.asarray(self._key_data[device](run_key, np.int32(iteration), np.int32(first_index)))

    def _make_env(self, seed: int, first_index: int, failures: int) -> HostEnv:
        return self.env.make(self._placement.envs_per_worker, seed_after(seed, failures), first_index)

    def _take(self, number: int) -> tuple[list[Piece], int]:
        """Take a batch of rollouts of every device, copied to it."""
        pieces, dropped = [], 0
        for ring, server, steppers, device in zip(
            self._rings, self._servers, self._steppers, self.devices, strict=True
        ):
            watches = [self._watches[stepper] for stepper in steppers]
            piece, late = fresh(partial(take, ring.finished, watches), number, self._placement.max_lag, ring.release)
            dropped += late
            # A copy: the place in the ring is written again.
            trajectory = jax.block_until_ready(jax.device_put(piece.trajectory, device, may_alias=False))
            ring.release()
            served = server.story()
            each = self._placement.envs_per_worker
            most = {
                "inference_wait_max": served.wait_max,
                "inference_batch_mean": each * served.requests / max(served.batches, 1),
            }
            sums = {"server_seconds": served.seconds}
            pieces.append(Piece(trajectory, piece.version, piece.sums | sums, piece.most | most))
        return pieces, dropped

    def explain(self) -> Explanation:
        """Say in a table and a drawing who runs where, and how many bytes move in an update."""
        workers = self.sizes.num_envs // self._placement.envs_per_worker
        shares = [numbers(i * self._share, self._share) for i in range(len(self.devices))]
        return self._placement._explain(str(workers), self.devices, shares, self.bytes_per_update())

    def bytes_per_update(self) -> dict[str, int]:
        """Return what moves in an update, from the shapes that are compiled for; padding is left out."""
        params = jax.eval_shape(self.agent.actor, self.abstract_state().agent)
        acting = inference.bytes_moved(self._acting, params)
        learning = self._bytes_learning([None] * self._own_envs)
        return {name: number * len(self.devices) for name, number in acting.items()} | learning
