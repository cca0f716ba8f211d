"""What a network is: four functions over a pytree of parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from podium.seen import view_of
from podium.torsos import part_of_obs, part_of_spec
from podium.types import Array, EnvSpec, Key, PyTree

Unroll = Callable[[PyTree, PyTree, PyTree, Array], Any]
"""What `Network.unroll` is."""


class Network(NamedTuple):
    """A function approximator with optional memory.

    Attributes:
      init: `(key, EnvSpec) -> params`.
      carry: `(num_envs) -> memory [B, ...]`, zeros; `()` without memory.
      apply: `(params, memory, obs [B, ...], first [B]) -> (output [B, ...], memory)`, one step.
      unroll: `(params, memory, obs [T, B, ...], first [T, B]) -> output [T, B, ...]`, memory zeroed where `first`.
        Without memory any leading axes do.
      recurrent: whether there is memory.
      policy_mask: `(params) -> bools`, a tree that is a prefix of the params: True for those that greedy actions are
        computed from.
    """

    init: Callable[[Key, EnvSpec], PyTree]
    carry: Callable[[int], PyTree]
    apply: Callable[[PyTree, PyTree, PyTree, Array], tuple[Any, PyTree]]
    unroll: Unroll
    recurrent: bool = False
    policy_mask: Callable[[PyTree], PyTree] = lambda params: True


def network_seeing(
    network: Network,
    name: str,
    field: str,
    of: Callable[[PyTree], PyTree] = view_of,
    part: Callable[[PyTree, str, Callable[[PyTree], PyTree]], PyTree] = part_of_obs,
) -> Network:
    """Return a network that sees one part of every observation, and nothing of the others.

    Args:
      network: that sees what it is given.
      name: of the part; empty for all.
      field: that says so, for a sentence; see `podium.torsos.part_of_spec`, which refuses what there is not.
      of: what it sees of a `Seen`.
      part: `(obs, name, of) -> obs`, where the network's `obs` are more than observations.
    """
    return network._replace(
        init=lambda key, spec: network.init(key, part_of_spec(spec, name, field, of)),
        apply=lambda params, memory, obs, first: network.apply(params, memory, part(obs, name, of), first),
        unroll=lambda params, memory, obs, first: network.unroll(params, memory, part(obs, name, of), first),
    )


def remember(network: Network, params: PyTree, memory: PyTree, obs: PyTree, first: Array) -> tuple[Any, PyTree]:
    """Unroll, and return the memory after each step too, both [T, B, ...]; for what no gradient is taken of.

    Args:
      network: with memory.
      params: of it.
      memory: [B, ...], before the first step.
      obs: [T, B, ...].
      first: [T, B] bool, memory is zeroed there.
    """

    def step(memory: PyTree, inputs: tuple[PyTree, Array]) -> tuple[PyTree, tuple[Any, PyTree]]:
        output, memory = network.apply(params, memory, *inputs)
        return memory, (output, memory)

    outputs: tuple[Any, PyTree] = jax.lax.scan(step, memory, (obs, first))[1]
    return outputs


def policy_mask(network: Network, state: Any, path: Sequence[str] = ()) -> Any:
    """Mark, for `Agent.policy_mask`, of a State's `params` those of a network that greedy actions depend on.

    Args:
      network: that acts.
      state: a NamedTuple with `params`.
      path: names that lead to the network's parameters there, where there are others beside them.
    """

    def marked(nothing: Any, params: Any, path: Sequence[str]) -> Any:
        if not path:
            return network.policy_mask(params)
        name = path[0]
        return nothing._replace(**{name: marked(getattr(nothing, name), getattr(params, name), path[1:])})

    return marked(jax.tree.map(lambda leaf: False, state), state, ("params", *path))
