"""`podium list`: the names that flags take, one a line."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Annotated

import tyro

from podium import agents, envs, presets
from podium import placement as placements
from podium.commands import plugins
from podium.commands.console import read_flags
from podium.envs import near_misses


def _presets() -> list[str]:
    rows = [(agent, name, preset.env) for agent in presets.agents() for name, preset in presets.of_agent(agent).items()]
    agent_width, name_width = (max(len(row[column]) for row in rows) for column in (0, 1))
    return [f"{agent:<{agent_width}}  {name:<{name_width}}  {env}" for agent, name, env in rows]


_LISTS: dict[str, Callable[[], list[str]]] = {
    "agents": agents.names,
    "environments": envs.names,
    "placements": placements.names,
    "presets": _presets,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """List agents, environments (the usual of those on the CPU), placements, or presets of which agent for what."""

    what: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="|".join(_LISTS))]
    """What to list."""
    plugins: tuple[str, ...] = ()
    """Modules to import first, which register agents, environments or placements of your own."""


def run(argv: Sequence[str]) -> int:
    """Print the list.

    Raises:
      ValueError: there is no such list.
    """
    plugins.load(argv)
    flags = read_flags(Flags, argv, prog="podium list")
    if flags.what not in _LISTS:
        near = near_misses(flags.what, list(_LISTS), most=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{flags.what!r} is nothing to list.{hint} There are: {', '.join(_LISTS)}.")
    print("\n".join(_LISTS[flags.what]()))
    return 0
