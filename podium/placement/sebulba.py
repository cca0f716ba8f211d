"""Sebulba (Hessel et al. 2021, Podracer): actor devices serve environments on the CPU, learner devices learn.

Threads step host environments and act on the actor devices; their trajectories wait in bounded queues; one program over
the mesh of learner devices learns from all of them as one global batch, and publishes its parameters to the actors.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from podium import distributed, keys
from podium.agent import Agent, nearest_multiples
from podium.env import Env
from podium.host import HostEnvs, on_host
from podium.networks import batch_groups
from podium.placement import program
from podium.placement.actors import (
    STOP_SECONDS,
    Acting,
    Actor,
    Compiled,
    Piece,
    Slot,
    complete,
    end_threads,
    make_actors,
)
from podium.placement.devices import Devices, resolve_devices
from podium.placement.explanation import Explanation
from podium.placement.program import RunState, Sizes
from podium.placement.table import Move, Role, device_name, nbytes, numbers
from podium.types import EnvSpec, Key, Metrics, PyTree, Trajectory


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
      groups: batches that a thread's environments form: one steps while another is acted for.
      queue_depth: rollouts of a thread that may wait for the learner.
      max_lag: a rollout whose parameters are more than so many updates old is dropped; None keeps all.
      lockstep: each rollout waits for the parameters of the update before it, as if fused.
      actor_timeout: seconds without a step after which a thread counts as hung and the run ends.
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
        envs = env if isinstance(env, HostEnvs) else on_host(env)
        actors, learners = self.devices()
        threads = distributed.num_processes() * len(actors) * self.actor_threads
        per_thread = self._envs_per_thread(num_envs, threads, len(learners))
        groups = min(self.groups, per_thread)
        if per_thread % groups:
            raise ValueError(f"groups={groups} does not divide the {per_thread} environments of a thread; use 1.")
        lanes = _choose_lanes(agent, envs.spec, num_envs, rollout_length, len(learners), num_lanes)
        sizes = Sizes(num_envs, rollout_length, 1, lanes)
        return SebulbaProgram(self, agent, envs, sizes, actors, learners, per_thread // groups, groups)

    def devices(self) -> tuple[list[jax.Device], list[jax.Device]]:
        """Return the devices that act, of this process, and those that learn, of all processes."""
        acting, learning = (1 if given is None else given for given in (self.actor_devices, self.learner_devices))
        if not isinstance(acting, int) or not isinstance(learning, int):
            return resolve_devices(acting), resolve_devices(learning)
        apart = acting + learning <= len(jax.local_devices())
        number = acting + learning if apart else max(acting, learning)
        available = resolve_devices(number)
        own = [available[i : i + number] for i in range(0, len(available), number)]
        first = acting if apart else 0
        learners = [device for devices in own for device in devices[first : first + learning]]
        return own[distributed.process_id()][:acting], learners

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
        roles = [Role("environments", "host CPU", f"{threads}, up to {self.groups} groups in each")]
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
        if self.max_lag is not None and (not isinstance(self.max_lag, int) or self.max_lag < 0):
            raise ValueError(f"max_lag={self.max_lag!r} must be an integer of 0 or more; leave it out to keep all.")
        if not self.actor_timeout > 0:
            raise ValueError(f"actor_timeout={self.actor_timeout!r} must be greater than 0 seconds; 60 is usual.")

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


class SebulbaProgram:
    """The threads and the learner's program for one agent, one task and one set of sizes; a `Program`."""

    def __init__(
        self,
        placement: Sebulba,
        agent: Agent,
        envs: HostEnvs,
        sizes: Sizes,
        actor_devices: list[jax.Device],
        learner_devices: list[jax.Device],
        group_size: int,
        groups: int,
    ):
        self.agent, self.env, self.sizes, self.devices = agent, envs, sizes, learner_devices
        self.compile_seconds = 0.0
        self._placement, self._actor_devices = placement, actor_devices
        self._acting = Acting(agent, envs.spec, group_size, sizes.rollout_length, envs.resets_in_next_step)
        self._groups = groups
        self._own_envs = sizes.num_envs // distributed.num_processes()
        self._own_devices = [device for device in learner_devices if device.process_index == jax.process_index()]
        self._mesh = Mesh(np.array(learner_devices), ("env",), axis_types=(AxisType.Auto,))
        self._shardings = jax.tree.map(
            lambda spec: NamedSharding(self._mesh, spec), self._partition(), is_leaf=lambda x: isinstance(x, P)
        )
        self._lowered: Any = None
        self._compiled: Any = None
        self._actors: list[Actor] = []
        self._slots = [Slot() for _ in actor_devices]
        self._stop = threading.Event()
        self._seed: int | None = None

    def init(self, seed: int) -> RunState:
        """Return the first state."""
        self._seed = seed
        return program.run_once(self._start, self._shardings)(jax.random.key(seed))

    def _start(self, key: Key) -> RunState:
        roots = keys.roots(key)
        state = self.agent.init(roots.agent, self.env.spec)
        step = lambda: complete(_zero_trajectory(self.agent, self._acting, 1, 1))  # noqa: E731
        replay = program.empty_replay(self.agent, self.sizes, lambda key: self.agent.plan(key, state, step()))
        return RunState(roots.run, jnp.zeros((), jnp.int32), state, replay, ())

    def abstract_state(self) -> RunState:
        """Return the state's shapes, dtypes and shardings."""
        shapes = jax.eval_shape(self._start, jax.random.key(0))
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, self._shardings)

    def _partition(self) -> RunState:
        shapes = jax.eval_shape(self._start, jax.random.key(0))
        split = lambda tree: jax.tree.map(lambda x: P("env") if x.ndim else P(), tree)  # noqa: E731
        once: Any = P()
        return RunState(once, once, jax.tree.map(lambda x: P(), shapes.agent), split(shapes.replay), ())

    def _update(self, state: RunState, trajectory: Trajectory) -> tuple[RunState, Metrics, PyTree]:
        learn_key, trajectory = keys.iteration(state.key, state.update).learn, complete(trajectory)
        with batch_groups(len(self.devices)):
            learned = program.make_learn(self.agent, self.sizes)(learn_key, state.agent, state.replay, trajectory)
        following = RunState(state.key, state.update + 1, learned.state, learned.replay, ())
        finite = program.chunk_finite(following, program.rollout_finite(self.agent, trajectory))
        return following, {**learned.metrics, "finite": finite}, self.agent.actor(learned.state)

    def lower(self) -> Any:
        """Trace learning, once, without compiling it."""
        if self._lowered is not None:
            return self._lowered
        began = time.perf_counter()
        everywhere = NamedSharding(self._mesh, P())
        trajectory = self._abstract_trajectory()
        self._spread_shardings = self._spread(trajectory)
        update = jax.jit(
            self._update,
            donate_argnums=0,
            in_shardings=(self._shardings, self._spread_shardings),
            out_shardings=(self._shardings, everywhere, everywhere),
        )
        self._lowered = update.lower(self.abstract_state(), trajectory)
        self.compile_seconds += time.perf_counter() - began
        return self._lowered

    def compile(self) -> None:
        """Trace and compile acting and learning, once."""
        if self._compiled is not None:
            return
        lowered = self.lower()
        began = time.perf_counter()
        self._compiled = lowered.compile()
        everywhere = NamedSharding(self._mesh, P())
        params = jax.eval_shape(self.agent.actor, self.abstract_state().agent)
        self._acting_on = [Compiled(self._acting, params, device) for device in self._actor_devices]
        self._publish_first = jax.jit(self.agent.actor, out_shardings=everywhere)
        self.compile_seconds += time.perf_counter() - began

    def _abstract_trajectory(self) -> Trajectory:
        sizes = self.sizes
        return jax.eval_shape(lambda: _zero_trajectory(self.agent, self._acting, sizes.rollout_length, sizes.num_envs))

    def _spread(self, trajectory: Trajectory) -> Trajectory:
        """Return the sharding of every leaf: environments lie along the mesh."""
        rows, by_env = NamedSharding(self._mesh, P(None, "env")), NamedSharding(self._mesh, P("env"))
        shardings: Any = jax.tree.map(lambda x: rows, trajectory)
        carries = {name: jax.tree.map(lambda x: by_env, getattr(trajectory, name)) for name in ("carry", "end_carry")}
        return shardings._replace(policy_version=NamedSharding(self._mesh, P()), **carries)

    def chunk(self, state: RunState, num_updates: int) -> tuple[RunState, Metrics]:
        """Do `num_updates` updates; consumes `state`; starts the actors when first called.

        Raises:
          ActorError: an actor thread died or hung.
        """
        self.compile()
        if not self._actors:
            self._begin(state)
        rows = []
        update = self.update_count(state)
        for number in range(update, update + num_updates):
            state, row = self._learn_once(state, number)
            rows.append(row)
        finite = np.stack([row.pop("finite") for row in rows]).all(axis=0)
        return state, {**jax.tree.map(lambda *x: np.stack(x), *rows), "finite": finite}

    def _learn_once(self, state: RunState, number: int) -> tuple[RunState, Metrics]:
        began = time.perf_counter()
        pieces, dropped = [], 0
        for actor in self._actors:
            piece = actor.take(self._placement.actor_timeout)
            while self._placement.max_lag is not None and number - piece.version > self._placement.max_lag:
                dropped += 1
                piece = actor.take(self._placement.actor_timeout)
            pieces.append(piece)
        # Device programs of several processes wait for each other without end; here a dead one is noticed.
        pieces_of_all, dropped = _tell(pieces, dropped)
        waited = time.perf_counter() - began
        oldest = min(piece.version for piece in pieces_of_all)
        state, metrics = self._update_once(state, pieces, oldest, number)
        wall = time.perf_counter() - began
        return state, {**metrics, **_account(pieces_of_all, number, wall, waited, dropped)}

    def _update_once(self, state: RunState, pieces: list[Piece], oldest: int, number: int) -> tuple[RunState, Metrics]:
        state, metrics, params = self._compiled(state, self._assemble(pieces, oldest))
        self._publish(params, number + 1)
        # Waiting here bounds the work in flight and makes the clock honest. Copied, because what a CPU gives are views
        # that hold the device's buffers, 160 kB an update, as long as a row of metrics lives.
        return state, jax.tree.map(np.array, jax.block_until_ready(metrics))

    def _begin(self, state: RunState) -> None:
        start = self.update_count(state)
        placement = self._placement
        seed = self._seed
        if seed is None:  # A run that goes on: its episodes begin anew, and not with those it began with.
            seed = int(jax.random.randint(jax.random.fold_in(distributed.local(state.key), start), (), 0, 2**31 - 1))
        self._actors = make_actors(
            self.env,
            self._acting_on,
            placement.actor_threads,
            self._groups,
            jax.device_get(distributed.local(state.key)),
            seed,
            start,
            self._slots,
            placement.lockstep,
            placement.queue_depth,
            self._stop,
            distributed.process_id() * self._own_envs,
        )
        self._publish(self._publish_first(state.agent), start)
        for actor in self._actors:
            actor.start()

    def _publish(self, params: PyTree, version: int) -> None:
        params = distributed.local(params)
        for slot, device in zip(self._slots, self._actor_devices, strict=True):
            # A copy of its own: what the learner donates must not be what an actor reads.
            slot.put(jax.block_until_ready(jax.device_put(params, device, may_alias=False)), version)

    def _assemble(self, pieces: list[Piece], oldest: int) -> Trajectory:
        """Join the trajectories, in the order of their environments, into one batch on the learners' mesh."""
        parts = [trajectory for piece in pieces for trajectory in piece.trajectories]
        share = self.sizes.num_envs // len(self.devices)
        size = self._acting.num_envs
        local = []
        for number, device in enumerate(self._own_devices):
            low, high = number * share, (number + 1) * share
            mine = []
            for i, part in enumerate(parts):
                a, b = max(low - i * size, 0), min(high - i * size, size)
                if a < b:
                    mine.append(jax.device_put(part if b - a == size else _cut(part, a, b), device))
            local.append(_join(mine) if len(mine) > 1 else mine[0])
        if len(self.devices) == 1:
            return jax.device_put(local[0], self._spread_shardings)

        def whole(sharding: NamedSharding, *shards: jax.Array) -> jax.Array:
            shape = list(shards[0].shape)
            if "env" in sharding.spec:
                shape[sharding.spec.index("env")] = self.sizes.num_envs
            return jax.make_array_from_single_device_arrays(tuple(shape), sharding, list(shards))

        # The version is the same everywhere, though some device may hold no rollout of the oldest.
        alike = [
            part._replace(policy_version=jax.device_put(np.int32(oldest), device))
            for part, device in zip(local, self._own_devices, strict=True)
        ]
        return jax.tree.map(whole, self._spread_shardings, *alike)

    def adopt(self, state: RunState, agent: PyTree, update: int) -> RunState:
        """Return the first state with the agent's State of another run; see `Program.adopt`."""
        return program.adopt(state, agent, update)

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
        acting, learners = self._acting, self.devices
        length, total = acting.length, self.sizes.num_envs
        state = self.abstract_state()
        params = jax.eval_shape(self.agent.actor, state.agent)
        step = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), jax.eval_shape(acting.blank, params))
        batches = total // acting.num_envs
        trajectory = self._abstract_trajectory()
        # What holds for one process holds for each.
        acted_for, learnt_from = self._own_envs // len(self._actor_devices), total // len(learners)
        pairs = [(i // acted_for, i // learnt_from) for i in range(self._own_envs)]
        moving = sum(self._actor_devices[actor] != self._own_devices[learner] for actor, learner in pairs)
        learnt = self.agent, self.sizes, state.agent, state.replay, jax.eval_shape(complete, trajectory)
        return {
            # What the last step returned goes up twice: into the rollout that ends, and into the one that begins.
            "observations": batches * ((length + 1) * nbytes((step.obs, step.result)) + length * nbytes(step.first)),
            "actions": batches * length * nbytes(step.action),
            "trajectories": (nbytes(trajectory) - nbytes(trajectory.policy_version)) * moving // self._own_envs,
            "parameters": nbytes(params) * len(self._actor_devices) * distributed.num_processes(),
            "gradient sums": program.gradient_bytes(*learnt) if len(learners) > 1 else 0,
        }

    def close(self) -> None:
        """End the threads; one that hangs in native code is left behind as a daemon."""
        end_threads(self._actors, self._stop, STOP_SECONDS)

    def agent_state(self, state: RunState) -> PyTree:
        """Return the agent's State within `state`."""
        return distributed.local(state.agent)

    def update_count(self, state: RunState) -> int:
        """Return the number of updates behind `state`."""
        return int(np.asarray(state.update))


def _tell(pieces: list[Piece], dropped: int) -> tuple[list[Piece], int]:
    """Return the pieces of all processes, without the trajectories of others, and how many rollouts all dropped."""
    if distributed.num_processes() == 1:
        return pieces, dropped
    told = distributed.gather({"pieces": [(piece.version, piece.sums) for piece in pieces], "dropped": dropped})
    everywhere = [Piece([], version, sums) for each in told for version, sums in each["pieces"]]
    return everywhere, sum(each["dropped"] for each in told)


def _account(pieces: list[Piece], number: int, wall: float, waited: float, dropped: int) -> dict[str, Any]:
    """Return what an update cost and how old its data were."""
    total = {name: sum(piece.sums[name] for piece in pieces) for name in pieces[0].sums}
    idle = total.pop("actor_idle_seconds")
    busy = total["env_seconds"] + total["inference_seconds"]
    lags = [number - piece.version for piece in pieces]
    row = {
        **total,
        "actor_idle": idle / max(idle + busy, 1e-9),
        "learner_idle": waited / max(wall, 1e-9),
        "learn_seconds": wall - waited,
        "policy_lag_mean": np.mean(lags),
        "policy_lag_max": np.max(lags),
        "dropped_batches": dropped,
    }
    return {name: np.float32(value) for name, value in row.items()}


def _by_axis(function: Callable[..., jax.Array], *trajectories: Trajectory) -> Trajectory:
    """Map `function(axis of the environments, *leaves)` over trajectories; the version stays the first one's."""
    fields = {}
    for name in Trajectory._fields:
        axis = 0 if name in ("carry", "end_carry") else 1
        values = [getattr(trajectory, name) for trajectory in trajectories]
        fields[name] = values[0] if name == "policy_version" else jax.tree.map(partial(function, axis), *values)
    return Trajectory(**fields)


def _cut_envs(trajectory: Trajectory, low: int, high: int) -> Trajectory:
    return _by_axis(lambda axis, x: jax.lax.slice_in_dim(x, low, high, axis=axis), trajectory)


def _join_envs(parts: list[Trajectory]) -> Trajectory:
    versions = jnp.stack([part.policy_version for part in parts])
    return _by_axis(lambda axis, *x: jnp.concatenate(x, axis), *parts)._replace(policy_version=versions.min())


_cut: Callable[..., Trajectory] = jax.jit(_cut_envs, static_argnums=(1, 2))
_join: Callable[..., Trajectory] = jax.jit(_join_envs)


def _zero_trajectory(agent: Agent, acting: Acting, length: int, num_envs: int) -> Trajectory:
    """Return a rollout of zeros as the actors hand it over."""
    acting = dataclasses.replace(acting, num_envs=num_envs, length=length)
    params = jax.eval_shape(lambda key: agent.actor(agent.init(key, acting.spec)), jax.random.key(0))
    rows, carry = acting.blank(params), acting.carry()
    came = jax.tree.map(lambda x: x[0], rows.result)
    obs = jax.tree.map(lambda x: x[0], rows.obs)
    return acting.finish(rows, came, obs, carry, carry, jnp.zeros((), jnp.int32))


def _choose_lanes(
    agent: Agent, spec: EnvSpec, num_envs: int, length: int, num_devices: int, requested: int | None
) -> int:
    acting = Acting(agent, spec, num_envs, length, True)

    def plan(key: Key) -> Any:
        trajectory = complete(_zero_trajectory(agent, acting, length, num_envs))
        return agent.plan(key, agent.init(key, spec), trajectory)

    shapes = jax.eval_shape(plan, jax.random.key(0))
    return program.lanes_of_plan(agent, shapes, num_envs, num_devices, requested)
