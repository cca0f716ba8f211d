"""Evaluation: whole episodes, once each, bounded, on keys of its own; policies act alone and in batches."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import podium
from podium import envs
from podium.agent import ActOutput
from podium.agents import ppo
from podium.env import Env
from podium.evaluate import Policy, make_evaluator

AGENT = ppo.make(ppo.Config(hidden_sizes=(8,)))


def always(action: int) -> Any:
    """Return an agent that does one thing, whatever it sees."""

    def act(keys: Any, params: Any, carry: Any, obs: Any, first: Any, greedy: bool) -> ActOutput:
        return ActOutput(jnp.full(first.shape, action, jnp.int32), carry)

    return AGENT._replace(act=act)


def play(agent: Any, env: Env, episodes: int = 16, **options: Any) -> dict[str, float]:
    function = jax.jit(make_evaluator(agent, env, episodes, **options))
    return {name: float(value) for name, value in function(jax.random.key(0), ()).items()}


def test_the_return_of_a_known_policy() -> None:
    """To the right through 6 cells: 5 steps and a reward of 1; to the left for ever: 30 steps and nothing."""
    env = envs.make("podium/Corridor", length=6, max_steps=30)
    right, left = play(always(1), env), play(always(0), env)
    assert (right["eval_return"], right["eval_length"], right["eval_unfinished"]) == (1, 5, 0)
    assert (left["eval_return"], left["eval_length"], left["eval_unfinished"]) == (0, 30, 0)


def test_episodes_that_the_bound_cuts_are_reported() -> None:
    result = play(always(0), envs.make("podium/Corridor", length=6, max_steps=30), max_steps=7)
    assert (result["eval_length"], result["eval_unfinished"]) == (7, 1)


def test_an_episode_counts_once_though_others_go_on() -> None:
    """CartPole pushed one way falls after 8 to 10 steps, not at once everywhere; reward is 1 a step."""
    result = play(always(0), envs.make("CartPole-v1"), 32)
    assert 8 <= result["eval_length"] <= 11 and result["eval_return"] == result["eval_length"]
    assert result["eval_return_min"] <= result["eval_return"] and result["eval_return_std"] > 0


def test_a_lost_life_is_no_end() -> None:
    """Where the environment says which ends are whole episodes' (`info["episode_end"]`), only those count."""
    plain = envs.make("podium/Corridor", length=6, max_steps=30)

    def mark(pair: Any, ended: Any) -> Any:
        return pair[0], pair[1]._replace(info=pair[1].info | {"episode_end": ended(pair[1])})

    def step(key: Any, state: Any, action: Any) -> Any:
        pair = mark(plain.step(key, state, action), lambda timestep: timestep.last)
        return pair[0], pair[1]._replace(terminated=jnp.ones((), bool))

    env = plain._replace(reset=lambda key: mark(plain.reset(key), lambda timestep: timestep.last), step=step)
    result = play(always(1), env)
    assert (result["eval_return"], result["eval_length"], result["eval_unfinished"]) == (1, 5, 0)


def test_the_raw_reward_is_reported() -> None:
    plain = envs.make("podium/Corridor", length=4)
    scaled = envs.wrappers.scale_reward(plain, 10.0)
    assert play(always(1), scaled)["eval_return"] == play(always(1), plain)["eval_return"] == 1


@pytest.mark.parametrize(("name", "value"), [("num_episodes", 0), ("num_episodes", -1), ("max_steps", -1)])
def test_bad_numbers_are_refused(name: str, value: int) -> None:
    options = {"num_episodes": 4} | {name: value}
    with pytest.raises(ValueError, match=f"{name}={value} must be a positive integer"):
        make_evaluator(AGENT, envs.make("podium/Corridor"), **options)


def test_policies_act_alone_in_batches_and_with_memory() -> None:
    env = envs.make("podium/RepeatFirst")
    agent = ppo.make(ppo.Config(hidden_sizes=(8,), memory="gru", memory_size=4))
    policy = Policy(agent, agent.actor(agent.init(jax.random.key(0), env.spec)), env.spec)
    obs = np.eye(4, dtype=np.float32)
    action, carry = policy.act(obs)
    assert action.shape == (4,) and carry.shape == (4, 4)
    assert int(policy(obs[2])) == int(action[2])
    _, later = policy.act(obs, carry)
    assert not np.allclose(later, carry)
    _, begun_again = policy.act(obs, carry, first=np.ones(4, bool))
    np.testing.assert_allclose(begun_again, carry, rtol=1e-6)
    with pytest.raises(ValueError, match="sampling needs a key"):
        policy.act(obs, greedy=False)
    assert policy.act(obs, key=jax.random.key(1), greedy=False)[0].shape == (4,)


def test_evaluate_takes_a_policy_and_gives_numbers() -> None:
    env = envs.make("podium/Corridor")
    policy = Policy(AGENT, AGENT.actor(AGENT.init(jax.random.key(0), env.spec)), env.spec)
    first, again = (podium.evaluate(policy, env, num_episodes=4, seed=3, greedy=False) for _ in range(2))
    assert first == again and set(first) >= {"eval_return", "eval_length", "eval_unfinished"}
