"""Sebulba: the same mathematics as Anakin in lockstep, bounded staleness otherwise, and faults that end a run."""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
import threading
import time
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import podium
from podium.agent import ActOutput, Agent
from podium.agents import a2c, apex, dqn, impala, ppo, pqn, r2d2, rainbow, reppo, sac, td3
from podium.host import HostEnv, HostEnvFactory, on_host
from podium.placement.actors.host import CompiledHostActing, HostActing
from podium.placement.threads.channels import LatestParams
from podium.placement.threads.supervision import ActorError

NUM_ENVS = 8
SMALL: Any = {"hidden_sizes": (16,), "batch_size": 32, "min_replay_size": 64, "buffer_capacity": 1024}

# Adam's usual eps would make steps of the rounding that bins far from every value have for a gradient.
REPPO: Any = {"hidden_sizes": (16,), "num_epochs": 2, "num_minibatches": 2, "num_bins": 21, "adam_eps": 1e-5}
# Sums of squares of observations are of thousands, of which the absolute tolerance below is none.
REPPO["normalize_obs"] = False
AGENTS: dict[str, tuple[Agent, int, int]] = {
    "ppo": (ppo.make(ppo.Config(hidden_sizes=(16,), num_minibatches=2, learning_rate=1e-3)), 8, 3),
    "ppo gru": (ppo.make(ppo.Config(hidden_sizes=(16,), num_minibatches=2, memory="gru", memory_size=16)), 8, 3),
    "a2c": (a2c.make(a2c.Config(hidden_sizes=(16,))), 8, 3),
    "impala": (impala.make(impala.Config(hidden_sizes=(16,))), 8, 3),
    "impala lstm": (impala.make(impala.Config(hidden_sizes=(16,), memory="lstm", memory_size=16)), 8, 3),
    "impala squashed": (impala.make(impala.Config(hidden_sizes=(16,), squash=True)), 8, 3),
    "pqn": (pqn.make(pqn.Config(hidden_sizes=(16,), num_minibatches=4, epsilon_decay_steps=100)), 8, 3),
    "pqn gru": (pqn.make(pqn.Config(hidden_sizes=(16,), num_minibatches=2, memory="gru", memory_size=16)), 8, 3),
    "dqn": (dqn.make(dqn.Config(**SMALL)), 1, 14),
    "apex": (apex.make(apex.Config(num_actors=8, **SMALL)), 1, 14),
    "r2d2": (
        r2d2.make(r2d2.Config(sequence_length=6, burn_in=2, sequence_period=2, memory_size=16, num_actors=8, **SMALL)),
        4,
        5,
    ),
    "rainbow": (rainbow.make(rainbow.Config(num_atoms=11, **SMALL)), 1, 14),
    "reppo": (reppo.make(reppo.Config(**REPPO)), 8, 3),
    "sac": (sac.make(sac.Config(updates_per_step=0.25, warmup_steps=40, **SMALL)), 1, 14),
    "td3": (td3.make(td3.Config(updates_per_step=0.25, warmup_steps=40, **SMALL)), 1, 14),
}
PENDULUM = ("impala squashed", "reppo", "sac", "td3")


def run(
    placement: Any, agent: Agent, length: int, updates: int, env: Any = None, num_envs: int = NUM_ENVS
) -> tuple[Any, dict[str, Any]]:
    """Return the agent's state after `updates` updates, and the metrics."""
    env = podium.envs.make("podium/Catch") if env is None else env
    program = placement.build(agent, env, num_envs=num_envs, rollout_length=length, max_updates=updates)
    try:
        state, metrics = program.chunk(program.init(0), updates)
        return jax.device_get(program.agent_state(state)), metrics
    finally:
        program.close()


NIGHTLY = ("ppo gru", "impala squashed", "pqn gru", "apex", "r2d2", "rainbow", "reppo", "td3")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in NIGHTLY)) for name in AGENTS])
def test_in_lockstep_it_is_anakin(name: str) -> None:
    agent, length, updates = AGENTS[name]
    env = podium.envs.make("Pendulum-v1") if name in PENDULUM else None
    fused, fused_metrics = run(podium.Anakin(1), agent, length, updates, env)
    split, metrics = run(podium.Sebulba(lockstep=True, actor_threads=2, groups=2), agent, length, updates, env)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), fused, split)
    for key in ("episodes", "episode_return_sum", "episode_length_sum"):
        np.testing.assert_allclose(metrics[key], fused_metrics[key])
    assert (metrics["policy_lag_max"] == 0).all()
    assert (metrics["valid_steps"] == NUM_ENVS * length).all()


def test_actor_and_learner_devices_apart_change_nothing() -> None:
    agent, length, updates = AGENTS["ppo"]
    devices = jax.devices()
    apart = podium.Sebulba(devices[:1], devices[1:3], lockstep=True, actor_threads=2)
    one, _ = run(podium.Sebulba(lockstep=True), agent, length, updates)
    several, _ = run(apart, agent, length, updates)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), one, several)


@pytest.mark.slow
def test_numbers_of_devices_that_do_not_divide_each_other_change_nothing() -> None:
    """Three devices act for 4 environments each, two learn from 6 each: one rollout is cut between them."""
    agent, length, updates = AGENTS["impala"]
    one, _ = run(podium.Sebulba(lockstep=True), agent, length, updates, num_envs=12)
    several, _ = run(podium.Sebulba(3, 2, lockstep=True), agent, length, updates, num_envs=12)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), one, several)


def test_the_bytes_explained_are_those_that_move(monkeypatch: pytest.MonkeyPatch) -> None:
    up: dict[str, int] = {}
    down: list[int] = []
    published: list[int] = []
    make, publish = CompiledHostActing.__init__, LatestParams.publish

    def counting(self: CompiledHostActing, *arguments: Any) -> None:
        make(self, *arguments)
        step, end = self.step, self.end
        on_host = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree) if isinstance(x, np.ndarray))

        def counted_step(*arguments: Any) -> Any:
            up["step"] = on_host(arguments)
            output = step(*arguments)
            down.append(output[2].nbytes)
            return output

        def counted_end(*arguments: Any) -> Any:
            up["end"] = on_host(arguments)
            return end(*arguments)

        self.step, self.end = counted_step, counted_end

    def counted_publish(self: LatestParams, params: Any, version: int) -> None:
        published.append(sum(x.nbytes for x in jax.tree.leaves(params)))
        publish(self, params, version)

    monkeypatch.setattr(CompiledHostActing, "__init__", counting)
    monkeypatch.setattr(LatestParams, "publish", counted_publish)
    agent, length, devices = ppo.make(ppo.Config(hidden_sizes=(8,), num_minibatches=2, num_epochs=3)), 8, jax.devices()
    placement = podium.Sebulba(devices[:2], [devices[0], devices[2]], groups=2, lockstep=True)
    program = placement.build(agent, podium.envs.make("podium/Catch"), num_envs=8, rollout_length=length)
    try:
        state, _ = program.chunk(program.init(0), 1)
        params = sum(x.nbytes for x in jax.tree.leaves(state.agent.params))
    finally:
        program.close()
    batches = 4  # Two actors, two groups each.
    assert program.bytes_per_update() == {
        "observations": batches * (length * up["step"] + up["end"]),
        "actions": batches * length * down[0],
        # Half stay. A row: obs and next_obs (100 floats each), reward, 3 flags, action, log-probability, value; once
        # an environment whether a gap lies before.
        "trajectories": 4 * (length * (2 * 400 + 4 + 3 + 4 + 4 + 4) + 1),
        "parameters": sum(published[:2]),
        "gradient sums": 3 * 2 * params,
    }
    text = str(program.explain())
    for line in ("inference +cpu:1 +environments 4 to 7", "learning +cpu:2 +environments 4 to 7", "actions .* 256 B"):
        assert re.search(line, text), text


@dataclasses.dataclass
class Hooked:
    """A host environment that calls something before every `recv`."""

    inner: HostEnv
    hook: Callable[[], Any]

    def __post_init__(self) -> None:
        self.spec, self.num_envs = self.inner.spec, self.inner.num_envs
        self.reset, self.send, self.close = self.inner.reset, self.inner.send, self.inner.close

    def recv(self) -> Any:
        self.hook()
        return self.inner.recv()


def breaking(env: HostEnv, at: int, what: Callable[[], Any]) -> HostEnv:
    """Return a host environment whose `recv` does something at its nth call."""
    calls = itertools.count(1)
    return Hooked(env, lambda: what() if next(calls) == at else None)


def faulty(at: int, what: Any) -> HostEnvFactory:
    envs = on_host(podium.envs.make("podium/Catch"))
    make = lambda num_envs, seed, first: breaking(envs.make(num_envs, seed, first), at, what)
    return dataclasses.replace(envs, make=make)


def orphans() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("podium-actor")]


def test_an_actor_that_raises_ends_the_run_with_its_traceback() -> None:
    def fail() -> None:
        raise ZeroDivisionError("the simulator broke")

    agent, length, _ = AGENTS["ppo"]
    with pytest.raises(ActorError, match="(?s)died of ZeroDivisionError.*the simulator broke.*in fail"):
        run(podium.Sebulba(actor_threads=2, groups=2), agent, length, 10, faulty(20, fail))
    assert not orphans()


@pytest.mark.parametrize("chance", [pytest.param(seed, marks=[pytest.mark.slow] * (seed > 1)) for seed in range(8)])
def test_an_actor_that_raises_at_any_time_ends_the_run(chance: int) -> None:
    """One thread of two, in one of its groups, during the first rollout, in the midst of others, while others wait."""
    generator = random.Random(chance)
    first, at = generator.choice((0, 2, 4, 6)), generator.randint(1, 60)

    def fail() -> None:
        time.sleep(generator.random() / 10)
        raise OSError("the simulator broke")

    envs = on_host(podium.envs.make("podium/Catch"))

    def make(num_envs: int, seed: int, index: int) -> HostEnv:
        env = envs.make(num_envs, seed, index)
        return breaking(env, at, fail) if index == first else env

    agent, length, _ = AGENTS["impala"]
    with pytest.raises(ActorError, match=f"podium-actor-{first // 4} died of OSError"):
        run(podium.Sebulba(actor_threads=2, groups=2), agent, length, 12, dataclasses.replace(envs, make=make))
    assert not orphans()


def test_actions_that_the_environment_has_not_end_the_run_in_a_sentence() -> None:
    agent, length, _ = AGENTS["impala"]

    def act(*arguments: Any) -> ActOutput:
        output = agent.act(*arguments)
        return output._replace(action=jnp.full_like(output.action, 7))

    with pytest.raises(ActorError, match="actions 7 to 7 were sent to podium/Catch; send 0 to 2"):
        run(podium.Sebulba(), agent._replace(act=act), length, 3)
    assert not orphans()


def test_an_actor_that_hangs_ends_the_run_and_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("podium.placement.threads.supervision.STOP_SECONDS", 0.5)
    release = threading.Event()
    agent, length, _ = AGENTS["ppo"]
    with pytest.raises(ActorError, match="(?s)not come a step further for 6 s.*release.wait"):
        run(podium.Sebulba(actor_timeout=6.0), agent, length, 10, faulty(20, lambda: release.wait(60)))
    release.set()
    deadline = time.monotonic() + 10
    while orphans() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not orphans()


@pytest.mark.slow
def test_a_process_that_was_stopped_for_long_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGSTOP, a suspended job and a laptop asleep: the clock goes on, the threads do not."""
    asleep = [0.0]
    clock = types.SimpleNamespace(monotonic=lambda: time.monotonic() + asleep[0], perf_counter=time.perf_counter)
    monkeypatch.setattr("podium.placement.threads.supervision.time", clock)

    def sleep() -> None:
        asleep[0] += 1000.0
        time.sleep(1.0)  # Long enough for the learner to look at the clock.

    agent, length, _ = AGENTS["ppo"]
    _, metrics = run(podium.Sebulba(actor_timeout=30.0), agent, length, 6, faulty(20, sleep))
    assert asleep[0] >= 1000
    assert len(metrics["valid_steps"]) == 6


def test_staleness_is_bounded_and_late_rollouts_are_dropped() -> None:
    agent, length, _ = AGENTS["impala"]
    _, metrics = run(podium.Sebulba(queue_depth=3, groups=2), agent, length, 12)
    assert metrics["policy_lag_max"].max() <= 4
    assert (metrics["dropped_batches"] == 0).all()
    _, metrics = run(podium.Sebulba(queue_depth=3, max_lag=1, groups=2), agent, length, 12)
    assert metrics["policy_lag_max"].max() <= 1


@pytest.mark.parametrize("name", ["ppo", "impala lstm"])
def test_rollouts_that_begin_while_the_one_before_ends_are_the_same(name: str) -> None:
    """Parameters, keys and memory are those of a rollout that waits for the end of the one before.

    And they are the same where a rollout is played in the memory of one that was given back.
    """
    agent, length, _ = AGENTS[name]
    envs = on_host(podium.envs.make("podium/Catch"))
    params = [agent.actor(agent.init(jax.random.key(seed), envs.spec)) for seed in range(4)]
    make = HostActing(agent, envs, 6, length, groups=3).compile(params[0], jax.devices()[0])

    def play(ahead: bool, give_back: bool = False) -> list[Any]:
        actor, steps, asked = make(jax.random.key(7), 0, 0), [], []
        rollouts, given = [], []

        def following(number: int) -> Any:
            asked.append(number)
            return params[number + 1]

        for number in range(3):
            more = {"following": partial(following, number)} if ahead else {}
            played = actor.play(params[number], number, number, lambda: steps.append(0), **more)
            rollouts.append(played._replace(rollout=jax.tree.map(np.array, played.rollout)))
            if give_back:
                played.reuse(played.rollout)
                given.append(played.rollout.obs)
        assert [obs.is_deleted() for obs in given] == ([True, True, False] if give_back else [])
        assert asked == ([0, 1, 2] if ahead else [])
        assert len(steps) == 3 * 3 * length
        actor.close()
        return rollouts

    waiting = play(False)
    for others in (play(True), play(False, give_back=True), play(True, give_back=True)):
        for one, other in zip(waiting, others, strict=True):
            jax.tree.map(np.testing.assert_array_equal, one.rollout, other.rollout)
            counts = [name for name in one.stats if not name.endswith("seconds")]
            assert [one.stats[name] for name in counts] == [other.stats[name] for name in counts]
    assert len({np.asarray(played.rollout.obs).tobytes() for played in waiting}) == 3


def test_queues_never_grow_beyond_their_depth() -> None:
    """Of every actor the learner took one rollout, two wait, and one more is played until there is room for it."""
    agent, length, _ = AGENTS["ppo"]
    steps = {first: 0 for first in (0, 4)}  # By the first environment of an actor.
    envs = on_host(podium.envs.make("podium/Catch"))

    def count(first: int) -> None:
        steps[first] += 1

    def make(num_envs: int, seed: int, first: int) -> HostEnv:
        return Hooked(envs.make(num_envs, seed, first), lambda: count(first))

    placement = podium.Sebulba(queue_depth=2, actor_threads=2, groups=1)
    counted = dataclasses.replace(envs, make=make)
    program = placement.build(agent, counted, num_envs=NUM_ENVS, rollout_length=length, max_updates=1)
    try:
        program.chunk(program.init(0), 1)
        deadline = time.monotonic() + 60
        while min(steps.values()) < 4 * length and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.5)
        assert steps == {0: 4 * length, 4: 4 * length}
    finally:
        program.close()
    assert not orphans()


@pytest.mark.parametrize(
    ("changes", "each"), [({}, 8), ({"compiled": False}, 4), ({"compiled": False, "odd": True}, 3)]
)
def test_pure_environments_are_stepped_as_one_batch_and_others_as_two_that_take_turns(
    changes: dict[str, Any], each: int
) -> None:
    changes, sizes = dict(changes), []
    num_envs = 3 if changes.pop("odd", False) else NUM_ENVS
    envs = on_host(podium.envs.make("podium/Catch"))

    def make(num_envs: int, seed: int, index: int) -> HostEnv:
        sizes.append(num_envs)
        return envs.make(num_envs, seed, index)

    agent, length, _ = AGENTS["a2c"]
    run(podium.Sebulba(), agent, length, 1, dataclasses.replace(envs, make=make, **changes), num_envs)
    assert sizes == [each] * (num_envs // each)


def test_rows_of_metrics_hold_no_buffers_of_devices() -> None:
    """On a CPU what is fetched may be a view of a device's buffer: 160 kB an update were held until a chunk's end."""
    agent, length, _ = AGENTS["ppo"]
    env = podium.envs.make("podium/Catch")
    program = podium.Sebulba().build(agent, env, num_envs=NUM_ENVS, rollout_length=length, max_updates=1)
    try:
        state, _ = program.chunk(program.init(0), 1)
        _, row = program.loop.update(state, 1)
        assert all(value.flags.owndata for value in row.values() if isinstance(value, np.ndarray))
        assert sum(isinstance(value, np.ndarray) for value in row.values()) > 5
    finally:
        program.close()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"actor_threads": 0}, "actor_threads=0 must be an integer of 1 or more; 1 is usual"),
        ({"queue_depth": 0}, "queue_depth=0 must be an integer of 1 or more"),
        ({"max_lag": -1}, "max_lag=-1 must be an integer of 0 or more"),
        ({"actor_devices": 3}, "num_envs=8 is not divisible by the 3 actors; use 6 or 9"),
        ({"learner_devices": 3}, "num_envs=8 is not divisible by the 3 learner devices; use 6 or 9"),
        ({"actor_devices": 2, "learner_devices": 3}, "by the 3 learner devices; use 6 or 12"),
        ({"actor_devices": 8, "learner_devices": 9}, "devices=9, but JAX has started with 8"),
        ({"actor_devices": 0}, "actor_devices=0 must be a positive integer or a sequence .*; leave it out to use one"),
        ({"learner_devices": -1}, "learner_devices=-1 must be a positive integer"),
        ({"actor_devices": "cpu"}, "actor_devices='cpu' must be a positive integer or a sequence of JAX devices"),
        ({"learner_devices": []}, r"learner_devices=\[\] names no device; leave it out to use one"),
        ({"actor_threads": 3}, "num_envs=8 is not divisible by the 3 actors; use 6 or 9"),
        ({"envs_per_actor": 3}, "num_envs=8 is not envs_per_actor=3 times 1 actors; use num_envs=3"),
        ({"groups": 3}, "groups=3 does not divide"),
        ({"actor_timeout": 0.0}, "actor_timeout=0.0 must be finite and greater than 0; 60.0 is usual"),
    ],
)
def test_bad_settings_are_refused_in_a_sentence(changes: dict[str, Any], words: str) -> None:
    agent, length, _ = AGENTS["ppo"]
    env = podium.envs.make("podium/Catch")
    with pytest.raises(ValueError, match=words):
        podium.Sebulba(**changes).build(agent, env, num_envs=NUM_ENVS, rollout_length=length)
