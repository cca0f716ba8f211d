"""Train an agent in a league, and rate the snapshots of its past: a table of Elo.

    python experiments/league.py --env podium/ConnectFour --agent ppo --size 8
    python experiments/league.py --env podium/ConnectFour --compare    # beside plain self-play of as many steps

The agent has the preset of its environment, where there is one, and `--config NAME=VALUE ...` over it. Beside what
every run folder holds, `summary.json` says Elo and rates, and `elo.json` and `elo.png` have the table: the learner and
its snapshots, every two of them in both seats. With `--compare` the two that were trained, and alpha-beta players in
Connect Four, meet one another instead, and `elo_above_self_play` says by how much the league's is ahead. Of tic-tac-toe
the summary says how many lines the policy loses (`lines_lost`).
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from judges import every_line

import podium
from podium import agents, envs, games, presets
from podium.agent import Agent
from podium.commands.console import guard, read_flags, read_options
from podium.files import write_json
from podium.sinks import save_figure

TIC_TAC_TOE, CONNECT_FOUR = "podium/TicTacToe", "podium/ConnectFour"


@dataclasses.dataclass(frozen=True)
class Flags:
    """Train in a league, and rate it."""

    env: str = CONNECT_FOUR
    """A game of two players in turn."""
    agent: str = "ppo"
    """Agent, by a name of podium.agents.names()."""
    config: tuple[str, ...] = ()
    """Fields of its configuration, each NAME=VALUE."""
    env_options: tuple[str, ...] = ()
    """Options of the environment, each NAME=VALUE; none for those of the preset."""
    size: int = 8
    """Snapshots in the pool."""
    snapshot_every: int = 0
    """Iterations from one snapshot to the next; 0 for so many that the pool spans the run."""
    matchmaking: str = "hard"
    """Whom the learner meets: uniform, newest, hard or variance."""
    self_play: float = 0.5
    """Share of the environments in which the learner plays itself."""
    num_steps: int | None = None
    """Environment steps; None for the preset's."""
    num_envs: int | None = None
    """Environments side by side; None for the preset's."""
    rollout_length: int | None = None
    """Steps of every environment before each learning phase; None for the preset's."""
    seed: int = 0
    """Fixes everything random."""
    devices: int = 1
    """Devices of Anakin."""
    run_dir: Path = Path("runs/league")
    """Folder of the run."""
    resume: bool = False
    """Resume the run in --run-dir."""
    games: int = 100
    """Of each match, an even number."""
    compare: bool = False
    """Train plain self-play too, in RUN_DIR/plain, and let the two meet."""
    progress: bool = False
    """Show a line of progress while training."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the flags ask for, over the preset of the environment."""

    agent: Agent
    env_options: Mapping[str, Any]
    sizes: dict[str, Any]


def plan(flags: Flags) -> Plan:
    """Lay the flags over the preset of the environment; raises ValueError for a flag that is wrong."""
    found = (preset for preset in presets.of_agent(flags.agent).values() if preset.env == flags.env and preset.usual)
    values = dict(next(found, presets.Preset(flags.env, "", {"num_envs": 64, "num_steps": 500_000})).values)
    options = read_options(flags.env_options or values.pop("env_options", ()), "--env-options")
    values.pop("env_options", None)
    asked = {name: getattr(flags, name) for name in ("num_steps", "num_envs", "rollout_length")}
    sizes = {name: values.pop(name) for name in (*asked, "eval_every") if name in values}
    config = {**values, **read_options(flags.config, "--config")}
    env = envs.make_pure(flags.env, **options)
    agent = agents.make(flags.agent, config, env if agents.get(flags.agent).plans else None)
    sizes |= {name: value for name, value in asked.items() if value is not None}
    sizes.setdefault("rollout_length", agent.rollout_length)
    return Plan(agent, options, {"eval_every": sizes["num_steps"], **sizes})


def in_league(flags: Flags, asked: Plan) -> Agent:
    """Return the agent in its league."""
    updates = asked.sizes["num_steps"] // (asked.sizes["num_envs"] * asked.sizes["rollout_length"])
    every = flags.snapshot_every or max(updates // flags.size, 1)
    return podium.league(asked.agent, flags.size, every, flags.matchmaking, flags.self_play)


def train(flags: Flags, asked: Plan, agent: Agent, folder: Path) -> podium.Result:
    """Train, into a folder."""
    return podium.train(
        agent,
        flags.env,
        env_options=asked.env_options,
        placement=podium.Anakin(flags.devices),
        seed=flags.seed,
        run_dir=folder,
        resume=flags.resume,
        progress=flags.progress,
        **asked.sizes,
    )


def rate(flags: Flags, asked: Plan, players: Mapping[str, Any]) -> dict[str, Any]:
    """Let every two meet, write the table and its picture, and return it."""
    env = envs.make_pure(flags.env, **asked.env_options)
    table = games.round_robin(env, list(players.values()), flags.games, flags.seed, greedy=False)
    ratings = games.elo(table)
    rated = {name: float(rating) for name, rating in zip(players, ratings, strict=True)}
    found = {"elo": rated, "won_drawn_lost": table.tolist(), "games": flags.games}
    write_json(flags.run_dir / "elo.json", found)
    _draw(flags, rated)
    for name, rating in rated.items():
        print(f"  {name:<16} {rating:+7.0f}")
    return found


def _draw(flags: Flags, rated: Mapping[str, float]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 0.4 * len(rated) + 1.2), layout="constrained")
    axes = figure.add_subplot()
    axes.barh(list(rated), list(rated.values()))
    axes.invert_yaxis()
    axes.set_xlabel("Elo, mean 0")
    axes.set_title(f"{flags.agent} in {flags.env}, {flags.games} games a match")
    save_figure(figure, flags.run_dir / "elo.png")


def main(argv: Sequence[str] | None = None) -> int:
    """Train, and rate; return the exit code."""
    return guard(lambda: _main(sys.argv[1:] if argv is None else argv))


def _main(argv: Sequence[str]) -> int:
    flags = read_flags(Flags, argv, description=(__doc__ or "").split("\n")[0])
    if flags.games < 2 or flags.games % 2:
        raise ValueError(f"--games {flags.games} must be even, 2 or more: each start is played in both seats.")
    asked = plan(flags)
    agent = in_league(flags, asked)
    result = train(flags, asked, agent, flags.run_dir)
    more: dict[str, Any] = {}
    if flags.compare:
        plain = train(flags, asked, asked.agent, flags.run_dir / "plain")
        players: dict[str, Any] = {"league": result.policy, "self-play": plain.policy, "uniform": games.uniform}
        if flags.env == CONNECT_FOUR:
            players |= {f"alpha-beta {depth}": games.alpha_beta(depth) for depth in (1, 2)}
        rates = [each.summary["steps_per_second"] for each in (result, plain)]
        more = {"steps_per_second_of_plain": rates[1], "rate": rates[0] / rates[1]}
    else:
        players = dict(games.snapshots(result))
    if flags.env == TIC_TAC_TOE:
        more |= every_line(result.policy)
    found = rate(flags, asked, players)
    if flags.compare:
        more["elo_above_self_play"] = found["elo"]["league"] - found["elo"]["self-play"]
    path = flags.run_dir / "summary.json"
    write_json(path, {**json.loads(path.read_text()), "elo": found["elo"], **more})
    print(json.dumps(more), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
