"""Train one agent, unchanged, under every placement, and put the rows side by side.

    python experiments/placements.py                                   # PPO on Catch, two (virtual) devices
    python experiments/placements.py --agent dqn --json placements.json --seed 1
    python experiments/placements.py --placements anakin evolution --env CartPole-v1 --num-steps 500000

`return` is of greedy play, 128 episodes after training; `training` is that of the last row, as acted. Steps a second
leave compiling and evaluating out; they are those of a small environment, where what a placement costs shows most. A
Population's returns are means over its members, its steps those of one member, its steps a second those of all.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

import podium
from podium import Agent, Placement, Program
from podium.agents import a2c, apex, dqn, impala, ppo
from podium.commands.console import guard, read_flags
from podium.files import write_json
from podium.placement import PLACEMENTS, find

IDLE = ("actor_idle", "learner_idle", "worker_idle", "server_idle")
OPTIMA = {"podium/Catch": 1.0, "CartPole-v1": 500.0}


@dataclasses.dataclass(frozen=True)
class Setting:
    """An agent with the sizes that it trains with on Catch."""

    agent: Agent
    num_envs: int
    rollout_length: int
    num_steps: int


def settings(name: str) -> Setting:
    """Return the agent of this name."""
    if name == "ppo":
        return Setting(ppo.make(ppo.Config(learning_rate=1e-3)), 64, 32, 200_000)
    if name == "a2c":
        return Setting(a2c.make(a2c.Config(learning_rate=2e-3)), 32, 16, 300_000)
    if name == "impala":
        return Setting(impala.make(impala.Config(learning_rate=2e-3)), 32, 16, 300_000)
    replay: dict[str, Any] = {"learning_rate": 1e-3, "buffer_capacity": 20_000}
    return Setting(
        apex.make(apex.Config(**replay)) if name == "apex" else dqn.make(dqn.Config(**replay)), 16, 1, 100_000
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """What to train, and where."""

    agent: Literal["ppo", "a2c", "impala", "dqn", "apex"] = "ppo"
    """The agent; the same under every placement."""
    env: str = "podium/Catch"
    """A pure environment; `Sebulba` and `CentralInference` run it on the host."""
    placements: tuple[str, ...] = tuple(PLACEMENTS)
    """Rows, by names in the registry."""
    devices: int = 2
    """Devices; on a CPU, more than there are are virtual ones."""
    num_steps: int | None = None
    """Environment steps of each row, of Evolution one generation at least; None takes what Catch needs."""
    seed: int = 0
    """Of every row."""
    json: Path | None = None
    """File for the rows."""


def main(argv: Sequence[str] | None = None) -> int:
    """Train every row, print the table, and return the exit code."""
    given = sys.argv[1:] if argv is None else argv
    return guard(lambda: _train_all(read_flags(Flags, given, description=__doc__)))


def _train_all(flags: Flags) -> int:
    podium.request_devices(flags.devices)  # Before anything starts JAX.
    rows: list[dict[str, Any]] = []
    for name in [find(name) for name in flags.placements]:
        rows.append(train(flags, name))
        print(f"{rows[-1]['placement']}: return {rows[-1]['episode_return']:.3g}", file=sys.stderr, flush=True)
        if flags.json:
            write_json(flags.json, rows)
    print(table(rows))
    return 0


def placement(name: str, agent: str, devices: int) -> Placement:
    """Return the placement of a row: workers where it has them are four, or one a device where there are more."""
    workers = 4 if 4 % devices == 0 else devices
    apart = max(1, devices - 1)
    own: dict[str, dict[str, Any]] = {
        "anakin": {"devices": devices},
        "sebulba": {"actor_devices": 1, "learner_devices": apart},
        "central_inference": {"devices": devices},
        "distributed_actors": {"workers": workers, "actor_devices": 1, "learner_devices": apart},
        "parameter_server": {"workers": workers, "devices": devices},
        "local_sgd": {"workers": workers, "devices": devices},
        "evolution": {"devices": devices},
        "population": {"members": workers, "space": {"learning_rate": podium.log_range(1e-4, 1e-2, workers)}},
    }
    if agent in ("dqn", "apex"):
        # Its last layer is not small at the start, so that it takes more noise to change what is greedy.
        own["evolution"] |= {"sigma": 0.2, "learning_rate": 0.05, "weight_decay": 0.005}
    return PLACEMENTS[name](**own.get(name, {}))


def train(flags: Flags, name: str) -> dict[str, Any]:
    """Train under one placement and return its row."""
    setting, env = settings(flags.agent), podium.envs.make_pure(flags.env)
    where = placement(name, flags.agent, flags.devices)
    sizes: dict[str, Any] = {"num_envs": setting.num_envs, "rollout_length": setting.rollout_length}
    num_steps = flags.num_steps or setting.num_steps
    if where.whole_episodes:
        limit = env.spec.max_episode_steps or setting.rollout_length
        population, generations = (2048, 110) if flags.agent in ("dqn", "apex") else (1024, 60)
        sizes, generation = {"num_envs": population, "rollout_length": limit}, population * limit
        num_steps = max(flags.num_steps or generations * generation, generation)
    moved: dict[str, int] = {}

    def note(program: Program, schedule: Any) -> None:
        moved.update(program.bytes_per_update())

    result = podium.train(
        setting.agent,
        env,
        num_steps=num_steps,
        placement=where,
        seed=flags.seed,
        eval_every=0,
        progress=False,
        announce=note,
        **sizes,
    )
    last = result.metrics[-1]
    idle: dict[str, Any] = {key: last[key] for key in IDLE if key in last}
    return {
        "placement": type(where).__name__,
        "agent": flags.agent,
        "env": flags.env,
        "devices": flags.devices,
        "seed": flags.seed,
        "env_steps": result.summary["env_steps"],
        "episode_return": float(np.mean(result.summary["eval_return"])),
        "training_return": float(np.mean(last["episode_return"])),
        "optimum": OPTIMA.get(flags.env),
        "steps_per_second": result.summary["steps_per_second"],
        "policy_lag_mean": last.get("policy_lag_mean", 0.0),
        "policy_lag_max": last.get("policy_lag_max", 0.0),
        "bytes_per_update": sum(moved.values()),
        "bytes": moved,
        **idle,
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as Markdown."""
    lines = ["| placement | return | training | steps/s | lag mean, most | bytes an update | waiting |"]
    lines.append("|---|---:|---:|---:|---:|---:|---|")
    for row in rows:
        idle = [f"{key.removesuffix('_idle')} {100 * row[key]:.0f}%" for key in row if key.endswith("_idle")]
        cells = (
            *(row["placement"], f"{row['episode_return']:.3g}", f"{row['training_return']:.3g}"),
            *(f"{row['steps_per_second']:,.0f}", f"{row['policy_lag_mean']:.1f}, {row['policy_lag_max']:.0f}"),
            *(f"{row['bytes_per_update']:,}", ", ".join(idle)),
        )
        lines.append(f"| {' | '.join(cells)} |")
    first = rows[0]
    optimum = "" if first["optimum"] is None else f", optimum {first['optimum']:g}"
    return "\n".join([f"{first['agent']} in {first['env']} on {first['devices']} devices{optimum}:", "", *lines])


if __name__ == "__main__":
    sys.exit(main())
