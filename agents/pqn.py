"""Parallelised Q-network (Gallici et al. 2024, arXiv 2407.04811): Q(lambda) of many environments, nothing replayed.

Each iteration plays T steps of B environments, epsilon-greedily; computes the lambda-returns of what it played; and
regresses the action values to them in a few passes over minibatches. There is no replay and no target network: what
keeps the values from running away is LayerNorm before every activation, and that much is played at once. Discrete
actions, feed-forward and recurrent. Deliberate differences from the authors' code (purejaxql, revision 47af6d7):

- Episodes cut by a time limit are bootstrapped from their true last observation; there they count as terminated.
- With memory, too, the targets are computed once an iteration, from the values acted with, and the last step of a
  rollout is learnt from; there they are computed anew in every gradient step, without it. Sequences begin with their
  rollout and the memory it began with; there a window of earlier steps may precede them. The last action reaches the
  memory where the environment shows it (`podium.envs.wrappers.show_last_action`).
- Observations are normalised by running statistics, on request, in place of a BatchNorm; planes of 0 and 1 are not
  divided by 255.
- Weights are initialised orthogonally. Minibatches take as many steps of every lane of environments (`podium.learn`).
- Rates and epsilon fall by environment steps, not by updates, which is the same where none is lost.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from podium.agent import ActOutput, Agent, Aux, Plan, brought_to
from podium.networks import (
    Network,
    brought_or,
    fresh_memory,
    num_actions,
    policy_mask,
    q_network,
    values_of_actions,
)
from podium.ops import action_values, optimizers, returns, statistics
from podium.ops.counts import Count
from podium.ops.statistics import RunningStats, count_rows, masked_means
from podium.ranges import check_config, check_fields
from podium.seen import legal_of, only_legal
from podium.types import Array, EnvSpec, Key, Metrics, PyTree, Trajectory, at_step


@dataclasses.dataclass(frozen=True)
class Config:
    """Hyperparameters of PQN; numbers are those of the authors' MinAtar settings, for 128 environments x 32 steps."""

    learning_rate: float = 5e-4
    """RAdam's step size, above 0."""
    anneal_steps: int = 0
    """Environment steps over which the learning rate falls linearly to zero; 0 keeps it constant."""
    gamma: float = 0.99
    """Discount per step, 0 to 1."""
    q_lambda: float = 0.65
    """Trace decay of the lambda-returns, 0 (one step) to 1 (whole return)."""
    num_epochs: int = 2
    """Passes over each rollout."""
    num_minibatches: int = 32
    """Parts of one pass, a gradient step each; with memory, of whole sequences."""
    epsilon_start: float = 1.0
    """Probability of a random action at the start, 0 to 1."""
    epsilon_end: float = 0.05
    """Probability of a random action after the decay, 0 to epsilon_start."""
    epsilon_decay_steps: int = 1_000_000
    """Environment steps over which that probability falls linearly, 1 or more."""
    reward_scale: float = 1.0
    """What rewards are multiplied by before they are learnt from, above 0."""
    max_grad_norm: float = 10.0
    """Bound on the global norm of the gradient; 0 leaves it unbounded."""
    optimizer_eps: float = 1e-8
    """Added to RAdam's denominator, above 0."""
    normalize_obs: bool = False
    """Whether to normalise observations by running statistics."""
    layer_norm: bool = True
    """Whether what each layer gives is normalised before its activation; without, values may run away."""
    torso: str = "mlp"
    """What sees observations: mlp; or frames: minatar_cnn (Young 2019), small_cnn (Mnih 2013), nature_cnn (2015) or
    impala_resnet (Espeholt 2018)."""
    dtype: str = "float32"
    """What torsos compute in: float32 or bfloat16; parameters stay float32."""
    hidden_sizes: tuple[int, ...] = (128, 128)
    """Units of each hidden layer; of convolutional torsos, those behind the convolutions."""
    activation: str = "relu"
    """Nonlinearity of hidden layers: tanh, relu, silu, gelu or elu."""
    memory: str = "none"
    """Recurrent memory: none, gru or lstm."""
    memory_size: int = 64
    """Units of the memory, where there is one."""

    def network(self) -> Network:
        """Make the network; raises ValueError for what `q_network` refuses."""
        sizes = self.hidden_sizes, self.activation, False, self.torso, self.dtype
        return q_network(*sizes, self.memory, self.memory_size, self.layer_norm)


class Params(NamedTuple):
    """What acting needs: the network, statistics if observations are normalised, the probability of a random action."""

    network: PyTree
    obs_stats: RunningStats | None
    epsilon: Array


class State(NamedTuple):
    """What learning needs."""

    params: PyTree
    opt_state: optax.OptState
    env_steps: Count
    obs_stats: RunningStats | None


class Extras(NamedTuple):
    """What acting leaves for learning, [B, ...]: the best action's value, and the memory after the step or `()`."""

    value: Array
    memory: PyTree


class Batch(NamedTuple):
    """What a gradient step sees, [N, ...] or, with memory, [T, N, ...].

    `num_valid`, a scalar, is how many rows are valid, for `masked_mean`; None where all are.
    """

    obs: PyTree
    first: Array
    action: Array
    target: Array
    valid: Array | None
    num_valid: Array | None = None


def loss(config: Config, value: Array, batch: Batch) -> tuple[Array, Metrics]:
    """Return the mean of (Q(s, a) - G)^2 / 2, to be minimised, and metrics; no gradient passes through the target G.

    Args:
      config: hyperparameters.
      value: action values [N, A] or [T, N, A], of the network that learns.
      batch: the rows.
    """
    chosen = action_values.select(value, batch.action)
    error = chosen - batch.target
    means = masked_means(
        batch.valid, batch.num_valid, loss=0.5 * jnp.square(error), q_mean=chosen, td_error_abs=jnp.abs(error)
    )
    return means["loss"], means


Loss = Callable[[Config, Array, Batch], tuple[Array, Metrics]]


def make(config: Config = Config(), network: Network | None = None, loss: Loss = loss) -> Agent:
    """Make a PQN agent.

    Args:
      config: hyperparameters.
      network: whose output is action values [..., A]; None builds one of `config`'s sizes.
      loss: `(config, action values, batch) -> (scalar, metrics)`; change PQN by passing another.

    Returns:
      an `Agent`; its rollouts are the paper's 32 steps long.

    Raises:
      ValueError: for a field out of range; from `init`, for continuous actions, and for `normalize_obs` with discrete
        observations.
    """
    check_config(config, Config)
    _check(config)
    again = functools.partial(make, network=network, loss=loss)
    network = brought_or(network, config.network, wanted=values_of_actions())
    optimizer = optimizers.make("radam", config.optimizer_eps, config.max_grad_norm)

    def init(key: Key, spec: EnvSpec) -> State:
        num_actions(spec, "action values")
        params = network.init(key, spec)
        obs_stats = statistics.init_obs_stats(config.normalize_obs, spec)
        return State(params, optimizer.init(params), Count.zero(), obs_stats)

    def actor(state: State) -> Params:
        bounds = config.epsilon_start, config.epsilon_end
        epsilon = action_values.decayed(*bounds, config.epsilon_decay_steps, state.env_steps.total())
        return Params(state.params, state.obs_stats, epsilon)

    def carry(spec: EnvSpec, num_envs: int) -> PyTree:
        return fresh_memory(network, spec.obs, num_envs)

    def act(keys: Key, params: Params, memory: PyTree, obs: PyTree, first: Array, greedy: bool) -> ActOutput:
        value, memory = network.apply(params.network, memory, statistics.normalize(params.obs_stats, obs), first)
        value, explore = only_legal(value, obs), (params.epsilon, legal_of(obs))
        action = action_values.greedy(value) if greedy else action_values.epsilon_greedy(keys, value, *explore)
        return ActOutput(action, memory, Extras(jnp.max(value, axis=-1), memory))

    def plan(key: Key, state: State, trajectory: Trajectory) -> Plan:
        def best(step: Array | None) -> Array:
            memory, no = at_step(trajectory.extras.memory, step), jnp.zeros(trajectory.first.shape[1:], bool)
            obs = statistics.normalize(state.obs_stats, trajectory.reached(step))
            return jnp.max(only_legal(network.apply(state.params, memory, obs, no)[0], obs), axis=-1)

        extras, cut = trajectory.extras, trajectory.truncated & ~trajectory.terminated
        next_value = returns.next_values(extras.value, cut, best)
        reward, discount = config.reward_scale * trajectory.reward, config.gamma * trajectory.discount
        target = returns.lambda_return(reward, discount, next_value, trajectory.last, config.q_lambda)
        obs = statistics.kept(state.obs_stats, trajectory)
        batch = Batch(obs, trajectory.first, trajectory.action, target, trajectory.valid)
        sizes = config.num_epochs, config.num_minibatches
        return Plan(batch, trajectory.carry, *sizes, "sequence" if network.recurrent else "step")

    def num_valid(minibatch: Any) -> Array | None:
        return count_rows((minibatch[0] if network.recurrent else minibatch).valid)

    def grad(key: Key, state: State, given: tuple[Any, Array | None]) -> tuple[PyTree, Aux]:
        minibatch, known = given
        batch, memory = minibatch if network.recurrent else (minibatch, ())
        batch = batch._replace(num_valid=known)

        def objective(params: PyTree) -> tuple[Array, Metrics]:
            return loss(config, network.unroll(params, memory, batch.obs, batch.first), batch)

        gradient, metrics = jax.grad(objective, has_aux=True)(state.params)
        return gradient, Aux(metrics)

    def apply(state: State, grads: PyTree) -> State:
        rate = optimizers.annealed(config.learning_rate, config.anneal_steps, state.env_steps.total())
        params, opt_state = optimizers.descend(optimizer, rate, state.params, state.opt_state, grads)
        return state._replace(params=params, opt_state=opt_state)

    def observe(state: State, trajectory: Trajectory) -> State:
        valid = trajectory.valid
        return state._replace(
            env_steps=state.env_steps.add(statistics.count_valid(trajectory.reward, valid)),
            obs_stats=statistics.update_stats(state.obs_stats, trajectory.obs, valid),
        )

    functions = init, actor, carry, act, plan, grad, apply, observe
    return Agent(
        *functions,
        rollout_length=32,
        name="pqn",
        config=config,
        make=again,
        statistics=num_valid,
        policy_mask=functools.partial(policy_mask, network),
        brought=brought_to(again),
    )


def _check(config: Config) -> None:
    """Refuse what is out of range; `q_network` checks the fields that are its own."""
    check_fields(
        config,
        positive=("learning_rate", "reward_scale", "optimizer_eps"),
        not_negative=("anneal_steps", "max_grad_norm"),
        fractions=("gamma", "q_lambda", "epsilon_start", "epsilon_end"),
        counts=("num_epochs", "num_minibatches"),
        steps=("epsilon_decay_steps",),
    )
    action_values.check_epsilons(config.epsilon_start, config.epsilon_end)
