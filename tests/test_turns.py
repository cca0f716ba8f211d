"""Games of two who move in turn: the sign of a turn, and what is legal, from the environment to every agent."""

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
    PLAY_ON_HOST,
    all_but,
    assert_eight_devices_learn_the_same,
    state_under,
)
from podium import replay
from podium.agents import a2c, apex, dqn, impala, ppo, pqn, r2d2, rainbow
from podium.env import auto_reset
from podium.host import on_host
from podium.networks import Network, actor_critic, q_network
from podium.ops import action_values, returns
from podium.ops.categorical import Support
from podium.rollout import begin, rollout
from podium.seen import only_legal
from podium.testing import check_env, probe_game
from podium.types import Seen

GAMMA = 0.9
SIZES: dict[str, Any] = {"gamma": GAMMA, "learning_rate": 1e-2, "hidden_sizes": (16,)}
OFF = {"buffer_capacity": 1024, "min_replay_size": 64, "batch_size": 64, "target_update_period": 10, "num_updates": 4}
AGENTS: dict[str, Any] = {
    "ppo": lambda: ppo.make(ppo.Config(**SIZES, num_minibatches=1, num_epochs=2)),
    "ppo-gru": lambda: ppo.make(ppo.Config(**SIZES, num_minibatches=1, num_epochs=2, memory="gru", memory_size=8)),
    "a2c": lambda: a2c.make(a2c.Config(**SIZES)),
    "impala": lambda: impala.make(impala.Config(**SIZES, num_minibatches=1)),
    "pqn": lambda: pqn.make(pqn.Config(**SIZES, num_minibatches=1, epsilon_end=0.2)),
    "dqn": lambda: dqn.make(dqn.Config(**SIZES, **OFF)),
    "dqn-3-step": lambda: dqn.make(dqn.Config(**SIZES, **OFF, n_step=3, dueling=True)),
    "apex": lambda: apex.make(apex.Config(**SIZES, **OFF)),
    "rainbow": lambda: rainbow.make(
        rainbow.Config(**SIZES, **OFF, noisy=False, epsilon_start=1.0, v_min=-2.0, v_max=2.0)
    ),
    "r2d2": lambda: r2d2.make(
        r2d2.Config(
            **SIZES,
            **OFF,
            sequence_length=8,
            burn_in=2,
            sequence_period=4,
            memory="gru",
            memory_size=8,
            rescale_values=False,
        )
    ),
}


def test_the_probe_keeps_the_contract() -> None:
    for moves in (1, 2, 3):
        check_env(probe_game(moves))
        check_env(auto_reset(probe_game(moves)))


@pytest.mark.parametrize("moves", [1, 2, 3])
@pytest.mark.parametrize("name", AGENTS)
def test_values_are_those_of_who_moves(name: str, moves: int) -> None:
    agent, env = AGENTS[name](), probe_game(moves)
    length = 8 if name == "r2d2" else 12
    program = podium.Anakin(devices=1).build(agent, env, num_envs=16, rollout_length=length, max_updates=150)
    state, metrics = program.chunk(program.init(0), 150)
    agent_state = program.agent_state(state)
    expected = [1.0, -GAMMA, GAMMA**2][moves - 1]
    # A whole game is worth its end to who made the last move, and the opposite to the other.
    played = metrics["episode_return_sum"].sum() / metrics["episodes"].sum()
    assert played == pytest.approx(1.0 if moves % 2 else -1.0)
    obs = jax.tree.map(lambda x: x[None], env.reset(jax.random.key(0))[1].obs)
    assert _value(name, agent, agent_state, obs) == pytest.approx(expected, abs=0.1)


def _value(name: str, agent: Any, state: Any, obs: Seen) -> float:
    first = jnp.ones(1, bool)
    if name.startswith(("ppo", "a2c", "impala")):
        network = agent.config.network()
        return float(network.apply(state.params, network.carry(1), obs, first)[0].value[0])
    config = agent.config
    if name == "rainbow":
        network = q_network(config.hidden_sizes, config.activation, config.dueling, num_atoms=config.num_atoms)
        mean = Support(config.v_min, config.v_max, config.num_atoms).mean
        return float(only_legal(mean(network.unroll(state.params, (), obs, first)), obs).max())
    memory = {"memory": config.memory, "memory_size": config.memory_size} if name == "r2d2" else {}
    network = q_network(config.hidden_sizes, config.activation, getattr(config, "dueling", False), **memory)
    if name == "pqn":
        network = q_network(config.hidden_sizes, config.activation, layer_norm=True)
    return float(network.apply(state.params, network.carry(1), obs, first)[0].max())


@functools.cache
def by_one_device(name: str) -> Any:
    return state_under(ONE_DEVICE, AGENTS[name](), probe_game(3))


@pytest.mark.parametrize("name", ["ppo-gru", "impala", "dqn-3-step"])
@pytest.mark.parametrize("placement", all_but("eight devices"))
def test_every_placement_learns_the_same(placement: str, name: str) -> None:
    agent, env = AGENTS[name](), probe_game(3)
    assert_close(state_under(PLACEMENTS[placement], agent, env), by_one_device(name), relative=0)
    if placement in PLAY_ON_HOST and name == "dqn-3-step":
        assert_close(state_under(PLACEMENTS[placement], agent, on_host(env)), by_one_device(name), relative=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo-gru", "impala", "dqn-3-step"])
def test_eight_devices_learn_the_same(name: str) -> None:
    assert_eight_devices_learn_the_same(AGENTS[name](), probe_game(3))


def test_evolution_and_populations_play_it() -> None:
    env = probe_game(2)
    state_under(podium.Evolution(devices=1), AGENTS["ppo"](), env, updates=2)
    space = {"learning_rate": podium.log_range(1e-4, 1e-2, 2)}
    program = podium.Population(members=2, space=space, devices=1).build(
        AGENTS["ppo"](), env, num_envs=8, rollout_length=8, max_updates=2
    )
    _, metrics = program.chunk(program.init(0), 2)
    assert metrics["finite"].all()


def test_an_evaluation_counts_for_who_moves_first() -> None:
    for moves, expected in ((1, 1.0), (2, -1.0), (3, 1.0)):
        env = probe_game(moves)
        result = podium.train(AGENTS["ppo"](), env, num_steps=128, num_envs=8, rollout_length=8, progress=False)
        assert result.summary["eval_return"] == expected
        for played in (env, on_host(env)):
            assert podium.evaluate(result.policy, played, num_episodes=4)["eval_return"] == expected


def test_an_environment_may_be_evaluated_in_another() -> None:
    env = probe_game(1)._replace(evaluation=_paying(7.0))
    result = podium.train(AGENTS["ppo"](), env, num_steps=128, num_envs=8, rollout_length=8, progress=False)
    assert result.summary["eval_return"] == 7.0


def _paying(reward: float) -> Any:
    env = probe_game(1)

    def step(key: Any, state: Any, action: Any) -> Any:
        state, timestep = env.step(key, state, action)
        return state, timestep._replace(reward=jnp.float32(reward))

    return env._replace(step=step)


def test_n_step_returns_turn_with_the_players() -> None:
    rng, n, gamma = np.random.default_rng(0), 4, 0.9
    for _ in range(200):
        reward, turn = rng.normal(size=n).astype(np.float32), rng.choice([-1.0, 1.0], n).astype(np.float32)
        terminated, truncated, valid = (rng.random(n) < p for p in (0.2, 0.2, 0.9))
        total, factor, length = 0.0, 1.0, 0
        for i in range(n):
            if i and not valid[i]:
                break
            total += factor * reward[i]
            factor, length = factor * gamma * turn[i], i + 1
            if terminated[i] or truncated[i]:
                factor *= not terminated[i]
                break
        found = replay.n_step_return(
            *map(jnp.asarray, (reward, terminated, truncated, valid)), gamma, jnp.asarray(turn)
        )
        np.testing.assert_allclose(found[:2], (total, factor), rtol=1e-5, atol=1e-6)
        assert int(found[2]) == length


def test_advantages_turn_with_the_players() -> None:
    """With lambda 1 the advantage is what the game came to for who moved, less the value."""
    env, agent = auto_reset(probe_game(3)), AGENTS["ppo"]()
    params = agent.actor(agent.init(jax.random.key(0), env.spec))
    state = begin(jax.random.key(1), env, jnp.arange(4), ())
    _, trajectory, _ = rollout(jax.random.key(2), agent, env, params, state, 9, jnp.int32(0))
    value = trajectory.extras.value
    next_value = jnp.concatenate([value[1:], value[:1]])
    discount = GAMMA * trajectory.discount
    advantage = returns.gae(trajectory.reward, discount, value, next_value, trajectory.last, 1.0)
    expected = np.tile([GAMMA**2, -GAMMA, 1.0], 3)[:, None]
    np.testing.assert_allclose(advantage + value, np.broadcast_to(expected, value.shape), rtol=1e-5)
    assert not (trajectory.action == 1).any()


def test_what_is_drawn_at_random_is_legal_and_uniform() -> None:
    legal = jnp.array([[True, False, True, True], [False, True, False, False]])
    value = jnp.where(legal, 0.0, -1e9)
    draw = lambda key: action_values.epsilon_greedy(jax.random.split(key, 2), value, jnp.float32(1.0), legal)
    drawn = np.asarray(jax.vmap(draw)(jax.random.split(jax.random.key(0), 6000)))
    counts = np.bincount(drawn[:, 0], minlength=4) / 6000
    np.testing.assert_allclose(counts, [1 / 3, 0, 1 / 3, 1 / 3], atol=0.03)
    assert (drawn[:, 1] == 1).all()


def test_a_critic_sees_the_world_and_the_policy_its_view() -> None:
    spec = probe_game(2).spec
    spec = podium.types.EnvSpec("world", spec.obs._replace(world=podium.types.ArraySpec((5,))), spec.action)
    network = actor_critic((4,))
    params = network.init(jax.random.key(0), spec)
    seen = Seen(jnp.ones((1, 2)), jnp.array([[True, False, True]]), jnp.ones((1, 5)), jnp.zeros(1, jnp.int32))
    same, other = (network.unroll(params, (), seen._replace(world=x * seen.world), jnp.ones(1, bool)) for x in (1, 2))
    np.testing.assert_array_equal(same.policy.logits, other.policy.logits)
    assert same.value != other.value
    other = network.unroll(params, (), seen._replace(view=2 * seen.view), jnp.ones(1, bool))
    assert same.value == other.value and not np.array_equal(same.policy.logits, other.policy.logits)


@pytest.mark.parametrize("name", ["dqn", "pqn", "r2d2"])
def test_a_network_of_ones_own_need_not_know_what_is_legal(name: str) -> None:
    """A table of three actions' values, in which the one that is not legal is by far the best."""

    def of_rows(params: Any, memory: Any, obs: Any, first: Any) -> Any:
        return jnp.broadcast_to(params, (*first.shape, 3))

    table = Network(
        init=lambda key, spec: jnp.array([0.0, 100.0, 0.0]),
        carry=lambda num_envs: jnp.zeros((num_envs, 1)) if name == "r2d2" else (),
        apply=lambda params, memory, obs, first: (of_rows(params, memory, obs, first), memory),
        unroll=of_rows,
        recurrent=name == "r2d2",
    )
    config = AGENTS[name]().config
    agent = {"dqn": dqn, "pqn": pqn, "r2d2": r2d2}[name].make(config, network=table)
    program = podium.Anakin(devices=1).build(agent, probe_game(2), num_envs=16, rollout_length=8, max_updates=20)
    state, metrics = program.chunk(program.init(0), 20)
    params = program.agent_state(state).params
    played = metrics["episode_return_sum"].sum() / metrics["episodes"].sum()
    assert played == -1, "what is not legal pays 10 more"
    assert params[1] == 100 and np.abs(np.delete(params, 1)).max() < 2, "nothing is made of its value"


def test_views_are_normalised_and_what_is_legal_is_not() -> None:
    agent = ppo.make(ppo.Config(hidden_sizes=(8,), num_minibatches=1, normalize_obs=True))
    params = state_under(ONE_DEVICE, agent, probe_game(2), updates=3).params
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(params))


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="normalize_reward=True: in probe_game two players take turns"):
        ppo.make(ppo.Config(normalize_reward=True)).init(jax.random.key(0), probe_game().spec)
    many = podium.types.EnvSpec("many", podium.types.ArraySpec((2,)), podium.types.DiscreteSpec(3, shape=(4,)))
    for agent in (ppo.make(), dqn.make()):
        with pytest.raises(ValueError, match=r"many takes discrete actions of shape \[4\] at once"):
            agent.init(jax.random.key(0), many)
