"""Evolution: perturb the policy and ask only for returns.

Salimans et al. 2017, "Evolution Strategies as a Scalable Alternative to Reinforcement Learning". In a generation every
member of the population plays with the parameters plus noise of its own; the noise, weighed by how the members ranked,
is the direction of the step. Noise is drawn again from its seed wherever it is needed, on every device, so only the
members' returns cross devices. Of the agent `init`, `actor`, `carry` and `act` are used.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from podium import keys
from podium.agent import Agent, fresh_carry, nearest_multiples
from podium.env import Env
from podium.evaluate import make_evaluator
from podium.host import HostEnvs
from podium.ops.statistics import RunningStats
from podium.placement import program
from podium.placement.devices import Devices, resolve_devices
from podium.placement.explanation import NEVER, Explanation
from podium.placement.fused import FusedProgram
from podium.placement.program import Sizes
from podium.placement.table import Move, Role, device_name
from podium.types import Array, Key, Metrics, PyTree

BLOCK_BYTES = 1 << 22
"""Parameters that a CPU core works on at once: what its cache holds."""


@dataclasses.dataclass(frozen=True)
class Evolution:
    """Train by evolution: `num_envs` members (times `episodes`) play whole episodes, at most `rollout_length` steps.

    Members come in pairs with opposite noise, and the two of a pair meet the same resets. Returns are those reported
    (before clipping or scaling of rewards), of greedy play, and count by their rank alone, ties by their mean rank.
    A generation counts as `num_envs * rollout_length` environment steps, though episodes that end early are not played
    on; the steps that were are the metric `valid_steps`.

    What is perturbed is every parameter that the action depends on. Normalisers stay as they begin, for nothing but
    acting is used; the critic, where there is one, is not trained.

    Args:
      sigma: deviation of the noise.
      learning_rate: of Adam, which follows the estimated gradient.
      weight_decay: towards zero, of the parameters, beside the estimate.
      episodes: that each member plays in a generation; its return is their mean.
      members_at_once: of a device; None for all on an accelerator, and on a CPU for as many as its cache holds.
      devices: a number (of each process, where there are several), a sequence of devices, or None for all there are.
    """

    whole_episodes: ClassVar[bool] = True
    """`rollout_length` bounds an episode here, so the environment's own limit is what is usual."""

    sigma: float = 0.05
    learning_rate: float = 0.02
    weight_decay: float = 0.0
    episodes: int = 1
    members_at_once: int | None = None
    devices: Devices = None

    def build(
        self,
        agent: Agent,
        env: Env | HostEnvs,
        *,
        num_envs: int,
        rollout_length: int,
        seeds: int = 1,
        num_lanes: int | None = None,
        max_updates: int = 1,
    ) -> EvolutionProgram:
        """Check every size and return the program; see `Placement.build`. Nothing is shuffled, in no lanes."""
        program.check_sizes(num_envs, rollout_length, seeds, max_updates)
        self._check()
        program.check_one_seed("Evolution", seeds)
        env = program.require_pure(env)
        devices = resolve_devices(self.devices)
        unit = 2 * self.episodes * len(devices)
        if num_envs % unit:
            raise ValueError(
                f"num_envs={num_envs} is not divisible by {unit}, two members of a pair times episodes={self.episodes} "
                f"times devices={len(devices)}; use {nearest_multiples(num_envs, unit)}."
            )
        return EvolutionProgram(self, agent, env, Sizes(num_envs, rollout_length, 1, 1), devices, max_updates)

    def explain(self) -> Explanation:
        """Say in a table and a drawing who runs where and what moves; `EvolutionProgram.explain` knows the numbers."""
        devices = resolve_devices(self.devices)
        return _explain(devices, ["its share of the population"] * len(devices), "4 * members")

    def _check(self) -> None:
        for name in ("sigma", "learning_rate"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(
                    f"{name}={value!r} must be finite and greater than 0; {getattr(Evolution, name)} is usual."
                )
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay={self.weight_decay!r} must be finite and 0 or more; use 0 for none.")
        program.check_positive(episodes=self.episodes)
        if self.members_at_once is not None:
            program.check_positive(members_at_once=self.members_at_once)


def _explain(devices: list[jax.Device], shares: list[str], returns: int | str) -> Explanation:
    roles = [Role("everything", device_name(device), share) for device, share in zip(devices, shares, strict=True)]
    moves = [Move("returns", "from all to all", returns)] if len(devices) > 1 else []
    title = "Evolution: members with noise in their parameters play; every device draws all noise again, and learns."
    waits = "every generation for the longest episode of the one before it, on every device."
    return Explanation(title, roles, moves, stale=NEVER, waits=waits)


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


class EvolutionProgram(FusedProgram):
    """The program for one agent, one environment and one set of sizes; a `Program`."""

    def __init__(
        self,
        placement: Evolution,
        agent: Agent,
        env: Env,
        sizes: Sizes,
        devices: list[jax.Device],
        max_updates: int,
    ):
        self.placement, self.members = placement, sizes.num_envs // placement.episodes
        shapes = jax.eval_shape(lambda key: agent.init(key, env.spec), jax.random.key(0))
        self._perturbed = perturbed(agent, env, shapes)
        self._size = sum(x.size for x, chosen in zip(jax.tree.leaves(shapes), self._perturbed, strict=True) if chosen)
        self._block = _block(placement, self._size, self.members // len(devices), devices[0])
        self._optimizer = optax.adam(placement.learning_rate)
        self._play = make_evaluator(agent, env, placement.episodes, sizes.rollout_length)
        super().__init__(agent, env, sizes, devices, "member", max_updates)

    def _start(self, key: Key) -> EvolutionState:
        roots = keys.roots(key)
        agent = self.agent.init(roots.agent, self.env.spec)
        return EvolutionState(roots.run, jnp.zeros((), jnp.int32), agent, self._optimizer.init(self._parameters(agent)))

    def _partition(self) -> EvolutionState:
        return jax.tree.map(lambda x: P(), jax.eval_shape(self._start, jax.random.key(0)))

    def _parameters(self, agent_state: PyTree) -> Array:
        """Return what noise is added to, as one vector [n]."""
        leaves = zip(jax.tree.leaves(agent_state), self._perturbed, strict=True)
        return jnp.concatenate([x.reshape(-1).astype(jnp.float32) for x, chosen in leaves if chosen])

    def _with_parameters(self, agent_state: PyTree, parameters: Array) -> PyTree:
        leaves, at = [], 0
        for x, chosen in zip(jax.tree.leaves(agent_state), self._perturbed, strict=True):
            leaves.append(parameters[at : at + x.size].reshape(x.shape).astype(x.dtype) if chosen else x)
            at += x.size if chosen else 0
        return jax.tree.unflatten(jax.tree.structure(agent_state), leaves)

    def _noise(self, key: Key, pair: Array) -> Array:
        """Return the noise [n] of a pair, the same on every device; the second of the pair has its opposite."""
        return jax.random.normal(jax.random.fold_in(key, pair), (self._size,))

    def _returns(self, noise_key: Key, play_key: Key, agent_state: PyTree, pairs: Array) -> tuple[Array, Array]:
        """Return what the pairs [N] gathered, [N, 2], and in how many steps."""
        parameters = self._parameters(agent_state)

        def play(pair: Array) -> tuple[Array, Array]:
            step = self.placement.sigma * self._noise(noise_key, pair)

            def member(sign: Array) -> dict[str, Array]:
                params = self.agent.actor(self._with_parameters(agent_state, parameters + sign * step))
                return self._play(jax.random.fold_in(play_key, pair), params)

            played = jax.vmap(member)(jnp.array([1.0, -1.0]))
            return played["eval_return"], played["eval_length"]

        blocks = pairs.reshape(-1, self._block)
        returns, lengths = jax.lax.map(jax.vmap(play), blocks)
        return returns.reshape(-1, 2), lengths.reshape(-1, 2)

    def _weighed(self, key: Key, weights: Array) -> Array:
        """Return the sum [n] of all pairs' noise, each times its weight [N], in blocks as they played."""

        def add(total: Array, block: tuple[Array, Array]) -> tuple[Array, None]:
            pairs, weight = block
            return total + weight @ jax.vmap(lambda pair: self._noise(key, pair))(pairs), None

        numbers = jnp.arange(weights.size).reshape(-1, self._block)
        return jax.lax.scan(add, jnp.zeros(self._size), (numbers, weights.reshape(numbers.shape)))[0]

    def _iterate(self, state: EvolutionState) -> tuple[EvolutionState, Metrics, Array]:
        noise_key, play_key = keys.iteration(state.key, state.update)
        number = self.members // 2 // len(self.devices)

        def generation(state: EvolutionState) -> tuple[EvolutionState, Metrics, Array]:
            pairs = jax.lax.axis_index("member") * number + jnp.arange(number)
            own, lengths = self._returns(noise_key, play_key, state.agent, pairs)
            # All that ever crosses devices: returns [members / 2, 2], and how many steps were played.
            returns = jax.lax.all_gather(own, "member", tiled=True)
            steps = jax.lax.psum(jnp.sum(lengths), "member") * self.placement.episodes
            ranks = centered_ranks(returns.reshape(-1)).reshape(returns.shape)
            parameters = self._parameters(state.agent)
            uphill = self._weighed(noise_key, ranks[:, 0] - ranks[:, 1]) / (self.members * self.placement.sigma)
            gradient = self.placement.weight_decay * parameters - uphill
            change, optimizer = self._optimizer.update(gradient, state.optimizer)
            agent = self._with_parameters(state.agent, parameters + change)
            episodes = jnp.float32(self.sizes.num_envs)
            metrics = {
                "episodes": episodes,
                "episode_return_sum": jnp.mean(returns) * episodes,
                "episode_length_sum": steps,
                "valid_steps": steps,
                "return_best": jnp.max(returns),
                "return_deviation": jnp.std(returns),
                "gradient_norm": jnp.linalg.norm(gradient),
            }
            finite = jnp.repeat(jnp.isfinite(returns).reshape(-1), self.placement.episodes)
            return EvolutionState(state.key, state.update + 1, agent, optimizer), metrics, finite

        everywhere: Any = P()
        return jax.shard_map(generation, mesh=self._mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False)(
            state
        )

    def explain(self) -> Explanation:
        """Say in a table and a drawing who runs where, and how many bytes move in a generation."""
        share = self.members // len(self.devices)
        shares = [f"members {i * share} to {(i + 1) * share - 1}" for i in range(len(self.devices))]
        return _explain(self.devices, shares, self.bytes_per_update()["returns"])

    def bytes_per_update(self) -> dict[str, int]:
        """Return what moves in a generation: every member's return."""
        return {"returns": 4 * self.members if len(self.devices) > 1 else 0}


def centered_ranks(returns: Array) -> Array:
    """Return the ranks of `returns` [N] scaled to -0.5 ... 0.5; equal ones share their mean rank, so luck decides none.

    >>> centered_ranks(jnp.array([3.0, 1.0, 3.0])).tolist()
    [0.25, -0.5, 0.25]
    """
    ordered = jnp.sort(returns)
    below, upto = (jnp.searchsorted(ordered, returns, side=side) for side in ("left", "right"))
    return (below + upto - 1) / (2 * (returns.size - 1)) - 0.5


def perturbed(agent: Agent, env: Env, state: PyTree) -> list[bool]:
    """Say for each leaf of the agent's State (shapes will do) whether evolution moves it.

    It moves a floating-point leaf that `agent.actor` hands on and greedy actions depend on, but no running statistics.

    Raises:
      ValueError: there is none.
    """
    leaves, tree = jax.tree.leaves(state), jax.tree.structure(state)

    def act(*leaves: Array) -> tuple[Array, PyTree]:
        obs = jax.tree.map(lambda spec: spec.zeros(1), env.spec.obs, is_leaf=lambda x: hasattr(x, "zeros"))
        params = agent.actor(jax.tree.unflatten(tree, leaves))
        carry = fresh_carry(agent, env.spec, jnp.arange(1))
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


def _block(placement: Evolution, size: int, members: int, device: jax.Device) -> int:
    """Return how many pairs play at once: a divisor of those of a device, `members` / 2."""
    wanted = placement.members_at_once
    if wanted is None:
        wanted = members if device.platform != "cpu" else max(2, BLOCK_BYTES // (4 * size))
    return max(n for n in range(1, members // 2 + 1) if members // 2 % n == 0 and (2 * n <= wanted or n == 1))
