"""Twin delayed deep deterministic policy gradient (Fujimoto et al. 2018, arXiv 1802.09477), TD3.

A deterministic policy, critics whose smallest value is believed, targets smoothed by noise on the action, and a policy
and targets that step less often than the critics. With `num_critics=1, policy_delay=1, target_noise=0` it is DDPG
(Lillicrap et al. 2016) with Gaussian exploration. Deliberate differences from the paper:

- Actions are scaled to [-1, 1] within their bounds: policies, critics and noise are in these units.
- When the policy steps, its gradient is that of the critics as they were before their step, not after.
- Two layers of 256, batches of 256 and a rate of 3e-4, as in the authors' later code; the paper's are 400 and 300, 100
  and 1e-3.
- Many environments at once, n-step returns; episodes cut by a time limit are bootstrapped from.
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
    DETERMINISTIC,
    ENSEMBLE,
    OffPolicyConfig,
    Params,
    deterministic_policy,
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
    """Hyperparameters of TD3; numbers are the paper's unless said."""

    num_critics: int = 2
    """Critics whose smallest value is the target's, 1 or more; the policy follows the first."""
    policy_delay: int = 2
    """Gradient steps of the critics for each one of the policy and of the targets, 1 or more."""
    exploration_noise: float = 0.1
    """Standard deviation of the noise on actions in training, of actions in [-1, 1]; 0 or more."""
    target_noise: float = 0.2
    """Standard deviation of the noise on the target policy's actions, of actions in [-1, 1]; 0 or more."""
    target_noise_bound: float = 0.5
    """Bound on that noise, 0 or more."""


class Parts(NamedTuple):
    """One of each that is learnt: parameters, targets, states of optimisers, or gradients."""

    policy: PyTree
    critic: PyTree


class State(NamedTuple):
    """What learning needs: `updates`, gradient steps, is an int32 scalar."""

    params: Parts
    target_params: Parts
    opt_state: Parts
    bounds: Bounds
    obs_stats: RunningStats | None
    env_steps: Count
    updates: Array


class Grads(NamedTuple):
    """Gradients, and `due`, 1.0 where policy and targets are to step, else 0.0, with zeros for the policy's gradient.

    It travels with them, for a placement may apply them to a state that has stepped on since.
    """

    parts: Parts
    due: Array


def smoothed(action: Array, noise: Array, deviation: float, bound: float) -> Array:
    """Return target actions with clipped noise (Fujimoto et al. 2018, eq. 14): clip(a + clip(noise, -c, c), -1, 1).

    Args:
      action: [N, A], in [-1, 1].
      noise: [N, A], standard normal.
      deviation: sigma, of the noise.
      bound: c.
    """
    return jnp.clip(action + jnp.clip(deviation * noise, -bound, bound), -1.0, 1.0)


def target(batch: Batch, next_q: Array) -> Array:
    """Return R + discount * min_i Q_i(s', a') [N], what critics regress to (Fujimoto et al. 2018, eq. 10).

    Args:
      batch: n-step transitions [N].
      next_q: [E, N], by the target critics, at smoothed actions of the target policy.
    """
    return batch.reward + batch.discount * jnp.min(next_q, axis=0)


def make(config: Config = Config(), policy: Network | None = None, critic: Network | None = None) -> Agent:
    """Make a TD3 agent.

    Args:
      config: hyperparameters.
      policy: without memory, whose output is actions [..., A] in [-1, 1]; None builds one of `config`'s sizes.
      critic: without memory, of pairs `(obs, action in [-1, 1])`, whose output is values [E, ...]; None likewise.

    Returns:
      an `Agent` with a `Replay`.

    Raises:
      ValueError: for a field out of range or a network with memory; from `init`, for actions that are discrete or
        have no bounds, and for `normalize_obs` with discrete observations.
    """
    check_config(config, Config)
    config.check(not_negative=("exploration_noise", "target_noise", "target_noise_bound"))
    again = functools.partial(make, policy=policy, critic=critic)
    sizes = config.hidden_sizes, config.activation, config.dtype
    policy = brought_or(policy, lambda: deterministic_policy(*sizes), "policy", DETERMINISTIC)
    critic = brought_or(critic, config.critic, "critic", ENSEMBLE)
    policy, critic = seeing(policy, critic, config.actor_obs, config.critic_obs)
    adam = optimizers.make("adam", config.adam_eps, config.max_grad_norm)
    rates = Parts(config.learning_rate, config.critic_learning_rate)

    def init(key: Key, spec: EnvSpec) -> State:
        bounds = Bounds.of(spec, "td3 needs", "use ppo, or dqn where they are discrete")
        policy_key, critic_key = jax.random.split(key)
        params = Parts(policy.init(policy_key, spec), critic.init(critic_key, spec))
        # A copy: a state that held one buffer twice could not be donated.
        targets = jax.tree.map(jnp.copy, params)
        obs_stats = statistics.init_obs_stats(config.normalize_obs, spec, config.actor_obs, config.critic_obs)
        opt_state = Parts(*map(adam.init, params))
        return State(params, targets, opt_state, bounds, obs_stats, Count.zero(), jnp.zeros((), jnp.int32))

    def actor(state: State) -> Params:
        random = state.env_steps.total() < config.warmup_steps
        return Params(state.params.policy, state.bounds, state.obs_stats, random)

    def carry(spec: EnvSpec, num_envs: int) -> PyTree:
        return ()

    def act(keys: Key, params: Params, memory: PyTree, obs: PyTree, first: Array, greedy: bool) -> ActOutput:
        unit, memory = policy.apply(params.policy, memory, statistics.normalize(params.obs_stats, obs), first)
        if greedy:
            return ActOutput(params.bounds.to_env(unit), memory)
        uniform, size = lambda keys: random_actions(keys, params.bounds), params.bounds.low.shape

        def noisy(keys: Key) -> Array:
            noise = jax.vmap(lambda key: jax.random.normal(key, size))(keys)
            return jnp.clip(unit + config.exploration_noise * noise, -1.0, 1.0)

        return ActOutput(params.bounds.to_env(jax.lax.cond(params.random, uniform, noisy, keys)), memory)

    def plan(key: Key, state: State, trajectory: Trajectory) -> Plan:
        return Plan(replay.transitions(trajectory))

    def grad(key: Key, state: State, batch: Batch) -> tuple[Grads, Aux]:
        first = jnp.zeros(batch.reward.shape, bool)
        valid = None if batch.weight is None else batch.weight > 0
        obs, next_obs = (
            statistics.normalize(state.obs_stats, batch.obs),
            statistics.normalize(state.obs_stats, batch.next_obs),
        )
        action = state.bounds.to_unit(batch.action)

        def q(params: PyTree, obs: PyTree, action: Array) -> Array:
            return critic.unroll(params, (), (obs, action), first)

        next_action = policy.unroll(state.target_params.policy, (), next_obs, first)
        noise = jax.random.normal(key, action.shape)
        next_action = smoothed(next_action, noise, config.target_noise, config.target_noise_bound)
        aim = target(batch, q(state.target_params.critic, next_obs, next_action))

        def critic_loss(params: PyTree) -> tuple[Array, Metrics]:
            values = q(params, obs, action)
            error = jnp.sum(jnp.square(values - aim), axis=0)
            means = masked_means(valid, loss=error, q_mean=jnp.mean(values, axis=0))
            return means["loss"], means

        def improve(params: Parts) -> PyTree:
            def loss(policy_params: PyTree) -> Array:
                chosen = policy.unroll(policy_params, (), obs, first)
                return -masked_mean(q(params.critic, obs, chosen)[0], valid)

            return jax.grad(loss)(params.policy)

        def wait(params: Parts) -> PyTree:
            return jax.tree.map(jnp.zeros_like, params.policy)

        critic_grad, metrics = jax.grad(critic_loss, has_aux=True)(state.params.critic)
        due = (state.updates + 1) % config.policy_delay == 0
        if config.policy_delay == 1:
            policy_grad = improve(state.params)
        else:
            policy_grad = jax.lax.cond(due, improve, wait, state.params)
        return Grads(Parts(policy_grad, critic_grad), due.astype(jnp.float32)), Aux(metrics)

    def apply(state: State, grads: Grads) -> State:
        rows = zip(rates, state.params, state.opt_state, grads.parts, strict=True)
        stepped = [optimizers.descend(adam, *row) for row in rows]
        params, opt_state = Parts(*(step[0] for step in stepped)), Parts(*(step[1] for step in stepped))
        targets = optax.incremental_update(params, state.target_params, config.tau)
        if config.policy_delay > 1:
            due = lambda new, old: jax.tree.map(lambda n, o: jnp.where(grads.due > 0, n, o), new, old)
            params = params._replace(policy=due(params.policy, state.params.policy))
            opt_state = opt_state._replace(policy=due(opt_state.policy, state.opt_state.policy))
            targets = due(targets, state.target_params)
        return state._replace(params=params, opt_state=opt_state, target_params=targets, updates=state.updates + 1)

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
        name="td3",
        config=config,
        make=again,
        policy_mask=functools.partial(policy_mask, policy, path=("policy",)),
        brought=brought_to(again),
    )
