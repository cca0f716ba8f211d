"""Weights & Biases."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from podium.files import one_line, to_jsonable
from podium.sinks.rows import Row, mean


class WandbSink:
    """Send metrics to Weights & Biases. Whatever goes wrong there becomes one warning; training continues.

    Args:
      mode: "disabled" does nothing and does not import wandb; "offline" keeps files for `wandb sync`; "online" sends,
        and falls back to "offline" where no key is configured, rather than to ask for one.
      project: of the run.
      config: shown beside it.
      dir: where wandb keeps its files.
      name: of the run; None lets wandb choose.
    """

    def __init__(
        self,
        mode: Literal["disabled", "offline", "online"],
        project: str,
        config: Mapping[str, Any],
        dir: Path,
        name: str | None = None,
    ):
        if mode not in ("disabled", "offline", "online"):
            raise ValueError(f"wandb={mode!r} is not a mode; use 'disabled', 'offline' or 'online'.")
        self._run: Any = None
        if mode != "disabled":
            self._guard(lambda: self._start(mode, project, config, Path(dir), name))

    def write(self, row: Row) -> None:
        """Log one row at its `env_steps`."""
        if self._run is not None:
            values = {key: mean(value) for key, value in row.items()}
            self._guard(lambda: self._run.log(values, step=int(row["env_steps"])))

    def close(self, summary: Row) -> None:
        """Log the summary and end the run."""
        if self._run is not None:
            self._guard(lambda: self._run.summary.update(to_jsonable(summary)))
        if self._run is not None:
            self._guard(lambda: self._run.finish())
        self._run = None

    def _start(self, mode: str, project: str, config: Mapping[str, Any], folder: Path, name: str | None) -> None:
        try:
            import wandb
        except ImportError:
            warnings.warn("wandb is not installed, so it is off; `pip install wandb` to use it.", stacklevel=5)
            return
        if mode == "online" and not wandb.login(prompt=False):
            warnings.warn("wandb has no API key, so it is offline; `wandb login`, then `wandb sync`.", stacklevel=5)
            mode = "offline"
        folder.mkdir(parents=True, exist_ok=True)
        # Capturing the console would fight with the live progress line.
        settings = wandb.Settings(console="off", silent=True, init_timeout=60)
        self._run = wandb.init(
            mode=mode,  # type: ignore[arg-type]
            project=project,
            config=to_jsonable(config),
            dir=str(folder),
            name=name,
            settings=settings,
        )

    def _guard(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except Exception as error:
            self._run = None
            warnings.warn(f"wandb failed and is off from here on: {one_line(error)}", stacklevel=4)
