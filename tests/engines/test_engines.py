"""Engines: the same calls of the same toy, in this process and in a Ray actor; and what becomes of a lost process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podium.placement.remote.engine import EngineError, FragmentError, Handle, LostError, Threads, resolve_engine
from podium.placement.remote.ray import RayEngine

pytestmark = pytest.mark.xdist_group("ray")

ROOT = Path(__file__).resolve().parents[2]


class Toy:
    """A fragment that counts."""

    def __init__(self, at: int = 0):
        self.count = at

    def add(self, number: Any, key: Any = None) -> Any:
        self.count += 1
        return {"sum": jnp.asarray(number) + self.count, "key": key, "words": "added", "nothing": None}

    def fail(self) -> None:
        raise ZeroDivisionError("the toy broke")

    def pid(self) -> int:
        return os.getpid()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def surroundings(self) -> dict[str, Any]:
        return {"platform": jax.devices()[0].platform, "devices": jax.device_count(), **os.environ}


def nothing() -> None:
    """Wait on."""


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Iterator[Callable[..., Handle]]:
    """Return what places toys in Ray actors; they are closed afterwards."""
    request.getfixturevalue("by_value")
    handles: list[Handle] = []

    def place(make: Callable[[], Any] = Toy, engine: Any = None) -> Handle:
        handles.append((engine or RayEngine()).place("podium-toy", make))
        return handles[-1]

    yield place
    for handle in handles:
        handle.close()


@pytest.mark.slow
def test_calls_are_alike_in_both_engines(place: Callable[..., Handle]) -> None:
    key = jax.random.key(3)
    for handle in (Threads().place("podium-toy", lambda: Toy(4)), place(lambda: Toy(4))):
        first = handle.call("add", jnp.float32(1), key, heartbeat=nothing)
        assert first["sum"] == 6 and first["words"] == "added" and first["nothing"] is None
        assert (jax.random.key_data(first["key"]) == jax.random.key_data(key)).all()
        replies = [handle.start("add", np.arange(3)) for _ in range(2)]
        np.testing.assert_array_equal([reply.result(nothing)["sum"] for reply in replies], [[6, 7, 8], [7, 8, 9]])
    assert isinstance(first["sum"], np.ndarray)


def test_a_process_computes_on_its_share_of_the_cpu_and_errors_keep_their_traceback(
    place: Callable[..., Handle],
) -> None:
    handle = place(Toy, RayEngine({"num_cpus": 2, "runtime_env": {"env_vars": {"PODIUM_TEST": "here"}}}))
    seen = handle.call("surroundings", heartbeat=nothing)
    assert seen["platform"] == "cpu" and seen["devices"] == 1
    assert seen["PJRT_NPROC"] == "2" and seen["JAX_PLATFORMS"] == "cpu" and seen["PODIUM_TEST"] == "here"
    on_gpu = RayEngine({"num_gpus": 1}).actor_options()["runtime_env"]["env_vars"]
    assert "JAX_PLATFORMS" not in on_gpu and on_gpu["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    with pytest.raises(FragmentError, match=r"(?s)podium-toy raised ZeroDivisionError.*in fail.*the toy broke"):
        handle.call("fail", heartbeat=nothing)
    assert handle.call("add", 0, heartbeat=nothing)["sum"] == 1

    def make() -> Toy:
        raise OSError("no simulator here")

    with pytest.raises(FragmentError, match="(?s)raised OSError.*no simulator here"):
        place(make).call("add", 0, heartbeat=nothing)


def test_a_killed_process_is_lost_and_can_be_made_anew(place: Callable[..., Handle], gone: Any) -> None:
    handle = place(lambda: Toy(1))
    pid = handle.call("pid", heartbeat=nothing)
    reply = handle.start("sleep", 60.0)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(LostError, match=rf"podium-toy \({pid}\) is gone"):
        reply.result(nothing)
    with pytest.raises(LostError):
        handle.call("add", 0, heartbeat=nothing)
    handle.restart()
    assert handle.call("add", 0, heartbeat=nothing)["sum"] == 2
    again = handle.call("pid", heartbeat=nothing)
    handle.close()
    handle.close()
    gone(pid, again)
    with pytest.raises(LostError):
        handle.call("add", 0, heartbeat=nothing)


def test_a_heartbeat_can_end_a_call_that_hangs(place: Callable[..., Handle], gone: Any) -> None:
    handle = place()
    pid = handle.call("pid", heartbeat=nothing)
    calls = []

    def heartbeat() -> None:
        calls.append(time.monotonic())
        if len(calls) == 3:
            raise InterruptedError("the run is over")

    with pytest.raises(InterruptedError):
        handle.call("sleep", 600.0, heartbeat=heartbeat)
    assert calls[2] - calls[0] < 5
    handle.close()
    gone(pid)


def test_what_asks_for_too_much_says_so(place: Callable[..., Handle]) -> None:
    handle = place(Toy, RayEngine({"num_cpus": 99}, start_timeout=1.0))
    with pytest.raises(EngineError, match="does not stand after start_timeout=1 s.*asks for num_cpus=99.*free in the"):
        handle.call("add", 0, heartbeat=nothing)


def test_what_cannot_be_sent_is_refused_in_a_sentence(place: Callable[..., Handle]) -> None:
    lock = threading.Lock()
    with pytest.raises(ValueError, match="(?s)podium-toy cannot be sent to another process.*lock"):
        place(lambda: lock)


@pytest.mark.extras
def test_engines_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_engine("threads") == Threads() and not Threads.apart
    assert resolve_engine("ray") == RayEngine() and RayEngine.apart
    assert resolve_engine(RayEngine({"num_cpus": 2})).options == {"num_cpus": 2}
    with pytest.raises(ValueError, match="engine='dask' is not known; use 'threads' or 'ray'"):
        resolve_engine("dask")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="start_timeout=0 must be"):
        RayEngine(start_timeout=0)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r'pip install "podium\[ray\]"'):
        RayEngine().place("podium-toy", Toy)


LOSE_THE_HEAD = """
import os, signal, subprocess, sys, ray
from podium.placement.remote.ray import RayEngine

class Toy:
    def pid(self): return os.getpid()
    def sleep(self): __import__("time").sleep(600)

ray.init(num_cpus=2, object_store_memory=100 * 2**20, include_dashboard=False, log_to_driver=False)
handle = RayEngine().place("podium-toy", Toy)
print("pids", handle.call("pid", heartbeat=lambda: None), flush=True)
reply = handle.start("sleep")
listed = subprocess.run(["ps", "-ewwo", "pid,ppid,args"], capture_output=True, text=True).stdout.splitlines()
for pid, parent, args in (line.split(None, 2) for line in listed[1:]):
    if parent == str(os.getpid()) and "gcs_server" in args.split()[0]:
        os.kill(int(pid), signal.SIGKILL)
        print("killed", flush=True)
reply.result(lambda: None)
"""


def test_a_lost_head_ends_the_run_with_a_sentence(tmp_path: Path, gone: Any) -> None:
    pytest.importorskip("ray", reason="the extra ray is not installed")
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", LOSE_THE_HEAD],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    print(done.stdout, done.stderr, time.monotonic() - began)
    assert "killed" in done.stdout
    assert done.returncode == 1
    assert "The head of the Ray cluster at" in done.stderr and "go on with resume=True" in done.stderr
    gone(int(done.stdout.split()[1]), seconds=60)
