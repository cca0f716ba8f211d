"""A replay apart: a server holds it, in this process or another, and several threads call it."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from podium.agent import Replay
from podium.devices import jit
from podium.learn import num_updates
from podium.placement.compiled.iteration import replay_of
from podium.placement.contract import Acting, Sizes
from podium.placement.remote.engine import Engine, FragmentError, LostError, Reply, within
from podium.placement.threads.supervision import ActorError, Heartbeat, acquired
from podium.types import Array, Key, PyTree


class Drawn(NamedTuple):
    """Shapes of what a replay gives: a minibatch, what tells where it is from; and how many an insertion is worth."""

    minibatch: PyTree
    indices: PyTree
    per_insertion: int


@dataclasses.dataclass(frozen=True)
class ReplayFunctions:
    """What a replay is made of.

    Args:
      plan: shapes of the agent's plan for a batch of rollouts, whose data go into the replay.
      device: that holds it; None is the first of the process.
    """

    acting: Acting
    sizes: Sizes
    plan: PyTree
    device: jax.Device | None

    @property
    def replay(self) -> Replay:
        """The agent's."""
        assert self.acting.agent.replay is not None
        return self.acting.agent.replay

    def empty(self) -> PyTree:
        """Return the replay's state with nothing in it."""
        return replay_of(self.acting, self.sizes, self.plan)

    def drawn(self) -> Drawn:
        """Return what it will give."""
        key = jax.eval_shape(lambda: jax.random.key(0))
        minibatch, indices = jax.eval_shape(self.replay.sample, key, jax.eval_shape(self.empty))
        return Drawn(minibatch, indices, num_updates(self.replay, self.plan))


class Store:
    """The replay's state where it lives, with its functions compiled; one thread at a time may use it."""

    _rank: Any = None

    def __init__(self, made_of: ReplayFunctions):
        replay, device = made_of.replay, made_of.device or jax.devices()[0]

        def add(held: PyTree, data: PyTree, gap: Array) -> tuple[PyTree, Any]:
            held = replay.add(held if replay.cut is None else replay.cut(held, gap), data)
            return held, replay.can_sample(held)

        self._device, shape = device, jax.eval_shape(made_of.empty)
        gap = jax.ShapeDtypeStruct((made_of.sizes.num_envs,), bool)
        self._held = jit(made_of.empty, device)()
        self._add = jit(add, device, (0,)).lower(shape, made_of.plan.data, gap).compile()
        self._sample = jit(replay.sample, device).lower(jax.eval_shape(lambda: jax.random.key(0)), shape).compile()
        if replay.update_priorities is not None:
            ranks, indices = jax.ShapeDtypeStruct((replay.batch_size,), jnp.float32), made_of.drawn().indices
            self._rank = jit(replay.update_priorities, device, (0,)).lower(shape, indices, ranks).compile()

    def add(self, data: PyTree, gap: Any) -> bool:
        """Insert the data of a plan, with a `Trajectory.gap`; returns whether the replay can be sampled now."""
        self._held, ready = self._add(self._held, *jax.device_put((data, gap), self._device))
        return bool(ready)

    def sample(self, key: Key) -> tuple[PyTree, PyTree]:
        """Return a minibatch and where it is from."""
        drawn = self._sample(jax.device_put(key, self._device), self._held)
        return jax.block_until_ready(drawn)

    def rank(self, indices: PyTree, priorities: Any) -> None:
        """Give what was sampled new priorities, where the replay has any."""
        if self._rank is not None:
            self._held = self._rank(self._held, *jax.device_put((indices, priorities), self._device))


class ReplayServer:
    """A `Store` wherever an engine puts it, for several threads.

    Args:
      functions: what it is made of.
      timeout: seconds that a call may take, once it stands.
    """

    def __init__(self, engine: Engine, functions: ReplayFunctions, timeout: float):
        self._handle = engine.place("podium-replay", partial(Store, functions))
        self._timeout, self._lock, self._stands = timeout, threading.Lock(), False
        self._ranking: Reply | None = None

    def add(self, data: PyTree, gap: Any, heartbeat: Heartbeat) -> bool:
        """Insert the data of a plan; returns whether the replay can be sampled now. `heartbeat` as for `Reply.result`.

        Raises:
          ActorError: the replay is lost, broken, or hangs; so do the other methods.
        """
        return bool(self._call("add", data, gap, heartbeat=heartbeat))

    def sample(self, key: Key, heartbeat: Heartbeat) -> tuple[PyTree, PyTree]:
        """Return a minibatch and where it is from; every ranking that was begun is done before."""
        drawn: tuple[PyTree, PyTree] = self._call("sample", key, heartbeat=heartbeat)
        return drawn

    def rank(self, indices: PyTree, priorities: Any, heartbeat: Heartbeat) -> None:
        """Begin to give what was sampled new priorities; waits for nothing but other threads."""
        with acquired(self._lock, heartbeat):
            self._finish(heartbeat)
            self._ranking = self._handle.start("rank", indices, priorities)

    def close(self) -> None:
        """End its process, if it has one."""
        self._handle.close()

    def _call(self, method: str, *arguments: Any, heartbeat: Heartbeat) -> Any:
        with acquired(self._lock, heartbeat):
            self._finish(heartbeat)
            # The engine bounds how long it takes until the fragment stands, which the first call waits for.
            look = self._within(heartbeat) if self._stands else heartbeat
            answer = self._checked(partial(self._handle.call, method, *arguments, heartbeat=look))
            self._stands = True
            return answer

    def _finish(self, heartbeat: Heartbeat) -> None:
        if self._ranking is not None:
            ranking, self._ranking = self._ranking, None
            self._checked(lambda: ranking.result(self._within(heartbeat)))

    def _within(self, heartbeat: Heartbeat) -> Callable[[], None]:
        return within(self._timeout, f"it has not answered for {self._timeout:g} s", heartbeat)

    def _checked(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except (FragmentError, LostError, TimeoutError) as error:
            raise ActorError(
                f"The replay of {self._handle.name} is gone, with what it held: {error}. "
                "The same call with resume=True fills another."
            ) from None
