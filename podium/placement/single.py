"""Single: everything in one place and one loop at a time, to be read and to be held against.

The same arithmetic as every synchronous placement, with Python loops where they have compiled ones.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podium import distributed
from podium.agent import Agent
from podium.env import Env
from podium.host import HostEnvs
from podium.learn import python_scan
from podium.placement import program
from podium.placement.explanation import NEVER, Explanation
from podium.placement.program import RunState, Sizes
from podium.placement.table import Role, device_name
from podium.rollout import RolloutState, rollout
from podium.types import Array, Key, Metrics, PyTree


@dataclasses.dataclass(frozen=True)
class Single:
    """Run everything on the first device, step by step in Python: the readable oracle."""

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
    ) -> SingleProgram:
        """Check every size and return the program; see `Placement.build`."""
        program.check_sizes(num_envs, rollout_length, seeds, max_updates)
        program.check_one_seed("Single", seeds)
        if distributed.num_processes() > 1:
            raise ValueError(f"{distributed.num_processes()} processes: Single runs in one; use podium.Anakin.")
        env = program.prepare(env)
        lanes = program.resolve_lanes(agent, env, num_envs, rollout_length, 1, num_lanes)
        return SingleProgram(agent, env, Sizes(num_envs, rollout_length, 1, lanes))

    def explain(self) -> Explanation:
        """Say in a table and a drawing who runs where; nothing moves."""
        role = Role("everything", device_name(jax.devices()[0]), "environments, inference and learning in turn")
        title = "Single: Python loops, to be read and to be held against."
        return Explanation(title, [role], [], stale=NEVER, waits="everything for what comes before it; one at a time.")


class SingleProgram:
    """The readable program; a `Program`."""

    def __init__(self, agent: Agent, env: Env, sizes: Sizes):
        self.sizes, self.env = sizes, env
        self.devices = jax.devices()[:1]
        self.compile_seconds = 0.0
        self.agent = agent
        # The pieces are compiled, each alone; every loop that joins them is Python's.
        replay = agent.replay
        if replay is not None:
            update = replay.update_priorities
            replay = replay._replace(
                add=jax.jit(replay.add),
                sample=jax.jit(replay.sample),
                update_priorities=jax.jit(update) if update is not None else None,
            )
        self._agent = agent._replace(
            replay=replay,
            act=jax.jit(agent.act, static_argnums=5),
            plan=jax.jit(agent.plan),
            grad=jax.jit(agent.grad),
            apply=jax.jit(agent.apply),
        )
        self._env = env._replace(reset=jax.jit(env.reset), step=jax.jit(env.step))
        self.learn = program.make_learn(self._agent, sizes, python_scan)

    def init(self, seed: int) -> RunState:
        """Return the first state."""
        return program.start(jax.random.key(seed), self.agent, self._env, self.sizes)

    def abstract_state(self) -> RunState:
        """Return the state's shapes and dtypes."""
        return jax.eval_shape(lambda: self.init(0))

    def lower(self) -> None:
        """Do nothing: the pieces are traced and compiled when first used."""

    def compile(self) -> None:
        """Do nothing, as `lower`."""

    def chunk(self, state: RunState, num_updates: int) -> tuple[RunState, Metrics]:
        """Do `num_updates` iterations."""
        rows, finite = [], jnp.ones(self.sizes.num_envs, bool)
        for _ in range(num_updates):
            state, metrics, new_finite = program.iterate(state, self._agent, self.collect, self.learn)
            rows.append(jax.device_get(metrics))
            finite &= new_finite
        stacked = jax.tree.map(lambda *x: np.stack(x), *rows)
        return state, {**stacked, "finite": np.asarray(program.chunk_finite(state, finite))}

    def collect(
        self, key: Key, params: PyTree, state: RolloutState, version: Array, num_steps: int | None = None
    ) -> Any:
        """Play a rollout, or `num_steps` of one."""
        length = num_steps or self.sizes.rollout_length
        return rollout(key, self._agent, self._env, params, state, length, version, python_scan)

    def agent_state(self, state: RunState) -> PyTree:
        """Return the agent's State within `state`."""
        return state.agent

    def update_count(self, state: RunState) -> int:
        """Return the number of iterations behind `state`."""
        return int(jnp.asarray(state.update))

    def adopt(self, state: RunState, agent: PyTree, update: int) -> RunState:
        """Return the first state with the agent's State of another run; see `Program.adopt`."""
        return program.adopt(state, agent, update)

    def bytes_per_update(self) -> dict[str, int]:
        """Return what moves in an update: nothing."""
        return {}

    def explain(self) -> Explanation:
        """Say in a table and a drawing who runs where; nothing moves."""
        return Single().explain()

    def close(self) -> None:
        """Do nothing: all of it ran in the caller's thread."""
