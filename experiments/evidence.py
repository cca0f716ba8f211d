"""Train what podium claims to learn, most rows with five seeds, and keep the returns beside the published ones.

    python experiments/evidence.py --list                   # names of the rows
    python experiments/evidence.py --only ppo/CartPole-v1   # train one (or resume it), print its row as JSON
    python experiments/evidence.py                          # train all whose result is missing or of other settings
    python experiments/evidence.py --draw                   # the pictures and the table from the results there are

A row is a `podium train` command with a preset, run in a process of its own. Its result, with every seed's returns,
goes to `experiments/results/NAME.json`, its picture beside it, and the table of all into `README.md` there. What was
stopped goes on from its checkpoint, in `--runs`.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import machine
import numpy as np
import tables
from evidence_rows import ROWS, Row

from podium.commands.console import guard, read_flags
from podium.files import to_jsonable, write_atomic, write_json
from podium.sinks import interval, read_metrics, save_figure

RESULTS = Path(__file__).resolve().parent / "results"
BEGIN, END = "<!-- rows: made by experiments/evidence.py -->", "<!-- end of the rows -->"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Which rows, and where what they give goes."""

    list: bool = False
    """Print the names of the rows, one a line, and end."""
    only: tuple[str, ...] = ()
    """Rows to train, whether or not their result is there; none trains all whose result is missing."""
    draw: bool = False
    """Train nothing: make pictures and table anew from the results there are, and bring those to the rows' remarks."""
    seeds: int | None = None
    """Seeds of a row; None takes the row's own. With another number nothing goes to --results."""
    num_steps: int | None = None
    """Steps of a row; None takes the preset's. With another number nothing goes to --results."""
    runs: Path = Path("runs/evidence")
    """Folder for the run folders."""
    results: Path = RESULTS
    """Folder for the results."""


def main(argv: Sequence[str] | None = None) -> int:
    """Do as the flags say, and return the exit code."""
    given = sys.argv[1:] if argv is None else argv
    return guard(lambda: _main(read_flags(Flags, given, description=__doc__)))


def _main(flags: Flags) -> int:
    rows = {row.name: row for row in ROWS}
    if flags.list:
        print("\n".join(rows))
        return 0
    tables.check_rows(flags.only, rows)
    if flags.seeds is not None and flags.seeds < 1:
        raise ValueError(f"--seeds {flags.seeds} must be 1 or more.")
    keeps = flags.seeds is None and flags.num_steps is None
    if keeps:
        flags.results.mkdir(parents=True, exist_ok=True)
    if flags.draw:
        for row in ROWS:
            if (known := _read(row, flags.results)) is not None:
                _keep(row, known, flags.results)
        _write_table(flags.results)
        return 0
    for row in [rows[name] for name in flags.only] or [row for row in ROWS if not _is_done(row, flags.results)]:
        result = train(row, flags.runs, flags.seeds or row.seeds, flags.num_steps)
        if keeps:
            _keep(row, result, flags.results)
            _write_table(flags.results)
        print(json.dumps({name: value for name, value in result.items() if name != "curve"}), flush=True)
    return 0


def train(row: Row, runs: Path, seeds: int, num_steps: int | None = None) -> dict[str, Any]:
    """Train the seeds of a row, or go on where they were stopped, and return its result."""
    groups = [(0, seeds)] if row.together else [(seed, 1) for seed in range(seeds)]
    summaries, curves, commands = [], [], []
    for seed, number in groups:
        folder = runs / f"{row.file}{'' if row.together else f'-seed-{seed}'}"
        fixed = ["--seed", str(seed), *(["--seeds", str(number)] if number > 1 else [])]
        command = [*row.command(), *fixed, *(["--num-steps", str(num_steps)] if num_steps else [])]
        commands.append(shlex.join(["podium", *command]))
        summaries.append(_run([*command, "--run-dir", str(folder), *_resumes(folder), "--no-progress", "--json"]))
        curves.append(_curve(read_metrics(folder / "metrics.jsonl")))
    returns = [value for summary in summaries for value in _listed(summary["eval_return"])]
    sampled = [value for summary in summaries for value in _listed(summary["eval_return_sampled"])]
    low, high = interval(returns)
    return to_jsonable(
        {
            "name": row.name,
            "settings": row.settings(),
            "commands": commands,
            "steps": summaries[0]["env_steps"],
            "returns": returns,
            "mean": float(np.mean(returns)),
            "interval": [low, high],
            "returns_sampled": sampled,
            "episodes": summaries[0]["eval_episodes"],
            "unfinished": float(np.mean([np.mean(summary["eval_unfinished"]) for summary in summaries])),
            "wall_seconds": sum(summary["wall_seconds"] for summary in summaries),
            "steps_per_second": float(np.median([summary["steps_per_second"] for summary in summaries])),
            **_beside(row),
            "machine": _machine(summaries[0]),
            "date": f"{datetime.date.today()}",
            "curve": [
                [steps, [value for curve in curves for value in _listed(curve.get(steps))]]
                for steps in sorted(set.intersection(*map(set, curves)))
            ],
        }
    )


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Draw every seed's evaluations, their mean in its 95% interval, and the published figure."""
    from matplotlib.figure import Figure

    steps = np.array([point[0] for point in result["curve"]])
    returns = np.array([point[1] for point in result["curve"]], float)
    bounds = np.array([interval(values) for values in returns.tolist()])
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(steps, returns, color="C0", alpha=0.35, linewidth=0.8)
    axes.plot(steps, returns.mean(axis=1), color="C0", linewidth=2, label=f"podium, {returns.shape[1]} seeds")
    axes.fill_between(steps, *bounds.T, color="C0", alpha=0.2, linewidth=0)
    if result["published"]:
        # A source is long: the table says it in full.
        label = result["published"]["source"].split(",")[0]
        axes.axhline(result["published"]["value"], color="C1", linestyle="--", label=label)
    axes.set(xlabel="environment steps", ylabel="return of greedy play", title=result["name"])
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    save_figure(figure, path, dpi=90, metadata={"Software": None})


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """Return the results as Markdown."""
    lines = ["| row | greedy play: mean of the seeds [95%] | seeds | sampled | published | steps | wall time |"]
    lines.append("|---|---|---|---:|---|---:|---:|")
    for result in results:
        low, high = result["interval"]
        published = result["published"]
        file = next(row.file for row in ROWS if row.name == result["name"])
        cells = (
            f"[{result['name']}]({file}.png)",
            f"**{result['mean']:.4g}**" + (f" [{low:.4g}, {high:.4g}]" if len(result["returns"]) > 1 else ""),
            ", ".join(f"{value:.4g}" for value in result["returns"]),
            f"{np.mean(result['returns_sampled']):.4g}",
            f"{published['value']:g} ({published['source']})" if published else "none found",
            f"{result['steps'] / 1e6:.3g}M",
            f"{result['wall_seconds']:,.0f} s",
        )
        lines.append(f"| {' | '.join(cells)} |")
    remarks = [f"- {result['name']}: {result['remark']}" for result in results if result["remark"]]
    return "\n".join([*lines, *(["", *remarks] if remarks else [])])


def _run(command: Sequence[str]) -> dict[str, Any]:
    """Run `podium` with these arguments in a process of its own, and return the summary that it prints."""
    with subprocess.Popen([sys.executable, "-m", "podium", *command], stdout=subprocess.PIPE, text=True) as process:
        # Whoever stops this stops that, which saves and can be resumed.
        before = signal.signal(signal.SIGTERM, lambda number, frame: process.send_signal(number))
        try:
            last = ""
            for line in _lines(process.stdout):
                last = line
                print(line, file=sys.stderr)
            code = process.wait()
        finally:
            signal.signal(signal.SIGTERM, before)
    if code:
        raise SystemExit(code if code > 0 else 128 - code)
    return dict(json.loads(last))


def _lines(stream: Any) -> Iterator[str]:
    """Yield the lines of a stream, also while Ctrl-C, which the process has heard too, is being dealt with there."""
    while True:
        try:
            if not (line := stream.readline()):
                return
            yield line.rstrip("\n")
        except KeyboardInterrupt:
            continue


def _resumes(folder: Path) -> list[str]:
    return ["--resume"] if (folder / "config.json").exists() else []


def _listed(value: Any) -> list[float]:
    return [float("nan") if item is None else float(item) for item in np.ravel(np.asarray(value, object)).tolist()]


def _curve(rows: Sequence[Mapping[str, Any]]) -> dict[int, Any]:
    return {row["env_steps"]: row["eval_return"] for row in rows if "eval_return" in row}


def _machine(summary: Mapping[str, Any]) -> str:
    from importlib.metadata import version

    where = f"{machine.cores()} cores, {machine.cpu()}"
    if summary["platform"] != "cpu":
        where = f"{summary['num_devices']} {summary['platform']}, {where}"
    return f"{where}; jax {version('jax')}"


def _beside(row: Row) -> dict[str, Any]:
    """Return what stands beside a result and does not change it."""
    return {"published": dataclasses.asdict(row.published) if row.published else None, "remark": row.remark}


def _keep(row: Row, result: Mapping[str, Any], results: Path) -> None:
    write_json(results / f"{row.file}.json", result)
    draw(result, results / f"{row.file}.png")


def _read(row: Row, results: Path) -> dict[str, Any] | None:
    try:
        return json.loads((results / f"{row.file}.json").read_text()) | _beside(row)
    except FileNotFoundError:
        return None


def _is_done(row: Row, results: Path) -> bool:
    result = _read(row, results)
    return result is not None and result["settings"] == to_jsonable(row.settings())


def _write_table(results: Path) -> None:
    """Put the table of the results that are there between its marks in README.md; begin that where there is none."""
    page = results / "README.md"
    if not page.exists():
        write_atomic(page, f"{BEGIN}\n{END}\n".encode())
    found = [result for row in ROWS if (result := _read(row, results)) is not None]
    tables.write_between(page, BEGIN, END, table(found))


if __name__ == "__main__":
    sys.exit(main())
