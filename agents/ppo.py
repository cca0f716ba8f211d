"""Proximal policy optimisation (Schulman et al. 2017, arXiv 1707.06347), clipped objective.

Discrete and continuous actions, feed-forward and recurrent: the distribution follows the environment's actions, the
memory is the network's. Deliberate differences from the paper: advantages are normalised over each minibatch, the
optimiser is Adam with a global gradient norm bound, networks are orthogonally initialised (Engstrom et al. 2020).

Rewards are normalised as by Gymnasium's NormalizeReward, each environment's discounted sum going on from rollout to
rollout; but a rollout's rewards are divided by the deviation as it was before that rollout, not step by step.

No parameter changes the mean and deviation of a minibatch's advantages, so those of all minibatches are computed before
an iteration's first gradient (`Agent.statistics`): over several devices a gradient step is one sum, of the gradients.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from podium import networks
from podium.agent import ActOutput, Agent, Aux, Plan, brought_to
from podium.networks import ActorCritic, ActorCriticConfig, Network, policy_mask
from podium.ops import optimizers, returns, statistics
from podium.ops.counts import Count
from podium.ops.statistics import RunningStats, count_rows, masked_mean, masked_means
from podium.ranges import check_config, check_fields, is_on
from podium.types import Array, EnvSpec, Key, Metrics, PyTree, Trajectory


@dataclasses.dataclass(frozen=True)
class Config(ActorCriticConfig):
    """Hyperparameters of PPO."""

    learning_rate: float = 2.5e-4
    """Adam's step size."""
    anneal_steps: int = 0
    """Environment steps over which the learning rate falls linearly to zero; 0 keeps it constant."""
    gamma: float = 0.99
    """Discount per step, 0 to 1."""
    gae_lambda: float = 0.95
    """Trace decay of generalised advantage estimation, 0 (one step) to 1 (whole return)."""
    clip_epsilon: float = 0.2
    """How far the probability ratio may move from 1 before its gradient is cut."""
    value_clip: float = 0.0
    """How far a value may move from the one acted with before its gradient is cut; 0 never cuts."""
    value_coef: float = 0.5
    """Weight of the value loss."""
    entropy_coef: float = 0.01
    """Weight of the entropy bonus, per nat."""
    num_epochs: int = 4
    """Passes over each rollout."""
    num_minibatches: int = 4
    """Parts of one pass, a gradient step each."""
    max_grad_norm: float = 0.5
    """Bound on the global norm of the gradient; 0 leaves it unbounded."""
    adam_eps: float = 1e-5
    """Added to Adam's denominator."""
    target_kl: float = 0.0
    """Skip the rest of an iteration's gradient steps once the approximate KL divergence exceeds this; 0 never does."""
    normalize_advantage: bool = True
    """Whether to give the advantages of each minibatch mean 0 and deviation 1."""
    normalize_obs: bool = False
    """Whether to normalise observations by running statistics."""
    normalize_reward: bool = False
    """Whether to divide rewards by the running deviation of the discounted return."""
    normalized_reward_bound: float = 0.0
    """Bound on the size of normalised rewards; 0 leaves them unbounded, 10 is usual elsewhere."""


class Params(NamedTuple):
    """What acting needs: network parameters and, if observations are normalised, their statistics."""

    network: PyTree
    obs_stats: RunningStats | None


class State(NamedTuple):
    """What learning needs."""

    params: PyTree
    opt_state: optax.OptState
    env_steps: Count
    obs_stats: RunningStats | None
    return_stats: RunningStats | None


class Batch(NamedTuple):
    """What a gradient step sees, [N, ...] or, with memory, [T, N, ...].

    `advantage` is normalised when a loss sees it, if `Config.normalize_advantage`; `num_valid`, a scalar, is then how
    many rows are valid, for `masked_mean`; None where all are.
    """

    obs: PyTree
    first: Array
    action: Array
    log_prob: Array
    value: Array
    advantage: Array
    target: Array
    valid: Array | None
    num_valid: Array | None = None


class Statistics(NamedTuple):
    """What is known of a minibatch before its gradient: of its advantages, None if they stay as they are; its rows."""

    mean: Array | None
    std: Array | None
    num_valid: Array | None


def summarize(config: Config, batch: Batch) -> Statistics:
    """Return what `normalize_advantage` needs to know of a minibatch; no parameter changes it."""
    num_valid = count_rows(batch.valid)
    if not config.normalize_advantage:
        return Statistics(None, None, num_valid)
    mean = masked_mean(batch.advantage, batch.valid, num_valid)
    std = jnp.sqrt(masked_mean(jnp.square(batch.advantage - mean), batch.valid, num_valid))
    return Statistics(mean, std, num_valid)


def normalize_advantage(batch: Batch, known: Statistics) -> Batch:
    """Return the minibatch as a loss sees it: with advantages of mean 0 and deviation 1, if those are `known`."""
    batch = batch._replace(num_valid=known.num_valid)
    if known.mean is None or known.std is None:
        return batch
    return batch._replace(advantage=(batch.advantage - known.mean) / (known.std + 1e-8))


def loss(config: Config, output: ActorCritic, batch: Batch) -> tuple[Array, Metrics]:
    """Return the clipped surrogate loss (Schulman et al. 2017, eq. 7 and 9), to be minimised, and metrics.

    Args:
      config: hyperparameters.
      output: of the network that learns.
      batch: the rows, with advantages normalised already; see `normalize_advantage`.
    """
    log_ratio = output.policy.log_prob(batch.action) - batch.log_prob
    ratio = jnp.exp(log_ratio)
    clipped = jnp.clip(ratio, 1 - config.clip_epsilon, 1 + config.clip_epsilon)

    error = jnp.square(output.value - batch.target)
    if is_on(config.value_clip):
        near = batch.value + jnp.clip(output.value - batch.value, -config.value_clip, config.value_clip)
        error = jnp.maximum(error, jnp.square(near - batch.target))
    means = masked_means(
        batch.valid,
        batch.num_valid,
        policy_loss=-jnp.minimum(ratio * batch.advantage, clipped * batch.advantage),
        value_loss=0.5 * error,
        entropy=output.policy.entropy(),
        # Schulman's low-variance estimate of KL(old || new).
        approx_kl=ratio - 1 - log_ratio,
        clip_fraction=(jnp.abs(ratio - 1) > config.clip_epsilon).astype(jnp.float32),
    )
    total = means["policy_loss"] + config.value_coef * means["value_loss"] - config.entropy_coef * means["entropy"]
    return total, {"loss": total, **means}


Loss = Callable[[Config, ActorCritic, Batch], tuple[Array, Metrics]]


def make(config: Config = Config(), network: Network | None = None, loss: Loss = loss) -> Agent:
    """Make a PPO agent.

    Args:
      config: hyperparameters.
      network: whose output is `ActorCritic`; None builds one of `config`'s sizes.
      loss: `(config, output, batch) -> (scalar, metrics)`, with at least "approx_kl" among the metrics where
        `config.target_kl` is used; change PPO by passing another. `batch.advantage` is normalised already, if
        `config.normalize_advantage`.

    Returns:
      an `Agent`.

    Raises:
      ValueError: for a field out of range; from `init`, for `normalize_obs` with discrete observations.
    """
    check_config(config, Config)
    _check(config)
    again = functools.partial(make, network=network, loss=loss)
    network = networks.brought_or(network, config.network, wanted=networks.ACTOR_CRITIC)
    optimizer = optimizers.make("adam", config.adam_eps, config.max_grad_norm)

    def init(key: Key, spec: EnvSpec) -> State:
        obs_stats = statistics.init_obs_stats(config.normalize_obs, spec, config.actor_obs, config.critic_obs)
        params = network.init(key, spec)
        if config.normalize_reward and spec.turns:
            raise ValueError(
                f"normalize_reward=True: in {spec.name} two players take turns, and no sum of rewards is one player's; "
                "leave it out."
            )
        return_stats = statistics.init_stats(jnp.zeros(())) if config.normalize_reward else None
        return State(params, optimizer.init(params), Count.zero(), obs_stats, return_stats)

    def actor(state: State) -> Params:
        return Params(state.params, state.obs_stats)

    def carry(spec: EnvSpec, num_envs: int) -> PyTree:
        return networks.fresh_memory(network, spec.obs, num_envs)

    def act(keys: Key, params: Params, memory: PyTree, obs: PyTree, first: Array, greedy: bool) -> ActOutput:
        return networks.act(
            network, keys, params.network, memory, statistics.normalize(params.obs_stats, obs), first, greedy
        )

    def plan(key: Key, state: State, trajectory: Trajectory) -> Plan:
        value = trajectory.extras.value
        reward = trajectory.reward
        if state.return_stats is not None:
            reward = reward / state.return_stats.reward_scale()
            if is_on(config.normalized_reward_bound):
                reward = jnp.clip(reward, -config.normalized_reward_bound, config.normalized_reward_bound)
        cut = trajectory.truncated & ~trajectory.terminated
        reached = trajectory.reached, trajectory.extras.memory
        seen = functools.partial(statistics.normalize, state.obs_stats)
        next_value = networks.next_values(network, state.params, value, cut, *reached, seen)
        discount = config.gamma * trajectory.discount
        advantage = returns.gae(reward, discount, value, next_value, trajectory.last, config.gae_lambda)
        batch = Batch(
            statistics.kept(state.obs_stats, trajectory),
            trajectory.first,
            networks.drawn(trajectory),
            trajectory.extras.log_prob,
            value,
            advantage,
            advantage + value,
            trajectory.valid,
        )
        sizes = config.num_epochs, config.num_minibatches
        if config.normalize_advantage and advantage.size == config.num_minibatches:
            raise ValueError(
                f"num_minibatches={config.num_minibatches} of {advantage.size} steps are minibatches of one, whose "
                "normalised advantage is 0, so that no policy is learnt; use normalize_advantage=False, fewer "
                "minibatches, more environments or a longer rollout."
            )
        return Plan(batch, trajectory.carry, *sizes, "sequence" if network.recurrent else "step")

    def statistics_of(minibatch: Any) -> Statistics:
        return summarize(config, minibatch[0] if network.recurrent else minibatch)

    def grad(key: Key, state: State, given: tuple[Any, Statistics]) -> tuple[PyTree, Aux]:
        minibatch, known = given
        batch, memory = minibatch if network.recurrent else (minibatch, ())
        batch = normalize_advantage(batch, known)

        def objective(params: PyTree) -> tuple[Array, Metrics]:
            return loss(config, network.unroll(params, memory, batch.obs, batch.first), batch)

        gradient, metrics = jax.grad(objective, has_aux=True)(state.params)
        return gradient, Aux(metrics)

    def stops(metrics: Metrics) -> Array:
        return metrics["approx_kl"] > config.target_kl

    def apply(state: State, grads: PyTree) -> State:
        rate = optimizers.annealed(config.learning_rate, config.anneal_steps, state.env_steps.total())
        params, opt_state = optimizers.descend(optimizer, rate, state.params, state.opt_state, grads)
        return state._replace(params=params, opt_state=opt_state)

    def observe(state: State, trajectory: Trajectory) -> State:
        valid = trajectory.valid
        state = state._replace(
            env_steps=state.env_steps.add(statistics.count_valid(trajectory.reward, valid)),
            obs_stats=statistics.update_stats(state.obs_stats, trajectory.obs, valid),
        )
        if state.return_stats is not None:
            assert trajectory.past is not None
            rewards = trajectory.reward, trajectory.terminated
            sums = returns.discounted_sums(*rewards, config.gamma, trajectory.past, valid)
            state = state._replace(return_stats=statistics.update_stats(state.return_stats, sums, valid))
        return state

    functions = init, actor, carry, act, plan, grad, apply, observe
    return Agent(
        *functions,
        name="ppo",
        config=config,
        make=again,
        statistics=statistics_of,
        policy_mask=functools.partial(policy_mask, network),
        stops=stops if is_on(config.target_kl) else None,
        reward_discount=config.gamma if config.normalize_reward else None,
        brought=brought_to(again),
    )


def _check(config: Config) -> None:
    check_fields(
        config,
        positive=("learning_rate", "clip_epsilon", "adam_eps"),
        not_negative=(
            "anneal_steps",
            "value_clip",
            "value_coef",
            "entropy_coef",
            "max_grad_norm",
            "target_kl",
            "normalized_reward_bound",
        ),
        fractions=("gamma", "gae_lambda"),
        counts=("num_epochs", "num_minibatches"),
    )
    if is_on(config.normalized_reward_bound) and not config.normalize_reward:
        raise ValueError(
            f"normalized_reward_bound={config.normalized_reward_bound} bounds normalised rewards only; use it with "
            "normalize_reward=True, or leave it out."
        )
