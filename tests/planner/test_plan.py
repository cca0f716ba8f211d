"""A plan: real ones, tiny, and refusals in one sentence."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

import podium
from podium import __main__ as command_line
from podium.agents import ppo
from podium.host import on_host
from podium.placement import PLACEMENTS
from podium.planner import Comparison, Row
from podium.planner.comparison import call
from podium.planner.race import Outcome

AGENT = ppo.make(ppo.Config(hidden_sizes=(8,), num_epochs=1, num_minibatches=1))
TINY: dict[str, Any] = {"num_envs": 8, "rollout_length": 4, "devices": 1, "seconds": 0.01}


def test_a_tiny_plan_runs_and_recommends() -> None:
    said: list[str] = []
    made = podium.plan(AGENT, "podium/Catch", placements=["Anakin", "local_sgd"], say=said.append, **TINY)
    anakin, local = made.rows
    assert anakin.outcome.measured > 0 and len(anakin.outcome.turns) == 5 and anakin.outcome.compile_seconds > 0
    assert anakin.outcome.bottleneck == "acting and learning take turns"
    assert not local.outcome.turns and "LocalSGD averages two or more" in local.outcome.why_not
    assert made.placement == podium.Anakin(1) and made.best == anakin
    assert said[:2] == ["compiling podium.Anakin(devices=1)", "running podium.Anakin(devices=1)"]
    text = str(made)
    assert "placement=podium.Anakin(devices=1))" in text and "Not run:\n  local_sgd: devices=1" in text
    json.dumps(made.record())


@dataclasses.dataclass(frozen=True)
class Mine(podium.Anakin):
    """A placement from outside the package."""

    devices: Any = 1


def test_a_placement_from_outside_takes_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PLACEMENTS, "mine", Mine)
    made = podium.plan(AGENT, "podium/Catch", placements=["mine"], **TINY)
    assert made.placement == Mine() and made.best is not None
    assert made.best.call == f"{__name__}.Mine()" and made.best.outcome.measured > 0


@pytest.mark.slow
def test_every_placement_runs() -> None:
    agent = podium.agents.make("dqn", {"hidden_sizes": (8,), "min_replay_size": 64, "batch_size": 8})
    sizes = TINY | {"num_envs": 16, "rollout_length": 8, "devices": 2}
    names = [name for name in PLACEMENTS if name != "population"]  # What its members vary is for the user to say.
    made = podium.plan(agent, "podium/Catch", placements=names, **sizes)
    assert {row.name for row in made.rows if row.outcome.turns} == set(names)
    bounds = {row.name: row.outcome.bottleneck for row in made.rows}
    assert bounds["anakin"] == bounds["single"] == bounds["local_sgd"] == "acting and learning take turns"
    assert all("idle: " in bounds[name] for name in ("sebulba", "central_inference", "distributed_actors"))
    assert re.search(r"server \d+%.*worker \d+%|worker \d+%.*server \d+%", bounds["parameter_server"])
    assert made.best is not None and made.best.name != "evolution"


@pytest.mark.slow
def test_environments_on_the_host_run_where_they_can() -> None:
    made = podium.plan(AGENT, on_host(podium.envs.make("podium/Catch")), **TINY)
    refused = {row.name: row.outcome.why_not for row in made.rows if not row.outcome.turns}
    assert {row.name for row in made.rows} == set(PLACEMENTS) and len(refused) == 4
    assert "outside compiled programs" in refused["anakin"] and "two or more" in refused["local_sgd"]
    assert "name it to have it run" in refused["evolution"]


@pytest.mark.slow
def test_evolution_is_run_where_it_is_named() -> None:
    made = podium.plan(AGENT, on_host(podium.envs.make("podium/Catch")), placements=["evolution"], **TINY)
    assert made.placement == podium.Evolution(devices=1) and "rollout_length" not in made.recommendation


def test_sizes_that_a_placement_refuses_are_said_with_its_own_sentence() -> None:
    made = podium.plan(AGENT, "podium/Catch", placements=["parameter_server"], **TINY | {"num_envs": 6})
    assert made.rows[0].outcome.why_not == "num_envs=6 is not divisible by workers=4; use 4 or 8."
    assert made.best is None and "No placement" in str(made)
    with pytest.raises(ValueError, match="No placement can run ppo in podium/Catch: num_envs=6 is not"):
        _ = made.placement


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"placements": ["anakim"]}, "placement 'anakim' is unknown. Did you mean 'anakin'?"),
        ({"placements": []}, "placements=[] names none; use some of single, anakin"),
        ({"seconds": 0.0}, "seconds=0.0 must be finite and greater than 0"),
        ({"num_envs": 0}, "num_envs=0 must be a positive integer"),
        ({"rollout_length": 0}, "rollout_length=0 must be a positive integer"),
        ({"seed": 2**32}, "seed=4294967296 must be an integer from 0"),
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
        (["--agent", "ppa"], "Did you mean 'ppo'?"),
        (["--env", "podium/Cacth"], "podium/Catch"),
        (["--placements", "sebulbs"], "Did you mean 'sebulba'?"),
        (["--agent-options", "hidden"], "--agent-options hidden is not NAME=VALUE"),
        (["--agent-options", "hiden=3"], "ppo has no field 'hiden'"),
        (["--seed", "-1"], "seed=-1 must be an integer from 0 to 2**32 - 1"),
        (["--seconds", "x"], "--seconds"),
        (["--secons", "3"], "did you mean --seconds?"),
    ],
)
def test_the_command_refuses_in_one_sentence(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["plan", "--env", "podium/Catch", *argv]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and words in error


ANAKIN = Row("anakin", podium.Anakin(1), Outcome((900.0, 800.0, 700.0), 2.5, "acting and learning take turns"))
SEBULBA = Row("sebulba", podium.Sebulba(), Outcome((1000.0,), 3.0, "learner (idle: actor 84%, learner 1%)"))
EVOLUTION = Row("evolution", podium.Evolution(devices=1), Outcome((5e6,), 1.0, "acting and learning take turns"))
LOCAL = Row("local_sgd", None, Outcome(why_not="of one device."))


def test_the_command_prints_and_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {}

    def plan(agent: Any, env: Any, **given: Any) -> Comparison:
        asked.update(given, agent=agent, env=env)
        return Comparison("ppo", "podium/Catch", 8, 4, ("cpu:0",), (ANAKIN, SEBULBA, EVOLUTION, LOCAL), ANAKIN)

    monkeypatch.setattr(podium, "plan", plan)
    file = tmp_path / "plan.json"
    flags = ["--num-envs", "8", "--agent-options", "hidden_sizes=(8,)", "--json", str(file), "--placements", "anakin"]
    assert command_line.main(["plan", "--env", "podium/Catch", *flags]) == 0
    assert asked["agent"].config.hidden_sizes == (8,) and asked["placements"] == ("anakin",)
    out = capsys.readouterr().out
    assert out.startswith("ppo in podium/Catch: 8 environments x 4 steps an update, on 1 device (cpu).\n")
    assert re.search(r"podium.Anakin\(devices=1\) +800 +3 +700 to 900 +2\.5 s  acting and learning take turns\n", out)
    # Fastest first, one turn without a range.
    assert re.search(r"podium.Sebulba\(\) +1,000 +1 +3\.0 s  learner \(idle: actor 84%, learner 1%\)\n *podium.A", out)
    assert "local_sgd: of one device." in out
    assert "Fastest: podium.Anakin(devices=1), 800 steps/s; acting and learning take turns.\n" in out
    record = json.loads(file.read_text())
    assert record["best"]["call"] == "podium.Anakin(devices=1)" and record["rows"][0]["turns"] == [900, 800, 700]
    assert record["rows"][0]["measured"] == 800 and record["rows"][3]["measured"] is None


def test_the_call_of_a_placement_makes_it_again() -> None:
    for name in [name for name, cls in PLACEMENTS.items() if cls.__module__.startswith("podium.")]:
        for placement in [] if name == "population" else PLACEMENTS[name].candidates(4, 64):
            assert eval(call(placement), {"podium": podium}) == placement


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 8])
def test_candidates_leave_devices_for_both_and_divide_environments(devices: int) -> None:
    first = podium.Sebulba.candidates(devices, 64)[0]
    both = {1: (None, None), 2: (None, None), 3: (1, 2), 4: (2, 2), 8: (4, 4)}[devices]
    assert (first.actor_devices, first.learner_devices) == both
    (server,) = podium.ParameterServer.candidates(devices, 64)
    assert server.workers == (3 if devices == 3 else max(4, devices)) and server.devices == devices
    each = [placement.envs_per_actor for placement in podium.CentralInference.candidates(devices, 64)]
    assert each == {1: [None, 1], 2: [None, 1], 3: [None], 4: [None, 1], 8: [None, 1]}[devices]
