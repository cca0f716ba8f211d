"""Populations: the worst go on from the best, on any number of devices, exactly where they were after a resume."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import podium
from podium.__main__ import main
from podium.agents import a2c, apex, dqn, impala, muzero, ppo, pqn, r2d2, rainbow, reppo, sac, td3
from podium.env import auto_reset
from podium.exploit import Bounds, bounds_of, exploit, explore, first_settings
from podium.lineage import ancestors
from podium.space import Draws
from podium.testing.probes import probe_continuous

RATES = {"learning_rate": podium.log_range(1e-5, 1e-1, 4)}
REPLAY: dict[str, Any] = {"batch_size": 16, "min_replay_size": 32, "buffer_capacity": 256, "num_updates": 2}
OFF_POLICY: dict[str, Any] = {
    "batch_size": 16,
    "min_replay_size": 32,
    "buffer_capacity": 256,
    "updates_per_step": 1 / 32,
    "warmup_steps": 64,
}
AGENTS: dict[str, Any] = {
    "ppo": ppo.make(ppo.Config(hidden_sizes=(8,), num_epochs=1, num_minibatches=2)),
    "ppo gru": ppo.make(ppo.Config(hidden_sizes=(8,), num_minibatches=2, memory="gru", memory_size=8)),
    "a2c": a2c.make(a2c.Config(hidden_sizes=(8,))),
    "impala": impala.make(impala.Config(hidden_sizes=(8,))),
    "pqn": pqn.make(pqn.Config(hidden_sizes=(8,), num_minibatches=4)),
    "dqn": dqn.make(dqn.Config(hidden_sizes=(8,), **REPLAY)),
    "apex": apex.make(apex.Config(hidden_sizes=(8,), **REPLAY)),
    "r2d2": r2d2.make(
        r2d2.Config(hidden_sizes=(8,), sequence_length=6, burn_in=2, sequence_period=2, memory_size=8, **REPLAY)
    ),
    "rainbow": rainbow.make(rainbow.Config(hidden_sizes=(8,), num_atoms=11, **REPLAY)),
    "reppo": reppo.make(reppo.Config(hidden_sizes=(8,), num_epochs=1, num_minibatches=2)),
    "sac": sac.make(sac.Config(hidden_sizes=(8,), **OFF_POLICY)),
    "td3": td3.make(td3.Config(hidden_sizes=(8,), **OFF_POLICY)),
}


def agent_of(name: str) -> Any:
    if name != "muzero":
        return AGENTS[name]
    pytest.importorskip("mctx", reason='mctx is in the extra: pip install "podium[games]"')
    sizes = {"hidden_sizes": (8,), "state_size": 8, "num_bins": 21, "num_simulations": 2}
    return muzero.make(muzero.Config(**sizes, unroll_steps=2, td_steps=3, **REPLAY))


SIZES: dict[str, Any] = {"num_envs": 8, "rollout_length": 8, "eval_episodes": 4, "progress": False}


def build(agent: Any, placement: podium.Population, updates: int = 4) -> Any:
    env = auto_reset(probe_continuous()) if agent.name in ("reppo", "sac", "td3") else podium.envs.make("podium/Catch")
    return placement.build(agent, env, num_envs=8, rollout_length=8, max_updates=updates)


def assert_same(one: Any, other: Any, rtol: float = 0) -> None:
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(x, y, rtol, 1e-6 if rtol else 0, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "ppo")) for name in (*AGENTS, "muzero")]
)
def test_members_apart_are_the_settings_of_a_sweep_and_exchanged_they_are_copies(name: str) -> None:
    """Until the first exchange members are what each is alone; after it the worst is a copy of the best."""
    agent = agent_of(name)
    program = build(agent, podium.Population(4, exploit_every=192, space=RATES, devices=1))
    state, metrics = program.chunk(program.init(0), 2)
    assert np.isnan(metrics["parent"]).all()
    before = jax.device_get(program.agent_state(state))
    np.testing.assert_allclose(before.numbers["learning_rate"], RATES["learning_rate"], 1e-6)
    apart = build(agent, podium.Population(4, exploit_every=0, space=RATES, devices=1))
    never, rows = apart.chunk(apart.init(0), 3)
    assert_same(before, apart.agent_state(apart.chunk(apart.init(0), 2)[0]))
    assert np.isnan(rows["parent"]).all()

    state, metrics = program.chunk(state, 1)
    after, alone = jax.device_get((program.agent_state(state), apart.agent_state(never)))
    parent = metrics["parent"][0].astype(int)
    returns = sum(rows["episode_return_sum"]) / sum(rows["episodes"])
    worst, best = np.argmin(returns), parent[np.argmin(returns)]
    assert returns[best] == returns.max() > returns[worst], "of four members the worst takes over from the best"
    assert (np.delete(parent, worst) == np.delete(np.arange(4), worst)).all()
    assert_same(after.state, jax.tree.map(lambda x: x[parent], alone.state))
    factor = after.numbers["learning_rate"] / alone.numbers["learning_rate"][parent]
    assert [round(float(x), 3) in (1.0, 1.2, 0.833) for x in factor] == [True] * 4
    assert (factor[worst] != 1) or RATES["learning_rate"][best] in (1e-5, 1e-1)
    assert_same(jax.random.key_data(state.key), jax.random.key_data(never.key))
    assert_same(state.replay, never.replay)
    assert_same(state.rollout.episodes, never.rollout.episodes)
    assert float(jnp.sum(state.scores.episodes)) == 0
    assert metrics["setting_learning_rate"].shape == (1, 4)


@pytest.mark.parametrize("devices", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_devices_change_nothing(devices: int) -> None:
    states, texts = [], []
    for each in (1, devices):
        placement = podium.Population(4, exploit_every=128, space=RATES, devices=each)
        program = build(AGENTS["ppo"], placement, updates=5)
        state, metrics = program.chunk(program.init(0), 5)
        states.append((jax.device_get(program.agent_state(state)), metrics["parent"]))
        texts.append(program.loop.compiled_text())
    assert np.isfinite(states[0][1]).all(-1).tolist() == [False, True, False, True, False]
    assert_same(*states, rtol=1e-5)
    # Devices wait for one another where an exchange is due, the only condition of the loop.
    waits = [line for line in texts[1].splitlines() if "all-reduce(" in line]
    assert waits and all("/cond/" in line for line in waits)
    assert program.bytes_per_update()["what members know"] > 0
    assert f"cpu:{devices - 1}" in program.explain()
    assert "every 128 steps the worst go on from the best" in program.explain()


def test_a_run_resumes_to_the_bit_and_leaves_its_lineage(tmp_path: Path) -> None:
    placement = podium.Population(4, exploit_every=128, space=RATES, devices=2)
    arguments: dict[str, Any] = {"placement": placement, "log_every": 512, "eval_every": 512, **SIZES}
    whole = podium.train(AGENTS["ppo"], "podium/Catch", num_steps=1536, **arguments, run_dir=tmp_path / "whole")
    podium.train(AGENTS["ppo"], "podium/Catch", num_steps=512, **arguments, run_dir=tmp_path / "halved")
    again = podium.train(
        AGENTS["ppo"], "podium/Catch", num_steps=1536, **arguments, run_dir=tmp_path / "halved", resume=True
    )
    assert again.summary["params_sha256"] == whole.summary["params_sha256"]
    rows = [json.loads(line) for line in (tmp_path / "halved" / "metrics.jsonl").read_text().splitlines()]
    assert [len(row["parent"]) for row in rows] == [4, 4, 4]
    assert [row["parent"] for row in rows] == [row["parent"] for row in whole.metrics]
    assert rows[-1]["setting_learning_rate"] == whole.summary["setting_learning_rate"]
    assert len(whole.summary["eval_return"]) == len(whole.policy) == 4
    assert (tmp_path / "whole" / "population.png").stat().st_size > 1000
    parents = [parent for row in rows for parent in row["parent"]]
    assert len(set(ancestors(parents, 4))) < 4
    policy = podium.load(tmp_path / "whole", seed=2)
    np.testing.assert_allclose(policy.params.numbers["learning_rate"], rows[-1]["setting_learning_rate"][2], 1e-6)
    with pytest.raises(ValueError, match="seed=4 is none of the run's 4 seeds"):
        podium.load(tmp_path / "whole", seed=4)


def test_the_command_line_knows_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = (
        "train --agent ppo --env podium/Catch --preset none --placement population --members 2 --exploit-every 128 "
        "--space learning_rate=1e-4..1e-2:log gamma=0.9,0.99 --devices 1 --num-envs 8 --rollout-length 8 "
        f"--num-steps 256 --hidden-sizes 8 --eval-episodes 4 --json --run-dir {tmp_path / 'run'}"
    )
    assert main(flags.split()) == 0
    out = capsys.readouterr().out
    assert "Population: 2 members train alone, and vary learning_rate, gamma" in out
    assert len(json.loads(out.splitlines()[-1])["setting_gamma"]) == 2


def taken_over(agent: Any) -> tuple[Any, Any, Any]:
    """Return the program, state and metrics of two members once the second, which diverged, goes on from the first."""
    rates = {"learning_rate": (1e-3, 1e30)}
    placement = podium.Population(2, exploit_every=256, space=rates, share=0.5, devices=1)
    program = build(agent, placement)
    state, _ = program.chunk(program.init(0), 3)
    assert program.agent_state(state).diverged.tolist() == [False, True]
    state, metrics = program.chunk(state, 1)
    assert metrics["parent"].tolist() == [[0.0, 0.0]]
    return program, state, metrics


def test_one_that_diverged_begins_anew_from_a_good_one() -> None:
    agent = ppo.make(ppo.Config(hidden_sizes=(8,), num_epochs=1, num_minibatches=2, max_grad_norm=0.0))
    program, state, metrics = taken_over(agent)
    assert program.agent_state(state).diverged.tolist() == [False, False]
    assert metrics["finite"].all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rainbow", "apex"])
def test_one_that_diverged_learns_anew_from_a_replay_of_priorities(name: str) -> None:
    """Errors of numbers that diverged rank nothing, or all that is written from then on would count nothing."""
    plain = AGENTS[name]
    _, state, _ = taken_over(plain.make(dataclasses.replace(plain.config, max_grad_norm=0.0)))
    priorities = jax.device_get(state.replay.priorities)
    assert all(np.isfinite(level).all() for level in priorities.levels) and np.isfinite(priorities.largest).all()


def test_exploit_by_the_obvious_loop() -> None:
    rng = np.random.default_rng(0)
    for trial in range(50):
        score = rng.integers(0, 5, 8).astype(np.float32)
        score[rng.random(8) < 0.2] = np.nan
        parent = np.asarray(exploit(jax.random.key(trial), jnp.asarray(score), 0.25))
        known = np.flatnonzero(~np.isnan(score))
        count = min(2, len(known) // 2)
        ranked = np.sort(score[known])
        for member, other in enumerate(parent):
            if other == member:
                continue
            assert score[member] <= ranked[count - 1], "only the worst take over"
            assert score[other] >= ranked[-count], "only from the best"
            assert score[other] > score[member]
        must = [m for m in known if score[m] < ranked[count : len(ranked)].min(initial=np.inf)] if count else []
        assert all(parent[m] != m for m in must), "whoever is below all others does take over"
    assert exploit(jax.random.key(0), jnp.full(4, 7.0), 0.25).tolist() == [0, 1, 2, 3]
    assert exploit(jax.random.key(0), jnp.full(4, jnp.nan), 0.5).tolist() == [0, 1, 2, 3]


def test_explore_stays_within_its_bounds_and_touches_copies_only() -> None:
    numbers = {"rate": jnp.array([1e-3, 1e-3, 1e-1, 1e-5]), "gamma": jnp.array([0.9, 0.9, 0.99, 0.9])}
    copied = jnp.array([False, True, True, True])
    bounds = {"rate": Bounds(1e-5, 1e-1, True), "gamma": Bounds(0.9, 0.99, False)}
    seen: dict[str, set[float]] = {"rate": set(), "gamma": set()}
    for seed in range(20):
        found = explore(jax.random.key(seed), numbers, copied, bounds, factor=1.2, anew=0.0)
        for name, values in found.items():
            assert values[0] == numbers[name][0]
            assert (bounds[name].low <= values.min() + 1e-9) and (values.max() <= bounds[name].high + 1e-9)
            seen[name].add(round(float(values[1] / numbers[name][1]), 3))
    assert seen == {"rate": {1.2, 0.833}, "gamma": {1.1, 1.0}}
    anew = explore(jax.random.key(0), numbers, jnp.ones(4, bool), bounds, factor=1.2, anew=1.0)
    assert len(set(np.asarray(anew["rate"]).tolist())) == 4


def test_first_settings_cover_the_space() -> None:
    space: Any = {"a": Draws(1e-4, 1e-1, log=True), "b": (0.9, 0.99), "c": podium.linear_range(1, 4, 4)}
    found = first_settings(space, 4)
    np.testing.assert_allclose([each["a"] for each in found], podium.log_range(1e-4, 1e-1, 4))
    assert sorted(each["b"] for each in found) == [0.9, 0.9, 0.99, 0.99]
    assert sorted(each["c"] for each in found) == [1, 2, 3, 4] != [each["c"] for each in found]
    assert found == first_settings(space, 4)
    assert bounds_of(space)["a"] == Bounds(1e-4, 1e-1, True)
    assert bounds_of(space)["b"] == Bounds(0.9, 0.99, False)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"members": 1}, "members=1 has nobody to take over from; use 2 or more"),
        ({"members": 3, "devices": 2}, "members=3 is not divisible by devices=2; use members=4, or fewer devices"),
        ({"space": {}}, "space is empty, so members would be alike; use such as"),
        ({"space": ("learning_rate",)}, "--space learning_rate is not FIELD=VALUES"),
        ({"space": {"rate": (0.1, 0.2)}}, "'rate' is no field of podium.agents.ppo.Config, so it cannot vary"),
        ({"space": {"hidden_sizes": (8, 16)}}, "decides what is compiled, so it cannot vary within a program; these"),
        ({"space": {"gamma": (0.9,)}}, r"gamma=\(0.9,\) must be two numbers or more"),
        ({"space": {"gamma": 0.9}}, "gamma=0.9 must be two numbers or more"),
        ({"space": {"gamma": (0.9, 1.5)}}, "gamma=1.5 must be between 0 and 1"),
        ({"space": {"entropy_coef": (0.0, 0.1)}}, "entropy_coef begins at 0.0, and members multiply what they vary"),
        ({"space": {"activation": ("tanh", "relu")}}, "activation='tanh' decides what is compiled, so it cannot vary"),
        ({"share": 0.6}, "share=0.6 must be above 0 and at most 0.5"),
        ({"perturb": 1.0}, "perturb=1.0 must be greater than 1"),
        ({"anew": 1.5}, "anew=1.5"),
        ({"exploit_every": -1}, "exploit_every=-1"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    placement = podium.Population(**{"members": 4, "space": RATES, "devices": 1, **changes})
    with pytest.raises(ValueError, match=words):
        podium.train(
            AGENTS["ppo"], "podium/Catch", num_steps=128, placement=placement, run_dir=tmp_path / "run", **SIZES
        )
    assert not (tmp_path / "run").exists()


def test_an_agent_that_cannot_be_made_anew_is_refused() -> None:
    with pytest.raises(ValueError, match="ppo has no `make`, so its numbers cannot vary"):
        build(AGENTS["ppo"]._replace(make=None), podium.Population(4, space=RATES, devices=1))
    with pytest.raises(ValueError, match="seeds=2: Population runs one seed"):
        podium.train(
            AGENTS["ppo"], "podium/Catch", num_steps=64, seeds=2, placement=podium.Population(4, space=RATES), **SIZES
        )


def test_what_was_put_into_an_agent_is_in_every_member_or_refused() -> None:
    """A population makes its members anew; it must not leave out on the way what a user changed."""
    config, traced = AGENTS["ppo"].config, []

    def changed(config: Any) -> Any:
        base = ppo.make(config)

        def plan(key: Any, state: Any, trajectory: Any) -> Any:
            traced.append(config.learning_rate)
            return base.plan(key, state, trajectory)

        return base._replace(plan=plan)

    population = podium.Population(4, space=RATES, devices=1)
    kept = ppo.make(dataclasses.replace(config, target_kl=0.1))
    for agent, env, words in (
        (changed(config), "podium/Catch", "plan"),
        (podium.league(changed(config), size=2), "podium/TicTacToe", "plan"),
        (
            kept._replace(stops=None, reward_discount=0.5, name="mine", rollout_length=4),
            "podium/Catch",
            "reward_discount, stops",
        ),
        (AGENTS["dqn"]._replace(replay=None), "podium/Catch", "replay"),
    ):
        with pytest.raises(
            ValueError, match=f"lacks what was put into the agent or taken out: {words}. Put in a `make`"
        ):
            population.build(agent, podium.envs.make(env), num_envs=8, rollout_length=8)
    assert not traced
    program = build(changed(config)._replace(make=changed), population)
    program.chunk(program.init(0), 1)
    assert traced and all(isinstance(rate, jax.core.Tracer) for rate in traced), "with the numbers of its member"
