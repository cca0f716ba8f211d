"""Two processes on this machine are one run: the same parameters, one run folder, and one end, whatever ends it."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).with_name("worker.py")


def environments(count: int = 2) -> list[dict[str, str]]:
    """Return the environment variables of each process; on one device each."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    inherited = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    common = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(count), "PYTHONPATH": str(ROOT)}
    return [inherited | common | {"JAX_PROCESS_ID": str(number)} for number in range(count)]


def start(*command: str) -> list[subprocess.Popen[str]]:
    return [
        subprocess.Popen(
            [sys.executable, *command], env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for env in environments()
    ]


def finish(processes: list[subprocess.Popen[str]], seconds: float = 240) -> list[tuple[int, str, str]]:
    """Return the exit code and what each said; no process outlives this."""
    deadline = time.monotonic() + seconds
    try:
        said = [process.communicate(timeout=max(1, deadline - time.monotonic())) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *both) for process, both in zip(processes, said, strict=True)]


@pytest.mark.parametrize(
    "cases",
    [
        ["sebulba-ppo", "sebulba-impala"],
        pytest.param(["sebulba-a2c", "sebulba-dqn", "anakin-ppo", "anakin-dqn", "ring-ppo"], marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_two_processes_of_one_device_are_one_process_of_two(cases: list[str], tmp_path: Path) -> None:
    processes = start(str(WORKER), str(tmp_path), *cases)
    spec = importlib.util.spec_from_file_location("worker", WORKER)
    assert spec is not None and spec.loader is not None
    worker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(worker)
    expected = {}
    for case in cases:
        where, agent = case.split("-")
        two = jax.devices()[:2] if where == "sebulba" else 2
        expected[case] = worker.run(worker.placement(where, two), agent)
    for code, _, err in finish(processes):
        assert code == 0, err
    for case, (params, metrics, _) in expected.items():
        first, second = ({**np.load(tmp_path / f"{case}.{number}.npz")} for number in range(2))
        for name, leaf in first.items():
            np.testing.assert_array_equal(leaf, second[name], err_msg=name)
        kinds = {"all-reduce", *(["collective-permute"] if case.startswith("ring") else [])}
        assert set(first["collectives"].tolist()) == kinds, case
        for name, leaf in params.items():
            np.testing.assert_allclose(first[name], leaf, atol=1e-5, err_msg=f"{case} {name}")
        for name in ("episodes", "episode_return_sum"):  # Of the environments of both.
            np.testing.assert_allclose(first[name], metrics[name])


# A whole run, by the command line.


def command(run_dir: Path, steps: int, *further: str) -> list[str]:
    flags = f"--env podium/Catch --num-envs 8 --rollout-length 8 --num-steps {steps} --hidden-sizes 16 --preset none"
    often = "--eval-episodes 8 --eval-every 6400 --checkpoint-every 640 --log-every 320 --no-progress --distributed"
    script = str(ROOT / "experiments" / "impala_sebulba.py")
    return [script, *flags.split(), *often.split(), "--run-dir", str(run_dir), *further]


def wait_for_checkpoint(run_dir: Path, processes: list[subprocess.Popen[str]], seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not list(run_dir.glob("checkpoints/*/manifest.json")):
        assert time.monotonic() < deadline and all(process.poll() is None for process in processes), finish(processes)
        time.sleep(0.2)


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def assert_goes_on(run_dir: Path) -> None:
    """Resume for some updates more in two processes; the rows have no gap and no double."""
    done = max(int(path.name) for path in (run_dir / "checkpoints").iterdir() if path.name.isdigit())
    total = done // 320 * 320 + 960
    (code, out, err), (other_code, other_out, other_err) = finish(start(*command(run_dir, total, "--resume")))
    assert code == 0 and other_code == 0, err + other_err
    assert "(resumed)" in out
    assert "podium" not in other_out and "steps" not in other_out + other_err, other_out + other_err
    steps = [row["env_steps"] for row in rows_of(run_dir)]
    assert steps == list(range(320, total + 1, 320))
    assert json.loads((run_dir / "summary.json").read_text())["num_processes"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("who", [0, 1])
def test_sigterm_to_one_stops_and_saves_all_and_both_go_on(who: int, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    processes = start(*command(run_dir, 10_000_000))
    wait_for_checkpoint(run_dir, processes)
    processes[who].send_signal(signal.SIGTERM)
    ended = finish(processes)
    assert [code for code, _, _ in ended] == [128 + signal.SIGTERM] * 2, ended
    assert f"Stopped by SIGTERM: saved in {run_dir}" in ended[0][2]
    assert "Stopped by" not in ended[1][2]
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["interrupted"] == "SIGTERM"
    assert (run_dir / "checkpoints" / str(summary["env_steps"]) / "manifest.json").exists()
    assert_goes_on(run_dir)


@pytest.mark.slow
@pytest.mark.parametrize(("who", "number"), [(0, signal.SIGKILL), (1, signal.SIGKILL), (1, signal.SIGSTOP)])
def test_death_or_stillness_of_one_ends_the_other_within_a_minute(who: int, number: int, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    processes = start(*command(run_dir, 10_000_000))
    wait_for_checkpoint(run_dir, processes)
    processes[who].send_signal(number)
    try:
        ((code, _, err),) = finish([processes[1 - who]], 60)  # Raises where the other goes on for longer.
    finally:
        processes[who].kill()
        processes[who].communicate()
    assert code not in (0, None)
    # Ours, where the loss showed in a collective; JAX's, where its watch was the first to see it.
    assert "Another process is gone" in err or "another task died" in err, err
    assert_goes_on(run_dir)


def test_a_refusal_by_one_ends_both_with_a_sentence(tmp_path: Path) -> None:
    """Process 0 alone looks at the folder, and the other hears of it."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "something").touch()
    (code, _, err), (other_code, _, other_err) = finish(start(*command(tmp_path / "run", 640)))
    assert code == 2 and "error in process 0: run_dir=" in err and "is not empty" in err, err
    assert other_code == 1 and "error in process 1: Process 0 failed (ValueError: run_dir=" in other_err, other_err
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["something"]


BREAKS_IN_PROCESS_1 = """
import dataclasses
import podium
from podium.agents import impala
from podium.host import on_host

podium.distributed.initialize()
catch = on_host(podium.envs.make("podium/Catch"))

def make(num_envs, seed, first_index):
    env, calls = catch.make(num_envs, seed, first_index), []
    send = env.send
    def send_or_break(action):
        calls.append(1)
        if len(calls) > 100 and podium.distributed.process_id() == 1:
            raise ZeroDivisionError("the simulator broke")
        send(action)
    env.send = send_or_break
    return env

agent = impala.make(impala.Config(hidden_sizes=(16,)))
broken = dataclasses.replace(catch, make=make)
podium.train(agent, broken, num_steps=10**7, num_envs=8, rollout_length=8, placement=podium.Sebulba(), progress=False)
"""


@pytest.mark.slow
def test_an_actor_that_breaks_in_one_process_ends_both_and_both_say_why() -> None:
    (code, _, err), (other_code, _, other_err) = finish(start("-c", BREAKS_IN_PROCESS_1))
    assert code == other_code == 1, err + other_err
    assert "PeerError: Process 1 failed (ActorError: podium-actor-0 died of ZeroDivisionError" in err, err
    assert "ActorError: podium-actor-0 died of ZeroDivisionError('the simulator broke')" in other_err, other_err


@pytest.mark.slow
def test_slurm_is_detected(tmp_path: Path) -> None:
    """With the variables that `srun` sets, and no others."""
    slurm = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"}
    processes = []
    for number, env in enumerate(environments()):
        kept = {name: value for name, value in env.items() if not name.startswith(("JAX_C", "JAX_N", "JAX_P"))}
        kept |= {"JAX_PLATFORMS": "cpu", "SLURM_PROCID": str(number), "SLURM_LOCALID": str(number), **slurm}
        words = "import podium, jax; podium.distributed.initialize(); print(jax.process_count(), jax.process_index())"
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", words], env=kept, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    ended = finish(processes)
    assert [out.split("\n")[0] for _, out, _ in ended] == ["2 0", "2 1"], ended
