"""The house rules for imports: layers (pyproject.toml lists them), and nothing by a name it has only by accident."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ["podium", "envs", "agents", "experiments", "tests"]
SOURCES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def test_every_import_goes_down():
    pytest.importorskip("importlinter", reason="import-linter is in the dev extra")
    script = (
        "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True, no_logo=True))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@functools.cache
def imported(path: Path) -> list[str]:
    """Return the full name of every module that a file imports; relative ones with their dots."""
    names = []
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append("." * node.level + (node.module or ""))
    return names


def test_nothing_imports_envs_agents_or_experiments_as_top_level_packages():
    """From the repository root these would work, as a second copy of podium.envs; anywhere else they would not."""
    forbidden = {"envs", "agents", "experiments"}
    found = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in SOURCES
        for name in imported(path)
        if name.split(".")[0] in forbidden
    ]
    assert not found


def test_imports_are_absolute():
    found = [str(path.relative_to(ROOT)) for path in SOURCES for name in imported(path) if name.startswith(".")]
    assert not found


@pytest.mark.parametrize("name", ["envs", "agents", "experiments"])
def test_installed_podium_leaves_no_top_level_package(name, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", f"import {name}"], cwd=tmp_path, capture_output=True, text=True, env={"PATH": ""}
    )
    assert done.returncode != 0 and "ModuleNotFoundError" in done.stderr


def test_agents_name_no_device_mesh_thread_queue_collective_or_environment():
    forbidden_modules = {"threading", "queue", "multiprocessing", "concurrent", "gymnax", "envpool", "jax.sharding"}
    forbidden_names = {"psum", "pmean", "all_gather", "ppermute", "axis_index", "shard_map", "pmap", "device_put"}
    for path in sorted((ROOT / "agents").glob("*.py")):
        modules = {name for name in imported(path)}
        assert not modules & forbidden_modules, path.name
        assert not any(name.startswith("podium.envs") for name in modules), path.name
        names = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
        assert not names & forbidden_names, path.name
