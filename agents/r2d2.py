"""R2D2 (Kapturowski et al. 2019, "Recurrent Experience Replay in Distributed Reinforcement Learning").

Action values with a memory, learnt from windows of experience: the memory that acting had where a window begins is
stored with it (`stored_state`), the first `burn_in` steps only bring it up to date, and the others are learnt from by
n-step double Q-learning on rescaled values (Pohlen et al. 2018, arXiv 1805.11593). Windows are drawn by their TD errors
and actors explore each in its own way, as in `apex`. Optimiser, target network and counters are those of `dqn`.
Deliberate differences, beside those of `dqn`:

- Windows cross ends of episodes, where memory begins anew and targets stop; the paper's never do. Episodes cut by a
  time limit are bootstrapped from their true last observation, with the memory that led there.
- The n steps of a target end with the window, at the observation that its last step reached.
- New windows are ranked as the one with the largest error so far, or 1 if that is more; the paper's actors compute it.
- A Huber loss whose `huber_delta` is far above the usual error of rescaled values; the paper's is squared.
- The last action and reward reach the memory where the environment shows them (`envs.wrappers.show_last_action`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from podium import replay
from podium.agent import ActOutput, Agent, Aux, brought_to
from podium.agents import apex, dqn
from podium.networks import Network, brought_or, fresh_memory, q_network, remember
from podium.ops import action_values, returns
from podium.ops.rescaling import rescale, unrescale
from podium.ops.statistics import masked_means
from podium.ranges import check_config, check_fields
from podium.replay import Windows
from podium.seen import legal_of, only_legal
from podium.types import Array, EnvSpec, Key, PyTree, at_step, choose_rows


@dataclasses.dataclass(frozen=True)
class Config(apex.Config):
    """Hyperparameters of R2D2: those of Ape-X, some with the paper's value, and its own."""

    learning_rate: float = 1e-4
    """Adam's step size, above 0."""
    gamma: float = 0.997
    """Discount per step, 0 to 1."""
    n_step: int = 5
    """Rewards summed before the bootstrap, 1 or more."""
    batch_size: int = 64
    """Windows in a minibatch, 1 or more; the lanes must divide it."""
    sequence_length: int = 120
    """Steps of a window, those that burn in among them, 1 or more; the paper's 80 are without these."""
    burn_in: int = 40
    """Steps at a window's start that only bring its memory up to date, 0 or more and below sequence_length."""
    sequence_period: int = 40
    """Steps from the start of one window to that of the next; it must divide rollout_length, or that it."""
    stored_state: bool = True
    """Whether a window begins with the memory that acting had there; else with none."""
    priority_exponent: float = 0.9
    """Power of a window's priority that it is drawn in proportion to, 0 to 1; 0 draws uniformly."""
    importance_exponent: float = 0.0
    """How much of what that skews the loss's weights undo, 0 to 1; the paper leaves them out."""
    max_priority_weight: float = 0.9
    """Eta, 0 to 1: a window's priority is eta times its largest TD error plus 1 - eta times the mean."""
    rescale_values: bool = True
    """Whether the network learns h(value), which draws large values together; else the value."""
    rescale_eps: float = 1e-3
    """Epsilon of h(x) = sign(x) (sqrt(|x| + 1) - 1) + epsilon x, 0 or more."""
    memory: str = "lstm"
    """Recurrent memory: gru or lstm."""
    memory_size: int = 64
    """Units of the memory."""

    def network(self) -> Network:
        """Make the network; raises ValueError for what `q_network` refuses."""
        sizes = self.hidden_sizes, self.activation, self.dueling, self.torso, self.dtype
        return q_network(*sizes, self.memory, self.memory_size)


class Carry(NamedTuple):
    """What acting keeps of each environment: its global `number` int32 [B], and the network's `memory` [B, ...]."""

    number: Array
    memory: PyTree


class Targets(NamedTuple):
    """The steps of windows that are learnt from, [T, N]: `action`, `target`, which are `valid`, and weights [N]."""

    action: Array
    target: Array
    valid: Array
    weight: Array


def n_step_target(config: Config, windows: Windows, next_value: Array) -> Array:
    """Return h(sum_{k < m} gamma^k r_{t+k} + gamma^m h^-1(V(s_{t+m}))), [T, N] (Kapturowski et al. 2019, section 2.3).

    m is n, or as many steps as there are before the episode or the window ends; without `rescale_values` h is the
    identity.

    Args:
      config: hyperparameters.
      windows: of T steps, [T, N, ...].
      next_value: [T, N], of what each step reached, on the scale that the network learns.
    """
    time = windows.reward.shape[0]
    n = min(config.n_step, time)
    valid = jnp.ones_like(windows.terminated) if windows.valid is None else windows.valid
    # Behind the window there are no transitions; a sum stops before what is none.
    step = np.arange(time)[:, None] + np.arange(n)
    behind = lambda x: jnp.concatenate([x, jnp.zeros((n - 1, *x.shape[1:]), x.dtype)])
    ahead = lambda x: jnp.moveaxis(behind(x)[step], 1, -1)
    rows = windows.reward, windows.terminated, windows.truncated, valid, windows.turn
    reward, terminated, truncated, valid, turn = jax.tree.map(ahead, rows)
    total, discount, length = replay.n_step_return(reward, terminated, truncated, valid, config.gamma, turn)
    reached = jnp.take_along_axis(next_value, jnp.arange(time)[:, None] + length - 1, axis=0)
    if not config.rescale_values:
        return total + discount * reached
    return rescale(total + discount * unrescale(reached, config.rescale_eps), config.rescale_eps)


def loss(config: Config, value: Array, targets: Targets) -> tuple[Array, Aux]:
    """Return the mean Huber loss of the TD error, weighted by window, metrics, and priorities [N].

    Args:
      config: hyperparameters.
      value: action values [T, N, A], of the network that learns.
      targets: of the same steps.
    """
    chosen = action_values.select(value, targets.action)
    td_error = targets.target - chosen
    error = targets.weight * optax.huber_loss(td_error, delta=config.huber_delta)
    counted = targets.valid & (targets.weight > 0)
    metrics = masked_means(counted, loss=error, q_mean=chosen, td_error_abs=jnp.abs(td_error))
    priorities = replay.window_priority(td_error, targets.valid, config.max_priority_weight)
    return metrics["loss"], Aux(metrics, priorities)


Loss = Callable[[Config, Array, Targets], tuple[Array, Aux]]


def make(config: Config = Config(), network: Network | None = None, loss: Loss = loss) -> Agent:
    """Make an R2D2 agent.

    Args:
      config: hyperparameters.
      network: with memory, whose output is action values [..., A]; None builds one of `config`'s sizes.
      loss: `(config, action values, targets) -> (scalar, Aux)`; its `Aux.priorities` are what windows are drawn by.

    Returns:
      an `Agent` with a `Replay` of windows; its rollouts are a period long.

    Raises:
      ValueError: for a field out of range or a network without memory; from `init`, for continuous actions.
    """
    check_config(config, Config)
    check_fields(
        config,
        not_negative=("epsilon_spread", "rescale_eps"),
        fractions=("gamma", "max_priority_weight"),
        counts=("num_actors", "n_step"),
    )
    again = functools.partial(make, network=network, loss=loss)
    if network is None and config.memory == "none":
        raise ValueError("memory='none', but r2d2 replays what a memory made of windows; use gru or lstm, or dqn.")
    network = brought_or(network, config.network)
    if not network.recurrent:
        raise ValueError("network has no memory, but r2d2 learns from windows; pass one with memory, or use dqn.")
    buffer = replay.sequences(
        config.buffer_capacity,
        config.batch_size,
        config.num_updates,
        config.sequence_length,
        config.burn_in,
        config.sequence_period,
        config.min_replay_size,
        config.priority_exponent,
        config.importance_exponent,
        config.annealing_updates,
        config.smallest_priority,
    )
    # What is dqn's here asks nothing of the memory; what does is below.
    base = dqn.make(config, network._replace(recurrent=False), buffer=buffer)

    def carry(spec: EnvSpec, num_envs: int) -> Carry:
        return Carry(jnp.zeros(num_envs, jnp.int32), fresh_memory(network, spec.obs, num_envs))

    def number(carry: Carry, index: Array) -> Carry:
        return carry._replace(number=index.astype(jnp.int32))

    def act(keys: Key, params: dqn.Params, carry: Carry, obs: PyTree, first: Array, greedy: bool) -> ActOutput:
        before = choose_rows(first, jax.tree.map(jnp.zeros_like, carry.memory), carry.memory)
        value, memory = network.apply(params.network, before, obs, first)
        value = only_legal(value, obs)
        following = carry._replace(memory=memory)
        if greedy:
            return ActOutput(action_values.greedy(value), following)
        epsilon = apex.epsilons(params.epsilon, carry.number, config.num_actors, config.epsilon_spread)
        action = action_values.epsilon_greedy(keys, value, epsilon, legal_of(obs))
        return ActOutput(action, following, before if config.stored_state else ())

    def grad(key: Key, state: dqn.State, minibatch: Windows) -> tuple[PyTree, Aux]:
        start = minibatch.start
        if not config.stored_state:
            start = fresh_memory(network, minibatch.obs, minibatch.weight.shape[0])
        steps = minibatch._replace(start=(), weight=())  # type: ignore[arg-type]  # These two are not of steps.
        windows: Windows = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), steps)

        # By both networks, which burn in each for itself: values, and memories after each step. No gradient.
        both = [remember(network, p, start, windows.obs, windows.first) for p in (state.params, state.target_params)]
        if config.burn_in:
            start = jax.tree.map(lambda x: x[config.burn_in - 1], both[0][1])
        both, windows = jax.tree.map(lambda x: x[config.burn_in :], (both, windows))
        (online, memory), (target, target_memory) = both

        def best(online: Array, target: Array, obs: PyTree) -> Array:
            chooser = only_legal(online if config.double else target, obs)
            return action_values.select(target, jnp.argmax(chooser, axis=-1))

        def best_of(step: Array | None) -> Array:
            obs, after, target_after = at_step((windows.next_obs, memory, target_memory), step)
            no = jnp.zeros(windows.first.shape[1:], bool)
            online, _ = network.apply(state.params, after, obs, no)
            return best(online, network.apply(state.target_params, target_after, obs, no)[0], obs)

        cut = windows.truncated & ~windows.terminated
        next_value = returns.next_values(best(online, target, windows.obs), cut, best_of)
        valid = jnp.ones_like(cut) if windows.valid is None else windows.valid
        wanted = jax.lax.stop_gradient(n_step_target(config, windows, next_value))
        targets = Targets(windows.action, wanted, valid, minibatch.weight)

        def objective(params: PyTree) -> tuple[Array, Aux]:
            return loss(config, network.unroll(params, start, windows.obs, windows.first), targets)

        return jax.grad(objective, has_aux=True)(state.params)

    return base._replace(
        carry=carry,
        number=number,
        act=act,
        grad=grad,
        rollout_length=config.sequence_period,
        name="r2d2",
        make=again,
        brought=brought_to(again),
    )
