"""DistributedActors with its workers in Ray actors: what threads learn in lockstep, and workers that are killed."""

from __future__ import annotations

import re
import signal
import threading
import time
from typing import Any

import jax
import numpy as np
import pytest

import podium
from podium.agents import a2c
from podium.host import HostEnvFactory, on_host
from podium.placement.threads.supervision import ActorError

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.usefixtures("cluster")]

SLOW = pytest.mark.slow
LONG = 1_000_000
"""Updates: more than any worker that goes on alone lets the learner do before the other is missed."""
A2C = a2c.make(a2c.Config(hidden_sizes=(16,)))


def build(placement: Any, env: Any = None) -> Any:
    env = podium.envs.make("podium/Catch") if env is None else env
    return placement.build(A2C, env, num_envs=8, rollout_length=8, max_updates=100)


def run(program: Any, updates: int) -> tuple[Any, dict[str, Any]]:
    try:
        state, metrics = program.chunk(program.init(0), updates)
        return jax.device_get(program.agent_state(state)), metrics
    finally:
        program.close()


@pytest.mark.parametrize(
    ("where", "workers"), [("pure", 1), pytest.param("pure", 2, marks=SLOW), pytest.param("host", 2, marks=SLOW)]
)
def test_in_lockstep_it_is_that_of_threads(where: str, workers: int) -> None:
    env = podium.envs.make("podium/Catch")
    assert not isinstance(env, HostEnvFactory)
    task = on_host(env) if where == "host" else env
    here, here_metrics = run(build(podium.DistributedActors(workers, lockstep=True), task), 3)
    there, metrics = run(build(podium.DistributedActors(workers, lockstep=True, engine="ray"), task), 3)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-6, 1e-6), here, there)
    np.testing.assert_array_equal(metrics["episode_return_sum"], here_metrics["episode_return_sum"])
    assert (metrics["valid_steps"] == 64).all()


@pytest.fixture
def killing(signalling: Any) -> Any:
    """Return what kills the process of worker 1 before its third rollout."""
    return signalling(signal.SIGKILL, "podium-actor-1", "play", 3)


@pytest.mark.slow
def test_a_killed_worker_begins_anew_and_its_rollout_is_counted(killing: Any, spied: Any, gone: Any) -> None:
    placement = podium.DistributedActors(2, restarts=1, lockstep=True, engine=spied(before=killing))
    _, metrics = run(build(placement), 6)
    assert metrics["dropped_rollouts"].sum() == 1 and len(metrics["loss"]) == 6
    gone(*killing.sent_to)


@pytest.mark.slow
def test_a_killed_worker_ends_a_run_without_restarts(killing: Any, spied: Any) -> None:
    with pytest.raises(ActorError, match=r"podium-actor-1 died of LostError\('The process of podium-actor-1 \("):
        run(build(podium.DistributedActors(2, engine=spied(before=killing))), LONG)
    assert killing.sent_to


@pytest.mark.slow
def test_a_worker_that_hangs_ends_the_run_and_its_process(spied: Any, signalling: Any, gone: Any) -> None:
    stopping = signalling(signal.SIGSTOP, "podium-actor-0", "play", 1)
    with pytest.raises(ActorError, match="podium-actor-0 has not ended a rollout for 3 s"):
        run(build(podium.DistributedActors(2, actor_timeout=3.0, engine=spied(before=stopping))), LONG)
    gone(*stopping.sent_to)
    playing = lambda: [x for x in threading.enumerate() if x.name.startswith("podium-actor")]
    deadline = time.monotonic() + 10
    while playing() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not playing()


def test_it_says_what_travels() -> None:
    placement = podium.DistributedActors(4, engine="ray")
    program = build(placement)
    assert re.search("worker 3 +Ray actor +environments 6 to 7", str(program.explain()))
    apart = build(podium.DistributedActors(1, devices := jax.devices()[:1], devices)).bytes_per_update()
    assert apart["trajectories"] == 0 < program.bytes_per_update()["trajectories"]
    assert program.bytes_per_update()["parameters"] == 4 * apart["parameters"]
    assert re.search("parameters +learning to workers", placement.explain())
