"""What a placement makes of an agent and an environment: a `Program` that the host loop drives in chunks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from podium import episodes
from podium.agent import Agent
from podium.env import Env, auto_reset
from podium.learn import Learned, choose_lanes, learn, plan_divides
from podium.rollout import RolloutState, begin, rollout
from podium.types import Array, Key, Metrics, PyTree, Trajectory


class RunState(NamedTuple):
    """Everything a run is, and all that a checkpoint holds.

    Attributes:
      key: of the run; every iteration's keys are folded from it and `update`.
      update: int32, iterations done.
      agent: the agent's State.
      replay: the replay's state, or `()`.
      rollout: where the environments stand.
    """

    key: Key
    update: Array
    agent: PyTree
    replay: PyTree
    rollout: RolloutState


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
    """

    sizes: Sizes
    devices: list[jax.Device]
    compile_seconds: float
    agent: Agent

    def init(self, seed: int) -> PyTree:
        """Return the first state."""
        ...

    def abstract_state(self) -> PyTree:
        """Return the state's shapes, dtypes and shardings, to restore a checkpoint into."""
        ...

    def compile(self) -> None:
        """Trace and compile, so that the first chunk does not."""
        ...

    def chunk(self, state: PyTree, num_updates: int) -> tuple[PyTree, Metrics]:
        """Do up to `max_updates` iterations; consumes `state`; metrics are stacked, [num_updates, ...]."""
        ...

    def agent_state(self, state: PyTree) -> PyTree:
        """Return the agent's State within `state`."""
        ...

    def update_count(self, state: PyTree) -> int:
        """Return the number of iterations behind `state`."""
        ...


class Placement(Protocol):
    """Where an agent's functions run: a value that turns agent and environment into a `Program`."""

    def build(
        self,
        agent: Agent,
        env: Env,
        *,
        num_envs: int,
        rollout_length: int,
        seeds: int = 1,
        num_lanes: int | None = None,
        max_updates: int = 1,
    ) -> Program:
        """Check every size and return the program; raises ValueError before anything is compiled."""
        ...

    def explain(self) -> str:
        """Say in words who runs where and what moves."""
        ...


def check_sizes(num_envs: int, rollout_length: int, seeds: int, max_updates: int) -> None:
    """Raise ValueError for a size that is not a positive integer."""
    sizes = {"num_envs": num_envs, "rollout_length": rollout_length, "seeds": seeds, "max_updates": max_updates}
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r} must be a positive integer.")


def resolve_lanes(
    agent: Agent, env: Env, num_envs: int, rollout_length: int, num_devices: int, requested: int | None
) -> int:
    """Choose the lanes for these sizes; see `podium.learn.choose_lanes`."""

    def trajectory(key: Key) -> Any:
        state = agent.init(key, env.spec)
        start = begin(key, env, jnp.arange(num_envs), agent.carry(env.spec, num_envs))
        version = jnp.zeros((), jnp.int32)
        _, trajectory, _ = rollout(key, agent, env, agent.actor(state), start, rollout_length, version)
        return agent.plan(key, state, trajectory)

    plan = jax.eval_shape(trajectory, jax.random.key(0))
    return choose_lanes(num_envs, num_devices, requested, lambda lanes: plan_divides(agent, plan, lanes))


def start(key: Key, agent: Agent, env: Env, sizes: Sizes) -> RunState:
    """Return the first state of one seed."""
    run_key, init_key, env_key = jax.random.split(key, 3)
    carry = agent.carry(env.spec, sizes.num_envs)
    state = agent.init(init_key, env.spec)
    state_of_envs = begin(env_key, env, jnp.arange(sizes.num_envs), carry)
    replay: PyTree = ()
    if agent.replay is not None:
        replay = agent.replay.init(
            _replay_item(agent, env, state, state_of_envs), sizes.num_envs, sizes.num_lanes, sizes.rollout_length
        )
    return RunState(run_key, jnp.zeros((), jnp.int32), state, replay, state_of_envs)


def _replay_item(agent: Agent, env: Env, state: PyTree, rollout_state: RolloutState) -> PyTree:
    """Return zeros of one item of what the agent's plan gives the replay."""

    def items(key: Key) -> PyTree:
        version = jnp.zeros((), jnp.int32)
        _, trajectory, _ = rollout(key, agent, env, agent.actor(state), rollout_state, 1, version)
        return agent.plan(key, state, trajectory).data

    shapes = jax.eval_shape(items, jax.random.key(0))
    return jax.tree.map(lambda x: jnp.zeros(x.shape[2:], x.dtype), shapes)


Rollout = Callable[[Key, PyTree, RolloutState, Array], tuple[RolloutState, Trajectory, episodes.Ended]]
Learn = Callable[[Key, PyTree, PyTree, Trajectory], Learned]


def iterate(state: RunState, agent: Agent, collect: Rollout, digest: Learn) -> tuple[RunState, Metrics]:
    """Do one iteration: collect a rollout with the current policy, learn from it."""
    rollout_key, learn_key = jax.random.split(jax.random.fold_in(state.key, state.update))
    following, trajectory, ended = collect(rollout_key, agent.actor(state.agent), state.rollout, state.update)
    learned = digest(learn_key, state.agent, state.replay, trajectory)
    metrics = {**learned.metrics, **episodes.summarize(ended)}
    return RunState(state.key, state.update + 1, learned.state, learned.replay, following), metrics


def make_learn(agent: Agent, sizes: Sizes, fold: Callable[..., Any] = jax.lax.scan) -> Learn:
    """Bind `podium.learn.learn` to an agent and its sizes."""
    return lambda key, state, replay, trajectory: learn(key, agent, state, replay, trajectory, sizes.num_lanes, fold)


def prepare(env: Env) -> Env:
    """Return `env` resetting itself, as every placement runs it."""
    return auto_reset(env)


def all_finite(tree: PyTree) -> Array:
    """Return whether every floating leaf is finite."""
    leaves = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return jnp.stack([jnp.isfinite(x).all() for x in leaves]).all() if leaves else jnp.ones((), bool)
