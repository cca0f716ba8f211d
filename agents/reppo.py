"""Relative entropy pathwise policy optimisation (Voelcker et al. 2025, arXiv 2507.11019), REPPO, for bounded actions.

On-policy, without a replay. Each rollout gives lambda-returns of rewards and entropy; a critic Q(s, a) of what the
policy that acted is worth is fitted to them alone, as a histogram, with a further loss that makes it predict its own
features of what follows. The policy climbs Q by the derivative through its own actions, as SAC's does, and stays near
the policy that acted: where its divergence from that one is over a bound, the divergence falls and Q waits. A
temperature holds the entropy at a target, a multiplier the divergence at its bound.

Choices are those of the authors' code (cvoelcker/reppo, a7ab85b: networks of `reppo_mj_playground.py`, the rest and the
numbers of `jaxrl/reppo.py`). Deliberate differences:

- The divergence KL(old || new) is exact, as that of two normal distributions, which tanh does not change; theirs is
  estimated from 4 or 16 samples. The old policy is the one that acted, also where a placement acts with an older one.
- Nothing is worth anything behind a termination, its entropy neither; theirs counts that once. A step that a time limit
  cuts is bootstrapped from the observation it led to, and learnt from as any other: podium's rollouts keep that
  observation, which theirs need a fork of the environments for and then leave out of the critic's loss.
- Both gradients of a step are taken at one state; theirs of the policy sees the critic just stepped.
- Log standard deviations are squashed into [-5, 2] by tanh and begin about 0; theirs are not bounded.
- Observations are normalised by the statistics of former rollouts, and the same in rollout and loss.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from podium.agent import ActOutput, Agent, Aux, Plan, brought_to
from podium.continuous import JUDGEMENT, STOCHASTIC, gaussian_policy, predictive_critic, seeing
from podium.networks import Network, brought_or, policy_mask
from podium.ops import optimizers, returns, statistics
from podium.ops.bounds import Bounds
from podium.ops.counts import Count
from podium.ops.distributions import TanhNormal
from podium.ops.histogram import Histogram
from podium.ops.statistics import RunningStats, count_valid, masked_means
from podium.ranges import check_atoms, check_config, check_fields
from podium.types import Array, EnvSpec, Key, Metrics, PyTree, Trajectory


@dataclasses.dataclass(frozen=True)
class Config:
    """Hyperparameters of REPPO; numbers are the authors' for 1,024 environments x 128 steps of DeepMind Control."""

    learning_rate: float = 3e-4
    """Adam's step size, above 0."""
    anneal_steps: int = 0
    """Environment steps over which the learning rate falls linearly to zero; 0 keeps it constant."""
    gamma: float = 0.99
    """Discount per step, 0 to 1."""
    td_lambda: float = 0.95
    """Trace decay of the returns that the critic is fitted to, 0 (one step) to 1 (the whole rollout)."""
    kl_bound: float = 0.1
    """How far, in nats, a policy may move from the one that acted before it is pulled back, above 0."""
    initial_kl_multiplier: float = 0.01
    """Weight of that divergence where it is over its bound, at the start; above 0."""
    initial_temperature: float = 0.01
    """Weight of the entropy at the start, in units of reward per nat, above 0."""
    target_entropy_scale: float = 0.5
    """The entropy aimed at is minus this for each action dimension, in nats of actions in [-1, 1], 0 or more."""
    num_epochs: int = 8
    """Passes over each rollout."""
    num_minibatches: int = 64
    """Parts of one pass, a gradient step each."""
    num_bins: int = 151
    """Bins of the critic's histogram, 2 or more."""
    value_min: float = -100.0
    """Least value that the critic can tell, discounted rewards and entropy; see the metric target_outside."""
    value_max: float = 100.0
    """Largest value that the critic can tell, above value_min."""
    prediction_coef: float = 1.0
    """Weight of the critic's prediction of the features and the reward that follow; 0 leaves it out."""
    max_grad_norm: float = 0.5
    """Bound on the global norm of each network's gradient; 0 leaves them unbounded."""
    adam_eps: float = 1e-8
    """Added to Adam's denominator, above 0."""
    normalize_obs: bool = True
    """Whether to normalise observations by running statistics."""
    dtype: str = "float32"
    """What hidden layers compute in: float32 or bfloat16; parameters stay float32."""
    hidden_sizes: tuple[int, ...] = (512, 512, 512)
    """Units of each hidden layer, of the policy and of the critic's features."""
    activation: str = "silu"
    """Nonlinearity of hidden layers, behind a layer norm: tanh, relu, silu, gelu or elu."""
    actor_obs: str = ""
    """Which part of observations that are a dictionary the policy sees, such as "state"; empty for all of them."""
    critic_obs: str = ""
    """Which part the critic sees, such as "privileged_state"; empty for all of them."""


class Params(NamedTuple):
    """What acting needs: the policy, bounds of actions and, if observations are normalised, their statistics."""

    policy: PyTree
    bounds: Bounds
    obs_stats: RunningStats | None


class Actor(NamedTuple):
    """What steps by the policy's loss: its parameters, and logarithms of the two weights, which are scalars."""

    policy: PyTree
    log_temperature: Array
    log_kl_multiplier: Array


class Parts(NamedTuple):
    """One of each that is learnt: parameters, states of optimisers, or gradients."""

    actor: Any
    critic: PyTree


class State(NamedTuple):
    """What learning needs."""

    params: Parts
    opt_state: Parts
    bounds: Bounds
    obs_stats: RunningStats | None
    env_steps: Count


class Batch(NamedTuple):
    """What a gradient step sees, [N, ...].

    Observations are normalised, actions in [-1, 1]; `goes_on` is 0 where the episode terminated, else 1;
    `next_features` are the critic's before the iteration, and `old` is the policy that acted.
    """

    obs: PyTree
    action: Array
    reward: Array
    goes_on: Array
    target: Array
    next_features: Array
    old: TanhNormal
    valid: Array | None


def soft_lambda_return(
    reward: Array,
    discount: Array,
    last: Array,
    next_q: Array,
    next_log_prob: Array,
    temperature: Array,
    td_lambda: Any,
) -> Array:
    """Return what the critic regresses to [T, B]: TD(lambda) of rewards and entropy.

        G_t = r_t + discount_t * ((1 - lambda_t) * Q(s'_t, a'_t) + lambda_t * G_{t+1} - alpha * log pi(a'_t | s'_t))

    where lambda_t is lambda inside an episode, and 0 where one ended and in the last row.

    Args:
      reward: [T, B], received after the action at t.
      discount: [T, B], gamma, or 0 where the episode terminated.
      last: [T, B], True where an episode ended, either way.
      next_q: [T, B], Q(s', a') at the observation reached, before any reset; a' is the policy's.
      next_log_prob: [T, B], of that action, nats.
      temperature: alpha, a scalar.
      td_lambda: in [0, 1].
    """
    reward = reward - discount * temperature * next_log_prob
    # The advantage over what the step before expected of this one; what is taken off is added again.
    expected = jnp.concatenate([jnp.zeros_like(next_q[:1]), next_q[:-1]])
    return returns.gae(reward, discount, expected, next_q, last, td_lambda) + expected


def policy_losses(config: Config, actor: Actor, q: Array, log_prob: Array, kl: Array, num_actions: int) -> Array:
    """Return the policy's loss and those of its two weights, summed, row by row [N].

        policy:       alpha * log pi(a | s) - Q(s, a)   where KL < bound,   beta * KL   elsewhere
        temperature:  alpha * (entropy - target),   entropy = -log pi(a | s),   target = -target_entropy_scale * A
        multiplier:   beta * (bound - KL)

    Of products only one factor is learnt by each: alpha and beta are constants to the policy, and it is one to them.

    Args:
      config: hyperparameters.
      actor: its `log_temperature`, log alpha, and `log_kl_multiplier`, log beta.
      q: [N], at actions a of the policy.
      log_prob: [N], of these, nats.
      kl: [N], from the policy that acted, nats.
      num_actions: A.
    """
    stop = jax.lax.stop_gradient
    alpha, beta = jnp.exp(actor.log_temperature), jnp.exp(actor.log_kl_multiplier)
    policy = jnp.where(kl < config.kl_bound, stop(alpha) * log_prob - q, stop(beta) * kl)
    target_entropy = -config.target_entropy_scale * num_actions
    temperature = alpha * stop(-log_prob - target_entropy)
    return policy + temperature + beta * stop(config.kl_bound - kl)


def make(config: Config = Config(), policy: Network | None = None, critic: Network | None = None) -> Agent:
    """Make a REPPO agent.

    Args:
      config: hyperparameters.
      policy: without memory, whose output is `TanhNormal`; None builds one of `config`'s sizes.
      critic: without memory, of pairs `(obs, action in [-1, 1])`, whose output is a `podium.continuous.Judgement`;
        None likewise.

    Returns:
      an `Agent`.

    Raises:
      ValueError: for a field out of range or a network with memory; from `init`, for actions that are discrete or
        have no bounds, and for `normalize_obs` with discrete observations.
    """
    check_config(config, Config)
    _check(config)
    again = functools.partial(make, policy=policy, critic=critic)
    histogram = Histogram(config.value_min, config.value_max, config.num_bins)
    sizes = config.hidden_sizes, config.activation, config.dtype
    policy = brought_or(policy, lambda: gaussian_policy(*sizes, layer_norm=True, log_std=0.0), "policy", STOCHASTIC)
    critic = brought_or(critic, lambda: predictive_critic(histogram, *sizes), "critic", JUDGEMENT)
    policy, critic = seeing(policy, critic, config.actor_obs, config.critic_obs)
    adam = optimizers.make("adam", config.adam_eps, config.max_grad_norm)

    def init(key: Key, spec: EnvSpec) -> State:
        bounds = Bounds.of(spec, "reppo needs", "use ppo")
        policy_key, critic_key = jax.random.split(key)
        logs = (jnp.log(jnp.float32(x)) for x in (config.initial_temperature, config.initial_kl_multiplier))
        params = Parts(Actor(policy.init(policy_key, spec), *logs), critic.init(critic_key, spec))
        obs_stats = statistics.init_obs_stats(config.normalize_obs, spec, config.actor_obs, config.critic_obs)
        return State(params, Parts(*map(adam.init, params)), bounds, obs_stats, Count.zero())

    def actor(state: State) -> Params:
        return Params(state.params.actor.policy, state.bounds, state.obs_stats)

    def carry(spec: EnvSpec, num_envs: int) -> PyTree:
        return ()

    def act(keys: Key, params: Params, memory: PyTree, obs: PyTree, first: Array, greedy: bool) -> ActOutput:
        chosen, memory = policy.apply(params.policy, memory, statistics.normalize(params.obs_stats, obs), first)
        raw = chosen.mode() if greedy else chosen.sample(keys)
        # One deviation a row, also where a policy that was brought has one for all: rows become minibatches.
        chosen = chosen._replace(log_std=jnp.broadcast_to(chosen.log_std, chosen.mean.shape))
        return ActOutput(params.bounds.to_env(chosen.squash(raw)), memory, chosen)

    def plan(key: Key, state: State, trajectory: Trajectory) -> Plan:
        params, first = state.params, jnp.zeros(trajectory.reward.shape, bool)
        next_obs = statistics.normalize(state.obs_stats, trajectory.next_obs)
        next_policy = policy.unroll(params.actor.policy, (), next_obs, first)
        next_action, next_log_prob = next_policy.draw(jax.random.normal(key, trajectory.action.shape))
        following = critic.unroll(params.critic, (), (next_obs, next_action), first)
        target = soft_lambda_return(
            trajectory.reward,
            config.gamma * trajectory.discount,
            trajectory.last,
            histogram.mean(following.logits),
            next_log_prob,
            jnp.exp(params.actor.log_temperature),
            config.td_lambda,
        )
        batch = Batch(
            statistics.kept(state.obs_stats, trajectory),
            state.bounds.to_unit(trajectory.action),
            trajectory.reward,
            trajectory.discount,
            target,
            following.features,
            trajectory.extras,
            trajectory.valid,
        )
        return Plan(batch, num_epochs=config.num_epochs, num_minibatches=config.num_minibatches)

    def grad(key: Key, state: State, batch: Batch) -> tuple[Parts, Aux]:
        params, first = state.params, jnp.zeros(batch.reward.shape, bool)
        noise = jax.random.normal(key, batch.action.shape)

        def critic_loss(critic_params: PyTree) -> tuple[Array, Metrics]:
            judged = critic.unroll(critic_params, (), (batch.obs, batch.action), first)
            aim = jnp.concatenate([batch.next_features, batch.reward[:, None]], axis=-1)
            means = masked_means(
                batch.valid,
                value_loss=histogram.cross_entropy(judged.logits, batch.target),
                prediction_loss=batch.goes_on * jnp.mean(jnp.square(judged.prediction - aim), axis=-1),
                value_error=jnp.abs(histogram.mean(judged.logits) - batch.target),
                target=batch.target,
                target_outside=histogram.outside(batch.target).astype(jnp.float32),
            )
            total = means["value_loss"] + config.prediction_coef * means["prediction_loss"]
            return total, {"loss": total, **means}

        def actor_loss(actor: Actor) -> tuple[Array, Metrics]:
            chosen = policy.unroll(actor.policy, (), batch.obs, first)
            action, log_prob = chosen.draw(noise)
            q = histogram.mean(critic.unroll(params.critic, (), (batch.obs, action), first).logits)
            kl = batch.old.kl(chosen)
            losses = policy_losses(config, actor, q, log_prob, kl, action.shape[-1])
            over = (kl >= config.kl_bound).astype(jnp.float32)
            means = masked_means(batch.valid, actor_loss=losses, entropy=-log_prob, kl=kl, kl_over_bound=over)
            return means["actor_loss"], means

        critic_grad, metrics = jax.grad(critic_loss, has_aux=True)(params.critic)
        actor_grad, more = jax.grad(actor_loss, has_aux=True)(params.actor)
        weights = jnp.exp(params.actor.log_temperature), jnp.exp(params.actor.log_kl_multiplier)
        metrics = {**metrics, **more, "temperature": weights[0], "kl_multiplier": weights[1]}
        return Parts(actor_grad, critic_grad), Aux(metrics)

    def apply(state: State, grads: Parts) -> State:
        rate = optimizers.annealed(config.learning_rate, config.anneal_steps, state.env_steps.total())
        rows = zip(state.params, state.opt_state, grads, strict=True)
        stepped = [optimizers.descend(adam, rate, *row) for row in rows]
        return state._replace(
            params=Parts(*(params for params, _ in stepped)), opt_state=Parts(*(left for _, left in stepped))
        )

    def observe(state: State, trajectory: Trajectory) -> State:
        valid = trajectory.valid
        return state._replace(
            env_steps=state.env_steps.add(count_valid(trajectory.reward, valid)),
            obs_stats=statistics.update_stats(state.obs_stats, trajectory.obs, valid),
        )

    functions = init, actor, carry, act, plan, grad, apply, observe
    mask = functools.partial(policy_mask, policy, path=("actor", "policy"))
    return Agent(*functions, name="reppo", config=config, make=again, policy_mask=mask, brought=brought_to(again))


def _check(config: Config) -> None:
    """Refuse what is out of range; the networks check the fields that are theirs."""
    check_fields(
        config,
        positive=("learning_rate", "kl_bound", "initial_kl_multiplier", "initial_temperature", "adam_eps"),
        not_negative=("anneal_steps", "target_entropy_scale", "prediction_coef", "max_grad_norm"),
        fractions=("gamma", "td_lambda"),
        counts=("num_epochs", "num_minibatches"),
    )
    check_atoms(config, "value_min", "value_max", "num_bins")
