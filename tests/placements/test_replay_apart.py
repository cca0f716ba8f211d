"""A replay in a place of its own: the ratio of sampling to inserting is held, and faults are told."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import podium
from podium.agents import apex, dqn, ppo, r2d2, rainbow
from podium.envs import make
from podium.host import HostEnvFactory, on_host
from podium.placement.threads.rate_limiter import RateLimiter, ReplayTimeout
from podium.placement.threads.supervision import ActorError, Stopped

SIZES: dict[str, Any] = {"hidden_sizes": (16,), "batch_size": 32, "min_replay_size": 64, "buffer_capacity": 1024}
AGENTS = {
    "dqn": dqn.make(dqn.Config(**SIZES, num_updates=2)),
    "apex": apex.make(apex.Config(**SIZES, num_updates=2)),
    "rainbow": rainbow.make(rainbow.Config(**SIZES, num_updates=2)),
}


def run(agent: Any, updates: int, env: Any = None, **changes: Any) -> tuple[Any, dict[str, Any]]:
    placement = podium.DistributedActors(replay_apart=True, **changes)
    program = placement.build(agent, env or make("podium/Catch"), num_envs=8, rollout_length=4, max_updates=updates)
    try:
        state, metrics = program.chunk(program.init(0), updates)
        return jax.device_get(program.agent_state(state)), metrics
    finally:
        program.close()
        assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("podium-")]


@pytest.fixture
def limiters(monkeypatch: pytest.MonkeyPatch) -> list[RateLimiter]:
    """Return a list of the limiters that runs make from now on."""
    made: list[RateLimiter] = []

    class Noted(RateLimiter):
        def __init__(self, *settings: float):
            super().__init__(*settings)
            made.append(self)

    monkeypatch.setattr("podium.placement.distributed_actors.RateLimiter", Noted)
    return made


def before_every_step(before: Callable[[int], Any]) -> HostEnvFactory:
    """Return Catch where something is done before the result of a step is given; it is told the number of the step."""
    envs = on_host(make("podium/Catch"))

    class Watched:
        def __init__(self, inner: Any):
            self.inner, self.spec, self.num_envs, self.calls = inner, inner.spec, inner.num_envs, 0
            self.reset, self.send, self.close = inner.reset, inner.send, inner.close

        def recv(self) -> Any:
            self.calls += 1
            before(self.calls)
            return self.inner.recv()

    return dataclasses.replace(envs, make=lambda num_envs, seed, first: Watched(envs.make(num_envs, seed, first)))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("dqn", {}),
        ("apex", {"actor_devices": 2, "learner_devices": 2, "replay_device": -1}),
        pytest.param("rainbow", {}, marks=pytest.mark.slow),
    ],
    ids=["all on one device", "workers, replay and learners apart", "rainbow"],
)
def test_as_much_is_sampled_for_what_is_inserted_as_the_agent_says(
    name: str, changes: dict[str, Any], limiters: list[RateLimiter]
) -> None:
    changes = {key: jax.devices()[value] if key == "replay_device" else value for key, value in changes.items()}
    updates = 24
    state, metrics = run(AGENTS[name], updates, **changes)
    (limiter,) = limiters
    per_update = 2 * 32
    assert limiter.samples_per_insert == per_update / 32
    assert np.abs(metrics["replay_balance"]).max() <= limiter.tolerance == per_update
    learnt = np.isfinite(metrics["loss"])
    assert learnt[2:].all()  # It takes two insertions to begin.
    assert limiter.sampled == learnt.sum() * per_update
    assert state.updates == 2 * learnt.sum()
    # Every step that was seen by the State was inserted, and no more than what is under way was not seen.
    assert int(state.env_steps) == metrics["valid_steps"].sum() <= limiter.inserted <= (updates + 4) * 32
    assert metrics["finite"].all()


def test_what_is_observed_says_how_old_the_parameters_were_that_acted() -> None:
    """Whatever update observes a rollout: three are played with the same."""
    seen: list[int] = []
    agent = AGENTS["dqn"]

    def observe(state: Any, trajectory: Any) -> Any:
        jax.debug.callback(lambda version: seen.append(int(version)), trajectory.policy_version)
        return agent.observe(state, trajectory)

    updates = 9
    run(agent._replace(observe=observe), updates, workers=1, refresh_every=3)
    jax.effects_barrier()
    assert len(seen) >= updates - 1 and seen == sorted(seen)
    assert len(set(seen)) <= -(-len(seen) // 3)


def test_windows_count_as_the_steps_that_are_learnt_from(limiters: list[RateLimiter]) -> None:
    """Of 6 steps 2 burn in: 2 minibatches of 8 windows are 64 steps for the 32 that an insertion brings."""
    sizes = {**SIZES, "batch_size": 8, "num_updates": 2}
    windows = {"sequence_length": 6, "burn_in": 2, "sequence_period": 2, "memory_size": 8}
    updates = 16
    state, metrics = run(r2d2.make(r2d2.Config(**sizes, **windows)), updates)
    (limiter,) = limiters
    assert limiter.samples_per_insert == 2 and limiter.tolerance == 64
    assert np.abs(metrics["replay_balance"]).max() <= limiter.tolerance
    learnt = np.isfinite(metrics["loss"])
    assert learnt[2:].all() and limiter.sampled == learnt.sum() * 64
    assert state.updates == 2 * learnt.sum()


def test_a_slow_side_is_waited_for(limiters: list[RateLimiter]) -> None:
    """Sleeping environments make learning wait."""
    slow = before_every_step(lambda call: time.sleep(0.05))
    _, metrics = run(AGENTS["dqn"], 12, slow, workers=2)
    (limiter,) = limiters
    assert metrics["learner_idle"][4:].max() > 0.5
    assert metrics["replay_balance"].min() >= -limiter.tolerance
    assert limiter.inserted >= 9 * 32


def test_the_limiter_blocks_whoever_is_ahead() -> None:
    limiter = RateLimiter(samples_per_insert=4.0, tolerance=40.0, timeout=20.0)
    well = lambda: None
    for _ in range(7):
        assert limiter.insert(10, well) < 0.1  # Before it opens, anything goes in.
        assert limiter.balance == 0
    limiter.open()
    limiter.open()
    assert limiter.balance == 0
    limiter.insert(10, well)
    assert limiter.balance == 40
    with pytest.raises(Stopped):
        limiter.insert(10, _stop)  # 80 would be due, and 40 may be.
    for expected in (8, -24):
        limiter.sample(32, well)
        assert limiter.balance == expected
    with pytest.raises(Stopped):
        limiter.sample(32, _stop)
    assert (limiter.inserted, limiter.sampled) == (80, 64)
    # The other side's step wakes whoever waits.
    threading.Timer(0.3, limiter.insert, (10, well)).start()
    assert 0.2 < limiter.sample(32, well) < 5
    assert limiter.balance == -16


def _stop() -> None:
    raise Stopped


def test_over_a_run_the_ratio_is_that_which_was_asked_for() -> None:
    """Two sides of random speed: at no time does either lead by more than the tolerance."""
    limiter = RateLimiter(samples_per_insert=1.5, tolerance=50.0, timeout=20.0)
    limiter.open()
    generator, balances = np.random.default_rng(0), []

    def side(call: Any, items: int, times: int) -> None:
        for _ in range(times):
            if generator.random() < 0.1:
                time.sleep(0.002)
            call(items, lambda: None)
            balances.append(limiter.balance)

    threads = [
        threading.Thread(target=side, args=(limiter.insert, 16, 300)),
        threading.Thread(target=side, args=(limiter.sample, 24, 300)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert max(map(abs, balances)) <= 50
    assert limiter.balance == 0


def test_a_replay_that_cannot_be_sampled_says_so_and_ends(capsys: pytest.CaptureFixture[str]) -> None:
    limiter = RateLimiter(1.0, 10.0, timeout=1.0)
    limiter.insert(3, lambda: None)
    with pytest.raises(ReplayTimeout, match="holds too little to be sampled, with 3 items inserted .* for 1 s"):
        limiter.sample(5, lambda: None)
    assert "nothing was inserted, to sample from" in capsys.readouterr().err


def test_what_is_being_made_is_waited_for_longer_than_a_standstill() -> None:
    limiter, heard = RateLimiter(1.0, 10.0, timeout=0.3), []

    def coming() -> None:
        heard.append(time.monotonic())
        if heard[-1] > heard[0] + 1.0:
            raise Stopped
        limiter.coming()

    with pytest.raises(Stopped):
        limiter.sample(5, coming)


@pytest.mark.slow
def test_a_rollout_may_take_longer_than_a_step(limiters: list[RateLimiter]) -> None:
    """Neither who inserts rollouts nor who learns from them hangs where workers step slowly."""
    slow = before_every_step(lambda call: time.sleep(1.5))
    _, metrics = run(AGENTS["dqn"], 5, slow, workers=1, actor_timeout=5.0)
    assert np.isfinite(metrics["loss"]).any()


def test_inserting_waits_for_room_until_the_run_ends() -> None:
    limiter, waited = RateLimiter(1.0, 10.0, timeout=0.1), []
    limiter.open()
    limiter.insert(10, lambda: None)

    def waiting() -> None:
        waited.append(limiter.inserted)
        if len(waited) > 3:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        limiter.insert(10, waiting)
    assert waited == [10] * 4


@pytest.mark.slow
def test_a_learner_may_do_other_things_for_longer_than_workers_may_hang() -> None:
    """An evaluation, say: inserting waits meanwhile, and is well."""
    placement = podium.DistributedActors(replay_apart=True, actor_timeout=1.0)
    program = placement.build(AGENTS["dqn"], make("podium/Catch"), num_envs=8, rollout_length=4, max_updates=20)
    try:
        state, _ = program.chunk(program.init(0), 20)
        time.sleep(2.5)
        state, metrics = program.chunk(state, 20)
        assert np.isfinite(metrics["loss"]).any()
    finally:
        program.close()


@pytest.mark.parametrize("settings", [(0.0, 1.0, 1.0), (1.0, float("nan"), 1.0), (1.0, 1.0, -1.0)])
def test_a_limiter_of_impossible_numbers_is_refused(settings: Any) -> None:
    with pytest.raises(ValueError, match="must be finite and greater than 0"):
        RateLimiter(*settings)


def test_a_worker_that_dies_ends_the_run_with_its_traceback() -> None:
    def fail(call: int) -> None:
        if call == 20:
            raise ZeroDivisionError("the simulator broke")

    broken = before_every_step(fail)
    with pytest.raises(ActorError, match=r"(?s)podium-actor-\d died of ZeroDivisionError.*the simulator broke"):
        run(AGENTS["dqn"], 50, broken, workers=2)


@pytest.mark.parametrize(
    ("agent", "changes", "words"),
    [
        (ppo.make(), {}, "replay_apart=True, but ppo learns from no replay"),
        (AGENTS["dqn"], {"lockstep": True}, "lockstep=True ties rollouts to updates"),
        (AGENTS["dqn"], {"replay_tolerance": 0.0}, "replay_tolerance=0.0 must be finite and greater than 0"),
        (AGENTS["dqn"], {"replay_engine": "gpu"}, "replay_engine='gpu' is not known"),
        (
            AGENTS["dqn"],
            {"replay_device": 0},
            r"replay_device=0 must be a device of JAX's, such as jax.devices\(\)\[0\]",
        ),
        (AGENTS["dqn"], {"replay_engine": "ray", "replay_apart": False}, "replay_engine='ray' is for a replay apart"),
        (AGENTS["dqn"], {"replay_engine": "ray", "replay_device": jax.devices()[0]}, "leave one of them out"),
        (AGENTS["dqn"], {"engine": "ray", "actor_devices": 2}, "actor_devices=2 are of this process, but engine='ray'"),
    ],
)
def test_what_cannot_be_is_refused(agent: Any, changes: dict[str, Any], words: str) -> None:
    placement = podium.DistributedActors(**{"replay_apart": True, **changes})
    with pytest.raises(ValueError, match=words):
        placement.build(agent, make("podium/Catch"), num_envs=8, rollout_length=4)


def test_it_says_where_the_replay_is_and_what_moves() -> None:
    placement = podium.DistributedActors(replay_apart=True, replay_device=jax.devices()[3])
    program = placement.build(AGENTS["apex"], make("podium/Catch"), num_envs=8, rollout_length=4)
    moved = program.bytes_per_update()
    # Twice 32 transitions: two observations of 100 floats, action, reward, discount, weight.
    assert moved["minibatches"] == 2 * 32 * (2 * 400 + 4 * 4)
    assert moved["trajectories"] > 0
    for text in (str(placement.explain()), str(program.explain())):
        assert "cpu:3" in text
        assert "replay to learning" in text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dqn", "apex"])
def test_it_learns_catch(name: str) -> None:
    agent = {
        "dqn": dqn.make(dqn.Config(learning_rate=1e-3, buffer_capacity=20_000)),
        "apex": apex.make(apex.Config(learning_rate=1e-3, buffer_capacity=20_000)),
    }[name]
    result = podium.train(
        agent,
        make("podium/Catch"),
        num_steps=100_000,
        num_envs=16,
        rollout_length=1,
        placement=podium.DistributedActors(replay_apart=True, actor_timeout=120),
        eval_every=0,
        progress=False,
    )
    assert result.summary["eval_return"] >= 0.9
