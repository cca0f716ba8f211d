"""Fold an agent's plan, grad and apply over a trajectory: the one place that does, for every placement.

Shuffling is local. The batch of environments is cut into lanes, fixed groups of neighbours; a minibatch takes the same
number of steps from every lane, permuted inside it. A mesh holds whole lanes, so nothing but gradient sums
crosses devices; and because lanes are configuration, the mathematics does not depend on the number of devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from podium.agent import Agent, Plan, Replay, nearest_multiples
from podium.ops.shuffle import permute
from podium.types import Array, Key, Metrics, PyTree, Trajectory

DEFAULT_LANES = 8


class Learned(NamedTuple):
    """State after an iteration, the replay's state, and metrics averaged over its minibatches."""

    state: PyTree
    replay: PyTree
    metrics: Metrics


def to_lanes(x: Array, num_lanes: int) -> Array:
    """Return [T, B, ...] as [L, T * B / L, ...], each lane's steps in order of time."""
    time, batch = x.shape[:2]
    lanes = jnp.moveaxis(x.reshape(time, num_lanes, batch // num_lanes, *x.shape[2:]), 1, 0)
    return lanes.reshape(num_lanes, -1, *x.shape[2:])


def learn(
    key: Key,
    agent: Agent,
    state: PyTree,
    replay_state: PyTree,
    trajectory: Trajectory,
    num_lanes: int,
    fold: Callable[..., Any] = jax.lax.scan,
    once_ready: Callable[..., Any] | None = None,
) -> Learned:
    """Learn one iteration from a trajectory [T, B, ...].

    Args:
      key: of this iteration.
      agent: any.
      state: the agent's.
      replay_state: of `agent.replay`, or `()`.
      trajectory: of the whole batch.
      num_lanes: L, divides B.
      fold: how to repeat an update: `jax.lax.scan`, or `python_scan` to read along.
      once_ready: how to do nothing before a replay can be learnt from: None for `once_ready_compiled`, or
        `once_ready_python` to read along.

    Returns:
      the new states and the metrics.
    """
    plan_key, fold_key = jax.random.split(key)
    plan = agent.plan(plan_key, state, trajectory)
    if agent.replay is None:
        state, metrics = _learn_on_batch(fold_key, agent, state, plan, num_lanes, fold)
    else:
        replay_state = agent.replay.add(replay_state, plan.data)
        count = num_updates(agent.replay, plan)
        state, replay_state, metrics = _learn_from_replay(
            fold_key, agent, state, replay_state, count, fold, once_ready or once_ready_compiled
        )
    return Learned(agent.observe(state, trajectory), replay_state, metrics)


def _learn_on_batch(
    key: Key, agent: Agent, state: PyTree, plan: Plan, num_lanes: int, fold: Callable[..., Any]
) -> tuple[PyTree, Metrics]:
    gather, units = _gatherer(plan, num_lanes)
    size = units // plan.num_minibatches

    def update(state: PyTree, number: Array) -> tuple[PyTree, Metrics]:
        epoch, part = number // plan.num_minibatches, number % plan.num_minibatches
        epoch_key = jax.random.fold_in(key, epoch)
        chosen = None
        if plan.num_minibatches > 1:  # One minibatch is everything, in any order.
            lane_keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(epoch_key, jnp.arange(num_lanes))
            index = part * size + jnp.arange(size)
            chosen = jax.vmap(lambda lane_key: permute(lane_key, index, units))(lane_keys)
        grads, aux = agent.grad(jax.random.fold_in(epoch_key, num_lanes + part), state, gather(chosen))
        return agent.apply(state, grads), aux.metrics

    state, metrics = fold(update, state, jnp.arange(plan.num_epochs * plan.num_minibatches))
    return state, jax.tree.map(lambda x: jnp.mean(x, axis=0), metrics)


def _gatherer(plan: Plan, num_lanes: int) -> tuple[Callable[[Array | None], PyTree], int]:
    """Return a function from indices [L, n], or None for all, to a minibatch; and the number of units in a lane."""
    time, batch = jax.tree.leaves(plan.data)[0].shape[:2]

    def pick(lanes: Array, index: Array | None) -> Array:
        taken = lanes if index is None else jax.vmap(lambda lane, index: lane[index])(lanes, index)
        return taken.reshape(-1, *taken.shape[2:])

    if plan.unit == "step":
        lanes = jax.tree.map(lambda x: to_lanes(x, num_lanes), plan.data)

        def gather(index: Array | None) -> PyTree:
            return jax.tree.map(lambda x: pick(x, index), lanes)

        return gather, time * batch // num_lanes

    by_lane = lambda x: x.reshape(num_lanes, batch // num_lanes, *x.shape[1:])  # noqa: E731
    sequences = jax.tree.map(lambda x: by_lane(jnp.moveaxis(x, 1, 0)), plan.data)
    per_env = jax.tree.map(by_lane, plan.per_env)

    def gather_sequences(index: Array | None) -> PyTree:
        by_time = jax.tree.map(lambda x: jnp.moveaxis(pick(x, index), 0, 1), sequences)
        return by_time, jax.tree.map(lambda x: pick(x, index), per_env)

    return gather_sequences, batch // num_lanes


def first_minibatch(key: Key, plan: Plan) -> PyTree:
    """Return the first minibatch of a plan, in one lane."""
    gather, units = _gatherer(plan, 1)
    return gather(permute(key, jnp.arange(units // plan.num_minibatches), units)[None])


def _learn_from_replay(
    key: Key,
    agent: Agent,
    state: PyTree,
    replay_state: PyTree,
    count: int,
    fold: Callable[..., Any],
    once_ready: Callable[..., Any],
) -> tuple[PyTree, PyTree, Metrics]:
    replay = agent.replay
    assert replay is not None
    update_priorities = replay.update_priorities
    if update_priorities and not hasattr(replay_state, "priorities"):
        raise ValueError(
            f"{agent.name}'s replay has update_priorities, but its state, a {type(replay_state).__name__}, no field "
            "`priorities`, which alone that may change; keep there what it changes."
        )

    def ranked_by(priorities: PyTree) -> PyTree:
        return replay_state._replace(priorities=priorities) if update_priorities else replay_state

    # What is stored stays as it is while learning, so it is read; only priorities are carried along.
    def update(carry: tuple[PyTree, PyTree], number: Array) -> tuple[tuple[PyTree, PyTree], Metrics]:
        state, priorities = carry
        sample_key, grad_key = jax.random.split(jax.random.fold_in(key, number))
        minibatch, index = replay.sample(sample_key, ranked_by(priorities))
        grads, aux = agent.grad(grad_key, state, minibatch)
        if update_priorities:
            priorities = update_priorities(ranked_by(priorities), index, aux.priorities).priorities
        return (agent.apply(state, grads), priorities), aux.metrics

    def run(state: PyTree, priorities: PyTree) -> tuple[tuple[PyTree, PyTree], Metrics]:
        carry, metrics = fold(update, (state, priorities), jnp.arange(count))
        return carry, jax.tree.map(lambda x: jnp.mean(x, axis=0), metrics)

    def wait(state: PyTree, priorities: PyTree) -> tuple[tuple[PyTree, PyTree], Metrics]:
        # Metrics of updates that did not happen are NaN, which the host loop leaves out of averages.
        _, metrics = jax.eval_shape(run, state, priorities)
        return (state, priorities), jax.tree.map(lambda x: jnp.full(x.shape, jnp.nan, x.dtype), metrics)

    priorities = replay_state.priorities if update_priorities else ()
    ready = replay.can_sample(replay_state)
    (state, priorities), metrics = once_ready(ready, run, wait, state, priorities)
    return state, ranked_by(priorities), metrics


def once_ready_compiled(
    ready: Array, run: Callable[..., Any], wait: Callable[..., Any], state: PyTree, priorities: PyTree
) -> Any:
    """Return what `run(state, priorities)` returns if it is time, else what `wait` does."""
    if not jax.tree.leaves(priorities):
        return jax.lax.cond(ready, run, wait, state, priorities)
    # A loop of one round or none, for XLA writes in place what a loop carries; a branch that writes one minibatch's
    # priorities would copy all of them, 4 MB of a million, and that took as long as the rest of the iteration.
    begin = wait(state, priorities)
    return jax.lax.fori_loop(0, ready.astype(jnp.int32), lambda _, held: run(*held[0]), begin)


def once_ready_python(
    ready: Array, run: Callable[..., Any], wait: Callable[..., Any], state: PyTree, priorities: PyTree
) -> Any:
    """Do what `once_ready_compiled` does in Python, where nothing is compiled anew for every call."""
    return (run if ready else wait)(state, priorities)


def num_updates(replay: Replay, plan: Plan) -> int:
    """Return the minibatches to learn after inserting the data of `plan` (abstract will do), [T, B, ...].

    Raises:
      ValueError: `samples_per_insert` asks for a number that is not whole.
    """
    if replay.samples_per_insert is None:
        return replay.num_updates
    time, batch = jax.tree.leaves(plan.data)[0].shape[:2]
    ratio = replay.batch_size / (time * batch)
    exact = replay.samples_per_insert / ratio
    number = round(exact)
    if number < 1 or abs(exact - number) > 1e-6 * number:
        near = sorted({max(math.floor(exact), 1), math.ceil(exact)})
        use = " or ".join(f"{n * ratio:g}" for n in near)
        raise ValueError(
            f"samples_per_insert={replay.samples_per_insert:g} asks for {exact:g} minibatches of "
            f"batch_size={replay.batch_size} after each {time} x {batch} steps, and only whole ones are learnt; "
            f"use {use}, or another rollout_length."
        )
    return number


def python_scan(step: Callable[..., Any], carry: PyTree, inputs: PyTree) -> tuple[PyTree, PyTree]:
    """Do what `jax.lax.scan` does, as a Python loop: slow, readable, and steppable in a debugger."""
    outputs = []
    for i in range(jax.tree.leaves(inputs)[0].shape[0]):
        carry, output = step(carry, jax.tree.map(lambda x, i=i: x[i], inputs))
        outputs.append(output)
    return carry, jax.tree.map(lambda *x: jnp.stack(x), *outputs)


def choose_lanes(
    num_envs: int,
    num_devices: int,
    requested: int | None,
    divides: Callable[[int], bool],
    refusal: Callable[[str, int], str],
) -> int:
    """Return the number of lanes: what was requested, or the largest of 8, 4, 2, 1 that everything allows.

    Args:
      num_envs: B.
      num_devices: of the mesh; must divide the number of lanes.
      requested: by the user, or None.
      divides: tells whether the agent's minibatches can be cut into so many lanes.
      refusal: `(name, number) -> sentence` for when they cannot; name is what asks for so many lanes, "num_lanes" or
        "num_devices".

    Raises:
      ValueError: naming what does not divide what, and values that would.
    """
    if num_envs % num_devices:
        use = nearest_multiples(num_envs, num_devices)
        raise ValueError(f"num_envs={num_envs} is not divisible by num_devices={num_devices}; use {use}.")
    if requested is not None:
        if requested < 1 or num_envs % requested or requested % num_devices:
            raise ValueError(
                f"num_lanes={requested} must divide num_envs={num_envs} and be divisible by "
                f"num_devices={num_devices}; leave it out to have it chosen."
            )
        candidates = [requested]
    else:
        candidates = [n for n in (DEFAULT_LANES, 4, 2, 1) if num_envs % n == 0 and n % num_devices == 0] + [num_devices]
    for lanes in candidates:
        if divides(lanes):
            return lanes
    raise ValueError(refusal("num_devices" if requested is None else "num_lanes", candidates[-1]))


def plan_divides(agent: Agent, plan: Plan, num_lanes: int) -> bool:
    """Tell whether minibatches of `plan` (abstract will do) take the same number of units from each of `num_lanes`."""
    if agent.replay is not None:
        return agent.replay.batch_size % num_lanes == 0
    time, batch = jax.tree.leaves(plan.data)[0].shape[:2]
    units = (time if plan.unit == "step" else 1) * batch // num_lanes
    return units % plan.num_minibatches == 0 and units >= plan.num_minibatches


def why_not_divides(agent: Agent, plan: Plan, name: str, num_lanes: int) -> str:
    """Say which number `plan_divides` refuses, and the nearest that it would not; `name` is what asks for the lanes."""
    if agent.replay is not None:
        size = agent.replay.batch_size
        return f"batch_size={size} is not divisible by {name}={num_lanes}; use {nearest_multiples(size, num_lanes)}."
    time, batch = jax.tree.leaves(plan.data)[0].shape[:2]
    share, parts = batch // num_lanes, plan.num_minibatches
    units = share * time if plan.unit == "step" else share
    what = f"{units} steps of a rollout ({share} x {time})" if plan.unit == "step" else f"{units} environments"
    where = f" in each of num_lanes={num_lanes}" if name == "num_lanes" else f" on each of {num_lanes} devices"
    below = next(n for n in range(min(parts - 1, units), 0, -1) if units % n == 0)
    above = next((n for n in range(parts + 1, units + 1) if units % n == 0), below)
    near = sorted({below, above})
    return (
        f"num_minibatches={parts} does not divide the {what}{'' if num_lanes == 1 else where}; "
        f"use {' or '.join(map(str, near))}."
    )
