"""`check_metrics`: what a program says of its metrics is what it makes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from podium.agent import Agent, fresh_carry, fresh_past
from podium.contracts import ContractError
from podium.env import Env, restart
from podium.learn import learn
from podium.placement.contract import Program
from podium.rollout import begin, rollout
from podium.tally import OF_EPISODES
from podium.types import EnvSpec, Key, PyTree, is_spec


def check_metrics(program: Program, metrics: Iterable[str]) -> None:
    """Check that each metric of a chunk adds up to a row in a way that somebody said.

    A metric is the agent's own, which is a mean, or one of finished episodes, or named in `program.additions`.

    Args:
      program: that made the chunk.
      metrics: names, as the metrics that `program.chunk` returned.

    Raises:
      ContractError: naming the metrics that nobody declared, or those declared for the agent's own.
    """
    own = metrics_of(program.agent, program.env.spec, program.sizes.num_envs, program.sizes.rollout_length)
    declared = {*program.additions, *OF_EPISODES}
    made = set(metrics) - {"finite"}
    who = f"{program.agent.name} under {program.layout}"
    if unknown := made - own - declared:
        raise ContractError(
            f"{who}: {', '.join(sorted(unknown))} add up in a way that nobody declared. Name each in "
            "Program.additions as 'sum', 'mean' or 'max'."
        )
    if both := own & declared & made:
        raise ContractError(
            f"{who}: {', '.join(sorted(both))} are the agent's own metrics, which are means, and are declared by the "
            "program. Rename one of the two."
        )


def metrics_of(agent: Agent, spec: EnvSpec, num_envs: int = 8, rollout_length: int = 8) -> set[str]:
    """Return the names of an agent's own metrics; nothing is compiled."""

    def names(key: Key) -> dict[str, Any]:
        env = _standstill(spec)
        state, index = agent.init(key, spec), jnp.arange(num_envs)
        start = begin(key, env, index, fresh_carry(agent, spec, index), fresh_past(agent, index.shape[0]))
        _, trajectory, _ = rollout(key, agent, env, agent.actor(state), start, rollout_length, jnp.int32(0))
        replay: PyTree = ()
        if agent.replay is not None:
            item = jax.tree.map(lambda x: jnp.zeros(x.shape[2:], x.dtype), agent.plan(key, state, trajectory).data)
            replay = agent.replay.init(item, num_envs, 1, rollout_length)
        return learn(key, agent, state, replay, trajectory, 1).metrics

    return set(jax.eval_shape(names, jax.random.key(0)))


def _standstill(spec: EnvSpec) -> Env:
    """Return an environment of these specs in which nothing happens; also for those that run on the host."""
    obs = jax.tree.map(lambda leaf: leaf.zeros(), spec.obs, is_leaf=is_spec)
    return Env(spec, reset=lambda key: ((), restart(obs)), step=lambda key, state, action: (state, restart(obs)))
