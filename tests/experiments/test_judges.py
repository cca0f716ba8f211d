"""What the judges of games ask for, learnt from scratch; and the table of what they say."""

from __future__ import annotations

import json
from pathlib import Path

import judges
import pytest

import podium
from podium import presets
from podium.agents import ippo


@pytest.mark.learning
@pytest.mark.timeout(1800)
def test_ippo_wins_nine_battles_of_ten() -> None:
    pytest.importorskip("jaxmarl")
    preset = dict(presets.IPPO["smax-3m"].values)
    sizes = {name: preset.pop(name) for name in ("num_steps", "num_envs", "rollout_length")}
    result = podium.train(ippo.make(ippo.Config(**preset)), "jaxmarl/smax-3m", eval_every=0, progress=False, **sizes)
    judged = judges.battles(result.policy)
    print(f"ippo jaxmarl/smax-3m: {judged}")
    assert judged["battles_won"] >= 0.9


def test_a_row_keeps_what_other_seeds_gave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = judges.Row("ppo", "podium/Kuhn", "", None, "gain", "none", seeds=2, script="psro.py")
    monkeypatch.setattr(judges, "ROWS", (row,))
    monkeypatch.setattr(judges, "RESULTS", tmp_path)
    monkeypatch.setattr(judges, "TABLE", tmp_path / "games.json")
    (tmp_path / "README.md").write_text(f"{judges.BEGIN}\n{judges.END}\n")

    def judged(gains: tuple[float, float], *flags: str) -> list[float]:
        for seed, gain in enumerate(gains):
            folder = tmp_path / "ppo-podium-Kuhn" / f"seed-{seed}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "summary.json").write_text(json.dumps({"env_steps": 8, "wall_seconds": 1.0, "gain": gain}))
        assert judges.main(["--judge", "--only", row.name, "--runs", str(tmp_path), *flags]) == 0
        found = json.loads((tmp_path / "games.json").read_text())[row.name]
        assert [each["seed"] for each in found["seeds"]] == [0, 1]
        return list(found["gain"])

    assert judged((0.1, 0.2)) == [0.1, 0.2]
    assert judged((0.3, 0.4), "--seeds", "0") == [0.3, 0.2]
    assert judged((0.5, 0.6)) == [0.5, 0.6]
    assert "| 0.5, 0.6 |" in (tmp_path / "README.md").read_text()
