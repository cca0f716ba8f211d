"""Learning from rollouts of old policies: V-trace reaches what it reaches without lag; PPO beside it."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest

import podium
from podium.agent import Agent
from podium.agents import impala, ppo
from podium.host import on_host
from podium.placement.actors.pool import ActorPool

pytestmark = [pytest.mark.learning, pytest.mark.timeout(600)]

AGENTS = {
    "impala": impala.make(impala.Config(optimizer="adam", learning_rate=2e-3)),
    "ppo": ppo.make(ppo.Config(learning_rate=2e-3)),
}


def learn(agent: Agent, placement: podium.Sebulba) -> dict[str, Any]:
    """Return the summary of 60,000 steps of Catch on the host, with the lags of all its rows."""
    env = on_host(podium.envs.make("podium/Catch"))
    sizes: dict[str, Any] = {"num_steps": 60_000, "num_envs": 32, "rollout_length": 16, "eval_every": 0}
    result = podium.train(agent, env, placement=placement, progress=False, **sizes)
    assert result.interrupted is None, "stopped from outside, which says nothing about learning"
    lags = [row["policy_lag_mean"] for row in result.metrics[10:]], [row["policy_lag_max"] for row in result.metrics]
    found = {**result.summary, "mean": np.mean(lags[0]), "max": max(lags[1])}
    # The mean over all of training says how soon it was learnt.
    found["on the way"] = np.nanmean([row["episode_return"] for row in result.metrics])
    words = "{eval_return:.3f} at the end, {on the way:.3f} on the way, lag {mean:.1f}, at most {max:.0f}"
    print(f"{agent.name}: {words.format(**found)}")
    return found


def publish_late(monkeypatch: pytest.MonkeyPatch, by: int) -> None:
    """Let parameters reach the actors so many updates late, whichever of actors and learner is faster."""
    publish = ActorPool.publish

    def late(self: Any, params: Any, version: int) -> None:
        held = self.__dict__.setdefault("held", deque(maxlen=by + 1))
        held.append((params, version))
        publish(self, *held[0])

    monkeypatch.setattr(ActorPool, "publish", late)


def test_impala_learns_with_a_lag_of_eight_what_it_learns_with_none(monkeypatch: pytest.MonkeyPatch) -> None:
    without = learn(AGENTS["impala"], podium.Sebulba(lockstep=True))
    publish_late(monkeypatch, by=7)
    found = {name: learn(agent, podium.Sebulba(max_lag=8)) for name, agent in AGENTS.items()}
    assert without["max"] == 0 and without["eval_return"] > 0.95
    for name in AGENTS:
        assert 7 <= found[name]["mean"] <= found[name]["max"] <= 8, found[name]
    assert found["impala"]["eval_return"] > 0.95
    # PPO is reported, not promised anything of: its ratio is clipped to the policy that acted.
