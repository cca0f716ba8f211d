"""Measure the table of speed in README.md beside this file: each row a command of benchmark.py, in its own processes.

    python experiments/speed.py                               # every row that results/speed.json lacks
    python experiments/speed.py --only dqn sebulba            # these, anew
    python experiments/speed.py --beside ../podium-of-then    # each in turn with another checkout; prints the ratios
    python experiments/speed.py --draw                        # the table alone, of results/speed.json

A figure is the median of the rounds. Machines differ and so do days: what one process or one turn compares says more
than a rate does.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import machine
import tables

import podium
from podium.commands.console import guard, read_flags
from podium.files import write_json

HERE = Path(__file__).resolve().parent
BEGIN, END = "<!-- speed: made by experiments/speed.py -->", "<!-- end of speed -->"


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
      name: what `--only` takes.
      what: is measured.
      command: of benchmark.py.
      figures: keys of the line that it prints, the first one that which is compared, and how each is written.
      front: whether podium's README shows it too.
    """

    name: str
    what: str
    command: str
    figures: dict[str, str]
    front: bool = False


RATE, TIMES = "{:,.0f} steps/s", "{:.2f} times its rate"
ROWS = (
    Row(
        "ppo",
        "PPO, CartPole-v1, 64 x 128, 4 epochs x 4 minibatches, two 64-64 MLPs",
        "anakin --agent ppo --num-steps 2000000",
        {
            "steps_per_second": RATE,
            "share_of_matmul_bound": "{:.2f} of the matmul bound",
            "compile_seconds": "compiles in {:.1f} s",
        },
        front=True,
    ),
    Row(
        "ppo-minatar",
        "PPO, Breakout-MinAtar, the same sizes",
        "anakin --agent ppo --env Breakout-MinAtar --num-steps 400000",
        {"steps_per_second": RATE, "compile_seconds": "compiles in {:.1f} s"},
    ),
    Row("beside", "PPO, CartPole-v1, beside a loop of PureJaxRL's structure", "paired", {"ratio": TIMES}, front=True),
    Row("beside-1024", "the same, 1,024 environments", "paired --num-envs 1024 --updates 4", {"ratio": TIMES}),
    Row("beside-minatar", "Breakout-MinAtar, 64 environments", "paired --env Breakout-MinAtar", {"ratio": TIMES}),
    Row(
        "beside-minatar-1024",
        "Breakout-MinAtar, 1,024 environments",
        "paired --env Breakout-MinAtar --num-envs 1024 --updates 4",
        {"ratio": TIMES},
    ),
    Row(
        "solve",
        "PPO, CartPole-v1, until a greedy evaluation of 128 episodes reaches 475, median of five seeds",
        "solve",
        {"median_seconds": "{:.2f} s", "compile_seconds": "compiles in {:.1f} s"},
        front=True,
    ),
    Row(
        "dqn",
        "DQN, CartPole-v1, 10 environments, 5 updates of batch 100 per 10 steps, one CPU thread",
        "anakin --agent dqn --num-steps 50000",
        {"steps_per_second": RATE},
        front=True,
    ),
    Row(
        "dqn-1m",
        "the same with a buffer of 1,000,000 in place of 50,000",
        "anakin --agent dqn --num-steps 50000 --buffer-capacity 1000000",
        {"steps_per_second": RATE},
    ),
    Row(
        "sac",
        "SAC, Pendulum-v1, one environment, an update of batch 256 a step, two 64-64 critics, one CPU thread",
        "anakin --agent sac --env Pendulum-v1 --num-steps 3000",
        {"steps_per_second": RATE},
    ),
    Row(
        "search",
        "Search by Gumbel and the rules of Connect Four, 32 simulations, two 256-256 MLPs, 256 positions, a key each, "
        "beside mctx with one key for all",
        "search",
        {"ratio": TIMES},
    ),
    Row(
        "evolution",
        "Evolution, CartPole-v1, population 4,096, beside evosax's OpenES over the same rollout",
        "evolution",
        {"ratio": TIMES},
        front=True,
    ),
    Row(
        "sebulba",
        "Sebulba, Pong, a network that costs nothing, 128 environments x 16 steps, beside the environments alone",
        "sebulba --updates 12 --repeats 5",
        {"ratio": "{:.2f} of their rate", "steps_per_second": RATE},
        front=True,
    ),
    Row(
        "sebulba-64",
        "the same, 64 x 32",
        "sebulba --updates 12 --repeats 5 --num-envs 64 --rollout-length 32",
        {"ratio": "{:.2f} of their rate", "steps_per_second": RATE},
    ),
    Row(
        "sebulba-cnn",
        "Sebulba, Pong, PPO with the Nature CNN, 8 x 32, 4 epochs x 4 minibatches",
        "sebulba --network nature_cnn --num-envs 8 --rollout-length 32 --epochs 4 --minibatches 4",
        {"steps_per_second": RATE},
    ),
    Row(
        "atari",
        "Atari on the device, Pong, 1,024 environments, XLA on the CPU, emulation alone",
        "atari --num-envs 1024 --steps 2",
        {"frames_per_second": "{:,.0f} frames/s", "compile_seconds": "compiles in {:.1f} s"},
    ),
    Row(
        "atari-train",
        "with pictures, and PPO with the Nature CNN learning",
        "atari --num-envs 1024 --steps 2 --mode train",
        {"frames_per_second": "{:,.0f} frames/s", "compile_seconds": "compiles in {:.1f} s"},
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Measure rows of the table of speed."""

    only: tuple[str, ...] = ()
    """Names of rows; none takes all that the results lack."""
    list: bool = False
    """Print the names of the rows."""
    rounds: int = 3
    """Processes of each row, one after the other."""
    beside: Path | None = None
    """Another checkout, measured in turn; its figures are printed and not kept."""
    draw: bool = False
    """Write the table of what was measured before, and measure nothing."""
    results: Path = HERE / "results" / "speed.json"
    """Where figures are kept, by the names of the rows."""
    page: Path = HERE / "README.md"
    """Where the table stands."""
    front: Path = HERE.parent / "README.md"
    """Where some of its rows stand."""


def measure(row: Row, checkouts: Sequence[Path], rounds: int) -> list[dict[str, Any]]:
    """Run a row's command in each of the checkouts in turn, and return their figures: one number a round, by key."""
    lines: list[list[dict[str, Any]]] = [[] for _ in checkouts]
    for _ in range(rounds):
        for number, checkout in enumerate(checkouts):
            lines[number].append(_line_of(row, checkout))
    return [
        {
            "command": f"python experiments/benchmark.py {row.command}",
            "figures": {key: [line[key] for line in of_one] for key in row.figures},
            "versions": of_one[-1]["versions"],
            "hardware": of_one[-1]["hardware"],
        }
        for of_one in lines
    ]


def _line_of(row: Row, checkout: Path) -> dict[str, Any]:
    """Return what benchmark.py of a checkout prints, compiling everything anew."""
    command = [str(checkout / "experiments" / "benchmark.py"), *shlex.split(row.command)]
    variables = {"PYTHONPATH": str(checkout), "JAX_ENABLE_COMPILATION_CACHE": "0"}
    line: dict[str, Any] = json.loads(machine.last_line_of(command, f"{row.name} in {checkout.name}", **variables))
    return line


def table(results: dict[str, Any], front: bool = False) -> str:
    """Return the Markdown table of what was measured; for the `front`, of fewer rows, what and figure."""
    cells = [["what", "figure", "command (`python experiments/benchmark.py ...`)", "cores, load"], ["---"] * 4]
    for row in ROWS:
        if row.name in results and (row.front or not front):
            found, hardware = results[row.name]["figures"], results[row.name]["hardware"]
            figures = "; ".join(text.format(statistics.median(found[key])) for key, text in row.figures.items())
            where = f"{hardware['cores']}, {hardware['load_average']:.1f}"
            cells.append([row.what, figures, f"`{row.command}`", where])
    return "\n".join(f"| {' | '.join(each[: 2 if front else 4])} |" for each in cells)


def compare(row: Row, here: dict[str, Any], there: dict[str, Any]) -> dict[str, Any]:
    """Return the first figure of both checkouts, and how many times as fast this one was, each round and median."""
    key = next(iter(row.figures))
    ours, theirs = here["figures"][key], there["figures"][key]
    ratios = [b / a if key.endswith("_seconds") else a / b for a, b in zip(ours, theirs, strict=True)]
    return {"row": row.name, key: ours, "beside": theirs, "ratios": ratios, "ratio": statistics.median(ratios)}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write the table, and return the exit code."""
    return guard(lambda: _main(sys.argv[1:] if argv is None else argv))


def _main(argv: Sequence[str]) -> int:
    flags = read_flags(Flags, argv, description=__doc__)
    rows = {row.name: row for row in ROWS}
    if flags.list:
        print("\n".join(rows))
        return 0
    tables.check_rows(flags.only, rows)
    if flags.rounds < 1:
        raise ValueError(f"--rounds {flags.rounds} must be at least 1.")
    if flags.beside is not None and not (flags.beside / "experiments" / "benchmark.py").exists():
        raise ValueError(f"--beside {flags.beside} is no checkout: it has no experiments/benchmark.py.")
    results = json.loads(flags.results.read_text()) if flags.results.exists() else {}
    checkouts = [Path(podium.__file__).parents[1]]
    if flags.beside is not None:
        checkouts.append(flags.beside.resolve())
    names = () if flags.draw else flags.only or [name for name in rows if name not in results]
    for name in names:
        here, *others = measure(rows[name], checkouts, flags.rounds)
        print(json.dumps(compare(rows[name], here, others[0]) if others else {"row": name, **here}), flush=True)
        results[name] = here
        write_json(flags.results, results)
        _write_tables(flags, results)
    if not names:
        _write_tables(flags, results)
    return 0


def _write_tables(flags: Flags, results: dict[str, Any]) -> None:
    """Write the tables into their pages, of which a row that is stopped would else be missing."""
    tables.write_between(flags.page, BEGIN, END, table(results))
    tables.write_between(flags.front, BEGIN, END, table(results, front=True))


if __name__ == "__main__":
    sys.exit(main())
