"""experiments/suites.py: a row for every environment asked for."""

from __future__ import annotations

import json

import pytest
import suites


@pytest.mark.slow
def test_each_environment_is_a_row(tmp_path, capsys):
    pytest.importorskip("pgx", reason='it is in the extra: pip install "podium[pgx]"')
    rows = tmp_path / "rows.jsonl"
    arguments = ["pgx/minatar-b", "--num-envs", "2", "--steps", "5", "--seconds", "0.01", "--out", str(rows)]
    for _ in range(2):  # The second time from the file.
        assert suites.main(arguments) == 0
        assert "| pgx/minatar-breakout | 10x10x4 | 3 discrete | 10000 | fresh |" in capsys.readouterr().out
    (row,) = map(json.loads, rows.read_text().splitlines())
    assert row["name"] == "pgx/minatar-breakout"


def test_no_such_environment_is_a_sentence(capsys):
    assert suites.main(["dm/"]) != 0
    assert "no environment of the suites begins with dm/" in capsys.readouterr().err
