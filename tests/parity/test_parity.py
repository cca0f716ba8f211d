"""The number of devices, and the placement, never change the mathematics: Anakin on 1, 2, 4, 8 devices, and Single."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from alike import assert_close

import podium
from podium.agent import Agent
from podium.agents import a2c, apex, dqn, impala, ppo, pqn, r2d2, rainbow, reppo, sac, td3

TOLERANCE = 1e-6
NUM_ENVS, LENGTH = 16, 8


class Case(NamedTuple):
    """An agent in an environment, for so many updates; `quick` says which comparisons every change waits for."""

    make: Callable[[], Agent]
    env: str
    updates: int
    quick: tuple[str | int, ...] = ()
    tolerance: float = TOLERANCE


def small_ppo(**changes: Any) -> Agent:
    return ppo.make(ppo.Config(hidden_sizes=(16,), num_epochs=2, num_minibatches=2, learning_rate=1e-3, **changes))


def small_impala(**changes: Any) -> Agent:
    return impala.make(impala.Config(hidden_sizes=(16,), num_minibatches=2, **changes))


def small_pqn(**changes: Any) -> Agent:
    config = pqn.Config(hidden_sizes=(16,), num_minibatches=2, learning_rate=1e-3, epsilon_decay_steps=500)
    return pqn.make(dataclasses.replace(config, **changes))


def small_dqn(algorithm: Any = dqn, **changes: Any) -> Agent:
    config = algorithm.Config(
        hidden_sizes=(16,),
        batch_size=32,
        num_updates=2,
        buffer_capacity=2048,
        min_replay_size=512,
        target_update_period=5,
        epsilon_decay_steps=2000,
        learning_rate=1e-3,
    )
    return algorithm.make(dataclasses.replace(config, **changes))


def small_r2d2(**changes: Any) -> Agent:
    windows = {"sequence_length": 6, "burn_in": 2, "sequence_period": 4, "memory": "gru", "memory_size": 16}
    return small_dqn(r2d2, **windows | changes)


def small_reppo(**changes: Any) -> Agent:
    sizes: dict[str, Any] = {"hidden_sizes": (16,), "num_epochs": 2, "num_minibatches": 2, "num_bins": 21}
    # Adam's usual eps would make steps of the rounding that bins far from every value have for a gradient.
    sizes["adam_eps"] = 1e-5
    return reppo.make(reppo.Config(**sizes, value_min=-50.0, value_max=10.0, learning_rate=1e-3, **changes))


def small_continuous(algorithm: Any, **changes: Any) -> Agent:
    sizes = {"hidden_sizes": (16,), "batch_size": 32, "buffer_capacity": 2048, "min_replay_size": 512}
    return algorithm.make(algorithm.Config(**sizes, updates_per_step=1 / 64, warmup_steps=256, **changes))


# 512 steps to begin with are 4 updates of 16 * 8: so 26 learn in at least 22 of them.
CASES = {
    "ppo": Case(small_ppo, "podium/Catch", 5, quick=(2, 8, "single")),
    "ppo-gru": Case(lambda: small_ppo(memory="gru", memory_size=16), "podium/RepeatFirst", 5, quick=(8,)),
    "ppo-lstm": Case(lambda: small_ppo(memory="lstm", memory_size=16), "podium/RepeatFirst", 5),
    "ppo-continuous": Case(small_ppo, "Pendulum-v1", 4),
    "ppo-continuous-normalized": Case(
        lambda: small_ppo(
            normalize_obs=True, normalize_reward=True, value_clip=0.2, anneal_steps=10_000, target_kl=0.02
        ),
        "Pendulum-v1",
        4,
        quick=(8,),
    ),
    "ppo-squashed": Case(lambda: small_ppo(squash=True), "Pendulum-v1", 4),
    "a2c": Case(lambda: a2c.make(a2c.Config(hidden_sizes=(16,))), "podium/Catch", 5),
    "impala": Case(small_impala, "podium/Catch", 5, quick=("single",)),
    "impala-gru": Case(lambda: small_impala(memory="gru", memory_size=16), "podium/RepeatFirst", 5),
    "pqn": Case(small_pqn, "podium/Catch", 5, quick=(8,)),
    "pqn-normalized": Case(lambda: small_pqn(normalize_obs=True, anneal_steps=10_000), "CartPole-v1", 5),
    "pqn-gru": Case(lambda: small_pqn(memory="gru", memory_size=16), "podium/RepeatFirst", 5),
    "dqn": Case(lambda: small_dqn(double=False), "podium/Catch", 26),
    "dqn-3-step-double-dueling": Case(
        lambda: small_dqn(n_step=3, dueling=True), "podium/Catch", 26, quick=(8, "single")
    ),
    "apex": Case(lambda: small_dqn(apex), "podium/Catch", 26),
    # Bandits are left by the time limit, after 100 steps, in the middle of a window.
    "r2d2": Case(small_r2d2, "BernoulliBandit-misc", 20, quick=(8,)),
    "r2d2-lstm": Case(lambda: small_r2d2(memory="lstm", stored_state=False), "podium/RepeatFirst", 20),
    "rainbow": Case(lambda: small_dqn(rainbow, num_atoms=11, v_min=-2.0, v_max=2.0), "podium/Catch", 26, quick=(8,)),
    "reppo": Case(small_reppo, "Pendulum-v1", 4),
    "sac": Case(lambda: small_continuous(sac, n_step=3, policy_delay=2), "Pendulum-v1", 12, quick=(8,)),
    # A rounding of the statistics is in the actions, so in what is seen next, and in the statistics again. In Pendulum,
    # near the top, that grows a hundredfold in 64 steps.
    "td3": Case(lambda: small_continuous(td3, normalize_obs=True), "PointRobot-misc", 12, tolerance=1e-5),
}


def pairs(*others: str | int) -> list[Any]:
    """Return every case beside every one of `others`, the costly ones marked slow."""
    return [
        pytest.param(name, other, marks=[together(name), *[pytest.mark.slow] * (other not in case.quick)])
        for name, case in CASES.items()
        for other in others
    ]


def together(name: str) -> pytest.MarkDecorator:
    """Return a mark by which one process has all of a case, and trains it on one device once."""
    return pytest.mark.xdist_group(f"parity {name}")


class Run(NamedTuple):
    """What a few updates came to: the rollout's end after the first, parameters after the last, the metrics."""

    first_rollout: Any
    params: Any
    metrics: dict[str, np.ndarray]


_runs: dict[tuple[str, Any], Run] = {}


def run(name: str, placement: Any) -> Run:
    """Train the case under the placement, once a session."""
    if (name, placement) not in _runs:
        case = CASES[name]
        agent, env = case.make(), podium.envs.make(case.env)
        program = placement.build(
            agent, env, num_envs=NUM_ENVS, rollout_length=LENGTH, num_lanes=8, max_updates=case.updates
        )
        state, first_metrics = program.chunk(program.init(3), 1)
        first = jax.device_get(state.rollout)
        state, metrics = program.chunk(state, case.updates - 1)
        metrics = {k: np.concatenate([first_metrics[k], v]) for k, v in metrics.items() if k != "finite"}
        _runs[name, placement] = Run(first, jax.device_get(agent.actor(state.agent)), metrics)
    return _runs[name, placement]


def assert_bit_equal(a: Any, b: Any) -> None:
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes(), jax.tree_util.keystr(path)


@pytest.mark.parametrize(("name", "devices"), pairs(2, 4, 8))
def test_the_number_of_devices_changes_nothing(name: str, devices: int) -> None:
    one, several = run(name, podium.Anakin(1)), run(name, podium.Anakin(devices))
    if name in ("ppo-squashed", "reppo"):  # A tanh of one number may end in another bit than that of eight.
        assert_close(one.first_rollout, several.first_rollout, 1e-6)
    else:
        assert_bit_equal(one.first_rollout, several.first_rollout)
    assert_close(one.params, several.params, CASES[name].tolerance)


@pytest.mark.parametrize(("name", "other"), pairs("single"))
def test_the_readable_oracle_agrees(name: str, other: str) -> None:
    compiled, readable = run(name, podium.Anakin(1)), run(name, podium.Single())
    assert_close(compiled.first_rollout, readable.first_rollout, TOLERANCE)
    assert_close(compiled.params, readable.params, CASES[name].tolerance)
    for metric in compiled.metrics:
        np.testing.assert_allclose(compiled.metrics[metric], readable.metrics[metric], 1e-4, 1e-5, err_msg=metric)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=together(name)) for name, case in CASES.items() if case.quick]
)
def test_the_runs_compared_did_learn(name: str) -> None:
    """Parameters that never moved would agree as well."""
    case, result = CASES[name], run(name, podium.Anakin(1))
    agent, env = case.make(), podium.envs.make(case.env)
    program = podium.Anakin(1).build(agent, env, num_envs=NUM_ENVS, rollout_length=LENGTH, num_lanes=8)
    start = jax.device_get(agent.actor(program.init(3).agent))
    moved = jax.tree.map(lambda x, y: np.abs(np.asarray(x, float) - np.asarray(y, float)).max(), start, result.params)
    assert max(jax.tree.leaves(getattr(moved, "network", moved))) > 1e-3
    least = {"dqn": 20, "apex": 20, "r2d2": 17, "rainbow": 20, "sac": 9, "td3": 9}.get(
        name.partition("-")[0], case.updates
    )  # A replay fills first.
    assert np.isfinite(result.metrics["loss"]).sum() >= least


def test_another_seed_gives_another_run() -> None:
    agent, env = small_ppo(), podium.envs.make("podium/Catch")
    program = podium.Anakin(1).build(agent, env, num_envs=NUM_ENVS, rollout_length=LENGTH, num_lanes=8, max_updates=5)
    state, _ = program.chunk(program.init(4), 1)
    ours, other = run("ppo", podium.Anakin(1)).first_rollout, jax.device_get(state.rollout)
    assert any(
        (np.asarray(x) != np.asarray(y)).any() for x, y in zip(*map(jax.tree.leaves, (ours, other)), strict=True)
    )
