"""What the judges of games ask for, learnt from scratch."""

from __future__ import annotations

import pytest

import podium
from podium import presets
from podium.agents import ippo


@pytest.mark.learning
@pytest.mark.timeout(1800)
def test_ippo_wins_nine_battles_of_ten() -> None:
    pytest.importorskip("jaxmarl")
    import judges

    preset = dict(presets.IPPO["smax-3m"].values)
    sizes = {name: preset.pop(name) for name in ("num_steps", "num_envs", "rollout_length")}
    result = podium.train(ippo.make(ippo.Config(**preset)), "jaxmarl/smax-3m", eval_every=0, progress=False, **sizes)
    judged = judges.battles(result.policy)
    print(f"ippo jaxmarl/smax-3m: {judged}")
    assert judged["battles_won"] >= 0.9
