"""Flags, presets and refusals, in this process: starting JAX anew for each would take minutes."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import stat
import subprocess
import sys
from pathlib import Path

import a2c_anakin
import a2c_sebulba
import apex_distributed
import cli
import dqn_anakin
import impala_anakin
import impala_sebulba
import jax
import ppo_anakin
import ppo_sebulba
import presets
import pytest
import replay

import podium
from podium import command
from podium.agents import a2c, apex, dqn, impala, ppo
from podium.checkpoint import CheckpointError
from podium.placement.anakin import AnakinProgram
from podium.runs import RunFolder

SCRIPTS = {"ppo": (ppo_anakin, ppo, presets.PPO), "dqn": (dqn_anakin, dqn, presets.DQN)}
OTHERS = {
    "impala": (impala_anakin, impala, presets.IMPALA),
    "a2c": (a2c_anakin, a2c, presets.A2C),
    "ppo on the CPU": (ppo_sebulba, ppo, presets.PPO_SEBULBA),
    "a2c on the CPU": (a2c_sebulba, a2c, presets.A2C_SEBULBA),
    "impala on the CPU": (impala_sebulba, impala, presets.IMPALA_SEBULBA),
    "apex by workers": (apex_distributed, apex, presets.APEX),
}
ALL = {**SCRIPTS, **OTHERS}
TINY = ["--env", "podium/Catch", "--preset", "none", "--devices", "1", "--no-progress", "--no-compilation-cache"]


@pytest.mark.parametrize("name", ALL)
def test_help_explains_every_field(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    script, _, known = ALL[name]
    with pytest.raises(SystemExit) as end:
        script.main(["--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    words = " ".join(text.replace("│", " ").split())
    for field in dataclasses.fields(script.Flags):
        flag = "--" + field.name.replace("_", "-")
        explained = re.search(rf"{flag},? (.*?)\((default|sets|required)", words)
        assert explained and len(explained[1].split()) > 3, flag
    for preset in known:
        assert preset in text


def test_the_names_other_tools_rely_on() -> None:
    flags = (
        "--env --devices --seeds --num-envs --num-steps --seed --run-dir --eval-every --checkpoint-every --wandb "
        "--rollout-length --learning-rate"
    ).split()
    values = ["podium/Catch", "1", "2", "8", "64", "3", "folder", "8", "8", "offline", "4", "0.1"]
    argv = [part for pair in zip(flags, values, strict=True) for part in pair] + ["--resume", "--no-progress"]
    read = cli.parse(ppo_anakin.Flags, presets.PPO, [*argv, "--epochs", "2", "--minibatches", "3"]).flags
    assert (read.num_epochs, read.num_minibatches, read.run_dir, read.resume, read.progress) == (
        2,
        3,
        Path("folder"),
        True,
        False,
    )
    read = cli.parse(dqn_anakin.Flags, presets.DQN, [*argv, "--buffer-capacity", "64", "--batch-size", "4"]).flags
    assert (read.buffer_capacity, read.batch_size, read.learning_rate) == (64, 4, 0.1)


@pytest.mark.parametrize("name", ALL)
def test_every_preset_makes_an_agent_and_an_environment(name: str) -> None:
    script, agents, known = ALL[name]
    for key, preset in known.items():
        flags, words = cli.parse(script.Flags, known, ["--preset", key])
        assert flags.env == preset.env in podium.envs.names()
        assert key in words and preset.source in words and preset.tuned_words in words
        agents.make(cli.agent_config(agents.Config, flags))
        assert preset.source.endswith(".") and flags.num_envs % 8 == 0, "eight devices must do"


def test_what_lies_under_the_flags() -> None:
    def read(*argv: str) -> cli.Chosen:
        return cli.parse(ppo_anakin.Flags, presets.PPO, argv)

    values = presets.PPO["cartpole"].values
    assert read().flags.learning_rate == values["learning_rate"] and read().preset.startswith("cartpole")
    assert read("--env=CartPole-v1") == read(), "an environment brings its preset"
    assert read("--learning-rate", "0.5").flags.learning_rate == 0.5
    assert read("--preset", "none").flags == ppo_anakin.Flags(preset="none")
    other = read("--env", "FourRooms-misc")
    assert other.flags.learning_rate == ppo.Config.learning_rate and "no preset for FourRooms-misc" in other.preset
    mixed = read("--preset", "breakout-minatar", "--env", "Asterix-MinAtar").flags
    assert (mixed.env, mixed.learning_rate) == ("Asterix-MinAtar", 4e-3)


@pytest.mark.parametrize("name", SCRIPTS)
def test_list_presets_says_where_values_come_from(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    script, _, known = SCRIPTS[name]
    assert script.main(["--list-presets"]) == 0
    text = capsys.readouterr().out
    for key, preset in known.items():
        assert f"{key}: {preset.env}" in text and preset.source in text
        assert preset.tuned_words in text


BOTH = [
    (["--num-envs", "0"], "num_envs"),
    (["--num-envs", "-4"], "num_envs"),
    (["--num-steps", "0"], "num_steps"),
    (["--num-steps", "-1"], "num_steps"),
    (["--num-steps", "3"], "num_steps"),
    (["--num-envs", "6", "--devices", "4"], "num_envs"),
    (["--rollout-length", "0"], "rollout_length"),
    (["--num-lanes", "3"], "num_lanes"),
    (["--seeds", "0"], "seeds"),
    (["--seed", "-1"], "seed"),
    (["--devices", "0"], "devices"),
    (["--devices", "-2"], "devices"),
    (["--devices", "1000"], "devices"),
    (["--eval-every", "-1"], "eval_every"),
    (["--eval-episodes", "0"], "eval_episodes"),
    (["--checkpoint-every", "-1"], "checkpoint_every"),
    (["--keep-checkpoints", "0"], "keep_checkpoints"),
    (["--log-every", "-1"], "log_every"),
    (["--env", "Cartpole"], "CartPole-v1"),
    (["--env-options", "rows"], "--env-options"),
    (["--env-options", "row=3"], "rows"),
    (["--preset", "cartpol"], "cartpole"),
    (["--wandb", "sometimes"], "--wandb"),
    (["--resume"], "--run-dir"),
    (["--resume", "--run-dir", "missing"], "missing"),
    (["--num-env", "8"], "--num-envs"),
    (["--gamma", "much"], "--gamma"),
    (["--gamma", "1.5"], "gamma"),
    (["--learning-rate", "0"], "learning_rate"),
    (["--learning-rate", "-1"], "learning_rate"),
    (["--learning-rate", "nan"], "learning_rate"),
    (["--max-grad-norm", "-1"], "max_grad_norm"),
    (["--hidden-sizes", "64", "0"], "hidden_sizes"),
    (["--activation", "sine"], "activation"),
    (["stray"], "stray"),
]
PPO = [
    (["--epochs", "0"], "epochs"),
    (["--epochs", "-1"], "epochs"),
    (["--minibatches", "0"], "minibatches"),
    (["--minibatches", "7"], "minibatches"),
    (["--clip-epsilon", "0"], "clip_epsilon"),
    (["--gae-lambda", "-0.1"], "gae_lambda"),
    (["--anneal-steps", "-1"], "anneal_steps"),
    (["--entropy-coef", "-1"], "entropy_coef"),
    (["--value-coef", "-1"], "value_coef"),
    (["--value-clip", "-1"], "value_clip"),
    (["--target-kl", "-1"], "target_kl"),
    (["--adam-eps", "0"], "adam_eps"),
    (["--memory", "elephant"], "memory"),
    (["--memory", "gru", "--memory-size", "0"], "memory_size"),
]
DQN = [
    (["--buffer-capacity", "0"], "buffer_capacity"),
    (["--buffer-capacity", "-1"], "buffer_capacity"),
    (["--batch-size", "0"], "batch_size"),
    (["--batch-size", "7", "--devices", "2"], "batch_size"),
    (["--num-updates", "0"], "num_updates"),
    (["--n-step", "0"], "n_step"),
    (["--min-replay-size", "0"], "min_replay_size"),
    (["--target-update-period", "0"], "target_update_period"),
    (["--tau", "0"], "tau"),
    (["--epsilon-start", "2"], "epsilon_start"),
    (["--epsilon-end", "-1"], "epsilon_end"),
    (["--epsilon-decay-steps", "0"], "epsilon_decay_steps"),
    (["--huber-delta", "0"], "huber_delta"),
    (["--env", "Pendulum-v1"], "continuous"),
]


@pytest.mark.parametrize(
    ("name", "argv", "names"),
    [(name, *case) for name in SCRIPTS for case in BOTH]
    + [("ppo", *case) for case in PPO]
    + [("dqn", *case) for case in DQN],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_refused_run_says_why_in_one_sentence(
    name: str, argv: list[str], names: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert SCRIPTS[name][0].main([*TINY, "--num-envs", "8", "--rollout-length", "4", *argv]) == command.REFUSED
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1, error
    assert names in error
    assert not list(Path().iterdir()), "a refused run leaves nothing behind"


def test_a_run_folder_is_never_written_over(capsys: pytest.CaptureFixture[str]) -> None:
    Path("taken").mkdir()
    Path("taken/file").touch()
    assert ppo_anakin.main([*TINY, "--run-dir", "taken"]) == command.REFUSED
    out, error = capsys.readouterr()
    assert not out, "no plan of a run that is refused"
    assert "--resume" in error and "--run-dir" in error and error.count("\n") == 1
    assert [path.name for path in Path("taken").iterdir()] == ["file"]


def test_a_refusal_names_the_number_that_was_given(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--num-envs", "64", "--rollout-length", "128"]
    indivisible = "num_minibatches=7 does not divide the 8192 steps of a rollout (64 x 128); use 4 or 8."
    for argv, words in (
        (["--minibatches", "7"], indivisible),
        (["--num-envs", "0"], "num_envs=0 must be a positive integer."),
        (["--num-envs", "100", "--devices", "8"], "num_envs=100 is not divisible by num_devices=8; use 96 or 104."),
    ):
        assert ppo_anakin.main([*TINY, *sizes, *argv]) == command.REFUSED
        assert capsys.readouterr() == ("", f"error: {words}\n")


def test_a_signal_during_compilation_ends_with_its_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AnakinProgram, "compile", lambda self: os.kill(os.getpid(), signal.SIGTERM))
    command = [*TINY, "--run-dir", "run", "--num-envs", "8", "--rollout-length", "4", "--num-steps", "64"]
    assert ppo_anakin.main([*command, "--hidden-sizes", "8"]) == 128 + signal.SIGTERM
    out, error = capsys.readouterr()
    assert "podium/Catch" in out and "the same command with --resume" in error
    assert {path.name for path in Path("run").iterdir()} == {
        "config.json", "placement.txt", "placement.svg", "summary.json", "curve.png",
    }  # fmt: skip


def test_replay_refuses_an_environment_that_only_its_maker_has(capsys: pytest.CaptureFixture[str]) -> None:
    env = {"name": "podium/Catch", "options": None, "object": {"spec_sha256": "of another"}}
    RunFolder.create("run", {"agent": {"name": "ppo", "config": {}}, "env": env, "seeds": 1})
    assert replay.main(["run"]) == command.REFUSED
    error = capsys.readouterr().err
    assert "given as an object" in error and "podium.load(run_dir, env=...)" in error and error.count("\n") == 1


def _raise(error: BaseException) -> int:
    raise error


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("no"), 2),
        (CheckpointError("no"), 1),
        (podium.NonFiniteError("no"), 1),
        (OSError(28, "No space left on device"), 1),
        (KeyboardInterrupt(), 130),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_exit_codes(error: BaseException, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.guard(lambda: _raise(error)) == code
    assert capsys.readouterr().err.count("\n") == 1


def test_an_error_nobody_foresaw_keeps_its_traceback() -> None:
    with pytest.raises(ValueError, match="Expecting value"):
        cli.guard(lambda: json.loads("x"))
    with pytest.raises(TypeError):
        cli.guard(lambda: jax.numpy.zeros(3).reshape(2, 2))


def test_the_compilation_cache_is_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PODIUM_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cli.use_compilation_cache() == tmp_path / "xdg" / "podium" / "jax"
    monkeypatch.setenv("PODIUM_CACHE", str(tmp_path / "mine"))
    folder = cli.use_compilation_cache()
    assert folder == tmp_path / "mine" / "jax"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (tmp_path / "file").touch()
    monkeypatch.setenv("PODIUM_CACHE", str(tmp_path / "file"))
    assert cli.use_compilation_cache() is None, "training goes on without"


def test_options_are_literals_or_text() -> None:
    assert cli.read_options(["a=3", "b=0.5", "c=word", "d=(1, 2)"], "--env-options") == {
        "a": 3,
        "b": 0.5,
        "c": "word",
        "d": (1, 2),
    }


@pytest.mark.slow
@pytest.mark.parametrize("script", ["ppo_anakin.py", "dqn_anakin.py"])
def test_a_refused_process(script: str, experiments: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(experiments / script), "--num-envs", "100", "--devices", "8"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(experiments.parent)},
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr == "error: num_envs=100 is not divisible by num_devices=8; use 96 or 104.\n"
    assert "virtual" in done.stdout
    assert not list(Path().iterdir())


@pytest.mark.slow
def test_a_signal_saves_and_the_run_goes_on(experiments: Path) -> None:
    command = [sys.executable, str(experiments / "ppo_anakin.py"), "--env", "podium/Catch", "--devices", "1"]
    command += ["--run-dir", "run", "--log-every", "2048", "--eval-every", "0", "--eval-episodes", "4"]
    env = {**os.environ, "PYTHONPATH": str(experiments.parent)}
    process = subprocess.Popen(
        [*command, "--num-steps", "100000000"], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    )
    assert process.stderr is not None
    assert "steps" in process.stderr.readline(), "the first line of progress"
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM and "--resume" in error
    steps = max(int(path.name) for path in Path("run/checkpoints").iterdir() if path.name.isdigit())
    more = str(steps + 4096)
    done = subprocess.run([*command, "--num-steps", more, "--resume"], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert f"{steps + 4096:,}" in done.stdout


def test_jax_has_not_started_when_flags_that_say_how_it_starts_are_read(experiments: Path) -> None:
    script = """
import benchmark, cli, presets, podium
from podium.agents import a2c, apex, dqn, impala, ppo
late = podium.request_cpu_threads(1)
assert late is None, late
import jax
jax.devices()
assert "too late" in podium.request_cpu_threads(2)
"""
    environment = {**os.environ, "PYTHONPATH": f"{experiments}{os.pathsep}{experiments.parent}"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_flags_of_sebulba_make_it() -> None:
    flags = cli.SebulbaFlags(actor_threads=3, max_lag=2, lockstep=True)
    expected = podium.Sebulba(actor_devices=1, learner_devices=1, actor_threads=3, max_lag=2, lockstep=True)
    assert flags.placement() == expected
