"""Agents that act together share an agent: what each sees, does and is paid, and what the placements make of it."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from alike import assert_close

import podium
from everywhere import (
    ONE_DEVICE,
    PLACEMENTS,
    all_but,
    assert_eight_devices_learn_the_same,
    state_under,
)
from podium import replay, testing
from podium.agents import dqn, ippo, mappo, ppo, pqn
from podium.env import Env, auto_reset
from podium.multi import shared, spec_of_one
from podium.rollout import begin, rollout
from podium.types import ArraySpec, DiscreteSpec, EnvSpec, Seen

NUMBER, CUES = 3, 4


def team(length: int = 2, dies: bool = False) -> Env:
    return testing.probe_team(NUMBER, length, dies)


SIZES: dict[str, Any] = {"hidden_sizes": (16,), "learning_rate": 1e-2}
OFF = {"buffer_capacity": 2048, "min_replay_size": 64, "batch_size": 64, "num_updates": 4, "epsilon_decay_steps": 1000}
AGENTS: dict[str, Any] = {
    "mappo": lambda: mappo.make(mappo.Config(**SIZES)),
    "mappo-gru": lambda: mappo.make(mappo.Config(**SIZES, memory="gru", memory_size=8, num_minibatches=1)),
    "ippo": lambda: ippo.make(ippo.Config(**SIZES)),
    "ippo-gru": lambda: ippo.make(ippo.Config(**SIZES, memory="gru", memory_size=8, num_minibatches=1)),
    "pqn": lambda: shared(pqn.make(pqn.Config(**SIZES, num_minibatches=2, epsilon_end=0.1, epsilon_decay_steps=1000))),
    "dqn": lambda: shared(dqn.make(dqn.Config(**SIZES, **OFF)), NUMBER),
}


@pytest.mark.parametrize("dies", [False, True], ids=["all live", "one dies"])
@pytest.mark.parametrize("name", AGENTS)
def test_they_learn(name: str, dies: bool) -> None:
    result = podium.train(
        AGENTS[name](), team(dies=dies), num_steps=16 * 8 * 60, num_envs=16, rollout_length=8, progress=False
    )
    assert result.summary["eval_return"] == pytest.approx(2.0, abs=0.1)


@functools.cache
def by_one_device(name: str) -> Any:
    return state_under(ONE_DEVICE, AGENTS[name](), team(3, dies=True))


@pytest.mark.parametrize("name", ["mappo", pytest.param("mappo-gru", marks=pytest.mark.slow), "ippo-gru", "dqn"])
@pytest.mark.parametrize("placement", all_but("eight devices"))
def test_every_placement_learns_the_same(placement: str, name: str) -> None:
    found = state_under(PLACEMENTS[placement], AGENTS[name](), team(3, dies=True))
    assert_close(found, by_one_device(name), relative=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mappo", "ippo-gru", "dqn"])
def test_eight_devices_learn_the_same(name: str) -> None:
    assert_eight_devices_learn_the_same(AGENTS[name](), team(3, dies=True))


def test_what_happens_to_one_is_its_own() -> None:
    """Observation, action, reward, memory and value of agent n stay together, in the order of the environment's."""
    env, agent = auto_reset(team(3)), AGENTS["ippo-gru"]()
    state = agent.init(jax.random.key(0), env.spec)
    start = begin(jax.random.key(1), env, jnp.arange(4), agent.carry(env.spec, 4))
    _, trajectory, _ = rollout(jax.random.key(2), agent, env, agent.actor(state), start, 6, jnp.int32(0))
    assert trajectory.action.shape == trajectory.reward.shape == (6, 4, NUMBER)
    named = trajectory.action == jnp.argmax(trajectory.obs.view, axis=-1)
    np.testing.assert_array_equal(trajectory.reward, named.astype(np.float32))
    assert not (trajectory.action == CUES - 1).any()
    batch = agent.plan(jax.random.key(3), state, trajectory).data
    assert batch.action.shape == (6, 4 * NUMBER)
    np.testing.assert_array_equal(batch.action.reshape(6, 4, NUMBER), trajectory.action)
    np.testing.assert_array_equal(batch.obs.view.reshape(6, 4, NUMBER, CUES), trajectory.obs.view)
    # Alone, with the same memory and sight, an agent thinks the same.
    base = ppo.make(ppo.Config(**SIZES, memory="gru", memory_size=8))
    obs = Seen(trajectory.obs.view[0, 2, 1:2], trajectory.obs.legal[0, 2, 1:2])
    alone = base.act(jax.random.split(jax.random.key(0), 1), agent.actor(state), base.carry(env.spec, 1), obs,
                     jnp.ones(1, bool), False)  # fmt: skip
    np.testing.assert_allclose(alone.extras.value[0], trajectory.extras.value[0, 2, 1], rtol=1e-5)


def test_to_who_dies_the_step_terminates() -> None:
    env, agent = auto_reset(team(4, dies=True)), AGENTS["ippo"]()
    state = agent.init(jax.random.key(0), env.spec)
    start = begin(jax.random.key(1), env, jnp.arange(2), agent.carry(env.spec, 2))
    _, trajectory, _ = rollout(jax.random.key(2), agent, env, agent.actor(state), start, 8, jnp.int32(0))
    seen = []
    shared(ppo.make()._replace(observe=lambda state, each: seen.append(each))).observe(None, trajectory)
    terminated = np.asarray(seen[0].terminated).reshape(8, 2, NUMBER)
    valid = np.asarray(trajectory.valid)
    # The last one dies once in each episode, before it ends; the others live to the end.
    assert terminated[:, :, :2].sum() == 2 * 2 * 2 and (terminated[3::4, :, :2]).all()
    for b in range(2):
        deaths = np.flatnonzero(terminated[:, b, 2] & valid[:, b, 2])
        assert len(deaths) == 2 and not valid[deaths + 1, b, 2].any()


@pytest.mark.parametrize("gap", [False, True])
@pytest.mark.parametrize("kind", ["uniform", "prioritized", "sequences"])
def test_who_dies_between_two_rollouts_terminates_in_a_replay_too(kind: str, gap: bool) -> None:
    """Rollouts of one step, of two agents in each of two environments: the second dies after the first step."""
    windows = {"sequence_length": 2, "burn_in": 0, "sequence_period": 1} if kind == "sequences" else {}
    own = getattr(replay, kind)(64, 8, 1, **windows)
    several = shared(dqn.make(dqn.Config(hidden_sizes=(4,)), buffer=own), 2).replay
    assert several is not None and several.cut is not None
    flag, number = jax.ShapeDtypeStruct((), bool), jax.ShapeDtypeStruct((), np.float32)
    item = replay.Transition(number, number, number, flag, flag, number, flag)
    state = several.init(item, 2, 1, 1)
    for time, alive in enumerate([[1, 1, 1, 1], [1, 0, 1, 0], [1, 0, 1, 0]]):
        row, no = jnp.full((1, 4), float(time)), jnp.zeros((1, 4), bool)
        if time == 1:
            state = several.cut(state, jnp.array([gap, False]))
        state = several.add(state, replay.Transition(row, row, row, no, no, row, jnp.array([alive], bool)))
    terminated = getattr(state, "ring", state).items.terminated[0, :3]
    np.testing.assert_array_equal(terminated[0], [False, not gap, False, True])
    assert not terminated[1:].any()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"memory": "gru"},
        pytest.param({"memory": "lstm"}, marks=pytest.mark.slow),
        pytest.param({"torso": "minatar_cnn"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("make", [mappo.make, ippo.make])
def test_the_critic_of_mappo_alone_sees_the_world(make: Any, settings: dict[str, Any]) -> None:
    frames, world = ArraySpec((NUMBER, 10, 10, 2)), ArraySpec((NUMBER, 10, 10, 3))
    spec = EnvSpec("team", Seen(frames, None, world), DiscreteSpec(4, shape=(NUMBER,)), num_agents=NUMBER)
    agent = make((mappo.Config if make is mappo.make else ippo.Config)(hidden_sizes=(8,), memory_size=4, **settings))
    state, keys, first = agent.init(jax.random.key(0), spec), jax.random.split(jax.random.key(1), 2), jnp.ones(2, bool)
    views = jax.random.normal(jax.random.key(2), (2, *frames.shape))

    def acted(shift: float) -> Any:
        obs = Seen(views, None, jnp.full((2, *world.shape), shift))
        return agent.act(keys, agent.actor(state), agent.carry(spec, 2), obs, first, False)

    one, other = acted(0.5), acted(2.0)
    np.testing.assert_array_equal(one.action, other.action)
    np.testing.assert_array_equal(one.extras.log_prob, other.extras.log_prob)
    assert (np.asarray(one.extras.value) == other.extras.value).all() == (make is ippo.make)


def test_returns_are_means_of_agents() -> None:
    env = team(2)
    result = podium.train(AGENTS["mappo"](), env, num_steps=128, num_envs=8, rollout_length=8, progress=False)
    found = podium.evaluate(result.policy, env, num_episodes=64)["eval_return"]
    assert 0 <= found <= 2
    rows = [row for row in result.metrics if row.get("episode_return") is not None]
    assert all(0 <= row["episode_return"] <= 2 for row in rows) and rows


def test_a_resumed_run_is_the_same(tmp_path: Any) -> None:
    def train(folder: str, num_steps: int, **more: Any) -> str:
        sizes = {"num_envs": 8, "rollout_length": 8, "eval_every": 256, "checkpoint_every": 256, "progress": False}
        result = podium.train(AGENTS["mappo"](), team(dies=True), num_steps=num_steps, run_dir=tmp_path / folder,
                              **sizes, **more)  # fmt: skip
        return result.summary["params_sha256"]

    whole = train("whole", 512)
    train("halves", 256)
    assert train("halves", 512, resume=True) == whole


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: shared(ppo.make(ppo.Config(normalize_reward=True))), "normalize_reward=True"),
        (lambda: shared(dqn.make()), "give num_agents"),
        (lambda: shared(ppo.make(), 0), "num_agents=0"),
        (lambda: shared(ppo.make(), 2).init(jax.random.key(0), team().spec), "num_agents=2, but probe_team has 3"),
        (lambda: ppo.make().init(jax.random.key(0), team().spec), r"of shape \[3\] at once"),
        (lambda: shared(ppo.make()).init(jax.random.key(0), podium.envs.make("CartPole-v1").spec), "has one agent"),
        (lambda: mappo.make().init(jax.random.key(0), blind(team().spec)), "have no world for a critic"),
        (lambda: mappo.make().init(jax.random.key(0), podium.envs.make("podium/Catch").spec), "has one agent"),
    ],
)
def test_what_cannot_be_is_refused(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def blind(spec: EnvSpec) -> EnvSpec:
    return EnvSpec(spec.name, spec.obs._replace(world=None), spec.action, num_agents=spec.num_agents)


def test_each_ones_spec() -> None:
    one = spec_of_one(team().spec)
    assert one.obs.view.shape == (CUES,) and one.action.shape == () and one.num_agents is None


def test_agents_that_act_between_different_bounds_share_no_policy() -> None:
    """That of the first would be taken for all."""
    spec = EnvSpec(
        "arms", ArraySpec((2, 3)), ArraySpec((2, 1), np.float32, -1, np.array([[1.0], [2.0]])), 5, num_agents=2
    )
    with pytest.raises(ValueError, match=r"agents of arms act between different bounds \(high=\[\[1.0\], \[2.0\]\]\)"):
        spec_of_one(spec)
