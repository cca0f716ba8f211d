"""Each mode prints JSON lines that hold together."""

from __future__ import annotations

import json
import statistics
import threading
import time
from typing import Any

import anakin_rate
import benchmark
import bounds
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tag_rate
from stacks import Stacks

import podium
from podium.devices import num_cores
from podium.placement.threads.channels import LatestParams
from podium.ranges import largest_divisor
from podium.types import ArraySpec, DiscreteSpec, EnvSpec

COMMON = {"what", "devices", "seconds", "repeats", "compile_seconds", "versions", "hardware"}
ANAKIN = COMMON | {
    "agent",
    "env",
    "num_envs",
    "rollout_length",
    "epochs",
    "minibatches",
    "num_steps",
    "steps_per_second",
    "finite",
}


def measure(capsys: pytest.CaptureFixture[str], command: str) -> dict[str, Any]:
    assert benchmark.main(command.split()) == 0
    return dict(json.loads(capsys.readouterr().out.splitlines()[-1]))


def check(row: dict[str, Any], repeats: int) -> None:
    assert len(row["repeats"]) == repeats
    assert row["seconds"] == statistics.median(row["repeats"])
    assert row["steps_per_second"] == pytest.approx(row["num_steps"] / row["seconds"])
    assert row["compile_seconds"] > 0
    assert {"podium", "jax", "jaxlib", "python"} <= set(row["versions"])
    assert {"cpu", "cores", "device_kind"} <= set(row["hardware"])


@pytest.mark.slow
def test_anakin_ppo(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "matmul_flops_per_second", lambda: 1e9)
    row = measure(
        capsys,
        "anakin --agent ppo --env podium/Catch --num-envs 8 --rollout-length 8 --epochs 2 --minibatches 2 "
        "--num-steps 200 --devices 1 --repeats 3 --hidden-sizes 8",
    )
    assert set(row) >= ANAKIN | {"flops_per_step", "share_of_matmul_bound"}
    check(row, 3)
    assert (row["num_steps"], row["devices"], row["epochs"], row["minibatches"], row["finite"]) == (192, 1, 2, 2, True)
    assert row["share_of_matmul_bound"] == pytest.approx(row["flops_per_step"] * row["steps_per_second"] / 1e9)


def test_anakin_dqn_learns_while_it_is_timed(capsys: pytest.CaptureFixture[str]) -> None:
    row = measure(
        capsys,
        "anakin --agent dqn --env podium/Catch --num-envs 4 --rollout-length 2 --buffer-capacity 64 --batch-size 8 "
        "--num-updates 2 --num-steps 64 --devices 1 --repeats 2 --hidden-sizes 8",
    )
    assert set(row) >= ANAKIN | {"buffer_capacity", "batch_size", "num_updates"}
    check(row, 2)
    assert (row["buffer_capacity"], row["batch_size"], row["num_updates"], row["epochs"]) == (64, 8, 2, None)


@pytest.mark.parametrize("env", ["podium/Catch", "Pendulum-v1"])
def test_env(env: str, capsys: pytest.CaptureFixture[str]) -> None:
    row = measure(capsys, f"env --env {env} --num-envs 4 --num-steps 1001 --repeats 2")
    check(row, 2)
    assert (row["what"], row["num_steps"]) == ("env", 1000)


def test_matmul(capsys: pytest.CaptureFixture[str]) -> None:
    row = measure(capsys, "matmul --size 64 --repeats 2")
    assert set(row) >= COMMON and row["gflops_per_second"] > 0


@pytest.mark.slow
def test_scaling(capsys: pytest.CaptureFixture[str]) -> None:
    command = (
        "scaling --env podium/Catch --num-envs 8 --rollout-length 8 --num-steps 640 --repeats 1 --device-counts 1 2"
    )
    assert benchmark.main(command.split()) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["work"], row["devices"], row["num_envs"], row["num_steps"]) for row in rows] == [
        ("fixed_total", 1, 8, 640),
        ("fixed_total", 2, 8, 640),
        ("fixed_per_device", 1, 8, 640),
        ("fixed_per_device", 2, 16, 1280),
    ]
    assert rows[0]["speed_up"] == rows[2]["speed_up"] == 1


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("anakin --num-steps 0", "num_steps"),
        ("anakin --num-steps 10", "num_steps"),
        ("anakin --num-envs 0", "num_envs"),
        ("anakin --epochs 0", "epochs"),
        ("anakin --minibatches 0", "minibatches"),
        ("anakin --repeats 0", "repeats"),
        ("anakin --env Cartpole", "CartPole-v1"),
        ("anakin --agent dqn --buffer-capacity 0", "buffer_capacity"),
        ("env --num-envs 0", "num_envs"),
        ("env --num-steps 3", "num_steps"),
        ("matmul --size 0", "size"),
        ("scaling --device-counts 0", "device_counts"),
        ("scaling --num-envs 6 --device-counts 1 4", "num_envs"),
        ("tag --agents 1", "agents="),
        ("sprint", "sprint"),
        ("sebulba --env CartPole-v1", "env='CartPole-v1'"),
        ("sebulba --updates 0", "updates=0"),
        ("evolution --population 0", "population=0"),
        ("sac --beside brax", "--env Pendulum-v1 is none that Brax's trainer has"),
        ("sac --normalize-obs", "--normalize-obs True: rejax"),
    ],
)
def test_refusals(command: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmark.main(command.split()) == 2
    error = capsys.readouterr().err
    assert named in error and error.count("\n") == 1, error


def test_tag_in_numpy_is_the_game(capsys: pytest.CaptureFixture[str]) -> None:
    """From one state by the same actions: where all are, what each sees and gets, and when it ends."""
    env, other = podium.envs.make("podium/Tag", num_taggers=3, num_runners=9), tag_rate.NumpyTag(3, 9)
    state, timestep = jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.key(0), 6))
    step, generator, tags = jax.jit(jax.vmap(env.step)), np.random.default_rng(0), 0
    swapped = 0
    for _ in range(100):
        crowd = tag_rate.Crowd(*(np.array(x) for x in state))
        action = generator.choice([3, 4, 5, 6, 7, 8, 7, 7], (6, 12))
        state, timestep = step(jax.random.split(jax.random.key(0), 6), state, jnp.asarray(action))
        new, obs, reward, ended = other.step(crowd, action)
        swapped += int((np.abs(timestep.obs - obs).max(-1) > 2e-4).sum())  # Two as near, to 13 bits, in another order.
        np.testing.assert_allclose(timestep.reward, reward, atol=1e-6)
        np.testing.assert_array_equal(timestep.last, ended)
        np.testing.assert_allclose(state.position, new.position, atol=1e-5)
        tags += int((reward >= 1).sum())
    assert tags > 10 and swapped < 0.005 * 100 * 6 * 12 and timestep.last.all()
    row = measure(capsys, "tag --agents 2 5 --total 20 --steps 3 --repeats 1")
    assert [each["agents"] for each in row["rows"]] == [2, 5] and row["rows"][0]["num_envs"] == 10
    assert all(rate > 0 for each in row["rows"] for rate in each["agent_steps_per_second"].values())


def test_flops_by_hand() -> None:
    """4 inputs, one layer of 8, 2 actions: actor 4*8 + 8*2, critic 4*8 + 8*1, twice; 1 + 3 forwards an epoch."""
    spec = EnvSpec("x", ArraySpec((4,), jnp.float32), DiscreteSpec(2))
    forward = 2 * (4 * 8 + 8 * 2 + 4 * 8 + 8 * 1)
    assert anakin_rate.ppo_flops_per_step(spec, (8,), epochs=2) == forward * (1 + 3 * 2)


def test_solve_says_when_each_seed_was_first_good_enough(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--runs 2 --num-envs 8 --rollout-length 8 --eval-every 64"
    row = measure(capsys, f"solve --env podium/Catch --threshold -2 {sizes}")
    assert row["solved"] == 2 and row["env_steps"] == [64, 64]
    assert row["median_seconds"] > 0 and row["compile_seconds"] > 0


def test_paired_times_both_in_turn(capsys: pytest.CaptureFixture[str]) -> None:
    row = measure(capsys, "paired --num-envs 4 --rollout-length 8 --epochs 1 --minibatches 1 --updates 1 --repeats 2")
    assert len(row["ratios"]) == 2 and row["ratio"] == pytest.approx(statistics.median(row["ratios"]))
    assert row["steps_per_second"] > 0 and row["reference_steps_per_second"] > 0
    assert row["devices"] == largest_divisor(4, min(8, num_cores()))


def test_evolution_counts_members_and_the_steps_they_took_and_stands_beside_evosax(
    capsys: pytest.CaptureFixture[str],
) -> None:
    row = measure(capsys, "evolution --population 16 --generations 2 --repeats 1")
    (seconds,) = row["podium_seconds"]
    assert row["podium_evaluations_per_second"] == pytest.approx(32 / seconds)
    assert 32 * 8 < row["podium_steps_per_second"] * seconds < 32 * 500
    assert 32 * 8 < row["evosax_steps_per_second"] * row["evosax_seconds"][0] < 32 * 500
    assert row["ratios_of_steps_per_second"] == [
        pytest.approx(row["podium_steps_per_second"] / row["evosax_steps_per_second"])
    ]


def test_sebulba_stands_beside_its_environments_alone(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("envpool", reason='envpool is in the extra: pip install "podium[atari]"')
    row = measure(capsys, "sebulba --num-envs 4 --rollout-length 4 --updates 2 --repeats 1")
    assert row["ratios"] == [row["ratio"]]
    assert row["steps_per_second"] == pytest.approx(4 * 4 * 2 / row["seconds"])
    assert row["env_seconds"] > 0 and row["inference_seconds"] > 0 and row["learn_seconds"] > 0
    assert 0 <= row["learner_idle"] <= 1 and row["environments_alone_steps_per_second"] > 0
    assert "threads_are_in" not in row


def test_stacks_say_where_threads_are() -> None:
    latest, stop = LatestParams(), threading.Event()
    thread = threading.Thread(target=lambda: latest.get(0, stop))
    stacks = Stacks(seconds=0.001)
    thread.start()
    with stacks:
        time.sleep(0.2)
    latest.publish((), 0)
    thread.join()
    shares = stacks.shares()
    waits = [share for where, share in shares.items() if where.endswith("self._condition.wait(POLL_SECONDS)")]
    assert len(waits) == 1 and 0 < waits[0] <= sum(shares.values()) <= 1 + 1e-9


@pytest.mark.slow
def test_search_stands_beside_one_key_for_all(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("mctx", reason='mctx is in the extra: pip install "podium[games]"')
    sizes = "--num-simulations 4 --num-envs 4 --hidden-sizes 8 --searches 1 --repeats 3"
    row = measure(capsys, f"search --env podium/TicTacToe --openings 3 {sizes}")
    assert len(row["ratios"]) == 3 and row["ratio"] == statistics.median(row["ratios"])
    assert row["searches_per_second"] > 0 and row["mctx_searches_per_second"] > 0


@pytest.mark.parametrize(("how", "most"), [("", 1000), ("--in-turn", 500)])
def test_central_inference_stands_beside_its_slowest_stage(
    how: str, most: float, capsys: pytest.CaptureFixture[str]
) -> None:
    command = "central --num-envs 4 --envs-per-actor 2 --rollout-length 4 --updates 4 --repeats 1 --hidden-size 8"
    row = measure(capsys, f"{command} --shortest 0.004 --longest 0.004 {how}")
    stages = {name: row[f"{name}_steps_per_second"] for name in ("environments", "inference", "learning", "serving")}
    slowest = min(stages, key=lambda name: stages[name])
    assert row["slowest_stage"] == slowest
    assert row["ratios"] == [row["ratio"]] == [pytest.approx(row["steps_per_second"] / stages[slowest])]
    assert row["ratio_of_environments"] == pytest.approx(row["steps_per_second"] / stages["environments"])
    # Two threads, and nobody sleeps less than asked: of the two of each thread at once, or one after the other.
    assert 0 < row["environments_steps_per_second"] <= most
