"""A replay in a Ray actor: it gives what one in this process does, keeps the ratio, and says when it is gone."""

from __future__ import annotations

import os
import signal
from typing import Any

import jax
import numpy as np
import pytest

import podium
from podium.agents import apex, dqn
from podium.envs import make
from podium.placement.actors import ActorError
from podium.placement.engine import Threads
from podium.placement.ray_engine import RayEngine
from podium.placement.replay_store import SharedStore

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.usefixtures("cluster")]

SIZES: dict[str, Any] = {"hidden_sizes": (16,), "batch_size": 32, "min_replay_size": 64, "buffer_capacity": 1024}
APEX = apex.make(apex.Config(**SIZES, num_updates=2))


def build(agent: Any = APEX, **changes: Any) -> Any:
    placement = podium.DistributedActors(workers=2, replay_apart=True, replay_engine="ray", **changes)
    return placement.build(agent, make("podium/Catch"), num_envs=8, rollout_length=4, max_updates=1000)


def go_on() -> None:
    pass


def test_it_gives_what_one_in_this_process_gives() -> None:
    program = build()
    program.lower()
    fragment = program._fragment
    stores = [SharedStore(engine, fragment, 60.0) for engine in (Threads(), RayEngine())]
    random = np.random.default_rng(0)
    draw = lambda x: random.integers(0, 2, x.shape).astype(x.dtype)  # noqa: E731
    try:
        for number in range(5):
            data = jax.tree.map(draw, fragment.plan.data)
            ready = [store.add(data, go_on) for store in stores]
            assert ready == [number >= 1] * 2  # It takes 64 steps, and 32 come at a time.
            if not ready[0]:
                continue
            (here, at), (there, at_there) = (store.sample(jax.random.key(number), go_on) for store in stores)
            jax.tree.map(np.testing.assert_array_equal, (here, at), (there, at_there))
            priorities = random.random(32).astype(np.float32)
            for store, indices in zip(stores, (at, at_there), strict=True):
                store.rank(indices, priorities, go_on)
    finally:
        for store in stores:
            store.close()


def test_as_much_is_sampled_for_what_is_inserted_as_the_agent_says(gone: Any) -> None:
    program = build()
    try:
        state, metrics = program.chunk(program.init(0), 12)
        limiter, pid = program._limiter, program._store._handle.pid
        learnt = np.isfinite(metrics["loss"])
        assert learnt[2:].all() and limiter.sampled == learnt.sum() * 64
        assert np.abs(metrics["replay_balance"]).max() <= limiter.tolerance
        assert program.agent_state(state).updates == 2 * learnt.sum()
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
def test_a_replay_that_is_lost_or_hangs_ends_the_run(number: int, words: str, gone: Any) -> None:
    program = build(worker_timeout=3.0)
    try:
        state, _ = program.chunk(program.init(0), 4)
        pid = program._store._handle.pid
        os.kill(pid, number)
        with pytest.raises(ActorError, match=words):
            program.chunk(state, 1000)
    finally:
        program.close()
    gone(pid)


def test_it_says_where_the_replay_is_and_what_travels() -> None:
    program = build()
    moved = program.bytes_per_update()
    # Twice 32 transitions: two observations of 100 floats, action, reward, discount, weight.
    assert moved["minibatches"] == 2 * 32 * (2 * 400 + 4 * 4)
    assert moved["insertions"] > 32 * 2 * 400
    for text in (str(program.explain()), str(program._placement.explain())):
        assert "replay" in text and "Ray actor" in text and "learning to replay" in text


@pytest.mark.slow
@pytest.mark.parametrize("agent", [dqn, apex], ids=["dqn", "apex"])
def test_it_learns_catch_with_nothing_but_learning_in_this_process(agent: Any) -> None:
    result = podium.train(
        agent.make(agent.Config(learning_rate=1e-3, buffer_capacity=20_000)),
        "podium/Catch",
        num_steps=60_000,
        num_envs=16,
        rollout_length=8,
        placement=podium.DistributedActors(2, engine="ray", replay_apart=True, replay_engine="ray", worker_timeout=120),
        eval_every=0,
        progress=False,
    )
    assert result.summary["eval_return"] >= 0.9
