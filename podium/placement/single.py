"""Single: everything in one place and one loop at a time, to be read and to be held against.

The same arithmetic as every synchronous placement, with Python loops where they have compiled ones. Over environments
on the CPU it is the loop of DQN (Mnih et al. 2013): act, step, and now and then learn, each waiting for the other.
"""

from __future__ import annotations

import dataclasses
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from podium import distributed, keys
from podium.agent import Agent
from podium.env import Env
from podium.host import HostEnvs
from podium.learn import once_ready_python, python_scan
from podium.placement import learner, program
from podium.placement.acting import Acting, Compiled, complete
from podium.placement.actors import look_after
from podium.placement.explanation import NEVER, Explanation
from podium.placement.players import HostPlayer
from podium.placement.program import RunState, Sizes
from podium.placement.table import Move, Role, device_name
from podium.rollout import RolloutState, rollout
from podium.types import Array, Key, Metrics, PyTree


@dataclasses.dataclass(frozen=True)
class Single:
    """Run everything on the first device, step by step in Python: the readable oracle.

    Args:
      worker_timeout: seconds without a step after which environments on the CPU count as hung, and the run ends.
    """

    worker_timeout: float = 60.0

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
        program.check_seconds(worker_timeout=self.worker_timeout)
        if distributed.num_processes() > 1:
            raise ValueError(f"{distributed.num_processes()} processes: Single runs in one; use podium.Anakin.")
        if isinstance(env, HostEnvs):
            shapes = learner.host_shapes(agent, env.spec, env.resets_in_next_step)
            lanes = learner.choose_lanes(agent, env.spec, shapes, num_envs, rollout_length, 1, num_lanes)
            return HostSingleProgram(agent, env, Sizes(num_envs, rollout_length, 1, lanes), self.worker_timeout)
        env = program.prepare(env)
        lanes = program.resolve_lanes(agent, env, num_envs, rollout_length, 1, num_lanes)
        return SingleProgram(agent, env, Sizes(num_envs, rollout_length, 1, lanes))

    def explain(self) -> Explanation:
        """Say in a table and a drawing who runs where; nothing moves, unless environments are on the CPU."""
        role = Role("everything", device_name(jax.devices()[0]), "environments, inference and learning in turn")
        return _explain([role], [])


def _explain(roles: list[Role], moves: list[Move]) -> Explanation:
    title = "Single: Python loops, to be read and to be held against."
    return Explanation(title, roles, moves, stale=NEVER, waits="everything for what comes before it; one at a time.")


class SingleProgram:
    """The readable program; a `Program`."""

    def __init__(self, agent: Agent, env: Any, sizes: Sizes):
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
        if isinstance(env, Env):
            self._env = env._replace(reset=jax.jit(env.reset), step=jax.jit(env.step))
        self.learn = program.make_learn(self._agent, sizes, python_scan, once_ready_python)

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
        return program.in_turn(self._iterate, state, num_updates, self.sizes.num_envs)

    def _iterate(self, state: RunState) -> tuple[RunState, Metrics, Array]:
        return program.iterate(state, self._agent, self.collect, self.learn)

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


class HostSingleProgram(SingleProgram):
    """The readable program over environments on the CPU, which are no part of the state; a `Program`."""

    def __init__(self, agent: Agent, envs: HostEnvs, sizes: Sizes, timeout: float):
        super().__init__(agent, envs, sizes)
        self._timeout = timeout
        self._acting = Acting(agent, envs.spec, sizes.num_envs, sizes.rollout_length, envs.resets_in_next_step)
        self._compiled: Compiled | None = None
        self._player: HostPlayer | None = None
        self._left: Any = None
        self._seed: int | None = None

    def init(self, seed: int) -> RunState:
        """Return the first state."""
        self._seed = seed
        return self._start(jax.random.key(seed))

    def abstract_state(self) -> RunState:
        """Return the state's shapes and dtypes."""
        return jax.eval_shape(self._start, jax.random.key(0))

    def _start(self, key: Key) -> RunState:
        shapes = learner.host_shapes(self.agent, self.env.spec, self.env.resets_in_next_step)
        return learner.start(key, self.agent, self.env.spec, self.sizes, shapes)

    def compile(self) -> None:
        """Compile what acts, once; the other pieces are when first used."""
        if self._compiled is None:
            began = time.perf_counter()
            params = jax.eval_shape(self.agent.actor, self.abstract_state().agent)
            self._compiled = Compiled(self._acting, params, self.devices[0])
            self.compile_seconds += time.perf_counter() - began

    def chunk(self, state: RunState, num_updates: int) -> tuple[RunState, Metrics]:
        """Do `num_updates` iterations; the environments go on where the last chunk left them, or begin anew."""
        self.compile()
        assert self._compiled is not None
        if self._left is None or self._left is not state.update:
            self.close()
            start = self.update_count(state)
            seed = self._seed if self._seed is not None and start == 0 else learner.seed_at(state.key, start)
            self._player = HostPlayer(self.env, seed, 0, self._compiled, state.key)
        self._left = None  # Should this fail, they stand nowhere.
        state, metrics = super().chunk(state, num_updates)
        self._left = state.update
        return state, metrics

    def _iterate(self, state: RunState) -> tuple[RunState, Metrics, Array]:
        assert self._player is not None
        number, learn_key = self.update_count(state), keys.iteration(state.key, state.update).learn
        play = partial(self._player.play, self.agent.actor(state.agent), number, number)
        played = look_after("podium-single", play, self._timeout)
        trajectory = complete(played.trajectory)
        learned = self.learn(learn_key, state.agent, state.replay, trajectory)
        following = RunState(state.key, state.update + 1, learned.state, learned.replay, ())
        metrics = learned.metrics | {name: jnp.float32(x) for name, x in played.sums.items()}
        return following, metrics, program.rollout_finite(self.agent, trajectory)

    def bytes_per_update(self) -> dict[str, int]:
        """Return what moves in an update."""
        params = jax.eval_shape(self.agent.actor, self.abstract_state().agent)
        return self._acting.bytes_moved(params, self.sizes.num_envs)

    def explain(self) -> Explanation:
        """Say in a table and a drawing who runs where, and how many bytes move in an update."""
        roles = [Role("environments", "host CPU", "one thread")]
        roles += [Role(name, device_name(self.devices[0]), "in turn") for name in ("inference", "learning")]
        ways = {"observations": "environments to inference", "actions": "inference to environments"}
        return _explain(roles, [Move(name, ways[name], amount) for name, amount in self.bytes_per_update().items()])

    def close(self) -> None:
        """Release the environments."""
        if self._player is not None:
            self._player.close()
            self._player = None
