"""The loop of placements whose actors play beside a learner; what one update is, stands in each placement's file."""

from __future__ import annotations

import abc
import time
from typing import Any

import jax
import numpy as np

from podium import distributed, keys
from podium.placement.actors.pool import ActorPool
from podium.placement.contract import update_count
from podium.types import Key, Metrics


class ActorLearnerLoop(abc.ABC):
    """A `Loop` in which actors play beside a learner.

    Args:
      learner: a `compiled.learner.Learner`, or what has its methods.
      actors: that play for it.
    """

    def __init__(self, learner: Any, actors: ActorPool):
        self.learner, self.actors = learner, actors
        self._actors_seconds, self._is_compiled, self._started = 0.0, False, False
        self._seed: int | None = None

    @abc.abstractmethod
    def update(self, state: Any, number: int) -> tuple[Any, Metrics]:
        """Do update `number`; return the next state and metrics, "finite" and "learner_idle_seconds" among them."""

    @property
    def compile_seconds(self) -> float:
        """Seconds spent in tracing and compiling so far."""
        return float(self.learner.compile_seconds) + self._actors_seconds

    def init(self, seed: int) -> Any:
        """Return the first state."""
        self._seed = seed
        return self.learner.init(seed)

    def abstract_state(self) -> Any:
        """Return the state's shapes, dtypes and shardings."""
        return self.learner.abstract_state()

    def lower(self) -> None:
        """Trace learning, once, without compiling it."""
        self.learner.lower()

    def compile(self) -> None:
        """Compile acting and learning, once."""
        if self._is_compiled:
            return
        self.learner.compile()
        began = time.perf_counter()
        self.actors.compile(jax.eval_shape(self.learner.agent.actor, self.learner.state_shapes.agent))
        self._is_compiled = True
        self._actors_seconds += time.perf_counter() - began

    def chunk(self, state: Any, num_updates: int) -> tuple[Any, Metrics]:
        """Do `num_updates` updates; see `Loop.chunk`. The actors start when this is first called."""
        self.compile()
        first = update_count(state)
        if not self._started:
            run_key = jax.device_get(distributed.local(state.key))
            self._started = True
            self.start(state, run_key, keys.episode_seed(self._seed, run_key, first), first)
        rows = []
        for number in range(first, first + num_updates):
            began = time.perf_counter()
            state, row = self.update(state, number)
            rows.append(_with_times(row, time.perf_counter() - began))
        finite = np.stack([row.pop("finite") for row in rows]).all(axis=0)
        return state, {**jax.tree.map(lambda *x: np.stack(x), *rows), "finite": finite}

    def start(self, state: Any, run_key: Key, seed: int, first: int) -> None:
        """Let the actors play from iteration `first` on."""
        self.actors.start(run_key, seed, first, self.learner.params(state))

    def close(self) -> None:
        """End the actors."""
        self.actors.close()


def _with_times(row: Metrics, wall: float) -> dict[str, Any]:
    """Return the metrics of an update that took `wall` seconds, with how much of it the learner waited and learnt."""
    waited = float(row["learner_idle_seconds"])
    times = {"learner_idle": np.float32(waited / max(wall, 1e-9)), "learn_seconds": np.float32(wall - waited)}
    return {**{name: value for name, value in row.items() if name != "learner_idle_seconds"}, **times}
