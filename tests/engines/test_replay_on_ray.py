"""A replay in a Ray actor: it gives what one in this process does, keeps the ratio, and says when it is gone."""

from __future__ import annotations

import os
import signal
from typing import Any

import jax
import numpy as np
import pytest

import podium
from podium.agent import Agent
from podium.agents import apex, dqn, r2d2
from podium.envs import make
from podium.placement.actors.actor import make_acting
from podium.placement.compiled.iteration import plan_shapes
from podium.placement.remote.engine import Threads
from podium.placement.remote.ray import RayEngine
from podium.placement.remote.replay import ReplayFunctions, ReplayServer
from podium.placement.threads.supervision import ActorError

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.usefixtures("cluster")]

SIZES: dict[str, Any] = {"hidden_sizes": (16,), "batch_size": 32, "min_replay_size": 64, "buffer_capacity": 1024}
APEX = apex.make(apex.Config(**SIZES, num_updates=2))
R2D2 = r2d2.make(r2d2.Config(**SIZES, num_updates=2, sequence_length=6, burn_in=2, sequence_period=2, memory_size=8))


CATCH = make("podium/Catch")


def apart(engine: Any = "ray", **changes: Any) -> podium.DistributedActors:
    return podium.DistributedActors(workers=2, replay_apart=True, replay_engine=engine, **changes)


def build(placement: podium.DistributedActors, agent: Agent = APEX) -> Any:
    return placement.build(agent, CATCH, num_envs=8, rollout_length=4, max_updates=1000)


def nothing() -> None:
    """Wait on."""


@pytest.mark.parametrize("agent", [APEX, R2D2], ids=["apex", "r2d2"])
def test_it_gives_what_one_in_this_process_gives(agent: Agent) -> None:
    acting = make_acting(agent, CATCH, 8, 4)
    functions = ReplayFunctions(acting, build(apart(), agent).sizes, plan_shapes(acting, 4, 8), None)
    replays = [ReplayServer(engine, functions, 60.0) for engine in (Threads(), RayEngine())]
    random = np.random.default_rng(0)
    draw = lambda x: random.integers(0, 2, x.shape).astype(x.dtype)
    follows = np.zeros(8, bool)
    try:
        for number in range(5):
            data = jax.tree.map(draw, functions.plan.data)
            ready = [replay.add(data, follows, nothing) for replay in replays]
            assert ready == [number >= 1] * 2  # It takes 64 steps, and 32 come at a time.
            if not ready[0]:
                continue
            (here, at), (there, at_there) = (replay.sample(jax.random.key(number), nothing) for replay in replays)
            jax.tree.map(np.testing.assert_array_equal, (here, at), (there, at_there))
            priorities = random.random(32).astype(np.float32)
            for replay, indices in zip(replays, (at, at_there), strict=True):
                replay.rank(indices, priorities, nothing)
    finally:
        for replay in replays:
            replay.close()


def test_as_much_is_sampled_for_what_is_inserted_as_the_agent_says(spied: Any, gone: Any) -> None:
    """An insertion of 32 steps is worth 2 minibatches of 32; either side may be an update ahead."""
    engine = spied()
    program = build(apart(engine))
    try:
        state, metrics = program.chunk(program.init(0), 12)
        learnt = np.isfinite(metrics["loss"])
        assert learnt[2:].all()
        assert np.abs(metrics["replay_balance"]).max() <= 64
        assert program.agent_state(state).updates == 2 * learnt.sum()
        (pid,) = engine.pids()
        assert pid != os.getpid()
    finally:
        program.close()
    gone(pid)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGKILL, r"replay of podium-replay is gone, .* resume=True fills another"),
        pytest.param(signal.SIGSTOP, "it has not answered for 3 s", marks=pytest.mark.slow),
    ],
)
def test_a_replay_that_is_lost_or_hangs_ends_the_run(number: int, words: str, spied: Any, gone: Any) -> None:
    engine = spied()
    program = build(apart(engine, actor_timeout=3.0))
    try:
        state, _ = program.chunk(program.init(0), 4)
        (pid,) = engine.pids()
        os.kill(pid, number)
        with pytest.raises(ActorError, match=words):
            program.chunk(state, 1000)
    finally:
        program.close()
    gone(pid)


def test_it_says_where_the_replay_is_and_what_travels() -> None:
    program = build(apart())
    moved = program.bytes_per_update()
    # Twice 32 transitions: two observations of 100 floats, action, reward, discount, weight.
    assert moved["minibatches"] == 2 * 32 * (2 * 400 + 4 * 4)
    assert moved["insertions"] > 32 * 2 * 400
    for text in (str(program.explain()), str(apart().explain())):
        assert "replay" in text and "Ray actor" in text
    assert "learning to replay" in str(program.explain())


@pytest.mark.slow
@pytest.mark.parametrize("agent", [dqn, apex], ids=["dqn", "apex"])
def test_it_learns_catch_with_nothing_but_learning_in_this_process(agent: Any) -> None:
    result = podium.train(
        agent.make(agent.Config(learning_rate=1e-3, buffer_capacity=20_000)),
        "podium/Catch",
        num_steps=60_000,
        num_envs=16,
        rollout_length=8,
        placement=podium.DistributedActors(2, engine="ray", replay_apart=True, replay_engine="ray", actor_timeout=120),
        eval_every=0,
        progress=False,
    )
    assert result.summary["eval_return"] >= 0.9
