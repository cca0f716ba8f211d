"""How an agent's State lies over a mesh: whole on every device, or with its wide arrays split among devices.

The rule is by shape, so no agent says anything: an array of floats is *wide* where its last axis has `WIDE` numbers or
more, and every wide array is split on that axis, evenly. So kernels lie split by their outputs, biases, an optimiser's
moments and target parameters with them; what is narrower (heads, convolutions, scalars), integers and running
statistics are whole on every device.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from podium import distributed
from podium.agent import Agent, Aux
from podium.ops import optimizers
from podium.ops.statistics import RunningStats
from podium.ranges import check_positive, nearest_multiples
from podium.types import DiscreteSpec, EnvSpec, Key, PyTree, Trajectory

WIDE = 128
"""Numbers in the last axis from which on an array of floats is wide: parts of less save little, and move as often."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where the arrays of an agent's State lie.

    Args:
      mesh: whose axes are named below.
      at_rest: axes that wide arrays are split along between an iteration's gradients, and as they are applied.
      in_use: axes that they are split along where they are read: to act, to plan, to take gradients; the first of
        `at_rest`. Along the others each device gathers them for that time.
      whole: widths that are not split.
    """

    mesh: Mesh
    at_rest: tuple[str, ...] = ()
    in_use: tuple[str, ...] = ()
    whole: frozenset[int] = frozenset()

    @property
    def parts(self) -> int:
        """Into how many parts a wide array is split."""
        return math.prod(self.mesh.shape[axis] for axis in self.at_rest)

    def specs(self, tree: PyTree, axes: tuple[str, ...] | None = None) -> PyTree:
        """Return a PartitionSpec for every array (shapes will do), along `axes`; None is `at_rest`."""
        axes = self.at_rest if axes is None else axes
        split = lambda x: axes and is_wide(x) and x.shape[-1] not in self.whole
        spec = lambda x: P(*(None,) * (x.ndim - 1), axes) if split(x) else P()
        return jax.tree.map(lambda x: _all_whole(x) if _is_stats(x) else spec(x), tree, is_leaf=_is_stats)

    def agent(self, agent: Agent) -> Agent:
        """Return the agent whose State lies so: the same functions, told where what they read and return lies."""
        if not self.at_rest:
            return agent
        used, kept = lambda tree: self._put(tree, self.in_use), lambda tree: self._put(tree, self.at_rest)

        def init(key: Key, spec: EnvSpec) -> Any:
            with optimizers.by_array():
                return agent.init(key, spec)

        def actor(state: PyTree) -> Any:
            return agent.actor(used(state))

        def plan(key: Key, state: PyTree, trajectory: Trajectory) -> Any:
            return agent.plan(key, used(state), trajectory)

        def grad(key: Key, state: PyTree, minibatch: PyTree) -> tuple[PyTree, Aux]:
            grads, aux = agent.grad(key, used(state), minibatch)
            return kept(used(grads)), aux

        def apply(state: PyTree, grads: PyTree) -> Any:
            return kept(agent.apply(state, grads))

        return agent._replace(init=init, actor=actor, plan=plan, grad=grad, apply=apply)

    def device_bytes(self, tree: PyTree) -> int:
        """Return the bytes that a device has of `tree` at rest; shapes and dtypes will do."""
        leaves, specs = jax.tree.leaves(tree), jax.tree.leaves(self.specs(tree), is_leaf=lambda x: isinstance(x, P))
        sizes = [x.size * x.dtype.itemsize for x in leaves]
        return sum(size // (self.parts if any(spec) else 1) for size, spec in zip(sizes, specs, strict=True))

    def gathered_bytes(self, function: Callable[..., Any], state: PyTree, *args: Any) -> int:
        """Return the bytes of `state` that a device gathers for `function(state, *args)`: of split arrays it reads."""
        if self.at_rest == self.in_use:
            return 0
        jaxpr = jax.make_jaxpr(function)(state, *args).jaxpr
        read = {id(x) for equation in jaxpr.eqns for x in equation.invars} | {id(x) for x in jaxpr.outvars}
        specs = jax.tree.leaves(self.specs(state), is_leaf=lambda x: isinstance(x, P))
        leaves = zip(jax.tree.leaves(state), specs, jaxpr.invars, strict=False)
        return sum(x.size * x.dtype.itemsize for x, spec, variable in leaves if any(spec) and id(variable) in read)

    def _put(self, tree: PyTree, axes: tuple[str, ...]) -> PyTree:
        along = lambda spec: NamedSharding(self.mesh, spec)
        shardings = jax.tree.map(along, self.specs(tree, axes), is_leaf=lambda x: isinstance(x, P))
        return jax.lax.with_sharding_constraint(tree, shardings)


def asked_words(model: int, shard: str | None) -> str:
    """Return which settings split a network, for messages; "" for none.

    >>> asked_words(2, None), asked_words(2, "parameters")
    ('model=2', "model=2 with shard='parameters'")
    """
    return " with ".join([f"model={model}"] * (model > 1) + [f"shard={shard!r}"] * (shard is not None))


def check_asked(model: int, shard: str | None, seeds: int) -> None:
    """Raise ValueError where a network cannot be split so."""
    check_positive(model=model)
    if shard not in (None, "parameters"):
        raise ValueError(f"shard={shard!r} is unknown; use 'parameters', or leave it out.")
    words, processes = asked_words(model, shard), distributed.num_processes()
    if words and seeds > 1:
        raise ValueError(f"{words} splits the network of one run, but seeds={seeds}; start a run for each seed.")
    if words and processes > 1:
        raise ValueError(f"{words} splits a network within one process, but there are {processes}; leave it out.")


def check_groups(model: int, num_devices: int) -> None:
    """Raise ValueError where devices do not form whole groups of `model`."""
    if num_devices % model:
        use = " or ".join(str(n) for n in range(1, num_devices + 1) if num_devices % n == 0)
        raise ValueError(f"model={model} does not divide the {num_devices} devices; use {use}.")


def who_shares(model: int, shard: str | None, num_devices: int) -> str:
    """Say how many devices share the environments, and how many the parameters.

    >>> who_shares(2, None, 8)
    'The environments are shared by 4 groups of 2 devices, the parameters of wide layers by the 2 of a group.'
    >>> who_shares(1, "parameters", 8)
    'The environments are shared by 8 devices, the parameters of wide layers by all 8.'
    """
    number = num_devices // model
    groups = f"{number} group{'s' if number > 1 else ''} of {model} devices" if model > 1 else f"{number} devices"
    who = f"all {num_devices}" if shard else f"the {model} of a group"
    return f"The environments are shared by {groups}, the parameters of wide layers by {who}."


def split(mesh: Mesh, asked: str, agent: Agent, spec: EnvSpec, over_env: bool) -> Layout:
    """Return the layout that splits wide arrays along the mesh's axis "model", where there is one.

    Args:
      mesh: with an axis "env".
      asked: what asks for it, such as "model=2", for messages.
      agent: whose State it is.
      spec: of the environment; as many outputs as it has actions stay whole where they cannot be split.
      over_env: whether to split them at rest along "env" too (fully sharded parameters).

    Raises:
      ValueError: no array is wide, or one cannot be split evenly.
    """
    in_use = tuple(axis for axis in mesh.axis_names if axis == "model")
    layout = Layout(mesh, in_use + (("env",) if over_env else ()), in_use)
    if layout.parts == 1:
        return Layout(mesh)
    head = _num_actions(spec)
    whole = frozenset({head} if head % layout.parts else ())
    state = jax.eval_shape(lambda key: layout.agent(agent).init(key, spec), jax.random.key(0))
    wide = [(name, width) for name, width in _wide(state) if width not in whole]
    if not wide:
        raise ValueError(
            f"{asked} has nothing to split: no array of {agent.name} has {WIDE} or more numbers in its last axis; use "
            f"wider layers, such as hidden_sizes=({2 * WIDE}, {2 * WIDE}), or leave it out."
        )
    for name, width in wide:
        if width % layout.parts:
            raise ValueError(
                f"{asked} splits wide arrays into {layout.parts} parts, but the last axis of {name} is {width}; use a "
                f"width of {nearest_multiples(width, layout.parts)}, or fewer devices to share it."
            )
    return dataclasses.replace(layout, whole=whole)


def is_wide(x: Any) -> bool:
    """Say whether an array (a shape will do) is wide: floats, `WIDE` or more of them in its last axis."""
    return x.ndim > 0 and x.shape[-1] >= WIDE and bool(jnp.issubdtype(x.dtype, jnp.floating))


def _wide(state: PyTree) -> Sequence[tuple[str, int]]:
    """Return name and width of every wide array."""
    leaves = jax.tree_util.tree_leaves_with_path(state, is_leaf=_is_stats)
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
    return [(name(path), x.shape[-1]) for path, x in leaves if not _is_stats(x) and is_wide(x)]


def _is_stats(node: Any) -> bool:
    return isinstance(node, RunningStats)


def _all_whole(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: P(), tree)


def _num_actions(spec: EnvSpec) -> int:
    """Return how many outputs a head of these actions has; 0 for none in particular."""
    return spec.action.num_values if isinstance(spec.action, DiscreteSpec) else (*spec.action.shape, 0)[0]
