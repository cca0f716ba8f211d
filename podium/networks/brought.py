"""What is asked of a network that a user brings."""

from __future__ import annotations

import functools
import reprlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from podium.networks.network import Network
from podium.networks.players import by_players
from podium.types import Array, EnvSpec, Key, PyTree

ROWS = 3
"""For so many observations a network that is brought is asked what it gives."""


class Wanted(NamedTuple):
    """What an agent needs a network to give for observations [ROWS, ...].

    Attributes:
      words: that say so, behind "must give".
      fits: `(output, spec) -> bool`, of shapes in place of arrays, and the spec that the network's `init` is given.
      with_action: whether the network's `obs` are pairs `(obs, action)`.
      legal: `(output, obs) -> output`, what rules out the actions that are not legal where the agent does not.
    """

    words: str
    fits: Callable[[Any, EnvSpec], bool]
    with_action: bool = False
    legal: Callable[[Any, PyTree], Any] | None = None


def brought_or(
    network: Network | None, make: Callable[[], Network], name: str = "network", wanted: Wanted | None = None
) -> Network:
    """Return the network that a user brings to an agent as the argument `name`, or what `make` returns if that is None.

    A memory of it is one of each player where two take turns, see `by_players`. The `init` of one that is brought
    raises ValueError where it does not give what is `wanted`.

    Raises:
      ValueError: it is no `Network`.
    """
    if network is None:
        return by_players(make())
    if not isinstance(network, Network):
        raise ValueError(
            f"{name}={reprlib.repr(network)} is no Network; leave it out for one of Config, or make one, as "
            "functions of podium.networks and podium.continuous do; networks.from_nnx makes one of a flax module."
        )
    if wanted is not None:
        init = functools.partial(_checked_init, network, name, wanted)
        network = (network if wanted.legal is None else _among_legal(network, wanted.legal))._replace(init=init)
    return by_players(network)


def _among_legal(network: Network, legal: Callable[[Any, PyTree], Any]) -> Network:
    """Return a network whose output rules out what is not legal, whatever it was written for."""

    def apply(params: PyTree, memory: PyTree, obs: PyTree, first: Array) -> tuple[Any, PyTree]:
        output, memory = network.apply(params, memory, obs, first)
        return legal(output, obs), memory

    def unroll(params: PyTree, memory: PyTree, obs: PyTree, first: Array) -> Any:
        return legal(network.unroll(params, memory, obs, first), obs)

    return network._replace(apply=apply, unroll=unroll)


def _checked_init(network: Network, name: str, wanted: Wanted, key: Key, spec: EnvSpec) -> PyTree:
    def give(params: PyTree) -> Any:
        obs = jax.tree.map(lambda leaf: leaf.zeros(ROWS), spec.obs)
        inputs = (obs, spec.action.zeros(ROWS)) if wanted.with_action else obs
        return network.apply(params, network.carry(ROWS), inputs, jnp.zeros(ROWS, bool))[0]

    params = network.init(key, spec)
    try:
        output = jax.eval_shape(give, params)
    except Exception as error:
        line = str(error).strip().split("\n")[0]
        raise ValueError(
            f"{name} cannot be applied to {ROWS} observations of {spec.name}{' and actions' * wanted.with_action} "
            f"({type(error).__name__}: {line}), but must give {wanted.words}."
        ) from error
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
