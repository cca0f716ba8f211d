"""The table of what a device holds where devices share a network."""

from __future__ import annotations

import model_memory
import pytest


def test_a_row_for_every_width(capsys: pytest.CaptureFixture[str]) -> None:
    model_memory.main(["--widths", "128", "256", "--num-envs", "16", "--rollout-length", "8"])
    heading, _, *rows = capsys.readouterr().out.splitlines()
    assert [row.split("|")[1].strip() for row in rows] == ["(128, 128)", "(256, 256)"]
    assert {row.count("|") for row in (heading, *rows)} == {2 + len(model_memory.layouts())}
    # Of PPO on CartPole-v1 with two 256-256 networks; with no more than scalars and heads whole on every device.
    cells = [cell.strip() for cell in rows[1].split("|")[2:-1]]
    assert cells == ["1.62 MB", "1.62 MB", "814 kB", "412 kB", "210 kB", "210 kB", "210 kB"]
