"""A replay in a place of its own: workers' rollouts go into it as they come, and learning draws from it as it likes.

Nothing ties an insertion to a gradient step but a limiter, which holds their ratio to that of the agent's replay.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from podium import keys
from podium.agent import Agent
from podium.learn import num_updates
from podium.networks import batch_groups
from podium.placement import program
from podium.placement.acting import SUMS, complete
from podium.placement.actors import ActorError, Piece, Watched, Working
from podium.placement.distributed_program import DistributedActorsProgram
from podium.placement.learner import account, join, zeros
from podium.placement.limiter import Limiter
from podium.placement.program import RunState, Sizes
from podium.placement.table import nbytes
from podium.types import Key, Metrics, PyTree, Trajectory


class Drawn(NamedTuple):
    """Shapes of what a replay gives: a minibatch, what tells where it is from; and how many an insertion is worth."""

    minibatch: PyTree
    indices: PyTree
    per_insertion: int


class Store:
    """The replay's state, which one at a time changes or reads.

    Args:
      agent: whose replay it is.
      sizes: of the run.
      state: of the agent, shapes.
      trajectory: of the whole batch as it travels, shapes.
    """

    def __init__(self, agent: Agent, sizes: Sizes, state: PyTree, trajectory: Trajectory):
        assert agent.replay is not None
        self._agent, self._replay, self._state, self._trajectory = agent, agent.replay, state, trajectory
        self._key = jax.eval_shape(lambda: jax.random.key(0))
        plan = lambda key: agent.plan(key, *zeros((state, jax.eval_shape(complete, trajectory))))  # noqa: E731
        self._empty = lambda: program.empty_replay(agent, sizes, plan)
        self._shape = jax.eval_shape(self._empty)
        count = num_updates(self._replay, jax.eval_shape(plan, self._key))
        minibatch, indices = jax.eval_shape(self._replay.sample, self._key, self._shape)
        self.drawn = Drawn(minibatch, indices, count)
        self._lock = threading.Lock()

    def open(self, device: jax.Device) -> None:
        """Compile for a device, and begin there with nothing in it."""
        here, replay = SingleDeviceSharding(device), self._replay
        jit = lambda function, **options: jax.jit(function, in_shardings=here, out_shardings=here, **options)  # noqa: E731

        def add(held: PyTree, key: Key, state: PyTree, trajectory: Trajectory) -> tuple[PyTree, Any]:
            held = replay.add(held, self._agent.plan(key, state, complete(trajectory)).data)
            return held, replay.can_sample(held)

        self._device = device
        self._held = jax.jit(self._empty, out_shardings=here)()
        self._add = jit(add, donate_argnums=0).lower(self._shape, self._key, self._state, self._trajectory).compile()
        self._sample = jit(replay.sample).lower(self._key, self._shape).compile()
        self._rank: Any = None
        if replay.update_priorities is not None:
            ranks = jax.ShapeDtypeStruct((replay.batch_size,), jnp.float32)
            rank = jit(replay.update_priorities, donate_argnums=0)
            self._rank = rank.lower(self._shape, self.drawn.indices, ranks).compile()

    def add(self, key: Key, state: PyTree, trajectory: Trajectory) -> bool:
        """Insert a batch of rollouts; returns whether the replay can be sampled now."""
        key, state = jax.device_put((key, state), self._device)
        with self._lock:
            self._held, ready = self._add(self._held, key, state, trajectory)
        return bool(ready)

    def sample(self, key: Key) -> tuple[PyTree, PyTree]:
        """Return a minibatch and where it is from."""
        with self._lock:
            return jax.block_until_ready(self._sample(jax.device_put(key, self._device), self._held))

    def rank(self, indices: PyTree, priorities: Any) -> None:
        """Give what was sampled new priorities, where the replay has any."""
        if self._rank is not None:
            priorities = jax.device_put(priorities, self._device)
            with self._lock:
                self._held = self._rank(self._held, indices, priorities)


class Inserted(NamedTuple):
    """A batch of rollouts that is in the replay, and what its workers told."""

    trajectory: Trajectory
    pieces: list[Piece]
    dropped: int


class Inserter(Working):
    """Puts rollouts into the replay as they come, as far as the limiter lets it.

    Args:
      take: waits for a batch of pieces, and says how many were dropped.
      insert: `(number, pieces) -> (trajectory, whether the replay can be sampled)`.
      limiter: of the replay.
      items: steps of a batch.
      start: number of the first batch.
      stop: set when the run is over.
    """

    def __init__(
        self,
        take: Callable[[], tuple[list[Piece], int]],
        insert: Callable[[int, list[Piece]], tuple[Trajectory, bool]],
        limiter: Limiter,
        items: int,
        start: int,
        stop: threading.Event,
    ):
        super().__init__("podium-inserter", stop)
        self.inserted: deque[Inserted] = deque()  # Until learning starts it takes one for every update.
        self.ready = False
        self._take, self._insert, self._limiter, self._items = take, insert, limiter, items
        self._number = start

    def _work(self) -> None:
        while True:
            pieces, dropped = self._take()
            self._limiter.insert(self._items, self._tick)
            trajectory, ready = self._insert(self._number, pieces)
            stories = [piece._replace(trajectories=[]) for piece in pieces]
            self.inserted.append(Inserted(trajectory, stories, dropped))
            self._number += 1
            if ready:
                self._limiter.open()
                self.ready = True
            self._tick()


class ReplayApartProgram(DistributedActorsProgram):
    """Workers, a replay apart and the learner's program for one agent, one task and one set of sizes; a `Program`."""

    def _start(self, key: Key) -> RunState:
        # What the replay holds is no part of the state: a run that goes on fills it again.
        roots = keys.roots(key)
        return RunState(roots.run, jnp.zeros((), jnp.int32), self.agent.init(roots.agent, self.env.spec), (), ())

    def _step(self, state: PyTree, key: Key, minibatch: PyTree) -> tuple[PyTree, Metrics, Any]:
        with batch_groups(len(self.devices)):
            grads, aux = self.agent.grad(key, state, minibatch)
        return self.agent.apply(state, grads), aux.metrics, aux.priorities

    def _observe(self, state: PyTree, trajectory: Trajectory) -> tuple[PyTree, Any]:
        trajectory = complete(trajectory)
        return self.agent.observe(state, trajectory), program.rollout_finite(self.agent, trajectory).all()

    def _plain_state(self) -> PyTree:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self.abstract_state().agent)

    def lower(self) -> Any:
        """Trace a gradient step, once, without compiling it."""
        if self._lowered is not None:
            return self._lowered
        began = time.perf_counter()
        agent, trajectory = self._plain_state(), self._abstract_trajectory()
        self._store = Store(self.agent, self.sizes, agent, trajectory)
        self._spread_shardings = self._spread(trajectory)
        everywhere, split = NamedSharding(self._mesh, P()), NamedSharding(self._mesh, P("env"))
        held = self._shardings.agent
        self._minibatch_shardings = jax.tree.map(lambda x: split, self._store.drawn.minibatch)
        # Nothing is donated: the inserter plans by the newest state, whenever it likes.
        step = jax.jit(
            self._step,
            in_shardings=(held, everywhere, self._minibatch_shardings),
            out_shardings=(held, everywhere, everywhere),
        )
        key = jax.eval_shape(lambda: jax.random.key(0))
        self._lowered = step.lower(agent, key, self._store.drawn.minibatch)
        self._metrics = jax.eval_shape(self._step, agent, key, self._store.drawn.minibatch)[1]
        observe = jax.jit(self._observe, in_shardings=(held, self._spread_shardings), out_shardings=(held, everywhere))
        self._lowered_observe = observe.lower(agent, trajectory)
        self.compile_seconds += time.perf_counter() - began
        return self._lowered

    def _compile_players(self, params: PyTree) -> None:
        super()._compile_players(params)
        self._compiled_observe = self._lowered_observe.compile()
        self._all_finite = jax.jit(program.all_finite)
        self._store.open(self._replay_device())

    def _replay_device(self) -> jax.Device:
        return self._placement.replay_device or self.devices[0]

    def _begin(self, state: RunState) -> None:
        self._newest, self._published = state.agent, self.update_count(state)
        super()._begin(state)

    def _make_threads(self, run_key: Key, seed: int, start: int) -> Sequence[Watched]:
        assert self.agent.replay is not None
        items, batch = self.sizes.steps_per_update, self.agent.replay.batch_size
        per_update = self._store.drawn.per_insertion * batch
        tolerance = max(self._placement.replay_tolerance * per_update, (batch + per_update) / 2)
        self._limiter = Limiter(per_update / items, tolerance, self._placement.worker_timeout)
        take = lambda: self._take(self._published)  # noqa: E731
        insert = lambda number, pieces: self._insert(run_key, number, pieces)  # noqa: E731
        self._inserter = Inserter(take, insert, self._limiter, items, start, self._stop)
        return [*super()._make_threads(run_key, seed, start), self._inserter]

    def _insert(self, run_key: Key, number: int, pieces: list[Piece]) -> tuple[Trajectory, bool]:
        parts = [jax.device_put(part, self._replay_device()) for piece in pieces for part in piece.trajectories]
        trajectory = join(parts)
        plan_key = jax.random.split(keys.iteration(run_key, jnp.int32(number)).learn)[0]
        return trajectory, self._store.add(plan_key, self._newest, trajectory)

    def _learn_once(self, state: RunState, number: int) -> tuple[RunState, Metrics]:
        began = time.perf_counter()
        agent, finite = state.agent, True
        rows: list[Metrics] = []
        seen: list[Inserted] = []
        waited = self._wait_for_more()
        fold_key = jax.random.split(keys.iteration(state.key, state.update).learn)[1]
        for step in range(self._store.drawn.per_insertion if self._inserter.ready else 0):
            agent, metrics, seconds = self._gradient_step(agent, jax.random.fold_in(fold_key, step))
            rows.append(metrics)
            waited += seconds
        # Before learning starts every update is of one insertion; then of as many as there were meanwhile.
        while self._inserter.inserted and (rows or not seen):
            seen.append(self._inserter.inserted.popleft())
            trajectory = jax.device_put(seen[-1].trajectory, self._spread_shardings)
            agent, good = self._compiled_observe(agent, trajectory)
            finite = finite and bool(good)
        self._newest, self._published = jax.block_until_ready(agent), number + 1
        self._publish(self._publish_first(agent), number + 1)
        wall, dropped = time.perf_counter() - began, sum(batch.dropped for batch in seen)
        pieces = [piece for batch in seen for piece in batch.pieces]
        story = account(pieces or [Piece([], number, _NOTHING)], number, wall, waited, dropped)
        if not pieces:
            story |= dict.fromkeys(("policy_lag_mean", "policy_lag_max", "actor_idle"), np.float32(np.nan))
        row = {
            **self._mean(rows),
            **story,
            "replay_balance": np.float32(self._limiter.balance),
            "finite": np.array([bool(self._all_finite(agent)), finite]),
        }
        return state._replace(update=state.update + 1, agent=agent), row

    def _wait_for_more(self) -> float:
        """Wait, until the replay can be sampled, for an insertion; returns the seconds."""
        began = time.perf_counter()
        while not self._inserter.ready and not self._inserter.inserted:
            time.sleep(0.002)
            self._look()
        return time.perf_counter() - began

    def _gradient_step(self, agent: PyTree, key: Key) -> tuple[PyTree, Metrics, float]:
        assert self.agent.replay is not None
        sample_key, grad_key = jax.random.split(key)
        waited = self._limiter.sample(self.agent.replay.batch_size, self._look)
        minibatch, indices = self._store.sample(sample_key)
        minibatch = jax.device_put(minibatch, self._minibatch_shardings)
        agent, metrics, priorities = self._compiled(agent, grad_key, minibatch)
        self._store.rank(indices, priorities)
        return agent, metrics, waited

    def _mean(self, rows: list[Metrics]) -> dict[str, np.ndarray]:
        """Return the mean over gradient steps; NaN where there were none, which the host loop leaves out."""
        if not rows:
            return {name: np.full(x.shape, np.nan, np.float32) for name, x in self._metrics.items()}
        return {name: np.mean([np.array(row[name]) for row in rows], axis=0) for name in rows[0]}

    def _look(self) -> None:
        """Raise for a dead or hung worker, which the inserter notices, or inserter."""
        if isinstance(self._inserter.error, ActorError):
            raise self._inserter.error
        self._watches[self._inserter].look(self._inserter.is_alive())

    def bytes_per_update(self) -> dict[str, int]:
        """Return what moves in an update, from the shapes that are compiled for; single numbers are left out."""
        self.lower()
        drawn, trajectory = self._store.drawn, self._abstract_trajectory()
        moved = self._acting_bytes()
        away = sum(device != self._replay_device() for device in self._on_worker())
        apart = [self._replay_device()] != self.devices
        gradient = jax.eval_shape(self.agent.grad, jax.random.key(0), self._plain_state(), drawn.minibatch)[0]
        return moved | {
            "trajectories": (nbytes(trajectory) - nbytes(trajectory.policy_version)) * away // self._own_envs,
            "minibatches": drawn.per_insertion * nbytes(drawn.minibatch) if apart else 0,
            "parameters": self._parameter_bytes(),
            "gradient sums": drawn.per_insertion * nbytes(gradient) if len(self.devices) > 1 else 0,
        }


_NOTHING = dict.fromkeys((*SUMS, "actor_idle_seconds", "dropped_rollouts"), 0.0)
