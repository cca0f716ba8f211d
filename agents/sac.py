"""Soft actor-critic (Haarnoja et al. 2018b, arXiv 1812.05905), for continuous actions within bounds.

A policy that maximises reward and entropy, an ensemble of critics whose smallest value is believed, a temperature that
is learnt so that the entropy meets a target. Deliberate differences from the paper:

- Policies, critics, densities and the target entropy are of actions scaled to [-1, 1], so that none of them depends on
  the units of an environment (as in Stable-Baselines3; CleanRL's densities are in the environment's units).
- The three gradients of a step are taken at one state, as Brax does; the paper's policy step sees the critics just
  stepped.
- Log standard deviations are squashed into [-5, 2] by tanh (as in CleanRL) instead of cut to [-20, 2].
- Many environments at once; n-step returns, whose entropy bonus is that of their last state alone; episodes cut by a
  time limit are bootstrapped from.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from podium import replay
from podium.agent import ActOutput, Agent, Aux, Plan, brought_to
from podium.continuous import (
    ENSEMBLE,
    STOCHASTIC,
    OffPolicyConfig,
    Params,
    gaussian_policy,
    random_actions,
    seeing,
)
from podium.networks import Network, brought_or, policy_mask
from podium.ops import optimizers, statistics
from podium.ops.bounds import Bounds
from podium.ops.counts import Count
from podium.ops.statistics import RunningStats, count_valid, masked_mean, masked_means
from podium.ranges import check_config
from podium.replay import Batch
from podium.types import Array, EnvSpec, Key, Metrics, PyTree, Trajectory


@dataclasses.dataclass(frozen=True)
class Config(OffPolicyConfig):
    """Hyperparameters of SAC; numbers are the paper's (table 1) unless said."""

    temperature_learning_rate: float = 3e-4
    """Adam's step size for the logarithm of the temperature; 0 keeps it at initial_temperature."""
    initial_temperature: float = 1.0
    """Weight of the entropy at the start, in units of reward per nat, above 0."""
    target_entropy_scale: float = 1.0
    """The entropy aimed at is minus this for each action dimension, in nats of actions in [-1, 1], 0 or more."""


class Parts(NamedTuple):
    """One of each that is learnt: parameters, states of optimisers, or gradients."""

    policy: PyTree
    critic: PyTree
    log_temperature: PyTree


class State(NamedTuple):
    """What learning needs: `updates`, gradient steps, is an int32 scalar."""

    params: Parts
    target_critic: PyTree
    opt_state: Parts
    bounds: Bounds
    obs_stats: RunningStats | None
    env_steps: Count
    updates: Array


class Grads(NamedTuple):
    """Gradients, and `due`, 1.0 where the policy and the temperature are to step by theirs, else 0.0 and theirs are 0.

    It travels with them, for a placement may apply them to a state that has stepped on since.
    """

    parts: Parts
    due: Array


def soft_target(batch: Batch, next_q: Array, next_log_prob: Array, temperature: Array) -> Array:
    """Return what critics regress to (Haarnoja et al. 2018b, eq. 2, 3 and 5, with the smallest of several critics).

        y = R + discount * (min_i Q_i(s', a') - alpha * log pi(a' | s')),   a' ~ pi(. | s')

    Args:
      batch: n-step transitions [N].
      next_q: [E, N], by the target critics.
      next_log_prob: [N], nats.
      temperature: alpha, a scalar.
    """
    return batch.reward + batch.discount * (jnp.min(next_q, axis=0) - temperature * next_log_prob)


def policy_loss(q: Array, log_prob: Array, temperature: Array, valid: Array | None) -> Array:
    """Return mean( alpha * log pi(a | s) - min_i Q_i(s, a) ), a by the policy (Haarnoja et al. 2018b, eq. 9).

    Args:
      q: [E, N].
      log_prob: [N], nats.
      temperature: alpha, a scalar.
      valid: [N] rows that count; None for all.
    """
    return masked_mean(temperature * log_prob - jnp.min(q, axis=0), valid)


def temperature_loss(log_temperature: Array, log_prob: Array, target_entropy: float, valid: Array | None) -> Array:
    """Return mean( -alpha * (log pi(a | s) + target entropy) ) (Haarnoja et al. 2018b, eq. 18).

    Its gradient lowers the temperature where the entropy is above its target.
    """
    return -jnp.exp(log_temperature) * (masked_mean(log_prob, valid) + target_entropy)


def make(config: Config = Config(), policy: Network | None = None, critic: Network | None = None) -> Agent:
    """Make a SAC agent.

    Args:
      config: hyperparameters.
      policy: without memory, whose output is `TanhNormal`; None builds one of `config`'s sizes.
      critic: without memory, of pairs `(obs, action in [-1, 1])`, whose output is values [E, ...]; None likewise.

    Returns:
      an `Agent` with a `Replay`.

    Raises:
      ValueError: for a field out of range or a network with memory; from `init`, for actions that are discrete or
        have no bounds, and for `normalize_obs` with discrete observations.
    """
    check_config(config, Config)
    config.check(positive=("initial_temperature",), not_negative=("temperature_learning_rate", "target_entropy_scale"))
    again = functools.partial(make, policy=policy, critic=critic)
    sizes = config.hidden_sizes, config.activation, config.dtype
    policy = brought_or(policy, lambda: gaussian_policy(*sizes), "policy", STOCHASTIC)
    critic = brought_or(critic, config.critic, "critic", ENSEMBLE)
    policy, critic = seeing(policy, critic, config.actor_obs, config.critic_obs)
    adam = optimizers.make("adam", config.adam_eps, config.max_grad_norm)
    unbounded_adam = optimizers.make("adam", config.adam_eps)
    algorithms = Parts(adam, adam, unbounded_adam)
    rates = Parts(config.learning_rate, config.critic_learning_rate, config.temperature_learning_rate)

    def init(key: Key, spec: EnvSpec) -> State:
        bounds = Bounds.of(spec, "sac needs", "use ppo, or dqn where they are discrete")
        policy_key, critic_key = jax.random.split(key)
        log_temperature = jnp.log(jnp.float32(config.initial_temperature))
        params = Parts(policy.init(policy_key, spec), critic.init(critic_key, spec), log_temperature)
        # A copy: a state that held one buffer twice could not be donated.
        target_critic = jax.tree.map(jnp.copy, params.critic)
        opt_state = Parts(*(algorithm.init(part) for algorithm, part in zip(algorithms, params, strict=True)))
        obs_stats = statistics.init_obs_stats(config.normalize_obs, spec, config.actor_obs, config.critic_obs)
        return State(params, target_critic, opt_state, bounds, obs_stats, Count.zero(), jnp.zeros((), jnp.int32))

    def actor(state: State) -> Params:
        random = state.env_steps.total() < config.warmup_steps
        return Params(state.params.policy, state.bounds, state.obs_stats, random)

    def carry(spec: EnvSpec, num_envs: int) -> PyTree:
        return ()

    def act(keys: Key, params: Params, memory: PyTree, obs: PyTree, first: Array, greedy: bool) -> ActOutput:
        chosen, memory = policy.apply(params.policy, memory, statistics.normalize(params.obs_stats, obs), first)
        if greedy:
            return ActOutput(params.bounds.to_env(chosen.squash(chosen.mode())), memory)
        uniform = lambda keys: random_actions(keys, params.bounds)

        def sampled(keys: Key) -> Array:
            return chosen.squash(chosen.sample(keys))

        return ActOutput(params.bounds.to_env(jax.lax.cond(params.random, uniform, sampled, keys)), memory)

    def plan(key: Key, state: State, trajectory: Trajectory) -> Plan:
        return Plan(replay.transitions(trajectory))

    def grad(key: Key, state: State, batch: Batch) -> tuple[Grads, Aux]:
        params, first = state.params, jnp.zeros(batch.reward.shape, bool)
        valid = None if batch.weight is None else batch.weight > 0
        obs, next_obs = (
            statistics.normalize(state.obs_stats, batch.obs),
            statistics.normalize(state.obs_stats, batch.next_obs),
        )
        action = state.bounds.to_unit(batch.action)
        noise, next_noise = jax.random.normal(key, (2, *action.shape))
        temperature = jnp.exp(params.log_temperature)

        def q(params: PyTree, obs: PyTree, action: Array) -> Array:
            return critic.unroll(params, (), (obs, action), first)

        next_action, next_log_prob = policy.unroll(params.policy, (), next_obs, first).draw(next_noise)
        next_q = q(state.target_critic, next_obs, next_action)
        target = soft_target(batch, next_q, next_log_prob, temperature)

        def critic_loss(critic_params: PyTree) -> tuple[Array, Metrics]:
            values = q(critic_params, obs, action)
            error = 0.5 * jnp.sum(jnp.square(values - target), axis=0)
            means = masked_means(valid, loss=error, q_mean=jnp.mean(values, axis=0), entropy=-next_log_prob)
            return means["loss"], {**means, "temperature": temperature}

        def improve(params: Parts) -> tuple[PyTree, Array]:
            def loss(policy_params: PyTree) -> tuple[Array, Array]:
                chosen, log_prob = policy.unroll(policy_params, (), obs, first).draw(noise)
                return policy_loss(q(params.critic, obs, chosen), log_prob, temperature, valid), log_prob

            policy_grad, log_prob = jax.grad(loss, has_aux=True)(params.policy)
            target_entropy = -config.target_entropy_scale * action.shape[-1]
            return policy_grad, jax.grad(temperature_loss)(params.log_temperature, log_prob, target_entropy, valid)

        def wait(params: Parts) -> tuple[PyTree, Array]:
            return jax.tree.map(jnp.zeros_like, (params.policy, params.log_temperature))

        critic_grad, metrics = jax.grad(critic_loss, has_aux=True)(params.critic)
        due = (state.updates + 1) % config.policy_delay == 0
        policy_grad, temperature_grad = (
            improve(params) if config.policy_delay == 1 else jax.lax.cond(due, improve, wait, params)
        )
        return Grads(Parts(policy_grad, critic_grad, temperature_grad), due.astype(jnp.float32)), Aux(metrics)

    def apply(state: State, grads: Grads) -> State:
        rows = zip(algorithms, rates, state.params, state.opt_state, grads.parts, strict=True)
        stepped = [optimizers.descend(*row) for row in rows]
        params, opt_state = Parts(*(step[0] for step in stepped)), Parts(*(step[1] for step in stepped))
        if config.policy_delay > 1:
            due = lambda new, old: jax.tree.map(lambda n, o: jnp.where(grads.due > 0, n, o), new, old)
            params = due(params, state.params._replace(critic=params.critic))
            opt_state = due(opt_state, state.opt_state._replace(critic=opt_state.critic))
        return state._replace(
            params=params,
            opt_state=opt_state,
            target_critic=optax.incremental_update(params.critic, state.target_critic, config.tau),
            updates=state.updates + 1,
        )

    def observe(state: State, trajectory: Trajectory) -> State:
        valid = trajectory.valid
        return state._replace(
            env_steps=state.env_steps.add(count_valid(trajectory.reward, valid)),
            obs_stats=statistics.update_stats(state.obs_stats, trajectory.obs, valid),
        )

    functions = init, actor, carry, act, plan, grad, apply, observe
    return Agent(
        *functions,
        config.buffer(),
        rollout_length=1,
        name="sac",
        config=config,
        make=again,
        policy_mask=functools.partial(policy_mask, policy, path=("policy",)),
        brought=brought_to(again),
    )
