"""A run as its folder has it: what is checked and read before it is resumed. Nothing here writes."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import warnings
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

from podium import distributed
from podium.checkpoint import CheckpointError, Checkpoints
from podium.placement.contract import Program
from podium.runs import RunFolder, compare_config
from podium.schedule import Schedule
from podium.sinks import read_metrics
from podium.types import PyTree

MAY_CHANGE = frozenset(
    {"num_steps", "eval_every", "eval_episodes", "eval_steps", "checkpoint_every", "log_every", "devices"}
)
"""What a resumed run may do otherwise than the run it resumes."""

OF_PLACEMENT = ("num_lanes", "placement")
"""What of the configuration checkpoints tell too: another placement that took the run over may have others."""


@dataclasses.dataclass(frozen=True)
class Saved:
    """A run that is resumed, at its newest good checkpoint, or at its beginning where there is none yet.

    Attributes:
      folder: of the run.
      checkpoints: in it.
      update: iterations done.
      state: of the program; None where there is no checkpoint, or another placement saved it.
      agent: the agent's State that another placement saved; None elsewhere.
      rows: of metrics up to there.
      evaluation: the newest.
      tally: record of the metrics since the last row; None starts one.
      wall_seconds: that the run has taken.
    """

    folder: RunFolder
    checkpoints: Checkpoints
    update: int = 0
    state: PyTree = None
    agent: PyTree = None
    rows: tuple[dict[str, Any], ...] = ()
    evaluation: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tally: Mapping[str, Any] | None = None
    wall_seconds: float = 0.0


def read_saved(
    folder: RunFolder,
    config: Mapping[str, Any],
    program: Program,
    schedule: Schedule,
    keep_checkpoints: int,
    may_change: Set[str] = frozenset(),
) -> Saved:
    """Check that the run in a folder can be resumed, and read it.

    All processes read, so all must see the folder; process 0 says which checkpoint is good. Of a state that another
    placement saved only the agent's is read.

    Args:
      folder: of the run.
      config: that it is resumed with.
      program: that resumes it.
      schedule: that it is resumed on.
      keep_checkpoints: newest ones to keep.
      may_change: settings of the placement that may differ.

    Raises:
      ValueError: the configuration differs where it may not, or the run has done more steps than `schedule` allows.
      CheckpointError: no good checkpoint, or it does not fit the program.
    """
    _check_checkpoints(folder.checkpoints)
    checkpoints = Checkpoints(folder.checkpoints, keep_checkpoints)
    newest = _meta_of_newest(checkpoints)
    saved_under = newest.get("placement")
    adopts = saved_under not in (None, program.layout)
    _compare(folder.config, config, newest.get("config") or {}, adopts, may_change)
    rows = read_metrics(folder.metrics) if folder.metrics.exists() else []
    seen = distributed.gather(checkpoints.steps())
    if any(steps != seen[0] for steps in seen):
        raise ValueError(f"run_dir={folder.path} differs between processes; put it on a disk that all hosts share.")
    if not seen[0]:
        # Stopped before the first checkpoint: the beginning is the newest good state.
        warnings.warn(f"{folder.path} holds no checkpoint yet; the run starts from its beginning.", stacklevel=3)
        return Saved(folder, checkpoints)
    target = program.abstract_state()
    state, meta, env_steps = _restore_alike(checkpoints, target.agent if adopts else target, "agent" if adopts else "")
    done = int(meta["update"])
    if done > schedule.total:
        steps = schedule.steps_per_update
        raise ValueError(
            f"num_steps allows {schedule.total * steps} environment steps, but the run has done {done * steps}; give "
            "a larger num_steps to resume it."
        )
    if adopts and done < schedule.total and distributed.is_first():
        print(
            f"Resumed under {program.layout} what {saved_under} saved: the agent's state is exactly as it was; "
            "episodes, and a replay where there is one, begin anew.",
            file=sys.stderr,
        )
    return Saved(
        folder,
        checkpoints,
        update=done,
        state=None if adopts else state,
        agent=state if adopts else None,
        rows=tuple(row for row in rows if row.get("env_steps", 0) <= env_steps),
        evaluation=dict(meta.get("evaluation", {})),
        tally=None if adopts else meta.get("tally"),
        wall_seconds=float(meta.get("wall_seconds", 0.0)),
    )


def _compare(
    old: Mapping[str, Any], new: Mapping[str, Any], last: Mapping[str, Any], adopts: bool, may_change: Set[str]
) -> None:
    """Compare configurations; what the newest checkpoint tells, `last`, counts before what the run began with."""
    old = {**old, **last}
    free, was, now = MAY_CHANGE | {"num_lanes"} if adopts else MAY_CHANGE, old.get("placement"), new["placement"]
    if adopts or (isinstance(was, Mapping) and was.get("name") != now["name"]):
        free |= {"placement"}
    else:
        free |= {f"placement.settings.{name}" for name in may_change}
    compare_config(old, new, free)


def _meta_of_newest(checkpoints: Checkpoints) -> dict[str, Any]:
    """Return what the newest checkpoint says of itself; nothing if it cannot be read."""
    try:
        return checkpoints.meta(checkpoints.steps()[-1])
    except (CheckpointError, IndexError):
        return {}  # Damage is reported where it is restored.


def _restore_alike(checkpoints: Checkpoints, target: PyTree, prefix: str) -> tuple[PyTree, dict[str, Any], int]:
    """Restore the newest good checkpoint; with several processes all take the one that process 0 finds good."""
    if distributed.is_first():
        state, meta, step = checkpoints.restore(target, prefix=prefix)
        distributed.from_first(step)
        return state, meta, step
    with contextlib.closing(checkpoints):
        return checkpoints.restore(target, distributed.from_first(None), fallback=False, prefix=prefix)


def _check_checkpoints(folder: Path) -> None:
    """Raise ValueError where something else is in the place of the checkpoints, or they cannot be listed."""
    try:
        if folder.exists():
            next(folder.iterdir(), None)
    except OSError as error:
        raise ValueError(
            f"{folder} cannot be read ({error.strerror}); mend it, or remove it to start from the beginning."
        ) from None
