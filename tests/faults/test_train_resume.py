"""A run that was stopped, however, is resumed as if it had not been; what cannot be resumed is refused by name."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import podium
from podium.agents import dqn, ppo, pqn, r2d2, rainbow, reppo, sac, td3
from podium.placement.compiled.chunk import CompiledLoop
from podium.placement.contract import update_count
from podium.schedule import Pace
from podium.sinks import read_metrics

ROOT = Path(__file__).resolve().parents[2]
STEPS = 16 * 8  # Of one iteration.
TOTAL = 10 * STEPS
AGENTS = {
    "ppo": ppo.make(ppo.Config(hidden_sizes=(16,), num_epochs=1, num_minibatches=2, learning_rate=1e-3)),
    "dqn": dqn.make(
        dqn.Config(
            hidden_sizes=(16,), batch_size=32, buffer_capacity=1024, min_replay_size=256, n_step=2, num_updates=2
        )
    ),
}
AGENTS["pqn"] = pqn.make(
    pqn.Config(
        hidden_sizes=(16,), num_minibatches=4, anneal_steps=TOTAL, epsilon_decay_steps=TOTAL // 2, normalize_obs=True
    )
)
AGENTS["pqn gru"] = pqn.make(pqn.Config(hidden_sizes=(16,), num_minibatches=2, memory="gru", memory_size=8))
AGENTS["r2d2"] = r2d2.make(
    r2d2.Config(
        hidden_sizes=(16,),
        batch_size=32,
        buffer_capacity=2048,
        min_replay_size=256,
        num_updates=2,
        memory_size=8,
        sequence_length=6,
        burn_in=2,
        sequence_period=4,
    )
)
AGENTS["reppo"] = reppo.make(reppo.Config(hidden_sizes=(16,), num_epochs=1, num_minibatches=2, num_bins=21))
AGENTS["rainbow"] = rainbow.make(
    rainbow.Config(hidden_sizes=(16,), batch_size=32, buffer_capacity=1024, min_replay_size=256, num_updates=2)
)
for name, algorithm in {"sac": sac, "td3": td3}.items():
    sizes: Any = {"hidden_sizes": (16,), "batch_size": 32, "buffer_capacity": 1024, "min_replay_size": 256}
    AGENTS[name] = algorithm.make(
        algorithm.Config(updates_per_step=2 / STEPS, warmup_steps=200, policy_delay=2, normalize_obs=True, **sizes)
    )
ENVS = {"pqn": "CartPole-v1", "reppo": "Pendulum-v1", "sac": "Pendulum-v1", "td3": "Pendulum-v1"}
TIMES = {"wall_seconds", "steps_per_second", "compile_seconds"}


def train(name: str, run_dir: Path, devices: int = 1, **changes: Any) -> podium.Result:
    arguments: dict[str, Any] = {
        "num_steps": TOTAL,
        "num_envs": 16,
        "rollout_length": 8,
        "log_every": 2 * STEPS,
        "eval_every": 4 * STEPS,
        "checkpoint_every": 2 * STEPS,
        "eval_episodes": 16,
        "progress": False,
        "placement": podium.Anakin(devices),
    }
    return podium.train(AGENTS[name], ENVS.get(name, "podium/Catch"), run_dir=run_dir, **(arguments | changes))


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    """Return the rows of a run without what the clock says."""
    return [{k: v for k, v in row.items() if k not in TIMES} for row in read_metrics(run_dir / "metrics.jsonl")]


class StopAt:
    """A sink that sends this process a signal after a row."""

    def __init__(self, env_steps: int, number: int = signal.SIGTERM):
        self.env_steps, self.number = env_steps, number

    def write(self, row: dict[str, Any]) -> None:
        if row["env_steps"] == self.env_steps:
            os.kill(os.getpid(), self.number)

    def close(self, summary: dict[str, Any]) -> None:
        pass


@pytest.fixture(scope="module")
def whole_runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], podium.Result]:
    """Return uninterrupted runs by agent and number of devices, each made once."""
    made: dict[tuple[str, int], podium.Result] = {}

    def whole(name: str, devices: int) -> podium.Result:
        if (name, devices) not in made:
            made[name, devices] = train(name, tmp_path_factory.mktemp(f"{name}-{devices}") / "run", devices)
        return made[name, devices]

    return whole


Whole = tuple[str, int, podium.Result]


@pytest.fixture(
    params=[
        *("ppo-1", "dqn-1", "dqn-8", "sac-1"),
        *(
            pytest.param(x, marks=pytest.mark.slow)
            for x in ("ppo-8", "reppo-1", "td3-1", "pqn-1", "pqn-8", "pqn gru-1", "r2d2-1", "r2d2-8", "rainbow-1")
        ),
    ]
)
def whole(request: pytest.FixtureRequest, whole_runs: Callable[[str, int], podium.Result]) -> Whole:
    """Return an agent, a number of devices, and their uninterrupted run."""
    name, devices = request.param.split("-")
    return name, int(devices), whole_runs(name, int(devices))


@pytest.mark.parametrize(
    ("number", "at"), [(signal.SIGINT, 6), *(pytest.param(signal.SIGTERM, at, marks=pytest.mark.slow) for at in (2, 4))]
)
def test_stopped_and_resumed_is_the_run_that_was_not(
    whole: Whole, number: int, at: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, devices, uninterrupted = whole
    folder = tmp_path / "run"
    stopped = train(name, folder, devices, sinks=[StopAt(at * STEPS, number)])
    assert stopped.interrupted == signal.Signals(number).name == stopped.summary["interrupted"]
    assert stopped.summary["env_steps"] == at * STEPS
    assert (folder / "checkpoints" / str(at * STEPS) / "manifest.json").exists()
    assert "resume=True" in capsys.readouterr().err
    resumed = train(name, folder, devices, resume=True)
    assert resumed.interrupted is None
    assert resumed.summary["params_sha256"] == uninterrupted.summary["params_sha256"]
    assert uninterrupted.run_dir is not None
    assert rows_of(folder) == rows_of(uninterrupted.run_dir)


def signal_in_the_chunk_to(update: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a signal come during the chunk that ends at an update."""
    chunk = CompiledLoop.chunk

    def interrupted_chunk(self: Any, state: Any, num_updates: int) -> Any:
        if update_count(state) + num_updates == update:
            os.kill(os.getpid(), signal.SIGTERM)
        return chunk(self, state, num_updates)

    monkeypatch.setattr(CompiledLoop, "chunk", interrupted_chunk)


def test_a_signal_inside_a_chunk_loses_no_evaluation(
    whole_runs: Callable[[str, int], podium.Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chunk that ends where an evaluation is due ends without it; the resumed run evaluates there."""
    name, uninterrupted = "ppo", whole_runs("ppo", 1)
    signal_in_the_chunk_to(4, monkeypatch)
    folder = tmp_path / "run"
    stopped = train(name, folder)
    assert stopped.summary["env_steps"] == 4 * STEPS and "eval_return" not in stopped.metrics[-1]
    resumed = train(name, folder, resume=True)
    assert resumed.summary["params_sha256"] == uninterrupted.summary["params_sha256"]
    assert uninterrupted.run_dir is not None
    assert rows_of(folder) == rows_of(uninterrupted.run_dir)


@pytest.mark.parametrize("name", ["ppo", "dqn"])
def test_stopped_between_two_rows_the_next_row_is_whole(
    name: str, whole_runs: Callable[[str, int], podium.Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of one iteration, rows of two: what the third iteration says is kept in the checkpoint there."""
    folder, uninterrupted = tmp_path / "run", whole_runs(name, 1)
    monkeypatch.setattr(Pace, "SECONDS", 1e-9)
    signal_in_the_chunk_to(3, monkeypatch)
    stopped = train(name, folder)
    assert stopped.summary["env_steps"] == 3 * STEPS and stopped.metrics[-1]["env_steps"] == 2 * STEPS
    assert (folder / "checkpoints" / str(3 * STEPS) / "manifest.json").exists()
    monkeypatch.undo()
    resumed = train(name, folder, resume=True)
    assert resumed.summary["params_sha256"] == uninterrupted.summary["params_sha256"]
    assert uninterrupted.run_dir is not None
    assert rows_of(folder) == rows_of(uninterrupted.run_dir)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", [pytest.param("init", marks=pytest.mark.slow), "compile"])
def test_a_signal_during_compilation_ends_the_run_after_it(
    method: str,
    number: int,
    whole_runs: Callable[[str, int], podium.Result],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, uninterrupted = tmp_path / "run", whole_runs("ppo", 1)
    before = getattr(CompiledLoop, method)

    def interrupted(self: Any, *arguments: Any) -> Any:
        os.kill(os.getpid(), number)
        return before(self, *arguments)

    monkeypatch.setattr(CompiledLoop, method, interrupted)
    monkeypatch.setattr(CompiledLoop, "chunk", pytest.fail)
    stopped = train("ppo", folder)
    assert stopped.interrupted == signal.Signals(number).name and stopped.summary["env_steps"] == 0
    assert "nothing is trained yet; the same command with --resume" in capsys.readouterr().err
    monkeypatch.undo()
    with pytest.warns(UserWarning, match="holds no checkpoint yet; the run starts from its beginning"):
        resumed = train("ppo", folder, resume=True)
    assert resumed.summary["params_sha256"] == uninterrupted.summary["params_sha256"]
    assert uninterrupted.run_dir is not None
    assert rows_of(folder) == rows_of(uninterrupted.run_dir)


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("dqn", 1, 8),
        pytest.param("ppo", 8, 1, marks=pytest.mark.slow),
        pytest.param("dqn", 8, 2, marks=pytest.mark.slow),
    ],
)
def test_resume_on_another_number_of_devices(
    name: str, before: int, after: int, whole_runs: Callable[[str, int], podium.Result], tmp_path: Path
) -> None:
    folder, uninterrupted = tmp_path / "run", whole_runs(name, before)
    train(name, folder, before, sinks=[StopAt(6 * STEPS)])
    resumed = train(name, folder, after, resume=True)
    for x, y in zip(*map(jax.tree.leaves, (resumed.policy.params, uninterrupted.policy.params)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


@pytest.fixture
def finished(whole_runs: Callable[[str, int], podium.Result], tmp_path: Path) -> tuple[str, podium.Result, Path]:
    """Return a finished run of PPO on one device, and a copy of its folder."""
    result = whole_runs("ppo", 1)
    assert result.run_dir is not None
    return "ppo", result, Path(shutil.copytree(result.run_dir, tmp_path / "run"))


def test_resume_of_a_finished_run_changes_nothing(finished: tuple[str, podium.Result, Path]) -> None:
    name, result, folder = finished

    def contents() -> dict[str, bytes]:
        files = [path for path in folder.rglob("*") if path.is_file() and path.name != "curve.png"]
        return {str(path.relative_to(folder)): path.read_bytes() for path in files}

    before = contents()
    again = train(name, folder, resume=True)
    assert contents() == before
    assert again.summary == json.loads((folder / "summary.json").read_text())
    assert again.summary["params_sha256"] == result.summary["params_sha256"]


def test_a_longer_run_resumes_where_the_shorter_ended(finished: tuple[str, podium.Result, Path]) -> None:
    name, _, folder = finished
    longer = train(name, folder, resume=True, num_steps=TOTAL + 4 * STEPS)
    steps = [row["env_steps"] for row in rows_of(folder)]
    assert steps == [n * STEPS for n in (2, 4, 6, 8, 10, 12, 14)]
    assert longer.summary["env_steps"] == TOTAL + 4 * STEPS
    with pytest.raises(ValueError, match=f"but the run has done {TOTAL + 4 * STEPS}; give a larger num_steps"):
        train(name, folder, resume=True)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"seed": 5}, "seed was 0 and is 5"),
        ({"num_envs": 32}, "num_envs was 16 and is 32"),
        ({"rollout_length": 16}, "rollout_length was 8 and is 16"),
        ({"num_lanes": 4}, "num_lanes was 8 and is 4"),
        ({"env_options": {"rows": 5}}, r"env.options.rows was not set and is 5"),
    ],
)
def test_another_configuration_is_refused_by_name(
    finished: tuple[str, podium.Result, Path], changes: dict[str, Any], field: str
) -> None:
    name, _, folder = finished
    with pytest.raises(ValueError, match=field):
        train(name, folder, resume=True, **changes)


def test_another_agent_is_refused_by_name(finished: tuple[str, podium.Result, Path]) -> None:
    _, _, folder = finished
    with pytest.raises(ValueError, match="agent.name was 'ppo' and is 'dqn'"):
        train("dqn", folder, resume=True)


def test_a_damaged_newest_checkpoint_costs_a_warning_and_some_time(finished: tuple[str, podium.Result, Path]) -> None:
    name, result, folder = finished
    newest = folder / "checkpoints" / str(TOTAL)
    victim = max((path for path in (newest / "arrays").rglob("*") if path.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    with pytest.raises(ValueError, match="was changed after it was saved"):
        podium.load(folder, step=TOTAL)
    with pytest.warns(UserWarning, match=f"Trying the older checkpoint {8 * STEPS} instead"):
        resumed = train(name, folder, resume=True)
    assert resumed.summary["params_sha256"] == result.summary["params_sha256"]
    assert result.run_dir is not None
    assert rows_of(folder) == rows_of(result.run_dir)


def test_killed_before_the_first_checkpoint_it_starts_again(finished: tuple[str, podium.Result, Path]) -> None:
    name, result, folder = finished
    shutil.rmtree(folder / "checkpoints")
    with pytest.warns(UserWarning, match="holds no checkpoint yet; the run starts from its beginning"):
        resumed = train(name, folder, resume=True)
    assert resumed.summary["params_sha256"] == result.summary["params_sha256"]
    assert result.run_dir is not None
    assert rows_of(folder) == rows_of(result.run_dir)


# In processes of their own.

SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, {here!r})
import test_train_resume as here
import podium
folder, devices, resume, chunks = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "resume", int(sys.argv[4])
if devices > 1:
    podium.request_devices(devices)
result = here.train("dqn", folder, devices, resume=resume, num_steps=chunks * 2 * here.STEPS, eval_every=0)
print(result.summary["params_sha256"], result.interrupted)
"""


def start(folder: Path, devices: int = 1, resume: bool = False, chunks: int = 5) -> subprocess.Popen[str]:
    script = SCRIPT.format(here=str(Path(__file__).parent))
    arguments = [str(folder), str(devices), "resume" if resume else "new", str(chunks)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err[-3000:]
    return out.strip()


def wait_for_rows(folder: Path, number: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 200
    path = folder / "metrics.jsonl"
    while time.monotonic() < deadline and process.poll() is None:
        if path.exists() and path.read_bytes().count(b"\n") >= number:
            return
        time.sleep(0.01)


LONG = 400  # Chunks: enough that a signal comes while it runs.


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_a_process_and_a_new_process(number: int, devices: int, tmp_path: Path) -> None:
    process = start(tmp_path / "run", devices, chunks=LONG)
    wait_for_rows(tmp_path / "run", 3, process)
    process.send_signal(number)
    assert finish(process).endswith(signal.Signals(number).name)
    resumed = finish(start(tmp_path / "run", devices, resume=True, chunks=LONG))
    whole = finish(start(tmp_path / "whole", devices, chunks=LONG))
    assert resumed == whole and whole.endswith("None")
    assert rows_of(tmp_path / "run") == rows_of(tmp_path / "whole")


@pytest.mark.slow
def test_kill_at_random_times(tmp_path: Path) -> None:
    """Twenty kills, each at another moment; every one resumes from a whole checkpoint and ends at the same bits."""
    whole = finish(start(tmp_path / "whole", chunks=LONG))
    chance = random.Random(0)
    process = start(tmp_path / "run", chunks=LONG)
    kills = 0
    while kills < 20:
        rows = tmp_path / "run" / "metrics.jsonl"
        seen = rows.read_bytes().count(b"\n") if rows.exists() else 0
        wait_for_rows(tmp_path / "run", seen + chance.randint(0, 10), process)
        time.sleep(chance.random() * 0.2)
        if process.poll() is not None and process.returncode == 0:
            break
        process.kill()
        process.communicate()
        kills += 1
        resume = (tmp_path / "run").exists()
        process = start(tmp_path / "run", resume=resume, chunks=LONG)
    assert finish(process).split()[0] == whole.split()[0]
    assert kills >= 10
    assert rows_of(tmp_path / "run") == rows_of(tmp_path / "whole")
