"""Single: everything in one place and one loop at a time, to be read and to be held against.

The same arithmetic as every synchronous placement, with Python loops where they have compiled ones. Over environments
on the CPU it is the loop of DQN (Mnih et al. 2013): act, step, and now and then learn, each waiting for the other.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podium import keys
from podium.agent import Agent
from podium.compiling import run_once
from podium.env import Env
from podium.finite import chunk_finite, rollout_finite
from podium.host import HostEnvFactory
from podium.learn import PYTHON, learn
from podium.placement.actors.actor import make_acting
from podium.placement.compiled.iteration import resolve_lanes, start
from podium.placement.contract import (
    ACTING,
    EPISODES_RESTART,
    Acting,
    Actor,
    Asked,
    MakeActor,
    Placement,
    Program,
    RunState,
    Sizes,
    update_count,
)
from podium.placement.threads.supervision import supervise
from podium.ranges import check_fields
from podium.report import NEVER, Move, Report, Role, device_name
from podium.rollout import with_gap
from podium.types import Metrics


@dataclasses.dataclass(frozen=True)
class Single(Placement):
    """Run everything on the first device, step by step in Python: the readable oracle.

    Args:
      actor_timeout: seconds without a step after which environments on the CPU count as hung, and the run ends.
    """

    actor_timeout: float = 60.0

    def program(self, agent: Agent, env: Env | HostEnvFactory, asked: Asked) -> Program:
        """Return the program; see `Placement.program`."""
        num_envs, rollout_length = asked.num_envs, asked.rollout_length
        check_fields(self, positive=("actor_timeout",))
        acting = make_acting(agent, env, num_envs, rollout_length)
        lanes = resolve_lanes(acting, num_envs, rollout_length, requested=asked.num_lanes)
        timeout = self.actor_timeout if acting.on_host else None
        loop = SingleLoop(acting, Sizes(num_envs, rollout_length, 1, lanes), timeout)
        moves = lambda: acting.bytes_moved(num_envs)
        report, layout = partial(self._explain, num_envs), "HostSingle" if acting.on_host else "Single"
        loses = EPISODES_RESTART if acting.on_host else ""
        return Program(
            agent, acting.env, loop.sizes, [loop.device], loop, layout, moves, report, ACTING, resume_loses=loses
        )

    def _explain(self, num_envs: int | None, amounts: Mapping[str, int | None]) -> Report:
        title, device = "Single: Python loops, to be read and to be held against.", device_name(jax.devices()[0])
        roles = [Role("everything", device, "environments, inference and learning in turn")]
        if amounts:  # Of environments on the CPU.
            roles = [Role("environments", "host CPU", "one thread")]
            roles += [Role(name, device, "in turn") for name in ("inference", "learning")]
        ways = {"observations": "environments to inference", "actions": "inference to environments"}
        moves = [Move(name, ways[name], amount) for name, amount in amounts.items()]
        return Report(title, roles, moves, stale=NEVER, waits="everything for what comes before it; one at a time.")


class SingleLoop:
    """A `Loop` in Python: play, learn, and again.

    Args:
      timeout: seconds without a heartbeat after which the actor counts as hung; None plays in this thread.
    """

    def __init__(self, acting: Acting, sizes: Sizes, timeout: float | None):
        self.sizes, self.device, self.compile_seconds = sizes, jax.devices()[0], 0.0
        self._acting, self._timeout = acting, timeout
        self._start = partial(start, acting=acting, sizes=sizes)
        self._agent = _jitted(acting.agent)
        self._make_actor: MakeActor | None = None
        self._actor: Actor | None = None
        self._anew = False  # Whether the environments on the CPU have begun since what was learnt last.
        self._seed: int | None = None
        self._last: Any = None

    def update(self, state: RunState, number: int) -> tuple[RunState, Metrics, Any]:
        """Play a rollout with the current policy, and learn from it."""
        assert self._actor is not None
        agent, learn_key = self._agent, keys.iteration(state.key, state.update).learn
        play = partial(self._actor.play, agent.actor(state.agent), number, number)
        experience = supervise("podium-single", play, self._timeout)
        assert experience.rollout is not None
        rollout = with_gap(experience.rollout, self._anew) if self._acting.on_host else experience.rollout
        trajectory, self._anew = rollout.trajectory(), False
        learned = learn(learn_key, agent, state.agent, state.replay, trajectory, self.sizes.num_lanes, PYTHON)
        state = RunState(state.key, state.update + 1, learned.state, learned.replay, self._actor.standing)
        metrics = learned.metrics | {name: jnp.float32(x) for name, x in experience.stats.items()}
        return state, metrics, rollout_finite(agent, trajectory)

    def chunk(self, state: RunState, num_updates: int) -> tuple[RunState, Metrics]:
        """Do `num_updates` iterations; the environments stand where `state` says, or where the last chunk left them."""
        self.compile()
        assert self._make_actor is not None
        first = update_count(state)
        if self._actor is None or self._last is not state.update:
            self.close()
            seed = keys.episode_seed(self._seed, state.key, first)
            self._actor, self._anew = self._make_actor(state.key, seed, 0, state.rollout), True
        self._last = None  # Should this fail, the environments stand nowhere.
        rows, finite = [], np.ones(self.sizes.num_envs, bool)
        for number in range(first, first + num_updates):
            state, metrics, new_finite = self.update(state, number)
            rows.append(jax.device_get(metrics))
            finite &= np.asarray(new_finite)
        self._last = state.update
        stacked = jax.tree.map(lambda *x: np.stack(x), *rows)
        return state, {**stacked, "finite": np.asarray(chunk_finite(state.agent, jnp.asarray(finite)))}

    def init(self, seed: int) -> RunState:
        """Return the first state, compiled as others compile theirs.

        What is drawn may end in another bit otherwise, of which an orthogonal matrix makes more (2.4e-5 was seen).
        """
        self._seed = seed
        return run_once(self._start, None)(jax.random.key(seed))

    def abstract_state(self) -> RunState:
        """Return the state's shapes and dtypes."""
        return jax.eval_shape(self._start, jax.random.key(0))

    def lower(self) -> None:
        """Do nothing: the functions are traced when first used."""

    def compile(self) -> None:
        """Compile what acts, once; the other functions are when first used."""
        if self._make_actor is None:
            began, acting = time.perf_counter(), self._acting
            self._make_actor = acting.in_python(acting.params_shapes(), self.device)
            self.compile_seconds += time.perf_counter() - began

    def close(self) -> None:
        """Release the environments."""
        if self._actor is not None:
            self._actor.close()
            self._actor = None


def _jitted(agent: Agent) -> Agent:
    """Return the agent with every function compiled alone."""

    def alone(functions: Any, *names: str) -> dict[str, Any]:
        return {name: jax.jit(getattr(functions, name)) for name in names if getattr(functions, name) is not None}

    replay = agent.replay and agent.replay._replace(**alone(agent.replay, "add", "sample", "update_priorities"))
    act = jax.jit(agent.act, static_argnums=5)
    return agent._replace(replay=replay, act=act, **alone(agent, "plan", "grad", "apply"))
