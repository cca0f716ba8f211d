"""Every placement says of every metric that it makes how it adds up to a row, over environments of either kind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import podium
from podium.agent import Agent
from podium.agents import dqn, ppo
from podium.host import on_host
from podium.placement import PLACEMENTS
from podium.tally import Tally
from podium.testing import check_metrics

NUM_ENVS, LENGTH, UPDATES = 8, 9, 2  # A game of Catch lasts 9 steps.
KINDS = ("pure", "host")

PPO = ppo.make(ppo.Config(hidden_sizes=(8,), num_epochs=1, num_minibatches=1))
DQN = dqn.make(dqn.Config(hidden_sizes=(8,), batch_size=8, min_replay_size=64, buffer_capacity=512))
SMALL: dict[str, dict[str, Any]] = {
    "anakin": {"devices": 1},
    "central_inference": {"devices": 1, "envs_per_actor": 4},
    "distributed_actors": {"workers": 2},
    "parameter_server": {"workers": 2, "devices": 1},
    "local_sgd": {"workers": 2, "devices": 1},
    "evolution": {"devices": 1},
    "population": {"devices": 1, "members": 2, "space": {"learning_rate": (1e-4, 1e-3)}, "exploit_every": 144},
}
"""Settings that make a placement small; those of a name that is not here are its own."""


def made(placement: Any, agent: Agent, kind: str) -> tuple[podium.Program, dict[str, Any]]:
    """Return the program, closed, and the metrics of a chunk."""
    env: Any = podium.envs.make("podium/Catch")
    env = on_host(env) if kind == "host" else env
    program = placement.build(agent, env, num_envs=NUM_ENVS, rollout_length=LENGTH, max_updates=UPDATES)
    try:
        return program, program.chunk(program.init(0), UPDATES)[1]
    finally:
        program.close()


def check(program: podium.Program, metrics: dict[str, Any]) -> None:
    check_metrics(program, metrics)
    assert metrics.pop("finite").all()
    runs = () if program.sizes.seeds == 1 else (program.sizes.seeds,)
    assert {name: values.shape for name, values in metrics.items()} == dict.fromkeys(metrics, (UPDATES, *runs))
    tally = Tally(program.additions)
    tally.add(metrics, UPDATES, 1.0)
    row = tally.averages()
    assert np.sum(row["episodes"]) == metrics["episodes"].sum() > 0 and np.unique(row["episode_length"]) == [9]
    # The three of episodes stand as two means; the others under their own names.
    assert row.keys() - {"episode_return", "episode_length"} == metrics.keys() - {
        "episode_return_sum",
        "episode_length_sum",
    }


# The kind of environments that is not left to the night, where a placement takes both.
QUICK = {
    "single": "pure",
    "sebulba": "host",
    "central_inference": "host",
    "distributed_actors": "host",
    "parameter_server": "pure",
    "local_sgd": "pure",
    "evolution": "pure",
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=[pytest.mark.slow] * (kind != QUICK.get(name, kind)))
        for name, placement in PLACEMENTS.items()
        for kind in KINDS
        if (placement.takes_host_envs if kind == "host" else placement.takes_pure_envs)
    ],
)
def test_every_metric_adds_up_as_the_program_says(name: str, kind: str) -> None:
    program, metrics = made(PLACEMENTS[name](**SMALL.get(name, {})), PPO, kind)
    check(program, metrics)
    if kind == "host":
        assert metrics["valid_steps"].tolist() == [NUM_ENVS * LENGTH] * UPDATES
        assert program.additions["valid_steps"] == "sum" == program.additions.get("env_seconds", "sum")


@pytest.mark.parametrize(
    "placement",
    [
        podium.Single(),
        podium.ParameterServer(workers=2, devices=1),
        podium.DistributedActors(workers=2, replay_apart=True),
    ],
    ids=["single", "parameter_server", "a replay apart"],
)
def test_so_do_those_of_an_agent_with_a_replay(placement: Any) -> None:
    program, metrics = made(placement, DQN, "pure")
    check(program, metrics)
    assert np.isnan(metrics["loss"][0]) or program.additions.get("loss", "mean") == "mean"
