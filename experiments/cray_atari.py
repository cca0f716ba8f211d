"""Fill the Cray table: IMPALA, PPO and A2C on four Atari games, 10M steps each, beside the published figures.

    python experiments/cray_atari.py                                     # twelve runs, one after another
    python experiments/cray_atari.py --agents impala --games Qbert -- --actor-threads 4
    python experiments/cray_atari.py --smoke                             # all of it in a minute or two; learns nothing

Each cell is a run of `AGENT_sebulba.py` with its Atari preset and an episode a life, in a run folder of its own; what
follows `--` goes to every one of them. Given again, the command goes on where it was stopped, and leaves out what has
ended. After every cell `table.md` and `table.json` are written. Ape-X comes later.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import a2c_sebulba
import impala_sebulba
import ppo_sebulba

from podium.commands.console import guard, read_flags
from podium.files import write_atomic, write_json

SCRIPTS = {"impala": impala_sebulba, "ppo": ppo_sebulba, "a2c": a2c_sebulba}
Game = Literal["BeamRider", "Breakout", "Qbert", "SpaceInvaders"]
GAMES: tuple[Game, ...] = ("BeamRider", "Breakout", "Qbert", "SpaceInvaders")

PUBLISHED = {
    ("impala", "BeamRider"): (2173, "28 min"),
    ("impala", "Breakout"): (374, "28 min"),
    ("impala", "Qbert"): (1077, "28 min"),
    ("impala", "SpaceInvaders"): (747, "28 min"),
    ("a2c", "Qbert"): (15_101, "1 h 36 min"),
    ("ppo", "Qbert"): (12_775, "2 h 24 min"),
}
"""Rewards after 10M steps and about how long they took; A2C and PPO on 8 GPUs."""

SMOKE_STEPS = 64
SMOKE = (
    "max_episode_frames=400 full_action_space=True --num-envs 4 --rollout-length 8 --torso nature_cnn "
    "--hidden-sizes 16 --eval-every 0 --eval-episodes 1 --no-progress"
).split()
"""Options of the environment, then flags over those of the presets: small, and one program an agent for all games."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Which cells of the table to fill."""

    agents: tuple[Literal["impala", "ppo", "a2c"], ...] = ("impala", "ppo", "a2c")
    """Rows."""
    games: tuple[Game, ...] = GAMES
    """Columns."""
    num_steps: int = 10_000_000
    """Environment steps of each cell."""
    seed: int = 0
    """Of every run."""
    folder: Path = Path("runs/cray-atari")
    """Folder for a run folder a cell, and for the table."""
    smoke: bool = False
    """Run every cell for a moment, to see that all of it works."""


def main(argv: Sequence[str] | None = None) -> int:
    """Fill the table, and return the exit code: that of the first run that was stopped or failed."""
    given = list(sys.argv[1:] if argv is None else argv)
    at = given.index("--") if "--" in given else len(given)
    return guard(lambda: _fill(read_flags(Flags, given[:at], description=__doc__), given[at + 1 :]))


def _fill(flags: Flags, further: list[str]) -> int:
    rows = []
    for agent in flags.agents:
        for game in flags.games:
            code = _run(flags, agent, game, further)
            if code:
                return code
            rows.append(_row(_folder(flags, agent, game), agent, game))
            flags.folder.mkdir(parents=True, exist_ok=True)
            write_json(flags.folder / "table.json", rows)
            write_atomic(flags.folder / "table.md", f"{table(rows)}\n".encode())
    print(table(rows))
    return 0


def _folder(flags: Flags, agent: str, game: str) -> Path:
    return flags.folder / f"{agent}-{game}"


def _run(flags: Flags, agent: str, game: str, further: list[str]) -> int:
    """Train one cell, or go on with it, or leave it as it ended."""
    folder = _folder(flags, agent, game)
    num_steps = SMOKE_STEPS if flags.smoke else flags.num_steps
    if _has_ended(folder, num_steps):
        print(f"{folder}: done before")
        return 0
    argv = f"--env {game}-v5 --preset atari-{agent} --num-steps {num_steps} --seed {flags.seed}".split()
    argv += ["--env-options", "life_loss=True", *(SMOKE if flags.smoke else []), *further, "--run-dir", str(folder)]
    return SCRIPTS[agent].main([*argv, *(["--resume"] if folder.exists() else [])])


def _has_ended(folder: Path, num_steps: int) -> bool:
    summary = folder / "summary.json"
    if not summary.exists():
        return False
    found = json.loads(summary.read_text())
    # The last rollout that would not be whole is left.
    return not found["interrupted"] and found["env_steps"] > 0.999 * num_steps


def _row(folder: Path, agent: str, game: str) -> dict[str, Any]:
    """Return what a run reached, beside what is published."""
    summary = json.loads((folder / "summary.json").read_text())
    reward, time = PUBLISHED.get((agent, game), (None, None))
    return {
        "agent": agent,
        "game": game,
        "env_steps": summary["env_steps"],
        "eval_return": summary["eval_return"],
        "episode_return": summary["episode_return"],
        "wall_seconds": summary["wall_seconds"],
        "steps_per_second": summary["steps_per_second"],
        "devices": f"{summary['num_devices']} {summary['platform']}",
        "published_reward": reward,
        "published_time": time,
        "run": folder.name,
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as Markdown."""
    head = "| agent | game | steps | evaluation | training | minutes | steps/s | learning on | published | in |"
    lines = [head, "|---|---|---:|---:|---:|---:|---:|---|---:|---|"]
    for row in rows:
        training = "" if row["episode_return"] is None else f"{row['episode_return']:,.0f}"
        published = "" if row["published_reward"] is None else f"{row['published_reward']:,}"
        cells = (
            *(row["agent"], row["game"], f"{row['env_steps']:,}", f"{row['eval_return']:,.0f}", training),
            *(f"{row['wall_seconds'] / 60:.1f}", f"{row['steps_per_second']:,.0f}", row["devices"]),
            *(published, row["published_time"] or ""),
        )
        lines.append(f"| {' | '.join(cells)} |")
    lines.append("")
    lines.append(
        "Evaluation: greedy, whole games, the game's own rewards. Training: of the last row, as acted. Minutes hold "
        "compiling and evaluating too. Published: rewards after 10M steps; A2C and PPO on 8 GPUs."
    )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
