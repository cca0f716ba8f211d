"""What a placement makes of an agent and an environment: a `Program` that the host loop drives in chunks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from podium import distributed, episodes, keys
from podium.agent import Agent, Plan, fresh_carry, nearest_multiples
from podium.env import Env, auto_reset
from podium.host import HostEnvs
from podium.learn import Learned, choose_lanes, learn, num_updates, plan_divides, why_not_divides
from podium.placement.explanation import Explanation
from podium.placement.table import nbytes
from podium.rollout import RolloutState, begin, rollout
from podium.types import Array, Key, Metrics, PyTree, Trajectory


class RunState(NamedTuple):
    """Everything a run is, and all that a checkpoint holds.

    Attributes:
      key: of the run; every iteration's keys are folded from it and `update`.
      update: int32, iterations done.
      agent: the agent's State.
      replay: the replay's state, or `()`.
      rollout: where the environments stand; `()` where they run on the CPU, outside the state.
    """

    key: Key
    update: Array
    agent: PyTree
    replay: PyTree
    rollout: RolloutState | Any


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How much runs at once: environments, steps an iteration, independent seeds, lanes."""

    num_envs: int
    rollout_length: int
    seeds: int
    num_lanes: int

    @property
    def steps_per_update(self) -> int:
        """Environment steps of one iteration of one seed."""
        return self.num_envs * self.rollout_length


class Program(Protocol):
    """A compiled (or readable) training program.

    Attributes:
      sizes: of it.
      devices: that it runs on.
      compile_seconds: spent in tracing and compiling.
      agent: that it trains.
      env: that it trains in; resets itself.
    """

    sizes: Sizes
    devices: list[jax.Device]
    compile_seconds: float
    agent: Agent
    env: Env

    def init(self, seed: int) -> PyTree:
        """Return the first state."""
        ...

    def abstract_state(self) -> PyTree:
        """Return the state's shapes, dtypes and shardings, to restore a checkpoint into."""
        ...

    def lower(self) -> Any:
        """Trace, so that `compile` need not, and may run in another thread."""
        ...

    def compile(self) -> None:
        """Compile, so that the first chunk does not."""
        ...

    def chunk(self, state: PyTree, num_updates: int) -> tuple[PyTree, Metrics]:
        """Do up to `max_updates` iterations; consumes `state`.

        Returns:
          the next state, and metrics [num_updates, ...] each, but for "finite", [..., 2]: whether the agent's state is
          finite at the end, and whether every reward and observation of the chunk was.
        """
        ...

    def agent_state(self, state: PyTree) -> PyTree:
        """Return the agent's State within `state`."""
        ...

    def update_count(self, state: PyTree) -> int:
        """Return the number of iterations behind `state`."""
        ...

    def adopt(self, state: PyTree, agent: PyTree, update: int) -> PyTree:
        """Return a first state with the agent's State of a run that another placement brought to `update`."""
        ...

    def bytes_per_update(self) -> dict[str, int]:
        """Return what moves in an update and how many bytes of it, from the shapes that are compiled for."""
        ...

    def explain(self) -> Explanation:
        """Say in a table and a drawing who runs where, and how many bytes move in an update."""
        ...

    def close(self) -> None:
        """End what runs beside the caller's thread; the program is not used afterwards."""
        ...


class Placement(Protocol):
    """Where an agent's functions run: a value that turns agent and environment into a `Program`."""

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
    ) -> Program:
        """Check every size and return the program; raises ValueError before anything is compiled."""
        ...

    def explain(self) -> Explanation:
        """Say in a table and a drawing who runs where and what moves; `Program.explain` knows the numbers."""
        ...


def plays_whole_episodes(what: Placement | Program) -> bool:
    """Say whether an iteration is whole episodes, which `rollout_length` bounds; those that do say `whole_episodes`."""
    return getattr(what, "whole_episodes", False)


def check_sizes(num_envs: int, rollout_length: int, seeds: int, max_updates: int) -> None:
    """Raise ValueError for a size that is not a positive integer."""
    check_positive(num_envs=num_envs, rollout_length=rollout_length, seeds=seeds, max_updates=max_updates)


def check_one_seed(name: str, seeds: int) -> None:
    """Raise ValueError where the placement of this name is asked for several seeds."""
    if seeds != 1:
        raise ValueError(f"seeds={seeds}: {name} runs one seed; use podium.Anakin for several in one program.")


def check_positive(**values: Any) -> None:
    """Raise ValueError for a value that is not a positive integer."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r} must be a positive integer.")


def check_workers(num_envs: int, workers: int) -> None:
    """Raise ValueError where environments cannot be dealt to workers evenly."""
    if num_envs % workers:
        use = nearest_multiples(num_envs, workers)
        raise ValueError(f"num_envs={num_envs} is not divisible by workers={workers}; use {use}.")


def check_not_negative(use: str, **values: Any) -> None:
    """Raise ValueError for a value that is not an integer of 0 or more; `use` says what to do instead."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"{name}={value!r} must be an integer of 0 or more; {use}.")


def check_max_lag(max_lag: int | None) -> None:
    """Raise ValueError for what is neither None nor an integer of 0 or more."""
    if max_lag is not None:
        check_not_negative("leave it out to keep all", max_lag=max_lag)


def check_seconds(**values: float) -> None:
    """Raise ValueError for a time that is not above 0."""
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{name}={value!r} must be greater than 0 seconds; 60 is usual.")


def check_one_process(name: str) -> None:
    """Raise ValueError where the placement of this name is asked to run over several processes."""
    if (processes := distributed.num_processes()) > 1:
        raise ValueError(f"{processes} processes: {name} runs in one; use podium.Anakin or podium.Sebulba.")


def resolve_lanes(
    agent: Agent, env: Env, num_envs: int, rollout_length: int, num_devices: int, requested: int | None
) -> int:
    """Choose the lanes for these sizes; see `podium.learn.choose_lanes`."""

    def plan_of_rollout(key: Key) -> Plan:
        state = agent.init(key, env.spec)
        index = jnp.arange(num_envs)
        start = begin(key, env, index, fresh_carry(agent, env.spec, index))
        version = jnp.zeros((), jnp.int32)
        _, trajectory, _ = rollout(key, agent, env, agent.actor(state), start, rollout_length, version)
        return agent.plan(key, state, trajectory)

    plan = jax.eval_shape(plan_of_rollout, jax.random.key(0))
    return lanes_of_plan(agent, plan, num_envs, num_devices, requested)


def lanes_of_plan(agent: Agent, plan: Plan, num_envs: int, num_devices: int, requested: int | None) -> int:
    """Choose the lanes for what `agent.plan` gives of a whole rollout (abstract will do), which must be learnable."""
    if agent.replay is not None:
        num_updates(agent.replay, plan)
    return choose_lanes(
        num_envs,
        num_devices,
        requested,
        divides=lambda lanes: plan_divides(agent, plan, lanes),
        refusal=lambda name, lanes: why_not_divides(agent, plan, name, lanes),
    )


def start(key: Key, agent: Agent, env: Env, sizes: Sizes) -> RunState:
    """Return the first state of one seed."""
    roots = keys.roots(key)
    state = agent.init(roots.agent, env.spec)
    index = jnp.arange(sizes.num_envs)
    state_of_envs = begin(roots.env, env, index, fresh_carry(agent, env.spec, index))

    def plan_of_step(key: Key) -> Plan:
        version = jnp.zeros((), jnp.int32)
        _, trajectory, _ = rollout(key, agent, env, agent.actor(state), state_of_envs, 1, version)
        return agent.plan(key, state, trajectory)

    return RunState(roots.run, jnp.zeros((), jnp.int32), state, empty_replay(agent, sizes, plan_of_step), state_of_envs)


def adopt(state: Any, agent: PyTree, update: int) -> Any:
    """Return a first state with another agent's State, and as if it had come to `update`; see `Program.adopt`."""
    put = lambda new, old: distributed.put(jnp.asarray(new), old.sharding)  # noqa: E731
    done = put(np.asarray(update, np.int32), state.update)
    return state._replace(update=done, agent=jax.tree.map(put, agent, state.agent))


def run_once(function: Callable[..., Any], out_shardings: Any) -> Any:
    """Return `function` jitted for a single call: on CPU compiling takes half the time, and running some more."""
    return jax.jit(function, out_shardings=out_shardings, compiler_options={"xla_backend_optimization_level": 0})


def empty_replay(agent: Agent, sizes: Sizes, plan_of_step: Callable[[Key], Plan]) -> PyTree:
    """Return the agent's replay with nothing in it, or `()`; `plan_of_step` is traced for the shapes of its items."""
    if agent.replay is None:
        return ()
    return empty_replay_of(agent, sizes, jax.eval_shape(plan_of_step, jax.random.key(0)))


def empty_replay_of(agent: Agent, sizes: Sizes, plan: Plan) -> PyTree:
    """Return the agent's replay with nothing in it, for the data of such plans; they may be shapes."""
    assert agent.replay is not None
    item = jax.tree.map(lambda x: jnp.zeros(x.shape[2:], x.dtype), plan.data)
    return agent.replay.init(item, sizes.num_envs, sizes.num_lanes, sizes.rollout_length)


Rollout = Callable[[Key, PyTree, RolloutState, Array], tuple[RolloutState, Trajectory, episodes.Ended]]
Learn = Callable[[Key, PyTree, PyTree, Trajectory], Learned]


def iterate(state: RunState, agent: Agent, collect: Rollout, digest: Learn) -> tuple[RunState, Metrics, Array]:
    """Do one iteration: collect a rollout with the current policy, learn from it.

    Returns:
      the next state, metrics, and [B] whether each environment gave finite numbers only.
    """
    rollout_key, learn_key = keys.iteration(state.key, state.update)
    following, trajectory, ended = collect(rollout_key, agent.actor(state.agent), state.rollout, state.update)
    learned = digest(learn_key, state.agent, state.replay, trajectory)
    metrics = {**learned.metrics, **episodes.summarize(ended)}
    return (
        RunState(state.key, state.update + 1, learned.state, learned.replay, following),
        metrics,
        rollout_finite(agent, trajectory),
    )


def in_turn(
    iterate: Callable[[Any], tuple[Any, Metrics, Array]], state: Any, num_updates: int, num_envs: int
) -> tuple[Any, Metrics]:
    """Return what `Program.chunk` does, one iteration after the other; each `state -> (state, metrics, finite)`."""
    rows, finite = [], np.ones(num_envs, bool)
    for _ in range(num_updates):
        state, metrics, new_finite = iterate(state)
        rows.append(jax.device_get(metrics))
        finite &= np.asarray(new_finite)
    stacked = jax.tree.map(lambda *x: np.stack(x), *rows)
    return state, {**stacked, "finite": np.asarray(chunk_finite(state.agent, jnp.asarray(finite)))}


def make_learn(
    agent: Agent,
    sizes: Sizes,
    fold: Callable[..., Any] = jax.lax.scan,
    once_ready: Callable[..., Any] | None = None,
) -> Learn:
    """Bind `podium.learn.learn` to an agent and its sizes."""
    return lambda key, state, replay, trajectory: learn(
        key, agent, state, replay, trajectory, sizes.num_lanes, fold, once_ready
    )


def gradients(agent: Agent, sizes: Sizes, state: PyTree, replay: PyTree, trajectory: Trajectory) -> tuple[PyTree, int]:
    """Return the shapes of a gradient of one seed, and how many an update takes; shapes will do for the arguments."""
    shapes, steps = None, 0

    def grad(key: Key, state: PyTree, minibatch: PyTree) -> Any:
        nonlocal shapes
        gradient, aux = agent.grad(key, state, minibatch)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), gradient)
        return gradient, aux

    def fold(step: Callable[..., Any], carry: PyTree, numbers: Array) -> Any:
        nonlocal steps
        steps = numbers.size
        return jax.lax.scan(step, carry, numbers)

    jax.eval_shape(make_learn(agent._replace(grad=grad), sizes, fold), jax.random.key(0), state, replay, trajectory)
    return shapes, steps


def gradient_bytes(agent: Agent, sizes: Sizes, state: PyTree, replay: PyTree, trajectory: Trajectory) -> int:
    """Return the bytes of all gradients of an update, of one seed; shapes will do for `state` and what follows."""
    shapes, steps = gradients(agent, sizes, state, replay, trajectory)
    return nbytes(shapes) * steps


def prepare(env: Env | HostEnvs) -> Env:
    """Return `env` resetting itself, as placements of compiled programs run it.

    Raises:
      ValueError: it runs on the CPU, and can be no part of a compiled program.
    """
    if isinstance(env, HostEnvs):
        raise ValueError(
            f"{env.spec.name} runs on the CPU, outside compiled programs; use placement=podium.Sebulba(...)."
        )
    return auto_reset(env)


def rollout_finite(agent: Agent, trajectory: Trajectory) -> Array:
    """Return [B], whether every reward of an environment is finite, and where there is a replay every observation.

    What a replay stores comes from these, so that no replay need ever be read as a whole; without one, what is not
    finite in an observation shows in the agent's state at once. One answer an environment keeps devices apart until the
    end of a chunk.
    """
    seen = () if agent.replay is None else (trajectory.obs, trajectory.next_obs)
    leaves = _floating((trajectory.reward, seen))
    return functools.reduce(jnp.logical_and, [jnp.isfinite(x).all((0, *range(2, x.ndim))) for x in leaves])


SMALL = 2**16
"""Numbers in an array that `all_finite` may copy."""


def chunk_finite(agent_state: PyTree, envs_finite: Array) -> Array:
    """Return what a chunk says as "finite", [2]: of the agent's State, and of all that the environments [B] gave."""
    return jnp.stack([all_finite(agent_state), envs_finite.all()])


def all_finite(tree: PyTree) -> Array:
    """Return a bool scalar, whether every number in `tree` is finite.

    Small arrays of one type are looked at as one, because a CPU compiles each loop for as long as a large one's.
    """
    floating = _floating(tree)
    small: dict[Any, list[Array]] = {}
    for x in floating:
        if x.size <= SMALL:
            small.setdefault(x.dtype, []).append(x.ravel())
    looked_at = [x for x in floating if x.size > SMALL] + [jnp.concatenate(arrays) for arrays in small.values()]
    return functools.reduce(jnp.logical_and, [jnp.isfinite(x).all() for x in looked_at], jnp.ones((), bool))


def _floating(tree: PyTree) -> list[Array]:
    return [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]
