"""The table of a sweep: what it says of every setting, how settings are ranked, and its files and pictures."""

from __future__ import annotations

import dataclasses
import itertools
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from podium.files import write_atomic, write_json
from podium.loop import Result
from podium.ranges import is_number
from podium.sinks import interval, save_figure
from podium.space import Setting

LEGEND = 6
"""Settings that are named beside the curves, the best ones."""


@dataclasses.dataclass(frozen=True)
class Group:
    """Settings that one program tries.

    Attributes:
      fixed: of all of them.
      numbers: of each, what varies.
      places: of each, in the list of all settings.
      folder: name of the run's.
    """

    fixed: Setting
    numbers: list[dict[str, float]]
    places: list[int]
    folder: str

    def some(self, indices: Sequence[int], folder: str) -> Group:
        """Return the group of some of its settings."""
        pick = lambda values: [values[i] for i in indices]
        return Group(self.fixed, pick(self.numbers), pick(self.places), folder)


def rows_of(group: Group, result: Result, seeds: int) -> list[dict[str, Any]]:
    """Return what the table says of each setting of a group, but for what its earlier rungs have part in."""
    last = _listed(result.summary["eval_return"])
    diverged = np.ravel(np.asarray(result.state.diverged))
    evaluated = [row for row in result.metrics if "eval_return" in row]
    curves = [(row["env_steps"], _listed(row["eval_return"])) for row in evaluated]
    rows = []
    for index, numbers in enumerate(group.numbers):
        mine = slice(index * seeds, (index + 1) * seeds)
        returns = last[mine]
        rows.append(
            {
                **group.fixed,
                **numbers,
                "eval_return": float(np.mean(returns)),
                "interval": list(interval(returns)),
                "median": float(np.median(returns)),
                "eval_returns": returns,
                "steps_to_threshold": None,
                "diverged": int(diverged[mine].sum()),
                "env_steps": result.summary["env_steps"],
                "program": group.folder,
                "first_seed": index * seeds,
                "curve": [[steps, float(np.mean(values[mine]))] for steps, values in curves],
            }
        )
    return rows


def first_reaching(threshold: float | None, curve: Sequence[Sequence[float]]) -> float | None:
    """Return the steps at which a curve first reached the threshold."""
    return next((steps for steps, mean in curve if threshold is not None and mean >= threshold), None)


def rank(row: Mapping[str, Any]) -> tuple[float, float]:
    """Return what settings are ranked by, the least first: the last return, and of equals the mean of the curve."""
    return -row["eval_return"], -float(np.mean([mean for _, mean in row["curve"]]))


class Progress:
    """A sink that says after every evaluation how far a program is, and which setting is best so far."""

    def __init__(self, rows: list[dict[str, Any]], group: Group, seeds: int, where: str, num_steps: int):
        self._rows, self._group, self._seeds, self._where, self._num_steps = rows, group, seeds, where, num_steps

    def write(self, row: Mapping[str, Any]) -> None:
        """Say so, where a row has an evaluation."""
        if "eval_return" not in row:
            return
        returns = np.reshape(_listed(row["eval_return"]), (len(self._group.numbers), -1)).mean(1)
        tried = [({**self._group.fixed, **self._group.numbers[i]}, float(x)) for i, x in enumerate(returns)]
        names = tried[0][0]
        tried += [({name: each[name] for name in names}, each["eval_return"]) for each in self._rows]
        setting, best = max(tried, key=lambda each: each[1])
        done = min(1.0, row["env_steps"] / self._num_steps)
        print(f"{self._where}, {done:.0%}: best so far {words_of(setting)} ({best:.4g})", file=sys.stderr, flush=True)

    def close(self, summary: Mapping[str, Any]) -> None:
        """Do nothing."""


def words_of(setting: Mapping[str, Any]) -> str:
    """Return a setting as people read it."""
    say = lambda value: f"{value:.4g}" if isinstance(value, float) else str(value)
    return " ".join(f"{name}={say(value)}" for name, value in setting.items())


def command_of(agent: str, env: str, env_options: Mapping[str, Any], config: Any, train: Mapping[str, Any]) -> str:
    """Return the line of a shell that trains an agent so, whatever presets there are.

    Args:
      agent: its name.
      env: name of the environment.
      env_options: of it.
      config: of the agent; what differs from its class's defaults is said.
      train: of `podium.train`.
    """
    usual = {field.name: field.default for field in dataclasses.fields(config)}
    told = {name: value for name in usual if (value := getattr(config, name)) != usual[name]}
    flags = ["--agent", agent, "--env", env, "--preset", "none"]
    flags += ["--env-options", *(f"{name}={value!r}" for name, value in env_options.items())] if env_options else []
    return shlex.join(
        ["podium", "train", *flags, *itertools.chain(*(_flag(*each) for each in (dict(train) | told).items()))]
    )


def _flag(name: str, value: Any) -> list[str]:
    dashed = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{dashed}" if value else f"--no-{dashed}"]
    return [f"--{dashed}", *(map(str, value) if isinstance(value, tuple | list) else [str(value)])]


def write(path: Path, rows: Sequence[Mapping[str, Any]], fields: tuple[str, ...], env: str, command: str) -> None:
    """Write the table, best first, the best setting to paste as a `command` and as a preset, and the picture."""
    write_json(path / "table.json", rows)
    best = {name: rows[0][name] for name in fields}
    write_atomic(path / "best.txt", f"{command}\n\nPreset({env!r}, 'podium sweep', {best!r})\n".encode())
    draw(rows, fields, path / "sweep.png")


def draw(rows: Sequence[Mapping[str, Any]], fields: Sequence[str], path: Path) -> None:
    """Draw the mean return of every setting while it was trained, and the last ones against every field."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * (1 + len(fields)), 3.6), layout="constrained")
    axes = figure.subplots(1, 1 + len(fields), squeeze=False)[0]
    colors = colormaps["viridis"](np.linspace(0.95, 0, len(rows)))  # Best first, brightest.
    for row, color in zip(reversed(rows), reversed(colors), strict=True):
        axes[0].plot(*np.array(row["curve"]).T, color=color, linewidth=1)
    axes[0].set(xlabel="environment steps", ylabel="return of greedy play, mean over seeds")
    named = [words_of({name: row[name] for name in fields}) for row in rows[:LEGEND]]
    axes[0].legend(axes[0].lines[::-1][:LEGEND], named, fontsize="x-small")
    for axis, name in zip(axes[1:], fields, strict=True):
        values = [row[name] for row in rows]
        are_numbers = all(map(is_number, values))
        at = values if are_numbers else [str(value) for value in values]
        spread = [np.abs(np.array(row["interval"]) - row["eval_return"]) for row in rows]
        axis.errorbar(at, [row["eval_return"] for row in rows], np.array(spread).T, fmt="o", color="C0", alpha=0.7)
        if are_numbers and min(values) > 0 and max(values) >= 10 * min(values):
            axis.set_xscale("log")
        axis.set(xlabel=name, ylabel="return, 95% interval over seeds")
    for axis in axes:
        axis.grid(alpha=0.3)
    save_figure(figure, path, dpi=90, metadata={"Software": None})


def _listed(value: Any) -> list[float]:
    """Return what a run says of each of its seeds, one or several; NaN where it says nothing."""
    listed: list[float] = np.ravel(np.asarray(value, float)).tolist()
    return listed
