"""Notebooks run from top to bottom, are stored clean, and use what everybody can use."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

import podium

NOTEBOOKS = sorted((Path(__file__).resolve().parents[1] / "notebooks").glob("*.ipynb"))

# In a process of its own, as Jupyter does it: asyncio and ZeroMQ have warnings that are none of ours.
EXECUTE = """
import sys, nbclient, nbformat
notebook = nbformat.read(sys.argv[1], as_version=4)
try:
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
except nbclient.exceptions.CellExecutionError as error:
    sys.exit(str(error))
for cell in notebook.cells:
    for output in cell.get("outputs", []):
        print(output.get("text", "") or list(output.get("data", {})))
"""


def code_of(path: Path) -> list[str]:
    cells = nbformat.read(path, as_version=4).cells
    return [cell.source for cell in cells if cell.cell_type == "code"]


ANIMATED = ("control", "games", "quickstart")
EXTRAS = {"games": "mctx"}
"""What a notebook cannot do without, of all that CI installs where it can."""


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, tmp_path):
    if path.stem in EXTRAS:
        pytest.importorskip(EXTRAS[path.stem], reason=f"the extra of {path.name} is not installed")
    environment = {**os.environ, "PODIUM_SMOKE": "1", "MPLBACKEND": "module://matplotlib_inline.backend_inline"}
    command = [sys.executable, "-c", EXECUTE, str(path)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "image/png" in done.stdout and ("image/gif" in done.stdout or path.stem not in ANIMATED)
    assert not list(tmp_path.iterdir()), "the notebook left files behind"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_stored_without_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        assert not cell.get("outputs") and cell.get("execution_count") is None


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_uses_the_public_surface_only(path):
    for source in code_of(path):
        tree = ast.parse("\n".join(line for line in source.splitlines() if not line.lstrip().startswith(("%", "!"))))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("podium"):
                parts = [*node.module.split("."), *(alias.name for alias in node.names)]
                assert not any(part.startswith("_") for part in parts), ast.unparse(node)
                below = node.module != "podium" and {alias.name for alias in node.names} & {*podium.__all__}
                assert not below, f"{ast.unparse(node)}: write podium.{min(below)}"
            if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
                assert node.attr in ("_replace", "__version__"), ast.unparse(node)


def test_there_is_a_quickstart():
    assert "quickstart" in [path.stem for path in NOTEBOOKS]
