"""A program whose chunk is one compiled function over a mesh of devices: what such placements have in common."""

from __future__ import annotations

import abc
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from podium import distributed, xla
from podium.agent import Agent
from podium.env import Env
from podium.networks import batch_groups
from podium.placement import program
from podium.placement.devices import keep_freed_memory, make_mesh
from podium.placement.program import Sizes
from podium.types import Array, Key, Metrics, PyTree, Trajectory


def trajectory_specs(axis: str) -> Trajectory:
    """Return how a trajectory lies along the mesh whose axis holds the environments."""
    rows: Any = P(None, axis)
    by_env: Any = P(axis)
    once: Any = P()
    return Trajectory(*(rows,) * 8, carry=by_env, end_carry=by_env, policy_version=once, valid=rows)


class FusedProgram(abc.ABC):
    """A `Program`, but for what one iteration is, how a run begins, and where everything lies.

    Args:
      agent: that it trains.
      env: that resets itself.
      sizes: of it.
      devices: the mesh.
      axis: name of the mesh's only axis.
      max_updates: iterations that a chunk may have.
      groups: parts of the batch whose gradients are summed over the mesh; see `podium.networks.batch_groups`.
    """

    def __init__(
        self,
        agent: Agent,
        env: Env,
        sizes: Sizes,
        devices: list[jax.Device],
        axis: str,
        max_updates: int,
        groups: int = 1,
    ):
        self.agent, self.env, self.sizes, self.devices = agent, env, sizes, devices
        self.max_updates = max_updates
        self.compile_seconds = 0.0
        self._groups = groups
        self._mesh = make_mesh(devices, axis)
        self._shardings = jax.tree.map(
            lambda spec: NamedSharding(self._mesh, spec), self._partition(), is_leaf=lambda x: isinstance(x, P)
        )
        self._everywhere = NamedSharding(self._mesh, P())
        self._lowered: Any = None
        self._compiled: Any = None

    @abc.abstractmethod
    def _start(self, key: Key) -> Any:
        """Return the first state."""

    @abc.abstractmethod
    def _partition(self) -> Any:
        """Return a PartitionSpec for every leaf of the state."""

    @abc.abstractmethod
    def _iterate(self, state: Any) -> tuple[Any, Metrics, Array]:
        """Return the next state, metrics, and [B] whether each environment gave finite numbers only."""

    def _settle(self, state: Any) -> Any:
        """Return the state as a chunk hands it over: `state.agent` is the agent's State whatever was kept meanwhile."""
        return state

    def init(self, seed: int) -> Any:
        """Return the first state."""
        return program.run_once(self._start, self._shardings)(jax.random.key(seed))

    def abstract_state(self) -> Any:
        """Return the state's shapes, dtypes and shardings."""
        shapes = jax.eval_shape(self._start, jax.random.key(0))
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, self._shardings)

    def _chunk(self, state: Any, num_updates: Array) -> tuple[Any, Metrics]:
        """Iterate `num_updates` times; a count known only at run time, so that no length compiles anew."""
        with batch_groups(self._groups):
            # Traced once, for the shapes of its metrics and for the loop.
            iterate = jax.jit(self._iterate, inline=True)
            shapes = jax.eval_shape(iterate, state)[1]
            metrics = jax.tree.map(lambda x: jnp.zeros((self.max_updates, *x.shape), x.dtype), shapes)

            def body(i: Array, carry: tuple[Any, Metrics, Array]) -> tuple[Any, Metrics, Array]:
                state, metrics, finite = carry
                state, new, new_finite = iterate(state)
                put = lambda rows, row: jax.lax.dynamic_update_index_in_dim(rows, row, i, 0)  # noqa: E731
                return state, jax.tree.map(put, metrics, new), finite & new_finite

            begin = state, metrics, jnp.ones(self.sizes.num_envs, bool)
            state, metrics, finite = jax.lax.fori_loop(0, num_updates, body, begin)
        state = self._settle(state)
        return state, {**metrics, "finite": program.chunk_finite(state.agent, finite)}

    def _whole(self, state: Any, num_updates: Array) -> tuple[Any, Metrics]:
        """Do a chunk of everything that runs at once."""
        return self._chunk(state, num_updates)

    def lower(self) -> Any:
        """Trace the program, once, without compiling it."""
        if self._lowered is not None:
            return self._lowered
        began = time.perf_counter()
        chunk = jax.jit(
            self._whole,
            donate_argnums=0,
            in_shardings=(self._shardings, None),
            # Said only where it matters: metrics must lie whole in every process.
            out_shardings=(self._shardings, None if distributed.num_processes() == 1 else self._everywhere),
        )
        self._lowered = chunk.lower(self.abstract_state(), jax.ShapeDtypeStruct((), jnp.int32))
        self.compile_seconds += time.perf_counter() - began
        return self._lowered

    def compile(self, options: dict[str, Any] | None = None) -> None:
        """Trace and compile, once; `options` for the compiler are those that suit the devices where they are None."""
        if self._compiled is not None:
            return
        lowered = self.lower()
        keep_freed_memory(self.devices[0])
        began = time.perf_counter()
        self._compiled = lowered.compile(options or xla.options(self.devices[0]))
        self.compile_seconds += time.perf_counter() - began

    def chunk(self, state: Any, num_updates: int) -> tuple[Any, Metrics]:
        """Do `num_updates` (at most `max_updates`) iterations; consumes `state`.

        Returns:
          the next state, and metrics as NumPy: [num_updates] each ([num_updates, seeds] for several), and "finite",
          [2] ([seeds, 2]): of the agent's state at the end, and of all rewards and observations.
        """
        if not 1 <= num_updates <= self.max_updates:
            raise ValueError(f"num_updates={num_updates} must lie between 1 and max_updates={self.max_updates}.")
        self.compile()
        state, metrics = self._compiled(state, np.int32(num_updates))
        # Waiting here bounds the work in flight: on CPU many unwaited collectives can deadlock.
        fetched = jax.device_get(jax.block_until_ready(metrics))
        finite = fetched.pop("finite")
        rows = {k: (v[:num_updates] if self.sizes.seeds == 1 else v[:, :num_updates].T) for k, v in fetched.items()}
        return state, {**rows, "finite": finite}

    def compiled_text(self) -> str:
        """Return the optimised program as text, to see what is communicated."""
        self.compile()
        return self._compiled.as_text()

    def memory_analysis(self) -> Any:
        """Return XLA's account of the program's memory."""
        self.compile()
        return self._compiled.memory_analysis()

    def adopt(self, state: Any, agent: PyTree, update: int) -> Any:
        """Return the first state with the agent's State of another run; see `Program.adopt`."""
        return program.adopt(state, agent, update)

    def agent_state(self, state: Any) -> PyTree:
        """Return the agent's State within `state`; a leading axis of seeds where there are several."""
        return distributed.local(state.agent)

    def update_count(self, state: Any) -> int:
        """Return the number of iterations behind `state`."""
        return int(np.asarray(state.update).reshape(-1)[0])

    def close(self) -> None:  # noqa: B027 - nothing is what most do
        """Do nothing: all of it ran in the caller's thread."""
