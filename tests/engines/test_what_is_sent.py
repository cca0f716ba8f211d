"""What fragments take and return can be sent to another process: an engine of this one that pickles it all."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import numpy as np
import pytest

import podium
from podium.agent import Agent
from podium.agents import apex, impala
from podium.host import HostEnvFactory, on_host
from podium.placement.remote.engine import Handle, Reply, Threads
from podium.placement.remote.ray import to_numpy
from podium.placement.threads.supervision import Heartbeat

IMPALA = impala.make(impala.Config(hidden_sizes=(8,), memory="gru", memory_size=8))
APEX = apex.make(apex.Config(hidden_sizes=(8,), buffer_capacity=512, min_replay_size=64, batch_size=16))


def sent(value: Any) -> Any:
    """Return what arrives of a value elsewhere."""
    return pickle.loads(pickle.dumps(to_numpy(value)))


@dataclasses.dataclass(frozen=True)
class Pickling:
    """The handle of a fragment that is here, called as if it were not."""

    handle: Handle

    @property
    def name(self) -> str:
        """The fragment's."""
        return self.handle.name

    def start(self, method: str, *arguments: Any) -> Reply:
        return Answer(self.handle.start(method, *map(sent, arguments)))

    def call(self, method: str, *arguments: Any, heartbeat: Heartbeat) -> Any:
        return self.start(method, *arguments).result(heartbeat)

    def restart(self) -> None:
        self.handle.restart()

    def close(self) -> None:
        self.handle.close()


@dataclasses.dataclass(frozen=True)
class Answer:
    """What comes back."""

    reply: Reply

    def result(self, heartbeat: Heartbeat) -> Any:
        return sent(self.reply.result(heartbeat))


@dataclasses.dataclass(frozen=True)
class Apart:
    """An engine that says of fragments here that they are elsewhere."""

    apart: ClassVar[bool] = True

    def place(self, name: str, make: Callable[[], Any]) -> Handle:
        return Pickling(Threads().place(name, make))


def run(placement: Any, agent: Agent, env: Any, updates: int = 3) -> Any:
    """Return the agent's state after some updates."""
    program = placement.build(agent, env, num_envs=8, rollout_length=8, max_updates=100)
    try:
        state, metrics = program.chunk(program.init(0), updates)
        assert metrics["finite"].all() and metrics["valid_steps"].sum() > 0
        return jax.device_get(program.agent_state(state))
    finally:
        program.close()


def catch() -> Any:
    env = podium.envs.make("podium/Catch")
    assert not isinstance(env, HostEnvFactory)
    return on_host(env)


# What pure environments return is arrays, which tests of Ray hold: those on the host give more along with it.
@pytest.mark.parametrize(
    "placement",
    [podium.DistributedActors(2, lockstep=True), pytest.param(podium.ParameterServer(1), marks=pytest.mark.slow)],
    ids=lambda placement: type(placement).__name__,
)
def test_sent_or_not_it_is_the_same(placement: Any) -> None:
    here = run(placement, IMPALA, catch())
    there = run(dataclasses.replace(placement, engine=Apart()), IMPALA, catch())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-6, 1e-6), here, there)


def test_a_replay_apart_takes_and_gives_what_is_sent() -> None:
    engines = {"engine": Apart(), "replay_engine": Apart()}
    state = run(podium.DistributedActors(2, replay_apart=True, **engines), APEX, catch(), 6)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))
