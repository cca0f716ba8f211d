"""IMPALA (Espeholt et al. 2018, arXiv 1802.01561): an actor-critic that corrects for the policy that acted, by V-trace.

Targets are computed within the gradient step, by the network as it is then, from the log-probabilities that acting
left. Discrete and continuous actions, feed-forward and recurrent. Deliberate differences from the paper:

- Gradients are means over steps, not sums, so that batches of any size learn at the same rate. For B sequences of T
  steps, the paper's settings become `optimizer_eps / (T * B)**2` under RMSProp and `max_grad_norm / (T * B)`.
- RMSProp's mean square starts at 0.
- Episodes cut by a time limit are bootstrapped from their true last observation. With memory, there and after the last
  step, the memory is the one that acting left, as it is at the sequence's start.
- The torso does not see the last action and reward. Clipping rewards is the environment's business.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from podium import networks
from podium.agent import ActOutput, Agent, Aux, Plan, brought_to
from podium.networks import ActorCritic, ActorCriticConfig, Network, policy_mask
from podium.ops import losses, optimizers, returns
from podium.ops.counts import Count
from podium.ops.statistics import count_rows, count_valid
from podium.ranges import check_config, check_fields, is_traced
from podium.types import Array, EnvSpec, Key, Metrics, PyTree, Trajectory, at_step


@dataclasses.dataclass(frozen=True)
class Config(ActorCriticConfig):
    """Hyperparameters of IMPALA."""

    learning_rate: float = 6e-4
    """The optimiser's step size."""
    anneal_steps: int = 0
    """Environment steps over which the learning rate falls linearly to zero; 0 keeps it constant."""
    gamma: float = 0.99
    """Discount per step, 0 to 1."""
    vtrace_lambda: float = 1.0
    """Trace decay of V-trace, 0 (one step) to 1 (the paper's)."""
    rho_bar: float = 1.0
    """Bound on the importance weight of a step's TD error and policy gradient, above 0."""
    c_bar: float = 1.0
    """Bound on the importance weight of what a step passes back, above 0 to rho_bar."""
    value_coef: float = 0.5
    """Weight of the value loss (the paper's baseline cost)."""
    entropy_coef: float = 0.01
    """Weight of the entropy bonus, per nat."""
    num_minibatches: int = 1
    """Parts of a rollout, whole sequences each, a gradient step each; the paper's batch is 1 part."""
    optimizer: str = "rmsprop"
    """Optimiser: rmsprop (the paper's), adam or radam."""
    rmsprop_decay: float = 0.99
    """Decay of RMSProp's mean square, 0 to 1."""
    optimizer_eps: float = 1e-5
    """Added in the optimiser's denominator (the paper's 0.1, or 0.01 on Atari, is for sums of gradients)."""
    max_grad_norm: float = 0.5
    """Bound on the global norm of the gradient (the paper's 40 is for sums); 0 leaves it unbounded."""


class State(NamedTuple):
    """What learning needs."""

    params: PyTree
    opt_state: optax.OptState
    env_steps: Count


class Batch(NamedTuple):
    """What a gradient step sees, [T, N, ...]; `log_prob` and `memory` (after the step) are what acting left.

    `discount` is the trajectory's, without gamma.

    `num_valid`, a scalar, is how many rows are valid, for `masked_mean`; None where all are.
    """

    obs: PyTree
    first: Array
    action: Array
    log_prob: Array
    reward: Array
    discount: Array
    terminated: Array
    truncated: Array
    next_obs: PyTree
    memory: PyTree
    valid: Array | None
    num_valid: Array | None = None


def loss(config: Config, output: ActorCritic, next_value: Array, batch: Batch) -> tuple[Array, Metrics]:
    """Return the sum of policy gradient, baseline and entropy losses (Espeholt et al. 2018, section 4.2), and metrics.

    Args:
      config: hyperparameters.
      output: of the network that learns, [T, N].
      next_value: [T, N], of the observations reached.
      batch: sequences.
    """
    log_ratio = output.policy.log_prob(batch.action) - batch.log_prob
    log_ratio, value, next_value = jax.lax.stop_gradient((log_ratio, output.value, next_value))
    discount = config.gamma * batch.discount
    ends, bounds = batch.terminated | batch.truncated, (config.vtrace_lambda, config.rho_bar, config.c_bar)
    target, advantage = returns.vtrace(log_ratio, batch.reward, discount, value, next_value, ends, *bounds)
    rows = output.policy, output.value, batch.action, advantage, target, batch.valid
    ratio = jnp.exp(log_ratio)
    return losses.actor_critic(
        *rows,
        config.value_coef,
        config.entropy_coef,
        batch.num_valid,
        # How far the policy that acted lies behind: 1 and 0 on-policy. (Schulman's estimate of KL(acted || learning).)
        rho=jnp.minimum(config.rho_bar, ratio),
        approx_kl=ratio - 1 - log_ratio,
    )


class Statistics(NamedTuple):
    """What is known of a minibatch before its gradient: its valid rows, and the rounds of `networks.next_values`."""

    num_valid: Array | None
    rounds: Array


Loss = Callable[[Config, ActorCritic, Array, Batch], tuple[Array, Metrics]]


def make(config: Config = Config(), network: Network | None = None, loss: Loss = loss) -> Agent:
    """Make an IMPALA agent.

    Args:
      config: hyperparameters.
      network: whose output is `ActorCritic`; None builds one of `config`'s sizes.
      loss: `(config, output, next_value, batch) -> (scalar, metrics)`; change IMPALA by passing another.

    Returns:
      an `Agent`; its rollouts are the paper's 20 steps long.

    Raises:
      ValueError: for a field out of range.
    """
    check_config(config, Config)
    _check(config)
    again = functools.partial(make, network=network, loss=loss)
    network = networks.brought_or(network, config.network, wanted=networks.ACTOR_CRITIC)
    optimizer = optimizers.make(config.optimizer, config.optimizer_eps, config.max_grad_norm, config.rmsprop_decay)

    def init(key: Key, spec: EnvSpec) -> State:
        params = network.init(key, spec)
        return State(params, optimizer.init(params), Count.zero())

    def actor(state: State) -> PyTree:
        return state.params

    def carry(spec: EnvSpec, num_envs: int) -> PyTree:
        return networks.fresh_memory(network, spec.obs, num_envs)

    def act(keys: Key, params: PyTree, memory: PyTree, obs: PyTree, first: Array, greedy: bool) -> ActOutput:
        return networks.act(network, keys, params, memory, obs, first, greedy)

    def plan(key: Key, state: State, trajectory: Trajectory) -> Plan:
        batch = Batch(
            trajectory.obs,
            trajectory.first,
            networks.drawn(trajectory),
            trajectory.extras.log_prob,
            trajectory.reward,
            trajectory.discount,
            trajectory.terminated,
            trajectory.truncated,
            trajectory.next_obs,
            trajectory.extras.memory,
            trajectory.valid,
        )
        return Plan(batch, trajectory.carry, num_minibatches=config.num_minibatches, unit="sequence")

    def statistics(minibatch: tuple[Batch, PyTree]) -> Statistics:
        batch, _ = minibatch
        return Statistics(count_rows(batch.valid), returns.most_truncations(batch.truncated & ~batch.terminated))

    def grad(key: Key, state: State, given: tuple[tuple[Batch, PyTree], Statistics]) -> tuple[PyTree, Aux]:
        (batch, memory), known = given
        batch = batch._replace(num_valid=known.num_valid)
        cut = batch.truncated & ~batch.terminated

        def objective(params: PyTree) -> tuple[Array, Metrics]:
            output = network.unroll(params, memory, batch.obs, batch.first)
            # Of the observations reached, only the last ones and those behind a cut need the network once more.
            value = jax.lax.stop_gradient(output.value)
            reached = functools.partial(at_step, batch.next_obs), batch.memory
            next_value = networks.next_values(network, state.params, value, cut, *reached, rounds=known.rounds)
            return loss(config, output, next_value, batch)

        gradient, metrics = jax.grad(objective, has_aux=True)(state.params)
        return gradient, Aux(metrics)

    def apply(state: State, grads: PyTree) -> State:
        rate = optimizers.annealed(config.learning_rate, config.anneal_steps, state.env_steps.total())
        params, opt_state = optimizers.descend(optimizer, rate, state.params, state.opt_state, grads)
        return state._replace(params=params, opt_state=opt_state)

    def observe(state: State, trajectory: Trajectory) -> State:
        return state._replace(env_steps=state.env_steps.add(count_valid(trajectory.reward, trajectory.valid)))

    functions = init, actor, carry, act, plan, grad, apply, observe
    return Agent(
        *functions,
        rollout_length=20,
        name="impala",
        config=config,
        make=again,
        statistics=statistics,
        policy_mask=functools.partial(policy_mask, network),
        brought=brought_to(again),
    )


def _check(config: Config) -> None:
    check_fields(
        config,
        positive=("learning_rate", "rho_bar", "c_bar", "optimizer_eps"),
        not_negative=("anneal_steps", "value_coef", "entropy_coef", "max_grad_norm"),
        fractions=("gamma", "vtrace_lambda", "rmsprop_decay"),
        counts=("num_minibatches",),
    )
    if not (is_traced(config.c_bar) or is_traced(config.rho_bar)) and config.c_bar > config.rho_bar:
        raise ValueError(f"c_bar={config.c_bar} must be at most rho_bar={config.rho_bar}; use {config.rho_bar}.")
