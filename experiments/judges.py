"""Train agents in games, several seeds each, and judge them: by every line, by exploitability, by an opponent.

    python experiments/judges.py --list
    python experiments/judges.py --only ppo/podium/Kuhn      # train (or resume) it, print its row as JSON
    python experiments/judges.py                             # all whose result is missing
    python experiments/judges.py --judge                     # judge again what is trained, in --runs

A row is a `podium train` command with a preset, or a script beside this one that judges by itself; a run a seed. What
the judge says goes to `results/games.json`, and as a table into `results/README.md`.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import tables

import podium
from podium import envs, games
from podium.agents import alphazero, muzero
from podium.commands.console import guard, read_flags
from podium.files import write_json
from podium.types import Array, Key, PyTree, TimeStep

RESULTS = Path(__file__).resolve().parent / "results"
TABLE = RESULTS / "games.json"
BEGIN, END = "<!-- games: made by experiments/judges.py -->", "<!-- end of the games -->"

Judge = Callable[[podium.Policy], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Row:
    """One agent in one game: `judged` is what counts of the judge's words, `bar` what is asked for.

    A row with a `script`, a file beside this one with its flags, has no preset and no judge: its `summary.json` says.
    """

    agent: str
    env: str
    preset: str
    judge: Judge | None
    judged: str
    bar: str
    seeds: int = 4
    script: str = ""

    @property
    def name(self) -> str:
        """As `--only` takes it."""
        return f"{self.agent}/{self.env}"


def alone(policy: podium.Policy) -> podium.Policy:
    """Return the network's policy, without a search."""
    config = policy.agent.config
    if not isinstance(config, alphazero.Config | muzero.Config):
        return policy
    model = envs.make_pure(policy.spec.name, rules=True)
    agent = podium.agents.maker(policy.agent.name, model)(dataclasses.replace(config, num_simulations=0))
    return dataclasses.replace(policy, agent=agent)


def every_line(policy: podium.Policy) -> dict[str, Any]:
    """Return how all lines of tic-tac-toe end, by the network alone."""
    lines = games.every_line(envs.make_pure("podium/TicTacToe", rules=True), alone(policy))
    return {"lines_lost": lines.lost, "first": lines.first._asdict(), "second": lines.second._asdict()}


def exploited(policy: podium.Policy) -> dict[str, Any]:
    """Return what best responses gain against a policy of poker."""
    env = envs.make_pure(policy.spec.name)
    return {"exploitability": float(games.exploitability(env, games.probabilities(policy)))}


def against_alpha_beta(policy: podium.Policy, simulations: int = 128, number: int = 200) -> dict[str, Any]:
    """Return the score of a search of so many simulations against alpha-beta of depth 6, and its right moves.

    Games begin with the empty board; among moves that it holds for equally good alpha-beta draws.
    """
    env = envs.make_pure("podium/ConnectFour", rules=True)
    config = dataclasses.replace(policy.agent.config, num_simulations=simulations)
    searching = dataclasses.replace(policy, agent=alphazero.make(config, model=env))
    score = games.match(env, searching, games.alpha_beta(6), games=number)
    solved = games.positions(env, 200)
    return {
        "won": score.won / number,
        "score": score._asdict(),
        "right_moves": games.right_moves(searching, solved),
        "right_moves_alone": games.right_moves(alone(policy), solved),
    }


def battles(policy: podium.Policy, number: int = 1_000) -> dict[str, Any]:
    """Return the share of SMAX's battles that are won, by sampled moves, as JaxMARL counts, and by the best ones.

    The step that wins one is rewarded by 1 and the last damage, every other by less than 1: all damage is worth 1.
    """
    env = envs.make_pure(policy.spec.name)

    def step(key: Key, state: PyTree, action: Array) -> tuple[PyTree, TimeStep]:
        state, timestep = env.step(key, state, action)
        return state, timestep._replace(reward=(timestep.reward >= 1).astype(jnp.float32))

    counted = env._replace(step=step)
    won = [podium.evaluate(policy, counted, number, greedy=greedy)["eval_return"] for greedy in (True, False)]
    return {"battles_won": won[1], "battles_won_greedy": won[0]}


_LEAGUE = "league.py --env podium/TicTacToe --num-steps 2000000 --config anneal_steps=1500000"
"""The rate falls over the own moves of the learner, which in half of the games plays both seats."""

_COMPARED = "league.py --env podium/ConnectFour --num-steps 6000000 --compare --env-options openings=0 --games 200"
"""Games begin with the empty board, which plain self-play comes to open in few ways; after 2M steps 23 Elo are won."""

ROWS = (
    Row("ppo", "podium/TicTacToe", "tic-tac-toe", every_line, "lines_lost", "0"),
    Row("alphazero", "podium/TicTacToe", "tic-tac-toe", every_line, "lines_lost", "0"),
    Row("muzero", "podium/TicTacToe", "tic-tac-toe", every_line, "lines_lost", "none"),
    Row("ppo", "podium/Kuhn", "kuhn", exploited, "exploitability", "at most 0.06; uniform 0.458"),
    Row("league ppo", "podium/TicTacToe", "", None, "lines_lost", "0", script=_LEAGUE),
    Row("league ppo", "podium/ConnectFour", "", None, "elo_above_self_play", "above 0", seeds=6, script=_COMPARED),
    Row("psro ppo", "podium/Kuhn", "", None, "exploitability", "at most 0.01", script="psro.py --env podium/Kuhn"),
    Row("ppo", "podium/Leduc", "leduc", exploited, "exploitability", "at most 0.5; uniform 2.37"),
    Row("ippo", "jaxmarl/smax-3m", "smax-3m", battles, "battles_won", "at least 0.9", seeds=2),
    Row("alphazero", "podium/ConnectFour", "connect-four", against_alpha_beta, "won", "at least 0.85"),
)


@dataclasses.dataclass(frozen=True)
class Flags:
    """Train in games, and judge."""

    only: tuple[str, ...] = ()
    """Rows to train, by name; none for all whose result is missing."""
    list: bool = False
    """Print the names of the rows, and nothing else."""
    judge: bool = False
    """Judge again what is trained, and train nothing."""
    seeds: tuple[int, ...] = ()
    """Seeds of the rows to train or judge, where a row keeps what its other seeds gave; none takes all of a row's."""
    runs: Path = Path("runs/games")
    """Folder of the runs."""


def main(argv: Sequence[str] | None = None) -> int:
    """Do as the command line says; return the exit code."""
    return guard(lambda: _main(sys.argv[1:] if argv is None else argv))


def _main(argv: Sequence[str]) -> int:
    flags = read_flags(Flags, argv, description=(__doc__ or "").split("\n")[0])
    if flags.list:
        print("\n".join(row.name for row in ROWS))
        return 0
    names = [row.name for row in ROWS]
    tables.check_rows(flags.only, names)
    done = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    for row in ROWS:
        if row.name in flags.only or (not flags.only and (flags.judge or row.name not in done)):
            done[row.name] = _row(row, flags, done.get(row.name, {}))
            write_json(TABLE, {name: done[name] for name in names if name in done})
            _write_table(done)
            print(json.dumps(done[row.name]), flush=True)
    return 0


def _row(row: Row, flags: Flags, known: dict[str, Any]) -> dict[str, Any]:
    command = f"podium train --agent {row.agent} --env {row.env} --preset {row.preset}"
    if row.script:
        command = f"python experiments/{row.script}"
    seeds = [each for each in known.get("seeds", ()) if flags.seeds and each["seed"] not in flags.seeds]
    for seed in flags.seeds or range(row.seeds):
        folder = flags.runs / row.name.replace("/", "-").replace(" ", "-") / f"seed-{seed}"
        if not flags.judge and not _finished(row, folder):
            more = ["--seed", str(seed), "--run-dir", str(folder)]
            more += ["--resume"] * (folder / "config.json").exists()
            script, *given = row.script.split() or ["-m podium", *command.split()[1:], "--no-progress"]
            program = [str(Path(__file__).with_name(script))] if row.script else script.split()
            subprocess.run([sys.executable, *program, *given, *more], check=True)
        summary = json.loads((folder / "summary.json").read_text())
        judged = {row.judged: summary[row.judged]} if row.judge is None else row.judge(podium.load(folder))
        seeds.append({"seed": seed, "steps": summary["env_steps"], "seconds": summary["wall_seconds"], **judged})
    seeds.sort(key=lambda each: each["seed"])
    return {
        "command": command,
        "judge": row.script.split()[0] if row.judge is None else row.judge.__name__,
        row.judged: [each[row.judged] for each in seeds],
        "bar": row.bar,
        "seeds": seeds,
    }


def _finished(row: Row, folder: Path) -> bool:
    """Return whether a run is trained and, by a script that judges, judged."""
    path = folder / "summary.json"
    return path.exists() and (row.judge is not None or row.judged in json.loads(path.read_text()))


def _write_table(done: dict[str, Any]) -> None:
    """Write the table into the README of the results."""
    lines = [
        "| agent, game | steps | seconds, median | judged by | of every seed | asked for |",
        "|---|---|---|---|---|---|",
    ]
    for row in ROWS:
        if row.name in done:
            found = done[row.name]
            seeds = found["seeds"]
            seconds = statistics.median(each["seconds"] for each in seeds)
            numbers = ", ".join(f"{each[row.judged]:.3g}" for each in seeds)
            cells = (
                f"`{row.agent}`, `{row.env}`",
                f"{seeds[0]['steps']:,}",
                f"{seconds:.0f}",
                row.judged.replace("_", " "),
                numbers,
                row.bar,
            )
            lines.append(f"| {' | '.join(cells)} |")
    tables.write_between(RESULTS / "README.md", BEGIN, END, "\n".join(lines))


if __name__ == "__main__":
    sys.exit(main())
