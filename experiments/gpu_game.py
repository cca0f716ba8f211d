"""Part 5 of `benchmark.py gpu`: PPO on a game of Atari emulated on the device, until the time is up, and its curve.

While the device trains, the host plays every checkpoint in envpool's version of the game, greedily and by sampling.
Given again with the same folder, it trains on from where it ended, and plays what has not been played.
"""

from __future__ import annotations

import concurrent.futures
import json
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import machine
import processes

from podium.files import write_json
from podium.sinks import save_figure

AFTER_SECONDS = 50.0
"""For writing what was learnt and playing with it."""
CHECKPOINTS = 10
"""Over all steps, each of them a point of the curve."""
PLAYERS = 6
"""Processes that play at once."""
EPISODES = 10
MODES = {"greedy": "--greedy", "sampled": "--no-greedy"}


def train(game: str, num_steps: int, out: Path, deadline: float, small: bool) -> dict[str, Any]:
    """Train until `deadline` (of `time.monotonic`), and play meanwhile; return what there is, and write it as it comes.

    Args:
      game: a name that both atari/NAME and envpool's NAME-v5 have.
      num_steps: environment steps, if there is time for all.
      out: folder of gpu-GAME.json and .png, the run, and the policy at its end.
      deadline: when to be done.
      small: whether to take sizes for a CPU, and to play the emulated game.
    """
    name = game.lower()
    folder, written = out / name, out / f"gpu-{name}.json"
    known = json.loads(written.read_text()) if written.exists() else {}
    command = _command(game, num_steps, folder, small)
    row: dict[str, Any] = {"what": "gpu", "part": 5, "game": game, "command": shlex.join(["podium", *command])}
    row["curve"] = {
        step: played for step, played in known.get("curve", {}).items() if all("summary" in x for x in played.values())
    }
    began, before = time.monotonic(), known.get("wall_seconds", 0.0)
    until = deadline - (0.0 if small else AFTER_SECONDS)
    plays: dict[concurrent.futures.Future[dict[str, Any]], tuple[str, str]] = {}

    def collect() -> None:
        for play in [play for play in plays if play.done()]:
            step, mode = plays.pop(play)
            row["curve"].setdefault(step, {})[mode] = play.result()
            write_json(written, row)

    def left() -> float:
        return max(1.0, deadline - time.monotonic())

    with concurrent.futures.ThreadPoolExecutor(1) as trainer, concurrent.futures.ThreadPoolExecutor(PLAYERS) as players:
        trained = trainer.submit(processes.podium, command, until - time.monotonic(), machine.environment())
        ended = False
        while plays or not ended:
            ended = trained.done()  # Before one looks for checkpoints, of which the last is written by then.
            if ended and "exit_code" not in row:
                row |= {**trained.result(), "wall_seconds": before + time.monotonic() - began}
            begun = {step for step, _ in plays.values()} | set(row["curve"])
            for step in sorted(_checkpoints(folder) - begun, key=int):
                for mode, flag in MODES.items():
                    play = [*_play(game, folder, step, small), flag]
                    environment = {**machine.environment(), "JAX_PLATFORMS": "cpu"}
                    plays[players.submit(processes.podium, play, left(), environment)] = (step, mode)
            collect()
            time.sleep(0.2)
    metrics = folder / "metrics.jsonl"
    row["rows"] = metrics.read_text().splitlines() if metrics.exists() else []
    write_json(written, row)
    draw(out / f"gpu-{name}.png", game, row["curve"])
    keep = shlex.join(["policy", "--run", str(folder), "--out", str(out / f"{name}-policy.npz")])
    row["policy"] = processes.run(processes.Piece("policy", "gpu_checks.py", keep), left(), None, alone=False)
    write_json(written, row)
    return row


def points(curve: Mapping[str, Mapping[str, Any]], mode: str) -> list[tuple[int, float]]:
    """Return the steps and the mean returns of what was played in a mode to its end."""
    found = {int(step): played.get(mode, {}).get("summary") for step, played in curve.items()}
    return [(step, summary["eval_return"]) for step, summary in sorted(found.items()) if summary]


def draw(path: Path, game: str, curve: Mapping[str, Mapping[str, Any]]) -> None:
    """Draw the curve of both modes; nothing where nothing was played."""
    lines = {mode: points(curve, mode) for mode in MODES}
    if not any(lines.values()):
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for mode, line in lines.items():
        axes.plot(*zip(*line, strict=True), marker="o", label=mode) if line else None
    axes.set(xlabel="environment steps", ylabel=f"return of {EPISODES} games", title=f"PPO, atari/{game}")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    save_figure(figure, path, dpi=90, metadata={"Software": None})


def _command(game: str, num_steps: int, folder: Path, small: bool) -> list[str]:
    command = f"train --agent ppo --env atari/{game} --placement anakin --preset atari-ppo-wide".split()
    if small:
        num_steps = 128
        command += "--num-envs 8 --rollout-length 8 --num-minibatches 4 --torso small_cnn --eval-episodes 1".split()
        command += "--env-options max_episode_frames=200".split()
    command += f"--num-steps {num_steps} --anneal-steps {num_steps} --eval-every 0".split()
    command += f"--checkpoint-every {-(-num_steps // (2 if small else CHECKPOINTS))}".split()
    command += f"--keep-checkpoints {CHECKPOINTS + 1}".split()
    return [*command, "--run-dir", str(folder), "--no-progress", "--json", *(["--resume"] if folder.exists() else [])]


def _play(game: str, folder: Path, step: str, small: bool) -> list[str]:
    where: Sequence[str] = [] if small else ["--env", f"{game}-v5"]
    return ["evaluate", str(folder), "--step", step, "--episodes", str(EPISODES), "--json", *where]


def _checkpoints(folder: Path) -> set[str]:
    """Return the steps of the checkpoints that are whole: one that is being written has another name."""
    return {path.name for path in (folder / "checkpoints").glob("*") if path.name.isdigit()}
