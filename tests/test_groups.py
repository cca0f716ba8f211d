"""Groups of agents that act together, each with an agent of its own."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from alike import assert_close

import podium
from everywhere import ONE_DEVICE, PLACEMENTS, state_under
from podium import testing
from podium.agents import a2c, apex, dqn, impala, ippo, mappo, ppo, r2d2, vdn
from podium.env import auto_reset
from podium.learn import learn
from podium.multi import groups, returns_of, shared
from podium.rollout import begin, rollout

NUMBER = 3
SIZES: dict[str, Any] = {"hidden_sizes": (16,), "learning_rate": 1e-2}
OFF = {"buffer_capacity": 2048, "min_replay_size": 64, "batch_size": 64, "num_updates": 4, "epsilon_decay_steps": 1000}

team = functools.partial(testing.probe_team, NUMBER)

_PPO: Any = functools.partial(ppo.Config, **SIZES)
_DQN: Any = functools.partial(dqn.Config, **SIZES, **OFF)
RANKED = apex.Config(**SIZES, **{**OFF, "batch_size": 32}, num_actors=8)

AGENTS: dict[str, Any] = {
    # Apart and not in order: agents 2 and 0, and 1 between them.
    "mappo and ppo": lambda: groups(
        {"ends": (mappo.make(mappo.Config(**SIZES)), [2, 0]), "mid": (ppo.make(_PPO()), [1])}
    ),
    "gru and steps": lambda: groups(
        {
            "ends": (ppo.make(_PPO(memory="gru", memory_size=8, num_minibatches=2)), [0, 2]),
            "mid": (ppo.make(_PPO(num_minibatches=2)), [1]),
        }
    ),
    "a2c and impala": lambda: groups(
        {"first": (a2c.make(a2c.Config(**SIZES)), [0]), "rest": (impala.make(impala.Config(**SIZES)), [1, 2])}, 8
    ),
    "dqn and apex": lambda: groups({"first": (dqn.make(_DQN()), [0]), "rest": (apex.make(RANKED), (1, 2))}),
    "vdn and dqn": lambda: groups(
        {"rest": (vdn.make(vdn.Config(**SIZES, **OFF)), (1, 2)), "first": (dqn.make(_DQN()), [0])}
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", AGENTS)
def test_they_learn(name: str) -> None:
    result = podium.train(
        AGENTS[name](), team(dies=True), num_steps=16 * 8 * 100, num_envs=16, rollout_length=8, progress=False
    )
    assert result.summary["eval_return"] == pytest.approx(2.0, abs=0.1)


SPREAD: dict[str, Any] = {"num_envs": 16, "num_lanes": 8}


@functools.cache
def by_one_device(name: str) -> Any:
    return state_under(ONE_DEVICE, AGENTS[name](), team(3, dies=True), **SPREAD)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mappo and ppo", "gru and steps", "dqn and apex"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_placement_learns_the_same(placement: str, name: str) -> None:
    found = state_under(PLACEMENTS[placement], AGENTS[name](), team(3, dies=True), **SPREAD)
    assert_close(found, by_one_device(name), relative=0)


@functools.cache
def played(name: str) -> Any:
    env, agent = auto_reset(team(3, dies=True)), AGENTS[name]()
    state = agent.init(jax.random.key(0), env.spec)
    start = begin(jax.random.key(1), env, jnp.arange(4), agent.carry(env.spec, 4))
    _, trajectory, _ = rollout(jax.random.key(2), agent, env, agent.actor(state), start, 6, jnp.int32(0))
    return agent, state, trajectory


def test_each_group_acts_for_its_own_by_its_own_parameters() -> None:
    agent, state, trajectory = played("mappo and ppo")
    assert trajectory.action.shape == (6, 4, NUMBER)
    params = agent.actor(state)
    keys, first = jax.random.split(jax.random.key(5), 4), jnp.ones(4, bool)
    obs = jax.tree.map(lambda x: x[0], trajectory.obs)
    output = agent.act(keys, params, agent.carry(team().spec, 4), obs, first, True)
    ends, mid = shared(ppo.make(_PPO())), shared(ppo.make(_PPO()))
    for one, members, name in ((ends, [2, 0], "ends"), (mid, [1], "mid")):
        theirs = jax.tree.map(lambda x, members=members: x[:, np.array(members)], obs)
        alone = one.act(keys, params[name], (), theirs, first, True)
        np.testing.assert_array_equal(output.action[:, np.array(members)], alone.action)
        np.testing.assert_allclose(output.extras[name].value, alone.extras.value, rtol=1e-6)
    # What one group's parameters are does not matter to the other.
    other = {**params, "mid": jax.tree.map(lambda x: x + 1, params["mid"])}
    changed = agent.act(keys, other, agent.carry(team().spec, 4), obs, first, True)
    np.testing.assert_array_equal(changed.action[:, [0, 2]], output.action[:, [0, 2]])
    assert np.abs(changed.extras["mid"].value - output.extras["mid"].value).max() > 0


def test_a_group_of_all_is_an_agent_that_all_share() -> None:
    """With one minibatch an iteration nothing is left to be shuffled otherwise."""
    config = _PPO(num_minibatches=1)
    agent, alone = groups({"all": (ppo.make(config), range(NUMBER))}), shared(ppo.make(config))
    env = auto_reset(team(3, dies=True))
    state = alone.init(jax.random.key(0), env.spec)
    start = begin(jax.random.key(1), env, jnp.arange(4), ())
    _, trajectory, _ = rollout(jax.random.key(2), alone, env, alone.actor(state), start, 6, jnp.int32(0))
    expected = learn(jax.random.key(3), alone, state, (), trajectory, 2)
    told = trajectory._replace(extras={"all": trajectory.extras}, carry={"all": ()}, end_carry={"all": ()})
    found = learn(jax.random.key(3), agent, {"all": state}, (), told, 2)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found.state["all"], expected.state
    )
    assert found.metrics["loss"] == pytest.approx(float(expected.metrics["loss"]), rel=1e-5)
    assert found.metrics["loss"] == found.metrics["all/loss"]


def test_losses_add_up_and_groups_learn_from_their_own_rewards() -> None:
    agent, state, trajectory = played("mappo and ppo")
    metrics = learn(jax.random.key(3), agent, state, (), trajectory, 2).metrics
    assert metrics["loss"] == pytest.approx(float(metrics["ends/loss"] + metrics["mid/loss"]), rel=1e-5)
    # The reward of agent 1 is nothing to agents 0 and 2.
    richer = trajectory._replace(reward=trajectory.reward.at[:, :, 1].add(3))
    a, b = (learn(jax.random.key(3), agent, state, (), x, 2).state for x in (trajectory, richer))
    jax.tree.map(np.testing.assert_array_equal, a["ends"], b["ends"])
    assert any((x != y).any() for x, y in zip(*map(jax.tree.leaves, (a["mid"].params, b["mid"].params)), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mappo and ppo", "dqn and apex"])
def test_a_resumed_run_is_the_same(tmp_path: Any, name: str) -> None:
    def train(folder: str, num_steps: int, **more: Any) -> str:
        sizes = {"num_envs": 8, "rollout_length": 8, "eval_every": 256, "checkpoint_every": 256, "progress": False}
        result = podium.train(AGENTS[name](), team(dies=True), num_steps=num_steps, run_dir=tmp_path / folder,
                              **sizes, **more)  # fmt: skip
        return result.summary["params_sha256"]

    whole = train("whole", 512)
    train("halves", 256)
    assert train("halves", 512, resume=True) == whole


def test_returns_of_one_group() -> None:
    env = team(2)
    wrong_but_last = lambda obs: jnp.where(jnp.arange(NUMBER) == 2, jnp.argmax(obs.view, -1), 3)
    state, timestep = jax.vmap(env.reset)(jax.random.split(jax.random.key(0), 5))
    for members, paid in (((2,), 1.0), ((0, 1), 0.0), ((2, 0), 0.5)):
        _, told = jax.vmap(returns_of(env, members).step)(
            jax.random.split(jax.random.key(1), 5), state, wrong_but_last(timestep.obs)
        )
        assert told.info["raw_reward"].mean() == paid and told.reward.shape == (5, NUMBER)


_TWO = {"a": (ppo.make(), [0, 1]), "b": (ppo.make(), [2])}
_CRITIC = ppo.make(ppo.Config(target_kl=0.1))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: groups({}), "one or more"),
        (lambda: groups({"a": ppo.make()}), r"must be \(podium.Agent, members\)"),
        (lambda: groups({"a": (ppo.make(), [])}), "one at least"),
        (lambda: groups({"a": (ppo.make(), ["x"])}), "must be numbers of agents"),
        (lambda: groups({"a/b": (ppo.make(), [0])}), "is no name of a group"),
        (lambda: groups({"a": (ppo.make(), [0, 1]), "b": (ppo.make(), [1, 2])}), "Agent 1 is in group 'a' and in 'b'"),
        (lambda: groups({"a": (ppo.make(), [0]), "b": (ppo.make(), [2])}), r"Agents \[1\] are in no group"),
        (lambda: groups(_TWO).init(jax.random.key(0), podium.envs.make("podium/Tag").spec), "podium/Tag has 10"),
        (lambda: groups({"a": (ppo.make(), [0]), "b": (a2c.make(), [1])}), "'a' of 128 steps, 'b' of 5 steps; give"),
        (lambda: groups({"a": (ppo.make(), [0]), "b": (dqn.make(), [1])}), "for all groups, or for none"),
        (lambda: groups({"a": (ppo.make(ppo.Config(normalize_reward=True)), [0])}), "group 'a': .*normalize_reward"),
        (
            lambda: groups({"a": (dqn.make(), [0]), "b": (dqn.make(dqn.Config(num_updates=2)), [1])}),
            "1 in group 'a', 2 in group 'b'",
        ),
        (
            lambda: groups({"a": (dqn.make(), [0]), "b": (dqn.make(dqn.Config(samples_per_insert=4.0)), [1])}),
            "by num_updates in group 'a'",
        ),
        (lambda: groups({"a": (dqn.make(), [0]), "b": (r2d2.make(), [1])}, 8), "windows of one length"),
        (
            lambda: groups({"a": (vdn.make(vdn.Config(samples_per_insert=4.0)), [0, 1])}),
            "it does not say; use num_updates",
        ),
        (lambda: shared(mappo.make()), "acts for several agents already"),
        (lambda: returns_of(podium.envs.make("CartPole-v1"), [0]), "one agent"),
        (lambda: returns_of(team(), [3]), "has agents 0 to 2"),
    ],
)
def test_what_cannot_be_is_refused(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_minibatches_that_cannot_be_joined_are_refused_before_a_compile() -> None:
    agent = groups({"a": (ppo.make(_PPO(num_epochs=2)), [0, 1]), "b": (ppo.make(_PPO(num_epochs=3)), [2])})
    with pytest.raises(ValueError, match="num_epochs is 2 in group 'a', 3 in group 'b'"):
        podium.Anakin(devices=1).build(agent, team(), num_envs=8, rollout_length=8)


def test_one_groups_divergence_of_policies_ends_an_iteration_for_all() -> None:
    agent = groups({"a": (_CRITIC, [0, 1]), "b": (ppo.make(), [2])})
    assert agent.stops is not None
    metrics = {"a/approx_kl": jnp.float32(0.2), "b/approx_kl": jnp.float32(0.0)}
    assert bool(agent.stops(metrics)) and not bool(agent.stops({**metrics, "a/approx_kl": jnp.float32(0.05)}))


def test_groups_of_a_replay_learn_equally_often() -> None:
    """A step of the environment is one of one group, in minibatches of 32, and two of the other, in those of 64."""
    few = dqn.make(dqn.Config(**SIZES, **{**OFF, "batch_size": 32}, samples_per_insert=8.0))
    many = dqn.make(dqn.Config(**SIZES, **{**OFF, "batch_size": 64}, samples_per_insert=8.0))
    agent = groups({"one": (few, [0]), "two": (many, [1, 2])})
    assert agent.replay is not None and agent.replay.updates_per_step == 8 / 32
    with pytest.raises(ValueError, match="learn equally often"):
        groups({"one": (many, [0]), "two": (many, [1, 2])})


def test_lanes_divide_the_batch_of_every_group() -> None:
    some = dqn.make(dqn.Config(**SIZES, **{**OFF, "batch_size": 12}))
    more = dqn.make(dqn.Config(**SIZES, **{**OFF, "batch_size": 20}))
    agent, build = groups({"a": (some, [0]), "b": (more, [1, 2])}), podium.Anakin(devices=1).build
    assert build(agent, team(), num_envs=8, rollout_length=8).sizes.num_lanes == 4
    with pytest.raises(ValueError, match="batch_size=12 of group 'a' is not divisible by num_lanes=8; use 8 or 16"):
        build(agent, team(), num_envs=8, rollout_length=8, num_lanes=8)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mappo", "shared", "groups"])
def test_evolution_finds_them_too(name: str) -> None:
    agents = {
        "mappo": lambda: mappo.make(mappo.Config(**SIZES)),
        "shared": lambda: shared(ppo.make(_PPO())),
        "groups": AGENTS["mappo and ppo"],
    }
    result = podium.train(
        agents[name](), team(), num_steps=128 * 2 * 60, num_envs=128, placement=podium.Evolution(), progress=False
    )
    assert result.summary["eval_return"] == pytest.approx(2.0, abs=0.1)


_POPULATION = podium.Population(
    members=4, exploit_every=512, space={"learning_rate": podium.Draws(1e-5, 1e-1, log=True)}
)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ippo", "mappo", "shared"])
def test_a_population_of_what_all_share(name: str) -> None:
    agents = {
        "ippo": lambda: ippo.make(ippo.Config(**SIZES)),
        "mappo": lambda: mappo.make(mappo.Config(**SIZES)),
        "shared": lambda: shared(ppo.make(_PPO())),
    }
    sizes = {"num_steps": 4096, "num_envs": 8, "rollout_length": 8, "progress": False}
    result = podium.train(agents[name](), team(), placement=_POPULATION, **sizes)
    assert result.summary["eval_return"] == pytest.approx([2.0] * 4, abs=0.1)


def test_a_population_of_groups_is_refused() -> None:
    with pytest.raises(ValueError, match="groups has no `make`, so its numbers cannot vary"):
        _POPULATION.build(AGENTS["mappo and ppo"](), team(), num_envs=8, rollout_length=8)
