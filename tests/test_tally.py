"""Rows of metrics: sums, means and maxima as the program declares them, the same bits whatever the chunks were."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import podium
from podium import envs
from podium.agents import dqn, ppo
from podium.files import to_jsonable
from podium.tally import OF_EPISODES, Addition, Tally
from podium.testing import ContractError, check_metrics

ADDITIONS: dict[str, Addition] = {"seconds": "sum", "idle": "mean", "wait_max": "max"}
NAN = np.nan


def rows(number: int, **metrics: list[Any]) -> dict[str, np.ndarray]:
    """Return metrics of iterations in which no episode ended, but for what is given."""
    return {
        name: np.array(values, np.float32)
        for name, values in ({n: [0.0] * number for n in OF_EPISODES} | metrics).items()
    }


def tallied(metrics: Mapping[str, np.ndarray], cuts: list[int], record: bool = False) -> dict[str, Any]:
    """Return the row of metrics that came in chunks which end at `cuts`, through a checkpoint between two if asked."""
    tally, begin = Tally(ADDITIONS), 0
    for end in cuts:
        tally.add({name: values[begin:end] for name, values in metrics.items()}, end - begin, 0.5)
        begin = end
        if record:
            tally = Tally(ADDITIONS, json.loads(json.dumps(to_jsonable(tally.record()))))
    assert tally.updates == cuts[-1] and tally.seconds == 0.5 * len(cuts)
    return tally.averages()


def test_sums_means_and_maxima() -> None:
    """Of a mean and a maximum NaN is left out, for it is what did not happen; of a sum it is not."""
    metrics = rows(4, seconds=[1, 2, 3, 4], idle=[0.5, NAN, 1.5, NAN], wait_max=[2, 7, NAN, 3], loss=[1, 1, 4, NAN])
    row = tallied(metrics, [4])
    assert (row["seconds"], row["idle"], row["wait_max"], row["loss"]) == (10, 1, 7, 2)
    assert np.isnan(tallied(rows(2, seconds=[1, NAN]), [2])["seconds"])
    nothing = tallied(rows(2, idle=[NAN, NAN], wait_max=[NAN, NAN]), [2])
    assert np.isnan(nothing["idle"]) and np.isnan(nothing["wait_max"]) and np.isnan(nothing["episode_return"])


def test_a_maximum_below_zero_is_no_zero() -> None:
    assert tallied(rows(2, wait_max=[-3, -2]), [1, 2])["wait_max"] == -2


def test_episodes_are_averaged_over_episodes() -> None:
    row = tallied(rows(2, episodes=[1, 3], episode_return_sum=[10, 2], episode_length_sum=[4, 8]), [2])
    assert (row["episodes"], row["episode_return"], row["episode_length"]) == (4, 3, 3)
    assert "episode_return_sum" not in row


@pytest.mark.parametrize("record", [False, True], ids=["in-one-go", "through-checkpoints"])
def test_chunks_change_no_bit(record: bool) -> None:
    random = np.random.default_rng(0)
    names = ("seconds", "idle", "wait_max", "loss")
    metrics = rows(50, **{name: random.normal(size=50).tolist() for name in names})
    metrics["episodes"][:] = 1
    metrics["wait_max"][::7] = NAN
    metrics["loss"][3:9] = NAN
    whole = tallied(metrics, [50])
    assert tallied(metrics, [1, 2, 4, 17, 50], record) == whole == tallied(metrics, list(range(1, 51)), record)


def test_seeds_are_kept_apart() -> None:
    metrics = {name: np.stack([x, 2 * x], 1) for name, x in rows(3, seconds=[1, 2, 3], wait_max=[4, NAN, 5]).items()}
    row = tallied(metrics, [1, 3], record=True)
    assert row["seconds"] == [6, 12] and row["wait_max"] == [5, 10]


def test_an_unknown_addition_is_refused() -> None:
    with pytest.raises(ValueError, match=r"additions\['loss'\]='median' is none of"):
        Tally({"loss": "median"})  # type: ignore[dict-item]


def test_the_record_of_0_1_0_is_read() -> None:
    """There `server_seconds` and `wait_max` were means: sums with counts; `policy_lag_max` was a maximum."""
    zeros = dict.fromkeys(OF_EPISODES, 0.0)
    record = {
        "updates": 2,
        "seconds": 1.5,
        "sums": zeros | {"policy_lag_max": 3.0, "wait_max": 5.0, "server_seconds": 4.0, "loss": 6.0},
        "counts": dict.fromkeys(zeros, 2) | {"wait_max": 2, "server_seconds": 2, "loss": 2},
    }
    additions: dict[str, Addition] = {"policy_lag_max": "max", "wait_max": "max", "server_seconds": "sum"}
    tally = Tally(additions, record)
    tally.add(rows(1, policy_lag_max=[1], wait_max=[2], server_seconds=[1], loss=[9]), 1, 0.5)
    row = tally.averages()
    assert (row["policy_lag_max"], row["wait_max"], row["server_seconds"], row["loss"]) == (3, 2.5, 5, 5)
    assert tally.updates == 3 and tally.seconds == 2


PPO = ppo.make(ppo.Config(hidden_sizes=(8,), num_epochs=1, num_minibatches=2))
DQN = dqn.make(dqn.Config(hidden_sizes=(8,), batch_size=8, buffer_capacity=64, min_replay_size=8))


@pytest.mark.parametrize("agent", [PPO, DQN], ids=["ppo", "dqn"])
def test_metrics_are_the_agents_own_or_declared(agent: Any) -> None:
    """What the agent makes is found without running it; a name that nobody declared is found too."""
    program = podium.Anakin(1).build(agent, envs.make("podium/Catch"), num_envs=8, rollout_length=4)
    _, metrics = program.chunk(program.init(0), 1)
    check_metrics(program, metrics)
    with pytest.raises(ContractError, match="under Anakin: made_up, other add up in a way that nobody declared"):
        check_metrics(program, [*metrics, "other", "made_up"])


def test_a_metric_of_the_agent_is_not_declared_by_the_program() -> None:
    program: Any = podium.Anakin(1).build(PPO, envs.make("podium/Catch"), num_envs=8, rollout_length=4)
    program.additions = {"loss": "sum"}
    with pytest.raises(ContractError, match="loss are the agent's own metrics"):
        check_metrics(program, ["loss", "entropy"])
