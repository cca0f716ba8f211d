"""DQN by the zoo's settings: what it prints, and what it refuses."""

from __future__ import annotations

import json
import sys

import jax
import jax.numpy as jnp
import pytest
import zoo_dqn


@pytest.mark.slow
def test_every_seed_has_a_return(capsys: pytest.CaptureFixture[str]) -> None:
    command = "--seeds 2 --num-steps 1536 --episodes 4 --no-sb3 --weights pytorch"
    assert zoo_dqn.main(command.split()) == 0
    row = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert row["who"] == "podium" and len(row["returns"]) == 2 and row["mean"] == sum(row["returns"]) / 2


def test_first_weights_of_pytorch_lie_within_one_over_the_root_of_a_layers_inputs() -> None:
    params = {"torso": {"Dense_0": {"kernel": jnp.zeros((4, 256)), "bias": jnp.zeros(256)}}}
    layer = zoo_dqn.as_pytorch(jax.random.key(0), params)["torso"]["Dense_0"]
    for name, x in layer.items():
        assert x.shape == params["torso"]["Dense_0"][name].shape
        assert 0.45 < jnp.abs(x).max() <= 0.5 and jnp.abs(x.mean()) < 0.1


def test_what_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert zoo_dqn.main(["--seeds", "0"]) == 2
    assert "seeds=0 must be an integer of 1 or more" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "stable_baselines3", None)
    monkeypatch.setattr(zoo_dqn, "of_podium", lambda flags: [500.0])
    assert zoo_dqn.main(["--seeds", "1"]) == 2
    assert "pip install stable-baselines3, or use --no-sb3" in capsys.readouterr().err
