"""Runs under Sebulba: what resuming keeps, what rows say, slow sinks, signals, and processes that are killed."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import podium
from podium.agent import Agent
from podium.agents import dqn, impala
from podium.host import HostEnv, HostEnvFactory, on_host
from podium.placement.sebulba import SebulbaLoop
from podium.sinks import progress_line, read_metrics

STEPS = 8 * 4  # Of one update.
IMPALA = impala.make(impala.Config(hidden_sizes=(8,)))
DQN = dqn.make(dqn.Config(hidden_sizes=(8,), batch_size=32, buffer_capacity=512, min_replay_size=64))
ROOT = Path(__file__).resolve().parents[2]


def train(agent: Agent = IMPALA, env: Any = "podium/Catch", **changes: Any) -> podium.Result:
    arguments: dict[str, Any] = {
        "num_steps": 10 * STEPS,
        "num_envs": 8,
        "rollout_length": 4,
        "log_every": STEPS,
        "eval_every": 0,
        "eval_episodes": 4,
        "progress": False,
        "placement": podium.Sebulba(),
    }
    return podium.train(agent, env, **(arguments | changes))


@dataclasses.dataclass
class Hooked:
    """A host environment that calls something before every `recv`."""

    inner: HostEnv
    hook: Callable[[], Any]

    def __post_init__(self) -> None:
        self.spec, self.num_envs = self.inner.spec, self.inner.num_envs
        self.reset, self.send, self.close = self.inner.reset, self.inner.send, self.inner.close

    def recv(self) -> Any:
        self.hook()
        return self.inner.recv()


def hooked(hook: Callable[[], Any], **changes: Any) -> HostEnvFactory:
    envs = on_host(podium.envs.make("podium/Catch"))
    return dataclasses.replace(envs, make=lambda *sizes: Hooked(envs.make(*sizes), hook), **changes)


@dataclasses.dataclass
class Calls:
    """A sink that calls something with every row."""

    function: Callable[[dict[str, Any]], Any]

    def write(self, row: dict[str, Any]) -> None:
        self.function(row)

    def close(self, summary: dict[str, Any]) -> None:
        pass


def orphans() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("podium-actor")]


@pytest.mark.parametrize("agent", [IMPALA, pytest.param(DQN, marks=pytest.mark.slow)], ids=["impala", "dqn"])
def test_resume_is_exact_for_the_learner_and_says_that_episodes_restart(
    agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Any] = []
    chunk = SebulbaLoop.chunk
    with_numbers = lambda state: jax.device_get(state._replace(key=jax.random.key_data(state.key)))

    def remember(self: Any, state: Any, num_updates: int) -> Any:
        given = with_numbers(state)
        state, metrics = chunk(self, state, num_updates)
        seen.append((given, with_numbers(state)))
        return state, metrics

    monkeypatch.setattr(SebulbaLoop, "chunk", remember)
    train(agent, run_dir=tmp_path / "run")
    assert "restart" not in capsys.readouterr().err
    ended = seen[-1][1]
    seen.clear()
    train(agent, run_dir=tmp_path / "run", resume=True, num_steps=14 * STEPS)
    jax.tree.map(np.testing.assert_array_equal, seen[0][0], ended)
    words = f"Resumed at env_steps={10 * STEPS}: the learner's state is exactly as saved, episodes restart"
    assert words in capsys.readouterr().err
    assert [row["updates"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")] == list(range(1, 15))


def test_frames_are_counted_apart_from_steps() -> None:
    result = train(env=hooked(lambda: None, frames_per_step=4))
    assert [row["frames"] for row in result.metrics] == [4 * row["env_steps"] for row in result.metrics]
    assert result.summary["frames"] == 4 * result.summary["env_steps"] == 40 * STEPS


@pytest.mark.slow
def test_who_waits_and_for_how_long_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Environments that take 20 ms a step, then a learner that takes 200 ms an update."""
    rows = train(env=hooked(lambda: time.sleep(0.02)), num_steps=9 * STEPS).metrics[3:]
    for row in rows:  # What was queued during the first update is learnt from by then.
        assert row["env_seconds"] > 4 * 0.02 and row["learner_idle"] > 0.5 and row["actor_idle"] < 0.3, row
    update = SebulbaLoop.update

    def slowly(self: Any, *arguments: Any) -> Any:
        time.sleep(0.2)
        return update(self, *arguments)

    monkeypatch.setattr(SebulbaLoop, "update", slowly)
    rows = train(num_steps=8 * STEPS).metrics[3:]  # From there on the queue is full.
    for row in rows:
        assert row["learn_seconds"] > 0.2 and row["learner_idle"] < 0.3 and row["actor_idle"] > 0.5, row
    # Two rollouts wait, but where the machine held the actors up for a whole update.
    stalest = max(rows, key=lambda row: row["policy_lag_max"])
    assert stalest["policy_lag_max"] == 2
    line = progress_line(stalest, 8 * STEPS)
    for words in ("lag 2.0, at most 2", "idle: actors ", "learner ", "time: env ", "inference ", "learning "):
        assert words in line


def test_a_slow_sink_stalls_the_learner_and_nothing_grows() -> None:
    steps: list[None] = []
    played: list[int] = []

    def stall(row: dict[str, Any]) -> None:
        if row["updates"] in (3, 6):
            # Of two actors: what was learnt from, two rollouts that wait, and one for which there is no room.
            expected, deadline = 2 * 4 * (row["updates"] + 3), time.monotonic() + 60
            while len(steps) < expected and time.monotonic() < deadline:
                time.sleep(0.05)
            time.sleep(0.5)
            played.append(len(steps) - expected)

    placement = podium.Sebulba(queue_depth=2, actor_threads=2, groups=1)
    result = train(env=hooked(lambda: steps.append(None)), sinks=[Calls(stall)], placement=placement)
    assert played == [0, 0]
    assert [row["updates"] for row in result.metrics] == list(range(1, 11))
    assert max(row["policy_lag_max"] for row in result.metrics) <= 3
    assert "frames" not in result.summary, "where a step is a frame"
    assert not orphans()


def test_ctrl_c_ends_the_threads_and_says_how_to_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    interrupt = lambda row: row["updates"] == 3 and os.kill(os.getpid(), signal.SIGINT)
    result = train(run_dir=tmp_path / "run", sinks=[Calls(interrupt)], placement=podium.Sebulba(actor_threads=2))
    assert result.interrupted == "SIGINT" and result.summary["updates"] == 3
    assert not orphans()
    assert "the same command with --resume" in capsys.readouterr().err
    again = train(run_dir=tmp_path / "run", resume=True, placement=podium.Sebulba(actor_threads=2))
    assert [row["updates"] for row in again.metrics] == list(range(1, 11))


@pytest.mark.slow
def test_ctrl_c_during_an_evaluation_does_not_wait_for_its_end(tmp_path: Path) -> None:
    """An evaluation of hours; the resumed run, where it is quick, makes up for it."""
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))

    def hours() -> None:
        if not timer.ident:
            timer.start()
        time.sleep(0.1)

    slow = hooked(hours)
    unbounded = dataclasses.replace(slow.spec, max_episode_steps=None)
    endless = dataclasses.replace(slow, spec=unbounded, make=lambda *sizes: Endless(slow.make(*sizes), hours))
    began = time.monotonic()
    options: dict[str, Any] = {"run_dir": tmp_path / "run", "eval_every": 3 * STEPS}
    stopped = train(env=hooked(lambda: None, evaluation=endless), **options)
    assert stopped.interrupted == "SIGINT" and time.monotonic() - began < 60
    assert stopped.summary["updates"] == 3 and "eval_return" not in stopped.metrics[-1]
    resumed = train(env=hooked(lambda: None), resume=True, **options)
    assert [row["updates"] for row in resumed.metrics if "eval_return" in row] == [3, 6, 9, 10]


class Endless(Hooked):
    """An environment whose episodes never end."""

    def recv(self) -> Any:
        timestep = super().recv()
        no = np.zeros(self.num_envs, bool)
        return timestep._replace(terminated=no, truncated=no)


# In processes of their own.


def start(*argv: str) -> subprocess.Popen[str]:
    flags = "--env podium/Catch --preset none --num-envs 8 --rollout-length 4 --hidden-sizes 8 --eval-episodes 4"
    flags += " --actor-threads 2 --eval-every 0 --checkpoint-every 320 --log-every 320 --run-dir run"
    command = [sys.executable, str(ROOT / "experiments" / "impala_sebulba.py"), *flags.split(), *argv]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=environment, **pipes)


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not path.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert path.exists(), process.communicate()[1] if process.poll() is not None else "not in time"


@pytest.mark.slow
def test_kill_and_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    process = start("--num-steps", "100000000")
    wait_for(tmp_path / "run" / "checkpoints" / "960", process)
    process.kill()
    process.communicate()
    steps = max(int(path.name) for path in Path("run/checkpoints").iterdir() if path.name.isdigit())
    process = start("--num-steps", str(steps + 3200), "--resume")
    out, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    assert "episodes restart" in error and f"{steps + 3200:,}" in out
    rows = [row["env_steps"] for row in read_metrics(Path("run/metrics.jsonl"))]
    assert rows == list(range(320, steps + 3201, 320))


@pytest.mark.slow
def test_ctrl_c_ends_the_process_within_ten_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    process = start("--num-steps", "100000000")
    wait_for(tmp_path / "run" / "checkpoints" / "960", process)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert time.monotonic() - began < 10
    assert process.returncode == 128 + signal.SIGINT and "--resume" in error and "Traceback" not in error
