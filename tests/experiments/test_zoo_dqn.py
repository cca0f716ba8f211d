"""DQN by the zoo's settings: what it prints, and what it refuses."""

from __future__ import annotations

import json
import sys

import pytest
import zoo_dqn


@pytest.mark.slow
def test_every_seed_has_a_return(capsys: pytest.CaptureFixture[str]) -> None:
    assert zoo_dqn.main(["--seeds", "2", "--num-steps", "1536", "--episodes", "4", "--no-sb3"]) == 0
    row = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert row["who"] == "podium" and len(row["returns"]) == 2 and row["mean"] == sum(row["returns"]) / 2


def test_what_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert zoo_dqn.main(["--seeds", "0"]) == 2
    assert "seeds=0 must be an integer of 1 or more" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "stable_baselines3", None)
    monkeypatch.setattr(zoo_dqn, "of_podium", lambda flags: [500.0])
    assert zoo_dqn.main(["--seeds", "1"]) == 2
    assert "pip install stable-baselines3, or use --no-sb3" in capsys.readouterr().err
