"""MuZero (Schrittwieser et al. 2020, arXiv 1911.08265): search by a model that is learnt beside policy and value.

    s^0 = h(o_t),   r^k, s^k = g(s^{k-1}, a_{t+k}),   p^k, v^k = f(s^k)                                  (appendix B)
    loss = sum_k l_r(u_{t+k}, r^k) + c l_v(z_{t+k}, v^k) + l_p(pi_{t+k}, p^k)                            (eq. 1)

pi is the policy of a search in the model, z the rewards u of n steps and the worth of what they led to. By default
search and pi are those of Gumbel MuZero (Danihelka et al. 2022, ICLR), good with few simulations. Values and rewards
are distributions over atoms of their rescaled numbers (appendix F); behind the end of an episode the model stays where
nothing is gained (appendix G). In a game of two the model learns whose turn it is too, and what the opponent gains
counts negative. What is legal is known at the root only.

Deliberate differences. Windows of `unroll_steps` + `td_steps` steps are replayed: z sums up to the end of the window
(by `td_lambda`, Sutton and Barto 2018, eq. 12.18), at least `td_steps`, and behind it stands the value of the network
that learns, as behind an episode that a time limit cuts; what would follow there is not learnt from. States are vectors
and everything behind convolutions is MLPs. Weights decay by AdamW. Nothing is searched again (reanalyse).
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
from podium.agent import ActOutput, Agent, Aux, Plan, brought_to
from podium.models import Model, ModelConfig, unrolled
from podium.ops import optimizers, returns
from podium.ops.categorical import RescaledSupport, cross_entropy
from podium.ops.counts import Count
from podium.ops.statistics import count_valid, masked_means
from podium.ranges import check_atoms, check_config, check_fields
from podium.replay import Windows
from podium.search import Leaf, Root, SearchConfig, make_search
from podium.seen import legal_of, only_legal, view_of
from podium.types import Array, EnvSpec, Key, PyTree, Trajectory, at_step


@dataclasses.dataclass(frozen=True)
class Config(SearchConfig, ModelConfig):
    """Hyperparameters of MuZero."""

    rescale_search: bool = True
    """Of gumbel, whether values are compared by their range in a position; False for games won by 1 and lost by -1."""
    value_min: float = -300.0
    """Least return, or reward, that the model can tell; see the metric target_outside."""
    value_max: float = 300.0
    """Largest return, or reward, that the model can tell, above value_min."""
    learning_rate: float = 1e-3
    """AdamW's step size, above 0."""
    anneal_steps: int = 0
    """Environment steps over which the learning rate falls linearly to zero; 0 keeps it constant."""
    weight_decay: float = 1e-4
    """Decay of weights per step, as a share of the step size; 0 or more."""
    max_grad_norm: float = 5.0
    """Bound on the global norm of the gradient; 0 leaves it unbounded."""
    gamma: float = 0.997
    """Discount per step, 0 to 1."""
    unroll_steps: int = 5
    """K, steps that the model is unrolled, 1 or more."""
    td_steps: int = 10
    """Steps behind those that rewards are summed of at least before the bootstrap, 1 or more."""
    td_lambda: float = 1.0
    """Of value targets: 1 sums rewards to the window's end, less trusts the values of searches on the way; 0 to 1."""
    value_coef: float = 0.25
    """Weight of the value loss, 0 or more."""
    batch_size: int = 128
    """Windows in a minibatch, 1 or more; the lanes must divide it."""
    num_updates: int = 4
    """Minibatches learnt per iteration, 1 or more."""
    buffer_capacity: int = 100_000
    """Steps held, over all environments; rounded down to whole rollouts."""
    min_replay_size: int = 5_000
    """Steps that must be held before learning starts, 1 to buffer_capacity."""
    priority_exponent: float = 0.0
    """Power of a window's error |v^0 - z_t| that it is drawn in proportion to, 0 to 1; 0 draws uniformly."""
    importance_exponent: float = 1.0
    """How much of what that skews the loss's weights undo, 0 to 1."""


class Played(NamedTuple):
    """What a step stores in the place of an action: the action taken, and what the search left, `Searched`."""

    action: Array
    policy: Array
    value: Array


class Targets(NamedTuple):
    """What the positions k = 0 ... K of N windows are to say, [N, K + 1].

    Attributes:
      policy: [N, K + 1, A], of the search.
      value: z, 0 behind the end of an episode.
      reward: of action k, likewise.
      alive: bool, whether position k lies in the episode of position 0.
      counted: bool, whether it does, or behind its termination: there value and reward are learnt, and no policy.
    """

    policy: Array
    value: Array
    reward: Array
    alive: Array
    counted: Array


class State(NamedTuple):
    """What learning needs."""

    params: PyTree
    opt_state: optax.OptState
    env_steps: Count


def make_targets(config: Config, windows: Windows, evaluate: Callable[[PyTree], Array]) -> Targets:
    """Return what a model is to say of windows (Schrittwieser et al. 2020, appendices B and G).

        z_k = u_k + d_k ((1 - lambda) v_{k+1} + lambda z_{k+1})

    where d_k is gamma, or 0 at a termination, times the turn's sign, and lambda is 0 in the last row, where an
    episode ends, and where what follows is no transition.

    Args:
      config: hyperparameters.
      windows: [N, L, ...], with `Played` in the place of actions, L above K.
      evaluate: `(obs [N, ...]) -> value [N]`, by which is bootstrapped behind the last row and truncations; behind
        other rows the value of the search stands.
    """
    flags = windows.terminated, windows.truncated, windows.valid
    rows = windows.reward, windows.turn, windows.action.value, windows.next_obs, *flags
    time_first = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), rows)
    reward, turn, value, next_obs, terminated, truncated, valid = time_first
    valid = jnp.ones_like(terminated) if valid is None else valid
    cut = (truncated | jnp.concatenate([~valid[1:], jnp.zeros_like(valid[:1])])) & ~terminated
    last = cut | terminated
    discount = config.gamma * (1.0 - terminated) * (1.0 if turn is None else turn)
    next_value = returns.next_values(value, cut, lambda step: evaluate(at_step(next_obs, step)))
    target = returns.lambda_return(reward, discount, next_value, last, config.td_lambda)

    before = lambda flag: jnp.concatenate([jnp.zeros_like(flag[:1]), jnp.cumsum(flag, axis=0)[:-1] > 0])
    alive = valid[0] & ~before(last)
    absorbed = valid[0] & before(alive & terminated)
    found = jnp.where(alive, target, 0.0), jnp.where(alive, reward, 0.0), alive, alive | absorbed
    at = jax.tree.map(lambda x: jnp.swapaxes(x[: config.unroll_steps + 1], 0, 1), found)
    return jax.lax.stop_gradient(Targets(windows.action.policy[:, : config.unroll_steps + 1], *at))


def make(config: Config = Config(), model: Model | None = None) -> Agent:
    """Make a MuZero agent.

    Args:
      config: hyperparameters.
      model: what is learnt, rewards and values of `config.num_bins` atoms; None builds one of `config`'s sizes.

    Returns:
      an `Agent` with a `Replay` of windows. Greedy play searches too, without noise; with `num_simulations=0` it is the
      network's.

    Raises:
      ValueError: for a field out of range, or where mctx is not installed; from `init`, for continuous actions, or
        several at once.
    """
    check_config(config, Config)
    _check(config)
    again = functools.partial(make, model=model)
    learnt = config.model() if model is None else model
    atoms = RescaledSupport(config.value_min, config.value_max, config.num_bins)
    length, steps = config.unroll_steps + config.td_steps, config.unroll_steps
    buffer = replay.sequences(
        config.buffer_capacity,
        config.batch_size,
        config.num_updates,
        sequence_length=length,
        burn_in=length - steps,
        sequence_period=1,
        min_replay_size=config.min_replay_size,
        priority_exponent=config.priority_exponent,
        importance_exponent=config.importance_exponent,
    )
    optimizer = optimizers.adamw(config.weight_decay, config.max_grad_norm)

    def value_of(params: PyTree, obs: PyTree) -> Array:
        return atoms.mean(learnt.predict(params, learnt.represent(params, obs)).value)

    def expand(params: PyTree, key: Key, action: Array, state: PyTree) -> tuple[Leaf, PyTree]:
        moved = learnt.move(params, state, action)
        predicted = learnt.predict(params, moved.state)
        sign = jnp.ones(action.shape) if moved.turn is None else jnp.where(moved.turn > 0, -1.0, 1.0)
        reward, value = atoms.mean(moved.reward), atoms.mean(predicted.value)
        return Leaf(reward, config.gamma * sign, predicted.policy, value), moved.state

    search = make_search(config, expand, config.rescale_search, "muzero")

    def init(key: Key, spec: EnvSpec) -> State:
        params = learnt.init(key, spec)
        return State(params, optimizer.init(params), Count.zero())

    def act(keys: Key, params: PyTree, memory: PyTree, obs: PyTree, first: Array, greedy: bool) -> ActOutput:
        state = learnt.represent(params, obs)
        predicted = learnt.predict(params, state)
        root = Root(only_legal(predicted.policy, obs), atoms.mean(predicted.value), state, legal_of(obs))
        action, searched = search(keys, params, root, greedy)
        return ActOutput(action, memory, searched)

    def plan(key: Key, state: State, trajectory: Trajectory) -> Plan:
        steps = replay.transitions(trajectory)
        played = Played(trajectory.action, *trajectory.extras)
        seen = view_of(steps.obs), view_of(steps.next_obs)
        return Plan(steps._replace(obs=seen[0], next_obs=seen[1], action=played, extras=()))

    def grad(key: Key, state: State, windows: Windows) -> tuple[PyTree, Aux]:
        targets = make_targets(config, windows, functools.partial(value_of, state.params))
        alive, counted = targets.alive, targets.counted
        # Behind the end of an episode they are those of the next one. Random ones could be told from what is played,
        # and the model would take what the policy rarely chooses for the end.
        actions = windows.action.action[:, :steps]
        obs = jax.tree.map(lambda x: x[:, 0], windows.obs)

        def over_positions(loss: Array, which: Array) -> Array:
            """Sum [N, K + 1] over the positions that count, those of the model weighted by 1 / K (appendix G)."""
            weight = np.array([1.0, *[1.0 / steps] * steps], np.float32)[-loss.shape[1] :]
            return jnp.sum(jnp.where(which, loss, 0.0) * weight, axis=1)

        def objective(params: PyTree) -> tuple[Array, Aux]:
            predicted, moved = unrolled(learnt, params, obs, actions)
            policy_loss = cross_entropy(targets.policy, predicted.policy)
            reward_loss = atoms.cross_entropy(moved.reward, targets.reward[:, :steps])
            rows = {
                "policy_loss": over_positions(policy_loss, alive),
                "value_loss": over_positions(atoms.cross_entropy(predicted.value, targets.value), counted),
                "reward_loss": over_positions(reward_loss, counted[:, :steps]),
            }
            if moved.turn is not None and windows.turn is not None:
                theirs = (windows.turn[:, :steps] < 0).astype(jnp.float32)
                goes_on = alive[:, :steps] & ~windows.terminated[:, :steps]
                turn_loss = optax.sigmoid_binary_cross_entropy(moved.turn, theirs)
                rows["turn_loss"] = over_positions(turn_loss, goes_on)
            value_error = jnp.where(counted, jnp.abs(atoms.mean(predicted.value) - targets.value), 0.0)
            means = masked_means(
                counted[:, 0] & (windows.weight > 0),
                **{name: windows.weight * row for name, row in rows.items()},
                value_error=value_error[:, 0],
                unrolled_value_error=value_error[:, -1],
                reward_error=jnp.abs(atoms.mean(moved.reward) - targets.reward[:, :steps])[:, 0],
                target=targets.value[:, 0],
                target_outside=atoms.outside(targets.value[:, 0]).astype(jnp.float32),
                search_entropy=jnp.sum(jax.scipy.special.entr(targets.policy[:, 0]), axis=-1),
            )
            coefs = {"value_loss": config.value_coef}
            loss = sum((coefs.get(name, 1.0) * means[name] for name in rows), jnp.zeros(()))
            return loss, Aux({**means, "loss": loss}, value_error[:, 0])

        return jax.grad(objective, has_aux=True)(state.params)

    def apply(state: State, grads: PyTree) -> State:
        rate = optimizers.annealed(config.learning_rate, config.anneal_steps, state.env_steps.total())
        params, opt_state = optimizers.descend(optimizer, rate, state.params, state.opt_state, grads)
        return state._replace(params=params, opt_state=opt_state)

    def observe(state: State, trajectory: Trajectory) -> State:
        return state._replace(env_steps=state.env_steps.add(count_valid(trajectory.reward, trajectory.valid)))

    return Agent(
        init,
        lambda state: state.params,
        lambda spec, num_envs: (),
        act,
        plan,
        grad,
        apply,
        observe,
        buffer,
        rollout_length=8,
        name="muzero",
        config=config,
        make=again,
        brought=brought_to(again),
    )


def _check(config: Config) -> None:
    check_fields(
        config,
        positive=("learning_rate",),
        not_negative=("anneal_steps", "weight_decay", "max_grad_norm", "value_coef"),
        fractions=("gamma", "td_lambda"),
        counts=("unroll_steps", "td_steps"),
    )
    check_atoms(config, "value_min", "value_max", "num_bins")
