"""What a run leaves behind: rows of metrics and where they go, checkpoints, and the summary of how it ended."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np

from podium import distributed
from podium.checkpoint import Checkpoints
from podium.host import frames_per_step
from podium.placement.contract import Program
from podium.runs import RunFolder
from podium.saved import Saved
from podium.schedule import Schedule
from podium.sinks import CurveSink, JsonlSink, PictureSink, Sinks, TerminalSink, WandbSink
from podium.tally import Tally
from podium.types import PyTree


class Recorder:
    """Keeps one run: its clock, rows, sinks, checkpoints and folder; of several processes only the first writes.

    Every method may be called at any time. Leaving it as a context releases files and threads, after an error too.

    Args:
      program: that runs.
      schedule: of the run.
      folder: of the run; None writes no files, as in all processes but the first.
      keeps: whether the run has a folder, in whichever process.
      keep_checkpoints: newest ones to keep.
      sinks: further places for rows.
      config: what of the run's checkpoints are to tell.
      saved: of the run that is resumed; the folder's metrics are taken back to it. None for a new run.

    Attributes:
      rows: of metrics, one a stop that logs.
      evaluation: the newest.
      saved_update: the newest iteration that is in a checkpoint; 0 before any.
    """

    def __init__(
        self,
        program: Program,
        schedule: Schedule,
        *,
        folder: RunFolder | None = None,
        keeps: bool = False,
        keep_checkpoints: int = 3,
        sinks: Sequence[Any] = (),
        config: Mapping[str, Any] | None = None,
        saved: Saved | None = None,
    ):
        self._program, self._schedule, self._folder, self._keeps = program, schedule, folder, keeps
        self._additions, self._config = program.additions, config or {}
        self._tally = Tally(self._additions, saved.tally if saved else None)
        self.rows: list[dict[str, Any]] = list(saved.rows) if saved else []
        self.evaluation: Mapping[str, Any] = saved.evaluation if saved else {}
        self.saved_update = saved.update if saved else 0
        self._earlier_seconds = saved.wall_seconds if saved else 0.0
        self._began = time.perf_counter()
        self._train_seconds = 0.0
        self._train_steps = 0
        self._checkpoints: Checkpoints | None = None
        self._sinks = Sinks(sinks)
        if folder is None:
            return
        self._checkpoints = saved.checkpoints if saved else Checkpoints(folder.checkpoints, keep_checkpoints)
        self._metrics = JsonlSink(folder.metrics)
        if saved:
            self._metrics.truncate_after(self.env_steps(saved.update))
        pictures = [PictureSink(folder.path / name, self.rows, draw) for name, draw in program.pictures.items()]
        self._sinks[:0] = [self._metrics, CurveSink(folder.curve, self.rows), *pictures]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Release files and threads; after a good end there is nothing left to do."""
        for sink in list(self._sinks):
            with contextlib.suppress(Exception):
                sink.close({})
        self._sinks.clear()
        if self._checkpoints:
            self._checkpoints.close()

    @property
    def run_dir(self) -> Path | None:
        """The folder of the run, in the process that writes it."""
        return self._folder.path if self._folder else None

    def env_steps(self, update: int) -> int:
        """Return the environment steps of `update` iterations, of one seed: rows, also those that are no transition.

        `_taken` counts transitions; this is known before a run, and the same for every run of these sizes.
        """
        return update * self._schedule.steps_per_update

    def count(self, metrics: Mapping[str, Any], num_updates: int, seconds: float) -> None:
        """Add a chunk to the row under way."""
        self._tally.add(metrics, num_updates, seconds)
        self._train_seconds += seconds
        self._train_steps += self._taken(metrics, num_updates)

    def show(self, update: int) -> None:
        """Let the line of progress show how far the row under way has got."""
        self._sinks.show(self._row(update))

    def record(self, update: int, evaluation: Mapping[str, Any] | None = None) -> None:
        """End the row under way at iteration `update`, with the evaluation of that state if there was one."""
        row, self._tally = self._row(update), Tally(self._additions)
        self._write(row, evaluation or {})

    def add_evaluation(self, evaluation: Mapping[str, Any]) -> None:
        """Add an evaluation to the newest row, in the folder too."""
        row = self.rows.pop()
        if self._folder:
            self._metrics.truncate_after(row["env_steps"] - 1)
        self._write(row, evaluation)

    def _write(self, row: dict[str, Any], evaluation: Mapping[str, Any]) -> None:
        self.evaluation = evaluation or self.evaluation
        self.rows.append(row | dict(evaluation))
        self._sinks.write(self.rows[-1])

    def lacks_evaluation(self, update: int) -> bool:
        """Tell whether the newest row is of iteration `update`, and an evaluation that was due there is missing."""
        row = self.rows[-1] if self.rows else {}
        missing = row.get("updates") == update and "eval_return" not in row
        return missing and self._schedule.due(self._schedule.evaluate, update)

    def save(self, state: PyTree, update: int) -> None:
        """Save a checkpoint, in the background; all processes call it."""
        if not self._keeps:
            return
        self.saved_update = update
        state = distributed.whole(state)
        if self._checkpoints is None:
            return
        row = self.rows[-1] if self.rows and self.rows[-1]["updates"] == update else {}
        evaluated = row.get("eval_return_cut", row.get("eval_return"))  # Cut alike, so that steps can be compared.
        meta = {
            "update": update,
            "wall_seconds": self._wall_seconds(),
            "eval_return": None if evaluated is None else float(self._program.merit(evaluated)),
            "evaluation": self.evaluation,
            "tally": self._tally.record(),
            "placement": self._program.layout,
            "config": self._config,
        }
        self._checkpoints.save(self.env_steps(update), state, meta)

    def check(self) -> None:
        """Raise CheckpointError for a checkpoint that could not be written; never wait."""
        if self._checkpoints:
            self._checkpoints.check()

    def last_good(self) -> str:
        """Say where the last good checkpoint is, once it is written."""
        if not distributed.is_first():
            return "process 0 says which checkpoint is the last good one"
        if self._checkpoints:
            self._checkpoints.finish()
        steps = self._checkpoints.steps() if self._checkpoints else []
        return f"the last good checkpoint is at {steps[-1]} environment steps" if steps else "there is no checkpoint"

    def finish(self, update: int, params_sha256: str, interrupted: str | None) -> dict[str, Any]:
        """Write the summary, end every sink, and return the summary."""
        if self._checkpoints:
            self._checkpoints.finish()
        last = self.rows[-1] if self.rows else {}
        devices = self._program.devices
        summary = {
            **{name: value for name, value in last.items() if name not in self.evaluation},
            **self.evaluation,
            **self._steps(update),
            "wall_seconds": self._wall_seconds(),
            "steps_per_second": self._train_steps / self._train_seconds if self._train_seconds else None,
            "compile_seconds": self._program.compile_seconds,
            "params_sha256": params_sha256,
            "num_devices": len(devices),
            "platform": devices[0].platform,
            "num_processes": distributed.num_processes(),
            "interrupted": interrupted,
        }
        if self._folder:
            before = self._folder.read_summary() if not self._train_steps else None
            if before and before.get("params_sha256") == params_sha256 and not before.get("interrupted"):
                summary = before  # The run had ended already: its clock and its speed stand.
            else:
                self._folder.write_summary(summary)
        self._sinks.close(summary)
        if interrupted and distributed.is_first():
            print(f"Stopped by {interrupted}: {self._how_to_resume()}", file=sys.stderr)
        return summary

    def _how_to_resume(self) -> str:
        if self._folder is None:
            return "nothing was saved: give run_dir to keep checkpoints."
        if not self.saved_update:
            return f"nothing is trained yet; the same command with --resume (resume=True) begins {self._folder.path}."
        return f"saved in {self._folder.path}; the same command with --resume (resume=True) resumes it from there."

    def _row(self, update: int) -> dict[str, Any]:
        averages = self._tally.averages()
        own = {
            **self._steps(update),
            "updates": update,
            "wall_seconds": self._wall_seconds(),
            "steps_per_second": self._taken(averages, self._tally.updates) / self._tally.seconds,
            "compile_seconds": self._program.compile_seconds,
        }
        return {**own, **averages, **own}  # Whatever an agent calls its metrics: a resumed run counts by these.

    def _steps(self, update: int) -> dict[str, int]:
        """Return the environment steps so far, and beside them the simulator's frames where a step has several."""
        steps, frames = self.env_steps(update), frames_per_step(self._program.env)
        return {"env_steps": steps} | ({"frames": steps * frames} if frames > 1 else {})

    def _taken(self, metrics: Mapping[str, Any], num_updates: int) -> int:
        """Return the steps of all seeds that iterations took: those counted, where some of their rows are no step."""
        nominal = num_updates * self._schedule.steps_per_update * self._program.sizes.seeds
        return int(np.sum(metrics.get("valid_steps", nominal)))

    def _wall_seconds(self) -> float:
        return self._earlier_seconds + time.perf_counter() - self._began


def check_sinks(sinks: Sequence[Any]) -> None:
    """Raise ValueError unless all can take rows of metrics and a summary."""
    if not isinstance(sinks, Sequence):
        raise ValueError(f"sinks={sinks!r} must be a sequence of sinks; one is given as [sink].")
    for sink in sinks:
        if not all(callable(getattr(sink, name, None)) for name in ("write", "close")):
            raise ValueError(f"sinks={list(sinks)!r}: {sink!r} must have the methods write(row) and close(summary).")


def make_sinks(
    schedule: Schedule,
    progress: bool,
    wandb: Literal["disabled", "offline", "online"],
    config: Mapping[str, Any],
    path: Path | None,
    further: Sequence[Any],
) -> list[Any]:
    """Return the sinks of the process that writes, but for those of the run's folder, which `Recorder` has.

    Args:
      schedule: of the run.
      progress: show a line of progress.
      wandb: mode of Weights & Biases.
      config: of the run, for Weights & Biases.
      path: of the folder; None where there is none.
      further: the user's own.
    """
    sinks: list[Any] = [TerminalSink(schedule.total * schedule.steps_per_update, progress)]
    if wandb != "disabled":
        sinks.append(WandbSink(wandb, "podium", config, path or Path(".")))
    return [*sinks, *further]
