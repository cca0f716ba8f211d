"""Flags, presets and refusals, in this process: starting JAX anew for each would take minutes."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
import signal
import stat
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import a2c_anakin
import a2c_sebulba
import apex_distributed
import dqn_anakin
import impala_anakin
import impala_sebulba
import jax
import muzero_anakin
import ppo_anakin
import ppo_atari_anakin
import ppo_sebulba
import pqn_anakin
import pytest
import r2d2_anakin
import rainbow_anakin
import replay
import reppo_anakin
import sac_anakin
import td3_anakin

import podium
from podium import presets
from podium.agents import a2c, apex, dqn, impala, muzero, ppo, pqn, r2d2, rainbow, reppo, sac, td3
from podium.checkpoint import CheckpointError
from podium.commands import cache
from podium.commands.console import REFUSED, guard, read_flags, read_options
from podium.commands.options import Options
from podium.placement.compiled.chunk import CompiledLoop
from podium.runs import RunFolder

SCRIPTS = {"ppo": (ppo_anakin, ppo, presets.PPO), "dqn": (dqn_anakin, dqn, presets.DQN)}
OTHERS = {
    "impala": (impala_anakin, impala, presets.IMPALA),
    "a2c": (a2c_anakin, a2c, presets.A2C),
    "pqn": (pqn_anakin, pqn, presets.PQN),
    "r2d2": (r2d2_anakin, r2d2, presets.R2D2),
    "rainbow": (rainbow_anakin, rainbow, presets.RAINBOW),
    "reppo": (reppo_anakin, reppo, presets.REPPO),
    "sac": (sac_anakin, sac, presets.SAC),
    "td3": (td3_anakin, td3, presets.TD3),
    "ppo on the CPU": (ppo_sebulba, ppo, presets.PPO_SEBULBA),
    "a2c on the CPU": (a2c_sebulba, a2c, presets.A2C_SEBULBA),
    "impala on the CPU": (impala_sebulba, impala, presets.IMPALA_SEBULBA),
    "apex by workers": (apex_distributed, apex, presets.APEX),
}
if importlib.util.find_spec("mctx"):  # Of the extra `games`.
    OTHERS["muzero"] = (muzero_anakin, muzero, presets.MUZERO)
ALL = {**SCRIPTS, **OTHERS}
TINY = ["--env", "podium/Catch", "--preset", "none", "--devices", "1", "--no-progress", "--no-compilation-cache"]

RUN = (
    "--preset --list-presets --env --env-options --cpu-threads --num-envs --rollout-length --num-steps --num-lanes "
    "--seed --run-dir --resume --eval-every --eval-episodes --checkpoint-every --keep-checkpoints --log-every --wandb "
    "--distributed --progress --compilation-cache"
).split()
PLACEMENT = {
    "anakin": ["--devices", "--seeds"],
    "sebulba": (
        "--actor-devices --learner-devices --actor-threads --envs-per-thread --groups --queue-depth --max-lag "
        "--lockstep --actor-timeout"
    ).split(),
    "distributed_actors": (
        "--workers --worker-devices --learner-devices --refresh-every --queue-depth --max-lag --lockstep "
        "--replay-apart --replay-tolerance --restarts --worker-timeout --engine --replay-engine"
    ).split(),
}
"""The flags that the scripts had in 0.1.0, beside the fields of the agent's Config; they stay."""


@pytest.mark.parametrize("name", ALL)
def test_help_explains_every_flag(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    script, agent, known = ALL[name]
    with pytest.raises(SystemExit) as end:
        script.main(["--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    words = " ".join(text.replace("│", " ").split())
    fields = ["--" + field.name.replace("_", "-") for field in dataclasses.fields(agent.Config)]
    for flag in [*RUN, *PLACEMENT[script.SCRIPT.subject.placement], *fields]:
        explained = re.search(rf"{flag},? (.*?)\((default|sets|required)", words)
        assert explained and len(explained[1].split()) > 3, flag
    for preset in known:
        assert preset in text
    assert agent is not ppo or ("--epochs" in text and "--minibatches" in text)


def test_the_names_other_tools_rely_on() -> None:
    flags = (
        "--env --devices --seeds --num-envs --num-steps --seed --run-dir --eval-every --checkpoint-every --wandb "
        "--rollout-length --learning-rate"
    ).split()
    values = ["podium/Catch", "1", "2", "8", "64", "3", "folder", "8", "8", "offline", "4", "0.1"]
    argv = [part for pair in zip(flags, values, strict=True) for part in pair] + ["--resume", "--no-progress"]
    read = ppo_anakin.SCRIPT.read([*argv, "--epochs", "2", "--minibatches", "3"])
    assert (read.agent["num_epochs"], read.agent["num_minibatches"]) == (2, 3)
    assert (read.train["run_dir"], read.train["resume"], read.train["progress"]) == (Path("folder"), True, False)
    assert read.train["seeds"] == 2 and read.placement["devices"] == 1
    read = dqn_anakin.SCRIPT.read([*argv, "--buffer-capacity", "64", "--batch-size", "4"])
    assert [read.agent[name] for name in ("buffer_capacity", "batch_size", "learning_rate")] == [64, 4, 0.1]


@pytest.mark.parametrize("name", ALL)
def test_every_preset_makes_an_agent_and_an_environment(name: str) -> None:
    script, agent, known = ALL[name]
    for key, preset in known.items():
        read = script.SCRIPT.read(["--preset", key])
        assert read.setup.env == preset.env in podium.envs.names()
        assert key in read.preset and preset.source in read.preset and preset.tuned_words in read.preset
        found = {**read.agent, **read.train, **read.placement, **dataclasses.asdict(read.setup)}
        assert {name: found[name] for name in preset.values} == preset.values, "every value reaches something"
        agent.make(agent.Config(**read.agent))
        num_envs = read.train["num_envs"]
        assert preset.source.endswith(".") and (num_envs == 1 or num_envs % 8 == 0), "eight devices must do"


def test_what_lies_under_the_flags() -> None:
    def read(*argv: str) -> Options:
        return ppo_anakin.SCRIPT.read(argv)

    values = presets.PPO["cartpole"].values
    assert read().agent["learning_rate"] == values["learning_rate"] and read().preset.startswith("cartpole")
    assert read("--env=CartPole-v1") == read(), "an environment brings its preset"
    assert read("--learning-rate", "0.5").agent["learning_rate"] == 0.5
    assert podium.agents.ppo.Config(**read("--preset", "none").agent) == ppo.Config()
    other = read("--env", "FourRooms-misc")
    assert other.agent["learning_rate"] == ppo.Config.learning_rate and "no preset for FourRooms-misc" in other.preset
    mixed = read("--preset", "breakout-minatar", "--env", "Asterix-MinAtar")
    assert (mixed.setup.env, mixed.agent["learning_rate"]) == ("Asterix-MinAtar", 4e-3)


def test_a_preset_that_is_not_usual_is_taken_by_its_name_only() -> None:
    """Whoever trains in Breakout sees all its frames, unless they ask for blank ones."""
    plain = r2d2_anakin.SCRIPT.read(["--env", "Breakout-MinAtar"])
    assert plain.setup.env_options == () and plain.preset.startswith("none: plain defaults")
    assert "breakout-minatar-flicker must be asked for: --preset breakout-minatar-flicker" in plain.preset
    named = r2d2_anakin.SCRIPT.read(["--preset", "breakout-minatar-flicker"])
    assert (named.setup.env, named.env_options) == ("Breakout-MinAtar", {"flicker": 0.5})


@pytest.mark.parametrize(
    ("script", "num_envs", "rollout_length"),
    [
        (ppo_anakin, 64, 128),
        (dqn_anakin, 16, 1),
        (impala_anakin, 64, 20),
        (a2c_anakin, 64, 5),
        (ppo_sebulba, 8, 128),
        (impala_sebulba, 8, 20),
        (a2c_sebulba, 8, 5),
        (apex_distributed, 16, 4),
    ],
)
def test_the_sizes_of_0_1_0_stay_the_plain_defaults(script: ModuleType, num_envs: int, rollout_length: int) -> None:
    read = script.SCRIPT.read(["--preset", "none"])
    own = podium.agents.make(read.subject.agent).rollout_length
    assert (read.train["num_envs"], read.train["rollout_length"] or own) == (num_envs, rollout_length)
    assert read.setup.env == ("Pong-v5" if read.subject.placement == "sebulba" else "CartPole-v1")
    assert read.train["num_steps"] == 500_000


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
    assert SCRIPTS[name][0].main([*TINY, "--num-envs", "8", "--rollout-length", "4", *argv]) == REFUSED
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1, error
    assert names in error
    assert not list(Path().iterdir()), "a refused run leaves nothing behind"


def test_a_run_folder_is_never_written_over(capsys: pytest.CaptureFixture[str]) -> None:
    Path("taken").mkdir()
    Path("taken/file").touch()
    assert ppo_anakin.main([*TINY, "--run-dir", "taken"]) == REFUSED
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
        assert ppo_anakin.main([*TINY, *sizes, *argv]) == REFUSED
        assert capsys.readouterr() == ("", f"error: {words}\n")


def test_a_signal_during_compilation_ends_with_its_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CompiledLoop, "compile", lambda self: os.kill(os.getpid(), signal.SIGTERM))
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
    assert replay.main(["run"]) == REFUSED
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
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 800 bytes."), 1),
        (KeyboardInterrupt(), 130),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_exit_codes(error: BaseException, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert guard(lambda: _raise(error)) == code
    assert capsys.readouterr().err.count("\n") == 1


def test_an_error_nobody_foresaw_keeps_its_traceback() -> None:
    with pytest.raises(ValueError, match="Expecting value"):
        guard(lambda: json.loads("x"))
    with pytest.raises(TypeError):
        guard(lambda: jax.numpy.zeros(3).reshape(2, 2))


def test_the_compilation_cache_is_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PODIUM_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.use_compilation_cache() == tmp_path / "xdg" / "podium" / "jax"
    monkeypatch.setenv("PODIUM_CACHE", str(tmp_path / "mine"))
    folder = cache.use_compilation_cache()
    assert folder == tmp_path / "mine" / "jax"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (tmp_path / "file").touch()
    monkeypatch.setenv("PODIUM_CACHE", str(tmp_path / "file"))
    assert cache.use_compilation_cache() is None, "training goes on without"


@dataclasses.dataclass
class Flags:
    num_steps: int = 1
    eval_every: int | None = None


@pytest.mark.parametrize("steps", ["1024", "1_024", "1.024e3", "1024.0"])
def test_a_whole_number_may_be_written_as_people_write_it(steps: str) -> None:
    read = read_flags(Flags, ["--num-steps", steps, "--eval-every", steps])
    assert (read.num_steps, read.eval_every) == (1024, 1024) and type(read.num_steps) is int


@pytest.mark.parametrize("flag", ["--num-steps", "--eval-every"])
@pytest.mark.parametrize("text", ["1.5", "1M", "1e-3", "nan", "inf"])
def test_what_is_no_whole_number_is_refused_in_a_sentence(flag: str, text: str) -> None:
    sentence = (
        f"Error parsing {flag}: '{text}' is no integer, such as 1000000, 1_000_000 or 1e6; --help lists every flag."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        read_flags(Flags, [flag, text])


def test_options_are_literals_or_text() -> None:
    assert read_options(["a=3", "b=0.5", "c=word", "d=(1, 2)"], "--env-options") == {
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
import podium
import benchmark, ppo_anakin, apex_distributed
apex_distributed.SCRIPT.read([])
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
    read = ppo_sebulba.SCRIPT.read(["--actor-threads", "3", "--max-lag", "2", "--lockstep", "--envs-per-thread", "4"])
    assert read.make_placement() == podium.Sebulba(actor_threads=3, max_lag=2, lockstep=True, envs_per_actor=4)
    assert read.train["num_envs"] == 12, "environments of a thread stand in place of --num-envs"


@pytest.mark.parametrize(
    ("argv", "needed"),
    [([], None), (["--actor-devices", "1"], None), (["--learner-devices", "3"], 4), (["--actor-devices", "2"], 3)],
)
def test_devices_that_act_lie_beside_those_that_learn(argv: list[str], needed: int | None) -> None:
    assert ppo_sebulba.SCRIPT.read(argv).number_of_devices() == needed


def test_the_console_of_emulated_atari_has_a_flag() -> None:
    read = ppo_atari_anakin.SCRIPT.read
    assert read([]).env_options == {"backend": None} and read([]).setup.env == "atari/Pong"
    given = read(["--backend", "pallas", "--env-options", "screen=42"])
    assert given.env_options == {"backend": "pallas", "screen": 42}
