"""The learner of every placement whose rollouts come from elsewhere: one program that learns from all as one batch."""

from __future__ import annotations

import abc
import functools
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from podium import distributed, keys
from podium.agent import Agent
from podium.env import Env
from podium.networks import batch_groups
from podium.placement import program
from podium.placement.acting import Acting, Fused, complete
from podium.placement.actors import STOP_SECONDS, Piece, Slot, Watch, Watched, end_threads
from podium.placement.devices import keep_freed_memory, make_mesh
from podium.placement.program import RunState, Sizes
from podium.placement.table import nbytes
from podium.types import EnvSpec, Key, Metrics, PyTree, Trajectory

Shapes = Callable[[int, int], Trajectory]
"""`(T, B) -> Trajectory` of shapes, as rollouts travel."""


class LearnerProgram(abc.ABC):
    """A `Program`, but for who plays, and how rollouts get here.

    Args:
      agent: to train.
      env: of the players.
      sizes: of the whole.
      shapes: of rollouts as they travel.
      part: environments of a piece.
      learner_devices: of all processes.
      actor_devices: of this process; parameters go to each of them.
      timeout: seconds without progress after which a thread counts as hung.
    """

    def __init__(
        self,
        agent: Agent,
        env: Any,
        sizes: Sizes,
        shapes: Shapes,
        part: int,
        learner_devices: list[jax.Device],
        actor_devices: list[jax.Device],
        timeout: float,
    ):
        self.agent, self.env, self.sizes, self.devices = agent, env, sizes, learner_devices
        self.compile_seconds = 0.0
        self._shapes, self._part, self._actor_devices, self._timeout = shapes, part, actor_devices, timeout
        self._own_envs = sizes.num_envs // distributed.num_processes()
        self._own_devices = [device for device in learner_devices if device.process_index == jax.process_index()]
        self._mesh = make_mesh(learner_devices, "env")
        self._shardings = jax.tree.map(
            lambda spec: NamedSharding(self._mesh, spec), self._partition(), is_leaf=lambda x: isinstance(x, P)
        )
        self._lowered: Any = None
        self._compiled: Any = None
        self._threads: Sequence[Watched] = ()
        self._watches: dict[Watched, Watch] = {}
        self._slots = [Slot() for _ in actor_devices]
        self._stop = threading.Event()
        self._seed: int | None = None

    @abc.abstractmethod
    def _compile_players(self, params: PyTree) -> None:
        """Compile what acts; `params` are shapes of the parameters."""

    @abc.abstractmethod
    def _make_threads(self, run_key: Key, seed: int, start: int) -> Sequence[Watched]:
        """Return the threads that play from iteration `start` on, not started; `run_key` is on the host."""

    @abc.abstractmethod
    def _take(self, number: int) -> tuple[list[Piece], int]:
        """Wait for the pieces of update `number`, in their order in it; return them and how many were dropped as old.

        Raises:
          ActorError: a thread died or hung.
        """

    def init(self, seed: int) -> Any:
        """Return the first state."""
        self._seed = seed
        return program.run_once(self._start, self._shardings)(jax.random.key(seed))

    def _start(self, key: Key) -> Any:
        return start(key, self.agent, self.env.spec, self.sizes, self._shapes)

    @functools.cached_property
    def _start_shapes(self) -> Any:
        return jax.eval_shape(self._start, jax.random.key(0))

    def abstract_state(self) -> Any:
        """Return the state's shapes, dtypes and shardings."""
        place = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)  # noqa: E731
        return jax.tree.map(place, self._start_shapes, self._shardings)

    def _partition(self) -> Any:
        shapes = self._start_shapes
        split = lambda tree: jax.tree.map(lambda x: P("env") if x.ndim else P(), tree)  # noqa: E731
        once: Any = P()
        return RunState(once, once, jax.tree.map(lambda x: P(), shapes.agent), split(shapes.replay), ())

    def _update(self, state: Any, trajectory: Trajectory) -> tuple[Any, Metrics, PyTree]:
        learn_key, trajectory = keys.iteration(state.key, state.update).learn, complete(trajectory)
        with batch_groups(len(self.devices)):
            learned = program.make_learn(self.agent, self.sizes)(learn_key, state.agent, state.replay, trajectory)
        following = RunState(state.key, state.update + 1, learned.state, learned.replay, ())
        finite = program.chunk_finite(following.agent, program.rollout_finite(self.agent, trajectory))
        return following, {**learned.metrics, "finite": finite}, self._to_publish(following)

    def _to_publish(self, state: Any) -> PyTree:
        """Return the parameters that are acted with after this state."""
        return self.agent.actor(state.agent)

    @property
    def _published_where(self) -> NamedSharding:
        """How they lie on the mesh."""
        return NamedSharding(self._mesh, P())

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
            out_shardings=(self._shardings, everywhere, self._published_where),
        )
        self._lowered = update.lower(self.abstract_state(), trajectory)
        self.compile_seconds += time.perf_counter() - began
        return self._lowered

    def compile(self) -> None:
        """Trace and compile acting and learning, once."""
        if self._compiled is not None:
            return
        lowered = self.lower()
        keep_freed_memory(self.devices[0])
        began = time.perf_counter()
        self._compiled = lowered.compile()
        params = jax.eval_shape(self.agent.actor, self.abstract_state().agent)
        self._compile_players(params)
        self._compiled_to_publish = jax.jit(self._to_publish, out_shardings=self._published_where)
        self.compile_seconds += time.perf_counter() - began

    def _abstract_trajectory(self) -> Trajectory:
        return self._shapes(self.sizes.rollout_length, self.sizes.num_envs)

    def _spread(self, trajectory: Trajectory) -> Trajectory:
        """Return the sharding of every leaf: environments lie along the mesh."""
        rows, by_env = NamedSharding(self._mesh, P(None, "env")), NamedSharding(self._mesh, P("env"))
        shardings: Any = jax.tree.map(lambda x: rows, trajectory)
        carries = {name: jax.tree.map(lambda x: by_env, getattr(trajectory, name)) for name in ("carry", "end_carry")}
        return shardings._replace(policy_version=NamedSharding(self._mesh, P()), **carries)

    def chunk(self, state: Any, num_updates: int) -> tuple[Any, Metrics]:
        """Do `num_updates` updates; consumes `state`; starts the actors when first called.

        Raises:
          ActorError: an actor thread died or hung.
        """
        self.compile()
        if not self._threads:
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
        pieces, dropped = self._take(number)
        # Device programs of several processes wait for each other without end; here a dead one is noticed.
        pieces_of_all, dropped = _tell(pieces, dropped)
        waited = time.perf_counter() - began
        oldest = min(piece.version for piece in pieces_of_all)
        state, metrics = self._update_once(state, pieces, oldest, number)
        wall = time.perf_counter() - began
        return state, {**metrics, **account(pieces_of_all, number, wall, waited, dropped)}

    def _update_once(self, state: RunState, pieces: list[Piece], oldest: int, number: int) -> tuple[RunState, Metrics]:
        state, metrics, params = self._compiled(state, self._assemble(pieces, oldest))
        self._publish(params, number + 1)
        # Waiting here bounds the work in flight and makes the clock honest. Copied, because what a CPU gives are views
        # that hold the device's buffers, 160 kB an update, as long as a row of metrics lives.
        return state, jax.tree.map(np.array, jax.block_until_ready(metrics))

    def _begin(self, state: Any) -> None:
        start, run_key = self.update_count(state), jax.device_get(distributed.local(state.key))
        # A run that goes on: its episodes begin anew, and not with those it began with.
        seed = self._seed if self._seed is not None else seed_at(run_key, start)
        self._threads = self._make_threads(run_key, seed, start)
        self._publish(self._compiled_to_publish(state), start)
        self._watches = {thread: Watch(thread, self._timeout) for thread in self._threads}
        for thread in self._threads:
            thread.start()

    def _publish(self, params: PyTree, version: int) -> None:
        params = distributed.local(params)
        for slot, device in zip(self._slots, self._actor_devices, strict=True):
            # A copy of its own: what the learner donates must not be what an actor reads.
            slot.put(jax.block_until_ready(jax.device_put(params, device, may_alias=False)), version)

    def _assemble(self, pieces: list[Piece], oldest: int) -> Trajectory:
        """Join the trajectories, in the order of their environments, into one batch on the learners' mesh."""
        parts = [piece.trajectory for piece in pieces]
        share = self.sizes.num_envs // len(self.devices)
        size, local = self._part, []
        for number, device in enumerate(self._own_devices):
            low, high = number * share, (number + 1) * share
            mine = []
            for i, part in enumerate(parts):
                a, b = max(low - i * size, 0), min(high - i * size, size)
                if a < b:
                    mine.append(jax.device_put(part if b - a == size else _cut(part, a, b), device))
            local.append(join(mine) if len(mine) > 1 else mine[0])
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

    def adopt(self, state: Any, agent: PyTree, update: int) -> Any:
        """Return the first state with the agent's State of another run; see `Program.adopt`."""
        return program.adopt(state, agent, update)

    def _parameter_bytes(self) -> int:
        """Return the bytes of the parameters that go to all actor devices."""
        params = jax.eval_shape(self.agent.actor, self.abstract_state().agent)
        return nbytes(params) * len(self._actor_devices) * distributed.num_processes()

    def _bytes_learning(self, acted_on: list[jax.Device | None]) -> dict[str, int]:
        """Return what learning moves in an update, from shapes; single numbers are left out.

        Args:
          acted_on: for each environment of this process, the device that its rollout comes from; None is the host.
        """
        state, trajectory = self.abstract_state(), self._abstract_trajectory()
        learnt_from = self.sizes.num_envs // len(self.devices)
        # What holds for one process holds for each.
        moving = sum(device != self._own_devices[i // learnt_from] for i, device in enumerate(acted_on))
        learnt = self.agent, self.sizes, state.agent, state.replay, jax.eval_shape(complete, trajectory)
        return {
            "trajectories": (nbytes(trajectory) - nbytes(trajectory.policy_version)) * moving // self._own_envs,
            "parameters": self._parameter_bytes(),
            "gradient sums": program.gradient_bytes(*learnt) if len(self.devices) > 1 else 0,
        }

    def close(self) -> None:
        """End the threads; one that hangs in native code is left behind as a daemon."""
        end_threads(self._threads, self._stop, STOP_SECONDS)

    def agent_state(self, state: RunState) -> PyTree:
        """Return the agent's State within `state`."""
        return distributed.local(state.agent)

    def update_count(self, state: RunState) -> int:
        """Return the number of updates behind `state`."""
        return int(np.asarray(state.update))


def start(key: Key, agent: Agent, spec: EnvSpec, sizes: Sizes, shapes: Shapes) -> RunState:
    """Return the first state of a run whose environments are no part of it."""
    roots = keys.roots(key)
    state = agent.init(roots.agent, spec)
    step = lambda: complete(zeros(shapes(1, 1)))  # noqa: E731
    replay = program.empty_replay(agent, sizes, lambda key: agent.plan(key, state, step()))
    return RunState(roots.run, jnp.zeros((), jnp.int32), state, replay, ())


def seed_at(run_key: Key, update: int) -> int:
    """Return the seed of episodes that begin after so many updates."""
    return int(jax.random.randint(jax.random.fold_in(run_key, update), (), 0, 2**31 - 1))


def fresh(
    take: Callable[[], Piece], number: int, max_lag: int | None, drop: Callable[[], None] = lambda: None
) -> tuple[Piece, int]:
    """Take pieces until one is at most `max_lag` updates old at update `number`; also return how many were not.

    `drop` is called after each that was not.
    """
    dropped = 0
    while True:
        piece = take()
        if max_lag is None or number - piece.version <= max_lag:
            return piece, dropped
        drop()
        dropped += 1


def _tell(pieces: list[Piece], dropped: int) -> tuple[list[Piece], int]:
    """Return the pieces of all processes, without the trajectories of others, and how many rollouts all dropped."""
    if distributed.num_processes() == 1:
        return pieces, dropped
    mine = [(piece.version, piece.sums, piece.most) for piece in pieces]
    told = distributed.gather({"pieces": mine, "dropped": dropped})
    everywhere = [Piece(None, *story) for each in told for story in each["pieces"]]
    return everywhere, sum(each["dropped"] for each in told)


def account(pieces: list[Piece], number: int, wall: float, waited: float, dropped: int) -> dict[str, Any]:
    """Return what an update cost and how old its data were."""
    total = {name: sum(piece.sums[name] for piece in pieces) for name in pieces[0].sums}
    idle = total.pop("actor_idle_seconds")
    busy = total["env_seconds"] + total["inference_seconds"]
    lags = [number - piece.version for piece in pieces]
    row = {
        **total,
        **{name: max(piece.most[name] for piece in pieces) for name in pieces[0].most},
        "actor_idle": idle / max(idle + busy, 1e-9),
        "learner_idle": waited / max(wall, 1e-9),
        "learn_seconds": wall - waited,
        "policy_lag_mean": np.mean(lags),
        "policy_lag_max": np.max(lags),
        "dropped_batches": dropped,
    }
    return {name: np.float32(value) for name, value in row.items()}


def by_axis(function: Callable[..., jax.Array], *trajectories: Trajectory) -> Trajectory:
    """Map `function(axis of the environments, *leaves)` over trajectories; the version stays the first one's."""
    fields = {}
    for name in Trajectory._fields:
        axis = 0 if name in ("carry", "end_carry") else 1
        values = [getattr(trajectory, name) for trajectory in trajectories]
        fields[name] = values[0] if name == "policy_version" else jax.tree.map(partial(function, axis), *values)
    return Trajectory(**fields)


def _cut_envs(trajectory: Trajectory, low: int, high: int) -> Trajectory:
    return by_axis(lambda axis, x: jax.lax.slice_in_dim(x, low, high, axis=axis), trajectory)


def _join_envs(parts: list[Trajectory]) -> Trajectory:
    versions = jnp.stack([part.policy_version for part in parts])
    return by_axis(lambda axis, *x: jnp.concatenate(x, axis), *parts)._replace(policy_version=versions.min())


_cut: Callable[..., Trajectory] = jax.jit(_cut_envs, static_argnums=(1, 2))
join: Callable[..., Trajectory] = jax.jit(_join_envs)


def zeros(shapes: PyTree) -> Any:
    """Return zeros of these shapes."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def host_shapes(agent: Agent, spec: EnvSpec, resets_in_next_step: bool) -> Shapes:
    """Return the shapes of rollouts of host environments."""

    def shapes(length: int, num_envs: int) -> Trajectory:
        acting = Acting(agent, spec, num_envs, length, resets_in_next_step)

        def blank() -> Trajectory:
            return acting.blank_trajectory(agent.actor(agent.init(jax.random.key(0), spec)))

        return jax.eval_shape(blank)

    return shapes


def fused_shapes(agent: Agent, env: Env) -> Shapes:
    """Return the shapes of rollouts of pure environments that reset themselves."""
    return lambda length, num_envs: Fused(agent, env, num_envs, length).trajectory()


def choose_lanes(
    agent: Agent, spec: EnvSpec, shapes: Shapes, num_envs: int, length: int, num_devices: int, requested: int | None
) -> int:
    """Choose the lanes for these sizes; see `podium.learn.choose_lanes`."""

    def plan(key: Key) -> Any:
        return agent.plan(key, agent.init(key, spec), complete(zeros(shapes(length, num_envs))))

    plan_shapes = jax.eval_shape(plan, jax.random.key(0))
    return program.lanes_of_plan(agent, plan_shapes, num_envs, num_devices, requested)
