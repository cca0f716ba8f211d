"""One of several processes: do a few updates of each case, and save the parameters it then holds."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

import podium
from podium.agent import Agent
from podium.agents import a2c, dqn, impala, ppo

NUM_ENVS = 8

AGENTS: dict[str, tuple[Agent, int, int]] = {
    "ppo": (ppo.make(ppo.Config(hidden_sizes=(16,), num_epochs=1, num_minibatches=2, learning_rate=1e-3)), 8, 3),
    "a2c": (a2c.make(a2c.Config(hidden_sizes=(16,))), 8, 3),
    "impala": (impala.make(impala.Config(hidden_sizes=(16,))), 8, 3),
    "dqn": (dqn.make(dqn.Config(hidden_sizes=(16,), batch_size=32, min_replay_size=64, buffer_capacity=1024)), 1, 14),
}
"""By name: the agent, its rollout's length, and updates to do."""


def run(placement: Any, name: str) -> tuple[dict[str, np.ndarray], dict[str, Any], list[str]]:
    """Return the agent's state by leaf, the metrics, and the kinds of collectives in the learner's program."""
    agent, length, updates = AGENTS[name]
    env = podium.envs.make("podium/Catch")
    program = placement.build(agent, env, num_envs=NUM_ENVS, rollout_length=length, max_updates=updates)
    try:
        state, metrics = program.chunk(program.init(0), updates)
        leaves = jax.tree_util.tree_leaves_with_path(program.agent_state(state))
        text = (program.loop.learner if isinstance(placement, podium.Sebulba) else program.loop).compiled_text()
        kinds = r"\s(all-\w+|collective-\w+|reduce-scatter)(?:-start)?\("
        found = sorted(set(re.findall(kinds, text)))
        return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}, metrics, found
    finally:
        program.close()


def placement(name: str, devices: Any = 1) -> Any:
    """Return Anakin, LocalSGD of four workers on a ring, or Sebulba in lockstep, on `devices` of each process."""
    if name == "anakin":
        return podium.Anakin(devices)
    if name == "ring":
        return podium.LocalSGD(4, average_every=1, mix="ring", devices=devices)
    return podium.Sebulba(devices, devices, lockstep=True)


def main(folder: Path, cases: list[str]) -> None:
    """Join the other processes; a case is PLACEMENT-AGENT."""
    podium.distributed.initialize()
    for case in cases:
        where, agent = case.split("-")
        params, metrics, collectives = run(placement(where), agent)
        kept = {name: metrics[name] for name in ("episodes", "episode_return_sum")}
        np.savez(folder / f"{case}.{podium.distributed.process_id()}.npz", **params, **kept, collectives=collectives)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
