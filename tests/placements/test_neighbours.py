"""What a replay joins to a transition of n steps follows on in time, whatever was dropped or began anew in between."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import podium
from podium import replay
from podium.agent import Agent
from podium.agents import dqn
from podium.env import Env, restart, transition
from podium.host import on_host
from podium.replay import Batch, Transition
from podium.types import ArraySpec, DiscreteSpec, EnvSpec

NUM_ENVS, LENGTH, N_STEP, GAMMA = 8, 4, 3, 0.5


def counter() -> Env:
    """Make an environment that never ends, whose observation is the number of the step."""
    spec = EnvSpec("counter", ArraySpec((1,)), DiscreteSpec(2))
    seen = lambda state: state[None].astype(jnp.float32)
    reset = lambda key: (jnp.zeros((), jnp.int32), restart(seen(jnp.zeros((), jnp.int32))))
    step = lambda key, state, action: (state + 1, transition(seen(state + 1), state, False))
    return Env(spec, reset, step)


def mixed(batch: Batch) -> jax.Array:
    """Return [N], whether a window holds rows that do not follow one another: it is as long as its discount says."""
    steps = jnp.round(jnp.log(batch.discount) / jnp.log(GAMMA))
    return jnp.abs(batch.next_obs[..., 0] - batch.obs[..., 0] - steps) > 0.5


def agent_of(ranked: bool = False) -> Agent:
    """Return a DQN that says which share of its windows is mixed, and which stopped early."""
    sizes = {"batch_size": 64, "num_updates": 4, "min_replay_size": 64, "n_step": N_STEP, "gamma": GAMMA}
    buffer = (replay.prioritized if ranked else replay.uniform)(512, **sizes)  # type: ignore[arg-type]
    agent = dqn.make(dqn.Config(hidden_sizes=(4,), gamma=GAMMA, n_step=N_STEP), buffer=buffer)

    def grad(key: Any, state: Any, batch: Batch) -> Any:
        grads, aux = agent.grad(key, state, batch)
        short = batch.discount > GAMMA**N_STEP * 1.01
        told = {"mixed": mixed(batch).mean(dtype=jnp.float32), "short": short.mean(dtype=jnp.float32)}
        return grads, aux._replace(metrics=aux.metrics | told)

    return agent._replace(grad=grad)


PLACEMENTS: dict[str, Any] = {
    "Sebulba": podium.Sebulba(max_lag=0, queue_depth=3),
    "CentralInference": podium.CentralInference(envs_per_actor=4, devices=1, max_lag=0, queue_depth=3),
    "DistributedActors": podium.DistributedActors(workers=2, max_lag=0, queue_depth=3),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "Sebulba")) for name in PLACEMENTS]
)
def test_windows_stop_where_a_rollout_was_dropped(name: str) -> None:
    program = PLACEMENTS[name].build(agent_of(), counter(), num_envs=NUM_ENVS, rollout_length=LENGTH)
    try:
        _, metrics = program.chunk(program.init(0), 40)
    finally:
        program.close()
    assert metrics["dropped_batches"].sum() > 0, "nothing was tried"
    np.testing.assert_array_equal(np.nan_to_num(metrics["mixed"]), 0)
    assert np.nanmax(metrics["short"]) > 0


@pytest.mark.parametrize(
    "placement",
    [
        podium.Single(),
        pytest.param(podium.Sebulba(lockstep=True), marks=pytest.mark.slow),
        pytest.param(podium.CentralInference(devices=1, lockstep=True), marks=pytest.mark.slow),
        pytest.param(podium.ParameterServer(2, devices=1), marks=pytest.mark.slow),
        pytest.param(podium.LocalSGD(2, devices=1), marks=pytest.mark.slow),
    ],
    ids=lambda placement: type(placement).__name__,
)
def test_windows_stop_where_a_run_is_resumed(placement: Any) -> None:
    """Over environments on the host, whose episodes then begin anew."""
    make = lambda: placement.build(agent_of(ranked=True), on_host(counter()), num_envs=NUM_ENVS, rollout_length=LENGTH)
    state = make().init(0)
    for _ in range(2):
        program = make()
        try:
            state, metrics = program.chunk(state, 8)
        finally:
            program.close()
        np.testing.assert_array_equal(np.nan_to_num(metrics["mixed"]), 0)
        # What is held moves to where the next program looks for it, as a checkpoint does.
        state = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), state, program.abstract_state())
    assert np.nanmax(metrics["short"]) > 0


def test_windows_stop_where_an_actor_began_anew() -> None:
    envs, calls = on_host(counter()), [0]

    class Faulty:
        def __init__(self, env: Any):
            self._env = env

        def __getattr__(self, name: str) -> Any:
            if name == "recv":
                calls[0] += 1
                if calls[0] == 61:
                    raise ConnectionError("the simulator is gone")
            return getattr(self._env, name)

    faulty = dataclasses.replace(envs, make=lambda *given: Faulty(envs.make(*given)))
    placement = podium.DistributedActors(workers=2, restarts=1)
    program = placement.build(agent_of(), faulty, num_envs=NUM_ENVS, rollout_length=LENGTH)
    try:
        _, metrics = program.chunk(program.init(0), 30)
    finally:
        program.close()
    assert metrics["dropped_rollouts"].sum() == 1
    np.testing.assert_array_equal(np.nan_to_num(metrics["mixed"]), 0)
    assert np.nanmax(metrics["short"]) > 0


@pytest.mark.parametrize("ranked", [False, True], ids=["uniform", "prioritized"])
def test_random_gaps_against_a_list_of_steps(ranked: bool) -> None:
    """Every window that is drawn is one that a plain list, which knows when each step was, allows."""
    rng, lanes = np.random.default_rng(0), 2
    make = replay.prioritized if ranked else replay.uniform
    buffer = make(64, 32, 1, 1, N_STEP, GAMMA)
    rows = lambda x: jnp.asarray(x, jnp.float32)
    item = Transition(rows(0), jnp.int32(0), rows(0), jnp.bool_(0), jnp.bool_(0), rows(0))
    state, now = buffer.init(item, 4, lanes, LENGTH), np.zeros(4)
    add, cut, sample = jax.jit(buffer.add), jax.jit(buffer.cut), jax.jit(buffer.sample)  # type: ignore[arg-type]
    stopped = False
    for round_ in range(60):
        gap = rng.random(4) < 0.3
        now += np.where(gap, rng.integers(1, 100, 4), 0)
        obs = now + np.arange(LENGTH)[:, None]
        now += LENGTH
        no = jnp.zeros((LENGTH, 4), bool)
        state = cut(state, jnp.asarray(gap))
        state = add(state, Transition(rows(obs), no.astype(jnp.int32), rows(obs), no, no, rows(obs + 1)))
        if not buffer.can_sample(state):
            continue
        batch, _ = sample(jax.random.key(round_), state)
        steps = np.round(np.log(batch.discount) / np.log(GAMMA)).astype(int)
        drawn = np.ones(32, bool) if batch.weight is None else np.asarray(batch.weight) > 0
        np.testing.assert_array_equal((batch.next_obs - batch.obs)[drawn], steps[drawn])
        expected = [sum(GAMMA**k * (o + k) for k in range(m)) for o, m in zip(batch.obs, steps, strict=True)]
        np.testing.assert_allclose(np.asarray(batch.reward)[drawn], np.array(expected)[drawn], rtol=1e-5)
        stopped = stopped or bool((steps[drawn] < N_STEP).any())
    assert stopped
