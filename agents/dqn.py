"""Deep Q-networks (Mnih et al. 2015, Nature 518), with the usual three improvements, each of them a field of `Config`.

Double Q-learning (van Hasselt et al. 2016, arXiv 1509.06461), dueling networks (Wang et al. 2016, arXiv 1511.06581) and
n-step returns (Sutton 1988, as in Hessel et al. 2018, arXiv 1710.02298). Deliberate differences from Mnih et al.: Adam
with a bound on the global gradient norm in place of RMSProp, a Huber loss in place of clipping the error, many
environments at once, and episodes cut by a time limit are bootstrapped from.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from podium import replay
from podium.agent import ActOutput, Agent, Aux, Plan, Replay, brought_to
from podium.networks import Network, brought_or, num_actions, policy_mask, q_network, values_of_actions
from podium.ops import action_values, optimizers
from podium.ops.counts import Count
from podium.ops.statistics import count_valid, masked_means
from podium.ranges import check_config, check_fields, check_value, is_on
from podium.replay import Batch
from podium.seen import legal_of, only_legal
from podium.types import Array, EnvSpec, Key, Metrics, PyTree, Trajectory


@dataclasses.dataclass(frozen=True)
class Config:
    """Hyperparameters of DQN."""

    learning_rate: float = 2.5e-4
    """Adam's step size, above 0."""
    anneal_steps: int = 0
    """Environment steps over which the learning rate falls linearly to zero; 0 keeps it constant."""
    gamma: float = 0.99
    """Discount per step, 0 to 1."""
    n_step: int = 1
    """Rewards summed before the bootstrap, 1 or more."""
    double: bool = True
    """Whether the online network chooses the action whose target value is bootstrapped from."""
    dueling: bool = False
    """Whether action values are a state's value plus advantages of mean zero."""
    batch_size: int = 128
    """Transitions in a minibatch, 1 or more; the lanes must divide it."""
    num_updates: int = 1
    """Minibatches learnt per iteration, 1 or more."""
    samples_per_insert: float = 0.0
    """How often a step is learnt from on average, in place of num_updates; 0 leaves that to it."""
    buffer_capacity: int = 50_000
    """Steps the replay holds, over all environments; rounded down to whole rollouts."""
    min_replay_size: int = 1_000
    """Steps the replay must hold before learning starts, 1 to buffer_capacity."""
    target_update_period: int = 100
    """Gradient steps between updates of the target network, 1 or more."""
    tau: float = 1.0
    """Share of the way the target moves then, above 0 to 1: 1 copies; 0.005 with a period of 1 is Polyak averaging."""
    epsilon_start: float = 1.0
    """Probability of a random action at the start, 0 to 1."""
    epsilon_end: float = 0.05
    """Probability of a random action after the decay, 0 to epsilon_start."""
    epsilon_decay_steps: int = 25_000
    """Environment steps over which that probability falls linearly, 1 or more."""
    huber_delta: float = 10.0
    """TD error beyond which the loss grows linearly, above 0. With values around 100, 1 lets CartPole diverge."""
    max_grad_norm: float = 10.0
    """Bound on the global norm of the gradient; 0 leaves it unbounded."""
    adam_eps: float = 1e-5
    """Added to Adam's denominator, above 0."""
    torso: str = "mlp"
    """What sees observations: mlp; or frames: minatar_cnn (Young 2019), small_cnn (Mnih 2013), nature_cnn (2015) or
    impala_resnet (Espeholt 2018)."""
    dtype: str = "float32"
    """What torsos compute in: float32 or bfloat16; parameters stay float32."""
    hidden_sizes: tuple[int, ...] = (64, 64)
    """Units of each hidden layer; of convolutional torsos, those behind the convolutions."""
    activation: str = "relu"
    """Nonlinearity of hidden layers: tanh, relu, silu, gelu or elu."""

    def network(self) -> Network:
        """Make the network; raises ValueError for what `q_network` refuses."""
        return q_network(self.hidden_sizes, self.activation, self.dueling, self.torso, self.dtype)

    def buffer(self) -> Replay:
        """Make the replay."""
        sizes = self.buffer_capacity, self.batch_size, self.num_updates, self.min_replay_size
        return replay.uniform(*sizes, self.n_step, self.gamma)


@dataclasses.dataclass(frozen=True)
class PrioritizedConfig(Config):
    """Hyperparameters of DQN with prioritised replay (Schaul et al. 2016, arXiv 1511.05952)."""

    priority_exponent: float = 0.6
    """Power of |TD error| that a transition is drawn in proportion to, 0 to 1; 0 draws uniformly."""
    importance_exponent: float = 0.4
    """How much of what that skews the loss's weights undo, 0 to 1."""
    annealing_updates: int = 0
    """Gradient steps over which importance_exponent rises to 1, 0 or more; 0 leaves it."""
    smallest_priority: float = 1e-6
    """Added to |TD error|, above 0."""

    def buffer(self) -> Replay:
        """Make the replay."""
        sizes = self.buffer_capacity, self.batch_size, self.num_updates, self.min_replay_size
        exponents = self.priority_exponent, self.importance_exponent
        return replay.prioritized(
            *sizes, self.n_step, self.gamma, *exponents, self.annealing_updates, self.smallest_priority
        )


class Params(NamedTuple):
    """What acting needs: network parameters and the probability of a random action."""

    network: PyTree
    epsilon: Array


class State(NamedTuple):
    """What learning needs: `updates`, gradient steps, is an int32 scalar."""

    params: PyTree
    target_params: PyTree
    opt_state: optax.OptState
    env_steps: Count
    updates: Array


Mean = Callable[[Array], Array]
"""What makes action values [..., A] of a network's outputs."""


class Values(NamedTuple):
    """Action values [N, A]: at `obs`, and at `next_obs` by the online and by the target network (no gradient).

    Of a network with another head they are its outputs, of which `make`'s `mean` makes action values. `next_obs` says
    which actions are legal.
    """

    value: Array
    next_value: Array
    next_target_value: Array
    next_obs: PyTree = ()


def as_they_are(outputs: Array) -> Array:
    """Return action values, which the outputs of a network with a scalar head are."""
    return outputs


def bootstrap_action(config: Config, values: Values, mean: Mean = as_they_are) -> Array:
    """Return the action [N] that is best at `next_obs`, by the target network or, with `double`, by the online one."""
    chooser = values.next_value if config.double else values.next_target_value
    return jnp.argmax(only_legal(mean(chooser), values.next_obs), axis=-1)


def weighted_mean(batch: Batch, error: Array, **metrics: Array) -> tuple[Array, Metrics]:
    """Return the mean of what rows [N] lose, each times its weight, and the means of it and of other `metrics` [N]."""
    counted = None if batch.weight is None else batch.weight > 0
    weighted = error if batch.weight is None else batch.weight * error
    means = masked_means(counted, loss=weighted, **metrics)
    return means["loss"], means


def loss(config: Config, values: Values, batch: Batch) -> tuple[Array, Aux]:
    """Return the mean Huber loss of the TD error (Mnih et al. 2015), metrics, and |TD error| [N] as priorities.

        y = R + discount * Q_target(s', argmax_a Q(s', a))        (van Hasselt et al. 2016, eq. 4; without `double`
                                                                   the argmax is of Q_target)

    A `huber_delta` far below the size of values makes this a regression to the median of targets, not their mean:
    where a tenth of the targets are terminations that the network can hardly tell apart, values then run away.

    Args:
      config: hyperparameters.
      values: action values.
      batch: n-step transitions.
    """
    next_value = action_values.select(values.next_target_value, bootstrap_action(config, values))
    return td_loss(config, action_values.select(values.value, batch.action), next_value, batch)


def td_loss(config: Config, value: Array, next_value: Array, batch: Batch) -> tuple[Array, Aux]:
    """Return what `loss` does, of the values [N] of what was done, and [N] of what is bootstrapped from."""
    target = jax.lax.stop_gradient(batch.reward + batch.discount * next_value)
    td_error = target - value
    error = optax.huber_loss(td_error, delta=config.huber_delta)
    total, metrics = weighted_mean(batch, error, q_mean=value, td_error_abs=jnp.abs(td_error))
    return total, Aux(metrics, jnp.abs(td_error))


Loss = Callable[[Config, Values, Batch], tuple[Array, Aux]]
Note = Callable[[Array, Array], PyTree]


def note_nothing(value: Array, action: Array) -> PyTree:
    """Return nothing: uniform replay needs no more than what was done and what came of it."""
    return ()


def make(
    config: Config = Config(),
    network: Network | None = None,
    loss: Loss = loss,
    buffer: Replay | None = None,
    note: Note = note_nothing,
    mean: Mean = as_they_are,
) -> Agent:
    """Make a DQN agent.

    Args:
      config: hyperparameters.
      network: without memory, whose output is action values [..., A], or what `mean` makes these of; None builds one of
        `config`'s sizes, of action values.
      loss: `(config, values, batch) -> (scalar, Aux)`; change DQN by passing another.
      buffer: the replay, of `podium.replay.transitions`; None builds `config`'s.
      note: `(action values [B, A], action [B]) -> extras`, which acting leaves in the replay.
      mean: makes action values of the network's outputs, to act by; `agents.rainbow` has others.

    Returns:
      an `Agent` with a `Replay`.

    Raises:
      ValueError: for a field out of range or a network with memory; from `init`, for continuous actions.
    """
    check_config(config, Config)
    _check(config)
    again = functools.partial(make, network=network, loss=loss, buffer=buffer, note=note, mean=mean)
    if buffer is None:
        buffer = config.buffer()
    if config.samples_per_insert:
        buffer = buffer._replace(samples_per_insert=config.samples_per_insert)
    network = brought_or(network, config.network, wanted=values_of_actions() if mean is as_they_are else None)
    if network.recurrent:
        raise ValueError("network has memory, but single steps are replayed; pass one without, or use r2d2.")
    clip = optax.clip_by_global_norm(config.max_grad_norm) if is_on(config.max_grad_norm) else optax.identity()
    # A chain in a chain, as optax.adam is one: so checkpoints name its state.
    optimizer = optimizers.flatten(optax.chain(clip, optax.chain(optax.scale_by_adam(eps=config.adam_eps))))

    def init(key: Key, spec: EnvSpec) -> State:
        num_actions(spec, "action values")
        params = network.init(key, spec)
        # A copy: a state that held one buffer twice could not be donated.
        target_params = jax.tree.map(jnp.copy, params)
        return State(params, target_params, optimizer.init(params), Count.zero(), jnp.zeros((), jnp.int32))

    def actor(state: State) -> Params:
        bounds = config.epsilon_start, config.epsilon_end
        epsilon = action_values.decayed(*bounds, config.epsilon_decay_steps, state.env_steps.total())
        return Params(state.params, epsilon)

    def carry(spec: EnvSpec, num_envs: int) -> PyTree:
        return network.carry(num_envs)

    def act(keys: Key, params: Params, memory: PyTree, obs: PyTree, first: Array, greedy: bool) -> ActOutput:
        outputs, memory = network.apply(params.network, memory, obs, first)
        value = only_legal(mean(outputs), obs)
        if greedy:
            return ActOutput(action_values.greedy(value), memory)
        action = action_values.epsilon_greedy(keys, value, params.epsilon, legal_of(obs))
        return ActOutput(action, memory, note(value, action))

    def plan(key: Key, state: State, trajectory: Trajectory) -> Plan:
        return Plan(replay.transitions(trajectory))

    def grad(key: Key, state: State, batch: Batch) -> tuple[PyTree, Aux]:
        def q(params: PyTree, obs: PyTree) -> Array:
            return network.unroll(params, (), obs, jnp.zeros(batch.reward.shape, bool))

        next_value = q(state.params, batch.next_obs)
        next_target_value = q(state.target_params, batch.next_obs)

        def objective(params: PyTree) -> tuple[Array, Aux]:
            return loss(config, Values(q(params, batch.obs), next_value, next_target_value, batch.next_obs), batch)

        return jax.grad(objective, has_aux=True)(state.params)

    def apply(state: State, grads: PyTree) -> State:
        rate = optimizers.annealed(config.learning_rate, config.anneal_steps, state.env_steps.total())
        params, opt_state = optimizers.descend(optimizer, rate, state.params, state.opt_state, grads)
        updates = state.updates + 1
        moved = optax.incremental_update(params, state.target_params, config.tau)
        due = updates % config.target_update_period == 0
        target_params = jax.tree.map(lambda new, old: jnp.where(due, new, old), moved, state.target_params)
        return state._replace(params=params, target_params=target_params, opt_state=opt_state, updates=updates)

    def observe(state: State, trajectory: Trajectory) -> State:
        return state._replace(env_steps=state.env_steps.add(count_valid(trajectory.reward, trajectory.valid)))

    return Agent(
        init,
        actor,
        carry,
        act,
        plan,
        grad,
        apply,
        observe,
        buffer,
        rollout_length=1,
        name="dqn",
        config=config,
        make=again,
        policy_mask=functools.partial(policy_mask, network),
        brought=brought_to(again),
    )


def _check(config: Config) -> None:
    """Refuse what is out of range; `replay.uniform` and `q_network` check the fields that are theirs."""
    check_fields(
        config,
        positive=("learning_rate", "huber_delta", "adam_eps"),
        not_negative=("anneal_steps", "max_grad_norm"),
        fractions=("epsilon_start", "epsilon_end"),
        shares=("tau",),
        counts=("target_update_period",),
        steps=("epsilon_decay_steps",),
    )
    check_value("samples_per_insert", config.samples_per_insert, "sizes", "use 0 to go by num_updates")
    action_values.check_epsilons(config.epsilon_start, config.epsilon_end)
