"""Networks as plain functions over pytrees of parameters, built from flax linen torsos.

An agent sees only `Network`: init, carry, apply, unroll. Anything with these four functions will do; `from_nnx` shows
how a flax nnx module gets there. What the outputs are (a policy and a value, action values) is decided by the heads.
The number of outputs is read from the parameters, which `init` made to the environment's spec.
"""

from podium.networks.acting import Extras, act, drawn, next_values
from podium.networks.action_values import q_network, values_of_actions
from podium.networks.brought import ROWS, Wanted, brought_or, shape_of
from podium.networks.cells import GRU, LSTM, MEMORIES, make_cell
from podium.networks.flax_nnx import from_nnx
from podium.networks.heads import (
    NARROW,
    apply_linear,
    apply_policy,
    apply_value,
    check_one_action,
    init_linear,
    init_policy,
    num_actions,
)
from podium.networks.network import Network, Unroll, network_seeing, policy_mask, remember
from podium.networks.players import by_players, fresh_memory
from podium.networks.policy_and_value import (
    ACTOR_CRITIC,
    ActorCritic,
    ActorCriticConfig,
    actor_critic,
    actor_critic_mask,
)
from podium.networks.summed import batch_over, sum_once, units_are_split

__all__ = [
    "ACTOR_CRITIC",
    "GRU",
    "LSTM",
    "MEMORIES",
    "NARROW",
    "ROWS",
    "ActorCritic",
    "ActorCriticConfig",
    "Extras",
    "Network",
    "Unroll",
    "Wanted",
    "act",
    "actor_critic",
    "actor_critic_mask",
    "apply_linear",
    "apply_policy",
    "apply_value",
    "batch_over",
    "brought_or",
    "by_players",
    "check_one_action",
    "drawn",
    "fresh_memory",
    "from_nnx",
    "init_linear",
    "init_policy",
    "make_cell",
    "network_seeing",
    "next_values",
    "num_actions",
    "policy_mask",
    "q_network",
    "remember",
    "shape_of",
    "sum_once",
    "units_are_split",
    "values_of_actions",
]
