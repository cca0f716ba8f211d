"""Networks with a policy and a value."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import flax.linen as nn
import jax

from podium.networks.brought import ROWS, Wanted, shape_of
from podium.networks.cells import Core, make_cell, with_heads
from podium.networks.heads import apply_policy, apply_value, init_linear, init_policy
from podium.networks.network import Network
from podium.networks.summed import sum_once
from podium.ops.bounds import Bounds
from podium.ops.distributions import Categorical, DiagGaussian, Policy, TanhNormal
from podium.ranges import check_value
from podium.seen import only_legal, world_of
from podium.torsos import make_torso, seeing
from podium.types import Array, DiscreteSpec, EnvSpec, Key, PyTree


class ActorCritic(NamedTuple):
    """Output of an actor-critic network: a distribution over actions, and values [...].

    `bounds` are those of the actions where the policy is a `TanhNormal`, which draws what is squashed into them.
    """

    policy: Policy
    value: Array
    bounds: Bounds | None = None


def _fits(output: Any, spec: EnvSpec) -> bool:
    """Tell whether there are a value and a policy over the actions of `spec`; a policy of one's own may be anything."""
    if not all(hasattr(output, x) for x in ActorCritic._fields) or shape_of(output.value) != (ROWS,):
        return False
    policy, action = output.policy, spec.action
    if isinstance(policy, Categorical):
        return isinstance(action, DiscreteSpec) and shape_of(policy.logits) == (ROWS, action.num_values)
    if isinstance(policy, DiagGaussian | TanhNormal):
        continuous = not isinstance(action, DiscreteSpec) and shape_of(policy.mean) == (ROWS, *action.shape)
        return continuous and (output.bounds is not None) == isinstance(policy, TanhNormal)
    return True


def _legal(output: ActorCritic, obs: PyTree) -> ActorCritic:
    if isinstance(output.policy, Categorical):
        return output._replace(policy=Categorical(only_legal(output.policy.logits, obs)))
    return output


ACTOR_CRITIC = Wanted(
    f"an ActorCritic with one value each, [{ROWS}], and a policy over the actions there are (a Categorical of as many "
    "logits, a DiagGaussian of as many means, or a TanhNormal and the bounds), as networks.actor_critic does",
    _fits,
    legal=_legal,
)
"""What agents with an actor and a critic need."""


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
        actor = Core(policy_sees, cell, ("actor", "actor_memory"))
        return _separate_actor_critic(actor, Core(value_sees, cell, ("critic", "critic_memory")), squash)
    return _shared_actor_critic(Core(policy_sees, cell), squash)


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


def _separate_actor_critic(actor: Core, critic: Core, squash: bool) -> Network:
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


def _shared_actor_critic(core: Core, squash: bool) -> Network:
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

    return with_heads(core, init, heads)._replace(policy_mask=actor_critic_mask)
