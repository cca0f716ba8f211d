"""Advantage actor-critic (Mnih et al. 2016, arXiv 1602.01783, algorithm S3), synchronous: A2C.

One gradient step a rollout, of all its environments together, where the paper's threads apply theirs one by one, each
to parameters that others have moved meanwhile. Discrete and continuous actions, feed-forward and recurrent. Other
deliberate differences: gradients are means over steps, not sums; policy and value share a torso only where it is
convolutional or has memory; an optional trace decay below 1 (GAE, Schulman et al. 2016); networks are orthogonally
initialised; episodes cut by a time limit are bootstrapped from.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

from podium import networks
from podium.agent import ActOutput, Agent, Aux, Plan, brought_to
from podium.networks import ActorCritic, ActorCriticConfig, Network, policy_mask
from podium.ops import losses, optimizers, returns
from podium.ops.counts import Count
from podium.ops.statistics import count_rows, count_valid
from podium.ranges import check_config, check_fields
from podium.types import Array, EnvSpec, Key, Metrics, PyTree, Trajectory


@dataclasses.dataclass(frozen=True)
class Config(ActorCriticConfig):
    """Hyperparameters of A2C."""

    learning_rate: float = 7e-4
    """The optimiser's step size."""
    anneal_steps: int = 0
    """Environment steps over which the learning rate falls linearly to zero; 0 keeps it constant."""
    gamma: float = 0.99
    """Discount per step, 0 to 1."""
    gae_lambda: float = 1.0
    """Trace decay, 0 (one step) to 1 (the paper's: rewards up to the rollout's end, then the value)."""
    value_coef: float = 0.5
    """Weight of the value loss."""
    entropy_coef: float = 0.01
    """Weight of the entropy bonus, per nat."""
    optimizer: str = "rmsprop"
    """Optimiser: rmsprop (the paper's), adam or radam."""
    rmsprop_decay: float = 0.99
    """Decay of RMSProp's mean square, 0 to 1."""
    optimizer_eps: float = 1e-5
    """Added in the optimiser's denominator. For RMSProp the paper has 0.1, with gradients that are sums over steps."""
    max_grad_norm: float = 0.5
    """Bound on the global norm of the gradient; 0 leaves it unbounded, as the paper does."""


class State(NamedTuple):
    """What learning needs."""

    params: PyTree
    opt_state: optax.OptState
    env_steps: Count


class Batch(NamedTuple):
    """What a gradient step sees, [N, ...] or, with memory, [T, N, ...].

    `num_valid`, a scalar, is how many rows are valid, for `masked_mean`; None where all are.
    """

    obs: PyTree
    first: Array
    action: Array
    advantage: Array
    target: Array
    valid: Array | None
    num_valid: Array | None = None


def loss(config: Config, output: ActorCritic, batch: Batch) -> tuple[Array, Metrics]:
    """Return the loss (Mnih et al. 2016, section 4: policy gradient, value and entropy), to be minimised, and metrics.

    mean( -log pi(a) * A + value_coef * (R - V)^2 / 2 - entropy_coef * H(pi) ),   A = R - V as acted with, no gradient
    """
    rows = output.policy, output.value, batch.action, batch.advantage, batch.target, batch.valid
    return losses.actor_critic(*rows, config.value_coef, config.entropy_coef, batch.num_valid)


Loss = Callable[[Config, ActorCritic, Batch], tuple[Array, Metrics]]


def make(config: Config = Config(), network: Network | None = None, loss: Loss = loss) -> Agent:
    """Make an A2C agent.

    Args:
      config: hyperparameters.
      network: whose output is `ActorCritic`; None builds one of `config`'s sizes.
      loss: `(config, output, batch) -> (scalar, metrics)`; change A2C by passing another.

    Returns:
      an `Agent`; its rollouts are the paper's t_max steps long.

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
        value = trajectory.extras.value
        cut = trajectory.truncated & ~trajectory.terminated
        reached = trajectory.reached, trajectory.extras.memory
        next_value = networks.next_values(network, state.params, value, cut, *reached)
        discount = config.gamma * trajectory.discount
        advantage = returns.gae(trajectory.reward, discount, value, next_value, trajectory.last, config.gae_lambda)
        batch = Batch(
            trajectory.obs, trajectory.first, networks.drawn(trajectory), advantage, advantage + value, trajectory.valid
        )
        return Plan(batch, trajectory.carry, unit="sequence" if network.recurrent else "step")

    def statistics(minibatch: Any) -> Array | None:
        return count_rows((minibatch[0] if network.recurrent else minibatch).valid)

    def grad(key: Key, state: State, given: tuple[Any, Array | None]) -> tuple[PyTree, Aux]:
        minibatch, num_valid = given
        batch, memory = minibatch if network.recurrent else (minibatch, ())
        batch = batch._replace(num_valid=num_valid)

        def objective(params: PyTree) -> tuple[Array, Metrics]:
            return loss(config, network.unroll(params, memory, batch.obs, batch.first), batch)

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
        rollout_length=5,
        name="a2c",
        config=config,
        make=again,
        statistics=statistics,
        policy_mask=functools.partial(policy_mask, network),
        brought=brought_to(again),
    )


def _check(config: Config) -> None:
    check_fields(
        config,
        positive=("learning_rate", "optimizer_eps"),
        not_negative=("anneal_steps", "value_coef", "entropy_coef", "max_grad_norm"),
        fractions=("gamma", "gae_lambda", "rmsprop_decay"),
    )
