"""Rainbow (Hessel et al. 2018, arXiv 1710.02298): six improvements of DQN together, each a field of `Config`.

It is `dqn`, double, dueling and with n-step returns, and beside that: a head that says how values are distributed, C51
(Bellemare et al. 2017, arXiv 1707.06887) or QR-DQN (Dabney et al. 2018, arXiv 1710.10044); a replay that draws by what
such a head loses (Schaul et al. 2016, arXiv 1511.05952); and noisy layers that explore (Fortunato et al. 2018, arXiv
1706.10295). Without one of them it is an ablation of the paper's figure 3. Deliberate differences: those of `dqn`; the
two streams share every hidden layer, and so have one linear layer each; weights begin orthogonal, and only their
deviations as Fortunato et al. say; a gradient step draws one noise for the online network and one for the target, so
that what chooses the next action shares its noise with what is learnt; every environment draws its own at every step.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from podium import noisy
from podium.agent import ActOutput, Agent, Aux, brought_to
from podium.agents import dqn
from podium.networks import Network, brought_or, q_network, values_of_actions
from podium.ops import categorical
from podium.ops.action_values import select_atoms
from podium.ops.categorical import Support
from podium.ranges import check_atoms, check_choice, check_config, check_fields, is_on, is_traced
from podium.replay import Batch
from podium.types import Array, EnvSpec, Key, PyTree


@dataclasses.dataclass(frozen=True)
class Config(dqn.PrioritizedConfig):
    """Hyperparameters of Rainbow: those of DQN with prioritised replay, some with the paper's value, and its own."""

    n_step: int = 3
    """Rewards summed before the bootstrap, 1 or more."""
    dueling: bool = True
    """Whether what a head gives is a state's value plus advantages of mean zero, atom by atom."""
    epsilon_start: float = 0.0
    """Probability of a random action at the start, 0 to 1; 0 leaves exploring to noisy layers."""
    epsilon_end: float = 0.0
    """Probability of a random action after the decay, 0 to epsilon_start."""
    huber_delta: float = 1.0
    """TD error beyond which the loss grows linearly, above 0; of the heads scalar and qr only."""
    adam_eps: float = 1.5e-4
    """Added to Adam's denominator, above 0."""
    priority_exponent: float = 0.5
    """Power of what a transition loses that it is drawn in proportion to, 0 to 1; 0 draws uniformly."""
    head: str = "c51"
    """What the network says of an action's value: c51, the probabilities of num_atoms values; qr, its num_atoms
    quantiles; or scalar, its mean."""
    num_atoms: int = 51
    """Atoms or quantiles of the distribution, 2 or more."""
    v_min: float = -10.0
    """Least discounted return that c51 can tell, below v_max; see the metric target_outside."""
    v_max: float = 10.0
    """Largest discounted return that c51 can tell, above v_min."""
    noisy: bool = True
    """Whether dense layers are noisy; without, set epsilon_start to explore."""
    noisy_std: float = 0.5
    """Deviation that noisy weights begin with, times the root of a layer's inputs; above 0."""

    def network(self) -> Network:
        """Make the network; raises ValueError for what `q_network` refuses."""
        sizes = self.hidden_sizes, self.activation, self.dueling, self.torso, self.dtype
        head, std = HEADS[self.head](self), self.noisy_std if self.noisy else None
        return q_network(*sizes, num_atoms=head.num_atoms, noisy_std=std)


def c51_loss(config: Config, values: dqn.Values, batch: Batch) -> tuple[Array, Aux]:
    """Return the mean cross entropy of targets on the atoms (Bellemare et al. 2017, algorithm 1) and metrics.

        m = project(R + discount * z, p_target(s', a*)),   loss = -sum_i m_i log p_i(s, a),   a* as `dqn`'s

    Priorities are KL(m || p), the loss but for what no gradient can change (Hessel et al. 2018, section 3).

    Args:
      config: hyperparameters.
      values: logits [N, A, Z].
      batch: n-step transitions.
    """
    support = Support(config.v_min, config.v_max, config.num_atoms)
    best = dqn.bootstrap_action(config, values, support.mean)
    next_probs = jax.nn.softmax(select_atoms(values.next_target_value, best), axis=-1)
    target = jax.lax.stop_gradient(support.project(next_probs, batch.reward, batch.discount))
    logits = select_atoms(values.value, batch.action)
    error, value = categorical.cross_entropy(target, logits), support.mean(logits)
    td_error = support.expectation(target) - value
    outside = support.outside(next_probs, batch.reward, batch.discount)
    total, metrics = dqn.weighted_mean(
        batch, error, q_mean=value, td_error_abs=jnp.abs(td_error), target_outside=outside
    )
    return total, Aux(metrics, categorical.kl_divergence(target, logits))


def quantile_loss(config: Config, values: dqn.Values, batch: Batch) -> tuple[Array, Aux]:
    """Return the mean quantile Huber loss (Dabney et al. 2018, eq. 10), metrics, and each row's loss as its priority.

        sum_i mean_j |tau_i - (u_ij < 0)| * huber(u_ij) / delta,   u_ij = R + discount * theta_j(s', a*) - theta_i(s, a)

    with tau_i = (i + 1/2) / Z.

    Args:
      config: hyperparameters.
      values: quantiles [N, A, Z].
      batch: n-step transitions.
    """
    best = dqn.bootstrap_action(config, values, quantile_mean)
    following = select_atoms(values.next_target_value, best)
    target = jax.lax.stop_gradient(batch.reward[:, None] + batch.discount[:, None] * following)
    quantiles = select_atoms(values.value, batch.action)
    difference = target[:, None, :] - quantiles[:, :, None]
    tau = (jnp.arange(config.num_atoms) + 0.5) / config.num_atoms
    weight = jnp.abs(tau[:, None] - (difference < 0))
    huber = optax.huber_loss(difference, delta=config.huber_delta) / config.huber_delta
    error = jnp.sum(jnp.mean(weight * huber, axis=-1), axis=-1)
    value = quantile_mean(quantiles)
    td_error = quantile_mean(target) - value
    total, metrics = dqn.weighted_mean(batch, error, q_mean=value, td_error_abs=jnp.abs(td_error))
    return total, Aux(metrics, error)


def quantile_mean(quantiles: Array) -> Array:
    """Return the mean [...] of distributions of quantiles [..., Z]."""
    return jnp.mean(quantiles, axis=-1)


class Head(NamedTuple):
    """What a network gives for each action: `num_atoms` numbers (None: one alone), whose `mean` is its value."""

    num_atoms: int | None
    mean: dqn.Mean
    loss: Callable[..., tuple[Array, Aux]]


HEADS: dict[str, Callable[[Config], Head]] = {
    "scalar": lambda config: Head(None, dqn.as_they_are, dqn.loss),
    "c51": lambda config: Head(config.num_atoms, Support(config.v_min, config.v_max, config.num_atoms).mean, c51_loss),
    "qr": lambda config: Head(config.num_atoms, quantile_mean, quantile_loss),
}


def make(
    config: Config = Config(), network: Network | None = None, loss: Callable[..., tuple[Array, Aux]] | None = None
) -> Agent:
    """Make a Rainbow agent.

    Args:
      config: hyperparameters.
      network: without memory, whose output is what the head needs, [..., A, num_atoms] or of scalars [..., A]; None
        builds one of `config`'s sizes. Where none of its layers is noisy (`podium.noisy`), nothing is drawn.
      loss: `(config, values, batch) -> (scalar, Aux)`; its `Aux.priorities` are what transitions are drawn by. None
        takes the head's.

    Returns:
      an `Agent` with a prioritised `Replay`.

    Raises:
      ValueError: for a field out of range or a network with memory; from `init`, for continuous actions.
    """
    check_config(config, Config)
    _check(config)
    again = functools.partial(make, network=network, loss=loss)
    head = HEADS[config.head](config)
    network = brought_or(network, config.network, wanted=values_of_actions(head.num_atoms))
    base = dqn.make(config, network, loss or head.loss, mean=head.mean)

    def init(key: Key, spec: EnvSpec) -> dqn.State:
        state = base.init(key, spec)
        if config.noisy and not is_on(config.epsilon_start) and not noisy.in_params(state.params):
            raise ValueError(
                "noisy=True, but the network that was brought has no noisy layer, and with epsilon_start=0 nothing "
                "would explore; use noisy=False with epsilon_start=1.0 and epsilon_end=0.05, or noisy layers "
                "(networks.q_network with noisy_std)."
            )
        return state

    def act(keys: Key, params: dqn.Params, memory: PyTree, obs: PyTree, first: Array, greedy: bool) -> ActOutput:
        if config.noisy and not greedy:
            noise_keys, keys = jnp.moveaxis(jax.vmap(jax.random.split)(keys), 1, 0)
            noise = jax.vmap(noisy.sample, (0, None))(noise_keys, params.network)
            params = params._replace(network=noisy.insert(params.network, noise))
        return base.act(keys, params, memory, obs, first, greedy)

    def grad(key: Key, state: dqn.State, batch: Batch) -> tuple[PyTree, Aux]:
        if not config.noisy:
            return base.grad(key, state, batch)
        online, target = (noisy.sample(key, state.params) for key in jax.random.split(key))
        params, pull_back = jax.vjp(lambda params: noisy.perturb(params, online), state.params)
        target_params = noisy.perturb(state.target_params, target)
        grads, aux = base.grad(key, state._replace(params=params, target_params=target_params), batch)
        return pull_back(grads)[0], aux

    return base._replace(init=init, act=act, grad=grad, name="rainbow", make=again, brought=brought_to(again))


def _check(config: Config) -> None:
    """Refuse what is out of range of the fields that are not DQN's."""
    check_fields(config, positive=["noisy_std"])
    check_choice("head", config.head, tuple(HEADS))
    check_atoms(config, "v_min", "v_max", "num_atoms")
    if not (config.noisy or is_traced(config.epsilon_start)) and config.epsilon_start == 0:
        raise ValueError(
            "noisy=False and epsilon_start=0 would never explore; use noisy=True, or epsilon_start=1.0 and "
            "epsilon_end=0.05."
        )
