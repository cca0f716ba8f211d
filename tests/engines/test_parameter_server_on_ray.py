"""ParameterServer with its workers' fragments in Ray actors: the numbers of threads, and processes that are lost."""

from __future__ import annotations

import os
import re
import signal
import threading
from typing import Any

import jax
import pytest
from alike import assert_close

import podium
from podium.agents import a2c, dqn
from podium.host import on_host
from podium.placement.remote.engine import EngineError
from podium.placement.remote.ray import RayEngine
from podium.placement.threads.supervision import ActorError

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.usefixtures("cluster")]

NUM_ENVS, LENGTH, UPDATES = 8, 8, 3
A2C = a2c.make(a2c.Config(hidden_sizes=(16,)))
DQN = dqn.make(dqn.Config(hidden_sizes=(16,), batch_size=32, min_replay_size=64, buffer_capacity=1024))


def build(placement: Any, agent: Any = A2C, length: int = LENGTH) -> Any:
    env = podium.envs.make("podium/Catch")
    return placement.build(agent, env, num_envs=NUM_ENVS, rollout_length=length, max_updates=100)


@pytest.mark.parametrize(
    ("agent", "length", "updates"), [(A2C, LENGTH, 2), pytest.param(DQN, 1, 7, marks=pytest.mark.slow)]
)
def test_one_worker_is_single_and_states_go_home_between_chunks(
    agent: Any, length: int, updates: int, spied: Any, gone: Any
) -> None:
    """And a state that is not where the fragments stand, as of a checkpoint, is where they stand then."""
    engine = spied()
    ours, single = build(podium.ParameterServer(1, engine=engine), agent, length), build(podium.Single(), agent, length)
    try:
        state, expected = ours.init(0), single.init(0)
        described = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), tree)
        shapes = described(ours.abstract_state())
        for _ in range(2):
            state, metrics = ours.chunk(state, updates)
            expected, _ = single.chunk(expected, updates)
            assert described(state) == shapes
            assert_close((state.agent, state.rollout[0]), (expected.agent, expected.rollout), 1e-6)
            assert_close(state.replay, (expected.replay,) if expected.replay else (), 1e-6)
        assert (metrics["policy_lag_max"] == 0).all()
        again, _ = ours.chunk(ours.init(0), 2 * updates)
        assert_close(again.agent, expected.agent, 1e-6)
    finally:
        ours.close()
    gone(*engine.pids())


@pytest.fixture
def killing(signalling: Any) -> Any:
    """Return what kills the process of worker 1 in the midst of a chunk, before its sixth gradient."""
    return signalling(signal.SIGKILL, "podium-worker-1", "take", 6)


def test_a_killed_worker_is_made_anew_and_its_rollout_is_dropped_and_counted(
    killing: Any, spied: Any, gone: Any
) -> None:
    engine = spied(before=killing)
    program = build(podium.ParameterServer(2, restarts=1, engine=engine))
    updates = 12
    try:
        state, metrics = program.chunk(program.init(0), updates)
        assert metrics["dropped_rollouts"].sum() == 1
        assert len(metrics["loss"]) == updates and metrics["finite"].all()
        # What was observed is what was played to the end, once each.
        assert float(state.agent.env_steps) == NUM_ENVS * LENGTH * updates
        pids = engine.pids()
        assert len(pids) == 2 and killing.sent_to[0] not in pids
        program.chunk(state, 2)
    finally:
        program.close()
    gone(*killing.sent_to, *pids)


@pytest.mark.slow
def test_host_environments_step_in_the_processes_of_workers(spied: Any, gone: Any) -> None:
    """In one chunk as in one process; a worker that is killed begins anew with its episodes."""
    envs, remote = on_host(podium.envs.make("podium/Catch")), spied()
    programs = [
        podium.ParameterServer(1, devices=1, restarts=1, engine=engine).build(
            A2C, envs, num_envs=NUM_ENVS, rollout_length=LENGTH, max_updates=100
        )
        for engine in ("threads", remote)
    ]
    try:
        (here, _), (there, _) = (program.chunk(program.init(0), 2) for program in programs)
        assert_close(here.agent, there.agent, 1e-6)
        (pid,) = remote.pids()
        os.kill(pid, signal.SIGKILL)
        _, metrics = programs[1].chunk(there, 3)
        assert metrics["dropped_rollouts"].sum() == 1 and (metrics["valid_steps"] == NUM_ENVS * LENGTH).all()
    finally:
        for program in programs:
            program.close()
    gone(pid, *remote.pids())


def test_a_killed_worker_ends_a_run_without_restarts(killing: Any, spied: Any, gone: Any) -> None:
    engine = spied(before=killing)
    program = build(podium.ParameterServer(2, engine=engine))
    try:
        with pytest.raises(ActorError, match=r"podium-worker-1 died of LostError\('The process of podium-worker-1 \("):
            program.chunk(program.init(0), 400)
    finally:
        program.close()
    gone(*engine.pids())
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("podium-worker")]


@pytest.mark.slow
def test_a_simulator_that_breaks_in_its_process_is_told_with_the_traceback_there() -> None:
    env = podium.envs.make("podium/Catch")

    def step(key: Any, state: Any, action: Any) -> Any:
        state, timestep = env.step(key, state, action)

        def fail(reward: Any) -> Any:
            raise ZeroDivisionError("the simulator broke")

        shape = jax.ShapeDtypeStruct(timestep.reward.shape, timestep.reward.dtype)
        return state, timestep._replace(
            reward=jax.pure_callback(fail, shape, timestep.reward, vmap_method="expand_dims")
        )

    program = podium.ParameterServer(1, engine="ray").build(
        A2C, env._replace(step=step), num_envs=NUM_ENVS, rollout_length=LENGTH
    )
    try:
        with pytest.raises(ActorError, match="(?s)podium-worker-0 raised .* in its process:.*the simulator broke"):
            program.chunk(program.init(0), 2)
    finally:
        program.close()


def test_it_says_what_travels_and_what_it_has_no_room_for() -> None:
    placement = podium.ParameterServer(4, devices=2, engine="ray")
    program = build(placement)
    assert [device.id for device in program.devices] == [0]
    assert re.search("worker +Ray actor +environments 6 to 7", str(program.explain()))
    in_threads = build(podium.ParameterServer(2, devices=2)).bytes_per_update()
    explained = program.bytes_per_update()
    assert explained["states"] == 4 * in_threads["states"]  # Of two workers one is on the other device.
    # Four of a fourth of the environments, for one of a half; each with its version, of 4 bytes.
    assert explained["trajectories"] - 4 * 4 == 2 * (in_threads["trajectories"] - 4)
    assert re.search("gradients +workers to server", placement.explain())
    wide = podium.ParameterServer(2, engine=RayEngine({"num_cpus": 99}, start_timeout=1.0))
    program = build(wide)
    try:
        with pytest.raises(EngineError, match="podium-worker-0 does not stand after start_timeout=1 s"):
            program.chunk(program.init(0), 1)
    finally:
        program.close()
    with pytest.raises(ValueError, match="engine='dask' is not known"):
        build(podium.ParameterServer(2, engine="dask"))  # type: ignore[arg-type]


@pytest.mark.slow
def test_several_processes_learn_catch() -> None:
    """The best is 1 in every episode."""
    result = podium.train(
        a2c.make(a2c.Config(learning_rate=1e-3)),
        "podium/Catch",
        num_steps=300_000,
        num_envs=32,
        rollout_length=16,
        placement=podium.ParameterServer(4, devices=1, engine="ray"),
        eval_every=0,
        progress=False,
    )
    print(result.summary)
    assert result.summary["eval_return"] >= 0.9
    assert max(row["policy_lag_max"] for row in result.metrics) >= 1
