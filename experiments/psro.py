"""Solve a small game by PSRO with PPO's best responses, and say how much its mixture can be exploited.

    python experiments/psro.py --env podium/Kuhn --seed 0 --run-dir runs/psro

`summary.json` says `exploitability`, that before each response, the mixture's weights and all payoffs.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import podium
from podium import agents, envs, games
from podium.commands.console import guard, read_flags, read_options
from podium.files import write_json


@dataclasses.dataclass(frozen=True)
class Flags:
    """Solve a game by responses to mixtures of responses."""

    env: str = "podium/Kuhn"
    """A game of two players in turn."""
    agent: str = "ppo"
    """Agent that responds, by a name of podium.agents.names()."""
    config: tuple[str, ...] = ("learning_rate=3e-3", "gamma=1.0", "entropy_coef=0.1", "hidden_sizes=(64,)")
    """Fields of its configuration, each NAME=VALUE; the rate falls over each response where --anneal says so."""
    anneal: bool = True
    """Whether the learning rate falls to zero over each response."""
    iterations: int = 12
    """Responses."""
    num_steps: int = 200_000
    """Plies of each response's training."""
    num_envs: int = 64
    """Environments side by side."""
    seed: int = 0
    """Fixes everything random."""
    run_dir: Path = Path("runs/psro")
    """Folder of the run."""
    resume: bool = False
    """Resume the run in --run-dir."""


def main(argv: Sequence[str] | None = None) -> int:
    """Solve, and judge; return the exit code."""
    return guard(lambda: _main(sys.argv[1:] if argv is None else argv))


def _main(argv: Sequence[str]) -> int:
    flags = read_flags(Flags, argv, description=(__doc__ or "").split("\n")[0])
    config = read_options(flags.config, "--config")
    if flags.anneal:
        config["anneal_steps"] = flags.num_steps // 2  # A response counts its own moves, half of the plies.
    began, agent = time.monotonic(), agents.make(flags.agent, config)
    show = lambda number, found: print(f"  after {number:2d} responses   {found:.4f}", flush=True)
    found = games.psro(
        envs.make_pure(flags.env),
        agent,
        iterations=flags.iterations,
        num_steps=flags.num_steps,
        num_envs=flags.num_envs,
        seed=flags.seed,
        progress=show,
        run_dir=flags.run_dir,
        resume=flags.resume,
    )
    summary = {
        "exploitability": found.exploitability[-1],
        "exploitability_before_each": found.exploitability,
        "weights": found.weights.tolist(),
        "payoffs": found.payoffs.tolist(),
        "env_steps": flags.iterations * flags.num_steps,
        "wall_seconds": time.monotonic() - began,
        "seed": flags.seed,
        "podium": podium.__version__,
    }
    write_json(flags.run_dir / "summary.json", summary)
    print(json.dumps({"exploitability": summary["exploitability"]}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
