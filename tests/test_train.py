"""podium.train: what it does between chunks, what it returns, what it writes, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import podium
from podium import envs
from podium.agents import dqn, ppo
from podium.checkpoint import Checkpoints, params_sha256
from podium.placement.compiled.chunk import CompiledLoop
from podium.schedule import Pace, Schedule, make_schedule
from podium.sinks import read_metrics
from podium.types import DiscreteSpec

STEPS = 16 * 8  # Of one iteration.
AGENT = ppo.make(ppo.Config(hidden_sizes=(16,), num_epochs=1, num_minibatches=2, learning_rate=1e-3))


def train(**changes: Any) -> podium.Result:
    """Train PPO in Catch for 10 iterations: a row every 2, an evaluation every 4, a checkpoint with it."""
    arguments: dict[str, Any] = {
        "num_steps": 10 * STEPS,
        "num_envs": 16,
        "rollout_length": 8,
        "placement": podium.Anakin(1),
        "log_every": 2 * STEPS,
        "eval_every": 4 * STEPS,
        "eval_episodes": 16,
        "progress": False,
    }
    return podium.train(AGENT, changes.pop("env", "podium/Catch"), **(arguments | changes))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> podium.Result:
    return train(run_dir=tmp_path_factory.mktemp("train") / "run")


def test_integers_of_numpy_are_integers(run: podium.Result, tmp_path: Path) -> None:
    """Also narrow ones, in which the steps of a run would not fit, and the run is resumed with Python's."""
    narrow = {
        "num_envs": np.int8(16),
        "rollout_length": np.uint8(8),
        "seed": np.int64(0),
        "eval_episodes": np.int32(16),
    }
    sizes: dict[str, Any] = {**narrow, "placement": podium.Anakin(np.int64(1))}
    half = train(**sizes, num_steps=np.int16(5 * STEPS), run_dir=tmp_path / "run")
    assert half.summary["env_steps"] == 5 * STEPS
    assert json.loads((tmp_path / "run/config.json").read_text())["config"]["num_envs"] == 16
    resumed = train(run_dir=tmp_path / "run", resume=True)
    assert resumed.summary["params_sha256"] == run.summary["params_sha256"]
    with pytest.raises(ValueError, match=r"num_envs=True must be a positive integer"):
        train(num_envs=True)


@pytest.mark.slow
def test_a_run_counts_by_its_own_numbers_whatever_an_agent_calls_its_metrics() -> None:
    def grad(key: Any, state: Any, minibatch: Any) -> Any:
        grads, aux = AGENT.grad(key, state, minibatch)
        return grads, aux._replace(metrics={**aux.metrics, "env_steps": jnp.float32(7), "updates": jnp.float32(7)})

    arguments: dict[str, Any] = {"num_envs": 16, "rollout_length": 8, "num_steps": 2 * STEPS, "eval_every": 0}
    agent, placement = AGENT._replace(grad=grad), podium.Anakin(1)
    result = podium.train(agent, "podium/Catch", placement=placement, log_every=STEPS, progress=False, **arguments)
    assert [(row["env_steps"], row["updates"]) for row in result.metrics] == [(STEPS, 1), (2 * STEPS, 2)]


# Schedules.


def test_steps_are_rounded_down_to_whole_iterations() -> None:
    assert make_schedule(1000, 128).total == 7
    assert make_schedule(128, 128).total == 1


def test_a_budget_below_one_iteration_is_refused() -> None:
    with pytest.raises(ValueError, match="num_steps=127 is less than one iteration .* = 128 .* use 128 or more"):
        make_schedule(127, 128)


def test_a_run_that_ends_before_it_learns_is_refused(tmp_path: Path) -> None:
    agent = dqn.make(dqn.Config(hidden_sizes=(4,)))
    with pytest.raises(ValueError, match="num_steps, .* end before learning begins, at min_replay_size=1000; use more"):
        podium.train(agent, "podium/Catch", num_steps=1_010, num_envs=64, run_dir=tmp_path / "run")
    placements: list[podium.Placement] = [podium.ParameterServer(workers=2), podium.LocalSGD(devices=1, workers=2)]
    for placement in placements:  # Each worker has a replay of its own.
        with pytest.raises(ValueError, match="1920 in whole iterations and 960 for each of 2 replays, end before"):
            podium.train(
                agent, "podium/Catch", num_steps=1_920, num_envs=64, placement=placement, run_dir=tmp_path / "run"
            )
    assert not (tmp_path / "run").exists()


def test_an_iteration_of_more_steps_than_a_program_numbers_is_refused() -> None:
    make_schedule(2**40, 2**31 - 1)
    with pytest.raises(
        ValueError, match=r"num_envs \* rollout_length = 2147483648 is more than one iteration can count"
    ):
        make_schedule(2**40, 2**31)


def test_intervals_are_rounded_up_and_have_defaults() -> None:
    schedule = make_schedule(12_800, 128, eval_every=129, checkpoint_every=None, log_every=1)
    assert schedule == Schedule(total=100, log=1, evaluate=2, checkpoint=2, steps_per_update=128)
    assert make_schedule(12_800, 128) == Schedule(100, 1, 10, 10, 128)
    assert make_schedule(12_800, 128, 0, 0, 0) == Schedule(100, 100, 0, 0, 128)
    with pytest.raises(ValueError, match="eval_every=-1"):
        make_schedule(12_800, 128, eval_every=-1)


def test_the_host_stops_at_every_interval_and_at_the_end_and_nowhere_else() -> None:
    schedule = Schedule(total=11, log=4, evaluate=3, checkpoint=0, steps_per_update=1)
    stops, update = [], 0
    while update < schedule.total:
        stops.append(update := schedule.next_stop(update))
    assert stops == [3, 4, 6, 8, 9, 11]
    assert [u for u in range(1, 12) if schedule.due(schedule.evaluate, u)] == [3, 6, 9, 11]
    assert [u for u in range(1, 12) if schedule.due(schedule.checkpoint, u)] == [11]


# What comes back, and what is on disk.


def test_rows_have_no_gap_and_no_double(run: podium.Result) -> None:
    assert [row["env_steps"] for row in run.metrics] == [n * STEPS for n in (2, 4, 6, 8, 10)]
    assert all(math.isfinite(row["episode_return"]) and -1 <= row["episode_return"] <= 1 for row in run.metrics)
    assert all(row["episode_length"] == 9 for row in run.metrics)
    # 16 environments, 8 steps, 9 steps an episode.
    assert sum(row["episodes"] for row in run.metrics) == 16 * (10 * 8 // 9)
    assert run.run_dir is not None
    on_disk = read_metrics(run.run_dir / "metrics.jsonl")
    assert on_disk == run.metrics


def test_evaluation_at_its_interval_and_at_the_end(run: podium.Result) -> None:
    assert [row["env_steps"] for row in run.metrics if "eval_return" in row] == [n * STEPS for n in (4, 8, 10)]
    assert run.summary["eval_return"] == run.metrics[-1]["eval_return"]


def test_the_summary_says_what_tools_rely_on(run: podium.Result) -> None:
    assert run.run_dir is not None
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert summary["env_steps"] == 10 * STEPS and summary["num_devices"] == 1 and summary["platform"] == "cpu"
    assert summary["params_sha256"] == params_sha256(run.policy.params)
    assert summary["compile_seconds"] > 0 and summary["steps_per_second"] > 0 and summary["interrupted"] is None
    assert summary["wall_seconds"] >= summary["compile_seconds"]
    assert {path.name for path in run.run_dir.iterdir()} == {
        "config.json", "placement.txt", "placement.svg", "metrics.jsonl", "summary.json", "curve.png", "checkpoints",
    }  # fmt: skip


def test_the_loaded_policy_is_the_one_returned(run: podium.Result) -> None:
    assert run.run_dir is not None
    loaded = podium.load(run.run_dir)
    assert params_sha256(loaded.params) == run.summary["params_sha256"]
    obs = np.random.default_rng(0).random((5, 10, 5, 2), np.float32)
    assert (np.asarray(loaded.act(obs)[0]) == np.asarray(run.policy.act(obs)[0])).all()


def test_the_best_checkpoint_is_the_state_that_was_evaluated(run: podium.Result) -> None:
    """Played again on the keys of that evaluation, the best checkpoint gives the return on record."""
    from podium.evaluate import make_evaluator

    assert run.run_dir is not None
    best = max((row["eval_return"], row["env_steps"]) for row in run.metrics if "eval_return" in row)
    checkpoints = Checkpoints(run.run_dir / "checkpoints")
    assert checkpoints.best_step() == best[1]
    checkpoints.close()
    policy = podium.load(run.run_dir, step="best")
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), 0x65766C), best[1] // STEPS)
    again = jax.jit(make_evaluator(AGENT, envs.make("podium/Catch"), 16))(key, policy.params)
    assert float(again["eval_return"]) == best[0]


def test_it_needs_no_folder_and_takes_an_environment_object() -> None:
    written: list[dict[str, Any]] = []

    class Collects:
        closed: Any = None

        def write(self, row: dict[str, Any]) -> None:
            written.append(dict(row))

        def close(self, summary: dict[str, Any]) -> None:
            self.closed = summary

    sink = Collects()
    result = train(env=envs.make("podium/Catch"), num_steps=2 * STEPS + 5, log_every=2 * STEPS, sinks=[sink])
    assert result.run_dir is None and result.summary["env_steps"] == 2 * STEPS
    assert written == result.metrics and sink.closed == result.summary


def test_a_logger_that_raises_is_dropped_and_training_continues(run: podium.Result) -> None:
    class Broken:
        def write(self, row: Any) -> None:
            raise ConnectionError("the logger is down")

        def close(self, summary: Any) -> None:
            raise AssertionError("was dropped")

    with pytest.warns(UserWarning, match="Broken failed and is off from here on: .*the logger is down"):
        result = train(sinks=[Broken()])
    assert result.summary["params_sha256"] == run.summary["params_sha256"]


def test_wandb_that_raises_does_not_stop_training(
    run: podium.Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    class Run:
        summary: dict[str, Any] = {}

        def log(self, *arguments: Any, **named: Any) -> None:
            raise RuntimeError("wandb is down")

    monkeypatch.setattr(wandb, "init", lambda **named: Run())
    with pytest.warns(UserWarning, match="wandb failed and is off from here on: .*wandb is down"):
        result = train(wandb="offline", run_dir=tmp_path / "run")
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 5
    assert result.summary["params_sha256"] == run.summary["params_sha256"]


def test_chunks_of_any_length_give_the_same_rows_and_the_same_bits(
    run: podium.Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk, lengths = CompiledLoop.chunk, []

    def count(self: Any, state: Any, num_updates: int) -> Any:
        lengths.append(num_updates)
        return chunk(self, state, num_updates)

    monkeypatch.setattr(CompiledLoop, "chunk", count)
    monkeypatch.setattr(Pace, "SECONDS", 1e-9)
    short = train(log_every=0, eval_every=0)
    assert lengths == [1] * 10
    lengths.clear()
    monkeypatch.setattr(Pace, "SECONDS", math.inf)
    monkeypatch.setattr(Pace, "FIRST", 10)
    long = train(log_every=0, eval_every=0)
    assert lengths == [10]
    assert short.summary["params_sha256"] == long.summary["params_sha256"] == run.summary["params_sha256"]
    (short_row,), (long_row,) = short.metrics, long.metrics
    assert short_row.keys() == long_row.keys() >= {"episode_return", "loss", "entropy", "steps_per_second"}
    for name in short_row.keys() - {"wall_seconds", "steps_per_second", "compile_seconds"}:
        np.testing.assert_array_equal(short_row[name], long_row[name], name)
    # One row stands for five of `run`, whose episodes are its.
    np.testing.assert_allclose(long_row["loss"], np.mean([row["loss"] for row in run.metrics]), rtol=1e-6)
    assert long_row["episodes"] == sum(row["episodes"] for row in run.metrics)


def test_a_chunk_is_as_long_as_time_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    pace, lengths = Pace(1000), []
    # Half a millisecond an iteration; from the seventh chunk on, the replay full, 25 times as much.
    for seconds in [0.0005] * 6 + [0.0125] * 6 + [3.0, 0.0005]:
        lengths.append(pace.length)
        pace.measure(pace.length, pace.length * seconds)
    assert lengths == [1, 2, 4, 8, 16, 32, 64, 128, 160, 160, 160, 160, 160, 1]
    assert Pace(1000).length == 1 and pace.length == 2
    pace = Pace(3)
    for _ in range(5):
        pace.measure(1, 1e-6)
    assert pace.length == 3


def test_progress_shows_between_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[int] = []
    monkeypatch.setattr(Pace, "SECONDS", 1e-9)
    monkeypatch.setattr("podium.sinks.TerminalSink.show", lambda self, row: shown.append(row["updates"]))
    result = train(num_steps=4 * STEPS, eval_every=0)
    assert shown == [1, 2, 3, 4] and [row["updates"] for row in result.metrics] == [2, 4]


def test_seeds_give_lists_and_a_policy_each(tmp_path: Path) -> None:
    result = train(seeds=2, num_steps=4 * STEPS, run_dir=tmp_path / "run")
    assert len(result.policy) == 2 and all(len(row["episode_return"]) == 2 for row in result.metrics)
    assert len(result.summary["eval_return"]) == 2
    for seed in (0, 1):
        loaded = podium.load(tmp_path / "run", seed=seed)
        assert params_sha256(loaded.params) == params_sha256(result.policy[seed].params)
    with pytest.raises(ValueError, match="seed=2 is none of the run's 2 seeds; use 0 to 1"):
        podium.load(tmp_path / "run", seed=2)


# What comes before anything is compiled or written.


class Enough(Exception):
    """Ends a run that has been announced."""


def test_a_run_is_announced_once_before_anything_is_compiled_or_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CompiledLoop, "compile", pytest.fail)
    monkeypatch.setattr(CompiledLoop, "init", pytest.fail)
    announced: list[Any] = []

    def announce(program: Any, schedule: Schedule) -> None:
        announced.append((program.sizes.num_envs, program.sizes.num_lanes, schedule.total, program.loop.max_updates))
        raise Enough

    with pytest.raises(Enough):
        train(run_dir=tmp_path / "run", announce=announce)
    with pytest.raises(Enough):
        train(num_steps=10**9, log_every=0, eval_every=0, announce=announce)
    # The buffer of metrics stays small, however far apart the rows are.
    assert announced == [(16, 8, 10, 2), (16, 8, 10**9 // STEPS, 1024)]
    assert not list(tmp_path.iterdir())


def test_a_refused_run_is_not_announced(run: podium.Result, tmp_path: Path) -> None:
    assert run.run_dir is not None
    folder = Path(shutil.copytree(run.run_dir, tmp_path / "run"))

    def refuse(words: str, **changes: Any) -> None:
        before = sorted((path, path.stat().st_mtime_ns) for path in folder.rglob("*"))
        with pytest.raises(ValueError, match=words):
            train(run_dir=folder, announce=pytest.fail, **changes)
        assert sorted((path, path.stat().st_mtime_ns) for path in folder.rglob("*")) == before

    refuse("is not empty")
    refuse("seed was 0 and is 1", resume=True, seed=1)
    refuse("give a larger num_steps", resume=True, num_steps=5 * STEPS)
    for arrays in folder.glob("checkpoints/*/arrays"):
        shutil.rmtree(arrays)
    with pytest.warns(UserWarning, match="Trying the older checkpoint"):
        refuse("No good checkpoint in .*run/checkpoints", resume=True)
    shutil.rmtree(folder / "checkpoints")
    (folder / "checkpoints").touch()
    refuse(r"checkpoints cannot be read \(Not a directory\)", resume=True)
    (folder / "checkpoints").unlink()
    for text in ("?\n{}\n", '{"env_steps": "64"}\n{}\n'):
        (folder / "metrics.jsonl").write_text(text)
        refuse("line 1 is not a JSON object", resume=True)


# What is refused: before anything is compiled, and without a run folder.

BAD_SIZES = [
    (name, value)
    for name in ("num_steps", "num_envs", "rollout_length", "seeds", "eval_episodes", "num_lanes", "keep_checkpoints")
    for value in (0, -1, 2.5, True, "8", 2**63)
]
BAD_INTERVALS = [
    (name, value)
    for name in ("eval_every", "eval_steps", "checkpoint_every", "log_every", "seed")
    for value in (-1, 2.5, True, math.nan, 2**63)
] + [("seed", 2**32)]
BAD_REST = [("wandb", "on"), ("env", "podium/Cach"), ("progress", "x"), ("resume", 1), ("announce", 3)]


@pytest.mark.parametrize(("name", "value"), [*BAD_SIZES, *BAD_INTERVALS, *BAD_REST])
def test_bad_arguments_are_refused_by_name(
    name: str, value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CompiledLoop, "compile", pytest.fail)
    monkeypatch.setattr(CompiledLoop, "init", pytest.fail)
    named = f"{name}={value!r}" if name != "env" else "'podium/Cach'.* Did you mean 'podium/Catch'"
    with pytest.raises(ValueError, match=named):
        train(run_dir=tmp_path / "run", **{name: value})
    assert not list(tmp_path.iterdir())


OTHERS = {
    "agent": [("ppo", r"podium\.agents\.make\('ppo'\)"), (ppo.Config(), "is no Agent"), (ppo, "is no Agent")],
    "env": [(3, "make one by podium.envs.make"), ((1, 2), "neither a podium.Env nor"), (None, "neither a podium.Env")],
    "placement": [("anakin", r"such as podium\.Anakin\(\)"), (podium.Single, r"give an object, such as Single\(\)")],
    "env_options": [(["rows=5"], "must be a mapping")],
    "sinks": [([print], r"must have the methods write\(row\) and close"), (print, "must be a sequence of sinks")],
    "run_dir": [(3, "must be the path of a folder")],
}


@pytest.mark.parametrize(("name", "value", "words"), [(n, *case) for n, cases in OTHERS.items() for case in cases])
def test_what_is_of_another_kind_is_refused_by_name(
    name: str, value: Any, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names, classes, modules and other libraries' objects, in place of an agent, an environment, a placement."""
    monkeypatch.setattr(CompiledLoop, "compile", pytest.fail)
    monkeypatch.setattr(CompiledLoop, "init", pytest.fail)
    given: dict[str, Any] = {"agent": AGENT, "env": "podium/Catch", "run_dir": tmp_path / "run", name: value}
    with pytest.raises(ValueError, match=rf"^{name}=.*{words}"):
        podium.train(**given, num_steps=STEPS, num_envs=16, rollout_length=8, progress=False)
    assert not list(tmp_path.iterdir())


def test_a_placement_builds_of_agents_and_environments_only() -> None:
    sizes = {"num_envs": 16, "rollout_length": 8}
    with pytest.raises(ValueError, match="agent='ppo' is no Agent"):
        podium.Anakin(1).build("ppo", envs.make("podium/Catch"), **sizes)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"make one by podium\.envs\.make\('podium/Catch'\)"):
        podium.Anakin(1).build(AGENT, "podium/Catch", **sizes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("learning_rate", "1e-3"),
        ("learning_rate", None),
        ("learning_rate", lambda step: 1e-3),
        ("gamma", "0.9"),
        ("gamma", True),
        ("gamma", np.ones(2)),
        ("hidden_sizes", 64),
        ("hidden_sizes", "64"),
        ("normalize_obs", 1),
        ("normalize_obs", "no"),
    ],
)
def test_a_setting_of_another_type_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{field}=.* must be "):
        ppo.make(ppo.Config(**{field: value})).init(jax.random.key(0), envs.make("podium/Catch").spec)


def test_numbers_of_numpy_and_jax_are_settings() -> None:
    config = ppo.Config(learning_rate=np.float32(1e-3), gamma=jnp.float32(0.9), normalize_obs=np.bool_(True))
    assert ppo.make(config).name == "ppo"


@pytest.mark.parametrize("devices", [0, -1, 2.5, True, "8", [], [0], 9])
def test_bad_devices_are_refused(devices: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="devices="):
        train(run_dir=tmp_path / "run", placement=podium.Anakin(devices))
    assert not list(tmp_path.iterdir())


def test_what_does_not_divide_is_refused_with_the_nearest_that_does(tmp_path: Path) -> None:
    with pytest.raises(ValueError) as caught:
        train(num_envs=100, placement=podium.Anakin(8), run_dir=tmp_path / "run")
    assert str(caught.value) == "num_envs=100 is not divisible by num_devices=8; use 96 or 104."
    with pytest.raises(ValueError, match="num_lanes=3 must divide num_envs=16"):
        train(num_lanes=3, run_dir=tmp_path / "run")
    with pytest.raises(ValueError, match="num_steps=100 is less than one iteration"):
        train(num_steps=100, run_dir=tmp_path / "run")
    with pytest.raises(ValueError, match="continuous"):
        podium.train(dqn.make(), "Pendulum-v1", num_steps=9999, num_envs=8, run_dir=tmp_path / "run")
    with pytest.raises(ValueError, match="env_options"):
        train(env=envs.make("podium/Catch"), env_options={"rows": 5}, run_dir=tmp_path / "run")
    with pytest.raises(ValueError, match="resume=True needs run_dir"):
        train(resume=True)
    assert not list(tmp_path.iterdir())


def test_an_environment_without_its_data_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(name: str) -> Any:
        raise RuntimeError(f"{name} needs data that cannot be downloaded.")

    monkeypatch.setattr(envs, "make", make)
    with pytest.raises(ValueError, match="podium/Catch needs data"):
        train()


def test_a_run_folder_that_exists_is_refused_with_both_ways_on(run: podium.Result) -> None:
    assert run.run_dir is not None
    before = {path: path.stat().st_mtime_ns for path in run.run_dir.rglob("*")}
    with pytest.raises(ValueError, match="not empty; add --resume to resume it, or choose another --run-dir"):
        train(run_dir=run.run_dir)
    with pytest.raises(ValueError, match="is no folder"):
        train(run_dir=run.run_dir / "none", resume=True)
    assert {path: path.stat().st_mtime_ns for path in run.run_dir.rglob("*")} == before


def test_minibatches_that_do_not_divide_are_refused_with_the_nearest_that_do() -> None:
    agent = ppo.make(ppo.Config(num_minibatches=7))
    sizes: dict[str, Any] = {"num_steps": 10**5, "num_envs": 64, "rollout_length": 128}
    with pytest.raises(ValueError) as caught:
        podium.train(agent, "podium/Catch", placement=podium.Anakin(1), **sizes)
    words = "num_minibatches=7 does not divide the 8192 steps of a rollout (64 x 128); use 4 or 8."
    assert str(caught.value) == words
    with pytest.raises(ValueError, match=r"1024 steps of a rollout \(8 x 128\) on each of 8 devices; use 4 or 8"):
        podium.train(agent, "podium/Catch", placement=podium.Anakin(8), **sizes)
    with pytest.raises(ValueError, match="2048 steps .* in each of num_lanes=4; use 4 or 8"):
        podium.train(agent, "podium/Catch", placement=podium.Anakin(1), num_lanes=4, **sizes)


# An environment given as an object.


@pytest.mark.slow
def test_an_environment_given_as_an_object_is_made_again_only_where_its_name_makes_it(tmp_path: Path) -> None:
    usual, other = envs.make("podium/Catch"), envs.make("podium/Catch", rows=5)
    sizes: dict[str, Any] = {"num_steps": STEPS, "eval_every": 0}
    train(env=usual, run_dir=tmp_path / "usual", **sizes)
    assert podium.load(tmp_path / "usual").spec.obs.shape == (10, 5, 2)
    train(env=other, run_dir=tmp_path / "other", **sizes)
    record = json.loads((tmp_path / "other" / "config.json").read_text())["config"]["env"]
    assert record == {"name": "podium/Catch", "options": None, "object": {"spec_sha256": other.spec.sha256()}}
    with pytest.raises(ValueError, match=r"given as an object, .* pass the environment yourself: podium.load\(run_dir"):
        podium.load(tmp_path / "other")
    policy = podium.load(tmp_path / "other", env=other)
    assert policy.act(np.zeros((2, 5, 5, 2), np.float32))[0].shape == (2,)
    with pytest.raises(ValueError, match="env.object.spec_sha256 was .* and is"):
        train(env=usual, run_dir=tmp_path / "other", resume=True, **sizes)


def test_a_digest_tells_specs_apart() -> None:
    spec = envs.make("Pendulum-v1").spec
    changes: list[dict[str, Any]] = [
        {"name": "Pendulum"},
        {"max_episode_steps": 7},
        {"obs": dataclasses.replace(spec.obs, shape=(4,), low=-1, high=1)},
        {"obs": {"a": spec.obs}},
        {"action": dataclasses.replace(spec.action, low=-1.0)},
        {"action": DiscreteSpec(3)},
    ]
    digests = {spec.sha256(), *(dataclasses.replace(spec, **change).sha256() for change in changes)}
    assert len(digests) == 1 + len(changes)
    assert dataclasses.replace(spec).sha256() == envs.make("Pendulum-v1").spec.sha256()


def test_asking_for_the_devices_there_are_says_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        podium.Anakin(8).explain()
        assert podium.request_devices(8) is None
