"""Run folders: made whole or not at all, never overwritten, and resumed only under the same configuration."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from podium import runs
from podium.files import to_jsonable, write_atomic, write_json
from podium.runs import RunFolder, check_new_folder, compare_config, default_run_dir


def test_create_and_open(tmp_path: Path):
    made = RunFolder.create(tmp_path / "a" / "b" / "run", {"lr": 1e-3, "layers": (64, 64)}, placement="anakin on 8")
    assert [path.name for path in made.path.iterdir()] == ["config.json"]
    opened = RunFolder.open(str(made.path))
    assert opened.config == made.config == {"lr": 1e-3, "layers": [64, 64]}
    assert opened.record == made.record
    assert opened.record["schema"] == 1 and opened.record["placement"] == "anakin on 8"
    assert opened.record["versions"]["jax"] == jax.__version__
    assert {"python", "jaxlib", "flax", "optax", "gymnax", "orbax-checkpoint", "podium"} <= set(
        opened.record["versions"]
    )
    commit = opened.record["git_commit"]
    assert commit is None or len(commit.removesuffix("+changes")) == 40
    assert str(tmp_path) not in (made.path / "config.json").read_text()
    assert (opened.metrics.name, opened.curve.name, opened.checkpoints.name) == (
        "metrics.jsonl",
        "curve.png",
        "checkpoints",
    )
    assert opened.read_summary() is None
    opened.write_summary({"eval_return": float("nan"), "num_devices": np.int32(8)})
    assert opened.read_summary() == {"eval_return": None, "num_devices": 8}
    for torn in ("{", "[1]", ""):
        opened.summary.write_text(torn)
        assert opened.read_summary() is None


def test_an_empty_folder_will_do(tmp_path: Path):
    (tmp_path / "run").mkdir()
    RunFolder.create(tmp_path / "run", {})
    RunFolder.open(tmp_path / "run")


def test_refuses_a_folder_in_use_and_names_both_ways_on(tmp_path: Path):
    RunFolder.create(tmp_path / "run", {"lr": 1})
    with pytest.raises(ValueError, match="is not empty; add --resume to resume it, or choose another --run-dir"):
        RunFolder.create(tmp_path / "run", {"lr": 2})
    assert RunFolder.open(tmp_path / "run").config == {"lr": 1}


def test_refuses_a_file_in_the_way(tmp_path: Path):
    (tmp_path / "file").write_text("here")
    with pytest.raises(ValueError, match="is a file, not a folder; choose another --run-dir"):
        RunFolder.create(tmp_path / "file", {})
    with pytest.raises(ValueError, match="is a file; choose another --run-dir"):
        RunFolder.create(tmp_path / "file" / "x" / "run", {})
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (".", "names no new folder; choose another --run-dir"),
        ("", "names no new folder"),
        ("..", "names no new folder"),
        ("a" * 300, r"can name no folder \(File name too long\); choose another --run-dir"),
        ("a\0b", r"can name no folder \(embedded null byte\)"),
    ],
)
def test_refuses_what_can_name_no_folder(name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=words):
        check_new_folder(name)
    with pytest.raises(ValueError, match=r"^run_dir="):
        RunFolder.open(name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_refuses_a_read_only_folder(tmp_path: Path):
    tmp_path.chmod(0o555)
    try:
        with pytest.raises(ValueError, match="read-only"):
            RunFolder.create(tmp_path / "run", {})
    finally:
        tmp_path.chmod(0o755)


def test_refuses_a_read_only_folder_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(ValueError, match=r"run cannot be written \(read-only\); choose another --run-dir"):
        RunFolder.create(tmp_path / "run", {})
    assert list(tmp_path.iterdir()) == []


def test_refuses_a_full_disk_before_writing(tmp_path: Path):
    with pytest.raises(ValueError, match="MiB free, and a run wants at least"):
        RunFolder.create(tmp_path / "a" / "run", {}, min_free_bytes=2**62)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("call", ["os.replace", "os.rename", "os.fsync"])
def test_leaves_nothing_behind_when_writing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str):
    def fail(*_: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(call, fail)
        with pytest.raises(ValueError, match=r"cannot be written \(Read-only file system\); choose another --run-dir"):
            RunFolder.create(tmp_path / "a" / "b" / "run", {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "has no config.json"),
        ("{", r"config.json cannot be read \(JSONDecodeError\)"),
        ("[1]", "has no object named config"),
        ('{"schema": 1, "config": 3}', "has no object named config"),
        ('{"schema": 0, "config": {}}', "schema=0; this podium reads schema=1"),
        ('{"config": {}}', "schema=None"),
        ("[" * 100_000, "config.json cannot be read"),
    ],
)
def test_open_refuses_what_is_no_run(tmp_path: Path, content: str | None, message: str):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        RunFolder.open(tmp_path)


def test_open_refuses_a_missing_folder(tmp_path: Path):
    with pytest.raises(ValueError, match="is no folder"):
        RunFolder.open(tmp_path / "none")


def test_the_same_config_compares_equal_through_json():
    config = {"agent": {"lr": 1e-3, "layers": (64, 64), "nan": float("nan")}, "seed": 1, "empty": {}}
    compare_config(json.loads(json.dumps(to_jsonable(config))), config)
    compare_config({"x": 1}, {"x": 1.0})


def test_names_every_field_that_differs():
    old = {"agent": {"lr": 0.001, "gamma": 0.99}, "seed": 1, "total_steps": 10, "gone": None}
    new = {"agent": {"lr": 0.0003, "gamma": 0.99}, "seed": 2, "total_steps": 20, "added": True}
    with pytest.raises(ValueError) as caught:
        compare_config(old, new, {"total_steps", "wandb"})
    assert str(caught.value) == (
        "This run was made with another configuration: added was not set and is True; agent.lr was 0.001 and is "
        "0.0003; gone was None and is not set; seed was 1 and is 2. On --resume may change: total_steps, wandb; "
        "use another --run-dir for a new run."
    )
    compare_config(old, new, {"total_steps", "agent", "seed", "added", "gone"})
    others = [{"agent": {"name": name, "config": {"gamma": gamma}}} for name, gamma in (("ppo", 0.9), ("dqn", 0.8))]
    with pytest.raises(ValueError, match=r"another configuration: agent.name was 'ppo' and is 'dqn'\. On --resume"):
        compare_config(*others)
    with pytest.raises(ValueError, match="flag was True and is 1.*nothing may change"):
        compare_config({"flag": True}, {"flag": 1})


def test_a_run_of_0_1_0_does_not_tell_what_was_brought_to_its_agent():
    new = {"agent": {"name": "ppo", "transforms": [], "brought": ["network"]}}
    compare_config({"agent": {"name": "ppo"}}, new)
    with pytest.raises(ValueError, match=r"agent.brought was not set and is \['network'\]"):
        compare_config({"agent": {"name": "ppo", "transforms": []}}, new)


def test_default_run_dir_is_new_and_safe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    first = default_run_dir("ppo ../CartPole/v1")
    assert first.parent == Path("runs") and first.name.startswith("ppo-..-CartPole-v1-2")
    monkeypatch.setattr(runs.datetime, "datetime", Frozen)
    first = default_run_dir("ppo")
    first.mkdir(parents=True)
    assert default_run_dir("ppo").name == f"{first.name}-2"
    assert default_run_dir("../..").parent == Path("runs")


def test_processes_that_begin_in_the_same_second_have_folders_of_their_own(tmp_path: Path, monkeypatch: Any):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runs.datetime, "datetime", Frozen)
    with runs.new_run_dir("ppo") as first, runs.new_run_dir("ppo") as second:
        assert [path.name[-2:] for path in (first, second)][1] == "-2" and first.is_dir() and second.is_dir()
        check_new_folder(second)
        (first / "kept").touch()
    assert [path.name for path in Path("runs").iterdir()] == [first.name], "what was written"
    (first / "kept").unlink()
    first.rmdir()
    with pytest.raises(KeyError), runs.new_run_dir("ppo"):
        raise KeyError
    assert not Path("runs").exists()


class Frozen:
    """A clock that stands still."""

    @staticmethod
    def now() -> Any:
        import datetime

        return datetime.date(2026, 1, 2)


def test_no_commit_without_a_checkout(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "")
    assert runs._git_commit() is None


def test_to_jsonable():
    @dataclasses.dataclass
    class Thing:
        x: int = 1

    value = {1: (Path("a"), {3, 2}, np.float32(np.inf)), "k": np.arange(2), "t": Thing(), "b": np.bool_(True), "f": int}
    assert to_jsonable(value) == {"1": ["a", [2, 3], None], "k": [0, 1], "t": {"x": 1}, "b": True, "f": "<class 'int'>"}


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "summary.json"
    write_json(path, {"a": 1})

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError):
        write_atomic(path, b"new")
    assert json.loads(path.read_text()) == {"a": 1} and [file.name for file in tmp_path.iterdir()] == ["summary.json"]
