"""What to do in a few minutes on a GPU: `benchmark.py gpu`, in parts of at most eight minutes.

Each part is a row of pieces, every one a process of its own, so that none takes another down; what a piece gave, or how
it failed, is written before the next begins. Given again with the same folder, a part does what is not done yet.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import gpu_checks
import gpu_game
import processes
from processes import Piece

import podium
from podium.files import write_json
from podium.ranges import check_fields
from podium.sinks import save_figure

SIDE_BY_SIDE_SHARE = 0.4
"""Of a part's time, at most, that goes to compiling side by side what is timed afterwards."""
PARITIES = 8
"""Processes that the agents are spread over."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuFlags:
    """Check and time podium on a GPU (or whatever JAX finds), in parts; each writes JSON and a picture as it goes."""

    part: int = 1
    """1: correctness; 2: Anakin; 3: the Atari emulator; 4: Sebulba, central inference, evolution, search, Tag;
    5: a game of Atari, trained."""
    game: str = "Pong"
    """Of part 5: a name that both atari/NAME and envpool's NAME-v5 have."""
    num_steps: int = 20_000_000
    """Of part 5: environment steps, over which the rate falls, if there is time for all."""
    minutes: float = 8.0
    """Time for the part; a piece that does not fit is ended, and those after it are left to the next time."""
    out: Path = Path("gpu")
    """Folder for what comes of it: gpu-part-N.json and .png; of part 5 gpu-GAME.json and .png, the run to go on from,
    and its policy."""
    small: bool = False
    """Sizes that a CPU does in a minute or two: to see that everything runs."""


def pieces(part: int, small: bool) -> list[Piece]:
    """Return the pieces of a part, the most telling first.

    Raises:
      ValueError: there is no such part.
    """
    rows = {1: _correctness, 2: _anakin, 3: _emulator, 4: _beside_the_host, 5: lambda small: []}
    if part not in rows:
        raise ValueError(f"part={part} must lie between 1 and {len(rows)}.")
    return rows[part](small)


def _correctness(small: bool) -> list[Piece]:
    check = lambda name, arguments: Piece(name, "gpu_checks.py", arguments, timed=False)
    if small:
        found = [check("traces", "traces --small"), check("parity", "parity --small")]
    else:
        found = [check(f"traces of {game}", f"traces --only {game}") for game in gpu_checks.GAMES]
        names = list(gpu_checks.AGENTS)
        for first in range(PARITIES):  # As many processes, since each agent's programs take long to compile.
            mine = names[first::PARITIES]
            found.append(check(f"parity of {', '.join(mine)}", f"parity --only {shlex.join(mine)}"))
    return [*found, Piece("matmul", "benchmark.py", "matmul")]


def _anakin(small: bool) -> list[Piece]:
    found = []
    for num_envs in (64,) if small else (64, 1024, 8192, 65536):
        updates = 2 if small else min(40, max(2, 2**15 // num_envs))
        sizes = f"--num-envs {num_envs} --updates {updates} --repeats 5"
        found += [
            Piece(f"paired {env} {num_envs}", "benchmark.py", f"paired --env {env} {sizes}")
            for env in ("CartPole-v1", "Breakout-MinAtar")
        ]
    steps = 2**14 if small else 2**26
    bare = f"env --env CartPole-v1 --num-envs 65536 --num-steps {steps * 4}"
    replay = f"anakin --agent dqn --env Breakout-MinAtar --num-steps {1000 if small else 10_000} --repeats 2"
    return [
        Piece("env CartPole-v1", "benchmark.py", bare),
        *found,
        Piece("dqn Breakout-MinAtar", "benchmark.py", replay),
        Piece("solve CartPole-v1", "benchmark.py", f"solve --runs {1 if small else 5}", cached=False),
    ]


def _emulator(small: bool) -> list[Piece]:
    if small:
        return [_atari("emulate", 16, steps=2, repeats=1)]  # A CPU has no kernel: this is XLA's.
    return [
        *(_atari("emulate", num_envs) for num_envs in (1024, 8192, 65536)),
        _atari("train", 8192),
        _atari("train", 8192, "--dtype bfloat16"),
        _atari("train", 1024),
        _atari("render", 8192),
        _atari("inference", 8192),
        _atari("emulate", 1024, "--backend xla", steps=1, repeats=1, cached=False),
    ]


def _atari(mode: str, num_envs: int, more: str = "", steps: int = 16, repeats: int = 3, cached: bool = True) -> Piece:
    sizes = f"--mode {mode} --num-envs {num_envs} --steps {steps} --repeats {repeats} {more}".strip()
    rest = "--devices 1 --envpool-seconds 0 --noop-max 0"
    return Piece(f"atari {mode} {num_envs} {more}".strip(), "benchmark.py", f"atari {sizes} {rest}", cached=cached)


def _beside_the_host(small: bool) -> list[Piece]:
    few = "--num-envs 8 --rollout-length 8 --updates 2 --repeats 1" if small else ""
    usual = few or "--actor-threads 2 --repeats 1"
    turns = {"negligible": f"--network negligible --stacks {usual}"}
    if not small:
        turns |= {network: f"--network {network} {usual}" for network in ("nature_cnn", "impala_resnet")}
        sizes = "--actor-threads 2 --env-threads 4", "--actor-threads 1 --groups 4", "--actor-threads 4 --groups 1"
        turns |= {f"negligible {each}": f"--network negligible {each} --repeats 1" for each in sizes}
    found = [
        Piece(f"sebulba {name}", "benchmark.py", f"sebulba {given}", cached=False) for name, given in turns.items()
    ]
    few = "--num-envs 8 --updates 2 --repeats 1" if small else ""
    found.append(Piece("central", "benchmark.py", f"central {few}", cached=False))
    few = "--population 16 --generations 2 --repeats 1" if small else ""
    found.append(Piece("evolution", "benchmark.py", f"evolution {few}"))
    few = "--num-envs 8 --searches 1 --repeats 1" if small else ""
    found.append(Piece("search", "benchmark.py", f"search {few}"))
    few = "--agents 10 --total 100 --steps 2 --repeats 1" if small else ""
    found.append(Piece("tag", "benchmark.py", f"tag {few}", cached=False))  # Most of its time is NumPy's.
    return found


def measure(flags: GpuFlags) -> dict[str, Any]:
    """Do a part; returns what the last line says."""
    if not flags.minutes > 0:
        raise ValueError(f"minutes={flags.minutes} must be greater than 0; 8 is usual.")
    check_fields(flags, counts=("num_steps",))
    if flags.part == 5 and not {f"atari/{flags.game}", f"{flags.game}-v5"} <= set(podium.envs.names()):
        raise ValueError(f"game={flags.game!r} must be what atari/NAME and envpool's NAME-v5 have, such as 'Boxing'.")
    todo, deadline = pieces(flags.part, flags.small), time.monotonic() + 60 * flags.minutes
    flags.out.mkdir(parents=True, exist_ok=True)
    if flags.part == 5:
        return gpu_game.train(flags.game, flags.num_steps, flags.out, deadline, flags.small)
    path = flags.out / f"gpu-part-{flags.part}.json"
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    waiting = [piece for piece in todo if "error" in results.get(piece.name, {"error": ""})]
    cache = flags.out / "compiled"

    def left() -> float:
        return deadline - time.monotonic() - processes.GRACE_SECONDS

    def done(piece: Piece, row: dict[str, Any]) -> None:
        results[piece.name] = row
        write_json(path, results)
        print(f"{piece.name}: {row.get('error', 'done')}", file=sys.stderr, flush=True)

    share = SIDE_BY_SIDE_SHARE * 60 * flags.minutes
    seconds = lambda piece: min(left(), share) if piece.timed else left()
    with concurrent.futures.ThreadPoolExecutor(len(waiting) or 1) as threads:
        beside = {
            threads.submit(processes.run, piece, seconds(piece), cache, alone=False): piece
            for piece in waiting
            if not piece.timed or (piece.cached and not flags.small)
        }
        for future in concurrent.futures.as_completed(beside):
            if not beside[future].timed:
                done(beside[future], future.result())
    for piece in waiting:
        if piece.timed:
            kept = cache if piece.cached else None
            done(piece, processes.run(piece, left(), kept) if left() > 0 else {"error": "no time was left"})
    draw(flags.out / f"gpu-part-{flags.part}.png", results)
    failed = [name for name, row in results.items() if "error" in row]
    return {"what": "gpu", "part": flags.part, "pieces": len(todo), "failed": failed, "file": str(path)}


def draw(path: Path, results: dict[str, Any]) -> None:
    """Draw every rate of a part as a bar, on a logarithmic axis; pieces without one are left out."""
    rates = {name: row["steps_per_second"] for name, row in results.items() if row.get("steps_per_second")}
    if not rates:
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 0.6 + 0.3 * len(rates)), layout="constrained")
    axes = figure.subplots()
    axes.barh(list(rates), list(rates.values()))
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("environment steps a second")
    save_figure(figure, path, dpi=120)
