"""Memory where two take turns: each remembers its own moves, and nothing that only the other has seen."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from podium.networks.network import Network
from podium.types import Array, PyTree, Seen, choose_rows


class OfPlayers(NamedTuple):
    """Memory of each of two players, [B, 2, ...], side by side."""

    each: PyTree


def fresh_memory(network: Network, obs: PyTree, num_envs: int) -> PyTree:
    """Return what `Network.carry` is, or `OfPlayers` of it where observations tell whose turn it is (`Seen.player`).

    Args:
      network: as `brought_or` returns it.
      obs: observations, or the spec of them.
      num_envs: B.
    """
    memory = network.carry(num_envs)
    if not network.recurrent or not isinstance(obs, Seen) or obs.player is None:
        return memory
    return OfPlayers(jax.tree.map(lambda m: jnp.stack([m, m], axis=1), memory))


def by_players(network: Network) -> Network:
    """Return a network that uses one player's memory where it moves, and keeps the other's as it is.

    Without `OfPlayers` it is what it was. With it `unroll` sees the moves of each player as one sequence, so that
    what acting remembered is what is learnt from.
    """
    if not network.recurrent:
        return network

    def apply(params: PyTree, memory: PyTree, obs: PyTree, first: Array) -> tuple[Any, PyTree]:
        if not isinstance(memory, OfPlayers):
            return network.apply(params, memory, obs, first)
        second = obs.player != 0
        begun = choose_rows(first, fresh_memory(network, obs, first.shape[0]), memory)
        own = jax.tree.map(lambda m: choose_rows(second, m[:, 1], m[:, 0]), begun.each)
        output, own = network.apply(params, own, obs, first)

        def keep(m: Array, new: Array) -> Array:
            return jnp.stack([choose_rows(second, m[:, 0], new), choose_rows(second, new, m[:, 1])], axis=1)

        return output, OfPlayers(jax.tree.map(keep, begun.each, own))

    def unroll(params: PyTree, memory: PyTree, obs: PyTree, first: Array) -> Any:
        if not isinstance(memory, OfPlayers):
            return network.unroll(params, memory, obs, first)
        # Both players next to each other, [T, B * 2], so that an environment stays where a mesh has it. The moves of
        # each come first, and what is behind them nobody asks for.
        second = obs.player != 0
        moves = jnp.stack([~second, second], axis=2).reshape(first.shape[0], -1)
        order = jnp.argsort(~moves, axis=0, stable=True)
        twice = lambda x: jnp.repeat(x, 2, axis=1)
        # A player's episode begins where any has since it last moved, or since the rollout began.
        episode = jnp.take_along_axis(twice(jnp.cumsum(first, axis=0)), order, axis=0)
        output = network.unroll(
            params,
            jax.tree.map(lambda m: m.reshape(-1, *m.shape[2:]), memory.each),
            jax.tree.map(lambda x: _pick(twice(x), order), obs),
            jnp.diff(episode, axis=0, prepend=0) != 0,
        )
        place = jnp.cumsum(moves, axis=0) - 1

        def joined(x: Array) -> Array:
            if x.shape[:2] != moves.shape:  # Not of rows: bounds, a deviation of all.
                return x
            each = _pick(x, place).reshape(*first.shape, 2, *x.shape[2:])
            return jnp.where(second.reshape(*first.shape, *[1] * (x.ndim - 2)), each[:, :, 1], each[:, :, 0])

        return jax.tree.map(joined, output)

    return network._replace(apply=apply, unroll=unroll)


def _pick(x: Array, row: Array) -> Array:
    """Return [T, B, ...], of each column its rows numbered `row` [T, B]."""
    return jnp.take_along_axis(x, row.reshape(*row.shape, *[1] * (x.ndim - 2)), axis=0)
