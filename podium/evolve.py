"""Evolve an agent: `Strategy` perturbs its policy, and moves it by the returns that this brought.

Salimans et al. 2017, "Evolution Strategies as a Scalable Alternative to Reinforcement Learning", Algorithm 2, with
opposite pairs and returns by their rank. `podium.learn` is the same for gradients; `podium.Evolution` lets it play.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from podium import keys
from podium.agent import Agent, policy_leaves
from podium.tally import OF_EPISODES, Addition
from podium.types import Array, EnvSpec, Key, Metrics, PyTree


class EvolutionState(NamedTuple):
    """A run under evolution, and all that a checkpoint holds.

    Attributes:
      key: of the run; every generation's keys are folded from it and `update`.
      update: int32, generations done.
      agent: the agent's State, with the parameters that the noise is added to.
      optimizer: Adam's moments.
    """

    key: Key
    update: Array
    agent: PyTree
    optimizer: optax.OptState


ADDITIONS: Mapping[str, Addition] = {
    **{name: addition for name, addition in OF_EPISODES.items() if name != "nonfinite_steps"},  # Members count none.
    "valid_steps": "sum",
    "return_best": "max",
    "return_deviation": "mean",
    "gradient_norm": "mean",
}
"""How the metrics of `Strategy.learn` add up over the generations of a row."""

Play = Callable[[Key, Key, PyTree], tuple[Any, Any]]
"""`(noise key, play key, agent's State) -> (returns [members / 2, 2] of all pairs, steps that were played)`."""


def generation(play: Play, learn: Callable[..., Any], state: EvolutionState) -> tuple[EvolutionState, Metrics, Array]:
    """Let all members play, and take the step that their returns ask for."""
    noise_key, play_key = keys.iteration(state.key, state.update)
    returns, steps = play(noise_key, play_key, state.agent)
    return learn(noise_key, state, returns, steps)


class Strategy:
    """The arithmetic, whoever plays: how an agent's parameters are perturbed, and move by what that brought.

    Args:
      agent: of which `init`, `actor`, `act` and `policy_mask` are used.
      spec: of its environment.
      sigma: deviation of the noise.
      learning_rate: of Adam, which follows the estimated gradient.
      weight_decay: towards zero, of the parameters, beside the estimate.
      episodes: that each member plays in a generation; its return is their mean.

    Attributes:
      size: n, the numbers that noise is added to.
    """

    def __init__(
        self,
        agent: Agent,
        spec: EnvSpec,
        *,
        sigma: float,
        learning_rate: float,
        weight_decay: float,
        episodes: int,
    ):
        self.agent, self.spec, self.episodes = agent, spec, episodes
        self.sigma, self.learning_rate, self.weight_decay = sigma, learning_rate, weight_decay
        shapes = jax.eval_shape(lambda key: agent.init(key, spec), jax.random.key(0))
        self._moves = policy_leaves(agent, shapes)
        self.size = sum(x.size for x, moves in zip(jax.tree.leaves(shapes), self._moves, strict=True) if moves)
        if not self.size:
            raise ValueError(
                f"the policy of {agent.name} has no parameters in its State, so there is nothing to evolve; "
                "Agent.policy_mask says which they are."
            )
        self._optimizer = optax.adam(learning_rate)

    def start(self, key: Key) -> EvolutionState:
        """Return the first state."""
        roots = keys.roots(key)
        agent = self.agent.init(roots.agent, self.spec)
        return EvolutionState(roots.run, jnp.zeros((), jnp.int32), agent, self._optimizer.init(self.parameters(agent)))

    def parameters(self, agent_state: PyTree) -> Array:
        """Return what noise is added to, as one vector [n]."""
        leaves = zip(jax.tree.leaves(agent_state), self._moves, strict=True)
        return jnp.concatenate([x.reshape(-1).astype(jnp.float32) for x, moves in leaves if moves])

    def with_parameters(self, agent_state: PyTree, parameters: Array) -> PyTree:
        """Return the agent's State with other `parameters` [n] in it."""
        leaves, at = [], 0
        for x, moves in zip(jax.tree.leaves(agent_state), self._moves, strict=True):
            leaves.append(parameters[at : at + x.size].reshape(x.shape).astype(x.dtype) if moves else x)
            at += x.size if moves else 0
        return jax.tree.unflatten(jax.tree.structure(agent_state), leaves)

    def _noise(self, key: Key, pair: Array) -> Array:
        """Return the noise [n] of a pair, the same on every device; the second of the pair has its opposite."""
        return jax.random.normal(jax.random.fold_in(key, pair), (self.size,))

    def perturb(self, key: Key, agent_state: PyTree, pair: Array) -> PyTree:
        """Return the parameters that the two members of a pair act with, [2, ...]; `key` is that of all noise."""
        parameters, step = self.parameters(agent_state), self.sigma * self._noise(key, pair)
        member = lambda sign: self.agent.actor(self.with_parameters(agent_state, parameters + sign * step))
        return jax.vmap(member)(jnp.array([1.0, -1.0]))

    def halves(self, key: Key, agent_state: PyTree, pairs: Array) -> tuple[PyTree, ...]:
        """Return what the first of every pair [P] acts with, and what the second does."""
        both = jax.vmap(self.perturb, (None, None, 0))(key, agent_state, pairs)
        return tuple(jax.tree.map(lambda x, i=i: x[:, i], both) for i in range(2))

    def act(self, params: PyTree, step_key: Key, index: Array, *seen: PyTree) -> tuple[Array, PyTree]:
        """Act for members [P], each in E environments of its own, [P * E] numbered `index`; returns actions, memory.

        What was `seen` are the memory, the observations, and where episodes begin.
        """
        act_keys = jax.vmap(partial(jax.random.fold_in, step_key))(index)
        apart = lambda x: x.reshape(-1, self.episodes, *x.shape[1:])
        act = lambda params, key, carry, obs, first: self.agent.act(key, params, carry, obs, first, True)
        output = jax.vmap(act)(params, *jax.tree.map(apart, (act_keys, *seen)))
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (output.action, output.carry))

    def learn(
        self, block: int, key: Key, state: EvolutionState, returns: Array, steps: Array
    ) -> tuple[EvolutionState, Metrics, Array]:
        """Take the step that the returns of all pairs, [N, 2], ask for; noise is drawn again for `block` at once."""
        ranks = centered_ranks(returns.reshape(-1)).reshape(returns.shape)
        parameters = self.parameters(state.agent)
        uphill = self._weighed(key, ranks[:, 0] - ranks[:, 1], block) / (returns.size * self.sigma)
        gradient = self.weight_decay * parameters - uphill
        change, optimizer = self._optimizer.update(gradient, state.optimizer)
        agent = self.with_parameters(state.agent, parameters + change)
        episodes = jnp.float32(returns.size * self.episodes)
        metrics = {
            "episodes": episodes,
            "episode_return_sum": jnp.mean(returns) * episodes,
            "episode_length_sum": steps,
            "valid_steps": steps,
            "return_best": jnp.max(returns),
            "return_deviation": jnp.std(returns),
            "gradient_norm": jnp.linalg.norm(gradient),
        }
        finite = jnp.repeat(jnp.isfinite(returns).reshape(-1), self.episodes)
        return EvolutionState(state.key, state.update + 1, agent, optimizer), metrics, finite

    def _weighed(self, key: Key, weights: Array, block: int) -> Array:
        """Return the sum [n] of all pairs' noise, each times its weight [N], in blocks."""
        numbers, draw = jnp.arange(weights.size).reshape(-1, block), jax.vmap(partial(self._noise, key))
        add = lambda total, part: (total + part[1] @ draw(part[0]), None)
        return jax.lax.scan(add, jnp.zeros(self.size), (numbers, weights.reshape(numbers.shape)))[0]


def centered_ranks(returns: Array) -> Array:
    """Return the ranks of `returns` [N] scaled to -0.5 ... 0.5; equal ones share their mean rank, so luck decides none.

    >>> centered_ranks(jnp.array([3.0, 1.0, 3.0])).tolist()
    [0.25, -0.5, 0.25]
    """
    ordered = jnp.sort(returns)
    below, upto = (jnp.searchsorted(ordered, returns, side=side) for side in ("left", "right"))
    return (below + upto - 1) / (2 * (returns.size - 1)) - 0.5
