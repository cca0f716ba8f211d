"""The time from the first step of PPO under Anakin to a threshold."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import statistics
import time
from typing import Any

import jax

import podium
from podium import xla
from podium.agents import ppo
from podium.evaluate import make_evaluator
from podium.ranges import check_fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class SolveFlags:
    """Time PPO from its first step until an evaluation reaches a threshold, one seed after another."""

    env: str = "CartPole-v1"
    """Environment, by a name of podium.envs.names()."""
    threshold: float = 475.0
    """Mean greedy return over 128 episodes that counts as solved."""
    runs: int = 5
    """Seeds: 0, 1, ..."""
    num_envs: int = 16
    """Environments side by side."""
    rollout_length: int = 64
    """Steps of every environment before each learning phase."""
    epochs: int = 4
    """Passes over each rollout."""
    minibatches: int = 4
    """Parts of one pass, a gradient step each."""
    learning_rate: float = 2.5e-3
    """Adam's step size."""
    eval_every: int = 16_384
    """Environment steps between evaluations."""
    num_steps: int = 500_000
    """Environment steps after which a seed counts as not solved."""


def measure(flags: SolveFlags) -> dict[str, Any]:
    """Measure the time to a threshold; see `SolveFlags`."""
    check_fields(flags, counts=("runs", "eval_every", "num_steps"))
    config = ppo.Config(learning_rate=flags.learning_rate, num_epochs=flags.epochs, num_minibatches=flags.minibatches)
    agent, env = ppo.make(config), podium.envs.make_pure(flags.env)
    updates = max(1, flags.eval_every // (flags.num_envs * flags.rollout_length))
    program = podium.Anakin(devices=1).build(
        agent, env, num_envs=flags.num_envs, rollout_length=flags.rollout_length, max_updates=updates
    )
    began = time.perf_counter()
    program.lower()
    with concurrent.futures.ThreadPoolExecutor(1) as thread:  # As podium.train does.
        compiled = thread.submit(program.compile)
        state = program.init(0)
        evaluate = jax.jit(
            lambda key, state: make_evaluator(agent, env, 128)(key, agent.actor(state))["eval_return"],
            compiler_options=xla.options(program.devices[0]),
        )
        jax.block_until_ready(evaluate(jax.random.key(0), state.agent))
        compiled.result()
    compile_seconds = time.perf_counter() - began
    seconds, steps = [], []
    for seed in range(flags.runs):
        state = jax.block_until_ready(program.init(seed))
        began, solved = time.perf_counter(), False
        while not solved and program.update_count(state) * program.sizes.steps_per_update < flags.num_steps:
            state, _ = program.chunk(state, updates)
            solved = float(evaluate(jax.random.key(program.update_count(state)), state.agent)) >= flags.threshold
        seconds.append(time.perf_counter() - began if solved else None)
        steps.append(program.update_count(state) * program.sizes.steps_per_update)
    solved_in = [second for second in seconds if second is not None]
    return {
        "what": "solve",
        **dataclasses.asdict(flags),
        "seconds": seconds,
        "env_steps": steps,
        "solved": len(solved_in),
        "median_seconds": statistics.median(solved_in) if len(solved_in) == flags.runs else None,
        "compile_seconds": compile_seconds,
    }
