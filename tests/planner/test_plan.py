"""A plan: real ones, tiny, and refusals in one sentence."""

from __future__ import annotations

import dataclasses
import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import podium
from podium import __main__ as command_line
from podium.agents import ppo
from podium.host import on_host
from podium.planner import Forecast, Row, forecast, race
from podium.planner.candidates import CANDIDATES, call
from podium.planner.models import Cost
from podium.planner.stages import clock, clock_together

AGENT = ppo.make(ppo.Config(hidden_sizes=(8,), num_epochs=1, num_minibatches=1))
TINY: dict[str, Any] = {"num_envs": 8, "rollout_length": 4, "devices": 1, "seconds": 0.01}


@pytest.fixture(autouse=True)
def _few_updates(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(race, "MOST_UPDATES", 8)
    monkeypatch.setattr(forecast, "MOST_UPDATES", 8)
    yield


def test_a_tiny_plan_predicts_runs_and_recommends() -> None:
    said: list[str] = []
    made = podium.plan(AGENT, "podium/Catch", placements=["Anakin", "LocalSGD"], top=1, say=said.append, **TINY)
    anakin, local = made.rows
    assert anakin.predicted > 0 and anakin.measured > 0 and len(anakin.turns) == forecast.TURNS
    assert anakin.bottleneck in ("environment", "inference", "update") and 0 < anakin.share <= 1
    assert anakin.error == pytest.approx(anakin.predicted / anakin.measured - 1)
    assert local.predicted is None and "LocalSGD averages two or more" in local.why_not
    assert made.placement == podium.Anakin(1)
    assert said[-1] == "running podium.Anakin(devices=1)" and "update from 8 environments" in made.stages
    text = str(made)
    assert "placement=podium.Anakin(devices=1))" in text and "Cannot run:\n  LocalSGD: devices=1" in text
    json.dumps(made.record())


@pytest.mark.slow
@pytest.mark.parametrize("agent", ["ppo", "dqn"])
def test_every_placement_is_predicted(agent: str) -> None:
    config = {"hidden_sizes": (8,), **({"min_replay_size": 64, "batch_size": 8} if agent == "dqn" else {})}
    sizes = TINY | {"num_envs": 16, "rollout_length": 8, "devices": 2}
    made = podium.plan(podium.agents.make(agent, config), "podium/Catch", top=0, **sizes)
    assert {row.name for row in made.rows} == {candidate.name for candidate in CANDIDATES}
    assert all(row.predicted > 0 and row.measured is None for row in made.rows)
    assert not made.best.measured and made.best.name != "Evolution"


@pytest.mark.slow
def test_environments_on_the_host_run_where_they_can() -> None:
    made = podium.plan(AGENT, on_host(podium.envs.make("podium/Catch")), top=1, **TINY)
    can = {row.name for row in made.rows if row.predicted is not None}
    refused = {row.name: row.why_not for row in made.rows if row.predicted is None}
    assert can | refused.keys() == {candidate.name for candidate in CANDIDATES} and len(refused) == 3
    assert "outside compiled programs" in refused["Anakin"] and "two or more" in refused["LocalSGD"]
    assert "name it in `placements`" in refused["Evolution"]
    assert made.best.measured > 0 and made.best.name in can


@pytest.mark.slow
def test_evolution_on_the_host_is_timed_where_it_is_named() -> None:
    env = on_host(podium.envs.make("podium/Catch"))
    (row,) = podium.plan(AGENT, env, placements=["Evolution"], top=1, **TINY).rows
    assert row.predicted > 0 and row.measured > 0


@pytest.mark.slow
def test_evolution_is_run_only_where_it_is_named() -> None:
    made = podium.plan(AGENT, "podium/Catch", placements=["Evolution"], top=1, **TINY)
    (row,) = made.rows
    assert row.measured > 0 and made.best == row and "Evolution learns otherwise" in str(made)


def test_sizes_that_a_placement_refuses_are_said_with_its_own_sentence() -> None:
    made = podium.plan(AGENT, "podium/Catch", placements=["ParameterServer"], **TINY | {"num_envs": 6})
    assert made.rows[0].why_not == "num_envs=6 is not divisible by workers=4; use 4 or 8."
    assert made.best is None and "No placement" in str(made)
    with pytest.raises(ValueError, match="No placement can run ppo in podium/Catch: num_envs=6 is not"):
        _ = made.placement


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"placements": ["Anakim"]}, "none is named 'Anakim'. Did you mean 'Anakin'?"),
        ({"top": -1}, "top=-1 must be an integer of 0 or more"),
        ({"seconds": 0.0}, "seconds=0.0 must be finite and greater than 0"),
        ({"num_envs": 0}, "num_envs=0 must be a positive integer"),
        ({"rollout_length": 0}, "rollout_length=0 must be a positive integer"),
        ({"devices": 99}, "devices=99, but JAX has started with"),
    ],
)
def test_refusals(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as refused:
        podium.plan(AGENT, "podium/Catch", **TINY | arguments)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--agent", "pqo"], "Did you mean 'ppo'?"),
        (["--env", "podium/Cacth"], "podium/Catch"),
        (["--placements", "Sebulbs"], "Did you mean 'Sebulba'?"),
        (["--agent-options", "hidden"], "--agent-options hidden is not NAME=VALUE"),
        (["--agent-options", "hiden=3"], "ppo has no field 'hiden'"),
        (["--seed", "-1"], "seed=-1 must lie between"),
        (["--top", "x"], "--top"),
        (["--tops", "3"], "did you mean --top?"),
    ],
)
def test_the_command_refuses_in_one_sentence(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["plan", "--env", "podium/Catch", *argv]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and words in error


def test_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["plam"]) == command_line.main([]) == 2
    assert capsys.readouterr().err.startswith("error: 'plam' is no command; there is plan")
    assert command_line.main(["--help"]) == 0
    assert "plan --help lists every flag" in capsys.readouterr().out


def test_the_command_prints_and_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {}

    def plan(agent: Any, env: Any, **given: Any) -> Forecast:
        asked.update(given, agent=agent, env=env)
        row = Row("Anakin", podium.Anakin(1), 1000.0, "update", 0.75, "the program", measured=800.0)
        other = Row("Evolution", podium.Evolution(devices=1), 5.0, "episodes", 1.0, "the program", alike=False)
        refused = Row("LocalSGD", None, why_not="of one device.")
        return Forecast(
            "ppo", "podium/Catch", 8, 4, ("cpu:0",), 1.5, {"update": Cost(0.5, 1.0)}, (row, other, refused), row
        )

    monkeypatch.setattr(podium, "plan", plan)
    file = tmp_path / "plan.json"
    flags = ["--num-envs", "8", "--agent-options", "hidden_sizes=(8,)", "--json", str(file), "--placements", "Anakin"]
    assert command_line.main(["plan", "--env", "podium/Catch", *flags]) == 0
    assert asked["agent"].config.hidden_sizes == (8,) and asked["placements"] == ("Anakin",)
    out = capsys.readouterr().out
    assert re.search(r"podium.Anakin\(devices=1\) +1,000 +800 +\+25%  update \(75% of the program\)\n", out)
    assert "podium.Evolution(devices=1)*" in out and "LocalSGD: of one device." in out
    assert "Fastest measured: podium.Anakin(devices=1), 800 steps/s, bound by update" in out
    record = json.loads(file.read_text())
    assert record["best"]["call"] == "podium.Anakin(devices=1)" and record["rows"][0]["error"] == pytest.approx(0.25)
    assert record["rows"][2] | {"predicted": None} == record["rows"][2]


def test_the_call_of_a_placement_makes_it_again() -> None:
    for candidate in CANDIDATES:
        for placement in candidate.values(4, 64):
            assert eval(call(placement), {"podium": podium}) == placement


def test_calls_of_sebulba_leave_devices_for_both() -> None:
    (sebulba,) = (candidate for candidate in CANDIDATES if candidate.name == "Sebulba")
    first = [sebulba.values(devices, 64)[0] for devices in (1, 2, 3, 4, 8)]
    assert first[:2] == [podium.Sebulba()] * 2
    assert [(x.actor_devices, x.learner_devices) for x in first[2:]] == [(1, 2), (2, 2), (4, 4)]


def test_the_clock_waits_and_counts_cores() -> None:
    cost = clock(lambda: time.sleep(0.02), seconds=0.05)
    assert 0.02 <= cost.seconds < 0.1 and cost.cores < cost.seconds


def test_threads_at_once_are_clocked_until_all_have_had_their_turn() -> None:
    lock = threading.Lock()

    def one_at_a_time() -> None:
        with lock:
            time.sleep(0.01)

    assert clock_together([one_at_a_time] * 3, seconds=0.1).seconds >= 0.025
    with pytest.raises(ZeroDivisionError):
        clock_together([lambda: None, lambda: dataclasses.replace(1 / 0)], seconds=0.01)
