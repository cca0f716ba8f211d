"""Sweeps: a setting is what training it alone gives, what was done is not done again, what cannot be is refused."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import podium
from podium.__main__ import main
from podium.agents import dqn, ppo
from podium.devices import num_cores
from podium.files import to_jsonable
from podium.ranges import largest_divisor
from podium.space import listed
from podium.sweep_table import command_of

SIZES: dict[str, Any] = {
    "num_steps": 256,
    "num_envs": 8,
    "rollout_length": 8,
    "seeds": 2,
    "eval_episodes": 4,
    "eval_every": 128,
    "devices": 1,
    "progress": False,
}
CONFIG = ppo.Config(hidden_sizes=(8,), num_epochs=1, num_minibatches=2)
SPACE: dict[str, Any] = {"learning_rate": podium.log_range(1e-3, 1e-1, 2), "activation": ("tanh", "relu")}


def without(table: list[dict[str, Any]], *names: str) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name not in names} for row in table]


def test_every_setting_is_what_it_is_alone(tmp_path: Path) -> None:
    found = podium.sweep(ppo, SPACE, "podium/Catch", config=CONFIG, run_dir=tmp_path / "sweep", threshold=-2.0, **SIZES)
    settings = [(row["learning_rate"], row["activation"]) for row in found.table]
    assert sorted(settings) == sorted((x, y) for x in SPACE["learning_rate"] for y in SPACE["activation"])
    means = [row["eval_return"] for row in found.table]
    assert means == sorted(means, reverse=True)
    assert found.best == {name: found.table[0][name] for name in SPACE}
    row = next(row for row in found.table if row["learning_rate"] > 0.01 and row["activation"] == "relu")
    alone = podium.train(
        ppo.make(ppo.Config(**{**vars(CONFIG), "learning_rate": 0.1, "activation": "relu"})),
        "podium/Catch",
        placement=podium.Anakin(1),
        **{name: value for name, value in SIZES.items() if name != "devices"},
    )
    np.testing.assert_allclose(row["eval_returns"], alone.summary["eval_return"])
    np.testing.assert_allclose(row["eval_return"], np.mean(alone.summary["eval_return"]))
    assert (row["env_steps"], row["diverged"], row["steps_to_threshold"]) == (256, 0, 128)
    assert [steps for steps, _ in row["curve"]] == [128, 256]
    # Two activations are two programs; two rates of two seeds are four runs of each.
    assert sorted(path.name for path in (tmp_path / "sweep").iterdir()) == [
        *("best.txt", "program-0", "program-1", "sweep.json", "sweep.png", "table.json"),
    ]
    assert json.loads((tmp_path / "sweep" / "table.json").read_text()) == found.table

    policy = podium.load(tmp_path / "sweep" / row["program"], seed=row["first_seed"] + 1)
    np.testing.assert_allclose(policy.params.numbers["learning_rate"], 0.1, 1e-6)
    env = podium.envs.make("podium/Catch")
    assert policy(env.spec.obs.zeros()) == alone.policy[1](env.spec.obs.zeros())
    with pytest.raises(ValueError, match="It is a sweep, of the runs program-0, program-1; table.json says"):
        podium.load(tmp_path / "sweep")

    again = podium.sweep(
        ppo, SPACE, "podium/Catch", config=CONFIG, run_dir=tmp_path / "sweep", threshold=-2.0, resume=True, **SIZES
    )
    assert again.table == found.table
    with pytest.raises(ValueError, match=r"is a sweep with seeds=2, not 3; give the same again"):
        podium.sweep(
            ppo, SPACE, "podium/Catch", config=CONFIG, run_dir=tmp_path / "sweep", resume=True, **{**SIZES, "seeds": 3}
        )


@pytest.mark.slow
def test_a_stopped_sweep_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {**SIZES, "at_once": 1}
    space = {"learning_rate": (1e-3, 1e-2)}
    whole = podium.sweep(ppo, space, "podium/Catch", config=CONFIG, run_dir=tmp_path / "whole", **sizes)
    train, calls = podium.sweep.__globals__["train"], []

    def failing(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs)
        if len(calls) == 2:  # The second program dies half-way, and leaves its checkpoint.
            train(*args, **{**kwargs, "num_steps": 128})
            raise RuntimeError("killed")
        return train(*args, **kwargs)

    monkeypatch.setitem(podium.sweep.__globals__, "train", failing)
    with pytest.raises(RuntimeError, match="killed"):
        podium.sweep(ppo, space, "podium/Catch", config=CONFIG, run_dir=tmp_path / "killed", **sizes)
    assert len(json.loads((tmp_path / "killed" / "table.json").read_text())) == 1
    monkeypatch.setitem(podium.sweep.__globals__, "train", train)
    # How many settings a program has is that of before, whatever memory there is now.
    resumed = podium.sweep(ppo, space, "podium/Catch", config=CONFIG, run_dir=tmp_path / "killed", resume=True, **SIZES)
    assert resumed.table == whole.table
    assert (tmp_path / "killed" / "table.json").read_bytes() == (tmp_path / "whole" / "table.json").read_bytes()


@pytest.mark.slow
def test_a_number_that_is_0_has_a_program_of_its_own(tmp_path: Path) -> None:
    """Where 0 switches something off, a traced 0 would not: a norm bounded by 0 is no norm without a bound."""
    space = {"max_grad_norm": (0.0, 0.5, 1.0)}
    podium.sweep(ppo, space, "podium/Catch", config=CONFIG, run_dir=tmp_path / "sweep", **SIZES)
    assert {path.name for path in (tmp_path / "sweep").glob("program-*")} == {"program-0", "program-1"}


@pytest.mark.slow
def test_sizes_of_a_replay_are_programs_and_its_numbers_are_not(tmp_path: Path) -> None:
    config = dqn.Config(hidden_sizes=(8,), batch_size=16, min_replay_size=32, buffer_capacity=256)
    space = {"gamma": (0.9, 0.99), "n_step": (1, 3)}
    found = podium.sweep(dqn, space, "podium/Catch", config=config, run_dir=tmp_path / "sweep", **SIZES)
    assert len(found.table) == 4
    assert len(list((tmp_path / "sweep").glob("program-*"))) == 2


@pytest.mark.parametrize(
    ("space", "changes", "words"),
    [
        ({}, {}, "varies nothing"),
        ([0.9, 0.99], {}, r"space=\[0.9, 0.99\] must be a mapping from fields"),
        (
            {"num_envs": (8, 16)},
            {},
            "'num_envs' is no field of podium.agents.ppo.Config, so it cannot vary; these can: ",
        ),
        ({"gamma": (0.9,)}, {}, "has a single setting; give two or more"),
        ({"gamma": ()}, {}, r"gamma=\(\) must be a sequence of one value or more"),
        ({"gamma": (0.9, 0.9)}, {}, "gamma=.* has a value twice"),
        ({"gamma": (0.9, 1.5)}, {}, "gamma=1.5 must be between 0 and 1"),
        ({"gamma": podium.Draws(0.9, 0.99)}, {}, "say how many settings with samples"),
        ({"gamma": (0.9, 0.99)}, {"samples": 0}, "samples=0 must be an integer of 1 or more"),
        ({"hidden_sizes": (8, 16)}, {}, "hidden_sizes"),
        ({"gamma": (0.9, 0.99)}, {"seeds": 0}, "seeds=0 must be a positive integer"),
        ({"gamma": (0.9, 0.99)}, {"devices": 3}, r"devices=3 do not share 4 runs evenly .*; use seeds=3"),
        (
            {"gamma": (0.9, 0.99)},
            {"num_envs": 2**14, "rollout_length": 2**14, "num_steps": 2**28, "eval_every": 0},
            r"setting\(s\) of 2 seeds take .* GB together, and half of the .* holds 0; use fewer seeds",
        ),
        ({"gamma": (0.9, 0.99)}, {"seed": -1}, "seed=-1 must be an integer of 0 or more"),
        ({"gamma": podium.Draws(0.9, 0.99)}, {"seed": -1, "samples": 2}, "seed=-1 must be"),
        ({"gamma": (0.9, 0.99)}, {"threshold": "high"}, "threshold='high' must be a finite number"),
        ({"gamma": (0.9, 0.99)}, {"halve_at": 128}, "halve_at=128 must be a sequence of environment steps"),
        ({"gamma": (jnp.float32(0.9), jnp.float32(1.5))}, {}, "gamma=1.5 must be between 0 and 1"),
        ({"gamma": (jnp.float32(0.9), jnp.float32(0.9))}, {}, "gamma=.* has a value twice"),
        ({"gamma": (0.9, 0.99)}, {"resume": True, "run_dir": None}, "resume=True needs run_dir"),
        ({"gamma": (0.9, 0.99)}, {"progress": "x"}, "progress='x' must be True or False"),
        ({"gamma": (0.9, 0.99)}, {"eval_episodes": 0}, "eval_episodes=0 must be a positive integer"),
        ({"gamma": (0.9, 0.99)}, {"eval_every": 2.5}, "eval_every=2.5 must be an integer of 0 or more"),
        ({"gamma": (0.9, 0.99)}, {"num_steps": "64"}, "num_steps='64' must be a positive integer"),
        ({"gamma": (0.9, 0.99)}, {"config": 3}, "then give config, a dataclass"),
        ({"num_minibatches": (1, 3)}, {}, "num_minibatches=3 does not divide"),
    ],
)
def test_what_cannot_be_is_refused(space: Any, changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    arguments = {"config": CONFIG, "run_dir": tmp_path / "sweep", **SIZES, **changes}
    with pytest.raises(ValueError, match=words):
        podium.sweep(ppo, space, "podium/Catch", **arguments)
    assert not (tmp_path / "sweep").exists()


def test_ranges_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match=r"low=0.1 must be less than high=0.01, and both finite; exchange them"):
        podium.log_range(0.1, 0.01, 4)
    with pytest.raises(ValueError, match="low=0 must be greater than 0 for a range of logarithms"):
        podium.Draws(0, 1, log=True)
    with pytest.raises(ValueError, match="number=1 must be an integer of 2 or more"):
        podium.linear_range(0, 1, 1)


def test_numbers_of_jax_are_numbers() -> None:
    space = listed({"gamma": [jnp.float32(0.5), np.float32(0.75)], "gae_lambda": tuple(jnp.linspace(0.5, 1.0, 2))})
    assert space == {"gamma": [0.5, 0.75], "gae_lambda": (0.5, 1.0)}
    assert all(type(value) is float for values in space.values() for value in values)


def test_draws_are_those_of_the_seed() -> None:
    from podium.space import settings_of

    space = {"learning_rate": podium.Draws(1e-5, 1e-1, log=True), "gamma": (0.9, 0.99)}
    some = settings_of(space, 64, seed=1)
    assert some == settings_of(space, 64, seed=1) != settings_of(space, 64, seed=2)
    rates = np.log10([setting["learning_rate"] for setting in some])
    assert -5 <= rates.min() < -4 and -2 < rates.max() <= -1
    assert {setting["gamma"] for setting in some} == {0.9, 0.99}


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--seeds 2 --num-envs 8 --rollout-length 8 --num-steps 128 --eval-episodes 4 --devices 1 --hidden-sizes 8"
    argv = ["sweep", "--agent", "ppo", "--env", "podium/Catch", "--preset", "none", *sizes.split(), "--json"]
    argv += ["--vary", "learning_rate=1e-3..1e-2:log:2", "--num-minibatches", "2", "--run-dir", str(tmp_path / "r")]
    assert main(argv) == 0
    printed = capsys.readouterr()
    table = json.loads(printed.out.splitlines()[-1])
    assert table == json.loads((tmp_path / "r" / "table.json").read_text())
    assert [sorted(row["learning_rate"] for row in table)] == [[pytest.approx(1e-3), pytest.approx(1e-2)]]
    assert (tmp_path / "r" / "sweep.png").exists()
    assert "best so far learning_rate=" in printed.err
    command = (
        "podium train --agent ppo --env podium/Catch --preset none --num-steps 128 --num-envs 8 --rollout-length 8 "
    )
    assert command in printed.out and "--learning-rate 0.01 --num-minibatches 2" in printed.out.replace("001", "01")
    assert json.loads((tmp_path / "r" / "sweep.json").read_text())["agent"]["config"]["num_minibatches"] == 2


def test_the_best_setting_is_a_command_that_trains_it(tmp_path: Path) -> None:
    best = ppo.Config(hidden_sizes=(4, 4), normalize_obs=True, normalize_advantage=False, num_epochs=1, gamma=0.9)
    sizes = {"num_steps": 64, "num_envs": 8, "rollout_length": 8}
    command = shlex.split(command_of("ppo", "podium/Catch", {"flicker": 0.5}, best, sizes))
    assert main([*command[1:], "--run-dir", str(tmp_path / "run"), "--eval-episodes", "4", "--no-progress"]) == 0
    config = json.loads((tmp_path / "run" / "config.json").read_text())["config"]
    assert config["agent"]["config"] == to_jsonable(best)
    assert config["env"] == {"name": "podium/Catch", "options": {"flicker": 0.5}}
    assert {name: config[name] for name in sizes} == sizes


@pytest.mark.slow
def test_the_command_takes_every_core_of_a_cpu(tmp_path: Path) -> None:
    sizes = "--seeds 4 --num-envs 8 --rollout-length 8 --num-steps 128 --eval-episodes 4 --hidden-sizes 8"
    argv = ["--env", "podium/Catch", "--preset", "none", *sizes.split(), "--vary", "learning_rate=1e-3..1e-2:log:3"]
    environment = {
        name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")
    }
    command = [sys.executable, "-m", "podium", "sweep", *argv]
    subprocess.run([*command, "--run-dir", str(tmp_path / "r")], check=True, env=environment)
    summary = json.loads((tmp_path / "r" / "program-0" / "summary.json").read_text())
    assert summary["num_devices"] == largest_divisor(12, num_cores())


@pytest.mark.parametrize(
    ("further", "words"),
    [
        (["--vary", "rate=1,2"], "'rate' is no field of podium.agents.ppo.Config"),
        (["--vary", "gamma"], "--vary gamma is not FIELD=VALUES"),
        (["--vary", "gamma=1..0:3"], "low=1.0 must be less than high=0.0"),
        (["--vary", "gamma=0..1:three"], "0..1:three is no range; use LOW..HIGH:log:NUMBER"),
        (["--vary", "gamma=0.9,0.99", "--placement", "sebulba"], "a sweep runs under anakin"),
        (["--vary", "gamma=0.9,0.99", "--agent", "ppa"], "No agent is named 'ppa'. Did you mean 'ppo'?"),
        (["--vary", "gamma=0.9,0.99", "--log-every", "3"], "--log-every is no flag of podium sweep"),
    ],
)
def test_a_bad_command_line_is_refused(
    further: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", "--run-dir", str(tmp_path / "r"), *further]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "r").exists()


def test_settings_that_are_not_dropped_go_on_as_without_halving(tmp_path: Path) -> None:
    _check_halving(tmp_path, {"learning_rate": podium.log_range(1e-5, 1e-1, 3)}, (128,), {**SIZES, "seeds": 1})


@pytest.mark.slow
def test_settings_of_several_programs_are_halved_together(tmp_path: Path) -> None:
    sizes = {**SIZES, "num_steps": 512, "at_once": 3}
    table = _check_halving(tmp_path, {"learning_rate": podium.log_range(1e-5, 1e-1, 5)}, (128, 256), sizes)
    assert [row["env_steps"] for row in table] == [512, 512, 256, 128, 128]


def _check_halving(folder: Path, space: Any, halve_at: Any, sizes: dict[str, Any]) -> list[dict[str, Any]]:
    arguments: dict[str, Any] = {"config": CONFIG, **sizes, "eval_every": 64}
    whole = podium.sweep(ppo, space, "podium/Catch", **arguments)
    arguments |= {"halve_at": halve_at, "run_dir": folder / "sweep"}
    halved = podium.sweep(ppo, space, "podium/Catch", **arguments)
    alone = {row["learning_rate"]: row for row in whole.table}
    for row in halved.table:
        curve = alone[row["learning_rate"]]["curve"]
        np.testing.assert_allclose(row["curve"], [each for each in curve if each[0] <= row["env_steps"]], rtol=1e-6)
        policy = podium.load(folder / "sweep" / row["program"], seed=row["first_seed"])
        np.testing.assert_allclose(policy.params.numbers["learning_rate"], row["learning_rate"], 1e-6)
    then = {rate: dict(row["curve"])[halve_at[0]] for rate, row in alone.items()}
    dropped = {row["learning_rate"] for row in halved.table if row["env_steps"] == halve_at[0]}
    assert len(dropped) == len(then) // 2
    assert max(then[rate] for rate in dropped) <= min(then[rate] for rate in then.keys() - dropped)
    assert podium.sweep(ppo, space, "podium/Catch", resume=True, **arguments).table == halved.table
    return halved.table


@pytest.mark.parametrize(
    ("halve_at", "words"),
    [
        ((0,), "0 must be a positive integer"),
        ((128, 128), "must rise, by an iteration of 64 steps or more, and end before the 256 steps"),
        ((256,), "end before the 256 steps of the sweep"),
        ((64, 128, 192), "are one after 2; use 2 or fewer"),
    ],
)
def test_halvings_that_cannot_be_are_refused(halve_at: tuple[int, ...], words: str, tmp_path: Path) -> None:
    space = {"learning_rate": (1e-3, 1e-2, 1e-1)}
    with pytest.raises(ValueError, match=words):
        podium.sweep(ppo, space, "podium/Catch", config=CONFIG, halve_at=halve_at, run_dir=tmp_path / "sweep", **SIZES)
    assert not (tmp_path / "sweep").exists()
