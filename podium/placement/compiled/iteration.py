"""One iteration as pure functions: how a run starts, which lanes it has, its shapes and bytes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from podium import keys
from podium.agent import Plan, planned
from podium.film import stacks_of
from podium.learn import (
    Prepared,
    choose_lanes,
    gradient,
    num_gradients,
    num_updates,
    plan_divides,
    prepare,
    why_not_divides,
)
from podium.placement.contract import Acting, RunState, Sizes
from podium.report import nbytes
from podium.rollout import zeros
from podium.types import Key, PyTree


def start(key: Key, acting: Acting, sizes: Sizes, with_replay: bool = True, with_envs: bool = True) -> RunState:
    """Return the first state of one seed; its replay, and where its environments stand, may be no part of it."""
    roots = keys.roots(key)
    state = acting.agent.init(roots.agent, acting.spec)
    replay = empty_replay(acting, sizes) if with_replay else ()
    rollout = acting.begin(roots.env, jnp.arange(sizes.num_envs)) if with_envs else ()
    return RunState(roots.run, jnp.zeros((), jnp.int32), state, replay, rollout)


def empty_replay(acting: Acting, sizes: Sizes) -> PyTree:
    """Return the agent's replay with nothing in it, or `()`."""
    return () if acting.agent.replay is None else replay_of(acting, sizes, plan_shapes(acting, 1, 1))


def replay_of(acting: Acting, sizes: Sizes, plan: Plan) -> PyTree:
    """Return the agent's replay with nothing in it, for the data of such plans; shapes will do."""
    replay = acting.agent.replay
    assert replay is not None
    item = jax.tree.map(lambda x: jnp.zeros(x.shape[2:], x.dtype), plan.data)
    stacks = {"stacks": stacks_of(acting.spec.obs, item.obs)} if replay.keeps_frames else {}
    return replay.init(item, sizes.num_envs, sizes.num_lanes, sizes.rollout_length, **stacks)


def plan_shapes(acting: Acting, length: int, num_envs: int) -> Plan:
    """Return the shapes of what the agent plans for a rollout of so many steps and environments."""

    def plan(key: Key) -> Plan:
        trajectory = zeros(acting.shapes(length, num_envs)).trajectory()
        return planned(acting.agent, key, acting.agent.init(key, acting.spec), trajectory)

    return jax.eval_shape(plan, jax.random.key(0))


def resolve_lanes(
    acting: Acting, num_envs: int, rollout_length: int, num_devices: int = 1, requested: int | None = None
) -> int:
    """Choose the lanes for these sizes; see `podium.learn.choose_lanes`."""
    agent, plan = acting.agent, plan_shapes(acting, rollout_length, num_envs)
    if agent.replay is not None:
        num_updates(agent.replay, plan)  # Refuses a number that is not whole.
    return choose_lanes(
        num_envs,
        num_devices,
        requested,
        divides=lambda lanes: plan_divides(agent, plan, lanes),
        refusal=lambda name, lanes: why_not_divides(agent, plan, name, lanes),
    )


def prepared_shapes(acting: Acting, sizes: Sizes, state: PyTree, replay: PyTree) -> Any:
    """Return the shapes of what an update's gradients, of one seed, are taken from; shapes will do for the states."""

    def begin(key: Key, state: PyTree, replay: PyTree) -> Prepared:
        trajectory = zeros(acting.shapes(sizes.rollout_length, sizes.num_envs)).trajectory()
        return prepare(key, acting.agent, state, replay, trajectory, sizes.num_lanes)

    return jax.eval_shape(begin, jax.random.key(0), state, replay)


def gradient_bytes(acting: Acting, sizes: Sizes, state: PyTree, replay: PyTree) -> int:
    """Return the bytes of all gradients of an update, of one seed; shapes will do for `state` and `replay`."""
    agent, prepared = acting.agent, prepared_shapes(acting, sizes, state, replay)
    grads = jax.eval_shape(lambda state, prepared: gradient(agent, state, prepared, 0).grads, state, prepared)
    return nbytes(grads) * num_gradients(agent, prepared)
