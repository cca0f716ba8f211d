"""Single runs its loops in Python, and yet compiles nothing anew once every piece has been compiled."""

import logging

import jax
import pytest

import podium
from podium.agent import Agent
from podium.agents import apex, dqn, r2d2, rainbow
from podium.envs.native import catch

SETTINGS = {"batch_size": 16, "buffer_capacity": 512, "min_replay_size": 64}


WINDOWS = {"sequence_length": 4, "burn_in": 1, "sequence_period": 2, "memory_size": 8}


@pytest.mark.parametrize(
    "agent",
    [
        dqn.make(dqn.Config(**SETTINGS)),
        apex.make(apex.Config(**SETTINGS)),
        pytest.param(r2d2.make(r2d2.Config(**SETTINGS, **WINDOWS)), marks=pytest.mark.slow),
        pytest.param(rainbow.make(rainbow.Config(**SETTINGS)), marks=pytest.mark.slow),
    ],
)
def test_an_update_from_a_replay_compiles_nothing_twice(agent: Agent, caplog: pytest.LogCaptureFixture) -> None:
    program = podium.Single().build(agent, catch(), num_envs=8, rollout_length=1, max_updates=12)
    state, _ = program.chunk(program.init(0), 12)
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        program.chunk(state, 12)
    assert not [record for record in caplog.records if "ompil" in record.getMessage()]
