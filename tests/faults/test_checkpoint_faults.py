"""Checkpoints under faults: cut, flipped, missing, killed, full disk, hostile. Damage is named and never loaded."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from podium.checkpoint import ARRAYS, DESCRIPTION, MANIFEST, CheckpointError, Checkpoints, arrays, files

ROOT = Path(__file__).resolve().parents[2]
TARGET = {"w": jnp.zeros((50, 40)), "count": jnp.zeros((), int)}


def state_at(step: int) -> dict[str, Any]:
    return {"w": np.random.default_rng(step).normal(size=(50, 40)).astype(np.float32), "count": np.int32(step)}


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def reseal(folder: Path) -> None:
    """Write the manifest anew, as somebody who means harm would."""
    (folder / MANIFEST).unlink()
    (folder / MANIFEST).write_bytes(files.encode_manifest(folder))


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    """Two good steps, 10 and 20."""
    made = Checkpoints(tmp_path / "checkpoints")
    for step in (10, 20):
        made.save(step, state_at(step), {"eval_return": step})
    made.finish()
    return made


def assert_falls_back(checkpoints: Checkpoints, message: str) -> None:
    """Step 20 is refused with `message`; step 10 serves."""
    with pytest.raises(CheckpointError, match=message):
        checkpoints.restore(TARGET, fallback=False)
    with pytest.warns(UserWarning, match=message) as caught:
        state, meta, step = checkpoints.restore(TARGET)
    assert "older checkpoint 10 instead" in str(caught[0].message)
    assert step == 10 and meta == {"eval_return": 10}
    np.testing.assert_array_equal(state["w"], state_at(10)["w"])


def test_a_flipped_bit_anywhere_is_detected(checkpoints: Checkpoints):
    rng = random.Random(0)
    paths = files_of(checkpoints.directory / "20")
    assert {MANIFEST, DESCRIPTION} < {path.name for path in paths} and len(paths) > 5
    for path in paths:
        good = path.read_bytes()
        for offset in {0, len(good) - 1, *(rng.randrange(len(good)) for _ in range(6))}:
            bad = bytearray(good)
            bad[offset] ^= 1 << rng.randrange(8)
            path.write_bytes(bytes(bad))
            with pytest.raises(CheckpointError, match=path.name):
                checkpoints.verify(20)
        path.write_bytes(good)
    checkpoints.verify(20)


def test_flipped_bytes_of_an_array_fall_back(checkpoints: Checkpoints):
    largest = max(files_of(checkpoints.directory / "20" / ARRAYS), key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 0xFF
    largest.write_bytes(bytes(data))
    assert_falls_back(checkpoints, f"{largest.name} was changed after it was saved")


def test_a_cut_or_missing_file_falls_back(checkpoints: Checkpoints, recwarn: pytest.WarningsRecorder):
    folder = checkpoints.directory / "20"
    for path in files_of(folder):
        good = path.read_bytes()
        path.write_bytes(good[: len(good) // 2])
        with pytest.raises(CheckpointError, match=path.name):
            checkpoints.restore(TARGET, fallback=False)
        if path.name != MANIFEST:
            path.unlink()
            assert_falls_back(checkpoints, f"{path.name} is missing")
        path.write_bytes(good)
    path = folder / DESCRIPTION
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-10])
    assert_falls_back(checkpoints, f"{DESCRIPTION} has {size - 10} bytes, not the {size} saved")


def test_a_missing_manifest_is_no_checkpoint(checkpoints: Checkpoints):
    (checkpoints.directory / "20" / MANIFEST).unlink()
    assert checkpoints.steps() == [10]
    with pytest.warns(UserWarning, match="checkpoint 20 has no manifest.json"):
        assert checkpoints.restore(TARGET)[2] == 10


def test_says_so_when_nothing_is_good(checkpoints: Checkpoints):
    for step in (10, 20):
        (checkpoints.directory / str(step) / DESCRIPTION).write_bytes(b"{}")
    with (
        pytest.warns(UserWarning, match="checkpoint 20"),
        pytest.raises(CheckpointError, match="No good checkpoint in .*The last one tried: checkpoint 10"),
    ):
        checkpoints.restore(TARGET)


def test_a_damaged_step_goes_once_a_newer_one_is_whole(checkpoints: Checkpoints):
    (checkpoints.directory / "20" / DESCRIPTION).write_bytes(b"{}")
    again = Checkpoints(checkpoints.directory)
    with pytest.warns(UserWarning, match="checkpoint 20"):
        again.restore(TARGET)
    again.save(15, state_at(15))
    again.finish()
    assert again.steps() == [10, 15]
    assert again.restore(TARGET)[2] == 15


def test_leftovers_of_a_killed_save_go_with_the_next_save_only(checkpoints: Checkpoints):
    leftovers = [checkpoints.directory / name for name in ("30.partial", "30", "30.orbax-checkpoint-tmp")]
    for leftover in leftovers:
        (leftover / ARRAYS).mkdir(parents=True)
    again = Checkpoints(checkpoints.directory)
    with pytest.warns(UserWarning, match="checkpoint 30 has no manifest"):
        again.restore(TARGET)
    assert all(leftover.exists() for leftover in leftovers)
    again.save(25, state_at(25))
    again.finish()
    assert not any(leftover.exists() for leftover in leftovers)


class Bomb:
    """Leaves a mark when unpickled."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return (os.mkdir, (str(self.mark),))


def test_a_step_that_was_to_be_replaced_is_there_until_its_successor_is(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
):
    rename = os.rename

    def stop_before_it_is_in_place(old: Path, new: Path) -> None:
        if Path(old).name == "20.partial":
            raise OSError("stopped")
        rename(old, new)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", stop_before_it_is_in_place)
        checkpoints.save(20, state_at(99))
        with pytest.raises(CheckpointError, match="the newest complete checkpoint is 20"):
            checkpoints.finish()
    assert not (checkpoints.directory / "20").exists()
    later = Checkpoints(checkpoints.directory)
    assert later.steps() == [10, 20]
    later.verify(20)
    assert later.restore(state_at(0))[2] == 20
    later.save(30, state_at(30))
    later.finish()
    assert later.steps() == [10, 20, 30] and (checkpoints.directory / "20").is_dir()
    assert later.restore_raw(20)[2] == 20


def test_pickles_are_never_opened(checkpoints: Checkpoints, tmp_path: Path):
    mark = tmp_path / "mark"
    bomb = pickle.dumps(Bomb(mark))
    folder = checkpoints.directory / "20"
    (folder / "state.pkl").write_bytes(bomb)
    assert_falls_back(checkpoints, "state.pkl is not in the manifest")
    for path in files_of(folder):
        path.write_bytes(bomb)
    reseal(folder)
    with pytest.raises(CheckpointError):
        checkpoints.restore(TARGET, fallback=False)
    (folder / MANIFEST).write_bytes(bomb)
    with pytest.raises(CheckpointError, match=MANIFEST):
        checkpoints.restore(TARGET, fallback=False)
    assert not mark.exists()


@pytest.mark.parametrize(
    "name", ["../10/checkpoint.json", "/etc/hostname", "arrays/../checkpoint.json", "..\\x", "C:x"]
)
def test_a_manifest_cannot_point_outside(checkpoints: Checkpoints, name: str):
    path = checkpoints.directory / "20" / MANIFEST
    listed = json.loads(path.read_bytes())["files"]
    path.write_bytes(files.encode({**listed, name: {"size": 1, "sha256": "0" * 64}}))
    assert_falls_back(checkpoints, "names the unsafe path")


@pytest.mark.parametrize("name", ["10", "20/checkpoint.json", "20/arrays", "20/manifest.json"])
def test_links_are_refused(checkpoints: Checkpoints, tmp_path: Path, name: str):
    place = checkpoints.directory / name
    shutil.move(place, tmp_path / "elsewhere")
    place.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="link"):
        checkpoints.verify(int(name.split("/")[0]))


def test_a_huge_shape_is_refused_before_it_is_read(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch):
    folder = checkpoints.directory / "20"
    description = json.loads((folder / DESCRIPTION).read_bytes())
    description["leaves"]["w"]["shape"] = [10**9, 10**9]
    (folder / DESCRIPTION).write_text(json.dumps(description))
    reseal(folder)
    with pytest.raises(
        CheckpointError, match=r"w is float32\[1000000000, 1000000000\] there and float32\[50, 40\] here"
    ):
        checkpoints.restore(TARGET)
    with pytest.raises(CheckpointError, match=r"described as \[1000000000, 1000000000\] but stored as \[50, 40\]"):
        checkpoints.restore_raw(20)


def test_a_description_that_lies_about_the_stored_shape_is_refused(tmp_path: Path):
    """The arrays are larger than the description says: the record of the arrays is compared before reading."""
    other = Checkpoints(tmp_path)
    other.save(1, {**state_at(1), "w": np.zeros((500, 400), np.float32)})
    other.finish()
    description = json.loads((tmp_path / "1" / DESCRIPTION).read_bytes())
    description["leaves"]["w"]["shape"] = [50, 40]
    (tmp_path / "1" / DESCRIPTION).write_text(json.dumps(description))
    reseal(tmp_path / "1")
    with pytest.raises(CheckpointError, match=r"described as \[50, 40\] but stored as \[500, 400\]"):
        other.restore(TARGET)


@pytest.mark.parametrize(
    "change",
    [
        {"leaves": []},
        {"leaves": {"w": 1}},
        {"leaves": {"w": {"dtype": "float32", "shape": [-1]}}},
        {"leaves": {"w": {"dtype": "float32", "shape": [], "key": "os.system"}}},
        {"meta": 3},
        {"schema": 0},
    ],
)
def test_a_strange_description_is_refused(checkpoints: Checkpoints, change: dict[str, Any]):
    folder = checkpoints.directory / "20"
    description = json.loads((folder / DESCRIPTION).read_bytes())
    (folder / DESCRIPTION).write_text(json.dumps(description | change))
    reseal(folder)
    with pytest.raises(CheckpointError):
        checkpoints.restore(TARGET, fallback=False)


KILLED = """
import sys
from pathlib import Path
import numpy as np
from podium.checkpoint import Checkpoints
checkpoints = Checkpoints(Path(sys.argv[1]), keep=2)
for step in range(1, 100_000):
    checkpoints.save(step, {"w": np.full(200_000, step, np.float32), "count": np.int32(step)}, {"eval_return": -step})
    if step == 2:
        print("ready", flush=True)
"""


def kill_during_saves(directory: Path, delay: float) -> None:
    """Save in another process, kill it `delay` seconds after its first save; what is left must be good."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", KILLED, str(directory)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
    checkpoints = Checkpoints(directory, keep=2)
    steps = checkpoints.steps()
    assert steps
    for step in steps:
        checkpoints.verify(step)
    state, meta, step = checkpoints.restore({"w": np.zeros(200_000, np.float32), "count": np.int32(0)})
    assert step == steps[-1] == -meta["eval_return"] == state["count"]
    assert (state["w"] == step).all()
    checkpoints.save(step + 1, {"w": state["w"] + 1, "count": state["count"] + 1})
    checkpoints.close()
    assert all(path.name.isdigit() and (path / MANIFEST).exists() for path in directory.iterdir())


@pytest.mark.filterwarnings("ignore:checkpoint .* has no manifest")
@pytest.mark.parametrize("seed", range(4))
def test_kill_during_a_save(tmp_path: Path, seed: int):
    kill_during_saves(tmp_path, random.Random(seed).uniform(0, 0.3))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:checkpoint .* has no manifest")
@pytest.mark.parametrize("seed", range(20))
def test_kill_during_a_save_many_times(tmp_path: Path, seed: int):
    kill_during_saves(tmp_path, random.Random(1000 + seed).uniform(0, 0.3))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 4 MiB, where mounting is allowed."""
    folder = tmp_path / "small"
    folder.mkdir()
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a small disk needs root")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("mounting a small disk is not allowed here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_reported_and_the_older_step_lives(small_disk: Path):
    checkpoints = Checkpoints(small_disk / "checkpoints")
    checkpoints.save(1, state_at(1))
    checkpoints.finish()
    noise = np.random.default_rng(0).integers(0, 255, 8 * 2**20, np.uint8)
    checkpoints.save(2, {"noise": noise})  # Returns: the disk is not touched yet.
    with pytest.raises(
        CheckpointError, match="checkpoint 2 could not be written .*; the newest complete checkpoint is 1"
    ):
        checkpoints.finish()
    assert checkpoints.steps() == [1] and [path.name for path in checkpoints.directory.iterdir()] == ["1"]
    checkpoints.save(3, state_at(3))
    assert checkpoints.restore(TARGET)[2] == 3
    checkpoints.close()


@pytest.mark.parametrize("call", ["check", "finish", "save", "restore"])
def test_a_failed_save_surfaces_once(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, call: str):
    def full() -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(arrays, "checkpointer", full)
        checkpoints.save(30, state_at(30))
        while checkpoints._pending is not None and not checkpoints._pending.done():
            time.sleep(0.01)
    calls: dict[str, Callable[[], Any]] = {
        "check": checkpoints.check,
        "finish": checkpoints.finish,
        "save": lambda: checkpoints.save(40, state_at(40)),
        "restore": lambda: checkpoints.restore(TARGET),
    }
    with pytest.raises(
        CheckpointError, match="checkpoint 30 .* the disk is full; the newest complete checkpoint is 20"
    ):
        calls[call]()
    checkpoints.check()
    checkpoints.finish()
    assert checkpoints.restore(TARGET)[2] == 20


def test_check_does_not_wait(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch):
    make = arrays.checkpointer
    monkeypatch.setattr(arrays, "checkpointer", lambda: time.sleep(0.3) or make())
    checkpoints.save(30, state_at(30))
    start = time.perf_counter()
    checkpoints.check()
    assert time.perf_counter() - start < 0.2 and checkpoints.steps() == [10, 20]
    checkpoints.finish()
    assert checkpoints.steps() == [10, 20, 30]


def test_a_file_in_the_way_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    checkpoints = Checkpoints(tmp_path / "file" / "checkpoints")
    checkpoints.save(1, state_at(1))
    with pytest.raises(CheckpointError, match="checkpoint 1 could not be written.*there is no older checkpoint"):
        checkpoints.finish()


def test_the_manifest_holds_plain_sha256(checkpoints: Checkpoints):
    folder = checkpoints.directory / "20"
    listed = json.loads((folder / MANIFEST).read_bytes())["files"]
    assert set(listed) == {path.relative_to(folder).as_posix() for path in files_of(folder)} - {MANIFEST}
    for name, entry in listed.items():
        assert entry == {
            "size": (folder / name).stat().st_size,
            "sha256": hashlib.sha256((folder / name).read_bytes()).hexdigest(),
        }
