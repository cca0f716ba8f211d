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
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from podium import keys
from podium.agent import Plan
from podium.networks import batch_groups
from podium.placement import program
from podium.placement.acting import complete
from podium.placement.actors import ActorError, Piece, Watched, Working
from podium.placement.devices import jit
from podium.placement.distributed_program import DistributedActorsProgram
from podium.placement.engine import Engine, resolve_engine
from podium.placement.learner import account, join
from podium.placement.limiter import Limiter
from podium.placement.players import SUMS
from podium.placement.program import RunState
from podium.placement.replay_store import SharedStore, StoreFragment
from podium.placement.table import nbytes
from podium.types import Key, Metrics, PyTree, Trajectory


class Inserted(NamedTuple):
    """A batch of rollouts that is in the replay, and what its workers told."""

    trajectory: Trajectory
    pieces: list[Piece]
    dropped: int


class Inserter(Working):
    """Puts rollouts into the replay as they come, as far as the limiter lets it.

    Args:
      take: waits for a batch of pieces, and says how many were dropped.
      insert: `(number, pieces, waiting) -> (trajectory, whether the replay can be sampled)`.
      limiter: of the replay.
      items: steps of a batch.
      start: number of the first batch.
      stop: set when the run is over.
    """

    def __init__(
        self,
        take: Callable[[], tuple[list[Piece], int]],
        insert: Callable[[int, list[Piece], Callable[[], None]], tuple[Trajectory, bool]],
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
            trajectory, ready = self._insert(self._number, pieces, self._tick)
            stories = [piece._replace(trajectory=None) for piece in pieces]
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

    def _plan(self, key: Key, state: PyTree, trajectory: Trajectory) -> Plan:
        return self.agent.plan(key, state, complete(trajectory))

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
        key = jax.eval_shape(lambda: jax.random.key(0))
        # Planned where rollouts come to, so that the State travels nowhere.
        data = lambda *arguments: self._plan(*arguments).data  # noqa: E731
        self._lowered_plan = jit(data, self._planning_device).lower(key, agent, trajectory)
        plan = jax.eval_shape(self._plan, key, agent, trajectory)
        there = None if self._replay_engine.apart else self._planning_device
        self._fragment = StoreFragment(self.agent, self.sizes, plan, there)
        self._drawn = self._fragment.drawn()
        self._spread_shardings = self._spread(trajectory)
        everywhere, split = NamedSharding(self._mesh, P()), NamedSharding(self._mesh, P("env"))
        held = self._shardings.agent
        self._minibatch_shardings = jax.tree.map(lambda x: split, self._drawn.minibatch)
        # Nothing is donated: the inserter plans by the newest state, whenever it likes.
        step = jax.jit(
            self._step,
            in_shardings=(held, everywhere, self._minibatch_shardings),
            out_shardings=(held, everywhere, everywhere),
        )
        self._lowered = step.lower(agent, key, self._drawn.minibatch)
        self._metrics = jax.eval_shape(self._step, agent, key, self._drawn.minibatch)[1]
        observe = jax.jit(self._observe, in_shardings=(held, self._spread_shardings), out_shardings=(held, everywhere))
        self._lowered_observe = observe.lower(agent, trajectory)
        self.compile_seconds += time.perf_counter() - began
        return self._lowered

    def _compile_players(self, params: PyTree) -> None:
        super()._compile_players(params)
        self._compiled_observe = self._lowered_observe.compile()
        self._all_finite = jax.jit(program.all_finite)
        self._compiled_plan = self._lowered_plan.compile()
        self._store = SharedStore(self._replay_engine, self._fragment, self._placement.worker_timeout)

    @property
    def _replay_engine(self) -> Engine:
        return resolve_engine(self._placement.replay_engine)

    @property
    def _planning_device(self) -> jax.Device:
        """The device that holds the replay, if it is one of this process."""
        return self._placement.replay_device or self.devices[0]

    def _begin(self, state: RunState) -> None:
        self._newest, self._published = state.agent, self.update_count(state)
        super()._begin(state)

    def _make_threads(self, run_key: Key, seed: int, start: int) -> Sequence[Watched]:
        assert self.agent.replay is not None
        items, batch = self.sizes.steps_per_update, self.agent.replay.batch_size
        per_update = self._drawn.per_insertion * batch
        tolerance = max(self._placement.replay_tolerance * per_update, (batch + per_update) / 2)
        self._limiter = Limiter(per_update / items, tolerance, self._placement.worker_timeout)
        take = lambda: self._take(self._published)  # noqa: E731
        insert = lambda *arguments: self._insert(run_key, *arguments)  # noqa: E731
        self._inserter = Inserter(take, insert, self._limiter, items, start, self._stop)
        return [*super()._make_threads(run_key, seed, start), self._inserter]

    def _insert(
        self, run_key: Key, number: int, pieces: list[Piece], waiting: Callable[[], None]
    ) -> tuple[Trajectory, bool]:
        device = self._planning_device
        trajectory = join([jax.device_put(piece.trajectory, device) for piece in pieces])
        plan_key = jax.random.split(keys.iteration(run_key, jnp.int32(number)).learn)[0]
        data = self._compiled_plan(*jax.device_put((plan_key, self._newest), device), trajectory)
        return trajectory, self._store.add(data, waiting)

    def _learn_once(self, state: RunState, number: int) -> tuple[RunState, Metrics]:
        began = time.perf_counter()
        agent, finite = state.agent, True
        rows: list[Metrics] = []
        seen: list[Inserted] = []
        waited = self._wait_for_more()
        fold_key = jax.random.split(keys.iteration(state.key, state.update).learn)[1]
        for step in range(self._drawn.per_insertion if self._inserter.ready else 0):
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
        self._publish(self._compiled_to_publish(state._replace(agent=agent)), number + 1)
        wall, dropped = time.perf_counter() - began, sum(batch.dropped for batch in seen)
        pieces = [piece for batch in seen for piece in batch.pieces]
        story = account(pieces or [Piece(None, number, _NOTHING)], number, wall, waited, dropped)
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
        minibatch, indices = self._store.sample(sample_key, self._look)
        minibatch = jax.device_put(minibatch, self._minibatch_shardings)
        agent, metrics, priorities = self._compiled(agent, grad_key, minibatch)
        self._store.rank(indices, priorities, self._look)
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

    def close(self) -> None:
        """End the threads, and the replay with what it holds."""
        super().close()
        if hasattr(self, "_store"):
            self._store.close()

    def bytes_per_update(self) -> dict[str, int]:
        """Return what moves in an update, from the shapes that are compiled for; single numbers are left out."""
        self.lower()
        drawn, trajectory = self._drawn, self._abstract_trajectory()
        moved = self._acting_bytes()
        away = sum(device != self._planning_device for device in self._on_worker())
        elsewhere = self._replay_engine.apart
        apart = elsewhere or [self._planning_device] != self.devices
        gradient = jax.eval_shape(self.agent.grad, jax.random.key(0), self._plain_state(), drawn.minibatch)[0]
        return moved | {
            "trajectories": (nbytes(trajectory) - nbytes(trajectory.policy_version)) * away // self._own_envs,
            **({"insertions": nbytes(self._fragment.plan.data)} if elsewhere else {}),
            "minibatches": drawn.per_insertion * nbytes(drawn.minibatch) if apart else 0,
            "parameters": self._parameter_bytes(),
            "gradient sums": drawn.per_insertion * nbytes(gradient) if len(self.devices) > 1 else 0,
        }


_NOTHING = dict.fromkeys((*SUMS, "actor_idle_seconds", "dropped_rollouts"), 0.0)
