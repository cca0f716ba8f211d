"""Host environments in Ray actors: the same episodes as here, under a placement that knows nothing of it."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from typing import Any

import jax
import numpy as np
import pytest

import podium
from podium.agents import ppo
from podium.host import HostEnv, HostEnvFactory, on_host
from podium.placement.remote.engine import LostError
from podium.placement.remote.envs import on_ray
from podium.placement.threads.supervision import ActorError
from podium.testing import check_host_env

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.usefixtures("cluster")]

PPO = ppo.make(ppo.Config(hidden_sizes=(16,), num_minibatches=2, learning_rate=1e-3))

SEBULBA = podium.Sebulba(lockstep=True, groups=1)


def catch() -> HostEnvFactory:
    env = podium.envs.make("podium/Catch")
    assert not isinstance(env, HostEnvFactory)
    return on_host(env)


def run(envs: HostEnvFactory, updates: int = 2, placement: Any = SEBULBA) -> tuple[Any, Any]:
    program = placement.build(PPO, envs, num_envs=8, rollout_length=8, max_updates=updates)
    try:
        state, metrics = program.chunk(program.init(0), updates)
        return jax.device_get(state.agent), metrics
    finally:
        program.close()


@pytest.mark.slow
def test_they_keep_the_contract() -> None:
    check_host_env(on_ray(catch()), num_envs=4, num_steps=30)


@pytest.mark.slow
@pytest.mark.parametrize(
    "placement",
    [SEBULBA, podium.CentralInference(envs_per_actor=4, devices=1, lockstep=True)],
    ids=lambda placement: type(placement).__name__,
)
def test_placements_learn_from_them_what_they_learn_from_those_here(placement: Any) -> None:
    here, here_metrics = run(catch(), placement=placement)
    there, metrics = run(catch(), placement=dataclasses.replace(placement, engine="ray"))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-6, 1e-6), here, there)
    np.testing.assert_array_equal(metrics["episode_return_sum"], here_metrics["episode_return_sum"])


def test_a_batch_that_is_killed_raises_and_actions_are_checked_before_they_travel(spied: Any, gone: Any) -> None:
    engine = spied()
    env = on_ray(catch(), engine).make(4, 0, 8)
    env.reset()
    with pytest.raises(ValueError, match="actions 7 to 7 were sent to podium/Catch; send 0 to 2"):
        env.send(np.full(4, 7))
    env.send(np.zeros(4, np.int32))
    env.recv()
    (pid,) = engine.pids()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(LostError, match=rf"The process of podium-envs-8-11 \({pid}\) is gone"):
        env.send(np.zeros(4, np.int32))
        env.recv()
    env.close()
    env.close()


class Hanging:
    """A host environment that never answers."""

    def __init__(self, inner: HostEnv):
        self.spec, self.num_envs = inner.spec, inner.num_envs
        self.reset, self.send, self.close = inner.reset, inner.send, inner.close

    def recv(self) -> Any:
        time.sleep(600)


@pytest.mark.slow
def test_a_simulator_that_hangs_ends_the_run_in_time(by_value: None) -> None:
    envs = catch()

    make = lambda *arguments: Hanging(envs.make(*arguments))
    with pytest.raises(ActorError, match="podium-envs-0-7 has not ended a step for step_timeout=2 s"):
        run(on_ray(dataclasses.replace(envs, make=make), step_timeout=2.0))


def test_a_timeout_must_be_one() -> None:
    with pytest.raises(ValueError, match="step_timeout=0 must be greater than 0 seconds"):
        on_ray(catch(), step_timeout=0)
