"""Groups of agents that act together, each with an agent, and parameters, of its own.

To the agent of a group its members are all that act: they are its environments' axis of agents, as `shared` has it,
and the others belong to the environment. State, parameters, memory, extras, plans and gradients are dictionaries by
group; every gradient step is one of each group, and their losses add up.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podium.agent import ActOutput, Agent, Aux, Plan, Transform, policy_leaves
from podium.env import Env
from podium.multi import replays
from podium.multi.sharing import fold, number_of, shared, unfold
from podium.ranges import check_positive
from podium.types import Array, ArraySpec, DiscreteSpec, EnvSpec, Key, Metrics, PyTree, TimeStep, Trajectory, is_spec


class _Group(NamedTuple):
    """An agent for all of a group at once, and the group: which of an environment's agents, in their order."""

    name: str
    agent: Agent
    members: tuple[int, ...]

    def take(self, tree: PyTree, axis: int) -> PyTree:
        """Return what is the group's of arrays with an axis of all agents."""
        return jax.tree.map(lambda x: take(x, self.members, axis), tree)

    def spec(self, spec: EnvSpec) -> EnvSpec:
        """Return what the environment is to the group."""
        sub = functools.partial(_spec_of, self.members)
        obs, action = jax.tree.map(sub, (spec.obs, spec.action), is_leaf=is_spec)
        return dataclasses.replace(spec, obs=obs, action=action, num_agents=len(self.members))

    def trajectory(self, trajectory: Trajectory) -> Trajectory:
        """Return what happened to the group."""
        valid = trajectory.valid
        return trajectory._replace(
            obs=self.take(trajectory.obs, 2),
            action=self.take(trajectory.action, 2),
            reward=self.take(trajectory.reward, 2),
            next_obs=self.take(trajectory.next_obs, 2),
            valid=valid if valid is None or valid.ndim == 2 else self.take(valid, 2),
            extras=trajectory.extras[self.name],
            carry=trajectory.carry[self.name],
            end_carry=trajectory.end_carry[self.name],
        )


class _Steps(NamedTuple):
    """Of a joint plan the data of a group that learns from steps, [T, B, K, ...]: K rows an environment and step."""

    data: PyTree


class _Sequences(NamedTuple):
    """As `_Steps`, of a group that learns from sequences."""

    data: PyTree


def groups(
    agents: Mapping[str, tuple[Agent, Iterable[int]]], rollout_length: int | None = None, name: str = "groups"
) -> Agent:
    """Return an agent in which groups of agents that act together learn apart, each by an agent of its own.

        groups({"taggers": (mappo.make(), range(2)), "runners": (ppo.make(), range(2, 10))})

    An agent for one is shared by its group, as `podium.multi.shared` does; one that acts for several (`mappo`, `vdn`)
    acts for the group. Their metrics are `taggers/policy_loss` and so on, `loss` is the sum of their losses, and
    returns stay means over all agents (`returns_of` tells one group's). Every gradient step takes one of each group, so
    all learn from a replay or none does, and they learn equally often: on-policy agents of the same `num_epochs` and
    `num_minibatches`, agents with a replay of the same `num_updates`, or the same by `samples_per_insert` or
    `updates_per_step`. Where one group learns from sequences, the steps of the others are shuffled by whole
    environments too. `target_kl` of one ends an iteration for all. A replay keeps stacks of frames as they are.

    Args:
      agents: by name of the group the agent, and which of the environment's agents, 0 to N - 1, are in the group, in
        any order; every one in one group.
      rollout_length: T where the user names none; None takes the agents' own, which must agree.
      name: for run folders and messages.

    Returns:
      an `Agent` for environments with `EnvSpec.num_agents`; its State and parameters are dictionaries by group.

    Raises:
      ValueError: agents that are in no group, in several, or no numbers; agents that cannot learn together, or have
        settings or sums of rewards; from `init`, an environment with another number of agents; from `plan`, which every
        placement traces before it compiles, different numbers of epochs or minibatches.
    """
    members = _check_members(agents)
    given = {group: agent for group, (agent, _) in agents.items()}
    made = [_grouped(group, agent, members[group]) for group, (agent, _) in agents.items()]
    total = sum(len(group.members) for group in made)
    together = [index for group in made for index in group.members]
    places = np.argsort(together)
    replay = _joint_replay(made, agents)

    def specs(spec: EnvSpec) -> list[EnvSpec]:
        if number_of(spec) != total:
            raise ValueError(
                f"{name} has agents 0 to {total - 1} in its groups, but {spec.name} has {spec.num_agents}; every one "
                "needs a group."
            )
        return [group.spec(spec) for group in made]

    def init(key: Key, spec: EnvSpec) -> PyTree:
        parts = zip(made, specs(spec), strict=True)
        return {group.name: group.agent.init(jax.random.fold_in(key, i), each) for i, (group, each) in enumerate(parts)}

    def actor(state: PyTree) -> PyTree:
        return {group.name: group.agent.actor(state[group.name]) for group in made}

    def carry(spec: EnvSpec, num_envs: int) -> PyTree:
        parts = zip(made, specs(spec), strict=True)
        return {group.name: group.agent.carry(each, num_envs) for group, each in parts}

    def number(carry: PyTree, index: Array) -> PyTree:
        told = lambda group, memory: group.agent.number(memory, index) if group.agent.number else memory
        return {group.name: told(group, carry[group.name]) for group in made}

    def act(keys: Key, params: PyTree, carry: PyTree, obs: PyTree, first: Array, greedy: bool) -> ActOutput:
        outputs = {}
        for i, group in enumerate(made):
            own_keys = jax.vmap(lambda key, i=i: jax.random.fold_in(key, i))(keys)
            own = params[group.name], carry[group.name], group.take(obs, 1)
            outputs[group.name] = group.agent.act(own_keys, *own, first, greedy)
        action = jnp.concatenate([output.action for output in outputs.values()], axis=1)
        return ActOutput(
            take(action, tuple(places.tolist()), 1),
            {name: output.carry for name, output in outputs.items()},
            {name: output.extras for name, output in outputs.items()},
        )

    def plan(key: Key, state: PyTree, trajectory: Trajectory) -> Plan:
        plans = {}
        for i, group in enumerate(made):
            own = state[group.name], group.trajectory(trajectory)
            plans[group.name] = group.agent.plan(jax.random.fold_in(key, i), *own)
        return _joint_plan(plans, trajectory.reward.shape[1], replay is not None)

    def statistics(minibatch: PyTree) -> PyTree:
        known = [group for group in made if group.agent.statistics]
        return {group.name: group.agent.statistics(_own(minibatch, group.name)) for group in known}  # type: ignore[misc]

    has_statistics = any(group.agent.statistics for group in made)

    def grad(key: Key, state: PyTree, given: PyTree) -> tuple[PyTree, Aux]:
        minibatch, known = given if has_statistics else (given, {})
        grads, metrics, priorities = {}, {}, []
        for i, group in enumerate(made):
            own = minibatch[group.name] if replay else _own(minibatch, group.name)
            if group.agent.statistics:
                own = own, known[group.name]
            grads[group.name], aux = group.agent.grad(jax.random.fold_in(key, i), state[group.name], own)
            metrics[group.name] = aux.metrics
            if group.agent.replay:
                ranks = jnp.zeros(group.agent.replay.batch_size) if aux.priorities is None else aux.priorities
                priorities.append(ranks)
        return grads, Aux(_joint_metrics(metrics), jnp.concatenate(priorities) if replay else None)

    def apply(state: PyTree, grads: PyTree) -> PyTree:
        return {group.name: group.agent.apply(state[group.name], grads[group.name]) for group in made}

    def observe(state: PyTree, trajectory: Trajectory) -> PyTree:
        return {group.name: group.agent.observe(state[group.name], group.trajectory(trajectory)) for group in made}

    def policy_mask(state: PyTree) -> PyTree:
        def of(group: _Group) -> PyTree:
            own = state[group.name]
            structure: Any = jax.tree.structure(own)
            return structure.unflatten(policy_leaves(group.agent, own))

        return {group.name: of(group) for group in made}

    def stops(metrics: Metrics) -> Array:
        ends = [
            group.agent.stops({of: x for (whose, _, of), x in _parted(metrics) if whose == group.name})
            for group in made
            if group.agent.stops
        ]
        return functools.reduce(operator.or_, ends)

    functions = init, actor, carry, act, plan, grad, apply, observe
    return Agent(
        *functions,
        replay=replay,
        rollout_length=_rollout_length(made, rollout_length),
        name=name,
        number=number if any(group.agent.number for group in made) else None,
        statistics=statistics if has_statistics else None,
        policy_mask=policy_mask,
        stops=stops if any(group.agent.stops for group in made) else None,
        multi_agent=True,
        transforms=(Transform("groups", {"members": members, "rollout_length": rollout_length}, given),),
    )


def returns_of(env: Env, members: Iterable[int]) -> Env:
    """Return an environment whose returns are the means of some of the agents that act together.

    What each is paid, and so what is learnt, stays the same: training in it reports these returns, and evaluating in it
    measures them.

    Args:
      env: of N agents.
      members: who counts, 0 to N - 1.

    Raises:
      ValueError: for an environment of one agent, or members that it has not.
    """
    counted, number = _integers("members", members), number_of(env.spec)
    if max(counted) >= number:
        raise ValueError(f"members={list(counted)}, but {env.spec.name} has agents 0 to {number - 1}.")

    def told(timestep: TimeStep) -> TimeStep:
        paid = timestep.info.get("raw_reward", timestep.reward)
        return timestep._replace(info={**timestep.info, "raw_reward": take(paid, counted, -1)})

    def reset(key: Key) -> tuple[PyTree, TimeStep]:
        state, timestep = env.reset(key)
        return state, told(timestep)

    def step(key: Key, state: PyTree, action: Array) -> tuple[PyTree, TimeStep]:
        state, timestep = env.step(key, state, action)
        return state, told(timestep)

    played = None if env.evaluation is None else returns_of(env.evaluation, counted)
    return env._replace(reset=reset, step=step, evaluation=played)


def take(x: Array, members: tuple[int, ...], axis: int) -> Array:
    """Return what is of some agents; where those are neighbours nothing is gathered."""
    axis = axis % x.ndim
    begin, end = members[0], members[-1] + 1
    if members == tuple(range(begin, end)):
        return x if end - begin == x.shape[axis] else jax.lax.slice_in_dim(x, begin, end, axis=axis)
    return jnp.take(x, np.array(members), axis=axis, mode="clip")


def _check_members(agents: Mapping[str, tuple[Agent, Iterable[int]]]) -> dict[str, tuple[int, ...]]:
    """Return who is in each group; every agent is in one."""
    if not isinstance(agents, Mapping) or not agents:
        raise ValueError(f"agents={agents!r} must be a dict of groups, one or more: name -> (agent, members).")
    members: dict[str, tuple[int, ...]] = {}
    whose: dict[int, str] = {}
    for name, group in agents.items():
        if not isinstance(name, str) or not name or "/" in name:
            raise ValueError(
                f"{name!r} is no name of a group; use a word without '/', which stands before its metrics."
            )
        if not isinstance(group, tuple) or len(group) != 2 or not isinstance(group[0], Agent):
            raise ValueError(f"group {name!r} is {group!r}; it must be (podium.Agent, members).")
        members[name] = _integers(f"members of group {name!r}", group[1])
        for index in members[name]:
            if index in whose:
                raise ValueError(
                    f"Agent {index} is in group {whose[index]!r} and in {name!r}; put it into one of them."
                )
            whose[index] = name
    missing = sorted(set(range(max(whose) + 1)) - set(whose))
    if missing:
        raise ValueError(f"Agents {missing} are in no group; every one of 0 to {max(whose)} needs one.")
    return members


def _integers(what: str, numbers: Iterable[int]) -> tuple[int, ...]:
    try:
        listed = tuple(numbers)
        found = tuple(operator.index(number) for number in listed)
    except TypeError:
        raise ValueError(f"{what}: {numbers!r} must be numbers of agents, such as range(2).") from None
    if not found or min(found) < 0 or len(set(found)) < len(found) or any(isinstance(x, bool) for x in listed):
        raise ValueError(f"{what}: {list(listed)} must be different numbers of agents, 0 or more, and one at least.")
    return found


def _grouped(name: str, agent: Agent, members: tuple[int, ...]) -> _Group:
    try:
        if agent.settings is not None:
            raise ValueError(f"{agent.name} has several settings, and a group has one agent; give one of them.")
        return _Group(name, agent if agent.multi_agent else shared(agent, len(members)), members)
    except ValueError as error:
        raise ValueError(f"group {name!r}: {error}") from None


def _joint_replay(made: list[_Group], agents: Mapping[str, tuple[Agent, Iterable[int]]]) -> Any:
    """Return one replay of all groups, or None."""
    having = [group.name for group in made if group.agent.replay is not None]
    if not having:
        return None
    if len(having) < len(made):
        without = next(group for group in made if group.agent.replay is None)
        with_one = next(group for group in made if group.agent.replay is not None)
        raise ValueError(
            f"group {with_one.name!r} ({with_one.agent.name}) learns from a replay and {without.name!r} "
            f"({without.agent.name}) from rollouts, whose gradient steps are not taken together; use agents with a "
            "replay for all groups, or for none."
        )
    parts = []
    for group in made:
        assert group.agent.replay is not None
        known = None if agents[group.name][0].multi_agent else len(group.members)
        parts.append(replays.Part(group.name, group.agent.replay, known))
    return replays.joint(parts)


def _rollout_length(made: list[_Group], asked: int | None) -> int:
    if asked is not None:
        check_positive(rollout_length=asked)
        return asked
    lengths = {group.name: group.agent.rollout_length for group in made}
    if len(set(lengths.values())) > 1:
        words = ", ".join(f"{name!r} of {length} steps" for name, length in lengths.items())
        raise ValueError(
            f"groups learn from the same rollouts, and these ask for others: {words}; give rollout_length."
        )
    return made[0].agent.rollout_length


def _joint_plan(plans: dict[str, Plan], num_envs: int, replayed: bool) -> Plan:
    """Return one plan of data [T, B, K, ...] by group."""
    for field in ("num_epochs", "num_minibatches"):
        found = {name: getattr(plan, field) for name, plan in plans.items()}
        if not replayed and len(set(found.values())) > 1:
            words = ", ".join(f"{number} in group {name!r}" for name, number in found.items())
            raise ValueError(f"{field} is {words}; groups learn minibatch by minibatch together: use one number.")
    rows = lambda tree, axis: jax.tree.map(lambda x: unfold(x, axis, x.shape[axis] // num_envs), tree)
    data = {name: rows(plan.data, 1) for name, plan in plans.items()}
    first = next(iter(plans.values()))
    if replayed:
        return Plan(data)
    wraps = {name: _Steps if plan.unit == "step" else _Sequences for name, plan in plans.items()}
    return Plan(
        {name: wraps[name](each) for name, each in data.items()},
        {name: rows(plan.per_env, 0) for name, plan in plans.items()},
        first.num_epochs,
        first.num_minibatches,
        "step" if all(plan.unit == "step" for plan in plans.values()) else "sequence",
    )


def _own(minibatch: PyTree, name: str) -> PyTree:
    """Return the part of a joint minibatch that a group learns from, in the unit of its own plan."""
    if isinstance(minibatch, dict):  # Of steps: [n, K, ...].
        return fold(minibatch[name].data, 0)
    data, per_env = minibatch  # Of sequences: [T, n, K, ...], [n, K, ...].
    rows = fold(data[name].data, 1)
    return fold(rows, 0) if isinstance(data[name], _Steps) else (rows, fold(per_env[name], 0))


def _joint_metrics(metrics: dict[str, Metrics]) -> Metrics:
    found = {f"{name}/{of}": x for name, own in metrics.items() for of, x in own.items()}
    if all("loss" in own for own in metrics.values()):
        found["loss"] = functools.reduce(operator.add, [own["loss"] for own in metrics.values()])
    return found


def _parted(metrics: Metrics) -> list[tuple[tuple[str, str, str], Array]]:
    return [(name.partition("/"), x) for name, x in metrics.items()]


def _spec_of(members: tuple[int, ...], leaf: ArraySpec | DiscreteSpec) -> ArraySpec | DiscreteSpec:
    shape = (len(members), *leaf.shape[1:])
    if isinstance(leaf, DiscreteSpec):
        return dataclasses.replace(leaf, shape=shape)
    of = lambda bound: np.asarray(bound)[list(members)] if np.ndim(bound) == len(leaf.shape) else bound
    return dataclasses.replace(leaf, shape=shape, low=of(leaf.low), high=of(leaf.high))
