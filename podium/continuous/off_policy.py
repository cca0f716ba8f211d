"""What agents share that learn a policy and an ensemble of critics from a replay, as SAC and TD3 do."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax

from podium import replay
from podium.agent import Replay
from podium.continuous.networks import critic_ensemble
from podium.networks import Network
from podium.ops.bounds import Bounds
from podium.ops.statistics import RunningStats
from podium.ranges import check_fields, check_value
from podium.types import Array, Key, PyTree


@dataclasses.dataclass(frozen=True)
class OffPolicyConfig:
    """Hyperparameters of networks, optimisers and the replay."""

    learning_rate: float = 3e-4
    """Adam's step size for the policy, above 0."""
    critic_learning_rate: float = 3e-4
    """Adam's step size for the critics, above 0."""
    gamma: float = 0.99
    """Discount per step, 0 to 1."""
    tau: float = 0.005
    """Share of the way that targets move whenever they do, above 0 to 1."""
    n_step: int = 1
    """Rewards summed before the bootstrap, 1 or more."""
    num_critics: int = 2
    """Critics whose smallest value counts, 1 or more."""
    policy_delay: int = 1
    """Gradient steps of the critics for each one of all else, 1 or more."""
    batch_size: int = 256
    """Transitions in a minibatch, 1 or more; the lanes must divide it."""
    updates_per_step: float = 1.0
    """Gradient steps for each step of an environment (UTD), above 0; a whole number of them for each rollout."""
    buffer_capacity: int = 1_000_000
    """Steps the replay holds, over all environments; rounded down to whole rollouts."""
    min_replay_size: int = 1_000
    """Steps the replay must hold before learning starts, 1 to buffer_capacity."""
    warmup_steps: int = 1_000
    """First steps of the environments, rounded up to whole rollouts, whose actions are uniform within bounds."""
    max_grad_norm: float = 0.0
    """Bound on the global norm of each network's gradient; 0, as in the papers, leaves them unbounded."""
    adam_eps: float = 1e-8
    """Added to Adam's denominator, above 0."""
    normalize_obs: bool = False
    """Whether to normalise observations by running statistics, those of now also for what is replayed."""
    dtype: str = "float32"
    """What hidden layers compute in: float32 or bfloat16; parameters stay float32."""
    hidden_sizes: tuple[int, ...] = (256, 256)
    """Units of each hidden layer, of policy and critics."""
    activation: str = "relu"
    """Nonlinearity of hidden layers: tanh, relu, silu, gelu or elu."""
    actor_obs: str = ""
    """Which part of observations that are a dictionary the policy sees, such as "state"; empty for all of them."""
    critic_obs: str = ""
    """Which part the critics see, such as "privileged_state"; empty for all of them."""

    def critic(self) -> Network:
        """Make the critics; raises ValueError for what `critic_ensemble` refuses."""
        return critic_ensemble(self.num_critics, self.hidden_sizes, self.activation, self.dtype)

    def buffer(self) -> Replay:
        """Make the replay."""
        sizes = self.buffer_capacity, self.batch_size, 1, self.min_replay_size
        return replay.uniform(*sizes, self.n_step, self.gamma)._replace(updates_per_step=self.updates_per_step)

    def check(self, positive: Sequence[str] = (), not_negative: Sequence[str] = ()) -> None:
        """Refuse what is out of range, of these fields and others; the replay and the networks check theirs."""
        check_fields(
            self,
            positive=("learning_rate", "critic_learning_rate", "adam_eps", *positive),
            not_negative=("max_grad_norm", *not_negative),
            shares=("tau",),
            counts=("policy_delay",),
            naturals=("warmup_steps",),
        )
        check_value("updates_per_step", self.updates_per_step, "ratios", "1.0 is usual")


class Params(NamedTuple):
    """What acting needs: the policy, bounds, statistics if observations are normalised, whether actions are random."""

    policy: PyTree
    bounds: Bounds
    obs_stats: RunningStats | None
    random: Array


def random_actions(keys: Key, bounds: Bounds) -> Array:
    """Return actions [B, A] that are uniform in [-1, 1], one key each."""
    return jax.vmap(lambda key: jax.random.uniform(key, bounds.low.shape, minval=-1.0))(keys)
