"""Agents of continuous actions learn under every placement what they learn on one device."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from alike import assert_close

import podium
from everywhere import ONE_DEVICE, PLACEMENTS, state_under
from podium.agent import Agent
from podium.agents import reppo, sac, td3
from podium.testing import probe_termination

REPLAY: dict[str, Any] = {"batch_size": 16, "buffer_capacity": 512, "min_replay_size": 64, "hidden_sizes": (16,)}
REPLAY |= {"updates_per_step": 1 / 16, "warmup_steps": 64}
AGENTS: dict[str, Agent] = {
    "sac": sac.make(sac.Config(**REPLAY)),
    "td3": td3.make(td3.Config(**REPLAY)),
    "reppo": reppo.make(reppo.Config(num_minibatches=2, num_epochs=2, num_bins=21, hidden_sizes=(16,))),
}
pytestmark = [pytest.mark.slow, pytest.mark.parametrize("name", AGENTS)]


@functools.cache
def by_one_device(name: str) -> Any:
    """Return the State after six updates on one device."""
    return state_under(ONE_DEVICE, AGENTS[name], probe_termination(continuous=True), num_lanes=8)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_placement_learns_the_same(name: str, placement: str) -> None:
    env = probe_termination(continuous=True)
    # What two programs round differently in one tanh, reppo's critic, which learns a distribution, passes on.
    tolerance = 1e-4 if name == "reppo" else 1e-5
    assert_close(
        state_under(PLACEMENTS[placement], AGENTS[name], env, num_lanes=8), by_one_device(name), tolerance, relative=0
    )


def test_it_evolves(name: str) -> None:
    state_under(podium.Evolution(devices=1), AGENTS[name], probe_termination(continuous=True), updates=2)
