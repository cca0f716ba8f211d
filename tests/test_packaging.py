"""What is installed: one package, typed, with the version it says, and nothing in it that runs code out of data."""

from __future__ import annotations

import ast
import importlib.resources
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import podium

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    """Build the wheel from what git tracks, or would: no stray folder of this checkout shall help."""
    pytest.importorskip("build", reason="build is in the dev extra")
    setuptools = pytest.importorskip("setuptools", reason="setuptools is in the dev extra")
    if int(setuptools.__version__.split(".")[0]) < 77:
        pytest.skip(f"setuptools {setuptools.__version__} is older than pyproject.toml asks for")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    for name in listed.stdout.splitlines():
        path, copy = ROOT / name, source / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink():
            copy.symlink_to(path.readlink())
        elif path.exists():
            copy.write_bytes(path.read_bytes())
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (path,) = out.glob("*.whl")
    return zipfile.ZipFile(path)


def test_wheel_holds_podium_and_nothing_else(wheel):
    names = wheel.namelist()
    assert {name.split("/")[0] for name in names} == {"podium", f"podium-{podium.__version__}.dist-info"}
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "podium").rglob("*.py")}
    for folder in ("envs", "agents"):
        sources |= {f"podium/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / folder).rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == sources
    assert {"podium/envs/__init__.py", "podium/agents/ppo.py", "podium/py.typed"} <= set(names)
    assert "podium/envs/atari/games.json" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_wheel_imports_without_the_repository(wheel, tmp_path):
    wheel.extractall(tmp_path)
    script = (
        "import podium; from podium.envs.atari import games; assert podium.envs.make('podium/Catch') and games.GAMES; "
        "print(podium.__file__, podium.__version__)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(tmp_path / "podium" / "__init__.py"), podium.__version__]


def test_wheel_metadata(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    lines = wheel.read(name).decode().split("\n\n")[0].splitlines()
    assert f"Version: {podium.__version__}" in lines
    assert "License-Expression: Apache-2.0" in lines
    extras = {line.removeprefix("Provides-Extra: ") for line in lines if line.startswith("Provides-Extra: ")}
    suites = {"brax", "craftax", "jumanji", "marl", "mjx", "pgx", "xminigrid", "envs"}
    assert extras == {"cuda12", "cuda13", "atari", "games", "gymnasium", "ray", "dev", *suites}


def test_version_is_in_the_changelog():
    assert re.fullmatch(r"\d+\.\d+\.\d+", podium.__version__)
    assert f"## {podium.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_all_names_exist_and_types_are_shipped():
    assert sorted(podium.__all__) == podium.__all__
    assert all(hasattr(podium, name) for name in podium.__all__)
    assert importlib.resources.files("podium").joinpath("py.typed").is_file()


def test_constraints_cover_every_requirement():
    pinned = {re.split(r"==", line)[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    extras = PROJECT["optional-dependencies"]
    suites = "brax", "craftax", "games", "jumanji", "marl", "mjx", "pgx", "xminigrid"
    wanted = PROJECT["dependencies"] + extras["dev"] + [each for suite in suites for each in extras[suite]]
    missing = {re.split(r"[<>=\[ ;]", name)[0] for name in wanted} - pinned
    assert not missing, f"no version of {missing} in constraints.txt"


def test_every_import_is_a_declared_dependency():
    """What happens otherwise, gymnax shows: it imports six, and breaks where nothing else brings that along."""
    names = {"orbax": "orbax-checkpoint", "PIL": "pillow", "docstring_parser": "docstring-parser"}
    declared = {re.split(r"[<>=\[ ;]", name)[0] for name in PROJECT["dependencies"]}
    declared |= {"podium", "envpool", "ale_py", "ray"}  # Extras, imported only where they are used.
    for path in _sources("podium", "envs", "agents"):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            for module in (module.split(".")[0] for module in modules):
                known = module in sys.stdlib_module_names or names.get(module, module) in declared
                assert known, f"{path.relative_to(ROOT)} imports {module}, which is no dependency of podium"


def test_nothing_turns_data_into_code():
    """No pickle in any form, no eval, no exec: a checkpoint or a config from a stranger must stay data."""
    modules = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
    found = []
    for path in _sources("podium", "envs", "agents", "experiments"):
        for node in ast.walk(ast.parse(path.read_text())):
            where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Import):
                found += [where for alias in node.names if alias.name.split(".")[0] in modules]
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in modules:
                found.append(where)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec"):
                found.append(where)
            elif isinstance(node, ast.keyword) and node.arg == "allow_pickle" and getattr(node.value, "value", True):
                found.append(where)
    assert not found


def _sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
