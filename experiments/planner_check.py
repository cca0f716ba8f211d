"""Hold the planner's choice against every placement, each run for real: one JSON object a pair, a line.

    python experiments/planner_check.py                                # all pairs, in some minutes
    python experiments/planner_check.py --pairs update --turns 15 --json planner.json

Each pair of an agent and an environment is bound by another stage: `environment` by a pure environment that multiplies
matrices in every step, `inference` by DQN with a large network that acts often and learns seldom, `update` by PPO with
a large network, `host` by environments on the host that sleep. `ratio` is the median rate of the placement that the
planner chose over that of the fastest: 1 where it chose that one.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import cli
import jax
import numpy as np

import podium
from podium.agent import Agent
from podium.agents import dqn, impala, ppo
from podium.env import Env
from podium.files import write_json
from podium.host import HostEnv, HostEnvs, on_host
from podium.planner.candidates import CANDIDATES, call
from podium.planner.race import MOST_UPDATES, race
from podium.types import Array, Key, PyTree, TimeStep

Name = Literal["environment", "inference", "update", "host"]
FILL = 1024
"""Steps in a replay before anything is learnt from it."""

NAMES: tuple[Name, ...] = ("environment", "inference", "update", "host")


class Pair(NamedTuple):
    """An agent in an environment, and its sizes."""

    agent: Agent
    env: Env | HostEnvs
    num_envs: int
    rollout_length: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """What to check, and how long."""

    pairs: tuple[Name, ...] = NAMES
    """Pairs of agent and environment."""
    devices: int = 1
    """Devices; on a CPU, more than there are are virtual ones."""
    seconds: float = 0.5
    """That each stage, and each turn of a run, is timed for, about."""
    top: int = 2
    """How many of the best the planner runs."""
    turns: int = 9
    """Timed turns of every placement, one after another; medians count."""
    seed: int = 0
    """Of everything random."""
    json: Path | None = None
    """File for the rows."""


def pair(name: Name) -> Pair:
    """Return the pair of this name."""
    catch, large = podium.envs.make("podium/Catch"), (1024, 1024)
    if name == "environment":
        return Pair(ppo.make(ppo.Config(hidden_sizes=(16,), num_epochs=1, num_minibatches=1)), slow(catch, 96), 16, 16)
    if name == "inference":
        config = dqn.Config(
            hidden_sizes=large, batch_size=32, num_updates=1, min_replay_size=1024, buffer_capacity=8192
        )
        return Pair(dqn.make(config), catch, 64, 16)
    if name == "update":
        return Pair(ppo.make(ppo.Config(hidden_sizes=large)), catch, 16, 16)
    return Pair(impala.make(impala.Config(hidden_sizes=(16,))), sleeping(on_host(catch), 0.004), 32, 16)


def slow(env: Env, size: int) -> Env:
    """Return a pure environment whose every step multiplies matrices of `size` ten times first."""

    def step(key: Key, state: PyTree, action: Array) -> tuple[PyTree, TimeStep]:
        matrix = jax.random.normal(key, (size, size)) / size**0.5
        product = jax.lax.fori_loop(0, 10, lambda _, x: matrix @ x, matrix)
        state, timestep = env.step(key, state, action)
        # Never so large; but the compiler does not know.
        return state, timestep._replace(reward=timestep.reward + (product[0, 0] > 1e30))

    return env._replace(step=step)


def sleeping(envs: HostEnvs, seconds: float) -> HostEnvs:
    """Return host environments whose every step takes at least `seconds` after it was sent, of no core's time."""

    def make(num_envs: int, seed: int, first: int) -> HostEnv:
        return _Sleeping(envs.make(num_envs, seed, first), seconds)

    return dataclasses.replace(envs, make=make)


class _Sleeping:
    """A batch of host environments that takes its time."""

    def __init__(self, inner: HostEnv, seconds: float):
        self.spec, self.num_envs, self._inner, self._seconds = inner.spec, inner.num_envs, inner, seconds
        self.reset, self.close, self._due = inner.reset, inner.close, 0.0

    def send(self, action: np.ndarray) -> None:
        self._due = time.perf_counter() + self._seconds
        self._inner.send(action)

    def recv(self) -> TimeStep:
        timestep = self._inner.recv()
        time.sleep(max(0.0, self._due - time.perf_counter()))
        return timestep


def main(argv: Sequence[str] | None = None) -> int:
    """Check every pair and return the exit code."""
    given = sys.argv[1:] if argv is None else argv
    return cli.guard(lambda: _check_all(cli.read_flags(Flags, given, description=__doc__)))


def _check_all(flags: Flags) -> int:
    podium.request_devices(flags.devices)  # Before anything starts JAX.
    cli.use_compilation_cache()  # What the planner ran is built again.
    rows = []
    for name in flags.pairs:
        rows.append(check(name, flags))
        print(json.dumps(rows[-1]), flush=True)
        if flags.json:
            write_json(flags.json, rows)
    return 0


def check(name: Name, flags: Flags) -> dict[str, Any]:
    """Plan for a pair, measure all that can run, and return the row."""
    agent, env, num_envs, length = pair(name)
    sizes: dict[str, Any] = {"num_envs": num_envs, "rollout_length": length}
    began = time.perf_counter()
    say = lambda line: print(f"{time.perf_counter() - began:6.1f} s  {line}", file=sys.stderr, flush=True)  # noqa: E731
    names = [candidate.name for candidate in CANDIDATES if candidate.alike]
    given: dict[str, Any] = {"devices": flags.devices, "seconds": flags.seconds, "top": flags.top, "seed": flags.seed}
    forecast = podium.plan(agent, env, placements=names, say=say, **given, **sizes)
    planned = time.perf_counter() - began
    print(forecast, file=sys.stderr, flush=True)
    runnable = [row for row in forecast.rows if row.predicted is not None]
    programs = {
        row.call: row.placement.build(agent, env, max_updates=MOST_UPDATES, **sizes)
        for row in runnable
        if row.placement is not None
    }
    rates = race(programs, flags.seconds, flags.turns, -(-FILL // (num_envs * length)), flags.seed, say)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    fastest = max(medians, key=lambda name: medians[name])
    chosen = call(forecast.placement)
    first = max(runnable, key=lambda row: row.predicted or 0.0).call
    return {
        "pair": name,
        "agent": agent.name,
        "env": env.spec.name,
        **sizes,
        "devices": flags.devices,
        "cores": forecast.cores,
        "bound_by": next(row.bottleneck for row in forecast.rows if row.call == chosen),
        "chosen": chosen,
        "fastest": fastest,
        "ratio": medians[chosen] / medians[fastest],
        "predicted_best": first,
        "ratio_of_predicted_best": medians[first] / medians[fastest],
        "predicted": {row.call: row.predicted for row in runnable},
        "measured": medians,
        "turns": rates,
        "plan_seconds": planned,
    }


if __name__ == "__main__":
    sys.exit(main())
