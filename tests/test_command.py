"""The command `podium`, in this process: flags from the registries, refusals, and what is registered from outside."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import podium
from podium import placement as placements
from podium import presets
from podium.__main__ import main
from podium.commands import fields, options
from podium.commands.console import REFUSED

TESTS = Path(__file__).resolve().parent
SMALL = (
    "--env podium/Catch --env-options rows=4 columns=3 --preset none --num-envs 8 --rollout-length 8 --num-steps 128 "
    "--eval-every 0 --eval-episodes 4 --no-progress --no-compilation-cache"
).split()
PPO = ["--hidden-sizes", "8", "--num-epochs", "1", "--num-minibatches", "1"]


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run every test in an empty folder with a cache of its own, and leave JAX's settings as they were."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(TESTS))
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    monkeypatch.setenv("PODIUM_CACHE", str(before["jax_compilation_cache_dir"] or tmp_path / "cache"))
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def read(*argv: str) -> options.Options:
    return options.read(options.choose(argv), argv)


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Return the one sentence with which a command line is refused; no run folder may be left."""
    capsys.readouterr()
    assert main(argv) == REFUSED
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1, error
    assert not list(Path().glob("r*")), "a refused run leaves nothing behind"
    return error


def test_the_console_script_is_the_module() -> None:
    scripts = tomllib.loads((TESTS.parent / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"podium": "podium.__main__:main"}


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for command in ("train", "evaluate", "replay", "plan", "list"):
        assert f"podium {command}" in text
        with pytest.raises(SystemExit) as end:
            main([command, "--help"])
        assert end.value.code == 0
        assert f"podium {command}" in capsys.readouterr().out


def test_lists_have_one_name_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    def listed(what: str) -> list[str]:
        assert main(["list", what]) == 0
        return capsys.readouterr().out.splitlines()

    assert listed("placements")[:8] == (
        "single anakin sebulba central_inference distributed_actors parameter_server local_sgd evolution".split()
    )
    assert {"a2c", "apex", "dqn", "impala", "ppo"} <= set(listed("agents"))
    assert {"CartPole-v1", "podium/Catch", "Pong-v5"} <= set(listed("environments"))
    assert ["ppo", "cartpole", "CartPole-v1"] in [line.split() for line in listed("presets")]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "train, evaluate, replay, plan, list"),
        (["trian"], "'train'"),
        (["list"], "agents"),
        (["list", "placement"], "'placements'"),
        (["evaluate"], "RUN_DIR"),
        (["evaluate", "missing"], "missing"),
        (["evaluate", "missing", "--env-options", "rows=3"], "--env"),
        (["replay", "missing"], "missing"),
        (["replay", "missing", "--gif", "."], "--gif . is no file in a folder that is there"),
        (["plan", "--json", "none/plan.json"], "--json none/plan.json is no file in a folder that is there"),
        (["train", "--agent", "pppo"], "'ppo'"),
        (["train", "--placement", "sebulpa"], "'sebulba'"),
        (["train", "--placement", "sebulba", "--env", "Cartpole"], "'CartPole-v1'"),
        (["train", "--preset", "cartpol"], "'cartpole'"),
        (["train", "--agent", "dqn", "--preset", "atari-ppo"], "cartpole"),
        (["train", "--num-env", "8"], "--num-envs"),
        (["train", "--agent"], "--agent"),
        (["train", "--agent", "--env", "podium/Catch"], "'--env'"),
        (["train", "--resume"], "--run-dir"),
        (["train", "--plugins", "no_such_module"], "no_such_module"),
        (["train", "--plugins", "mine.py"], "mine.py is a file"),
        (["train", "--placement", "sebulba", "--groups", "0"], "groups=0"),
        (["train", "--placement", "sebulba", "--engine", "thread"], "threads"),
        (["train", "--placement", "parameter_server", "--late", "weigh"], "max_gradient_lag=0"),
        (["train", "--placement", "distributed_actors", "--replay-device", "99"], "no device 99"),
        (["train", "--placement", "evolution", "--sigma", "-1"], "sigma"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_refused_command_says_why_in_one_sentence(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refused(capsys, *argv)


@pytest.mark.parametrize(
    ("argv", "wanted"),
    [
        (
            ["--queue-depth", "2"],
            "--queue-depth is no flag of the placement anakin; sebulba, central_inference and distributed_actors have",
        ),
        (
            ["--placement.queue_depth=2"],
            "--placement.queue-depth is no flag of the placement anakin; sebulba, central_inference and "
            "distributed_actors have it.",
        ),
        (["--no-lockstep"], "sebulba, central_inference and distributed_actors have it."),
        (["--placement", "sebulba", "--seeds", "2"], "--seeds is no flag of the placement sebulba; anakin has it."),
        (["--sigma", "1"], "--sigma is no flag of the placement anakin; evolution has it."),
        (
            ["--batch-size=3"],
            "of the agent ppo or the placement anakin; alphazero, apex, dqn, muzero, r2d2, rainbow, sac, "
            "td3 and vdn and central_inference have it.",
        ),
        (["--agent", "dqn", "--gae-lambda", "1"], "--gae-lambda is no flag of the agent dqn; a2c"),
        (
            ["--agent.buffer-capacity", "8"],
            "--agent.buffer-capacity is no flag of the agent ppo; alphazero, apex, dqn, muzero, r2d2, rainbow, sac, "
            "td3 and vdn have it.",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_flag_of_another_placement_or_agent_names_who_has_it(
    argv: list[str], wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert wanted in refused(capsys, "train", *argv)


def test_a_placement_that_cannot_take_the_environment_says_which_can(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("envpool")
    error = refused(capsys, "train", "--placement", "anakin", "--env", "Pong-v5", "--run-dir", "r")
    named = error.rstrip().rstrip(".").rpartition("these do: ")[2].split(", ")
    assert [name for name in placements.names() if placements.get(name).takes_host_envs] == named
    assert "sebulba" in named and "anakin" not in named and "Pong-v5" in error


@pytest.mark.parametrize("placement", list(placements.names()))
@pytest.mark.parametrize("agent", ["dqn", "ppo"])
def test_every_field_is_a_flag(agent: str, placement: str) -> None:
    """By the long form, with a value that is not the default, every field reaches the object that is made."""
    config, cls = podium.agents.get(agent).config, placements.get(placement)
    argv: list[str] = ["--agent", agent, "--placement", placement]
    wanted: dict[str, dict[str, Any]] = {"agent": {}, "placement": {}}
    for owner, values in wanted.items():
        found = fields.of_class(config if owner == "agent" else cls)
        assert set(found) == {field.name for field in dataclasses.fields(config if owner == "agent" else cls)}
        for name, field in found.items():
            values[name], given = _another(field.default, name)
            assert values[name] != field.default
            argv += _say(f"--{owner}.{field.flag}", given)
    got = read(*argv)
    assert (got.agent, got.placement) == (wanted["agent"], wanted["placement"])
    made = read("--agent", agent, "--placement", placement, "--preset", "none").make_placement()
    assert made == cls(), "what is not said is the default"


def _another(default: Any, name: str) -> tuple[Any, list[str]]:
    if name in ("engine", "replay_engine"):
        return "ray", ["ray"]
    if name == "mix":
        return "ring", ["ring"]
    if name == "space":
        return ("gamma=0.9,1", "clip=1"), ["gamma=0.9,1", "clip=1"]
    if name == "shard":
        return "parameters", ["parameters"]
    if name == "late":
        return "weigh", ["weigh"]
    if isinstance(default, bool):
        return not default, [str(not default)]
    if isinstance(default, (int, float)):
        return default + 1, [str(default + 1)]
    if isinstance(default, tuple):
        return (3, 5, 7), ["3", "5", "7"]
    return ("other", ["other"]) if isinstance(default, str) else (3, ["3"])


def _say(flag: str, given: list[str]) -> list[str]:
    if given == ["True"]:
        return [flag]
    if given == ["False"]:
        owner, _, name = flag.rpartition(".")
        return [f"{owner}.no-{name}"]
    return [flag, *given]


def test_a_field_that_both_have_is_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    evolution = ("--agent", "ppo", "--placement", "evolution", "--preset", "none")
    error = refused(capsys, "train", *evolution, "--learning-rate", "0.1")
    assert "the agent ppo and the placement evolution" in error
    assert "--agent.learning-rate or --placement.learning-rate" in error
    got = read(*evolution, "--agent.learning-rate", "0.1", "--placement.learning-rate=0.2")
    assert (got.agent["learning_rate"], got.placement["learning_rate"]) == (0.1, 0.2)
    assert got.make_placement() == podium.Evolution(learning_rate=0.2)
    assert read("--agent.learning-rate", "0.1") == read("--learning-rate", "0.1") == read("--learning_rate=0.1")


def test_what_is_no_flag_and_has_no_default_is_refused() -> None:
    @dataclasses.dataclass
    class Needs:
        function: Any

    with pytest.raises(ValueError, match="function has no default"):
        fields.of_class(Needs)


def test_presets_by_environment_and_placement() -> None:
    assert read("--agent", "ppo", "--env", "Pong-v5", "--placement", "sebulba").agent["torso"] == "nature_cnn"
    assert read("--env", "CartPole-v1").train["num_envs"] == presets.PPO["cartpole"].values["num_envs"]
    evolution = read("--placement", "evolution", "--env", "CartPole-v1")
    assert evolution.preset.startswith("none by itself") and evolution.train["rollout_length"] is None
    asked = read("--placement", "evolution", "--preset", "cartpole")
    assert asked.train["rollout_length"] is None, "whole episodes are not cut by a preset for rollouts"
    assert asked.agent["clip_epsilon"] == 0.1
    apex = ("--agent", "apex", "--preset", "atari-apex", "--placement")
    assert read(*apex, "distributed_actors").placement["workers"] == 8
    assert "workers" not in read(*apex, "anakin").placement


@pytest.mark.parametrize(
    "argv",
    [
        ["--agent", "ppo", *PPO, "--placement", "anakin", "--seeds", "2", "--devices", "1"],
        ["--agent", "ppo", *PPO, "--placement", "sebulba", "--groups", "1", "--lockstep"],
    ],
    ids=["anakin", "sebulba"],
)
def test_train_evaluate_replay(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *SMALL, *argv, "--run-dir", "run", "--json"]) == 0
    out = capsys.readouterr().out
    printed, summary = json.loads(out.splitlines()[-1]), json.loads(Path("run/summary.json").read_text())
    assert printed == summary and summary["env_steps"] == 128
    assert re.search(r"agent +ppo\n", out) and "rows=4 columns=3" in out and "podium replay run" in out

    assert main(["evaluate", "run", "--episodes", "3", "--step", "best", "--json"]) == 0
    scores = json.loads(capsys.readouterr().out)
    policy = podium.load("run", step="best")
    expected = podium.evaluate(policy, podium.envs.make("podium/Catch", rows=4, columns=3), 3)
    assert {name: scores[name] for name in expected} == expected and scores["env"] == "podium/Catch"
    assert main(["evaluate", "run", "--episodes", "3", "--step", "128"]) == 0
    assert "eval_return" in capsys.readouterr().out
    for more, words in (
        (["--env", "CartPole-v1"], "observations of another form"),
        (["--step", "worst"], "newest, best"),
        (["--episodes", "0"], "--episodes=0"),
        (["--seed", "-1"], "seed=-1"),
        (["--step", "7"], "7"),
    ):
        assert main(["evaluate", "run", *more]) in (1, 2)
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1

    assert main(["replay", "run", "--episodes", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("episode 1: return") and lines[-1].startswith("run/replay.gif: ")


@pytest.mark.slow
def test_a_run_in_an_environment_on_the_cpu_is_replayed_without_a_picture(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("gymnasium")
    argv = f"--env gymnasium/CartPole-v1 --placement single --num-steps 64 {' '.join(PPO)}".split()
    assert main(["train", *SMALL, "--env-options", *argv, "--run-dir", "run"]) == 0
    capsys.readouterr()
    assert main(["replay", "run", "--episodes", "2", "--max-steps", "200"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"episode 1: return \d+, \d+ steps, (ended|cut)", lines[0])
    assert "no picture" in lines[-1]
    assert main(["evaluate", "run", "--episodes", "2", "--max-steps", "200"]) == 0


OWN = ["--plugins", "plugin_of_own", "--agent", "tempered", "--env", "own/Grid", "--placement", "counting"]


def test_what_is_registered_from_outside_is_trained_with(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = [*SMALL, *PPO, "--env-options", "rows=4"]
    own = ["--temper", "2", "--limit", "90", "--loud", "--placement.learning-rate", "0.25"]
    assert main(["train", *sizes, *OWN, *own, "--run-dir", "run", "--json"]) == 0
    out = capsys.readouterr().out
    summary = json.loads(out.splitlines()[-1])
    assert "tempered" in out and "temper=2.0" in out and "own/Grid" in out

    import plugin_of_own

    assert plugin_of_own.Counting(90, 0.25, True) in plugin_of_own.Counting.made
    record = json.loads(Path("run/config.json").read_text())["config"]
    assert record["agent"]["name"] == "tempered" and record["agent"]["config"]["temper"] == 2.0
    for name, listed in (("tempered", "agents"), ("counting", "placements"), ("own/Grid", "environments")):
        assert main(["list", listed]) == 0
        assert name in capsys.readouterr().out.splitlines()
    assert main(["evaluate", "run", "--episodes", "2"]) == 0, "the folder finds agent and environment again"

    config = {"hidden_sizes": (8,), "num_epochs": 1, "num_minibatches": 1, "temper": 2.0}
    result = podium.train(
        podium.agents.make("tempered", config),
        "own/Grid",
        num_steps=128,
        num_envs=8,
        rollout_length=8,
        placement=placements.get("counting")(),
        eval_every=0,
        eval_episodes=4,
        progress=False,
    )
    assert result.summary["params_sha256"] == summary["params_sha256"], "from Python and from the command line alike"

    def refusal(*argv: str) -> str:
        assert main(["train", *OWN, *argv]) == REFUSED
        return capsys.readouterr().err

    assert refusal("--limit", "1") == "error: limit=1 programs were made already; use 3 or more.\n"
    assert refusal("--temper", "0") == "error: temper=0.0 must be greater than 0.\n"
    assert "--on-start" in refusal("--on-start", "x")
    assert "counting" not in refusal("--env", "gymnasium/CartPole-v1").rpartition("these do: ")[2]
    assert "counting has it" in main_error(capsys, "train", "--limit", "3")


def main_error(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(argv) == REFUSED
    return capsys.readouterr().err


def test_names_are_registered_once() -> None:
    import plugin_of_own

    podium.agents.register("tempered", plugin_of_own.make, plugin_of_own.Config)
    with pytest.raises(ValueError, match="named 'ppo' already"):
        podium.agents.register("ppo", plugin_of_own.make, plugin_of_own.Config)
    with pytest.raises(ValueError, match="no name"):
        podium.agents.register("two words", plugin_of_own.make, plugin_of_own.Config)
    with pytest.raises(ValueError, match="dataclass"):
        podium.agents.register("plain", plugin_of_own.make, dict)


def test_a_plugin_trains_in_a_process_of_its_own() -> None:
    environment = {**os.environ, "PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}"}
    command = [sys.executable, "-m", "podium", "train", *SMALL, *PPO, "--env-options", "rows=4", *OWN]
    done = subprocess.run([*command, "--run-dir", "run", "--json"], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["env_steps"] == 128 and np.isfinite(summary["eval_return"])


def test_a_plugin_lies_in_the_folder_one_types_in() -> None:
    """The console script has not that folder on its path, as `python -m podium` has."""
    Path("lies_here.py").write_text("import podium\npodium.envs.register('own/Here', podium.envs.native.catch)\n")
    code = "import sys; sys.path[:] = [x for x in sys.path if x]; from podium.__main__ import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, "list", "environments", "--plugins", "lies_here"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(TESTS.parent)},
    )
    assert done.returncode == 0, done.stderr
    assert "own/Here" in done.stdout.splitlines()
