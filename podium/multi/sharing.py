"""Sharing: any agent acts and learns for all N of an environment, with one policy.

To the agent the N of each environment are so many environments more: [B, N, ...] is folded to [B * N, ...], those of an
environment side by side, so that a lane or a device which holds whole environments holds all of their agents. An
episode ends for all of them at once; one that is dead before is no transition (`valid`), and the step that it died in
terminated for it: nothing that comes is its gain. An environment that pays the dead with their team leaves them valid,
with one legal action, as SMAX does.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podium.agent import ActOutput, Agent, Plan, Replay, Transform, check_is_agent, parts_of
from podium.ranges import check_positive
from podium.replay.ring import terminate
from podium.types import Array, ArraySpec, DiscreteSpec, EnvSpec, Key, PyTree, Trajectory, is_spec


def shared(agent: Agent, num_agents: int | None = None) -> Agent:
    """Return an agent that acts for all agents of an environment (parameter sharing; Gupta et al. 2017).

    Every one of them draws from a key of its own, remembers for itself, and is learnt from as an environment of its own
    would be. What they know of each other is for the observations to say. The agent's own counters, such as those of
    schedules, count steps of agents: N in one of the environment. A replay holds steps of agents likewise.

    Args:
      agent: for one, in an environment of one.
      num_agents: N; None takes what the environment says, but for an agent with a replay, which must know it before.

    Returns:
      an `Agent` for environments with `EnvSpec.num_agents`; its State and parameters are those of `agent`.

    Raises:
      ValueError: the agent normalises rewards by sums of an environment's, acts for several already, or has a replay
        and `num_agents` is None; from `init`, the environment has one agent, or another number of them.
    """
    if num_agents is not None:
        check_positive(num_agents=num_agents)
    check_is_agent(agent)
    if agent.reward_discount is not None:
        raise ValueError(
            f"{agent.name} keeps one discounted sum of rewards an environment (normalize_reward=True), and agents that "
            "act together have one each; leave it out."
        )
    if agent.multi_agent:
        raise ValueError(f"{agent.name} acts for several agents already; use it as it is.")
    if agent.settings is not None:
        raise ValueError("share the agent first, and vary its numbers then, as podium.sweep and podium.Population do.")
    replay = agent.replay
    if replay is not None and num_agents is None:
        raise ValueError(
            f"{agent.name} has a replay, which holds steps of agents and must know how many there are; give num_agents."
        )

    def init(key: Key, spec: EnvSpec) -> PyTree:
        if num_agents not in (None, spec.num_agents):
            raise ValueError(f"num_agents={num_agents}, but {spec.name} has {spec.num_agents}; use that.")
        return agent.init(key, spec_of_one(spec))

    def carry(spec: EnvSpec, num_envs: int) -> PyTree:
        number = number_of(spec)
        return unfold(agent.carry(spec_of_one(spec), num_envs * number), 0, number)

    def number_them(carry: PyTree, index: Array) -> PyTree:
        assert agent.number is not None
        number = jax.tree.leaves(carry)[0].shape[1]
        numbers = index[:, None] * number + jnp.arange(number)
        return unfold(agent.number(fold(carry, 0), numbers.reshape(-1)), 0, number)

    def act(keys: Key, params: PyTree, carry: PyTree, obs: PyTree, first: Array, greedy: bool) -> ActOutput:
        number = jax.tree.leaves(obs)[0].shape[1]
        each = jax.vmap(lambda key: jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.arange(number)))(keys)
        folded = fold((each, carry, obs), 0)
        output = agent.act(folded[0], params, folded[1], folded[2], jnp.repeat(first, number), greedy)
        return unfold(output, 0, number)

    def plan(key: Key, state: PyTree, trajectory: Trajectory) -> Plan:
        return agent.plan(key, state, _of_all(trajectory))

    def observe(state: PyTree, trajectory: Trajectory) -> PyTree:
        return agent.observe(state, _of_all(trajectory))

    if replay is not None and num_agents is not None:
        replay = _of_agents(replay, num_agents)
    return agent._replace(
        init=init,
        carry=carry,
        act=act,
        plan=plan,
        observe=observe,
        replay=replay,
        number=number_them if agent.number else None,
        multi_agent=True,
        make=None if agent.make is None else functools.partial(_made, agent.make, num_agents),
        brought=parts_of(agent),
        transforms=(*agent.transforms, Transform("shared", {"num_agents": num_agents})),
    )


def spec_of_one(spec: EnvSpec) -> EnvSpec:
    """Return what an environment of agents that act together is to each of them.

    Raises:
      ValueError: it has one agent, or the bounds of what agents do differ from agent to agent.
    """
    number = number_of(spec)
    if isinstance(spec.action, ArraySpec) and tuple(spec.action.shape[:1]) == (number,):
        for name in ("low", "high"):
            bound = np.broadcast_to(getattr(spec.action, name), spec.action.shape)
            if not np.array_equal(bound, np.broadcast_to(bound[:1], bound.shape)):
                raise ValueError(
                    f"agents of {spec.name} act between different bounds ({name}={bound.tolist()}), and one policy for "
                    "all knows one; scale actions to the same, such as [-1, 1], or use podium.multi.groups."
                )

    def one(leaf: ArraySpec | DiscreteSpec) -> ArraySpec | DiscreteSpec:
        if tuple(leaf.shape[:1]) != (number,):
            raise ValueError(
                f"{spec.name} has num_agents={number}, but an array of shape {list(leaf.shape)}; every array of "
                "observations and actions needs an axis of agents in front."
            )
        if isinstance(leaf, DiscreteSpec):
            return dataclasses.replace(leaf, shape=leaf.shape[1:])
        bounds = {name: _bound_of_one(getattr(leaf, name), leaf.shape) for name in ("low", "high")}
        return dataclasses.replace(leaf, shape=tuple(leaf.shape[1:]), **bounds)

    obs, action = jax.tree.map(one, (spec.obs, spec.action), is_leaf=is_spec)
    return dataclasses.replace(spec, obs=obs, action=action, num_agents=None)


def _bound_of_one(bound: Any, shape: tuple[int, ...]) -> Any:
    return bound[0] if jnp.ndim(bound) == len(shape) else bound


def number_of(spec: EnvSpec) -> int:
    """Return how many agents act together.

    Raises:
      ValueError: one acts alone.
    """
    if spec.num_agents is None:
        raise ValueError(f"{spec.name} has one agent, and nothing to share; use the agent itself.")
    return spec.num_agents


def _of_all(trajectory: Trajectory) -> Trajectory:
    """Return [T, B * N, ...]: what happened to each agent."""
    number = trajectory.reward.shape[2]
    rows, by_env = functools.partial(fold, axis=1), functools.partial(fold, axis=0)
    repeat: Any = lambda x, axis=1: None if x is None else jnp.repeat(x, number, axis=axis)
    valid, terminated = trajectory.valid, repeat(trajectory.terminated)
    if valid is not None and valid.ndim == 3:
        # To who dies within an episode nothing is worth anything afterwards. (Of the last row that is not known yet; a
        # replay is told when the next rollout is added.)
        dies = valid[:-1] & ~valid[1:] & ~trajectory.last[:-1, :, None]
        terminated = terminated | rows(jnp.concatenate([dies, jnp.zeros_like(valid[:1])]))
    return trajectory._replace(
        obs=rows(trajectory.obs),
        action=rows(trajectory.action),
        reward=rows(trajectory.reward),
        terminated=terminated,
        truncated=repeat(trajectory.truncated),
        next_obs=rows(trajectory.next_obs),
        first=repeat(trajectory.first),
        extras=rows(trajectory.extras),
        carry=by_env(trajectory.carry),
        end_carry=by_env(trajectory.end_carry),
        valid=rows(valid) if valid is not None and valid.ndim == 3 else repeat(valid),
        gap=repeat(trajectory.gap, 0),
        turn=repeat(trajectory.turn),
    )


def _of_agents(replay: Replay, number: int) -> Replay:
    """Return a replay of the steps of all agents, in the lanes of their environments."""

    def init(item: PyTree, num_envs: int, num_lanes: int, rollout_length: int, **more: PyTree) -> PyTree:
        return replay.init(item, num_envs * number, num_lanes, rollout_length, **more)

    def add(state: PyTree, items: PyTree) -> PyTree:
        valid = getattr(items, "valid", None)
        return replay.add(state if valid is None else terminate(state, ~valid[0]), items)

    def cut(state: PyTree, gap: Array) -> PyTree:
        assert replay.cut is not None
        return replay.cut(state, jnp.repeat(gap, number))

    return replay._replace(init=init, add=add, cut=cut if replay.cut else None)


def _made(make: Callable[[Any], Agent], num_agents: int | None, config: Any) -> Agent:
    return shared(make(config), num_agents)


def fold(tree: PyTree, axis: int) -> PyTree:
    """Merge the axis of environments with that of agents behind it."""
    return jax.tree.map(lambda x: x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :]), tree)


def unfold(tree: PyTree, axis: int, number: int) -> PyTree:
    """Undo `fold`."""
    return jax.tree.map(lambda x: x.reshape(*x.shape[:axis], -1, number, *x.shape[axis + 1 :]), tree)
