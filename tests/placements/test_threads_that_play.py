"""Central inference and distributed actors: Anakin in lockstep, else bounded staleness, and faults survived."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from alike import assert_close

import podium
from podium.agent import Agent
from podium.agents import a2c, apex, dqn, impala, ppo, pqn, r2d2, rainbow, reppo, sac, td3
from podium.envs import make
from podium.host import HostEnv, HostEnvFactory, on_host
from podium.placement.threads.channels import LatestParams
from podium.placement.threads.supervision import ActorError

NUM_ENVS = 8
REPLAY: dict[str, Any] = {"hidden_sizes": (16,), "batch_size": 32, "min_replay_size": 64, "buffer_capacity": 1024}

# Adam's usual eps would make steps of the rounding that bins far from every value have for a gradient.
REPPO: Any = {"hidden_sizes": (16,), "num_epochs": 2, "num_minibatches": 2, "num_bins": 21, "adam_eps": 1e-5}
# Sums of squares of observations are of thousands, of which the absolute tolerance below is none.
REPPO["normalize_obs"] = False
AGENTS: dict[str, tuple[Agent, int, int]] = {
    "ppo": (ppo.make(ppo.Config(hidden_sizes=(16,), num_minibatches=2, learning_rate=1e-3)), 8, 3),
    "ppo gru": (ppo.make(ppo.Config(hidden_sizes=(16,), num_minibatches=2, memory="gru", memory_size=16)), 8, 3),
    "a2c": (a2c.make(a2c.Config(hidden_sizes=(16,))), 8, 3),
    "impala lstm": (impala.make(impala.Config(hidden_sizes=(16,), memory="lstm", memory_size=16)), 8, 3),
    "pqn": (pqn.make(pqn.Config(hidden_sizes=(16,), num_minibatches=4, epsilon_decay_steps=100)), 8, 3),
    "pqn gru": (pqn.make(pqn.Config(hidden_sizes=(16,), num_minibatches=2, memory="gru", memory_size=16)), 8, 3),
    "dqn": (dqn.make(dqn.Config(hidden_sizes=(16,), batch_size=32, min_replay_size=64, buffer_capacity=1024)), 1, 14),
    "apex": (
        apex.make(apex.Config(hidden_sizes=(16,), batch_size=32, min_replay_size=64, buffer_capacity=1024)),
        1,
        14,
    ),
    "r2d2": (
        r2d2.make(r2d2.Config(sequence_length=6, burn_in=2, sequence_period=2, memory_size=16, num_actors=8, **REPLAY)),
        4,
        5,
    ),
    "rainbow": (rainbow.make(rainbow.Config(num_atoms=11, **REPLAY)), 1, 14),
    "reppo": (reppo.make(reppo.Config(**REPPO)), 8, 3),
    "sac": (sac.make(sac.Config(updates_per_step=0.25, warmup_steps=40, **REPLAY)), 1, 14),
    "td3": (td3.make(td3.Config(updates_per_step=0.25, warmup_steps=40, **REPLAY)), 1, 14),
}
UNTRACED: Any = Agent(*[None] * 8)  # type: ignore[arg-type]
"""An agent that cannot be traced: what is refused of it is refused before."""


IN_LOCKSTEP: dict[str, tuple[Any, bool]] = {
    "DistributedActors": (podium.DistributedActors(lockstep=True), False),
    "DistributedActors on the host": (podium.DistributedActors(workers=2, lockstep=True), True),
    "CentralInference": (podium.CentralInference(envs_per_actor=2, devices=1, lockstep=True), True),
}


def catch() -> Any:
    return make("podium/Catch")


def env_of(name: str) -> Any:
    return make("Pendulum-v1") if name in ("reppo", "sac", "td3") else catch()


def run(placement: Any, agent: Agent, length: int, updates: int, env: Any = None) -> tuple[Any, dict[str, Any]]:
    """Return the agent's state after `updates` updates, and the metrics."""
    program = placement.build(agent, env or catch(), num_envs=NUM_ENVS, rollout_length=length, max_updates=updates)
    try:
        state, metrics = program.chunk(program.init(0), updates)
        return jax.device_get(program.agent_state(state)), metrics
    finally:
        program.close()
        assert not threads_left()


def threads_left() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("podium-")]


@functools.cache
def fused(name: str) -> tuple[Any, dict[str, Any]]:
    """Return what Anakin makes of an agent."""
    return run(podium.Anakin(1), *AGENTS[name], env_of(name))


QUICK = {
    ("DistributedActors", "ppo"),
    ("DistributedActors", "dqn"),
    ("DistributedActors on the host", "impala lstm"),
    ("DistributedActors on the host", "dqn"),
    ("CentralInference", "ppo"),
    ("CentralInference", "impala lstm"),
    ("CentralInference", "r2d2"),
    ("CentralInference", "td3"),
}
"""Each of them with two agents; all with all are for the night."""


@pytest.mark.parametrize(
    ("placement", "name"),
    [
        pytest.param(*pair, marks=[] if pair in QUICK else pytest.mark.slow)
        for pair in itertools.product(IN_LOCKSTEP, AGENTS)
    ],
)
def test_in_lockstep_it_is_anakin(placement: str, name: str) -> None:
    agent, length, updates = AGENTS[name]
    value, host = IN_LOCKSTEP[placement]
    state, expected = fused(name)
    apart, metrics = run(value, agent, length, updates, on_host(env_of(name)) if host else env_of(name))
    assert_close(state, apart, relative=1e-7)
    for key in ("episodes", "episode_return_sum", "episode_length_sum"):
        np.testing.assert_allclose(metrics[key], expected[key])
    assert (metrics["policy_lag_max"] == 0).all()
    assert (metrics["valid_steps"] == NUM_ENVS * length).all()


@pytest.mark.parametrize(
    "placement",
    [
        podium.CentralInference(envs_per_actor=2, devices=2, lockstep=True),
        podium.CentralInference(devices=1, batch_size=3, lockstep=True),
        podium.DistributedActors(workers=4, actor_devices=3, learner_devices=2, lockstep=True),
    ],
    ids=["two devices infer", "one device, small batches", "three devices play, two learn"],
)
def test_devices_and_batches_change_nothing(placement: Any) -> None:
    apart, _ = run(placement, *AGENTS["impala lstm"])
    assert_close(fused("impala lstm")[0], apart, relative=1e-7)


@pytest.mark.parametrize("name", ["impala lstm", "dqn"])
def test_environments_that_reset_in_the_next_step(name: str) -> None:
    """The step after an end is no transition; Sebulba, which has tests of its own for that, is the oracle."""
    pytest.importorskip("envpool")
    agent, length, updates = AGENTS[name]
    length, updates = (24, 2) if length > 1 else (1, 30)
    env: Any = make("envpool/CartPole-v1")
    assert env.resets_in_next_step
    split, expected = run(podium.Sebulba(lockstep=True, groups=1, actor_threads=8), agent, length, updates, env)
    assert (expected["valid_steps"] < NUM_ENVS * length).any()
    for placement in (
        podium.CentralInference(devices=1, lockstep=True),
        podium.DistributedActors(workers=8, lockstep=True),
    ):
        apart, metrics = run(placement, agent, length, updates, env)
        assert_close(split, apart, relative=1e-7)
        np.testing.assert_array_equal(metrics["valid_steps"], expected["valid_steps"])


@dataclasses.dataclass
class Faulty:
    """A host environment that does something before it gives the result of a step."""

    inner: HostEnv
    before: Callable[[int], Any]

    def __post_init__(self) -> None:
        self.spec, self.num_envs, self.calls = self.inner.spec, self.inner.num_envs, 0
        self.reset, self.send, self.close = self.inner.reset, self.inner.send, self.inner.close

    def recv(self) -> Any:
        self.calls += 1
        self.before(self.calls)
        return self.inner.recv()


def with_fault(before: Callable[[int], Any], first: int | None = None) -> HostEnvFactory:
    """Return Catch where the environments from number `first` on (None: all) do something before a step's result."""
    envs = on_host(catch())

    def make_one(num_envs: int, seed: int, index: int) -> HostEnv:
        env = envs.make(num_envs, seed, index)
        return Faulty(env, before) if first in (None, index) else env

    return dataclasses.replace(envs, make=make_one)


PLACEMENTS: dict[str, Callable[..., Any]] = {
    "CentralInference": lambda **changes: podium.CentralInference(envs_per_actor=2, devices=1, **changes),
    "DistributedActors": lambda **changes: podium.DistributedActors(workers=4, **changes),
}
BOTH = pytest.mark.parametrize("placement", PLACEMENTS)
# Where the code is that of the pool of actors, and Sebulba's tests say the same.
ONE = pytest.mark.parametrize(
    "placement", [pytest.param("CentralInference", marks=pytest.mark.slow), "DistributedActors"]
)


@ONE
def test_a_worker_that_raises_ends_the_run_with_its_traceback(placement: str) -> None:
    def fail(call: int) -> None:
        if call == 20:
            raise ZeroDivisionError("the simulator broke")

    agent, length, _ = AGENTS["ppo"]
    with pytest.raises(ActorError, match="(?s)died of ZeroDivisionError.*the simulator broke.*in fail"):
        run(PLACEMENTS[placement](), agent, length, 10, with_fault(fail, 2))


@ONE
@pytest.mark.parametrize("name", ["impala lstm", "dqn"])
def test_a_worker_that_raises_begins_anew_and_what_it_played_is_dropped(placement: str, name: str) -> None:
    failures = iter([ConnectionError("the simulator is gone")])

    def fail(call: int) -> None:
        if call == 5 and (error := next(failures, None)):
            raise error

    agent, length, _ = AGENTS[name]
    updates = 6 if length > 1 else 20
    _, metrics = run(PLACEMENTS[placement](restarts=1), agent, length, updates, with_fault(fail, 2))
    assert next(failures, None) is None
    assert metrics["dropped_rollouts"].sum() == 1
    assert (metrics["valid_steps"] == NUM_ENVS * length).all()
    assert np.isfinite(metrics["episode_return_sum"]).all()


@BOTH
def test_no_more_failures_are_survived_than_restarts_allows(placement: str) -> None:
    def fail(call: int) -> None:
        if call == 5:
            raise ConnectionError("the simulator is gone")

    agent, length, _ = AGENTS["ppo"]
    with pytest.raises(ActorError, match="died of ConnectionError"):
        run(PLACEMENTS[placement](restarts=2), agent, length, 10, with_fault(fail, 2))


@pytest.mark.slow
@BOTH
def test_a_worker_that_hangs_ends_the_run_and_says_where(placement: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("podium.placement.threads.supervision.STOP_SECONDS", 0.5)
    release = threading.Event()
    agent, length, _ = AGENTS["ppo"]
    value = PLACEMENTS[placement](actor_timeout=6.0)
    program = value.build(
        agent, with_fault(lambda call: call == 5 and release.wait(60), 2), num_envs=NUM_ENVS, rollout_length=length
    )
    try:
        with pytest.raises(ActorError, match="(?s)not come a step further for 6 s.*release.wait"):
            program.chunk(program.init(0), 100_000)  # Others go on meanwhile.
    finally:
        program.close()
        release.set()
    deadline = time.monotonic() + 10
    while threads_left() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not threads_left()


def test_a_server_that_dies_ends_the_run_with_its_traceback() -> None:
    agent, length, _ = AGENTS["ppo"]
    calls: list[int] = []

    def fail(action: Any) -> Any:
        calls.append(len(action))
        if len(calls) == 20:
            raise MemoryError("the device is full")
        return action

    def act(*arguments: Any) -> Any:
        output = agent.act(*arguments)
        shape = jax.ShapeDtypeStruct(output.action.shape, output.action.dtype)
        return output._replace(action=jax.pure_callback(fail, shape, output.action))

    with pytest.raises(ActorError, match="(?s)podium-inference-0 died of .*MemoryError: the device is full"):
        # None of the restarts is worth anything here.
        run(PLACEMENTS["CentralInference"](restarts=99), agent._replace(act=act), length, 3)


@ONE
def test_staleness_is_bounded_and_late_rollouts_are_dropped(placement: str) -> None:
    agent, length, _ = AGENTS["a2c"]
    _, metrics = run(PLACEMENTS[placement](queue_depth=3), agent, length, 12, on_host(catch()))
    # Rollouts of several workers in one queue: the newest of one may wait behind all that others have put there.
    most = 4 if placement == "CentralInference" else 2 * 4
    assert metrics["policy_lag_max"].max() <= most
    assert (metrics["dropped_batches"] == 0).all()
    _, metrics = run(PLACEMENTS[placement](queue_depth=3, max_lag=0), agent, length, 12, on_host(catch()))
    assert metrics["policy_lag_max"].max() == 0


def test_nobody_waits_for_a_slow_worker_but_an_agent_with_a_replay() -> None:
    """The first of four workers takes a long time for a step; batches come from the other three."""
    slow = with_fault(lambda call: time.sleep(0.2), 0)
    for name, waits in (("a2c", False), ("dqn", True)):
        agent, length, _ = AGENTS[name]
        updates = 6 if length > 1 else 10
        began = time.monotonic()
        _, metrics = run(podium.DistributedActors(workers=4), agent, length, updates, slow)
        played = metrics["env_seconds"].sum()
        if waits:
            assert played > 0.2 * updates * length * 0.9
            assert time.monotonic() - began > 0.2 * updates * length * 0.9
        else:
            assert played < 0.2 * updates * length


def test_parameters_are_kept_for_several_rollouts() -> None:
    agent, length, _ = AGENTS["a2c"]
    versions: list[int] = []
    get = LatestParams.get

    def counted(self: LatestParams, at_least: int, stop: threading.Event) -> Any:
        params, version = get(self, at_least, stop)
        versions.append(version)
        return params, version

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LatestParams, "get", counted)
        run(podium.DistributedActors(workers=1, refresh_every=4), agent, length, 12)
    assert 3 <= len(versions) <= 4  # For 12 rollouts, and one or two under way.


def test_batches_hold_at_most_what_was_asked_for_and_wait_no_longer_than_allowed() -> None:
    agent, length, _ = AGENTS["a2c"]
    placement = podium.CentralInference(envs_per_actor=2, devices=1, batch_size=5, max_wait=0.0)
    _, metrics = run(placement, agent, length, 4, with_fault(lambda call: time.sleep(0.002)))
    # Two actors of two environments each; three would be six.
    assert (metrics["inference_batch_mean"] >= 2).all() and (metrics["inference_batch_mean"] <= 4).all()
    assert metrics["inference_wait_max"].max() < 0.05
    # One actor, so that nobody ever comes to fill the batch: each of its requests waits as long as it may.
    placement = podium.CentralInference(envs_per_actor=4, devices=1, batch_size=8, max_wait=0.05)
    _, metrics = run(placement, agent, length, 2, with_fault(lambda call: call == 5 and time.sleep(2.0), 4))
    assert 0.05 <= metrics["inference_wait_max"].max() < 0.5
    assert metrics["inference_latency_max"].max() < 1.0


def test_the_fast_run_ahead_no_further_than_the_queue_is_deep() -> None:
    agent, length, _ = AGENTS["a2c"]
    release, steps = threading.Event(), dict.fromkeys(range(0, NUM_ENVS, 2), 0)
    envs = on_host(catch())

    def make_one(num_envs: int, seed: int, index: int) -> HostEnv:
        def before(call: int) -> None:
            steps[index] = call
            if index == 0:
                release.wait(30)

        return Faulty(envs.make(num_envs, seed, index), before)

    placement = podium.CentralInference(envs_per_actor=2, devices=1, queue_depth=2, actor_timeout=20)
    watched = dataclasses.replace(envs, make=make_one)
    program = placement.build(agent, watched, num_envs=NUM_ENVS, rollout_length=length)
    caller = threading.Thread(target=lambda: program.chunk(program.init(0), 1))
    caller.start()
    ahead = {0: 1, 2: 3 * length, 4: 3 * length, 6: 3 * length}
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and steps != ahead:
            time.sleep(0.1)
        time.sleep(0.5)
        assert steps == ahead  # They wait to begin their fourth rollout.
    finally:
        release.set()
        caller.join(30)
        program.close()
    assert not caller.is_alive()


def test_by_default_there_are_no_more_threads_than_cores_but_one_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    agent, length, _ = AGENTS["ppo"]
    threads: dict[tuple[int, int], str] = {}
    for cores in (1, 3, 64):
        monkeypatch.setattr("os.cpu_count", lambda cores=cores: cores)
        for devices in (1, 2):
            program = podium.CentralInference(devices=devices).build(agent, catch(), num_envs=8, rollout_length=length)
            threads[cores, devices] = program.explain().roles[0].share
    assert threads == {
        (1, 1): "1 threads, 8 in each",
        (1, 2): "2 threads, 4 in each",
        (3, 1): "2 threads, 4 in each",  # Three do not divide eight.
        (3, 2): "2 threads, 4 in each",
        (64, 1): "8 threads, 1 in each",
        (64, 2): "8 threads, 1 in each",
    }


def test_the_bytes_explained_are_those_that_move() -> None:
    agent, length, _ = AGENTS["impala lstm"]
    program: Any = podium.CentralInference(devices=2).build(agent, catch(), num_envs=8, rollout_length=length)
    params = jax.eval_shape(agent.actor, program.abstract_state().agent)
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))
    moved = program.bytes_per_update()
    memory = 2 * 16 * 4
    # Up: 100 floats, whether an episode begins, memory, a key. Down: action, log-probability or
    # whatever else the agent keeps of acting, memory.
    assert moved["observations"] == 8 * length * (400 + 1 + memory + 8)
    extras = program.loop.learner.rollout_shapes.extras
    kept = sum(x.dtype.itemsize * int(np.prod(x.shape[2:])) for x in jax.tree.leaves(extras))
    assert moved["actions"] == 8 * length * (4 + kept + memory)
    assert moved["parameters"] == 2 * size
    # A row: obs and next_obs, reward, three flags, action, extras; memory at both ends, and whether a gap lies before.
    assert moved["trajectories"] == 8 * (length * (2 * 400 + 4 + 3 + 4 + kept) + 2 * memory + 1)
    assert moved["gradient sums"] > 0
    for text in (program.explain(), podium.CentralInference(devices=2).explain()):
        assert re.search("inference +cpu:1", text) and re.search("learning +cpu:1", text)
        assert "begins as soon as the device is free" in text
    bounded = podium.CentralInference(devices=2, max_wait=0.001, batch_size=4).explain()
    assert "begins when a batch of 4 wait, or the first has waited 1 ms" in bounded
    program = podium.DistributedActors(workers=4, actor_devices=2).build(agent, catch(), num_envs=8, rollout_length=8)
    moved = program.bytes_per_update()
    assert moved["parameters"] == 2 * size
    assert "observations" not in moved
    assert moved["trajectories"] == 8 * (length * (2 * 400 + 4 + 3 + 4 + kept) + 2 * memory + 1)  # To a third device.
    assert "cpu:1" in program.explain()
    on_the_host = podium.DistributedActors().build(agent, on_host(catch()), num_envs=8, rollout_length=8)
    assert on_the_host.bytes_per_update()["observations"] > 0


@pytest.mark.parametrize(
    ("placement", "words"),
    [
        (podium.CentralInference(envs_per_actor=0), "envs_per_actor=0 must be an integer of 1 or more"),
        (podium.CentralInference(envs_per_actor=3, devices=1), "num_envs=8 is not divisible by 3, .* use 6 or 9"),
        (podium.CentralInference(devices=3), "num_envs=8 is not divisible by devices=3; use 6 or 9"),
        (podium.CentralInference(batch_size=0), "batch_size=0 must be an integer of 1 or more"),
        (podium.CentralInference(2, 1, batch_size=1), "batch_size=1 holds not even the envs_per_actor=2"),
        (podium.CentralInference(max_wait=-1.0), "max_wait=-1.0 must be 0 to 10 seconds"),
        (podium.CentralInference(max_wait=float("nan")), "max_wait=nan"),
        (podium.CentralInference(max_wait="1"), "max_wait='1' must be 0 to 10 seconds"),  # type: ignore[arg-type]
        (podium.CentralInference(queue_depth=0), "queue_depth=0"),
        (podium.CentralInference(max_lag=-1), "max_lag=-1"),
        (podium.CentralInference(restarts=-1), "restarts=-1"),
        (podium.CentralInference(actor_timeout=0), "actor_timeout=0"),
        (podium.DistributedActors(workers=0), "workers=0 must be an integer of 1 or more"),
        (podium.DistributedActors(workers=3), "num_envs=8 is not divisible by workers=3; use 6 or 9"),
        (podium.DistributedActors(learner_devices=3), "num_envs=8 is not divisible by the 3 learner devices"),
        (podium.DistributedActors(refresh_every=0), "refresh_every=0"),
        (podium.DistributedActors(lockstep=True, refresh_every=2), "refresh_every=2; use 1"),
        (podium.DistributedActors(queue_depth=0), "queue_depth=0"),
        (podium.DistributedActors(max_lag=-1), "max_lag=-1"),
        (podium.DistributedActors(restarts=-1), "restarts=-1"),
        (podium.DistributedActors(actor_timeout=0), "actor_timeout=0"),
    ],
)
def test_bad_settings_are_refused_in_a_sentence(placement: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        placement.build(UNTRACED, catch(), num_envs=NUM_ENVS, rollout_length=8)


@BOTH
def test_several_seeds_and_processes_are_refused(placement: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=f"seeds=2: {placement} runs one seed"):
        PLACEMENTS[placement]().build(UNTRACED, catch(), num_envs=8, rollout_length=8, seeds=2)
    monkeypatch.setattr("podium.distributed.num_processes", lambda: 2)
    with pytest.raises(ValueError, match=f"2 processes: {placement} runs in one"):
        PLACEMENTS[placement]().build(UNTRACED, catch(), num_envs=8, rollout_length=8)


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("name", ["ppo", "a2c", "impala", "dqn"])
def test_it_learns_catch(placement: str, name: str) -> None:
    agents: dict[str, tuple[Agent, int, int, int]] = {
        "ppo": (ppo.make(ppo.Config(learning_rate=1e-3)), 64, 32, 120_000),
        "a2c": (a2c.make(a2c.Config(learning_rate=2e-3)), 32, 16, 300_000),
        "impala": (impala.make(impala.Config(learning_rate=2e-3)), 32, 16, 300_000),
        "dqn": (dqn.make(dqn.Config(learning_rate=1e-3, buffer_capacity=20_000)), 16, 1, 100_000),
    }
    agent, num_envs, length, num_steps = agents[name]
    value = {
        "CentralInference": podium.CentralInference(envs_per_actor=num_envs // 4, devices=1),
        "DistributedActors": podium.DistributedActors(workers=4),
    }[placement]
    sizes: dict[str, Any] = {"num_steps": num_steps, "num_envs": num_envs, "rollout_length": length}
    result = podium.train(agent, catch(), placement=value, eval_every=0, progress=False, **sizes)
    assert result.summary["eval_return"] >= 0.9
