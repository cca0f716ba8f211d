"""Load the policy of a run folder."""

from __future__ import annotations

from pathlib import Path

import jax

from podium.agent import Agent
from podium.checkpoint import Checkpoints
from podium.env import Env
from podium.evaluate import Policy
from podium.runs import RunFolder
from podium.types import PyTree


def load(
    run_dir: Path | str,
    *,
    step: int | str | None = None,
    agent: Agent | None = None,
    env: Env | None = None,
    seed: int = 0,
) -> Policy:
    """Return the policy that a run trained.

    Args:
      run_dir: the run folder.
      step: environment steps of a checkpoint, "best" for the one with the highest evaluation, None for the newest.
      agent: as trained; None makes it anew from the folder's config, by its registered name.
      env: as trained; None makes it anew, likewise.
      seed: which of several seeds, from 0.

    Returns:
      a `Policy`.

    Raises:
      ValueError: there is no such run or seed, or its agent or environment cannot be made from the config.
      CheckpointError: no good checkpoint.
    """
    folder = RunFolder.open(run_dir)
    env = load_env(folder) if env is None else env
    agent = _load_agent(folder) if agent is None else agent
    seeds = int(folder.config["seeds"])
    if not 0 <= seed < seeds:
        raise ValueError(f"seed={seed} is none of the run's {seeds} seeds; use 0 to {seeds - 1}.")

    def states(key: jax.Array) -> PyTree:
        init = lambda key: agent.init(key, env.spec)  # noqa: E731
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
    return Policy(agent, agent.actor(state), env.spec)


def load_env(folder: RunFolder) -> Env:
    """Make the environment of a run again.

    Raises:
      ValueError: it was not made by name.
    """
    from podium import envs

    record = folder.config["env"]
    try:
        return envs.make(record["name"], **(record["options"] or {}))
    except ValueError as error:
        raise ValueError(f"The environment of {folder.path} cannot be made by name; pass env=. {error}") from error


def _load_agent(folder: RunFolder) -> Agent:
    from podium import agents

    record = folder.config["agent"]
    try:
        return agents.make(record["name"], record["config"])
    except ValueError as error:
        raise ValueError(f"The agent of {folder.path} cannot be made by name; pass agent=. {error}") from error
