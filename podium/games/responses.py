"""A PSRO run on disk: after every response all policies, and what they gain against one another."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from podium.checkpoint import Checkpoints
from podium.runs import RunFolder, check_new_folder, compare_config
from podium.types import PyTree


class Responses:
    """The folder of a run, new or resumed; nothing is written before `begin`.

    Args:
      run_dir: the folder.
      resume: whether there is a run in it that goes on.
      config: what the run is asked for, anything JSON can hold.
      size: N, policies at the end.

    Raises:
      ValueError: a folder that is not free, or holds no run, or one of another `config`.
    """

    def __init__(self, run_dir: Path | str, resume: bool, config: Mapping[str, Any], size: int):
        self._path, self._resume, self._config, self._size = Path(run_dir), resume, config, size
        if resume:
            compare_config(RunFolder.open(run_dir).config, config)
        else:
            check_new_folder(run_dir)
        self._checkpoints = Checkpoints(self._path / "checkpoints", keep=2, keep_best=False)

    def begin(self, pool: PyTree, placement: str) -> tuple[PyTree, np.ndarray]:
        """Make the folder, or read it.

        Args:
          pool: [N, ...], parameters of the policies of a new run.
          placement: where they are trained, in words.

        Returns:
          `(pool, payoffs [M, M])`, of the M policies that are there already.
        """
        if not self._resume:
            RunFolder.create(self._path, self._config, placement)
        if not self._checkpoints.steps():
            return pool, np.zeros((0, 0))
        target = {"pool": pool, "payoffs": np.zeros((self._size, self._size))}
        saved, meta, _ = self._checkpoints.restore(target)
        known = int(meta["policies"])
        return saved["pool"], saved["payoffs"][:known, :known]

    def save(self, env_steps: int, pool: PyTree, payoffs: np.ndarray) -> None:
        """Keep the policies that payoffs [M, M] are of."""
        padded = np.pad(payoffs, (0, self._size - len(payoffs)))
        self._checkpoints.save(env_steps, {"pool": pool, "payoffs": padded}, {"policies": len(payoffs)})

    def close(self) -> None:
        """Wait until all is written."""
        self._checkpoints.close()
