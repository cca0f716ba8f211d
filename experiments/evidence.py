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
import re
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

from podium import presets
from podium.commands.console import guard, read_flags
from podium.files import to_jsonable, write_atomic, write_json
from podium.sinks import interval, read_metrics, save_figure

RESULTS = Path(__file__).resolve().parent / "results"
BEGIN, END = "<!-- rows: made by experiments/evidence.py -->", "<!-- end of the rows -->"


@dataclasses.dataclass(frozen=True)
class Published:
    """What others reached.

    Attributes:
      value: mean return.
      source: whose it is, and after how many steps.
    """

    value: float
    source: str


@dataclasses.dataclass(frozen=True)
class Row:
    """One agent in one environment.

    Attributes:
      agent: name in `podium.agents`.
      env: name of the environment.
      preset: name of the agent's preset; "none" for an agent without one.
      placement: name in `podium.placement`.
      flags: further ones, beside the preset's.
      published: the figure to stand beside.
      together: whether one program trains all seeds; else each seed has a run of its own.
      seeds: how many.
      remark: what a reader should know.
      variant: what is special about it, where another row has the same agent and environment.
    """

    agent: str
    env: str
    preset: str
    placement: str = "anakin"
    flags: tuple[str, ...] = ()
    published: Published | None = None
    together: bool = True
    seeds: int = 5
    remark: str = ""
    variant: str = ""

    @property
    def name(self) -> str:
        """How the row is called: who learns, and what."""
        name = f"{'evolution' if self.placement == 'evolution' else self.agent}/{self.env}"
        return f"{name}-{self.variant}" if self.variant else name

    @property
    def file(self) -> str:
        """The name of its files, without an ending."""
        return re.sub(r"[^A-Za-z0-9.-]+", "-", self.name)

    def command(self) -> list[str]:
        """Return the arguments of `podium`, but for seeds and the run folder."""
        what = ["train", "--agent", self.agent, "--env", self.env, "--placement", self.placement]
        return [*what, "--preset", self.preset, *self.flags]

    def settings(self) -> dict[str, Any]:
        """Return what a result depends on, beside the code: a result of other settings is none of this row."""
        preset = presets.of_agent(self.agent).get(self.preset)
        return {"command": self.command(), "preset": to_jsonable(dict(preset.values) if preset else {})}


def _zoo(value: float, steps: str) -> Published:
    return Published(value, f"RL Baselines3 Zoo's benchmark.md (22e3ff2), one run of {steps} steps")


def _gymnax(value: float) -> Published:
    return Published(value, "gymnax's README (086ad95), PPO of gymnax-blines")


def _optimum(value: float) -> Published:
    return Published(value, "the optimum")


_PQN_MINATAR = "The settings are the PQN authors'; their figures are drawings only, so one of PPO's stands beside it."

_BESIDE_RAINBOW = (
    "To stand beside rainbow's: the same network, replay, batches, steps and first rate. Young and Tian (2019) show "
    "curves of 5M steps, and no figures."
)

_DQN_MINATAR = "By the settings of Breakout's row; 2M steps for the 5M of Young and Tian (2019), who give no figures."

PUREJAXRL_BREAKOUT = Published(60.7, "PureJaxRL's ppo.py (31756b1), three seeds here, 10M steps: 88, 58, 36")

PLAYGROUND_SAC = Published(857, "MuJoCo Playground's Brax SAC, 5M steps")
PLAYGROUND = Published(
    861, "REPPO's own curves (cvoelcker/reppo, a7ab85b), 50M steps, layers of 512; Playground's Brax PPO: 693, SAC: 857"
)

_SCHULMAN = "Schulman et al. 2017, table 6: the last 100 training episodes, 10M steps, three seeds"


def _blind(value: float) -> Published:
    return Published(value, "the optimum without memory")


JAXMARL_IPPO = Published(
    -22.0, "JaxMARL's ippo_ff_mpe.py (c793d09) and its settings, TOTAL_TIMESTEPS=3e6, three seeds here, sampled"
)

JAXMARL_MAPPO = Published(
    -12.9, "JaxMARL's mappo_rnn_mpe.py (c793d09) and its settings, TOTAL_TIMESTEPS=3e6, one seed here, sampled"
)

_SPREAD = "Mean return an agent over MPE's 26 steps, a third of what JaxMARL logs; random play: -28.0."

_SEARCHES = "Evaluations search as acting does, without noise."

_FLICKER = "Half of the frames are blank (Hausknecht and Stone 2015). No published figure is of MinAtar."

_ABLATED = (
    "Of this row and the three below, the two with burn-in are 1.6 above the two without (standard error 0.7; as they "
    "act in training 1.1 of 0.4), and the two with the stored state level with the others (-0.2 of 0.8; 0.0 of 0.5)."
)


def _flicker(agent: str, *flags: str, variant: str = "flicker", seeds: int = 5) -> Row:
    row = Row(agent, "Breakout-MinAtar", "breakout-minatar-flicker", flags=flags, remark=_FLICKER, variant=variant)
    return dataclasses.replace(row, seeds=seeds)


def _ablation() -> tuple[Row, ...]:
    """Return r2d2 with blank frames, with and without burn-in and stored state, of one length of learning."""
    plain, zero = ("--burn-in", "0", "--sequence-length", "16"), ("--no-stored-state",)
    flags = {"flicker-no-burn-in": plain, "flicker-zero-state": zero, "flicker-zero-state-no-burn-in": plain + zero}
    return tuple(_flicker("r2d2", *given, variant=name, seeds=3) for name, given in flags.items())


def _evolution(env: str, flags: str, published: Published, remark: str = "") -> Row:
    flags = f"{flags} --hidden-sizes 32 32"
    return Row("ppo", env, "none", "evolution", tuple(flags.split()), published, together=False, remark=remark)


ROWS: tuple[Row, ...] = (
    Row("ppo", "CartPole-v1", "cartpole", published=_zoo(500, "100k")),
    Row("ppo", "Acrobot-v1", "acrobot", published=_zoo(-73.5, "1M")),
    Row("ppo", "MountainCar-v0", "mountain-car", published=_zoo(-110.4, "1M")),
    Row("ppo", "Pendulum-v1", "pendulum", published=_zoo(-172.2, "100k"), remark="Ten times the zoo's steps."),
    Row("ppo", "Breakout-MinAtar", "breakout-minatar", published=PUREJAXRL_BREAKOUT),
    Row("ppo", "Asterix-MinAtar", "asterix-minatar", published=_gymnax(15)),
    Row("ppo", "Freeway-MinAtar", "freeway-minatar", published=_gymnax(58)),
    Row("ppo", "SpaceInvaders-MinAtar", "space-invaders-minatar", published=_gymnax(131)),
    Row("ppo", "Seaquest-MinAtar", "seaquest-minatar"),
    Row("ppo", "Pong-v5", "pong", "sebulba", published=Published(20.7, _SCHULMAN), together=False, seeds=3),
    Row(
        *("ppo", "Boxing-v5", "pong", "sebulba"),
        published=Published(94.6, _SCHULMAN),
        together=False,
        seeds=1,
        remark="One run, a fifth of the published steps, a small network, by the preset that was made for Pong.",
    ),
    Row(
        *("ppo", "mjx/CartpoleSwingup", "mjx-cartpole-swingup"),
        published=Published(693, "MuJoCo Playground's Brax PPO, 60M steps"),
        remark="A twentieth of the published steps, layers of 64.",
    ),
    Row(
        *("ppo", "craftax/Classic-Symbolic", "craftax-classic"),
        published=Published(11.7, "DreamerV3 from pixels, 1M steps: 53.2% of 22 (arXiv 2502.01591)"),
        seeds=1,
        remark="One run of a plain network, and far below what learns a model of the world, at equal steps.",
    ),
    Row("ppo", "podium/Catch", "catch", published=_optimum(1)),
    Row("ppo", "podium/RepeatFirst", "repeat-first", published=_optimum(1)),
    Row("ppo", "MemoryChain-bsuite", "memory-chain", published=_optimum(1)),
    Row("a2c", "CartPole-v1", "cartpole", published=_zoo(500, "500k")),
    Row("a2c", "podium/Catch", "catch", published=_optimum(1)),
    Row("a2c", "podium/RepeatFirst", "repeat-first", published=_optimum(1)),
    Row("a2c", "MemoryChain-bsuite", "memory-chain", published=_optimum(1)),
    Row("impala", "CartPole-v1", "cartpole", published=_optimum(500)),
    Row("impala", "podium/Catch", "catch", published=_optimum(1)),
    Row("impala", "podium/RepeatFirst", "repeat-first", published=_optimum(1)),
    Row("impala", "MemoryChain-bsuite", "memory-chain", published=_optimum(1)),
    Row(
        *("pqn", "CartPole-v1", "cartpole"),
        published=_optimum(500),
        seeds=8,
        remark="The PQN authors' settings, annealed over 150,000 steps in place of 500,000, and a gamma of 0.995 for "
        "0.99. Of 88 seeds tried in all two ended below 475, at 457 and 474.5; with 0.99 four of 96, at 355 to 473.",
    ),
    Row("pqn", "Breakout-MinAtar", "breakout-minatar", published=PUREJAXRL_BREAKOUT, remark=_PQN_MINATAR),
    Row("pqn", "Asterix-MinAtar", "asterix-minatar", published=_gymnax(15), remark=_PQN_MINATAR),
    Row("pqn", "Freeway-MinAtar", "freeway-minatar", published=_gymnax(58), remark=_PQN_MINATAR),
    Row("pqn", "SpaceInvaders-MinAtar", "space-invaders-minatar", published=_gymnax(131), remark=_PQN_MINATAR),
    Row("pqn", "Seaquest-MinAtar", "seaquest-minatar", remark="The settings are the PQN authors'."),
    Row("pqn", "podium/Catch", "catch", published=_optimum(1)),
    Row("pqn", "podium/RepeatFirst", "repeat-first", published=_optimum(1)),
    Row("pqn", "MemoryChain-bsuite", "memory-chain", published=_optimum(1)),
    Row(
        *("dqn", "CartPole-v1", "cartpole"),
        published=_zoo(500, "50k"),
        remark="Below that one run, at ten times the steps. By the zoo's settings and 50k steps Stable-Baselines3 "
        "itself (2.9.2) comes to 374 of eight seeds here (19 to 500, standard error 67), podium to 253 of sixteen (19 "
        "to 500, 51): experiments/zoo_dqn.py.",
    ),
    Row("dqn", "podium/Catch", "catch", published=_optimum(1)),
    Row("dqn", "Breakout-MinAtar", "breakout-minatar", remark=_BESIDE_RAINBOW),
    Row("dqn", "Asterix-MinAtar", "asterix-minatar", remark=_BESIDE_RAINBOW),
    Row("dqn", "Freeway-MinAtar", "freeway-minatar", together=False, remark=_DQN_MINATAR),
    Row("dqn", "SpaceInvaders-MinAtar", "space-invaders-minatar", together=False, remark=_DQN_MINATAR),
    Row("dqn", "Seaquest-MinAtar", "seaquest-minatar", together=False, remark=_DQN_MINATAR),
    Row("rainbow", "CartPole-v1", "cartpole", published=_optimum(500), seeds=8),
    Row(
        *("rainbow", "Breakout-MinAtar", "breakout-minatar"),
        remark="Above dqn's mean in each of the ten evaluations; as it acts in training, with an epsilon of 0.05 for "
        "both, 21.2 to dqn's 15.2. dqn's seeds lie far apart: on another machine, where sums end in other bits, its "
        "five came to 53.2 (28 to 75; 15.9 as it acts). With windows of three steps rainbow had come to 52.8 and, "
        "sampled, 24.0.",
    ),
    Row(
        *("rainbow", "Asterix-MinAtar", "asterix-minatar"),
        remark="By a rate that falls: 55.8 without. Where dqn has one too (--anneal-steps; its row's is constant), "
        "rainbow is ahead after 1M steps over which it falls, 53.4 and 41.8 of two seeds, and level after 2M: dqn 63.4 "
        "of five, and ahead as it acts in training, 48.9. Games are cut at 1,000 steps; most of both last as long.",
    ),
    Row("ippo", "jaxmarl/MPE_simple_spread_v3", "spread", published=JAXMARL_IPPO, remark=_SPREAD),
    Row("mappo", "jaxmarl/MPE_simple_spread_v3", "spread", published=JAXMARL_MAPPO, remark=_SPREAD),
    Row("muzero", "CartPole-v1", "cartpole", published=_optimum(500), seeds=4, remark=_SEARCHES),
    Row("muzero", "Breakout-MinAtar", "breakout-minatar", seeds=2, remark=_SEARCHES),
    Row("apex", "CartPole-v1", "cartpole", published=_optimum(500)),
    Row("apex", "podium/Catch", "catch", published=_optimum(1)),
    Row("dqn", "podium/RepeatFirst", "repeat-first", published=_blind(1 / 3)),
    Row("dqn", "MemoryChain-bsuite", "memory-chain", published=_blind(0)),
    Row("r2d2", "podium/RepeatFirst", "repeat-first", published=_optimum(1)),
    Row("r2d2", "MemoryChain-bsuite", "memory-chain", published=_optimum(1)),
    _flicker("dqn"),
    dataclasses.replace(_flicker("r2d2"), remark=f"{_FLICKER} {_ABLATED}"),
    *_ablation(),
    Row(
        *("sac", "Pendulum-v1", "pendulum"),
        published=_zoo(-157.0, "20k"),
        seeds=8,
        remark="Half the zoo's steps, layers of 64 for its 256.",
    ),
    Row(
        *("sac", "mjx/CartpoleSwingup", "mjx-cartpole-swingup"),
        published=PLAYGROUND_SAC,
        remark="A twenty-fifth of the published steps, layers of 64.",
    ),
    Row(
        *("sac", "mjx/CheetahRun", "mjx-cheetah-run"),
        published=Published(912, "MuJoCo Playground's Brax SAC, 5M steps"),
        seeds=1,
        remark="One long run: a tenth of the published steps, layers of 128.",
    ),
    Row(
        *("td3", "Pendulum-v1", "pendulum"),
        published=_zoo(-151.9, "20k"),
        remark="Half the zoo's steps, layers of 64 for its 400 and 300.",
    ),
    Row(
        *("td3", "mjx/CartpoleSwingup", "mjx-cartpole-swingup"),
        published=PLAYGROUND_SAC,
        remark="A twenty-fifth of the published steps, layers of 64; the figure is SAC's.",
    ),
    Row(
        *("reppo", "Pendulum-v1", "pendulum"),
        published=_zoo(-172.2, "100k, of PPO"),
    ),
    Row(
        *("reppo", "mjx/CartpoleSwingup", "mjx-cartpole-swingup"),
        published=PLAYGROUND,
        remark="A fiftieth of the published steps, layers of 64.",
    ),
    Row(
        *("reppo", "mjx/CheetahRun", "mjx-cheetah-run"),
        published=Published(
            931, "REPPO's own curves (cvoelcker/reppo, a7ab85b), 50M steps; Playground's Brax PPO: 825"
        ),
        seeds=1,
        remark="One long run: a twenty-fifth of the published steps, layers of 128.",
    ),
    _evolution("CartPole-v1", "--num-envs 256 --rollout-length 500 --num-steps 6400000", _optimum(500)),
    _evolution(
        "Pendulum-v1",
        "--num-envs 1024 --episodes 4 --rollout-length 200 --num-steps 61440000",
        _zoo(-172.2, "100k, of PPO"),
        remark="The policy of ppo, evolved; a figure of PPO's stands beside it. Steps are cheap here: 6 s a seed.",
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Which rows, and where what they give goes."""

    list: bool = False
    """Print the names of the rows, one a line, and end."""
    only: tuple[str, ...] = ()
    """Rows to train, whether or not their result is there; none trains all whose result is missing."""
    draw: bool = False
    """Train nothing: make the pictures and the table from the results that are there."""
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
                draw(known, flags.results / f"{row.file}.png")
        _write_table(flags.results)
        return 0
    for row in [rows[name] for name in flags.only] or [row for row in ROWS if not _is_done(row, flags.results)]:
        result = train(row, flags.runs, flags.seeds or row.seeds, flags.num_steps)
        if keeps:
            write_json(flags.results / f"{row.file}.json", result)
            draw(result, flags.results / f"{row.file}.png")
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
