"""AlphaZero (Silver et al. 2018, Science 362): search by the rules of a game improves the policy that guides it.

    (p, v) = f(s),   pi = search(s) by f,   z = what the game came to for who moved
    loss = (z - v)^2 - sum_a pi(a) log p(a)                                                     (eq. 1)

Search is by mctx (DeepMind 2022): with Gumbel (Danihelka et al. 2022, ICLR: actions at the root drawn without
replacement and halved, and an improved policy that is one with few simulations), or with PUCT as in AlphaZero, its
noise at the root and its proportional moves. The rules come in as a value, an `Env` that is stepped from `Seen.rules`.

Deliberate differences. Values are learnt from lambda-returns over the values of the search (`td_lambda` = 1 is z of
games that end within the rollout; longer ones are bootstrapped from), many games step side by side, and weights decay
by AdamW. One search an environment, each with a key of its own, so that games do not depend on what is played beside
them. Symmetries are not used. Gate and evaluator of AlphaGo Zero are not there: as in AlphaZero the newest plays.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from podium import networks, replay
from podium.agent import ActOutput, Agent, Aux, Plan, brought_to
from podium.env import Env
from podium.networks import ActorCriticConfig, Network, policy_mask
from podium.ops import optimizers, returns
from podium.ops.counts import Count
from podium.ops.statistics import count_valid, masked_means
from podium.ranges import check_config, check_fields
from podium.replay import Batch
from podium.search import Expand, Leaf, Root, SearchConfig, make_search
from podium.seen import only_legal
from podium.types import Array, DiscreteSpec, EnvSpec, Key, PyTree, Seen, Trajectory


@dataclasses.dataclass(frozen=True)
class Config(SearchConfig, ActorCriticConfig):
    """Hyperparameters of AlphaZero."""

    shared_torso: ClassVar[bool] = True
    """(p, v) = f(s) is one network with two heads."""
    hidden_sizes: tuple[int, ...] = (128, 128)
    """Units of each hidden layer of the torso that policy and value share."""
    activation: str = "relu"
    """Nonlinearity of hidden layers: tanh, relu, silu, gelu or elu."""
    learning_rate: float = 1e-3
    """AdamW's step size, above 0."""
    anneal_steps: int = 0
    """Environment steps over which the learning rate falls linearly to zero; 0 keeps it constant."""
    weight_decay: float = 1e-4
    """Decay of weights per step, as a share of the step size; 0 or more."""
    max_grad_norm: float = 1.0
    """Bound on the global norm of the gradient; 0 leaves it unbounded."""
    gamma: float = 1.0
    """Discount per ply, 0 to 1."""
    td_lambda: float = 1.0
    """Of value targets: 1 is what the game came to, less trusts the values of the search; 0 to 1."""
    value_coef: float = 1.0
    """Weight of the value loss, 0 or more."""
    batch_size: int = 512
    """Positions in a minibatch, 1 or more; the lanes must divide it."""
    num_updates: int = 8
    """Minibatches learnt per iteration, 1 or more."""
    buffer_capacity: int = 100_000
    """Positions held, over all environments; rounded down to whole rollouts."""
    min_replay_size: int = 5_000
    """Positions that must be held before learning starts, 1 to buffer_capacity."""


class State(NamedTuple):
    """What learning needs."""

    params: PyTree
    opt_state: optax.OptState
    env_steps: Count


def make(config: Config = Config(), model: Env | None = None, network: Network | None = None) -> Agent:
    """Make an AlphaZero agent.

    Args:
      config: hyperparameters.
      model: the rules: an environment whose `step` goes on from `Seen.rules`, of the same observations and actions as
        the one that is played, but for these rules.
      network: whose output is `ActorCritic`, without memory; None builds one of `config`'s sizes,
        one torso with two heads.

    Returns:
      an `Agent`. Greedy play searches too, without noise; with `num_simulations=0` it is the network's.

    Raises:
      ValueError: for a field out of range, no model, a network with memory, or where mctx is not installed; from
        `init`, where what is played is no game of this model, or its observations have no rules.
    """
    check_config(config, Config)
    _check(config)
    if model is None:
        raise ValueError("alphazero searches by the rules of a game: give model, such as the environment itself.")
    by_parts = functools.partial(make, network=network)
    again = functools.partial(by_parts, model=model)  # The rules come with what is played.
    network = networks.brought_or(network, config.network, wanted=networks.ACTOR_CRITIC)
    if network.recurrent:
        raise ValueError("network has memory, and positions of a search have no past; use memory='none'.")
    search = make_search(config, _expansion(config, model, network), rescale_values=False, agent="alphazero")
    buffer = replay.uniform(config.buffer_capacity, config.batch_size, config.num_updates, config.min_replay_size)
    optimizer = optimizers.adamw(config.weight_decay, config.max_grad_norm)

    def init(key: Key, spec: EnvSpec) -> State:
        _check_game(spec, model.spec)
        params = network.init(key, spec)
        return State(params, optimizer.init(params), Count.zero())

    def act(keys: Key, params: PyTree, memory: PyTree, obs: Seen, first: Array, greedy: bool) -> ActOutput:
        output, _ = network.apply(params, memory, obs, first)
        root = Root(output.policy.logits, output.value, obs.rules, obs.legal)
        action, searched = search(keys, params, root, greedy)
        return ActOutput(action, memory, searched)

    def plan(key: Key, state: State, trajectory: Trajectory) -> Plan:
        policy, value = trajectory.extras
        # By the search's values; of what the last ply led to, the network's.
        cut = trajectory.truncated & ~trajectory.terminated
        next_value = networks.next_values(network, state.params, value, cut, trajectory.reached, ())
        discount = config.gamma * trajectory.discount
        outcome = returns.lambda_return(trajectory.reward, discount, next_value, trajectory.last, config.td_lambda)
        # A position is a transition of no length: what the search made of it in the place of the action, what the game
        # came to in that of the reward.
        flags = trajectory.terminated, trajectory.truncated
        return Plan(replay.Transition(_position(trajectory.obs), policy, outcome, *flags, (), trajectory.valid))

    def grad(key: Key, state: State, batch: Batch) -> tuple[PyTree, Aux]:
        def objective(params: PyTree) -> tuple[Array, Aux]:
            output = network.unroll(params, (), batch.obs, jnp.zeros(batch.reward.shape, bool))
            log_probs = output.policy.log_probs()
            rows = {
                "policy_loss": -jnp.sum(batch.action * jnp.where(batch.action > 0, log_probs, 0.0), axis=-1),
                "value_loss": jnp.square(batch.reward - output.value),
                "search_entropy": -jnp.sum(jax.scipy.special.xlogy(batch.action, batch.action), axis=-1),
                "entropy": output.policy.entropy(),
            }
            means = masked_means(None if batch.weight is None else batch.weight > 0, **rows)
            loss = means["policy_loss"] + config.value_coef * means["value_loss"]
            return loss, Aux({**means, "loss": loss})

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
        rollout_length=64,
        name="alphazero",
        config=config,
        make=again,
        policy_mask=functools.partial(policy_mask, network),
        brought=brought_to(by_parts),
    )


def _position(obs: Seen) -> Seen:
    """Return what of an observation is learnt from."""
    return Seen(obs.view, obs.legal)


def _expansion(config: Config, model: Env, network: Network) -> Expand:
    """Return what plays one action by the rules, in a batch of one position."""

    def expand(params: PyTree, key: Key, action: Array, state: PyTree) -> tuple[Leaf, PyTree]:
        state, timestep = jax.vmap(model.step)(jax.random.split(key, 1), state, action)
        output, _ = network.apply(params, (), timestep.obs, jnp.zeros(1, bool))
        discount = config.gamma * (1.0 - timestep.terminated)
        turned = discount if timestep.turn is None else discount * timestep.turn
        return Leaf(timestep.reward, turned, only_legal(output.policy.logits, timestep.obs), output.value), state

    return expand


def _check_game(spec: EnvSpec, model: EnvSpec) -> None:
    """Refuse an environment that the rules are not of, or that does not hand them on."""
    if not isinstance(spec.action, DiscreteSpec) or spec.action.shape:
        raise ValueError(f"{spec.name} does not take one discrete action at a time, which a search needs.")
    if not isinstance(spec.obs, Seen) or not jax.tree.leaves(spec.obs.rules):
        remedy = "make it with rules=True (--env-options rules=True)" if spec.turns else "use muzero, which learns them"
        raise ValueError(f"observations of {spec.name} have no rules to search by; {remedy}.")
    bare = lambda spec: dataclasses.replace(spec, obs=spec.obs._replace(rules=()))
    if not isinstance(model.obs, Seen) or bare(spec).sha256() != bare(model).sha256():
        raise ValueError(f"model is {model.name}, and what is played is {spec.name}; give the rules of the same game.")


def _check(config: Config) -> None:
    check_fields(
        config,
        positive=("learning_rate",),
        not_negative=("anneal_steps", "weight_decay", "max_grad_norm", "value_coef"),
        fractions=("gamma", "td_lambda"),
    )
