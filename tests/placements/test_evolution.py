"""Evolution: a generation against a plain loop over its members, and nothing but returns between devices."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import podium
from podium import keys
from podium.agent import Agent, policy_leaves
from podium.agents import a2c, apex, dqn, impala, muzero, ppo, pqn, r2d2, rainbow, reppo, sac, td3
from podium.evaluate import make_evaluator
from podium.evolve import centered_ranks
from podium.host import on_host
from podium.networks import actor_critic
from podium.testing.probes import probe_continuous
from podium.types import ArraySpec, DiscreteSpec, EnvSpec

POPULATION, LIMIT = 32, 9  # A game of Catch lasts 9 steps.

AGENTS: dict[str, Agent] = {
    "ppo": ppo.make(ppo.Config(hidden_sizes=(16,))),
    "ppo gru": ppo.make(ppo.Config(hidden_sizes=(16,), memory="gru", memory_size=8)),
    "a2c": a2c.make(a2c.Config(hidden_sizes=(16,))),
    "impala": impala.make(impala.Config(hidden_sizes=(16,))),
    "dqn": dqn.make(dqn.Config(hidden_sizes=(16,))),
    "apex": apex.make(apex.Config(hidden_sizes=(16,))),
    "rainbow": rainbow.make(rainbow.Config(hidden_sizes=(16,))),
    "pqn": pqn.make(pqn.Config(hidden_sizes=(16,))),
    "r2d2": r2d2.make(r2d2.Config(hidden_sizes=(16,), memory_size=8)),
    "sac": sac.make(sac.Config(hidden_sizes=(16,))),
    "td3": td3.make(td3.Config(hidden_sizes=(16,))),
    "reppo": reppo.make(reppo.Config(hidden_sizes=(16,))),
}


def agent_of(name: str) -> Agent:
    if name != "muzero":
        return AGENTS[name]
    pytest.importorskip("mctx", reason='mctx is in the extra: pip install "podium[games]"')
    return muzero.make(muzero.Config(hidden_sizes=(16,), state_size=8, num_bins=21, num_simulations=4))


CATCH_ON_HOST = on_host(podium.envs.make("podium/Catch"))  # type: ignore[arg-type]


def build(placement: podium.Evolution, agent: Agent, env: Any = "podium/Catch", **sizes: Any) -> Any:
    env = podium.envs.make(env) if isinstance(env, str) else env
    return placement.build(agent, env, **{"num_envs": POPULATION, "rollout_length": LIMIT, "max_updates": 3, **sizes})


def chosen(agent: Agent, env: Any) -> list[str]:
    shapes = jax.eval_shape(lambda key: agent.init(key, env.spec), jax.random.key(0))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(shapes)]
    return [path for path, moved in zip(paths, policy_leaves(agent, shapes), strict=True) if moved]


@pytest.mark.parametrize(
    ("name", "episodes"),
    [
        ("ppo", 1),
        ("ppo", 2),
        *[pytest.param(name, 1, marks=pytest.mark.slow) for name in [*AGENTS, "muzero"] if name != "ppo"],
    ],
)
def test_a_generation_is_that_of_a_loop_over_its_members(name: str, episodes: int) -> None:
    agent = agent_of(name)
    env: Any = probe_continuous() if name in ("sac", "td3", "reppo") else podium.envs.make("podium/Catch")
    placement = podium.Evolution(sigma=0.3, learning_rate=0.1, weight_decay=0.01, episodes=episodes, devices=1)
    program = build(placement, agent, env)
    start = program.init(5)
    before = jax.device_get(start.agent)
    noise_key, play_key = keys.iteration(start.key, start.update)
    paths = set(chosen(agent, env))

    def vector(state: Any) -> np.ndarray:
        leaves = jax.tree_util.tree_leaves_with_path(state)
        return np.concatenate([np.asarray(x).ravel() for path, x in leaves if jax.tree_util.keystr(path) in paths])

    def moved(state: Any, values: np.ndarray) -> Any:
        at = 0

        def place(path: Any, x: Any) -> Any:
            nonlocal at
            if jax.tree_util.keystr(path) not in paths:
                return x
            at += x.size
            return values[at - x.size : at].reshape(x.shape)

        return jax.tree_util.tree_map_with_path(place, state)

    parameters = vector(before)
    play = jax.jit(make_evaluator(agent, env, episodes, LIMIT))
    returns, all_noise = [], []
    for pair in range(POPULATION // episodes // 2):
        noise = np.asarray(jax.random.normal(jax.random.fold_in(noise_key, pair), parameters.shape))
        for sign in (1, -1):
            params = agent.actor(moved(before, parameters + sign * 0.3 * noise))
            returns.append(float(play(jax.random.fold_in(play_key, pair), params)["eval_return"]))
            all_noise.append(sign * noise)
    # Mean ranks of ties, the slow way.
    ranks = np.array([sum(o < r for o in returns) + (sum(o == r for o in returns) - 1) / 2 for r in returns])
    weights = ranks / (len(returns) - 1) - 0.5
    gradient = 0.01 * parameters - (weights[:, None] * np.array(all_noise)).mean(0) / 0.3
    optimizer = optax.adam(0.1)
    change, _ = optimizer.update(gradient, optimizer.init(parameters))

    state, metrics = program.chunk(start, 1)
    np.testing.assert_allclose(vector(jax.device_get(state.agent)), parameters + change, atol=2e-5)
    np.testing.assert_allclose(metrics["episode_return_sum"][0], np.mean(returns) * POPULATION, rtol=1e-5)
    assert len(set(returns)) > 1
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(state.agent), strict=True):
        same = np.array_equal(x, y)
        assert same != (jax.tree_util.keystr(path) in paths), path


def test_ranks_of_equal_returns_are_equal() -> None:
    returns = np.random.default_rng(0).integers(0, 5, 50).astype(np.float32)
    ranks = np.asarray(centered_ranks(jnp.asarray(returns)))
    assert abs(ranks.sum()) < 1e-5
    assert ranks.min() >= -0.5
    assert ranks.max() <= 0.5
    for value in range(5):
        assert np.ptp(ranks[returns == value]) == 0
        if value:
            assert ranks[returns == value][0] > ranks[returns == value - 1][0]
    np.testing.assert_allclose(centered_ranks(jnp.ones(4)), np.zeros(4))


SIZES: dict[str, Any] = {"hidden_sizes": (8,), "memory_size": 4}
BOX = ArraySpec((2,), low=-1, high=1)
POLICIES: dict[str, tuple[Agent, Any]] = {
    "ppo, normalised": (ppo.make(ppo.Config(normalize_obs=True, normalize_reward=True, **SIZES)), BOX),
    "ppo gru": (ppo.make(ppo.Config(memory="gru", **SIZES)), BOX),
    "ppo gru, separate": (ppo.make(network=actor_critic((8,), memory="gru", memory_size=4, separate=True)), BOX),
    "a2c lstm": (a2c.make(a2c.Config(memory="lstm", **SIZES)), BOX),
    "impala, one torso": (impala.make(impala.Config(torso="small_cnn", **SIZES)), BOX),
    # Bounds of actions are handed to actors, and are nobody's to move, though every action depends on them.
    "ppo, squashed": (ppo.make(ppo.Config(squash=True, **SIZES)), BOX),
    "reppo": (reppo.make(reppo.Config(hidden_sizes=(8,))), BOX),
    "sac": (sac.make(sac.Config(hidden_sizes=(8,), normalize_obs=True)), BOX),
    "td3": (td3.make(td3.Config(hidden_sizes=(8,))), BOX),
    "pqn": (pqn.make(pqn.Config(hidden_sizes=(8,), normalize_obs=True)), DiscreteSpec(2)),
    "pqn gru": (pqn.make(pqn.Config(memory="gru", **SIZES)), DiscreteSpec(2)),
    "dqn": (dqn.make(dqn.Config(hidden_sizes=(8,))), DiscreteSpec(2)),
    # Duelling would compute actions from the value too, though no argmax differs with it.
    "apex": (apex.make(apex.Config(hidden_sizes=(8,), dueling=False)), DiscreteSpec(2)),
    "r2d2": (r2d2.make(r2d2.Config(memory="gru", dueling=False, **SIZES)), DiscreteSpec(2)),
    # Of a distribution, also the value stream moves the argmax; deviations move nothing that is greedy.
    "rainbow": (rainbow.make(rainbow.Config(hidden_sizes=(8,), num_atoms=5)), DiscreteSpec(2)),
}


@pytest.mark.parametrize("name", POLICIES)
def test_what_is_perturbed_is_what_greedy_actions_depend_on(name: str) -> None:
    """Disturb one array of the State after the other, and look whether any of many greedy actions differs."""
    agent, action = POLICIES[name]
    shape = (20, 20, 1) if "torso" in name else (3,)
    spec = EnvSpec("test", ArraySpec(shape), action)
    state, number = agent.init(jax.random.key(0), spec), 256
    leaves, tree = jax.tree.flatten(state)
    random, act_keys = np.random.default_rng(0), jax.random.split(jax.random.key(2), number)
    obs = random.normal(size=(3, number, *shape)).astype(np.float32)

    @jax.jit
    def actions(*leaves: Any) -> Any:
        params, carry = agent.actor(jax.tree.unflatten(tree, leaves)), agent.carry(spec, number)
        taken = []
        for t in range(3):
            output = agent.act(act_keys, params, carry, obs[t], jnp.full(number, t == 0), True)
            carry = output.carry
            taken.append(output.action)
        return jnp.stack(taken)

    before, moved = actions(*leaves), []
    for i, x in enumerate(leaves):
        disturbed = (np.asarray(x) + 5 * random.normal(size=x.shape)).astype(x.dtype)
        moved.append(not np.array_equal(before, actions(*leaves[:i], disturbed, *leaves[i + 1 :])))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    learnt = ["stats" not in path and "bounds" not in path for path in paths]
    expected = [moves and can for moves, can in zip(moved, learnt, strict=True)]
    assert dict(zip(paths, policy_leaves(agent, state), strict=True)) == dict(zip(paths, expected, strict=True))
    assert 4 <= sum(expected) < len(expected)


def test_without_a_mask_it_is_what_the_actor_hands_on_but_for_statistics_and_scalars() -> None:
    env, pendulum = podium.envs.make("podium/Catch"), podium.envs.make("Pendulum-v1")
    for name in ("dqn", "apex"):
        online = chosen(AGENTS[name]._replace(policy_mask=None), env)
        assert online == chosen(AGENTS[name], env) and all(path.startswith(".params[") for path in online)
    normalised = chosen(ppo.make(ppo.Config(normalize_obs=True))._replace(policy_mask=None), pendulum)
    assert normalised and all(path.startswith(".params[") for path in normalised)
    counting = AGENTS["a2c"]._replace(actor=lambda state: (state.params, state.env_steps.total()), policy_mask=None)
    assert all(path.startswith(".params[") for path in chosen(counting, env))


def test_an_agent_with_nothing_to_perturb_is_refused() -> None:
    for masked in (lambda state: False, None):
        blind = AGENTS["ppo"]._replace(actor=lambda state: state.env_steps.total(), policy_mask=masked)
        with pytest.raises(ValueError, match="the policy of ppo has no parameters in its State.*Agent.policy_mask"):
            build(podium.Evolution(devices=1), blind)


def test_the_number_of_devices_and_of_members_at_once_changes_nothing() -> None:
    final = []
    for devices, at_once in ((1, None), (2, None), (4, 2), (1, 4)):
        program = build(podium.Evolution(devices=devices, members_at_once=at_once), AGENTS["ppo"])
        state, metrics = program.chunk(program.init(0), 3)
        final.append((jax.device_get(state.agent.params), metrics["episode_return_sum"]))
    for params, returns in final[1:]:
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), params, final[0][0])
        np.testing.assert_allclose(returns, final[0][1])


def test_only_returns_cross_devices() -> None:
    text = build(podium.Evolution(devices=4), AGENTS["ppo"]).loop.compiled_text()
    kinds = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter|collective-broadcast"
    moved: dict[str, int] = {}
    for shape, kind in re.findall(rf"= (.*?)\s({kinds})(?:-start)?\(", text):
        axes = [[int(n) for n in axes.split(",") if n] for axes in re.findall(r"\w\[([\d,]*)\]", shape)]
        sizes = [int(np.prod(shape, initial=1)) for shape in axes]
        moved[kind] = moved.get(kind, 0) + max(sizes)
    assert moved == {"all-gather": POPULATION, "all-reduce": 1}, moved


def test_a_generation_counts_the_steps_that_were_played() -> None:
    program = build(podium.Evolution(devices=1), AGENTS["ppo"], "CartPole-v1", rollout_length=500, max_updates=1)
    _, metrics = program.chunk(program.init(0), 1)
    assert metrics["valid_steps"][0] == metrics["episode_length_sum"][0] == metrics["episode_return_sum"][0]
    assert POPULATION * 8 < metrics["valid_steps"][0] < POPULATION * 200
    result = podium.train(
        AGENTS["ppo"], "CartPole-v1", num_steps=16_000, num_envs=32, placement=podium.Evolution(devices=1),
        progress=False, eval_every=0,
    )  # fmt: skip
    row = result.metrics[-1]
    assert row["env_steps"] == 16_000
    assert row["valid_steps"] < 16_000


@pytest.mark.parametrize(
    ("changes", "sizes", "words"),
    [
        ({"sigma": 0.0}, {}, "sigma=0.0 must be finite and greater than 0; 0.05 is usual"),
        ({"learning_rate": float("nan")}, {}, "learning_rate=nan must be finite"),
        ({"weight_decay": -1.0}, {}, "weight_decay=-1.0 must be finite and 0 or more"),
        ({"episodes": 0}, {}, "episodes=0 must be an integer of 1 or more; 1 is usual"),
        ({"members_at_once": 1.5}, {}, "members_at_once=1.5 must be an integer of 1 or more; leave it out"),
        ({}, {"num_envs": 7}, "num_envs=7 is not divisible by 2, .*; use 6 or 8"),
        ({"devices": 4}, {"num_envs": 6}, "num_envs=6 is not divisible by 8, .*; use 8"),
        ({}, {"seeds": 2}, "Evolution runs one seed"),
        ({}, {"rollout_length": 0}, "rollout_length=0 must be a positive integer"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], sizes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build(podium.Evolution(**{"devices": 1, **changes}), AGENTS["ppo"], **sizes)


def test_it_says_who_plays_where_and_what_moves() -> None:
    text = build(podium.Evolution(devices=2), AGENTS["ppo"]).explain()
    assert re.search(r"cpu:1 +members 16 to 31", text)
    assert re.search(r"returns +from all to all +128 B", text)
    assert "nothing moves" in build(podium.Evolution(devices=1), AGENTS["ppo"]).explain()


def test_it_says_how_its_metrics_add_up_and_that_nothing_is_lost() -> None:
    for env, layout in ((podium.envs.make("podium/Catch"), "Evolution"), (CATCH_ON_HOST, "HostEvolution")):
        program = build(podium.Evolution(devices=1), AGENTS["ppo"], env)
        _, metrics = program.chunk(program.init(0), 1)
        assert set(metrics) == {*program.additions, "finite"}
        assert (program.layout, program.whole_episodes, program.resume_loses) == (layout, True, "")


@pytest.mark.slow
@pytest.mark.parametrize("on_the_host", [False, True])
def test_another_program_resumes_a_state_exactly(on_the_host: bool) -> None:
    env = CATCH_ON_HOST if on_the_host else podium.envs.make("podium/Catch")
    final = []
    for chunks in ((3,), (1, 2)):
        program = build(podium.Evolution(devices=2), AGENTS["ppo"], env)
        state = program.init(4)
        for updates in chunks:
            abstract = program.abstract_state()
            restored = jax.tree.map(lambda x, to: jax.device_put(jnp.copy(x), to.sharding), state, abstract)
            program = build(podium.Evolution(devices=2), AGENTS["ppo"], env)
            state, _ = program.chunk(restored, updates)
        assert program.update_count(state) == 3
        final.append(jax.device_get(program.agent_state(state)))
    jax.tree.map(np.testing.assert_array_equal, *final)


def test_a_run_resumes_exactly(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "num_envs": POPULATION,
        "placement": podium.Evolution(devices=2),
        "eval_every": 0,
        "log_every": POPULATION * LIMIT,
        "progress": False,
    }
    agent, unit = AGENTS["ppo"], POPULATION * LIMIT
    whole = podium.train(agent, "podium/Catch", num_steps=8 * unit, **settings)
    podium.train(agent, "podium/Catch", num_steps=5 * unit, run_dir=tmp_path / "run", **settings)
    resumed = podium.train(agent, "podium/Catch", num_steps=8 * unit, run_dir=tmp_path / "run", resume=True, **settings)
    assert resumed.summary["params_sha256"] == whole.summary["params_sha256"]


def test_a_resumed_run_keeps_what_decides_about_its_results(tmp_path: Path) -> None:
    agent, unit, folder = AGENTS["ppo"], POPULATION * LIMIT, tmp_path / "run"

    def train(placement: podium.Evolution, **more: Any) -> podium.Result:
        sizes: dict[str, Any] = {"num_steps": unit, "num_envs": POPULATION, "eval_episodes": 4, "progress": False}
        return podium.train(agent, "podium/Catch", placement=placement, run_dir=folder, **sizes, **more)

    first = train(podium.Evolution(devices=1))
    recorded = json.loads((folder / "config.json").read_text())["config"]["placement"]
    assert recorded["name"] == "evolution" and recorded["settings"] == dataclasses.asdict(podium.Evolution(devices=1))
    changes: Any
    for changes, words in (
        ({"sigma": 0.25}, r"placement.settings.sigma was 0.05 and is 0.25\. On --resume may change: "),
        ({"episodes": 2, "weight_decay": 0.1}, "episodes was 1 and is 2; placement.settings.weight_decay was 0.0 and"),
    ):
        with pytest.raises(ValueError, match=words):
            train(podium.Evolution(devices=1, **changes), resume=True)
    again = train(podium.Evolution(devices=jax.devices()[:2], members_at_once=8, actor_timeout=9.0), resume=True)
    assert again.summary["params_sha256"] == first.summary["params_sha256"]


# The last layer of a Q-network is not small at the start, so that it takes more noise to change what is greedy.
_FOR_Q = podium.Evolution(sigma=0.2, learning_rate=0.05, weight_decay=0.005, devices=1)

# A member's noise and products grow with its parameters, so that these are few.
LEARNERS: dict[str, tuple[Agent, podium.Evolution, int, int]] = {
    "ppo": (ppo.make(ppo.Config(hidden_sizes=(32,))), podium.Evolution(devices=1), 1024, 60),
    "a2c": (a2c.make(a2c.Config(hidden_sizes=(32,))), podium.Evolution(devices=1), 1024, 60),
    "impala": (impala.make(impala.Config(hidden_sizes=(32,))), podium.Evolution(devices=1), 1024, 60),
    "dqn": (dqn.make(dqn.Config(hidden_sizes=(16,))), _FOR_Q, 2048, 100),
    "apex": (apex.make(apex.Config(hidden_sizes=(16,))), _FOR_Q, 2048, 100),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "ppo")) for name in LEARNERS])
def test_it_reaches_the_optimum_of_catch(name: str) -> None:
    agent, placement, population, generations = LEARNERS[name]
    result = podium.train(
        agent, "podium/Catch", num_steps=generations * population * LIMIT, num_envs=population,
        placement=placement, progress=False, eval_every=0,
    )  # fmt: skip
    assert result.summary["eval_return"] >= 0.9


@pytest.mark.slow
def test_it_solves_cartpole() -> None:
    result = podium.train(
        ppo.make(ppo.Config()), "CartPole-v1", num_steps=40 * 256 * 500, num_envs=256,
        placement=podium.Evolution(devices=1), progress=False, eval_every=0,
    )  # fmt: skip
    assert result.summary["eval_return"] >= 475
