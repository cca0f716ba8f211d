"""Sinks: the metrics file stays valid and whole, and no logger but it can end a run."""

from __future__ import annotations

import io
import json
import math
import sys
import types
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from podium.sinks import (
    CurveSink,
    JsonlSink,
    Sinks,
    TerminalSink,
    WandbSink,
    interval,
    plot_curve,
    progress_line,
    read_metrics,
)


def test_jsonl_rows_are_valid_json_at_once(tmp_path: Path):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.write({"env_steps": 10, "loss": float("nan"), "value": float("-inf")})
    sink.write({"env_steps": np.int64(20), "loss": jnp.float32(0.5), "episode_return": np.array([1.0, np.nan])})

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()  # Before close: each row is on disk.
    assert [json.loads(line, parse_constant=refuse) for line in lines] == [
        {"env_steps": 10, "loss": None, "value": None},
        {"env_steps": 20, "loss": 0.5, "episode_return": [1.0, None]},
    ]
    sink.close({})
    sink.close({})


def test_jsonl_resumes_without_gap_or_double(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    first = JsonlSink(path)
    for step in (10, 20, 30, 40):
        first.write({"env_steps": step})
    with open(path, "a") as file:
        file.write('{"env_steps": 50, "lo')  # Killed while writing.
    assert [row["env_steps"] for row in read_metrics(path)] == [10, 20, 30, 40]
    second = JsonlSink(path)
    assert second.truncate_after(20) == 2
    assert path.read_text() == '{"env_steps": 10}\n{"env_steps": 20}\n'
    for step in (30, 40):
        second.write({"env_steps": step})
    assert [row["env_steps"] for row in read_metrics(path)] == [10, 20, 30, 40]
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_jsonl_cut_at_every_byte_loses_at_most_the_last_row(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    whole = b'{"env_steps": 10, "loss": 0.5}\n{"env_steps": 20, "loss": 0.25}\n'
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        JsonlSink(path).write({"env_steps": 30})
        steps = [row["env_steps"] for row in read_metrics(path)]
        expected = [10] * (cut >= 30) + [20] * (cut >= len(whole) - 1) + [30]
        assert steps == expected, cut


def test_jsonl_refuses_a_broken_line_in_the_middle(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"env_steps": 1}\n{"env\n{"env_steps": 3}\n')
    with pytest.raises(ValueError, match="metrics.jsonl, line 2 is not a JSON object"):
        read_metrics(path)


def test_truncating_survives_a_failing_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"env_steps": 1}\n{"env_steps": 2}\n')

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="No space left"):
        JsonlSink(path).truncate_after(1)
    assert len(read_metrics(path)) == 2 and len(list(tmp_path.iterdir())) == 1


def test_the_metrics_file_is_essential(tmp_path: Path):
    (tmp_path / "metrics.jsonl").mkdir()
    fan = Sinks([JsonlSink(tmp_path / "metrics.jsonl")])
    with pytest.raises(OSError, match="metrics.jsonl"):
        fan.write({"env_steps": 1})


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_surfaces(monkeypatch: pytest.MonkeyPatch):
    sink = JsonlSink(Path("/dev/full"))
    monkeypatch.setattr(sink, "truncate_after", lambda _: 0)
    with pytest.raises(OSError, match="/dev/full"):
        sink.write({"env_steps": 1})


class Recorder:
    """Counts, and raises where told to."""

    def __init__(self, fail: str = ""):
        self.fail = fail
        self.rows: list[Any] = []
        self.summary: Any = None

    def write(self, row: Any) -> None:
        if self.fail == "write":
            raise RuntimeError("broken logger")
        self.rows.append(row)

    def close(self, summary: Any) -> None:
        if self.fail == "close":
            raise RuntimeError("broken logger")
        self.summary = summary


def test_a_raising_sink_is_warned_about_once_and_dropped():
    good, bad = Recorder(), Recorder("write")
    fan = Sinks([bad, good])
    with pytest.warns(
        UserWarning, match="Recorder failed and is off from here on: RuntimeError: broken logger"
    ) as caught:
        fan.write({"env_steps": 1})
        fan.write({"env_steps": 2})
    assert len(caught) == 1 and len(good.rows) == 2 and list(fan) == [good]
    fan.close({"x": 1})
    assert good.summary == {"x": 1}


def test_every_sink_is_closed_though_one_raises():
    first, second = Recorder("close"), Recorder()
    first.essential = True  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="broken logger"):
        Sinks([first, second]).close({"x": 1})
    assert second.summary == {"x": 1}


def test_terminal_prints_plain_lines_where_there_is_no_terminal():
    stream = io.StringIO()
    sink = TerminalSink(1000, stream=stream, seconds_between_lines=1e9)
    sink.write({"env_steps": 100, "steps_per_second": 50.0, "episode_return": 12.345, "eval_return": 20.0})
    for step in (200, 300, 1000):
        sink.write({"env_steps": step, "steps_per_second": 50.0, "episode_return": float("nan")})
    sink.close({})
    assert stream.getvalue().splitlines() == [
        " 10%  100/1,000 steps  50 steps/s  episode_return 12.35  eval_return 20  ETA 0:00:18",
        "100%  1,000/1,000 steps  50 steps/s  eval_return 20  ETA 0:00:00",
    ]


def test_terminal_keeps_one_live_line(monkeypatch: pytest.MonkeyPatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    sink = TerminalSink(100, stream=stream)
    for step in range(0, 101, 10):
        sink.write({"env_steps": step})
    sink.close({})
    assert "100%  100/100 steps" in stream.getvalue() and stream.getvalue().count("\n") <= 2
    monkeypatch.setenv("CI", "true")
    assert not TerminalSink(100, stream=Terminal())._is_terminal


def test_terminal_off_says_nothing():
    stream = io.StringIO()
    sink = TerminalSink(10, progress=False, stream=stream)
    sink.write({"env_steps": 1})
    sink.close({})
    assert stream.getvalue() == ""


def test_progress_line_takes_lists_per_seed():
    assert "episode_return 2" in progress_line({"env_steps": 1, "episode_return": [1.0, 3.0, None]}, 10)


def test_progress_line_tells_of_workers():
    lost = {"dropped_gradients": 2.0, "nonfinite_gradients": 1.0}
    row = {
        "env_steps": 1,
        "policy_lag_mean": 1.5,
        "policy_lag_max": 3.0,
        "worker_idle": 0.25,
        "server_idle": 0.5,
        **lost,
    }
    assert "lag 1.5, at most 3  3 dropped  idle: workers 25% server 50%" in progress_line(row, 10)
    assert "lag" not in progress_line(row | {"policy_lag_mean": math.nan}, 10)


def test_curve_is_a_png(tmp_path: Path):
    sink = CurveSink(tmp_path / "curve.png", rows=[{"env_steps": 0, "episode_return": 1.0, "loss": 3}])
    for step in range(10, 100, 10):
        sink.write({"env_steps": step, "episode_return": [step, step + 2.0, None], "eval_return": float(step)})
    sink.write({"env_steps": 100, "episode_return": float("nan")})
    sink.close({})
    assert (tmp_path / "curve.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    plot_curve([], tmp_path / "empty.png")
    assert (tmp_path / "empty.png").stat().st_size > 1000


def test_interval_is_students():
    # Mean 2, s = 1, n = 3: 4.302653 * 1 / sqrt(3) = 2.484138.
    low, high = interval([1.0, 2.0, 3.0])
    assert math.isclose(low, 2 - 2.484138, rel_tol=1e-5) and math.isclose(high, 2 + 2.484138, rel_tol=1e-5)
    assert interval([5.0]) == (5.0, 5.0) == interval([5.0, math.nan])
    assert all(map(math.isnan, interval([])))


def test_interval_covers_the_mean_as_often_as_it_says():
    samples = np.random.default_rng(0).normal(size=(2000, 5))
    covered = [low < 0 < high for low, high in map(interval, samples)]
    assert 0.93 < np.mean(covered) < 0.97


class FakeRun:
    def __init__(self, fail: str):
        self.fail, self.logged, self.summary, self.finished = fail, [], {}, False

    def log(self, row: Any, step: int) -> None:
        if self.fail == "log" and len(self.logged) == 1:
            raise ConnectionError("wandb is away")
        self.logged.append((step, row))

    def finish(self) -> None:
        if self.fail == "finish":
            raise ConnectionError("wandb is away")
        self.finished = True


def fake_wandb(monkeypatch: pytest.MonkeyPatch, fail: str = "", key: bool = True) -> dict[str, Any]:
    """Put a wandb in place that fails at one point; return what it was started with, and its run."""
    seen: dict[str, Any] = {"run": FakeRun(fail)}

    def init(**arguments: Any) -> FakeRun:
        if fail == "init":
            raise ConnectionError("wandb is away")
        seen.update(arguments)
        return seen["run"]

    module = types.SimpleNamespace(init=init, login=lambda prompt: key, Settings=lambda **settings: settings)
    monkeypatch.setitem(sys.modules, "wandb", module)
    return seen


def test_wandb_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen = fake_wandb(monkeypatch)
    sink = WandbSink("online", "podium", {"lr": 1e-3}, tmp_path)
    sink.write({"env_steps": 10, "loss": [1.0, 3.0]})
    sink.close({"eval_return": 4.0})
    run = seen["run"]
    assert seen["mode"] == "online" and seen["config"] == {"lr": 1e-3}
    assert run.logged == [(10, {"env_steps": 10.0, "loss": 2.0})]
    assert run.summary == {"eval_return": 4.0} and run.finished


@pytest.mark.parametrize("fail", ["init", "log", "finish"])
def test_wandb_failing_is_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fail: str):
    fake_wandb(monkeypatch, fail)
    with pytest.warns(UserWarning, match="wandb failed and is off from here on: ConnectionError") as caught:
        sink = WandbSink("offline", "podium", {}, tmp_path)
        for step in range(5):
            sink.write({"env_steps": step})
        sink.close({})
    assert len(caught) == 1


def test_wandb_without_a_key_is_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen = fake_wandb(monkeypatch, key=False)
    with pytest.warns(UserWarning, match="no API key, so it is offline"):
        WandbSink("online", "podium", {}, tmp_path)
    assert seen["mode"] == "offline"


def test_wandb_missing_is_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.warns(UserWarning, match="wandb is not installed") as caught:
        sink = WandbSink("offline", "podium", {}, tmp_path)
        sink.write({"env_steps": 1})
        sink.close({})
    assert len(caught) == 1


def test_wandb_disabled_touches_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    sink = WandbSink("disabled", "podium", {}, tmp_path / "none")
    sink.write({"env_steps": 1})
    sink.close({})
    assert not (tmp_path / "none").exists()
    with pytest.raises(ValueError, match="wandb='on' is not a mode"):
        WandbSink("on", "podium", {}, tmp_path)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("default")
def test_the_real_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("wandb")
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "wandb-home"))
    sink = WandbSink("offline", "podium", {"lr": 1e-3}, tmp_path)
    assert sink._run is not None
    sink.write({"env_steps": 10, "loss": 1.0})
    sink.close({"eval_return": 1.0})
    assert list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
