"""A loop that is one compiled function: up to so many iterations over a mesh of devices, with nothing on the host."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from podium import distributed, xla
from podium.compiling import CompiledOnMesh
from podium.finite import SMALL, chunk_finite
from podium.networks import batch_over
from podium.placement.contract import Sizes
from podium.types import Array, Key, Metrics

Iterate = Callable[[Any], tuple[Any, Metrics, Array]]
"""`(state) -> (state, metrics, [B] whether each environment gave finite numbers only)`.

Where there are several runs, all have an axis of runs in front.
"""


@dataclasses.dataclass(eq=False)
class CompiledLoop(CompiledOnMesh):
    """A `Loop` whose chunk is one compiled, donated function.

    Args:
      start, partition, mesh: see `CompiledOnMesh`.
      iterate: one iteration.
      max_updates: iterations that a chunk may have.
      settle: `(state) -> (state, last)` as a chunk hands it over: `state.agent` is the agent's State then, and `last`
        are metrics, scalars, of the last update.
      shares_batch: whether the batch lies along the mesh, so that gradients are summed over it.
      splits_state: whether arrays of the agent's State lie split over the mesh, so that none are joined.
    """

    start: Callable[[Key], Any]
    partition: Callable[[Any], Any]
    iterate: Iterate
    mesh: Mesh
    sizes: Sizes
    max_updates: int
    settle: Callable[[Any], tuple[Any, Metrics]] = lambda state: (state, {})
    shares_batch: bool = False
    splits_state: bool = False

    def _chunk(self, state: Any, num_updates: Array) -> tuple[Any, Metrics]:
        """Iterate `num_updates` times; a count known only at run time, so that no length compiles anew."""
        with batch_over(self.mesh if self.shares_batch else None):
            # Traced once, for the shapes of its metrics and for the loop.
            iterate = jax.jit(self.iterate, inline=True)
            _, shapes, each = jax.eval_shape(iterate, state)
            metrics = jax.tree.map(lambda x: jnp.zeros((self.max_updates, *x.shape), x.dtype), shapes)

            def body(i: Array, carry: tuple[Any, Metrics, Array]) -> tuple[Any, Metrics, Array]:
                state, metrics, finite = carry
                state, new, new_finite = iterate(state)
                put = lambda rows, row: jax.lax.dynamic_update_index_in_dim(rows, row, i, 0)
                return state, jax.tree.map(put, metrics, new), finite & new_finite

            begin = state, metrics, jnp.ones(each.shape, bool)
            state, metrics, finite = jax.lax.fori_loop(0, num_updates, body, begin)
        state, last = self.settle(state)
        metrics |= {name: metrics[name].at[num_updates - 1].set(value) for name, value in last.items()}
        is_finite = partial(chunk_finite, small=0 if self.splits_state else SMALL)
        finite = (is_finite if self.sizes.seeds == 1 else jax.vmap(is_finite))(state.agent, finite)
        return state, {**metrics, "finite": finite}

    def _lower(self) -> Any:
        # Said only where it matters: metrics must lie whole in every process.
        everywhere = None if distributed.num_processes() == 1 else NamedSharding(self.mesh, P())
        chunk = jax.jit(
            self._chunk,
            donate_argnums=0,
            in_shardings=(self.shardings, None),
            out_shardings=(self.shardings, everywhere),
        )
        return chunk.lower(self.abstract_state(), jax.ShapeDtypeStruct((), jnp.int32))

    def compile(self, options: dict[str, Any] | None = None) -> None:
        """Trace and compile, once; `options` for the compiler are those that suit the devices where they are None."""
        super().compile(options or xla.options(self.devices[0]))

    def chunk(self, state: Any, num_updates: int) -> tuple[Any, Metrics]:
        """Do `num_updates` iterations; see `Loop.chunk`; of several seeds metrics are [num_updates, seeds, ...]."""
        if not 1 <= num_updates <= self.max_updates:
            raise ValueError(f"num_updates={num_updates} must lie between 1 and max_updates={self.max_updates}.")
        self.compile()
        state, metrics = self._compiled(state, np.int32(num_updates))
        # Waiting here bounds the work in flight: on CPU many unwaited collectives can deadlock.
        fetched = jax.device_get(jax.block_until_ready(metrics))
        finite = fetched.pop("finite")
        return state, {**{name: rows[:num_updates] for name, rows in fetched.items()}, "finite": finite}

    def close(self) -> None:
        """Do nothing: all of it ran in the caller's thread."""
