"""Who descends from whom in a population, from the rows of metrics that it leaves, and a picture of it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from podium.sinks import save_figure

PARENT = "parent"
"""The metric that lists, for every exchange, of every member the one that it went on from."""

SETTING = "setting_"
"""What the names of metrics begin with that say the settings of members."""


def ancestors(parents: Sequence[Sequence[float]], members: int) -> list[int]:
    """Return of every member the one at the beginning that it descends from, after these exchanges.

    >>> ancestors([[0, 1, 1], [2, 1, 2]], 3)
    [1, 1, 1]
    """
    found = list(range(members))
    for each in parents:
        found = [found[int(parent)] for parent in each]
    return found


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw how the members of a population did, and their settings; who took over from whom is a grey line.

    Args:
      rows: of metrics, with `parent` and the settings.
      path: of the picture, PNG.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    fields = [name for name in rows[-1] if name.startswith(SETTING)]
    steps, members = [row["env_steps"] for row in rows], len(rows[-1][fields[0]])
    figure = Figure(figsize=(4.8 * (1 + len(fields)), 3.6), layout="constrained")
    axes = figure.subplots(1, 1 + len(fields), squeeze=False)[0]
    colors = colormaps["viridis"](np.linspace(0, 0.95, members))
    for axis, name in zip(axes, ["episode_return", *fields], strict=True):
        table = np.array([[np.nan if x is None else x for x in row[name]] for row in rows], float)
        parents: list[Sequence[float]] = []
        for row, before, after, at in zip(rows[1:], table, table[1:], itertools.pairwise(steps), strict=False):
            lines = ancestors(row[PARENT], members)
            parents += row[PARENT]
            for member, line in enumerate(lines):
                whence = [before[line], after[member]]
                axis.plot(at, whence, color=colors[member] if line == member else "0.75", linewidth=1)
        axis.set(xlabel="environment steps of a member", ylabel=name.removeprefix(SETTING))
        if name in fields and np.nanmin(table) > 0 and np.nanmax(table) >= 10 * np.nanmin(table):
            axis.set_yscale("log")
        axis.grid(alpha=0.3)
    everyone = [parent for row in rows for parent in row[PARENT]]
    left = sorted(set(ancestors(everyone, members)))
    axes[0].set_title(f"{members} members; those left descend from {', '.join(map(str, left))}", fontsize="small")
    save_figure(figure, path, dpi=90)
