"""Memories, and cores: a torso with a memory behind it, which heads stand on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from podium.networks.network import Network
from podium.networks.summed import sum_once, units_are_split
from podium.ranges import check_choice, check_value
from podium.torsos import Torso, apply_module
from podium.types import Array, EnvSpec, Key, PyTree

MEMORIES = ("none", "gru", "lstm")


class GRU(nn.Module):
    """One step of a gated recurrent unit on memory [B, size]."""

    size: int

    @nn.compact
    def __call__(self, memory: Array, x: Array) -> tuple[Array, Array]:
        """Return the next memory and the output."""
        return nn.GRUCell(self.size)(memory, x)


class LSTM(nn.Module):
    """One step of a long short-term memory on memory (c, h), each [B, size]."""

    size: int

    @nn.compact
    def __call__(self, memory: tuple[Array, Array], x: Array) -> tuple[tuple[Array, Array], Array]:
        """Return the next memory and the output."""
        # Two ways to compute one cell, of the same parameters. One joins the kernels of the gates to one product; where
        # their units lie split over devices, joining would send nearly all of them to another.
        cell = nn.LSTMCell if units_are_split() else nn.OptimizedLSTMCell
        return cell(self.size, name="OptimizedLSTMCell_0")(memory, x)


Cell = GRU | LSTM


def make_cell(memory: str, memory_size: int) -> Cell | None:
    """Make a memory, one of `MEMORIES`, of `memory_size` units; None for "none".

    Raises:
      ValueError: for an unknown name, or a size that is not positive.
    """
    check_choice("memory", memory, MEMORIES)
    check_value("memory_size", memory_size, "counts", "64 is usual")
    if memory == "none":
        return None
    return GRU(memory_size) if memory == "gru" else LSTM(memory_size)


def _zeros(cell: Cell, num_envs: int) -> PyTree:
    zeros = jnp.zeros((num_envs, cell.size), jnp.float32)
    return (zeros, zeros) if isinstance(cell, LSTM) else zeros


class Core(NamedTuple):
    """A torso and the memory behind it, if there is one, whose parameters stand under these names in a network's."""

    torso: Torso
    cell: Cell | None
    names: tuple[str, str] = ("torso", "memory")

    def init(self, torso_key: Key, cell_key: Key, spec: EnvSpec) -> tuple[dict[str, PyTree], int]:
        """Return the parameters, and the number of features."""
        torso_name, memory_name = self.names
        params = {torso_name: self.torso.init(torso_key, spec)}
        if self.cell is None:
            return params, self.torso.width
        memory = self.cell.init(cell_key, _zeros(self.cell, 1), jnp.zeros((1, self.torso.width)))
        return {**params, memory_name: memory}, self.cell.size

    def split_init(self, key: Key, spec: EnvSpec) -> tuple[dict[str, PyTree], int]:
        """Do what `init` does from one key."""
        torso_key, cell_key = (key, key) if self.cell is None else jax.random.split(key)
        return self.init(torso_key, cell_key, spec)

    def carry(self, num_envs: int) -> PyTree:
        """Return what `Network.carry` is of it."""
        return () if self.cell is None else _zeros(self.cell, num_envs)

    def apply(self, params: PyTree, memory: PyTree, obs: PyTree, first: Array) -> tuple[Array, PyTree]:
        """Return features [B, n] and the memory after the step."""
        x = self.torso.apply(params[self.names[0]], obs, first.ndim)
        if self.cell is not None:
            memory, x = self._step(params, memory, x, first)
        return x, memory

    def unroll(self, params: PyTree, memory: PyTree, obs: PyTree, first: Array) -> Array:
        """Return features [T, B, n]."""
        x = self.torso.apply(params[self.names[0]], obs, first.ndim)
        if self.cell is not None:
            x = jax.lax.scan(lambda m, inputs: self._step(params, m, *inputs), memory, (x, first))[1]
        return x

    def _step(self, params: PyTree, memory: PyTree, x: Array, first: Array) -> tuple[PyTree, Array]:
        assert self.cell is not None
        memory = jax.tree.map(lambda m: jnp.where(first[:, None], 0.0, m), memory)
        return apply_module(self.cell, params[self.names[1]], memory, x)


def with_heads(
    core: Core, init: Callable[[Key, EnvSpec], PyTree], heads: Callable[[PyTree, Array, PyTree], Any]
) -> Network:
    """Make a network of a torso, a memory if there is one, and `heads`: `(params, features, obs) -> output`."""

    def apply(params: PyTree, memory: PyTree, obs: PyTree, first: Array) -> tuple[Any, PyTree]:
        x, memory = core.apply(params, memory, obs, first)
        return heads(params, x, obs), memory

    def unroll(params: PyTree, memory: PyTree, obs: PyTree, first: Array) -> Any:
        return heads(params, core.unroll(params, memory, obs, first), obs)

    return Network(init, core.carry, apply, sum_once(unroll), core.cell is not None)
