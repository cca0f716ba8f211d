"""Fold an agent's plan, grad and apply over a trajectory: the one place that does, for every placement.

An iteration has two halves. `prepare` plans it and lays out all that its gradients are taken from; `gradient` takes one
of them, at whatever state. Folded as `apply(gradient(...))` they are `learn`; a placement that takes gradients in one
place and applies them in another calls the halves.

Shuffling is local. The batch of environments is cut into lanes, fixed groups of neighbours; a minibatch takes the same
number of steps from every lane, permuted inside it. A mesh holds whole lanes, so nothing but gradient sums
crosses devices; and because lanes are configuration, the mathematics does not depend on the number of devices.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from podium import film
from podium.agent import Agent, Plan, Replay, applied, graded, observed, planned
from podium.ops.shuffle import permute
from podium.ranges import nearest_multiples
from podium.types import Array, Key, Metrics, PyTree, Trajectory

DEFAULT_LANES = 8


def _static() -> Any:
    return dataclasses.field(metadata={"static": True})


class Learned(NamedTuple):
    """State after an iteration, the replay's state, and metrics averaged over its minibatches."""

    state: PyTree
    replay: PyTree
    metrics: Metrics


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prepared:
    """All that the gradients of one iteration are taken from, in L lanes; the parameters are not among it.

    Attributes:
      key: of the shuffles, samples and gradients.
      data: the plan's, [L, T * B / L, ...], or [L, B / L, T, ...] of sequences, with `podium.film.Strips` of films;
        `()` for an agent with a replay.
      per_env: the plan's, [L, B / L, ...].
      order: [G, L, n], which units of each lane every gradient is taken from; None where one minibatch is everything.
      statistics: [G, ...], what `Agent.statistics` gives of every minibatch; `()` for an agent without.
      replay: the replay's state with the rollout in it, or `()`.
      shape: (T, B) of the rollout.
      num_lanes: L.
      num_epochs: the plan's.
      num_minibatches: the plan's.
      unit: the plan's.
    """

    key: Key
    data: PyTree
    per_env: PyTree
    order: Array | None
    statistics: PyTree
    replay: PyTree
    shape: tuple[int, int] = _static()
    num_lanes: int = _static()
    num_epochs: int = _static()
    num_minibatches: int = _static()
    unit: Literal["step", "sequence"] = _static()

    def ranked(self, priorities: PyTree) -> Prepared:
        """Return what the next gradient is taken from, after one that left these `priorities`."""
        if not jax.tree.leaves(priorities):
            return self
        return dataclasses.replace(self, replay=self.replay._replace(priorities=priorities))


class Minibatch(NamedTuple):
    """What `Agent.grad` is handed: its key, and data; and the `indices` that a replay drew, else `()`."""

    key: Key
    data: PyTree
    indices: PyTree


class Gradient(NamedTuple):
    """A gradient, its metrics, and what the replay's `priorities` are after it; `()` where there are none.

    `stop` is a bool scalar, whether the iteration ends before it (`Agent.stops`); None where nothing ends one.
    """

    grads: PyTree
    metrics: Metrics
    priorities: PyTree
    stop: Array | None = None


def to_lanes(x: Array, num_lanes: int) -> Array:
    """Return [T, B, ...] as [L, T * B / L, ...], each lane's steps in order of time."""
    time, batch = x.shape[:2]
    lanes = jnp.moveaxis(x.reshape(time, num_lanes, batch // num_lanes, *x.shape[2:]), 1, 0)
    return lanes.reshape(num_lanes, -1, *x.shape[2:])


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


def python_scan(step: Callable[..., Any], carry: PyTree, inputs: PyTree) -> tuple[PyTree, PyTree]:
    """Do what `jax.lax.scan` does, as a Python loop: slow, readable, and steppable in a debugger."""
    outputs = []
    for i in range(jax.tree.leaves(inputs)[0].shape[0]):
        carry, output = step(carry, jax.tree.map(lambda x, i=i: x[i], inputs))
        outputs.append(output)
    return carry, jax.tree.map(lambda *x: jnp.stack(x), *outputs)


class Loops(NamedTuple):
    """How the fold over gradients is run.

    Attributes:
      scan: repeats a step, as `jax.lax.scan`.
      once_ready: `(ready, run, wait, state, priorities)`, does nothing before a replay can be learnt from.
    """

    scan: Callable[..., Any]
    once_ready: Callable[..., Any]


COMPILED = Loops(jax.lax.scan, once_ready_compiled)
PYTHON = Loops(python_scan, once_ready_python)


def learn(
    key: Key,
    agent: Agent,
    state: PyTree,
    replay_state: PyTree,
    trajectory: Trajectory,
    num_lanes: int,
    loops: Loops = COMPILED,
) -> Learned:
    """Learn one iteration from a trajectory [T, B, ...]: `prepare`, `learn_from`, and `Agent.observe`.

    Args:
      key: of this iteration.
      agent: any.
      state: the agent's.
      replay_state: of `agent.replay`, or `()`.
      trajectory: of the whole batch.
      num_lanes: L, divides B.
      loops: `COMPILED`, or `PYTHON` to read along.

    Returns:
      the new states and the metrics.
    """
    prepared = prepare(key, agent, state, replay_state, trajectory, num_lanes)
    state, prepared, metrics = learn_from(agent, state, prepared, loops)
    return Learned(observed(agent, state, trajectory), prepared.replay, metrics)


def prepare(
    key: Key, agent: Agent, state: PyTree, replay_state: PyTree, trajectory: Trajectory, num_lanes: int
) -> Prepared:
    """Plan an iteration: the first half of `learn`, of the same arguments.

    Raises:
      ValueError: the replay has `update_priorities` and nothing that it may change, or the agent a replay and
        `statistics` or `stops`.
    """
    plan_key, fold_key = jax.random.split(key)
    plan = planned(agent, plan_key, state, trajectory)
    prepared = Prepared(
        key=fold_key,
        data=(),
        per_env=(),
        order=None,
        statistics=(),
        replay=replay_state,
        shape=_shape(plan),
        num_lanes=num_lanes,
        num_epochs=plan.num_epochs,
        num_minibatches=plan.num_minibatches,
        unit=plan.unit,
    )
    if agent.replay is not None:
        return dataclasses.replace(prepared, replay=_stored(agent, agent.replay, replay_state, plan, trajectory.gap))
    data, per_env = _lay_out(plan, num_lanes)
    prepared = dataclasses.replace(prepared, data=data, per_env=per_env, order=_order(fold_key, plan, num_lanes))
    if agent.statistics is None:
        return prepared
    return dataclasses.replace(prepared, statistics=_statistics(agent.statistics, prepared))


def num_gradients(agent: Agent, prepared: Prepared) -> int:
    """Return how many gradients an iteration takes; shapes will do.

    Raises:
      ValueError: see `num_updates`.
    """
    if agent.replay is None:
        return prepared.num_epochs * prepared.num_minibatches
    return _num_updates(agent.replay, *prepared.shape)


def can_learn(agent: Agent, prepared: Prepared) -> Array:
    """Return a bool scalar, whether there is anything to take gradients from yet; a replay may wait for more."""
    return jnp.ones((), bool) if agent.replay is None else agent.replay.can_sample(prepared.replay)


def draw(agent: Agent, prepared: Prepared, number: Array | int) -> Minibatch:
    """Return the minibatch of gradient `number`, which counts from 0 in every iteration."""
    if agent.replay is not None:
        sample_key, grad_key = jax.random.split(jax.random.fold_in(prepared.key, number))
        return Minibatch(grad_key, *agent.replay.sample(sample_key, prepared.replay))
    epoch, part = number // prepared.num_minibatches, number % prepared.num_minibatches
    key = jax.random.fold_in(jax.random.fold_in(prepared.key, epoch), prepared.num_lanes + part)
    data = _pick(prepared, None if prepared.order is None else prepared.order[number])
    if agent.statistics is not None:
        data = data, jax.tree.map(lambda x: x[number], prepared.statistics)
    return Minibatch(key, data, ())


def gradient(agent: Agent, state: PyTree, prepared: Prepared, number: Array | int) -> Gradient:
    """Take gradient `number` of an iteration at `state`: the second half of `learn`, but for `Agent.apply`.

    The next one is taken from `prepared.ranked(priorities)`, where the replay has priorities.
    """
    minibatch = draw(agent, prepared, number)
    grads, aux = graded(agent, minibatch.key, state, minibatch.data)
    if agent.replay is None:
        return Gradient(grads, aux.metrics, (), None if agent.stops is None else agent.stops(aux.metrics))
    if agent.replay.update_priorities is None:
        return Gradient(grads, aux.metrics, ())
    replay_state = agent.replay.update_priorities(prepared.replay, minibatch.indices, aux.priorities)
    return Gradient(grads, aux.metrics, replay_state.priorities)


def learn_from(
    agent: Agent, state: PyTree, prepared: Prepared, loops: Loops = COMPILED
) -> tuple[PyTree, Prepared, Metrics]:
    """Take and apply the gradients of an iteration, one after the other, each at the state that the last one left.

    Where `Agent.stops` ends the iteration, what remains is computed, at the state that stays, and not applied.

    Returns:
      the state, `prepared` with the priorities that the last gradient left, and means of the metrics; NaN, and all as
      it was, where a replay cannot be learnt from yet.
    """

    # What is stored stays as it is while learning, so it is read; only priorities are carried along.
    def step(carry: tuple[PyTree, PyTree, PyTree], number: Array) -> tuple[tuple[PyTree, PyTree, PyTree], Metrics]:
        state, priorities, stopped = carry
        taken = gradient(agent, state, prepared.ranked(priorities), number)
        following = applied(agent, state, taken.grads)
        if taken.stop is not None:
            stopped = stopped | taken.stop
            following = jax.tree.map(functools.partial(jnp.where, stopped), state, following)
        return (following, taken.priorities, stopped), taken.metrics

    def run(state: PyTree, priorities: PyTree) -> tuple[tuple[PyTree, PyTree], Metrics]:
        stopped = () if agent.stops is None else jnp.zeros((), bool)
        numbers = jnp.arange(num_gradients(agent, prepared))
        (state, priorities, _), metrics = loops.scan(step, (state, priorities, stopped), numbers)
        return (state, priorities), jax.tree.map(lambda x: jnp.mean(x, axis=0), metrics)

    def wait(state: PyTree, priorities: PyTree) -> tuple[tuple[PyTree, PyTree], Metrics]:
        # Metrics of updates that did not happen are NaN, which the host loop leaves out of averages.
        _, metrics = jax.eval_shape(run, state, priorities)
        return (state, priorities), jax.tree.map(lambda x: jnp.full(x.shape, jnp.nan, x.dtype), metrics)

    if agent.replay is None:
        (state, _), metrics = run(state, ())
        return state, prepared, metrics
    priorities = prepared.replay.priorities if agent.replay.update_priorities else ()
    ready = can_learn(agent, prepared)
    (state, priorities), metrics = loops.once_ready(ready, run, wait, state, priorities)
    return state, prepared.ranked(priorities), metrics


def _shape(plan: Plan) -> tuple[int, int]:
    first = jax.tree.leaves(plan.data, is_leaf=film.is_strips)[0]
    time, batch = first.begun.shape[1:] if film.is_strips(first) else first.shape[:2]
    return time, batch


def _lay_out(plan: Plan, num_lanes: int) -> tuple[PyTree, PyTree]:
    """Return the plan's data and per_env in lanes of units: [L, units, ...]; films in lanes too."""

    def lay(array: Callable[[Array], Array]) -> PyTree:
        one = lambda x: film.cut(x, num_lanes) if film.is_strips(x) else array(x)
        return jax.tree.map(one, plan.data, is_leaf=film.is_strips)

    if plan.unit == "step":
        return lay(lambda x: to_lanes(x, num_lanes)), ()

    def by_lane(x: Array) -> Array:
        return x.reshape(num_lanes, x.shape[0] // num_lanes, *x.shape[1:])

    return lay(lambda x: by_lane(jnp.moveaxis(x, 1, 0))), jax.tree.map(by_lane, plan.per_env)


def _stored(agent: Agent, replay: Replay, replay_state: PyTree, plan: Plan, gap: Array | None) -> PyTree:
    """Return the replay's state with the plan's data in it, which follow what it holds but where there is a `gap`."""
    if gap is not None and replay.cut is not None:
        replay_state = replay.cut(replay_state, gap)
    replay_state = replay.add(replay_state, plan.data)
    if replay.update_priorities and not hasattr(replay_state, "priorities"):
        raise ValueError(
            f"{agent.name}'s replay has update_priorities, but its state, a {type(replay_state).__name__}, no field "
            "`priorities`, which alone that may change; keep there what it changes."
        )
    if agent.statistics is not None:
        raise ValueError(
            f"{agent.name} has a replay and statistics, but what a replay gives is not known before the first "
            "gradient; compute them in grad."
        )
    if agent.stops is not None:
        raise ValueError(
            f"{agent.name} has a replay and stops, but what a replay gives is no one iteration's, whose rest could be "
            "left out; leave stops out."
        )
    return replay_state


def _order(key: Key, plan: Plan, num_lanes: int) -> Array | None:
    """Return [G, L, n], the units of each lane in every minibatch: equally many of each, permuted inside it."""
    if plan.num_minibatches == 1:  # One minibatch is everything, in any order.
        return None
    time, batch = _shape(plan)
    units = (time if plan.unit == "step" else 1) * batch // num_lanes
    size = units // plan.num_minibatches

    def of_epoch(epoch: Array) -> Array:
        epoch_key = jax.random.fold_in(key, epoch)
        lane_keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(epoch_key, jnp.arange(num_lanes))
        index = jnp.arange(plan.num_minibatches * size)
        order = jax.vmap(lambda lane_key: permute(lane_key, index, units))(lane_keys)
        return jnp.moveaxis(order.reshape(num_lanes, plan.num_minibatches, size), 1, 0)

    return jax.vmap(of_epoch)(jnp.arange(plan.num_epochs)).reshape(-1, num_lanes, size)


def _pick(prepared: Prepared, index: Array | None) -> PyTree:
    """Return the minibatch of the units `index` [L, n] of each lane, or of all where it is None."""

    def pick(lanes: Any) -> Array:
        if film.is_strips(lanes):
            taken = (film.picked if prepared.unit == "step" else film.of_envs)(lanes, index)
        else:
            taken = lanes if index is None else jax.vmap(lambda lane, index: lane[index])(lanes, index)
        return taken.reshape(-1, *taken.shape[2:])

    data = jax.tree.map(pick, prepared.data, is_leaf=film.is_strips)
    if prepared.unit == "step":
        return data
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), data), jax.tree.map(pick, prepared.per_env)


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _statistics(summarize: Callable[[PyTree], PyTree], prepared: Prepared) -> PyTree:
    """Return what `summarize` gives of every minibatch, [G, ...]; compiled, so that only what it reads is gathered."""
    count = prepared.num_epochs * prepared.num_minibatches
    return jax.vmap(lambda index: summarize(_pick(prepared, index)), axis_size=count)(prepared.order)


def num_updates(replay: Replay, plan: Plan) -> int:
    """Return the minibatches to learn after inserting the data of `plan` (abstract will do), [T, B, ...].

    Raises:
      ValueError: `updates_per_step` or `samples_per_insert` asks for a number that is not whole.
    """
    return _num_updates(replay, *_shape(plan))


def _num_updates(replay: Replay, time: int, batch: int) -> int:
    if replay.updates_per_step is not None:
        name, asked, unit = "updates_per_step", replay.updates_per_step, 1 / (time * batch)
    elif replay.samples_per_insert is not None:
        name, asked, unit = "samples_per_insert", replay.samples_per_insert, replay.steps_per_batch / (time * batch)
    else:
        return replay.num_updates
    exact = asked / unit
    number = round(exact)
    if number > jnp.iinfo(jnp.int32).max:
        raise ValueError(f"{name}={asked:g} asks for {exact:g} minibatches after {time} x {batch} steps; use less.")
    if number < 1 or abs(exact - number) > 1e-5 * number:  # What the sentence below says, six digits, must do.
        near = sorted({max(math.floor(exact), 1), math.ceil(exact)})
        use = " or ".join(f"{n * unit:g}" for n in near)
        windows = f" x {replay.steps_per_item} steps" if replay.steps_per_item > 1 else ""
        raise ValueError(
            f"{name}={asked:g} asks for {exact:g} minibatches of batch_size={replay.batch_size}{windows} after each "
            f"{time} x {batch} steps, and only whole ones are learnt; use {use}, or another rollout_length."
        )
    return number


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
        return all(size % num_lanes == 0 for size in _batch_sizes(agent.replay).values())
    time, batch = _shape(plan)
    units = (time if plan.unit == "step" else 1) * batch // num_lanes
    return units % plan.num_minibatches == 0 and units >= plan.num_minibatches


def _batch_sizes(replay: Replay) -> dict[str, int]:
    """Return what lanes must divide, by the words that say whose it is."""
    parts = replay.parts or {}
    return {f" of group {name!r}": size for name, size in parts.items()} or {"": replay.batch_size}


def why_not_divides(agent: Agent, plan: Plan, name: str, num_lanes: int) -> str:
    """Say which number `plan_divides` refuses, and the nearest that it would not; `name` is what asks for the lanes."""
    if agent.replay is not None:
        whose, size = next((x, n) for x, n in _batch_sizes(agent.replay).items() if n % num_lanes)
        use = nearest_multiples(size, num_lanes)
        return f"batch_size={size}{whose} is not divisible by {name}={num_lanes}; use {use}."
    time, batch = _shape(plan)
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
