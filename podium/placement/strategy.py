"""The arithmetic of evolution strategies (Salimans et al. 2017), whoever plays: noise, ranks, and a step."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from podium import keys
from podium.agent import Agent, fresh_carry
from podium.ops.statistics import RunningStats
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


@dataclasses.dataclass(frozen=True)
class Strategy:
    """How an agent's parameters are perturbed, and move by what that brought.

    Args:
      agent: whose `init`, `actor`, `carry` and `act` are used.
      spec: of the environment.
      sigma: deviation of the noise.
      learning_rate: of Adam.
      weight_decay: towards zero.
      episodes: of each member.
    """

    agent: Agent
    spec: EnvSpec
    sigma: float
    learning_rate: float
    weight_decay: float
    episodes: int

    @functools.cached_property
    def _shapes(self) -> PyTree:
        return jax.eval_shape(lambda key: self.agent.init(key, self.spec), jax.random.key(0))

    @functools.cached_property
    def _perturbed(self) -> list[bool]:
        return perturbed(self.agent, self.spec, self._shapes)

    @functools.cached_property
    def size(self) -> int:
        """Return n, the numbers that noise is added to."""
        return sum(x.size for x, chosen in zip(jax.tree.leaves(self._shapes), self._perturbed, strict=True) if chosen)

    @functools.cached_property
    def _optimizer(self) -> optax.GradientTransformation:
        return optax.adam(self.learning_rate)

    def start(self, key: Key) -> EvolutionState:
        """Return the first state."""
        roots = keys.roots(key)
        agent = self.agent.init(roots.agent, self.spec)
        return EvolutionState(roots.run, jnp.zeros((), jnp.int32), agent, self._optimizer.init(self.parameters(agent)))

    def parameters(self, agent_state: PyTree) -> Array:
        """Return what noise is added to, as one vector [n]."""
        leaves = zip(jax.tree.leaves(agent_state), self._perturbed, strict=True)
        return jnp.concatenate([x.reshape(-1).astype(jnp.float32) for x, chosen in leaves if chosen])

    def with_parameters(self, agent_state: PyTree, parameters: Array) -> PyTree:
        """Return the agent's State with other `parameters` [n] in it."""
        leaves, at = [], 0
        for x, chosen in zip(jax.tree.leaves(agent_state), self._perturbed, strict=True):
            leaves.append(parameters[at : at + x.size].reshape(x.shape).astype(x.dtype) if chosen else x)
            at += x.size if chosen else 0
        return jax.tree.unflatten(jax.tree.structure(agent_state), leaves)

    def _noise(self, key: Key, pair: Array) -> Array:
        """Return the noise [n] of a pair, the same on every device; the second of the pair has its opposite."""
        return jax.random.normal(jax.random.fold_in(key, pair), (self.size,))

    def pair(self, key: Key, agent_state: PyTree, pair: Array) -> PyTree:
        """Return the parameters that the two members of a pair act with, [2, ...]."""
        parameters, step = self.parameters(agent_state), self.sigma * self._noise(key, pair)
        member = lambda sign: self.agent.actor(self.with_parameters(agent_state, parameters + sign * step))  # noqa: E731
        return jax.vmap(member)(jnp.array([1.0, -1.0]))

    def learn(
        self, key: Key, state: EvolutionState, returns: Array, steps: Array, block: int
    ) -> tuple[EvolutionState, Metrics, Array]:
        """Take the step that the returns of all pairs, [N, 2], ask for.

        Args:
          key: of the noise that they played with.
          state: that they were perturbed from.
          returns: of them.
          steps: that all played.
          block: pairs whose noise is drawn again at once; divides N.

        Returns:
          the next state, metrics, and [B] whether the return of each environment's member is finite.
        """
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

        def add(total: Array, block: tuple[Array, Array]) -> tuple[Array, None]:
            pairs, weight = block
            return total + weight @ jax.vmap(lambda pair: self._noise(key, pair))(pairs), None

        numbers = jnp.arange(weights.size).reshape(-1, block)
        return jax.lax.scan(add, jnp.zeros(self.size), (numbers, weights.reshape(numbers.shape)))[0]


def centered_ranks(returns: Array) -> Array:
    """Return the ranks of `returns` [N] scaled to -0.5 ... 0.5; equal ones share their mean rank, so luck decides none.

    >>> centered_ranks(jnp.array([3.0, 1.0, 3.0])).tolist()
    [0.25, -0.5, 0.25]
    """
    ordered = jnp.sort(returns)
    below, upto = (jnp.searchsorted(ordered, returns, side=side) for side in ("left", "right"))
    return (below + upto - 1) / (2 * (returns.size - 1)) - 0.5


def perturbed(agent: Agent, spec: EnvSpec, state: PyTree) -> list[bool]:
    """Say for each leaf of the agent's State (shapes will do) whether evolution moves it.

    It moves a floating-point leaf that `agent.actor` hands on and greedy actions depend on, but no running statistics.

    Raises:
      ValueError: there is none.
    """
    leaves, tree = jax.tree.leaves(state), jax.tree.structure(state)

    def act(*leaves: Array) -> tuple[Array, PyTree]:
        obs = jax.tree.map(lambda field: field.zeros(1), spec.obs, is_leaf=lambda x: hasattr(x, "zeros"))
        params = agent.actor(jax.tree.unflatten(tree, leaves))
        carry = fresh_carry(agent, spec, jnp.arange(1))
        output = agent.act(jax.random.split(jax.random.key(0), 1), params, carry, obs, jnp.ones(1, bool), True)
        # What a memory is for shows in later actions.
        return output.action, output.carry

    counted = jax.tree.map(
        lambda node: jax.tree.map(lambda x: not isinstance(node, RunningStats), node),
        state,
        is_leaf=lambda node: isinstance(node, RunningStats),
    )
    used = _used(act, leaves)
    floating = [jnp.issubdtype(x.dtype, jnp.floating) and x.ndim > 0 for x in leaves]
    chosen = [u and f and c for u, f, c in zip(used, floating, jax.tree.leaves(counted), strict=True)]
    if not any(chosen):
        raise ValueError(f"the actions of {agent.name} depend on no array of its State, so there is nothing to evolve.")
    return chosen


def _used(function: Callable[..., Any], arguments: list[Any]) -> list[bool]:
    """Say for each argument whether the result depends on it: a walk backwards over the traced operations."""
    jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
    needed = {id(x) for x in jaxpr.outvars}
    for equation in reversed(jaxpr.eqns):
        if any(id(x) in needed for x in equation.outvars):
            needed |= {id(x) for x in equation.invars}
    return [id(x) in needed for x in jaxpr.invars]
