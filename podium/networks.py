"""Networks as plain functions over pytrees of parameters, built from flax linen torsos.

An agent sees only `Network`: init, carry, apply, unroll. Anything with these four functions will do; `from_nnx` shows
how a flax nnx module gets there. What the outputs are (a policy and a value, action values) is decided by the heads.
The number of outputs is read from the parameters, which `init` made to the environment's spec.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import reprlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from podium import noisy
from podium.agent import ActOutput
from podium.ops import returns
from podium.ops.bounds import Bounds, check_floats, check_vector
from podium.ops.distributions import Categorical, DiagGaussian, Policy, TanhNormal
from podium.ranges import check_choice, check_value
from podium.seen import only_legal, view_of, world_of
from podium.torsos import Torso, apply_module, check_sizes, make_torso, part_of_obs, part_of_spec, seeing
from podium.types import Array, DiscreteSpec, EnvSpec, Key, PyTree, Trajectory, at_step

NARROW = 5
"""Up to so many outputs a linear head is computed column by column."""

MEMORIES = ("none", "gru", "lstm")

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


_batch_mesh: contextvars.ContextVar[Mesh | None] = contextvars.ContextVar("batch_mesh", default=None)


@contextlib.contextmanager
def batch_over(mesh: Mesh | None) -> Iterator[None]:
    """While tracing, let `sum_once` know that batches lie along this mesh's first axis; None is no mesh."""
    token = _batch_mesh.set(mesh)
    try:
        yield
    finally:
        _batch_mesh.reset(token)


def units_are_split() -> bool:
    """Say whether, while tracing, units of layers may lie along a second axis of the mesh of `batch_over`."""
    mesh = _batch_mesh.get()
    return mesh is not None and len(mesh.axis_names) > 1


def sum_once(unroll: Unroll) -> Unroll:
    """Return `unroll`, whose gradient devices sum once: after it, and as one vector.

    Left to itself the partitioner sums the gradient of each parameter where it arises: in a loop over time in every
    step, and elsewhere as a list, which CPU devices meet for array by array (18 meetings a gradient step of PPO with
    two hidden layers; eight devices on two cores spent two thirds of their time there). Within `batch_over` each
    device unrolls its own part of the batch with its own copy of one flat vector of parameters; what is summed is the
    gradient of that. The mathematics is the same: `unroll` treats every element of the batch alone. Where the mesh
    does not divide the batch, or each device is alone already (in a rollout), it runs as it is. Where the mesh has a
    second axis, along which parameters may be split, they stay arrays: as one vector they would cross it.
    """
    return functools.partial(_unroll_parts, unroll)


def _unroll_parts(unroll: Unroll, params: PyTree, memory: PyTree, obs: PyTree, first: Array) -> Any:
    """Unroll as `sum_once` says. At the level of the module: what refers to a ContextVar cannot be sent."""
    mesh, axis = _batch_mesh.get(), first.ndim - 1
    if mesh is None:
        return unroll(params, memory, obs, first)
    name, *others = mesh.axis_names
    number, alone = mesh.shape[name], jax.sharding.get_abstract_mesh().manual_axes
    if number == 1 or first.shape[axis] % number or name in alone:
        return unroll(params, memory, obs, first)
    share = first.shape[axis] // number
    cut = lambda tree, axis: jax.tree.map(lambda x: jax.lax.slice_in_dim(x, 0, share, axis=axis), tree)
    part = lambda memory, obs, first: unroll(params, cut(memory, 0), cut(obs, axis), cut(first, axis))
    # What of the output lies along the batch: the axis that a smaller batch makes shorter.
    wholes, parts = jax.eval_shape(unroll, params, memory, obs, first), jax.eval_shape(part, memory, obs, first)
    lie = lambda whole, part: P(*(name if m != n else None for m, n in zip(whole.shape, part.shape, strict=True)))
    flat, restore = (params, lambda params: params) if others else _flatten(params)
    rows = P(*(None,) * axis, name)
    return jax.shard_map(
        lambda flat, *rest: unroll(restore(flat), *rest),
        mesh=mesh,
        in_specs=(P(), P(name), rows, rows),
        out_specs=jax.tree.map(lie, wholes, parts),
        axis_names={name},
        check_vma=False,
    )(flat, memory, obs, first)


def _flatten(tree: PyTree) -> tuple[PyTree, Callable[[PyTree], PyTree]]:
    """Return the arrays of `tree` with those of each type of number joined to one vector, and what undoes that."""
    leaves, structure = jax.tree.flatten(tree)
    kinds: dict[Any, list[int]] = {}
    for i, leaf in enumerate(leaves):
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            kinds.setdefault(leaf.dtype, []).append(i)
    joined = [i for numbers in kinds.values() for i in numbers]
    vectors = [jnp.concatenate([leaves[i].ravel() for i in numbers]) for numbers in kinds.values()]
    others = {i: leaf for i, leaf in enumerate(leaves) if i not in joined}

    def restore(flat: tuple[list[Array], dict[int, Array]]) -> PyTree:
        vectors, found = flat[0], dict(flat[1])
        for vector, numbers in zip(vectors, kinds.values(), strict=True):
            ends = np.cumsum([leaves[i].size for i in numbers])
            for i, piece in zip(numbers, jnp.split(vector, ends[:-1]), strict=True):
                found[i] = piece.reshape(leaves[i].shape)
        return jax.tree.unflatten(structure, [found[i] for i in range(len(leaves))])

    return (vectors, others), restore


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


def policy_mask(network: Network, state: Any) -> Any:
    """Mark, for `Agent.policy_mask`, of a State with `params` of one network those that greedy actions depend on."""
    return jax.tree.map(lambda leaf: False, state)._replace(params=network.policy_mask(state.params))


class ActorCritic(NamedTuple):
    """Output of an actor-critic network: a distribution over actions, and values [...].

    `bounds` are those of the actions where the policy is a `TanhNormal`, which draws what is squashed into them.
    """

    policy: Policy
    value: Array
    bounds: Bounds | None = None


ACTOR_CRITIC = Wanted(
    f"an ActorCritic with one value each, [{ROWS}], as networks.actor_critic does",
    lambda output, spec: all(hasattr(output, x) for x in ActorCritic._fields) and shape_of(output.value) == (ROWS,),
)
"""What agents with an actor and a critic need."""


def values_of_actions(num_atoms: int | None = None) -> Wanted:
    """Return what agents need that act by the best value: values, or so many atoms of each value's distribution."""
    atoms = () if num_atoms is None else (num_atoms,)
    shape = ", ".join(map(str, (ROWS, "number of actions", *atoms)))
    return Wanted(
        f"action values [{shape}], as networks.q_network does",
        lambda output, spec: shape_of(output) == (ROWS, num_actions(spec, "action values"), *atoms),
    )


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
    check_sizes("memory_size", (memory_size,))
    if memory == "none":
        return None
    return GRU(memory_size) if memory == "gru" else LSTM(memory_size)


def init_linear(key: Key, inputs: int, outputs: int, scale: float) -> PyTree:
    """Return parameters of a linear head: an orthogonal kernel of this gain, and zeros."""
    kernel = nn.initializers.orthogonal(scale)(key, (inputs, outputs), jnp.float32)
    return {"kernel": kernel, "bias": jnp.zeros(outputs, jnp.float32)}


def apply_linear(params: PyTree, x: Array) -> Array:
    """Return a linear head's outputs [..., n]."""
    kernel, outputs = params["kernel"], params["kernel"].shape[1]
    if 1 < outputs <= NARROW:
        # On CPU, forward and backward of a product with few columns cost 2 to 7 times those of its columns one by one
        # ([2048, 64] by [64, 2]: 217 us against 32); elsewhere the difference drowns.
        product = jnp.stack([x @ kernel[:, i] for i in range(outputs)], axis=-1)
    else:
        product = x @ kernel
    return noisy.add(params, x, product + params["bias"])


def apply_value(params: PyTree, x: Array) -> Array:
    """Return a linear head's single output without its last axis ([N, 1] costs more in the gradient than [N])."""
    if "noise" in params:
        return apply_linear(params, x)[..., 0]
    return x @ params["kernel"][:, 0] + params["bias"][0]


def init_policy(key: Key, inputs: int, spec: EnvSpec, squash: bool = False) -> PyTree:
    """Return parameters of a policy head: logits, or a mean and one log standard deviation an action dimension.

    With `squash`, the bounds of actions are among them; nothing learns these.

    Raises:
      ValueError: continuous actions are no vector (A,) of floats; with `squash`, they are discrete or have no bounds.
    """
    bounds = {"bounds": Bounds.of(spec, "squash=True needs", "leave squash out")} if squash else {}
    check_one_action(spec)
    if isinstance(spec.action, DiscreteSpec):
        return init_linear(key, inputs, spec.action.num_values, 0.01)
    check_vector(spec, "a policy here needs")
    size = spec.action.shape[0]
    return {**init_linear(key, inputs, size, 0.01), "log_std": jnp.zeros(size, jnp.float32), **bounds}


def check_one_action(spec: EnvSpec) -> None:
    """Raise ValueError for discrete actions that are several at once."""
    if isinstance(spec.action, DiscreteSpec) and spec.action.shape:
        raise ValueError(
            f"{spec.name} takes discrete actions of shape {list(spec.action.shape)} at once, and a policy here chooses "
            "one; where these are several agents, let them share one agent."
        )


def num_actions(spec: EnvSpec, what: str) -> int:
    """Return how many actions there are; raise ValueError where they are no one discrete choice, which `what` need."""
    check_floats(spec)
    if not isinstance(spec.action, DiscreteSpec):
        raise ValueError(f"the actions of {spec.name} are continuous; {what} need discrete ones; use ppo or sac.")
    check_one_action(spec)
    return spec.action.num_values


def apply_policy(params: PyTree, x: Array, obs: PyTree) -> Policy:
    """Return the distribution of a policy head, over the legal actions of `obs`."""
    outputs = apply_linear(params, x)
    if "log_std" not in params:
        return Categorical(only_legal(outputs, obs))
    # One for each row, so that on a mesh its gradient is summed with all others.
    log_std = jnp.broadcast_to(params["log_std"], outputs.shape)
    return TanhNormal(outputs, log_std) if "bounds" in params else DiagGaussian(outputs, log_std)


def actor_critic_mask(params: PyTree) -> PyTree:
    """Mark the parameters of an actor-critic that its mode depends on: not deviation, bounds, nor the critic's own."""
    policy = {name: name not in ("log_std", "bounds") for name in params["policy"]}
    return {**{name: name not in ("critic", "critic_memory", "value") for name in params}, "policy": policy}


def actor_critic(
    hidden_sizes: Sequence[int] = (64, 64),
    activation: str = "tanh",
    memory: str = "none",
    memory_size: int = 64,
    torso: str | nn.Module = "mlp",
    dtype: str = "float32",
    squash: bool = False,
    actor_obs: str = "",
    critic_obs: str = "",
    shared: bool = False,
    separate: bool = False,
) -> Network:
    """Make a policy and a value: two MLPs; or with convolutions or memory one torso, the memory, and two linear heads.

    One torso sees what the policy sees. Where policy and value see different parts, or are to be `separate`, each has
    a torso and a memory of its own, and the value sees the `world` of a `podium.types.Seen`, if it has one.

    Args:
      hidden_sizes: of each MLP.
      activation: one of `ACTIVATIONS`.
      memory: "none", "gru" or "lstm".
      memory_size: units of the memory.
      torso: see `make_torso`.
      dtype: that torsos compute in; memory and heads compute in float32.
      squash: whether continuous actions are squashed into their bounds: the policy is a `TanhNormal`.
      actor_obs: which part of an observation, a dictionary, the policy sees; empty for all of it.
      critic_obs: which part the value sees, likewise.
      shared: whether an MLP is one torso with two heads too.
      separate: whether torsos and memories that could be one are two.

    Returns:
      a `Network` whose output is `ActorCritic`.

    Raises:
      ValueError: for an unknown name, sizes that are not positive, or parts that differ where one torso must see for
        both; from `init`, see `init_policy` and `podium.torsos.part_of_spec`.
    """
    encoder = make_torso(torso, hidden_sizes, activation, dtype)
    cell = make_cell(memory, memory_size)
    if shared and (separate or actor_obs != critic_obs):
        raise ValueError(
            f"actor_obs={actor_obs!r} and critic_obs={critic_obs!r} differ, but in agents that search, policy and "
            "value share what sees; use the same part for both."
        )
    policy_sees = seeing(encoder, actor_obs, "actor_obs")
    if separate or actor_obs != critic_obs or (cell is None and not encoder.shared and not shared):
        value_sees = seeing(encoder, critic_obs, "critic_obs", world_of)
        actor = _Core(policy_sees, cell, ("actor", "actor_memory"))
        return _separate_actor_critic(actor, _Core(value_sees, cell, ("critic", "critic_memory")), squash)
    return _shared_actor_critic(_Core(policy_sees, cell), squash)


@dataclasses.dataclass(frozen=True)
class ActorCriticConfig:
    """Which network an actor-critic has: fields that such an agent's `Config` begins with."""

    torso: str = "mlp"
    """What sees observations: mlp; or frames: minatar_cnn (Young 2019), small_cnn (Mnih 2013), nature_cnn (2015) or
    impala_resnet (Espeholt 2018)."""
    dtype: str = "float32"
    """What torsos compute in: float32 or bfloat16; parameters stay float32."""
    hidden_sizes: tuple[int, ...] = (64, 64)
    """Units of each hidden layer; of convolutional torsos, those behind the convolutions."""
    activation: str = "tanh"
    """Nonlinearity of hidden layers: tanh, relu, silu, gelu or elu."""
    memory: str = "none"
    """Recurrent memory: none, gru or lstm."""
    memory_size: int = 64
    """Units of the memory, where there is one."""
    squash: bool = False
    """Whether continuous actions are squashed into their bounds by tanh; else the environment may cut them."""
    actor_obs: str = ""
    """Which part of observations that are a dictionary the policy sees, such as "state"; empty for all of them."""
    critic_obs: str = ""
    """Which part the value sees, such as "privileged_state"; empty for all of them."""

    shared_torso: ClassVar[bool] = False
    """Whether policy and value of an agent are two heads of one torso even where that is an MLP; no field."""

    def network(self, separate: bool = False) -> Network:
        """Build it; raises ValueError for what `actor_critic` refuses."""
        check_value("squash", self.squash, "flags", "False is usual")
        sizes = self.hidden_sizes, self.activation, self.memory, self.memory_size
        sees = self.actor_obs, self.critic_obs
        return actor_critic(*sizes, self.torso, self.dtype, self.squash, *sees, self.shared_torso, separate)


class _Core(NamedTuple):
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


def _separate_actor_critic(actor: _Core, critic: _Core, squash: bool) -> Network:
    def init(key: Key, spec: EnvSpec) -> PyTree:
        actor_key, critic_key, policy_key, value_key = jax.random.split(key, 4)
        (actor_params, width), (critic_params, critic_width) = (
            actor.split_init(actor_key, spec),
            critic.split_init(critic_key, spec),
        )
        return {
            **actor_params,
            **critic_params,
            "policy": init_policy(policy_key, width, spec, squash),
            "value": init_linear(value_key, critic_width, 1, 1.0),
        }

    def heads(params: PyTree, x: Array, y: Array, obs: PyTree) -> ActorCritic:
        policy, value = apply_policy(params["policy"], x, obs), apply_value(params["value"], y)
        return ActorCritic(policy, value, params["policy"].get("bounds"))

    def carry(num_envs: int) -> PyTree:
        return () if actor.cell is None else (actor.carry(num_envs), critic.carry(num_envs))

    def apply(params: PyTree, memory: PyTree, obs: PyTree, first: Array) -> tuple[ActorCritic, PyTree]:
        own, other = memory or ((), ())
        x, own = actor.apply(params, own, obs, first)
        y, other = critic.apply(params, other, obs, first)
        return heads(params, x, y, obs), memory and (own, other)

    def unroll(params: PyTree, memory: PyTree, obs: PyTree, first: Array) -> ActorCritic:
        own, other = memory or ((), ())
        return heads(params, actor.unroll(params, own, obs, first), critic.unroll(params, other, obs, first), obs)

    return Network(init, carry, apply, sum_once(unroll), actor.cell is not None, actor_critic_mask)


def _shared_actor_critic(core: _Core, squash: bool) -> Network:
    def init(key: Key, spec: EnvSpec) -> PyTree:
        torso_key, cell_key, policy_key, value_key = jax.random.split(key, 4)
        params, width = core.init(torso_key, cell_key, spec)
        return {
            **params,
            "policy": init_policy(policy_key, width, spec, squash),
            "value": init_linear(value_key, width, 1, 1.0),
        }

    def heads(params: PyTree, x: Array, obs: PyTree) -> ActorCritic:
        value = apply_value(params["value"], x)
        return ActorCritic(apply_policy(params["policy"], x, obs), value, params["policy"].get("bounds"))

    return _with_heads(core, init, heads)._replace(policy_mask=actor_critic_mask)


def _with_heads(
    core: _Core, init: Callable[[Key, EnvSpec], PyTree], heads: Callable[[PyTree, Array, PyTree], Any]
) -> Network:
    """Make a network of a torso, a memory if there is one, and `heads`: `(params, features, obs) -> output`."""

    def apply(params: PyTree, memory: PyTree, obs: PyTree, first: Array) -> tuple[Any, PyTree]:
        x, memory = core.apply(params, memory, obs, first)
        return heads(params, x, obs), memory

    def unroll(params: PyTree, memory: PyTree, obs: PyTree, first: Array) -> Any:
        return heads(params, core.unroll(params, memory, obs, first), obs)

    return Network(init, core.carry, apply, sum_once(unroll), core.cell is not None)


def _zeros(cell: Cell, num_envs: int) -> PyTree:
    zeros = jnp.zeros((num_envs, cell.size), jnp.float32)
    return (zeros, zeros) if isinstance(cell, LSTM) else zeros


class Extras(NamedTuple):
    """What acting leaves for learning, [B, ...].

    `memory` is the one after the step (`()` without memory); `raw` what the policy drew, before it was squashed, and
    None where that is the action.
    """

    log_prob: Array
    value: Array
    memory: PyTree
    raw: Array | None = None


def drawn(trajectory: Trajectory) -> Array:
    """Return what the policy drew, [T, B, ...], and weighs: actions, or what they were before they were squashed."""
    raw: Array | None = trajectory.extras.raw
    return trajectory.action if raw is None else raw


def act(
    network: Network, keys: Key, params: PyTree, memory: PyTree, obs: PyTree, first: Array, greedy: bool
) -> ActOutput:
    """Act by an actor-critic network; the arguments are those of `Agent.act`, the extras `Extras`."""
    output, memory = network.apply(params, memory, obs, first)
    raw = output.policy.mode() if greedy else output.policy.sample(keys)
    extras = Extras(output.policy.log_prob(raw), output.value, memory)
    if output.bounds is None:
        return ActOutput(raw, memory, extras)
    return ActOutput(output.bounds.to_env(output.policy.squash(raw)), memory, extras._replace(raw=raw))


def next_values(
    network: Network,
    params: PyTree,
    value: Array,
    truncated: Array,
    reached: Callable[[Array | None], PyTree],
    memory: PyTree,
    view: Callable[[PyTree], PyTree] = lambda obs: obs,
    rounds: Array | None = None,
) -> Array:
    """Return V(s'_t) [T, B] by an actor-critic network; see `podium.ops.returns.next_values`.

    Args:
      network: whose output is `ActorCritic`.
      params: of it.
      value: [T, B], estimates at t.
      truncated: [T, B] bool, cut and not terminated.
      reached: `Trajectory.reached`, or what tells as it does which observation a step led to, before any reset.
      memory: [T, B, ...], after each step.
      view: applied to those observations that are evaluated.
      rounds: `podium.ops.returns.most_truncations`, where that is known.
    """

    def evaluate(step: Array | None) -> Array:
        no = jnp.zeros(value.shape[1:], bool)
        return network.apply(params, at_step(memory, step), view(reached(step)), no)[0].value

    return returns.next_values(value, truncated, evaluate, rounds)


def q_network(
    hidden_sizes: Sequence[int] = (64, 64),
    activation: str = "relu",
    dueling: bool = False,
    torso: str | nn.Module = "mlp",
    dtype: str = "float32",
    memory: str = "none",
    memory_size: int = 64,
    layer_norm: bool = False,
    num_atoms: int | None = None,
    noisy_std: float | None = None,
) -> Network:
    """Make action values Q [..., A]: a torso, a memory if asked for, and a linear head.

    The head is two (Wang et al. 2016, eq. 9) when `dueling`. With `num_atoms` it gives so many numbers Z an action,
    [..., A, Z], of which a distribution of values is made; `dueling` then adds and subtracts atom by atom (Hessel et
    al. 2018, section 3). The value of an action that is not legal (`podium.types.Seen`) is the least there is; with
    atoms, that is for who makes values of them. `torso`, `dtype`, `memory` and `memory_size` as in `actor_critic`,
    `layer_norm` and `noisy_std`, which heads have too, as in `podium.torsos.make_torso`.

    Raises:
      ValueError: for an unknown name or sizes that are not positive; from `init`, for continuous actions.
    """
    encoder = seeing(make_torso(torso, hidden_sizes, activation, dtype, layer_norm, noisy_std), "", "")
    core = _Core(encoder, make_cell(memory, memory_size))

    def init(key: Key, spec: EnvSpec) -> PyTree:
        number = num_actions(spec, "action values")
        torso_key, action_key, value_key = jax.random.split(key, 3)
        params, width = core.split_init(torso_key, spec)
        params["advantage"] = linear(action_key, width, number * (num_atoms or 1))
        return {**params, "value": linear(value_key, width, num_atoms or 1)} if dueling else params

    def linear(key: Key, inputs: int, outputs: int) -> PyTree:
        std = {} if noisy_std is None else noisy.init_std(inputs, outputs, noisy_std)
        return {**init_linear(key, inputs, outputs, 1.0), **std}

    def heads(params: PyTree, x: Array, obs: PyTree) -> Array:
        outputs, axis = apply_linear(params["advantage"], x), -1
        if num_atoms is not None:
            outputs, axis = outputs.reshape(*outputs.shape[:-1], -1, num_atoms), -2
        if dueling:
            value = apply_value(params["value"], x) if num_atoms is None else apply_linear(params["value"], x)
            outputs = jnp.expand_dims(value, axis) + outputs - outputs.mean(axis, keepdims=True)
        return only_legal(outputs, obs) if num_atoms is None else outputs

    return _with_heads(core, init, heads)._replace(policy_mask=noisy.mean_mask)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Graph:
    """What of an nnx module is no parameter: its definition, which lies among them and is no array.

    Two are equal where the environments are, of which `spec` is the digest: definitions may hold new functions each.
    """

    spec: str
    definition: Any = dataclasses.field(compare=False, repr=False)


_GRAPH = "nnx.GraphDef"
"""Its name among parameters, which is no attribute's."""


def from_nnx(make_module: Callable[[Key, EnvSpec], Any]) -> Network:
    """Make a memory-less `Network` of a flax nnx module.

    Args:
      make_module: `(key, spec) -> nnx.Module`, called as `module(obs, leading_axes)` and returning the output. It is
        split into a graph and a pytree of parameters by `init`; `nnx.jit` is never used.

    Returns:
      a `Network`, whose parameters are the module's `nnx.Param`; its `init` raises ValueError for a module that keeps
      anything else.
    """
    from flax import nnx

    def init(key: Key, spec: EnvSpec) -> PyTree:
        module = make_module(key, spec)
        graph, params = nnx.split(module)
        others = [leaf for _, leaf in nnx.to_flat_state(params) if not isinstance(leaf, nnx.Param)]
        if others:
            kinds = {type(leaf).__name__ if isinstance(leaf, nnx.Variable) else "plain arrays" for leaf in others}
            raise ValueError(
                f"{type(module).__name__} keeps {', '.join(sorted(kinds))} beside nnx.Param, which nothing would "
                "update; use LayerNorm or GroupNorm in place of BatchNorm, leave Dropout out, keep no rngs, and make "
                "constants where they are used."
            )
        return {**nnx.to_pure_dict(params), _GRAPH: _Graph(spec.sha256(), graph)}

    def unroll(params: PyTree, memory: PyTree, obs: PyTree, first: Array) -> Any:
        arrays = {name: part for name, part in params.items() if name != _GRAPH}
        return nnx.merge(params[_GRAPH].definition, arrays)(obs, first.ndim)

    def apply(params: PyTree, memory: PyTree, obs: PyTree, first: Array) -> tuple[Any, PyTree]:
        return unroll(params, memory, obs, first), memory

    return Network(init, lambda num_envs: (), apply, sum_once(unroll))
