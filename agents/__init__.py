"""Agents, one algorithm a file, and a registry by which command lines and run folders find them by name.

An agent of your own joins with `register`: `podium train --plugins my_module --agent mine` then trains it, with a flag
for every field of its configuration.
"""

from __future__ import annotations

import dataclasses
import functools
import reprlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from podium.agent import Agent
from podium.agents import (
    a2c,
    alphazero,
    apex,
    describe,
    dqn,
    impala,
    ippo,
    mappo,
    muzero,
    ppo,
    pqn,
    r2d2,
    rainbow,
    reppo,
    sac,
    td3,
    vdn,
)
from podium.ranges import did_you_mean

__all__ = [
    "Entry",
    "a2c",
    "alphazero",
    "apex",
    "dqn",
    "get",
    "impala",
    "ippo",
    "make",
    "maker",
    "mappo",
    "muzero",
    "names",
    "ppo",
    "pqn",
    "r2d2",
    "rainbow",
    "register",
    "reppo",
    "sac",
    "td3",
    "vdn",
]


class Entry(NamedTuple):
    """What is registered of an agent.

    Attributes:
      make: `(config) -> Agent`.
      config: the dataclass of its hyperparameters.
      describe: `(config, num_envs, rollout_length) -> rows`, what an update learns from, in words by title.
      plans: whether it searches by the rules of what it plays: `make` then takes the environment too, as `model`.
    """

    make: Callable[..., Agent]
    config: type
    describe: Callable[[Any, int, int], Mapping[str, str]] = describe.of_any
    plans: bool = False


_entries: dict[str, Entry] = {
    "a2c": Entry(a2c.make, a2c.Config, describe.of_a2c),
    "alphazero": Entry(alphazero.make, alphazero.Config, describe.of_alphazero, plans=True),
    "apex": Entry(apex.make, apex.Config, describe.of_apex),
    "dqn": Entry(dqn.make, dqn.Config, describe.of_dqn),
    "impala": Entry(impala.make, impala.Config, describe.of_impala),
    "ippo": Entry(ippo.make, ippo.Config, describe.of_ppo),
    "mappo": Entry(mappo.make, mappo.Config, describe.of_ppo),
    "muzero": Entry(muzero.make, muzero.Config, describe.of_muzero),
    "ppo": Entry(ppo.make, ppo.Config, describe.of_ppo),
    "pqn": Entry(pqn.make, pqn.Config, describe.of_pqn),
    "r2d2": Entry(r2d2.make, r2d2.Config, describe.of_r2d2),
    "rainbow": Entry(rainbow.make, rainbow.Config, describe.of_rainbow),
    "reppo": Entry(reppo.make, reppo.Config, describe.of_reppo),
    "sac": Entry(sac.make, sac.Config, describe.of_sac),
    "td3": Entry(td3.make, td3.Config, describe.of_td3),
    "vdn": Entry(vdn.make, vdn.Config, describe.of_dqn),
}


def names() -> list[str]:
    """List the agents that `make` knows."""
    return sorted(_entries)


def get(name: str) -> Entry:
    """Return what is registered under a name.

    Raises:
      ValueError: for an unknown name, with the nearest known one.
    """
    if name not in _entries:
        hint = did_you_mean(name, _entries)
        raise ValueError(f"No agent is named {name!r}.{hint} There are: {', '.join(names())}.")
    return _entries[name]


def register(
    name: str,
    make: Callable[[Any], Agent],
    config: type,
    describe: Callable[[Any, int, int], Mapping[str, str]] = describe.of_any,
) -> None:
    """Let `make(name, fields)`, command lines and run folders make an agent of your own.

    Args:
      name: as command lines and run folders say it.
      make: `(config) -> Agent`.
      config: a dataclass, whose fields become flags; each needs a default to be left out.
      describe: see `Entry`.

    Raises:
      ValueError: the name is empty, has spaces or is taken by another agent, or `config` is no dataclass.
    """
    if not name or name != "".join(name.split()):
        raise ValueError(f"{name!r} is no name for an agent; use letters without spaces between them.")
    if not isinstance(config, type) or not dataclasses.is_dataclass(config):
        raise ValueError(f"config={config!r} of agent {name!r} must be a dataclass, whose fields become flags.")
    entry = Entry(make, config, describe)
    if _entries.get(name, entry) != entry:
        raise ValueError(f"An agent is named {name!r} already; choose another name.")
    _entries[name] = entry


def maker(name: str, env: Any = None) -> Callable[[Any], Agent]:
    """Return what makes an agent of its configuration.

    Args:
      name: as registered.
      env: what it is to play, for one that plans.

    Raises:
      ValueError: for an unknown name, or no environment where it plans.
    """
    entry = get(name)
    if not entry.plans:
        return entry.make
    if env is None:
        raise ValueError(f"{name} searches by the rules of what it plays; give env, the environment.")
    return functools.partial(entry.make, model=env)


def make(name: str, config: Any = None, env: Any = None) -> Agent:
    """Make an agent from its name and its `Config`, or the fields of it, as a run folder stores them.

    Args:
      name: as registered.
      config: a `Config` of this agent, or by name the fields that are not as `Config` has them; None for none.
      env: what it is to play, for one that plans.

    Raises:
      ValueError: for an unknown name or field, or what is neither fields nor this agent's `Config`.

    >>> make("ppo", {"gamma": 0.9}).config.gamma
    0.9
    """
    filled = _filled(name, get(name).config, config)
    # A run folder finds the agent again by these two, whatever an agent of the user's own called itself.
    return maker(name, env)(filled)._replace(name=name, config=filled, transforms=())


def _filled(name: str, config_type: type, config: Any) -> Any:
    """Return a `Config` from one, or from fields of it."""
    if type(config) is config_type:  # One of an agent that was made of this one has fields of its own.
        return config
    if not isinstance(config, Mapping | None):
        wanted = f"{config_type.__module__}.{config_type.__qualname__}"
        raise ValueError(f"config={reprlib.repr(config)} is no Config of {name}; give a {wanted}, or fields by name.")
    known = {field.name for field in dataclasses.fields(config_type)}
    unknown = sorted(set(config or {}) - known)
    if unknown:
        raise ValueError(f"{name} has no field {unknown[0]!r}; it has {', '.join(sorted(known))}.")
    # JSON has no tuples.
    fields = {key: tuple(value) if isinstance(value, list) else value for key, value in (config or {}).items()}
    return config_type(**fields)
