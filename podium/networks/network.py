"""What a network is: four functions over a pytree of parameters; and what may be asked of one that a user brings."""

from __future__ import annotations

import functools
import reprlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

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


ROWS = 3
"""For so many observations a network that is brought is asked what it gives."""


class Wanted(NamedTuple):
    """What an agent needs a network to give for observations [ROWS, ...].

    Attributes:
      words: that say so, behind "must give".
      fits: `(output, spec) -> bool`, of shapes in place of arrays, and the spec that the network's `init` is given.
      with_action: whether the network's `obs` are pairs `(obs, action)`.
    """

    words: str
    fits: Callable[[Any, EnvSpec], bool]
    with_action: bool = False


def brought_or(
    network: Network | None, make: Callable[[], Network], name: str = "network", wanted: Wanted | None = None
) -> Network:
    """Return the network that a user brings to an agent as the argument `name`, or what `make` returns if that is None.

    The `init` of one that is brought raises ValueError where it does not give what is `wanted`.

    Raises:
      ValueError: it is no `Network`.
    """
    if network is None:
        return make()
    if not isinstance(network, Network):
        raise ValueError(
            f"{name}={reprlib.repr(network)} is no Network; leave it out for one of Config, or make one, as "
            "functions of podium.networks and podium.continuous do; networks.from_nnx makes one of a flax module."
        )
    return network if wanted is None else network._replace(init=functools.partial(_checked_init, network, name, wanted))


def _checked_init(network: Network, name: str, wanted: Wanted, key: Key, spec: EnvSpec) -> PyTree:
    def give(params: PyTree) -> Any:
        obs = jax.tree.map(lambda leaf: leaf.zeros(ROWS), spec.obs)
        inputs = (obs, spec.action.zeros(ROWS)) if wanted.with_action else obs
        return network.apply(params, network.carry(ROWS), inputs, jnp.zeros(ROWS, bool))[0]

    params = network.init(key, spec)
    output = jax.eval_shape(give, params)
    if not wanted.fits(output, spec):
        raise ValueError(
            f"{name} gives {_form(output)} for {ROWS} observations of {spec.name}, but must give {wanted.words}."
        )
    return params


def _form(output: Any) -> str:
    """Say what a network's output is, by types and shapes."""
    if isinstance(output, jax.ShapeDtypeStruct):
        return f"{output.dtype.name}{list(output.shape)}"
    parts = {field: getattr(output, field) for field in getattr(output, "_fields", ())}
    fields = ", ".join(f"{field}={_form(part)}" for field, part in parts.items() if part is not None)
    return f"{type(output).__name__}({fields})" if parts else type(output).__name__


def shape_of(output: Any) -> tuple[int, ...]:
    """Return the shape of a network's output, for `Wanted.fits`; () where it is no array."""
    return output.shape if isinstance(output, jax.ShapeDtypeStruct) else ()


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
