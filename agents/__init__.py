"""Agents, one algorithm a file, and a registry from which a run folder finds its agent again."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from podium.agent import Agent
from podium.agents import a2c, apex, dqn, impala, ppo

__all__ = ["a2c", "apex", "dqn", "impala", "make", "names", "ppo"]

_modules: dict[str, Any] = {"a2c": a2c, "apex": apex, "dqn": dqn, "impala": impala, "ppo": ppo}


def names() -> list[str]:
    """List the agents that `make` knows."""
    return sorted(_modules)


def make(name: str, config: Mapping[str, Any] | None = None) -> Agent:
    """Make an agent from its name and the fields of its `Config`, as a run folder stores them.

    Raises:
      ValueError: for an unknown name or field.

    >>> make("ppo", {"gamma": 0.9}).config.gamma
    0.9
    """
    if name not in _modules:
        near = difflib.get_close_matches(name, _modules, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"No agent is named {name!r}.{hint} There are: {', '.join(names())}.")
    module = _modules[name]
    known = {field.name for field in dataclasses.fields(module.Config)}
    unknown = sorted(set(config or {}) - known)
    if unknown:
        raise ValueError(f"{name} has no field {unknown[0]!r}; it has {', '.join(sorted(known))}.")
    # JSON has no tuples.
    fields = {key: tuple(value) if isinstance(value, list) else value for key, value in (config or {}).items()}
    return module.make(module.Config(**fields))
