"""Let some of a run's independent runs go on in a folder of their own, exactly; those left out end where they are."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from podium.checkpoint import Checkpoints
from podium.placement.contract import Program
from podium.runs import RunFolder


def narrow(old: Path, new: Path, program: Program, keep: Sequence[int], changes: Mapping[str, Any]) -> None:
    """Make a run folder that `podium.train(resume=True)` goes on from, with some of the seeds of another.

    A kill leaves the new folder whole or not there.

    Args:
      old: folder of the run.
      new: folder to make.
      program: of the run, with its seeds; it need not be compiled.
      keep: which of the seeds, in the order that they shall have.
      changes: of the configuration in `config.json`, beside `seeds`.

    Raises:
      CheckpointError: the run has no good checkpoint.
    """
    folder, checkpoints = RunFolder.open(old), Checkpoints(old / "checkpoints")
    try:
        state, meta, env_steps = checkpoints.restore(program.abstract_state())
    finally:
        checkpoints.close()
    pick = lambda x: x[keep[0]] if len(keep) == 1 else x[jax.numpy.asarray(keep)]
    partial = new.with_name(f".{new.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    made = RunFolder.create(partial, {**folder.config, "seeds": len(keep), **changes}, folder.record["placement"])
    written = Checkpoints(made.checkpoints)
    try:
        written.save(env_steps, jax.tree.map(pick, state), {"update": meta["update"], "placement": meta["placement"]})
        written.finish()
    finally:
        written.close()
    os.rename(partial, new)
