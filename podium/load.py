"""Load the policy of a run folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from podium.agent import Agent, check_is_agent, parts_of
from podium.checkpoint import Checkpoints
from podium.env import Env
from podium.evaluate import Policy
from podium.gated import gated
from podium.host import HostEnvFactory, check_is_env
from podium.league import league
from podium.multi import groups, shared
from podium.ranges import is_integer
from podium.runs import RunFolder
from podium.types import PyTree
from podium.varied import varied

TRANSFORMS: Mapping[str, Callable[..., Agent]] = {"gated": gated, "league": league, "shared": shared}
"""What makes one agent of another, by the name in `podium.agent.Transform`."""


def load(
    run_dir: Path | str,
    *,
    step: int | str | None = None,
    agent: Agent | None = None,
    env: Env | HostEnvFactory | None = None,
    seed: int = 0,
) -> Policy:
    """Return the policy that a run trained.

    Args:
      run_dir: the run folder.
      step: environment steps of a checkpoint, "best" for the one with the highest evaluation, None for the newest.
      agent: as trained; None makes it anew from the folder's config, by its registered name and by what was made of it
        (`podium.league`, `podium.gated`, `podium.multi`). One with parts of your own, such as a network, must be given.
      env: as trained; None makes it anew from the folder's config, by its registered name. One that was given as an
        object is made by its name only where that gives the same spec.
      seed: which of several seeds, from 0.

    Returns:
      a `Policy`.

    Raises:
      ValueError: there is no such run or seed, or its agent or environment cannot be made from the config.
      CheckpointError: no good checkpoint.
    """
    folder = RunFolder.open(run_dir)
    env = load_env(folder) if env is None else env
    check_is_env(env)
    agent = _load_agent(folder, env) if agent is None else agent
    check_is_agent(agent)
    seeds = folder.config.get("seeds")
    if not is_integer(seeds, 1):
        raise ValueError(f"The config of {folder.path} has seeds={seeds!r}, where a positive integer should be.")
    if not is_integer(seed, 0, seeds - 1):
        raise ValueError(f"seed={seed!r} is none of the run's {seeds} seeds; use 0 to {seeds - 1}.")

    def states(key: jax.Array) -> PyTree:
        init = lambda key: agent.init(key, env.spec)
        return init(key) if seeds == 1 else jax.vmap(init)(jax.random.split(key, seeds))

    checkpoints = Checkpoints(folder.checkpoints)
    try:
        number = checkpoints.best_step() if step == "best" else step
        target = jax.eval_shape(states, jax.random.key(0))
        state, _, _ = checkpoints.restore(target, number, fallback=step is None, prefix="agent")  # type: ignore[arg-type]
    finally:
        checkpoints.close()
    if seeds > 1:
        state = jax.tree.map(lambda x: x[seed], state)
    played = agent.evaluated
    return Policy(played, played.actor(state), env.spec)


def load_env(folder: RunFolder) -> Env | HostEnvFactory:
    """Make the environment of a run again.

    Raises:
      ValueError: its name does not make it again.
    """
    from podium import envs

    name, options = _read_record(folder, "env", "options")
    record = folder.config["env"]
    if record.get("options") is None:
        return _load_object(folder, name, record.get("object"))
    try:
        return envs.make(name, **options)
    except (TypeError, ValueError) as error:  # TypeError: an option of the wrong type.
        raise ValueError(f"The environment of {folder.path} cannot be made by name; pass env=. {error}") from error


def _load_object(folder: RunFolder, name: str, record: Any) -> Env | HostEnvFactory:
    """Make an environment that training was given as an object: by its name, if what that makes has the same spec."""
    from podium import envs

    if isinstance(record, dict) and name in envs.names():
        env = envs.make(name)
        if env.spec.sha256() == record.get("spec_sha256"):
            return env
    raise ValueError(
        f"The environment of {folder.path} was given as an object, and its name {name!r} does not make it again; pass "
        "the environment yourself: podium.load(run_dir, env=...)."
    )


def _load_agent(folder: RunFolder, env: Env | HostEnvFactory) -> Agent:
    _read_record(folder, "agent", "config")
    try:
        return _made(folder.config["agent"], env)
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # The first three: of a record by another hand.
        raise ValueError(f"The agent of {folder.path} cannot be made by name; pass agent=. {error}") from error


def _made(record: Mapping[str, Any], env: Env | HostEnvFactory) -> Agent:
    """Make the agent that `podium.train.agent_record` recorded."""
    agent = _made_by_name(record, env)
    lacking = sorted(set(record.get("brought", ())).difference(parts_of(agent)))  # A registered one may bring its own.
    if lacking:
        raise ValueError(f"{record['name']} was trained with parts that no folder holds: {', '.join(lacking)}.")
    return agent


def _made_by_name(record: Mapping[str, Any], env: Env | HostEnvFactory) -> Agent:
    from podium import agents

    transforms, settings = list(record.get("transforms") or ()), record.get("settings")
    if transforms and transforms[0]["name"] == "groups":
        agent = _made_of_groups(record["name"], transforms.pop(0), env)
    else:
        agent = agents.make(record["name"], record.get("config"), env)
        agent = agent._replace(make=agents.maker(record["name"], env)) if settings else agent
    for transform in transforms:
        if transform["name"] not in TRANSFORMS:
            raise ValueError(f"Nothing named {transform['name']!r} makes one agent of another.")
        agent = TRANSFORMS[transform["name"]](agent, **transform["options"])
    if not settings:
        return agent
    assert agent.make is not None
    return varied(agent.make, agent.config, settings)


def _made_of_groups(name: str, transform: Mapping[str, Any], env: Env | HostEnvFactory) -> Agent:
    members, each = transform["options"]["members"], transform["agents"]
    made = {group: (_made(each[group], env), members[group]) for group in members}
    return groups(made, transform["options"]["rollout_length"], name)


def _read_record(folder: RunFolder, field: str, details: str) -> tuple[str, dict[str, Any]]:
    """Return the name under which the run's agent or environment was made, and with what; check what a file can say."""
    record: Any = folder.config.get(field)
    if isinstance(record, dict):
        name, found = record.get("name"), record.get(details)
        if isinstance(name, str) and isinstance(found, (dict, type(None))):
            return name, found or {}
    raise ValueError(f"The config of {folder.path} names no {field} in the form podium writes; pass {field}=.")
