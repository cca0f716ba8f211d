"""What to do in a few minutes on a GPU: `benchmark.py gpu`, in parts of at most eight minutes.

Each part is a row of pieces, every one a process of its own, so that none takes another down; what a piece gave, or how
it failed, is written before the next begins. Given again with the same folder, a part does what is not done yet.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import machine

from podium.files import write_json
from podium.sinks import save_figure

HERE = Path(__file__).resolve().parent
GRACE_SECONDS = 20.0
"""Between asking a piece to end and ending it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuFlags:
    """Check and time podium on a GPU (or whatever JAX finds), in parts; each writes JSON and a picture as it goes."""

    part: int = 1
    """1: correctness; 2: Anakin; 3: the Atari emulator; 4: Sebulba, central inference, evolution; 5: Pong, trained."""
    minutes: float = 8.0
    """Time for the part; a piece that does not fit is ended, and those after it are left to the next time."""
    out: Path = Path("gpu")
    """Folder for what comes of it: gpu-part-N.json and .png, and of part 5 gpu-pong.tar.gz, to go on from."""
    small: bool = False
    """Sizes that a CPU does in a minute or two: to see that everything runs."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """One process: a script of this folder with arguments, whose last line of output is JSON."""

    name: str
    script: str
    arguments: str

    def command(self) -> list[str]:
        """Return what to run."""
        return [sys.executable, str(HERE / self.script), *self.arguments.split()]


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
    check = lambda name: Piece(name, "gpu_checks.py", f"{name}{' --small' if small else ''}")
    return [*map(check, ("parity", "traces", "backends")), Piece("matmul", "benchmark.py", "matmul")]


def _anakin(small: bool) -> list[Piece]:
    found = []
    for num_envs in (64,) if small else (64, 1024, 8192, 65536):
        steps = max(200_000, num_envs * 128 * 4) if not small else 20_000
        for env, hidden in (("CartPole-v1", "64 64"), ("Breakout-MinAtar", "128 128")):
            sizes = f"--env {env} --num-envs {num_envs} --num-steps {steps} --repeats 3 --hidden-sizes {hidden}"
            found.append(Piece(f"anakin {env} {num_envs}", "benchmark.py", f"anakin --devices 1 {sizes}"))
        updates = 2 if small else max(2, 2**21 // (num_envs * 128))
        sizes = f"--num-envs {num_envs} --updates {updates} --repeats 3"
        found += [
            Piece(f"paired {env} {num_envs}", "benchmark.py", f"paired --env {env} {sizes}")
            for env in ("CartPole-v1", "Breakout-MinAtar")
        ]
    steps = 2**14 if small else 2**26
    found.append(
        Piece("env CartPole-v1", "benchmark.py", f"env --env CartPole-v1 --num-envs 65536 --num-steps {steps * 4}")
    )
    found.append(
        Piece(
            "dqn Breakout-MinAtar",
            "benchmark.py",
            f"anakin --agent dqn --env Breakout-MinAtar --num-steps {steps // 256}",
        )
    )
    found.append(Piece("solve CartPole-v1", "benchmark.py", f"solve --runs {1 if small else 5}"))
    return found


def _emulator(small: bool) -> list[Piece]:
    found = []
    for num_envs in (16,) if small else (1024, 8192, 65536):
        for mode in ("emulate",) if small else ("emulate", "render", "inference", "train"):
            for backend in ("xla", "pallas"):
                if backend == "pallas" and (small or mode not in ("emulate", "train")):
                    continue  # A CPU interprets the kernel; what is drawn and acted is the same.
                sizes = f"--num-envs {num_envs} --steps {2 if small else 16} --repeats {1 if small else 3}"
                rest = f"--mode {mode} --backend {backend} --devices 1 --envpool-seconds 0 --noop-max 0"
                found.append(Piece(f"atari {mode} {backend} {num_envs}", "benchmark.py", f"atari {sizes} {rest}"))
    return found


def _beside_the_host(small: bool) -> list[Piece]:
    few = "--num-envs 8 --rollout-length 8 --updates 2 --repeats 1" if small else ""
    networks = ("negligible",) if small else ("negligible", "nature_cnn", "impala_resnet")
    found = [
        Piece(f"sebulba {network}", "benchmark.py", f"sebulba --network {network} {few or '--actor-threads 2'}")
        for network in networks
    ]
    few = "--num-envs 8 --updates 2 --repeats 1" if small else ""
    found.append(Piece("central", "benchmark.py", f"central {few}"))
    few = "--population 16 --generations 2 --repeats 1" if small else ""
    found.append(Piece("evolution", "benchmark.py", f"evolution {few}"))
    return found


def measure(flags: GpuFlags) -> dict[str, Any]:
    """Do a part; returns what the last line says."""
    if not flags.minutes > 0:
        raise ValueError(f"minutes={flags.minutes} must be greater than 0; 8 is usual.")
    todo, deadline = pieces(flags.part, flags.small), time.monotonic() + 60 * flags.minutes
    flags.out.mkdir(parents=True, exist_ok=True)
    if flags.part == 5:
        return _train_pong(flags, deadline)
    path = flags.out / f"gpu-part-{flags.part}.json"
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for piece in todo:
        if "error" not in results.get(piece.name, {"error": ""}):
            continue
        left = deadline - time.monotonic() - GRACE_SECONDS
        results[piece.name] = run(piece, left) if left > 0 else {"error": "not begun: no time was left"}
        write_json(path, results)
        print(f"{piece.name}: {results[piece.name].get('error', 'done')}", file=sys.stderr, flush=True)
    draw(flags.out / f"gpu-part-{flags.part}.png", results)
    failed = [name for name, row in results.items() if "error" in row]
    return {"what": "gpu", "part": flags.part, "pieces": len(todo), "failed": failed, "file": str(path)}


def run(piece: Piece, seconds: float) -> dict[str, Any]:
    """Run a piece for at most so long; return its JSON and wall time, or an `error` and the end of what it said."""
    began = time.monotonic()
    with subprocess.Popen(
        piece.command(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=machine.environment()
    ) as process:
        try:
            out, err = process.communicate(timeout=seconds)
            error = None if process.returncode == 0 else f"exit code {process.returncode}"
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            error = f"ended after {seconds:.0f} s"
    command = f"python experiments/{piece.script} {piece.arguments}".strip()
    wall = {"command": command, "wall_seconds": time.monotonic() - began}
    if error is None:
        try:
            return {**json.loads(out.strip().splitlines()[-1]), **wall}
        except (ValueError, IndexError):
            error = "its last line is no JSON"
    return {"error": error, "said": (err or out).strip().splitlines()[-30:], **wall}


def _train_pong(flags: GpuFlags, deadline: float) -> dict[str, Any]:
    """Train PPO on the emulated Pong until the time is up, from where the archive ends, and archive the run."""
    folder, archive = flags.out / "pong", flags.out / "gpu-pong.tar.gz"
    if archive.exists() and not folder.exists():
        with tarfile.open(archive) as packed:
            packed.extractall(flags.out, filter="data")
    what = ["train", "--agent", "ppo", "--env", "atari/Pong", "--placement", "anakin", "--preset", "atari-ppo-wide"]
    if flags.small:
        what += "--num-envs 8 --rollout-length 8 --num-minibatches 4 --num-steps 128 --torso small_cnn".split()
        what += "--eval-every 0 --eval-episodes 1 --env-options max_episode_frames=200".split()
    what += ["--run-dir", str(folder), "--no-progress", "--json", *(["--resume"] if folder.exists() else [])]
    began = time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-m", "podium", *what],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=machine.environment(),
    ) as process:
        try:
            out, err = process.communicate(timeout=max(1.0, deadline - time.monotonic() - 3 * GRACE_SECONDS))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # It writes a checkpoint, and ends.
            try:
                out, err = process.communicate(timeout=2 * GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                out, err = process.communicate()
    if folder.exists():
        with tarfile.open(archive, "w:gz") as packed:
            packed.add(folder, "pong")
    row: dict[str, Any] = {"what": "gpu", "part": 5, "exit_code": process.returncode}
    row |= {"command": " ".join(["podium", *what]), "wall_seconds": time.monotonic() - began, "file": str(archive)}
    metrics = folder / "metrics.jsonl"
    row["rows"] = metrics.read_text().splitlines()[-3:] if metrics.exists() else []
    with contextlib.suppress(ValueError, IndexError):
        row["summary"] = json.loads(out.strip().splitlines()[-1])
    if process.returncode:
        row["said"] = err.strip().splitlines()[-30:]
    write_json(flags.out / "gpu-part-5.json", row)
    return row


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
