"""Time podium.Evolution beside evosax's OpenES, which drives the same rollout: a mode of `benchmark.py`."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import podium
from podium import Env, Program
from podium.agents import ppo
from podium.evaluate import longest_episode, make_evaluator
from podium.evolve import Strategy
from podium.ranges import check_fields
from podium.types import Key


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvolutionFlags:
    """Time evolution in turn with evosax's OpenES (`pip install evosax`; without it, alone), from the same start."""

    env: str = "CartPole-v1"
    """A pure environment; every member plays an episode of it."""
    population: int = 4096
    """Members of a generation."""
    generations: int = 10
    """Generations of a turn."""
    repeats: int = 3
    """Turns of each."""


Turn = Callable[[], tuple[float, float]]
"""Does all generations; returns the seconds they took and the steps that were played."""


def measure(flags: EvolutionFlags) -> dict[str, Any]:
    """Measure; see `EvolutionFlags`. Ratios are those of neighbours in time."""
    check_fields(flags, counts=("population", "generations", "repeats"))
    env = podium.envs.make_pure(flags.env)
    limit = longest_episode(env.spec)
    placement = podium.Evolution(devices=1)
    program = placement.build(
        ppo.make(ppo.Config()), env, num_envs=flags.population, rollout_length=limit, max_updates=flags.generations
    )
    turns: dict[str, Turn] = {"podium": lambda: _podium(program, flags)}
    strategy = placement.strategy(program.agent, env.spec)
    other = _evosax(program, strategy, flags)
    if other is not None:
        turns["evosax"] = other
    evaluations = flags.generations * flags.population
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in turns}
    for _ in range(flags.repeats):
        for name, turn in turns.items():
            found[name].append(turn())
    line: dict[str, Any] = {"what": "evolution", **dataclasses.asdict(flags)}
    line["members_at_once"] = 2 * placement.pairs_at_once(strategy.size, flags.population, program.devices[0])
    for name, results in found.items():
        line[f"{name}_evaluations_per_second"] = statistics.median(evaluations / seconds for seconds, _ in results)
        line[f"{name}_steps_per_second"] = statistics.median(steps / seconds for seconds, steps in results)
        line[f"{name}_seconds"] = [seconds for seconds, _ in results]
    if other is not None:
        per_step = {name: [seconds / steps for seconds, steps in results] for name, results in found.items()}
        pairs = zip(per_step["evosax"], per_step["podium"], strict=True)
        line["ratios_of_steps_per_second"] = [theirs / ours for theirs, ours in pairs]
    return line


def _podium(program: Program, flags: EvolutionFlags) -> tuple[float, float]:
    program.compile()
    state = jax.block_until_ready(program.init(0))
    began = time.perf_counter()
    _, metrics = program.chunk(state, flags.generations)
    return time.perf_counter() - began, float(np.sum(metrics["valid_steps"]))


def _evosax(program: Program, ours: Strategy, flags: EvolutionFlags) -> Turn | None:
    """Return a turn of OpenES with the same parameters, deviation, optimiser and rollout; None where it is missing."""
    try:
        from evosax.algorithms import Open_ES
    except ImportError:
        return None
    start = program.init(0)
    mean = ours.parameters(start.agent)
    strategy = Open_ES(
        population_size=flags.population,
        solution=mean,
        optimizer=optax.adam(ours.learning_rate),
        std_schedule=optax.constant_schedule(ours.sigma),
    )
    assert isinstance(program.env, Env)
    play = make_evaluator(program.agent, program.env, 1, program.sizes.rollout_length)

    @jax.jit
    def generation(key: Key, state: Any) -> tuple[Any, jax.Array]:
        ask, tell, act = jax.random.split(key, 3)
        population, state = strategy.ask(ask, state, strategy.default_params)

        def member(key: Key, parameters: jax.Array) -> dict[str, jax.Array]:
            return play(key, program.agent.actor(ours.with_parameters(start.agent, parameters)))

        played = jax.vmap(member)(jax.random.split(act, flags.population), population)
        state, _ = strategy.tell(tell, population, -played["eval_return"], state, strategy.default_params)
        return state, jnp.sum(played["eval_length"])

    def turn() -> tuple[float, float]:
        state = strategy.init(jax.random.key(0), mean, strategy.default_params)
        for number in range(2):  # Compiles twice: what `init` gives has other types than what `tell` does.
            state, _ = generation(jax.random.key(number), state)
        state = strategy.init(jax.random.key(0), mean, strategy.default_params)
        jax.block_until_ready(state)
        began, steps = time.perf_counter(), 0.0
        for number in range(flags.generations):
            state, played = generation(jax.random.key(number), state)
            steps += float(played)
        return time.perf_counter() - began, steps

    return turn
