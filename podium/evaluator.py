"""Evaluate the policy of a run as it trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from podium import xla
from podium.env import Env
from podium.evaluate import make_evaluator, make_host_evaluator
from podium.host import HostEnvFactory
from podium.placement.contract import Program
from podium.schedule import Schedule
from podium.tally import to_python
from podium.types import PyTree


class Evaluator:
    """Evaluates the current policy on a key stream of its own: the same at the same iteration, whatever went before."""

    def __init__(self, program: Program, env: Env | HostEnvFactory, schedule: Schedule, seed: int):
        several, agent = program.sizes.seeds > 1, program.agent.evaluated
        self.actor = jax.jit(jax.vmap(agent.actor) if several else agent.actor)
        self._function: Any
        self._on_host = isinstance(env, HostEnvFactory)
        if isinstance(env, HostEnvFactory):
            self._function = make_host_evaluator(agent, env, schedule.evaluation.episodes)
        else:
            function = make_evaluator(agent, env, schedule.evaluation.episodes)
            # On one device whatever the mesh: the numbers must not depend on the number of devices.
            self._function = jax.jit(jax.vmap(function, in_axes=(None, 0, None, None)) if several else function)
        self._key = jax.random.fold_in(jax.random.key(seed), 0x65766C)
        self._program, self._schedule = program, schedule

    def compile(self, state: PyTree) -> None:
        """Compile, so that the first call does not; what plays on the CPU compiles as it plays."""
        if self._on_host:
            return
        here = jax.sharding.SingleDeviceSharding(self._program.devices[0])
        shapes = jax.eval_shape(self.actor, self._program.agent_state(state))
        params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), shapes)
        options = xla.options(self._program.devices[0])
        self._function = self._function.lower(self._key, params, np.int32(0), np.bool_(True)).compile(options)

    def __call__(self, state: PyTree, update: int, stop: Callable[[], bool]) -> dict[str, Any]:
        """Return the evaluation of `state`; nothing where `stop` says to end it, which only the CPU hears.

        Play is greedy. After the last iteration it is sampled too, as in training, from the same first states:
        `eval_return_sampled`. Where its episodes may be longer than those before, `eval_return_cut` is what they gain
        until these would be cut: what checkpoints are compared by.
        """
        params = self.actor(self._program.agent_state(state))
        params = jax.device_put(params, self._program.devices[0])
        key, most = jax.random.fold_in(self._key, update), self._schedule.max_eval_steps(update)

        def play(greedy: bool, most: int = most) -> Any:
            if self._on_host:
                return self._function(key, params, most, greedy, stop)
            return self._function(key, params, np.int32(most), np.bool_(greedy))

        played = play(greedy=True)
        if played is None:
            return {}
        metrics = dict(played)
        if update == self._schedule.total:
            further = {"eval_return_sampled": play(greedy=False)}
            if self._schedule.ends_longer:
                further["eval_return_cut"] = play(True, self._schedule.evaluation.max_steps)
            if None in further.values():
                return {}
            metrics |= {name: each["eval_return"] for name, each in further.items()}
        return to_python(metrics) | {"eval_episodes": self._schedule.evaluation.episodes, "eval_max_steps": most}
