"""Step every environment of the suites as training does, and print a table of what each is and how fast.

    python experiments/suites.py                          # all of them, three quarters of an hour
    python experiments/suites.py mjx/ brax/ant --check    # some, put to podium.testing.check_env too

Each is stepped with random legal actions and reset automatically, 64 side by side in one `jax.lax.scan`; a step is one
of all agents. Compile times and rates are per second of CPU time, all threads together, so that other work on the
machine hardly shows.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import tyro

from podium import envs, games, testing
from podium.commands.console import guard, read_flags
from podium.env import Env, auto_reset
from podium.seen import legal_of
from podium.types import ArraySpec, DiscreteSpec

PREFIXES = ("brax/", "mjx/", "craftax/", "xminigrid/", "jumanji/", "pgx/", "jaxmarl/")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Step the environments of the suites."""

    names: Annotated[tuple[str, ...], tyro.conf.Positional] = PREFIXES
    """Beginnings of their names."""
    num_envs: int = 64
    """Environments side by side."""
    steps: int = 100
    """Steps of each in one call of the program."""
    seconds: float = 2.0
    """Of CPU time, that a rate is measured for at least."""
    check: bool = False
    """Put each to podium.testing.check_env too, and stop at the first that breaks its contract."""
    out: Path | None = None
    """File of one JSON object an environment, which another start goes on with."""


def table(flags: Flags) -> int:
    """Measure, and print a table in Markdown."""
    lines = flags.out.read_text().splitlines() if flags.out and flags.out.exists() else []
    known = {row["name"]: row for row in map(json.loads, lines)}
    names = [name for name in envs.names() if name.startswith(PREFIXES) and name.startswith(flags.names)]
    if not names:
        raise ValueError(f"no environment of the suites begins with {' or '.join(flags.names)}; try mjx/.")
    print("| environment | observation | actions | limit | pool | compile, CPU-s | steps/CPU-s |")
    print("|---|---|---|---|---|---|---|")
    for name in names:
        row = known.get(name) or measure(name, flags)
        if flags.out and name not in known:
            with flags.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
        print("| " + " | ".join(map(str, row.values())) + " |", flush=True)
    return 0


def measure(name: str, flags: Flags) -> dict[str, Any]:
    """Return the row of an environment."""
    env: Any = envs.make(name)
    row = {
        "name": name,
        "observation": _describe(env.spec.obs),
        "actions": _describe(env.spec.action),
        "limit": env.spec.max_episode_steps or "none",
        "pool": env.pool_size or "fresh",
    }
    compile_seconds, rate = speed(env, flags)
    if flags.check:
        testing.check_env(env)
    return row | {"compile": round(compile_seconds), "rate": f"{float(f'{rate:.2g}'):,.0f}"}


def speed(env: Env, flags: Flags) -> tuple[float, float]:
    """Return the seconds that compiling takes, pool and all, and the steps in a second, both of CPU time."""
    began = time.process_time()
    env = auto_reset(env)

    def draw(keys: Any, obs: Any) -> Any:
        return jax.vmap(env.spec.action.sample)(keys) if legal_of(obs) is None else games.uniform(keys, obs)

    def step(before: Any, key: Any) -> Any:
        states, obs = before
        action_keys, step_keys = (jax.random.split(each, flags.num_envs) for each in jax.random.split(key))
        states, timestep = jax.vmap(env.step)(step_keys, states, draw(action_keys, obs))
        return (states, timestep.obs), timestep.reward

    play = jax.jit(lambda states, key: jax.lax.scan(step, states, jax.random.split(key, flags.steps)))
    states, timestep = jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.key(0), flags.num_envs))
    states = states, timestep.obs
    compiled = play.lower(states, jax.random.key(1)).compile()
    jax.block_until_ready(states)
    compile_seconds = time.process_time() - began
    began, calls = time.process_time(), 0
    while calls == 0 or time.process_time() - began < flags.seconds:
        states, rewards = jax.block_until_ready(compiled(states, jax.random.key(calls)))
        calls += 1
    return compile_seconds, calls * flags.steps * flags.num_envs / (time.process_time() - began)


def _describe(spec: Any) -> str:
    if isinstance(spec, DiscreteSpec):
        return "x".join(map(str, (*spec.shape, spec.num_values))) + " discrete"
    if isinstance(spec, ArraySpec):
        return "x".join(map(str, spec.shape)) or "1"
    return f"{len(spec)} arrays, {sum(math.prod(leaf.shape) for leaf in _leaves(spec))} numbers"


def _leaves(spec: Any) -> list[Any]:
    return jax.tree.leaves(spec, is_leaf=lambda leaf: isinstance(leaf, ArraySpec | DiscreteSpec))


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, and return the exit code."""
    return guard(lambda: table(read_flags(Flags, sys.argv[1:] if argv is None else argv)))


if __name__ == "__main__":
    sys.exit(main())
