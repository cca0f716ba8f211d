"""Policies are loaded from a run folder alone, also of agents that were made of others."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import podium
from podium.agent import Agent, lost_by_make, parts_of
from podium.agents import alphazero, dqn, muzero, ppo, sac, td3
from podium.files import to_jsonable
from podium.gated import gated
from podium.multi import groups, shared
from podium.runs import RunFolder
from podium.train import agent_record
from podium.varied import varied

PPO = ppo.Config(hidden_sizes=(4,), num_epochs=1, num_minibatches=1)
SIZES: dict[str, Any] = {
    "placement": podium.Anakin(1),
    "num_envs": 16,
    "rollout_length": 8,
    "num_steps": 128,
    "eval_every": 0,
    "progress": False,
}
TIC_TAC_TOE, TAG = ("podium/TicTacToe", {"rules": True}), ("podium/Tag", {"num_taggers": 1, "num_runners": 2})


def in_league(config: ppo.Config = PPO, **changes: Any) -> Agent:
    return podium.league(ppo.make(config), size=2, snapshot_every=1, **changes)


def before_a_gate() -> Agent:
    config = alphazero.Config(hidden_sizes=(4,), num_simulations=2, min_replay_size=64, batch_size=16, num_updates=1)
    return gated(alphazero.make(config, model=podium.envs.make("podium/TicTacToe", rules=True)), games=4, every=2)  # type: ignore[arg-type]


def in_groups() -> Agent:
    mine = {"taggers": (shared(ppo.make(PPO), 1), [0]), "runners": (ppo.make(PPO), range(1, 3))}
    return groups(mine, rollout_length=8)


MADE: dict[str, tuple[Callable[[], Agent], Any]] = {
    "a league": (in_league, TIC_TAC_TOE),
    "a gate": (before_a_gate, TIC_TAC_TOE),
    "groups": (in_groups, TAG),
    "shared": (lambda: shared(dqn.make(dqn.Config(hidden_sizes=(4,), min_replay_size=64, batch_size=16)), 3), TAG),
    "settings of a league": (
        lambda: varied(in_league, PPO, [{"learning_rate": 1e-3}, {"learning_rate": 1e-2}])._replace(name="ppo"),
        TIC_TAC_TOE,
    ),
}


def test_what_is_of_another_kind_is_refused(tmp_path: Path) -> None:
    config = {"agent": {"name": "ppo"}, "env": {"name": "podium/Catch", "options": {}}, "seeds": 2}
    RunFolder.create(tmp_path / "run", config)
    changes: Any
    for changes, words in (
        ({"seed": "0"}, "seed='0' is none of the run's 2 seeds; use 0 to 1"),
        ({"seed": 1.0}, "seed=1.0 is none of"),
        ({"agent": "ppo"}, "agent='ppo' is no Agent; make one"),
        ({"env": "podium/Catch"}, "env='podium/Catch' is neither"),
    ):
        with pytest.raises(ValueError, match=words):
            podium.load(tmp_path / "run", **changes)


@pytest.mark.slow
@pytest.mark.parametrize("name", MADE)
def test_an_agent_made_of_others_is_loaded_by_what_made_it(name: str, tmp_path: Path) -> None:
    make, (env, options) = MADE[name]
    if name == "a gate":
        pytest.importorskip("mctx", reason='mctx is in the extra: pip install "podium[games]"')
    seeds = 2 if make().settings else 1
    result = podium.train(make(), env, env_options=options, seeds=seeds, run_dir=tmp_path / "run", **SIZES)
    policy = result.policy[1] if seeds > 1 else result.policy
    loaded = podium.load(tmp_path / "run", seed=seeds - 1)
    jax.tree.map(np.testing.assert_array_equal, loaded.params, policy.params)
    played: Any = podium.envs.make(env, **(options or {}))
    obs = jax.vmap(played.reset)(jax.random.split(jax.random.key(0), 4))[1].obs
    np.testing.assert_array_equal(loaded.act(obs)[0], policy.act(obs)[0])


def test_a_league_of_another_kind_does_not_take_a_run_over(tmp_path: Path) -> None:
    train = lambda agent, **more: podium.train(agent, "podium/TicTacToe", run_dir=tmp_path / "run", **SIZES, **more)
    result = train(in_league())
    with pytest.raises(ValueError, match=r"agent.transforms.0.options.self_play was 0.25 and is 0.5\. On --resume"):
        train(in_league(self_play=0.5), resume=True)
    with pytest.raises(ValueError, match=r"matchmaking was 'hard' and is '.*test_load\.meet_all'"):
        train(in_league(matchmaking=meet_all), resume=True)
    with pytest.raises(ValueError, match="agent.transforms.0.name was 'league' and is not set"):
        train(ppo.make(PPO), resume=True)
    jax.tree.map(np.testing.assert_array_equal, podium.load(tmp_path / "run").params, result.policy.params)
    for change, words in (
        ({"name": "stranger"}, "Nothing named 'stranger' makes one agent of another"),
        ({"options": {"size": 2, "matchmaking": "tests.meet_all"}}, "matchmaking='tests.meet_all' is unknown"),
        ({"options": {"depth": 2}}, "unexpected keyword argument 'depth'"),
        ({"options": 3}, "after \\*\\* must be a mapping"),
    ):
        record = json.loads((tmp_path / "run" / "config.json").read_text())
        record["config"]["agent"]["transforms"][0] |= change
        other = tmp_path / "other"
        other.mkdir(exist_ok=True)
        (other / "config.json").write_text(json.dumps(record))
        with pytest.raises(ValueError, match=f"cannot be made by name; pass agent=.*{words}"):
            podium.load(other)


def meet_all(win_rate: Any, number: Any) -> Any:
    """Draw every snapshot alike."""
    return np.ones(2, np.float32)


def lossy(*given: Any) -> Any:
    """Stand for a loss of one's own."""
    return ppo.loss(*given)


def replanned(agent: Agent) -> Agent:
    return agent._replace(plan=lambda *given: agent.plan(*given))


def with_replay_of_own(agent: Agent) -> Agent:
    assert agent.replay is not None
    return agent._replace(replay=agent.replay._replace(sample=functools.partial(lossy)))


def test_what_is_brought_to_each_agent_is_told() -> None:
    """Arguments of `make` that a user gave, and functions put in place; what the agent has by itself is none."""
    critics: dict[str, Callable[[], Any]] = {name: of.Config().critic for name, of in (("sac", sac), ("td3", td3))}
    critics["muzero"] = muzero.Config().model
    for name in podium.agents.names():
        make, config_type, _, plans = podium.agents.get(name)
        config = config_type()
        if name in ("alphazero", "muzero"):
            pytest.importorskip("mctx", reason='mctx is in the extra: pip install "podium[games]"')
        given = {"model": podium.envs.make("podium/TicTacToe", rules=True)} if plans else {}
        assert parts_of(make(config, **given)) == () == make(config, **given).transforms
        assert parts_of(replanned(make(config, **given))) == ("plan",)
        assert not lost_by_make(make(config, **given)) and lost_by_make(replanned(make(config, **given))) == ("plan",)
        for part in set(inspect.signature(make).parameters) & {"network", "loss", "critic", "model"} - set(given):
            brought = {"network": getattr(config, "network", None), "loss": lambda: lossy}.get(part, critics.get(name))
            if brought is not None:
                agent = make(config, **given, **{part: brought()})
                assert parts_of(agent) == (part,), name
                assert agent.make is not None and parts_of(agent.make(config)) == (part,), name


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (lambda: ppo.make(PPO, loss=lossy), "loss"),
        (lambda: replanned(ppo.make(PPO, PPO.network())), "network, plan"),
        (lambda: ppo.make(PPO)._replace(act=functools.partial(lossy)), "act"),
        (lambda: with_replay_of_own(dqn.make(dqn.Config(hidden_sizes=(8,)))), "replay"),
        (lambda: podium.league(replanned(ppo.make(PPO)), size=2), "plan"),
        (lambda: shared(ppo.make(PPO, loss=lossy)), "loss"),
        (lambda: groups({"all": (shared(ppo.make(PPO, loss=lossy), 3), range(3))}), "loss"),
        (lambda: groups({"all": (ppo.make(PPO), range(3))})._replace(observe=lossy), "observe"),
        (lambda: varied(functools.partial(ppo.make, loss=lossy), PPO, [{"gamma": 0.5}]), "loss"),
        (lambda: ppo.make(PPO, loss=ppo.loss), None),
        (lambda: podium.league(ppo.make(PPO), size=2), None),
        (lambda: groups({"all": (ppo.make(PPO), range(3))}), None),
    ],
)
def test_parts_of_ones_own_must_be_given_again(make: Callable[[], Agent], parts: str | None, tmp_path: Path) -> None:
    agent = make()
    env, options = TAG if agent.name == "groups" else TIC_TAC_TOE
    config = {"agent": agent_record(agent), "env": {"name": env, "options": options}, "seeds": 1}
    assert ("brought" in json.dumps(to_jsonable(config))) is (parts is not None)
    RunFolder.create(tmp_path / "run", config)
    lacks = rf"pass agent=\. \w+ was trained with parts that no folder holds: {parts}\."
    with pytest.raises(ValueError, match=lacks if parts else "No complete checkpoint"):
        podium.load(tmp_path / "run")


def test_a_registered_agent_brings_its_own_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(podium.agents, "_entries", dict(podium.agents._entries))
    mine = lambda config: replanned(ppo.make(config, loss=lossy))
    podium.agents.register("mine", mine, ppo.Config)
    config = {"env": {"name": "podium/Catch", "options": {}}, "seeds": 1}
    for folder, agent, words in (
        ("as registered", mine(PPO)._replace(name="mine"), "No complete checkpoint"),
        ("by its name", podium.agents.make("mine", PPO), "No complete checkpoint"),
        ("with another part", mine(PPO)._replace(name="mine", act=lossy), "no folder holds: act"),
    ):
        RunFolder.create(tmp_path / folder, config | {"agent": agent_record(agent)})
        with pytest.raises(ValueError, match=words):
            podium.load(tmp_path / folder)


def test_a_network_of_ones_own_is_not_swapped_for_that_of_config(tmp_path: Path) -> None:
    train = lambda agent, **more: podium.train(agent, "podium/Catch", run_dir=tmp_path / "run", **SIZES, **more)
    agent = ppo.make(PPO, network=dataclasses.replace(PPO, activation="relu").network())
    result = train(agent)
    with pytest.raises(ValueError, match="pass agent=. ppo was trained with parts that no folder holds: network"):
        podium.load(tmp_path / "run")
    with pytest.raises(ValueError, match=r"agent.brought was \['network'\] and is not set\. On --resume"):
        train(ppo.make(PPO), resume=True)
    with pytest.raises(ValueError, match=r"agent.brought was \['network'\] and is \['loss', 'network'\]"):
        train(ppo.make(PPO, PPO.network(), lossy), resume=True)
    again = train(agent, resume=True)
    loaded = podium.load(tmp_path / "run", agent=agent)
    for policy in (again.policy, loaded):
        jax.tree.map(np.testing.assert_array_equal, policy.params, result.policy.params)
