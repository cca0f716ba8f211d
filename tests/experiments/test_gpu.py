"""The kit for a GPU: every part is rows of processes that survive one another, and goes on where it was stopped."""

from __future__ import annotations

import importlib.util
import json
import time
import zipfile
from pathlib import Path

import benchmark
import gpu
import gpu_checks
import gpu_game
import gpu_kernels
import processes
import pytest
import wheels


def test_every_piece_is_a_command_that_its_script_reads() -> None:
    for part in (1, 2, 3, 4):
        full, small = gpu.pieces(part, False), gpu.pieces(part, True)
        assert len({piece.name for piece in full}) == len(full) >= len(small) > 0
        assert all(Path(piece.command()[1]).is_file() for piece in full)


def test_a_failing_and_an_endless_piece_leave_the_others_alone_and_are_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ok.py").write_text("print('{\"steps_per_second\": 3.0}')")
    (tmp_path / "fails.py").write_text("import sys; print('the kernel', file=sys.stderr); sys.exit(3)")
    (tmp_path / "endless.py").write_text("import time; time.sleep(60)")
    (tmp_path / "silent.py").write_text("")
    names = ["fails", "silent", "ok", "endless", "late"]
    files = [*names[:-1], "ok"]
    monkeypatch.setattr(processes, "HERE", tmp_path)
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0.0)
    todo = [processes.Piece(name, f"{file}.py", "") for name, file in zip(names, files, strict=True)]
    monkeypatch.setattr(gpu, "pieces", lambda part, small: todo)
    out = tmp_path / "out"
    assert benchmark.main(["gpu", "--part", "2", "--minutes", "0.1", "--out", str(out)]) == 0
    assert json.loads(capsys.readouterr().out)["failed"] == ["fails", "silent", "endless", "late"]
    rows = json.loads((out / "gpu-part-2.json").read_text())
    assert rows["ok"]["steps_per_second"] == 3.0 and (out / "gpu-part-2.png").stat().st_size > 0
    assert (rows["fails"]["error"], rows["fails"]["said"]) == ("exit code 3", ["the kernel"])
    assert rows["silent"]["error"] == "its last line is no JSON"
    assert "ended after" in rows["endless"]["error"] and "no time" in rows["late"]["error"]

    (tmp_path / "ok.py").write_text("print('{\"steps_per_second\": 4.0}')")
    (tmp_path / "endless.py").write_text("print('{}')")
    assert benchmark.main(["gpu", "--part", "2", "--minutes", "1", "--out", str(out)]) == 0
    rows = json.loads((out / "gpu-part-2.json").read_text())
    assert rows["ok"]["steps_per_second"] == 3.0, "what was done is not done again"
    assert rows["late"]["steps_per_second"] == 4.0 and "error" not in rows["endless"]


def test_every_checkpoint_of_a_game_is_played_and_again_where_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails, commands = {"20"}, []

    def podium(command: list[str], seconds: float, variables: dict[str, str]) -> dict[str, object]:
        commands.append(command)
        if command[0] == "train":
            for step in ("10", "20", "30.orbax-checkpoint-tmp"):
                (tmp_path / "boxing" / "checkpoints" / step).mkdir(parents=True, exist_ok=True)
            return {"exit_code": 0}
        step = command[command.index("--step") + 1]
        sampled = command[-1] == "--no-greedy"
        return {"exit_code": 1} if step in fails else {"exit_code": 0, "summary": {"eval_return": int(step) - sampled}}

    monkeypatch.setattr(processes, "podium", podium)
    monkeypatch.setattr(processes, "run", lambda *given, **named: {})
    play = lambda: gpu_game.train("Boxing", 100, tmp_path, time.monotonic() + 60, small=False)["curve"]
    curve = play()
    assert gpu_game.points(curve, "greedy") == [(10, 10)] and gpu_game.points(curve, "sampled") == [(10, 9)]
    fails.clear()
    commands.clear()
    curve = play()
    assert gpu_game.points(curve, "greedy") == [(10, 10), (20, 20)]
    assert [("--resume" in command) for command in commands] == [True, False, False], "what was played is not again"
    assert json.loads((tmp_path / "gpu-boxing.json").read_text())["curve"] == curve
    assert (tmp_path / "gpu-boxing.png").stat().st_size > 0


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--part 9", "part=9"),
        ("--minutes 0", "minutes=0"),
        ("--part 5 --num-steps 0", "num_steps=0"),
        ("--part 5 --game Chess", "game='Chess'"),
    ],
)
def test_what_makes_no_sense_is_refused(flags: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmark.main(["gpu", *flags.split()]) == 2
    assert named in capsys.readouterr().err


def test_one_update_is_that_of_a_process_of_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_checks.main(["parity", "--small"]) == 0
    row = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert row["ok"] and row["relative_difference"].keys() == {"ppo"}


def test_a_difference_is_a_failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    recorded = json.loads(gpu_checks.TRACES.read_text())
    monkeypatch.setattr(gpu_checks, "trace", lambda game, backend, steps: [*recorded[game][: steps - 1], "other"])
    assert gpu_checks.main(["traces", "--small"]) == 1
    assert json.loads(capsys.readouterr().out)["first_difference"] == {"Pong xla": 7}


@pytest.mark.slow
@pytest.mark.parametrize("part", [1, 2, 3, 4, 5])
def test_every_part_runs_in_small(part: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmark.main(["gpu", "--small", "--part", str(part), "--minutes", "8", "--out", str(tmp_path)]) == 0
    row = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert row.get("failed", []) == [] and row.get("exit_code", 0) == 0


def test_wheels_are_all_that_a_package_needs_but_for_what_is_there() -> None:
    found = wheels.needs(["podium"], "3.12", have=("numpy", "scipy"))
    assert {"flax", "gymnax", "tyro"} <= set(found) and not {"podium", "jax", "jaxlib", "numpy", "wandb"} & set(found)
    with pytest.raises(ValueError, match="no-such-package is not installed"):
        wheels.needs(["no-such-package"], "3.12", have=())


def test_kernels_are_counted_by_loop() -> None:
    text = """
001: kCopy         [source | next=004 (3)] kCopy
004: kWhile        [prev=003 (1) | sink]
condition:
    005: kCustomKernel [source | sink] compare grid: [1, 1, 1]
  body:
    000: kCommandBuffer [source | next=009 (1)]
        006: kCopy         [source | next=007 (1)] kCopy
        007: kCustomKernel [prev=006 (1) | sink] add grid: [1, 1, 1]
    008: kCustomKernel [source | sink] iota grid: [1, 1, 1]
    009: kWhile        [prev=000 (1) | sink]
condition:
        010: kCustomKernel [source | sink] compare grid: [1, 1, 1]
      body:
        011: kAsyncStart   [source | next=013 (1)] stream=computation_stream[0]
            012: kCopy [source | sink] kCopy
        000: kCommandBuffer [source | sink]
            013: kCustomKernel [source | sink] add grid: [1, 1, 1]
014: kCustomKernel [prev=004 (1) | sink] add grid: [1, 1, 1]
"""
    outer, inner = gpu_kernels.loops(text)
    assert inner == gpu_kernels.Loop(depth=1, kernels=2, copies=1, launches=3)
    assert outer == gpu_kernels.Loop(depth=0, kernels=5, copies=2, launches=6)


def test_without_a_compiler_for_gpus_it_is_said_what_to_install(capsys: pytest.CaptureFixture[str]) -> None:
    if importlib.util.find_spec("jax_cuda13_plugin") or importlib.util.find_spec("jax_cuda12_plugin"):
        pytest.skip("there is one")
    assert gpu_kernels.main([]) == 2
    assert "pip install 'jax[cuda13]'" in capsys.readouterr().err


def test_a_wheel_of_envpool_is_cut_to_atari(tmp_path: Path) -> None:
    (tmp_path / "assets/atari/roms").mkdir(parents=True)
    (tmp_path / "assets/__init__.py").write_text("")
    (tmp_path / "assets/atari/roms/pong.bin").write_bytes(b"pong")
    wheel = tmp_path / "envpool-1.whl"
    entry = "import envpool.atari.registration\nimport envpool.mujoco.gym.registration\n"
    files = {"envpool/entry.py": entry}
    files |= {f"envpool/{name}": "." for name in ("atari/a.so", "python/b.py", "mujoco/gym/c.so", "mujoco/d.py")}
    with zipfile.ZipFile(wheel, "w") as whole:
        for name, content in (files | {"envpool-1.dist-info/RECORD": "all"}).items():
            whole.writestr(name, content)

    wheels.cut_to_atari(wheel, tmp_path / "assets")

    with zipfile.ZipFile(wheel) as cut:
        found = {name: cut.read(name).decode() for name in cut.namelist()}
    kept = {"envpool/atari/a.so", "envpool/python/b.py", "envpool/entry.py"}
    added = {"envpool_assets/__init__.py", "envpool_assets/atari/roms/pong.bin"}
    assert found.keys() == kept | added | {"envpool-1.dist-info/RECORD"}
    assert found["envpool/entry.py"] == "import envpool.atari.registration\n"
    assert {row.split(",")[0] for row in found["envpool-1.dist-info/RECORD"].splitlines()} == found.keys()
